"""pydet.torch.fuse_loss: the loss of Transformers' models without the logits, in training as in evaluation."""

import ast
import copy
import importlib.util
import inspect
import os
import pathlib
import types

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
import pydet.torch.fused  # noqa: E402
from torch_bits import same  # noqa: E402


def model_of(kind="Llama", hidden=64, dtype=torch.float32, convert=True, **more):
    import transformers

    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, num_key_value_heads=2, vocab_size=96, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    pt.register_attention()
    model.set_attn_implementation("pydet")
    if convert:
        pt.convert(model, strict=True)
    return model


@pytest.fixture
def transformers(need):
    need(importlib.util.find_spec("transformers"), "models", "no transformers here")


def tokens(rows=4, length=12):
    ids = torch.randint(2, 96, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    return ids, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_of_training_is_that_of_evaluation(transformers, dtype, tied):
    """And of the logits; its gradients are those of the loss on the logits."""
    ids, labels = tokens()
    model = model_of(dtype=dtype, tie_word_embeddings=tied)
    stock = model(ids, labels=labels).loss
    pt.fuse_loss(model)
    pt.fuse_loss(model)
    calls = []
    model.lm_head.register_forward_hook(lambda *given: calls.append(given[2].shape[-1]))
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    for given in ({}, {"num_items_in_batch": torch.tensor(17)}, {"num_items_in_batch": 17}, {"shift_labels": shifted}):
        model.train()
        made = model(ids, labels=labels, **given)
        assert made.logits is None and "logits" not in made and calls.pop() == 64, "what came to the head went through"
        mine = torch.autograd.grad(made.loss, list(model.parameters()))
        model.eval()
        other = model(ids, labels=labels, **given)
        assert other.logits.shape == (4, 12, 96) and calls.pop() == 96
        same(made.loss, other.loss)
        each = pydet.log_prob(other.logits.detach()[:, :-1].contiguous(), labels[:, 1:].contiguous())
        kept = labels[:, 1:] != -100
        count = 17 if "num_items_in_batch" in given else int(kept.sum())
        torch.testing.assert_close(made.loss, -each[kept].sum() / count, rtol=1e-6, atol=1e-6)
        for got, want in zip(mine, torch.autograd.grad(other.loss, list(model.parameters())), strict=True):
            same(got, want)
    torch.testing.assert_close(stock, model(ids, labels=labels).loss, rtol=1e-6, atol=1e-6)
    assert "forward" not in model.lm_head.__dict__ and model.train()(ids).logits.shape == (4, 12, 96)


def test_micro_batches_have_the_sums_of_one_batch(transformers):
    """Every main_grad; a micro-batch has 256 rows, as norms ask."""
    ids, labels = tokens(4, 128)
    sums = []
    for hidden in (512, 1000):
        for size in (4, 2):
            model = model_of(hidden=hidden)
            pt.fuse_loss(model)
            pt.accumulate_gradients(model)
            for start in range(0, 4, size):
                part = slice(start, start + size)
                model.train()(ids[part], labels=labels[part], num_items_in_batch=500).loss.backward()
            assert model.lm_head.weight.grad is None
            sums.append({n: p.main_grad for n, p in model.named_parameters() if hasattr(p, "main_grad")})
        whole, parts = sums[-2:]
        assert len(whole) > 8 and whole["lm_head.weight"].any()
        for name, value in whole.items():
            same(parts[name], value)


def test_a_copy_has_its_own_head(transformers):
    ids, labels = tokens()
    model = model_of()
    pt.fuse_loss(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(0)
    loss = twin.train()(ids, labels=labels).loss
    torch.testing.assert_close(loss, torch.tensor(96.0).log())
    assert model.train()(ids, labels=labels).loss != loss


def test_what_cannot_be_fused_is_refused(transformers):
    ids, labels = tokens()
    capped = model_of("Gemma2", head_dim=16, final_logit_softcapping=30.0)
    pt.fuse_loss(capped)
    with pytest.raises(pydet.Error, match=r"^fuse_loss: Gemma2ForCausalLM changes the logits between head and loss"):
        capped.train()(ids, labels=labels)
    assert "forward" not in capped.lm_head.__dict__ and capped.eval()(ids, labels=labels).loss.isfinite()
    with pytest.raises(
        pydet.Error,
        match=r"^fuse_loss: the head is torch.nn.modules.linear.Linear, want a pydet.torch.Linear, as convert",
    ):
        pt.fuse_loss(model_of(convert=False))
    with pytest.raises(pydet.Error, match=r"^fuse_loss: the head is Sequential, which has none, want a pydet"):
        pt.fuse_loss(torch.nn.Sequential())
    other = types.SimpleNamespace(get_output_embeddings=lambda: pt.Linear(4, 4), loss_function=max)
    with pytest.raises(pydet.Error, match=r"^fuse_loss: the loss is max, want Transformers' ForCausalLMLoss$"):
        pt.fuse_loss(other)
    model = model_of()
    pt.fuse_loss(model)
    with pytest.raises(pydet.Error, match=r"^fuse_loss: the forward gave a tuple, want return_dict=True$"):
        model.train()(ids, labels=labels, return_dict=False)
    model.lm_head.forward = model.lm_head.forward
    with pytest.raises(pydet.Error, match=r"^fuse_loss: the head has a forward set on the instance"):
        model.train()(ids, labels=labels)


def adapted(model, *targets):
    import peft

    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(targets), init_lora_weights=False))
    pt.convert(model)
    return model


@pytest.mark.parametrize("checkpoints", [None, False, True], ids=["kept", "made again", "made again, reentrant"])
def test_adapters_and_checkpoints(transformers, need, checkpoints):
    """The loss of peft's model is fused too; under accumulate_gradients micro-batches have the gradients of one batch,
    also where activations are made again."""
    need(importlib.util.find_spec("peft"), "models", "no peft here")
    ids, labels = tokens(4, 64)
    items, sums = (labels[:, 1:] >= 0).sum(), []
    for fuses, size in ((True, 4), (True, 2), (False, 4)):
        model = adapted(model_of(), "q_proj", "v_proj", "down_proj")
        if fuses:
            pt.fuse_loss(model)
            assert model.eval()(ids, labels=labels).logits is not None
        if checkpoints is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
            model.enable_input_require_grads()
        trained = pt.accumulate_gradients(model)
        model.train()
        for first in range(0, 4, size):
            part = slice(first, first + size)
            made = model(ids[part], labels=labels[part], num_items_in_batch=items, use_cache=False)
            assert (made.logits is None) == fuses
            made.loss.backward()
        assert trained.outside == {}
        sums.append({n: p.main_grad for n, p in model.named_parameters() if p.requires_grad})
        assert len(sums[-1]) == 6 and all("lora_" in n and p.any() for n, p in sums[-1].items())
    for name, value in sums[0].items():
        same(sums[1][name], value)
        torch.testing.assert_close(sums[2][name], value, rtol=1e-4, atol=1e-6)


def test_adapters_of_the_head_are_refused(transformers, need):
    """The fused loss multiplies the head's weight, to which the adapter's product would be missing."""
    need(importlib.util.find_spec("peft"), "models", "no peft here")
    with pytest.raises(pydet.Error, match=r"^fuse_loss: the head is peft\.tuners\.lora\.layer\.Linear, want a pydet"):
        pt.fuse_loss(adapted(model_of(), "lm_head"))
    model, (ids, labels) = model_of(), tokens()
    pt.fuse_loss(model)
    late = adapted(model, "lm_head").train()
    with pytest.raises(pydet.Error, match=r"^fuse_loss: the head became peft\.tuners\.lora\.layer\.Linear, want it a"):
        late(ids, labels=labels)


LIGER = """
import torch


def LigerForCausalLMLoss(hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100,
                         shift_labels=None, final_logit_softcapping=None, **options):
    logits = hidden_states.reshape(-1, hidden_size) @ lm_head_weight.t()
    target = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index)


def loss_by(head, hidden, labels, **options):
    return LigerForCausalLMLoss(hidden_states=hidden, lm_head_weight=head.weight, labels=labels,
                                hidden_size=hidden.shape[-1], **options)


def forward(self, input_ids, labels=None, **options):
    hidden = self.model(input_ids)[0]
    if self.training and labels is not None:
        return loss_by(self.lm_head, hidden, labels, **options)
    return self.lm_head(hidden)
"""


@pytest.mark.parametrize("hidden", [64, 512, 1000])
def test_the_loss_of_a_forward_as_ligers(transformers, monkeypatch, hidden):
    """Which hands the head on to a function that reads its weight: seen, routed here, or refused."""
    liger = types.ModuleType("liger_kernel.transformers.model.llama")
    exec(compile(LIGER, liger.__name__, "exec"), liger.__dict__)
    ids, labels = tokens()
    model, other = (model_of(hidden=hidden, head_dim=16).train() for _ in range(2))
    pt.fuse_loss(other)
    model.forward = types.MethodType(liger.forward, model)
    before = model(ids, labels=labels)
    pt.check_trainer(types.SimpleNamespace(model=model))
    pt.check_trainer(types.SimpleNamespace(model=model))
    for given in ({}, {"num_items_in_batch": 17}):
        made, want = model(ids, labels=labels, **given), other(ids, labels=labels, **given).loss
        same(made, want)
        mine, theirs = (torch.autograd.grad(y, list(m.parameters())) for y, m in ((made, model), (want, other)))
        for one, two in zip(mine, theirs, strict=True):
            same(one, two)
    torch.testing.assert_close(before, model(ids, labels=labels), rtol=1e-6, atol=1e-6)
    assert model.eval()(ids).shape == (4, 12, 96)
    model.train()
    unlike = model_of()
    monkeypatch.delitem(liger.__dict__, "LigerForCausalLMLoss")
    unlike.forward = types.MethodType(liger.forward, unlike)
    with pytest.raises(pydet.Error, match=r"has a forward of liger_kernel.transformers.model.llama, which multiplies"):
        pt.check_trainer(types.SimpleNamespace(model=unlike))


def routed():
    """Liger's loss as it is routed, of a head with a bias, and what it is called with."""
    torch.manual_seed(3)
    head, hidden = pt.Linear(64, 96), torch.randn(2, 5, 64)
    labels = torch.randint(0, 96, (2, 5))
    loss = pt.fused._RoutedLoss(None)

    def call(*args, **options):
        token = pt.fused._head.set(head)
        try:
            return loss(hidden, head.weight, labels, *args, **options)
        finally:
            pt.fused._head.reset(token)

    return head, hidden, labels, call


def test_what_ligers_loss_is_asked_for():
    """It is done, or refused by name: nothing is dropped but what changes no result."""
    head, hidden, labels, call = routed()
    want = call(hidden_size=64)
    plain = torch.nn.functional.cross_entropy(head(hidden)[:, :-1].reshape(-1, 96), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(want, plain, rtol=1e-6, atol=1e-6)
    same(call(64, None, -100, None, None, False, False), want)
    summed = call(64, reduction="sum")
    same(summed / 8.0, want), same(summed / 17.0, call(64, 17))
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    same(summed, pt.linear_cross_entropy(hidden, head.weight, shifted, head.bias, reduction="sum"))
    for name, value in (
        ("bias", head.bias),
        ("reduction", "mean"),
        ("label_smoothing", 0.0),
        ("accum_dtype", torch.float32),
        ("return_z_loss", False),
        ("chunk_mem_const", 2),
        ("position_ids", torch.arange(5)),
        ("cu_seq_lens_q", torch.tensor([0, 5])),
        ("temperature", None),
    ):
        same(call(64, **{name: value}), want)
    tensor, scalar = torch.ones(96), torch.tensor(True)
    for given, named in (
        ({"ce_weight": tensor}, "ce_weight"),
        ({"bias": torch.zeros(96)}, "a bias that is not the head's"),
        ({"bias": head.bias.detach()}, "a bias that is not the head's"),
        ({"softcap": 30.0}, "softcap"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"label_smoothing": tensor}, "label_smoothing"),
        ({"lse_square_scale": 1e-4}, "lse_square_scale"),
        ({"accum_dtype": torch.bfloat16}, "accum_dtype"),
        ({"use_token_scaling": True}, "use_token_scaling"),
        ({"return_token_accuracy": scalar}, "return_token_accuracy"),
        ({"return_predicted_tokens": True, "return_z_loss": True}, "return_z_loss, return_predicted_tokens"),
        ({"lm_head_bias": tensor, "temperature": 0.5}, "lm_head_bias, temperature"),
    ):
        with pytest.raises(pydet.Error) as caught:
            call(64, **given)
        assert str(caught.value) == f"check_trainer: Liger's fused loss is asked for {named}, want it without"
    with pytest.raises(pydet.Error, match=r"Liger's fused loss is asked for reduction 'none', want 'mean' or 'sum'$"):
        call(64, reduction="none")
    with pytest.raises(pydet.Error, match=r"asked for reduction 'sum' and num_items_in_batch, want one of them$"):
        call(64, 17, reduction="sum")


def parameters_of(path, function):
    """(name, default) of a function's parameters, by its source: importing it wants Triton."""
    tree = ast.parse(path.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    defaults = [None] * (len(found.args.args) - len(found.args.defaults)) + found.args.defaults
    values = [default and ast.literal_eval(default) for default in defaults]
    return [(argument.arg, value) for argument, value in zip(found.args.args, values, strict=True)]


def test_every_parameter_of_ligers_own_loss_is_known(need):
    """Its arguments in their order, and each of its fused cross-entropy's, at its default and at another value."""
    spec = importlib.util.find_spec("liger_kernel")
    need(spec, "liger", "no liger-kernel here")
    package = pathlib.Path(spec.submodule_search_locations[0]) / "transformers"
    loss = parameters_of(package / "model" / "loss_utils.py", "LigerForCausalLMLoss")
    mine = inspect.signature(pt.fused._RoutedLoss._made).parameters.values()
    in_order = [p.name for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD][4:]
    assert [name for name, _ in loss] == ["hidden_states", "lm_head_weight", "labels", *in_order]
    product = parameters_of(package / "functional.py", "liger_fused_linear_cross_entropy")
    assert [name for name, _ in product[:3]] == ["input", "weight", "target"]
    _, _, labels, call = routed()
    want = call(64)
    others = {"ignore_index": int(labels[0, 2]), "reduction": "sum", "num_items_in_batch": 17, "shift_labels": labels}
    for name, default in loss[4:] + product[3:]:
        same(call(64, **{name: default}), want)
        if name == "chunk_mem_const":
            continue
        if name in others:
            assert call(64, **{name: others[name]}) != want
            continue
        with pytest.raises(pydet.Error, match=f"asked for (a )?{name}[ ,]"):
            call(64, **{name: torch.ones(96) if default is None else default + 1})


def test_a_forward_of_ligers_own(transformers, need):
    """Its loss is fuse_loss's, bit for bit. Triton is imported, and no kernel of Liger's runs."""
    need(importlib.util.find_spec("liger_kernel"), "liger", "no liger-kernel here")
    need(importlib.util.find_spec("triton"), "triton", "no Triton here, which liger-kernel imports")
    from liger_kernel.transformers.model.llama import lce_forward

    ids, labels = tokens()
    model, other = (model_of().train() for _ in range(2))
    model.forward = types.MethodType(lce_forward, model)
    pt.fuse_loss(other)
    pt.check_trainer(types.SimpleNamespace(model=model))
    for given in ({}, {"num_items_in_batch": 17}, {"shift_labels": labels}):
        mine, theirs = (m(ids, labels=labels, **given) for m in (model, other))
        same(mine.loss, theirs.loss)
        mine, theirs = (torch.autograd.grad(y.loss, list(m.parameters())) for y, m in ((mine, model), (theirs, other)))
        for one, two in zip(mine, theirs, strict=True):
            same(one, two)
