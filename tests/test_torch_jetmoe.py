"""JetMoe's mixtures of experts on pydet's: right, a token's own, and one batch where micro-batches come."""

import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet.torch as pt  # noqa: E402
import torch_mixtures  # noqa: E402
from pydet.torch import jetmoe  # noqa: E402
from torch_bits import differ, normal, same  # noqa: E402

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "kv_channels": 8},
    **{"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 3, "max_position_embeddings": 512},
}


@pytest.fixture
def made(transformers):
    """A model of a type, not converted."""

    def make(dtype=torch.float32):
        return torch_mixtures.made_of(transformers, transformers.JetMoeConfig(**SIZES), dtype)

    return make


def test_logits_and_gradients_are_right(made):
    model, want = made(), made()
    report = pt.convert(model)
    assert not report.left and not report.attention, report
    torch_mixtures.logits_and_gradients_are_right(model, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_are_one_batch(made, dtype):
    model = made(dtype)
    pt.convert(model)
    torch_mixtures.micro_batches_are_one_batch(model, (1, [1, 2], [2, 1]))


def test_copies_accumulate_and_compute_the_same(made):
    model = made()
    pt.convert(model)
    torch_mixtures.copies_accumulate_and_compute_the_same(model)


PARTS = ["mlp", "mlp.router", "mlp.input_linear", "self_attention.experts", "self_attention.experts.output_linear"]


@pytest.mark.parametrize("left", PARTS)
def test_beside_a_module_that_stayed_as_it_was(made, left):
    module = torch_mixtures.beside_a_module_that_stayed_as_it_was(made(), made(), left)
    assert not isinstance(module, jetmoe.Mixture | jetmoe.TopKGating | jetmoe.ParallelExperts)


def test_how_its_matrices_sum_is_asked_for(made):
    model, others = made(), made()
    pt.convert(model, k_chunk=16)
    pt.convert(others)
    assert not pt.convert(model).left and pt.convert(others, k_chunk=16).left
    x, sizes = normal(7, 32), [2, 0, 1, 4, 0]
    with torch.no_grad():
        first, second = (x.model.layers[0].mlp.input_linear(normal(7, 32), sizes) for x in (model, others))
        w = others.model.layers[0].mlp.input_linear.weight
        rows, parts = x.split(sizes), []
        for matrix, part in zip(w, rows, strict=True):
            parts.append(pt.linear(part, matrix))
    differ(first, second)
    same(second, torch.cat(parts))


def test_no_tokens(made):
    model = made()
    pt.convert(model)
    pt.accumulate_gradients(model)
    for x in (normal(0, 12, 32), normal(2, 0, 32)):
        x.requires_grad_()
        layer = model.model.layers[0]
        y = layer.mlp(x)
        queries, _, topology = layer.self_attention.experts.map(x)
        z = layer.self_attention.experts.reduce(queries, topology)
        assert y.shape == z.shape == x.shape and queries.shape == (*x.shape[:2], 3, 16)
        (y + z).sum().backward()
        assert x.grad.shape == x.shape and not layer.mlp._parameters["bias"].main_grad.any()
