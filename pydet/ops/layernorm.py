"""Layer norm, and its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

from pydet._native import INVALID_VALUE, fail
from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream, Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

_layernorm, _layernorm_backward = methods(("layernorm", "layernorm_backward"))


class _Forward(TypedDict, total=False):
    """What decides nothing of how many results there are."""

    weight_offset: float
    out: Any
    kernel: str | None
    stream: Stream | None


@overload
def layernorm(
    x: Tensor, weight: Any = None, bias: Any = None, *, eps: float, residual: None = None, **options: Unpack[_Forward]
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def layernorm(
    x: Tensor, weight: Any = None, bias: Any = None, *, eps: float, residual: Tensor, **options: Unpack[_Forward]
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def layernorm(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Any, ...]:
    """Layer norm over the last dimension: ``y = (x - mean) rstd (weight + weight_offset) + bias``.

    ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)``. All in fp32, with the same bits on every backend; the sums over a row
    are a tree whose shape depends on N alone (NUMERICS.md, "LayerNorm").

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent.
        weight: ``[N]`` of any of the three types; None for ones.
        bias: ``[N]`` of any of the three types; None for zeros.
        eps: added to the variance; not negative.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``; then ``sum = x + residual``, rounded to the type of ``x``, is what is normalised.
        out: the tensor for ``y``, like ``x``; or a tuple ``(y, mean, rstd)`` or ``(y, mean, rstd, sum)`` whose members
            may be None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(y, mean, rstd)``, or ``(y, mean, rstd, sum)`` with a residual. ``mean`` and ``rstd`` are ``[...]`` in
        float32, and what :func:`layernorm_backward` takes.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit, or a negative ``eps``.
    """
    given = out if isinstance(out, tuple) else (out,)
    if len(given) > 4:
        fail(INVALID_VALUE, f"layernorm: out has {len(given)} members, want at most 4: y, mean, rstd and sum")
    y, mean, rstd, total, *_ = (*given, None, None, None, None)
    method = _layernorm if stream is None else on_stream(_layernorm, x, stream)
    return method(  # type: ignore[no-any-return]
        x,
        weight,
        bias,
        eps,
        weight_offset=weight_offset,
        residual=residual,
        out=y,
        mean=mean,
        rstd=rstd,
        sum=total,
        kernel=kernel,
    )


def layernorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    weight_offset: float = 0.0,
    has_bias: bool = True,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
    dweight: Any = None,
    dbias: Any = None,
    dweight_dtype: Any = None,
    accumulate: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Any, Any]:
    """Gradients of :func:`layernorm`.

    With ``xhat = (x - mean) rstd`` and ``g = dy (weight + weight_offset)``::

        dx         = rstd (g - mean(g) - xhat mean(g xhat)) + dresidual
        dweight[n] = sum over rows of dy xhat
        dbias[n]   = sum over rows of dy

    The sums over rows walk fixed blocks of ``DWEIGHT_ROWS`` rows, whatever the device (NUMERICS.md, "RMSNorm").

    Args:
        dy: ``[..., N]``, like ``x``.
        x: what was normalised: ``x``, or ``sum`` where there was a residual.
        weight: ``[N]``, or None for ones; then ``dweight`` and ``dbias`` are None unless given.
        mean, rstd: ``[...]``, float32, of the forward call.
        weight_offset: as in the forward call.
        has_bias: whether ``dbias`` is made where ``dweight`` is.
        dresidual: like ``x``; a gradient that is added to ``dx`` in fp32 before it is rounded.
        out: the tensor for ``dx``, like ``x``; made if None.
        dweight, dbias: ``[N]`` of any of the three types; made if None, but not under ``accumulate``.
        dweight_dtype: the type of those that are made. That of ``weight`` by default.
        accumulate: continue from ``dweight`` and ``dbias``, of which one or both are then given and float32. Rows cut
            at a multiple of ``DWEIGHT_ROWS`` give the bits of one call.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(dx, dweight, dbias)``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _layernorm_backward if stream is None else on_stream(_layernorm_backward, dy, stream)
    return method(  # type: ignore[no-any-return]
        dy,
        x,
        weight,
        mean,
        rstd,
        weight_offset=weight_offset,
        dresidual=dresidual,
        has_bias=has_bias,
        out=out,
        dweight=dweight,
        dbias=dbias,
        dweight_dtype=None
        if dweight_dtype is None
        else type_index(dweight_dtype, "layernorm_backward", "dweight_dtype"),
        accumulate=accumulate,
        kernel=kernel,
    )
