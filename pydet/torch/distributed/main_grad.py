"""The sums of ``accumulate_gradients`` over data-parallel ranks, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.ops import fold
from pydet.torch.distributed.exchange import Group, Tensor, continue_shard, gather, together
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

    Args:
        parameters: those of a model, the same on every rank, in the same order, or ``model.named_parameters()``. Those
            that are not trained are left out. Ranks compare the shape, type, ``requires_grad`` and ``main_grad`` of
            each in its place, and its name where names are given. Without names they do not see two of the same shape
            and type that have changed places.
        group: the ranks that share the data, the default group if None.

    Raises:
        Error: parameters that are DTensors, which their own reduction sums, or that are on several devices.
    """

    def __init__(self, parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]], *, group: Group = None) -> None:
        op = "OrderedMainGrads"
        self.group, self.rounds = group, 0
        given: list[tuple[str, Any]] = [x if isinstance(x, tuple) else ("", x) for x in parameters]
        self.parameters: list[Any] = [p for _, p in given if p.requires_grad]
        if not self.parameters:
            fail(INVALID_VALUE, f"{op}: there is no parameter that is trained")
        self.layout = "; ".join(
            f"{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' not trained'}".strip() for name, p in given
        )
        for number, p in enumerate(self.parameters):
            if "DTensor" in repr(type(p)):
                fail(
                    UNSUPPORTED,
                    f"{op}: parameter {number} is a DTensor, whose gradient goes to grad; want OrderedReduceScatter "
                    "for fully_shard",
                )
            if p.device != self.parameters[0].device:
                fail(INVALID_VALUE, f"{op}: parameter {number} is on {p.device}, want {self.parameters[0].device}")
        self.buckets: list[list[Any]] = [[]]
        for p in self.parameters:
            if self.buckets[-1] and sum(x.numel() for x in self.buckets[-1]) + p.numel() > _BUCKET:
                self.buckets.append([])
            self.buckets[-1].append(p)
        self.shards: list[Tensor] = []

    def add(self) -> None:
        """After the backward passes of a segment on this rank: the sums go on, and ``main_grad`` is zeros again."""
        op, world = "OrderedMainGrads.add", dist.get_world_size(self.group)
        first = self.parameters[0]

        def terms() -> tuple[Any, ...]:
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

        together(op, self.group, first.device, terms)
        for i, bucket in enumerate(self.buckets):
            flat = torch.cat([self._sums_of(p) for p in bucket])
            flat = torch.nn.functional.pad(flat, (0, -flat.numel() % world))
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
        gradient = own_gradient(p)
        if gradient is None:
            return torch.zeros(p.numel(), dtype=torch.float32, device=p.device)
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
            left = [(i, g.any()) for i, g in enumerate(map(own_gradient, self.parameters)) if g is not None]
            if left and bool(torch.stack([some for _, some in left]).any()):
                first = next(i for i, some in left if bool(some))
                fail(
                    INVALID_VALUE,
                    f"{op}: parameter {first} has a gradient that was not added, which would be lost; want add() after "
                    "it, or zeros in its place",
                )
            return None, f"{self.rounds} rounds"

        together(op, self.group, self.parameters[0].device, terms, always=True)
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            flat = gather(shard, self.group).view(-1)
            sums = flat[: sum(p.numel() for p in bucket)].split([p.numel() for p in bucket])
            for p, total in zip(bucket, sums, strict=True):
                if getattr(p, "main_grad", None) is not None:
                    p.main_grad.copy_(total.view(p.shape))
                else:
                    p.grad = fold([total.contiguous()], out_dtype=p.dtype).view(p.shape)
        self.reset()

    def reset(self) -> None:
        """Forgets what was added, on every rank alike."""
        self.rounds, self.shards = 0, []
