"""Grouped GEMM: every kernel, forced by name, against GEMM of each group, whatever the boundaries hold.

GEMM is the CPU's own, which tests/test_gemm.py compares with the reference. tests/test_golden.py has the bits of the
reference itself.
"""

import dataclasses
import shlex
import subprocess

import ml_dtypes
import numpy as np
import pytest

import pydet
import reference
from capi import HEADER, ROOT, Tensor, ffi, in_c, last_error, lib, library_path, options, status_name
from cases import DTYPES, assert_same_bits, data, place
from conftest import threads

# ---- Problems --------------------------------------------------------------------------------------------------------

# (T, ends, starts): shares of T tokens. Around tiles of 64 and 128 rows and stages of 8, 16 and 32.
ROUTINGS = {
    "even": (128, [32, 64, 96, 128], None),
    "odd": (131, [1, 4, 37, 38, 131], None),
    "tiles": (520, [63, 127, 192, 321, 448, 513, 520], None),
    "one takes all": (150, [0, 150, 150, 150], None),
    "none": (40, [0, 0, 0], None),
    "empty between": (70, [0, 20, 20, 20, 33, 70, 70], None),
    "rest in no group": (90, [10, 47], None),
    "one group": (33, [33], None),
    "one token each": (9, [1, 2, 3, 4, 5, 6, 7, 8, 9], None),
    "no tokens": (0, [0, 0], None),
    "backwards": (60, [40, 20, 50, -3, 55], None),
    "past the end": (60, [20, 70, 2**31 - 1, 30], None),
    "negative": (60, [-5, -(2**31), 17, 60], None),
    "masked": (96, [3, 32, 64 + 32, 64 + 32], [0, 32, 64, 96]),
    "masked and empty": (96, [0, 41, 64 + 17], [0, 32, 64]),
    "gaps": (100, [17, 40, 99], [3, 20, 40]),
    "overlapping": (80, [50, 30, 60, 80], [10, 0, 40, 20]),
    "starts out of range": (50, [10, 2**31 - 1, 20, 40], [-9, 2**31 - 2, 15, -(2**31)]),
}


def matrices(shape, dtype, layout):
    """As place, without gaps between matrices where there are none between rows: then a kernel may copy 16 bytes."""
    if len(shape) == 2 or "padded" in layout:
        return place(shape, dtype, layout)
    groups, k, n = shape
    turned = layout == "col"
    memory, rows = place((groups * n, k) if turned else (groups * k, n), dtype, "row")
    return memory, rows.reshape(groups, n, k).swapaxes(1, 2) if turned else rows.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """One call of grouped_gemm, as values."""

    routing: str
    depth: bool = False
    rows: int = 21  # K of rows, M of depth
    n: int = 37
    dtype: str = "fp32"
    arithmetic: str = "ieee"
    out_dtype: str = "fp32"
    kind: str = "normal"
    a_layout: str = "row"
    b_layout: str = "row"
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
        dtype, (tokens, end, _) = DTYPES[self.dtype], self.boundaries()
        a_shape = (self.rows, tokens) if self.depth else (tokens, self.rows)
        b_shape = (tokens, self.n) if self.depth else (len(end), self.rows, self.n)
        a, b = place(a_shape, dtype, self.a_layout)[1], matrices(b_shape, dtype, self.b_layout)[1]
        a[...], b[...] = data(self.kind, a_shape, dtype, self.seed), data(self.kind, b_shape, dtype, self.seed + 1)
        given = {"arithmetic": self.arithmetic, "k_chunk": self.k_chunk}
        if self.bias:
            given["bias"] = data(self.kind, (len(end), self.n), DTYPES[self.bias], self.seed + 2)
        if self.initial:
            given["initial"] = data("normal", self.shape, DTYPES["fp32"], self.seed + 4)
        return a, b, given

    @property
    def shape(self):
        tokens, end, _ = self.boundaries()
        return (len(end), self.rows, self.n) if self.depth else (tokens, self.n)

    def start(self):
        """What out holds before the call."""
        return data("normal", self.shape, DTYPES[self.out_dtype], self.seed + 3)

    def expected(self, gemm=reference.gemm):
        a, b, given = self.operands()
        _, end, start = self.boundaries()
        return reference.grouped_gemm(
            a, b, end, start, out=self.start(), accumulate=self.accumulate, gemm=gemm, **given
        )


def as_it_takes(operation, problem):
    """pydet's own function on the CPU, alone or with a kernel forced, by C where Python refuses the ends."""
    tokens, end, _ = problem.boundaries()
    own = getattr(getattr(operation, "func", operation), "__module__", "").startswith("pydet.")
    return in_c(operation) if own and max(end, default=0) > tokens else operation


def run(grouped_gemm, problem):
    """The implementation's result, after checking that it wrote its elements and nothing beside them."""
    a, b, given = problem.operands()
    _, end, start = problem.boundaries()
    memory, out = matrices(problem.shape, DTYPES[problem.out_dtype], problem.out_layout)
    out[...] = problem.start()
    before = memory.copy()
    inputs = [x.tobytes() for x in (a, b, end)]
    as_it_takes(grouped_gemm, problem)(a, b, end, start, out=out, accumulate=problem.accumulate, **given)
    result = np.array(out, order="C")
    first = out.ctypes.data - memory.ctypes.data
    np.lib.stride_tricks.as_strided(before[first:].view(out.dtype), out.shape, out.strides)[...] = out
    assert np.array_equal(before, memory), f"{problem}: bytes around out changed"
    assert inputs == [x.tobytes() for x in (a, b, end)], f"{problem}: an input changed"
    return result


def check(grouped_gemm, problems, gemm=reference.gemm):
    for problem in problems:
        assert_same_bits(run(grouped_gemm, problem), problem.expected(gemm), str(problem))


def problems_of(dtype, arithmetic):
    """Every routing, both ways; layouts, types and options in turn."""
    layouts = ["row", "col", "row_padded", "col_padded"]
    found = []
    for i, routing in enumerate(ROUTINGS):
        for depth in (False, True):
            j = 2 * i + depth
            accumulate = j % 3 == 0
            problem = Grouped(routing, depth, (21, 64, 130)[j % 3], (37, 64, 131)[i % 3], dtype, arithmetic, seed=j)
            found.append(
                dataclasses.replace(
                    problem,
                    out_dtype="fp32" if accumulate else list(DTYPES)[j % 3],
                    kind=("normal", "wide", "specials")[j % 3],
                    a_layout=layouts[j % 4],
                    b_layout=layouts[j // 4 % 4],
                    out_layout=layouts[(j + i) % 4],
                    bias=("", "fp32", "bf16")[i % 3],
                    accumulate=accumulate,
                    k_chunk=(None, 16, 48)[(i + depth) % 3],
                )
            )
    for i, routing in enumerate(("odd", "none", "empty between", "rest in no group", "no tokens", "gaps", "masked")):
        for j, out_dtype in enumerate(DTYPES):
            which = {"initial": True, "out_dtype": out_dtype, "bias": ("", "bf16")[(i + j) % 2], "seed": i}
            shapes = {"rows": (21, 130)[i % 2], "n": (36, 131)[j % 2], "k_chunk": (None, 16)[i % 2]}
            layout = layouts[(i + j) % 4]
            found += [Grouped(routing, depth, dtype=dtype, arithmetic=arithmetic, out_layout=layout, **shapes, **which)
                      for depth in (False, True)]  # fmt: skip
    return found


def gemm_of(kernel):
    """pydet.gemm by the CPU, into a new array, as the reference's."""

    def gemm(a, b, *, out=None, accumulate=False, out_dtype=None, **given):
        copy = None if out is None else np.array(out, order="C")
        return pydet.gemm(a, b, out=copy, accumulate=accumulate, out_dtype=None if accumulate else out_dtype, **given)

    return gemm


# ---- Bits ------------------------------------------------------------------------------------------------------------


def test_bits_are_those_of_gemm_of_each_group(grouped_gemm_kernel):
    kernel = grouped_gemm_kernel
    check(kernel.grouped_gemm, problems_of(kernel.dtype, kernel.arithmetic), gemm_of(kernel))


def test_numbers_of_threads_and_many_groups():
    routing = np.sort(np.random.default_rng(4).integers(0, 2001, 255)).astype(np.int32)
    a, b = data("normal", (2000, 60), DTYPES["bf16"]), data("normal", (256, 60, 70), DTYPES["bf16"], 1)
    end = np.append(routing, np.int32(2000))
    want = reference.grouped_gemm(a, b, end, gemm=pydet.gemm)
    for count in (1, 2, 5):
        with threads(count):
            assert_same_bits(pydet.grouped_gemm(a, b, end), want, f"{count} threads")


# ---- Promises --------------------------------------------------------------------------------------------------------


def shuffled(rng, tokens, groups):
    """Which group each token goes to, most to a few; and the order that brings groups together, with their ends."""
    weights = rng.permutation(1.0 / np.arange(1, groups + 1))
    expert = rng.choice(groups, tokens, p=weights / weights.sum())
    order = np.argsort(expert, kind="stable")
    return expert, order, np.cumsum(np.bincount(expert, minlength=groups)).astype(np.int32)


def check_token(grouped_gemm, dtype, arithmetic):
    """A token's row has the bits of gemm of it alone with its group's matrix, however the others are shared out."""
    rng = np.random.default_rng(7)
    tokens, groups = 70, 6
    a, b = data("normal", (tokens, 90), DTYPES[dtype]), data("normal", (groups, 90, 40), DTYPES[dtype], 1)
    for _ in range(4):
        expert, order, end = shuffled(rng, tokens, groups)
        out = grouped_gemm(np.ascontiguousarray(a[order]), b, end, arithmetic=arithmetic)
        for place_of, t in enumerate(order):
            alone = pydet.gemm(a[t : t + 1], b[expert[t]], arithmetic=arithmetic)
            assert_same_bits(out[place_of : place_of + 1], alone, f"token {t} of group {expert[t]}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_feel_the_routing(dtype):
    for arithmetic in ("ieee",) if dtype == "fp32" else ("ieee", "sm90"):
        check_token(pydet.grouped_gemm, dtype, arithmetic)


def split_by_size(a, b, end, start=None, *, arithmetic="ieee", **options):
    """As libraries do that cut K where an expert has few tokens."""
    out = reference.grouped_gemm(a, b, end, start, arithmetic=arithmetic, **options)
    for g, (first, last) in enumerate(reference.groups_of(end, start, len(a))):
        if 0 < last - first < 16:
            part = reference.gemm(a[first:last], b[g], arithmetic=arithmetic, k_chunk=32, out_dtype=out.dtype)
            out[first:last] = part
    return out


def one_matrix_late(a, b, end, start=None, **options):
    """A tile that reaches over a boundary keeps the matrix of its first row."""
    return reference.grouped_gemm(a, b, np.minimum((end + 7) // 8 * 8, len(a)), start, **options)


def neighbours_leak(a, b, end, start=None, **options):
    """Depth whose last stage reads the next group's tokens, times zero."""
    out = reference.grouped_gemm(a, b, end, start, **options)
    for g, (_, last) in enumerate(reference.groups_of(end, start, a.shape[1])):
        more = slice(last, last + 8)
        out[g] = out[g] + 0.0 * (reference.widen(a[:, more]) @ reference.widen(b[more]))
    return out


def writes_past_its_group(a, b, end, start=None, *, out, **options):
    """Rows up to the next multiple of 8 are stored, in no group or not."""
    last = reference.groups_of(end, start, len(a))[-1][1]
    reference.grouped_gemm(a, b, end, start, out=out, **options)
    out[last : (last + 7) // 8 * 8] = 0
    return out


def test_the_checks_refuse_what_breaks_the_promise():
    for broken in (split_by_size, one_matrix_late):
        with pytest.raises(AssertionError):
            check_token(broken, "fp32", "ieee")
    check_token(reference.grouped_gemm, "fp32", "ieee")
    with pytest.raises(AssertionError):
        check(writes_past_its_group, [Grouped("rest in no group")])
    for correct, wrong in ((pydet.grouped_gemm, False), (neighbours_leak, True)):
        try:
            check_neighbours(correct, "fp32", "ieee")
        except AssertionError:
            assert wrong
        else:
            assert not wrong


def check_neighbours(grouped_gemm, dtype, arithmetic):
    """NaN in other groups' tokens, and in other groups' matrices, reaches nothing."""
    for routing in ("odd", "empty between", "masked", "gaps"):
        problem = Grouped(routing, depth=True, dtype=dtype, arithmetic=arithmetic)
        (a, b, given), (tokens, end, start) = problem.operands(), problem.boundaries()
        groups = reference.groups_of(end, start, tokens)
        whole = grouped_gemm(a, b, end, start, **given)
        for g, (first, last) in enumerate(groups):
            dirty_a, dirty_b = np.full(a.shape, np.nan, a.dtype), np.full(b.shape, np.nan, b.dtype)
            dirty_a[:, first:last], dirty_b[first:last] = a[:, first:last], b[first:last]
            assert_same_bits(grouped_gemm(dirty_a, dirty_b, end, start, **given)[g], whole[g], f"{routing}, group {g}")
        problem = Grouped(routing, dtype=dtype, arithmetic=arithmetic)
        a, b, given = problem.operands()
        whole = grouped_gemm(a, b, end, start, **given)
        for g, (first, last) in enumerate(groups):
            dirty_a, dirty_b = np.full(a.shape, np.nan, a.dtype), np.full(b.shape, np.nan, b.dtype)
            dirty_a[first:last], dirty_b[g] = a[first:last], b[g]
            got = grouped_gemm(dirty_a, dirty_b, end, start, **given)[first:last]
            assert_same_bits(got, whole[first:last], f"{routing}, group {g}")


def test_nan_next_door(grouped_gemm_kernel):
    kernel = grouped_gemm_kernel
    check_neighbours(kernel.grouped_gemm, kernel.dtype, kernel.arithmetic)


@pytest.mark.parametrize("dtype, arithmetic", [("fp32", "ieee"), ("bf16", "sm90")])
def test_micro_batches_have_the_bits_of_one(dtype, arithmetic):
    """The weights' gradient: each group's tokens in two parts, cut at a multiple of 16, accumulated."""
    problem = Grouped("even", depth=True, dtype=dtype, arithmetic=arithmetic)
    a, b, given = problem.operands()
    end = np.int32([32, 64, 96, 128])
    whole = pydet.grouped_gemm(a, b, end, out_dtype="float32", **given)
    parts = pydet.grouped_gemm(a, b, end - 16, end - 32, out_dtype="float32", **given)
    pydet.grouped_gemm(a, b, end, end - 16, out=parts, accumulate=True, **given)
    assert_same_bits(parts, whole)
    parts = pydet.grouped_gemm(a, b, end - 15, end - 32, out_dtype="float32", **given)
    pydet.grouped_gemm(a, b, end, end - 15, out=parts, accumulate=True, **given)
    assert (arithmetic == "ieee") == np.array_equal(parts.view(np.int32), whole.view(np.int32))


def test_empty_extents():
    end = np.int32([2, 4])
    ones = lambda *shape: np.ones(shape, np.float32)
    assert_same_bits(pydet.grouped_gemm(ones(4, 0), ones(2, 0, 3), end), np.zeros((4, 3), np.float32))
    bias = np.float32([[1, 2, 3], [4, 5, 6]])
    want = np.repeat(bias, 2, axis=0)
    assert_same_bits(pydet.grouped_gemm(ones(4, 0), ones(2, 0, 3), end, bias=bias), want)
    nobody = np.int32([0, 0])
    assert_same_bits(pydet.grouped_gemm(ones(3, 0), ones(0, 2), nobody), np.zeros((2, 3, 2), np.float32))
    assert pydet.grouped_gemm(ones(0, 5), ones(2, 5, 3), nobody).shape == (0, 3)
    assert pydet.grouped_gemm(ones(4, 5), ones(2, 5, 0), end).shape == (4, 0)
    assert pydet.grouped_gemm(ones(4, 5), ones(5, 3), np.zeros(0, np.int32)).shape == (0, 4, 3)
    none = np.full((4, 3), 7, np.float32)
    assert np.all(pydet.grouped_gemm(ones(4, 5), ones(0, 5, 3), np.zeros(0, np.int32), out=none) == 7)
    kept = ones(2, 3, 4)
    pydet.grouped_gemm(ones(3, 6), ones(6, 4), np.int32([0, 0]), out=kept, accumulate=True)
    assert np.all(kept == 1)


# ---- The example -----------------------------------------------------------------------------------------------------


def test_the_example_compiles_and_runs(tmp_path):
    strict = "-std=c++17 -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Werror"
    library = library_path().resolve()
    command = ["c++", *shlex.split(strict), f"-I{HEADER.parent}", ROOT / "examples/experts.cpp", library]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-o", tmp_path / "experts"], check=True)
    done = subprocess.run([tmp_path / "experts"], capture_output=True, text=True)
    assert done.returncode == 0 and "have the same bits" in done.stdout, done.stdout + done.stderr


# ---- Refusals --------------------------------------------------------------------------------------------------------


def refused(a, b, end, start=None, **given):
    out = given.setdefault("out", np.full((6, 5), 7, np.float32))
    before = None if out is None else out.copy()
    with pytest.raises(pydet.Error) as error:
        pydet.grouped_gemm(a, b, end, start, **given)
    assert out is None or np.array_equal(out, before), "out was touched"
    return str(error.value)


def test_refusals():
    f32 = lambda *shape: np.ones(shape, np.float32)
    a, b, end = f32(6, 4), f32(3, 4, 5), np.int32([1, 2, 6])
    assert refused(f32(1, 6, 4), b, end) == "grouped_gemm: a is 1x6x4, want TxK or MxT"
    assert refused(a, f32(2, 3, 4, 5), end) == "grouped_gemm: b is 2x3x4x5, want GxKxN, or TxN for groups along K"
    assert refused(a, f32(3, 5, 5), end) == "grouped_gemm: b is 3x5x5, want Gx4xN"
    assert refused(a, f32(5, 5), end) == "grouped_gemm: b is 5x5, want 4xN"
    assert refused(a, b, end[:2]) == "grouped_gemm: group_end is 2, want 3"
    assert refused(a, b, end, end[:2]) == "grouped_gemm: group_start is 2, want 3"
    assert refused(a, b, end.astype(np.int64)) == "grouped_gemm: group_end is int64, want int32"
    assert refused(a, b, end, f32(3)) == "grouped_gemm: group_start is float32, want int32"
    assert "group_end has stride 2 in dimension 0" in refused(a, b, np.zeros(6, np.int32)[::2])
    assert refused(a, b.astype(np.float16), end) == "grouped_gemm: b is float16, want float32 as a is"
    assert refused(a, b, end, bias=f32(5)) == "grouped_gemm: bias has 1 dimensions, want 2 to 8"
    assert refused(a, b, end, bias=f32(2, 5)) == "grouped_gemm: bias is 2x5, want 3x5"
    assert refused(a, b, end, out=f32(6, 4)) == "grouped_gemm: out is 6x4, want 6x5"
    few = np.int32([1, 2, 4])
    assert refused(a, f32(4, 5), few) == "grouped_gemm: out is 6x5, want Gx6x5"
    assert refused(a, f32(4, 5), few, out=f32(2, 6, 5)) == "grouped_gemm: group_end is 3, want 2"
    assert (
        refused(a, b, end, k_chunk=24)
        == "grouped_gemm: k_chunk is 24, want a positive multiple of 16, or none (0 in C, None in Python)"
    )
    assert refused(a, b, end, arithmetic="sm90").startswith("grouped_gemm: arithmetic sm90 takes bfloat16 or float16")
    assert refused(a, b, end, kernel="cpu_gemm_ieee_scalar").startswith(
        "grouped_gemm: kernel cpu_gemm_ieee_scalar is not a grouped_gemm kernel"
    )
    assert "accumulate needs out" in refused(a, b, end, out=None, accumulate=True)
    assert refused(a, b, end, initial=f32(5, 5)) == "grouped_gemm: initial is 5x5, want 6x5"
    assert refused(a, b, end, initial=f32(6, 5).astype(np.float16)) == (
        "grouped_gemm: initial is float16, want float32"
    )
    assert refused(a, b, end, initial=f32(6, 5), accumulate=True) == (
        "grouped_gemm: initial is given and options.accumulate is 1, want one of them"
    )
    memory = np.zeros(60, np.float32)
    assert "out shares memory with a" in refused(memory[6:30].reshape(6, 4), b, end, out=memory[:30].reshape(6, 5))
    assert "out shares memory with group_end" in refused(
        a, b, memory.view(np.int32)[2:5], out=memory[:30].reshape(6, 5)
    )
    assert "strides" in refused(f32(12, 8)[::2, ::2], b, end)


def test_python_refuses_ends_beyond_the_tokens():
    """On the CPU, where the host may read them; one more than there are, as the last and before it. C clamps them."""
    f32 = lambda *shape: np.ones(shape, np.float32)
    for ends in ([1, 2, 7], [1, 2**31 - 1, 6]):
        words = f"group_end has {max(ends)}, want 6 or less, the number of tokens"
        assert refused(f32(6, 4), f32(3, 4, 5), np.int32(ends)) == f"grouped_gemm: {words}"
        assert refused(f32(4, 6), f32(6, 5), np.int32(ends), out=f32(3, 4, 5)) == f"grouped_gemm: {words}"
        fp8, one = np.ones((6, 128), ml_dtypes.float8_e4m3fn), np.float32(1)
        with pytest.raises(ValueError, match=f"^scaled_grouped_gemm: {words}$"):
            b = np.ones((3, 128, 16), ml_dtypes.float8_e4m3fn)
            pydet.scaled_grouped_gemm(fp8, b, np.int32(ends), a_scale=one, b_scale=one)
    for ends in ([1, 2, 6], [6, 6, 6], [-1, 0, 6]):
        assert pydet.grouped_gemm(f32(6, 4), f32(3, 4, 5), np.int32(ends)).shape == (6, 5)
    out, clamped = f32(6, 5), pydet.grouped_gemm(f32(6, 4), f32(3, 4, 5), np.int32([1, 2, 6]))
    in_c(pydet.grouped_gemm)(f32(6, 4), f32(3, 4, 5), np.int32([1, 2, 7]), out=out, arithmetic="ieee")
    assert_same_bits(out, clamped, "in C")


def test_c_refuses_and_touches_nothing():
    a, b, out = (Tensor(np.full(shape, 7, np.float32)) for shape in ((6, 4), (3, 4, 5), (6, 5)))
    end = Tensor(np.int32([1, 2, 6]), dtype=(0, 32, 1))
    wanted = [a, b, None, None, end, out]

    def call(*changed, **given):
        tensors = [c if c != "same" else w for c, w in zip(changed, wanted, strict=True)] if changed else wanted
        made = options("pydet_grouped_gemm_options", **given)
        status = lib.pydet_grouped_gemm(ffi.NULL, *[ffi.NULL if t is None else t.c for t in tensors], made)
        return status_name(status), last_error()

    same = "same"
    for i, name in ((0, "a"), (1, "b"), (4, "group_end"), (5, "out")):
        changed = [same] * 6
        changed[i] = None
        assert call(*changed) == ("PYDET_NULL_POINTER", f"grouped_gemm: {name} is NULL, want a tensor")
    askew = Tensor(shape=(3,), dtype=(0, 32, 1), data=66)
    assert call(same, same, same, same, askew, same)[0] == "PYDET_MISALIGNED"
    assert call(accumulate=2) == ("PYDET_INVALID_VALUE", "grouped_gemm: options.accumulate is 2, want 0 or 1")
    assert call(reserved=1)[0] == "PYDET_INVALID_VALUE" and call(struct_size=8)[0] == "PYDET_INVALID_VALUE"
    assert np.all(out.array == 7)
    assert call()[0] == "PYDET_OK" and not np.any(out.array == 7)

    out, begun, room = Tensor(np.full((6, 5), 7, np.float16)), Tensor(np.ones((6, 5), np.float32)), np.zeros(64)
    wanted[-1], pointer = out, ffi.cast("char *", room.ctypes.data)
    assert call(initial=begun.c) == (
        "PYDET_WORKSPACE_TOO_SMALL", "grouped_gemm: workspace_size is 0, want 128 for the sums of a float16 out"
    )  # fmt: skip
    given = {"initial": begun.c, "workspace": pointer, "workspace_size": 128}
    assert call(**given | {"workspace": pointer + 4})[0] == "PYDET_MISALIGNED"
    inside = Tensor(shape=(3,), dtype=(0, 32, 1), data=room.ctypes.data + 32)
    assert call(same, same, same, same, inside, same, **given) == (
        "PYDET_OVERLAP", "grouped_gemm: workspace shares memory with group_end, want it apart"
    )  # fmt: skip
    assert np.all(out.array == 7)
    assert call(**given)[0] == "PYDET_OK" and np.all(out.array == 1 + 4 * 49)
