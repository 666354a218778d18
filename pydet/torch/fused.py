"""Heads that other packages multiply themselves, taken over by :func:`pydet.torch.linear_log_prob`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch.batching import base_of
from pydet.torch.functions import log_prob
from pydet.torch.head import head_of, sum_of_rows
from pydet.torch.modules import Linear

TRL = "trl.trainer.utils"  # whose forward asks `_ChunkedLogProbFunction.apply` for log-probabilities
_FUNCTION = "_ChunkedLogProbFunction"
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # beside each other, in this order
_LACKS = {"log_sum_sq_probs"}
_LOSS = "ForCausalLMLoss"  # of transformers.loss.loss_utils, whose place in a model `fuse_loss` takes
_head: contextvars.ContextVar[Linear | None] = contextvars.ContextVar("pydet_head", default=None)


@contextlib.contextmanager
def _serving(head: Any) -> Iterator[None]:
    token = _head.set(head if isinstance(head, Linear) else None)
    try:
        yield
    finally:
        _head.reset(token)


class _Routed:
    """In the place of TRL's function: where a routed model asks, its own head answers, by pydet; else TRL's."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS[1:],
    ) -> Any:
        """Of the arguments `chunk_size` alone is not taken: pydet's chunks change no bit."""
        head = _head.get()
        if head is None:
            how = (temperature, chunk_size, softcap, logit_scale, outputs)
            return self.theirs.apply(hidden, weight, bias, targets, *how)
        if logit_scale != 1 or softcap is not None:
            fail(
                UNSUPPORTED,
                f"check_trainer: TRL's fused head has a logit_scale of {logit_scale} and a softcap of {softcap}, want "
                "1 and None: what the sampler's own code does to logits has PyTorch's bits",
            )
        if lacks := [name for name in outputs if name in _LACKS or name not in _OUTPUTS]:
            have = ", ".join(name for name in _OUTPUTS if name not in _LACKS)
            fail(UNSUPPORTED, f"check_trainer: TRL's fused head is asked for {', '.join(lacks)}, want of {have}")
        made = head_of(
            hidden,
            weight,
            targets,
            bias,
            temperature=temperature,
            entropy="entropy" in outputs,
            mean="mean_logits" in outputs,
            greedy="is_top1" in outputs,
            arithmetic=head.arithmetic,
            k_chunk=head.k_chunk,
        )
        mean = None if made.mean is None else made.mean.detach()
        top = None if made.greedy is None else made.greedy == targets
        return made.log_prob, made.entropy, None, mean, top


def route(model: Any) -> None:
    """Has a model that TRL gave a fused head ask :func:`pydet.torch.linear_log_prob`, in the arithmetic of its head.

    Its forward goes by one that says whose head is asked; TRL's function is replaced once in a process, and answers as
    before for any other model.
    """
    utils = sys.modules[TRL]
    if not isinstance(getattr(utils, _FUNCTION), _Routed):
        setattr(utils, _FUNCTION, _Routed(getattr(utils, _FUNCTION)))
    _serve(model)


def _serve(model: Any) -> None:
    """Has a model's forward say whose head is asked."""
    inner = model.forward
    if getattr(inner, "pydet_routes", False):
        return
    own = inner.__func__ if getattr(inner, "__self__", None) is model else None

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        with _serving(self.get_output_embeddings()):
            return inner(*args, **options) if own is None else own(self, *args, **options)

    forward.pydet_routes = True  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


# By these a configuration says that its model's code changes logits, and by which value that it does not.
_CHANGES_LOGITS: dict[str, float | None] = {"final_logit_softcapping": None}
_CHANGES_LOGITS |= dict.fromkeys(("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"), 1.0)


def _has_plain_head(model: Any) -> bool:
    """Whether the head is a linear layer whose result is the logits: what the model's code made of it otherwise, for
    the sampler, would have PyTorch's bits."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    unchanged = all(getattr(config, name, none) in (none, None) for name, none in _CHANGES_LOGITS.items())
    return unchanged and isinstance(model.get_output_embeddings(), Linear)


def can_route(model: Any, place: str) -> bool:
    """Whether the forward is TRL's, by a function that is there to be replaced, and the head plain."""
    return place == TRL and hasattr(sys.modules.get(TRL), _FUNCTION) and _has_plain_head(model)


# ---- The loss of Liger's forwards ------------------------------------------------------------------------------------

_LIGER, _LIGER_LOSS = "liger_kernel.", "LigerForCausalLMLoss"
# Keywords that change the loss, and the value by which each of them does not. Of a softcap: the sampler's own code caps
# its logits with PyTorch's bits.
_LIGER_CHANGES: dict[str, Any] = dict.fromkeys(("final_logit_softcapping", "softcap", "ce_weight"))
_LIGER_CHANGES |= {"label_smoothing": 0.0, "lse_square_scale": 0.0, "accum_dtype": torch.float32}
_LIGER_CHANGES |= dict.fromkeys(("use_token_scaling", "return_z_loss"), False)
_LIGER_CHANGES |= dict.fromkeys(("return_token_accuracy", "return_predicted_tokens"), False)
# Those that change nothing here: how many rows Liger takes at once, and what forwards hand on of their own keywords.
_LIGER_IGNORED = {"chunk_mem_const", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_LIGER_IGNORED |= {"position_ids", "cache_position", "is_causal", "use_cache", "return_dict"}
_LIGER_IGNORED |= {"output_attentions", "output_hidden_states", "output_router_logits"}


def _is_asked(name: str, value: Any) -> bool:
    """Whether a keyword asks Liger's loss for what is not done here. A tensor does always: it is compared with none."""
    if value is None or name in _LIGER_IGNORED:
        return False
    comparable = isinstance(value, bool | int | float | torch.dtype)
    return name not in _LIGER_CHANGES or not comparable or value != _LIGER_CHANGES[name]


class _RoutedLoss:
    """In the place of Liger's loss, in the module of a forward of its: as :class:`_Routed`."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(
        self, hidden_states: torch.Tensor, lm_head_weight: Any, labels: Any, *args: Any, **options: Any
    ) -> Any:
        head = _head.get()
        if head is None or lm_head_weight is not head.weight:
            return self.theirs(hidden_states, lm_head_weight, labels, *args, **options)
        return self._made(head, hidden_states, labels, *args, **options)

    def _made(
        self,
        head: Linear,
        hidden_states: torch.Tensor,
        labels: Any,
        hidden_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Any = None,
        final_logit_softcapping: Any = None,
        return_token_accuracy: Any = False,
        return_predicted_tokens: Any = False,
        *,
        bias: Any = None,
        reduction: Any = "mean",
        **options: Any,
    ) -> torch.Tensor:
        """By the arguments of Liger's loss, in its order, and by those of its fused cross-entropy."""
        options["final_logit_softcapping"] = final_logit_softcapping
        options["return_token_accuracy"] = return_token_accuracy
        options["return_predicted_tokens"] = return_predicted_tokens
        asked = [name for name, value in options.items() if _is_asked(name, value)]
        if bias is not None and bias is not head.bias:
            asked.append("a bias that is not the head's")
        if asked:
            fail(UNSUPPORTED, f"check_trainer: Liger's fused loss is asked for {', '.join(asked)}, want it without")
        if reduction not in ("mean", "sum"):
            got = f"reduction {reduction!r}"
            fail(UNSUPPORTED, f"check_trainer: Liger's fused loss is asked for {got}, want 'mean' or 'sum'")
        if reduction == "sum" and num_items_in_batch is not None:
            both = "reduction 'sum' and num_items_in_batch"
            fail(INVALID_VALUE, f"check_trainer: Liger's fused loss is asked for {both}, want one of them")
        rows = hidden_states.reshape(-1, hidden_size)
        items = 1 if reduction == "sum" else num_items_in_batch
        return _loss_of(rows, labels, lambda index: _log_probs(head, rows, index), items, ignore_index, shift_labels)


def can_route_loss(model: Any, names: dict[str, Any]) -> bool:
    """Whether the forward is Liger's, by a loss that is there to be replaced, and the head plain."""
    return names.get("__name__", "").startswith(_LIGER) and _LIGER_LOSS in names and _has_plain_head(model)


def route_loss(model: Any, names: dict[str, Any]) -> None:
    """Has a model whose forward is Liger's make its loss by :func:`pydet.torch.linear_log_prob`: as :func:`route`."""
    if not isinstance(names[_LIGER_LOSS], _RoutedLoss):
        names[_LIGER_LOSS] = _RoutedLoss(names[_LIGER_LOSS])
    _serve(model)


# ---- The loss of Transformers' causal language models ----------------------------------------------------------------


class _Kept:
    """What came to a model's head that was not to multiply it, while a forward runs."""

    def __init__(self, model: Any) -> None:
        self.head, self.of = model.get_output_embeddings(), type(model).__qualname__
        self.hidden: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x
        return x


_kept: contextvars.ContextVar[_Kept | None] = contextvars.ContextVar("pydet_kept", default=None)


def _whole(parameter: Any) -> Any:
    """Of a parameter that fully_shard has cut, all of it."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _log_probs(head: Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    how = {"arithmetic": head.arithmetic, "k_chunk": head.k_chunk}
    return head_of(hidden, _whole(head.weight), labels, _whole(head.bias), **how).log_prob  # type: ignore[arg-type]


def _loss_of(
    rows: torch.Tensor,
    labels: torch.Tensor,
    log_probs: Callable[[torch.Tensor], torch.Tensor],
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean of -log_probs(index) over rows that have a label, or their sum over a number that is given."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.to(rows.device).reshape(-1)
    ignored = target == ignore_index
    total = sum_of_rows((-log_probs(target.masked_fill(ignored, -1))).masked_fill(ignored, 0.0))
    items = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
    if not torch.is_tensor(items):  # by a number of Python a GPU divides as a product with its inverse
        items = torch.full((), items, device=total.device)
    return total / items.to(total.device, torch.float32)


class _Loss:
    """In the place of ForCausalLMLoss: the bits of log_prob of the logits, whether they are there or not."""

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        kept = _kept.get()
        if kept is not None and logits is not kept.hidden:
            fail(
                UNSUPPORTED,
                f"fuse_loss: {kept.of} changes the logits between head and loss (by a softcap, a "
                "scale, another type), want one whose loss is of lm_head's own result",
            )
        rows = logits.reshape(-1, logits.shape[-1])

        def log_probs(index: torch.Tensor) -> torch.Tensor:
            return log_prob(rows, index) if kept is None else _log_probs(kept.head, rows, index)

        return _loss_of(rows, labels, log_probs, num_items_in_batch, ignore_index, shift_labels)


def _named(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def fuse_loss(model: Any) -> None:
    """Has a causal language model of Transformers make its loss without the logits, by pydet.

    In place, after :func:`convert`. While the model trains, a forward with labels is :func:`linear_log_prob` of the
    hidden states, and its ``logits`` are absent; its weight's gradient comes to ``main_grad`` where the model has
    :func:`accumulate_gradients`. In evaluation the logits are there, and the loss has the bits that it has in training.
    Rows are summed in order (NUMERICS.md, "Head"), and divided by ``num_items_in_batch`` where the trainer gives it.

    Args:
        model: what has ``get_output_embeddings()``, whose head :func:`convert` has swapped, and the loss of causal
            language models; or peft's around one, whose adapters leave the head alone.

    Raises:
        Error: another head or loss. In a forward: logits that the model changes before the loss takes them.
    """
    model = base_of(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, Linear):
        got = _named(head) if head is not None else f"{type(model).__qualname__}, which has none"
        fail(INVALID_VALUE, f"fuse_loss: the head is {got}, want a pydet.torch.Linear, as convert() makes it")
    loss = getattr(model, "loss_function", None)
    if isinstance(loss, _Loss):
        return
    if getattr(loss, "__name__", None) != _LOSS:
        fail(UNSUPPORTED, f"fuse_loss: the loss is {getattr(loss, '__name__', loss)}, want Transformers' {_LOSS}")
    model.loss_function = _Loss()
    inner = model.forward
    own = inner.__func__ if getattr(inner, "__self__", None) is model else None

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        call = inner if own is None else functools.partial(own, self)
        if not self.training or options.get("labels") is None:
            return call(*args, **options)
        return _without_logits(self, call, args, options)

    model.forward = types.MethodType(forward, model)


def _without_logits(model: Any, call: Any, args: Any, options: Any) -> Any:
    kept = _Kept(model)
    head = kept.head
    if not isinstance(head, Linear):
        fail(UNSUPPORTED, f"fuse_loss: the head became {_named(head)}, want it a pydet.torch.Linear, without adapters")
    if "forward" in head.__dict__:
        fail(
            UNSUPPORTED,
            "fuse_loss: the head has a forward set on the instance, which would not be called; want its own",
        )
    head.forward = kept  # type: ignore[method-assign]
    token = _kept.set(kept)
    try:
        output = call(*args, **options)
    finally:
        del head.forward
        _kept.reset(token)
    if not hasattr(output, "items"):
        fail(UNSUPPORTED, f"fuse_loss: the forward gave a {type(output).__qualname__}, want return_dict=True")
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})
