"""A whole function with pydet's sums and activations in the place of XLA's: convert, coverage and check."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from pydet import _native
from pydet._native import INVALID_VALUE, fail
from pydet.jax.activation import activation
from pydet.jax.calls import INVALID_SHAPE, Array, is_array, name_of, options_of, unwrapped
from pydet.jax.embedding import adds_rows, scatter_add
from pydet.jax.general import dot_general
from pydet.jax.groups import ragged_dot
from pydet.ops import Arithmetic
from pydet.protocols import UNSCALED, type_name

_core: Any = jax.extend.core
_ACTIVATIONS = {"tanh": "tanh", "logistic": "sigmoid", "exp": "exp"}
_OTHERS = tuple(f"{Path(file).parent}/" for file in (jax.__file__, _native.__file__))  # frames that say nothing
_ROOT_2 = np.float32(2**0.5)
# What rounds each element exactly, moves it, or chooses among them.
_EXACT = {
    "abs", "add", "add_any", "all_gather", "all_to_all", "and", "argmax", "argmin", "axis_index",
    "bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type", "copy",
    "copy_p", "cummax", "cummin", "device_put", "div", "dynamic_slice", "dynamic_update_slice", "empty", "eq",
    "expand_dims", "floor", "gather", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "lt", "max", "min", "mul",
    "name", "ne", "neg", "not", "nextafter", "optimization_barrier", "or", "pad", "pbroadcast", "pcast", "ppermute",
    "pvary", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_precision", "rem", "reshape", "rev",
    "round", "scatter", "select_n", "sharding_constraint", "sign", "slice", "sort", "split", "sqrt", "square",
    "squeeze", "stop_gradient", "sub", "top_k", "transpose",
}  # fmt: skip


class Coverage(NamedTuple):
    """How many operations of a program are pydet's, and how many are left to XLA that may round by the batch."""

    replaced: dict[str, int]
    left: dict[str, int]


def _floats(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def loop_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried. From JAX 0.11 on they are in trees."""
    if "ft_in" in params:
        fixed, carried, _ = (len(part) for part in params["ft_in"].unpack())
        return fixed, carried
    return params["num_consts"], params["num_carry"]


def _makes_zeros(equation: Any) -> bool:
    """Whether an equation makes an array of +0."""
    if str(equation.primitive.name) != "broadcast_in_dim" or not isinstance(equation.invars[0], _core.Literal):
        return False
    x = np.asarray(equation.invars[0].val)
    return _floats(x) and not x.astype(np.float64).tobytes().strip(b"\0")


def as_it_is(equation: Any, operands: list[Any]) -> list[Any]:
    """What an equation gives by itself."""
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # as older releases have it
    found = equation.primitive.bind(*functions, *operands, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _pydets(equation: Any) -> bool:
    """Whether an equation is a call of pydet's own (``pydet/jax/foreign.py``)."""
    name, params = str(equation.primitive.name), equation.params
    if name == "ffi_call":
        return str(params.get("target_name", "")).startswith("pydet_")
    wrapped = name in ("custom_vmap_call", "custom_partitioning")
    return wrapped and any(_pydets(inner) for inner in params["call"].jaxpr.eqns)


class Walk:
    """A program's equations one by one, some replaced, with the bodies of its loops, branches and calls."""

    def __init__(self, arithmetic: Arithmetic, k_chunk: int | None) -> None:
        self.how: Any = {"arithmetic": arithmetic, "k_chunk": k_chunk}
        self.replaced: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[str] = collections.Counter()
        self.zeros: list[Any] = []  # the arrays of +0 that the program makes

    def run(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        found: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

        def read(x: Any) -> Any:
            return x.val if isinstance(x, _core.Literal) else found[x]

        for equation in jaxpr.eqns:
            with getattr(equation.ctx, "manager", contextlib.nullcontext()):
                results = self.equation(equation, [read(x) for x in equation.invars])
            found.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def closed(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        return self.run(jaxpr.jaxpr, jaxpr.consts, operands)

    def equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        name, params = str(equation.primitive.name), equation.params
        body = getattr(self, f"_{name}", None)
        if body is not None:
            results = body(params, *operands)
            if results is not None:
                return list(results)
        elif "call_jaxpr" in params and hasattr(params["call_jaxpr"], "consts"):
            return self.closed(params["call_jaxpr"], operands)
        pydets = _pydets(equation)
        if name == "custom_vmap_call" and not pydets:
            return self.closed(params["call"], operands)
        result = self.number(name, params, operands)
        if result is not None:
            if name not in _EXACT:
                self.replaced[name] += 1
            return [result]
        if name not in _EXACT and not pydets and any(_floats(x.aval) for x in equation.outvars if hasattr(x, "aval")):
            self.left[name] += 1
        results = as_it_is(equation, operands)
        if _makes_zeros(equation):
            self.zeros += results
        return results

    def number(
        self, name: str, params: dict[str, Any], operands: list[Any], accumulate: Array | None = None
    ) -> Array | None:
        """What pydet makes of an operation that gives one array; None where it does not. A sum may continue another."""
        if not operands or any(name_of(np.dtype(jnp.result_type(x))) not in UNSCALED for x in operands[:1]):
            return None
        x, more = jnp.asarray(operands[0]), operands[1:]
        if name in _ACTIVATIONS and params.get("accuracy") is None:
            return activation(x, _ACTIVATIONS[name])  # type: ignore[arg-type]
        if name == "div":
            # XLA makes a product with the reciprocal of it where the divisor was broadcast, which not all batches do.
            return x / jax.lax.optimization_barrier(
                jnp.broadcast_to(more[0], jnp.broadcast_shapes(x.shape, jnp.shape(more[0])))
            )
        if name == "erfc":  # erfc(x) = 2 P(a normal number is below t), and gelu(t) = t P
            t = x.astype(jnp.float32) * -_ROOT_2
            few = jnp.abs(t) < 2.0**-60
            below = jnp.where(few, 0.5, activation(t, "gelu") / jnp.where(few, 1, t))
            return jnp.where(t == -jnp.inf, 0, 2 * below).astype(x.dtype)
        if name == "reduce_sum" and params.get("out_sharding") is None:
            axes = tuple(params["axes"])
            ones = jnp.ones([x.shape[i] for i in axes], x.dtype)
            return dot_general(x, ones, ((axes, tuple(range(len(axes)))), ((), ())), accumulate=accumulate, **self.how)
        if name == "dot_general" and params.get("out_sharding") is None:
            wide = params["preferred_element_type"]
            if jnp.result_type(more[0]) == x.dtype and (wide is None or name_of(np.dtype(wide)) in UNSCALED):
                how = {**self.how, "preferred_element_type": wide if accumulate is None else None}
                numbers, precision = params["dimension_numbers"], params["precision"]
                return dot_general(x, jnp.asarray(more[0]), numbers, precision, accumulate=accumulate, **how)
        if name == "scatter-add":
            ids, rows = (jnp.asarray(y) for y in more)
            if not adds_rows(params, x, ids, rows):
                return None
            if accumulate is not None:
                return scatter_add(params, x, ids, rows, accumulate, "float32")
            if any(operands[0] is zeros for zeros in self.zeros):
                return scatter_add(params, x, ids, rows, None, name_of(x.dtype))
            return scatter_add(params, x, ids, rows, x.astype(jnp.float32), "float32").astype(x.dtype)
        return None

    # ---- Bodies ------------------------------------------------------------------------------------------------------

    def _ragged_dot_general(self, params: dict[str, Any], x: Any, w: Any, sizes: Any) -> list[Any] | None:
        numbers, wide = params["ragged_dot_dimension_numbers"], params["preferred_element_type"]
        plain = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        typed = name_of(x.dtype) in UNSCALED and x.dtype == w.dtype and (wide is None or name_of(wide) in UNSCALED)
        if str(numbers) != str(plain) or params["group_offset"] is not None or not typed or sizes.dtype != jnp.int32:
            return None
        self.replaced["ragged_dot_general"] += 1
        return [ragged_dot(x, w, sizes, preferred_element_type=wide, **self.how)]

    def _jit(self, params: dict[str, Any], *operands: Any) -> list[Any]:
        placed = [
            x if type(where).__name__ == "UnspecifiedValue" else jax.lax.with_sharding_constraint(x, where)
            for x, where in zip(operands, params["in_shardings"], strict=True)
        ]
        return self.closed(params["jaxpr"], placed)

    _pjit = _jit

    def _custom_jvp_call(self, params: dict[str, Any], *operands: Any) -> list[Any]:
        return self.closed(params["call_jaxpr"], operands)

    _custom_vjp_call = _closed_call = _core_call = _custom_jvp_call

    def _custom_vjp_call_jaxpr(self, params: dict[str, Any], *operands: Any) -> list[Any]:
        return self.closed(params["fun_jaxpr"], operands)

    def _remat2(self, params: dict[str, Any], *operands: Any) -> list[Any]:
        body = jax.make_jaxpr(lambda *given: self.run(params["jaxpr"], (), given))(*operands)
        consts, jaxpr = body.consts, body.jaxpr
        if consts:  # as operands, which the primitive wants all to be
            jaxpr = jax.make_jaxpr(lambda consts, given: jax.core.eval_jaxpr(body.jaxpr, consts, *given))(
                consts, operands
            ).jaxpr
        bound: list[Any] = jax.extend.core.primitives.remat_p.bind(*consts, *operands, **{**params, "jaxpr": jaxpr})
        return bound

    _checkpoint = _remat = _remat2

    def _scan(self, params: dict[str, Any], *operands: Any) -> list[Any]:
        fixed, count = loop_counts(params)

        def step(carry: Any, each: Any) -> tuple[Any, Any]:
            results = self.closed(params["jaxpr"], (*operands[:fixed], *carry, *each))
            return results[:count], results[count:]

        more = {name: params[name] for name in ("length", "reverse", "unroll")}
        given, each = list(operands[fixed : fixed + count]), list(operands[fixed + count :])
        carry, each = jax.lax.scan(step, given, each, **more)
        return [*carry, *each]

    def _while(self, params: dict[str, Any], *operands: Any) -> list[Any]:
        asked = params["cond_nconsts"]
        fixed = asked + params["body_nconsts"]

        def more(carry: Any) -> Any:
            return self.closed(params["cond_jaxpr"], (*operands[:asked], *carry))[0]

        def step(carry: Any) -> list[Any]:
            return self.closed(params["body_jaxpr"], (*operands[asked:fixed], *carry))

        return list(jax.lax.while_loop(more, step, list(operands[fixed:])))

    def _cond(self, params: dict[str, Any], index: Any, *operands: Any) -> list[Any]:
        branches = [lambda *given, branch=branch: self.closed(branch, given) for branch in params["branches"]]
        return list(jax.lax.switch(index, branches, *operands))

    def _shard_map(self, params: dict[str, Any], *operands: Any) -> list[Any]:
        def body(*given: Any) -> tuple[Any, ...]:
            return tuple(self.run(params["jaxpr"], (), given))

        more = {name: params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
        axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        cut = jax.shard_map(body, axis_names=set(axes), **more)
        return list(cut(*operands))


# ---- Functions -------------------------------------------------------------------------------------------------------


def _array_like(x: Any) -> bool:
    return is_array(x) or (hasattr(type(x), "__jax_array__") and hasattr(x, "dtype"))


def traced(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Any], Any]:
    """The program of a call, its operands, and the structure of its result. What is no array is static."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if _array_like(x)]

    def flat(*arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        positional, named = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
        return fn(*positional, **named)

    operands = [unwrapped(leaves[i]) for i in places]
    program, shape = jax.make_jaxpr(flat, return_shape=True)(*operands)
    return program, operands, jax.tree.structure(shape)


def converted(how: tuple[Any, Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    program, operands, tree = traced(fn, args, kwargs)
    return jax.tree.unflatten(tree, _derived(how, program.jaxpr)(*program.consts, *operands))


def _derived(how: tuple[Any, Any], jaxpr: Any) -> Any:
    """A function of a program's constants and operands whose gradient is the program's own gradient, replaced too."""
    count = len(jaxpr.constvars)
    results = [_floats(x.aval) for x in jaxpr.outvars]

    def original(operands: Sequence[Any]) -> list[Any]:
        return list(jax.core.eval_jaxpr(jaxpr, operands[:count], *operands[count:]))

    @jax.custom_vjp
    def call(*operands: Any) -> list[Any]:
        return Walk(*how).run(jaxpr, operands[:count], operands[count:])

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        differs = [_floats(jnp.asarray(x)) for x in operands]

        def split(*operands: Any) -> Any:
            def of_floats(*floats: Any) -> tuple[list[Any], list[Any]]:
                given = iter(floats)
                found = original([next(given) if d else x for d, x in zip(differs, operands, strict=True)])
                return [y for y, f in zip(found, results, strict=True) if f], [
                    y for y, f in zip(found, results, strict=True) if not f
                ]

            return jax.vjp(of_floats, *(x for x, d in zip(operands, differs, strict=True) if d), has_aux=True)

        found, pull, rest = converted(how, split, *operands)
        made, others = iter(found), iter(rest)
        like = [jnp.zeros((0,)) if d else None for d in differs]
        return [next(made) if f else next(others) for f in results], (pull, like)

    def backward(saved: Any, gradients: Any) -> tuple[Any, ...]:
        pull, like = saved
        given = [dy for dy, f in zip(gradients, results, strict=True) if f]
        made = iter(converted(how, lambda pull, given: pull(given), pull, given))
        return tuple(None if x is None else next(made) for x in like)

    call.defvjp(forward, backward)
    return call


def convert(
    fn: Callable[..., Any], *, arithmetic: Arithmetic = "auto", k_chunk: int | None = None
) -> Callable[..., Any]:
    """The same function with pydet's operations in the place of XLA's, for a whole model or training step.

    Its program is traced, and run with every ``dot_general``, ``ragged_dot`` and ``reduce_sum`` (means, norms, softmax,
    gradients of biases) of float32, bfloat16 and float16 as chains of :func:`gemm`, ``tanh``, ``logistic``, ``exp`` and
    ``erfc`` (GELU) by :func:`activation`, and a ``scatter-add`` of whole rows by their numbers (the gradient of
    ``table[tokens]``) by :func:`embedding_backward`: in jit, scan, while, cond, remat and shard_map too. A gradient of
    the converted function is the function's own gradient, converted; ``convert(jax.grad(loss))`` is the same. What is
    left to XLA and may round otherwise in another batch, such as ``log`` or convolutions, :func:`coverage` names.

    Wrap the result in ``jax.jit``: without, each call is traced anew. What is not an array among the arguments is
    static. There is no forward-mode derivative of the result; convert ``jax.jvp`` of the function.

    Args:
        fn: a function of trees of arrays, such as ``model.apply`` of Flax, or a loss.
        arithmetic, k_chunk: as in :func:`gemm`; they decide bits.

    Example:
        >>> step = jax.jit(jax.value_and_grad(pydet.jax.convert(loss)))  # doctest: +SKIP
    """
    if not callable(fn):
        fail(INVALID_VALUE, f"convert: fn is {type_name(fn)}, want a function")
    options_of("convert", arithmetic, k_chunk)
    name = getattr(fn, "__name__", type(fn).__name__)

    def run(*args: Any, **kwargs: Any) -> Any:
        return converted((arithmetic, k_chunk), fn, *args, **kwargs)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = fn.__doc__
    return run


def coverage(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Coverage:
    """What :func:`convert` replaces in a call of ``fn``, and what it leaves to XLA that may round by the batch.

    A body of a loop counts once. Nothing is run; arguments may be ``jax.ShapeDtypeStruct`` in trees.

    Returns:
        ``(replaced, left)``: how many operations of each name.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    shaped = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    walk = Walk("auto", None)

    def run(structs: list[Any]) -> list[Any]:
        given = iter(structs)
        positional, named = jax.tree.unflatten(
            tree, [next(given) if s else x for s, x in zip(shaped, leaves, strict=True)]
        )
        program, operands, _ = traced(fn, positional, named)
        return walk.run(program.jaxpr, program.consts, operands)

    jax.eval_shape(run, [x for x, s in zip(leaves, shaped, strict=True) if s])
    return Coverage(dict(walk.replaced), dict(walk.left))


# ---- Alone against the batch -----------------------------------------------------------------------------------------


class Varying(NamedTuple):
    """An output that a row has otherwise alone than in the batch."""

    output: str
    differing: int  # elements
    of: int


class Check(NamedTuple):
    """What :func:`check` found: no outputs where none varies."""

    outputs: list[Varying]
    first: str | None  # the primitive whose results vary first, and where it was called

    @property
    def same(self) -> bool:
        return not self.outputs

    def __str__(self) -> str:
        if self.same:
            return "check: every row has the same bits alone and in the batch"
        lines = [f"check: {x.output} varies in {x.differing} of {x.of} elements" for x in self.outputs]
        first = self.first or "no operation by itself: XLA rounds otherwise where it joins them"
        return "\n".join([*lines, f"check: the first that varies is {first}"])


def check(fn: Callable[..., Any], params: Any, batch: Any, *, rows: Sequence[int] | None = None) -> Check:
    """Whether a row's outputs have the same bits alone as in the batch.

    Args:
        fn: ``fn(params, batch)``, jitted here; what has B rows among its outputs is compared.
        params: a tree of arrays.
        batch: a tree of arrays ``[B, ...]``.
        rows: which are taken alone; the first, the middle and the last by default.

    Returns:
        ``outputs``: which vary, and in how many elements; ``first``: the operation that varies first in the program,
        the results of all being kept, or None. ``str()`` of it is a report.
    """
    leaves = jax.tree.leaves(batch)
    extents = {x.shape[0] for x in leaves if _array_like(x) and x.ndim}
    if len(extents) != 1 or not all(_array_like(x) and x.ndim for x in leaves):
        fail(INVALID_SHAPE, "check: batch wants arrays of the same first dimension, 2 or more")
    (count,) = extents
    if count < 2:
        fail(INVALID_SHAPE, f"check: batch has {count} rows, want 2 or more")
    chosen = sorted({0, count // 2, count - 1}) if rows is None else list(rows)
    if not chosen or not all(isinstance(i, int) and 0 <= i < count for i in chosen):
        fail(INVALID_VALUE, f"check: rows is {rows!r}, want numbers of the {count} rows")

    def alone(i: int) -> Any:
        return jax.tree.map(lambda x: x[i : i + 1], batch)

    run = jax.jit(fn)
    whole = jax.tree_util.tree_flatten_with_path(run(params, batch))[0]
    found = [(jax.tree_util.keystr(path) or "output", 0, 0) for path, _ in whole]
    compared = 0
    for i in chosen:
        for place, ((_, y), own) in enumerate(zip(whole, jax.tree.leaves(run(params, alone(i))), strict=True)):
            pair = _row_of(y, own, i, count)
            if pair is None:
                continue
            compared += 1
            name, differing, of = found[place]
            found[place] = name, differing + _differing(*pair), of + pair[0].size
    if not compared:
        fail(INVALID_SHAPE, f"check: no output has {count} rows, want one that has a row of the batch")
    outputs = [Varying(*x) for x in found if x[1]]
    return Check(outputs, _first(fn, params, batch, alone, chosen, count) if outputs else None)


def _row_of(whole: Any, own: Any, i: int, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """The part of a batch's array that is row i, where the arrays differ in the one dimension of the batch."""
    if len(whole.shape) != len(own.shape):
        return None
    differing = [a for a, (n, m) in enumerate(zip(whole.shape, own.shape, strict=True)) if n != m]
    if len(differing) != 1 or whole.shape[differing[0]] != count * own.shape[differing[0]]:
        return None
    (axis,) = differing
    each = own.shape[axis]
    return np.asarray(jnp.take(whole, np.arange(i * each, (i + 1) * each), axis)), np.asarray(own)


def _differing(whole: np.ndarray[Any, Any], own: np.ndarray[Any, Any]) -> int:
    word = f"u{whole.dtype.itemsize}"
    return int((np.ascontiguousarray(whole).view(word) != np.ascontiguousarray(own).view(word)).sum())


class _Kept(Walk):
    """Keeps what every equation gives, outside of loops."""

    def __init__(self) -> None:
        super().__init__("auto", None)
        self.kept: list[tuple[str, list[Any]]] = []

    def equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        name = str(equation.primitive.name)
        if name in ("jit", "pjit"):
            return self.closed(equation.params["jaxpr"], operands)
        if name.startswith("custom_") and hasattr(equation.params.get("call_jaxpr"), "consts"):
            return self.closed(equation.params["call_jaxpr"], operands)
        results = as_it_is(equation, operands)
        self.kept.append((f"{name}{_line(equation)}", results))
        return results


def _line(equation: Any) -> str:
    """Where an equation was made, as far as JAX says."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_OTHERS):
            return f", {frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""


def _first(
    fn: Callable[..., Any], params: Any, batch: Any, alone: Callable[[int], Any], rows: Sequence[int], count: int
) -> str | None:
    names: list[str] = []

    def everything(params: Any, batch: Any) -> list[list[Any]]:
        program, operands, _ = traced(fn, (params, batch), {})
        walk = _Kept()
        walk.run(program.jaxpr, program.consts, operands)
        names[:] = [name for name, _ in walk.kept]
        return [[x for x in results if _array_like(x)] for _, results in walk.kept]

    run = jax.jit(everything)
    whole = run(params, batch)
    for i in rows:
        for name, results, own in zip(names, whole, run(params, alone(i)), strict=False):
            for y, z in zip(results, own, strict=False):
                pair = _row_of(y, z, i, count)
                if pair is not None and _differing(*pair):
                    return name
    return None
