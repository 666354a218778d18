"""Data, layouts and problems: what the tests of every operation and every backend are run on.

An implementation is a callable on NumPy arrays with the signature of pydet's function: pydet's own with a kernel forced
by name, the reference, or a broken one that the checks must refuse. A check is a function that takes an implementation
first and raises AssertionError.
"""

import dataclasses
import functools
import math

import numpy as np

import reference
from reference import BFLOAT16, FLOAT16, FLOAT32, bits

DTYPES = {"fp32": FLOAT32, "bf16": BFLOAT16, "fp16": FLOAT16}
ARITHMETICS = {"fp32": ["ieee"], "bf16": list(reference.STEP), "fp16": list(reference.STEP)}


# ---- Comparison ----------------------------------------------------------------------------------------------------


def assert_same_bits(actual, expected, what=""):
    """Bytes, not values: -0 is not +0, and one NaN is not another."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{what}: {actual.dtype} {actual.shape}, want {expected.dtype} {expected.shape}"
    )
    got, want = bits(actual), bits(expected)
    wrong = np.argwhere(got != want)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.size} elements differ, the first at {at}: "
            f"{got[at]:#x} ({float(actual[at])}), want {want[at]:#x} ({float(expected[at])})"
        )


# ---- Numbers -------------------------------------------------------------------------------------------------------
# From a counter through an integer hash (splitmix64), so that the bits are the same with every NumPy, on every machine.


def random_words(shape, seed):
    with np.errstate(over="ignore"):
        z = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))).reshape(shape)


def field(words, low, count):
    """`count` bits of each word, from bit `low`."""
    return ((words >> np.uint64(low)) & np.uint64((1 << count) - 1)).astype(np.int64)


def from_fields(sign, exponent, mantissa, dtype):
    """Numbers of this sign, unbiased exponent (clipped to the finite range, the least subnormal) and mantissa."""
    fraction = reference.FRACTION_BITS[dtype]
    bias = {FLOAT32: 127, BFLOAT16: 127, FLOAT16: 15}[dtype]
    biased = np.clip(exponent + bias, 0, 2 * bias)
    word = (sign << (dtype.itemsize * 8 - 1)) | (biased << fraction) | (mantissa >> (23 - fraction))
    return word.astype({2: np.uint16, 4: np.uint32}[dtype.itemsize]).view(dtype)


SPECIALS = {
    BFLOAT16: [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x3F80],
    FLOAT16: [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFC01, 0x3C00],
    FLOAT32: [
        0,
        0x80000000,
        1,
        0x807FFFFF,
        0x800000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0xFF800001,
        0x3F800000,
    ],
}

KINDS = ["integers", "normal", "wide", "extremes", "specials", "tiny"]


def data(kind, shape, dtype, seed=0):
    """Rows to be multiplied along the last dimension.

    integers  -4 to 4: every partial sum is exact, in any order
    normal    a bell of standard deviation 1.15
    wide      exponents over 48 binades (fp16: 16), half of them within 8: alignments, cancellations, lost addends
    extremes  a row is tiny, plain or huge, so that products of two rows are subnormal, plain or infinite
    specials  wide, one element in 64 a zero, subnormal, largest, infinity or NaN
    tiny      products around and below the least normal fp32 (fp16: factors around the least normal)
    """
    words = random_words(shape, seed)
    if kind == "integers":
        return reference.round_to((words % np.uint64(9)).astype(np.float32) - np.float32(4), dtype)
    if kind == "normal":
        halves = np.uint64(0x0000FFFF0000FFFF)
        pairs = (words & halves) + (words >> np.uint64(16) & halves)  # the sum of four fields of 16 bits
        total = (pairs & np.uint64(0xFFFFFFFF)).astype(np.int64) + (pairs >> np.uint64(32)).astype(np.int64) - 2 * 65535
        return reference.round_to(total.astype(np.float32) * np.float32(2.0**-15), dtype)
    sign, mantissa = field(words, 63, 1), field(words, 0, 23)
    if kind == "extremes":
        reach = 12 if dtype == FLOAT16 else 66
        row = field(random_words((*shape[:-1], 1), seed + 1000), 0, 8) % 3 - 1
        return from_fields(sign, row * reach + field(words, 24, 3) - 4, mantissa, dtype)
    if kind == "tiny":
        return from_fields(sign, (-18 if dtype == FLOAT16 else -70) + field(words, 24, 4) - 8, mantissa, dtype)
    reach = 8 if dtype == FLOAT16 else 24
    near, far = field(words, 24, 3) - 4, field(words, 32, 16) % (2 * reach) - reach
    wide = from_fields(sign, np.where(field(words, 48, 1), near, far), mantissa, dtype)
    if kind == "wide":
        return wide
    chosen = np.array(SPECIALS[dtype], bits(wide).dtype).view(dtype)[field(words, 24, 6) % 12]
    return np.where(field(words, 56, 6) == 0, chosen, wide)


kept_data, kept_large_data = (functools.lru_cache(maxsize=count)(data) for count in (2000, 60))


def same_data(kind, shape, dtype, seed):
    """data() for who only reads it: problems that differ in their layouts, options or kernels have the same numbers."""
    small = math.prod(shape) <= 1 << 14
    return (kept_data if small else kept_large_data)(kind, shape, dtype, seed)


# ---- Layouts -------------------------------------------------------------------------------------------------------

LAYOUTS = ["row", "col", "row_padded", "col_padded", "row_shared", "col_shared", "overlapped"]


def strides_of(layout, rows, cols):
    """Of the last two dimensions, in elements; one of them is 1."""
    return {
        "row": (cols, 1),
        "col": (1, rows),
        "row_padded": (cols + 5, 1),
        "col_padded": (1, rows + 3),
        "row_shared": (0, 1),
        "col_shared": (1, 0),
        "overlapped": (1, 2),
    }[layout]


def place(shape, dtype, layout, margin=64):
    """A view of this shape and layout inside fresh memory, and that memory: (memory, view).

    The memory is full of 0xFF, a NaN in every type. In the padded layouts the view starts one element past a 64-byte
    boundary, in the others on one. Leading dimensions lie one matrix after the other, three elements apart.
    """
    rows, cols = shape[-2:]
    row, col = strides_of(layout, rows, cols)
    extent = max(rows - 1, 0) * row + max(cols - 1, 0) * col + 1
    strides = [row, col]
    for count in reversed(shape[:-2]):
        strides.insert(0, extent + 3)
        extent += max(count - 1, 0) * strides[0]
    first = margin + ("padded" in layout)
    size = (first + extent + margin) * dtype.itemsize
    memory = np.full(size + 64, 0xFF, np.uint8)
    aligned = -memory.ctypes.data % 64
    memory = memory[aligned : aligned + size]
    view = np.lib.stride_tricks.as_strided(memory.view(dtype)[first:], shape, [s * dtype.itemsize for s in strides])
    return memory, view


def lay(array, layout):
    """The array's numbers in this layout; in a shared or overlapped one, as many of them as it holds."""
    view = place(array.shape, array.dtype, layout)[1]
    view[...] = array
    return view


# ---- GEMM problems -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of gemm, as values: what a test names and a reference result is kept under."""

    m: int
    n: int
    k: int
    dtype: str = "fp32"
    arithmetic: str = "ieee"
    out_dtype: str = "fp32"
    kind: str = "normal"
    a_layout: str = "row"
    b_layout: str = "row"
    out_layout: str = "row"
    bias: str = ""  # "", or a shape and a type: "n bf16", "mn fp32"
    accumulate: bool = False
    k_chunk: int | None = None
    batch: tuple = ()
    seed: int = 0
    initial: bool = False  # as accumulate, but for where the sums begin

    def operands(self):
        """a [..., M, K], b [..., K, N] and the options, in the problem's layouts."""
        dtype = DTYPES[self.dtype]
        a = same_data(self.kind, (*self.batch, self.m, self.k), dtype, self.seed)
        b = same_data(self.kind, (*self.batch, self.n, self.k), dtype, self.seed + 100).swapaxes(-1, -2)
        options = {"arithmetic": self.arithmetic, "k_chunk": self.k_chunk}
        if self.bias:
            extents, bias_dtype = self.bias.split()
            shape = {"n": (self.n,), "mn": (*self.batch, self.m, self.n)}[extents]
            bias = data(self.kind, shape, DTYPES[bias_dtype], self.seed + 200)
            options["bias"] = (
                bias if extents == "n" or self.values_depend_on(self.a_layout) else lay(bias, self.a_layout)
            )
        return lay(a, self.a_layout), lay(b, self.b_layout), options

    def start(self):
        """What `out` holds before the call, under accumulate, or `initial` is; subnormal where the products are."""
        start = data(self.kind, (*self.batch, self.m, self.n), FLOAT32, self.seed + 300)
        return start * np.float32(2.0**-60) if self.kind == "tiny" else start

    @property
    def shape(self):
        return (*self.batch, self.m, self.n)

    def values_depend_on(self, layout):
        return layout in ("row_shared", "col_shared", "overlapped")

    def expected(self):
        """The reference's result; layouts that do not change the values share one."""
        plain = {name: "row" for name in ("a_layout", "b_layout") if not self.values_depend_on(getattr(self, name))}
        return reference_result(dataclasses.replace(self, out_layout="row", **plain))


@functools.lru_cache(maxsize=20000)
def reference_result(problem):
    a, _, options = problem.operands()
    total = reference_sum(dataclasses.replace(problem, bias="", out_dtype="fp32"))
    result = reference.finish(total, a, options.get("bias"), None, DTYPES[problem.out_dtype])
    result.flags.writeable = False
    return result


@functools.lru_cache(maxsize=20000)
def reference_sum(problem):
    """What results of every type and with every bias are rounded from."""
    a, b, options = problem.operands()
    total = reference.product_sum(a, b, problem.start() if problem.accumulate or problem.initial else None, **options)
    total.flags.writeable = False
    return total


def run(gemm, problem):
    """The implementation's result, after checking that it wrote its elements and nothing beside them."""
    a, b, options = problem.operands()
    memory, out = place(problem.shape, DTYPES[problem.out_dtype], problem.out_layout)
    if problem.accumulate:
        out[...] = problem.start()
        options["accumulate"] = True
    if problem.initial:
        options["initial"] = problem.start()
    before = memory.copy()
    inputs = [a.tobytes(), b.tobytes()]
    gemm(a, b, out=out, **options)
    result = np.array(out, order="C")
    first = out.ctypes.data - memory.ctypes.data
    np.lib.stride_tricks.as_strided(before[first:].view(out.dtype), out.shape, out.strides)[...] = out
    assert np.array_equal(before, memory), f"{problem}: bytes around out changed"
    assert inputs == [a.tobytes(), b.tobytes()], f"{problem}: an input changed"
    return result


# k that a kernel of some backend takes from memory, keeps or multiplies at a time.
STAGES = (16, 32, 64, 128, 256, 512)


def chunk_cases(stages=STAGES):
    """[(K, k_chunk)]: chunks a step of 16 shorter than a stage, as long, a step longer, one and a half stages and two
    and a step; K a chunk, a little less and a little more than two, and three with a rest."""
    found = {}
    for stage in stages:
        for i, chunk in enumerate((stage - 16, stage, stage + 16, stage * 3 // 32 * 16, 2 * stage + 16)):
            ends = (2 * chunk + 24, 2 * chunk - 8, 2 * chunk + 8, 2 * chunk, chunk, 3 * chunk + 19)
            if chunk:
                found.setdefault(chunk, (ends[(i + stage.bit_length()) % len(ends)], chunk))
    return list(found.values())


# Rows that need one, two, ... tiles of every height that there is, and one row more than that.
ROWS = (1, 8, 9, 17, 33, 65, 129)


def check_chunks(gemm, arithmetic, dtype, problems=None, rows=ROWS, n=19):
    """Chunks that end inside, at and between the stages of a kernel, for the same first rows of more and more: each is
    a chain of its own, and their sums are added in ascending order. The chains are those of the CPU's kernels."""
    for k, chunk in chunk_cases() if problems is None else problems:
        a, b, want = chunked_sums(k, chunk, arithmetic, dtype, max(rows), n)
        for m in rows:
            got = gemm(a[:m], b, arithmetic=arithmetic, k_chunk=chunk, out_dtype=FLOAT32)
            assert_same_bits(got, want[:m], f"{m} x {n} x {k}, k_chunk {chunk}, {dtype}, {arithmetic}")


@functools.lru_cache(maxsize=1000)
def chunked_sums(k, chunk, arithmetic, dtype, m, n):
    """a, b whose columns are contiguous, and their product in fp32."""
    import pydet

    a, b = data("wide", (m, k), DTYPES[dtype]), data("normal", (n, k), DTYPES[dtype], 1).T
    total = np.zeros((m, n), np.float32)
    for first in range(0, k, chunk):
        part = slice(first, first + chunk)
        total = total + pydet.gemm(a[:, part], b[part], arithmetic=arithmetic, out_dtype=FLOAT32)
    return a, b, total


def random_problem(rng, dtype, arithmetic, most_m=300, most_n=700, most_k=5000, most_work=1 << 24, few_rows=False):
    """A problem of any extents up to these and of at most so many products: often small, often beside a power of two;
    half of them in chunks of any length up to K. `few_rows`: mostly what kernels for those take."""

    def extent(most):
        size = int(2 ** rng.uniform(0, np.log2(most)))
        if rng.random() < 0.5:
            size = 2 ** round(np.log2(size)) + rng.choice([-1, 0, 1, 8])
        return min(max(size, 1), most)

    k = extent(most_k) if rng.random() < 0.5 else rng.randint(1, most_k)  # long chains are what chunks are for
    m = extent(max(1, min(most_m, most_work // k)))
    n = extent(max(1, min(most_n, most_work // (m * k))))
    k_contiguous = rng.random() < (0.9 if few_rows else 0.5)
    if k_contiguous or rng.random() < 0.5:
        k = -(-k // 8) * 8
    out_dtype, begins = rng.choice(list(DTYPES)), rng.random()
    return Problem(
        m,
        n,
        k,
        dtype,
        arithmetic,
        out_dtype,
        kind=rng.choice(["normal", "wide", "specials"]),
        a_layout="row" if k_contiguous else rng.choice(LAYOUTS),
        b_layout="col" if k_contiguous else rng.choice(LAYOUTS),
        out_layout=rng.choice(["row", "col", "row_padded", "col_padded"]),
        bias=rng.choice(["", "n fp32", "mn bf16", "mn fp16"]),
        accumulate=out_dtype == "fp32" and begins < 0.5,
        initial=begins > 0.8,
        k_chunk=rng.choice([None, 16 * rng.randint(1, -(-k // 16))]),
        seed=rng.randrange(10),
    )


def check_equals_reference(gemm, problems):
    for problem in problems:
        assert_same_bits(run(gemm, problem), problem.expected(), str(problem))
