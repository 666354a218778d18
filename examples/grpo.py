"""GRPO on a minute model, with pydet and without: reward, and how far rollout and trainer disagree.

    python examples/grpo.py                 # both, some two minutes on two cores; writes grpo.svg
    python examples/grpo.py --steps 5       # seconds
    python examples/grpo.py --dtype float32

A Llama of random weights (2 layers, bf16) is to write letters of the alphabet's second half: a completion's reward is
their share, 0.5 by chance. Each step Transformers' continuous batching (`generate_batch`) samples a group of
completions for each prompt and gives the log-probability of each token; the trainer computes them once more, in padded
micro-batches, and their ratio weighs the tokens, as in GRPO, clipped. Weights have not changed in between, so each
ratio ought to be 1: with pydet it is, for every token of every step. Without, every fourth is not.

With pydet gradients add up in fp32 from one micro-batch to the next. So the trained weights are a function of the
prompts, the seeds and the arithmetic: their hash, which is printed, is the same for a --micro-batch of 32 and of 64
sequences (both are a multiple of pydet.DWEIGHT_ROWS tokens) and for any --batch-tokens of the engine. Without pydet it
is another each time.
"""

import argparse
import gc
import hashlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

import pydet.torch

LETTERS, PROMPTS, GROUP, LENGTH, CLIP = 32, 8, 8, 8, 0.2
WIDTH = 8  # of a prompt, with its padding
GREEN, RED, GREY = "#2a7f62", "#b5533c", "#8a8a8a"


@dataclass
class Run:
    """What is seen of one training."""

    rewards: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the tokens whose two log-probabilities differ, in per cent
    furthest: float = 0.0  # a ratio's distance from 1
    differing: int = 0
    tokens: int = 0
    seconds: float = 0.0
    weights: str = ""


def tiny_model(dtype: torch.dtype, with_pydet: bool) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=LETTERS, num_key_value_heads=2, pad_token_id=0, **sizes)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    if with_pydet:
        pydet.torch.register_attention()
        model.set_attn_implementation("pydet")
        pydet.torch.convert(model, strict=True)
        pydet.torch.continuous_batching(model)
        pydet.torch.accumulate_gradients(model)
    return model


def rollout(model, prompts, step, batch_tokens):
    """Completions of each prompt, a group beside each other, with their log-probabilities: [sequences, LENGTH]."""
    outputs = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            do_sample=True, max_new_tokens=LENGTH, num_return_sequences=GROUP, eos_token_id=-1, top_k=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            seed=step, return_logprobs=True, page_size=16, num_blocks=256, max_batch_tokens=batch_tokens
        ),
    )
    errors = {output.error for output in outputs.values()} - {None}
    if errors:
        raise SystemExit(f"generate_batch: {errors}")
    tokens = torch.tensor([output.generated_tokens for output in outputs.values()])
    return tokens, torch.tensor([output.logprobs for output in outputs.values()])


def log_probs(model, prompts, tokens, with_pydet):
    """As the trainer computes them: prompts padded on the left, one forward of the micro-batch."""
    ids = torch.cat([torch.tensor([[0] * (WIDTH - len(prompt)) + prompt for prompt in prompts]), tokens], 1)
    seen = torch.tensor([[0] * (WIDTH - len(prompt)) + [1] * (len(prompt) + LENGTH) for prompt in prompts])
    places = (seen.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=seen, position_ids=places, use_cache=False).logits[:, WIDTH - 1 : -1]
    if with_pydet:
        return pydet.torch.log_prob(logits, tokens)
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def advantages(tokens):
    """Of each completion within its group; and the mean reward."""
    reward = (tokens >= LETTERS // 2).float().mean(1).view(-1, GROUP)
    spread = reward.std(1, keepdim=True) + 1e-4
    return ((reward - reward.mean(1, keepdim=True)) / spread).flatten(), reward.mean().item()


def train(dtype, with_pydet, steps, micro_batch, batch_tokens):
    model, run, started = tiny_model(dtype, with_pydet), Run(), time.perf_counter()
    masters = {parameter: parameter.detach().float().clone() for parameter in model.parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=3e-3, weight_decay=0.0)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        lengths = torch.randint(1, WIDTH + 1, (PROMPTS,), generator=draw).tolist()
        prompts = [torch.randint(1, LETTERS, (n,), generator=draw).tolist() for n in lengths]
        tokens, sampled = rollout(model, prompts, step, batch_tokens)
        model.train()
        advantage, reward = advantages(tokens)
        repeated = [prompt for prompt in prompts for _ in range(GROUP)]
        differing = 0
        for first in range(0, len(tokens), micro_batch):
            part = slice(first, first + micro_batch)
            learned = log_probs(model, repeated[part], tokens[part], with_pydet)
            ratio = (learned - sampled[part]).exp()
            gain = advantage[part, None]
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).sum() / tokens.numel()
            loss.backward()
            differing += (learned != sampled[part]).sum().item()
            run.furthest = max(run.furthest, (ratio.detach() - 1).abs().max().item())
        for parameter, master in masters.items():
            master.grad = parameter.main_grad.clone() if with_pydet else parameter.grad.float()
            (parameter.main_grad if with_pydet else parameter.grad).zero_()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
        run.rewards.append(reward)
        run.shares.append(100 * differing / tokens.numel())
        run.differing, run.tokens = run.differing + differing, run.tokens + tokens.numel()
    run.seconds = time.perf_counter() - started
    run.weights = hashlib.sha256(b"".join(x.numpy().tobytes() for x in masters.values())).hexdigest()[:12]
    return run


def panel(top, title, curves, largest, unit):
    """A graph of 560 x 180 whose upper left corner is at (60, top)."""
    parts = [f'<text x="60" y="{top - 10}" font-weight="bold">{title}</text>']
    for i in range(3):
        y, value = top + 180 - 90 * i, largest * i / 2
        parts.append(f'<path d="M60 {y}h560" stroke="{GREY}" stroke-opacity="0.4"/>')
        parts.append(f'<text x="52" y="{y + 4}" text-anchor="end">{value:g}{unit}</text>')
    for values, color in curves:
        points = [
            f"{60 + 560 * i / max(len(values) - 1, 1):.1f},{top + 180 - 180 * value / largest:.1f}"
            for i, value in enumerate(values)
        ]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>')
    return parts


def draw_svg(runs):
    """Reward, and the share of tokens on which rollout and trainer differ, at each step."""
    colors = {True: GREEN, False: RED}
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 500" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="640" height="500" fill="white"/>')
    parts += panel(40, "reward", [(run.rewards, colors[key]) for key, run in runs.items()], 1.0, "")
    shares = [(run.shares, colors[key]) for key, run in runs.items()]
    parts += panel(270, "tokens whose log-probability differs between rollout and trainer", shares, 100.0, " %")
    for i, key in enumerate(runs):
        name = "with pydet" if key else "without"
        parts.append(f'<text x="{60 + 120 * i}" y="480" fill="{colors[key]}">{name}</text>')
    parts.append('<text x="620" y="480" text-anchor="end">step</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences of a forward in training")
    parser.add_argument("--batch-tokens", type=int, default=128, help="tokens of a step of the engine")
    parser.add_argument("--without", choices=["pydet", "stock"], help="leave out one of the two")
    parser.add_argument("--out", type=Path, default=Path("grpo.svg"))
    given = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    gc.freeze()  # generate_batch has Python look for garbage at its end, 0.2 s among all that was imported
    runs = {}
    for with_pydet, name in ((True, "pydet"), (False, "stock")):
        if name == given.without:
            continue
        run = train(getattr(torch, given.dtype), with_pydet, given.steps, given.micro_batch, given.batch_tokens)
        runs[with_pydet] = run
        print(
            f"{'with pydet' if with_pydet else 'without'}: {run.differing} of {run.tokens} log-probabilities differ, "
            f"ratios up to {run.furthest:.2g} from 1; reward {run.rewards[0]:.2f} -> {run.rewards[-1]:.2f}; "
            f"weights {run.weights}; {run.seconds:.0f} s"
        )
    given.out.write_text(draw_svg(runs))
    return runs


if __name__ == "__main__":
    main()
