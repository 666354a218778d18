"""python -m bench.models: a model of Transformers on one NVIDIA GPU, stock beside converted.

Four layers of Llama at 8B width (hidden 4096, 32 heads, 8 of k and v, 14336, vocabulary 128256), random weights, bf16.
Three models take turns, call by call: stock with PyTorch's attention, converted with PyTorch's attention, and converted
with pydet's (`register_attention`). A figure is the median in ms of the device's time from the first launch of a call
to the end of its last kernel, so it has the host's time where the device waits for it.

- prefill: a forward of B sequences of T tokens; logits of the last token only.
- decode: one token each of B sequences, behind a cache of T keys, which each call grows and cuts back.
- train: forward, cross entropy, backward; gradients are dropped.

Beside each time: how many of the logits of sequence 0 change in bits when it comes alone, and for training how many
elements of the gradients change when the step is run again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

import pydet
import pydet.torch
from bench import harness

PREFILL = [(1, 4096), (8, 1024), (2, 8192)]
DECODE = [(1, 1024), (64, 1024), (64, 4096)]
TRAIN = [(2, 2048)]
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
MINUTE = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
VARIANTS = {"stock": (False, "sdpa"), "converted, sdpa": (True, "sdpa"), "converted, pydet": (True, "pydet")}


@dataclass
class Step:
    """What is timed of a model: `call` at each sample, `undo` behind it. bits: what must not change, by sequences."""

    kind: str
    sequences: int
    tokens: int
    call: Callable[[], object]
    bits: Callable[[int], torch.Tensor]
    undo: Callable[[], object] = lambda: None


def model_of(converts, attention, layers, sizes, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, **sizes)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    if converts:
        pydet.torch.convert(model)
    model.set_attn_implementation(attention)
    return model


def tokens_of(model, sequences, tokens):
    chance = torch.Generator().manual_seed(sequences * 65537 + tokens)
    return torch.randint(model.config.vocab_size, (sequences, tokens), generator=chance).to(model.device)


def prefill(model, sequences, tokens):
    ids = tokens_of(model, sequences, tokens)

    @torch.no_grad()
    def forward(count=sequences):
        return model(ids[:count], logits_to_keep=1, use_cache=False).logits

    return Step("prefill", sequences, tokens, forward, forward)


def decode(model, sequences, tokens):
    from transformers import DynamicCache

    config, ids = model.config, tokens_of(model, sequences, 1)
    chance = torch.Generator(model.device).manual_seed(tokens)

    def filled(count):
        cache = DynamicCache()
        for layer, states in enumerate(held):
            cache.update(*(x[:count] for x in states), layer)
        return cache

    shape = (sequences, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
    draw = {"generator": chance, "device": model.device, "dtype": torch.bfloat16}
    held = [[torch.randn(shape, **draw) for _ in "kv"] for _ in range(config.num_hidden_layers)]
    cache = filled(sequences)

    @torch.no_grad()
    def step(count=sequences, cache=cache):
        logits = model(ids[:count], past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return Step("decode", sequences, tokens, step, lambda count: step(count, filled(count)))


def train(model, sequences, tokens):
    ids = tokens_of(model, sequences, tokens)

    def step(count=sequences):
        model.train()
        model(ids[:count], labels=ids[:count], use_cache=False).loss.backward()
        model.eval()

    def drop():
        model.zero_grad(set_to_none=True)

    def gradients(_):
        step()
        found = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])[None].clone()
        drop()
        return found

    return Step("train", sequences, tokens, step, gradients, drop)


def differing(step):
    """Elements that change: of sequence 0 alone and in the batch, or of the gradients in a second run."""
    whole = step.bits(step.sequences)
    step.undo()
    again = step.bits(1 if step.kind != "train" else step.sequences)
    step.undo()
    return int((whole[:1].view(torch.int16) != again[:1].view(torch.int16)).sum()), whole[:1].numel()


def sample(step):
    """ms of one call."""
    if not torch.cuda.is_available():
        raise SystemExit("bench.models: no GPU, and its times are a GPU's; --check runs a minute model on the CPU")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step.call()
    end.record()
    torch.cuda.synchronize()
    step.undo()
    return begin.elapsed_time(end)


def measure(kind, sequences, tokens, models, samples):
    """The entries of a row: each model's median, and what differs."""
    entries = []
    steps = {}
    for name, model in models.items():
        steps[name] = kind(model, sequences, tokens)
        changed, total = differing(steps[name])
        entries.append({"variant": name, "differ": changed, "of": total})
    times = {name: [] for name in steps}
    for turn in range(samples + 2 if samples else 0):
        for name, step in steps.items():
            ms = sample(step)
            if turn >= 2:
                times[name].append(ms)
    of = next(iter(steps.values()))
    for entry in entries:
        entry |= {"kind": of.kind, "sequences": sequences, "tokens": tokens}
        if samples:
            low, middle, high = statistics.quantiles(times[entry["variant"]], n=4, method="inclusive")
            entry |= {"ms": middle, "ms_quartiles": [low, high]}
    return entries


def line(entries):
    first = entries[0]
    cells = [f"{first['kind']} {first['sequences']} x {first['tokens']}"]
    for entry in entries:
        ms = f"{entry['ms']:.2f} ms, " if "ms" in entry else ""
        cells.append(f"{ms}{entry['differ']} of {entry['of']} differ")
    if "ms" in first:
        cells.append(f"{first['ms'] / entries[-1]['ms']:.3f}")
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="kind", help="of prefill, decode, train; default all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="a minute model on the CPU, no times: what differs")
    parser.add_argument("--out", help="a JSON file for the results")
    options = parser.parse_args()
    kinds = {"prefill": (prefill, PREFILL), "decode": (decode, DECODE), "train": (train, TRAIN)}
    if unknown := set(options.kinds) - set(kinds):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    pydet.torch.register_attention()
    device, sizes = ("cpu", MINUTE) if options.check else ("cuda", LLAMA_8B)
    models = {name: model_of(*how, options.layers, sizes, device) for name, how in VARIANTS.items()}
    print("| what | " + " | ".join(models) + " | stock / pydet |")
    print("|---|" + "---|" * (len(models) + 1))
    found, wrong = [], 0
    for name in options.kinds or kinds:
        kind, sizes = kinds[name]
        for sequences, tokens in [(3, 40)] if options.check else sizes:
            entries = measure(kind, sequences, tokens, models, 0 if options.check else options.samples)
            print(line(entries), flush=True)
            found += entries
            wrong += entries[-1]["differ"]
            if device == "cuda":
                torch.cuda.empty_cache()
    if options.out:
        with open(options.out, "w") as file:
            state = {"versions": harness.versions(), "machine": harness.machine()}
            json.dump({"command": " ".join(["python -m bench.models", *sys.argv[1:]]), **state, "rows": found}, file)
    return f"bench.models: {wrong} elements of the converted model changed" if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
