"""pydet.torch.softmax, log_softmax and log_prob: the bits of the C calls, gradients, operators, vmap, refusals."""

import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from test_torch import OPS, device, dtype, normal, refuses, same  # noqa: E402, F401


def test_gradients_are_the_c_calls(device, dtype):
    for shape in ((2, 9, 40), (3, 2050)):
        x = normal(*shape, dtype=dtype, device=device).requires_grad_()
        dy, plain = normal(*shape, dtype=dtype, device=device, seed=1), x.detach()
        for ours, forward, backward in (
            (pt.softmax, pydet.softmax, pydet.softmax_backward),
            (pt.log_softmax, pydet.log_softmax, pydet.log_softmax_backward),
        ):
            y = ours(x)
            same(y, forward(plain))
            same(torch.autograd.grad(y, x, dy)[0], backward(dy, y.detach()))
        for kind in (torch.int32, torch.int64):
            index = (torch.arange(x[..., 0].numel(), device=device, dtype=kind) * 7 % shape[-1]).view(shape[:-1])
            p = pt.log_prob(x, index)
            same(p, pydet.log_prob(plain, index))
            same(p, pt.log_softmax(plain.float()).gather(-1, index.long()[..., None])[..., 0])
            weight = normal(*shape[:-1], device=device, seed=2)
            same(torch.autograd.grad(p, x, weight)[0], pydet.log_prob_backward(weight, plain, index))


def test_it_is_close_to_torchs():
    x, dy, index = normal(5, 7, 48).requires_grad_(), normal(5, 7, 48, seed=9), torch.arange(35).view(5, 7)
    for ours, theirs in (
        (pt.softmax(3 * x), torch.softmax(3 * x, -1)),
        (pt.log_softmax(3 * x), torch.log_softmax(3 * x, -1)),
        (pt.log_prob(x, index), torch.log_softmax(x, -1).gather(-1, index[..., None])[..., 0]),
    ):
        gradient = dy if ours.dim() == 3 else dy[..., 0]
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        mine, other = (torch.autograd.grad(y, x, gradient)[0] for y in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)


def test_opcheck():
    x, dy, index = normal(2, 3, 8), normal(2, 3, 8, seed=1), torch.tensor([[0, 7, 3], [1, 8, -1]])
    leaf = x.clone().requires_grad_()
    for op, arguments in [
        (OPS.softmax, (leaf,)),
        (OPS.log_softmax, (leaf,)),
        (OPS.log_prob, (leaf, index.clamp(0, 7))),
        (OPS.softmax_backward, (dy, x)),
        (OPS.log_softmax_backward, (dy, x)),
        (OPS.log_prob_backward, (dy[..., 0].contiguous(), x, index)),
    ]:
        torch.library.opcheck(op.default, arguments)


def test_strides_vmap_compile_and_refusals():
    x, index = normal(6, 4, 16), torch.arange(24).view(4, 6) % 16
    same(pt.softmax(x.transpose(0, 1)), pydet.softmax(x).transpose(0, 1))
    odd = normal(4, 6, 16, 5).permute(3, 1, 0, 2)  # rows of three strides: copied
    same(pt.log_softmax(odd), pydet.log_softmax(odd.contiguous()))
    same(pt.log_prob(x, index.t()), pydet.log_prob(x, index.t().contiguous()))
    same(torch.vmap(pt.softmax)(x), pydet.softmax(x))
    same(torch.vmap(pt.log_prob)(x, index.t()), pydet.log_prob(x, index.t().contiguous()))
    loss = lambda x: pt.log_prob(x, index.t()).sum() + pt.softmax(x).square().sum()
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf)
    same(torch.autograd.grad(compiled, leaf)[0], torch.autograd.grad(loss(leaf), leaf)[0])
    meta = lambda *shape, **more: torch.empty(shape, device="meta", **more)
    refuses(r"log_prob: index is float32, want int32 or int64", pt.log_prob, meta(3, 4), meta(3))
    refuses(r"log_prob: index is 2, want 3", pt.log_prob, meta(3, 4), meta(2, dtype=torch.int64))
    refuses(r"softmax: x is float64, want float32", pt.softmax, meta(3, 4, dtype=torch.float64))
    refuses(r"softmax_backward: dy is 3x5, want 3x4", OPS.softmax_backward, meta(3, 5), meta(3, 4))
    refuses(r"log_softmax_backward: an operand requires grad", OPS.log_softmax_backward, leaf, x)
    refuses(
        r"softmax: no forward-mode gradient|softmax: the gradients of torch.func",
        torch.func.grad(lambda x: pt.softmax(x).sum()),
        x,
    )
