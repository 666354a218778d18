"""Folds with peers on a machine without a GPU: each rank's launches run in threads of their own (emulated/).

What ranks do that agree, that do not, that come late and that launch twice at a time. PYDET_LIBRARY names the library
that `make cuda-emulated` links.
"""

import ctypes
import itertools
import os
import threading
import time

import numpy as np
import pytest

import pydet
from capi import Tensor, ffi, last_error, lib, options, random

pytestmark = pytest.mark.skipif(
    "emulated" not in os.environ.get("PYDET_LIBRARY", ""), reason="PYDET_LIBRARY is not that of make cuda-emulated"
)

DISAGREES, LATE, LEFT = lib.PYDET_FOLD_DISAGREES, lib.PYDET_FOLD_LATE, lib.PYDET_FOLD_LEFT
KERNELS = ["cuda_fold_one_shot", "cuda_fold_two_shot"]
STREAM = "cuda_fold_stream"


@pytest.fixture(autouse=True)
def blocks_in_order():
    """Blocks of ranks that wait for each other start as a GPU starts them."""
    in_order = ctypes.CDLL(os.environ["PYDET_LIBRARY"]).emulated_in_order
    in_order(1)
    yield
    in_order(0)


class Ranks:
    """The memory of so many ranks, and their calls."""

    def __init__(self, count, parts):
        self.count, self.size = count, lib.PYDET_FOLD_SIGNALS + (parts + count) * lib.PYDET_FOLD_ROOM
        self.memory = [np.full(self.size // 8 + 1, 0x7F7F7F7F7F7F7F7F, np.uint64) for _ in range(count)]
        at = [m.ctypes.data + m.ctypes.data % 16 for m in self.memory]
        self.addresses = ffi.new("void *[]", [ffi.cast("void *", address) for address in at])
        self.signals = [m[m.ctypes.data % 16 // 8 :][: lib.PYDET_FOLD_SIGNALS // 8] for m in self.memory]
        self.faults = [np.zeros(lib.PYDET_FOLD_FAULT, np.uint64) for _ in range(count)]
        self.reset()

    def reset(self):
        for words in self.signals + self.faults:
            words[...] = 0

    def said(self, rank):
        """The words that the ranks came with, as this one knows them."""
        return [int(word) for word in self.signals[rank][-lib.PYDET_FOLD_RANKS :][: self.count]]

    def fold(self, rank, parts, out, word=0, wait_ms=20000, order=0, accumulate=0, kernel=None, bias=None, **peers):
        given = options(
            "pydet_fold_peers",
            ranks=self.count,
            rank=rank,
            timeout_ms=wait_ms,
            memory=self.addresses,
            memory_size=self.size,
            word=word,
            fault=ffi.cast("uint64_t *", self.faults[rank].ctypes.data),
            **peers,
        )
        of_gpu = lambda array: Tensor(array, device=(2, 0))
        tensors = [of_gpu(part) for part in parts]
        pointers = ffi.new("const pydet_tensor *[]", [t.c for t in tensors])
        into, addend = of_gpu(out), None if bias is None else of_gpu(bias)
        asked = {"kernel": kernel} if kernel else {}
        asked = options("pydet_fold_options", order=order, accumulate=accumulate, peers=given, **asked)
        status = lib.pydet_fold(ffi.NULL, pointers, len(parts), addend.c if addend else ffi.NULL, into.c, asked)
        assert status == 0, last_error()

    def all(self, call):
        """call(rank) of each in a thread of its own."""
        problems = []

        def run(rank):
            try:
                call(rank)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def kinds(self):
        return [int(words[0]) for words in self.faults]


def folded(ranks, parts, kernel=None, order="ordered", word=1, dtype="float32", bias=None):
    """What each rank gets of parts [ranks * own, n]."""
    own, n = len(parts) // ranks.count, parts.shape[1]
    outs = [np.full(n, 7, dtype) for _ in range(ranks.count)]
    mine = lambda rank: list(parts[rank * own : (rank + 1) * own])
    tree = {"ordered": 0, "tree": 1}[order]
    ranks.all(lambda rank: ranks.fold(rank, mine(rank), outs[rank], word, kernel=kernel, order=tree, bias=bias))
    return outs


def right(ranks, parts, **how):
    want = pydet.fold(parts, order=how.get("order", "ordered"), bias=how.get("bias"))
    for rank, out in enumerate(folded(ranks, parts, **how)):
        assert out.tobytes() == want.tobytes(), f"rank {rank} of {ranks.count}: {parts.shape} {how}"
    assert ranks.kinds() == [0] * ranks.count


def right_by_first_sums(ranks, own, n, kernel):
    """The same of `own` parts a rank, where rank 0 gives the sum of its own."""
    parts, bias = random((ranks.count * own, n), seed=n), random((n,), seed=1)
    outs = [np.full(n, 7, np.float16) for _ in range(ranks.count)]
    mine = lambda r: [pydet.fold(parts[:own])] if r == 0 else list(parts[r * own : (r + 1) * own])
    ranks.all(lambda r: ranks.fold(r, mine(r), outs[r], 1, kernel=kernel, bias=bias, first_sums=own))
    want = pydet.fold(parts, bias=bias, out_dtype="float16").tobytes()
    assert all(out.tobytes() == want for out in outs), f"{own} parts of {n}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_fold_to_the_bits_of_one_fold(count, kernel):
    ranks = Ranks(count, 4 * count)
    for own, n, order in itertools.product((1, 3, 4), (1, 7, 1000, 4096, 25025), ("ordered", "tree")):
        right(ranks, random((count * own, n), seed=n), kernel=kernel, order=order, bias=random((n,), seed=1))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("count", [2, 3])
def test_sums_of_several_rounds(count, kernel):
    """Blocks come with several units in several rounds, aligned and not; with small folds between, of few blocks."""
    ranks, rooms = Ranks(count, count), lib.PYDET_FOLD_BLOCKS * 3 * 1024
    for n in (rooms, 2 * rooms + 4, 3 * rooms - 5, 9):
        right(ranks, random((count, n), seed=n), kernel=kernel)
        right(ranks, random((count, 1025), seed=n), kernel=kernel)


@pytest.mark.parametrize("rows, columns", [(3, 1), (12, 1024), (15, 77)])
def test_shares(rows, columns, count=3):
    ranks, parts, each = Ranks(count, 2 * count), random((2 * count, rows, columns)), rows // count
    want = pydet.fold(parts)
    scattered = [np.zeros((each, columns), np.float32) for _ in range(count)]
    ranks.all(lambda r: ranks.fold(r, list(parts[2 * r : 2 * r + 2]), scattered[r], 1, scatter=1))
    assert np.concatenate(scattered).tobytes() == want.tobytes()
    whole = [np.zeros((rows, columns), np.float32) for _ in range(count)]
    rows_of = lambda r: [np.ascontiguousarray(part[r * each : (r + 1) * each]) for part in parts]
    ranks.all(lambda r: ranks.fold(r, rows_of(r), whole[r], 2, gathered=1))
    assert all(out.tobytes() == want.tobytes() for out in whole)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_rank_0_may_give_the_sum_of_its_parts(count, kernel):
    """As a product with k_chunk makes it: small shares, none, several rounds, aligned and not."""
    ranks = Ranks(count, 4 * count)
    for own, n in itertools.product((1, 3, 4), (1, 1025, 4096, 400004)):
        right_by_first_sums(ranks, own, n, kernel)
    scattered, each = [np.zeros((5, 77), np.float32) for _ in range(count)], 5
    parts = random((2 * count, 5 * count, 77))
    mine = lambda r: [pydet.fold(parts[:2])] if r == 0 else list(parts[2 * r : 2 * r + 2])
    ranks.all(lambda r: ranks.fold(r, mine(r), scattered[r], 1, scatter=1, first_sums=2))
    assert np.concatenate(scattered).tobytes() == pydet.fold(parts).tobytes(), each
    assert ranks.kinds() == [0] * count


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_stream_folds_to_the_bits_of_one_fold(count):
    """Of one unit a block, several chunks, several launches, aligned and not; small folds between."""
    room = lib.PYDET_FOLD_BLOCKS * 1024
    for own, n in ((1, 1), (4, 7), (3, 1025), (1, 4096), (4, 2 * room + 4), (1, (21 if count == 2 else 13) * room - 3)):
        ranks = Ranks(count, own * count)
        right(ranks, random((count * own, n), seed=n), kernel=STREAM, bias=random((n,), seed=1), word=n)
        right(ranks, random((count, 1025), seed=n), kernel=KERNELS[n % 2])
    ranks = Ranks(count, 4 * count)
    for own, n in ((4, 1025), (3, 400004)):
        right_by_first_sums(ranks, own, n, STREAM)
    assert ranks.kinds() == [0] * count


def test_sums_of_other_counts_are_seen():
    ranks, outs = Ranks(2, 8), [np.zeros(3000, np.float32) for _ in range(2)]
    parts = lambda r: list(random((1 if r == 0 else 2, 3000)))
    ranks.all(lambda r: ranks.fold(r, parts(r), outs[r], 1, first_sums=4 if r == 0 else 2))
    assert all(np.isnan(out).all() for out in outs) and ranks.kinds() == [DISAGREES] * 2


# ---- What another rank brings --------------------------------------------------------------------------------------


def awaited(ranks, parts, out, flag, word=5, bias=None, **how):
    at = ffi.cast("const uint64_t *", flag.ctypes.data)
    ranks.fold(1, parts, out, word, bias=bias, flag=at, **{"from": 0}, **how)


@pytest.mark.parametrize("n", [1, 6, 8, 1000, 40004])
def test_a_rank_waits_for_what_another_brings(n):
    ranks, flag, parts, bias = Ranks(2, 2), np.zeros(1, np.uint64), random((5, n)), random((n,), seed=3)
    out, brought = np.zeros(n, np.float16), parts.copy()
    brought[0] = np.nan
    waits = threading.Thread(target=awaited, args=(ranks, list(brought), out, flag), kwargs={"bias": bias})
    waits.start()
    time.sleep(0.1)
    assert not out.any()
    brought[0] = parts[0]
    flag[0] = 5
    waits.join()
    assert out.tobytes() == pydet.fold(parts, bias=bias, out_dtype="float16").tobytes()
    copied, made = np.zeros(n, np.float16), np.arange(n, dtype=np.float16) - np.float16(0)
    made[0] = -0.0
    awaited(ranks, [made], copied, flag)
    awaited(ranks, [copied], copied, flag)
    assert copied.tobytes() == made.tobytes() and flag[0] == 5 and ranks.kinds() == [0, 0]
    singles, copied = made.astype(np.float32), np.zeros(n, np.float32)
    awaited(ranks, [singles], copied, flag)
    assert copied.tobytes() == singles.tobytes()


@pytest.mark.parametrize("what", ["late", "another word", "failed"])
def test_nan_where_it_does_not_come(what):
    ranks, flag, out = Ranks(2, 2), np.zeros(1, np.uint64), np.zeros(3000, np.float16)
    if what == "another word":
        flag[0] = 6
    if what == "failed":
        ranks.all(lambda r: ranks.fold(r, [np.zeros(9, np.float32)], np.zeros(9, np.float32), r))
    for made in ([random((3000,))], [np.ones(3000, np.float16)], [out]):
        awaited(ranks, made, out, flag, wait_ms=300)
        assert np.isnan(out).all()
        out[...] = 0
    kind, other = map(int, ranks.faults[1])
    assert kind == {"late": LATE, "another word": DISAGREES, "failed": DISAGREES}[what] and other == 0
    outs = [np.zeros(50, np.float32) for _ in range(2)]
    ranks.all(lambda r: ranks.fold(r, [np.ones(50, np.float32)], outs[r], 7))
    assert all(np.isnan(x).all() for x in outs), "the other rank did not hear of it"
    ranks.reset()
    right(ranks, random((2, 500)))


def test_what_is_awaited_is_refused_with_other_things():
    ranks, flag, out = Ranks(2, 8), np.zeros(2, np.uint64), np.zeros(8, np.float32)
    for how, sentence in (
        ({"word": 0}, "peers.flag is given with word 0"),
        ({"gathered": 1}, "gathered 1"),
        ({"first_sums": 1}, "first_sums 1"),
        ({"order": 1}, "peers.flag is given, want ordered sums"),
        ({"accumulate": 1}, "peers.flag is given, want ordered sums"),
        ({"parts": [np.zeros(8, np.float16)]}, r"parts[0] is float16, want float32 or out's float32"),
        ({"parts": [np.zeros(8, np.float16)] * 2}, "parts[0] is float16, want float32"),
    ):
        how = dict(how)
        with pytest.raises(AssertionError) as refused:
            awaited(ranks, how.pop("parts", [np.zeros(8, np.float32)]), out, flag, **how)
        assert sentence in str(refused.value), refused.value


# ---- Ranks that disagree -------------------------------------------------------------------------------------------

PAIRS = {  # what rank 0 has, and the last rank: (parts, n, word, options)
    "shapes of as many elements": ((1, (8, 64), 5, {}), (1, (4, 128), 6, {})),
    "sizes": ((1, (1000,), 5, {}), (1, (1004,), 5, {})),
    "blocks": ((1, (9,), 5, {}), (1, (200000,), 5, {})),
    "blocks the other way": ((2, (200000,), 5, {}), (2, (9,), 5, {})),
    "counts": ((1, (64,), 5, {}), (2, (64,), 5, {})),
    "orders": ((2, (64,), 5, {}), (2, (64,), 5, {"order": 1})),
    "accumulate": ((1, (64,), 5, {}), (1, (64,), 5, {"accumulate": 1})),
    "kernels": ((1, (4096,), 5, {"kernel": KERNELS[0]}), (1, (4096,), 5, {"kernel": KERNELS[1]})),
    "types": ((1, (64,), 5, {}), (1, (64,), 5, {"dtype": "float16"})),
    "a stream and another": ((1, (4096,), 5, {"kernel": STREAM}), (1, (4096,), 5, {"kernel": KERNELS[1]})),
    "streams of sizes": ((1, (800000,), 5, {"kernel": STREAM}), (1, (800,), 5, {"kernel": STREAM})),
    "streams the other way": ((2, (800,), 5, {"kernel": STREAM}), (2, (800000,), 5, {"kernel": STREAM})),
    "words of streams": ((1, (800000,), 5, {"kernel": STREAM}), (1, (800000,), 6, {"kernel": STREAM})),
    "words": ((1, (64,), 5, {}), (1, (64,), 6, {})),
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", PAIRS)
def test_ranks_that_disagree_hear_of_it_at_once(name, count):
    """NaN on all of them and the reason, as soon as all have come; then on, until the signals are zeros again."""
    first, other = PAIRS[name]
    ranks = Ranks(count, 2 * count)
    right(ranks, random((count, 300)))
    outs, start = [None] * count, time.monotonic()

    def call(rank):
        own, shape, word, how = other if rank == count - 1 else first
        how = dict(how)
        outs[rank] = np.zeros(shape, how.pop("dtype", "float32"))
        ranks.fold(rank, [random(shape, seed=rank + i) for i in range(own)], outs[rank], word, wait_ms=60000, **how)

    ranks.all(call)
    assert time.monotonic() - start < 30
    assert all(np.isnan(out.astype(np.float32)).all() for out in outs), [int(np.isnan(out).sum()) for out in outs]
    assert ranks.kinds() == [DISAGREES] * count
    for rank in range(count):
        assert int(ranks.faults[rank][1]) == count - 1 if rank < count - 1 else int(ranks.faults[rank][1]) < count - 1
        assert ranks.said(rank) == [first[2]] * (count - 1) + [other[2]]
    again = folded(ranks, random((count, 500)))
    assert all(np.isnan(out).all() for out in again), "a fold went on after a failure"
    ranks.reset()
    for n in (500, 30000, 500):
        right(ranks, random((count, n)))


def test_a_rank_that_does_not_come(count=3):
    """The others end at the limit; it hears of that when it comes, and so does who waits for it."""
    ranks = Ranks(count, count)
    right(ranks, random((count, 3000)))
    outs, start = [np.zeros(3000, np.float32) for _ in range(count)], time.monotonic()
    ranks.all(lambda r: r < 2 and ranks.fold(r, [outs[2]], outs[r], 9, wait_ms=500))
    assert time.monotonic() - start < 20
    assert all(np.isnan(out).all() for out in outs[:2]) and not outs[2].any()
    assert sorted(ranks.kinds()[:2]) in ([LATE, LATE], [LATE, LEFT])
    late = ranks.kinds().index(LATE)
    assert int(ranks.faults[late][1]) == 2
    ranks.fold(2, [np.zeros(3000, np.float32)], outs[2], 9, wait_ms=60000)
    assert np.isnan(outs[2]).all() and ranks.kinds()[2] == LEFT and int(ranks.faults[2][1]) < 2
    ranks.reset()
    right(ranks, random((count, 3000)))


# ---- Several launches at a time --------------------------------------------------------------------------------------


def run_streams(ranks, rng, *, streams, calls, own=1, most=9000, pause=0.01, left_out=0.0, **how):
    """Calls on each rank in streams that do not wait for each other, some left out; how many were whole, by rank.

    What is not NaN must be right, and where there is NaN there must be a reason. Blocks meet alone, so of a launch that
    finds the ranks apart some may have ended well before.
    """
    sizes = rng.integers(1, most, (streams, calls)).tolist()
    pauses, gone = (rng.random((ranks.count, streams, calls)) for _ in range(2))
    wrong, whole = [], []

    def run(rank, stream):
        for i, n in enumerate(sizes[stream]):
            time.sleep(pauses[rank, stream, i] * pause)
            if gone[rank, stream, i] < left_out:
                continue
            word = 1000 * stream + i + 1
            parts, out = random((ranks.count * own, n), seed=word), np.zeros(n, np.float32)
            ranks.fold(rank, list(parts[rank * own :][:own]), out, word, **how)
            there = ~np.isnan(out)
            if out[there].tobytes() != pydet.fold(parts)[there].tobytes():
                wrong.append((rank, stream, i, "other bits"))
            if not there.all() and not ranks.kinds()[rank]:
                wrong.append((rank, stream, i, "NaN without a reason"))
            if there.all():
                whole.append(rank)

    where = itertools.product(range(ranks.count), range(streams))
    threads = [threading.Thread(target=run, args=each) for each in where]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    return [whole.count(rank) for rank in range(ranks.count)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kernel", [*KERNELS, STREAM])
def test_two_launches_at_a_time_are_ordered_or_refused(kernel, seed):
    """As of a graph's replay beside another stream."""
    ranks = Ranks(2, 2)
    whole = run_streams(ranks, np.random.default_rng(seed), streams=2, calls=25, kernel=kernel)
    assert ranks.kinds() in ([0, 0], [DISAGREES] * 2) and (whole == [50, 50] or all(ranks.kinds()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel", [*KERNELS, STREAM])
def test_ranks_that_are_late_or_leave_a_call_out(kernel, seed):
    rng = np.random.default_rng(seed)
    ranks = Ranks(count := int(rng.integers(2, 5)), 2 * count)
    how = {"own": int(rng.integers(1, 3)), "wait_ms": int(rng.integers(20, 300)), "kernel": kernel}
    run_streams(ranks, rng, streams=1 + seed % 2, calls=10, most=14000, pause=0.02, left_out=0.01, **how)


@pytest.mark.parametrize("kernel", [*KERNELS, STREAM])
def test_a_launch_that_waited_does_not_hide_why_the_one_ahead_stopped(kernel):
    """The other rank may not have looked yet: after a later meeting's signal it would take its own for met."""
    ranks, parts = Ranks(2, 2), random((2, 700), seed=1)
    outs = [np.zeros(700, np.float32) for _ in range(3)]
    call = lambda rank, word, out: ranks.fold(rank, [parts[rank]], out, word, kernel=kernel)
    ahead, behind = (threading.Thread(target=call, args=(0, 1 + i, outs[i])) for i in range(2))
    for thread in ahead, behind:
        thread.start()
        time.sleep(0.3)
    call(1, 2, outs[2])
    ahead.join()
    behind.join()
    assert ranks.kinds() == [DISAGREES] * 2 and np.isnan(outs).all()
    assert int(ranks.signals[1][0]) >> 32 == 1, "rank 0 came to a second meeting"


def test_a_launch_waits_for_the_one_ahead():
    """A replay waits in the middle for a peer that is late; an eager call of this rank comes meanwhile, and is next."""
    ranks, parts = Ranks(2, 2), [random((2, 700), seed=i) for i in range(2)]
    outs = [[np.zeros(700, np.float32) for _ in range(2)] for _ in range(2)]
    call = lambda rank, i: ranks.fold(rank, [parts[i][rank]], outs[i][rank], i + 1)
    ahead, behind = (threading.Thread(target=call, args=(0, i)) for i in range(2))
    ahead.start()
    time.sleep(0.3)
    behind.start()
    time.sleep(0.3)
    assert not outs[0][0].any() and not outs[1][0].any()
    call(1, 0)
    call(1, 1)
    ahead.join()
    behind.join()
    for i in range(2):
        want = pydet.fold(parts[i])
        assert all(out.tobytes() == want.tobytes() for out in outs[i])
    assert ranks.kinds() == [0, 0]
