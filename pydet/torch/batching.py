"""Transformers' continuous batching with pydet's attention and pydet's sampler."""

from __future__ import annotations

import functools
import types
from typing import Any

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch.stock import registered

_HOOK = "init_continuous_batching"  # by which generate_batch and its like make a manager


def base_of(model: Any) -> Any:
    """The model within peft's, which has the head, the loss and ``generate_batch``."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attention_of(model: Any) -> Any:
    """By which name its configuration calls it."""
    return getattr(getattr(base_of(model), "config", None), "_attn_implementation", None)


def check_attention(what: str, model: Any) -> None:
    """Refuses a model whose attention is not one of pydet's."""
    name = attention_of(model)
    if name not in registered:
        fail(
            INVALID_VALUE,
            f"{what}: the attention of {type(model).__qualname__} is {name!r}, want one of register_attention(), by "
            "model.set_attn_implementation('pydet')",
        )


def continuous_batching(model: Any) -> None:
    """Has a model's continuous batching in Transformers be pydet's: ``generate_batch``, ``init_continuous_batching``
    and ``continuous_batching_context_manager``.

    In place, after :func:`register_attention`, ``model.set_attn_implementation("pydet")`` and :func:`convert`. Then a
    token and its log-probability depend on the weights, the tokens before it, its place, its seed and its options: not
    on what else is in the batch, on the order in which requests come, on where a prompt is cut, on a prefix that
    another request left in the cache, on having made room and come back. A manager that was kept forgets prefixes when
    it starts once more, since weights may have changed; within ``manager.pause()`` it does not.

    Tokens are drawn by :func:`sample`, by the options ``temperature``, ``top_k``, ``top_p`` and ``min_p`` of the
    generation config, or by a request's own: ``manager.add_request(ids, temperature=0.7, seed=3)``. The position is the
    token's place in its sequence. A request without a ``seed`` has one that is made of its name and of the ``seed`` of
    the batching config, which without one is drawn from PyTorch's generator; so have the further sequences of
    ``num_return_sequences``. The ``logprobs`` that ``return_logprobs=True`` asks for are those at the temperature and
    before the filters, the bits of :func:`log_prob` of ``logits / temperature``: what a trainer computes once more.

    Args:
        model: of Transformers 5.24 or later, whose attention is :func:`register_attention`'s; or peft's around one.

    Raises:
        Error: another attention, or a Transformers that lacks it. When generation begins: processors of logits other
            than the four, a compiled step.
    """
    what, inner = "continuous_batching", base_of(model)
    if not callable(getattr(inner, _HOOK, None)):
        fail(INVALID_VALUE, f"{what}: model is {type(model).__qualname__}, want one of Transformers that has {_HOOK}()")
    try:
        from pydet.torch.manager import make
    except ImportError as problem:
        fail(UNSUPPORTED, f"{what}: Transformers 5.24 or later is not here ({problem})")
    check_attention(what, inner)

    @functools.wraps(getattr(type(inner), _HOOK))
    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        return make(self, generation_config, continuous_batching_config, workload_hints)

    inner.init_continuous_batching = types.MethodType(init_continuous_batching, inner)
