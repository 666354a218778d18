"""Modules that compute with pydet; :func:`convert` swaps them into a model, :func:`accumulate_gradients` has them
continue the sums of their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pydet._native import INVALID_VALUE, fail
from pydet.buffer import unknown
from pydet.torch import functions
from pydet.torch.accumulate import AccumulatingLinear, AccumulatingRmsNorm, main_grad
from pydet.torch.ops import DTYPES


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on :func:`pydet.torch.linear`: same parameters, same ``state_dict``.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        arithmetic, k_chunk: as in :func:`pydet.gemm`; they decide bits, forward and backward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        arithmetic: str = "auto",
        k_chunk: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.arithmetic, self.k_chunk = arithmetic, k_chunk

    accumulates = False  # see accumulate_gradients()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.accumulates and torch.is_grad_enabled():
            arguments = (x, self.weight, self.bias, self.arithmetic, self.k_chunk)
            return AccumulatingLinear.apply(*arguments)
        return functions.linear(x, self.weight, self.bias, arithmetic=self.arithmetic, k_chunk=self.k_chunk)

    def extra_repr(self) -> str:
        chunk = "" if self.k_chunk is None else f", k_chunk={self.k_chunk}"
        return f"{super().extra_repr()}, arithmetic={self.arithmetic}{chunk}"


class RMSNorm(torch.nn.Module):
    """``y = x rstd (weight + weight_offset)`` over the last dimension, on :func:`pydet.torch.rms_norm`.

    Args:
        size: N, the extent of the last dimension.
        eps: added to the mean of squares.
        elementwise_affine: has a weight.
        weight_offset: 1.0 for models that store the weight less 1; the weight then starts as zeros.
        device, dtype: of the weight.
    """

    weight: torch.nn.Parameter | None
    accumulates = False  # see accumulate_gradients()

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        weight_offset: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.weight_offset = size, eps, weight_offset
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.full((size,), 1.0 - weight_offset, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.accumulates and self.weight is not None and torch.is_grad_enabled():
            return AccumulatingRmsNorm.apply(x, self.weight, self.eps, self.weight_offset)
        return torch.ops.pydet.rmsnorm(x, self.weight, self.eps, self.weight_offset)[0]

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{self.size}, eps={self.eps}, elementwise_affine={self.weight is not None}{offset}"


@dataclass
class Conversion:
    """What :func:`convert` did. ``str()`` of it is a readable report.

    Attributes:
        swapped: the names of the modules that are pydet's now, each with the class it had.
        left: the names of modules that multiply or normalise and are as they were, each with the reason.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, left {len(self.left)}"]
        lines += [f"  {name or '(the model)'}: {kind} -> pydet" for name, kind in self.swapped.items()]
        lines += [f"  {name or '(the model)'}: left, {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def _norm_settings(module: torch.nn.Module) -> tuple[float, float] | None:
    """(eps, weight_offset) of an RMSNorm by any name; None for what is no such norm.

    A norm that is not PyTorch's is known by its class name and its one parameter, and by what it computes of a row:
    that also says whether it stores its weight less 1.
    """
    if isinstance(module, torch.nn.RMSNorm):
        eps = module.eps
        if eps is None:
            eps = torch.finfo(torch.float32 if module.weight is None else module.weight.dtype).eps
        return eps, 0.0
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not _is_norm(module) or not isinstance(eps, float) or not isinstance(weight, torch.Tensor):
        return None
    if weight.dim() != 1 or len(list(module.parameters())) != 1 or weight.device.type == "meta":
        return None
    with torch.no_grad():
        x = torch.linspace(-1, 2, weight.numel(), device=weight.device).to(weight.dtype)
        try:
            got = module.forward(x[None])[0].float()
        except Exception:  # whatever it is, it is not a function of one row
            return None
        x = x.float()
        for offset in (0.0, 1.0):
            want = x * torch.rsqrt(x.square().mean() + eps) * (weight.float() + offset)
            if torch.allclose(got, want, rtol=2e-2, atol=1e-6):
                return eps, offset
    return None


def _is_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def _reason_to_leave(module: torch.nn.Module) -> str | None:
    """Why a module that multiplies or normalises stays as it is; None for a module that does neither."""
    kind = type(module).__qualname__
    if isinstance(module, torch.nn.Linear):
        return f"{kind} is a subclass with a forward of its own"
    if isinstance(module, torch.nn.MultiheadAttention):
        return "its products are inside torch's attention; override_aten() catches those in mm, addmm and bmm"
    if isinstance(module, torch.nn.LayerNorm | torch.nn.GroupNorm | torch.nn.modules.batchnorm._NormBase):
        return f"{kind} has no counterpart here"
    if _is_norm(module):
        return "a norm whose eps, weight or formula is not that of an RMSNorm"
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return None
    if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
        return f"{kind} has matrices, and no counterpart here"
    return None


def _swap(module: torch.nn.Module, arithmetic: str, k_chunk: int | None) -> torch.nn.Module | str | None:
    """pydet's module on the same parameters; or why it stays; or None where neither is to be said."""
    if isinstance(module, Linear | RMSNorm):
        return None
    new: torch.nn.Module
    if type(module) is torch.nn.Linear or type(module) is torch.nn.modules.linear.NonDynamicallyQuantizableLinear:
        if type(module) is not torch.nn.Linear:
            return "torch's attention reads its weight and does not call it"
        new = Linear.__new__(Linear)
        torch.nn.Module.__init__(new)
        new.in_features, new.out_features = module.in_features, module.out_features
        new.arithmetic, new.k_chunk = arithmetic, k_chunk
        parameters: tuple[str, ...] = ("weight", "bias")
    elif (settings := _norm_settings(module)) is not None:
        if isinstance(module, torch.nn.RMSNorm) and len(module.normalized_shape) != 1:
            return f"it normalises {len(module.normalized_shape)} dimensions at once"
        new = RMSNorm.__new__(RMSNorm)
        torch.nn.Module.__init__(new)
        new.eps, new.weight_offset = settings
        size = (
            module.normalized_shape[0]
            if isinstance(module, torch.nn.RMSNorm)
            else module.get_parameter("weight").numel()
        )
        new.size = int(size)
        parameters = ("weight",)
    else:
        return _reason_to_leave(module)
    for name in parameters:
        parameter = getattr(module, name)
        if parameter is not None and parameter.dtype not in DTYPES:
            return f"its {name} is {parameter.dtype}"
        new.register_parameter(name, parameter)
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "it has hooks"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    new.training = module.training
    return new


def convert(model: torch.nn.Module, *, arithmetic: str = "auto", k_chunk: int | None = None) -> Conversion:
    """Swaps ``nn.Linear``, ``nn.RMSNorm`` and RMSNorms like LlamaRMSNorm or GemmaRMSNorm for pydet's, in place.

    Parameters stay the same objects: tied weights stay tied, optimizers keep them, ``state_dict`` keeps its names.

    Args:
        model: any module that contains such modules. (A model that is one itself cannot be swapped in place: that is
            refused; make a :class:`Linear`.)
        arithmetic, k_chunk: of the linear layers.

    Returns:
        What was swapped and what was left, and why.

    Raises:
        Error: ``model`` is no module, is itself such a layer, or the arithmetic is unknown.
    """
    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"convert: model is {type(model).__qualname__}, want a torch.nn.Module")
    unknown(arithmetic, "convert", "arithmetic")
    if isinstance(_swap(model, arithmetic, k_chunk), torch.nn.Module):
        fail(
            INVALID_VALUE,
            f"convert: the model is itself a {type(model).__qualname__}, which cannot be swapped in place",
        )
    report = Conversion()
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent._modules.items()):  # named_children() would leave out a second name
            if child is None:
                continue
            full = f"{parent_name}.{name}" if parent_name else name
            result = made[child] if child in made else _swap(child, arithmetic, k_chunk)
            if isinstance(result, torch.nn.Module):
                made[child] = result
                setattr(parent, name, result)
                report.swapped[full] = type(child).__qualname__
            elif result is not None:
                report.left[full] = result
    return report


def accumulate_gradients(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """From now on pydet's modules in ``model`` sum their parameters' gradients in fp32, in ``parameter.main_grad``.

    ``backward()`` continues the sums in ``main_grad`` and leaves ``grad`` alone. Rows that come in several calls then
    give the bits of one call on all of them in that order, if the calls are cut at multiples of 16 rows (of ``k_chunk``
    where there is one), and at multiples of ``pydet.DWEIGHT_ROWS`` for :class:`RMSNorm`. Pad with rows whose gradient
    is zero to get there. Zero ``main_grad`` between steps.
    ``torch.compile`` leaves these modules to eager mode, and refuses them under ``fullgraph=True``.

    A parameter of several modules (tied weights) sums them in the order in which backward reaches them, which is then
    part of the bits.

    Args:
        model: a module; its :class:`Linear` and :class:`RMSNorm` take part.

    Returns:
        The parameters that have a ``main_grad`` now; those of other modules keep their ``grad``.

    Raises:
        Error: ``model`` is no module, or there is no module of pydet's in it.
    """
    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"accumulate_gradients: model is {type(model).__qualname__}, want a torch.nn.Module")
    parameters: list[torch.nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, Linear | RMSNorm):
            module.accumulates = True
            for parameter in module.parameters(recurse=False):
                if not hasattr(parameter, "main_grad"):
                    main_grad(parameter)
                    parameters.append(parameter)
    if not parameters:
        fail(INVALID_VALUE, "accumulate_gradients: no Linear or RMSNorm of pydet's in the model; convert() it first")
    return parameters
