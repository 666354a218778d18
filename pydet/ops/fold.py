"""Partial sums added in a fixed order."""

from __future__ import annotations

from typing import Any

from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Order, Stream

(_fold,) = methods(("fold",))


def fold(
    parts: Any,
    *,
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    order: Order = "ordered",
    accumulate: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Any:
    """Adds partial sums in a fixed order: ``out = round(D + bias)``, ``D = D0 + parts[0] + parts[1] + ...``.

    The sums of fixed segments of a longer sum may be made anywhere, on one GPU or on several; folded in ascending order
    they have the bits of one call with ``k_chunk`` (NUMERICS.md, "Fold").

    Args:
        parts: ``[S, ...]``, or a sequence of S tensors ``[...]``, S from 1 to ``FOLD_PARTS``; float32, each contiguous.
        bias: ``[N]`` or ``[...]``, of any of the three types, added in fp32 before the one rounding.
        out: ``[...]``, of any of the three types, contiguous; made if None.
        out_dtype: the type of the result if it is made. float32 by default.
        order: ``"ordered"``, one after the other, or ``"tree"``, the binary tree over their numbers. It decides bits.
        accumulate: D0 is ``out``, then given and float32, instead of +0. An ordered fold may be cut anywhere; a tree at
            multiples of a power of two, each such group folded by a call of its own.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor ``[...]``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    listed = isinstance(parts, (list, tuple))
    given = tuple(parts) if listed else parts
    method = _fold if stream is None else on_stream(_fold, given[0] if listed and given else given, stream)
    return method(
        given,
        is_tuple=listed,
        bias=bias,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "fold"),
        order=order,
        accumulate=accumulate,
        kernel=kernel,
    )
