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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pydet.ops import Arithmetic, fold, gemm
from pydet.torch.distributed.exchange import Group, Tensor, peer
from pydet.torch.distributed.symmetric import Peers

RANKS = 2  # over peers' memory
MOST_BYTES = 256 << 20  # of the sums in peers' memory; more are several relays
MOST_ROWS = 16384  # likewise: 32 slabs
LEAST_ROWS = 1024  # of a product whose slabs are worth their launches
SLABS = ((2048, 512), (0, 256))  # from so many rows on, of each slab; an H100's fastest of 256 to 1024
APART = 1  # of the slabs: what rank 0 ends


def cut(rows: int) -> list[slice]:
    """The slabs of so many rows."""
    each = next(each for least, each in SLABS if rows >= least)
    return [slice(begin, min(begin + each, rows)) for begin in range(0, rows, each)]


class _Relay:
    """One relay's side of this rank: `here` is its memory, `there` the other rank's, which copies write behind sums."""

    def __init__(self, peers: Peers, stream: Any, count: int) -> None:
        self.peers, self.stream, self.other = peers, stream, 1 - peers.rank
        staged = peers.staging((count,))
        self.here, self.there = staged[peers.rank], staged[self.other]
        self.flags, flags_there = peers.flags()
        self.flag, self.flag_there = self.flags.data_ptr(), flags_there.data_ptr()
        self.carrier, self.nothing = peers.carrier, peers.nothing
        peers.launch(stream, self.nothing[:1], self.nothing[1])
        self.word = peers.last_word
        signed = self.word - (1 << 64) if self.word >> 63 else self.word
        self.word_here = torch.full((1,), signed, dtype=torch.int64, device=peers.device)
        self.kept: list[Tensor] = [self.word_here]  # while copies may read it

    def bring(self, i: int, made: Tensor, to: Tensor) -> None:
        """Copies what the stream has made to `to` in the other's memory, then slab i's word. Both are contiguous."""
        self.kept.append(made)
        self.carrier.follow(self.stream)
        self.carrier.bring(made.data_ptr(), to.data_ptr(), made.numel() * made.element_size())
        self.carrier.bring(self.word_here.data_ptr(), self.flag_there + 8 * i, 8)

    def wait(self, i: int) -> None:
        """Until slab i's word is here."""
        self.peers.wait(self.stream, self.word, self.flag + 8 * i, self.other)

    def take(self, i: int, parts: Sequence[Tensor], out: Tensor, bias: Tensor | None = None) -> None:
        """The fold of parts, some of which the other brings, once slab i's word is here."""
        self.wait(i)
        self.peers.launch_awaited(self.stream, parts, out, bias, self.word, self.flag + 8 * i, self.other)

    def end(self) -> None:
        self.carrier.end(self.stream)
        self.flags.zero_()


def relay_by_peers(
    x: Tensor,
    w: Tensor,
    chunk: int,
    segments: int,
    segments_of: Callable[[Tensor], Tensor],
    arithmetic: Arithmetic,
    bias: Tensor | None,
    peers: Peers,
) -> Tensor:
    """x ``[M, k]`` times w ``[k, N]`` of two ranks; segments_of(x) are the sums of this rank's segments, apart."""
    rows, columns = x.shape[0], w.shape[1]
    out = x.new_empty(rows, columns)
    most = max(SLABS[0][1], min(MOST_ROWS, MOST_BYTES // (4 * columns)))
    for begin in range(0, rows, most):
        here = slice(begin, min(rows, begin + most))
        with torch.cuda.device(peers.device), peers.turn(1) as stream:
            run = _first if peers.rank == 0 else _second
            run(peers, stream, x[here], w, out[here], chunk, segments, segments_of, arithmetic, bias)
    return out


def _memory(
    relay: _Relay, shape: tuple[int, ...], apart: int, segments: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, ...]]:
    """Here and there: sums ``[M, N]`` in fp32, results ``[M, N]``, the segments of the last rows, slab after slab."""
    rows, columns = shape
    for memory in (relay.here, relay.there):
        sums, rest = memory[: rows * columns].view(shape), memory[rows * columns :]
        results = rest.view(dtype)[: rows * columns].view(shape)
        yield sums, results, memory[2 * rows * columns :][: segments * apart * columns]


def _segments(brought: Tensor, slab: slice, last: int, segments: int, columns: int) -> Tensor:
    rows, before = slab.stop - slab.start, segments * (slab.start - last) * columns
    return brought[before : before + segments * rows * columns].view(segments, rows, columns)


def _first(
    peers: Peers,
    stream: Any,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    chunk: int,
    segments: int,
    segments_of: Callable[[Tensor], Tensor],
    arithmetic: Arithmetic,
    bias: Tensor | None,
) -> None:
    slabs, ends, last = _plan(out)
    relay = _Relay(peers, stream, (2 * len(out) + segments * (len(out) - last)) * out.shape[1])
    (_, results, brought), (sums_there, results_there, _) = _memory(
        relay, tuple(out.shape), len(out) - last, segments, out.dtype
    )
    sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    for i, slab in enumerate(slabs):
        gemm(x[slab], w, out=sums[slab], k_chunk=chunk, arithmetic=arithmetic)
        if i < ends:
            relay.bring(i, sums[slab], sums_there[slab])
    for i, slab in enumerate(slabs[ends:], ends):
        own = _segments(brought, slab, last, segments, out.shape[1])
        relay.take(i, [sums[slab], *own.unbind()], out[slab], bias)
        relay.bring(i, out[slab], results_there[slab])
    for begin, end in _halves(ends):  # words come in the order of their slabs: the last of them says all
        here = slice(slabs[begin].start, slabs[end - 1].stop)
        relay.take(end - 1, [results[here]], out[here])
    relay.end()


def _halves(count: int) -> list[tuple[int, int]]:
    half = (count + 1) // 2
    return [(begin, end) for begin, end in ((0, half), (half, count)) if begin < end]


def _second(
    peers: Peers,
    stream: Any,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    chunk: int,
    segments: int,
    segments_of: Callable[[Tensor], Tensor],
    arithmetic: Arithmetic,
    bias: Tensor | None,
) -> None:
    slabs, ends, last = _plan(out)
    relay = _Relay(peers, stream, (2 * len(out) + segments * (len(out) - last)) * out.shape[1])
    (sums, results, _), (_, results_there, brought) = _memory(
        relay, tuple(out.shape), len(out) - last, segments, out.dtype
    )
    for i, slab in enumerate(slabs[ends:], ends):
        relay.bring(i, segments_of(x[slab]), _segments(brought, slab, last, segments, out.shape[1]))
    for i, slab in enumerate(slabs[:ends]):
        relay.wait(i)
        gemm(x[slab], w, bias=bias, out=out[slab], initial=sums[slab], k_chunk=chunk, arithmetic=arithmetic)
        relay.bring(i, out[slab], results_there[slab])
    if ends:
        relay.take(ends - 1, [out[:last]], out[:last])  # NaN, if a word did not come
    for i, slab in enumerate(slabs[ends:], ends):
        relay.take(i, [results[slab]], out[slab])
    relay.end()


def _plan(out: Tensor) -> tuple[list[slice], int, int]:
    """The slabs, how many of them rank 1 ends, and the first row of the others, which rank 0 ends."""
    slabs = cut(len(out))
    ends = max(0, len(slabs) - APART)
    return slabs, ends, slabs[ends].start if ends < len(slabs) else len(out)


def relay_by_collectives(
    x: Tensor, w: Tensor, chunk: int, arithmetic: Arithmetic, bias: Tensor | None, group: Group
) -> Tensor:
    """The same over send and receive, on every rank of the group."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    out = x.new_empty(x.shape[0], w.shape[1])
    for slab in cut(x.shape[0]):
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
