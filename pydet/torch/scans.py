"""Mixers of Transformers that scan over tokens (Mamba, Mamba-2, the gated delta rule), on pydet's recurrences.

Their forward is left as it is written: it calls a few functions of its file by their names, of which it has chunks or
loops here. A converted mixer's forward has ours in their place.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from types import CellType, FunctionType
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

import pydet
from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch import ops  # noqa: F401 -- registers torch.ops.pydet
from pydet.torch.accumulate import AccumulatingLinear, adding, check_own, part_of
from pydet.torch.ops.register import Tensor
from pydet.torch.ops.scan import causal_conv1d_apart, selective_scan_apart
from pydet.torch.stock import Derived, derived

_pydet = torch.ops.pydet


def _boundaries(tokens: int, more: dict[str, Any]) -> Tensor | None:
    """Where the sequences of a pack begin and end, in any of the words that a model has for it."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if more.get(name) is not None:
            starts: Tensor = more[name]
            return starts.contiguous()
    index = more.get("seq_idx")
    if index is None:
        return None
    if index.shape[0] != 1:
        fail(UNSUPPORTED, f"seq_idx is of a batch of {index.shape[0]}, want a pack: a batch of 1")
    index = index.reshape(-1)
    inner = (index[1:] != index[:-1]).nonzero().reshape(-1) + 1
    ends = torch.tensor([0, tokens], dtype=inner.dtype, device=inner.device)
    return torch.cat([ends[:1], inner, ends[1:]])


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    if activation in ("silu", "swish"):
        done: Tensor = _pydet.activation(y, "silu")
        return done
    from transformers.activations import ACT2FN

    other: Tensor = ACT2FN[activation](y)
    return other


# ---- The causal convolution ------------------------------------------------------------------------------------------


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **more: Any,
) -> Tensor:
    starts, x = _boundaries(hidden_states.shape[-1], more), hidden_states.transpose(1, 2)
    if weight.dim() == 2:
        y = _pydet.causal_conv1d(x, weight, bias, None, starts)
    else:  # of each sequence, as a mixer that is trained has it
        y = causal_conv1d_apart(x, weight.reshape(-1, x.shape[2], weight.shape[-1]), bias, None, starts)
    return _activated(y, activation).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The last inputs are in ``conv_state``, of which there may be more than taps before the first."""
    kept, before = conv_state.shape[-1], weight.shape[-1] - 1
    initial = conv_state[..., kept - before :].transpose(1, 2).to(hidden_states.dtype)
    y = _pydet.causal_conv1d(hidden_states.transpose(1, 2), weight, bias, initial, None)
    conv_state.copy_(torch.cat([conv_state.to(hidden_states.dtype), hidden_states], dim=-1)[..., -kept:])
    return _activated(y, activation).transpose(1, 2)


# ---- Mamba-2 and Mamba -----------------------------------------------------------------------------------------------


_Limit: TypeAlias = tuple[float, float]
_ANY: _Limit = (0.0, float("inf"))


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool, limit: _Limit = _ANY) -> Tensor:
    """In fp32 from where they are projected."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    if softplus:
        dt = _pydet.activation(dt, "softplus")
    return dt if limit == _ANY else dt.clamp(*limit)


def _one_of(x: Tensor, *places: int) -> Tensor:
    """What is the same along these dimensions, without them."""
    for place in places:
        if x.shape[place] > 1 and x.stride(place) != 0:
            fail(INVALID_VALUE, "selective_state_update: an operand of heads varies within a head, want one for each")
        x = x.select(place, 0)
    return x


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _scan(A: Tensor, dims: int, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *rest: Any) -> Any:
    """Of ``A`` with so many dimensions, or one more for the sequences, as a mixer that is trained has it."""
    scan = _pydet.selective_scan if A.dim() == dims else selective_scan_apart
    return scan(x, dt, A.float(), B, C, _float(D), *rest)


def mamba2_split_conv1d_scan_combined(zxbcdt: Tensor, *operands: Any, **more: Any) -> None:
    """The steps one by one, as where there is no fused kernel."""


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: _Limit = _ANY,
    return_final_states: bool = False,
    **more: Any,
) -> Any:
    starts = _boundaries(hidden_states.shape[1], more)
    dt = _steps(dt, dt_bias, dt_softplus, (dt_limit[0], dt_limit[1]))
    y, final = _scan(A, 1, hidden_states, dt, B, C, D, _float(initial_states), starts)
    return (y, final) if return_final_states else y


def mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    *,
    limit: _Limit = _ANY,
    **more: Any,
) -> Tensor:
    """``limit`` is that of the mixer's prefill, which Transformers' decoding does not have."""
    bias = None if dt_bias is None else _one_of(dt_bias, 1)
    dt = _steps(_one_of(dt, 2), bias, dt_softplus, limit)
    of_heads = _one_of(A, 2, 1).float(), B[:, None], C[:, None], None if D is None else _one_of(D, 1).float()
    y, final = _pydet.selective_scan(hidden_states[:, None], dt[:, None], *of_heads, state.float(), None)
    state.copy_(final)
    y = y[:, 0]
    return y if z is None else y * _pydet.activation(z, "silu")


def mamba_inner_fn(xz: Tensor, *operands: Any, **more: Any) -> None:
    """As mamba2_split_conv1d_scan_combined."""


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **more: Any,
) -> Any:
    """Each channel is a head of width 1. All but A, D and the bias are ``[batch, channels or states, tokens]``."""
    starts = _boundaries(hidden_states.shape[-1], more)
    dt = _steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    x, b, c = hidden_states.transpose(1, 2)[..., None], B.transpose(1, 2)[:, :, None], C.transpose(1, 2)[:, :, None]
    y, final = _scan(A, 2, x, dt, b, c, D, None, starts)
    y = y[..., 0].transpose(1, 2)
    if z is not None:
        y = y * _pydet.activation(z, "silu")
    return (y, final[:, :, 0]) if return_last_state else y


def mamba_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **more: Any,
) -> Tensor:
    dt, of_states = _steps(dt, dt_bias, dt_softplus), (B[:, None, None], C[:, None, None])
    x, initial = hidden_states[:, None, :, None], state[:, :, None].float()
    y, final = _pydet.selective_scan(x, dt[:, None], A.float(), *of_states, _float(D), initial, None)
    state.copy_(final[:, :, 0])
    y = y[:, 0, :, 0]
    return y if z is None else y * _pydet.activation(z, "silu")


# ---- The gated delta rule --------------------------------------------------------------------------------------------


def _normalised(x: Tensor, scale: float, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum of x^2 + eps)`` times scale, as an RMSNorm in fp32 whose weights are one number."""
    n = x.shape[-1]
    weight = torch.full((n,), scale * n**-0.5, dtype=torch.float32, device=x.device)
    y: Tensor = _pydet.rmsnorm(x.float(), weight, eps / n, 0.0)[0]
    return y


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    scale = query.shape[-1] ** -0.5
    if use_qk_l2norm_in_kernel:
        q, k = _normalised(query, scale), _normalised(key, 1.0)
    else:
        q, k = query.float() * scale, key
    starts = _boundaries(value.shape[1], more)
    o, final = _pydet.gated_delta(q, k, value, g, beta, _float(initial_state), starts)
    return o.to(query.dtype), final if output_final_state else None


def torch_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    first = query, key, value, g, beta
    return torch_chunk_gated_delta_rule(*first, 64, initial_state, output_final_state, use_qk_l2norm_in_kernel, **more)


# ---- Mixers ----------------------------------------------------------------------------------------------------------

_CONVOLUTION = (causal_conv1d_fn, causal_conv1d_update)
_FAMILIES = (  # what a mixer's forward calls, all of one line
    (
        *_CONVOLUTION,
        mamba2_split_conv1d_scan_combined,
        mamba2_chunk_scan,
        mamba2_selective_state_update,
    ),
    (*_CONVOLUTION, mamba_inner_fn, mamba_selective_scan, mamba_selective_state_update),
    (*_CONVOLUTION, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule),
    _CONVOLUTION,
)
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_SCANS = ("scan", "delta", "segment_sum", "selective_state")
_FUSED = (mamba2_split_conv1d_scan_combined, mamba_inner_fn)  # not of all mixers, and of any arguments


def _with_functions(function: Any, own: dict[str, Any]) -> Any:
    """A copy of a function that finds these by their names, under its decorators."""
    inner = getattr(function, "__wrapped__", None)
    names, cells = function.__globals__, function.__closure__
    if inner is None:
        names = {**names, **own}
    else:
        within = _with_functions(inner, own)
        cells = tuple(CellType(within) if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    if inner is not None:
        made.__wrapped__ = within  # type: ignore[attr-defined]
    return made


def _called(kind: Any) -> tuple[set[str], dict[str, Any]]:
    """The names in the code of a forward, and what its file has by them."""
    forward = inspect.unwrap(kind.forward)
    return set(forward.__code__.co_names), forward.__globals__


@functools.cache
def _forward(kind: Any, limit: _Limit) -> Any:
    names, _ = _called(kind)
    own: dict[str, Any] = {f.__name__: f for family in _FAMILIES for f in family if f.__name__ in names}
    if limit != _ANY:
        update = mamba2_selective_state_update
        own[update.__name__] = functools.partial(update, limit=limit)
    return _with_functions(kind.forward, own), mamba_selective_scan.__name__ in names


class _Steps(TorchFunctionMode):
    """Mamba's steps are a weight times what is across, written as a product: here those of a linear layer."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _PRODUCTS or kwargs or not isinstance(args[0], torch.nn.Parameter) or args[1].dim() != 3:
            return function(*args, **(kwargs or {}))
        weight, x, linear = args[0], args[1].transpose(1, 2), self.linear
        if weight is getattr(linear, "weight", None) and _accumulates(linear):
            how = linear.arithmetic, linear.k_chunk, None, part_of(linear)
            return AccumulatingLinear.apply(x, weight, None, *how).transpose(1, 2)
        return _pydet.skinny_gemm(x, weight).transpose(1, 2)


# ---- Training --------------------------------------------------------------------------------------------------------
#
# A parameter that all tokens or sequences share stands there once for each of them while a mixer is trained: what the
# mixer's own code makes of it is then done element by element, and the sum is here, in one order.


def _accumulates(module: Any) -> bool:
    return bool(getattr(module, "accumulates", False)) and torch.is_grad_enabled()


class _Repeated(torch.autograd.Function):
    """A parameter ``[...]`` as ``[*shape, ...]``, whose gradient is the chain over these, in ``ieee``."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shape: tuple[int, ...], accumulates: bool, dtype: torch.dtype) -> Tensor:
        if accumulates:
            check_own("Scan", parameter=parameter)
        ctx.parameter, ctx.accumulates = parameter, accumulates
        return parameter.detach().to(dtype).expand(*shape, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        parameter, total = ctx.parameter, None
        rows = gradient.reshape(-1, parameter.numel()).contiguous()
        ones = rows.new_ones((rows.shape[0], 1))
        if ctx.accumulates:
            into = adding(parameter).view(1, -1)
            pydet.gemm_db(ones, rows, out=into, accumulate=True, arithmetic="ieee")
        else:
            total = torch.ops.pydet.gemm(ones.t(), rows, None, torch.float32, "ieee", None)
            total = total.view(parameter.shape).to(parameter.dtype)
        return total, None, None, None


def _repeated(of: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    parameter = getattr(of, name, None)
    if parameter is None:
        return None
    return _Repeated.apply(parameter, shape, _accumulates(of) and parameter.requires_grad, dtype)


class _InPlaceOf:
    """A module that has some of its attributes otherwise."""

    def __init__(self, module: Any, **own: Any) -> None:
        self.__dict__.update(own, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._module(*arguments, **options)


class _GatedNorm(_InPlaceOf):
    """A norm that multiplies by its weight as its own code says."""

    def __call__(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        module = self._module
        weight = _repeated(module, "weight", tuple(x.shape[:-1]), module.weight.dtype)
        return type(module).forward(_with(module, {"weight": weight}, {}), x, *arguments, **options)


def _with(module: Any, parameters: dict[str, Any], modules: dict[str, Any]) -> Any:
    """A module of the same state, but for these."""
    kind: Any = type(module)
    other = kind.__new__(kind)
    own = {"_parameters": {**module._parameters, **parameters}, "_modules": {**module._modules, **modules}}
    other.__dict__.update({**module.__dict__, **own})
    return other


def _is_gated_norm(module: Any) -> bool:
    """One of a file of Transformers that only multiplies by its weight, as it is."""
    if not isinstance(module, torch.nn.Module) or list(module._parameters) != ["weight"]:
        return False
    names = inspect.unwrap(type(module).forward).__code__.co_names
    return "Gated" in type(module).__qualname__ and not {"view", "reshape"} & set(_of_weight(names))


def _of_weight(names: tuple[str, ...]) -> list[str]:
    """What comes right after the weight among the names of a forward."""
    return [after for name, after in itertools.pairwise(names) if name == "weight"]


_CONVOLUTIONS, _NORMS, _STEPS = ("conv1d", "conv"), ("norm", "o_norm"), ("dt_proj",)
OWN = ("A_log", "D", "dt_bias")  # that a mixer's backward can add to sums


def helpers(module: Any) -> list[Any]:
    """The modules of a mixer whose parameters it multiplies by itself."""
    found = [getattr(module, name, None) for name in _CONVOLUTIONS]
    found = [x for x in found if isinstance(x, torch.nn.Conv1d)]
    return found + [x for name in _NORMS if _is_gated_norm(x := getattr(module, name, None))]


def _trained(module: Any, x: Any, options: dict[str, Any]) -> Any:
    """The mixer, with its parameters once for each sequence or token."""
    batch, tokens = x.shape[:2]
    starts = _boundaries(tokens, options)
    sequences = (batch if starts is None else starts.shape[0] - 1,)
    names, _ = _called(type(module).__bases__[1])
    scans_over = {mamba2_chunk_scan.__name__: 1, mamba_selective_scan.__name__: 2}
    dims = next((n for name, n in scans_over.items() if name in names), 0)
    parameters: dict[str, Any] = {}
    for name in OWN:
        parameter = module._parameters.get(name)
        if parameter is None or (dims and name == "A_log" and parameter.dim() != dims):
            continue
        per_token = name == "dt_bias" or not dims
        parameters[name] = _repeated(module, name, (batch, tokens) if per_token else sequences)
    if dims and "A_log" not in parameters:
        parameters.pop("D", None)  # heads of heads, one by one
    modules: dict[str, Any] = {}
    for name in _CONVOLUTIONS:
        if isinstance(child := module._modules.get(name), torch.nn.Conv1d):
            modules[name] = _InPlaceOf(child, **{of: _repeated(child, of, sequences) for of in ("weight", "bias")})
    for name in _NORMS:
        if _is_gated_norm(child := module._modules.get(name)):
            modules[name] = _GatedNorm(child)
    if dims == 2 and isinstance(child := module._modules.get("dt_proj"), torch.nn.Linear):
        modules["dt_proj"] = _InPlaceOf(child, bias=_repeated(child, "bias", (batch, tokens)))
    return _with(module, parameters, modules)


def _is_trained(module: Any, x: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Where a cache is, its states are changed in place, and nothing is trained."""
    if not torch.is_grad_enabled() or not isinstance(x, Tensor) or x.dim() != 3:
        return False
    if any(hasattr(y, "update_conv_state") for y in (*arguments, *options.values())):
        return False
    return any(parameter.requires_grad for parameter in module.parameters())


class Scan(Derived, torch.nn.Module):
    """A mixer of Transformers' whose recurrence and convolution are pydet's."""

    accumulates = False  # see accumulate_gradients()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        limit: Any = getattr(self, "time_step_limit", _ANY)
        forward, multiplies = _forward(type(self).__bases__[1], (limit[0], limit[1]))
        x = arguments[0] if arguments else next((options[name] for name in _INPUTS if name in options), None)
        mixer = _trained(self, x, options) if _is_trained(self, x, arguments, options) else self
        if not multiplies:
            return forward(mixer, *arguments, **options)
        with _Steps(getattr(self, "dt_proj", None)):
            return forward(mixer, *arguments, **options)


_INPUTS = ("hidden_states", "x", "input_states")


def is_scan(module: Any) -> bool:
    return isinstance(module, Scan)


def scan_class(module: torch.nn.Module) -> Any:
    """What a mixer that scans becomes; why it stays; None of a module that is none, or calls functions of its own."""
    kind: Any = type(module)
    if not kind.__module__.startswith("transformers.") or is_scan(module):
        return None
    names, file = _called(kind)
    family = next((x for x in _FAMILIES if all(f.__name__ in names for f in x if f not in _FUSED)), None)
    if family is None:
        return None
    if torch.version.hip and any(parameter.is_cuda for parameter in module.parameters()):
        return "its recurrence has no kernel on AMD's GPUs"
    known = {function.__name__ for function in family}
    others = sorted(x for x in names - known if x in file and any(word in x for word in _SCANS))
    if others:
        return f"its {', '.join(others)} has no counterpart here"
    for function in family:
        name = function.__name__
        if function in _FUSED or name not in names:
            continue
        got = [x for x in inspect.signature(inspect.unwrap(file[name])).parameters if x not in ("kwargs", "more")]
        want = [x for x in inspect.signature(function).parameters if x not in ("more", "limit")]
        if got != want:
            return f"its {name} takes ({', '.join(got)}), and the one known here ({', '.join(want)})"
    return derived(Scan, kind)
