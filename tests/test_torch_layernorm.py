"""pydet.torch.layer_norm and LayerNorm: the bits of the C calls, gradients, operators, micro-batches."""

import itertools
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from test_torch import OPS, device, dtype, normal, refuses, same  # noqa: E402, F401


def test_gradients_are_the_c_calls(device, dtype):
    make = lambda *shape, seed=0: normal(*shape, dtype=dtype, device=device, seed=seed).requires_grad_()
    for with_weight, with_bias in ((True, True), (True, False), (False, True), (False, False)):
        x, residual, dy = make(2, 300, 40), make(2, 300, 40, seed=1), make(2, 300, 40, seed=2).detach()
        weight, bias = make(40, seed=3) if with_weight else None, make(40, seed=4) if with_bias else None
        w, b = (None if v is None else v.detach() for v in (weight, bias))
        y = pt.layer_norm(x, weight, bias, eps=1e-5)
        y.backward(dy)
        want, mean, rstd = pydet.layernorm(x.detach(), w, b, eps=1e-5)
        more = {"has_bias": False, "dbias": None if b is None else torch.empty_like(b)}
        gradients = pydet.layernorm_backward(dy, x.detach(), w, mean, rstd, **more)
        same(y, want)
        for tensor, gradient in zip((x, weight, bias), gradients, strict=True):
            assert (tensor is None and gradient is None) or same(tensor.grad, gradient) is None
        y, total = pt.layer_norm(x, weight, bias, eps=1e-5, residual=residual)
        torch.autograd.backward((y, total), (dy, dy))
        want, mean, rstd, want_sum = pydet.layernorm(x.detach(), w, b, eps=1e-5, residual=residual.detach())
        same(y, want)
        same(total, want_sum)
        dx = pydet.layernorm_backward(dy, want_sum, w, mean, rstd, dresidual=dy, **more)[0]
        same(residual.grad, dx)


def test_it_is_close_to_torchs():
    x, weight, bias = (normal(*shape, seed=s).requires_grad_() for s, shape in enumerate(((5, 7, 48), (48,), (48,))))
    dy, found = normal(5, 7, 48, seed=9), []
    for function in (lambda: pt.layer_norm(x + 3, weight, bias, eps=1e-5),
                     lambda: torch.nn.functional.layer_norm(x + 3, (48,), weight, bias, 1e-5)):  # fmt: skip
        y = function()
        found.append((y, *torch.autograd.grad(y, (x, weight, bias), dy)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_opcheck():
    x, weight, bias = (normal(*shape).requires_grad_() for shape in ((2, 3, 8), (8,), (8,)))
    plain, w = x.detach(), weight.detach()
    _, mean, rstd = pydet.layernorm(plain, eps=1e-5)
    for op, arguments in [
        (OPS.layernorm, (x, weight, bias, 1e-5)),
        (OPS.layernorm, (x, None, None, 1e-5)),
        (OPS.layernorm_residual, (x, normal(2, 3, 8, seed=2).requires_grad_(), weight, bias, 1e-5)),
        (OPS.layernorm_backward, (plain, plain, w, w, mean, rstd)),
        (OPS.layernorm_backward, (plain, plain, None, None, mean, rstd)),
    ]:
        torch.library.opcheck(op.default, arguments)


def test_strides_vmap_and_refusals():
    x, weight = normal(6, 4, 16), normal(16, seed=1)
    same(pt.layer_norm(x.transpose(0, 1), weight, eps=1e-5), pydet.layernorm(x, weight, eps=1e-5)[0].transpose(0, 1))
    odd = normal(4, 6, 16, 5).permute(3, 1, 0, 2)  # rows of three strides: copied
    same(pt.layer_norm(odd, weight, eps=1e-5), pydet.layernorm(odd.contiguous(), weight, eps=1e-5)[0])
    same(torch.vmap(lambda x: pt.layer_norm(x, weight, eps=1e-5))(x), pydet.layernorm(x, weight, eps=1e-5)[0])
    refuses(r"vmap over the weights", torch.vmap(lambda w: pt.layer_norm(x, w, eps=1e-5)), normal(3, 16))
    meta = lambda *shape: torch.empty(shape, device="meta")
    refuses(r"bias is 7, want 4", pt.layer_norm, meta(3, 4), None, meta(7), eps=1e-5)
    refuses(r"mean is 2, want 3", OPS.layernorm_backward, meta(3, 4), meta(3, 4), None, None, meta(2), meta(3))
    refuses(r"layernorm_backward: an operand requires grad", OPS.layernorm_backward, x.clone().requires_grad_(), x,
            None, None, x[..., 0].contiguous(), x[..., 0].contiguous())  # fmt: skip
    refuses(r"normalized_shape is \(3, 4\), want one extent", pt.LayerNorm, (3, 4))


def test_module_and_convert():
    norm, x = torch.nn.LayerNorm(24, eps=1e-3), normal(5, 24)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    want, keys, text = norm(x), list(norm.state_dict()), repr(norm)
    assert pt.convert(norm, strict=True).swapped == {"": "LayerNorm"} and not pt.convert(norm).swapped
    assert list(norm.state_dict()) == keys and repr(norm) == text
    same(norm(x), pydet.layernorm(x, norm.weight.detach(), norm.bias.detach(), eps=1e-3)[0])
    torch.testing.assert_close(norm(x), want)
    same(torch.jit.script(norm)(x), norm(x))
    same(torch.compile(norm, backend="aot_eager", fullgraph=True)(x), norm(x))
    assert "2 dimensions at once" in pt.convert(torch.nn.LayerNorm((3, 4))).left[""]
    assert "Own is a subclass of LayerNorm" in pt.convert(type("Own", (torch.nn.LayerNorm,), {})(4)).left[""]
    for options in ({"elementwise_affine": False}, {"bias": False}):
        made = pt.LayerNorm(24, **options)
        same(made(x), pydet.layernorm(x, eps=1e-5)[0])


def test_micro_batches_have_the_bits_of_one():
    net, x, dy = torch.nn.Sequential(pt.LayerNorm(32)), normal(700, 32), normal(700, 32, seed=1)
    torch.nn.init.normal_(net[0].weight)
    assert pt.accumulate_gradients(net) == [net[0].weight, net[0].bias]
    sums = []
    for cuts in ([0, 700], [0, 256, 512, 700]):
        for parameter in net.parameters():
            parameter.main_grad.zero_()
        for first, last in itertools.pairwise(cuts):
            net(x[first:last]).backward(dy[first:last])
        sums.append([parameter.main_grad.clone() for parameter in net.parameters()])
    for one, several in zip(*sums, strict=True):
        same(one, several)
    assert net[0].weight.grad is None and bool(sums[0][0].any()) and bool(sums[0][1].any())
