"""Random sequences of attention, each alone, and all of them packed, in pages and padded on the left: the same bits."""

import numpy as np
import pytest

import pydet
from cases import ARITHMETICS, DTYPES, assert_same_bits, data
from conftest import threads
from reference import FLOAT32


def random_sequences(seed):
    """(q, k, v) of each sequence, each [1, heads, tokens, width], and options."""
    random = np.random.default_rng(seed)
    dtype = str(random.choice(list(DTYPES)))
    groups, count = int(random.integers(1, 4)), int(random.integers(1, 5))
    heads = groups * int(random.choice([1, 2, 3, 8]))
    d, e = (576, 512) if random.integers(12) == 0 else (int(8 * random.integers(1, 33)) for _ in range(2))
    if d == 576:  # the widest, of which one took two thirds of all the time
        groups, heads = 1, min(heads // groups, 2)
    options = {
        "kv_chunk": int(128 * random.integers(1, 6)),
        "causal": bool(random.integers(2)),
        "arithmetic": str(random.choice(ARITHMETICS[dtype])),
        "return_lse": True,
    }
    if random.integers(2):
        options["window"] = (int(random.integers(0, 200)), None if random.integers(2) else int(random.integers(0, 50)))
    if random.integers(3) == 0:
        options["softcap"] = 2.0
    if random.integers(3) == 0:
        options["sinks"] = data("normal", (heads,), FLOAT32, seed)
    sequences = []
    for i in range(count):
        queries, keys = (
            int(random.choice([0, 1, 2, 5, 17, 130])),
            int(random.choice([0, 1, 5, 100, 128, 129, 513, 700])),
        )
        sizes = (heads, queries, d), (groups, keys, d), (groups, keys, e)
        sequences.append([data("normal", (1, *size), DTYPES[dtype], seed + 9 * i + j) for j, size in enumerate(sizes)])
    return sequences, options


def flat(parts):
    return np.concatenate([part[0].swapaxes(0, 1) for part in parts])


def ends_of(parts):
    return np.concatenate([[0], np.cumsum([part.shape[2] for part in parts])]).astype(np.int32)


def in_pages(parts, size, order):
    """(cache, block_table): parts [1, G, K, D] in pages of that size, in that order, among NaN."""
    _, groups, _, d = parts[0].shape
    pages = [-(-part.shape[2] // size) for part in parts]
    cache = np.full((len(order), size, groups, d), np.nan, parts[0].dtype)
    table, free = np.full((len(parts), max(*pages, 1)), -7, np.int32), iter(order)
    for s, part in enumerate(parts):
        for i in range(pages[s]):
            table[s, i] = page = next(free)
            tokens = part[0, :, i * size : (i + 1) * size].swapaxes(0, 1)
            cache[page, : len(tokens)] = tokens
    return cache, table


def padded(parts, turned=False):
    """[B, G, K, D] with NaN before the shorter ones; turned: as a view of [B, K, G, D]."""
    most = max(part.shape[2] for part in parts)
    full = np.full((len(parts), parts[0].shape[1], most, parts[0].shape[3]), np.nan, parts[0].dtype)
    for s, part in enumerate(parts):
        full[s, :, most - part.shape[2] :] = part[0]
    return np.ascontiguousarray(full.swapaxes(1, 2)).swapaxes(1, 2) if turned else full


@pytest.mark.parametrize("seed", range(60))
def test_sequences_have_the_bits_that_they_have_alone(seed):
    sequences, options = random_sequences(seed)
    random = np.random.default_rng(seed + 1000)
    q, k, v = zip(*sequences, strict=True)
    with threads(1 + seed % 3):
        alone = [pydet.attention(*sequence, **options) for sequence in sequences]
        ends, lengths = ends_of(q), np.array([part.shape[2] for part in k], np.int32)
        packed = pydet.attention_varlen(flat(q), flat(k), flat(v), ends, ends_of(k), **options)
        size = int(random.choice([1, 2, 7, 16, 64, 100]))
        order = random.permutation(sum(-(-length // size) for length in lengths) + 2)
        (k_cache, table), (v_cache, _) = (in_pages(parts, size, order) for parts in (k, v))
        paged = pydet.attention_paged(flat(q), k_cache, v_cache, table, lengths, ends, **options)
        most = max(part.shape[2] for part in q)
        left = None
        if most and lengths.max():
            first = (lengths.max() - lengths).astype(np.int32)
            left = pydet.attention(padded(q), padded(k, turned=True), padded(v), first_key=first, **options)
    for s, (want, part) in enumerate(zip(alone, q, strict=True)):
        mine, own = slice(ends[s], ends[s + 1]), slice(most - part.shape[2], None)
        for got, what in ((packed, "packed"), (paged, f"in pages of {size}")):
            for one, other in zip(got, want, strict=True):
                assert_same_bits(np.ascontiguousarray(one[mine].swapaxes(0, 1)[None]), other, f"sequence {s} {what}")
        if left and part.shape[2]:
            for one, other in zip(left, want, strict=True):
                assert_same_bits(
                    np.ascontiguousarray(one[s : s + 1, :, own]), other, f"sequence {s} padded on the left"
                )
