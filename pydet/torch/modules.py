"""Modules that compute with pydet; :func:`accumulate_gradients` has them continue the sums of their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._jit_internal import is_scripting

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.hooks import unknown as known
from pydet.ops import Arithmetic
from pydet.ops.activation import Kind
from pydet.torch import functions
from pydet.torch.accumulate import (
    AccumulatingLayerNorm,
    AccumulatingLinear,
    AccumulatingRmsNorm,
    Accumulation,
    main_grad,
    refuse_wrapper,
    watch_for_wrappers,
    wrapper,
)
from pydet.torch.experts import Router, of_pydet
from pydet.torch.fp8 import Fp8Linear
from pydet.torch.ops import matrix


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
        arithmetic: Arithmetic = "auto",
        k_chunk: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.arithmetic, self.k_chunk = arithmetic, k_chunk

    accumulates = False  # see accumulate_gradients()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_scripting():
            y = torch.ops.pydet.skinny_gemm(x, self.weight, self.bias, None, self.arithmetic, self.k_chunk)
        elif self.accumulates and torch.is_grad_enabled():
            y = AccumulatingLinear.apply(x, self.weight, self.bias, self.arithmetic, self.k_chunk)
        else:
            y = functions.linear(x, self.weight, self.bias, arithmetic=self.arithmetic, k_chunk=self.k_chunk)
        return y

    def extra_repr(self) -> str:
        chunk = "" if self.k_chunk is None else f", k_chunk={self.k_chunk}"
        return f"{super().extra_repr()}, arithmetic={self.arithmetic}{chunk}"


class Conv1D(torch.nn.Module):
    """``y[..., n] = round(sum_k x[..., k] weight[k, n] + bias[n])``: the linear layer of GPT-2 in Transformers.

    :func:`pydet.torch.convert` makes these; its weight is stored the other way round than that of :class:`Linear`.
    """

    if TYPE_CHECKING:  # torch.jit.script reads annotations, and does not know these
        weight: torch.nn.Parameter
        bias: torch.nn.Parameter
        arithmetic: Arithmetic
        k_chunk: int | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functions.gemm(matrix(x), self.weight, self.bias, arithmetic=self.arithmetic, k_chunk=self.k_chunk)
        return y.view(*x.shape[:-1], self.weight.shape[1])

    def extra_repr(self) -> str:
        chunk = "" if self.k_chunk is None else f", k_chunk={self.k_chunk}"
        return f"nx={self.weight.shape[0]}, nf={self.weight.shape[1]}, arithmetic={self.arithmetic}{chunk}"


class RMSNorm(torch.nn.Module):
    """``y = x rstd (weight + weight_offset)`` over the last dimension, on :func:`pydet.torch.rms_norm`.

    Args:
        size: N, the extent of the last dimension.
        eps: added to the mean of squares.
        elementwise_affine: has a weight.
        weight_offset: 1.0 for models that store the weight less 1; the weight then starts as zeros.
        device, dtype: of the weight.

    Attributes:
        result: the type of ``y`` where x and weight are of different ones: ``"x"``, ``"weight"``, or ``"promoted"``
            (as their product in PyTorch). A converted norm has that of the norm it was.
    """

    if TYPE_CHECKING:
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
        self.size, self.eps, self.weight_offset, self.result = size, eps, weight_offset, "x"
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.full((size,), 1.0 - weight_offset, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight is not None and self.result != "x" and x.dtype != weight.dtype:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        if is_scripting():
            y = torch.ops.pydet.rmsnorm(x, weight, self.eps, self.weight_offset)[0]
        elif self.accumulates and weight is not None and torch.is_grad_enabled():
            y = AccumulatingRmsNorm.apply(x, weight, self.eps, self.weight_offset)
        else:
            y = torch.ops.pydet.rmsnorm(x, weight, self.eps, self.weight_offset)[0]
        return y.to(weight.dtype) if weight is not None and self.result == "weight" else y

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{self.size}, eps={self.eps}, elementwise_affine={self.weight is not None}{offset}"


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, on :func:`pydet.torch.layer_norm`: same parameters, same
    ``state_dict``. ``y`` has the type of x, also under autocast.

    Args:
        normalized_shape: N, the extent of the last dimension, or ``(N,)``.
        eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
    """

    accumulates = False  # see accumulate_gradients()

    def __init__(self, normalized_shape: int | tuple[int], *arguments: Any, **options: Any) -> None:
        super().__init__(normalized_shape, *arguments, **options)
        if len(self.normalized_shape) != 1:
            fail(INVALID_VALUE, f"LayerNorm: normalized_shape is {tuple(self.normalized_shape)}, want one extent")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_scripting():
            y = torch.ops.pydet.layernorm(x, self.weight, self.bias, self.eps)[0]
        elif self.accumulates and self.weight is not None and torch.is_grad_enabled():
            y = AccumulatingLayerNorm.apply(x, self.weight, self.bias, self.eps)
        else:
            y = torch.ops.pydet.layernorm(x, self.weight, self.bias, self.eps)[0]
        return y


class Activation(torch.nn.Module):
    """``f(x)`` of each element, on :func:`pydet.torch.activation`. :func:`convert` makes these of SiLU, GELU and the
    like.

    Args:
        kind: as in :func:`pydet.activation`.
    """

    if TYPE_CHECKING:  # torch.jit.script reads annotations, and does not know this one
        kind: Kind

    def __init__(self, kind: Kind = "silu") -> None:
        super().__init__()
        known(kind, "Activation", "kind")
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.pydet.activation(x, self.kind)

    def extra_repr(self) -> str:
        return str(self.kind)


class Accumulating(list[torch.nn.Parameter]):
    """The parameters that have a ``main_grad``, as :func:`accumulate_gradients` returns them.

    Attributes:
        outside: the names of the other parameters that are trained, whose gradients go to ``grad``, each with the class
            of its module: embeddings, GPT-2's Conv1D, attention sinks, whatever is not pydet's.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], outside: dict[str, str]) -> None:
        super().__init__(parameters)
        self.outside = outside


def _with_sums(module: Any) -> list[str] | None:
    """Of a module that takes part, the names of its parameters that its backward can add to sums."""
    if isinstance(module, Linear | Fp8Linear | RMSNorm | LayerNorm | Router):
        names = ["weight", "bias"]
    elif of_pydet(module):
        names = [f"{name}{end}" for name in ("gate_up_proj", "up_proj", "down_proj") for end in ("", "_bias")]
    else:
        return None
    own = dict(module.named_parameters(recurse=False))
    return [name for name in names if name in own and f"{name}_scale_inv" not in own]


def _refuse_what_is_lost(model: torch.nn.Module, of: dict[str, tuple[torch.nn.Module, list[str]]]) -> None:
    """Wrappers, sharded and computed weights, and weights that are tied to modules that know no main_grad."""
    for module in model.modules():
        if name := wrapper(module):
            refuse_wrapper(name)
    ours: dict[torch.nn.Parameter, str] = {}
    for name, (module, names) in of.items():
        place = f"accumulate_gradients: {name or 'the model'}"
        if getattr(module, "weight", None) is not None and "weight" not in module._parameters:
            fail(
                UNSUPPORTED, f"{place} computes its weight (weight_norm or the like); want a weight that is a parameter"
            )
        for own in names:
            parameter: Any = getattr(module, own)
            if "DTensor" in repr(type(parameter)):
                fail(
                    UNSUPPORTED,
                    f"{place} has a {own} that is a DTensor, of fully_shard or parallelize_module, whose gradient goes "
                    "to grad; want a model that is not sharded, and main_grad summed over the ranks "
                    "(distributed.all_reduce of main_grad[None])",
                )
            ours[parameter] = f"{name}.{own}".lstrip(".")
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            taken = own in of[name][1] if name in of else False
            if parameter in ours and not taken and parameter.requires_grad:
                fail(
                    UNSUPPORTED,
                    f"accumulate_gradients: {ours[parameter]} is tied to {name}.{own} of {type(module).__qualname__}, "
                    "whose share of the gradient main_grad would lack; want weights that are not tied, or "
                    "accumulate_gradients of modules without it, as model.model, and its whole gradient in grad",
                )


def accumulate_gradients(model: torch.nn.Module) -> Accumulating:
    """From now on pydet's modules in ``model`` sum their parameters' gradients in fp32, in ``parameter.main_grad``.

    ``backward()`` continues the sums in ``main_grad`` and leaves ``grad`` alone. Rows that come in several calls then
    give the bits of one call on all of them in that order, if the calls are cut at multiples of 16 rows (of ``k_chunk``
    where there is one), at multiples of 128 rows for :class:`Fp8Linear`, and of ``pydet.DWEIGHT_ROWS`` for
    the norms. Pad with rows whose gradient is zero to get there. Zero ``main_grad`` between steps.

    In arithmetic ``ieee`` without ``k_chunk``, linear layers, routers and experts may be cut anywhere. In others what
    counts for experts is the number of rows that came to each, which the routing decides.

    ``torch.compile`` leaves these modules to eager mode, and refuses them under ``fullgraph=True``.

    A parameter of several of these modules sums them in the order in which backward reaches them, which is then part of
    the bits. One that is tied to a module of another kind, as an embedding, is refused, for half of its gradient would
    be elsewhere; so is, in backward, one that anything but its module multiplies, as the fused heads of TRL and Liger
    do with ``lm_head.weight``. DistributedDataParallel and fully_shard reduce ``grad``, and never see ``main_grad``:
    a model in them is refused, here or as it is wrapped or called.

    Args:
        model: a module; its :class:`Linear`, :class:`Fp8Linear` (but for weights that are frozen, there and in
            experts), :class:`RMSNorm` and :class:`LayerNorm` take part, and the routers and experts that
            :func:`convert` swapped.

    Returns:
        The parameters that have a ``main_grad`` now, a list. Its ``outside`` names the others that are trained, which
        keep their ``grad``: embeddings, :class:`Conv1D`, sinks.

    Raises:
        Error: ``model`` is no module, there is no module of pydet's in it, a gradient would be lost; then nothing is
            changed.
    """
    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"accumulate_gradients: model is {type(model).__qualname__}, want a torch.nn.Module")
    found = [(name, module, _with_sums(module)) for name, module in model.named_modules()]
    of = {name: (module, names) for name, module, names in found if names is not None}
    _refuse_what_is_lost(model, of)
    if not any(names for _, names in of.values()):
        fail(INVALID_VALUE, "accumulate_gradients: no Linear or norm of pydet's in the model; convert() it first")
    watch_for_wrappers()
    parameters: dict[torch.nn.Parameter, None] = {}
    for name, (taking_part, names) in of.items():
        module: Any = taking_part
        module.accumulates = Accumulation({f"{name}.{own}".lstrip("."): getattr(module, own) for own in names})
        for parameter in module.accumulates.parameters.values():
            main_grad(parameter)
            parameters[parameter] = None
    outside = {
        f"{name}.{own}".lstrip("."): type(module).__qualname__
        for name, module in model.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and parameter not in parameters
    }
    return Accumulating(parameters, outside)
