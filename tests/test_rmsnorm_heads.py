"""rmsnorm with weights of heads, a bias, a residual in float32 and rows of three strides, on every kernel by name."""

import itertools

import numpy as np
import pytest

import pydet
import reference
from cases import DTYPES, assert_same_bits, data
from test_rmsnorm import EPS, assert_all_same_bits, reference_once

# Tokens around the chains of 16 rows and blocks of 256, widths around the vectors and teams of the GPU's kernels.
SHAPES = [(tokens, heads, n) for tokens in (1, 15, 16, 17) for heads in (1, 3) for n in (1, 8, 33, 128, 136, 264)]
SHAPES += [(256, 2, 64), (257, 3, 40), (530, 2, 24), (5, 2, 256), (3, 2, 1000), (3, 2, 2056), (0, 2, 8)]
LONG_SHAPES = [(2, 2, 2048), (2, 3, 4100), (2, 2, 8192), (2, 2, 8193), (1, 2, 8200), (2, 1, 16400)]


def case(tokens, heads, n, dtype, index, kind="normal"):
    """x [tokens, heads, n], weight, bias and options of case `index`: each comes and goes by a period of its own."""
    shape = (tokens, heads, n)
    per_head = (heads, n) if index % 3 else (n,)
    x = data(kind, shape, DTYPES[dtype], index)
    weight = None if index % 7 == 3 else data("normal", per_head, list(DTYPES.values())[index % 3], index + 1)
    options = {"eps": float(np.float32(EPS)), "weight_offset": float(index % 2)}
    if index % 4:
        options["bias"] = data("normal", per_head, list(DTYPES.values())[index // 3 % 3], index + 2)
    if index % 5 < 3:
        wide = reference.FLOAT32 if index % 5 else DTYPES[dtype]
        options["residual"] = data(kind, shape, wide, index + 3)
    return x, weight, options


def gradient_case(tokens, heads, n, dtype, index, kind="normal"):
    x, weight, options = case(tokens, heads, n, dtype, index, kind)
    if index % 2:
        x = data(kind, x.shape, reference.FLOAT32, index)  # a sum in float32 beside dy of another type
    rstd = np.abs(data("normal", (tokens, heads), reference.FLOAT32, index + 5))
    given = {"weight_offset": options["weight_offset"], "has_bias": index % 4 != 1}
    if index % 3 == 1:
        given["dresidual"] = data(kind, x.shape, x.dtype, index + 6)
    if weight is not None or given["has_bias"]:
        given["dweight_dtype"] = list(DTYPES.values())[index // 4 % 3]
    return (data("normal", x.shape, DTYPES[dtype], index + 4), x, weight, rstd), given


def apart(array, seed=0):
    """A view of the same values whose rows have three strides: no two dimensions merge."""
    tokens, heads, n = array.shape
    memory = np.full((heads + 1, tokens + 2, n + 16 + 8 * (seed % 2)), np.nan, array.dtype)
    view = memory[1:, 1:-1, 8 : 8 + n].transpose(1, 0, 2)
    view[...] = array
    return view


def four(array):
    """[tokens, heads, n] as [2, tokens / 2, heads, n] with three strides, where tokens are even."""
    tokens, heads, n = array.shape
    memory = np.full((2, heads + 1, tokens // 2 + 1, n + 8), np.nan, array.dtype)
    view = memory[:, :heads, : tokens // 2, :n].transpose(0, 2, 1, 3)
    view[...] = array.reshape(view.shape)
    return view


def check_forward(rmsnorm, dtype, shapes=SHAPES, kinds=("normal", "specials"), expect=reference.rmsnorm):
    for index, ((tokens, heads, n), kind) in enumerate(itertools.product(shapes, kinds)):
        x, weight, options = case(tokens, heads, n, dtype, index, kind)
        key = ("heads", expect.__module__, tokens, heads, n, dtype, index, kind)
        expected = reference_once(key, expect, x, weight, **options)
        what = f"{tokens}x{heads}x{n} {kind}, case {index}"
        assert_all_same_bits(rmsnorm(x, weight, **options), expected, what)
        strided = {name: apart(v, 1) if name == "residual" else v for name, v in options.items()}
        if tokens:
            assert_all_same_bits(rmsnorm(apart(x), weight, **strided), expected, f"{what}, apart")
        if tokens and tokens % 2 == 0:
            strided = {name: four(v) if name == "residual" else v for name, v in options.items()}
            flat = [result.reshape(e.shape) for result, e in zip(rmsnorm(four(x), weight, **strided), expected)]
            assert_all_same_bits(flat, expected, f"{what}, three strides")


def check_backward(rmsnorm_backward, dtype, shapes=SHAPES, kinds=("normal", "specials"), expect=None):
    expect = expect or reference.rmsnorm_backward
    for index, ((tokens, heads, n), kind) in enumerate(itertools.product(shapes, kinds)):
        (dy, x, weight, rstd), options = gradient_case(tokens, heads, n, dtype, index, kind)
        key = ("heads backward", expect.__module__, tokens, heads, n, dtype, index, kind)
        expected = reference_once(key, expect, dy, x, weight, rstd, **options)
        what = f"{tokens}x{heads}x{n} {kind}, case {index}"
        assert_all_same_bits(rmsnorm_backward(dy, x, weight, rstd, **options), expected, what)
        if not tokens:
            continue
        strided = {name: apart(v, 1) if name == "dresidual" else v for name, v in options.items()}
        assert_all_same_bits(
            rmsnorm_backward(apart(dy), apart(x, 1), weight, rstd, **strided), expected, f"{what} apart"
        )
        if tokens % 2 == 0:
            strided = {name: four(v) if name == "dresidual" else v for name, v in options.items()}
            found = rmsnorm_backward(four(dy), four(x), weight, rstd.reshape(2, -1, heads), **strided)
            found = [None if e is None else result.reshape(e.shape) for result, e in zip(found, expected, strict=True)]
            assert_all_same_bits(found, expected, f"{what}, three strides")


def check_each_head_alone(rmsnorm, rmsnorm_backward, dtype):
    """A head has the bits of a call on it alone: y, rstd and sum, dx, dweight and dbias."""
    heads, n = 3, 72
    shape = (300, heads, n)
    x, dy = data("normal", shape, DTYPES[dtype]), data("normal", shape, DTYPES[dtype], 1)
    weight, bias = (data("normal", (heads, n), DTYPES[dtype], seed) for seed in (2, 3))
    residual = data("normal", shape, reference.FLOAT32, 4)
    y, rstd, total = rmsnorm(x, weight, eps=EPS, bias=bias, residual=residual)
    gradients = rmsnorm_backward(dy, total, weight, rstd, has_bias=True, dweight_dtype=np.float32)
    for h in range(heads):
        alone = rmsnorm(x[:, h], weight[h], eps=EPS, bias=bias[h], residual=residual[:, h])
        assert_all_same_bits(alone, (y[:, h], rstd[:, h], total[:, h]), f"head {h}")
        alone = rmsnorm_backward(
            dy[:, h], total[:, h], weight[h], rstd[:, h].copy(), has_bias=True, dweight_dtype=np.float32
        )
        assert_all_same_bits(alone, (gradients[0][:, h], gradients[1][h], gradients[2][h]), f"gradients of head {h}")


def check_sums_continue(rmsnorm_backward, dtype):
    """dweight and dbias of heads, continued at a multiple of 256 rows of each head, have the bits of one call."""
    shape = (700, 2, 24)
    (x, dy), weight = (
        (data("normal", shape, DTYPES[dtype], seed) for seed in (0, 1)),
        data("normal", (2, 24), reference.FLOAT32),
    )
    rstd = np.abs(data("normal", shape[:2], reference.FLOAT32, 3))
    _, dweight, dbias = rmsnorm_backward(dy, x, weight, rstd, has_bias=True)
    into = {"dweight": np.zeros((2, 24), np.float32), "dbias": np.zeros((2, 24), np.float32)}
    for part in (slice(0, 512), slice(512, 512), slice(512, 700)):
        rmsnorm_backward(dy[part], x[part], weight, rstd[part], accumulate=True, **into)
    assert_same_bits(into["dweight"], dweight, "dweight")
    assert_same_bits(into["dbias"], dbias, "dbias")


def test_forward(rmsnorm_kernel):
    check_forward(rmsnorm_kernel.rmsnorm, rmsnorm_kernel.dtype)


def test_backward(rmsnorm_backward_kernel):
    check_backward(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_alone_and_sums_that_continue(dtype):
    check_each_head_alone(pydet.rmsnorm, pydet.rmsnorm_backward, dtype)
    check_sums_continue(pydet.rmsnorm_backward, dtype)


def test_a_head_order_that_is_wrong_is_seen():
    """The weights of the next head, or rows of all heads in one sum, are other bits: the checks above can fail."""

    def of_next_head(x, weight=None, **options):
        return reference.rmsnorm(x, None if weight is None or weight.ndim < 2 else np.roll(weight, 1, 0), **options)

    with pytest.raises(AssertionError):
        check_forward(of_next_head, "fp32", [(5, 3, 8)] * 3, ["normal"])

    def over_all_rows(dy, x, weight, rstd, **options):
        dx, dweight, *dbias = reference.rmsnorm_backward(dy, x, weight, rstd, **options)
        return dx, None if dweight is None else np.broadcast_to(dweight[0], dweight.shape), *dbias

    with pytest.raises(AssertionError):
        check_backward(over_all_rows, "fp32", [(5, 3, 8)] * 3, ["normal"])


def test_a_view_of_a_fused_projection():
    """q of a qkv [tokens, (heads + 2) n] is normalised where it lies, as a copy of it would be."""
    qkv = data("normal", (40, 6 * 32), DTYPES["bf16"])
    q = qkv[:, : 4 * 32].reshape(40, 4, 32)
    assert q.base is not None
    weight = data("normal", (4, 32), DTYPES["bf16"], 1)
    assert_all_same_bits(pydet.rmsnorm(q, weight, eps=EPS), pydet.rmsnorm(q.copy(), weight, eps=EPS), "a view")


def test_no_heads():
    x, weight = np.zeros((4, 0, 8), np.float32), np.zeros((0, 8), np.float32)
    y, rstd = pydet.rmsnorm(x, weight, eps=EPS)
    assert y.shape == (4, 0, 8) and rstd.shape == (4, 0)
    dx, dweight, dbias = pydet.rmsnorm_backward(x, x, weight, rstd, has_bias=True)
    assert dx.shape == x.shape and dweight.shape == dbias.shape == (0, 8)


def refused(match, function, *operands, **options):
    with pytest.raises(pydet.Error, match=match):
        function(*operands, **options)


def test_refusals():
    x, weight, rstd = np.ones((5, 3, 8), np.float32), np.ones((3, 8), np.float32), np.ones((5, 3), np.float32)
    refused(r"^rmsnorm: weight is 2x8, want 3x8$", pydet.rmsnorm, x, weight[:2], eps=EPS)
    refused(r"^rmsnorm: bias is 8, want 3x8$", pydet.rmsnorm, x, weight, eps=EPS, bias=weight[0])
    refused(r"^rmsnorm: bias is 7, want 8$", pydet.rmsnorm, x, eps=EPS, bias=np.ones(7, np.float32))
    refused(r"^rmsnorm: bias has stride 2 in its last", pydet.rmsnorm, x, eps=EPS, bias=np.ones(16, np.float32)[::2])
    padded = np.ones((3, 9), np.float32)[:, :8]
    refused(r"^rmsnorm: weight has stride 9 in dimension 0, want it contiguous$", pydet.rmsnorm, x, padded, eps=EPS)
    shared = np.ones((6, 8), np.float32)
    refused(r"^rmsnorm: y shares memory with bias", pydet.rmsnorm, x[0], eps=EPS, bias=shared[:3], out=shared[:3])
    far = np.ones((2, 2, 2, 2, 6, 8), np.float32)[:, ::2, :, :, ::3].transpose(0, 2, 1, 4, 3, 5)[:, :, :1].repeat(2, 2)
    far = np.lib.stride_tricks.as_strided(far, (2, 2, 2, 2, 8), (800, 40, 400, 80, 4))
    refused(
        r"^rmsnorm: the rows of x need 4 strides to walk, want at most 3 after merging", pydet.rmsnorm, far, eps=EPS
    )
    backward = pydet.rmsnorm_backward
    refused(r"^rmsnorm_backward: dweight is 8, want 3x8$", backward, x, x, weight, rstd, dweight=weight[0].copy())
    refused(r"^rmsnorm_backward: dbias is 8, want 3x8$", backward, x, x, weight, rstd, dbias=weight[0].copy())
    half = np.ones((3, 8), DTYPES["bf16"])
    into = {"dweight": np.zeros((3, 8), np.float32), "dbias": half, "accumulate": True}
    refused(
        r"^rmsnorm_backward: dbias is bfloat16, want float32 under accumulate$", backward, x, x, weight, rstd, **into
    )
    refused(r"^rmsnorm_backward: accumulate needs dweight", backward, x, x, weight, rstd, accumulate=True)


def test_the_workspace_is_that_of_all_heads():
    """Twice pydet_rmsnorm_backward_workspace of rows / heads and heads n with a dbias, and not a byte less."""
    from capi import Tensor, ffi, lib, options

    x, rstd = np.ones((40, 3, 8), np.float32), np.ones((40, 3), np.float32)
    weight, dweight, dbias = (np.ones((3, 8), np.float32) for _ in range(3))
    size = ffi.new("uint64_t *")
    assert lib.pydet_rmsnorm_backward_workspace(40, 24, size) == lib.PYDET_OK
    workspace, bias = np.zeros(2 * size[0] + 256, np.uint8), Tensor(dbias)
    start = ffi.cast("void *", workspace.ctypes.data + -workspace.ctypes.data % 256)
    tensors = [Tensor(t) for t in (x, x, weight, rstd)], [Tensor(t) for t in (np.empty_like(x), dweight)]
    for short, status in ((0, lib.PYDET_OK), (1, lib.PYDET_WORKSPACE_TOO_SMALL)):
        given = options(
            "pydet_rmsnorm_backward_options", workspace=start, workspace_size=2 * size[0] - short, dbias=bias.c
        )
        arguments = [t.c for t in tensors[0]] + [ffi.NULL] + [t.c for t in tensors[1]]
        assert lib.pydet_rmsnorm_backward(ffi.NULL, *arguments, given) == status
    assert np.array_equal(dbias, np.full((3, 8), 40.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_audits_of_norms(dtype):
    x, weight, bias = (
        data("normal", shape, DTYPES[dtype], seed) for seed, shape in enumerate([(9, 3, 40), (40,), (40,)])
    )
    of_heads, residual = data("normal", (3, 40), DTYPES[dtype], 3), data("normal", x.shape, reference.FLOAT32, 4)
    layer = pydet.layernorm(x, weight, bias, eps=EPS)[0]
    headed = pydet.rmsnorm(x, of_heads, eps=EPS, residual=residual, bias=of_heads)[0]
    for sample, checked in ((None, x.size), (4, 4 * 40), (100, x.size)):
        found = pydet.audit_layernorm(x, layer, weight, bias, eps=EPS, sample=sample)
        assert (found.elements, found.checked, found.differing) == (x.size, checked, 0)
        found = pydet.audit_rmsnorm(
            x, headed, of_heads, eps=EPS, bias=of_heads, residual=residual, sample=sample, seed=1
        )
        assert (found.checked, found.differing) == (checked * (3 if sample == 4 else 1), 0)
    assert not pydet.audit_layernorm(x, layer, weight, eps=EPS).all_equal
    headed[7, 2, 5] += headed.dtype.type(1)
    found = pydet.audit_rmsnorm(x, headed, of_heads, eps=EPS, bias=of_heads, residual=residual, sample=9)
    assert [difference.index for difference in found.first] == [(7, 2, 5)]
    with pytest.raises(pydet.Error, match=r"^audit: sample is 0, want 1 or more$"):
        pydet.audit_layernorm(x, layer, eps=EPS, sample=0)
    with pytest.raises(pydet.Error, match=r"^audit: x and residual are 8x3x40, y 9x3x40$"):
        pydet.audit_layernorm(x[:8], layer, eps=EPS, sample=2)
