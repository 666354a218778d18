"""pydet.torch.accumulate_gradients: main_grad is the whole gradient of a parameter, or there is a refusal; what keeps
its gradient in grad is named."""

import copy
import io
import os
import pickle
import re
import warnings

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from torch_bits import normal, same  # noqa: E402

LOST = (
    r"has no main_grad, and its gradient would be lost: something other than the parameter of accumulate_gradients\(\)"
)
NEVER = r"^accumulate_gradients: the model is in {}, which reduces grad and never main_grad; want the module itself"


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(pt.Linear(16, 16), pt.RMSNorm(16), pt.LayerNorm(16), pt.Linear(16, 8))


def whole(net, x):
    """The gradients of all parameters by autograd, without sums."""
    twin = copy.deepcopy(net)
    for module in twin.modules():
        module.accumulates = False
    twin(x).square().sum().backward()
    return [p.grad for p in twin.parameters()]


def holds_the_gradient(net, x):
    """A backward adds each parameter's gradient to its main_grad, and to nothing else."""
    for p in net.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    net(x).square().sum().backward()
    for p, want in zip(net.parameters(), whole(net, x), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, want, rtol=1e-5, atol=1e-5)


@pytest.fixture
def group(tmp_path):
    """A process group of one process, on the CPU."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("PyTorch without torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def refuses(words, call, *arguments, **options):
    with pytest.raises(pydet.Error, match=words) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_main_grad_is_the_whole_gradient():
    net, x = network(), normal(12, 16)
    assert pt.accumulate_gradients(net) == list(net.parameters())
    holds_the_gradient(net, x)
    assert pt.accumulate_gradients(net) == list(net.parameters()), "a second time it says the same"
    holds_the_gradient(net, x)
    for module in net.modules():
        module.accumulates = False
    net(x).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters()), "and it can be taken back"


def test_copies_and_pickles():
    net, x = network(), normal(12, 16)
    pt.accumulate_gradients(net)
    net(x).square().sum().backward()
    twin, file = copy.deepcopy(net), io.BytesIO()
    assert not any(hasattr(p, "main_grad") for p in twin.parameters()), "a rollout's copy wants no room for sums"
    twin(x).square().sum().backward()
    torch.save(net, file)
    file.seek(0)
    loaded = [torch.load(file, weights_only=False), pickle.loads(pickle.dumps(net))]
    for p, q, *others in zip(net.parameters(), *(m.parameters() for m in (twin, *loaded)), strict=True):
        assert p.main_grad is not q.main_grad
        for other in (q, *others):
            same(other.main_grad, p.main_grad)
    for other in (twin, *loaded):
        holds_the_gradient(other, x)
        refuses(r"0\.weight got a gradient from outside its module's forward", (x @ other[0].weight).sum().backward)


def test_what_keeps_grad_is_named():
    net = torch.nn.Module()
    net.embedding, net.head = torch.nn.Embedding(7, 16), pt.Linear(16, 8, bias=False)
    net.sinks, net.frozen = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    net.plain = torch.nn.Linear(2, 2)
    net.odd = torch.nn.Embedding(7, 16, max_norm=1.0)
    found = pt.accumulate_gradients(net)
    assert found == [net.embedding.weight, net.head.weight] and type(net.embedding) is pt.Embedding
    left = {"sinks": "Module", "plain.weight": "Linear", "plain.bias": "Linear", "odd.weight": "Embedding"}
    assert found.outside == left and not found.arrived
    for _ in range(2):
        (net.plain(normal(3, 2)).sum() * net.sinks.sum() + net.head(net.embedding(torch.arange(4))).sum()).backward()
    assert found.arrived == {"sinks": 2, "plain.weight": 2, "plain.bias": 2} and net.embedding.weight.grad is None
    assert "2 parameters have a main_grad, 4 keep their grad\n  sinks of Module: 2 gradients came" in str(found)
    assert "  odd.weight of Embedding: 0 gradients came to its grad" in str(found)


def test_embeddings_whose_rows_a_batch_may_share_are_named(transformers):
    config = transformers.T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    pt.convert(model)
    found = pt.accumulate_gradients(model)
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert set(found.spread) == {f"encoder.{bias}", f"decoder.{bias}"} and not found.outside
    assert f"  decoder.{bias} of Embedding: where a batch shares it, its gradient is summed sequence" in str(found)


@pytest.mark.parametrize("kind", [pt.RMSNorm, pt.LayerNorm])
def test_heads_ahead_of_tokens_in_a_pack(kind):
    """As queries of Gemma 3 come to their norm: sequences in a row have the bits of one by one."""
    torch.manual_seed(0)
    tokens, heads = pydet.DWEIGHT_ROWS, 3
    net, want = (kind(8) for _ in range(2))
    x, dy = (normal(2, tokens, heads, 8, seed=seed) for seed in (0, 1))
    for norm in (net, want):
        pt.accumulate_gradients(norm)
    together = x.view(1, -1, heads, 8).transpose(1, 2).requires_grad_()
    net(together).backward(dy.view(1, -1, heads, 8).transpose(1, 2))
    for i in range(2):
        one = x[i : i + 1].transpose(1, 2).requires_grad_()
        want(one).backward(dy[i : i + 1].transpose(1, 2).contiguous())
        same(torch.autograd.grad(kind(8)(one), one, dy[i : i + 1].transpose(1, 2))[0], one.grad)
        same(together.grad[:, :, i * tokens : (i + 1) * tokens], one.grad)
    for p, q in zip(net.parameters(), want.parameters(), strict=True):
        assert p.main_grad.any()
        same(p.main_grad, q.main_grad)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_passes_main_grad_by_is_warned_of(kind):
    net, x, other = network(), normal(12, 16), torch.nn.Linear(2, 2)
    pt.accumulate_gradients(net)
    optimizer = kind([*net.parameters(), *other.parameters()], lr=0.5)
    words = r"^accumulate_gradients: \w+ steps over 7 parameters whose gradient is in main_grad and whose grad is None"

    def steps(count, optimizer=optimizer):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [bool(re.search(words, str(w.message))) for w in caught] == [True] * count

    (net(x) * 0).sum().backward()
    steps(0)
    other(x[:, :2]).sum().backward()  # an optimizer that has gradients of others
    net(x).square().sum().backward()
    before = [p.detach().clone() for p in net.parameters()]
    steps(1)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    steps(0)
    optimizer = kind(net.parameters(), lr=0.5)
    for p in net.parameters():
        p.grad = p.main_grad.clone()
    steps(0, optimizer)
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    optimizer.zero_grad()
    steps(0, pt.AdamW(net.parameters()))


# ---- Wrappers that reduce grad ---------------------------------------------------------------------------------------


def test_distributed_data_parallel(group):
    """It takes part where it is told not to reduce, however it came to the model; else its call is refused."""
    from torch.nn.parallel import DistributedDataParallel

    x, words = (
        normal(4, 16),
        NEVER.replace("the module itself", r"it called and its backward run under its no_sync\(\)"),
    )
    before, inside, holder, after = network(), network(), network(), network()
    pt.accumulate_gradients(before)
    before = DistributedDataParallel(before)
    inside = DistributedDataParallel(inside)
    pt.accumulate_gradients(inside.module)
    holder = torch.nn.Sequential(DistributedDataParallel(holder))
    pt.accumulate_gradients(holder)
    after = DistributedDataParallel(after)
    pt.accumulate_gradients(after)
    for net in (before, inside, holder, after):
        refuses(words.format("DistributedDataParallel"), net, x)
        with torch.no_grad():
            net(x)
        outer = net[0] if net is holder else net
        with outer.no_sync():
            net(x).square().sum().backward()
        for p, want in zip(net.parameters(), whole(outer.module, x), strict=True):
            assert p.grad is None
            torch.testing.assert_close(p.main_grad, want, rtol=1e-5, atol=1e-5)
    plain = DistributedDataParallel(network())
    plain(x).sum().backward()
    assert all(p.grad is not None for p in plain.parameters())


def test_fully_shard(group):
    from torch.distributed.fsdp import fully_shard

    x, first = normal(4, 16), network()
    fully_shard(first, mesh=group)
    words = r"^accumulate_gradients: 0 has a weight that is a DTensor, of fully_shard or parallelize_module, whose"
    refuses(words, pt.accumulate_gradients, first)
    first(x).sum().backward()
    assert all(p.grad is not None for p in first.parameters()), "refused, and as it was"
    later = network()
    pt.accumulate_gradients(later)
    fully_shard(later, mesh=group)
    refuses(rf"^Linear: its weight {LOST}", later, x)
    for index, kind in ((1, "RMSNorm"), (2, "LayerNorm")):
        part = network()
        pt.accumulate_gradients(part)
        fully_shard(part[index], mesh=group)
        refuses(rf"^{kind}: its weight {LOST}", part, x)


def test_fully_sharded_data_parallel(group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for own in (True, False):
        options = {"device_id": torch.device("cpu"), "use_orig_params": own}
        first = FullyShardedDataParallel(network(), **options)
        refuses(NEVER.format("FullyShardedDataParallel"), pt.accumulate_gradients, first)
        with pytest.raises(pydet.Error, match=r"computes its weight|has no main_grad"):
            pt.accumulate_gradients(first.module)  # which cannot see what it is in
            first(normal(4, 16))
        net = network()
        pt.accumulate_gradients(net)
        refuses(NEVER.format("FullyShardedDataParallel"), FullyShardedDataParallel, net, **options)


# ---- Other tensors in a parameter's place ----------------------------------------------------------------------------


def test_other_tensors_in_the_place_of_a_parameter():
    net, x = network(), normal(4, 16)
    pt.accumulate_gradients(net)
    others = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    refuses(rf"^Linear: its weight {LOST}", torch.func.functional_call, net, others, (x,))
    constants = {name: p.detach() for name, p in others.items()}
    torch.func.functional_call(net, constants, (x,))
    net.load_state_dict(net.state_dict(), assign=True)
    refuses(rf"^Linear: its weight {LOST}", net, x)
    with torch.no_grad():
        net(x)
    assert pt.accumulate_gradients(net) == list(net.parameters())
    holds_the_gradient(net, x)
    net[3].bias = torch.nn.Parameter(torch.zeros(8))
    refuses(rf"^Linear: its bias {LOST}", net, x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_computed():
    late, early = network(), network()
    torch.nn.utils.weight_norm(late[0])
    words = r"^accumulate_gradients: 0 computes its weight.*; want a weight that is a parameter"
    refuses(words, pt.accumulate_gradients, late)
    assert not any(getattr(m, "accumulates", False) for m in late.modules())
    pt.accumulate_gradients(early)
    torch.nn.utils.weight_norm(early[3])
    refuses(rf"^Linear: its weight {LOST}", early, normal(4, 16))


def test_other_layers_refuse_too():
    layer = pt.Fp8Linear(128, 128)
    pt.accumulate_gradients(layer)
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    refuses(rf"^Fp8Linear: its weight {LOST}", layer, normal(4, 128))


# ---- Weights that more than one module has ---------------------------------------------------------------------------


def test_tied_weights_of_modules_that_accumulate():
    net, x = torch.nn.Sequential(pt.Linear(16, 16, bias=False), pt.Linear(16, 16, bias=False)), normal(12, 16)
    net[1].weight = net[0].weight
    assert pt.accumulate_gradients(net) == [net[0].weight]
    holds_the_gradient(net, x)


def tied(transformers, kind):
    sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
    if kind == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=64, **sizes)
    else:
        more = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**sizes, **more, num_key_value_heads=2)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_tied_embeddings(need, kind):
    try:
        import transformers
    except ImportError:
        need(False, "models", "no Transformers here")
    model, ids = tied(transformers, kind), torch.randint(3, 64, (2, 16))
    pt.convert(model)
    model.eval()(ids, labels=ids).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    found = pt.accumulate_gradients(model)
    assert not found.outside and len(found) == len(want)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.main_grad, want[name], rtol=1e-4, atol=1e-6)
            assert p.grad is None
            p.main_grad.zero_()
    parts = model.lm_head.weight.main_grad_parts.sums
    assert len(parts) == 2 and all(part.any() for part in parts)
    with torch.no_grad():
        model(ids)
    untied = tied(transformers, kind)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    pt.convert(untied)
    assert any(p is untied.lm_head.weight for p in pt.accumulate_gradients(untied))


def tied_by_hand():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(8, 16), pt.RMSNorm(16), pt.Linear(16, 8, bias=False))
    net[0].weight = net[2].weight
    pt.accumulate_gradients(net)
    return net


def test_parts_of_a_tied_weight():
    """In micro-batches neither the head's addends nor the embedding's come between the other's."""
    net, ids = tied_by_hand(), torch.randint(0, 8, (48,))
    w, dy = net[2].weight, normal(48, 8)
    (net(ids) * dy).sum().backward()
    parts, whole = [x.clone() for x in w.main_grad_parts.sums], w.main_grad.clone()
    same(whole, parts[0] + parts[1])
    w.main_grad.zero_()
    for i in (0, 16, 32):
        (net(ids[i : i + 16]) * dy[i : i + 16]).sum().backward()
    same(w.main_grad, whole)
    w.main_grad = None  # as zero_grad(set_to_none=True) does
    (net(ids) * dy).sum().backward()
    same(w.main_grad, whole)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        if hasattr(twin[2].weight, "main_grad"):
            same(twin[2].weight.main_grad, whole)
            twin[2].weight.main_grad.zero_()
        (twin(ids) * dy).sum().backward()
        same(twin[2].weight.main_grad, whole)
        assert twin[0].weight is twin[2].weight and type(twin[0]) is pt.Embedding
    w.main_grad *= 2
    words = r"^accumulate_gradients: main_grad of a weight that several modules have was written, and is not zero"
    refuses(words, (net(ids) * dy).sum().backward)


def test_a_fused_head_adds_to_the_heads_part():
    net, ids = tied_by_hand(), torch.randint(0, 8, (48,))
    w = net[2].weight
    pt.log_prob(net(ids), ids).sum().backward()
    want, parts = w.main_grad.clone(), [x.clone() for x in w.main_grad_parts.sums]
    for twin in (net, copy.deepcopy(net)):
        w = twin[2].weight
        w.main_grad = None
        pt.linear_log_prob(twin[:2](ids), w, ids).sum().backward()
        same(w.main_grad, want)
        for x, y in zip(w.main_grad_parts.sums, parts):
            same(x, y)


def test_tied_to_a_module_that_does_not_read_it():
    """As the bias of BERT's decoder is to that of its head."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.bias = pt.Linear(16, 8), torch.nn.Parameter(torch.zeros(8))
            self.decoder.bias = self.bias

        def forward(self, x):
            return self.decoder(x)

    class Reads(Head):
        def forward(self, x):
            return self.decoder(x) + self.bias

    net = Head()
    assert len(pt.accumulate_gradients(net)) == 2
    holds_the_gradient(net, normal(12, 16))
    refuses(r"decoder\.bias is tied to \.bias of \S+Reads,", pt.accumulate_gradients, Reads())


def test_tied_to_what_takes_no_part():
    net = torch.nn.Module()
    net.own, net.plain = pt.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    net.plain.weight = net.own.weight
    words = r"^accumulate_gradients: own\.weight is tied to plain\.weight of Linear, whose share of the gradient"
    refuses(words, pt.accumulate_gradients, net)
    assert not hasattr(net.own.weight, "main_grad") and not net.own.accumulates, "refused, and as it was"
    only = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4))
    refuses(r"no Linear or norm of pydet's in the model; convert\(\) it first", pt.accumulate_gradients, only)
    assert type(only[0]) is torch.nn.Embedding


# ---- Embeddings, and whole models in micro-batches -------------------------------------------------------------------


class Scaled(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 1) * 3


class OfItsOwn(torch.nn.Embedding):
    def forward(self, ids):
        return self.weight[ids]


def test_tokens_of_an_id_are_added_in_their_order():
    for dtype in (torch.float32, torch.bfloat16):
        net = torch.nn.Sequential(torch.nn.Embedding(6, 5, padding_idx=2), pt.Linear(5, 5)).to(dtype)
        pt.accumulate_gradients(net)
        ids = torch.tensor([[3, 0, 3, 2, 3], [0, 3, 5, 3, 2]])
        dy, w = normal(2, 5, 5, dtype=dtype), net[0].weight
        want = torch.zeros(6, 5)
        for i, row in zip(ids.flatten().tolist(), dy.float().view(-1, 5)):
            if i != 2:
                want[i] += row
        net[0](ids).backward(dy)
        same(w.main_grad, want)
        w.main_grad.zero_()
        for i in range(2):  # cut anywhere
            net[0](ids[i, :3]).backward(dy[i, :3])
            net[0](ids[i, 3:]).backward(dy[i, 3:])
        same(w.main_grad, want)
        net[0](ids[:0]).backward(dy[:0])
        same(w.main_grad, want)
        assert w.grad is None and net[0](ids).dtype == dtype
        differs = torch.zeros(6, 5)
        for i, row in zip(ids.flatten().flip(0).tolist(), dy.float().view(-1, 5).flip(0)):
            differs[i] += row if i != 2 else 0
        assert dtype == torch.bfloat16 or not torch.equal(differs, want), "this would see no other order"


def test_embeddings_of_other_classes():
    net, ids = torch.nn.ModuleList([Scaled(6, 5), OfItsOwn(6, 5), pt.Linear(5, 5)]), torch.tensor([3, 0, 3])
    found = pt.accumulate_gradients(net)
    assert isinstance(net[0], Scaled) and isinstance(net[0], pt.Embedding) and found.outside == {"1.weight": "OfItsOwn"}
    (net[0](ids).sum() + net[1](ids).sum()).backward()
    assert net[0].weight.main_grad[:, 0].tolist() == [0, 3, 0, 0, 6, 0] and net[0].weight.grad is None
    assert net[1].weight.grad[:, 0].tolist() == [1, 0, 0, 2, 0, 0] and found.arrived == {"1.weight": 1}
    twin = pickle.loads(pickle.dumps(net))
    assert type(twin[0]) is type(net[0]) and type(copy.deepcopy(net)[0]) is type(net[0])
    same(twin[0](ids), net[0](ids))
    for module in net:
        module.accumulates = False
    net[0](ids).sum().backward()
    assert net[0].weight.grad[:, 0].tolist() == [0, 3, 0, 0, 6, 0]


def test_sinks_of_attention_that_is_not_pydets(need):
    try:
        import transformers
    except ImportError:
        need(False, "models", "no Transformers here")
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**SIZES)).eval()
    pt.convert(model)
    found, ids = pt.accumulate_gradients(model), torch.randint(3, 64, (2, 16))
    assert found.outside == {"model.layers.0.self_attn.sinks": "GptOssAttention"}
    model(ids).logits.sum().backward()
    assert found.arrived == {"model.layers.0.self_attn.sinks": 1}
    want = model.model.layers[0].self_attn.sinks.grad
    pt.register_attention()
    model.set_attn_implementation("pydet")
    found, mask = pt.accumulate_gradients(model), torch.ones(2, 16, dtype=torch.long)
    sinks = model.model.layers[0].self_attn.sinks
    assert not found.outside and any(p is sinks for p in found)
    sinks.grad = None
    model(ids).logits.sum().backward()
    torch.testing.assert_close(sinks.main_grad, want, rtol=1e-4, atol=1e-6)
    assert sinks.grad is None
    mask[1, :5] = 0
    sinks.main_grad.zero_()
    model(ids, attention_mask=mask).logits[mask == 1].sum().backward()
    whole = sinks.main_grad.clone()
    sinks.main_grad.zero_()
    for i in range(2):
        model(ids[i : i + 1], attention_mask=mask[i : i + 1]).logits[mask[i : i + 1] == 1].sum().backward()
    same(sinks.main_grad, whole)
    model.set_attn_implementation("eager")
    refuses(r"sinks got a gradient from outside its module's forward", model(ids).logits.sum().backward)


SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": True},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "num_local_experts": 4},
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "opt", "qwen3_moe", "gpt_oss"])
def test_micro_batches_are_one_batch(need, family):
    """For every parameter, whatever the cut: tied heads, embeddings, norms, biases, experts, sinks."""
    try:
        import transformers
    except ImportError:
        need(False, "models", "no Transformers here")
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    pt.register_attention()
    model.set_attn_implementation("pydet")
    pt.convert(model)
    found, tokens = pt.accumulate_gradients(model), pydet.DWEIGHT_ROWS
    ids = torch.randint(0, 64, (3, tokens))
    assert not found.outside and model.get_input_embeddings().weight is model.get_output_embeddings().weight

    def gradients(cut):
        for p in found:
            p.main_grad.zero_()
        for rows in ids.split(cut):
            places = torch.arange(tokens).expand(rows.shape)
            with pt.override_aten():
                logits = model(rows, position_ids=places, use_cache=False).logits
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="sum").backward()
        assert all(p.grad is None for p in model.parameters())
        return {name: p.main_grad.clone() for name, p in model.named_parameters()}

    whole = gradients(3)
    assert all(x.any() for name, x in whole.items() if "bias" not in name)
    for cut in (1, [1, 2]):
        for name, x in gradients(cut).items():
            same(x, whole[name])


def test_a_head_that_multiplies_the_weight_itself():
    """As the fused heads of TRL and Liger do: the module is never called."""
    net, x = network(), normal(4, 16)
    pt.accumulate_gradients(net)
    body, head = net[:3], net[3]
    loss = torch.nn.functional.linear(body(x), head.weight, head.bias).sum()
    words = (
        r"^accumulate_gradients: 3\.(weight|bias) got a gradient from outside its module's forward, as of tied weights "
    )
    refuses(words + r"or a fused head that multiplies it itself, and main_grad would lack it; want", loss.backward)
    assert all(p.grad is None for p in head.parameters())
    with torch.no_grad():
        torch.nn.functional.linear(body(x), head.weight)
    frozen = network()
    pt.accumulate_gradients(frozen)
    frozen[3].weight.requires_grad_(False)
    frozen[3].bias.requires_grad_(False)
    torch.nn.functional.linear(frozen[:3](x), frozen[3].weight).sum().backward()
    frozen[3].weight.requires_grad_(True)
    refuses(r"3\.weight got a gradient", (normal(4, 16) @ frozen[3].weight.T).sum().backward)


def test_a_parameter_that_is_frozen_at_first():
    net = network()
    net[0].weight.requires_grad_(False)
    pt.accumulate_gradients(net)
    assert not net[0].weight.requires_grad
    refuses(r"0\.weight got a gradient", lambda w: (normal(4, 16) @ w).sum().backward(), net[0].weight.requires_grad_())


@pytest.mark.parametrize("place", range(4))
def test_a_weight_that_was_written_before_backward(place):
    """PyTorch refuses it of its own layers: the gradient would be that of another weight."""
    net, x = network(), normal(32, 16).requires_grad_()
    pt.accumulate_gradients(net)
    loss = net(x).square().sum()
    with torch.no_grad():
        net[place].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_head_that_was_written_before_backward():
    head = torch.nn.Sequential(pt.Linear(16, 8, bias=False))
    pt.accumulate_gradients(head)
    loss = pt.linear_log_prob(normal(16, 16), head[0].weight, torch.arange(16) % 8).sum()
    with torch.no_grad():
        head[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("bias", [True, False])
def test_tokens_ahead_of_sequences(bias):
    """As Longformer and LED call their linear layers, on [T, B, K]: one batch is its sequences one by one."""

    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = pt.Linear(16, 8, bias=bias)

        def forward(self, x):
            return self.inner(x.transpose(0, 1)).transpose(0, 1)

    torch.manual_seed(0)
    net, x = Turned(), normal(3, 32, 16)
    found = pt.accumulate_gradients(net)
    whole = sums_of(net, found, {"x": x}, 3)
    for cut in (1, [1, 2]):
        for name, y in sums_of(net, found, {"x": x}, cut).items():
            same(y, whole[name])
    holds_the_gradient(net, x)


# ---- What the report counts ------------------------------------------------------------------------------------------


def counted(net, calls, between=lambda found: None):
    """What the report has after a backward pass of each of these functions."""
    found = pt.accumulate_gradients(net)
    for i, call in enumerate(calls):
        if i:
            between(found)
        call().sum().backward()
    words = [line for line in str(found).splitlines() if "micro-batches may have other bits" in line]
    assert len(words) == len(found.repeated) + len(found.cut)
    return dict(found.repeated), dict(found.cut)


def test_a_module_that_is_called_several_times_is_counted():
    """And micro-batches differ from one batch then, as it says."""

    class Twice(torch.nn.Sequential):
        def forward(self, x):
            return self[0](self[0](x).tanh()).tanh() + self[1](x)

    torch.manual_seed(0)
    net, x = Twice(pt.Linear(16, 16), pt.Linear(16, 16)), normal(64, 16)
    again = {"0.weight": 2, "0.bias": 2}
    assert counted(net, [lambda: net(x), lambda: net(x)]) == (again, {})
    found = pt.accumulate_gradients(net)
    whole, parts = (sums_of(net, found, {"x": x}, cut) for cut in (64, 16))
    assert torch.equal(whole["1.weight"], parts["1.weight"]) and not torch.equal(whole["0.weight"], parts["0.weight"])
    plain = torch.nn.Sequential(pt.Linear(16, 16), pt.Linear(16, 16))
    assert counted(plain, [lambda: plain(x), lambda: plain(x)]) == ({}, {})
    embedding = torch.nn.Sequential(torch.nn.Embedding(5, 16), pt.Linear(16, 16))
    ids = torch.arange(5)
    assert counted(embedding, [lambda: embedding(ids) + embedding[0](ids)]) == ({"0.weight": 1}, {})


def test_tied_weights_are_not_counted():
    """Each of them has a sum of its own."""
    net = torch.nn.Sequential(torch.nn.Embedding(8, 16), pt.Linear(16, 16), pt.Linear(16, 8, bias=False))
    net[2].weight = net[0].weight
    ids = torch.arange(5)
    assert counted(net, [lambda: net(ids), lambda: net(ids)]) == ({}, {})
    assert counted(net, [lambda: net(ids) + net[2](net[1](net[0](ids)))]) != ({}, {})


CUTS = {  # modules, and after how many rows they may be cut
    "RMSNorm": (lambda: pt.RMSNorm(16), pydet.DWEIGHT_ROWS),
    "LayerNorm": (lambda: pt.LayerNorm(16), pydet.DWEIGHT_ROWS),
    "ieee": (lambda: pt.Linear(16, 16, arithmetic="ieee"), 1),
    "auto": (lambda: pt.Linear(16, 16), 1),
    "chunks": (lambda: pt.Linear(16, 16, k_chunk=32), 32),
    "sm90": (lambda: pt.Linear(16, 16, arithmetic="sm90", dtype=torch.bfloat16), 16),
    "fp8": (lambda: pt.Fp8Linear(128, 128), 128),
}


@pytest.mark.parametrize("kind", CUTS)
def test_a_cut_in_the_middle_of_a_sum_is_counted(kind):
    make, step = CUTS[kind]
    net = torch.nn.Sequential(make())
    names = [name for name, _ in net.named_parameters()]
    width = net[0].in_features if hasattr(net[0], "in_features") else 16
    x = normal(2 * step + 3, width, dtype=next(net.parameters()).dtype)
    call = lambda rows: lambda: net(x[:rows]).float()
    assert counted(net, [call(step), call(2 * step), call(step + 1)]) == ({}, {}), "the last may have any number"
    in_ieee = ["0.bias"] if kind == "fp8" else []  # which may be cut anywhere
    behind = {name: 1 for name in names if step > 1 and name not in in_ieee}
    assert counted(net, [call(step + 1), call(step)]) == ({}, behind)
    zeroed = lambda found: [p.main_grad.zero_() for p in found]
    assert counted(net, [call(step + 1), call(step)], zeroed) == ({}, {})
    other = lambda found: [setattr(p, "main_grad", None) for p in found]
    assert counted(net, [call(step + 1), call(step)], other) == ({}, {})
    assert counted(net, [call(step + 1), call(0)]) == ({}, {})


def test_heads_are_rows_of_a_norm():
    net, x = torch.nn.Sequential(pt.RMSNorm(8)), normal(3, pydet.DWEIGHT_ROWS // 2, 2, 8)
    assert counted(net, [lambda: net(x), lambda: net(x)]) == ({}, {})
    assert counted(net, [lambda: net(x[:, 1:]), lambda: net(x)]) == ({}, {"0.weight": 1})


# ---- What a batch shares ---------------------------------------------------------------------------------------------


class Positions(torch.nn.Module):
    """Adds what it makes of a table once, by way of `made`, to a batch."""

    def __init__(self, made=lambda rows: rows):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.out = torch.nn.Embedding(9, 16), torch.nn.Embedding(32, 16), pt.Linear(16, 8)
        self.made = made

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, ids):
        return self.out(self.tokens(ids) + self.made(self.places(torch.arange(ids.shape[1]))))


def sums_of(net, found, given, cut):
    """main_grad of every parameter, after the parts of a batch."""
    for p in found:
        p.main_grad.zero_()
    for part in zip(*(x.split(cut) for x in given.values()), strict=True):
        with pt.override_aten():
            result = net(**dict(zip(given, part, strict=True)))
            result = result if torch.is_tensor(result) else result[0]
            (result.float() ** 3).sum().backward()
    return {name: p.main_grad.clone() for name, p in net.named_parameters() if any(p is one for one in found)}


def is_summed_sequence_after_sequence(net, given, names):
    found = pt.accumulate_gradients(net)
    assert set(found.spread) == set(names) and not found.outside
    whole = sums_of(net, found, given, 3)
    assert all(whole[name].any() for name in names) and all(p.grad is None for p in found)
    for cut in (1, [1, 2], [2, 1]):
        for name, x in sums_of(net, found, given, cut).items():
            assert torch.equal(x, whole[name]), f"{name}, cut {cut}"
    return found, whole


BY_CODE = {  # and whether it is seen through
    "nothing": (lambda rows: rows, True),
    "a batch of one": (lambda rows: rows[None], True),
    "views": (lambda rows: rows.t().unsqueeze(0).permute(0, 2, 1).contiguous().view(1, *rows.shape), True),
    "places by number": (lambda rows: rows[torch.arange(len(rows)).flip(0)], True),
    "another type": (lambda rows: rows.to(torch.float64).float(), True),
    "functions": (lambda rows: torch.nn.functional.softplus(torch.tanh(2 * rows[None]) + 0.5).exp(), True),
    "a sum": (lambda rows: rows.cumsum(0), False),
    "what was written": (lambda rows: rows.mul_(2), False),
    "a view of what was written": (lambda rows: [rows[None], rows.mul_(2)][0], False),
    "beside a constant": (lambda rows: rows + torch.ones(16), False),
    "beside itself": (lambda rows: rows * rows, False),
    "a product": (lambda rows: rows @ torch.eye(16), False),
}


@pytest.mark.parametrize("code", BY_CODE)
def test_rows_that_a_batch_shares(code):
    made, sees = BY_CODE[code]
    net, given = Positions(made), {"ids": torch.randint(0, 9, (3, 32))}
    if sees:
        found, whole = is_summed_sequence_after_sequence(net, given, ["places.weight"])
        assert not found.summed and "0 came summed by PyTorch" in str(found)
    else:
        found = pt.accumulate_gradients(net)
        whole = sums_of(net, found, given, 3)
        assert found.summed == {"places.weight": 1} and "places.weight of Embedding" in str(found)
        assert "1 came summed by PyTorch" in str(found)
    for module in net.modules():
        module.accumulates = False
    (net(**given).float() ** 3).sum().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(whole[name], p.grad, rtol=1e-4, atol=1e-4)


def test_without_the_order_of_sequences_it_differs(monkeypatch):
    """What the tests here would see."""
    monkeypatch.setattr("pydet.torch.shared.spread", lambda x, shape: x)
    with pytest.raises(AssertionError, match=r"places\.weight, cut"):
        is_summed_sequence_after_sequence(Positions(), {"ids": torch.randint(0, 9, (3, 32))}, ["places.weight"])


def test_rows_that_take_the_shape_of_a_batch():
    """`expand_as`, as of GPT-NeoX-Japanese's bias behind attention: the shape of the other alone counts."""

    class LikeIt(Positions):
        def forward(self, ids):
            x = self.tokens(ids)
            return self.out(x + self.places(torch.arange(ids.shape[1])).expand_as(x))

    found, _ = is_summed_sequence_after_sequence(LikeIt(), {"ids": torch.randint(0, 9, (3, 32))}, ["places.weight"])
    assert not found.summed


def test_one_use_by_several_layers_is_one_sum():
    """T5 hands one bias from layer to layer: a sequence's shares of it are added before those of the next."""

    class Twice(Positions):
        def forward(self, ids):
            x, places = self.tokens(ids), self.places(torch.arange(ids.shape[1]))
            return self.out((x + places) * (x - places))

    class Views(Positions):
        def forward(self, ids):
            x, places = self.tokens(ids), self.places(torch.arange(ids.shape[1]))[None]
            return self.out((x + places[..., :16].exp()) * (x - places[..., :16].exp()))

    for kind in (Twice, Views):
        found, _ = is_summed_sequence_after_sequence(kind(), {"ids": torch.randint(0, 9, (3, 32))}, ["places.weight"])
        assert not found.summed


def test_padding_of_a_table_has_no_gradient():
    net, ids = Positions(lambda rows: rows.t().contiguous().t()), torch.randint(0, 9, (3, 32))
    net.places = torch.nn.Embedding(32, 16, padding_idx=3)
    _, whole = is_summed_sequence_after_sequence(net, {"ids": ids}, ["places.weight"])
    assert not whole["places.weight"][3].any() and whole["places.weight"][4].any()


def test_a_table_that_is_not_trained():
    net = Positions()
    net.places.requires_grad_(False)
    pt.accumulate_gradients(net)
    net(torch.randint(0, 9, (3, 32))).sum().backward()
    assert not net.places.weight.main_grad.any() and net.tokens.weight.main_grad.any()


class Subtracting(torch.nn.Module):
    """Subtracts a part that a number says, or whatever `made` makes of vectors."""

    __module__ = "transformers.models.subtracting.modeling_subtracting"  # as one that pydet knows

    def __init__(self, made, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Parameter(normal(16, seed=i, dtype=dtype) / 8) for i in range(3))
        self.tokens, self.out, self.made = torch.nn.Embedding(9, 16, dtype=dtype), pt.Linear(16, 8, dtype=dtype), made

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, ids):
        x = self.tokens(ids)
        return self.out(x - self.made(self, x) * x.tanh())


def as_diffllama(net, x):
    first = torch.exp(torch.sum(net.a * net.b, dim=-1, dtype=torch.float32)).to(x.dtype)
    return first - torch.exp(torch.sum(net.a * net.c, dim=-1, dtype=torch.float32)).to(x.dtype) + 0.75


NUMBERS = {  # and whether it is seen through
    "DiffLlama's": (as_diffllama, True),
    "of one vector": (lambda net, x: net.a.tanh().sum() * 0.5, True),
    "squares": (lambda net, x: (net.a * net.a - net.b).sum()[None], True),
    "views": (lambda net, x: 2 / (1 + (net.a[:8] * net.b.view(2, 8)[1] + net.c[8:]).sum(0, keepdim=True).exp()), True),
    "a vector": (lambda net, x: net.a * net.b, False),
    "a product": (lambda net, x: net.a @ net.b, False),
    "with a tensor": (lambda net, x: (net.a * x.detach()[0, 0]).sum(), False),
}


@pytest.mark.parametrize("code", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_number_that_is_made_of_vectors(code, dtype, monkeypatch):
    monkeypatch.setitem(pydet.torch.shared._OWN, ("subtracting", "Subtracting"), ("a", "b", "c"))
    made, sees = NUMBERS[code]
    net, given = Subtracting(made, dtype), {"ids": torch.randint(0, 9, (3, 32))}
    (net(**given).float() ** 3).sum().backward()
    want = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    names = [name for name in "abc" if name in want]
    for name in {"a", "b", "c"} - set(names):
        getattr(net, name).requires_grad_(False)
    if sees:
        found, whole = is_summed_sequence_after_sequence(net, given, names)
        assert not found.summed
    else:
        found = pt.accumulate_gradients(net)
        whole = sums_of(net, found, given, 3)
        assert found.summed == dict.fromkeys(names, 1)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    for name, gradient in want.items():
        torch.testing.assert_close(whole[name], gradient.float(), **close)


def test_vectors_of_a_number_that_are_frozen_or_written(monkeypatch):
    monkeypatch.setitem(pydet.torch.shared._OWN, ("subtracting", "Subtracting"), ("a", "b", "c"))
    net, ids = Subtracting(as_diffllama), torch.randint(0, 9, (3, 32))
    net.b.requires_grad_(False)
    found = pt.accumulate_gradients(net)
    net(ids).sum().backward()
    assert [name for name, p in net.named_parameters() if p.main_grad.any()][:2] == ["a", "c"] and found.summed["a"]
    net.b.requires_grad_(True)
    loss = net(ids).sum()
    with torch.no_grad():
        net.a.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


WIDTHS = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "d_model": 32, "d_kv": 8},
    **{"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_ff": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 256, "use_cache": False},
    **{"num_mel_bins": 8, "max_target_positions": 256, "dropout_rate": 0.0},
}
NO_SIZES = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))  # those have other names
SHARING = {  # models, and how many of their parameters
    "gpt2": ({}, 1),
    "bart": ({}, 2),
    "bert": ({}, 2),
    "t5": ({**NO_SIZES, "num_heads": 4, "num_layers": 2}, 2),
    "whisper": ({}, 1),
    "apertus": ({"num_key_value_heads": 2}, 2),
    "diffllama": ({"num_key_value_heads": 2}, 4),
    "doge": ({"num_key_value_heads": 2, "head_dim": 8}, 3),
    "jetmoe": ({"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4}, 2),
    "swin": ({**NO_SIZES, "image_size": 64, "embed_dim": 32, "depths": [2], "num_heads": [4], "window_size": 4}, 2),
}


@pytest.mark.parametrize("family", SHARING)
def test_what_a_model_shares_with_a_batch(need, family):
    """As trainers call them: without position_ids."""
    try:
        import transformers
    except ImportError:
        need(False, "models", "no Transformers here")
    own, count = SHARING[family]
    torch.manual_seed(0)
    sizes = {name: x for name, x in {**WIDTHS, **own}.items() if x is not None}
    model = transformers.AutoModel.from_config(transformers.CONFIG_MAPPING[family](**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    pt.register_attention()
    for part in model.modules():  # Transformers before 5.20 passes by T5's stacks
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("pydet")
    pt.convert(model)
    tokens = torch.randint(3, 64, (3, pydet.DWEIGHT_ROWS))
    given = {"input_ids": tokens}
    if family in ("t5", "bart", "whisper"):
        given["decoder_input_ids"] = tokens.flip(1)
    if family == "whisper":
        given = {"input_features": normal(3, 8, 512), **given}
        del given["input_ids"]
    if family == "swin":
        given = {"pixel_values": normal(3, 3, 64, 64)}
    names = [name for name, p in model.named_parameters() if shared_name(name) and p.requires_grad]
    assert len(names) == count
    found, _ = is_summed_sequence_after_sequence(model, given, names)
    assert not found.summed


VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "experts.bias", "mlp.bias")


def shared_name(name):
    ends = ("wpe.weight", "_positions.weight", "position_embeddings.weight", "type_embeddings.weight", "residual", ".A")
    return name.endswith((*ends, "attention_bias.weight", "bias_table", "alpha_p", "alpha_n", *VECTORS))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_rows_that_a_batch_shares_in_a_compiled_model(backend):
    """The modules stay in eager mode, and what they give goes on into a graph."""
    torch._dynamo.reset()
    net, given = Positions(lambda rows: rows.t().t()[None]), {"ids": torch.randint(0, 9, (3, 32))}
    found, whole = is_summed_sequence_after_sequence(net, given, ["places.weight"])
    compiled = torch.compile(net, backend=backend)
    for p in found:
        p.main_grad.zero_()
    for part in given["ids"].split(1):
        with pt.override_aten():
            (compiled(part).float() ** 3).sum().backward()
    same(net.places.weight.main_grad, whole["places.weight"])
    assert not found.summed
