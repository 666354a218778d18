"""``rmsnorm``, and what it takes besides: ``rmsnorm_residual``, ``rmsnorm_bias`` and ``rmsnorm_bias_residual``.

They are one operation with fewer or more operands: each operator says which of ``x``, ``residual``, ``weight`` and
``bias`` it has, and the rest is written once. Backward calls ``rmsnorm_backward``, or where there is a bias
``rmsnorm_bias_backward``, whose ``bias`` says what ``dbias`` is like. A ``dweight`` that is not has no elements.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pydet.ops.rmsnorm import _rmsnorm, _rmsnorm_backward
from pydet.torch.ops.register import Norm, Tensor, define, define_norm
from pydet.torch.ops.tracing import TRACED, operands

# ---- Forward ---------------------------------------------------------------------------------------------------------


def _run(x: Tensor, residual: Any, weight: Any, bias: Any, eps: float, weight_offset: float) -> tuple[Tensor, ...]:
    return _rmsnorm(x, weight, eps, bias=bias, weight_offset=weight_offset, residual=residual)


def _fake(x: Tensor, residual: Any, weight: Any, bias: Any, *_: float) -> tuple[Tensor, ...]:
    rows, added, weights, biases = operands("rmsnorm", x=x, residual=residual, weight=weight, bias=bias)
    TRACED.norm("rmsnorm", rows, (added,), weights, bias=biases, heads=True)
    made = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    return made if residual is None else (*made, residual.new_empty(x.shape))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: Norm, *given: Any) -> tuple[Tensor, ...]:
        x, _, weight, bias, _, ctx.weight_offset = norm.of(*given)
        y, rstd, *total = norm.below(*given)
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(*(total or (x,)), weight, bias, rstd)
        ctx.norm = norm
        return y, rstd, *total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor, *dsum: Tensor) -> tuple[Any, ...]:
        x, weight, bias, rstd = ctx.saved_tensors
        rest = rstd, ctx.weight_offset, *dsum
        if bias is None:
            dx, dweight, *dbias = torch.ops.pydet.rmsnorm_backward(dy, x, weight, *rest)
        else:
            dx, dweight, *dbias = torch.ops.pydet.rmsnorm_bias_backward(dy, x, weight, bias, *rest)
        of_x, of_residual = (dx.to(dy.dtype), dx) if dsum else (dx, None)
        of_bias = dbias[0] if dbias else None
        return ctx.norm.gradients(of_x, of_residual, None if weight is None else dweight, of_bias, None, None)


# ---- Backward --------------------------------------------------------------------------------------------------------


def _run_backward(
    dy: Tensor, x: Tensor, weight: Any, rstd: Tensor, weight_offset: float, dresidual: Any
) -> tuple[Tensor, Tensor]:
    dx, dweight = _rmsnorm_backward(dy, x, weight, rstd, weight_offset=weight_offset, dresidual=dresidual)
    return dx, x.new_empty(0) if dweight is None else dweight


def _run_bias_backward(
    dy: Tensor, x: Tensor, weight: Any, bias: Tensor, rstd: Tensor, weight_offset: float, dresidual: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    options = {"weight_offset": weight_offset, "dresidual": dresidual, "dbias": dbias}
    dx, dweight, dbias = _rmsnorm_backward(dy, x, weight, rstd, **options)
    return dx, x.new_empty(0) if dweight is None else dweight, dbias


def _fake_bias_backward(
    dy: Tensor, x: Tensor, weight: Any, bias: Any, rstd: Tensor, _: float, dresidual: Any
) -> tuple[Tensor, ...]:
    op = "rmsnorm_backward"
    rows, gradient, weights, of_rows, added, biases = operands(
        op, x=x, dy=dy, weight=weight, rstd=rstd, dresidual=dresidual, bias=bias
    )
    TRACED.norm(op, rows, (gradient, added), weights, of_rows, bias=biases, heads=True)
    made = x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return made if bias is None else (*made, bias.new_empty(bias.shape))


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Any, rstd: Tensor, weight_offset: float, dresidual: Any
) -> tuple[Tensor, ...]:
    return _fake_bias_backward(dy, x, weight, None, rstd, weight_offset, dresidual)


# ---- The operators ---------------------------------------------------------------------------------------------------

_END = "float eps, float weight_offset=0.0)"
_BACKWARD_END = "Tensor rstd, float weight_offset=0.0, Tensor? dresidual=None)"

_define = partial(define_norm, fake=_fake, function=_RmsNorm)

_define(
    f"rmsnorm(Tensor x, Tensor? weight, {_END} -> (Tensor, Tensor)",
    lambda x, weight, eps, offset: _rmsnorm(x, weight, eps, weight_offset=offset),
    of=lambda x, weight, *rest: (x, None, weight, None, *rest),
    shared=(1,),
)
_define(
    f"rmsnorm_residual(Tensor x, Tensor residual, Tensor? weight, {_END} -> (Tensor, Tensor, Tensor)",
    lambda x, residual, weight, eps, offset: _rmsnorm(x, weight, eps, weight_offset=offset, residual=residual),
    of=lambda x, residual, weight, *rest: (x, residual, weight, None, *rest),
    shared=(2,),
)
_define(
    f"rmsnorm_bias(Tensor x, Tensor? weight, Tensor bias, {_END} -> (Tensor, Tensor)",
    lambda x, weight, bias, eps, offset: _run(x, None, weight, bias, eps, offset),
    of=lambda x, weight, bias, *rest: (x, None, weight, bias, *rest),
    shared=(1, 2),
)
_define(
    f"rmsnorm_bias_residual(Tensor x, Tensor residual, Tensor? weight, Tensor bias, {_END} -> (Tensor, Tensor, Tensor)",
    _run,
    of=lambda *given: given,
    shared=(2, 3),
)
define(
    f"rmsnorm_backward(Tensor dy, Tensor x, Tensor? weight, {_BACKWARD_END} -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
define(
    f"rmsnorm_bias_backward(Tensor dy, Tensor x, Tensor? weight, Tensor bias, {_BACKWARD_END}"
    " -> (Tensor, Tensor, Tensor)",
    _run_bias_backward,
    _fake_bias_backward,
)
