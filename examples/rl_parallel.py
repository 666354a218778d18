"""Rollout and trainer of one model on different numbers of ranks: what rl_alignment.py does under torchrun.

    torchrun --nproc-per-node 2 examples/rl_alignment.py                # the rollout on 2 ranks, the trainer on 1
    torchrun --nproc-per-node 8 examples/rl_alignment.py --trainer 4

The rollout's model is tensor parallel over all ranks, the trainer's over --trainer of them: log-probabilities of the
sampled tokens, sequences and gradients are compared bit by bit. Then the same rollout by PyTorch's layers and
all-reduces of bf16, against PyTorch's trainer on one rank: the control, and the speed to compare with. Ranks are GPUs
where there are as many, over NCCL, else processes on the CPU, over gloo.

The key and value layers are whole on every rank, and each segment of the query heads takes the head that it looks at.
"""

import copy
import json
import os
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist
from parallel import start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

import pydet.torch
import pydet.torch.distributed as pd

SEGMENTS = 8
QUERIES, INNER = ("self_attn.q_proj",), ("gate_proj", "up_proj")


def set_heads(model, heads, share):
    """The key and value heads that a rank has, and what makes them of those of its k_proj and v_proj."""
    model.config = replace(model.config, num_key_value_heads=heads)
    for layer in model.layers:
        layer.self_attn.config, layer.self_attn.share = model.config, share


class Embedding(torch.nn.Embedding):
    def forward(self, tokens):
        return pydet.torch.embedding(tokens, self.weight)


def ordered(model, mesh):
    """A copy by pydet, tensor parallel over the mesh: its bits do not depend on how many ranks that are."""
    model = copy.deepcopy(model)
    pydet.torch.convert(model)
    columns, rows = pd.ColwiseParallel(SEGMENTS), pd.RowwiseParallel(SEGMENTS)
    plan = dict.fromkeys(QUERIES + INNER, columns) | {"self_attn.o_proj": rows, "down_proj": rows}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    set_heads(model, SEGMENTS // mesh.size(), partial(pd.share_heads, segments=SEGMENTS, group=mesh.get_group()))
    weight = model.embed_tokens.weight
    model.embed_tokens = Embedding(*weight.shape, _weight=weight)
    return model


class AllReduced(torch.nn.Module):
    """A row-parallel layer as it is usually written."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        y = functional.linear(x, self.weight)
        dist.all_reduce(y)
        return y


def all_reduced(model):
    """A copy by PyTorch over all ranks, for a rollout. Key heads too are shared out where the ranks divide them."""
    rank, world, heads = dist.get_rank(), dist.get_world_size(), model.config.num_key_value_heads
    model = copy.deepcopy(model)
    shared = heads % world == 0
    for layer in model.layers:
        for name in QUERIES + INNER + ("self_attn.k_proj", "self_attn.v_proj") * shared:
            linear = layer.get_submodule(name)
            linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(world)[rank].clone())
        attention = layer.self_attn
        attention.o_proj = AllReduced(attention.o_proj.weight.detach().chunk(world, 1)[rank].clone())
        layer.down_proj = AllReduced(layer.down_proj.weight.detach().chunk(world, 1)[rank].clone())
    first = rank * heads // world
    set_heads(model, max(1, heads // world), torch.nn.Identity() if shared else lambda x: x[:, first : first + 1])
    return model


def compare(this, model, trainer_ranks, tokens, lengths, weights, batches):
    """All the counts; `this` is rl_alignment."""
    world, kind = dist.get_world_size(), tokens.device.type
    trainers = init_device_mesh(kind, (world // trainer_ranks, trainer_ranks), mesh_dim_names=("copies", "tp"))
    rollout = ordered(model, init_device_mesh(kind, (world,)))
    trainer = ordered(model, trainers["tp"])
    given = tokens, lengths, weights
    report = {"pydet": this.compare_rollouts(rollout, trainer, *given, this.PYDET, batches)}
    found, took = {}, {}
    for name, one in (("rollout", rollout), ("trainer", trainer)):
        gradients, took[name], _ = this.gradients(one, tokens, lengths, weights, 1, this.PYDET)
        found[name] = {key: g.full_tensor() if hasattr(g, "full_tensor") else g for key, g in gradients.items()}
    report["pydet"][f"gradients on {world} ranks and on {trainer_ranks}"] = {
        "elements": sum(g.numel() for g in found["trainer"].values()),
        "differ": sum(this.differing(g, found["rollout"][key]) for key, g in found["trainer"].items()),
        "ms a step": [round(1e3 * took[name], 2) for name in ("rollout", "trainer")],
    }
    del rollout, trainer, found, gradients
    report["torch, all-reduces"] = this.compare_rollouts(all_reduced(model), model, *given, this.TORCH, batches)
    return report


def main(this, trainer_ranks, out):
    device, world = start()
    config = this.Config() if device.type == "cuda" else this.Config(256, 128, 256, 2, 8, 2, max_length=8)
    if world % trainer_ranks or SEGMENTS % world:
        raise SystemExit(
            f"{world} ranks, {trainer_ranks} of the trainer: want divisors of {SEGMENTS} and of the former"
        )
    given = this.drawn(config, device)
    report = {
        "ranks": world,
        "ranks of the trainer": trainer_ranks,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "pydet": pydet.__version__, "NUMERICS": pydet.NUMERICS},
        "model": asdict(config),
    }
    report |= compare(this, given[0], trainer_ranks, *given[1:])
    wrong = this.wrong(report["pydet"].values())
    if dist.get_rank() == 0:
        print(json.dumps(report, indent=2))
        print(f"with pydet {wrong} things differ between {world} ranks and {trainer_ranks}", flush=True)
        if out:
            out.write_text(json.dumps(report, indent=2) + "\n")
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
        os._exit(1 if wrong else 0)  # captured graphs are in NCCL's way as it clears up
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(1)
