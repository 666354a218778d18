"""torch.ops.pydet.* on DTensors: every placement has the bits of one process, and no result is a partial sum."""

import itertools
import os
import traceback
from types import SimpleNamespace

import pytest

from test_torch_distributed import free_port, start, tensors

WORLD = 2
PRODUCTS = {  # shapes of the operands and of the bias
    "gemm": ((8, 32), (32, 16), (16,)),
    "gemm batched": ((4, 8, 32), (4, 32, 16), (4, 8, 16)),
    "gemm of one matrix": ((4, 8, 32), (32, 16), (16,)),
    "gemm_from": ((8, 32), (32, 16), (8, 16)),  # what it begins at, in place of a bias
    "gemm_da": ((8, 16), (32, 16), None),
    "gemm_db": ((32, 8), (32, 16), None),
    "skinny_gemm": ((4, 8, 32), (16, 32), (16,)),
}
ROWS = {  # what else than rows: the rest of the arguments
    "rmsnorm": ((8, 12, 32), [(32,)], (1e-5,)),
    "rmsnorm_residual": ((8, 12, 32), [(8, 12, 32), (32,)], (1e-5,)),
    "softmax": ((8, 12, 32), [], ()),
    "log_softmax": ((8, 12, 32), [], ()),
    "softmax_backward": ((8, 12, 32), [(8, 12, 32)], ()),
    "layernorm": ((8, 12, 32), [(32,), (32,)], (1e-5,)),
    "layernorm_residual": ((8, 12, 32), [(8, 12, 32), (32,), (32,)], (1e-5,)),
}

SHARED = {  # places that some result has
    "gemm": ["R", "S(0)", "S(1)"],
    "gemm batched": ["S(0)", "S(1)", "S(2)"],
    "gemm of one matrix": ["S(0)", "S(1)", "S(2)"],
    "gemm_from": ["R", "S(0)", "S(1)"],
    "skinny_gemm": ["S(0)", "S(1)", "S(2)"],
    "rmsnorm": ["R", "S(0)", "S(1)"],
    "softmax": ["S(0)", "S(1)"],
    "layernorm": ["R", "S(0)", "S(1)"],
    "layernorm_backward": ["R", "S(0)"],
    "attention": ["S(0)", "S(1)", "S(2)"],
    "attention of odd heads": ["S(0)", "S(2)"],
    "attention, causal": ["S(0)", "S(1)"],
    "attention of odd heads, causal": ["S(0)"],
    "attention_backward": ["S(1)"],
    "attention_backward, no sinks": ["S(0)", "S(1)"],
    "scaled_gemm row": ["S(0)", "S(1)"],
    "scaled_gemm group": ["S(0)", "S(1)"],
    "quantize row": ["R", "S(0)", "S(1)"],
    "quantize group": ["S(0)", "S(1)", "S(2)"],
    "quantize block": ["S(0)", "S(1)", "S(2)"],
    "quantize_transposed group": ["S(0)", "S(1)", "S(2)"],
    "quantize_transposed block": ["S(0)", "S(1)", "S(2)"],
    "grouped_gemm": ["R", "S(1)"],
    "scaled_grouped_gemm row": ["R", "S(1)"],
    "scaled_grouped_gemm block": ["R", "S(1)"],
}


def part_of(x, placement, rank):
    """A rank's part of x, as DTensor cuts it."""
    if not placement.is_shard():
        return x
    parts = x.chunk(WORLD, placement.dim)
    return parts[rank] if rank < len(parts) else x.narrow(placement.dim, 0, 0)


def operators(mesh, placed):
    """Each operator with its operands placed in every way: how many of them did not have the bits of one process."""
    import torch
    from torch.distributed.tensor import Replicate, Shard

    bytes_of = lambda x: x.contiguous().view(-1).view(torch.uint8)

    def check(name, arguments, rest, most, places=None):
        overload = getattr(torch.ops.pydet, name.split()[0])
        want = overload(*arguments, *rest)
        rest = [placed(x, Replicate()) if isinstance(x, torch.Tensor) else x for x in rest]
        want = want if isinstance(want, tuple) else (want,)
        if places is None:
            each = [[Replicate(), *map(Shard, range(x.dim()))] if x is not None else [None] for x in arguments]
            places = itertools.product(*each)
        differ, partial, seen = 0, 0, set()
        for number, where in enumerate(places):
            if number % max(1, most):
                continue
            got = overload(*(x if p is None else placed(x, p) for x, p in zip(arguments, where, strict=True)), *rest)
            for y, one in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
                (place,) = y.placements
                mine = part_of(one, place, mesh.get_local_rank())
                differ += not bytes_of(y.to_local()).equal(bytes_of(mine))
                partial += any(p.is_partial() for p in y.placements)
                seen |= {str(p) for p in y.placements}
        assert differ == 0 and partial == 0, f"{name}: {differ} differ, {partial} are partial"
        return sorted(seen)

    for name, (a, b, bias) in PRODUCTS.items():
        given = tensors(1, a, b, *([bias] if bias else []), dtype=torch.float32)
        yield name, check(name, given, (), 5 if len(b) == 3 else 1)
    for name, (x, others, rest) in ROWS.items():
        yield name, check(name, tensors(2, x, *others, dtype=torch.float32), rest, 2 if others else 1)
    x, w, dy = tensors(3, (8, 32), (32,), (8, 32), dtype=torch.float32)
    for weight in (w, None):
        rstd = torch.ops.pydet.rmsnorm(x, weight, 1e-5)[1]
        yield "rmsnorm_backward", check("rmsnorm_backward", [dy, x, weight, rstd], (), 1)
        _, mean, rstd = torch.ops.pydet.layernorm(x, weight, weight, 1e-5)
        yield "layernorm_backward", check("layernorm_backward", [dy, x, weight, weight, mean, rstd], (), 5)
    yield from attentions(check)
    yield from products_of_fp8(check)
    a, b = tensors(5, (8, 32), (2, 32, 16), dtype=torch.float32)
    yield "grouped_gemm", check("grouped_gemm", [a, b, torch.tensor([3, 8], dtype=torch.int32)], (), 1)


def attentions(check):
    """With a mask, with sinks and without, and heads that two ranks do not divide."""
    import torch

    for name, heads, groups in (("", 4, 2), (" of odd heads", 3, 3)):
        q, k, v, dout = tensors(6, *[(4, h, 6, 16) for h in (heads, groups, groups, heads)], dtype=torch.float32)
        allowed, options = torch.ones(4, 1, 6, 6, dtype=torch.bool).tril(), (0.25, "auto", None)
        sinks = torch.linspace(-1, 1, heads)
        for with_sinks in (None, sinks):
            rest = (*options, with_sinks)
            yield f"attention{name}", check("attention", [q, k, v, allowed], rest, 7)
            causal = check("attention", [q, k, v, allowed], (*rest, *[None] * (4 - len(rest)), None, True), 7)
            yield f"attention{name}, causal", causal
        out, lse = torch.ops.pydet.attention(q, k, v, allowed, *options, sinks)
        given = [dout, q, k, v, allowed, out, lse]
        if not name:
            yield "attention_backward", check("attention_backward", given, (*options[:2], sinks), 1201)
            out, lse = torch.ops.pydet.attention(q, k, v, allowed, *options)
            given[5:] = out, lse
            yield "attention_backward, no sinks", check("attention_backward", given, options[:2], 1201)


def products_of_fp8(check):
    import torch
    from torch.distributed.tensor import Replicate, Shard

    x, w = tensors(7, (4, 256, 512), (256, 512), dtype=torch.bfloat16)
    for granularity in ("row", "group"):
        yield f"rmsnorm_quantize {granularity}", check("rmsnorm_quantize", [x, None], (1e-5, 0.0, granularity), 1)
        given = [x, x.flip(0), w[0]]
        yield "rmsnorm_quantize_residual", check("rmsnorm_quantize_residual", given, (1e-5, 0.0, granularity), 3)
    for granularity in ("row", "group", "block", "tensor"):
        for name in ("quantize", "quantize_transposed") if granularity in ("group", "block") else ("quantize",):
            yield f"{name} {granularity}", check(name, [x], (granularity,), 1)
        q, scale = torch.ops.pydet.quantize(x[0], granularity)
        yield "quantize_given", check("quantize_given", [x[0], scale], (granularity,), 2)
        if granularity != "block":
            b, b_scale = torch.ops.pydet.quantize(w, "block" if granularity == "group" else granularity)
            given = [q, b.t(), scale, b_scale.t() if b_scale.dim() else b_scale]
            every, scaled = Replicate(), scale.dim() > 0  # no gather: gloo carries no float8
            places = [(every,) * 4, (Shard(0), every, Shard(0) if scaled else every, every)]
            places.append((every, Shard(1), every, Shard(1) if scaled else every))
            yield f"scaled_gemm {granularity}", check("scaled_gemm", given, (), 1, places)
    (experts,), ends = tensors(8, (2, 256, 512), dtype=torch.bfloat16), torch.tensor([100, 256], dtype=torch.int32)
    for granularity in ("row", "block"):
        q, scale = torch.ops.pydet.quantize(x[0], "group" if granularity == "block" else granularity)
        b, b_scale = torch.ops.pydet.quantize(experts, granularity)
        places = [(every,) * 5, (every, Shard(2), every, every, Shard(2))]
        given = [q, b.mT, ends, scale, b_scale.mT]
        yield f"scaled_grouped_gemm {granularity}", check("scaled_grouped_gemm", given, (), 1, places)


def styles(mesh, placed):
    """PyTorch's own parallel styles over pydet's modules: results and gradients of one process."""
    import copy

    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    import pydet.torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32), torch.nn.RMSNorm(32))
    pydet.torch.convert(model)
    one, (x,) = copy.deepcopy(model), tensors(4, (4, 8, 32), dtype=torch.float32)
    given = x.clone().requires_grad_()
    want = one(given)
    want.square().sum().backward()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(1)), "3": SequenceParallel()}
    parallelize_module(model, mesh, plan)
    mine = x.clone().requires_grad_()
    y = model(mine).full_tensor()
    y.square().sum().backward()
    assert y.equal(want) and mine.grad.equal(given.grad)
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        assert p.grad.full_tensor().equal(q.grad), name
    yield "styles", [str(p.placements) for p in model.parameters()]


def work(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYDET_NUM_THREADS="1")
    try:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        import pydet.torch.distributed

        assert pydet.torch.distributed
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=WORLD)
        mesh = init_device_mesh("cpu", (WORLD,))

        def placed(x, placement):
            """Every rank has x, and takes its part: gloo would carry no float8."""
            own = part_of(x, placement, rank)
            return DTensor.from_local(own, mesh, [placement], run_check=False, shape=x.shape, stride=x.stride())

        found = dict(itertools.chain(operators(mesh, placed), styles(mesh, placed)))
        queue.put((rank, found, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, {}, traceback.format_exc()))


def test_every_placement_has_the_bits_of_one_process():
    pytest.importorskip("torch")
    processes, queue = start(WORLD, work, free_port())
    for _ in processes:
        rank, found, problem = queue.get(timeout=120)
        assert problem is None, f"rank {rank}:\n{problem}"
        # What is shared out stays so where no sum runs along it: else all would be right, and nothing parallel.
        for name, places in SHARED.items():
            assert set(places) <= set(found[name]), f"{name}: {found[name]}"
    for process in processes:
        process.join(30)


def test_columns_are_shared_out_with_their_scales():
    """Not where a rank would end inside a block of 128 columns, which has one scale, or where the last is not whole."""
    pytest.importorskip("torch")
    from pydet.torch.distributed.sharding import _columns_share

    def share(columns, of_scale, ranks):
        b = SimpleNamespace(shape=(3, 512, columns), mesh=SimpleNamespace(size=lambda: ranks))
        return _columns_share(b, None if of_scale is None else SimpleNamespace(shape=of_scale))

    for of_scale in (None, (), (3, 1, 320), (1, 320), (3, 4, 320)):
        assert share(320, of_scale, 2), f"a scale a column, or one of all: {of_scale}"
    assert share(256, (3, 4, 2), 2) and share(512, (4, 4), 2) and share(512, (4, 4), 4) and share(384, (3, 4, 3), 3)
    assert not share(256, (3, 4, 2), 4), "a block of two ranks"
    assert not share(384, (3, 4, 3), 2), "three blocks on two ranks"
    assert not share(320, (3, 4, 3), 2) and not share(320, (3, 4, 3), 3), "the last block is not whole"
