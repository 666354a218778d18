"""Each check of the suite refuses an implementation that breaks the promise it is there for.

The broken implementations are small changes of the reference, or what people use instead. Each goes through the very
function that tests the kernels; the reference itself goes through it too, and passes.
"""

import ctypes
import functools
import itertools

import numpy as np
import pytest

import cases
import reference
import test_gemm
import test_golden
import test_rmsnorm
import test_skinny_gemm
from conftest import thread_count, threads
from reference import BFLOAT16, fma, round_to, widen


def refuses(check, broken, *args):
    with pytest.raises(AssertionError):
        check(broken, *args)


# ---- GEMM ----------------------------------------------------------------------------------------------------------


def gemm_like(result):
    """An implementation of gemm from result(a, b, start, arithmetic, k_chunk), which returns the fp32 sum."""

    @reference.quiet
    def gemm(
        a, b, *, bias=None, out=None, out_dtype=None, accumulate=False, initial=None, arithmetic="ieee", k_chunk=None
    ):
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        start = out.copy() if accumulate else np.zeros(shape, np.float32) if initial is None else initial
        return reference.finish(result(a, b, start, arithmetic, k_chunk), a, bias, out, out_dtype)

    return gemm


def true_sum(a, b, start, arithmetic, k_chunk):
    if k_chunk is None:
        return reference.chain(a, b, start, arithmetic)
    for k in range(0, a.shape[-1], k_chunk):
        part = slice(k, k + k_chunk)
        start = start + reference.chain(a[..., part], b[..., part, :], np.zeros_like(start), arithmetic)
    return start


def numpy_matmul(a, b, start, arithmetic, k_chunk):
    return start + widen(a) @ widen(b)


def split_k_by_rows(a, b, start, arithmetic, k_chunk):
    """As libraries do where few rows would leave the machine idle."""
    return true_sum(a, b, start, arithmetic, 64 if a.shape[-2] < 16 else k_chunk)


def split_k_by_columns(a, b, start, arithmetic, k_chunk):
    return true_sum(a, b, start, arithmetic, 64 if b.shape[-1] < 32 else k_chunk)


def split_k_by_threads(a, b, start, arithmetic, k_chunk):
    return true_sum(a, b, start, arithmetic, -(-a.shape[-1] // thread_count()) if thread_count() > 1 else None)


def by_place_in_the_batch(a, b, start, arithmetic, k_chunk):
    """Odd rows go through another order."""
    total = true_sum(a, b, start, arithmetic, k_chunk)
    total[..., 1::2, :] = true_sum(a[..., 1::2, ::-1], b[..., ::-1, :], start[..., 1::2, :], arithmetic, k_chunk)
    return total


def neighbours_leak(a, b, start, arithmetic, k_chunk):
    """0 times another row is NaN where that row is."""
    total = true_sum(a, b, start, arithmetic, k_chunk)
    return total + 0.0 * np.roll(total, 1, axis=-2)


def k_descending(a, b, start, arithmetic, k_chunk):
    return true_sum(a[..., ::-1], b[..., ::-1, :], start, arithmetic, k_chunk)


def not_fused(a, b, start, arithmetic, k_chunk):
    for k in range(a.shape[-1]):
        start = start + widen(a)[..., :, k, None] * widen(b)[..., None, k, :]
    return start


def wide_sum(a, b, start, arithmetic, k_chunk):
    """More accurate, and not the contract."""
    return (start + widen(a).astype(np.float64) @ widen(b).astype(np.float64)).astype(np.float32)


def pairwise_fold(a, b, start, arithmetic, k_chunk):
    if k_chunk is None:
        return true_sum(a, b, start, arithmetic, None)
    sums = [
        true_sum(a[..., k : k + k_chunk], b[..., k : k + k_chunk, :], np.zeros_like(start), arithmetic, None)
        for k in range(0, a.shape[-1], k_chunk)
    ]
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return start + sums[0] if sums else start


def k_chunk_ignored(a, b, start, arithmetic, k_chunk):
    return true_sum(a, b, start, arithmetic, None)


def chunk_folded_at_stage_ends(a, b, start, arithmetic, k_chunk):
    """As a kernel of stages of 256 k does whose count of what is left of a chunk starts anew with each."""
    stages = range(0, a.shape[-1], 256)
    parts = [slice(k, k + 256) for k in stages] if k_chunk else [slice(None)]
    for part in parts:
        start = true_sum(a[..., part], b[..., part, :], start, arithmetic, k_chunk)
    return start


def added_at_the_end(a, b, start, arithmetic, k_chunk):
    """accumulate as out + (a b), not as a chain that goes on."""
    return start + true_sum(a, b, np.zeros_like(start), arithmetic, k_chunk)


def bf16_sum(a, b, start, arithmetic, k_chunk):
    for k in range(0, a.shape[-1], 16):
        start = widen(round_to(true_sum(a[..., k : k + 16], b[..., k : k + 16, :], start, arithmetic, None), BFLOAT16))
    return start


def all_nan(a, b, start, arithmetic, k_chunk):
    return np.full_like(start, np.nan)


def last_k_dropped(a, b, start, arithmetic, k_chunk):
    return true_sum(a[..., : a.shape[-1] // 4 * 4], b[..., : a.shape[-1] // 4 * 4, :], start, arithmetic, k_chunk)


def subnormals_flushed(a, b, start, arithmetic, k_chunk):
    return reference.flush(true_sum(a, b, start, arithmetic, k_chunk))


GEMM_CHECKS = {
    "small integers": test_gemm.check_small_integers,
    "error bound": test_gemm.check_error_bound,
    "batch invariance": test_gemm.check_batch_invariance,
    "k_chunk": test_gemm.check_k_chunk,
    "chunks": functools.partial(cases.check_chunks, problems=cases.chunk_cases((16, 64)), rows=(1, 5), n=3),
    "accumulate": test_gemm.check_accumulate,
    "initial": test_gemm.check_initial,
    "repeated calls": test_gemm.check_repeated_calls,
}


def equals_reference(gemm, arithmetic, dtype, **fields):
    cases.check_equals_reference(
        gemm,
        [
            cases.Problem(
                **{"m": 9, "n": 37, "k": 67, "dtype": dtype, "arithmetic": arithmetic, "kind": kind, **fields}
            )
            for kind in cases.KINDS
        ],
    )


@pytest.mark.parametrize("check", GEMM_CHECKS.values(), ids=GEMM_CHECKS)
def test_the_reference_passes(check):
    check(reference.gemm, "ieee", "fp32")


@pytest.mark.parametrize(
    "broken", [numpy_matmul, split_k_by_rows, split_k_by_columns, by_place_in_the_batch, neighbours_leak]
)
def test_batch_invariance(broken):
    refuses(test_gemm.check_batch_invariance, gemm_like(broken), "ieee", "fp32")


@pytest.mark.parametrize(
    "broken",
    [
        numpy_matmul,
        k_descending,
        not_fused,
        wide_sum,
        bf16_sum,
        all_nan,
        last_k_dropped,
        by_place_in_the_batch,
        subnormals_flushed,
    ],
)
def test_equality_with_the_reference(broken):
    equals_reference(gemm_like(true_sum), "ieee", "fp32")
    refuses(equals_reference, gemm_like(broken), "ieee", "fp32")


@pytest.mark.parametrize("broken", [pairwise_fold, k_chunk_ignored, wide_sum])
def test_k_chunk(broken):
    refuses(test_gemm.check_k_chunk, gemm_like(broken), "ieee", "fp32")


def test_chunks_across_stages():
    refuses(cases.check_chunks, gemm_like(chunk_folded_at_stage_ends), "ieee", "fp32", [(560, 272)], (1, 5), 3)
    refuses(cases.check_chunks, gemm_like(k_chunk_ignored), "ieee", "fp32", [(24, 16)], (1, 5), 3)


@pytest.mark.parametrize("broken", [added_at_the_end, numpy_matmul, k_descending])
def test_accumulate(broken):
    refuses(test_gemm.check_accumulate, gemm_like(broken), "ieee", "fp32")
    refuses(test_gemm.check_initial, gemm_like(broken), "ieee", "fp32")


@pytest.mark.parametrize("broken", [all_nan, bf16_sum, last_k_dropped])
def test_error_bound(broken):
    refuses(test_gemm.check_error_bound, gemm_like(broken), "ieee", "fp32")


@pytest.mark.parametrize("broken", [last_k_dropped, all_nan, added_at_the_end])
def test_small_integers(broken):
    """An order cannot fail this check; a wrong index does."""
    if broken is added_at_the_end:
        test_gemm.check_small_integers(gemm_like(broken), "ieee", "fp32")
        test_gemm.check_small_integers(gemm_like(k_descending), "ieee", "fp32")
    else:
        refuses(test_gemm.check_small_integers, gemm_like(broken), "ieee", "fp32")


def gradients(gemm):
    return (
        gemm,
        lambda dc, b, **o: gemm(dc, b.swapaxes(-1, -2), **o),
        lambda a, dc, **o: gemm(a.swapaxes(-1, -2), dc, **o),
    )


@pytest.mark.parametrize("broken", [added_at_the_end, pairwise_fold])
def test_gradients(broken):
    test_gemm.check_gradients(*gradients(reference.gemm), "ieee", "fp32")
    with pytest.raises(AssertionError):
        test_gemm.check_gradients(*gradients(gemm_like(broken)), "ieee", "fp32")


def test_gradient_of_the_wrong_operand():
    gemm, gemm_da, gemm_db = gradients(reference.gemm)
    with pytest.raises(AssertionError):
        test_gemm.check_gradients(gemm, gemm_da, lambda a, dc, **o: gemm_db(a[::-1], dc, **o), "ieee", "fp32")


@pytest.mark.parametrize("count", [2, 7])
def test_threads(count):
    test_gemm.check_threads(reference.gemm, "ieee", "fp32", count)
    refuses(test_gemm.check_threads, gemm_like(split_k_by_threads), "ieee", "fp32", count)


def test_float_environment():
    """The reference is NumPy on the calling thread: with flush-to-zero and rounding up set there, its bits change."""
    refuses(test_gemm.check_float_environment, reference.gemm, "ieee", "fp32")

    def puts_nothing_back(a, b, **options):
        libm = ctypes.CDLL("libm.so.6")
        libm.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
        reference.gemm(a, b, **options)

    with pytest.raises(AssertionError, match="settings were changed"):
        test_gemm.check_float_environment(puts_nothing_back, "ieee", "fp32")


def test_repeated_calls():
    """A sum whose order is not fixed, as with atomics."""
    orders = itertools.count()

    def unordered(a, b, start, arithmetic, k_chunk):
        order = np.argsort(cases.random_words(a.shape[-1], next(orders)))
        return true_sum(a[..., order], b[..., order, :], start, arithmetic, k_chunk)

    refuses(test_gemm.check_repeated_calls, gemm_like(unordered), "ieee", "fp32")


def test_surroundings():
    """One element past a row, and an input used as scratch."""

    def writes_beside(a, b, *, out, **options):
        reference.gemm(a, b, out=out, **options)
        beside = np.lib.stride_tricks.as_strided(out, (*out.shape[:-1], out.shape[-1] + 1), out.strides)
        beside[..., -1] = 0

    def writes_an_input(a, b, *, out, **options):
        reference.gemm(a, b, out=out, **options)
        a[0, 0] = 0

    for broken in (writes_beside, writes_an_input):
        refuses(equals_reference, broken, "ieee", "fp32")
        with pytest.raises(AssertionError):
            cases.run(broken, cases.Problem(9, 37, 67, out_layout="row_padded"))


def test_workspace():
    def reads_it(workspace):
        return bytes(workspace[:4])

    def writes_past_it(workspace):
        np.lib.stride_tricks.as_strided(workspace, (len(workspace) + 1,))[-1] = 7
        return b""

    test_gemm.check_workspace(lambda workspace: b"", 256)
    refuses(test_gemm.check_workspace, reads_it, 256)
    refuses(test_gemm.check_workspace, writes_past_it, 256)


def test_bytes_not_values():
    """-0 is not +0, and a NaN is the canonical one."""
    zero, nan = np.zeros(1, np.float32), np.array([0x7FFFFFFF], np.uint32).view(np.float32)
    cases.assert_same_bits(nan, nan.copy())
    refuses(cases.assert_same_bits, -zero, zero)
    refuses(cases.assert_same_bits, np.full(1, np.nan, np.float32), nan)


# ---- Tensor-core models: each published variant that an H100 contradicts --------------------------------------------


def recorded(step):
    """The single steps and chains of the H100, on a variant of its step."""

    def sum_of(a, b, start, arithmetic, k_chunk):
        for k in range(0, a.shape[-1], 16):
            start = step(a[..., :, None, k : k + 16], b.swapaxes(-1, -2)[..., None, :, k : k + 16], start)
        return start

    for dtype in ("bf16", "fp16"):
        test_gemm.check_recorded_vectors(gemm_like(sum_of), dtype)


def products_of(a, b):
    return reference.Products(*(reference.Numbers(np.moveaxis(x, -1, 0)) for x in (a, b)))


def products_and(change):
    """The sm90 step on changed products."""

    def step(a, b, c):
        products = products_of(a, b)
        change(products, a, b)
        return reference.truncating_step(products, c, fraction=25, least=-133)

    return step


def renormalised(products, a, b):
    """Products keep the exponent of their own value."""
    products.e = np.where(products.value == 0, reference.NONE, np.frexp(products.value)[1] - 1)


def zeros_keep_an_exponent(products, a, b):
    """A product of zero still raises the exponent that all are aligned to."""
    least = reference.MIN_EXPONENT[a.dtype]
    ea, eb = (np.moveaxis(np.where(x == 0, least, reference.exponents(x)), -1, 0) for x in (a, b))
    products.e = ea + eb


def truncating(fraction, least):
    return lambda a, b, c: reference.truncating_step(products_of(a, b), c, fraction, least)


def two_steps_of_8(a, b, c):
    for half in (slice(0, 8), slice(8, 16)):
        c = truncating(25, -133)(a[..., half], b[..., half], c)
    return c


def rounded_to_nearest(a, b, c):
    products = products_of(a, b)
    exact = products.value.sum(0) + c
    return exact.astype(np.float32)


def fma_chain(a, b, c):
    for k in range(16):
        c = fma(widen(a[..., k]), widen(b[..., k]), c)
    return c


VARIANTS = {
    "a fraction bit more": truncating(26, -133),
    "a fraction bit less": truncating(24, -133),
    "no floor of the exponent": truncating(25, -400),
    "floor at the least normal exponent": truncating(25, -126),
    "products renormalised": products_and(renormalised),
    "zeros with an exponent": products_and(zeros_keep_an_exponent),
    "two steps of 8": two_steps_of_8,
    "rounded to nearest": rounded_to_nearest,
    "fmaf": fma_chain,
}


def test_recorded_vectors_accept_the_step():
    recorded(truncating(25, -133))


@pytest.mark.parametrize("name", VARIANTS)
def test_recorded_vectors(name):
    refuses(recorded, VARIANTS[name])


# ---- Skinny GEMM ---------------------------------------------------------------------------------------------------


def skinny_like(gemm):
    """skinny_gemm on an implementation of gemm."""

    def skinny_gemm(x, w, *, bias=None, **options):
        rows = x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])
        bias = bias if bias is None or bias.ndim == 1 else bias.reshape(len(rows), -1)
        return gemm(rows, w.T, bias=bias, **options).reshape(x.shape[:-1] + w.shape[:1])

    return skinny_gemm


def test_skinny_equals_gemm():
    test_skinny_gemm.check_skinny_equals_gemm(skinny_like(reference.gemm), reference.gemm, "ieee", "fp32")
    for broken in (split_k_by_rows, numpy_matmul):
        refuses(
            test_skinny_gemm.check_skinny_equals_gemm, skinny_like(gemm_like(broken)), reference.gemm, "ieee", "fp32"
        )


def test_skinny_batch_invariance():
    for broken in (split_k_by_rows, by_place_in_the_batch, neighbours_leak):
        refuses(test_skinny_gemm.check_skinny_batch_invariance, skinny_like(gemm_like(broken)), "ieee", "fp32")


# ---- RMSNorm -------------------------------------------------------------------------------------------------------


def with_pieces(function, **pieces):
    """The reference with some of its functions replaced while it runs."""

    @functools.wraps(function)
    def call(*args, **options):
        with pytest.MonkeyPatch.context() as patch:
            for name, piece in pieces.items():
                patch.setattr(reference, name, piece)
            return function(*args, **options)

    return call


def numpy_row_sum(a, b):
    return (a * b).sum(-1, dtype=np.float32)


def lanes_by_row_count(a, b):
    """More lanes where there are fewer rows."""
    lanes = 512 if len(a) < 16 else 2048
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "ROW_LANES", lanes)
        return row_sum(a, b)


def leaking_row_sum(a, b):
    sums = row_sum(a, b)
    return sums + 0.0 * np.roll(sums, 1)


def one_rounding_root(squares, eps, n):
    """rstd from one rounding of the float64 value, as a fast reciprocal square root may give it."""
    return (1 / np.sqrt(squares.astype(np.float64) / n + np.float32(eps))).astype(np.float32)


row_sum, sum_over_rows = reference.row_sum, reference.sum_over_rows


rsqrt_norm = with_pieces(reference.rmsnorm, rstd_of=one_rounding_root)


def one_chain(a, b, start):
    for row in range(len(a)):
        start = fma(a[row], b[row], start)
    return start


def cut_by(parts):
    """As a kernel does that gives each thread, or each SM, a share of the rows."""

    def sums(a, b, start):
        size = max(-(-len(a) // parts()), 1)
        for first in range(0, len(a), size):
            start = start + one_chain(a[first : first + size], b[first : first + size], np.zeros_like(start))
        return start

    return sums


def padded_with_zeros(a, b):
    """Rows filled up to whole vectors with (+0, +0), which turns -0 into +0."""
    fill = np.zeros((len(a), -a.shape[1] % 16), np.float32)
    return row_sum(np.concatenate([a, fill], 1), np.concatenate([b, fill], 1))


def started_late(a, b, start):
    return start + sum_over_rows(a, b, np.zeros_like(start))


FORWARD = [(3, 7), (5, 100), (20, 2049), (2, 4100)]
BACKWARD = [(3, 7), (70, 100), (20, 2049), (600, 33)]


def test_rmsnorm_reference_passes():
    test_rmsnorm.check_forward(reference.rmsnorm, "fp32", FORWARD)
    test_rmsnorm.check_backward(reference.rmsnorm_backward, "fp32", BACKWARD)
    test_rmsnorm.check_rows_alone(reference.rmsnorm, reference.rmsnorm_backward, "fp32")
    test_rmsnorm.check_dweight_continues(reference.rmsnorm_backward, "fp32")
    test_rmsnorm.check_forward_error(rsqrt_norm, "fp32")


def test_rmsnorm_forward():
    refuses(test_rmsnorm.check_forward, rsqrt_norm, "fp32", FORWARD)
    refuses(test_rmsnorm.check_forward, with_pieces(reference.rmsnorm, row_sum=numpy_row_sum), "fp32", FORWARD)
    refuses(test_rmsnorm.check_forward, with_pieces(reference.rmsnorm, ROW_LANES=1024), "fp32", FORWARD)


def test_rmsnorm_backward():
    for pieces in (
        {"row_sum": numpy_row_sum},
        {"sum_over_rows": one_chain},
        {"sum_over_rows": cut_by(lambda: 2)},
        {"sum_over_rows": cut_by(lambda: 132)},
        {"fma": lambda a, b, c: a * b + c},
    ):
        refuses(test_rmsnorm.check_backward, with_pieces(reference.rmsnorm_backward, **pieces), "fp32", BACKWARD)


def test_negative_zero_sums():
    test_rmsnorm.check_negative_zero_sums(reference.rmsnorm_backward, "fp32")
    broken = with_pieces(reference.rmsnorm_backward, row_sum=padded_with_zeros)
    refuses(test_rmsnorm.check_negative_zero_sums, lambda *a: broken(*a), "fp32")


def test_rmsnorm_errors():
    def nan_norm(x, weight, **options):
        return np.full_like(x, np.nan), np.full(x.shape[:-1], np.nan, np.float32)

    def nan_gradients(dy, x, weight, rstd, **options):
        return np.full_like(x, np.nan), np.full(x.shape[-1], np.nan, np.float32)

    def no_mean_term(dy, x, weight, rstd, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "row_sum", lambda a, b: np.zeros(len(a), np.float32))
            return reference.rmsnorm_backward(dy, x, weight, rstd, **options)

    refuses(test_rmsnorm.check_forward_error, nan_norm, "fp32")
    refuses(test_rmsnorm.check_backward_error, nan_gradients, "fp32")
    refuses(test_rmsnorm.check_backward_error, no_mean_term, "fp32")


@pytest.mark.parametrize("piece", [lanes_by_row_count, leaking_row_sum])
def test_rows_alone(piece):
    with pytest.raises(AssertionError):
        test_rmsnorm.check_rows_alone(with_pieces(reference.rmsnorm, row_sum=piece), reference.rmsnorm_backward, "fp32")
    with pytest.raises(AssertionError):
        test_rmsnorm.check_rows_alone(reference.rmsnorm, with_pieces(reference.rmsnorm_backward, row_sum=piece), "fp32")


@pytest.mark.parametrize("piece", [started_late, cut_by(lambda: 4), cut_by(lambda: 132), one_chain])
def test_dweight_continues(piece):
    refuses(test_rmsnorm.check_dweight_continues, with_pieces(reference.rmsnorm_backward, sum_over_rows=piece), "fp32")


@pytest.mark.parametrize("piece", [cut_by(lambda: 4), one_chain])
def test_block_sums(piece):
    broken = with_pieces(reference.rmsnorm_backward, sum_over_rows=piece)
    refuses(test_rmsnorm.check_block_sums, broken, "fp32", test_rmsnorm.BLOCK_SHAPES[:3])


def test_dweight_by_threads():
    broken = with_pieces(reference.rmsnorm_backward, sum_over_rows=cut_by(thread_count))
    for count in (1, 2, 7):
        with threads(count):
            refuses(test_rmsnorm.check_backward, broken, "fp32", test_rmsnorm.SHARED_OUT)


def test_rmsnorm_float_environment():
    refuses(test_rmsnorm.check_forward_float_environment, reference.rmsnorm, "fp32")
    refuses(test_rmsnorm.check_backward_float_environment, reference.rmsnorm_backward, "fp32")


# ---- Golden hashes -------------------------------------------------------------------------------------------------


def golden(function, operation, dtype="bf16"):
    test_golden.check_golden(operation, function, "ieee", dtype)


def test_golden_hashes():
    refuses(golden, gemm_like(k_descending), "gemm")
    refuses(golden, gemm_like(pairwise_fold), "gemm")
    refuses(golden, skinny_like(gemm_like(split_k_by_rows)), "skinny_gemm")
    refuses(golden, rsqrt_norm, "rmsnorm", "fp32")
    refuses(golden, with_pieces(reference.rmsnorm_backward, sum_over_rows=one_chain), "rmsnorm_backward", "fp32")
