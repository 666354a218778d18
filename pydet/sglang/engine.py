"""What of SGLang becomes pydet's: the modules of a model as it is made, attention, and the sampler."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels import fused_op
from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers import activation, layernorm, linear, sampler
from sglang.srt.layers import vocab_parallel_embedding as embedding
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader import loader
from sglang.srt.runtime_context import attention_backends, get_server_args
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pydet._native import UNSUPPORTED, fail
from pydet.ops.activation import Kind
from pydet.plugins import Settings
from pydet.sglang import sampling
from pydet.sglang.attention import MARK, Backend, obstacle
from pydet.torch import functions, rotary
from pydet.torch.attention import check_dropout, check_options
from pydet.torch.conversion import Conversion
from pydet.torch.serving import SCALES, complete, gate, refuse

Tensor = torch.Tensor
Module = torch.nn.Module
log = logging.getLogger("sglang.pydet")


# ---- Layers ----------------------------------------------------------------------------------------------------------


class LinearMethod(unquant.UnquantizedLinearMethod):
    """The product of a layer without quantisation; its weight stays as it was loaded, on a CPU too."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def process_weights_after_loading(self, layer: Module) -> None:
        pass

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _product(self.settings, layer, x, bias)

    def apply_with_addend(self, layer: Module, x: Tensor, addend: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.apply(layer, x, bias).add_(addend)

    def apply_into(self, layer: Module, x: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        return output.copy_(self.apply(layer, x, bias))


def _product(settings: Settings, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    how = settings.arithmetic, settings.k_chunk
    return functions.linear(x, layer.weight, bias, arithmetic=how[0], k_chunk=how[1])


def _head(
    settings: Settings, x: Tensor, lm_head: Any, embedding_bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    return _product(settings, lm_head, x.to(lm_head.weight.dtype), embedding_bias)


def _rms_norm(
    module: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
    *,
    offset: float = 0.0,
) -> Any:
    if post_residual_addition is not None or quant_linear is not None:
        fail(UNSUPPORTED, "pydet.sglang: a norm is fused with an addition or a quantisation behind it, want it alone")
    weight = module.weight if getattr(module, "has_weight", True) else None
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return functions.rms_norm(x, weight, eps=eps, weight_offset=offset, residual=residual)


def _layer_norm(module: Any, x: Tensor) -> Any:
    weight = module.weight if module.elementwise_affine else None
    bias = module.bias if module.use_bias else None
    return functions.layer_norm(x, weight, bias, eps=module.variance_epsilon)


def _rotate(
    module: Any, positions: Tensor, query: Tensor, key: Tensor, offsets: Any = None, fused_set_kv_buffer_arg: Any = None
) -> Any:
    """The steps of Transformers, each rounded: ``x cos + rotate_half(x) sin``."""
    if fused_set_kv_buffer_arg is not None:
        fail(UNSUPPORTED, "pydet.sglang: a rotary embedding is fused with the copy into the pool, want it alone")
    module._match_cos_sin_cache_dtype(query)
    return module.forward_native(positions, query, key, offsets)


def _written(method: Callable[..., Any]) -> Callable[..., Any]:
    """With cosines and sines by the written formula."""

    @functools.wraps(method)
    def by_the_formula(*arguments: Any, **options: Any) -> Any:
        with rotary.Written():
            return method(*arguments, **options)

    return by_the_formula


_GATES: dict[type, Callable[[Any], tuple[Kind, bool]]] = {
    activation.SiluAndMul: lambda _: ("silu", True),
    activation.GeluAndMul: lambda module: ("gelu_tanh" if module.approximate == "tanh" else "gelu", True),
}
_ACTIVATIONS: dict[type, Kind] = {activation.NewGELU: "gelu_tanh", activation.QuickGELU: "quick_gelu"}
_NORMS = {layernorm.RMSNorm: 0.0, layernorm.GemmaRMSNorm: 1.0, layernorm.Gemma3RMSNorm: 1.0}
_ROTARY = (RotaryEmbedding, Llama3RotaryEmbedding)
_EXACT = (activation.ReLU2,)  # steps that each are rounded once
_PARTS = ("DualGemm", "DenseSiluAndMulQuant", "PPMissingLayer", "Pooler")  # which compute nothing on a CPU
_NATIVE = ("LlamaForCausalLM", "Qwen3ForCausalLM")  # compared with Transformers' models
_LINEAR = (linear.ReplicatedLinear, linear.ColumnParallelLinear, linear.RowParallelLinear)


def _kind(module: Any) -> Any:
    """Its class; of a module that SGLang's model of Transformers made, the class that it derives from."""
    kind: Any = type(module)
    local = kind.__module__.endswith(".models.transformers") and "<locals>" in kind.__qualname__
    return kind.__mro__[1] if local else kind


def _operation(module: Any, kind: type) -> Callable[..., Any] | str | None:
    """What takes the place of a fused operation's forward, or why nothing does; None of what is none of these."""
    if kind in _NORMS:
        if getattr(module, "variance_size_override", None) is not None:
            return "it normalises by a part of a row"
        if getattr(module, "fp32_residual", False) or getattr(module, "override_orig_dtype", None) is not None:
            return "its residual or its result is of a type of its own"
        return functools.partial(_rms_norm, module, offset=_NORMS[kind])
    if kind is layernorm.LayerNorm:
        return functools.partial(_layer_norm, module)
    if kind in _GATES:
        return functools.partial(gate, *_GATES[kind](module))
    if kind in _ACTIVATIONS:
        return functools.partial(functions.activation, kind=_ACTIVATIONS[kind])
    if kind in _ROTARY:
        # as the converted model's, which PyTorch's own miss by a bit here and there
        module.cos_sin_cache = _written(module._compute_cos_sin_cache)().to(module.cos_sin_cache)
        module._ensure_cos_sin_cache_length = _written(module._ensure_cos_sin_cache_length)
        return functools.partial(_rotate, module)
    return None


def _takes(module: Any, settings: Settings) -> bool | str | None:
    """Makes a module of SGLang pydet's and says so; or why it cannot, or None of a module that is none of SGLang's."""
    kind = _kind(module)
    if isinstance(module, linear.LinearBase):
        if type(module.quant_method) is not unquant.UnquantizedLinearMethod:
            return f"its weight is quantised ({type(module.quant_method).__qualname__})"
        if not any(kind.forward is x.forward for x in _LINEAR):
            return "it has a forward of its own"
        module.quant_method = LinearMethod(settings)
        return True
    if isinstance(module, embedding.VocabParallelEmbedding):
        if type(module.quant_method) is not embedding.UnquantizedEmbeddingMethod:
            return f"its weight is quantised ({type(module.quant_method).__qualname__})"
        return True  # rows are copied; the product of a head is the logits processor's
    if isinstance(module, LogitsProcessor):
        return _logits(module, settings)
    if isinstance(module, RadixAttention):
        return _attention(module)
    found = _operation(module, kind)
    if isinstance(found, str):
        return found
    if found is not None:
        module._forward_method = found
        return True
    if kind in _EXACT:
        return True
    own = kind.__module__.startswith("sglang.") and (
        isinstance(module, fused_op.BaseFusedOp) or ".models." not in kind.__module__
    )
    return "pydet has no counterpart" if own else None


def _attention(module: Any) -> bool | str:
    why = obstacle(module)
    if why is None:
        setattr(module, MARK, True)
    return why or True


def _logits(module: Any, settings: Settings) -> bool | str:
    if module.final_logit_softcapping:
        return f"it caps logits at {module.final_logit_softcapping}"
    if module.logit_scale not in (None, 1.0):
        return f"it scales logits by {module.logit_scale}"
    if module.use_fp32_lm_head or module.use_fp32_lm_head_output:
        return "its head is float32 in a model of another type"
    module._compute_lm_head = functools.partial(_head, settings)
    module.input_logprob_processor.enable_fast_input_logprobs = False
    forward = module.forward

    @functools.wraps(forward)
    def by_pydet(*arguments: Any, **options: Any) -> Any:
        with sampling.Probabilities():
            return forward(*arguments, **options)

    module.forward = by_pydet
    return True


# ---- Models ----------------------------------------------------------------------------------------------------------


def _of_transformers(
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
    attention_instances: Any = None,
    forward_batch: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a model of Transformers in SGLang, which takes what the model asks for. SGLang's own drops windows
    that Transformers' configurations do not tell layer by layer, caps and sinks."""
    check_dropout(dropout)
    check_options(options)
    if is_causal is False:
        fail(UNSUPPORTED, "pydet.sglang: attention is not causal, want a decoder")
    layer = attention_instances[module.layer_idx]
    if scaling is not None:
        layer.scaling = float(scaling)
    rows = [x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value)]
    layer.sliding_window_size = -1  # what the model says counts
    given = {"sinks": s_aux, "pydet_window": sliding_window, "pydet_softcap": softcap}
    return layer(*rows, forward_batch=forward_batch, **given), None


def check(config: Any) -> None:
    """Refuses a server's arguments under which something other than pydet would decide bits.

    Raises:
        Error: which, and what is wanted.
    """
    given, text = resolved_view(get_server_args()), config.hf_config.get_text_config()
    types = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    own = types.get(config.dtype, "none of pydet's types")
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = [x.get("rope_type") for x in (ropes.values() if "rope_type" not in ropes else [ropes]) if x]
    dynamic = next((x for x in kinds if x in ("dynamic", "longrope")), None)
    scaled = next((x for x in SCALES if getattr(text, x, None) not in (None, 1)), None)
    kind = type_of(config)
    native = not kind.__module__.endswith(".models.transformers")
    windows = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    forced = fused_op.get_fused_op_backend()
    graphs = [x for x in ("decode", "prefill") if _graph(x)]
    checks: tuple[tuple[bool, str, str], ...] = (
        (own not in types.values(), f"the model is {config.dtype}", "float32, bfloat16 or float16"),
        (not config.is_generation, "the model is none that generates", "one that does"),
        (config.quantization is not None, f"the model is quantised ({config.quantization})", "its own type"),
        (
            given.kv_cache_dtype not in ("auto", own),
            f"kv_cache_dtype is {given.kv_cache_dtype!r}",
            f"'auto' or {own!r}",
        ),
        (bool(given.enable_lora or given.lora_paths), "LoRA is enabled, whose products are SGLang's", "merged weights"),
        (given.speculative_algorithm is not None, "speculative decoding is enabled", "none"),
        (given.tp_size > 1, f"tp_size is {given.tp_size}, whose sums over ranks are SGLang's", "1"),
        (given.enable_dp_attention, "attention is cut over ranks (enable_dp_attention)", "whole"),
        (
            any(x != "pydet" for x in attention_backends()),
            f"the attention backends are {' and '.join(str(x) for x in dict.fromkeys(attention_backends()))}",
            "attention_backend='pydet'",
        ),
        (bool(graphs), f"graphs of {' and '.join(graphs)} would be captured", "disable_cuda_graph=True"),
        (bool(given.enable_torch_compile), "the model would be compiled", "enable_torch_compile=False"),
        (
            given.rl_on_policy_target is not None,
            f"rl_on_policy_target is {given.rl_on_policy_target!r}, under which SGLang rounds as that trainer",
            "None",
        ),
        (forced is not None, f"SGLANG_FORCE_FUSED_OP_BACKEND is {getattr(forced, 'value', forced)}", "it unset"),
        (
            native and given.device != "cpu",
            f"the model is SGLang's own on {given.device}, whose fused kernels pass its layers by",
            "model_impl='transformers'",
        ),
        (
            native and kind.__name__ not in _NATIVE,
            f"SGLang's own {kind.__name__} was not compared with Transformers' (its Gemma differs)",
            f"model_impl='transformers' or one of {', '.join(_NATIVE)}",
        ),
        (
            native and windows is not None,
            f"the model has a sliding_window of {windows}, which SGLang's own {kind.__name__} may leave out",
            "model_impl='transformers'",
        ),
        (scaled is not None, f"the model scales its logits ({scaled}), which SGLang does in another way", "plain ones"),
        (dynamic is not None, f"the rotary embedding is {dynamic!r}, which looks at the longest of a batch", "another"),
    )
    refuse("pydet.sglang", checks)


def type_of(config: Any) -> type:
    """The class of model that SGLang makes."""
    kind: type = loader.get_model_architecture(config)[0]
    return kind


def _graph(phase: str) -> bool:
    from sglang.srt.model_executor.cuda_graph_config import Backend as Graphs
    from sglang.srt.model_executor.cuda_graph_config import Phase, check_cuda_graph_backend

    return resolved_view(get_server_args()).device != "cpu" and not check_cuda_graph_backend(
        Phase(phase), Graphs.DISABLED
    )


def take(model: Any, config: Any, settings: Settings) -> Conversion:
    """Makes the modules of a model that SGLang made pydet's, before its weights are loaded.

    SGLang's own are taken by their classes; what else there is, as in a model of Transformers, by
    :func:`pydet.torch.convert`.

    Returns:
        What was taken and what was left, and why.

    Raises:
        Error: the server's arguments do not allow it, or something would be left and the settings are strict.
    """
    check(config)
    report, skipped = Conversion(), set()
    layers = getattr(model, "attention_instances", None)
    named = dict(model.named_modules(remove_duplicate=False))  # a head may be the embedding itself
    if isinstance(layers, dict):  # of a model of Transformers; no modules of the model's
        named |= {f"attention_instances.{i}": x for i, x in layers.items()}
        ALL_ATTENTION_FUNCTIONS["sglang"] = _of_transformers
    found: dict[Any, bool | str | None] = {}
    for name, module in named.items():
        if type(module).__name__ in _PARTS:
            skipped.add(name)
            continue
        took = found[module] = found[module] if module in found else _takes(module, settings)
        if took is True:
            report.swapped[name] = type(module).__qualname__
        elif took:
            report.left[name] = f"{type(module).__qualname__}: {took}"

    def calls_attention(module: Module) -> bool:
        own = getattr(getattr(module, "config", None), "_attn_implementation", None)
        return own == "sglang" or any(getattr(x, MARK, False) for x in module.modules())

    return complete("pydet.sglang", model, report, skipped, settings, calls_attention, log)


def install(settings: Settings) -> None:
    """Has SGLang ask pydet as it makes models, in this process; again with other settings: for the models after."""
    Backend.settings = settings
    make = loader._initialize_model
    if hasattr(make, "pydet_settings"):
        make.pydet_settings = settings
        return
    attention_registry.register_attention_backend("pydet")(Backend)
    choices.add_attention_backend_choices(["pydet"])
    choices.add_deterministic_attention_backend_choices(["pydet"])
    sampling.install()

    @functools.wraps(make)
    def initialize_model(model_config: Any, *arguments: Any, **options: Any) -> Any:
        model = make(model_config, *arguments, **options)
        take(model, model_config, initialize_model.pydet_settings)  # type: ignore[attr-defined]
        return model

    initialize_model.pydet_settings = settings  # type: ignore[attr-defined]
    loader._initialize_model = initialize_model
    before = ModelRunner.init_attention_backends

    @functools.wraps(before)
    def init_attention_backends(self: Any) -> None:
        before(self)
        if type(self.sampler) is not sampler.Sampler:
            fail(UNSUPPORTED, f"pydet.sglang: the sampler is {type(self.sampler).__name__}, want SGLang's own")
        for found in (self.attn_backend, self.decode_attn_backend):
            if found is not None and type(found) is not Backend:
                fail(UNSUPPORTED, f"pydet.sglang: attention is {type(found).__name__}'s, want pydet's alone")

    ModelRunner.init_attention_backends = init_attention_backends
