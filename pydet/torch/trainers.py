"""What trainers of other packages do beside the modules that they are given."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch import fused, override
from pydet.torch.batching import attention_of, continuous_batching
from pydet.torch.fp8 import Fp8Linear
from pydet.torch.modules import Linear
from pydet.torch.stock import registered

_HEADS = {"lm_head", "get_output_embeddings"}  # by one of these names a forward gets hold of the head


def _codes(function: Any) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The code of a function and of those that it wraps, each with the names of the module that it is from."""
    while function is not None:
        inner = getattr(function, "__func__", function)
        if isinstance(code := getattr(inner, "__code__", None), CodeType):
            yield code, inner.__globals__
        function = getattr(function, "__wrapped__", None)


def _reads_a_weight(code: CodeType, names: dict[str, Any], deep: int = 2) -> bool:
    """Whether code does, or a function of its own module that it calls: Liger's forward hands the head on to one."""
    if "weight" in code.co_names:
        return True
    called = [names.get(name) for name in code.co_names] if deep else []
    own = [f for f in called if isinstance(f, FunctionType) and f.__globals__ is names]
    return any(_reads_a_weight(function.__code__, names, deep - 1) for function in own)


def _bypass(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any]] | None:
    """Which module has a converted head, and the names of the module whose code multiplies its weight and never calls
    it; None where none does."""
    module: Any
    for module in model.modules():
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        if not isinstance(head, Linear | Fp8Linear):
            continue
        own = {kind.__module__ for kind in type(module).__mro__}
        as_written = [code for code, names in _codes(type(module).forward) if names.get("__name__") in own]
        for code, names in _codes(module.forward):  # the model's own may read the type of a weight, and call the head
            if code in as_written or not _HEADS.intersection(code.co_names) or not _reads_a_weight(code, names):
                continue
            return module, names
    return None


def check_trainer(trainer: Any) -> None:
    """Has a trainer's log-probabilities be those that the converted model samples with; refuses one where they are not.

    TRL's trainers (from 1.16) and Liger's kernels replace a model's forward by one that multiplies ``lm_head.weight``
    itself, in tiles with a softmax behind: the converted ``lm_head`` is never called, and the product is PyTorch's. The
    fused head of TRL, and the loss in Liger's, become :func:`linear_log_prob`, here, in the arithmetic of the converted
    head: its log-probabilities are :func:`log_prob` of the sampler's logits, its gradients come to ``main_grad`` where
    the model has :func:`accumulate_gradients`, and logits stay within the workspace. Others are refused. A trainer that
    samples by Transformers' continuous batching does it by pydet's (:func:`continuous_batching`) where the model's
    attention is pydet's. Call this when the trainer is made::

        trainer = trl.GRPOTrainer(model, ...)
        pydet.torch.check_trainer(trainer)
        trainer.train()

    Args:
        trainer: what has a ``model``, and perhaps a ``ref_model``.

    Raises:
        Error: ``trainer`` has no model; or one of them has a converted head that its forward does not call, it is not
            by TRL's, and :func:`override_aten` is not active.
    """
    if not isinstance(getattr(trainer, "model", None), torch.nn.Module):
        fail(INVALID_VALUE, f"check_trainer: trainer is {type(trainer).__qualname__}, want one that has a model")
    if getattr(trainer, "use_transformers_continuous_batching", False) and attention_of(trainer.model) in registered:
        continuous_batching(trainer.model)
    for name in ("model", "ref_model"):
        model = getattr(trainer, name, None)
        found = _bypass(model) if isinstance(model, torch.nn.Module) else None
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
                "sampler's; want the trainer made and run under pydet.torch.override_aten()",
            )
