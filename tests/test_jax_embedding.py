"""pydet.jax.embedding, sample and topk: the bits of pydet's functions, under jit and vmap, and the table's gradient."""

import numpy as np
import pytest

from test_jax import DTYPES, device, jax, jnp, normal, pj, pydet, same  # noqa: F401

OPTIONS = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


def ids_of(*shape, rows=9):
    return np.random.default_rng(1).integers(0, rows, shape).astype(np.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_and_its_gradient(dtype, device):
    w, ids, dout = normal(12, 10).astype(dtype), ids_of(3, 40), normal(3, 40, 10).astype(dtype)
    same(jax.jit(pj.embedding)(w, ids), w[ids])
    for padding_idx in (None, 4):
        want = pydet.embedding_backward(dout, ids, 12, padding_idx=padding_idx)
        y, back = jax.vjp(lambda w, padding=padding_idx: pj.embedding(w, ids, padding_idx=padding), jnp.asarray(w))
        same(y, w[ids]), same(back(jnp.asarray(dout))[0], want)
        same(pj.embedding_backward(dout, ids, 12, padding_idx=padding_idx), want)
    wide = pj.embedding_backward(dout[:2], ids[:2], 12, out_dtype=jnp.float32)
    add = jax.jit(lambda dout, ids, sums: pj.embedding_backward(dout, ids, 12, accumulate=sums))
    sums = add(dout[2:], ids[2:], wide)
    same(sums, pydet.embedding_backward(dout, ids, 12, out_dtype=np.float32))
    same(pj.embedding(w, np.array(3)), w[3])


def test_embedding_under_vmap():
    w, ids, dout = normal(2, 12, 10), ids_of(2, 3, 7), normal(2, 3, 7, 10)
    same(jax.vmap(pj.embedding, (None, 0))(w[0], ids), w[0][ids])
    same(jax.vmap(pj.embedding)(w, ids), np.stack([w[i][ids[i]] for i in range(2)]))
    made = jax.vmap(lambda dout, ids: pj.embedding_backward(dout, ids, 12))(dout, ids)
    same(made, np.stack([pydet.embedding_backward(dout[i], ids[i], 12) for i in range(2)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sample_and_topk(dtype, device):
    x, seed, position = normal(2, 5, 300).astype(dtype), ids_of(2, 5, rows=2**31 - 1), ids_of(2, 5)
    wanted = pydet.sample(x, seed, position, **OPTIONS)
    kinds = {"top_k": jnp.int32}
    of_rows = {name: jnp.full((2, 5), value, kinds.get(name, jnp.float32)) for name, value in OPTIONS.items()}
    for options in (OPTIONS, of_rows, {**OPTIONS, "top_k": of_rows["top_k"]}):
        found = jax.jit(lambda *given, options=options: pj.sample(*given, **options))(x, seed, position)
        assert found[0].dtype == jnp.int32 and np.array_equal(found[0], wanted[0])
        same(found[1], wanted[1]), same(found[2], wanted[2])
    assert np.array_equal(pj.sample(x, seed, position, temperature=0.0)[0], x.astype(np.float32).argmax(-1))
    assert np.array_equal(jax.vmap(lambda *g: pj.sample(*g, **OPTIONS)[0])(x, seed, position), wanted[0])
    other = pj.sample(x, seed.astype(np.int64), -position, **OPTIONS)[0]
    assert np.array_equal(other, pydet.sample(x, seed, -position, **OPTIONS)[0])
    x[0, 0, 7] = np.nan
    assert pj.sample(x, seed, position)[0][0, 0] == -1
    values, index = jax.jit(lambda x: pj.topk(x, 7))(x)
    same(values, pydet.topk(x, 7)[0])
    assert np.array_equal(index, pydet.topk(x, 7)[1]) and index.dtype == jnp.int32
    assert np.array_equal(jax.vmap(lambda x: pj.topk(x, 3)[1])(x), pydet.topk(x, 3)[1])


def refused(call, sentence):
    with pytest.raises(pydet.Error) as problem:
        call()
    assert sentence in str(problem.value)


def test_refusals():
    w, ids = normal(4, 3), np.int32([0, 3])
    x, whole = normal(2, 9), np.int64([1, 2])
    refused(lambda: pj.embedding(w[0], ids), "embedding: w is 3, want 2 dimensions, the last of 1 or more")
    refused(
        lambda: pj.embedding(w, ids.astype(np.float32)), "embedding: ids is float32, want an array of int32 or int64"
    )
    refused(
        lambda: pj.embedding(w, ids, padding_idx=4), "embedding: padding_idx is 4, want None or one of 4 rows, from 0"
    )
    refused(lambda: pj.embedding_backward(w, ids, 4), "embedding_backward: ids is 2, want 4")
    refused(lambda: pj.embedding_backward(w[:2], ids, -1), "embedding_backward: rows is -1, want 0 or more")
    refused(
        lambda: pj.embedding_backward(w[:2], ids, 4, out_dtype=jnp.float16),
        "embedding_backward: out_dtype is float16, want float32, or float32 as dout is",
    )
    refused(
        lambda: pj.embedding_backward(w[:2], ids, 4, accumulate=w[:3]),
        "embedding_backward: accumulate is 3x3, want 4x3",
    )
    beyond = "embedding: ids has 4 at 0, want numbers of the table's 4 rows, from 0"
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(Exception, match=beyond):  # a GPU gives NaN
        jax.block_until_ready(pj.embedding(w, np.int32([4])))
    refused(lambda: pj.sample(x, whole[:1], whole), "sample: seed is 1, want 2")
    refused(
        lambda: pj.sample(x, whole + 2**40, whole), "sample: seed has numbers beyond int32, which want jax_enable_x64"
    )
    refused(lambda: pj.sample(x, whole, whole, temperature=-1.0), "sample: temperature is -1, want a finite number")
    refused(lambda: pj.sample(x, whole, whole, top_p=1.5), "sample: top_p is 1.5, want a number from 0 to 1")
    refused(lambda: pj.sample(x, whole, whole, top_k=-1), "sample: top_k is -1, want 0 (no such filter) or more")
    refused(lambda: pj.sample(x, whole, whole, top_k=1 << 63), "sample: top_k is no 64-bit integer")
    refused(lambda: pj.sample(x, whole, whole, temperature=1e39), "sample: temperature is inf, want a finite number")
    refused(lambda: pj.sample(x, whole, whole, min_p=np.ones(3, np.float32)), "sample: min_p is 3, want 2")
    refused(lambda: pj.sample(x, whole, whole, min_p=np.ones(2)), "sample: min_p is float64, want float32")
    same(pj.sample(x, whole, whole, top_p=1 + 1e-9)[1], pydet.sample(x, whole, whole)[1])  # it is 1 in float32
    refused(lambda: pj.topk(x, 10), "topk: k is 10, want 1 to the 9 elements of a row")
    with pytest.raises(pydet.Error, match="topk: no derivative"):
        jax.grad(lambda x: pj.topk(x, 2)[0].sum())(jnp.asarray(x))
