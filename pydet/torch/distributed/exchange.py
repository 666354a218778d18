"""Sums of fixed segments, exchanged whole between ranks and folded in the order of their numbers.

Rank r of W holds the fp32 sums of segments r S/W to (r + 1) S/W - 1. Whichever method carries them, the result is
:func:`pydet.fold` of all S, so neither the method nor W decides a bit.

====================== ============================================================= ============ ==================
method                 what it does                                                  bytes a rank steps
                                                                                     receives
====================== ============================================================= ============ ==================
``one_shot``           all-gather of all sums, every rank folds all                  4 n S        1
``two_shot``           all-to-all, every rank folds its part, all-gather of results  4 n S / W    2
``chain``              ordered: rank after rank continues D, then a broadcast        4 n          W
``halving``            tree: recursive halving, then all-gather of the results       4 n          log2 W + 1
``peer_one_shot``      one launch: all sums into all ranks' memory, every rank folds 4 n S        1
``peer_two_shot``      one launch: sums into their owner's memory, fold, results to  4 n S / W    2
                       all
``peer_stream``        ordered: the same, each step by chunks that follow each other 4 n S / W    2
``relay``              of a product: rank after rank goes on with the running sum,   4 n          W
                       some rows at a time, beside the products of others
``push``               the product's sums are made in their owner's memory, then a   4 n S / W    2
                       launch that folds and gives the results to all
====================== ============================================================= ============ ==================

(n elements; the all-gather of the last step brings n more elements of the result's type.) Those of peers and push need
memory that the ranks reach (:mod:`pydet.torch.distributed.symmetric`: NVIDIA GPUs of one NVLink domain), push the
product too; relay uses it where there is some.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from pydet._native import INVALID_VALUE, Error, constants, fail
from pydet.ops import FOLD_PARTS, NUMERICS, Order, fold
from pydet.torch.distributed.symmetric import MOST_RANKS, Peers, capturing, known_peers, peers_of

Tensor: TypeAlias = torch.Tensor
Group: TypeAlias = Any  # a ProcessGroup, or None for the default one
Method: TypeAlias = Literal[
    "auto", "one_shot", "two_shot", "chain", "halving", "peer_one_shot", "peer_two_shot", "peer_stream", "push", "relay"
]
PEER_METHODS = ("peer_one_shot", "peer_two_shot", "peer_stream")
METHODS: dict[str, tuple[str, ...]] = {"ordered": ("one_shot", "two_shot", "chain"), "tree": ("one_shot", "two_shot")}
# Of all ranks' sums: up to here one step of more bytes is faster than two of fewer, of collectives and of launches.
SMALL_BYTES, PEER_SMALL_BYTES = 1 << 18, 1 << 21
# Of each sum, with several a rank: from here on two ranks' sums are faster as a stream (512 x 8192: 155 us, 174).
STREAM_ELEMENTS, _STREAM_BIAS = 1 << 22, 1 << 16

# ---- Agreement -------------------------------------------------------------------------------------------------------

_DIGEST = 32  # bytes: sha256
_WORDS = 480  # bytes of a rank's word to the others: a flag, the digest of all of it, and what is shown: its beginning
_agreed: dict[Any, set[bytes]] = {}  # by group, on GPUs: what its ranks agreed on


def member(op: str, rank: int) -> int:
    """The number of this process in a group; a process that is not in it is refused, which nobody waits for."""
    if rank < 0:
        fail(INVALID_VALUE, f"{op}: this process is not in the group, want the call on the group's own ranks alone")
    return rank


def together(
    op: str,
    group: Group,
    device: torch.device,
    terms: Callable[[], tuple[Any, ...]],
    *,
    always: bool = False,
    known_as: str = "",
) -> tuple[Any, ...]:
    """Calls terms(), which checks and computes what this rank can alone, and hears how the others fared.

    Every rank tells the others its terms (after the first, which is the rank's own result), or the sentence of its
    refusal; so either all ranks go on to the exchange or all raise, and none waits for one that left. Terms may be of
    any length: what is compared is their digest, and what a sentence shows is their beginning. On the CPU it is
    asked at every call; on a GPU, where an answer takes a wait for the device, at the first call with these terms.
    After that, ranks with memory of each other compare the terms of each fold on their GPUs (:class:`Peers`).

    always: on a GPU too, of a call that waits for the device anyway.
    known_as: a name for the terms, part of them. On a GPU a problem of terms that are known by it is raised at once:
        the others go on without listening.
    """
    rank = member(op, dist.get_rank(group))
    peers = peers_of(group, device)
    if peers is not None:
        peers.begin(op)
    problem: Exception | None = None
    found: tuple[Any, ...] = ()
    try:
        found = terms()
        word = f"PYDET_NUMERICS {NUMERICS}, {', '.join(map(str, found[1:]))}"
    except Exception as caught:  # of whatever kind: the others wait to hear of it
        problem, word = caught, str(caught) or repr(caught)
    world = dist.get_world_size(group)
    key = hashlib.sha256(f"{op} {word}".encode()).digest()
    known = _agreed.setdefault(group if group is not None else dist.group.WORLD, set())
    on_gpu = device.type != "cpu" or peers is not None
    name = f"{op} as {known_as}".encode() if known_as else b""
    if problem is not None and on_gpu and name in known:
        raise problem
    if world > 1 and (problem is not None or not on_gpu or always or key not in known):
        if on_gpu and capturing():
            if problem is not None:
                raise problem
            fail(INVALID_VALUE, f"{op}: its first call is under graph capture; call it once before")
        if peers is not None:
            try:
                peers.ask(op)
            except Error as disagreement:
                raise problem or disagreement from None
        words = _tell_all(group, device, problem is not None, key, f"{op}: {word}" if problem is None else word)
        refused = [(r, text) for r, (bad, _, text) in enumerate(words) if bad and r != rank]
        if problem is None and refused:
            fail(INVALID_VALUE, f"{op}: rank {refused[0][0]} refused: {refused[0][1]}")
        if problem is None:
            other = next((r for r, (_, digest, _) in enumerate(words) if digest != key), None)
            if other is not None:
                mine, theirs = (words[r][2].removeprefix(f"{op}: ") for r in (rank, other))
                theirs = "the same so far, and other terms behind it" if mine == theirs else theirs
                fail(INVALID_VALUE, f"{op}: the ranks do not agree: rank {rank} has {mine}; rank {other} has {theirs}")
    if problem is not None:
        raise problem
    if on_gpu:
        known.update((key, name) if name else (key,))
    if peers is not None:
        peers.means(key, f"{op}: {word}")
    return found


def check_exchanges(device: torch.device | None = None, *, group: Group = None) -> None:
    """Waits for the device, and raises why an exchange of the group failed there, as its next call would.

    Ranks that come to a call with different shapes, types or options after the first call with each of them find out on
    their GPUs: their results are NaN, and each rank's next call of the group raises the reason, or this one. On a CPU
    every call raises its own.

    Args:
        device: the GPU, the current one if None.
        group: a process group, the default one if None.

    Raises:
        Error: what went wrong, and on which rank.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        torch.cuda.synchronize(device)
        peers = known_peers(group)
        if peers is not None:
            peers.check("check_exchanges")


def _tell_all(group: Group, device: torch.device, bad: bool, digest: bytes, text: str) -> list[tuple[bool, bytes, str]]:
    room, said = _WORDS - 1 - _DIGEST, text.encode()
    if len(said) > room:
        said = said[: room - 4] + b" ..."
    word = torch.tensor(list(bytes([bad]) + digest + said.ljust(room, b"\0")), dtype=torch.uint8, device=device)
    everyone = gather(word, group).cpu()
    rows = [bytes(row.tolist()) for row in everyone]
    return [
        (bool(row[0]), row[1 : 1 + _DIGEST], row[1 + _DIGEST :].rstrip(b"\0").decode(errors="replace")) for row in rows
    ]


# ---- Small things ----------------------------------------------------------------------------------------------------


# Its name from PyTorch 2.13 on, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(x: Tensor, group: Group) -> Tensor:
    """``[W, ...]``: every rank's x, in the ranks' order. A copy: no arithmetic."""
    world = dist.get_world_size(group)
    if world == 1:
        return x.unsqueeze(0)
    everyone = x.new_empty(world * x.numel())
    _all_gather(everyone, x.contiguous().view(-1), group=group)
    return everyone.view(world, *x.shape)


def padded(x: Tensor, multiple: int) -> Tensor:
    """With zeros behind, to a multiple of so many along the last dimension: x itself, where it is one."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def peer(group: Group, rank: int) -> int:
    """The rank among all processes of a rank of the group, as point-to-point calls name it."""
    return rank if group is None else dist.get_global_rank(group, rank)


def fold_all(
    parts: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32, order: Order = "ordered"
) -> Tensor:
    """:func:`pydet.fold` of any number of parts ``[S, ...]``: cut where the order lets it be cut."""
    while len(parts) > FOLD_PARTS:
        if order == "tree":
            parts = torch.stack([fold(some, order="tree") for some in parts.split(FOLD_PARTS)])
        else:
            first, *rest = parts.split(FOLD_PARTS)
            total = fold(first)
            for some in rest:
                fold(some, out=total, accumulate=True)
            parts = total.unsqueeze(0)
    return fold(parts, bias=bias, out_dtype=out_dtype, order=order)


def shared(total: int, world: int, op: str, what: str, among: str = "ranks of the group") -> int:
    """How many of `total` a rank has; refused where the ranks do not divide them."""
    if total < 1 or total % world:
        fail(INVALID_VALUE, f"{op}: {what} is {total}, want a multiple of the {world} {among}")
    return total // world


def choose(
    op: str,
    method: str,
    order: str,
    count: int,
    elements: int,
    world: int,
    peers: Peers | None,
    product: bool = False,
    relays: bool = False,
    prefers_relay: bool = False,
) -> str:
    """The method that is meant, by the number of all segments and the elements of each; push and relay, where a product
    can."""
    if order not in METHODS:
        fail(INVALID_VALUE, f"{op}: order is {order!r}, want one of {', '.join(METHODS)}")
    power_of_two = world & (world - 1) == 0 and (count // world) & (count // world - 1) == 0
    can = METHODS[order] + (("halving",) if order == "tree" and power_of_two else ())
    can += ("relay",) if relays else ()
    by_peers = tuple(name for name in PEER_METHODS if order == "ordered" or name != "peer_stream")
    by_peers += ("push",) if product else ()
    reached = peers is not None and count <= FOLD_PARTS
    size = 4 * elements * count
    if method == "auto":
        if reached and relays and prefers_relay:
            return "relay"
        if reached and order == "ordered" and world == 2 and count > world and elements >= STREAM_ELEMENTS:
            return "peer_stream"
        if reached:
            return "peer_one_shot" if size <= PEER_SMALL_BYTES else "peer_two_shot"
        if size <= SMALL_BYTES:
            return "one_shot"
        return "halving" if "halving" in can else "two_shot"
    if method not in can + by_peers:
        names = ", ".join(can + by_peers)
        fail(INVALID_VALUE, f"{op}: method is {method!r}, want one of auto, {names} for order {order}")
    if method == "push" and peers is not None and not peers.pushes:
        fail(constants.PYDET_UNSUPPORTED, f"{op}: method is 'push', which only the group of all ranks has")
    if method in by_peers and not reached:
        fail(
            constants.PYDET_UNSUPPORTED,
            f"{op}: method is {method!r}, and the ranks have no memory that all of them reach (symmetric memory of "
            f"2 to {MOST_RANKS} NVIDIA GPUs, for up to {FOLD_PARTS} segments)",
        )
    return method


# ---- Methods ---------------------------------------------------------------------------------------------------------


def _flat_bias(bias: Tensor | None, begin: int, end: int) -> Tensor | None:
    """What is added to elements [begin, end) of the flattened result."""
    if bias is None:
        return None
    return bias[torch.arange(begin, end, device=bias.device) % bias.numel()]


def split_sums(sums: Tensor, world: int) -> Tensor:
    """``[W, s, c]`` of sums ``[s, ...]``: what goes to each rank, padded with zeros to W equal parts."""
    return padded(sums.flatten(1), world).reshape(len(sums), world, -1).transpose(0, 1).contiguous()


def _own_part(sums: Tensor, group: Group, bias: Tensor | None, out_dtype: torch.dtype, order: Order) -> Tensor:
    """This rank's 1/W of the result, flat: all-to-all, then the fold of all segments."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    send = split_sums(sums, world)
    received = torch.empty_like(send)
    dist.all_to_all_single(received.view(-1), send.view(-1), group=group)
    each = send.shape[2]
    return fold_all(received.flatten(0, 1), _flat_bias(bias, rank * each, (rank + 1) * each), out_dtype, order)


def _one_shot(sums: Tensor, group: Group, bias: Tensor | None, out_dtype: torch.dtype, order: Order) -> Tensor:
    return fold_all(gather(sums, group).flatten(0, 1), bias, out_dtype, order)


def _two_shot(sums: Tensor, group: Group, bias: Tensor | None, out_dtype: torch.dtype, order: Order) -> Tensor:
    own = _own_part(sums, group, bias, out_dtype, order)
    return gather(own, group).view(-1)[: sums[0].numel()].view(sums.shape[1:])


def _chain(sums: Tensor, group: Group, bias: Tensor | None, out_dtype: torch.dtype, order: Order) -> Tensor:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    total = torch.zeros_like(sums[0])
    if rank:
        dist.recv(total, peer(group, rank - 1), group=group)
    for some in sums.split(FOLD_PARTS):
        fold(some, out=total, accumulate=True)
    if rank + 1 < world:
        dist.send(total, peer(group, rank + 1), group=group)
        out = torch.empty_like(total, dtype=out_dtype)
    else:
        out = fold([total], bias=bias, out_dtype=out_dtype)
    dist.broadcast(out, peer(group, world - 1), group=group)
    return out


def _halving(sums: Tensor, group: Group, bias: Tensor | None, out_dtype: torch.dtype, order: Order) -> Tensor:
    """Partners 1, 2, 4 ... ranks apart fold half of what they have left, and give the other half away."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    count, mine = sums[0].numel(), padded(fold_all(sums, order="tree").view(-1), world)
    begin, apart = 0, 1
    while apart < world:
        low, high = mine.view(2, -1).unbind()
        keep, give = (high, low) if rank & apart else (low, high)
        begin += len(keep) if rank & apart else 0
        got = torch.empty_like(keep)
        exchanges = [
            dist.P2POp(dist.isend, give.contiguous(), peer(group, rank ^ apart), group),
            dist.P2POp(dist.irecv, got, peer(group, rank ^ apart), group),
        ]
        for work in dist.batch_isend_irecv(exchanges):
            work.wait()
        mine = fold([got, keep] if rank & apart else [keep, got], order="tree")
        apart *= 2
    own = fold([mine], bias=_flat_bias(bias, begin, begin + len(mine)), out_dtype=out_dtype)
    # Who has which part: the first partner decides the half, the second the quarter, and so on.
    levels = world.bit_length() - 1
    places = [sum((r >> bit & 1) << (levels - 1 - bit) for bit in range(levels)) for r in range(world)]
    ordered = gather(own, group)[torch.tensor(places, device=own.device).argsort()]
    return ordered.reshape(-1)[:count].view(sums.shape[1:])


_RUN = {"one_shot": _one_shot, "two_shot": _two_shot, "chain": _chain, "halving": _halving}


def reduce_sums(
    op: str,
    sums: Tensor,
    group: Group,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    order: Order,
    method: str,
    rows: bool = False,
    first_sums: int = 0,
    chosen: str | None = None,
) -> Tensor:
    """After :func:`together`: the fold of all ranks' sums ``[s, ...]``; under `rows` this rank's rows of it alone.

    first_sums: by the methods of peers alone: every other rank has so many, and rank 0 the sum of its own as many.
    chosen: the method that is meant, where the caller knows it.
    """
    world = dist.get_world_size(group)
    if world == 1:
        return fold_all(sums, bias, out_dtype, order)
    peers, count = peers_of(group, sums.device), (first_sums or len(sums)) * world
    name = chosen or choose(op, method, order, count, sums[0].numel(), world, peers)
    shape = (sums.shape[1] // world, *sums.shape[2:]) if rows else tuple(sums.shape[1:])
    if name in PEER_METHODS:
        assert peers is not None
        peers.reserve(count)
        out = sums.new_empty(shape, dtype=out_dtype)
        # A stream's launches are whole rows of a bias.
        streams = name == "peer_stream" and (bias is None or bias.numel() <= _STREAM_BIAS)
        named = not rows and (method != "auto" or streams)
        kernel = f"cuda_fold_{name.removeprefix('peer_')}" if named else None
        return peers.fold(sums, out, bias=bias, order=order, scatter=rows, kernel=kernel, first_sums=first_sums)
    if rows:
        return _own_part(sums, group, bias, out_dtype, order).view(shape)
    return _RUN[name](sums, group, bias, out_dtype, order)


def all_reduce(
    sums: Tensor,
    *,
    group: Group = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    order: Order = "ordered",
    method: Method = "auto",
) -> Tensor:
    """``round(fold of all ranks' sums + bias)`` on every rank: rank 0's segments first.

    Args:
        sums: ``[s, ...]``, float32: the sums of this rank's s segments, ascending; s is the same on every rank.
        group: a process group, the default one if None.
        bias: ``[N]``, the last extent of ``sums``; added in fp32 before the one rounding.
        out_dtype: float32, bfloat16 or float16.
        order: as in :func:`pydet.fold`. It decides bits; with the number of all segments it is the contract.
        method: how the sums travel; it decides no bits. One that this group cannot run is refused.

    Returns:
        ``[...]``, the same bits on every rank, for every number of ranks that shares the same segments.

    Raises:
        Error: on every rank, where one has other shapes, types or options, or refuses.
    """
    op = "all_reduce"

    def terms() -> tuple[Any, ...]:
        parts = _float_sums(op, sums)
        world = dist.get_world_size(group)
        if bias is not None and (bias.dim() != 1 or sums.dim() < 2 or bias.numel() != sums.shape[-1]):
            fail(constants.PYDET_INVALID_SHAPE, f"{op}: bias is {tuple(bias.shape)}, want ({sums.shape[-1]},)")
        choose(op, method, order, len(sums) * world, sums[0].numel(), world, peers_of(group, sums.device))
        return parts, f"sums {tuple(sums.shape)}", f"bias {bias is not None}", out_dtype, order, method

    parts = together(op, group, sums.device, terms)[0]
    return reduce_sums(op, parts, group, bias, out_dtype, order, method)


def reduce_scatter(sums: Tensor, shard: Tensor, *, group: Group = None) -> Tensor:
    """Continues ``shard``, this rank's 1/W of a running sum, over all ranks' ``sums`` in the ranks' order.

    The gradients of micro-batches that are dealt round robin (rank r takes r, r + W, ...), one call a round: then
    the shards have the bits of one sum over all micro-batches in their order, for every W that divides their number.

    Args:
        sums: ``[n]``, float32, contiguous; n is W times the shard's.
        shard: ``[n / W]``, float32, contiguous; zeros before the first round. Written.
        group: a process group, the default one if None.

    Returns:
        ``shard``.

    Raises:
        Error: on every rank, where one has other shapes or refuses.
    """
    op = "reduce_scatter"
    world = dist.get_world_size(group)

    def terms() -> tuple[Any, ...]:
        for name, x in (("sums", sums), ("shard", shard)):
            if x.dtype != torch.float32 or not x.is_contiguous():
                fail(constants.PYDET_INVALID_DTYPE, f"{op}: {name} is {x.dtype}, want float32, contiguous")
        if sums.numel() != world * shard.numel():
            got, want = sums.numel(), world * shard.numel()
            fail(constants.PYDET_INVALID_SHAPE, f"{op}: sums has {got} elements, want {want}: {world} shards")
        return None, f"{sums.numel()} elements"

    together(op, group, sums.device, terms)
    continue_shard(sums.view(-1), shard.view(-1), group)
    return shard


def continue_shard(sums: Tensor, shard: Tensor, group: Group) -> None:
    """After :func:`together`: the all-to-all and the fold of :func:`reduce_scatter`."""
    world, peers = dist.get_world_size(group), peers_of(group, sums.device)
    if peers is not None:
        peers.fold(sums.unsqueeze(0), shard, scatter=True, accumulate=True)
        return
    received = sums
    if world > 1:
        received = torch.empty_like(sums)
        dist.all_to_all_single(received, sums, group=group)
    for some in received.view(world, -1).split(FOLD_PARTS):
        fold(some, out=shard, accumulate=True)


def _float_sums(op: str, sums: Tensor) -> Tensor:
    if sums.dtype != torch.float32:
        fail(constants.PYDET_INVALID_DTYPE, f"{op}: sums is {sums.dtype}, want float32: sums are folded unrounded")
    if sums.dim() < 1 or sums.numel() == 0:
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: sums is {tuple(sums.shape)}, want [segments, ...], not empty")
    return sums.contiguous()
