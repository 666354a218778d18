"""The softmax kernels of CUDA, forced by name, against the CPU's, and against themselves in other surroundings."""

import numpy as np
import pytest

import pydet
import test_softmax
from cases import DTYPES, assert_same_bits, data
from test_cuda import OnDevice, cuda_kernels, each, torch  # noqa: F401


class Forced(OnDevice):
    """As OnDevice, with column numbers moved as they are."""

    def to_device(self, array):
        if array.dtype.kind == "i":
            return self.torch.from_numpy(array.copy()).cuda(), lambda: None
        return super().to_device(array)


@pytest.fixture
def device(torch, kernel):
    if not kernel.available:
        pytest.skip(f"{kernel.name} needs {kernel.requires}")
    return Forced(torch, kernel.name)


def test_every_softmax_kernel_is_listed():
    names = [kernel.name for operation in ("softmax", "softmax_backward") for kernel in cuda_kernels(operation)]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    assert len(names) == len(set(names)) == 4


@each("softmax")
def test_forward(device, kernel, dtype):
    test_softmax.check_forward(device, dtype, test_softmax.SHAPES + test_softmax.LONG_SHAPES)
    assert device.taken > 20


@each("softmax_backward")
def test_backward(device, kernel, dtype):
    test_softmax.check_backward(device, dtype, test_softmax.SHAPES + test_softmax.LONG_SHAPES)
    assert device.taken > 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_strided_rows_equal_the_cpu(torch, dtype):
    """A vocabulary, many rows, rows of two strides, of odd length, and at odd places."""
    device = Forced(torch)
    for m, n, step in ((300, 32000, 1), (5000, 264, 2), (4099, 128, 1), (33, 50257, 1), (70, 4097, 3)):
        x = data("normal", (m * step, n), DTYPES[dtype], n)[::step]
        index = test_softmax.indices(m, n, n)
        assert_same_bits(device.softmax(x), pydet.softmax(x), f"{m}x{n}")
        assert_same_bits(device.log_prob(x, index), pydet.log_prob(x, index), f"{m}x{n} log_prob")
        y = pydet.log_softmax(x)
        assert_same_bits(device.log_softmax_backward(x, y), pydet.log_softmax_backward(x, y), f"{m}x{n} backward")


def test_graph_replays_have_the_same_bits(torch):
    x = torch.randn(64, 5000, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    expected = pydet.softmax(x.cpu())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pydet.softmax(x, out=y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            pydet.softmax(x, out=y)
    for _ in range(20):
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert y.cpu().view(torch.int16).equal(expected.view(torch.int16))


def test_numpy_bits_of_a_long_row(torch):
    """A row alone, in a batch, and with a masked tail."""
    x = np.random.default_rng(5).standard_normal((3, 128256)).astype(np.float32)
    masked = np.concatenate([x, np.full((3, 777), -np.inf, np.float32)], axis=1)
    device = Forced(torch)
    whole = device.softmax(masked)[:, :128256]
    assert_same_bits(device.softmax(x), np.ascontiguousarray(whole))
    assert_same_bits(device.softmax(x[1:2]), np.ascontiguousarray(whole[1:2]))


def test_exp_of_every_fp32_is_within_an_ulp(torch):
    """All 2^32 of them: dx of log_softmax is fmaf(-exp(y), c, dy), here with c = 1 and dy = +0."""
    rows, n, first = 1 << 16, 1 << 10, 8  # the first columns make c = 1
    y, dy = (torch.zeros(rows, first + n, device="cuda") for _ in range(2))
    dy[:, 0] = 1
    words, worst, count = torch.arange(rows * n, device="cuda").reshape(rows, n), 0.0, 0
    for start in range(-(1 << 31), 1 << 31, rows * n):
        y[:, first:] = (words + start).int().view(torch.float32)
        x, found = y[:, first:], -pydet.log_softmax_backward(dy, y)[:, first:]
        assert found.isnan().equal(x.isnan())
        exact = x.double().exp()
        infinite = exact >= 2.0**128 - 2.0**103  # what rounds to no number
        assert found.isinf().equal(infinite)
        unit = torch.ldexp(torch.ones_like(exact), exact.frexp()[1] - 24).clamp_min(2.0**-149)
        error = ((found.double() - exact).abs() / unit)[~(x.isnan() | infinite)]
        count += x.numel()
        worst = max(worst, float(error.max())) if error.numel() else worst
    assert count == 1 << 32 and 0.6 < worst <= 0.88, worst
