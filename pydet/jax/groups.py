"""Products of groups of rows: ragged_dot."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pydet._native import INVALID_DTYPE, INVALID_VALUE, fail
from pydet.frameworks import type_index
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    Options,
    call_handler,
    compiled,
    name_of,
    options_of,
    program,
    to_array,
    unwrapped,
)
from pydet.jax.general import check_precision
from pydet.ops import Arithmetic
from pydet.protocols import TYPES, type_name
from pydet.shapes import text


def _groups(
    a: Array, b: Array, ends: Array, shape: tuple[int, ...], dtype: str, options: Options, **layout: bool
) -> Array:
    attributes = {"arithmetic": options.arithmetic, "k_chunk": options.k_chunk, "kernel": options.kernel}
    operands = [a, b, ends, jnp.zeros(shape, dtype)]  # rows of no group stay zeros
    return call_handler("grouped_gemm", jax.ShapeDtypeStruct(shape, dtype), operands, {3: 0}, {**layout, **attributes})


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _rows_by_group(a: Array, b: Array, ends: Array, dtype: str, transpose_b: bool, options: Options) -> Array:
    """``[T, N]``: each row of a ``[T, K]`` by the matrix of its group, of b ``[G, K, N]``, or b ``[G, N, K]``."""
    shape = (a.shape[0], b.shape[1 if transpose_b else 2])
    return _groups(a, b, ends, shape, dtype, options, depth=False, transpose_b=transpose_b)


def _rows_by_group_forward(
    a: Array, b: Array, ends: Array, dtype: str, transpose_b: bool, options: Options
) -> tuple[Array, Any]:
    return _rows_by_group(a, b, ends, dtype, transpose_b, options), (a, b, ends)


def _rows_by_group_backward(
    dtype: str, transpose_b: bool, options: Options, saved: Any, dc: Array
) -> tuple[Array, Array, None]:
    a, b, ends = saved
    dc, own, options = dc.astype(a.dtype), a.dtype.name, options.of_backward()
    da = _rows_by_group(dc, b, ends, own, not transpose_b, options)
    return da, _sums_by_group(*((dc, a) if transpose_b else (a, dc)), ends, own, options), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _sums_by_group(a: Array, b: Array, ends: Array, dtype: str, options: Options) -> Array:
    """``[G, M, N]``: the rows of a group in a ``[T, M]``, transposed, by its rows in b ``[T, N]``."""
    shape = (ends.shape[0], a.shape[1], b.shape[1])
    return _groups(a, b, ends, shape, dtype, options, depth=True, transpose_b=False)


def _sums_by_group_forward(a: Array, b: Array, ends: Array, dtype: str, options: Options) -> tuple[Array, Any]:
    return _sums_by_group(a, b, ends, dtype, options), (a, b, ends)


def _sums_by_group_backward(dtype: str, options: Options, saved: Any, dc: Array) -> tuple[Array, Array, None]:
    a, b, ends = saved
    dc, own, options = dc.astype(a.dtype), a.dtype.name, options.of_backward()
    da = _rows_by_group(b, dc, ends, own, True, options)
    return da, _rows_by_group(a, dc, ends, own, False, options), None


_rows_by_group.defvjp(_rows_by_group_forward, _rows_by_group_backward)
_sums_by_group.defvjp(_sums_by_group_forward, _sums_by_group_backward)


@compiled(3, 4)
def _run_ragged(lhs: Array, rhs: Array, sizes: Array, dtype: str, options: Options) -> Array:
    result: Array = _rows_by_group(lhs, rhs, jnp.cumsum(sizes, dtype=jnp.int32), dtype, False, options)
    return result


@program
def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    out_dtype: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """``jax.lax.ragged_dot``: consecutive groups of rows, each by its own matrix; :func:`pydet.grouped_gemm`.

    A row has the bits of :func:`gemm` of that row and its group's matrix, whatever the other rows and the sizes are.
    The gradient by ``rhs`` sums each group's rows by themselves. Sizes stay on the device.

    Args:
        lhs: ``[T, K]``, sorted by group.
        rhs: ``[G, K, N]``, of the type of ``lhs``.
        group_sizes: ``[G]``, int32: how many rows each group has. They may be traced, and sum to less than T: rows past
            the last group are zeros, and so are their gradients.
        out_dtype, or preferred_element_type: that of the result; ``lhs``'s by default.
        precision: as in :func:`dot_general`.
        arithmetic, k_chunk, kernel: as in :func:`gemm`.

    Returns:
        ``[T, N]``.
    """
    lhs, rhs = to_array("ragged_dot", "lhs", lhs), to_array("ragged_dot", "rhs", rhs)
    for name, x, rank, want in (("lhs", lhs, 2, "TxK"), ("rhs", rhs, 3, "GxKxN")):
        if x.ndim != rank:
            fail(INVALID_SHAPE, f"ragged_dot: {name} is {text(x.shape)}, want {want}")
    if rhs.dtype != lhs.dtype:
        fail(INVALID_DTYPE, f"ragged_dot: rhs is {rhs.dtype.name}, want {lhs.dtype.name} as lhs")
    if rhs.shape[1] != lhs.shape[1]:
        fail(INVALID_SHAPE, f"ragged_dot: rhs is {text(rhs.shape)}, want Gx{lhs.shape[1]}xN")
    group_sizes = unwrapped(group_sizes)
    if not isinstance(group_sizes, jax.Array | np.ndarray) or name_of(group_sizes.dtype) != "int32":
        got = group_sizes.dtype.name if hasattr(group_sizes, "dtype") else type_name(group_sizes)
        fail(INVALID_DTYPE, f"ragged_dot: group_sizes is {got}, want an int32 array")
    if group_sizes.shape != rhs.shape[:1]:
        fail(INVALID_SHAPE, f"ragged_dot: group_sizes is {text(group_sizes.shape)}, want {rhs.shape[0]}")
    check_precision("ragged_dot", precision)
    if out_dtype is not None and preferred_element_type is not None:
        fail(INVALID_VALUE, "ragged_dot: preferred_element_type is given with out_dtype, want one of them")
    dtype = name_of(lhs.dtype)
    for name, given in (("out_dtype", out_dtype), ("preferred_element_type", preferred_element_type)):
        dtype = dtype if given is None else TYPES[type_index(given, "ragged_dot", name)]
    options = options_of("ragged_dot", arithmetic, k_chunk, kernel)
    result: Array = _run_ragged(lhs, rhs, jnp.asarray(group_sizes), dtype, options)
    return result
