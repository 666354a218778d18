"""The contract of native/NUMERICS.md as plain NumPy: slow, and written to be read beside the formulas.

Nothing here shares code with the library. `gemm`, `skinny_gemm`, `rmsnorm` and `rmsnorm_backward` have the signatures
of pydet's own functions, so that a check written for the one runs on the other.

Arrays are float32, float16 or ml_dtypes.bfloat16. Whatever is computed is computed in float32 with one rounding an
operation (NumPy's +, *, / and sqrt on float32 are the IEEE operations), in `fma`, or in exact integers.
"""

import functools

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)

STEP = {"ieee": 1, "sm90": 16, "sm80": 8, "cdna3": 8, "cdna2": 4}  # products that one step of the chain takes

ROW_LANES, LANE_ELEMENTS = 2048, 8
DWEIGHT_CHAIN_ROWS, DWEIGHT_GROUP_ROWS, DWEIGHT_BLOCK_ROWS = 16, 64, 256


def quiet(function):
    """Overflow and invalid operations are results here, not events."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return call


# ---- Number types --------------------------------------------------------------------------------------------------


def bits(array):
    """The bit patterns as unsigned integers of the element's size."""
    return np.ascontiguousarray(array).view(
        {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize]
    )


def widen(array):
    """To float32, exactly."""
    if array.dtype == BFLOAT16:
        return (bits(array).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


@quiet
def round_to(x, dtype):
    """float32 to dtype, to nearest even; every NaN becomes the canonical one."""
    dtype = np.dtype(dtype)
    nan = np.isnan(x)
    if dtype == FLOAT32:
        return np.where(nan, np.uint32(0x7FFFFFFF), bits(x)).view(np.float32)
    if dtype == BFLOAT16:
        u = bits(x)  # of a NaN the sum may wrap
        rounded = ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    else:
        rounded = bits(x.astype(np.float16))
    return np.where(nan, np.uint16(0x7FFF), rounded).view(dtype)


HALFWAY, BELOW_FLOAT32 = 1 << 28, (1 << 29) - 1  # in the bits of a float64 that float32 lacks


def rounded_sum(product, c):
    """product + c with one rounding to float32, to nearest even; of a product in float64, which is exact.

    The sum in float64 rounds to float32 as the exact sum does, unless it is halfway between two numbers of float32, or
    below its least normal number. Then TwoSum gives its exact error, and from the two follows the sum rounded to odd:
    where it is inexact and its last bit is 0, the neighbour toward the error. A value rounded to odd at 53 bits rounds
    to 24 bits as the exact value does (Boldo and Melquiond: 53 >= 24 + 2).
    """
    total = np.asarray(product + c)
    pattern, size = total.view(np.int64), np.abs(total)
    near = (pattern & BELOW_FLOAT32) == HALFWAY
    near |= (size < 2.0**-126) & (size > 0)
    if np.count_nonzero(near):
        back = total - product
        error = np.asarray((product - (total - back)) + (c - back))
        adjust = near & np.isfinite(total) & (error != 0) & (pattern & 1 == 0)
        total[adjust] = np.nextafter(total[adjust], np.copysign(np.inf, error[adjust]))
    return total.astype(np.float32)


@quiet
def fma(a, b, c):
    """a b + c on float32 with one rounding, to nearest even. The product has 48 bits, and exponents above -300."""
    return rounded_sum(np.multiply(a, b, dtype=np.float64), c)


# ---- Tensor-core steps ---------------------------------------------------------------------------------------------

FRACTION_BITS = {BFLOAT16: 7, FLOAT16: 10, FLOAT32: 23}
MIN_EXPONENT = {BFLOAT16: -126, FLOAT16: -14, FLOAT32: -126}
NONE = -(1 << 13)  # the exponent of what does not take part


def exponents(array):
    """e of array = m 2^(e - fraction bits), m an integer: subnormals keep the least exponent, 0 has NONE."""
    fraction_bits, least = FRACTION_BITS[array.dtype], MIN_EXPONENT[array.dtype]
    field = (bits(array) & ((1 << 8 * array.dtype.itemsize - 1) - 1)) >> fraction_bits
    return np.where(array == 0, NONE, np.maximum(field.astype(np.int16), 1) - 1 + least).astype(np.int16)


class Numbers:
    """The operands of steps, those of a sum along the first axis: values, exact, and exponents."""

    def __init__(self, array):
        self.value, self.e = widen(array).astype(np.float64), exponents(array)
        self.finite = bool(np.isfinite(self.value).all())

    def __getitem__(self, places):
        part = object.__new__(Numbers)
        part.value, part.e, part.finite = self.value[places], self.e[places], self.finite
        return part


class Products:
    """The products of one step, along the first axis: values, exact, and the exponents that the operands' make."""

    def __init__(self, a, b):
        self.value, self.e, self.finite = a.value * b.value, a.e + b.e, a.finite and b.finite


def with_specials(finite, products, c):
    """`finite`, unless a product or c is Inf or NaN: then their IEEE sum."""
    if products.finite and np.isfinite(c).all():
        return finite
    special = np.where(np.isfinite(products.value), 0.0, products.value).sum(0) + np.where(np.isfinite(c), 0.0, c)
    return np.where(special == 0.0, finite, special.astype(np.float32))


def truncate_to_float32(x):
    """float64 toward zero to float32, subnormals kept, infinite from 2^128 on. Zero is +0, as on the H100."""
    nearest = x.astype(np.float32)
    over = np.abs(nearest.astype(np.float64)) > np.abs(x)
    truncated = np.where(over, np.nextafter(nearest, np.float32(0)), nearest)
    return np.where(np.abs(x) >= 2.0**128, np.copysign(np.float32(np.inf), nearest), truncated) + np.float32(0)


def truncating_step(p, c, fraction, least):
    """NVIDIA: the addends, cut toward zero at 2^(E - fraction), summed exactly, the sum cut toward zero."""
    largest = np.maximum(np.maximum(p.e.max(0), exponents(c)), least)
    scale = np.ldexp(1.0, fraction - largest)
    total = np.trunc(p.value * scale).sum(0) + np.trunc(c * scale)
    return with_specials(truncate_to_float32(np.ldexp(total, largest - fraction)), p, c)


def cdna3_step(p, c):
    """AMD gfx942, by its published model: products cut toward zero at 24 fractional bits of the largest of them, their
    sum floored at 31 and c at 24 fractional bits of the larger exponent, one rounding to nearest even. Products of
    2^128 and more are infinite, once no operand is."""
    largest = np.maximum(p.e.max(0), 2 * MIN_EXPONENT[BFLOAT16])
    both = np.maximum(largest, exponents(c))
    products = np.trunc(p.value * np.ldexp(1.0, 24 - largest)).sum(0)
    total = np.floor(np.ldexp(products, largest - 24 - (both - 31))) + 128 * np.floor(np.ldexp(1.0, 24 - both) * c)
    finite = np.ldexp(total, both - 31).astype(np.float32) + np.float32(0)
    if largest.max(initial=NONE) >= 126:
        overflow = np.where(np.abs(p.value) >= 2.0**128, np.copysign(np.inf, p.value), 0.0).sum(0)
        finite = np.where(overflow == 0.0, finite, overflow.astype(np.float32))
    return with_specials(finite, p, c)


def flush(x, least=-126):
    """Zeros and subnormals to +0."""
    return np.where(np.abs(x) < np.float32(2.0**least), np.float32(0), x)


def cdna2_step(a, b, c):
    """AMD gfx90a, by its published model: float32 operations to nearest even that flush subnormals, as the operands'
    are. Zeros are +0."""
    p = flush(a * b)
    pair = [flush(p[i] + p[i + 1]) for i in (0, 2)]
    return flush(flush(c) + flush(pair[0] + pair[1]))


def operand_of_steps(arithmetic, array):
    """What `step_of` takes, of an array with the addends of sums along the first axis."""
    return flush(widen(array), MIN_EXPONENT[array.dtype]) if arithmetic == "cdna2" else Numbers(array)


def step_of(arithmetic, a, b, c):
    """One step of the chain for all elements: a [step, ..., M, 1], b [step, ..., 1, N], c [..., M, N]."""
    if arithmetic == "cdna2":
        return cdna2_step(a, b, c)
    products = Products(a, b)
    if arithmetic == "sm90":
        return truncating_step(products, c, fraction=25, least=-133)
    if arithmetic == "sm80":
        return truncating_step(products, c, fraction=24, least=-132)
    return cdna3_step(products, c)


def first(x, axis):
    """x with that axis before all others."""
    return x.transpose(x.ndim + axis, *(i for i in range(x.ndim) if i != x.ndim + axis))


@quiet
def step(arithmetic, a, b, c):
    """The same of arrays whose last axis is the step's."""
    return step_of(arithmetic, *(operand_of_steps(arithmetic, first(x, -1)) for x in (a, b)), c)


# ---- GEMM ----------------------------------------------------------------------------------------------------------


LARGE = 1 << 14  # elements of 8 bytes: for larger arrays an allocator asks the system each time


@quiet
def chain(a, b, start, arithmetic):
    """The accumulator after all of k, from `start`. a [..., M, K], b [..., K, N]; K is zero-padded to whole steps."""
    m, n = start.shape[-2:]
    if start.size * STEP[arithmetic] > LARGE and max(m, n) > 1:  # halves of the longer side, each by itself
        if m >= n:
            halves = slice(m // 2), slice(m // 2, m)
            return np.concatenate([chain(a[..., h, :], b, start[..., h, :], arithmetic) for h in halves], -2)
        halves = slice(n // 2), slice(n // 2, n)
        return np.concatenate([chain(a, b[..., h], start[..., h], arithmetic) for h in halves], -1)
    a, b = (x.reshape((1,) * (start.ndim - x.ndim) + x.shape) for x in (a, b))
    a, b = first(a, -1)[..., None], first(b, -2)[..., None, :]
    if arithmetic == "ieee":
        a, b = (widen(x).astype(np.float64) for x in (a, b))
        for k in range(len(a)):
            start = rounded_sum(a[k] * b[k], start)
        return start
    width = STEP[arithmetic]
    a, b = (np.concatenate([x, np.zeros((-len(x) % width, *x.shape[1:]), x.dtype)]) for x in (a, b))
    a, b = (operand_of_steps(arithmetic, x) for x in (a, b))
    for k in range(0, len(a.value if isinstance(a, Numbers) else a), width):
        start = step_of(arithmetic, a[k : k + width], b[k : k + width], start)
    return start


@quiet
def finish(total, a, bias, out, out_dtype):
    """The epilogue of a sum in fp32: the bias, the one rounding, and where the result goes."""
    if bias is not None:
        total = total + widen(bias)
    result = round_to(total, out.dtype if out is not None else out_dtype or a.dtype)
    if out is None:
        return result
    out[...] = result
    return out


@quiet
def product_sum(a, b, start=None, *, arithmetic="ieee", k_chunk=None):
    """All of a product but its epilogue: the sums in fp32, from `start` or +0."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    zeros = np.zeros(shape, np.float32)
    total = zeros if start is None else start
    if k_chunk is None:
        return chain(a, b, total, arithmetic)
    for k in range(0, a.shape[-1], k_chunk):
        total = total + chain(a[..., k : k + k_chunk], b[..., k : k + k_chunk, :], zeros, arithmetic)
    return total


def gemm(a, b, *, bias=None, out=None, out_dtype=None, accumulate=False, initial=None, **options):
    start = out.copy() if accumulate else initial
    return finish(product_sum(a, b, start, **options), a, bias, out, out_dtype)


def groups_of(end, start, tokens):
    """[(first, last)] of each group's tokens, whatever the boundaries hold."""
    found, reached = [], 0
    for g in range(len(end)):
        first = min(max(0 if start is None else int(start[g]), reached), tokens)
        last = min(max(int(end[g]), first), tokens)
        found.append((first, last))
        if last > first:
            reached = last
    return found


def grouped_gemm(
    a, b, end, start=None, *, bias=None, out=None, out_dtype=None, accumulate=False, initial=None, gemm=gemm, **options
):
    """gemm of each group. Rows of no group keep what out held; without out they are NaN."""
    rows = b.ndim == 3
    groups = groups_of(end, start, a.shape[0] if rows else a.shape[1])
    result = out
    if out is None:
        shape = (len(a), b.shape[-1]) if rows else (len(end), len(a), b.shape[-1])
        result = np.full(shape, np.nan, a.dtype if out_dtype is None else out_dtype)
    for g, (first, last) in enumerate(groups):
        part = slice(first, last)
        x, y, to = (a[part], b[g], part) if rows else (a[:, part], b[part], g)
        given = {"out": result[to], "accumulate": True} if accumulate else {"out_dtype": result.dtype}
        if initial is not None:
            given["initial"] = initial[to]
        result[to] = gemm(x, y, bias=None if bias is None else bias[g], **given, **options)
    return result


def gemm_da(dc, b, **options):
    return gemm(dc, b.swapaxes(-1, -2), **options)


def gemm_db(a, dc, **options):
    return gemm(a.swapaxes(-1, -2), dc, **options)


def skinny_gemm(x, w, *, bias=None, out=None, mode="deterministic", **options):
    result = gemm(
        x[..., None, :],
        w.T,
        bias=bias if bias is None or bias.ndim == 1 else bias[..., None, :],
        out=None if out is None else out[..., None, :],
        **options,
    )
    return out if out is not None else result[..., 0, :]


# ---- RMSNorm -------------------------------------------------------------------------------------------------------


def row_sum(a, b):
    """sum_j a[:, j] b[:, j]: 2048 lanes, element j in lane j mod 2048, lane = 8 g + e; each an ascending chain from +0.
    Then the lanes are joined by halves: over e, partners 4, 2, 1 apart; over g, partners 128, 64, ..., 1 apart."""
    lanes = np.zeros((a.shape[0], ROW_LANES), np.float32)
    for start in range(0, a.shape[1], ROW_LANES):
        part = slice(start, min(start + ROW_LANES, a.shape[1]))
        width = part.stop - part.start
        lanes[:, :width] = fma(a[:, part], b[:, part], lanes[:, :width])
    lanes = lanes.reshape(-1, ROW_LANES // LANE_ELEMENTS, LANE_ELEMENTS)
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    lanes = lanes[:, :, 0]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def scale_of(weight, weight_offset, n):
    ones = np.ones(n, np.float32)
    return (ones if weight is None else widen(weight)) + np.float32(weight_offset)


def rstd_of(squares, eps, n):
    """Of the row's sum of squares; one rounding each: the quotient, the sum, the root, the reciprocal."""
    return np.float32(1) / np.sqrt(squares / np.float32(n) + np.float32(eps))


def heads_of(*vectors):
    """How many heads have weights of their own; None: all rows have the same."""
    return next((len(v) for v in vectors if v is not None and v.ndim == 2), None)


def of_head(h, *vectors):
    return [None if v is None else v[..., h, :] for v in vectors]


@quiet
def rmsnorm(x, weight=None, *, eps, bias=None, weight_offset=0.0, residual=None, out=None):
    if (heads := heads_of(weight, bias)) is not None:
        each = [of_head(h, x, weight, bias, residual) for h in range(heads)]
        options = {"eps": eps, "weight_offset": weight_offset}
        parts = [rmsnorm(x_, w, bias=b, residual=r, **options) for x_, w, b, r in each]
        return tuple(np.stack(part, -1 - (i != 1)) for i, part in enumerate(zip(*parts, strict=True)))
    n = x.shape[-1]
    rows = x.reshape(-1, n)
    if residual is not None:
        rows = round_to(widen(rows) + widen(residual.reshape(-1, n)), residual.dtype)
    values = widen(rows)
    rstd = rstd_of(row_sum(values, values), eps, n)
    xhat, scale = values * rstd[:, None], scale_of(weight, weight_offset, n)
    y = xhat * scale
    if bias is not None:
        y = fma(xhat, *(np.broadcast_to(v, xhat.shape) for v in (scale, widen(bias))))
    y = round_to(y, x.dtype).reshape(x.shape)
    rstd = round_to(rstd, np.float32).reshape(x.shape[:-1])
    if out is not None:
        out[...] = y
        y = out
    return (y, rstd) if residual is None else (y, rstd, rows.reshape(x.shape))


def sum_over_rows(a, b, start):
    """sum_m a[m] b[m]: chains of 16 rows from +0; 4 chains added from +0 to a group, 4 groups to a block; blocks added
    to `start`; all ascending."""
    rows, n = a.shape
    for first in range(0, rows, DWEIGHT_BLOCK_ROWS):
        block = np.zeros(n, np.float32)
        for middle in range(first, min(first + DWEIGHT_BLOCK_ROWS, rows), DWEIGHT_GROUP_ROWS):
            group = np.zeros(n, np.float32)
            for head in range(middle, min(middle + DWEIGHT_GROUP_ROWS, rows), DWEIGHT_CHAIN_ROWS):
                p = np.zeros(n, np.float32)
                for row in range(head, min(head + DWEIGHT_CHAIN_ROWS, rows)):
                    p = fma(a[row], b[row], p)
                group = group + p
            block = block + group
        start = start + block
    return start


@quiet
def rmsnorm_backward(
    dy,
    x,
    weight,
    rstd,
    *,
    weight_offset=0.0,
    has_bias=False,
    dresidual=None,
    out=None,
    dweight=None,
    dweight_dtype=None,
    accumulate=False,
    block_sums=False,
):
    if (heads := heads_of(weight)) is not None:
        options = {"weight_offset": weight_offset, "has_bias": has_bias, "dweight_dtype": dweight_dtype}
        options["block_sums"] = block_sums
        each = [(*of_head(h, dy, x, weight), rstd[..., h], *of_head(h, dresidual)) for h in range(heads)]
        parts = [rmsnorm_backward(*operands, dresidual=added, **options) for *operands, added in each]
        return tuple(np.stack(part, int(block_sums) if i else -2) for i, part in enumerate(zip(*parts, strict=True)))
    n = x.shape[-1]
    values, dvalues, r = widen(x.reshape(-1, n)), widen(dy.reshape(-1, n)), rstd.reshape(-1, 1)
    xhat = values * r
    g = dvalues * scale_of(weight, weight_offset, n)
    mean = (row_sum(g, xhat) / np.float32(n))[:, None]
    t = fma(-xhat, np.broadcast_to(mean, g.shape), g)
    r = np.broadcast_to(r, t.shape)
    dx = r * t if dresidual is None else fma(r, t, widen(dresidual.reshape(-1, n)))
    dx = round_to(dx, x.dtype).reshape(x.shape)
    if out is not None:
        out[...] = dx
        dx = out
    sums = ()
    if block_sums:  # each block of rows as if there were no other
        blocks = [slice(i, i + DWEIGHT_BLOCK_ROWS) for i in range(0, len(dvalues), DWEIGHT_BLOCK_ROWS)]

        def of_blocks(second):
            each = [sum_over_rows(dvalues[rows], second[rows], np.zeros(n, np.float32)) for rows in blocks]
            return round_to(np.array(each, np.float32).reshape(-1, n), np.float32)

        sums = (of_blocks(np.ones_like(dvalues)),) if has_bias else ()
        return dx, None if weight is None else of_blocks(xhat), *sums
    if has_bias:  # dy times 1 is dy, and so is each step of its chain that of a sum
        total = sum_over_rows(dvalues, np.ones_like(dvalues), np.zeros(n, np.float32))
        sums = (round_to(total, dweight_dtype or (x if weight is None else weight).dtype),)
    if weight is None:
        return dx, None, *sums
    total = sum_over_rows(dvalues, xhat, dweight.copy() if accumulate else np.zeros(n, np.float32))
    result = round_to(total, dweight.dtype if dweight is not None else dweight_dtype or weight.dtype)
    if dweight is not None:
        dweight[...] = result
        result = dweight
    return dx, result, *sums


# ---- LayerNorm -----------------------------------------------------------------------------------------------------


@quiet
def layernorm(x, weight=None, bias=None, *, eps, weight_offset=0.0, residual=None, out=None):
    n = x.shape[-1]
    rows = x.reshape(-1, n)
    if residual is not None:
        rows = round_to(widen(rows) + widen(residual.reshape(-1, n)), x.dtype)
    values = widen(rows)
    mean = row_sum(values, np.ones_like(values)) / np.float32(n)
    d = values - mean[:, None]
    rstd = rstd_of(row_sum(d, d), eps, n)
    xhat, scale = d * rstd[:, None], scale_of(weight, weight_offset, n)
    y = xhat * scale
    if bias is not None:
        y = fma(xhat, *(np.broadcast_to(v, xhat.shape) for v in (scale, widen(bias))))
    y = round_to(y, x.dtype).reshape(x.shape)
    mean, rstd = (round_to(v, np.float32).reshape(x.shape[:-1]) for v in (mean, rstd))
    if out is not None:
        out[...] = y
        y = out
    return (y, mean, rstd) if residual is None else (y, mean, rstd, rows.reshape(x.shape))


@quiet
def layernorm_backward(
    dy,
    x,
    weight,
    mean,
    rstd,
    *,
    weight_offset=0.0,
    has_bias=True,
    dresidual=None,
    out=None,
    dweight=None,
    dbias=None,
    dweight_dtype=None,
    accumulate=False,
):
    n = x.shape[-1]
    values, dvalues, r = widen(x.reshape(-1, n)), widen(dy.reshape(-1, n)), rstd.reshape(-1, 1)
    xhat = (values - mean.reshape(-1, 1)) * r
    g = dvalues * scale_of(weight, weight_offset, n)
    a = (row_sum(g, np.ones_like(g)) / np.float32(n))[:, None]
    c = (row_sum(g, xhat) / np.float32(n))[:, None]
    t = fma(-xhat, np.broadcast_to(c, g.shape), g) - a
    r = np.broadcast_to(r, t.shape)
    dx = r * t if dresidual is None else fma(r, t, widen(dresidual.reshape(-1, n)))
    dx = round_to(dx, x.dtype).reshape(x.shape)
    if out is not None:
        out[...] = dx
        dx = out

    def over_rows(second, into, made):
        if into is None and (not made or accumulate):
            return None
        total = sum_over_rows(dvalues, second, into.copy() if accumulate else np.zeros(n, np.float32))
        result = round_to(total, into.dtype if into is not None else dweight_dtype or weight.dtype)
        if into is not None:
            into[...] = result
            result = into
        return result

    made = weight is not None
    return dx, over_rows(xhat, dweight, made), over_rows(np.ones_like(dvalues), dbias, made and has_bias)


# ---- Softmax -------------------------------------------------------------------------------------------------------

LN2_HIGH, LN2_LOW = np.float32(float.fromhex("0x1.62e4p-1")), np.float32(float.fromhex("0x1.7f7d1cp-20"))
EXP = ["0x1.6a4d14p-10", "0x1.12398ap-7", "0x1.5558b0p-5", "0x1.555492p-3", "0x1.fffffcp-2"]
LOG = ["0x1.14733ep-4", "-0x1.de01dcp-4", "0x1.e6c00ap-4", "-0x1.fc28cap-4", "0x1.233ba2p-3", "-0x1.555c44p-3"]
LOG += ["0x1.99a476p-3", "-0x1.000006p-2", "0x1.555548p-2"]


def polynomial(coefficients, x):
    """The highest power first, one fma a power."""
    total = np.full_like(x, float.fromhex(coefficients[0]))
    for text in coefficients[1:]:
        total = fma(total, x, np.full_like(x, float.fromhex(text)))
    return total


@quiet
def exp(x):
    clamped = np.where(x < -104, np.float32(-104), np.where(x > 89, np.float32(89), x))
    shift = np.full_like(x, 1.5 * 2**23)
    shifted = fma(clamped, np.full_like(x, float.fromhex("0x1.715476p+0")), shift)
    n = shifted - shift
    high = fma(-n, np.full_like(x, LN2_HIGH), clamped)
    r = fma(-n, np.full_like(x, LN2_LOW), high)
    low = fma(-n, np.full_like(x, LN2_LOW), high - r)
    e = fma(r * r, polynomial(EXP, r), low) + r + np.float32(1)
    k = np.where(np.isnan(n), np.float32(0), n).astype(np.int32)
    two = np.ones_like(x)
    return e * np.ldexp(two, k >> 1) * np.ldexp(two, k - (k >> 1))


@quiet
def log(x):
    """For x from 1 to the largest number, which is all that a sum of exponentials can be."""
    mantissa, k = np.frexp(x)  # [1/2, 1)
    small = mantissa < np.float32(2**-0.5)
    mantissa, k = np.where(small, mantissa * np.float32(2), mantissa), (k - small).astype(np.float32)
    f = mantissa - np.float32(1)
    square = f * f
    low = fma(k, np.full_like(x, LN2_LOW), square * f * polynomial(LOG, f))
    low = fma(square, np.full_like(x, -0.5), low) + f
    return fma(k, np.full_like(x, LN2_HIGH), low)


@quiet
def shifted_rows(x):
    """x - max(x) row by row, and the sums of its exponentials."""
    x = widen(x)
    largest = np.fmax.reduce(x, axis=-1, initial=-np.inf).astype(np.float32) + np.float32(0)
    shifted = x - largest[..., None]
    e = exp(shifted)
    return (
        shifted,
        e,
        row_sum(e.reshape(-1, x.shape[-1]), np.ones_like(e).reshape(-1, x.shape[-1])).reshape(largest.shape),
    )


@quiet
def softmax(x):
    _, e, total = shifted_rows(x)
    return round_to(e / total[..., None], x.dtype)


@quiet
def log_softmax(x):
    shifted, _, total = shifted_rows(x)
    return round_to(shifted - log(total)[..., None], x.dtype)


@quiet
def log_prob(x, index):
    """index: -1 and the like ask for no column."""
    shifted, _, total = shifted_rows(x)
    inside = (index >= 0) & (index < x.shape[-1])
    picked = np.take_along_axis(shifted, np.where(inside, index, 0)[..., None], axis=-1)[..., 0]
    return round_to(np.where(inside, picked - log(total), np.float32(np.nan)), FLOAT32)


@quiet
def log_prob_backward(dlog_prob, x, index):
    _, e, total = shifted_rows(x)
    here = np.arange(x.shape[-1]) == index[..., None]
    gradient = np.broadcast_to(dlog_prob[..., None], x.shape)
    dx = fma(-(e / total[..., None]), gradient, np.where(here, gradient, np.float32(0)))
    inside = (index >= 0) & (index < x.shape[-1])
    return round_to(np.where(inside[..., None], dx, np.float32(0)), x.dtype)


@quiet
def softmax_backward(dy, y, log=False):
    first, second = widen(dy), widen(y)
    n = dy.shape[-1]
    ones = np.ones_like(first)
    c = row_sum(first.reshape(-1, n), (ones if log else second).reshape(-1, n)).reshape(dy.shape[:-1])[..., None]
    dx = fma(-exp(second), np.broadcast_to(c, first.shape), first) if log else second * (first - c)
    return round_to(dx, dy.dtype)


# ---- Fold ----------------------------------------------------------------------------------------------------------


@quiet
def fold(parts, *, bias=None, out=None, out_dtype=FLOAT32, order="ordered", accumulate=False):
    """parts: an array [S, ...] or a list of S."""
    parts = [np.asarray(part, FLOAT32) for part in parts]
    total = out.copy() if accumulate else np.zeros(parts[0].shape, FLOAT32)
    if order == "tree":
        while len(parts) > 1:
            pairs = zip(parts[0::2], parts[1::2])
            parts = [first + second for first, second in pairs] + parts[len(parts) // 2 * 2 :]
    for part in parts:
        total = total + part
    if bias is not None:
        total = total + widen(bias)
    return round_to(total, FLOAT32 if accumulate else np.dtype(out_dtype)).reshape(parts[0].shape)
