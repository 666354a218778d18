"""XLA's handlers under wild attributes, shapes and counts: each refuses with a sentence or is right (xla_frames.py)."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pydet
import xla_frames as frames

ROOT = Path(__file__).parent.parent
TARGETS = sorted(frames.handlers())


def test_every_target_has_calls():
    assert sorted(frames.CALLS) == TARGETS


def test_jax_registers_every_target():
    pytest.importorskip("jax")
    from pydet.jax import calls

    assert sorted(calls._targets) == TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_refuses_or_is_right(target):
    """In a process of its own: what is wrong here may crash."""
    done = subprocess.run([sys.executable, frames.__file__, target], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_the_attack_sees_what_is_unwritten():
    attack = frames.Attack("softmax")
    attack.handler = lambda frame: None
    with pytest.raises(AssertionError, match="left results unwritten"):
        attack.attempt(frames.CALLS["softmax"][0])


def sentence(target, call, **attributes):
    changed = frames.dataclasses.replace(call, attributes=call.attributes | attributes)
    return frames.run(frames.Attack(target).handler, changed, 0)[0]


def test_sentences():
    norm, product = frames.CALLS["rmsnorm"][1], frames.CALLS["gemm"][0]
    for heads in (2**61, 2**62, -(2**63)):
        assert sentence("rmsnorm", norm, heads=heads) == f"rmsnorm: attribute heads is {heads}, want 0, or 3 as y has"
    wild = sentence("gemm", product, arithmetic=2**32)
    assert wild == "gemm: attribute arithmetic is 4294967296, want a number of 32 bits"
    assert sentence("gemm", product, has_bias=2) == "gemm: attribute has_bias is 2, want 0 or 1"
    assert sentence("gemm", product, unheard_of=0) == "gemm: attribute unheard_of is unknown"
    plain = frames.CALLS["rmsnorm"][2]
    scalar = frames.Call(((frames.F32, ()),), ((frames.F32, ()), (frames.F32, ())), plain.attributes | {"heads": 0})
    assert sentence("rmsnorm", scalar) == "rmsnorm: y is (), want 1 dimension or more"
    surplus = frames.dataclasses.replace(product, results=product.results * 2)
    assert sentence("gemm", surplus) == "gemm: got 2 results, want 1"


@pytest.mark.parametrize("target", [name for name in TARGETS if any(call.in_place for call in frames.CALLS[name])])
def test_memory_that_overlaps(target):
    """What is continued from may lie elsewhere, which the attack tries, but not half where its result does."""
    call = next(call for call in frames.CALLS[target] if call.in_place)
    sentence, _ = frames.run(frames.Attack(target).handler, call, 0, apart=4)
    assert sentence == f"{target}: XLA gave what is continued from and the result memory that overlaps"


def test_a_bias_of_rows_is_none_of_columns():
    """M x 1 beside M x M: as many elements as there are columns."""
    call = frames.gemm((5, 7), (7, 5), (5, 5), [(5, 1)], has_bias=1)
    refused, (got,) = frames.run(frames.Attack("gemm").handler, call, 0)
    read = lambda shape: frames.memory((frames.F32, shape)).view(np.float32)[: np.prod(shape)].reshape(shape)
    bias = np.ascontiguousarray(np.broadcast_to(read((5, 1)), (5, 5)))
    assert refused is None and got == pydet.gemm(read((5, 7)), read((7, 5)), bias=bias).tobytes()
