"""skinny_gemm: the bits of gemm on (x, w transposed), for every kernel that may serve it."""

import functools
import itertools

import numpy as np
import pytest

import cases
import pydet
import reference
from cases import DTYPES, KINDS, assert_same_bits, data, lay
from conftest import threads

WIDTHS = [(n, k) for n in (1, 15, 33, 130) for k in (0, 1, 15, 16, 17, 63, 130, 257)]


def operands(kind, shape, n, k, dtype, layout="row"):
    x = data(kind, (*shape, k), DTYPES[dtype])
    return x, lay(data(kind, (n, k), DTYPES[dtype], 1), layout)


def check_skinny_equals_gemm(skinny_gemm, gemm, arithmetic, dtype):
    """x of any rank, w in any layout, every bias, output type and option."""
    layouts = itertools.cycle(["row", "row_padded", "col", "col_padded"])
    chunks = itertools.cycle([16, 64, 128])
    biases = itertools.cycle(["", "n fp32", "full bf16", "n fp16", "full fp32"])
    for (n, k), shape in itertools.product(WIDTHS, [(), (1,), (2,), (7,), (64,), (2, 3), (2, 1, 3)]):
        layout, bias_form = next(layouts), next(biases)
        kind, out_dtype = KINDS[(n + k) % 6], list(DTYPES.values())[(n + k) % 3]
        x, w = operands(kind, shape, n, k, dtype, layout)
        rows = x.reshape(int(np.prod(shape)), k)
        for k_chunk in (None, next(chunks)):
            options = {"arithmetic": arithmetic, "k_chunk": k_chunk, "out_dtype": out_dtype}
            bias, rows_bias = None, None
            if bias_form:
                extents, bias_dtype = bias_form.split()
                bias = data("normal", (n,) if extents == "n" else (*shape, n), DTYPES[bias_dtype], 2)
                rows_bias = bias if extents == "n" else bias.reshape(-1, n)
            what = f"x {x.shape}, w {w.shape} {layout}, bias {bias_form}, k_chunk {k_chunk}, {kind}, out {out_dtype}"
            y = skinny_gemm(x, w, bias=bias, **options)
            assert_same_bits(y.reshape(len(rows), n), gemm(rows, w.T, bias=rows_bias, **options), what)


def check_skinny_batch_invariance(skinny_gemm, arithmetic, dtype):
    """A token has the same bits alone, in every batch size up to 70, shuffled, padded, and beside NaN."""
    x, w = operands("normal", (70,), 300, 200, dtype)
    call = functools.partial(skinny_gemm, arithmetic=arithmetic, out_dtype=np.float32)
    whole = call(x, w)
    for count in range(1, 70):
        assert_same_bits(call(x[:count], w), whole[:count], f"the first {count} tokens")
    for token in (0, 33, 69):
        assert_same_bits(call(x[token], w), whole[token], f"token {token} alone")
    assert_same_bits(call(x[1::2], w), whole[1::2], "odd tokens, as a strided view")
    assert_same_bits(call(x[::-1].copy(), w), whole[::-1].copy(), "reversed")
    assert_same_bits(call(lay(x, "row_padded"), lay(w, "row_padded")), whole, "padded")
    assert_same_bits(call(x[:5], w[17:200]), whole[:5, 17:200], "some of the weights")
    beside_nan = np.full_like(x, np.nan)
    beside_nan[21] = x[21]
    assert_same_bits(call(beside_nan, w)[21], whole[21], "among NaN tokens")


def test_skinny_equals_reference(gemm_kernel):
    check_skinny_equals_gemm(gemm_kernel.skinny_gemm, reference_once, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_skinny_equals_gemm(gemm_kernel):
    check_skinny_equals_gemm(gemm_kernel.skinny_gemm, gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


kept = {}


def reference_once(a, b, bias=None, **options):
    """The reference, with its results kept for the next kernel of the arithmetic."""
    key = (
        a.tobytes(),
        b.tobytes(),
        a.shape,
        b.shape,
        a.dtype,
        None if bias is None else (bias.tobytes(), bias.dtype, bias.shape),
        tuple(sorted(options.items(), key=lambda item: item[0])),
    )
    if key not in kept:
        kept[key] = reference.gemm(a, b, bias=bias, **options)
    return kept[key]


def test_skinny_batch_invariance(gemm_kernel):
    check_skinny_batch_invariance(gemm_kernel.skinny_gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_skinny_accumulate(gemm_kernel):
    x, w = operands("wide", (3,), 40, 150, gemm_kernel.dtype)
    call = functools.partial(gemm_kernel.skinny_gemm, arithmetic=gemm_kernel.arithmetic)
    for k_chunk in (None, 16):
        whole = call(x, w, out_dtype=np.float32, k_chunk=k_chunk)
        for cut in range(16, 150, 16):
            out = call(x[:, :cut], w[:, :cut], out_dtype=np.float32, k_chunk=k_chunk)
            assert call(x[:, cut:], w[:, cut:], out=out, accumulate=True, k_chunk=k_chunk) is out
            assert_same_bits(out, whole, f"cut at {cut}, k_chunk {k_chunk}")


def test_skinny_initial(gemm_kernel):
    call = functools.partial(gemm_kernel.skinny_gemm, arithmetic=gemm_kernel.arithmetic)
    for tokens in ((), (3,), (2, 3)):
        x, w = operands("wide", tokens, 40, 150, gemm_kernel.dtype)
        for k_chunk, out_dtype in itertools.product((None, 16), DTYPES.values()):
            options = {"k_chunk": k_chunk, "bias": data("normal", (40,), DTYPES["bf16"])}
            whole = call(x, w, out_dtype=out_dtype, **options)
            for cut in (0, 16, 144):
                begun = call(x[..., :cut], w[:, :cut], out_dtype=np.float32, k_chunk=k_chunk)
                got = call(x[..., cut:], w[:, cut:], initial=begun, out_dtype=out_dtype, **options)
                assert_same_bits(got, whole, f"{tokens} cut at {cut}, k_chunk {k_chunk}")


@pytest.mark.parametrize("count", [1, 2, 7])
def test_skinny_threads(gemm_kernel, count):
    x, w = operands("normal", (3,), 1500, 300, gemm_kernel.dtype, "row_padded")
    options = {"arithmetic": gemm_kernel.arithmetic, "out_dtype": np.float32}
    with threads(count):
        assert_same_bits(
            gemm_kernel.skinny_gemm(x, w, **options), reference_once(x, w.T, **options), f"{count} threads"
        )


def test_skinny_writes_its_elements_alone(gemm_kernel):
    x, w = operands("normal", (2, 3), 33, 50, gemm_kernel.dtype)
    for out_dtype in DTYPES.values():
        options = {"arithmetic": gemm_kernel.arithmetic}
        memory, out = cases.place((6, 33), out_dtype, "row_padded")
        expected_memory, expected = cases.place((6, 33), out_dtype, "row_padded")
        expected[...] = reference_once(x.reshape(6, 50), w.T, out_dtype=out_dtype, **options)
        gemm_kernel.skinny_gemm(x.reshape(6, 50), w, out=out, **options)
        assert np.array_equal(memory, expected_memory)


def test_promise_about_weights_changes_no_bit(gemm_kernel):
    x, w = operands("normal", (5,), 130, 257, gemm_kernel.dtype)
    options = {"arithmetic": gemm_kernel.arithmetic, "out_dtype": np.float32}
    assert_same_bits(
        gemm_kernel.skinny_gemm(x, w, weights_constant=True, **options),
        gemm_kernel.skinny_gemm(x, w, **options),
        "weights_constant",
    )


def test_fast_mode_is_a_sum_too():
    """It promises no bits, so it is held to the error bound of any order."""
    for dtype, shape in itertools.product(DTYPES, [(), (1,), (8,)]):
        x, w = operands("normal", shape, 300, 1000, dtype)
        y = pydet.skinny_gemm(x, w, mode="fast", out_dtype=np.float32).astype(np.float64)
        x, w = reference.widen(x).astype(np.float64), reference.widen(w).astype(np.float64)
        assert np.all(np.abs(y - x @ w.T) <= 1000 * 2.0**-23 * (np.abs(x) @ np.abs(w.T)))
