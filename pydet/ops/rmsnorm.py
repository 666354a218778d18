"""Root-mean-square norm, its gradients, and the norm quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from pydet._native import INVALID_VALUE, fail
from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Granularity, Stream, Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

_rmsnorm, _rmsnorm_quantize, _rmsnorm_backward = methods(("rmsnorm", "rmsnorm_quantize", "rmsnorm_backward"))


class _Forward(TypedDict, total=False):
    """What decides nothing of how many results there are; so below."""

    bias: Any
    weight_offset: float
    out: Any
    kernel: str | None
    stream: Stream | None


class _Backward(TypedDict, total=False):
    weight_offset: float
    dresidual: Any
    out: Any
    dweight_dtype: Any
    accumulate: bool
    block_sums: bool
    kernel: str | None
    stream: Stream | None


@overload
def rmsnorm(
    x: Tensor, weight: Any = None, *, eps: float, residual: None = None, **options: Unpack[_Forward]
) -> tuple[Tensor, Tensor]: ...


@overload
def rmsnorm(
    x: Tensor, weight: Any = None, *, eps: float, residual: Tensor, **options: Unpack[_Forward]
) -> tuple[Tensor, Tensor, Tensor]: ...


def rmsnorm(
    x: Tensor,
    weight: Any = None,
    *,
    eps: float,
    bias: Any = None,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Any, ...]:
    """Root-mean-square norm over the last dimension: ``y = x rstd (weight + weight_offset) + bias``.

    ``rstd = 1 / sqrt(mean(x^2) + eps)``. All in fp32, with the same bits on every backend; the sum over a row is a tree
    whose shape depends on N alone (NUMERICS.md, "RMSNorm").

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent, rows anywhere: a slice of a fused
            projection, or heads that were transposed.
        weight: ``[N]`` of any of the three types; None for ones. ``[H, N]`` beside an ``x`` of ``[..., H, N]``: one for
            each head, which has the bits of a call on ``x[..., h, :]`` alone.
        eps: added to the mean of squares; not negative.
        bias: shaped like ``weight``, of any of the three types; added before the one rounding. None for zeros.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``, or float32 beside any ``x``; then ``sum = x + residual``, rounded to the type of
            ``residual``, is what is normalised.
        out: the tensor for ``y``, like ``x``; or a tuple ``(y, rstd)`` or ``(y, rstd, sum)`` whose members may be None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(y, rstd)``, or ``(y, rstd, sum)`` with a residual. ``rstd`` is ``[...]`` in float32, and what
        :func:`rmsnorm_backward` takes.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit, or a negative ``eps``.
    """
    y, rstd, total, *more = (*out, None, None, None) if isinstance(out, tuple) else (out, None, None)
    if len(more) > 3:
        fail(INVALID_VALUE, f"rmsnorm: out has {len(out)} members, want at most 3: y, rstd and sum")
    method = _rmsnorm if stream is None else on_stream(_rmsnorm, x, stream)
    return method(  # type: ignore[no-any-return]
        x,
        weight,
        eps,
        bias=bias,
        weight_offset=weight_offset,
        residual=residual,
        out=y,
        rstd=rstd,
        sum=total,
        kernel=kernel,
    )


class _Quantized(TypedDict, total=False):
    weight_offset: float
    granularity: Granularity
    dtype: Any
    scale_dtype: Any
    power_of_two: bool
    scale: Any
    out: Any
    y: Any
    rstd: Any
    kernel: str | None
    stream: Stream | None


@overload
def rmsnorm_quantize(
    x: Tensor, weight: Any = None, *, eps: float, residual: None = None, **options: Unpack[_Quantized]
) -> tuple[Tensor, Tensor]: ...


@overload
def rmsnorm_quantize(
    x: Tensor, weight: Any = None, *, eps: float, residual: Tensor, **options: Unpack[_Quantized]
) -> tuple[Tensor, Tensor, Tensor]: ...


def rmsnorm_quantize(
    x: Tensor,
    weight: Any = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    granularity: Granularity = "row",
    dtype: Any = "float8_e4m3fn",
    scale_dtype: Any = "float32",
    power_of_two: bool = False,
    scale: Any = None,
    out: Any = None,
    y: Any = None,
    rstd: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Any, ...]:
    """:func:`rmsnorm`, and :func:`quantize` of its ``y``, in one pass: the bits of the two calls.

    What an fp8 model does ahead of its products: the residual is added, the sum normalised and rounded to the type of
    ``x``, and that is quantised, without a ``y`` in memory.

    Args:
        x, weight, eps, weight_offset, residual: as in :func:`rmsnorm`; ``weight`` is ``[N]`` or None.
        granularity: what shares a scale: ``"row"`` ``[..., 1]`` or ``"group"`` ``[..., ceil(N/128)]``.
        dtype: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        scale_dtype: ``"float32"``, or ``"float8_e8m0fnu"``: powers of two.
        power_of_two: round the scale up to a power of two.
        scale: ``[]``, one scale of all rows, which is read instead of found.
        out: the tensor for ``q``, or a tuple ``(q, scale)`` or ``(q, scale, sum)`` whose members may be None. The scale
            may have any strides.
        y, rstd: tensors for these, where they are wanted too: like ``x``, and ``[...]`` in float32.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(q, scale)``, or ``(q, scale, sum)`` with a residual.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit, or a negative ``eps``.
    """
    op = "rmsnorm_quantize"
    q, own, total, *more = (*out, None, None, None) if isinstance(out, tuple) else (out, None, None)
    if len(more) > 3:
        fail(INVALID_VALUE, f"{op}: out has {len(out)} members, want at most 3: q, scale and sum")
    if scale is not None and own is not None:
        fail(INVALID_VALUE, f"{op}: scale is given and out has one too, want one of them")
    method = _rmsnorm_quantize if stream is None else on_stream(_rmsnorm_quantize, x, stream)
    return method(  # type: ignore[no-any-return]
        x,
        weight,
        eps,
        weight_offset=weight_offset,
        residual=residual,
        granularity=granularity if scale is None else "tensor",
        given=scale,
        out=q,
        scale=own,
        y=y,
        rstd=rstd,
        sum=total,
        dtype=type_index(dtype, op, "dtype"),
        scale_dtype=type_index(scale_dtype, op, "scale_dtype"),
        power_of_two=power_of_two,
        kernel=kernel,
    )


@overload
def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: None,
    rstd: Any,
    *,
    has_bias: Literal[False] = False,
    dweight: None = None,
    dbias: None = None,
    **options: Unpack[_Backward],
) -> tuple[Tensor, None]: ...


@overload
def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Any,
    rstd: Any,
    *,
    has_bias: Literal[False] = False,
    dweight: Any = None,
    dbias: None = None,
    **options: Unpack[_Backward],
) -> tuple[Tensor, Tensor]: ...


@overload
def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Any,
    rstd: Any,
    *,
    has_bias: bool = False,
    dweight: Any = None,
    dbias: Any = None,
    **options: Unpack[_Backward],
) -> tuple[Any, ...]: ...


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Any,
    rstd: Any,
    *,
    weight_offset: float = 0.0,
    has_bias: bool = False,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
    dweight: Any = None,
    dbias: Any = None,
    dweight_dtype: Any = None,
    accumulate: bool = False,
    block_sums: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Any, ...]:
    """Gradients of :func:`rmsnorm`.

    With ``xhat = x rstd`` and ``g = dy (weight + weight_offset)``::

        dx         = rstd (g - xhat mean(g xhat)) + dresidual
        dweight[n] = sum over rows of dy xhat
        dbias[n]   = sum over rows of dy

    The sum over rows walks fixed blocks of ``DWEIGHT_ROWS`` rows, whatever the device (NUMERICS.md, "RMSNorm"); for
    weights of heads the rows of each head.

    Args:
        dy: ``[..., N]``, like ``x``; or of any of the three types beside a float32 ``x``.
        x: what was normalised: ``x``, or ``sum`` where there was a residual.
        weight: ``[N]`` or ``[H, N]``, or None for ones; then ``dweight`` is None unless given.
        rstd: ``[...]``, float32, of the forward call.
        weight_offset: as in the forward call.
        has_bias: whether ``dbias`` is made.
        dresidual: like ``x``; a gradient that is added to ``dx`` in fp32 before it is rounded.
        out: the tensor for ``dx``, like ``x``; made if None.
        dweight, dbias: shaped like ``weight``, of any of the three types; made if None, but not under ``accumulate``.
            Without a weight they are given, or ``dbias`` is made as ``[N]``.
        dweight_dtype: the type of those that are made. That of ``weight`` by default, without one that of ``x``.
        accumulate: continue from ``dweight`` and ``dbias``, of which one or both are then given and float32. Rows (of
            each head) cut at a multiple of ``DWEIGHT_ROWS`` give the bits of one call.
        block_sums: ``dweight`` and ``dbias`` are ``[B, *weight.shape]``, float32: the sums of each block of
            ``DWEIGHT_ROWS`` rows (of a head) alone, ``B = ceil(rows / DWEIGHT_ROWS)``. Of rows that are shared out over
            devices :func:`fold` of all blocks, in the order of the rows, is ``dweight``. Not under ``accumulate``.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(dx, dweight)``, or ``(dx, dweight, dbias)`` where there is a ``dbias``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _rmsnorm_backward if stream is None else on_stream(_rmsnorm_backward, dy, stream)
    return method(  # type: ignore[no-any-return]
        dy,
        x,
        weight,
        rstd,
        weight_offset=weight_offset,
        has_bias=has_bias,
        dresidual=dresidual,
        out=out,
        dweight=dweight,
        dbias=dbias,
        dweight_dtype=None if dweight_dtype is None else type_index(dweight_dtype, "rmsnorm_backward", "dweight_dtype"),
        accumulate=accumulate,
        block_sums=block_sums,
        kernel=kernel,
    )
