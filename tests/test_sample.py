"""Sampling and topk: every kernel, forced by name, against the reference; the distribution; and what they promise."""

import math

import numpy as np
import pytest

import pydet
import reference
import reference_sample
from cases import DTYPES, assert_same_bits, data
from conftest import threads

# Around the CPU's vectors and pieces of 128 elements, the blocks of noise, and the lanes of a sum.
WIDTHS = [*range(1, 71), 127, 128, 129, 255, 257, 1023, 1024, 1025, 2047, 2048, 2049, 5000]
FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 5},
    {"top_p": 0.9},
    {"temperature": 0.5, "top_k": 40, "top_p": 0.5, "min_p": 0.05},
    {"min_p": 0.3},
    {"top_k": 1},
    {"top_p": 0.0},
    {"min_p": 1.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.1},
    {"temperature": 1e-3},
    {"temperature": 30.0, "top_p": 0.999, "min_p": 1e-9},
]


def keys(rows, seed=0):
    words = np.random.default_rng(seed).integers(-(2**63), 2**63, (2, *np.atleast_1d(rows)), np.int64)
    return words[0], words[1]


def same(got, want, what=""):
    assert np.array_equal(got[0], want[0]) and got[0].dtype == np.int64, (what, got[0], want[0])
    for part, wanted in zip(got[1:], want[1:], strict=True):
        assert_same_bits(part, wanted, what)


def coarse(x, dtype):
    """With many equal elements, and some of either zero."""
    return reference.round_to(np.round(reference.widen(x)), DTYPES[dtype])


def check(functions, dtype, widths=WIDTHS, rows=3):
    for number, n in enumerate(widths):
        x, (seed, position) = data("normal", (rows, n), DTYPES[dtype], number), keys(rows, number)
        x = coarse(x, dtype) if number % 3 == 1 else x
        options = FILTERS[number % len(FILTERS)]
        same(
            functions.sample(x, seed, position, **options),
            reference_sample.sample(x, seed, position, **options),
            f"{rows}x{n} {options}",
        )


def test_sample(sample_kernel):
    check(sample_kernel, sample_kernel.dtype)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters(sample_kernel, options):
    dtype = sample_kernel.dtype
    for kind, change in (("normal", 0), ("normal", 1), ("wide", 0), ("specials", 0), ("integers", 0)):
        x, (seed, position) = data(kind, (9, 333), DTYPES[dtype], change), keys(9, change)
        x = coarse(x, dtype) if change else x
        got = sample_kernel.sample(x, seed, position, **options)
        same(got, reference_sample.sample(x, seed, position, **options), kind)
        token, none, no = sample_kernel.sample(x, seed, position, return_log_prob=False, **options)
        assert none is no is None and np.array_equal(token, got[0])


def test_a_vocabulary(sample_kernel):
    dtype, (seed, position) = sample_kernel.dtype, keys(2)
    x = data("normal", (2, 152064), DTYPES[dtype])
    for options in ({"temperature": 0.25}, {"temperature": 0.25, "top_k": 1000, "top_p": 0.9}):
        got = sample_kernel.sample(x, seed, position, **options)
        same(got, reference_sample.sample(x, seed, position, **options), options)


def test_options_of_rows(sample_kernel):
    """And rows whose own are out of their ranges, beside rows that are not."""
    dtype = sample_kernel.dtype
    temperature = np.float32([0, 0.5, 1, 2, -1, np.nan, np.inf, 1, 1, 1, 1, 1, 1, 1e-45, 1e30])
    top_k = np.int64([0, 3, 0, 500, 5, 5, 5, -1, 5, 5, 5, 5, 2**62, 5, 7])
    top_p = np.float32([0.5, 1, 0.8, 0.1, 1, 1, 1, 1, -0.1, 1.5, np.nan, 1, 0.5, 1, 0.9])
    min_p = np.float32([0, 0, 0.1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0.5])
    x, (seed, position) = data("normal", (15, 400), DTYPES[dtype]), keys(15)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    got = sample_kernel.sample(x, seed, position, **options)
    same(got, reference_sample.sample(x, seed, position, **options))
    assert np.array_equal(got[0] < 0, [i in (4, 5, 6, 7, 8, 9, 10, 11, 13) for i in range(15)])
    narrow = np.minimum(top_k, 2**31 - 1).astype(np.int32)
    same(sample_kernel.sample(x, seed, position, **{**options, "top_k": narrow}), got)
    for i in (1, 2, 3, 12, 14):  # a row's own options are those of a call
        one = {name: value[i].item() for name, value in options.items()}
        same(sample_kernel.sample(x[i], np.array(seed[i]), np.array(position[i]), **one), [part[i] for part in got])


def test_rows_with_nothing_to_draw_from(sample_kernel):
    dtype, (seed, position) = sample_kernel.dtype, keys(6)
    x = data("normal", (6, 300), DTYPES[dtype])
    x[0, 299], x[1, 0], x[2], x[3], x[4, :298] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    for options in FILTERS:
        token, log_prob, filtered = got = sample_kernel.sample(x, seed, position, **options)
        same(got, reference_sample.sample(x, seed, position, **options))
        assert np.array_equal(token[:4], [-1] * 4) and token[4] >= 298 and token[5] >= 0
        assert np.isnan(log_prob[:4]).all() and np.isnan(filtered[:4]).all() and np.isfinite(log_prob[4:]).all()


def test_greedy_is_the_first_of_the_largest(sample_kernel):
    x, (seed, position) = np.zeros((3, 777), DTYPES[sample_kernel.dtype]), keys(3)
    x[0, [13, 500, 776]], x[1] = 5, -0.0
    x[1, 200:], x[2], x[2, [128, 129]] = 0.0, -9, -1
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"temperature": 0.0, "top_p": 0.0}):
        assert np.array_equal(sample_kernel.sample(x, seed, position, **options)[0], [13, 0, 128]), options


def test_log_prob_has_the_bits_of_log_prob(sample_kernel):
    dtype, (seed, position) = sample_kernel.dtype, keys(8)
    x = data("normal", (8, 3001), DTYPES[dtype])
    for temperature in (0.0, 1.0, 0.6):
        token, log_prob, filtered = sample_kernel.sample(x, seed, position, temperature=temperature)
        cooled = reference.widen(x) / np.float32(temperature or 1)
        assert_same_bits(log_prob, pydet.log_prob(cooled, token))
        assert_same_bits(filtered, log_prob if temperature else np.zeros_like(log_prob))
    token, _, filtered = sample_kernel.sample(x, seed, position, top_k=20)
    kept = np.full(x.shape, -np.inf, np.float32)
    _, index = pydet.topk(x, 20)
    np.put_along_axis(kept, index, np.take_along_axis(reference.widen(x), index, -1), -1)
    assert_same_bits(filtered, pydet.log_prob(kept, token))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_token_that_it_has_alone(dtype):
    """In any batch, at any place of it, in any memory, by any number of threads."""
    x, (seed, position) = data("normal", (37, 4099), DTYPES[dtype]), keys(37)
    for options in ({}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}):
        got = pydet.sample(x, seed, position, **options)
        for r in (0, 5, 36):
            alone = [t.copy() for t in (x[r], np.array(seed[r]), np.array(position[r]))]
            same(pydet.sample(*alone, **options), [part[r] for part in got])
        turn = np.random.default_rng(1).permutation(37)
        same(pydet.sample(x[turn], seed[turn], position[turn], **options), [part[turn] for part in got])
        wide = np.full((37, 5003), np.nan, DTYPES[dtype])
        wide[:, 7:4106] = x
        same(pydet.sample(wide[:, 7:4106], seed, position, **options), got)
        for count in (1, 2, 7):
            with threads(count):
                same(pydet.sample(x, seed, position, **options), got)


def test_a_seed_and_a_position_decide():
    """All 64 bits of either do; and columns have noise of their own."""
    x = np.zeros((64, 1000), np.float32)
    bits = np.int64(1) << np.arange(64, dtype=np.int64)
    for seed, position in ((bits, 0 * bits), (0 * bits, bits)):
        assert len(set(pydet.sample(x, seed, position)[0])) > 50
    words = reference_sample.philox(0, 0, np.arange(1))
    assert [f"{word:08x}" for word in words[0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]  # Random123's own
    narrow = np.int32([1, -1, 7]), np.int32([5, 6, -7])
    wide = [part.astype(np.int64) for part in narrow]
    same(pydet.sample(x[:3], *narrow), pydet.sample(x[:3], *wide))


def chi_square(counts, expected):
    """The deviation from its mean, in standard deviations, of the counts that are expected to be 5 or more."""
    rest = expected < 5
    counts = [*counts[~rest], counts[rest].sum()]
    expected = [*expected[~rest], expected[rest].sum()]
    degrees = len(counts) - 1 - (expected[-1] == 0)
    total = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e)
    assert expected[-1] or counts[-1] == 0
    return (total - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"top_k": 17}, {"top_p": 0.8}, {"min_p": 0.05}], ids=str)
def test_distribution(options):
    """A million draws, of seeds and positions that are counted up, as callers have them."""
    draws, n = 1_000_000, 61
    logits = np.random.default_rng(3).normal(0, 2, n).astype(np.float32)
    x = np.broadcast_to(logits, (draws, n))
    number = np.arange(draws)
    token = pydet.sample(x, number // 1000, number % 1000, return_log_prob=False, **options)[0]
    z = logits.astype(np.float64) / options.get("temperature", 1)
    p = np.exp(z - z.max())
    order = np.argsort(-p)
    p[order[options.get("top_k", n) :]] = 0
    if "top_p" in options:
        p[order[1 + np.searchsorted(np.cumsum(p[order]), options["top_p"] * p.sum()) :]] = 0
    p[p < options.get("min_p", 0)] = 0
    counts = np.bincount(token, minlength=n)
    assert abs(chi_square(counts, p / p.sum() * draws)) < 5
    wrong = p * np.where(np.arange(n) == order[1], 1.06, 1)  # the control: 6 % more of one
    assert chi_square(counts, wrong / wrong.sum() * draws) > 5


def test_noise_of_neighbours_is_independent():
    """Pairs of draws: at neighbouring positions, of neighbouring seeds, and in equal halves of one row."""
    n, count = 8, 200_000
    x, number = np.broadcast_to(np.zeros(n, np.float32), (count, n)), np.arange(count)
    first = pydet.sample(x, number, 0 * number)[0]
    for seed, position in ((number + 1, 0 * number), (number, 0 * number + 1)):
        pairs = first * n + pydet.sample(x, seed, position)[0]
        assert abs(chi_square(np.bincount(pairs, minlength=n * n), np.full(n * n, count / n / n))) < 5


def test_other_orders_are_refused_by_the_tests_above():
    """The controls: masses summed in another precision keep other columns; ties that go to the last are seen."""
    x, (seed, position) = np.zeros((64, 50), np.float32), keys(64)
    kept = lambda row, **options: set(
        pydet.sample(np.repeat(x[:1] if row is None else row, 4000, 0), *keys(4000), **options)[0].tolist()
    )
    assert kept(None, top_k=7) == set(range(7)) and kept(None, top_p=0.5) == set(range(25))
    assert kept(None, top_p=np.nextafter(np.float32(0.5), np.float32(1)).item()) == set(range(26))
    row = np.float32([[0, 1, 1, 0, 1, 2]])
    assert kept(row, top_k=3) == {5, 1, 2} and kept(row, top_k=5) == {5, 1, 2, 4, 0}
    assert kept(row, min_p=math.exp(-1.001)) == {5, 1, 2, 4} and kept(row, min_p=math.exp(-0.999)) == {5}
    with pytest.raises(AssertionError):
        same(pydet.sample(x, seed, position), reference_sample.sample(x, seed, position + 1))


# ---- topk ----------------------------------------------------------------------------------------------------------


def check_topk(functions, dtype, widths=WIDTHS):
    for number, n in enumerate(widths):
        kind = ("normal", "specials", "integers", "wide")[number % 4]
        x = data(kind, (3, n), DTYPES[dtype], number)
        for k in sorted({1, min(n, 2), min(n, 50), (n + 1) // 2, n}):
            got, want = functions.topk(x, k), reference_sample.topk(x, k)
            assert np.array_equal(got[1], want[1]) and got[1].dtype == np.int64, (kind, n, k)
            assert_same_bits(got[0], want[0], f"{kind} {n} {k}")


def test_topk(topk_kernel):
    check_topk(topk_kernel, topk_kernel.dtype)


def test_topk_of_a_vocabulary_and_of_equal_elements(topk_kernel):
    dtype = DTYPES[topk_kernel.dtype]
    x = data("normal", (2, 152064), dtype)
    for rows, k in ((x, 50), (x, 3000), (np.zeros_like(x), 5), (x[0], 7)):
        got, want = topk_kernel.topk(rows, k), reference_sample.topk(rows, k)
        assert np.array_equal(got[1], want[1])
        assert_same_bits(got[0], want[0])
    assert np.array_equal(topk_kernel.topk(np.zeros_like(x), 5)[1], [[0, 1, 2, 3, 4]] * 2)


FEW = (1, 2, 50, 511, 512, 513)  # of the CPU's kernel, which holds up to 2048 candidates of 512


def rows_in_order(dtype, n=5001):
    """Ascending, descending, of one value, of few values, and of nothing but -inf beside some."""
    x = np.sort(data("normal", (1, n), DTYPES[dtype]).astype(np.float32)).repeat(6, 0)
    x[1], x[2], x[3] = x[0, ::-1], 1.0, np.arange(n) % 7
    x[4:] = -np.inf
    x[4, ::9], x[5, -3:] = x[0, ::9], 1.0
    return x.astype(DTYPES[dtype])


def test_topk_of_rows_in_order(topk_kernel):
    x = rows_in_order(topk_kernel.dtype)
    for n in (513, 2047, 2049, 5001):
        for k in FEW:
            got, want = topk_kernel.topk(x[:, :n], k), reference_sample.topk(x[:, :n], k)
            assert np.array_equal(got[1], want[1]), (n, k)
            assert_same_bits(got[0], want[0], f"{n} {k}")


def test_filters_of_rows_in_order(sample_kernel):
    x = rows_in_order(sample_kernel.dtype)
    given = keys(len(x))
    for k in FEW:
        for more in ({}, {"top_p": 0.7}, {"top_p": 1e-3, "temperature": 3.0}, {"top_p": 0.99, "min_p": 0.1}):
            options = {"top_k": k, **more}
            want = reference_sample.sample(x, *given, **options)
            same(sample_kernel.sample(x, *given, **options), want, str(options))


def test_topk_given_its_results():
    x = data("normal", (4, 2, 99), np.dtype(np.float32))
    values, index = np.zeros((4, 2, 9), np.float32), np.zeros((4, 2, 9), np.int64)
    got = pydet.topk(x, 9, values=values, index=index)
    assert got[0] is values and got[1] is index and np.array_equal(index, reference_sample.topk(x, 9)[1])
    token, given = np.zeros((4, 2), np.int64), keys((4, 2))
    assert pydet.sample(x, *given, out=token)[0] is token and np.array_equal(pydet.sample(x, *given)[0], token)


# ---- Refusals ------------------------------------------------------------------------------------------------------


def test_refusals():
    x, whole = np.zeros((4, 8), np.float32), np.zeros(4, np.int64)
    vast = np.zeros((1, (1 << 23) + 1), np.float16)
    cases = [
        (lambda: pydet.sample(x, whole, whole, temperature=-1.0), "temperature is -1, want a finite number"),
        (lambda: pydet.sample(x, whole, whole, temperature=math.nan), "temperature is nan, want a finite"),
        (lambda: pydet.sample(x, whole, whole, temperature=math.inf), "temperature is inf, want a finite"),
        (lambda: pydet.sample(x, whole, whole, top_k=-1), "top_k is -1, want 0"),
        (lambda: pydet.sample(x, whole, whole, top_p=1.5), "top_p is 1.5, want a number from 0 to 1"),
        (lambda: pydet.sample(x, whole, whole, top_p=-0.5), "top_p is -0.5, want a number from 0 to 1"),
        (lambda: pydet.sample(x, whole, whole, min_p=math.nan), "min_p is nan, want a number from 0 to 1"),
        (lambda: pydet.sample(x, whole[:3], whole), "seed is 3, want 4"),
        (lambda: pydet.sample(x, whole, whole[None]), "position has 2 dimensions, want 1, one less than x"),
        (lambda: pydet.sample(x, whole.astype(np.float32), whole), "seed is float32, want int32 or int64"),
        (lambda: pydet.sample(x, whole, whole, out=np.zeros(4, np.int32)), "token is int32, want int64"),
        (lambda: pydet.sample(x, whole, whole, out=whole), "token shares memory with seed, want it apart"),
        (lambda: pydet.sample(x, whole, whole, temperature=np.zeros(3, np.float32)), "temperatures is 3, want 4"),
        (lambda: pydet.sample(x, whole, whole, top_p=np.zeros(4, np.float16)), "top_ps is float16, want float32"),
        (lambda: pydet.sample(x, whole, whole, top_k=np.zeros(4, np.int16)), "top_ks is int16, want int32 or int64"),
        (lambda: pydet.sample(x, whole, whole, return_log_prob="yes"), "return_log_prob is str, want True or False"),
        (lambda: pydet.sample(x[:, :0], whole, whole), "x is 4x0, want a last dimension of 1 to 8388608"),
        (lambda: pydet.sample(vast, whole[:1], whole[:1]), "x is 1x8388609, want a last dimension of 1 to 8388608"),
        (lambda: pydet.sample(x.T, np.zeros(8, int), np.zeros(8, int)), "x has stride 8 in its last dimension"),
        (lambda: pydet.topk(x, 0), "k is 0, want 1 to the 8 elements of a row"),
        (lambda: pydet.topk(x, 9), "k is 9, want 1 to the 8 elements of a row"),
        (lambda: pydet.topk(x, 2, values=np.zeros((4, 3), np.float32)), "index is 4x2, want 4x3"),
        (lambda: pydet.topk(x, 2, index=np.zeros((4, 2), np.int32)), "index is int32, want int64"),
        (lambda: pydet.topk(x, 8, values=x), "values shares memory with x"),
    ]
    for call, sentence in cases:
        with pytest.raises(pydet.Error) as raised:
            call()
        assert sentence in str(raised.value), str(raised.value)


def test_no_rows():
    none = np.zeros(0, np.int64)
    assert [part.shape for part in pydet.sample(np.zeros((0, 5), np.float32), none, none)] == [(0,)] * 3
    assert [part.shape for part in pydet.topk(np.zeros((0, 5), np.float32), 2)] == [(0, 2)] * 2
