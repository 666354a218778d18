"""A model whose experts are shared out over the ranks: each keeps some of every layer's, and multiplies their rows.

Two cases. Each rank has tokens of its own (``shard``), as in data parallel training: rows travel to their experts and
back (:mod:`pydet.torch.distributed.experts`). Or all ranks have the same tokens (``replicate``), as beside tensor
parallel layers: a rank makes the rows of its own experts, and of all rows each is one rank's. Those of few tokens are
joined by an all-reduce of their bit patterns as integers, of which all ranks' but one are zero: nothing is rounded, and
nothing waits for the host, so a CUDA graph may hold it. Of many tokens each rank takes a part, as if they were its own.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.ops import Arithmetic
from pydet.torch.accumulate import AccumulatingExperts, Sources, local
from pydet.torch.distributed.exchange import Group, Tensor, gather, shared, together
from pydet.torch.distributed.experts import by_ranks, check_routed, meet_in_backward
from pydet.torch.distributed.fsdp import ranks_around
from pydet.torch.distributed.symmetric import capturing
from pydet.torch.experts import ToExperts, combine, is_experts, layers_of, of_pydet, route, sum_of_slots
from pydet.torch.experts_fp8 import Fp8Experts, matrices_of

Tokens: TypeAlias = Literal["shard", "replicate"]
TOKENS = ("shard", "replicate")
How: TypeAlias = tuple[Arithmetic, "int | None"]
_OP = "shard_experts"
# Of all slots' rows: up to here every rank has them all, and they are joined; from here on each has its tokens'.
JOIN_BYTES = 1 << 24


# ---- The same tokens on every rank -----------------------------------------------------------------------------------


def _join(rows: Tensor, group: Group) -> Tensor:
    """Rows of which every one is zeros on all ranks but one, as that rank has them: in their own memory."""
    words = rows.view(-1).view(torch.uint8)
    dist.all_reduce(words.view(torch.int32) if words.numel() % 4 == 0 else words, group=group)
    return rows


class _JoinedRows(torch.autograd.Function):
    """This rank's experts' rows, and zeros: by slots, with those of all ranks. Its gradient is everywhere whole."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(order)
        return _join(rows[inverse], group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][ctx.saved_tensors[0]], None, None, None


class _ToOwnExperts(torch.autograd.Function):
    """:class:`ToExperts`, whose gradient has the slots that other ranks' experts made, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape, ctx.group = x.shape, group
        return x[order // max(order.shape[0] // max(x.shape[0], 1), 1)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (inverse,), (tokens, width) = ctx.saved_tensors, ctx.shape
        meet_in_backward(ctx.group, gradients[0])
        rows = _join(gradients[0][inverse], ctx.group).view(tokens, -1 if tokens else 0, width)
        ones = rows.new_ones((tokens, 1, rows.shape[1]))
        return torch.ops.pydet.gemm(ones, rows, None, None, "ieee")[:, 0], None, None, None


def _cut(count: int, group: Group) -> tuple[list[int], int]:
    """How many tokens of `count` each rank takes, and where this rank's begin."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [count // world + (r < count % world) for r in range(world)]
    return sizes, sum(sizes[:rank])


def _all_parts(part: Tensor, count: int, group: Group) -> Tensor:
    sizes, _ = _cut(count, group)
    padded = part.new_zeros(sizes[0], *part.shape[1:])
    padded[: len(part)] = part
    return torch.cat([rows[:size] for rows, size in zip(gather(padded, group), sizes, strict=True)])


class _OwnPart(torch.autograd.Function):
    """This rank's part of the tokens, whose gradients come from all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        sizes, begin = _cut(len(x), group)
        ctx.count, ctx.group = len(x), group
        return x[begin : begin + sizes[dist.get_rank(group)]].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        meet_in_backward(ctx.group, gradients[0])
        return _all_parts(gradients[0], ctx.count, ctx.group), None


class _AllParts(torch.autograd.Function):
    """The tokens of all ranks' parts; a rank's gradient is that of its own, which all have alike."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, count: int, group: Group) -> Tensor:
        ctx.group, ctx.count = group, count
        return _all_parts(part, count, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sizes, begin = _cut(ctx.count, ctx.group)
        return gradients[0][begin : begin + sizes[dist.get_rank(ctx.group)]], None, None


# ---- A layer ---------------------------------------------------------------------------------------------------------


class Shares:
    """Among whom a layer's experts are shared out, and whose the tokens are. Copies of a model share it."""

    def __init__(self, mesh: Any, tokens: str) -> None:
        self.mesh, self.tokens, self.seen = mesh, tokens, False

    def __deepcopy__(self, memo: Any) -> Shares:
        return self

    @property
    def group(self) -> Group:
        return self.mesh.get_group()

    def ranks(self) -> list[int]:
        """Among all processes."""
        return list(dist.get_process_group_ranks(self.group))

    def place(self) -> str:
        """Which share of how many this rank has."""
        return f"share {dist.get_rank(self.group)} of {dist.get_world_size(self.group)}"

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks meet on the host
    def forward(self, module: Any, how: How, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What the layer of experts computes: ``[T, H]``."""
        if self.tokens == "shard":
            return self._of_own_tokens(module, how, x, index, weights)
        if dist.get_world_size(self.group) == 1:
            return _alone(module, how, x, index, weights, segments=False)
        return self._of_the_same_tokens(module, how, x, index, weights)

    def _of_own_tokens(self, module: Any, how: How, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if dist.get_world_size(self.group) == 1:
            _check_trained(module)
            return _alone(module, how, x, index, weights, segments=True)

        def layers(rows: Tensor, ends: Tensor, sources: Sources) -> Tensor:
            return _layers(module, how, rows, ends, sources)

        def terms() -> tuple[Any, ...]:
            _check_trained(module)
            return _terms(module, how)

        return by_ranks(_OP, x, index, weights, layers, module.num_experts, self.group, terms)

    def _of_the_same_tokens(self, module: Any, how: How, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        group, count, size = self.group, module.num_experts, index.numel() * x.shape[-1] * x.element_size()
        if size > JOIN_BYTES and not capturing():
            self._compare(x, index, weights)
            differentiable = torch.is_grad_enabled() and weights.requires_grad
            parts: list[Tensor] = [_OwnPart.apply(t, group) for t in (x, index, weights)]
            terms = lambda: (f"gradients of weights {differentiable}", *_terms(module, how))  # noqa: E731
            layers = lambda rows, ends, _: _layers(module, how, rows, ends)  # noqa: E731
            y = by_ranks(_OP, parts[0], parts[1], parts[2], layers, count, group, terms)
            whole: Tensor = _AllParts.apply(y, len(x), group)
            return whole
        each = count // dist.get_world_size(group)
        first = dist.get_rank(group) * each

        def made() -> tuple[Any, ...]:
            check_routed(_OP, x, index, weights)
            ours = (index >= first) & (index < first + each)
            routing = route(torch.where(ours, index - first, each), each)
            rows = _ToOwnExperts.apply(x, routing.order, routing.inverse, group)
            rows = _layers(module, how, rows, routing.ends)
            words = f"tokens {tuple(x.shape)}", f"slots {index.shape[1]}", x.dtype, weights.dtype, rows.dtype
            gradients = torch.is_grad_enabled() and x.requires_grad, rows.requires_grad
            return (rows, routing), *words, f"gradients {gradients}", *_terms(module, how)

        self._compare(x, index, weights)
        rows, routing = together(_OP, group, x.device, made)[0]
        joined = _JoinedRows.apply(rows, routing.order, routing.inverse, group)
        return sum_of_slots(joined, weights, x.dtype)

    def _compare(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        """That the tokens are the same: on a CPU in every call, on GPUs in the first."""
        if x.device.type != "cpu" and (self.seen or capturing()):
            return

        def terms() -> tuple[Any, ...]:
            digest = hashlib.sha256()
            for t in (x, index, weights):
                digest.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            return None, f"tokens {tuple(x.shape)} with the digest {digest.hexdigest()[:16]} (tokens='replicate')"

        together(_OP, self.group, x.device, terms, always=True)
        self.seen = True


def _terms(module: Any, how: How) -> tuple[Any, ...]:
    """What ranks compare of a layer."""
    accumulates = bool(getattr(module, "accumulates", False)) and torch.is_grad_enabled()
    return *how, f"accumulates {accumulates}", f"layer {module.pydet_layer}"


def _check_trained(module: Any) -> None:
    """A gradient of other ranks' tokens has an order of segments, which grad has not."""
    trained = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
    if trained and torch.is_grad_enabled() and not getattr(module, "accumulates", False):
        fail(
            UNSUPPORTED,
            f"{_OP}: the experts' {trained[0]} is trained on the tokens of several ranks, and autograd would add its "
            "gradients in an order that follows the number of ranks; want accumulate_gradients(model) (or of the "
            "experts alone), or experts that are not trained",
        )
    own = sorted(module.pydet_shares.ranks())
    others = [x for x in ranks_around(module) if x != own] if trained and torch.is_grad_enabled() else []
    if others:
        fail(
            UNSUPPORTED,
            f"{_OP}: the experts' {trained[0]} is summed over the tokens of ranks {own}, and the model is in "
            f"fully_shard over ranks {others[0]}, whose sums it would lack; want the experts shared out over the ranks "
            "of fully_shard's mesh",
        )


def _layers(module: Any, how: How, rows: Tensor, ends: Tensor, sources: Sources | None = None) -> Tensor:
    """The results of rows by this rank's experts."""
    accumulates = getattr(module, "accumulates", False) and torch.is_grad_enabled()

    def product(rows: Tensor, name: str) -> Tensor:
        w, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
        rows = rows.to(w.dtype)
        if accumulates:
            return AccumulatingExperts.apply(rows, w, bias, ends, module.is_transposed, *how, sources)
        own, bias = local(w), local(bias)
        return torch.ops.pydet.grouped_gemm(rows, own if module.is_transposed else own.mT, ends, bias, None, *how)

    return layers_of(module, rows, product)


def _alone(module: Any, how: How, x: Tensor, index: Tensor, weights: Tensor, *, segments: bool) -> Tensor:
    """The layer on one rank: the tokens of a backward pass are a segment of the step, or go on with the chain."""
    routing = route(torch.where(index < 0, module.num_experts, index), module.num_experts)
    sources = None
    if segments:
        starts = torch.cat([routing.ends.new_zeros(1), routing.ends[:-1]])
        sources = Sources(starts[None], routing.ends[None], [index.numel()])
    rows = ToExperts.apply(x, routing.order, routing.inverse)
    return combine(_layers(module, how, rows, routing.ends, sources), weights, routing, x.dtype)


# ---- What a model is given -------------------------------------------------------------------------------------------


def _names(module: Any) -> list[str]:
    """Of the parameters that have an extent of experts."""
    return [f"{name}{end}" for name in matrices_of(module) for end in (("", "_bias") if module.has_bias else ("",))]


def _check_layer(place: str, module: Any) -> None:
    if getattr(module, "pydet_shares", None) is not None:
        fail(INVALID_VALUE, f"{place} is shared out already, want one call of {_OP}")
    if not of_pydet(module):
        fail(UNSUPPORTED, f"{place} is a layer of experts of {type(module).__qualname__}'s own; want convert() before")
    if isinstance(module, Fp8Experts):
        fail(UNSUPPORTED, f"{place} multiplies in fp8, want experts that are not Fp8Experts")
    if getattr(module, "has_post_expert_norm", False):
        fail(UNSUPPORTED, f"{place} has a norm of its results, whose gradient is summed over all ranks' rows")
    if getattr(module, "accumulates", False):
        fail(INVALID_VALUE, f"{place} has accumulate_gradients already, want {_OP} before it")
    own = dict(module.named_parameters(recurse=True))
    names = _names(module)
    if sorted(own) != sorted(names):
        fail(UNSUPPORTED, f"{place} has ({', '.join(own)}), want {', '.join(names)} alone")
    for name, parameter in own.items():
        if hasattr(parameter, "to_local"):
            fail(UNSUPPORTED, f"{place} has a {name} that is a DTensor, want a model that is not sharded")
        if parameter.shape[0] != module.num_experts:
            got = f"{tuple(parameter.shape)} for {module.num_experts} experts"
            fail(INVALID_VALUE, f"{place} has a {name} of {got}, want all experts on every rank")
        if parameter.grad is not None:
            fail(INVALID_VALUE, f"{place} has gradients, want none")


def _share(parameter: Any, mesh: Any, shares: Shares) -> Any:
    """This rank's experts of a parameter, as a DTensor that is sharded by experts."""
    from torch.distributed.tensor import DTensor, Shard

    each, rank = parameter.shape[0] // mesh.size(), mesh.get_local_rank()
    own = parameter.detach()[rank * each : (rank + 1) * each].clone()
    sharded = DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    made: Any = torch.nn.Parameter(sharded, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    made.pydet_shares = shares
    return made


def _load(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a layer loads: of what has all experts, or lies otherwise, it takes its own."""
    shares: Shares = module.pydet_shares
    for name in _names(module):
        given, own = state.get(prefix + name), getattr(module, name)
        if given is None:
            continue
        if hasattr(given, "full_tensor"):
            if given.placements == own.placements and given.device_mesh == own.device_mesh:
                continue
            given = given.full_tensor()
        if given.shape != own.shape:
            fail(
                INVALID_VALUE,
                f"{_OP}: {prefix}{name} of the state is {tuple(given.shape)}, want {tuple(own.shape)}, all "
                "experts, or a DTensor (torch.distributed.checkpoint loads any number of ranks' into any other)",
            )
        state[prefix + name] = _share(given, shares.mesh, shares).detach()


def share_layer(module: Any, shares: Shares, known: dict[int, Any], name: str = "") -> None:
    """Shares out one layer that was checked; known: parameters that were shared out before, by what they were."""
    for own in _names(module):
        parameter = getattr(module, own)
        if id(parameter) not in known:  # tied layers stay tied
            known[id(parameter)] = _share(parameter, shares.mesh, shares)
        setattr(module, own, known[id(parameter)])
    module.pydet_shares, module.pydet_layer = shares, name
    module.register_load_state_dict_pre_hook(_load)


def check_layers(op: str, layers: dict[str, Any], mesh: Any, tokens: str) -> list[Any]:
    """What :func:`shard_experts` refuses; what ranks compare of it."""
    if tokens not in TOKENS:
        fail(INVALID_VALUE, f"{op}: tokens is {tokens!r}, want one of {', '.join(TOKENS)}")
    if not layers:
        fail(
            INVALID_VALUE,
            f"{op}: the model has no experts that ask Transformers' interface; want convert() before, and of JetMoe "
            "and Llama 4, whose experts ask nobody, all experts on every rank",
        )
    words: list[Any] = [f"tokens {tokens}"]
    for name, module in layers.items():
        place = f"{op}: {name or 'the model'}"
        _check_layer(place, module)
        shared(module.num_experts, mesh.size(), op, f"{name}.num_experts")
        shapes = [f"{own} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for own, p in module.named_parameters()]
        words.append(f"{name}: {'; '.join(shapes)}")
    return words


def shard_experts(model: torch.nn.Module, *, group: Group = None, tokens: Tokens = "shard") -> list[str]:
    """From now on each rank has 1/W of the experts of every layer in ``model``; the rest of it stays as it is.

        pydet.torch.convert(model)
        shard_experts(model, group=group)                 # before accumulate_gradients and the optimizer
        parameters = pydet.torch.accumulate_gradients(model)
        sums = OrderedMainGrads(model.named_parameters(), group=group)

    Results, gradients of tokens and of routing weights have the bits of one process, on every number of ranks that
    divides the experts. The experts' parameters become DTensors, sharded by experts: ``torch.distributed.checkpoint``
    saves them from any number of ranks and loads them into any other, ``load_state_dict`` takes whole ones, and
    :func:`clip_grad_norm_` and :class:`pydet.torch.AdamW` take them beside the others.

    Args:
        model: a module that :func:`pydet.torch.convert` was called with, whole on every rank; changed in place. Its
            layers of experts are those that ask Transformers' interface, as of Mixtral, Qwen3-MoE, gpt-oss,
            DeepSeek-V3.
        group: a process group, the default one if None.
        tokens: ``shard``: each rank has its own, any number of them, none too. The tokens of a backward pass are a
            segment of the step, rank 0's first: an expert's ``main_grad`` goes on by ``D = fl(D + s)`` for each, as the
            others' in :class:`OrderedMainGrads`. So a step has the bits of one process that takes the segments one by
            one. Trained experts want :func:`pydet.torch.accumulate_gradients`, here and on one process.
            ``replicate``: all ranks have the same, as beside tensor parallel layers, and the gradients are those of one
            process, in ``grad`` or ``main_grad``. Each rank has whole gradients of what is not shared out: add them
            once.

    Returns:
        The names of the layers.

    Raises:
        Error: on every rank, where one has another model, or a layer that was not converted, is shared out already, is
            in fp8, has a norm of results, accumulates already, or experts that the ranks do not divide; then nothing is
            changed. In forward, where ranks have other options or a rank alone has gradients; with ``replicate``, other
            tokens (on GPUs compared at the first call); with ``shard``, trained experts in ``fully_shard`` over other
            ranks.
    """
    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"{_OP}: model is {type(model).__qualname__}, want a torch.nn.Module")
    from torch.distributed.device_mesh import DeviceMesh

    layers = {name: module for name, module in model.named_modules() if is_experts(module)}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")
    ours: Any = group if group is not None else dist.group.WORLD

    def terms() -> tuple[Any, ...]:
        mesh = DeviceMesh.from_group(ours, device.type)
        return mesh, *check_layers(_OP, layers, mesh, tokens)

    mesh = together(_OP, group, device, terms)[0]
    known: dict[int, Any] = {}
    shares = Shares(mesh, tokens)
    for name, module in layers.items():
        share_layer(module, shares, known, name)
    # DistributedDataParallel leaves these alone: each rank's are its own.
    own = [f"{name}.{key}".lstrip(".") for name, module in layers.items() for key in _names(module)]
    root: Any = model
    root._ddp_params_and_buffers_to_ignore = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *own]
    return list(layers)
