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
    assert names == ["cuda_fold"]


@each("fold")
def test_fold_equals_the_reference(device, kernel, dtype):
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
