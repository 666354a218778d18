"""The head of a language model: log-probabilities under a linear layer, without the logits in memory."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from pydet._native import INVALID_VALUE, constants, fail
from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Arithmetic, Stream, Tensor

_linear_log_prob, _linear_log_prob_backward = methods(("linear_log_prob", "linear_log_prob_backward"))
_linear_cross_entropy, _linear_cross_entropy_backward = methods(
    ("linear_cross_entropy", "linear_cross_entropy_backward")
)

HEAD_WORKSPACE = 256 << 20  # bytes
Reduction: TypeAlias = Literal["mean", "sum", "none"]
_REDUCTIONS = {name: int(getattr(constants, f"PYDET_REDUCTION_{name.upper()}")) for name in ("mean", "sum", "none")}


def _logits(op: str, dtype: Any, temperature: float, softcap: float | None) -> dict[str, Any]:
    """How logits are rounded and read, as the library takes it, for which 0 is none."""
    rounded_to = None if dtype is None else type_index(dtype, op, "logits_dtype")
    for name, value in (("temperature", temperature), ("softcap", softcap)):
        if value is not None and not value > 0:
            fail(INVALID_VALUE, f"{op}: {name} is {value}, want a positive number")
    return {"logits_dtype": rounded_to, "temperature": temperature, "softcap": softcap or 0.0}


def linear_log_prob(
    x: Tensor,
    w: Tensor,
    index: Tensor,
    *,
    bias: Any = None,
    out: Tensor | None = None,
    logits_dtype: Any = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = HEAD_WORKSPACE,
    stream: Stream | None = None,
) -> Any:
    """``log_prob(skinny_gemm(x, w, bias=bias), index)``, with its bits, and without the logits of all rows in memory.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16, whose rows lie one stride apart: hidden states.
        w: ``[N, K]``, of the type of ``x``: the weight of the head.
        index: ``[...]``, int32 or int64, contiguous: the column of each row. Below 0 or from N on: NaN.
        bias: ``[N]``, of any of the three types.
        out: ``[...]``, float32, contiguous; made if None.
        logits_dtype: the type that logits are rounded to: that of ``x`` by default. What follows is float32.
        temperature: logits are divided by it, after they were rounded and capped.
        softcap: logits become ``softcap tanh(logits / softcap)``.
        return_entropy: return the entropy of each row's softmax too.
        arithmetic, k_chunk, stream: as in :func:`gemm`.
        workspace: bytes that the logits of a chunk of rows may take. It decides no bits.

    Returns:
        ``[...]``, float32; with ``return_entropy`` a pair of them.

    Raises:
        Error: as :func:`gemm`, or a workspace that holds no row.
    """
    method = _linear_log_prob if stream is None else on_stream(_linear_log_prob, x, stream)
    made = method(
        x,
        w,
        index,
        bias=bias,
        out=out,
        of_entropy=return_entropy,
        **_logits("linear_log_prob", logits_dtype, temperature, softcap),
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        workspace=workspace,
    )
    return tuple(made[:2]) if return_entropy else made


class HeadGradients(NamedTuple):
    """What :func:`linear_log_prob_backward` makes; None for what it was not asked for."""

    dx: Any
    dw: Any
    dbias: Any
    log_prob: Any


def linear_log_prob_backward(
    dlog_prob: Tensor,
    x: Tensor,
    w: Tensor,
    index: Tensor,
    *,
    bias: Any = None,
    dentropy: Any = None,
    dx: Any = None,
    dw: Any = None,
    dbias: Any = None,
    log_prob: Any = None,
    of_x: bool = True,
    of_w: bool = True,
    of_bias: bool | None = None,
    of_log_prob: bool = False,
    dw_dtype: Any = None,
    accumulate: bool = False,
    logits_dtype: Any = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = HEAD_WORKSPACE,
    stream: Stream | None = None,
) -> HeadGradients:
    """The gradients of :func:`linear_log_prob`, whose logits are made again, some rows at a time.

    Args:
        dlog_prob: ``[...]``, float32, contiguous.
        x, w, index, bias, logits_dtype, temperature, softcap, arithmetic, k_chunk, stream: as in
            :func:`linear_log_prob`. Rows whose index is no column have no part in any gradient but that by the entropy.
        dentropy: ``[...]``, float32, contiguous: by the entropy, if there is a gradient by it.
        dx: like ``x``, of any of the three types; made if None and ``of_x``.
        dw: ``[N, K]``, dbias: ``[N]``, of any of the three types; made if None and ``of_w`` and ``of_bias`` (by default
            where there is a bias). In another type than float32 they need a workspace for all rows at once. Where a
            float32 ``dw`` is contiguous and not continued, logits may lie in its memory until it is written.
        log_prob: ``[...]``, float32: what :func:`linear_log_prob` gives, made if None and ``of_log_prob``. So a loss
            whose gradient is known beforehand (cross entropy's is -1 / rows) has three products, not four.
        dw_dtype: the type of ``dw`` and ``dbias`` if they are made. float32 by default.
        accumulate: continue the sums in ``dw`` and ``dbias``, then given and float32. Micro-batches of a multiple of 16
            rows, or of ``k_chunk``, have the bits of one batch.
        workspace: as in :func:`linear_log_prob`; for sums over rows it holds 16 of them, or ``k_chunk``.

    Returns:
        ``(dx, dw, dbias, log_prob)``.
    """
    op = "linear_log_prob_backward"
    method = _linear_log_prob_backward if stream is None else on_stream(_linear_log_prob_backward, x, stream)
    made = method(
        dlog_prob,
        x,
        w,
        index,
        bias=bias,
        dentropy=dentropy,
        dx=dx,
        dw=dw,
        dbias=dbias,
        log_prob=log_prob,
        of_x=of_x,
        of_w=of_w,
        of_bias=bias is not None if of_bias is None else of_bias,
        of_log_prob=of_log_prob,
        dw_dtype=None if dw_dtype is None else type_index(dw_dtype, op, "dw_dtype"),
        accumulate=accumulate,
        **_logits(op, logits_dtype, temperature, softcap),
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        workspace=workspace,
    )
    return HeadGradients(*made)


# ---- Losses ----------------------------------------------------------------------------------------------------------


def _reduction(op: str, reduction: Any) -> int:
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        fail(INVALID_VALUE, f"{op}: reduction is {reduction!r}, want 'mean', 'sum' or 'none'")
    return _REDUCTIONS[reduction]


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    out: Tensor | None = None,
    lse: Any = None,
    logits_dtype: Any = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = HEAD_WORKSPACE,
    stream: Stream | None = None,
) -> Any:
    """The negative :func:`linear_log_prob` of targets, summed, without the logits of all rows in memory, and with the
    bits of ``pydet.torch.linear_cross_entropy``.

    Args:
        x, w, bias, logits_dtype, temperature, softcap, arithmetic, k_chunk, stream: as in :func:`linear_log_prob`.
        target: ``[...]``, int32 or int64, contiguous. What is neither a column nor ``ignore_index`` makes its row's
            loss NaN.
        ignore_index: rows of this target have loss 0 and no gradient.
        label_smoothing: from 0 to 1: so much of the target is spread over all columns.
        z_loss: so many times the square of the logarithm of the sum of exponentials is added to a row's loss.
        reduction: ``"mean"`` over rows that are not ignored (NaN where all are), ``"sum"``, or ``"none"``. Sums go over
            rows in order (NUMERICS.md, "Head").
        out: ``[]``, or ``[...]`` without a reduction; float32; made if None.
        lse: None, or ``[...]``, float32: the logarithm of each row's sum of exponentials is written there, which spares
            :func:`linear_cross_entropy_backward` with a ``z_loss`` a product.
        workspace: bytes that the logits of a chunk of rows, and up to 12 of each row, may take. It decides no bits.

    Returns:
        ``[]`` or ``[...]``, float32.

    Raises:
        Error: as :func:`linear_log_prob`.
    """
    op = "linear_cross_entropy"
    method = _linear_cross_entropy if stream is None else on_stream(_linear_cross_entropy, x, stream)
    return method(
        x,
        w,
        target,
        bias=bias,
        out=out,
        lse=lse,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=_reduction(op, reduction),
        **_logits(op, logits_dtype, temperature, softcap),
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        workspace=workspace,
    )


class LossGradients(NamedTuple):
    """What :func:`linear_cross_entropy_backward` makes; None for what it was not asked for."""

    dx: Any
    dw: Any
    dbias: Any
    loss: Any


def linear_cross_entropy_backward(
    dloss: Any,
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Any = None,
    lse: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    dx: Any = None,
    dw: Any = None,
    dbias: Any = None,
    loss: Any = None,
    of_x: bool = True,
    of_w: bool = True,
    of_bias: bool | None = None,
    of_loss: bool = False,
    dw_dtype: Any = None,
    accumulate: bool = False,
    logits_dtype: Any = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = HEAD_WORKSPACE,
    stream: Stream | None = None,
) -> LossGradients:
    """The gradients of :func:`linear_cross_entropy`, whose logits are made again, some rows at a time.

    Args:
        dloss: like the loss, float32; None is 1.
        x, w, target, bias, ignore_index, label_smoothing, z_loss, reduction, logits_dtype, temperature, softcap,
            arithmetic, k_chunk, stream: as in :func:`linear_cross_entropy`.
        lse: as :func:`linear_cross_entropy` wrote it. Without it a ``z_loss`` has a product more.
        dx, dw, dbias, of_x, of_w, of_bias, dw_dtype, accumulate: as in :func:`linear_log_prob_backward`.
        loss: what :func:`linear_cross_entropy` gives, made if None and ``of_loss``. With the gradients it has three
            products, as they alone have; four with ``label_smoothing``, or a ``z_loss`` without ``lse``.
        workspace: as in :func:`linear_cross_entropy`, up to 32 bytes of each row; for sums over rows it holds logits of
            16 of them, or ``k_chunk``.

    Returns:
        ``(dx, dw, dbias, loss)``.
    """
    op = "linear_cross_entropy_backward"
    method = _linear_cross_entropy_backward if stream is None else on_stream(_linear_cross_entropy_backward, x, stream)
    made = method(
        dloss,
        x,
        w,
        target,
        bias=bias,
        lse=lse,
        loss=loss,
        dx=dx,
        dw=dw,
        dbias=dbias,
        of_x=of_x,
        of_w=of_w,
        of_bias=bias is not None if of_bias is None else of_bias,
        of_loss=of_loss,
        dw_dtype=None if dw_dtype is None else type_index(dw_dtype, op, "dw_dtype"),
        accumulate=accumulate,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=_reduction(op, reduction),
        **_logits(op, logits_dtype, temperature, softcap),
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        workspace=workspace,
    )
    return LossGradients(*made)
