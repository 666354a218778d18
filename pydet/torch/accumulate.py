"""Functions whose backward adds to sums in fp32, by which micro-batches come to the bits of one batch."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections import Counter
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pydet
from pydet._native import UNSUPPORTED, fail
from pydet.torch.ops import DTYPES, matrix
from pydet.torch.ops.attention import adjacent, padded


def main_grad(parameter: Any) -> Any:
    """The sum of a parameter that accumulates, from zeros where it has none yet: one of a copied model."""
    if getattr(parameter, "main_grad", None) is None:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.main_grad


class Parts:
    """The sums of a parameter that several modules have, one for each in the order of ``named_modules``: ``main_grad``
    is their sum in that order, folded anew after each backward. So neither comes between the other's addends, and
    micro-batches have the bits of one batch."""

    def __init__(self, parameter: Any, count: int) -> None:
        self.sums = [torch.zeros_like(parameter, dtype=torch.float32) for _ in range(count)]
        self.main: Any = None
        self.version = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.version = 0 if self.main is None else self.main._version

    def follow(self, main: Any) -> None:
        """Who zeroes main_grad between steps knows nothing of its parts."""
        if main is self.main and main._version == self.version:
            return
        if bool(main.any()):
            fail(
                UNSUPPORTED,
                "accumulate_gradients: main_grad of a weight that several modules have was written, and is not zero; "
                "its parts are sums of their own, so want it zeroed after a step, or left alone",
            )
        for part in self.sums:
            part.zero_()

    def fold(self, main: Any) -> None:
        """``((part 0 + part 1) + part 2) ...``, each rounded."""
        torch.add(self.sums[0], self.sums[1], out=main)
        for part in self.sums[2:]:
            main.add_(part)
        self.main, self.version = main, main._version


Part: TypeAlias = tuple[int, int] | None  # which part of how many; None where main_grad has no parts


def sum_of(parameter: Any, part: Part) -> Any:
    """What a module's backward adds to."""
    main = main_grad(parameter)
    if part is None:
        return main
    parts = getattr(parameter, "main_grad_parts", None)
    if not isinstance(parts, Parts) or len(parts.sums) != part[1]:
        parts = parameter.main_grad_parts = Parts(parameter, part[1])
    parts.follow(main)
    parts.main, parts.version = main, main._version
    return parts.sums[part[0]]


def fold(parameter: Any, part: Part) -> None:
    """After it has added."""
    if part is not None:
        parameter.main_grad_parts.fold(main_grad(parameter))


def _backward_pass() -> int:
    """The number of the one that runs; -1 where PyTorch does not say."""
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if ask is None else int(ask())


class Tally:
    """How a sum comes about, as far as micro-batches have not the bits of one batch: what the report counts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.repeated: Counter[str] = Counter()  # additions beside an earlier one of the same backward pass
        self.cut: Counter[str] = Counter()  # additions behind rows that end in the middle of what is added as one
        self.backward_pass, self.rows = -1, 0
        self.total: Any = lambda: None
        self.version = 0

    def __reduce__(self) -> Any:
        return Tally, (self.name,)

    def add(self, total: Any, rows: int, step: int) -> None:
        if self.total() is not total or self.version != total._version:  # it was zeroed
            self.total, self.version, self.rows = weakref.ref(total), total._version, 0
        number = _backward_pass()
        if number >= 0 and number == self.backward_pass:
            self.repeated[self.name] += 1
        if self.rows % step and rows:
            self.cut[self.name] += 1
        self.backward_pass = number
        self.rows += rows


def adding(parameter: Any, part: Part = None, rows: int = 0, step: int = 1) -> Any:
    """:func:`sum_of`, to which a backward is about to add these rows, of which `step` are added as one."""
    total = sum_of(parameter, part)
    if (tally := getattr(parameter, "pydet_tallies", {}).get(part)) is not None:
        tally.add(total, rows, step)
    return total


@functools.cache
def _step(dtype: torch.dtype, kind: str, index: int, arithmetic: Any, k_chunk: int | None) -> int:
    if k_chunk is not None:
        return k_chunk
    return 1 if pydet.resolve_arithmetic(dtype, (kind, index), arithmetic) == "ieee" else 16


def step_of(x: torch.Tensor, arithmetic: Any, k_chunk: int | None = None) -> int:
    """How many rows of x a product over rows adds as one."""
    kind = "rocm" if x.is_cuda and torch.version.hip else x.device.type
    return _step(x.dtype, kind, x.device.index or 0, arithmetic, k_chunk)


class _FromOutside:
    """Hook of a parameter that accumulates: a gradient that autograd has for it is one that main_grad lacks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            fail(
                UNSUPPORTED,
                f"accumulate_gradients: {self.name} got a gradient from outside its module's forward, as of tied "
                "weights or a fused head that multiplies it itself, and main_grad would lack it; want the module "
                "called, or accumulate_gradients of modules without it",
            )


class Accumulation:
    """What a module has as ``accumulates``: its parameters that have sums, by name. Those of a copied module have sums
    of their own, from zeros, made in its first backward; those of a pickled one keep theirs. A module that has another
    ``accumulates`` again, as False, lets this one go, and with it the hooks. ``part`` is that of its weight. ``shares``
    says that a batch may share what the module makes of its parameters, and ``summed`` counts, by name, how often the
    gradient of that came summed by PyTorch."""

    def __init__(
        self, parameters: dict[str, Any], part: Part = None, multiplies: bool = True, shares: bool = False
    ) -> None:
        self.parameters, self.part, self.multiplies, self.shares = parameters, part, multiplies, shares
        self.own = {name.rpartition(".")[2]: name for name in parameters}
        self.summed: Counter[str] = Counter()
        self.tallies: list[Tally] = []
        for name, parameter in parameters.items():
            parameter.pydet_accumulates = True
            if multiplies and parameter.dim() > 1:
                parameter.pydet_part = part
            of = part if name.rpartition(".")[2] == "weight" else None
            self.tallies.append(Tally(name))
            parameter.pydet_tallies = {**getattr(parameter, "pydet_tallies", {}), of: self.tallies[-1]}
            trained = parameter.requires_grad
            hook = parameter.requires_grad_(True).register_hook(_FromOutside(name))
            parameter.requires_grad_(trained)
            weakref.finalize(self, hook.remove).atexit = False

    def __deepcopy__(self, memo: Any) -> Accumulation:
        own = {name: copy.deepcopy(x, memo) for name, x in self.parameters.items()}
        return Accumulation(own, self.part, self.multiplies, self.shares)

    def __reduce__(self) -> Any:
        return Accumulation, (self.parameters, self.part, self.multiplies, self.shares)


def part_of(module: Any) -> Part:
    """That of a module's weight, where other modules have the weight too."""
    part: Part = getattr(module.accumulates, "part", None)
    return part


def part_of_product(parameter: Any) -> Part:
    """That of the linear layer whose weight something else multiplies in its place, as a fused head."""
    part: Part = getattr(parameter, "pydet_part", None)
    return part


_WRAPPERS = ("FullyShardedDataParallel",)


def wrapper(module: Any) -> str | None:
    """The name of a wrapper of PyTorch's that reduces grad, and never sees main_grad; None for other modules."""
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
    return next((name for name in names if name in _WRAPPERS), None)


def refuse_wrapper(name: str, wanted: str = "the module itself") -> NoReturn:
    """Says that a wrapper's reduction passes main_grad by."""
    fail(
        UNSUPPORTED,
        f"accumulate_gradients: the model is in {name}, which reduces grad and never main_grad; want {wanted}, and "
        "main_grad summed over the ranks by distributed.OrderedMainGrads",
    )


def _watch_registered(parent: torch.nn.Module, _: str, module: torch.nn.Module | None) -> None:
    """A wrapper takes a module into itself, as it is made."""
    name = wrapper(parent) if module is not None else None
    if module is not None and name and any(getattr(inner, "accumulates", False) for inner in module.modules()):
        refuse_wrapper(name)


@functools.cache
def watch_for_wrappers() -> Any:
    """Once in a process."""
    return torch.nn.modules.module.register_module_module_registration_hook(_watch_registered)


_warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _before_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """An optimizer of others reads grad, and passes by a parameter that has none."""
    if optimizer in _warned or type(optimizer).__module__.startswith("pydet."):
        return
    own = [p for group in optimizer.param_groups for p in group["params"] if hasattr(p, "pydet_accumulates")]
    passed = [
        p for p in own if p.grad is None and getattr(p, "main_grad", None) is not None and bool(p.main_grad.any())
    ]
    if passed:
        _warned.add(optimizer)
        warnings.warn(
            f"accumulate_gradients: {type(optimizer).__qualname__} steps over {len(passed)} parameters whose gradient "
            "is in main_grad and whose grad is None: unless it reads main_grad, they stay as they are; want "
            "pydet.torch.AdamW, or p.grad = p.main_grad.to(p.dtype) before each step and main_grad zeroed after it",
            stacklevel=3,
        )


@functools.cache
def watch_optimizers() -> Any:
    """Once in a process."""
    return register_optimizer_step_pre_hook(_before_step)


def _left_out(parallel: Any, parameters: dict[str, Any]) -> bool:
    """Whether a DistributedDataParallel leaves all of these to shard_experts, which sums them over the same ranks."""
    shares = [getattr(x, "pydet_shares", None) for x in parameters.values() if x is not None]
    ranks = torch.distributed.get_process_group_ranks(parallel.process_group)
    return all(x is not None and x.tokens == "shard" and x.ranks() == ranks for x in shares)


def check_own(operation: str, **parameters: Any) -> None:
    """In a forward whose backward will add to sums: the parameters have them, and nothing is to reduce grad."""
    for name, parameter in parameters.items():
        if parameter is not None and parameter.requires_grad and not hasattr(parameter, "pydet_accumulates"):
            fail(
                UNSUPPORTED,
                f"{operation}: its {name} has no main_grad, and its gradient would be lost: something other than the "
                "parameter of accumulate_gradients() is in its place (put there by fully_shard, DataParallel, "
                "functional_call, weight_norm or an assignment); want that parameter, or accumulate_gradients(model) "
                "after an assignment",
            )
    parallel = getattr(torch.nn.parallel.distributed, "DistributedDataParallel", None)
    active = getattr(parallel, "_active_ddp_module", None)
    if active is not None and active.require_backward_grad_sync and not _left_out(active, parameters):
        refuse_wrapper("DistributedDataParallel", "it called and its backward run under its no_sync()")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`matrix`, the elements of a row adjacent."""
    x = matrix(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_tokens(x: torch.Tensor) -> list[int]:
    """The order of the dimensions that count rows: theirs, but tokens before heads where x is ``[B, H, T, D]`` made by
    ``view(B, T, H, D).transpose(1, 2)``, as queries are in some models. So the rows of a token are together, and those
    of a pack in the order that its sequences have one by one."""
    exchanged = x.dim() == 4 and x.stride(1) == x.shape[3] and x.stride(2) >= x.shape[1] * x.shape[3]
    return [0, 2, 1] if exchanged else list(range(x.dim() - 1))


def _like(rows: torch.Tensor, x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Rows that are in this order, in the shape of x."""
    found = rows.view(*(x.shape[dim] for dim in order), x.shape[-1])
    return found.permute(*(order.index(dim) for dim in range(len(order))), -1)


def _read(ctx: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """What backward multiplies by, if it will: saved with x, so that PyTorch refuses one that was written meanwhile."""
    return parameter if ctx.needs_input_grad[0] else None


def _is_turned(x: torch.Tensor) -> bool:
    """``[T, B, K]`` that is a view of ``[B, T, K]``, as in Longformer's attention, whose tokens of a sequence are not
    together."""
    return x.dim() == 3 and x.shape[1] > 1 and x.stride() == (x.shape[2], x.shape[0] * x.shape[2], 1)


def _as_matrix(w: torch.Tensor) -> torch.Tensor:
    return w if w.dim() == 2 else w.flatten(1)


class AccumulatingLinear(torch.autograd.Function):
    """:func:`pydet.torch.linear` whose backward continues the sums in its parameters' ``main_grad``. w is a
    matrix, or ``[N, ...]`` of a convolution, of which the rest is a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        arithmetic: str,
        k_chunk: int | None,
        read_as: torch.dtype | None = None,
        part: Part = None,
    ) -> torch.Tensor:
        check_own("Linear", weight=w, bias=bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x, _read(ctx, w))
        ctx.w, ctx.bias, ctx.part, ctx.options = w, bias, part, {"arithmetic": arithmetic, "k_chunk": k_chunk}
        return torch.ops.pydet.skinny_gemm(x, _as_matrix(w.to(read_as or w.dtype)), bias, None, arithmetic, k_chunk)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, factor), w, bias = ctx.saved_tensors, ctx.w, ctx.bias
        rows, dx = _rows(dy.to(x.dtype)), None
        if ctx.needs_input_grad[0]:
            dx = pydet.gemm(rows, _as_matrix(factor.detach().to(x.dtype)), **ctx.options).view(x.shape)
        if _is_turned(x):  # sequences one after another
            rows, x = _rows(dy.to(x.dtype).transpose(0, 1)), x.transpose(0, 1)
        step = step_of(x, **ctx.options)
        if w.requires_grad:
            total = adding(w, ctx.part, len(rows), step)
            out = _as_matrix(total)
            pydet.gemm_db(rows, _rows(x), out=out, accumulate=True, **ctx.options)
            if out.data_ptr() != total.data_ptr():  # of a convolution whose channels are adjacent
                total.copy_(out.view(total.shape))
            fold(w, ctx.part)
        if bias is not None and bias.requires_grad:
            ones = torch.ones_like(rows[:, :1])
            pydet.gemm_db(ones, rows, out=adding(bias, None, len(rows), step)[None], accumulate=True, **ctx.options)
        return dx, None, None, None, None, None, None


class AccumulatingConv1D(torch.autograd.Function):
    """``x w + bias``, whose weight is stored the other way round, likewise."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor,
        arithmetic: str,
        k_chunk: int | None,
        part: Part = None,
    ) -> torch.Tensor:
        check_own("Conv1D", weight=w, bias=bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x, _read(ctx, w))
        ctx.w, ctx.bias, ctx.part, ctx.options = w, bias, part, {"arithmetic": arithmetic, "k_chunk": k_chunk}
        y = torch.ops.pydet.gemm(matrix(x), w, bias, None, arithmetic, k_chunk)
        return y.view(*x.shape[:-1], w.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, factor), w, bias = ctx.saved_tensors, ctx.w, ctx.bias
        rows, dx = _rows(dy.to(x.dtype)), None
        if ctx.needs_input_grad[0]:
            dx = pydet.gemm(rows, factor.detach().to(x.dtype).t(), **ctx.options).view(x.shape)
        step = step_of(x, **ctx.options)
        if w.requires_grad:
            pydet.gemm_db(_rows(x), rows, out=adding(w, ctx.part, len(rows), step), accumulate=True, **ctx.options)
            fold(w, ctx.part)
        if bias.requires_grad:
            ones = torch.ones_like(rows[:, :1])
            pydet.gemm_db(ones, rows, out=adding(bias, None, len(rows), step)[None], accumulate=True, **ctx.options)
        return dx, None, None, None, None, None


class AccumulatingEmbedding(torch.autograd.Function):
    """Rows of a table, whose backward continues the sums of its rows in ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, w: torch.Tensor, padding: int | None, part: Part = None) -> torch.Tensor:
        check_own("Embedding", weight=w)
        ctx.save_for_backward(ids)
        ctx.w, ctx.padding, ctx.part = w, padding, part
        return torch.nn.functional.embedding(ids, w)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (ids,), w = ctx.saved_tensors, ctx.w
        if w.requires_grad:
            rows = _rows(dy if dy.dtype in DTYPES else dy.float())
            into = {"out": adding(w, ctx.part), "accumulate": True}
            pydet.embedding_backward(rows, ids.reshape(-1), padding_idx=ctx.padding, **into)
            fold(w, ctx.part)
        return None, None, None, None


def local(x: Any) -> Any:
    """What this rank has of a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


class Sources(NamedTuple):
    """Rows that lie by experts, and those of an expert by the ranks that they are of: where each rank's begin and end,
    ``[W, experts]``, and how many each rank has in all. Each rank's rows are a segment of the step."""

    starts: torch.Tensor
    ends: torch.Tensor
    rows: list[int]


def _written(parameter: Any) -> tuple[int, int]:
    """What tells one main_grad, and who zeroed it, from another. A DTensor's own version counts what it was told."""
    main = main_grad(parameter)
    return id(main), main._version


def _begin_pass(parameter: Any) -> None:
    """The sum over segments has an order where a backward pass adds one segment of each rank, once. The passes since
    main_grad was zeroed, or OrderedMainGrads.add(), are counted."""
    number = _backward_pass()
    if number >= 0 and getattr(parameter, "pydet_pass", -1) == number:
        fail(
            UNSUPPORTED,
            "shard_experts: a layer of experts is called twice in a backward pass, and the order of its gradient would "
            "follow the number of ranks; want it called once, or tokens='replicate'",
        )
    parameter.pydet_pass = number
    zeroed = getattr(parameter, "pydet_written", None) != _written(parameter)
    parameter.pydet_passes = 1 if zeroed else getattr(parameter, "pydet_passes", 0) + 1


class AccumulatingExperts(torch.autograd.Function):
    """A layer of experts on rows in groups, ``[G, N, K]`` matrices or transposed ``[G, K, N]``, likewise. With sources,
    main_grad goes on by one addition for each rank's rows, rank 0's first: ``D = fl(D + s)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        group_end: torch.Tensor,
        transposed: bool,
        arithmetic: str,
        k_chunk: int | None,
        sources: Sources | None = None,
    ) -> torch.Tensor:
        check_own("experts", matrices=w, bias=bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        own = local(w)
        ctx.save_for_backward(x, group_end, _read(ctx, own))
        ctx.w, ctx.bias, ctx.transposed, ctx.how = w, bias, transposed, (arithmetic, k_chunk)
        ctx.sources = sources
        matrices = own if transposed else own.mT
        return torch.ops.pydet.grouped_gemm(x, matrices, group_end, local(bias), None, arithmetic, k_chunk)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, ends, factor), w, bias = ctx.saved_tensors, ctx.w, ctx.bias
        rows, x, dx = _rows(dy.to(x.dtype)), _rows(x), None
        into = {"arithmetic": ctx.how[0], "k_chunk": ctx.how[1]}
        if ctx.needs_input_grad[0]:
            matrices = factor.detach().to(x.dtype)
            matrices = matrices.mT if ctx.transposed else matrices
            dx = torch.ops.pydet.grouped_gemm(rows, matrices, ends, None, None, *ctx.how)
        if w.requires_grad:
            left, right = (x, rows) if ctx.transposed else (rows, x)
            _add(left.t(), right, ends, w, local(adding(w)), ctx.sources, into)
        if bias is not None and bias.requires_grad:
            ones = rows.new_ones((1, rows.shape[0]))
            _add(ones, rows, ends, bias, local(adding(bias))[:, None], ctx.sources, into)
        return dx, None, None, None, None, None, None, None


def _add(
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor,
    parameter: Any,
    main: torch.Tensor,
    sources: Sources | None,
    how: dict[str, Any],
) -> None:
    """The sums over each group's rows, to the parameter's."""
    if sources is None:
        pydet.grouped_gemm(left, right, ends, out=main, accumulate=True, **how)
        return
    _begin_pass(parameter)
    for start, end, count in zip(sources.starts, sources.ends, sources.rows, strict=True):
        if count and how["k_chunk"] is None:  # a chunk that has all of them: a chain from +0, and one addition
            one = how | {"k_chunk": -(-count // 16) * 16}
            pydet.grouped_gemm(left, right, end, start, out=main, accumulate=True, **one)
        elif count:
            part = pydet.grouped_gemm(left, right, end, start, out_dtype=torch.float32, **how)
            pydet.fold([part], out=main, accumulate=True)
    parameter.pydet_written = _written(parameter)


class AccumulatingAttention(torch.autograd.Function):
    """:func:`pydet.torch.attention` with sinks, whose backward continues the sum over sequences in theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        allowed: torch.Tensor | None,
        sinks: torch.Tensor,
        scale: float,
        softcap: float | None,
        causal: bool,
        arithmetic: str,
        kv_chunk: int,
    ) -> torch.Tensor:
        check_own("attention", sinks=sinks)
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        ctx.sinks, ctx.options = sinks, {"scale": scale, "softcap": softcap, "arithmetic": arithmetic}
        more = sinks.detach(), softcap, causal, allowed is not None
        out, lse = torch.ops.pydet.attention(q, k, v, allowed, scale, arithmetic, kv_chunk, *more)
        ctx.save_for_backward(q, k, v, allowed, out, lse, sinks)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        (q, k, v, allowed, out, lse, _), sinks = ctx.saved_tensors, ctx.sinks
        scale, softcap, arithmetic = (ctx.options[name] for name in ("scale", "softcap", "arithmetic"))
        more = None, softcap, ctx.causal, allowed is not None
        *gradients, _ = torch.ops.pydet.attention_backward(dout, q, k, v, allowed, out, lse, scale, arithmetic, *more)
        if sinks.requires_grad and out.numel() and k.shape[2]:
            q, k, v = (adjacent(x) for x in padded(q, k, v))
            dout, out = (adjacent(torch.nn.functional.pad(x, (0, v.shape[-1] - x.shape[-1]))) for x in (dout, out))
            of = {"allowed": allowed, "causal": ctx.causal, "sinks": sinks.detach().contiguous(), "only": "sinks"}
            into = {"dsinks": adding(sinks), "accumulate": True}
            pydet.attention_backward(dout, q, k, v, out, lse, **of, **into, **ctx.options)
        return *gradients, None, None, None, None, None, None, None


class AccumulatingRmsNorm(torch.autograd.Function):
    """:func:`pydet.torch.rms_norm` whose backward continues the sum in its weight's ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> torch.Tensor:
        check_own("RMSNorm", weight=weight)
        y, rstd = torch.ops.pydet.rmsnorm(x, weight, eps, weight_offset)
        ctx.save_for_backward(x, rstd, weight)
        ctx.weight, ctx.weight_offset = weight, weight_offset
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, rstd, factors), weight = ctx.saved_tensors, ctx.weight
        rows_of_a_head = x.numel() // max(weight.numel(), 1)
        into: dict[str, Any] = {}
        if weight.requires_grad:
            into = {"dweight": adding(weight, None, rows_of_a_head, pydet.DWEIGHT_ROWS), "accumulate": True}
        order = _by_tokens(x)
        rows = [_rows(part.permute(*order, -1)) for part in (dy, x)]
        operands = (*rows, factors.detach(), rstd.view(x.shape[:-1]).permute(order).reshape(-1))
        dx, _ = pydet.rmsnorm_backward(*operands, weight_offset=ctx.weight_offset, **into)
        return _like(dx, x, order), None, None, None


class AccumulatingLayerNorm(torch.autograd.Function):
    """:func:`layer_norm` whose backward continues the sums in its parameters' ``main_grad``. ``weight_offset`` is added
    to the weight in its type."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        weight_offset: float = 0.0,
    ) -> torch.Tensor:
        check_own("LayerNorm", weight=weight, bias=bias)
        factors = weight + weight_offset if weight_offset else weight
        y, mean, rstd = torch.ops.pydet.layernorm(x, factors, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.weight, ctx.bias, ctx.weight_offset = weight, bias, weight_offset
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, mean, rstd, read), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        count = x.numel() // max(weight.numel(), 1), pydet.DWEIGHT_ROWS
        into = {"dweight": adding(weight, None, *count)} if weight.requires_grad else {}
        if bias is not None and bias.requires_grad:
            into["dbias"] = adding(bias, None, *count)
        factors = read.detach() + ctx.weight_offset if ctx.weight_offset else read.detach()
        order = _by_tokens(x)
        rows = (_rows(part.permute(*order, -1)) for part in (dy, x))
        moments = (part.view(x.shape[:-1]).permute(order).reshape(-1) for part in (mean, rstd))
        operands = (*rows, factors, *moments)
        dx, *_ = pydet.layernorm_backward(*operands, **into, has_bias=False, accumulate=bool(into))
        return _like(dx, x, order), None, None, None, None
