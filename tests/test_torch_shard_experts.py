"""Models whose experts ranks share, by shard_experts(): the bits of one process, on 1, 2, 4 and 8.

Eight processes are started once, over gloo. Each check runs in groups of the first 1, 2, 4 and 8 of them, and gives
whole tensors, put together from the ranks' parts. All must have the bits of the group of one, and what says so those of
a model that is not shared out.
"""

import contextlib
import copy
import datetime
import hashlib
import importlib.util
import os
import re
import tempfile
import traceback

import pytest

from test_torch_distributed import found_by, free_port, integers, local, start, tensors

SIZES = (1, 2, 4, 8)
SEGMENTS, EXPERTS, VOCABULARY = 8, 16, 64
LENGTHS = (5, 1, 17, 8, 2, 11, 3, 6)  # of the segments: one token goes to 2 of 16 experts, and to no other
FAMILIES = ("Mixtral", "DeepSeek-V3", "gpt-oss")

# ---- Models --------------------------------------------------------------------------------------------------------


def qwen(dtype, **more):
    """A converted Qwen3-MoE of two layers."""
    import torch
    import transformers

    import pydet.torch

    torch.manual_seed(0)
    pydet.torch.register_attention()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    of_experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = transformers.Qwen3MoeConfig(vocab_size=VOCABULARY, head_dim=16, **sizes, **of_experts, **more)
    model = transformers.Qwen3MoeForCausalLM(config).to(getattr(torch, dtype))
    model.set_attn_implementation("pydet")
    pydet.torch.convert(model, strict=True)
    return model


def layer(kind, dtype, **options):
    """A converted layer of experts, of a kind of test_torch_experts.py."""
    import torch

    import pydet.torch
    import test_torch_experts as of_one

    of_one.EXPERTS = EXPERTS
    device = torch.get_default_device()
    with torch.device("cpu"):
        model = torch.nn.ModuleDict({"experts": of_one.Experts(kind, getattr(torch, dtype))})
    model.to(device)
    if not model["experts"].has_post_expert_norm:
        del model["experts"].post_expert_norm
    pydet.torch.convert(model, **options)
    return model


def segments(step):
    import torch

    generator = torch.Generator("cpu").manual_seed(step)
    return [torch.randint(0, VOCABULARY, (1, n), generator=generator) for n in LENGTHS]


def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def loss_of(logits, ids):
    import torch

    labels = torch.nn.functional.pad(ids[0, 1:], (0, 1), value=-100)
    return torch.nn.functional.cross_entropy(logits[0].float(), labels, reduction="sum", ignore_index=-100) / 50


def everywhere(x):
    """A sharded tensor, whole."""
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


def parts(group, mine):
    """name -> tensor of all ranks, which have each some of the names."""
    import torch.distributed as dist

    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, {name: x.cpu() for name, x in mine.items()}, group=group)
    return {name: x for some in found for name, x in some.items()}


# ---- What each process runs ----------------------------------------------------------------------------------------


def train(group, dtype, *, share=True, kind="main_grad", begin=0, steps=2, load=None, save=None):
    """Steps over eight segments, dealt round robin: logits, losses, sums, norms, parameters and the state of AdamW.
    kind: how the sums of what is not shared out are made; "reentrant", "not reentrant": with checkpointing; "mixed":
    under autocast, tied to the head, one segment with a loss of 0, for which a model by itself has none."""
    import torch
    import torch.distributed as dist

    import pydet.torch
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    mixed = kind == "mixed"
    net = model = qwen(dtype, tie_word_embeddings=mixed)
    if kind.endswith("reentrant"):
        net.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        net.train()
    if share:
        assert pd.shard_experts(net, group=group) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    experts = [p for name, p in net.named_parameters() if "experts" in name]
    sums = None
    if kind in ("hook", "fsdp"):  # grad beside the experts' main_grad
        for part in net.model.layers:
            assert len(pydet.torch.accumulate_gradients(part.mlp.experts)) == 2
    else:
        assert len(pydet.torch.accumulate_gradients(net)) == len(list(net.parameters()))
        sums = pd.OrderedMainGrads(net.named_parameters(), group=group)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
    if kind == "hook":
        model = torch.nn.parallel.DistributedDataParallel(net, process_group=group, static_graph=False)
        state = pd.OrderedState(SEGMENTS // world, group)
        model.register_comm_hook(state, pd.ordered_hook)
        loss_of(logits_of(model, segments(9)[rank]), segments(9)[rank]).backward()  # DDP lays its buckets out anew
        state.reset()
        model.zero_grad()
        for p in experts:
            p.main_grad.zero_()
    if kind == "fsdp":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"), ignored_params=set(experts))
        net.set_custom_reduce_scatter(pd.OrderedReduceScatter(SEGMENTS // world))
        net.set_gradient_divide_factor(1.0)
        net.set_force_sum_reduction_for_comms(True)
    optimizer = pydet.torch.AdamW(net.parameters(), lr=0.01)
    if load:
        restored(net, optimizer, load, group)
    for step in range(begin, steps):
        given, mine = segments(step), {}
        optimizer.zero_grad()
        for i in range(rank, SEGMENTS, world):
            if mixed and i == 5 and not share:
                continue
            with model.no_sync() if kind == "ddp" else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    logits = logits_of(model, given[i])
                loss = loss_of(logits, given[i]) * (0 if mixed and i == 5 else 1)
                loss.backward()
            mine |= {f"logits {i}": logits.detach(), f"loss {i}": loss.detach()}
            if sums is not None:
                sums.add()
        if sums is not None:
            sums.finish()
        for name, x in sorted(parts(group, mine).items()):
            yield f"step {step} {name}", x
        for name, p in net.named_parameters():
            gradient = p.grad if getattr(p, "main_grad", None) is None else p.main_grad
            yield f"step {step} sum of {name}", everywhere(gradient)
        if share:  # whose norm is by segments
            yield f"norm {step}", pd.clip_grad_norm_(net.parameters(), 0.5, group=group)
        optimizer.step()
    if save:
        from torch.distributed import checkpoint

        state = dict(zip(("model", "optimizer"), states().get_state_dict(net, optimizer), strict=True))
        checkpoint.save(state, checkpoint_id=save, process_group=group)
    for name, p in net.named_parameters():
        if share:
            yield f"after {steps} {name}", everywhere(p)
            yield f"state after {steps} {name}", everywhere(optimizer.state[p]["exp_avg_sq"])


def states():
    import torch.distributed.checkpoint.state_dict

    return torch.distributed.checkpoint.state_dict


def restored(net, optimizer, folder, group):
    """What any number of ranks saved."""
    from torch.distributed import checkpoint

    state = dict(zip(("model", "optimizer"), states().get_state_dict(net, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder, process_group=group)
    states().set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def same_tokens(group, dtype, *, share=True, join=True, accumulate=True):
    """All ranks have the same tokens: logits and gradients, of two passes."""
    import pydet.torch
    import pydet.torch.distributed as pd
    from pydet.torch.distributed import experts_model

    net, was = qwen(dtype), experts_model.JOIN_BYTES
    experts_model.JOIN_BYTES = was if join else 0
    try:
        if share:
            pd.shard_experts(net, group=group, tokens="replicate")
        if accumulate:
            pydet.torch.accumulate_gradients(net)
        for i in (2, 1, 7):
            logits = logits_of(net, segments(0)[i])
            loss_of(logits, segments(0)[i]).backward()
            yield f"same logits {i}", logits
        for name, p in net.named_parameters():
            yield f"same gradient of {name}", everywhere(p.main_grad if accumulate else p.grad)
    finally:
        experts_model.JOIN_BYTES = was


def layers(group, share=True):
    """Layers by themselves: each kind, tokens uneven and none, slots without an expert, experts without a token."""
    import torch
    import torch.distributed as dist

    import pydet.torch
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    cases = ("Mixtral", "float32", {}), ("gpt-oss", "bfloat16", {}), ("gpt-oss", "bfloat16", {"k_chunk": 16})
    counts = 5, 0, 40, 1, 0, 0, 21, 3  # of the segments' tokens
    for kind, dtype, options in cases:
        net = layer(kind, dtype, **options)
        if share:
            assert pd.shard_experts(net, group=group) == ["experts"]
        named = dict(net.named_parameters())
        frozen = "experts.down_proj" if kind == "Mixtral" else ""
        if frozen:
            named[frozen].requires_grad_(False)
        pydet.torch.accumulate_gradients(net)
        sums, mine = pd.OrderedMainGrads(named.items(), group=group), {}
        for i in range(rank, SEGMENTS, world):
            x, dy = tensors(i, (counts[i], 32), (counts[i], 32), dtype=getattr(torch, dtype))
            (weights,) = tensors(9 + i, (counts[i], 3), dtype=torch.float32)
            index = integers(EXPERTS - 1, (counts[i], 3), i)
            index[:1, 1], index[3:4] = EXPERTS, EXPERTS + 5
            x.requires_grad_()
            weights.requires_grad_()
            y = net["experts"](x, index, weights)
            y.backward(dy)
            sums.add()
            mine |= {f"{name} {i}": t.detach() for name, t in (("y", y), ("dx", x.grad), ("dweights", weights.grad))}
        sums.finish()
        place = f"{kind} {dtype} {options.get('k_chunk')}"
        for name, x in sorted(parts(group, mine).items()):
            yield f"layer {place} {name}", x
        for name, p in named.items():
            if name != frozen:
                yield f"layer {place} sum of {name}", everywhere(p.main_grad)
        assert not frozen or not bool(local(named[frozen].main_grad).any())


def unsegmented(group):
    """The control: an expert's gradient as one chain over all ranks' tokens of a pass."""
    from pydet.torch.distributed import experts_model

    own = experts_model._layers
    experts_model._layers = lambda module, how, rows, ends, sources=None: own(module, how, rows, ends)
    try:
        for name, x in layers(group):
            yield f"chained {name}", x
    finally:
        experts_model._layers = own


def families(group, share=True):
    """Small models of other families, of which all ranks have the same tokens."""
    import torch
    import transformers

    import pydet.torch
    import pydet.torch.distributed as pd
    import test_torch_models as models

    for name in FAMILIES:
        pydet.torch.register_attention()
        net = models.build(transformers, name)
        net.set_attn_implementation("pydet")
        pydet.torch.convert(net, strict=True)
        if share:
            pd.shard_experts(net, group=group, tokens="replicate")
        ids = models.tokens(2, 9)
        logits = net(ids, use_cache=False).logits
        logits.backward(*tensors(1, logits.shape, dtype=torch.float32))
        yield f"{name} logits", logits
        for own, p in net.named_parameters():
            if p.grad is not None:
                yield f"{name} gradient of {own}", everywhere(p.grad)


def mesh_of_two(group, ranks):
    """Data parallel times expert parallel: rows of ranks share experts and have the same tokens, columns the data."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    import pydet.torch
    import pydet.torch.distributed as pd

    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "ep"))
    if dist.get_rank() >= ranks.numel():
        return
    net, columns = qwen("bfloat16"), mesh["dp"].get_group()
    net = parallelize_module(net, mesh["ep"], {"model.layers.*.mlp.experts": pd.ExpertParallel()})
    pydet.torch.accumulate_gradients(net)
    sums = pd.OrderedMainGrads(net.named_parameters(), group=columns)
    world, rank = dist.get_world_size(columns), dist.get_rank(columns)
    for i in range(rank, SEGMENTS, world):
        loss_of(logits_of(net, segments(0)[i]), segments(0)[i]).backward()
        sums.add()
    sums.finish()
    for name, p in net.named_parameters():
        yield f"step 0 sum of {name}", everywhere(p.main_grad)


def sharded_twice():
    """FSDP2 over one dimension of a mesh, and the experts over the other, whose ranks have the same tokens."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    import pydet
    import pydet.torch.distributed as pd

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "ep"))
    if dist.get_rank() >= 4:
        return
    net, data = qwen("float32"), mesh["dp"].get_group()
    parallelize_module(net, mesh["ep"], {"model.layers.*.mlp.experts": pd.ExpertParallel()})
    fully_shard(net, mesh=mesh["dp"])
    net.set_custom_reduce_scatter(pd.OrderedReduceScatter(SEGMENTS // 2))
    net.set_gradient_divide_factor(1.0)
    net.set_force_sum_reduction_for_comms(True)
    for ids in segments(0)[dist.get_rank(data) :: 2]:
        loss_of(logits_of(net, ids), ids).backward()
    for name, p in net.named_parameters():
        yield f"step 0 sum of {name}", everywhere(p.grad)
    with pytest.raises(pydet.Error, match=r"is sharded as .*, want one dimension in 8 equal segments over 2 ranks"):
        pd.clip_grad_norm_(net.parameters(), 1.0, group=data)


def checkpoints(group, folder):
    """Saved by the group, loaded by one rank without shares and by groups of others; whole ones loaded by shares."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint

    import pydet
    import pydet.torch.distributed as pd

    world = dist.get_world_size(group)
    want, trained = qwen("float32"), qwen("float32")
    for i, p in enumerate(want.parameters()):
        p.data += 1 / (1 + i)
    pd.shard_experts(trained, group=group)
    trained.load_state_dict(want.state_dict())  # whole ones
    for name, p in trained.named_parameters():
        yield f"loaded {name}", everywhere(p)
    saved = os.path.join(folder, f"of {world}")
    checkpoint.save({"model": trained.state_dict()}, checkpoint_id=saved, process_group=group)
    plain = qwen("float32")
    checkpoint.load(state := {"model": plain.state_dict()}, checkpoint_id=saved, process_group=group)
    plain.load_state_dict(state["model"])
    for name, p in plain.named_parameters():
        assert p.equal(dict(want.named_parameters())[name]), name
    for other in range(1, world):
        few = os.path.join(folder, f"of {other}")
        if os.path.exists(few):
            again = qwen("float32")
            pd.shard_experts(again, group=group)
            checkpoint.load(state := {"model": again.state_dict()}, checkpoint_id=few, process_group=group)
            again.load_state_dict(state["model"])
            for name, p in again.named_parameters():
                assert everywhere(p).equal(dict(want.named_parameters())[name]), (other, name)
    if world > 1:
        name = "model.layers.0.mlp.experts.down_proj"
        of_a_rank = {name: local(dict(trained.named_parameters())[name]).detach()}  # whose, it does not say
        with pytest.raises(pydet.Error, match=rf"{name} of the state is \({EXPERTS // world}, 32, 24\), want \(16, 32"):
            trained.load_state_dict(of_a_rank, strict=False)
    copied = copy.deepcopy(trained)
    assert all(everywhere(p).equal(q) for p, q in zip(copied.parameters(), want.parameters(), strict=True))


def refusals(group):
    """What each rank hears; the last one does otherwise, or all do."""
    import torch
    import torch.distributed as dist

    import pydet.torch
    import pydet.torch.distributed as pd

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    last, said = rank == world - 1, {}

    def hear(name, call):
        try:
            call()
            said[name] = "accepted"
        except Exception as problem:
            said[name] = f"{type(problem).__name__}: {problem}"
        dist.barrier(group=group)

    def made(kind="Mixtral", *, accumulate=False, **options):
        net = layer(kind, "float32")
        pd.shard_experts(net, group=group, **options)
        if accumulate:
            pydet.torch.accumulate_gradients(net)
        return net["experts"]

    def called(experts, tokens=4, seed=0, x_grad=True, width=32):
        x, weights = tensors(seed, (tokens, width), (tokens, 3), dtype=torch.float32)
        index = torch.arange(tokens * 3).view(tokens, 3) % EXPERTS
        return experts(x.requires_grad_(x_grad), index, weights)

    def with_(change):
        net = layer("Mixtral", "float32")
        change(net)
        pd.shard_experts(net, group=group)

    hear("no experts", lambda: pd.shard_experts(torch.nn.Linear(2, 2), group=group))
    hear("no module", lambda: pd.shard_experts([], group=group))
    hear("tokens", lambda: made(tokens="mine"))
    hear("other tokens", lambda: made(tokens="replicate" if last else "shard"))
    hear("a norm", lambda: made("no gate, a norm"))
    hear("not converted", lambda: with_(lambda net: delattr(net["experts"], "arithmetic")))
    hear("accumulates", lambda: with_(pydet.torch.accumulate_gradients))
    hear("twice", lambda: pd.shard_experts(torch.nn.ModuleDict({"experts": made()}), group=group))
    hear("fp8", lambda: with_(lambda net: pydet.torch.convert(net, fp8=True)))
    hear("not divided", lambda: with_(lambda net: resized(net["experts"], 15)))
    hear("another model on a rank", lambda: with_(lambda net: last and net.bfloat16()))
    hear("grad alone", lambda: called(made()))
    hear("frozen", lambda: called(made().requires_grad_(False)).sum().backward())
    hear("without gradients", torch.no_grad()(lambda: called(made())))
    hear("a rank without gradients", lambda: called(made(accumulate=True), x_grad=not last))
    hear("a rank evaluates", lambda: evaluated(called, made(accumulate=True), last))
    hear("other numbers", lambda: called(made(tokens="replicate"), seed=int(last)))
    hear("other counts", lambda: called(made(tokens="replicate"), tokens=5 if last else 4))
    hear("other widths", lambda: called(made(accumulate=True), width=31 if last else 32))

    def twice_in_a_pass():
        experts = made(accumulate=True)
        (called(experts) + called(experts, seed=1)).sum().backward()

    hear("called twice", twice_in_a_pass)

    def two_passes(between):
        experts = made(accumulate=True)
        sums = pd.OrderedMainGrads(experts.parameters(), group=group)
        called(experts).sum().backward()
        between(experts, sums)
        called(experts).sum().backward()
        sums.add()
        sums.finish()

    hear("two passes", lambda: two_passes(lambda experts, sums: None))
    hear("added", lambda: two_passes(lambda experts, sums: sums.add()))
    hear("zeroed", lambda: two_passes(lambda experts, sums: [p.main_grad.zero_() for p in experts.parameters()]))
    hear("a reset", lambda: two_passes(lambda experts, sums: sums.reset()))
    hear("sums without main_grad", lambda: pd.OrderedMainGrads(made().parameters(), group=group).add())
    hear("sums of the same", lambda: pd.OrderedMainGrads(made(tokens="replicate").parameters(), group=group))
    hear("sums of another group", lambda: pd.OrderedMainGrads(made().parameters(), group=ALONE))
    hear("clipped in another", lambda: clipped(made(accumulate=True), ALONE))

    def raised_in_the_middle():
        experts = made(accumulate=True)
        own = experts.act_fn.forward
        experts.act_fn.forward = lambda x: [][0] if last else own(x)
        called(experts)

    hear("raised", raised_in_the_middle)

    def leaves(before):
        experts = made(accumulate=True)
        sums = pd.OrderedMainGrads(experts.parameters(), group=group)
        y = None if last and before == "forward" else called(experts)
        if not last:
            y.sum().backward()
        sums.add()

    hear("leaves before forward", lambda: leaves("forward"))
    hear("leaves before backward", lambda: leaves("backward"))
    hear("another type later", lambda: typed_later(made("gpt-oss"), group))
    hear("compiled", torch.no_grad()(lambda: torch.compile(made(tokens="replicate"), backend="eager")(*routed_rows())))
    hear("afterwards", lambda: called(made(accumulate=True)).sum().backward())
    for name, (ranks, ignores, trains) in IN_FSDP.items():
        hear(name, lambda of=(ranks, ignores, trains): called(in_fsdp(group, *of)).sum().backward())
    hear("ddp of another root", lambda: in_ddp(layer("Mixtral", "float32"), group, pd))
    return said


def typed_later(experts, group):
    """What PyTorch puts in the place of parameters is not taken for them."""
    import pydet.torch

    pydet.torch.accumulate_gradients(experts.bfloat16())


def routed_rows():
    import torch

    index = torch.arange(12).view(4, 3)
    return torch.ones(4, 32), index, torch.ones(4, 3)


def resized(experts, count):
    import torch

    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name)[:count].detach().clone()))
    experts.num_experts = count


def evaluated(call, experts, last):
    import torch

    with torch.set_grad_enabled(not last):
        call(experts)


def clipped(experts, group):
    import torch

    import pydet.torch.distributed as pd

    for p in experts.parameters():
        p.main_grad.add_(torch.ones(()))
    pd.clip_grad_norm_(experts.parameters(), 1.0, group=group)


def in_ddp(net, group, pd):
    import torch

    pd.shard_experts(net, group=group)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(net, torch.nn.Linear(2, 2)), process_group=group)


IN_FSDP = {  # over which ranks the experts are shared out, whether FSDP ignores them, whether they are trained
    "fsdp of the same ranks": ("same", True, True),
    "fsdp of the same ranks in two dimensions": ("hybrid", True, True),
    "fsdp of other ranks": ("alone", True, True),
    "fsdp of other ranks, frozen": ("alone", True, False),
    "fsdp that ignores none": ("same", False, True),
}


def in_fsdp(group, ranks, ignores, trains):
    """A layer of experts beside another, in FSDP2 of this group's ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import pydet.torch
    import pydet.torch.distributed as pd

    net = layer("Mixtral", "float32")
    pd.shard_experts(net, group=ALONE if ranks == "alone" else group)
    experts = net["experts"].requires_grad_(trains)
    if trains:
        pydet.torch.accumulate_gradients(experts)
    net = torch.nn.Sequential(net, torch.nn.Linear(8, 8))
    mesh = DeviceMesh.from_group(group, "cpu")
    if ranks == "hybrid":
        numbers = torch.arange(dist.get_world_size(group)).view(1, -1)
        mesh = DeviceMesh.from_group([ALONE, group], "cpu", numbers, mesh_dim_names=("copies", "parts"))
    fully_shard(net, mesh=mesh, ignored_params=set(experts.parameters()) if ignores else None)
    return experts


ALONE = None


def work(rank, world, folder, port, queue):
    """All checks on one rank: name -> {size: hash}."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYDET_NUM_THREADS="1")
    found = {}
    try:
        import torch
        import torch.distributed as dist

        global ALONE
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=100))
        groups = {size: dist.new_group(list(range(size))) for size in SIZES}
        alone = [dist.new_group([r]) for r in range(world)]
        ALONE = alone[rank]
        pairs = [dist.new_group([r, r + 1]) for r in range(0, world, 2)]

        def note(where, results, prefix=""):
            for name, value in results:
                words = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found.setdefault(prefix + name, {})[where] = hashlib.sha256(words).hexdigest()

        def once(where, group, **share):
            for dtype in ("float32", "bfloat16"):
                note(where, train(group, dtype, **share), f"{dtype} ")
            note(where, train(group, "float32", kind="mixed", steps=1, **share), "mixed ")
            joins = [{}] if share or where == 1 else [{}, {"join": False}]
            for i, how in enumerate(joins):
                note(f"{where}, parts" if i else where, same_tokens(group, "bfloat16", **share, **how), "main ")
                how = how | {"accumulate": False}
                note(f"{where}, parts" if i else where, same_tokens(group, "float32", **share, **how), "grad ")
            note(where, layers(group, **share))

        for size, group in groups.items():
            if rank < size:
                once(size, group)
                note(size, checkpoints(group, folder))
                if size == 2:
                    note(size, families(group))
                if size in (2, 4):
                    for kind in ("ddp", "hook", "fsdp", "reentrant", "not reentrant"):
                        note(f"{size}, {kind}", train(group, "float32", kind=kind, steps=1), "float32 ")
                    found[f"refusals {size}"] = refusals(group)
                if size == 4:
                    note(size, unsegmented(group))
            dist.barrier()
        if rank == 0:
            once("plain", ALONE, share=False)
            note("plain", families(ALONE, share=False))
        dist.barrier()
        # A run that goes on with other numbers of ranks.
        middle = os.path.join(folder, "middle")
        for size, how in (
            (4, {"steps": 1, "save": middle}),
            (2, {"begin": 1, "load": middle}),
            (8, {"begin": 1, "load": middle}),
        ):
            if rank < size:
                note(f"{size}, again", train(groups[size], "bfloat16", **how), "bfloat16 ")
            dist.barrier()
        # Groups of two beside each other, each with its own pace; then a mesh.
        note("a pair", train(pairs[rank // 2], "float32", steps=1), "float32 ")
        for shape in ((2, 2), (4, 2)):
            note(f"mesh {shape}", mesh_of_two(None, torch.arange(shape[0] * shape[1]).view(shape)), "bfloat16 ")
        note("sharded twice", sharded_twice(), "float32 ")
        queue.put((rank, found, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, found, traceback.format_exc()))


@pytest.fixture(scope="module")
def found():
    pytest.importorskip("torch")
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("no Transformers here")
    with tempfile.TemporaryDirectory() as folder:
        return found_by(*start(SIZES[-1], work, SIZES[-1], folder, free_port()))


# ---- What must be true of it ---------------------------------------------------------------------------------------


def bits(found):
    return {name: where for name, where in found[0].items() if not name.startswith("refusals")}


def test_every_size_has_the_bits_of_one_process(found):
    names = [name for name, where in bits(found).items() if 1 in where]
    assert len(names) > 200
    for name in names:
        for rank, of_rank in enumerate(found):
            for where, words in of_rank[name].items():
                if where != "plain":
                    assert words == found[0][name][1], f"{name}: {where}, rank {rank}"
        assert {size for size in SIZES if size in found[0][name]} == set(SIZES), name


def test_they_are_those_of_a_model_that_is_not_shared_out(found):
    """Up to the norm of all gradients, whose segments are the shares'."""
    count = 0
    for name, where in bits(found).items():
        if "plain" in where and "step 1" not in name:
            one = 1 if 1 in where else 2
            assert where["plain"] == where[one], name
            count += 1
    assert count > 150
    assert sum("logits" in name and "plain" in where for name, where in bits(found).items()) > 20


def test_a_chain_over_all_ranks_tokens_would_be_seen(found):
    chained = [name for name in found[0] if name.startswith("chained ") and " sum of " in name]
    other = [name for name in chained if found[0][name][4] != found[0][name.removeprefix("chained ")][1]]
    assert len(chained) == 9 and len(other) >= 6, other


@pytest.mark.parametrize("kind", ["ddp", "hook", "fsdp", "reentrant", "not reentrant"])
def test_wrappers_and_checkpointing_change_nothing(found, kind):
    names = [name for name, where in found[0].items() if f"2, {kind}" in where and f"4, {kind}" in where]
    assert len(names) > 60 and any("sum of model.layers.1.mlp.experts" in name for name in names)
    assert any(name.startswith("float32 norm") for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_experts_are_taken(found, family):
    names = [name for name in found[0] if name.startswith(f"{family} ")]
    assert any("experts.gate_up_proj" in name for name in names) and f"{family} logits" in names
    for name in names:
        assert found[0][name][2] == found[1][name][2] == found[0][name]["plain"], name


def test_a_run_goes_on_with_another_number_of_ranks(found):
    for size in (2, 8):
        names = [name for name, where in found[0].items() if f"{size}, again" in where]
        assert sum("bfloat16 after 2 " in name for name in names) == 25 and "bfloat16 norm 1" in names


def test_groups_beside_each_other_and_a_mesh(found):
    for shape, ranks in (((2, 2), 4), ((4, 2), 8)):
        names = [name for name, where in found[0].items() if f"mesh {shape}" in where]
        assert len(names) > 20, names
        assert all(found[r][name][f"mesh {shape}"] == found[0][name][1] for name in names for r in range(ranks))
    assert all("a pair" in rank["float32 norm 0"] for rank in found)
    assert sum("sharded twice" in where for where in found[3].values()) == 25


AGREE = "the ranks do not agree"
HEARD = {  # on the others, on the last
    "no experts": ("shard_experts: the model has no experts that ask Transformers' interface",) * 2,
    "no module": ("shard_experts: model is list",) * 2,
    "tokens": ("shard_experts: tokens is 'mine', want one of shard, replicate",) * 2,
    "other tokens": (AGREE, AGREE),
    "a norm": ("shard_experts: experts has a norm of its results",) * 2,
    "not converted": ("shard_experts: experts is a layer of experts of Experts's own; want convert() before",) * 2,
    "accumulates": ("experts has accumulate_gradients already, want shard_experts before it",) * 2,
    "twice": ("experts is shared out already",) * 2,
    "fp8": ("experts multiplies in fp8",) * 2,
    "not divided": ("experts.num_experts is 15, want a multiple of the",) * 2,
    "another model on a rank": (AGREE, AGREE),
    "grad alone": ("the experts' gate_up_proj is trained on the tokens of several ranks",) * 2,
    "frozen": ("accepted",) * 2,
    "without gradients": ("accepted",) * 2,
    "a rank without gradients": (AGREE, AGREE),
    "a rank evaluates": (AGREE, AGREE),
    "other numbers": (AGREE, AGREE),
    "other counts": (AGREE, AGREE),
    "other widths": (AGREE, AGREE),
    "called twice": ("a layer of experts is called twice in a backward pass",) * 2,
    "two passes": ("2 backward passes went to experts that are shared out since the last one",) * 2,
    "added": ("accepted",) * 2,
    "zeroed": ("accepted",) * 2,
    "a reset": ("accepted",) * 2,
    "sums without main_grad": ("experts that are shared out have no main_grad; want accumulate_gradients",) * 2,
    "sums of the same": ("shared out over the ranks of this group, whose ranks have the same tokens",) * 2,
    "sums of another group": ("shared out over the ranks of another group",) * 2,
    "clipped in another": ("is sharded as (Shard(dim=0),), want one dimension in 8 equal segments over 1 ranks",) * 2,
    "raised": ("refused: list index out of range", "IndexError: list index out of range"),
    "leaves before forward": ("shard_experts: " + AGREE, "OrderedMainGrads.add: " + AGREE),
    "leaves before backward": ("backward of experts: " + AGREE, "OrderedMainGrads.add: " + AGREE),
    "another type later": ("that is a DTensor, of fully_shard or parallelize_module",) * 2,
    "compiled": ("accepted",) * 2,
    "afterwards": ("accepted",) * 2,
    "fsdp of the same ranks": ("accepted",) * 2,
    "fsdp of the same ranks in two dimensions": ("accepted",) * 2,
    "fsdp of other ranks": ("and the model is in fully_shard over ranks [0, 1",) * 2,
    "fsdp of other ranks, frozen": ("accepted",) * 2,
}
NEVER_IN_SILENCE = ("ddp of another root", "fsdp that ignores none")  # whose sentences are PyTorch's


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_refused_all_ranks_hear(found, size):
    for rank in range(size):
        said = found[rank][f"refusals {size}"]
        assert set(said) == {*HEARD, *NEVER_IN_SILENCE}
        for name, sentences in HEARD.items():
            assert sentences[rank == size - 1] in said[name], (rank, name, said[name])
        assert re.search("DTensor", said["ddp of another root"]), said["ddp of another root"]
        assert said["fsdp that ignores none"] != "accepted"
