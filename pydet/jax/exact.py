"""Sums, products and quotients of float32 elements, rounded once as IEEE 754 says, on every backend of XLA.

XLA's own are not. On a CPU it takes subnormal numbers for 0, and makes of a product and a sum one ``fmaf``, of some
releases behind an optimization barrier too; on a GPU its quotients are up to a unit in the last place off. These are
made of whole numbers, which nothing rounds. A NaN is 0x7FFFFFFF, as all of pydet's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pydet.jax.foreign import Array

_lax: Any = jax.lax
_SIGN, _INF, _NAN = (np.uint32(x) for x in (0x80000000, 0x7F800000, 0x7FFFFFFF))
_GUARD = 3  # bits below the last one of a result; the lowest stands for all that is below


def _bits(x: Array) -> Array:
    return _lax.bitcast_convert_type(x, jnp.uint32)


def _number(bits: Array) -> Array:
    return _lax.bitcast_convert_type(bits, jnp.float32)


class _Parts(NamedTuple):
    """A number as ``mantissa 2^(exponent - 150)``, its sign aside; the mantissa has 24 bits, or is 0."""

    bits: Array  # without the sign
    sign: Array  # at its place
    exponent: Array
    mantissa: Array

    @property
    def is_nan(self) -> Array:
        return self.bits > _INF

    @property
    def is_inf(self) -> Array:
        return self.bits == _INF

    @property
    def is_zero(self) -> Array:
        return self.bits == 0


def _parts(x: Array) -> _Parts:
    bits = _bits(x)
    exponent, fraction = ((bits >> 23) & 0xFF).astype(jnp.int32), bits & 0x7FFFFF
    missing = _lax.clz(fraction) - 8  # bits of a subnormal number before its first
    subnormal = exponent == 0
    mantissa = jnp.where(subnormal, fraction << missing, fraction | (1 << 23))
    exponent = jnp.where(subnormal, 1 - missing.astype(jnp.int32), exponent)
    return _Parts(bits & ~_SIGN, bits & _SIGN, exponent, mantissa)


def _shifted(mantissa: Array, by: Array) -> Array:
    """To the right by 0 to 31; the last bit is 1 if what falls off is not 0."""
    by = by.astype(jnp.uint32)
    lost = (mantissa & ((jnp.uint32(1) << by) - 1)) != 0
    return (mantissa >> by) | lost.astype(jnp.uint32)


def _rounded(exponent: Array, mantissa: Array) -> Array:
    """The bits of ``mantissa 2^(exponent - 153)``, of 27 bits, to the nearest, ties to even."""
    mantissa = _shifted(mantissa, jnp.clip(1 - exponent, 0, 31))  # a subnormal result has fewer bits
    below = mantissa & ((1 << _GUARD) - 1)
    bits = ((jnp.maximum(exponent, 1) - 1).astype(jnp.uint32) << 23) + (mantissa >> _GUARD)
    up = (below > 4) | ((below == 4) & ((bits & 1) == 1))
    return jnp.minimum(bits + up.astype(jnp.uint32), _INF)


def negate(x: Array) -> Array:
    return _number(_bits(x) ^ _SIGN)


def add(x: Array, y: Array) -> Array:
    """``fl(x + y)``."""
    x, y = jnp.broadcast_arrays(x, y)
    a, b = _parts(x), _parts(y)
    swap = a.bits < b.bits
    large, small = (_Parts(*(jnp.where(s, q, p) for p, q in zip(a, b, strict=True))) for s in (swap, ~swap))
    alike = large.sign == small.sign
    far = jnp.clip(large.exponent - small.exponent, 0, 31)
    first, other = large.mantissa << _GUARD, _shifted(small.mantissa << _GUARD, far)
    total = jnp.where(alike, first + other, first - other)
    carry = (total >> 27).astype(jnp.uint32)
    total = (total >> carry) | (total & carry)
    up = jnp.where(carry == 1, jnp.uint32(0), _lax.clz(total) - 5)
    made = _rounded(large.exponent + carry.astype(jnp.int32) - up.astype(jnp.int32), total << up)
    made = jnp.where(total == 0, jnp.where(alike, large.sign, jnp.uint32(0)), large.sign | made)
    made = jnp.where(large.is_inf, large.sign | _INF, made)
    return _number(jnp.where(large.is_nan | (small.is_inf & ~alike), _NAN, made))


def subtract(x: Array, y: Array) -> Array:
    """``fl(x - y)``."""
    return add(x, negate(y))


def multiply(x: Array, y: Array) -> Array:
    """``fl(x y)``."""
    a, b = _parts(x), _parts(y)
    sign = a.sign ^ b.sign
    # The product has 48 bits: 24 in `high`, 24 in `low`, of factors in halves of 12.
    (a1, a0), (b1, b0) = ((m >> 12, m & 0xFFF) for m in (a.mantissa, b.mantissa))
    middle = a1 * b0 + a0 * b1
    low = a0 * b0 + ((middle & 0xFFF) << 12)
    high = a1 * b1 + (middle >> 12) + (low >> 24)
    low = low & 0xFFFFFF
    mantissa = (high << 3) | _shifted(low, jnp.uint32(21))
    short = (mantissa < (1 << 26)).astype(jnp.uint32)
    made = _rounded(a.exponent + b.exponent - 126 - short.astype(jnp.int32), mantissa << short)
    made = jnp.where(a.is_zero | b.is_zero, jnp.uint32(0), made)
    made = jnp.where(a.is_inf | b.is_inf, _INF, made)
    nan = a.is_nan | b.is_nan | (a.is_inf & b.is_zero) | (a.is_zero & b.is_inf)
    return _number(jnp.where(nan, _NAN, sign | made))


def divide(x: Array, y: Array) -> Array:
    """``fl(x / y)``."""
    a, b = _parts(x), _parts(y)
    sign = a.sign ^ b.sign
    short = (a.mantissa < b.mantissa).astype(jnp.uint32)
    divisor = b.mantissa.astype(jnp.int32)
    left = (a.mantissa << short).astype(jnp.int32) - divisor
    quotient = jnp.uint32(1)
    # Two digits of 13 bits. Each is at most 1 off as fp32 gives it, whatever rounds that; what is left is exact.
    scale = 8192 / jnp.maximum(divisor, 1).astype(jnp.float32)
    for _ in range(2):
        digit = (left.astype(jnp.float32) * scale).astype(jnp.int32)
        left = (left << 13) - digit * divisor
        over, under = left >= divisor, left < 0
        digit = digit + over.astype(jnp.int32) - under.astype(jnp.int32)
        left = left - jnp.where(over, divisor, 0) + jnp.where(under, divisor, 0)
        quotient = (quotient << 13) + digit.astype(jnp.uint32)
    mantissa = quotient | (left != 0).astype(jnp.uint32)
    made = _rounded(a.exponent - b.exponent + 127 - short.astype(jnp.int32), mantissa)
    made = jnp.where(a.is_inf | b.is_zero, _INF, jnp.where(a.is_zero | b.is_inf, jnp.uint32(0), made))
    nan = a.is_nan | b.is_nan | (a.is_inf & b.is_inf) | (a.is_zero & b.is_zero)
    return _number(jnp.where(nan, _NAN, sign | made))
