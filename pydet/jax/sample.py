"""Sampling of tokens from logits, and the k largest elements of a row."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pydet._native import INVALID_VALUE, fail
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    call_handler,
    compiled,
    is_array,
    kernel_name,
    operands_of,
    program,
    static,
    to_array,
    unwrapped,
    whole_numbers,
)
from pydet.shapes import RULES, text

_MOST_COLUMNS = 1 << 23
_OF_ROWS = {"temperature": "temperatures", "top_k": "top_ks", "top_p": "top_ps", "min_p": "min_ps"}


def _low_words(words: Array) -> Array:
    """What int32 holds of numbers of 64 bits, whose lower word comes first."""
    return words[..., 0]


def _sample(
    x: Array,
    seed: Array,
    position: Array,
    temperatures: Array | None,
    top_ks: Array | None,
    top_ps: Array | None,
    min_ps: Array | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    kernel: str,
) -> tuple[Array, Array, Array]:
    lead = x.shape[:-1]
    results = (jax.ShapeDtypeStruct((*lead, 2), jnp.int32), *[jax.ShapeDtypeStruct(lead, jnp.float32)] * 2)
    own = {"temperatures": temperatures, "top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps}
    operands = [x, seed, position, *(values for values in own.values() if values is not None)]
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "kernel": kernel}
    has = {f"has_{name}": values is not None for name, values in own.items()}
    words, log_prob, filtered = call_handler("sample", results, operands, {}, {**options, **has})
    return _low_words(words), log_prob, filtered


_run_sample = compiled(7, 8, 9, 10, 11)(_sample)


def _of_rows(name: str, values: Any, shape: tuple[int, ...]) -> Array:
    """Each row's own number."""
    if name == "top_k":
        return whole_numbers("sample", "top_k", values, shape, exact=True)
    values = to_array("sample", name, values, ("float32",))
    if values.shape != shape:
        fail(INVALID_SHAPE, f"sample: {name} is {text(values.shape)}, want {text(shape)}")
    return values


@program
def sample(
    logits: Array,
    seed: Array,
    position: Array,
    *,
    temperature: float | Array = 1.0,
    top_k: int | Array = 0,
    top_p: float | Array = 1.0,
    min_p: float | Array = 0.0,
    kernel: str | None = None,
) -> tuple[Array, Array, Array]:
    """Draws a token of each row of logits: :func:`pydet.sample`, with its tokens.

    Args:
        logits: ``[..., N]``.
        seed, position: ``[...]``, int32 or int64: any numbers. Two rows of one seed and one position have one noise.
        temperature, top_k, top_p, min_p: static numbers, or arrays ``[...]`` of each row's own: float32, and top_k's
            int32 or int64.
        kernel: as in :func:`gemm`.

    Returns:
        ``(token, log_prob, filtered_log_prob)``, ``[...]``: int32, and float32 twice. There is no gradient.
    """
    x = to_array("sample", "logits", logits)
    RULES.norm("sample", *operands_of(("logits", x)))
    if x.shape[-1] > _MOST_COLUMNS:
        fail(INVALID_SHAPE, f"sample: logits is {text(x.shape)}, want a last dimension of 1 to {_MOST_COLUMNS}")
    lead = x.shape[:-1]
    seed = whole_numbers("sample", "seed", seed, lead, exact=True)
    position = whole_numbers("sample", "position", position, lead, exact=True)
    given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    own: dict[str, Array | None] = dict.fromkeys(_OF_ROWS)
    numbers: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, value in given.items():
        value = unwrapped(value)
        if is_array(value) and not isinstance(value, np.generic):
            own[name] = _of_rows(name, value, lead)
        else:
            kind = operator.index if name == "top_k" else float
            numbers[name] = static("sample", name, value, kind, "a number, or an array of each row's own")
    _check(numbers)
    return _run_sample(x, seed, position, *own.values(), *numbers.values(), kernel_name("sample", kernel))


def _check(numbers: dict[str, Any]) -> None:
    """As the library does where there is memory (``native/ops/sample/check.h``), of numbers in float32."""
    with np.errstate(over="ignore"):
        numbers = {name: x if name == "top_k" else float(np.float32(x)) for name, x in numbers.items()}
    if not 0 <= numbers["temperature"] < np.inf:
        fail(
            INVALID_VALUE,
            f"sample: temperature is {numbers['temperature']:g}, want a finite number, 0 (the largest logit) or more",
        )
    if numbers["top_k"] < 0:
        fail(INVALID_VALUE, f"sample: top_k is {numbers['top_k']}, want 0 (no such filter) or more")
    if numbers["top_k"] >= 1 << 63:
        fail(INVALID_VALUE, "sample: top_k is no 64-bit integer")
    for name in ("top_p", "min_p"):
        if not 0 <= numbers[name] <= 1:
            fail(INVALID_VALUE, f"sample: {name} is {numbers[name]:g}, want a number from 0 to 1")


def _topk(x: Array, k: int, kernel: str) -> tuple[Array, Array]:
    shape = (*x.shape[:-1], k)
    results = (jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct((*shape, 2), jnp.int32))
    values, words = call_handler("topk", results, [x], {}, {"kernel": kernel})
    return values, _low_words(words)


_run_topk = compiled(1, 2)(_topk)


@program
def topk(x: Array, k: int, *, kernel: str | None = None) -> tuple[Array, Array]:
    """The ``k`` largest of each row, descending, equal ones by ascending column: :func:`pydet.topk`.

    Args:
        x: ``[..., N]``.
        k: 1 to N.
        kernel: as in :func:`gemm`.

    Returns:
        ``(values, index)``, ``[..., k]``: of ``x``'s type, and int32. There is no gradient.
    """
    x = to_array("topk", "x", x)
    RULES.norm("topk", *operands_of(("x", x)))
    k = static("topk", "k", k, operator.index, "an integer")
    n = x.shape[-1]
    if not 1 <= k <= n:
        fail(INVALID_VALUE, f"topk: k is {k}, want 1 to the {n} elements of a row")
    return _run_topk(x, k, kernel_name("topk", kernel))
