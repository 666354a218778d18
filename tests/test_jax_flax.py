"""Models of Flax (linen and nnx) under pydet.jax.convert: a sequence alone and in the batch, and their training."""

import importlib
import os

import numpy as np
import pytest

from test_jax import all_same, in_fp32, jax, jnp, pj, same

_WANTED = "flax" in os.environ.get("PYDET_TEST_EXTRAS", "")
flax, optax = (importlib.import_module(x) if _WANTED else pytest.importorskip(x) for x in ("flax", "optax"))
nn, nnx = importlib.import_module("flax.linen"), importlib.import_module("flax.nnx")

TOKENS = np.random.default_rng(0).integers(0, 32, (9, 12)).astype(np.int32)


class Model(nn.Module):
    """A block of a transformer between an embedding and a head."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 24)(tokens)
        seen = nn.make_causal_mask(jnp.ones(tokens.shape))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=seen)
        x = x + nn.Dense(24)(nn.gelu(nn.Dense(48)(nn.RMSNorm()(x))))
        return nn.Dense(32)(x)


def loss(params, tokens):
    """Of each sequence."""
    logits = Model().apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).sum(-1)


@pytest.fixture(scope="module")
def params():
    return jax.jit(Model().init)(jax.random.key(0), TOKENS)


def test_a_sequence_alone_and_in_the_batch(params):
    found = pj.check(pj.convert(loss), params, TOKENS, rows=[0, 7])
    assert found.same, str(found)
    replaced, left = pj.coverage(loss, params, TOKENS)
    assert replaced["dot_general"] == 9 and replaced["exp"] == 2 and left == {"rsqrt": 2, "log": 1}
    np.testing.assert_allclose(
        jax.jit(pj.convert(loss))(params, TOKENS), in_fp32(jax.jit(loss))(params, TOKENS), rtol=1e-5
    )


def test_a_training_step_is_its_own(params):
    total = lambda params, tokens: loss(params, tokens).sum()
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(pj.convert(total))(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def trained():
        given, state, values = params, optimizer.init(params), []
        for _ in range(3):
            given, state, value = step(given, state, TOKENS)
            values.append(float(value))
        return given, values

    once, values = trained()
    again, others = trained()
    assert values == others and values[2] < values[0]
    all_same(jax.tree.leaves(once), jax.tree.leaves(again))


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(24, 48, rngs=rngs), nnx.Linear(48, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(48, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.gelu(self.norm(self.first(x))))


def test_nnx():
    model, x = Layers(nnx.Rngs(0)), np.random.default_rng(1).standard_normal((9, 24), np.float32)
    assert pj.check(pj.convert(lambda model, x: model(x)), model, x).same
    definition, state = nnx.split(model)
    call = pj.convert(lambda state, x: nnx.merge(definition, state)(x))
    want = jax.jit(pj.convert(lambda x: model(x)))(x)
    same(jax.jit(call)(state, x), want)
    np.testing.assert_allclose(want, in_fp32(nnx.jit(Layers.__call__))(model, x), rtol=1e-4, atol=1e-5)
    squares = lambda model: (model(x) ** 2).sum()
    gradients, own = (in_fp32(nnx.jit(nnx.grad(function)))(model) for function in (pj.convert(squares), squares))
    for got, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(got, theirs, rtol=1e-3, atol=1e-4)
