"""vLLM on a GPU beside the converted Transformers model there: `make vllm-gpu-check` runs this, in the environment of
$PYTHON, which has vLLM. It prints a table and fails where a log-probability or a token differs that must not.

Models have random weights, heads of 64 and of 128, and the type bfloat16. Each job is an engine, by vLLM's own model or
by Transformers', and rounds of requests: 32 together and some of them alone; prefills in chunks with a prefix cache;
and a cache too small for all, from which sequences are thrown out. The same jobs without the plugin must differ, else
the comparison finds nothing. Last come tokens a second, with the plugin and without, in turns."""

import argparse
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points

HERE, DEVICE = pathlib.Path(__file__).parent, "cuda"
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000}
SIZES |= {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS = {
    "llama": {"hidden_size": 512, "intermediate_size": 1408, "head_dim": 64},
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128},
}
CASES = [("llama", "transformers"), ("qwen3", "transformers"), ("llama", "vllm"), ("qwen3", "vllm")]
LENGTHS = [5 + (i * 37) % 300 for i in range(32)]
ALONE = (0, 7, 31)
TIMED = 64  # tokens of each of 32 sequences
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
GRAPHS |= {"max_model_len": 1024}
PAGE = 2 * 16 * 4 * 2  # bytes of one element of each head: keys and values, 16 tokens, 4 heads, 2 bytes


def make(name, folder):
    import torch
    import transformers

    kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[name]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES | MODELS[name]), dtype=torch.bfloat16)
        for parameter in model.parameters():  # larger than they are made, so that logits are not all alike
            if parameter.dim() > 1:
                parameter.data.mul_(3)
    model.save_pretrained(folder / name)


def prompts(lengths, shared=0):
    import random

    source = random.Random(1)
    first = [source.randrange(3, 32000) for _ in range(shared)]
    return [first + [source.randrange(3, 32000) for _ in range(n)] for n in lengths]


def rounds():
    """What is asked of an engine, by its name: options of the engine, and rounds."""
    from models import requests

    together = requests(prompts(LENGTHS), 32)
    without = {"prompt_logprobs": None}  # else vLLM computes the prompt whole
    alike = requests(prompts(LENGTHS[:16], 128), 16, **without)
    crowd = requests(prompts([40] * 16), 96, **without)
    return {
        "together, alone": ({}, [together, *([together[i]] for i in ALONE)]),
        "the same, in graphs": (GRAPHS, [together, *([together[i]] for i in ALONE)]),
        "chunks of 64, prefixes": ({"max_num_batched_tokens": 64}, [alike, alike]),
        "thrown out": ({"pages": 40, "max_model_len": 256}, [crowd]),
    }


def job(folder, name, by, options, asked):
    engine = {"model": str(folder / name), "model_impl": by, "dtype": "bfloat16", "max_num_seqs": 32}
    engine |= {"max_model_len": 1024, "gpu_memory_utilization": 0.05} | options
    pages = engine.pop("pages", 4000)
    size = pages * PAGE * MODELS[name]["head_dim"] * SIZES["num_hidden_layers"]
    return {"engine": engine | {"kv_cache_memory_bytes": size}, "rounds": asked}


def start(jobs, folder, tag, **environment):
    """The process of some jobs; what it says goes to a file."""
    given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"} | environment
    (folder / f"{tag}.jobs").write_text(json.dumps(jobs))
    with open(folder / f"{tag}.jobs") as source, open(folder / f"{tag}.log", "w") as log:
        command = [sys.executable, str(HERE / "vllm_engine.py"), str(folder / f"{tag}.answers")]
        return subprocess.Popen(command, stdin=source, stdout=log, stderr=log, env=os.environ | given)


def finish(process, folder, tag, jobs, end):
    """What came of jobs by a time: their answers, or why there is none."""
    why = "it ended before"
    try:
        process.wait(max(1.0, end - time.perf_counter()))
    except subprocess.TimeoutExpired:
        process.kill()
        why = "it took too long"
    path = folder / f"{tag}.answers"
    answers = json.loads(path.read_text()) if path.exists() else []
    return answers + [{"error": f"{why}; {folder / tag}.log"}] * (len(jobs) - len(answers))


def differing(found, other):
    """How many tokens and log-probabilities of two answers of one request are not the same."""
    return sum(a != b for key in ("tokens", "log_probs", "prompt") for a, b in zip(found[key], other[key]))


def main():
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--only", default="", help="names of models and of implementations, with commas between")
    asked.add_argument("--limit", type=float, default=600, help="seconds of all")
    asked.add_argument("--timing", action=argparse.BooleanOptionalAction, default=True)
    asked.add_argument("--folder", type=pathlib.Path, default=None, help="where models and logs lie")
    given = asked.parse_args()
    folder = given.folder or pathlib.Path(tempfile.mkdtemp(prefix="pydet-vllm-"))
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(HERE))
    import torch
    from models import compare, converted, requests

    if not torch.cuda.is_available():
        sys.exit("vllm-gpu-check: PyTorch sees no GPU here, want one")
    if not any(x.name == "pydet" for x in entry_points(group="vllm.general_plugins")):
        sys.exit("vllm-gpu-check: pydet is not installed in this environment, so vLLM does not find its plugin")
    for name in MODELS:
        make(name, folder)
    only = [x for x in given.only.split(",") if x]
    cases = [case for case in CASES if all(x in case for x in only)]
    kinds = rounds()
    clock = time.perf_counter()
    end = clock + given.limit
    runs = []  # a process for each model and implementation, and for some of them without the plugin
    for plugin, name, by in [(True, *case) for case in cases] + [(False, *case) for case in cases[:2]]:
        which = list(kinds) if plugin else ["together, alone"]
        jobs = [job(folder, name, by, *kinds[kind]) for kind in which]
        tag = f"{name}-{by}-{'with' if plugin else 'without'}"
        runs.append((plugin, name, by, which, jobs, tag, start(jobs, folder, tag, PYDET_VLLM=str(int(plugin)))))
    lock = os.open(folder / "turn", os.O_RDWR | os.O_CREAT)  # who holds it may time
    fcntl.flock(lock, fcntl.LOCK_EX)
    clocks = timed(folder, cases[-1], str(folder / "turn"), requests) if given.timing else []
    models = {name: converted(str(folder / name), "bfloat16", DEVICE) for name in dict.fromkeys(x for x, _ in cases)}
    table = []
    for plugin, name, by, which, jobs, tag, process in runs:
        found = finish(process, folder, tag, jobs, end - 40 * given.timing)
        table += [(plugin, name, by, kind, answer) for kind, answer in zip(which, found, strict=True)]
    name, took = torch.cuda.get_device_name(), time.perf_counter() - clock
    of = next((answer["version"] for *_, answer in table if "version" in answer), "?")
    print(f"{name}, PyTorch {torch.__version__}, vLLM {of}; engines ran {took:.0f} s")
    print(f"{'model':6} {'by':12} {'what':24} {'log-probabilities':>24} {'tokens':>12} {'alone':>6}  of the engine")
    bad = 0
    for plugin, name, by, kind, answer in table:
        label = f"{name:6} {by:12} {kind if plugin else 'without pydet':24}"
        if "error" in answer:
            bad += 1
            print(f"{label} FAILED: {answer['error'][:600]}")
            continue
        found = [compare(models[name], a, b) for a, b in zip(kinds[kind][1], answer["rounds"], strict=True)]
        wrong, strange, count = (sum(x) for x in zip(*found))
        tokens = sum(len(x["tokens"]) for a in answer["rounds"] for x in a)
        alone = 0
        if not kind.startswith(("chunks", "thrown")):
            first, *rest = answer["rounds"]
            alone = sum(differing(first[i], x[0]) for i, x in zip(ALONE, rest, strict=True))
        metrics = {x.partition(":")[2]: answer["metrics"].get(x, 0) for x in METRICS}
        seen = ", ".join(f"{value:.0f} {x}" for x, value in metrics.items() if value)
        print(f"{label} {wrong:>9} of {count:>11} {strange:>4} of {tokens:>4} {alone:>6}  {seen}", flush=True)
        if plugin:
            bad += wrong + strange + alone > 0
            bad += kind.startswith("chunks") and not metrics["prefix_cache_hits"]
            bad += kind == "thrown out" and not metrics["num_preemptions"]
        else:
            bad += not wrong
    os.close(lock)
    for on, jobs, tag, process in clocks:
        for answer, how in zip(finish(process, folder, tag, jobs, end), ("eager", "graphs")):
            label = "{} {}, 32 sequences".format(*cases[-1]) + f", {TIMED} tokens each, {how}, PYDET_VLLM={on}:"
            if "error" in answer:
                print(f"{label} FAILED: {answer['error'][:600]}")
                continue
            each = ", ".join(f"{32 * TIMED / x:.0f}" for x in answer["seconds"][1:])
            print(f"{label} tokens a second {each}", flush=True)
    print("0 differ" if not bad else f"{bad} of {len(table)} rows are not as they must be; logs in {folder}")
    return bool(bad)


METRICS = ("vllm:prefix_cache_hits", "vllm:num_preemptions")


def timed(folder, case, lock, requests):
    """Processes that sample greedily, 32 sequences, with the plugin and without: rounds in turns, once the lock is
    free; the first is not counted."""
    quick = {"logprobs": None, "prompt_logprobs": None, "temperature": 0.0}
    batch = [x | {"sampling": x["sampling"] | quick} for x in requests(prompts([64] * 32), TIMED)]
    jobs = [job(folder, *case, more, [batch] * 3) | {"lock": lock} for more in ({}, GRAPHS)]
    tags = [(on, f"timed-{on}") for on in ("0", "1")]
    return [(on, jobs, tag, start(jobs, folder, tag, PYDET_VLLM=on)) for on, tag in tags]


if __name__ == "__main__":
    sys.exit(main())
