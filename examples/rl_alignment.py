"""Rollout and trainer of one model, compared bit by bit: with PyTorch alone, and with pydet.

    python examples/rl_alignment.py                        # about 0.7 B parameters on a GPU
    python examples/rl_alignment.py --config config.json   # the shape of a Llama of Hugging Face's
    python examples/rl_alignment.py --small                # a minute model on the CPU
    python examples/rl_alignment.py --fp8                  # once more, with linear layers in fp8 (on a Hopper GPU)
    torchrun --nproc-per-node 2 examples/rl_alignment.py   # rollout on all ranks, trainer on one: rl_parallel.py

A model of Llama's architecture with random weights (bf16, grouped-query attention, static cache) samples sequences in
batches of 1, 3 and all, one token at a time, in CUDA graphs on a GPU; a sequence has the same noise in every batch.
Then the trainer computes the log-probabilities of the sampled tokens in one packed forward, and gradients of a policy-
gradient step: in one backward, and in four micro-batches that are accumulated. Printed and written to --out: how many
log-probabilities and gradient elements differ in bits, how many sequences came out otherwise than in the largest batch,
tokens a second, and the time of a training step.

This three times: with PyTorch alone and its scaled_dot_product_attention, whose gradients add up in the parameters'
type; with PyTorch's modules and attention as products under pydet.torch.override_aten(), which takes the products over
and leaves the adding up to PyTorch; and converted, with pydet's attention and gradients that add up in fp32. With --fp8
also converted to Fp8Linear, all layers but lm_head: the trainer quantises its bf16 weights in every call, and the
rollout has a copy of the model that keeps them quantised.

What is between works row by row: rotary embedding, SiLU. Converted, a decoding step is pydet.attention of a cache and
the lengths of its sequences, and the trainer's forward is attention_varlen of sequences that are packed behind each
other. Tokens and their log-probabilities are pydet.torch.sample, of their logits, their place and the sequence's number
as its seed; without pydet a table of noise and an argmax. The trainer's log-probabilities are
pydet.torch.linear_log_prob, which has the logits of a few rows at a time in memory. Micro-batches are padded to a
multiple of pydet.DWEIGHT_ROWS rows, and the embedding becomes pydet.torch.Embedding, whose gradient adds the tokens of
an id in their order; so all gradients are sums that go on from one micro-batch to the next.
"""

import argparse
import copy
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pydet
import pydet.torch


@dataclass
class Config:
    """As in transformers' LlamaConfig."""

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_length: int = 256  # of the cache

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def read(cls, path):
        """From a config.json as transformers writes it, of what this model has."""
        given = json.loads(path.read_text())
        config = cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})
        here = {"model_type": "llama", "hidden_act": "silu", "head_dim": config.head_dim}
        here |= dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False) | {"rope_scaling": None}
        for name, value in here.items():
            if given.get(name, value) not in (value, None):
                raise SystemExit(f"{path}: {name} is {given[name]}, this model has {value}")
        return config


@dataclass(frozen=True)
class Operations:
    """What a model takes beside its modules: attention of one query a sequence, attention of packed sequences, a token
    of each row of logits and its log-probability, and that of a head's result: from head, input, columns and which
    rows."""

    decode: Callable[..., torch.Tensor]
    packed: Callable[..., torch.Tensor]
    sample: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    head_log_prob: Callable[..., torch.Tensor]


def per_query_head(q, keys):
    """Keys or values [batch, kv heads, keys, head_dim], once for each head of q."""
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)


def stock_decode(q, k, v, layout):
    k, v = per_query_head(q, k), per_query_head(q, v)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=layout.seen)


def stock_packed(q, k, v, layout):
    q, k, v = (layout.spread(x) for x in (q, k, v))
    return layout.gather(functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def products(q, k, v, seen):
    """Two products and a softmax; queries of one key-value head lie under each other."""
    kv, queries, width = k.shape[1], q.shape[2], q.shape[3]
    scores = torch.matmul(q.unflatten(1, (kv, -1)).flatten(2, 3), k.mT) * width**-0.5
    scores = scores.unflatten(2, (-1, queries)).float().masked_fill(~seen[:, :, None], float("-inf"))
    out = torch.matmul(torch.softmax(scores, -1).to(v.dtype).flatten(2, 3), v)
    return out.unflatten(2, (-1, queries)).flatten(1, 2)


def products_decode(q, k, v, layout):
    return products(q, k, v, layout.seen)


def products_packed(q, k, v, layout):
    return layout.gather(products(*(layout.spread(x) for x in (q, k, v)), layout.seen))


def pydet_decode(q, k, v, layout):
    return pydet.attention(q, k, v, seqlens_k=layout.lengths)


def pydet_packed(q, k, v, layout):
    return torch.ops.pydet.attention_varlen(q, k, v, layout.ends, layout.ends, causal=True)[0]


def stock_log_prob(logits, index):
    return logits.log_softmax(-1).gather(-1, index[:, None])[:, 0]


@functools.cache
def gumbel_noise(device):
    return -torch.empty(1 << 20, device=device).exponential_(generator=torch.Generator(device).manual_seed(1)).log()


def stock_sample(logits, layout):
    """The noise of position t of sequence i begins at a place of a table that only i and t decide."""
    noise, slots = gumbel_noise(logits.device), torch.arange(logits.shape[-1], device=logits.device)
    start = layout.rows * 40503 + layout.positions * 69069
    chosen = (logits + noise[(start[:, None] + slots) % len(noise)]).argmax(-1)
    return chosen, stock_log_prob(logits, chosen)


def pydet_sample(logits, layout):
    """The seed of a sequence is its number."""
    return pydet.torch.sample(logits, layout.rows, layout.positions)[:2]


def stock_head_log_prob(head, hidden, index, rows):
    return stock_log_prob(head(hidden).float()[rows], index[rows])


def pydet_head_log_prob(head, hidden, index, rows):
    """Of all rows: those of the padding have their places in the sum of the weight's gradient."""
    return pydet.torch.linear_log_prob(hidden, head.weight, index)[rows]


TORCH = Operations(stock_decode, stock_packed, stock_sample, stock_head_log_prob)
PRODUCTS = Operations(products_decode, products_packed, stock_sample, stock_head_log_prob)
PYDET = Operations(pydet_decode, pydet_packed, pydet_sample, pydet_head_log_prob)
PARTS = 4  # micro-batches of a training step
SMALL = Config(256, 64, 128, 2, 4, 2, max_length=64)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden, head = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, hidden, bias=False)

    @staticmethod
    def share(heads):
        """The key or value heads of these query heads: all of them, where there is one rank."""
        return heads

    def forward(self, x, layout):
        head = self.config.head_dim
        q = rotate(self.q_proj(x).unflatten(-1, (-1, head)), layout.rotation)
        k = self.share(rotate(self.k_proj(x).unflatten(-1, (-1, head)), layout.rotation))
        v = self.share(self.v_proj(x).unflatten(-1, (-1, head)))
        return self.o_proj(layout.attend(self, q, k, v).flatten(-2))


def rotate(x, rotation):
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, layout):
        x = x + self.self_attn(self.input_layernorm(x), layout)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def hidden(self, tokens, layout):
        """What the head takes, [rows, hidden]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, layout)
        return self.norm(x)

    def forward(self, tokens, layout):
        """Logits [rows, vocabulary] after each of the tokens [rows]."""
        return self.lm_head(self.hidden(tokens, layout)).float()


def angles(config, positions):
    """cos and sin [rows, 1, head_dim / 2] of positions [rows]."""
    step = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim)
    angle = positions.float()[:, None, None] * step
    return angle.cos(), angle.sin()


class Decoding:
    """One token of each sequence; the cache is static, and so are all shapes."""

    def __init__(self, model, batch, operations):
        config, self.operations = model.config, operations
        weight = model.lm_head.weight
        shape = (batch, config.max_length, config.num_key_value_heads, config.head_dim)
        self.cache = {
            layer.self_attn: [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2)]
            for layer in model.layers
        }
        self.positions = torch.zeros(batch, dtype=torch.long, device=weight.device)
        self.rows, self.config = torch.arange(batch, device=weight.device), config

    def start_step(self):
        self.rotation = angles(self.config, self.positions)
        self.lengths = (self.positions + 1).int()
        slots = torch.arange(self.config.max_length, device=self.positions.device)
        self.seen = (slots <= self.positions[:, None])[:, None, None]

    def attend(self, attention, q, k, v):
        """Of q [batch, heads, head_dim] and the cache, with k and v in it: like q."""
        cached = self.cache[attention]
        for cache, new in zip(cached, (k, v), strict=True):
            cache[self.rows, self.positions] = new
        return self.operations.decode(q[:, :, None], *(x.transpose(1, 2) for x in cached), self)[:, :, 0]


class Packed:
    """Sequences behind each other without padding between them.

    `groups` are lists of lengths. After each group come rows of padding, up to a multiple of pydet.DWEIGHT_ROWS; their
    gradients are zero, and in attention they are a sequence. So a batch of several groups has the rows of those groups
    one by one.
    """

    def __init__(self, config, groups, device, operations):
        self.operations, unit = operations, pydet.DWEIGHT_ROWS
        rows, positions, ends, start = [], [], [0], 0
        for lengths in groups:
            rows += range(start, start + sum(lengths))
            positions += [t for n in lengths for t in range(n)]
            padding = -sum(lengths) % unit
            for n in [*lengths, padding] if padding else lengths:
                ends.append(ends[-1] + n)
            start = ends[-1]
        self.rows, self.total = torch.tensor(rows, device=device), start
        self.ends = torch.tensor(ends, dtype=torch.int32, device=device)
        lengths = torch.tensor([n for lengths in groups for n in lengths], device=device)
        longest = int(lengths.max())
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        positions = torch.tensor(positions, device=device)
        self.place, self.shape = sequence * longest + positions, (len(lengths), longest)
        self.rotation = angles(config, self.pad(positions))
        slots = torch.arange(longest, device=device)
        self.seen = (slots <= slots[:, None])[None, None]

    def pad(self, x):
        """The rows of the sequences at their places between the padding."""
        return x.new_zeros(self.total, *x.shape[1:]).index_copy(0, self.rows, x)

    def spread(self, x):
        """Rows [total, heads, head_dim] as sequences of one length, with zeros behind the shorter: [sequences, heads,
        length, head_dim]."""
        spread = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return spread.index_copy(0, self.place, x[self.rows]).unflatten(0, self.shape).transpose(1, 2)

    def gather(self, spread):
        return self.pad(spread.transpose(1, 2).flatten(0, 1)[self.place])

    def attend(self, _, q, k, v):
        """Of q, k and v [total, heads, head_dim]: like q."""
        return self.operations.packed(q, k, v, self)


def differing(a, b):
    """Elements whose bits are not the same."""
    words = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return int((a.contiguous().view(words) != b.contiguous().view(words)).sum())


def seconds(call, device, count=3):
    times = []
    for _ in range(count + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@torch.no_grad()
def decode(model, first, steps, operations):
    """Samples a sequence from each first token: (tokens [batch, steps + 1], their log-probabilities [batch, steps],
    tokens a second)."""
    batch, device = len(first), first.device
    layout, given = Decoding(model, batch, operations), first.clone()

    def step():
        layout.start_step()
        chosen, log_prob = operations.sample(model(given, layout), layout)
        given.copy_(chosen)
        layout.positions.add_(1)
        return chosen, log_prob

    run = step
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
            result = step()

        def run():
            graph.replay()
            return result

    tokens, found = first[:, None].repeat(1, steps + 1), torch.empty(batch, steps, device=device)

    def sequence():
        given.copy_(first)
        layout.positions.zero_()
        for t in range(steps):
            tokens[:, t + 1], found[:, t] = run()

    took = seconds(sequence, device.type, 1)
    return tokens, found, batch * steps / took


def trainer_loss(model, tokens, lengths, weights, groups, operations):
    """(the log-probabilities of the packed next tokens, the loss), of sequences of these lengths, in so many groups."""
    inputs, wanted, scales = (
        torch.cat([row[first : n - 1 + first] for row, n in zip(rows, lengths, strict=True)])
        for rows, first in ((tokens, 0), (tokens, 1), (weights, 0))
    )
    size = len(tokens) // groups
    layout = Packed(
        model.config,
        [[n - 1 for n in lengths[i : i + size]] for i in range(0, len(tokens), size)],
        tokens.device,
        operations,
    )
    hidden, wanted = model.hidden(layout.pad(inputs), layout), layout.pad(wanted)
    chosen = operations.head_log_prob(model.lm_head, hidden, wanted, layout.rows)
    return chosen, -(chosen * scales).sum()


def gradients(model, tokens, lengths, weights, parts, operations):
    """The gradients of a step whose batch comes in this many parts, by parameter, the step's time, and on a GPU the MB
    that were allocated at most."""
    parameters = dict(model.named_parameters())
    size = len(tokens) // parts

    def step():
        for parameter in parameters.values():
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
        for i in range(0, len(tokens), size):
            here = slice(i, i + size)
            trainer_loss(model, tokens[here], lengths[here], weights[here], PARTS // parts, operations)[1].backward()

    on_gpu = tokens.is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    took = seconds(step, tokens.device.type, 3 if on_gpu else 1)
    most = round(torch.cuda.max_memory_allocated() / 1e6) if on_gpu else None
    found = {name: getattr(p, "main_grad", p.grad).clone() for name, p in parameters.items()}
    return found, took, most


class Products(TorchDispatchMode):
    """Counts the operators that multiply matrices and vectors, as PyTorch calls them."""

    names = ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_", "mv", "addmv", "dot", "vdot", "linear", "matmul")

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name, overload = operator._schema.name, operator._schema.overload_name
        if name.removeprefix("aten::") in self.names or "scaled_dot_product" in name:
            self.seen[f"{name}.{overload}" if overload else name] += 1
        return operator(*args, **(kwargs or {}))


def caught_in_step(model, tokens, lengths, weights):
    """Which products of a forward and a backward override_aten() took over, and which it did not."""
    with pydet.torch.override_aten() as caught, Products() as products:
        trainer_loss(model, tokens, lengths, weights, PARTS, PRODUCTS)[1].backward()
    return {"caught in a training step": dict(caught), "not caught": dict(products.seen - caught)}


def card():
    """What nvidia-smi says of the card now."""
    names = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(names.split(","), done.stdout.splitlines()[0].split(", "), strict=True))


def compare_rollouts(rollout, model, tokens, lengths, weights, operations, batches):
    """What one model samples, in each size of batch, against a trainer's forward by another. Of `tokens` only the first
    of each sequence is used."""
    rollouts = {batch: decode(rollout, tokens[:batch, 0], tokens.shape[1] - 1, operations) for batch in batches}
    tokens, result = rollouts[batches[-1]][0], {}
    for batch, (sampled, found, rate) in rollouts.items():
        sequences = torch.cat((sampled, tokens[batch:]))
        with torch.no_grad():
            chosen, _ = trainer_loss(model, sequences, lengths, weights, PARTS, operations)
        rollout = torch.cat([found[i, : n - 1] for i, n in enumerate(lengths[:batch])])
        others = sum(not torch.equal(sampled[i, :n], tokens[i, :n]) for i, n in enumerate(lengths[:batch]))
        result[f"decode in batches of {batch}"] = {
            "log-probabilities": rollout.numel(),
            "differ from the trainer's": differing(rollout, chosen[: len(rollout)]),
            "largest difference": float((rollout - chosen[: len(rollout)]).abs().max()),
            "sequences": batch,
            "not those of the largest batch": others,
            "tokens a second": round(rate, 1),
        }
    return result


def compare(model, tokens, lengths, weights, operations, batches, rollout=None):
    """All the counts of one way to compute. `rollout` samples, if it is given, and else the model."""
    result = compare_rollouts(rollout or model, model, tokens, lengths, weights, operations, batches)
    whole, took, most = gradients(model, tokens, lengths, weights, 1, operations)
    parts, took_parts, most_parts = gradients(model, tokens, lengths, weights, PARTS, operations)
    result["gradients, one batch and four micro-batches"] = {
        "elements": sum(g.numel() for g in whole.values()),
        "differ": sum(differing(whole[name], parts[name]) for name in whole),
        "ms a step": round(1e3 * took, 2),
        "ms a step in four": round(1e3 * took_parts, 2),
        "MB at most": [most, most_parts],
    }
    return result


def frozen_copy(model):
    """The model for a rollout: its weights in fp8, quantised once."""
    rollout = copy.deepcopy(model)
    for layer in rollout.modules():
        if isinstance(layer, pydet.torch.Fp8Linear):
            layer.freeze()
    return rollout


def drawn(config, device):
    """A model with random weights, and what is sampled and learned: (model, first tokens, lengths, weights of the loss,
    sizes of batches). The same on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # as Llama begins, so that activations keep their size
            nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)
    on_gpu = torch.device(device).type == "cuda"
    sequences, longest = (64, 128) if on_gpu else (8, config.max_length)
    tokens = torch.randint(config.vocab_size, (sequences, longest), device=device)
    lengths = torch.randint(longest // 2, longest + 1, (sequences,)).tolist()
    weights = torch.randn(sequences, longest, device=device)  # the advantages
    return model, tokens, lengths, weights, (1, 3, sequences)


def wrong(entries):
    """How many things differ, in entries of a report."""
    counts = ("differ", "differ from the trainer's", "not those of the largest batch")
    return sum(entry.get(name, 0) for entry in entries for name in counts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a minute model on the CPU")
    parser.add_argument("--fp8", action="store_true", help="once more, with linear layers in fp8")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--config", type=Path, help="a config.json of a Llama, for the model's shape")
    parser.add_argument("--trainer", type=int, default=1, help="under torchrun: the ranks of the trainer")
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        import rl_parallel

        return rl_parallel.main(sys.modules[__name__], options.trainer, options.out)
    device = "cpu" if options.small or not torch.cuda.is_available() else "cuda"
    config = SMALL if device == "cpu" else Config()
    if options.config:
        config = Config.read(options.config)
    model, tokens, lengths, weights, batches = drawn(config, device)
    report = {
        "command": "python examples/rl_alignment.py"
        + " --small" * options.small
        + " --fp8" * options.fp8
        + (f" --config {options.config.name}" if options.config else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "pydet": pydet.__version__, "NUMERICS": pydet.NUMERICS},
        "parameters": sum(p.numel() for p in model.parameters()),
        "model": asdict(config),
        "sequences": len(tokens),
    }
    if device == "cuda":
        report["card before"] = card()
    report["torch"] = compare(model, tokens, lengths, weights, TORCH, batches)
    report["override_aten"] = caught_in_step(model, tokens, lengths, weights)
    with pydet.torch.override_aten():
        report["override_aten"] |= compare(model, tokens, lengths, weights, PRODUCTS, batches)
    conversion = pydet.torch.convert(model)
    pydet.torch.accumulate_gradients(model)  # the embedding's too
    report["swapped for pydet"], report["left"] = len(conversion.swapped), conversion.left
    report["pydet"] = compare(model, tokens, lengths, weights, PYDET, batches)
    if options.fp8:
        pydet.torch.convert(model, fp8=lambda name, _: name != "lm_head")
        rollout = frozen_copy(model)
        report["pydet, fp8"] = compare(model, tokens, lengths, weights, PYDET, batches, rollout=rollout)
    if device == "cuda":
        report["card after"] = card()
    print(json.dumps(report, indent=2))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    missed = report["override_aten"]["not caught"]
    count = wrong(entry for way in ("pydet", "pydet, fp8") for entry in report.get(way, {}).values())
    print(f"with pydet {count} things differ; override_aten missed {sum(missed.values())} products")
    raise SystemExit(1 if count or missed else 0)


if __name__ == "__main__":
    main()
