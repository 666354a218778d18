"""A model on any number of ranks, tensor and data parallel, whose bits are those of one rank.

    torchrun --nproc-per-node 1 examples/parallel.py --save one.json      # the trainer, say
    torchrun --nproc-per-node 8 examples/parallel.py --compare one.json   # the rollout's engine, say: 0 differ
    torchrun --nproc-per-node 8 examples/parallel.py --compare one.json --tp 4 --all-reduce

Each rank is a GPU where there are as many, over NCCL; else a process on the CPU, over gloo. A small transformer's MLPs
with their norms take 4 micro-batches: outputs, then gradients summed over the micro-batches. Printed: how many of both
differ in bits from the ones that were saved. --tp shares the rest of the ranks out over the data. --all-reduce does it
all once more, with layers as they are usually written: the control.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

import pydet.torch
import pydet.torch.distributed as pd

SEGMENTS, LAYERS, WIDTH, INNER, ROWS, MICRO_BATCHES = 8, 2, 128, 512, 32, 4


class Mlp(torch.nn.Module):
    """x + down(silu(gate(n)) up(n)), n the norm of x. The linear layers' styles decide where their weights lie."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.gate, self.up = (torch.nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        n = pydet.torch.rms_norm(x, self.norm, eps=1e-6)
        return x + self.down(functional.silu(self.gate(n)) * self.up(n))


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        total = y.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class AllReduced(torch.nn.Module):
    """A row-wise layer as it is usually written: each rank's product, and an all-reduce of them."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight, self.group = linear.weight, group

    def forward(self, x):
        return AllReduce.apply(pydet.torch.linear(x, self.weight.to_local()), self.group)


def words(x):
    """The bits of each element."""
    return x.detach().cpu().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).flatten().tolist()


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def steps(mesh, device, all_reduce):
    """The bits of the outputs of all micro-batches, and of the sum of their gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Mlp() for _ in range(LAYERS)))
    batches = torch.randn(MICRO_BATCHES, ROWS, WIDTH).bfloat16()  # on the CPU, so that every machine draws the same
    model, batches = model.bfloat16().to(device), batches.to(device)
    columns, rows = pd.ColwiseParallel(SEGMENTS), pd.RowwiseParallel(SEGMENTS)
    parallelize_module(model, mesh["tp"], {"*.gate": columns, "*.up": columns, "*.down": rows})
    if all_reduce:
        for layer in model:
            layer.down = AllReduced(layer.down, mesh.get_group("tp"))

    # Micro-batches are dealt round robin over the data parallel ranks, and their gradients summed in their order.
    dp, group, parallel = mesh["dp"].get_local_rank(), mesh.get_group("dp"), mesh["dp"].size()
    outputs, totals = [], None
    for first in range(0, MICRO_BATCHES, parallel):
        model.zero_grad()
        y = model(batches[first + dp])
        y.backward(batches[first + dp])
        everyone = [torch.empty_like(y) for _ in range(parallel)]
        dist.all_gather(everyone, y.detach(), group=group)
        outputs += everyone
        flat = torch.cat([whole(p.grad).float().flatten() for p in model.parameters()])
        if totals is None:
            totals = torch.zeros(len(flat) // parallel, device=device)
        pd.reduce_scatter(flat, totals, group=group)
    shards = [torch.empty_like(totals) for _ in range(parallel)]
    dist.all_gather(shards, totals, group=group)
    return {"outputs": words(torch.stack(outputs)), "gradients": words(torch.cat(shards))}


def start():
    """(the device, the number of ranks), in a process that torchrun has started."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    return device, world


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tp", type=int, help="ranks of a tensor parallel group, all by default; the rest is data parallel"
    )
    parser.add_argument("--save", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--all-reduce", action="store_true")
    given = parser.parse_args()
    device, world = start()
    tp = given.tp or world
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))

    saved = json.loads(given.compare.read_text()) if given.compare else None
    for all_reduce in (False, True) if given.all_reduce else (False,):
        found = steps(mesh, device, all_reduce)
        if dist.get_rank():
            continue
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
        how = "all-reduced" if all_reduce else "ordered"
        print(f"{world} ranks, tensor parallel {tp}, data parallel {world // tp}, {device.type}, {how}: {digest}")
        if given.save and not all_reduce:
            given.save.write_text(json.dumps(found))
        for name, mine in found.items() if saved else ():
            differ = sum(a != b for a, b in zip(mine, saved[name], strict=True))
            print(f"{name}: {differ} of {len(mine)} differ")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
