"""Sampling of tokens from logits, and the k largest elements of a row."""

from __future__ import annotations

from numbers import Real
from typing import Any

from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream, Tensor

_sample, _topk = methods(("sample", "topk"))
_ROW_OPTIONS = {"temperature": "temperatures", "top_k": "top_ks", "top_p": "top_ps", "min_p": "min_ps"}


def sample(
    logits: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    return_log_prob: bool = True,
    out: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Draws a token of each row of logits: a function of the row, its seed, its position and its options alone.

    So a sequence has the same tokens alone and in any batch, on the CPU, CUDA and HIP. The noise is Philox4x32-10 of
    the seed (its key), the position and the column (its counter), made Gumbel's by formulas (NUMERICS.md, "Sampling");
    the token is the column of the largest ``(z - max(z)) + noise``, ``z = logits / temperature`` in fp32, the lowest
    of equal ones.

    Filters keep the first columns in descending order of the logits, equal ones by ascending number: ``top_k`` of them;
    of these the fewest whose probability reaches ``top_p`` of theirs, at least one; of these what is at least ``min_p``
    as probable as the likeliest. Sums for ``top_p`` are of whole numbers, which have no order.

    Args:
        logits: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent; N up to 8,388,608.
        seed, position: ``[...]``, int32 or int64, contiguous: any numbers. Two rows of one seed and one position have
            the same noise.
        temperature: a number, or ``[...]`` float32 for each row's own; so are the next three. 0: the largest logit, the
            first of equal ones, whatever the filters.
        top_k: 0: all. As a tensor int32 or int64.
        top_p: 0 to 1. 1: all; 0: the first.
        min_p: 0 to 1. 0: all.
        return_log_prob: False: the last two results are None.
        out: ``[...]``, int64, contiguous; made if None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(token, log_prob, filtered_log_prob)``: int64, and float32 twice. ``log_prob`` is that of the token before the
        filters: the bits of :func:`log_prob` of ``logits / temperature`` in float32, at temperature 0 of the logits.
        ``filtered_log_prob`` is that after them; at temperature 0 it is 0. A row with a NaN or +inf, or of nothing but
        -inf, or whose own options are out of their ranges, has token -1 and log-probabilities NaN.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit; a number out of its range.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, value in tuple(options.items()):
        if not isinstance(value, Real):
            options[_ROW_OPTIONS[name]] = options.pop(name)
    method = _sample if stream is None else on_stream(_sample, logits, stream)
    return method(  # type: ignore[no-any-return]
        logits, seed, position, out=out, return_log_prob=return_log_prob, kernel=kernel, **options
    )


def topk(
    x: Tensor,
    k: int,
    *,
    values: Tensor | None = None,
    index: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest elements of each row, descending, equal ones by ascending column.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent; N below 2^31.
        k: 1 to N.
        values: ``[..., k]``, of ``x``'s type, contiguous; made if None.
        index: ``[..., k]``, int64, contiguous; made if None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(values, index)``. -0 equals +0; a NaN is larger than all else, and equal to any other.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _topk if stream is None else on_stream(_topk, x, stream)
    return method(x, k, values=values, index=index, kernel=kernel)  # type: ignore[no-any-return]
