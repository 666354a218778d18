"""What the library calls in Python (``native/entry/python.h``), and the methods that it gives in return.

``exchange`` is the table of both sides: CPython's functions, the objects that the library compares with, and the hooks
below, each of which does what that header says beside its name. The library belongs to one interpreter of a process,
since the table is the process's.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from pydet import _native
from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail, ffi
from pydet.frameworks import (
    GPU,
    NumPy,
    Torch,
    check_torch,
    framework_of,
    numpy_dtype,
    running_on,
    stream_address,
    unreadable_torch,
)
from pydet.protocols import TYPES, type_name

MODES = {"deterministic": int(constants.PYDET_DETERMINISTIC), "fast": int(constants.PYDET_FAST)}
GRANULARITIES = {name: int(getattr(constants, f"PYDET_{name.upper()}")) for name in ("row", "group", "block", "tensor")}
ORDERS = {name: int(getattr(constants, f"PYDET_{name.upper()}")) for name in ("ordered", "tree")}
KINDS = {  # of activations
    name: int(getattr(constants, f"PYDET_{name.upper()}"))
    for name in ("silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh", "softplus", "exp")
}
_arithmetics: dict[str, int] = {}
_addresses: dict[type, int] = {}  # of the records of frameworks, by the types that they are of and that live for ever


def arithmetics() -> dict[str, int]:
    """The arithmetics that the library knows, by name."""
    if not _arithmetics:
        _arithmetics.update((name, number) for number, name in enumerate(_native.arithmetic_names()))
    return _arithmetics


# ---- The hooks -------------------------------------------------------------------------------------------------------


def classify(x: Any, op: str, name: str) -> int:
    """The record of an object's framework. Of classes only NumPy's and PyTorch's own are remembered: others may go."""
    framework = framework_of(x, op, name)
    if isinstance(framework, NumPy):
        exchange.numpy_empty = _handle(sys.modules["numpy"].empty)
        exchange.numpy_dtypes[0], exchange.numpy_dtypes[2] = _handle(numpy_dtype(0)), _handle(numpy_dtype(2))
    if isinstance(framework, Torch):
        torch = sys.modules["torch"]
        exchange.is_neg, exchange.forward_ad = _handle(torch.Tensor.is_neg), _handle(torch.autograd.forward_ad)
        exchange.records = _handle(torch.is_grad_enabled)
    if isinstance(framework, (NumPy, Torch)):
        _addresses[type(x)] = framework.address
    return framework.address


def borrow(x: Any, op: str, name: str, written: int) -> tuple[int, Any]:
    """Describes an object that the library does not read itself."""
    if exchange.numpy_dtypes[1] == ffi.NULL and "ml_dtypes" in sys.modules and "numpy" in sys.modules:
        for index, dtype in enumerate(TYPES):  # the next array of these it does
            if index != 0 and hasattr(sys.modules["ml_dtypes"], dtype):
                exchange.numpy_dtypes[index] = _handle(numpy_dtype(index))
    return framework_of(x, op, name).borrow(x, f"{op}: {name}", bool(written))


def unknown(given: Any, op: str, name: str) -> int:
    """Looks a name up, and refuses one that there is not with those that there are."""
    tables = {"mode": MODES, "granularity": GRANULARITIES, "order": ORDERS, "kind": KINDS}
    known = tables.get(name) or arithmetics()
    if not isinstance(given, str) or given not in known:
        words = repr(given) if isinstance(given, (str, int)) else type_name(given)
        fail(INVALID_VALUE, f"{op}: {name} is {words}, want one of {', '.join(known)}")
    return known[given]


def flag(given: Any, op: str, name: str) -> bool:
    """The truth of what is neither True nor False: of 0, 1 and NumPy's own two."""
    numpy = sys.modules.get("numpy")
    if (type(given) is int and given in (0, 1)) or (numpy and isinstance(given, numpy.bool_)):
        return bool(given)
    fail(INVALID_VALUE, f"{op}: {name} is {type_name(given)}, want True or False")


def mixed(op: str, known_name: str, known: Any, name: str, x: Any) -> NoReturn:
    """Refuses operands of two frameworks."""
    words = f"{name} is {type_name(x)} and {known_name} is {type_name(known)}"
    raise _native.InvalidType(f"{op}: {words}, want all of one framework", INVALID_VALUE)


def allocate(like: Any, shape: tuple[int, ...], index: int, op: str) -> Any:
    """Makes a result that the library does not make itself."""
    return framework_of(like, op, "the first operand").allocate(like, shape, index, op)


def scratch(like: Any, device_type: int, size: int, op: str) -> tuple[int, Any]:
    """Memory of the CPU for a bare carrier; on a GPU only a framework has an allocator that knows the stream."""
    if device_type in GPU:
        fail(INVALID_VALUE, f"{op}: pydet does not know how to make a workspace for {type_name(like)} on a GPU")
    memory = ffi.new("char[]", size)
    return int(ffi.cast("uintptr_t", memory)), memory


def adopt(like: Any, result: Any) -> Any:
    """What the caller gets of a result that was made as something else."""
    return framework_of(like, "pydet", "the first operand").adopt(like, result)


def stream(like: Any, device_type: int, device_id: int) -> int:
    """The framework's current stream."""
    return framework_of(like, "pydet", "the first operand").stream(like, device_type, device_id)


def load(device_type: int, op: str) -> None:
    """Loads the library that serves a device, and hands over its functions: all of them are there before it is."""
    index = (constants.PYDET_EXCHANGE_CPU, constants.PYDET_EXCHANGE_ROCM, constants.PYDET_EXCHANGE_CUDA)[
        0 if device_type not in GPU else 1 if device_type == constants.PYDET_ROCM else 2
    ]
    library, problem = _native.try_load(index)
    if library is None:
        fail(UNSUPPORTED, f"{op}: {problem}")
    own, _ = _native.try_load(constants.PYDET_EXCHANGE_CPU)  # whose methods these are
    functions, operations = _functions(library)
    if own is None or operations != _functions(own)[1]:
        fail(UNSUPPORTED, f"{op}: {library.path} has other operations than the library of the CPU; build both anew")
    exchange.libraries[index] = functions


def _functions(library: _native.Library) -> tuple[Any, int]:
    """What the methods call in a library; and the number that says which operations it has, 0 of an older build."""
    number = ffi.new("uint32_t *")
    try:
        return library.lib.pydet_exchange_functions(number), int(number[0])
    except (AttributeError, ffi.error):
        return ffi.NULL, 0


# ---- The table -------------------------------------------------------------------------------------------------------

exchange: Any = ffi.new("pydet_exchange *")
_native.keep_for_ever(exchange)


def _handle(x: Any) -> Any:
    """A PyObject pointer, to an object that from now on lives for ever."""
    _native.keep_for_ever(x)
    return ffi.cast("void *", id(x))


def _interpreter() -> int:
    """The number of this interpreter, of those of the process."""
    current, number = ctypes.pythonapi["PyInterpreterState_Get"], ctypes.pythonapi["PyInterpreterState_GetID"]
    current.restype, number.argtypes, number.restype = ctypes.c_void_p, [ctypes.c_void_p], ctypes.c_int64
    return int(number(current()))


def _fill_exchange() -> None:
    exchange.struct_size = ffi.sizeof("pydet_exchange")
    exchange.interpreter = _interpreter()
    for name, member in ffi.typeof("pydet_exchange_python").fields:
        address = ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value
        setattr(exchange.python, name, ffi.cast(member.type, address))
    exchange.none, exchange.yes, exchange.no = map(_handle, (None, True, False))
    exchange.requires_grad, exchange.current_level, exchange.dtype = (
        _handle(sys.intern(name)) for name in ("requires_grad", "_current_level", "dtype")
    )
    exchange.frameworks, exchange.arithmetics, exchange.modes = map(_handle, (_addresses, _arithmetics, MODES))
    exchange.granularities, exchange.orders, exchange.kinds = map(_handle, (GRANULARITIES, ORDERS, KINDS))
    hooks: dict[str, Callable[..., Any]] = {
        "classify": classify,
        "borrow": borrow,
        "unknown": unknown,
        "flag": flag,
        "check": check_torch,
        "unreadable": unreadable_torch,
        "mixed": mixed,
        "allocate": allocate,
        "scratch": scratch,
        "adopt": adopt,
        "stream": stream,
        "load": load,
        "fail": fail,
    }
    for name, hook in hooks.items():
        setattr(exchange, name, _handle(hook))


# ---- The library's methods -------------------------------------------------------------------------------------------

_present: dict[str, Callable[..., Any]] = {}


def _methods() -> tuple[dict[str, Callable[..., Any]], str]:
    """The methods of the library that serves the CPU, or why there are none.

    They become builtin functions of Python, called without ctypes or cffi.
    """
    if _present:
        return _present, ""
    library, problem = _native.try_load(constants.PYDET_EXCHANGE_CPU)
    if library is None:
        return {}, problem
    try:
        table = library.lib.pydet_exchange_methods(exchange)
    except (AttributeError, ffi.error):
        return {}, f"{library.path} was built for another release of this Python package; build both anew"
    if table == ffi.NULL:
        return {}, f"{library.path}: {_native.text(library.lib.pydet_last_error())}"
    new = ctypes.pythonapi["PyCFunction_NewEx"]
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], ctypes.py_object
    method, methods = table, {}
    while method.name != ffi.NULL:
        for place, name in enumerate(_native.text(method.arguments).split(", ")):
            method.names[place] = _handle(sys.intern(name))  # as the keywords of a call are
        methods[_native.text(method.name)] = new(int(ffi.cast("uintptr_t", method)), None, None)
        method += 1
    _present.update(methods)
    return _present, ""


def _absent(name: str) -> Callable[..., Any]:
    """Stands for a method while there is no library: loads one if there is by now, else says why there is none."""

    def call(*arguments: Any, **options: Any) -> Any:
        present, problem = _methods()
        if not present:
            fail(UNSUPPORTED, f"{name}: {problem}")
        return present[name](*arguments, **options)

    call.__name__ = name
    return call


def methods(names: tuple[str, ...]) -> list[Callable[..., Any]]:
    """The named methods, with the arguments that ``native/ops/*/python.cpp`` lists: the first by place, others by name.

    Without a library each raises, when it is called, the sentence that says what was sought.
    """
    present, _ = _methods()
    return [present[name] if present else _absent(name) for name in names]


def on_stream(method: Callable[..., Any], like: Any, stream: Any) -> Callable[..., Any]:
    """The method, run on the caller's stream: there its framework allocates, and there the work goes."""
    address = stream_address(stream)

    def call(*arguments: Any, **options: Any) -> Any:
        framework = framework_of(like, method.__name__, "the first operand")
        with framework.scope(like, address), running_on(address):
            return method(*arguments, stream=address, **options)

    return call


_fill_exchange()
