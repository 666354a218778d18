"""Rotary embeddings as NUMERICS.md ("Rotary embeddings") writes them, step after step."""

import math

import numpy as np

import reference

PARTS = [float.fromhex(x) for x in ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")]  # of pi / 2
SINE = [(-1) ** n / math.factorial(2 * n + 1) for n in range(9)]
COSINE = [(-1) ** n / math.factorial(2 * n) for n in range(9)]


def series(factors, square):
    y = np.full_like(square, factors[-1])
    for factor in reversed(factors[:-1]):
        y = y * square + factor
    return y


def cos_sin(angle):
    """Of float32 numbers, in float64, and rounded to float32."""
    with np.errstate(all="ignore"):
        x = np.asarray(angle, np.float32).astype(np.float64)
        n = np.rint(x * (2 / math.pi))
        r = x
        for part in PARTS:
            r = r - n * part
        square = r * r
        sine, cosine = r * series(SINE, square), series(COSINE, square)
        quarter = np.mod(n, 4)
        cos = np.select([quarter == 1, quarter == 2, quarter == 3], [-sine, -cosine, sine], cosine)
        sin = np.select([quarter == 1, quarter == 2, quarter == 3], [cosine, -sine, -cosine], sine)
        return cos.astype(np.float32), sin.astype(np.float32)


def rotary_table(positions, frequencies, *, scale=1.0, twice=False, out_dtype=np.float32):
    with np.errstate(all="ignore"):
        places = positions if np.asarray(positions).dtype.kind == "i" else reference.widen(np.asarray(positions))
        angles = np.asarray(places).astype(np.float32).reshape(*np.shape(positions), 1) * np.asarray(
            frequencies, np.float32
        )
        made = [reference.round_to(x * np.float32(scale), np.dtype(out_dtype)) for x in cos_sin(angles)]
    return tuple(np.concatenate([x, x], -1) if twice else x for x in made)


def rotary(
    q,
    k,
    cos,
    sin,
    *,
    whole=False,
    neighbours=False,
    out_neighbours=False,
    in_fp32=False,
    transposed=False,
    out_dtype=None,
):
    out = np.dtype(out_dtype or q.dtype)
    tables = [reference.widen(np.asarray(x))[..., None, :] for x in (cos, sin)]
    pairs = tables[0].shape[-1] // (2 if whole else 1)

    def places(neighbours):
        if neighbours:
            return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        return slice(0, pairs), slice(pairs, 2 * pairs)

    of_table = places(neighbours if transposed else out_neighbours)
    c, s = ([x[..., place] for place in of_table] if whole else (x, x) for x in tables)

    def step(x):
        return x if in_fp32 else reference.widen(reference.round_to(x, out))

    def turned(x):
        wide = reference.widen(x)
        a, b = (wide[..., place] for place in places(neighbours))
        with np.errstate(all="ignore"):
            if transposed:
                first = (step(a * c[0]) + step(b * s[1])) + np.float32(0)
                second = (step(b * c[1]) - step(a * s[0])) + np.float32(0)
                rest = wide[..., 2 * pairs :] + np.float32(0)
            else:
                first = step(a * c[0]) - step(b * s[0])
                second = step(b * c[1]) + step(a * s[1])
                rest = wide[..., 2 * pairs :]
        made = np.empty(x.shape, np.float32)
        made[..., places(out_neighbours)[0]], made[..., places(out_neighbours)[1]] = first, second
        made[..., 2 * pairs :] = rest
        return reference.round_to(made, out)

    return turned(q), None if k is None else turned(k)
