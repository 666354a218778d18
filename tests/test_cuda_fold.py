"""The fold kernel of CUDA against the CPU's, and in other surroundings."""

import itertools

import numpy as np
import pytest

import pydet
import reference
import test_fold
from capi import random
from cases import assert_same_bits
from test_cuda import OnDevice, cuda_kernels, device, each, torch  # noqa: F401


def test_the_kernel_is_listed():
    names = [kernel.name for kernel in cuda_kernels("fold")]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    of_ranks = [f"cuda_fold_{name}" for name in ("one_shot", "awaited", "two_shot", "stream")]
    assert names == ["cuda_fold", *of_ranks]


@each("fold")
def test_fold_equals_the_reference(device, kernel, dtype):
    if kernel.name == "cuda_fold_stream":
        with pytest.raises(pydet.Error, match="cuda_fold_stream"):  # it is of ranks alone: below
            pydet.fold([device.torch.ones(4, device="cuda")], kernel=kernel.name)
        return
    test_fold.check(device.fold)
    test_fold.check(device.fold, test_fold.LONG_SIZES, [1, 3, 8])
    assert device.taken > 300 and not device.refused


def test_parts_at_any_address(torch):
    """Each four bytes further than aligned or more: by vectors and by elements."""
    for offset, size in itertools.product(range(5), (1, 4, 31, 1024)):
        memory = [torch.from_numpy(random(size + 8, seed=i)).cuda() for i in range(6)]
        for step in (0, 1):
            parts = [m[(offset + step * i) % 5 :][:size] for i, m in enumerate(memory)]
            want = reference.fold(np.stack([p.cpu().numpy() for p in parts]))
            guarded = torch.full((size + 9,), 7.0, device="cuda")
            pydet.fold(parts, out=guarded[offset : offset + size])
            got = guarded.cpu().numpy()
            assert_same_bits(got[offset : offset + size], want, f"{offset} {size} {step}")
            assert (got[:offset] == 7).all() and (got[offset + size :] == 7).all()


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_large_tensors_equal_the_cpu(torch, out_dtype):
    for count, shape, order in ((8, (512, 4096), "ordered"), (64, (37, 4100), "tree"), (5, (1000, 1001), "tree")):
        parts, bias = random((count, *shape)), random(shape[-1:], seed=1)
        on_gpu = torch.from_numpy(parts).cuda()
        want = pydet.fold(torch.from_numpy(parts), bias=torch.from_numpy(bias), out_dtype=out_dtype, order=order)
        got = pydet.fold(on_gpu, bias=torch.from_numpy(bias).cuda(), out_dtype=out_dtype, order=order)
        assert pydet.last_kernel() == "cuda_fold"
        assert got.cpu().contiguous().view(torch.uint8).equal(want.contiguous().view(torch.uint8))
        assert pydet.fold(list(on_gpu), bias=torch.from_numpy(bias).cuda(), out_dtype=out_dtype, order=order).equal(got)


def test_folded_segments_are_a_product_with_k_chunk(torch):
    for dtype, chunk in ((torch.bfloat16, 512), (torch.float16, 512), (torch.float32, 512)):
        x, w = torch.randn(33, 4096, device="cuda").to(dtype), torch.randn(4096, 256, device="cuda").to(dtype)
        parts = [pydet.gemm(x[:, i : i + chunk], w[i : i + chunk], out_dtype="float32") for i in range(0, 4096, chunk)]
        one = pydet.gemm(x, w, k_chunk=chunk)
        assert pydet.fold(parts, out_dtype=dtype).view(torch.uint8).equal(one.view(torch.uint8))


def test_graph_replays_have_the_same_bits(torch):
    parts = torch.randn(8, 64, 5000, device="cuda")
    out = torch.empty(64, 5000, device="cuda", dtype=torch.bfloat16)
    expected = pydet.fold(parts.cpu(), out_dtype="bfloat16")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pydet.fold(parts, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            pydet.fold(parts, out=out)
    for _ in range(20):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert out.cpu().view(torch.int16).equal(expected.view(torch.int16))


# ---- With peers: the ranks are streams of one GPU, each with few blocks, so that all run at once ---------------------


class Ranks:
    """The memory of so many ranks, and their calls."""

    def __init__(self, torch, count, parts):
        from pydet._native import constants, ffi

        size = constants.PYDET_FOLD_SIGNALS + (parts + count) * constants.PYDET_FOLD_ROOM
        self.torch, self.count, self.size, self.ffi = torch, count, size, ffi
        self.memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        self.streams = [torch.cuda.Stream() for _ in range(count)]
        self.addresses = ffi.new("void *[]", [ffi.cast("void *", m.data_ptr()) for m in self.memory])
        torch.cuda.synchronize()

    def fold(self, parts, outs, **options):
        """parts[r], outs[r]: rank r's."""
        from pydet.torch.distributed.symmetric import fold_with_peers

        flags = {name: options.pop(name, False) for name in ("gathered", "scatter")}
        for rank, stream in enumerate(self.streams):
            peers = self.ffi.new("pydet_fold_peers *")
            peers.ranks, peers.rank, peers.timeout_ms = self.count, rank, 10000
            peers.memory, peers.memory_size = self.addresses, self.size
            peers.gathered, peers.scatter = flags["gathered"], flags["scatter"]
            with self.torch.cuda.stream(stream):
                fold_with_peers(stream, peers, parts[rank], outs[rank], **options)


@pytest.mark.parametrize("kernel", ["cuda_fold_one_shot", "cuda_fold_two_shot", "cuda_fold_stream"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_fold_to_the_bits_of_one_fold(torch, count, kernel):
    ranks = Ranks(torch, count, 4 * count)
    for own, shape, order in itertools.product(
        (1, 2, 3, 4), ((1,), (7,), (1, 1000), (24, 40), (4, 4096), (25, 1001)), ("ordered", "tree")
    ):
        if kernel == "cuda_fold_stream" and order == "tree":
            continue
        parts = torch.randn(count * own, *shape, device="cuda")
        bias = torch.randn(shape[-1:], device="cuda")
        for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
            want = pydet.fold(parts, bias=bias, order=order, out_dtype=out_dtype)
            outs = [torch.full(shape, 7, device="cuda", dtype=out_dtype) for _ in range(count)]
            torch.cuda.synchronize()
            ranks.fold(list(parts.split(own)), outs, bias=bias, order=order, kernel=kernel)
            torch.cuda.synchronize()
            for rank, out in enumerate(outs):
                words = [x.view(torch.uint8) for x in (out, want)]
                assert words[0].equal(words[1]), f"rank {rank} of {count}: {own} x {shape} {order} {out_dtype}"
        if kernel == "cuda_fold_stream":
            continue
        begun = torch.randn(shape, device="cuda")
        outs = [begun.clone() for _ in range(count)]
        torch.cuda.synchronize()
        ranks.fold(list(parts.split(own)), outs, order=order, accumulate=True, kernel=kernel)
        torch.cuda.synchronize()
        want = pydet.fold(parts, out=begun, order=order, accumulate=True)
        assert all(out.equal(want) for out in outs)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_fold_shares(torch, count):
    """Scattered: rank r's rows of the sum. Gathered: rank r has its rows of all parts, and all get the whole sum."""
    ranks = Ranks(torch, count, 2 * count)
    for rows, columns in ((count, 1), (count, 30), (4 * count, 1024), (5 * count, 77)):
        parts = torch.randn(2 * count, rows, columns, device="cuda")
        bias, each = torch.randn(columns, device="cuda"), rows // count
        want = pydet.fold(parts, bias=bias, out_dtype="bfloat16")
        shares = [slice(r * each, (r + 1) * each) for r in range(count)]
        given = {
            "scatter": (list(parts.split(2)), each),
            "gathered": ([parts[:, share].contiguous() for share in shares], rows),
        }
        for name, (mine, extent) in given.items():
            outs = [torch.full((extent, columns), 7, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
            torch.cuda.synchronize()
            ranks.fold(mine, outs, bias=bias, **{name: True})
            torch.cuda.synchronize()
            assert pydet.last_kernel() == "cuda_fold_two_shot"
            for share, out in zip(shares, outs, strict=True):
                assert out.equal(want[share] if name == "scatter" else want), f"{name} {rows} {columns}"


def test_ranks_in_a_graph(torch):
    """An odd number of calls in a graph, replayed: the areas of memory are taken in turn all the same."""
    ranks, own = Ranks(torch, 2, 4), 2
    sets = [torch.randn(4, 9, 500, device="cuda") for _ in range(3)]
    wants = [pydet.fold(parts, out_dtype="bfloat16") for parts in sets]
    outs = [[torch.empty(9, 500, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in sets]

    def calls():
        for parts, out in zip(sets, outs, strict=True):
            ranks.fold(list(parts.split(own)), out)

    calls()
    torch.cuda.synchronize()
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for stream in ranks.streams:
            stream.wait_stream(main)
        calls()
        for stream in ranks.streams:
            main.wait_stream(stream)
    for _ in range(20):
        for out in itertools.chain(*outs):
            out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(out.equal(want) for pair, want in zip(outs, wants, strict=True) for out in pair)


def test_refusals_of_peers(torch):
    ranks = Ranks(torch, 2, 2)
    parts = [torch.ones(1, 3, 4, device="cuda")] * 2
    with pytest.raises(pydet.Error, match="fold: parts\\[0\\] is 3x4, want 6x4"):
        ranks.fold(parts, [torch.ones(3, 4, device="cuda")] * 2, scatter=True)
    with pytest.raises(pydet.Error, match="fold: out is 3x4, want a first extent that 2 ranks share"):
        ranks.fold(parts, [torch.ones(3, 4, device="cuda")] * 2, gathered=True)
    with pytest.raises(pydet.Error, match="count is 33 on each of 2 ranks, want at most 64 parts of all"):
        ranks.fold([torch.ones(33, 4, device="cuda")] * 2, [torch.ones(4, device="cuda")] * 2)
    ranks.size -= 1
    with pytest.raises(pydet.Error, match=r"peers\.memory_size is .*, want"):
        ranks.fold(parts, [torch.ones(3, 4, device="cuda")] * 2)
    ranks.size += 1
    ranks.count = 17
    with pytest.raises(pydet.Error, match=r"peers\.ranks is 17, want 1 to 16"):
        ranks.fold(parts, [torch.ones(3, 4, device="cuda")] * 2)
