"""What is asked of the logits of a head beside plain log-probabilities, in chunks of rows; and its gradients.

A composition of the library's calls, as `pydet/torch/ops/head.py` is, with its bits. What is done to single elements
between them is `pydet/jax/exact.py`'s. No chunk changes a bit, since rows are independent and sums over rows are
continued at multiples of 16 of them (NUMERICS.md, "Head").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pydet._native import constants, fail
from pydet.hooks import unknown
from pydet.jax import exact
from pydet.jax.activation import tanh
from pydet.jax.calls import Array, Options, aligned, as_rows, call_handler, first_only, name_of
from pydet.jax.foreign import one_by_one
from pydet.jax.products import Layout, product
from pydet.jax.sample import topk
from pydet.jax.softmax import log_prob, log_softmax, softmax

OP = "linear_log_prob"
ROWS = 16  # a multiple of every arithmetic's step, where a sum over rows may be cut
_FP32 = 4  # bytes


class Asked(NamedTuple):
    """What is asked of rows beside the log-probability."""

    entropy: bool = False
    lse: bool = False
    mean: bool = False


class How(NamedTuple):
    """What is static of a call."""

    arithmetic: int
    k_chunk: int
    wide_logits: bool
    workspace: int
    temperature: float = 1.0
    softcap: float | None = None
    asked: Asked = Asked()

    @property
    def scales(self) -> bool:
        return self.softcap is not None or self.temperature != 1

    @property
    def is_plain(self) -> bool:
        """Whether this is the library's own operation."""
        return not self.scales and not any(self.asked)

    @property
    def products(self) -> Options:
        return Options(self.arithmetic, self.k_chunk)


# ---- Chunks ----------------------------------------------------------------------------------------------------------


def _rows_at_once(rows: int, row_bytes: int, unit: int, how: How) -> int:
    """As many as the workspace holds, of which a multiple of `unit` if not all."""
    most = how.workspace // row_bytes
    if most >= rows:
        return max(rows, 1)
    if most < unit:
        some = "a row" if unit == 1 else f"{unit} rows, where a sum over rows may be cut"
        need = min(unit, rows) * row_bytes
        fail(
            constants.PYDET_WORKSPACE_TOO_SMALL,
            f"{OP}: workspace is {how.workspace} bytes, want at least {need} for {some}",
        )
    return most - most % unit


def _over_chunks(one: Callable[..., Any], sums: Any, arrays: list[Array], most: int) -> tuple[Any, Any]:
    """``one(sums, *arrays) -> (sums, results)``, of so many rows of the arrays at a time."""
    rows = arrays[0].shape[0]
    if rows <= most:
        return one(sums, *arrays)
    count, rest = divmod(rows, most)
    chunks = [x[: count * most].reshape(count, most, *x.shape[1:]) for x in arrays]
    sums, made = jax.lax.scan(lambda sums, chunk: one(sums, *chunk), sums, chunks)
    made = jax.tree.map(lambda y: y.reshape(count * most, *y.shape[2:]), made)
    if rest:
        sums, last = one(sums, *(x[count * most :] for x in arrays))
        made = jax.tree.map(lambda y, z: jnp.concatenate([y, z]), made, last)
    return sums, made


def _row_bytes(n: int, x: Array, how: How, backward: bool) -> int:
    """Of what a row of a chunk takes where most of it is there at a time."""
    logits = _FP32 if how.wide_logits else x.dtype.itemsize
    arrays = 2 + (how.softcap is not None)  # in float32: what logits are read as, what becomes of it, over the cap
    if any(how.asked):
        arrays += 4  # probabilities and their logarithms, with a column more of each, and products of these
    if backward:
        arrays += 1  # the gradient
    return n * logits + (n + 1) * _FP32 * arrays


# ---- What rows are asked ---------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """What the logits of a chunk are read as: in float32, divided and capped."""

    read: Array
    over_cap: Array | None


def _logits(x: Array, w: Array, bias: Array | None, how: How) -> _Rows:
    dtype = "float32" if how.wide_logits else name_of(x.dtype)
    logits = product(x, w, bias, None, dtype, Layout(transpose_b=True), how.products._replace(skinny=True))
    read, over_cap = logits.astype(jnp.float32), None
    if how.softcap is not None:
        over_cap = exact.divide(read, jnp.float32(how.softcap))
        read = exact.multiply(tanh(over_cap), jnp.float32(how.softcap))
    if how.temperature != 1:
        read = exact.divide(read, jnp.float32(how.temperature))
    return _Rows(read, over_cap)


def _widened(x: Array, last: float) -> Array:
    """With a column more, of a number."""
    return jnp.pad(x, ((0, 0), (0, 1)), constant_values=last)


def _softmax_backward(dy: Array, y: Array, log: bool) -> Array:
    like = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return call_handler("softmax_backward", like, [dy, y], {}, {"log": log, "kernel": ""})


class _Spread(NamedTuple):
    """The probabilities p of a chunk; ``p (log p + H)``, log p being 0 where it is -Inf; and the entropies H."""

    probs: Array
    products: Array
    entropy: Array


def _spread(read: Array) -> _Spread:
    """The entropy -rowsum(p, log p) is the gradient of softmax at a column more, whose p is 1 and whose gradient is 0;
    at the others that is ``p (log p - rowsum(p, log p))``."""
    probs, logs = softmax(read), log_softmax(read)
    logs = jnp.where(logs == -jnp.inf, 0.0, logs)
    made = _softmax_backward(_widened(logs, 0.0), _widened(probs, 1.0), False)
    return _Spread(probs, made[:, :-1], made[:, -1])


def _mean(read: Array) -> Array:
    """rowsum(v, 1) / N: the gradient of log_softmax at a column more, whose logarithm and gradient are 0."""
    wide = _widened(read, 0.0)
    less = _softmax_backward(wide, jnp.zeros_like(wide), True)[:, -1]
    return exact.divide(exact.subtract(jnp.float32(0), less), jnp.float32(read.shape[1]))


def _lse(read: Array) -> Array:
    """m + log s: the log-probability of the largest logit is -log s."""
    most, where = topk(read, 1)
    return exact.subtract(exact.add(most[:, 0], jnp.float32(0)), log_prob(read, where[:, 0]))


def _answers(how: How, x: Array, w: Array, index: Array, *bias: Array) -> tuple[Array, ...]:
    """-> log_prob, and of entropy, lse and mean what is asked."""

    def one(_: None, rows: Array, index: Array) -> tuple[None, list[Array]]:
        read = _logits(rows, w, bias[0] if bias else None, how).read
        made = [log_prob(read, index)]
        if how.asked.entropy:
            made.append(_spread(read).entropy)
        if how.asked.lse:
            made.append(_lse(read))
        if how.asked.mean:
            made.append(_mean(read))
        return None, made

    lead, rows = index.shape, as_rows(x)
    most = _rows_at_once(rows.shape[0], _row_bytes(w.shape[0], x, how, False), 1, how)
    made = _over_chunks(one, None, [rows, index.reshape(-1)], most)[1]
    return tuple(y.reshape(lead) for y in made)


# ---- Gradients -------------------------------------------------------------------------------------------------------


def _scaled(rows: Array, weight: Array) -> Array:
    """Each row times its weight; 0 where that is 0, whatever the row holds."""
    return jnp.where(exact.is_zero(weight)[:, None], 0.0, exact.multiply(rows, weight[:, None]))


def _gradient_of_rows(rows: _Rows, index: Array, dlog_prob: Array, others: list[Array], dtype: Any, how: How) -> Array:
    """The gradient of a chunk's logits, in a type."""
    like, n, given = jax.ShapeDtypeStruct(rows.read.shape, jnp.float32), rows.read.shape[1], iter(others)
    d = call_handler("log_prob_backward", like, [dlog_prob, rows.read, index], {}, {"kernel": ""})
    if others:
        spread = _spread(rows.read)
        if how.asked.entropy:
            d = exact.add(d, _scaled(spread.products, exact.negate(next(given))))
        if how.asked.lse:
            d = exact.add(d, _scaled(spread.probs, next(given)))
        if how.asked.mean:
            d = exact.add(d, exact.divide(next(given), jnp.float32(n))[:, None])
    if how.temperature != 1:
        d = exact.divide(d, jnp.float32(how.temperature))
    if rows.over_cap is not None:
        attributes = {"kind": unknown("tanh", OP, "kind"), "has_up": False, "kernel": ""}
        (d,) = call_handler("activation_backward", (like,), [d, rows.over_cap], {}, attributes)
    return exact.narrow(d, dtype)


def _gradients(
    how: How, x: Array, w: Array, index: Array, dlog_prob: Array, *rest: Array
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """-> dx, dw and, with a bias, dbias; `rest`: the gradients of what is asked, the bias if there is one."""
    count = sum(how.asked)
    others, bias = rest[:count], rest[count:]
    rows, parameters = as_rows(x), [w, *bias]
    most = _rows_at_once(rows.shape[0], _row_bytes(w.shape[0], x, how, True), how.k_chunk or ROWS, how)
    cut = most < rows.shape[0]  # then sums are float32 until they are done
    types = ["float32" if cut else name_of(p.dtype) for p in parameters]

    def one(sums: list[Array | None], rows: Array, index: Array, *given: Array) -> tuple[list[Array], Array]:
        logits = _logits(rows, w, bias[0] if bias else None, how)
        d = _gradient_of_rows(logits, index, given[0], list(given[1:]), x.dtype, how)
        dx = product(d, w, None, None, name_of(x.dtype), Layout(), how.products)
        made = [product(d, rows, None, sums[0], types[0], Layout(transpose_a=True), how.products)]
        if bias:
            ones = jnp.ones((d.shape[0], 1), d.dtype)
            made.append(product(ones, d, None, sums[1], types[1], Layout(transpose_a=True), how.products))
        return made, dx

    shapes = [w.shape, *((1, *b.shape) for b in bias)]
    zeros = [aligned([rows, jnp.zeros(s, jnp.float32)])[1] if cut else None for s in shapes]
    arrays = [rows, index.reshape(-1), *(g.reshape(-1) for g in (dlog_prob, *others))]
    sums, dx = _over_chunks(one, zeros, arrays, most)
    made = [s.reshape(p.shape) for s, p in zip(sums, parameters, strict=True)]
    if cut:
        made = [exact.narrow(s, p.dtype) for s, p in zip(made, parameters, strict=True)]
    return (dx.reshape(x.shape), *made)


# ---- The function ----------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def answers(x: Array, w: Array, index: Array, bias: Array | None, how: How) -> tuple[Array, ...]:
    """log_prob of each row and, of entropy, lse (the logarithm of the sum of exponentials) and the mean of the logits,
    what is asked."""
    given = [x, w, index] if bias is None else [x, w, index, bias]
    made: tuple[Array, ...] = one_by_one(functools.partial(_answers, how))(*given)
    return made


def _forward(x: Array, w: Array, index: Array, bias: Array | None, how: How) -> tuple[tuple[Array, ...], Any]:
    return answers(x, w, index, bias, how), (x, w, index, bias)


def _backward(how: How, saved: Any, given: tuple[Array, ...]) -> tuple[Array | None, ...]:
    x, w, index, bias = saved
    more = given if bias is None else (*given, bias)
    made = first_only(f"{OP}_backward", one_by_one(functools.partial(_gradients, how)))
    dx, dw, *dbias = made(x, w, index, *more)
    return dx, dw, None, dbias[0] if dbias else None


answers.defvjp(_forward, _backward)
