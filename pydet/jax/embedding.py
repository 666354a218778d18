"""Rows of a table by their numbers, with the table's gradient; and what of JAX's scatter-add is that gradient."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pydet._native import INVALID_DTYPE, INVALID_VALUE, fail
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    call_handler,
    compiled,
    continued,
    kernel_name,
    name_of,
    program,
    static,
    to_array,
    whole_numbers,
)
from pydet.protocols import UNSCALED
from pydet.shapes import text

_NONE = -1  # no padding id
_MOST = 2**31 - 1  # tokens, and rows


def _workspace(tokens: int, rows: int) -> Any:
    """Where tokens are put in order (pydet_embedding_backward_workspace)."""
    if tokens > _MOST or rows > _MOST:
        fail(INVALID_SHAPE, f"embedding_backward: tokens are {tokens} and rows {rows}, want 0 to {_MOST} of each")
    return jax.ShapeDtypeStruct((8 * tokens + 4 * (-(-rows // 32) + 1),), jnp.uint8)


def _gradient(dout: Array, ids: Array, start: Array | None, rows: int, padding: int, dtype: str, kernel: str) -> Array:
    results = (jax.ShapeDtypeStruct((rows, dout.shape[-1]), jnp.dtype(dtype)), _workspace(math.prod(ids.shape), rows))
    operands = [dout, ids] if start is None else [dout, ids, start]
    aliases = {} if start is None else {2: 0}
    options = {"accumulate": start is not None, "padding": padding, "kernel": kernel}
    dw, _ = call_handler("embedding_backward", results, operands, aliases, options)
    return dw


_run_gradient = compiled(3, 4, 5, 6)(_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rows(w: Array, ids: Array, padding: int, kernel: str) -> Array:
    like = jax.ShapeDtypeStruct((*ids.shape, w.shape[1]), w.dtype)
    return call_handler("embedding", like, [w, ids], {}, {"kernel": kernel})


def _rows_forward(w: Array, ids: Array, padding: int, kernel: str) -> tuple[Array, Any]:
    return _rows(w, ids, padding, kernel), (ids, w.shape[0])


def _rows_backward(padding: int, kernel: str, saved: Any, dout: Array) -> tuple[Array, None]:
    ids, rows = saved
    return _gradient(dout, ids, None, rows, padding, name_of(dout.dtype), ""), None


_rows.defvjp(_rows_forward, _rows_backward)
_run_rows = compiled(2, 3)(_rows)


def _padding(op: str, padding_idx: int | None, rows: int) -> int:
    if padding_idx is None:
        return _NONE
    padding: int = static(op, "padding_idx", padding_idx, operator.index, "None or an integer")
    if not 0 <= padding < rows:
        fail(INVALID_VALUE, f"{op}: padding_idx is {padding}, want None or one of {rows} rows, from 0")
    return padding


@program
def embedding(w: Array, ids: Array, *, padding_idx: int | None = None, kernel: str | None = None) -> Array:
    """``w[ids]``: :func:`pydet.embedding` with a gradient by ``w``, whose sums have their tokens' order.

    Args:
        w: ``[V, N]``.
        ids: ``[...]``, int32 or int64. One that is no row's is an error on the CPU; on a GPU its row is NaN, and it has
            no part in the gradient.
        padding_idx: tokens of this id have no part in the gradient.
        kernel: as in :func:`gemm`.

    Returns:
        ``[..., N]``, of ``w``'s type.
    """
    w = to_array("embedding", "w", w)
    if w.ndim != 2 or not w.shape[1]:
        fail(INVALID_SHAPE, f"embedding: w is {text(w.shape)}, want 2 dimensions, the last of 1 or more")
    ids = whole_numbers("embedding", "ids", ids, None)
    return _run_rows(w, ids, _padding("embedding", padding_idx, w.shape[0]), kernel_name("embedding", kernel))


@program
def embedding_backward(
    dout: Array,
    ids: Array,
    rows: int,
    *,
    padding_idx: int | None = None,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    kernel: str | None = None,
) -> Array:
    """:func:`pydet.embedding_backward`: the gradient of a table of so many rows.

    Args:
        dout: ``[..., N]``.
        ids, padding_idx, kernel: as in :func:`embedding`.
        rows: V.
        out_dtype: float32, or the type of ``dout``, which is the default.
        accumulate: ``[V, N]``, float32: continue from it. Within ``jit`` its memory is reused where it is donated.

    Returns:
        ``[V, N]``.
    """
    op = "embedding_backward"
    dout = to_array(op, "dout", dout)
    if dout.ndim < 1 or not dout.shape[-1]:
        fail(INVALID_SHAPE, f"{op}: dout is {text(dout.shape)}, want a last dimension of 1 or more")
    ids = whole_numbers(op, "ids", ids, dout.shape[:-1])
    rows = static(op, "rows", rows, operator.index, "an integer")
    if rows < 0:
        fail(INVALID_VALUE, f"{op}: rows is {rows}, want 0 or more")
    start, dtype = continued(op, accumulate, (rows, dout.shape[-1]), out_dtype, name_of(dout.dtype))
    if dtype not in ("float32", name_of(dout.dtype)):
        fail(INVALID_DTYPE, f"{op}: out_dtype is {dtype}, want float32, or {name_of(dout.dtype)} as dout is")
    return _run_gradient(dout, ids, start, rows, _padding(op, padding_idx, rows), dtype, kernel_name(op, kernel))


# ---- scatter-add -----------------------------------------------------------------------------------------------------


_Modes: Any = jax.lax.GatherScatterMode
_IDS = ("int8", "int16", "int32", "int64", "uint8", "uint16")


def adds_rows(params: dict[str, Any], table: Any, ids: Any, rows: Any) -> bool:
    """Whether a scatter-add adds whole rows to a table, by their numbers along its first dimension."""
    numbers = params["dimension_numbers"]
    of_rows = tuple(numbers.scatter_dims_to_operand_dims) == tuple(numbers.inserted_window_dims) == (0,)
    return (
        of_rows
        and not numbers.operand_batching_dims
        and tuple(rows.shape[i] for i in numbers.update_window_dims) == table.shape[1:]
        and params["mode"] in (_Modes.CLIP, _Modes.FILL_OR_DROP, _Modes.PROMISE_IN_BOUNDS)
        and name_of(table.dtype) in UNSCALED
        and rows.dtype == table.dtype
        and name_of(ids.dtype) in _IDS
        and 0 not in (*table.shape, *rows.shape)
        and max(table.shape[0], math.prod(ids.shape[:-1])) <= _MOST
    )


def _inside(rows: Array, ids: Array, count: int) -> tuple[Array, Array]:
    """Rows of numbers beyond the table as some that change nothing: x + -0 is x, whatever x is."""
    there = (ids >= 0) & (ids < count)
    return jnp.where(there[..., None], rows, jnp.asarray(-0.0, rows.dtype)), jnp.where(there, ids, 0)


def _sums(rows: Array, ids: Array, start: Array | None, count: int, dtype: str, drops: bool) -> Array:
    if drops:  # the CPU refuses such numbers; on a GPU they have no part in the sums
        inside = functools.partial(_inside, count=count)
        rows, ids = jax.lax.platform_dependent(rows, ids, cpu=inside, default=lambda rows, ids: (rows, ids))
    return _gradient(rows, ids, start, count, _NONE, dtype, "")


_run_sums = compiled(3, 4, 5)(_sums)


def scatter_add(
    params: dict[str, Any], table: Array, ids: Array, rows: Array, start: Array | None, dtype: str
) -> Array:
    """That by :func:`embedding_backward`, the rows of a number added one after the other, to what `start` holds."""
    numbers, mode = params["dimension_numbers"], params["mode"]
    window, count, width = tuple(numbers.update_window_dims), table.shape[0], math.prod(table.shape[1:])
    others = tuple(i for i in range(rows.ndim) if i not in window)
    rows = jnp.transpose(rows, (*others, *window)).reshape(*ids.shape[:-1], width)
    ids = ids.reshape(ids.shape[:-1])
    ids = ids if name_of(ids.dtype) in ("int32", "int64") else ids.astype(jnp.int32)
    if mode == _Modes.CLIP:
        ids = jnp.clip(ids, 0, count - 1)
    start = None if start is None else start.reshape(count, width)
    made: Array = _run_sums(rows, ids, start, count, dtype, mode == _Modes.FILL_OR_DROP)
    return made.reshape(table.shape)
