"""Gradients over data-parallel ranks in a fixed order: a hook for DDP, a reduce-scatter for FSDP2, and the total norm.

Micro-batches are dealt round robin (rank r takes r, r + W, ...). Then the sum of all their gradients has the same bits
for every number of ranks that divides the number of micro-batches: that of one rank which sums them in their order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.ops import gemm
from pydet.torch.distributed.exchange import Group, Tensor, continue_shard, fold_all, gather, padded, together
from pydet.torch.optimizer import exact_sqrt, own_gradient

# ---- DDP -------------------------------------------------------------------------------------------------------------


class OrderedState:
    """The state of :func:`ordered_hook`: how many backward passes make one sum, over which group.

    Args:
        rounds: backward passes of each rank that are summed: the number of micro-batches / W.
        group: that of the DDP module, the default one if None.
    """

    def __init__(self, rounds: int = 1, group: Group = None) -> None:
        if rounds < 1:
            fail(INVALID_VALUE, f"OrderedState: rounds is {rounds}, want 1 or more")
        self.rounds, self.group = rounds, group
        self.running: dict[int, tuple[int, tuple[int, ...], Tensor]] = {}  # by bucket: rounds done, layout, shard

    def reset(self) -> None:
        """Forgets the sums that are under way, on every rank alike."""
        self.running.clear()


def ordered_hook(state: OrderedState, bucket: Any) -> torch.futures.Future[Tensor]:
    """``model.register_comm_hook(OrderedState(rounds), ordered_hook)``: DDP's gradients, summed in a fixed order.

    The sum, not the mean, over ``rounds`` backward passes and all ranks. Before the last round gradients become zeros,
    which DDP adds to ``grad``: let ``grad`` accumulate over the rounds, without ``no_sync``. DDP lays its buckets out
    anew after its first backward pass. With several rounds throw that pass away (``state.reset()``, ``zero_grad()``).

    Raises:
        Error: gradients that are not float32, or buckets that changed in the middle of a sum.
    """
    op, flat, group = "ordered_hook", bucket.buffer(), state.group
    world, index = dist.get_world_size(group), bucket.index()
    layout = tuple(x.numel() for x in bucket.gradients())
    done, known, shard = state.running.get(index, (0, layout, None))

    def terms() -> tuple[Any, ...]:
        if flat.dtype != torch.float32:
            fail(constants.PYDET_INVALID_DTYPE, f"{op}: the bucket is {flat.dtype}, want float32")
        if known != layout or (done == 0 and index == 0 and state.running):
            state.running.clear()
            fail(
                INVALID_VALUE,
                f"{op}: DDP changed its buckets in the middle of a sum of {state.rounds} rounds, as it does after its "
                "first backward pass: throw that pass away, with state.reset() and zero_grad()",
            )
        return None, f"round {done + 1} of {state.rounds}, bucket {index} of {layout}"

    together(op, group, flat.device, terms)
    whole = padded(flat, world)
    if shard is None:
        shard = whole.new_zeros(whole.numel() // world)
    continue_shard(whole, shard, group)
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    if done + 1 < state.rounds:
        state.running[index] = done + 1, layout, shard
        future.set_result(torch.zeros_like(flat))
    else:
        state.running.pop(index, None)
        future.set_result(gather(shard, group).view(-1)[: flat.numel()])
    return future


# DDP compares these with the types themselves.
ordered_hook.__annotations__ = {"bucket": vars(dist)["GradBucket"], "return": torch.futures.Future[Tensor]}

# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


class OrderedReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``, one for each FSDP module: the sum over rounds and ranks in order.

    With ``set_gradient_divide_factor(1.0)``, ``set_force_sum_reduction_for_comms(True)`` and a ``reduce_dtype`` of
    float32 (``MixedPrecisionPolicy``). Rounds before the last give zeros, so that FSDP's own sum of them is exact.

    On a mesh of one dimension alone: on one of two (HSDP) PyTorch all-reduces the shards over the replicas afterwards,
    in an order of its own. That is refused where it is seen: not on a mesh whose shards have one rank, where PyTorch
    never calls this.

    Args:
        rounds: backward passes of each rank that are summed: the number of micro-batches / W.

    Raises:
        Error: other options of FSDP; a second call in one backward pass while a sum is under way, as of one object for
            several modules; a mesh of replicas and shards.
    """

    def __init__(self, rounds: int = 1) -> None:
        if rounds < 1:
            fail(INVALID_VALUE, f"OrderedReduceScatter: rounds is {rounds}, want 1 or more")
        self.rounds, self.done, self.shard = rounds, 0, torch.empty(0)
        self.backward = -1  # the backward pass of the latest call

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> None:
        name, backward = "OrderedReduceScatter", _backward_pass()
        replicated = _sums_replicas(sys._getframe(1))

        def terms() -> tuple[Any, ...]:
            if replicated:
                fail(
                    UNSUPPORTED,
                    f"{name}: the mesh has replicas beside the shards (HSDP), which PyTorch all-reduces in an order of "
                    "its own; want a mesh of one dimension",
                )
            if self.done and backward == self.backward >= 0:
                self.done = 0
                fail(
                    INVALID_VALUE,
                    f"{name}: called twice in one backward pass, in the middle of a sum of {self.rounds} rounds; want "
                    "one OrderedReduceScatter for each FSDP module, which a forward pass calls once",
                )
            if op != dist.ReduceOp.SUM or input_tensor.dtype != torch.float32:
                fail(
                    INVALID_VALUE,
                    f"{name}: asked for {op} of {input_tensor.dtype}, want SUM of torch.float32 "
                    "(set_gradient_divide_factor(1.0), set_force_sum_reduction_for_comms(True), reduce_dtype)",
                )
            if self.done and self.shard.shape != output_tensor.shape:
                self.done = 0
                fail(INVALID_VALUE, f"{name}: the shard changed in the middle of a sum of {self.rounds} rounds")
            return None, f"round {self.done + 1} of {self.rounds}", f"{input_tensor.numel()} elements"

        together(name, group, input_tensor.device, terms)
        self.backward = backward
        if self.done == 0:
            self.shard = torch.zeros_like(output_tensor)
        continue_shard(input_tensor.reshape(-1), self.shard.view(-1), group)
        self.done = (self.done + 1) % self.rounds
        if self.done:
            output_tensor.zero_()
        else:
            output_tensor.copy_(self.shard)


def _backward_pass() -> int:
    """The number of the backward pass that this thread is in; -1 if none, or where PyTorch does not say."""
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if ask is None else int(ask())


def _sums_replicas(caller: Any) -> bool:
    """FSDP tells a reduce-scatter nothing of what comes after it; its own function knows."""
    return caller.f_code.co_name == "foreach_reduce" and caller.f_locals.get("all_reduce_group") is not None


# ---- The norm of all gradients ---------------------------------------------------------------------------------------

_WIDTH = 1024  # squares that one chain adds


def sum_of_squares(x: Tensor) -> Tensor:
    """``[1]`` fp32: chains of 1024 squares in C order, then chains of 1024 of their sums, until one is left."""
    total = x.detach().to(torch.float32).reshape(-1)
    total = total * total
    ones = torch.ones(_WIDTH, 1, device=x.device)
    while True:
        total = gemm(padded(total, _WIDTH).view(-1, _WIDTH), ones, arithmetic="ieee").view(-1)
        if total.numel() <= 1:
            return total if total.numel() else x.new_zeros(1, dtype=torch.float32)


def _is_sharded(gradient: Any) -> bool:
    return any(p.is_shard() for p in getattr(gradient, "placements", ()))


def _whole_first(gradient: Any, segments: int) -> bool:
    """Whether the segments do not divide the dimension that is sharded, whatever the number of ranks."""
    placements: Any = getattr(gradient, "placements", ())
    dims = [p.dim for p in placements if p.is_shard()]
    return len(dims) == 1 and gradient.shape[dims[0]] % segments != 0


def _of_one(gradient: Tensor, segments: int) -> Tensor:
    return torch.cat([sum_of_squares(gradient), gradient.new_zeros(segments - 1, dtype=torch.float32)])


def _segments_of(gradient: Any, segments: int, group: Group) -> Tensor:
    """``[segments / W]``: the sums of squares of this rank's segments of a gradient; of one that is not sharded, or
    whose rows are gathered first, one sum and zeros, ``[segments]``."""
    from torch.distributed.tensor import DTensor

    if not isinstance(gradient, DTensor):
        return _of_one(gradient, segments)
    placements: Any = gradient.placements
    local, sharded = gradient.to_local(), [p for p in placements if p.is_shard()]
    if any(p.is_partial() for p in gradient.placements):
        fail(UNSUPPORTED, f"clip_grad_norm_: a gradient is placed as {gradient.placements}, a sum that is not made yet")
    if not sharded:
        return _of_one(local, segments)
    if _whole_first(gradient, segments):
        return local.new_zeros(segments, dtype=torch.float32)  # what it is comes when all ranks have agreed
    dim, world = sharded[0].dim, dist.get_world_size(group)
    extent = gradient.shape[dim]
    if len(sharded) > 1 or segments % world or local.shape[dim] * world != extent:
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"clip_grad_norm_: a gradient of {tuple(gradient.shape)} is sharded as {gradient.placements}, want one "
            f"dimension in {segments} equal segments over {world} ranks",
        )
    own = [sum_of_squares(some.contiguous()) for some in local.chunk(segments // world, dim)]
    return torch.cat(own)


def _device_of(parameters: list[Any], group: Group) -> torch.device:
    """Where a rank meets the others that may have no gradient at all."""
    if parameters:
        device: torch.device = parameters[0].device
        return device
    on_gpu = torch.cuda.is_available() and dist.is_initialized() and dist.get_backend(group) != "gloo"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, *, group: Group = None, segments: int = 8, stages: Group = None
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` (of norm 2) with bits that do not depend on the number of ranks.

    The sum of squares of each gradient is taken by segments of the dimension that is sharded (a DTensor's), which are
    folded in ascending order, then over the parameters in the order given. On one rank pass the same DTensors, of a
    mesh of one, so that the segments are the same. A gradient whose sharded dimension the segments do not divide (50257
    rows) is gathered for the time of the call, on every rank, and is one segment. Ranks do not compare the numbers of
    gradients that are to be the same: where they differ, so do the norms.

    Args:
        parameters: those with a ``main_grad`` of :func:`pydet.torch.accumulate_gradients`, which is the gradient then,
            or a ``grad``; plain tensors, the same on every rank, or DTensors of one mesh dimension.
        max_norm: gradients are scaled by ``min(1, max_norm / (norm + 1e-6))``, in place.
        group: the ranks that share the DTensors, the default group if None; without one this process alone.
        segments: a multiple of the number of ranks. It decides bits.
        stages: the ranks that have the model's other parameters, those of rank 0 first (pipeline parallel): the norm is
            that of one rank which has all of them in this order. None: there are no others. With it, and without a
            ``group``, no tensor is shared.

    Returns:
        The norm before clipping, a float32 scalar.

    Raises:
        Error: on every rank, where one has other gradients or options, none at all while others have some, or refuses.
    """
    from torch.distributed.tensor import DTensor

    op = "clip_grad_norm_"
    given = list(parameters)
    gradients: list[Any] = [x for x in map(own_gradient, given) if x is not None]
    device = _device_of(gradients or given, group if stages is None else stages)

    def terms() -> tuple[Any, ...]:
        if not isinstance(max_norm, Real | Tensor) or not float(max_norm) >= 0:
            fail(INVALID_VALUE, f"{op}: max_norm is {max_norm}, want a number of 0 or more")
        if not isinstance(segments, int) or segments < 1:
            fail(INVALID_VALUE, f"{op}: segments is {segments}, want a number from 1 up")
        if stages is not None and not gradients:
            fail(INVALID_VALUE, f"{op}: this stage has no gradients, and the others wait for it")
        sums = [_segments_of(gradient, segments, group) for gradient in gradients]
        options = f"max_norm {float(max_norm)}, {segments} segments"
        each = "; ".join(f"{tuple(g.shape)} {g.dtype} {getattr(g, 'placements', '')}".strip() for g in gradients)
        return sums, f"{len(gradients)} gradients", options, each

    alone = group is None and (stages is not None or not dist.is_initialized())
    of_group = terms if alone else lambda: together(op, group, device, terms)
    if stages is None:
        sums: list[Tensor] = of_group()[0]
    else:
        same = f"max_norm {max_norm}, {segments} segments"  # of all stages, whose gradients are their own
        sums = together(op, stages, device, lambda: (of_group()[0], same))[0]
    if not gradients:
        return torch.zeros(())
    gathered = [i for i, gradient in enumerate(gradients) if _whole_first(gradient, segments)]
    for i in gathered:
        sums[i] = _of_one(gradients[i].full_tensor(), segments)
    sharded = [i for i, gradient in enumerate(gradients) if _is_sharded(gradient) and i not in gathered]
    if sharded:
        everyone = gather(torch.stack([sums[i] for i in sharded]), group)  # [W, parameters, S / W]
        for place, i in enumerate(sharded):
            sums[i] = everyone[:, place].reshape(-1)
    squares = torch.stack([fold_all(s) for s in sums])
    if stages is not None:
        squares = _of_all_stages(squares, stages)
    total = exact_sqrt(fold_all(squares))
    scale = torch.clamp((total + 1e-6).reciprocal() * max_norm, max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(scale.to(local.device))
    return total


def _of_all_stages(squares: Tensor, stages: Group) -> Tensor:
    """The numbers ``[n]`` of all ranks, of which each has its own n, one rank's after the other's."""
    counts = gather(torch.tensor([len(squares)], device=squares.device), stages).view(-1).tolist()
    everyone = gather(torch.nn.functional.pad(squares, (0, max(counts) - len(squares))), stages)
    return torch.cat([own[:count] for own, count in zip(everyone, counts, strict=True)])
