"""The sums of ``accumulate_gradients`` over data-parallel ranks, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.ops import fold
from pydet.torch.accumulate import local
from pydet.torch.distributed.exchange import Group, Tensor, continue_shard, gather, padded, together
from pydet.torch.optimizer import own_gradient

_BUCKET = 1 << 24  # elements that are exchanged at a time; it decides no bits


class OrderedMainGrads:
    """Sums ``main_grad`` over all ranks and rounds in a fixed order: data parallel under ``accumulate_gradients``.

        sums = OrderedMainGrads(model.parameters())
        for micro_batch in segments[rank::world]:     # rank r takes segments r, r + W, ...
            loss(micro_batch).backward()              # or several backward passes, which continue main_grad
            sums.add()
        sums.finish()                                 # main_grad is the whole sum, on every rank

    ``add`` gives a rank's sums to those that fold them, ``D = fl(D + s)``, rank 0's first, and leaves zeros for the
    next segment. So the sum of all segments has the same bits for every number of ranks that divides theirs: those of
    one rank which adds them in their order. A linear layer's are those of one batch with ``k_chunk`` the rows of a
    segment. How a step is cut into segments decides bits, as ``k_chunk`` does.

    Between the exchanges a rank keeps 1/W of the sums. Parameters without a ``main_grad`` take part with their
    ``grad``, summed in float32 and rounded once, which is then what ``grad`` holds.

    Experts of :func:`shard_experts` that are trained on the ranks' own tokens have their sums with their ranks already:
    here they are held to one backward pass for each ``add``.

    Args:
        parameters: those of a model, the same on every rank, in the same order, or ``model.named_parameters()``. Those
            that are not trained are left out. Ranks compare the shape, type, ``requires_grad`` and ``main_grad`` of
            each in its place, and its name where names are given. Without names they do not see two of the same shape
            and type that have changed places.
        group: the ranks that share the data, the default group if None.

    Raises:
        Error: parameters that are DTensors, which their own reduction sums, or that are on several devices; experts of
            another group, or of one whose ranks have the same tokens.
    """

    def __init__(self, parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]], *, group: Group = None) -> None:
        op = "OrderedMainGrads"
        self.group, self.rounds = group, 0
        given: list[tuple[str, Any]] = [x if isinstance(x, tuple) else ("", x) for x in parameters]
        self.parameters: list[Any] = [p for _, p in given if p.requires_grad]
        if not self.parameters:
            fail(INVALID_VALUE, f"{op}: there is no parameter that is trained")
        self.layout = "; ".join(
            f"{name} {_layout(p)} {p.dtype}{'' if p.requires_grad else ' not trained'}".strip() for name, p in given
        )
        for number, p in enumerate(self.parameters):
            shares = getattr(p, "pydet_shares", None)
            if "DTensor" in repr(type(p)) and shares is None:
                fail(
                    UNSUPPORTED,
                    f"{op}: parameter {number} is a DTensor, whose gradient goes to grad; want OrderedReduceScatter "
                    "for fully_shard",
                )
            if p.device != self.parameters[0].device:
                fail(INVALID_VALUE, f"{op}: parameter {number} is on {p.device}, want {self.parameters[0].device}")
            same = shares is not None and shares.ranks() == dist.get_process_group_ranks(group or dist.group.WORLD)
            if shares is not None and same != (shares.tokens == "shard"):
                which = "of this group, whose ranks have the same tokens" if same else "of another group"
                fail(
                    UNSUPPORTED,
                    f"{op}: parameter {number} is of experts that are shared out over the ranks {which}; want tokens="
                    "'shard' in the group that shares the data, or 'replicate' in one that does not",
                )
        # Theirs are summed in backward, on the rank that has them.
        self.experts = [
            p for p in self.parameters if getattr(getattr(p, "pydet_shares", None), "tokens", "") == "shard"
        ]
        of_experts = {id(p) for p in self.experts}
        self.parameters = [p for p in self.parameters if id(p) not in of_experts]
        self.device = (self.experts + self.parameters)[0].device
        self.buckets: list[list[Any]] = [[]]
        for p in self.parameters:
            if self.buckets[-1] and sum(local(x).numel() for x in self.buckets[-1]) + local(p).numel() > _BUCKET:
                self.buckets.append([])
            self.buckets[-1].append(p)
        self.shards: list[Tensor] = []

    def add(self) -> None:
        """After the backward passes of a segment on this rank: the sums go on, and ``main_grad`` is zeros again."""
        op, world = "OrderedMainGrads.add", dist.get_world_size(self.group)

        def terms() -> tuple[Any, ...]:
            for p in self.experts + self.parameters:
                if hasattr(p, "pydet_shares") and getattr(p, "main_grad", None) is None:
                    fail(
                        INVALID_VALUE, f"{op}: experts that are shared out have no main_grad; want accumulate_gradients"
                    )
            for p in self.experts:
                if (passes := getattr(p, "pydet_passes", 0)) > 1:
                    fail(
                        UNSUPPORTED,
                        f"{op}: {passes} backward passes went to experts that are shared out since the last one, and "
                        "the order of their sums would follow the number of ranks; want add() after each",
                    )
            for number, p in enumerate(self.parameters):
                main = getattr(p, "main_grad", None)
                if main is not None and (main.dtype != torch.float32 or main.shape != p.shape):
                    got = f"{main.dtype} {tuple(main.shape)}"
                    fail(
                        constants.PYDET_INVALID_DTYPE,
                        f"{op}: main_grad of parameter {number} is {got}, want torch.float32 {tuple(p.shape)}",
                    )
            with_main = [getattr(p, "main_grad", None) is not None for p in self.parameters]
            places = "".join(str(int(x)) for x in with_main)
            return None, f"round {self.rounds + 1}", f"{sum(with_main)} main_grads", f"of {self.layout}", places

        together(op, self.group, self.device, terms)
        for p in self.experts:
            p.pydet_passes = 0
        for i, bucket in enumerate(filter(None, self.buckets)):
            parts = [self._sums_of(p) for p in bucket]
            flat = padded(parts[0] if len(parts) == 1 else torch.cat(parts), world)  # a large one is not copied
            if len(self.shards) == i:
                self.shards.append(flat.new_zeros(flat.numel() // world))
            continue_shard(flat, self.shards[i], self.group)
            for p in bucket:
                if getattr(p, "main_grad", None) is not None:
                    p.main_grad.zero_()
                else:
                    p.grad = None
        self.rounds += 1

    def _sums_of(self, p: Any) -> Tensor:
        gradient = local(own_gradient(p))
        if gradient is None:
            return torch.zeros(local(p).numel(), dtype=torch.float32, device=p.device)
        flat: Tensor = gradient.detach().reshape(-1).to(torch.float32)
        return flat

    def finish(self) -> None:
        """After the last segment: the whole sum in ``main_grad``, or in ``grad`` where there is none, on every rank.

        Raises:
            Error: on every rank, where one has added nothing, or has a gradient that is not added, which stays.
        """
        op = "OrderedMainGrads.finish"

        def terms() -> tuple[Any, ...]:
            if not self.rounds:
                fail(INVALID_VALUE, f"{op}: nothing was added since the last one; want add() after each segment")
            gradients = (local(own_gradient(p)) for p in self.parameters)
            left = [(i, g.any()) for i, g in enumerate(gradients) if g is not None]
            if left and bool(torch.stack([some for _, some in left]).any()):
                first = next(i for i, some in left if bool(some))
                fail(
                    INVALID_VALUE,
                    f"{op}: parameter {first} has a gradient that was not added, which would be lost; want add() after "
                    "it, or zeros in its place",
                )
            return None, f"{self.rounds} rounds"

        together(op, self.group, self.device, terms, always=True)
        for bucket, shard in zip(filter(None, self.buckets), self.shards, strict=True):
            flat, sizes = gather(shard, self.group).view(-1), [local(p).numel() for p in bucket]
            for p, total in zip(bucket, flat[: sum(sizes)].split(sizes), strict=True):
                if getattr(p, "main_grad", None) is not None:
                    local(p.main_grad).copy_(total.view(local(p).shape))
                else:
                    p.grad = fold([total.contiguous()], out_dtype=p.dtype).view(p.shape)
        self.rounds, self.shards = 0, []

    def reset(self) -> None:
        """Forgets what was added, on every rank alike."""
        self.rounds, self.shards = 0, []
        for p in self.experts:
            p.pydet_passes = 0
            if getattr(p, "main_grad", None) is not None:
                p.main_grad.zero_()


def _layout(p: Any) -> str:
    """The shape of a parameter, as ranks compare it: with this rank's share, where others have the same."""
    shares: Any = getattr(p, "pydet_shares", None)
    of_others = shares is not None and shares.tokens == "replicate"
    return f"{tuple(p.shape)} {shares.place()}" if of_others else f"{tuple(p.shape)}"
