"""Sampling as NUMERICS.md ("Sampling") writes it: whole rows are sorted, masses are Python's integers."""

import numpy as np

import reference
from reference import LN2_HIGH, LN2_LOW, LOG, exp, fma, log, polynomial, quiet, widen

NAN = np.float32(np.nan)


def philox(seed, position, blocks):
    """Philox4x32-10 of one key and of the counters (block, 0, position): four words each."""
    seed, position = int(seed) % 2**64, int(position) % 2**64
    whole = lambda word: np.full(len(blocks), word, np.uint64)
    low, counter = np.uint64(0xFFFFFFFF), [np.asarray(blocks, np.uint64), whole(0), whole(position % 2**32)]
    counter.append(whole(position >> 32))
    keys = seed % 2**32, seed >> 32
    for i in range(10):
        first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        key = [np.uint64((k + i * step) % 2**32) for k, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
        counter = [
            second >> np.uint64(32) ^ counter[1] ^ key[0],
            second & low,
            first >> np.uint64(32) ^ counter[3] ^ key[1],
            first & low,
        ]
    return np.stack(counter, axis=-1).astype(np.uint32)


def log_of(f, k):
    square = f * f
    low = fma(k, np.full_like(f, LN2_LOW), square * f * polynomial(LOG, f))
    return fma(k, np.full_like(f, LN2_HIGH), fma(square, np.full_like(f, -0.5), low) + f)


def gumbel(words):
    number = lambda w: fma(w.astype(np.float32), np.full(w.shape, 2.0**-32), np.full(w.shape, 2.0**-33))
    v, rest = number(words), number(~words)
    return -log(np.where(v < 0.25, -log_of(-v, np.zeros_like(v)), -log(rest)))


def noise(seed, position, n):
    return gumbel(philox(seed, position, np.arange(-(-n // 4))).ravel()[:n])


@quiet
def descending(x):
    """The columns from the largest x down, equal ones ascending; a NaN above all."""
    key = np.where(np.isnan(x), np.inf, x.astype(np.float64))
    return np.lexsort((np.arange(len(x)), -key, ~np.isnan(x)))


@quiet
def sample_row(x, seed, position, temperature, top_k, top_p, min_p):
    x, n = widen(x), len(x)
    ranges = 0 <= temperature < np.inf and 0 <= top_p <= 1 and 0 <= min_p <= 1 and top_k >= 0
    z = x / np.float32(temperature) if temperature > 0 else x
    m = np.max(z) + np.float32(0)
    if not ranges or not np.isfinite(m):
        return -1, NAN, NAN
    e = exp(z - m)
    total = lambda e: log(reference.row_sum(e[None], np.ones_like(e)[None]))[0]
    log_prob = lambda token, e: z[token] - m - total(e)
    order = descending(x)
    if temperature == 0:
        return order[0], log_prob(order[0], e), np.float32(0)
    kept = order[: top_k or n]
    if top_p < 1:
        mass = [int(w) for w in np.trunc(e[kept].astype(np.float64) * 2.0**40)]
        reach = max(1, sum(mass) * int(float(np.float32(top_p)) * 2**32) >> 32)
        count, sum_so_far = 0, 0
        while sum_so_far < reach:
            sum_so_far += mass[count]
            count += 1
        kept = kept[:count]
    keep = np.zeros(n, bool)
    keep[kept] = True
    keep &= e >= np.float32(min_p)
    key = np.where(keep, z - m + noise(seed, position, n), np.float32(-np.inf))
    token = int(np.argmax(key))  # the first of equal ones
    return token, log_prob(token, e), log_prob(token, np.where(keep, e, np.float32(0)))


def sample(x, seed, position, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rows = x.reshape(-1, x.shape[-1])
    given = [np.broadcast_to(t, x.shape[:-1]).ravel() for t in (seed, position, temperature, top_k, top_p, min_p)]
    drawn = [sample_row(row, *(t[i] for t in given)) for i, row in enumerate(rows)]
    token, *log_probs = zip(*drawn, strict=True) if drawn else ((), (), ())
    shape = x.shape[:-1]
    return (
        np.array(token, np.int64).reshape(shape),
        *(reference.round_to(np.array(part, np.float32), np.dtype(np.float32)).reshape(shape) for part in log_probs),
    )


def topk(x, k):
    rows = x.reshape(-1, x.shape[-1])
    index = np.array([descending(widen(row))[:k] for row in rows], np.int64).reshape(*x.shape[:-1], k)
    return reference.round_to(widen(np.take_along_axis(x, index, axis=-1)), x.dtype), index
