"""RMSNorm with a bias as ``torch.ops.pydet.*``: schema, kernel, shapes for tracing, autograd, vmap.

``rmsnorm_bias(x, weight, bias, eps, weight_offset) -> (y, rstd)`` and ``rmsnorm_bias_residual(x, residual, weight,
bias, eps, weight_offset) -> (y, rstd, sum)`` are differentiable; their backward calls ``rmsnorm_bias_backward(dy, x,
weight, bias, rstd, weight_offset, dresidual) -> (dx, dweight, dbias)``, whose ``bias`` says what ``dbias`` is like. A
``dweight`` that is not has no elements. As with ``rmsnorm``, ``torch.vmap`` is defined over rows, and forward mode and
second derivatives are refused.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from pydet.ops.rmsnorm import _rmsnorm, _rmsnorm_backward
from pydet.torch import ops

Tensor: TypeAlias = torch.Tensor

_SCHEMAS = {
    "rmsnorm_bias": "(Tensor x, Tensor? weight, Tensor bias, float eps, float weight_offset=0.0) -> (Tensor, Tensor)",
    "rmsnorm_bias_residual": "(Tensor x, Tensor residual, Tensor? weight, Tensor bias, float eps,"
    " float weight_offset=0.0) -> (Tensor, Tensor, Tensor)",
    "rmsnorm_bias_backward": "(Tensor dy, Tensor x, Tensor? weight, Tensor bias, Tensor rstd,"
    " float weight_offset=0.0, Tensor? dresidual=None) -> (Tensor, Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    ops._library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _run(
    x: Tensor, weight: Tensor | None, bias: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _rmsnorm(x, weight, eps, bias=bias, weight_offset=weight_offset)


def _run_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    return _rmsnorm(x, weight, eps, bias=bias, weight_offset=weight_offset, residual=residual)


def _run_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    rstd: Tensor,
    weight_offset: float = 0.0,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    options = {"weight_offset": weight_offset, "dresidual": dresidual, "dbias": dbias}
    dx, dweight, dbias = _rmsnorm_backward(dy, x, weight, rstd, **options)
    return dx, x.new_empty(0) if dweight is None else dweight, dbias


# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    rows, weights, biases = ops._operands("rmsnorm", x=x, weight=weight, bias=bias)
    ops.TRACED.norm("rmsnorm", rows, (), weights, bias=biases, heads=True)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    rows, added, weights, biases = ops._operands("rmsnorm", x=x, residual=residual, weight=weight, bias=bias)
    ops.TRACED.norm("rmsnorm", rows, (added,), weights, bias=biases, heads=True)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32), residual.new_empty(x.shape)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    rstd: Tensor,
    weight_offset: float = 0.0,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "rmsnorm_backward"
    rows, gradient, weights, of_rows, added, biases = ops._operands(
        op, x=x, dy=dy, weight=weight, rstd=rstd, dresidual=dresidual, bias=bias
    )
    ops.TRACED.norm(op, rows, (gradient, added), weights, of_rows, bias=biases, heads=True)
    dweight = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), dweight, bias.new_empty(bias.shape)


# ---- Autograd --------------------------------------------------------------------------------------------------------


class _RmsNormBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor]:
        y, rstd = ops._call(_run, _op, x, weight, bias, eps, weight_offset)
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(x, weight, bias, rstd)
        ctx.weight_offset = weight_offset
        return y, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Any, ...]:
        x, weight, bias, rstd = ctx.saved_tensors
        dx, dweight, dbias = torch.ops.pydet.rmsnorm_bias_backward(dy, x, weight, bias, rstd, ctx.weight_offset)
        return dx, None if weight is None else dweight, dbias, None, None


class _RmsNormBiasResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, rstd, total = ops._call(_run_residual, _residual_op, x, residual, weight, bias, eps, weight_offset)
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(total, weight, bias, rstd)
        ctx.weight_offset = weight_offset
        return y, rstd, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor, dsum: Tensor) -> tuple[Any, ...]:
        total, weight, bias, rstd = ctx.saved_tensors
        operands = (dy, total, weight, bias, rstd, ctx.weight_offset, dsum)
        dx, dweight, dbias = torch.ops.pydet.rmsnorm_bias_backward(*operands)
        return dx.to(dy.dtype), dx, None if weight is None else dweight, dbias, None, None


def _differentiable(
    x: Tensor, weight: Tensor | None, bias: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    arguments = (x, weight, bias, eps, weight_offset)
    if ops._wants_gradient(x, weight, bias):
        return ops._differentiate(_RmsNormBias, "rmsnorm", *arguments)
    return ops._call(_run, _op, *arguments)


def _differentiable_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = (x, residual, weight, bias, eps, weight_offset)
    if ops._wants_gradient(x, residual) or ops._wants_gradient(x, weight, bias):
        return ops._differentiate(_RmsNormBiasResidual, "rmsnorm", *arguments)
    return ops._call(_run_residual, _residual_op, *arguments)


# ---- Registration ----------------------------------------------------------------------------------------------------

_op, _residual_op = torch.ops.pydet.rmsnorm_bias.default, torch.ops.pydet.rmsnorm_bias_residual.default
for _name, _kernel, _traced, _above in (
    ("rmsnorm_bias", _run, _fake, _differentiable),
    ("rmsnorm_bias_residual", _run_residual, _fake_residual, _differentiable_residual),
    ("rmsnorm_bias_backward", _run_backward, _fake_backward, ops._refusing("rmsnorm_bias_backward", _run_backward)),
):
    ops._library.impl(_name, ops._of_any_strides(_kernel), "CompositeExplicitAutograd")
    ops._library.impl(_name, _above, "Autograd")
    torch.library.register_fake(f"pydet::{_name}", _traced, lib=ops._library)
for _name, _shared, _results in (("rmsnorm_bias", (1, 2), 2), ("rmsnorm_bias_residual", (2, 3), 3)):
    torch.library.register_vmap(f"pydet::{_name}", ops._vmap_rows(_name, _shared, _results), lib=ops._library)
