"""Attention over tokens that ranks share, and whole steps of data-parallel ranks: the bits of one, on 2, 4 and 8.

Eight processes are started once, over gloo. Each check runs in groups of the first 1, 2, 4 and 8 of them, and gives
whole tensors, put together from the ranks' parts: all must have the bits of the library's attention of the whole.
"""

import datetime
import hashlib
import os
import re
import threading
import traceback

import pytest

from test_torch_distributed import found_by, free_port, start, tensors

SIZES = (1, 2, 4, 8)

# name: (B, H, G, queries, keys, D, E), type, arithmetic, options. Under causal a chunk has 128 tokens or more, so those
# of 1024 are cut for zigzag on up to 4 ranks.
CASES = {
    "causal": ((1, 2, 1, 2048, 2048, 16, 8), "bfloat16", "sm90", {"causal": True, "kv_chunk": 256}),
    "causal batch": ((2, 2, 1, 1024, 1024, 8, 8), "float32", "ieee", {"causal": True, "softcap": 3.0}),
    "window": ((1, 2, 2, 1024, 1024, 8, 8), "float16", "sm80", {"causal": True, "window": (300, 0), "kv_chunk": 128}),
    "sinks": ((2, 2, 1, 1024, 1024, 12, 20), "bfloat16", "ieee", {"causal": True, "kv_chunk": 384, "sinks": True}),
    "heads by turns": (
        (1, 6, 3, 1024, 1024, 8, 8),
        "float16",
        "sm90",
        {"causal": True, "sinks": True, "key_heads_at_once": 2},
    ),
    "full": ((2, 2, 1, 80, 624, 8, 8), "bfloat16", "sm90", {"kv_chunk": 128}),
    "full sinks": ((1, 2, 2, 16, 16, 8, 8), "float32", "ieee", {"sinks": True, "scale": 0.7}),
    "one token a chunk": ((1, 1, 1, 16, 2048, 8, 8), "bfloat16", "sm90", {"kv_chunk": 512}),
}


# Those whose key heads the ranks divide, by heads: chunks of any number of tokens, causal with gradients too.
BY_HEADS = {
    "heads causal": (
        (2, 16, 8, 208, 208, 8, 12),
        "bfloat16",
        "sm90",
        {"causal": True, "sinks": True, "kv_chunk": 128, "window": (150, 0)},
    ),
    "heads full": ((1, 8, 8, 80, 624, 8, 8), "float32", "ieee", {"kv_chunk": 128, "softcap": 3.0}),
}


def layouts(name, size):
    (_, _, _, queries, *_), _, _, options = CASES[name]
    fits = not options.get("causal") or queries >= 256 * size or size == 1
    return ("contiguous", "zigzag") if fits else ("contiguous",)


# ---- What each process runs ----------------------------------------------------------------------------------------


def operands(shape, dtype, options):
    """q, k, v, dout, and sinks or None; the scores spread, so that references move."""
    import torch

    b, h, g, queries, keys, d, e = shape
    dtype = getattr(torch, dtype)
    q, k, v, dout = tensors(
        h + keys, (b, h, queries, d), (b, g, keys, d), (b, g, keys, e), (b, h, queries, e), dtype=dtype
    )
    (sinks,) = tensors(3, (h,), dtype=torch.float32)
    return q * 2, k, v, dout, sinks if options.get("sinks") else None


def alone(shape, dtype, arithmetic, options):
    """The library's, of the whole: out, dq, dk, dv and, with sinks, dsinks."""
    import torch

    import pydet
    from pydet.torch.ops.attention import padded

    q, k, v, dout, sinks = operands(shape, dtype, options)
    how = {"scale": shape[5] ** -0.5, "arithmetic": arithmetic} | options | {"sinks": sinks}
    how.pop("key_heads_at_once", None)
    backward = {name: x for name, x in how.items() if name != "kv_chunk"}
    pq, pk, pv = padded(q, k, v)
    out, lse = pydet.attention(pq, pk, pv, return_lse=True, **how)
    pdout = torch.nn.functional.pad(dout, (0, pv.shape[-1] - v.shape[-1]))
    found = pydet.attention_backward(pdout, pq, pk, pv, out, lse, **backward)
    widths = v.shape[-1], q.shape[-1], q.shape[-1], v.shape[-1]
    return *(x[..., :n].contiguous() for x, n in zip((out, *found[:3]), widths, strict=True)), *found[3:]


def shared(group, layout, shape, dtype, arithmetic, options):
    """The same by the group, as whole tensors."""
    import torch

    import pydet.torch.distributed as pd

    *given, dout, sinks = operands(shape, dtype, options)
    place = {"dim": 2, "group": group, "layout": layout}
    own = [pd.shard_context(x, **place).requires_grad_() for x in given]
    sinks = None if sinks is None else sinks.requires_grad_()
    how = options | {"sinks": sinks, "arithmetic": arithmetic, "group": group, "layout": layout}
    out = pd.context_parallel_attention(*own, **how)
    out.backward(pd.shard_context(dout, **place))
    with torch.no_grad():
        assert pd.context_parallel_attention(*own, **how).equal(out)
    results = [pd.gather_context(x, **place) for x in (out, *(x.grad for x in own))]
    return *results, *([] if sinks is None else [sinks.grad])


def key_elements(call):
    """What call() gives, and the most elements of keys that an attention had at a time."""
    import pydet
    from pydet.torch.distributed import context, context_heads

    seen, forward, backward = [], pydet.attention, pydet.attention_backward

    def noting(own, place):
        def noted(*operands, **options):
            seen.append(operands[place].numel())
            return own(*operands, **options)

        return noted

    pydet.attention = noting(forward, 1)
    context._backward = context_heads._backward = noting(backward, 2)
    try:
        return call(), max(seen)
    finally:
        pydet.attention, context._backward, context_heads._backward = forward, backward, backward


def words(x):
    import torch

    return x.detach().contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def digest(x):
    return hashlib.sha256(words(x).numpy().tobytes()).hexdigest()


def wrong(found, want):
    """How many elements differ, of each result."""
    assert [x.shape for x in found] == [x.shape for x in want] and len(found) == len(want)
    assert [x.dtype for x in found] == [x.dtype for x in want]
    return [int((words(x) != words(y)).sum()) for x, y in zip(found, want, strict=True)]


def control(group, world, rank, want):
    """As others do it: parts of the ranks' keys are merged by their lse, and gradients of keys all-reduced."""
    import torch
    import torch.distributed as dist

    import pydet

    shape, dtype, arithmetic, options = CASES["full"]
    q, k, v, dout, _ = operands(shape, dtype, options)
    how = {"scale": shape[5] ** -0.5, "arithmetic": arithmetic}
    parts = [
        pydet.attention(q, a.contiguous(), b.contiguous(), return_lse=True, kv_chunk=128, **how)
        for a, b in zip(k.chunk(world, 2), v.chunk(world, 2), strict=True)
    ]
    total = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    merged = sum(out.float() * (lse - total).exp()[..., None] for out, lse in parts).to(q.dtype)
    out, lse = pydet.attention(q, k, v, return_lse=True, kv_chunk=128, **how)
    own = [x.chunk(world, 2)[rank].contiguous() for x in (dout, q, out, lse)]
    sums, exact = ([torch.zeros(k.shape), torch.zeros(v.shape)] for _ in range(2))
    pydet.attention_backward(dout, q, k, v, out, lse, only="kv", dk=exact[0], dv=exact[1], **how)
    pydet.attention_backward(*own[:2], k, v, *own[2:], only="kv", dk=sums[0], dv=sums[1], **how)
    for x in sums:
        dist.all_reduce(x, group=group)
    return wrong([merged, *sums], [want[0], *exact])


def layers(group, world, rank, layout):
    """A decoder of one layer, of two sequences whose tokens ranks share: results, and the gradients of its weights."""
    import torch

    import pydet.torch
    import pydet.torch.distributed as pd

    batch, length, width, heads = 2, 256 * 8, 16, 2
    table, ones, offset, wide, w, back, bias, dy = tensors(
        7, (40, width), (width,), (width,), (3 * width, width), (width, width), (width, width), (width,),
        (batch, length, width), dtype=torch.float32,
    )  # fmt: skip
    ids = torch.randint(0, 40, (batch, length), generator=torch.Generator().manual_seed(1))
    weights = [x.requires_grad_() for x in (table, ones, offset, wide, w, back, bias)]
    where = {"group": group, "layout": layout}
    own, dy = (pd.shard_context(x, **where) for x in (ids, dy))
    x = pd.context_parallel_embedding(own, table, **where)
    x.retain_grad()
    y = pd.layer_norm(x, ones, offset, eps=1e-5, **where)
    q, k, v = pd.context_parallel_linear(y, wide, **where).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = pd.context_parallel_attention(q, k, v, causal=True, kv_chunk=256, **where)
    x1 = x + pd.context_parallel_linear(mixed.transpose(1, 2).flatten(2), w, **where)
    y = x1 + pd.context_parallel_linear(pd.rms_norm(x1, ones, eps=1e-6, **where), back, bias, **where)
    y.backward(dy)
    results = [pd.gather_context(t, **where) for t in (y, x.grad)]
    if world == 1:  # each by what one device has
        normed = pydet.torch.layer_norm(x.detach(), ones, offset, eps=1e-5)
        assert normed.equal(pd.layer_norm(x, ones, offset, eps=1e-5, **where))
        alone = x.detach(), ones.detach().clone().requires_grad_(), offset.detach().clone().requires_grad_()
        shared = x.detach(), ones.detach().clone().requires_grad_(), offset.detach().clone().requires_grad_()
        pydet.torch.layer_norm(*alone, eps=1e-5).backward(dy)
        pd.layer_norm(*shared, eps=1e-5, **where).backward(dy)
        assert wrong([t.grad for t in shared[1:]], [t.grad for t in alone[1:]]) == [0, 0]
        one, dy_one = x.detach()[:1], dy[:1]
        own_w = w.detach().clone().requires_grad_()
        pd.context_parallel_linear(one, own_w, **where).backward(dy_one)
        want = pydet.gemm_db(dy_one[0], one[0], k_chunk=length // 16)
        assert wrong([own_w.grad], [want]) == [0]
        held = torch.nn.Parameter(table.detach().clone())
        total = pydet.embedding_backward(dy, ids, len(held))
        pd.context_parallel_embedding(ids, held, **where).backward(dy)
        assert wrong([held.grad], [total]) == [0]
    return [*results, *(t.grad for t in weights)]


def network(kind):
    import torch

    import pydet.torch

    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.RMSNorm(64), torch.nn.Linear(64, 16, bias=False))
    net.append(torch.nn.Conv1d(1, 8, 1, dilation=2))  # which keeps its grad
    net = net.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    pydet.torch.convert(net)
    return net


def train(group, world, rank, kind):
    """Parameters and norms after three steps over 8 segments; kind: a type, "ddp", "fsdp", or "all_reduce"."""
    import contextlib

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    import pydet.torch
    import pydet.torch.distributed as pd

    net = network(kind)
    model, norms = net, []
    (inputs,) = tensors(4, (3, 8, 16, 24), dtype=torch.float32)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
        net.set_custom_reduce_scatter(pd.OrderedReduceScatter(8 // world))
        net.set_gradient_divide_factor(1.0)
        net.set_force_sum_reduction_for_comms(True)
    else:
        found = pydet.torch.accumulate_gradients(net)
        assert len(found) == 4 and len(found.outside) == 2
        sums = pd.OrderedMainGrads(net.parameters(), group=group)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
    optimizer = pydet.torch.AdamW(net.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    for some in inputs:
        optimizer.zero_grad()
        for number in range(rank, 8, world):
            with model.no_sync() if kind == "ddp" else contextlib.nullcontext():
                x = some[number].to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
                model(x[:, None]).square().sum().backward()
            if kind not in ("fsdp", "all_reduce"):
                sums.add()
        if kind == "all_reduce":
            for p in net.parameters():
                dist.all_reduce(p.grad if getattr(p, "main_grad", None) is None else p.main_grad, group=group)
        elif kind != "fsdp":
            sums.finish()
        norms.append(pd.clip_grad_norm_(net.parameters(), 1.0, group=group))
        optimizer.step()
    yield torch.stack(norms)
    for p in net.parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        yield whole.detach()
        if kind == "bfloat16":
            yield optimizer.state[p]["master"]


STEPS = ("float32", "bfloat16", "ddp", "fsdp")


def refusals(group, world, rank):
    """What each rank hears."""
    import torch

    import pydet
    import pydet.torch.distributed as pd

    def sentence(tokens, keys=None, change=None, **options):
        q = torch.zeros(1, 2, tokens, 8, requires_grad=True)
        k = torch.zeros(1, 1, tokens if keys is None else keys, 8)
        if change and rank == world - 1:
            options |= change
        try:
            pd.context_parallel_attention(q, k, k, group=group, **options)
        except pydet.Error as problem:
            return str(problem)
        return "accepted"

    yield "layout", sentence(128, layout="stripes")
    yield "chunk", sentence(96, causal=True)
    yield "zigzag chunk", sentence(128, causal=True, layout="zigzag")
    yield "odd", sentence(5, layout="zigzag")
    yield "keys", sentence(128, 256, causal=True)
    yield "window", sentence(128, window=(5, 0))
    yield "kv_chunk", sentence(128, kv_chunk=100)
    yield "a rank's layout", sentence(256, causal=True, change={"layout": "zigzag"})
    yield "a rank's kv_chunk", sentence(128, change={"kv_chunk": 256})
    yield "a rank's causal", sentence(128, change={"causal": True})
    yield "a rank's refusal", sentence(128, change={"arithmetic": "cubic"})
    yield "heads", sentence(128, key_heads_at_once=0)
    yield "method", sentence(128, method="ring")
    yield "a rank's method", sentence(128, change={"method": "heads"})
    yield "key heads", sentence(128, method="heads")
    yield "turns of heads", sentence(128, method="heads", key_heads_at_once=1)
    yield "afterwards", sentence(256, causal=True, layout="zigzag")
    with torch.no_grad():
        yield "no gradient", sentence(96, causal=True)
    x, w = torch.zeros(1, 24, 8), torch.zeros(8, 8)
    own = {"group": group, "layout": "zigzag"}
    for name, call in (
        ("norm", lambda: pd.layer_norm(x, w[0], eps=1e-5, **own)),
        ("rms", lambda: pd.rms_norm(x, w[0], eps=1e-5, **own)),
        ("rms shape", lambda: pd.rms_norm(x[0], w[0], eps=1e-5, **own)),
        ("segments", lambda: pd.context_parallel_linear(x, w, segments=7, **own)),
        ("tokens", lambda: pd.context_parallel_linear(x[:, :1], w, **own)),
        ("ids", lambda: pd.context_parallel_embedding(torch.zeros(3, dtype=torch.int64), w, **own)),
    ):
        with pytest.raises(pydet.Error) as caught:
            call()
        yield name, str(caught.value)
    try:
        pd.shard_context(torch.zeros(1, 17), group=group, layout="zigzag")
    except pydet.Error as problem:
        yield "shard", str(problem)


def work(rank, port, queue):
    """All checks on one rank: {size: {name: what}}."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYDET_NUM_THREADS="1")
    found = {}
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=SIZES[-1], timeout=datetime.timedelta(seconds=60))
        groups = {size: dist.new_group(list(range(size))) for size in SIZES}
        cases = CASES | BY_HEADS
        names = list(cases)
        mine = {name: alone(*cases[name]) for i, name in enumerate(names) if i % SIZES[-1] == rank}
        want = {}
        for i, name in enumerate(names):  # each reference is made by one rank
            box = [mine.get(name)]
            dist.broadcast_object_list(box, i % SIZES[-1])
            want[name] = box[0]
        for size, group in groups.items():
            if rank < size:
                notes = found[size] = {}
                for name, case in CASES.items():
                    for layout in layouts(name, size):
                        notes[f"{name} {layout}"] = wrong(shared(group, layout, *case), want[name])
                for name, (shape, dtype, arithmetic, options) in BY_HEADS.items():
                    for layout in ("contiguous", "zigzag"):
                        asked = shape, dtype, arithmetic, options | {"method": "heads"}
                        got, most = key_elements(lambda: shared(group, layout, *asked))  # noqa: B023 -- called here
                        notes[f"{name} {layout}"] = wrong(got, want[name])
                        notes[f"keys of {name}"] = most
                notes["keys gathered"] = key_elements(
                    lambda: shared(group, "contiguous", *BY_HEADS["heads full"])  # noqa: B023
                )[1]
                notes["control"] = control(group, size, rank, want["full"])
                for layout in ("contiguous", "zigzag") if size < 8 else ("contiguous",):  # 16 chunks want 4096 tokens
                    notes[f"layers {layout}"] = [digest(x) for x in layers(group, size, rank, layout)]
                for kind in (*STEPS, "all_reduce"):
                    notes[f"step {kind}"] = [words(x).tolist() for x in train(group, size, rank, kind)]
                if size > 1:
                    notes["refusals"] = dict(refusals(group, size, rank))
            dist.barrier()
        queue.put((rank, found, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, found, traceback.format_exc()))


@pytest.fixture(scope="module")
def found():
    """[rank][size][name]."""
    pytest.importorskip("torch")
    return found_by(*start(SIZES[-1], work, free_port()))


# ---- What must be true of it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_has_the_bits_of_one_device(found, name):
    for size in SIZES:
        for rank in range(size):
            for layout in layouts(name, size):
                counts = found[rank][size][f"{name} {layout}"]
                assert len(counts) >= 4 and not any(counts), f"{size} ranks, rank {rank}, {layout}: {counts} differ"


@pytest.mark.parametrize("name", BY_HEADS)
def test_by_heads_too_with_a_share_of_the_keys(found, name):
    b, _, g, _, keys, d, _ = BY_HEADS[name][0]
    for size in SIZES:
        for rank in range(size):
            notes = found[rank][size]
            counts = [x for where, x in notes.items() if where.startswith(f"{name} ")]
            assert len(counts) == 2 and all(len(x) >= 4 and not any(x) for x in counts), (size, rank, counts)
            assert notes[f"keys of {name}"] == b * g * keys * d // size
            assert notes["keys gathered"] == 8 * 624 * 8


def test_merging_by_lse_and_an_all_reduce_would_be_seen(found):
    """The counts above can tell: what is merged after a rounding differs, on one rank alone it does not."""
    assert found[0][1]["control"] == [0, 0, 0]
    for size in SIZES[1:]:
        out, dk, dv = found[0][size]["control"]
        assert out > 100, (size, out)
        if size > 2:
            assert dk > 20 and dv > 20, (size, dk, dv)


def test_a_layer_of_shared_tokens_has_the_bits_of_one_rank(found):
    """Embedding, norms, linear layers and attention, and the gradients of all their weights."""
    want = found[0][1]["layers contiguous"]
    assert len(want) == 9 and len(set(want)) == 9
    for size in SIZES:
        for rank in range(size):
            for layout in ("contiguous", "zigzag") if size < 8 else ("contiguous",):
                got = found[rank][size][f"layers {layout}"]
                assert got == want, (size, rank, layout, [a == b for a, b in zip(got, want, strict=True)])


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_has_the_bits_of_one_rank(found, kind):
    """Gradients of 8 segments, the norm they are clipped by, and AdamW, sharded or not."""
    want = found[0][1][f"step {kind}"]
    assert len(want) == (13 if kind == "bfloat16" else 7) and all(norm > 0 for norm in want[0])
    for size in SIZES:
        for rank in range(size):
            assert found[rank][size][f"step {kind}"] == want, f"{size} ranks, rank {rank}"
    if kind == "ddp":
        assert want == found[0][1]["step float32"]


def test_a_step_by_all_reduce_would_be_seen(found):
    def count(a, b):
        return sum(
            x != y for some, others in zip(a, b, strict=True) for x, y in zip(flat(some), flat(others), strict=True)
        )

    def flat(x):
        return [z for y in x for z in flat(y)] if isinstance(x, list) else [x]

    for size in SIZES[1:]:
        assert count(found[0][size]["step all_reduce"], found[0][1]["step all_reduce"]) > 100, size


def test_what_cannot_be_is_refused_on_every_rank(found):
    for size in SIZES[1:]:
        for rank in range(size):
            said, last = found[rank][size]["refusals"], rank == size - 1
            assert "layout is 'stripes', want one of contiguous, zigzag" in said["layout"]
            assert re.search(rf"a chunk has 96 tokens, want a multiple of 128 on {size} ranks", said["chunk"])
            assert "a chunk has 64 tokens, want a multiple of 128" in said["zigzag chunk"]
            assert "q has 5 tokens and k 5 on a rank, want even numbers in zigzag" in said["odd"]
            assert "q has 128 tokens and k 256 under causal" in said["keys"]
            assert "window is (5, 0) without causal, want causal=True" in said["window"]
            assert "kv_chunk is 100, want a positive multiple of 128" in said["kv_chunk"]
            for name in ("a rank's layout", "a rank's kv_chunk", "a rank's causal"):
                assert "the ranks do not agree" in said[name], said[name]
            assert ("cubic" if last else f"rank {size - 1} refused") in said["a rank's refusal"], said
            assert "layer_norm: x has 24 tokens on a rank, want a multiple of 512 in zigzag" in said["norm"]
            assert "rms_norm: x has 24 tokens on a rank, want a multiple of 512 in zigzag" in said["rms"]
            assert "rms_norm: x is (24, 8), want [B, tokens, N]" in said["rms shape"]
            assert f"segments is 7, want a multiple of the {2 * size} chunks on {size} ranks" in said["segments"]
            assert f"x has 1 tokens on a rank, want a multiple of {16 // size} in zigzag" in said["tokens"]
            assert "ids is (3,), w is (8, 8), want [B, tokens] and [V, N]" in said["ids"]
            assert "key_heads_at_once is 0, want a number from 1 up" in said["heads"]
            assert "method is 'ring', want one of gather, heads" in said["method"]
            assert ("number of key heads" if last else f"rank {size - 1} refused") in said["a rank's method"], said
            assert (
                f"the number of key heads, under method 'heads', is 1, want a multiple of the {size}"
                in said["key heads"]
            )
            assert "key_heads_at_once is 1 with method 'heads', want None" in said["turns of heads"]
            assert said["afterwards"] == said["no gradient"] == "accepted", said
            if 17 % (2 * size):
                assert f"x has 17 tokens, want a multiple of {2 * size}" in said["shard"]


# ---- One device by turns -------------------------------------------------------------------------------------------


class Ranks:
    """Threads of one process in the place of ranks, on one device: what torch.distributed does, without it."""

    def __init__(self, world):
        self.world, self.barrier, self.here, self.given = world, threading.Barrier(world), threading.local(), {}

    def get_world_size(self, group=None):
        return self.world

    def get_rank(self, group=None):
        return self.here.rank

    def gather(self, x, group):
        import torch

        self.given[self.here.rank] = x
        self.barrier.wait(60)
        everyone = torch.stack([self.given[rank] for rank in range(self.world)])
        self.barrier.wait(60)
        return everyone

    def together(self, op, group, device, terms):
        return terms()

    def all_to_all_single(self, received, sent, group=None):
        import torch

        self.given[self.here.rank] = sent
        self.barrier.wait(60)
        received.copy_(torch.cat([self.given[r].chunk(self.world)[self.here.rank] for r in range(self.world)]))
        self.barrier.wait(60)

    def stand_in(self, monkeypatch, *modules):
        for module in modules:
            monkeypatch.setattr(module, "gather", self.gather, raising=False)
            monkeypatch.setattr(module, "together", self.together)
            monkeypatch.setattr(module, "dist", self)

    def run(self, call):
        """[call() of each rank]."""
        found, problems = [None] * self.world, []

        def one(rank):
            self.here.rank = rank
            try:
                found[rank] = call()
            except BaseException as problem:
                problems.append(problem)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return found


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_threads_in_the_place_of_ranks(device, monkeypatch):
    """The calls of each rank on one device: on a GPU by the kernels that it has for their shapes, against itself."""
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    import pydet
    import pydet.torch.distributed.context as context

    large = device == "cuda"
    arithmetics = {"bfloat16": ("sm90", "ieee") if large else ("sm90",), "float32": ("ieee",)}
    shapes = [(1, 2, 1, 512, 64)] if not large else [(1, 8, 2, 4096, 128), (2, 4, 4, 2048, 64), (1, 2, 1, 2048, 256)]
    for b, h, g, tokens, d in shapes:
        for dtype, names in arithmetics.items():
            q, k, v, dout = (
                x.to(device)
                for x in tensors(
                    tokens,
                    (b, h, tokens, d),
                    (b, g, tokens, d),
                    (b, g, tokens, d),
                    (b, h, tokens, d),
                    dtype=getattr(torch, dtype),
                )
            )
            for arithmetic in names:
                for more in ({"causal": True}, {"causal": True, "window": (700, 0)}, {}):
                    how = {"arithmetic": arithmetic, "kv_chunk": 512, "scale": d**-0.5} | more
                    out, lse = pydet.attention(q, k, v, return_lse=True, **how)
                    of = {name: x for name, x in how.items() if name != "kv_chunk"}
                    want = out, *pydet.attention_backward(dout, q, k, v, out, lse, **of)
                    for world in (1, 2, 4, 8) if large else (2,):
                        ranks = Ranks(world)
                        ranks.stand_in(monkeypatch, context)
                        for layout in ("contiguous", "zigzag"):

                            def call(layout=layout, how=how, ranks=ranks, given=(q, k, v, dout)):
                                place = {"dim": 2, "layout": layout}
                                *own, d_own = (context.shard_context(x, **place) for x in given)
                                asked = context._How(
                                    how.get("causal", False),
                                    how.get("window"),
                                    layout,
                                    how["scale"],
                                    None,
                                    how["arithmetic"],
                                    how["kv_chunk"],
                                )

                                class Kept:
                                    save_for_backward = lambda self, *x: setattr(self, "saved_tensors", x)
                                    needs_input_grad = (True,) * 4

                                kept = Kept()
                                y = context._Attention.forward(kept, *own, None, asked, None, True)
                                found = y, *context._Attention.backward(kept, d_own)[:3]
                                return [context.whole(x, None, layout) for x in found]

                            for found in ranks.run(call):
                                assert wrong(found, want) == [0, 0, 0, 0], (
                                    device,
                                    world,
                                    layout,
                                    dtype,
                                    arithmetic,
                                    more,
                                )


def small(family):
    """A model of Transformers, converted."""
    import torch
    import transformers

    import pydet.torch

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=1024,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=family == "tied"
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    pydet.torch.convert(model)
    return model


@pytest.mark.parametrize("family", ("llama", "tied", "gpt2"))
def test_a_model_of_transformers(family, monkeypatch):
    """Logits and all gradients of a converted model on 1 and 2 ranks, in both layouts; near the model's own."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import copy

    import pydet.torch
    import pydet.torch.distributed as pd
    from pydet.torch.distributed import context, context_heads, context_model, rows, tokens

    model = small(family)
    ids = torch.randint(0, 50, (2, 1024), generator=torch.Generator().manual_seed(1))
    labels, places = ids.roll(-1, 1), torch.arange(1024).expand(2, -1)

    def step(model, ids, labels, places):
        logits = model(ids, position_ids=places, use_cache=False).logits
        loss = -pydet.torch.log_prob(logits, labels).sum() / labels.numel() / ranks.world
        loss.backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters()}

    found = {}
    runs = (1, "contiguous", "gather"), (2, "contiguous", "gather"), (2, "zigzag", "gather"), (2, "zigzag", "heads")
    for world, layout, method in runs:
        ranks = Ranks(world)
        ranks.stand_in(monkeypatch, context, context_model, rows, tokens)
        monkeypatch.setattr(context_heads, "dist", ranks)
        own = [copy.deepcopy(model) for _ in range(world)]

        def call(layout=layout, own=own, ranks=ranks, method=method):
            pd.context_parallel(own[ranks.get_rank()], layout=layout, segments=8, kv_chunk=256, method=method)
            mine = [pd.shard_context(x, layout=layout) for x in (ids, labels, places)]
            logits, gradients = step(own[ranks.get_rank()], *mine)
            return context.whole(logits, None, layout, 1), gradients

        found[world, layout, method] = ranks.run(call)
    ((logits, gradients),) = found[1, "contiguous", "gather"]
    for key, answers in found.items():
        for other, others in answers:
            assert wrong([other], [logits]) == [0], key
            counts = dict(zip(gradients, wrong(others.values(), gradients.values()), strict=True))
            assert not any(counts.values()), (key, counts)
    ranks = Ranks(1)
    alone, of_alone = step(model.train(), ids, labels, places)
    assert words(alone).equal(words(logits)) or (alone - logits).abs().max() < 1e-5
    for name, gradient in of_alone.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_what_a_model_is_given(family, monkeypatch):
    """On two ranks places are made where there are none; what would be of a rank's own tokens alone is refused."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import copy

    import pydet
    import pydet.torch.distributed as pd
    from pydet.torch.distributed import context, context_model, rows, tokens

    model, places = small(family), torch.arange(1024).view(1, 1024)
    ids = places % 50
    mask = torch.ones(1, 512)
    mask[0, 0] = 0
    refused = {
        "labels are given, and a model shifts them": {"labels": ids[:, :512]},
        "position_ids are not the places of this rank's": {"position_ids": (places % 512)[:, 256:768]},
        "position_ids are not the places": {"position_ids": places[:, :511]},
        "tokens are masked": {"attention_mask": mask},
        "want input_ids or inputs_embeds": {"input_ids": None},
    }

    def logits_on(world, layout):
        ranks = Ranks(world)
        ranks.stand_in(monkeypatch, context, context_model, rows, tokens)
        own = [copy.deepcopy(model) for _ in range(world)]

        @torch.no_grad()
        def call():
            mine = own[ranks.get_rank()]
            pd.context_parallel(mine, layout=layout, segments=8)
            given = pd.shard_context(ids, layout=layout)
            made = [mine(given, use_cache=False).logits]
            if world > 1:
                own_places = pd.shard_context(places, layout=layout)
                made.append(mine(given, position_ids=own_places, use_cache=False, attention_mask=mask * 0 + 1).logits)
                made.append(mine(inputs_embeds=mine.get_input_embeddings()(given), use_cache=False).logits)
                for sentence, change in refused.items():
                    with pytest.raises(pydet.Error, match=f"^context_parallel: {sentence}"):
                        mine(**({"input_ids": given, "use_cache": False} | change))
                if layout == "zigzag":
                    with pytest.raises(pydet.Error, match=r"^context_parallel: 511 tokens on a rank, want an even"):
                        mine(given[:, :511], use_cache=False)
                mine.set_attn_implementation("sdpa")
                with pytest.raises(pydet.Error, match=r"^context_parallel: the model's attention was changed"):
                    mine(given, use_cache=False)
            return [context.whole(x, None, layout, 1) for x in made]

        return [x for found in ranks.run(call) for x in found]

    (want,) = logits_on(1, "contiguous")
    for layout in ("contiguous", "zigzag"):
        for found in logits_on(2, layout):
            assert wrong([found], [want]) == [0], layout


def test_a_model_that_cannot_be():
    torch = pytest.importorskip("torch")
    import pydet
    import pydet.torch
    import pydet.torch.distributed as pd

    def refuses(net, words):
        kinds = [type(module) for module in net.modules()]
        with pytest.raises(pydet.Error, match=words):
            pd.context_parallel(net)
        assert kinds == [type(module) for module in net.modules()]

    linear = torch.nn.Sequential(torch.nn.Linear(8, 8))
    refuses(
        linear, r"^context_parallel: 0 is Linear with weight, bias, whose gradient would be of this rank's tokens alone"
    )
    pydet.torch.convert(linear, k_chunk=16)
    refuses(linear, r"^context_parallel: 0 has k_chunk 16, want none")
    summed = torch.nn.Sequential(pydet.torch.Linear(8, 8))
    pydet.torch.accumulate_gradients(summed)
    refuses(summed, r"^context_parallel: 0 has accumulate_gradients")
    odd = torch.nn.Sequential(torch.nn.Embedding(4, 8, max_norm=1.0))
    refuses(odd, r"^context_parallel: 0 is Embedding with weight")
    with pytest.raises(pydet.Error, match=r"^context_parallel: model is int, want a torch.nn.Module"):
        pd.context_parallel(3)
    with pytest.raises(pydet.Error, match=r"^context_parallel: layout is 'ring'"):
        pd.context_parallel(torch.nn.Sequential(), layout="ring")
    with pytest.raises(pydet.Error, match=r"^context_parallel: method is 'ring', want one of gather, heads"):
        pd.context_parallel(torch.nn.Sequential(), method="ring")
