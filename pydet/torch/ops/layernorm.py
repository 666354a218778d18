"""``layernorm`` and ``layernorm_residual``, and ``layernorm_backward``, which their gradient calls.

The ``bias`` of ``layernorm_backward`` says whether ``dbias`` is wanted, and of what type. A gradient that is not has no
elements.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pydet.ops.layernorm import _layernorm, _layernorm_backward
from pydet.torch.ops.register import Norm, Tensor, define, define_norm
from pydet.torch.ops.tracing import TRACED, operands

# ---- Forward ---------------------------------------------------------------------------------------------------------


def _run(x: Tensor, residual: Any, weight: Any, bias: Any, eps: float, weight_offset: float) -> tuple[Tensor, ...]:
    return _layernorm(x, weight, bias, eps, weight_offset=weight_offset, residual=residual)


def _fake(x: Tensor, residual: Any, weight: Any, bias: Any, *_: float) -> tuple[Tensor, ...]:
    rows, added, weights, biases = operands("layernorm", x=x, residual=residual, weight=weight, bias=bias)
    TRACED.norm("layernorm", rows, (added,), weights)
    TRACED.norm("layernorm", rows, (), biases)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    made = x.new_empty(x.shape), mean, rstd
    return made if residual is None else (*made, x.new_empty(x.shape))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: Norm, *given: Any) -> tuple[Tensor, ...]:
        x, _, weight, bias, _, ctx.weight_offset = norm.of(*given)
        y, mean, rstd, *total = norm.below(*given)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(*(total or (x,)), weight, bias, mean, rstd)
        ctx.norm = norm
        return y, mean, rstd, *total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor, __: Tensor, *dsum: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        rest = mean, rstd, ctx.weight_offset, *dsum
        dx, dweight, dbias = torch.ops.pydet.layernorm_backward(dy, x, weight, bias, *rest)
        of_vectors = None if weight is None else dweight, None if bias is None else dbias
        return ctx.norm.gradients(dx, dx if dsum else None, *of_vectors, None, None)


# ---- Backward --------------------------------------------------------------------------------------------------------


def _run_backward(
    dy: Tensor, x: Tensor, weight: Any, bias: Any, mean: Tensor, rstd: Tensor, weight_offset: float, dresidual: Any
) -> tuple[Tensor, Tensor, Tensor]:
    options = {"weight_offset": weight_offset, "dresidual": dresidual, "has_bias": False}
    made = None if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    dx, dweight, dbias = _layernorm_backward(dy, x, weight, mean, rstd, dbias=made, **options)
    return dx, x.new_empty(0) if dweight is None else dweight, x.new_empty(0) if dbias is None else dbias


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Any, bias: Any, mean: Tensor, rstd: Tensor, _: float, dresidual: Any
) -> tuple[Tensor, Tensor, Tensor]:
    op = "layernorm_backward"
    rows, gradient, weights, means, of_rows, added, biases = operands(
        op, x=x, dy=dy, weight=weight, mean=mean, rstd=rstd, dresidual=dresidual, bias=bias
    )
    TRACED.norm(op, rows, (gradient, added), weights, of_rows)
    TRACED.norm(op, rows, (), biases, means)
    dweight, dbias = (x.new_empty(0) if v is None else v.new_empty(v.shape) for v in (weight, bias))
    return x.new_empty(x.shape), dweight, dbias


# ---- The operators ---------------------------------------------------------------------------------------------------

_define = partial(define_norm, fake=_fake, function=_LayerNorm)

_VECTORS = "Tensor? weight, Tensor? bias"
_define(
    f"layernorm(Tensor x, {_VECTORS}, float eps, float weight_offset=0.0) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, bias, eps, offset: _layernorm(x, weight, bias, eps, weight_offset=offset),
    of=lambda x, *rest: (x, None, *rest),
    shared=(1, 2),
)
_define(
    f"layernorm_residual(Tensor x, Tensor residual, {_VECTORS}, float eps, float weight_offset=0.0)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    of=lambda *given: given,
    shared=(2, 3),
)
define(
    f"layernorm_backward(Tensor dy, Tensor x, {_VECTORS}, Tensor mean, Tensor rstd, float weight_offset=0.0,"
    " Tensor? dresidual=None) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
