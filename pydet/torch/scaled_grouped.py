"""Products of groups in fp8 by torch's own signature: a layer of experts on :func:`pydet.scaled_grouped_gemm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.ops import Arithmetic
from pydet.torch import fp8
from pydet.torch.ops.scaled import groups

_OP = "scaled_grouped_mm"


def _refuse_scale(name: str, scale: torch.Tensor, recipe: int, want: str) -> None:
    fail(
        UNSUPPORTED,
        f"{_OP}: {name} is {tuple(scale.shape)} by recipe {recipe}, want {want} and a scale of its shape",
    )


def _of_tokens(scale: torch.Tensor, recipe: int, a: torch.Tensor) -> torch.Tensor:
    """scale_a by torch's recipe, of the shape by which scaled_grouped_gemm tells it; of a batch, per matrix."""
    rows, k = a.shape[-2:]
    shape, lead = tuple(scale.shape), tuple(a.shape[:-2])
    if recipe == fp8.TENSOR and scale.numel() == 1:
        return scale.reshape(())
    if recipe == fp8.ROW and shape in ((*lead, rows), (*lead, rows, 1)):
        return scale.reshape(*lead, rows, 1)
    if recipe != fp8.GROUPS or shape != (*lead, rows, groups(k)):
        _refuse_scale("scale_a", scale, recipe, "TensorWise, RowWise or BlockWise1x128")
    return scale


def _of_matrices(scale: torch.Tensor, recipe: int, b: torch.Tensor) -> torch.Tensor:
    count, k, n = b.shape
    shape, chunks, blocks = tuple(scale.shape), groups(k), groups(n)
    if recipe == fp8.TENSOR and scale.numel() == 1:
        return scale.reshape(())
    if recipe == fp8.ROW and shape in ((count, n), (count, 1, n), (count, n, 1)):
        return scale.reshape(count, 1, n)
    if recipe == fp8.GROUPS and shape == (count, n, chunks):
        return scale.mT
    if recipe == fp8.GROUPS and shape == (count, chunks, n):
        return scale
    if recipe != fp8.BLOCKS or shape != (count, chunks, blocks):
        _refuse_scale("scale_b", scale, recipe, "TensorWise, RowWise, BlockWise1x128 or BlockWise128x128")
    return scale


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    recipes: tuple[int, int],
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    fast: bool,
    arithmetic: str,
) -> torch.Tensor:
    """`fast`: one chain over K, where no scale varies along it."""
    dims = a.dim(), b.dim()
    if dims not in ((2, 3), (3, 3)):
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        fail(UNSUPPORTED, f"{_OP}: the operands are {shapes}, want [T, K] and [G, K, N], or a batch [G, M, K] for them")
    if (offs is None) != (dims == (3, 3)):
        got, want = ("None", "the ends of the groups") if offs is None else ("given", "None: the operands are batches")
        fail(INVALID_VALUE, f"{_OP}: offs is {got}, want {want}")
    of_a, of_b = _of_tokens(scales[0], recipes[0], a), _of_matrices(scales[1], recipes[1], b)
    how = out_dtype or torch.bfloat16, arithmetic, fp8.chunk_of(a, (of_a, of_b), fast)
    if offs is None:
        added = None if bias is None else bias[:, None]
        y: torch.Tensor = torch.ops.pydet.scaled_gemm(a, b, of_a, of_b, added, *how)
    else:
        y = torch.ops.pydet.scaled_grouped_gemm(a, b, offs, of_a, of_b, bias, *how)
    return y


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | list[torch.Tensor],
    scale_recipe_a: Any,
    scale_b: torch.Tensor | list[torch.Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    arithmetic: Arithmetic = "auto",
) -> torch.Tensor:
    """``torch.nn.functional.scaled_grouped_mm`` on :func:`pydet.scaled_grouped_gemm`. It has no gradient.

    A row's bits are those of :func:`pydet.scaled_gemm` of that row and its group's matrix: not of the other rows, nor
    of how many there are.

    Args:
        mat_a: ``[T, K]``, float8_e4m3fn or float8_e5m2; or a batch ``[G, M, K]``, without ``offs``.
        mat_b: ``[G, K, N]``, either type; on a GPU k is adjacent in both. Groups along what is summed are refused.
        scale_a: float32 or float8_e8m0fnu (or a list of one) by ``RowWise`` ``[T]`` or ``[T, 1]``, by
            ``BlockWise1x128`` ``[T, ceil(K/128)]``, by ``TensorWise`` one number; of a batch with ``G`` before.
        scale_b: likewise, by ``RowWise`` ``[G, N]``, by ``BlockWise1x128`` ``[G, N, ceil(K/128)]``, by
            ``BlockWise128x128`` ``[G, ceil(K/128), ceil(N/128)]``, by ``TensorWise`` one number.
        scale_recipe_a, scale_recipe_b: of ``torch.nn.functional.ScalingType``.
        swizzle_a, swizzle_b: None or ``SwizzleType.NO_SWIZZLE``.
        bias: ``[G, N]``, added to each row of a group.
        offs: ``[G]``, int32, on the operands' device: where each group's rows end. Rows past the last are zeros.
        output_dtype: float32, bfloat16 or float16.
        contraction_dim: ``()``, or the K of both.
        use_fast_accum: as in :func:`scaled_mm`.
        arithmetic: as in :func:`pydet.scaled_gemm`.

    Raises:
        Error: a form, a recipe, a swizzle or a contraction that pydet does not have; as
            :func:`pydet.scaled_grouped_gemm`.
    """
    fp8.check_plain(_OP, swizzle_a, swizzle_b, contraction_dim, (mat_a.dim(), mat_b.dim()))
    recipes = [fp8.number(fp8.only(_OP, "scale_recipe", recipe)) for recipe in (scale_recipe_a, scale_recipe_b)]
    scales = fp8.only(_OP, "scale_a", scale_a), fp8.only(_OP, "scale_b", scale_b)
    how = output_dtype, use_fast_accum, arithmetic
    return multiply(mat_a, mat_b, scales, (recipes[0], recipes[1]), offs, bias, *how)
