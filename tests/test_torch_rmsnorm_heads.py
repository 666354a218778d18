"""pydet.torch.rms_norm with weights of heads, a bias and a residual in float32: the C calls' bits, operators, vmap."""

import itertools
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from test_torch import OPS, device, dtype, normal, refuses, same  # noqa: E402, F401


@pytest.mark.parametrize("per_head,biased,wide", list(itertools.product((True, False), repeat=3)))
def test_gradients_are_the_c_calls(device, dtype, per_head, biased, wide):
    shape, of = (2, 9, 4, 24), (4, 24) if per_head else (24,)
    x, dy = (normal(*shape, dtype=dtype, device=device, seed=seed) for seed in range(2))
    residual, dsum = (normal(*shape, dtype=torch.float32 if wide else dtype, device=device, seed=s) for s in (2, 3))
    weight, bias = normal(*of, dtype=dtype, device=device, seed=4), normal(*of, device=device, seed=5)
    parameters = (weight, bias) if biased else (weight,)
    leaves = [t.clone().requires_grad_() for t in (x, residual, *parameters)]
    options = {"eps": 1e-5, "weight_offset": 1.0}

    y = pt.rms_norm(leaves[0], leaves[2], bias=leaves[3] if biased else None, **options)
    want, rstd = pydet.rmsnorm(x, weight, bias=bias if biased else None, **options)
    same(y, want)
    gradients = torch.autograd.grad(y, (leaves[0], *leaves[2:]), dy)
    more = {"weight_offset": 1.0, "dbias": torch.empty_like(bias) if biased else None}
    for ours, theirs in zip(gradients, pydet.rmsnorm_backward(dy, x, weight, rstd, **more), strict=True):
        same(ours, theirs)

    y, total = pt.rms_norm(leaves[0], leaves[2], bias=leaves[3] if biased else None, residual=leaves[1], **options)
    want, rstd, want_total = pydet.rmsnorm(x, weight, bias=bias if biased else None, residual=residual, **options)
    same(y, want), same(total, want_total)
    assert total.dtype == residual.dtype
    dx, dresidual, *sums = torch.autograd.grad((y, total), leaves, (dy, dsum))
    want_dx, *want_sums = pydet.rmsnorm_backward(dy, want_total, weight, rstd, dresidual=dsum, **more)
    same(dx, want_dx.to(dtype)), same(dresidual, want_dx)
    for ours, theirs in zip(sums, want_sums, strict=True):
        same(ours, theirs)


def test_it_is_close_to_torchs():
    x, weight, bias, dy = normal(5, 3, 24), normal(3, 24, seed=1), normal(3, 24, seed=2), normal(5, 3, 24, seed=3)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    ours = pt.rms_norm(x, weight, bias=bias, eps=1e-5)
    theirs = torch.nn.functional.rms_norm(x, (24,), None, 1e-5) * weight + bias
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    for mine, other in zip(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=4e-6)


def test_transposed_heads_of_a_fused_projection_are_not_copied():
    qkv = normal(2, 7, 3 * 4 * 16)
    q = qkv[..., :64].view(2, 7, 4, 16).transpose(1, 2)  # three strides
    assert not q.is_contiguous()
    same(pt.rms_norm(q, normal(16, seed=1), eps=1e-5), pydet.rmsnorm(q.contiguous(), normal(16, seed=1), eps=1e-5)[0])
    y = torch.zeros_like(qkv)[..., :64].view(2, 7, 4, 16).transpose(1, 2)
    pydet.rmsnorm(q, eps=1e-5, out=y)
    same(y.contiguous(), pydet.rmsnorm(q.contiguous(), eps=1e-5)[0])


def test_opcheck():
    x, residual, weight, bias = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(3, 8, seed=2), normal(3, 8, seed=3)
    rstd = pydet.rmsnorm(x, eps=1e-5)[1]
    leaf = x.clone().requires_grad_()
    for op, arguments in [
        (OPS.rmsnorm, (leaf, weight, 1e-5)),
        (OPS.rmsnorm_residual, (x.bfloat16().requires_grad_(), residual, weight, 1e-5)),
        (OPS.rmsnorm_backward, (x.bfloat16(), x, weight, rstd)),
        (OPS.rmsnorm_bias, (leaf, weight, bias, 1e-5)),
        (OPS.rmsnorm_bias, (leaf, None, bias.requires_grad_(), 1e-5)),
        (OPS.rmsnorm_bias_residual, (leaf, residual, weight, bias.detach(), 1e-5)),
        (OPS.rmsnorm_bias_backward, (x, x, weight, bias.detach(), rstd)),
        (OPS.rmsnorm_bias_backward, (x, x, None, bias.detach(), rstd, 1.0, residual)),
    ]:
        torch.library.opcheck(op.default, arguments)


def test_vmap_is_over_rows():
    x, weight, bias = normal(3, 5, 2, 8), normal(2, 8, seed=1), normal(2, 8, seed=2)
    want = pydet.rmsnorm(x, weight, bias=bias, eps=1e-5)[0]
    same(torch.vmap(lambda x: pt.rms_norm(x, weight, bias=bias, eps=1e-5))(x), want)
    refuses(
        r"rmsnorm_bias: vmap over the weights is not defined",
        torch.vmap(lambda x, b: pt.rms_norm(x, weight, bias=b, eps=1e-5)),
        x,
        normal(3, 2, 8),
    )


def test_refusals():
    x, weight, bias = normal(5, 3, 8), normal(3, 8), normal(8)
    refuses(r"rmsnorm: bias is 8, want 3x8", pt.rms_norm, x, weight, bias=bias, eps=1e-5)
    meta = [t.to("meta") for t in (x, weight, bias)]
    refuses(r"rmsnorm: bias is 8, want 3x8", pt.rms_norm, meta[0], meta[1], bias=meta[2], eps=1e-5)
    leaf = x.clone().requires_grad_()
    refuses(
        r"rmsnorm_bias_backward: an operand requires grad", OPS.rmsnorm_bias_backward, leaf, x, None, bias, x[..., 0]
    )
