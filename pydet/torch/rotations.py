"""What turns q and k by rotary embeddings, in the code of a model's own attention, by pydet's ``rotary``.

Families of Transformers have functions of their own for it, some ten steps each, which differ in what a pair is and in
what is rounded. Which a function is, is tried: on the CPU, of each type, with its gradient, all bits compared. What is
not one of ``rotary``'s, and what was not tried, stays the function's.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from pydet.torch.ops import DTYPES
from pydet.torch.ops.register import Tensor, straight

_rotary = straight("rotary")
_OURS = "_of_pydet"  # behind the name of a function: that of ours, in the same file
_WORDS = ("rotary", "rope")


class _Turn(NamedTuple):
    """How a function of a model's own turns pairs, in the words of ``torch.ops.pydet.rotary``."""

    halved: bool  # of the table the first half is used
    whole: bool
    neighbours: bool
    out_neighbours: bool
    in_fp32: bool
    gradient_in_fp32: bool
    widens: bool  # results are of the type that q and the table are promoted to, not of q's
    has_gradient: bool  # its bits are those of rotary's too


def _turn(by: _Turn, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, heads_first: bool) -> tuple[Tensor, Tensor]:
    if by.halved:
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
    out_dtype = torch.promote_types(q.dtype, cos.dtype) if by.widens else None
    how = by.whole, by.neighbours, by.out_neighbours, by.in_fp32, False, heads_first, out_dtype, by.gradient_in_fp32
    made: tuple[Tensor, Tensor] = _rotary(q, k, cos, sin, *how)
    return made


class _Form(NamedTuple):
    """The arguments of such a function by their names, and how their dimensions lie."""

    names: tuple[str, ...]  # of what is turned: one or two
    cos_first: bool
    unsqueezes: bool  # has an unsqueeze_dim, which is 1 where it is not given
    heads_first: bool
    dims: int  # of what is turned; the table has one less


# What is turned, of which size the table is beside N elements of a head: all, half, another number.
_Key = tuple[torch.dtype, torch.dtype, str]


def _size(table: Any, n: Any) -> str:
    return "all" if table == n else "half" if 2 * table == n else "part"


_N, _TABLES = 24, {"all": 24, "half": 12, "part": 8}


def _numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Of any size, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, torch.copysign(torch.zeros(()), x), x).to(dtype)


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dtype != y.dtype or x.shape != y.shape:
        return False
    words = torch.int32 if x.dtype == torch.float32 else torch.int16
    return torch.equal(x.contiguous().view(words), y.contiguous().view(words))


def _turns(q: torch.dtype, table: torch.dtype) -> Iterator[_Turn]:
    layouts = [(False, True, False, False), (False, True, True, True)]  # halved, whole, neighbours, out_neighbours
    for halved in (True, False):
        layouts += [(halved, False, *pairs) for pairs in ((False, False), (True, True), (True, False))]
    widens = (False, True) if torch.promote_types(q, table) != q else (False,)
    for layout, wide, in_fp32, gradient in itertools.product(layouts, widens, (False, True), (False, True)):
        yield _Turn(*layout, in_fp32, gradient, wide, True)


def _try(function: Callable[..., Any], form: _Form, key: _Key) -> _Turn | None:
    """Which of them a function is, of such types and a table of such a size: on the CPU, whatever PyTorch's default."""
    with torch.device("cpu"):
        return _try_on_the_cpu(function, form, key)


def _try_on_the_cpu(function: Callable[..., Any], form: _Form, key: _Key) -> _Turn | None:
    of_q, of_table, size = key
    batch, tokens, heads = (2,) * (form.dims - 3), 3, (5, 1)
    shapes = [(*batch, *((h, tokens) if form.heads_first else (tokens, h)), _N) for h in heads[: len(form.names)]]
    given = [_numbers(shape, i, of_q).requires_grad_() for i, shape in enumerate(shapes)]
    cos, sin = (_numbers((*batch, tokens, _TABLES[size]), 2 + i, of_table) for i in range(2))
    table = (cos, sin) if form.cos_first else (sin, cos)
    try:
        with torch.enable_grad():
            found = function(*given, *table)
            found = list(found) if isinstance(found, tuple) else [found]
            if len(found) != len(given) or not all(x.shape == y.shape for x, y in zip(given, found, strict=True)):
                return None
            of_found = [_numbers(tuple(x.shape), 4 + i, x.dtype) for i, x in enumerate(found)]
            gradients = torch.autograd.grad(found, given, of_found)
            if form.unsqueezes and form.dims == 4:
                other = function(*(x.transpose(1, 2) for x in given), *table, unsqueeze_dim=2)
                other = other if isinstance(other, tuple) else (other,)
                if not all(_same(x.transpose(1, 2), y) for x, y in zip(other, found, strict=True)):
                    return None
    except Exception:  # whatever it is, of such operands it is nothing that is turned
        return None
    k, forward = given[1] if len(given) > 1 else None, None
    for turn in _turns(of_q, of_table):
        if forward is not None and turn[:5] + turn[6:7] != forward[:5] + forward[6:7]:
            continue
        try:
            if forward is None:
                with torch.no_grad():
                    made = _turn(turn, given[0], k, cos, sin, form.heads_first)[: len(given)]
                if not all(map(_same, made, found)):
                    continue
                forward = turn._replace(has_gradient=False)
            with torch.enable_grad():
                made = _turn(turn, given[0], k, cos, sin, form.heads_first)[: len(given)]
                if all(map(_same, torch.autograd.grad(made, given, of_found), gradients)):
                    return turn
        except Exception:  # a table that does not fit
            continue
    return forward


def _forms(function: Any) -> Iterator[_Form]:
    names = list(inspect.signature(function).parameters)
    count = next((i for i in (1, 2) if set(names[i : i + 2]) == {"cos", "sin"}), 0)
    if not count or set(names[count + 2 :]) - {"unsqueeze_dim", "position_ids"}:
        return
    own = tuple(names[:count]), names[count] == "cos", "unsqueeze_dim" in names
    for heads_first, dims in ((True, 4), (False, 4), (False, 3)):
        yield _Form(*own, heads_first, dims)


def _make(function: Any, form: _Form, turns: dict[_Key, _Turn]) -> Callable[..., Any]:
    """In the place of such a function: by ``rotary`` where it was seen to have its bits, else by the function."""
    heads_first, dims, cos_first, unsqueezes = form.heads_first, form.dims, form.cos_first, form.unsqueezes

    def turn(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: Any) -> Any:
        """None of what was not tried."""
        if not (isinstance(q, Tensor) and isinstance(cos, Tensor) and isinstance(sin, Tensor)):
            return None
        if q.dim() != dims or cos.dim() != dims - 1 or q.device != cos.device:
            return None
        if unsqueezes and unsqueeze_dim != 1 and not (unsqueeze_dim == 2 and dims == 4):
            return None
        first = unsqueeze_dim == 1 if unsqueezes else heads_first
        columns, tokens = cos.shape[-1], -2 if first else -3
        if cos.shape[-2] != q.shape[tokens] or (k is not None and k.shape[tokens] != q.shape[tokens]):
            return None
        by = turns.get((q.dtype, cos.dtype, _size(columns, q.shape[-1])))
        if by is None or ((by.whole or by.halved) and columns % 2):
            return None
        asks = q.requires_grad or (k is not None and k.requires_grad)
        if asks and torch.is_grad_enabled() and not by.has_gradient:
            return None
        return _turn(by, q, k, cos, sin, first)

    if len(form.names) == 1:

        @functools.wraps(function)
        def one(x: Any, a: Any, b: Any, unsqueeze_dim: Any = 1) -> Any:
            made = turn(x, None, *((a, b) if cos_first else (b, a)), unsqueeze_dim)
            if made is None:
                return function(x, a, b, unsqueeze_dim) if unsqueezes else function(x, a, b)
            return made[0]

        return one

    @functools.wraps(function)
    def both(q: Any, k: Any, a: Any, b: Any, *more: Any, **options: Any) -> Any:
        plain = not more and (not options or list(options) == ["unsqueeze_dim"]) and isinstance(k, Tensor)
        if plain and k.dtype == q.dtype:
            made = turn(q, k, *((a, b) if cos_first else (b, a)), options.get("unsqueeze_dim", 1))
            if made is not None:
                return made
        return function(q, k, a, b, *more, **options)

    return both


@functools.cache
def _of(function: Any) -> Callable[..., Any] | None:
    """What takes a function's place; None of one that ``rotary`` has the bits of nowhere."""
    for form in _forms(function):
        keys = [
            (of_q, of_table, size)
            for of_q in DTYPES
            for of_table in dict.fromkeys((of_q, torch.float32))
            for size in _TABLES
        ]
        turns = {key: found for key in keys if (found := _try(function, form, key)) is not None}
        if turns:
            return _make(function, form, turns)
    return None


# ---- The code that calls them ----------------------------------------------------------------------------------------


def _called(function: Any) -> set[str]:
    """The names of such functions that a function of a model's file calls, all as globals."""
    code, file = function.__code__, function.__globals__
    steps = [step for step in dis.get_instructions(code) if step.argval in code.co_names]
    names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    names -= {step.argval for step in steps if step.opname != "LOAD_GLOBAL"}
    return {
        name
        for name in names
        if any(word in name.lower() for word in _WORDS)
        and not name.endswith(_OURS)
        and isinstance(file.get(name), types.FunctionType)
    }


def _with_cell(function: types.FunctionType, old: Any, new: Any) -> types.FunctionType | None:
    """A decorator's function around `new`, as the one around `old`."""
    cells = function.__closure__ or ()
    if not any(cell.cell_contents is old for cell in cells):
        return None
    closure = tuple(types.CellType(new) if cell.cell_contents is old else cell for cell in cells)
    return _copy(function, function.__code__, closure, new)


def _copy(function: types.FunctionType, code: Any, closure: Any, wrapped: Any = None) -> types.FunctionType:
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__dict__.update(function.__dict__)
    made.__module__, made.__doc__, made.__annotations__ = (
        function.__module__,
        function.__doc__,
        function.__annotations__,
    )
    if wrapped is not None:
        made.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return made


def _renamed(function: Any) -> types.FunctionType | None:
    """A forward that calls ours in the place of a model's own functions, under its decorators; None of another."""
    if not isinstance(function, types.FunctionType):
        return None
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        made = _renamed(inner)
        return None if made is None else _with_cell(function, inner, made)
    file, ours = function.__globals__, {}
    for name in _called(function):
        if (turned := _of(file[name])) is not None:
            ours[name] = turned
    if not ours:
        return None
    for name, turned in ours.items():
        file[f"{name}{_OURS}"] = turned
    code = function.__code__
    names = tuple(f"{name}{_OURS}" if name in ours else name for name in code.co_names)
    return _copy(function, code.replace(co_names=names), function.__closure__)


@functools.cache
def turning_class(kind: Any) -> Any:
    """The class of a module whose forward turns q and k by ``rotary``, else the same and of the same name; None of a
    module that does no such thing, or by code that is not known."""
    if kind.__module__.partition(".")[0] in ("torch", "pydet"):
        return None
    forward = _renamed(getattr(kind, "forward", None))
    if forward is None:
        return None
    own = {"forward": forward, "__reduce__": _reduce, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**own, "_pydet_turns": True})


def turned_from(kind: Any) -> Any:
    """The class that :func:`turning_class` made one of; None of another."""
    return kind.__bases__[0] if "_pydet_turns" in kind.__dict__ else None


def _reduce(self: Any) -> Any:
    return _new, (type(self).__bases__[0],), self.__dict__


def _new(kind: Any) -> Any:
    made = turning_class(kind) or kind
    return made.__new__(made)
