"""rmsnorm_quantize on an NVIDIA GPU: the CPU's bits, and those of the two calls."""

import ml_dtypes
import numpy as np
import pytest

import pydet
import test_rmsnorm_quantize as cases
from test_cuda import OnDevice, each, torch  # noqa: F401


class Device(OnDevice):
    def to_host(self, tensor):
        if tensor.element_size() > 1:
            return super().to_host(tensor)
        kind = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."))
        return bytes_of(tensor).cpu().numpy().view(kind).reshape(tuple(tensor.shape))


@pytest.fixture
def device(torch, kernel):
    return Device(torch, kernel.name)


def bytes_of(tensor):
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


@each("rmsnorm_quantize")
def test_equals_the_cpu(device, kernel, dtype):
    cases.check(device, dtype)
    cases.check(device, dtype, [(40, 1), (40, 9), (40, 130), (3, 2050), (700, 264), (9, 7168), *cases.MANY] * 2)
    assert device.taken


@each("rmsnorm_quantize")
def test_is_the_two_calls(torch, device, kernel, dtype):
    """Of many rows, with scales that lie by groups and rows of q with gaps; in a CUDA graph, on a stream of its own."""
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for m, n in ((300, 520), (4096, 7168), (20000, 64), (513, 4096), (5, 16384), (3, 20000)):
        x, residual = (torch.randn(m, n + 8, device="cuda").to(types[dtype])[:, :n] for _ in range(2))
        weight = torch.randn(n, device="cuda")
        y, _, total = pydet.rmsnorm(x, weight, eps=1e-6, residual=residual)
        for granularity in ("group", "row"):
            want = (*pydet.quantize(y, granularity=granularity), total)
            q = torch.empty(m, n + 24, dtype=torch.float8_e4m3fn, device="cuda")[:, :n]
            scale = torch.empty(want[1].shape[1], m, device="cuda").t()
            options = {"eps": 1e-6, "residual": residual, "granularity": granularity, "kernel": kernel.name}
            try:
                got = pydet.rmsnorm_quantize(x, weight, out=(q, scale), **options)
            except pydet.Error:
                assert "held" in kernel.name and n > 16384
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = pydet.rmsnorm_quantize(x, weight, **options)
            graph.replay()
            torch.cuda.synchronize()
            for found in (got, again):
                for mine, theirs in zip(found, want, strict=True):
                    assert torch.equal(bytes_of(mine), bytes_of(theirs))
            given = torch.tensor(0.03, device="cuda")
            mine = pydet.rmsnorm_quantize(x, weight, eps=1e-6, residual=residual, scale=given, kernel=kernel.name)[0]
            theirs = pydet.quantize(y, granularity="tensor", scale=given)[0]
            assert torch.equal(bytes_of(mine), bytes_of(theirs))


def test_operators(torch):
    import pydet.torch as pt

    x, residual = (torch.randn(7, 300, device="cuda").bfloat16() for _ in range(2))
    q, scale, total = pt.rms_norm_quantize(x, None, eps=1e-6, residual=residual)
    want = pydet.rmsnorm_quantize(x.cpu(), eps=1e-6, residual=residual.cpu(), granularity="group")
    for mine, theirs in zip((q, scale, total), want, strict=True):
        assert np.array_equal(bytes_of(mine).cpu().numpy(), bytes_of(theirs).numpy())
