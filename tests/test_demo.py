"""The demo keeps its promises, learns, and its counts do find a backend that breaks them."""

import io
import json
import re

import numpy as np
import pytest

import pydet
from pydet import demo

SECONDS, STEPS = 0.5, 8


@pytest.fixture(scope="module", autouse=True)
def small_batch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "BATCH", 2 * demo.MICRO_BATCH)
        yield


@pytest.fixture(scope="module")
def result(small_batch):
    return demo.run(SECONDS, seed=0)


def counts(run):
    return [*run["log_probabilities"].values(), *run["gradients"].values()]


def test_pydet_counts_are_zero(result):
    numpy_run, pydet_run = result["runs"]
    assert counts(pydet_run) == [0] * 10
    assert len(counts(numpy_run)) == 10
    assert pydet_run["log_probability_elements"] == demo.BATCH * demo.BYTES
    assert result["kept"]


def test_training_reduces_the_loss(result):
    for run in result["runs"]:
        assert run["steps"] >= 1
        assert abs(run["first_loss"] - np.log(256)) < 0.2
    _, run = demo.measure(demo.Pydet(), demo.source_text(), seed=0, steps=STEPS)
    assert run["loss"] < run["first_loss"] - 1


def test_same_seed_same_model():
    text = demo.source_text()
    first, *_ = demo.train(demo.Pydet(), text, seed=3, steps=2)
    again, *_ = demo.train(demo.Pydet(), text, seed=3, steps=2)
    other, *_ = demo.train(demo.Pydet(), text, seed=4, steps=2)
    assert all(demo.differing(first[name], again[name]) == 0 for name in first)
    assert demo.differing(first["w_up"], other["w_up"]) > 0


def test_sm90_replay(result):
    differing = result["sm90"]["differing"]
    assert differing["each row alone"] == 0
    assert differing["their audit"] == 0
    assert differing["their audit, one bit flipped"] == 1
    assert differing["arithmetic ieee"] > 0  # else the replay would show nothing
    assert result["sm90"]["kept"]


class OrderByRows(demo.Pydet):
    """Broken on purpose: large batches sum k in another order."""

    def gemm(self, a, b, bias=None):
        return pydet.gemm(a, b, bias=bias, k_chunk=64 if len(a) > 64 else None)


class AddsMicroBatches(demo.Pydet):
    """Broken on purpose: gradients of micro-batches are added instead of continued."""

    def gemm_db(self, a, dc, total):
        total += pydet.gemm_db(a, dc)

    def rmsnorm_backward(self, dy, x, weight, rstd, dresidual, dweight_total):
        dx, dweight = pydet.rmsnorm_backward(dy, x, weight, rstd, dresidual=dresidual)
        dweight_total += dweight
        return dx


def test_counts_find_an_order_that_depends_on_the_batch():
    _, run = demo.measure(OrderByRows(), demo.source_text(), seed=0, steps=1)
    assert all(count > 0 for count in run["log_probabilities"].values())


def test_counts_find_gradients_that_depend_on_micro_batches():
    _, run = demo.measure(AddsMicroBatches(), demo.source_text(), seed=0, steps=1)
    assert set(run["log_probabilities"].values()) == {0}  # the forward pass was left alone
    assert all(count > 0 for name, count in run["gradients"].items() if name.startswith("w_"))


def test_broken_promise_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(demo, "Pydet", OrderByRows)
    assert demo.main(["--seconds", "0.1"]) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_table(result, capsys):
    demo.report(result)
    table = capsys.readouterr().out
    assert "one token at a time" in table and "Every count that pydet promises is 0." in table


def test_the_result_is_drawn(result):
    lines = demo.drawn(result).splitlines()[2:]
    ways = len(result["runs"][0]["log_probabilities"]) + 1
    assert len(lines) == 2 * ways and all(line.count("|") == 2 for line in lines)
    assert all(line.endswith("      0") and "#" not in line for line in lines[1::2])  # pydet's
    one = {"name": "x", "log_probabilities": {"y": 1}, "log_probability_elements": 10**6}
    one |= {"gradients": {"w": 10}, "gradient_elements": 10}
    few, _, all_of_them, _ = (line for line in demo.drawn({"runs": [one, one]}).splitlines()[2:])
    assert few.count("#") == 1 and all_of_them.count("#") == demo.WIDTH_OF_A_BAR


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress(monkeypatch):
    """Of training and of counting: a bar that moves on a terminal, a line each elsewhere."""
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        demo.measure(demo.Pydet(), demo.source_text(), seed=0, steps=2)
        said = stream.getvalue()
        if stream.isatty():
            filled = [bar.count("#") for bar in re.findall(r"counting bits of pydet +\[([# ]*)\] ", said)]
            assert filled == sorted(filled) and len(set(filled)) > 15
            assert "training with pydet" in said and said.endswith("\r\033[K")
        else:
            assert said == "training with pydet ...\ncounting bits of pydet ...\n"


def test_json_and_exit_status(capsys):
    assert demo.main(["--seconds", "0.1", "--seed", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] is True
