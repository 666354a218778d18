"""What tests of mixtures of experts ask of a model whose own code computed them, before and after convert()."""

import copy
import functools
import pickle

import torch

import pydet
import pydet.torch as pt
from pydet.torch.stock import as_stock
from torch_bits import give_attention, same


def made_of(transformers, config, dtype):
    """A model, not converted, whose attention is pydet's."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.set_attn_implementation("pydet")
    return model.to(dtype)


def ids(rows=3, tokens=12):
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def loss_of(model, tokens):
    with pt.override_aten():
        return (model(tokens, use_cache=False).logits.float() ** 3).sum()


def logits_and_gradients_are_right(model, want):
    """Of a converted model, beside the same one that is not."""
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, want(ids()).logits, rtol=1e-4, atol=1e-4)
        give_attention(want, "eager")
        with as_stock(model):
            same(model(ids()).logits, want(ids()).logits)
    loss_of(model, ids()).backward()
    loss_of(want, ids()).backward()
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3 * float(q.grad.abs().max()), msg=name)


def micro_batches_are_one_batch(model, cuts):
    """Every parameter of a converted model has a sum, whose bits are those of one batch, and which is right."""
    found = pt.accumulate_gradients(model)
    assert not found.outside and len(found) == len(list(model.parameters()))

    def sums(cut):
        for p in found:
            p.main_grad.zero_()
        for part in ids(tokens=pydet.DWEIGHT_ROWS).split(cut):
            loss_of(model, part).backward()
        return [p.main_grad.clone() for p in found]

    whole = sums(3)
    assert all(x.any() for x in whole) and not found.summed
    for cut in cuts:
        for got, want in zip(sums(cut), whole, strict=True):
            same(got, want)
    model.zero_grad()
    for module in model.modules():
        module.accumulates = False
    loss_of(model, ids(tokens=pydet.DWEIGHT_ROWS)).backward()
    close = 1e-4 if model.dtype == torch.float32 else 0.1
    for p, got in zip(found, whole, strict=True):
        torch.testing.assert_close(got, p.grad.float(), rtol=close, atol=close * float(p.grad.abs().max()))


def copies_accumulate_and_compute_the_same(model):
    pt.accumulate_gradients(model)
    loss_of(model, ids()).backward()
    with torch.no_grad():
        want = model(ids()).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for p in other.parameters():
            p.main_grad = None
        loss_of(other, ids()).backward()
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p.main_grad, q.main_grad), name
        with torch.no_grad():
            same(other(ids()).logits, want)


def beside_a_module_that_stayed_as_it_was(model, want, left):
    """As one whose forward somebody replaced before: that of this name in every layer, which is returned."""
    for layer in model.model.layers:
        module = layer.get_submodule(left)
        module.forward = functools.partial(type(module).forward, module)
    report = pt.convert(model)
    assert [name for name in report.left if name.endswith(left)]
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, want(ids()).logits, rtol=1e-4, atol=1e-4)
    return module
