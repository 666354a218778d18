"""``grouped_gemm``: :func:`pydet.grouped_gemm` with a gradient by a, b and bias, which is made of the same operator.

Rows that are in no group are zeros, in the result and in the gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.hooks import unknown
from pydet.ops.grouped import _grouped_gemm, check_ends
from pydet.torch.ops.register import GEMM_OPTIONS, Call, Dtype, Tensor, define, index_of
from pydet.torch.ops.tracing import TRACED, operands

_OP = "grouped_gemm"


def _run_grouped_gemm(
    a: Tensor, b: Tensor, group_end: Tensor, bias: Any, out_dtype: Dtype, arithmetic: str, k_chunk: int | None
) -> Tensor:
    options = {"bias": bias, "arithmetic": arithmetic, "k_chunk": k_chunk}
    group_end = group_end.contiguous()
    check_ends(_OP, a, b, group_end)
    if a.dim() != 2 or b.dim() != 3:
        return _grouped_gemm(a, b, group_end, out_dtype=index_of(out_dtype), **options)
    out = a.new_zeros((a.shape[0], b.shape[2]), dtype=out_dtype)
    return _grouped_gemm(a, b, group_end, out=out, **options)


def _fake_grouped_gemm(
    a: Tensor, b: Tensor, group_end: Tensor, bias: Any, out_dtype: Dtype, arithmetic: str, _: Any
) -> Tensor:
    left, right, added = operands(_OP, a=a, b=b, bias=bias)
    for operand in (left, right, added):
        if operand is not None:
            TRACED.read(_OP, operand, 1)
    unknown(arithmetic, _OP, "arithmetic")
    TRACED.same_type(_OP, left, right)
    if group_end.dtype != torch.int32:
        fail(INVALID_DTYPE, f"{_OP}: group_end is {group_end.dtype}, want int32")
    if a.dim() != 2 or b.dim() not in (2, 3) or group_end.dim() != 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("a", a), ("b", b), ("group_end", group_end)))
        fail(constants.PYDET_INVALID_SHAPE, f"{_OP}: {shapes}, want a matrix, one or a batch, and [G]")
    groups, n = group_end.shape[0], b.shape[-1]
    torch._check(
        a.shape[1] == b.shape[-2] and (b.dim() == 2 or b.shape[0] == groups),
        lambda: f"{_OP}: a {tuple(a.shape)}, b {tuple(b.shape)} and group_end {tuple(group_end.shape)} do not fit",
    )
    torch._check(
        bias is None or tuple(bias.shape) == (groups, n),
        lambda: f"{_OP}: bias is {bias is not None and tuple(bias.shape)}, want {(groups, n)}",
    )
    return a.new_empty((a.shape[0], n) if b.dim() == 3 else (groups, a.shape[0], n), dtype=out_dtype)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, group_end: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(a, b, group_end, bias)
        _, ctx.arithmetic, ctx.k_chunk = options
        return _below(a, b, group_end, bias, *options)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
        (a, b, ends, bias), how = ctx.saved_tensors, (ctx.arithmetic, ctx.k_chunk)
        da = db = dbias = None
        dy = dc.to(a.dtype)

        def product(left: Tensor, right: Tensor, dtype: Dtype = None) -> Tensor:
            return torch.ops.pydet.grouped_gemm(left, right, ends, None, dtype, *how)

        if b.dim() == 3:
            if ctx.needs_input_grad[0]:
                da = product(dy, b.mT)
            if ctx.needs_input_grad[1]:  # as b lies, so that it can become a parameter's gradient as it is
                db = product(dy.t(), a).mT if b.stride(-1) != 1 else product(a.t(), dy)
            if bias is not None and ctx.needs_input_grad[3]:
                dbias = product(dy.new_ones((1, dy.shape[0])), dy, bias.dtype)[:, 0]
        else:
            if ctx.needs_input_grad[0]:
                da = product(b, dy.mT).t()
            if ctx.needs_input_grad[1]:
                db = product(a.t(), dy)
            if bias is not None and ctx.needs_input_grad[3]:
                ones = dy.new_ones((*dy.shape[:2], 1))
                dbias = torch.ops.pydet.gemm_db(ones, dy, bias.dtype, *how)[:, 0]
        return da, db, None, dbias, None, None, None


def _vmap_grouped_gemm(operator: Any) -> Call:
    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        """One call for each of the batch: an operand of groups has no dimension for it."""
        given = list(zip(arguments, (*dims, *(None,) * len(arguments)), strict=False))
        each = ([x if dim is None else x.select(dim, i) for x, dim in given] for i in range(info.batch_size))
        return torch.stack([operator(*operands) for operands in each]), 0

    return rule


_below = define(
    f"{_OP}(Tensor a, Tensor b, Tensor group_end, Tensor? bias=None, {GEMM_OPTIONS}) -> Tensor",
    _run_grouped_gemm,
    _fake_grouped_gemm,
    gradient=_GroupedGemm.apply,
    vmap=_vmap_grouped_gemm,
    autocast=2,
)
