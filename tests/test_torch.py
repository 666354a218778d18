"""pydet.torch: the bits of the C calls through operators, autograd, compile, modules and the aten override."""

import copy
import importlib.util
import itertools
import os
import pathlib
import textwrap
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from pydet.torch import ops  # noqa: E402, F401
from torch_bits import differ, normal, same  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
OPS = torch.ops.pydet


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


# ---- Operators ---------------------------------------------------------------------------------------------------


def test_the_schemas_are_those_of_the_release():
    """Compiled graphs and exported programs name operators and their arguments."""
    here = sorted(str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("pydet::"))
    released = (pathlib.Path(__file__).parent / "data" / "torch_schemas.txt").read_text().splitlines()
    assert here == released


def test_gemm_from_and_its_gradients(device, dtype):
    """A product cut in two is the whole one, forward; each half's gradients are those of a gemm of that half."""
    a, b = normal(5, 64, dtype=dtype, device=device), normal(64, 9, dtype=dtype, device=device)
    bias, dc = normal(9, device=device), normal(5, 9, dtype=dtype, device=device)
    begun = OPS.gemm(a[:, :32], b[:32], None, torch.float32)
    operands = [x.detach().clone().requires_grad_() for x in (a[:, 32:], b[32:], begun, bias)]
    whole, y = OPS.gemm(a, b, bias), OPS.gemm_from(*operands)
    same(y.detach(), whole)
    y.backward(dc)
    same(operands[0].grad, OPS.gemm_da(dc, b[32:]))
    same(operands[1].grad, OPS.gemm_db(a[:, 32:].contiguous(), dc))
    same(operands[2].grad, dc.float())
    plain = [x.detach().clone().requires_grad_() for x in (a[:, 32:], b[32:], bias)]
    OPS.gemm(*plain).backward(dc)
    same(operands[3].grad, plain[2].grad)
    with torch.device("meta"):
        traced = OPS.gemm_from(torch.empty(5, 32), torch.empty(32, 9), torch.empty(5, 9), None, torch.bfloat16)
        assert traced.shape == (5, 9) and traced.dtype == torch.bfloat16
        with pytest.raises(pydet.Error, match=r"^gemm: initial is 5x8, want 5x9$"):
            OPS.gemm_from(torch.empty(5, 32), torch.empty(32, 9), torch.empty(5, 8))
        with pytest.raises(pydet.Error, match=r"^gemm: initial is bfloat16, want float32$"):
            OPS.gemm_from(torch.empty(5, 32), torch.empty(32, 9), torch.empty(5, 9, dtype=torch.bfloat16))
    with pytest.raises(pydet.Error, match=r"^gemm: initial is 5x8, want 5x9$"):
        OPS.gemm_from(a, b, begun[:, :8])


def test_operators_have_the_bits_of_the_functions(device, dtype):
    a, b = normal(3, 5, 40, dtype=dtype, device=device), normal(3, 40, 9, dtype=dtype, device=device)
    x, w, bias = (
        normal(2, 7, 40, dtype=dtype, device=device),
        normal(9, 40, dtype=dtype, device=device),
        normal(9, device=device),
    )
    options = (torch.float32, "sm90" if dtype != torch.float32 else "ieee", 16)
    keywords = {"out_dtype": options[0], "arithmetic": options[1], "k_chunk": options[2]}
    same(OPS.gemm(a, b), pydet.gemm(a, b))
    same(OPS.gemm(a, b, bias, *options), pydet.gemm(a, b, bias=bias, **keywords))
    begun = normal(3, 5, 9, device=device)
    same(OPS.gemm_from(a, b, begun, bias, *options), pydet.gemm(a, b, initial=begun, bias=bias, **keywords))
    same(OPS.gemm_from(a, b, begun.mT.contiguous().mT), pydet.gemm(a, b, initial=begun))
    same(OPS.gemm_da(a, b.mT, *options), pydet.gemm_da(a, b.mT, **keywords))
    same(OPS.gemm_db(a.mT, b, *options), pydet.gemm_db(a.mT, b, **keywords))
    same(OPS.skinny_gemm(x, w, bias, *options, True), pydet.skinny_gemm(x, w, bias=bias, **keywords))
    weight, residual = normal(40, dtype=dtype, device=device), normal(2, 7, 40, dtype=dtype, device=device, seed=1)
    for got, want in zip(
        OPS.rmsnorm(x, weight, 1e-5, 1.0), pydet.rmsnorm(x, weight, eps=1e-5, weight_offset=1.0), strict=True
    ):
        same(got, want)
    got = OPS.rmsnorm_residual(x, residual, weight, 1e-5)
    for ours, theirs in zip(got, pydet.rmsnorm(x, weight, eps=1e-5, residual=residual), strict=True):
        same(ours, theirs)
    for dweight_of in (weight, None):
        dx, dweight = OPS.rmsnorm_backward(residual, x, dweight_of, got[1], 0.0, x)
        want = pydet.rmsnorm_backward(residual, x, dweight_of, got[1], dresidual=x)
        same(dx, want[0])
        assert dweight.numel() == 0 if dweight_of is None else same(dweight, want[1]) is None


def test_dispatch_modes_see_the_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            names.append(operator._schema.name)
            return operator(*args, **(kwargs or {}))

    names, x, w = [], normal(3, 8), normal(8, 8)
    with Seen():
        y = OPS.gemm(x, w)
        OPS.skinny_gemm(x, w)
        rstd = OPS.rmsnorm(x, None, 1e-5)[1]
        OPS.rmsnorm_backward(x, x, None, rstd)
    same(y, pydet.gemm(x, w))
    expected = ["pydet::gemm", "pydet::skinny_gemm", "pydet::rmsnorm", "pydet::rmsnorm_backward"]
    assert [name for name in names if name.startswith("pydet")] == expected


def test_opcheck():
    a, b, bias = (normal(*shape).requires_grad_() for shape in [(4, 8), (8, 3), (3,)])
    x, weight = normal(2, 3, 8).requires_grad_(), normal(8).requires_grad_()
    rstd = pydet.rmsnorm(x.detach(), eps=1e-5)[1]
    plain = [t.detach() for t in (a, b, x, weight)]
    samples = [
        (OPS.gemm, (a, b, bias, None, "ieee", 16)),
        (OPS.gemm, (a, b)),
        (OPS.skinny_gemm, (x, b.detach().mT.contiguous().requires_grad_(), bias)),
        (OPS.rmsnorm, (x, weight, 1e-5)),
        (OPS.rmsnorm_residual, (x, normal(2, 3, 8, seed=2).requires_grad_(), weight, 1e-5)),
        (OPS.gemm_da, (plain[0], plain[0])),
        (OPS.gemm_db, (plain[0], plain[0])),
        (OPS.rmsnorm_backward, (plain[2], plain[2], plain[3], rstd)),
        (OPS.rmsnorm_backward, (plain[2], plain[2], None, rstd)),
    ]
    for op, arguments in samples:
        torch.library.opcheck(op.default, arguments)


def test_fake_tensors_have_the_real_ones_shapes():
    cases = [
        (OPS.gemm, ((2, 3, 8), (8, 5)), {"out_dtype": torch.float32}),
        (OPS.gemm_da, ((2, 3, 8), (2, 5, 8)), {}),
        (OPS.gemm_db, ((2, 8, 3), (2, 8, 5)), {}),
        (OPS.skinny_gemm, ((2, 3, 8), (5, 8)), {}),
    ]
    for op, shapes, options in cases:
        real = op(*(normal(*shape, dtype=torch.bfloat16) for shape in shapes), **options)
        meta = op(*(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes), **options)
        assert (real.shape, real.dtype) == (meta.shape, meta.dtype) and meta.device.type == "meta"


# ---- Autograd ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_chunk", [None, 16])
def test_linear_gradients_are_the_c_calls(device, dtype, k_chunk):
    x, w, bias = (normal(*shape, dtype=dtype, device=device) for shape in ((4, 37, 160), (75, 160), (75,)))
    dy = normal(4, 37, 75, dtype=dtype, device=device, seed=5)
    rows, drows, ones = x.reshape(-1, 160), dy.reshape(-1, 75), torch.ones(4 * 37, 1, dtype=dtype, device=device)
    tracked = [t.clone().requires_grad_() for t in (x, w, bias)]
    for function in (pt.linear, pt.skinny_linear):
        y = function(*tracked, k_chunk=k_chunk)
        y.backward(dy)
        same(y, pydet.gemm(x, w.T, bias=bias, k_chunk=k_chunk))
        same(tracked[0].grad.reshape(-1, 160), pydet.gemm_da(drows, w.T, k_chunk=k_chunk))
        same(tracked[1].grad, pydet.gemm_db(rows, drows, k_chunk=k_chunk).T)
        same(tracked[2].grad, pydet.gemm_db(ones, drows, k_chunk=k_chunk)[0])
        for t in tracked:
            t.grad = None


@pytest.mark.parametrize("k_chunk", [None, 16])
def test_gemm_gradients_are_the_c_calls(device, dtype, k_chunk):
    dc = normal(3, 35, 49, dtype=dtype, device=device, seed=7)
    for b_shape in ((3, 40, 49), (40, 49)):
        a, b = (normal(*shape, dtype=dtype, device=device) for shape in ((3, 35, 40), b_shape))
        tracked = [t.clone().requires_grad_() for t in (a, b)]
        pt.gemm(*tracked, k_chunk=k_chunk).backward(dc)
        rows = (a, dc) if len(b_shape) == 3 else (a.reshape(-1, 40), dc.reshape(-1, 49))
        for gradient, call, operands in zip(
            [t.grad for t in tracked], (pydet.gemm_da, pydet.gemm_db), ((dc, b), rows), strict=True
        ):
            same(gradient, call(*operands, k_chunk=k_chunk))
            if dtype == torch.float32:  # k_chunk shows in the bits
                differ(gradient, call(*operands, k_chunk=32))


def test_rms_norm_gradients_are_the_c_calls(device, dtype):
    x, residual = (normal(6, 40, dtype=dtype, device=device, seed=s).requires_grad_() for s in (0, 1))
    weight, dy, dsum = (
        normal(40, dtype=dtype, device=device).requires_grad_(),
        *(normal(6, 40, dtype=dtype, device=device, seed=s) for s in (2, 3)),
    )
    y = pt.rms_norm(x, weight, eps=1e-5, weight_offset=1.0)
    y.backward(dy)
    want_y, rstd = pydet.rmsnorm(x.detach(), weight.detach(), eps=1e-5, weight_offset=1.0)
    dx, dweight = pydet.rmsnorm_backward(dy, x.detach(), weight.detach(), rstd, weight_offset=1.0)
    same(y, want_y), same(x.grad, dx), same(weight.grad, dweight)
    x.grad = weight.grad = None
    y, total = pt.rms_norm(x, weight, eps=1e-5, residual=residual)
    torch.autograd.backward([y, total], [dy, dsum])
    want_y, rstd, want_sum = pydet.rmsnorm(x.detach(), weight.detach(), eps=1e-5, residual=residual.detach())
    dx, dweight = pydet.rmsnorm_backward(dy, want_sum, weight.detach(), rstd, dresidual=dsum)
    same(y, want_y), same(total, want_sum), same(x.grad, dx), same(residual.grad, dx), same(weight.grad, dweight)


def test_gradients_are_right():
    """Against finite differences in the large, since the bits are compared above: fp32 beside fp64."""
    a, b, bias = normal(4, 8).requires_grad_(), normal(8, 3).requires_grad_(), normal(3).requires_grad_()
    weight = normal(3, seed=3).requires_grad_()
    pt.rms_norm(torch.tanh(pt.gemm(a, b, bias)), weight, eps=1e-5).sin().sum().backward()
    doubles = [t.detach().double().requires_grad_() for t in (a, b, bias, weight)]
    h = torch.tanh(doubles[0] @ doubles[1] + doubles[2])
    (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * doubles[3]).sin().sum().backward()
    for ours, theirs in zip((a, b, bias, weight), doubles, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_gradients_of_batch_rows_do_not_depend_on_the_batch(dtype):
    x, w, dy = normal(33, 64, dtype=dtype), normal(16, 64, dtype=dtype), normal(33, 16, dtype=dtype, seed=2)
    whole = x.clone().requires_grad_()
    pt.linear(whole, w).backward(dy)
    alone = x[7:8].clone().requires_grad_()
    pt.linear(alone, w).backward(dy[7:8])
    same(whole.grad[7:8], alone.grad)


def test_operands_of_any_strides():
    x, residual, weight = normal(2, 5, 3, 16), normal(2, 5, 3, 16, seed=1), normal(16)
    heads, other = (t.detach().transpose(1, 2)[..., ::2].requires_grad_() for t in (x, residual))
    dy = normal(2, 8, 3, 5, seed=3).permute(0, 2, 3, 1)
    y, total = pt.rms_norm(heads, weight[::2], eps=1e-5, residual=other)
    torch.autograd.backward([y, total], [dy, dy])
    plain, packed, same_dy = heads.detach().contiguous(), other.detach().contiguous(), dy.contiguous()
    want, rstd, want_sum = pydet.rmsnorm(plain, weight[::2].contiguous(), eps=1e-5, residual=packed)
    same(y, want), same(total, want_sum)
    want = pydet.rmsnorm_backward(same_dy, want_sum, weight[::2].contiguous(), rstd, dresidual=same_dy)
    same(heads.grad, want[0])
    a, b, dc = normal(3, 8, 8)[:, ::2, ::2], normal(16, 12)[::4, ::2], normal(4, 3, 6).transpose(0, 1)
    a.requires_grad_(), b.requires_grad_()
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            c = pt.gemm(a, b)
            same(c, pydet.gemm(a.detach().contiguous(), b.detach().contiguous()))
            same(pt.linear(a, b.T), c)
    pt.gemm(a, b).backward(dc)
    same(b.grad, pydet.gemm_db(a.detach().contiguous().view(12, 4), dc.reshape(12, 6)))


def test_gradients_of_empty_products():
    for rows, k, n in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        x, w, bias = (torch.zeros(2, rows, k), torch.zeros(n, k), torch.zeros(n))
        for t in (x, w, bias):
            t.requires_grad_()
        pt.linear(x, w, bias).sum().backward()
        assert all(t.grad.shape == t.shape for t in (x, w, bias))
        assert bool((w.grad == 0).all()) and bool((bias.grad == 2 * rows).all())


# ---- Compile, graphs, vmap ---------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.up, self.down = pt.RMSNorm(32), pt.Linear(32, 48), pt.Linear(48, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def test_compiled_whole_graph_has_the_eager_bits():
    block, x = Block(), normal(5, 32)
    eager = block(x)
    eager.sum().backward()
    gradients = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    counted = []

    def backend(graph, inputs):
        counted.append(sum("pydet" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph.forward

    with torch.no_grad():
        torch._dynamo.reset()
        same(torch.compile(block, fullgraph=True, backend=backend)(x), eager)
    assert counted == [3], "one call for each use"
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    compiled.sum().backward()
    same(compiled, eager)
    for parameter, gradient in zip(block.parameters(), gradients, strict=True):
        same(parameter.grad, gradient)


def test_inductor_with_emulated_roundings_has_the_eager_bits():
    block = Block().bfloat16()
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", message="pydet.torch")
        options = {"emulate_precision_casts": True}
        compiled = torch.compile(block, fullgraph=True, dynamic=True, options=options)
        for rows in (5, 1, 3, 17, 64):
            x = normal(64, 32, dtype=torch.bfloat16)[:rows]
            same(compiled(x), block(x))


def training(block, call):
    """Results, gradients and parameters of three steps of SGD."""
    optimizer, found = torch.optim.SGD(block.parameters(), lr=0.125), []
    for step in range(3):
        x, dy = (normal(17, 32, dtype=torch.bfloat16, seed=seed) for seed in (step, 10 + step))
        optimizer.zero_grad()
        y = call(x.requires_grad_())
        y.backward(dy)
        found += [y, x.grad, *(p.grad.clone() for p in block.parameters())]
        optimizer.step()
        found += [p.detach().clone() for p in block.parameters()]
    return found


def test_a_compiled_training_step_has_the_eager_bits():
    """In bfloat16, in which models train. In float32 Inductor has another formula for the gradient of silu."""
    torch._dynamo.reset()
    eager, block = Block().bfloat16(), Block().bfloat16()
    compiled = torch.compile(block, fullgraph=True, options={"emulate_precision_casts": True})
    want = training(eager, eager)
    for ours, theirs in zip(training(block, compiled), want, strict=True):
        same(ours, theirs)
    assert bool((want[-1] != next(reversed([*Block().bfloat16().parameters()]))).any())


def test_inductor_without_them_is_warned_of(monkeypatch):
    """Inductor itself stands aside: the warning is of what is traced for it."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, **options: graph.forward)

    def warned(**options):
        torch._dynamo.reset()
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.compile(Block(), fullgraph=True, **options)(normal(5, 32))
        return any("pydet.torch: torch.compile will fuse element-wise steps" in str(w.message) for w in caught)

    assert warned() and warned(dynamic=True) and warned(options={"emulate_precision_casts": False})
    assert not warned(options={"emulate_precision_casts": True}) and not warned(backend="aot_eager")
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert not warned()
    torch._dynamo.reset()


def test_vmap_has_the_eager_bits():
    a, b = normal(4, 3, 5, 16), normal(4, 16, 6)
    same(torch.vmap(pt.gemm, in_dims=(0, None))(a, b[0]), pydet.gemm(a, b[0]))
    same(torch.vmap(pt.gemm)(a[:, 0], b), pydet.gemm(a[:, 0], b))
    same(torch.vmap(pt.gemm, in_dims=(None, 0))(a[0, 0], b), pydet.gemm(a[0, 0], b))
    bias = normal(4, 6)
    for left, right in ((a[:, 0], b), (a[0, 0], b), (a[:, 0], b[0]), (a[0, 0], b[0]), (a, b[0])):
        dims = (0 if left.dim() > 2 else None, 0 if right.dim() > 2 else None, 0)
        for i, one in enumerate(torch.vmap(pt.gemm, in_dims=dims)(left, right, bias)):
            operands = (left[i] if left.dim() > 2 else left, right[i] if right.dim() > 2 else right)
            same(one, pydet.gemm(*operands, bias=bias[i]))
    x, w, weight = normal(4, 5, 16), normal(6, 16), normal(16)
    tracked = w.clone().requires_grad_()
    torch.vmap(pt.linear, in_dims=(0, None))(x, tracked).backward(torch.ones(4, 5, 6))
    same(tracked.grad, pydet.gemm_db(torch.ones(20, 6), x.reshape(20, 16)))
    same(torch.vmap(pt.linear, in_dims=(1, None), out_dims=1)(x, w), pydet.skinny_gemm(x, w))
    same(torch.vmap(lambda x: pt.rms_norm(x, weight, eps=1e-5))(x), pydet.rmsnorm(x, weight, eps=1e-5)[0])
    with pytest.raises(pydet.Error, match="vmap over the weights is not defined"):
        torch.vmap(lambda weight: pt.rms_norm(x, weight, eps=1e-5))(normal(3, 16))
    with pytest.raises(pydet.Error, match="vmap over the weights is not defined"):
        torch.vmap(pt.linear, in_dims=(None, 0))(x, normal(3, 6, 16))


def test_autocast_takes_its_type():
    x, w, bias = normal(3, 16), normal(8, 16).requires_grad_(), normal(8)
    dy = normal(3, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = pt.linear(x, w, bias)
        compiled = torch.compile(pt.linear, fullgraph=True, backend="aot_eager")(x, w, bias)
        product = pt.gemm(x, w.detach().T)
    same(y, pydet.gemm(x.bfloat16(), w.detach().bfloat16().T, bias=bias))
    same(compiled, y)
    same(product, pydet.gemm(x.bfloat16(), w.detach().bfloat16().T))
    y.backward(dy)
    same(w.grad, pydet.gemm_db(dy, x.bfloat16()).float())


@pytest.mark.skipif("cuda" not in DEVICES, reason="no NVIDIA GPU here")
def test_cuda_graph_has_the_eager_bits():
    block, x = Block().to("cuda", torch.bfloat16), normal(5, 32, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        eager = block(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
        y.zero_()
        graph.replay()
    same(y, eager)


# ---- Modules -----------------------------------------------------------------------------------------------------


def test_modules_take_their_options():
    x = normal(4, 64, dtype=torch.bfloat16)
    layer = pt.Linear(64, 8, dtype=torch.bfloat16, arithmetic="sm90", k_chunk=16)
    same(layer(x), pydet.gemm(x, layer.weight.detach().T, bias=layer.bias.detach(), arithmetic="sm90", k_chunk=16))
    assert "k_chunk=16" in repr(layer)
    holder = torch.nn.Sequential(torch.nn.Linear(64, 8, dtype=torch.bfloat16))
    pt.convert(holder, arithmetic="sm80")
    same(holder(x), pydet.gemm(x, holder[0].weight.detach().T, bias=holder[0].bias.detach(), arithmetic="sm80"))
    norm = pt.RMSNorm(64, weight_offset=1.0)
    same(norm(x.float()), pt.RMSNorm(64, elementwise_affine=False)(x.float()))


def test_modules_in_torchscript():
    net, x = torch.nn.Sequential(pt.Linear(16, 8, k_chunk=16), pt.RMSNorm(8), pt.Linear(8, 3)), normal(4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for frozen in (torch.jit.script(net), torch.jit.trace(net, x)):
            same(frozen(x), net(x))
            frozen(x).sum().backward()
            assert net[0].weight.grad is not None
            net.zero_grad()


# ---- The override ------------------------------------------------------------------------------------------------


def test_override_catches_forward_and_backward():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4, bias=False))
    x = normal(6, 16)
    plain = torch.mm(x, x.T)
    with pt.override_aten() as caught:
        y = net(x)
        y.sum().backward()
        same(torch.mm(x, x.T), pydet.gemm(x, x.T))
        same(torch.bmm(x[None], x.T[None]), pydet.gemm(x[None], x.T[None]))
        same(torch.matmul(x[None].expand(2, 6, 16), x.T), pydet.gemm(x[None].expand(2, 6, 16), x.T))
        out = torch.empty(6, 6)
        torch.mm(x, x.T, out=out)
        same(out, pydet.gemm(x, x.T))
        same(torch.addmm(out, x, x.T, beta=0.5, alpha=2.0), pydet.gemm(x, x.T) * 2.0 + out * 0.5)
        assert torch.mm(x.double(), x.double().T).dtype == torch.float64
        same(out.clone().addmm_(x, x.T), pydet.gemm(x, x.T, bias=out))
        same(out[None].clone().baddbmm_(x[None], x.T[None], alpha=3.0), (pydet.gemm(x, x.T) * 3.0 + out)[None])
        same(torch.mm(out, out, out=out.clone()), pydet.gemm(out, out))
        inside = out.clone()
        same(torch.mm(inside, x[:, :6], out=inside), pydet.gemm(out, x[:, :6]))
        refuses(r"Bad in-place call", out[0].clone().addmm_, x, x.T)
        refuses(r"mat1 and mat2 shapes cannot be multiplied \(6x16 and 5x16\)", torch.mm, x, x[:5])
        refuses(r"shapes cannot be multiplied \(6x16 and 15x24\)", torch.nn.functional.linear, x, net[0].weight[:, 1:])
    h = torch.relu(pydet.gemm(x, net[0].weight.detach().T, bias=net[0].bias.detach()))
    same(y, pydet.gemm(h, net[2].weight.detach().T))
    same(net[2].weight.grad, pydet.gemm_db(h, torch.ones(6, 4)).T)
    counts = dict(caught)
    assert counts["aten::addmm"] >= 2 and counts["aten::mm"] >= 5 and counts["aten::bmm"] >= 1
    assert counts["aten::mm.out"] == 3 and counts["aten::mm (left to PyTorch)"] == 3
    assert counts["aten::addmm_"] == 1 and counts["aten::addmm_ (left to PyTorch)"] == 1
    assert counts["aten::baddbmm_"] == 1
    same(torch.mm(x, x.T), plain)
    assert dict(caught) == counts, "nothing is caught afterwards"


def test_override_catches_compiled_code():
    weight, x = normal(16, 16), normal(3, 16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(x @ weight), backend="aot_eager")
    compiled(x)
    with pt.override_aten() as caught:
        same(compiled(x), torch.relu(pydet.gemm(x, weight)))
    assert caught["aten::mm"] == 1


def test_override_catches_products_by_vectors(dtype):
    a, x, y = normal(7, 40, dtype=dtype), normal(80, dtype=dtype)[::2], normal(7, dtype=dtype)
    product = pydet.gemm(a, x[:, None])[:, 0]
    tracked = [t.clone().requires_grad_() for t in (a, x)]
    with pt.override_aten() as caught:
        same(torch.mv(a, x), product)
        same(a @ x, product)
        same(x @ a.T, product)
        assert not torch.mv(a, x)._is_view()
        for out in (torch.empty(7, dtype=dtype), torch.empty(14, dtype=dtype)[::2], torch.empty(0, dtype=dtype)):
            torch.mv(a, x, out=out)
            same(out, product)
        added = pydet.gemm(a, x[:, None], bias=y[:, None])[:, 0]
        same(torch.addmv(y, a, x), added)
        same(torch.addmv(y[:1], a, x), pydet.gemm(a, x[:, None], bias=y[:1])[:, 0])
        same(torch.addmv(y, a, x, beta=0.5, alpha=2.0), product * 2.0 + y * 0.5)
        same(y.clone().addmv_(a, x), added)
        same(torch.addmv(y, a, x, out=torch.empty_like(y)), added)
        same(torch.dot(a[0], x), product[0])
        same(torch.vdot(a[1], x), product[1])
        torch.mv(*tracked).backward(y)
        same(torch.mv(a[:0], x), product[:0])
        same(torch.mv(a[:, :0], x[:0]), torch.zeros(7, dtype=dtype))
        counts = dict(caught)
        assert torch.mv(a.double(), x.double()).dtype == torch.float64
        refuses(r"vector \+ matrix @ vector expected|expects", torch.mv, a, a)
        refuses(r"size mismatch, got input \(7\), mat \(7x40\), vec \(39\)", torch.mv, a, x[1:])
        refuses(r"expected 1D|1D tensors expected", torch.dot, a, a)
        refuses(r"[Bb]ad in-place call|doesn't match the broadcast shape", y[:1].clone().addmv_, a, x)
    same(tracked[1].grad, pydet.gemm(a.T, y[:, None])[:, 0])
    forms = {"aten::mv.out": 3, "aten::addmv": 3, "aten::addmv_": 1, "aten::addmv.out": 1, "aten::dot": 2}
    assert counts == forms | {"aten::mv": 7, "aten::mm": 1}, "a vector by a matrix is one row by a matrix"
    assert caught["aten::mv (left to PyTorch)"] == 3


def test_override_leaves_to_pytorch_what_pytorch_refuses():
    x = normal(2, 4, 4)
    with pt.override_aten() as caught:
        refuses(r"must be a matrix", torch.mm, x, x[0])
        refuses(r"must be a 3D tensor", torch.bmm, x[0], x[0])
        refuses(r"[Ee]xpected size for first two dimensions of batch2", torch.bmm, x, x[:1])
    assert not any(name in caught for name in ("aten::mm", "aten::bmm"))


@pytest.fixture
def products_with_out_dtype(device):
    """The forms with out_dtype: PyTorch has them for CUDA alone, so that on the CPU stand-ins are registered."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        if device == "cpu":
            for name in ("mm", "bmm"):
                library.impl(f"{name}.dtype", lambda a, b, out_dtype: torch.full((), 7.0, dtype=out_dtype), "CPU")
            for name in ("addmm", "baddbmm"):
                library.impl(f"{name}.dtype", lambda c, a, b, out_dtype, **scaled: torch.full((), 7.0), "CPU")
            library.impl("mm.dtype_out", lambda a, b, out_dtype, out: out.fill_(7.0), "CPU")
        yield


def test_override_catches_forms_with_out_dtype(products_with_out_dtype, device):
    a, b, c = (normal(6, 6, dtype=torch.bfloat16, device=device, seed=seed) for seed in range(3))
    single = torch.float32
    product = pydet.gemm(a, b, out_dtype=single)
    with pt.override_aten() as caught:
        same(torch.mm(a, b, out_dtype=single), product)
        same(torch.mm(a, b, out_dtype=single, out=torch.empty_like(product)), product)
        same(torch.bmm(a[None], b[None], out_dtype=single), product[None])
        for added in (c, c.float()):
            same(torch.addmm(added, a, b, out_dtype=single), pydet.gemm(a, b, bias=added, out_dtype=single))
        same(torch.addmm(c, a, b, out_dtype=single, beta=0.5, alpha=2.0), product * 2.0 + c * 0.5)
        batch = pydet.gemm(a[None], b[None], bias=c[None], out_dtype=single)
        same(torch.baddbmm(c[None], a[None], b[None], out_dtype=single), batch)
    counts = {"aten::mm.dtype": 1, "aten::mm.dtype_out": 1, "aten::bmm.dtype": 1}
    assert dict(caught) == counts | {"aten::addmm.dtype": 3, "aten::baddbmm.dtype": 1}
    if device == "cpu":
        assert torch.mm(a, b, out_dtype=single) == 7.0, "the form that was there is there again"


def test_override_counts_what_it_leaves_to_pytorch():
    def results():
        torch.manual_seed(0)
        x = normal(1, 3, 8, 16).requires_grad_()
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        z = torch.nn.Conv2d(3, 4, 3)(x)
        (y.sum() + z.sum()).backward()
        with torch.no_grad():
            rows = torch._addmm_activation(x[0, 0, 0, :8], x[0, 0], x[0, 0, :, :].T)
            return y, z, x.grad, rows, torch.nn.LSTM(16, 4)(x[0])[0]

    want = results()
    with pt.override_aten() as caught:
        for ours, theirs in zip(results(), want, strict=True):
            torch.testing.assert_close(ours, theirs)
    left = {name.removeprefix("aten::").partition(" (left to PyTorch)")[0] for name in caught if "left" in name}
    attention, convolution = "_scaled_dot_product_flash_attention_for_cpu", "convolution"
    assert left >= {attention, f"{attention}_backward", convolution, f"{convolution}_backward", "_addmm_activation"}
    assert "mkldnn_rnn_layer" in left or any(name in caught for name in ("aten::addmm", "aten::mm"))


@pytest.fixture(scope="module")
def llama():
    path = pathlib.Path(__file__).parent.parent / "examples" / "rl_alignment.py"
    spec = importlib.util.spec_from_file_location("rl_alignment", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_override_catches_every_product_of_a_model(llama):
    torch.manual_seed(0)
    model, lengths = llama.Llama(llama.SMALL).bfloat16(), [9, 12, 7, 16]
    tokens, weights = torch.randint(256, (4, 16)), torch.randn(4, 16)
    report = llama.caught_in_step(model, tokens, lengths, weights)
    products = 7 * 2 + 1
    # Forward, and the two gradients of each; attention's are two products a layer.
    others = {"aten::silu": 2, "aten::silu_backward": 2, "aten::embedding_dense_backward": 1}
    assert report["caught in a training step"] == {"aten::mm": 3 * products, "aten::bmm": 3 * 2 * 2, **others}
    assert report["not caught"] == {}
    layout = llama.Packed(llama.SMALL, [lengths], "cpu", llama.PRODUCTS)
    rows = layout.pad(tokens.flatten()[: sum(lengths)])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pt.override_aten() as caught:
        ours = compiled(rows, layout)
        ours.sum().backward()
    assert {**caught, "aten::silu": 2} == report["caught in a training step"]
    assert caught["aten::silu"] in (2, 4)  # a graph may compute it again in backward instead of keeping it
    with pt.override_aten():
        same(model(rows, layout), ours)


def test_the_example_draws_and_embeds_by_pydet(llama):
    """A token of its logits, its sequence's number and its place; the gradient of a row of its tokens in order."""
    torch.manual_seed(0)
    model = llama.Llama(llama.SMALL).bfloat16()
    pt.convert(model)
    pt.accumulate_gradients(model)
    first, steps = torch.tensor([5, 9, 200]), 6
    tokens, found, _ = llama.decode(model, first, steps, llama.PYDET)
    layout = llama.Packed(llama.SMALL, [[steps] * 3], "cpu", llama.PYDET)
    with torch.no_grad():
        logits = model(layout.pad(tokens[:, :-1].flatten()), layout)[layout.rows].view(3, steps, -1)
    seed, position = torch.arange(3)[:, None].expand(3, steps), torch.arange(steps).expand(3, steps)
    drawn, log_prob, _ = pydet.sample(logits, seed.contiguous(), position.contiguous())
    assert torch.equal(drawn, tokens[:, 1:])
    same(log_prob, found)
    dy = torch.randn(layout.total, 64).bfloat16()
    model.embed_tokens(layout.pad(tokens[:, 1:].flatten())).backward(dy)
    want = pydet.embedding_backward(dy, layout.pad(tokens[:, 1:].flatten()), 256, out_dtype=torch.float32)
    same(model.embed_tokens.weight.main_grad, want)


def test_sees_what_the_override_misses(llama):
    with llama.Products() as products, pt.override_aten() as caught:
        x = normal(1, 2, 8, 16)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        x[0, 0] @ x[0, 1].T
    missed = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert dict(products.seen - caught) == {missed: 1}
    assert dict(caught) == {"aten::mm": 1, f"{missed} (left to PyTorch)": 1}


def test_override_nests_not():
    with pt.override_aten(), pytest.raises(pydet.Error, match="one is active already"), pt.override_aten():
        pass
    with pt.override_aten():
        pass


# ---- Bad input ---------------------------------------------------------------------------------------------------


def refuses(pattern, call, *arguments, **options):
    with pytest.raises((pydet.Error, RuntimeError, NotImplementedError), match=pattern) as caught:
        call(*arguments, **options)
    return caught.value


def test_bad_input():
    torch._dynamo.reset()  # what others compiled would leave these sizes symbols
    a, b = normal(3, 4), normal(4, 5)
    refuses(r"gemm: b is 3x5", pt.gemm, a, normal(3, 5))
    wide = r"^linear: the input is 3x4 and the weight 7x5, want an input whose last dimension is 5$"
    for call in (pt.linear, pt.skinny_linear, lambda x, w: pt.Linear(5, 7)(x)):
        refuses(wide, call, a, normal(7, 5))
        refuses(wide[1:-1], torch.compile(call, backend="aot_eager"), a, normal(7, 5))
    refuses(r"b is bfloat16", pt.gemm, a, b.bfloat16())
    refuses(r"gemm: a is float64, want float32, bfloat16 or float16$", pt.gemm, a.double(), b.double())
    refuses(r"a is complex64, want", pt.gemm, a.to(torch.complex64), b.to(torch.complex64))
    refuses(r"arithmetic is 'sm91'", pt.gemm, a, b, arithmetic="sm91")
    refuses(r"k_chunk", pt.gemm, a, b, k_chunk=-1)
    refuses(r"eps", pt.rms_norm, a, eps=-1.0)
    refuses(r"[Ss]parse", pt.gemm, a.to_sparse(), b)
    refuses(r"gemm_da: an operand requires grad", OPS.gemm_da, a.clone().requires_grad_(), a)
    refuses(r"gemm_db: an operand requires grad", OPS.gemm_db, a.clone().requires_grad_(), a)
    refuses(
        r"rmsnorm_backward: an operand requires grad",
        OPS.rmsnorm_backward,
        a,
        a.clone().requires_grad_(),
        None,
        a[:, 0],
    )
    batched, other = normal(2, 3, 4).requires_grad_(), normal(1, 4, 5)
    refuses(r"no gradient where batch dimensions broadcast", pt.gemm, batched, other)
    with torch.no_grad():
        same(pt.gemm(batched, other), pydet.gemm(batched.detach(), other))


def test_bad_input_is_seen_while_tracing():
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    refuses(r"^gemm: b is 3x5, want 4xN$", pt.gemm, meta(3, 4), meta(3, 5))
    refuses(r"a is int32, want float32, bfloat16 or float16", pt.gemm, *(meta(4, 4, dtype=torch.int32),) * 2)
    refuses(r"b is float16, want float32 as a is", pt.gemm, meta(4, 4), meta(4, 4, dtype=torch.float16))
    refuses(r"w is float16, want float32 as x is", pt.linear, meta(4, 4), meta(4, 4, dtype=torch.float16))
    refuses(r"arithmetic is 'sm91'", pt.gemm, meta(4, 4), meta(4, 4), arithmetic="sm91")
    refuses(r"bias is 7, want 5 or 3x5", pt.gemm, meta(3, 4), meta(4, 5), meta(7))
    refuses(r"bias is 7, want 5", pt.linear, meta(3, 4), meta(5, 4), meta(7))
    refuses(r"weight is 7, want 4", pt.rms_norm, meta(3, 4), meta(7), eps=1e-5)
    refuses(r"residual is 3x5, want 3x4", pt.rms_norm, meta(3, 4), eps=1e-5, residual=meta(3, 5))
    refuses(r"dy is 3x5, want 3x4", OPS.rmsnorm_backward, meta(3, 5), meta(3, 4), None, meta(3))
    refuses(r"a has 1 dimensions, want 2 to 8", pt.gemm, meta(4), meta(4, 4))
    refuses(r"w has 1 dimensions, want 2 to 8", pt.linear, meta(4), meta(4))


def test_mixed_devices():
    a, b, bias = normal(3, 4), normal(4, 5), normal(5)
    refuses(r"b is on meta, a is on cpu", pt.gemm, a, b.to("meta"))
    refuses(r"b is on cpu, a is on meta", pt.gemm, a.to("meta"), b)
    refuses(r"bias is on meta, a is on cpu", pt.gemm, a, b, bias.to("meta"))
    refuses(r"weight is on meta, x is on cpu", pt.rms_norm, a, a[0].to("meta"), eps=1e-5)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, elsewhere = mode.from_tensor(a), torch.empty(4, 5, device="meta")
        assert pt.gemm(fake, b).shape == (3, 5)
        refuses(r"b is on meta, a is on cpu", pt.gemm, fake, elsewhere)
    with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors first"):  # PyTorch's own sentence
        pt.gemm(a, FakeTensorMode().from_tensor(b))
    if "cuda" in DEVICES:
        refuses(r"device", pt.gemm, a.cuda(), b)
        refuses(r"device", pt.gemm, a, b.cuda())
        refuses(r"device", pt.gemm, a.cuda(), b.cuda(), bias)
        with mode:
            refuses(r"b is on cpu, a is on cuda:0", pt.gemm, torch.empty(3, 4, device="cuda"), torch.empty(4, 5))


def test_no_operator_has_results_of_operands_of_several_devices():
    """The dispatcher traces where one tensor is on meta: what came back was memory of the others' device, unwritten."""
    others = {"str": "auto", "float": 1.0, "int": 1, "SymInt": 1, "bool": False}
    dims = {"scaled_grouped_gemm": {"a": 2, "b": 3, "group_end": 1}}  # looked at first
    count = 0
    for schema in (s for s in torch._C._jit_get_all_schemas() if s.name.startswith("pydet::")):
        arguments, operator = schema.arguments, getattr(OPS, schema.name[len("pydet::") :])
        places = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
        for meta in places if len(places) > 1 else ():
            given = [others.get(str(argument.type)) for argument in arguments]
            for i in places:
                if "Optional" not in str(arguments[i].type) or i in (meta, places[1]):
                    shape = (1,) * dims.get(operator.__name__, {}).get(arguments[i].name, 4)
                    dtype = torch.bool if arguments[i].name == "allowed" else torch.float32
                    given[i] = torch.empty(shape, dtype=dtype, device="meta" if i == meta else "cpu")
            refuses(r"is on (meta, \w+ is on cpu|cpu, \w+ is on meta)$|not on the expected device", operator, *given)
            count += 1
    assert count > 150


def test_lazy_views_are_read_right():
    a, b, bias, weight = normal(3, 4), normal(4, 5), normal(5), normal(4)
    neg = torch._neg_view
    same(pt.gemm(neg(a), b), pydet.gemm(-a, b))
    same(pt.gemm(a, neg(b), neg(bias)), pydet.gemm(a, -b, bias=-bias))
    same(pt.linear(a, b.T, neg(bias)), pydet.gemm(a, b, bias=-bias))
    same(pt.rms_norm(neg(a), neg(weight), eps=1e-5), pydet.rmsnorm(-a, -weight, eps=1e-5)[0])
    rstd = pydet.rmsnorm(a, eps=1e-5)[1]
    want = pydet.rmsnorm_backward(a, a, weight, rstd, dresidual=-a)
    for got, expected in zip(OPS.rmsnorm_backward(a, a, weight, rstd, 0.0, neg(a)), want, strict=True):
        same(got, expected)
    tracked = a.clone().requires_grad_()
    pt.gemm(tracked, b).backward(neg(torch.ones(3, 5)))
    same(tracked.grad, pydet.gemm_da(-torch.ones(3, 5), b))
    conjugated = torch.complex(a, a).conj()
    same(pt.gemm(conjugated.imag, b), pydet.gemm(-a, b))
    refuses(r"a is complex64, want", pt.gemm, conjugated, b + 0j)


def test_transforms_without_a_rule():
    """What would lose a gradient in silence, or end in words about PyTorch's inside."""
    from torch.autograd import forward_ad

    a, b = normal(3, 4), normal(4, 5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, torch.ones_like(a))
        refuses(r"gemm: no forward-mode gradient", pt.gemm, dual, b)
        refuses(r"rmsnorm: no forward-mode gradient", pt.rms_norm, dual, eps=1e-5)
        refuses(r"torch.func \(grad, vjp, jvp, jacrev\)", pt.gemm, dual, b.clone().requires_grad_())
        same(pt.gemm(a, b), pydet.gemm(a, b))
    refuses(r"no forward-mode gradient", torch.func.jvp, lambda x: pt.gemm(x, b), (a,), (a,))
    for call in (lambda x: pt.gemm(x, b).sum(), lambda x: pt.rms_norm(x, eps=1e-5).sum()):
        refuses(r"gradients of torch.func", torch.func.grad(call), a)
        refuses(r"gradients of torch.func", torch.vmap(torch.func.grad(call)), normal(2, 3, 4))
    same(torch.func.grad(lambda x: (x * pt.gemm(x.detach(), b).sum()).sum())(a), pydet.gemm(a, b).sum().expand(3, 4))
    x = a.clone().requires_grad_()
    y = pt.gemm(x, b.clone().requires_grad_()).sum()
    refuses(r"gemm_da: an operand requires grad.*create_graph=True", torch.autograd.grad, y, x, create_graph=True)
    for net in (pt.Linear(4, 5), pt.RMSNorm(4)):
        sentence = r"a second derivative \(create_graph=True\) is not defined"
        refuses(sentence, torch.autograd.grad, net(x).sum(), net.weight, create_graph=True)


def test_what_the_readme_shows_runs():
    text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    code = text.split("## In PyTorch\n\n")[1].split("\n\n")[0]
    net, x = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 4)), normal(3, 8)
    names = {"model": net, "x": x, "batch": x, "w": normal(4, 8), "bias": normal(4), "loss": torch.sum}
    names["target"] = torch.tensor([0, 3, 1])
    exec(textwrap.dedent(code), names)
    assert len(names["report"].swapped) == 2 and type(net[1]) is pt.Fp8Linear and net[1].accumulates
    same(names["y"], pydet.skinny_gemm(x, names["w"], bias=names["bias"]))
    assert net[1].weight.grad is not None and isinstance(names["caught"], dict)


def test_importing_pydet_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, pydet; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_differing_bits_are_seen():
    """The comparison itself."""
    x = normal(4, 4)
    y = x.clone()
    same(x, y)
    y[1, 2] = float(np.nextafter(np.float32(y[1, 2]), np.float32(9)))
    differ(x, y)


# ---- Accumulation ------------------------------------------------------------------------------------------------


def test_accumulation_in_copies_checkpoints_and_compiled_code():
    net, x = torch.nn.Sequential(pt.RMSNorm(32), pt.Linear(32, 8)), normal(16, 32)
    parameters = pt.accumulate_gradients(net)
    net(x).sum().backward()
    want = [p.main_grad.clone() for p in parameters]
    twin = copy.deepcopy(net)
    twin(x).sum().backward()
    for call in (
        lambda x: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False),
        torch.compile(net, backend="aot_eager"),
    ):
        for p in parameters:
            p.main_grad.zero_()
        call(x).sum().backward()
        for p, q, sum_ in zip(parameters, twin.parameters(), want, strict=True):
            same(p.main_grad, sum_), same(q.main_grad, sum_)
            assert p.grad is None and p.main_grad is not q.main_grad


def test_compiled_with_any_number_of_rows():
    net, graphs = torch.nn.Sequential(pt.RMSNorm(32), pt.Linear(32, 8)), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(net, dynamic=True, fullgraph=True, backend=backend)
    with torch.no_grad():
        for rows in (5, 7, 33):
            same(compiled(normal(rows, 32)), net(normal(rows, 32)))
    assert len(graphs) == 1


def test_accumulation_under_autocast():
    x, dy = normal(32, 16), normal(32, 8, dtype=torch.bfloat16)
    net = torch.nn.Sequential(pt.Linear(16, 8))
    weight, bias = pt.accumulate_gradients(net)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    y.backward(dy)
    rounded = weight.detach().bfloat16()
    same(y, pydet.gemm(x.detach().bfloat16(), rounded.T, bias=bias.detach()))
    same(weight.main_grad, pydet.gemm_db(dy, x.detach().bfloat16(), out_dtype="float32"))
    same(x.grad, pydet.gemm(dy, rounded).float())


def test_accumulated_micro_batches_are_one_batch():
    unit = pydet.DWEIGHT_ROWS
    x, dy = normal(3 * unit, 32, dtype=torch.bfloat16), normal(3 * unit, 16, dtype=torch.bfloat16, seed=1)

    def gradients(cuts):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            pt.RMSNorm(32, dtype=torch.bfloat16), pt.Linear(32, 16, dtype=torch.bfloat16, arithmetic="sm90")
        )
        parameters = pt.accumulate_gradients(net)
        assert parameters == list(net.parameters())
        for first, last in itertools.pairwise(cuts):
            net(x[first:last]).backward(dy[first:last])
        assert all(p.grad is None for p in parameters)
        return [p.main_grad for p in parameters]

    whole = gradients([0, 3 * unit])
    for ours, theirs in zip(gradients([0, unit, 3 * unit]), whole, strict=True):
        same(ours, theirs)
    with pytest.raises(AssertionError, match="elements differ"):  # not at a multiple of 16 rows
        for ours, theirs in zip(gradients([0, unit + 5, 3 * unit]), whole, strict=True):
            same(ours, theirs)
    flat = x
    x, dy = (t.view(6, unit // 4, 2, -1).permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for t in (x, dy))
    for ours, theirs in zip(gradients([0, 6]), whole, strict=True):  # rows of three strides
        same(ours, theirs)
    x, dy = flat, dy.reshape(-1, 16)
    h = pydet.rmsnorm(x, torch.ones(32, dtype=torch.bfloat16), eps=1e-6)[0]
    same(whole[1], pydet.gemm_db(dy, h, out_dtype="float32", arithmetic="sm90"))
    same(whole[2], pydet.gemm_db(torch.ones_like(dy[:, :1]), dy, out_dtype="float32", arithmetic="sm90")[0])
    refuses(r"convert\(\) it first", pt.accumulate_gradients, torch.nn.Linear(2, 2))
    refuses(r"want a torch.nn.Module", pt.accumulate_gradients, 3)
