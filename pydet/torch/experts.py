"""Mixtures of experts whose tokens do not feel each other: routing, the experts' two layers, and the weighted sum.

Tokens are sorted by expert and multiplied by :func:`pydet.grouped_gemm`. A token's results are added in the order of
its slots by ``out = fmaf(weight, result, out)`` in fp32 from +0 and rounded once: that is the product of a row of
weights and a matrix of results in arithmetic ``ieee`` (:func:`pydet.gemm`, one batch a token), whose fused multiply-add
is exactly rounded on every backend. Nothing is added by ``index_add_``, forward or backward.

:func:`register_experts` gives it to Transformers as ``experts_implementation="pydet"``; :func:`pydet.torch.convert`
does that by itself, and makes the routers pydet's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from pydet._native import UNSUPPORTED, fail
from pydet.ops import Arithmetic
from pydet.torch import functions
from pydet.torch.accumulate import AccumulatingExperts, AccumulatingLinear
from pydet.torch.experts_fp8 import Fp8Experts

Tensor: TypeAlias = torch.Tensor

NAME = "pydet"  # by which Transformers knows these experts
_INTERFACE = ("config", "num_experts", "has_gate", "has_bias", "is_transposed", "down_proj")


# ---- Routing ---------------------------------------------------------------------------------------------------------


class Routing(NamedTuple):
    """Tokens times slots, sorted by expert: where each comes from, where it is now, and where an expert's end."""

    order: Tensor
    inverse: Tensor
    ends: Tensor


def inverse_of(order: Tensor) -> Tensor:
    """Where each row is now."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    return places


def route(index: Tensor, experts: int) -> Routing:
    """Of an expert's tokens the earlier come first. What is of no expert here (in expert parallelism) comes last."""
    # A GPU sorts by eight bits of a number at a time: of 64 bits it takes four times as long.
    short = torch.int16 if experts < 2**15 else torch.int64
    ids, order = torch.sort(index.reshape(-1).clamp(-1, experts).to(short), stable=True)
    numbers = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    return Routing(order, inverse_of(order), torch.searchsorted(ids, numbers, right=True, out_int32=True))


class ToExperts(torch.autograd.Function):
    """A row for each slot of each token, sorted; the gradient of a token sums its slots in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens = x.shape[0]
        return x[order // max(order.shape[0] // max(x.shape[0], 1), 1)]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        slots = inverse.shape[0] // max(ctx.tokens, 1)
        rows = dy[inverse].view(ctx.tokens, slots, dy.shape[1])
        ones = dy.new_ones((ctx.tokens, 1, slots))
        return torch.ops.pydet.gemm(ones, rows, None, None, "ieee")[:, 0], None, None


class FromExperts(torch.autograd.Function):
    """The rows in the order in which they were before."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[inverse]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy[ctx.saved_tensors[0]], None, None


def combine(rows: Tensor, weights: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """The sum of a token's results times its weights, in the order of its slots."""
    return sum_of_slots(FromExperts.apply(rows, routing.order, routing.inverse), weights, dtype)


def sum_of_slots(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`combine` of rows that lie by tokens and their slots."""
    common = torch.promote_types(rows.dtype, weights.dtype)
    rows = rows.to(common).view(*weights.shape, rows.shape[1])
    with torch.autocast(rows.device.type, enabled=False):
        return torch.ops.pydet.gemm(weights.to(common)[:, None], rows, None, dtype, "ieee")[:, 0]


def product(
    module: Any, rows: Tensor, w: Tensor, bias: Tensor | None, ends: Tensor, transposed: bool, *how: Any
) -> Tensor:
    """Of rows that lie by experts, by matrices ``[E, N, K]``, or transposed ``[E, K, N]``, of a module, which may add
    their gradient to sums. how: arithmetic and k_chunk."""
    rows = rows.to(w.dtype)
    if getattr(module, "accumulates", False) and torch.is_grad_enabled():
        y: Tensor = AccumulatingExperts.apply(rows, w, bias, ends, transposed, *how)
        return y
    return torch.ops.pydet.grouped_gemm(rows, w if transposed else w.mT, ends, bias, None, *how)


# ---- Experts of Transformers -----------------------------------------------------------------------------------------


def is_experts(module: Any) -> bool:
    """Whether it is a layer of experts that asks Transformers' interface of them which code is to compute it."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return hasattr(type(module).forward, "__wrapped__") and all(hasattr(module, name) for name in _INTERFACE)


def of_pydet(module: Any) -> bool:
    """Whether it is a layer of experts that was converted."""
    return is_experts(module) and "arithmetic" in module.__dict__ and module.config._experts_implementation == NAME


def layers_of(module: Any, rows: Tensor, product: Callable[[Tensor, str], Tensor]) -> Tensor:
    """The results of rows that lie by experts; product(rows, name) multiplies them by a layer's matrices."""
    if module.has_gate:
        rows = module._apply_gate(product(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(product(rows, "up_proj"))
    rows = product(rows, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return rows


def _forward(
    how: tuple[Arithmetic, int | None], module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What Transformers calls, with its names: ``[T, H]``, the experts of a token ``[T, slots]``, and their weights."""
    how = (module.arithmetic, module.k_chunk) if hasattr(module, "arithmetic") else how
    if (shares := getattr(module, "pydet_shares", None)) is not None:  # distributed.shard_experts()
        y: Tensor = shares.forward(module, how, hidden_states, top_k_index, top_k_weights)
        return y
    routing = route(top_k_index, module.num_experts)

    def by_name(rows: Tensor, name: str) -> Tensor:
        if isinstance(module, Fp8Experts):
            return module.product(rows, name, routing.ends)
        w, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
        return product(module, rows, w, bias, routing.ends, module.is_transposed, *how)

    rows = layers_of(module, ToExperts.apply(hidden_states, routing.order, routing.inverse), by_name)
    return combine(rows, top_k_weights, routing, hidden_states.dtype)


def _interface() -> Any:
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as problem:
        fail(UNSUPPORTED, f"register_experts: Transformers 5 or later is not here ({problem})")
    return ALL_EXPERTS_FUNCTIONS


def register_experts(name: str = NAME, *, arithmetic: Arithmetic = "auto", k_chunk: int | None = None) -> None:
    """Registers pydet's experts with Transformers, for ``experts_implementation=name``. :func:`convert` does it too.

    Args:
        name: by which Transformers knows them.
        arithmetic, k_chunk: of their products, as in :func:`pydet.gemm`, in models that were not converted.

    Raises:
        Error: Transformers (5 or later) is not here.
    """
    type(_interface()).register(name, functools.partial(_forward, (arithmetic, k_chunk)))


def know_pydet() -> None:
    """Registers pydet's experts with Transformers, where they are not."""
    interface = _interface()
    if NAME not in interface:
        register_experts()
    try:  # where Transformers asks of layers that a checkpoint has in fp8
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS as of_fp8
    except ImportError:
        pass
    else:
        if NAME not in of_fp8:
            type(of_fp8).register(NAME, interface[NAME])


def use_pydet(module: Any) -> None:
    """Has Transformers compute a layer of experts, and those that share its configuration, with pydet."""
    know_pydet()
    module.config._experts_implementation = NAME


# ---- Routers ---------------------------------------------------------------------------------------------------------


class _Linears(TorchFunctionMode):
    """While active, ``torch.nn.functional.linear`` is pydet's."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.router = router

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            return self.router.linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class Router(torch.nn.Module):
    """What a router is beside its own class: its logits are :func:`pydet.torch.linear`. The rest stays its own."""

    arithmetic: Arithmetic
    k_chunk: int | None
    weight: torch.nn.Parameter
    accumulates = False  # see accumulate_gradients()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with _Linears(self):
            return super().forward(*arguments, **options)

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """The logits. The weight may be given in another type than it is kept in."""
        how: dict[str, Any] = {"arithmetic": self.arithmetic, "k_chunk": self.k_chunk}
        if self.accumulates and torch.is_grad_enabled():
            y: Tensor = AccumulatingLinear.apply(x, self.weight, bias, *how.values(), w.dtype)
            return y
        return functions.linear(x, w, bias, **how)

    def __reduce__(self) -> Any:
        return _new_router, (type(self).__mro__[2],), self.__dict__


_router_classes: dict[type, Any] = {}


def router_class(kind: type) -> Any:
    """A router of the class `kind`, and still an instance of it: Transformers finds its logits by that."""
    if kind not in _router_classes:
        _router_classes[kind] = type(f"{kind.__name__}OfPydet", (Router, kind), {"__module__": __name__})
    return _router_classes[kind]


def _new_router(kind: type) -> Any:
    made = router_class(kind)
    return made.__new__(made)


class _Recorded(TorchFunctionMode):
    """Notes which functions multiply matrices."""

    products = (
        *("linear", "matmul", "rmatmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv"),
        *("einsum", "dot", "inner", "outer", "tensordot"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        if name in self.products:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def routers_of(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules beside experts that have one matrix, with a row for each of them."""
    found: set[torch.nn.Module] = set()
    for block in model.modules():
        children = list(block.children())
        for experts in filter(is_experts, children):
            for module in children:
                own = dict(module.named_parameters(recurse=False))
                matrices = [name for name, parameter in own.items() if parameter.dim() > 1]
                if matrices == ["weight"] and own["weight"].shape[0] == experts.num_experts:
                    found.add(module)
    return found


def why_no_router(module: Any) -> str | None:
    """Why what stands where a router does cannot be made pydet's; None if it can: if it makes one product, a linear's.
    It is tried on the meta device, where there are no numbers. What its forward wants beside rows has, as a correction
    of the scores has, a number for each expert."""
    kind: Any = type(module)
    experts, size = module.weight.shape
    more = list(inspect.signature(kind.forward).parameters.values())[2:]
    wanted = [p for p in more if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    meta: dict[str, Any] = {"dtype": module.weight.dtype, "device": "meta"}
    rows, others = torch.empty((2, size), **meta), [torch.empty((experts,), **meta) for _ in wanted]
    try:
        with torch.no_grad(), _Recorded() as recorded:
            kind.forward(_on_meta(module), rows, *others)
    except Exception as problem:  # whatever it is, it is not a function of rows
        return f"its forward could not be tried: {type(problem).__name__}: {problem}"
    if recorded.seen != ["linear"]:
        return (
            f"its products are ({', '.join(recorded.seen)}), and a router's is one linear; override_aten() catches them"
        )
    return None


def _on_meta(module: Any) -> Any:
    """A module like it, with those inside it, whose tensors have no numbers."""
    kind: Any = type(module)
    stand_in = kind.__new__(kind)
    stand_in.__dict__.update(module.__dict__)
    for kept in ("_parameters", "_buffers"):
        held = {name: None if x is None else x.detach().to("meta") for name, x in getattr(module, kept).items()}
        stand_in.__dict__[kept] = held
    inner = {name: None if child is None else _on_meta(child) for name, child in module._modules.items()}
    stand_in.__dict__["_modules"] = inner
    return stand_in
