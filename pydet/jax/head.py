"""The head of a language model: log-probabilities and losses under a linear layer without the logits in memory."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pydet import _native
from pydet._native import INVALID_DTYPE, INVALID_VALUE, constants, fail, ffi
from pydet.frameworks import type_index
from pydet.hooks import unknown
from pydet.jax import exact
from pydet.jax.calls import (
    INVALID_SHAPE,
    Array,
    Options,
    call_handler,
    compiled,
    name_of,
    operands_of,
    options_of,
    program,
    static,
    to_array,
    unwrapped,
    whole_numbers,
)
from pydet.jax.products import Layout, product
from pydet.ops import Arithmetic
from pydet.ops.head import HEAD_WORKSPACE
from pydet.protocols import TYPES
from pydet.shapes import RULES, text

Reduction: TypeAlias = Literal["mean", "sum", "none"]
_OP = "linear_log_prob"
_LOSS = "linear_cross_entropy"
_LOSS_ROWS = 256  # rows of a part of a loss's sum
_DTYPES = {
    "float32": (constants.PYDET_FLOAT, 32, 1),
    "bfloat16": (constants.PYDET_BFLOAT, 16, 1),
    "float16": (constants.PYDET_FLOAT, 16, 1),
}


class _Asked(NamedTuple):
    """What is asked of rows beside the log-probability, in the order of results and gradients."""

    entropy: bool = False
    lse: bool = False
    mean: bool = False


class _How(NamedTuple):
    """What is static of a call."""

    arithmetic: int
    k_chunk: int
    wide_logits: bool
    workspace: int
    temperature: float
    softcap: float  # 0: none
    asked: _Asked


def _bytes(x: Array, w: Array, backward: bool, most: int, how: _How) -> int:
    library = _native.load(constants.PYDET_EXCHANGE_CPU)
    options, found = ffi.new("pydet_linear_log_prob_options *"), ffi.new("uint64_t *")
    options.struct_size = ffi.sizeof(options[0])
    options.arithmetic, options.k_chunk = how.arithmetic, how.k_chunk
    if how.wide_logits:
        options.logits = _DTYPES["float32"]
    rows, dtype = math.prod(x.shape[:-1]), ffi.new("pydet_dtype *", _DTYPES[name_of(x.dtype)])[0]
    asked = rows, w.shape[0], w.shape[1], dtype, int(backward), most, options, found
    library.check(library.lib.pydet_linear_log_prob_workspace(*asked))
    return int(found[0])


def _room(x: Array, w: Array, backward: bool, how: _How) -> Any:
    size = min(_bytes(x, w, backward, how.workspace, how), how.workspace)
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _attributes(bias: Array | None, how: _How) -> dict[str, Any]:
    names = ("arithmetic", "k_chunk", "wide_logits", "softcap", "temperature")
    asked = {f"has_{name}": wanted for name, wanted in how.asked._asdict().items()}
    return {**{name: getattr(how, name) for name in names}, **asked, "has_bias": bias is not None}


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _head(x: Array, w: Array, index: Array, bias: Array | None, how: _How) -> tuple[Array, ...]:
    """log_prob, and what else is asked."""
    each = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    results = each, *[each] * sum(how.asked), _room(x, w, False, how)
    operands = [x, w, index] if bias is None else [x, w, index, bias]
    made: tuple[Array, ...] = call_handler(_OP, results, operands, {}, _attributes(bias, how))
    return made[:-1]


def _forward(x: Array, w: Array, index: Array, bias: Array | None, how: _How) -> tuple[tuple[Array, ...], Any]:
    return _head(x, w, index, bias, how), (x, w, index, bias)


def _rounded(sums: Array, dtype: Any, how: _How) -> Array:
    """Sums that are done, in the type of their parameter: the bias of an empty product, which is rounded once."""
    if dtype == jnp.float32:
        return sums
    rows = sums[None] if sums.ndim == 1 else sums
    left, right = jnp.zeros((rows.shape[0], 0), dtype), jnp.zeros((0, rows.shape[1]), dtype)
    made = product(left, right, rows, None, name_of(dtype), Layout(), Options(how.arithmetic))
    return made.reshape(sums.shape)


def _backward(how: _How, saved: Any, given: tuple[Array, ...]) -> tuple[Array | None, ...]:
    dlog_prob, *others = given
    x, w, index, bias = saved
    whole = _bytes(x, w, True, 2**62, how) <= how.workspace  # then sums are rounded where they are made
    parameters = [w] if bias is None else [w, bias]
    sums = [jax.ShapeDtypeStruct(p.shape, p.dtype if whole else jnp.float32) for p in parameters]
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), *sums, _room(x, w, True, how)
    operands = [dlog_prob, x, w, index, *([] if bias is None else [bias]), *others]
    dx, dw, *rest = call_handler(f"{_OP}_backward", results, operands, {}, _attributes(bias, how))
    dbias = None if bias is None else rest[0] if whole else _rounded(rest[0], bias.dtype, how)
    return dx, dw if whole else _rounded(dw, w.dtype, how), None, dbias


_head.defvjp(_forward, _backward)
_run_head = compiled(4)(_head)


# ---- Arguments -------------------------------------------------------------------------------------------------------


def _operands(op: str, x: Any, w: Any, bias: Any) -> tuple[Array, Array, Array | None]:
    x, w = to_array(op, "x", x), to_array(op, "w", w)
    added = None if bias is None else to_array(op, "bias", bias)
    RULES.skinny_product(op, *operands_of(("x", x), ("w", w), ("bias", added)))
    if not w.shape[0]:
        fail(INVALID_SHAPE, f"{op}: w is {text(w.shape)}, want a row or more")
    if added is not None and added.ndim != 1:
        fail(INVALID_SHAPE, f"{op}: bias is {text(added.shape)}, want {w.shape[0]}")
    return x, w, added


def _scale(op: str, name: str, value: Any) -> float:
    want = "a number from 2^-100 to 2^100"
    number: float = static(op, name, value, float, want)
    if not 2.0**-100 <= number <= 2.0**100:
        fail(INVALID_VALUE, f"{op}: {name} is {number:g}, want {want}")
    return number


def _how(
    op: str,
    x: Array,
    logits_dtype: Any,
    temperature: Any,
    softcap: Any,
    arithmetic: Arithmetic,
    k_chunk: int | None,
    workspace: Any,
    asked: _Asked,
) -> _How:
    logits = name_of(x.dtype) if logits_dtype is None else TYPES[type_index(logits_dtype, op, "logits_dtype")]
    if logits not in ("float32", name_of(x.dtype)):
        fail(INVALID_DTYPE, f"{op}: logits_dtype is {logits}, want float32, or {name_of(x.dtype)} as x is")
    size = static(op, "workspace", workspace, operator.index, "a positive number of bytes")
    if size <= 0:
        fail(INVALID_VALUE, f"{op}: workspace is {size}, want a positive number of bytes")
    options, heat = options_of(op, arithmetic, k_chunk), _scale(op, "temperature", temperature)
    cap = 0.0 if softcap is None else _scale(op, "softcap", softcap)
    return _How(options.arithmetic, options.k_chunk, logits != name_of(x.dtype), size, heat, cap, asked)


# ---- Log-probabilities -----------------------------------------------------------------------------------------------


@program
def linear_log_prob(
    x: Array,
    w: Array,
    index: Array,
    bias: Array | None = None,
    *,
    logits_dtype: Any = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = HEAD_WORKSPACE,
) -> Any:
    """``log_prob(linear(x, w, bias), index)`` without the logits in memory: :func:`pydet.linear_log_prob`, and with the
    bits of ``pydet.torch.linear_log_prob``.

    Backward makes the logits again, some rows at a time.

    Args:
        x: ``[..., K]``.
        w: ``[N, K]``, of the type of ``x``.
        index: ``[...]``, int32 or int64; a number that is no column gives NaN, and zeros in the gradients.
        bias: ``[N]``.
        logits_dtype: the type that logits are rounded to: that of ``x`` by default, or float32.
        temperature: logits are divided by it, after they were rounded and capped.
        softcap: logits become ``softcap tanh(logits / softcap)``.
        return_entropy: return the entropy of each row too. It has a gradient.
        arithmetic, k_chunk: as in :func:`gemm`, forward and backward.
        workspace: bytes that the logits of some rows may take. It decides no bits.

    Returns:
        ``[...]``, float32; with ``return_entropy`` a pair of them.
    """
    x, w, added = _operands(_OP, x, w, bias)
    index = whole_numbers(_OP, "index", index, x.shape[:-1])
    asked = _Asked(entropy=static(_OP, "return_entropy", return_entropy, bool, "True or False"))
    how = _how(_OP, x, logits_dtype, temperature, softcap, arithmetic, k_chunk, workspace, asked)
    made = _run_head(x, w, index, added, how)
    return made if return_entropy else made[0]


# ---- Losses ----------------------------------------------------------------------------------------------------------


class _Loss(NamedTuple):
    """The loss of rows, of what the head says of them."""

    label_smoothing: float
    z_loss: float
    reduction: str

    @property
    def asked(self) -> _Asked:
        return _Asked(lse=self.label_smoothing > 0 or self.z_loss > 0, mean=self.label_smoothing > 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _loss_of_rows(made: tuple[Array, ...], ignored: Array, loss: _Loss) -> Array:
    """Of log_prob and, as they are asked, lse and mean."""
    found = exact.negate(made[0])
    if loss.label_smoothing > 0:
        spread = exact.multiply(exact.subtract(made[1], made[2]), jnp.float32(loss.label_smoothing))
        found = exact.add(exact.multiply(found, jnp.float32(1.0 - loss.label_smoothing)), spread)
    if loss.z_loss > 0:
        found = exact.add(found, exact.multiply(exact.multiply(made[1], made[1]), jnp.float32(loss.z_loss)))
    return jnp.where(ignored, 0.0, found)


def _loss_forward(made: tuple[Array, ...], ignored: Array, loss: _Loss) -> tuple[Array, Any]:
    return _loss_of_rows(made, ignored, loss), (made, ignored)


def _loss_backward(loss: _Loss, saved: Any, given: Array) -> tuple[tuple[Array, ...], None]:
    made, ignored = saved
    given = jnp.where(ignored, 0.0, given)
    kept, of_lse, of_mean = given, [], []
    if loss.z_loss > 0:
        once = exact.multiply(exact.multiply(given, jnp.float32(loss.z_loss)), made[1])
        of_lse.append(exact.add(once, once))
    if loss.label_smoothing > 0:
        kept = exact.multiply(given, jnp.float32(1.0 - loss.label_smoothing))
        spread = exact.multiply(given, jnp.float32(loss.label_smoothing))
        of_lse.append(spread)
        of_mean.append(exact.negate(spread))
    others = [jnp.where(ignored, 0.0, functools.reduce(exact.add, of_lse))] if of_lse else []
    return (exact.negate(kept), *others, *of_mean), None


_loss_of_rows.defvjp(_loss_forward, _loss_backward)


@jax.custom_vjp
def _over_count(total: Array, count: Array) -> Array:
    return exact.divide(total, count)


def _over_count_forward(total: Array, count: Array) -> tuple[Array, Array]:
    return _over_count(total, count), count


def _over_count_backward(count: Array, given: Array) -> tuple[Array, None]:
    return exact.divide(given, count), None


_over_count.defvjp(_over_count_forward, _over_count_backward)


def _sum_of_rows(losses: Array) -> Array:
    """The sum of all, in float32, in order: chains of 256 whose sums are added in ascending order."""
    rows = losses.reshape(1, -1)
    options = Options(unknown("ieee", _LOSS, "arithmetic"), _LOSS_ROWS)
    ones = jnp.ones((rows.shape[1], 1), jnp.float32)
    return product(rows, ones, None, None, "float32", Layout(), options)[0, 0]


@compiled(5, 6)
def _run_loss(x: Array, w: Array, index: Array, ignored: Array, bias: Array | None, how: _How, loss: _Loss) -> Array:
    losses = _loss_of_rows(_head(x, w, index, bias, how), ignored, loss)
    if loss.reduction == "none":
        return losses
    total = _sum_of_rows(losses)
    return total if loss.reduction == "sum" else _over_count(total, (~ignored).sum().astype(jnp.float32))


def _targets(target: Any, ignore_index: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """-> the columns, none where a row is ignored; which rows are."""
    target = unwrapped(target)
    if isinstance(target, np.ndarray) and name_of(target.dtype) == "int64":  # before JAX narrows it
        ignored = target == ignore_index
        return whole_numbers(_LOSS, "target", np.where(ignored, -1, target), shape), jnp.asarray(ignored)
    index = whole_numbers(_LOSS, "target", target, shape)
    known = np.iinfo(index.dtype)
    ignored = index == ignore_index if known.min <= ignore_index <= known.max else jnp.zeros(index.shape, bool)
    return jnp.where(ignored, -1, index), ignored


@program
def linear_cross_entropy(
    x: Array,
    w: Array,
    target: Array,
    bias: Array | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    logits_dtype: Any = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    workspace: int = HEAD_WORKSPACE,
) -> Array:
    """The negative :func:`linear_log_prob` of targets, summed, without the logits in memory, and with the bits of
    ``pydet.torch.linear_cross_entropy``.

    Args:
        x, w, bias, logits_dtype, temperature, softcap, arithmetic, k_chunk, workspace: as in :func:`linear_log_prob`.
        target: ``[...]``, int32 or int64. What is neither a column nor ``ignore_index`` makes its row's loss NaN, and
            leaves zeros in the gradient.
        ignore_index: rows of this target have loss 0 and no gradient.
        label_smoothing: from 0 to 1: so much of the target is spread over all columns.
        z_loss: so many times the square of the logarithm of the sum of exponentials is added to a row's loss.
        reduction: ``"mean"`` over rows that are not ignored (NaN where all are), ``"sum"``, or ``"none"``. Sums go over
            rows in order (NUMERICS.md, "Head").

    Returns:
        A float32 scalar, or ``[...]``.
    """
    x, w, added = _operands(_LOSS, x, w, bias)
    ignore = static(_LOSS, "ignore_index", ignore_index, operator.index, "an integer")
    index, ignored = _targets(target, ignore, x.shape[:-1])
    reduction = static(_LOSS, "reduction", reduction, str, "'mean', 'sum' or 'none'")
    if reduction not in ("mean", "sum", "none"):
        fail(INVALID_VALUE, f"{_LOSS}: reduction is {reduction!r}, want 'mean', 'sum' or 'none'")
    smoothing = static(_LOSS, "label_smoothing", label_smoothing, float, "a number from 0 to 1")
    if not 0.0 <= smoothing <= 1.0:
        fail(INVALID_VALUE, f"{_LOSS}: label_smoothing is {smoothing}, want a number from 0 to 1")
    z = static(_LOSS, "z_loss", z_loss, float, "a number from 0 up")
    if not 0.0 <= z < math.inf:
        fail(INVALID_VALUE, f"{_LOSS}: z_loss is {z}, want a number from 0 up")
    loss = _Loss(smoothing, z, reduction)
    how = _how(_LOSS, x, logits_dtype, temperature, softcap, arithmetic, k_chunk, workspace, loss.asked)
    made: Array = _run_loss(x, w, index, ignored, added, how, loss)
    return made
