"""Products of groups, as the layers of a mixture of experts are: the operator, its gradients, and torch's four forms.

``torch.ops.pydet.grouped_gemm(a, b, group_end, bias, out_dtype, arithmetic, k_chunk)`` is :func:`pydet.grouped_gemm`
with a gradient, by a, b and bias, which is made of the same operator. Rows that are in no group are zeros, in the
result and in the gradients.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from pydet._native import INVALID_DEVICE, INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.hooks import unknown
from pydet.ops import Arithmetic
from pydet.ops.grouped import _grouped_gemm
from pydet.torch import ops
from pydet.torch.ops import _GEMM_OPTIONS, Dtype, _index

Tensor: TypeAlias = torch.Tensor

_OP = "grouped_gemm"


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    """``torch.nn.functional.grouped_mm`` with pydet's bits, a gradient by every operand, and any strides.

    ``offs`` cuts one dimension of the two-dimensional operands into groups: group g goes from ``offs[g - 1]`` (0 for
    the first) to ``offs[g]``. Nothing waits for it, and any boundary will do. A row's bits are those of :func:`gemm` on
    that row and its group's matrix: not of the other rows, nor of how many there are.

    Args:
        mat_a, mat_b: float32, bfloat16 or float16, of one type, in one of four forms:
            ``[T, K]`` and ``[G, K, N]``: ``[T, N]``, groups of rows (a layer of experts);
            ``[M, T]`` and ``[T, N]``: ``[G, M, N]``, groups along what is summed (its weights' gradient);
            ``[G, M, K]`` and ``[G, K, N]``: ``[G, M, N]``, a batch;
            ``[G, M, K]`` and ``[K, T]``: ``[M, T]``, groups of columns.
        offs: ``[G]``, int32, on the operands' device; None for a batch. Ends are clamped to what there is, and to the
            end before. Rows and columns past the last are zeros.
        bias: ``[G, N]``, added to each row of a group; not for groups of columns.
        out_dtype: the type of the result; ``mat_a``'s by default.
        arithmetic, k_chunk: as in :func:`pydet.gemm`; they decide bits, forward and backward.

    Raises:
        Error: shapes, types or devices that do not fit, or ``offs`` with a batch or missing without one.
    """
    dims = mat_a.dim(), mat_b.dim()
    if dims not in ((2, 2), (2, 3), (3, 2), (3, 3)):
        shapes = f"{tuple(mat_a.shape)} and {tuple(mat_b.shape)}"
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"grouped_mm: the operands are {shapes}, want 2 or 3 dimensions each",
        )
    if (offs is None) != (dims == (3, 3)):
        got, want = ("None", "the ends of the groups") if offs is None else ("given", "None: the operands are batches")
        fail(INVALID_VALUE, f"grouped_mm: offs is {got}, want {want}")
    how = out_dtype, arithmetic, k_chunk
    if dims == (3, 2):
        if bias is not None:
            fail(UNSUPPORTED, "grouped_mm: bias is given, want None where groups are columns of the result")
        return torch.ops.pydet.grouped_gemm(mat_b.t(), mat_a.mT, offs, None, *how).t()
    if offs is not None:
        return torch.ops.pydet.grouped_gemm(mat_a, mat_b, offs, bias, *how)
    if bias is None:
        return torch.ops.pydet.gemm(mat_a, mat_b, None, *how)
    groups, rows = mat_a.shape[:2]
    offs = torch.arange(1, groups + 1, dtype=torch.int32, device=mat_a.device) * rows
    return torch.ops.pydet.grouped_gemm(mat_a.flatten(0, 1), mat_b, offs, bias, *how).unflatten(0, (groups, rows))


# ---- The operator ----------------------------------------------------------------------------------------------------


def _run_grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_end: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    options = {"bias": bias, "arithmetic": arithmetic, "k_chunk": k_chunk}
    group_end = group_end.contiguous()
    if a.dim() != 2 or b.dim() != 3:
        return _grouped_gemm(a, b, group_end, out_dtype=_index(out_dtype), **options)
    out = a.new_zeros((a.shape[0], b.shape[2]), dtype=out_dtype)
    return _grouped_gemm(a, b, group_end, out=out, **options)


def _fake_grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_end: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    left, right, added = ops._operands(_OP, a=a, b=b, bias=bias)
    for operand in (left, right, added):
        if operand is not None:
            ops.TRACED.read(_OP, operand, 1)
    unknown(arithmetic, _OP, "arithmetic")
    ops.TRACED.same_type(_OP, left, right)
    if group_end.dtype != torch.int32:
        fail(INVALID_DTYPE, f"{_OP}: group_end is {group_end.dtype}, want int32")
    if group_end.device != a.device:
        fail(INVALID_DEVICE, f"{_OP}: group_end is on {group_end.device}, a is on {a.device}")
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
        return ops._call(_run_grouped_gemm, _grouped_gemm_op, a, b, group_end, bias, *options)

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


def _differentiable_grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_end: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    arguments = (a, b, group_end, bias, out_dtype, arithmetic, k_chunk)
    if ops._wants_gradient(a, b, bias):
        return ops._differentiate(_GroupedGemm, _OP, *arguments)
    return ops._call(_run_grouped_gemm, _grouped_gemm_op, *arguments)


def _vmap_grouped_gemm(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    """One call for each of the batch: an operand of groups has no dimension for it."""
    given = list(zip(arguments, (*dims, *(None,) * len(arguments)), strict=False))
    each = ([x if dim is None else x.select(dim, i) for x, dim in given] for i in range(info.batch_size))
    return torch.stack([torch.ops.pydet.grouped_gemm(*operands) for operands in each]), 0


ops._library.define(
    f"{_OP}(Tensor a, Tensor b, Tensor group_end, Tensor? bias=None, {_GEMM_OPTIONS}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_grouped_gemm_op = torch.ops.pydet.grouped_gemm.default
ops._library.impl(_OP, ops._of_any_strides(_run_grouped_gemm), "CompositeExplicitAutograd")
ops._library.impl(_OP, _differentiable_grouped_gemm, "Autograd")
torch.library.register_fake(f"pydet::{_OP}", _fake_grouped_gemm, lib=ops._library)
torch.library.register_vmap(f"pydet::{_OP}", _vmap_grouped_gemm, lib=ops._library)
for _device in ("cpu", "cuda"):
    ops._library.impl(_OP, ops._under_autocast(_OP, _device), f"Autocast{_device.upper()}")
