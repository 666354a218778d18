"""Llama 4's mixtures of experts on pydet's: right, a token's own, and one batch where micro-batches come."""

import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet.torch as pt  # noqa: E402
import torch_mixtures  # noqa: E402
from pydet.torch import experts, llama4  # noqa: E402
from torch_bits import differ, normal, same  # noqa: E402

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 48, "head_dim": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 5},
    **{"max_position_embeddings": 512, "pad_token_id": 0},
}


@pytest.fixture(params=[1, 2], ids=lambda k: f"{k} of 5 experts")
def made(transformers, request):
    """A model of a type, not converted."""

    def make(dtype=torch.float32):
        config = transformers.Llama4TextConfig(**SIZES, num_experts_per_tok=request.param)
        return torch_mixtures.made_of(transformers, config, dtype)

    return make


def mixtures(model):
    return [x for x in model.modules() if isinstance(x, llama4.Mixture)]


def test_logits_and_gradients_are_right(made):
    model, want = made(), made()
    report = pt.convert(model)
    assert len(mixtures(model)) == 2 and not [x for x in report.left if "feed_forward" in x], report
    for x in mixtures(model):
        assert isinstance(x.experts, llama4.Experts) and isinstance(x.router, experts.Router)
    torch_mixtures.logits_and_gradients_are_right(model, want)


def test_a_token_goes_to_its_own_experts_alone(made):
    """Where all others have no number for it, which in Transformers' code are NaNs times zero."""
    model = made()
    pt.convert(model)
    mixture, x = mixtures(model)[0], normal(9, 32)
    with torch.no_grad():
        want, logits = mixture(x)
        chosen = logits.topk(mixture.top_k).indices
        for i, own in enumerate(chosen):
            others = [e for e in range(5) if e not in own]
            kept = mixture.experts.down_proj[others]
            mixture.experts.down_proj[others] = float("nan")
            same(mixture(x[i : i + 1])[0], want[i : i + 1])
            mixture.experts.down_proj[others] = kept


def test_experts_called_as_transformers_calls_them(made):
    model, want = made(), made()
    pt.convert(model)
    theirs = want.model.layers[0].feed_forward.experts
    for rows in (0, 1, 7):
        x = normal(5 * rows, 32)
        with torch.no_grad():
            torch.testing.assert_close(mixtures(model)[0].experts(x), theirs(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_are_one_batch(made, dtype):
    model = made(dtype)
    pt.convert(model)
    torch_mixtures.micro_batches_are_one_batch(model, (1, [1, 2]))


def test_copies_accumulate_and_compute_the_same(made):
    model = made()
    pt.convert(model)
    torch_mixtures.copies_accumulate_and_compute_the_same(model)


@pytest.mark.parametrize("left", ["feed_forward", "feed_forward.router", "feed_forward.experts"])
def test_beside_a_module_that_stayed_as_it_was(made, left):
    module = torch_mixtures.beside_a_module_that_stayed_as_it_was(made(), made(), left)
    assert not isinstance(module, llama4.Mixture | llama4.Experts | experts.Router)


def test_how_its_matrices_sum_is_asked_for(made):
    model, others = made(), made()
    pt.convert(model, k_chunk=16)
    pt.convert(others)
    assert not [x for x in pt.convert(model).left if "feed_forward" in x]
    assert [x for x in pt.convert(others, k_chunk=16).left if "feed_forward" in x]
    x = normal(7, 32)
    with torch.no_grad():
        first, second = (mixtures(m)[0](x)[0] for m in (model, others))
    differ(first, second)


def test_no_tokens(made):
    model = made()
    pt.convert(model)
    pt.accumulate_gradients(model)
    x = normal(0, 32).requires_grad_()
    y, logits = mixtures(model)[0](x)
    assert y.shape == (0, 32) and logits.shape == (0, 5)
    y.sum().backward()
    assert x.grad.shape == x.shape and not mixtures(model)[0].experts.down_proj.main_grad.any()
