"""What of verl becomes pydet's, module by module as verl imports them."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pydet._native import UNSUPPORTED, fail
from pydet.plugins import Settings
from pydet.torch import conversion, functions
from pydet.torch.attention import register_attention
from pydet.torch.head import linear_log_prob
from pydet.torch.serving import SCALES, refuse

Tensor = torch.Tensor
log = logging.getLogger("verl.pydet")
ATTENTION = "pydet"  # by which Transformers knows it
_ENGINES = ("fsdp", "fsdp2")


# ---- Functions -------------------------------------------------------------------------------------------------------


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Of each label, by :func:`pydet.torch.log_prob`, in float32."""
    return functions.log_prob(logits, labels)


def _sums(x: Tensor) -> Tensor:
    """Of each row: a product with ones, which has one order of summation, in float32 under autocast too."""
    ones = torch.ones(1, x.shape[-1], dtype=torch.float32, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        return functions.linear(x, ones).squeeze(-1)


def entropy_from_logits(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """``-sum(p log p)`` of each row, in float32."""
    wide = logits.float()
    log_p = functions.log_softmax(wide)
    return -_sums(functions.softmax(wide) * log_p.clamp(min=torch.finfo(torch.float32).min))


def sum_of_squares_from_logits(logits: Tensor) -> Tensor:
    """``sum(p^2)`` of each row, in float32."""
    p = functions.softmax(logits.float())
    return _sums(p * p)


def scaled(logits: Tensor, temperature: Tensor, *, is_unit_temperature: bool) -> Tensor:
    """Logits over the temperature, in float32, as engines divide them. verl's are rounded to the type of the logits."""
    return logits if is_unit_temperature else logits.float() / temperature.clamp(min=1e-8).float()


def _of_torch_functional(module: Any, settings: Settings) -> None:
    module.logprobs_from_logits = logprobs_from_logits
    module.entropy_from_logits = module.entropy_from_logits_with_chunking = entropy_from_logits
    module.calculate_sum_pi_squared_from_logits = sum_of_squares_from_logits


def _of_fused_head(module: Any, settings: Settings) -> None:
    def forward(
        self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        if isinstance(vocab_weights, DTensor):
            fail(
                UNSUPPORTED,
                "pydet.verl: the fused head multiplies a weight that fsdp2 has cut, since it is called without its "
                "module; want use_fused_kernels=False (or a head tied to the embedding)",
            )
        found: tuple[Tensor, Tensor] = linear_log_prob(
            hidden_states,
            vocab_weights,
            input_ids,
            temperature=float(temperature),
            return_entropy=True,
            logits_dtype=hidden_states.dtype,
            arithmetic=settings.arithmetic,
            k_chunk=settings.k_chunk,
        )
        return found

    module.FusedLinearForPPO.forward = forward


# ---- The FSDP engine -------------------------------------------------------------------------------------------------


def check(engine: Any) -> None:
    """Refuses settings of an engine under which something other than pydet would decide bits.

    Raises:
        Error: which, and what is wanted.
    """
    model, how = engine.model_config, engine.engine_config
    text = model.hf_config.get_text_config()
    fused = (model.fused_kernel_options or {}).get("impl_backend") if model.use_fused_kernels else None
    scale = next((x for x in SCALES if getattr(text, x, None) not in (None, 1)), None)
    checks = (
        (
            how.ulysses_sequence_parallel_size > 1,
            f"ulysses_sequence_parallel_size is {how.ulysses_sequence_parallel_size}, whose attention is verl's",
            "1",
        ),
        (
            model.lora_rank > 0,
            "LoRA is enabled, whose products a rollout of merged weights does not have",
            "lora_rank=0",
        ),
        (bool(model.use_liger), "use_liger is on, whose kernels are Liger's", "use_liger=False"),
        (
            model.use_fused_kernels and fused != "torch",
            f"the fused kernels are {fused}'s",
            "impl_backend='torch', which pydet takes over",
        ),
        (
            model.use_fused_kernels and scale is not None,
            f"the model scales its logits ({scale}), which verl's fused head does not",
            "use_fused_kernels=False",
        ),
        (bool((model.tiled_mlp or {}).get("enabled")), "tiled_mlp is enabled", "it off"),
        (bool(engine._qat_enabled), "weights are quantised as they train (qat)", "it off"),
    )
    refuse("pydet.verl", checks)


def take(model: torch.nn.Module, settings: Settings) -> conversion.Conversion:
    """Makes a model of Transformers pydet's, whose attention is, before it is sharded.

    Raises:
        Error: something would be left, and the settings are strict.
    """
    report = conversion.convert(model, arithmetic=settings.arithmetic, k_chunk=settings.k_chunk)
    if report.left or report.attention:
        lines = "\n".join(["pydet.verl: this of the model would be left:", *report.remaining()])
        if settings.strict:
            fail(UNSUPPORTED, f"{lines}\nwant nothing, or strict=0")
        log.warning("%s", lines)
    log.info("pydet.verl: %d modules are pydet's", len(report.swapped))
    return report


def _frequencies(model: torch.nn.Module) -> None:
    """Refuses a rotary embedding whose frequencies were rounded: verl gives all buffers the type of the weights, which
    no engine does."""
    for module in model.modules():
        for name, value in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq") and value.dtype != torch.float32:
                fail(
                    UNSUPPORTED,
                    f"pydet.verl: {type(module).__name__}.{name} was rounded to {value.dtype}, want float32 as in an "
                    "engine: model_dtype='fp32' (mixed_precision.param_dtype says in which type products are)",
                )


def _of_engine(module: Any, settings: Settings) -> None:
    kind = module.FSDPEngine
    if hasattr(kind._build_module, "pydet_settings"):
        kind._build_module.pydet_settings = settings
        return
    module._scale_logits_by_temperature = scaled
    module.logprobs_from_logits = logprobs_from_logits
    build, begin = kind._build_module, kind.__init__

    @functools.wraps(begin)
    def of_engine(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.compute_entropy_from_logits = entropy_from_logits

    @functools.wraps(build)
    def build_module(self: Any) -> Any:
        check(self)
        own: Settings = build_module.pydet_settings  # type: ignore[attr-defined]
        register_attention(ATTENTION, arithmetic=own.arithmetic, kv_chunk=own.kv_chunk)
        self.model_config.hf_config._attn_implementation = ATTENTION  # verl's default needs the flash-attn package
        model = build(self)
        _frequencies(model)
        take(model, own)
        return model

    build_module.pydet_settings = settings  # type: ignore[attr-defined]
    kind._build_module, kind.__init__ = build_module, of_engine


def _of_registry(module: Any, settings: Settings) -> None:
    before = module.EngineRegistry.get_engine_cls.__func__
    if hasattr(before, "pydet"):
        return

    @functools.wraps(before)
    def get_engine_cls(kind: Any, model_type: str, backend: str) -> Any:
        if backend not in _ENGINES:
            fail(UNSUPPORTED, f"pydet.verl: the engine is {backend!r}, want {' or '.join(map(repr, _ENGINES))}")
        return before(kind, model_type, backend)

    get_engine_cls.pydet = True  # type: ignore[attr-defined]
    module.EngineRegistry.get_engine_cls = classmethod(get_engine_cls)


_TAKES: dict[str, Callable[[Any, Settings], None]] = {
    "verl.utils.torch_functional": _of_torch_functional,
    "verl.utils.experimental.torch_functional": _of_fused_head,
    "verl.workers.engine.base": _of_registry,
    "verl.workers.engine.fsdp.transformer_impl": _of_engine,
}


# ---- As verl imports its modules -------------------------------------------------------------------------------------


class _Loader(importlib.abc.Loader):
    def __init__(self, own: Any, then: Callable[[Any], None]) -> None:
        self.own, self.then = own, then

    def create_module(self, spec: Any) -> Any:
        return self.own.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.own.exec_module(module)
        self.then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and has pydet take them when they were run."""

    settings: Settings

    def __init__(self) -> None:
        self.looking: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _TAKES or name in self.looking:
            return None
        self.looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking.discard(name)
        if spec is not None:
            spec.loader = _Loader(spec.loader, lambda module: _TAKES[name](module, self.settings))
        return spec


_finder = _Finder()


def install(settings: Settings) -> None:
    """Takes what verl has imported, and what it will; again with other settings: for the models after."""
    _finder.settings = settings
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name, taken in _TAKES.items():
        module = sys.modules.get(name)
        if module is not None:
            taken(module, settings)
