"""Activations and their gradients as NUMERICS.md ("Activations") writes them, in plain NumPy."""

import numpy as np

from reference import EXP, LN2_HIGH, LN2_LOW, exp, fma, polynomial, quiet, round_to, widen

KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh", "softplus", "exp")
LOG1P = ["-0x1.a92c84p-9", "0x1.453d86p-6", "-0x1.d29deap-5", "0x1.b2557ap-4", "-0x1.39768cp-3", "0x1.92f73ap-3"]
LOG1P += ["-0x1.ff0fb6p-3", "0x1.554c82p-2", "-0x1.ffffbep-2"]
NORMAL = ["-0x1.b9afe8p-6", "0x1.1e95a0p-3", "-0x1.0e719ep-2", "0x1.765c18p-3", "-0x1.176496p-5", "0x1.c51d44p-4"]
NORMAL += ["0x1.e01b68p-4", "0x1.19907cp-3", "0x1.18d3d4p-3"]
TANH = ["-0x1.76ac1cp-8", "0x1.5256d8p-6", "-0x1.b84448p-5", "0x1.110768p-3", "-0x1.555534p-2"]
DENSITY = np.float32(float.fromhex("0x1.988454p-2"))
QUICK = np.float32(float.fromhex("0x1.b3b646p+0"))
FIRST, THIRD = np.float32(float.fromhex("0x1.988454p+0")), np.float32(float.fromhex("0x1.2444f2p-4"))
ONE, SMALL = np.float32(1), np.float32(2.0**-64)


def full(number, x):
    return np.full_like(x, number)


def scaled_exp(x):
    """2^64 e^x, of numbers from -130 to 0, and NaN."""
    shift = full(1.5 * 2**23, x)
    n = fma(x, full(float.fromhex("0x1.715476p+0"), x), shift) - shift
    high = fma(-n, full(LN2_HIGH, x), x)
    r = fma(-n, full(LN2_LOW, x), high)
    low = fma(-n, full(LN2_LOW, x), high - r)
    e = fma(r * r, polynomial(EXP, r), low) + r + ONE
    return e * np.ldexp(np.ones_like(x), np.where(np.isnan(n), 0, n + 64).astype(np.int32))


def down_from(x, low):
    down = -np.abs(x)
    return np.where(down < low, np.float32(low), down)


def swish(x, bound, t, times_slope):
    """x s(t(x)), and s (1 + x t'(x) (1 - s))."""
    down = down_from(x, -bound)
    scaled = scaled_exp(t(down))
    e = scaled * SMALL
    upper = ONE / (ONE + e)
    times = times_slope(down)
    below = (down * scaled * upper * SMALL, scaled * upper * (ONE + times * upper) * SMALL)
    above = (x * upper, upper * (ONE + -times * (e * upper)))
    return tuple(np.where(x < 0, *pair) for pair in zip(below, above, strict=True))


def gelu(x):
    down = down_from(x, -14.875)
    z = -down
    square = z * z
    rest, c = fma(z, z, -square), np.float32(-0.5) * square
    e = scaled_exp(c)
    e = fma(e, np.float32(-0.5) * rest, e)
    w = ONE / fma(z, full(0.34375, x), full(1, x))
    below, density = e * (w * polynomial(NORMAL, w)), e * DENSITY
    upper = fma(below, full(-SMALL, x), full(1, x))
    return (
        np.where(x < 0, down * below * SMALL, x * upper),
        np.where(x < 0, fma(down, density, below) * SMALL, fma(z, density * SMALL, upper)),
    )


@quiet
def activated(x, kind):
    """f(x) and f'(x) of float32 numbers."""
    if kind == "silu":
        return swish(x, 112.0, lambda x: x, lambda x: x)
    if kind == "quick_gelu":
        return swish(x, 65.0, lambda x: x * QUICK, lambda x: x * QUICK)
    if kind == "gelu_tanh":
        t = lambda third: lambda x: x * fma(x * x, full(third, x), full(FIRST, x))
        return swish(x, 11.0, t(THIRD), t(np.float32(3) * THIRD))
    if kind == "gelu":
        return gelu(x)
    if kind == "exp":
        return exp(x), exp(x)
    scaled = scaled_exp(down_from(x, -112.0) if kind != "tanh" else np.float32(2) * down_from(x, -56.0))
    e = scaled * SMALL
    upper = ONE / (ONE + e)
    value, slope = np.where(x < 0, scaled * upper * SMALL, upper), scaled * upper * upper
    if kind == "sigmoid":
        return value, slope * SMALL
    if kind == "softplus":
        return np.where(x < 0, np.float32(0), x) + fma(polynomial(LOG1P, e) * e, e, e), value
    square = x * x
    near = fma(x * square, polynomial(TANH, square), x)
    far = fma(np.float32(-2) * e, upper, full(1, x))
    return np.copysign(np.where(np.abs(x) > 0.625, far, near), x), slope * np.float32(2.0**-62)


@quiet
def activation(x, kind="silu", *, up=None):
    y = round_to(activated(widen(x), kind)[0], x.dtype)
    return y if up is None else round_to(widen(y) * widen(up), x.dtype)


@quiet
def activation_backward(dy, x, kind="silu", *, up=None):
    value, slope = activated(widen(x), kind)
    if up is None:
        return round_to(widen(dy) * slope, x.dtype)
    gradient = round_to(widen(dy) * widen(up), x.dtype)
    dup = round_to(widen(dy) * widen(round_to(value, x.dtype)), x.dtype)
    return round_to(widen(gradient) * slope, x.dtype), dup
