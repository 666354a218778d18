"""The frameworks: who owns an array, how it is read, and how results are made that are the caller's own kind.

NumPy arrays, and tensors of frameworks with the DLPack C exchange API, are read and made by the library itself
(``native/entry/python/``); a Framework tells it so, and does the same for everything else. No framework is imported
that the caller has not imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from pydet import _native
from pydet._native import INVALID_DEVICE, INVALID_DTYPE, INVALID_VALUE, constants, fail, ffi
from pydet.protocols import (
    BRIEF,
    CPU,
    DTYPES,
    NAMES,
    RESULTS,
    TYPES,
    Memory,
    by_dlpack,
    by_interface,
    cuda_device,
    exchange_api,
    interface_address,
    root_of,
    type_name,
    unversioned,
)

GPU = (constants.PYDET_CUDA, constants.PYDET_CUDA_MANAGED, constants.PYDET_ROCM)
_TYPE_OF = {name: index for names in (TYPES, BRIEF) for index, name in enumerate(names)}

_NUMPYS_OWN = ("float32", "float16", "int64")

_override = threading.local()  # .stream: the address that the caller's stream= named, while its call runs


def type_index(dtype: Any, op: str, name: str = "out_dtype") -> int:
    """The type index of a dtype: its name, or the object that NumPy, PyTorch, JAX or CuPy has for it; `op` and `name`
    are the operation's and the argument's, for sentences."""
    text = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    index = _TYPE_OF.get(text.rpartition(".")[2]) if isinstance(text, str) else None
    if index is None:
        fail(INVALID_DTYPE, f"{op}: {name} is {dtype!r}, want one of {', '.join(TYPES)}")
    return index


def numpy_dtype(index: int, op: str = "pydet") -> Any:
    """The NumPy dtype of a type index, or of whole numbers behind them."""
    import numpy

    if RESULTS[index] in _NUMPYS_OWN:
        return numpy.dtype(RESULTS[index])
    try:
        import ml_dtypes
    except ImportError:
        fail(INVALID_DTYPE, f"{op}: {TYPES[index]} in NumPy needs the package ml_dtypes, which is not installed")
    if not hasattr(ml_dtypes, TYPES[index]):
        fail(INVALID_DTYPE, f"{op}: this ml_dtypes has no {TYPES[index]}")
    return numpy.dtype(getattr(ml_dtypes, TYPES[index]))


class Framework:
    """How tensors of one framework are read and made. This one: a bare carrier of memory, which goes with any other.

    There is one object of each class, which the library knows by the address of its record and which is never freed.
    """

    name = ""
    number = 0
    reader = constants.PYDET_EXCHANGE_HOOK
    torch = adopts = False
    api = 0  #: the address of the exchange API, for PYDET_EXCHANGE_API
    genuine = False  #: the class must be the one that its package has under its name, which any class may claim
    of_subclasses: type[Framework] | None = None  #: what reads subclasses of the framework's class, if not this

    def __init__(self) -> None:
        self.record = ffi.new("pydet_exchange_framework *")
        self.record.id, self.record.reader = self.number, self.reader
        self.record.torch, self.record.adopts = self.torch, self.adopts
        self.record.api = ffi.cast("void *", self.api)
        self.address = int(ffi.cast("uintptr_t", self.record))

    def borrow(self, x: Any, where: str, written: bool) -> tuple[int, Any]:
        """(the address of a pydet_tensor, what keeps it alive)."""
        if isinstance(x, Memory):
            return x.describe(where)
        if hasattr(x, "__dlpack__"):
            on_gpu = hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) in GPU
            return by_dlpack(where, x, written, self.producer_stream(x) if on_gpu else None)
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is not None:
            address, _ = interface_address(where, interface)
            device = cuda_device(address) if address else 0
            return by_interface(where, x, interface, written, (constants.PYDET_CUDA, device))
        return by_interface(where, x, x.__array_interface__, written, CPU)

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
        stream = (getattr(like, "__cuda_array_interface__", None) or {}).get("stream")
        return 0 if stream is None else stream_address(stream)

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


class NumPySubclass(Framework):
    """Subclasses of numpy.ndarray, which may say what they like of themselves: read as the array that they are."""

    name = "numpy"
    number = 1

    def borrow(self, x: Any, where: str, written: bool) -> tuple[int, Any]:
        """By the __array_interface__ of the plain array."""
        import numpy

        if any(base.__name__ == "MaskedArray" for base in type(x).__mro__):
            fail(INVALID_VALUE, f"{where} is a masked array, which is not supported; use .filled() or .data")
        plain = numpy.ndarray.view(x, numpy.ndarray)
        return by_interface(where, plain, plain.__array_interface__, written, CPU)

    def allocate(self, like: Any, shape: tuple[int, ...], index: int, op: str) -> Any:
        """numpy.empty."""
        import numpy

        return numpy.empty(shape, numpy_dtype(index, op))


class NumPy(NumPySubclass):
    """numpy.ndarray. The library reads arrays of our three types; `borrow` reads the rest, for their sentences."""

    reader = constants.PYDET_EXCHANGE_ARRAY
    genuine = True
    of_subclasses = NumPySubclass


class TorchSubclass(Framework):
    """torch.Tensor by __dlpack__: of a subclass, or of a release from before the exchange API (torch 2.10)."""

    name = "torch"
    number = 2
    torch = True

    def borrow(self, x: Any, where: str, written: bool) -> tuple[int, Any]:
        """By the __dlpack__ of the plain tensor."""
        op, _, name = where.partition(": ")
        check_torch(x, op, name)
        torch = sys.modules["torch"]
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            unreadable_torch(x, op, name)
        plain = x.detach().as_subclass(torch.Tensor)
        if plain.layout is not torch.strided or plain.is_meta:
            unreadable_torch(x, op, name)
        return by_dlpack(where, plain, written, -1 if plain.is_cuda else None)

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
        return like.detach().as_subclass(torch.Tensor).new_empty(shape, dtype=getattr(torch, RESULTS[index]))


class Torch(TorchSubclass):
    """torch.Tensor and torch.nn.Parameter, by the C exchange API where this PyTorch has one that can be used."""

    genuine = True
    of_subclasses = TorchSubclass

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        api = exchange_api(torch.Tensor)
        if api and hasattr(torch.autograd.forward_ad, "_current_level"):  # which the library asks for tangents
            self.reader, self.api = constants.PYDET_EXCHANGE_API, api
        super().__init__()


def check_torch(x: Any, op: str, name: str) -> None:
    """Refuses a torch tensor that is more than its memory: one that is tracked, lazily changed, or has a tangent."""
    torch = sys.modules["torch"]
    if x.requires_grad and torch.is_grad_enabled():
        fail(
            INVALID_VALUE,
            f"{op}: {name} requires grad, and this records no gradient; use pydet.torch for autograd, or .detach()",
        )
    for lazy in ("conj", "neg"):
        if getattr(x, f"is_{lazy}")():
            fail(INVALID_VALUE, f"{op}: {name} is a lazy {lazy} view of its memory; call .resolve_{lazy}() first")
    forward_ad = torch.autograd.forward_ad
    if getattr(forward_ad, "_current_level", 0) >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        fail(
            INVALID_VALUE,
            f"{op}: {name} has a tangent of forward-mode AD, and this computes none; pass unpack_dual({name}).primal",
        )


def unreadable_torch(x: Any, op: str, name: str) -> NoReturn:
    """Says why the memory of a torch tensor cannot be had."""
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
        return by_dlpack(where, x, written, None)

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
    """A NumPy array offered by DLPack as what it is; NumPy itself refuses the types of ml_dtypes."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return int(constants.PYDET_CPU), 0

    def __dlpack__(self, **keywords: Any) -> Any:
        import numpy

        dtype = self.array.dtype
        if dtype.name in _NUMPYS_OWN:
            return self.array.__dlpack__()
        capsule = self.array.view(numpy.uint16 if dtype.itemsize == 2 else numpy.uint8).__dlpack__()
        code, _ = DTYPES[TYPES.index(dtype.name)]
        ffi.cast("pydet_tensor *", unversioned(capsule)).dtype.code = code
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
        """cupy.empty, of the types that this CuPy has: fp8 is of none so far."""
        cupy, dtype = sys.modules["cupy"], numpy_dtype(index, op)
        try:
            with like.device:
                return cupy.empty(shape, dtype)
        except (TypeError, ValueError):
            said = f"{op}: the result is {dtype}, which CuPy {cupy.__version__} does not have"
            fail(INVALID_DTYPE, f"{said}; pass PyTorch tensors of the same memory (torch.from_dlpack)")


# ---- Which framework an object is of ---------------------------------------------------------------------------------

FRAMEWORKS: dict[tuple[str, str], type[Framework]] = {  # by the package and the name of a class
    ("numpy", "ndarray"): NumPy,
    ("torch", "Parameter"): Torch,
    ("torch", "Tensor"): Torch,
    ("jax", "Array"): Jax,
    ("jax", "Tracer"): Jax,
    ("jaxlib", "ArrayImpl"): Jax,
    ("cupy", "ndarray"): Cupy,
}
_made: dict[type[Framework], Framework] = {}


def the(kind: type[Framework]) -> Framework:
    """The one object of a framework's class."""
    framework = _made.get(kind)
    if framework is None:
        framework = _made.setdefault(kind, kind())
        _native.keep_for_ever(framework)
    return framework


def framework_of(x: Any, op: str, name: str) -> Framework:
    """The framework of an object's type; a sentence for what is no tensor at all."""
    kind = type(x)
    for base in kind.__mro__:
        framework = FRAMEWORKS.get((root_of(base), base.__name__))
        if framework and (not framework.genuine or _is_genuine(base)):
            return the(framework if base is kind else framework.of_subclasses or framework)
    if not isinstance(x, Memory) and not any(hasattr(x, protocol) for protocol in NAMES):
        want = "want a tensor (DLPack, __cuda_array_interface__ or __array_interface__)"
        raise _native.InvalidType(f"{op}: {name} is {type_name(x)}, {want}", INVALID_VALUE)
    return the(Framework)


def _is_genuine(base: type) -> bool:
    """A class is the one that its package has under its name."""
    package = sys.modules.get(root_of(base))
    return base in (getattr(package, base.__name__, None), getattr(getattr(package, "nn", None), base.__name__, None))


# ---- Streams ---------------------------------------------------------------------------------------------------------


def stream_address(stream: Any) -> int:
    """The address of a stream: an integer, or an object with __cuda_stream__, .cuda_stream (torch) or .ptr (cupy)."""
    address = stream
    if hasattr(stream, "__cuda_stream__"):
        described = stream.__cuda_stream__
        address = (described() if callable(described) else described)[1]
    elif not isinstance(stream, int):
        address = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    if not isinstance(address, int) or isinstance(address, bool) or not 0 <= address < 1 << 64:
        given = repr(stream) if isinstance(stream, int) else type_name(stream)
        raise _native.InvalidType(
            f"stream is {given}, want an address or an object with __cuda_stream__", INVALID_VALUE
        )
    return address


@contextlib.contextmanager
def running_on(address: int) -> Iterator[None]:
    """Makes a stream the one that producers make ready, on this thread."""
    before = getattr(_override, "stream", None)
    _override.stream = address
    try:
        yield
    finally:
        _override.stream = before
