"""Rotary embeddings by a written formula, and modules of families that convert knows by name."""

import math
import os
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from pydet.torch import rotary, rotations  # noqa: E402
from pydet.torch.rotary import cos_sin  # noqa: E402
from torch_bits import normal, same  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def angles():
    """Positions up to 100,000 by frequencies, whole numbers, and numbers near multiples of a quarter turn."""
    random = torch.Generator().manual_seed(0)
    places = torch.tensor([0, 1, 2, 1000, 65_535, 99_999, 100_000])[:, None] * 10000.0 ** -(torch.arange(0, 1, 0.01))
    turns = (torch.arange(-5000, 5000).double() * math.pi / 2).float()
    return torch.cat([places.flatten(), torch.arange(100_000.0), turns, torch.randn(10_000, generator=random) * 1e5])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cosines_and_sines_are_rounded_rightly(device, dtype):
    """Against NumPy's in long double, which PyTorch's own in float32 miss here and there."""
    x = angles().clamp(-6e4, 6e4).to(dtype)
    wide, (cos, sin) = x.double().numpy().astype(np.longdouble), cos_sin(x.to(device))
    for got, want in ((cos, np.cos(wide)), (sin, np.sin(wide))):
        same(got.cpu(), torch.from_numpy(want.astype(np.float64)).to(dtype))
    assert dtype != torch.float32 or bool((x.cos() != cos.cpu()).any()), "PyTorch's would do"


def test_bits_depend_on_nothing_else():
    """Threads, places, shapes; infinities and NaN."""
    x, threads = angles(), torch.get_num_threads()
    want = cos_sin(x)
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            for got, all_at_once in zip(cos_sin(x), want, strict=True):
                same(got, all_at_once)
    finally:
        torch.set_num_threads(threads)
    for width in (1, 3, 17, 1000):
        parts = [cos_sin(part) for part in x[:3000].split(width)]
        for i in (0, 1):
            same(torch.cat([part[i] for part in parts]), want[i][:3000])
    same(torch.stack(cos_sin(x[::7])), torch.stack([y[::7] for y in want]))
    assert bool(torch.stack(cos_sin(torch.tensor([math.inf, -math.inf, math.nan]))).isnan().all())
    assert cos_sin(torch.empty(0, 3))[1].shape == (0, 3)


# ---- Transformers ----------------------------------------------------------------------------------------------------


SIZES = {
    **{"vocab_size": 61, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 131_072, "pad_token_id": 0},
}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32_768},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
    "longrope": {
        **{"short_factor": [1.0] * 5, "long_factor": [2.0] * 5, "factor": 4.0},
        "original_max_position_embeddings": 32_768,
    },
}


def model_of(transformers, family="llama", dtype=torch.float32, **more):
    config = transformers.CONFIG_MAPPING[family](**{name: x for name, x in {**SIZES, **more}.items() if x is not None})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


def test_a_pair_is_made_once(monkeypatch):
    made, own = [], rotary.cos_sin
    monkeypatch.setattr(rotary, "cos_sin", lambda x: made.append(1) or own(x))
    for mode in (torch.no_grad, torch.inference_mode):
        made.clear()
        with mode(), rotary.Written():
            x = torch.linspace(-3, 3, 77)
            cos, sin = x.cos(), x.sin()
            assert len(made) == 1
            same(cos, own(x)[0])
            cos.mul_(2)  # is the caller's own
            same(x.cos(), own(x)[0])
            same(x.sin(), sin)
            assert len(made) == 2
            for change in (lambda x: x.add_(1), lambda x: x.__iadd__(1), lambda x: x.__setitem__(3, 1.0),
                           lambda x: torch.mul(x, 2, out=x)):  # fmt: skip
                x.cos(), change(x)
                same(x.sin(), own(x)[1])


@pytest.mark.parametrize("kind", SCALINGS)
def test_scalings(transformers, kind):
    """The table of any scaling is the rounded one of its angles, for each position alone as for all, up to 100,000."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **SCALINGS[kind]}
    model = model_of(transformers, rope_parameters=rope)
    embedding, x = model.model.rotary_emb, torch.zeros(1, 1)
    places = torch.tensor([[0, 1, 6, 4095, 40_000, 99_999, 100_000]])
    stock = embedding(x, places)
    assert pt.convert(model).swapped["model.rotary_emb"].endswith("RotaryEmbedding")
    table, threads = embedding(x, places), torch.get_num_threads()
    for ours, theirs in zip(table, stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    angle = (places[0][:, None].float() * embedding.inv_freq.float()).double().numpy().astype(np.longdouble)
    for got, want in zip(table, (np.cos(angle), np.sin(angle)), strict=True):
        rounded = torch.from_numpy(want.astype(np.float64)).float() * embedding.attention_scaling
        same(got[0, :, :5], rounded)
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            same(torch.stack(embedding(x, places)), torch.stack(table))
    finally:
        torch.set_num_threads(threads)
    if kind not in ("dynamic", "longrope"):  # whose frequencies depend on the largest position, as they mean to
        for i in range(places.shape[1]):
            same(torch.stack(embedding(x, places[:, i : i + 1])), torch.stack(table)[:, :, i : i + 1])
    same(torch.stack(pickle.loads(pickle.dumps(embedding))(x, places)), torch.stack(table))
    assert not pt.convert(model).swapped, "a second time there is nothing to do"


def test_decoding_far_on_is_a_prefill(transformers):
    """At odd widths, from position 99,990 on."""
    model = model_of(transformers)
    model.set_attn_implementation("pydet")
    pt.convert(model, strict=True)
    ids, places = torch.arange(3, 12)[None], torch.arange(99_990, 99_999)[None]
    with torch.no_grad(), pt.override_aten():
        whole, cache, steps = model(ids, position_ids=places, use_cache=False).logits, None, []
        for i in range(9):
            own = slice(i, i + 1)
            step = model(ids[:, own], position_ids=places[:, own], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
    same(torch.cat(steps, 1), whole)
    with torch.no_grad():
        assert not torch.equal(whole, model(ids, use_cache=False).logits), "positions are seen"


# ---- Modules that are known by name ----------------------------------------------------------------------------------

NAMED = {
    "cohere": ("CohereLayerNorm", "LayerNorm", {"layer_norm_eps": 1e-5}),
    "cohere2": ("Cohere2LayerNorm", "LayerNorm", {"layer_norm_eps": 1e-5}),
    "nemotron": ("NemotronLayerNorm1P", "OffsetLayerNorm", {}),
    "falcon": ("FalconLinear", "Linear", {"head_dim": None, "hidden_size": 40, "bias": True}),
    "mpt": ("MptAttention", "MptAttentionOfPydet", {"d_model": 36, "n_heads": 4, "n_layers": 1}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", NAMED)
def test_modules_of_families(transformers, family, dtype):
    """They become pydet's, compute what they did, and micro-batches have the gradients of one batch."""
    was, becomes, more = NAMED[family]
    model = model_of(transformers, family, dtype, **more)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.0 if "bias" in name else 1.0, 0.3)
    tokens = pydet.DWEIGHT_ROWS
    ids = torch.randint(3, 61, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        stock = model(ids[:, :9]).logits
    report = pt.convert(model)
    names = [name for name, kind in report.swapped.items() if kind == was]
    modules = dict(model.named_modules())
    assert names and {type(modules[name]).__name__ for name in names} == {becomes} and was not in str(report.left)
    with torch.no_grad():
        got = model(ids[:, :9]).logits
    far = float((got - stock).abs().max() / stock.abs().max())
    assert far < (1e-4 if dtype == torch.float32 else 0.1), far
    found = pt.accumulate_gradients(model)
    own = {p for name in names for p in modules[name].parameters(recurse=False)}
    assert own <= set(found)

    def sums(rows):
        for parameter in found:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        for part in ids.split(rows):
            with pt.override_aten():
                logits = model(part, use_cache=False).logits
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum").backward()
        return [parameter.main_grad.clone() for parameter in found]

    for whole, parts in zip(sums(2), sums(1), strict=True):
        assert whole.any()
        same(whole, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mpt_decodes_as_it_prefills(transformers, dtype):
    """Also behind padding, and with a head count that is no power of two."""
    model = model_of(transformers, "mpt", dtype, d_model=48, n_heads=6, n_layers=2)
    assert not pt.convert(model).attention
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad(), pt.override_aten():
        whole, cache, steps = model(ids, use_cache=False).logits, None, []
        for i in range(9):
            step = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
        same(torch.cat(steps, 1), whole)
        padded = model(ids, attention_mask=mask, use_cache=False).logits
        same(padded[0], whole[0])
        same(padded[1, 4:], model(ids[1:, 4:], use_cache=False).logits[0])
    model.train()
    model.transformer.blocks[0].attn.attn_dropout_p = 0.1
    with pytest.raises(pydet.Error, match=r"attention: dropout is 0.1, want 0"):
        model(ids)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def steps_of(model, call, ids):
    model.zero_grad()
    logits = call(input_ids=ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def test_the_table_in_a_graph_of_inductor(transformers):
    """Whose own cosines are others than eager PyTorch's."""
    model, places = model_of(transformers), torch.arange(4000, 4100)[None]
    pt.convert(model)
    torch._dynamo.reset()
    embedding, x = model.model.rotary_emb, torch.zeros(1, 1)
    same(torch.stack(torch.compile(embedding, fullgraph=True)(x, places)), torch.stack(embedding(x, places)))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_training_step_is_the_eager_one(transformers, dtype):
    """In one graph: logits, and gradients of all parameters."""
    model = model_of(transformers, dtype=dtype)
    model.set_attn_implementation("pydet")
    pt.convert(model, strict=True)
    ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    want = steps_of(model, model, ids)
    torch._dynamo.reset()
    try:
        got = steps_of(model, torch.compile(model, fullgraph=True, backend="aot_eager"), ids)
    finally:
        torch._dynamo.reset()
    assert len(want) == 13 and want.keys() == got.keys()
    for name, eager in want.items():
        assert eager.any(), name
        same(got[name], eager)


# ---- What turns q and k ----------------------------------------------------------------------------------------------

# By what differs among Transformers' functions: pairs half apart, of neighbours, of neighbours put half apart; a part
# of each head; steps in float32, and their gradient's or not; a table of half the size; one tensor at a time.
TURNING = {
    "llama": "apply_rotary_pos_emb",
    "gpt_neox": "apply_rotary_pos_emb",
    "glm": "apply_rotary_pos_emb",
    "cohere": "apply_rotary_pos_emb",
    "olmo2": "apply_rotary_pos_emb",
    "ernie4_5": "apply_rotary_pos_emb",
    "gptj": "apply_rotary_pos_emb",
    "deepseek_v3": "apply_rotary_pos_emb_interleave",
    "phi3": "apply_rotary_pos_emb",
    "gpt_oss": "apply_rotary_pos_emb",
    "gemma3n": "apply_rotary_pos_emb",
}


def turned_by(function, given, of_found):
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
    found = function(*given)
    found = found if isinstance(found, tuple) else (found,)
    torch.autograd.backward(found, of_found[: len(found)])
    return [*found, *(x.grad for x in given if x.requires_grad)]


@pytest.mark.parametrize("family", TURNING)
def test_functions_that_turn_are_rotary_with_all_bits(transformers, family, monkeypatch):
    """Also of heads before tokens in memory, of one row of the table for a batch, of one token, and their gradients."""
    import importlib

    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = getattr(file, TURNING[family])
    ours = rotations._of(own)
    random, taken = torch.Generator().manual_seed(0), []
    single, called = family in ("gptj", "gemma3n"), rotations._rotary
    monkeypatch.setattr(rotations, "_rotary", lambda *x: taken.__setitem__(-1, taken[-1] + 1) or called(*x))
    draw = lambda *shape, dtype: torch.randn(shape, generator=random).to(dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for table in dict.fromkeys((dtype, torch.float32)):
            for batch, tokens, heads, n in ((2, 5, 3, 16), (1, 1, 4, 128), (3, 7, 1, 34)):
                columns = n // 2 if family in ("gptj", "gpt_oss") else n
                cos, sin = (draw(1 if tokens > 5 else batch, tokens, columns, dtype=table) for _ in range(2))
                q, k = (draw(batch, tokens, h, n, dtype=dtype) for h in (heads, 1))
                of_found = [draw(*x.shape, dtype=torch.promote_types(dtype, table)) for x in (q, k)]
                if family != "gptj":
                    q, k, *of_found = (x.transpose(1, 2) for x in (q, k, *of_found))
                given = [x.requires_grad_() for x in ((q,) if single else (q, k))]
                given += (sin, cos) if family == "gptj" else (cos, sin)
                types = own(*given)[0].dtype if not single else own(*given).dtype
                of_found = [x.to(types) for x in of_found]
                want = turned_by(own, given, of_found)
                taken.append(0)
                got = turned_by(ours, given, of_found)
                for one, other in zip(got, want, strict=True):
                    same(one, other)
                with torch.no_grad():
                    quick = ours(*given)
                for one, other in zip(quick if not single else [quick], want, strict=False):
                    same(one, other)
    assert set(taken) == {1 if family == "gpt_oss" else 2}, "the function was asked"  # whose zeros have other signs


def test_a_function_that_turns_otherwise_is_left_alone():
    """Negative controls: a sign, a rounding, a place; and what was tried with other dimensions."""

    def half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    def turn(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return (q * cos) + (half(q) * sin), (k * cos) + (half(k) * sin)

    def back(q, k, cos, sin, unsqueeze_dim=1):
        return turn(q, k, cos, -sin, unsqueeze_dim)

    def fused(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return torch.addcmul(q * cos, half(q), sin), torch.addcmul(k * cos, half(k), sin)

    def later(q, k, cos, sin, unsqueeze_dim=1):
        return turn(q, k, cos.roll(1, -2), sin, unsqueeze_dim)

    assert rotations._of(turn) is not None
    for other in (back, later):
        assert rotations._of(other) is None, other
    by = rotations._of(fused)
    q, k, cos, sin = (torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4))
    if by is not None:  # in float32, where nothing is between the steps, it may be the same
        same(by(q, k, cos[:, 0], sin[:, 0])[0], fused(q, k, cos[:, 0], sin[:, 0])[0])
    asked = []
    own = rotations._make(lambda *given, **options: asked.append(1), next(rotations._forms(turn)), {})
    own(q, k, cos[:, 0], sin[:, 0])
    assert asked == [1]


@pytest.mark.parametrize("family", ["llama", "cohere", "glm", "gpt_neox"])
def test_a_converted_model_has_the_bits_of_the_composition(transformers, family):
    """Logits and gradients; the class keeps its name, goes back, and goes through a pickle."""
    found = []
    more = {"head_dim": 12, "hidden_size": 48} if family != "gpt_neox" else {"head_dim": None, "hidden_size": 48}
    for native in (True, False):
        model = model_of(transformers, family, torch.bfloat16, **more)
        model.set_attn_implementation("pydet")
        pt.convert(model)
        turning = [m for m in model.modules() if rotations.turned_from(type(m)) is not None]
        assert len(turning) == 1 and type(turning[0]).__name__ == rotations.turned_from(type(turning[0])).__name__
        if not native:
            turning[0].__class__ = rotations.turned_from(type(turning[0]))
            for module in model.modules():
                if isinstance(module, rotary.Rotary):
                    module.makes_table = None
        ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(1))
        found.append(steps_of(model, model, ids))
        if native:
            again = pickle.loads(pickle.dumps(model))
            assert type(again.get_submodule(name_of(model, turning[0]))) is type(turning[0])
            with torch.no_grad():
                same(again(ids, use_cache=False).logits, found[0]["logits"])
    for name, x in found[0].items():
        if x is not None:
            same(x, found[1][name])


def test_a_conversion_under_another_device(transformers):
    """As engines convert, which make models under `torch.device("cuda")`: what is tried on the way is a CPU's."""
    found = []
    for device in ("cpu", "meta"):
        model = model_of(transformers, "llama", torch.bfloat16)
        model.set_attn_implementation("pydet")
        with torch.device(device):
            report = pt.convert(model)
        tables = [module.makes_table for module in model.modules() if isinstance(module, rotary.Rotary)]
        ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            found.append((report.swapped, report.left, tables, model(ids, use_cache=False).logits))
    assert found[0][:3] == found[1][:3] and found[0][2] == [True]
    same(found[0][3], found[1][3])


def name_of(model, module):
    return next(name for name, x in model.named_modules() if x is module)


def test_a_function_is_tried_on_the_cpu_whatever_the_default_device(transformers):
    """As under ``torch.set_default_device("cuda")``, where a generator of the CPU's was refused."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotations._of.cache_clear()
    with torch.device("meta"):
        ours = rotations._of(apply_rotary_pos_emb)
    assert ours is not None
    given = [normal(2, 3, 5, 16, seed=i) for i in range(2)] + [normal(2, 5, 16, seed=2 + i) for i in range(2)]
    for one, other in zip(ours(*given), apply_rotary_pos_emb(*given), strict=True):
        same(one, other)
