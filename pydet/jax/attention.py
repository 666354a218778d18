"""Attention with gradients: pydet's own, and in the words of jax.nn."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pydet import _native
from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail, ffi
from pydet.hooks import unknown
from pydet.jax.calls import (
    INVALID_SHAPE,
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
    to_kind,
)
from pydet.ops import Arithmetic
from pydet.ops.attention import Window
from pydet.protocols import type_name
from pydet.shapes import RULES, Operand, text

_ANY = -1  # keys on a side of a window


class _Options(NamedTuple):
    """What is static."""

    scale: Real
    softcap: Real
    causal: bool
    window_left: int
    window_right: int
    arithmetic: int
    kv_chunk: int
    kernel: str
    tokens_first: bool = False  # operands are [B, Q, H, D]


class _Beside(NamedTuple):
    """The operands beside q, k and v, each an array or None."""

    sinks: Array | None
    allowed: Array | None
    bias: Array | None
    first_key: Array | None
    seqlens_k: Array | None


def workspace_of(name: str, extents: tuple[Any, ...], options: _Options, kernel: str, packed: bool = False) -> int:
    """Bytes that a kernel can use, of any library here; none where extents are symbols. It decides no bit."""
    if not all(isinstance(x, int) for x in extents):
        return 0
    given, most = ffi.new(f"pydet_{name}_options *"), 0
    text_of_kernel, ends = ffi.new("char[]", kernel.encode()), ffi.new("pydet_tensor *")
    given.struct_size = ffi.sizeof(f"pydet_{name}_options")
    given.arithmetic = options.arithmetic
    if name == "attention":
        given.kv_chunk = options.kv_chunk
    given.kernel = text_of_kernel if kernel else ffi.NULL
    given.cu_seqlens_q = ends if packed else ffi.NULL
    for index in (constants.PYDET_EXCHANGE_CPU, constants.PYDET_EXCHANGE_CUDA, constants.PYDET_EXCHANGE_ROCM):
        library, _ = _native.try_load(index)
        if library is None:
            continue
        size = ffi.new("uint64_t *")
        if getattr(library.lib, f"pydet_{name}_workspace")(*extents, given, size) == constants.PYDET_OK:
            most = max(most, int(size[0]))
    return most


def _workspace(name: str, q: Array, k: Array, v: Array, options: _Options, kernel: str) -> int:
    queries, keys = (x.shape[1 if options.tokens_first else 2] for x in (q, k))
    heads, groups = (x.shape[2 if options.tokens_first else 1] for x in (q, k))
    return workspace_of(name, (q.shape[0], heads, groups, queries, keys, q.shape[3], v.shape[3]), options, kernel)


def _call(q: Array, k: Array, v: Array, beside: _Beside, options: _Options) -> tuple[Array, Array]:
    """(out, lse)"""
    results = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        jax.ShapeDtypeStruct((_workspace("attention", q, k, v, options, options.kernel),), jnp.uint8),
    )
    has = {f"has_{name}": x is not None for name, x in beside._asdict().items()}
    operands = [q, k, v, *(x for x in beside if x is not None)]
    out, lse, _ = call_handler("attention", results, operands, {}, {**has, "has_lse": True, **options._asdict()})
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, beside: _Beside, options: _Options) -> tuple[Array, Array]:
    return _call(q, k, v, beside, options)


def _attend_forward(q: Any, k: Any, v: Any, beside: Any, options: _Options) -> tuple[tuple[Array, Array], Any]:
    if beside.bias is not None and beside.bias.perturbed:
        want = "want a bias that is constant, or jax.lax.stop_gradient(bias)"
        fail(UNSUPPORTED, f"attention: no gradient by bias; {want}")
    q, k, v = q.value, k.value, v.value
    beside = _Beside(*(None if x is None else x.value for x in beside))
    out, lse = _call(q, k, v, beside, options)
    return (out, lse), (q, k, v, out, lse, beside)


def _attend_backward(options: _Options, saved: Any, gradients: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, out, lse, beside = saved
    dout, dlse = gradients
    if not isinstance(dlse, SymbolicZero):
        fail(UNSUPPORTED, "attention: no gradient of lse")
    dout = jnp.zeros(out.shape, out.dtype) if isinstance(dout, SymbolicZero) else dout
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, beside.sinks) if x is not None]
    size = _workspace("attention_backward", q, k, v, options, "")
    has = {f"has_{name}": x is not None for name, x in beside._asdict().items()}
    told = {name: x for name, x in options._asdict().items() if name not in ("kv_chunk", "kernel")}
    dq, dk, dv, *dsinks, _ = call_handler(
        "attention_backward",
        (*like, jax.ShapeDtypeStruct((size,), jnp.uint8)),
        [dout, q, k, v, out, lse, *(x for x in beside if x is not None)],
        {},
        {**has, **told, "kernel": ""},
    )
    return dq, dk, dv, _Beside(dsinks[0] if dsinks else None, None, None, None, None)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@compiled(8)
def _attention(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    allowed: Array | None,
    bias: Array | None,
    first_key: Array | None,
    seqlens_k: Array | None,
    options: _Options,
) -> tuple[Array, Array]:
    allowed, bias = (None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (allowed, bias))
    found: tuple[Array, Array] = _attend(q, k, v, _Beside(sinks, allowed, bias, first_key, seqlens_k), options)
    return found


def _number(op: str, name: str, x: Any, none: str) -> Real:
    """A scale or softcap; 0 for None."""
    if x is None:
        return Real(0)
    x = static(op, name, x, float, "a number")
    if not 2.0**-100 <= x <= 2.0**100:
        fail(INVALID_VALUE, f"{op}: {name} is {x:g}, want a number from 2^-100 to 2^100, or None for {none}")
    return Real(x)


def _keys(op: str, name: str, x: Any) -> int:
    """The side of a window."""
    if x is None:
        return _ANY
    x = static(op, name, x, operator.index, "None or a number of keys")
    if not 0 <= x <= 2**40:
        fail(INVALID_VALUE, f"{op}: {name} is {x}, want 0 to 2^40 keys, or None for any")
    return int(x)


def options_of(
    scale: Any,
    softcap: Any,
    causal: Any,
    window: Any,
    arithmetic: Any,
    kv_chunk: Any,
    kernel: Any,
    op: str = "attention",
) -> _Options:
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2):
        what = repr(window) if isinstance(window, int | tuple | list) else type_name(window)
        fail(INVALID_VALUE, f"{op}: window is {what}, want a pair (left, right), None on a side for any")
    left, right = (None, None) if window is None else window
    chunk = static(op, "kv_chunk", kv_chunk, operator.index, "an integer")
    if chunk <= 0 or chunk % 128 or chunk >= 2**63:
        fail(INVALID_VALUE, f"{op}: kv_chunk is {chunk}, want a positive multiple of 128")
    return _Options(
        _number(op, "scale", scale, "1 / sqrt(D)"),
        _number(op, "softcap", softcap, "none"),
        static(op, "causal", causal, bool, "True or False"),
        _keys(op, "window_left", left),
        _keys(op, "window_right", right),
        unknown(static(op, "arithmetic", arithmetic, str, "a name"), op, "arithmetic"),
        int(chunk),
        kernel_name(op, kernel),
    )


@program
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    allowed: Array | None = None,
    bias: Array | None = None,
    first_key: Array | None = None,
    seqlens_k: Array | None = None,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """``softmax(scale q k^T) v`` over the keys that a query may see: :func:`pydet.attention` with a gradient.

    A query has the bits that it has alone: decoded, in a prefill, in a batch, behind padding. The gradients by q, k, v
    and sinks are those of :func:`pydet.attention_backward`; by a bias there is none.

    Args:
        q: ``[B, H, Q, D]``.
        k, v: ``[B, G, K, D]`` and ``[B, G, K, E]``, of the type of ``q``; H is a multiple of G.
        scale, causal, window, softcap: as in :func:`pydet.attention`.
        sinks: ``[H]``, any of the three types.
        allowed: bool, and bias: any of the three types; both broadcast to ``[B, H, Q, K]``.
        first_key, seqlens_k: ``[B]``, int32; they may be traced.
        arithmetic, kv_chunk: as in :func:`pydet.attention`; they decide bits.
        return_lse: also return lse, ``[B, H, Q]`` in float32, which has no gradient.
        kernel: as in :func:`gemm`.

    Returns:
        ``[B, H, Q, E]``, of the type of ``q``; with ``return_lse`` ``(out, lse)``.
    """
    op = "attention"
    q, k, v = (to_array(op, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    beside = _Beside(
        None if sinks is None else to_array(op, "sinks", sinks),
        None if allowed is None else to_kind(op, "allowed", allowed, "bool"),
        None if bias is None else to_array(op, "bias", bias),
        None if first_key is None else to_kind(op, "first_key", first_key, "int32"),
        None if seqlens_k is None else to_kind(op, "seqlens_k", seqlens_k, "int32"),
    )
    RULES.attention(*operands_of(("q", q), ("k", k), ("v", v), *beside._asdict().items()))
    options = options_of(scale, softcap, causal, window, arithmetic, kv_chunk, kernel)
    return_lse = static(op, "return_lse", return_lse, bool, "True or False")
    out, lse = _attention(q, k, v, *beside, options)
    return (out, lse) if return_lse else out


# ---- jax.nn ----------------------------------------------------------------------------------------------------------


@program
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
) -> Array | tuple[Array, Array]:
    """:func:`attention` as ``jax.nn.dot_product_attention`` has it: a drop-in.

    Query i stands at key i, also where there are more keys or fewer. A query that may see no key gives zeros (there:
    the mean of all values).

    Args:
        query: ``[B, T, N, H]`` or ``[T, N, H]``.
        key, value: ``[B, S, K, H]`` or ``[S, K, H]``, of the type of ``query``; N is a multiple of K.
        bias: any of the three types, and mask: bool; both broadcast to ``[B, N, T, S]``.
        scale: ``1 / sqrt(H)`` if None.
        is_causal: a query sees no key after its own place.
        query_seq_lengths, key_value_seq_lengths: ``[B]``, int32; queries past the end give zeros.
        local_window_size: ``(left, right)``, or one number for both.
        implementation: None: pydet's.
        return_residual: also return the logarithm of the sum of exponentials, ``[B, T, N]`` in float32.
        arithmetic, kv_chunk: as in :func:`attention`.

    Returns:
        Like ``query`` with the last dimension of ``value``; with ``return_residual`` a pair.
    """
    op = "dot_product_attention"
    if implementation is not None:
        fail(UNSUPPORTED, f"{op}: implementation is {implementation!r}, want None: pydet's own")
    q, k, v = (to_array(op, name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim not in (3, 4) or x.ndim != q.ndim:
            want = "BTNH or TNH" if name == "query" else "BSKH" if q.ndim == 4 else "SKH"
            fail(INVALID_SHAPE, f"{op}: {name} is {text(x.shape)}, want {want}")
    is_causal = static(op, "is_causal", is_causal, bool, "True or False")
    left, right = _sides(local_window_size)
    pairs = _Beside(
        None,
        None if mask is None else to_kind(op, "mask", mask, "bool"),
        None if bias is None else to_array(op, "bias", bias),
        None if query_seq_lengths is None else to_kind(op, "query_seq_lengths", query_seq_lengths, "int32"),
        None if key_value_seq_lengths is None else to_kind(op, "key_value_seq_lengths", key_value_seq_lengths, "int32"),
    )
    options = options_of(scale, None, False, (left, 0 if is_causal else right), arithmetic, kv_chunk, None)
    _check_named(op, q, k, v, pairs)
    out, lse = _named_attention(q, k, v, *pairs, options)
    return (out, lse) if static(op, "return_residual", return_residual, bool, "True or False") else out


def _sides(window: Any) -> tuple[int | None, int | None]:
    op, want = "dot_product_attention", "None, a number of keys, or a pair of them"
    if window is None:
        return None, None
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2:
        fail(INVALID_VALUE, f"{op}: local_window_size is {window!r}, want {want}")
    left, right = (static(op, "local_window_size", x, operator.index, want) for x in pair)
    if min(left, right) < 0 or max(left, right) > 2**40:
        fail(INVALID_VALUE, f"{op}: local_window_size is {window!r}, want 0 to 2^40 keys on a side")
    return left, right


def _check_named(op: str, q: Array, k: Array, v: Array, pairs: _Beside) -> None:
    """The rules of attention, for names and places of jax.nn."""
    lead = q.shape[0] if q.ndim == 4 else 1
    (_, t, n, h), (batch, s, groups, own), valued = (x.shape if x.ndim == 4 else (1, *x.shape) for x in (q, k, v))
    for name, x in (("key", k), ("value", v)):
        RULES.same_type(op, Operand("query", q.shape, name_of(q.dtype)), Operand(name, x.shape, name_of(x.dtype)))
    if batch != lead or own != h:
        want = f"{lead}xSxKx{h}" if q.ndim == 4 else f"SxKx{h}"
        fail(INVALID_SHAPE, f"{op}: key is {text(k.shape)}, want {want} beside a query of {text(q.shape)}")
    if valued[:3] != (batch, s, groups):
        fail(INVALID_SHAPE, f"{op}: value is {text(v.shape)}, want {text((*k.shape[:-1], 'H'))}")
    if groups == 0 or n % groups:
        fail(INVALID_SHAPE, f"{op}: query has {n} heads, want a multiple of the {groups} of key and value")
    for name, x in (("mask", pairs.allowed), ("bias", pairs.bias)):
        if x is not None and (x.ndim > 4 or RULES.broadcast(x.shape, (lead, n, t, s)) != (lead, n, t, s)):
            fail(INVALID_SHAPE, f"{op}: {name} is {text(x.shape)}, want one that broadcasts to {text((lead, n, t, s))}")
    for name, x in (("query_seq_lengths", pairs.first_key), ("key_value_seq_lengths", pairs.seqlens_k)):
        if x is not None and x.shape != (lead,):
            fail(INVALID_SHAPE, f"{op}: {name} is {text(x.shape)}, want {lead}")


@compiled(8)
def _named_attention(
    q: Array,
    k: Array,
    v: Array,
    _: None,
    mask: Array | None,
    bias: Array | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    options: _Options,
) -> tuple[Array, Array]:
    """Windows of `options` are those of query i at key i; here of query i at key K - Q + i."""
    given = q.shape
    q, k, v = (x if x.ndim == 4 else x[None] for x in (q, k, v))
    mask, bias = (None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (mask, bias))
    queries, left, right = q.shape[1], options.window_left, options.window_right
    if right != _ANY and queries + right < k.shape[1]:  # no query sees the keys from there on
        seen = queries + right
        k, v = k[:, :seen], v[:, :seen]
        mask, bias = (x if x is None or x.shape[3] == 1 else x[..., :seen] for x in (mask, bias))
    ahead = k.shape[1] - queries
    within = left != _ANY or right != _ANY
    if left != _ANY and left + ahead < 0:
        fail(
            UNSUPPORTED,
            f"dot_product_attention: local_window_size has {left} keys on the left, want {-ahead} or more where there "
            f"are {queries} queries and {k.shape[1]} keys",
        )
    if key_lengths is not None and within:  # which the places of queries would count from
        near = (jnp.arange(k.shape[1]) < key_lengths[:, None])[:, None, None]
        mask, key_lengths = near if mask is None else mask & near, None
    if query_lengths is not None:
        real = (jnp.arange(queries) < query_lengths[:, None])[:, None, :, None]
        mask = real if mask is None else mask & real
    causal = right != _ANY and right == ahead  # which more kernels take than a window
    options = options._replace(
        causal=causal,
        window_left=left if left == _ANY else left + ahead,
        window_right=_ANY if causal or right == _ANY else right - ahead,
        tokens_first=True,
    )
    out, lse = _attend(q, k, v, _Beside(None, mask, bias, None, key_lengths), options)
    return out.reshape(*given[:-1], v.shape[3]), lse.reshape(given[:-1])
