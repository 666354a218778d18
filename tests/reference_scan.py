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
