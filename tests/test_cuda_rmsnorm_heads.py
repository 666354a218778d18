"""rmsnorm of heads, with a bias, a residual in float32 and rows of three strides, on CUDA: by name, as on the CPU."""

import pytest

import pydet
import test_rmsnorm_heads
from cases import DTYPES
from test_cuda import OnDevice, cuda_kernels, device, each, torch  # noqa: F401

SHAPES = test_rmsnorm_heads.SHAPES + test_rmsnorm_heads.LONG_SHAPES
SHAPES += [(tokens, 4, n) for tokens in (31, 33, 511, 513) for n in (72, 120, 128)] + [
    (2, 3, n) for n in (248, 1032, 2040)
]


def of_heads(operation):
    """The kernels that take what these tests are about: the others refuse it all."""
    return [kernel for kernel in cuda_kernels(operation) if "general" in kernel.name]


def test_one_kernel_each_way_takes_heads():
    if not cuda_kernels("rmsnorm"):
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    assert len(of_heads("rmsnorm")) == len(of_heads("rmsnorm_backward")) == 1


@each("rmsnorm")
def test_forward(device, kernel, dtype):
    if kernel not in of_heads("rmsnorm"):
        pytest.skip("not a kernel of heads")
    test_rmsnorm_heads.check_forward(device.rmsnorm, dtype, SHAPES, expect=pydet.rmsnorm)
    assert device.refused == 0


@each("rmsnorm_backward")
def test_backward(device, kernel, dtype):
    if kernel not in of_heads("rmsnorm_backward"):
        pytest.skip("not a kernel of heads")
    test_rmsnorm_heads.check_backward(device.rmsnorm_backward, dtype, SHAPES, expect=pydet.rmsnorm_backward)
    assert device.refused == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_alone_and_sums_that_continue(torch, dtype):
    device = OnDevice(torch)
    test_rmsnorm_heads.check_each_head_alone(device.rmsnorm, device.rmsnorm_backward, dtype)
    test_rmsnorm_heads.check_sums_continue(device.rmsnorm_backward, dtype)
