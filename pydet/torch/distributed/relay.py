"""A row-parallel product whose running sum is handed from rank to rank, some rows at a time, while others are made.

The ordered fold of the segments is one chain: a rank's product with ``k_chunk`` may go on where the rank before it
ended. So one fp32 sum leaves a rank, whatever the number of its segments. Rows are cut into slabs. Over peers' memory,
of two ranks:

    rank 0:  the products of slab 0, 1, 2 ...; behind each a copy engine brings its sums to rank 1, then a word; of the
             last slabs it folds its own sums and those of rank 1's segments
    rank 1:  the segments of the last slabs, each apart, for rank 0, which makes the first slabs meanwhile; then slab
             after slab, when its word has come: the product from rank 0's sums on, bias, rounding
    both:    a copy engine brings each slab's results to the other, then a word

A call begins by a meeting of the ranks (a fold of one element), which compares its terms. Where a word does not come
within the group's time limit the results are NaN, and the next call says why.

Over collectives, of any number of ranks, sums travel by send and receive: the same products, and so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pydet._native import Error
from pydet.ops import Arithmetic, fold, gemm
from pydet.torch.distributed.exchange import Group, Tensor, peer
from pydet.torch.distributed.symmetric import Peers, capturing

RANKS = 2  # over peers' memory
MOST_BYTES = 128 << 20  # of the sums in peers' memory; more are several relays
MOST_ROWS = 16384  # likewise: 32 slabs
LEAST_ROWS, LEAST_OF_ONE = 1024, 2048  # of a product whose slabs are worth their launches; of a segment a rank
SLABS = ((2048, 512), (0, 256))  # from so many rows on, of each slab; an H100's fastest of 256 to 1024
EAGER = 2  # times as many rows a slab where the host launches them one by one
APART = 1  # of the slabs: what rank 0 ends
_MOST_COURSES = 64


def slab_rows(rows: int) -> int:
    return next(each for least, each in SLABS if rows >= least)


class _Course:
    """Where the slabs of relays of one shape lie, in this rank's memory and in the other's, which copies write behind
    sums; made once, since the views of a relay take the host as long as its launches.

    Of an output ``[M, N]`` in slabs of `each` rows rank 1 ends the first `ends`, and rank 0 those from row `last`
    on. Memory holds sums ``[M, N]`` in fp32, results ``[M, N]``, and the segments of the last rows, slab after slab.
    """

    def __init__(
        self, peers: Peers, rows: int, columns: int, dtype: torch.dtype, segments: int, each: int, apart: int
    ) -> None:
        self.each, self.count = each, -(-rows // each)
        self.ends = max(0, self.count - apart)
        self.last = min(rows, self.ends * each)
        size = rows * columns
        made = -(-size * dtype.itemsize // 16) * 4  # words of results
        staged = peers.staging((size + made + segments * (rows - self.last) * columns,))
        self.staged = peers.staged
        here, there = staged[peers.rank], staged[1 - peers.rank].data_ptr()
        sums, rest, brought = here.split((size, made, len(here) - size - made))
        self.sums = sums.view(rows, columns).split(each)
        results = rest.view(dtype)[:size].view(rows, columns)
        # Results that a rank waits for at a time: their words come in order, so the last of them says all.
        half, ends = (self.ends + 1) // 2, self.ends
        of_first, of_second = ((0, half), (half, ends - 1), (max(half, ends - 1), ends)), ((ends, self.count),)
        spans = [(a, b) for a, b in (of_second if peers.rank else of_first) if a < b]
        self.results = [(b - 1, a * each, min(rows, b * each), results[a * each : b * each]) for a, b in spans]
        self.sums_there = [there + 4 * i * each * columns for i in range(self.count)]
        bytes_of_row = columns * results.element_size()
        self.results_there = [there + 4 * size + i * each * bytes_of_row for i in range(self.count)]
        starts = [segments * (i * each - self.last) * columns for i in range(self.count)]
        self.segments_there = [there + 4 * (size + made + start) for start in starts]
        self.segments: dict[int, tuple[Tensor, ...]] = {}  # of the last slabs: what the other rank has brought
        for i in range(self.ends, self.count):
            high = min(rows, (i + 1) * each) - i * each
            part = brought[starts[i] : starts[i] + segments * high * columns]
            self.segments[i] = part.view(segments, high, columns).unbind()
        self.flags, flags_there = peers.flags()
        self.flag, self.flag_there = self.flags.data_ptr(), flags_there.data_ptr()


class _Relay:
    """One relay's side of this rank."""

    def __init__(self, peers: Peers, stream: Any, course: _Course, captured: bool) -> None:
        self.peers, self.stream, self.other, self.course = peers, stream, 1 - peers.rank, course
        self.carrier = peers.carrier
        peers.meet(stream, 1 + captured)  # ranks that cut otherwise disagree: one of them is under capture
        peers.relays, self.word = True, peers.last_word
        signed = self.word - (1 << 64) if self.word >> 63 else self.word
        self.word_here = torch.full((1,), signed, dtype=torch.int64, device=peers.device)
        self.word_at = self.word_here.data_ptr()
        self.kept: list[Tensor] = [self.word_here]  # while copies may read it

    def bring(self, i: int, made: Tensor, to: int) -> None:
        """Copies what the stream has made to an address in the other's memory, then slab i's word."""
        self.kept.append(made)
        self.carrier.follow(self.stream)
        self.carrier.bring(made.data_ptr(), to, made.numel() * made.element_size())
        self.carrier.bring(self.word_at, self.course.flag_there + 8 * i, 8)

    def wait(self, i: int) -> None:
        """Until slab i's word is here."""
        self.peers.wait(self.stream, self.word, self.course.flag + 8 * i, self.other)

    def take(self, i: int, parts: Sequence[Tensor], out: Tensor, bias: Tensor | None = None) -> None:
        """The fold of parts, some of which the other brings, once slab i's word is here."""
        self.wait(i)
        self.peers.launch_awaited(self.stream, parts, out, bias, self.word, self.course.flag + 8 * i, self.other)

    def end(self, out: Tensor) -> None:
        """The other rank's results, and the end of this one's copies."""
        for i, begin, end, results in self.course.results:
            self.take(i, [results], out[begin:end])
        self.carrier.end(self.stream)
        self.course.flags.zero_()


def _course(peers: Peers, rows: int, columns: int, dtype: torch.dtype, segments: int, captured: bool) -> _Course:
    """Inside of the group's turn."""
    each = slab_rows(rows) * (1 if captured else EAGER)
    key = rows, columns, dtype, segments, each, APART
    course = peers.courses.get(key)
    if course is None or course.staged is not peers.staged:  # memory grew meanwhile
        if len(peers.courses) >= _MOST_COURSES:
            peers.courses.clear()
        course = peers.courses[key] = _Course(peers, *key)
    return course


def _most_rows(columns: int) -> int:
    """Of one relay: a larger product is several."""
    return max(EAGER * SLABS[0][1], min(MOST_ROWS, MOST_BYTES // (4 * columns)))


def reserve(peers: Peers, rows: int, columns: int, dtype: torch.dtype, segments: int) -> bool:
    """Memory for relays of such a product, under capture too, where none can be made. Every rank asks for the same;
    False where there is none."""
    try:
        with torch.cuda.device(peers.device), peers.turn(1):
            for captured in (False, True):
                _course(peers, min(rows, _most_rows(columns)), columns, dtype, segments, captured)
    except Error:
        peers.relaying = False
    return peers.relaying


def relay_by_peers(
    x: Tensor,
    w: Tensor,
    chunk: int,
    segments: int,
    segments_of: Callable[[Tensor], Tensor],
    arithmetic: Arithmetic,
    bias: Tensor | None,
    peers: Peers,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """x ``[M, k]`` times w ``[k, N]`` of two ranks; segments_of(x) are the sums of this rank's segments, apart.

    meanwhile: launches what needs no result of this; it runs before the wait for the other rank's last ones.
    """
    rows, columns = x.shape[0], w.shape[1]
    out = x.new_empty(rows, columns)
    most, captured = _most_rows(columns), capturing()
    for begin in range(0, rows, most):
        here = slice(begin, min(rows, begin + most))
        xs, outs = (x, out) if rows <= most else (x[here], out[here])
        with torch.cuda.device(peers.device), peers.turn(1) as stream:
            course = _course(peers, len(outs), columns, out.dtype, segments, captured)
            relay = _Relay(peers, stream, course, captured)
            how: dict[str, Any] = {"k_chunk": chunk, "arithmetic": arithmetic}
            if peers.rank == 0:
                _first(relay, xs, w, outs, bias, how)
            else:
                _second(relay, xs, w, outs, bias, how, segments_of)
            try:
                if meanwhile is not None and here.stop == rows:
                    meanwhile()
            finally:
                relay.end(outs)
    return out


def _first(relay: _Relay, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, how: dict[str, Any]) -> None:
    course = relay.course
    own, outs = torch.empty(out.shape, dtype=torch.float32, device=out.device), out.split(course.each)
    sums = own.split(course.each)
    for i, slab in enumerate(x.split(course.each)):
        gemm(slab, w, out=sums[i], **how)
        if i < course.ends:
            relay.bring(i, sums[i], course.sums_there[i])
    for i in range(course.ends, course.count):
        relay.take(i, [sums[i], *course.segments[i]], outs[i], bias)
        relay.bring(i, outs[i], course.results_there[i])


def _second(
    relay: _Relay,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None,
    how: dict[str, Any],
    segments_of: Callable[[Tensor], Tensor],
) -> None:
    course = relay.course
    xs, outs = x.split(course.each), out.split(course.each)
    for i in range(course.ends, course.count):
        relay.bring(i, segments_of(xs[i]), course.segments_there[i])
    for i in range(course.ends):
        relay.wait(i)
        gemm(xs[i], w, bias=bias, out=outs[i], initial=course.sums[i], **how)
        relay.bring(i, outs[i], course.results_there[i])
    if course.ends:
        done = out[: course.last]
        relay.take(course.ends - 1, [done], done)  # NaN, if a word did not come


def relay_by_collectives(
    x: Tensor, w: Tensor, chunk: int, arithmetic: Arithmetic, bias: Tensor | None, group: Group
) -> Tensor:
    """The same over send and receive, on every rank of the group."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    out = x.new_empty(x.shape[0], w.shape[1])
    each = slab_rows(x.shape[0])
    for begin in range(0, x.shape[0], each):
        slab = slice(begin, begin + each)
        running = torch.zeros(out[slab].shape, dtype=torch.float32, device=out.device)
        if rank:
            dist.recv(running, peer(group, rank - 1), group=group)
        gemm(x[slab], w, out=running, accumulate=True, k_chunk=chunk, arithmetic=arithmetic)
        if rank + 1 < world:
            dist.send(running, peer(group, rank + 1), group=group)
        else:
            fold([running], bias=bias, out=out[slab])
    dist.broadcast(out, peer(group, world - 1), group=group)
    return out
