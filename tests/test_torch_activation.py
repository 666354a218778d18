"""pydet.torch's activations: the bits of the C calls, gradients, operators, vmap, convert, override_aten, models."""

import importlib.util
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from reference_activation import KINDS  # noqa: E402
from test_torch import OPS, device, dtype, normal, refuses, same  # noqa: E402, F401

FUNCTIONS = {
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "exp": torch.exp,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "softplus": torch.nn.functional.softplus,
}  # fmt: skip


def test_gradients_are_the_c_calls(device, dtype):
    for shape in ((2, 9, 40), (3, 2051), (7,)):
        x, up, dy = (normal(*shape, dtype=dtype, device=device, seed=i) for i in range(3))
        for kind in KINDS:
            leaf, other = x.clone().requires_grad_(), up.clone().requires_grad_()
            y = pt.activation(leaf, kind)
            same(y, pydet.activation(x, kind))
            same(torch.autograd.grad(y, leaf, dy)[0], pydet.activation_backward(dy, x, kind))
            y = pt.activation(leaf, kind, up=other)
            same(y, pydet.activation(x, kind, up=up))
            same(y, pt.activation(x, kind) * up)
            for got, want in zip(
                torch.autograd.grad(y, (leaf, other), dy), pydet.activation_backward(dy, x, kind, up=up), strict=True
            ):
                same(got, want)
            apart = torch.autograd.grad(pt.activation(leaf, kind) * other, (leaf, other), dy)
            fused = torch.autograd.grad(pt.activation(leaf, kind, up=other), (leaf, other), dy)
            same(fused[0], apart[0])
            same(fused[1], apart[1])


def test_it_is_close_to_torchs():
    x, dy = (3 * normal(500)).requires_grad_(), normal(500, seed=1)
    assert FUNCTIONS.keys() == set(KINDS)
    for kind, function in FUNCTIONS.items():
        ours, theirs = pt.activation(x, kind), function(x)
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        mine, other = (torch.autograd.grad(y, x, dy)[0] for y in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=5e-6, atol=2e-6)


def test_named_functions():
    x, up = normal(4, 9), normal(4, 9, seed=1)
    for ours, theirs in (
        (pt.silu(x), pydet.silu(x)), (pt.gelu(x), pydet.gelu(x)), (pt.gelu(x, "tanh"), pydet.gelu(x, "tanh")),
        (pt.sigmoid(x), pydet.sigmoid(x)), (pt.softplus(x), pydet.softplus(x)), (pt.swiglu(x, up), pydet.swiglu(x, up)),
        (pt.geglu(x, up), pydet.geglu(x, up)), (pt.geglu(x, up, "tanh"), pydet.geglu(x, up, "tanh")),
        (pt.Activation("quick_gelu")(x), pydet.activation(x, "quick_gelu")),
    ):  # fmt: skip
        same(ours, theirs)


def test_opcheck():
    x, up, dy = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(2, 3, 8, seed=2)
    leaf, other = x.clone().requires_grad_(), up.clone().requires_grad_()
    for op, arguments in [
        (OPS.activation, (leaf, "silu")),
        (OPS.gated_activation, (leaf, other, "gelu")),
        (OPS.activation_backward, (dy, x, "tanh")),
        (OPS.gated_activation_backward, (dy, x, up, "silu")),
    ]:
        torch.library.opcheck(op.default, arguments)


def test_strides_scalars_vmap_compile_and_refusals():
    x, up = normal(6, 4, 16), normal(6, 4, 16, seed=1)
    same(pt.silu(x.transpose(0, 1)), pydet.silu(x).transpose(0, 1))
    same(pt.silu(x.transpose(1, 2)), pydet.silu(x).transpose(1, 2))
    same(pt.swiglu(x[..., :8], x[..., 8:]), pydet.swiglu(x[..., :8].contiguous(), x[..., 8:].contiguous()))
    same(pt.silu(x[0, 0, 0]), pydet.silu(x)[0, 0, 0])
    same(pt.swiglu(x[0, 0, 0], up[0, 0, 0]), pydet.swiglu(x, up)[0, 0, 0])
    scalar = x[0, 0, 0].clone().requires_grad_()
    same(
        torch.autograd.grad(pt.gelu(scalar), scalar)[0],
        pydet.activation_backward(torch.ones_like(x), x, "gelu")[0, 0, 0],
    )
    same(torch.vmap(pt.gelu)(x), pydet.gelu(x))
    same(torch.vmap(pt.swiglu)(x, up), pydet.swiglu(x, up))
    loss = lambda x, up: (pt.swiglu(x, up) + pt.gelu(x)).sum()
    leaves = x.clone().requires_grad_(), up.clone().requires_grad_()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves)
    for got, want in zip(
        torch.autograd.grad(compiled, leaves), torch.autograd.grad(loss(*leaves), leaves), strict=True
    ):
        same(got, want)
    meta = lambda *shape, **more: torch.empty(shape, device="meta", **more)
    assert pt.swiglu(meta(3, 4), meta(3, 4)).shape == (3, 4)
    refuses(r"activation: up is 3x5, want 3x4", pt.swiglu, meta(3, 4), meta(3, 5))
    refuses(r"activation: up is 4, want 3x4", pt.swiglu, x[0, :3, :4], up[0, 0, :4])
    refuses(r"activation: x is float64, want float32", pt.silu, meta(3, dtype=torch.float64))
    refuses(r"activation: kind is 'relu', want one of silu", pt.activation, x, "relu")
    refuses(r"Activation: kind is 'relu', want one of silu", pt.Activation, "relu")
    refuses(
        r"gated_activation_backward: an operand requires grad", OPS.gated_activation_backward, leaves[0], x, up, "silu"
    )


# ---- convert ---------------------------------------------------------------------------------------------------------


def test_convert_swaps_activations_of_pytorch():
    modules = [
        *(torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.Sigmoid(), torch.nn.Tanh()),
        *(torch.nn.Softplus(), torch.nn.SiLU(inplace=True), torch.nn.Softplus(2.0), torch.nn.ReLU(), torch.nn.ELU()),
    ]
    net = torch.nn.Sequential(*modules)
    report = pt.convert(net)
    kinds = ["silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "softplus"]
    assert list(report.swapped) == [str(i) for i in range(6)] and not report.left
    assert [module.kind for module in net[:6]] == kinds and str(net[2]) == "Activation(gelu_tanh)"
    assert [type(module) for module in net[6:]] == [torch.nn.SiLU, torch.nn.Softplus, torch.nn.ReLU, torch.nn.ELU]
    assert not pt.convert(net).swapped, "a second time there is nothing to do"
    patched = torch.nn.Sequential(torch.nn.SiLU())
    patched[0].forward = lambda x: x
    assert "its forward is one set on the instance" in pt.convert(patched).left["0"]


def test_convert_swaps_activations_of_transformers(need):
    need(importlib.util.find_spec("transformers"), "models", "no Transformers here")
    from transformers.activations import ACT2FN

    kinds = {
        "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
        "quick_gelu": "quick_gelu", "sigmoid": "sigmoid", "tanh": "tanh",
    }  # fmt: skip
    x = normal(1000) * 3
    for name, kind in kinds.items():
        module = ACT2FN[name]
        want = module(x)
        net = torch.nn.Sequential(module)
        assert pt.convert(net).swapped == {"0": type(ACT2FN[name]).__name__}
        same(net(x), pydet.activation(x, kind))
        torch.testing.assert_close(net(x), want, rtol=3e-6, atol=2e-6)
    for name in ("relu", "relu2", "mish", "gelu_10", "laplace"):
        assert not pt.convert(torch.nn.Sequential(ACT2FN[name])).swapped


WIDE = {"vocab_size": 61, "hidden_size": 36, "intermediate_size": 77, "num_hidden_layers": 2, "num_attention_heads": 3}
FAMILIES = {
    "Llama": {**WIDE, "num_key_value_heads": 3},
    "Gemma2": {**WIDE, "num_key_value_heads": 3, "head_dim": 16},
    "Phi": {**WIDE, "num_key_value_heads": 3},
    "GPTNeoX": WIDE,
    "GPT2": {"vocab_size": 61, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_inner": 77, "n_positions": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_models_bits_are_its_rows_own(family, need):
    """In fp32, at odd widths, by any number of threads; with PyTorch's activations in it they are not."""
    need(importlib.util.find_spec("transformers"), "models", "no Transformers here")
    import transformers

    pt.register_attention()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **FAMILIES[family], bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    pt.convert(model)
    model.set_attn_implementation("pydet")
    ids = torch.randint(3, 61, (33, 9), generator=torch.Generator().manual_seed(1))

    def differing():
        with torch.no_grad():
            batch = model(ids).logits
            alone = [model(ids[i : i + 1, : i % 9 + 1]).logits[0] for i in range(18)]
            return sum(int((one != batch[i, : i % 9 + 1]).sum()) for i, one in enumerate(alone))

    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            assert differing() == 0, threads
        mine = [module for module in model.modules() if isinstance(module, pt.Activation)]
        assert len(mine) == 2
        for module in mine:  # the control; PyTorch's exact GELU has one formula for all but single elements
            module.forward = lambda x, f=FUNCTIONS[module.kind]: f(x)
        assert differing() > 0 or mine[0].kind == "gelu"
    finally:
        torch.set_num_threads(before)


# ---- override_aten ---------------------------------------------------------------------------------------------------


def test_override_aten_takes_over_activations(dtype):
    x, dy = normal(5, 33, dtype=dtype), normal(5, 33, dtype=dtype, seed=1)
    aten = torch.ops.aten
    calls = {
        "aten::silu": (aten.silu, (x,), "silu"), "aten::gelu": (aten.gelu, (x,), "gelu"),
        "aten::sigmoid": (aten.sigmoid, (x,), "sigmoid"), "aten::softplus": (aten.softplus, (x,), "softplus"),
        "aten::silu_backward": (aten.silu_backward, (dy, x), "silu"),
        "aten::gelu_backward": (aten.gelu_backward, (dy, x), "gelu"),
        "aten::softplus_backward": (aten.softplus_backward, (dy, x, 1, 20), "softplus"),
    }  # fmt: skip
    for name, (call, given, kind) in calls.items():
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        want = (pydet.activation if len(tensors) == 1 else pydet.activation_backward)(*tensors, kind)
        with pt.override_aten() as caught:
            same(call(*given), want)
            turned = call(*(t.t() if isinstance(t, torch.Tensor) else t for t in given))
            out = torch.empty_like(x)
            form = call.out if len(tensors) == 1 else call.grad_input
            form(*given, **{"out" if len(tensors) == 1 else "grad_input": out})
        same(out, want)
        same(turned, want.t())
        assert turned.stride() == x.t().stride(), "laid out as PyTorch lays it out"
        assert caught == {name: 2, f"{name}.{'out' if len(tensors) == 1 else 'grad_input'}": 1}
    with pt.override_aten() as caught:
        same(torch.nn.functional.gelu(x, approximate="tanh"), pydet.gelu(x, "tanh"))
        same(aten.gelu_backward(dy, x, approximate="tanh"), pydet.activation_backward(dy, x, "gelu_tanh"))
        for in_place, kind in ((aten.silu_, "silu"), (aten.gelu_, "gelu"), (aten.sigmoid_, "sigmoid")):
            for y in (x.clone(), x.t().clone(memory_format=torch.preserve_format)):
                written = y.clone(memory_format=torch.preserve_format)
                assert in_place(written) is written
                same(written, pydet.activation(y.contiguous(), kind))
    assert caught == {
        "aten::gelu": 1,
        "aten::gelu_backward": 1,
        "aten::silu_": 2,
        "aten::gelu_": 2,
        "aten::sigmoid_": 2,
    }


def test_override_aten_leaves_what_pydet_has_not():
    x = normal(40)
    for call, name in (
        (lambda: torch.nn.functional.softplus(x, 2.0), "softplus"),
        (lambda: torch.nn.functional.softplus(x, 1.0, 10), "softplus"),
        (lambda: torch.sigmoid(x.double()), "sigmoid"),
        (lambda: torch.sigmoid(torch.arange(3)), "sigmoid"),
    ):
        want = call()
        with pt.override_aten() as caught:
            assert torch.equal(call(), want)
        assert caught == {f"aten::{name} (left to PyTorch)": 1}


def test_gradients_under_override_aten():
    x, dy = normal(3, 65).requires_grad_(), normal(3, 65, seed=1)
    for name, kind in (("silu", "silu"), ("gelu", "gelu"), ("softplus", "softplus")):
        with pt.override_aten():
            y = getattr(torch.nn.functional, name)(x)
            (dx,) = torch.autograd.grad(y, x, dy)
        same(dx, pydet.activation_backward(dy, x.detach(), kind))
    with pt.override_aten():
        one = [torch.nn.functional.silu(x.detach()[r : r + 1, c]) for r in range(3) for c in range(65)]
        same(torch.stack(one).view(3, 65), torch.nn.functional.silu(x.detach()))
