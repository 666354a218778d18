"""Mixtures of experts that ranks share, in bench.distributed: one by itself, and a whole decoder layer."""

import functools

EXPERTS, SLOTS, EXPERT_WIDTH, EXPERT_FFN = 128, 8, 2048, 768  # a mixture of Qwen3's 30B


def plain_mixture(run):
    """What frameworks do: a function of this rank's tokens and of its experts' matrices."""
    torch, dist, world = run.torch, run.dist, run.world

    def plain(x, index, weights, up, down):
        """What frameworks do: rows to their ranks and back, torch._grouped_mm, and sums by index_add_."""
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=len(up) * world)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        each = len(up)
        send, receive = (t.view(world, each).sum(1).tolist() for t in (counts, theirs))
        rows = Exchanged.apply(x[order // index.shape[1]], send, receive)
        to = torch.arange(each, device=run.device).repeat(world).repeat_interleave(theirs).argsort(stable=True)
        ends = theirs.view(world, each).sum(0).cumsum(0).to(torch.int32)
        gate, value = torch._grouped_mm(rows[to], up.mT, offs=ends).chunk(2, -1)
        made = torch._grouped_mm(torch.nn.functional.silu(gate) * value, down.mT, offs=ends)
        made = Exchanged.apply(torch.zeros_like(made).index_copy(0, to, made), receive, send)
        made = made * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // index.shape[1], made)

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.splits = receive, send
            got = rows.new_empty(sum(receive), rows.shape[1])
            dist.all_to_all_single(got, rows.contiguous(), receive, send)
            return got

        @staticmethod
        def backward(ctx, dy):
            return Exchanged.apply(dy, *ctx.splits), None, None

    return plain


def experts(run):
    """us of a mixture's forward and of a step, experts and tokens shared by the ranks; and on one GPU alone."""
    import pydet.torch
    import pydet.torch.distributed as pd

    torch, world, rank, plain = run.torch, run.world, run.rank, plain_mixture(run)

    def ours(x, index, weights, up, down, group=None):
        def layers(rows, ends):
            gate, value = torch.ops.pydet.grouped_gemm(rows, up.mT, ends, None, None, "auto", None).chunk(2, -1)
            inner = pydet.torch.swiglu(gate, value)
            return torch.ops.pydet.grouped_gemm(inner, down.mT, ends, None, None, "auto", None)

        return pd.expert_parallel(x, index, weights, layers, EXPERTS, group=group)

    up = run.normal(EXPERTS, 2 * EXPERT_FFN, EXPERT_WIDTH, seed=51) * 0.02
    down = run.normal(EXPERTS, EXPERT_WIDTH, EXPERT_FFN, seed=52) * 0.02
    own = lambda t: t.chunk(world)[rank].contiguous()  # noqa: E731
    for tokens in (128, 4096):
        x, dy = (run.normal(tokens, EXPERT_WIDTH, seed=seed) for seed in (53, 54))
        generator = torch.Generator(run.device).manual_seed(55)
        scores, index = torch.rand(tokens, EXPERTS, generator=generator).topk(SLOTS)
        weights, us, found = (scores / scores.sum(-1, keepdim=True)).bfloat16(), {}, {}
        whole_input, shared_input = (x, index, weights, up, down), [own(t) for t in (x, index, weights, up, down)]
        calls = {
            "plain": (plain, shared_input, own(dy)),
            "expert_parallel": (ours, shared_input, own(dy)),
            "one GPU": (functools.partial(ours, group=run.alone), whole_input, dy),
        }
        for name, (call, given, gradient) in calls.items():
            with torch.no_grad():
                us[f"{name}, forward"] = run.timed(lambda i, c=call, g=given: c(*g), 7)

            def step(i, call=call, given=given, gradient=gradient):
                leaves = [t if t.dtype == torch.int64 else t.detach().requires_grad_() for t in given]
                y = call(*leaves)
                y.backward(gradient)
                return [y.detach(), *(t.grad for t in leaves if t.requires_grad)]

            us[f"{name}, step"] = run.timed(step, 5)
            found[name] = step(0)
        parts = zip(("y", "dx", "dweights", "dup", "ddown"), found["expert_parallel"], found["one GPU"], strict=True)
        run.note("experts", tokens=tokens, us=us, differ={what: run.differ(a, own(b)) for what, a, b in parts})


# ---- A whole decoder layer -----------------------------------------------------------------------------------------


class Layer:
    """Sizes of a layer, and how long its caches and sequences are: those of Qwen3-30B-A3B, or tiny ones on CPUs."""

    def __init__(self, run):
        gpus = bool(run.given.gpus)
        self.cached, self.trained = (2048, 4096) if gpus else (32, 64)
        self.decoded = (1, 16, 64, 256, 512) if gpus else (1, 2, 16)
        sizes = {"hidden_size": EXPERT_WIDTH, "num_experts": EXPERTS, "moe_intermediate_size": EXPERT_FFN}
        sizes |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": SLOTS}
        tiny = {"hidden_size": 64, "num_experts": 16, "moe_intermediate_size": 32, "num_experts_per_tok": 4}
        tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        self.sizes = (sizes if gpus else tiny) | {"num_hidden_layers": 1, "norm_topk_prob": True}
        self.width, self.head = self.sizes["hidden_size"], self.sizes["head_dim"]


class Cached:
    """The keys and values of sequences that decode: each call's token is the last of them."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def update(self, keys, values, *place, **options):
        self.keys[:, :, -1:], self.values[:, :, -1:] = keys, values
        return self.keys, self.values


def built(run, of, attention):
    """A layer of Transformers, with the same weights in each call."""
    torch = run.torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    config = Qwen3MoeConfig(**of.sizes)
    config._attn_implementation, config._experts_implementation = attention, "grouped_mm"
    layer = Qwen3MoeDecoderLayer(config, 0).to(torch.bfloat16)
    for seed, p in enumerate(layer.parameters()):
        p.data = run.normal(*p.shape, seed=100 + seed) * 0.02 + (p.dim() == 1)
    return layer.train()


def layers_of_all(run, of):
    """name -> a layer, and whether its tokens are shared out over the ranks."""
    import pydet.torch
    import pydet.torch.distributed as pd

    world, rank, plain = run.world, run.rank, plain_mixture(run)
    pydet.torch.register_attention()
    found = {"stock, one GPU": (built(run, of, "sdpa"), False)}
    stock = built(run, of, "sdpa")
    experts = stock.mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        own = getattr(experts, name).detach().chunk(world)[rank].clone()
        setattr(experts, name, run.torch.nn.Parameter(own))
    experts.forward = lambda x, index, weights: plain(x, index, weights, experts.gate_up_proj, experts.down_proj)
    found["stock, all-to-all"] = stock, True
    for name, tokens in (("pydet, one GPU", None), ("pydet, tokens shared out", "shard"), ("pydet", "replicate")):
        layer = built(run, of, "pydet")
        pydet.torch.convert(layer)
        if tokens:
            pd.shard_experts(layer, tokens=tokens)
        found[name if tokens != "replicate" else "pydet, the same tokens"] = layer, tokens == "shard"
    return found


def moe(run):
    """us of a whole decoder layer of Qwen3-30B-A3B: decoding with a cache, reading, and a step of training.

    Stock is Transformers' layer with torch's attention and grouped_mm. On one GPU it has all tokens. On all of them the
    experts are shared out, and so are the tokens, which go to them and back by NCCL's all-to-all. pydet's with tokens
    shared out is the same division; with the same tokens on every rank, each has all of the attention.
    """
    import inspect

    torch, of = run.torch, Layer(run)
    layers, share = layers_of_all(run, of), lambda t: t.tensor_split(run.world)[run.rank]
    forward = inspect.signature(type(layers["stock, one GPU"][0]).forward).parameters
    cache_name = "cache" if "cache" in forward else "past_key_values"

    def rotary(places, dtype):
        steps = places[..., None].float() * 1e6 ** (-torch.arange(0, of.head, 2).float() / of.head)
        both = torch.cat((steps, steps), -1)
        return both.cos().to(dtype), both.sin().to(dtype)

    kv = of.sizes["num_key_value_heads"]
    with torch.no_grad():
        for m in of.decoded:
            if run.over():
                return
            x = [run.normal(m, 1, of.width, seed=200 + i) for i in range(4)]
            cache = [run.normal(m, kv, of.cached, of.head, seed=210 + i) for i in range(2)]
            angles = rotary(torch.full((m, 1), of.cached - 1), x[0].dtype)
            us, outs = {}, {}
            for name, (layer, shared) in layers.items():
                if shared and m < run.world:
                    continue
                cut = share if shared else lambda t: t
                given, where = [cut(t) for t in x], Cached(*map(cut, cache))
                turns = tuple(map(cut, angles))

                def call(i, layer=layer, given=given, where=where, turns=turns):
                    y = layer(given[i % 4], position_embeddings=turns, **{cache_name: where})
                    return y if isinstance(y, torch.Tensor) else y[0]

                us[name] = run.timed(call, 10)
                outs[name] = call(0)
                if run.given.gpus and not shared:  # an all-to-all waits for the host
                    us[f"{name}, a graph"] = run.graphed(call, 4)
            one = outs["pydet, one GPU"]
            differ = {n: run.differ(y, share(one) if layers[n][1] else one) for n, y in outs.items() if "pydet" in n}
            run.note("moe", what="decode", m=m, us=us, differ=differ)
        x = run.normal(run.world, of.trained // run.world, of.width, seed=220)  # a sequence for each rank
        angles = rotary(torch.arange(x.shape[1])[None], x.dtype)
        us, outs = {}, {}
        for name, (layer, shared) in layers.items():
            given = share(x) if shared else x
            call = lambda i, layer=layer, given=given: _first(layer(given, position_embeddings=angles))  # noqa: E731
            us[name] = run.timed(call, 5)
            outs[name] = call(0)
        one = outs["pydet, one GPU"]
        differ = {n: run.differ(y, share(one) if layers[n][1] else one) for n, y in outs.items() if "pydet" in n}
        run.note("moe", what="prefill", m=of.trained, us=us, differ=differ)
    del outs, one
    _training(run, of, layers, x, angles)


def _first(y):
    return y if hasattr(y, "shape") else y[0]


def _training(run, of, layers, x, angles):
    """A step on a sequence of each rank: one GPU takes them one by one, and all ranks end with the sums of all."""
    import pydet.torch
    import pydet.torch.distributed as pd

    torch, dist = run.torch, run.dist
    dy = run.normal(*x.shape, seed=230)
    mine, us, found = slice(run.rank, run.rank + 1), {}, {}

    def passes(layer, rows):
        given = x[rows].detach().requires_grad_()
        y = _first(layer(given, position_embeddings=angles))
        y.backward(dy[rows])
        return y.detach(), given.grad

    def in_grad(layer, shared):
        """In one batch, gradients as PyTorch keeps them."""

        def step(i):
            layer.zero_grad(set_to_none=True)
            passes(layer, mine if shared else slice(None))
            if shared:
                dense = [p.grad for name, p in layer.named_parameters() if "experts" not in name]
                flat = torch.cat([g.view(-1) for g in dense])
                dist.all_reduce(flat)

        return step

    def ours(layer, shared):
        """In segments, a rank's each: sums in their order."""
        pydet.torch.accumulate_gradients(layer)
        group = None if shared else run.alone
        sums = pd.OrderedMainGrads(layer.named_parameters(), group=group)

        def step(i):
            for p in layer.parameters():
                p.main_grad.zero_()
            made = []
            for rows in [mine] if shared else [slice(r, r + 1) for r in range(run.world)]:
                made.append(passes(layer, rows))
                sums.add()
            sums.finish()
            return made

        return step

    def continued(layer, shared):
        """In one batch, to sums in fp32."""
        pydet.torch.accumulate_gradients(layer)

        def step(i):
            for p in layer.parameters():
                p.main_grad.zero_()
            passes(layer, slice(None))

        return step

    for name, kind in (
        *(("stock, one GPU", in_grad), ("stock, all-to-all", in_grad), ("pydet, one GPU", in_grad)),
        *(("pydet, one GPU, main_grad", continued), ("pydet, one GPU, segments in order", ours)),
        ("pydet, tokens shared out", ours),
    ):
        layer, shared = layers[", ".join(name.split(", ")[:2])]
        step = kind(layer, shared)
        us[name] = run.timed(step, 4)
        if kind is ours:
            found[shared] = step(0), {n: p.main_grad for n, p in layer.named_parameters()}
        for p in layer.parameters():
            p.grad = None
    (one, sums), (own, shares) = found[False], found[True]
    differ = {"y": run.differ(own[0][0], one[run.rank][0]), "dx": run.differ(own[0][1], one[run.rank][1])}
    for name, want in sums.items():
        got = shares[name]
        if hasattr(got, "to_local"):
            got, want = got.to_local(), want.chunk(run.world)[run.rank]
        differ[name] = run.differ(got, want)
    run.note("moe", what="train", m=of.trained, us=us, differ=differ)
