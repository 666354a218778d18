"""Scans as NUMERICS.md ("Scans") writes them: token after token, state after state."""

import itertools

import numpy as np

from reference import exp, fma, quiet, round_to, widen

LANES, NEIGHBOURS = 8, 4


def total(terms):
    """The sum over the first axis of terms (n, previous sum) -> sum: in lanes, which are joined."""
    count, step = terms
    lanes = []
    for lane in range(LANES):
        sums = np.float32(0)
        for n in range(count):
            if n // NEIGHBOURS % LANES == lane:
                sums = step(n, sums)
        lanes.append(sums)
    for h in (4, 2, 1):
        lanes[:h] = [lanes[e] + lanes[e + h] for e in range(h)]
    return lanes[0]


def ranges(batch, tokens, cu_seqlens):
    if cu_seqlens is None:
        return [(i, 0, tokens) for i in range(batch)]
    return [(0, int(a), int(b)) for a, b in itertools.pairwise(cu_seqlens)]


@quiet
def selective_scan(x, dt, a, b, c, d=None, *, initial=None, cu_seqlens=None, return_final=False):
    batch, tokens, heads, width = x.shape
    groups, states = b.shape[2:]
    group = np.arange(heads) // (heads // groups)
    wide = {name: widen(np.asarray(v)) for name, v in {"x": x, "dt": dt, "b": b, "c": c}.items()}
    y, parts = np.zeros(x.shape, np.float32), ranges(batch, tokens, cu_seqlens)
    final = np.zeros((len(parts), heads, width, states), np.float32)
    if initial is not None:
        final[:] = initial
    decays = a if a.ndim == 2 else np.repeat(a[:, None], states, 1)
    for s, (i, begin, end) in enumerate(parts):
        state = final[s]  # [heads, width, states]
        for t in range(begin, end):
            u = wide["dt"][i, t][:, None] * wide["x"][i, t]
            decay = exp(wide["dt"][i, t][:, None] * decays)
            of_b, of_c = (np.broadcast_to(wide[name][i, t][group][:, None], state.shape) for name in "bc")
            state[:] = fma(np.broadcast_to(u[..., None], state.shape), of_b, decay[:, None] * state)
            step = lambda n, sums, state=state, of_c=of_c: fma(
                of_c[..., n], state[..., n], np.broadcast_to(sums, state.shape[:2])
            )
            out = total((states, step)) + np.zeros(u.shape, np.float32)
            y[i, t] = out if d is None else fma(np.broadcast_to(d[:, None], u.shape), wide["x"][i, t], out)
    return round_to(y, x.dtype), round_to(final, np.float32) if return_final else None


@quiet
def gated_delta(q, k, v, g, beta, *, initial=None, cu_seqlens=None, return_final=False):
    batch, tokens, heads, width = v.shape
    groups, keys = k.shape[2:]
    group = np.arange(heads) // (heads // groups)
    q, k, wide, g, beta = (widen(np.asarray(x)) for x in (q, k, v, g, beta))
    o, parts = np.zeros(v.shape, np.float32), ranges(batch, tokens, cu_seqlens)
    final = np.zeros((len(parts), heads, keys, width), np.float32)
    if initial is not None:
        final[:] = initial
    for s, (i, begin, end) in enumerate(parts):
        state = final[s]  # [heads, keys, width]
        for t in range(begin, end):
            state[:] = exp(g[i, t])[:, None, None] * state
            of_k, of_q = (np.broadcast_to(x[i, t][group][..., None], state.shape) for x in (k, q))
            dot = lambda row, state=state: total(
                (keys, lambda n, sums: fma(row[:, n], state[:, n], np.broadcast_to(sums, state[:, 0].shape)))
            )
            w = beta[i, t][:, None] * (wide[i, t] - dot(of_k))
            state[:] = fma(of_k, np.broadcast_to(w[:, None], state.shape), state)
            o[i, t] = dot(of_q)
    return round_to(o, v.dtype), round_to(final, np.float32) if return_final else None


@quiet
def causal_conv1d(x, w, bias=None, *, initial=None, cu_seqlens=None):
    batch, tokens, channels = x.shape
    taps, wide, of_tap = w.shape[1], widen(np.asarray(x)), widen(np.asarray(w))
    y = np.zeros(x.shape, np.float32)
    for s, (i, begin, end) in enumerate(ranges(batch, tokens, cu_seqlens)):
        before = np.zeros((taps - 1, channels), np.float32) if initial is None else widen(np.asarray(initial)[s])
        rows = np.concatenate([before, wide[i, begin:end]])
        sums = np.zeros((end - begin, channels), np.float32)
        for j in range(taps):
            sums = fma(np.broadcast_to(of_tap[:, j], sums.shape), rows[j : j + end - begin], sums)
        y[i, begin:end] = sums if bias is None else sums + widen(np.asarray(bias))
    return round_to(y, x.dtype)


# ---- Gradients -------------------------------------------------------------------------------------------------------

BLOCK = 32  # columns


def columns(terms, width):
    """The sum over the columns of terms [columns, n], those of a group or of heads of `width` each by itself."""
    found = np.zeros(terms.shape[1], np.float32)
    for first in range(0, len(terms), width):
        for begin in range(first, first + width, BLOCK):
            block = np.zeros((BLOCK, terms.shape[1]), np.float32)
            of = terms[begin : min(begin + BLOCK, first + width)]
            block[: len(of)] = of
            for h in (16, 8, 4, 2, 1):
                block[:h] = block[:h] + block[h : 2 * h]
            found = found + block[0]
    return found


def of_head(terms, first):
    """The sum of a head's numbers, of which the first one is column `first` of its group."""
    found = np.float32(0)
    for begin in range(first // BLOCK * BLOCK, first + len(terms), BLOCK):
        part = np.float32(0)
        for c in range(max(begin, first), min(begin + BLOCK, first + len(terms))):
            part = part + terms[c - first]
        found = found + part
    return found


def dots(u, v):
    """dot over the last axis of two arrays [..., n]."""
    u, v = np.broadcast_arrays(u, v)
    return total((u.shape[-1], lambda n, s: fma(u[..., n], v[..., n], np.broadcast_to(s, u.shape[:-1])))) + np.zeros(
        u.shape[:-1], np.float32
    )


@quiet
def selective_scan_backward(
    dy, x, dt, a, b, c, d=None, *, initial=None, cu_seqlens=None, dfinal=None, return_initial=False
):
    batch, tokens, heads, width = x.shape
    groups, states = b.shape[2:]
    each, of_group = a.ndim == 2, heads // groups
    types = [y.dtype for y in (x, dt, b, c)]
    dy, x, dt, b, c = (widen(np.asarray(y)) for y in (dy, x, dt, b, c))
    rates = a if each else np.repeat(a[:, None], states, 1)
    parts = ranges(batch, tokens, cu_seqlens)
    dx, ddt, db, dc = (np.zeros(y.shape, np.float32) for y in (x, dt, b, c))
    da, dd = np.zeros((len(parts), *a.shape), np.float32), np.zeros((len(parts), heads), np.float32)
    dinitial = np.zeros((len(parts), heads, width, states), np.float32)
    for s, (i, begin, end) in enumerate(parts):
        state = np.zeros((heads, width, states), np.float32) if initial is None else np.array(initial[s], np.float32)
        gradient = np.zeros_like(state) if dfinal is None else np.array(dfinal[s], np.float32)
        own = np.zeros_like(state)  # of each column, with a decay for each state
        seen = []
        group = np.arange(heads) // of_group
        for t in range(begin, end):
            factor = np.broadcast_to(exp(dt[i, t][:, None] * rates)[:, None], state.shape)
            of_b, of_c = (np.broadcast_to(y[i, t][group][:, None], state.shape) for y in (b, c))
            u = dt[i, t][:, None] * x[i, t]
            old = factor * state
            state = fma(np.broadcast_to(u[..., None], state.shape), of_b, old)
            seen.append((factor, of_b, of_c, u, old, state))
        for t in reversed(range(begin, end)):
            factor, of_b, of_c, u, old, state = seen[t - begin]
            gradient = fma(np.broadcast_to(dy[i, t][..., None], state.shape), of_c, gradient)
            v, e = dots(of_b, gradient), gradient * old
            decay = dots(np.broadcast_to(rates[:, None], e.shape), e) if each else dots(gradient, old)
            step = np.broadcast_to(dt[i, t][:, None], v.shape)
            dx[i, t] = step * v if d is None else fma(step, v, d[:, None] * dy[i, t])
            for g in range(groups):
                of = slice(g * of_group, (g + 1) * of_group)
                db[i, t, g] = columns((u[..., None] * gradient)[of].reshape(-1, states), of_group * width)
                dc[i, t, g] = columns((dy[i, t][..., None] * state)[of].reshape(-1, states), of_group * width)
            of_u, of_decay, of_x = (
                np.array([of_head(y[h], h % of_group * width) for h in range(heads)], np.float32)
                for y in (x[i, t] * v, decay, dy[i, t] * x[i, t])
            )
            ddt[i, t] = of_decay + of_u if each else fma(a, of_decay, of_u)
            if not each:
                da[s] = fma(dt[i, t], of_decay, da[s])
            dd[s] = dd[s] + of_x
            own = fma(np.broadcast_to(step[..., None], e.shape), e, own)
            gradient = factor * gradient
        dinitial[s] = gradient
        if each:
            for column in range(width):
                da[s] = da[s] + own[:, column]
    results = [round_to(y, k) for y, k in ((dx, types[0]), (ddt, types[1]), (da, np.float32), (db, types[2]))]
    results += [round_to(dc, types[3]), None if d is None else round_to(dd, np.float32)]
    return *results, round_to(dinitial, np.float32) if return_initial else None


@quiet
def gated_delta_backward(dout, q, k, v, g, beta, *, initial=None, cu_seqlens=None, dfinal=None, return_initial=False):
    batch, tokens, heads, width = v.shape
    groups, keys = k.shape[2:]
    of_group = heads // groups
    types = [y.dtype for y in (q, k, v, g, beta)]
    dout, q, k, v, g, beta = (widen(np.asarray(y)) for y in (dout, q, k, v, g, beta))
    parts = ranges(batch, tokens, cu_seqlens)
    dq, dk, dv, dg, dbeta = (np.zeros(y.shape, np.float32) for y in (q, k, v, g, beta))
    dinitial = np.zeros((len(parts), heads, keys, width), np.float32)
    for s, (i, begin, end) in enumerate(parts):
        turned = lambda y, s=s: np.ascontiguousarray(np.asarray(y[s], np.float32).swapaxes(1, 2))
        state = np.zeros((heads, width, keys), np.float32) if initial is None else turned(initial)
        gradient = np.zeros_like(state) if dfinal is None else turned(dfinal)
        seen = []
        group = np.arange(heads) // of_group
        whole = lambda y, like: np.broadcast_to(y, like.shape)
        for t in range(begin, end):
            factor, of_k, of_q = exp(g[i, t])[:, None, None], k[i, t][group][:, None], q[i, t][group][:, None]
            old = factor * state
            m = v[i, t] - dots(of_k, old)
            w = beta[i, t][:, None] * m
            state = fma(whole(of_k, old), whole(w[..., None], old), old)
            seen.append((factor, of_k, of_q, old, m, w, state))
        for t in reversed(range(begin, end)):
            factor, of_k, of_q, old, m, w, state = seen[t - begin]
            gradient = fma(whole(of_q, old), whole(dout[i, t][..., None], old), gradient)
            z = dots(of_k, gradient)
            r = beta[i, t][:, None] * z
            dv[i, t] = r
            of_keys = fma(whole(w[..., None], old), gradient, -(r[..., None] * old))
            of_queries = dout[i, t][..., None] * state
            gradient = fma(whole(-of_k, old), whole(r[..., None], old), gradient)
            decay = dots(gradient, old)
            for n in range(groups):
                of = slice(n * of_group, (n + 1) * of_group)
                dq[i, t, n] = columns(of_queries[of].reshape(-1, keys), width)
                dk[i, t, n] = columns(of_keys[of].reshape(-1, keys), width)
            for h in range(heads):
                dg[i, t, h], dbeta[i, t, h] = of_head(decay[h], 0), of_head((z * m)[h], 0)
            gradient = factor * gradient
        dinitial[s] = gradient.swapaxes(1, 2)
    results = [round_to(y, kind) for y, kind in zip((dq, dk, dv, dg, dbeta), types, strict=True)]
    return *results, round_to(dinitial, np.float32) if return_initial else None


@quiet
def causal_conv1d_backward(dy, x, w, *, initial=None, cu_seqlens=None, bias=False, return_initial=False):
    batch, tokens, channels = x.shape
    taps, wide, of_tap, dy = w.shape[1], widen(np.asarray(x)), widen(np.asarray(w)), widen(np.asarray(dy))
    parts = ranges(batch, tokens, cu_seqlens)
    dx, dw, dbias = (np.zeros(s, np.float32) for s in (x.shape, (len(parts), *w.shape), (len(parts), channels)))
    dinitial = np.zeros((len(parts), taps - 1, channels), np.float32)
    for s, (i, begin, end) in enumerate(parts):
        before = np.zeros((taps - 1, channels), np.float32) if initial is None else widen(np.asarray(initial)[s])
        rows = np.concatenate([before, wide[i, begin:end]])  # row r stands at token r - taps + 1
        gradients = np.zeros(rows.shape, np.float32)
        for row in range(len(rows)):
            for j in reversed(range(taps)):
                if begin <= (t := begin + row - j) < end:
                    gradients[row] = fma(of_tap[:, j], dy[i, t], gradients[row])
        dinitial[s], dx[i, begin:end] = gradients[: taps - 1], gradients[taps - 1 :]
        for t in reversed(range(begin, end)):
            for j in range(taps):
                dw[s, :, j] = fma(dy[i, t], rows[t - begin + j], dw[s, :, j])
            dbias[s] = dbias[s] + dy[i, t]
    of = round_to(dx, x.dtype), round_to(dw, np.float32), round_to(dbias, np.float32), round_to(dinitial, x.dtype)
    return of[0], of[1], of[2] if bias else None, of[3] if return_initial else None
