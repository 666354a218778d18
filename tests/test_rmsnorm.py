"""rmsnorm and rmsnorm_backward: every kernel, forced by name, against the reference and against itself."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import pydet
import reference
from cases import DTYPES, assert_same_bits, data, place
from conftest import threads, unusual_float_environment
from test_gemm import check_workspace

ROWS = [0, 1, 2, 15, 16, 17, 255, 256, 257, 600]
WIDTHS = [1, 7, 8, 64, 255, 256, 1024, 2047, 2048, 2049, 4100]
SHARED_OUT = [(70, 2049), (600, 256), (1100, 140)]  # large enough to be given to several threads
LONGEST = 300_000  # elements of the largest case that the reference follows for every kernel
SHAPES = [(m, n) for m in ROWS for n in WIDTHS if m * n <= LONGEST] + [(257, 2049)]
SHAPES += [(m, 33) for m in (63, 64, 65, 127, 129, 192, 320, 512, 1025)]  # around the groups of the sum over rows
EPS = 1e-6

kept = {}


def reference_once(key, function, *args, **options):
    """The reference's result, kept for the next kernel under the name of the case."""
    if key not in kept:
        kept[key] = function(*args, **options)
    return kept[key]


def assert_all_same_bits(actual, expected, what):
    assert len(actual) == len(expected)
    for name, one, other in zip(("first", "second", "third"), actual, expected, strict=False):
        if other is None:
            assert one is None
        else:
            assert_same_bits(one, other, f"{what}, {name} result")


def forward_case(m, n, dtype, index, kind="normal"):
    """Inputs and options of case `index`: weights of each type or none, offset and residual come and go."""
    weight_dtype = [*DTYPES, None][index % 4]
    x = data(kind, (m, n), DTYPES[dtype], index)
    weight = None if weight_dtype is None else data("normal", (n,), DTYPES[weight_dtype], index + 1)
    options = {"eps": float(np.float32([EPS, 1e-5, 0.0][index % 3]))}  # fp32: no caller's rounding mode changes it
    if weight is not None and index % 2:
        options["weight_offset"] = 1.0
    if index % 5 < 2:
        options["residual"] = data(kind, (m, n), DTYPES[dtype], index + 2)
    return x, weight, options


def backward_case(m, n, dtype, index, kind="normal"):
    x, weight, forward_options = forward_case(m, n, dtype, index, kind)
    forward_options.pop("residual", None)
    rstd = reference.rmsnorm(x, weight, **forward_options)[1]
    dy = data(kind, (m, n), DTYPES[dtype], index + 3)
    options = {name: value for name, value in forward_options.items() if name == "weight_offset"}
    if index % 3 == 0:
        options["dresidual"] = data(kind, (m, n), DTYPES[dtype], index + 4)
    if weight is not None:
        options["dweight_dtype"] = list(DTYPES.values())[index // 4 % 3]
    return (dy, x, weight, rstd), options


# ---- Bits against the reference ------------------------------------------------------------------------------------


def check_forward(rmsnorm, dtype, shapes=SHAPES, kinds=("normal", "wide")):
    for index, ((m, n), kind) in enumerate(itertools.product(shapes, kinds)):
        x, weight, options = forward_case(m, n, dtype, index, kind)
        expected = reference_once(("forward", m, n, dtype, index, kind), reference.rmsnorm, x, weight, **options)
        assert_all_same_bits(rmsnorm(x, weight, **options), expected, f"{m}x{n} {kind}, case {index}")


def check_backward(rmsnorm_backward, dtype, shapes=SHAPES, kinds=("normal", "wide")):
    for index, ((m, n), kind) in enumerate(itertools.product(shapes, kinds)):
        args, options = backward_case(m, n, dtype, index, kind)
        expected = reference_once(("backward", m, n, dtype, index, kind), reference.rmsnorm_backward, *args, **options)
        assert_all_same_bits(rmsnorm_backward(*args, **options), expected, f"{m}x{n} {kind}, case {index}")


def test_forward(rmsnorm_kernel):
    check_forward(rmsnorm_kernel.rmsnorm, rmsnorm_kernel.dtype)


def test_backward(rmsnorm_backward_kernel):
    check_backward(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype)


SMALL = [(5, n) for n in range(1, 70)] + [(m, 33) for m in range(40)] + [(3, 4095), (2, 4096), (2, 6145), (1, 16384)]


def test_forward_of_every_small_width(rmsnorm_kernel):
    check_forward(rmsnorm_kernel.rmsnorm, rmsnorm_kernel.dtype, SMALL, ["normal"])


def test_backward_of_every_small_width(rmsnorm_backward_kernel):
    check_backward(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype, SMALL, ["normal"])


EXTREME = [(40, 1), (40, 9), (40, 100), (3, 2050)]


def test_forward_of_extreme_numbers(rmsnorm_kernel):
    check_forward(rmsnorm_kernel.rmsnorm, rmsnorm_kernel.dtype, EXTREME * 6, ["extremes", "specials"])


def test_backward_of_extreme_numbers(rmsnorm_backward_kernel):
    check_backward(
        rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype, EXTREME * 6, ["extremes", "specials"]
    )


def check_negative_zero_sums(rmsnorm_backward, dtype):
    """Lanes of the sum along a row that have underflowed to -0 stay so: it decides the sign of a zero in dx."""
    for n in (2048, 2049, 2050, 2056, 2063, 4095, 4096):
        x, dy = np.full((2, n), 2.0**-14), np.full((2, n), -(2.0**-20))
        x[:, -1], dy[:, -1] = 1.0, -0.0
        args = dy.astype(DTYPES[dtype]), x.astype(DTYPES[dtype]), None, np.full(2, 2.0**-120, np.float32)
        assert_all_same_bits(rmsnorm_backward(*args), reference.rmsnorm_backward(*args), f"{n} wide")


def test_negative_zero_sums(rmsnorm_backward_kernel):
    check_negative_zero_sums(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    m=st.integers(0, 40),
    n=st.integers(1, 5000),
    dtype=st.sampled_from(list(DTYPES)),
    index=st.integers(0, 119),
    kind=st.sampled_from(["normal", "wide", "extremes", "specials"]),
)
def test_any_shape_and_option(m, n, dtype, index, kind):
    """The library's own choice of kernel."""
    x, weight, options = forward_case(m, n, dtype, index, kind)
    assert_all_same_bits(pydet.rmsnorm(x, weight, **options), reference.rmsnorm(x, weight, **options), "forward")
    args, options = backward_case(m, n, dtype, index, kind)
    assert_all_same_bits(
        pydet.rmsnorm_backward(*args, **options), reference.rmsnorm_backward(*args, **options), "backward"
    )


def test_the_forced_kernel_is_the_one_that_runs(rmsnorm_kernel):
    x = np.ones((2, 5), DTYPES[rmsnorm_kernel.dtype])
    pydet.gemm(x, x.T)
    rstd = rmsnorm_kernel.rmsnorm(x, eps=EPS)[1]
    assert pydet.last_kernel() == rmsnorm_kernel.name
    backward = rmsnorm_kernel.name.replace("rmsnorm", "rmsnorm_backward")
    pydet.rmsnorm_backward(x, x, x[0], rstd, kernel=backward)
    assert pydet.last_kernel() == backward


# ---- Values --------------------------------------------------------------------------------------------------------


def check_forward_error(rmsnorm, dtype):
    """Against float64: rstd within 10 units of fp32, y within half a unit of its type more. NaN is no small error."""
    for m, n in [(5, 3), (4, 1000), (3, 10000)]:
        x, weight = data("normal", (m, n), DTYPES[dtype]), data("normal", (n,), DTYPES[dtype], 1)
        y, rstd = rmsnorm(x, weight, eps=EPS, weight_offset=1.0)
        exact_x, exact_w = reference.widen(x).astype(np.float64), reference.widen(weight).astype(np.float64) + 1
        exact_rstd = 1 / np.sqrt((exact_x**2).mean(-1) + np.float64(np.float32(EPS)))
        exact_y = exact_x * exact_rstd[:, None] * exact_w
        unit = 2.0 ** -(reference.FRACTION_BITS[DTYPES[dtype]] + 1)
        assert np.all(np.abs(rstd - exact_rstd) <= 10 * 2.0**-24 * exact_rstd)
        floor = 2.0**-25 if dtype == "fp16" else 0.0
        assert np.all(np.abs(reference.widen(y) - exact_y) <= np.abs(exact_y) * (unit * 1.01 + 16 * 2.0**-24) + floor)


def check_backward_error(rmsnorm_backward, dtype):
    """dx and dweight against float64, within a bound on the sums of magnitudes."""
    for m, n in [(5, 3), (40, 1000), (600, 30)]:
        x, dy = data("normal", (m, n), DTYPES[dtype]), data("normal", (m, n), DTYPES[dtype], 1)
        weight = data("normal", (n,), DTYPES[dtype], 2)
        rstd = reference.rmsnorm(x, weight, eps=EPS)[1]
        dx, dweight = rmsnorm_backward(dy, x, weight, rstd, dweight_dtype=np.float32)
        exact_x, exact_dy, exact_w, r = (reference.widen(v).astype(np.float64) for v in (x, dy, weight, rstd))
        xhat, g = exact_x * r[:, None], exact_dy * exact_w
        exact_dx = r[:, None] * (g - xhat * (g * xhat).mean(-1, keepdims=True))
        size = r[:, None] * (np.abs(g) + np.abs(xhat) * np.abs(g * xhat).mean(-1, keepdims=True))
        unit = 2.0 ** -(reference.FRACTION_BITS[DTYPES[dtype]] + 1)
        assert np.all(np.abs(reference.widen(dx) - exact_dx) <= size * (unit * 1.01 + 30 * 2.0**-24) + 2.0**-25)
        bound = 2.0**-24 * (16 + 16 + m / 256 + 2) * np.abs(exact_dy * xhat).sum(0)
        assert np.all(np.abs(dweight - (exact_dy * xhat).sum(0)) <= bound)


def test_forward_error(rmsnorm_kernel):
    check_forward_error(rmsnorm_kernel.rmsnorm, rmsnorm_kernel.dtype)


def test_backward_error(rmsnorm_backward_kernel):
    check_backward_error(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype)


# ---- A row's bits against the batch --------------------------------------------------------------------------------


def check_rows_alone(rmsnorm, rmsnorm_backward, dtype):
    """A row's y, rstd and dx are those of the row alone, in any order, and untouched by a NaN row."""
    for n in (33, 2500):
        x, dy = data("normal", (70, n), DTYPES[dtype]), data("normal", (70, n), DTYPES[dtype], 1)
        weight = data("normal", (n,), DTYPES[dtype], 2)

        def outputs_of(x, dy, weight=weight):
            y, rstd = rmsnorm(x, weight, eps=EPS)
            return y, rstd, *rmsnorm_backward(dy, x, weight, rstd, dweight_dtype=np.float32)

        whole = outputs_of(x, dy)[:3]
        selections = {f"row {row} alone": slice(row, row + 1) for row in range(70)}
        selections |= {f"the first {size} rows": slice(0, size) for size in (2, 7, 64)}
        selections |= {
            "odd rows, as a strided view": slice(1, None, 2),
            "shuffled": np.argsort(dy[:, 0], kind="stable"),
        }
        for what, index in selections.items():
            some = outputs_of(x[index], dy[index])[:3]
            assert_all_same_bits(some, [output[index] for output in whole], f"{n} wide, {what}")

        with_nan, with_nan_dy = x.copy(), dy.copy()
        with_nan[5, n // 2], with_nan_dy[5, 0] = np.nan, np.nan
        *outputs, dweight = outputs_of(with_nan, with_nan_dy)
        others = np.arange(70) != 5
        assert_all_same_bits([o[others] for o in outputs], [o[others] for o in whole], "beside a NaN row")
        for output in (*(o[5] for o in outputs), dweight):
            assert np.all(reference.bits(output) == (0x7FFF if output.dtype.itemsize == 2 else 0x7FFFFFFF))


def check_dweight_continues(rmsnorm_backward, dtype):
    """Accumulated over micro-batches of any multiple of 256 rows, dweight has the bits of one call."""
    m, n = 1100, 37
    x, dy = data("normal", (m, n), DTYPES[dtype]), data("wide", (m, n), DTYPES[dtype], 1)
    weight = data("normal", (n,), DTYPES[dtype], 2)
    rstd = reference.rmsnorm(x, weight, eps=EPS)[1]
    whole = rmsnorm_backward(dy, x, weight, rstd, dweight_dtype=np.float32)[1]
    expected = reference_once(
        ("continues", dtype), reference.rmsnorm_backward, dy, x, weight, rstd, dweight_dtype=np.float32
    )[1]
    assert_same_bits(whole, expected, "dweight of 1100 rows")
    for cuts in [[256], [512], [768], [1024], [256, 512, 768, 1024], [512, 512, 1024], [256, 1024]]:
        dweight = np.zeros(n, np.float32)
        for start, stop in itertools.pairwise([0, *cuts, m]):
            part = slice(start, stop)
            rmsnorm_backward(dy[part], x[part], weight, rstd[part], dweight=dweight, accumulate=True)
        assert_same_bits(dweight, whole, f"dweight cut at {cuts}")


# Rows around the blocks, and widths around the vectors and teams of the GPU's kernels.
BLOCK_SHAPES = [(1, 40), (16, 8), (255, 72), (256, 33), (257, 128), (512, 136), (513, 264), (1100, 37)]


def check_block_sums(rmsnorm_backward, dtype, shapes=BLOCK_SHAPES, expect=reference.rmsnorm_backward):
    """The sums of blocks of 256 rows are those of calls on these rows alone; folded in their order they are dweight."""
    for index, (m, n) in enumerate(shapes):
        x, dy = data("normal", (m, n), DTYPES[dtype], index), data("wide", (m, n), DTYPES[dtype], index + 1)
        weight = data("normal", (n,), DTYPES[dtype], index + 2)
        rstd = np.abs(data("normal", (m,), reference.FLOAT32, index + 4))
        added = {"dresidual": data("normal", (m, n), DTYPES[dtype], index + 3)} if index % 3 == 1 else {}
        dx, blocks = rmsnorm_backward(dy, x, weight, rstd, block_sums=True, **added)
        whole = rmsnorm_backward(dy, x, weight, rstd, **added)
        assert_same_bits(dx, whole[0], f"dx of {m}x{n} beside sums of blocks")
        key = ("blocks", expect.__module__, m, n, dtype, index)
        expected = reference_once(key, expect, dy, x, weight, rstd, block_sums=True, **added)[1]
        assert blocks.dtype == np.float32 and blocks.shape == (-(-m // 256), n)
        assert_same_bits(blocks, expected, f"sums of blocks of {m}x{n}")
        folded = reference.fold(list(blocks), out_dtype=weight.dtype)
        assert_same_bits(folded, whole[1], f"the fold of sums of blocks of {m}x{n}")


def test_rows_alone(rmsnorm_kernel):
    backward = rmsnorm_kernel.name.replace("rmsnorm", "rmsnorm_backward")
    assert backward in [kernel.name for kernel in pydet.kernels()]
    check_rows_alone(
        rmsnorm_kernel.rmsnorm, lambda *a, **o: pydet.rmsnorm_backward(*a, kernel=backward, **o), rmsnorm_kernel.dtype
    )


def test_dweight_continues(rmsnorm_backward_kernel):
    check_dweight_continues(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype)


def test_block_sums(rmsnorm_backward_kernel):
    check_block_sums(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype)


def test_block_sums_of_heads_and_a_bias():
    shape, heads = (600, 3, 24), np.s_[:, 1]
    x, dy = data("normal", shape, DTYPES["bf16"]), data("normal", shape, DTYPES["bf16"], 1)
    weight, rstd = data("normal", shape[1:], DTYPES["fp16"], 2), np.abs(data("normal", shape[:2], np.dtype("f4"), 3))
    _, of_weight, of_bias = pydet.rmsnorm_backward(dy, x, weight, rstd, has_bias=True, block_sums=True)
    expected = reference.rmsnorm_backward(dy, x, weight, rstd, has_bias=True, block_sums=True)
    assert_all_same_bits((of_weight, of_bias), expected[1:], "sums of blocks of heads")
    alone = pydet.rmsnorm_backward(dy[heads], x[heads], weight[1], rstd[heads].copy(), has_bias=True, block_sums=True)
    assert_all_same_bits((of_weight[heads], of_bias[heads]), alone[1:], "sums of blocks of one head")
    none = np.zeros((0, 24), np.float32)
    _, of_weight, of_bias = pydet.rmsnorm_backward(none, none, weight[0], none[:, 0], has_bias=True, block_sums=True)
    assert of_weight.shape == of_bias.shape == (0, 24)
    given = np.full((3, 24), 7, np.float32)  # without a weight
    pydet.rmsnorm_backward(dy[heads], x[heads], None, rstd[heads].copy(), dweight=given, block_sums=True)
    assert_same_bits(given, alone[1], "without a weight")


def test_block_sums_refusals():
    x, weight, rstd = np.ones((300, 8), np.float32), np.ones(8, np.float32), np.ones(300, np.float32)
    for given, words in [
        ({"dweight": np.ones(8, np.float32)}, "dweight is 8, want 2 sums of blocks of 256 rows, by block_sums"),
        ({"dweight": np.ones((3, 8), np.float32)}, "dweight is 3x8, want 2 sums of blocks of 256 rows, by block_sums"),
        ({"dbias": np.ones((1, 8), np.float32)}, "dbias is 1x8, want 2 sums of blocks of 256 rows, by block_sums"),
        ({"dweight": np.ones((2, 7), np.float32)}, "a block of dweight is 7, want 8"),
        ({"dweight": np.ones((2, 3, 8), np.float32)}, "a block of dweight is 3x8, want 300x8"),
        ({"dweight": np.ones((2, 8), np.float16)}, "dweight is float16, want float32 by block_sums"),
        ({"dweight_dtype": "float16"}, "dweight is float16, want float32 by block_sums"),
        ({"dweight": np.ones((2, 9), np.float32)[:, :8]}, "dweight has stride 9 in dimension 0, want it contiguous"),
        (
            {"dweight": np.ones((2, 8), np.float32), "accumulate": True},
            "options.accumulate is 1, want 0 with block_sums",
        ),
        ({"block_sums": 2}, "block_sums is int, want True or False"),
    ]:
        before = [np.copy(value) for value in given.values() if isinstance(value, np.ndarray)]
        with pytest.raises(pydet.Error, match=f"^rmsnorm_backward: {words}$"):
            pydet.rmsnorm_backward(x, x, weight, rstd, **{"block_sums": True, **given})
        after = [value for value in given.values() if isinstance(value, np.ndarray)]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


# ---- Layouts and surroundings --------------------------------------------------------------------------------------


def two_level(shape, dtype, inner_pad, outer_pad):
    """A view whose rows are padded inside a group and whose groups are padded: (memory, view)."""
    outer, inner, n = shape
    inner_stride = n + inner_pad
    outer_stride = inner * inner_stride + outer_pad
    memory = np.full((64 + outer * outer_stride) * dtype.itemsize, 0xFF, np.uint8)
    view = np.lib.stride_tricks.as_strided(
        memory.view(dtype)[32 + 1 :], shape, [s * dtype.itemsize for s in (outer_stride, inner_stride, 1)]
    )
    return memory, view


def filled(array, inner_pad, outer_pad):
    view = two_level(array.shape, array.dtype, inner_pad, outer_pad)[1]
    view[...] = array
    return view


def test_strided_rows_and_guarded_outputs(rmsnorm_kernel):
    """Rows of two strides in every operand, each its own; what lies between the rows of the outputs stays."""
    dtype = DTYPES[rmsnorm_kernel.dtype]
    for shape in [(3, 5, 33), (2, 9, 300), (1, 4, 7), (6, 1, 16), (1, 1, 1)]:
        x, residual = data("normal", shape, dtype), data("normal", shape, dtype, 1)
        weight = data("normal", shape[-1:], dtype, 2)
        expected = reference.rmsnorm(x, weight, eps=EPS, residual=residual)
        memory, out = two_level(shape, dtype, 3, 11)
        expected_memory, expected_out = two_level(shape, dtype, 3, 11)
        expected_out[...] = expected[0]
        results = rmsnorm_kernel.rmsnorm(filled(x, 1, 4), weight, eps=EPS, residual=filled(residual, 0, 8), out=out)
        assert_all_same_bits([np.array(r) for r in results], expected, f"{shape}")
        assert np.array_equal(memory, expected_memory), f"{shape}: bytes around out changed"


def test_strided_rows_and_guarded_gradients(rmsnorm_backward_kernel):
    dtype = DTYPES[rmsnorm_backward_kernel.dtype]
    for shape in [(3, 5, 33), (2, 150, 40), (1, 4, 7), (6, 1, 16), (1, 1, 1)]:
        dy, x, dresidual = (data("normal", shape, dtype, seed) for seed in range(3))
        weight = data("normal", shape[-1:], dtype, 3)
        rstd = reference.rmsnorm(x, weight, eps=EPS)[1]
        for options in ({}, {"dresidual": dresidual}):
            expected = reference.rmsnorm_backward(dy, x, weight, rstd, dweight_dtype=np.float32, **options)
            strided = {name: filled(value, 2, 5) for name, value in options.items()}
            memory, out = two_level(shape, dtype, 3, 11)
            expected_memory, expected_out = two_level(shape, dtype, 3, 11)
            expected_out[...] = expected[0]
            weights_memory, (dweight,) = place((1, shape[-1]), reference.FLOAT32, "row_padded")
            expected_weights_memory, expected_dweight = place((1, shape[-1]), reference.FLOAT32, "row_padded")
            expected_dweight[0] = expected[1]
            rmsnorm_backward_kernel.rmsnorm_backward(
                filled(dy, 0, 1), filled(x, 7, 0), weight, rstd, out=out, dweight=dweight, **strided
            )
            assert np.array_equal(memory, expected_memory), f"{shape}: dx or the bytes around it"
            assert np.array_equal(weights_memory, expected_weights_memory), f"{shape}: dweight or the bytes around it"


def test_layout_changes_no_bit(rmsnorm_kernel):
    """One row seven times through stride 0, and a single vector."""
    dtype = DTYPES[rmsnorm_kernel.dtype]
    x, weight = data("normal", (100,), dtype), data("normal", (100,), dtype, 1)
    y, rstd = rmsnorm_kernel.rmsnorm(x, weight, eps=EPS)
    assert_all_same_bits((y, rstd), reference.rmsnorm(x, weight, eps=EPS), "a vector")
    many = rmsnorm_kernel.rmsnorm(np.broadcast_to(x, (7, 100)), weight, eps=EPS)
    assert_all_same_bits(many, (np.broadcast_to(y, (7, 100)), np.broadcast_to(rstd, 7)), "stride 0")


def check_forward_float_environment(rmsnorm, dtype):
    for index, kind, shape in itertools.product(range(4), ["normal", "extremes"], [(40, 9), (300, 500)]):
        x, weight, options = forward_case(*shape, dtype, index, kind)
        with threads(2), unusual_float_environment() as still_set:
            results = rmsnorm(x, weight, **options)
            still = still_set()
        expected = reference_once(("environment", shape, dtype, index, kind), reference.rmsnorm, x, weight, **options)
        assert_all_same_bits(results, expected, f"{shape} {kind}")
        assert still, "the caller's settings were changed"


def check_backward_float_environment(rmsnorm_backward, dtype):
    for index, kind, shape in itertools.product(range(4), ["normal", "extremes"], [(40, 9), (300, 500)]):
        args, options = backward_case(*shape, dtype, index, kind)
        with threads(2), unusual_float_environment() as still_set:
            results = rmsnorm_backward(*args, **options)
            still = still_set()
        key = ("backward environment", shape, dtype, index, kind)
        expected = reference_once(key, reference.rmsnorm_backward, *args, **options)
        assert_all_same_bits(results, expected, f"{shape} {kind}")
        assert still, "the caller's settings were changed"


def test_float_environment(rmsnorm_kernel):
    check_forward_float_environment(rmsnorm_kernel.rmsnorm, rmsnorm_kernel.dtype)


def test_backward_float_environment(rmsnorm_backward_kernel):
    check_backward_float_environment(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads(rmsnorm_kernel, count):
    with threads(count):
        check_forward(rmsnorm_kernel.rmsnorm, rmsnorm_kernel.dtype, SHARED_OUT)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_backward_threads(rmsnorm_backward_kernel, count):
    with threads(count):
        check_backward(rmsnorm_backward_kernel.rmsnorm_backward, rmsnorm_backward_kernel.dtype, SHARED_OUT)


def test_workspace(rmsnorm_backward_kernel):
    from capi import Tensor, ffi, lib, options

    (dy, x, weight, rstd), _ = backward_case(300, 70, rmsnorm_backward_kernel.dtype, 1)
    expected = reference.rmsnorm_backward(dy, x, weight, rstd, dweight_dtype=np.float32)
    size = ffi.new("uint64_t *")
    assert lib.pydet_rmsnorm_backward_workspace(300, 70, size) == lib.PYDET_OK

    def call(workspace):
        dx, dweight = np.empty_like(x), np.empty(70, np.float32)
        made = options(
            "pydet_rmsnorm_backward_options",
            kernel=rmsnorm_backward_kernel.name,
            workspace=ffi.from_buffer(workspace),
            workspace_size=len(workspace),
        )
        tensors = [Tensor(t).c for t in (dy, x, weight, rstd)] + [ffi.NULL, Tensor(dx).c, Tensor(dweight).c]
        assert lib.pydet_rmsnorm_backward(ffi.NULL, *tensors, made) == lib.PYDET_OK
        assert_all_same_bits((dx, dweight), expected, "with a workspace of its own")
        return dx.tobytes() + dweight.tobytes()

    check_workspace(call, size[0])
