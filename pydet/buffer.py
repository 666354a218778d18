"""Tensors of any framework: how each is read in place, and how results are made in the caller's own framework.

NumPy arrays, and tensors of frameworks with the DLPack C exchange API, are read by the library itself
(``native/entry/python.cpp``); this module tells it how, and reads everything else. Nothing is copied, and no framework
is imported that the caller has not imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from pydet import _native
from pydet._native import INVALID_DEVICE, INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail, ffi

# Element types as native/types.h has them, in its order: an index into these is a type index. A test compares the two.
TYPES = ("float32", "bfloat16", "float16")
DTYPES = ((constants.PYDET_FLOAT, 32), (constants.PYDET_BFLOAT, 16), (constants.PYDET_FLOAT, 16))  # DLPack's code, bits
_BRIEF = ("fp32", "bf16", "fp16")  # other names that a dtype may be given by
_TYPE_OF = {name: index for names in (TYPES, _BRIEF) for index, name in enumerate(names)}
_CODES = {"f": constants.PYDET_FLOAT, "i": 0, "u": 1, "c": 5, "b": 6}  # a typestr's kind -> DLPack's dtype code
_GPU = (constants.PYDET_CUDA, constants.PYDET_CUDA_MANAGED, constants.PYDET_ROCM)
_OTHER_BYTE_ORDER = ">" if sys.byteorder == "little" else "<"
_READ_ONLY, _COPIED = 1, 2  # flags of a DLManagedTensorVersioned

_override = threading.local()  # .stream: the address that the caller's stream= named, while its call runs


def type_index(dtype: Any) -> int:
    """The type index of a dtype: its name, or the object that NumPy, PyTorch, JAX or CuPy has for it."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    index = _TYPE_OF.get(name.rpartition(".")[2])
    if index is None:
        fail(INVALID_DTYPE, f"dtype is {dtype!r}, want one of {', '.join(TYPES)}")
    return index


def type_name(x: Any) -> str:
    """What to call an object's type in a sentence: numpy.ndarray, torch.Tensor, list."""
    kind = type(x)
    root = kind.__module__.partition(".")[0]
    return kind.__qualname__ if root == "builtins" else f"{root}.{kind.__qualname__}"


# ---- Descriptors -----------------------------------------------------------------------------------------------------


def _describe(
    where: str,
    address: int,
    device: tuple[int, int],
    dtype: tuple[int, int],
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    owner: Any,
) -> tuple[int, Any]:
    """A pydet_tensor as (its address, what must live as long as it is used). Strides are in bytes here."""
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


def _interface_dtype(where: str, x: Any, typestr: str) -> tuple[int, int]:
    """The (code, bits) of an array-interface typestr. bfloat16 shows as 2 bytes of nothing, so the dtype is asked."""
    order, kind, size = typestr[0], typestr[1], int(typestr[2:] or 0)
    name = getattr(getattr(x, "dtype", None), "name", None)
    if order == _OTHER_BYTE_ORDER and size > 1:
        fail(INVALID_DTYPE, f"{where} is {name or typestr} in the byte order of another machine")
    if kind == "V" and name == "bfloat16":
        return constants.PYDET_BFLOAT, 16
    if kind not in _CODES or size not in (1, 2, 4, 8, 16):
        fail(INVALID_DTYPE, f"{where} is {name or typestr}, want float32, bfloat16 or float16")
    return _CODES[kind], 8 * size


def _by_interface(
    where: str, x: Any, interface: dict[str, Any], written: bool, device: tuple[int, int]
) -> tuple[int, Any]:
    """Reads an __array_interface__ or a __cuda_array_interface__."""
    try:
        if interface.get("mask") is not None:
            fail(INVALID_VALUE, f"{where} has a mask, which is not supported")
        address, read_only = interface["data"]
        if written and read_only:
            fail(INVALID_VALUE, f"{where} is read-only")
        dtype = _interface_dtype(where, x, interface["typestr"])
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        return _describe(where, address or 0, device, dtype, shape, strides, (x, interface))
    except _native.Error:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as problem:
        fail(INVALID_VALUE, f"{where} has an array interface that makes no sense: {problem!r}")


def _capsule(name: bytes) -> Callable[[Any], int | None]:
    """A function from a capsule of this name to the address in it, or None for any other object."""
    valid, pointer = ctypes.pythonapi["PyCapsule_IsValid"], ctypes.pythonapi["PyCapsule_GetPointer"]
    valid.argtypes = pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer.restype = ctypes.c_void_p
    return lambda capsule: pointer(capsule, name) if valid(capsule, name) else None


_unversioned, _versioned = _capsule(b"dltensor"), _capsule(b"dltensor_versioned")
_exchange_api = _capsule(b"dlpack_exchange_api")


def _by_dlpack(where: str, x: Any, written: bool, stream: int | None) -> tuple[int, Any]:
    """Reads what x.__dlpack__() gives, in place. The capsule keeps its name, so it frees what it holds when dropped."""
    keywords = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = x.__dlpack__(max_version=(1, 3), **keywords)
        except TypeError:  # a producer from before max_version
            capsule = x.__dlpack__(**keywords)
    except (BufferError, TypeError, ValueError, RuntimeError, AttributeError) as problem:
        fail(INVALID_VALUE, f"{where} cannot be read by DLPack: {problem}")
    if address := _unversioned(capsule):
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


def _cuda_device(address: int) -> int:
    """The device that holds an address, as the driver knows it."""
    ordinal, which = ctypes.c_int(0), 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuPointerGetAttribute(ctypes.byref(ordinal), which, ctypes.c_uint64(address))
    return ordinal.value


class Memory:
    """Elements as their bits: a NumPy array of uint16 or uint32 read as a type that NumPy may not have."""

    def __init__(self, bits: Any, index: int) -> None:
        self.bits, self.index = bits, index


# ---- Frameworks ------------------------------------------------------------------------------------------------------


class Framework:
    """How tensors of one framework are read and made. This one: a bare carrier of memory, which goes with any other."""

    name = ""
    number = 0
    reader = constants.PYDET_EXCHANGE_HOOK
    torch = adopts = False

    def __init__(self, kind: type) -> None:
        self.record = ffi.new("pydet_exchange_framework *")
        self.setup(kind)
        self.record.id, self.record.reader = self.number, self.reader
        self.record.torch, self.record.adopts = self.torch, self.adopts
        self.address = int(ffi.cast("uintptr_t", self.record))

    def setup(self, kind: type) -> None:
        """Looks at the type, once."""

    def borrow(self, x: Any, where: str, written: bool) -> tuple[int, Any]:
        """(the address of a pydet_tensor, what keeps it alive)."""
        if isinstance(x, Memory):
            address, dtype = x.bits.__array_interface__["data"][0], DTYPES[x.index]
            return _describe(where, address, (constants.PYDET_CPU, 0), dtype, x.bits.shape, x.bits.strides, x.bits)
        if hasattr(x, "__dlpack__"):
            on_gpu = hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) in _GPU
            return _by_dlpack(where, x, written, self.producer_stream(x) if on_gpu else None)
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is not None:
            data = interface.get("data")
            device = _cuda_device(data[0]) if isinstance(data, tuple) and data[0] else 0
            return _by_interface(where, x, interface, written, (constants.PYDET_CUDA, device))
        return _by_interface(where, x, x.__array_interface__, written, (constants.PYDET_CPU, 0))

    def producer_stream(self, x: Any) -> int:
        """The stream for __dlpack__ to make ready: the one that the operation will run on."""
        kind, number = map(int, x.__dlpack_device__())
        stream: int | None = getattr(_override, "stream", None)
        if stream is None:
            stream = self.stream(x, kind, number)
        legacy_default = 0 if kind == constants.PYDET_ROCM else 1
        return stream or legacy_default

    def stream(self, like: Any, device_type: int, device_id: int) -> int:
        """The address of the framework's current stream."""
        interface = getattr(like, "__cuda_array_interface__", None) or {}
        return interface.get("stream") or 0

    def scope(self, like: Any, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Makes a stream the framework's current one, so that what it allocates belongs to that stream."""
        return contextlib.nullcontext()

    def allocate(self, like: Any, shape: tuple[int, ...], index: int, op: str) -> Any:
        """A new tensor, uninitialised, on like's device."""
        fail(
            INVALID_VALUE,
            f"{op}: pydet does not know how to make a result like {type_name(like)}; give every output (out=), "
            "or pass NumPy, PyTorch, JAX or CuPy tensors",
        )

    def adopt(self, like: Any, result: Any) -> Any:
        """What the caller gets for a result of `allocate`."""
        return result


class NumPy(Framework):
    """numpy.ndarray. Arrays of our three types are read by the library; this reads the rest, for their sentences."""

    name = "numpy"
    number = 1
    reader = constants.PYDET_EXCHANGE_ARRAY

    def setup(self, kind: type) -> None:
        """Tells the library of numpy.empty and of the dtypes that there are."""
        import numpy

        exchange.numpy_empty = _handle(numpy.empty)
        exchange.numpy_dtypes[0] = _handle(numpy.dtype(numpy.float32))
        exchange.numpy_dtypes[2] = _handle(numpy.dtype(numpy.float16))
        if "ml_dtypes" in sys.modules:
            exchange.numpy_dtypes[1] = _handle(numpy_dtype(1))

    def borrow(self, x: Any, where: str, written: bool) -> tuple[int, Any]:
        """By __array_interface__, which has every array."""
        if type(x).__name__ == "MaskedArray":
            fail(INVALID_VALUE, f"{where} is a masked array, which is not supported; use .filled() or .data")
        if x.dtype.name == "bfloat16" and exchange.numpy_dtypes[1] == ffi.NULL and "ml_dtypes" in sys.modules:
            exchange.numpy_dtypes[1] = _handle(numpy_dtype(1))
        return _by_interface(where, x, x.__array_interface__, written, (constants.PYDET_CPU, 0))

    def allocate(self, like: Any, shape: tuple[int, ...], index: int, op: str) -> Any:
        """numpy.empty."""
        import numpy

        return numpy.empty(shape, numpy_dtype(index, op))


class Torch(Framework):
    """torch.Tensor: by the exchange API where there is one (torch 2.10), else by __dlpack__."""

    name = "torch"
    number = 2
    torch = True

    def setup(self, kind: type) -> None:
        """Takes the exchange API of the type itself; a subclass with a dispatch of its own is looked at by `borrow`."""
        torch = sys.modules["torch"]
        exchange.is_neg = _handle(torch.Tensor.is_neg)
        api = _exchange_api(getattr(kind, "__dlpack_c_exchange_api__", None))
        if api and kind in (torch.Tensor, torch.nn.Parameter) and _complete(api):
            self.reader = constants.PYDET_EXCHANGE_API
            self.record.api = ffi.cast("void *", api)

    def borrow(self, x: Any, where: str, written: bool) -> tuple[int, Any]:
        """By __dlpack__, for subclasses and for releases without the exchange API."""
        op, _, name = where.partition(": ")
        check_torch(x, op, name)
        torch = sys.modules["torch"]
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            unreadable_torch(x, op, name)
        plain = x.detach().as_subclass(torch.Tensor)
        if plain.layout is not torch.strided or plain.is_meta:
            unreadable_torch(x, op, name)
        return _by_dlpack(where, plain, written, -1 if plain.is_cuda else None)

    def stream(self, like: Any, device_type: int, device_id: int) -> int:
        """torch.cuda.current_stream."""
        return int(sys.modules["torch"].cuda.current_stream(device_id).cuda_stream)

    def scope(self, like: Any, stream: int) -> contextlib.AbstractContextManager[Any]:
        """torch.cuda.stream."""
        cuda = sys.modules["torch"].cuda
        if not like.is_cuda:
            return contextlib.nullcontext()
        external = cuda.ExternalStream(stream, device=like.device) if stream else cuda.default_stream(like.device)
        return cuda.stream(external)  # type: ignore[no-any-return]

    def allocate(self, like: Any, shape: tuple[int, ...], index: int, op: str) -> Any:
        """Tensor.new_empty."""
        torch = sys.modules["torch"]
        return like.detach().as_subclass(torch.Tensor).new_empty(shape, dtype=getattr(torch, TYPES[index]))


class Jax(Framework):
    """jax.Array on the CPU. Results are made as aligned NumPy memory, which JAX then takes over without a copy."""

    name = "jax"
    number = 3
    adopts = True

    def borrow(self, x: Any, where: str, written: bool) -> tuple[int, Any]:
        """By __dlpack__, which in JAX neither flags read-only memory nor waits for a stream of the CPU."""
        if written:
            fail(INVALID_DTYPE, f"{where} is a jax array, and those are immutable; take the result instead")
        if not hasattr(x, "__dlpack__") or "Tracer" in type(x).__name__:
            fail(INVALID_DTYPE, f"{where} is {type_name(x)}, which has no memory; use pydet.jax under jit and grad")
        if any(device.platform != "cpu" for device in x.devices()):
            fail(INVALID_DEVICE, f"{where} is a jax array on a GPU, whose stream jax does not tell; use pydet.jax")
        return _by_dlpack(where, x, written, None)

    def allocate(self, like: Any, shape: tuple[int, ...], index: int, op: str) -> Any:
        """NumPy memory with the 64-byte alignment that XLA asks for."""
        import numpy

        dtype = numpy_dtype(index, op)
        size, align = int(numpy.prod(shape, dtype=object)) * dtype.itemsize, 64
        room = numpy.empty(size + align, numpy.uint8)
        start = -room.ctypes.data % align
        return room[start : start + size].view(dtype).reshape(shape)

    def adopt(self, like: Any, result: Any) -> Any:
        """A jax.Array of that memory, on like's device."""
        jax = sys.modules["jax"]
        array = jax.dlpack.from_dlpack(_Export(result)) if result.size else jax.numpy.asarray(result)
        device = next(iter(like.devices()))
        return array if array.devices() == {device} else jax.device_put(array, device)


class _Export:
    """A NumPy array offered by DLPack as what it is; NumPy itself refuses bfloat16."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return int(constants.PYDET_CPU), 0

    def __dlpack__(self, **keywords: Any) -> Any:
        import numpy

        if self.array.dtype.name != "bfloat16":
            return self.array.__dlpack__()
        capsule = self.array.view(numpy.uint16).__dlpack__()
        ffi.cast("pydet_tensor *", _unversioned(capsule)).dtype.code = constants.PYDET_BFLOAT
        return capsule


class Cupy(Framework):
    """cupy.ndarray."""

    name = "cupy"
    number = 4

    def producer_stream(self, x: Any) -> int:
        """CuPy's own current stream needs no synchronisation."""
        return -1

    def stream(self, like: Any, device_type: int, device_id: int) -> int:
        """cupy.cuda.get_current_stream."""
        return int(sys.modules["cupy"].cuda.get_current_stream(device_id).ptr)

    def scope(self, like: Any, stream: int) -> contextlib.AbstractContextManager[Any]:
        """cupy.cuda.ExternalStream."""
        return sys.modules["cupy"].cuda.ExternalStream(stream, like.device.id)  # type: ignore[no-any-return]

    def allocate(self, like: Any, shape: tuple[int, ...], index: int, op: str) -> Any:
        """cupy.empty."""
        with like.device:
            return sys.modules["cupy"].empty(shape, numpy_dtype(index, op))


_FRAMEWORKS = {
    ("numpy", "ndarray"): NumPy,
    ("torch", "Tensor"): Torch,
    ("jax", "Array"): Jax,
    ("jax", "Tracer"): Jax,
    ("jaxlib", "ArrayImpl"): Jax,
    ("cupy", "ndarray"): Cupy,
}
_PROTOCOLS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
_frameworks: dict[type, Framework] = {}
_addresses: dict[type, int] = {}  # the same, as the library reads them


def numpy_dtype(index: int, op: str = "pydet") -> Any:
    """The NumPy dtype of a type index."""
    import numpy

    if TYPES[index] != "bfloat16":
        return numpy.dtype(TYPES[index])
    try:
        import ml_dtypes
    except ImportError:
        fail(INVALID_DTYPE, f"{op}: bfloat16 in NumPy needs the package ml_dtypes, which is not installed")
    return numpy.dtype(ml_dtypes.bfloat16)


def _complete(api: int) -> bool:
    """The exchange API is of DLPack 1 and has every function that the library calls."""
    words = ffi.cast("uintptr_t *", api)
    return ffi.cast("uint32_t *", api)[0] == 1 and all(words[i] for i in range(2, 7))  # after version and prev_api


def framework_of(x: Any, op: str, name: str) -> Framework:
    """The framework of an object's type; a sentence for what is no tensor at all."""
    kind = type(x)
    if kind not in _frameworks:
        for base in kind.__mro__:
            framework = _FRAMEWORKS.get((base.__module__.partition(".")[0], base.__name__))
            if framework:
                break
        else:
            if not isinstance(x, Memory) and not any(hasattr(x, protocol) for protocol in _PROTOCOLS):
                want = "want a tensor (DLPack, __cuda_array_interface__ or __array_interface__)"
                raise _native.InvalidType(f"{op}: {name} is {type_name(x)}, {want}", INVALID_VALUE)
            framework = Framework
        if framework is NumPy and any(base.__name__ == "MaskedArray" for base in kind.__mro__):
            fail(INVALID_VALUE, f"{op}: {name} is a masked array, which is not supported; use .filled() or .data")
        _frameworks[kind] = framework(kind)
        _addresses[kind] = _frameworks[kind].address
    return _frameworks[kind]


# ---- Streams ---------------------------------------------------------------------------------------------------------


def stream_address(stream: Any) -> int:
    """The address of a stream: an integer, or an object with __cuda_stream__, .cuda_stream (torch) or .ptr (cupy)."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        described = stream.__cuda_stream__
        return int((described() if callable(described) else described)[1])
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise _native.InvalidType(
        f"stream is {type_name(stream)}, want an address or an object with __cuda_stream__", INVALID_VALUE
    )


def on_stream(method: Callable[..., Any], like: Any, stream: Any) -> Callable[..., Any]:
    """The method, run on the caller's stream: there its framework allocates, and there the work goes."""
    address = stream_address(stream)

    def call(*arguments: Any) -> Any:
        framework = framework_of(like, method.__name__, "the first operand")
        with framework.scope(like, address), _stream_override(address):
            return method(*arguments[:-1], address)

    return call


@contextlib.contextmanager
def _stream_override(address: int) -> Iterator[None]:
    _override.stream = address
    try:
        yield
    finally:
        _override.stream = None


# ---- Hooks of the library (entry/python.h) ---------------------------------------------------------------------------


def classify(x: Any, op: str, name: str) -> int:
    """`classify` of entry/python.h."""
    return framework_of(x, op, name).address


def borrow(x: Any, op: str, name: str, written: int) -> tuple[int, Any]:
    """`borrow` of entry/python.h."""
    return framework_of(x, op, name).borrow(x, f"{op}: {name}", bool(written))


def check_torch(x: Any, op: str, name: str) -> None:
    """`check` of entry/python.h: what a torch tensor means beyond its memory."""
    torch = sys.modules["torch"]
    if x.requires_grad and torch.is_grad_enabled():
        fail(
            INVALID_VALUE,
            f"{op}: {name} requires grad, and this records no gradient; use pydet.torch for autograd, or .detach()",
        )
    for lazy in ("conj", "neg"):
        if getattr(x, f"is_{lazy}")():
            fail(INVALID_VALUE, f"{op}: {name} is a lazy {lazy} view of its memory; call .resolve_{lazy}() first")


def unreadable_torch(x: Any, op: str, name: str) -> NoReturn:
    """`unreadable` of entry/python.h: why the memory of a torch tensor cannot be had."""
    torch = sys.modules["torch"]
    if type(x).__name__ == "FakeTensor" or getattr(x, "is_meta", False):
        reason = f"a {'FakeTensor' if type(x).__name__ == 'FakeTensor' else 'meta tensor'}, which has no memory"
    elif x.layout is not torch.strided:
        reason = f"a tensor of layout {str(x.layout).removeprefix('torch.')}, want a strided one"
    elif type(x) not in (torch.Tensor, torch.nn.Parameter):
        reason = f"{type_name(x)}, a tensor subclass with a dispatch of its own"
    else:
        try:
            torch.utils.dlpack.to_dlpack(x)
            reason = "a tensor whose memory cannot be read"
        except Exception as problem:  # whatever torch raises, its words are the reason
            reason = f"a tensor that torch does not export: {problem}"
    fail(INVALID_VALUE, f"{op}: {name} is {reason}")


def unknown(given: Any, op: str, name: str) -> int:
    """`unknown` of entry/python.h: looks a name up, and refuses one that there is not with those that there are."""
    known = MODES if name == "mode" else arithmetics()
    if not isinstance(given, str) or given not in known:
        fail(INVALID_VALUE, f"{op}: {name} is {given!r}, want one of {', '.join(known)}")
    return known[given]


def mixed(op: str, known_name: str, known: Any, name: str, x: Any) -> NoReturn:
    """`mixed` of entry/python.h."""
    words = f"{name} is {type_name(x)} and {known_name} is {type_name(known)}"
    raise _native.InvalidType(f"{op}: {words}, want all of one framework", INVALID_VALUE)


def allocate(like: Any, shape: tuple[int, ...], index: int, op: str) -> Any:
    """`allocate` of entry/python.h."""
    return framework_of(like, op, "the first operand").allocate(like, shape, index, op)


def scratch(like: Any, device_type: int, size: int, op: str) -> tuple[int, Any]:
    """`scratch` of entry/python.h: memory of the CPU; on a GPU only a framework's allocator knows the stream."""
    if device_type in _GPU:
        fail(INVALID_VALUE, f"{op}: pydet does not know how to make a workspace for {type_name(like)} on a GPU")
    memory = ffi.new("char[]", size)
    return int(ffi.cast("uintptr_t", memory)), memory


def adopt(like: Any, result: Any) -> Any:
    """`adopt` of entry/python.h."""
    return framework_of(like, "pydet", "the first operand").adopt(like, result)


def stream(like: Any, device_type: int, device_id: int) -> int:
    """`stream` of entry/python.h."""
    return framework_of(like, "pydet", "the first operand").stream(like, device_type, device_id)


def load(device_type: int, op: str) -> None:
    """`load` of entry/python.h."""
    index = (constants.PYDET_EXCHANGE_CPU, constants.PYDET_EXCHANGE_ROCM, constants.PYDET_EXCHANGE_CUDA)[
        0 if device_type not in _GPU else 1 if device_type == constants.PYDET_ROCM else 2
    ]
    library, problem = _native.try_load(index)
    if library is None:
        fail(UNSUPPORTED, f"{op}: {problem}")
    table = exchange.libraries[index]
    for member, _ in ffi.typeof("pydet_exchange_library").fields:
        setattr(table, member, ffi.addressof(library.lib, f"pydet_{member}"))


# ---- The library's methods -------------------------------------------------------------------------------------------

MODES = {"deterministic": int(constants.PYDET_DETERMINISTIC), "fast": int(constants.PYDET_FAST)}
_arithmetics: dict[str, int] = {}


def arithmetics() -> dict[str, int]:
    """The arithmetics that the library knows, by name."""
    if not _arithmetics:
        _arithmetics.update((name, number) for number, name in enumerate(_native.arithmetic_names()))
    return _arithmetics


exchange: Any = ffi.new("pydet_exchange *")
_native.keep_for_ever(exchange)


def _handle(x: Any) -> Any:
    """A PyObject pointer, to an object that from now on lives for ever."""
    _native.keep_for_ever(x)
    return ffi.cast("void *", id(x))


def _fill_exchange() -> None:
    exchange.struct_size = ffi.sizeof("pydet_exchange")
    for name, member in ffi.typeof("pydet_exchange_python").fields:
        address = ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value
        setattr(exchange.python, name, ffi.cast(member.type, address))
    exchange.none = _handle(None)
    exchange.requires_grad, exchange.base, exchange.dtype = map(_handle, ("requires_grad", "_base", "dtype"))
    exchange.frameworks, exchange.arithmetics, exchange.modes = map(_handle, (_addresses, _arithmetics, MODES))
    hooks: dict[str, Callable[..., Any]] = {
        "classify": classify,
        "borrow": borrow,
        "unknown": unknown,
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


def _methods() -> tuple[dict[str, Callable[..., Any]], str]:
    """The methods of the library that serves the CPU, or why there are none.

    They become builtin functions of Python, called without ctypes or cffi.
    """
    library, problem = _native.try_load(constants.PYDET_EXCHANGE_CPU)
    if library is None:
        return {}, problem
    try:
        table = library.lib.pydet_exchange_methods(exchange)
    except (AttributeError, ffi.error):
        table = ffi.NULL
    if table == ffi.NULL:
        return {}, f"{library.path} was built for another release of this Python package; build both anew"
    new = ctypes.pythonapi["PyCFunction_NewEx"]
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], ctypes.py_object
    method, methods = ffi.cast("const char **", table), {}
    words = 4  # of a PyMethodDef: name, function, flags, documentation
    while method[0] != ffi.NULL:
        methods[_native.text(method[0])] = new(int(ffi.cast("uintptr_t", method)), None, None)
        method += words
    return methods, ""


def _absent(name: str) -> Callable[..., Any]:
    """Stands for a method while there is no library: loads one if there is by now, else says why there is none."""

    def call(*arguments: Any) -> Any:
        present, problem = _methods()
        if not present:
            fail(UNSUPPORTED, f"{name}: {problem}")
        return present[name](*arguments)

    call.__name__ = name
    return call


def methods(names: tuple[str, ...]) -> list[Callable[..., Any]]:
    """The named methods. Without a library each raises, when it is called, the sentence that says what was sought."""
    present, _ = _methods()
    return [present[name] if present else _absent(name) for name in names]


_fill_exchange()
