"""Layer norm as ``torch.ops.pydet.*`` and with a gradient: schema, kernel, shapes for tracing, autograd, vmap.

``layernorm(x, weight, bias, eps, weight_offset) -> (y, mean, rstd)`` and ``layernorm_residual(x, residual, weight,
bias, eps, weight_offset) -> (y, mean, rstd, sum)`` are differentiable; their backward calls ``layernorm_backward(dy, x,
weight, bias, mean, rstd, weight_offset, dresidual) -> (dx, dweight, dbias)``, whose ``bias`` says whether ``dbias`` is
wanted, and of what type. A gradient that is not has no elements. As with ``rmsnorm``, ``torch.vmap`` is defined over
rows, and forward mode and second derivatives are refused.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

import pydet
from pydet.ops.layernorm import _layernorm, _layernorm_backward
from pydet.torch import ops
from pydet.torch.accumulate import _rows, main_grad

Tensor: TypeAlias = torch.Tensor

_SCHEMAS = {
    "layernorm": "(Tensor x, Tensor? weight, Tensor? bias, float eps, float weight_offset=0.0)"
    " -> (Tensor, Tensor, Tensor)",
    "layernorm_residual": "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps,"
    " float weight_offset=0.0) -> (Tensor, Tensor, Tensor, Tensor)",
    "layernorm_backward": "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd,"
    " float weight_offset=0.0, Tensor? dresidual=None) -> (Tensor, Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    ops._library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _run(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    return _layernorm(x, weight, bias, eps, weight_offset=weight_offset)


def _run_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _layernorm(x, weight, bias, eps, weight_offset=weight_offset, residual=residual)


def _run_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    weight_offset: float = 0.0,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _layernorm_backward(
        dy,
        x,
        weight,
        mean,
        rstd,
        weight_offset=weight_offset,
        dresidual=dresidual,
        has_bias=False,
        dbias=None if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=bias.device),
    )
    return dx, x.new_empty(0) if dweight is None else dweight, x.new_empty(0) if dbias is None else dbias


# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _of_rows(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    rows, weights, biases = ops._operands("layernorm", x=x, weight=weight, bias=bias)
    ops.TRACED.norm("layernorm", rows, (), weights)
    ops.TRACED.norm("layernorm", rows, (), biases)
    return x.new_empty(x.shape), _of_rows(x), _of_rows(x)


def _fake_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, added, weights, biases = ops._operands("layernorm", x=x, residual=residual, weight=weight, bias=bias)
    ops.TRACED.norm("layernorm", rows, (added,), weights)
    ops.TRACED.norm("layernorm", rows, (), biases)
    return x.new_empty(x.shape), _of_rows(x), _of_rows(x), x.new_empty(x.shape)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    weight_offset: float = 0.0,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "layernorm_backward"
    rows, gradient, weights, means, of_rows, added, biases = ops._operands(
        op, x=x, dy=dy, weight=weight, mean=mean, rstd=rstd, dresidual=dresidual, bias=bias
    )
    ops.TRACED.norm(op, rows, (gradient, added), weights, of_rows)
    ops.TRACED.norm(op, rows, (), biases, means)
    dweight, dbias = (x.new_empty(0) if v is None else v.new_empty(v.shape) for v in (weight, bias))
    return x.new_empty(x.shape), dweight, dbias


# ---- Autograd --------------------------------------------------------------------------------------------------------


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, rstd = ops._call(_run, _op, x, weight, bias, eps, weight_offset)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.weight_offset = weight_offset
        return y, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = torch.ops.pydet.layernorm_backward(dy, x, weight, bias, mean, rstd, ctx.weight_offset)
        return dx, None if weight is None else dweight, None if bias is None else dbias, None, None


class _LayerNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        weight_offset: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        arguments = (x, residual, weight, bias, eps, weight_offset)
        y, mean, rstd, total = ops._call(_run_residual, _residual_op, *arguments)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(total, weight, bias, mean, rstd)
        ctx.weight_offset = weight_offset
        return y, mean, rstd, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor, __: Tensor, dsum: Tensor) -> tuple[Any, ...]:
        total, weight, bias, mean, rstd = ctx.saved_tensors
        operands = (dy, total, weight, bias, mean, rstd, ctx.weight_offset, dsum)
        dx, dweight, dbias = torch.ops.pydet.layernorm_backward(*operands)
        return dx, dx, None if weight is None else dweight, None if bias is None else dbias, None, None


def _differentiable(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = (x, weight, bias, eps, weight_offset)
    if ops._wants_gradient(x, weight, bias):
        return ops._differentiate(_LayerNorm, "layernorm", *arguments)
    return ops._call(_run, _op, *arguments)


def _differentiable_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = (x, residual, weight, bias, eps, weight_offset)
    if ops._wants_gradient(x, residual) or ops._wants_gradient(x, weight, bias):
        return ops._differentiate(_LayerNormResidual, "layernorm", *arguments)
    return ops._call(_run_residual, _residual_op, *arguments)


class AccumulatingLayerNorm(torch.autograd.Function):
    """:func:`layer_norm` whose backward continues the sums in its parameters' ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = torch.ops.pydet.layernorm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, mean, rstd), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        into = {"dweight": main_grad(weight)} if weight.requires_grad else {}
        if bias is not None and bias.requires_grad:
            into["dbias"] = main_grad(bias)
        operands = (_rows(dy), _rows(x), weight.detach(), mean.view(-1), rstd.view(-1))
        dx, *_ = pydet.layernorm_backward(*operands, **into, has_bias=False, accumulate=bool(into))
        return dx.view(x.shape), None, None, None


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``y = (x - mean) rstd (weight + weight_offset) + bias`` over the last dimension: :func:`pydet.layernorm` with a
    gradient.

    Args:
        x: ``[..., N]``.
        weight, bias: ``[N]`` of any of the three types, or None for ones and zeros.
        eps: added to the variance.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``; then their sum is normalised.

    Returns:
        ``y``, of the type of ``x``; with a residual ``(y, x + residual)``.
    """
    if residual is None:
        return torch.ops.pydet.layernorm(x, weight, bias, eps, weight_offset)[0]
    y, _, _, total = torch.ops.pydet.layernorm_residual(x, residual, weight, bias, eps, weight_offset)
    return y, total


# ---- Registration ----------------------------------------------------------------------------------------------------

_op, _residual_op = torch.ops.pydet.layernorm.default, torch.ops.pydet.layernorm_residual.default
for _name, _kernel, _traced, _above in (
    ("layernorm", _run, _fake, _differentiable),
    ("layernorm_residual", _run_residual, _fake_residual, _differentiable_residual),
    ("layernorm_backward", _run_backward, _fake_backward, ops._refusing("layernorm_backward", _run_backward)),
):
    ops._library.impl(_name, ops._of_any_strides(_kernel), "CompositeExplicitAutograd")
    ops._library.impl(_name, _above, "Autograd")
    torch.library.register_fake(f"pydet::{_name}", _traced, lib=ops._library)
for _name, _shared, _results in (("layernorm", (1, 2), 3), ("layernorm_residual", (2, 3), 4)):
    torch.library.register_vmap(f"pydet::{_name}", ops._vmap_rows(_name, _shared, _results), lib=ops._library)
