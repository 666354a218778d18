"""Products of matrices and their gradients: gemm, skinny_gemm and linear."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pydet._native import UNSUPPORTED, fail
from pydet.hooks import unknown
from pydet.jax.calls import (
    Array,
    Options,
    as_rows,
    call_handler,
    compiled,
    continued,
    name_of,
    operands_of,
    options_of,
    program,
    static,
    to_array,
)
from pydet.ops import Arithmetic
from pydet.shapes import RULES, text


class Layout(NamedTuple):
    """How the matrices of a product lie: as a and b, or as their transposes."""

    transpose_a: bool = False
    transpose_b: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def product(
    a: Array, b: Array, bias: Array | None, start: Array | None, dtype: str, layout: Layout, options: Options
) -> Array:
    """Of matrices, or batches whose leading dimensions broadcast, with gradients; `start`: to continue from."""
    m, n = a.shape[-1 if layout.transpose_a else -2], b.shape[-2 if layout.transpose_b else -1]
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    # All of one rank, so that what vmap puts in front of them meets.
    operands = [x.reshape((1,) * (2 + len(batch) - x.ndim) + x.shape) for x in (a, b, bias, start) if x is not None]
    attributes = {"has_bias": bias is not None, "accumulate": start is not None, "has_initial": False}
    return call_handler(
        "gemm",
        jax.ShapeDtypeStruct((*batch, m, n), dtype),
        operands,
        {} if start is None else {len(operands) - 1: 0},
        {**attributes, **layout._asdict(), **options._asdict()},
    )


def _product_forward(
    a: Array, b: Array, bias: Array | None, start: Array | None, dtype: str, layout: Layout, options: Options
) -> tuple[Array, Any]:
    if a.shape[:-2] != b.shape[:-2] and (b.ndim > 2 or layout.transpose_a):
        fail(
            UNSUPPORTED,
            f"gemm: no gradient where batch dimensions broadcast ({a.shape}, {b.shape}) unless b is a matrix; "
            "broadcast them with jnp.broadcast_to",
        )
    result = product(a, b, bias, start, dtype, layout, options)
    if bias is not None and bias.ndim > 1 and bias.shape != result.shape:
        fail(
            UNSUPPORTED,
            f"gemm: no gradient where a bias of shape {text(bias.shape)} broadcasts to {text(result.shape)}; want "
            "[N], or broadcast it with jnp.broadcast_to",
        )
    return result, (a, b, bias)


def _product_backward(dtype: str, layout: Layout, options: Options, saved: Any, dc: Array) -> tuple[Any, ...]:
    a, b, bias = saved
    given, dc, options = dc, dc.astype(a.dtype), options.of_backward()

    def times(left: Array, right: Array, transpose_left: bool, transpose_right: bool) -> Array:
        return product(left, right, None, None, a.dtype.name, Layout(transpose_left, transpose_right), options)

    da = times(b, dc, layout.transpose_b, True) if layout.transpose_a else times(dc, b, False, not layout.transpose_b)
    rows, drows = (a, dc) if a.ndim == b.ndim else (as_rows(a), as_rows(dc))
    if layout.transpose_b:
        db = times(drows, rows, True, layout.transpose_a)
    else:
        db = times(rows, drows, not layout.transpose_a, False)
    dbias = None
    if bias is not None and bias.ndim > 1:
        dbias = given.astype(bias.dtype)
    elif bias is not None:  # rows are summed as one chain of products with 1
        ones = jnp.ones((as_rows(dc).shape[0], 1), dc.dtype)
        dbias = product(ones, as_rows(dc), None, None, bias.dtype.name, Layout(True), options)[0]
    return da, db, dbias, given


product.defvjp(_product_forward, _product_backward)
_run_product = compiled(4, 5, 6)(product)


@compiled(4, 5)
def _run_layer(x: Array, w: Array, bias: Array | None, start: Array | None, dtype: str, options: Options) -> Array:
    """A product of rows of any leading dimensions, with weights ``[N, K]``."""
    bias = bias if bias is None or bias.ndim == 1 else as_rows(bias)
    start = None if start is None else as_rows(start)
    y: Array = product(as_rows(x), w, bias, start, dtype, Layout(transpose_b=True), options)
    return y.reshape(*x.shape[:-1], w.shape[0])


def _matrix_product(
    op: str,
    first: tuple[str, Any],
    second: tuple[str, Any],
    bias: Any,
    out_dtype: Any,
    accumulate: Any,
    how: tuple[Any, Any, Any],
    layout: Layout,
) -> Array:
    """The product of two named matrices or batches, which lie as `layout` says; `how`: arithmetic, k_chunk, kernel."""
    a, b = to_array(op, *first), to_array(op, *second)
    added = None if bias is None else to_array(op, "bias", bias)
    shape = RULES.product(op, *operands_of((first[0], a), (second[0], b), ("bias", added)))
    start, dtype = continued(op, accumulate, shape, out_dtype, name_of(a.dtype))
    result: Array = _run_product(a, b, added, start, dtype, layout, options_of(op, *how))
    return result


@program
def gemm(
    a: Array,
    b: Array,
    bias: Array | None = None,
    *,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """``out[..., m, n] = round(sum_k a[..., m, k] b[..., k, n] + bias)``: :func:`pydet.gemm`.

    Args:
        a: ``[..., M, K]``.
        b: ``[..., K, N]``, of the type of ``a``. For a gradient its leading dimensions are those of ``a``, or none.
        bias: ``[N]``, or what broadcasts to the result; for a gradient ``[N]`` or like the result.
        out_dtype: ``a``'s by default; float32 under ``accumulate``.
        accumulate, arithmetic, k_chunk, kernel: see above.
    """
    how = arithmetic, k_chunk, kernel
    return _matrix_product("gemm", ("a", a), ("b", b), bias, out_dtype, accumulate, how, Layout())


@program
def gemm_da(
    dc: Array,
    b: Array,
    *,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """``da[..., m, k] = sum_n dc[..., m, n] b[..., k, n]``: :func:`pydet.gemm_da`.

    Args:
        dc: ``[..., M, N]``.
        b: ``[..., K, N]``, as it went into :func:`gemm`; of the type of ``dc``.
        out_dtype, accumulate, arithmetic, k_chunk, kernel: as in :func:`gemm`.
    """
    how, layout = (arithmetic, k_chunk, kernel), Layout(transpose_b=True)
    return _matrix_product("gemm_da", ("dc", dc), ("b", b), None, out_dtype, accumulate, how, layout)


@program
def gemm_db(
    a: Array,
    dc: Array,
    *,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """``db[..., k, n] = sum_m a[..., m, k] dc[..., m, n]``: :func:`pydet.gemm_db`.

    With ``accumulate``, micro-batches cut at multiples of the arithmetic's step (or of ``k_chunk``) give the bits of
    one large batch.

    Args:
        a: ``[..., M, K]``.
        dc: ``[..., M, N]``, of the type of ``a``.
        out_dtype, accumulate, arithmetic, k_chunk, kernel: as in :func:`gemm`.
    """
    how, layout = (arithmetic, k_chunk, kernel), Layout(transpose_a=True)
    return _matrix_product("gemm_db", ("a", a), ("dc", dc), None, out_dtype, accumulate, how, layout)


@program
def skinny_gemm(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    mode: str = "deterministic",
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    weights_constant: bool = False,
    kernel: str | None = None,
) -> Array:
    """``y[..., n] = round(sum_k x[..., k] w[n, k] + bias[n])``: :func:`pydet.skinny_gemm`, for any number of rows.

    Args:
        x: ``[..., K]`` of any rank from 1.
        w: ``[N, K]``, of the type of ``x``. Under a vmap over ``w`` this is :func:`gemm` of the batch.
        bias: ``[N]``, or like the result.
        mode, weights_constant: as in :func:`pydet.skinny_gemm`. The stream is XLA's: the promise that nothing in it
            still writes ``w`` is about the program itself and the programs that were started before it.
        out_dtype, accumulate, arithmetic, k_chunk, kernel: as in :func:`gemm`.
    """
    return _skinny(
        "skinny_gemm", x, w, bias, out_dtype, accumulate, mode, arithmetic, k_chunk, weights_constant, kernel
    )


@program
def linear(
    x: Array, w: Array, bias: Array | None = None, *, arithmetic: Arithmetic = "auto", k_chunk: int | None = None
) -> Array:
    """``y[..., n] = round(sum_k x[..., k] w[n, k] + bias[n])``: :func:`skinny_gemm` as a layer has it.

    Args:
        x: ``[..., K]`` of any rank from 1.
        w: ``[N, K]``, of the type of ``x``.
        bias: ``[N]``, or like the result.
        arithmetic, k_chunk: as in :func:`gemm`.
    """
    return _skinny("linear", x, w, bias, None, None, "deterministic", arithmetic, k_chunk, False, None)


def _skinny(
    op: str,
    x: Any,
    w: Any,
    bias: Any,
    out_dtype: Any,
    accumulate: Any,
    mode: str,
    arithmetic: Arithmetic,
    k_chunk: int | None,
    weights_constant: bool,
    kernel: str | None,
) -> Array:
    x, w = to_array(op, "x", x), to_array(op, "w", w)
    bias = None if bias is None else to_array(op, "bias", bias)
    shape = RULES.skinny_product(op, *operands_of(("x", x), ("w", w), ("bias", bias)))
    start, dtype = continued(op, accumulate, shape, out_dtype, name_of(x.dtype))
    options = options_of(op, arithmetic, k_chunk, kernel)._replace(
        skinny=True,
        mode=unknown(static(op, "mode", mode, str, "a name"), op, "mode"),
        weights_constant=static(op, "weights_constant", weights_constant, bool, "True or False"),
    )
    y: Array = _run_layer(x, w, bias, start, dtype, options)
    return y
