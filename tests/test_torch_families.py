"""pydet's attention in every decoder of Transformers that can be made minute: what eager attention computes, or a
refusal; and no keyword that a model gives its attention falls under the table."""

import ast
import importlib.util
import itertools
import os
import pathlib
import re

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402

if not importlib.util.find_spec("transformers"):
    if "models" in os.environ.get("PYDET_TEST_EXTRAS", ""):
        raise RuntimeError("PYDET_TEST_EXTRAS has models, and Transformers is not here")
    pytest.skip("no Transformers here", allow_module_level=True)

import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from pydet.torch.attention import _WITHOUT_EFFECT  # noqa: E402
from pydet.torch.stock import registered  # noqa: E402
from torch_bits import give_attention  # noqa: E402

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 5},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "is_decoder": True},
    **{"mamba_chunk_size": 16},  # of 256, to which 12 tokens are padded
}
EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "moe_k": 2},
    **{"shared_expert_intermediate_size": 16, "first_k_dense_replace": 1},
}
LATENT = {  # multi-head latent attention, and the indexer of its sparse form, which chooses 4 of 12 keys
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "num_key_value_heads": 4},
}
PARAMETERS = 3_000_000  # more is not minute
REFUSED = {
    **dict.fromkeys(
        ("deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "axk2"), "the model has indices, which"
    ),
}
REQUIRED = {  # of which a minute model must come about
    *(
        "llama",
        "llama4_text",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "mistral",
        "mixtral",
        "deepseek_v3",
        "opt",
    ),
    *("gpt2", "gpt_oss", "gpt_neox", "olmo3", "phi3", "cohere2", "bloom", "minimax_m2"),
    *REFUSED,
    *("doge", "inkling_text"),
}
COMPUTED = {  # of the keywords that modelling code writes; the others are refused where they are not None
    *("query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "s_aux", "softcap"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "sliding_window", "output_attentions", "position_bias"),
}
KNOWN_REFUSED = {"indices", "block_indices", "sinks"}


def tokens():
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def normal(model):
    """With weights by which attention does more than average."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def made(family):
    """A minute model of a family with eager attention, or why there is none."""
    config, problems = transformers.CONFIG_MAPPING[family], []
    for more in ({}, EXPERTS, {**EXPERTS, **LATENT}):
        try:
            settings = config(**{**SIZES, **more})
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(settings)
            if (count := sum(p.numel() for p in model.parameters())) > PARAMETERS:
                problems.append(f"{count} parameters")
                continue
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(settings)
            normal(model).set_attn_implementation("eager")
            with torch.no_grad():
                model(tokens())
            return model
        except Exception as problem:  # a family that wants other settings
            problems.append(f"{type(problem).__name__}: {problem}".splitlines()[0][:120])
    return "; ".join(dict.fromkeys(problems))


@pytest.fixture
def calls(monkeypatch):
    """How often a model asked for its attention by name, by that name; "uniform" gives all keys one weight."""
    transformers.logging.set_verbosity_error()
    pt.register_attention()
    ours, counts = transformers.AttentionInterface()["pydet"], {"pydet": 0, "uniform": 0}

    def counted(name):
        def forward(*arguments, **options):
            counts[name] += 1
            return ours(*arguments, **{**options, **({"scaling": 2.0**-100} if name == "uniform" else {})})

        return forward

    monkeypatch.setitem(registered, "uniform", None)  # which is forgotten at the end
    pt.register_attention("uniform")
    for name in counts:
        transformers.AttentionInterface.register(name, counted(name))
    yield counts
    pt.register_attention()


@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_attention_of_a_family(calls, family):
    """What eager attention computes, also beside padding, with what trainers pass beside the tokens; or a refusal."""
    model = made(family)
    if isinstance(model, str):
        assert family not in REQUIRED, model
        pytest.skip(model)
    ids, mask = tokens(), torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    with torch.no_grad():
        # Beside a mask: without one eager attention of Moshi is not causal in Transformers 5.17.
        whole = model(ids, attention_mask=torch.ones_like(mask)).logits
        want = [whole, model(ids, attention_mask=mask).logits[mask == 1]]
        model.set_attn_implementation("pydet")
        if family in REFUSED:
            with pytest.raises(pydet.Error, match=f"^attention: {re.escape(REFUSED[family])}"):
                model(ids)
            return
        more = {"num_items_in_batch": torch.tensor(24), "output_hidden_states": True}
        got = [model(ids, **more).logits, model(ids, attention_mask=mask).logits[mask == 1]]
        if not calls["pydet"]:
            pytest.skip("it does not ask for its attention by name")
        model.set_attn_implementation("uniform")
        other = model(ids).logits
    for ours, eager in zip(got, want, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
    assert calls["uniform"] and not torch.allclose(other, want[0], rtol=1e-3, atol=1e-3), "this would see no fault"


ENCODERS = {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "pad_token_id": 0},
    **{"num_decoder_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_experts": 2, "decoder_start_token_id": 0},
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "family",
    [
        *("bart", "bigbird_pegasus", "blenderbot", "longt5", "m2m_100", "marian", "mbart", "mt5", "nllb-moe"),
        *("pegasus", "pegasus_x", "plbart", "switch_transformers", "t5", "umt5"),
    ],
)
def test_a_decoder_beside_an_encoder(calls, family):
    """Sees no later token, where nobody gives it a mask either: not every one says of itself that it is causal."""
    torch.manual_seed(0)
    model = normal(transformers.AutoModelForSeq2SeqLM.from_config(transformers.CONFIG_MAPPING[family](**ENCODERS)))
    given = {"input_ids": tokens(), "decoder_input_ids": tokens()[:, :6]}
    masks = {f"{of}attention_mask": torch.ones_like(given[f"{of}input_ids"]) for of in ("", "decoder_")}
    with torch.no_grad():
        give_attention(model, "eager")
        eager = model(**given, **masks).logits
        give_attention(model, "pydet")
        for more in ({}, masks):
            torch.testing.assert_close(model(**given, **more).logits, eager, rtol=1e-3, atol=1e-3)
    assert calls["pydet"]


def test_hand_written_attention_beside_one_that_asks(calls):
    """GIT's own adds its mask to scores, which a bool mask would raise by 1."""
    sizes = {**SIZES, "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}}
    torch.manual_seed(0)
    model = normal(transformers.GitForCausalLM(transformers.GitConfig(**sizes)))
    with torch.no_grad():
        give_attention(model, "eager")
        eager = model(tokens()).logits
        give_attention(model, "pydet")
        torch.testing.assert_close(model(tokens()).logits, eager, rtol=0, atol=0)


def calls_in(text):
    """The calls of an attention interface in a file's text, parsed; a whole file takes long."""
    for match in re.finditer(r"(?<!def )\battention_interface(?=\()", text):
        depth, end = 0, match.end()
        while depth or end == match.end():
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield ast.parse(text[match.start() : end], mode="eval").body


def test_every_keyword_of_the_modelling_code_has_been_decided():
    """A keyword that is new to a release of Transformers is refused at run time; here it is a failure, so that someone
    decides whether the attention computes it, or does not depend on it."""
    folder, written, found = pathlib.Path(transformers.__file__).parent / "models", {}, 0
    for file in sorted(folder.rglob("modeling_*.py")):
        for call in calls_in(file.read_text()):
            found += 1
            written.update((keyword.arg, file.name) for keyword in call.keywords if keyword.arg)
    decided = COMPUTED | KNOWN_REFUSED | _WITHOUT_EFFECT
    assert found > 100 and not {name: file for name, file in written.items() if name not in decided}


def given(**options):
    """The attention as a model calls it, on 12 queries and keys of 4 heads, of which 2 share one."""
    pt.register_attention()
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 12, 8, generator=generator) for heads in (4, 2, 2))
    mask = options.pop("mask", None)
    options.setdefault("is_causal", True)
    return transformers.AttentionInterface()["pydet"](torch.nn.Identity(), q, k, v, mask, **options)[0]


def test_keywords_that_change_the_result_are_refused():
    x = torch.zeros(1)
    assert given().shape == (1, 12, 4, 8)
    for name in (*KNOWN_REFUSED, "head_mask", "cache", "a_keyword_of_tomorrow", "encoder_attention_mask"):
        with pytest.raises(
            pydet.Error, match=f"^attention: the model has {name}, which pydet's attention does not take"
        ):
            given(**{name: x})
        assert torch.equal(given(**{name: None}), given())
    with pytest.raises(pydet.Error, match=r"has a_flag, which"):
        given(a_flag=False)
    with pytest.raises(pydet.Error, match=r"^attention: output_attentions is True.*want False"):
        given(output_attentions=True)
    for window in (0, -1):
        with pytest.raises(
            pydet.Error, match=f"^attention: sliding_window is {window}, want a positive number of keys"
        ):
            given(sliding_window=window)
    for name in _WITHOUT_EFFECT:
        assert torch.equal(given(**{name: torch.ones(1, 12)}), given())


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_is_its_mask(causal):
    """As flash attention counts: to both sides where nothing is causal, in each sequence of a pack."""
    near = torch.ones(12, 12, dtype=torch.bool).triu(-4).tril(0 if causal else 4)[None, None]
    want = given(mask=near, is_causal=causal)
    assert torch.equal(given(sliding_window=5, is_causal=causal), want)
    assert not torch.equal(want, given(sliding_window=12, is_causal=causal))
    assert torch.equal(given(sliding_window=12, is_causal=causal), given(is_causal=causal))
    ends = torch.tensor([0, 7, 12], dtype=torch.int32)
    places = torch.searchsorted(ends, torch.arange(12), right=True)
    packed = given(sliding_window=5, is_causal=causal, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    assert torch.equal(packed, given(mask=near & (places[:, None] == places), is_causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [8, 20])
def test_a_pack_needs_no_mask(causal, width):
    """Without a gradient it is attention_varlen; with one it is under the mask, and has the same bits."""
    pt.register_attention()
    attend, module = transformers.AttentionInterface()["pydet"], torch.nn.Identity()
    q, k, v = (torch.randn(1, heads, 300, width, generator=torch.Generator().manual_seed(2)) for heads in (4, 2, 2))
    for cut, cut_k in (((0, 5, 250, 300), None), ((7, 9, 200), None), ((0, 300), None), ((0, 100, 300), (0, 130, 300))):
        ends, ends_k = (torch.tensor(x, dtype=torch.int32) for x in (cut, cut_k or cut))
        packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends_k, "is_causal": causal, "softcap": 4.0}
        with torch.no_grad():
            want = attend(module, q, k, v, None, s_aux=torch.ones(4), **packed)[0]
        tracked = q.clone().requires_grad_()
        got = attend(module, tracked, k, v, None, s_aux=torch.ones(4), **packed)[0]
        assert torch.equal(got, want)
        got.sum().backward()
        assert bool(tracked.grad.isfinite().all())


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences(causal):
    """By cumulative lengths, each sequence has the bits that it has alone."""
    generator, ends = torch.Generator().manual_seed(2), torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    q, k, v = (torch.randn(1, heads, 12, 8, generator=generator) for heads in (4, 2, 2))
    attend, module = (pt.register_attention(), transformers.AttentionInterface()["pydet"])[1], torch.nn.Identity()
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    together = attend(module, q, k, v, None, is_causal=causal, **packed)[0]
    for first, last in itertools.pairwise(ends):
        alone = attend(module, *(x[:, :, first:last] for x in (q, k, v)), None, is_causal=causal)[0]
        assert torch.equal(together[:, first:last], alone)
    assert not torch.equal(together, attend(module, q, k, v, None, is_causal=causal)[0])
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    if causal:
        assert torch.equal(attend(module, q, k, v, mask, **packed)[0], together)
        added = torch.zeros(1, 1, 12, 12).masked_fill(~mask, -torch.inf)
        assert torch.equal(attend(module, q, k, v, added, **packed)[0], together)
    for wrong in ({"cu_seq_lens_q": ends}, {"cu_seq_lens_k": ends}):
        with pytest.raises(pydet.Error, match=r"^attention: cu_seq_lens_q is .*; want both, a batch of 1, and as many"):
            attend(module, q, k, v, None, is_causal=True, **wrong)
    for rows in (q.expand(2, -1, -1, -1), q[:, :, :3]):
        with pytest.raises(pydet.Error, match=r"want both, a batch of 1, and as many keys as queries"):
            spread = [x.expand(len(rows), -1, -1, -1) for x in (k, v)]
            attend(module, rows, *spread, None, is_causal=True, **packed)


def test_packed_by_positions():
    """A model that is given position_ids alone, as TRL packs: each sequence has the logits that it has alone. (Beside a
    cache Transformers packs by nothing but cumulative lengths.)"""
    pt.register_attention()
    model, ids = made("llama"), tokens()[:1]
    model.set_attn_implementation("pydet")
    pt.convert(model, strict=True)
    places = torch.tensor([[*range(5), *range(7)]])
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    with torch.no_grad(), pt.override_aten():
        alone = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
        for more in ({"use_cache": False}, {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7}):
            packed = model(ids, position_ids=places, **more).logits
            torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
            assert torch.equal(packed.view(torch.int32), alone.view(torch.int32))
