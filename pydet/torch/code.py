"""What the code of a module's own says that it computes: the names that its forward, and what that calls, use."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

_PRODUCTS = {
    *("matmul", "bmm", "baddbmm", "einsum", "mm", "addmm", "mv", "tensordot", "chain_matmul", "multi_dot"),
    *("addmv", "addbmm", "cdist", "vecdot", "@"),
    *("F.linear", "F.bilinear", "F.conv1d", "F.conv2d", "F.conv3d"),
}
_FUNCTIONS = {name.removeprefix("F.") for name in _PRODUCTS if name.startswith("F.")}  # names that modules have too
_ATTENTION = {
    *("scaled_dot_product_attention", "flex_attention", "flash_attn_func", "flash_attn_varlen_func"),
    "multi_head_attention_forward",
}
_SUMS = {"cumsum", "cumprod", "logcumsumexp"}
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


def _calls(code: CodeType) -> set[str]:
    found, last = set(code.co_names), None
    for step in dis.get_instructions(code):
        if step.opname == "BINARY_MATRIX_MULTIPLY" or (step.opname == "BINARY_OP" and step.argrepr in ("@", "@=")):
            found.add("@")
        if step.argval in _FUNCTIONS and last in ("F", "functional"):
            found.add(f"F.{step.argval}")
        last = step.argval
    return found


@functools.cache
def names_in(kind: type) -> frozenset[str]:
    """The names in a class's forward, in its methods and the functions of its file that this calls. Of a class that
    asks Transformers' interface for attention the eager attention beside it is left out."""
    if issubclass(kind, torch.jit.ScriptModule):  # its code is no Python
        return frozenset()
    found: set[str] = set()
    ahead: list[Any] = [getattr(kind, "forward", None)]
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
            names = _calls(code)
            found |= names
            for name in names - _UNREAD:
                method, other = getattr(kind, name, None), file.get(name)
                if other is not None:  # imported by its own name, or another
                    found |= {f"F.{x}" for x in _FUNCTIONS if other is getattr(torch.nn.functional, x)}
                eager = name == "eager_attention_forward"
                if isinstance(method, FunctionType) and method.__module__.partition(".")[0] != "torch":
                    ahead.append(method)
                if isinstance(other, FunctionType) and other.__module__ == file.get("__name__") and not eager:
                    ahead.append(other)
    return frozenset(found)


def _words(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def asks_interface(module: torch.nn.Module) -> bool:
    """Whether a module asks Transformers' interface for its attention."""
    kind: Any = type(module)
    return _INTERFACE in names_in(kind)


def of_its_own(module: torch.nn.Module) -> tuple[str, str] | None:
    """What a module computes in code of its own: ``"attention"``, ``"scan"`` or ``"product"``, and the names that say
    so; None of modules of PyTorch and pydet, and of rotary embeddings, whose products are of one number each."""
    kind: Any = type(module)
    if kind.__module__.partition(".")[0] in ("torch", "pydet") or isinstance(module, torch.nn.Embedding):
        return None
    if any(word in kind.__name__.lower() for word in ("rotary", "rope")):
        return None
    names = names_in(kind)
    products, fused = names & _PRODUCTS, names & _ATTENTION
    if not asks_interface(module) and (fused or (products and "softmax" in names)):
        return "attention", _words(fused or products | {"softmax"})
    scans = {name for name in names if any(word in name for word in _SCANS)}
    if scans or (names & _SUMS and names & {"exp", "exp2"}):
        return "scan", _words(scans | (names & _SUMS) | products)
    return ("product", _words(products)) if products and not asks_interface(module) else None
