"""LayerNorm with gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pydet.frameworks import type_index
from pydet.jax.calls import (
    Array,
    Real,
    call_handler,
    compiled,
    kernel_name,
    name_of,
    operands_of,
    program,
    static,
    to_array,
)
from pydet.jax.rmsnorm import norm_operands, norm_options, sums_workspace
from pydet.protocols import TYPES
from pydet.shapes import RULES


def _layer(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    weight_offset: float,
    kernel: str,
) -> tuple[Array, ...]:
    like, of_rows = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    has = {"has_residual": residual is not None, "has_weight": weight is not None, "has_bias": bias is not None}
    return call_handler(
        "layernorm",
        (like, of_rows, of_rows) if residual is None else (like, of_rows, of_rows, like),
        [operand for operand in (x, residual, weight, bias) if operand is not None],
        {},
        {**has, "eps": eps, "weight_offset": weight_offset, "kernel": kernel},
    )


def _layer_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    dbias_dtype: str | None,
    dresidual: Array | None,
    weight_offset: float,
    dtype: str | None = None,
    kernel: str = "",
) -> tuple[Array, Array | None, Array | None]:
    """dx, dweight where there is a weight, and dbias where its type is given."""
    n, results = x.shape[-1], [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if weight is not None:
        results.append(jax.ShapeDtypeStruct((n,), dtype or weight.dtype))
    if dbias_dtype is not None:
        results.append(jax.ShapeDtypeStruct((n,), dbias_dtype))
    if len(results) > 1:
        results.append(jax.ShapeDtypeStruct((sums_workspace("layernorm", math.prod(x.shape[:-1]), n),), jnp.uint8))
    has = {
        "has_weight": weight is not None,
        "has_bias": dbias_dtype is not None,
        "has_dresidual": dresidual is not None,
    }
    dx, *sums = call_handler(
        "layernorm_backward",
        tuple(results),
        [operand for operand in (dy, x, mean, rstd, weight, dresidual) if operand is not None],
        {},
        {**has, "weight_offset": weight_offset, "kernel": kernel},
    )
    return dx, sums.pop(0) if weight is not None else None, sums.pop(0) if dbias_dtype is not None else None


def _type_of(bias: Array | None) -> str | None:
    return None if bias is None else str(bias.dtype.name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _layer_norm(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    weight_offset: float,
    kernel: str,
) -> tuple[Array, ...]:
    """y, and the sum where there is a residual."""
    y, _, _, *total = _layer(x, residual, weight, bias, eps, weight_offset, kernel)
    return y, *total


def _layer_norm_forward(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    weight_offset: float,
    kernel: str,
) -> tuple[tuple[Array, ...], Any]:
    y, mean, rstd, *total = _layer(x, residual, weight, bias, eps, weight_offset, kernel)
    return (y, *total), (*(total or (x,)), weight, bias, mean, rstd)


def _layer_norm_backward(
    eps: float, weight_offset: float, kernel: str, saved: Any, gradients: tuple[Array, ...]
) -> tuple[Array | None, ...]:
    (x, weight, bias, mean, rstd), (dy, *dsum) = saved, gradients
    operands = (dy, x, mean, rstd, weight, _type_of(bias), dsum[0] if dsum else None, weight_offset)
    dx, dweight, dbias = _layer_backward(*operands)
    return dx, dx if dsum else None, dweight, dbias


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
_run_layer_norm = compiled(4, 5, 6)(_layer_norm)


def _layer_operands(op: str, x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
    x, weight, residual, bias = norm_operands(op, x, weight, residual, bias)
    return x, weight, bias, residual


@program
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """``y = (x - mean) rstd (weight + weight_offset) + bias`` over the last dimension: :func:`pydet.layernorm` with a
    gradient.

    Args:
        x: ``[..., N]``.
        weight, bias: ``[N]`` of any of the three types, or None for ones and zeros.
        eps: added to the variance; not negative.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``; then their sum is normalised.
        kernel: as in :func:`gemm`.

    Returns:
        ``y``; with a residual ``(y, x + residual)``.
    """
    x, weight, bias, residual = _layer_operands("layer_norm", x, weight, bias, residual)
    options = (*norm_options("layer_norm", eps, weight_offset), kernel_name("layer_norm", kernel))
    y, *total = _run_layer_norm(x, residual, weight, bias, *options)
    return (y, *total) if total else y


@program
def layernorm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, ...]:
    """:func:`pydet.layernorm`: what :func:`layernorm_backward` takes, for who writes the backward pass out.

    Args:
        x, weight, bias, eps, weight_offset, residual, kernel: as in :func:`layer_norm`, which alone has a gradient.

    Returns:
        ``(y, mean, rstd)``, and ``x + residual`` with a residual; ``mean`` and ``rstd`` are ``[...]`` in float32.
    """
    x, weight, bias, residual = _layer_operands("layernorm", x, weight, bias, residual)
    options = (*norm_options("layernorm", eps, weight_offset), kernel_name("layernorm", kernel))
    return _layer(x, residual, weight, bias, *options)


@program
def layernorm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    *,
    weight_offset: float = 0.0,
    dresidual: Array | None = None,
    has_bias: bool = True,
    dweight_dtype: Any = None,
    kernel: str | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """:func:`pydet.layernorm_backward`: the gradients of :func:`layernorm`; it has none of its own.

    Args:
        dy: like ``x``.
        x: ``[..., N]``; what was normalised: ``x``, or the sum where there was a residual.
        weight: ``[N]`` of any of the three types, or None for ones; then ``dweight`` is None.
        mean, rstd: ``[...]``, float32, of the forward call.
        weight_offset: as in the forward call.
        dresidual: like ``x``; a gradient that is added to ``dx`` before it is rounded.
        has_bias: whether ``dbias`` is made.
        dweight_dtype: the type of ``dweight`` and ``dbias``; that of ``weight`` by default, without one that of ``x``.
        kernel: as in :func:`gemm`.

    Returns:
        ``(dx, dweight, dbias)``.
    """
    op = "layernorm_backward"
    x, dy, mean, rstd = (to_array(op, *pair) for pair in (("x", x), ("dy", dy), ("mean", mean), ("rstd", rstd)))
    weight = None if weight is None else to_array(op, "weight", weight)
    dresidual = None if dresidual is None else to_array(op, "dresidual", dresidual)
    named = (("x", x), ("dy", dy), ("weight", weight), ("rstd", rstd), ("dresidual", dresidual), ("mean", mean))
    rows, gradient, weights, of_rows, added, means = operands_of(*named)
    RULES.norm(op, rows, (gradient, added), weights, of_rows)
    RULES.norm(op, rows, (), None, means)
    has_bias = static(op, "has_bias", has_bias, bool, "True or False")
    dtype = name_of((x if weight is None else weight).dtype)
    if dweight_dtype is not None:
        dtype = TYPES[type_index(dweight_dtype, op, "dweight_dtype")]
    offset = Real(static(op, "weight_offset", weight_offset, float, "a number"))
    operands = (dy, x, mean, rstd, weight, dtype if has_bias else None, dresidual, offset, dtype)
    return _layer_backward(*operands, kernel_name(op, kernel))
