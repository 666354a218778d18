"""Reading the memory of an object in place, by the protocols that it has: DLPack and the array interfaces.

Each reader returns the address of a ``pydet_tensor`` and what keeps it alive. Nothing is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from typing import Any

from pydet import _native
from pydet._native import INVALID_DTYPE, INVALID_VALUE, constants, fail, ffi

# Element types as native/contract/types.h has them, in its order: an index into these is a type index. A test compares
# the two.
TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
UNSCALED = TYPES[:3]  # of gemm and the norms: all but the types of scaled_gemm
DTYPES = (  # DLPack's code, bits
    (constants.PYDET_FLOAT, 32),
    (constants.PYDET_BFLOAT, 16),
    (constants.PYDET_FLOAT, 16),
    (constants.PYDET_FLOAT8_E4M3FN, 8),
    (constants.PYDET_FLOAT8_E5M2, 8),
    (constants.PYDET_FLOAT8_E8M0FNU, 8),
)
RESULTS = (*TYPES, "int64")  # of what is made for the library: behind the type indices are whole numbers
BRIEF = ("fp32", "bf16", "fp16", "e4m3", "e5m2", "e8m0")  # other names that a dtype may be given by
CPU = (constants.PYDET_CPU, 0)
_CODES = {"f": constants.PYDET_FLOAT, "i": 0, "u": 1, "c": 5, "b": 6}  # a typestr's kind -> DLPack's dtype code
_OTHER_BYTE_ORDER = ">" if sys.byteorder == "little" else "<"
_READ_ONLY, _COPIED = 1, 2  # flags of a DLManagedTensorVersioned
NAMES = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")  # of the protocols


def root_of(kind: type) -> str:
    """The package that a class says it is from; "" where it says nonsense."""
    module = getattr(kind, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def type_name(x: Any) -> str:
    """What to call an object's type in a sentence: numpy.ndarray, torch.Tensor, list."""
    root, name = root_of(type(x)), type(x).__qualname__
    return name if root in ("", "builtins") else f"{root}.{name}"


class Memory:
    """Elements as their bits: a NumPy array of uint16 or uint32 read as a type that NumPy may not have."""

    def __init__(self, bits: Any, index: int) -> None:
        self.bits, self.index = bits, index

    def describe(self, where: str) -> tuple[int, Any]:
        """The bits as a tensor of the type."""
        bits, dtype = self.bits, DTYPES[self.index]
        return _describe(where, bits.__array_interface__["data"][0], CPU, dtype, bits.shape, bits.strides, bits)


def _describe(
    where: str,
    address: int,
    device: tuple[int, int],
    dtype: tuple[int, int],
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    owner: Any,
) -> tuple[int, Any]:
    """A pydet_tensor of these members, strides in bytes."""
    code, bits = dtype
    extents = ffi.new("int64_t[]", shape)
    steps = ffi.NULL
    if strides is not None:
        size = bits // 8
        if any(step % size for step, extent in zip(strides, shape, strict=True) if extent > 1):
            fail(constants.PYDET_INVALID_STRIDE, f"{where} has strides {strides} in bytes, want multiples of {size}")
        steps = ffi.new("int64_t[]", [step // size for step in strides])
    tensor = ffi.new("pydet_tensor *")
    tensor.data = ffi.cast("void *", address)
    tensor.device.device_type, tensor.device.device_id = device
    tensor.ndim = len(shape)
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1
    tensor.shape, tensor.strides = extents, steps
    return int(ffi.cast("uintptr_t", tensor)), (tensor, extents, steps, owner)


# ---- Array interfaces ------------------------------------------------------------------------------------------------


def _interface_dtype(where: str, x: Any, typestr: str) -> tuple[int, int]:
    """The (code, bits) of an array-interface typestr. Of ml_dtypes it says nothing: the dtype is asked."""
    order, kind, size = typestr[0], typestr[1], int(typestr[2:].partition("[")[0] or 0)  # "<M8[s]", a date
    name = getattr(getattr(x, "dtype", None), "name", None)
    if order == _OTHER_BYTE_ORDER and size > 1:
        fail(INVALID_DTYPE, f"{where} is {name or typestr} in the byte order of another machine")
    if name in TYPES and DTYPES[TYPES.index(name)][1] == 8 * size and (kind == "V" or size == 1):
        return DTYPES[TYPES.index(name)]
    if kind not in _CODES or size not in (1, 2, 4, 8, 16):
        fail(INVALID_DTYPE, f"{where} is {name or typestr}, want {', '.join(TYPES)}")
    return _CODES[kind], 8 * size


def interface_address(where: str, interface: Any) -> tuple[int, Any]:
    """The "data" of an array interface: the address, and whether it is read-only. An object with the buffer protocol,
    which NumPy's interface may have there, is refused: its bytes are no address."""
    if not isinstance(interface, dict):
        fail(INVALID_VALUE, f"{where} has an array interface that is {type_name(interface)}, want a dict")
    data = interface.get("data")
    if not isinstance(data, tuple) or len(data) != 2:
        words = data if isinstance(data, tuple) else type_name(data)
        fail(INVALID_VALUE, f"{where} has an array interface whose data is {words}, want (address, read-only)")
    address, read_only = data
    number = 0 if address is None else address.__index__() if hasattr(address, "__index__") else -1
    if isinstance(address, bool) or not 0 <= number < 1 << 64:
        fail(INVALID_VALUE, f"{where} has an array interface whose data is at {address!r}, want an address")
    return number, read_only


def by_interface(where: str, x: Any, interface: Any, written: bool, device: tuple[int, int]) -> tuple[int, Any]:
    """Reads an __array_interface__ or a __cuda_array_interface__."""
    address, read_only = interface_address(where, interface)
    try:
        if interface.get("mask") is not None:
            fail(INVALID_VALUE, f"{where} has a mask, which is not supported")
        if written and read_only:
            fail(INVALID_VALUE, f"{where} is read-only")
        dtype = _interface_dtype(where, x, interface["typestr"])
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        return _describe(where, address, device, dtype, shape, strides, (x, interface))
    except _native.Error:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as problem:
        fail(INVALID_VALUE, f"{where} has an array interface that makes no sense: {problem!r}")


def cuda_device(address: int) -> int:
    """The device that holds an address, as the driver knows it."""
    ordinal, which = ctypes.c_int(0), 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuPointerGetAttribute(ctypes.byref(ordinal), which, ctypes.c_uint64(address))
    return ordinal.value


# ---- DLPack ----------------------------------------------------------------------------------------------------------


def _capsule(name: bytes) -> Callable[[Any], int | None]:
    """A function from a capsule of this name to the address in it, or None for any other object."""
    valid, pointer = ctypes.pythonapi["PyCapsule_IsValid"], ctypes.pythonapi["PyCapsule_GetPointer"]
    valid.argtypes = pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer.restype = ctypes.c_void_p
    return lambda capsule: pointer(capsule, name) if valid(capsule, name) else None


unversioned, _versioned = _capsule(b"dltensor"), _capsule(b"dltensor_versioned")
_exchange_api = _capsule(b"dlpack_exchange_api")


def exchange_api(kind: type) -> int | None:
    """The address of a type's DLPack C exchange API, if it has one of DLPack 1 with all that the library calls."""
    api = _exchange_api(getattr(kind, "__dlpack_c_exchange_api__", None))
    if not api:
        return None
    words = ffi.cast("uintptr_t *", api)  # the version, prev_api, and the functions
    return api if ffi.cast("uint32_t *", api)[0] == 1 and all(words[i] for i in range(2, 7)) else None


def by_dlpack(where: str, x: Any, written: bool, stream: int | None) -> tuple[int, Any]:
    """Reads what x.__dlpack__() gives, in place. The capsule keeps its name, so it frees what it holds when dropped."""
    keywords = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = x.__dlpack__(max_version=(1, 3), **keywords)
        except TypeError:  # a producer from before max_version
            capsule = x.__dlpack__(**keywords)
    except (BufferError, TypeError, ValueError, RuntimeError, AttributeError) as problem:
        fail(INVALID_VALUE, f"{where} cannot be read by DLPack: {problem}")
    if address := unversioned(capsule):
        tensor = ffi.cast("pydet_tensor *", address)
    elif address := _versioned(capsule):
        major = ffi.cast("uint32_t *", address)[0]
        if major != 1:
            fail(INVALID_VALUE, f"{where} comes as DLPack {major}, want 1")
        owner_and_deleter = 8 + 2 * ffi.sizeof("void *")  # after the version
        flags = ffi.cast("uint64_t *", address + owner_and_deleter)[0]
        if written and flags & (_READ_ONLY | _COPIED):
            fail(INVALID_VALUE, f"{where} is {'read-only' if flags & _READ_ONLY else 'a copy, which nobody would see'}")
        tensor = ffi.cast("pydet_tensor *", address + owner_and_deleter + 8)
    else:
        fail(INVALID_VALUE, f"{where} has a __dlpack__ that gives {type_name(capsule)}, want a fresh DLPack capsule")
    if tensor.ndim > 0 and tensor.shape == ffi.NULL:
        fail(constants.PYDET_NULL_POINTER, f"{where} has no shape")
    return int(ffi.cast("uintptr_t", tensor)), (capsule, x)
