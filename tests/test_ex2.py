"""Hopper's ex2.approx.ftz.f32 and the other exponentials of attention, as the CPU computes them."""

import os
import pathlib
import shlex
import subprocess

import numpy as np
import pytest

import pydet
import reference_attention
from cases import assert_same_bits, data

ROOT = pathlib.Path(__file__).resolve().parent.parent
VECTORS = ["-O3", "-mavx2", "-mfma", "-mf16c"]
# `ex2 hash STEP`. With 1, of all 2^32 numbers, of which an H100 and an H200 gave the same results as this function.
HASHES = {1: "71e00500d8847df7", 251: "37a8b51611f8d174"}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """program(flags, *arguments): what tests/ex2.cpp says, compiled so."""
    folder = tmp_path_factory.mktemp("ex2")

    def run(flags, *arguments):
        path = folder / f"ex2{len(flags)}"
        if not path.exists():
            command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-ffp-contract=off", *flags]
            command += [f"-I{ROOT}/native", f"-I{ROOT}/native/include", str(ROOT / "tests/ex2.cpp"), "-o", str(path)]
            subprocess.run(command, check=True)
        return subprocess.run([path, *map(str, arguments)], check=True, capture_output=True, text=True).stdout.split()

    return run


FLAGS = [["-O2"]]
if "avx2" in (pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""):
    FLAGS.append(VECTORS)
each = pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "vectors" if flags is VECTORS else "plain")


@each
def test_the_recorded_hash(program, flags):
    """Every 251st fp32 number; all of them where PYDET_TEST_ALL_NUMBERS is set (make numbers; 36 s)."""
    for step in (251, 1) if os.environ.get("PYDET_TEST_ALL_NUMBERS") and flags is VECTORS else (251,):
        assert program(flags, "hash", step)[0] == HASHES[step], step


def test_words_of_32_bits_lose_nothing(program):
    """The sum of 40 bits in two words, for all 2^23 fractions, against the formula of NUMERICS.md."""
    assert program(FLAGS[-1], "wide") == ["0"]


@each
def test_errors(program, flags):
    fine, coarse, tanh = map(float, program(flags, "ulp"))
    assert fine <= 1.0 and coarse <= 1.02e-4 and tanh <= 1.3


def test_the_reference_has_the_same_function():
    """By the library: the sum of the weights of two keys, the second so far below the first."""
    x = -np.abs(data("normal", (4000,), np.dtype(np.float32))) * np.float32(40)
    q, k = np.zeros((4000, 1, 1, 8), np.float16), np.zeros((4000, 1, 2, 8), np.float16)
    bias = np.stack([np.zeros_like(x), x / reference_attention.LOG2E], -1)[:, None, None]
    _, lse = pydet.attention(q, k, k, bias=bias, arithmetic="sm90", return_lse=True)
    weight = reference_attention.ex2(bias[:, 0, 0, 1] * reference_attention.LOG2E)
    assert_same_bits(lse[:, 0, 0], reference_attention.log(np.float32(1) + weight), "lse")
    assert np.abs(weight / np.exp2(x.astype(np.float64)) - 1)[x > -100].max() < 1e-5
