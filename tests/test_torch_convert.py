"""pydet.torch.convert: a converted model does what it did, with pydet's bits; what it cannot do is left, and named."""

import copy
import functools
import os
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import torch.nn.functional as TF  # noqa: E402
from torch import bmm as product  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as attend  # noqa: E402

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from torch_bits import normal, same  # noqa: E402


def close(a, b, operands=torch.float32):
    """The same values but for rounding, and the same type."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    tolerance = 1e-5 if a.dtype == operands == torch.float32 else 2e-2
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class LlamaRMSNorm(torch.nn.Module):
    def __init__(self, size, offset=0.0):
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = torch.nn.Parameter(torch.rand(size)), 1e-5, offset

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (h * (self.offset + self.weight.float())).to(x.dtype)


class T5LayerNorm(LlamaRMSNorm):
    pass


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.matrices = torch.nn.Parameter(torch.zeros(2, 3, 4))


class OddRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) ** 2


def model():
    torch.manual_seed(0)
    m = torch.nn.Module()
    m.embedding = torch.nn.Embedding(11, 32)
    m.first, m.tied = torch.nn.Linear(32, 32), torch.nn.Linear(32, 11, bias=False)
    m.tied.weight = m.embedding.weight
    m.again = m.first
    m.norms = torch.nn.ModuleList(
        [torch.nn.RMSNorm(32, eps=1e-6), LlamaRMSNorm(32), LlamaRMSNorm(32, 1.0), OddRMSNorm(32)]
    )
    m.t5, m.gated, m.experts, m.gru = T5LayerNorm(32), GatedRMSNorm(32), Experts(), torch.nn.GRU(2, 2)
    m.layer_norm, m.attention, m.double = (
        torch.nn.LayerNorm(32),
        torch.nn.MultiheadAttention(32, 4),
        torch.nn.Linear(2, 2).double(),
    )
    return m.eval()


def test_convert():
    m, x = model(), normal(4, 32)
    state, parameters = m.state_dict(), dict(m.named_parameters())
    before = [m.first(x), *(norm(x) for norm in m.norms[:3])]
    report = pt.convert(m)
    assert report.swapped == {
        **dict.fromkeys(("first", "tied", "again"), "Linear"),
        "norms.0": "RMSNorm",
        **dict.fromkeys(("norms.1", "norms.2"), "LlamaRMSNorm"),
        "t5": "T5LayerNorm",
        "layer_norm": "LayerNorm",
    }
    left = {"norms.3", "attention", "attention.out_proj", "double", "gated", "experts", "gru"}
    assert set(report.left) == left, report
    assert "formula" in report.left["norms.3"] and "float64" in report.left["double"]
    assert report.left["experts"].startswith("Experts has matrices, and no counterpart here")
    text = str(report)
    assert "swapped 8, left 7" in text and "1 x LayerNorm -> pydet: layer_norm" in text
    assert "3 x Linear -> pydet: first, tied, again" in text and text.endswith(report.verdict())
    assert "forward takes (x, gate)" in report.left["gated"]
    assert type(m.first) is pt.Linear and m.again is m.first and m.tied.weight is m.embedding.weight
    assert not m.first.training and m.norms[2].weight_offset == 1.0
    assert list(m.state_dict()) == list(state)
    assert all(parameter is parameters[name] for name, parameter in m.named_parameters())
    for after, want in zip([m.first(x), *(norm(x) for norm in m.norms[:3])], before, strict=True):
        torch.testing.assert_close(after, want, rtol=1e-5, atol=1e-5)
    same(m.first(x), pydet.gemm(x, m.first.weight.detach().T, bias=m.first.bias.detach()))
    assert not pt.convert(m).swapped, "a second time there is nothing to do"


def converted(module):
    """The module inside another, converted, and what was said of it: None if it was swapped."""
    holder = torch.nn.ModuleDict({"it": module})
    report = pt.convert(holder)
    assert holder["it"] is module, "the same object"
    assert ("it" in report.swapped) != ("it" in report.left)
    return report.left.get("it")


def test_a_module_keeps_all_it_has():
    layer, calls = torch.nn.Linear(16, 8), []
    layer.own_attribute = 7
    layer.register_forward_pre_hook(lambda module, x: calls.append("before"))
    layer.register_forward_hook(lambda module, x, y: y * 2)
    layer.register_full_backward_hook(lambda module, dx, dy: calls.append("backward"))
    layer.register_state_dict_post_hook(lambda module, state, prefix, local: state.update({f"{prefix}more": 1}))
    layer.register_load_state_dict_pre_hook(lambda module, state, *rest: calls.append("load"))
    x = normal(4, 16).requires_grad_()
    assert converted(layer) is None and type(layer) is pt.Linear
    y = layer(x)
    same(y, pydet.gemm(x.detach(), layer.weight.detach().T, bias=layer.bias.detach()) * 2)
    y.sum().backward()
    state = layer.state_dict()
    assert layer.own_attribute == 7 and set(state) == {"weight", "bias", "more"}
    layer.load_state_dict({name: state[name] for name in ("weight", "bias")})
    assert calls == ["before", "backward", "load"]
    for twin in (copy.deepcopy(torch.nn.Sequential(pt.Linear(16, 8))), pickle.loads(pickle.dumps(pt.Linear(16, 8)))):
        assert converted(torch.nn.Linear(2, 2)) is None and twin(x).shape == (4, 8)


def test_a_forward_of_the_instance_is_left():
    layer, x = torch.nn.Linear(16, 8), normal(4, 16)
    layer.forward = lambda x: torch.zeros(3)
    assert "set on the instance" in converted(layer)
    assert layer(x).shape == (3,)
    norm = LlamaRMSNorm(16)
    norm.forward = lambda x: x
    assert "set on the instance" in converted(norm)


def test_weights_that_are_computed():
    x, normed = normal(4, 16), torch.nn.Linear(16, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(normed)
    want = normed(x)
    assert converted(normed) is None
    close(normed(x), want)
    normed.weight_g.data *= 2
    close(normed(x) - normed.bias, 2 * (want - normed.bias))
    parametrized = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 8))
    assert "parametrized" in converted(parametrized)


def test_linears_that_are_left():
    class Plain(torch.nn.Linear):
        pass

    class Own(torch.nn.Linear):
        def forward(self, x):
            return x

    assert "Plain is a subclass of Linear, and may have" in converted(Plain(2, 2))
    assert "Own is a subclass of Linear with a forward of its own" in converted(Own(2, 2))
    assert "its weight is torch.float64" in converted(torch.nn.Linear(2, 2).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    assert "quantized" in pt.convert(quantized).left["0"]
    x = normal(2, 2)
    subclass = torch.nn.Linear(2, 2)
    subclass.weight = torch.nn.Parameter(subclass.weight.detach().as_subclass(type("Odd", (torch.Tensor,), {})))
    assert "its weight is a Odd" in converted(subclass)
    assert subclass(x).shape == (2, 2)


class Gemma3RMSNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(size)), 1e-6

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.weight.float())).type_as(x)


class PromotingRMSNorm(Gemma3RMSNorm):
    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class WeightRMSNorm(Gemma3RMSNorm):
    def forward(self, x):
        h = x.float()
        return (self.weight.float() * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(self.weight.dtype)


@pytest.mark.parametrize("kind", [Gemma3RMSNorm, PromotingRMSNorm, WeightRMSNorm, torch.nn.RMSNorm])
def test_norms_keep_the_type_of_their_result(kind):
    for w in (torch.float32, torch.bfloat16, torch.float16):
        for x in (torch.float32, torch.bfloat16, torch.float16):
            norm = kind(24).to(w)
            torch.nn.init.uniform_(norm.weight)
            rows = normal(3, 24, dtype=x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of mixed types
                want = norm(rows)
            assert converted(norm) is None and type(norm) is pt.RMSNorm
            close(norm(rows), want, x)
            pt.accumulate_gradients(norm)
            close(norm(rows), want, x)


def test_norms_with_the_default_eps():
    for dtype in (torch.float32, torch.bfloat16):
        norm, x = torch.nn.RMSNorm(24, dtype=dtype), normal(3, 24, dtype=dtype) * 1e-3
        want = norm(x)
        assert converted(norm) is None
        close(norm(x), want)


class ResidualRMSNorm(Gemma3RMSNorm):
    def forward(self, x, residual=None):
        return super().forward(x) if residual is None else (super().forward(x + residual), x + residual)


class RMSNormGated(Gemma3RMSNorm):
    def forward(self, hidden_states, gate=None):
        return hidden_states


class EpsOutside(Gemma3RMSNorm):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class Failing(Gemma3RMSNorm):
    def forward(self, x):
        raise KeyError("no")


class FailingRMSNorm(Failing):
    pass


def test_norms_that_are_left():
    norm = ResidualRMSNorm(24)
    assert "forward takes (x, residual)" in converted(norm)
    assert len(norm(normal(2, 24), residual=normal(2, 24))) == 2
    assert "forward takes (hidden_states, gate)" in converted(RMSNormGated(24))
    assert "formula" in converted(type("EpsRMSNorm", (EpsOutside,), {})(24))
    assert "could not be tried on rows of numbers: KeyError" in converted(FailingRMSNorm(24))
    biased = Gemma3RMSNorm(24)
    biased.bias = torch.nn.Parameter(torch.zeros(24))
    assert "its parameters are (weight, bias)" in converted(biased)
    nameless = Gemma3RMSNorm(24)
    nameless.eps = 3
    assert "no eps by the name of" in converted(nameless)


def test_models_on_the_meta_device():
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), Gemma3RMSNorm(8), torch.nn.RMSNorm(8))
        report = pt.convert(net)
    assert not report.left and net[1].weight_offset == 1.0
    net.to_empty(device="cpu")
    torch.nn.init.ones_(net[1].weight)
    assert net[1](normal(3, 8)).shape == (3, 8)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(8, 8)


def test_strict_and_verdict():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), Attention())
    sentence = "convert: strict, and this would be left:\n  1 x Attention by code of its own: 1"
    with pytest.raises(pydet.Error) as caught:
        pt.convert(net, strict=True)
    assert str(caught.value) == sentence and type(net[0]) is torch.nn.Linear, "nothing was changed"
    with pytest.raises(pydet.Error, match="1 left, GroupNorm has no counterpart here: 1"):
        pt.convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GroupNorm(2, 8)), strict=True)
    report = pt.convert(net)
    assert report.attention == {"1": "Attention by code of its own"} and not report.left
    assert "Attention is NOT batch-invariant: 1 modules" in report.verdict()
    net[1].config = type("Config", (), {"_attn_implementation": "sdpa"})
    assert pt.convert(net).attention == {"1": "Attention by 'sdpa'"}
    net[1].config._attn_implementation = "pydet"
    report = pt.convert(net, strict=True)
    assert (
        str(report) == "swapped 0, left 0\n" + report.verdict()
        and "Every matrix, norm and attention that was found is pydet's." in report.verdict()
    )
    many = pt.convert(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5))))
    assert "  5 x Linear -> pydet: 0, 1, 2 and 2 more\n" in str(many)


ACTIVATIONS = {  # of Transformers' models, by what of PyTorch they call
    **{
        name: getattr(torch.nn.functional, name) for name in ("silu", "gelu", "softplus", "elu", "selu", "mish", "relu")
    },
    **{name: getattr(torch.nn.functional, name) for name in ("leaky_relu", "hardswish", "relu6", "logsigmoid")},
    **{
        name: getattr(torch, name)
        for name in ("sigmoid", "tanh", "exp", "exp2", "rsqrt", "sqrt", "sin", "cos", "square")
    },
    "gelu, by tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "sigmoid, as of quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
}


def depends_on_the_place(function, dtype):
    """Whether a number has more than one result, in tensors of other extents."""
    for x in normal(200).abs().to(dtype) * 3:
        results = [function(x.repeat(n)).float() for n in (1, 31, 37, 67)]
        if any((y != results[0][0]).any() for y in results):
            return True
    return False


def test_the_verdict_names_what_depends_on_the_place():
    """Of the activations of models those that give an element other bits by its place, here on this CPU."""
    report = pt.convert(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    found = {
        name for name, function in ACTIVATIONS.items()
        for dtype in (torch.float32, torch.bfloat16) if depends_on_the_place(function, dtype)
    }  # fmt: skip
    named = report.verdict().partition("PyTorch's: on a CPU its ")[2].partition(" and the like")[0].split(", ")
    assert len(named) > 5 and {name.partition(",")[0] for name in found} <= set(named)
    assert depends_on_the_place(lambda x: x + torch.arange(len(x)), torch.float32)
    left = pt.convert(torch.nn.Sequential(torch.nn.GroupNorm(2, 8)))
    assert named == left.verdict().partition("on a CPU its ")[2].partition(" and the like")[0].split(", ")


def test_a_model_that_is_one_layer():
    layer, x = torch.nn.Linear(8, 4), normal(3, 8)
    assert pt.convert(layer).swapped == {"": "Linear"} and "(the model)" in str(pt.convert(torch.nn.GroupNorm(1, 3)))
    same(layer(x), pydet.gemm(x, layer.weight.detach().T, bias=layer.bias.detach()))


def test_an_encoder_of_pytorch_calls_its_modules():
    """In evaluation without gradients it would multiply by their weights itself, and call none of them."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    encoder, x = torch.nn.TransformerEncoder(layer, 2).eval(), normal(7, 5, 64)
    padded = torch.arange(5) >= torch.tensor([5, 4, 3, 5, 5, 1, 5])[:, None]
    with torch.no_grad():
        before = encoder(x)
        pt.convert(encoder)
        with torch.profiler.profile() as profile:
            after = encoder(x)
        names = {event.key for event in profile.key_averages()}
        assert "pydet::skinny_gemm" in names and "aten::_transformer_encoder_layer_fwd" not in names
        close(after, before)
        with pt.override_aten():  # for attention's own products
            same(torch.cat([encoder(row[None]) for row in x]), encoder(x))
        assert encoder(x, src_key_padding_mask=padded).shape == x.shape


functional_linear = torch.nn.functional.linear


class Functional(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.inside.weight)


class Imported(Functional):
    def forward(self, x):
        return functional_linear(x, self.inside.weight)


def test_modules_that_are_left_with_a_reason():
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(8))
    assert pt.convert(lazy).left == {"0": "its parameters have no extents yet; convert after a first forward"}
    script = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    assert set(pt.convert(script).left.values()) == {
        "it is TorchScript; convert before torch.jit.script or torch.jit.trace"
    }
    own = pt.convert(torch.nn.Sequential(Functional(), Imported())).left
    assert own["0"].startswith("Functional multiplies in code of its own (F.linear)")
    assert own["1"].startswith("Imported multiplies in code of its own (F.linear)")
    double = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()).double()
    assert pt.convert(double).left["1"] == "the model is in float64" and double(normal(2, 8).double()).any()


# What code computes, under names of its own: what the report calls it, or None for what is none of that.
def by_another_module(self, x):
    return TF.linear(x, x[0])


def by_another_name(self, x):
    return product(x, x)


def attention_by_another_name(self, x):
    return attend(x, x, x)


def of_a_namespace(self, x):
    return torch.inner(x, x) + self.inner.fft


def linear_attention(self, x):
    return (x * (x[..., None] * x[:, :, None]).cumsum(1)).sum(-1)


def transformed(self, x):
    return torch.fft.fft2(x).real


def normalised(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def by_an_attribute(self, x):
    return self.function(x, x)


def places(self, x):
    return x.cumsum(1) * x + self.inner.mean(x) + self.function(x)


@pytest.mark.parametrize(
    "forward, attribute, said",
    [
        (by_another_module, None, "multiplies in code of its own (F.linear)"),
        (by_another_name, None, "multiplies in code of its own (bmm)"),
        (attention_by_another_name, None, "by code of its own (scaled_dot_product_attention)"),
        (of_a_namespace, None, "multiplies in code of its own (torch.inner)"),
        (linear_attention, None, "scans over tokens in code of its own (cumsum of products, sum)"),
        (transformed, None, "transforms in code of its own (torch.fft.fft2)"),
        (normalised, None, "normalises in code of its own (rsqrt of a mean)"),
        (by_an_attribute, torch.bmm, "multiplies in code of its own (bmm)"),
        (by_an_attribute, functools.partial(TF.linear, bias=None), "multiplies in code of its own (F.linear)"),
        (by_an_attribute, lambda a, b: a @ b, "multiplies in code of its own (@)"),
        (places, torch.abs, None),
    ],
)
def test_what_code_computes_under_other_names(forward, attribute, said):
    kind = type("Own", (torch.nn.Module,), {"forward": forward})
    module = kind()
    module.function, module.inner = attribute, torch.nn.Identity()
    report = pt.convert(module)
    found = [*report.left.values(), *report.attention.values()]
    assert [x.partition(";")[0] for x in found] == ([f"Own {said}"] if said else [])
    assert "names that are made up as it runs, and sums that are written out were not read" in report.verdict()


def test_a_second_time_with_another_arithmetic():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    pt.convert(net, arithmetic="ieee", k_chunk=16)
    assert not pt.convert(net).left and not pt.convert(net, arithmetic="ieee", k_chunk=16).left
    for asked, has in (({"arithmetic": "sm90"}, "arithmetic ieee"), ({"k_chunk": 32}, "k_chunk 16")):
        assert pt.convert(net, **asked).left == {"0": f"it is pydet's already, with {has}; set that of the module"}


def test_a_layer_in_the_place_of_a_converted_one():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU())
    pt.convert(net)
    with pytest.warns(UserWarning, match="0 of Sequential was converted, and a Linear of PyTorch's was put in"):
        net[0] = torch.nn.Linear(8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net[0], net[1] = pt.Linear(8, 8), torch.nn.Linear(8, 8)


def test_refusals():
    for k_chunk in (7, -16, 0, 16.0, True):
        with pytest.raises(pydet.Error, match=f"^convert: k_chunk is {k_chunk}, want a positive multiple of 16"):
            pt.convert(torch.nn.Sequential(), k_chunk=k_chunk)
    with pytest.raises(pydet.Error, match=r"want a torch\.nn\.Module"):
        pt.convert(3)
    with pytest.raises(pydet.Error, match="arithmetic is 'x'"):
        pt.convert(torch.nn.Sequential(), arithmetic="x")


def test_fully_sharded_and_parallel(tmp_path):
    """A process group of one process, on the CPU."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("PyTorch without torch.distributed")
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        x, mesh = normal(4, 8), dist.device_mesh.init_device_mesh("cpu", (1,))
        late = torch.nn.Sequential(torch.nn.Linear(8, 8), Gemma3RMSNorm(8))
        first, wrapped = copy.deepcopy(late), copy.deepcopy(late)
        fully_shard(late, mesh=mesh)
        report = pt.convert(late)
        assert all("is a DTensor; convert before fully_shard" in report.left[name] for name in ("0", "1")), report
        late(x).sum().backward()
        pt.convert(first)
        fully_shard(first[0], mesh=mesh), fully_shard(first, mesh=mesh)
        y = first(x)
        y.sum().backward()
        parallel = torch.nn.parallel.DistributedDataParallel(wrapped)
        assert not pt.convert(parallel).left
        z = parallel(x)
        z.sum().backward()
        same(z, y)
        same(first[0].weight.grad.full_tensor(), wrapped[0].weight.grad)
    finally:
        dist.destroy_process_group()
