"""How an operator is registered: schema, kernel, shapes for tracing, and what lies above the kernels of the backends.

Kernels, shapes and gradients take every argument of the schema by place: what a caller leaves out is filled in here,
for a kernel as its function's own defaults, which cost a call nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from pydet._native import INVALID_VALUE, UNSUPPORTED, Error, constants, fail
from pydet.frameworks import type_index
from pydet.protocols import UNSCALED
from pydet.torch.ops.tracing import one_device

Tensor: TypeAlias = torch.Tensor
Dtype: TypeAlias = torch.dtype | None
Call: TypeAlias = Callable[..., Any]

DTYPES = tuple(getattr(torch, name) for name in UNSCALED)
GEMM_OPTIONS = 'ScalarType? out_dtype=None, str arithmetic="auto", int? k_chunk=None'

_library = torch.library.Library("pydet", "DEF")
_listeners = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_autocasts = torch._C._is_any_autocast_enabled
_profiles = torch._C._autograd._profiler_enabled
_traces = torch._C._get_tracing_state
_OWN = (torch.Tensor, torch.nn.Parameter)
_straight: dict[str, Call] = {}


def _attended() -> bool:
    """Whether something is there for which the dispatcher does more than call a kernel: modes, transforms, autocast,
    a profiler, a trace, tangents."""
    return bool(
        _functions()
        or _listeners()
        or _transforms()
        or _autocasts()
        or forward_ad._current_level >= 0
        or _profiles()
        or _traces() is not None
    )


def straight(name: str) -> Call:
    """An operator as functions and modules call it: all of its arguments by place."""
    return _straight[name]


def define(
    schema: str,
    run: Call,
    fake: Call,
    *,
    gradient: Call | None = None,
    vmap: Call | None = None,
    autocast: int = 0,
    composite: bool = False,
    first: Call | None = None,
) -> Call:
    """Registers an operator.

    Args:
        schema: its name and signature.
        run: the kernel, a function of Python if the schema has defaults. An operand whose rows the library cannot walk
            it gets as a copy.
        fake: the empty results, of tensors without memory.
        gradient: what is called if a tensor asks for one: the `apply` of a torch.autograd.Function. None: such tensors
            are refused.
        vmap: makes of the operator the rule of torch.vmap.
        autocast: how many of the first operands take the type that torch.autocast names.
        composite: the kernel is made of torch's own operations, which only the dispatcher gives what it is meant for.
        first: of such a kernel what is no more than one call of the library's, and None where that will not do.

    Returns:
        The operator below autograd, as a gradient's forward calls it.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.pydet, name)
    arguments = operator.default._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = tuple(x.default_value if x.has_default_value() else None for x in arguments)
    places = [i for i, x in enumerate(arguments) if "Tensor" in str(x.type)]
    tensors = 1 + places[-1]
    last = tuple(x.default_value for x in arguments if x.has_default_value())
    run = _with_defaults(run, len(arguments), last)
    alone = run if not composite else None if first is None else _with_defaults(first, len(arguments), last)

    def kernel(*given: Any) -> Any:
        try:
            return run(*given)
        except Error as problem:
            if problem.status != constants.PYDET_INVALID_STRIDE:
                raise
        return run(*(x.contiguous() if isinstance(x, Tensor) else x for x in given))

    def traced(*given: Any, **named: Any) -> Any:
        given += defaults[len(given) :]
        given = tuple(named.get(argument, x) for argument, x in zip(names, given, strict=True))
        one_device(name, zip(names, given, strict=True))
        return fake(*given)

    def below(*given: Any) -> Any:
        """The kernel at once (through the dispatcher a small call takes half as long again), unless a mode listens.

        What the kernel refuses for what it is (lazily negated, meta, fake, a wrapper of torch.func, a subclass, strides
        that want a copy) goes by the dispatcher, which resolves it or words the refusal.
        """
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, given)
        if alone is not None and not _listeners():
            try:
                if (found := alone(*given)) is not None:
                    return found
            except Error as problem:
                if problem.status not in (INVALID_VALUE, constants.PYDET_INVALID_STRIDE):
                    raise
        with torch._C._AutoDispatchBelowAutograd():
            return operator.default(*given)

    def above(*given: Any) -> Any:
        if torch.is_grad_enabled():
            for x in given[:tensors]:
                if isinstance(x, Tensor) and x.requires_grad:
                    return differentiated(given + defaults[len(given) :])
        return below(*given)

    def differentiated(given: tuple[Any, ...]) -> Any:
        if gradient is None:
            _refuse_gradient(name)
        if forward_ad._current_level >= 0 or _transforms():
            _refuse_transforms(name)
        return gradient(*given)

    def straight(*given: Any) -> Any:
        """The operator. Through the dispatcher a small call takes twice as long: what it would do more than call the
        kernel is looked for here."""
        if not is_compiling() and not _attended():
            records = torch.is_grad_enabled()
            for i in places:
                if i >= len(given):
                    continue
                x = given[i]
                if x is not None and (type(x) not in _OWN or (records and x.requires_grad)):
                    break
            else:
                try:
                    if (found := alone(*given)) is not None:  # type: ignore[misc]
                        return found
                except Error as problem:
                    if problem.status not in (INVALID_VALUE, constants.PYDET_INVALID_STRIDE):
                        raise
        return operator.default(*given)

    if alone is not None:
        _straight[name] = straight
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, above, "Autograd")
    torch.library.register_fake(f"pydet::{name}", traced, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(f"pydet::{name}", vmap(operator), lib=_library)
    for device in ("cpu", "cuda") if autocast else ():
        _library.impl(name, _under_autocast(operator.default, device, autocast), f"Autocast{device.upper()}")
    return below


def _with_defaults(run: Call, parameters: int, defaults: tuple[Any, ...]) -> Call:
    """A copy of `run`, a function of so many parameters, whose last ones have these defaults."""
    if not defaults:
        return run
    of = cast(FunctionType, run)
    assert of.__code__.co_argcount == parameters, f"{of.__name__} does not take the schema's arguments"
    return cast(Call, FunctionType(of.__code__, of.__globals__, of.__name__, defaults, of.__closure__))


def define_norm(
    schema: str,
    run: Call,
    fake: Call,
    function: type[torch.autograd.Function],
    of: Callable[..., tuple[Any, ...]],
    shared: tuple[int, ...],
) -> None:
    """Registers a norm that has some of the operands.

    `of` puts an operator's arguments in the places of all: x, residual, weight, bias, eps, weight_offset. So `fake`
    takes them; `shared` is for `vmap_rows`. `function` takes a `Norm` and then the operator's own arguments, since
    each argument of an autograd function costs a call.
    """
    norm = Norm(of, len(torch._C.parse_schema(schema).arguments))
    gradient = partial(function.apply, norm)
    norm.below = define(schema, run, lambda *given: fake(*of(*given)), gradient=gradient, vmap=vmap_rows(*shared))


class Norm:
    """One operator of a norm, for its autograd function: what is below it, and where its arguments stand among all."""

    below: Call

    def __init__(self, of: Callable[..., tuple[Any, ...]], arguments: int) -> None:
        self.of = of
        places = of(*range(arguments))
        self._places = [places.index(i) for i in range(arguments)]

    def gradients(self, *of_all: Any) -> tuple[Any, ...]:
        """What backward returns, of the gradients of all that a norm takes."""
        return None, *[of_all[i] for i in self._places]


def _refuse_gradient(name: str) -> NoReturn:
    fail(
        INVALID_VALUE,
        f"{name}: an operand requires grad, and this has no gradient; use torch.no_grad() or .detach(). If backward "
        "called it: a second derivative (create_graph=True) is not defined",
    )


def _refuse_tangents(name: str, given: tuple[Any, ...]) -> None:
    if any(forward_ad.unpack_dual(x).tangent is not None for x in given if isinstance(x, Tensor)):
        fail(UNSUPPORTED, f"{name}: no forward-mode gradient (jvp) is defined")


def _refuse_transforms(name: str) -> NoReturn:
    fail(
        UNSUPPORTED,
        f"{name}: the gradients of torch.func (grad, vjp, jvp, jacrev) are not defined; backward() and "
        "torch.autograd.grad() are",
    )


def index_of(dtype: Dtype) -> int | None:
    """A type as the library's methods take it."""
    return None if dtype is None else type_index(dtype, "pydet.torch")


def _under_autocast(overload: Call, device: str, operands: int) -> Call:
    """Operands in the type that torch.autocast names, as for torch.mm; a bias keeps its own, and is added in fp32."""
    off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def kernel(*given: Any, **options: Any) -> Any:
        dtype, (first, rest) = torch.get_autocast_dtype(device), (given[:operands], given[operands:])
        first = tuple(x.to(dtype) if x.dtype in DTYPES and not x.is_meta else x for x in first)
        with torch._C._ExcludeDispatchKeyGuard(off):
            return overload(*first, *rest, **options)

    return kernel


def vmap_rows(*shared: int) -> Call:
    """The rule of what works row by row: `shared` operands must not be batched, since each row takes the same."""

    def of(operator: Any) -> Call:
        results = len(operator.default._schema.returns)

        def rule(info: Any, dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
            name = operator.__name__
            if any(i < len(dims) and dims[i] is not None for i in shared):
                fail(UNSUPPORTED, f"{name}: vmap over the weights is not defined; it is over the rows")
            if any(isinstance(x, Tensor) and dims[i] is None for i, x in enumerate(given) if i not in shared):
                fail(UNSUPPORTED, f"{name}: vmap wants all operands of rows batched")
            result = operator(*(x if dims[i] is None else x.movedim(dims[i], 0) for i, x in enumerate(given)))
            return result, 0 if results == 1 else (0,) * results

        return rule

    return of
