"""The masks that pydet's attention hands to models of Transformers.

A model asks once for its mask and gives it to each attention. What it asks for says which keys a query sees, so it is
what counts: whether a module says that it is causal (``is_causal``) does not, which is wrong in some and missing in
others. So a mask is there whenever it is causal; where it would be long and say little it is a :class:`Causal` or
:class:`All`, which hold one element.

Attention that a model writes out does arithmetic with the same mask. It is written for bool masks (True: takes part) or
for masks that are added to scores (0: takes part), and ours is bool. So what is added to scores is a mask that was made
for that; what means the same for both, or can be meant for a bool mask only, is done; and the rest is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pydet._native import UNSUPPORTED, fail

Tensor: TypeAlias = torch.Tensor

# Functions, by their names. What does not read elements:
_SAYS = frozenset(
    (
        *("__get__", "__hash__", "__len__", "__set__", "_has_symbolic_sizes_strides", "_is_view", "_is_zerotensor"),
        *("dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous", "is_floating_point"),
        *("is_inference", "is_neg", "is_pinned", "is_same_size", "ndimension", "nelement", "numel", "record_stream"),
        *("requires_grad_", "size", "storage_offset", "stride", "untyped_storage"),
    )
)
_VIEWS = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real"))  # are such too
# What leaves a mask as it is; and what moves its elements about:
_SAME = frozenset(("alias", "cpu", "cuda", "detach", "to"))
_MOVES = frozenset(
    (
        *("__deepcopy__", "__getitem__", "__iter__", "cat", "chunk", "clone", "concat", "concatenate", "contiguous"),
        *("expand", "expand_as", "flatten", "gather", "index_select", "narrow", "permute", "repeat", "select", "split"),
        *("repeat_interleave", "reshape", "squeeze", "stack", "tile", "transpose", "unbind", "unflatten", "unsqueeze"),
        *("view", "view_as", "__repr__", "tolist", "numpy", "item"),
    )
)
_OF_BOOL = frozenset(  # nobody does these with a mask that is added: what comes of them is any tensor
    (
        *("__and__", "__iand__", "__invert__", "__ior__", "__or__", "__rand__", "__ror__", "bitwise_and"),
        *("bitwise_not", "bitwise_or", "logical_and", "logical_not", "logical_or", "scaled_dot_product_attention"),
    )
)
_BY_CONDITION = {"where": 0, "masked_fill": 1, "masked_fill_": 1, "__getitem__": 1, "__setitem__": 1}
_ADDS = frozenset(("__add__", "__iadd__", "__radd__", "add", "add_"))
_WRITES = frozenset(("__iadd__", "__iand__", "__ior__", "__setitem__", "add_", "masked_fill_"))


class Mask(torch.Tensor):
    """Bool, ``[B, 1, Q, K]``: True where a key takes part."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name in _SAYS and func not in _VIEWS:
                return func(*args, **kwargs)
            if isinstance(func, torch._ops.OpOverload):  # of a graph, in which this was traced, and elements_of()
                if name == "alias.default":
                    return elements_of(args[0])
                if func.namespace == "pydet":
                    return func(*elements_of(args), **{key: elements_of(x) for key, x in kwargs.items()})
            if name == "to" and any(isinstance(x, Tensor | torch.dtype) for x in (*args[1:], *kwargs.values())):
                return _refuse(name)
            kind = type(args[0])
            if name in _SAME and kind in (Causal, All):
                return func(*args, **kwargs).as_subclass(kind)
            if name == "detach" and kind is Mask and not torch.compiler.is_compiling():  # as a graph saves it
                with _disable_current_modes():
                    return func(*args, **kwargs).as_subclass(kind)
            if name in _WRITES and isinstance(args[0], Mask):
                return _refuse(name)
            if name in _ADDS:
                return _added(func, name, args, kwargs)
            at = _BY_CONDITION.get(name)
            condition = at is not None and len(args) > at and isinstance(args[at], Mask)
            known = condition or name in _OF_BOOL
            if not (known or name in _SAME or name in _MOVES or func in _VIEWS):
                return _refuse(name)
            found = func(*elements_of(args), **{key: elements_of(x) for key, x in kwargs.items()})
            if isinstance(found, tuple):
                return tuple([_wrapped(x, name) for x in found])
            return found if known else _wrapped(found, name)


class Causal(Mask):
    """Query i sees the keys up to the i-th. It holds one element."""


class All(Mask):
    """A query sees all keys. It holds one element."""


class Given(Mask):
    """What :attr:`elements` say. It holds one element more."""

    elements: Tensor


class Traced(Given):
    """That of tensors without memory, as torch.export has them, which cannot be made a class of ours. It has none."""

    @staticmethod
    def __new__(cls, elements: Tensor) -> Traced:
        make: Any = torch.Tensor._make_wrapper_subclass
        found: Traced = make(cls, elements.shape, dtype=torch.bool, device=elements.device)
        found.elements = elements
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        return _refuse(func.__name__)


def say(kind: type[Mask], shape: tuple[int, ...], device: Any) -> Tensor:
    one = torch.ones((), dtype=torch.bool, device=device).expand(shape)
    if type(one) is Tensor:
        return one.as_subclass(kind)
    return Traced(one.tril() if kind is Causal else one)


def given(elements: Tensor) -> Tensor:
    if type(elements) is not Tensor:
        return Traced(elements)
    if torch.compiler.is_compiling():  # whose tensors have no attributes
        return elements.as_subclass(Mask)
    mask = say(Given, tuple(elements.shape), elements.device)
    mask.elements = elements  # type: ignore[attr-defined]
    return mask


def elements_of(x: Any) -> Any:
    """Those of a mask; anything else as it is, and lists and tuples of both."""
    if isinstance(x, list | tuple):
        return type(x)([elements_of(one) for one in x])
    if not isinstance(x, Mask):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(x, Given):
            return x.elements
        if not isinstance(x, Causal):
            if torch.compiler.is_compiling():
                return torch.ops.aten.alias(x)
            with _disable_current_modes():  # one of a graph's knows no such class
                return torch.ops.aten.alias(x)
        rows = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
        return rows.expand(x.shape)


def _wrapped(x: Any, name: str) -> Any:
    if not isinstance(x, Tensor):
        return x
    return given(x) if x.dtype == torch.bool else _refuse(name)


def _added(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """To scores, as Transformers' mask for eager attention."""
    scores = args[1] if isinstance(args[0], Mask) else args[0]
    if kwargs or isinstance(scores, Mask) or not isinstance(scores, Tensor) or not scores.is_floating_point():
        return _refuse(name)
    mask = elements_of(args[0] if isinstance(args[0], Mask) else args[1])
    addend = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device)
    return func(scores, addend.masked_fill(~mask, torch.finfo(scores.dtype).min))


def _refuse(name: str) -> Any:
    fail(
        UNSUPPORTED,
        f"attention: code of the model calls {name} on its mask, which is bool; that may be meant for a mask that is "
        "added to scores, and have another result: model.set_attn_implementation('eager') under override_aten()",
    )
