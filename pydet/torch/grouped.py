"""Products of groups, as the layers of a mixture of experts are, in torch's four forms."""

from __future__ import annotations

from typing import TypeAlias

import torch

from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.ops import Arithmetic

Tensor: TypeAlias = torch.Tensor


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
