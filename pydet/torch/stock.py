"""What the modules of a model were before :func:`pydet.torch.convert`, and the way back for a while or for good."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_KEY = "_pydet_was"  # in the __dict__ of a module that was converted
_MISSING = object()
PYDET = "pydet"  # the name of attention and of experts in Transformers' configurations
_IN_CONFIG = ("_attn_implementation", "_experts_implementation")


class Was:
    """The class of a module before, what its ``__dict__`` had of the attributes that convert set, and, of experts, the
    name by which their configuration called others. A pickle does not hold it: a class that a pickle cannot name would
    take the module with it. It holds what was registered with Transformers, for a process in which nothing is."""

    def __init__(self, kind: type | None = None, attributes: dict[str, Any] | None = None, experts: Any = None) -> None:
        self.kind, self.attributes, self.experts = kind, attributes or {}, experts

    def __reduce__(self) -> Any:
        return _loaded, (dict(registered), self.experts is not None)

    def __deepcopy__(self, memo: Any) -> Was:
        return self


registered: dict[str, tuple[Any, ...]] = {}  # attention, by its name in Transformers: arithmetic and kv_chunk


def _loaded(attention: dict[str, tuple[Any, ...]], has_experts: bool) -> Was:
    """Of a module of a pickled model: its configuration names what this process may not have registered yet."""
    from pydet.torch import experts  # which imports this, as the next
    from pydet.torch.attention import register_attention

    for name, (arithmetic, kv_chunk) in attention.items():
        if name not in registered:
            register_attention(name, arithmetic=arithmetic, kv_chunk=kv_chunk)
        elif registered[name] != (arithmetic, kv_chunk):
            warnings.warn(
                f"pydet.torch: a pickled model was made where attention {name!r} was registered with arithmetic and "
                f"kv_chunk {(arithmetic, kv_chunk)}, and here it is with {registered[name]}, which decide its bits",
                stacklevel=2,
            )
    if has_experts:
        experts.know_pydet()
    return Was()


def become(module: Any, kind: type, attributes: dict[str, Any]) -> None:
    """Makes a module one of class `kind`, and notes what it was; what it was at first stays noted."""
    before = {name: module.__dict__.get(name, _MISSING) for name in attributes}
    if (noted := was(module)) is None:
        named = getattr(getattr(module, "config", None), "_experts_implementation", None)
        noted = Was(type(module), before, named)
    else:
        noted = Was(noted.kind, {**before, **noted.attributes}, noted.experts)
    module.__dict__[_KEY] = noted
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def was(module: torch.nn.Module) -> Was | None:
    """What a module was; None of one that was never converted, or is a pickle's."""
    noted = module.__dict__.get(_KEY)
    return noted if isinstance(noted, Was) and noted.kind is not None else None


def _put(module: Any, kind: type, attributes: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """Class and attributes of a module, straight into it; what it had of them."""
    before = type(module), {name: module.__dict__.get(name, _MISSING) for name in attributes}
    module.__class__ = kind
    for name, value in attributes.items():
        if value is _MISSING:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value
    return before


def _configs(model: torch.nn.Module) -> list[Any]:
    """The configurations of a model's modules, and those within them, each once."""
    found: list[Any] = []
    ahead = [x for module in model.modules() if (x := getattr(module, "config", None)) is not None]
    while ahead:
        config = ahead.pop()
        if not any(config is x for x in found):
            found.append(config)
            names = getattr(config, "sub_configs", None)
            ahead += [x for name in names or () if (x := getattr(config, name, None)) is not None]
    return found


def _rename(model: torch.nn.Module) -> list[tuple[Any, str, Any]]:
    """Has configurations that name pydet's attention name eager attention, and the experts that were; what to undo."""
    experts: dict[int, Any] = {}
    for module in model.modules():
        noted, config = was(module), getattr(module, "config", None)
        if noted is not None and config is not None and noted.experts not in (None, PYDET):
            experts.setdefault(id(config), noted.experts)
    undo: list[tuple[Any, str, Any]] = []
    for config in _configs(model):
        for name in _IN_CONFIG:
            if getattr(config, name, None) != PYDET:
                continue
            # straight into it: the setters of Transformers write into the configurations within as well
            own = f"{name}_internal" if f"{name}_internal" in vars(config) else name
            undo.append((config, own, getattr(config, own)))
            setattr(config, own, "eager" if name == _IN_CONFIG[0] else experts.get(id(config), "eager"))
    return undo


@contextlib.contextmanager
def as_stock(model: torch.nn.Module) -> Iterator[int]:
    """For a while converted modules are what they were, and attention and experts are Transformers' own; yields how
    many modules and configurations that are."""
    changed: list[tuple[Any, type, dict[str, Any]]] = []
    undo: list[tuple[Any, str, Any]] = []
    try:
        for module in model.modules():
            if (noted := was(module)) is not None:
                changed.append((module, *_put(module, noted.kind or type(module), noted.attributes)))
        undo = _rename(model)
        yield len(changed) + len(undo)
    finally:
        for module, kind, attributes in reversed(changed):
            _put(module, kind, attributes)
        for config, name, value in reversed(undo):
            setattr(config, name, value)


def remember(model: torch.nn.Module) -> Callable[[], None]:
    """What makes modules and configurations what they are now, whatever is converted until it is called."""
    before = [(module, type(module), dict(module.__dict__)) for module in model.modules()]
    named = [(config, name, getattr(config, name, _MISSING)) for config in _configs(model) for name in _IN_CONFIG]

    def undo() -> None:
        for module, kind, attributes in before:
            if (noted := module.__dict__.get(_KEY)) is not attributes.get(_KEY, _MISSING) and isinstance(noted, Was):
                keys = {_KEY, *noted.attributes}
                _put(module, kind, {name: attributes.get(name, _MISSING) for name in keys})
        for config, name, value in named:
            if value is not _MISSING and getattr(config, name, _MISSING) != value:
                setattr(config, f"{name}_internal" if f"{name}_internal" in vars(config) else name, value)

    return undo


# ---- Classes of ours over a model's own ------------------------------------------------------------------------------


class Derived:
    """A class whose ``super().forward`` is a model's own; :func:`derived` makes it, and a pickle makes it again."""

    def __reduce__(self) -> Any:
        return _new_derived, type(self).__bases__, self.__dict__


_derived: dict[tuple[type, type], Any] = {}


def derived(ours: type, kind: type) -> Any:
    """The class of `ours` and then `kind`, and still a `kind`."""
    if (ours, kind) not in _derived:
        _derived[ours, kind] = type(f"{kind.__name__}OfPydet", (ours, kind), {"__module__": ours.__module__})
    return _derived[ours, kind]


def _new_derived(ours: type, kind: type) -> Any:
    made = derived(ours, kind)
    return made.__new__(made)
