"""A model whose tokens are shared out over the ranks: its layers become those of context parallel ranks."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.ops import Arithmetic
from pydet.torch.attention import check_dropout, check_options
from pydet.torch.distributed.context import METHODS, Layout, Method, check_layout, context_parallel_attention, owners_of
from pydet.torch.distributed.exchange import Group, Tensor, together
from pydet.torch.distributed.rows import rms_norm
from pydet.torch.distributed.symmetric import capturing
from pydet.torch.distributed.tokens import SEGMENTS, context_parallel_embedding, context_parallel_linear, layer_norm
from pydet.torch.modules import Conv1D, Embedding, LayerNorm, Linear, RMSNorm, is_copying_embedding

_OP = "context_parallel"
ATTENTION = "pydet_context_parallel"  # its name in Transformers


class Where(NamedTuple):
    """Among whom the tokens are shared out. Copies of a model share it."""

    group: Group
    layout: Layout
    segments: int
    arithmetic: Arithmetic
    kv_chunk: int
    method: Method = "gather"

    def __deepcopy__(self, memo: Any) -> Where:
        return self

    @property
    def place(self) -> dict[str, Any]:
        return {"group": self.group, "layout": self.layout}

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> Tensor:
        return context_parallel_linear(x, w, bias, segments=self.segments, arithmetic=arithmetic, **self.place)


# ---- Layers ----------------------------------------------------------------------------------------------------------


class ContextLinear(Linear):
    """:class:`pydet.torch.Linear` on :func:`context_parallel_linear`."""

    pydet_context: Where

    def forward(self, x: Tensor) -> Tensor:
        return self.pydet_context.linear(x, self.weight, self.bias, self.arithmetic)


class ContextConv1D(Conv1D):
    """GPT-2's linear layer likewise."""

    pydet_context: Where

    def forward(self, x: Tensor) -> Tensor:
        return self.pydet_context.linear(x, self.weight.t(), self.bias, self.arithmetic)


class ContextRMSNorm(RMSNorm):
    """:class:`pydet.torch.RMSNorm` on :func:`rms_norm`."""

    pydet_context: Where

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight is None:
            return super().forward(x)
        if self.result != "x" and x.dtype != weight.dtype:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        y = rms_norm(x, weight, eps=self.eps, weight_offset=self.weight_offset, **self.pydet_context.place)
        return y.to(weight.dtype) if self.result == "weight" else y


class ContextLayerNorm(LayerNorm):
    """:class:`pydet.torch.LayerNorm` on :func:`layer_norm`."""

    pydet_context: Where

    def forward(self, x: Tensor) -> Tensor:
        if not self.elementwise_affine:
            return super().forward(x)
        return layer_norm(x, self.weight, self.bias, eps=self.eps, **self.pydet_context.place)


class ContextEmbedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` on :func:`context_parallel_embedding`."""

    pydet_context: Where

    def forward(self, ids: Tensor) -> Tensor:
        return context_parallel_embedding(ids, self.weight, padding=self.padding_idx, **self.pydet_context.place)


_KINDS: dict[type, type] = {
    Linear: ContextLinear,
    Conv1D: ContextConv1D,
    RMSNorm: ContextRMSNorm,
    LayerNorm: ContextLayerNorm,
    torch.nn.Embedding: ContextEmbedding,
    Embedding: ContextEmbedding,
}


def _refuse(model: torch.nn.Module) -> None:
    """What would have the gradient of this rank's tokens alone, or other bits."""
    for name, module in model.named_modules():
        place = f"{_OP}: {name or 'the model'}"
        if getattr(module, "accumulates", False):
            fail(
                UNSUPPORTED, f"{place} has accumulate_gradients, whose sums are of this rank's tokens; want it without"
            )
        if getattr(module, "k_chunk", None) is not None:
            fail(UNSUPPORTED, f"{place} has k_chunk {module.k_chunk}, want none; segments cut the tokens")
        known = type(module) in _KINDS or type(module) in _KINDS.values()
        if known and (not isinstance(module, torch.nn.Embedding) or is_copying_embedding(module)):
            continue
        own = [key for key, x in module.named_parameters(recurse=False) if x.requires_grad]
        if own:
            fail(
                UNSUPPORTED,
                f"{place} is {type(module).__qualname__} with {', '.join(own)}, whose gradient would be of this rank's "
                "tokens alone; want pydet's Linear, Conv1D, RMSNorm, LayerNorm (convert() makes them) or an embedding, "
                "or parameters that are not trained",
            )


# ---- Attention -------------------------------------------------------------------------------------------------------


def _attend(
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
    **options: Any,
) -> tuple[Tensor, None]:
    where = getattr(module, "pydet_context", None)
    if not isinstance(where, Where):
        fail(INVALID_VALUE, f"{_OP}: attention of a model that it was not called with; want context_parallel(model)")
    check_dropout(dropout)
    if attention_mask is not None:
        fail(UNSUPPORTED, f"{_OP}: attention has a mask, want none: sequences of one length, without padding")
    check_options(options)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None if sliding_window is None else (sliding_window - 1, 0)
    y = context_parallel_attention(
        query,
        key,
        value,
        causal=causal,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        sinks=s_aux,
        arithmetic=where.arithmetic,
        kv_chunk=where.kv_chunk,
        method=where.method,
        **where.place,
    )
    return y.transpose(1, 2).contiguous(), None


def _no_mask(*arguments: Any, attention_mask: Tensor | None = None, **options: Any) -> None:
    """Where a query stands in its sequence follows from the rank: so there is no mask of this rank's tokens."""
    if attention_mask is not None and not bool(attention_mask.all()):
        fail(UNSUPPORTED, f"{_OP}: tokens are masked, want sequences of one length, without padding")


# ---- What a model is given -------------------------------------------------------------------------------------------


def _own_places(where: Where, count: int, device: torch.device) -> Tensor:
    """``[count]``: where this rank's tokens stand in their sequence."""
    world, rank = dist.get_world_size(where.group), dist.get_rank(where.group)
    owners = owners_of(world, where.layout)
    chunks = torch.arange(count * world, device=device).chunk(len(owners))
    return torch.cat([chunk for chunk, owner in zip(chunks, owners, strict=True) if owner == rank])


def _check_given(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Before a model's forward on several ranks: puts the places of this rank's tokens in, and refuses what would be
    of these tokens alone."""
    where, parameters = model.pydet_context, inspect.signature(model.forward).parameters
    if dist.get_world_size(where.group) == 1:
        return None
    named = dict(zip(parameters, arguments, strict=False)) | options
    ids = named.get("input_ids")
    given = ids if ids is not None else named.get("inputs_embeds")

    def terms() -> tuple[Any, ...]:
        if not isinstance(given, Tensor) or given.dim() < 2:
            fail(
                constants.PYDET_INVALID_SHAPE, f"{_OP}: want input_ids or inputs_embeds, [B, tokens, ...] of this rank"
            )
        if getattr(getattr(model, "config", None), "_attn_implementation", None) != ATTENTION:
            fail(UNSUPPORTED, f"{_OP}: the model's attention was changed after the call, want it left as it is")
        if named.get("labels") is not None:
            fail(
                UNSUPPORTED,
                f"{_OP}: labels are given, and a model shifts them inside of each rank's tokens; want none, and the "
                "loss of this rank's tokens from its logits, with labels that are shifted before shard_context()",
            )
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            fail(UNSUPPORTED, f"{_OP}: tokens are masked, want sequences of one length, without padding")
        count: int = given.shape[1]
        places: Any = named.get("position_ids")
        if count % (len(owners_of(2, where.layout)) // 2):
            fail(constants.PYDET_INVALID_SHAPE, f"{_OP}: {count} tokens on a rank, want an even number in zigzag")
        own = _own_places(where, count, given.device).expand(given.shape[0], -1)
        seen = places is not None and not capturing()
        if seen and (places.shape[-1] != count or not bool((places == own[0]).all())):
            fail(
                UNSUPPORTED,
                f"{_OP}: position_ids are not the places of this rank's tokens, counted from 0 in one sequence that is "
                f"{where.layout}; want shard_context() of them, and no packed sequences",
            )
        return own, f"{count} tokens", where.layout

    device = given.device if isinstance(given, Tensor) else next(model.parameters()).device
    own = together(_OP, where.group, device, terms)[0]
    if named.get("position_ids") is not None or "position_ids" not in parameters:
        return None
    at = list(parameters).index("position_ids")
    if at < len(arguments):  # None, by its place
        return (*arguments[:at], own, *arguments[at + 1 :]), options
    return arguments, options | {"position_ids": own}


def _register_attention() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def context_parallel(
    model: torch.nn.Module,
    *,
    group: Group = None,
    layout: Layout = "zigzag",
    segments: int = SEGMENTS,
    arithmetic: Arithmetic = "auto",
    kv_chunk: int = 1024,
    method: Method = "gather",
) -> None:
    """From now on each rank gives ``model`` its own tokens of every sequence, and has the gradients of all tokens.

    A converted model's linear layers, norms and embeddings become those of this module, and the attention of a model of
    Transformers :func:`context_parallel_attention`. Results of a token, and the gradients of the weights, whole on
    every rank, have the same bits for every number of ranks and either layout. Give it this rank's tokens and their
    places, for each row (a model of Transformers makes the places itself, where it is given none)::

        where = {"group": group, "layout": "zigzag"}
        ids = shard_context(tokens, **where)
        places = shard_context(torch.arange(tokens.shape[1]).expand_as(tokens), **where)
        logits = model(ids, position_ids=places, use_cache=False).logits

    and sum the loss of each rank's tokens; divide by the number of all ranks' tokens before ``backward()``. Gradients
    are the same on every rank, so no reduction follows. A chunk is a multiple of 256 tokens where there are norms.

    Args:
        model: a module that :func:`pydet.torch.convert` was called with; changed in place.
        group, layout: as in :func:`context_parallel_attention`.
        segments: as in :func:`context_parallel_linear`. It decides bits.
        arithmetic, kv_chunk, method: of attention, as in :func:`context_parallel_attention`. Layers keep their own.

    Raises:
        Error: trained parameters that are not in a linear layer, norm or embedding of pydet's, ``k_chunk``, or
            ``accumulate_gradients``; then nothing is changed. In forward, masks, padding and dropout; of a model of
            Transformers on several ranks, on all of them: ``labels``, which it would shift inside of each rank's
            tokens, and ``position_ids`` that are not those of one sequence in this layout (packed ones; a graph that
            is captured does not look). Without ``position_ids`` it has those of this rank's tokens.
    """
    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"{_OP}: model is {type(model).__qualname__}, want a torch.nn.Module")
    check_layout(_OP, layout)
    if method not in METHODS:
        fail(INVALID_VALUE, f"{_OP}: method is {method!r}, want one of {', '.join(METHODS)}")
    _refuse(model)
    where = Where(group, layout, segments, arithmetic, kv_chunk, method)
    config: Any = getattr(model, "config", None)
    of_transformers = hasattr(model, "set_attn_implementation") and hasattr(config, "_attn_implementation")
    if of_transformers:
        _register_attention()
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        if _check_given not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_check_given, with_kwargs=True)
    for module in model.modules():
        taking_part: Any = module
        if type(module) in _KINDS:
            taking_part.__class__ = _KINDS[type(module)]
        taking_part.pydet_context = where
