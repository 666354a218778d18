"""SGLang's attention over its pool of tokens' keys and values, on :func:`pydet.attention_paged`.

A token of the pool is a page of one token: SGLang's table of a request's tokens is the table of its pages. A token's
attention has the bits that it has in :func:`pydet.torch.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from pydet._native import UNSUPPORTED, fail
from pydet.plugins import Settings
from pydet.torch.serving import Step, attend

Tensor = torch.Tensor
MARK = "pydet_took"  # an attribute of SGLang's RadixAttention in a model that was taken


def obstacle(layer: Any) -> str | None:
    """What of an attention layer pydet does not compute."""
    size = layer.qk_head_dim
    checks = (
        (layer.attn_type != AttentionType.DECODER, f"it is of the type {getattr(layer.attn_type, 'value', '')}"),
        (layer.is_cross_attention, "it is cross attention, or sees keys behind it"),
        (layer.v_head_dim != size, f"its values have {layer.v_head_dim} elements and its keys {size}"),
        (size % 8 != 0 or size > 256, f"it has heads of size {size}, want a multiple of 8 up to 256"),
        (layer.quant_method is not None, "its keys are quantised"),
        (layer.pos_encoding_mode != "NONE", f"it encodes positions ({layer.pos_encoding_mode})"),
        (layer.logit_cap and layer.logit_capping_method != "tanh", f"it caps scores by {layer.logit_capping_method}"),
        (layer.xai_temperature_len > 0, "it has a temperature of its own for long sequences"),
        (layer.use_irope, "it is chunked (iRoPE)"),
    )
    return next((why for wrong, why in checks if wrong), None)


class Backend(AttentionBackend):
    """SGLang knows it by the name pydet. :func:`pydet.sglang.engine.install` gives it its settings."""

    settings: Settings = Settings()

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if type(pool) is not MHATokenToKVPool:
            fail(
                UNSUPPORTED,
                f"pydet.sglang: keys lie in a {type(pool).__name__}, want a MHATokenToKVPool (for models with windows "
                "disable_hybrid_swa_memory=True)",
            )
        if pool.dtype != runner.dtype or pool.store_dtype != runner.dtype:
            fail(
                UNSUPPORTED,
                f"pydet.sglang: keys are kept as {pool.store_dtype} in a model of {runner.dtype}, want one type",
            )
        self.pool, self.table = pool, runner.req_to_token_pool.req_to_token

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the step's :class:`~pydet.torch.serving.Step`."""
        given, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        if given.spec_info is not None or mode.is_target_verify():
            fail(UNSUPPORTED, "pydet.sglang: a step is one of speculative decoding, want none")
        if given.encoder_lens is not None:
            fail(UNSUPPORTED, "pydet.sglang: a step has an encoder's tokens, want a decoder's alone")
        lengths, device = given.seq_lens.int(), given.seq_lens.device
        if mode.is_decode():
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
            tokens = len(lengths)
        else:
            counts = given.extend_seq_lens
            starts = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0)).int()
            tokens = sum(given.extend_seq_lens_cpu) if given.extend_seq_lens_cpu is not None else int(starts[-1])
        whole = given.seq_lens if given.seq_lens_cpu is None else given.seq_lens_cpu
        longest = int(whole.max())
        pages = self.table[given.req_pool_indices.long(), :longest].int()
        self.forward_metadata = Step(tokens, starts, lengths, pages, longest, True)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        pydet_window: int | None = None,
        pydet_softcap: float | None = None,
        **options: Any,
    ) -> Tensor:
        unknown = next((name for name, value in options.items() if value is not None), None)
        if unknown is not None:
            fail(UNSUPPORTED, f"pydet.sglang: attention is given {unknown}, which pydet's does not take")
        if not getattr(layer, MARK, False):
            fail(UNSUPPORTED, f"pydet.sglang: attention of layer {layer.layer_id} is of a model that was not taken")
        step: Step = self.forward_metadata  # type: ignore[assignment]
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        elif k is not None:
            fail(UNSUPPORTED, "pydet.sglang: attention is of keys that are not to be kept, want them in the pool")
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.zeros_like(heads) if len(heads) > step.tokens else torch.empty_like(heads)
        window = pydet_window
        if window is None and layer.sliding_window_size > -1:
            window = layer.sliding_window_size + 1  # SGLang does not count the token itself
        attend(
            "pydet.sglang",
            step,
            heads,
            self.pool.get_key_buffer(layer.layer_id).unsqueeze(1),
            self.pool.get_value_buffer(layer.layer_id).unsqueeze(1),
            scale=layer.scaling,
            softcap=pydet_softcap or layer.logit_cap or None,
            sinks=sinks,
            window=window,
            settings=self.settings,
            out=out,
        )
        return out.view(len(heads), -1)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return False
