"""scaled_gemm: every kernel, forced by name, against the reference, recorded H100 results and itself."""

import dataclasses
import functools
import itertools
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

import capi
import cases
import pydet
import reference_fp8
from cases import assert_same_bits, field, lay, random_words
from conftest import threads, unusual_float_environment
from interop import jax, torch  # noqa: F401 (fixtures)
from reference import FLOAT16, FLOAT32, bits
from reference_fp8 import E4M3, E5M2, E8M0, groups

TYPES = {"e4m3": E4M3, "e5m2": E5M2}
OUT_TYPES = {"fp32": FLOAT32, "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": FLOAT16}
VECTORS = pathlib.Path(__file__).parent / "data" / "h100_fp8_vectors.npz"
A_SCALES = ["none", "tensor", "row", "group"]
B_SCALES = ["none", "tensor", "row", "group", "block"]


# ---- Problems ------------------------------------------------------------------------------------------------------


def fp8(kind, shape, dtype, seed=0):
    """Bytes: `any` of the finite ones, `near` of few exponents (sums cancel), `specials` with NaN and Inf."""
    words = random_words(shape, seed)
    fraction = 3 if dtype == E4M3 else 2
    byte = field(words, 0, 8)
    if kind == "near":
        byte = (field(words, 8, 1) << 7) | ((6 + field(words, 16, 2)) << fraction) | field(words, 24, fraction)
    finite = byte & 0x7F
    byte = np.where(finite > (0x7E if dtype == E4M3 else 0x7B), byte & 0x80, byte)
    if kind == "specials":
        special = np.array(
            [0x00, 0x80, 0x01, 0x81, 0x7F, 0x7C if dtype == E5M2 else 0x7E, 0xFC if dtype == E5M2 else 0xFE]
        )
        byte = np.where(field(words, 40, 6) == 0, special[field(words, 48, 8) % len(special)], byte)
    return byte.astype(np.uint8).view(dtype)


def scales(shape, dtype, seed, kind="normal"):
    """Positive numbers around 1; `specials`: some NaN, zero, infinite, subnormal."""
    words = random_words(shape, seed)
    if dtype == E8M0:
        byte = 120 + field(words, 8, 4)
        if kind == "specials":
            byte = np.where(field(words, 20, 2) == 0, np.array([0, 255, 254])[field(words, 24, 8) % 3], byte)
        return byte.astype(np.uint8).view(E8M0)
    value = ((127 - 8 + field(words, 30, 4)) << 23 | field(words, 0, 23)).astype(np.uint32)
    if kind == "specials":
        odd = np.array([0, 1, 0x7FC00000, 0x7F800000, 0x80000000, 0xC0000000], np.uint32)
        value = np.where(field(words, 50, 2) == 0, odd[field(words, 54, 8) % 6], value)
    return value.view(np.float32)


@dataclasses.dataclass(frozen=True)
class Scaled:
    m: int
    n: int
    k: int
    a_type: str = "e4m3"
    b_type: str = "e4m3"
    a_scale: str = "group"
    b_scale: str = "block"
    scale_type: np.dtype = FLOAT32
    arithmetic: str = "sm90"
    out_dtype: str = "fp32"
    kind: str = "any"
    a_layout: str = "row"
    b_layout: str = "col"
    out_layout: str = "row"
    bias: str = ""
    accumulate: bool = False
    k_chunk: int | None = None
    batch: tuple = ()
    seed: int = 0
    initial: bool = False  # as accumulate, but for where the sums begin

    def operands(self):
        (m, n, k), batch = (self.m, self.n, self.k), self.batch
        a = fp8(self.kind, (*batch, m, k), TYPES[self.a_type], self.seed)
        b = fp8(self.kind, (*batch, k, n), TYPES[self.b_type], self.seed + 100)
        chunks = groups(k, 32 if self.k_chunk == 32 else 128)
        shape = {"tensor": (), "row": (*batch, m, 1), "group": (*batch, m, chunks)}
        a_scale = None if self.a_scale == "none" else self.scale(shape[self.a_scale], 200)
        shape = {
            "tensor": (),
            "row": (*batch, 1, n),
            "group": (*batch, chunks, n),
            "block": (*batch, chunks, groups(n)),
        }
        b_scale = None if self.b_scale == "none" else self.scale(shape[self.b_scale], 300)
        options = {"a_scale": a_scale, "b_scale": b_scale, "arithmetic": self.arithmetic, "k_chunk": self.k_chunk}
        if self.bias:
            extents, dtype = self.bias.split()
            bias = {"n": (n,), "mn": (*batch, m, n)}[extents]
            options["bias"] = cases.data("normal", bias, OUT_TYPES[dtype], self.seed + 400)
        # Bytes are laid out, since NumPy cannot stride over e5m2.
        a, b = (lay(x.view(np.uint8), layout).view(x.dtype) for x, layout in ((a, self.a_layout), (b, self.b_layout)))
        return a, b, options

    def scale(self, shape, seed):
        kind = "specials" if self.kind == "specials" else "normal"
        return scales(shape, self.scale_type, self.seed + seed, kind).reshape(shape)

    def start(self):
        return cases.data("normal", (*self.batch, self.m, self.n), FLOAT32, self.seed + 500)

    @functools.lru_cache(maxsize=1000)  # shared by the kernels  # noqa: B019
    def expected(self):
        a, b, options = self.operands()
        if self.accumulate:
            return reference_fp8.scaled_gemm(a, b, out=self.start(), accumulate=True, **options)
        if self.initial:
            options["initial"] = self.start()
        return reference_fp8.scaled_gemm(a, b, out_dtype=OUT_TYPES[self.out_dtype], **options)


def run(scaled_gemm, problem):
    """The result, after checking that nothing beside it was written."""
    a, b, options = problem.operands()
    memory, out = cases.place((*problem.batch, problem.m, problem.n), OUT_TYPES[problem.out_dtype], problem.out_layout)
    if problem.accumulate:
        out[...] = problem.start()
        options["accumulate"] = True
    if problem.initial:
        options["initial"] = problem.start()
    before = memory.copy()
    inputs = [a.tobytes(), b.tobytes()]
    scaled_gemm(a, b, out=out, **options)
    first = out.ctypes.data - memory.ctypes.data
    np.lib.stride_tricks.as_strided(before[first:].view(out.dtype), out.shape, out.strides)[...] = out
    assert np.array_equal(before, memory), f"{problem}: bytes around out changed"
    assert inputs == [a.tobytes(), b.tobytes()], f"{problem}: an input changed"
    return np.array(out, order="C")


def check_equals_reference(scaled_gemm, problems):
    for problem in problems:
        assert_same_bits(run(scaled_gemm, problem), problem.expected(), str(problem))


def few_rows(dtype):
    """Up to 16 rows in ieee, of pieces of 16 along k: around chunks, a round of 16 of them, columns of a block."""
    b_types, kinds = itertools.cycle(TYPES), itertools.cycle(["any", "near", "specials"])
    scaled = itertools.cycle(
        [*itertools.product(["none", "row", "tensor", "group"], ["none", "row", "block", "group"])]
    )
    extras = itertools.cycle(
        [{}, {"bias": "n bf16"}, {"scale_type": E8M0}, {"out_dtype": "bf16"}, {"out_layout": "col", "bias": "mn fp32"}]
    )
    sizes = itertools.product(
        [(1, 17), (2, 16), (3, 15), (4, 33), (5, 1), (16, 20)], [16, 112, 128, 144, 2032, 2048, 2064, 4224]
    )
    for seed, ((m, n), k) in enumerate(sizes):
        a_scale, b_scale = next(scaled)
        more = next(extras)
        if "group" in (a_scale, b_scale) or b_scale == "block" or (a_scale, b_scale) == ("none", "none"):
            more = more | {"accumulate": seed % 2 == 1 and more.get("out_dtype") is None}
        yield Scaled(
            m, n, k, dtype, next(b_types), a_scale, b_scale, arithmetic="ieee", kind=next(kinds), seed=seed,
            k_chunk=128, **more,
        )  # fmt: skip


def test_few_rows(scaled_gemm_kernel):
    if scaled_gemm_kernel.arithmetic == "ieee":
        check_equals_reference(scaled_gemm_kernel.scaled_gemm, few_rows(scaled_gemm_kernel.dtype))


# ---- The chip ------------------------------------------------------------------------------------------------------


def check_recorded_vectors(scaled_gemm, a_type):
    """What an H100 returned: single steps with c, chains up to K = 4096, and chunks with scales."""
    vectors, count = np.load(VECTORS), 0
    for name in (name[:-2] for name in vectors if name.endswith("_d")):
        kind, a_name, b_name = name.split("_")[:3]
        if a_name != a_type:
            continue
        a = vectors[f"{name}_a"].view(TYPES[a_name])
        b = vectors[f"{name}_b"].view(TYPES[b_name]).swapaxes(-1, -2)
        d = vectors[f"{name}_d"].view(np.float32)
        options = {"arithmetic": "sm90", "a_scale": None, "b_scale": None, "k_chunk": 0}
        if kind == "step":
            result = vectors[f"{name}_c"].view(np.float32).copy()
            scaled_gemm(a, b, out=result, accumulate=True, **options)
        else:
            if kind == "scaled":
                sa, sb = (vectors[f"{name}_{scale}"].view(np.float32) for scale in ("sa", "sb"))
                options |= {"a_scale": sa, "b_scale": sb.T, "k_chunk": None}
            result = scaled_gemm(a, b, out_dtype=np.float32, **options)
        assert_same_bits(result, d, name)
        count += d.size
    assert count > 10000


def test_recorded_vectors(scaled_gemm_kernel):
    if scaled_gemm_kernel.arithmetic == "sm90":
        check_recorded_vectors(scaled_gemm_kernel.scaled_gemm, scaled_gemm_kernel.dtype)
    else:
        with pytest.raises(AssertionError, match="elements differ"):  # another arithmetic is not the chip's
            check_recorded_vectors(
                lambda a, b, **options: scaled_gemm_kernel.scaled_gemm(a, b, **options | {"arithmetic": "ieee"}),
                scaled_gemm_kernel.dtype,
            )


def test_reference_equals_recorded_vectors():
    check_recorded_vectors(reference_fp8.scaled_gemm, "e4m3")


# ---- The reference -------------------------------------------------------------------------------------------------


def problems_of(kernel):
    """Every boundary of the kernels: steps of 32, chunks, tiles of 16, 32 and 64 columns, blocks of 128."""
    base = {"a_type": kernel.dtype, "arithmetic": kernel.arithmetic}
    b_types, layouts = (
        itertools.cycle(TYPES),
        itertools.cycle(
            itertools.product(["row", "col", "row_padded"], ["col", "row", "col_padded"], ["row", "col", "row_padded"])
        ),
    )
    outs = itertools.cycle(OUT_TYPES)
    seed = itertools.count()

    def make(m, n, k, **fields):
        a_layout, b_layout, out_layout = next(layouts)
        return Scaled(m, n, k, **{
            **base, "b_type": next(b_types), "a_layout": a_layout, "b_layout": b_layout, "out_layout": out_layout,
            "out_dtype": next(outs), "seed": next(seed), **fields,
        })  # fmt: skip

    for k in (0, 1, 31, 32, 33, 96, 127, 128, 129, 160, 256, 300):
        yield make(3, 5, k)
    for m, n in [
        (1, 1),
        (2, 15),
        (1, 16),
        (3, 17),
        (2, 31),
        (5, 33),
        (1, 63),
        (4, 64),
        (7, 65),
        (33, 129),
        (129, 3),
        (127, 2),
    ]:
        yield make(m, n, 140)
    for a_scale, b_scale in itertools.product(A_SCALES, B_SCALES):
        for k in (100, 257):
            yield make(4, 130, k, a_scale=a_scale, b_scale=b_scale, scale_type=E8M0 if k == 100 else FLOAT32)
    for kind in ("near", "specials"):
        for a_scale, b_scale in (("group", "block"), ("row", "row"), ("none", "none")):
            yield make(9, 70, 200, kind=kind, a_scale=a_scale, b_scale=b_scale)
    for k_chunk in (0, 32, 96, 128, 160, 512):
        yield make(3, 20, 330, a_scale="row", b_scale="tensor", k_chunk=k_chunk)
        yield make(3, 20, 330, a_scale="none", b_scale="none", k_chunk=k_chunk, accumulate=True, out_dtype="fp32")
    for k in (0, 1, 31, 32, 33, 127, 128, 129, 160, 330):  # scales of 32 along k
        yield make(3, 70, k, k_chunk=32, b_scale="group", scale_type=E8M0)
        yield make(4, 130, k, k_chunk=32, scale_type=E8M0 if k % 2 else FLOAT32, bias="n bf16", kind="near")
    for a_scale, b_scale in (("row", "group"), ("group", "none"), ("tensor", "group"), ("none", "block")):
        yield make(9, 40, 200, k_chunk=32, a_scale=a_scale, b_scale=b_scale, scale_type=E8M0, kind="specials")
    yield make(33, 129, 264, k_chunk=32, b_scale="group", accumulate=True, out_dtype="fp32")
    yield make(5, 66, 100, k_chunk=32, b_scale="group", initial=True, batch=(2, 3), scale_type=E8M0)
    for bias in ("n fp32", "n bf16", "mn fp16", "mn fp32"):
        yield make(5, 66, 129, bias=bias)
        yield make(5, 66, 129, bias=bias, a_scale="row", b_scale="row")
    yield make(4, 9, 260, accumulate=True, out_dtype="fp32", kind="near")
    yield make(3, 40, 140, batch=(2, 3), bias="mn fp32")
    yield make(3, 40, 140, batch=(2,), a_scale="row", b_scale="row")
    for k in (0, 1, 127, 128, 129, 300):
        for out_dtype in OUT_TYPES:
            yield make(5, 66, k, initial=True, out_dtype=out_dtype, bias="n bf16" if k % 2 else "", kind="specials")
    for out_layout, bias in itertools.product(("row", "col", "row_padded"), ("", "mn fp16")):
        for batch, out_dtype in (((), "bf16"), ((2, 3), "bf16"), ((2,), "fp32")):
            yield make(3, 40, 140, initial=True, batch=batch, bias=bias, out_layout=out_layout, out_dtype=out_dtype)
    yield make(33, 129, 330, initial=True, a_scale="none", b_scale="none", k_chunk=96)


def test_equals_reference(scaled_gemm_kernel):
    check_equals_reference(scaled_gemm_kernel.scaled_gemm, problems_of(scaled_gemm_kernel))


def test_broken_orders_are_seen():
    """Negative controls: each breaks one rule of the contract, and the check must say so."""

    def scales_swapped(a, b, *, a_scale, b_scale, out, **options):
        """fl(fl(D sa) sb) instead of fl(fl(D sb) sa)."""
        plain = pydet.scaled_gemm(a, b, a_scale=None, b_scale=None, out_dtype="float32", **options)
        out[...] = (plain * a_scale) * b_scale

    def scales_late(a, b, *, a_scale, b_scale, out, **options):
        """Scales multiplied into the factors, one chain a chunk of 256."""
        out[...] = reference_fp8.scaled_gemm(
            a, b, a_scale=None, b_scale=None, out_dtype="float32", **options | {"k_chunk": 256}
        )

    rows = [Scaled(40, 50, 300, a_scale="row", b_scale="row")]
    check_equals_reference(pydet.scaled_gemm, rows)
    for broken in (scales_swapped, scales_late):
        with pytest.raises(AssertionError, match="elements differ"):
            check_equals_reference(broken, rows)


def test_error_bound(scaled_gemm_kernel):
    """NUMERICS.md: a step of sm90 adds at most 33 2^-13 of its largest magnitude and 2^-13 of its sum."""
    problem = Scaled(17, 33, 1000, scaled_gemm_kernel.dtype, arithmetic=scaled_gemm_kernel.arithmetic, kind="near",
                     a_scale="none", b_scale="none")  # fmt: skip
    a, b, _ = problem.operands()
    a, b = a.astype(np.float64), b.astype(np.float64)
    largest = np.abs(a).max() * np.abs(b).max()
    per_step = (
        2.0**-13 * (33 * 128 * largest + 128 * largest) if problem.arithmetic == "sm90" else 2.0**-24 * 128 * largest
    )
    steps = groups(problem.k) * (4 if problem.arithmetic == "sm90" else 128)
    error = np.abs(run(scaled_gemm_kernel.scaled_gemm, problem).astype(np.float64) - a @ b)
    assert np.all(error <= steps * per_step)


# ---- Row bits against the batch, cuts, surroundings ----------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "row"])
def test_row_bits_do_not_depend_on_the_batch(scaled_gemm_kernel, scale):
    problem = Scaled(131, 70, 300, scaled_gemm_kernel.dtype, arithmetic=scaled_gemm_kernel.arithmetic, a_scale=scale,
                     b_scale={"group": "block", "row": "row"}[scale], out_dtype="bf16")  # fmt: skip
    a, b, options = problem.operands()
    a_scale = options.pop("a_scale")
    whole = scaled_gemm_kernel.scaled_gemm(a, b, a_scale=a_scale, **options)
    for rows in ([0], [130], [5, 3], list(range(64)), [17] * 40, list(range(130, -1, -1))):
        part = scaled_gemm_kernel.scaled_gemm(a[rows], b, a_scale=a_scale[rows], **options)
        assert_same_bits(part, whole[rows], f"rows {rows[:3]}...")
    poisoned = a.copy()
    poisoned[1:] = np.uint8(0x7F).view(a.dtype)
    first = scaled_gemm_kernel.scaled_gemm(poisoned, b, a_scale=a_scale, **options)
    assert_same_bits(first[:1], whole[:1], "among NaN rows")
    if scale == "row":
        one = scaled_gemm_kernel.scaled_gemm(
            a, b[:, 9:10], a_scale=a_scale, **options | {"b_scale": options["b_scale"][:, 9:10]}
        )
        assert_same_bits(one, whole[:, 9:10], "a column alone")
    with threads(3), unusual_float_environment():
        assert_same_bits(scaled_gemm_kernel.scaled_gemm(a, b, a_scale=a_scale, **options), whole, "threads")


def test_a_short_k_has_one_meaning():
    """For K <= 128 rows and groups are the same scale, whatever M and N are."""
    a, b, options = Scaled(40, 200, 100, a_scale="group", b_scale="block").operands()
    whole = pydet.scaled_gemm(a, b, **options)
    for n in (1, 2, 128, 129):
        part = dict(options, b_scale=options["b_scale"][:, : groups(n)])
        assert_same_bits(pydet.scaled_gemm(a, b[:, :n], **part), whole[:, :n], f"N = {n}")
    for m in (1, 2):
        assert_same_bits(
            pydet.scaled_gemm(a[:m], b, **options | {"a_scale": options["a_scale"][:m]}), whole[:m], f"M = {m}"
        )


def test_scales_of_32_are_those_of_128_where_four_are_one():
    """And steps are chunks: with scales of 1 the sums are those of chains of 32."""
    a, b, options = Scaled(9, 40, 512, a_scale="group", b_scale="group", k_chunk=32, scale_type=E8M0).operands()
    one = dict(options, a_scale=None, b_scale=None)
    ones = dict(options, a_scale=np.ones((9, 16), np.float32), b_scale=np.ones((16, 40), np.float32))
    assert_same_bits(pydet.scaled_gemm(a, b, **ones), pydet.scaled_gemm(a, b, **one))
    scaled = dict(one, a_scale=np.full((9, 16), 0.5, np.float32), b_scale=np.full((16, 40), 4, np.float32))
    want = 2 * pydet.scaled_gemm(a, b, out_dtype="float32", **one)
    assert_same_bits(pydet.scaled_gemm(a, b, out_dtype="float32", **scaled), want)


def test_cuts_at_chunks_give_the_bits_of_one_call(scaled_gemm_kernel):
    problem = Scaled(9, 40, 512, scaled_gemm_kernel.dtype, arithmetic=scaled_gemm_kernel.arithmetic)
    a, b, options = problem.operands()
    whole = scaled_gemm_kernel.scaled_gemm(a, b, out_dtype="float32", **options)
    out = np.zeros_like(whole)
    for first, end in ((0, 128), (128, 384), (384, 512)):
        part = slice(first // 128, end // 128)
        given = dict(options, a_scale=options["a_scale"][:, part], b_scale=options["b_scale"][part])
        scaled_gemm_kernel.scaled_gemm(a[:, first:end], b[first:end], out=out, accumulate=True, **given)
    assert_same_bits(out, whole)


def test_a_sum_that_was_begun_elsewhere_ends_as_one_call(scaled_gemm_kernel):
    """With a bias and one rounding to any type."""
    problem = Scaled(9, 40, 520, scaled_gemm_kernel.dtype, arithmetic=scaled_gemm_kernel.arithmetic)
    a, b, options = problem.operands()
    bias = cases.data("normal", (40,), FLOAT32)
    for out_dtype, cut in itertools.product(OUT_TYPES.values(), (0, 128, 256, 512)):
        at = cut // 128
        given = dict(options, a_scale=options["a_scale"][:, :at], b_scale=options["b_scale"][:at])
        begun = scaled_gemm_kernel.scaled_gemm(a[:, :cut], b[:cut], out_dtype=FLOAT32, **given)
        given = dict(options, a_scale=options["a_scale"][:, at:], b_scale=options["b_scale"][at:])
        got = scaled_gemm_kernel.scaled_gemm(
            a[:, cut:], b[cut:], bias=bias, initial=begun, out_dtype=out_dtype, **given
        )
        whole = scaled_gemm_kernel.scaled_gemm(a, b, bias=bias, out_dtype=out_dtype, **options)
        assert_same_bits(got, whole, f"cut at {cut}, {out_dtype}")


# ---- Refusals ------------------------------------------------------------------------------------------------------


def refused(*args, **options):
    out = np.full((4, 6), 7, np.float32)
    with pytest.raises(pydet.Error) as error:
        pydet.scaled_gemm(*args, **{"out": out, "a_scale": None, "b_scale": None, **options})
    assert np.all(out == 7), "out was touched"
    return str(error.value)


def test_refusals():
    a, b = fp8("any", (4, 256), E4M3), fp8("any", (256, 6), E5M2)
    ones = lambda *shape: np.ones(shape, np.float32)
    assert refused(a.view(np.uint8), b) == ("scaled_gemm: a is uint8, want float8_e4m3fn or float8_e5m2")
    assert refused(a.astype(np.float32), b) == "scaled_gemm: a is float32, want float8_e4m3fn or float8_e5m2"
    assert refused(a, b[:200]) == "scaled_gemm: b is 200x6, want 256xN"
    assert refused(a, b, a_scale=ones(4)) == "scaled_gemm: a_scale is 4, want (), 4x1 or 4x2 in its last two dimensions"
    assert (
        refused(a, b, a_scale=ones(4, 3))
        == "scaled_gemm: a_scale is 4x3, want (), 4x1 or 4x2 in its last two dimensions"
    )
    assert refused(a, b, b_scale=ones(2, 2)) == (
        "scaled_gemm: b_scale is 2x2, want (), 1x6, 2x6 or 2x1 in its last two dimensions"
    )
    assert refused(a, b, a_scale=ones(4, 1).astype(np.float16)) == (
        "scaled_gemm: a_scale is float16, want float32 or float8_e8m0fnu"
    )
    assert refused(a, b, a_scale=ones(2, 4, 1)) == (
        "scaled_gemm: a_scale is 2x4x1, want leading dimensions that broadcast to those of out, 4x6"
    )
    assert refused(a, b, k_chunk=48) == "scaled_gemm: k_chunk is 48, want 0 or a positive multiple of 32"
    assert refused(a, b, a_scale=ones(4, 2), k_chunk=0) == (
        "scaled_gemm: k_chunk is 0, want 128 or 32 with scales along k"
    )
    assert refused(a, b, a_scale=ones(4, 2), k_chunk=32) == (
        "scaled_gemm: a_scale is 4x2, want (), 4x1 or 4x8 in its last two dimensions"
    )
    assert refused(a, b, b_scale=ones(8, 6)) == (
        "scaled_gemm: b_scale is 8x6, want (), 1x6, 2x6 or 2x1 in its last two dimensions"
    )
    assert refused(a, b, a_scale=ones(4, 1), accumulate=True) == (
        "scaled_gemm: a_scale is 4x1, want scales along k, or none, under accumulate"
    )
    assert refused(a, b, b_scale=ones(1, 6), initial=ones(4, 6)) == (
        "scaled_gemm: b_scale is 1x6, want scales along k, or none, with initial"
    )
    assert refused(a, b, initial=ones(4, 6), accumulate=True) == (
        "scaled_gemm: initial is given and options.accumulate is 1, want one of them"
    )
    assert refused(a, b, initial=ones(6, 4)) == "scaled_gemm: initial is 6x4, want 4x6"
    assert refused(a, b, initial=ones(4, 6).astype(np.float16)) == "scaled_gemm: initial is float16, want float32"
    assert refused(a, b, initial=ones(6, 4).T) == (
        "scaled_gemm: initial has stride 4 in dimension 1, want it contiguous"
    )
    assert refused(a, b, arithmetic="sm80") == (
        "scaled_gemm: arithmetic sm80 takes bfloat16 or float16 inputs, got float8_e4m3fn"
    )
    assert refused(a, b, kernel="cpu_gemm_ieee_scalar").startswith(
        "scaled_gemm: kernel cpu_gemm_ieee_scalar is not a scaled_gemm kernel"
    )
    with pytest.raises(pydet.Error, match=r"gemm: a is float8_e4m3fn, want float32, bfloat16 or float16"):
        pydet.gemm(a, b)
    with pytest.raises(pydet.Error, match="accumulate needs out"):
        pydet.scaled_gemm(a, b, a_scale=None, b_scale=None, accumulate=True)
    out = np.zeros((4, 6), np.float32)
    with pytest.raises(pydet.Error, match="out shares memory with b_scale"):
        pydet.scaled_gemm(a, b, a_scale=None, b_scale=out[:1], out=out)


def test_room_for_sums_that_begin_elsewhere():
    """Of an out that is not float32, in C: as many bytes as are said, none fewer, apart from all operands."""
    a, b = fp8("any", (3, 256), E4M3), fp8("any", (256, 5), E4M3)
    initial, out, size = np.ones((3, 5), np.float32), np.full((3, 5), 7, FLOAT16), capi.ffi.new("uint64_t *", 7)
    tensors = [capi.Tensor(x.view(np.uint8), dtype=(10, 8, 1)) for x in (a, b)] + [capi.Tensor(initial)]
    room = np.zeros(96, np.uint8)
    at = room.ctypes.data + -room.ctypes.data % 16

    def call(where, size):
        given = capi.options("pydet_scaled_gemm_options", k_chunk=128, initial=tensors[2].c, workspace_size=size)
        given.workspace = capi.ffi.cast("void *", where)
        null = capi.ffi.NULL
        return capi.lib.pydet_scaled_gemm(null, tensors[0].c, null, tensors[1].c, null, null, capi.Tensor(out).c, given)

    for fields, want in (({"initial": tensors[2].c}, 128), ({}, 0)):
        given = capi.options("pydet_scaled_gemm_options", k_chunk=128, **fields)
        assert capi.lib.pydet_scaled_gemm_workspace(2, 3, 5, 256, given, size) == capi.lib.PYDET_OK and size[0] == want
    assert capi.lib.pydet_scaled_gemm_workspace(1, 3, -5, 256, given, size) == capi.lib.PYDET_INVALID_SHAPE
    assert call(at, 48) == capi.lib.PYDET_WORKSPACE_TOO_SMALL
    assert capi.last_error() == "scaled_gemm: workspace_size is 48, want 64 for the sums of a float16 out"
    assert call(at + 4, 64) == capi.lib.PYDET_MISALIGNED
    assert call(initial.ctypes.data // 16 * 16, 64) == capi.lib.PYDET_OVERLAP
    assert (out == 7).all() and not room.any()
    assert call(at, 64) == capi.lib.PYDET_OK
    want = pydet.scaled_gemm(a, b, a_scale=None, b_scale=None, initial=initial, out_dtype=FLOAT16)
    assert_same_bits(out, want)


def test_defaults():
    """bfloat16 out, ieee on the CPU, chunks of 128."""
    a, b, options = Scaled(3, 20, 300, a_scale="row", b_scale="row").operands()
    del options["arithmetic"], options["k_chunk"]
    plain = pydet.scaled_gemm(a, b, **options)
    assert plain.dtype == OUT_TYPES["bf16"]
    assert_same_bits(plain, pydet.scaled_gemm(a, b, arithmetic="ieee", k_chunk=128, out_dtype="bfloat16", **options))
    one_chain = pydet.scaled_gemm(a, b, k_chunk=0, out_dtype="float32", **options)
    assert np.any(bits(one_chain) != bits(pydet.scaled_gemm(a, b, out_dtype="float32", **options)))


def in_framework(package, array):
    """The array's numbers as a tensor of torch or jax, of the type of that name."""
    if package.__name__ == "jax":
        return package.numpy.asarray(array)
    words = package.from_numpy(np.array(bits(array), order="C").view(f"i{array.itemsize}"))
    return words.view(getattr(package, array.dtype.name)).reshape(array.shape)


def in_numpy(package, tensor, dtype):
    if package.__name__ == "jax":
        return np.asarray(tensor)
    word = {1: package.uint8, 2: package.int16, 4: package.int32}[dtype.itemsize]
    return tensor.contiguous().view(word).numpy().view(dtype)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("scale_dtype", [FLOAT32, E8M0], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_tensors_of_frameworks_have_the_bits_of_numpy(request, framework, dtype, scale_dtype):
    """Quantised and multiplied where they are: results are of the framework, and of its own fp8 types."""
    package = request.getfixturevalue(framework)
    x = [cases.data("normal", shape, OUT_TYPES["bf16"], 3) for shape in ((40, 300), (130, 300))]
    options = {"dtype": dtype.name, "scale_dtype": scale_dtype.name}
    want, got = (
        [pydet.quantize(convert(y), granularity=kind, **options) for y, kind in zip(x, ("group", "block"), strict=True)]
        for convert in (lambda y: y, lambda y: in_framework(package, y))
    )
    for (q, scale), (mine, its_scale) in zip(want, got, strict=True):
        assert dtype.name in str(mine.dtype) and scale_dtype.name in str(its_scale.dtype)
        assert_same_bits(in_numpy(package, mine, dtype), np.asarray(q))
        assert_same_bits(in_numpy(package, its_scale, scale_dtype), np.asarray(scale))
    want, got = (pydet.scaled_gemm(a, b.T, a_scale=sa, b_scale=sb.T) for (a, sa), (b, sb) in (want, got))
    assert_same_bits(in_numpy(package, got, OUT_TYPES["bf16"]), want)


def test_audit():
    """With scales, whole and by a sample, whose blocks of columns are cut up; and one wrong bit is found."""
    for a_scale, b_scale, batch in (("group", "block", ()), ("row", "row", (2,)), ("tensor", "none", ())):
        a, b, options = Scaled(40, 300, 260, a_scale=a_scale, b_scale=b_scale, batch=batch).operands()
        c = pydet.scaled_gemm(a, b, out_dtype="bfloat16", **options)
        for sample in (None, 7):
            assert pydet.audit(a, b, c, sample=sample, **options).all_equal
        c.view(np.uint16)[..., 3, 5] ^= 1
        result = pydet.audit(a, b, c, **options)
        assert result.differing == max(1, *batch, 1) and result.first[0].index[-2:] == (3, 5)
    with pytest.raises(pydet.Error, match="a is float32 and has scales, want float8, or none"):
        pydet.audit(c.astype(np.float32), c.astype(np.float32), c, a_scale=np.ones((), np.float32))


def test_audit_command(tmp_path, capsys):
    a, b, options = Scaled(5, 40, 200, a_scale="group", b_scale="block").operands()
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b.view(np.uint8))
    c = pydet.scaled_gemm(a, b.view(E4M3), out_dtype="bfloat16", **options)
    files = {"a": a, "b": b, "c": c, "sa": options["a_scale"], "sb": options["b_scale"]}
    for name, array in files.items():
        np.save(tmp_path / f"{name}.npy", array)
    at = {name: str(tmp_path / f"{name}.npy") for name in files}
    arguments = [at["a"], at["b"], at["c"], "--arithmetic", "sm90", "--dtype", "e4m3"]
    scales = ["--a-scale", at["sa"], "--b-scale", at["sb"]]
    assert sys.modules["pydet.audit"].main([*arguments, *scales]) == 0, capsys.readouterr()
    assert sys.modules["pydet.audit"].main(arguments) == 1


def test_no_k_has_no_scales_along_it():
    """Under accumulate out stays as it is, with scales of an extent of 0 or none; a row's is not along k there."""
    a, b = np.zeros((3, 0), E4M3), np.zeros((0, 5), E4M3)
    for a_scale, b_scale in ((None, None), ((3, 0), None), (None, (0, 5)), ((3, 0), (0, 1))):
        scales = [None if shape is None else np.ones(shape, np.float32) for shape in (a_scale, b_scale)]
        out = pydet.scaled_gemm(a, b, a_scale=scales[0], b_scale=scales[1], out=np.full((3, 5), 7, np.float32),
                                accumulate=True)  # fmt: skip
        assert (out == 7).all(), (a_scale, b_scale)
    for shape in ((3, 1), ()):
        with pytest.raises(pydet.Error, match="want scales along k, or none, under accumulate"):
            pydet.scaled_gemm(a, b, a_scale=np.ones(shape, np.float32), b_scale=None, accumulate=True,
                              out=np.zeros((3, 5), np.float32))  # fmt: skip


def test_what_a_hopper_refuses_is_written_down():
    """The sentences of the page of rules and the docstring are those of the sources."""
    flat = lambda text: " ".join(text.replace("*", " ").split())
    root = pathlib.Path(__file__).parent.parent
    rules, said = flat((root / "docs/reference/rules.md").read_text()), flat(pydet.scaled_gemm.__doc__)
    features = (root / "native/contract/features.h").read_text()
    for words in ("a left operand along M", "a right operand along N", "an out along M",
                  "a k_chunk that is no multiple of 128"):  # fmt: skip
        assert f'"{words}"' in features and f'"{words}"' in rules and f'"{words}"' in said, words
    words = "the tensor cores do not read a, want its data and strides in multiples of 16 bytes"
    assert words in rules and words in said
