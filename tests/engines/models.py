"""Minute models for the checks of engines, what is asked of them, and what must come of it: the log-probabilities of
the model of Transformers that pydet.torch.convert made, and the tokens of pydet.torch.sample."""

import functools
import pathlib

import torch
import transformers

import pydet.torch

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "max_position_embeddings": 256}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),  # biases
    "qwen3": (transformers.Qwen3Config, {}),  # norms of heads
    "gemma": (transformers.GemmaConfig, {}),  # weights less 1, a tied head, GELU
    "mistral": (transformers.MistralConfig, {"sliding_window": 24}),
    "gemma3": (transformers.Gemma3TextConfig, {"sliding_window": 24, "query_pre_attn_scalar": 32}),  # every other layer
    "gptoss": (transformers.GptOssConfig, {"num_local_experts": 4, "sliding_window": 24}),  # sinks, experts, YaRN
    "starcoder2": (transformers.Starcoder2Config, {"sliding_window": None}),  # LayerNorm
    "phi3": (transformers.Phi3Config, {"sliding_window": None}),
    "gpt2": (transformers.GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}),
    "gemma2": (transformers.Gemma2Config, {"sliding_window": 24, "query_pre_attn_scalar": 32}),  # capped logits
}
LENGTHS = (5, 40, 17, 90)
OPTIONS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.3},
)


@functools.lru_cache
def folder(name, tmp):
    """Of a tiny model with weights by a seed."""
    kind, more = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES | more))
    model.save_pretrained(pathlib.Path(tmp) / name)
    return str(pathlib.Path(tmp) / name)


@functools.lru_cache
def converted(path, dtype, device="cpu"):
    pydet.torch.register_attention()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval().to(device)
    model.set_attn_implementation("pydet")
    pydet.torch.convert(model)
    return model


@functools.lru_cache
def prompts(lengths=LENGTHS, shared=0):
    """Of random tokens; the first `shared` are the same in all."""
    source = torch.Generator().manual_seed(1)
    first = torch.randint(3, 320, (shared,), generator=source).tolist()
    return [first + torch.randint(3, 320, (n,), generator=source).tolist() for n in lengths]


def requests(given, tokens=8, **more):
    options = [OPTIONS[i % len(OPTIONS)] | {"seed": 7 * i, "max_tokens": tokens} for i in range(len(given))]
    return [{"prompt": x, "sampling": o | {"ignore_eos": True} | more} for x, o in zip(given, options)]


def compare(model, asked, found, scaled=False):
    """How many log-probabilities and tokens of a round are not those of the model and of pydet.torch.sample; of how
    many log-probabilities. scaled: those of what was sampled are of logits over the temperature, where there is one."""
    wrong, strange, count = 0, 0, 0
    for request, answer in zip(asked, found, strict=True):
        prompt, tokens = request["prompt"], answer["tokens"]
        whole, given = torch.tensor(prompt + tokens, device=model.device), request["sampling"]
        with torch.no_grad():
            logits = model(whole[None]).logits[0, :-1]
        wide = logits.float().clone()
        if scaled:
            wide[len(prompt) - 1 :] /= torch.tensor(given["temperature"] or 1.0)
        want = pydet.torch.log_prob(wide, whole[1:]).cpu()
        got = torch.tensor(answer["prompt"] + answer["log_probs"])
        wrong += (got != want[-len(got) :]).sum().item()
        count += len(got)
        places = torch.arange(len(prompt), len(whole), device=model.device)
        how = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in given}
        own = pydet.torch.sample(logits[len(prompt) - 1 :], torch.full_like(places, given["seed"]), places, **how)[0]
        strange += (own.cpu() != torch.tensor(tokens)).sum().item()
    return wrong, strange, count
