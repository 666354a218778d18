"""One forward of a model as it was and as it is converted, each row alone and all in a batch: what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch import experts, override
from pydet.torch.experts_fp8 import Fp8Experts
from pydet.torch.fp8 import Fp8Linear
from pydet.torch.stock import as_stock, was

Tensor: TypeAlias = torch.Tensor
_Key: TypeAlias = tuple[str, int]  # a module's name, and which of its calls

_OWN = ("pydet", "prim", "prims")  # namespaces of operators that sum nothing by rules of others
_PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "linear", "addbmm", "addr"),
    *("_addmm_activation", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_int_mm"),
}
_SUMS = {
    *("sum", "nansum", "mean", "var", "var_mean", "std", "std_mean", "prod", "norm", "trace", "dist", "renorm"),
    *("cumsum", "cumprod", "logcumsumexp", "logsumexp", "_softmax", "softmax", "_log_softmax", "index_add"),
    *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm"),
    *("_native_batch_norm_legit_no_training", "cudnn_batch_norm", "miopen_batch_norm", "_weight_norm_interface"),
    *("scatter_add", "scatter_reduce", "index_reduce", "segment_reduce", "col2im", "unfold_backward"),
    *("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_trilinear", "conv_tbc"),
    *("_euclidean_dist", "_cdist_forward", "_pdist_forward", "_sparse_addmm", "cholesky_solve"),
}
_BY_PLACE = {
    *("silu", "gelu", "sigmoid", "softplus", "elu", "celu", "glu", "mish", "exp2", "rsqrt", "log_sigmoid_forward"),
    *("hardswish", "sinh", "cosh", "atanh", "atan2", "logaddexp", "logaddexp2", "ldexp", "special_i0e"),
}
_NOT_BY_PLACE = (-2, -1, 0, 0.5, 1, 2, 3)  # exponents of pow
_KERNELS = (  # by how their names begin
    *("_scaled_dot_product", "flash_", "_flash_", "_efficient_", "convolution", "_convolution", "mkldnn", "_cudnn"),
    *("_embedding_bag", "_fft_", "linalg_", "_linalg_", "grid_sampler", "upsample_", "_upsample_"),
)
_RECURRENT = ("rnn", "lstm", "gru", "_thnn")
_COPIES = {"embedding": "embedding, which copies rows", "topk": "topk, which chooses", "sort": "sort, which chooses"}


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of what a module got or gave, in their order; caches and other objects are not looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name, None))


def _like(value: list[Any] | tuple[Any, ...], parts: Iterable[Any]) -> Any:
    """The parts as what value is: a list, a tuple, or a named one."""
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)


def _copied(value: Any) -> Any:
    """What a module is given, with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return _like(value, map(_copied, value)) if isinstance(value, list | tuple) else value


def _plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_quantized


def _bits(x: Tensor) -> Tensor:
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        return x
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


# ---- The batch, and a row of it --------------------------------------------------------------------------------------


@dataclass
class _Batch:
    """What the model is called with: by name where the forward has names, and what of it has rows."""

    names: list[str]
    values: list[Any]
    by_name: bool
    rows: int
    kept: list[tuple[int, int]] | None  # of each row under a mask: its first token, and how many
    tokens: int
    notes: list[str]

    def call(self, model: Any, values: Sequence[Any]) -> Any:
        values = [_copied(x) for x in values]  # a forward that writes into what it is given is to find it again
        return model(**dict(zip(self.names, values, strict=True))) if self.by_name else model(*values)

    def row(self, i: int) -> list[Any]:
        """Row i, all else as it is."""
        return [self._of(name, x, lambda t, dim: t.narrow(dim, i, 1)) for name, x in self._named()]

    def cut(self, i: int) -> list[Any]:
        """Row i without its padding."""
        assert self.kept is not None
        first, count = self.kept[i]

        def part(name: str, t: Any) -> Any:
            if not isinstance(t, Tensor) or name.startswith("decoder_"):
                return t
            if name == "cache_position":
                return t[:count]
            dim = 2 if name == "position_ids" and t.dim() == 3 else 1
            return t.narrow(dim, first, count) if t.dim() > dim and t.shape[dim] == self.tokens else t

        return [part(name, x) for name, x in zip(self.names, self.row(i), strict=True)]

    def _named(self) -> Iterator[tuple[str, Any]]:
        return zip(self.names, self.values, strict=True)

    def _of(self, name: str, x: Any, take: Callable[[Tensor, int], Tensor]) -> Any:
        if isinstance(x, Tensor):
            if x.dim() and x.shape[0] == self.rows:
                return take(x, 0)
            return take(x, 1) if name == "position_ids" and x.dim() == 3 and x.shape[1] == self.rows else x
        if isinstance(x, Mapping):
            return {key: self._of(str(key), inner, take) for key, inner in x.items()}
        return _like(x, (self._of(name, inner, take) for inner in x)) if isinstance(x, list | tuple) else x


def _refuse_objects(name: str, value: Any) -> None:
    """What a forward might write into, as a cache, cannot be given to several."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_objects(f"{name}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _refuse_objects(f"{name}[{i}]", inner)
    elif value is not None and not isinstance(value, Tensor | bool | int | float | str | torch.dtype | torch.device):
        fail(
            UNSUPPORTED,
            f"check: {name} is {type(value).__qualname__}, want tensors, numbers, words, and lists and dicts of them: "
            "the forward is run several times, and must not change what it is given",
        )


def _padding(mask: Any, rows: int, tokens: int) -> list[tuple[int, int]] | None:
    """Of each row the first token that takes part and how many do, if they follow each other and some row has others;
    of a row for which that does not hold all tokens."""
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, tokens) or mask.is_floating_point():
        return None
    kept, padded = [], False
    for row in mask.bool().cpu():
        places = row.nonzero().view(-1)
        whole = len(places) and int(places[-1]) - int(places[0]) + 1 == len(places)
        kept.append((int(places[0]), len(places)) if whole else (0, tokens))
        padded = padded or (bool(whole) and len(places) < tokens)
    return kept if padded else None


def _read(model: torch.nn.Module, batch: Any) -> _Batch:
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    if isinstance(batch, Mapping):
        names, values, by_name = [str(key) for key in batch], list(batch.values()), True
    else:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        taken = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = [taken[i] if i < len(taken) else f"argument {i}" for i in range(len(values))]
        by_name = False
    for name, value in zip(names, values, strict=True):
        _refuse_objects(f"batch[{name!r}]" if by_name else name, value)
    given = dict(zip(names, values, strict=True))
    first: Any = next(
        (x for name in ("input_ids", "inputs_embeds") if isinstance(x := given.get(name), Tensor)),
        next((x for x in _tensors(values) if x.dim()), None),
    )
    if first is None:
        fail(INVALID_VALUE, f"check: batch is {type(batch).__qualname__} without a tensor that has rows, want one")
    if first.shape[0] < 2:
        fail(INVALID_VALUE, f"check: batch has {first.shape[0]} rows, want 2 or more: a row alone is compared with it")
    rows, tokens = int(first.shape[0]), int(first.shape[1]) if first.dim() > 1 else 0
    kept, notes = _padding(given.get("attention_mask"), rows, tokens), []
    if kept and any(start for start, _ in kept) and given.get("position_ids") is None:
        if any(p.name == "position_ids" for p in parameters) and by_name:
            places = (given["attention_mask"].long().cumsum(1) - 1).clamp(min=0)
            at = names.index("position_ids") if "position_ids" in names else len(names)
            names[at : at + 1], values[at : at + 1] = ["position_ids"], [places]
            notes.append("position_ids were counted from each row's first token, as generate() does")
        else:
            notes.append("rows are padded on the left, and the forward was given no position_ids")
    return _Batch(names, values, by_name, rows, kept, tokens, notes)


# ---- Runs ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _left_as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Training, buffers and what modules keep beside them, whatever the forwards do."""
    simple = bool | int | float | str | Tensor | torch.Size | torch.dtype | None
    modes = [(module, module.training) for module in model.modules()]
    own = [(m, {k: v for k, v in m.__dict__.items() if isinstance(v, simple)}) for m in model.modules()]
    buffers = [
        (module, dict(module._buffers), {k: x.detach().clone() for k, x in module._buffers.items() if x is not None})
        for module in model.modules()
    ]
    try:
        model.eval()
        yield
    finally:
        for module, simple_ones in own:
            module.__dict__.update(simple_ones)
        for module, before, values in buffers:
            module._buffers.clear()
            module._buffers.update(before)
            for name, value in values.items():
                buffer: Any = before[name]
                if not torch.equal(_bits(buffer), _bits(value)):
                    with torch.no_grad():
                        buffer.copy_(value)
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _same_numbers(model: torch.nn.Module) -> Iterator[None]:
    """Each run draws the same random numbers, and the caller's are what they were."""
    cuda = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    state = random.getstate()
    try:
        with torch.random.fork_rng(cuda):
            yield
    finally:
        random.setstate(state)


class _Watched:
    """Hooks on all modules: after each call, :meth:`gave` of its key and tensors; before it, :meth:`got`."""

    def __init__(self, model: torch.nn.Module, batch: _Batch) -> None:
        self.model, self.batch = model, batch
        self.names = {module: name for name, module in model.named_modules()}
        self.counts: Counter[str] = Counter()
        self.stack: list[_Key] = []

    def got(self, key: _Key, tensors: list[Tensor]) -> None:
        """Called with what a module is given."""

    def gave(self, key: _Key, tensors: list[Tensor]) -> None:
        """Called with what a module gave."""

    def run(self, values: Sequence[Any]) -> list[Tensor]:
        """One forward, and the tensors that it gave."""

        def before(module: torch.nn.Module, arguments: Any, keywords: Any) -> None:
            name = self.names[module]
            key = name, self.counts[name]
            self.counts[name] += 1
            self.got(key, list(_tensors((arguments, keywords))))
            self.stack.append(key)

        def after(module: torch.nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
            self.gave(self.stack.pop(), list(_tensors(result)))

        self.counts.clear()
        self.stack.clear()
        hooks: list[Any] = []
        try:
            for module in self.names:
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.append(module.register_forward_hook(after, with_kwargs=True))
            with torch.no_grad(), _same_numbers(self.model):
                return list(_tensors(self.batch.call(self.model, values)))
        finally:
            for hook in hooks:
                hook.remove()


class _Batched(_Watched):
    """Keeps what each module gave, in the order in which they were done."""

    def __init__(self, model: torch.nn.Module, batch: _Batch) -> None:
        super().__init__(model, batch)
        self.results: dict[_Key, list[Tensor]] = {}

    def gave(self, key: _Key, tensors: list[Tensor]) -> None:
        self.results[key] = [x.detach().clone() if _plain(x) else x for x in tensors]


class _Inputs(_Watched):
    """Keeps what one call of one module is given, and who called it."""

    def __init__(self, model: torch.nn.Module, batch: _Batch, key: _Key) -> None:
        super().__init__(model, batch)
        self.key, self.inputs, self.caller = key, [torch.empty(0)][:0], ""

    def got(self, key: _Key, tensors: list[Tensor]) -> None:
        if key == self.key:
            self.inputs = [x.detach().clone() if _plain(x) else x for x in tensors]
            self.caller = self.stack[-1][0] if self.stack else ""


def _row_of(x: Tensor, alone: Tensor, batch: _Batch, i: int, cut: bool) -> Tensor | str | None:
    """What of x is row i, shaped like what it gave alone; None if x has no rows; or why that cannot be told."""
    if x.dim() != alone.dim():
        return "its result has other dimensions alone"
    first, count = batch.kept[i] if cut and batch.kept else (0, 0)
    fits = lambda n, want: n == want or (cut and n == batch.tokens and want == count)  # noqa: E731
    if x.shape == alone.shape:
        return None
    for dim in range(x.dim()):
        each, rest = divmod(x.shape[dim], batch.rows)
        if rest or x.shape[dim] == alone.shape[dim] or not fits(each, alone.shape[dim]):
            continue
        if x.dim() < 3 and each not in (1, batch.tokens):  # tokens that were sorted, as by experts, or chosen
            continue
        part = x.unflatten(dim, (batch.rows, each)).select(dim, i)
        if all(fits(n, want) for n, want in zip(part.shape, alone.shape, strict=True)):
            for d, want in enumerate(alone.shape):
                part = part if part.shape[d] == want else part.narrow(d, first, count)
            return part
    return "its result has other extents alone, and no rows that can be found in it"


class _Alone(_Watched):
    """Compares what each module gave of a row with what it gave in the batch."""

    def __init__(self, batched: _Batched) -> None:
        super().__init__(batched.model, batched.batch)
        self.batched = batched
        self.varying: dict[_Key, int] = dict.fromkeys(batched.results, 0)
        self.compared: dict[_Key, int] = dict.fromkeys(batched.results, 0)
        self.skipped: dict[str, str] = {}
        self.where: dict[_Key, tuple[int, bool]] = {}  # a row in which it varies, and whether that was cut
        self.now = (0, False)
        sorts = [f"{name}." for module, name in self.names.items() if experts.is_experts(module)]
        self.sorted = {name for name in self.names.values() if name.startswith(tuple(sorts))} if sorts else set()

    def gave(self, key: _Key, tensors: list[Tensor]) -> None:
        together = self.batched.results.get(key)
        if key[0] in self.sorted:
            self._skip(key, "its tokens are sorted by expert")
        elif together is None or len(together) != len(tensors):
            self._skip(key, "it is not called alike alone")
        else:
            for x, alone in zip(together, tensors, strict=True):
                self._compare(key, x, alone.detach())

    def _skip(self, key: _Key, why: str) -> None:
        """What could not be told of one row says that what was told of others may be another's."""
        self.skipped.setdefault(key[0], why)

    def _compare(self, key: _Key, x: Tensor, alone: Tensor) -> None:
        i, cut = self.now
        if not _plain(x) or not _plain(alone) or x.dtype != alone.dtype:
            self._skip(key, f"its result is {type(alone).__qualname__} of {x.dtype}, alone {alone.dtype}")
            return
        part = _row_of(x, alone, self.batch, i, cut)
        if part is None:
            if not torch.equal(_bits(x), _bits(alone)):
                self._skip(key, "its result is one for the whole batch") if key[0] else None
            return
        if isinstance(part, str):
            self._skip(key, part)
            return
        self.compared[key] += alone.numel()
        if different := int((_bits(part) != _bits(alone)).sum()):
            self.varying[key] += different
            self.where.setdefault(key, self.now)


class _Operators(TorchDispatchMode):
    """Counts, for each module, the operators that are not pydet's and whose order of summation is PyTorch's."""

    def __init__(self, watched: _Watched) -> None:
        super().__init__()
        self.watched, self.seen = watched, {name: Counter[str]() for name in watched.names.values()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        space, name = function.namespace, function.overloadpacket.__name__
        if (what := _left(space, name, args, kwargs or {}, result)) is not None:
            self.seen[self.watched.stack[-1][0] if self.watched.stack else ""][what] += 1
        return result


def _left(space: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> str | None:
    """The name of an operator whose bits are PyTorch's to choose; None of others, and of what is taken over."""
    if space in _OWN:
        return None
    if space != "aten":
        return f"{space}::{name}"
    floats = any((x.is_floating_point() or x.is_complex()) and x.numel() for x in _tensors(result))
    if not floats or (override.is_active() and override.takes_over(name)):
        return None
    of = name.rstrip("_")
    if name in _PRODUCTS:
        left = args[-2] if len(args) > 1 and isinstance(args[-2], Tensor) else args[0]
        return None if isinstance(left, Tensor) and left.dim() and left.shape[-1] == 1 else name  # one product: no sum
    if of in _SUMS or any(x in name for x in _RECURRENT) or (name.startswith(_KERNELS) and "nearest" not in name):
        return name
    if of in ("index_put", "put") and (kwargs.get("accumulate") or args[3:4] == (True,)):
        return f"{name}, which accumulates"
    if any(x.device.type == "cpu" for x in _tensors(args)) and _by_place(of, args, kwargs):
        return f"{name}, by place on a CPU"
    return _COPIES.get(name)


def _by_place(of: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether PyTorch has two formulas for an operator on a CPU: in vectors, and for the rest of a thread's share."""
    if of in ("add", "sub", "rsub"):
        small = all(x.dtype in (torch.bfloat16, torch.float16) for x in _tensors(args))
        return small and kwargs.get("alpha", 1) != 1
    if of in ("mul", "div", "angle"):
        return any(x.is_complex() for x in _tensors(args))
    if of == "pow":
        return isinstance(args[1], Tensor) or args[1] not in _NOT_BY_PLACE
    return of in _BY_PLACE


# ---- The report ------------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """What :func:`check` saw. ``str()`` of it is a readable report, which ends with a verdict.

    Attributes:
        rows: of the batch.
        difference: the largest difference of a result from the stock model's, in the batch; None where that could not
            be run, with the reason in `notes`.
        largest: the largest of the stock model's results.
        elements: of the results, alone and in the batch: how many vary, and of how many.
        varying: the modules whose results vary with the batch, in the order in which they ran: how many elements vary,
            and of how many.
        stock_elements, stock_varying: the same of the stock model.
        first: the name of the first module in that order whose result varies; None if none does.
        made_by: what makes it vary, in a few words.
        left: the modules whose own code calls operators that PyTorch computes, and which.
        may_vary: those of them whose operators sum or depend on an element's place, and do not only copy or choose.
        skipped: the modules whose results could not be compared by rows, and why.
        notes: what else there is to say.
    """

    rows: int = 0
    difference: float | None = None
    largest: float = 0.0
    elements: tuple[int, int] = (0, 0)
    varying: dict[str, tuple[int, int]] = field(default_factory=dict)
    stock_elements: tuple[int, int] = (0, 0)
    stock_varying: dict[str, tuple[int, int]] = field(default_factory=dict)
    first: str | None = None
    made_by: str = ""
    left: dict[str, str] = field(default_factory=dict)
    may_vary: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rounding: float = 0.0  # the largest difference that is taken for rounding
    rounding_of: float = 0.0  # the last place of the type that factors have, where that is fp8

    @property
    def varies(self) -> bool:
        """Whether an element of the results or of a module's varies with the batch."""
        return bool(self.elements[0] or self.varying)

    @property
    def differs(self) -> bool:
        """Whether results differ from stock by more than rounding explains: the root of a type's last place, times the
        largest result."""
        return self.difference is not None and not self.difference <= self.rounding

    def __str__(self) -> str:
        lines = [f"one forward of {self.rows} rows, each alone and all in a batch"]
        if self.difference is not None:
            lines.append(
                f"  largest difference from stock: {self.difference:.3g}, where results go to {self.largest:.3g}"
            )
            lines.append(f"  stock: {self.stock_elements[0]} of {self.stock_elements[1]} elements vary with the batch")
        lines.append(f"  converted: {self.elements[0]} of {self.elements[1]} elements vary with the batch")
        if self.first is not None:
            lines.append(f"  the first that varies: {self.first or '(the model)'}; {self.made_by}")
        for name, (n, of) in list(self.varying.items())[:8]:
            lines.append(f"    {name or '(the model)'}: {n} of {of}")
        if len(self.varying) > 8:
            lines.append(f"    and {len(self.varying) - 8} more modules")
        lines += [f"  left to PyTorch: {what}: {names}" for what, names in _grouped(self.left)]
        lines += [f"  not compared, {why}: {names}" for why, names in _grouped(self.skipped)]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes), self.verdict()])

    def verdict(self) -> str:
        """What was seen, and what was not looked at, in a few sentences."""
        what = []
        if not self.elements[1]:
            what.append("No result could be compared by rows, so this says nothing of the batch.")
        elif self.elements[0]:
            what.append(f"The model is NOT batch-invariant: {self.elements[0]} of {self.elements[1]} elements vary.")
        elif self.varying:
            inner = f"results of {len(self.varying)} modules do"
            what.append(f"No element of {self.elements[1]} varies in this batch, but within the model {inner}.")
        else:
            what.append(f"In this batch no element of {self.elements[1]} varies, nor within the modules.")
        if self.may_vary and self.elements[1] and not self.elements[0]:
            what.append(f"In others it may: {len(self.may_vary)} modules call sums and the like of PyTorch's (left).")
        if self.difference is None:
            what.append("It was not compared with stock.")
        elif self.differs:
            chosen = any(_COPIES["topk"] in x for x in self.left.values())
            flips = "; or rounding changed a router's choice, so look in float32" if chosen else ""
            what.append(f"It does NOT compute what stock does: the difference is more than rounding explains{flips}.")
        else:
            what.append("It computes what stock does, but for rounding.")
        what.append(
            "Not looked at: other batches, gradients, training mode, decoding with a cache, other numbers of threads."
        )
        return " ".join(what)


def _grouped(names: dict[str, str]) -> Iterator[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for name, what in names.items():
        groups.setdefault(what, []).append(name or "(the model)")
    for what, members in groups.items():
        yield what, ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")


def _by_module(alone: _Alone) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for key, n in alone.varying.items():
        if n and (key[0] not in alone.skipped or not key[0]):
            former = found.get(key[0], (0, 0))
            found[key[0]] = former[0] + n, former[1] + alone.compared[key]
    return found


def _observe(model: torch.nn.Module, batch: _Batch) -> tuple[_Alone, list[Tensor]]:
    """The batch, then each row alone: as it is, and without its padding."""
    batched = _Batched(model, batch)
    results = [x.detach().clone() for x in batched.run(batch.values) if _plain(x)]
    alone = _Alone(batched)
    for i in range(batch.rows):
        alone.now = i, False
        alone.run(batch.row(i))
        if batch.kept and batch.kept[i] != (0, batch.tokens):
            alone.now = i, True
            alone.run(batch.cut(i))
    return alone, results


def _cause(alone: _Alone, key: _Key) -> str:
    """Whether it is a module, or what another gives it, that varies first."""
    model, batch = alone.model, alone.batch
    i, cut = alone.where[key]
    together, single = _Inputs(model, batch, key), _Inputs(model, batch, key)
    together.run(batch.values)
    single.run(batch.cut(i) if cut else batch.row(i))
    kinds = {name: type(module).__qualname__ for module, name in alone.names.items()}
    for x, y in zip(together.inputs, single.inputs, strict=False):
        part = _row_of(x, y, batch, i, cut) if _plain(x) and _plain(y) and x.dtype == y.dtype else None
        if isinstance(part, Tensor) and not torch.equal(_bits(part), _bits(y)):
            name = together.caller
            return f"what it is given varies already, by code of {name or 'the model'} ({kinds[name]})"
    inner = next(module for module, name in alone.names.items() if name == key[0]).children()
    return (
        f"what it is given does not vary: {'code of its own' if any(True for _ in inner) else 'it is'} {kinds[key[0]]}"
    )


def _largest(x: Tensor) -> float:
    return float(x.detach().double().abs().nan_to_num(posinf=0.0).max()) if x.numel() else 0.0


def _seen(x: Tensor, read: _Batch) -> Tensor:
    """What of a result is of tokens that take part: of the others a model may give anything."""
    if read.kept is None or x.dim() < 2 or tuple(x.shape[:2]) != (read.rows, read.tokens):
        return x
    return torch.cat([row[first : first + n] for row, (first, n) in zip(x, read.kept, strict=True)])


def _compare(found: Check, got: list[Tensor], want: list[Tensor]) -> None:
    found.difference = 0.0
    if len(got) != len(want) or any(x.shape != y.shape for x, y in zip(got, want, strict=False)):
        found.difference = float("inf")
        found.notes.append("the results of stock have other shapes")
        return
    for x, y in zip(got, want, strict=True):
        if not x.is_floating_point() or not y.is_floating_point():
            continue
        a, b = x.double(), y.double()
        unlike = ~((a == b) | (a.isnan() & b.isnan()))
        far = (a - b).abs()[unlike]
        largest = _largest(y)
        found.difference = max(
            found.difference, float("inf") if far.isnan().any() else float(far.max()) if len(far) else 0
        )
        found.largest = max(found.largest, largest)
        found.rounding = max(found.rounding, max(torch.finfo(x.dtype).eps, found.rounding_of) ** 0.5 * largest)


def check(model: torch.nn.Module, batch: Any, *, stock: torch.nn.Module | None = None) -> Check:
    """Runs a forward of a model as it was before :func:`convert` and as it is, and says what it saw.

    Each of the two computes the batch, and each of its rows alone: under the mask that it has in the batch and, where
    ``attention_mask`` pads it, cut to its own tokens. What modules give is compared word by word, of the model and of
    all modules that are called. A last run notes which operators of PyTorch's the modules call, whatever their names:
    products, convolutions, sums, attention, functions that depend on an element's place.

    A model that has nothing of pydet's is converted for a while. After it, also after an error, the model is as it was:
    classes, training mode, buffers, hooks, random numbers. The results of all modules for one batch are held in memory.
    Under :func:`override_aten` both are computed under it.

    Args:
        model: a converted model, or one to be converted.
        batch: what its forward takes, as a dict by name, a tuple, or one tensor. What has as many rows as ``input_ids``
            (else the first tensor) is cut into rows, and the rest is given whole. With padding on the left and
            without ``position_ids`` those that ``generate()`` would make are added, where the forward takes them.
        stock: the model to compare with; by default this one before it was converted, with Transformers' eager
            attention and its own experts in place of pydet's.

    Returns:
        What was seen; ``print()`` it.

    Raises:
        Error: ``model`` is no module, the batch has fewer than two rows or holds objects, as a cache; and what the
            converted model's forward raises.
    """
    from pydet.torch import conversion  # which imports this

    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"check: model is {type(model).__qualname__}, want a torch.nn.Module")
    read, found = _read(model, batch), Check()
    # what is compiled runs as it is written: a graph has no modules that could be watched
    with _left_as_it_was(model), torch.compiler.set_stance("force_eager"), contextlib.ExitStack() as until:
        if not any(type(module).__module__.startswith("pydet.") or was(module) for module in model.modules()):
            until.enter_context(conversion.converted(model))
            found.notes.append("the model is not converted; it was for this")
        alone, got = _observe(model, read)
        found.varying, found.skipped = _by_module(alone), alone.skipped
        root = [key for key in alone.compared if key[0] == ""]
        found.elements = sum(alone.varying[key] for key in root), sum(alone.compared[key] for key in root)
        if first := next((key for key, n in alone.varying.items() if n and key[0] in found.varying), None):
            found.first, found.made_by = first[0], _cause(alone, first)
        watched = _Watched(model, read)
        with _Operators(watched) as operators:
            watched.run(read.values)
        found.left = {
            name: f"{kind} calls " + ", ".join(f"{what} x {n}" if n > 1 else what for what, n in seen.items())
            for name, seen in operators.seen.items()
            if seen and (kind := type(model.get_submodule(name)).__qualname__)
        }
        found.may_vary = [name for name, seen in operators.seen.items() if set(seen) - set(_COPIES.values())]
        if any(isinstance(module, Fp8Linear | Fp8Experts) for module in model.modules()):
            found.rounding_of = torch.finfo(torch.float8_e4m3fn).eps
        found.rows, found.notes = read.rows, found.notes + read.notes
        _beside_stock(found, model, read, stock, got)
    return found


def _beside_stock(found: Check, model: Any, read: _Batch, stock: Any, got: list[Tensor]) -> None:
    with contextlib.ExitStack() as until:
        if stock is not None:
            until.enter_context(_left_as_it_was(stock))
        elif not until.enter_context(as_stock(model)):
            found.notes.append("of no module is known what it was (a pickle, or made of pydet's modules); give stock=")
            return
        try:
            alone, want = _observe(model if stock is None else stock, read)
        except Exception as problem:  # whatever it is, pydet's model ran
            found.notes.append(f"stock cannot run: {type(problem).__name__}: {problem}".splitlines()[0])
            return
        root = [key for key in alone.compared if key[0] == ""]
        found.stock_elements = sum(alone.varying[key] for key in root), sum(alone.compared[key] for key in root)
        found.stock_varying = _by_module(alone)
        _compare(found, *([_seen(x, read) for x in results] for results in (got, want)))
