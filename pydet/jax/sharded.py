"""Calls whose operands are shared out among devices by their shardings: which dimensions each device has a part of by
itself, and how a sum that runs across devices keeps its order.

A dimension has a name where several operands or results have it. The *free* ones may be cut: nothing that a device
makes of its part depends on another's. Along the *summed* ones a sum runs from device to device, in the order of their
parts. What is cut along any other is gathered before, by XLA. All of this decides no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pydet import _native
from pydet._native import UNSUPPORTED, constants, fail, ffi
from pydet.jax.foreign import Array, Foreign, batchable, plain, type_of
from pydet.ops import DWEIGHT_ROWS

_lax: Any = jax.lax
_sharding: Any = jax.sharding
_STEP = 16  # of any arithmetic but that of fp32, which has 1
_MOST_PARTS: int = constants.PYDET_FOLD_PARTS
_OWN_PARTS = 8  # sums that a device keeps at a time
_SMALL = 1 << 21  # bytes of all sums that every device gathers whole

Names = tuple[str, ...]
Axes = tuple[str, ...]


class Summed(NamedTuple):
    """A dimension along which a sum runs across devices."""

    axes: Axes
    size: int  # of them together


class Rule(NamedTuple):
    """The names of the dimensions of a call."""

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    free: frozenset[str]
    summed: frozenset[str] = frozenset()
    heads: tuple[tuple[str, str], ...] = ()  # (a name of many, that of the groups which it is cut with)
    local: Callable[..., Any] | None = (
        None  # (call, rule, chosen, operands) where it is more than the call on the parts
    )
    fits: Callable[[int, Any], bool] | None = None  # whether a device may have so much of a summed one, of a type


class _Namer:
    """Names that no other dimension has."""

    def __init__(self) -> None:
        self.count = 0

    def own(self, rank: int) -> Names:
        self.count += rank
        return tuple(f"z{i}" for i in range(self.count - rank, self.count))

    def like(self, shape: Sequence[int], names: Sequence[str], extents: Sequence[int]) -> Names:
        """Names of the last dimensions, where the extents are the same; others broadcast, and have their own."""
        lead = len(names) - len(shape)
        return tuple(
            name if extent == n and n != 1 else self.own(1)[0]
            for n, name, extent in zip(shape, names[lead:], extents[lead:], strict=True)
        )


# ---- What may be cut -------------------------------------------------------------------------------------------------


def _of_gemm(call: Foreign, shapes: list[Any]) -> Rule:
    namer, out = _Namer(), call.results[0].shape
    a, b = shapes[0], shapes[1]
    rank = len(out)
    batch = tuple(f"b{i}" for i in range(rank - 2))
    lead_a, lead_b = (namer.like(x[:-2], batch, out[:-2]) for x in (a, b))
    last_a, last_b = (
        ("k", "m") if call.asks("transpose_a") else ("m", "k"),
        ("n", "k") if call.asks("transpose_b") else ("k", "n"),
    )
    names = (*batch, "m", "n")
    more = [namer.like(x, names, out) for x in shapes[2:]]
    k = b[-1 if call.asks("transpose_b") else -2]
    operands = ((*lead_a, *last_a), (*lead_b, *last_b), *more)
    free = frozenset((*batch, "m", "n"))
    results = (names, *(namer.own(len(y.shape)) for y in call.results[1:]))
    if k == 0 or call.asks("has_initial"):
        return Rule(operands, results, free)

    def fits(own: int, dtype: Any) -> bool:
        exact = dtype == jnp.float32 or call.asks("arithmetic") == _IEEE
        chunk = call.asks("k_chunk") if call.asks("k_chunk") < k else 0
        return math.prod(out) > 0 and own % (chunk or (1 if exact else _STEP)) == 0

    return Rule(operands, results, free, frozenset("k"), (), _summed_product, fits)


_IEEE: int = constants.PYDET_IEEE


def _rows(count: int) -> Names:
    return tuple(f"d{i}" for i in range(count))


def _of_elements(call: Foreign, shapes: list[Any]) -> Rule:
    names = _rows(len(shapes[0]))
    return Rule((names,) * len(shapes), (names,) * len(call.results), frozenset(names))


def _of_rows(call: Foreign, shapes: list[Any], last: int = 1) -> Rule:
    """Rows that depend on nothing else: what has a row's number of dimensions less one has one number a row."""
    namer, count = _Namer(), max(len(x) for x in shapes) - 1
    lead = _rows(count)
    left, right = ([(*lead, *namer.own(len(x) - count)) for x in named] for named in (shapes, call.shapes()))
    return Rule(tuple(left), tuple(right), frozenset(lead))


def _of_norm(call: Foreign, shapes: list[Any], values: int, backward: bool) -> Rule:
    """Rows, `values` numbers of each, and weights of the last dimension (and heads), whose leading ones are rows'."""
    namer, x = _Namer(), shapes[0]
    rows = (*_rows(len(x) - 1), "n")
    of_one = rows[:-1]
    tail = 2 if call.asks("heads") else 1

    def weight(shape: Sequence[int]) -> Names:
        lead = len(shape) - tail
        return (*rows[:lead], *rows[len(rows) - tail :])

    kinds: list[Names]
    if not backward:
        has = [call.asks("has_residual"), call.asks("has_weight"), call.asks("has_bias")]
        kinds = [rows] + [rows] * has[0]
        kinds += [weight(shape) for shape in shapes[len(kinds) :]]
        made = (rows, *[of_one] * values, *[rows] * has[0])
        return Rule(tuple(kinds), made, frozenset(of_one), local=_with_heads)
    kinds = [rows, rows, *[of_one] * values]
    sums = call.asks("has_weight") + call.asks("has_bias")
    weights = len(kinds), len(kinds) + call.asks("has_weight")
    kinds += [weight(shapes[weights[0]])] if call.asks("has_weight") else []
    kinds += [rows] if call.asks("has_dresidual") else []
    kinds += [weight(shape) for shape in shapes[len(kinds) :]]
    results = [rows, *(weight(y.shape) for y in call.results[1 : 1 + sums])]
    results += [namer.own(len(y.shape)) for y in call.results[len(results) :]]
    if not sums:
        return Rule(tuple(kinds), tuple(results), frozenset(of_one), local=_with_heads)
    of_weights = frozenset(results[1]) - {"n"}
    across = frozenset(of_one) - of_weights
    return Rule(tuple(kinds), tuple(results), of_weights, across, (), _summed_norm)


def _of_embedding(call: Foreign, shapes: list[Any]) -> Rule:
    lead = _rows(len(shapes[1]))
    return Rule((("v", "n"), lead), ((*lead, "n"),), frozenset((*lead, "n")))


def _of_embedding_backward(call: Foreign, shapes: list[Any]) -> Rule:
    lead = _rows(len(shapes[1]))
    table = ("v", "n")
    operands = ((*lead, "n"), lead, *[table] * (len(shapes) - 2))
    return Rule(operands, (table, ("z0",)), frozenset("n"), frozenset(lead), (), _summed_table)


def _of_attention(call: Foreign, shapes: list[Any], backward: bool) -> Rule:
    """Sequences and heads, each group's by themselves. Sinks are summed over sequences."""
    namer, first = _Namer(), int(backward)
    fronts = tuple(f"f{i}" for i in range(len(shapes[first]) - 4))
    turned = (lambda a, b: ("s", b, a)) if call.asks("tokens_first") else (lambda a, b: ("s", a, b))
    q, k, v = (*fronts, *turned("h", "q"), "d"), (*fronts, *turned("g", "t"), "d"), (*fronts, *turned("g", "t"), "e")
    out, lse = (*fronts, *turned("h", "q"), "e"), (*fronts, *turned("h", "q"))
    batch, place = shapes[first][len(fronts)], len(fronts) + (2 if call.asks("tokens_first") else 1)
    heads, queries = shapes[first][place], shapes[first][len(fronts) + (1 if call.asks("tokens_first") else 2)]
    keys = shapes[first + 1][len(fronts) + (1 if call.asks("tokens_first") else 2)]
    kinds = [out, q, k, v, out, lse] if backward else [q, k, v]
    extents = (*shapes[first][: len(fronts)], batch, heads, queries, keys)
    of_pairs = (*fronts, "s", "h", "q", "t")
    for name in ("sinks", "allowed", "bias", "first_key", "seqlens_k"):
        if call.asks(f"has_{name}"):
            shape = shapes[len(kinds)]
            if name == "sinks":
                kinds.append((*fronts, "h"))
            elif name in ("allowed", "bias"):
                kinds.append(namer.like(shape, of_pairs, extents))
            else:
                kinds.append((*fronts, "s"))
    results = (
        [q, k, v, *[(*fronts, "h")] * call.asks("has_sinks")] if backward else [out, *[lse] * call.asks("has_lse")]
    )
    results += [(*fronts, "z_w")]
    own, of_heads = _free_heads(shapes[first + 1][place], backward)
    free = {*fronts, *own} if backward and call.asks("has_sinks") else {*fronts, "s", *own}
    return Rule(tuple(kinds), tuple(results), frozenset(free), heads=of_heads)


def _free_heads(groups: int, backward: bool) -> tuple[Names, tuple[tuple[str, str], ...]]:
    """Which of heads and groups may be cut, and how: with the groups, or, where all heads share one, by themselves, if
    no gradient of that is summed over them."""
    if groups == 1:
        return () if backward else ("h",), ()
    return ("g",), (("h", "g"),)


def _of_stored(call: Foreign, shapes: list[Any], backward: bool) -> Rule:
    """Heads of packed sequences or of pages, each group's by themselves; and sequences that are not packed."""
    namer = _Namer()
    packed = backward or call.asks("has_cu_seqlens_q")
    rows = ("u", "h") if packed else ("s", "h", "q")
    q, out, lse = (*rows, "d"), (*rows, "e"), rows
    paged = not backward and call.asks("has_block_table")
    stored = ("p", "y", "g") if paged else ("t", "g")
    k, v = (*stored, "d"), (*stored, "e")
    kinds = [out, q, k, v, out, lse] if backward else [q, k, v]
    if backward:
        kinds += [("i",), ("j",), *[("h",)] * call.asks("has_sinks"), q, k, v]
        results = [q, k, v, *[("h",)] * call.asks("has_sinks"), ("w",)]
        own, of_heads = _free_heads(shapes[2][1], backward)
        return Rule(tuple(kinds), tuple(results), frozenset(own), heads=of_heads)
    of_sequences = ("x",) if packed else ("s",)
    shapes_q = shapes[0]
    for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k", "first_key", "sinks", "allowed", "bias"):
        if not call.asks(f"has_{name}"):
            continue
        shape = shapes[len(kinds)]
        if name in ("cu_seqlens_q", "cu_seqlens_k"):
            kinds.append(namer.own(1))
        elif name == "block_table":
            kinds.append((*of_sequences, *namer.own(1)))
        elif name in ("seqlens_k", "first_key"):
            kinds.append(of_sequences)
        elif name == "sinks":
            kinds.append(("h",))
        else:  # never of packed sequences
            extents = (shapes_q[0], shapes_q[1], shapes_q[2], -1)
            kinds.append(namer.like(shape, ("s", "h", "q", "t"), extents))
    kinds += [out, lse]
    own, of_heads = _free_heads(shapes[1][-2], backward)
    free = frozenset(own if packed else (*own, "s"))
    return Rule(tuple(kinds), (out, lse, ("w",)), free, heads=of_heads)


def _of_groups(call: Foreign, shapes: list[Any]) -> Rule:
    if call.asks("depth"):  # [T, M], [T, N] to [G, M, N]
        out = ("g", "m", "n")
        return Rule((("t", "m"), ("t", "n"), ("x",), out), (out,), frozenset("mn"))
    b = ("g", "n", "k") if call.asks("transpose_b") else ("g", "k", "n")
    return Rule((("t", "k"), b, ("x",), ("t", "n")), (("t", "n"),), frozenset("nt"), local=_rows_of_groups)


def _of_scaled(call: Foreign, shapes: list[Any]) -> Rule:
    """Rows of a and columns of b, where no scale is of more than one."""
    namer, out = _Namer(), call.results[0].shape
    rest = list(shapes[2:])
    lead = tuple(f"b{i}" for i in range(len(out) - 2))
    free = {*lead, "m", "n"}
    fronts = [namer.like(x[:-2], lead, out[:-2]) for x in shapes[:2]]
    kinds: list[Names] = [(*fronts[0], "m", "k"), (*fronts[1], "n", "k")]
    for of, name, place, own in (("a", "m", -2, out[-2]), ("b", "n", -1, out[-1])):
        if not call.asks(f"has_{of}_scale"):
            continue
        shape = rest.pop(0)
        if len(shape) < 2:
            kinds.append(namer.own(len(shape)))
            continue
        found = [*namer.like(shape[:-2], lead, out[:-2]), *namer.own(2)]
        if shape[place] == own:
            found[place] = name
        elif shape[place] != 1:
            free.discard(name)
        kinds.append(tuple(found))
    kinds += [namer.like(shape, (*lead, "m", "n"), out) for shape in rest]
    return Rule(tuple(kinds), ((*lead, "m", "n"),), frozenset(free))


def _of_quantize(call: Foreign, shapes: list[Any]) -> Rule:
    namer = _Namer()
    rank = len(shapes[0])
    rows = call.asks("granularity") in (0, 1) and not call.asks("transposed")  # each by itself
    free = _rows(rank - 1 if rows else rank - 2) if call.asks("granularity") != 3 else ()
    left, right = ([(*free, *namer.own(len(x) - len(free))) for x in named] for named in (shapes, call.shapes()))
    return Rule(tuple(left), tuple(right), frozenset(free))


_RULES: dict[str, Callable[[Foreign, list[Any]], Rule]] = {
    "activation": _of_elements,
    "activation_backward": _of_elements,
    "attention": lambda call, shapes: _of_attention(call, shapes, False),
    "attention_backward": lambda call, shapes: _of_attention(call, shapes, True),
    "attention_stored": lambda call, shapes: _of_stored(call, shapes, False),
    "attention_varlen_backward": lambda call, shapes: _of_stored(call, shapes, True),
    "embedding": _of_embedding,
    "embedding_backward": _of_embedding_backward,
    "gemm": _of_gemm,
    "grouped_gemm": _of_groups,
    "layernorm": lambda call, shapes: _of_norm(call, shapes, 2, False),
    "layernorm_backward": lambda call, shapes: _of_norm(call, shapes, 2, True),
    "log_prob": _of_rows,
    "log_prob_backward": _of_rows,
    "quantize": _of_quantize,
    "rmsnorm": lambda call, shapes: _of_norm(call, shapes, 1, False),
    "rmsnorm_backward": lambda call, shapes: _of_norm(call, shapes, 1, True),
    "sample": _of_rows,
    "scaled_gemm": _of_scaled,
    "softmax": _of_rows,
    "softmax_backward": _of_rows,
    "topk": _of_rows,
}


# ---- Sums across devices ---------------------------------------------------------------------------------------------


_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def _moved(x: Array, move: Callable[[Array], Array]) -> Array:
    """x through a collective, as words: XLA's on the CPU carry bf16 as fp32 and back, which changes a NaN."""
    words = _WORDS[x.dtype.itemsize] if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return _lax.bitcast_convert_type(move(_lax.bitcast_convert_type(x, words)), x.dtype)


def _gathered(x: Array, axes: Axes, place: int) -> Array:
    return _moved(x, lambda words: _lax.all_gather(words, axes, axis=place, tiled=True))


def _exchanged(x: Array, axes: Axes, cut: int, joined: int) -> Array:
    return _moved(x, lambda words: _lax.all_to_all(words, axes, cut, joined, tiled=True))


def _part(x: Array, axes: Axes, devices: int, place: int) -> Array:
    """This device's part of what all have."""
    own = x.shape[place] // devices
    return _lax.dynamic_slice_in_dim(x, _lax.axis_index(axes) * own, own, place)


def fold(parts: Array, dtype: Any) -> Array:
    """The sum of ``parts [S, ...]``, fp32, in order, rounded once: :func:`pydet.fold`. XLA's own additions on a CPU
    would flush subnormals."""
    total = None
    for i in range(0, parts.shape[0], _MOST_PARTS - 1):
        some = parts[i : i + _MOST_PARTS - 1]
        some = some if total is None else jnp.concatenate((total[None], some))
        last = i + _MOST_PARTS - 1 >= parts.shape[0]
        like = jax.ShapeDtypeStruct(parts.shape[1:], dtype if last else jnp.float32)
        total = batchable(plain, Foreign("fold", (like,), (), (("has_bias", 0), ("kernel", ""))), some)[0]
    return total


def _initial_workspace(call: Foreign, batch: int, m: int, n: int) -> int:
    options, size, library = ffi.new("pydet_gemm_options *"), ffi.new("uint64_t *"), _native.load(0)
    options.struct_size, options.arithmetic = ffi.sizeof("pydet_gemm_options"), call.asks("arithmetic")
    options.initial = ffi.new("pydet_tensor *")
    library.check(library.lib.pydet_gemm_workspace(batch, m, n, 0, options, size))
    return int(size[0])


def _ended(call: Foreign, total: Array, bias: Array | None, dtype: Any) -> Array:
    """A sum with a bias, rounded once: the end of a product of no more k."""
    if bias is None and dtype == jnp.float32:
        return total
    *batch, m, n = total.shape
    none = [jnp.zeros((*batch, *shape), dtype) for shape in ((m, 0), (0, n))]
    size = max(_initial_workspace(call, math.prod(batch), m, n), 16)
    end = call.told(
        has_bias=bias is not None, has_initial=1, accumulate=0, transpose_a=0, transpose_b=0, k_chunk=0, kernel="",
        skinny=0, mode=0, weights_constant=0,
    )  # fmt: skip
    results = jax.ShapeDtypeStruct(total.shape, dtype), jax.ShapeDtypeStruct((size,), jnp.uint8)
    operands = [*none, *([] if bias is None else [bias]), total]
    return plain(end.giving(*results)._replace(aliases=()), *operands)[0]


def _sums(call: Foreign, a: Array, b: Array, start: Array | None, shape: tuple[int, ...], k_chunk: int) -> Array:
    """The fp32 sums of a product, from `start` on."""
    how = call.told(
        has_bias=0, accumulate=start is not None, k_chunk=k_chunk, kernel="", skinny=0, mode=0, weights_constant=0
    )
    aliases = () if start is None else ((2, 0),)
    how = how.giving(jax.ShapeDtypeStruct(shape, jnp.float32))._replace(aliases=aliases)
    return plain(how, *((a, b) if start is None else (a, b, start)))[0]


def _summed_product(call: Foreign, rule: Rule, chosen: dict[str, Summed], *operands: Array) -> tuple[Array, ...]:
    """A product whose K is cut: a fold of its chunks in order, or a chain that goes from device to device."""
    across, (a, b, *more) = chosen["k"], operands
    bias = more.pop(0) if call.asks("has_bias") else None
    start = more.pop(0) if call.asks("accumulate") else None
    shape, dtype = call.results[0].shape, call.results[0].dtype
    k_a, k_b = a.ndim - (2 if call.asks("transpose_a") else 1), b.ndim - (1 if call.asks("transpose_b") else 2)
    own = a.shape[k_a]
    chunk = 0 if call.asks("k_chunk") >= own * across.size else call.asks("k_chunk")
    count = own // chunk if chunk else 0
    if 0 < count <= _OWN_PARTS and start is None:
        sums = []
        for i in range(count):
            own_a, own_b = (_lax.slice_in_dim(x, i * chunk, (i + 1) * chunk, axis=k) for x, k in ((a, k_a), (b, k_b)))
            sums.append(_sums(call, own_a, own_b, None, shape, 0))
        total = _folded(jnp.stack(sums), across)
    else:
        total = _chained(call, across, a, b, start, shape, chunk)
    return (_ended(call, total, bias, dtype),)


def _folded(parts: Array, across: Summed) -> Array:
    """The fold of all devices' parts ``[s, ...]``, on every device."""
    if parts.size * 4 * across.size <= _SMALL:
        return fold(_gathered(parts, across.axes, 0), jnp.float32)
    shape, count = parts.shape[1:], math.prod(parts.shape[1:])
    flat = jnp.pad(parts.reshape(parts.shape[0], -1), ((0, 0), (0, -count % across.size)))
    each = fold(_exchanged(flat, across.axes, 1, 0), jnp.float32)
    return _gathered(each, across.axes, 0)[:count].reshape(shape)


def _chained(
    call: Foreign, across: Summed, a: Array, b: Array, start: Array | None, shape: tuple[int, ...], chunk: int
) -> Array:
    """One chain: each device continues that of the one before, in as many blocks of the result as there are devices,
    one after the other, so that all work at a time."""
    devices, me, n_b = across.size, _lax.axis_index(across.axes), b.ndim - (2 if call.asks("transpose_b") else 1)
    m_a = a.ndim - (1 if call.asks("transpose_a") else 2)
    rank, (m, n) = len(shape), shape[-2:]
    place, blocks = (
        (rank - 1, devices) if n % devices == 0 else (rank - 2, devices) if m % devices == 0 else (rank - 1, 1)
    )
    extent = shape[place] // blocks
    piece_shape = (*shape[:place], extent, *shape[place + 1 :])

    def piece(x: Array, axis: int, i: Array) -> Array:
        return _lax.dynamic_slice_in_dim(x, i * extent, extent, axis)

    def step(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        arrived, done = carry
        block = t - me
        within, i = (block >= 0) & (block < blocks), jnp.clip(block, 0, blocks - 1)
        first = jnp.zeros(piece_shape, jnp.float32) if start is None else piece(start, place, i)
        begun = jnp.where(me == 0, first, arrived)
        left = piece(a, m_a, i) if place == rank - 2 else a
        right = piece(b, n_b, i) if place == rank - 1 else b
        made = _lax.cond(
            within, lambda x, y, z: _sums(call, x, y, z, piece_shape, chunk), lambda x, y, z: z, left, right, begun
        )
        kept = jnp.where(within, made, piece(done, place, i))
        done = _lax.dynamic_update_slice_in_dim(done, kept, i * extent, place)
        turn = [(j, j + 1) for j in range(devices - 1)]
        return _moved(made, lambda words: _lax.ppermute(words, across.axes, turn)), done

    nothing = jnp.zeros(piece_shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    _, done = _lax.fori_loop(0, devices + blocks - 1, step, nothing)
    words = jnp.where(me == devices - 1, _lax.bitcast_convert_type(done, jnp.uint32), jnp.uint32(0))
    return _lax.bitcast_convert_type(_lax.psum(words, across.axes), jnp.float32)  # whole numbers, of one device


def _with_heads(call: Foreign, rule: Rule, chosen: dict[str, Summed], *operands: Array) -> tuple[Array, ...]:
    """A norm of some heads."""
    if call.asks("heads"):
        call = call.told(heads=operands[0].shape[-2])
    return plain(call, *operands)


def _summed_norm(call: Foreign, rule: Rule, chosen: dict[str, Summed], *operands: Array) -> tuple[Array, ...]:
    """The gradients of a norm whose rows are cut: dx of the own rows; the sums over rows by blocks of DWEIGHT_ROWS
    where each device has whole ones, else by columns, each device some of them of all rows."""
    if call.asks("heads"):
        call = call.told(heads=operands[0].shape[-2])
    cut = [(rule.operands[0].index(name), *chosen[name]) for name in rule.operands[0] if name in chosen]
    cut = [x for x in cut if rule.operands[0][x[0]] in rule.summed]
    if not cut:
        return plain(call, *operands)
    sums = call.asks("has_weight") + call.asks("has_bias")
    rows, n = operands[0].shape, operands[0].shape[-1]
    tail = len(call.results[1].shape)
    own = math.prod(rows[: len(rows) - tail])
    lead = [i for i, name in enumerate(rule.operands[0]) if name in rule.results[1] and i < len(rows) - tail]
    outermost = len(cut) == 1 and math.prod(rows[: cut[0][0]]) == 1
    start = call.asks("accumulate")
    if call.target == "rmsnorm_backward" and outermost and not lead and not start and own and own % DWEIGHT_ROWS == 0:
        blocks = own // DWEIGHT_ROWS
        made = [jax.ShapeDtypeStruct((blocks, *y.shape), jnp.float32) for y in call.results[1 : 1 + sums]]
        dx, *found = plain(call.told(block_sums=1).giving(call.results[0], *made, *call.results[1 + sums :]), *operands)
        totals = [
            fold(_gathered(x, cut[0][1], 0), y.dtype)
            for x, y in zip(found[:sums], call.results[1 : 1 + sums], strict=True)
        ]
        return dx, *totals, *found[sums:]
    dx, *_, room = plain(call, *operands)
    devices = math.prod(size for _, _, size in cut)
    columns = n % devices == 0

    def whole(x: Array, names: Names) -> Array:
        for place, axes, size in cut:
            if "n" in names and columns and rule.operands[0][place] in names:
                x = _exchanged(x, axes, x.ndim - 1, place)
            elif rule.operands[0][place] in names:
                x = _gathered(x, axes, place)
            elif "n" in names and columns:
                x = _part(x, axes, size, x.ndim - 1)
        return x

    given = [(x, names) for x, names in zip(operands, rule.operands, strict=True)]
    if call.asks("has_dresidual"):
        del given[2 + (1 if call.target == "rmsnorm_backward" else 2) + call.asks("has_weight")]
    of_all = [whole(x, names) for x, names in given]
    width = n // devices if columns else n
    results = [jax.ShapeDtypeStruct(of_all[0].shape, call.results[0].dtype)]
    results += [jax.ShapeDtypeStruct((*y.shape[:-1], width), y.dtype) for y in call.results[1 : 1 + sums]]
    aliases = ((len(of_all) - 1, 1),) if start else ()
    again = call.told(has_dresidual=0).giving(*results, call.results[-1])._replace(aliases=aliases)
    found = list(plain(again, *of_all)[1 : 1 + sums])
    if columns:
        for _, axes, _ in reversed(cut):
            found = [_gathered(x, axes, x.ndim - 1) for x in found]
    return dx, *found, room


def _summed_table(call: Foreign, rule: Rule, chosen: dict[str, Summed], *operands: Array) -> tuple[Array, ...]:
    """The gradient of a table whose tokens are cut: each device has some columns of all."""
    cut = [(i, *chosen[name]) for i, name in enumerate(rule.operands[1]) if name in chosen]
    if not cut:
        return plain(call, *operands)
    dout, ids, *start = operands
    n = dout.shape[-1]
    devices = math.prod(size for _, _, size in cut)
    columns = n % devices == 0
    for place, axes, size in cut:
        ids = _gathered(ids, axes, place)
        dout = _exchanged(dout, axes, dout.ndim - 1, place) if columns else _gathered(dout, axes, place)
        start = [_part(x, axes, size, 1) if columns else x for x in start]
    like = jax.ShapeDtypeStruct((call.results[0].shape[0], dout.shape[-1]), call.results[0].dtype)
    made, room = plain(call.giving(like, call.results[1]), dout, ids, *start)
    for _, axes, _ in reversed(cut) if columns else ():
        made = _gathered(made, axes, 1)
    return made, room


def _rows_of_groups(call: Foreign, rule: Rule, chosen: dict[str, Summed], *operands: Array) -> tuple[Array, ...]:
    """Rows by their groups, of which a device has those from its first row on."""
    a, b, ends, out = operands
    if "t" in chosen:
        ends = jnp.clip(ends - (_lax.axis_index(chosen["t"].axes) * a.shape[0]).astype(ends.dtype), 0, a.shape[0])
    return plain(call, a, b, ends, out)


# ---- Partitioning ----------------------------------------------------------------------------------------------------


def _axes_of(x: Any) -> list[Axes]:
    """The mesh axes of each dimension; none where JAX knows no sharding, before 0.7 of what a function closes over."""
    if x.sharding is None:
        return [()] * len(x.shape)
    spec = (*x.sharding.spec, *[None] * len(x.shape))[: len(x.shape)]
    return [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]


def _choose(rule: Rule, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> dict[str, Summed]:
    """Which dimensions are cut: as those of the first operand are, then of the next; what is left as results are."""
    chosen: dict[str, Summed] = {}
    used: set[str] = set()
    groups = dict(rule.heads)
    extents: dict[str, set[int]] = {}
    for x, names in zip((*operands, *results), (*rule.operands, *rule.results), strict=True):
        for extent, name in zip(x.shape, names, strict=True):
            extents.setdefault(groups.get(name, name), set()).add(extent)
    for arrays, named, kinds in (
        (operands, rule.operands, rule.free | rule.summed),
        (results, rule.results, rule.free),
    ):
        for x, names in zip(arrays, named, strict=True):
            for axes, given in zip(_axes_of(x), names, strict=True):
                name = groups.get(given, given)
                size = math.prod(mesh.shape[axis] for axis in axes)
                if size == 1 or name in chosen or name not in kinds or used & set(axes):
                    continue
                if any(extent % size for extent in extents[name]):
                    continue
                own = max(extents[name]) // size
                if name in rule.summed and rule.fits is not None and not rule.fits(own, operands[0].dtype):
                    continue
                chosen[name] = Summed(axes, size)
                used |= set(axes)
    return chosen


def _specs(rule: Rule, named: Sequence[Names], chosen: dict[str, Summed], mesh: Any) -> tuple[Any, ...]:
    groups = dict(rule.heads)
    found = []
    for names in named:
        axes = [chosen.get(groups.get(name, name)) for name in names]
        found.append(NamedSharding(mesh, PartitionSpec(*(None if x is None else x.axes for x in axes))))
    return tuple(found)


def _sdy_rule(rule: Rule, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """The names as XLA's propagation reads them: heads are those of a group, by groups."""
    groups, sizes = dict(rule.heads), {}
    extents = {
        name: n
        for x, names in zip((*operands, *results), (*rule.operands, *rule.results), strict=True)
        for n, name in zip(x.shape, names, strict=True)
    }

    def mapped(names: Names) -> Any:
        dims: list[Any] = []
        for name in names:
            group = groups.get(name)
            if group is None:
                dims.append(name)
            elif extents[name] == extents[group]:
                dims.append(group)
            else:
                each = f"{name}each"
                sizes[each] = extents[name] // extents[group]
                dims.append(CompoundFactor(group, each))
        return ArrayMapping(*dims)

    left, right = (tuple(mapped(names) for names in named) for named in (rule.operands, rule.results))
    return SdyShardingRule(left, right, **sizes)


def _typed(call: Foreign, rule: Rule, operands: Sequence[Array]) -> Foreign:
    """The call with the shardings of its results, where a mesh has axes that are explicit: of the types of arrays."""
    kind = getattr(_sharding, "AxisType", None)
    avals = [type_of(x) for x in operands]
    meshes = [getattr(getattr(x, "sharding", None), "mesh", None) for x in avals]
    mesh = next((m for m in meshes if m is not None and kind.Explicit in m.axis_types), None) if kind else None
    if mesh is None:
        return call
    none = NamedSharding(mesh, PartitionSpec())
    results = [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=none) for y in call.results]
    specs = _specs(rule, rule.results, _choose(rule, mesh, avals, results), mesh)
    made = [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=own) for y, own in zip(results, specs, strict=True)]
    return call.giving(*made)


def partitioned(call: Foreign, *operands: Array) -> tuple[Array, ...]:
    """The call, which XLA may share out among devices."""
    mesh: Any = _sharding.get_abstract_mesh()
    shapes = [x.shape for x in operands]
    known = all(isinstance(n, int) for shape in (*shapes, *(y.shape for y in call.results)) for n in shape)
    manual = getattr(mesh, "manual_axes", ())
    config: Any = jax.config
    if 0 < len(manual) < len(mesh.axis_names) and not config.jax_use_shardy_partitioner:  # XLA would end the process
        what = f"within shard_map over {', '.join(manual)} alone, of a mesh of {', '.join(mesh.axis_names)}"
        fail(UNSUPPORTED, f"{call.target}: {what}, want Shardy: jax.config.update('jax_use_shardy_partitioner', True)")
    if call.target not in _RULES or not known or bool(manual) or jax.device_count() == 1:
        return plain(call, *operands)
    rule = _RULES[call.target](call, shapes)
    call = _typed(call, rule, operands)

    def placed(mesh: Any, args: Any, results: Any) -> dict[str, Summed]:
        if not all(isinstance(x.sharding, NamedSharding) for x in (*args, *results) if x.sharding is not None):
            return {}
        return _choose(rule, mesh, args, results)

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        chosen = placed(mesh, args, results)
        where = mesh if not mesh.empty else Mesh(np.array(jax.devices()), ("devices",))
        own = _specs(rule, rule.operands, chosen, where)
        made = _specs(rule, rule.results, chosen, where)
        parts = [
            jax.ShapeDtypeStruct(sharding.shard_shape(y.shape), y.dtype)
            for sharding, y in zip(made, call.results, strict=True)
        ]
        local = call.giving(*parts)

        def lower(*given: Array) -> tuple[Array, ...]:
            if rule.local is None or not chosen:
                return plain(local, *given)
            special = rule.local is not _summed_product or "k" in chosen
            return tuple(rule.local(local, rule, chosen, *given)) if special else plain(local, *given)

        return where, lower, made, own

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in call.results]
        if not all(isinstance(x.sharding, NamedSharding | None) for x in args) or mesh.empty:
            return _specs(rule, rule.results, {}, Mesh(np.array(jax.devices()), ("devices",)))
        bare = [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=NamedSharding(mesh, PartitionSpec())) for y in shapes]
        return _specs(rule, rule.results, _choose(rule, mesh, args, bare), mesh)

    run = custom_partitioning(lambda *given: plain(call, *given))
    run.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_sdy_rule(rule, operands, call.results),
    )
    found: tuple[Array, ...] = run(*operands)
    return found
