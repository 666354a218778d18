"""Grouped GEMM: every kernel, forced by name, against GEMM of each group, whatever the boundaries hold."""

import dataclasses

import numpy as np

import pydet
import reference
from cases import DTYPES, assert_same_bits, data, place

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

    def boundaries(self):
        tokens, end, start = ROUTINGS[self.routing]
        return tokens, np.array(end, np.int32), None if start is None else np.array(start, np.int32)

    def operands(self):
        """a, b and the options, in the problem's layouts."""
        dtype, (tokens, end, _) = DTYPES[self.dtype], self.boundaries()
        a_shape = (self.rows, tokens) if self.depth else (tokens, self.rows)
        b_shape = (tokens, self.n) if self.depth else (len(end), self.rows, self.n)
        a, b = place(a_shape, dtype, self.a_layout)[1], place(b_shape, dtype, self.b_layout)[1]
        a[...], b[...] = data(self.kind, a_shape, dtype, self.seed), data(self.kind, b_shape, dtype, self.seed + 1)
        given = {"arithmetic": self.arithmetic, "k_chunk": self.k_chunk}
        if self.bias:
            given["bias"] = data(self.kind, (len(end), self.n), DTYPES[self.bias], self.seed + 2)
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


def run(grouped_gemm, problem):
    """The implementation's result, after checking that it wrote its elements and nothing beside them."""
    a, b, given = problem.operands()
    _, end, start = problem.boundaries()
    memory, out = place(problem.shape, DTYPES[problem.out_dtype], problem.out_layout)
    out[...] = problem.start()
    before = memory.copy()
    inputs = [x.tobytes() for x in (a, b, end)]
    grouped_gemm(a, b, end, start, out=out, accumulate=problem.accumulate, **given)
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
