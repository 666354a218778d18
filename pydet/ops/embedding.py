"""Rows of a table by their numbers, and the table's gradient."""

from __future__ import annotations

from typing import Any

from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream, Tensor

_embedding, _embedding_backward = methods(("embedding", "embedding_backward"))


def embedding(
    w: Tensor, ids: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None
) -> Tensor:
    """Rows of a table: ``out[..., :] = w[ids[...], :]``, copied as they are.

    Args:
        w: ``[V, N]``, float32, bfloat16 or float16; elements of a row adjacent.
        ids: ``[...]``, int32 or int64, contiguous; from 0 to V - 1. On the CPU another is refused; on a GPU, which
            nothing waits for, its row is NaN.
        out: ``[..., N]``, of ``w``'s type; made if None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit; on the CPU an id that is no row's.
    """
    method = _embedding if stream is None else on_stream(_embedding, w, stream)
    return method(w, ids, out=out, kernel=kernel)  # type: ignore[no-any-return]


def embedding_backward(
    dout: Tensor,
    ids: Tensor,
    rows: int | None = None,
    *,
    padding_idx: int | None = None,
    out_dtype: Any = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The gradient of :func:`embedding`: of each row of the table the sum of its tokens' ``dout``, the first one first.

    In fp32, an addition each, rounded once (NUMERICS.md, "Embedding"): neither the batch nor the device shows in it.

    Args:
        dout: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent.
        ids: ``[...]``, int32 or int64, contiguous. On a GPU the token of an id that is no row's has no part.
        rows: V, of a table that is made.
        padding_idx: tokens of this id have no part.
        out_dtype: float32, or the type of ``dout``, which is the default.
        out: ``[V, N]``, of that type; made if None. A row without tokens becomes 0.
        accumulate: continue from ``out``, float32: tokens cut anywhere into calls in their order give the bits of one
            call. A row without tokens is not touched.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit; on the CPU an id that is no row's.
    """
    method = _embedding_backward if stream is None else on_stream(_embedding_backward, dout, stream)
    return method(  # type: ignore[no-any-return]
        dout,
        ids,
        rows=rows,
        padding_idx=padding_idx,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "embedding_backward"),
        out=out,
        accumulate=accumulate,
        kernel=kernel,
    )
