"""Runs vLLM for check_vllm.py, in a process of its own: reads jobs as JSON from standard input, and writes what came of
each to the file that is its argument.

A job is an engine and rounds of requests: {"engine": options of vllm.LLM, "rounds": [[{"prompt": [...], "sampling":
options of SamplingParams}]]}. An answer holds a list for each round, {"tokens": [...], "log_probs": [...], "prompt":
[...]} for each request, the seconds of each round, and vLLM's version; or {"error": the sentence}. A job may name a
file, "lock": the rounds of such jobs are run one at a time.
"""

import contextlib
import fcntl
import gc
import json
import os
import sys
import time
import traceback


@contextlib.contextmanager
def turn(job):
    """Alone among the processes whose jobs name the same file, where they do."""
    if "lock" not in job:
        yield
        return
    with open(job["lock"], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.05)  # another's


def answer(job):
    import vllm

    common = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
    common |= {"kv_cache_memory_bytes": 8 << 20, "block_size": 16, "disable_log_stats": False}
    with turn(job):
        engine = vllm.LLM(**common | job["engine"])
    rounds, seconds = [], []
    for requests in job["rounds"]:
        prompts = [{"prompt_token_ids": x["prompt"]} for x in requests]
        common = {"detokenize": False, "logprobs": 0, "prompt_logprobs": 0}
        params = [vllm.SamplingParams(**common | x["sampling"]) for x in requests]
        with turn(job):
            start = time.perf_counter()
            found = engine.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        rounds.append([of_request(x) for x in found])
    metrics = {x.name: x.value for x in engine.get_metrics() if hasattr(x, "value")}
    engine.llm_engine.engine_core.shutdown()
    return {"rounds": rounds, "metrics": metrics, "seconds": seconds, "version": vllm.__version__}


def of_request(found):
    out, prompt = found.outputs[0], found.prompt_token_ids
    given = found.prompt_logprobs or []
    return {
        "tokens": list(out.token_ids),
        "log_probs": [row[token].logprob for row, token in zip(out.logprobs or [], out.token_ids)],
        "prompt": [row[token].logprob for row, token in zip(given[1:], prompt[1:])],
    }


def main():
    answers = []
    for job in json.load(sys.stdin):
        try:
            answers.append(answer(job))
        except Exception as problem:
            traceback.print_exc()
            while problem.__cause__ is not None:
                problem = problem.__cause__
            answers.append({"error": f"{type(problem).__name__}: {problem}"})
        with contextlib.suppress(Exception):
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        gc.collect()
        with open(sys.argv[1], "w") as file:
            json.dump(answers, file)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    main()
