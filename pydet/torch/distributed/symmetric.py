"""Folds through memory that all ranks of a group reach: one launch a rank, no collective.

On NVIDIA GPUs of one NVLink domain every rank has the addresses of all the others' memory: by PyTorch's symmetric
memory in the group of all ranks, by CUDA's handles in a group of some (:mod:`pydet.torch.distributed.ipc` says why).
pydet_fold with peers (pydet.h) then carries the sums, meets the other ranks and folds, in one kernel that a CUDA graph
may hold. Where there is no such memory a group has no :class:`Peers`, and the methods over collectives do the same.

With each fold goes a word: a hash of the call's terms, and the number of the call. Ranks that come with different ones
write NaN and a reason that the host finds at its next call. It raises that once; the call after it begins anew, on all
ranks, with signals of zeros.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from pydet import _native
from pydet._native import constants, fail, ffi
from pydet.ops import FOLD_PARTS, Order
from pydet.torch.distributed.ipc import driver, shared_addresses
from pydet.torch.distributed.turns import Turn, Turns, blocks_of

Tensor: TypeAlias = torch.Tensor
Group: TypeAlias = Any

MOST_RANKS: int = constants.PYDET_FOLD_RANKS
_PARTS = 16  # of all ranks, for which a group's memory has room at once
_CODES = {torch.float32: (constants.PYDET_FLOAT, 32), torch.bfloat16: (constants.PYDET_BFLOAT, 16)}
_CODES[torch.float16] = (constants.PYDET_FLOAT, 16)
_FLAGS = 64
_NO_TIMING = 2  # of an event
_ASKS = 0  # in a word, in the place of terms: a rank asks the others about terms that are new to it
_peers: dict[Any, Peers | None] = {}
_turns: dict[torch.device, Turns] = {}


def capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def capture_number(stream: Any) -> int:
    """Which capture this stream is part of; 0 if none."""
    if not capturing():
        return 0
    status, number, unread = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    handle = ctypes.c_void_p(stream.cuda_stream)
    driver("cuStreamGetCaptureInfo_v2", handle, ctypes.byref(status), ctypes.byref(number), unread, unread, unread)
    return number.value if status.value else 0


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


class Carrier:
    """A stream for copies beside products, by the driver's functions: with the many of a relay the host is done
    before the device is, and with PyTorch's views, events and guards it was not."""

    def __init__(self, stream: Any) -> None:
        event = ctypes.c_void_p()
        driver("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_NO_TIMING))
        self.stream, self._own, self._event = stream, stream.cuda_stream, event.value

    def follow(self, stream: Any) -> None:
        """What comes on this stream comes behind all that the other has been told."""
        driver("cuEventRecord", self._event, stream.cuda_stream)
        driver("cuStreamWaitEvent", self._own, self._event, 0)

    def end(self, stream: Any) -> None:
        """The other way around."""
        driver("cuEventRecord", self._event, self._own)
        driver("cuStreamWaitEvent", stream.cuda_stream, self._event, 0)

    def bring(self, source: int, to: int, size: int) -> None:
        """Copies `size` bytes from one address to another, of this device's memory or another's that it reaches."""
        driver("cuMemcpyDtoDAsync_v2", to, source, size, self._own)


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
        self.boards: list[int] = []  # where this rank's signals lie, of all memory so far
        self.timeout_ms = _timeout_ms(group, device)
        self.turns = _turns.setdefault(device, Turns(torch.cuda.Event))
        self.calls = 0  # folds so far, the same on all ranks
        self.terms, self.meanings = 1, {_ASKS: "terms that are new to it"}
        self.fault = torch.zeros(constants.PYDET_FOLD_FAULT, dtype=torch.int64, device="cpu", pin_memory=True)
        self.reason = (ctypes.c_int64 * len(self.fault)).from_address(self.fault.data_ptr())  # the device writes there
        self.plans: dict[Any, Any] = {}  # of calls whose terms all ranks have agreed on: see :meth:`plan`
        self.courses: dict[Any, Any] = {}  # of relays
        self.relays = False  # whether there was one, or a graph may have some
        self.relaying = self.pushes and self.world == 2  # whether there may be one
        self.failed = False
        self.last_word = 0
        self._flags: tuple[Tensor, Tensor] | None = None

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
        self.boards.append(pointers[self.rank])
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
            step = 1 << max(0, (count - 1).bit_length() - 3)  # seldom made anew, and an eighth too large at most
            room = -(-count // step) * step
            found = _shared_memory(room, torch.float32, self.group, self.device)
            if found is None:
                fail(constants.PYDET_UNSUPPORTED, f"push: no symmetric memory of {4 * room} bytes on every rank")
            self.kept.append(found)
            buffers = [found[1].get_buffer(r, [room], torch.float32) for r in range(self.world)]
            self.staged = found[0], buffers
        return [buffer[:count].view(shape) for buffer in self.staged[1]]

    def flags(self) -> tuple[Tensor, Tensor]:
        """Words for a relay between two ranks: this rank's, zeros between relays, and the other's."""
        if self._flags is None:
            self._outside_capture()
            found = _shared_memory(_FLAGS, torch.int64, self.group, self.device)
            if found is None:
                fail(constants.PYDET_UNSUPPORTED, f"relay: no symmetric memory of {8 * _FLAGS} bytes on every rank")
            self.kept.append(found)
            self._flags = found[0], found[1].get_buffer(1 - self.rank, [_FLAGS], torch.int64)
        return self._flags

    @functools.cached_property
    def nothing(self) -> Tensor:
        """Parts of one element or two, and their sums, of folds in which ranks only meet or wait."""
        return torch.zeros(2, 2, device=self.device)

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
        first_sums: int = 0,
    ) -> Tensor:
        """pydet_fold with peers: this rank's parts ``[s, ...]`` and all others', into ``out``; see pydet.h.

        first_sums: of rank 0 this is the sum of its so many parts alone, ``[1, ...]``.
        """
        with self.turn(out.numel() * (self.world if scatter else 1)) as stream:
            self.launch(stream, parts, out, bias, order, accumulate, gathered, scatter, kernel, first_sums)
        return out

    def turn(self, elements: int) -> Turn:
        """The current stream, when a fold of so many elements is next of its group, until it is launched."""
        stream = torch.cuda.current_stream(self.device)
        return self.turns.turn(self, stream, blocks_of(elements), capture_number(stream))

    def launch(
        self,
        stream: Any,
        parts: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        order: Order = "ordered",
        accumulate: bool = False,
        gathered: bool = False,
        scatter: bool = False,
        kernel: str | None = None,
        first_sums: int = 0,
    ) -> None:
        """The fold itself, inside of its turn."""
        self.last_word = ((self.calls + 1) % 2**32) << 32 | self.terms
        peers = self._arguments(self.last_word)
        peers.gathered, peers.scatter, peers.first_sums = gathered, scatter, first_sums
        peers.flag = ffi.NULL
        fold_with_peers(stream, peers, parts, out, bias, order, accumulate, kernel)
        self.calls += 1

    def meet(self, stream: Any, elements: int = 1) -> None:
        """A fold of nothing, inside of its turn: what the ranks do next comes behind what all of them did before. Those
        that come with other numbers of elements disagree."""
        meeting = self.nothing[:, :elements]
        self.launch(stream, meeting[:1], meeting[1])

    @functools.cached_property
    def carrier(self) -> Carrier:
        """What brings tensors to another rank beside the products."""
        with torch.cuda.device(self.device):
            return Carrier(torch.cuda.Stream(self.device))

    def launch_awaited(
        self, stream: Any, parts: Sequence[Tensor], out: Tensor, bias: Tensor | None, word: int, flag: int, source: int
    ) -> None:
        """The fold of this rank's parts alone, once `word` is at the address `flag`, where rank `source` brings it."""
        peers = self._arguments(word)
        peers.gathered, peers.scatter, peers.first_sums = False, False, 0
        peers.flag = ffi.cast("const uint64_t *", flag)
        setattr(peers, "from", source)
        fold_with_peers(stream, peers, parts, out, bias)

    def wait(self, stream: Any, word: int, flag: int, source: int) -> None:
        """The stream waits until `word` is there, in one block of a fold of nothing."""
        alive, call = self._waiting
        peers = alive[0]
        peers.memory, peers.memory_size = self.addresses, self.size
        peers.word, peers.flag = word, ffi.cast("const uint64_t *", flag)
        setattr(peers, "from", source)
        library = _native.load(constants.PYDET_EXCHANGE_CUDA)
        library.check(library.lib.pydet_fold(ffi.cast("void *", stream.cuda_stream), *call))

    @functools.cached_property
    def _waiting(self) -> tuple[list[Any], tuple[Any, ...]]:
        """What :meth:`wait` passes, made once: a slab of a relay waits as often as a product is made."""
        peers, options = self._new_arguments(), ffi.new("pydet_fold_options *")
        options.struct_size = ffi.sizeof("pydet_fold_options")
        options.peers = peers
        alive = [peers, options]
        part, out = (_tensor(one, alive) for one in self.nothing[:, :1])
        parts = ffi.new("const pydet_tensor *[]", [part])
        return [*alive, parts], (parts, 1, ffi.NULL, out, options)

    def _arguments(self, word: int) -> Any:
        """Of one launch, inside of its turn: what the last one was given otherwise is the caller's to put right."""
        peers = self._reused
        peers.memory, peers.memory_size, peers.word = self.addresses, self.size, word
        return peers

    @functools.cached_property
    def _reused(self) -> Any:
        return self._new_arguments()

    def _new_arguments(self) -> Any:
        peers = ffi.new("pydet_fold_peers *")
        peers.struct_size = ffi.sizeof("pydet_fold_peers")
        peers.ranks, peers.rank, peers.timeout_ms = self.world, self.rank, self.timeout_ms
        peers.fault = ffi.cast("uint64_t *", self.fault.data_ptr())
        return peers

    # ---- Agreement ----

    def begin(self, op: str) -> None:
        """At the start of a call: raises why an earlier one failed; after that begins anew, with all ranks."""
        self.check(op)
        if self.failed:
            if capturing():
                fail(
                    constants.PYDET_INVALID_VALUE, f"{op}: an earlier call failed; call it once outside of the capture"
                )
            self._begin_anew()

    def means(self, key: bytes, meaning: str) -> None:
        """The terms of the folds that follow: their hash, which goes with each, and what a sentence says of them."""
        self.terms = int.from_bytes(key[:4], "little") or 1
        self.meanings[self.terms] = meaning

    def plan(self, given: Any, plan: Any) -> None:
        """Keeps what calls that are given the same begin with, under the terms that all ranks have agreed on."""
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
        self.plans[given] = self.terms, plan

    def planned(self, op: str, given: Any) -> Any:
        """What was kept; its terms are those of the folds that follow. None: the ranks are to be asked."""
        self.begin(op)
        if (found := self.plans.get(given)) is None:
            return None
        self.terms = found[0]
        return found[1]

    def ask(self, op: str) -> None:
        """Meets ranks that ask, too. Raises where one goes on with terms that it knows, which hears of it as well."""
        self.terms = _ASKS
        nothing = torch.zeros(1, 1, device=self.device)
        self.fold(nothing, nothing[0].clone())
        torch.cuda.current_stream(self.device).synchronize()
        self.check(op)

    def check(self, op: str) -> None:
        """Raises why a fold that has ended failed; once. Until all ranks have begun anew folds give NaN."""
        kind = self.reason[0]
        if not kind:
            return
        other = self.reason[1]
        if kind == constants.PYDET_FOLD_DISAGREES:
            words = self._words(other)
            mine, theirs = (self._meaning(words[rank]) for rank in (self.rank, other))
            sentence = f"the ranks did not agree at a call: rank {self.rank} had {mine}; rank {other} had {theirs}"
        elif kind == constants.PYDET_FOLD_LEFT:
            sentence = f"rank {other} waited {self.timeout_ms / 1000:g} s at a call for one of the others, and left"
        elif other == self.rank:
            sentence = f"a call on another stream did not end in {self.timeout_ms / 1000:g} s"
        else:
            sentence = f"rank {other} did not come to a call in {self.timeout_ms / 1000:g} s"
        self.forget()
        self.failed = True
        fail(
            constants.PYDET_INVALID_VALUE,
            f"{op}: {sentence}. Its results are NaN, and all since; the next call begins anew",
        )

    def forget(self) -> None:
        """What the device said went wrong."""
        for i in range(len(self.reason)):
            self.reason[i] = 0

    def _meaning(self, word: int) -> str:
        meaning = self.meanings.get(word & 0xFFFFFFFF, "other terms")
        return f"{meaning} (call {word >> 32} of the group)"

    def _words(self, other: int) -> list[int]:
        """What each rank came with to the latest fold, on the memory where rank `other` came with something else."""
        words = (ctypes.c_uint64 * MOST_RANKS)()
        size = ctypes.sizeof(words)
        with torch.cuda.device(self.device):
            for board in reversed(self.boards if not capturing() else []):
                at = ctypes.c_uint64(board + constants.PYDET_FOLD_SIGNALS - size)
                driver("cuMemcpyDtoH_v2", words, at, ctypes.c_size_t(size))
                if words[self.rank] != words[other]:
                    break
        return list(words)

    def _begin_anew(self) -> None:
        """All ranks: no fold runs any more; zeros; then the first of a new count may come."""
        meeting = torch.zeros(1, device=self.device)
        torch.cuda.synchronize(self.device)
        dist.all_reduce(meeting, group=self.group)
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            for board in self.boards:
                size = ctypes.c_size_t(constants.PYDET_FOLD_SIGNALS)
                driver("cuMemsetD8_v2", ctypes.c_uint64(board), ctypes.c_ubyte(0), size)
            if self._flags is not None:
                self._flags[0].zero_()
            torch.cuda.synchronize(self.device)
        self.forget()
        self.failed, self.calls = False, 0
        dist.all_reduce(meeting, group=self.group)
        torch.cuda.synchronize(self.device)

    def _outside_capture(self) -> None:
        if capturing():
            fail(constants.PYDET_INVALID_VALUE, "memory of all ranks is made under graph capture; call it once before")


class _Call:
    """The arguments of pydet_fold for tensors of some shapes and types, whose addresses are put in at each call."""

    def __init__(
        self,
        parts: Sequence[Tensor] | Tensor,
        out: Tensor,
        bias: Tensor | None,
        order: Order,
        accumulate: bool,
        kernel: str | None,
    ) -> None:
        self.alive: list[Any] = []
        self.parts = [_tensor(part, self.alive) for part in parts]
        self.out, self.bias = _tensor(out, self.alive), ffi.NULL if bias is None else _tensor(bias, self.alive)
        self.pointers = ffi.new("const pydet_tensor *[]", self.parts)
        self.name = ffi.new("char[]", kernel.encode()) if kernel else ffi.NULL
        self.options = ffi.new("pydet_fold_options *")
        self.options.struct_size = ffi.sizeof("pydet_fold_options")
        self.options.order = constants.PYDET_TREE if order == "tree" else constants.PYDET_ORDERED
        self.options.accumulate, self.options.kernel = accumulate, self.name

    def run(self, stream: Any, peers: Any, parts: Sequence[Tensor] | Tensor, out: Tensor, bias: Tensor | None) -> None:
        if isinstance(parts, Tensor):
            first, step = parts.data_ptr(), parts.stride(0) * parts.element_size()
            addresses: Iterable[int] = range(first, first + step * len(self.parts), step) if step else [first]
        else:
            addresses = [part.data_ptr() for part in parts]
        for tensor, address in zip(self.parts, addresses, strict=True):
            tensor.data = ffi.cast("void *", address)
        self.out.data = ffi.cast("void *", out.data_ptr())
        if bias is not None:
            self.bias.data = ffi.cast("void *", bias.data_ptr())
        self.options.peers, where = peers, ffi.cast("void *", stream.cuda_stream)
        library = _native.load(constants.PYDET_EXCHANGE_CUDA)
        library.check(library.lib.pydet_fold(where, self.pointers, len(self.parts), self.bias, self.out, self.options))


_calls: dict[Any, _Call] = {}  # those that no thread is in
_MOST_CALLS, _MOST_PLANS = 256, 1024


def fold_with_peers(
    stream: Any,
    peers: Any,
    parts: Sequence[Tensor] | Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    order: Order = "ordered",
    accumulate: bool = False,
    kernel: str | None = None,
) -> None:
    """pydet_fold with the options that pydet.fold does not have. parts: contiguous tensors, or the rows of one."""
    peers.struct_size = ffi.sizeof("pydet_fold_peers")
    bias = None if bias is None else bias.contiguous()
    given: Any = (parts.shape, parts.dtype) if isinstance(parts, Tensor) else tuple((x.shape, x.dtype) for x in parts)
    added = None if bias is None else (bias.shape, bias.dtype)
    key = given, added, out.shape, out.dtype, out.device, order, accumulate, kernel
    call = _calls.pop(key, None) or _Call(parts, out, bias, order, accumulate, kernel)
    call.run(stream, peers, parts, out, bias)
    if len(_calls) < _MOST_CALLS:
        _calls[key] = call


def peers_of(group: Group, device: torch.device) -> Peers | None:
    """The group's, made at its first call on every rank alike; None where its ranks reach no memory of each other."""
    group = group if group is not None else dist.group.WORLD
    key = group, device.type
    if key not in _peers:
        _peers[key] = _find(group, device)
    peers = _peers[key]
    if peers is not None and peers.device != device:
        fail(
            constants.PYDET_INVALID_DEVICE,
            f"a tensor is on {device}, want {peers.device}, as in the group's first call",
        )
    return peers


def known_peers(group: Group) -> Peers | None:
    """The group's, if it had a call that found some."""
    key = group if group is not None else dist.group.WORLD
    return next((peers for (one, _), peers in _peers.items() if one is key and peers is not None), None)


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
    tensor.device.device_type, tensor.device.device_id = constants.PYDET_CUDA, x.device.index or 0
    tensor.dtype.code, tensor.dtype.bits = _CODES[x.dtype]
    tensor.dtype.lanes = 1
    tensor.ndim, tensor.shape = x.dim(), shape
    alive += [tensor, shape]
    return tensor
