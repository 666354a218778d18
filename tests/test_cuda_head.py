"""What rows of the head are asked on a GPU, by kernel and in whole: the CPU's bits, and those of the row alone."""

import pytest

import pydet
import test_head
from test_cuda import OnDevice, each, torch  # noqa: F401

SHAPES = [*test_head.ASKED_SHAPES, (40, 2049), (7, 6145), (300, 1031), (3, 50257)]


@each("head_rows")
def test_head_rows(torch, kernel, dtype):
    """In chunks of 16 rows and whole, of each type of logits; and in slabs of columns in the memory of dw."""
    device = OnDevice(torch)
    move = lambda array: device.to_device(array)[0]
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


def test_the_loss_of_the_library_is_refused(torch):
    """Of which there is no kernel on a GPU; pydet.torch.linear_cross_entropy makes it of PyTorch's own steps."""
    x, w = torch.ones(5, 8, device="cuda"), torch.ones(20, 8, device="cuda")
    target, loss = torch.arange(5, device="cuda"), torch.full((), 7.0, device="cuda")
    with pytest.raises(pydet.Error, match="no kernel on CUDA device 0 makes the loss of rows; those of the CPU do"):
        pydet.linear_cross_entropy(x, w, target, out=loss)
    assert loss.item() == 7
