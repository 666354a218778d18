"""What trainers of other packages do beside the modules that they are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch import fused, override
from pydet.torch.batching import attention_of, continuous_batching
from pydet.torch.bypasses import HEADS, functions, reads_a_weight, taking_head, unread
from pydet.torch.fp8 import Fp8Linear
from pydet.torch.modules import Linear
from pydet.torch.stock import registered

_UNDER_OVERRIDE = "want the trainer made and run under pydet.torch.override_aten()"


def _with_heads(model: torch.nn.Module) -> Iterator[tuple[Any, Linear | Fp8Linear]]:
    """The modules that have a converted head, and it."""
    module: Any
    for module in model.modules():
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        if isinstance(head, Linear | Fp8Linear):
            yield module, head


def _bypass(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any]] | None:
    """Which module has a converted head, and the names of the module whose code multiplies its weight and never calls
    it; None where none does."""
    for module, _ in _with_heads(model):
        own = {kind.__module__ for kind in type(module).__mro__}
        as_written = [f.__code__ for f in functions(type(module).forward) if f.__globals__.get("__name__") in own]
        for function in functions(module.forward):
            code, names = function.__code__, function.__globals__
            # The model's own may read the type of a weight, and call the head.
            if code not in as_written and HEADS.intersection(code.co_names) and reads_a_weight(code, names):
                return module, names
    return None


def _replaced(head: Linear | Fp8Linear) -> bool:
    """Whether another forward was set on the head's instance, and does not come to its own."""
    own: Any = type(head).forward
    given = head.__dict__.get("forward")
    return given is not None and own not in functions(given)


def _check_ways(trainer: Any, heads: list[tuple[str, Linear | Fp8Linear]]) -> None:
    """Refuses a trainer whose own methods pass the heads by, one of which nobody can say, and a head that is passed by
    in its own call."""
    bypasses = "the weight of the converted head instead of calling it, so that log-probabilities"
    replaced = [name for name, head in heads if _replaced(head)]
    if (where := taking_head(trainer)) is not None:
        what = f"{where} takes {bypasses} differ from the sampler's"
    elif (where := unread(trainer)) is not None:
        what = f"{where} has no Python code to be read, and may take {bypasses} would differ from the sampler's"
    elif replaced:
        what = f"the head of the {replaced[0]} has a forward set on the instance, as by TRL's cast_lm_head_to_fp32, so "
        what += "that the sampler's logits are not pydet's"
    else:
        return
    fail(UNSUPPORTED, f"check_trainer: {what}; {_UNDER_OVERRIDE}")


def check_trainer(trainer: Any) -> None:
    """Has a trainer's log-probabilities be those that the converted model samples with; refuses one where they are not.

    TRL's trainers (from 1.16) and Liger's kernels replace a model's forward by one that multiplies ``lm_head.weight``
    itself, in tiles with a softmax behind: the converted ``lm_head`` is never called, and the product is PyTorch's. The
    fused head of TRL, and the loss in Liger's, become :func:`linear_log_prob`, here, in the arithmetic of the converted
    head: its log-probabilities are :func:`log_prob` of the sampler's logits, its gradients come to ``main_grad`` where
    the model has :func:`accumulate_gradients`, and logits stay within the workspace. Others are refused; so are
    trainers that take the weight in a method of their own, as TRL's for distillation.

    It goes by what Python code can be read: of forwards, of the methods by which the trainer makes its loss, and of
    functions of their own package that these call, two deep. What takes the weight behind that, as an object of another
    package that is given the model, is not seen, nor is what a trainer makes of logits that the head did give.

    A trainer that samples by Transformers' continuous batching does it by pydet's (:func:`continuous_batching`) where
    the model's attention is pydet's. Call this when the trainer is made::

        trainer = trl.GRPOTrainer(model, ...)
        pydet.torch.check_trainer(trainer)
        trainer.train()

    Args:
        trainer: what has a ``model``, and perhaps a ``ref_model``.

    Raises:
        Error: ``trainer`` has no model; or :func:`override_aten` is not active and a model with a converted head has a
            forward that does not call it and is not TRL's or Liger's, its head has a forward set on the instance, or
            the trainer's own methods take its weight, or cannot be read.
    """
    if not isinstance(getattr(trainer, "model", None), torch.nn.Module):
        fail(INVALID_VALUE, f"check_trainer: trainer is {type(trainer).__qualname__}, want one that has a model")
    named = {name: getattr(trainer, name, None) for name in ("model", "ref_model")}
    models = {name: model for name, model in named.items() if isinstance(model, torch.nn.Module)}
    heads = [(name, head) for name, model in models.items() for _, head in _with_heads(model)]
    if heads and not override.is_active():
        _check_ways(trainer, heads)
    if getattr(trainer, "use_transformers_continuous_batching", False) and attention_of(trainer.model) in registered:
        continuous_batching(trainer.model)
    for name, model in models.items():
        found = _bypass(model)
        if found is None:
            continue
        module, names = found
        place = names.get("__name__", "?")
        if fused.can_route(module, place):
            fused.route(module)
        elif fused.can_route_loss(module, names):
            fused.route_loss(module, names)
        elif not override.is_active():
            fail(
                UNSUPPORTED,
                f"check_trainer: the {name} of {type(trainer).__qualname__} has a forward of {place}, which multiplies "
                "the weight of the converted head itself and never calls it, so that log-probabilities differ from the "
                f"sampler's; {_UNDER_OVERRIDE}",
            )
