"""layernorm and layernorm_backward: every kernel, forced by name, against the reference and against itself."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import pydet
import reference
from capi import Tensor, ffi, last_error, lib, options, status_name
from cases import DTYPES, assert_same_bits, data
from conftest import threads, unusual_float_environment
from test_gemm import check_workspace
from test_negative_controls import refuses, with_pieces
from test_rmsnorm import assert_all_same_bits, filled, two_level

# Around vectors, the 2048 lanes of the sums, the 512 columns of a join, and the teams of the GPU's kernels.
WIDTHS = [1, 2, 7, 8, 9, 15, 16, 17, 40, 64, 255, 256, 257, 512, 520, 1000, 1024, 2047, 2048, 2049, 4096, 4104]
SHAPES = [(m, n) for n in WIDTHS for m in (1, 3)]
SHAPES += [(m, 33) for m in (0, 15, 16, 17, 63, 64, 65, 255, 256, 257, 320, 600)] + [(40, 2056)]
LONG_SHAPES = [(2, 6150), (2, 8192), (2, 8200), (1, 16384), (2, 16392), (1, 33001)]
KINDS = ("normal", "wide", "extremes", "specials")
EPS = 1e-5


def case(m, n, dtype, index, kind):
    """x and the other operands and options of case `index`: they come and go, the vectors of each type."""
    types = list(DTYPES.values())
    x = data(kind, (m, n), DTYPES[dtype], index)
    if index % 3 == 1 and kind in ("normal", "wide"):
        x = reference.round_to(reference.widen(x) + np.float32(100), x.dtype)  # a large mean
    weight = None if index % 4 == 3 else data("normal", (n,), types[index % 3], index + 1)
    bias = None if index % 5 == 3 else data("normal", (n,), types[index // 2 % 3], index + 2)
    given = {"eps": float(np.float32([EPS, 1e-12, 0.0][index % 3]))}
    if weight is not None and index % 2:
        given["weight_offset"] = 1.0
    if index % 5 < 2:
        given["residual"] = data(kind, (m, n), DTYPES[dtype], index + 3)
    return x, weight, bias, given


def backward_case(m, n, dtype, index, kind):
    x, weight, bias, given = case(m, n, dtype, index, kind)
    eps = {"eps": given["eps"]}
    _, mean, rstd = reference.layernorm(x, **eps)
    made = {name: value for name, value in given.items() if name == "weight_offset"}
    if index % 3 == 0:
        made["dresidual"] = data(kind, (m, n), DTYPES[dtype], index + 4)
    if weight is not None:
        made |= {"dweight_dtype": list(DTYPES.values())[index // 4 % 3], "has_bias": bias is not None}
    return (data(kind, (m, n), DTYPES[dtype], index + 5), x, weight, mean, rstd), made


def check_forward(layernorm, dtype, shapes=SHAPES, kinds=KINDS, expect=reference.layernorm):
    for index, (m, n) in enumerate(shapes):
        kind = kinds[index % len(kinds)]
        x, weight, bias, given = case(m, n, dtype, index, kind)
        assert_all_same_bits(
            layernorm(x, weight, bias, **given), expect(x, weight, bias, **given), f"{m}x{n} {kind}, case {index}"
        )


def check_backward(layernorm_backward, dtype, shapes=SHAPES, kinds=KINDS, expect=reference.layernorm_backward):
    for index, (m, n) in enumerate(shapes):
        kind = kinds[index % len(kinds)]
        args, given = backward_case(m, n, dtype, index, kind)
        assert_all_same_bits(
            layernorm_backward(*args, **given), expect(*args, **given), f"{m}x{n} {kind}, case {index}"
        )


def test_forward(layernorm_kernel):
    check_forward(layernorm_kernel.layernorm, layernorm_kernel.dtype, SHAPES + LONG_SHAPES[::2])


def test_backward(layernorm_backward_kernel):
    kernel = layernorm_backward_kernel
    check_backward(kernel.layernorm_backward, kernel.dtype, SHAPES + LONG_SHAPES[::2])


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    m=st.integers(0, 40),
    n=st.integers(1, 5000),
    dtype=st.sampled_from(list(DTYPES)),
    index=st.integers(0, 119),
    kind=st.sampled_from(KINDS),
)
def test_any_shape_and_option(m, n, dtype, index, kind):
    """The library's own choice of kernel."""
    x, weight, bias, given = case(m, n, dtype, index, kind)
    assert_all_same_bits(
        pydet.layernorm(x, weight, bias, **given), reference.layernorm(x, weight, bias, **given), "forward"
    )
    args, given = backward_case(m, n, dtype, index, kind)
    assert_all_same_bits(
        pydet.layernorm_backward(*args, **given), reference.layernorm_backward(*args, **given), "backward"
    )


@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads(count):
    shapes = [(70, 2049), (600, 256)]
    with threads(count):
        check_forward(pydet.layernorm, "fp32", shapes)
        check_backward(pydet.layernorm_backward, "fp32", shapes)


def test_float_environment():
    with threads(2), unusual_float_environment() as still_set:
        x = data("normal", (300, 500), DTYPES["bf16"], 1)
        results = pydet.layernorm(x, eps=EPS)
        more = pydet.layernorm_backward(x, x, x[0], *results[1:])
        assert still_set()
    assert_all_same_bits(results, reference.layernorm(x, eps=EPS), "forward")
    assert_all_same_bits(more, reference.layernorm_backward(x, x, x[0], *results[1:]), "backward")


# ---- Values --------------------------------------------------------------------------------------------------------


def check_error(layernorm, dtype):
    """Against float64, for means of up to 1000 standard deviations. NaN is no small error."""
    for (m, n), shift in itertools.product([(5, 3), (4, 1000), (3, 10000)], [0.0, 10.0, 1000.0]):
        x = reference.round_to(
            reference.widen(data("normal", (m, n), DTYPES[dtype])) + np.float32(shift), DTYPES[dtype]
        )
        weight, bias = (data("normal", (n,), DTYPES[dtype], seed) for seed in (1, 2))
        y, mean, rstd = layernorm(x, weight, bias, eps=EPS)
        exact, w, b = (reference.widen(v).astype(np.float64) for v in (x, weight, bias))
        exact_mean, deviation = exact.mean(-1, keepdims=True), exact.std(-1, keepdims=True)
        exact_rstd = 1 / np.sqrt(deviation**2 + np.float64(np.float32(EPS)))
        size = np.abs(exact).mean(-1, keepdims=True)
        of_mean = 8 * 2.0**-24 * size  # beside the bound of NUMERICS.md, 16 roundings
        assert np.all(np.abs(mean[:, None] - exact_mean) <= of_mean)
        assert np.all(np.abs(rstd[:, None] / exact_rstd - 1) <= 12 * 2.0**-24 + (of_mean * exact_rstd) ** 2)
        xhat = (exact - exact_mean) * exact_rstd
        unit = 2.0 ** -(reference.FRACTION_BITS[DTYPES[dtype]] + 1)
        bound = (np.abs(xhat * w) + np.abs(b)) * (1.01 * unit + 20 * 2.0**-24) + of_mean * exact_rstd * np.abs(w)
        assert np.all(np.abs(reference.widen(y) - (xhat * w + b)) <= bound + 2.0**-24), (m, n, shift)


def test_error(layernorm_kernel):
    check_error(layernorm_kernel.layernorm, layernorm_kernel.dtype)


def in_one_pass(x, weight=None, bias=None, *, eps):
    """The mean of squares less the square of the mean, which loses the variance of a row with a large mean."""
    v = reference.widen(x)
    mean = v.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.maximum((v * v).mean(-1, keepdims=True) - mean * mean, np.float32(0)) + np.float32(eps))
    y = (v - mean) * rstd * reference.widen(weight) + reference.widen(bias)
    return reference.round_to(y, x.dtype), mean[:, 0], rstd[:, 0]


def test_controls():
    """Other formulas and orders are refused by the tests above."""
    check_error(reference.layernorm, "fp32")
    refuses(check_error, in_one_pass, "fp32")
    shapes = [(20, 2049), (40, 33), (20, 4100)]
    refuses(check_forward, with_pieces(reference.layernorm, ROW_LANES=1024), "fp32", shapes)
    refuses(check_backward, with_pieces(reference.layernorm_backward, ROW_LANES=1024), "fp32", shapes)
    refuses(check_backward, with_pieces(reference.layernorm_backward, DWEIGHT_CHAIN_ROWS=32), "fp32", shapes)


def test_a_constant_row_becomes_the_bias():
    """In bf16 its sum is exact, and so the mean is the constant."""
    x = np.repeat(data("wide", (30, 1), DTYPES["bf16"]), 3001, axis=1)
    bias = data("normal", (3001,), DTYPES["bf16"], 1)
    y, mean, _ = pydet.layernorm(x, None, bias, eps=EPS)
    assert_same_bits(y, np.broadcast_to(bias, x.shape))
    assert np.array_equal(mean, reference.widen(x[:, 0]))


def test_backward_error(layernorm_backward_kernel):
    kernel = layernorm_backward_kernel
    for m, n in [(5, 3), (40, 1000), (600, 30)]:
        x, dy = (data("normal", (m, n), DTYPES[kernel.dtype], seed) for seed in range(2))
        weight = data("normal", (n,), DTYPES[kernel.dtype], 2)
        _, mean, rstd = reference.layernorm(x, eps=EPS)
        dx, dweight, dbias = kernel.layernorm_backward(dy, x, weight, mean, rstd, dweight_dtype=np.float32)
        v, d, w, mu, r = (reference.widen(t).astype(np.float64) for t in (x, dy, weight, mean[:, None], rstd[:, None]))
        xhat, g = (v - mu) * r, d * w
        exact = r * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
        size = r * (
            np.abs(g) + np.abs(g).mean(-1, keepdims=True) + np.abs(xhat) * np.abs(g * xhat).mean(-1, keepdims=True)
        )
        unit = 2.0 ** -(reference.FRACTION_BITS[DTYPES[kernel.dtype]] + 1)
        assert np.all(np.abs(reference.widen(dx) - exact) <= size * (unit * 1.01 + 32 * 2.0**-24) + 2.0**-25)
        bound = 2.0**-24 * (35 + m / 256)
        assert np.all(np.abs(dweight - (d * xhat).sum(0)) <= bound * np.abs(d * xhat).sum(0))
        assert np.all(np.abs(dbias - d.sum(0)) <= bound * np.abs(d).sum(0))


# ---- Promises ------------------------------------------------------------------------------------------------------


def check_rows_alone(module, dtype):
    """A row's results are those of the row alone, in any order, and untouched by a NaN row."""
    for n in (33, 2500):
        x, dy = (data("normal", (40, n), DTYPES[dtype], seed) for seed in range(2))
        weight, bias = (data("normal", (n,), DTYPES[dtype], seed) for seed in (2, 3))

        def outputs_of(x, dy, weight=weight, bias=bias):
            y, mean, rstd = module.layernorm(x, weight, bias, eps=EPS)
            return y, mean, rstd, module.layernorm_backward(dy, x, weight, mean, rstd)[0]

        whole = outputs_of(x, dy)
        selections = [slice(r, r + 1) for r in range(40)] + [slice(0, 7), slice(1, None, 2)]
        for index in [*selections, np.argsort(reference.widen(dy)[:, 0], kind="stable")]:
            for one, other in zip(outputs_of(x[index], dy[index]), whole, strict=True):
                assert_same_bits(one, other[index], f"{n} wide, {index}")
        with_nan, with_nan_dy = x.copy(), dy.copy()
        with_nan[5, n // 2], with_nan_dy[5, 0] = np.nan, np.nan
        others = np.arange(40) != 5
        for one, other in zip(outputs_of(with_nan, with_nan_dy), whole, strict=True):
            assert_same_bits(one[others], other[others], "beside a NaN row")
            assert np.all(reference.bits(one[5]) == (0x7FFF if one.dtype.itemsize == 2 else 0x7FFFFFFF))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone(dtype):
    check_rows_alone(pydet, dtype)


def check_sums_continue(layernorm_backward, dtype):
    """Accumulated over micro-batches of any multiple of 256 rows, dweight and dbias have the bits of one call."""
    m, n = 1100, 37
    x, dy = data("normal", (m, n), DTYPES[dtype]), data("wide", (m, n), DTYPES[dtype], 1)
    weight = data("normal", (n,), DTYPES[dtype], 2)
    _, mean, rstd = reference.layernorm(x, eps=EPS)
    whole = layernorm_backward(dy, x, weight, mean, rstd, dweight_dtype=np.float32)[1:]
    for cuts in [[256], [1024], [256, 512, 768, 1024], [512, 512, 1024]]:
        sums = {"dweight": np.zeros(n, np.float32), "dbias": np.zeros(n, np.float32)}
        for start, stop in itertools.pairwise([0, *cuts, m]):
            part = slice(start, stop)
            layernorm_backward(dy[part], x[part], weight, mean[part], rstd[part], **sums, accumulate=True)
        assert_all_same_bits(tuple(sums.values()), whole, f"cut at {cuts}")
    alone = np.zeros(n, np.float32)
    layernorm_backward(dy, x, weight, mean, rstd, dbias=alone, accumulate=True)
    assert_same_bits(alone, whole[1], "dbias alone")


def test_sums_continue(layernorm_backward_kernel):
    check_sums_continue(layernorm_backward_kernel.layernorm_backward, layernorm_backward_kernel.dtype)


def test_strided_rows_and_guarded_outputs(layernorm_kernel):
    """Rows of two strides in every operand, each its own; what lies between the rows of the outputs stays."""
    dtype, backward = DTYPES[layernorm_kernel.dtype], layernorm_kernel.name.replace("layernorm", "layernorm_backward")
    for shape in [(3, 5, 33), (2, 9, 300), (1, 4, 7), (6, 1, 16), (1, 1, 1)]:
        x, residual, dy = (data("normal", shape, dtype, seed) for seed in range(3))
        weight, bias = (data("normal", shape[-1:], dtype, seed) for seed in (3, 4))
        expected = reference.layernorm(x, weight, bias, eps=EPS, residual=residual)
        memory, out = two_level(shape, dtype, 3, 11)
        guarded, expected_out = two_level(shape, dtype, 3, 11)
        expected_out[...] = expected[0]
        strided = {"residual": filled(residual, 0, 8), "out": out}
        results = layernorm_kernel.layernorm(filled(x, 1, 4), weight, bias, eps=EPS, **strided)
        assert_all_same_bits([np.array(r) for r in results[:3]], expected[:3], f"{shape}")
        assert_same_bits(np.array(results[3]), expected[3])
        assert np.array_equal(memory, guarded), f"{shape}: bytes around out changed"
        memory, dx = two_level(shape, dtype, 3, 11)
        expected_out[...] = reference.layernorm_backward(dy, x, weight, *expected[1:3])[0]
        pydet.layernorm_backward(filled(dy, 0, 1), filled(x, 7, 0), weight, *expected[1:3], out=dx, kernel=backward)
        assert np.array_equal(memory, guarded), f"{shape}: dx or the bytes around it"


def test_workspace(layernorm_backward_kernel):
    (dy, x, weight, mean, rstd), _ = backward_case(300, 70, layernorm_backward_kernel.dtype, 1, "normal")
    expected = reference.layernorm_backward(dy, x, weight, mean, rstd, dweight_dtype=np.float32)
    size = ffi.new("uint64_t *")
    assert lib.pydet_layernorm_backward_workspace(300, 70, size) == lib.PYDET_OK

    def call(workspace):
        dx, dweight, dbias = np.empty_like(x), np.empty(70, np.float32), np.empty(70, np.float32)
        place = {"workspace": ffi.from_buffer(workspace), "workspace_size": len(workspace)}
        made = options("pydet_layernorm_backward_options", kernel=layernorm_backward_kernel.name, **place)
        tensors = [Tensor(t).c for t in (dy, x, weight, mean, rstd)] + [ffi.NULL]
        tensors += [Tensor(t).c for t in (dx, dweight, dbias)]
        assert lib.pydet_layernorm_backward(ffi.NULL, *tensors, made) == lib.PYDET_OK, last_error()
        assert_all_same_bits((dx, dweight, dbias), expected, "with a workspace of its own")
        return dx.tobytes() + dweight.tobytes() + dbias.tobytes()

    check_workspace(call, size[0])


# ---- Refusals ------------------------------------------------------------------------------------------------------

X, W, R = np.ones((3, 8), np.float32), np.ones(8, np.float32), np.ones(3, np.float32)
SENTENCES = [
    (lambda: pydet.layernorm(X, W[:7], eps=EPS), "layernorm: weight is 7, want 8"),
    (lambda: pydet.layernorm(X, W, W[:7], eps=EPS), "layernorm: bias is 7, want 8"),
    (lambda: pydet.layernorm(X, W, X, eps=EPS), "layernorm: bias is 3x8, want 8"),
    (lambda: pydet.layernorm(X, eps=-1.0), "layernorm: eps is -1, want a finite number, 0 or more"),
    (lambda: pydet.layernorm(X, eps=EPS, weight_offset=float("nan")), "weight_offset is "),
    (lambda: pydet.layernorm(X, eps=EPS, out=X), "layernorm: y shares memory with x"),
    (lambda: pydet.layernorm(X, eps=EPS, out=(None, R, R)), "rstd shares memory with mean"),
    (lambda: pydet.layernorm(X, eps=EPS, out=(None, R.astype("f2"))), "mean is float16, want float32"),
    (lambda: pydet.layernorm(X, eps=EPS, out=(None,) * 5), "out has 5 members, want at most 4: y, mean, rstd and sum"),
    (lambda: pydet.layernorm(X, eps=EPS, residual=X[:2]), "residual is 2x8, want 3x8"),
    (lambda: pydet.layernorm(X[:, :0], eps=EPS), "want a last dimension of 1 or more"),
    (lambda: pydet.layernorm(X, eps=EPS, kernel="cpu_rmsnorm_scalar"), "is not a layernorm kernel"),
    (lambda: pydet.layernorm_backward(X, X, W, R[:2], R), "layernorm_backward: mean is 2, want 3"),
    (lambda: pydet.layernorm_backward(X, X, W, R, R.astype("f2")), "rstd is float16, want float32"),
    (lambda: pydet.layernorm_backward(X[:2], X, W, R, R), "dy is 2x8, want 3x8"),
    (lambda: pydet.layernorm_backward(X, X, W, R, R, accumulate=True), "accumulate needs dweight or dbias"),
    (lambda: pydet.layernorm_backward(X, X, W, R, R, has_bias=2), "has_bias is int, want True or False"),
    (
        lambda: pydet.layernorm_backward(X, X, W, R, R, dbias=np.ones(8, "f2"), accumulate=True),
        "dbias is float16, want float32 under accumulate",
    ),
    (lambda: pydet.layernorm_backward(X, X, W, R, R, dbias=W), "dbias shares memory with weight"),
]


@pytest.mark.parametrize("number", range(len(SENTENCES)))
def test_python_sentences(number):
    call, sentence = SENTENCES[number]
    before = [a.copy() for a in (X, W, R)]
    with pytest.raises(pydet.Error) as caught:
        call()
    assert sentence in str(caught.value)
    assert all(np.array_equal(a, b) for a, b in zip((X, W, R), before, strict=True))


def test_c_refuses_and_touches_nothing():
    x, w, r, y = Tensor(X), Tensor(W), Tensor(R), Tensor(np.full((3, 8), 7, np.float32))
    none = ffi.NULL

    def forward(residual=none, sum_=none, **fields):
        given = options("pydet_layernorm_options", **fields)
        return status_name(lib.pydet_layernorm(none, x.c, residual, w.c, none, y.c, none, none, sum_, given))

    assert forward(reserved=1) == "PYDET_INVALID_VALUE"
    assert forward(struct_size=12) == "PYDET_INVALID_VALUE" and "options.struct_size is 12, want 24" in last_error()
    assert forward(residual=x.c) == "PYDET_NULL_POINTER" and "residual is given without sum" in last_error()
    assert forward(sum_=x.c) == "PYDET_NULL_POINTER" and "sum is given without residual" in last_error()
    inputs = [none, x.c, x.c, w.c, r.c, r.c, none]
    assert status_name(lib.pydet_layernorm_backward(*inputs, none, none, none, none)) == "PYDET_NULL_POINTER"
    assert "dx, dweight and dbias are all NULL, want one of them" in last_error()
    dbias = Tensor(np.full(8, 7, np.float32))
    assert status_name(lib.pydet_layernorm_backward(*inputs, y.c, none, dbias.c, none)) == "PYDET_WORKSPACE_TOO_SMALL"
    assert "workspace is 0 bytes, want 64 (pydet_layernorm_backward_workspace)" in last_error()
    given = options("pydet_layernorm_backward_options", accumulate=1)
    assert status_name(lib.pydet_layernorm_backward(*inputs, y.c, none, none, given)) == "PYDET_NULL_POINTER"
    size = ffi.new("uint64_t *", 7)
    assert lib.pydet_layernorm_backward_workspace(2**62, 2**62, size) == lib.PYDET_OVERFLOW and size[0] == 7
    assert lib.pydet_layernorm_backward_workspace(-1, 4, size) == lib.PYDET_INVALID_SHAPE and size[0] == 7
    assert (y.array == 7).all() and (dbias.array == 7).all()


def test_no_rows():
    """layernorm writes nothing; the sums are +0, or kept under accumulate."""
    none, rows = np.ones((0, 8), np.float32), np.ones(0, np.float32)
    assert pydet.layernorm(none, W, W, eps=EPS)[0].shape == (0, 8)
    for sums in pydet.layernorm_backward(none, none, W, rows, rows)[1:]:
        assert not sums.any()
    dbias = np.full(8, 7, np.float32)
    pydet.layernorm_backward(none, none, W, rows, rows, dbias=dbias, accumulate=True)
    assert (dbias == 7).all()
