"""The log-probabilities of verl's FSDP engine are those of the converted Transformers model and of rollouts: `make
engines-check` runs this, in an environment that has verl. No other target does."""

import functools
import os
import subprocess
import sys

import models
import pytest
import torch
import transformers

import pydet
import pydet.torch

os.environ["PYDET_VERL"] = "1"
for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29623", "LOCAL_RANK": "0"}.items():
    os.environ.setdefault(name, value)
import verl  # noqa: E402 -- it reads the variable, and finds the plugin by its entry point
import verl_cpu  # noqa: E402, F401
from tensordict import TensorDict  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils import torch_functional  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma")
TYPES = {"fp32": "float32", "bf16": "bfloat16"}


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    yield str(tmp_path_factory.mktemp("engines"))
    torch.distributed.destroy_process_group()


@functools.lru_cache
def configured(path, dtype="fp32", strategy="fsdp2", engine=(), **model):
    given = {"load_tokenizer": False, "enable_gradient_checkpointing": False} | model
    how = {"strategy": strategy, "model_dtype": "fp32", "use_torch_compile": True} | dict(engine)
    how["mixed_precision"] = {"param_dtype": dtype, "reduce_dtype": "fp32"}
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=2)
    return FSDPEngineWithLMHead(
        HFModelConfig(path=path, **given), FSDPEngineConfig(**how), optimizer, CheckpointConfig()
    )


@functools.lru_cache
def actor(path, dtype="fp32", **options):
    engine = configured(path, dtype, **options)
    engine.initialize()
    return engine


def batch(sequences, weights=None, **more):
    def nested(rows):
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    ids = nested(torch.tensor(x) for x in sequences)
    places = nested(torch.arange(len(x)) for x in sequences)
    weights = nested(weights or [torch.ones(len(x)) for x in sequences])
    data = TensorDict({"input_ids": ids, "position_ids": places, "loss_mask": weights}, batch_size=[len(sequences)])
    given = {"temperature": 1.0, "use_dynamic_bsz": False, "pad_token_id": 0, "calculate_entropy": True}
    tu.assign_non_tensor(data, **given | more)
    return data


def log_probs(engine, sequences, **more):
    """Of all tokens after the first, and entropies."""
    with engine.eval_mode():
        found = engine.forward_backward_batch(batch(sequences, **more), None, forward_only=True)["model_output"]
    return [torch.cat([row[:-1] for row in found[x].unbind()]) for x in ("log_probs", "entropy")]


def wanted(path, dtype, sequences, temperature=1.0):
    model, rows = models.converted(path, TYPES[dtype]), []
    for ids in map(torch.tensor, sequences):
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].float() / torch.tensor(temperature)
        rows.append(pydet.torch.log_prob(logits, ids[1:]))
    return torch.cat(rows)


# ---- Log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities(tmp, name, dtype):
    path, sequences = models.folder(name, tmp), models.prompts()
    engine, seen = actor(path, dtype), []
    for rows in (4, 2, 1):
        for packed in (True, False):
            more = {"use_remove_padding": packed, "micro_batch_size_per_gpu": rows}
            seen.append(log_probs(engine, sequences, **more))
    want = wanted(path, dtype, sequences)
    assert [(x != want).sum().item() for x, _ in seen] == [0] * 6 and len(want) == sum(models.LENGTHS) - 4
    assert all(torch.equal(x, seen[0][1]) for _, x in seen)
    with torch.no_grad():
        logits = models.converted(path, TYPES[dtype])(torch.tensor([sequences[0]])).logits[0, :-1].double()
    exact = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(seen[0][1][: len(exact)].double(), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_temperature_divides_as_an_engine_does(tmp, dtype):
    path, sequences = models.folder("llama", tmp), models.prompts()
    for packed in (True, False):
        more = {"use_remove_padding": packed, "micro_batch_size_per_gpu": 2, "temperature": 0.7}
        found = log_probs(actor(path, dtype), sequences, **more)[0]
        assert (found != wanted(path, dtype, sequences, 0.7)).sum().item() == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_the_fused_head(tmp, dtype):
    """Of a head that is tied to the embedding: FSDP2 cuts another alone."""
    path, sequences = models.folder("gemma", tmp), models.prompts()
    options = {"use_fused_kernels": True, "fused_kernel_options": Options(impl_backend="torch")}
    want = wanted(path, dtype, sequences, 0.7)
    forward, other = transformers.GemmaForCausalLM.forward, transformers.Qwen2ForCausalLM.forward
    try:
        engine = actor(path, dtype, **options)
        for packed in (True, False):
            more = {"use_remove_padding": packed, "micro_batch_size_per_gpu": 2, "use_fused_kernels": True}
            found = log_probs(engine, sequences, temperature=0.7, **more)[0]
            assert (found != want).sum().item() == 0
        with pytest.raises(pydet.Error, match=r"a weight that fsdp2 has cut, .* want use_fused_kernels=False"):
            log_probs(actor(models.folder("qwen2", tmp), dtype, **options), sequences, temperature=0.7, **more)
    finally:  # verl has changed the classes
        transformers.GemmaForCausalLM.forward, transformers.Qwen2ForCausalLM.forward = forward, other


class Options(dict):
    def __hash__(self):
        return hash(tuple(self.items()))


@pytest.mark.parametrize("dtype", TYPES)
def test_decoding(tmp, dtype):
    """A rollout a token at a time, as an engine's: the actor's log-probabilities are those of what was sampled."""
    path, starts = models.folder("llama", tmp), models.prompts()
    model, sequences, sampled = models.converted(path, TYPES[dtype]), [], []
    for i, start in enumerate(starts):
        ids, cache, step = list(start), None, start
        while len(ids) < len(start) + 8:
            with torch.no_grad():
                found = model(torch.tensor([step]), past_key_values=cache, use_cache=True)
            logits, cache = found.logits[0, -1:], found.past_key_values
            seed, place = torch.tensor([i]), torch.tensor([len(ids)])
            token, log_prob, _ = pydet.torch.sample(logits, seed, place, temperature=0.8)
            ids.append(token.item())
            sampled.append(log_prob)
            step = ids[-1:]
        sequences.append(ids)
    more = {"use_remove_padding": True, "micro_batch_size_per_gpu": 2, "temperature": 0.8}
    own = log_probs(actor(path, dtype), sequences, **more)[0]
    ends = torch.tensor([len(x) - 1 for x in sequences]).cumsum(0).tolist()
    trained = torch.cat([own[end - 8 : end] for end in ends])
    assert (trained != torch.cat(sampled)).sum().item() == 0 and len(trained) == 32


# ---- Gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_have_the_gradient_of_one_batch(tmp, packed):
    """verl's loop of micro-batches, forward and loss, of a model that is in no FSDP: main_grad. Micro-batches are of
    256 and of 512 rows, where norms may be cut."""
    path, sequences = models.folder("llama", tmp), models.prompts((128,) * 4)
    engine = actor(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    model.set_attn_implementation("pydet")
    pydet.torch.convert(model)
    pydet.torch.accumulate_gradients(model)
    source = torch.Generator().manual_seed(3)
    advantages = [torch.randn(len(x), generator=source) for x in sequences]
    for x in advantages:
        x[0] = 0  # nothing predicts it
    sharded, seen = engine.module, []
    engine.module = model
    engine._gradient_sync_context = lambda **options: torch.enable_grad()
    try:
        for rows in (4, 2):
            for parameter in model.parameters():
                parameter.main_grad.zero_()
            more = {"use_remove_padding": packed, "micro_batch_size_per_gpu": rows}
            data = batch(sequences, advantages, **more)
            engine.forward_backward_batch(data, functools.partial(sft_loss, None))
            seen.append({name: x.main_grad.clone() for name, x in model.named_parameters()})
    finally:
        engine.module = sharded
        del engine._gradient_sync_context
    one, cut = seen
    assert all(x.abs().max() > 0 for x in one.values())
    assert [name for name in one if not torch.equal(one[name], cut[name])] == []


# ---- What is refused, and what is not pydet's ------------------------------------------------------------------------

REFUSED = [
    ({"engine": (("model_dtype", "bf16"),)}, r"inv_freq was rounded to torch\.bfloat16, want float32"),
    ({"lora_rank": 4}, r"LoRA is enabled, .* want lora_rank=0"),
    ({"use_liger": True}, r"use_liger is on, .* want use_liger=False"),
    (
        {"use_fused_kernels": True, "fused_kernel_options": Options(impl_backend="triton")},
        r"the fused kernels are triton's, want impl_backend='torch'",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_refusals(tmp, options, sentence):
    engine = configured(models.folder("llama", tmp), **options)
    with pytest.raises(pydet.Error, match=rf"^pydet\.verl: .*{sentence}"):
        engine._build_module()


def test_other_engines_are_refused():
    with pytest.raises(pydet.Error, match=r"^pydet\.verl: the engine is 'megatron', want 'fsdp' or 'fsdp2'"):
        EngineRegistry.get_engine_cls("language_model", "megatron")


def test_sums_of_squares():
    logits = torch.randn(5, 77, generator=torch.Generator().manual_seed(0))
    found = torch_functional.calculate_sum_pi_squared_from_logits(logits)
    torch.testing.assert_close(found, logits.softmax(-1).pow(2).sum(-1))


def test_the_version():
    assert verl.__version__ in pydet.verl.VERSIONS


def test_without_the_variable_nothing_is_pydets():
    code = (
        "import sys, verl.utils.torch_functional as f; print(f.logprobs_from_logits.__module__, 'torch' in sys.modules)"
    )
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYDET")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["verl.utils.torch_functional", "True"], done.stderr
