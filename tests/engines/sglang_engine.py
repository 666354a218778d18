"""Runs SGLang for check_sglang.py, in a process of its own: reads jobs as JSON from standard input, and writes what
came of each to the file that is its argument.

A job is an engine and rounds of requests: {"engine": options of sglang.Engine, "rounds": [[{"prompt": [...],
"sampling": options}]]}. An answer holds a list for each round, {"tokens": [...], "log_probs": [...], "prompt": [...]}
for each request, or {"error": what its processes said last}; and {"log": all that they said}.
"""

import json
import multiprocessing
import os
import pathlib
import sys

import absent  # noqa: F401 -- before SGLang

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def answer(job):
    from sglang.srt.entrypoints.engine import Engine

    common = {"device": "cpu", "attention_backend": "pydet", "skip_tokenizer_init": True}
    common |= {"disable_cuda_graph": True, "max_total_tokens": 2048, "max_running_requests": 4, "log_level": "info"}
    common |= {"context_length": 256, "disable_hybrid_swa_memory": True}
    engine = Engine(**common | job["engine"])
    rounds = []
    for requests in job["rounds"]:
        whole = all(x["sampling"].get("prompt_logprobs", 0) is not None for x in requests)
        found = engine.generate(
            input_ids=[x["prompt"] for x in requests],
            sampling_params=[options(x["sampling"]) for x in requests],
            return_logprob=True,
            logprob_start_len=0 if whole else -1,
        )
        rounds.append([of_request(x, whole) for x in found])
    engine.shutdown()
    return {"rounds": rounds}


def options(given):
    names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    return {names.get(name, name): value for name, value in given.items() if name != "prompt_logprobs"}


def of_request(found, whole):
    about = found["meta_info"]
    return {
        "tokens": list(found["output_ids"]),
        "log_probs": [x[0] for x in about["output_token_logprobs"]],
        "prompt": [x[0] for x in about["input_token_logprobs"][1:]] if whole else [],
        "cached": about["cached_tokens"],
        "retracted": about["num_retractions"],
    }


def alone(job, file):
    """In a process of its own, which SGLang kills where its own processes fail; they have its imports, unless the job
    wants them to begin from nothing."""
    if not job.get("spawn"):
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *arguments, **options: None
    try:
        found = answer(job)
    except (Exception, SystemExit) as problem:
        found = {"error": f"{type(problem).__name__}: {problem}"}
    pathlib.Path(file).write_text(json.dumps(found))


def main():
    import sglang.srt.entrypoints.engine  # noqa: F401 -- once for all jobs

    answers, folder = [], pathlib.Path(sys.argv[1]).parent
    for i, job in enumerate(json.load(sys.stdin)):
        file, log = folder / f"answer{i}.json", folder / f"log{i}.txt"
        file.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            with open(log, "w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            try:
                alone(job, file)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        said = log.read_text()
        found = json.loads(file.read_text()) if file.exists() else {"error": said[said.rfind("Error: ") :][:2000]}
        answers.append(found | {"log": said})
    pathlib.Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
