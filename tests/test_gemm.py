"""gemm, gemm_da, gemm_db: every kernel, forced by name, against the reference and against itself."""

import ctypes
import dataclasses
import functools
import itertools
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import cases
import pydet
import reference
from cases import DTYPES, KINDS, LAYOUTS, Problem, assert_same_bits, check_equals_reference, data, lay
from conftest import threads, unusual_float_environment
from reference import STEP

VECTORS = pathlib.Path(__file__).parent / "data" / "h100_mma_vectors.npz"


def start_from(kernel, **fields):
    return Problem(**{"m": 5, "n": 19, "k": 40, "dtype": kernel.dtype, "arithmetic": kernel.arithmetic, **fields})


# ---- Values --------------------------------------------------------------------------------------------------------


def check_small_integers(gemm, arithmetic, dtype):
    """Every partial sum is exact, so any order gives the product: what is wrong here is an index."""
    layouts = itertools.cycle(itertools.product(LAYOUTS[:4], LAYOUTS[:4], ["row", "col", "row_padded", "col_padded"]))
    for (m, n, k), out_dtype in itertools.product(
        [(1, 1, 1), (1, 40, 33), (40, 1, 17), (3, 130, 64), (15, 33, 100), (64, 64, 64), (130, 70, 96)], DTYPES
    ):
        a_layout, b_layout, out_layout = next(layouts)
        problem = Problem(m, n, k, dtype, arithmetic, out_dtype, "integers", a_layout, b_layout, out_layout)
        a, b, _ = problem.operands()
        exact = reference.widen(a).astype(np.int64) @ reference.widen(b).astype(np.int64)
        assert_same_bits(
            cases.run(gemm, problem), reference.round_to(exact.astype(np.float32), DTYPES[out_dtype]), str(problem)
        )


# Roundings that one step adds to the error, in units of 2^-24 sum |a b|: the addends that are cut, and the sum.
STEP_ERROR = {"ieee": 1, "sm90": 11, "sm80": 11, "cdna3": 11, "cdna2": 4}


def check_error_bound(gemm, arithmetic, dtype):
    for kind, k_chunk in itertools.product(["normal", "wide"], [None, 64]):
        problem = Problem(33, 65, 1003, dtype, arithmetic, kind=kind, k_chunk=k_chunk)
        a, b, _ = problem.operands()
        a, b = reference.widen(a).astype(np.float64), reference.widen(b).astype(np.float64)
        steps = -(-problem.k // STEP[arithmetic])
        bound = 1.01 * STEP_ERROR[arithmetic] * steps * 2.0**-24 * (np.abs(a) @ np.abs(b))
        error = np.abs(cases.run(gemm, problem).astype(np.float64) - a @ b)
        assert np.all(error <= bound), f"{problem}: {np.sum(~(error <= bound))} errors above the bound"


def check_recorded_vectors(gemm, dtype):
    """What an H100 returned: 4096 single steps with c, and chains up to K = 512."""
    vectors = np.load(VECTORS)
    a, b, c = (vectors[f"step_{dtype}_{name}"] for name in "abc")
    out = c.view(np.float32).reshape(-1, 1, 1).copy()
    gemm(
        a.view(DTYPES[dtype])[:, None, :],
        b.view(DTYPES[dtype])[:, :, None],
        out=out,
        accumulate=True,
        arithmetic="sm90",
    )
    assert_same_bits(out.reshape(-1), vectors[f"step_{dtype}_d"].view(np.float32), f"single steps, {dtype}")
    chains = [name[:-2] for name in vectors if name.startswith(f"chain_{dtype}_") and name.endswith("_d")]
    assert len(chains) == 8
    for name in chains:
        a, b, d = (vectors[f"{name}_{letter}"] for letter in "abd")
        result = gemm(a.view(DTYPES[dtype]), b.view(DTYPES[dtype]).T, out_dtype=np.float32, arithmetic="sm90")
        assert_same_bits(result, d.view(np.float32), name)


def test_small_integers(gemm_kernel):
    check_small_integers(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_error_bound(gemm_kernel):
    check_error_bound(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_recorded_vectors(gemm_kernel):
    if gemm_kernel.arithmetic == "sm90":
        check_recorded_vectors(gemm_kernel.gemm, gemm_kernel.dtype)


def test_reference_fma_is_that_of_the_c_library():
    fmaf = ctypes.CDLL("libm.so.6").fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    words = cases.random_words((3, 30000), 0)
    sign, mantissa = cases.field(words, 63, 1), cases.field(words, 0, 23)
    close = cases.field(words[:, :15000], 24, 4) - 8  # hard to round
    low = np.array([[-75], [-60], [-140]]) + cases.field(words[:, 15000:], 24, 4)  # subnormal results
    a, b, c = cases.from_fields(sign, np.concatenate([close, low], 1), mantissa, reference.FLOAT32)
    expected = np.array([fmaf(*map(float, abc)) for abc in zip(a, b, c, strict=False)], np.float32)
    assert_same_bits(reference.fma(a, b, c), expected)


def test_reference_reproduces_the_recorded_vectors():
    for dtype in ("bf16", "fp16"):
        check_recorded_vectors(reference.gemm, dtype)


def test_the_forced_kernel_is_the_one_that_runs(gemm_kernel):
    a, b, options = start_from(gemm_kernel, m=19, n=19, k=19).operands()
    for operation in (gemm_kernel.gemm, gemm_kernel.gemm_da, gemm_kernel.gemm_db, gemm_kernel.skinny_gemm):
        pydet.rmsnorm(np.ones(3, np.float32), eps=0.0)
        operation(a, b, out_dtype=np.float32, **options)
        assert pydet.last_kernel() == gemm_kernel.name


# ---- Bits against the reference ------------------------------------------------------------------------------------


def test_every_k_to_130(gemm_kernel):
    layouts = itertools.cycle(itertools.product(LAYOUTS, LAYOUTS))
    for k in range(131):
        a_layout, b_layout = next(layouts)
        check_equals_reference(
            gemm_kernel.gemm,
            [
                start_from(gemm_kernel, m=3, k=k, a_layout=a_layout, b_layout=b_layout),
                start_from(
                    gemm_kernel,
                    m=6,
                    k=k,
                    kind=KINDS[1 + k % 5],
                    a_layout=a_layout,
                    b_layout=b_layout,
                    out_dtype=list(DTYPES)[k % 3],
                    bias=["", "n bf16", "mn fp32"][k % 3],
                    accumulate=k % 6 == 0,
                    k_chunk=[None, 16, 48, 64][k % 4],
                ),
            ],
        )


EDGES = sorted({edge + around for edge in (64, 128, 192, 256, 384, 512) for around in (-1, 0, 1)})


@pytest.mark.parametrize("out_dtype", ["fp32", "bf16"])
def test_around_block_sizes(gemm_kernel, out_dtype):
    make = functools.partial(start_from, gemm_kernel, out_dtype=out_dtype)
    problems = [
        make(m=4, n=35, k=k, kind="wide", a_layout=a, b_layout=b)
        for k, (a, b) in zip(
            [*EDGES, 1023, 1025, 2047, 2049], itertools.cycle(itertools.product(LAYOUTS[:2], LAYOUTS[:2]))
        )
    ]
    problems += [make(m=m, n=5, k=33, a_layout=LAYOUTS[m % 4], b_layout=LAYOUTS[m // 2 % 4]) for m in EDGES]
    problems += [
        make(m=3, n=n, k=33, a_layout=LAYOUTS[n % 4], b_layout=LAYOUTS[n // 2 % 4])
        for n in [*EDGES, 1023, 1024, 1025, 2049]
    ]
    few = zip(EDGES, itertools.cycle(["row", "col", "col_padded"]), itertools.cycle([None, None, 48, 128]))
    problems += [
        make(m=m, n=n, k=k, kind="wide", a_layout=layout, b_layout=layout, k_chunk=k_chunk)
        for k, layout, k_chunk in few
        for m, n in [(1 + k % 3, 131), (131, 1 + k % 3)]
    ]
    problems += [
        make(m=20, n=1030, k=70, b_layout=layout, k_chunk=chunk) for layout in ("row", "col") for chunk in (None, 32)
    ]
    problems += [
        make(m=260, n=40, k=300, b_layout=layout, k_chunk=chunk) for layout in ("row", "col") for chunk in (None, 128)
    ]
    check_equals_reference(gemm_kernel.gemm, problems)


def test_every_small_m_and_n(gemm_kernel):
    whole = start_from(gemm_kernel, m=34, n=70, k=18, kind="wide")
    a, b, _ = whole.operands()
    for b_layout in ("row", "col"):
        b_laid = lay(b, b_layout)
        for m, n in itertools.product([*list(range(1, 20)), 28, 29, 34], [*list(range(1, 36)), 48, 49, 63, 64, 65, 70]):
            result = gemm_kernel.gemm(a[:m], b_laid[:, :n], out_dtype=np.float32, arithmetic=gemm_kernel.arithmetic)
            assert_same_bits(result, whole.expected()[:m, :n], f"{m}x{n}, b {b_layout}")


def test_every_type_and_option(gemm_kernel):
    biases = ["", *(f"{extents} {dtype}" for extents in ("n", "mn") for dtype in DTYPES)]
    layouts = itertools.cycle(["row", "col", "row_padded", "col_padded"])
    check_equals_reference(
        gemm_kernel.gemm,
        [
            start_from(
                gemm_kernel,
                m=7,
                n=37,
                k=50,
                kind=kind,
                out_dtype=out_dtype,
                bias=bias,
                accumulate=accumulate,
                k_chunk=k_chunk,
                out_layout=next(layouts),
                seed=seed,
            )
            for seed, kind in enumerate(KINDS)
            for out_dtype in DTYPES
            for bias in biases
            for accumulate in (False, True)
            for k_chunk in (None, 16, 32, 64)
            if out_dtype == "fp32" or not accumulate
        ],
    )


def test_every_layout(gemm_kernel):
    check_equals_reference(
        gemm_kernel.gemm,
        [
            start_from(
                gemm_kernel,
                m=m,
                n=n,
                k=37,
                a_layout=a_layout,
                b_layout=b_layout,
                out_layout=out_layout,
                out_dtype=out_dtype,
            )
            for (m, n), a_layout, b_layout, out_layout, out_dtype in itertools.product(
                [(1, 20), (9, 21), (20, 1), (21, 2)],
                LAYOUTS,
                LAYOUTS,
                ["row", "col", "row_padded", "col_padded"],
                DTYPES,
            )
        ],
    )


def test_extreme_numbers(gemm_kernel):
    kinds = ["extremes", "specials", "tiny"]
    problems = [
        start_from(gemm_kernel, m=30, n=45, k=k, kind=kind, out_dtype=out_dtype, accumulate=accumulate)
        for kind, k, out_dtype in itertools.product(kinds, [1, 2, 5, 8, 16, 50], DTYPES)
        for accumulate in ([False, True] if out_dtype == "fp32" else [False])
    ]
    seen = np.concatenate([reference.widen(p.expected()).ravel() for p in problems if p.out_dtype == "fp32"])
    assert np.isnan(seen).any() and np.isposinf(seen).any() and np.isneginf(seen).any()
    subnormal = np.any((np.abs(seen) < 2.0**-126) & (seen != 0))
    assert subnormal == (gemm_kernel.dtype != "fp16" and gemm_kernel.arithmetic != "cdna2")
    check_equals_reference(gemm_kernel.gemm, problems)


def test_empty_extents(gemm_kernel):
    for accumulate, k_chunk, bias in itertools.product([False, True], [None, 16], ["", "n fp32", "mn bf16"]):
        check_equals_reference(
            gemm_kernel.gemm,
            [start_from(gemm_kernel, k=0, kind="specials", accumulate=accumulate, k_chunk=k_chunk, bias=bias)],
        )
    for fields in ({"m": 0}, {"n": 0}, {"m": 0, "n": 0, "k": 0}, {"batch": (0,)}, {"batch": (2, 0)}):
        check_equals_reference(gemm_kernel.gemm, [start_from(gemm_kernel, **fields)])


def test_batches(gemm_kernel):
    for batch in [(3,), (2, 3), (1, 1), (2, 1, 3, 1, 2, 1)]:
        for a_layout, b_layout, out_layout in [
            ("row", "row", "row"),
            ("col", "row_padded", "col_padded"),
            ("row_padded", "col", "row"),
        ]:
            check_equals_reference(
                gemm_kernel.gemm,
                [
                    start_from(
                        gemm_kernel,
                        batch=batch,
                        a_layout=a_layout,
                        b_layout=b_layout,
                        out_layout=out_layout,
                        bias=bias,
                        k_chunk=k_chunk,
                    )
                    for bias in ("", "n bf16", "mn fp16")
                    for k_chunk in (None, 32)
                ],
            )


def test_batches_broadcast(gemm_kernel):
    dtype = DTYPES[gemm_kernel.dtype]
    for a_batch, b_batch, bias_batch in [
        ((), (3,), ()),
        ((4, 1), (3,), (4, 3)),
        ((1, 3), (4, 1), (1, 3)),
        ((3,), (), (3,)),
        ((2, 1, 2), (3, 1), (2, 3, 2)),
    ]:
        a, b = data("normal", (*a_batch, 5, 40), dtype), data("normal", (*b_batch, 40, 19), dtype, 1)
        bias = data("normal", (*bias_batch, 5, 19), dtype, 2)
        batch = np.broadcast_shapes(a_batch, b_batch)
        expected = reference.gemm(a, b, bias=bias, out_dtype=np.float32, arithmetic=gemm_kernel.arithmetic)
        options = {"out_dtype": np.float32, "arithmetic": gemm_kernel.arithmetic}
        assert_same_bits(
            gemm_kernel.gemm(a, b, bias=np.broadcast_to(bias, (*batch, 5, 19)), **options), expected, "shapes"
        )
        stride_0 = [np.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b, bias)]
        assert_same_bits(gemm_kernel.gemm(stride_0[0], stride_0[1], bias=stride_0[2], **options), expected, "stride 0")


problems = st.builds(
    Problem,
    m=st.integers(0, 70),
    n=st.integers(0, 70),
    k=st.integers(0, 200),
    out_dtype=st.sampled_from(list(DTYPES)),
    kind=st.sampled_from(KINDS),
    a_layout=st.sampled_from(LAYOUTS),
    b_layout=st.sampled_from(LAYOUTS),
    out_layout=st.sampled_from(["row", "col", "row_padded", "col_padded"]),
    bias=st.sampled_from(["", "n fp32", "mn bf16", "mn fp16"]),
    k_chunk=st.sampled_from([None, 16, 48, 112]),
    seed=st.integers(0, 9),
)


def test_any_problem(gemm_kernel):
    @hypothesis.settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @hypothesis.given(problems, st.booleans())
    def any_problem(problem, accumulate):
        problem = dataclasses.replace(
            problem,
            dtype=gemm_kernel.dtype,
            arithmetic=gemm_kernel.arithmetic,
            accumulate=accumulate and problem.out_dtype == "fp32",
        )
        check_equals_reference(gemm_kernel.gemm, [problem])

    any_problem()


# ---- A row's bits against the batch --------------------------------------------------------------------------------


def check_batch_invariance(gemm, arithmetic, dtype, k_chunk=None):
    """Rows of a and columns of b, alone and in every company, have the bits that they have in one large call."""
    a, b, _ = Problem(70, 45, 200, dtype).operands()
    call = functools.partial(gemm, arithmetic=arithmetic, k_chunk=k_chunk, out_dtype=np.float32)
    whole = call(a, b)
    order = np.argsort(cases.random_words(70, 5), kind="stable")
    for row in (0, 1, 33, 68, 69):
        assert_same_bits(call(a[row : row + 1], b), whole[row : row + 1], f"row {row} alone")
    for count in range(1, 20):
        assert_same_bits(call(a[:count], b), whole[:count], f"the first {count} rows")
    for size in (7, 16, 64):
        pieces = [call(a[i : i + size], b) for i in range(0, 70, size)]
        assert_same_bits(np.concatenate(pieces), whole, f"rows in pieces of {size}")
    assert_same_bits(call(a[1::2], b), whole[1::2], "odd rows, as a strided view")
    assert_same_bits(call(a[order], b), whole[order], "shuffled rows")
    assert_same_bits(call(lay(a, "row_padded"), b), whole, "padded rows")
    assert_same_bits(call(lay(a, "col"), lay(b, "col")), whole, "transposed operands")
    assert_same_bits(call(np.concatenate([a, a[order], a, a, a]), b)[70:140], whole[order], "inside a larger batch")
    assert_same_bits(
        call(np.broadcast_to(a[9:10], (50, 200)), b), np.broadcast_to(whole[9:10], (50, 45)), "one row, 50 times"
    )
    among_nan = np.full_like(a, np.nan)
    among_nan[[3, 40, 69]] = a[[3, 40, 69]]
    assert_same_bits(call(among_nan, b)[[3, 40, 69]], whole[[3, 40, 69]], "among NaN rows")
    for column in (0, 1, 31, 44):
        assert_same_bits(call(a, b[:, column : column + 1]), whole[:, column : column + 1], f"column {column} alone")
    assert_same_bits(call(a, b[:, 3:40]), whole[:, 3:40], "columns 3 to 39")
    assert_same_bits(call(a[5:6], b[:, 7:8]), whole[5:6, 7:8], "one element")
    wide = np.concatenate([b, b, b[:, ::-1], b], axis=1)
    assert_same_bits(call(a, wide)[:, 135:], whole, "among more columns")
    assert_same_bits(call(a[:2], wide)[:, 135:], whole[:2], "two rows among more columns")
    in_batch = call(np.stack([among_nan, a, a[order]]), np.stack([b, b, b]))
    assert_same_bits(in_batch[1], whole, "in a batch of matrices")
    assert_same_bits(call(a[:, None, :], b), whole[:, None, :], "one row a matrix")


@pytest.mark.parametrize("k_chunk", [None, 64])
def test_batch_invariance(gemm_kernel, k_chunk):
    check_batch_invariance(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype, k_chunk)


def test_batch_invariance_of_the_library_s_own_choice():
    for dtype, arithmetics in cases.ARITHMETICS.items():
        for arithmetic in arithmetics:
            check_batch_invariance(pydet.gemm, arithmetic, dtype)
            problem = Problem(70, 45, 200, dtype, arithmetic)
            assert_same_bits(cases.run(pydet.gemm, problem), problem.expected(), str(problem))


# ---- accumulate and k_chunk ----------------------------------------------------------------------------------------


def check_accumulate(gemm, arithmetic, dtype):
    """A sum cut at any multiple of the step goes on where it stopped."""
    a, b, _ = Problem(6, 33, 83, dtype, kind="wide").operands()
    call = functools.partial(gemm, arithmetic=arithmetic)
    whole = call(a, b, out_dtype=np.float32)
    cuts = list(range(STEP[arithmetic], 83, STEP[arithmetic]))
    for pieces in [[cut] for cut in cuts] + [cuts, cuts[::2], cuts[1::3]]:
        out = np.zeros((6, 33), np.float32)
        for start, stop in itertools.pairwise([0, *pieces, 83]):
            call(a[:, start:stop], b[start:stop], out=out, accumulate=True)
        assert_same_bits(out, whole, f"cut at {pieces}")


def check_k_chunk(gemm, arithmetic, dtype):
    """Chunk sums, each a chain from +0, added in ascending order from +0; and cut between chunks, the same."""
    a, b, _ = Problem(6, 33, 200, dtype, kind="wide").operands()
    call = functools.partial(gemm, arithmetic=arithmetic)
    for chunk in (16, 32, 48, 96, 192, 208, 1 << 40):
        whole = call(a, b, out_dtype=np.float32, k_chunk=chunk)
        folded = np.zeros((6, 33), np.float32)
        for start in range(0, 200, chunk):
            folded = folded + call(a[:, start : start + chunk], b[start : start + chunk], out_dtype=np.float32)
        assert_same_bits(whole, folded, f"k_chunk {chunk}")
        for cut in range(chunk, 200, chunk):
            out = call(a[:, :cut], b[:cut], out_dtype=np.float32, k_chunk=chunk)
            call(a[:, cut:], b[cut:], out=out, accumulate=True, k_chunk=chunk)
            assert_same_bits(out, whole, f"k_chunk {chunk} cut at {cut}")


def test_accumulate(gemm_kernel):
    check_accumulate(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def check_initial(gemm, arithmetic, dtype):
    """A sum that was begun elsewhere ends as one call that had it all: with a bias, and one rounding to any type."""
    m, n, k = 6, 33, 83
    a, b, _ = Problem(m, n, k, dtype, kind="wide").operands()
    bias = data("normal", (n,), DTYPES[dtype])
    call = functools.partial(gemm, arithmetic=arithmetic)
    for out_dtype, k_chunk, added in itertools.product(DTYPES.values(), (None, 32), (None, bias)):
        options = {"k_chunk": k_chunk, "bias": added, "out_dtype": out_dtype}
        whole = call(a, b, **options)
        for cut in range(0, k, k_chunk or 16):
            begun = call(a[:, :cut], b[:cut], k_chunk=k_chunk, out_dtype=np.float32)
            got = call(a[:, cut:], b[cut:], initial=begun, **options)
            assert_same_bits(got, whole, f"cut at {cut}, {options}")


def test_initial(gemm_kernel):
    check_initial(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_initial_of_any_problem(gemm_kernel):
    """Strided outputs on either side, biases, batches, an empty K, NaN, infinities and -0."""
    problems = [
        start_from(gemm_kernel, initial=True, **fields)
        for fields in (
            *({"m": 9, "n": 37, "k": 67, "kind": kind, "out_dtype": "bf16"} for kind in cases.KINDS),
            *({"m": 9, "n": 37, "k": 40, "out_layout": layout, "bias": "mn bf16"} for layout in LAYOUTS[:4]),
            *({"m": 9, "n": 37, "k": 40, "out_layout": layout, "out_dtype": "fp16"} for layout in LAYOUTS[:4]),
            *({"m": 9, "n": 36, "k": 0, "bias": bias, "kind": "specials"} for bias in ("", "n fp32")),
            {"m": 9, "n": 36, "k": 0, "out_dtype": "bf16", "kind": "specials"},
            {"m": 5, "n": 8, "k": 50, "batch": (2, 3), "bias": "mn fp16", "k_chunk": 16, "out_dtype": "fp16"},
            {"m": 1, "n": 1, "k": 20, "bias": "n fp32", "out_dtype": "bf16"},
        )
    ]
    cases.check_equals_reference(gemm_kernel.gemm, problems)


def test_initial_of_minus_zero_stays():
    a, b, minus = np.zeros((2, 3), np.float32), np.zeros((3, 4), np.float32), np.full((2, 4), -0.0, np.float32)
    for out_dtype in DTYPES.values():
        got = pydet.gemm(a[:, :0], b[:0], initial=minus, out_dtype=out_dtype)
        assert np.signbit(got.astype(np.float32)).all()
        assert not np.signbit(pydet.gemm(a, b, out_dtype=out_dtype).astype(np.float32)).any()


def test_initial_on_every_thread_count(gemm_kernel):
    problem = start_from(gemm_kernel, m=130, n=2100, k=16, out_dtype="bf16", bias="n fp32", initial=True)
    want = None
    for count in (1, 2, 7):
        with threads(count):
            got = cases.run(gemm_kernel.gemm, problem)
        want = got if want is None else want
        assert_same_bits(got, want, f"{count} threads")


def test_k_chunk(gemm_kernel):
    check_k_chunk(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_chunks_across_stages(gemm_kernel):
    cases.check_chunks(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype, rows=(1, 33), n=35)


# ---- Gradients -----------------------------------------------------------------------------------------------------


def check_gradients(gemm, gemm_da, gemm_db, arithmetic, dtype):
    """gemm on transposed views; db over micro-batches is db of the whole batch."""
    m, n, k, step = 100, 21, 34, STEP[arithmetic]
    a, b = data("normal", (m, k), DTYPES[dtype]), data("normal", (k, n), DTYPES[dtype], 1)
    dc = data("wide", (m, n), DTYPES[dtype], 2)
    for k_chunk in (None, 16):
        options = {"arithmetic": arithmetic, "k_chunk": k_chunk}
        for layout, out_dtype in itertools.product(LAYOUTS[:4], DTYPES.values()):
            args = dict(options, out_dtype=out_dtype)
            assert_same_bits(gemm_da(lay(dc, layout), b, **args), gemm(dc, b.T, **args), f"da, {layout}")
            assert_same_bits(gemm_db(a, lay(dc, layout), **args), gemm(a.T, dc, **args), f"db, {layout}")
        whole = gemm_db(a, dc, out_dtype=np.float32, **options)
        for size in range(k_chunk or step, m + 1, k_chunk or step):
            db = np.zeros((k, n), np.float32)
            for start in range(0, m, size):
                gemm_db(a[start : start + size], dc[start : start + size], out=db, accumulate=True, **options)
            assert_same_bits(db, whole, f"db over micro-batches of {size}")


def test_gradients(gemm_kernel):
    check_gradients(
        gemm_kernel.gemm, gemm_kernel.gemm_da, gemm_kernel.gemm_db, gemm_kernel.arithmetic, gemm_kernel.dtype
    )


def test_gradients_in_batches(gemm_kernel):
    dtype, options = DTYPES[gemm_kernel.dtype], {"out_dtype": np.float32, "arithmetic": gemm_kernel.arithmetic}
    a, b, dc = (data("normal", (3, *shape), dtype) for shape in [(20, 34), (34, 21), (20, 21)])
    assert_same_bits(gemm_kernel.gemm_da(dc, b[0], **options), reference.gemm_da(dc, b[0], **options), "da")
    assert_same_bits(gemm_kernel.gemm_db(a, dc, **options), reference.gemm_db(a, dc, **options), "db")


# ---- Surroundings --------------------------------------------------------------------------------------------------

LARGE = [  # more than 2^20 products, for which kernels wake threads
    Problem(64, 96, 200),
    Problem(150, 130, 70, out_layout="col"),
    Problem(2, 1500, 450, b_layout="col"),
    Problem(1, 2100, 600, k_chunk=64),
    Problem(500, 3, 800, kind="wide"),
    Problem(30, 60, 150, batch=(5,), bias="mn fp32"),
]


def check_threads(gemm, arithmetic, dtype, count):
    """Problems large enough to be shared out have the reference's bits on any number of threads."""
    with threads(count):
        check_equals_reference(gemm, [dataclasses.replace(p, dtype=dtype, arithmetic=arithmetic) for p in LARGE])


def check_repeated_calls(gemm, arithmetic, dtype):
    problem = Problem(64, 96, 200, dtype, arithmetic)
    first = cases.run(gemm, problem)
    for _ in range(20):
        assert_same_bits(cases.run(gemm, problem), first, "again")


def check_float_environment(gemm, arithmetic, dtype):
    """Neither flush-to-zero nor the rounding mode of the calling thread reaches a bit, and both are kept."""
    problems = [Problem(30, 45, k, dtype, arithmetic, kind="extremes") for k in (1, 16, 50)]
    problems += [Problem(64, 96, 200, dtype, arithmetic, out_dtype) for out_dtype in DTYPES]
    for problem in problems:
        a, b, options = problem.operands()
        out = np.empty(problem.shape, DTYPES[problem.out_dtype])
        with threads(2), unusual_float_environment() as still_set:
            gemm(a, b, out=out, **options)
            kept = still_set()
        assert_same_bits(out, problem.expected(), str(problem))
        assert kept, "the caller's settings were changed"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads(gemm_kernel, count):
    check_threads(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype, count)


def test_repeated_calls(gemm_kernel):
    check_repeated_calls(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_float_environment(gemm_kernel):
    check_float_environment(gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def check_workspace(call, size):
    """call(workspace) returns a result's bytes: the same whatever the workspace held; nothing past it is written."""
    results = []
    for fill in (0x00, 0xFF, 0x41):
        workspace = np.full(size + 4096, fill, np.uint8)
        aligned = workspace[-workspace.ctypes.data % 256 :]
        results.append(call(aligned[:size]))
        assert np.all(aligned[size:] == fill), "bytes past the workspace changed"
    assert results[0] == results[1] == results[2], "the workspace's contents reached the result"


def test_workspace(gemm_kernel):
    from capi import Tensor, ffi, lib, options

    problem = start_from(gemm_kernel, m=3, n=200, k=300, k_chunk=64)
    a, b, _ = problem.operands()
    fields = {"kernel": gemm_kernel.name, "k_chunk": 64}
    size = ffi.new("uint64_t *")
    assert lib.pydet_gemm_workspace(1, 3, 200, 300, options("pydet_gemm_options", **fields), size) == lib.PYDET_OK

    def call(workspace):
        out = np.empty(problem.shape, np.float32)
        made = options(
            "pydet_gemm_options",
            arithmetic=getattr(lib, f"PYDET_{problem.arithmetic.upper()}"),
            workspace=ffi.from_buffer(workspace),
            workspace_size=len(workspace),
            **fields,
        )
        assert lib.pydet_gemm(ffi.NULL, Tensor(a).c, Tensor(b).c, ffi.NULL, Tensor(out).c, made) == lib.PYDET_OK
        assert_same_bits(out, problem.expected(), str(problem))
        return out.tobytes()

    check_workspace(call, max(size[0], 256))


def test_kernels_of_one_arithmetic_agree(gemm_kernel):
    """Larger than the reference can follow: against the library's own choice."""
    for out_dtype, a_layout, b_layout in [
        ("fp32", "row", "row"),
        ("bf16", "row", "col"),
        ("fp16", "col", "row_padded"),
    ]:
        problem = start_from(
            gemm_kernel, m=131, n=270, k=421, out_dtype=out_dtype, a_layout=a_layout, b_layout=b_layout
        )
        assert_same_bits(cases.run(gemm_kernel.gemm, problem), cases.run(pydet.gemm, problem), str(problem))


BLOCKS = [  # M, N, K around what a CPU kernel packs, reads where it is and gives to a task at a time
    *((519, 129, 257), (518, 128, 512), (1037, 127, 261), (253, 257, 513), (170, 258, 260)),
    *(
        (1, 2079, 9),
        (1, 4113, 17),
        (2, 2048, 24),
        (3, 2737, 8),
        (5, 2065, 20),
        (6, 2049, 40),
        (7, 2051, 33),
        (9, 2033, 24),
    ),
    *((40, 2081, 256), (64, 3000, 130), (65, 3000, 130), (14, 500, 300), (15, 1030, 390), (15, 1030, 391)),
    *(
        (2001, 40, 210),
        (2001, 129, 210),
        (700, 127, 256),
        (300, 9, 200),
        (300, 16, 200),
        (33, 201, 700),
        (200, 200, 999),
    ),
    *((8, 100, 300), (9, 100, 300), (20, 300, 155), (20, 300, 156)),
]


def test_blocks_and_places_of_the_cpu(gemm_kernel):
    """Larger than the reference can follow: some rows and columns of each."""
    if gemm_kernel.arithmetic == "ieee":
        random = np.random.default_rng(0)
        options = itertools.cycle(
            itertools.product(
                ["fp32", "fp32", "bf16"], [False, True], [None, None, 48, 272], ["row", "row_padded", "col"]
            )
        )
        for (m, n, k), many in itertools.product(BLOCKS, (1, 3)):
            out_dtype, accumulate, k_chunk, layout = next(options)
            problem = start_from(
                gemm_kernel,
                m=m,
                n=n,
                k=k,
                out_dtype=out_dtype,
                accumulate=accumulate and out_dtype == "fp32",
                k_chunk=k_chunk if many == 1 else None,
                kind="wide",
                a_layout=layout,
                b_layout="row" if many == 1 else "col_padded",
                out_layout="row_padded",
            )
            with threads(many):
                got = cases.run(gemm_kernel.gemm, problem)
            a, b, _ = problem.operands()
            start = problem.start() if problem.accumulate else None
            rows = np.unique([0, m - 1, *random.integers(0, m, 10)])
            columns = np.unique([0, n - 1, *random.integers(0, n, 20)])
            part = np.ix_(rows, columns)
            total = reference.product_sum(
                a[rows],
                b[:, columns],
                None if start is None else start[part],
                arithmetic="ieee",
                k_chunk=problem.k_chunk,
            )
            want = reference.finish(total, a, None, None, DTYPES[out_dtype])
            assert_same_bits(got[part], want, f"{problem} on {many} threads")
