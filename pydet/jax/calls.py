"""What is common to all functions of pydet.jax: the handlers that XLA is told of, arguments, and the call itself."""

from __future__ import annotations

import ctypes
import itertools
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
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.frameworks import type_index
from pydet.hooks import unknown
from pydet.protocols import TYPES, UNSCALED, type_name
from pydet.shapes import RULES, Operand, text

Array: TypeAlias = Any

_PLATFORMS = (
    (constants.PYDET_EXCHANGE_CPU, "cpu", "cpu"),
    (constants.PYDET_EXCHANGE_CUDA, "gpu", "CUDA"),
    (constants.PYDET_EXCHANGE_ROCM, "gpu", "ROCM"),
)
INVALID_SHAPE: int = constants.PYDET_INVALID_SHAPE
_targets: set[str] = set()  # the names that XLA has handlers of
_served: set[str] = set()  # the platforms of devices that have handlers


class _Handler(ctypes.Structure):
    """pydet_xla_handler of ``native/entry/xla_ffi.h``."""

    _fields_ = (("name", ctypes.c_char_p), ("on_cpu", ctypes.c_void_p), ("on_gpu", ctypes.c_void_p))


def _register() -> None:
    """Tells XLA of the handlers of every library that loads here."""
    for index, kind, platform in _PLATFORMS:
        library, _ = _native.try_load(index)
        if library is None:
            continue
        functions = ctypes.CDLL(str(library.path))
        _served.add(kind)
        if not hasattr(functions, "pydet_xla_handlers"):
            fail(UNSUPPORTED, f"{library.path} is of an older build, which has no handlers for XLA; build it anew")
        functions.pydet_xla_handlers.restype = ctypes.POINTER(_Handler)
        for handler in itertools.takewhile(lambda handler: handler.name, functions.pydet_xla_handlers()):
            name, address = handler.name.decode(), getattr(handler, f"on_{kind}")
            jax.ffi.register_ffi_target(f"pydet_{name}", jax.ffi.pycapsule(address), platform=platform)
            _targets.add(name)


_register()


# ---- Arguments -------------------------------------------------------------------------------------------------------


def to_array(op: str, name: str, x: Any, types: tuple[str, ...] = UNSCALED) -> Array:
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


def operands_of(*given: tuple[str, Array | None]) -> list[Any]:
    """What the rules read of named arrays."""
    return [None if x is None else Operand(name, x.shape, x.dtype.name) for name, x in given]


def static(op: str, name: str, x: Any, convert: Callable[[Any], Any], want: str) -> Any:
    if isinstance(x, jax.core.Tracer):
        fail(INVALID_VALUE, f"{op}: {name} is traced, want a Python value: it must be static")
    try:
        if isinstance(x, bool) == (convert is bool) and isinstance(x, str) == (convert is str):
            return convert(x)
    except (TypeError, ValueError):
        pass
    fail(INVALID_VALUE, f"{op}: {name} is {x!r}, want {want}")


def kernel_name(op: str, kernel: str | None) -> str:
    return "" if kernel is None else str(static(op, "kernel", kernel, str, "None or the name of a kernel"))


class Options(NamedTuple):
    """What is static of a product, beside its type."""

    arithmetic: int
    k_chunk: int = 0
    kernel: str = ""
    skinny: bool = False
    mode: int = 0
    weights_constant: bool = False

    def of_backward(self) -> Options:
        return Options(self.arithmetic, self.k_chunk)


def options_of(op: str, arithmetic: str, k_chunk: int | None, kernel: str | None = None) -> Options:
    number = unknown(static(op, "arithmetic", arithmetic, str, "a name"), op, "arithmetic")
    chunk = 0 if k_chunk is None else static(op, "k_chunk", k_chunk, operator.index, "None or an integer")
    if k_chunk is not None and (chunk <= 0 or chunk % 16 or chunk >= 2**63):
        fail(INVALID_VALUE, f"{op}: k_chunk is {chunk}, want None or a positive multiple of 16")
    return Options(number, chunk, kernel_name(op, kernel))


def continued(
    op: str, accumulate: Any, shape: tuple[int, ...], dtype: Any, default: str, name: str = "out_dtype"
) -> tuple[Array | None, str]:
    """(what to continue from or None, the type of the result); `name` is that of the argument dtype."""
    wanted = None if dtype is None else TYPES[type_index(dtype, op, name)]
    if accumulate is None:
        return None, wanted or default
    if isinstance(accumulate, bool):
        fail(INVALID_VALUE, f"{op}: accumulate is {accumulate}, want None or the float32 array to continue from")
    accumulate = to_array(op, "accumulate", accumulate)
    if accumulate.dtype != jnp.float32 or wanted not in (None, "float32"):
        got = f"{accumulate.dtype.name}, and the result {wanted or accumulate.dtype.name}"
        fail(INVALID_DTYPE, f"{op}: accumulate is {got}, want float32")
    if accumulate.shape != shape:
        fail(INVALID_SHAPE, f"{op}: accumulate is {text(accumulate.shape)}, want {text(shape)}")
    return accumulate, "float32"


def as_rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# ---- The call -------------------------------------------------------------------------------------------------------


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


def call_handler(
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
