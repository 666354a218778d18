"""What is common to all functions of pydet.jax: the handlers that XLA is told of, arguments, and the call itself."""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar, cast

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
from pydet.jax.foreign import Foreign, batchable, varies_over
from pydet.jax.sharded import partitioned
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


# ---- A call outside of any program -----------------------------------------------------------------------------------


_programs: dict[Any, Any] = {}  # the compiled programs of public functions, by what is static of their calls
_ARRAY = object()
_F = TypeVar("_F", bound=Callable[..., Any])
_PLAIN = frozenset((type(None), int, bool, str))


def _told(x: Any) -> Any:
    """What stands for a static argument, another for 16.0 than for 16, and for -0.0 than for 0.0; or NotImplemented."""
    kind = type(x)
    if kind is float:
        return x.hex()
    if kind is tuple or kind is list:
        told = tuple((type(y), _told(y)) for y in x)
        return NotImplemented if any(y is NotImplemented for _, y in told) else told
    return x if kind in _PLAIN or isinstance(x, type | np.dtype) else NotImplemented


def program(function: _F) -> _F:
    """A decorator of a public function: a call on arrays outside of any program is a program of JAX's, which is found
    again by what is static, so that nothing is checked anew that was checked when it was traced."""
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        key: list[Any] = [function]
        arrays = []
        for x in given:
            kind = type(x)
            if kind in _concrete:
                arrays.append(x)
                key.append(_ARRAY)
            elif kind in _PLAIN or (kind is float and x):
                key += kind, x
            elif (told := _told(x)) is NotImplemented:
                return function(*given, **named)
            else:
                key += kind, told
        for name, x in named.items():
            kind = type(x)
            key.append(name)
            if kind in _concrete:
                arrays.append(x)
                key.append(_ARRAY)
            elif kind in _PLAIN or (kind is float and x):
                key += kind, x
            elif (told := _told(x)) is NotImplemented:
                return function(*given, **named)
            else:
                key += kind, told
        if not arrays:
            return function(*given, **named)
        found = _programs.get(known := tuple(key))
        return _first(function, parameters, given, named, arrays, known) if found is None else found(*arrays)

    return cast(_F, call)


def _first(
    function: Callable[..., Any], names: list[str], given: Any, named: dict[str, Any], arrays: list[Array], key: Any
) -> Any:
    """The first call of a program."""
    for name, x in (*zip(names, given, strict=False), *named.items()):
        if type(x) in _concrete:
            _served_here(function.__name__, name, x)
    fixed = [_ARRAY if type(x) in _concrete else x for x in given]
    fixed_by_name = {name: _ARRAY if type(x) in _concrete else x for name, x in named.items()}

    def run(*arrays: Array) -> Any:
        each = iter(arrays)
        by_place = [next(each) if x is _ARRAY else x for x in fixed]
        return function(*by_place, **{name: next(each) if x is _ARRAY else x for name, x in fixed_by_name.items()})

    run.__name__ = run.__qualname__ = function.__name__
    made = jax.jit(run, inline=True)
    found = made(*arrays)
    if len(_programs) >= 4096:
        _programs.clear()
    _programs[key] = made
    return found


# ---- Options ---------------------------------------------------------------------------------------------------------


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
    "attention_stored": "attention_paged: no derivative; attention and attention_varlen have first gradients",
    "attention_varlen_backward": "attention_varlen: no derivative of its gradient; it has first gradients",
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


def _aligned(arrays: list[Array]) -> list[Array]:
    """Arrays that vary over the same axes."""
    axes = [varies_over(x) for x in arrays]
    if len(set(axes)) < 2:
        return arrays
    every = frozenset[str]().union(*axes)
    return [_varying(x, tuple(sorted(every - own))) for x, own in zip(arrays, axes, strict=True)]


def _varying(x: Array, axes: tuple[str, ...]) -> Array:
    lax: Any = jax.lax
    if not axes:
        return x
    return lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)


def call_handler(
    target: str,
    results: Any,
    operands: list[Array],
    aliases: dict[int, int],
    attributes: dict[str, Any],
) -> Any:
    """The handler's results."""
    typed = tuple((key, Real(x) if isinstance(x, float) else x) for key, x in attributes.items())
    several = isinstance(results, tuple)
    call = Foreign(target, results if several else (results,), tuple(aliases.items()), typed)
    found = _call(call, *operands)
    return found if several else found[0]


@compiled(0)
def _call(call: Foreign, *operands: Array) -> Any:
    # A gradient is refused when it is asked for, not where it is cut off (jax.lax.stop_gradient).
    def refuse(saved: None, gradient: Any) -> NoReturn:
        fail(UNSUPPORTED, _NO_DERIVATIVE.get(call.target, f"{call.target}: no derivative"))

    def run(*given: Array) -> tuple[Array, ...]:
        return batchable(partitioned, call, *given)

    guarded = jax.custom_vjp(run)
    guarded.defvjp(lambda *given: (run(*given), None), refuse)
    return guarded(*operands)
