"""Softmax, its logarithm, one column of that, and their gradients."""

from __future__ import annotations

from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream, Tensor

_softmax, _softmax_backward = methods(("softmax", "softmax_backward"))
_log_softmax, _log_softmax_backward = methods(("log_softmax", "log_softmax_backward"))
_log_prob, _log_prob_backward = methods(("log_prob", "log_prob_backward"))


def softmax(x: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None) -> Tensor:
    """Softmax over the last dimension: ``y = e / sum(e)``, ``e = exp(x - max(x))``.

    In fp32, with the same bits on every backend. The sum over a row is a tree whose shape depends on N alone, and exp a
    formula (NUMERICS.md, "Softmax"); so a tail that is masked by -inf, or not there, changes no bit of the rest.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent.
        out: like ``x``; made if None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor. A row of nothing but -inf, or with a NaN or inf, is NaN.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _softmax if stream is None else on_stream(_softmax, x, stream)
    return method(x, out=out, kernel=kernel)  # type: ignore[no-any-return]


def log_softmax(
    x: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None
) -> Tensor:
    """The logarithm of :func:`softmax`: ``y = (x - max(x)) - log(sum(e))``, with its arguments and promises."""
    method = _log_softmax if stream is None else on_stream(_log_softmax, x, stream)
    return method(x, out=out, kernel=kernel)  # type: ignore[no-any-return]


def softmax_backward(
    dy: Tensor, y: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None
) -> Tensor:
    """The gradient of :func:`softmax` from its result: ``dx = y (dy - sum(dy y))``.

    Args:
        dy, y: ``[..., N]``, of one type.
        out, kernel, stream: as in :func:`softmax`.
    """
    method = _softmax_backward if stream is None else on_stream(_softmax_backward, dy, stream)
    return method(dy, y, out=out, kernel=kernel)  # type: ignore[no-any-return]


def log_softmax_backward(
    dy: Tensor, y: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None
) -> Tensor:
    """The gradient of :func:`log_softmax`: ``dx = dy - exp(y) sum(dy)``. Arguments as of :func:`softmax_backward`."""
    method = _log_softmax_backward if stream is None else on_stream(_log_softmax_backward, dy, stream)
    return method(dy, y, out=out, kernel=kernel)  # type: ignore[no-any-return]


def log_prob(
    x: Tensor,
    index: Tensor,
    *,
    out: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """One column of :func:`log_softmax` of each row, in float32: the log-probability of a token under its logits.

    Args:
        x: ``[..., N]``, as in :func:`softmax`.
        index: ``[...]``, int32 or int64, contiguous: the column of each row. Below 0 or from N on: NaN.
        out: ``[...]``, float32, contiguous; made if None.
        kernel, stream: as in :func:`gemm`.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _log_prob if stream is None else on_stream(_log_prob, x, stream)
    return method(x, index, out=out, kernel=kernel)  # type: ignore[no-any-return]


def log_prob_backward(
    dlog_prob: Tensor,
    x: Tensor,
    index: Tensor,
    *,
    out: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The gradient of :func:`log_prob`: ``dx = dlog_prob (onehot(index) - softmax(x))``, rounded once.

    Args:
        dlog_prob: ``[...]``, float32, contiguous.
        x, index: as in :func:`log_prob`. Rows whose index is no column get zeros.
        out: like ``x``; made if None.
        kernel, stream: as in :func:`gemm`.
    """
    method = _log_prob_backward if stream is None else on_stream(_log_prob_backward, x, stream)
    return method(dlog_prob, x, index, out=out, kernel=kernel)  # type: ignore[no-any-return]
