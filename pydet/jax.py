"""pydet in JAX: functions that can be jitted, differentiated and vmapped, with the bits of the eager calls.

    import jax, pydet.jax

    loss = lambda x, w: pydet.jax.linear(pydet.jax.rms_norm(x, eps=1e-6), w).sum()
    jax.jit(jax.grad(loss))(x, w)

They go through XLA's foreign function interface to handlers in pydet's own libraries (``native/xla_ffi.cpp``); on the
CPU, and on CUDA where ``libpydet_cuda.so`` is. Backward runs pydet's own gradients; vmap is one batched call, or for
RMSNorm with a weight one call for each. Operands are float32, bfloat16 or float16 arrays of one type.

``arithmetic`` and ``k_chunk`` are as in :func:`pydet.gemm`, decide bits, and hold for backward too. Like every option
here they are static: Python values, not traced ones. Errors are :class:`pydet.Error` while a function is traced, and
XLA's own error with pydet's sentence in it afterwards.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, TypeAlias

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("pydet.jax wants JAX, which is not installed: pip install jax") from error
import numpy as np

from pydet import _native
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail, ffi
from pydet.buffer import TYPES, type_index, unknown

Array: TypeAlias = Any
_Options: TypeAlias = tuple[int, int]  # the number of the arithmetic, k_chunk or 0

_TARGETS = ("gemm", "rmsnorm", "rmsnorm_backward")
_PLATFORMS = (
    (constants.PYDET_EXCHANGE_CPU, "cpu", "cpu"),
    (constants.PYDET_EXCHANGE_CUDA, "gpu", "CUDA"),
    (constants.PYDET_EXCHANGE_ROCM, "gpu", "ROCM"),
)
_INVALID_SHAPE: int = constants.PYDET_INVALID_SHAPE


def _register() -> None:
    """Tells XLA of the handlers of every library that loads here."""
    for index, kind, platform in _PLATFORMS:
        library, _ = _native.try_load(index)
        if library is None:
            continue
        functions = ctypes.CDLL(str(library.path))
        if not hasattr(functions, "pydet_xla_cpu_gemm"):
            fail(UNSUPPORTED, f"{library.path} is of an older build, which has no handlers for XLA; build it anew")
        for name in _TARGETS:
            handler = jax.ffi.pycapsule(getattr(functions, f"pydet_xla_{kind}_{name}"))
            jax.ffi.register_ffi_target(f"pydet_{name}", handler, platform=platform)


_register()


# ---- Arguments -------------------------------------------------------------------------------------------------------


def _array(op: str, name: str, x: Any, like: Array | None = None) -> Array:
    """x as an array of one of the types, of that of `like` where there is one."""
    if not isinstance(x, jax.Array | jax.core.Tracer) and not hasattr(x, "__array__"):
        fail(INVALID_DTYPE, f"{op}: {name} is {type(x).__qualname__}, want an array")
    given = x.dtype.name if hasattr(getattr(x, "dtype", None), "name") else np.asarray(x).dtype.name
    if given not in TYPES:
        fail(INVALID_DTYPE, f"{op}: {name} is {given}, want {', '.join(TYPES)}")
    x = jnp.asarray(x)  # not before: it narrows float64 without a word
    if like is not None and x.dtype != like.dtype:
        fail(INVALID_DTYPE, f"{op}: {name} is {x.dtype.name}, want {like.dtype.name} as the first operand")
    return x


def _static(op: str, name: str, x: Any, kind: Any) -> Any:
    if isinstance(x, jax.core.Tracer):
        fail(INVALID_VALUE, f"{op}: {name} is traced, want a Python value: bits depend on it, so it must be static")
    if not isinstance(x, kind) or isinstance(x, bool):
        fail(INVALID_VALUE, f"{op}: {name} is {x!r}, want {getattr(kind, '__name__', 'a number')}")
    return x


def _options(op: str, arithmetic: str, k_chunk: int | None) -> _Options:
    number = unknown(_static(op, "arithmetic", arithmetic, str), op, "arithmetic")
    chunk = 0 if k_chunk is None else _static(op, "k_chunk", k_chunk, int)
    if k_chunk is not None and (chunk <= 0 or chunk % 16):
        fail(INVALID_VALUE, f"{op}: k_chunk is {chunk}, want None or a positive multiple of 16")
    return number, chunk


# ---- Calls -----------------------------------------------------------------------------------------------------------


def _call(name: str, results: Any, operands: tuple[Array, ...], **attributes: int | float) -> Any:
    """The handler's results. Under vmap gemm broadcasts what is unbatched; a norm takes a weight a group of rows,
    which nested batches keep in order only where all operands have every batch dimension."""
    method = "expand_dims" if name == "gemm" else "broadcast_all"
    typed = {key: np.float64(x) if isinstance(x, float) else np.int64(x) for key, x in attributes.items()}
    return jax.ffi.ffi_call(f"pydet_{name}", results, vmap_method=method)(*operands, **typed)


def _product(
    a: Array,
    b: Array,
    bias: Array | None,
    dtype: Any,
    options: _Options,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Array:
    m = a.shape[-1 if transpose_a else -2]
    n = b.shape[-2 if transpose_b else -1]
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    # All of one rank, so that what vmap puts in front of them meets.
    operands = [x.reshape((1,) * (2 + len(batch) - x.ndim) + x.shape) for x in (a, b, bias) if x is not None]
    return _call(
        "gemm",
        jax.ShapeDtypeStruct((*batch, m, n), dtype),
        tuple(operands),
        has_bias=bias is not None,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        arithmetic=options[0],
        k_chunk=options[1],
    )


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _gradient_of_bias(dc: Array, bias: Array, options: _Options) -> Array:
    """Rows summed as one chain of products with 1, where the bias has one row; else dc itself."""
    if bias.ndim > 1:
        return dc.astype(bias.dtype)
    ones = jnp.ones((_rows(dc).shape[0], 1), dc.dtype)
    return _product(ones, _rows(dc), None, bias.dtype, options, transpose_a=True)[0]


# ---- Products --------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gemm(a: Array, b: Array, bias: Array | None, dtype: str, options: _Options) -> Array:
    return _product(a, b, bias, dtype, options)


def _gemm_forward(a: Array, b: Array, bias: Array | None, dtype: str, options: _Options) -> tuple[Array, Any]:
    if a.shape[:-2] != b.shape[:-2] and b.ndim > 2:
        fail(
            UNSUPPORTED,
            f"gemm: no gradient where batch dimensions broadcast ({a.shape}, {b.shape}) unless b is a matrix; "
            "broadcast them with jnp.broadcast_to",
        )
    return _product(a, b, bias, dtype, options), (a, b, bias)


def _gemm_backward(dtype: str, options: _Options, saved: Any, dc: Array) -> tuple[Array, Array, Array | None]:
    a, b, bias = saved
    dc = dc.astype(a.dtype)
    da = _product(dc, b, None, a.dtype, options, transpose_b=True)
    rows = (a, dc) if a.ndim == b.ndim else (_rows(a), _rows(dc))
    db = _product(*rows, None, b.dtype, options, transpose_a=True)
    return da, db, None if bias is None else _gradient_of_bias(dc, bias, options)


_gemm.defvjp(_gemm_forward, _gemm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x: Array, w: Array, bias: Array | None, options: _Options) -> Array:
    return _product(x, w, bias, x.dtype, options, transpose_b=True)


def _linear_forward(x: Array, w: Array, bias: Array | None, options: _Options) -> tuple[Array, Any]:
    return _linear(x, w, bias, options), (x, w, bias)


def _linear_backward(options: _Options, saved: Any, dy: Array) -> tuple[Array, Array, Array | None]:
    x, w, bias = saved
    dx = _product(dy, w, None, x.dtype, options)
    dw = _product(dy, x, None, w.dtype, options, transpose_a=True)
    return dx, dw, None if bias is None else _gradient_of_bias(dy, bias, options)


_linear.defvjp(_linear_forward, _linear_backward)


def _matrices(op: str, first: tuple[str, Any], second: tuple[str, Any], inner: tuple[int, int]) -> tuple[Array, Array]:
    a = _array(op, *first)
    b = _array(op, *second, like=a)
    if a.ndim < 2 or b.ndim < 2:
        fail(
            _INVALID_SHAPE, f"{op}: {first[0]} is {a.shape}, {second[0]} is {b.shape}, want matrices or batches of them"
        )
    if a.shape[inner[0]] != b.shape[inner[1]]:
        fail(_INVALID_SHAPE, f"{op}: {first[0]} is {a.shape}, {second[0]} is {b.shape}: what is summed over differs")
    try:
        jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        fail(_INVALID_SHAPE, f"{op}: {first[0]} is {a.shape}, {second[0]} is {b.shape}: their batches do not broadcast")
    return a, b


def gemm(
    a: Array,
    b: Array,
    bias: Array | None = None,
    *,
    out_dtype: Any = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
) -> Array:
    """``out[..., m, n] = round(sum_k a[..., m, k] b[..., k, n] + bias)``: :func:`pydet.gemm`.

    Args:
        a: ``[..., M, K]``.
        b: ``[..., K, N]``, of the type of ``a``. For a gradient its leading dimensions are those of ``a``, or none.
        bias: ``[N]`` or ``[..., M, N]``.
        out_dtype: ``a``'s by default.
    """
    a, b = _matrices("gemm", ("a", a), ("b", b), (-1, -2))
    dtype = a.dtype.name if out_dtype is None else TYPES[type_index(out_dtype)]
    if bias is not None:
        bias = _array("gemm", "bias", bias)
        shape = (*jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        if bias.shape not in (shape, shape[-1:]):
            fail(_INVALID_SHAPE, f"gemm: bias is {bias.shape}, want {shape[-1:]} or {shape}")
    return _gemm(a, b, bias, dtype, _options("gemm", arithmetic, k_chunk))


def gemm_da(dc: Array, b: Array, *, arithmetic: str = "auto", k_chunk: int | None = None) -> Array:
    """``da[..., m, k] = sum_n dc[..., m, n] b[..., k, n]``: :func:`pydet.gemm_da`. It has no gradient of its own."""
    dc, b = _matrices("gemm_da", ("dc", dc), ("b", b), (-1, -1))
    return _product(dc, b, None, dc.dtype, _options("gemm_da", arithmetic, k_chunk), transpose_b=True)


def gemm_db(a: Array, dc: Array, *, arithmetic: str = "auto", k_chunk: int | None = None) -> Array:
    """``db[..., k, n] = sum_m a[..., m, k] dc[..., m, n]``: :func:`pydet.gemm_db`. It has no gradient of its own."""
    a, dc = _matrices("gemm_db", ("a", a), ("dc", dc), (-2, -2))
    return _product(a, dc, None, a.dtype, _options("gemm_db", arithmetic, k_chunk), transpose_a=True)


def linear(
    x: Array, w: Array, bias: Array | None = None, *, arithmetic: str = "auto", k_chunk: int | None = None
) -> Array:
    """``y[..., n] = round(sum_k x[..., k] w[n, k] + bias[n])``: :func:`pydet.skinny_gemm`, for any number of rows.

    Args:
        x: ``[..., K]`` of any rank from 1.
        w: ``[N, K]``, of the type of ``x``.
        bias: ``[N]``.
    """
    x = _array("linear", "x", x)
    w = _array("linear", "w", w, like=x)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        fail(_INVALID_SHAPE, f"linear: x is {x.shape}, w is {w.shape}, want [..., K] and [N, K]")
    if bias is not None:
        bias = _array("linear", "bias", bias)
        if bias.shape != w.shape[:1]:
            fail(_INVALID_SHAPE, f"linear: bias is {bias.shape}, want {w.shape[:1]}")
    y = _linear(_rows(x), w, bias, _options("linear", arithmetic, k_chunk))
    return y.reshape(*x.shape[:-1], w.shape[0])


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


def _norm(
    x: Array, residual: Array | None, weight: Array | None, eps: float, weight_offset: float
) -> tuple[Array, ...]:
    like, rstd = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    given = (x, residual, weight)
    return _call(
        "rmsnorm",
        (like, rstd) if residual is None else (like, rstd, like),
        tuple(operand for operand in given if operand is not None),
        has_residual=residual is not None,
        has_weight=weight is not None,
        eps=eps,
        weight_offset=weight_offset,
    )


def _norm_gradients(
    dy: Array, x: Array, weight: Array | None, rstd: Array, dresidual: Array | None, weight_offset: float
) -> tuple[Array, Array | None]:
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if weight is not None:
        n, size = x.shape[-1], ffi.new("uint64_t *")
        library = _native.load(constants.PYDET_EXCHANGE_CPU)
        library.check(library.lib.pydet_rmsnorm_backward_workspace(x.size // n if n else 0, n, size))
        results += [jax.ShapeDtypeStruct(weight.shape, weight.dtype), jax.ShapeDtypeStruct((size[0],), jnp.uint8)]
    given = (dy, x, rstd, weight, dresidual)
    found = _call(
        "rmsnorm_backward",
        tuple(results),
        tuple(operand for operand in given if operand is not None),
        has_weight=weight is not None,
        has_dresidual=dresidual is not None,
        weight_offset=weight_offset,
    )
    return found[0], found[1] if weight is not None else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x: Array, weight: Array | None, eps: float, weight_offset: float) -> Array:
    return _norm(x, None, weight, eps, weight_offset)[0]


def _rms_norm_forward(x: Array, weight: Array | None, eps: float, weight_offset: float) -> tuple[Array, Any]:
    y, rstd = _norm(x, None, weight, eps, weight_offset)
    return y, (x, weight, rstd)


def _rms_norm_backward(eps: float, weight_offset: float, saved: Any, dy: Array) -> tuple[Array, Array | None]:
    x, weight, rstd = saved
    return _norm_gradients(dy, x, weight, rstd, None, weight_offset)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rms_norm_sum(
    x: Array, residual: Array, weight: Array | None, eps: float, weight_offset: float
) -> tuple[Array, Array]:
    y, _, total = _norm(x, residual, weight, eps, weight_offset)
    return y, total


def _rms_norm_sum_forward(
    x: Array, residual: Array, weight: Array | None, eps: float, weight_offset: float
) -> tuple[tuple[Array, Array], Any]:
    y, rstd, total = _norm(x, residual, weight, eps, weight_offset)
    return (y, total), (total, weight, rstd)


def _rms_norm_sum_backward(
    eps: float, weight_offset: float, saved: Any, gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array | None]:
    total, weight, rstd = saved
    dx, dweight = _norm_gradients(gradients[0], total, weight, rstd, gradients[1], weight_offset)
    return dx, dx, dweight


_rms_norm_sum.defvjp(_rms_norm_sum_forward, _rms_norm_sum_backward)


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Array | None = None,
) -> Array | tuple[Array, Array]:
    """``y = x rstd (weight + weight_offset)`` over the last dimension: :func:`pydet.rmsnorm`.

    Args:
        x: ``[..., N]``.
        weight: ``[N]`` of any of the three types, or None for ones.
        eps: added to the mean of squares; not negative.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``; then their sum is normalised.

    Returns:
        ``y``; with a residual ``(y, x + residual)``.
    """
    x = _array("rms_norm", "x", x)
    if x.ndim < 1:
        fail(_INVALID_SHAPE, "rms_norm: x is a scalar, want [..., N]")
    if weight is not None:
        weight = _array("rms_norm", "weight", weight)
        if weight.shape != x.shape[-1:]:
            fail(_INVALID_SHAPE, f"rms_norm: weight is {weight.shape}, want {x.shape[-1:]}")
    eps, weight_offset = (
        float(_static("rms_norm", name, value, (int, float)))
        for name, value in (("eps", eps), ("weight_offset", weight_offset))
    )
    if not eps >= 0:
        fail(INVALID_VALUE, f"rms_norm: eps is {eps}, want a number that is not negative")
    if residual is None:
        return _rms_norm(x, weight, eps, weight_offset)
    residual = _array("rms_norm", "residual", residual, like=x)
    if residual.shape != x.shape:
        fail(_INVALID_SHAPE, f"rms_norm: residual is {residual.shape}, want {x.shape}")
    return _rms_norm_sum(x, residual, weight, eps, weight_offset)
