"""Attention (native/NUMERICS.md, "Attention") as plain NumPy: slow, and written to be read beside the formulas.

`attention`, `attention_varlen` and `attention_paged` have the signatures of pydet's own functions.
"""

import numpy as np

import reference
from reference import FLOAT32, chain, exp, flush, fma, quiet, round_to, widen

f32 = np.float32
LOG2E, LN2 = f32(float.fromhex("0x1.715476p+0")), f32(float.fromhex("0x1.62e430p-1"))


def full(value, like):
    return np.full_like(like, value)


# ---- exp2 and tanh -------------------------------------------------------------------------------------------------


def table(text):
    return np.array(text.split(), np.int64)


START = table("""
    33554435 33919818 34289182 34662565 35040018 35421577 35807292 36197209 36591372 36989825 37392616 37799797
    38211409 38627504 39048131 39473337 39903173 40337690 40776937 41220970 41669836 42123592 42582286 43045977
    43514717 43988561 44467565 44951786 45441278 45936101 46436314 46941971 47453135 47969867 48492225 49020269
    49554065 50093674 50639159 51190582 51748011 52311510 52881146 53456983 54039091 54627538 55222393 55823725
    56431607 57046106 57667297 58295254 58930048 59571754 60220447 60876205 61539104 62209220 62886634 63571424
    64263672 64963458 65670863 66385972
""")
SLOPE = table("""
    22713 22960 23210 23463 23718 23977 24238 24502 24768 25038 25311 25586 25865 26147 26431 26719 27010 27304
    27602 27902 28206 28513 28824 29138 29455 29776 30100 30428 30759 31094 31432 31775 32121 32471 32824 33182
    33543 33908 34277 34651 35028 35409 35795 36185 36579 36977 37380 37787 38198 38614 39035 39460 39889 40324
    40763 41207 41655 42109 42568 43031 43500 43973 44452 44936
""")
CURVE = table("""
    494 501 506 511 518 521 527 532 541 546 551 559 564 568 577 583 589 596 600 609 615 622 627 633 641 647 655
    661 670 677 686 691 699 705 715 721 730 739 748 753 763 773 779 787 796 806 813 822 833 842 849 858 870 877
    887 896 909 917 925 938 946 959 969 980
""")


def ex2(x):
    """Hopper's ex2.approx.ftz.f32: |x| in units of 2^-23, cut; a quadratic in the low 17 bits of its fraction."""
    size = np.abs(np.where(np.isnan(x), f32(0), x).astype(np.float64))
    cut = np.trunc(np.minimum(size, 256.0) * 2.0**23).astype(np.int64)
    cut = np.where(x < 0, np.where(cut & 0x7FFFFF, ~cut, -cut), cut)
    fraction = cut & 0x7FFFFF
    row, d = fraction >> 17, fraction & 0x1FFFF
    square = np.zeros_like(d)
    for bit in range(10, 17):  # the squarer lacks its columns below 2^19
        square += np.where(d >> bit & 1, ((d & ((1 << bit) - 1)) >> (18 - bit)) + (1 << (2 * bit - 19)), 0)
    significand = ((START[row] << 13) + 6114 + SLOPE[row] * d + CURVE[row] * square) >> 15
    exponent = (cut >> 23) + 127
    word = np.where(exponent <= 0, 0, np.where(exponent >= 255, 0x7F800000, exponent << 23 | (significand & 0x7FFFFF)))
    return np.where(np.isnan(x), f32(np.nan), word.astype(np.uint32).view(f32))


def powers(coefficients, t):
    """2^t by a polynomial in the rest of the nearest whole number; +0 below -120, as at 127 above it."""
    within = np.where(t < -120, f32(-120), np.where(t > 127, f32(127), t))
    n = (within + f32(1.5 * 2**23)) - f32(1.5 * 2**23)
    f = within - n
    p = full(coefficients[0], f)
    for coefficient in coefficients[1:]:
        p = fma(p, f, full(coefficient, f))
    two = np.ldexp(np.ones_like(f), np.where(np.isnan(n), f32(0), n).astype(np.int32))
    return np.where(t < -120, f32(0), p * two)


COARSE = [f32(float.fromhex(c)) for c in ("0x1.c2a218p-5", "0x1.f00c4ep-3", "0x1.62f5fap-1", "0x1p+0")]
FINE = [
    f32(float.fromhex(c))
    for c in (
        *("0x1.470b48p-13", "0x1.5f7276p-10", "0x1.3b270ep-7", "0x1.c6ae72p-5", "0x1.ebfbe2p-3", "0x1.62e432p-1"),
        "0x1p+0",
    )
]


def exp2_of(arithmetic, dtype):
    if arithmetic == "sm90":
        return ex2
    return lambda t: powers(FINE if dtype == FLOAT32 else COARSE, t)


TANH = [
    f32(float.fromhex(c))
    for c in ("-0x1.76ac1cp-8", "0x1.5256d8p-6", "-0x1.b84448p-5", "0x1.110768p-3", "-0x1.555534p-2")
]


def tanh(x):
    square, size = x * x, np.abs(x)
    p = full(TANH[0], x)
    for coefficient in TANH[1:]:
        p = fma(p, square, full(coefficient, x))
    near = fma(x * square, p, x)
    far = fma(full(-2, x), f32(1) / (exp(f32(2) * np.where(size > 10, f32(10), size)) + f32(1)), full(1, x))
    far = np.copysign(np.where(size > 10, f32(1), far), x)
    return np.where(size > 0.625, far, near)


def log(x):
    """Of any sum of weights: 0, where scores are so large that c max(s) errs by more than 120, has -inf."""
    ordinary = (x > 0) & (x < np.inf)
    return np.where(ordinary, reference.log(np.where(ordinary, x, f32(1))), np.where(x == 0, f32(-np.inf), x))


# ---- One head of one sequence --------------------------------------------------------------------------------------


def reference_of(m, x):
    return np.where((x > m) | np.isnan(x), x, m)


def weighed_values(p, v, allowed, o, arithmetic):
    """The chain of the second product, from o: a key that is not allowed is a zero times a zero."""
    p = np.where(allowed, p, p.dtype.type(0))
    if not len(p) or np.isfinite(widen(v)).all():
        return chain(p, v, o, arithmetic)
    rows = [chain(p[i : i + 1], np.where(allowed[i][:, None], v, v.dtype.type(0)), o[i : i + 1], arithmetic)
            for i in range(len(p))]  # fmt: skip
    return np.concatenate(rows)


def head(q, k, v, visible, scale, *, softcap=None, bias=None, sink=None, arithmetic="ieee", kv_chunk=1024):
    """(out in fp32, lse) of queries q [Q, D] over a sequence's own keys [K, D] and values [K, E]; visible [Q, K]."""
    exp2, queries, keys = exp2_of(arithmetic, q.dtype), len(q), len(k)
    block = 128 if q.shape[1] <= 128 else 64
    none = full(-np.inf, np.zeros(queries, f32))
    total_m, total_o, total_l = none, np.zeros((queries, v.shape[1]), f32), np.zeros(queries, f32)
    c = LOG2E if softcap else f32(scale) * LOG2E

    def join(m, part_m):
        """The reference of both, and what each is multiplied by."""
        both = reference_of(m, part_m)
        return both, exp2(m - both), exp2(part_m - both)

    for segment in range(0, keys, kv_chunk):
        m, o, l = none, np.zeros_like(total_o), np.zeros((queries, 8), f32)  # noqa: E741
        for first in range(segment, min(segment + kv_chunk, keys), block):
            at = slice(first, min(first + block, segment + kv_chunk, keys))
            x = chain(q, k[at].swapaxes(0, 1), np.zeros((queries, at.stop - first), f32), arithmetic)
            if softcap:
                x = f32(softcap) * tanh(x * (f32(scale) / f32(softcap)))
            if bias is not None:
                x = fma(x, full(c, x), widen(bias[:, at]) * LOG2E)
            factor = f32(1) if bias is not None else c
            allowed = visible[:, at] & (x != -np.inf)
            x = np.where(allowed, x, f32(-np.inf))
            top = np.where(np.isnan(x).any(1), f32(np.nan), np.fmax.reduce(x, 1, initial=-np.inf)).astype(f32)
            n = reference_of(m, factor * top)
            skip = n == -np.inf
            allowed &= ~skip[:, None]
            a = np.where(skip, f32(1), exp2(m - n))
            p = np.where(allowed, exp2(fma(x, full(factor, x), np.broadcast_to(-n[:, None], x.shape))), f32(0))
            m, o, l = n, o * a[:, None], l * a[:, None]  # noqa: E741
            if arithmetic == "cdna2":
                o = flush(o)
            for j in range(0, p.shape[1], 8):
                l[:, : p.shape[1] - j] += p[:, j : j + 8]
            o = weighed_values(round_to(p, q.dtype), v[at], allowed, o, arithmetic)
        l = ((l[:, 0] + l[:, 1]) + (l[:, 2] + l[:, 3])) + ((l[:, 4] + l[:, 5]) + (l[:, 6] + l[:, 7]))  # noqa: E741
        both, a, b = join(total_m, m)
        absent = m == -np.inf
        total_o = np.where(absent[:, None], total_o, total_o * a[:, None] + o * b[:, None])
        total_l = np.where(absent, total_l, total_l * a + l * b)
        total_m = np.where(absent, total_m, both)
    if sink is not None:
        x = np.full(queries, f32(sink)) * LOG2E
        both, a, b = join(total_m, x)
        absent = both == -np.inf
        total_o = np.where(absent[:, None], total_o, total_o * a[:, None])
        total_l, total_m = np.where(absent, total_l, total_l * a + b), np.where(absent, total_m, both)
    absent = total_m == -np.inf
    out = (total_o + f32(0)) * (f32(1) / total_l)[:, None]
    lse = fma(total_m, full(LN2, total_m), log(total_l))
    return np.where(absent[:, None], f32(0), out), np.where(absent, f32(-np.inf), round_to(lse, FLOAT32))


def visible_of(queries, keys, causal, window):
    """[Q, K]: query i stands at key K - Q + i."""
    ahead = np.arange(keys)[None] - (np.arange(queries)[:, None] + keys - queries)
    left, right = window or (None, None)
    seen = np.ones(ahead.shape, bool)
    if causal:
        seen &= ahead <= 0
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


# ---- Batches -------------------------------------------------------------------------------------------------------


def clamped(x, low, high):
    return min(max(int(x), low), high)


@quiet
def attention(q, k, v, *, scale=None, causal=False, window=None, softcap=None, sinks=None, allowed=None, bias=None,
              first_key=None, seqlens_k=None, arithmetic="ieee", kv_chunk=1024, return_lse=False):  # fmt: skip
    (batch, heads, queries, d), (_, groups, places, _) = q.shape, k.shape
    scale = f32(1 / np.sqrt(float(d))) if scale is None else f32(scale)
    out, lse = np.zeros((batch, heads, queries, v.shape[3]), f32), np.zeros((batch, heads, queries), f32)
    full_shape = (batch, heads, queries, places)
    allowed = None if allowed is None else np.broadcast_to(allowed, full_shape)
    bias = None if bias is None else np.broadcast_to(bias, full_shape)
    for s in range(batch):
        end = places if seqlens_k is None else clamped(seqlens_k[s], 0, places)
        own = slice(0 if first_key is None else clamped(first_key[s], 0, end), end)
        seen = visible_of(queries, end - own.start, causal, window)
        for h in range(heads):
            g = h // (heads // groups)
            out[s, h], lse[s, h] = head(
                q[s, h], k[s, g, own], v[s, g, own], seen if allowed is None else seen & allowed[s, h][:, own], scale,
                softcap=softcap, bias=None if bias is None else bias[s, h][:, own],
                sink=None if sinks is None else widen(sinks)[h], arithmetic=arithmetic, kv_chunk=kv_chunk,
            )  # fmt: skip
    out = round_to(out, q.dtype)
    return (out, lse) if return_lse else out


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse=False, **options):
    """Tokens of no sequence are NaN."""
    out, lse = np.full((*q.shape[:2], v.shape[2]), np.nan, q.dtype), np.full(q.shape[:2], np.nan, f32)
    ends = [[clamped(x, 0, len(tokens)) for x in cu] for cu, tokens in ((cu_seqlens_q, q), (cu_seqlens_k, k))]
    for s in range(len(cu_seqlens_q) - 1):
        mine, keys = (slice(end[s], max(end[s], end[s + 1])) for end in ends)
        alone = [np.swapaxes(x[at], 0, 1)[None] for x, at in ((q, mine), (k, keys), (v, keys))]
        one_out, one_lse = attention(*alone, return_lse=True, **options)
        out[mine], lse[mine] = np.swapaxes(one_out[0], 0, 1), np.swapaxes(one_lse[0], 0, 1)
    return (out, lse) if return_lse else out


def attention_paged(q, k_cache, v_cache, block_table, seqlens_k, cu_seqlens_q=None, *, return_lse=False, causal=True,
                    first_key=None, allowed=None, bias=None, **options):  # fmt: skip
    packed = cu_seqlens_q is not None
    if packed:
        out, lse = np.full((*q.shape[:2], v_cache.shape[3]), np.nan, q.dtype), np.full(q.shape[:2], np.nan, f32)
    else:
        out, lse = np.empty((*q.shape[:3], v_cache.shape[3]), q.dtype), np.empty(q.shape[:3], f32)
    for s in range(len(block_table)):
        pages = [clamped(page, 0, len(k_cache) - 1) for page in block_table[s]]
        k, v = (np.concatenate([cache[page] for page in pages]).swapaxes(0, 1)[None] for cache in (k_cache, v_cache))
        mine = slice(cu_seqlens_q[s], cu_seqlens_q[s + 1]) if packed else s
        queries = q[mine].swapaxes(0, 1) if packed else q[s]
        of_one = [None if x is None else x[s : s + 1] if len(x) > 1 else x for x in (allowed, bias)]
        one_out, one_lse = attention(
            queries[None], k, v, causal=causal, seqlens_k=seqlens_k[s : s + 1], allowed=of_one[0], bias=of_one[1],
            first_key=None if first_key is None else first_key[s : s + 1], return_lse=True, **options,
        )  # fmt: skip
        out[mine] = one_out[0].swapaxes(0, 1) if packed else one_out[0]
        lse[mine] = one_lse[0].swapaxes(0, 1) if packed else one_lse[0]
    return (out, lse) if return_lse else out


# ---- Backward ------------------------------------------------------------------------------------------------------


def row_deltas(dout, out):
    x, y, lanes = widen(dout), widen(out), np.zeros((len(dout), 8), f32)
    for e in range(0, x.shape[1], 8):
        part = lanes[:, : x.shape[1] - e]
        part[...] = fma(x[:, e : e + 8], y[:, e : e + 8], part)
    lanes = lanes[:, 0::2] + lanes[:, 1::2]
    lanes = lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0] + lanes[:, 1]


def gradients_of_scores(dout, q, k, v, out, lse, visible, scale, softcap, bias, arithmetic):
    """(which pairs are allowed, round(p), round(ds)) of one head, all [Q, K]."""
    zeros, exp2 = np.zeros((len(q), len(k)), f32), exp2_of(arithmetic, q.dtype)
    c = LOG2E if softcap else f32(scale) * LOG2E
    x, dp = chain(q, k.swapaxes(0, 1), zeros, arithmetic), chain(dout, v.swapaxes(0, 1), zeros, arithmetic)
    if softcap:
        t = tanh(x * (f32(scale) / f32(softcap)))
        x = f32(softcap) * t
    if bias is not None:
        x, c = fma(x, full(c, x), widen(bias) * LOG2E), f32(1)
    behind, delta = np.broadcast_to((lse * LOG2E)[:, None], x.shape), row_deltas(dout, out) * f32(scale)
    allowed = visible & (x != -np.inf) & (behind != -np.inf)
    p = exp2(fma(x, full(c, x), -behind))
    ds = p * fma(dp, full(scale, dp), np.broadcast_to(-delta[:, None], x.shape))
    if softcap:
        ds = ds * fma(-t, t, full(1, t))
    return (allowed, *(round_to(np.where(allowed, y, f32(0)), q.dtype) for y in (p, ds)))


def group_backward(dout, q, k, v, pairs, origin, dk, dv, arithmetic):
    """dq [heads, Q, D], dk and dv [K, ...] in fp32, of one group of heads; pairs: gradients_of_scores of each; origin:
    the first query to which causal and window leave a key."""
    (heads, queries, d), dq = q.shape, np.zeros(q.shape, f32)
    if arithmetic == "cdna2":
        dk, dv = flush(dk), flush(dv)
    for first in range(origin, queries, 128):
        at = slice(first, first + 128)
        for h in range(heads):
            allowed, p, ds = (x[at].swapaxes(0, 1) for x in pairs[h])
            dv = weighed_values(p, dout[h, at], allowed, dv, arithmetic)
            dk = weighed_values(ds, q[h, at], allowed, dk, arithmetic)
    block = 128 if d <= 128 else 64
    for h in range(heads):
        allowed, _, ds = pairs[h]
        for first in reversed(range(0, len(k), block)):
            at = slice(first, first + block)
            start = np.zeros((queries, d), f32)
            dq[h] += weighed_values(ds[:, at], k[at], allowed[:, at], start, arithmetic)
    return dq + f32(0), *(round_to(x + f32(0), FLOAT32) for x in (dk, dv))


def sum_of_sinks(dsink, sink, dout, out, lse, exp2):
    behind, delta = lse * LOG2E, row_deltas(dout, out)
    for i in np.flatnonzero(behind != -np.inf):
        w = exp2(fma(np.array([sink], f32), LOG2E[None], -behind[i : i + 1]))
        dsink = fma(-w, delta[i : i + 1], np.array([dsink], f32))[0]
    return dsink


@quiet
def attention_backward(dout, q, k, v, out, lse, *, scale=None, causal=False, window=None, softcap=None, sinks=None,
                       allowed=None, bias=None, first_key=None, seqlens_k=None, arithmetic="ieee", accumulate=False,
                       only=None, dq=None, dk=None, dv=None, dsinks=None):  # fmt: skip
    """New arrays, whatever is given; of the types of those that are given."""
    (batch, heads, queries, d), (_, groups, places, _) = q.shape, k.shape
    of_group = heads // groups
    scale = f32(1 / np.sqrt(float(d))) if scale is None else f32(scale)
    dq_of = np.zeros(q.shape, f32)
    dk_of, dv_of = (given.copy() if accumulate and only != "q" else np.zeros(x.shape, f32)
                    for given, x in ((dk, k), (dv, v)))  # fmt: skip
    full_shape = (batch, heads, queries, places)
    allowed = None if allowed is None else np.broadcast_to(allowed, full_shape)
    bias = None if bias is None else np.broadcast_to(bias, full_shape)
    sums = dsinks.copy() if accumulate and sinks is not None else np.zeros(heads, f32)
    for s in range(batch):
        end = places if seqlens_k is None else clamped(seqlens_k[s], 0, places)
        own = slice(0 if first_key is None else clamped(first_key[s], 0, end), end)
        seen = visible_of(queries, end - own.start, causal, window)
        origin = int(seen.any(1).argmax()) if seen.any() else queries
        for g in range(groups):
            mine = slice(g * of_group, (g + 1) * of_group)
            pairs = [
                gradients_of_scores(
                    dout[s, h], q[s, h], k[s, g, own], v[s, g, own], out[s, h], lse[s, h],
                    seen if allowed is None else seen & allowed[s, h][:, own], scale, softcap,
                    None if bias is None else bias[s, h][:, own], arithmetic,
                )
                for h in range(heads)[mine]
            ]  # fmt: skip
            dq_of[s, mine], dk_of[s, g, own], dv_of[s, g, own] = group_backward(
                dout[s, mine], q[s, mine], k[s, g, own], v[s, g, own], pairs, origin,
                dk_of[s, g, own], dv_of[s, g, own], arithmetic,
            )  # fmt: skip
        for h in range(heads if sinks is not None else 0):
            sink = widen(sinks)[h]
            sums[h] = sum_of_sinks(sums[h], sink, dout[s, h], out[s, h], lse[s, h], exp2_of(arithmetic, q.dtype))
    typed = lambda x, given, like: round_to(x, like.dtype if given is None else given.dtype)
    of_keys = (dk_of, dv_of) if accumulate else (typed(dk_of, dk, k), typed(dv_of, dv, v))  # what is kept has its bits
    found = typed(dq_of, dq, q), *of_keys
    found = (None, *found[1:]) if only == "kv" else (found[0], None, None) if only == "q" else found
    return found if sinks is None else (*found, typed(sums + f32(0), dsinks, sinks))


def attention_varlen_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *, sinks=None, accumulate=False,
                              only=None, dq=None, dk=None, dv=None, dsinks=None, **options):  # fmt: skip
    """Tokens of no sequence are NaN, or what dk and dv hold under accumulate."""
    all_dq, all_dk, all_dv = (np.full(x.shape, np.nan, f32) for x in (q, k, v))
    if accumulate:
        all_dk, all_dv = dk.copy(), dv.copy()
    sums = dsinks if accumulate else np.zeros(q.shape[1], f32)
    ends = [[clamped(x, 0, len(tokens)) for x in cu] for cu, tokens in ((cu_seqlens_q, q), (cu_seqlens_k, k))]
    turn = lambda x: np.swapaxes(x, 0, 1)[None]
    for s in range(len(cu_seqlens_q) - 1):
        mine, keys = (slice(end[s], max(end[s], end[s + 1])) for end in ends)
        rows = [turn(x[at]) for x, at in ((dout, mine), (q, mine), (k, keys), (v, keys), (out, mine), (lse, mine))]
        starts = [turn(x[keys] if accumulate else np.zeros_like(x[keys])) for x in (all_dk, all_dv)]
        one_dq, one_dk, one_dv, *one_sums = attention_backward(
            *rows, sinks=sinks, accumulate=True, dq=np.zeros(0, f32), dk=starts[0], dv=starts[1], dsinks=sums, **options
        )
        all_dq[mine], all_dk[keys], all_dv[keys] = (np.swapaxes(x[0], 0, 1) for x in (one_dq, one_dk, one_dv))
        sums = one_sums[0] if one_sums else sums
    typed = lambda x, given, like: round_to(x, like.dtype if given is None else given.dtype)
    of_keys = (all_dk, all_dv) if accumulate else (typed(all_dk, dk, k), typed(all_dv, dv, v))
    found = [typed(all_dq, dq, q), *of_keys]
    found = (None, *found[1:]) if only == "kv" else (found[0], None, None) if only == "q" else tuple(found)
    return found if sinks is None else (*found, typed(sums + f32(0), dsinks, sinks))
