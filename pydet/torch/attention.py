"""Attention whose bits are a query's own: the same in a prefill, in a decoding step, in any batch, under any padding.

It is the library's attention (NUMERICS.md, "Attention"). Under a mask a query's keys are counted from the first that it
may see. So a query's result does not depend on other queries, on the length of the cache, or on how many keys are
masked before or after its own.

:func:`register_attention` gives it to Transformers as ``attn_implementation="pydet"``.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import torch

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.ops import Arithmetic
from pydet.torch import ops  # noqa: F401 -- registers torch.ops.pydet
from pydet.torch.accumulate import AccumulatingAttention
from pydet.torch.mask import All, Causal, Mask, elements_of, given, say
from pydet.torch.ops.attention import padded
from pydet.torch.ops.register import straight
from pydet.torch.shared import over_batch
from pydet.torch.stock import registered

Tensor: TypeAlias = torch.Tensor
_attention = straight("attention")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    k_chunk: None = None,
) -> Tensor:
    """``softmax(scale q k^T + bias) v`` over the keys that are allowed, with a gradient by q, k, v, sinks and bias.

    Forward is :func:`pydet.attention`. Under a mask a query has the bits of :func:`pydet.attention` of itself alone and
    the keys from the first to the last that it may see: padding, packed documents and windows that a cache cut change
    none. A query with no allowed key gives zeros. Rows of a mask that are ranges of keys (padding on either side,
    packed sequences, a cache with room, windows) are found and computed together, at about the speed of `causal`; for
    that the host reads a mask once while it lives and is not written, but not in a CUDA graph. (Writes that PyTorch
    does not count, through ``.data``, NumPy or a replayed graph, want a new tensor, as ``mask.clone()``.) Other rows
    are computed one by one.

    Backward is :func:`pydet.attention_backward`, in the same arithmetic, and its memory does not grow with Q K. The
    gradients of a sequence by q, k and v have the bits that they have alone: in a batch, behind padding on either side
    (whose rows get a gradient of 0), packed with others under a mask that lets each see no key of another. Under a mask
    whose rows are no such ranges (trees, prefixes, windows over packed sequences) queries are counted from the first of
    the row, keys from the first that any may see. In a CUDA graph a mask has no gradient.

    Args:
        q: ``[B, H, Q, D]``, float32, bfloat16 or float16. Widths that are no multiple of 8 are padded in a copy.
        k: ``[B, G, K, D]`` of the type of q; H is a multiple of G, and H / G heads of q share one of k.
        v: ``[B, G, K, E]`` of the type of q.
        allowed: bool, ``[B or 1, H or 1, Q, K]``: which keys take part; None for all.
        scale: of the scores, from 2^-100 to 2^100.
        softcap: scores become ``softcap tanh(scale q k^T / softcap)``, as in Gemma 2; positive.
        sinks: ``[H]``, any of the three types: for each head the score of one more key, whose value is zero.
        bias: any of the three types, ``[B or 1, H or 1, Q or 1, K or 1]``: added to the scores; -inf: not allowed.
            Beside a mask its rows are computed one by one where they do not begin and end together. Its gradient is
            made of products and sums of its own (``torch.ops.pydet.attention_bias_backward``), in memory for a
            sequence's scores, and is the sum over what the bias is spread over, sequences in order; so micro-batches
            of a bias that all sequences share have other bits than one batch, unless :func:`accumulate_gradients`
            sums it (T5's).
        causal: query i sees no key after ``K - Q + i``; with `allowed` both hold.
        arithmetic: as in :func:`pydet.gemm`.
        kv_chunk: keys of a segment, as in :func:`pydet.attention`.
        k_chunk: refused; the scores are single chains.

    Returns:
        ``[B, H, Q, E]``, of the type of q.

    Raises:
        Error: shapes, types or options that do not fit.
    """
    _refuse_k_chunk("attention", k_chunk)
    how = scale, arithmetic, kv_chunk, sinks, softcap, causal, allowed is not None
    found: Tensor = _attention(q, k, v, allowed, *how, bias)[0]
    return found


def _refuse_k_chunk(what: str, k_chunk: Any) -> None:
    if k_chunk is not None:
        fail(UNSUPPORTED, f"{what}: k_chunk is {k_chunk}, want None; kv_chunk says how many keys are summed apart")


# ---- Transformers ----------------------------------------------------------------------------------------------------


# What Transformers gives an attention beside its operands, and no weight or sum depends on.
_WITHOUT_EFFECT = frozenset(
    (
        *("position_ids", "seq_idx"),  # for flash attention, which has no mask: the mask was made of the positions
        *("max_length_q", "max_length_k"),  # of packed sequences, for the grid of a kernel
        *("use_cache", "cache_position"),  # the cache was written, and read into key and value, before
        "encoder_hidden_states",  # key and value were made of them
        *("num_items_in_batch", "shift_labels"),  # the loss's
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),  # other modules'
        "deterministic",  # of flash attention's backward: pydet's always is
    )
)


def check_dropout(dropout: float) -> None:
    if dropout:
        fail(UNSUPPORTED, f"attention: dropout is {dropout}, want 0 (in the model's config, or model.eval())")


def check_options(options: dict[str, Any]) -> None:
    """Refuses each keyword that would change the result if it were computed, and each that nobody knows."""
    if options.pop("output_attentions", None):
        fail(
            UNSUPPORTED,
            "attention: output_attentions is True, and pydet's attention keeps no weights; want False, or "
            "model.set_attn_implementation('eager') under override_aten()",
        )
    for name, value in options.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            fail(
                UNSUPPORTED,
                f"attention: the model has {name}, which pydet's attention does not take; "
                "model.set_attn_implementation('eager') under override_aten() may",
            )


def _of_scores(mask: Tensor, position_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(allowed, bias) of a mask that is added to scores. What is as low as its type goes is not allowed. Where the rest
    is 0, there is no bias; that is for the whole batch, since a bias of 0 has not the bits of none."""
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        fail(UNSUPPORTED, f"attention: the mask is {mask.dtype}, which is not read in a CUDA graph; want bool")
    allowed = mask > torch.finfo(mask.dtype).min
    if position_bias is not None:
        return allowed, position_bias + mask.masked_fill(~allowed, 0)
    says = [bool(x) for x in (allowed & (mask != 0)).flatten(1).any(1).tolist()]
    if any(says) and not all(says):
        fail(
            UNSUPPORTED,
            f"attention: the additive mask has a bias for sequence {says.index(True)} of the batch and none for "
            f"{says.index(False)}, which would have other bits alone; want a bias for all or for none",
        )
    return allowed, mask if any(says) else None


def _read(mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """The elements of a mask of ours, and False; or None and whether it is the causal one, if that is all it says."""
    if type(mask) is All:
        return None, False
    if type(mask) is Causal and mask.shape[-2:] == (query.shape[2], key.shape[2]):
        return None, True
    return elements_of(mask), False


# Configurations for which a model asked for a mask by which all queries see all keys, and so has none.
_all_see: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _is_causal(module: Any, is_causal: bool | None, query: Tensor, key: Tensor, window: int | None) -> bool:
    """Of a call without a mask. A model that asked for the causal one has it, so all keys are seen, unless the call or
    the module says otherwise, by which sdpa and flash attention go, and eager attention does not; only flash attention
    goes by a window. Refused is what says nothing, and what says that it is causal where the model asked otherwise."""
    if is_causal is not None:
        return is_causal
    said = getattr(module, "is_causal", None)
    matters = query.shape[2] > 1 and key.shape[2] > 1
    what = ""
    if said is None and matters:
        what = "no is_causal"
    elif said and matters and not torch.compiler.is_compiling() and id(getattr(module, "config", None)) in _all_see:
        what = "is_causal True where its model asked for a mask by which all see all"
    elif window is not None and key.shape[2] > window:
        what = f"sliding_window {window}"
    if what:
        fail(
            UNSUPPORTED,
            f"attention: {type(module).__qualname__} has no mask and {what}, by which eager attention, sdpa and flash "
            f"attention do not see the same of {key.shape[2]} keys; want the mask of masking_utils, is_causal in the "
            "call, or a module whose is_causal is False if it sees all",
        )
    return bool(said) and matters


def _check_window(window: Any) -> int:
    if not isinstance(window, int) or window < 1:
        fail(INVALID_VALUE, f"attention: sliding_window is {window}, want a positive number of keys, or None")
    return window


def _near(query: Tensor, key: Tensor, window: Any, causal: bool) -> Tensor:
    """``[1, 1, Q, K]``: the keys that are fewer than `window` from a query's own place, as flash attention counts."""
    window = _check_window(window)
    keys = torch.arange(key.shape[2], device=query.device)
    before = torch.arange(query.shape[2], device=query.device)[:, None] + (key.shape[2] - query.shape[2]) - keys
    return (before < window if causal else before.abs() < window)[None, None]


def _check_packed(ends_q: Tensor | None, ends_k: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The cumulative lengths of flash attention, from 0 on and to the last token."""
    if ends_q is None or ends_k is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        given = f"cu_seq_lens_q is {'none' if ends_q is None else 'there'}, cu_seq_lens_k is "
        given += f"{'none' if ends_k is None else 'there'}, q is {tuple(query.shape)}, k is {tuple(key.shape)}"
        fail(UNSUPPORTED, f"attention: {given}; want both, a batch of 1, and as many keys as queries")
    whole = lambda x: torch.nn.functional.pad(torch.nn.functional.pad(x.int(), (1, 0)), (0, 1), value=query.shape[2])  # noqa: E731
    return whole(ends_q), whole(ends_k)


def _of_one_sequence(ends_q: Tensor, ends_k: Tensor, tokens: int, causal: bool) -> Tensor:
    """``[1, 1, Q, K]``: whether query and key are of one of the sequences that are packed in a row; causal: and the key
    is not behind the query, aligned to the last key of the sequence."""
    places = torch.arange(tokens, dtype=torch.int32, device=ends_q.device)
    of_q, of_k = (torch.searchsorted(ends, places, right=True) - 1 for ends in (ends_q, ends_k))
    together = of_q[:, None] == of_k
    if causal:
        last_q, last_k = (ends[1:][of_q.clamp(max=len(ends) - 2)] for ends in (ends_q, ends_k))
        together &= places - last_k[:, None] <= (places - last_q)[:, None]
    return together[None, None]


# What Transformers' continuous batching gives an attention beside its operands: its cache has read these by then.
_OF_BATCHING = frozenset(("read_index", "write_index", "logits_indices", "logits_processor_args", "logits_to_keep"))
_OF_PAGES = frozenset(("block_table", "k_cache", "v_cache", "max_length_k"))


def _in_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: tuple[Tensor, Tensor],
    table: Tensor,
    ends: Tensor,
    window: int | None,
    how: dict[str, Any],
) -> Tensor:
    """One query for each sequence, ``[1, H, B, D]``, whose key and value are written into its page before. A sequence
    without keys, which fills up a CUDA graph's batch, writes what the first does."""
    lengths = ends[1:] - ends[:-1]
    size, place = cache[0].shape[1], (lengths - 1).clamp(min=0)
    page = table.gather(1, (place // size).long()[:, None])[:, 0]
    row, there = page * size + place % size, lengths > 0
    row = torch.where(there, row, row[:1]).long()
    for pages, new in zip(cache, (k, v), strict=True):
        rows = new[0].transpose(0, 1)
        rows = torch.where(there[:, None, None], rows, rows[:1])
        pages.view(-1, *pages.shape[2:]).index_copy_(0, row, rows)
    first = None if window is None else (lengths - window).clamp(min=0)
    rows = q[0].transpose(0, 1)[:, :, None]
    found: Tensor = torch.ops.pydet.attention_paged(rows, *cache, table, lengths, first_key=first, **how)[0]
    return found[:, :, 0][None]


def _of_batching(
    q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], window: int | None, how: dict[str, Any]
) -> Tensor:
    """A step of Transformers' continuous batching: sequences packed in a row, whose keys of before the cache has put
    ahead of their own, or left in pages."""
    ends_q, ends_k, table = (given.get(x) for x in ("cu_seq_lens_q", "cu_seq_lens_k", "block_table"))
    if q.shape[0] != 1 or not isinstance(ends_q, Tensor) or not isinstance(ends_k, Tensor):
        got = f"q is {tuple(q.shape)}, cu_seq_lens_k is {type(ends_k).__name__}"
        fail(
            UNSUPPORTED,
            f"attention: continuous batching has {got}, want a batch of 1 and tensors of cumulative lengths: the "
            "model's attention must have updated the paged cache",
        )
    if table is not None:
        return _in_pages(q, k, v, (given["k_cache"], given["v_cache"]), table, ends_k, window, how)
    if window is not None and given["max_length_k"] > window:
        return _each_from_its_first(q, k, v, ends_q, ends_k, window, how)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    found: Tensor = torch.ops.pydet.attention_varlen(*rows, ends_q, ends_k, causal=True, **how)[0]
    return found[None]


def _each_from_its_first(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, window: int, how: dict[str, Any]
) -> Tensor:
    """Each query of a pack as a sequence of the keys of its window, counted from the first of them: all keys are one
    page. A token of no sequence gives zeros."""
    width, tokens = v.shape[-1], torch.arange(q.shape[2], dtype=torch.int32, device=q.device)
    q, k, v = padded(q, k, v)
    of = (torch.searchsorted(ends_q, tokens, right=True) - 1).clamp(max=len(ends_q) - 2)
    end = (ends_k[of + 1] - (ends_q[of + 1] - 1 - tokens)).int()
    end = end.masked_fill(tokens >= ends_q[-1], 0)
    lengths: dict[str, Any] = {"first_key": torch.maximum(ends_k[of], end - window).int()}
    lengths["cu_seqlens_q"] = torch.arange(q.shape[2] + 1, dtype=torch.int32, device=q.device)
    cache, table = [x.transpose(1, 2) for x in (k, v)], torch.zeros_like(tokens)[:, None]
    found: Tensor = torch.ops.pydet.attention_paged(q[0].transpose(0, 1), *cache, table, end, **lengths, **how)[0]
    return found[None, ..., :width]


def register_attention(
    name: str = "pydet", *, arithmetic: Arithmetic = "auto", kv_chunk: int = 1024, k_chunk: None = None
) -> None:
    """Registers :func:`attention` with Transformers, for ``model.set_attn_implementation(name)``.

    From then on attention in that model has bits that do not depend on the batch, on padding, or on whether a token
    came in a prefill or was decoded. The mask that a model asks ``transformers.masking_utils`` for says what a query
    sees, whatever ``is_causal`` of its modules is; for a causal prefill without padding it has one element in memory,
    otherwise it is bool, ``[B, 1, Q, K]``. Where a model's own code adds that mask to scores, what is added is that of
    eager attention. Padding on either side and packed sequences (``cu_seq_lens_q`` and ``cu_seq_lens_k``, or
    ``position_ids`` alone) are computed as sequences of their lengths. Sinks (gpt-oss), soft-capped scores (Gemma 2)
    and windows are taken, and position biases (T5). A mask that is added to scores is read: what is as low as its type
    goes is not allowed, and the rest is a bias, unless all of it is 0. Refused when they are met, with a sentence:
    attention dropout, the chosen keys of sparse attention (``indices`` of DeepSeek-V3.2, ``block_indices`` of
    MiniMax-M3), ``output_attentions``, every keyword that is not known to leave the result alone, a call without a mask
    from a module without ``is_causal``, and code that computes with its mask what may be meant for
    another kind of mask. It knows the paged cache of Transformers' continuous batching, which
    :func:`continuous_batching` has a model use with it.

    Args:
        name: by which Transformers knows it; :func:`convert` counts attention of another name as PyTorch's.
        arithmetic, kv_chunk, k_chunk: as in :func:`attention`.

    Raises:
        Error: Transformers (4.53 or later) is not here.
    """
    _refuse_k_chunk("register_attention", k_chunk)
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as problem:
        fail(UNSUPPORTED, f"register_attention: Transformers 4.53 or later is not here ({problem})")

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        position_bias: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        check_dropout(dropout)
        how: dict[str, Any] = {"scale": query.shape[-1] ** -0.5 if scaling is None else scaling}
        how |= {"sinks": s_aux, "softcap": softcap, "arithmetic": arithmetic, "kv_chunk": kv_chunk}
        if options.get("read_index") is not None:
            if attention_mask is not None or is_causal is False or position_bias is not None:
                what = "a position_bias" if position_bias is not None else "a mask"
                fail(UNSUPPORTED, f"attention: continuous batching has {what}, want causal attention without one")
            batch = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
            batch |= {x: options.get(x) for x in _OF_PAGES}
            check_options({x: value for x, value in options.items() if x not in _OF_PAGES | _OF_BATCHING})
            window = None if sliding_window is None else _check_window(sliding_window)
            return _of_batching(query, key, value, batch, window, how), None
        check_options(options)
        attention_mask, position_bias = (over_batch(x, query.shape[0]) for x in (attention_mask, position_bias))
        # What a model asked for has its window; some give attention a window beside a mask without one, for flash.
        if asked := isinstance(attention_mask, Mask):
            attention_mask, causal = _read(attention_mask, query, key)
        else:
            causal = attention_mask is None and _is_causal(module, is_causal, query, key, sliding_window)
        plain = attention_mask is None and causal and query.shape[2] > 1
        if attention_mask is not None and attention_mask.shape[-1] > key.shape[2]:
            attention_mask = attention_mask[..., : key.shape[2]]
        elif attention_mask is None and not asked and sliding_window is not None and key.shape[2] > sliding_window:
            attention_mask = _near(query, key, sliding_window, causal)
        bias = None if position_bias is None else position_bias[..., : key.shape[2]]
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask, bias = _of_scores(attention_mask, bias)
            attention_mask = attention_mask.expand(-1, -1, query.shape[2], key.shape[2])
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            ends = _check_packed(cu_seq_lens_q, cu_seq_lens_k, query, key)
            if attention_mask is None and bias is None:
                rows = [x[0].transpose(0, 1) for x in (query, key, value)]
                found: Tensor = torch.ops.pydet.attention_varlen(*rows, *ends, causal=causal, **how)[0]
                return found[None], None
            together = _of_one_sequence(*ends, query.shape[2], plain)
            attention_mask = together if attention_mask is None else attention_mask.masked_fill(~together, False)
            plain = False
        if s_aux is not None and hasattr(s_aux, "pydet_accumulates") and torch.is_grad_enabled():
            if bias is not None:
                fail(UNSUPPORTED, "attention: sinks that accumulate beside a bias; want one of the two")
            more = how["scale"], softcap, plain, arithmetic, kv_chunk
            y = AccumulatingAttention.apply(query, key, value, attention_mask, s_aux, *more)
        else:
            y = attention(query, key, value, attention_mask, causal=plain, bias=bias, **how)
        return y.transpose(1, 2).contiguous(), None

    def mask(*arguments: Any, **options: Any) -> Tensor | None:
        # Without padding, a causal mask says nothing that `causal` does not where there are as many keys as queries, or
        # one query behind a cache that grows (of a cache with room Transformers asks for the mask).
        shape: list[Any] = [options.get(x) for x in ("batch_size", "q_length", "kv_length")]
        short = not arguments and options.get("attention_mask") is None and None not in shape
        short = short and (shape[1] == shape[2] or shape[1] == 1)
        options["allow_is_causal_skip"] = short and options.get("allow_is_causal_skip", True)
        elements: Tensor | None = sdpa_mask(*arguments, **options)
        if elements is not None:
            return given(elements)
        batch, queries, keys = shape
        if not options["allow_is_causal_skip"]:
            if not torch.compiler.is_compiling() and (config := options.get("config")) is not None:
                _all_see[id(config)] = config
            return None
        return say(All if queries == 1 else Causal, (batch, 1, queries, keys), options.get("device", "cpu"))

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    registered[name] = arithmetic, kv_chunk
