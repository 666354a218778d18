"""A model cut into stages, one a process (torch.distributed.pipelining): its training has the bits of one process.

The micro-batches of a step go through the stages one after the other, forward and backward; so main_grad of
accumulate_gradients is continued in their order on each stage, as it is where one process makes them in turn.
"""

import os
import traceback

import pytest

torch = pytest.importorskip("torch")
from test_torch_distributed import found_by, free_port, start  # noqa: E402

WIDTH, MICRO_BATCHES, STEPS = 24, 4, 3
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")


def layers():
    import pydet.torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, WIDTH), torch.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, 64), torch.nn.SiLU(),
        torch.nn.Linear(64, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 8),
    )  # fmt: skip
    pydet.torch.convert(model)
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4 * MICRO_BATCHES, n, generator=generator) for n in (16, 8)] for _ in range(STEPS)]


def loss_of(y, want):
    return (y - want).square().mean()


def trained(model, step, stages=None):
    """Losses and parameters, as numbers, after some steps of `step(x, want) -> losses`."""
    import pydet.torch
    from pydet.torch.distributed import clip_grad_norm_

    parameters = pydet.torch.accumulate_gradients(model)
    optimizer, losses, norms = pydet.torch.AdamW(parameters, lr=1e-2), [], []
    for x, want in batches():
        optimizer.zero_grad()
        losses += step(x, want)
        norms.append(clip_grad_norm_(parameters, 0.5, stages=stages).item())
        optimizer.step()
    return losses, norms, [p.detach().view(torch.int32).flatten().tolist() for p in model.parameters()]


def one_process():
    model = layers()

    def step(x, want):
        losses = []
        for own, its in zip(x.chunk(MICRO_BATCHES), want.chunk(MICRO_BATCHES), strict=True):
            loss = loss_of(model(own), its)
            loss.backward()
            losses.append(loss.item())
        return losses

    return trained(model, step)


def stage_main(rank, world, schedule, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYDET_NUM_THREADS="1")
    try:
        import torch.distributed as dist
        import torch.distributed.pipelining as pipelining

        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world)
        each = 8 // world
        model = layers()[rank * each : (rank + 1) * each]
        # Without shapes PyTorch finds them by a forward and a backward pass, which main_grad would keep.
        given = torch.zeros(4, 16) if rank == 0 else torch.zeros(4, model[0].weight.shape[-1], requires_grad=True)
        shapes = {"input_args": (given,), "output_args": (model(given),)}
        stage = pipelining.PipelineStage(model, rank, world, torch.device("cpu"), **shapes)
        kind = getattr(pipelining, schedule)
        runs = kind(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)

        def step(x, want):
            losses = []
            first, last = rank == 0, rank == world - 1
            runs.step(*([x] if first else []), **({"target": want, "losses": losses} if last else {}))
            return [loss.item() for loss in losses]

        queue.put((rank, trained(model, step, dist.group.WORLD), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


@pytest.fixture(scope="module")
def alone():
    return one_process()


@pytest.mark.parametrize(("world", "schedule"), [(2, SCHEDULES[0]), (4, SCHEDULES[1])])
def test_stages_train_as_one_process_does(world, schedule, alone):
    found = found_by(*start(world, stage_main, world, schedule, free_port()))
    losses, norms, parameters = alone
    assert losses[0] != losses[-1] and max(norms) > 0.5 and len(losses) == STEPS * MICRO_BATCHES
    assert found[world - 1][0] == losses
    assert all(rank[1] == norms for rank in found)
    assert [p for rank in found for p in rank[2]] == parameters
