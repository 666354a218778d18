"""Mixtures of experts: a token's bits and gradients are its own, in layers of each kind and in Transformers' models."""

import copy
import functools
import importlib
import importlib.util
import itertools
import os
import pickle
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
import reference  # noqa: E402
from pydet.torch import experts as layer  # noqa: E402
from pydet.torch import experts_fp8  # noqa: E402
from torch_bits import normal, same  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KERNELS = [k for k in pydet.kernels() if k.operation == "grouped_gemm" and k.device == "cuda" and k.available]
CUDA = torch.cuda.is_available() and {"ieee", "sm90"} <= {kernel.arithmetic for kernel in KERNELS}
DEVICES = ["cpu", *(["cuda"] if CUDA else [])]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


# ---- A layer ---------------------------------------------------------------------------------------------------------

EXPERTS, HIDDEN, INNER, SLOTS = 6, 32, 64, 3
KINDS = {  # has_gate, is_transposed, has_bias, has_post_expert_norm
    "Mixtral": (True, False, False, False),
    "gpt-oss": (True, True, True, False),
    "no gate, a norm": (False, False, True, True),
}


class Experts(torch.nn.Module):
    """What Transformers' decorator makes of a class of experts, as far as its interface goes."""

    def __init__(self, kind, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.config, self.num_experts = types.SimpleNamespace(_experts_implementation="eager"), EXPERTS
        self.has_gate, self.is_transposed, self.has_bias, self.has_post_expert_norm = KINDS[kind]
        up = INNER * (1 + self.has_gate)
        for name, n, k in (("gate_up_proj" if self.has_gate else "up_proj", up, HIDDEN), ("down_proj", HIDDEN, INNER)):
            shape = (EXPERTS, k, n) if self.is_transposed else (EXPERTS, n, k)
            setattr(self, name, torch.nn.Parameter(normal(*shape, dtype=dtype, device=device)))
            if self.has_bias:
                setattr(self, f"{name}_bias", torch.nn.Parameter(normal(EXPERTS, n, dtype=dtype, device=device)))
        self.act_fn, self.post_expert_norm = torch.nn.ReLU(), pt.RMSNorm(HIDDEN, dtype=dtype, device=device)

    def _apply_gate(self, rows):
        gate, up = rows.chunk(2, -1)
        return self.act_fn(gate) * up

    @functools.wraps(torch.nn.Module.forward)
    def forward(self, x, index, weights):
        return layer._forward(("auto", None), self, x, index, weights)

    def of_one(self, x, expert):
        """A row by one expert, by gemm."""

        def product(rows, name):
            w = getattr(self, name)[expert]
            bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
            return pt.gemm(rows, w if self.is_transposed else w.mT, bias)

        rows = self._apply_gate(product(x, "gate_up_proj")) if self.has_gate else self.act_fn(product(x, "up_proj"))
        rows = product(rows, "down_proj")
        return self.post_expert_norm(rows) if self.has_post_expert_norm else rows


def routed(tokens, device="cpu", weights=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + tokens)
    index = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :SLOTS]
    return index.to(device), torch.rand(tokens, SLOTS, generator=generator).to(device, weights)


def combined(rows, weights):
    """[slots, H] and [slots] by fmaf in ascending order from +0, then one rounding."""
    total = np.zeros(rows.shape[1], np.float32)
    for row, weight in zip(rows.float().cpu().numpy(), weights.float().cpu().numpy(), strict=True):
        total = reference.fma(np.full_like(row, weight), row, total)
    return torch.from_numpy(total).to(rows.dtype)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_is_gemms_of_its_rows_and_fmaf_over_slots(kind, dtype, device):
    experts, x = Experts(kind, dtype, device), normal(13, HIDDEN, dtype=dtype, device=device)
    for weights_of in {dtype, torch.float32}:
        index, weights = routed(13, device, weights_of)
        y = experts(x, index, weights)
        for t in range(13):
            rows = torch.cat([experts.of_one(x[t : t + 1], int(e)) for e in index[t]])
            same(y[t].cpu(), combined(rows, weights[t]))
            flipped = combined(rows.flip(0), weights[t].flip(0))
            if dtype == torch.float32 and t == 0:
                assert not torch.equal(flipped, y[t].cpu()), "the order of the slots shows"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_and_its_gradient_are_its_own(kind, dtype, device):
    """Alone, in batches, elsewhere in them, beside tokens of NaN, beside tokens that all go to one expert."""
    experts, dy = Experts(kind, dtype, device), normal(64, HIDDEN, dtype=dtype, device=device, seed=3)
    x = normal(64, HIDDEN, dtype=dtype, device=device)
    index, weights = routed(64, device)

    def run(x, index, weights, dy):
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = experts(x, index, weights)
        return y, *torch.autograd.grad(y, (x, weights), dy)

    alone = [run(*(t[i : i + 1] for t in (x, index, weights, dy))) for i in range(3)]
    for count in (3, 17, 64):
        for i, want in enumerate(alone):
            for got, one in zip(run(*(t[:count] for t in (x, index, weights, dy))), want, strict=True):
                same(got[i : i + 1], one)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(device)
    for got, one in zip(run(*(t[order] for t in (x, index, weights, dy))), alone[0], strict=True):
        same(got[order == 0], one)
    x[1:], index[1:] = float("nan"), index[0]
    for got, one in zip(run(x, index, weights, dy), alone[0], strict=True):
        same(got[:1], one)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_right(kind):
    experts, x = Experts(kind), normal(13, HIDDEN).requires_grad_()
    index, weights = routed(13)
    weights.requires_grad_()
    names = [name for name, p in experts.named_parameters()]
    operands = (x, weights, *experts.parameters())
    dy = normal(13, HIDDEN, seed=4)
    got = torch.autograd.grad(experts(x, index, weights), operands, dy, allow_unused=True)
    rows = [[experts.of_one(x[t : t + 1], int(e))[0] for e in index[t]] for t in range(13)]
    plain = torch.stack([sum(w * row for w, row in zip(weights[t], rows[t], strict=True)) for t in range(13)])
    want = torch.autograd.grad(plain, operands, dy, allow_unused=True)
    for name, ours, theirs in zip(("x", "weights", *names), got, want, strict=True):
        if theirs is None:
            assert ours is None and "norm" in name
        else:
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5, name


def test_slots_of_no_expert_here():
    """In expert parallelism an index past the last expert is one of another device's."""
    for kind in KINDS:
        experts, x = Experts(kind), normal(9, HIDDEN).requires_grad_()
        index, weights = routed(9)
        absent = torch.rand(9, SLOTS, generator=torch.Generator().manual_seed(1)) < 0.4
        index[0], absent[0] = EXPERTS, True
        for weight in (0.0, 0.7):
            y = experts(x, index.masked_fill(absent, EXPERTS), weights.masked_fill(absent, weight))
            (dx,) = torch.autograd.grad(y.sum(), x)
            assert not bool(y[0].any()) and not bool(dx[0].any()) and bool(dx.isfinite().all())
        for t in range(1, 9):
            here = [slot for slot in range(SLOTS) if not absent[t, slot]]
            rows = [experts.of_one(x[t : t + 1], int(index[t, slot])) for slot in here]
            if rows:
                same(y[t], combined(torch.cat(rows).detach(), weights[t, here]))


def test_empty_batches():
    experts, x = Experts("gpt-oss"), torch.zeros(0, HIDDEN).requires_grad_()
    y = experts(x, torch.zeros(0, SLOTS, dtype=torch.long), torch.zeros(0, SLOTS))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, HIDDEN) and not bool(experts.down_proj.grad.any())


def test_compiled_and_under_autocast():
    torch._dynamo.reset()
    experts, x = Experts("Mixtral"), normal(13, HIDDEN)
    index, weights = routed(13)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    with torch.no_grad():  # compiled gradients: test_torch_grouped.py
        same(compiled(x, index, weights), experts(x, index, weights))
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
        same(experts(x[4:5], index[4:5], weights[4:5]), y[4:5])
    halves = Experts("Mixtral", torch.bfloat16)
    rows = torch.cat([halves.of_one(x[4:5].bfloat16(), int(e)) for e in index[4]]).detach()
    same(y[4], combined(rows.float(), weights[4]))


def test_cuda_graph_is_replayed_with_other_routings():
    if not CUDA:
        pytest.skip("no grouped kernel on an NVIDIA GPU here")
    experts, x = Experts("Mixtral", torch.bfloat16, "cuda"), normal(40, HIDDEN, dtype=torch.bfloat16, device="cuda")
    index, weights = routed(40, "cuda")
    stream = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            experts(x, index, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(x, index, weights)
        for seed in (1, 2):
            index.copy_(routed(40, seed=seed)[0])
            graph.replay()
            same(y, experts(x, index, weights))


def test_accumulated_micro_batches_are_one_batch(dtype, device):
    """In ieee wherever they are cut; with tensor cores where each expert got a multiple of 16."""
    x, dy = (normal(96, HIDDEN, dtype=dtype, device=device, seed=s) for s in (0, 1))

    def gradients(kind, arithmetic, index, weights, cuts):
        experts = Experts(kind, dtype, device)
        experts.config._experts_implementation, experts.arithmetic, experts.k_chunk = "pydet", arithmetic, None
        assert pt.accumulate_gradients(experts) == list(experts.parameters())
        for first, last in itertools.pairwise(cuts):
            experts(*(t[first:last] for t in (x, index, weights))).backward(dy[first:last])
        assert all(p.grad is None for p in experts.parameters() if p is not experts.post_expert_norm.weight)
        found = {name: p.main_grad for name, p in experts.named_parameters() if "norm" not in name}
        assert all(bool(sum_.any()) for sum_ in found.values())
        return found, experts

    def compare(a, b):
        for name in a:
            same(a[name], b[name])

    index, weights = routed(96, device)
    for kind in KINDS:
        whole, experts = gradients(kind, "ieee", index, weights, [0, 96])
        compare(gradients(kind, "ieee", index, weights, [0, 1, 38, 39, 96])[0], whole)
        experts.accumulates = False
        experts(x, index, weights).backward(dy)
        for name, total in whole.items():
            same(dict(experts.named_parameters())[name].grad, total.to(dtype))
    if dtype == torch.float32:
        with torch.autocast(device, torch.bfloat16):
            y = experts(x, index, weights)
        experts.accumulates = True
        experts.zero_grad()
        y.backward(dy)
        halves = {name: p.grad for name, p in experts.named_parameters() if name in whole}
        for parameter in experts.parameters():
            parameter.main_grad.zero_()
        with torch.autocast(device, torch.bfloat16):
            y = experts(x, index, weights)
        y.backward(dy)
        for name, total in halves.items():
            same(dict(experts.named_parameters())[name].main_grad.bfloat16(), total.bfloat16())
        return
    regular = torch.stack([torch.arange(96) // 16 % 2 + 2 * slot for slot in range(SLOTS)], 1).to(device)
    whole = gradients("Mixtral", "sm90", regular, weights, [0, 96])[0]
    compare(gradients("Mixtral", "sm90", regular, weights, [0, 32, 96])[0], whole)
    with pytest.raises(AssertionError, match="elements differ"):
        compare(gradients("Mixtral", "sm90", regular, weights, [0, 37, 96])[0], whole)


# ---- Models of Transformers ------------------------------------------------------------------------------------------

MODELS = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3", "gpt-oss")


@pytest.fixture
def models(need):
    need(importlib.util.find_spec("transformers"), "models", "no Transformers here")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # see test_torch_models.one_thread
    models = importlib.import_module("test_torch_models")
    import transformers

    transformers.logging.set_verbosity_error()
    pt.register_attention()
    models.transformers = transformers
    yield models
    torch.set_num_threads(threads)


def converted(models, name, **options):
    model = models.build(models.transformers, name)
    model.set_attn_implementation("pydet")
    pt.convert(model, strict=True, **options)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_models_tokens_do_not_feel_each_other(models, name):
    """Nothing overridden: what convert() swaps is enough. (With padding, and the override: test_torch_models.)"""
    model, rows = models.build(models.transformers, name), models.tokens()
    model.set_attn_implementation("pydet")
    with torch.no_grad():
        before = model(rows[:3]).logits
        report = pt.convert(model, strict=True)
        assert sum("Experts" in kind for kind in report.swapped.values()) in (1, 2)
        assert sum("Router" in kind for kind in report.swapped.values()) in (1, 2)
        torch.testing.assert_close(model(rows[:3]).logits, before, rtol=1e-4, atol=1e-4)
        want = model(rows[:1]).logits
        found = [models.differing(model(rows[:n]).logits[:1], want) for n in (3, 17, 64)]
        found += [models.differing(models.decoded(model, rows[:1], prefill), want) for prefill in (1, 10)]
        halves = copy.deepcopy(model).bfloat16()
        same(halves(rows[:1]).logits, halves(rows[:17]).logits[:1])
    assert found == [0] * 5
    assert not pt.convert(model).swapped and model.config._experts_implementation == "pydet"


def test_of_transformers_own_experts_they_do(models):
    """The negative control."""
    model, rows = converted(models, "Mixtral"), models.tokens()
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        want = model(rows[:1]).logits
        assert models.differing(model(rows[:17]).logits[:1], want) > 100
    assert set(pt.convert(model).swapped.values()) == {"MixtralExperts"}
    with torch.no_grad():
        assert models.differing(model(rows[:17]).logits[:1], model(rows[:1]).logits) == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_has_the_bits_of_micro_batches(models, name):
    """Of all parameters whose sums are pydet's: matrices, norms, routers, experts and their biases."""
    rows = models.tokens(24, 32)
    model = converted(models, name).train()
    start, unit = copy.deepcopy(model.state_dict()), pydet.DWEIGHT_ROWS // 32

    def gradients(cuts):
        model.load_state_dict(start)
        for parameter in parameters:
            parameter.main_grad.zero_()
        for first, last in itertools.pairwise(cuts):
            model(rows[first:last]).logits.square().sum().backward()
        return {name: p.main_grad.clone() for name, p in model.named_parameters() if hasattr(p, "main_grad")}

    parameters = pt.accumulate_gradients(model)
    whole = gradients([0, 24])
    left = {name.rpartition(".")[2] for name, _ in model.named_parameters()} - {n.rpartition(".")[2] for n in whole}
    assert (
        left <= {"sinks"} and any("experts" in n for n in whole) and any("gate.w" in n or "router" in n for n in whole)
    )
    assert all(bool(total.any()) for n, total in whole.items() if not n.endswith(("k_proj.bias", "router.bias")))
    for n, total in gradients([0, unit, 24]).items():
        same(total, whole[n])
    with pytest.raises(AssertionError, match="elements differ"):  # not at a multiple of DWEIGHT_ROWS tokens
        for n, total in gradients([0, unit - 3, 24]).items():
            same(total, whole[n])


def test_copies_routers_and_their_logits(models):
    model, rows = converted(models, "Mixtral", arithmetic="ieee", k_chunk=16), models.tokens(2)
    gate = model.model.layers[0].mlp.gate
    assert isinstance(gate, models.transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter)
    with torch.no_grad():
        want = model(rows).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other.model.layers[0].mlp.gate) is type(gate)
            same(other(rows).logits, want)
        result = model(rows, output_router_logits=True, labels=rows)
        assert len(result.router_logits) == 2 and bool(result.aux_loss.isfinite())
        plain = models.build(models.transformers, "Mixtral")
        plain.set_attn_implementation("pydet")
        pt.convert(plain)
        differing = models.differing(plain(rows).logits, want)
        assert differing > 100, "k_chunk reaches the experts"


def test_a_router_that_is_a_linear_layer(models):
    class Router(torch.nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return logits, *logits.softmax(-1).topk(2)

    model, rows = models.build(models.transformers, "Mixtral"), models.tokens()
    model.model.layers[1].mlp.gate = Router(32, 8, bias=False)
    model.set_attn_implementation("pydet")
    assert pt.convert(model, strict=True).swapped["model.layers.1.mlp.gate"].endswith("Router")
    with torch.no_grad():
        assert models.differing(model(rows[:17]).logits[:1], model(rows[:1]).logits) == 0


@pytest.mark.parametrize("name", ("MiniMax-M2", "Ernie-4.5"))
def test_routers_that_want_more_than_rows(models, name):
    """A correction of the scores, which one gets from its block and the other from a module of its own."""
    model, rows = converted(models, name), models.tokens()
    assert "TopKRouterOfPydet" in type(model.model.layers[1].mlp.gate).__name__
    with torch.no_grad():
        want = model(rows[:1]).logits
        found = [models.differing(model(rows[:n]).logits[:1], want) for n in (3, 17)]
        found += [models.differing(models.decoded(model, rows[:1], 10), want)]
    assert found == [0] * 3
    gates = [p for name, p in model.named_parameters() if name.endswith("gate.weight")]
    accumulating = {id(p) for p in pt.accumulate_gradients(model.model)}  # Ernie's lm_head is tied
    assert gates and all(id(p) in accumulating for p in gates)


def test_a_column_of_sigmoids_is_what_differs_in_qwen2_moe(models, monkeypatch):
    """Its shared expert has a gate of one number a token. PyTorch's sigmoid on the CPU gives an element other bits in a
    vector of 32 than in what is left; in float64, rounded, it has one result."""
    model, rows = converted(models, "Qwen2-MoE"), models.tokens()

    def differing():
        with torch.no_grad():
            return models.differing(model(rows[:17]).logits[:1], model(rows[:1]).logits)

    assert differing() > 0, "docs/calls.md says that they differ"
    monkeypatch.setattr(torch.nn.functional, "sigmoid", lambda x: x.double().sigmoid().float())
    assert differing() == 0


def test_routers_that_are_left(models):
    mixtral = models.transformers.models.mixtral.modeling_mixtral

    class Odd(mixtral.MixtralTopKRouter):
        def forward(self, x):
            return super().forward(x @ torch.ones(1, 1).expand(x.shape[-1], x.shape[-1]).to(x))

    class Other(mixtral.MixtralTopKRouter):
        def forward(self, x, more):
            return more["x"]

    class Idle(mixtral.MixtralTopKRouter):
        def forward(self, x):
            return x

    for kind, reason in (
        (Odd, r"its products are \(matmul, linear\), and a router's is one linear"),
        (Other, r"could not be tried"),
        (Idle, r"its products are \(\), and a router's is one linear"),
    ):
        model = models.build(models.transformers, "Mixtral")
        model.model.layers[1].mlp.gate.__class__ = kind
        with pytest.raises(pydet.Error, match=reason):
            pt.convert(model, strict=True)
        assert list(pt.convert(model).left) == ["model.layers.1.mlp.gate"]


def test_register_experts(models):
    pt.register_experts("pydet in chunks", k_chunk=16)
    model, rows = models.build(models.transformers, "Mixtral"), models.tokens(3)
    with torch.no_grad():
        found = []
        for name in ("pydet in chunks", "grouped_mm"):
            model.set_experts_implementation(name)
            found.append(model(rows).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert models.differing(*found) > 100


# ---- In fp8 ----------------------------------------------------------------------------------------------------------


def in_fp8(experts, arithmetic="sm90", power_of_two=False):
    """What convert(fp8=True) makes of a layer of experts."""
    kind, attributes = experts_fp8.becomes(experts, arithmetic)
    experts.__class__ = kind
    for name, value in (attributes | {"power_of_two": power_of_two}).items():
        setattr(experts, name, value)
    return experts


def fp8_of_one(experts, x, expert):
    """A row by one expert, by scaled_gemm of what quantize makes."""

    def product(rows, name):
        w = getattr(experts, name)[expert].detach()
        made = {"power_of_two": experts.power_of_two}
        w, of_w = pydet.quantize((w.mT if experts.is_transposed else w).contiguous(), granularity="block", **made)
        q, of_q = pydet.quantize(rows, granularity="group", **made)
        bias = getattr(experts, f"{name}_bias")[expert].detach() if experts.has_bias else None
        how = {"bias": bias, "out_dtype": rows.dtype, "arithmetic": experts.arithmetic}
        return pydet.scaled_gemm(q, w.mT, a_scale=of_q, b_scale=of_w.mT, **how)

    rows = product(x, "gate_up_proj" if experts.has_gate else "up_proj")
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = product(rows, "down_proj")
    return experts.post_expert_norm(rows) if experts.has_post_expert_norm else rows


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_in_fp8_is_scaled_gemms_of_its_rows(kind, dtype, device):
    """The same when its matrices are kept in fp8, and when they are the trainer's later."""
    experts = in_fp8(Experts(kind, dtype, device), power_of_two=kind == "Mixtral")
    x, (index, weights) = normal(13, HIDDEN, dtype=dtype, device=device), routed(13, device, dtype)
    y, plain = experts(x, index, weights), Experts(kind, dtype, device)(x, index, weights)
    for t in range(13):
        rows = torch.cat([fp8_of_one(experts, x[t : t + 1], int(e)) for e in index[t]])
        same(y[t].cpu(), combined(rows, weights[t]))
    assert 0 < float((y - plain).norm() / plain.norm()) < 0.1, "quantised, and right"
    same(pickle.loads(pickle.dumps(experts))(x, index, weights), y)
    kept = {name: p.detach().clone() for name, p in experts.named_parameters()}
    assert experts.freeze() is experts and experts.down_proj.dtype == torch.float8_e4m3fn
    assert experts.down_proj.shape == kept["down_proj"].shape
    same(experts(x, index, weights), y)
    other, place = in_fp8(Experts(kind, dtype, device), power_of_two=kind == "Mixtral"), experts.down_proj.data_ptr()
    other.load_state_dict(experts.state_dict())
    same(other(x, index, weights), y)
    same(copy.deepcopy(experts)(x, index, weights), y)
    for name in experts_fp8.matrices_of(experts):
        experts.freeze(**{name: kept[name] * 2})
    assert experts.down_proj.data_ptr() == place
    same(experts(x, index, weights), experts(x, index, weights))
    assert not torch.equal(experts(x, index, weights), y)
    with pytest.raises(pydet.Error, match=r"Fp8Experts: down_proj is torch.*, and the layer is frozen; want float8"):
        experts.load_state_dict({"down_proj": kept["down_proj"]}, strict=False)
    with pytest.raises(pydet.Error, match=r"freeze: down_proj is \(2, 2\), want \(6, "):
        experts.freeze(down_proj=torch.zeros(2, 2))
    with pytest.raises(pydet.Error, match=r"freeze: up is no matrix of these experts, want .* or down_proj"):
        experts.freeze(up=torch.zeros(2, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_and_its_gradient_are_its_own_in_fp8(kind, dtype, device):
    experts, dy = in_fp8(Experts(kind, dtype, device)), normal(64, HIDDEN, dtype=dtype, device=device, seed=3)
    x, (index, weights) = normal(64, HIDDEN, dtype=dtype, device=device), routed(64, device)

    def run(x, index, weights, dy):
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = experts(x, index, weights)
        return y, *torch.autograd.grad(y, (x, weights), dy)

    operands = (x, index, weights, dy)
    alone = run(*(t[:1] for t in operands))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(device)
    for rows in (slice(0, 3), slice(0, 17), order):
        place = 0 if isinstance(rows, slice) else order == 0
        for got, one in zip(run(*(t[rows] for t in operands)), alone, strict=True):
            same(got[place].reshape(one.shape), one)
    x[1:], index[1:] = float("nan"), index[0].clone()
    for got, one in zip(run(*operands), alone, strict=True):
        same(got[:1], one)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_fp8_are_right(kind):
    """Those of x to the error of fp8; of matrices and biases the rows' own products, which micro-batches continue."""
    experts, x = in_fp8(Experts(kind), "ieee"), normal(40, HIDDEN).requires_grad_()
    plain, dy, (index, weights) = Experts(kind), normal(40, HIDDEN, seed=4), routed(40)
    found = []
    for layer_ in (experts, plain):
        names = [n for n, _ in layer_.named_parameters() if "norm" not in n]
        wanted = (x, *(dict(layer_.named_parameters())[n] for n in names))
        found.append(torch.autograd.grad(layer_(x, index, weights), wanted, dy))
    for name, got, want in zip(("x", *names), *found, strict=True):
        assert float((got - want).norm() / want.norm()) < 0.15, name
    experts.config._experts_implementation = "pydet"
    assert pt.accumulate_gradients(experts) == list(experts.parameters())
    for first, last in ((0, 1), (1, 17), (17, 40)):
        experts(*(t[first:last] for t in (x.detach(), index, weights))).backward(dy[first:last])
    for name, got in zip(names, found[0][1:], strict=True):
        same(dict(experts.named_parameters())[name].main_grad, got)
    frozen = in_fp8(Experts(kind), "ieee").freeze()
    (dx,) = torch.autograd.grad(frozen(x, index, weights), x, dy)
    same(dx, found[0][0])


@pytest.mark.parametrize("kind", KINDS)
def test_several_blocks_of_a_matrix_in_fp8(kind, device, monkeypatch):
    """Other numbers of blocks along K than along N, of other scales, the last ones not whole; frozen, and backward."""
    for name, size in (("HIDDEN", 144), ("INNER", 272)):
        monkeypatch.setitem(globals(), name, size)
    plain, dy = Experts(kind, torch.bfloat16, device), normal(5, 144, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for name in experts_fp8.matrices_of(plain):
            getattr(plain, name)[:, :128] *= 32
    experts = in_fp8(copy.deepcopy(plain))
    x, (index, weights) = normal(5, 144, dtype=torch.bfloat16, device=device), routed(5, device, torch.bfloat16)
    x.requires_grad_()
    y = experts(x, index, weights)
    for t in range(5):
        rows = torch.cat([fp8_of_one(experts, x[t : t + 1].detach(), int(e)) for e in index[t]])
        same(y[t].cpu(), combined(rows.detach(), weights[t]))
    (dx,) = torch.autograd.grad(y, x, dy)
    (want,) = torch.autograd.grad(plain(x, index, weights), x, dy)
    assert float((dx - want).norm() / want.norm()) < 0.3
    again = experts.freeze()(x, index, weights)
    same(again, y)
    same(torch.autograd.grad(again, x, dy)[0], dx)


def test_empty_batches_and_autocast_in_fp8():
    experts, x = in_fp8(Experts("gpt-oss")), torch.zeros(0, HIDDEN).requires_grad_()
    y = experts(x, torch.zeros(0, SLOTS, dtype=torch.long), torch.zeros(0, SLOTS))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, HIDDEN) and not bool(experts.down_proj.grad.any())
    x, (index, weights) = normal(13, HIDDEN), routed(13)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
        same(experts(x[4:5], index[4:5], weights[4:5]), y[4:5])


@pytest.mark.parametrize("name", MODELS)
def test_a_models_tokens_do_not_feel_each_other_in_fp8(models, name):
    """Layers and experts in fp8; a rollout with frozen weights has the trainer's bits, alone and in batches."""
    trainer, rows = models.build(models.transformers, name), models.tokens()
    trainer.set_attn_implementation("pydet")
    report = pt.convert(trainer, fp8=lambda module, _: module != "lm_head", strict=True)
    assert sum("Experts" in kind for kind in report.swapped.values()) in (1, 2)
    rollout = copy.deepcopy(trainer)
    frozen = [m.freeze() for m in rollout.modules() if isinstance(m, pt.Fp8Linear | pt.Fp8Experts)]
    assert any(isinstance(m, pt.Fp8Experts) for m in frozen)
    with torch.no_grad():
        want = trainer(rows[:1]).logits
        found = [models.differing(rollout(rows[:n]).logits[:1], want) for n in (1, 3, 17, 64)]
        found += [models.differing(models.decoded(rollout, rows[:1], prefill), want) for prefill in (1, 10)]
        exact = converted(models, name)(rows[:1]).logits
    assert found == [0] * 6
    assert models.differing(exact, want) > want.numel() // 2, "the experts are in fp8"
    assert not pt.convert(rollout, fp8=lambda module, _: module != "lm_head").swapped


def test_experts_of_a_block_scaled_checkpoint(models):
    """As Transformers loads them: matrices in float8, a number for each block of 128x128."""
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import use_experts_implementation

    model, rows = models.build(models.transformers, "Mixtral"), models.tokens(17)
    model.set_attn_implementation("pydet")
    trainer = copy.deepcopy(model)
    pt.convert(trainer, fp8=True)
    own = finegrained_fp8.FP8Experts.forward
    interface = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    for layer_, mine in zip(model.model.layers, trainer.model.layers, strict=True):
        kind = type("FP8Experts", (finegrained_fp8.FP8Experts,), {"forward": own})
        kind = use_experts_implementation(experts_class=kind, experts_interface=interface)
        loaded = kind(model.config, block_size=(128, 128))
        mine.mlp.experts.freeze()
        for name in ("gate_up_proj", "down_proj"):
            w, scale = getattr(mine.mlp.experts, name), getattr(mine.mlp.experts, f"{name}_scale_inv")
            setattr(loaded, name, torch.nn.Parameter(w.detach().clone(), requires_grad=False))
            setattr(loaded, f"{name}_scale_inv", torch.nn.Parameter(scale.detach().clone(), requires_grad=False))
        layer_.mlp.experts = loaded
    assert set(pt.convert(copy.deepcopy(model)).left.values()) == {
        "its matrices are fp8, with scales; convert(model, fp8=True)"
    }
    report = pt.convert(model, fp8=True)
    assert sum(kind == "FP8Experts" for kind in report.swapped.values()) == 2
    with torch.no_grad():
        want = trainer(rows).logits
        assert models.differing(model(rows).logits, want) == 0
        assert models.differing(model(rows[:1]).logits, want[:1]) == 0
    scale = model.model.layers[0].mlp.experts.down_proj_scale_inv
    odd = copy.deepcopy(model.model.layers[0].mlp.experts)
    odd.__class__ = type(odd).__mro__[2]
    odd.down_proj_scale_inv = torch.nn.Parameter(scale[:, :, :0].detach(), requires_grad=False)
    assert "its down_proj_scale_inv is torch.float32 (8, 1, 0), want (8, 1, 1)" in experts_fp8.becomes(odd, "auto")
