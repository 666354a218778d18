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

from pydet.ops import Arithmetic, fold, gemm
from pydet.torch.distributed.exchange import Group, Tensor, peer
from pydet.torch.distributed.symmetric import Peers, capturing

RANKS = 2  # over peers' memory
MOST_BYTES = 256 << 20  # of the sums in peers' memory; more are several relays
MOST_ROWS = 16384  # likewise: 32 slabs
LEAST_ROWS = 1024  # of a product whose slabs are worth their launches
SLABS = ((2048, 512), (0, 256))  # from so many rows on, of each slab; an H100's fastest of 256 to 1024
EAGER = 2  # times as many rows a slab where the host launches them one by one
APART = 1  # of the slabs: what rank 0 ends


def slab_rows(rows: int) -> int:
    return next(each for least, each in SLABS if rows >= least)


class _Relay:
    """One relay's side of this rank: `here` is its memory, `there` the other rank's, which copies write behind sums.

    Of an output ``[M, N]`` in slabs of `each` rows rank 1 ends the first `ends`, and rank 0 those from row `last`
    on. Memory holds sums ``[M, N]`` in fp32, results ``[M, N]``, and the segments of the last rows, slab after slab.
    """

    def __init__(self, peers: Peers, stream: Any, out: Tensor, segments: int) -> None:
        self.peers, self.stream, self.other = peers, stream, 1 - peers.rank
        (rows, self.columns), captured = out.shape, capturing()
        self.each = slab_rows(rows) * (1 if captured else EAGER)
        self.count = -(-rows // self.each)
        self.ends = max(0, self.count - APART)
        self.last, self.segments = min(rows, self.ends * self.each), segments
        size = rows * self.columns
        staged = peers.staging((2 * size + segments * (rows - self.last) * self.columns,))
        here, self.there = staged[peers.rank], staged[self.other].data_ptr()
        self.sums, rest, self.segments_here = here.split((size, size, len(here) - 2 * size))
        self.sums, self.results = self.sums.view(out.shape), rest.view(out.dtype)[:size].view(out.shape)
        self.results_there, self.segments_there = self.there + 4 * size, self.there + 8 * size
        self.flags, flags_there = peers.flags()
        self.flag, self.flag_there = self.flags.data_ptr(), flags_there.data_ptr()
        self.carrier = peers.carrier
        # Ranks that cut otherwise disagree here: one of them is under capture.
        meeting = peers.nothing[:, : 1 + captured]
        peers.launch(stream, meeting[:1], meeting[1])
        self.word = peers.last_word
        signed = self.word - (1 << 64) if self.word >> 63 else self.word
        self.word_here = torch.full((1,), signed, dtype=torch.int64, device=peers.device)
        self.word_at = self.word_here.data_ptr()
        self.kept: list[Tensor] = [self.word_here]  # while copies may read it

    def slabs(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(self.each)

    def bring(self, i: int, made: Tensor, to: int) -> None:
        """Copies what the stream has made to an address in the other's memory, then slab i's word."""
        self.kept.append(made)
        self.carrier.follow(self.stream)
        self.carrier.bring(made.data_ptr(), to, made.numel() * made.element_size())
        self.carrier.bring(self.word_at, self.flag_there + 8 * i, 8)

    def bring_sums(self, i: int, made: Tensor) -> None:
        self.bring(i, made, self.there + 4 * i * self.each * self.columns)

    def bring_results(self, i: int, made: Tensor) -> None:
        self.bring(i, made, self.results_there + made.element_size() * i * self.each * self.columns)

    def bring_segments(self, i: int, made: Tensor) -> None:
        before = self.segments * (i * self.each - self.last) * self.columns
        self.bring(i, made, self.segments_there + 4 * before)

    def segments_of(self, i: int, rows: int) -> Tensor:
        """What the other rank has brought by that."""
        before, size = self.segments * (i * self.each - self.last) * self.columns, self.segments * rows * self.columns
        return self.segments_here[before : before + size].view(self.segments, rows, self.columns)

    def wait(self, i: int) -> None:
        """Until slab i's word is here."""
        self.peers.wait(self.stream, self.word, self.flag + 8 * i, self.other)

    def take(self, i: int, parts: Sequence[Tensor], out: Tensor, bias: Tensor | None = None) -> None:
        """The fold of parts, some of which the other brings, once slab i's word is here."""
        self.wait(i)
        self.peers.launch_awaited(self.stream, parts, out, bias, self.word, self.flag + 8 * i, self.other)

    def take_results(self, out: Tensor, first: int, end: int) -> None:
        """Those of slabs `first` to `end`: their words come in order, so the last of them says all."""
        if first < end:
            here = slice(first * self.each, end * self.each)
            self.take(end - 1, [self.results[here]], out[here])

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
    most = max(EAGER * SLABS[0][1], min(MOST_ROWS, MOST_BYTES // (4 * columns)))
    for begin in range(0, rows, most):
        here = slice(begin, min(rows, begin + most))
        with torch.cuda.device(peers.device), peers.turn(1) as stream:
            relay = _Relay(peers, stream, out[here], segments)
            how: dict[str, Any] = {"k_chunk": chunk, "arithmetic": arithmetic}
            if peers.rank == 0:
                _first(relay, x[here], w, out[here], bias, how)
            else:
                _second(relay, x[here], w, out[here], bias, how, segments_of)
    return out


def _first(relay: _Relay, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, how: dict[str, Any]) -> None:
    ends, own, outs = relay.ends, torch.empty(out.shape, dtype=torch.float32, device=out.device), relay.slabs(out)
    sums = relay.slabs(own)
    for i, slab in enumerate(relay.slabs(x)):
        gemm(slab, w, out=sums[i], **how)
        if i < ends:
            relay.bring_sums(i, sums[i])
    for i in range(ends, relay.count):
        relay.take(i, [sums[i], *relay.segments_of(i, len(outs[i])).unbind()], outs[i], bias)
        relay.bring_results(i, outs[i])
    half = (ends + 1) // 2
    relay.take_results(out, 0, half)
    relay.take_results(out, half, ends)
    relay.end()


def _second(
    relay: _Relay,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None,
    how: dict[str, Any],
    segments_of: Callable[[Tensor], Tensor],
) -> None:
    ends, xs, outs, sums = relay.ends, relay.slabs(x), relay.slabs(out), relay.slabs(relay.sums)
    for i in range(ends, relay.count):
        relay.bring_segments(i, segments_of(xs[i]))
    for i in range(ends):
        relay.wait(i)
        gemm(xs[i], w, bias=bias, out=outs[i], initial=sums[i], **how)
        relay.bring_results(i, outs[i])
    if ends:
        done = out[: relay.last]
        relay.take(ends - 1, [done], done)  # NaN, if a word did not come
    relay.take_results(out, ends, relay.count)
    relay.end()


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
