"""Tiles of the Hopper GEMM whose last waves are shared out, forced by name: a block begins a tile, and another ends it.

The bits are those of a kernel of mma.sync, which shares no code with them and is held to the CPU's by test_cuda.py.
"""

import ctypes
import pathlib

import numpy as np
import pytest

import capi
import pydet
from test_cuda_tiles import OTHER, UNSUPPORTED, compare, operand, torch  # noqa: F401

SUFFIX = "_handover"
STAGE = 64  # of k
LONGEST = 1 << 20  # k that is handed over


def tiles():
    return [k for k in pydet.kernels() if k.device == "cuda" and k.name.endswith(SUFFIX)]


names = pytest.mark.parametrize("name", [kernel.name for kernel in tiles()] or [None])


def cluster_of(name):
    """Rows and columns of out that a cluster makes of a tile."""
    m, n = map(int, name.split("_")[3].split("x"))
    m, n = (m, 2 * n) if "wide" in name else (2 * m, n)
    return (n, m) if "swapped" in name else (m, n)


def words(tensor):
    import torch

    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def operands(torch, m, n, k, dtype, a_turned=False, b_turned=False):
    return operand(torch, m, k, dtype, a_turned), operand(torch, k, n, dtype, not b_turned)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@names
def test_every_split(torch, name, dtype):
    """Of a tile between any two of its stages, of one tile more than a wave to one less than two and of several waves;
    out's edges, types and bias; every layout."""
    dtype, (rows, columns) = getattr(torch, dtype), cluster_of(name)
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // 2
    # Of clusters + 1 tiles with as many stages as there are clusters, the i-th is cut before stage i, unless that is at
    # one of its ends.
    cases = [
        (clusters + 1, 1, clusters, dtype, None, False),
        (2, clusters // 2 + 1, clusters, torch.float32, None, True),
        (3, clusters // 2, clusters, dtype, "n", False),
        (2 * clusters - 1, 1, clusters, dtype, "mn", False),
        (1, clusters + clusters // 2 + 1, clusters, torch.float32, None, False),
        (2, clusters // 2 + 1, clusters + 1, torch.float32, "n", True),
        (5, clusters - 1, 61, dtype, None, False),
        (clusters // 2 + 1, 7, clusters, dtype, None, False),
    ]
    taken = 0
    for i, (down, across, stages, out_dtype, bias, accumulate) in enumerate(cases):
        for less, turned in ((0, (False, False)), (8, (False, True)), (5, (False, False)), (16, (True, True))):
            m, n, k = down * rows - less, across * columns - less, stages * STAGE - less
            a_turned, b_turned = turned if i % 2 else (False, False)
            taken += compare(torch, name, m, n, k, a_turned, b_turned, dtype, out_dtype, bias, accumulate, None)
    assert taken >= 24, taken


@names
def test_what_it_refuses(torch, name):
    """Tiles that fill their waves, fewer than a wave, a batch, chunks, and a call without the workspace."""
    rows, columns = cluster_of(name)
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // 2
    for down, across, batch, options in (
        *((clusters, 2, None, {}), (clusters // 2, 1, None, {}), (clusters + 1, 1, 2, {})),
        (clusters + 1, 1, None, {"k_chunk": 512}),
    ):
        a, b = operands(torch, down * rows, across * columns, 4096, torch.bfloat16)
        if batch:
            a, b = a.expand(batch, *a.shape), b.expand(batch, *b.shape)
        with pytest.raises(pydet.Error, match=name):
            pydet.gemm(a, b, kernel=name, **options)


def workspace_for(lib, m, n, k, name=None, **options):
    size = capi.ffi.new("uint64_t *")
    given = capi.options("pydet_gemm_options", kernel=name or capi.ffi.NULL, **options)
    assert lib.pydet_gemm_workspace(1, m, n, k, given, size) == 0
    return size[0]


def test_size_of_the_workspace():
    """What the kernel that is asked for wants; else nothing, where no layout's choice hands over. Without a GPU."""
    path = pathlib.Path(pydet.__file__).parent / "libpydet_cuda.so"
    if not path.exists() or not tiles():
        pytest.skip("libpydet_cuda.so is not built")
    lib = capi.ffi.dlopen(str(path))
    for _ in range(2):  # the second time from memory
        assert workspace_for(lib, 303, 17408, 5120) > 0
        assert workspace_for(lib, 4096, 4096, 4096) == 0
    for kernel in tiles():
        assert workspace_for(lib, 4096, 4096, 4096, kernel.name) == workspace_for(lib, 303, 17408, 5120)
        assert workspace_for(lib, 4096, 4096, 4096, kernel.name.removesuffix(SUFFIX)) == 0
    for options in ({"k_chunk": 1024}, {"arithmetic": 1}, {"name": OTHER}):
        assert workspace_for(lib, 303, 17408, 5120, **options) == 0
    assert workspace_for(lib, 303, 17408, 5120, k_chunk=5120) > 0
    name = tiles()[0].name
    assert workspace_for(lib, 8192, 8192, LONGEST, name) > 0 == workspace_for(lib, 8192, 8192, LONGEST + 1, name)
    assert workspace_for(lib, 1 << 40, 1 << 40, 1 << 20) == workspace_for(lib, 8, 8, 1 << 20, name) == 0


class Call:
    """One product by the C interface, on a workspace of its own between two guards."""

    GUARD = 4096

    def __init__(self, torch, name, m, n, k, missing=0, a=None):
        self.torch = torch
        self.lib = capi.ffi.dlopen(str(pathlib.Path(pydet.__file__).parent / "libpydet_cuda.so"))
        self.a, self.b = operands(torch, m if a is None else 1, n, k, torch.bfloat16)
        self.a = self.a if a is None else a
        self.out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        self.expected = words(pydet.gemm(self.a, self.b, kernel=OTHER))
        self.size = workspace_for(self.lib, m, n, k, name)
        assert self.size > 0
        self.memory = torch.full((self.size + 2 * self.GUARD,), 255, dtype=torch.uint8, device="cuda")
        at = capi.ffi.cast("void *", self.memory.data_ptr() + self.GUARD)
        self.options = capi.options(
            "pydet_gemm_options", kernel=name or capi.ffi.NULL, workspace=at, workspace_size=self.size - missing
        )
        self.tensors = [
            capi.Tensor(shape=t.shape, strides=list(t.stride()), dtype=capi.BFLOAT16, data=t.data_ptr(), device=(2, 0))
            for t in (self.a, self.b, self.out)
        ]

    def __call__(self, stream=None):
        stream = stream or self.torch.cuda.current_stream()
        a, b, out = (t.c for t in self.tensors)
        where = capi.ffi.cast("void *", stream.cuda_stream)
        return self.lib.pydet_gemm(where, a, b, capi.ffi.NULL, out, self.options)

    def check(self, what):
        wrong = int((words(self.out) != self.expected).sum())
        assert wrong == 0, f"{what}: {wrong} words differ"
        guards = self.memory[: self.GUARD], self.memory[self.GUARD + self.size :]
        assert all(bool((guard == 255).all()) for guard in guards), f"{what}: written beside the workspace"
        self.out.fill_(float("nan"))


def shape(torch, name, extra, stages=66):
    rows, columns = cluster_of(name)
    clusters = torch.cuda.get_device_properties(0).multi_processor_count // 2
    return (clusters + extra) * rows, columns, stages * STAGE


@names
def test_workspace(torch, name):
    """Its contents do not matter, nothing beside it is written, one byte less and the kernel is another."""
    call = Call(torch, name, *shape(torch, name, 33))
    for fill in (255, 0, 1, 128):
        call.memory[call.GUARD : -call.GUARD] = fill
        assert call() == 0
        call.check(f"workspace of {fill}")
    short = Call(torch, name, *shape(torch, name, 33), missing=16)
    assert short() == UNSUPPORTED
    without = Call(torch, name, *shape(torch, name, 33), missing=16)
    without.options.kernel = capi.ffi.NULL
    assert without() == 0
    without.check("a workspace that is too small")


@names
def test_replays(torch, name):
    """A graph of two calls with one workspace, again and again; then the same calls many times."""
    calls = [Call(torch, name, *shape(torch, name, extra)) for extra in (1, 40)]
    calls[1].options.workspace = calls[0].options.workspace
    assert [call() for call in calls] == [0, 0]
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        assert [call(stream) for call in calls * 2] == [0] * 4
    for turn in range(50):
        graph.replay()
        if turn % 10 == 9:
            for call in calls:
                call.check(f"replay {turn}")


@names
def test_two_streams(torch, name):
    """At once, each with its workspace: the blocks of either wait for room."""
    calls = [Call(torch, name, *shape(torch, name, extra)) for extra in (7, 50)]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(30):
        for call, stream in zip(calls, streams, strict=True):
            assert call(stream) == 0
    torch.cuda.synchronize()
    for call in calls:
        call.check("two streams")


@pytest.mark.parametrize("busy", [1, 20, 50])
@names
def test_few_blocks_resident(torch, name, busy):
    """Clusters of another kernel hold their SMs for about a millisecond, so that some start when others have ended."""
    call = Call(torch, name, *shape(torch, name, 33))
    a, b = (torch.zeros(extent, 1 << 17, dtype=torch.bfloat16, device="cuda") for extent in (256, 256 * busy))
    long, mine = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(long):
        pydet.gemm(a, b.T, kernel="cuda_gemm_sm90_128x256")
    for _ in range(3):
        assert call(mine) == 0
    torch.cuda.synchronize()
    call.check(f"beside {busy} clusters")


@names
def test_longest(torch, name):
    """The longest k that is handed over, and a longer one, which is not. Rows overlap, which are only read."""
    m, n, _ = shape(torch, name, 1)
    for k in (LONGEST, LONGEST + STAGE):
        a, b = (torch.randn(8 * rows + k, device="cuda").to(torch.bfloat16) for rows in (m, n))
        a, b = a.as_strided((m, k), (8, 1)), b.as_strided((n, k), (8, 1)).T
        expected = words(pydet.gemm(a, b, kernel=OTHER))
        if k == LONGEST:
            assert torch.equal(words(pydet.gemm(a, b, kernel=name)), expected)
        else:
            with pytest.raises(pydet.Error, match=name):
                pydet.gemm(a, b, kernel=name)
        assert torch.equal(words(pydet.gemm(a, b)), expected)


def managed(torch, m, k):
    """m x k of bf16 that may lie with the CPU or the GPU, page by page, and its bytes as the CPU sees them."""
    torch.zeros(1, device="cuda")  # so that there is a context
    cuda, at, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), 2 * m * k
    if cuda.cuMemAllocManaged(ctypes.byref(at), ctypes.c_size_t(size), 1):
        pytest.skip("no managed memory")

    class Memory:
        __cuda_array_interface__ = {"shape": (m, k), "typestr": "<i2", "data": (at.value, False), "version": 3}

        def __del__(self):
            cuda.cuMemFree_v2(at)

    tensor = torch.as_tensor(Memory(), device="cuda").view(torch.bfloat16)
    return tensor, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at.value))


@names
def test_a_block_is_late(torch, name):
    """Rows of a that lie with the CPU come page by page: their blocks are late, and those that go on wait for them."""
    page, parts = 4096, 12
    m, n, k = shape(torch, name, 33)
    a, of_cpu = managed(torch, m, k)
    a.copy_(torch.randn(m, k, device="cuda"))
    call = Call(torch, name, m, n, k, a=a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for part in (None, None, *range(parts)):
        torch.cuda.synchronize()
        if part is not None:
            of_cpu[part * of_cpu.size // parts : (part + 1) * of_cpu.size // parts : page] ^= 0
        begin.record()
        assert call() == 0
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        call.check(f"part {part} is late")
    assert max(times[2:]) > 1.2 * times[1], times


def test_nothing_is_allocated_in_vain(torch):
    """Python's workspace, only where the choice may hand over."""
    a, b = operands(torch, 4096, 4096, 4096, torch.bfloat16)
    out = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    pydet.gemm(a, b, out=out)
    assert not pydet.last_kernel().endswith(SUFFIX) and torch.cuda.max_memory_allocated() == before


def test_it_is_chosen(torch):
    """Somewhere; where it is, a call without a workspace has the same bits by another kernel."""
    chosen = 0
    for m, n, k in ((303, 17408, 5120), (368, 51200, 5120), (377, 13824, 5120)):
        call = Call(torch, None, m, n, k)
        assert call() == 0
        name = capi.ffi.string(call.lib.pydet_last_kernel()).decode()
        call.check(name)
        chosen += name.endswith(SUFFIX)
        call.options.workspace, call.options.workspace_size = capi.ffi.NULL, 0
        assert call() == 0
        assert not capi.ffi.string(call.lib.pydet_last_kernel()).decode().endswith(SUFFIX)
        call.check("no workspace")
    assert chosen
