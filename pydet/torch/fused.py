"""Heads that other packages multiply themselves, taken over by :func:`pydet.torch.linear_log_prob`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from pydet._native import UNSUPPORTED, fail
from pydet.torch.head import head_of
from pydet.torch.modules import Linear

TRL = "trl.trainer.utils"  # whose forward asks `_ChunkedLogProbFunction.apply` for log-probabilities
_FUNCTION = "_ChunkedLogProbFunction"
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # beside each other, in this order
_LACKS = {"log_sum_sq_probs"}
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
        if logit_scale != 1:
            fail(
                UNSUPPORTED,
                f"check_trainer: TRL's fused head multiplies logits by {logit_scale}, want a model whose "
                "logits are not scaled, or one without a route (under override_aten(), without check_trainer)",
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
            softcap=softcap,
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


def can_route(model: Any, place: str) -> bool:
    """Whether the forward is TRL's, by a function that is there to be replaced, and the head a linear layer."""
    return (
        place == TRL and hasattr(sys.modules.get(TRL), _FUNCTION) and isinstance(model.get_output_embeddings(), Linear)
    )
