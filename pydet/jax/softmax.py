"""Softmax, its logarithm and one column of that, with gradients."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pydet._native import INVALID_VALUE, fail
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    call_handler,
    compiled,
    kernel_name,
    operands_of,
    program,
    static,
    to_array,
    to_kind,
    whole_numbers,
)
from pydet.shapes import RULES, text


def _rows_like(target: str, operands: list[Array], **attributes: Any) -> Array:
    return call_handler(target, jax.ShapeDtypeStruct(operands[-1].shape, operands[-1].dtype), operands, {}, attributes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _soft(x: Array, log: bool, kernel: str) -> Array:
    return _rows_like("softmax", [x], log=log, kernel=kernel)


def _soft_forward(x: Array, log: bool, kernel: str) -> tuple[Array, Array]:
    y = _soft(x, log, kernel)
    return y, y


def _soft_backward(log: bool, kernel: str, y: Array, dy: Array) -> tuple[Array]:
    return (_rows_like("softmax_backward", [dy, y], log=log, kernel=""),)


_soft.defvjp(_soft_forward, _soft_backward)
_run_soft = compiled(1, 2)(_soft)


def _soft_operand(op: str, x: Any) -> Array:
    x = to_array(op, "x", x)
    RULES.norm(op, *operands_of(("x", x)))
    return x


@program
def softmax(
    x: Array,
    axis: int | tuple[int, ...] | None = -1,
    where: Array | None = None,
    *,
    kernel: str | None = None,
) -> Array:
    """``exp(x - max(x)) / sum(exp(x - max(x)))``, as ``jax.nn.softmax``: :func:`pydet.softmax` with a gradient.

    Args:
        x: ``[..., N]``.
        axis: the dimensions of a row; None for all. Rows that are not the last dimension are copied.
        where: bool, of a shape that broadcasts to that of ``x``: what is not there gives 0.
        kernel: as in :func:`gemm`.
    """
    return _soft_along("softmax", x, axis, where, False, kernel)


@program
def log_softmax(
    x: Array,
    axis: int | tuple[int, ...] | None = -1,
    where: Array | None = None,
    *,
    kernel: str | None = None,
) -> Array:
    """The logarithm of :func:`softmax`, as ``jax.nn.log_softmax``: :func:`pydet.log_softmax` with a gradient. Arguments
    as there; what is not there gives -inf."""
    return _soft_along("log_softmax", x, axis, where, True, kernel)


def _soft_along(op: str, x: Any, axis: Any, where: Any, log: bool, kernel: str | None) -> Array:
    if isinstance(axis, int) and axis == -1 and where is None:
        return _run_soft(_soft_operand(op, x), log, kernel_name(op, kernel))
    x = to_array(op, "x", x)
    if where is not None:
        where = to_kind(op, "where", where, "bool")
        if RULES.broadcast(where.shape, x.shape) != x.shape:
            fail(INVALID_SHAPE, f"{op}: where is {text(where.shape)}, want one that broadcasts to {text(x.shape)}")
        where = jnp.broadcast_to(where, x.shape)
    places = _axes(op, axis, x)
    order = (*(i for i in range(x.ndim) if i not in places), *places)
    lead = [x.shape[i] for i in order[: x.ndim - len(places)]]

    def rows(x: Array) -> Array:
        return jnp.transpose(x, order).reshape(*lead, math.prod(x.shape[i] for i in places))

    there = None if where is None else rows(where)
    given = rows(x) if there is None else jnp.where(there, rows(x), -jnp.inf)
    y = _run_soft(_soft_operand(op, given), log, kernel_name(op, kernel))
    if there is not None:
        y = jnp.where(there, y, -jnp.inf if log else 0)
    return jnp.transpose(y.reshape([x.shape[i] for i in order]), [order.index(i) for i in range(x.ndim)])


def _axes(op: str, axis: Any, x: Array) -> tuple[int, ...]:
    """The dimensions of a row, ascending."""
    given = range(x.ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    places = [static(op, "axis", i, operator.index, "dimensions, or None for all") for i in given]
    if not all(-x.ndim <= i < x.ndim for i in places) or len({i % x.ndim for i in places}) != len(places):
        fail(INVALID_VALUE, f"{op}: axis is {axis!r}, want dimensions of x, {text(x.shape)}, once")
    if not places:
        fail(INVALID_VALUE, f"{op}: axis is {axis!r}, want one dimension or more")
    return tuple(sorted(i % x.ndim for i in places))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _column(x: Array, index: Array, kernel: str) -> Array:
    return call_handler("log_prob", jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32), [x, index], {}, {"kernel": kernel})


def _column_forward(x: Array, index: Array, kernel: str) -> tuple[Array, Any]:
    return _column(x, index, kernel), (x, index)


def _column_backward(kernel: str, saved: Any, dlog_prob: Array) -> tuple[Array, None]:
    x, index = saved
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return call_handler("log_prob_backward", like, [dlog_prob, x, index], {}, {"kernel": ""}), None


_column.defvjp(_column_forward, _column_backward)
_run_column = compiled(2)(_column)


@program
def log_prob(x: Array, index: Array, *, kernel: str | None = None) -> Array:
    """Column ``index`` of each row of :func:`log_softmax`: :func:`pydet.log_prob` with a gradient by ``x``.

    Args:
        x: ``[..., N]``, logits.
        index: ``[...]``, int32 or int64; a number that is no column gives NaN, and zeros in the gradient.
        kernel: as in :func:`gemm`.

    Returns:
        ``[...]``, float32.
    """
    x = _soft_operand("log_prob", x)
    index = whole_numbers("log_prob", "index", index, x.shape[:-1])
    return _run_column(x, index, kernel_name("log_prob", kernel))
