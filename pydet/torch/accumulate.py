"""Functions whose backward adds to sums in fp32, by which micro-batches come to the bits of one batch."""

from __future__ import annotations

from typing import Any

import torch

import pydet
from pydet.torch.ops import matrix


def main_grad(parameter: Any) -> Any:
    """The sum of a parameter, from zeros where it has none: the copy of a model has new parameters."""
    if not hasattr(parameter, "main_grad"):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.main_grad


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`matrix`, the elements of a row adjacent."""
    x = matrix(x)
    return x if x.stride(-1) == 1 else x.contiguous()


class AccumulatingLinear(torch.autograd.Function):
    """:func:`pydet.torch.linear` whose backward continues the sums in its parameters' ``main_grad``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        arithmetic: str,
        k_chunk: int | None,
        read_as: torch.dtype | None = None,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x)
        ctx.w, ctx.bias, ctx.options = w, bias, {"arithmetic": arithmetic, "k_chunk": k_chunk}
        return torch.ops.pydet.skinny_gemm(x, w.to(read_as or w.dtype), bias, None, arithmetic, k_chunk)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x,), w, bias = ctx.saved_tensors, ctx.w, ctx.bias
        rows, dx = _rows(dy.to(x.dtype)), None
        if ctx.needs_input_grad[0]:
            dx = pydet.gemm(rows, w.detach().to(x.dtype), **ctx.options).view(x.shape)
        if w.requires_grad:
            pydet.gemm_db(rows, _rows(x), out=main_grad(w), accumulate=True, **ctx.options)
        if bias is not None and bias.requires_grad:
            ones = torch.ones_like(rows[:, :1])
            pydet.gemm_db(ones, rows, out=main_grad(bias)[None], accumulate=True, **ctx.options)
        return dx, None, None, None, None, None


class AccumulatingExperts(torch.autograd.Function):
    """A layer of experts on rows in groups, ``[G, N, K]`` matrices or transposed ``[G, K, N]``, likewise."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        group_end: torch.Tensor,
        transposed: bool,
        arithmetic: str,
        k_chunk: int | None,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x, group_end)
        ctx.w, ctx.bias, ctx.transposed, ctx.how = w, bias, transposed, (arithmetic, k_chunk)
        return torch.ops.pydet.grouped_gemm(x, w if transposed else w.mT, group_end, bias, None, arithmetic, k_chunk)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, ends), w, bias = ctx.saved_tensors, ctx.w, ctx.bias
        rows, x, dx = _rows(dy.to(x.dtype)), _rows(x), None
        into = {"accumulate": True, "arithmetic": ctx.how[0], "k_chunk": ctx.how[1]}
        if ctx.needs_input_grad[0]:
            matrices = w.detach().to(x.dtype)
            matrices = matrices.mT if ctx.transposed else matrices
            dx = torch.ops.pydet.grouped_gemm(rows, matrices, ends, None, None, *ctx.how)
        if w.requires_grad:
            left, right = (x, rows) if ctx.transposed else (rows, x)
            pydet.grouped_gemm(left.t(), right, ends, out=main_grad(w), **into)
        if bias is not None and bias.requires_grad:
            ones = rows.new_ones((1, rows.shape[0]))
            pydet.grouped_gemm(ones, rows, ends, out=main_grad(bias)[:, None], **into)
        return dx, None, None, None, None, None, None


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
        into = {"dweight": main_grad(weight), "accumulate": True} if weight.requires_grad else {}
        operands = (_rows(dy), _rows(x), weight.detach(), rstd.view(-1))
        dx, _ = pydet.rmsnorm_backward(*operands, weight_offset=ctx.weight_offset, **into)
        return dx.view(x.shape), None, None, None


class AccumulatingLayerNorm(torch.autograd.Function):
    """:func:`layer_norm` whose backward continues the sums in its parameters' ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        y, mean, rstd = torch.ops.pydet.layernorm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, mean, rstd), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        into = {"dweight": main_grad(weight)} if weight.requires_grad else {}
        if bias is not None and bias.requires_grad:
            into["dbias"] = main_grad(bias)
        operands = (_rows(dy), _rows(x), weight.detach(), mean.view(-1), rstd.view(-1))
        dx, *_ = pydet.layernorm_backward(*operands, **into, has_bias=False, accumulate=bool(into))
        return dx.view(x.shape), None, None, None
