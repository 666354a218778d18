"""Rotary embeddings: every kernel, forced by name, against the reference; refusals; and what they promise."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import pydet
import reference_rotary as reference
from cases import DTYPES, assert_same_bits, data
from conftest import threads

# Of pairs, around the CPU's vectors and pieces of 128 elements and a GPU's vectors of 8.
PAIRS = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 257]
FLAGS = ("whole", "neighbours", "out_neighbours", "in_fp32", "transposed")


def places_of(count, kind, seed=0):
    """Up to a million and some beyond, and the first ones; of other numbers both signs."""
    rng = np.random.default_rng(seed)
    places = np.concatenate([np.arange(min(count, 3)), rng.integers(0, 1_000_001, count)])[:count]
    places[count // 2 :: 7] = (1_000_000, 131_072, 999_983)[seed % 3]
    if np.dtype(kind).kind == "i":
        return places.astype(kind)
    return np.where(rng.random(count) < 0.5, -places / 16, places / 16).clip(-6e4, 6e4).astype(kind)


def frequencies_of(n):
    return (10000.0 ** -(np.arange(n) / max(n, 1))).astype(np.float32)


def check_table(functions, dtype, widths=PAIRS):
    kinds = [np.int64, np.int32, np.float32, ml_dtypes.bfloat16, np.float16]
    for number, n in enumerate(widths):
        count = (0, 1, 2, 7, 33, 130, 5)[number % 7]
        places = places_of(count, kinds[number % 5], number)
        options = {"scale": (1.0, 0.83, -1.3, 1e-30)[number % 4], "twice": number % 2 == 1, "out_dtype": DTYPES[dtype]}
        got = functions.rotary_table(places, frequencies_of(n), **options)
        for name, ours, want in zip(
            "cs", got, reference.rotary_table(places, frequencies_of(n), **options), strict=True
        ):
            assert_same_bits(ours, want, f"{name} of {count} places and {n} frequencies, {options}")


def heads_of(dtype, tokens, heads, n, seed, kind="normal"):
    return data(kind, (*tokens, heads, n), DTYPES[dtype], seed)


def table_of(dtype, tokens, columns, seed, kind="normal"):
    return [data(kind, (*tokens, columns), dtype, seed + i) for i in range(2)]


def check_heads(functions, dtype, sizes=PAIRS, types=True):
    """All ways to turn, beside tables and results of each type; with elements that are copied, and zeros."""
    ways = list(itertools.product((False, True), repeat=5))
    others = list(itertools.product(DTYPES.values(), (None, *DTYPES.values()))) if types else [(np.float32, None)]
    for number, pairs in enumerate([*sizes, *(5 for _ in ways), *(16 for _ in ways)]):
        how = dict(zip(FLAGS, ways[number % len(ways)], strict=True))
        of_table, out_dtype = others[number % len(others)]
        n = 2 * pairs + (0, 0, 8, 1, 130)[number % 5]
        tokens = ((3,), (), (2, 3), (65,), (0,), (1, 1))[number % 6]
        kind = ("normal", "specials", "normal", "wide")[number % 4]
        q, k = (heads_of(dtype, tokens, h, n, number + h, kind) for h in (3, 1 + number % 2))
        q[..., ::5] = -0.0
        cos, sin = table_of(np.dtype(of_table), tokens, pairs * (2 if how["whole"] else 1), number)
        sin[..., ::3] = 0
        given = how if out_dtype is None else {**how, "out_dtype": out_dtype}
        what = f"{pairs} pairs of {n} elements of {tokens} tokens, {given}, table {np.dtype(of_table)}"
        alone = number % 7 == 3
        got = functions.rotary(q, None if alone else k, cos, sin, **given)
        want = reference.rotary(q, None if alone else k, cos, sin, **given)
        assert_same_bits(got[0], want[0], what)
        assert (got[1] is None) == alone
        if not alone:
            assert_same_bits(got[1], want[1], f"k: {what}")


def test_the_table(rotary_table_kernel):
    check_table(rotary_table_kernel, rotary_table_kernel.dtype)


def test_heads(rotary_kernel):
    check_heads(rotary_kernel, rotary_kernel.dtype)


def test_the_table_of_many_places():
    """Positions 0 to 1,000,000, each 37th; and numbers near multiples of a quarter turn."""
    places, frequencies = np.arange(0, 1_000_001, 37), frequencies_of(3)
    for got, want in zip(
        pydet.rotary_table(places, frequencies), reference.rotary_table(places, frequencies), strict=True
    ):
        assert_same_bits(got, want)
    turns = (np.arange(-5000, 5000) * (np.pi / 2)).astype(np.float32)
    one = np.ones(1, np.float32)
    got = pydet.rotary_table(turns, one)
    for ours, want, right in zip(got, reference.rotary_table(turns, one), (np.cos, np.sin), strict=True):
        assert_same_bits(ours, want)
        assert_same_bits(ours[:, 0], right(turns.astype(np.longdouble)).astype(np.float32))
    lost = pydet.rotary_table(np.float32([np.inf, -np.inf, np.nan]), one)
    assert np.isnan(lost).all()


def test_a_number_depends_on_its_place_and_frequency_alone(rotary_table_kernel):
    kernel = rotary_table_kernel
    places, frequencies = places_of(700, np.int64), frequencies_of(2100)
    whole = kernel.rotary_table(places, frequencies, out_dtype=DTYPES[kernel.dtype])
    for one in (slice(0, 1), slice(13, 20), slice(699, 700)):
        for some in (slice(0, 1), slice(1023, 1026), slice(5, 2100)):
            made = kernel.rotary_table(places[one], frequencies[some], out_dtype=DTYPES[kernel.dtype])
            for got, want in zip(made, whole, strict=True):
                assert_same_bits(got, np.ascontiguousarray(want[one, some]))


def test_threads_change_nothing():
    places, frequencies = places_of(900, np.int64), frequencies_of(64)
    q, k = heads_of("bf16", (900,), 8, 128, 0), heads_of("bf16", (900,), 2, 128, 1)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            cos, sin = pydet.rotary_table(places, frequencies, twice=True)
            found.append((cos, sin, *pydet.rotary(q, k, cos, sin, whole=True)))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert_same_bits(got, want)
    for got, want in zip(found[0][2:], reference.rotary(q, k, *found[0][:2], whole=True), strict=True):
        assert_same_bits(got, want)


def test_strides_and_tables_that_are_shared(rotary_kernel):
    """Heads before tokens, rows with gaps, one row of the table for all of a batch."""
    kernel = rotary_kernel
    q = heads_of(kernel.dtype, (2, 5), 3, 20, 0).swapaxes(1, 2)[..., :14].swapaxes(1, 2)
    k = np.ascontiguousarray(heads_of(kernel.dtype, (2, 5), 2, 14, 1).swapaxes(1, 2)).swapaxes(1, 2)
    cos, sin = table_of(np.dtype(np.float32), (1, 5), 6, 3)
    spread = [np.repeat(x, 2, 0) for x in (cos, sin)]
    want = reference.rotary(np.ascontiguousarray(q), np.ascontiguousarray(k), *spread)
    out = np.zeros((2, 5, 3, 24), q.dtype)[..., 3:17]
    got = kernel.rotary(q, k, cos, sin, q_out=out)
    assert_same_bits(np.ascontiguousarray(out), want[0])
    for ours, theirs in zip(got, want, strict=True):
        assert_same_bits(np.ascontiguousarray(ours), theirs)
    for token in range(5):  # alone
        one = slice(token, token + 1)
        alone = kernel.rotary(q[:, one], k[:, one], cos[:, one], sin[:, one])
        for ours, theirs in zip(alone, want, strict=True):
            assert_same_bits(ours, np.ascontiguousarray(theirs[:, one]))


def test_the_transposed_turn_is_the_gradient():
    """Of numbers whose products and sums are exact: <turned x, g> is <x, transposed g>."""
    rng = np.random.default_rng(0)
    for flags in itertools.product((False, True), repeat=3):
        whole, neighbours, out_neighbours = flags
        q, g = (rng.integers(-9, 10, (4, 3, 14)).astype(np.float32) for _ in range(2))
        cos, sin = (rng.integers(-9, 10, (4, 10 if whole else 5)).astype(np.float32) for _ in range(2))
        y, _ = pydet.rotary(q, None, cos, sin, whole=whole, neighbours=neighbours, out_neighbours=out_neighbours)
        dq, _ = pydet.rotary(
            g, None, cos, sin, whole=whole, neighbours=out_neighbours, out_neighbours=neighbours, transposed=True
        )
        assert (y * g).sum() == (q * dq).sum() and (y * g).sum() != (y * y).sum()


def test_roundings_show():
    """Negative controls: a step that is not rounded, a pair of others, a zero of the other sign."""
    q, k = heads_of("bf16", (40,), 4, 32, 0), heads_of("bf16", (40,), 1, 32, 1)
    cos, sin = pydet.rotary_table(np.arange(40), frequencies_of(16), out_dtype=ml_dtypes.bfloat16)
    plain = pydet.rotary(q, k, cos, sin)[0]
    for how in ({"in_fp32": True}, {"neighbours": True, "out_neighbours": True}, {"transposed": True}):
        assert plain.tobytes() != pydet.rotary(q, k, cos, sin, **how)[0].tobytes(), how
    zero = np.full((1, 1, 3), -0.0, np.float32)
    one, nought = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
    assert np.signbit(pydet.rotary(zero, None, one, nought)[0]).tolist() == [[[False, True, True]]]
    assert not np.signbit(pydet.rotary(zero, None, one, nought, transposed=True)[0]).any()


Q, C = np.ones((4, 2, 6), np.float32), np.ones((4, 3), np.float32)
PLACES, ONES = np.arange(4), np.ones(3, np.float32)
REFUSED = [
    (
        lambda: pydet.rotary_table(PLACES.astype(np.int16), ONES),
        "rotary_table: positions is int16, want int32 or int64",
    ),
    (lambda: pydet.rotary_table(PLACES, ONES.astype(np.float16)), "rotary_table: frequencies is float16, want float32"),
    (lambda: pydet.rotary_table(PLACES, C), "rotary_table: frequencies is no vector of float32"),
    (lambda: pydet.rotary_table(PLACES, ONES[:0]), "rotary_table: frequencies is 0, want 1 dimension"),
    (
        lambda: pydet.rotary_table(PLACES, ONES, scale=0.0),
        "rotary_table: scale is 0, want a finite number other than 0",
    ),
    (lambda: pydet.rotary_table(PLACES, ONES, scale=np.inf), "rotary_table: scale is inf, want a finite number"),
    (
        lambda: pydet.rotary_table(PLACES, ONES, cos=np.ones((4, 5), np.float32), sin=np.ones((4, 5), np.float32)),
        "rotary_table: frequencies is 3, want 1 dimension, all or half of the 5 of cos",
    ),
    (
        lambda: pydet.rotary_table(PLACES, ONES, cos=C.copy(), sin=np.ones((4, 6), np.float32)),
        "rotary_table: sin is 4x6, want 4x3",
    ),
    (
        lambda: pydet.rotary_table(PLACES[:3], ONES, cos=C.copy(), sin=C.copy()),
        "rotary_table: positions is 3, want 4",
    ),
    (
        lambda: pydet.rotary_table(PLACES, ONES, cos=(same := C.copy()), sin=same),
        "rotary_table: sin shares memory with cos, want it apart",
    ),
    (lambda: pydet.rotary(Q[0, 0], None, C, C), "rotary: q has 1 dimensions, want 2 to 8"),
    (lambda: pydet.rotary(Q, Q[:3], C, C), "rotary: k is 3x2x6, want 4x2x6"),
    (lambda: pydet.rotary(Q, Q.astype(np.float16), C, C), "rotary: k is float16, want float32 as q is"),
    (lambda: pydet.rotary(Q, Q[:, :0], C, C), "rotary: k is 4x0x6, want 1 head or more"),
    (lambda: pydet.rotary(Q, Q, C, C[:, :2]), "rotary: sin is 4x2, want 4x3"),
    (lambda: pydet.rotary(Q, Q, C[:2], C[:2]), "rotary: cos is 2x3, want 4x3 as the tokens of q are, or extents of 1"),
    (
        lambda: pydet.rotary(Q, Q, C, C, whole=True),
        "rotary: cos is 4x3 beside heads of 6, want a last dimension of 2, 4, ... up to 6",
    ),
    (
        lambda: pydet.rotary(Q[..., :5], None, C, C),
        "rotary: cos is 4x3 beside heads of 5, want a last dimension of 1 up to 2",
    ),
    (lambda: pydet.rotary(Q, None, C, C, q_out=Q), "rotary: q_out shares memory with q, want it apart"),
    (lambda: pydet.rotary(Q, None, C, C, k_out=Q.copy()), "rotary: k_out is given without k, want both or neither"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(call, sentence):
    with pytest.raises(pydet.Error) as caught:
        call()
    assert str(caught.value).startswith(sentence), caught.value
