"""RMSNorm with gradients, and what every norm takes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pydet import _native
from pydet._native import INVALID_VALUE, constants, fail, ffi
from pydet.jax.calls import (
    Array,
    Real,
    call_handler,
    compiled,
    continued,
    kernel_name,
    name_of,
    operands_of,
    program,
    static,
    to_array,
)
from pydet.ops import DWEIGHT_ROWS
from pydet.shapes import RULES


def _heads(*vectors: Array | None) -> int:
    """How many heads weights or biases are of; 0: all rows have the same."""
    first = next((vector for vector in vectors if vector is not None), None)
    return first.shape[0] if first is not None and first.ndim == 2 else 0


def _norm(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    weight_offset: float,
    kernel: str,
) -> tuple[Array, ...]:
    like, rstd = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    has = {"has_residual": residual is not None, "has_weight": weight is not None, "has_bias": bias is not None}
    return call_handler(
        "rmsnorm",
        (like, rstd) if residual is None else (like, rstd, jax.ShapeDtypeStruct(x.shape, residual.dtype)),
        [operand for operand in (x, residual, weight, bias) if operand is not None],
        {},
        {**has, "heads": _heads(weight, bias), "eps": eps, "weight_offset": weight_offset, "kernel": kernel},
    )


def sums_workspace(norm: str, rows: Any, columns: Any) -> Any:
    """Bytes of workspace for sums over rows. Where extents are symbols, those of whole blocks of DWEIGHT_ROWS."""
    library, size = _native.load(constants.PYDET_EXCHANGE_CPU), ffi.new("uint64_t *")
    symbols = not (isinstance(rows, int) and isinstance(columns, int))
    extents = (DWEIGHT_ROWS, 1) if symbols else (rows, max(columns, 1))
    library.check(getattr(library.lib, f"pydet_{norm}_backward_workspace")(*extents, size))
    return -(-rows // DWEIGHT_ROWS) * columns * int(size[0]) if symbols else int(size[0])


def _norm_backward(
    dy: Array,
    x: Array,
    rstd: Array,
    weight: Array | None,
    bias: jax.ShapeDtypeStruct | None,
    dresidual: Array | None,
    weight_offset: float,
    start: Array | None = None,
    dtype: str | None = None,
    kernel: str = "",
) -> tuple[Array, Array | None, Array | None]:
    """dx, dweight where there is a weight, and dbias like `bias` where that is given."""
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if weight is not None:
        results.append(jax.ShapeDtypeStruct(weight.shape, dtype or weight.dtype))
    if bias is not None:
        results.append(bias)
    if len(results) > 1:
        tail = len(results[1].shape)
        of_one = sums_workspace("rmsnorm", math.prod(x.shape[: x.ndim - tail]), math.prod(x.shape[x.ndim - tail :]))
        results.append(jax.ShapeDtypeStruct((of_one * (1 if bias is None else 2),), jnp.uint8))
    operands = [operand for operand in (dy, x, rstd, weight, dresidual, start) if operand is not None]
    has = {
        "has_weight": weight is not None,
        "has_bias": bias is not None,
        "has_dresidual": dresidual is not None,
        "accumulate": start is not None,
        "block_sums": False,
        "heads": results[1].shape[0] if len(results) > 1 and len(results[1].shape) == 2 else 0,
    }
    dx, *sums = call_handler(
        "rmsnorm_backward",
        tuple(results),
        operands,
        {} if start is None else {len(operands) - 1: 1},
        {**has, "weight_offset": weight_offset, "kernel": kernel},
    )
    return dx, sums.pop(0) if weight is not None else None, sums.pop(0) if bias is not None else None


def _like(bias: Array | None) -> jax.ShapeDtypeStruct | None:
    return None if bias is None else jax.ShapeDtypeStruct(bias.shape, bias.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _rms_norm(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    weight_offset: float,
    kernel: str,
) -> tuple[Array, ...]:
    """y, and the sum where there is a residual."""
    y, _, *total = _norm(x, residual, weight, bias, eps, weight_offset, kernel)
    return y, *total


def _rms_norm_forward(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    weight_offset: float,
    kernel: str,
) -> tuple[tuple[Array, ...], Any]:
    y, rstd, *total = _norm(x, residual, weight, bias, eps, weight_offset, kernel)
    return (y, *total), (*(total or (x,)), weight, bias, rstd)


def _rms_norm_backward(
    eps: float, weight_offset: float, kernel: str, saved: Any, gradients: tuple[Array, ...]
) -> tuple[Array | None, ...]:
    (x, weight, bias, rstd), (dy, *dsum) = saved, gradients
    dx, dweight, dbias = _norm_backward(dy, x, rstd, weight, _like(bias), dsum[0] if dsum else None, weight_offset)
    return (dx.astype(dy.dtype), dx, dweight, dbias) if dsum else (dx, None, dweight, dbias)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)
_run_rms_norm = compiled(4, 5, 6)(_rms_norm)


def norm_operands(
    op: str, x: Any, weight: Any, residual: Any = None, bias: Any = None, heads: bool = False
) -> tuple[Array, Array | None, Array | None, Array | None]:
    x = to_array(op, "x", x)
    weight = None if weight is None else to_array(op, "weight", weight)
    residual = None if residual is None else to_array(op, "residual", residual)
    bias = None if bias is None else to_array(op, "bias", bias)
    named = (("x", x), ("residual", residual), ("weight", weight), ("bias", bias))
    rows, added, weights, biases = operands_of(*named)
    RULES.norm(op, rows, (added,), weights, bias=biases, heads=heads)
    return x, weight, residual, bias


def norm_options(op: str, eps: Any, weight_offset: Any) -> tuple[float, float]:
    eps, weight_offset = (
        static(op, name, value, float, "a number") for name, value in (("eps", eps), ("weight_offset", weight_offset))
    )
    if not eps >= 0:
        fail(INVALID_VALUE, f"{op}: eps is {eps}, want a number that is not negative")
    return Real(eps), Real(weight_offset)


@program
def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float,
    bias: Array | None = None,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """``y = x rstd (weight + weight_offset) + bias`` over the last dimension: :func:`pydet.rmsnorm` with a gradient.

    Args:
        x: ``[..., N]``.
        weight: ``[N]``, or ``[H, N]`` beside an ``x`` of ``[..., H, N]``, of any of the three types, or None for ones.
        eps: added to the mean of squares; not negative.
        bias: shaped like ``weight``, or None for zeros.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``, or float32; then their sum, of its type, is normalised.
        kernel: as in :func:`gemm`.

    Returns:
        ``y``; with a residual ``(y, x + residual)``.
    """
    x, weight, residual, bias = norm_operands("rms_norm", x, weight, residual, bias, True)
    options = (*norm_options("rms_norm", eps, weight_offset), kernel_name("rms_norm", kernel))
    y, *total = _run_rms_norm(x, residual, weight, bias, *options)
    return (y, *total) if total else y


@program
def rmsnorm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float,
    bias: Array | None = None,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, ...]:
    """:func:`pydet.rmsnorm`: what :func:`rmsnorm_backward` takes, for who writes the backward pass out.

    Args:
        x, weight, eps, bias, weight_offset, residual, kernel: as in :func:`rms_norm`, which alone has a gradient.

    Returns:
        ``(y, rstd)``, or ``(y, rstd, x + residual)`` with a residual; ``rstd`` is ``[...]`` in float32.
    """
    x, weight, residual, bias = norm_operands("rmsnorm", x, weight, residual, bias, True)
    return _norm(
        x, residual, weight, bias, *norm_options("rmsnorm", eps, weight_offset), kernel_name("rmsnorm", kernel)
    )


@program
def rmsnorm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    rstd: Array,
    *,
    weight_offset: float = 0.0,
    dresidual: Array | None = None,
    has_bias: bool = False,
    dweight_dtype: Any = None,
    accumulate: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, ...]:
    """:func:`pydet.rmsnorm_backward`: the gradients of :func:`rmsnorm`; it has none of its own.

    Args:
        dy: like ``x``, or of another type beside a float32 ``x``.
        x: ``[..., N]``; what was normalised: ``x``, or the sum where there was a residual.
        weight: ``[N]`` or ``[H, N]`` of any of the three types, or None for ones; then ``dweight`` is None.
        rstd: ``[...]``, float32, of the forward call.
        weight_offset: as in the forward call.
        dresidual: like ``x``; a gradient that is added to ``dx`` before it is rounded.
        has_bias: whether ``dbias`` is made: shaped like ``weight``, or ``[N]`` where there is none.
        dweight_dtype: the type of ``dweight`` and ``dbias``; that of ``weight`` by default, float32 under
            ``accumulate``, without a weight that of ``x``.
        accumulate: like ``weight``, float32: the ``dweight`` to continue from, without a ``dbias``. Rows (of each head)
            cut at a multiple of ``DWEIGHT_ROWS`` give the bits of one call.
        kernel: as in :func:`gemm`.

    Returns:
        ``(dx, dweight)``, and ``dbias`` if ``has_bias``.
    """
    op = "rmsnorm_backward"
    x, dy, rstd = to_array(op, "x", x), to_array(op, "dy", dy), to_array(op, "rstd", rstd)
    weight = None if weight is None else to_array(op, "weight", weight)
    dresidual = None if dresidual is None else to_array(op, "dresidual", dresidual)
    named = (("x", x), ("dy", dy), ("weight", weight), ("rstd", rstd), ("dresidual", dresidual))
    rows, gradient, weights, of_rows, added = operands_of(*named)
    RULES.norm(op, rows, (gradient, added), weights, of_rows, heads=True)
    has_bias = static(op, "has_bias", has_bias, bool, "True or False")
    if weight is None and (accumulate is not None or (dweight_dtype is not None and not has_bias)):
        fail(INVALID_VALUE, f"{op}: weight is None, so there is no dweight")
    if has_bias and accumulate is not None:
        fail(INVALID_VALUE, f"{op}: accumulate continues dweight alone, want has_bias=False")
    sample = x if weight is None else weight
    shape = x.shape[-1:] if weight is None else weight.shape
    start, dtype = continued(op, accumulate, shape, dweight_dtype, name_of(sample.dtype), "dweight_dtype")
    offset = Real(static(op, "weight_offset", weight_offset, float, "a number"))
    bias = jax.ShapeDtypeStruct(shape, dtype) if has_bias else None
    found = _norm_backward(dy, x, rstd, weight, bias, dresidual, offset, start, dtype, kernel_name(op, kernel))
    return found if has_bias else found[:2]
