"""What of vLLM becomes pydet's: the modules of a model as it is made, and the sampler."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers import activation, layernorm, linear, rotary_embedding
from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.models.transformers.fusers import rms_norm as fused_norms
from vllm.platforms import current_platform
from vllm.transformers_utils.config import is_rope_parameters_nested
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from pydet.ops.activation import Kind
from pydet.plugins import Settings
from pydet.torch import functions, rotary
from pydet.torch.conversion import Conversion
from pydet.torch.serving import SCALES, complete, gate, refuse
from pydet.vllm import sampling
from pydet.vllm.attention import MARK, Impl

Tensor = torch.Tensor
Module = torch.nn.Module
log = logging.getLogger("vllm.pydet")


# ---- Layers ----------------------------------------------------------------------------------------------------------


class LinearMethod(linear.UnquantizedLinearMethod):
    """The product of a layer without quantisation; its weight stays as it was loaded, on a CPU too."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def process_weights_after_loading(self, layer: Module) -> None:
        pass

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        how = self.settings.arithmetic, self.settings.k_chunk
        return functions.linear(x, layer.weight, bias, arithmetic=how[0], k_chunk=how[1])  # type: ignore[arg-type]


class EmbeddingMethod(embedding.UnquantizedEmbeddingMethod):
    """Rows of an embedding, and the product of a language-model head."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    process_weights_after_loading = LinearMethod.process_weights_after_loading
    apply = LinearMethod.apply


def _rms_norm(module: Any, x: Tensor, residual: Tensor | None = None, *, offset: float = 0.0) -> Any:
    weight = module.weight if getattr(module, "has_weight", True) else None
    return functions.rms_norm(x, weight, eps=module.variance_epsilon, weight_offset=offset, residual=residual)


def _layer_norm(module: Any, x: Tensor) -> Any:
    return functions.layer_norm(x, module.weight, module.bias, eps=module.eps)


def _rotate(module: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The steps of Transformers, each rounded: ``x cos + rotate_half(x) sin``."""
    both: Any = module.forward_static(
        positions,
        query,
        key,
        module.head_size,
        module.rotary_dim,
        module._match_cos_sin_cache_dtype(query),
        module.is_neox_style,
    )
    return both


_GATES: dict[type, Callable[[Any], tuple[Kind, bool]]] = {
    activation.SiluAndMul: lambda _: ("silu", True),
    activation.MulAndSilu: lambda _: ("silu", False),
    activation.GeluAndMul: lambda module: ("gelu_tanh" if module.approximate == "tanh" else "gelu", True),
}
_ACTIVATIONS: dict[type, Kind] = {
    activation.GELU: "gelu",
    activation.GELUTanh: "gelu_tanh",
    activation.NewGELU: "gelu_tanh",
    activation.FastGELU: "gelu_tanh",
    activation.QuickGELU: "quick_gelu",
}
_NORMS = {layernorm.RMSNorm: 0.0, fused_norms.TPAwareRMSNorm: 0.0}
_GEMMA_NORMS = {layernorm.GemmaRMSNorm: 1.0, fused_norms.TPAwareGemmaRMSNorm: 1.0}
_ROTARY = (rotary_embedding.RotaryEmbedding, Llama3RotaryEmbedding)
_PARTS = (ApplyRotaryEmb,)  # of a module above, which does not call them
_EXACT = (activation.ReLUSquaredActivation,)  # steps that each are rounded once
_GRAPHS = ("NONE", "FULL_DECODE_ONLY")  # whole steps, of one token a sequence
_LINEAR = (linear.ReplicatedLinear, linear.ColumnParallelLinear, linear.RowParallelLinear)


def _operation(module: Any) -> Callable[..., Any] | str | None:
    """What takes the place of a CustomOp's forward, or why nothing does; None of a module that is none of these."""
    kind = type(module)
    if kind in _NORMS or kind in _GEMMA_NORMS:
        if getattr(module, "variance_size_override", None) is not None:
            return "it normalises by a part of a row"
        return functools.partial(_rms_norm, module, offset=_NORMS.get(kind, 1.0))
    if kind is layernorm.LayerNorm:
        return functools.partial(_layer_norm, module)
    if kind in _GATES:
        return functools.partial(gate, *_GATES[kind](module))
    if kind in _ACTIVATIONS:
        return functools.partial(functions.activation, kind=_ACTIVATIONS[kind])
    if kind in _ROTARY:
        # As the converted model's, which PyTorch's own miss by a bit here and there, and a GPU's powers do too.
        with torch.device("cpu"), rotary.Written():
            module.cos_sin_cache.copy_(module._compute_cos_sin_cache())
        return functools.partial(_rotate, module)
    return None


def _frequencies(module: Any) -> str | None:
    """Computes those of a rotary embedding of Transformers' on a CPU, as a model is loaded there: a GPU has other
    powers. Or says why it cannot."""
    own = {name: x for name, x in module._buffers.items() if "inv_freq" in name and x is not None}
    if all(x.is_cpu for x in own.values()):
        return None
    try:
        with torch.device("cpu"):
            again = type(module)(module.config)
        for name, x in own.items():
            x.copy_(again._buffers[name])
    except Exception as problem:  # of a class of anyone's
        return f"its frequencies were computed on a GPU and cannot be on a CPU ({type(problem).__name__}: {problem})"
    return None


def _takes(module: Any, settings: Settings, dtype: torch.dtype) -> bool | str | None:
    """Makes a module of vLLM pydet's and says so; or why it cannot, or None of a module that is none of vLLM's."""
    if isinstance(module, linear.LinearBase):
        if type(module.quant_method) is not linear.UnquantizedLinearMethod:
            return f"its weight is quantised ({type(module.quant_method).__qualname__})"
        if not any(type(module).forward is kind.forward for kind in _LINEAR):
            return "it has a forward of its own"
        module.quant_method = LinearMethod(settings)
        return True
    if isinstance(module, embedding.VocabParallelEmbedding):
        if type(module.quant_method) is not embedding.UnquantizedEmbeddingMethod:
            return f"its weight is quantised ({type(module.quant_method).__qualname__})"
        module.quant_method = EmbeddingMethod(settings)
        return True
    if isinstance(module, LogitsProcessor):
        return _logits(module, dtype)
    if isinstance(module, AttentionLayerBase):
        if not isinstance(getattr(module, "impl", None), Impl):
            return f"its attention is {type(getattr(module, 'impl', module)).__qualname__}, want pydet's"
        module.impl.settings = settings
        setattr(module, MARK, True)
        return True
    found = _operation(module)
    if isinstance(found, str):
        return found
    if found is not None:
        module._forward_method = found
        return True
    if isinstance(module, _EXACT):
        return True
    return "pydet has no counterpart" if isinstance(module, CustomOp | PluggableLayer) else None


def _logits(module: Any, dtype: torch.dtype) -> bool | str:
    if module.soft_cap is not None:
        return f"it caps logits at {module.soft_cap}"
    if module.scale != 1.0:
        return f"it scales logits by {module.scale}"
    if module.head_dtype not in (None, dtype):
        return f"its head is {module.head_dtype} in a model of {dtype}"
    return True


# ---- Models ----------------------------------------------------------------------------------------------------------


def _graphs(config: VllmConfig) -> str:
    """What vLLM captures; nothing on a CPU."""
    return str(getattr(config.compilation_config.cudagraph_mode, "name", "NONE"))


def _ropes(text: Any) -> list[str]:
    """Kinds of a model's rotary embeddings; a type of layers may have one of its own."""
    given = getattr(text, "rope_parameters", None) or {}
    return [x["rope_type"] for x in (given.values() if is_rope_parameters_nested(given) else [given]) if x]


def check(config: VllmConfig) -> None:
    """Refuses an engine's settings under which something other than pydet would decide bits.

    Raises:
        Error: which, and what is wanted.
    """
    model, parallel = config.model_config, config.parallel_config
    cache, mode, graphs = config.cache_config.cache_dtype, config.compilation_config.mode, _graphs(config)
    types = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    own = types.get(model.dtype, "none of pydet's types")
    text = model.hf_config.get_text_config()
    dynamic = next((x for x in _ropes(text) if x in ("dynamic", "longrope")), None)
    scaled = next((x for x in SCALES if getattr(text, x, None) not in (None, 1)), None)
    checks: tuple[tuple[bool, str, str], ...] = (
        (own not in types.values(), f"the model is {model.dtype}", "float32, bfloat16 or float16"),
        (model.runner_type != "generate", f"the runner is {model.runner_type!r}", "'generate'"),
        (
            mode != CompilationMode.NONE or not (model.enforce_eager or graphs in _GRAPHS),
            "the model would be compiled, and its steps then rounded elsewhere",
            "enforce_eager=True, or compilation_config={'mode': 0, 'cudagraph_mode': 'FULL_DECODE_ONLY'}",
        ),
        (config.quant_config is not None, f"the model is quantised ({model.quantization})", "weights of its own type"),
        (cache not in ("auto", own), f"kv_cache_dtype is {cache!r}", f"'auto' or {own!r}"),
        (config.lora_config is not None, "LoRA is enabled, whose products are vLLM's", "merged weights"),
        (config.speculative_config is not None, "speculative decoding is enabled, with a sampler of its own", "none"),
        (
            parallel.tensor_parallel_size > 1,
            f"tensor_parallel_size is {parallel.tensor_parallel_size}, whose sums over ranks are vLLM's",
            "1",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "a sequence is cut over ranks, and its attention put together by vLLM",
            "no context parallelism",
        ),
        (
            model.logprobs_mode not in ("raw_logprobs", "raw_logits"),
            f"logprobs_mode is {model.logprobs_mode!r}",
            "'raw_logprobs' or 'raw_logits'",
        ),
        (scaled is not None, f"the model scales its logits ({scaled}), which vLLM does in another way", "plain logits"),
        (model.use_mla, "attention is MLA", "heads with keys and values of their own"),
        (dynamic is not None, f"the rotary embedding is {dynamic!r}, which looks at the longest of a batch", "another"),
        (config.use_v2_model_runner, "the second model runner has a sampler of its own", "VLLM_USE_V2_MODEL_RUNNER=0"),
    )
    refuse("pydet.vllm", checks)


def _calls_attention(apart: bool, module: Module) -> bool:
    """Its attention is a layer of vLLM's that was taken.

    Args:
        apart: such layers are no modules of the model, which finds them by their number (vLLM 0.26's of Transformers).
    """
    by_number = apart and getattr(getattr(module, "config", None), "_attn_implementation", None) == "vllm"
    return by_number or any(getattr(x, MARK, False) for x in module.modules())


def take(model: Module, config: VllmConfig, settings: Settings) -> Conversion:
    """Makes the modules of a model that vLLM made pydet's, before its weights are loaded.

    vLLM's own are taken by their classes; what else there is, as in a model of Transformers, by
    :func:`pydet.torch.convert`.

    Returns:
        What was taken and what was left, and why.

    Raises:
        Error: the engine's settings do not allow it, or something would be left and the settings are strict.
    """
    check(config)
    report, skipped = Conversion(), set()
    named, layers = dict(model.named_modules()), config.compilation_config.static_forward_context
    inside = set(named.values())
    apart = {name: layer for name, layer in layers.items() if layer not in inside}
    for name, module in (named | apart).items():
        if isinstance(module, _PARTS):
            skipped.add(name)
            continue
        took = _takes(module, settings, config.model_config.dtype) or _frequencies(module)
        if took is True:
            report.swapped[name] = type(module).__qualname__
        elif took:
            report.left[name] = f"{type(module).__qualname__}: {took}"
        if apart and not isinstance(module, AttentionLayerBase) and getattr(module, "sinks", None) is not None:
            report.left[name] = f"{type(module).__qualname__}: this vLLM leaves its sinks out"
    calls = functools.partial(_calls_attention, bool(apart))
    return complete("pydet.vllm", model, report, skipped, settings, calls, log)


def install(settings: Settings) -> None:
    """Has vLLM ask pydet as it makes models, in this process; again with other settings: for the models after."""
    register_backend(AttentionBackendEnum.CPU_ATTN, "pydet.vllm.attention.CpuBackend")
    register_backend(AttentionBackendEnum.CUSTOM, "pydet.vllm.attention.Backend")
    sampling.install()
    make = base_loader.initialize_model
    if hasattr(make, "pydet_settings"):
        make.pydet_settings = settings
        return

    @functools.wraps(make)
    def initialize_model(vllm_config: VllmConfig, *arguments: Any, **options: Any) -> Module:
        attention = vllm_config.attention_config
        if attention.backend is None and not current_platform.is_cpu():
            attention.backend = AttentionBackendEnum.CUSTOM
        model = make(vllm_config, *arguments, **options)
        with torch.device("cpu"):  # what is tried on the way; vLLM makes models under its own device
            take(model, vllm_config, initialize_model.pydet_settings)  # type: ignore[attr-defined]
        return model

    initialize_model.pydet_settings = settings  # type: ignore[attr-defined]
    base_loader.initialize_model = initialize_model
