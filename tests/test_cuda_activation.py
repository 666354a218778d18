"""CUDA's kernels of activations, forced by name, against the CPU's."""

import numpy as np
import pytest

import pydet
import test_activation
from cases import DTYPES, assert_same_bits, data
from reference_activation import KINDS
from test_cuda import cuda_kernels, device, each, torch  # noqa: F401


class OneOf:
    """A device's functions, with the name of the kernel that tells which of the two are its."""

    def __init__(self, device, kernel):
        self.device, self.name = device, kernel.name

    def __getattr__(self, operation):
        return getattr(self.device, operation)


def test_every_kernel_is_listed():
    names = [kernel.name for name in ("activation", "activation_backward") for kernel in cuda_kernels(name)]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    assert names == ["cuda_activation", "cuda_activation_backward"]


@each("activation")
def test_forward(device, kernel, dtype):
    test_activation.check(OneOf(device, kernel), dtype, test_activation.SHAPES)
    assert device.taken > 40


@each("activation_backward")
def test_backward(device, kernel, dtype):
    test_activation.check(OneOf(device, kernel), dtype, test_activation.SHAPES)
    assert device.taken > 40


@each("activation")
def test_every_number(device, kernel, dtype):
    x = test_activation.every_number(dtype)
    for kind in KINDS:
        assert_same_bits(device.activation(x, kind), pydet.activation(x, kind), kind)


@each("activation_backward")
def test_the_gradient_of_every_number(device, kernel, dtype):
    x = test_activation.every_number(dtype)
    for kind in KINDS:
        dy, up = data("normal", x.shape, DTYPES[dtype]), np.ones_like(x)
        assert_same_bits(device.activation_backward(dy, x, kind), pydet.activation_backward(dy, x, kind), kind)
        for got, want in zip(
            device.activation_backward(dy, x, kind, up=up), pydet.activation_backward(dy, x, kind, up=up), strict=True
        ):
            assert_same_bits(got, want, kind)


@each("activation")
def test_large_and_narrow_and_shifted(device, kernel, dtype, torch):
    """More than a block's vectors, rows of halves, and memory that begins anywhere: on the device against the CPU."""
    kinds = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
    for rows, n in ((70, 3000), (4097, 24), (300, 1001)):
        both = torch.randn(rows, 2 * n, generator=torch.Generator().manual_seed(n)).to(kinds[dtype])
        want = pydet.swiglu(both[:, :n], both[:, n:])
        for start in (0, 1):
            memory = torch.empty(both.numel() + start, dtype=both.dtype, device="cuda")
            there = memory[start:].view(both.shape).copy_(both)
            assert torch.equal(pydet.activation(there[:, :n], up=there[:, n:], kernel=kernel.name).cpu(), want)
