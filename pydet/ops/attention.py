"""Attention of dense, packed and paged keys, and its gradients."""

from __future__ import annotations

from typing import Any, Literal

from pydet._native import INVALID_VALUE, fail
from pydet.hooks import methods, on_stream
from pydet.ops.types import Arithmetic, Stream, Tensor
from pydet.protocols import type_name

_attention, _backward = methods(("attention", "attention_backward"))
Window = tuple[int | None, int | None]


def _sides(op: str, window: Any) -> tuple[int | None, int | None]:
    """The two sides of a window."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        what = repr(window) if isinstance(window, (int, tuple, list)) else type_name(window)
        fail(INVALID_VALUE, f"{op}: window is {what}, want a pair (left, right), None on a side for any")
    return window[0], window[1]


def _call(q: Any, k: Any, v: Any, given: dict[str, Any], *operands: str) -> Any:
    """given: the arguments of the function, by name; operands: those of q, k and v, which the method takes by place."""
    options = {name: x for name, x in given.items() if name not in ("q", *operands, "window", "stream")}
    options["window_left"], options["window_right"] = _sides("attention", given["window"])
    stream = given["stream"]
    method = _attention if stream is None else on_stream(_attention, q, stream)
    return method(q, k, v, **options)


_PLACES = ("dout", "q", "k", "v", "out", "lse")


def _call_backward(given: dict[str, Any]) -> Any:
    """given: the arguments of the function, by name."""
    options = {name: x for name, x in given.items() if name not in (*_PLACES, "window", "only", "stream")}
    options["window_left"], options["window_right"] = _sides("attention_backward", given["window"])
    only, stream = given["only"], given["stream"]
    if only not in (None, "q", "kv", "sinks"):
        what = repr(only) if isinstance(only, str) else type_name(only)
        fail(INVALID_VALUE, f"attention_backward: only is {what}, want 'q', 'kv', 'sinks' or None")
    for name in {"q": ("dk", "dv"), "kv": ("dq",), "sinks": ("dq", "dk", "dv")}.get(only, ()):
        if given[name] is not None:
            fail(INVALID_VALUE, f"attention_backward: {name} is given with only={only!r}, want none")
    options |= {"without_q": only in ("kv", "sinks"), "without_kv": only in ("q", "sinks")}
    method = _backward if stream is None else on_stream(_backward, given["dout"], stream)
    return method(*(given[name] for name in _PLACES), **options)


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


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Any,
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
    accumulate: bool = False,
    only: Literal["q", "kv", "sinks"] | None = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Any:
    """The gradients of :func:`attention`: dq, dk and dv from ``dout``, that of ``out``.

    A row of dq is a function of its own query and of its own keys and values, a row of dk or dv of its own sequence
    (NUMERICS.md, "Attention, backward"): not of the batch, of where anything lies, or of threads and kernels. Scores
    are made again from q, k and ``lse``, so memory does not grow with Q K. ``kv_chunk`` has no part in it.

    Args:
        dout: ``[B, H, Q, E]``, of the type of ``q``, elements of a head adjacent.
        q, k, v, out, lse: what :func:`attention` took, and gave with ``return_lse``.
        scale, causal, window, softcap, sinks, allowed, bias, first_key, seqlens_k, arithmetic: as they were given to
            :func:`attention`. bias has no gradient here.
        accumulate: dk, dv and dsinks, then given and float32, are continued, not replaced; dq is written. Calls of some
            sequences each, in order, then have the bits of one; and so have calls of some of a sequence's queries each,
            cut at multiples of 128 and in order. (Under causal or a window such a call's keys end where its last query
            stands. With more queries than keys under causal, multiples from the first that sees a key.)
        only: ``"q"``: dq alone is made, ``"kv"``: dk and dv alone, ``"sinks"``: neither; the others are None. dsinks is
            made wherever there are sinks.
        dq, dk, dv: shaped like ``q``, ``k`` and ``v``, each float32 or of their type; made, of their type, if None.
            Elements of a head are adjacent.
        dsinks: ``[H]``, any of the three types, contiguous; where there are sinks it is made, of their type, if None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(dq, dk, dv)``, or ``(dq, dk, dv, dsinks)`` with sinks. Rows of dk and dv that are no own key of their
        sequence are 0, or kept under ``accumulate``; a query that sees no key has dq 0. A NaN or inf in a row of any
        operand reaches what pairs of it that are allowed reach, and nothing else.

    Raises:
        Error: shapes, types, strides, devices, memory or options that do not fit.
    """
    return _call_backward(locals())


def attention_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    arithmetic: Arithmetic = "auto",
    accumulate: bool = False,
    only: Literal["q", "kv", "sinks"] | None = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Any:
    """The gradients of :func:`attention_varlen`. A sequence has the bits that it has alone.

    Args:
        dout: ``[T, H, E]``, of the type of ``q``, elements of a head adjacent.
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k: what :func:`attention_varlen` took, and gave with ``return_lse``.
        scale, causal, window, softcap, sinks, arithmetic: as they were given to it.
        accumulate, only, dsinks, kernel, stream: as in :func:`attention_backward`. Sums of sinks are over all
            sequences, in order.
        dq, dk, dv: as in :func:`attention_backward`. Tokens that are in no sequence are not written.

    Returns:
        ``(dq, dk, dv)``, or ``(dq, dk, dv, dsinks)`` with sinks.

    Raises:
        Error: as :func:`attention_backward`.
    """
    given = locals()
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is None:
            fail(INVALID_VALUE, f"attention_backward: {name} is None, want cumulative lengths")
    return _call_backward(given)
