"""Scaled products and quantisation to fp8, without gradients."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

from pydet._native import INVALID_DTYPE, INVALID_VALUE, fail
from pydet.frameworks import type_index
from pydet.hooks import unknown
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    call_handler,
    continued,
    kernel_name,
    operands_of,
    program,
    static,
    to_array,
)
from pydet.ops import Arithmetic, Granularity
from pydet.protocols import TYPES, UNSCALED
from pydet.shapes import GROUP, RULES, SCALED, SCALES, Operand, text


@program
def scaled_gemm(
    a: Array,
    b: Array,
    *,
    a_scale: Array | None,
    b_scale: Array | None,
    bias: Array | None = None,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """The product of fp8 matrices that have scales: :func:`pydet.scaled_gemm`. It has no gradient.

    Args:
        a: ``[..., M, K]``, float8_e4m3fn or float8_e5m2.
        b: ``[..., K, N]``, either type. XLA brings it with k adjacent, which costs nothing under jit where it is the
            transpose of an array ``[..., N, K]``. On a GPU K is to be a multiple of 16.
        a_scale, b_scale: as in :func:`pydet.scaled_gemm`; None for 1.
        bias: ``[N]`` or ``[..., M, N]``.
        out_dtype: that of the result; bfloat16 by default, float32 under ``accumulate``.
        accumulate, kernel: as in :func:`gemm`. Scales are then along k, or None.
        arithmetic, k_chunk: as in :func:`pydet.scaled_gemm`; None is 128.
    """
    op = "scaled_gemm"
    given = [("a", a, SCALED), ("a_scale", a_scale, SCALES), ("b", b, SCALED), ("b_scale", b_scale, SCALES),
             ("bias", bias, UNSCALED)]  # fmt: skip
    arrays = {name: None if x is None else to_array(op, name, x, types) for name, x, types in given}
    shape = RULES.scaled_product(*operands_of(*arrays.items()), k_chunk=k_chunk)
    start, dtype = continued(op, accumulate, shape, out_dtype, "bfloat16")
    number = unknown(static(op, "arithmetic", arithmetic, str, "a name"), op, "arithmetic")
    chunk = GROUP if k_chunk is None else static(op, "k_chunk", k_chunk, operator.index, "None or an integer")
    if chunk < 0 or chunk % 32 or chunk >= 2**63:
        fail(INVALID_VALUE, f"{op}: k_chunk is {chunk}, want 0 or a positive multiple of 32")
    has = {f"has_{name}": arrays[name] is not None for name in ("a_scale", "b_scale", "bias")}
    names = ("a", "b", "a_scale", "b_scale", "bias")
    wanted: list[Any] = [*(arrays[name] for name in names), start]
    wanted[1] = jnp.swapaxes(wanted[1], -1, -2)  # with k adjacent
    operands = [x for x in wanted if x is not None]
    return call_handler(
        op,
        jax.ShapeDtypeStruct(shape, dtype),
        operands,
        {} if start is None else {len(operands) - 1: 0},
        {
            **has,
            "accumulate": start is not None,
            "arithmetic": number,
            "k_chunk": chunk,
            "kernel": kernel_name(op, kernel),
        },
    )


_GRANULARITIES = ("row", "group", "block", "tensor")  # by number


@program
def quantize(
    x: Array,
    *,
    granularity: Granularity = "row",
    dtype: Any = "float8_e4m3fn",
    scale_dtype: Any = "float32",
    power_of_two: bool = False,
    transposed: bool = False,
    scale: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, ...]:
    """Quantisation to fp8: :func:`pydet.quantize`. It has no gradient.

    Args:
        x: ``[..., M, K]``.
        granularity, dtype, scale_dtype, power_of_two, transposed: as in :func:`pydet.quantize`.
        scale: read this one instead of making one.
        kernel: as in :func:`gemm`.

    Returns:
        ``(q, scale)``, or ``(q, scale, q_t, scale_t)``: what :func:`scaled_gemm` takes for a, or transposed for b.
    """
    op = "quantize"
    x = to_array(op, "x", x)
    RULES.read(op, Operand("x", x.shape, x.dtype.name), 2)
    if granularity not in _GRANULARITIES:
        want = f"{', '.join(_GRANULARITIES[:-1])} or {_GRANULARITIES[-1]}"
        fail(INVALID_VALUE, f"{op}: granularity is {granularity!r}, want {want}")
    power_of_two, transposed = (
        static(op, name, value, bool, "True or False")
        for name, value in (("power_of_two", power_of_two), ("transposed", transposed))
    )
    kind, scale_kind = (
        TYPES[type_index(of, op, name)] for of, name in ((dtype, "dtype"), (scale_dtype, "scale_dtype"))
    )
    for name, own, types in (("dtype", kind, SCALED), ("scale_dtype", scale_kind, SCALES)):
        if own not in types:
            fail(INVALID_DTYPE, f"{op}: {name} is {own}, want {types[0]} or {types[1]}")
    if transposed and (scale is not None or granularity not in ("group", "block")):
        fail(INVALID_VALUE, f"{op}: transposed wants groups or blocks, and scales that are found")

    def results(lead: tuple[int, ...], rows: int, depth: int) -> list[Any]:
        groups, blocks = -(-depth // GROUP), -(-rows // GROUP)
        own = {"row": (rows, 1), "group": (rows, groups), "block": (blocks, groups)}
        of_scale = () if granularity == "tensor" else (*lead, *own[granularity])
        return [jax.ShapeDtypeStruct((*lead, rows, depth), kind), jax.ShapeDtypeStruct(of_scale, scale_kind)]

    *lead, m, k = x.shape
    made = results(tuple(lead), m, k) + (results(tuple(lead), k, m) if transposed else [])
    operands = [x]
    if scale is not None:
        operands.append(to_array(op, "scale", scale, SCALES))
        if operands[1].shape != made[1].shape:
            fail(INVALID_SHAPE, f"{op}: scale is {text(operands[1].shape)}, want {text(made[1].shape)}")
        made = made[:1]
    found = call_handler(
        op,
        tuple(made),
        operands,
        {},
        {
            "granularity": _GRANULARITIES.index(granularity),
            "given": scale is not None,
            "transposed": transposed,
            "power_of_two": power_of_two,
            "kernel": kernel_name(op, kernel),
        },
    )
    return (found[0], operands[1]) if scale is not None else tuple(found)
