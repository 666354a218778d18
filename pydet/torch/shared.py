"""Rows of a table, and parameters, that a model's code adds to a whole batch: their gradient, sequence by sequence.

A model makes such rows once: positions ``[1, T, D]``, T5's bias ``[1, H, Q, K]``, a vector that scales a residual.
Where its code adds or multiplies them with a batch, PyTorch broadcasts them, and sums their gradient over the batch, in
an order of its own and in its own type, before anything of pydet's sees it. :class:`Shared` is a tensor that knows of
which elements of its parameter it is made. Where it meets a batch it is spread over it (in forward a view, with the
same values), and the gradient of each element is added to ``main_grad`` in the order in which the batch has its places.
So one batch has the bits of its sequences one by one. A number that is made of several vectors, as DiffLlama's lambda,
is spread likewise: :class:`Number`. In other code it is a tensor like any, and ``summed`` counts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import pydet
from pydet.torch.accumulate import Accumulation, Part, adding, check_own, fold
from pydet.torch.ops import DTYPES
from pydet.torch.stock import Derived

Tensor = torch.Tensor

# Functions by their names. What moves elements about; and what computes each element of a result of those at its place.
_VIEWS = frozenset(
    (
        *("__getitem__", "contiguous", "expand", "flatten", "movedim", "narrow", "permute", "reshape", "select"),
        *("squeeze", "swapaxes", "t", "transpose", "unflatten", "unsqueeze", "view"),
    )
)
_SAME = frozenset(("cpu", "cuda", "float", "half", "bfloat16", "to", "type_as"))  # in another type or place
_BY_PLACE = frozenset(
    (
        *("__add__", "__radd__", "__iadd__", "add", "add_", "__sub__", "__rsub__", "__isub__", "sub", "sub_"),
        *("__mul__", "__rmul__", "__imul__", "mul", "mul_", "multiply", "__truediv__", "__rdiv__", "div", "where"),
    )
)
_OF_ELEMENTS = frozenset(  # of one tensor
    ("exp", "expm1", "log1p", "neg", "__neg__", "sigmoid", "silu", "softplus", "square", "tanh")
)


@dataclass
class Source:
    """What elements of a parameter a :class:`Shared` has: ``index()`` is of its shape, and counts them."""

    parameter: Any
    part: Part
    name: str
    index: Callable[[], Tensor]
    rows: Tensor | None = None  # the numbers of its rows, while they lie as the parameter's
    padding: int | None = None  # of a row of the parameter that has no gradient
    then: tuple[Callable[[Tensor], Tensor], ...] = ()  # functions of each element

    def moved(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Source:
        before, rows = self.index, None
        then = lambda: function(before(), *arguments, **keywords)  # noqa: E731
        chooses = function.__name__ == "__getitem__" and isinstance(arguments[0], int | slice | torch.Tensor)
        if chooses and self.rows is not None and self.rows.dim():  # by its first dimension
            rows = self.rows[arguments[0]]
        return replace(self, index=then, rows=rows)

    def followed(self, function: Callable[[Tensor], Tensor]) -> Source:
        return replace(self, then=(*self.then, function))

    def made(self, values: dict[Any, Tensor]) -> Tensor:
        """What it is of other values of its parameter."""
        x = values[self.parameter].reshape(-1)[self.index()]
        for function in self.then:
            x = function(x)
        return x


@dataclass
class Number:
    """That which a :class:`Shared` is made of where several vectors were: `made` is the function of their values. What
    it makes in the end is a number, else PyTorch sums its gradient."""

    sources: dict[Any, Source]  # of each vector
    made: Callable[[dict[Any, Tensor]], Tensor]

    def moved(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Number:
        return self.followed(lambda x: function(x, *arguments, **keywords))

    def followed(self, function: Callable[[Tensor], Tensor]) -> Number:
        made = self.made
        return replace(self, made=lambda values: function(made(values)))

    def slopes(self) -> list[Tensor]:
        """By each element of the vectors, in fp32."""
        values = {w: w.detach().float().requires_grad_() for w in self.sources}
        with torch.enable_grad():
            made = self.made(values)
        return list(torch.autograd.grad(made, list(values.values()), torch.ones_like(made)))


class Shared(torch.Tensor):
    """A tensor that is made of elements of a parameter, and has a place for the batch that it is spread over. `made` is
    what was made of it: a view that several layers ask for is one."""

    source: Source | Number
    version: int
    made: dict[Any, Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "expand_as" and len(args) == 2:  # of the other its shape alone
            name, func, args = "expand", torch.Tensor.expand, (args[0], *args[1].shape)
        with torch._C.DisableTorchFunctionSubclass():
            if (at := _the_only_one(name, args, kwargs)) is not None:
                return _made(func, name, at, args, kwargs)
            if _are_vectors(name, args, kwargs):
                return _made_of_vectors(func, args, kwargs)
            if name in _BY_PLACE and args and not (_writes(name) and isinstance(args[0], Shared)):
                args = _spread_all(args)
            return func(*map(_plain, args), **{key: _plain(x) for key, x in kwargs.items()})


def _is_known(x: Any) -> bool:
    """Whether it is shared, and was not written since."""
    return isinstance(x, Shared) and x._version == x.version


def _writes(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _the_only_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Which argument is shared, of a function whose result is so too: a view, or computed of each element, with numbers
    beside it."""
    at = [i for i, x in enumerate(args) if _is_known(x)]
    others = [x for i, x in enumerate((*args, *kwargs.values())) if isinstance(x, torch.Tensor) and [i] != at]
    if len(at) != 1 or any(isinstance(x, Shared) or x.requires_grad for x in others) or "out" in kwargs:
        return None
    if at == [0] and name in _VIEWS | _SAME | _OF_ELEMENTS:
        return 0
    numbers = name in _BY_PLACE and not _writes(name) and not any(x.dim() for x in others)
    return at[0] if numbers else None


def _made(func: Any, name: str, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of such a function."""
    x, before, behind = args[at], args[:at], args[at + 1 :]  # of which x is to live no longer than its caller wants
    key: Any = (name, at, repr(before), repr(behind), repr(kwargs))
    rest = (*before, *behind, *kwargs.values())
    if any(isinstance(one, torch.Tensor) or (isinstance(one, tuple) and _has_tensors(one)) for one in rest):
        key = None  # whose words do not say all that it holds
    if key in x.made:
        return x.made[key]
    function = lambda one: func(*before, one, *behind, **kwargs)  # noqa: E731
    found = function(_plain(x))
    if found.device != x.device or not found.requires_grad:
        return found
    made = share(found, x.source.moved(func, behind, kwargs) if name in _VIEWS else x.source.followed(function))
    if key is not None:
        x.made[key] = made
    return made


def _are_vectors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function is given nothing but vectors, and what was made of those."""
    if (name not in _BY_PLACE and name != "sum") or _writes(name) or not args or _has_tensors(tuple(kwargs.values())):
        return False
    given: list[Any] = [x for x in args if isinstance(x, torch.Tensor)]
    sources = [x.source for x in given if _is_known(x)]
    of = [source for x in sources for source in (x.sources.values() if isinstance(x, Number) else (x,))]
    return len(sources) == len(given) and all(x.parameter.dim() == 1 and x.padding is None for x in of)


def _made_of_vectors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of such a function."""
    found = func(*map(_plain, args), **kwargs)
    if not found.requires_grad:
        return found
    of: list[Any] = [x.source if isinstance(x, Shared) else x for x in args]
    sources: dict[Any, Source] = {}
    for x in of:
        if isinstance(x, Source):
            sources[x.parameter] = x
        elif isinstance(x, Number):
            sources.update(x.sources)
    value = lambda x, values: x.made(values) if isinstance(x, Source | Number) else x  # noqa: E731
    return share(found, Number(sources, lambda values: func(*(value(x, values) for x in of), **kwargs)))


def _has_tensors(values: tuple[Any, ...]) -> bool:
    return any(isinstance(x, torch.Tensor | list | tuple) for x in values)


def _plain(x: Any) -> Any:
    """With what it is made of, behind which PyTorch sums its gradient."""
    if isinstance(x, list | tuple):
        return type(x)([_plain(one) for one in x])
    return x.as_subclass(torch.Tensor) if isinstance(x, Shared) else x


def share(plain: Tensor, source: Source | Number) -> Tensor:
    made = plain.as_subclass(Shared)
    made.source, made.version, made.made = source, plain._version, {}
    return made


def _spread_all(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each of what is shared over the shape of the result, which is larger, or of something else that is trained."""
    others = [x for x in args if isinstance(x, torch.Tensor) and not isinstance(x, Shared)]
    shape = torch.broadcast_shapes(*[x.shape for x in args if isinstance(x, torch.Tensor)])
    trained = any(x.requires_grad for x in others)
    wanted = lambda x: isinstance(x, Shared) and others and (trained or x.shape.numel() < shape.numel())  # noqa: E731
    return tuple(spread(x, shape) if wanted(x) else x for x in args)


def spread(x: Any, shape: Any) -> Any:
    """What is shared, for a batch of that shape; anything else as it is. All that ask one tensor for one shape have one
    result, so that their gradients are added, each element's, before they are summed over the batch."""
    if not _is_known(x) or (isinstance(x.source, Number) and x.numel() != 1):
        return x
    shape = tuple(shape)
    if shape not in x.made:
        with torch._C.DisableTorchFunctionSubclass():
            values = _plain(x).detach()
            if isinstance(x.source, Number):
                x.made[shape] = _SpreadNumber.apply(values, x.source, shape, *x.source.sources)
            else:
                x.made[shape] = _Spread.apply(x.source.parameter, values, x.source, shape)
    return x.made[shape]


def over_batch(x: Any, batch: int) -> Any:
    """Likewise, of a tensor whose first extent is that of the batch, or 1."""
    return spread(x, (batch, *x.shape[1:])) if _is_known(x) and x.shape[0] == 1 else x


class _Spread(torch.autograd.Function):
    """Its backward adds to the sums: an element's, the places of the batch ascending."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, values: Tensor, source: Source, shape: tuple[int, ...]) -> Tensor:
        check_own("what a batch shares", **{source.name.rpartition(".")[2]: parameter})
        ctx.source = source
        return values.expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        source, w = ctx.source, ctx.source.parameter
        if w.requires_grad and dy.numel():
            dy = dy if dy.dtype in DTYPES else dy.float()
            rows, ids, width = _by_rows(_through(dy, source), source)
            if source.padding is not None:
                kept = ids // (max(w.shape[-1], 1) // width) != source.padding
                rows, ids = rows[kept], ids[kept]
            into = adding(w, source.part).view(-1, width)
            if len(ids):
                pydet.embedding_backward(rows.contiguous(), ids.contiguous(), out=into, accumulate=True)
            fold(w, source.part)
        return None, None, None, None


class _SpreadNumber(torch.autograd.Function):
    """Its backward adds each place's share to the sums, ascending: the sum of its last dimension times the slopes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, number: Number, shape: tuple[int, ...], *vectors: Tensor) -> Tensor:
        names = [source.name.rpartition(".")[2] for source in number.sources.values()]
        check_own("what a batch shares", **dict(zip(names, vectors, strict=True)))
        ctx.save_for_backward(*vectors)  # so that PyTorch refuses one that was written meanwhile
        ctx.number = number
        return value.expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        vectors = ctx.saved_tensors
        if dy.numel():
            rows = (dy if dy.dtype in DTYPES else dy.float()).reshape(-1, dy.shape[-1] if dy.dim() else 1)
            ones = torch.ones_like(rows[:1]).t()
            each = pydet.gemm(rows.contiguous(), ones, arithmetic="ieee", out_dtype=torch.float32)
            ids = torch.zeros(len(each), dtype=torch.int32, device=dy.device)
            for (w, source), slope in zip(ctx.number.sources.items(), ctx.number.slopes(), strict=True):
                if w.requires_grad:
                    into = adding(w, source.part)[None]
                    pydet.embedding_backward(each * slope, ids, out=into, accumulate=True)
                    fold(w, source.part)
        return None, None, None, *[None for _ in vectors]


def _through(dy: Tensor, source: Source) -> Tensor:
    """A gradient by the elements before the functions of each, of which PyTorch says the slope."""
    if not source.then:
        return dy
    with torch.enable_grad():
        before = source.parameter.detach().reshape(-1)[source.index()].requires_grad_()
        y = before
        for function in source.then:
            y = function(y)
        (slope,) = torch.autograd.grad(y, before, torch.ones_like(y))
    return dy.float() * slope.float()


def _by_rows(dy: Tensor, source: Source) -> tuple[Tensor, Tensor, int]:
    """A gradient as rows in the order of its places, of which parts of the parameter they are, and how long: whole rows
    of the parameter, or single elements."""
    width = source.parameter.shape[-1] if source.parameter.dim() else 1
    if source.rows is not None and dy.shape[-1:] == (width,):
        return dy.reshape(-1, width), source.rows.expand(dy.shape[:-1]).reshape(-1), width
    index = source.index()
    index = index.view((1,) * (dy.dim() - index.dim()) + index.shape)
    at = _along_rows(index, width)
    if at is None or dy.shape[at] != width:
        return dy.reshape(-1, 1), index.expand(dy.shape).reshape(-1), 1
    ids = (index.select(at, 0) // width).expand(dy.shape[:at] + dy.shape[at + 1 :])
    return dy.movedim(at, -1).reshape(-1, width), ids.reshape(-1), width


def _along_rows(index: Tensor, width: int) -> int | None:
    """The dimension of an index along which it counts the elements of whole rows; None where there is none."""
    counts = torch.arange(width, device=index.device)
    for dim in range(index.dim() - 1, -1, -1):
        if index.shape[dim] == width and index.numel():
            moved = index.movedim(dim, -1)
            first = moved[..., :1]
            if bool((first % width == 0).all()) and torch.equal(moved, first + counts):
                return dim
    return None


# ---- Embeddings ------------------------------------------------------------------------------------------------------


def of_rows(rows: Tensor, ids: Tensor, padding: int | None, parameter: Any, sums: Accumulation) -> Tensor:
    """Rows of a table, where a batch may share them."""
    if not rows.requires_grad or not parameter.is_contiguous():
        return rows
    (name,), width = sums.parameters, parameter.shape[1]
    rows.register_hook(lambda _: sums.summed.update((name,)))
    index = lambda: ids[..., None].long() * width + torch.arange(width, device=ids.device)  # noqa: E731
    return share(rows, Source(parameter, sums.part, name, index, ids, padding))


# ---- Parameters ------------------------------------------------------------------------------------------------------


class _Whole(torch.autograd.Function):
    """A parameter as it is, whose backward adds what PyTorch summed to its sum."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, name: str, summed: Counter[str]) -> Tensor:
        check_own("what a batch shares", **{name.rpartition(".")[2]: parameter})
        ctx.parameter, ctx.name, ctx.summed = parameter, name, summed
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if ctx.parameter.requires_grad:
            ctx.summed[ctx.name] += 1
            adding(ctx.parameter).add_(dy)
        return None, None, None


# Of Transformers, by the place of their file and name: parameters of modules that each add to or multiply with a batch.
_OWN = {
    ("beam", "BeamAttention"): ("gate_bias",),
    ("diffllama", "DiffLlamaAttention"): ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),
    ("doge", "DogeDecoderLayer"): ("input_residual", "post_attention_residual"),
    ("doge", "DogeAttention"): ("A",),
    ("gpt_neox_japanese", "GPTNeoXJapaneseAttention"): ("dense_bias",),
    ("jetmoe", "JetMoeMoA"): ("bias",),
    ("jetmoe", "JetMoeMoE"): ("bias",),
    ("swin", "SwinRelativePositionBias"): ("relative_position_bias_table",),
    ("transformers", "XIELUActivation"): ("alpha_p", "alpha_n"),
    ("whisper", "WhisperPositionalEmbedding"): ("weight",),
}


def names_of(module: torch.nn.Module) -> tuple[str, ...]:
    """Those of a module's parameters that its code shares with a batch, where that is known of its class."""
    for kind in type(module).__mro__:
        file = kind.__module__.split(".")[-2:][0]
        if kind.__module__.startswith("transformers.") and (file, kind.__name__) in _OWN:
            return _OWN[file, kind.__name__]
    return ()


class SharesParameters(Derived, torch.nn.Module):
    """A module whose code finds its parameters to be :class:`Shared`, while they accumulate."""

    accumulates: Any = False

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        sums = self.__dict__.get("accumulates")
        if not sums or not isinstance(value, torch.nn.Parameter) or not torch.is_grad_enabled() or name not in sums.own:
            return value
        if not value.requires_grad or not value.is_contiguous():
            return value
        full = sums.own[name]
        index = lambda: torch.arange(value.numel(), device=value.device).view(value.shape)  # noqa: E731
        rows = torch.arange(value.numel() // max(value.shape[-1], 1), device=value.device).view(value.shape[:-1])
        return share(_Whole.apply(value, full, sums.summed), Source(value, None, full, index, rows))
