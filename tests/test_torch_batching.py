"""Transformers' continuous batching: the log-probabilities of its sampler are a trainer's, whatever shared the batch.

A trainer's forward is dense, of one sequence. Each way of the engine is counted while it is gone: prompts cut into
chunks, prefixes found in the cache, requests that make room (to the host, or computed again), sequences that fork.
"""

import collections
import copy
import gc
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from torch_bits import same  # noqa: E402

PAGE, NEW, VOCABULARY, TEMPERATURE = 8, 9, 96, 0.9
LENGTHS = (1, 7, 8, 9, 17, 24)  # across the end of a page
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
WINDOW = {"sliding_window": 8}
FAMILIES = {
    "Llama": {},
    "Llama of odd width": {"head_dim": 12},
    "Mistral": WINDOW,
    "Gemma2": WINDOW,
    "GptOss": WINDOW | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(autouse=True)
def batching(need):
    try:
        import pydet.torch.manager  # noqa: F401
    except ImportError as problem:
        need(False, "models", f"no Transformers 5.24 or later here ({problem})")
    gc.freeze()  # a manager that stops has Python look for garbage among all that was imported, 0.2 s each time
    yield
    gc.unfreeze()


def model_of(family="Llama", dtype=torch.float32, stock=False, **more):
    import transformers

    name, sizes = family.split()[0], SIZES | FAMILIES[family] | more
    config = {"Gemma2": transformers.Gemma2Config}.get(name) or getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config(**sizes)).eval().to(dtype)
    with torch.no_grad():  # as random weights are, most tokens have one probability
        model.get_output_embeddings().weight.mul_(20)
    if not stock:
        pt.register_attention()
        model.set_attn_implementation("pydet")
        pt.convert(model)
        pt.continuous_batching(model)
    return model


def prompts_of(lengths=LENGTHS, prefix=()):
    draw = torch.Generator().manual_seed(3)
    tails = [torch.randint(2, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]
    return [[*prefix, *tail] for tail in tails]


def settings(**more):
    from transformers import ContinuousBatchingConfig

    given = {"seed": 7, "return_logprobs": True, "page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 256}
    return ContinuousBatchingConfig(**{**given, **more})


def generation(**more):
    from transformers import GenerationConfig

    given = {"do_sample": True, "temperature": TEMPERATURE, "max_new_tokens": NEW, "eos_token_id": -1}
    return GenerationConfig(**{**given, **more})


def generate(model, prompts, sampling=None, **more):
    """What came of each prompt, in their order."""
    sampling = generation() if sampling is None else sampling
    made = model.generate_batch(prompts, generation_config=sampling, continuous_batching_config=settings(**more))
    found = list(made.values())
    assert [x.error for x in found] == [None] * len(found) and len(found) == len(prompts) * (
        sampling.num_return_sequences or 1
    )
    return found


@torch.no_grad()
def trained(model, found, temperature=TEMPERATURE):
    """The log-probabilities of a sequence as a trainer has them: of one dense forward."""
    ids = torch.tensor([found.prompt_ids + found.generated_tokens])
    start = len(found.prompt_ids)
    logits = model(ids).logits[0, start - 1 : -1].float() / torch.tensor(temperature)
    return pt.log_prob(logits, ids[0, start:])


def differing(model, found, temperature=TEMPERATURE):
    """How many log-probabilities of the sampler are not the trainer's, and of how many."""
    theirs = [torch.tensor(x.logprobs) for x in found]
    assert all(len(x) == len(y.generated_tokens) for x, y in zip(theirs, found, strict=True))
    differ = [(x != trained(model, y, temperature)).sum().item() for x, y in zip(theirs, found, strict=True)]
    return sum(differ), sum(map(len, theirs))


def tokens_of(found):
    return [x.generated_tokens for x in found]


@pytest.fixture
def counted(monkeypatch):
    """How often the engine went each of its ways."""
    from transformers.generation.continuous_batching import cache, offloading_manager, requests, scheduler
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

    seen = collections.Counter()

    def count(owner, method, name, of=lambda result, *_: bool(result)):
        theirs = getattr(owner, method)

        def calls(self, *given, **more):
            result = theirs(self, *given, **more)
            seen[name] += int(of(result, self, *given))
            return result

        monkeypatch.setattr(owner, method, calls)

    count(cache.PagedAttentionCache, "search_prefix_match", "prefixes")
    count(cache.PagedAttentionCache, "prepare_fork_request", "forks", lambda result, *_: len(result))
    count(offloading_manager.OffloadingManager, "_offload_to_cpu", "to host", lambda result, *_: len(result))
    count(requests.RequestState, "create_equivalent_initial_request", "computed again")
    count(scheduler.Scheduler, "_schedule_request", "chunks", lambda _, self, state, *__: state.status == 1)
    count(FullAttentionCacheAllocator, "get_cache_for_block_table", "in pages", lambda *_: 1)
    return seen


WAYS = {
    "whole": ({}, "in pages"),
    "gathered": ({"max_blocks_per_request": 0}, ""),
    "chunked": ({"max_batch_tokens": 8}, "chunks"),
    "prefill first": ({"max_batch_tokens": 24, "scheduler_type": "prefill_first"}, "chunks"),
    "one at a time": ({"max_requests_per_batch": 1}, "in pages"),
    "no room": ({"num_blocks": 10}, "computed again"),
    "no room, to the host": ({"num_blocks": 10, "cpu_offload_space": 0.01}, "to host"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sampler_is_trainer(counted, dtype, monkeypatch):
    """0 log-probabilities differ, and no token, whatever way the engine goes."""
    if not torch.cuda.is_available():  # the host's copy of a cache is pinned, which only a GPU's driver does
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **more: empty(*sizes, **more))
    model, prompts, first = model_of(dtype=dtype), prompts_of(), None
    for name, (more, way) in WAYS.items():
        counted.clear()
        found = generate(model, prompts, **more)
        assert not way or counted[way], (name, counted)
        assert differing(model, found) == (0, NEW * len(prompts)), name
        first = first or tokens_of(found)
        assert tokens_of(found) == first, name
    assert len({tuple(x) for x in first}) == len(prompts) and len({y for x in first for y in x}) > 20
    assert counted["in pages"]


def test_prefixes_and_forks(counted):
    """Prompts that begin alike, and several sequences of a prompt."""
    model, prompts = model_of(), prompts_of(prefix=range(2, 2 + 2 * PAGE))
    alone = [generate(model, [x], allow_block_sharing=False)[0] for x in prompts]
    counted.clear()
    for chunk in (256, 40):
        found = generate(model, prompts, max_batch_tokens=chunk)
        assert differing(model, found) == (0, NEW * len(prompts))
    assert counted["prefixes"]
    for x, y in zip(found, alone, strict=True):  # of other names, so other noise: the first is nobody's but its own
        assert (x.generated_tokens == y.generated_tokens) == (x.request_id == y.request_id)
    several = generate(model, prompts, generation(num_return_sequences=3))
    assert counted["forks"] == 2 * len(prompts)
    assert differing(model, several) == (0, 3 * NEW * len(prompts))
    assert len({tuple(x) for x in tokens_of(several)}) > 2 * len(prompts)
    fewer = generate(model, prompts, generation(num_return_sequences=3), num_blocks=12)
    assert tokens_of(fewer) == tokens_of(several)


def test_order_of_arrival_and_seeds():
    """Requests that come one by one, all at once or backward have the tokens of their own seed."""
    model, prompts = model_of(), prompts_of()

    def served(order, pause, **more):
        results = {}
        context = model.continuous_batching_context_manager(
            generation_config=generation(), continuous_batching_config=settings(**more)
        )
        with context as manager:
            for i in order:
                manager.add_request(prompts[i], request_id=str(i), seed=100 + i, max_new_tokens=NEW)
                if pause:
                    results[str(i)] = manager.get_result(timeout=30)
            while len(results) < len(prompts):
                result = manager.get_result(timeout=30)
                results[result.request_id] = result
        found = [results[str(i)] for i in range(len(prompts))]
        assert differing(model, found) == (0, NEW * len(prompts))
        return tokens_of(found)

    forward = served(range(len(prompts)), pause=False)
    assert served(reversed(range(len(prompts))), pause=False, seed=8) == forward
    assert served(range(len(prompts)), pause=True, max_batch_tokens=8) == forward
    assert tokens_of(generate(model, prompts)) != forward
    assert tokens_of(generate(model, prompts, seed=9)) != tokens_of(generate(model, prompts))
    torch.manual_seed(1)
    drawn = [tokens_of(generate(model, prompts, seed=None)) for _ in range(2)]
    torch.manual_seed(1)
    assert drawn[0] != drawn[1] and drawn == [tokens_of(generate(model, prompts, seed=None)) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", [x for x in FAMILIES if x != "Llama"])
def test_families(family, dtype):
    """Windows, whose queries are counted from their first key; soft caps, sinks, experts; widths that are padded."""
    model, prompts = model_of(family, dtype), prompts_of((1, 7, 8, 9, 40))
    for more in ({}, {"max_batch_tokens": 8}):
        assert differing(model, generate(model, prompts, **more)) == (0, NEW * len(prompts)), more


def test_stock_differs():
    """The negative controls: Transformers' own attention and sampler, and its attention beneath pydet's modules."""
    prompts = prompts_of()
    model = model_of(stock=True)
    assert differing(model, generate(model, prompts))[0] > NEW
    pt.convert(model)
    assert differing(model, generate(model, prompts))[0] > NEW


def test_options_of_requests():
    """Greedy tokens, filters, a request's own; the log-probability is that before the filters."""
    model, prompts = model_of(), prompts_of()
    greedy = generate(model, prompts, generation(do_sample=False, temperature=None))
    assert differing(model, greedy, 1.0) == (0, NEW * len(prompts))
    for x in greedy:
        ids = torch.tensor([x.prompt_ids + x.generated_tokens])
        with torch.no_grad():
            best = model(ids).logits[0, len(x.prompt_ids) - 1 : -1].argmax(-1)
        assert best.tolist() == x.generated_tokens
    for more in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 1}):
        found = generate(model, prompts, generation(**more))
        assert differing(model, found) == (0, NEW * len(prompts)), more
        if more == {"top_k": 1}:
            assert tokens_of(found) == tokens_of(greedy)
    context = model.continuous_batching_context_manager(
        generation_config=generation(), continuous_batching_config=settings()
    )
    with context as manager:
        manager.add_request(prompts[3], temperature=0.5, top_k=1, seed=1)
        own = manager.get_result(timeout=30)
        for wrong, sentence in (
            ({"top_q": 1}, "a request has top_q, want of temperature, top_k, top_p, min_p, seed"),
            ({"temperature": 0.0}, "temperature is 0.0, want a number above 0"),
            ({"top_p": 1.5}, "top_p is 1.5, want a number from 0 to 1"),
            ({"seed": True}, "seed is True, want a number of 64 bits"),
        ):
            manager.add_request(prompts[0], **wrong)
            assert manager.get_result(timeout=30).error == f"continuous_batching: {sentence}"
    assert own.generated_tokens == greedy[3].generated_tokens
    assert differing(model, [own], 0.5) == (0, NEW)


@pytest.mark.parametrize("stock", [False, True], ids=["pydet", "stock"])
def test_a_kept_manager_forgets_prefixes(counted, stock):
    """After a step of training a cached prefix is the old weights'. Transformers' own manager keeps it: the control."""
    model, prompts = model_of(stock=stock), prompts_of((3, 5), prefix=range(2, 2 + 2 * PAGE))
    for step in range(2):
        made = model.generate_batch(
            prompts,
            generation_config=generation(),
            continuous_batching_config=settings(),
            persistent_manager=True,
        )
        found = list(made.values())
        apart = max((torch.tensor(x.logprobs) - trained(model, x)).abs().max().item() for x in found)
        if stock:
            assert (apart > 1e-2) == (step == 1)
        else:
            assert apart == 0 and differing(model, found) == (0, 2 * NEW)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
    model.destroy_cached_continuous_batching_manager()


def test_copies_and_adapters(need):
    """A copied model's is its own; peft's model has that of the one within."""
    import importlib.util

    prompts = prompts_of((3, 17))
    model = model_of()
    twin = copy.deepcopy(model)
    assert twin.init_continuous_batching.__self__ is twin
    with torch.no_grad():
        twin.get_output_embeddings().weight.mul_(0.5)
    assert differing(twin, generate(twin, prompts)) == (0, 2 * NEW)
    assert differing(model, generate(model, prompts)) == (0, 2 * NEW)
    need(importlib.util.find_spec("peft"), "models", "no peft here; copies were tested")
    import peft

    adapted = peft.get_peft_model(
        model_of(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    pt.convert(adapted)
    pt.continuous_batching(adapted)
    assert differing(adapted, generate(adapted, prompts)) == (0, 2 * NEW)


def test_what_is_refused(monkeypatch):
    import transformers

    def refuses(sentence, call):
        with pytest.raises(pydet.Error, match=f"^{sentence}") as caught:
            call()
        assert "\n" not in str(caught.value)

    refuses("continuous_batching: model is Linear, want one of", lambda: pt.continuous_batching(torch.nn.Linear(2, 2)))
    stock = model_of(stock=True)
    refuses("continuous_batching: the attention of LlamaForCausalLM is 'sdpa'", lambda: pt.continuous_batching(stock))
    model = model_of()
    pt.continuous_batching(model)  # once more is no more
    model.set_attn_implementation("eager")
    refuses("continuous_batching: the attention of LlamaForCausalLM is 'eager'", lambda: generate(model, [[2]]))
    model.set_attn_implementation("pydet")
    for more, got in (
        ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor"),
        ({"suppress_tokens": [3]}, "SuppressTokensLogitsProcessor"),
        ({"typical_p": 0.5}, "TypicalLogitsWarper"),
        ({"min_new_tokens": 2}, "min_new_tokens=2"),
        ({"num_beams": 3}, "num_beams=3"),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6"),
        ({"bad_words_ids": [[3]]}, r"bad_words_ids=\[\[3\]\]"),
    ):
        sampling = generation(**more)
        refuses(
            f"continuous_batching: the generation config asks for {got}", lambda s=sampling: generate(model, [[2]], s)
        )
    compiled = "continuous_batching: varlen_compile_config is set, want None and default_compile_level 0"
    refuses(compiled, lambda: generate(model, [[2]], varlen_compile_config={}))
    refuses(compiled, lambda: generate(model, [[2]], default_compile_level=1))
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
    broken = model.generate_batch([[2]], generation_config=generation(), continuous_batching_config=settings())
    assert broken["req_0"].error == "continuous_batching: the logits of req_0 hold a NaN or inf, want numbers"
    kept = model_of()
    kept._cached_continuous_batching_manager = object()
    refuses("continuous_batching: the model has kept a object of before", lambda: generate(kept, [[2]]))
    assert transformers.AttentionInterface()["pydet"]


def test_attention_refuses_what_is_no_batch():
    import transformers

    attention = transformers.AttentionInterface()
    pt.register_attention()
    module, x = a_layer(), torch.randn(1, 2, 3, 8)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    given = {"read_index": [], "write_index": [], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_k": 3}
    call = lambda **more: attention["pydet"](module, x, x, x, more.pop("mask", None), **{**given, **more})
    same(call()[0], pt.attention(x, x, x, scale=8**-0.5, causal=True).transpose(1, 2).contiguous())
    same(call(sliding_window=2)[0], attention["pydet"](module, x, x, x, None, is_causal=True, sliding_window=2)[0])
    for more, sentence in (
        ({"cu_seq_lens_k": {"full_attention": ends}}, "continuous batching has q is .*, cu_seq_lens_k is dict, want a"),
        ({"cu_seq_lens_q": None}, "continuous batching has q is"),
        ({"mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)}, "continuous batching has a mask, want causal"),
        ({"is_causal": False}, "continuous batching has a mask, want causal"),
        ({"position_bias": x}, "continuous batching has a position_bias, want causal attention without one"),
        ({"indices": x}, "the model has indices, which pydet's attention does not take"),
        ({"sliding_window": 0}, "sliding_window is 0, want a positive number of keys"),
    ):
        with pytest.raises(pydet.Error, match=f"^attention: {sentence}"):
            call(**more)


def a_layer():
    layer = torch.nn.Identity()
    layer.is_causal = True
    return layer
