"""Modules that compute with pydet; :func:`accumulate_gradients` has them continue the sums of their gradients."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._jit_internal import is_scripting

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.hooks import unknown as known
from pydet.ops import Arithmetic
from pydet.ops.activation import Kind
from pydet.torch import code, functions, jetmoe, llama4, scans, shared
from pydet.torch.accumulate import (
    AccumulatingConv1D,
    AccumulatingEmbedding,
    AccumulatingLayerNorm,
    AccumulatingLinear,
    AccumulatingRmsNorm,
    Accumulation,
    main_grad,
    part_of,
    refuse_wrapper,
    watch_for_wrappers,
    watch_optimizers,
    wrapper,
)
from pydet.torch.convolutions import Convolution
from pydet.torch.experts import Router, of_pydet
from pydet.torch.fp8 import Fp8Linear
from pydet.torch.ops import matrix
from pydet.torch.stock import PYDET, become, derived


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on :func:`pydet.torch.linear`: same parameters, same ``state_dict``.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        arithmetic, k_chunk: as in :func:`pydet.gemm`; they decide bits, forward and backward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        arithmetic: Arithmetic = "auto",
        k_chunk: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.arithmetic, self.k_chunk = arithmetic, k_chunk

    accumulates = False  # see accumulate_gradients()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_scripting():
            y = torch.ops.pydet.skinny_gemm(x, self.weight, self.bias, None, self.arithmetic, self.k_chunk)
        elif self.accumulates and torch.is_grad_enabled():
            how = self.arithmetic, self.k_chunk, None, part_of(self)
            y = AccumulatingLinear.apply(x, self.weight, self.bias, *how)
        else:
            y = functions.skinny_gemm(x, self.weight, self.bias, None, self.arithmetic, self.k_chunk)
        return y

    def extra_repr(self) -> str:
        chunk = "" if self.k_chunk is None else f", k_chunk={self.k_chunk}"
        return f"{super().extra_repr()}, arithmetic={self.arithmetic}{chunk}"


class Conv1D(torch.nn.Module):
    """``y[..., n] = round(sum_k x[..., k] weight[k, n] + bias[n])``: the linear layer of GPT-2 in Transformers.

    :func:`pydet.torch.convert` makes these; its weight is stored the other way round than that of :class:`Linear`.
    """

    if TYPE_CHECKING:  # torch.jit.script reads annotations, and does not know these
        weight: torch.nn.Parameter
        bias: torch.nn.Parameter
        arithmetic: Arithmetic
        k_chunk: int | None
    accumulates = False  # see accumulate_gradients()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_scripting() and self.accumulates and torch.is_grad_enabled():
            how = self.arithmetic, self.k_chunk, part_of(self)
            return AccumulatingConv1D.apply(x, self.weight, self.bias, *how)
        y = functions.gemm(matrix(x), self.weight, self.bias, arithmetic=self.arithmetic, k_chunk=self.k_chunk)
        return y.view(*x.shape[:-1], self.weight.shape[1])

    def extra_repr(self) -> str:
        chunk = "" if self.k_chunk is None else f", k_chunk={self.k_chunk}"
        return f"nx={self.weight.shape[0]}, nf={self.weight.shape[1]}, arithmetic={self.arithmetic}{chunk}"


class RMSNorm(torch.nn.Module):
    """``y = x rstd (weight + weight_offset)`` over the last dimension, on :func:`pydet.torch.rms_norm`.

    Args:
        size: N, the extent of the last dimension.
        eps: added to the mean of squares.
        elementwise_affine: has a weight.
        weight_offset: 1.0 for models that store the weight less 1; the weight then starts as zeros.
        device, dtype: of the weight.

    Attributes:
        result: the type of ``y`` where x and weight are of different ones: ``"x"``, ``"weight"``, or ``"promoted"``
            (as their product in PyTorch). A converted norm has that of the norm it was.
    """

    if TYPE_CHECKING:
        weight: torch.nn.Parameter | None
    accumulates = False  # see accumulate_gradients()

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        weight_offset: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.weight_offset, self.result = size, eps, weight_offset, "x"
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.full((size,), 1.0 - weight_offset, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight is not None and self.result != "x" and x.dtype != weight.dtype:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        if is_scripting():
            y = torch.ops.pydet.rmsnorm(x, weight, self.eps, self.weight_offset)[0]
        elif self.accumulates and weight is not None and torch.is_grad_enabled():
            y = AccumulatingRmsNorm.apply(x, weight, self.eps, self.weight_offset)
        else:
            y = functions.rmsnorm(x, weight, self.eps, self.weight_offset)[0]
        return y.to(weight.dtype) if weight is not None and self.result == "weight" else y

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{self.size}, eps={self.eps}, elementwise_affine={self.weight is not None}{offset}"


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, on :func:`pydet.torch.layer_norm`: same parameters, same
    ``state_dict``. ``y`` has the type of x, also under autocast.

    Args:
        normalized_shape: N, the extent of the last dimension, or ``(N,)``.
        eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
    """

    accumulates = False  # see accumulate_gradients()

    def __init__(self, normalized_shape: int | tuple[int], *arguments: Any, **options: Any) -> None:
        super().__init__(normalized_shape, *arguments, **options)
        if len(self.normalized_shape) != 1:
            fail(INVALID_VALUE, f"LayerNorm: normalized_shape is {tuple(self.normalized_shape)}, want one extent")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_scripting():
            y = torch.ops.pydet.layernorm(x, self.weight, self.bias, self.eps)[0]
        elif self.accumulates and self.weight is not None and torch.is_grad_enabled():
            y = AccumulatingLayerNorm.apply(x, self.weight, self.bias, self.eps)
        else:
            y = functions.layernorm(x, self.weight, self.bias, self.eps)[0]
        return y


class OffsetLayerNorm(LayerNorm):
    """:class:`LayerNorm` whose weight is stored less 1, as Nemotron's; :func:`convert` makes these. The weight is what
    ``weight + 1`` is in its type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_scripting() and self.accumulates and torch.is_grad_enabled():
            y: torch.Tensor = AccumulatingLayerNorm.apply(x, self.weight, self.bias, self.eps, 1.0)
        else:
            y = torch.ops.pydet.layernorm(x, self.weight + 1.0, self.bias, self.eps)[0]
        return y


class Activation(torch.nn.Module):
    """``f(x)`` of each element, on :func:`pydet.torch.activation`. :func:`convert` makes these of SiLU, GELU and the
    like.

    Args:
        kind: as in :func:`pydet.activation`.
    """

    if TYPE_CHECKING:  # torch.jit.script reads annotations, and does not know this one
        kind: Kind

    def __init__(self, kind: Kind = "silu") -> None:
        super().__init__()
        known(kind, "Activation", "kind")
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_scripting():  # noqa: SIM108 -- which TorchScript reads
            y = torch.ops.pydet.activation(x, self.kind)
        else:
            y = functions.activation(x, self.kind)
        return y

    def extra_repr(self) -> str:
        return str(self.kind)


class Embedding(torch.nn.Embedding):
    """``torch.nn.Embedding``, of which :func:`accumulate_gradients` makes these: rows are copied, and the gradient of a
    row is the sum of its tokens in their order."""

    accumulates = False  # see accumulate_gradients()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not is_scripting() and self.accumulates and torch.is_grad_enabled():
            rows = AccumulatingEmbedding.apply(ids, self.weight, self.padding_idx, part_of(self))
            sums: Any = self.accumulates
            return shared.of_rows(rows, ids, self.padding_idx, self.weight, sums) if sums.shares else rows
        return super().forward(ids)

    def __reduce__(self) -> Any:
        kind = type(self)
        return _new_embedding, (kind if kind.__module__ != __name__ else _former(kind),), self.__dict__


_embedding_classes: dict[type, Any] = {torch.nn.Embedding: Embedding}


def _former(kind: type) -> type:
    return next(former for former, ours in _embedding_classes.items() if ours is kind)


def _embedding_class(kind: type) -> Any:
    """An embedding of the class `kind`, whose ``super().forward`` is ours."""
    if kind not in _embedding_classes:
        own = {"__module__": __name__}
        _embedding_classes[kind] = type(f"{kind.__name__}OfPydet", (kind, Embedding), own)
    return _embedding_classes[kind]


def _new_embedding(kind: type) -> Any:
    made = _embedding_class(kind)
    return made.__new__(made)


def is_copying_embedding(module: Any) -> bool:
    """One that does no more than copy rows of its weight, by PyTorch's own forward."""
    if not isinstance(module, torch.nn.Embedding) or module.max_norm is not None or module.sparse:
        return False
    forward: Any = type(module).forward
    own = forward is torch.nn.Embedding.forward or isinstance(module, Embedding)
    asks = "super" in forward.__code__.co_names and "forward" in forward.__code__.co_names
    return not module.scale_grad_by_freq and "forward" not in module.__dict__ and (own or asks)


class Accumulating(list[torch.nn.Parameter]):
    """The parameters that have a ``main_grad``, as :func:`accumulate_gradients` returns them. ``str()`` of it says what
    has none, and how often gradients came to that.

    Attributes:
        outside: the names of the other parameters that are trained, whose gradients go to ``grad``, each with the class
            of its module: other convolutions, norms of other formulas, whatever is not pydet's.
        arrived: how often each of these got a gradient, which micro-batches add in its own type.
        spread: the names of embeddings that are not the model's input embeddings, as of positions and T5's
            ``relative_attention_bias``, and of vectors that scale a batch, each with its class.
        summed: how often, of each of these, PyTorch had summed over the batch before, in an order of its own: other
            code came between, and micro-batches may have other bits than one batch.
        repeated: how often a backward pass added to the sum of a parameter that it had added to before, as of a module
            that a forward calls several times: micro-batches may have other bits than one batch.
        cut: how often rows came to a sum behind others that were cut at no multiple of what is added as one, as of a
            norm that has other rows than the tokens: likewise. (Of experts, whose rows the routing decides, and of
            scans it is not counted.)
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        outside: dict[str, tuple[str, Any]],
        spread: dict[str, str] | None = None,
        summed: Counter[str] | None = None,
    ) -> None:
        super().__init__(parameters)
        self.summed = Counter() if summed is None else summed
        self.repeated: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.outside = {name: kind for name, (kind, _) in outside.items()}
        self.spread = spread or {}
        self.arrived: Counter[str] = Counter()
        for name, (_, parameter) in outside.items():
            count = functools.partial(_count, self.arrived, name)
            weakref.finalize(self, parameter.register_post_accumulate_grad_hook(count).remove).atexit = False

    def __str__(self) -> str:
        lines = [f"{len(self)} parameters have a main_grad, {len(self.outside)} keep their grad"]
        for name, kind in self.outside.items():
            lines.append(f"  {name} of {kind}: {self.arrived[name]} gradients came to its grad")
        for name, kind in self.spread.items():
            lines.append(
                f"  {name} of {kind}: where a batch shares it, its gradient is summed sequence after sequence; "
                f"{self.summed[name]} came summed by PyTorch"
            )
        for name, times in self.repeated.items():
            lines.append(f"  {name}: {times} times a backward pass added to its sum again; {_OTHER_BITS}")
        for name, times in self.cut.items():
            lines.append(f"  {name}: {times} times rows came behind a cut within what is added as one; {_OTHER_BITS}")
        return "\n".join(lines)


_OTHER_BITS = "micro-batches may have other bits than one batch"


def _count(arrived: Counter[str], name: str, parameter: torch.Tensor) -> None:
    arrived[name] += 1


def _spread(model: torch.nn.Module) -> dict[str, str]:
    """The embeddings that are not asked for by a token's number, for all that is known, and the parameters that a
    module's code shares with a batch."""
    of_tokens = set()
    for module in model.modules():
        if callable(ask := getattr(module, "get_input_embeddings", None)):
            with contextlib.suppress(NotImplementedError, AttributeError):
                of_tokens.add(ask())
    found = {}
    for name, module in model.named_modules():
        own = shared.names_of(module)
        if of_tokens and is_copying_embedding(module) and module not in of_tokens:
            own = ("weight",)
        found.update({f"{name}.{one}".lstrip("."): type(module).__qualname__ for one in own})
    return found


def _has_sinks(module: Any) -> bool:
    """Attention of Transformers' that asks for pydet's by name, and hands it sinks."""
    by = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return "sinks" in module._parameters and by == PYDET and code.asks_interface(module)


def _with_sums(module: Any) -> list[str] | None:
    """Of a module that takes part, the names of its parameters that its backward can add to sums."""
    multiplies = Linear | Fp8Linear | Conv1D | Convolution | RMSNorm | LayerNorm | Router | jetmoe.ParallelExperts
    if isinstance(module, multiplies) or is_copying_embedding(module):
        names = ["weight", "bias"]
    elif _has_sinks(module):
        names = ["sinks"]
    elif scans.is_scan(module):
        names = list(scans.OWN)
    elif getattr(module, "pydet_multiplied", False):
        names = ["weight", "bias"]
    elif shared.names_of(module):
        names = list(shared.names_of(module))
    elif of_pydet(module) or isinstance(module, llama4.Experts):
        names = [f"{name}{end}" for name in ("gate_up_proj", "up_proj", "down_proj") for end in ("", "_bias")]
    else:
        return None
    own = dict(module.named_parameters(recurse=False))
    return [name for name in names if name in own and f"{name}_scale_inv" not in own]


def _is_unread(module: torch.nn.Module, name: str) -> bool:
    """Whether a module has a parameter that its code does not name, as BERT's head has the bias of its decoder. (If it
    computes with it all the same, that is refused in backward.)"""
    kind: Any = type(module)
    names = code.names_in(kind)
    return bool(names) and name not in names and not {"getattr", "parameters", "named_parameters"} & names


def _refuse_what_is_lost(model: torch.nn.Module, of: dict[str, tuple[torch.nn.Module, list[str]]]) -> None:
    """Wrappers, sharded and computed weights, and weights that are tied to modules that know no main_grad."""
    for module in model.modules():
        if name := wrapper(module):
            refuse_wrapper(name)
    ours: dict[torch.nn.Parameter, str] = {}
    for name, (module, names) in of.items():
        place = f"accumulate_gradients: {name or 'the model'}"
        if getattr(module, "weight", None) is not None and "weight" not in module._parameters:
            fail(
                UNSUPPORTED, f"{place} computes its weight (weight_norm or the like); want a weight that is a parameter"
            )
        for own in names:
            parameter: Any = module._parameters[own]
            if "DTensor" in repr(type(parameter)) and not hasattr(parameter, "pydet_shares"):
                fail(
                    UNSUPPORTED,
                    f"{place} has a {own} that is a DTensor, of fully_shard or parallelize_module, whose gradient goes "
                    "to grad; want a model that is not sharded, and main_grad summed over the ranks "
                    "by distributed.OrderedMainGrads",
                )
            ours[parameter] = f"{name}.{own}".lstrip(".")
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            taken = own in of[name][1] if name in of else False
            if parameter in ours and not taken and parameter.requires_grad and not _is_unread(module, own):
                fail(
                    UNSUPPORTED,
                    f"accumulate_gradients: {ours[parameter]} is tied to {name}.{own} of {type(module).__qualname__}, "
                    "whose share of the gradient main_grad would lack; want weights that are not tied, or "
                    "accumulate_gradients of modules without it, as model.model, and its whole gradient in grad",
                )


def _parts(of: dict[str, tuple[torch.nn.Module, list[str]]]) -> dict[str, tuple[int, int]]:
    """For the modules whose weight others have as well: which of them it is, in this order, and how many they are."""
    owners: dict[Any, list[str]] = {}
    others = set()
    for name, (module, names) in of.items():
        if "weight" in names:
            owners.setdefault(module.weight, []).append(name)
            if not isinstance(module, Linear | Conv1D) and not is_copying_embedding(module):
                others.add(module.weight)
    tied = {weight: names for weight, names in owners.items() if len(names) > 1 and weight not in others}
    return {name: (i, len(names)) for names in tied.values() for i, name in enumerate(names)}


def accumulate_gradients(model: torch.nn.Module) -> Accumulating:
    """From now on pydet's modules in ``model`` sum their parameters' gradients in fp32, in ``parameter.main_grad``.

    ``backward()`` continues the sums in ``main_grad`` and leaves ``grad`` alone; so does ``torch.autograd.grad``,
    whatever it was asked for. What reads ``grad``, as ``torch.nn.utils.clip_grad_norm_`` and a trainer's
    ``max_grad_norm``, finds none: :func:`pydet.torch.distributed.clip_grad_norm_` clips these.

    Rows that come in several calls then give the bits of one call on all of them in that order, if the calls are cut at
    multiples of 16 rows (of ``k_chunk`` where there is one), at multiples of 128 rows for :class:`Fp8Linear`, and of
    ``pydet.DWEIGHT_ROWS`` for the norms. Pad with rows whose gradient is zero to get there. Zero ``main_grad`` between
    steps.

    In arithmetic ``ieee`` without ``k_chunk``, linear layers, routers and experts may be cut anywhere. In others what
    counts for experts is the number of rows that came to each, which the routing decides.

    ``torch.compile`` leaves these modules to eager mode, and refuses them under ``fullgraph=True``.

    A weight that several linear layers and embeddings have, as a tied head, has a sum for each of them
    (``main_grad_parts``), and ``main_grad`` is their sum in the order of ``named_modules()``, folded anew after each
    backward: zero it between steps, and write nothing else to it before the next. A parameter of several other modules,
    and one of a module that is called several times in a forward, sums in the order in which backward reaches them,
    which is then part of the bits: the result's ``repeated`` counts it. Rows of norms are summed in their order, and by
    tokens where heads were moved ahead of them by ``transpose(1, 2)``. Where rows are cut elsewhere and more come, its
    ``cut`` counts it.

    What a model makes once and shares with a batch, as positions, T5's ``relative_attention_bias`` and vectors that
    scale residuals, is named in the result's ``spread``. Where the model's code adds it to the batch, multiplies it by
    it or gives it to pydet's attention as its bias, also after functions of each element, each element's gradient is
    added in the order of the batch's places; so is that of a number that it makes of vectors (DiffLlama). Elsewhere
    PyTorch sums it over the batch before, which the result's ``summed`` counts. A bias of attention then has a gradient
    for each sequence in memory.

    One that is tied to a module that takes no part is refused; so is, in backward, one that anything but its module
    multiplies, as the fused heads of TRL and Liger do with ``lm_head.weight``. DistributedDataParallel and fully_shard
    reduce ``grad``, and never see ``main_grad``: a model in fully_shard is refused, here or as it is wrapped or called,
    and one in DistributedDataParallel where it is called outside ``no_sync()``. Data-parallel ranks sum ``main_grad``
    by :class:`pydet.torch.distributed.OrderedMainGrads`.

    Args:
        model: a module; its :class:`Linear`, :class:`Fp8Linear` (but for weights that are frozen, there and in
            experts), :class:`Conv1D`, :class:`RMSNorm` and :class:`LayerNorm` take part, the convolutions, routers and
            experts that :func:`convert` swapped, the sinks of Transformers' attention that is ``"pydet"``, parameters
            of some of its modules that a batch shares (Doge, Apertus, DiffLlama, GPT-NeoX-Japanese, JetMoe, Swin,
            Whisper), and PyTorch's embeddings, which become :class:`Embedding` (but for ``max_norm``, ``sparse`` and
            ``scale_grad_by_freq``). The tokens of an id are added in their order, cut anywhere, and sinks are summed
            over sequences, cut between them.

    Returns:
        The parameters that have a ``main_grad`` now, a list; ``print()`` it. Its ``outside`` names the others that are
        trained, which keep their ``grad``, its ``arrived`` counts the gradients that came there, and its ``spread``
        names what a batch may share.

    Raises:
        Error: ``model`` is no module, there is no module of pydet's in it, a gradient would be lost; then nothing is
            changed.
    """
    if not isinstance(model, torch.nn.Module):
        fail(INVALID_VALUE, f"accumulate_gradients: model is {type(model).__qualname__}, want a torch.nn.Module")
    for mixer in filter(scans.is_scan, model.modules()):
        for multiplied in scans.helpers(mixer):
            multiplied.pydet_multiplied = True
    found = [(name, module, _with_sums(module)) for name, module in model.named_modules()]
    of = {name: (module, names) for name, module, names in found if names is not None}
    _refuse_what_is_lost(model, of)
    if not any(names and type(module) is not torch.nn.Embedding for module, names in of.values()):
        fail(INVALID_VALUE, "accumulate_gradients: no Linear or norm of pydet's in the model; convert() it first")
    watch_for_wrappers()
    watch_optimizers()
    parameters: dict[torch.nn.Parameter, None] = {}
    parts, shares, summed = _parts(of), _spread(model), Counter[str]()
    for name, (taking_part, names) in of.items():
        module: Any = taking_part
        if is_copying_embedding(module) and not isinstance(module, Embedding):
            become(module, _embedding_class(type(module)), {})
        elif shared.names_of(module) and not isinstance(module, shared.SharesParameters):
            become(module, derived(shared.SharesParameters, type(module)), {})
        named = {f"{name}.{own}".lstrip("."): module._parameters[own] for own in names}
        how = not is_copying_embedding(module), not shares.keys().isdisjoint(named)
        module.accumulates = Accumulation(named, parts.get(name), *how)
        module.accumulates.summed = summed
        for parameter in module.accumulates.parameters.values():
            main_grad(parameter)
            parameters[parameter] = None
    outside = {
        f"{name}.{own}".lstrip("."): (type(module).__qualname__, parameter)
        for name, module in model.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and parameter not in parameters
    }
    trained = {name: shares[name] for name, p in model.named_parameters() if name in shares and p.requires_grad}
    report = Accumulating(parameters, outside, trained, summed)
    for taking_part, _ in of.values():
        sums: Any = taking_part.accumulates
        for tally in sums.tallies:
            tally.repeated, tally.cut = report.repeated, report.cut
    return report
