"""What the code of a module's own says that it computes: the names that its forward, and what that calls, use."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_PRODUCTS = {
    *("matmul", "bmm", "baddbmm", "einsum", "mm", "addmm", "mv", "tensordot", "chain_matmul", "multi_dot"),
    *("addmv", "addbmm", "cdist", "vecdot", "@", "torch.inner"),
    *("F.linear", "F.bilinear", "F.conv1d", "F.conv2d", "F.conv3d"),
}
_FUNCTIONS = {name.removeprefix("F.") for name in _PRODUCTS if name.startswith("F.")}  # names that modules have too
_ATTENTION = {
    *("scaled_dot_product_attention", "flex_attention", "flash_attn_func", "flash_attn_varlen_func"),
    "multi_head_attention_forward",
}
_SUMS = {"cumsum", "cumprod", "logcumsumexp"}
_TRANSFORMS = {"torch.stft", "torch.istft"}
_TRANSFORMS |= {f"torch.fft.{name}" for name in dir(torch.fft) if "fft" in name and "freq" not in name}
_LINEAR_ATTENTION, _NORM = "cumsum of products, sum", "rsqrt of a mean"  # of what stands together in one function
_SCANS = ("scan", "delta_rule", "segment_sum", "selective_state")
_UNREAD = {"merge", "unmerge"}  # of adapters: they write weights, and no row is seen
_INTERFACE = (
    "ALL_ATTENTION_FUNCTIONS"  # of Transformers: the configuration's name chooses; beside it stands an eager one
)


def codes(function: Any) -> Iterator[CodeType]:
    """The code of a function and of those written within it, under its decorators."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    ahead = [code] if isinstance(code := getattr(function, "__code__", None), CodeType) else []
    while ahead:
        yield (code := ahead.pop())
        ahead += [x for x in code.co_consts if isinstance(x, CodeType)]


@functools.cache
def _known() -> dict[Any, str]:
    """Functions of PyTorch's that are found by what they are, under any name."""
    names = (_PRODUCTS - {"@"}) | _ATTENTION | _SUMS | _TRANSFORMS | {"softmax", "exp", "exp2", "rsqrt", "mean"}
    found: dict[Any, str] = {}
    for name in sorted(names):
        space, _, own = name.rpartition(".")
        spaces: Any = (torch, torch.nn.functional, torch.linalg, torch.special)
        if space:
            spaces = ({"F": torch.nn.functional, "torch": torch, "torch.fft": torch.fft}[space],)
        found |= {getattr(x, own): name for x in spaces if callable(getattr(x, own, None))}
    return found


def _named(thing: Any) -> str | None:
    """What a function of PyTorch's is called there."""
    thing = getattr(thing, "func", thing)  # of functools.partial
    try:
        return _known().get(thing)
    except TypeError:  # it cannot be hashed
        return None


def _calls(code: CodeType, file: Mapping[str, Any]) -> set[str]:
    """Its names, with those of PyTorch's functions that it has under others, and of what it computes with them."""
    found, multiplies = set(code.co_names), False
    thing: Any = None  # that was loaded, if it is a global or of a module that is one
    for step in dis.get_instructions(code):
        if step.opname == "BINARY_MATRIX_MULTIPLY" or (step.opname == "BINARY_OP" and step.argrepr in ("@", "@=")):
            found.add("@")
        multiplies |= step.opname == "BINARY_MULTIPLY" or (step.opname == "BINARY_OP" and step.argrepr in ("*", "*="))
        if step.opname == "LOAD_GLOBAL":
            thing = file.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            thing = getattr(thing, step.argval, None) if isinstance(thing, ModuleType) else None
        elif step.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG"):
            thing = None
        if thing is not None and (name := _named(thing)):
            found.add(name)
    if multiplies and "cumsum" in found and "sum" in found:
        found.add(_LINEAR_ATTENTION)
    return found | ({_NORM} if {"rsqrt", "mean"} <= found else set())


@functools.cache
def names_in(kind: type) -> frozenset[str]:
    """The names in a class's forward, in its methods and the functions of its file that this calls. Of a class that
    asks Transformers' interface for attention the eager attention beside it is left out."""
    if issubclass(kind, torch.jit.ScriptModule):  # its code is no Python
        return frozenset()
    return frozenset(_names(kind, getattr(kind, "forward", None)))


def _names(kind: type, first: Any) -> set[str]:
    """Those in a function, and in the methods of the class and the functions of their file that it calls."""
    found: set[str] = set()
    ahead: list[Any] = [first]
    seen: set[CodeType] = set()
    while ahead:
        function = ahead.pop()
        while (inner := getattr(function, "__wrapped__", None)) is not None:
            function = inner
        function = getattr(function, "__func__", function)
        file = getattr(function, "__globals__", {})
        for code in codes(function):
            if code in seen:
                continue
            seen.add(code)
            names = _calls(code, file)
            found |= names
            for name in names - _UNREAD:
                method, other = getattr(kind, name, None), file.get(name)
                eager = name == "eager_attention_forward"
                if isinstance(method, FunctionType) and method.__module__.partition(".")[0] != "torch":
                    ahead.append(method)
                if isinstance(other, FunctionType) and other.__module__ == file.get("__name__") and not eager:
                    ahead.append(other)
    return found


def _of_attributes(module: torch.nn.Module, names: frozenset[str]) -> set[str]:
    """Names in functions that the module keeps as attributes, and calls."""
    found: set[str] = set()
    for name in names - {"forward", "_old_forward"}:
        thing = module.__dict__.get(name)
        if thing is None or isinstance(thing, torch.Tensor):
            continue
        if (known := _named(thing)) is not None:
            found.add(known)
            continue
        thing = getattr(thing, "func", thing)  # of functools.partial
        if isinstance(thing, FunctionType) and thing.__module__.partition(".")[0] not in ("torch", "transformers"):
            found |= _names(type(module), thing)
    return found


def _words(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def asks_interface(module: torch.nn.Module) -> bool:
    """Whether a module asks Transformers' interface for its attention."""
    kind: Any = type(module)
    return _INTERFACE in names_in(kind)


def of_its_own(module: torch.nn.Module) -> tuple[str, str] | None:
    """What a module computes in code of its own: ``"attention"``, ``"scan"``, ``"product"``, ``"transform"`` or
    ``"norm"``, and the names that say so; None of modules of PyTorch and pydet, and of rotary embeddings, whose
    products are of one number each."""
    kind: Any = type(module)
    if kind.__module__.partition(".")[0] in ("torch", "pydet") or isinstance(module, torch.nn.Embedding):
        return None
    if any(word in kind.__name__.lower() for word in ("rotary", "rope")):
        return None
    names = names_in(kind)
    names |= _of_attributes(module, names)
    products, fused = names & _PRODUCTS, names & _ATTENTION
    if not asks_interface(module) and (fused or (products and "softmax" in names)):
        return "attention", _words(fused or products | {"softmax"})
    scans = {name for name in names if any(word in name for word in _SCANS)}
    if scans or (names & _SUMS and names & {"exp", "exp2"}):
        return "scan", _words(scans | (names & _SUMS) | products)
    if _LINEAR_ATTENTION in names:
        return "scan", _LINEAR_ATTENTION
    if products and not asks_interface(module):
        return "product", _words(products)
    if transforms := names & _TRANSFORMS:
        return "transform", _words(transforms)
    return ("norm", _NORM) if _NORM in names else None
