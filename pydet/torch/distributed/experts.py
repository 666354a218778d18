"""A mixture of experts whose experts are shared out over the ranks, and whose tokens are: each goes to its experts.

A row of an expert's results is a function of that row of tokens alone, and rows travel whole; so a token does not feel
where its experts live, nor who else's tokens they have. The sum over a token's slots is made where the token is, in the
order of the slots. An expert has the tokens of rank 0 first, then those of rank 1: the order of one rank that has them
all, so the gradient of its weights is the same chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.torch.accumulate import Sources
from pydet.torch.distributed.exchange import Group, Tensor, gather, shared, together
from pydet.torch.experts import FromExperts, ToExperts, combine, route

_OP = "expert_parallel"


class _Exchange(torch.autograd.Function):
    """Rows to their ranks: `send` of them to each, `receive` from each; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.splits, ctx.group = (send, receive), group
        return _exchanged(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        send, receive = ctx.splits
        meet_in_backward(ctx.group, gradients[0])
        back: Tensor = _Exchange.apply(gradients[0], receive, send, ctx.group)  # which has a gradient of its own
        return back, None, None, None


def meet_in_backward(group: Group, dy: Tensor) -> None:
    """Before gradients travel: a rank that has left for another call is heard of, on a CPU every time."""
    together("backward of experts", group, dy.device, lambda: (None, f"rows of {tuple(dy.shape[1:])}, {dy.dtype}"))


def _exchanged(rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    if len(send) == 1:
        return rows
    got = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), receive, send, group=group)
    return got


def _sources(counts: Tensor, rows: list[int]) -> Sources:
    """Of rows by experts and, of each, by ranks: counts ``[W, experts]`` of them."""
    ends = counts.t().reshape(-1).cumsum(0).view(counts.t().shape).t()
    return Sources((ends - counts).to(torch.int32).contiguous(), ends.to(torch.int32).contiguous(), rows)


def check_routed(op: str, x: Tensor, index: Tensor, weights: Tensor) -> None:
    """Tokens, the experts of each, and their weights."""
    if x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(x):
        given = (("x", x), ("index", index), ("weights", weights))
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given)
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: {shapes}, want [T, H], [T, slots] and [T, slots]")
    if index.dtype != torch.int64:
        fail(INVALID_DTYPE, f"{op}: index is {index.dtype}, want int64")


def by_ranks(
    op: str,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: Callable[[Tensor, Tensor, Sources], Tensor],
    num_experts: int,
    group: Group,
    terms_of: Callable[[], tuple[Any, ...]] = lambda: (),
) -> Tensor:
    """:func:`expert_parallel`, whose experts also hear which rows are whose. terms_of: more that ranks compare."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)

    def terms() -> tuple[Any, ...]:
        check_routed(op, x, index, weights)
        each = shared(num_experts, world, op, "num_experts")
        words = f"{index.shape[1]} slots, {num_experts} experts", f"weights {weights.dtype}"
        # Without a gradient there is no exchange in backward, for which the others would wait.
        differentiable = torch.is_grad_enabled() and x.requires_grad
        return each, f"rows of {x.shape[1]}", x.dtype, *words, f"gradients {differentiable}", *terms_of()

    each = together(op, group, x.device, terms)[0]
    # Those of no expert, negative or too large, come last, and are sent nowhere.
    known = torch.where(index < 0, num_experts, index)
    routing = route(known, num_experts)
    rows = ToExperts.apply(x, routing.order, routing.inverse)
    counts = torch.diff(routing.ends, prepend=routing.ends.new_zeros(1))
    everyone = gather(counts.to(torch.int64), group)  # [W, E]
    mine = everyone[:, rank * each : (rank + 1) * each]
    send, receive = torch.stack([everyone[rank].view(world, each).sum(1), mine.sum(1)]).tolist()
    sent, total = sum(send), rows.shape[0]

    got = _Exchange.apply(rows[:sent], send, receive, group)
    numbers = torch.arange(each, device=x.device).repeat(world)
    ids = torch.repeat_interleave(numbers, mine.flatten(), output_size=sum(receive))
    order = torch.argsort(ids, stable=True)  # of one expert: by rank, then as they were
    ends = mine.sum(0).cumsum(0).to(torch.int32)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    given = FromExperts.apply(got, back, order)

    def results_of() -> tuple[Any, ...]:
        results = experts(given, ends, _sources(mine, receive))
        if not isinstance(results, Tensor) or not results.dim() or len(results) != len(given):
            got = tuple(results.shape) if isinstance(results, Tensor) else type(results).__qualname__
            fail(constants.PYDET_INVALID_SHAPE, f"{op}: experts gave {got}, want a tensor of {len(given)} rows")
        words = f"results of {tuple(results.shape[1:])}", results.dtype, f"gradients {results.requires_grad}"
        return results, *words, asked

    asked = f"from rows of {x.shape[1]} in {x.dtype} by {num_experts} experts"
    made = together(op, group, x.device, results_of, known_as=asked)[0]
    results = _Exchange.apply(FromExperts.apply(made, order, back), receive, send, group)
    if sent < total:
        results = torch.cat([results, results.new_zeros(total - sent, *results.shape[1:])])
    return combine(results, weights, routing, x.dtype)


def expert_parallel(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: Callable[[Tensor, Tensor], Tensor],
    num_experts: int,
    *,
    group: Group = None,
) -> Tensor:
    """The weighted sum of each token's experts, where rank r has experts r E / W and following; with gradients.

    The bits of results and gradients are those of one rank that has all experts and all tokens, rank 0's first. The
    host waits for the number of rows that each rank gets. :func:`shard_experts` does it to a model's layers.

    Args:
        x: ``[T, H]``: this rank's tokens; T may differ from rank to rank.
        index: ``[T, slots]``, int64: the experts of each token. One that is none adds nothing.
        weights: ``[T, slots]``: what each expert's result is multiplied with.
        experts: makes the rows ``[R, H]`` of this rank's E / W experts, sorted by expert, into results ``[R, ...]``; it
            also gets where each expert's rows end, int32 ``[E / W]``: what ``torch.ops.pydet.grouped_gemm`` takes.
            It is called on every rank, also for no rows.
        num_experts: E, of all ranks; a multiple of their number.
        group: a process group, the default one if None.

    Returns:
        ``[T, ...]``, of the type of x.

    Raises:
        Error: on every rank, where one has other extents or types, or gradients where others have none, or refuses, or
            its ``experts`` raise; on GPUs of the latter at the first call, later on that rank alone, and the others
            wait for the group's time limit.
    """
    return by_ranks(_OP, x, index, weights, lambda rows, ends, _: experts(rows, ends), num_experts, group)
