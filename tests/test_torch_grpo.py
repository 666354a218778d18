"""examples/grpo.py in a few steps: rollout and trainer agree with pydet and not without, and its picture is one."""

import os
import runpy
import xml.etree.ElementTree

import pytest

from capi import ROOT

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")


def test_grpo(need, tmp_path, capsys):
    try:
        import pydet.torch.manager  # noqa: F401
    except ImportError as problem:
        need(False, "models", f"no Transformers 5.24 or later here ({problem})")
    example = runpy.run_path(str(ROOT / "examples" / "grpo.py"))
    runs = example["main"](["--steps", "3", "--out", str(tmp_path / "grpo.svg")])
    mine, stock = runs[True], runs[False]
    assert mine.tokens == stock.tokens == 3 * 8 * 8 * 8
    assert (mine.differing, mine.furthest, mine.shares) == (0, 0.0, [0.0] * 3)
    assert stock.differing > stock.tokens // 10 and stock.furthest > 1e-3
    assert all(0.3 < reward < 0.7 for run in runs.values() for reward in run.rewards)
    assert len({x for run in runs.values() for x in run.rewards}) > 3, "weights must move"
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("with pydet: 0 of 1536 log-probabilities differ, ratios up to 0 from 1;")
    assert said[1].startswith(f"without: {stock.differing} of 1536 log-probabilities differ")
    # neither the engine's batches nor the trainer's show in the weights
    train = example["train"]
    again = train(torch.bfloat16, True, 3, micro_batch=64, batch_tokens=24)
    assert (again.weights, again.rewards) == (mine.weights, mine.rewards)
    picture = xml.etree.ElementTree.parse(tmp_path / "grpo.svg").getroot()
    lines = [x for x in picture.iter() if x.tag.endswith("polyline")]
    assert len(lines) == 4 and all(len(x.get("points").split()) == 3 for x in lines)
    assert [x.text for x in picture.iter() if x.tag.endswith("text")][-3:] == ["with pydet", "without", "step"]
