"""A training run on any number of ranks whose loss curve is, bit for bit, that of one.

    torchrun --nproc-per-node 1 examples/data_parallel.py --save one.json
    torchrun --nproc-per-node 2 examples/data_parallel.py --compare one.json               # 0 differ
    torchrun --nproc-per-node 2 examples/data_parallel.py --compare one.json --all-reduce  # the control

Each rank is a GPU where there are as many, over NCCL; else a process on the CPU, over gloo. A step takes 8 segments of
two micro-batches each; rank r has segments r, r + W, ... Their gradients come to main_grad, are folded over the
segments in their order, clipped, and taken by pydet's AdamW. Compared: the loss of every segment of every step, and
every parameter at the end. --all-reduce sums over the ranks as it is usually done.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from parallel import start, words

import pydet.torch
import pydet.torch.distributed as pd

STEPS, SEGMENTS, MICRO_BATCHES, TOKENS, VOCABULARY, WIDTH = 8, 8, 2, 64, 64, 32


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDTH, eps=1e-6)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """The next token by the last one."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, targets):
        logits = self.head(self.blocks(self.embedding(tokens)))
        return -pydet.torch.log_prob(logits, targets).sum()


def segment(step, number):
    """Its micro-batches: tokens, and the ones after them, most of which follow a rule."""
    draw = torch.Generator().manual_seed(1000 * step + number)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCHES, TOKENS), generator=draw)
    noise = torch.randint(0, VOCABULARY, tokens.shape, generator=draw)
    kept = torch.rand(tokens.shape, generator=draw) < 0.9
    return zip(tokens, torch.where(kept, (5 * tokens + 3) % VOCABULARY, noise), strict=True)


def train(device, all_reduce):
    """The loss of each segment of each step, and the parameters in the end, as words."""
    torch.manual_seed(0)
    model = Model().to(device)
    pydet.torch.convert(model)
    parameters = pydet.torch.accumulate_gradients(model)
    assert not parameters.outside
    optimizer = pydet.torch.AdamW(parameters, lr=1e-2)
    sums = pd.OrderedMainGrads(parameters)
    rank, world = dist.get_rank(), dist.get_world_size()
    curve = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = torch.zeros(SEGMENTS // world, device=device)
        for i, number in enumerate(range(rank, SEGMENTS, world)):
            for tokens, targets in segment(step, number):
                loss = model(tokens.to(device), targets.to(device)) / (SEGMENTS * MICRO_BATCHES * TOKENS)
                loss.backward()
                losses[i] += loss.detach() * SEGMENTS
            if not all_reduce:
                sums.add()
        if all_reduce:
            for parameter in parameters:
                dist.all_reduce(parameter.main_grad)
        else:
            sums.finish()
        pd.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        everyone = [torch.empty_like(losses) for _ in range(world)]
        dist.all_gather(everyone, losses)
        curve.append(torch.stack(everyone, 1).flatten())  # in the order of the segments
    return {
        "losses": [x for row in curve for x in words(row)],
        "parameters": [x for p in parameters for x in words(p)],
        "curve": [row.mean().item() for row in curve],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--all-reduce", action="store_true")
    given = parser.parse_args()
    device, world = start()
    found = train(device, given.all_reduce)
    if dist.get_rank() == 0:
        how = "all-reduced" if given.all_reduce else "ordered"
        print(f"{world} ranks, {device.type}, {how}: loss", " ".join(f"{x:.4f}" for x in found["curve"]))
        if given.save:
            given.save.write_text(json.dumps(found))
        saved = json.loads(given.compare.read_text()) if given.compare else {}
        for name in ("losses", "parameters") if saved else ():
            differ = sum(a != b for a, b in zip(found[name], saved[name], strict=True))
            print(f"{name}: {differ} of {len(saved[name])} differ")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
