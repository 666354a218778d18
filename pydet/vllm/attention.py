"""vLLM's attention over its paged cache, on :func:`pydet.attention_paged`.

A token's attention has the bits that it has in :func:`pydet.torch.attention`: of its own keys alone, counted from the
first that it may see. Under a window each token has a first key of its own, and is a sequence of one query.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from pydet._native import UNSUPPORTED, fail
from pydet.plugins import Settings
from pydet.torch.serving import Step, attend

Tensor = torch.Tensor
MARK = "pydet_took"  # an attribute of vLLM's Attention layers in a model that was taken


class Builder(AttentionMetadataBuilder[Step]):
    """Makes a step's :class:`~pydet.torch.serving.Step`. Its tensors are vLLM's own, which a graph reads again."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        if not all(getattr(layers[name], MARK, False) for name in layer_names):
            fail(
                UNSUPPORTED,
                f"pydet.vllm: load_format is {vllm_config.load_config.load_format!r}, whose loader makes models in a "
                "way of its own, which pydet does not reach; want 'auto' or 'safetensors'",
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        given = common_attn_metadata
        if not isinstance(given.causal, bool):
            fail(UNSUPPORTED, "pydet.vllm: some sequences of a step are causal and some are not; want all or none")
        return Step(
            given.num_actual_tokens,
            given.query_start_loc[: given.num_reqs + 1],
            given.seq_lens[: given.num_reqs],
            given.block_table_tensor[: given.num_reqs],
            given.max_seq_len,
            given.causal,
        )


class Impl(AttentionImpl[Step]):
    """A layer's attention. :func:`pydet.vllm.engine.take` gives it its settings."""

    settings: Settings

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        def refuse(what: str, got: Any, want: str) -> None:
            fail(UNSUPPORTED, f"pydet.vllm: an attention layer has {what} {got}, want {want}")

        if alibi_slopes is not None:
            refuse("ALiBi slopes", alibi_slopes, "none")
        if attn_type != AttentionType.DECODER:
            refuse("the type", getattr(attn_type, "value", attn_type), "decoder")
        if kv_sharing_target_layer_name is not None:
            refuse("its keys from", kv_sharing_target_layer_name, "its own")
        if head_size % 8 or head_size > 256:
            refuse("heads of size", head_size, "a multiple of 8 up to 256")
        for name, value in others.items():
            if value not in (None, False, -1):
                refuse(f"the option {name} =", value, "none that pydet does not know")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.softcap = float(scale), logits_soft_cap or None
        self.window, self.kv_cache_dtype, self.sinks = sliding_window, kv_cache_dtype, sinks

    def _halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [pages, tokens of a page, heads, elements], of vLLM's [pages, heads, tokens, both]."""
        cache = kv_cache.transpose(1, 2)
        return cache[..., : self.head_size], cache[..., self.head_size :]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Copies a step's keys and values into their pages."""
        keys, values = self._halves(kv_cache)
        if key.is_cuda:  # padded slots are -1 there, and the host does not look
            from vllm._custom_ops import reshape_and_cache_flash

            scales = layer._k_scale, layer._v_scale
            reshape_and_cache_flash(key, value, keys, values, slot_mapping, "auto", *scales)
            return
        page, place = slot_mapping // keys.shape[1], slot_mapping % keys.shape[1]
        tokens = len(slot_mapping)
        keys[page, place], values[page, place] = key[:tokens], value[:tokens]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            fail(UNSUPPORTED, "pydet.vllm: attention's result is to be quantised, want it in its own type")
        if attn_metadata is None:  # a step to measure memory, of no sequences
            return output.zero_()
        attend(
            "pydet.vllm",
            attn_metadata,
            query,
            *self._halves(kv_cache),
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            window=self.window,
            settings=self.settings,
            out=output,
        )
        return output


class Backend(AttentionBackend):
    """On a GPU vLLM knows it by the name CUSTOM."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "float32"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """What vLLM 0.32 gives to all, and 0.26 asks for."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class CpuBackend(Backend):
    """On a CPU vLLM has one backend for all that is not MLA, and pydet's has its name."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"
