"""The masks that pydet's attention hands to models: what a model asks for counts, whatever its modules say of
themselves, and code that does arithmetic with a mask has the results of eager attention, or a refusal."""

import copy
import importlib.util
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402

if not importlib.util.find_spec("transformers"):
    if "models" in os.environ.get("PYDET_TEST_EXTRAS", ""):
        raise RuntimeError("PYDET_TEST_EXTRAS has models, and Transformers is not here")
    pytest.skip("no Transformers here", allow_module_level=True)

import transformers  # noqa: E402

from pydet.torch.mask import All, Causal, Given, elements_of, given, say  # noqa: E402
from torch_bits import give_attention, same  # noqa: E402

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "n_positions": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 0, "is_decoder": True},
    **{"n_embd": 32, "n_head": 4, "n_layer": 2, "attention_window": 4, "rotary_emb_base": 10000, "embedding_size": 16},
}


@pytest.fixture(autouse=True)
def registered():
    transformers.logging.set_verbosity_error()
    pt.register_attention()


def made(family, attention, auto="AutoModelForCausalLM", **more):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**{**SIZES, **more})
    model = getattr(transformers, auto).from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # so that attention does more than average
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens():
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids, mask


def near(ours, eager):
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


# ---- What a model asks for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [True, False, None])
def test_what_a_module_says_of_itself_does_not_count(said):
    """Where a model asked for a mask: not in a prefill, nor for tokens that come behind a cache, nor beside padding."""
    ids, mask = tokens()
    eager, model = made("llama", "eager"), made("llama", "pydet")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            del module.is_causal
            if said is not None:
                module.is_causal = said
    with torch.no_grad():
        whole = eager(ids).logits
        near(model(ids).logits, whole)
        near(model(ids, attention_mask=mask).logits[mask == 1], eager(ids, attention_mask=mask).logits[mask == 1])
        first = model(ids[:, :5], use_cache=True)
        for cut in (slice(5, 9), slice(9, 10)):
            step = model(ids[:, cut], past_key_values=first.past_key_values, use_cache=True)
            near(step.logits, whole[:, cut])


def test_a_decoder_that_is_called_as_an_encoder_sees_later_tokens():
    ids, mask = tokens()
    eager, model = made("llama", "eager"), made("llama", "pydet")
    with torch.no_grad():
        for more in ({}, {"attention_mask": mask}):
            want = eager(ids, is_causal=False, **more).logits[mask == 1]
            near(model(ids, is_causal=False, **more).logits[mask == 1], want)
            assert not torch.allclose(want, eager(ids, **more).logits[mask == 1], atol=1e-2)


@pytest.mark.parametrize("said", [True, None])
def test_an_encoder_that_does_not_say_that_it_sees_all(said):
    """By sdpa it would be causal, by eager attention not."""
    ids, mask = tokens()
    model, eager = (made("bert", name, "AutoModelForMaskedLM", is_decoder=False) for name in ("pydet", "eager"))
    with torch.no_grad():
        near(model(ids).logits, eager(ids).logits)
        for module in model.modules():
            if type(module).__name__ == "BertSelfAttention":
                module.__dict__.pop("is_causal")
                if said:
                    module.is_causal = True
        what = "is_causal True where its model asked for a mask" if said else "no is_causal"
        with pytest.raises(pydet.Error, match=f"^attention: BertSelfAttention has no mask and {what}"):
            model(ids)
        near(model(ids[:, :1]).logits, eager(ids[:, :1]).logits)
        near(model(ids, attention_mask=mask).logits[mask == 1], eager(ids, attention_mask=mask).logits[mask == 1])


def test_a_decoder_that_does_not_ask_for_a_mask():
    """Moshi's for the codes of a moment in 5.24, and its other one in 5.17: its modules say that it is causal."""
    attend, module = transformers.AttentionInterface()["pydet"], torch.nn.Identity()
    module.is_causal, module.config = True, transformers.BertConfig()
    q = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(1))
    same(attend(module, q, q, q, None)[0], attend(module, q, q, q, say(Causal, (1, 1, 12, 12), "cpu"))[0])
    same(attend(module, q[:, :, 7:], q, q, None)[0], attend(module, q, q, q, None)[0][:, 7:])


def test_a_window_that_is_not_in_the_mask():
    """Some models hand it to their attention for flash attention alone, and eager attention and sdpa leave it out."""
    attend, module = transformers.AttentionInterface()["pydet"], torch.nn.Identity()
    q = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(1))
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    same(*[attend(module, q, q, q, causal, sliding_window=x)[0] for x in (None, 5)])
    same(*[attend(module, q, q, q, say(Causal, (1, 1, 12, 12), "cpu"), sliding_window=x)[0] for x in (None, 5)])
    last = q[:, :, -1:]
    same(*[attend(module, last, q, q, say(All, (1, 1, 1, 12), "cpu"), sliding_window=x)[0] for x in (None, 5)])
    for module.is_causal in (False, True):
        same(*[attend(module, q, q, q, None, sliding_window=x)[0] for x in (None, 12)])
        for queries in (q, last):
            with pytest.raises(pydet.Error, match=r"^attention: Identity has no mask and sliding_window 5, by which"):
                attend(module, queries, q, q, None, sliding_window=5)


# ---- Code that does arithmetic with a mask ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["big_bird", "bloom", "gpt_neox_japanese", "imagegpt", "megatron-bert", "mvp", "rembert", "roformer"]
)
def test_code_that_adds_its_mask(family):
    """Under any name of an attention, which such code does not ask for: what eager attention computes, bit for bit."""
    ids, mask = tokens()
    more = {"auto": "AutoModel"} if family == "imagegpt" else {}
    eager, model = made(family, "eager", **more), made(family, "pydet", **more)
    with torch.no_grad():
        for given_mask in ({}, {"attention_mask": mask}):
            same(model(ids, **given_mask)[0], eager(ids, **given_mask)[0])


@pytest.mark.parametrize("side", [slice(0, 4), slice(8, 12)])
def test_an_encoder_of_both_kinds(side):
    """BigBird-Pegasus: its encoder adds a mask, and its decoder asks for its attention."""
    ids, mask = tokens()[0], torch.ones(2, 12, dtype=torch.long)
    mask[1, side] = 0
    eager, model = (made("bigbird_pegasus", "eager", "AutoModelForSeq2SeqLM", d_model=32) for _ in range(2))
    give_attention(model)
    with torch.no_grad():
        for more in ({}, {"attention_mask": mask}):
            got = model(ids, decoder_input_ids=ids[:, :6], **more).logits
            near(got, eager(ids, decoder_input_ids=ids[:, :6], **more).logits)


@pytest.mark.parametrize("family, name", [("mpt", "to"), ("longformer", "__setitem__")])
def test_code_whose_meaning_is_not_known_is_refused(family, name):
    """MPT makes a bool mask of its own of what it takes to be added to scores; Longformer writes into it."""
    auto, more = ("AutoModelForMaskedLM", {}) if family == "longformer" else ("AutoModelForCausalLM", {"d_model": 32})
    model = made(family, "pydet", auto, n_heads=4, n_layers=2, **more)
    with pytest.raises(pydet.Error, match=f"^attention: code of the model calls {name} on its mask, which is bool"):
        model(tokens()[0])


# ---- The mask itself -------------------------------------------------------------------------------------------------


def masks():
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None].expand(2, 1, 5, 5)
    padded = causal.clone()
    padded[1, :, :, 0] = False
    one = torch.ones(2, 1, 1, 5, dtype=torch.bool).expand(2, 1, 5, 5)
    return [(say(Causal, (2, 1, 5, 5), "cpu"), causal), (given(padded), padded), (say(All, (2, 1, 5, 5), "cpu"), one)]


@pytest.mark.parametrize("mask, elements", masks(), ids=["causal", "given", "all"])
def test_a_mask_is_its_elements(mask, elements):
    assert isinstance(mask, torch.Tensor) and mask.shape == elements.shape and mask.dtype == torch.bool
    assert mask.untyped_storage().nbytes() == 1 and torch.equal(elements_of(mask), elements)
    scores = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    for use in (
        lambda x: x[:, :, 1:3, :4],
        lambda x: x[0, :, 1:],
        lambda x: torch.cat([x, x], -1),
        lambda x: x.transpose(2, 3).clone(),
        lambda x: x.mT,
        lambda x: x.data,
        lambda x: x.split(2, -1)[1],
        lambda x: copy.deepcopy(x),
    ):
        assert type(use(mask)) is Given and torch.equal(elements_of(use(mask)), use(elements))
    for use in (
        lambda x: ~x,
        lambda x: torch.all(~x, -1),
        lambda x: x.expand(2, 4, 5, 5) & (scores > 0),
        lambda x: (scores > 0) | x,
        lambda x: torch.where(x, scores, -1.0),
        lambda x: scores.masked_fill(~x, -torch.inf),
        lambda x: scores[x.expand(2, 4, 5, 5)],
        lambda x: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=x),
    ):
        assert type(use(mask)) is torch.Tensor and torch.equal(use(mask), use(elements))
    for kept in (mask.detach(), mask.to("cpu"), mask.to(device="cpu", non_blocking=True)):
        assert type(kept) is type(mask) and torch.equal(elements_of(kept), elements)
    assert mask.tolist() == elements.tolist()
    for kind in (torch.float32, torch.bfloat16):
        added = torch.zeros(elements.shape, dtype=kind).masked_fill(~elements, torch.finfo(kind).min)
        x = scores.to(kind)
        for use in (
            lambda s, m: s + m,
            lambda s, m: m + s,
            lambda s, m: torch.add(s, m),
            lambda s, m: s.clone().add_(m),
        ):
            same(use(x, mask), x + added)


@pytest.mark.parametrize("mask, elements", masks(), ids=["causal", "given", "all"])
def test_what_may_be_meant_for_another_mask_is_refused(mask, elements):
    scores = torch.ones(2, 4, 5, 5)

    def write(x):
        x[0] = True

    for use in (
        lambda x: x == 0,
        lambda x: x < 0,
        lambda x: scores * x,
        lambda x: scores - x,
        lambda x: 1.0 - x,
        lambda x: x + 1.0,
        lambda x: torch.add(scores, x, alpha=2),
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(scores),
        lambda x: x.bool(),
        lambda x: x.to(dtype=torch.bool),
        lambda x: x.masked_fill(elements, -torch.inf),
        lambda x: torch.where(elements, x, -1.0),
        lambda x: torch.baddbmm(x[:, 0], scores[:, 0], scores[:, 0]),
        lambda x: x.all(),
        lambda x: torch.zeros_like(x),
        lambda x: x.logical_not_(),
        lambda x: x.data_ptr(),
        write,
    ):
        with pytest.raises(pydet.Error, match=r"^attention: code of the model calls \w+ on its mask, which is bool"):
            use(mask)
    assert torch.equal(elements_of(mask), elements)


@pytest.mark.parametrize("part", ["model", "layers"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox_japanese"])
def test_compiled(family, part):
    """A mask that is made in the graph, and one that comes into it, at more lengths than one."""
    ids, mask = tokens()
    model, want = (made(family, "pydet", num_hidden_layers=1) for _ in range(2))
    torch._dynamo.reset()
    if part == "model":
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        call, layers = model, model.base_model.layers
        for i, layer in enumerate(layers):
            layers[i] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for last in (12, 9):
            for more in ({}, {"attention_mask": mask[:, :last]}):
                same(call(ids[:, :last], use_cache=False, **more)[0], want(ids[:, :last], use_cache=False, **more)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    ids, mask = tokens()
    model = made("llama", "pydet").train()
    for more in ({}, {"attention_mask": mask}):
        found = []
        for checkpoint in (False, True):
            if checkpoint:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.zero_grad()
            model(ids, use_cache=False, **more)[0].square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        model.gradient_checkpointing_disable()
        for got, want in zip(*found, strict=True):
            same(got, want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sums_that_accumulate_in_a_compiled_model(backend):
    """Linear layers leave the graph, so that masks come into graphs and pydet's operators."""
    ids, mask = tokens()
    model, want = (made("llama", "pydet", num_hidden_layers=1) for _ in range(2))
    torch._dynamo.reset()
    for each, call in ((model, torch.compile(model, backend=backend)), (want, want)):
        pt.convert(each)
        pt.accumulate_gradients(each)
        call(ids, attention_mask=mask, use_cache=False)[0].square().sum().backward()
    for got, parameter in zip(model.parameters(), want.parameters(), strict=True):
        same(got.main_grad, parameter.main_grad)


@pytest.mark.parametrize("family, padded", [("llama", False), ("gpt_neox_japanese", True)])
def test_exported(family, padded):
    """Of tensors without memory, where a model asks for attention and where its code adds the mask."""
    ids, mask = tokens()
    model, how = made(family, "pydet", num_hidden_layers=1), {"use_cache": False, "return_dict": False}
    how |= {"attention_mask": mask} if padded else {}
    found = torch.export.export(model, (ids,), how, strict=False)
    same(found.module()(ids, **how)[0], model(ids, **how)[0])
