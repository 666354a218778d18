"""pydet.torch.fuse_loss: the loss of Transformers' models without the logits, in training as in evaluation."""

import copy
import importlib.util
import os
import types

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
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
    for name, value in (("return_token_accuracy", True), ("final_logit_softcapping", 30.0), ("label_smoothing", 0.1)):
        with pytest.raises(
            pydet.Error, match=rf"^check_trainer: Liger's fused loss is asked for {name}, want it without"
        ):
            model(ids, labels=labels, **{name: value})
    unlike = model_of()
    monkeypatch.delitem(liger.__dict__, "LigerForCausalLMLoss")
    unlike.forward = types.MethodType(liger.forward, unlike)
    with pytest.raises(pydet.Error, match=r"has a forward of liger_kernel.transformers.model.llama, which multiplies"):
        pt.check_trainer(types.SimpleNamespace(model=unlike))
