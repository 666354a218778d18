"""Attention whose bits are a query's own: the same in a prefill, in a decoding step, in any batch, under any padding.

Scores are products of pydet; a weight is ``exp(score - largest)`` by a formula of exactly rounded steps, and exactly 0
where a key is not allowed; the sums over keys, of the weights and of the values times them, are chains of ``ieee``,
which keys of weight 0 do not change wherever they stand. So a query's result does not depend on other queries, on the
length of the cache, or on how many keys are masked before, between or after its own.

:func:`register_attention` gives it to Transformers as ``attn_implementation="pydet"``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from pydet._native import UNSUPPORTED, fail
from pydet.ops import Arithmetic
from pydet.torch import ops  # noqa: F401 -- registers torch.ops.pydet

Tensor: TypeAlias = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    """``softmax(scale q k^T) v`` over the keys that are allowed, with a gradient by q, k, v and sinks.

    The sums over keys are ``ieee`` chains in fp32 on every device; the result is rounded once. A query with no allowed
    key gives zeros. Memory beyond the result: blocks of queries of about 2^20 scores on the CPU and 2^26 on a GPU, and
    v in fp32.

    Args:
        q: ``[B, H, Q, D]``, float32, bfloat16 or float16.
        k: ``[B, G, K, D]`` of the type of q; H is a multiple of G, and H / G heads of q share one of k.
        v: ``[B, G, K, E]`` of the type of q.
        allowed: bool, ``[B or 1, H or 1, Q, K]``: which keys take part; None for all.
        scale: of the scores.
        softcap: scores become ``softcap tanh(scale q k^T / softcap)``, as in Gemma 2; positive. 1 / softcap is rounded
            to fp32, and tanh a formula of exactly rounded steps.
        sinks: ``[H]``, any of the three types: for each head the score of one more key, whose value is zero.
        arithmetic, k_chunk: of the products ``q k^T`` and of their gradient ``dout v^T``, as in :func:`pydet.gemm`.

    Returns:
        ``[B, H, Q, E]``, of the type of q.

    Raises:
        Error: shapes or types that do not fit.
    """
    return torch.ops.pydet.attention(q, k, v, allowed, scale, arithmetic, k_chunk, sinks, softcap)[0]


# ---- Transformers ----------------------------------------------------------------------------------------------------


def register_attention(name: str = "pydet", *, arithmetic: Arithmetic = "auto", k_chunk: int | None = None) -> None:
    """Registers :func:`attention` with Transformers, for ``model.set_attn_implementation(name)``.

    From then on attention in that model has bits that do not depend on the batch, on padding, or on whether a token
    came in a prefill or was decoded. It makes a bool mask ``[B, 1, Q, K]`` in every forward call. Sinks (gpt-oss)
    and soft-capped scores (Gemma 2) are taken; attention dropout and position biases are refused when they are met,
    with a sentence.

    Args:
        name: by which Transformers knows it; :func:`convert` counts attention of another name as PyTorch's.
        arithmetic, k_chunk: as in :func:`attention`.

    Raises:
        Error: Transformers (4.53 or later) is not here.
    """
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
        **options: Any,
    ) -> tuple[Tensor, None]:
        if dropout:
            fail(UNSUPPORTED, f"attention: dropout is {dropout}, want 0 (in the model's config, or model.eval())")
        for option in ("position_bias", "head_mask"):
            if options.get(option) is not None:
                fail(UNSUPPORTED, f"attention: the model has {option}, which pydet's attention does not take")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is None and causal and query.shape[2] > 1:
            shape = (query.shape[2], key.shape[2])
            attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(shape[1] - shape[0])[
                None, None
            ]
        if attention_mask is not None and attention_mask.shape[-1] > key.shape[2]:
            attention_mask = attention_mask[..., : key.shape[2]]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        how: dict[str, Any] = {"sinks": options.get("s_aux"), "softcap": options.get("softcap")}
        how |= {"arithmetic": arithmetic, "k_chunk": k_chunk}
        y = attention(query, key, value, attention_mask, scale=scale, **how)
        return y.transpose(1, 2).contiguous(), None

    def mask(*arguments: Any, **options: Any) -> Tensor | None:
        options |= {"allow_is_causal_skip": False}
        made: Tensor | None = sdpa_mask(*arguments, **options)
        return made

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
