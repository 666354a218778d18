"""Memory of each rank of a group in all the others' addresses, by CUDA's handles for it, which the group carries.

For groups that are a part of the ranks. PyTorch's symmetric memory lets the ranks of a group find each other by a count
of all such calls of a process, and by a name that ranks outside other groups reckon differently (PyTorch issues 196082
and 190396): there the ranks would wait for each other for ever.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Tensor: TypeAlias = torch.Tensor

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * _HANDLE_BYTES),)


_SIGNATURES = {  # of what is called often, which then takes plain numbers
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuStreamWaitEvent": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
    "cuMemcpyDtoDAsync_v2": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
}


@functools.cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = _SIGNATURES.get(name)
    return function


def driver(name: str, *arguments: Any) -> None:
    """A function of the driver, which PyTorch has loaded."""
    status = _function(name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: CUDA driver error {status}")


def _own(size: int, device: torch.device) -> tuple[int, bytes]:
    """The address of so many zeros on the device, and their handle."""
    torch.cuda.synchronize(device)  # which also makes the device's context the thread's
    address, handle = ctypes.c_uint64(), _Handle()
    driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    driver("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    torch.cuda.synchronize(device)
    driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return address.value, bytes(handle.data)


def _opened(handle: bytes) -> int:
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
    return address.value


def _all(word: bool, group: Any, device: torch.device) -> bool:
    words = torch.tensor([int(word)], device=device)
    dist.all_reduce(words, dist.ReduceOp.MIN, group=group)
    return bool(int(words))


def shared_addresses(size: int, group: Any, device: torch.device) -> list[int] | None:
    """Where each rank's `size` bytes lie, zeros at first; None, on every rank, where one has none. Kept for good."""
    with torch.cuda.device(device):
        try:
            address, handle = _own(size, device)
        except (OSError, AttributeError, RuntimeError):
            address, handle = 0, bytes(_HANDLE_BYTES)
        mine = torch.tensor(list(handle), dtype=torch.uint8, device=device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        found: list[int] = []
        if _all(bool(address), group, device):
            try:
                for rank, other in enumerate(everyone):
                    own = rank == dist.get_rank(group)
                    found.append(address if own else _opened(bytes(other.tolist())))
            except RuntimeError:
                found = []
        return found if _all(bool(found), group, device) else None
