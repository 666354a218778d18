"""The contract of fp8 (NUMERICS.md, "Scaled GEMM" and "Quantisation") as plain NumPy, beside reference.py.

Nothing here shares code with the library: numbers are decoded by ml_dtypes, steps are exact integers in float64.
"""

import ml_dtypes
import numpy as np

import reference
from reference import FLOAT32, fma, groups_of, quiet, round_to, widen

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
GROUP, FINE, STEP = 128, 32, 32  # FINE: of scales, where chunks are of so many
LEAST_EXPONENT = {E4M3: -6, E5M2: -14}
LARGEST = {E4M3: np.float32(448), E5M2: np.float32(57344)}
NONE = -(1 << 20)  # the exponent of what does not take part


def exponents(x, least):
    """max(floor(log2 |x|), least) of float64; NONE for zeros and what is not finite."""
    exponent = np.maximum(np.frexp(x)[1] - 1, least)
    return np.where((x == 0) | ~np.isfinite(x), NONE, exponent)


@quiet
def step_sm90(a, b, c):
    """D for a [M, 32], b [32, N] of fp8 and c [M, N] of float32."""
    va, vb = a.astype(np.float64), b.astype(np.float64)
    products = va[:, :, None] * vb[None, :, :]
    e = exponents(va, LEAST_EXPONENT[a.dtype])[:, :, None] + exponents(vb, LEAST_EXPONENT[b.dtype])[None, :, :]
    wide = c.astype(np.float64)
    top = np.maximum(np.where(products == 0, NONE, e).max(axis=1), exponents(wide, -126))
    top = np.maximum(top, -126)
    q = np.ldexp(1.0, top - 13)
    total = np.trunc(wide / q) + np.trunc(np.where(np.isfinite(products), products, 0) / q[:, None, :]).sum(axis=1)
    total = np.where(np.isfinite(wide), total, 0)
    d = total * q
    last = np.ldexp(1.0, np.maximum(np.frexp(d)[1] - 1, -126) - 13)
    d = np.trunc(d / last) * last + 0.0
    special = np.where(np.isfinite(products), 0, products).sum(axis=1) + np.where(np.isfinite(wide), 0, wide)
    return np.where(special == 0, d, special).astype(np.float32)


@quiet
def step_ieee(a, b, c):
    """The same for fmaf over one k: the product is exact in float32."""
    return fma(np.broadcast_to(a.astype(np.float32), c.shape), np.broadcast_to(b.astype(np.float32), c.shape), c)


def chain(a, b, c, arithmetic):
    length = STEP if arithmetic == "sm90" else 1
    for k in range(0, a.shape[1], length):
        a_part, b_part = a[:, k : k + length], b[k : k + length]
        short = length - a_part.shape[1]
        if short:
            a_part = np.concatenate([a_part, np.zeros((len(a), short), a.dtype)], axis=1)
            b_part = np.concatenate([b_part, np.zeros((short, b.shape[1]), b.dtype)])
        c = (step_sm90 if arithmetic == "sm90" else step_ieee)(a_part, b_part, c)
    return c


def groups(extent, group=GROUP):
    return -(-extent // group)


def spread(scale, m, chunks):
    """A scale as [m, chunks of k] of float32, and whether it varies along k."""
    if scale is None or scale.ndim == 0:
        value = np.float32(1) if scale is None else scale.astype(np.float32)
        return np.full((m, max(chunks, 1)), value, np.float32), False
    wide = scale.astype(np.float32)
    along_k = scale.shape[1] == chunks
    if scale.shape[0] != m:
        wide = np.repeat(wide, GROUP, axis=0)[:m]
    return (wide if along_k else np.repeat(wide, max(chunks, 1), axis=1)), along_k


@quiet
def matrix(a, b, a_scale, b_scale, bias, start, arithmetic, k_chunk):
    (m, k), n = a.shape, b.shape[1]
    group = FINE if k_chunk == FINE else GROUP
    sa, a_along = spread(a_scale, m, groups(k, group))
    sb, b_along = spread(None if b_scale is None else b_scale.T, n, groups(k, group))
    along_k = a_along or b_along
    begin = np.zeros((m, n), np.float32) if start is None else start
    if k_chunk == 0 and not along_k:
        total = chain(a, b, begin, arithmetic)
    else:
        total, length = begin, group if along_k else k_chunk
        for c, first in enumerate(range(0, k, length)):
            part = chain(
                a[:, first : first + length], b[first : first + length], np.zeros((m, n), np.float32), arithmetic
            )
            total = fma(sa[:, c, None] * sb[None, :, c], part, total) if along_k else total + part
    if not along_k:
        total = (total * sb[None, :, 0]) * sa[:, 0, None]
    return total if bias is None else total + widen(bias)


def scaled_gemm(
    a, b, *, a_scale, b_scale, bias=None, out=None, out_dtype=None, accumulate=False, arithmetic="ieee", k_chunk=None,
    initial=None,
):  # fmt: skip
    k_chunk = GROUP if k_chunk is None else k_chunk
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    dtype = out.dtype if out is not None else np.dtype(out_dtype or ml_dtypes.bfloat16)
    result = np.empty(shape, dtype)

    def at(x, index):
        if x is None or x.ndim < 2 or not batch:
            return x
        return np.broadcast_to(x, (*batch, *x.shape[-2:]))[index]

    for index in np.ndindex(*batch):
        total = matrix(
            at(a, index), at(b, index), at(a_scale, index), at(b_scale, index), at(bias, index),
            out[index].copy() if accumulate else None if initial is None else initial[index], arithmetic, k_chunk,
        )  # fmt: skip
        result[index] = round_to(total, dtype)
    if out is None:
        return result
    out[...] = result
    return out


def of_group(x, g):
    """The scale of group g, of one that is for all groups too."""
    return x if x is None or x.ndim < 3 else x[g if len(x) > 1 else 0]


def scaled_grouped_gemm(
    a, b, end, start=None, *, a_scale, b_scale, bias=None, out=None, out_dtype=None, accumulate=False,
    initial=None, gemm=scaled_gemm, **options,
):  # fmt: skip
    """scaled_gemm of each group. Rows of no group keep what out held; without out they are NaN."""
    shape = (len(a), b.shape[-1])
    result = np.full(shape, np.nan, np.dtype(out_dtype or ml_dtypes.bfloat16)) if out is None else out
    for g, (first, last) in enumerate(groups_of(end, start, len(a))):
        part = slice(first, last)
        given = {"out": result[part].copy(), "accumulate": True} if accumulate else {"out_dtype": result.dtype}
        given |= {"a_scale": a_scale if a_scale is None or a_scale.ndim == 0 else a_scale[part]}
        given |= {"b_scale": of_group(b_scale, g), "bias": None if bias is None else bias[g]}
        given |= {} if initial is None else {"initial": initial[part]}
        result[part] = gemm(a[part], b[g], **given, **options)
    return result


# ---- Quantisation --------------------------------------------------------------------------------------------------


@quiet
def scale_of(amax, dtype, power_of_two):
    s = np.where(np.isnan(amax), amax, np.maximum(amax, np.float32(1e-10))).astype(np.float32) / LARGEST[dtype]
    if not power_of_two:
        return round_to(s, FLOAT32)
    mantissa, exponent = np.frexp(s.astype(np.float64))
    above = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    return round_to(np.where(np.isfinite(s), above, np.nan).astype(np.float32), FLOAT32)


@quiet
def quantize(
    x, *, granularity="row", dtype=E4M3, scale_dtype=FLOAT32, power_of_two=False, transposed=False, scale=None
):
    m, k = x.shape[-2:]
    wide, dtype, scale_dtype = widen(x), np.dtype(dtype), np.dtype(scale_dtype)
    down = {"row": 1, "group": 1, "block": GROUP, "tensor": m}[granularity]
    across = {"row": k, "group": GROUP, "block": GROUP, "tensor": k}[granularity]
    if scale is None:
        amax = np.zeros((*x.shape[:-2], -(-m // down), -(-k // across)), np.float32)
        for i in range(amax.shape[-2]):
            for j in range(amax.shape[-1]):
                part = np.abs(wide[..., i * down : (i + 1) * down, j * across : (j + 1) * across])
                amax[..., i, j] = part.max(axis=(-2, -1))  # NumPy's maximum of NaN is NaN
        if granularity == "tensor":
            amax = amax.max()
        scale = scale_of(amax, dtype, power_of_two or scale_dtype == E8M0).astype(scale_dtype)
    s = scale.astype(np.float32)
    if granularity != "tensor":
        s = np.repeat(np.repeat(s, down, axis=-2)[..., :m, :], across, axis=-1)[..., :k]
    ratio = wide / s
    clamped = np.where(np.isnan(ratio), ratio, np.clip(ratio, -LARGEST[dtype], LARGEST[dtype]))
    q = np.where(np.isnan(ratio), np.uint8(0x7F), clamped.astype(dtype).view(np.uint8)).view(dtype)
    if not transposed:
        return q, scale
    options = {"granularity": granularity, "dtype": dtype, "scale_dtype": scale_dtype, "power_of_two": power_of_two}
    return q, scale, *quantize(np.ascontiguousarray(x.swapaxes(-1, -2)), **options)


def rmsnorm_quantize(
    x, weight=None, *, eps, weight_offset=0.0, residual=None, granularity="row", scale=None, **options
):
    """The two calls: the norm, whose y is of x's type, and its q."""
    y, _, *total = reference.rmsnorm(x, weight, eps=eps, weight_offset=weight_offset, residual=residual)
    granularity = granularity if scale is None else "tensor"
    return *quantize(y, granularity=granularity, scale=scale, **options), *total
