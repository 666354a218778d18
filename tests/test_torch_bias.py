"""A bias that is added to scores: T5's positions, Swin's, additive masks. A sequence has the bits that it has alone."""

import os
import re

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from torch_bits import differ, give_attention, same  # noqa: E402

SHAPES = [(2, 4, 7, 9), (1, 4, 7, 9), (2, 1, 7, 1), (1, 4, 1, 9), (1, 1, 1, 1)]


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(queries=7, keys=9, batch=2, heads=4, width=12):
    return rows(batch, heads, queries, width), rows(batch, 2, keys, width, seed=1), rows(batch, 2, keys, width, seed=2)


def meant(q, k, v, bias, allowed, causal, softcap):
    """In float64."""
    q, k, v, bias = q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v)), bias.double()
    scores = q @ k.mT * 0.4
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    sees = torch.ones(scores.shape[-2:], dtype=torch.bool)
    sees = sees.tril(scores.shape[-1] - scores.shape[-2]) if causal else sees
    sees = sees if allowed is None else sees & allowed
    return torch.nan_to_num(scores.masked_fill(~sees, -torch.inf).softmax(-1)) @ v


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "holes"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bias_and_its_gradient_are_what_is_meant(shape, mask, causal, softcap):
    q, k, v = (x.requires_grad_() for x in operands())
    bias = rows(*shape, seed=3).requires_grad_()
    allowed = {
        "none": None,
        "padding": (torch.arange(9) >= torch.tensor([0, 4])[:, None, None, None]).expand(2, 1, 7, 9).clone(),
        "holes": rows(2, 1, 7, 9, seed=4) > -0.5,
    }[mask]
    given = q, k, v, bias
    want = meant(q, k, v, bias, allowed, causal, softcap)
    got = pt.attention(q, k, v, allowed, scale=0.4, bias=bias, causal=causal, softcap=softcap)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    dout = rows(*got.shape, seed=5)
    of_ours, of_meant = torch.autograd.grad(got, given, dout), torch.autograd.grad(want, given, dout.double())
    for ours, exact in zip(of_ours, of_meant, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, exact.float(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_sequence_has_the_bits_that_it_has_alone(dtype, padding):
    """Forward, the gradients, and the bias's: a bias that is shared gets the sequences' own gradients in order."""
    q, k, v = (x.to(dtype) for x in operands(9, 9))
    bias, dout = rows(2, 4, 9, 9, seed=3).to(dtype), rows(2, 4, 9, 12, seed=5).to(dtype)
    mask = (torch.arange(9) >= torch.tensor([0, padding])[:, None, None, None]).expand(2, 1, 9, 9).clone().tril()

    def run(q, k, v, mask, bias, dout, threads=1):
        given = [x.detach().clone().requires_grad_() for x in (q, k, v, bias)]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            y = pt.attention(*given[:3], mask, scale=0.4, bias=given[3])
            return [y, *torch.autograd.grad(y, given, dout)]
        finally:
            torch.set_num_threads(before)

    whole = run(q, k, v, mask, bias, dout, 2)
    own = slice(padding, None)
    short = run(*(x[1:, :, own] for x in (q, k, v)), mask[1:, :, own, own], bias[1:, :, own, own], dout[1:, :, own])
    for i, (x, alone) in enumerate(zip(whole, short, strict=True)):
        same(x[1:, :, own, own] if i == 4 else x[1:, :, own], alone)
    shared = run(q, k, v, mask, bias[:1], dout)[4]
    parts = [
        run(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask[i : i + 1], bias[:1], dout[i : i + 1])[4] for i in (0, 1)
    ]
    if dtype == torch.float32:
        same(shared, (0 + parts[0]) + parts[1])


def test_a_bias_of_minus_infinity_is_a_mask():
    q, k, v = operands()
    bias = rows(1, 4, 7, 9, seed=3)
    hidden = (rows(1, 4, 7, 9, seed=4) > 0.5).index_fill(2, torch.tensor([3]), True)
    want = pt.attention(q, k, v, ~hidden, scale=0.4, bias=bias)
    got = pt.attention(q, k, v, scale=0.4, bias=bias.masked_fill(hidden, -torch.inf))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert not want[:, :, 3].any()
    given = bias.masked_fill(hidden, -torch.inf).requires_grad_()
    (found,) = torch.autograd.grad(pt.attention(q, k, v, scale=0.4, bias=given).sum(), given)
    assert bool(found.isfinite().all()) and not found[hidden].any() and bool(found.any())


def test_what_a_bias_must_be():
    q, k, v = operands()
    with pytest.raises(pydet.Error, match=r"attention: bias is torch.float64, want float32, bfloat16 or float16"):
        pt.attention(q, k, v, scale=1.0, bias=rows(1, 4, 7, 9).double())
    for shape in ((1, 4, 7, 8), (1, 3, 7, 9), (3, 1, 1, 1), (4, 7, 9)):
        with pytest.raises(pydet.Error, match=r"attention: bias is \(.*\), want \(2, 4, 7, 9\), or 1 for any"):
            pt.attention(q, k, v, scale=1.0, bias=rows(*shape))
    y = pt.attention(q, k[:, :, :0], v[:, :, :0], scale=1.0, bias=(b := rows(1, 4, 7, 1).requires_grad_()))
    assert not y.any() and not torch.autograd.grad(y.sum(), b, allow_unused=True)[0].any()


# ---- Transformers ----------------------------------------------------------------------------------------------------


def test_masks_that_are_added(transformers):
    """0 and -inf are a mask, of any type's lowest too; other numbers a bias; and no batch may have both."""
    attend, module = transformers.AttentionInterface()["pydet"], torch.nn.Identity()
    q, k, v = operands()
    sees = rows(2, 1, 7, 9, seed=4) > -0.5
    want = attend(module, q, k, v, sees)[0]
    for lowest in (-torch.inf, torch.finfo(torch.float32).min):
        same(attend(module, q, k, v, torch.zeros(2, 1, 7, 9).masked_fill(~sees, lowest))[0], want)
    added = rows(2, 1, 7, 9, seed=3)
    got = attend(module, q, k, v, added.masked_fill(~sees, -torch.inf))[0]
    biased = pt.attention(q, k, v, sees, scale=12**-0.5, bias=added)
    same(got, biased.transpose(1, 2).contiguous())
    differ(got, want)
    for_keys = torch.zeros(2, 1, 1, 9).masked_fill(torch.arange(9) < 2, -torch.inf)
    keys = (torch.arange(9) >= 2).expand(2, 1, 7, 9)
    same(attend(module, q, k, v, for_keys)[0], attend(module, q, k, v, keys)[0])
    added[1] = 0
    with pytest.raises(pydet.Error, match=r"mask has a bias for sequence 0 of the batch and none for 1, which would"):
        attend(module, q, k, v, added)


def sequence_to_sequence(transformers, family, dtype):
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2}
    sizes |= {"num_heads": 4, "num_experts": 2, "decoder_start_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**sizes)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["t5", "mt5", "umt5", "switch_transformers"])
def test_t5(transformers, family, dtype):
    """What stock computes; each sequence as alone, behind its padding; tokens one by one as in one call."""
    model = sequence_to_sequence(transformers, family, dtype)
    ids, places = torch.randint(3, 64, (3, 11), generator=torch.Generator().manual_seed(1)), torch.arange(11)
    mask = torch.stack([places >= 0, places < 7, places >= 3]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(1)[:, :6]}
    with torch.no_grad(), pt.override_aten():
        give_attention(model, "eager")  # UMT5's decoder by sdpa sees later tokens in Transformers 5.17
        stock = model(**batch).logits
        give_attention(model)
        assert not pt.convert(model).attention
        got = model(**batch).logits
        alone = torch.cat([model(**{name: x[i : i + 1] for name, x in batch.items()}).logits for i in range(3)])
        same(got, alone)
        far = float((got - stock).abs().max() / stock.abs().max())
        assert far < (1e-4 if dtype == torch.float32 else 0.1) and (dtype == torch.bfloat16 or far > 0)
        if family == "switch_transformers":  # its decoder takes no cache
            return
        step, steps = model(**{**batch, "decoder_input_ids": batch["decoder_input_ids"][:, :1]}, use_cache=True), []
        for i in range(1, 7):
            steps.append(step.logits)
            if i < 6:
                token = batch["decoder_input_ids"][:, i : i + 1]
                more = {"encoder_outputs": (step.encoder_last_hidden_state,), "attention_mask": mask}
                step = model(**more, decoder_input_ids=token, past_key_values=step.past_key_values, use_cache=True)
        same(torch.cat(steps, 1), got)


def test_a_part_that_was_passed_by_is_named(transformers):
    """By the report, and where strict refuses; not of a model that was given no attention of pydet's."""
    model = sequence_to_sequence(transformers, "t5", torch.float32)
    assert pt.convert(model).attention and not pt.convert(model).not_asked
    give_attention(model)
    model.encoder.set_attn_implementation("sdpa")
    report, sentence = pt.convert(model), "model.set_attn_implementation('pydet') passed by encoder, as in"
    assert report.not_asked == ["encoder"] and all(name.startswith("encoder.") for name in report.attention)
    assert sentence in str(report) and sentence in report.verdict()
    with pytest.raises(pydet.Error, match=re.escape(sentence)):
        pt.convert(model, strict=True)


def test_training_of_t5(transformers):
    """Gradients are those of eager attention, that of the relative positions' table among them."""
    ids, gradients = torch.randint(3, 64, (3, 11), generator=torch.Generator().manual_seed(1)), []
    for name in ("eager", "pydet", "pydet"):
        model = sequence_to_sequence(transformers, "t5", torch.float32)
        give_attention(model, name)
        if name == "pydet":
            assert not pt.convert(model).attention
        model(input_ids=ids, labels=ids[:, :6].contiguous()).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    tables = [name for name in gradients[0] if "relative_attention_bias" in name]
    assert len(tables) == 2 and all(gradients[0][name].any() for name in tables)
    for name, stock in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], stock, rtol=1e-3, atol=1e-5)
        same(gradients[1][name], gradients[2][name])


def test_swin(transformers):
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    torch.manual_seed(0)
    config = transformers.SwinConfig(**sizes, window_size=4, num_labels=5)
    model = transformers.SwinForImageClassification(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    images = rows(3, 3, 32, 32)
    with torch.no_grad(), pt.override_aten():
        stock = model(images).logits
        model.set_attn_implementation("pydet")
        assert not pt.convert(model).attention
        got = model(images).logits
        same(got, torch.cat([model(images[i : i + 1]).logits for i in range(3)]))
        torch.testing.assert_close(got, stock, rtol=1e-4, atol=1e-4)
