"""What is here: devices, kernels, arithmetics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydet import _native
from pydet._native import DEVICE_NAMES, DEVICE_TYPES, INVALID_DEVICE, constants, fail, ffi
from pydet.frameworks import type_index
from pydet.hooks import unknown
from pydet.ops.types import Arithmetic
from pydet.protocols import DTYPES


@dataclass(frozen=True)
class Device:
    """A device that a library here can use."""

    kind: str  #: "cpu", "cuda" or "rocm"
    index: int
    name: str
    arch: str  #: "x86-64 avx512", "sm_90"
    multiprocessors: int  #: SMs, CUs, or logical CPUs


@dataclass(frozen=True)
class Kernel:
    """A row of a library's kernel table."""

    name: str  #: for ``kernel=``
    operation: str
    dtypes: str  #: of the inputs
    arithmetic: str
    device: str  #: "cpu", "cuda" or "rocm"
    requires: str
    available: bool  #: some device of this machine can run it


def _libraries() -> list[tuple[int, _native.Library]]:
    """The libraries that load, each with the device index that it is asked about."""
    tried = ((index, _native.try_load(index)[0]) for index in range(len(DEVICE_NAMES)))
    return [(index, library) for index, library in tried if library]


def devices() -> list[Device]:
    """The devices that the libraries here can use, the CPU first."""
    found = []
    for index, library in _libraries():
        lib, count = library.lib, ffi.new("int32_t *")
        if lib.pydet_device_count(DEVICE_TYPES[index], count) != constants.PYDET_OK:
            continue  # a library named by PYDET_LIBRARY that does not serve this kind
        for number in range(count[0]):
            info = ffi.new("pydet_device_info *", {"struct_size": ffi.sizeof("pydet_device_info")})
            library.check(lib.pydet_query_device((DEVICE_TYPES[index], number), info))
            kind = DEVICE_NAMES[index].lower()
            found.append(Device(kind, number, _native.text(info.name), _native.text(info.arch), info.multiprocessors))
    return found


def kernels() -> list[Kernel]:
    """Every kernel of the libraries here, in the order in which they are tried."""
    found: dict[str, Kernel] = {}
    for _, library in _libraries():
        lib, number = library.lib, 0
        while lib.pydet_kernel_name(number) != ffi.NULL:
            info = ffi.new("pydet_kernel_info *", {"struct_size": ffi.sizeof("pydet_kernel_info")})
            library.check(lib.pydet_query_kernel(number, info))
            name, operation, dtypes, requires = map(
                _native.text, (info.name, info.operation, info.dtypes, info.requires_)
            )
            arithmetic = _native.text(lib.pydet_arithmetic_name(info.arithmetic))
            device = DEVICE_NAMES[DEVICE_TYPES.index(info.device_type)].lower()
            found.setdefault(name, Kernel(name, operation, dtypes, arithmetic, device, requires, bool(info.available)))
            number += 1
    return list(found.values())


def last_kernel() -> str:
    """The kernel that this thread's last operation launched; "" if it had nothing to write, or there was none yet."""
    index = _native.load(constants.PYDET_EXCHANGE_CPU).lib.pydet_exchange_last_library()
    return "" if index < 0 else _native.text(_native.load(index).lib.pydet_last_kernel())


def resolve_arithmetic(dtype: Any, device: tuple[str, int] = ("cpu", 0), arithmetic: Arithmetic = "auto") -> str:
    """The arithmetic that ``arithmetic`` means for inputs of this type on this device.

    Args:
        dtype: a name, or a framework's dtype: float32, bfloat16 or float16.
        device: a kind (``"cpu"``, ``"cuda"``, ``"rocm"``) and an index.
        arithmetic: a name as in :func:`gemm`.

    Raises:
        Error: an unknown name, an arithmetic that does not take the type, or no such device.
    """
    kinds = [name.lower() for name in DEVICE_NAMES]
    if device[0] not in kinds:
        fail(INVALID_DEVICE, f"device is {device[0]!r}, want one of {', '.join(kinds)}")
    number = unknown(arithmetic, "resolve_arithmetic", "arithmetic")
    return resolved_name(
        (DEVICE_TYPES[kinds.index(device[0])], device[1]), type_index(dtype, "resolve_arithmetic", "dtype"), number
    )


def resolved_name(device: tuple[int, int], index: int, arithmetic: int) -> str:
    """`resolve_arithmetic` by numbers: DLPack's device, the type index and the arithmetic."""
    library, resolved = _native.load(DEVICE_TYPES.index(device[0])), ffi.new("int32_t *")
    library.check(library.lib.pydet_resolve_arithmetic(device, (*DTYPES[index], 1), arithmetic, resolved))
    return _native.text(library.lib.pydet_arithmetic_name(resolved[0]))
