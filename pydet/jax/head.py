"""The head of a language model: log-probabilities under a linear layer without the logits in memory, and gradients."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pydet import _native
from pydet._native import INVALID_DTYPE, INVALID_VALUE, constants, fail, ffi
from pydet.frameworks import type_index
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    Options,
    call_handler,
    compiled,
    name_of,
    operands_of,
    options_of,
    static,
    to_array,
    whole_numbers,
)
from pydet.jax.products import Layout, product
from pydet.ops import Arithmetic
from pydet.ops.head import HEAD_WORKSPACE
from pydet.protocols import TYPES
from pydet.shapes import RULES, text

_OP = "linear_log_prob"
_DTYPES = {
    "float32": (constants.PYDET_FLOAT, 32, 1),
    "bfloat16": (constants.PYDET_BFLOAT, 16, 1),
    "float16": (constants.PYDET_FLOAT, 16, 1),
}


_PLAIN = {"softcap": 0.0, "temperature": 0.0, "has_entropy": 0, "has_lse": 0, "has_mean": 0}


class _How(NamedTuple):
    """What is static of a call."""

    arithmetic: int
    k_chunk: int
    wide_logits: bool
    workspace: int


def _bytes(x: Array, w: Array, backward: bool, most: int, how: _How) -> int:
    library = _native.load(constants.PYDET_EXCHANGE_CPU)
    options, found = ffi.new("pydet_linear_log_prob_options *"), ffi.new("uint64_t *")
    options.struct_size = ffi.sizeof(options[0])
    options.arithmetic, options.k_chunk = how.arithmetic, how.k_chunk
    if how.wide_logits:
        options.logits = _DTYPES["float32"]
    rows, dtype = math.prod(x.shape[:-1]), ffi.new("pydet_dtype *", _DTYPES[name_of(x.dtype)])[0]
    asked = rows, w.shape[0], w.shape[1], dtype, int(backward), most, options, found
    library.check(library.lib.pydet_linear_log_prob_workspace(*asked))
    return int(found[0])


def _room(x: Array, w: Array, backward: bool, how: _How) -> Any:
    size = min(_bytes(x, w, backward, how.workspace, how), how.workspace)
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _attributes(bias: Array | None, how: _How) -> dict[str, Any]:
    asked = {"arithmetic": how.arithmetic, "k_chunk": how.k_chunk, "wide_logits": how.wide_logits}
    return {**asked, **_PLAIN, "has_bias": bias is not None}


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _head(x: Array, w: Array, index: Array, bias: Array | None, how: _How) -> Array:
    results = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32), _room(x, w, False, how)
    operands = [x, w, index] if bias is None else [x, w, index, bias]
    return call_handler(_OP, results, operands, {}, _attributes(bias, how))[0]


def _forward(x: Array, w: Array, index: Array, bias: Array | None, how: _How) -> tuple[Array, Any]:
    return _head(x, w, index, bias, how), (x, w, index, bias)


def _rounded(sums: Array, dtype: Any, how: _How) -> Array:
    """Sums that are done, in the type of their parameter: the bias of an empty product, which is rounded once."""
    if dtype == jnp.float32:
        return sums
    rows = sums[None] if sums.ndim == 1 else sums
    left, right = jnp.zeros((rows.shape[0], 0), dtype), jnp.zeros((0, rows.shape[1]), dtype)
    made = product(left, right, rows, None, name_of(dtype), Layout(), Options(how.arithmetic))
    return made.reshape(sums.shape)


def _backward(how: _How, saved: Any, dlog_prob: Array) -> tuple[Array | None, ...]:
    x, w, index, bias = saved
    whole = _bytes(x, w, True, 2**62, how) <= how.workspace  # then sums are rounded where they are made
    parameters = [w] if bias is None else [w, bias]
    sums = [jax.ShapeDtypeStruct(p.shape, p.dtype if whole else jnp.float32) for p in parameters]
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), *sums, _room(x, w, True, how)
    operands = [dlog_prob, x, w, index] if bias is None else [dlog_prob, x, w, index, bias]
    dx, dw, *rest = call_handler(f"{_OP}_backward", results, operands, {}, _attributes(bias, how))
    dbias = None if bias is None else rest[0] if whole else _rounded(rest[0], bias.dtype, how)
    return dx, dw if whole else _rounded(dw, w.dtype, how), None, dbias


_head.defvjp(_forward, _backward)
_run_head = compiled(4)(_head)


def linear_log_prob(
    x: Array,
    w: Array,
    index: Array,
    bias: Array | None = None,
    *,
    logits_dtype: Any = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = HEAD_WORKSPACE,
) -> Array:
    """``log_prob(linear(x, w, bias), index)`` without the logits in memory: :func:`pydet.linear_log_prob`.

    Backward makes the logits again, some rows at a time. Cross entropy is its negative; a row that is to be ignored has
    an index of -1, and its NaN is left out of the sum.

    Args:
        x: ``[..., K]``.
        w: ``[N, K]``, of the type of ``x``.
        index: ``[...]``, int32 or int64; a number that is no column gives NaN, and zeros in the gradients.
        bias: ``[N]``.
        logits_dtype: the type that logits are rounded to: that of ``x`` by default, or float32.
        workspace: bytes that the logits of some rows may take. It decides no bits.

    Returns:
        ``[...]``, float32.
    """
    x, w = to_array(_OP, "x", x), to_array(_OP, "w", w)
    added = None if bias is None else to_array(_OP, "bias", bias)
    RULES.skinny_product(_OP, *operands_of(("x", x), ("w", w), ("bias", added)))
    if not w.shape[0]:
        fail(INVALID_SHAPE, f"{_OP}: w is {text(w.shape)}, want a row or more")
    if added is not None and added.ndim != 1:
        fail(INVALID_SHAPE, f"{_OP}: bias is {text(added.shape)}, want {w.shape[0]}")
    index = whole_numbers(_OP, "index", index, x.shape[:-1])
    logits = name_of(x.dtype) if logits_dtype is None else TYPES[type_index(logits_dtype, _OP, "logits_dtype")]
    if logits not in ("float32", name_of(x.dtype)):
        fail(INVALID_DTYPE, f"{_OP}: logits_dtype is {logits}, want float32, or {name_of(x.dtype)} as x is")
    size = static(_OP, "workspace", workspace, operator.index, "a positive number of bytes")
    if size <= 0:
        fail(INVALID_VALUE, f"{_OP}: workspace is {size}, want a positive number of bytes")
    asked = options_of(_OP, arithmetic, k_chunk)
    how = _How(asked.arithmetic, asked.k_chunk, logits != name_of(x.dtype), size)
    return _run_head(x, w, index, added, how)
