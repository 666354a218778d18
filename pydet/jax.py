"""pydet in JAX: functions that can be jitted, differentiated and vmapped, with the bits of the eager calls.

    import jax, pydet.jax

    loss = lambda x, w: pydet.jax.linear(pydet.jax.rms_norm(x, eps=1e-6), w).sum()
    jax.jit(jax.grad(loss))(x, w)

They go through XLA's foreign function interface to handlers in pydet's own libraries (``native/entry/xla_ffi.cpp``); on
the CPU, and on CUDA where ``libpydet_cuda.so`` is. Backward runs pydet's own gradients; vmap is one batched call, or
for a norm with weights one call for each. Operands are float32, bfloat16 or float16 arrays of one type, of
:func:`scaled_gemm` fp8.

Common to the products: ``arithmetic`` and ``k_chunk`` are as in :func:`pydet.gemm`, decide bits, and hold for backward
too. ``accumulate`` is an array to continue from, like the result and float32; the result takes its memory where nothing
else needs it, as in the carry of a scan or for a donated argument. ``kernel`` forces a kernel by name, for tests and
benchmarks, and not in backward.

Sharded arrays are gathered by XLA, which knows no way to cut these calls; ``jax.shard_map(..., check_vma=False)`` runs
them on each device's part.

Every option is static: a Python value, not a traced one. Errors are :class:`pydet.Error` while a function is traced,
and XLA's own error with pydet's sentence in it afterwards.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("pydet.jax wants JAX, which is not installed: pip install jax") from error
import numpy as np

from pydet import _native
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail, ffi
from pydet.frameworks import type_index
from pydet.hooks import unknown
from pydet.ops import Arithmetic, Granularity
from pydet.protocols import TYPES, UNSCALED, type_name
from pydet.shapes import GROUP, RULES, SCALED, SCALES, Operand, text

Array: TypeAlias = Any

_TARGETS = (
    "gemm",
    "grouped_gemm",
    "scaled_gemm",
    "quantize",
    "rmsnorm",
    "rmsnorm_backward",
    "layernorm",
    "layernorm_backward",
    "softmax",
    "softmax_backward",
    "log_prob",
    "log_prob_backward",
)
_PLATFORMS = (
    (constants.PYDET_EXCHANGE_CPU, "cpu", "cpu"),
    (constants.PYDET_EXCHANGE_CUDA, "gpu", "CUDA"),
    (constants.PYDET_EXCHANGE_ROCM, "gpu", "ROCM"),
)
_INVALID_SHAPE: int = constants.PYDET_INVALID_SHAPE
_served: set[str] = set()  # the platforms of devices that have handlers


def _register() -> None:
    """Tells XLA of the handlers of every library that loads here."""
    for index, kind, platform in _PLATFORMS:
        library, _ = _native.try_load(index)
        if library is None:
            continue
        functions = ctypes.CDLL(str(library.path))
        _served.add(kind)
        if not hasattr(functions, "pydet_xla_cpu_quantize"):
            fail(UNSUPPORTED, f"{library.path} is of an older build, which has no handlers for XLA; build it anew")
        for name in _TARGETS:
            handler = jax.ffi.pycapsule(getattr(functions, f"pydet_xla_{kind}_{name}"))
            jax.ffi.register_ffi_target(f"pydet_{name}", handler, platform=platform)


_register()


# ---- Arguments -------------------------------------------------------------------------------------------------------


def _array(op: str, name: str, x: Any, types: tuple[str, ...] = UNSCALED) -> Array:
    """x as an array of one of the types."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        fail(INVALID_DTYPE, f"{op}: {name} is {type_name(x)}, want an array of JAX or NumPy")
    if isinstance(x, np.ma.MaskedArray):
        fail(INVALID_VALUE, f"{op}: {name} is a masked array, which is not supported; use .filled() or .data")
    RULES.read(op, Operand(name, x.shape, x.dtype.name), 0, types)
    x = jnp.asarray(x)  # not before: it narrows float64 without a word
    if not isinstance(x, jax.core.Tracer):
        device = next(iter(x.devices()))
        if device.platform not in _served:
            reason = _native.try_load(constants.PYDET_EXCHANGE_CUDA)[1] if device.platform == "gpu" else ""
            fail(UNSUPPORTED, f"{op}: {name} is on {device}, which pydet.jax does not serve here. {reason}".rstrip())
    return x


def _operands(*given: tuple[str, Array | None]) -> list[Any]:
    """What the rules read of named arrays."""
    return [None if x is None else Operand(name, x.shape, x.dtype.name) for name, x in given]


def _static(op: str, name: str, x: Any, convert: Callable[[Any], Any], want: str) -> Any:
    if isinstance(x, jax.core.Tracer):
        fail(INVALID_VALUE, f"{op}: {name} is traced, want a Python value: it must be static")
    try:
        if isinstance(x, bool) == (convert is bool) and isinstance(x, str) == (convert is str):
            return convert(x)
    except (TypeError, ValueError):
        pass
    fail(INVALID_VALUE, f"{op}: {name} is {x!r}, want {want}")


def _kernel(op: str, kernel: str | None) -> str:
    return "" if kernel is None else str(_static(op, "kernel", kernel, str, "None or the name of a kernel"))


class _Options(NamedTuple):
    """What is static of a product, beside its type."""

    arithmetic: int
    k_chunk: int = 0
    kernel: str = ""
    skinny: bool = False
    mode: int = 0
    weights_constant: bool = False

    def of_backward(self) -> _Options:
        return _Options(self.arithmetic, self.k_chunk)


def _options(op: str, arithmetic: str, k_chunk: int | None, kernel: str | None = None) -> _Options:
    number = unknown(_static(op, "arithmetic", arithmetic, str, "a name"), op, "arithmetic")
    chunk = 0 if k_chunk is None else _static(op, "k_chunk", k_chunk, operator.index, "None or an integer")
    if k_chunk is not None and (chunk <= 0 or chunk % 16 or chunk >= 2**63):
        fail(INVALID_VALUE, f"{op}: k_chunk is {chunk}, want None or a positive multiple of 16")
    return _Options(number, chunk, _kernel(op, kernel))


def _continued(
    op: str, accumulate: Any, shape: tuple[int, ...], dtype: Any, default: str, name: str = "out_dtype"
) -> tuple[Array | None, str]:
    """(what to continue from or None, the type of the result); `name` is that of the argument dtype."""
    wanted = None if dtype is None else TYPES[type_index(dtype, op, name)]
    if accumulate is None:
        return None, wanted or default
    if isinstance(accumulate, bool):
        fail(INVALID_VALUE, f"{op}: accumulate is {accumulate}, want None or the float32 array to continue from")
    accumulate = _array(op, "accumulate", accumulate)
    if accumulate.dtype != jnp.float32 or wanted not in (None, "float32"):
        got = f"{accumulate.dtype.name}, and the result {wanted or accumulate.dtype.name}"
        fail(INVALID_DTYPE, f"{op}: accumulate is {got}, want float32")
    if accumulate.shape != shape:
        fail(_INVALID_SHAPE, f"{op}: accumulate is {text(accumulate.shape)}, want {text(shape)}")
    return accumulate, "float32"


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# ---- Calls -----------------------------------------------------------------------------------------------------------


_NO_DERIVATIVE = {
    "gemm": "gemm: no forward-mode derivative (jax.jvp), only gradients (jax.grad, jax.vjp)",
    "grouped_gemm": "ragged_dot: no forward-mode derivative (jax.jvp), only gradients (jax.grad, jax.vjp)",
    "scaled_gemm": "scaled_gemm: no derivative, nor has quantize",
    "quantize": "quantize: no derivative",
    "rmsnorm": "rmsnorm: no derivative; rms_norm has first gradients (jax.grad, jax.vjp)",
    "rmsnorm_backward": "rmsnorm_backward: no derivative of this gradient",
    "layernorm": "layernorm: no derivative; layer_norm has first gradients (jax.grad, jax.vjp)",
    "layernorm_backward": "layernorm_backward: no derivative of this gradient",
    "softmax": "softmax: no forward-mode derivative (jax.jvp), only first gradients (jax.grad, jax.vjp)",
    "softmax_backward": "softmax_backward: no derivative of this gradient",
    "log_prob": "log_prob: no forward-mode derivative (jax.jvp), only first gradients (jax.grad, jax.vjp)",
    "log_prob_backward": "log_prob_backward: no derivative of this gradient",
}


def _call(
    target: str,
    results: Any,
    operands: list[Array],
    aliases: dict[int, int],
    attributes: dict[str, Any],
    layouts: tuple[tuple[int, ...] | None, ...] | None = None,
) -> Any:
    """The handler's results; `layouts`: dimensions of the operands as they are to lie, from the outermost. Under vmap
    gemm broadcasts what is unbatched, and products of groups and of fp8 are made one by one. A norm takes a weight a
    group of rows, which nested batches keep in order only where all operands have every batch dimension; and what lies
    in a result's memory must have its shape."""
    typed = {
        key: x if isinstance(x, str) else np.float64(x) if isinstance(x, float) else np.int64(x)
        for key, x in attributes.items()
    }
    method = "expand_dims" if target == "gemm" and not aliases else "broadcast_all"
    method = "sequential" if target in ("grouped_gemm", "scaled_gemm", "quantize") else method
    call = jax.ffi.ffi_call(
        f"pydet_{target}", results, vmap_method=method, input_output_aliases=aliases, input_layouts=layouts
    )
    guarded = jax.custom_jvp(lambda *given: call(*given, **typed))
    guarded.defjvp(lambda primals, tangents: fail(UNSUPPORTED, _NO_DERIVATIVE[target]))
    return guarded(*operands)


# ---- Products --------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """How the matrices of a product lie: as a and b, or as their transposes."""

    transpose_a: bool = False
    transpose_b: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _product(
    a: Array, b: Array, bias: Array | None, start: Array | None, dtype: str, layout: _Layout, options: _Options
) -> Array:
    m, n = a.shape[-1 if layout.transpose_a else -2], b.shape[-2 if layout.transpose_b else -1]
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    # All of one rank, so that what vmap puts in front of them meets.
    operands = [x.reshape((1,) * (2 + len(batch) - x.ndim) + x.shape) for x in (a, b, bias, start) if x is not None]
    attributes = {"has_bias": bias is not None, "accumulate": start is not None}
    return _call(
        "gemm",
        jax.ShapeDtypeStruct((*batch, m, n), dtype),
        operands,
        {} if start is None else {len(operands) - 1: 0},
        {**attributes, **layout._asdict(), **options._asdict()},
    )


def _product_forward(
    a: Array, b: Array, bias: Array | None, start: Array | None, dtype: str, layout: _Layout, options: _Options
) -> tuple[Array, Any]:
    if a.shape[:-2] != b.shape[:-2] and (b.ndim > 2 or layout.transpose_a):
        fail(
            UNSUPPORTED,
            f"gemm: no gradient where batch dimensions broadcast ({a.shape}, {b.shape}) unless b is a matrix; "
            "broadcast them with jnp.broadcast_to",
        )
    result = _product(a, b, bias, start, dtype, layout, options)
    if bias is not None and bias.ndim > 1 and bias.shape != result.shape:
        fail(
            UNSUPPORTED,
            f"gemm: no gradient where a bias of shape {text(bias.shape)} broadcasts to {text(result.shape)}; want "
            "[N], or broadcast it with jnp.broadcast_to",
        )
    return result, (a, b, bias)


def _product_backward(dtype: str, layout: _Layout, options: _Options, saved: Any, dc: Array) -> tuple[Any, ...]:
    a, b, bias = saved
    given, dc, options = dc, dc.astype(a.dtype), options.of_backward()

    def product(left: Array, right: Array, transpose_left: bool, transpose_right: bool) -> Array:
        return _product(left, right, None, None, a.dtype.name, _Layout(transpose_left, transpose_right), options)

    if layout.transpose_a:
        da = product(b, dc, layout.transpose_b, True)
    else:
        da = product(dc, b, False, not layout.transpose_b)
    rows, drows = (a, dc) if a.ndim == b.ndim else (_rows(a), _rows(dc))
    if layout.transpose_b:
        db = product(drows, rows, True, layout.transpose_a)
    else:
        db = product(rows, drows, not layout.transpose_a, False)
    dbias = None
    if bias is not None and bias.ndim > 1:
        dbias = given.astype(bias.dtype)
    elif bias is not None:  # rows are summed as one chain of products with 1
        ones = jnp.ones((_rows(dc).shape[0], 1), dc.dtype)
        dbias = _product(ones, _rows(dc), None, None, bias.dtype.name, _Layout(True), options)[0]
    return da, db, dbias, given


_product.defvjp(_product_forward, _product_backward)


def _matrix_product(
    op: str,
    first: tuple[str, Any],
    second: tuple[str, Any],
    bias: Any,
    out_dtype: Any,
    accumulate: Any,
    how: tuple[Any, Any, Any],
    layout: _Layout,
) -> Array:
    """The product of two named matrices or batches, which lie as `layout` says; `how`: arithmetic, k_chunk, kernel."""
    a, b = _array(op, *first), _array(op, *second)
    added = None if bias is None else _array(op, "bias", bias)
    shape = RULES.product(op, *_operands((first[0], a), (second[0], b), ("bias", added)))
    start, dtype = _continued(op, accumulate, shape, out_dtype, a.dtype.name)
    return _product(a, b, added, start, dtype, layout, _options(op, *how))


def gemm(
    a: Array,
    b: Array,
    bias: Array | None = None,
    *,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """``out[..., m, n] = round(sum_k a[..., m, k] b[..., k, n] + bias)``: :func:`pydet.gemm`.

    Args:
        a: ``[..., M, K]``.
        b: ``[..., K, N]``, of the type of ``a``. For a gradient its leading dimensions are those of ``a``, or none.
        bias: ``[N]``, or what broadcasts to the result; for a gradient ``[N]`` or like the result.
        out_dtype: ``a``'s by default; float32 under ``accumulate``.
        accumulate, arithmetic, k_chunk, kernel: see above.
    """
    how = arithmetic, k_chunk, kernel
    return _matrix_product("gemm", ("a", a), ("b", b), bias, out_dtype, accumulate, how, _Layout())


def gemm_da(
    dc: Array,
    b: Array,
    *,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """``da[..., m, k] = sum_n dc[..., m, n] b[..., k, n]``: :func:`pydet.gemm_da`.

    Args:
        dc: ``[..., M, N]``.
        b: ``[..., K, N]``, as it went into :func:`gemm`; of the type of ``dc``.
        out_dtype, accumulate, arithmetic, k_chunk, kernel: as in :func:`gemm`.
    """
    how, layout = (arithmetic, k_chunk, kernel), _Layout(transpose_b=True)
    return _matrix_product("gemm_da", ("dc", dc), ("b", b), None, out_dtype, accumulate, how, layout)


def gemm_db(
    a: Array,
    dc: Array,
    *,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """``db[..., k, n] = sum_m a[..., m, k] dc[..., m, n]``: :func:`pydet.gemm_db`.

    With ``accumulate``, micro-batches cut at multiples of the arithmetic's step (or of ``k_chunk``) give the bits of
    one large batch.

    Args:
        a: ``[..., M, K]``.
        dc: ``[..., M, N]``, of the type of ``a``.
        out_dtype, accumulate, arithmetic, k_chunk, kernel: as in :func:`gemm`.
    """
    how, layout = (arithmetic, k_chunk, kernel), _Layout(transpose_a=True)
    return _matrix_product("gemm_db", ("a", a), ("dc", dc), None, out_dtype, accumulate, how, layout)


def skinny_gemm(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    mode: str = "deterministic",
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    weights_constant: bool = False,
    kernel: str | None = None,
) -> Array:
    """``y[..., n] = round(sum_k x[..., k] w[n, k] + bias[n])``: :func:`pydet.skinny_gemm`, for any number of rows.

    Args:
        x: ``[..., K]`` of any rank from 1.
        w: ``[N, K]``, of the type of ``x``. Under a vmap over ``w`` this is :func:`gemm` of the batch.
        bias: ``[N]``, or like the result.
        mode, weights_constant: as in :func:`pydet.skinny_gemm`. The stream is XLA's: the promise that nothing in it
            still writes ``w`` is about the program itself and the programs that were started before it.
        out_dtype, accumulate, arithmetic, k_chunk, kernel: as in :func:`gemm`.
    """
    return _skinny(
        "skinny_gemm", x, w, bias, out_dtype, accumulate, mode, arithmetic, k_chunk, weights_constant, kernel
    )


def linear(
    x: Array, w: Array, bias: Array | None = None, *, arithmetic: Arithmetic = "auto", k_chunk: int | None = None
) -> Array:
    """``y[..., n] = round(sum_k x[..., k] w[n, k] + bias[n])``: :func:`skinny_gemm` as a layer has it.

    Args:
        x: ``[..., K]`` of any rank from 1.
        w: ``[N, K]``, of the type of ``x``.
        bias: ``[N]``, or like the result.
        arithmetic, k_chunk: as in :func:`gemm`.
    """
    return _skinny("linear", x, w, bias, None, None, "deterministic", arithmetic, k_chunk, False, None)


def _skinny(
    op: str,
    x: Any,
    w: Any,
    bias: Any,
    out_dtype: Any,
    accumulate: Any,
    mode: str,
    arithmetic: Arithmetic,
    k_chunk: int | None,
    weights_constant: bool,
    kernel: str | None,
) -> Array:
    x, w = _array(op, "x", x), _array(op, "w", w)
    bias = None if bias is None else _array(op, "bias", bias)
    shape = RULES.skinny_product(op, *_operands(("x", x), ("w", w), ("bias", bias)))
    start, dtype = _continued(op, accumulate, shape, out_dtype, x.dtype.name)
    options = _options(op, arithmetic, k_chunk, kernel)._replace(
        skinny=True,
        mode=unknown(_static(op, "mode", mode, str, "a name"), op, "mode"),
        weights_constant=_static(op, "weights_constant", weights_constant, bool, "True or False"),
    )
    bias = bias if bias is None or bias.ndim == 1 else _rows(bias)
    start = None if start is None else _rows(start)
    return _product(_rows(x), w, bias, start, dtype, _Layout(transpose_b=True), options).reshape(shape)


# ---- Groups ----------------------------------------------------------------------------------------------------------


def _groups(
    a: Array, b: Array, ends: Array, shape: tuple[int, ...], dtype: str, options: _Options, **layout: bool
) -> Array:
    attributes = {"arithmetic": options.arithmetic, "k_chunk": options.k_chunk, "kernel": options.kernel}
    operands = [a, b, ends, jnp.zeros(shape, dtype)]  # rows of no group stay zeros
    return _call("grouped_gemm", jax.ShapeDtypeStruct(shape, dtype), operands, {3: 0}, {**layout, **attributes})


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _rows_by_group(a: Array, b: Array, ends: Array, dtype: str, transpose_b: bool, options: _Options) -> Array:
    """``[T, N]``: each row of a ``[T, K]`` by the matrix of its group, of b ``[G, K, N]``, or b ``[G, N, K]``."""
    shape = (a.shape[0], b.shape[1 if transpose_b else 2])
    return _groups(a, b, ends, shape, dtype, options, depth=False, transpose_b=transpose_b)


def _rows_by_group_forward(
    a: Array, b: Array, ends: Array, dtype: str, transpose_b: bool, options: _Options
) -> tuple[Array, Any]:
    return _rows_by_group(a, b, ends, dtype, transpose_b, options), (a, b, ends)


def _rows_by_group_backward(
    dtype: str, transpose_b: bool, options: _Options, saved: Any, dc: Array
) -> tuple[Array, Array, None]:
    a, b, ends = saved
    dc, own, options = dc.astype(a.dtype), a.dtype.name, options.of_backward()
    da = _rows_by_group(dc, b, ends, own, not transpose_b, options)
    return da, _sums_by_group(*((dc, a) if transpose_b else (a, dc)), ends, own, options), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _sums_by_group(a: Array, b: Array, ends: Array, dtype: str, options: _Options) -> Array:
    """``[G, M, N]``: the rows of a group in a ``[T, M]``, transposed, by its rows in b ``[T, N]``."""
    shape = (ends.shape[0], a.shape[1], b.shape[1])
    return _groups(a, b, ends, shape, dtype, options, depth=True, transpose_b=False)


def _sums_by_group_forward(a: Array, b: Array, ends: Array, dtype: str, options: _Options) -> tuple[Array, Any]:
    return _sums_by_group(a, b, ends, dtype, options), (a, b, ends)


def _sums_by_group_backward(dtype: str, options: _Options, saved: Any, dc: Array) -> tuple[Array, Array, None]:
    a, b, ends = saved
    dc, own, options = dc.astype(a.dtype), a.dtype.name, options.of_backward()
    da = _rows_by_group(b, dc, ends, own, True, options)
    return da, _rows_by_group(a, dc, ends, own, False, options), None


_rows_by_group.defvjp(_rows_by_group_forward, _rows_by_group_backward)
_sums_by_group.defvjp(_sums_by_group_forward, _sums_by_group_backward)


def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    out_dtype: Any = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """``jax.lax.ragged_dot``: consecutive groups of rows, each by its own matrix; :func:`pydet.grouped_gemm`.

    A row has the bits of :func:`gemm` of that row and its group's matrix, whatever the other rows and the sizes are.
    The gradient by ``rhs`` sums each group's rows by themselves. Sizes stay on the device.

    Args:
        lhs: ``[T, K]``, sorted by group.
        rhs: ``[G, K, N]``, of the type of ``lhs``.
        group_sizes: ``[G]``, int32: how many rows each group has. They may be traced, and sum to less than T: rows past
            the last group are zeros, and so are their gradients.
        out_dtype: that of the result; ``lhs``'s by default.
        arithmetic, k_chunk, kernel: as in :func:`gemm`.

    Returns:
        ``[T, N]``.
    """
    lhs, rhs = _array("ragged_dot", "lhs", lhs), _array("ragged_dot", "rhs", rhs)
    for name, x, rank, want in (("lhs", lhs, 2, "TxK"), ("rhs", rhs, 3, "GxKxN")):
        if x.ndim != rank:
            fail(_INVALID_SHAPE, f"ragged_dot: {name} is {text(x.shape)}, want {want}")
    if rhs.dtype != lhs.dtype:
        fail(INVALID_DTYPE, f"ragged_dot: rhs is {rhs.dtype.name}, want {lhs.dtype.name} as lhs")
    if rhs.shape[1] != lhs.shape[1]:
        fail(_INVALID_SHAPE, f"ragged_dot: rhs is {text(rhs.shape)}, want Gx{lhs.shape[1]}xN")
    if not isinstance(group_sizes, jax.Array | np.ndarray) or group_sizes.dtype.name != "int32":
        got = group_sizes.dtype.name if hasattr(group_sizes, "dtype") else type_name(group_sizes)
        fail(INVALID_DTYPE, f"ragged_dot: group_sizes is {got}, want an int32 array")
    if group_sizes.shape != rhs.shape[:1]:
        fail(_INVALID_SHAPE, f"ragged_dot: group_sizes is {text(group_sizes.shape)}, want {rhs.shape[0]}")
    dtype = lhs.dtype.name if out_dtype is None else TYPES[type_index(out_dtype, "ragged_dot")]
    ends = jnp.cumsum(jnp.asarray(group_sizes), dtype=jnp.int32)
    return _rows_by_group(lhs, rhs, ends, dtype, False, _options("ragged_dot", arithmetic, k_chunk, kernel))


# ---- fp8 -------------------------------------------------------------------------------------------------------------


def scaled_gemm(
    a: Array,
    b: Array,
    *,
    a_scale: Array | None,
    b_scale: Array | None,
    bias: Array | None = None,
    out_dtype: Any = None,
    accumulate: Array | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    kernel: str | None = None,
) -> Array:
    """The product of fp8 matrices that have scales: :func:`pydet.scaled_gemm`. It has no gradient.

    Args:
        a: ``[..., M, K]``, float8_e4m3fn or float8_e5m2.
        b: ``[..., K, N]``, either type. XLA brings it with k adjacent, which costs nothing under jit where it is the
            transpose of an array ``[..., N, K]``. On a GPU K is to be a multiple of 16.
        a_scale, b_scale: as in :func:`pydet.scaled_gemm`; None for 1.
        bias: ``[N]`` or ``[..., M, N]``.
        out_dtype: that of the result; bfloat16 by default, float32 under ``accumulate``.
        accumulate, kernel: as in :func:`gemm`. Scales are then along k, or None.
        arithmetic, k_chunk: as in :func:`pydet.scaled_gemm`; None is 128.
    """
    op = "scaled_gemm"
    given = [("a", a, SCALED), ("a_scale", a_scale, SCALES), ("b", b, SCALED), ("b_scale", b_scale, SCALES),
             ("bias", bias, UNSCALED)]  # fmt: skip
    arrays = {name: None if x is None else _array(op, name, x, types) for name, x, types in given}
    shape = RULES.scaled_product(*_operands(*arrays.items()))
    start, dtype = _continued(op, accumulate, shape, out_dtype, "bfloat16")
    number = unknown(_static(op, "arithmetic", arithmetic, str, "a name"), op, "arithmetic")
    chunk = GROUP if k_chunk is None else _static(op, "k_chunk", k_chunk, operator.index, "None or an integer")
    if chunk < 0 or chunk % 32 or chunk >= 2**63:
        fail(INVALID_VALUE, f"{op}: k_chunk is {chunk}, want 0 or a positive multiple of 32")
    has = {f"has_{name}": arrays[name] is not None for name in ("a_scale", "b_scale", "bias")}
    names = ("a", "b", "a_scale", "b_scale", "bias")
    operands = [x for x in (*(arrays[name] for name in names), start) if x is not None]
    order = tuple(range(len(b.shape)))
    return _call(
        op,
        jax.ShapeDtypeStruct(shape, dtype),
        operands,
        {} if start is None else {len(operands) - 1: 0},
        {**has, "accumulate": start is not None, "arithmetic": number, "k_chunk": chunk, "kernel": _kernel(op, kernel)},
        tuple((*order[:-2], order[-1], order[-2]) if i == 1 else None for i in range(len(operands))),
    )


_GRANULARITIES = ("row", "group", "block", "tensor")  # by number


def quantize(
    x: Array,
    *,
    granularity: Granularity = "row",
    dtype: Any = "float8_e4m3fn",
    scale_dtype: Any = "float32",
    power_of_two: bool = False,
    transposed: bool = False,
    scale: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, ...]:
    """Quantisation to fp8: :func:`pydet.quantize`. It has no gradient.

    Args:
        x: ``[..., M, K]``.
        granularity, dtype, scale_dtype, power_of_two, transposed: as in :func:`pydet.quantize`.
        scale: read this one instead of making one.
        kernel: as in :func:`gemm`.

    Returns:
        ``(q, scale)``, or ``(q, scale, q_t, scale_t)``: what :func:`scaled_gemm` takes for a, or transposed for b.
    """
    op = "quantize"
    x = _array(op, "x", x)
    RULES.read(op, Operand("x", x.shape, x.dtype.name), 2)
    if granularity not in _GRANULARITIES:
        want = f"{', '.join(_GRANULARITIES[:-1])} or {_GRANULARITIES[-1]}"
        fail(INVALID_VALUE, f"{op}: granularity is {granularity!r}, want {want}")
    power_of_two, transposed = (
        _static(op, name, value, bool, "True or False")
        for name, value in (("power_of_two", power_of_two), ("transposed", transposed))
    )
    kind, scale_kind = (
        TYPES[type_index(of, op, name)] for of, name in ((dtype, "dtype"), (scale_dtype, "scale_dtype"))
    )
    for name, own, types in (("dtype", kind, SCALED), ("scale_dtype", scale_kind, SCALES)):
        if own not in types:
            fail(INVALID_DTYPE, f"{op}: {name} is {own}, want {types[0]} or {types[1]}")
    if transposed and (scale is not None or granularity not in ("group", "block")):
        fail(INVALID_VALUE, f"{op}: transposed wants groups or blocks, and scales that are found")

    def results(lead: tuple[int, ...], rows: int, depth: int) -> list[Any]:
        groups, blocks = -(-depth // GROUP), -(-rows // GROUP)
        own = {"row": (rows, 1), "group": (rows, groups), "block": (blocks, groups)}
        of_scale = () if granularity == "tensor" else (*lead, *own[granularity])
        return [jax.ShapeDtypeStruct((*lead, rows, depth), kind), jax.ShapeDtypeStruct(of_scale, scale_kind)]

    *lead, m, k = x.shape
    made = results(tuple(lead), m, k) + (results(tuple(lead), k, m) if transposed else [])
    operands = [x]
    if scale is not None:
        operands.append(_array(op, "scale", scale, SCALES))
        if operands[1].shape != made[1].shape:
            fail(_INVALID_SHAPE, f"{op}: scale is {text(operands[1].shape)}, want {text(made[1].shape)}")
        made = made[:1]
    found = _call(
        op,
        tuple(made),
        operands,
        {},
        {
            "granularity": _GRANULARITIES.index(granularity),
            "given": scale is not None,
            "transposed": transposed,
            "power_of_two": power_of_two,
            "kernel": _kernel(op, kernel),
        },
    )
    return (found[0], operands[1]) if scale is not None else tuple(found)


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


def _heads(*vectors: Array | None) -> int:
    """How many heads weights or biases are of; 0: all rows have the same."""
    first = next((vector for vector in vectors if vector is not None), None)
    return first.shape[0] if first is not None and first.ndim == 2 else 0


def _norm(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    weight_offset: float,
    kernel: str,
) -> tuple[Array, ...]:
    like, rstd = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    has = {"has_residual": residual is not None, "has_weight": weight is not None, "has_bias": bias is not None}
    return _call(
        "rmsnorm",
        (like, rstd) if residual is None else (like, rstd, jax.ShapeDtypeStruct(x.shape, residual.dtype)),
        [operand for operand in (x, residual, weight, bias) if operand is not None],
        {},
        {**has, "heads": _heads(weight, bias), "eps": eps, "weight_offset": weight_offset, "kernel": kernel},
    )


def _norm_backward(
    dy: Array,
    x: Array,
    rstd: Array,
    weight: Array | None,
    bias: jax.ShapeDtypeStruct | None,
    dresidual: Array | None,
    weight_offset: float,
    start: Array | None = None,
    dtype: str | None = None,
    kernel: str = "",
) -> tuple[Array, Array | None, Array | None]:
    """dx, dweight where there is a weight, and dbias like `bias` where that is given."""
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if weight is not None:
        results.append(jax.ShapeDtypeStruct(weight.shape, dtype or weight.dtype))
    if bias is not None:
        results.append(bias)
    if len(results) > 1:
        columns, size = math.prod(results[1].shape), ffi.new("uint64_t *")
        library = _native.load(constants.PYDET_EXCHANGE_CPU)
        rows = x.size // columns if columns else 0
        library.check(library.lib.pydet_rmsnorm_backward_workspace(rows, max(columns, 1), size))
        results.append(jax.ShapeDtypeStruct((size[0] * (1 if bias is None else 2),), jnp.uint8))
    operands = [operand for operand in (dy, x, rstd, weight, dresidual, start) if operand is not None]
    has = {
        "has_weight": weight is not None,
        "has_bias": bias is not None,
        "has_dresidual": dresidual is not None,
        "accumulate": start is not None,
        "heads": results[1].shape[0] if len(results) > 1 and len(results[1].shape) == 2 else 0,
    }
    dx, *sums = _call(
        "rmsnorm_backward",
        tuple(results),
        operands,
        {} if start is None else {len(operands) - 1: 1},
        {**has, "weight_offset": weight_offset, "kernel": kernel},
    )
    return dx, sums.pop(0) if weight is not None else None, sums.pop(0) if bias is not None else None


def _like(bias: Array | None) -> jax.ShapeDtypeStruct | None:
    return None if bias is None else jax.ShapeDtypeStruct(bias.shape, bias.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _rms_norm(
    x: Array, weight: Array | None, bias: Array | None, eps: float, weight_offset: float, kernel: str
) -> Array:
    return _norm(x, None, weight, bias, eps, weight_offset, kernel)[0]


def _rms_norm_forward(
    x: Array, weight: Array | None, bias: Array | None, eps: float, weight_offset: float, kernel: str
) -> tuple[Array, Any]:
    y, rstd = _norm(x, None, weight, bias, eps, weight_offset, kernel)
    return y, (x, weight, bias, rstd)


def _rms_norm_backward(
    eps: float, weight_offset: float, kernel: str, saved: Any, dy: Array
) -> tuple[Array, Array | None, Array | None]:
    x, weight, bias, rstd = saved
    return _norm_backward(dy, x, rstd, weight, _like(bias), None, weight_offset)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _rms_norm_sum(
    x: Array, residual: Array, weight: Array | None, bias: Array | None, eps: float, weight_offset: float, kernel: str
) -> tuple[Array, Array]:
    y, _, total = _norm(x, residual, weight, bias, eps, weight_offset, kernel)
    return y, total


def _rms_norm_sum_forward(
    x: Array, residual: Array, weight: Array | None, bias: Array | None, eps: float, weight_offset: float, kernel: str
) -> tuple[tuple[Array, Array], Any]:
    y, rstd, total = _norm(x, residual, weight, bias, eps, weight_offset, kernel)
    return (y, total), (total, weight, bias, rstd)


def _rms_norm_sum_backward(
    eps: float, weight_offset: float, kernel: str, saved: Any, gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array | None, Array | None]:
    (total, weight, bias, rstd), (dy, dsum) = saved, gradients
    dx, dweight, dbias = _norm_backward(dy, total, rstd, weight, _like(bias), dsum, weight_offset)
    return dx.astype(dy.dtype), dx, dweight, dbias


_rms_norm_sum.defvjp(_rms_norm_sum_forward, _rms_norm_sum_backward)


def _norm_operands(
    op: str, x: Any, weight: Any, residual: Any = None, bias: Any = None, heads: bool = False
) -> tuple[Array, Array | None, Array | None, Array | None]:
    x = _array(op, "x", x)
    weight = None if weight is None else _array(op, "weight", weight)
    residual = None if residual is None else _array(op, "residual", residual)
    bias = None if bias is None else _array(op, "bias", bias)
    named = (("x", x), ("residual", residual), ("weight", weight), ("bias", bias))
    rows, added, weights, biases = _operands(*named)
    RULES.norm(op, rows, (added,), weights, bias=biases, heads=heads)
    return x, weight, residual, bias


def _norm_options(op: str, eps: Any, weight_offset: Any) -> tuple[float, float]:
    eps, weight_offset = (
        _static(op, name, value, float, "a number") for name, value in (("eps", eps), ("weight_offset", weight_offset))
    )
    if not eps >= 0:
        fail(INVALID_VALUE, f"{op}: eps is {eps}, want a number that is not negative")
    return eps, weight_offset


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float,
    bias: Array | None = None,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """``y = x rstd (weight + weight_offset) + bias`` over the last dimension: :func:`pydet.rmsnorm` with a gradient.

    Args:
        x: ``[..., N]``.
        weight: ``[N]``, or ``[H, N]`` beside an ``x`` of ``[..., H, N]``, of any of the three types, or None for ones.
        eps: added to the mean of squares; not negative.
        bias: shaped like ``weight``, or None for zeros.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``, or float32; then their sum, of its type, is normalised.
        kernel: as in :func:`gemm`.

    Returns:
        ``y``; with a residual ``(y, x + residual)``.
    """
    x, weight, residual, bias = _norm_operands("rms_norm", x, weight, residual, bias, True)
    options = (*_norm_options("rms_norm", eps, weight_offset), _kernel("rms_norm", kernel))
    if residual is None:
        return _rms_norm(x, weight, bias, *options)
    return _rms_norm_sum(x, residual, weight, bias, *options)


def rmsnorm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float,
    bias: Array | None = None,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, ...]:
    """:func:`pydet.rmsnorm`: what :func:`rmsnorm_backward` takes, for who writes the backward pass out.

    Args:
        x, weight, eps, bias, weight_offset, residual, kernel: as in :func:`rms_norm`, which alone has a gradient.

    Returns:
        ``(y, rstd)``, or ``(y, rstd, x + residual)`` with a residual; ``rstd`` is ``[...]`` in float32.
    """
    x, weight, residual, bias = _norm_operands("rmsnorm", x, weight, residual, bias, True)
    return _norm(x, residual, weight, bias, *_norm_options("rmsnorm", eps, weight_offset), _kernel("rmsnorm", kernel))


def rmsnorm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    rstd: Array,
    *,
    weight_offset: float = 0.0,
    dresidual: Array | None = None,
    has_bias: bool = False,
    dweight_dtype: Any = None,
    accumulate: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, ...]:
    """:func:`pydet.rmsnorm_backward`: the gradients of :func:`rmsnorm`; it has none of its own.

    Args:
        dy: like ``x``, or of another type beside a float32 ``x``.
        x: ``[..., N]``; what was normalised: ``x``, or the sum where there was a residual.
        weight: ``[N]`` or ``[H, N]`` of any of the three types, or None for ones; then ``dweight`` is None.
        rstd: ``[...]``, float32, of the forward call.
        weight_offset: as in the forward call.
        dresidual: like ``x``; a gradient that is added to ``dx`` before it is rounded.
        has_bias: whether ``dbias`` is made: shaped like ``weight``, or ``[N]`` where there is none.
        dweight_dtype: the type of ``dweight`` and ``dbias``; that of ``weight`` by default, float32 under
            ``accumulate``, without a weight that of ``x``.
        accumulate: like ``weight``, float32: the ``dweight`` to continue from, without a ``dbias``. Rows (of each head)
            cut at a multiple of ``DWEIGHT_ROWS`` give the bits of one call.
        kernel: as in :func:`gemm`.

    Returns:
        ``(dx, dweight)``, and ``dbias`` if ``has_bias``.
    """
    op = "rmsnorm_backward"
    x, dy, rstd = _array(op, "x", x), _array(op, "dy", dy), _array(op, "rstd", rstd)
    weight = None if weight is None else _array(op, "weight", weight)
    dresidual = None if dresidual is None else _array(op, "dresidual", dresidual)
    named = (("x", x), ("dy", dy), ("weight", weight), ("rstd", rstd), ("dresidual", dresidual))
    rows, gradient, weights, of_rows, added = _operands(*named)
    RULES.norm(op, rows, (gradient, added), weights, of_rows, heads=True)
    has_bias = _static(op, "has_bias", has_bias, bool, "True or False")
    if weight is None and (accumulate is not None or (dweight_dtype is not None and not has_bias)):
        fail(INVALID_VALUE, f"{op}: weight is None, so there is no dweight")
    if has_bias and accumulate is not None:
        fail(INVALID_VALUE, f"{op}: accumulate continues dweight alone, want has_bias=False")
    sample = x if weight is None else weight
    shape = x.shape[-1:] if weight is None else weight.shape
    start, dtype = _continued(op, accumulate, shape, dweight_dtype, sample.dtype.name, "dweight_dtype")
    offset = _static(op, "weight_offset", weight_offset, float, "a number")
    bias = jax.ShapeDtypeStruct(shape, dtype) if has_bias else None
    found = _norm_backward(dy, x, rstd, weight, bias, dresidual, offset, start, dtype, _kernel(op, kernel))
    return found if has_bias else found[:2]


# ---- LayerNorm -------------------------------------------------------------------------------------------------------


def _layer(
    x: Array,
    residual: Array | None,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    weight_offset: float,
    kernel: str,
) -> tuple[Array, ...]:
    like, of_rows = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    has = {"has_residual": residual is not None, "has_weight": weight is not None, "has_bias": bias is not None}
    return _call(
        "layernorm",
        (like, of_rows, of_rows) if residual is None else (like, of_rows, of_rows, like),
        [operand for operand in (x, residual, weight, bias) if operand is not None],
        {},
        {**has, "eps": eps, "weight_offset": weight_offset, "kernel": kernel},
    )


def _layer_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    dbias_dtype: str | None,
    dresidual: Array | None,
    weight_offset: float,
    dtype: str | None = None,
    kernel: str = "",
) -> tuple[Array, Array | None, Array | None]:
    """dx, dweight where there is a weight, and dbias where its type is given."""
    n, results = x.shape[-1], [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if weight is not None:
        results.append(jax.ShapeDtypeStruct((n,), dtype or weight.dtype))
    if dbias_dtype is not None:
        results.append(jax.ShapeDtypeStruct((n,), dbias_dtype))
    if len(results) > 1:
        size, library = ffi.new("uint64_t *"), _native.load(constants.PYDET_EXCHANGE_CPU)
        library.check(library.lib.pydet_layernorm_backward_workspace(math.prod(x.shape[:-1]), n, size))
        results.append(jax.ShapeDtypeStruct((size[0],), jnp.uint8))
    has = {
        "has_weight": weight is not None,
        "has_bias": dbias_dtype is not None,
        "has_dresidual": dresidual is not None,
    }
    dx, *sums = _call(
        "layernorm_backward",
        tuple(results),
        [operand for operand in (dy, x, mean, rstd, weight, dresidual) if operand is not None],
        {},
        {**has, "weight_offset": weight_offset, "kernel": kernel},
    )
    return dx, sums.pop(0) if weight is not None else None, sums.pop(0) if dbias_dtype is not None else None


def _type_of(bias: Array | None) -> str | None:
    return None if bias is None else str(bias.dtype.name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _layer_norm(
    x: Array, weight: Array | None, bias: Array | None, eps: float, weight_offset: float, kernel: str
) -> Array:
    return _layer(x, None, weight, bias, eps, weight_offset, kernel)[0]


def _layer_norm_forward(
    x: Array, weight: Array | None, bias: Array | None, eps: float, weight_offset: float, kernel: str
) -> tuple[Array, Any]:
    y, mean, rstd = _layer(x, None, weight, bias, eps, weight_offset, kernel)
    return y, (x, weight, bias, mean, rstd)


def _layer_norm_backward(
    eps: float, weight_offset: float, kernel: str, saved: Any, dy: Array
) -> tuple[Array, Array | None, Array | None]:
    x, weight, bias, mean, rstd = saved
    return _layer_backward(dy, x, mean, rstd, weight, _type_of(bias), None, weight_offset)


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _layer_norm_sum(
    x: Array, residual: Array, weight: Array | None, bias: Array | None, eps: float, weight_offset: float, kernel: str
) -> tuple[Array, Array]:
    y, _, _, total = _layer(x, residual, weight, bias, eps, weight_offset, kernel)
    return y, total


def _layer_norm_sum_forward(
    x: Array, residual: Array, weight: Array | None, bias: Array | None, eps: float, weight_offset: float, kernel: str
) -> tuple[tuple[Array, Array], Any]:
    y, mean, rstd, total = _layer(x, residual, weight, bias, eps, weight_offset, kernel)
    return (y, total), (total, weight, bias, mean, rstd)


def _layer_norm_sum_backward(
    eps: float, weight_offset: float, kernel: str, saved: Any, gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array | None, Array | None]:
    total, weight, bias, mean, rstd = saved
    operands = (gradients[0], total, mean, rstd, weight, _type_of(bias), gradients[1], weight_offset)
    dx, dweight, dbias = _layer_backward(*operands)
    return dx, dx, dweight, dbias


_layer_norm_sum.defvjp(_layer_norm_sum_forward, _layer_norm_sum_backward)


def _layer_operands(op: str, x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
    x, weight, residual, bias = _norm_operands(op, x, weight, residual, bias)
    return x, weight, bias, residual


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """``y = (x - mean) rstd (weight + weight_offset) + bias`` over the last dimension: :func:`pydet.layernorm` with a
    gradient.

    Args:
        x: ``[..., N]``.
        weight, bias: ``[N]`` of any of the three types, or None for ones and zeros.
        eps: added to the variance; not negative.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``; then their sum is normalised.
        kernel: as in :func:`gemm`.

    Returns:
        ``y``; with a residual ``(y, x + residual)``.
    """
    x, weight, bias, residual = _layer_operands("layer_norm", x, weight, bias, residual)
    options = (*_norm_options("layer_norm", eps, weight_offset), _kernel("layer_norm", kernel))
    if residual is None:
        return _layer_norm(x, weight, bias, *options)
    return _layer_norm_sum(x, residual, weight, bias, *options)


def layernorm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    kernel: str | None = None,
) -> tuple[Array, ...]:
    """:func:`pydet.layernorm`: what :func:`layernorm_backward` takes, for who writes the backward pass out.

    Args:
        x, weight, bias, eps, weight_offset, residual, kernel: as in :func:`layer_norm`, which alone has a gradient.

    Returns:
        ``(y, mean, rstd)``, and ``x + residual`` with a residual; ``mean`` and ``rstd`` are ``[...]`` in float32.
    """
    x, weight, bias, residual = _layer_operands("layernorm", x, weight, bias, residual)
    options = (*_norm_options("layernorm", eps, weight_offset), _kernel("layernorm", kernel))
    return _layer(x, residual, weight, bias, *options)


def layernorm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    *,
    weight_offset: float = 0.0,
    dresidual: Array | None = None,
    has_bias: bool = True,
    dweight_dtype: Any = None,
    kernel: str | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """:func:`pydet.layernorm_backward`: the gradients of :func:`layernorm`; it has none of its own.

    Args:
        dy: like ``x``.
        x: ``[..., N]``; what was normalised: ``x``, or the sum where there was a residual.
        weight: ``[N]`` of any of the three types, or None for ones; then ``dweight`` is None.
        mean, rstd: ``[...]``, float32, of the forward call.
        weight_offset: as in the forward call.
        dresidual: like ``x``; a gradient that is added to ``dx`` before it is rounded.
        has_bias: whether ``dbias`` is made.
        dweight_dtype: the type of ``dweight`` and ``dbias``; that of ``weight`` by default, without one that of ``x``.
        kernel: as in :func:`gemm`.

    Returns:
        ``(dx, dweight, dbias)``.
    """
    op = "layernorm_backward"
    x, dy, mean, rstd = (_array(op, *pair) for pair in (("x", x), ("dy", dy), ("mean", mean), ("rstd", rstd)))
    weight = None if weight is None else _array(op, "weight", weight)
    dresidual = None if dresidual is None else _array(op, "dresidual", dresidual)
    named = (("x", x), ("dy", dy), ("weight", weight), ("rstd", rstd), ("dresidual", dresidual), ("mean", mean))
    rows, gradient, weights, of_rows, added, means = _operands(*named)
    RULES.norm(op, rows, (gradient, added), weights, of_rows)
    RULES.norm(op, rows, (), None, means)
    has_bias = _static(op, "has_bias", has_bias, bool, "True or False")
    dtype = (x if weight is None else weight).dtype.name
    if dweight_dtype is not None:
        dtype = TYPES[type_index(dweight_dtype, op, "dweight_dtype")]
    offset = _static(op, "weight_offset", weight_offset, float, "a number")
    operands = (dy, x, mean, rstd, weight, dtype if has_bias else None, dresidual, offset, dtype)
    return _layer_backward(*operands, _kernel(op, kernel))


# ---- Softmax ---------------------------------------------------------------------------------------------------------


def _rows_like(target: str, operands: list[Array], **attributes: Any) -> Array:
    return _call(target, jax.ShapeDtypeStruct(operands[-1].shape, operands[-1].dtype), operands, {}, attributes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _soft(x: Array, log: bool, kernel: str) -> Array:
    return _rows_like("softmax", [x], log=log, kernel=kernel)


def _soft_forward(x: Array, log: bool, kernel: str) -> tuple[Array, Array]:
    y = _soft(x, log, kernel)
    return y, y


def _soft_backward(log: bool, kernel: str, y: Array, dy: Array) -> tuple[Array]:
    return (_rows_like("softmax_backward", [dy, y], log=log, kernel=""),)


_soft.defvjp(_soft_forward, _soft_backward)


def _soft_operand(op: str, x: Any) -> Array:
    x = _array(op, "x", x)
    RULES.norm(op, *_operands(("x", x)))
    return x


def softmax(x: Array, *, kernel: str | None = None) -> Array:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` over the last dimension: :func:`pydet.softmax` with a gradient.

    Args:
        x: ``[..., N]``.
        kernel: as in :func:`gemm`.
    """
    return _soft(_soft_operand("softmax", x), False, _kernel("softmax", kernel))


def log_softmax(x: Array, *, kernel: str | None = None) -> Array:
    """The logarithm of :func:`softmax`: :func:`pydet.log_softmax` with a gradient. Arguments as there."""
    return _soft(_soft_operand("log_softmax", x), True, _kernel("log_softmax", kernel))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _column(x: Array, index: Array, kernel: str) -> Array:
    return _call("log_prob", jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32), [x, index], {}, {"kernel": kernel})


def _column_forward(x: Array, index: Array, kernel: str) -> tuple[Array, Any]:
    return _column(x, index, kernel), (x, index)


def _column_backward(kernel: str, saved: Any, dlog_prob: Array) -> tuple[Array, None]:
    x, index = saved
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _call("log_prob_backward", like, [dlog_prob, x, index], {}, {"kernel": ""}), None


_column.defvjp(_column_forward, _column_backward)


def log_prob(x: Array, index: Array, *, kernel: str | None = None) -> Array:
    """Column ``index`` of each row of :func:`log_softmax`: :func:`pydet.log_prob` with a gradient by ``x``.

    Args:
        x: ``[..., N]``, logits.
        index: ``[...]``, int32 or int64; a number that is no column gives NaN, and zeros in the gradient.
        kernel: as in :func:`gemm`.

    Returns:
        ``[...]``, float32.
    """
    x = _soft_operand("log_prob", x)
    if not isinstance(index, jax.Array | np.ndarray) or index.dtype.name not in ("int32", "int64"):
        got = index.dtype.name if hasattr(index, "dtype") else type_name(index)
        fail(INVALID_DTYPE, f"log_prob: index is {got}, want an array of int32 or int64")
    if index.shape != x.shape[:-1]:
        fail(_INVALID_SHAPE, f"log_prob: index is {text(index.shape)}, want {text(x.shape[:-1])}")
    return _column(x, jnp.asarray(index), _kernel("log_prob", kernel))
