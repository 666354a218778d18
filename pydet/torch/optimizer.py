"""AdamW as one written formula in fp32, whose bits depend on an element's own gradients alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch

from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, Error, constants, fail, try_load
from pydet.ops import ADAMW_TENSORS, adamw
from pydet.torch.ops.register import DTYPES

Tensor = torch.Tensor


_STATE = ("step", "beta1_power", "beta2_power", "exp_avg", "exp_avg_sq")
# What a group may have beside the options: names of parameters, and what a scheduler starts from.
_BESIDE = ("params", "param_names", "initial_lr")
# Options of PyTorch's own, which its groups have, and how those are that change nothing here.
_THEIRS = {"amsgrad": False, "maximize": False, "foreach": None, "fused": None, "capturable": False}
_THEIRS |= {"differentiable": False, "decoupled_weight_decay": True}


_INFINITE = 2.0**128 - 2.0**103  # what fp32 rounds to infinity, from here on


def _rounded(x: float) -> float:
    """To fp32, so that no backend's own conversion of a number has a part in the bits."""
    return float(torch.tensor(x, dtype=torch.float64, device="cpu").to(torch.float32))


def own_gradient(parameter: Any) -> Any:
    """Where a parameter's gradient comes: ``main_grad`` of one that accumulates, else ``grad``, which may be None."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def exact_sqrt(x: Tensor) -> Tensor:
    """Of fp32, rounded to nearest: PyTorch's own on a CPU is off in some of a hundred. In double it is exact enough, as
    no root of an fp32 number is within 2^-50 of the middle between two."""
    return x.to(torch.float64).sqrt_().to(torch.float32)


_PLAIN = (Tensor, torch.nn.Parameter)
_FLOAT32, _STRIDED = torch.float32, torch.strided


def _local(x: Any) -> Any:
    """What this rank has of a DTensor."""
    return x.detach().to_local() if type(x) not in _PLAIN and hasattr(x, "to_local") else x


class _Numbers(NamedTuple):
    """Of one step, as pydet.adamw takes them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    beta_powers: tuple[float, float]


# Of one parameter, what this rank has of it, of its gradient, exp_avg, exp_avg_sq and master, which is None where the
# parameter is float32.
_Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


@functools.cache
def _is_served(device: str) -> bool:
    """Whether a library here has the step for devices of a type."""
    indices = {"cpu": constants.PYDET_EXCHANGE_CPU, "cuda": constants.PYDET_EXCHANGE_CUDA}
    if torch.version.hip:
        indices["cuda"] = constants.PYDET_EXCHANGE_ROCM
    return device in indices and try_load(indices[device])[0] is not None


def _are_plain(parameter: Any, gradient: Any, exp_avg: Any, exp_avg_sq: Any, master: Any) -> bool:
    """Whether none of them is of a subclass, which may have a dispatch of its own."""
    if type(parameter) not in _PLAIN or type(gradient) not in _PLAIN:
        return False
    return type(exp_avg) is type(exp_avg_sq) is Tensor and (master is None or type(master) is Tensor)


def _lie_alike(tensors: _Tensors) -> bool:
    """Whether an element has one place in all of them."""
    there = [x for x in tensors if x is not None]
    return all(x.is_contiguous() for x in there) or all(x.stride() == there[0].stride() for x in there)


# What pydet.adamw refuses and operations of PyTorch's take: tensors in different orders, gaps in them, memory that they
# share, older GPUs.
_LEFT = (constants.PYDET_OVERLAP, constants.PYDET_INVALID_STRIDE, constants.PYDET_MISALIGNED, UNSUPPORTED)


def _step_fused(numbers: _Numbers, some: list[_Tensors]) -> None:
    """By the library's kernel, up to ADAMW_TENSORS at a time. What it refuses it has not begun: of those it takes the
    ones that lie alike, and operations of PyTorch's the others."""
    for first in range(0, len(some), ADAMW_TENSORS):
        few = some[first : first + ADAMW_TENSORS]
        try:
            adamw(*zip(*few, strict=True), **numbers._asdict())
        except Error as refusal:
            if refusal.status not in _LEFT:
                raise
            alike = [_lie_alike(tensors) for tensors in few]
            again = any(alike) and not all(alike)
            if again:
                _step_fused(numbers, [tensors for tensors, one in zip(few, alike, strict=True) if one])
            for tensors, one in zip(few, alike, strict=True):
                if not (again and one):
                    _step_composed(numbers, tensors)


def _step_composed(numbers: _Numbers, tensors: _Tensors) -> None:
    """The same bits by PyTorch's elementwise operations, each of which IEEE 754 rounds, wherever it has them."""
    now, gradient, m, v, master = tensors
    (beta1, beta2), lr = numbers.betas, numbers.lr
    g, w = gradient.to(torch.float32), now if master is None else master
    if master is not None:  # of elements that were written since the last step it is what was written
        w.copy_(torch.where(w.to(now.dtype) == now, w, now.to(torch.float32)))
    m.mul_(_rounded(beta1)).add_(g * _rounded(1 - beta1))
    v.mul_(_rounded(beta2)).add_((g * _rounded(1 - beta2)).mul_(g))
    d = exact_sqrt(v).mul_(_rounded(1 / math.sqrt(1 - numbers.beta_powers[1]))).add_(_rounded(numbers.eps))
    change = (m * _rounded(lr / (1 - numbers.beta_powers[0]))).div_(d)
    w.mul_(_rounded(1 - lr * numbers.weight_decay)).sub_(change)
    if master is not None:
        now.copy_(master)
    for x in (now, m, v, *([] if master is None else [master])):
        bits, nan = (torch.int32, 0x7FFFFFFF) if x.dtype == torch.float32 else (torch.int16, 0x7FFF)
        x.view(bits).masked_fill_(x.isnan(), nan)


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` by one formula, each step of it rounded to fp32, on whatever backend and number of ranks.

    Of each element by itself, t = 1, 2, ... the step, fl() to fp32, numbers in braces made in double, rounded once::

        m = fl(fl({beta1} m) + fl({1 - beta1} g))
        v = fl(fl({beta2} v) + fl(fl({1 - beta2} g) g))
        d = fl(fl(fl(sqrt(v)) {1 / sqrt(1 - beta2^t)}) + {eps})
        w = fl(fl(w {1 - lr weight_decay}) - fl(fl({lr / (1 - beta1^t)} m) / d))

    beta^t is the product of t factors. Every operation is one that IEEE 754 rounds: no fused multiply-add, no
    reciprocal. So bits do not depend on vectors, threads, the tensor's width, the device, or how the parameters are
    shared out (NUMERICS.md, "AdamW"). On CPUs and GPUs it is :func:`pydet.adamw`, many parameters at a time; where
    tensors of a parameter lie in different orders, or on other devices, PyTorch's elementwise operations. ``step`` is
    not compiled, and not captured by CUDA graphs, which would repeat its numbers. w is the parameter, or,
    where that is not float32, a float32 copy in the state (``master``), which is rounded to the parameter after each
    step; an element of the parameter that is no longer its rounding, as of weights that were loaded, it takes over. g
    is ``main_grad`` of a parameter of :func:`accumulate_gradients`, else ``grad``, as fp32.

    Args:
        params: as in ``torch.optim.AdamW``: parameters, or groups of them. A DTensor's shard is updated where it lies.
        lr, betas, eps, weight_decay: as there; weight decay is decoupled. Each rank steps with its own: they are not
            compared between ranks.

    Raises:
        Error: a parameter that is not float32, bfloat16 or float16, a gradient of another shape or that is sparse,
            options out of range, a group with a key that is none of these.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            _check_group(group)
        self._hide()

    def _hide(self) -> None:
        """The loop from torch.compile."""
        self._run = torch.compiler.disable(type(self)._run.__get__(self))  # type: ignore[method-assign]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hide()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in ``torch.optim``; a key that would have no effect is refused."""
        for name, value in param_group.items():
            if name in _THEIRS and bool(value) != bool(_THEIRS[name]):
                fail(UNSUPPORTED, f"AdamW: {name} is {value}, want it left out: the formula has no such step")
            if name not in (*_BESIDE, *_THEIRS, *self.defaults):
                fail(INVALID_VALUE, f"AdamW: a group has {name}, want {', '.join(self.defaults)} alone")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for all parameters that have a gradient.

        Args:
            closure: computes the loss again, with gradients, as in ``torch.optim``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._run()
        return loss

    def _run(self) -> None:
        """Nothing is kept from one step to the next but the state: whatever was replaced since is read as it is."""
        found = []
        for group in self.param_groups:
            _check_group(group)
            beta1, beta2 = group["betas"]
            lr, eps, weight_decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
            numbers = _Numbers(lr, (float(beta1), float(beta2)), eps, weight_decay, (1.0, 1.0))
            pairs = []
            for parameter in group["params"]:
                gradient = own_gradient(parameter)
                if gradient is not None:
                    _check_gradient(parameter, gradient)
                    pairs.append((parameter, gradient))
            found.append((numbers, pairs))
        on_cuda = torch.cuda.is_initialized() and any(p.is_cuda for _, pairs in found for p, _ in pairs)
        if on_cuda and torch.cuda.is_current_stream_capturing():
            fail(UNSUPPORTED, "AdamW: a CUDA graph captures the step, want it outside: it has other numbers each time")
        lists: dict[_Numbers, dict[Any, list[_Tensors]]] = {}  # of what a step takes together
        for numbers, pairs in found:
            self._begin(numbers.betas, pairs, lists.setdefault(numbers, {}))
        for numbers, of_numbers in lists.items():
            for (power1, power2, device, plain), some in of_numbers.items():
                now = numbers._replace(beta_powers=(power1, power2))
                if plain and _is_served(device.type):
                    _step_fused(now, some)
                else:
                    for tensors in some:
                        _step_composed(now, tensors)

    def _begin(
        self, betas: tuple[float, float], pairs: list[tuple[Any, Any]], lists: dict[Any, list[_Tensors]]
    ) -> None:
        """Counts a step of each parameter in its state, and lists its tensors with those that have the same powers of
        the betas, lie on the same device, and are all plain memory or not."""
        beta1, beta2 = betas
        states = self.state
        for parameter, gradient in pairs:
            state = states[parameter]
            if not state:
                state |= {"step": 0, "beta1_power": 1.0, "beta2_power": 1.0}
                state |= {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
            if parameter.dtype is _FLOAT32:
                if "master" in state:
                    del state["master"]  # of a state that was saved beside another type
            elif "master" not in state:
                state["master"] = parameter.detach().to(torch.float32)
            state["step"] += 1
            state["beta1_power"] = power1 = state["beta1_power"] * beta1
            state["beta2_power"] = power2 = state["beta2_power"] * beta2
            tensors = parameter, gradient, state["exp_avg"], state["exp_avg_sq"], state.get("master")
            if not (plain := _are_plain(*tensors)):
                tensors = tuple(map(_local, tensors))
                plain = _are_plain(*tensors)
            key = power1, power2, tensors[0].device, plain
            if (some := lists.get(key)) is None:
                some = lists[key] = []
            some.append(tensors)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``torch.optim``; ``main_grad`` becomes zeros."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "main_grad", None) is not None:
                    parameter.main_grad.zero_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``, but that the state stays in fp32 where parameters are not. The state of another
        optimizer is refused."""
        for state in state_dict["state"].values():
            if lacks := [name for name in _STATE if name not in state]:
                fail(INVALID_VALUE, f"AdamW: a state has no {lacks[0]}, want that of a pydet.torch.AdamW")
        for group in state_dict["param_groups"]:
            _check_group(group)
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in zip(ids, own, strict=True):
            for name, x in state_dict["state"].get(i, {}).items():
                if isinstance(x, Tensor):
                    self.state[parameter][name] = x.detach().to(parameter.device, torch.float32, copy=True)


def _check_group(group: dict[str, Any]) -> None:
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= x < 1 for x in betas):
        fail(INVALID_VALUE, f"AdamW: betas is {betas}, want two numbers from 0 to below 1")
    for name in ("amsgrad", "maximize"):  # of a group, or of a state that was loaded
        if group.get(name):
            fail(UNSUPPORTED, f"AdamW: {name} is {group[name]}, want it left out: the formula has no such step")
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if not isinstance(value, Real | Tensor) or not 0 <= float(value) < _INFINITE:
            fail(INVALID_VALUE, f"AdamW: {name} is {group[name]}, want a finite number of 0 or more in float32")


def _check_gradient(parameter: Any, gradient: Any) -> None:
    if parameter.dtype not in DTYPES:
        fail(INVALID_DTYPE, f"AdamW: a parameter is {parameter.dtype}, want float32, bfloat16 or float16")
    if gradient.layout is not _STRIDED:
        fail(UNSUPPORTED, "AdamW: a gradient is sparse, want a dense one")
    if gradient.shape != parameter.shape or gradient.dtype not in DTYPES:
        got, want = f"{gradient.dtype} {tuple(gradient.shape)}", tuple(parameter.shape)
        fail(constants.PYDET_INVALID_SHAPE, f"AdamW: a gradient is {got}, want a floating-point one of {want}")
    if type(parameter) in _PLAIN and type(gradient) in _PLAIN:
        return
    placements = getattr(parameter, "placements", None)
    if placements is not None or hasattr(gradient, "placements"):
        own = getattr(gradient, "placements", None)
        if own != placements or any(p.is_partial() for p in own or ()):
            fail(UNSUPPORTED, f"AdamW: a gradient is placed as {own}, want its parameter's {placements}")
