"""scaled_grouped_gemm: every kernel, forced by name, against scaled_gemm of each group, whatever the boundaries hold.

scaled_gemm is the CPU's own, which tests/test_scaled_gemm.py compares with the reference. tests/test_golden.py has the
bits of the reference itself.
"""

import dataclasses
import itertools

import numpy as np
import pytest

import cases
import pydet
import reference_fp8
from capi import Tensor, ffi, last_error, lib, options, status_name
from cases import assert_same_bits, lay
from conftest import threads
from reference_fp8 import E8M0, groups
from test_grouped_gemm import ROUTINGS, as_it_takes, shuffled
from test_scaled_gemm import A_SCALES, B_SCALES, FLOAT32, OUT_TYPES, TYPES, fp8, scales

# ---- Problems --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScaledGrouped:
    """One call of scaled_grouped_gemm, as values."""

    routing: str
    k: int = 140
    n: int = 37
    a_type: str = "e4m3"
    b_type: str = "e4m3"
    a_scale: str = "group"
    b_scale: str = "block"
    scale_type: np.dtype = FLOAT32
    shared: bool = False  # one b_scale for all groups
    arithmetic: str = "sm90"
    out_dtype: str = "fp32"
    kind: str = "any"
    a_layout: str = "row"
    b_layout: str = "col"
    out_layout: str = "row"
    bias: str = ""
    accumulate: bool = False
    k_chunk: int | None = None
    seed: int = 0
    initial: bool = False  # as accumulate, but for where the sums begin

    def boundaries(self):
        tokens, end, start = ROUTINGS[self.routing]
        return tokens, np.array(end, np.int32), None if start is None else np.array(start, np.int32)

    def operands(self):
        """a, b and the options, in the problem's layouts."""
        (tokens, end, _), k, n = self.boundaries(), self.k, self.n
        count = 1 if self.shared else len(end)
        a = fp8(self.kind, (tokens, k), TYPES[self.a_type], self.seed)
        b = fp8(self.kind, (len(end), k, n), TYPES[self.b_type], self.seed + 100)
        chunks = groups(k, 32 if self.k_chunk == 32 else 128)
        shape = {"tensor": (), "row": (tokens, 1), "group": (tokens, chunks)}
        a_scale = None if self.a_scale == "none" else self.scale(shape[self.a_scale], 200)
        shape = {"tensor": (), "row": (count, 1, n), "group": (count, chunks, n)}
        shape["block"] = (count, chunks, groups(n))
        b_scale = None if self.b_scale == "none" else self.scale(shape[self.b_scale], 300)
        given = {"a_scale": a_scale, "b_scale": b_scale, "arithmetic": self.arithmetic, "k_chunk": self.k_chunk}
        if self.bias:
            given["bias"] = cases.data("normal", (len(end), n), OUT_TYPES[self.bias], self.seed + 400)
        if self.initial:
            given["initial"] = cases.data("normal", self.shape, FLOAT32, self.seed + 600)
        a, b = (lay(x.view(np.uint8), layout).view(x.dtype) for x, layout in ((a, self.a_layout), (b, self.b_layout)))
        return a, b, given

    def scale(self, shape, seed):
        kind = "specials" if self.kind == "specials" else "normal"
        return scales(shape, self.scale_type, self.seed + seed, kind).reshape(shape)

    @property
    def shape(self):
        return self.boundaries()[0], self.n

    def start(self):
        """What out holds before the call."""
        return cases.data("normal", self.shape, OUT_TYPES[self.out_dtype], self.seed + 500)

    def expected(self, gemm=pydet.scaled_gemm):
        a, b, given = self.operands()
        _, end, start = self.boundaries()
        return reference_fp8.scaled_grouped_gemm(
            a, b, end, start, out=self.start(), accumulate=self.accumulate, gemm=gemm, **given
        )


def run(scaled_grouped_gemm, problem):
    """The implementation's result, after checking that it wrote its elements and nothing beside them."""
    a, b, given = problem.operands()
    _, end, start = problem.boundaries()
    memory, out = cases.place(problem.shape, OUT_TYPES[problem.out_dtype], problem.out_layout)
    out[...] = problem.start()
    before, inputs = memory.copy(), [x.tobytes() for x in (a, b, end)]
    as_it_takes(scaled_grouped_gemm, problem)(a, b, end, start, out=out, accumulate=problem.accumulate, **given)
    result = np.array(out, order="C")
    first = out.ctypes.data - memory.ctypes.data
    np.lib.stride_tricks.as_strided(before[first:].view(out.dtype), out.shape, out.strides)[...] = out
    assert np.array_equal(before, memory), f"{problem}: bytes around out changed"
    assert inputs == [x.tobytes() for x in (a, b, end)], f"{problem}: an input changed"
    return result


def check(scaled_grouped_gemm, problems, gemm=pydet.scaled_gemm):
    for problem in problems:
        assert_same_bits(run(scaled_grouped_gemm, problem), problem.expected(gemm), str(problem))


def problems_of(a_type, arithmetic):
    """Every routing; scales of every kind, layouts, types and options in turn."""
    layouts = itertools.cycle(
        itertools.product(["row", "col", "row_padded"], ["col", "row", "col_padded"], ["row", "col", "row_padded"])
    )
    pairs = itertools.cycle(itertools.product(A_SCALES, B_SCALES))
    for i, routing in enumerate(ROUTINGS):
        (a_layout, b_layout, out_layout), (a_scale, b_scale) = next(layouts), next(pairs)
        k = (140, 257, 64, 0 if i == 11 else 384)[i % 4]
        along_k = "group" in (a_scale, b_scale) or b_scale == "block" or (k == 64 and "row" in (a_scale, b_scale))
        accumulate = i % 3 == 0 and (along_k or (a_scale, b_scale) == ("none", "none"))
        yield ScaledGrouped(
            routing,
            k,
            (37, 130, 16)[i % 3],
            a_type,
            list(TYPES)[i % 2],
            a_scale,
            b_scale,
            (FLOAT32, E8M0)[i // 2 % 2],
            i % 5 == 0,
            arithmetic,
            "fp32" if accumulate else list(OUT_TYPES)[i % 3],
            ("any", "near", "specials")[i % 3],
            a_layout,
            b_layout,
            out_layout,
            ("", "fp32", "bf16")[i % 3],
            accumulate,
            None if along_k else (None, 0, 96)[i % 3],
            i,
        )
    for a_scale, b_scale in (("group", "block"), ("row", "row"), ("group", "group"), ("tensor", "tensor")):
        yield ScaledGrouped("odd", 300, 140, a_type, "e4m3", a_scale, b_scale, arithmetic=arithmetic, out_dtype="bf16")
    for i, routing in enumerate(("odd", "none", "rest in no group", "no tokens", "gaps", "masked and empty")):
        for j, out_dtype in enumerate(OUT_TYPES):
            which = {"initial": True, "out_dtype": out_dtype, "bias": ("", "bf16")[(i + j) % 2], "seed": i}
            which |= {"a_scale": "none", "b_scale": "none"} if j == 1 else {}
            layout = ("row", "col", "row_padded")[(i + j) % 3]
            yield ScaledGrouped(routing, (140, 384)[i % 2], (36, 131)[j % 2], a_type, arithmetic=arithmetic,
                                out_layout=layout, **which)  # fmt: skip
    for routing, k in (("odd", 100), ("gaps", 33), ("empty between", 256)):  # scales of 32 along k
        yield ScaledGrouped(routing, k, 40, a_type, b_scale="group", scale_type=E8M0, arithmetic=arithmetic, k_chunk=32)


# ---- Bits ------------------------------------------------------------------------------------------------------------


def test_bits_are_those_of_scaled_gemm_of_each_group(scaled_grouped_gemm_kernel):
    kernel = scaled_grouped_gemm_kernel
    check(kernel.scaled_grouped_gemm, problems_of(kernel.dtype, kernel.arithmetic))


def test_numbers_of_threads_and_many_groups():
    ends = np.sort(np.random.default_rng(4).integers(0, 401, 255)).astype(np.int32)
    end = np.append(ends, np.int32(400))
    a, b = fp8("any", (400, 140), TYPES["e4m3"]), fp8("any", (256, 140, 30), TYPES["e4m3"], 1)
    given = {"a_scale": scales((400, 2), FLOAT32, 2), "b_scale": scales((256, 2, 1), FLOAT32, 3)}
    want = reference_fp8.scaled_grouped_gemm(a, b, end, gemm=pydet.scaled_gemm, **given)
    for count in (1, 2, 5):
        with threads(count):
            assert_same_bits(pydet.scaled_grouped_gemm(a, b, end, **given), want, f"{count} threads")


# ---- Promises --------------------------------------------------------------------------------------------------------


def check_token(scaled_grouped_gemm, dtype, arithmetic):
    """A token's row has the bits of scaled_gemm of it alone with its group's matrix, however the others are shared
    out."""
    rng = np.random.default_rng(7)
    tokens, count = 40, 5
    a, b = fp8("any", (tokens, 270), TYPES[dtype]), fp8("any", (count, 270, 30), TYPES["e4m3"], 1)
    for sa, sb in (((tokens, 3), (count, 3, 1)), ((tokens, 1), (count, 1, 30))):
        of_a, of_b = scales(sa, FLOAT32, 2), scales(sb, FLOAT32, 3)
        for _ in range(2):
            expert, order, end = shuffled(rng, tokens, count)
            words = np.ascontiguousarray(a.view(np.uint8)[order]).view(a.dtype)
            out = scaled_grouped_gemm(words, b, end, a_scale=of_a[order], b_scale=of_b, arithmetic=arithmetic)
            for place, t in enumerate(order):
                how = {"a_scale": of_a[t : t + 1], "b_scale": of_b[expert[t]], "arithmetic": arithmetic}
                alone = pydet.scaled_gemm(a[t : t + 1], b[expert[t]], **how)
                assert_same_bits(out[place : place + 1], alone, f"token {t} of group {expert[t]}")


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_does_not_feel_the_routing(dtype):
    for arithmetic in ("ieee", "sm90"):
        check_token(pydet.scaled_grouped_gemm, dtype, arithmetic)


def scale_of_the_whole(a, b, end, start=None, *, a_scale, **given):
    """As dynamic quantisation by tensor does it: the scale is of all tokens that happen to be there."""
    same = np.full(a_scale.shape, a_scale.max(), a_scale.dtype)
    return reference_fp8.scaled_grouped_gemm(a, b, end, start, a_scale=same, gemm=pydet.scaled_gemm, **given)


def scales_of_the_first(a, b, end, start=None, *, b_scale, **given):
    """Every group has the matrix scales of group 0."""
    same = np.broadcast_to(b_scale[:1], b_scale.shape)
    return reference_fp8.scaled_grouped_gemm(a, b, end, start, b_scale=same, gemm=pydet.scaled_gemm, **given)


def one_matrix_late(a, b, end, start=None, **given):
    """A tile that reaches over a boundary keeps the matrix of its first row."""
    late = np.minimum((end + 7) // 8 * 8, len(a)).astype(np.int32)
    return reference_fp8.scaled_grouped_gemm(a, b, late, start, gemm=pydet.scaled_gemm, **given)


def test_the_checks_refuse_what_breaks_the_promise():
    for broken in (scale_of_the_whole, scales_of_the_first, one_matrix_late):
        with pytest.raises(AssertionError):
            check_token(broken, "e4m3", "sm90")

    def writes_past_its_group(a, b, end, start=None, *, out, **given):
        pydet.scaled_grouped_gemm(a, b, end, start, out=out, **given)
        out[end[-1] : (end[-1] + 7) // 8 * 8] = 0

    with pytest.raises(AssertionError):
        check(writes_past_its_group, [ScaledGrouped("rest in no group")])


def check_neighbours(scaled_grouped_gemm, dtype, arithmetic):
    """NaN in other groups' tokens, matrices and scales reaches nothing."""
    for routing in ("odd", "empty between", "masked", "gaps"):
        problem = ScaledGrouped(routing, 144, a_type=dtype, arithmetic=arithmetic)
        (a, b, given), (tokens, end, start) = problem.operands(), problem.boundaries()
        whole = scaled_grouped_gemm(a, b, end, start, **given)
        nan = 0x7F  # in both types
        for g, (first, last) in enumerate(reference_fp8.groups_of(end, start, tokens)):
            words = [np.full(x.shape, nan, np.uint8) for x in (a, b)]
            words[0][first:last], words[1][g] = a.view(np.uint8)[first:last], b[g].view(np.uint8)
            dirty = dict(given, a_scale=np.full_like(given["a_scale"], np.nan))
            dirty["b_scale"] = np.full_like(given["b_scale"], np.nan)
            dirty["a_scale"][first:last], dirty["b_scale"][g] = given["a_scale"][first:last], given["b_scale"][g]
            dirty_a = words[0].view(a.dtype)
            dirty_b = lay(words[1], "col").view(b.dtype)  # k is adjacent
            got = scaled_grouped_gemm(dirty_a, dirty_b, end, start, **dirty)[first:last]
            assert_same_bits(got, whole[first:last], f"{routing}, group {g}")


def test_a_group_is_audited_as_its_product():
    """What a GPU left behind is checked group by group; another group's matrix is seen."""
    problem = ScaledGrouped("odd", 272, 40)
    (a, b, given), (_, end, _) = problem.operands(), problem.boundaries()
    out = pydet.scaled_grouped_gemm(a, b, end, **given)
    part, how = slice(int(end[2]), int(end[3])), {"arithmetic": "sm90", "a_scale": given["a_scale"][end[2] : end[3]]}
    assert pydet.audit(a[part], b[3], out[part], b_scale=given["b_scale"][3], **how).all_equal
    assert not pydet.audit(a[part], b[2], out[part], b_scale=given["b_scale"][3], **how).all_equal


def test_nan_next_door(scaled_grouped_gemm_kernel):
    kernel = scaled_grouped_gemm_kernel
    check_neighbours(kernel.scaled_grouped_gemm, kernel.dtype, kernel.arithmetic)


def test_empty_extents():
    end, none = np.int32([2, 4]), {"a_scale": None, "b_scale": None}
    of = lambda *shape: np.ones(shape, TYPES["e4m3"])
    f32 = dict(none, out_dtype="float32")
    assert_same_bits(pydet.scaled_grouped_gemm(of(4, 0), of(2, 0, 3), end, **f32), np.zeros((4, 3), np.float32))
    bias = np.float32([[1, 2, 3], [4, 5, 6]])
    got = pydet.scaled_grouped_gemm(of(4, 0), of(2, 0, 3), end, bias=bias, **f32)
    assert_same_bits(got, np.repeat(bias, 2, axis=0))
    assert pydet.scaled_grouped_gemm(of(0, 5), of(2, 5, 3), np.int32([0, 0]), **none).shape == (0, 3)
    assert pydet.scaled_grouped_gemm(of(4, 5), of(2, 5, 0), end, **none).shape == (4, 0)
    kept = np.full((4, 3), 7, np.float32)
    pydet.scaled_grouped_gemm(of(4, 5), of(0, 5, 3), np.zeros(0, np.int32), out=kept, **none)
    assert np.all(kept == 7)


# ---- Refusals --------------------------------------------------------------------------------------------------------


def refused(a, b, end, start=None, **given):
    out = given.setdefault("out", np.full((6, 5), 7, np.float32))
    before = None if out is None else out.copy()
    with pytest.raises(pydet.Error) as error:
        pydet.scaled_grouped_gemm(a, b, end, start, **{"a_scale": None, "b_scale": None, **given})
    assert out is None or np.array_equal(out, before), "out was touched"
    return str(error.value)


def test_refusals():
    of, f32 = (lambda *shape: np.ones(shape, TYPES["e4m3"])), lambda *shape: np.ones(shape, np.float32)
    a, b, end, op = of(6, 4), of(3, 4, 5), np.int32([1, 2, 6]), "scaled_grouped_gemm: "
    assert refused(of(1, 6, 4), b, end) == op + "a is 1x6x4, want TxK"
    assert refused(a, of(2, 3, 4, 5), end) == op + "b is 2x3x4x5, want GxKxN"
    assert refused(a, of(4, 5), end) == op + "b is 4x5, want GxKxN: groups along K have no scales of their own"
    assert refused(a, of(3, 5, 5), end) == op + "b is 3x5x5, want Gx4xN"
    assert refused(a, b, end[:2]) == op + "group_end is 2, want 3"
    assert refused(a, b, end, end[:2]) == op + "group_start is 2, want 3"
    assert refused(a, b, end.astype(np.int64)) == op + "group_end is int64, want int32"
    assert refused(f32(6, 4), b, end) == op + "a is float32, want float8_e4m3fn or float8_e5m2"
    assert refused(a, b, end, bias=f32(2, 5)) == op + "bias is 2x5, want 3x5"
    assert refused(a, b, end, out=f32(6, 4)) == op + "out is 6x4, want 6x5"
    assert refused(a, b, end, a_scale=f32(5, 1)).startswith(op + "a_scale is 5x1, want (), 6x1 or 6x1")
    assert refused(a, b, end, a_scale=f32(2, 6, 1)) == op + "a_scale is 2x6x1, want no leading dimension"
    assert refused(a, b, end, b_scale=f32(2, 1, 5)) == op + "b_scale is 2x1x5, want one leading dimension of 3 at most"
    assert refused(a, b, end, b_scale=f32(3, 2, 5)).startswith(op + "b_scale is 3x2x5, want (), 1x5, 1x5 or 1x1 in its")
    assert refused(a, b, end, b_scale=f32(3, 1, 5), k_chunk=64) == (
        op + "k_chunk is 64, want 128 or 32 with scales along k"
    )
    assert refused(a, b, end, k_chunk=24) == op + "k_chunk is 24, want 0 or a positive multiple of 32"
    assert refused(a, b, end, arithmetic="sm80").startswith(op + "arithmetic sm80 takes bfloat16 or float16")
    assert refused(a, b, end, kernel="cpu_scaled_gemm_ieee_scalar").startswith(
        op + "kernel cpu_scaled_gemm_ieee_scalar is not a scaled_grouped_gemm kernel"
    )
    assert "accumulate needs out" in refused(a, b, end, out=None, accumulate=True)
    half = np.full((6, 5), 7, np.float16)
    assert refused(a, b, end, out=half, accumulate=True) == op + "out is float16, want float32 under accumulate"
    assert refused(a, b, end, initial=f32(5, 5)) == op + "initial is 5x5, want 6x5"
    assert refused(a, b, end, initial=f32(6, 5), accumulate=True) == (
        op + "initial is given and options.accumulate is 1, want one of them"
    )
    wide = of(6, 200), of(3, 200, 5)
    assert "want scales along k, or none, with initial" in refused(*wide, end, a_scale=f32(6, 1), initial=f32(6, 5))
    assert "want scales along k, or none, under accumulate" in refused(
        *wide, end, a_scale=f32(6, 1), out=f32(6, 5), accumulate=True
    )
    memory = f32(60)
    overlapping = memory.view(np.uint8)[:24].view(a.dtype).reshape(6, 4)
    assert "out shares memory with a" in refused(overlapping, b, end, out=memory[:30].reshape(6, 5))
    assert "out shares memory with b_scale" in refused(
        a, b, end, b_scale=memory[:15].reshape(3, 1, 5), out=memory[:30].reshape(6, 5)
    )


def test_c_refuses_and_touches_nothing():
    a, b = (Tensor(np.full(shape, 0x38, np.uint8), dtype=(10, 8, 1)) for shape in ((6, 4), (3, 4, 5)))
    out, end = Tensor(np.full((6, 5), 7, np.float32)), Tensor(np.int32([1, 2, 6]), dtype=(0, 32, 1))
    wanted = [a, None, b, None, None, None, end, out]

    def call(*changed, given="made", **fields):
        tensors = [c if c != "same" else w for c, w in zip(changed, wanted, strict=True)] if changed else wanted
        made = ffi.NULL if given is None else options("pydet_scaled_grouped_gemm_options", **fields)
        status = lib.pydet_scaled_grouped_gemm(ffi.NULL, *[ffi.NULL if t is None else t.c for t in tensors], made)
        return status_name(status), last_error()

    for i, name in ((0, "a"), (2, "b"), (6, "group_end"), (7, "out")):
        changed = ["same"] * 8
        changed[i] = None
        assert call(*changed) == ("PYDET_NULL_POINTER", f"scaled_grouped_gemm: {name} is NULL, want a tensor")
    assert call(accumulate=2) == ("PYDET_INVALID_VALUE", "scaled_grouped_gemm: options.accumulate is 2, want 0 or 1")
    assert call(reserved=1)[0] == "PYDET_INVALID_VALUE" and call(struct_size=8)[0] == "PYDET_INVALID_VALUE"
    assert np.all(out.array == 7)
    assert call(given=None)[0] == "PYDET_OK" and np.all(out.array == 4)
