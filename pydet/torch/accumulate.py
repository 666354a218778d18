"""Gradients of micro-batches that add up to the bits of one batch."""

from __future__ import annotations

from typing import Any

import torch

import pydet
from pydet._native import INVALID_VALUE, fail
from pydet.torch.modules import Linear, RMSNorm


def accumulate_gradients(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """From now on pydet's modules in ``model`` sum their parameters' gradients in fp32, in ``parameter.main_grad``.

    ``backward()`` continues the sums in ``main_grad`` and leaves ``grad`` alone. Rows that come in several calls then
    give the bits of one call on all of them in that order, if the calls are cut at multiples of 16 rows (of ``k_chunk``
    where there is one), and at multiples of ``pydet.DWEIGHT_ROWS`` for :class:`RMSNorm`. Pad with rows whose gradient
    is zero to get there. Zero ``main_grad`` between steps.
    ``torch.compile`` leaves these modules to eager mode, and refuses them under ``fullgraph=True``.

    A parameter of several modules (tied weights) sums them in the order in which backward reaches them, which is then
    part of the bits.

    Args:
        model: a module; its :class:`Linear` and :class:`RMSNorm` take part.

    Returns:
        The parameters that have a ``main_grad`` now; those of other modules keep their ``grad``.

    Raises:
        Error: ``model`` is no module, or there is no module of pydet's in it.
    """
    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"accumulate_gradients: model is {type(model).__qualname__}, want a torch.nn.Module")
    parameters: list[torch.nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, Linear | RMSNorm):
            module.accumulates = True
            for parameter in module.parameters(recurse=False):
                if not hasattr(parameter, "main_grad"):
                    _main_grad(parameter)
                    parameters.append(parameter)
    if not parameters:
        fail(INVALID_VALUE, "accumulate_gradients: no Linear or RMSNorm of pydet's in the model; convert() it first")
    return parameters


def _main_grad(parameter: Any) -> Any:
    """The sum of a parameter, from zeros where it has none: the copy of a model has new parameters."""
    if not hasattr(parameter, "main_grad"):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.main_grad


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The rows of all leading dimensions under each other, their elements adjacent."""
    x = x[None] if x.dim() == 1 else x.flatten(0, -2)
    return x if x.stride(-1) == 1 else x.contiguous()


class AccumulatingLinear(torch.autograd.Function):
    """:func:`pydet.torch.linear` whose backward continues the sums in its parameters' ``main_grad``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, arithmetic: str, k_chunk: int | None
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x)
        ctx.w, ctx.bias, ctx.options = w, bias, {"arithmetic": arithmetic, "k_chunk": k_chunk}
        return torch.ops.pydet.skinny_gemm(x, w, bias, None, arithmetic, k_chunk)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x,), w, bias = ctx.saved_tensors, ctx.w, ctx.bias
        rows, dx = _rows(dy.to(x.dtype)), None
        if ctx.needs_input_grad[0]:
            dx = pydet.gemm(rows, w.detach().to(x.dtype), **ctx.options).view(x.shape)
        if w.requires_grad:
            pydet.gemm_db(rows, _rows(x), out=_main_grad(w), accumulate=True, **ctx.options)
        if bias is not None and bias.requires_grad:
            ones = torch.ones_like(rows[:, :1])
            pydet.gemm_db(ones, rows, out=_main_grad(bias)[None], accumulate=True, **ctx.options)
        return dx, None, None, None, None


class AccumulatingRmsNorm(torch.autograd.Function):
    """:func:`pydet.torch.rms_norm` whose backward continues the sum in its weight's ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> torch.Tensor:
        y, rstd = torch.ops.pydet.rmsnorm(x, weight, eps, weight_offset)
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.weight_offset = weight, weight_offset
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, rstd), weight = ctx.saved_tensors, ctx.weight
        into = {"dweight": _main_grad(weight), "accumulate": True} if weight.requires_grad else {}
        operands = (_rows(dy), _rows(x), weight.detach(), rstd.view(-1))
        dx, _ = pydet.rmsnorm_backward(*operands, weight_offset=ctx.weight_offset, **into)
        return dx.view(x.shape), None, None, None
