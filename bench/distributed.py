"""pydet.torch.distributed on the GPUs of one machine: bits, and speed beside collectives that promise none.

    python -m bench.distributed --gpus 4                          # NCCL, one process a GPU: everything
    python -m bench.distributed --gpus 4 --parts row --seconds 60
    python -m bench.distributed --cpus 4                          # gloo, one process each: bits and mesh alone
    python -m bench.distributed --cpus 2 --parts moe              # a tiny one, to see that it runs

Parts: bits (random shapes by every method, and by all-reduces as negative controls), mesh (the model of
examples/parallel.py, tensor times data parallel, in every shape of the ranks), row (row-parallel linear layers),
dp (a reduce-scatter of gradients), layer (the linear layers, norms and activation of a decoder layer, at decode), step
(forward and backward of it), whole (a layer with attention: decoding with a cache, reading, a step of training),
context (attention of a long sequence that the ranks share), experts (a mixture whose experts and tokens they share),
moe (a whole decoder layer of Qwen3-30B-A3B with such a mixture), head (log-probabilities over a vocabulary that they
do). Times are of the slowest rank: medians of replays of a CUDA
graph of several calls, each on other weights. Steps, context, experts and head are eager, as training is. With --json
the figures are written, with a table and a plot beside.
"""

import argparse
import datetime
import functools
import json
import os
import random
import runpy
import socket
import statistics
import sys
import time
from pathlib import Path

from bench import distributed_experts, distributed_tables

SEGMENTS = 8
PARTS = ("bits", "mesh", "row", "dp", "layer", "step", "whole", "context", "experts", "moe", "head")
ON_CPUS = ("bits", "mesh", "moe")
COLLECTIVES, PEERS = ("one_shot", "two_shot", "chain"), ("peer_one_shot", "peer_two_shot", "peer_stream")
LAYERS = ((4096, 14336), (8192, 8192))  # N, K of row-parallel layers
ROWS = (1, 4, 8, 16, 64, 256, 512, 2048, 4096, 8192)


class Run:
    """One rank's: its device, its entries, its clock."""

    def __init__(self, rank, given):
        import torch
        import torch.distributed as dist

        self.rank, self.given, self.torch, self.dist = rank, given, torch, dist
        self.world = given.gpus or given.cpus
        self.device = torch.device("cuda", rank) if given.gpus else torch.device("cpu")
        self.entries, self.start = [], time.time()
        torch.set_default_device(self.device)
        if given.gpus:
            torch.cuda.set_device(self.device)
            dist.init_process_group(
                "nccl", rank=rank, world_size=self.world, device_id=self.device, timeout=datetime.timedelta(seconds=60)
            )
        else:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", rank=rank, world_size=self.world)
        self.alone = [dist.new_group([r]) for r in range(self.world)][rank]

    def note(self, part, **entry):
        self.entries.append({"part": part, **entry})
        if self.rank == 0:
            print(json.dumps(self.entries[-1]), flush=True)

    def normal(self, *shape, seed, dtype=None):
        """The same on every rank."""
        generator = self.torch.Generator(self.device).manual_seed(seed)
        return self.torch.randn(shape, generator=generator).to(dtype or self.torch.bfloat16)

    def most(self, value):
        worst = self.torch.tensor([float(value)], device=self.device)
        self.dist.all_reduce(worst, self.dist.ReduceOp.MAX)
        return float(worst)

    def over(self):
        return bool(self.most(time.time() - self.start > self.given.seconds))

    def differ(self, got, want):
        """Elements whose bits differ, on the rank where most do."""
        words = {4: self.torch.int32, 2: self.torch.int16}[got.element_size()]
        return int(self.most((got.contiguous().view(words) != want.contiguous().view(words)).sum()))

    def graphed(self, call, count):
        """us a call: the median of 7 replays of a graph of `count` calls, on the slowest rank."""
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which makes the operands
        with torch.cuda.stream(stream):
            for i in range(3):
                call(i)
        stream.synchronize()
        self.most(0)
        graph, times = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(count):
                call(i)
        for _ in range(8):
            self.most(0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / count)
        return round(self.most(statistics.median(times[1:])), 2)

    def timed(self, call, count=7):
        """us of an eager call, the ranks starting together: the median, on the slowest rank. Without a default device,
        which is a mode that each of PyTorch's functions goes through: it doubles what the host takes for small calls.
        """
        times, wait = [], self.torch.cuda.synchronize if self.given.gpus else lambda: None
        self.torch.set_default_device(None)
        for i in range(count + 2):
            self.most(0)
            wait()
            begin = time.perf_counter()
            call(i)
            wait()
            times.append((time.perf_counter() - begin) * 1e6)
        self.torch.set_default_device(self.device)
        return round(self.most(statistics.median(times[2:])), 1)


def columns(run, x, segments, group=None):
    """This rank's columns of x."""
    from pydet.torch.distributed import shard_bounds

    world, rank = run.dist.get_world_size(group), run.dist.get_rank(group)
    begin, end = shard_bounds(x.shape[1], segments, rank, world)
    return x[:, begin:end].contiguous()


def methods_of(run, rows):
    from pydet.torch.distributed.symmetric import peers_of

    if peers_of(None, run.device) is None:
        return (*COLLECTIVES, "relay")
    return COLLECTIVES + PEERS + ("push",) * (rows % run.world == 0) + ("relay",) * (run.world == 2)


# ---- Bits ----------------------------------------------------------------------------------------------------------


def bits(run):
    """Row- and column-parallel layers of random shapes, TP W against TP 1; gradients of micro-batches; controls."""
    import pydet
    import pydet.torch.distributed as pd

    torch, dist = run.torch, run.dist
    draw, shapes, wrong, controls, elements = random.Random(run.given.seed), 0, {}, {}, 0
    largest = 512 if run.given.gpus else 24

    def count(where, name, value):
        where[name] = where.get(name, 0) + value

    while shapes < run.given.shapes and not run.over():
        m = draw.choice(
            (1, 2, 3, run.world, 16, draw.randint(1, 64), draw.randint(1, largest), 4 * draw.randint(1, 64))
        )
        n, k = 8 * draw.randint(1, largest // 4), 16 * draw.randint(2 * SEGMENTS - 1, largest)
        dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
        arithmetic = "ieee" if dtype == torch.float32 else "sm90"
        x, w, b = (run.normal(*s, seed=shapes, dtype=dtype) for s in ((m, k), (n, k), (n,)))
        xr, wr = columns(run, x, SEGMENTS), columns(run, w, SEGMENTS)
        options = {"segments": SEGMENTS, "arithmetic": arithmetic}
        one = pydet.gemm(x, w.t(), bias=b, k_chunk=pd.segment_length(k, SEGMENTS), arithmetic=arithmetic)
        for method in ("auto", *methods_of(run, m)):
            got = pd.row_parallel_linear(xr, wr, b, in_features=k, method=method, **options)
            count(wrong, method, run.differ(got, one))
        # dX of a column-parallel layer sums over the columns that are shared out: K = k, its weights [k, n].
        dy, column_w = x, w.t().contiguous()
        whole = run.normal(m, n, seed=shapes, dtype=dtype).requires_grad_()
        pd.column_parallel_linear(whole, column_w, group=run.alone, **options).backward(dy)
        part = whole.detach().clone().requires_grad_()
        pd.column_parallel_linear(part, wr.t().contiguous(), out_features=k, **options).backward(xr)
        count(wrong, "dx", run.differ(part.grad, whole.grad))
        for name, out_dtype in (("all_reduce of fp32 sums", torch.float32), ("all_reduce, rounded", dtype)):
            sums = pydet.gemm(
                xr, wr.t(), k_chunk=pd.segment_length(k, SEGMENTS), arithmetic=arithmetic, out_dtype=out_dtype
            )
            dist.all_reduce(sums)
            unbiased = pydet.gemm(x, w.t(), k_chunk=pd.segment_length(k, SEGMENTS), arithmetic=arithmetic)
            count(controls, name, run.differ(sums.to(dtype), unbiased))
        elements += m * n
        shapes += 1
    for parameters in (1000, 12345):
        gradients = run.normal(2 * SEGMENTS, parameters * run.world, seed=parameters, dtype=torch.float32)
        shard = torch.zeros(parameters)
        for i in range(0, len(gradients), run.world):
            pd.reduce_scatter(gradients[i + run.rank].clone(), shard)
        want = pydet.fold(gradients)[run.rank * parameters : (run.rank + 1) * parameters]
        count(wrong, "reduce_scatter", run.differ(shard, want))
        mine = gradients[run.rank :: run.world].sum(0)
        dist.all_reduce(mine)
        count(controls, "all_reduce of gradients", run.differ(mine, pydet.fold(gradients)))
    run.note("bits", shapes=shapes, elements=elements, differ=wrong, controls=controls)
    return not any(wrong.values())


def mesh(run):
    """Outputs and gradients of the example's model over all ranks, as a mesh of any shape, against one rank's."""
    from torch.distributed.device_mesh import init_device_mesh

    example = runpy.run_path(str(Path(__file__).parent.parent / "examples/parallel.py"))
    steps, kind = example["steps"], run.device.type
    alone = init_device_mesh(kind, (run.world, 1, 1), mesh_dim_names=("ranks", "dp", "tp"))["dp", "tp"]
    want = steps(alone, run.device, False)

    def count(found):
        return {
            name: int(run.most(sum(a != b for a, b in zip(found[name], words, strict=True))))
            for name, words in want.items()
        }

    sound = True
    for tp in (1, 2, 4, 8):
        if run.world % tp or run.world // tp > example["MICRO_BATCHES"]:
            continue
        shape = run.world // tp, tp
        ranks = init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))
        differ, controls = (count(steps(ranks, run.device, all_reduce)) for all_reduce in (False, True))
        run.note("mesh", tp=tp, dp=shape[0], elements=sum(map(len, want.values())), differ=differ, controls=controls)
        sound &= not any(differ.values())
    return sound


# ---- Speed ---------------------------------------------------------------------------------------------------------


def symmetric_all_reduces(run, m, n):
    """torch's own all-reduces of an [m, n] bf16 tensor in symmetric memory: name -> (that tensor, the call)."""
    torch, dist = run.torch, run.dist
    try:
        import torch.distributed._symmetric_memory as symmetric

        tensor = symmetric.empty(m, n, dtype=torch.bfloat16, device=run.device)
        symmetric.rendezvous(tensor, dist.group.WORLD)
        name = dist.group.WORLD.group_name
    except (ImportError, RuntimeError, AttributeError):
        return {}
    calls = {"two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", name)}
    if tensor.numel() <= 1 << 21:
        calls["one_shot"] = lambda: torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name)
    return {f"mm + torch symmetric {key}": (tensor, call) for key, call in calls.items()}


def row(run):
    """us of y = x w^T, x and w shared out along K, y on every rank; with 8 segments and with one a rank."""
    import pydet
    import pydet.torch.distributed as pd

    torch, dist, world = run.torch, run.dist, run.world
    for n, k in LAYERS:
        w = run.normal(n, k, seed=1)
        weights = [
            columns(run, w, SEGMENTS).clone() for _ in range(max(2, min(16, (200 << 20) * world // (2 * n * k))))
        ]
        weight = lambda i, weights=weights: weights[i % len(weights)]  # noqa: E731
        for m in ROWS:
            if run.over():
                return
            calls = 32 if m <= 64 else 8 if m <= 512 else 3
            x = run.normal(m, k, seed=2)
            xr, out = columns(run, x, SEGMENTS), torch.empty(m, n, dtype=torch.bfloat16)
            product = lambda i, out=out, xr=xr, weight=weight: torch.mm(xr, weight(i).t(), out=out)  # noqa: E731

            def rounded(i, out=out, product=product):
                product(i)
                dist.all_reduce(out)

            def unrounded(i, out=out, xr=xr, weight=weight):
                sums = torch.mm(xr, weight(i).t(), out_dtype=torch.float32)
                dist.all_reduce(sums)
                out.copy_(sums)

            us = {"mm": run.graphed(product, calls)}
            us["mm + NCCL all_reduce bf16"] = run.graphed(rounded, calls)
            us["mm + NCCL all_reduce fp32"] = run.graphed(unrounded, calls)
            for name, (tensor, call) in symmetric_all_reduces(run, m, n).items():

                def theirs(i, tensor=tensor, call=call, xr=xr, weight=weight):
                    torch.mm(xr, weight(i).t(), out=tensor)
                    call()

                us[name] = run.graphed(theirs, calls)
            differ = {}
            for segments in sorted({SEGMENTS, world}):
                one = pydet.gemm(x, w.t(), k_chunk=pd.segment_length(k, segments))
                for method in ("auto", "one_shot", "two_shot", *methods_of(run, m)[len(COLLECTIVES) :]):
                    if method == "push" or (method in ("one_shot", "peer_one_shot") and m > 512):
                        continue  # a graph does not take push
                    if method == "relay" and m < 256:
                        continue

                    def ours(i, method=method, segments=segments, xr=xr, weight=weight):
                        return pd.row_parallel_linear(xr, weight(i), segments=segments, method=method)

                    name = f"{method}, {segments} segments"
                    differ[name] = run.differ(ours(0), one)
                    us[name] = run.graphed(ours, calls)
            run.note("row", m=m, n=n, k=k, us=us, differ=differ)


def dp(run):
    """us of a reduce-scatter of as many fp32 gradients as a layer of 4096 x 14336 has."""
    from pydet.torch.distributed import exchange

    torch, dist, count = run.torch, run.dist, 4096 * 14336
    sums, shard = torch.randn(count), torch.zeros(count // run.world)
    half, half_shard = sums.bfloat16(), shard.bfloat16()
    received = torch.empty_like(sums)

    def by_collectives(i):
        dist.all_to_all_single(received, sums)
        for some in received.view(run.world, -1):
            exchange.fold(some.unsqueeze(0), out=shard, accumulate=True)

    us = {
        "ordered": run.graphed(lambda i: exchange.continue_shard(sums, shard, None), 4),
        "ordered, all-to-all": run.graphed(by_collectives, 4),
        "NCCL reduce_scatter fp32": run.graphed(lambda i: dist.reduce_scatter_tensor(shard, sums), 4),
        "NCCL reduce_scatter bf16": run.graphed(lambda i: dist.reduce_scatter_tensor(half_shard, half), 4),
    }
    run.note("dp", gradients=count, us=us)


class Plain:
    """PyTorch's tensor parallel linear layers: torch.mm, and NCCL's all-reduce in bf16 forward and backward."""

    def __init__(self, run):
        import torch
        import torch.distributed as dist

        class Column(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, dy):
                dy = dy.contiguous()
                dist.all_reduce(dy)
                return dy

        class Row(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                y = y.contiguous()
                dist.all_reduce(y)
                return y

            @staticmethod
            def backward(ctx, dy):
                return dy

        self.column = lambda x, w: torch.nn.functional.linear(Column.apply(x), w)
        self.row = lambda x, w: Row.apply(torch.nn.functional.linear(x, w))
        self.norm = lambda x, w: torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-5)
        self.swiglu = lambda gate, up: torch.nn.functional.silu(gate) * up
        self.attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)


class Ours:
    """The same layers by pydet, in a group."""

    def __init__(self, run, segments, group=None):
        import pydet.torch
        import pydet.torch.distributed as pd

        options = {"segments": segments, "group": group}
        self.column = lambda x, w: pd.column_parallel_linear(x, w, **options)
        self.row = lambda x, w: pd.row_parallel_linear(x, w, **options)
        self.norm = lambda x, w: pydet.torch.rms_norm(x, w, eps=1e-5)
        self.swiglu = pydet.torch.swiglu
        self.attention = lambda q, k, v, is_causal: pydet.torch.attention(q, k, v, scale=HEAD**-0.5, causal=is_causal)


WIDTH, HEADS, KV_HEADS, HEAD, FFN = 4096, 32, 8, 128, 14336  # a layer of an 8B Llama


def layer_weights(run, world, rank):
    """q, k and v for each segment of heads, o, gate and up for each segment, down, two norms: this rank's shards."""
    shape = {"qkv": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH), "o": (WIDTH, HEADS * HEAD), "gate_up": (2 * FFN, WIDTH)}
    shape["down"] = (WIDTH, FFN)
    found = {}
    for seed, (name, (n, k)) in enumerate(shape.items()):
        w = run.normal(n, k, seed=seed) * 0.02
        dim = 1 if name in ("o", "down") else 0
        found[name] = w.chunk(world, dim)[rank].contiguous()
    found["norms"] = [run.normal(WIDTH, seed=7) * 0.02 + 1 for _ in range(2)]
    return found


def decoder_layer(kind, weights, x, own):
    """A layer but for the attention core, whose place the queries take; own: segments that this rank has."""
    torch = __import__("torch")
    rows = x.shape[0]
    y = kind.column(kind.norm(x, weights["norms"][0]), weights["qkv"])
    queries = y.view(rows, own, -1)[:, :, : HEADS * HEAD // SEGMENTS].reshape(rows, -1)
    x = x + kind.row(queries, weights["o"])
    y = kind.column(kind.norm(x, weights["norms"][1]), weights["gate_up"]).view(rows, own, 2, FFN // SEGMENTS)
    inner = torch.nn.functional.silu(y[:, :, 0]) * y[:, :, 1]
    return x + kind.row(inner.reshape(rows, -1), weights["down"])


def whole_layer(kind, weights, x, own, attend):
    """A layer with attention: attend(q, k, v) of ``[rows, heads, HEAD]`` each; own: segments that this rank has."""
    rows, group = x.shape[0], HEADS // KV_HEADS
    heads = kind.column(kind.norm(x, weights["norms"][0]), weights["qkv"]).view(rows, own, -1, HEAD)
    q, k, v = heads.split([KV_HEADS // SEGMENTS * count for count in (group, 1, 1)], 2)
    x = x + kind.row(attend(*(part.reshape(rows, -1, HEAD) for part in (q, k, v))), weights["o"])
    y = kind.column(kind.norm(x, weights["norms"][1]), weights["gate_up"]).view(rows, own, 2, FFN // SEGMENTS)
    return x + kind.row(kind.swiglu(y[:, :, 0], y[:, :, 1]).reshape(rows, -1), weights["down"])


def turned(x, cos, sin):
    """Rotary embeddings as Transformers has them; the same steps for both kinds."""
    low, high = x.chunk(2, -1)
    return x * cos + __import__("torch").cat((-high, low), -1) * sin


def angles(run, places):
    torch = run.torch
    steps = places[:, None].float() * 500000.0 ** (-torch.arange(0, HEAD, 2).float() / HEAD)
    both = torch.cat((steps, steps), -1)[:, None]
    return both.cos().bfloat16(), both.sin().bfloat16()


CACHED = 2048  # keys of each sequence that decodes


def decoding(run, kind, m, heads):
    """attend of m sequences, whose next token is the last of CACHED: its key and value go into the cache."""
    torch = run.torch
    cos, sin = angles(run, torch.full((m,), CACHED - 1))
    first = run.rank * heads if heads < KV_HEADS else 0
    cache = [run.normal(m, KV_HEADS, CACHED, HEAD, seed=21 + i)[:, first : first + heads].clone() for i in range(2)]

    def attend(q, k, v):
        for tensor, new in zip(cache, (turned(k, cos, sin), v), strict=True):
            tensor[:, :, -1] = new
        out = kind.attention(turned(q, cos, sin)[:, :, None], *cache, is_causal=False)
        return out.reshape(m, -1)

    return attend


def reading(run, kind, m):
    """attend of one sequence of m tokens."""
    cos, sin = angles(run, run.torch.arange(m))

    def attend(q, k, v):
        q, k, v = (part.transpose(0, 1)[None] for part in (turned(q, cos, sin), turned(k, cos, sin), v))
        return kind.attention(q, k, v, is_causal=True)[0].transpose(0, 1).reshape(m, -1)

    return attend


def whole(run):
    """us of a decoder layer with attention: decoding with a cache, reading a sequence, a step of training on one."""
    torch, world = run.torch, run.world
    own, mine, all_weights = SEGMENTS // world, layer_weights(run, world, run.rank), layer_weights(run, 1, 0)
    copies = [{k: v if k == "norms" else v.clone() for k, v in mine.items()} for _ in range(world)]
    kinds = {"plain": Plain(run), "pydet, 8 segments": Ours(run, SEGMENTS)}
    alone = Ours(run, SEGMENTS, run.alone)
    for what, m in (*(("decode", m) for m in (1, 16, 64, 256)), ("prefill", 512), ("prefill", 4096)):
        if run.over():
            return
        x, us = run.normal(m, WIDTH, seed=11), {}
        attends = lambda kind, heads, m=m, what=what: (  # noqa: E731
            decoding(run, kind, m, heads) if what == "decode" else reading(run, kind, m)
        )
        with torch.no_grad():
            one = whole_layer(alone, all_weights, x, SEGMENTS, attends(alone, KV_HEADS))
            for name, kind in kinds.items():
                attend = attends(kind, KV_HEADS // world)
                call = lambda i, kind=kind, x=x, a=attend: whole_layer(kind, copies[i % world], x, own, a)  # noqa: E731
                differ = run.differ(call(0), one)
                us[name] = run.graphed(call, 8 if m < 4096 else 3)
        run.note("whole", what=what, m=m, us=us, differ=differ)
    tokens, us, found = 4096, {}, {}
    x = run.normal(tokens, WIDTH, seed=12)
    attends = {kind: reading(run, kind, tokens) for kind in (*kinds.values(), alone)}

    def passes(kind, weights, own):
        leaves = {k: v if k == "norms" else v.detach().requires_grad_() for k, v in weights.items()}
        leaves["norms"] = [w.detach().requires_grad_() for w in weights["norms"]]
        given = x.detach().requires_grad_()
        y = whole_layer(kind, leaves, given, own, attends[kind])
        y.backward(x)
        return {
            "y": y.detach(),
            "dx": given.grad,
            "dnorm 1": leaves["norms"][0].grad,
            "dnorm 2": leaves["norms"][1].grad,
        }

    for name, kind in kinds.items():
        found = passes(kind, mine, own)
        us[name] = run.timed(lambda i, kind=kind: passes(kind, mine, own))
    want = passes(alone, all_weights, SEGMENTS)
    differ = {name: run.differ(found[name], want[name]) for name in want}
    run.note("whole", what="train", m=tokens, us=us, differ=differ)
    for name, kind in kinds.items():
        us[name] = run.graphed(lambda i, kind=kind: passes(kind, mine, own), 1)
    run.note("whole", what="train, a graph", m=tokens, us=us, differ=differ)


def layer(run):
    """us of a decoder layer's linear layers at decode, and that its bits are those of one GPU."""
    torch, world = run.torch, run.world
    own, mine, whole = SEGMENTS // world, layer_weights(run, world, run.rank), layer_weights(run, 1, 0)
    copies = [{k: v if k == "norms" else v.clone() for k, v in mine.items()} for _ in range(world)]
    for m in (1, 16, 64, 256):
        x, us = run.normal(m, WIDTH, seed=11), {}
        with torch.no_grad():
            one = decoder_layer(Ours(run, SEGMENTS, run.alone), whole, x, SEGMENTS)
            for name, kind in (("plain", Plain(run)), ("pydet, 8 segments", Ours(run, SEGMENTS))):
                call = lambda i, kind=kind, x=x: decoder_layer(kind, copies[i % world], x, own)  # noqa: E731
                differ = run.differ(call(0), one)
                us[name] = run.graphed(call, 8)
        run.note("layer", m=m, us=us, differ=differ)


def step(run):
    """us of forward and backward of such a layer on 4096 tokens, and that its gradients are those of one GPU."""
    world, tokens = run.world, 4096
    x, us, found = run.normal(tokens, WIDTH, seed=12), {}, {}

    def passes(kind, weights, own):
        leaves = {k: v if k == "norms" else v.detach().requires_grad_() for k, v in weights.items()}
        norms = [w.detach().requires_grad_() for w in leaves["norms"]]
        given = x.detach().requires_grad_()
        y = decoder_layer(kind, {**leaves, "norms": norms}, given, own)
        y.backward(x)
        return [y.detach(), given.grad, *[w.grad for w in norms]], [leaves[k].grad for k in leaves if k != "norms"]

    mine = layer_weights(run, world, run.rank)
    for name, kind in (("plain", Plain(run)), ("pydet, 8 segments", Ours(run, SEGMENTS))):
        found = passes(kind, mine, SEGMENTS // world)
        us[name] = run.timed(lambda i, kind=kind: passes(kind, mine, SEGMENTS // world))
    one = passes(Ours(run, SEGMENTS, run.alone), layer_weights(run, 1, 0), SEGMENTS)
    differ = {
        name: run.differ(a, b) for name, a, b in zip(("y", "dx", "dnorm 1", "dnorm 2"), found[0], one[0], strict=True)
    }
    for name, got, want in zip(("qkv", "o", "gate_up", "down"), found[1], one[1], strict=True):
        part = want.chunk(world, 1 if name in ("o", "down") else 0)[run.rank]
        differ[f"d{name}"] = run.differ(got, part.contiguous())
    rate = {name: round(tokens / value * 1e6) for name, value in us.items()}
    run.note("step", tokens=tokens, us=us, tokens_per_second=rate, differ=differ)


LONG = (65536, 131072)  # tokens


def context(run):
    """us of causal attention of one sequence, and of its gradients: shared by the ranks, and on one GPU alone."""
    import pydet.torch
    import pydet.torch.distributed as pd

    for tokens in LONG:
        if run.over():
            return
        leaves = [
            run.normal(1, heads, tokens, HEAD, seed=31 + i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        ]
        dy = run.normal(1, HEADS, tokens, HEAD, seed=34)
        cut = lambda x: pd.shard_context(x, dim=2, layout="zigzag")  # noqa: E731
        one = lambda q, k, v: pydet.torch.attention(q, k, v, scale=HEAD**-0.5, causal=True)  # noqa: E731
        many = functools.partial(pd.context_parallel_attention, causal=True, layout="zigzag", scale=HEAD**-0.5)
        us, found = {}, {}
        by_heads = functools.partial(many, method="heads")
        ways = ("one GPU", one, lambda x: x), ("the ranks", many, cut), ("by heads", by_heads, cut)
        for name, attend, its in ways:
            given, gradient = [its(x).contiguous() for x in leaves], its(dy).contiguous()
            with run.torch.no_grad():
                us[f"{name}, forward"] = run.timed(lambda i, g=given, a=attend: a(*g), 3)

            def step(i, given=given, gradient=gradient, attend=attend):
                with_gradients = [x.detach().requires_grad_() for x in given]
                y = attend(*with_gradients)
                y.backward(gradient)
                return [y.detach(), *(x.grad for x in with_gradients)]

            us[f"{name}, step"] = run.timed(step, 2)
            found[name] = [cut(x) if name == "one GPU" else x for x in step(0)]
        differ = {
            f"{what}, {name}": run.differ(got, want.contiguous())
            for name in ("the ranks", "by heads")
            for what, got, want in zip(("y", "dq", "dk", "dv"), found[name], found["one GPU"], strict=True)
        }
        times = {
            f"{name}, {what}": round(us[f"one GPU, {what}"] / us[f"{name}, {what}"], 3)
            for name in ("the ranks", "by heads")
            for what in ("forward", "step")
        }
        run.note("context", tokens=tokens, us=us, times_one=times, differ=differ)


VOCABULARY = 128256


def head(run):
    """us of log-probabilities of 4096 tokens over a vocabulary that the ranks share, with gradients."""
    import pydet.torch
    import pydet.torch.distributed as pd

    torch, dist, world, tokens = run.torch, run.dist, run.world, 4096
    x, gradient = run.normal(tokens, WIDTH, seed=41), run.normal(tokens, seed=42, dtype=torch.float32)
    whole_w = run.normal(VOCABULARY, WIDTH, seed=43) * 0.02
    w = whole_w.chunk(world)[run.rank].contiguous()
    index = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator(run.device).manual_seed(44))
    first = run.rank * len(w)

    column = Plain(run).column

    def plain(x, w):
        """Vocabulary-parallel cross entropy as frameworks have it: logits in memory, all-reduced maxima and sums."""
        logits = column(x, w).float()
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        sums = (logits - largest[:, None]).exp().sum(-1)
        everyone = sums.detach().clone()
        dist.all_reduce(everyone)
        inside = (index >= first) & (index < first + len(w))
        picked = logits.gather(1, torch.where(inside, index - first, 0)[:, None])[:, 0] - largest
        return torch.where(inside, picked, 0) - sums / everyone.detach()  # its gradient is that of log p

    ours = lambda x, w, group=None: pd.vocab_parallel_linear_log_prob(x, w, index, group=group)  # noqa: E731
    calls = {
        "plain, logits in memory": (plain, w),
        "vocab_parallel_linear_log_prob": (ours, w),
        "one GPU, segments": (lambda x, w: ours(x, w, run.alone), whole_w),
        "one GPU, linear_log_prob": (lambda x, w: pydet.torch.linear_log_prob(x, w, index), whole_w),
    }
    us, found = {}, {}
    for name, (call, weight) in calls.items():

        def step(i, call=call, weight=weight):
            given = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = call(*given)
            y.backward(gradient)
            return y.detach(), *(t.grad for t in given)

        us[name] = run.timed(step, 5)
        found[name] = step(0)
    want, got = found["one GPU, segments"], found["vocab_parallel_linear_log_prob"]
    parts = want[0], want[1], want[2].chunk(world)[run.rank].contiguous()
    differ = {what: run.differ(a, b) for what, a, b in zip(("log p", "dx", "dw"), got, parts, strict=True)}
    run.note("head", tokens=tokens, vocabulary=VOCABULARY, us=us, differ=differ)


# ---- The whole -----------------------------------------------------------------------------------------------------


def rank_main(rank, given, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYDET_NUM_THREADS="1")
    run = Run(rank, given)
    if rank == 0:
        about = {"gpu": run.torch.cuda.get_device_name(), "nccl": run.torch.cuda.nccl.version()} if given.gpus else {}
        run.note("machine", ranks=run.world, torch=run.torch.__version__, seed=given.seed, **about)
    parts = {"bits": bits, "mesh": mesh, "row": row, "dp": dp, "layer": layer, "step": step, "whole": whole}
    parts |= {"context": context, "head": head}
    parts |= {"experts": distributed_experts.experts, "moe": distributed_experts.moe}
    for name in given.parts:
        parts[name](run)
    differ = [count for e in run.entries for count in _counts(e.get("differ", 0))]
    if rank == 0:
        print("\n".join(distributed_tables.mixtures([e for e in run.entries if e["part"] == "moe"])))
        print(f"{sum(differ)} elements differ from one rank's, in {time.time() - run.start:.0f} s")
        if given.json:
            with open(given.json, "w") as file:
                json.dump(run.entries, file, indent=1)
    run.dist.barrier()
    if given.gpus:
        run.torch.cuda.synchronize()
        sys.stdout.flush()
        os._exit(0 if not any(differ) else 1)  # captured graphs are in NCCL's way as it clears up
    run.dist.destroy_process_group()
    if any(differ):
        raise SystemExit(1)


def _counts(differ):
    return differ.values() if isinstance(differ, dict) else [differ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of this machine, a process each, over NCCL")
    parser.add_argument("--cpus", type=int, default=2, help="without --gpus: processes, over gloo; for bits")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=None)
    parser.add_argument("--shapes", type=int, default=100, help="random shapes of the part bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no more is begun")
    parser.add_argument("--json", help="a file for the figures")
    given = parser.parse_args()
    given.parts = given.parts or (PARTS if given.gpus else ON_CPUS[:2])
    if not given.gpus and not set(given.parts) <= set(ON_CPUS):
        parser.error(f"without --gpus there are only the parts {', '.join(ON_CPUS)}")
    import torch.multiprocessing as processes

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes.spawn(rank_main, (given, port), nprocs=given.gpus or given.cpus)
    if given.json:
        distributed_tables.main(Path(given.json))


if __name__ == "__main__":
    main()
