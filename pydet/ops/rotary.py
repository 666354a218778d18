"""Rotary embeddings: the table of cosines and sines, and pairs of elements turned by it."""

from __future__ import annotations

from typing import Any

from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream, Tensor

_rotary_table, _rotary = methods(("rotary_table", "rotary"))


def rotary_table(
    positions: Tensor,
    frequencies: Tensor,
    *,
    scale: float = 1.0,
    twice: bool = False,
    out_dtype: Any = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor]:
    """``cos(a) scale`` and ``sin(a) scale`` of ``a[..., j] = positions[...] frequencies[j]``, by a written formula.

    The product is rounded to float32, cosine and sine are computed in float64 and rounded once (NUMERICS.md, "Rotary
    embeddings"): within half a unit of the last place and 2^-45 up to some million radians. inf and NaN give NaN.

    Args:
        positions: ``[...]``, int32, int64, float32, bfloat16 or float16, contiguous.
        frequencies: ``[F]``, float32.
        scale: of both, a finite number other than 0.
        twice: the table is ``[..., 2 F]``, the F columns and the same once more.
        out_dtype: float32, which is the default, bfloat16 or float16.
        cos, sin: ``[..., F]`` or ``[..., 2 F]``, of one type; made if None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(cos, sin)``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _rotary_table if stream is None else on_stream(_rotary_table, positions, stream)
    return method(  # type: ignore[no-any-return]
        positions,
        frequencies,
        scale=scale,
        twice=twice,
        cos=cos,
        sin=sin,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "rotary_table"),
        kernel=kernel,
    )


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    whole: bool = False,
    neighbours: bool = False,
    out_neighbours: bool = False,
    in_fp32: bool = False,
    transposed: bool = False,
    out_dtype: Any = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Pairs ``(a, b)`` of the first R elements of each head as ``(a cos - b sin, b cos + a sin)``; others are copied.

    Args:
        q: ``[..., H, N]``, float32, bfloat16 or float16; elements of a head adjacent.
        k: ``[..., G, N]``, of q's type; or None.
        cos, sin: ``[..., R / 2]``, of one type, a number for a pair. A leading extent may be 1, for all.
        whole: they are ``[..., R]``, a number for each element that is turned, at its place in the results (transposed:
            in q and k).
        neighbours: pair i is elements 2 i and 2 i + 1; without it i and R / 2 + i.
        out_neighbours: so it is in the results.
        in_fp32: the sum alone is rounded to the results' type; without it each product is as well.
        transposed: ``(a cos + b sin, b cos - a sin)``: of the gradient by the results that by q and k. What is -0 there
            is +0. A pair's places are exchanged too: ``neighbours`` of what is given, ``out_neighbours`` of the result.
        out_dtype: of the results; q's by default.
        q_out, k_out: like q and k, of one type; made if None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(q_out, k_out)``, or new tensors; None for a k that is None.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _rotary if stream is None else on_stream(_rotary, q, stream)
    return method(  # type: ignore[no-any-return]
        q,
        k,
        cos,
        sin,
        whole=whole,
        neighbours=neighbours,
        out_neighbours=out_neighbours,
        in_fp32=in_fp32,
        transposed=transposed,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "rotary"),
        q_out=q_out,
        k_out=k_out,
        kernel=kernel,
    )
