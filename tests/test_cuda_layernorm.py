"""The layer norm kernels of CUDA, forced by name, against the CPU's, and against themselves in other surroundings."""

import numpy as np
import pytest

import pydet
import reference
import test_golden
import test_layernorm
from cases import DTYPES, assert_same_bits, data
from test_cuda import OnDevice, cuda_kernels, device, each, torch  # noqa: F401
from test_rmsnorm import assert_all_same_bits

# Around the teams of the held kernels (256, 2048 and 8192 columns), and chains of 16 rows, blocks of 256 of them.
SHAPES = test_layernorm.SHAPES + test_layernorm.LONG_SHAPES
SHAPES += [(m, n) for n in (248, 264, 2040, 2056, 4088, 8184) for m in (1, 2, 5)]
# And the longest row that is held, 16384 columns, to both sides.
SHAPES += [(m, n) for n in (8193, 8200, 16376, 16383) for m in (1, 5)]
SHAPES += [(m, 64) for m in (2, 31, 33, 128, 511, 513, 1025)] + [(4100, 40), (260, 2056), (17, 9704)]
SHAPES += [(16385, 64), (16465, 72)]  # by groups


# What the kernels `chain` and `group` of gradients take: whole vectors, and columns around which others are faster.
RING = [(m, n) for m, n in SHAPES if n % 8 == 0 and 513 <= n <= 8192]


def enough(kernel):
    """How many of SHAPES a kernel takes, so that the tests below say something of it."""
    if kernel.endswith(("_chain", "_group")):
        return len(RING)
    return 5 if kernel.endswith("_backward_staged") else 31  # long rows that begin anywhere, or very long ones


def test_every_layernorm_kernel_is_listed():
    names = [kernel.name for operation in ("layernorm", "layernorm_backward") for kernel in cuda_kernels(operation)]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    assert len(names) == len(set(names)) == 14


@each("layernorm")
def test_forward(device, kernel, dtype):
    test_layernorm.check_forward(device.layernorm, dtype, SHAPES, expect=pydet.layernorm)
    assert device.taken >= enough(kernel.name)


@each("layernorm_backward")
def test_backward(device, kernel, dtype):
    test_layernorm.check_backward(device.layernorm_backward, dtype, SHAPES, expect=pydet.layernorm_backward)
    assert device.taken >= enough(kernel.name)


@each("layernorm")
def test_golden_forward(device, kernel, dtype):
    test_golden.check_golden("layernorm", device.layernorm, "ieee", dtype)


@each("layernorm_backward")
def test_golden_backward(device, kernel, dtype):
    test_golden.check_golden("layernorm_backward", device.layernorm_backward, "ieee", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone_and_sums_that_continue(torch, dtype):
    test_layernorm.check_rows_alone(OnDevice(torch), dtype)
    test_layernorm.check_sums_continue(OnDevice(torch).layernorm_backward, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_strided_rows_equal_the_cpu(torch, dtype):
    """Many rows, rows of two strides, of odd length, and at odd places; each sum over rows alone."""
    device = OnDevice(torch)
    for m, n, step in ((20000, 64, 1), (5000, 768, 2), (4099, 1024, 1), (300, 1601, 3), (33, 20000, 1)):
        x, dy = (data("normal", (m * step, n), DTYPES[dtype], seed + n)[::step] for seed in range(2))
        weight, bias = (data("normal", (n,), DTYPES[dtype], seed) for seed in (2, 3))
        forward = pydet.layernorm(x, weight, bias, eps=1e-5)
        assert_all_same_bits(device.layernorm(x, weight, bias, eps=1e-5), forward, f"{m}x{n} forward")
        operands = (dy, x, weight, *forward[1:])
        assert_all_same_bits(
            device.layernorm_backward(*operands), pydet.layernorm_backward(*operands), f"{m}x{n} backward"
        )
        no_bias = device.layernorm_backward(*operands, has_bias=False)
        assert_all_same_bits(no_bias, pydet.layernorm_backward(*operands, has_bias=False), f"{m}x{n}, no bias")


# Longest rows of each team of the held kernel, for few rows or for many.
TEAMS = [64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("many", [False, True])
def test_rows_around_each_team(torch, dtype, many):
    """Whole rows; one all -0 but for an element, one with an Inf; in turns with a residual, no bias, no weights."""
    dtype = getattr(torch, dtype)
    for i, n in enumerate(team + more for team in TEAMS for more in (-8, 0, 8) if team + more <= TEAMS[-1]):
        m = 3 if not many else max(4_600_000 // n, 250) if n > 4096 else 1027
        x = torch.randn(m, n).add(i % 5).to(dtype)
        x[0] = -0.0
        x[0, i] = float(i % 2)
        x[1, n - 1] = float("inf")
        weight, bias = torch.randn(2, n).to(dtype if i % 2 else torch.float32)

        def of(device, i=i, n=n, x=x, weight=weight, bias=bias):
            x, weight, bias = (t.to(device) for t in (x, weight, bias))
            kernel = "cuda_layernorm_held" if device == "cuda" else None
            residual = x.flip(0) if i % 3 == 0 else None
            return pydet.layernorm(
                x, weight if i % 7 else None, bias if i % 4 else None, eps=1e-5, residual=residual, kernel=kernel
            )

        for ours, theirs in zip(of("cuda"), of("cpu"), strict=True):
            assert ours.cpu().view(torch.uint8).equal(theirs.view(torch.uint8)), f"{m} x {n}"


def test_graph_replays_have_the_same_bits(torch):
    x, dy = (torch.randn(600, 768, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(768, device="cuda")
    y, dx = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (torch.empty(600, device="cuda") for _ in range(2))
    dweight, dbias = (torch.empty(768, device="cuda") for _ in range(2))

    def step():
        pydet.layernorm(x, weight, weight, eps=1e-5, out=(y, mean, rstd))
        pydet.layernorm_backward(dy, x, weight, mean, rstd, out=dx, dweight=dweight, dbias=dbias)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes the operands
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    outputs = (y, mean, rstd, dx, dweight, dbias)
    torch.cuda.synchronize()
    wanted = [t.cpu() for t in outputs]
    cpu = pydet.layernorm(x.cpu(), weight.cpu(), weight.cpu(), eps=1e-5)
    cpu += pydet.layernorm_backward(dy.cpu(), x.cpu(), weight.cpu(), *cpu[1:])
    for ours, theirs in zip(wanted, cpu, strict=True):
        assert bytes(ours.view(torch.uint8).numpy()) == bytes(theirs.view(torch.uint8).numpy())
    for _ in range(20):
        for output in outputs:
            output.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(t.cpu().equal(want) for t, want in zip(outputs, wanted, strict=True))


def test_a_dirty_workspace_and_no_rows(torch):
    rows = np.ones(0, np.float32)
    none, weight = np.ones((0, 8), np.float32), np.ones(8, np.float32)
    for result in OnDevice(torch).layernorm_backward(none, none, weight, rows, rows)[1:]:
        assert_same_bits(result, np.zeros(8, np.float32))
    x = data("normal", (300, 72), DTYPES["fp32"])
    want = reference.layernorm_backward(x, x, x[0], x[:, 0].copy(), x[:, 1].copy())
    torch.full((1 << 22,), float("nan"), device="cuda")  # freed at once: the allocator gives it to the next workspace
    assert_all_same_bits(OnDevice(torch).layernorm_backward(x, x, x[0], x[:, 0].copy(), x[:, 1].copy()), want, "dirty")
