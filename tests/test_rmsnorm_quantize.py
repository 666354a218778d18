"""rmsnorm_quantize: every kernel, forced by name, against the reference of the two calls, and against these."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

import pydet
import reference
import reference_fp8
from cases import DTYPES, assert_same_bits, data
from conftest import threads, unusual_float_environment
from reference import FLOAT32
from reference_fp8 import E4M3, E5M2, E8M0

# Groups of 128 and vectors of 8, one beside each, every team of the GPUs' kernels, lanes that wrap around.
WIDTHS = [1, 7, 8, 9, 56, 64, 72, 127, 128, 129, 136, 248, 256, 264, 504, 512, 520, 1016, 1024, 1032, 2040, 2048, 2056]
LONG = [2049, 3072, 3080, 4096, 4104, 6144, 6152, 8192, 8200, 10240, 12288, 12296, 14336, 14344, 16384, 16392]
SHAPES = [(m, n) for m, n in zip(itertools.cycle([1, 2, 3, 5, 9, 33]), WIDTHS, strict=False)] + [(2, n) for n in LONG]
MANY = [(260, 3072), (259, 4096)]  # which GPUs have by other teams


def case_of(m, n, dtype, index, kind="normal"):
    """Operands and options of case `index`: whatever may be given comes and goes."""
    x = data(kind, (m, n), DTYPES[dtype], index)
    weight = None if index % 4 == 3 else data("normal", (n,), list(DTYPES.values())[index % 3], index + 1)
    scale_dtype, power_of_two = [(FLOAT32, False), (E8M0, False), (FLOAT32, True)][index % 3]
    options = {"eps": float(np.float32([1e-6, 0.0, 1e-5][index % 3])), "granularity": ["row", "group"][index % 2]}
    options |= {"dtype": [E4M3, E5M2][index // 2 % 2], "weight_offset": float(index % 2)}
    if index % 5 < 3:
        options["residual"] = data(kind, (m, n), FLOAT32 if index % 7 == 1 else DTYPES[dtype], index + 2)
    if index % 6 == 5:
        options["scale"] = np.array([0.01, 3.0, 1e-30, np.inf, np.nan, 0.0, -2.0][index % 7], np.float32)
        del options["granularity"]
    else:
        options |= {"scale_dtype": scale_dtype, "power_of_two": power_of_two}
    return x, weight, options


def two_calls(norm, quantize, x, weight, options):
    """(q, scale) or (q, scale, sum), y and rstd, by a norm and a quantisation."""
    of_norm = {name: options[name] for name in ("eps", "weight_offset", "residual") if name in options}
    y, rstd, *total = norm(x, weight, **of_norm)
    of_q = {name: value for name, value in options.items() if name not in of_norm}
    if "scale" in options:
        of_q["granularity"] = "tensor"
    q, scale = quantize(y, **of_q)
    return (q, scale, *total), y, rstd


def check(functions, dtype, shapes=SHAPES, kinds=("normal", "wide", "extremes", "specials", "tiny"), most=None):
    kinds = itertools.cycle(kinds)
    for index, (m, n) in enumerate(shapes):
        x, weight, options = case_of(m, n, dtype, index, next(kinds))
        if most is not None and options.get("residual", x).dtype != x.dtype and not most:
            del options["residual"]
        want, want_y, want_rstd = two_calls(reference.rmsnorm, reference_fp8.quantize, x, weight, options)
        y, rstd = (np.empty_like(x), np.empty(m, np.float32)) if index % 2 else (None, None)
        got = functions.rmsnorm_quantize(x, weight, y=y, rstd=rstd, **options)
        assert len(got) == len(want)
        what = f"{m}x{n}, case {index} {options}"
        for name, mine, theirs in zip(("q", "scale", "sum"), got, want, strict=False):
            assert_same_bits(np.asarray(mine), np.asarray(theirs), f"{name} of {what}")
        if index % 2:
            assert_same_bits(np.asarray(y), want_y, f"y of {what}")
            assert_same_bits(np.asarray(rstd), want_rstd, f"rstd of {what}")


def test_equals_reference(rmsnorm_quantize_kernel):
    check(rmsnorm_quantize_kernel, rmsnorm_quantize_kernel.dtype)


def test_extreme_numbers(rmsnorm_quantize_kernel):
    shapes = [(40, 1), (40, 9), (40, 130), (3, 2050)] * 6
    check(rmsnorm_quantize_kernel, rmsnorm_quantize_kernel.dtype, shapes, ["extremes", "specials", "tiny"])


def test_is_the_two_calls(rmsnorm_quantize_kernel):
    """Of many rows, by several threads, in a caller's rounding mode."""
    kernel = rmsnorm_quantize_kernel
    for m, n in ((300, 520), (9, 7168), (1000, 64)):
        x, weight, options = case_of(m, n, kernel.dtype, 6)
        want, _, _ = two_calls(pydet.rmsnorm, pydet.quantize, x, weight, options)
        for count in (1, 3):
            with threads(count), unusual_float_environment():
                got = kernel.rmsnorm_quantize(x, weight, **options)
            for mine, theirs in zip(got, want, strict=True):
                assert_same_bits(mine, theirs, f"{m}x{n}, {count} threads")


def test_a_row_does_not_depend_on_the_others(rmsnorm_quantize_kernel):
    kernel = rmsnorm_quantize_kernel
    x, residual = (data("wide", (257, 300), DTYPES[kernel.dtype], i) for i in range(2))
    for granularity in ("row", "group"):
        options = {"eps": 1e-6, "granularity": granularity}
        whole = kernel.rmsnorm_quantize(x, residual=residual, **options)
        for rows in ([0], [256], list(range(100, 230)), [7, 7, 3]):
            part = kernel.rmsnorm_quantize(x[rows], residual=residual[rows], **options)
            for mine, theirs in zip(part, whole, strict=True):
                assert_same_bits(mine, theirs[rows], granularity)


def check_strides(functions, dtype):
    """Rows of two strides, slices of a fused projection, scales that lie by groups, q whose rows have gaps."""
    whole = data("normal", (3, 5, 2, 264), DTYPES[dtype], 3)
    weight = data("normal", (264,), DTYPES[dtype], 4)
    for x in (whole[:, :, 0], whole[:, ::2, 1], np.swapaxes(whole, 0, 1)[:, :, 0], whole[0, 0, 0]):
        want, _, _ = two_calls(pydet.rmsnorm, pydet.quantize, x[None] if x.ndim == 1 else x, weight, GROUPS)
        lead = x.shape[:-1]
        q = np.empty((*lead, 280), E4M3)[..., :264]
        scale = np.moveaxis(np.empty((3, *lead), np.float32), 0, -1)
        got = functions.rmsnorm_quantize(x, weight, out=(q, scale), **GROUPS)
        for mine, theirs in zip(got, want, strict=True):
            assert_same_bits(np.ascontiguousarray(mine), theirs.reshape(mine.shape), str(x.shape))


GROUPS = {"eps": 1e-6, "granularity": "group"}


def test_strides(rmsnorm_quantize_kernel):
    check_strides(rmsnorm_quantize_kernel, rmsnorm_quantize_kernel.dtype)


def test_rows_of_none():
    q, scale, total = pydet.rmsnorm_quantize(X[:0], eps=0.0, residual=X[:0], granularity="group")
    assert q.shape == (0, 40) and scale.shape == (0, 1) and total.shape == (0, 40)


def test_products_take_what_it_makes():
    x, w = data("normal", (70, 300), np.dtype(np.float32), 1), data("normal", (150, 300), np.dtype(np.float32), 2)
    y = pydet.rmsnorm(x, eps=1e-6)[0]
    b, b_scale = pydet.quantize(w, granularity="block")
    a, a_scale = pydet.rmsnorm_quantize(x, eps=1e-6, granularity="group")
    want = pydet.scaled_gemm(*[pydet.quantize(y, granularity="group")[0], b.T], a_scale=a_scale, b_scale=b_scale.T)
    assert_same_bits(pydet.scaled_gemm(a, b.T, a_scale=a_scale, b_scale=b_scale.T), want)


X, W = np.ones((4, 40), np.float32), np.ones(40, np.float32)
Q, S = np.zeros((4, 40), E4M3), np.zeros((4, 1), np.float32)


REFUSED = [
    (lambda f: f(X, W, eps=-1.0), "eps is -1, want a finite number, 0 or more"),
    (lambda f: f(X, W[:3], eps=0.0), "weight is 3, want 40"),
    (lambda f: f(X, np.ones((4, 40), np.float32), eps=0.0), "weight is 4x40, want 40"),
    (lambda f: f(X, eps=0.0, granularity="block"), "options.granularity is 2, want 0 (row), 1 (group) or 3"),
    (lambda f: f(X, eps=0.0, granularity="tensor"), "scale is NULL, want a tensor"),
    (lambda f: f(X, eps=0.0, granularity="rows"), "granularity is 'rows', want one of row, group, block, tensor"),
    (lambda f: f(X, eps=0.0, dtype="float32"), "out is float32, want float8_e4m3fn or float8_e5m2"),
    (lambda f: f(X, eps=0.0, scale=S), "scale is 4x1, want ()"),
    (lambda f: f(X, eps=0.0, scale=S[0, 0].reshape(()), power_of_two=True), "options.power_of_two is 1, want 0 where"),
    (lambda f: f(X, eps=0.0, scale=np.ones((), np.float32), out=(Q, S)), "scale is given and out has one too"),
    (lambda f: f(X, eps=0.0, out=(Q, np.zeros((4, 2), np.float32))), "scale is 4x2, want 4x1"),
    (lambda f: f(X, eps=0.0, out=(Q, S, None, None)), "out has 4 members, want at most 3: q, scale and sum"),
    (lambda f: f(X, eps=0.0, out=Q[:3]), "out is 3x40, want 4x40"),
    (lambda f: f(X, eps=0.0, out=np.zeros((40, 4), E4M3).T), "out has stride 4 in its last dimension, want 1"),
    (lambda f: f(X, eps=0.0, y=np.zeros((4, 40), np.float16)), "y is float16, want float32 as x is"),
    (lambda f: f(X, eps=0.0, y=X), "y shares memory with x, want it apart"),
    (lambda f: f(X, eps=0.0, rstd=np.zeros(3, np.float32)), "rstd is 3, want 4"),
    (lambda f: f(X, eps=0.0, residual=np.ones((4, 40), np.float16)), "residual is float16, want float32 as x is"),
    (lambda f: f(X, eps=0.0, out=(None, None, X.copy())), "sum is given without residual, want both or neither"),
    (lambda f: f(np.ones((4, 0), np.float32), eps=0.0), "x is 4x0, want a last dimension of 1 or more"),
    (lambda f: f(X, eps=0.0, kernel="cpu_gemm"), "kernel is"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_refuses(call, said):
    with pytest.raises(pydet.Error, match=rf"^rmsnorm_quantize: .*{re.escape(said)}"):
        call(pydet.rmsnorm_quantize)


def test_negative_control():
    """What is quantised is the rounded y: the norm in fp32, quantised, has other bytes."""
    x = data("normal", (64, 256), np.dtype(ml_dtypes.bfloat16), 1)
    wide = pydet.rmsnorm(x.astype(np.float32), eps=1e-6)[0]
    unrounded = pydet.quantize(wide, granularity="group")[0]
    q = pydet.rmsnorm_quantize(x, eps=1e-6, granularity="group")[0]
    assert np.any(q.view(np.uint8) != unrounded.view(np.uint8))
