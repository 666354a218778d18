"""pydet.jax.exact: IEEE 754's sums, products and quotients of float32, where XLA's own differ."""

import numpy as np
import pytest

from test_jax import device, jax, jnp, pj, same  # noqa: F401

exact = pj.exact

OPERATIONS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide}
CORNERS = [0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x34000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000,
           0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001]  # fmt: skip
COUNT = 1 << 18


def drawn(kind):
    """Two arrays of words, whose results are everywhere, near each other, subnormal, ties, or none of these."""
    draw = np.random.default_rng(sum(map(ord, kind)))
    words = lambda low, high: draw.integers(low, high, COUNT, dtype=np.uint64).astype(np.uint32)
    number = lambda exponent, fraction: (words(0, 2) << 31) | (exponent.astype(np.uint32) << 23) | fraction
    if kind == "corners":
        corners = np.array([*CORNERS, *(x | 0x80000000 for x in CORNERS)], np.uint32)
        return np.repeat(corners, len(corners)), np.tile(corners, len(corners))
    if kind == "any":
        return words(0, 1 << 32), words(0, 1 << 32)
    if kind == "near":
        e = words(0, 255)
        other = np.clip(e.astype(np.int64) + draw.integers(-3, 4, COUNT), 0, 254)
        return number(e, words(0, 1 << 23)), number(other, words(0, 1 << 23))
    if kind == "few bits":  # products and quotients that are ties, of all sizes
        return number(words(0, 200), words(0, 1 << 12) << 11), number(words(0, 200), words(0, 16) << 19)
    return number(words(0, 2), words(0, 1 << 23)), number(words(100, 160), words(0, 16) << 19)


@pytest.mark.parametrize("kind", ["corners", "any", "near", "few bits", "subnormal"])
def test_elements_have_the_bits_of_ieee_754(device, kind):
    x, y = (words.view(np.float32) for words in drawn(kind))
    ours = jax.jit(lambda x, y: [getattr(exact, name)(x, y) for name in OPERATIONS])(x, y)
    with np.errstate(all="ignore"):
        for (name, theirs), got in zip(OPERATIONS.items(), ours, strict=True):
            want = theirs(x, y)
            assert want.dtype == np.float32 and not np.isnan(want).all(), name
            same(got, np.where(np.isnan(want), np.uint32(0x7FFFFFFF).view(np.float32), want))


def test_xlas_own_are_others(device):
    """A negative control, and a reason: XLA's CPU has no subnormal numbers. It also joins a product and a sum."""
    if device != "cpu":
        pytest.skip("of XLA's CPU")
    x = np.array([1e-40, 3e-39], np.float32)
    want = x * np.float32(1.5)
    assert want.all() and not np.asarray(jax.jit(lambda x: x * jnp.float32(1.5))(x)).any()
    same(jax.jit(lambda x: exact.multiply(x, jnp.float32(1.5)))(x), want)
    a, b, c = np.random.default_rng(0).standard_normal((3, 1000), np.float32)
    same(jax.jit(lambda a, b, c: exact.add(exact.multiply(a, b), c))(a, b, c), a * b + c)
