"""Folds through memory that all ranks of a group reach: one launch a rank, no collective.

On NVIDIA GPUs of one NVLink domain every rank has the addresses of all the others' memory: by PyTorch's symmetric
memory in the group of all ranks, by CUDA's handles in a group of some (:mod:`pydet.torch.distributed.ipc` says why).
pydet_fold with peers (pydet.h) then carries the sums, meets the other ranks and folds, in one kernel that a CUDA graph
may hold. Where there is no such memory a group has no :class:`Peers`, and the methods over collectives do the same.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from pydet import _native
from pydet._native import constants, fail, ffi
from pydet.ops import FOLD_PARTS, Order
from pydet.torch.distributed.ipc import shared_addresses

Tensor: TypeAlias = torch.Tensor
Group: TypeAlias = Any

MOST_RANKS: int = constants.PYDET_FOLD_RANKS
_PARTS = 16  # of all ranks, for which a group's memory has room at once
_CODES = {torch.float32: (constants.PYDET_FLOAT, 32), torch.bfloat16: (constants.PYDET_BFLOAT, 16)}
_CODES[torch.float16] = (constants.PYDET_FLOAT, 16)
_peers: dict[Any, Peers | None] = {}


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _shared_memory(elements: int, dtype: torch.dtype, group: Group, device: torch.device) -> tuple[Tensor, Any] | None:
    """Memory of as many elements on every rank, zeros, and its handle; None, on every rank, where one has none."""
    found, problem = None, ""
    try:
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(elements, dtype=dtype, device=device)
        found = memory.zero_(), symmetric.rendezvous(memory, group)
    except (ImportError, AttributeError, RuntimeError, NotImplementedError) as caught:
        problem = str(caught)
    word = torch.tensor([int(not problem)], device=device)
    dist.all_reduce(word, dist.ReduceOp.MIN, group=group)  # and all memory is zeros when it returns
    return found if int(word) else None


class Peers:
    """What a group's ranks share: memory for the fold kernels, and staging for products that write to their peers."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.pushes = group is dist.group.WORLD  # products may write to their peers: by symmetric memory
        self.memory = self.addresses = ffi.NULL
        self.size = self.parts = 0
        self.staged: tuple[Tensor, list[Tensor]] | None = None
        self.kept: list[Any] = []  # captured graphs have the addresses of what was outgrown
        self.stream: Any = None
        self.timeout_ms = _timeout_ms(group, device)

    def reserve(self, parts: int) -> bool:
        """Room for folds of so many parts of all ranks. Every rank asks for the same; False where there is none."""
        if parts <= self.parts:
            return True
        parts = min(FOLD_PARTS, max(parts, _PARTS))
        self._outside_capture()
        size = constants.PYDET_FOLD_SIGNALS + (parts + self.world) * constants.PYDET_FOLD_ROOM
        pointers = self._pointers(size)
        if pointers is None:
            return False
        self.addresses = ffi.new("void *[]", [ffi.cast("void *", p) for p in pointers])
        self.size, self.parts = size, parts
        return True

    def _pointers(self, size: int) -> list[int] | None:
        """Where so many bytes of each rank lie."""
        if not self.pushes:
            return shared_addresses(size, self.group, self.device)
        found = _shared_memory(size, torch.uint8, self.group, self.device)
        if found is None:
            return None
        self.kept.append(found)
        inside = found[0].data_ptr() - int(found[1].buffer_ptrs[self.rank])
        return [int(p) + inside for p in found[1].buffer_ptrs]

    def staging(self, shape: tuple[int, ...]) -> list[Tensor]:
        """An fp32 tensor of this shape in each rank's memory, that of rank r at place r: this rank writes to all."""
        count = math.prod(shape)
        if self.staged is None or self.staged[0].numel() < count:
            self._outside_capture()
            room = 1 << (count - 1).bit_length()
            found = _shared_memory(room, torch.float32, self.group, self.device)
            if found is None:
                fail(constants.PYDET_UNSUPPORTED, f"push: no symmetric memory of {4 * room} bytes on every rank")
            self.kept.append(found)
            buffers = [found[1].get_buffer(r, [room], torch.float32) for r in range(self.world)]
            self.staged = found[0], buffers
        return [buffer[:count].view(shape) for buffer in self.staged[1]]

    def fold(
        self,
        parts: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        order: Order = "ordered",
        accumulate: bool = False,
        gathered: bool = False,
        scatter: bool = False,
        kernel: str | None = None,
    ) -> Tensor:
        """pydet_fold with peers: this rank's parts ``[s, ...]`` and all others', into ``out``; see pydet.h."""
        stream = torch.cuda.current_stream(self.device)
        if self.stream is not None and self.stream != stream and not capturing():
            stream.wait_stream(self.stream)  # one sequence of calls
        self.stream = stream
        peers = ffi.new("pydet_fold_peers *")
        peers.ranks, peers.rank, peers.timeout_ms = self.world, self.rank, self.timeout_ms
        peers.gathered, peers.scatter = gathered, scatter
        peers.memory, peers.memory_size = self.addresses, self.size
        fold_with_peers(stream, peers, parts, out, bias, order, accumulate, kernel)
        return out

    def _outside_capture(self) -> None:
        if capturing():
            fail(constants.PYDET_INVALID_VALUE, "memory of all ranks is made under graph capture; call it once before")


def fold_with_peers(
    stream: Any,
    peers: Any,
    parts: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    order: Order = "ordered",
    accumulate: bool = False,
    kernel: str | None = None,
) -> None:
    """pydet_fold with the options that pydet.fold does not have."""
    library, alive = _native.load(constants.PYDET_EXCHANGE_CUDA), [peers]
    given = [_tensor(part, alive) for part in parts.unbind()]
    peers.struct_size = ffi.sizeof("pydet_fold_peers")
    options = ffi.new("pydet_fold_options *")
    options.struct_size = ffi.sizeof("pydet_fold_options")
    options.order = constants.PYDET_TREE if order == "tree" else constants.PYDET_ORDERED
    options.accumulate, options.peers = accumulate, peers
    name = ffi.new("char[]", kernel.encode()) if kernel else ffi.NULL
    options.kernel = name
    status = library.lib.pydet_fold(
        ffi.cast("void *", stream.cuda_stream),
        ffi.new("const pydet_tensor *[]", given),
        len(given),
        ffi.NULL if bias is None else _tensor(bias.contiguous(), alive),
        _tensor(out, alive),
        options,
    )
    library.check(status)


def peers_of(group: Group, device: torch.device) -> Peers | None:
    """The group's, made at its first call on every rank alike; None where its ranks reach no memory of each other."""
    key = group if group is not None else dist.group.WORLD
    if key not in _peers:
        _peers[key] = _find(key, device)
    return _peers[key]


def _find(group: Group, device: torch.device) -> Peers | None:
    world = dist.get_world_size(group)
    if device.type != "cuda" or torch.version.cuda is None or not 1 < world <= MOST_RANKS:
        return None
    peers = Peers(group, device)
    return peers if peers.reserve(_PARTS) else None


def _timeout_ms(group: Group, device: torch.device) -> int:
    """How long the group's own collectives wait."""
    options = getattr(group._get_backend(device), "options", None)
    return min(2**32 - 1, int(options._timeout.total_seconds() * 1000)) if options is not None else 600000


def _tensor(x: Tensor, alive: list[Any]) -> Any:
    tensor, shape = ffi.new("pydet_tensor *"), ffi.new("int64_t[]", list(x.shape))
    tensor.data = ffi.cast("void *", x.data_ptr())
    tensor.device.device_type, tensor.device.device_id = constants.PYDET_CUDA, x.device.index
    tensor.dtype.code, tensor.dtype.bits = _CODES[x.dtype]
    tensor.dtype.lanes = 1
    tensor.ndim, tensor.shape = x.dim(), shape
    alive += [tensor, shape]
    return tensor
