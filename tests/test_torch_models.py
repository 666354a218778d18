"""pydet.torch with Transformers, PEFT, Accelerate and TRL: tiny models on the CPU, their logits compared bit by bit."""

import importlib
import importlib.util
import itertools
import os
import warnings

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402

TOKENS, VOCABULARY = 24, 64
SIZES = {  # multiples of 32: see one_thread()
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 7}
LAYERS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
QWEN_MOE = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
DEEPSEEK = {"n_routed_experts": 32, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
DEEPSEEK |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 8}
DEEPSEEK |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 12, "num_key_value_heads": 4}
MODELS = {  # name: its configuration's class, and what it wants beside SIZES
    "Llama": ("LlamaConfig", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Gemma3": ("Gemma3TextConfig", LAYERS),
    "Gemma2": ("Gemma2Config", {**WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "Mistral": ("MistralConfig", WINDOW),
    "DeepSeek-V3": ("DeepseekV3Config", DEEPSEEK),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3MoeConfig", QWEN_MOE),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 4, **LAYERS}),
    "GPT-2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 4096}),
}
ERNIE = {"moe_num_experts": 32, "moe_k": 4, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
MORE_EXPERTS = {  # whose routers or gates are of another kind: test_torch_experts.py
    "Qwen2-MoE": ("Qwen2MoeConfig", {**QWEN_MOE, "shared_expert_intermediate_size": 64}),
    "MiniMax-M2": ("MiniMaxM2Config", {"num_local_experts": 32, "num_experts_per_tok": 4}),
    "Ernie-4.5": ("Ernie4_5_MoeConfig", {**ERNIE, "moe_layer_start_index": 0}),
}


@pytest.fixture(autouse=True)
def one_thread():
    """PyTorch's own silu, sigmoid and gelu on the CPU, where code calls them: an element has other bits in the
    body of a thread's share, which is done in vectors of 32, than in its rest. With one thread and rows of multiples of
    32 there is no rest. Those that are modules: test_torch_activation.py."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(transformers, name="Llama"):
    """A model whose attention does more than average: its matrices are larger than at the start of training."""
    config, more = {**MODELS, **MORE_EXPERTS}[name]
    torch.manual_seed(0)
    sizes = {k: SIZES[k] for k in ("vocab_size", "bos_token_id", "eos_token_id")} if name == "GPT-2" else SIZES
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**sizes, **more})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens(batch=64, length=TOKENS):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def differing(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype == torch.float32 and bool(b.isfinite().all())
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())


def decoded(model, rows, prefill, cache=None):
    """Logits with a cache: the first tokens at once, the others one by one."""
    logits, first = [], 0
    for last in range(prefill, rows.shape[1] + 1):
        result = model(rows[:, first:last], past_key_values=cache, use_cache=True)
        logits.append(result.logits)
        first, cache = last, result.past_key_values
    return torch.cat(logits, 1)


def padded(model, rows, side, by=5):
    """The logits of rows[:1] in a batch of three lengths, padded on a side."""
    width = rows.shape[1] + by
    ids, mask = (torch.zeros(3, width, dtype=torch.long) for _ in range(2))
    for i, length in enumerate((rows.shape[1], width, rows.shape[1] - 3)):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        ids[i, place], mask[i, place] = rows[i].repeat(2)[:length], 1
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    return logits[:1, by:] if side == "left" else logits[:1, : rows.shape[1]]


def differences(model):
    """How many logits of one sequence differ, by what it is computed beside, from those of a prefill of it alone."""
    rows = tokens()
    with torch.no_grad(), pt.override_aten():
        want = model(rows[:1]).logits
        found = {f"batch of {n}": differing(model(rows[:n]).logits[:1], want) for n in (3, 17, 64)}
        found |= {f"padded on the {side}": differing(padded(model, rows, side), want) for side in ("left", "right")}
        found |= {f"decoded after {n}": differing(decoded(model, rows[:1], n), want) for n in (1, 10)}
        found["decoded in a batch"] = differing(decoded(model, rows[:3], 20)[:1], want)
    return found


ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
WHISPER |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 30}
WHISPER |= {"vocab_size": VOCABULARY, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
WITH_LAYER_NORM = {  # name: configuration, its sizes, what goes in for a batch, what is left and is no norm
    "Bert": (ENCODER | {"vocab_size": VOCABULARY}, lambda n: {"input_ids": tokens(n)}, set()),
    "ViT": (
        ENCODER | {"image_size": 16, "patch_size": 4},
        lambda n: {"pixel_values": torch.linspace(-1, 1, n * 768).sin().view(n, 3, 16, 16)},
        {"ViTEmbeddings"},
    ),
    "Whisper": (
        WHISPER,
        lambda n: {
            "input_features": torch.linspace(-1, 1, n * 480).sin().view(n, 8, 60),
            "decoder_input_ids": tokens(n),
        },
        set(),
    ),
}


@pytest.mark.parametrize("name", WITH_LAYER_NORM)
def test_layer_norms_are_converted(transformers, name):
    """The norms of BERT, ViT and Whisper have the same values as PyTorch's, and a row's do not depend on the batch."""
    sizes, inputs, left = WITH_LAYER_NORM[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    norms = [m for m in model.modules() if type(m) is torch.nn.LayerNorm]
    with torch.no_grad():
        want = model(**inputs(3)).last_hidden_state
        report = pt.convert(model)
        assert {reason.partition(" ")[0] for reason in report.left.values()} == left
        assert len(norms) >= 5 and {type(m) for m in norms} == {pt.LayerNorm}
        torch.testing.assert_close(model(**inputs(3)).last_hidden_state, want, rtol=1e-4, atol=1e-4)
        x = want.flatten(0, 1)
        assert differing(norms[0](x)[5:6], norms[0](x[5:6])) == 0


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_the_batch(transformers, name):
    model = build(transformers, name)
    model.set_attn_implementation("pydet")
    report = pt.convert(model)
    assert not report.attention and report.swapped and not report.left
    assert set(differences(model).values()) == {0}, differences(model)


def test_of_the_default_attention_they_do(transformers):
    """The negative control."""
    model = build(transformers)
    assert set(pt.convert(model).attention.values()) == {"LlamaAttention by 'sdpa'"}
    found = differences(model)
    assert found["decoded after 1"] > 100 and found["padded on the left"] > 100, found


def test_static_caches_and_long_contexts(transformers):
    model = build(transformers)
    model.set_attn_implementation("pydet")
    pt.convert(model, strict=True)
    model.model.layers = model.model.layers[:1]
    for length, room in ((40, 50), (2060, 2100)):
        rows = tokens(1, length)
        with torch.no_grad():
            want = model(rows).logits[:, -3:]
            static = transformers.StaticCache(config=model.config, max_cache_len=room)
            for cache in (None, static):
                assert differing(decoded(model, rows, length - 2, cache)[:, -3:], want) == 0


def in_parts(model, rows, ends, cache=None):
    """Logits of several tokens at a time behind a cache: a prefill in chunks, or drafts that are verified."""
    logits = []
    for first, last in itertools.pairwise((0, *ends, rows.shape[1])):
        result = model(rows[:, first:last], past_key_values=cache, use_cache=True)
        logits.append(result.logits)
        cache = result.past_key_values
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Gemma2", "Mistral", "gpt-oss"])
def test_chunks_behind_a_cache(transformers, name):
    """The cache grows or is static; where a layer has a window, both keep its keys alone. A part may be longer."""
    model, rows = build(transformers, name), tokens(1)
    with torch.no_grad(), pt.override_aten():
        for implementation in ("sdpa", "pydet")[name in ("Gemma2", "gpt-oss") :]:  # sdpa has no softcap, no sinks
            model.set_attn_implementation(implementation)
            pt.convert(model)
            want, found = model(rows).logits, 0
            for ends in ((1, 3, 12, 13), (7, 8, 16), (2, 20)):
                for static in (False, True):
                    cache = transformers.StaticCache(config=model.config, max_cache_len=40) if static else None
                    found += differing(in_parts(model, rows, ends, cache), want)
            assert (found == 0) == (implementation == "pydet"), (implementation, found)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral", "OLMoE"])
def test_a_causal_prefill_without_padding_makes_no_mask(transformers, monkeypatch, name):
    """Nor is one of OLMoE's window, which is none of its mask; a padding of no tokens makes one, of the same bits."""
    module = importlib.import_module("pydet.torch.attention")
    seen, ours = [], module.attention

    def recorded(q, k, v, allowed, **options):
        seen.append((allowed is None, options["causal"]))
        return ours(q, k, v, allowed, **options)

    monkeypatch.setattr(module, "attention", recorded)
    monkeypatch.setitem(MODELS, "OLMoE", ("OlmoeConfig", {**WINDOW, "num_experts": 4, "num_experts_per_tok": 2}))
    model, rows = build(transformers, name), tokens(2)
    model.set_attn_implementation("pydet")
    pt.convert(model)
    with torch.no_grad():
        plain = model(rows).logits
        layers = {"Mistral": [False, False], "Gemma3": [False, True]}.get(name, [True, True])
        assert seen == [(x, x) for x in layers]
        seen.clear()
        assert differing(model(rows, attention_mask=torch.ones_like(rows)).logits, plain) == 0
    assert seen == [(False, False)] * 2


def test_training_with_the_attention(transformers):
    rows, gradients = tokens(3), []
    for name in ("sdpa", "pydet"):
        model = build(transformers).train()
        model.set_attn_implementation(name)
        pt.convert(model)
        model(rows, labels=rows).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_compiled_gradients(transformers):
    """Inductor's in fp32, from given gradients of the logits, on one thread: on several it adds the embedding's by
    atomics. Its gradient of PyTorch's loss is by another formula."""
    model = build(transformers)
    model.set_attn_implementation("pydet")
    pt.convert(model)
    del model.model.layers[1]
    torch._dynamo.reset()
    compiled, found, ids = torch.compile(model, options={"emulate_precision_casts": True}), [], tokens(3)
    dy = torch.randn(*ids.shape, VOCABULARY, generator=torch.Generator().manual_seed(2))
    for call in (compiled, model):
        model.zero_grad()
        call(ids, use_cache=False).logits.backward(dy)
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert len(found[0]) == 12
    assert [name for name, x in found[0].items() if differing(x, found[1][name])] == []


def test_what_the_attention_refuses(transformers):
    model = build(transformers).train()
    model.set_attn_implementation("pydet")
    model.config.attention_dropout = 0.1
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(pydet.Error, match=r"attention: dropout is 0.1, want 0"):
        model(tokens(1))
    forward = transformers.AttentionInterface()["pydet"]
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(pydet.Error, match=r"the model has indices, which pydet's attention does not take"):
        forward(model, q, q, q, None, indices=q)
    assert forward(model, q, q, q, None, is_causal=True)[0].shape == (1, 3, 2, 4)


# ---- PEFT, Accelerate, TRL -------------------------------------------------------------------------------------------


@pytest.fixture
def peft(need):
    need(importlib.util.find_spec("peft"), "models", "no PEFT here")
    import peft

    return peft


def adapted(peft, model):
    targets = ["q_proj", "v_proj", "up_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def test_adapters(transformers, peft):
    late = build(transformers)
    late.set_attn_implementation("pydet")
    pt.convert(late)
    with pytest.warns(UserWarning, match=r"a Linear was put around a converted layer.*call convert\(model\) again"):
        late = adapted(peft, late)
    report = pt.convert(late, strict=True)
    assert len(report.swapped) == 12 and all("lora_" in name for name in report.swapped)
    model = build(transformers)
    model.set_attn_implementation("pydet")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = adapted(peft, model)
        report = pt.convert(model, strict=True)
    assert sum("lora_" in name for name in report.swapped) == 12
    model.load_state_dict(late.state_dict())
    rows = tokens()
    want = model(rows[:1]).logits
    assert differing(late(rows[:1]).logits, want) == 0
    assert [differing(model(rows[:n]).logits[:1], want) for n in (3, 17, 64)] == [0, 0, 0]
    want.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 12 and all("lora_" in name for name in trained)
    model.eval()
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(rows[:1]).logits, want, rtol=1e-3, atol=1e-3)


def test_accelerate(transformers, need):
    need(importlib.util.find_spec("accelerate"), "models", "no Accelerate here")
    import accelerate

    rows, cpu = tokens(2), torch.device("cpu")
    late, first, trained = (build(transformers) for _ in range(3))
    want = late(rows).logits
    accelerate.cpu_offload(late, execution_device=cpu)
    late_report, report = pt.convert(late), pt.convert(first)
    assert late_report.swapped == report.swapped and late_report.left == report.left, "the hooks call what it became"
    converted = first(rows).logits
    torch.testing.assert_close(converted, want)
    assert differing(late(rows).logits, converted) == 0
    accelerate.cpu_offload(first, execution_device=cpu)
    assert differing(first(rows).logits, converted) == 0
    accelerator = accelerate.Accelerator(cpu=True)
    pt.convert(trained)
    trained, optimizer = accelerator.prepare(trained, torch.optim.SGD(trained.parameters(), 0.1))
    accelerator.backward(trained(rows, labels=rows).loss)
    optimizer.step()
    assert bool((trained(rows).logits != converted).any())


def tokenizer(transformers):
    import tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.mark.parametrize("method", ["SFT", "GRPO"])
def test_trl(transformers, need, tmp_path, method):
    for package in ("trl", "datasets"):
        need(importlib.util.find_spec(package), "trl", f"no {package} here")
    import datasets
    import trl

    model = build(transformers)
    model.set_attn_implementation("pydet")
    pt.convert(model, strict=True)
    before = model.lm_head.weight.detach().clone()
    options = {"output_dir": str(tmp_path), "max_steps": 2, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    options |= {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": False, "gradient_checkpointing": False}
    if method == "SFT":
        data = datasets.Dataset.from_dict({"text": ["w3 w4 w5 w6 w7", "w8 w9", "w10 w11 w12"] * 4})
        trainer = trl.SFTTrainer(
            model, trl.SFTConfig(**options), train_dataset=data, processing_class=tokenizer(transformers)
        )
    else:
        data = datasets.Dataset.from_dict({"prompt": ["w3 w4 w5", "w8 w9", "w10 w11 w12"] * 4})
        trainer = trl.GRPOTrainer(
            model,
            lambda completions, **more: [float(text.count("w3")) for text in completions],
            trl.GRPOConfig(**options, num_generations=4, max_completion_length=6),
            train_dataset=data,
            processing_class=tokenizer(transformers),
        )
    trainer.train()
    assert type(model.lm_head) is pt.Linear
    assert method == "GRPO" or bool((model.lm_head.weight != before).any())
