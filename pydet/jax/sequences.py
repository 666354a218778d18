"""Attention of sequences behind each other, with gradients, and of keys in pages."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.jax.attention import options_of, workspace_of
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    call_handler,
    compiled,
    name_of,
    program,
    static,
    to_array,
    to_kind,
)
from pydet.ops import Arithmetic
from pydet.ops.attention import Window
from pydet.shapes import RULES, Operand, text


class _Beside(NamedTuple):
    """The operands beside q, k and v, each an array or None."""

    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    block_table: Array | None = None
    seqlens_k: Array | None = None
    first_key: Array | None = None
    sinks: Array | None = None
    allowed: Array | None = None
    bias: Array | None = None


def _told(options: Any, *without: str) -> dict[str, Any]:
    return {name: x for name, x in options._asdict().items() if name not in ("tokens_first", *without)}


def _room(name: str, q: Array, k: Array, v: Array, beside: _Beside, options: Any, kernel: str) -> jax.ShapeDtypeStruct:
    packed = beside.cu_seqlens_q is not None
    table = beside.block_table
    sequences = beside.cu_seqlens_q.shape[0] - 1 if beside.cu_seqlens_q is not None else q.shape[0]
    heads, queries = (q.shape[1], q.shape[0]) if packed else (q.shape[1], q.shape[2])
    groups, keys = (k.shape[1], k.shape[0]) if table is None else (k.shape[2], k.shape[1] * table.shape[1])
    extents = (sequences, heads, groups, queries, keys, q.shape[-1], v.shape[-1])
    return jax.ShapeDtypeStruct((workspace_of(name, extents, options, kernel, packed),), jnp.uint8)


def _call(q: Array, k: Array, v: Array, beside: _Beside, options: Any) -> tuple[Array, Array]:
    """(out, lse): 0 and -inf of tokens that are in no sequence."""
    out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)
    has = {f"has_{name}": x is not None for name, x in beside._asdict().items()}
    given = [q, k, v, *(x for x in beside if x is not None)]
    begun = [jnp.zeros(out.shape, out.dtype), jnp.full(lse.shape, -jnp.inf, jnp.float32)]
    results = (out, lse, _room("attention", q, k, v, beside, options, options.kernel))
    aliases = {len(given): 0, len(given) + 1: 1}
    out, lse, _ = call_handler("attention_stored", results, [*given, *begun], aliases, {**has, **_told(options)})
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _varlen(
    q: Array, k: Array, v: Array, ends_q: Array, ends_k: Array, sinks: Array | None, options: Any
) -> tuple[Array, Array]:
    return _call(q, k, v, _Beside(ends_q, ends_k, sinks=sinks), options)


def _varlen_forward(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, sinks: Any, options: Any) -> Any:
    q, k, v, ends_q, ends_k, sinks = (None if x is None else x.value for x in (q, k, v, ends_q, ends_k, sinks))
    out, lse = _call(q, k, v, _Beside(ends_q, ends_k, sinks=sinks), options)
    return (out, lse), (q, k, v, out, lse, ends_q, ends_k, sinks)


def _varlen_backward(options: Any, saved: Any, gradients: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, out, lse, ends_q, ends_k, sinks = saved
    dout, dlse = gradients
    if not isinstance(dlse, SymbolicZero):
        fail(UNSUPPORTED, "attention_varlen: no gradient of lse")
    dout = jnp.zeros(out.shape, out.dtype) if isinstance(dout, SymbolicZero) else dout
    given = [dout, q, k, v, out, lse, ends_q, ends_k, *([] if sinks is None else [sinks])]
    begun = [jnp.zeros(x.shape, x.dtype) for x in (q, k, v)]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, sinks) if x is not None]
    room = _room("attention_backward", q, k, v, _Beside(ends_q), options, "")
    dq, dk, dv, *dsinks, _ = call_handler(
        "attention_varlen_backward",
        (*like, room),
        [*given, *begun],
        {len(given) + i: i for i in range(3)},
        {"has_sinks": sinks is not None, **_told(options, "kv_chunk", "kernel"), "kernel": ""},
    )
    return dq, dk, dv, None, None, dsinks[0] if dsinks else None


_varlen.defvjp(_varlen_forward, _varlen_backward, symbolic_zeros=True)
_run_varlen = compiled(6)(_varlen)


@compiled(11)
def _run_paged(*given: Any) -> tuple[Array, Array]:
    q, k, v, *beside, options = given
    pairs = [None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape) for x in beside[6:]]
    return _call(q, k, v, _Beside(*beside[:6], *pairs), options)


def _check_heads(op: str, heads: int, groups: int, d: int, k: Array, e: int) -> None:
    if groups == 0 or heads % groups:
        fail(INVALID_SHAPE, f"{op}: q has {heads} heads, want a multiple of the {groups} of k and v")
    if k.shape[-1] != d:
        fail(INVALID_SHAPE, f"{op}: k is {text(k.shape)}, want heads of {d} elements as q's")
    if not all(8 <= x <= 256 and x % 8 == 0 for x in (d, e)) and (d, e) != (576, 512):
        got = f"heads of q and k have {d} elements and those of v {e}"
        fail(INVALID_SHAPE, f"{op}: {got}, want multiples of 8 from 8 to 256, or 576 and 512")


def _read(op: str, given: tuple[tuple[str, Any, int, str], ...]) -> list[Array]:
    """q, k and v, of one type and so many dimensions."""
    found = []
    for name, x, rank, want in given:
        x = to_array(op, name, x)
        if x.ndim != rank:
            fail(INVALID_SHAPE, f"{op}: {name} is {text(x.shape)}, want {want}")
        found.append(x)
    for (name, *_), x in zip(given[1:], found[1:], strict=True):
        RULES.same_type(
            op, Operand("q", found[0].shape, name_of(found[0].dtype)), Operand(name, x.shape, name_of(x.dtype))
        )
    if found[2].shape[:-1] != found[1].shape[:-1]:
        like = (*found[1].shape[:-1], found[2].shape[-1])
        fail(INVALID_SHAPE, f"{op}: {given[2][0]} is {text(found[2].shape)}, want {text(like)}")
    return found


def _integers(op: str, name: str, x: Any, shape: tuple[int, ...] | int) -> Array:
    """Of int32, and of a shape, or of so many dimensions, the first of 1 or more."""
    x = to_kind(op, name, x, "int32")
    if isinstance(shape, int):
        if x.ndim != shape:
            fail(INVALID_SHAPE, f"{op}: {name} has {x.ndim} dimensions, want {shape}")
    elif x.shape != shape:
        fail(INVALID_SHAPE, f"{op}: {name} is {text(x.shape)}, want {text(shape)}")
    return x


def _ends(op: str, name: str, x: Any) -> Array:
    if x is None:
        fail(INVALID_VALUE, f"{op}: {name} is None, want cumulative lengths")
    x = _integers(op, name, x, 1)
    if x.shape[0] < 1:
        fail(INVALID_SHAPE, f"{op}: {name} is 0, want 1 or more: the sequences and 1")
    return x


@program
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`attention` of packed sequences: :func:`pydet.attention_varlen` with gradients by q, k, v and sinks.

    A sequence has the bits that it has alone, in its gradients too. Under vmap problems are made one by one.

    Args:
        q: ``[T, H, D]``, the tokens of all sequences behind each other.
        k, v: ``[U, G, D]`` and ``[U, G, E]``, likewise, of the type of ``q``.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]``, int32: cumulative lengths; they may be traced.
        scale, causal, window, softcap, sinks, arithmetic, kv_chunk, kernel: as in :func:`attention`.
        return_lse: also return lse, ``[T, H]`` in float32, which has no gradient.

    Returns:
        ``[T, H, E]``; with ``return_lse`` ``(out, lse)``. Tokens that are in no sequence have 0 and -inf.
    """
    op = "attention_varlen"
    q, k, v = _read(op, (("q", q, 3, "TxHxD"), ("k", k, 3, "UxGxD"), ("v", v, 3, "UxGxE")))
    ends_q, ends_k = _ends(op, "cu_seqlens_q", cu_seqlens_q), _ends(op, "cu_seqlens_k", cu_seqlens_k)
    if ends_k.shape != ends_q.shape:
        fail(INVALID_SHAPE, f"{op}: cu_seqlens_k is {text(ends_k.shape)}, want {text(ends_q.shape)} as cu_seqlens_q")
    _check_heads(op, q.shape[1], k.shape[1], q.shape[2], k, v.shape[2])
    sinks = _sinks(op, sinks, q.shape[1])
    options = options_of(scale, softcap, causal, window, arithmetic, kv_chunk, kernel, op)
    return_lse = static(op, "return_lse", return_lse, bool, "True or False")
    out, lse = _run_varlen(q, k, v, ends_q, ends_k, sinks, options)
    return (out, lse) if return_lse else out


def _sinks(op: str, sinks: Any, heads: int) -> Array | None:
    if sinks is None:
        return None
    sinks = to_array(op, "sinks", sinks)
    if sinks.shape != (heads,):
        fail(INVALID_SHAPE, f"{op}: sinks is {text(sinks.shape)}, want {heads}")
    return sinks


@program
def attention_paged(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seqlens_k: Array,
    cu_seqlens_q: Array | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    allowed: Array | None = None,
    bias: Array | None = None,
    first_key: Array | None = None,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`attention` of keys and values that lie in pages: :func:`pydet.attention_paged`. It has no gradient.

    The page size S, any from 1, and the places of pages decide no bit. Under vmap problems are made one by one.

    Args:
        q: ``[B, H, Q, D]``, or ``[T, H, D]`` with ``cu_seqlens_q``.
        k_cache, v_cache: ``[P, S, G, D]`` and ``[P, S, G, E]``, of the type of ``q``.
        block_table: ``[B, N]``, int32: key j of sequence s is in page ``block_table[s, j // S]``. A number that is no
            page is the nearest that is one.
        seqlens_k: ``[B]``, int32: the keys of each sequence, the queries' own among them.
        cu_seqlens_q: ``[B + 1]``, int32: cumulative lengths of packed queries. These integers may be traced.
        causal: true here unless it is said otherwise.
        allowed, bias: broadcasting to ``[B, H, Q, N S]``; not with ``cu_seqlens_q``.
        scale, window, softcap, sinks, first_key, arithmetic, kv_chunk, kernel: as in :func:`attention`.
        return_lse: also return lse, like ``q`` without its last dimension, in float32.

    Returns:
        Like ``q`` with E elements; with ``return_lse`` ``(out, lse)``. Tokens that are in no sequence have 0 and -inf.
    """
    op, packed = "attention_paged", cu_seqlens_q is not None
    q, k, v = _read(
        op,
        (
            ("q", q, 3 if packed else 4, "TxHxD, since cu_seqlens_q is given" if packed else "BxHxQxD"),
            ("k_cache", k_cache, 4, "PxSxGxD, pages of S keys"),
            ("v_cache", v_cache, 4, "PxSxGxE, pages of S keys"),
        ),
    )
    for name, x in (("block_table", block_table), ("seqlens_k", seqlens_k)):
        if x is None:
            fail(
                INVALID_VALUE,
                f"{op}: {name} is None, want {'the pages' if x is block_table else 'the keys'} of each sequence",
            )
    ends = _ends(op, "cu_seqlens_q", cu_seqlens_q) if packed else None
    sequences = q.shape[0] if ends is None else ends.shape[0] - 1
    table = _integers(op, "block_table", block_table, 2)
    if table.shape[0] != sequences:
        fail(INVALID_SHAPE, f"{op}: block_table is {text(table.shape)}, want {sequences} rows, one a sequence")
    lengths = _integers(op, "seqlens_k", seqlens_k, (sequences,))
    first = None if first_key is None else _integers(op, "first_key", first_key, (sequences,))
    _check_heads(op, q.shape[1], k.shape[2], q.shape[-1], k, v.shape[3])
    pairs: list[Array | None] = []
    for name, pair in (("allowed", allowed), ("bias", bias)):
        if pair is None:
            pairs.append(None)
            continue
        if packed:
            fail(UNSUPPORTED, f"{op}: {name} is given with cu_seqlens_q, want one of them")
        pair = to_kind(op, name, pair, "bool") if name == "allowed" else to_array(op, name, pair)
        full = (*q.shape[:3], table.shape[1] * k.shape[1])
        if pair.ndim > 4 or RULES.broadcast(pair.shape, full) != full:
            fail(INVALID_SHAPE, f"{op}: {name} is {text(pair.shape)}, want one that broadcasts to {text(full)}")
        pairs.append(pair)
    beside = _Beside(ends, None, table, lengths, first, _sinks(op, sinks, q.shape[1]), *pairs)
    options = options_of(scale, softcap, causal, window, arithmetic, kv_chunk, kernel, op)
    return_lse = static(op, "return_lse", return_lse, bool, "True or False")
    out, lse = _run_paged(q, k, v, *beside, options)
    return (out, lse) if return_lse else out
