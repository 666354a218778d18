"""A loss and its gradients over micro-batches, with the bits of one batch: accumulate_gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.jax.calls import INVALID_SHAPE, Array, name_of, options_of, static
from pydet.jax.converted import Walk, as_it_is, loop_counts, traced
from pydet.jax.embedding import adds_rows
from pydet.ops import Arithmetic
from pydet.protocols import UNSCALED, type_name

_OP = "accumulate_gradients"
_ALONG = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis",
          "sort": "dimension", "rev": "dimensions", "iota": "dimension"}  # fmt: skip
_literal: Any = jax.extend.core.Literal


class _Flat(Walk):
    """The same equations, those of calls among them."""

    def number(self, name: str, params: Any, operands: list[Any], accumulate: Array | None = None) -> None:
        return None

    def equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        if equation.primitive.name in ("scan", "while", "cond", "shard_map", "ragged_dot_general"):
            return as_it_is(equation, operands)
        if equation.primitive.name in ("checkpoint", "remat", "remat2"):
            return self.run(equation.params["jaxpr"], (), operands)
        return super().equation(equation, operands)


def _flat(function: Callable[..., Any], params: Any, batch: Any) -> tuple[Any, list[Any], Any]:
    """A program without calls, which does nothing in vain; what it closes over; the structure of its results."""
    program, operands, tree = traced(function, (params, batch), {})
    walk = _Flat("auto", None)
    flat = jax.make_jaxpr(lambda *given: walk.run(program.jaxpr, program.consts, given))(*operands)
    return flat.jaxpr, list(flat.consts), tree


def _live(jaxpr: Any) -> list[bool]:
    """Which equations the results need."""
    wanted = {x for x in jaxpr.outvars if not isinstance(x, _literal)}
    needed = []
    for equation in reversed(jaxpr.eqns):
        needed.append(any(x in wanted for x in equation.outvars))
        if needed[-1]:
            wanted |= {x for x in equation.invars if not isinstance(x, _literal)}
    return needed[::-1]


class _Plan:
    """What of a program is made once (0), in each micro-batch (1), and of their sums (2); and which are those sums."""

    def __init__(self, small: Any, whole: Any, count: int, step: Callable[[str], int]) -> None:
        self.phases: list[int] = []
        self.sums: list[int] = []
        self.count, self.step = count, step
        self.kind = dict.fromkeys(small.constvars, 0)
        self.axis: dict[Any, int | None] = {}
        names = [[str(e.primitive.name) for e in jaxpr.eqns] for jaxpr in (small, whole)]
        if names[0] != names[1]:
            fail(UNSUPPORTED, f"{_OP}: the loss is another program for another number of rows")
        for x, y in zip((*small.constvars, *small.invars), (*whole.constvars, *whole.invars), strict=True):
            self.shape(x, y, "an operand")
            self.kind[x] = 0 if self.axis[x] is None else 1
        for place, (equation, other) in enumerate(zip(small.eqns, whole.eqns, strict=True)):
            self.phases.append(self.phase(place, equation, other) if self.needed(small)[place] else -1)
        for x, y in zip(small.outvars, whole.outvars, strict=True):
            if not isinstance(x, _literal) and (self.kind[x] == 1 or x.aval.shape != y.aval.shape):
                fail(UNSUPPORTED, f"{_OP}: the loss is no sum over rows; want one number, jnp.sum of those of the rows")

    def needed(self, jaxpr: Any) -> list[bool]:
        if not hasattr(self, "_needed"):
            self._needed = _live(jaxpr)
        return self._needed

    def shape(self, x: Any, y: Any, name: str) -> None:
        """The dimension of an array that is of rows."""
        differing = [a for a, (n, m) in enumerate(zip(x.aval.shape, y.aval.shape, strict=True)) if n != m]
        mixed = len(differing) > 1 or any(y.aval.shape[a] != self.count * x.aval.shape[a] for a in differing)
        if mixed:
            fail(UNSUPPORTED, f"{_OP}: {name} mixes rows of the batch: {x.aval.shape} of {y.aval.shape}")
        self.axis[x] = differing[0] if differing else None

    def phase(self, place: int, equation: Any, other: Any) -> int:
        name, kinds = str(equation.primitive.name), set()
        for x, y in zip(equation.invars, other.invars, strict=True):
            if not isinstance(x, _literal):
                kinds.add(self.kind[x])
            elif np.asarray(x.val).tobytes() != np.asarray(y.val).tobytes():
                want = "want a sum over rows; divide by the number of the whole batch, not by that of the argument"
                fail(UNSUPPORTED, f"{_OP}: {name} has another number for another number of rows; {want}")
        for x, y in zip(equation.outvars, other.outvars, strict=True):
            self.shape(x, y, name)
        varying = [self.axis[x] is not None for x in equation.outvars]
        given = [x for x in equation.invars if not isinstance(x, _literal)]
        rows = [self.axis[x] for x in given if self.axis[x] is not None]
        if 2 in kinds and (1 in kinds or any(varying)):
            fail(UNSUPPORTED, f"{_OP}: {name} gives rows what is a sum over all rows, so they depend on each other")
        kind = max(kinds, default=0)
        if any(varying) or rows:
            kind = self.of_rows(place, name, equation, varying, rows)
        self.kind.update(dict.fromkeys(equation.outvars, kind))
        return 1 if place in self.sums[-1:] else kind

    def of_rows(self, place: int, name: str, equation: Any, varying: list[bool], rows: list[Any]) -> int:
        params = equation.params
        along = params.get(_ALONG.get(name, ""), ())
        along = along if isinstance(along, tuple) else (along,)
        own = [self.axis[x] for x in equation.outvars]
        numbered = not rows and name not in ("iota", "broadcast_in_dim")
        mixing = name in _ALONG and bool(set(own) & set(along))
        if name == "gather" and not isinstance(equation.invars[0], _literal):
            mixing = self.axis[equation.invars[0]] in params["dimension_numbers"].start_index_map
        if name == "scan":
            mixing = any(self.axis[x] == 0 for x in equation.invars[sum(loop_counts(params)) :]
                         if not isinstance(x, _literal))  # fmt: skip
        if mixing or numbered:
            fail(
                UNSUPPORTED, f"{_OP}: {name} mixes or numbers the rows of the batch, want a loss of each row by itself"
            )
        if all(varying):
            return 1
        self.summed(name, equation, varying)
        self.sums.append(place)
        return 2

    def summed(self, name: str, equation: Any, varying: list[bool]) -> None:
        """Refuses what is no sum over rows that can be continued."""
        params, out = equation.params, equation.outvars[0]
        first = [None if isinstance(x, _literal) else self.axis[x] for x in equation.invars]
        typed = len(varying) == 1 and name_of(out.aval.dtype) in UNSCALED
        if name == "reduce_sum" and typed:
            summed, of = sorted(params["axes"]), equation.invars[0]
            fits = first[0] == summed[0]
        elif name == "dot_general" and typed:
            (left, right), _ = params["dimension_numbers"]
            summed, of = list(left), equation.invars[0]
            fits = bool(left) and first[:2] == [left[0], right[0]]
        elif name == "scatter-add" and typed:
            if isinstance(equation.invars[0], _literal) or self.kind[equation.invars[0]] == 0:
                return  # added one after the other
            fits, summed, of = False, [], equation.invars[0]
        else:
            fits, summed, of = False, [], equation.invars[0]
        if not fits:
            fail(UNSUPPORTED, f"{_OP}: {name} joins rows in a way that no micro-batches continue")
        extent = int(np.prod([of.aval.shape[a] for a in summed]))
        step = self.step(name_of(of.aval.dtype))
        if extent % step:
            fail(
                INVALID_VALUE,
                f"{_OP}: a micro-batch sums {extent} rows in {name}, want a multiple of {step}: the bits of one batch",
            )


def _scattered(equation: Any) -> bool:
    """Whether it is a scatter-add that stays XLA's, which adds in the type of its operand."""
    name, given = equation.primitive.name, [x.aval for x in equation.invars]
    return name == "scatter-add" and not adds_rows(equation.params, *given)


def _types(operands: list[Any]) -> str:
    return " and ".join(name_of(jnp.asarray(x).dtype) for x in operands)


def accumulate_gradients(
    loss: Callable[..., Any], micro_batches: int, *, arithmetic: Arithmetic = "auto", k_chunk: int | None = None
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad(convert(loss))`` over micro-batches, in the memory of one, with the bits of one batch.

    A sum over rows (the gradient of a weight, a bias or a norm, and the loss itself) continues that of the micro-batch
    before as one chain (``accumulate`` of :func:`gemm`), in a scan; what is made of sums alone is made once. Gradients
    go to any optimizer, such as optax's.

    Args:
        loss: ``loss(params, batch)``, the sum over rows of a loss of each row by itself: what mixes or numbers rows, or
            divides by their number as a mean does, is refused. Trees of arrays; the batch's are ``[B, ...]``.
        micro_batches: how many; they divide B, and have 2 rows or more. For tensor cores the rows of each, times those
            dimensions of a sum that are no rows, are a multiple of 16, or of ``k_chunk``.
        arithmetic, k_chunk: as in :func:`gemm`; they decide bits.

    Returns:
        A function of ``params`` and ``batch`` that gives ``(value, gradients)``; wrap it in ``jax.jit``.
    """
    if not callable(loss):
        fail(INVALID_VALUE, f"{_OP}: loss is {type_name(loss)}, want a function")
    count = static(_OP, "micro_batches", micro_batches, operator.index, "an integer")
    if count < 1:
        fail(INVALID_VALUE, f"{_OP}: micro_batches is {count}, want 1 or more")
    options_of(_OP, arithmetic, k_chunk)

    def step(dtype: str) -> int:
        """Rows of which a sum can be cut."""
        whole = dtype == "float32" or arithmetic == "ieee" or (arithmetic == "auto" and jax.default_backend() == "cpu")
        return k_chunk or (1 if whole else 16)

    def run(params: Any, batch: Any) -> tuple[Any, Any]:
        leaves = jax.tree.leaves(batch)
        rows = {x.shape[0] if getattr(x, "ndim", 0) else -1 for x in leaves}
        if len(rows) != 1 or -1 in rows:
            fail(INVALID_SHAPE, f"{_OP}: batch wants arrays of the same first dimension")
        total = int(rows.pop())
        if total % count or total == 0:
            fail(INVALID_SHAPE, f"{_OP}: batch has {total} rows, want a multiple of {count} micro-batches")
        if count > 1 and total == count:
            fail(INVALID_SHAPE, f"{_OP}: batch has {total} rows, want 2 or more for each of {count} micro-batches")
        return _accumulated(jax.value_and_grad(loss), params, batch, count, total, Walk(arithmetic, k_chunk), step)

    return run


def _accumulated(
    function: Callable[..., Any],
    params: Any,
    batch: Any,
    count: int,
    total: int,
    walk: Walk,
    step: Callable[[str], int],
) -> tuple[Any, Any]:
    params = jax.tree.map(jnp.asarray, params)
    cut = jax.tree.map(lambda x: jnp.asarray(x).reshape(count, total // count, *x.shape[1:]), batch)
    small, consts, tree = _flat(function, params, jax.tree.map(lambda x: x[0], cut))
    scale = max(count, 2)  # the plan is that of two sizes
    more = jax.tree.map(lambda x: jax.ShapeDtypeStruct((scale * x.shape[1], *x.shape[2:]), x.dtype), cut)
    whole: list[Any] = []
    jax.eval_shape(lambda batch: whole.append(_flat(function, params, batch)[0]), more)
    plan = _Plan(small, whole[0], scale, step)
    fixed, parts = jax.tree.leaves(params), jax.tree.leaves(cut)
    found: dict[Any, Any] = dict(zip((*small.constvars, *small.invars), (*consts, *fixed), strict=False))
    own = small.invars[len(fixed) :]

    def read(known: dict[Any, Any], x: Any) -> Any:
        return x.val if isinstance(x, _literal) else known[x]

    def perform(known: dict[Any, Any], phase: int, sums: dict[Any, Array] | None = None) -> None:
        for place, equation in enumerate(small.eqns):
            if plan.phases[place] != phase:
                continue
            operands = [read(known, x) for x in equation.invars]
            out = equation.outvars[0]
            if sums is None or out not in sums:
                known.update(zip(equation.outvars, walk.equation(equation, operands), strict=True))
            elif _scattered(equation):
                (sums[out],) = walk.equation(equation, [sums[out], *operands[1:]])
            else:
                name = str(equation.primitive.name)
                made = walk.number(name, equation.params, operands, sums[out])
                if made is None:
                    fail(UNSUPPORTED, f"{_OP}: {name} of {_types(operands)} is a sum that pydet does not make")
                sums[out] = made

    perform(found, 0)
    places = [small.eqns[place] for place in plan.sums]

    def begun(equation: Any) -> Array:
        if equation.primitive.name != "scatter-add":
            return jnp.zeros(equation.outvars[0].aval.shape, jnp.float32)
        table = jnp.asarray(read(found, equation.invars[0]))
        return table if _scattered(equation) else table.astype(jnp.float32)

    start = [begun(equation) for equation in places]

    def one(carry: list[Array], part: list[Array]) -> tuple[list[Array], None]:
        sums = dict(zip((e.outvars[0] for e in places), carry, strict=True))
        perform({**found, **dict(zip(own, part, strict=True))}, 1, sums)
        return list(sums.values()), None

    ends, _ = jax.lax.scan(one, start, parts)
    found.update((e.outvars[0], x.astype(e.outvars[0].aval.dtype)) for e, x in zip(places, ends, strict=True))
    perform(found, 2)
    value, gradients = jax.tree.unflatten(tree, [read(found, x) for x in small.outvars])
    return value, gradients
