"""Attention of models that count a bias from each key's distance (ALiBi) in code of their own, on pydet's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pydet.ops import Arithmetic
from pydet.torch.attention import attention, check_dropout
from pydet.torch.ops.register import Tensor
from pydet.torch.stock import Derived


class MptAttention(Derived, torch.nn.Module):
    """That of MPT in Transformers, whose bias is ``slope (j - i)`` of a query i and a key j.

    MPT counts the distance from the last of all keys, which a softmax does not see and its roundings do: a decoded
    token would have other bits than in a prefill. Here it is counted from the last key that the query sees.
    """

    if TYPE_CHECKING:
        arithmetic: Arithmetic
        Wqkv: torch.nn.Module
        out_proj: torch.nn.Module
        clip_qkv: float | None
        n_heads: int
        head_dim: int
        softmax_scale: float
        attn_dropout_p: float
        layer_idx: int

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        check_dropout(self.attn_dropout_p if self.training else 0.0)
        batch, queries = hidden_states.shape[:2]
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        heads = (batch, queries, self.n_heads, self.head_dim)
        q, k, v = (x.reshape(heads).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        cache = more.get("past_key_values") if cache is None else cache
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        keys = torch.arange(k.shape[2], device=q.device)
        if attention_mask is None:
            allowed = (keys <= keys[-queries:, None])[None, None]
        else:
            allowed = attention_mask[..., : len(keys)].logical_not()
        last = torch.where(allowed, keys, 0).amax(-1, keepdim=True)
        slopes = -position_bias[:, 0, -2] if position_bias.shape[-1] > 1 else position_bias[:, 0, 0]
        bias = slopes.float()[:, None, None] * (keys - last)
        y = attention(q, k, v, allowed, scale=self.softmax_scale, bias=bias, arithmetic=self.arithmetic)
        return self.out_proj(y.transpose(1, 2).reshape(batch, queries, -1)), None
