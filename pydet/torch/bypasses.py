"""Whether a trainer's own code takes the weight of a model's head, to multiply it itself: read off its methods."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

HEADS = {"lm_head", "get_output_embeddings"}  # by one of these names code gets hold of the head
_ASIDE = {"dtype", "device", "shape", "ndim", "requires_grad"}  # what asks a weight for one of these multiplies nothing

# ---- What code reads -------------------------------------------------------------------------------------------------


def functions(value: Any) -> Iterator[FunctionType]:
    """The functions that a callable is made of: its own, and those that it wraps or keeps in its closure."""
    ahead, seen = [value], set()
    while ahead:
        value = ahead.pop()
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        ahead.append(getattr(value, "__wrapped__", None))
        if isinstance(value, functools.partial | functools.partialmethod):
            ahead.append(value.func)
        if isinstance(value, FunctionType):
            yield value
            kept = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            ahead += [x for x in kept if isinstance(getattr(x, "__func__", x), FunctionType)]


def _within(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions that are written in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)


def _names(code: CodeType) -> set[str]:
    return {name for part in _within(code) for name in part.co_names}


def _called(code: CodeType, known: dict[str, Any]) -> Iterator[FunctionType]:
    """The functions of its own package that code names, also as those of a module of it."""
    package, names = str(known.get("__name__")).partition(".")[0], _names(code)
    found = [known.get(name) for name in names]
    modules = [x for x in found if isinstance(x, ModuleType) and x.__name__.partition(".")[0] == package]
    for value in found + [vars(module).get(name) for module in modules for name in names]:
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == package:
            yield value


def _takes_weight(code: CodeType) -> bool:
    """Whether code has a weight for more than its type or place."""
    for part in _within(code):
        steps = list(dis.get_instructions(part))
        for step, following in itertools.pairwise(steps):
            asks = following.opname.startswith("LOAD_ATTR") and following.argval in _ASIDE
            if step.opname.startswith("LOAD_ATTR") and step.argval == "weight" and not asks:
                return True
    return False


def reads_a_weight(code: CodeType, known: dict[str, Any], deep: int = 2) -> bool:
    """Whether code does, or a function of its own package that it calls: Liger's forward hands the head on to one.

    known: the names of the code's module.
    """
    if _takes_weight(code):
        return True
    return deep > 0 and any(reads_a_weight(f.__code__, f.__globals__, deep - 1) for f in _called(code, known))


def _takes_head(function: FunctionType, deep: int = 2) -> bool:
    """Whether a function, or one of its own package that it calls, has a head and takes a weight."""
    code, known = function.__code__, function.__globals__
    if HEADS & _names(code) and reads_a_weight(code, known):
        return True
    return deep > 0 and any(_takes_head(called, deep - 1) for called in _called(code, known))


# ---- The methods of a trainer ----------------------------------------------------------------------------------------

# By these a trainer of Transformers' makes its loss, and what the loss is of.
_LOSSES = ("training_step", "compute_loss", "compute_loss_func", "prediction_step", "_prepare_inputs")


def _methods(trainer: Any) -> dict[str, list[tuple[str, Any]]]:
    """(where it is, it), by name: a trainer's own functions, those of its class, and of the classes behind it those
    that may be asked by super()."""
    kinds = [kind for kind in type(trainer).__mro__ if kind is not object]
    own = {name: x for name, x in getattr(trainer, "__dict__", {}).items() if name in _LOSSES or name in dir(kinds[0])}
    places = [(type(trainer).__qualname__, own), *((kind.__qualname__, vars(kind)) for kind in kinds)]
    every = [_names(f.__code__) for _, place in places for x in place.values() for f in functions(x)]
    asked = set().union(*(names for names in every if "super" in names))
    found: dict[str, list[tuple[str, Any]]] = {}
    for of, place in places:
        for name, value in place.items():
            if name != "__init__" and (name not in found or name in asked or of == type(trainer).__qualname__):
                found.setdefault(name, []).append((f"{of}.{name}", value))
    return found


def _of_losses(trainer: Any) -> Iterator[tuple[str, str, Any]]:
    """(name, where it is, it) of the methods by which a trainer makes its loss, and of those that they name."""
    methods = _methods(trainer)
    ahead = [name for name in _LOSSES if name in methods] or list(methods)
    seen = set(ahead)
    while ahead:
        name = ahead.pop()
        for where, method in methods[name]:
            yield name, where, method
            for function in functions(method):
                more = (_names(function.__code__) & methods.keys()) - seen
                seen |= more
                ahead += more


def taking_head(trainer: Any) -> str | None:
    """Which method of a trainer's takes the weight of a head itself."""
    for _, where, method in _of_losses(trainer):
        if any(_takes_head(function) for function in functions(method)):
            return where
    return None


def unread(trainer: Any) -> str | None:
    """Which method by which a trainer makes its loss is no Python that can be read."""
    for name, where, method in _of_losses(trainer):
        if name in _LOSSES and callable(method) and not any(True for _ in functions(method)):
            return f"{where}, a {type(method).__qualname__},"
    return None
