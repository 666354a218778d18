"""What rows of the head are asked on a GPU, by kernel and in whole: the CPU's bits, and those of the row alone."""

import pytest

import pydet
import test_head
import test_linear_cross_entropy as losses
from test_cuda import OnDevice, each, torch  # noqa: F401

SHAPES = [*test_head.ASKED_SHAPES, (40, 2049), (7, 6145), (300, 1031), (3, 50257)]
# Of the kernel that holds rows in a cluster's shared memory, around its pieces of two and its fours of vectors.
CLUSTER = "cuda_head_rows_cluster"
LONG = [(3, 8191), (2, 8193), (17, 16384), (3, 16386), (14, 50257), (2, 131071), (14, 152064), (3, 380001)]


@each("head_rows")
def test_head_rows(torch, kernel, dtype):
    """In chunks of 16 rows and whole, of each type of logits; and in slabs of columns in the memory of dw."""
    device = OnDevice(torch)
    move = lambda array: device.to_device(array)[0]
    if kernel.name == CLUSTER:
        test_head.check_asked(move, device.to_host, dtype, LONG, (16,), kernel=CLUSTER)
        for n in (3 * 2048, 17 * 2048 + 104, 40 * 2048 + 99, 76 * 2048 - 8):
            for softcap in (None, 3.0):
                test_head.check_asked_in_slabs(move, device.to_host, dtype, kernel=CLUSTER, n=n, softcap=softcap)
    test_head.check_asked(move, device.to_host, dtype, SHAPES, kernel=kernel.name)
    test_head.check_asked_in_slabs(move, device.to_host, dtype, kernel=kernel.name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_in_the_batch_and_alone(torch, dtype):
    """By the public functions: 700 rows of a vocabulary in 64 MB, four of them alone, and on the CPU."""
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(m, 96, generator=generator).to(getattr(torch, dtype)) for m in (700, 50257))
    index = torch.randint(0, 50257, (700,), generator=generator)
    dlog_prob, dentropy = (torch.randn(700, generator=generator) for _ in range(2))
    how = {"temperature": 0.7, "softcap": 30.0, "arithmetic": "ieee" if dtype == "float32" else "sm90"}
    given = [t.cuda() for t in (x, w, index)]
    whole = pydet.linear_log_prob(*given, return_entropy=True, workspace=64 << 20, **how)
    rows = [0, 13, 350, 699]
    few = x[rows], w, index[rows]
    alone = pydet.linear_log_prob(*(t.cuda() for t in few), return_entropy=True, **how)
    for found, one, cpu in zip(whole, alone, pydet.linear_log_prob(*few, return_entropy=True, **how), strict=True):
        assert torch.equal(found[rows], one) and torch.equal(one.cpu(), cpu)
    gradients = dlog_prob.cuda(), *given
    made = pydet.linear_log_prob_backward(*gradients, dentropy=dentropy.cuda(), **how)
    cut = pydet.linear_log_prob_backward(*gradients, dentropy=dentropy.cuda(), workspace=16 << 20, **how)
    assert torch.equal(made.dx, cut.dx) and torch.equal(made.dw, cut.dw)
    of_few = pydet.linear_log_prob_backward(dlog_prob[rows], *few, dentropy=dentropy[rows], of_w=False, **how)
    assert torch.equal(made.dx[rows].cpu(), of_few.dx)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_that_wait_and_that_are_passed_over(torch, dtype):
    """Drawn sizes, rows and temperatures, what is asked in every combination: both kernels."""
    generator = torch.Generator().manual_seed(11)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    dtype = getattr(torch, dtype)
    for case in range(24):
        rows, n = draw(1, 400), draw(1, 200000) if case % 2 else 8 * draw(1, 25000)
        x, w = (torch.randn(m, 40, generator=generator).to(dtype).cuda() for m in (rows, n))
        bias = torch.randn(n, generator=generator).cuda()
        bias[:: draw(2, 40)] = float("-inf")  # as of masked columns
        index = torch.randint(-1, n + 1, (rows,), generator=generator).cuda()
        by = [torch.randn(rows, generator=generator).cuda() if case >> i & 1 or i == 0 else None for i in range(4)]
        how = {"bias": bias, "temperature": (1.0, 0.6, 1e-6, 3e5)[case // 2 % 4], "arithmetic": "ieee"}
        how |= {"softcap": 5.0} if case % 5 == 0 else {}
        asked = {f"of_{name}": True for i, name in enumerate(("entropy", "lse", "mean", "greedy")) if case >> i & 1}
        names = dict(zip(("dentropy", "dlse", "dmean"), by[1:], strict=True))
        found = []
        for kernel in ("cuda_head_rows", CLUSTER):
            forward = pydet.ops.head._linear_log_prob(x, w, index, kernel=kernel, **asked, **how)
            more = {"of_x": True, "of_w": True, "of_bias": True, "of_log_prob": case % 3 > 0, "kernel": kernel}
            back = pydet.ops.head._linear_log_prob_backward(by[0], x, w, index, **names, **more, **how)
            found.append([*(forward if isinstance(forward, tuple) else (forward,)), *back])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                one, other = (t.contiguous().view(torch.uint8) for t in (one, other))
                assert torch.equal(one, other), (case, rows, n, how["temperature"], list(asked))


@pytest.mark.parametrize("dtype", test_head.DTYPES)
def test_linear_cross_entropy(torch, dtype):
    device = OnDevice(torch)
    move = lambda array: device.to_device(array)[0]
    losses.check_on_a_device(move, device.to_host, dtype)
