"""Attention, forward: dense, packed and paged keys."""

from __future__ import annotations

from typing import Any

from pydet._native import INVALID_VALUE, fail
from pydet.hooks import methods, on_stream
from pydet.ops.types import Arithmetic, Stream, Tensor
from pydet.protocols import type_name

(_attention,) = methods(("attention",))
Window = tuple[int | None, int | None]


def _sides(window: Any) -> tuple[int | None, int | None]:
    """The two sides of a window."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        what = repr(window) if isinstance(window, (int, tuple, list)) else type_name(window)
        fail(INVALID_VALUE, f"attention: window is {what}, want a pair (left, right), None on a side for any")
    return window[0], window[1]


def _call(q: Any, k: Any, v: Any, given: dict[str, Any], *operands: str) -> Any:
    """given: the arguments of the function, by name; operands: those of q, k and v, which the method takes by place."""
    options = {name: x for name, x in given.items() if name not in ("q", *operands, "window", "stream")}
    options["window_left"], options["window_right"] = _sides(given["window"])
    stream = given["stream"]
    method = _attention if stream is None else on_stream(_attention, q, stream)
    return method(q, k, v, **options)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    allowed: Any = None,
    bias: Any = None,
    first_key: Any = None,
    seqlens_k: Any = None,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    out: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Any:
    """Attention: ``out[i] = sum_j p_j v[j] / sum_j p_j``, ``p_j = exp(scale q[i] . k[j])``, over keys j that i may see.

    A query's result is a function of its own row of ``q`` and of its own keys and values, counted from its sequence's
    first key, of the arithmetic and of ``kv_chunk`` (NUMERICS.md, "Attention"): not of other queries, of the batch, of
    where its keys lie (dense, packed, in pages, behind padding), or of threads and kernels. So a decoded token has the
    bits of a prefill's last row, whole, in chunks or as a verified draft.

    With K own keys and Q queries, query i stands at key ``K - Q + i``.

    Args:
        q: ``[B, H, Q, D]``, float32, bfloat16 or float16, elements of a head adjacent; other strides are any.
        k: ``[B, G, K, D]``, of the type of ``q``. H is a multiple of G: head h has the keys of head ``h // (H // G)``.
        v: ``[B, G, K, E]``. D and E are multiples of 8 from 8 to 256, or 576 and 512.
        scale: of the scores, from 2^-100 to 2^100; ``1 / sqrt(D)`` if None.
        causal: a query sees no key after its own place.
        window: ``(left, right)``: a query sees no key further than so many before and after its place; None on a side:
            any.
        softcap: ``softcap * tanh(score / softcap)`` in place of each score, before bias and masks.
        sinks: ``[H]``, any of the three types, contiguous: a score for each query of the head of one more key of
            value 0.
        allowed: bool, broadcasting to ``[B, H, Q, K]``: which keys a query may see, of those that causal and window
            leave. What ``v`` holds at the others does not matter, even NaN.
        bias: any of the three types, broadcasting to ``[B, H, Q, K]``: added to the score. -inf: not allowed.
        first_key: ``[B]``, int32, contiguous, on the device of ``q``: where a sequence's own keys begin; what is before
            is left padding. ``allowed`` and ``bias`` still count from 0.
        seqlens_k: ``[B]``, int32, contiguous, on the device of ``q``: how many of the K keys are there, as in a cache;
            all if None. The rest is not read.
        arithmetic: as in :func:`gemm`; exp2 is the arithmetic's own.
        kv_chunk: keys of a segment, a multiple of 128. Segments are summed apart and joined in order: it changes bits,
            and lets decoding be shared out.
        out: ``[B, H, Q, E]``, of the type of ``q``; made if None.
        return_lse: also return the logarithm of the sum of ``exp(score)``, sinks included.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor; with ``return_lse`` ``(out, lse)``, lse ``[B, H, Q]`` in float32. A query without
        keys has 0 and -inf. A NaN or inf among its scores makes a row NaN.

    Raises:
        Error: shapes, types, strides, devices, memory or options that do not fit. Lengths and places on the device are
            never read by the host: whatever they hold is clamped to what is there.
    """
    given = locals()
    return _call(q, k, v, given, "k", "v")


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    out: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Any:
    """:func:`attention` of packed sequences: sequence s has queries ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]``.

    A sequence has the bits that it has alone.

    Args:
        q: ``[T, H, D]``, the tokens of all sequences behind each other.
        k, v: ``[U, G, D]`` and ``[U, G, E]``, likewise.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]``, int32, contiguous, on the device of ``q``: cumulative lengths, read
            when the work runs.
        scale, causal, window, softcap, sinks, arithmetic, kv_chunk, kernel, stream: as in :func:`attention`.
        out: ``[T, H, E]``; made if None. Tokens that are in no sequence are not written.
        return_lse: also return lse, ``[T, H]`` in float32.

    Returns:
        ``out``, or the new tensor; with ``return_lse`` ``(out, lse)``.

    Raises:
        Error: as :func:`attention`.
    """
    given = locals()
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is None:
            fail(INVALID_VALUE, f"attention: {name} is None, want cumulative lengths")
    return _call(q, k, v, given, "k", "v")


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Any,
    seqlens_k: Any,
    cu_seqlens_q: Any = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    allowed: Any = None,
    bias: Any = None,
    first_key: Any = None,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    out: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Any:
    """:func:`attention` of keys and values that lie in pages: key j of sequence s in ``block_table[s, j // S]``.

    The page size S, any from 1, and the places of pages decide no bit.

    Args:
        q: ``[B, H, Q, D]``, or ``[T, H, D]`` with ``cu_seqlens_q``.
        k_cache, v_cache: ``[P, S, G, D]`` and ``[P, S, G, E]``.
        block_table: ``[B, N]``, int32, each row contiguous, on the device of ``q``. A number that is no page is the
            nearest that is one.
        seqlens_k: ``[B]``, int32: the keys of each sequence, the queries' own among them.
        cu_seqlens_q: ``[B + 1]``, int32: cumulative lengths of packed queries.
        causal: true here unless it is said otherwise.
        allowed, bias: broadcasting to ``[B, H, Q, N S]``; not with ``cu_seqlens_q``.
        scale, window, softcap, sinks, first_key, arithmetic, kv_chunk, kernel, stream: as in :func:`attention`.
        out: like ``q`` with E elements; made if None.
        return_lse: also return lse, like ``q`` without its last dimension, in float32.

    Returns:
        ``out``, or the new tensor; with ``return_lse`` ``(out, lse)``.

    Raises:
        Error: as :func:`attention`.
    """
    given = locals()
    if block_table is None:
        fail(INVALID_VALUE, "attention: block_table is None, want the pages of each sequence")
    return _call(q, k_cache, v_cache, given, "k_cache", "v_cache")
