"""Makes the linear layers and norms of a model pydet's, and says what of the model is not."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.hooks import unknown
from pydet.ops import Arithmetic
from pydet.torch import alibi, checking, code, experts, experts_fp8, jetmoe, llama4, scans
from pydet.torch.checking import Check
from pydet.torch.convolutions import Convolution, convolution_class
from pydet.torch.experts_fp8 import Fp8Experts
from pydet.torch.fp8 import Fp8Linear
from pydet.torch.modules import Activation, Conv1D, LayerNorm, Linear, OffsetLayerNorm, RMSNorm
from pydet.torch.ops import DTYPES
from pydet.torch.ops.scaled import FP8, GROUP, groups
from pydet.torch.rotary import Rotary, rotary_class
from pydet.torch.rotations import turning_class
from pydet.torch.stock import PYDET, become, derived, remember

# PyTorch's, on a CPU. Of those that are functions in a model's own code override_aten() takes over the first four.
_BY_PLACE = ("silu", "gelu", "sigmoid", "softplus", "elu", "selu", "celu", "glu", "mish", "exp2", "rsqrt", "pow")
_TRANSFORMERS_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    **dict.fromkeys(("GELUTanh", "PytorchGELUTanh", "NewGELUActivation", "FastGELUActivation"), "gelu_tanh"),
    "AccurateGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
}
# Of Transformers, by file and name: what has a forward of its own, and computes what a class of ours does.
_BY_NAME: dict[tuple[str, str], type] = {
    ("transformers.pytorch_utils", "Conv1D"): Conv1D,
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"): Linear,
    ("transformers.models.nemotron.modeling_nemotron", "NemotronLayerNorm1P"): OffsetLayerNorm,
}
_JETMOE = "transformers.models.jetmoe.modeling_jetmoe"
_LLAMA4 = "transformers.models.llama4.modeling_llama4"
_AHEAD: dict[tuple[str, str], tuple[type, tuple[str, ...]]] = {  # likewise, ahead of its class; what it sums by
    ("transformers.models.mpt.modeling_mpt", "MptAttention"): (alibi.MptAttention, ("arithmetic",)),
    (_JETMOE, "JetMoeParallelExperts"): (jetmoe.ParallelExperts, ("arithmetic", "k_chunk")),
    (_JETMOE, "JetMoeTopKGating"): (jetmoe.TopKGating, ()),
    (_JETMOE, "JetMoeMoE"): (jetmoe.MixtureOfLayers, ()),
    (_JETMOE, "JetMoeMoA"): (jetmoe.MixtureOfAttention, ()),
    (_LLAMA4, "Llama4TextExperts"): (llama4.Experts, ("arithmetic", "k_chunk")),
    (_LLAMA4, "Llama4TextMoe"): (llama4.Mixture, ()),
}
_ROUTERS = {(_LLAMA4, "Llama4Router")}  # beside experts that do not ask which code is to compute them


@dataclass
class Conversion:
    """What :func:`convert` did. ``str()`` of it is a readable report, which ends with a verdict.

    Attributes:
        swapped: the names of the modules that are pydet's now, each with the class it had.
        left: the names of modules that multiply or normalise and are as they were, each with the reason.
        attention: the names of attention modules whose products and softmax are not pydet's, each with what they are.
        seen: what a forward of the sample showed; None where there was none.
        not_asked: the names of parts with attention of their own that ``model.set_attn_implementation("pydet")`` passed
            by: Transformers before 5.20 leaves out a part whose configuration is a copy of the model's (T5's stacks).
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    seen: Check | None = None
    not_asked: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, left {len(self.left)}"]
        lines += [f"  {count} x {kind} -> pydet: {names}" for count, kind, names in _grouped(self.swapped)]
        return "\n".join([*lines, *self.remaining(), self.verdict() if self.seen is None else str(self.seen)])

    def remaining(self) -> list[str]:
        """A line for each reason to leave modules, and for each kind of attention that is not pydet's."""
        lines = [f"  {count} left, {reason}: {names}" for count, reason, names in _grouped(self.left)]
        lines += [f"  {count} x {kind}: {names}" for count, kind, names in _grouped(self.attention)]
        return lines + [f"  {self._how()}"] * bool(self.not_asked)

    def _how(self) -> str:
        """How a model of Transformers gets pydet's attention, or the rest of it."""
        if not self.not_asked:
            return "In Transformers: pydet.torch.register_attention(), then model.set_attn_implementation('pydet')."
        return (
            f"model.set_attn_implementation('pydet') passed by {', '.join(self.not_asked)}, as in Transformers before "
            "5.20 where a part has a copy of the model's configuration: call it of each of them."
        )

    def verdict(self) -> str:
        """What of the model now has bits that do not depend on the batch, and what that rests on, in a few sentences.

        With a sample it is that of what was seen. Without one it speaks of the modules that were found, by their
        classes and names and by the names in their code. The steps between them are PyTorch's; those that depend on an
        element's place are named: on a CPU PyTorch works in vectors, and what is left of a thread's share goes by
        another formula. A GPU has one formula for all.
        """
        if self.seen is not None:
            return self.seen.verdict()
        between = (
            f"The steps between are PyTorch's: on a CPU its {', '.join(_BY_PLACE)} and the like, where the model's own "
            "code calls them, give an element other bits by its place in the tensor, in fp32 and some in bf16, unless "
            "there is one thread and rows are multiples of 32 elements. override_aten() takes over the first four."
        )
        sentences = []
        if self.left:
            sentences.append(
                f"{len(self.left)} modules are left as they were; override_aten() takes over those whose products are "
                "PyTorch's own operators."
            )
        if self.attention:
            sentences.append(
                f"Attention is NOT batch-invariant: {len(self.attention)} modules compute it with PyTorch, and its "
                f"bits may change with the batch, with padding, and between prefill and decoding. {self._how()} "
                "Elsewhere: plain products and a softmax, under override_aten()."
            )
        if not sentences:
            sentences.append("Every matrix, norm and attention that was found is pydet's.")
        rests = (
            "This rests on classes, names and the names in their code, with the functions of PyTorch's that these are; "
            "nothing was run, and functions of other files and packages, names that are made up as it runs, and sums "
            "that are written out were not read: convert(model, sample=batch) or check(model, batch) looks."
        )
        return " ".join(["pydet's modules give a row the same bits in any batch.", *sentences, between, rests])


def _grouped(names: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """For all modules of one class or reason: how many, what, and the first of their names."""
    groups: dict[str, list[str]] = {}
    for name, what in names.items():
        groups.setdefault(what, []).append(name or "(the model)")
    for what, members in groups.items():
        more = f" and {len(members) - 3} more" if len(members) > 3 else ""
        yield len(members), what, ", ".join(members[:3]) + more


# ---- What a module becomes -------------------------------------------------------------------------------------------


def _parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its own, with those that weight_norm and spectral_norm compute before each call."""
    own: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
    weight = module.__dict__.get("weight")
    return own if not isinstance(weight, torch.Tensor) else {**own, "weight": weight}


def _own_forward(module: torch.nn.Module) -> str | None:
    """Of a module with a forward of its own the attribute that is its class's forward, which the other one calls:
    accelerate's hooks keep it so, as for weights that are on a disk, and leave it when they go."""
    name = "_old_forward" if {"_hf_hook", "_old_forward"} <= module.__dict__.keys() else "forward"
    bound = module.__dict__.get(name)
    is_own = getattr(bound, "__func__", None) is type(module).forward and getattr(bound, "__self__", None) is module
    return name if is_own else None


def _obstacle(module: torch.nn.Module) -> str | None:
    """Why a module that pydet could compute must stay as it is."""
    if "forward" in module.__dict__ and _own_forward(module) is None:
        return "its forward is one set on the instance (patches do that); convert before"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    for name, parameter in _parameters(module).items():
        if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
            before = "; convert before fully_shard or parallelize_module" if "DTensor" in repr(type(parameter)) else ""
            return f"its {name} is a {type(parameter).__qualname__}{before}"
        if parameter.dtype not in DTYPES:
            return f"its {name} is {parameter.dtype}"
    return None


def _becomes(
    module: torch.nn.Module,
    arithmetic: Arithmetic,
    k_chunk: int | None,
    fp8: bool,
    is_router: bool,
    may_multiply: bool,
) -> tuple[type, dict[str, Any]] | str | None:
    """The class and the attributes of what it becomes; or why it stays; or None where neither is to be said."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript; convert before torch.jit.script or torch.jit.trace"
    if any(torch.nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "its parameters have no extents yet; convert after a first forward"
    if fp8 and kind in (torch.nn.Linear, Linear):
        own = {"arithmetic": arithmetic, "power_of_two": False, "weight_scale_inv": None}
        return _obstacle(module) or (Fp8Linear, own)
    if experts.is_experts(module) and not isinstance(module, Fp8Experts):
        in_fp8 = any(x.dtype in FP8 for x in _parameters(module).values())
        if fp8:
            return (_obstacle(module) if not in_fp8 else None) or experts_fp8.becomes(module, arithmetic)
        if in_fp8:
            return "its matrices are fp8, with scales; convert(model, fp8=True)"
    own_kinds = Linear | Fp8Linear | Conv1D | RMSNorm | LayerNorm | Activation | experts.Router | Rotary | scans.Scan
    own_kinds |= Convolution | jetmoe.ParallelExperts | llama4.Experts
    if isinstance(module, alibi.MptAttention | jetmoe.Mixture | jetmoe.TopKGating | llama4.Mixture):
        return None
    if isinstance(module, own_kinds) or experts.of_pydet(module):
        return _another_sum(module, arithmetic, k_chunk)
    if _is_block_scaled(module):
        return _block_scaled(module, arithmetic) if fp8 else "its weight is fp8, with scales; convert(model, fp8=True)"
    how = {"arithmetic": arithmetic, "k_chunk": k_chunk}
    if experts.is_experts(module):
        return _obstacle(module) or (kind, how)
    is_router = is_router or (kind.__module__, kind.__name__) in _ROUTERS
    if is_router and kind.forward is not torch.nn.Linear.forward:
        return _obstacle(module) or experts.why_no_router(module) or (experts.router_class(kind), how)
    ours = Linear if kind is torch.nn.Linear else _BY_NAME.get((kind.__module__, kind.__name__))
    if (ahead := _AHEAD.get((kind.__module__, kind.__name__))) is not None:
        return _obstacle(module) or (derived(ahead[0], kind), {name: how[name] for name in ahead[1]})
    if ours in (Linear, Conv1D):
        return _obstacle(module) or (ours, how)
    if kind is torch.nn.LayerNorm or ours is OffsetLayerNorm:
        return _obstacle(module) or _layer_norm(module, ours or LayerNorm)
    if may_multiply and (convolution := convolution_class(module)) is not None:
        return _obstacle(module) or (convolution[0], {**convolution[1], **how})
    if (embedding := rotary_class(module)) is not None:
        return _obstacle(module) or embedding
    if (mixer := scans.scan_class(module)) is not None:
        return mixer if isinstance(mixer, str) else _obstacle(module) or (mixer, {})
    if _is_norm(module):
        return _obstacle(module) or _norm(module)
    if function := _activation(module):
        return _obstacle(module) or (Activation, {"kind": function})
    return _reason_to_leave(module, may_multiply)


def _another_sum(module: Any, arithmetic: Arithmetic, k_chunk: int | None) -> str | None:
    """Of a module of ours how it sums, if it was asked to sum otherwise, by more than the default."""
    asked = {"arithmetic": (arithmetic, "auto"), "k_chunk": (k_chunk, None)}
    for name, (wanted, default) in asked.items():
        if wanted != default and (has := getattr(module, name, wanted)) != wanted:
            return f"it is pydet's already, with {name} {has}; set that of the module"
    return None


def _is_block_scaled(module: torch.nn.Module) -> bool:
    """A linear layer as block-scaled checkpoints have it: a float8 weight and its weight_scale_inv."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    weight = own.get("weight")
    return weight is not None and weight.dim() == 2 and weight.dtype in FP8 and "weight_scale_inv" in own


def _block_scaled(module: torch.nn.Module, arithmetic: Arithmetic) -> tuple[type, dict[str, Any]] | str:
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if not {"bias", "weight", "weight_scale_inv"}.issuperset(own):
        return f"it has ({', '.join(own)}), and a block-scaled layer a weight, its scale and a bias"
    n, k = own["weight"].shape
    scale, want = own["weight_scale_inv"], (groups(n), groups(k))
    if tuple(scale.shape) != want or scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
        return f"its weight_scale_inv is {scale.dtype} {tuple(scale.shape)}, want float32 {want}: blocks of {GROUP}"
    features = {"in_features": k, "out_features": n}
    return Fp8Linear, {"arithmetic": arithmetic, "power_of_two": scale.dtype != torch.float32, **features}


def _activation(module: Any) -> str | None:
    """The kind of an activation that is pydet's too; None of another, and of one that writes into what it is given."""
    kind = type(module)
    if getattr(module, "inplace", False):
        return None
    if kind is torch.nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    if kind is torch.nn.Softplus:
        return "softplus" if (module.beta, module.threshold) == (1, 20) else None
    if kind.__module__ == "transformers.activations":
        return _TRANSFORMERS_ACTIVATIONS.get(kind.__name__)
    return {torch.nn.SiLU: "silu", torch.nn.Sigmoid: "sigmoid", torch.nn.Tanh: "tanh"}.get(kind)


def _is_norm(module: torch.nn.Module) -> bool:
    """A norm over rows by its name, and not one that PyTorch has and pydet has not."""
    others = torch.nn.LayerNorm | torch.nn.GroupNorm | torch.nn.LocalResponseNorm | torch.nn.modules.batchnorm._NormBase
    named = "norm" in type(module).__name__.lower() and not isinstance(module, others)
    return named and not any(True for _ in module.children()) and not isinstance(module, torch.nn.CrossMapLRN2d)


def _layer_norm(module: Any, kind: type) -> tuple[type, dict[str, Any]] | str:
    if len(module.normalized_shape) != 1:
        return f"it normalises {len(module.normalized_shape)} dimensions at once"
    if kind is OffsetLayerNorm and module.weight is None:
        return "it has no weight"
    return kind, {}


def _norm(module: torch.nn.Module) -> tuple[type, dict[str, Any]] | str:
    """RMSNorm and its settings, for an RMSNorm by any name, or a LayerNorm without a bias; or why it is neither.

    A norm that is not PyTorch's is known by its one parameter and by what it computes of rows, which also says whether
    it stores its weight less 1, and of what type its result is. It is tried on the CPU, on another weight.
    """
    if type(module) is torch.nn.RMSNorm:
        if len(module.normalized_shape) != 1:
            return f"it normalises {len(module.normalized_shape)} dimensions at once"
        default = torch.finfo(torch.float32).eps
        settings = {"eps": default if module.eps is None else module.eps, "weight_offset": 0.0, "result": "x"}
        return RMSNorm, {"size": int(module.normalized_shape[0]), **settings}
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(takes) != 1:
        return f"its forward takes ({', '.join(takes)}), and that of an RMSNorm x alone"
    own = dict(module.named_parameters(recurse=False))
    if list(own) != ["weight"] or own["weight"].dim() != 1:
        return f"its parameters are ({', '.join(own)}), and that of an RMSNorm a weight [N]"
    names = ("variance_epsilon", "eps", "epsilon", "norm_eps")
    eps = next((x for name in names if isinstance(x := getattr(module, name, None), float)), None)
    if eps is None:
        return f"it has no eps by the name of {', '.join(names)}"
    size = own["weight"].numel()
    try:
        offset = _weight_offset(module, size, eps)
        centred = offset is None and _weight_offset(module, size, eps, centred=True) == 0.0
        result = None if offset is None and not centred else _result_type(module, size)
    except Exception as problem:  # whatever it is, it is not a function of rows
        return f"its forward could not be tried on rows of numbers: {type(problem).__name__}: {problem}"
    if centred and result == "x":
        settings = {"normalized_shape": (size,), "eps": eps, "elementwise_affine": True, "bias": None}
        return LayerNorm, settings
    if offset is None:
        return "its formula is not that of an RMSNorm"
    if result is None:
        return "the type of its result is that of neither x, weight nor their product"
    return RMSNorm, {"size": size, "eps": eps, "weight_offset": offset, "result": result}


def _try(module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the class of a norm computes with the module's settings and another weight."""
    stand_in = type(module).__new__(type(module))
    stand_in.__dict__.update(module.__dict__, _parameters={"weight": torch.nn.Parameter(weight, requires_grad=False)})
    with torch.no_grad():
        y = type(module).forward(stand_in, x)
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        raise ValueError("the result is not like x")
    return y


def _weight_offset(module: torch.nn.Module, size: int, eps: float, centred: bool = False) -> float | None:
    """0 or 1 if that is what the norm adds to its weight; None for another formula. The second row is one of which eps
    makes much. centred: the mean is taken off before, as a LayerNorm does."""
    line = torch.linspace(-1, 2, 2 * size, device="cpu")
    x = line.view(2, size) * torch.tensor([[1.0], [eps**0.5]], device="cpu")
    weight = torch.linspace(0.5, 1.5, size, device="cpu")
    got = _try(module, x, weight)
    if centred:
        x = x - x.mean(-1, True)
    for offset in (0.0, 1.0):
        if torch.allclose(
            got.float(), x * torch.rsqrt(x.square().mean(-1, True) + eps) * (weight + offset), 1e-3, 1e-6
        ):
            return offset
    return None


def _result_type(module: torch.nn.Module, size: int) -> str | None:
    rules = {"x": lambda x, w: x, "promoted": torch.promote_types, "weight": lambda x, w: w}
    for x in DTYPES:
        for w in DTYPES:
            rows = torch.linspace(-1, 2, size, device="cpu").to(x)[None]
            got = _try(module, rows, torch.ones(size, dtype=w, device="cpu")).dtype
            rules = {name: rule for name, rule in rules.items() if rule(x, w) == got}
    return next(iter(rules), None)


def _reason_to_leave(module: torch.nn.Module, may_multiply: bool) -> str | None:
    """Why a module that multiplies or normalises stays as it is; None for a module that does neither. One with matrices
    multiplies, for all that is known, unless its router was seen not to."""
    kind = type(module).__qualname__
    if isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "torch's attention reads its weight and does not call it"
    if isinstance(module, torch.nn.Linear):
        own = "its parameters are parametrized" if torch.nn.utils.parametrize.is_parametrized(module) else None
        if type(module).forward is not torch.nn.Linear.forward:
            own = own or f"{kind} is a subclass of Linear with a forward of its own"
        return own or _obstacle(module) or f"{kind} is a subclass of Linear, and may have changed more than can be seen"
    if isinstance(module, torch.nn.LayerNorm):
        return f"{kind} is a subclass of LayerNorm, and may have changed more than can be seen"
    if isinstance(module, torch.nn.MultiheadAttention):
        return "its products are inside torch's attention; override_aten() catches those in mm, addmm and bmm"
    if "norm" in type(module).__name__.lower() and not any(True for _ in module.children()):
        return f"{kind} has no counterpart here"
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return None
    if hasattr(module, "_packed_params"):
        return f"{kind} has a quantized weight, and its product is PyTorch's"
    if may_multiply and any(parameter.dim() > 1 for parameter in _parameters(module).values()):
        return f"{kind} has matrices, and no counterpart here; override_aten() catches its mm, addmm and bmm"
    return None


def _implementation(module: torch.nn.Module) -> str | None:
    """The name of the attention in a configuration of Transformers."""
    name: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name


def _attention(module: torch.nn.Module) -> str | None:
    """What computes the attention of a module that has it, by its name or by its code; None where that is pydet, and of
    other modules."""
    kind, by_code = type(module).__qualname__, code.of_its_own(module)
    if isinstance(module, alibi.MptAttention):
        return None
    if by_code and by_code[0] == "attention":
        return f"{kind} by code of its own ({by_code[1]})"
    if not code.asks_interface(module):
        if "attention" not in kind.lower() or not any(True for _ in module.children()):
            return None
        if any("attention" in type(x).__qualname__.lower() for x in module.modules() if x is not module):
            return None  # that one computes it
        if any(scans.is_scan(x) or isinstance(scans.scan_class(x), type) for x in module.modules()):
            return None  # linear attention, which is a scan
    by = _implementation(module)
    return None if by == PYDET else f"{kind} by {repr(by) if by else 'code of its own'}"


def _not_asked(model: torch.nn.Module, attention: Iterable[str]) -> list[str]:
    """The parts of a model of Transformers that have these modules, and not the attention that the model was given."""
    if _implementation(model) != PYDET:
        return []
    parts: dict[str, Any] = {
        name: part
        for name, part in model.named_modules()
        if name and hasattr(part, "set_attn_implementation") and _implementation(part) != PYDET
    }
    inner = (max((x for x in parts if name.startswith(f"{x}.")), key=len, default="") for name in attention)
    return [name for name in dict.fromkeys(inner) if name and parts[name]._can_set_attn_implementation()]


def _slow_path(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes by which PyTorch's encoder calls its layers' modules without gradients too. In evaluation it would
    multiply their weights itself, in one kernel, and in nested tensors."""
    if isinstance(module, torch.nn.TransformerEncoderLayer):
        return {"activation_relu_or_gelu": 0}
    return {"use_nested_tensor": False} if isinstance(module, torch.nn.TransformerEncoder) else {}


def _own_code(module: torch.nn.Module) -> str | None:
    """Why a module without matrices of its own is none of pydet's: its code multiplies, transforms, normalises or sums
    over tokens."""
    found = code.of_its_own(module)
    if found is None or found[0] == "attention" or experts.is_experts(module):
        return None
    does = {"scan": "scans over tokens", "product": "multiplies", "transform": "transforms", "norm": "normalises"}
    catches = "; override_aten() catches its mm, addmm and bmm" if found[0] in ("scan", "product") else ""
    return f"{type(module).__qualname__} {does[found[0]]} in code of its own ({found[1]}){catches}"


# ---- convert ---------------------------------------------------------------------------------------------------------


def convert(
    model: torch.nn.Module,
    *,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    fp8: bool | Callable[[str, torch.nn.Module], bool] = False,
    strict: bool = False,
    sample: Any = None,
) -> Conversion:
    """Makes linear layers, LayerNorms, RMSNorms by any name, GPT-2's Conv1D, convolutions of patches and those of
    sequences where windows overlap little, experts with their routers, MPT's attention and the cosines of rotary
    embeddings pydet's.

    In place: a module stays the same object with the same parameters, hooks, attributes and names, and changes its
    class, so tied weights stay tied and optimizers keep them. What pydet would compute otherwise than the module does
    is left alone, with the reason. Experts are those that ask Transformers' experts interface (Mixtral, Qwen3-MoE,
    DeepSeek-V3, gpt-oss and others); their configuration, and so models that share it, then say ``"pydet"``.

    Convert before ``fully_shard`` and quantization, and after ``peft.get_peft_model`` (or again
    after it: adapters that are attached later are PyTorch's until then).

    Args:
        model: any module.
        arithmetic, k_chunk: of the linear layers and convolutions; those in fp8 have chunks of 128, and take
            ``"auto"``, ``"ieee"`` and ``"sm90"``.
        fp8: True makes ``nn.Linear`` and :class:`Linear` to :class:`Fp8Linear`, experts to :class:`Fp8Experts`, and so
            the layers and experts of block-scaled checkpoints (a float8 ``weight`` and its ``weight_scale_inv``). A
            function of a module's name and the module says which: ``fp8=lambda name, _: name != "lm_head"``.
        strict: raise, and change nothing, if a matrix, a norm, an attention or a scan of the model would not be
            pydet's; and with a sample if its results vary with the batch or are not those of the model before.
        sample: a batch that the forward takes. Then :func:`check` runs it, before and after, and the report's ``seen``
            says what it saw; without one the report rests on classes, names and code.

    Returns:
        What was swapped and what was left, and why; ``print()`` it.

    Raises:
        Error: ``model`` is no module, the arithmetic is unknown, or ``strict`` and something would be left; and what a
            forward of the sample raises. Nothing is changed then.
    """
    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"convert: model is {type(model).__qualname__}, want a torch.nn.Module")
    unknown(arithmetic, "convert", "arithmetic")
    if k_chunk is not None and (type(k_chunk) is not int or k_chunk < 16 or k_chunk % 16):
        fail(INVALID_VALUE, f"convert: k_chunk is {k_chunk!r}, want a positive multiple of 16, or None")
    in_double = {x.dtype for x in model.parameters() if x.is_floating_point()} == {torch.float64}
    report, plans, routers = Conversion(), {}, experts.routers_of(model)
    tried: set[torch.nn.Module] = set()  # with the router that they are in, whose one product is its own
    for name, module in model.named_modules(remove_duplicate=False):
        if module not in plans:
            of_fp8 = fp8(name, module) if callable(fp8) else fp8
            plans[module] = _becomes(module, arithmetic, k_chunk, of_fp8, module in routers, module not in tried)
            if in_double and isinstance(made := plans[module], tuple) and made[0] is Activation:
                plans[module] = "the model is in float64"
            if module in routers and isinstance(plans[module], tuple):
                tried.update(module.modules())
        plan = plans[module]
        if scans.is_scan(module) or (isinstance(plan, tuple) and issubclass(plan[0], scans.Scan)):
            tried.update(x for x in module.children() if isinstance(x, torch.nn.Conv1d))  # which it does not call
        if isinstance(plan, str):
            report.left[name] = plan
        elif plan is not None:
            report.swapped[name] = type(module).__qualname__
        if plan is None and (why := _own_code(module)):
            report.left[name] = why
        if not isinstance(plan, tuple) and (what := _attention(module)):
            report.attention[name] = what
    report.not_asked = _not_asked(model, report.attention)
    if strict and (report.left or report.attention):
        fail(UNSUPPORTED, "\n".join(["convert: strict, and this would be left:", *report.remaining()]))
    undo = remember(model)
    try:
        for module, plan in plans.items():
            if isinstance(plan, tuple):
                kind, attributes = plan
                if (name := _own_forward(module)) is not None:
                    attributes = {**attributes, name: kind.forward.__get__(module)}  # type: ignore[attr-defined]
                become(module, kind, attributes)
                if experts.is_experts(module):
                    experts.use_pydet(module)
            elif (turning := turning_class(cast(Any, type(module)))) is not None and "forward" not in module.__dict__:
                become(module, turning, {})
            elif slow := _slow_path(module):
                become(module, type(module), slow)
        if sample is not None:
            report.seen = checking.check(model, sample)
            if strict and (report.seen.varies or report.seen.differs):
                fail(UNSUPPORTED, f"convert: strict, and this was seen: {report.seen.verdict()}")
    except BaseException:
        undo()
        raise
    _watch_for_adapters()
    return report


@contextlib.contextmanager
def converted(model: torch.nn.Module) -> Iterator[Conversion]:
    """A model that is converted for a while."""
    undo = remember(model)
    try:
        yield convert(model)
    finally:
        undo()


def _watch_for_adapters(watching: list[Any] = []) -> None:  # noqa: B006 -- once in a process
    if not watching:
        watching.append(torch.nn.modules.module.register_module_module_registration_hook(_warn_of_adapter))


def _warn_of_adapter(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """PEFT's layers keep what they adapt as base_layer; Transformers puts a new layer in place of one that grows."""
    if type(module) in (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm) and isinstance(
        parent._modules.get(name), Linear | Fp8Linear | LayerNorm | RMSNorm
    ):
        warnings.warn(
            f"pydet.torch.convert: {name} of {type(parent).__qualname__} was converted, and a {type(module).__name__} "
            "of PyTorch's was put in its place: call convert(model) again",
            stacklevel=2,
        )
    if name == "base_layer" and isinstance(module, Linear | Fp8Linear | Conv1D):
        warnings.warn(
            f"pydet.torch.convert: a {type(parent).__qualname__} was put around a converted layer, and its own "
            "matrices are PyTorch's: call convert(model) again, after the adapters are attached",
            stacklevel=2,
        )
