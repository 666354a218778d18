"""What is common to all functions of pydet.jax: the handlers that XLA is told of, arguments, and the call itself."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

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
from pydet.shapes import MAX_DIMS, RULES, Operand, text

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


_concrete: set[type] = set()  # the classes of JAX's arrays that are no tracers
_names: dict[Any, str] = {}  # of element types; NumPy makes a type's name anew each time, at a cost


def name_of(dtype: Any) -> str:
    """The name of an element type."""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = str(dtype.name)
    return name


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def unwrapped(x: Any) -> Any:
    """The array that something holds which is one to JAX, such as Flax's nnx.Param."""
    return x.__jax_array__() if not is_array(x) and hasattr(type(x), "__jax_array__") else x


def to_array(op: str, name: str, x: Any, types: tuple[str, ...] = UNSCALED) -> Array:
    """x as an array of one of the types."""
    if type(x) in _concrete and name_of(x.dtype) in types and x.ndim <= MAX_DIMS:
        return _served_here(op, name, x)  # what follows would say the same, at five times the cost
    x = unwrapped(x)
    if not is_array(x):
        fail(INVALID_DTYPE, f"{op}: {name} is {type_name(x)}, want an array of JAX or NumPy")
    if isinstance(x, np.ma.MaskedArray):
        fail(INVALID_VALUE, f"{op}: {name} is a masked array, which is not supported; use .filled() or .data")
    RULES.read(op, Operand(name, x.shape, name_of(x.dtype)), 0, types)
    return _served_here(op, name, x if isinstance(x, jax.Array) else jnp.asarray(x))  # which narrows float64, not taken


def to_kind(op: str, name: str, x: Any, kind: str) -> Array:
    """x as an array of int32 or bool."""
    x = unwrapped(x)
    if not is_array(x) or name_of(x.dtype) != kind:
        got = name_of(x.dtype) if is_array(x) else type_name(x)
        fail(INVALID_DTYPE, f"{op}: {name} is {got}, want {kind}")
    return _served_here(op, name, x if isinstance(x, jax.Array) else jnp.asarray(x))


def whole_numbers(op: str, name: str, x: Any, shape: tuple[int, ...] | None, exact: bool = False) -> Array:
    """x as an array of int32 or int64, of a shape. JAX narrows NumPy's int64 where that is not enabled: a number that
    int32 does not hold is then -1, or where all have to be `exact` refused."""
    x = unwrapped(x)
    if not isinstance(x, jax.Array | np.ndarray) or name_of(x.dtype) not in ("int32", "int64"):
        got = x.dtype.name if hasattr(x, "dtype") else type_name(x)
        fail(INVALID_DTYPE, f"{op}: {name} is {got}, want an array of int32 or int64")
    if shape is not None and x.shape != shape:
        fail(INVALID_SHAPE, f"{op}: {name} is {text(x.shape)}, want {text(shape)}")
    config: Any = jax.config
    if isinstance(x, np.ndarray):
        if name_of(x.dtype) == "int64" and not config.jax_enable_x64:
            fits = x == x.astype(np.int32)
            if exact and not fits.all():
                fail(INVALID_DTYPE, f"{op}: {name} has numbers beyond int32, which want jax_enable_x64")
            x = np.where(fits, x, -1).astype(np.int32)
        x = jnp.asarray(x)
    return _served_here(op, name, x)


def _served_here(op: str, name: str, x: Array) -> Array:
    if type(x) in _concrete or not isinstance(x, jax.core.Tracer):
        _concrete.add(type(x))
        device = next(iter(x.devices()))
        if device.platform not in _served:
            reason = _native.try_load(constants.PYDET_EXCHANGE_CUDA)[1] if device.platform == "gpu" else ""
            fail(UNSUPPORTED, f"{op}: {name} is on {device}, which pydet.jax does not serve here. {reason}".rstrip())
    return x


def operands_of(*given: tuple[str, Array | None]) -> list[Any]:
    """What the rules read of named arrays."""
    return [None if x is None else Operand(name, x.shape, name_of(x.dtype)) for name, x in given]


def static(op: str, name: str, x: Any, convert: Callable[[Any], Any], want: str) -> Any:
    if isinstance(x, jax.core.Tracer):
        fail(INVALID_VALUE, f"{op}: {name} is traced, want a Python value: it must be static")
    try:
        if isinstance(x, bool) == (convert is bool) and isinstance(x, str) == (convert is str):
            return convert(x)
    except (TypeError, ValueError):
        pass
    fail(INVALID_VALUE, f"{op}: {name} is {x!r}, want {want}")


class Real(float):
    """A number that is static: it equals those of its own bits, where 0.0 == -0.0 would take one's program for both."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Real) and self.hex() == other.hex()

    def __hash__(self) -> int:
        return hash(self.hex())


def kernel_name(op: str, kernel: str | None) -> str:
    return "" if kernel is None else str(static(op, "kernel", kernel, str, "None or the name of a kernel"))


_ready: dict[Any, Any] = {}  # what the checks of a call found, by all that they read


def remembered(op: str, x: Array, y: Array, given: tuple[Any, ...]) -> tuple[Any, Any]:
    """The key of a call of two arrays and what is static, or None, and what was found for it, or None."""
    if type(x) not in _concrete or type(y) not in _concrete:
        return None, None
    key = (op, x.shape, x.dtype, y.shape, y.dtype, given, *map(type, given))  # 16 == 16.0, which is refused
    try:
        return key, _ready.get(key)
    except TypeError:  # what is static has no hash, and is refused
        return None, None


def remember(key: Any, found: Any) -> Any:
    if key is not None:
        if len(_ready) >= 4096:
            _ready.clear()
        _ready[key] = found
    return found


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
        got = f"{name_of(accumulate.dtype)}, and the result {wanted or name_of(accumulate.dtype)}"
        fail(INVALID_DTYPE, f"{op}: accumulate is {got}, want float32")
    if accumulate.shape != shape:
        fail(INVALID_SHAPE, f"{op}: accumulate is {text(accumulate.shape)}, want {text(shape)}")
    return accumulate, "float32"


def as_rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# ---- The call -------------------------------------------------------------------------------------------------------


_NO_DERIVATIVE = {  # of what has no gradient of its own, or no second one
    "scaled_gemm": "scaled_gemm: no derivative, nor has quantize",
    "quantize": "quantize: no derivative",
    "rmsnorm": "rmsnorm: no derivative; rms_norm has first gradients (jax.grad, jax.vjp)",
    "rmsnorm_backward": "rmsnorm_backward: no derivative of this gradient; rms_norm has first gradients",
    "layernorm": "layernorm: no derivative; layer_norm has first gradients (jax.grad, jax.vjp)",
    "layernorm_backward": "layernorm_backward: no derivative of this gradient; layer_norm has first gradients",
    "activation_backward": "activation_backward: no derivative of this gradient; activations have first gradients",
    "embedding_backward": "embedding_backward: no derivative of this gradient; embedding has first gradients",
    "softmax_backward": "softmax_backward: no derivative of this gradient",
    "linear_log_prob_backward": "linear_log_prob_backward: no derivative of this gradient",
    "log_prob_backward": "log_prob_backward: no derivative of this gradient",
    "attention_backward": "attention_backward: no derivative of this gradient; attention has first gradients",
}


def compiled(*static: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: a call outside of any program is one, which JAX keeps; inside of one nothing is seen of it. What is
    not static is an array or None. Within ``shard_map`` all arrays vary over the same axes from then on, so that the
    gradient of one that did not is summed over the devices."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*given: Any) -> Any:
            arrays = iter(_aligned([x for i, x in enumerate(given) if i not in static and x is not None]))
            return function(*(x if i in static or x is None else next(arrays) for i, x in enumerate(given)))

        return jax.jit(run, static_argnums=static, inline=True)

    return decorate


_core: Any = jax.core
_typeof: Any = getattr(jax, "typeof", None) or _core.get_aval


def _axes(x: Array) -> frozenset[str]:
    """The axes of ``shard_map`` that an array varies over, where JAX checks that."""
    aval = _typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def _aligned(arrays: list[Array]) -> list[Array]:
    """Arrays that vary over the same axes."""
    axes = [_axes(x) for x in arrays]
    if len(set(axes)) < 2:
        return arrays
    every = frozenset[str]().union(*axes)
    return [_varying(x, tuple(sorted(every - own))) for x, own in zip(arrays, axes, strict=True)]


def _varying(x: Array, axes: tuple[str, ...]) -> Array:
    lax: Any = jax.lax
    if not axes:
        return x
    return lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)


def _like(result: Any, x: Array) -> Any:
    """What a result is, over the axes that an operand varies over."""
    if not _axes(x):
        return result
    aval = _typeof(x)
    name = "manual_axis_type" if hasattr(aval, "manual_axis_type") else "vma"
    where = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=where, **{name: getattr(aval, name)})


def call_handler(
    target: str,
    results: Any,
    operands: list[Array],
    aliases: dict[int, int],
    attributes: dict[str, Any],
    layouts: tuple[tuple[int, ...] | None, ...] | None = None,
) -> Any:
    """The handler's results; `layouts`: dimensions of the operands as they are to lie, from the outermost. Under vmap
    gemm broadcasts what is unbatched; products of groups and of fp8, and rows of tables, are made one by one. A norm
    takes a weight a group of rows, which nested batches keep in order only where all operands have every batch
    dimension; and what lies in a result's memory must have its shape."""
    typed = tuple((key, Real(x) if isinstance(x, float) else x) for key, x in attributes.items())
    return _call(target, results, tuple(aliases.items()), typed, layouts, *operands)


_ONE_BY_ONE = {"grouped_gemm", "scaled_gemm", "quantize", "embedding", "embedding_backward"}  # under vmap
_ONE_BY_ONE |= {"linear_log_prob", "linear_log_prob_backward"}


@compiled(0, 1, 2, 3, 4)
def _call(target: str, results: Any, aliases: Any, attributes: Any, layouts: Any, *operands: Array) -> Any:
    method = "expand_dims" if target == "gemm" and not aliases else "broadcast_all"
    method = "sequential" if target in _ONE_BY_ONE else method
    several = isinstance(results, tuple)
    typed = {
        key: x if isinstance(x, str) else np.float64(x) if isinstance(x, float) else np.int64(x)
        for key, x in attributes
    }
    made = [_like(result, operands[0]) for result in (results if several else (results,))]
    call = jax.ffi.ffi_call(
        f"pydet_{target}",
        tuple(made) if several else made[0],
        vmap_method=method,
        input_output_aliases=dict(aliases),
        input_layouts=layouts,
    )

    # A gradient is refused when it is asked for, not where it is cut off (jax.lax.stop_gradient).
    def refuse(saved: None, gradient: Any) -> NoReturn:
        fail(UNSUPPORTED, _NO_DERIVATIVE.get(target, f"{target}: no derivative"))

    guarded = jax.custom_vjp(lambda *given: call(*given, **typed))
    guarded.defvjp(lambda *given: (call(*given, **typed), None), refuse)
    return guarded(*operands)
