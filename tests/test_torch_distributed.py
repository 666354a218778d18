"""pydet.torch.distributed over gloo: the same bits on 1, 2, 4 and 8 processes, and refusals that reach every rank.

Eight processes are started once. Each check runs in groups of the first 1, 2, 4 and 8 of them, and gives whole tensors,
put together from the ranks' parts: all must have the bits of the group of one. Controls by all_reduce must not.
"""

import contextlib
import datetime
import hashlib
import io
import json
import multiprocessing
import os
import pathlib
import re
import runpy
import socket
import sys
import time
import traceback
from queue import Empty

import pytest

WORLD = 8
SIZES = (1, 2, 4, 8)
SEGMENTS = 8
COLLECTIVES = ["auto", "one_shot", "two_shot", "chain"]
BY_PEERS = ["peer_one_shot", "peer_two_shot", "peer_stream"]
MESHES = {"1x2": (2, 1), "1x4": (4, 1), "1x8": (8, 1), "2x2": (2, 2), "4x2": (2, 4)}  # TP x DP -> (dp, tp)
TIME_LIMIT = 240

# ---- What each process runs ----------------------------------------------------------------------------------------


def tensors(seed, *shapes, dtype):
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes]
    return [x.to(torch.get_default_device()) for x in drawn]


def integers(most, shape, seed):
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, most, shape, generator=generator, device="cpu").to(torch.get_default_device())


def methods_of(group, rows):
    """Those that this group can run on so many rows: by force, beside "auto"."""
    import torch
    import torch.distributed as dist

    from pydet.torch.distributed.symmetric import peers_of

    peers = peers_of(group, torch.get_default_device())
    world = dist.get_world_size(group)
    if peers is None:
        return [*COLLECTIVES, "relay"]
    more = ["push"] * (rows % world == 0) + ["relay"] * (world == 2)
    return COLLECTIVES + BY_PEERS + more * peers.pushes


def columns(x, group, extent=None):
    """This rank's columns of x, with a gradient to come."""
    import torch.distributed as dist

    from pydet.torch.distributed import shard_bounds

    begin, end = shard_bounds(x.shape[1], SEGMENTS, dist.get_rank(group), dist.get_world_size(group))
    return x[:, begin:end].clone().requires_grad_()


def whole(x, group, dim=0):
    """The ranks' parts of a tensor, one after the other; they may differ in their extent."""
    import torch
    import torch.distributed as dist

    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, x.detach().cpu(), group=group)
    return torch.cat(parts, dim).to(x.device)


def linears(group):
    """Row- and column-parallel linear layers by every method: results and gradients."""
    import torch

    import pydet
    import pydet.torch.distributed as pd

    yield "methods", methods_of(group, 8)
    for arithmetic, dtype in (("sm90", torch.bfloat16), ("ieee", torch.float32)):
        for m, n, k in ((1, 128, 1024), (24, 40, 2880)):
            x, w, b, dy = tensors(m + n, (m, k), (n, k), (n,), (m, n), dtype=dtype)
            options = {"group": group, "segments": SEGMENTS, "arithmetic": arithmetic}
            one = pydet.gemm(x, w.t(), bias=b, k_chunk=pd.segment_length(k, SEGMENTS), arithmetic=arithmetic)
            for method in methods_of(group, m):
                xr, wr, br = columns(x, group), columns(w, group), b.clone().requires_grad_()
                y = pd.row_parallel_linear(xr, wr, br, in_features=k, method=method, **options)
                assert y.view(torch.uint8).equal(one.view(torch.uint8)), f"{method} {m}x{n}x{k} {arithmetic}"
            y.backward(dy)
            name = f"{arithmetic} {m}x{n}x{k}"
            yield f"row {name}", y
            yield f"row dx {name}", whole(xr.grad, group, 1)
            yield f"row dw {name}", whole(wr.grad, group, 1)
            yield f"row db {name}", br.grad
            # K = n is summed on every rank, N = k columns are shared out.
            wr, dyr = columns(w, group).detach().t().contiguous().requires_grad_(), columns(x, group).detach()
            xr = dy.clone().requires_grad_()
            y = pd.column_parallel_linear(xr, wr, out_features=k, **options)
            y.backward(dyr)
            yield f"column {name}", whole(y, group, 1)
            yield f"column dx {name}", xr.grad
            yield f"column dw {name}", whole(wr.grad, group)


def shared_rows(group):
    """Sequence parallel: y's rows stay where they are, x's rows are gathered."""
    import torch
    import torch.distributed as dist

    import pydet.torch.distributed as pd

    x, w, v, dz = tensors(5, (16, 512), (64, 512), (256, 64), (16, 256), dtype=torch.bfloat16)
    options = {"group": group, "segments": SEGMENTS, "arithmetic": "sm90"}
    xr, wr = columns(x, group), columns(w, group)
    begin, end = pd.shard_bounds(256, SEGMENTS, dist.get_rank(group), dist.get_world_size(group))
    vr = v[begin:end].clone().requires_grad_()
    y = pd.row_parallel_linear(xr, wr, out="shard_rows", **options)
    assert y.shape[0] == 16 // dist.get_world_size(group)
    z = pd.column_parallel_linear(y, vr, rows="shard_rows", **options)
    z.backward(dz[:, begin:end])
    yield "rows y", whole(y, group)
    yield "rows z", whole(z, group, 1)
    for name, x, dim in (("dx", xr, 1), ("dw", wr, 1), ("dv", vr, 0)):
        yield f"rows {name}", whole(x.grad, group, dim)


def sums(group):
    """all_reduce in both orders by every method, reduce_scatter by rounds."""
    import torch
    import torch.distributed as dist

    import pydet
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    for elements in (7, 1000):
        (parts, bias) = tensors(elements, (16, 3, elements), (elements,), dtype=torch.float32)
        own = parts.chunk(world)[rank]
        by_peers = [name for name in methods_of(group, 1) if name.startswith("peer")]
        for order, methods in (("ordered", ["one_shot", "two_shot", "chain"]), ("tree", ["one_shot", "halving"])):
            want = pydet.fold(parts, bias=bias, order=order, out_dtype=torch.bfloat16)
            for method in ("auto", *methods, "two_shot", *(by_peers if order == "ordered" else by_peers[:2])):
                options = {"group": group, "bias": bias, "out_dtype": torch.bfloat16, "order": order, "method": method}
                assert pd.all_reduce(own, **options).equal(want), f"{order} {method} {elements}"
            yield f"{order} {elements}", want
    (gradients,) = tensors(9, (8, 1024), dtype=torch.float32)  # of 8 micro-batches
    shard = torch.zeros(1024 // world)
    for some in range(0, 8, world):
        pd.reduce_scatter(gradients[some + rank], shard, group=group)
    yield "reduce_scatter", whole(shard, group)
    assert whole(shard, group).equal(pydet.fold(gradients))


def large_sums(group):
    """Sums that take the kernels of peers several rounds, in memory at any address; again and again, without a wait."""
    import torch
    import torch.distributed as dist

    import pydet
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    methods = [name for name in methods_of(group, 1) if name.startswith("peer")]
    for elements in (1 << 20, (5 << 20) + 64, (3 << 20) + 5, 1 << 18, 4096, 9):
        (parts,) = tensors(elements, (16, elements), dtype=torch.float32)
        (bias,) = tensors(1, (elements,), dtype=torch.float32)
        own = parts.chunk(world)[rank].unsqueeze(1)
        for order in ("ordered", "tree"):
            want = pydet.fold(parts.unsqueeze(1), bias=bias, order=order, out_dtype=torch.bfloat16)
            for method in methods if order == "ordered" else methods[:2]:
                options = {"group": group, "bias": bias, "out_dtype": torch.bfloat16, "order": order, "method": method}
                results = [pd.all_reduce(own, **options) for _ in range(5)]
                assert all(x.equal(want) for x in results), f"{order} {method} {elements}"
            yield f"large {order} {elements}", want
        flat = parts[rank, : elements // world * world]
        shard, again = torch.zeros(elements // world), torch.zeros(elements // world)
        for _ in range(3):
            pd.reduce_scatter(flat, shard, group=group)
        mine = parts[:world, rank * len(shard) : (rank + 1) * len(shard)].contiguous()
        for _ in range(3):
            pydet.fold(mine, out=again, accumulate=True)
        assert shard.equal(again), f"reduce_scatter {elements}"


def streams(group):
    """Calls of a group on four streams, by every method that GPUs have; this rank's sleep now and then."""
    import random

    import torch
    import torch.distributed as dist

    import pydet
    import pydet.torch.distributed as pd

    own, draw = random.Random(dist.get_rank(group)), random.Random(0)
    all_streams = [torch.cuda.Stream() for _ in range(4)]
    problems = []
    for m, n, k in ((64, 256, 2048), (128, 520, 1024)):
        x, w = tensors(m, (m, k), (n, k), dtype=torch.bfloat16)
        one = pydet.gemm(x, w.t(), k_chunk=k // SEGMENTS)
        problems.append((columns(x, group).detach(), columns(w, group).detach(), one, k))
    wrong = torch.zeros(4, dtype=torch.int64)
    for method in methods_of(group, 64):
        for x, w, _, k in problems:
            pd.row_parallel_linear(x, w, in_features=k, method=method, group=group)
    torch.cuda.synchronize()
    for _ in range(400):
        number, (x, w, one, k) = draw.randrange(4), draw.choice(problems)
        with torch.cuda.stream(all_streams[number]):
            if own.random() < 0.1:
                torch.cuda._sleep(own.randint(1000, 1000000))
            y = pd.row_parallel_linear(x, w, in_features=k, method=draw.choice(methods_of(group, 64)), group=group)
            wrong[number] += (y.view(torch.int16) != one.view(torch.int16)).sum()
    torch.cuda.synchronize()
    assert not wrong.any(), wrong
    if "push" in methods_of(group, 64):
        graph = torch.cuda.CUDAGraph()
        sentence = "method is 'push' under graph capture"
        with pytest.raises(pydet.Error, match=sentence), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            pd.row_parallel_linear(x, w, in_features=k, method="push", group=group)
    yield "streams", wrong


def graphs(group):
    """A step of two layers in one graph, of rows of which two ranks relay: twice as it is, and eagerly."""
    import torch

    import pydet.torch.distributed as pd

    m, n, k = 2048, 256, 1024
    x, w1, w2 = tensors(m, (m, n), (k, n), (n, k), dtype=torch.bfloat16)
    leaves = [x.requires_grad_(), columns(w1.t(), group).detach().t().contiguous().requires_grad_(), columns(w2, group)]

    def step():
        y = pd.row_parallel_linear(pd.column_parallel_linear(*leaves[:2], group=group), leaves[2], group=group)
        return [y.detach(), *torch.autograd.grad(y, leaves, x)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            captured = step()
        for _ in range(2):
            for made in captured:
                made.zero_()
            graph.replay()
        again = step()
    torch.cuda.synchronize()
    pd.check_exchanges(group=group)
    for name, a, b, c in zip(("y", "dx", "dw1", "dw2"), captured, eager, again, strict=True):
        assert a.view(torch.int16).equal(b.view(torch.int16)) and c.view(torch.int16).equal(b.view(torch.int16)), name
    yield "graph y", captured[0]
    yield "graph dx", captured[1]


def along_rows(group):
    """The norm of shared rows, the log-probability over a shared vocabulary, with gradients."""
    import torch
    import torch.distributed as dist

    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    x, dy, weight = tensors(1, (2048, 40), (2048, 40), (40,), dtype=torch.bfloat16)
    xr, wr = x.chunk(world)[rank].clone().requires_grad_(), weight.clone().requires_grad_()
    y = pd.rms_norm(xr, wr, eps=1e-6, group=group)
    y.backward(dy.chunk(world)[rank])
    yield "norm", whole(y, group)
    yield "norm dx", whole(xr.grad, group)
    yield "norm dweight", wr.grad
    logits, gradient = tensors(2, (20, 1024), (20,), dtype=torch.float32)
    index = integers(1024, (20,), 3)
    index[:2] = torch.tensor([-1, 1024])
    xr = logits.chunk(world, 1)[rank].clone().requires_grad_()
    log_p = pd.vocab_parallel_log_prob(xr, index, group=group, segments=SEGMENTS)
    log_p.backward(gradient)
    dx = whole(xr.grad, group, 1)
    exact = logits.double().requires_grad_()
    picked = exact.log_softmax(-1)[torch.arange(2, 20), index[2:]]
    picked.backward(gradient[2:].double())
    assert log_p[:2].isnan().all() and not dx[:2].any()
    assert (log_p[2:] - picked).abs().max() < 2e-6 and (dx - exact.grad).abs().max() < 1e-6
    yield "log_prob", log_p
    yield "log_prob dx", dx


def mixtures(group):
    """Experts that are shared out, over tokens that are, unevenly; one without tokens, slots without an expert."""
    import torch
    import torch.distributed as dist

    import pydet.torch.distributed as pd

    world, rank, experts = dist.get_world_size(group), dist.get_rank(group), 16
    x, up, down, dy = tensors(6, (90, 32), (experts, 32, 24), (experts, 24, 40), (90, 40), dtype=torch.bfloat16)
    (weights,) = tensors(7, (90, 3), dtype=torch.float32)
    index = integers(experts - 1, (90, 3), 8)
    index[5, 1], index[80] = -1, torch.tensor([experts, 0, experts + 7])
    xr, dyr, ir, weights_r = (t.tensor_split(world)[rank] for t in (x, dy, index, weights))
    xr, weights_r = xr.clone().requires_grad_(), weights_r.clone().requires_grad_()
    own = [w.chunk(world)[rank].clone().requires_grad_() for w in (up, down)]

    def layers(rows, ends):
        for w in own:
            rows = torch.ops.pydet.grouped_gemm(rows, w, ends, None, None, "sm90", None)
        return rows

    y = pd.expert_parallel(xr, ir, weights_r, layers, experts, group=group)
    y.backward(dyr)
    yield "experts", whole(y, group)
    yield "experts dx", whole(xr.grad, group)
    yield "experts dweights", whole(weights_r.grad, group)
    for name, w in zip(("up", "down"), own, strict=True):
        yield f"experts d{name}", whole(w.grad, group)
    y = y.detach()
    assert not whole(y, group)[80, 0].isnan() and whole(y, group).float().abs().sum() > 0


def shared_head(group):
    """From hidden states to the log-probability over a shared vocabulary, with gradients; chunks differ by ranks."""
    import torch
    import torch.distributed as dist

    import pydet
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    for dtype, how in ((torch.float32, {}), (torch.bfloat16, {"temperature": 0.8, "softcap": 4.0})):
        x, w, b, gradient = tensors(4, (40, 24), (128, 24), (128,), (40,), dtype=dtype)
        index = integers(128, (40,), 5)
        index[:2] = torch.tensor([-100, 128])
        xr, wr, br = (t.clone().requires_grad_() for t in (x, w.chunk(world)[rank], b.chunk(world)[rank]))
        options = {"group": group, "segments": SEGMENTS, "workspace": 1 << 28 if world == 1 else 11000 + 3000 * rank}
        y = pd.vocab_parallel_linear_log_prob(xr.view(4, 10, 24), wr, index.view(4, 10), br, **how, **options).view(40)
        y.backward(gradient)
        exact = [t.double().requires_grad_() for t in (x, w, b)]
        logits = torch.nn.functional.linear(*exact)
        if how:
            logits = 4.0 * torch.tanh(logits / 4.0) / 0.8
        else:
            of_columns = pd.column_parallel_linear(
                x, wr.detach(), br.detach(), group=group, segments=SEGMENTS, even=True
            )
            parallel = pd.vocab_parallel_log_prob(of_columns, index, group=group, segments=SEGMENTS)
            assert y.detach().view(torch.int32)[2:].equal(parallel.view(torch.int32)[2:])
        picked = logits.log_softmax(-1)[torch.arange(2, 40), index[2:]]
        picked.backward(gradient[2:].double())
        made = (y[2:], xr.grad, whole(wr.grad, group), whole(br.grad, group))
        for mine, other in zip(made, (picked, *(t.grad for t in exact)), strict=True):
            error = 5e-2 if how else 2e-5
            torch.testing.assert_close(mine.double(), other.detach(), rtol=error, atol=error)
        assert y[:2].isnan().all() and not xr.grad[:2].any()
        for name, value in zip(("y", "dx", "dw", "dbias"), (y, *made[1:]), strict=True):
            yield f"shared head {name} {dtype}", value
    for rows, segments in (
        (129, SEGMENTS) if world < SEGMENTS else (128, 9),
        (128, world + 1) if world > 1 else (3, 2),
    ):
        with pytest.raises(pydet.Error, match=r"^vocab_parallel_linear_log_prob: .*(in segments|segments)"):
            pd.vocab_parallel_linear_log_prob(
                x, tensors(1, (rows, 24), dtype=x.dtype)[0], index, segments=segments, group=group
            )


def together(group):
    """Fused gate and up, with gradients; two key heads under attention of eight segments; what they refuse."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    import pydet
    import pydet.torch
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    kind = torch.get_default_device().type
    mesh = DeviceMesh.from_group(group, kind)
    x, w, b, dy = tensors(11, (6, 48), (384, 48), (384,), (6, 384), dtype=torch.float32)
    parts = (256, 128)

    def run(style):
        linear = torch.nn.Linear(48, 384)
        linear.weight.data, linear.bias.data = w.clone(), b.clone()
        style._apply(linear, mesh)
        given = x.clone().requires_grad_()
        y = linear(given)
        gates, ups = y.split([256 // world, 128 // world], -1)
        own = [part.chunk(world, 1)[rank] for part in dy.split(parts, 1)]
        torch.autograd.backward([gates, ups], own)
        return linear, gates, ups, given.grad

    linear, gates, ups, dx = run(pd.ColwiseParallel(SEGMENTS, parts=parts, arithmetic="ieee"))
    yield "fused gate", whole(gates, group, 1)
    yield "fused up", whole(ups, group, 1)
    assert torch.cat([whole(gates, group, 1), whole(ups, group, 1)], 1).equal(
        pydet.gemm(x, w.t(), bias=b, arithmetic="ieee")
    )
    yield "fused dx", dx
    back = pd.segment_order(parts, SEGMENTS).argsort().to(x.device)
    assert whole(local(linear.weight), group)[back].equal(w)
    yield "fused dw", whole(local(linear.weight.grad), group)[back]
    yield "fused db", whole(local(linear.bias.grad), group)[back]
    if world == 1:  # in the order of the parts the sum is another one, which ranks could not share
        other = run(pd.ColwiseParallel(SEGMENTS, arithmetic="ieee"))[3]
        assert (other != dx).sum() > 50

    q, k, v, dz = tensors(12, (3, 16, 5, 8), (3, 2, 5, 8), (3, 2, 5, 8), (3, 16, 5, 8), dtype=torch.bfloat16)
    qr, kr, vr = (
        q.chunk(world, 1)[rank].clone().requires_grad_(),
        k.clone().requires_grad_(),
        v.clone().requires_grad_(),
    )
    keys, values = (pd.share_heads(t, segments=SEGMENTS, group=group) for t in (kr, vr))
    assert keys.shape[1] == SEGMENTS // world
    z = pydet.torch.attention(qr, keys, values, scale=0.25, arithmetic="ieee")
    z.backward(dz.chunk(world, 1)[rank])
    assert whole(z, group, 1).equal(pydet.torch.attention(q, k, v, scale=0.25, arithmetic="ieee"))
    yield "heads z", whole(z, group, 1)
    yield "heads dq", whole(qr.grad, group, 1)
    yield "heads dk", kr.grad
    yield "heads dv", vr.grad
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(*exact, scale=0.25, enable_gqa=True).backward(dz.double())
    assert (kr.grad - exact[1].grad).abs().max() < 0.05 and (vr.grad - exact[2].grad).abs().max() < 0.05

    x, w, dy = tensors(13, (6, 48), (512, 48), (6, 512), dtype=torch.bfloat16)  # q, k and v in one, as many key heads
    linear = torch.nn.Linear(48, 512, bias=False)
    linear.weight.data = w.clone()
    sizes = (256, 128, 128)
    pd.ColwiseParallel(SEGMENTS, parts=sizes, arithmetic="sm90")._apply(linear, mesh)
    given = x.clone().requires_grad_()
    split = linear(given).split([size // world for size in sizes], -1)
    torch.autograd.backward(split, [part.chunk(world, 1)[rank] for part in dy.split(sizes, 1)])
    qkv = torch.cat([whole(part, group, 1) for part in split], 1)
    assert qkv.equal(pydet.gemm(x, w.t(), arithmetic="sm90"))
    yield "fused qkv", qkv
    yield "fused qkv dx", given.grad
    order = pd.segment_order(sizes, SEGMENTS).argsort().to(x.device)
    yield "fused qkv dw", whole(local(linear.weight.grad), group)[order]
    for call, sentence in (
        (lambda: pd.share_heads(k[:, :1].expand(3, 3, 5, 8), group=group), "x has 3 heads, want a divisor of the 8"),
        (lambda: pd.share_heads(k, dim=4, group=group), "dim is 4, x has 4 dimensions"),
        (lambda: pd.segment_order((100, 28)), "the rows of a part is 100, want a multiple of the 8"),
        (lambda: pd.segment_order((8, 8)), "the parts have 16 rows in all, want a multiple of 128"),
        (lambda: run(pd.ColwiseParallel(SEGMENTS, parts=(128, 128))), "parts are [128, 128], want 384 rows in all"),
    ):
        with pytest.raises(pydet.Error, match=re.escape(sentence)):
            call()


def styles(group):
    """Layers of extents that 16 segments' steps do not divide: as many bits on any number of ranks; or on none."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    import pydet
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    mesh = DeviceMesh.from_group(group, torch.get_default_device().type)
    for dtype, arithmetic in ((torch.bfloat16, "sm90"), (torch.float32, "ieee")):
        for extent, rows in ((2880, 3), (1144, 70), (32064, 1), (1024, 5)):
            x, w, b, dy = tensors(extent, (rows, extent), (24, extent), (24,), (rows, 24), dtype=dtype)
            part = lambda t, dim=1: t.chunk(world, dim)[rank].contiguous()
            linear = torch.nn.Linear(extent, 24, dtype=dtype)
            linear.weight.data, linear.bias.data = w.clone(), b.clone()
            pd.RowwiseParallel(SEGMENTS, arithmetic=arithmetic)._apply(linear, mesh)
            given = part(x).requires_grad_()
            y = linear(given)
            y.backward(dy)
            of_segments = zip(x.chunk(SEGMENTS, 1), w.chunk(SEGMENTS, 1), strict=True)
            sums = [pydet.gemm(a, c.t(), out_dtype="float32", arithmetic=arithmetic) for a, c in of_segments]
            assert y.equal(pydet.fold(sums, bias=b, out_dtype=dtype)), f"{extent} {arithmetic}"
            if extent % (16 * SEGMENTS) == 0:  # today's bits
                assert y.equal(pydet.gemm(x, w.t(), bias=b, k_chunk=extent // SEGMENTS, arithmetic=arithmetic))
            name = f"{extent} {arithmetic}"
            yield f"style row {name}", y
            yield f"style row dx {name}", whole(given.grad, group, 1)
            yield f"style row dw {name}", linear.weight.grad.full_tensor()
            linear = torch.nn.Linear(24, extent, bias=False, dtype=dtype)
            linear.weight.data = w.t().contiguous()
            pd.ColwiseParallel(SEGMENTS, arithmetic=arithmetic)._apply(linear, mesh)
            given = dy.clone().requires_grad_()
            y = linear(given)
            y.backward(part(x))
            yield f"style column {name}", whole(y, group, 1)
            yield f"style column dx {name}", given.grad
            yield f"style column dw {name}", linear.weight.grad.full_tensor()
            assert given.grad.equal(pydet.fold(sums, out_dtype=dtype))

    def sentence(style, shape):
        linear = torch.nn.Linear(*shape, bias=False)
        before = linear.weight.detach().clone()
        with pytest.raises(pydet.Error) as refused:
            style._apply(linear, mesh)
        assert type(linear) is torch.nn.Linear and linear.weight.equal(before)
        return str(refused.value)

    wanted = "is 1145, want a multiple of the 8 segments"
    assert sentence(pd.ColwiseParallel(SEGMENTS), (16, 1145)) == f"ColwiseParallel: out_features {wanted}"
    assert sentence(pd.RowwiseParallel(SEGMENTS), (1145, 16)) == f"RowwiseParallel: in_features {wanted}"
    if world > 1:
        said = sentence(pd.ColwiseParallel(world + 1, parts=(16 * (world + 1),) * 2), (16, 32 * (world + 1)))
        assert said == f"ColwiseParallel: segments is {world + 1}, want a multiple of the {world} ranks of the group"


# ---- A model -------------------------------------------------------------------------------------------------------


def llama(mesh):
    """Two layers of a Llama (8 kv heads, 16 query heads), its linear layers parallel over the mesh."""
    import torch
    from torch.distributed.tensor.parallel import parallelize_module

    import pydet.torch
    import pydet.torch.distributed as pd

    tp = mesh.size()
    width, head, heads, ffn, vocabulary = 64, 16, 16, 256, 256

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            linear = lambda k, n: torch.nn.Linear(k, n, bias=False)
            self.q, self.k, self.v = linear(width, heads * head), linear(width, 128), linear(width, 128)
            self.o, self.gate, self.up = linear(heads * head, width), linear(width, ffn), linear(width, ffn)
            self.down = linear(ffn, width)
            self.norms = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(width) + 0.5) for _ in range(2)])

        def forward(self, x):
            rows, tokens, _ = x.shape
            y = pydet.torch.rms_norm(x, self.norms[0], eps=1e-6)
            q, k, v = (p(y).view(rows, tokens, -1, head).transpose(1, 2) for p in (self.q, self.k, self.v))
            causal = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
            mixed = pydet.torch.attention(q, k, v, causal, scale=0.25)
            x = x + self.o(mixed.transpose(1, 2).reshape(rows, tokens, -1))
            y = pydet.torch.rms_norm(x, self.norms[1], eps=1e-6)
            return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))

    class Llama(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(vocabulary, width)
            self.layers = torch.nn.ModuleList([Layer() for _ in range(2)])
            self.head = torch.nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Llama()
    assert all(n % tp == 0 for n in (heads, 8, ffn, vocabulary))
    columns, rows = pd.ColwiseParallel(SEGMENTS), pd.RowwiseParallel(SEGMENTS)
    plan = {f"layers.*.{name}": columns for name in ("q", "k", "v", "gate", "up")}
    return parallelize_module(model, mesh, plan | {"layers.*.o": rows, "layers.*.down": rows, "head": columns})


def local(x):
    return x.to_local() if hasattr(x, "to_local") else x


def model_step(tp_mesh, dp_group):
    """Logits, losses and all gradients of 8 micro-batches dealt over dp_group; clipped; as whole tensors."""
    import torch
    import torch.distributed as dist

    import pydet.torch.distributed as pd

    group, model = tp_mesh.get_group(), llama(tp_mesh)
    world, rank = (dist.get_world_size(dp_group), dist.get_rank(dp_group)) if dp_group else (1, 0)
    parameters = dict(model.named_parameters())
    count = sum(local(p).numel() for p in parameters.values())
    shard = torch.zeros(-(-count // world))
    tokens = integers(256, (8, 2, 17), 1)
    for some in range(0, 8, world):
        batch = tokens[some + rank]
        logits = model(batch[:, :-1])
        losses = -pd.vocab_parallel_log_prob(logits, batch[:, 1:], group=group, segments=SEGMENTS)
        model.zero_grad()
        losses.sum().backward()
        flat = torch.cat([local(p.grad).flatten() for p in parameters.values()])
        flat = torch.nn.functional.pad(flat, (0, -count % world))
        if dp_group:
            pd.reduce_scatter(flat, shard, group=dp_group)
        else:
            pd.reduce_scatter(flat, shard, group=ALONE)
        for i in range(world):  # what each rank of dp_group had
            pieces = [whole(logits, group, 2), losses.detach()]
            if dp_group:
                everyone = [None] * world
                dist.all_gather_object(everyone, [piece.cpu() for piece in pieces], group=dp_group)
                pieces = everyone[i]
            yield f"logits {some + i}", pieces[0]
            yield f"losses {some + i}", pieces[1]
    gradient = whole(shard, dp_group) if dp_group else shard
    for p, piece in zip(parameters.values(), gradient[:count].split([local(p).numel() for p in parameters.values()])):
        local(p.grad).copy_(piece.view_as(local(p)))
    yield "norm", pd.clip_grad_norm_(parameters.values(), 0.1, group=group, segments=SEGMENTS)
    for name, p in parameters.items():
        yield f"gradient of {name}", p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad


def wrapped(kind, mesh, group):
    """The gradients of 8 micro-batches by DDP or FSDP2 with pydet's hooks, and by DDP's own all-reduce."""
    import torch
    import torch.distributed as dist

    import pydet.torch
    import pydet.torch.distributed as pd

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.RMSNorm(128), torch.nn.Linear(128, 32, bias=False))
    pydet.torch.convert(model)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    (inputs,) = tensors(4, (8, 32, 64), dtype=torch.float32)
    rounds = 8 // world
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
        model.set_custom_reduce_scatter(pd.OrderedReduceScatter(rounds))
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        if kind == "ddp":
            state = pd.OrderedState(rounds, group)
            model.register_comm_hook(state, pd.ordered_hook)
            model(inputs[0]).sum().backward()  # after the first pass DDP lays its buckets out anew
            state.reset()
            model.zero_grad()
    for some in range(0, 8, world):
        model(inputs[some + rank]).square().sum().backward()
    for name, p in model.named_parameters():
        gradient = p.grad.full_tensor() if kind == "fsdp" else p.grad * (world if kind == "plain" else 1)  # of the mean
        yield f"{kind} {name.removeprefix('module.')}", gradient


def controls(group):
    """What an all-reduce of the ranks' sums gives instead: how many elements differ from the ordered sum."""
    import torch
    import torch.distributed as dist

    import pydet

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    x, w = tensors(8, (32, 2048), (64, 2048), dtype=torch.bfloat16)
    k = 2048 // world
    xr, wr = (t[:, rank * k : (rank + 1) * k].contiguous() for t in (x, w))
    for out_dtype in (torch.float32, torch.bfloat16):
        one = pydet.gemm(x, w.t(), k_chunk=256, arithmetic="sm90", out_dtype=out_dtype)
        mine = pydet.gemm(xr, wr.t(), k_chunk=256, arithmetic="sm90", out_dtype=out_dtype)
        dist.all_reduce(mine, group=group)
        yield f"all_reduce {out_dtype}", int((mine != one).sum())


def refusals(group):
    """What each rank hears where one of them refuses, or has other terms."""
    import torch
    import torch.distributed as dist

    import pydet
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)

    def sentence(call):
        try:
            call()
        except pydet.Error as problem:
            return str(problem)
        return "accepted"

    k = 1024 // world
    x, w = torch.ones(4, k), torch.ones(8, k)
    row = lambda x, **options: pd.row_parallel_linear(x, w, group=group, **options)
    last = rank == world - 1
    yield "a shape", sentence(lambda: row(torch.ones(4, k - 16) if last else x))
    yield "segments", sentence(lambda: row(x, segments=16 if last else 8))
    yield "uneven segments", sentence(lambda: row(x, segments=12))
    yield "arithmetic", sentence(lambda: row(x, arithmetic="ieee" if last else "auto"))
    yield "method", sentence(lambda: row(x, method="fastest"))
    yield "out", sentence(lambda: row(torch.ones(5, k), out="shard_rows"))
    yield (
        "a type",
        sentence(lambda: pd.all_reduce(torch.ones(2, 4, dtype=torch.float64 if last else None), group=group)),
    )
    yield "a bias", sentence(lambda: pd.all_reduce(torch.ones(2, 4), bias=torch.ones(3), group=group))
    yield "a shard", sentence(lambda: pd.reduce_scatter(torch.ones(64), torch.ones(5), group=group))
    yield "rows", sentence(lambda: pd.rms_norm(torch.ones(100, 8), torch.ones(8), eps=1e-6, group=group))
    yield "columns", sentence(lambda: pd.column_parallel_linear(x[:, :9], w, group=group))
    yield "afterwards", sentence(lambda: row(x))


ALONE = None


def work(rank, kind, sizes, shapes, port, queue):
    """All checks on one rank: name -> {size or mesh: hash}, and what is no tensor as it is."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYDET_NUM_THREADS="1")
    found, world = {}, sizes[-1]
    try:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        global ALONE
        torch.set_num_threads(1)
        device = torch.device(kind, rank if kind == "cuda" else None)
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            rank=rank,
            world_size=world,
            device_id=device if kind == "cuda" else None,
            timeout=datetime.timedelta(seconds=60),
        )
        ranks = torch.arange(world)
        meshes = {size: DeviceMesh(kind, ranks[:size]) for size in sizes}
        alone = [dist.new_group([r]) for r in range(world)]
        ALONE = alone[rank]
        grids = {
            name: DeviceMesh(kind, ranks[: dp * tp].view(dp, tp), mesh_dim_names=("dp", "tp"))
            for name, (dp, tp) in shapes.items()
        }
        grids = {name: (grid["tp"], grid["dp"].get_group()) for name, grid in grids.items() if rank < grid.size()}
        torch.set_default_device(device)

        def note(where, results):
            for name, value in results:
                if isinstance(value, torch.Tensor):
                    value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    value = hashlib.sha256(value).hexdigest()
                found.setdefault(name, {})[where] = value

        for size, mesh in meshes.items():
            if rank < size:
                group = mesh.get_group()
                for check in (linears, shared_rows, sums, along_rows, mixtures, shared_head, together, styles):
                    note(size, check(group))
                if kind == "cuda":
                    import test_torch_shard_experts

                    note(size, test_torch_shard_experts.layers(group))
                    note(size, large_sums(group))
                    note(size, streams(group))
                    note(size, graphs(group))
                note(size, model_step(mesh, None))
                for wrapper in ("ddp", "fsdp", "plain"):
                    note(size, wrapped(wrapper, mesh, group))
                note(size, controls(group))
                if size > 1:
                    note(size, refusals(group))
            dist.barrier()
        if kind == "cuda":  # a group that is not the one of all ranks has its memory of peers in another way
            for check in (linears, sums, large_sums):
                note("another group", check(dist.new_group(list(range(world)))))
        for name in shapes:
            if name in grids:
                note(name, model_step(*grids[name]))
            dist.barrier()
        queue.put((rank, found, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, found, traceback.format_exc()))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(count, function, *arguments):
    """Processes that are forked from one which has imported torch."""
    context = multiprocessing.get_context("forkserver")
    wrappers = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"]
    wrappers.append("transformers.models.qwen3_moe.modeling_qwen3_moe")  # where there is one
    context.set_forkserver_preload(["torch", *wrappers, "pydet.torch.distributed"])
    queue = context.Queue()
    processes = [context.Process(target=function, args=(rank, *arguments, queue), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    return processes, queue


def found_by(processes, queue):
    """What each rank put into the queue: [rank]."""
    answers, end = {}, time.monotonic() + TIME_LIMIT
    while len(answers) < len(processes):
        try:
            rank, results, problem = queue.get(timeout=2)
        except Empty:
            ended = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in answers]
            assert not ended and time.monotonic() < end, f"no answer; ended without one: ranks {ended}"
            continue
        assert problem is None, f"rank {rank}:\n{problem}"
        answers[rank] = results
    for process in processes:
        process.join(30)
    return [answers[rank] for rank in range(len(processes))]


def answers_of(kind, sizes, shapes):
    """What each rank found: [rank][name][size or mesh]."""
    return found_by(*start(sizes[-1], work, kind, sizes, shapes, free_port()))


@pytest.fixture(scope="module")
def found():
    pytest.importorskip("torch")
    return answers_of("cpu", SIZES, MESHES)


# ---- What must be true of it ---------------------------------------------------------------------------------------

NO_BITS = (
    "methods",
    "all_reduce",
    "plain",
    *("a shape", "segments", "uneven", "arithmetic", "method", "out", "a type", "a bias"),
)
NO_BITS += ("a shard", "rows", "columns", "afterwards")


def bits(found):
    return {name: where for name, where in found[0].items() if not name.startswith(NO_BITS) or name.startswith("rows ")}


def check_sizes(found, sizes):
    names = bits(found)
    assert len(names) > 60
    for name, where in names.items():
        assert set(sizes) <= set(where), f"{name}: {set(where)}"
        for size in sizes:
            for rank in range(size):
                assert found[rank][name][size] == where[1], f"{name}: {size} processes, rank {rank}"


def check_meshes(found, shapes):
    names = [name for name, where in bits(found).items() if next(iter(shapes)) in where]
    assert sum(name.startswith("gradient") for name in names) == 20 and "norm" in names and "logits 7" in names
    for name in names:
        for mesh, (dp, tp) in shapes.items():
            for rank in range(dp * tp):
                assert found[rank][name][mesh] == found[0][name][1], f"{name}: {mesh}, rank {rank}"


def check_wrappers(found):
    for name, where in found[0].items():
        if name.startswith("ddp "):
            assert found[0][name.replace("ddp", "fsdp", 1)][1] == where[1], name


def check_controls(found, sizes):
    """With 4 ranks and more an all-reduce has other bits, and so have DDP's own gradients."""
    for dtype in ("float32", "bfloat16"):
        counts = found[0][f"all_reduce torch.{dtype}"]
        assert counts[1] == 0 and all(counts[size] > 100 for size in sizes if size > 2), counts
    names = [name for name in found[0] if name.startswith("plain")]
    assert len(names) == 4
    for size in sizes[2:]:
        assert any(found[0][name][size] != found[0][name][1] for name in names)


def check_refusals(found, sizes):
    own = {
        "a shape": "row_parallel_linear: this rank's factor is (4, ",
        "segments": "the ranks do not agree",
        "arithmetic": "the ranks do not agree",
        "a type": "all_reduce: sums is torch.float64, want float32",
    }
    for size in sizes[1:]:
        for rank in range(size):
            sentences = {name: where[size] for name, where in found[rank].items() if size in where}
            last = rank == size - 1
            assert sentences["a shape"].startswith(own["a shape"] if last else "row_parallel_linear: rank"), sentences
            assert last or f"rank {size - 1} refused: row_parallel_linear: this rank's factor" in sentences["a shape"]
            assert own["segments"] in sentences["segments"] or "refused" in sentences["segments"], sentences["segments"]
            assert own["arithmetic"] in sentences["arithmetic"], sentences["arithmetic"]
            assert own["a type"] in sentences["a type"], sentences["a type"]
            if 12 % size:
                assert f"segments is 12, want a multiple of the {size} ranks" in sentences["uneven segments"]
            else:
                assert "segments" in sentences["uneven segments"] or sentences["uneven segments"] == "accepted"
            assert "method is 'fastest', want one of auto, one_shot" in sentences["method"], sentences["method"]
            assert "the number of rows is 5, want a multiple" in sentences["out"], sentences["out"]
            assert "bias is (3,), want (4,)" in sentences["a bias"], sentences["a bias"]
            assert f"sums has 64 elements, want {5 * size}: {size} shards" in sentences["a shard"], sentences["a shard"]
            assert "x has 100 rows, want a multiple of 256" in sentences["rows"], sentences["rows"]
            assert sentences["columns"].startswith("column_parallel_linear:") or "gemm:" in sentences["columns"]
            assert sentences["afterwards"] == "accepted", sentences["afterwards"]


def test_every_size_has_the_bits_of_one_process(found):
    check_sizes(found, SIZES)


def test_tensor_and_data_parallel_together_have_them_too(found):
    check_meshes(found, MESHES)


def test_ddp_and_fsdp_give_one_sum(found):
    check_wrappers(found)


def test_an_all_reduce_would_be_seen(found):
    check_controls(found, SIZES)


def test_a_rank_that_refuses_tells_the_others(found):
    check_refusals(found, SIZES)


def survivor(rank, kind, method, port, queue):
    """Rank 1 dies between two calls; rank 0 must hear of it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    import pydet.torch.distributed as pd

    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=12))
    sums = torch.ones(4, 5)
    pd.all_reduce(sums, method=method).cpu()
    if rank == 1:
        os._exit(1)
    try:
        if pd.all_reduce(sums, method=method).cpu().isnan().all():  # through peers' memory the next call says why
            pd.all_reduce(sums, method=method).cpu()
        queue.put("nothing")
    except RuntimeError as problem:
        queue.put(f"{type(problem).__name__}: {problem}")
    queue.close()
    queue.join_thread()
    os._exit(0)  # a device that was lost is not asked to clear up


def check_survivor(kind, method):
    """It hears of it or is ended by its backend, in time, with no result."""
    processes, queue = start(2, survivor, kind, method, free_port())
    processes[0].join(150)  # NCCL's watchdog took 90 s to end it, with a limit of 12
    assert processes[0].exitcode is not None, "rank 0 hangs"
    answer = "ended" if processes[0].exitcode else queue.get(timeout=10)
    assert answer != "nothing", answer
    processes[1].join(10)
    assert processes[1].exitcode == 1


def test_a_killed_rank_leaves_nobody_hanging():
    pytest.importorskip("torch")
    check_survivor("cpu", "auto")


def example(rank, world, port, name, options, queue):
    """As torchrun starts it, but in a process that has imported torch."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(PYDET_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    path = pathlib.Path(__file__).resolve().parent.parent / "examples" / name
    sys.argv = [str(path), *options]
    sys.path.insert(0, str(path.parent))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(path), run_name="__main__")
        queue.put((rank, said.getvalue(), None))
    except BaseException:
        queue.put((rank, said.getvalue(), traceback.format_exc()))


def said_by(ranks, name, *options):
    """What an example prints on so many ranks."""
    processes, queue = start(ranks, example, ranks, free_port(), name, options)
    answers = [queue.get(timeout=120) for _ in processes]
    assert all(problem is None for _, _, problem in answers), answers
    return "".join(text for _, text, _ in answers)


def made_anew(rank, world, ports, queue):
    """Calls in a process group, after which it is destroyed, and in another."""
    os.environ["PYDET_NUM_THREADS"] = "1"
    try:
        import torch
        import torch.distributed as dist

        import pydet
        import pydet.torch.distributed as pd

        torch.set_num_threads(1)
        for port in ports:
            where = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
            x, w = tensors(port, (5, 256), (24, 256), dtype=torch.float32)
            want = pydet.gemm(x, w.t(), k_chunk=256 // SEGMENTS)
            for method in ("auto", "relay"):
                got = pd.row_parallel_linear(columns(x, None).detach(), columns(w, None).detach(), method=method)
                assert got.equal(want), (port, method)
            dist.destroy_process_group()
        queue.put((rank, True, None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


def test_a_group_that_is_made_anew():
    pytest.importorskip("torch")
    assert found_by(*start(2, made_anew, 2, [free_port(), free_port()])) == [True, True]


def faults(rank, world, port, queue):
    """What each of four ranks hears where the last one does otherwise: its sentence, or what the call gave."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYDET_NUM_THREADS="1")
    said = {}
    try:
        import torch
        import torch.distributed as dist

        import pydet.torch.distributed as pd
        from pydet.torch.distributed import exchange, main_grad

        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)
        last = rank == world - 1

        def hear(name, call):
            try:
                said[name] = str(call() or "accepted")
            except Exception as problem:
                said[name] = f"{type(problem).__name__}: {problem}"
            dist.barrier()

        # Words: what parts behind what is shown, and operations.
        cpu = torch.device("cpu")
        hear("long", lambda: exchange.together("op", None, cpu, lambda: (None, "x" * 600, last)) and None)
        hear("ops", lambda: exchange.together("op" if last else "other", None, cpu, lambda: (None, "same")) and None)
        hear(
            "any exception",
            lambda: exchange.together("op", None, cpu, lambda: (({} if last else {"x": 1})["x"],)) and None,
        )

        # Attention, and experts.
        q = torch.zeros(1, 4, 128, 8)
        hear("heads", lambda: pd.context_parallel_attention(q, q, q, key_heads_at_once=0 if last else 2).dim())

        def experts(make, dtype=torch.float32):
            x, index, weights = torch.ones(4, 8), torch.tensor([[0, 3]] * 4), torch.ones(4, 2, dtype=dtype)
            return pd.expert_parallel(x, index, weights, lambda rows, ends: make(rows) if last else rows, 4).dim()

        def no_memory(rows):
            raise MemoryError("none left")

        hear("experts", lambda: experts(no_memory))
        hear("experts' width", lambda: experts(lambda rows: rows[:, :4]))
        hear("experts' rows", lambda: experts(lambda rows: rows[1:]))
        hear("experts' type", lambda: experts(lambda rows: rows.bfloat16()))
        hear("weights", lambda: experts(lambda rows: rows, torch.bfloat16 if last else torch.float32))

        # main_grad.
        def parameters(*shapes, frozen=None):
            made = [torch.nn.Parameter(torch.zeros(shape), i != frozen) for i, shape in enumerate(shapes)]
            for p in made:
                p.main_grad = torch.ones_like(p)
            return made

        def add(given):
            pd.OrderedMainGrads(given).add()

        shapes = ((2, 3), (3, 2), (2, 3))
        hear("order", lambda: add(parameters(*(shapes[1:] + shapes[:1] if last else shapes))))
        hear("frozen", lambda: add(parameters(*shapes, frozen=2 if last else 0)))
        hear("names", lambda: add(zip("aba" if last else "abc", parameters(*shapes), strict=True)))

        def reset_by_one():
            main_grad._BUCKET = 1
            sums = pd.OrderedMainGrads(parameters(*shapes * 40))
            sums.add()
            if last:
                sums.reset()
            sums.add()

        hear("rounds", reset_by_one)
        mine = parameters(*shapes)
        sums = pd.OrderedMainGrads(mine)
        sums.add()
        if last:
            mine[1].main_grad[0, 0] = 5.0
        hear("not added", sums.finish)
        said["kept"] = mine[1].main_grad.sum().item() == (5 if last else 0)
        mine[1].main_grad.zero_()
        hear("finished", sums.finish)
        said["sum"] = all(bool((p.main_grad == world).all()) for p in mine)

        # Clipping.
        def clip(max_norm=1.0, gradient=True, **options):
            p = torch.nn.Parameter(torch.ones(4))
            p.grad = torch.ones(4) if gradient else None
            pd.clip_grad_norm_([p], max_norm, **options)

        hear("clip", lambda: clip(gradient=not last))
        hear("clip, none", lambda: clip(gradient=False))
        hear("clip a stage", lambda: clip(gradient=not last, stages=dist.group.WORLD))
        hear("clip, stages of others", lambda: clip(max_norm=2.0 if last else 1.0, stages=dist.group.WORLD))
        hear("max_norm", lambda: clip(max_norm=-1.0 if last else 1.0))
        hear("max_norm nan", lambda: clip(max_norm=float("nan")))
        hear("clip's segments", lambda: clip(segments=0))

        # A group of others.
        few = dist.new_group([0])
        ones = torch.ones(256, 8)
        for name, call in (
            ("all_reduce", lambda: pd.all_reduce(ones, group=few).dim()),
            (
                "row_parallel_linear",
                lambda: pd.row_parallel_linear(ones[:, :8].repeat(1, 16), ones[:4].repeat(1, 16), group=few).dim(),
            ),
            ("clip_grad_norm_", lambda: clip(group=few)),
            ("rms_norm", lambda: pd.rms_norm(ones, ones[0], eps=1e-6, group=few).dim()),
            ("shard_context", lambda: pd.shard_context(ones[None], group=few).dim()),
        ):
            hear(f"another's {name}", call)

        said |= of_fsdp(rank, world, hear)
        queue.put((rank, said, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, said, traceback.format_exc()))


def of_fsdp(rank, world, hear):
    """One object for several modules; replicas beside shards; clipping rows that no segments divide."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    import pydet.torch.distributed as pd

    def train(shape, shared, rounds):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(2)])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
        one = pd.OrderedReduceScatter(rounds)
        for layer in model:
            fully_shard(layer, mesh=mesh)
            layer.set_custom_reduce_scatter(one if shared else pd.OrderedReduceScatter(rounds))
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
        for _ in range(rounds):
            model(torch.ones(2, 8)).sum().backward()

    hear("fsdp", lambda: train((world,), False, 2))
    hear("fsdp, shared", lambda: train((world,), True, 2))
    hear("fsdp, shared, one round", lambda: train((world,), True, 1))
    hear("hsdp", lambda: train((2, world // 2), False, 1))

    found, alone = [], init_device_mesh("cpu", (world, 1), mesh_dim_names=("r", "s"))["s"]
    for mesh in (alone, init_device_mesh("cpu", (world,))):
        table, gradient = tensors(1, (53, 16), (53, 16), dtype=torch.float32)
        p = torch.nn.Parameter(distribute_tensor(table, mesh, [Shard(0)]))
        p.grad = distribute_tensor(gradient.clone(), mesh, [Shard(0)])
        norm = pd.clip_grad_norm_([p], 1.0, group=mesh.get_group())
        assert p.grad.to_local().shape[0] < 53 or mesh.size() == 1
        torch.testing.assert_close(norm, gradient.norm())
        found.append([norm.item(), p.grad.full_tensor().flatten().tolist()])
    return {"uneven rows": found[0] == found[1]}


DISAGREE = "the ranks do not agree: rank"
# What is refused on every rank: (on the others, on the last).
HEARD = {
    "long": ("op: " + DISAGREE, "has the same so far, and other terms behind it"),
    "ops": ("other: " + DISAGREE, "op: " + DISAGREE),
    "any exception": ("op: rank 3 refused: 'x'", "KeyError: 'x'"),
    "heads": ("rank 3 refused: context_parallel_attention: key_heads_at_once is 0", "key_heads_at_once is 0, want a"),
    "experts": ("expert_parallel: rank 3 refused: none left", "MemoryError: none left"),
    "experts' width": ("has PYDET_NUMERICS 2, results of (8,)", "rank 3 has PYDET_NUMERICS 2, results of (4,)"),
    "experts' rows": (
        "rank 3 refused: expert_parallel: experts gave (15, 8), want a tensor of",
        "experts gave (15, 8)",
    ),
    "experts' type": (DISAGREE, "rank 3 has PYDET_NUMERICS 2, results of (8,), torch.bfloat16"),
    "weights": (DISAGREE, "weights torch.bfloat16, gradients False; rank 0"),
    "order": (DISAGREE, "of (3, 2) torch.float32; (2, 3) torch.float32; (2, 3) torch.float32"),
    "frozen": (DISAGREE, "(2, 3) torch.float32; (3, 2) torch.float32; (2, 3) torch.float32 not trained"),
    "names": (DISAGREE, "a (2, 3) torch.float32; b (3, 2) torch.float32; a (2, 3)"),
    "rounds": ("has PYDET_NUMERICS 2, round 2, 120 main_grads", "has PYDET_NUMERICS 2, round 1, 120 main_grads"),
    "not added": ("rank 3 refused: OrderedMainGrads.finish: parameter 1 has a gradient that", "want add() after it"),
    "finished": ("accepted",) * 2,
    "clip": ("1 gradients, max_norm 1.0, 8 segments, (4,) torch.float32; rank 3", "0 gradients"),
    "clip, none": ("accepted",) * 2,
    "clip a stage": ("rank 3 refused: clip_grad_norm_: this stage has no gradients", "this stage has no gradients"),
    "clip, stages of others": (DISAGREE, "max_norm 2.0, 8 segments; rank 0"),
    "max_norm": ("rank 3 refused: clip_grad_norm_: max_norm is -1.0, want a number of 0 or more", "max_norm is -1.0"),
    "max_norm nan": ("clip_grad_norm_: max_norm is nan",) * 2,
    "clip's segments": ("clip_grad_norm_: segments is 0, want a number from 1 up",) * 2,
    "fsdp": ("accepted",) * 2,
    "fsdp, shared": ("called twice in one backward pass, in the middle of a sum of 2 rounds; want one",) * 2,
    "fsdp, shared, one round": ("accepted",) * 2,
    "hsdp": ("the mesh has replicas beside the shards (HSDP), which PyTorch all-reduces",) * 2,
}


def test_what_one_rank_does_otherwise_all_hear():
    """And what would be lost is kept, and the next call is as it should be."""
    pytest.importorskip("torch")
    found = found_by(*start(4, faults, 4, free_port()))
    for rank, said in enumerate(found):
        for name, sentences in HEARD.items():
            assert sentences[rank == 3] in said[name], (rank, name, said[name])
        others = [name for name in said if name.startswith("another's ")]
        assert len(others) == 5
        for name in others:
            refused = name.removeprefix("another's ") + ": this process is not in the group"
            assert (refused in said[name]) if rank else not said[name].startswith("InvalidValue"), (rank, said[name])
        assert said["kept"] and said["sum"] and said["uneven rows"], rank


def test_the_example_compares_ranks(tmp_path):
    """Saved by one rank, compared by 2 x 2: as it is, and with all-reduces."""
    pytest.importorskip("torch")

    def run(ranks, *options):
        said = said_by(ranks, "parallel.py", *options)
        return [int(count) for count in re.findall(r"(\d+) of \d+ differ", said)]

    saved = str(tmp_path / "one.json")
    assert run(1, "--save", saved) == []
    *differ, outputs, gradients = run(4, "--tp", "2", "--compare", saved, "--all-reduce")
    assert differ == [0, 0] and outputs > 1000 and gradients > 1000


def test_a_loss_curve_on_two_ranks_is_that_of_one(tmp_path):
    """Of 8 steps of training, with accumulate_gradients, clipping and AdamW; with all-reduces it is another."""
    pytest.importorskip("torch")
    saved = str(tmp_path / "one.json")
    curve = said_by(1, "data_parallel.py", "--save", saved)
    losses = [float(x) for x in curve.split("loss ")[1].split()]
    assert len(losses) == 8 and losses[-1] < 0.7 * losses[0], curve

    def run(ranks, *options):
        said = said_by(ranks, "data_parallel.py", "--compare", saved, *options)
        return [int(count) for count in re.findall(r"(\d+) of \d+ differ", said)]

    assert run(2) == [0, 0]
    losses, parameters = run(2, "--all-reduce")
    assert losses > 10 and parameters > 1000, (losses, parameters)


def test_a_rollout_on_four_ranks_has_the_bits_of_a_trainer_on_two():
    """And PyTorch's layers with all-reduces have not, which the same counts see."""
    pytest.importorskip("torch")
    said = said_by(4, "rl_alignment.py", "--trainer", "2")
    assert "with pydet 0 things differ between 4 ranks and 2" in said
    report = json.loads(said[: said.rindex("}") + 1])
    assert report["pydet"]["gradients on 4 ranks and on 2"]["elements"] > 300000
    ours, theirs = (report[way]["decode in batches of 8"] for way in ("pydet", "torch, all-reduces"))
    assert ours["log-probabilities"] > 30 and ours["differ from the trainer's"] == 0
    assert theirs["differ from the trainer's"] > 30
