"""Softmax, its logarithm, log_prob and their gradients: every kernel, forced by name, against the reference."""

import ctypes
import math
import os
import pathlib
import re
import shlex
import subprocess

import numpy as np
import pytest

import pydet
import reference
from capi import Tensor, ffi, last_error, lib, options, random, status_name
from cases import DTYPES, assert_same_bits, data
from conftest import threads

# Around pieces of 128 elements, the 2048 lanes of the sum, and the teams of the GPU's kernels, which hold 16384.
WIDTHS = [1, 2, 7, 8, 9, 63, 64, 127, 128, 129, 255, 256, 264, 512, 520, 1000, 1024, 2047, 2048, 2049, 4096, 4104, 6150]
SHAPES = [(m, n) for n in WIDTHS for m in (1, 3)] + [(m, 40) for m in (0, 2, 4, 5, 17, 130)]
LONG_SHAPES = [(2, 8192), (2, 8200), (1, 16384), (2, 16392), (1, 33000), (1, 70001)]
KINDS = ("normal", "wide", "extremes", "specials")


def indices(m, n, seed, dtype=np.int64):
    """Columns, some of them none of the row's."""
    return np.random.default_rng(seed).integers(-1, n + 1, m).astype(dtype)


def check_forward(kernel, dtype, shapes):
    """kernel: an object with pydet's functions."""
    for seed, (m, n) in enumerate(shapes):
        x = data(KINDS[seed % 4], (m, n), DTYPES[dtype], seed)
        what = f"{m}x{n} {KINDS[seed % 4]}"
        assert_same_bits(kernel.softmax(x), reference.softmax(x), f"softmax {what}")
        assert_same_bits(kernel.log_softmax(x), reference.log_softmax(x), f"log_softmax {what}")
        index = indices(m, n, seed, (np.int64, np.int32)[seed % 2])
        assert_same_bits(kernel.log_prob(x, index), reference.log_prob(x, index), f"log_prob {what}")
        gradient = data("normal", (m,), np.float32, seed)
        assert_same_bits(
            kernel.log_prob_backward(gradient, x, index),
            reference.log_prob_backward(gradient, x, index),
            f"log_prob_backward {what}",
        )


def check_backward(kernel, dtype, shapes):
    for seed, (m, n) in enumerate(shapes):
        x = data(KINDS[seed % 2], (m, n), DTYPES[dtype], seed)
        dy = data(KINDS[seed % 4], (m, n), DTYPES[dtype], seed + 1)
        for log in (False, True):
            y = (reference.log_softmax if log else reference.softmax)(x)
            result = (kernel.log_softmax_backward if log else kernel.softmax_backward)(dy, y)
            assert_same_bits(result, reference.softmax_backward(dy, y, log), f"{m}x{n} {KINDS[seed % 4]} log {log}")


def test_forward(softmax_kernel):
    check_forward(softmax_kernel, softmax_kernel.dtype, SHAPES + LONG_SHAPES[::3])


def test_backward(softmax_backward_kernel):
    check_backward(softmax_backward_kernel, softmax_backward_kernel.dtype, SHAPES + LONG_SHAPES[::3])


def test_many_rows_on_several_threads():
    x, dy = random((700, 500)), random((700, 500), seed=1)
    y = reference.softmax(x)
    for count in (1, 2, 5):
        with threads(count):
            assert_same_bits(pydet.softmax(x), y)
            assert_same_bits(pydet.softmax_backward(dy, y), reference.softmax_backward(dy, y))


# ---- Promises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_has_the_bits_it_has_in_the_batch(dtype):
    x = data("normal", (9, 3001), DTYPES[dtype], 3)
    for function in (pydet.softmax, pydet.log_softmax):
        whole = function(x)
        for r in range(9):
            assert_same_bits(function(x[r : r + 1]), whole[r : r + 1])
            assert_same_bits(function(x[r]), whole[r])
        assert_same_bits(
            function(np.ascontiguousarray(x.reshape(3, 3, -1).swapaxes(0, 1))).swapaxes(0, 1), whole.reshape(3, 3, -1)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 7, 8, 63, 129, 2047, 2048, 2500])
def test_a_masked_or_absent_tail_changes_nothing(dtype, length):
    x = data("normal", (4, length), DTYPES[dtype], length)
    for more in (1, 8, 100, 2048, 5000):
        masked = np.full((4, length + more), -np.inf, DTYPES[dtype])
        masked[:, :length] = x
        for function in (pydet.softmax, pydet.log_softmax):
            assert_same_bits(function(masked)[:, :length], function(x), f"{more} masked")
        assert not pydet.softmax(masked)[:, length:].astype(np.float32).any()


def test_a_sum_in_another_order_would_be_seen():
    """The control of the test above: a plain sum over the row gives other bits in most rows."""
    x = random((64, 3000))
    e = np.exp(x - x.max(-1, keepdims=True))
    assert np.count_nonzero(e / e.sum(-1, keepdims=True) != pydet.softmax(x)) > 64 * 3000 // 10


def test_log_prob_is_a_column_of_log_softmax():
    x, index = random((50, 777)), indices(50, 776, 1)
    columns = pydet.log_softmax(x)[np.arange(50), index]
    assert_same_bits(pydet.log_prob(x, index)[index >= 0], columns[index >= 0])


def test_special_rows():
    inf, nan = np.inf, np.nan
    for row in ([-inf, -inf], [nan, 1], [inf, 1], [inf, -inf]):
        assert np.isnan(pydet.softmax(np.array([row], np.float32))).all(), row
    assert pydet.softmax(np.array([[3.5]], np.float32)).tolist() == [[1.0]]
    zeros = pydet.log_softmax(np.array([[-0.0], [7]], np.float32))  # -0 less +0 is -0: the maximum is never -0
    assert zeros.view(np.uint32).tolist() == [[0x80000000], [0]]


# ---- exp and log ---------------------------------------------------------------------------------------------------


def ulps(actual, exact):
    exponent = np.frexp(exact)[1]
    return np.abs(actual - exact) / np.maximum(np.ldexp(1.0, exponent - 24), 2.0**-149)


def test_exp_is_within_an_ulp_of_the_exact_value():
    """The reference's formula, which the kernels equal to the bit above."""
    words = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32)
    x = words.view(np.float32)
    x = x[(x > -104) & (x < 88.7)]
    error = ulps(reference.exp(x).astype(np.float64), np.exp(x.astype(np.float64)))
    assert 0.6 < error.max() <= 0.88


def test_log_is_within_an_ulp_of_the_exact_value():
    x = np.arange(0x3F800000, 0x7F800000, 997, dtype=np.uint32).view(np.float32)
    exact = np.log(x.astype(np.float64))
    error = ulps(reference.log(x).astype(np.float64), exact)[exact != 0]
    assert 0.6 < error.max() <= 0.81


def test_softmax_is_close_to_the_exact_one():
    x = random((20, 5000)) * 4
    exact = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    relative = np.abs(pydet.softmax(x) / exact - 1).max()
    assert relative <= 4e-6, relative  # x - max is rounded: 2^-24 of up to 40
    assert np.abs(pydet.log_softmax(x) - np.log(exact)).max() <= 4e-6
    assert math.isclose(float(pydet.softmax(x).astype(np.float64).sum(-1).mean()), 1, rel_tol=1e-6)


# ---- Refusals ------------------------------------------------------------------------------------------------------


def test_python_sentences():
    x = random((4, 8))
    cases = [
        (lambda: pydet.softmax(x.astype(np.float64)), "softmax: x", "want float32, bfloat16 or float16"),
        (lambda: pydet.softmax(x, out=x), "y shares memory with x"),
        (lambda: pydet.softmax(random((0, 0))), "want a last dimension of 1 or more"),
        (lambda: pydet.softmax_backward(x, random((4, 7))), "dy is 4x8, want 4x7"),
        (lambda: pydet.log_prob(x, np.zeros(3, np.int64)), "index is 3, want 4"),
        (lambda: pydet.log_prob(x, np.zeros((4, 1), np.int64)), "index has 2 dimensions, want 1"),
        (lambda: pydet.log_prob(x, np.zeros(4, np.int16)), "want int32 or int64"),
        (lambda: pydet.log_prob(x, np.zeros(8, np.int64)[::2]), "want it contiguous"),
        (lambda: pydet.log_prob(x, np.zeros(4, np.int64), out=np.zeros(4, np.float16)), "log_prob is float16"),
        (lambda: pydet.log_prob_backward(np.zeros(5, np.float32), x, np.zeros(4, np.int64)), "dlog_prob is 5, want 4"),
        (lambda: pydet.softmax(x, kernel="cpu_rmsnorm_scalar"), "is not a softmax kernel"),
    ]
    for call, *parts in cases:
        with pytest.raises(pydet.Error) as caught:
            call()
        for part in parts:
            assert part in str(caught.value), str(caught.value)


def test_c_refuses_and_touches_nothing():
    x, y = Tensor(random((4, 8))), Tensor(np.full((4, 8), 7, np.float32))
    wrong = options("pydet_softmax_options", log=2)
    assert status_name(lib.pydet_softmax(ffi.NULL, x.c, y.c, wrong)) == "PYDET_INVALID_VALUE"
    assert "options.log is 2, want 0 or 1" in last_error()
    reserved = options("pydet_softmax_options", reserved=1)
    assert status_name(lib.pydet_softmax(ffi.NULL, x.c, y.c, reserved)) == "PYDET_INVALID_VALUE"
    assert status_name(lib.pydet_softmax(ffi.NULL, x.c, ffi.NULL, ffi.NULL)) == "PYDET_NULL_POINTER"
    assert status_name(lib.pydet_log_prob(ffi.NULL, x.c, ffi.NULL, y.c, ffi.NULL)) != "PYDET_OK"


def test_an_index_that_lies_askew_is_refused():
    memory = ctypes.create_string_buffer(64)
    address = ctypes.addressof(memory) // 8 * 8 + 4
    index = np.frombuffer((ctypes.c_char * 32).from_address(address), np.int64)
    with pytest.raises(pydet.Error, match="want a multiple of 8 bytes"):
        pydet.log_prob(random((4, 8)), index)


@pytest.mark.parametrize("flags, step", [(["-O2"], 4001), (["-O3", "-march=native"], 61)])
def test_exps_of_what_is_below_0_by_other_steps(flags, step, tmp_path):
    """What the CUDA kernels do in place of exp; by hand, tests/exps.cpp tried all fp32 numbers."""
    root, program = pathlib.Path(__file__).resolve().parent.parent, tmp_path / "exps"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-ffp-contract=off", *flags]
    command += [f"-I{root}/native", f"-I{root}/native/include", str(root / "tests/exps.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)
    said = subprocess.run([program, str(step)], check=True, capture_output=True, text=True).stdout
    numbers, differ = map(int, re.findall(r"\d+", said))
    assert numbers > 500_000 and differ == 0, said
