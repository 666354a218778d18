"""From hidden states to log-probabilities and losses, without the logits in memory."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from pydet._native import INVALID_VALUE, fail
from pydet.ops import Arithmetic
from pydet.torch.accumulate import adding, check_own, fold, part_of_product, step_of
from pydet.torch.ops.head import WORKSPACE, Asked, Head, gradients, loss_and_gradients, room_for_sums, rounded

Reduction: TypeAlias = Literal["mean", "sum", "none"]
LOSS_ROWS = 256  # rows of a part of a loss's sum


class Answers(NamedTuple):
    """What :func:`head_of` computes of each row; None where it was not asked."""

    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    lse: torch.Tensor | None
    mean: torch.Tensor | None
    greedy: torch.Tensor | None


class _AccumulatingHead(torch.autograd.Function):
    """The operator, with a backward that continues the sums in its parameters' ``main_grad``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, index: torch.Tensor, *how: Any
    ) -> Any:
        check_own("linear_log_prob", weight=w, bias=bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x, index, w, bias)  # so that PyTorch refuses those that were written meanwhile
        ctx.w, ctx.bias, ctx.how, ctx.asked = w, bias, (*how[:3], *how[7:]), how[3:6]
        ctx.set_materialize_grads(False)
        results = torch.ops.pydet.linear_log_prob(x, w.to(x.dtype), index, bias, *how)
        ctx.mark_non_differentiable(results[4])
        return results

    @staticmethod
    def backward(ctx: Any, dlog_prob: torch.Tensor | None, *given: Any) -> tuple[Any, ...]:
        (x, index, read, _), w, bias = ctx.saved_tensors, ctx.w, ctx.bias
        others = Asked(*(g if asked else None for g, asked in zip(given, ctx.asked, strict=False)))
        if dlog_prob is None:
            dlog_prob = torch.zeros(index.shape, dtype=torch.float32, device=x.device)
        part = part_of_product(w)
        head = Head(*ctx.how)
        count = index.numel(), step_of(x, head.arithmetic, head.k_chunk)
        dw = adding(w, part, *count) if w.requires_grad else None
        dbias = adding(bias, None, *count) if bias is not None and bias.requires_grad else None
        weight, row = read.detach().to(x.dtype), None if bias is None else bias.detach()
        dx = gradients(dlog_prob, others, x, weight, index, row, head, ctx.needs_input_grad[0], dw, dbias)
        if dw is not None:
            fold(w, part)
        return dx, *[None] * 13


def head_of(
    x: torch.Tensor,
    w: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    logits_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    lse: bool = False,
    mean: bool = False,
    greedy: bool = False,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = WORKSPACE,
) -> Answers:
    """What is asked of each row of the logits, in one pass over the workspace: :func:`linear_log_prob`, and more.

    Args:
        entropy: ``-sum(p log p)``.
        lse: the logarithm of the sum of exponentials.
        mean: of the logits.
        greedy: the column of the largest logit, the lowest where several are.
    """
    how = (logits_dtype, float(temperature), softcap, entropy, lse, mean, greedy, arithmetic, k_chunk, workspace)
    if hasattr(w, "pydet_accumulates") and torch.is_grad_enabled():
        made = _AccumulatingHead.apply(x, w, bias, index, *how)
    else:
        made = torch.ops.pydet.linear_log_prob(x, w, index, bias, *how)
    asked = (entropy, lse, mean, greedy)
    return Answers(made[0], *(y if wanted else None for y, wanted in zip(made[1:], asked, strict=True)))


def linear_log_prob(
    x: torch.Tensor,
    w: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    logits_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = WORKSPACE,
) -> Any:
    """``log_prob(linear(x, w, bias), index)`` without the logits in memory, and with the bits of those two steps.

    Rows are taken in chunks, whose logits lie in the workspace and are thrown away; backward makes them again. How many
    rows a chunk has changes no bit, nor does how many there are in all: the gradient by w continues one sum over rows,
    which is cut at multiples of 16 of them, or of ``k_chunk``. So micro-batches of as many rows have the sums of one
    batch: a parameter of :func:`accumulate_gradients` gets them in its ``main_grad``.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16: hidden states.
        w: ``[N, K]``, of the type of ``x``: the weight of the head.
        index: ``[...]``, int32 or int64: the column of each row. One that is none of the row's (-100) gives NaN, and
            zeros in the gradient.
        bias: ``[N]``.
        logits_dtype: the type that logits are rounded to; that of ``x`` by default, as in :func:`linear`. What follows
            is float32.
        temperature: logits are divided by it, after they were rounded and capped.
        softcap: logits become ``softcap tanh(logits / softcap)``.
        return_entropy: return the entropy of each row too. It has a gradient.
        arithmetic, k_chunk: as in :func:`linear`, forward and backward.
        workspace: bytes that chunks may take, of which backward needs 16 rows of logits. Beside it a gradient by w
            that is not float32, and none of :func:`accumulate_gradients`, takes what sums of it in float32 do: these,
            which are rounded once, or where all logits fit there, these instead. A gradient in float32 holds logits
            itself until it is written.

    Returns:
        ``[...]``, float32; with ``return_entropy`` a pair of them.
    """
    how: dict[str, Any] = {"logits_dtype": logits_dtype, "temperature": temperature, "softcap": softcap}
    how |= {"arithmetic": arithmetic, "k_chunk": k_chunk, "workspace": workspace}
    made = head_of(x, w, index, bias, entropy=return_entropy, **how)
    return (made.log_prob, made.entropy) if return_entropy else made.log_prob


def sum_of_rows(loss: torch.Tensor) -> torch.Tensor:
    """The sum of all, in float32, in order: chains of 256 whose sums are added in ascending order."""
    rows = loss.reshape(1, -1)
    with torch.autocast(loss.device.type, enabled=False):
        ones = torch.ones((rows.shape[1], 1), dtype=torch.float32, device=loss.device)
        return torch.ops.pydet.gemm(rows, ones, None, None, "ieee", LOSS_ROWS)[0, 0]


class _Loss(NamedTuple):
    """The loss of rows, of what the head says of them."""

    label_smoothing: float
    z_loss: float

    @property
    def lse(self) -> bool:
        return self.mean or self.z_loss > 0

    @property
    def mean(self) -> bool:
        return self.label_smoothing > 0

    def __call__(
        self, log_prob: torch.Tensor, lse: torch.Tensor | None, mean: torch.Tensor | None, ignored: torch.Tensor
    ) -> torch.Tensor:
        loss = -log_prob
        if lse is not None:
            lse = lse.masked_fill(ignored, 0.0)  # a product with a NaN would be one in the gradient
            if mean is not None:
                loss = loss * (1.0 - self.label_smoothing) + (lse - mean) * self.label_smoothing
            if self.z_loss > 0:
                loss = loss + (lse * lse) * self.z_loss
        return loss.masked_fill(ignored, 0.0)


def _check_loss(op: str, reduction: str, known: tuple[str, ...], label_smoothing: float, z_loss: float) -> None:
    if reduction not in known:
        names = [repr(name) for name in known]
        fail(INVALID_VALUE, f"{op}: reduction is {reduction!r}, want {', '.join(names[:-1])} or {names[-1]}")
    if not 0.0 <= label_smoothing <= 1.0:
        fail(INVALID_VALUE, f"{op}: label_smoothing is {label_smoothing}, want a number from 0 to 1")
    if not 0.0 <= z_loss < float("inf"):
        fail(INVALID_VALUE, f"{op}: z_loss is {z_loss}, want a number from 0 up")


def linear_cross_entropy(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    logits_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = WORKSPACE,
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy(linear(x, w, bias), target)`` without the logits in memory.

    The negative :func:`linear_log_prob`, of rows that are not ignored, with its bits and chunks.

    Args:
        x, w, bias, logits_dtype, temperature, softcap, arithmetic, k_chunk, workspace: as in :func:`linear_log_prob`.
        target: ``[...]``, int32 or int64. What is neither a column nor ``ignore_index`` makes its row's loss NaN, and
            leaves zeros in the gradient; nothing waits for a device to say so.
        ignore_index: rows of this target have loss 0 and no gradient.
        label_smoothing: from 0 to 1, as in PyTorch: so much of the target is spread over all columns.
        z_loss: so many times the square of the logarithm of the sum of exponentials is added to a row's loss.
        reduction: ``"mean"`` over rows that are not ignored (NaN where all are), ``"sum"``, or ``"none"``. Sums go over
            rows in order (NUMERICS.md, "Head").

    Returns:
        A float32 scalar, or ``[...]``.
    """
    _check_loss("linear_cross_entropy", reduction, ("mean", "sum", "none"), label_smoothing, z_loss)
    rule = _Loss(label_smoothing, z_loss)
    how: dict[str, Any] = {"logits_dtype": logits_dtype, "temperature": temperature, "softcap": softcap}
    how |= {"arithmetic": arithmetic, "k_chunk": k_chunk, "workspace": workspace, "lse": rule.lse, "mean": rule.mean}
    ignored = target == ignore_index
    made = head_of(x, w, target.masked_fill(ignored, -1), bias, **how)
    loss = rule(made.log_prob, made.lse, made.mean, ignored)
    if reduction == "none":
        return loss
    total = sum_of_rows(loss)
    return total if reduction == "sum" else total / (~ignored).sum().to(torch.float32)


class LossAndGradients(NamedTuple):
    """What :func:`linear_cross_entropy_and_gradients` makes; None where it has no gradient of its own."""

    loss: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor | None
    dbias: torch.Tensor | None


def linear_cross_entropy_and_gradients(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gradient: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    logits_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = WORKSPACE,
) -> LossAndGradients:
    """:func:`linear_cross_entropy` and its gradients at once, with their bits: three products a chunk, where backward
    makes the logits again and so has four. The gradient of the loss must be known by then.

    It records nothing: ``hidden.backward(made.dx)`` goes on from here. A ``w`` and ``bias`` of
    :func:`accumulate_gradients` get theirs in ``main_grad``; others' are made, each sum rounded once.

    Args:
        gradient: of the loss: 1, or what it would be multiplied by, such as one part in so many micro-batches.
        reduction: ``"mean"`` or ``"sum"``.
        x, w, target, bias, ignore_index, label_smoothing, z_loss: as in :func:`linear_cross_entropy`, and so the rest.

    Returns:
        ``(loss, dx, dw, dbias)``: dw and dbias None where ``main_grad`` has them, or there is no bias.
    """
    _check_loss("linear_cross_entropy_and_gradients", reduction, ("mean", "sum"), label_smoothing, z_loss)
    head = Head(logits_dtype, float(temperature), softcap, arithmetic, k_chunk, workspace)
    rule, sums_to, means = _Loss(label_smoothing, z_loss), hasattr(w, "pydet_accumulates"), reduction == "mean"
    part, dbias = part_of_product(w) if sums_to else None, None
    with torch.no_grad():
        ignored = target == ignore_index
        index, count = target.masked_fill(ignored, -1), (~ignored).sum().to(torch.float32)
        ignored = ignored.reshape(-1)
        if isinstance(gradient, torch.Tensor):
            of_row = gradient.to(x.device, torch.float32)
        else:  # filled there: a graph that is captured may not copy from the host
            of_row = torch.full((), float(gradient), dtype=torch.float32, device=x.device)
        of_row = of_row / count if means else of_row
        start = room_for_sums(x, w, head)
        rows = target.numel(), step_of(x, arithmetic, k_chunk)
        dw = adding(w, part, *rows) if sums_to else start(w)
        if bias is not None:
            dbias = adding(bias, None, *rows) if sums_to else start(bias)
        losses, dx = loss_and_gradients(
            x.detach(),
            w.detach().to(x.dtype) if sums_to else w.detach(),
            index,
            None if bias is None else bias.detach(),
            head,
            lambda log_prob, lse, mean: rule(log_prob, lse, mean, ignored),
            (rule.lse, rule.mean),
            of_row,
            dw,
            dbias,
            continues=sums_to,
        )
        total = sum_of_rows(losses)
        loss = total / count if means else total
        if sums_to:
            fold(w, part)
            return LossAndGradients(loss, dx, None, None)
        made = None if bias is None or dbias is None else rounded(dbias[None], bias.dtype, head)[0]
        return LossAndGradients(loss, dx, rounded(dw, w.dtype, head), made)
