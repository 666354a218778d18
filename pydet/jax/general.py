"""Products of any dimensions: dot_general."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, fail
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    Options,
    compiled,
    continued,
    name_of,
    options_of,
    program,
    to_array,
)
from pydet.jax.products import Layout, product
from pydet.ops import Arithmetic
from pydet.shapes import text

_Places = tuple[int, ...]
_PRECISIONS = ("default", "fastest", "bfloat16", "bfloat16_3x", "high", "tensorfloat32", "highest", "float32")


def check_precision(op: str, precision: Any) -> None:
    """Any that JAX has by one name for an operand: products are exact and sums fp32, which no other exceeds."""
    for one in precision if isinstance(precision, tuple | list) and len(precision) == 2 else (precision,):
        if not (one is None or isinstance(one, jax.lax.Precision) or one in _PRECISIONS):
            fail(UNSUPPORTED, f"{op}: precision is {precision!r}, want None, a jax.lax.Precision, its name, or two")


def _matrices(x: Array, batch: _Places, free: _Places, contracting: _Places) -> tuple[Array, bool]:
    """x as ``[batch, free, contracting]``, or the last two turned, which is true then, where it lies so; and without a
    batch as a matrix."""
    turned = (*batch, *free, *contracting) != (every := tuple(range(x.ndim))) and (*batch, *contracting, *free) == every
    order = (*batch, *contracting, *free) if turned else (*batch, *free, *contracting)
    size = {name: math.prod(x.shape[i] for i in places) for name, places in (("free", free), ("sum", contracting))}
    last = (size["sum"], size["free"]) if turned else (size["free"], size["sum"])
    lead = (math.prod(x.shape[i] for i in batch),) if batch else ()
    x = x if order == every else jnp.transpose(x, order)
    return x.reshape(*lead, *last), turned


@compiled(3, 4, 5, 6)
def _dot_general(
    lhs: Array,
    rhs: Array,
    start: Array | None,
    contracting: tuple[_Places, _Places],
    batch: tuple[_Places, _Places],
    dtype: str,
    options: Options,
) -> Array:
    free = [
        tuple(i for i in range(x.ndim) if i not in (*summed, *leads))
        for x, summed, leads in ((lhs, contracting[0], batch[0]), (rhs, contracting[1], batch[1]))
    ]
    a, turned = _matrices(lhs, batch[0], free[0], contracting[0])
    b, plain = _matrices(rhs, batch[1], free[1], contracting[1])
    shape = (
        *(lhs.shape[i] for i in batch[0]),
        *(lhs.shape[i] for i in free[0]),
        *(rhs.shape[i] for i in free[1]),
    )
    layout = Layout(transpose_a=turned, transpose_b=not plain)
    few_rows = options._replace(skinny=not batch[0] and not turned and not plain)
    if start is not None:
        start = start.reshape(*a.shape[:-2], a.shape[-1 if turned else -2], b.shape[-1 if plain else -2])
    result: Array = product(a, b, None, start, dtype, layout, few_rows)
    return result.reshape(shape)


def _places(op: str, name: str, given: Any, x: Array) -> _Places:
    try:
        places = tuple(operator.index(i) for i in given)
    except TypeError:
        fail(INVALID_VALUE, f"{op}: dimension_numbers has {given!r} for {name}, want dimensions")
    if len(set(places)) != len(places) or not all(0 <= i < x.ndim for i in places):
        fail(
            INVALID_SHAPE,
            f"{op}: dimension_numbers has {places} for {name}, {text(x.shape)}, want its dimensions, once",
        )
    return places


@program
def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: None = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
) -> Array:
    """``jax.lax.dot_general``, a drop-in, as for Flax's ``dot_general=``: :func:`gemm` over any dimensions.

    An element is one chain over the dimensions that are summed, in the order in which they are given: it does not
    depend on the others, so a row has its bits in any batch. What lies as a matrix or its transpose is read in place.

    Args:
        lhs, rhs: float32, bfloat16 or float16, of one type.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``.
        precision: any of JAX's; sums are always fp32, of exact products.
        preferred_element_type: the type of the result; that of ``lhs`` by default.
        out_sharding: None.
        accumulate, arithmetic, k_chunk: as in :func:`gemm`.

    Returns:
        The batch dimensions, then the others of ``lhs``, then those of ``rhs``.
    """
    op = "dot_general"
    lhs, rhs = to_array(op, "lhs", lhs), to_array(op, "rhs", rhs)
    if rhs.dtype != lhs.dtype:
        fail(INVALID_DTYPE, f"{op}: rhs is {name_of(rhs.dtype)}, want {name_of(lhs.dtype)} as lhs is")
    check_precision(op, precision)
    if out_sharding is not None:
        fail(UNSUPPORTED, f"{op}: out_sharding is {out_sharding!r}, want None")
    try:
        (of_lhs, of_rhs), (batch_lhs, batch_rhs) = dimension_numbers
    except (TypeError, ValueError):
        want = "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))"
        fail(INVALID_VALUE, f"{op}: dimension_numbers is {dimension_numbers!r}, want {want}")
    pairs = []
    for kind, left, right in (("contracting", of_lhs, of_rhs), ("batch", batch_lhs, batch_rhs)):
        pair = _places(op, f"lhs_{kind}", left, lhs), _places(op, f"rhs_{kind}", right, rhs)
        extents = [[x.shape[i] for i in places] for x, places in zip((lhs, rhs), pair, strict=True)]
        if extents[0] != extents[1]:
            got = f"{text(extents[0])} of lhs, {text(lhs.shape)}, and {text(extents[1])} of rhs, {text(rhs.shape)}"
            fail(INVALID_SHAPE, f"{op}: {kind} dimensions are {got}, want the same")
        pairs.append(pair)
    for name, summed, lead in (("lhs", pairs[0][0], pairs[1][0]), ("rhs", pairs[0][1], pairs[1][1])):
        if set(summed) & set(lead):
            fail(INVALID_SHAPE, f"{op}: dimension_numbers has dimensions of {name} twice, {summed} and {lead}")
    places = zip((lhs, rhs), *(zip(*pairs, strict=True),), strict=True)
    shape = tuple(lhs.shape[i] for i in pairs[1][0])
    shape += tuple(x.shape[i] for x, (summed, lead) in places for i in range(x.ndim) if i not in (*summed, *lead))
    start, dtype = continued(
        op, accumulate, shape, preferred_element_type, name_of(lhs.dtype), "preferred_element_type"
    )
    result: Array = _dot_general(lhs, rhs, start, *pairs, dtype, options_of(op, arithmetic, k_chunk))
    return result
