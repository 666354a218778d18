"""SGLang's log-probabilities and tokens are those of the converted Transformers model: `make engines-check` runs this,
in an environment that has SGLang. No other target does."""

import absent  # noqa: F401, I001 -- before Transformers

import functools
import json
import os
import pathlib
import subprocess
import sys

import models
import pytest

ENGINE = pathlib.Path(__file__).with_name("sglang_engine.py")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "starcoder2")
CASES = [(name, "transformers", "bfloat16") for name in FAMILIES]
CASES += [("llama", "transformers", "float32"), ("mistral", "transformers", "float16")]
CASES += [("llama", "sglang", "bfloat16"), ("qwen2", "sglang", "bfloat16"), ("qwen3", "sglang", "float32")]
COUNT = sum(models.LENGTHS) - 4 + 8 * 4


def run(jobs, tmp, **environment):
    answers = pathlib.Path(tmp) / "answers.json"
    given = {"OMP_NUM_THREADS": "2", "PYDET_SGLANG": "1"}
    done = subprocess.run(
        [sys.executable, ENGINE, answers],
        input=json.dumps(jobs),
        text=True,
        capture_output=True,
        env=os.environ | given | environment,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(answers.read_text())


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    return str(tmp_path_factory.mktemp("engines"))


def job(tmp, name, by="transformers", dtype="bfloat16", rounds=(), spawn=False, **more):
    engine = {"model_path": models.folder(name, tmp), "model_impl": by, "dtype": dtype} | more
    return {"engine": engine, "rounds": list(rounds), "spawn": spawn}


compare = functools.partial(models.compare, scaled=True)


# ---- Families --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def families(tmp):
    """Together, and the first two alone."""
    asked = models.requests(models.prompts())
    rounds = [asked, *([x] for x in asked[:2])]
    return dict(zip(CASES, run([job(tmp, *case, rounds) for case in CASES], tmp), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_log_probabilities_and_tokens(families, tmp, case):
    answer, (name, _, dtype), asked = families[case], case, models.requests(models.prompts())
    assert "error" not in answer, answer["error"]
    together, *alone = answer["rounds"]
    assert [x[0] for x in alone] == together[:2]
    assert compare(models.converted(models.folder(name, tmp), dtype), asked, together) == (0, 0, COUNT)


# ---- What a scheduler does -------------------------------------------------------------------------------------------


def test_chunks_and_a_prefix_cache(tmp):
    """A prefill in chunks of 16 tokens; prompts that begin alike, of which the cache is hit."""
    plain, alike = models.prompts(), models.prompts((9, 20, 31, 7), 64)
    without = {"prompt_logprobs": None}
    rounds = [models.requests(plain), models.requests(alike, 8, **without), models.requests(alike, 8, **without)]
    jobs = [job(tmp, x, dtype="float32", rounds=rounds, chunked_prefill_size=16) for x in ("llama", "mistral")]
    for asked, answer in zip(jobs, run(jobs, tmp), strict=True):
        assert "error" not in answer, answer["error"]
        model = models.converted(asked["engine"]["model_path"], "float32")
        for requests, found in zip(rounds, answer["rounds"], strict=True):
            assert compare(model, requests, found)[:2] == (0, 0)
        assert sum(x["cached"] for x in answer["rounds"][2]) >= 3 * 64


def test_retraction(tmp):
    """Sequences are thrown out of the pool and computed again, by SGLang's own switch, every few steps."""
    asked = models.requests(models.prompts(), 24, prompt_logprobs=None)
    jobs = [job(tmp, x, dtype="float32", rounds=[asked]) for x in ("llama", "mistral")]
    for given, answer in zip(jobs, run(jobs, tmp, SGLANG_TEST_RETRACT="1"), strict=True):
        assert "error" not in answer, answer["error"]
        model = models.converted(given["engine"]["model_path"], "float32")
        assert compare(model, asked, answer["rounds"][0])[:2] == (0, 0)
        assert sum(x["retracted"] for x in answer["rounds"][0]) > 0


def test_processes_of_their_own_load_the_plugin(tmp):
    """By its entry point, with settings from the variable."""
    asked = models.requests(models.prompts())
    given = job(tmp, "llama", rounds=[asked], spawn=True)
    (answer,) = run([given], tmp, PYDET_SGLANG="arithmetic=ieee,kv_chunk=128")
    assert "error" not in answer, answer["error"]
    assert "modules are pydet's" in answer["log"]
    assert compare(models.converted(given["engine"]["model_path"], "bfloat16"), asked, answer["rounds"][0])[:2] == (
        0,
        0,
    )


def test_without_the_variable_nothing_is_pydets(tmp):
    """And the comparison finds it: SGLang's own steps differ from the model."""
    asked = models.requests(models.prompts((5, 90)))
    asked = [x | {"sampling": {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}} for x in asked]
    given = job(tmp, "llama", rounds=[asked], attention_backend="torch_native")
    (answer,) = run([given], tmp, PYDET_SGLANG="0")
    assert "error" not in answer, answer["error"]
    assert "pydet." not in answer["log"]
    model = models.converted(given["engine"]["model_path"], "bfloat16")
    asked = [x | {"sampling": x["sampling"] | {"seed": 0}} for x in asked]
    wrong, _, count = compare(model, asked, answer["rounds"][0])
    assert wrong > count // 2


# ---- Refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    (
        "llama",
        {"attention_backend": "torch_native"},
        "the attention backends are torch_native, want attention_backend=",
    ),
    ("gemma2", {}, "LogitsProcessor: it caps logits at 30.0: logits_processor\nwant nothing, or strict=0"),
    ("gemma", {"by": "sglang"}, "SGLang's own GemmaForCausalLM was not compared with Transformers'"),
    ("llama", {"enable_torch_compile": True}, "the model would be compiled, want enable_torch_compile=False"),
    ("llama", {"json_model_override_args": '{"head_dim": 20}'}, "it has heads of size 20, want a multiple of 8"),
]


@pytest.fixture(scope="module")
def refused(tmp):
    return run([job(tmp, name, **{"dtype": "float32"} | more) for name, more, _ in REFUSED], tmp)


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda i: "-".join([REFUSED[i][0], *REFUSED[i][1]]))
def test_refusals(refused, case):
    assert REFUSED[case][2] in refused[case].get("error", "nothing")
