"""pydet.jax.accumulate_gradients: a loss and all its gradients over micro-batches have the bits of one batch."""

import numpy as np
import pytest

from test_jax import all_same, device, jax, jnp, normal, pj, refuses, same  # noqa: F401


def network(params, batch):
    """One number a row: an embedding, a norm, a bias, weights that stand twice, a mask."""
    table, w, v, bias, scale = params
    tokens, x, real = batch
    h = table[tokens] + x
    h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-5) * scale
    y = jax.nn.gelu(h @ w + bias) @ v
    y = jnp.tanh(y @ w + bias) @ v
    return jnp.where(real, (y**2).sum(-1), 0).sum(-1)


def parameters(dtype=np.float32):
    shapes = (11, 8), (8, 12), (12, 8), (12,), (8,)
    return tuple(normal(*shape, seed=seed).astype(dtype) for seed, shape in enumerate(shapes))


def rows(count, length=6, dtype=np.float32):
    random = np.random.default_rng(3)
    tokens = random.integers(0, 11, (count, length)).astype(np.int32)
    return tokens, normal(count, length, 8).astype(dtype), random.random((count, length)) > 0.2


def loss(params, batch):
    return network(params, batch).astype(jnp.float32).sum()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_bits_of_one_batch(device, dtype):
    params, batch = parameters(dtype), rows(16, 4, dtype)
    want = jax.jit(jax.value_and_grad(pj.convert(loss)))(params, batch)
    for count in (2, 4) if dtype == np.float32 else (2,):
        got = jax.jit(pj.accumulate_gradients(loss, count))(params, batch)
        all_same(jax.tree.leaves(got), jax.tree.leaves(want))
    # What adding the gradients of micro-batches gives, is not that.
    part = jax.jit(jax.grad(pj.convert(loss)))
    halves = [part(params, [x[i : i + 8] for x in batch]) for i in (0, 8)]
    added = jax.tree.map(lambda x, y: x + y, *halves)
    assert any((np.asarray(x) != np.asarray(y)).any() for x, y in zip(added, want[1], strict=True))


def test_k_chunk_and_optimizer(device):
    optax = pytest.importorskip("optax")
    params, batch = parameters(), rows(32, 4)
    how = {"k_chunk": 16}
    optimizer = optax.sgd(1e-3, momentum=0.9)

    def step(function):
        _, gradients = function(params, batch)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    want = step(jax.jit(jax.value_and_grad(pj.convert(loss, **how))))
    all_same(step(jax.jit(pj.accumulate_gradients(loss, 2, **how))), want)
    refuses(
        "a micro-batch sums 8 rows in .*, want a multiple of 16", pj.accumulate_gradients(loss, 4, **how), params, batch
    )


def test_a_count_of_rows_is_a_sum(device):
    """The gradient of a bias may be of ones alone, which no operand of the batch reaches."""
    x, w, bias = normal(6, 4), normal(4, 3), normal(3)
    linear = lambda params, x: (x @ params[0] + params[1]).sum()
    want = jax.jit(jax.value_and_grad(pj.convert(linear)))((w, bias), x)
    for count in (1, 3):
        value, (dw, dbias) = jax.jit(pj.accumulate_gradients(linear, count))((w, bias), x)
        same(dbias, np.full(3, 6, np.float32))
        all_same((value, dw, dbias), (want[0], *want[1]))


def test_refuses():
    w, x = normal(4, 3), normal(6, 4)
    of = lambda function, count=2: pj.accumulate_gradients(function, count)
    mixed = "mixes or numbers the rows of the batch"
    for sentence, function in (
        ("has another number for another number of rows; want a sum", lambda w, x: (x @ w).mean()),
        ("gives rows what is a sum over all rows", lambda w, x: ((x @ w) * (x @ w).sum()).sum()),
        ("gives rows what is a sum over all rows", lambda w, x: jnp.tanh(x @ w).sum() ** 2),
        ("gives rows what is a sum over all rows", lambda w, x: jnp.log(jnp.exp(x @ w).sum())),
        ("mixes rows of the batch", lambda w, x: ((x @ w) @ (x @ w).T).sum()),
        ("reduce_max joins rows", lambda w, x: (x @ w).max(0).sum()),
        (f"cumsum {mixed}", lambda w, x: (jnp.cumsum(x @ w, 0) ** 2).sum()),
        (f"rev {mixed}", lambda w, x: ((x @ w)[::-1] * x[:, :3]).sum()),
        (f"iota {mixed}", lambda w, x: ((x @ w) * jnp.arange(float(x.shape[0]))[:, None]).sum()),
        (f"scan {mixed}", lambda w, x: jax.lax.scan(lambda h, y: (h * jnp.tanh(y @ w).sum(), h), 1.0, x)[0]),
        ("dot_general of float32 and bfloat16 is a sum", lambda w, x: (x.astype(jnp.bfloat16) @ w).sum()),
        ("is another program", lambda w, x: (x @ w).sum() if x.shape[0] == 3 else jnp.tanh(x @ w).sum()),
    ):
        refuses(f"accumulate_gradients: .*{sentence}", of(function), w, x)
    plain = lambda w, x: (x @ w).sum()
    refuses("accumulate_gradients: batch has 6 rows, want a multiple of 4 micro-batches", of(plain, 4), w, x)
    refuses("accumulate_gradients: batch has 6 rows, want 2 or more for each of 6 micro-batches", of(plain, 6), w, x)
    refuses("accumulate_gradients: batch wants arrays of the same first", of(plain), w, (x, x[:3]))
    refuses("accumulate_gradients: micro_batches is 0, want 1", pj.accumulate_gradients, plain, 0)
    refuses("accumulate_gradients: loss is int, want a function", pj.accumulate_gradients, 3, 2)


def test_dot_general_continues(device):
    x, dy = normal(24, 4, 8), normal(24, 4, 5, seed=1)
    numbers = (((0, 1), (0, 1)), ((), ()))
    half = pj.dot_general(x[:12], dy[:12], numbers)
    same(pj.dot_general(x[12:], dy[12:], numbers, accumulate=half), pj.dot_general(x, dy, numbers))
    refuses("dot_general: accumulate is 5x8, want 8x5", pj.dot_general, x, dy, numbers, accumulate=half.T)
