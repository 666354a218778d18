"""pydet.jax.convert: a whole function by pydet's operations, its gradient, what is left to XLA, and check."""

import numpy as np
import pytest

import pydet
from test_jax import all_same, device, dtype, eager, in_fp32, jax, jnp, normal, pj, refuses, same  # noqa: F401


def layers(params, x):
    """A block of a model, of what XLA rounds by the batch."""
    w, v, bias, scale = params
    mean = x.mean(-1, keepdims=True)
    h = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale
    h = jax.nn.gelu(h @ w + bias, approximate=False) + jnp.tanh(h @ w)
    return jax.nn.softmax(jax.nn.silu(h) @ v)


def parameters():
    return normal(24, 40), normal(40, 24), normal(40), normal(24)


def divided(device, x, by):
    """NumPy's quotient; on a GPU, for which XLA does not round it as IEEE 754 does, that of whole arrays there."""
    return x / by if device == "cpu" else jnp.divide(*map(jnp.asarray, np.broadcast_arrays(x, by)))


def test_a_function_is_gemms_and_activations(eager, device):
    x, w = normal(6, 24), normal(24, 40)
    call = jax.jit(pj.convert(lambda x, w: (jnp.tanh(x @ w), (x @ w).sum(-1), jnp.exp(x) / x.sum())))
    tanh, total, exp = call(x, w)
    h = eager.gemm(x, w)
    same(tanh, eager.activation(h, "tanh"))
    same(total, eager.gemm(h, np.ones((40, 1), np.float32))[:, 0])
    total = eager.gemm(x.reshape(1, -1), np.ones((144, 1), np.float32))[0, 0]
    same(exp, divided(device, eager.activation(x, "exp"), total))
    half = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    got = jax.jit(pj.convert(jnp.matmul, arithmetic="sm90", k_chunk=16))(*half)
    same(got, eager.gemm(*half, arithmetic="sm90", k_chunk=16))


def test_rows_alone_and_in_a_batch(device):
    params, x = parameters(), normal(33, 24)
    ours = pj.convert(layers)
    np.testing.assert_allclose(jax.jit(ours)(params, x), in_fp32(layers)(params, x), rtol=1e-4, atol=1e-5)
    found = pj.check(ours, params, x)
    assert found.same and found.first is None and "the same bits" in str(found)
    replaced, left = pj.coverage(layers, params, x)
    assert replaced["dot_general"] == 3 and replaced["erfc"] == replaced["logistic"] == replaced["tanh"] == 1
    assert replaced["reduce_sum"] == 3 and replaced["exp"] == 1 and set(left) == {"rsqrt"}
    assert pj.coverage(ours, params, x).left == left
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, x))
    assert pj.coverage(layers, *shapes) == (replaced, left)


def test_gradients_are_the_functions_own(eager):
    params, x, dy = parameters(), normal(6, 24), normal(6, 24, seed=7)
    loss = lambda params, x: (layers(params, x) * dy).sum()
    ours = jax.jit(jax.grad(pj.convert(loss), (0, 1)))(params, x)
    all_same(jax.tree.leaves(jax.jit(pj.convert(jax.grad(loss, (0, 1))))(params, x)), jax.tree.leaves(ours))
    theirs = in_fp32(jax.jit(jax.grad(loss, (0, 1))))(params, x)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    program = str(jax.make_jaxpr(jax.grad(pj.convert(loss), (0, 1)))(params, x))
    for name in (" dot_general[", " reduce_sum[", " tanh ", " exp ", " erfc ", " logistic "):
        assert name not in program, name
    # The rule of a custom_jvp, at a point where XLA's own differs: relu at 0.
    relu = lambda x: jax.nn.relu(x).sum()
    same(jax.jit(jax.grad(pj.convert(relu)))(np.zeros(3, np.float32)), np.zeros(3, np.float32))
    twice = lambda x: jax.grad(lambda x: (jnp.tanh(x) ** 2).sum())(x).sum()
    x, want = x[:2, :4], jax.jit(jax.grad(twice))(x[:2, :4])
    np.testing.assert_allclose(jax.jit(jax.grad(pj.convert(twice)))(x), want, rtol=1e-4, atol=1e-5)
    again = jax.grad(lambda x: jax.grad(pj.convert(lambda x: (jnp.tanh(x) ** 2).sum()))(x).sum())
    np.testing.assert_allclose(jax.jit(again)(x), want, rtol=1e-4, atol=1e-5)


def test_bodies_of_loops_branches_and_calls(eager):
    x, w, flag = normal(4, 8), normal(8, 8), np.int32(1)
    step = lambda h: jnp.tanh(h @ w)

    def body(w, x, flag):
        h, each = jax.lax.scan(lambda h, _: (step(h), h.sum()), x, length=2)
        h = jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, step(s[1])), (0, h))[1]
        h = jax.lax.cond(flag > 0, step, lambda h: h, h)
        h = jax.lax.fori_loop(0, 1, lambda _, h: step(h), h)
        return jax.checkpoint(step)(jax.jit(step)(h)), each

    h, sums = x, []
    ones = np.ones((32, 1), np.float32)
    for i in range(8):
        sums += [eager.gemm(h.reshape(1, -1), ones)[0, 0]] if i < 2 else []
        h = eager.activation(eager.gemm(h, w), "tanh")
    for call in (pj.convert(body), jax.jit(pj.convert(body))):
        y, each = call(w, x, flag)
        same(y, h)
        same(each, np.stack(sums))
    replaced, left = pj.coverage(body, w, x, flag)
    assert replaced == {"dot_general": 6, "tanh": 6, "reduce_sum": 1} and not left
    scanned = lambda w: jax.lax.scan(lambda h, _: (jax.checkpoint(lambda h: jnp.tanh(h @ w))(h), None), x, length=3)[0]
    loss = lambda w: scanned(w).sum()
    program = str(jax.make_jaxpr(jax.grad(pj.convert(loss)))(w))
    assert " dot_general[" not in program and " tanh " not in program and "remat" in program
    np.testing.assert_allclose(jax.jit(jax.grad(pj.convert(loss)))(w), in_fp32(jax.grad(loss))(w), rtol=1e-4, atol=1e-5)


def test_groups_vmap_and_static_arguments(eager):
    x, w, sizes = normal(6, 8), normal(2, 8, 5), np.array([2, 4], np.int32)
    same(pj.convert(jax.lax.ragged_dot)(x, w, sizes), pj.ragged_dot(x, w, sizes))
    call = pj.convert(lambda x, w, *, turned, name: x @ (w.T if turned else w) if name == "product" else None)
    want = eager.gemm(x, w[0])
    same(call(x, w[0], turned=False, name="product"), want)
    same(call(x, np.ascontiguousarray(w[0].T), turned=True, name="product"), want)
    same(jax.vmap(lambda x: call(x, w[0], turned=False, name="product"))(x), want)
    own = pj.convert(lambda x: pj.linear(pj.rms_norm(x, eps=1e-5), normal(5, 8)))  # pydet's own stay as they are
    same(own(x), pj.linear(pj.rms_norm(x, eps=1e-5), normal(5, 8)))
    assert not pj.coverage(own, x).left


def test_a_quotient_is_one(device):
    """XLA multiplies by the reciprocal of a divisor that was broadcast, but not for one row of one element."""
    x, total = np.abs(normal(33, 24)) + 0.1, np.abs(normal(33, 1)) + 0.1
    for by in (total, total[0, 0], np.float32(3.3), np.repeat(total, 24, 1), x[:1], jnp.sqrt(total)):
        same(jax.jit(pj.convert(lambda x, by: x / by))(x, by), divided(device, x, np.asarray(by)))
    one = jax.jit(pj.convert(lambda x: x / jnp.broadcast_to(total[0, 0], x.shape)))
    same(one(x), divided(device, x, total[0, 0]))
    same(one(x[:1, :1]), divided(device, x[:1, :1], total[0, 0]))
    half = x.astype(jnp.bfloat16)
    same(jax.jit(pj.convert(lambda x: 1 / x))(half), divided(device, np.ones_like(half), half))


def test_the_gradient_of_a_table(device, dtype):
    """Its rows are added in the order of the tokens, whatever becomes of numbers beyond the table."""
    tokens = np.random.default_rng(0).integers(0, 9, (3, 40)).astype(np.int32)
    beyond = np.where(tokens % 4 == 1, [[11], [-12], [2**30]], tokens).astype(np.int32)
    table, dy = normal(11, 6, dtype=dtype), normal(3, 40, 6, dtype=dtype)
    sums = lambda ids, there=slice(None): pydet.embedding_backward(dy[there], ids[there], 11)
    inside, wrapped = (beyond >= -11) & (beyond < 11), np.where(beyond < 0, beyond + 11, beyond)
    for ids, take, want in (
        (tokens, lambda table, ids: table[ids], sums(tokens)),
        (tokens - 11, lambda table, ids: table[ids], sums(tokens)),
        (tokens.astype(np.uint8), lambda table, ids: table[ids], sums(tokens)),
        (beyond, lambda table, ids: jnp.take(table, ids, 0), sums(wrapped, inside)),
        (beyond, lambda table, ids: jnp.take(table, ids, 0, mode="clip"), sums(np.clip(beyond, 0, 10))),
    ):
        loss = lambda table, dy, ids, take=take: (jnp.nan_to_num(take(table, ids)) * dy).astype(jnp.float32).sum()
        gradient = jax.grad(loss)
        same(jax.jit(pj.convert(gradient))(table, dy, ids), want)
        same(jax.jit(jax.grad(pj.convert(loss)))(table, dy, ids), want)
        assert pj.coverage(gradient, table, dy, ids) == ({"scatter-add": 1, "reduce_sum": 1}, {})
        assert "scatter-add" not in str(jax.make_jaxpr(pj.convert(gradient))(table, dy, ids))
    promised = jax.jit(pj.convert(jax.grad(lambda table, ids: (table[ids] * dy).astype(jnp.float32).sum())))
    if device == "cpu":
        with pytest.raises(Exception, match=r"embedding_backward: ids has .* want numbers of the table's 11 rows"):
            jax.block_until_ready(promised(table, beyond))
    else:
        same(promised(table, beyond), sums(wrapped, inside))
    if device == "cpu" and dtype == np.float32:  # XLA adds them so there; elsewhere as they come, or rounds each sum
        same(jax.jit(gradient)(table, dy, ids), want)


def test_rows_that_are_added(device, dtype):
    """To an array that holds something: scatter-add of whole rows, of any dimensions, wherever their windows lie."""
    ids = np.array([2, 0, 2, 7, 2, -1], np.int32)
    there = (ids >= 0) & (ids < 5)
    for shape in ((5,), (5, 6), (5, 2, 3)):
        start, rows = normal(*shape, dtype=dtype), normal(6, *shape[1:], dtype=dtype)
        start[1] = -0.0
        given = rows.reshape(6, -1)[there], ids[there], 5
        sums = start.astype(np.float32).reshape(5, -1)
        want = pydet.embedding_backward(*given, out=sums, accumulate=True).reshape(shape).astype(dtype)
        add = pj.convert(lambda start, ids, rows: start.at[ids].add(rows, mode="drop", wrap_negative_indices=False))
        same(jax.jit(add)(start, ids, rows), want)
        same(add(jnp.asarray(start), ids, rows), want)
        same(jax.vmap(add, (0, None, None))(np.stack([start, start]), ids, rows)[1], want)
        numbers = jax.lax.ScatterDimensionNumbers(tuple(range(len(shape) - 1)), (0,), (0,))
        turned = lambda start, ids, rows, n=numbers: jax.lax.scatter_add(start, ids[:, None], rows, n, mode="drop")
        same(jax.jit(pj.convert(turned))(start, ids, np.moveaxis(rows, 0, -1)), want)
    one = pj.convert(lambda start, i: start.at[i].add(1.0))
    same(jax.jit(one)(start, 3), np.asarray(jnp.asarray(start).at[3].add(1.0)))
    columns = lambda start, ids: jnp.take(start, ids, 1).astype(jnp.float32).sum()
    part = lambda start, ids: start[ids, :1].astype(jnp.float32).sum()
    for loss in (columns, part, lambda start, ids: start[ids, ids % 2].astype(jnp.float32).sum()):
        assert pj.coverage(jax.grad(loss), start, ids % 2).left == {"scatter-add": 1}
    assert pj.coverage(lambda x, ids: x.at[ids].add(1), jnp.zeros((5, 2), int), ids) == ({}, {})


def test_what_is_left_is_named():
    x = np.abs(normal(4, 8)) + 1
    found = pj.coverage(
        lambda x: (jnp.log(x), jnp.cumsum(x, 1), jnp.sin(x) ** 0.3, (x > 2).sum(), x.astype(int).sum()), x
    )
    assert found.left == {"log": 1, "cumsum": 1, "sin": 1, "pow": 1} and not found.replaced
    wide = pj.coverage(lambda a, b: jax.lax.dot(a, b), x.astype(jnp.float8_e4m3fn), x.T.astype(jnp.float8_e4m3fn))
    assert wide.left == {"dot_general": 1}


def test_check_says_what_varies():
    params, x = normal(8), normal(5, 8)
    one = jnp.float32(2**-24)
    shaken = lambda p, x: {"a": x * p, "b": jnp.sqrt(jnp.abs(x)) * (1 + (x.shape[0] > 1) * 2 * one)}
    found = pj.check(shaken, params, x)
    assert not found.same and [y.output for y in found.outputs] == ["['b']"]
    assert 0 < found.outputs[0].differing <= found.outputs[0].of == 24
    assert found.first.startswith("mul, test_jax_convert.py:")
    assert "varies in" in str(found) and "the first that varies is mul" in str(found)
    assert pj.check(lambda p, x: x.reshape(-1) * 2, params, x, rows=[1]).same  # [B K] is of rows too
    for sentence, call, arguments, options in (
        ("check: batch has 1 rows, want 2 or more", pj.check, (shaken, params, x[:1]), {}),
        ("check: batch wants arrays of the same first", pj.check, (shaken, params, (x, x[:2])), {}),
        (r"check: rows is \[5\], want numbers of the 5 rows", pj.check, (shaken, params, x), {"rows": [5]}),
        ("check: no output has 5 rows", pj.check, (lambda p, x: x.sum(), params, x), {}),
        ("convert: fn is int, want a function", pj.convert, (3,), {}),
        ("convert: arithmetic is 'fast', want one of", pj.convert, (layers,), {"arithmetic": "fast"}),
    ):
        refuses(f"^{sentence}", call, *arguments, **options)


def test_in_shard_map(eager):
    from jax.sharding import Mesh, PartitionSpec

    x, w = normal(6, 8), normal(8, 8)
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    cut = {"mesh": mesh, "in_specs": (PartitionSpec("rows"), PartitionSpec()), "out_specs": PartitionSpec("rows")}
    layer = jax.shard_map(lambda x, w: jnp.tanh(x @ w), **cut)
    want = eager.activation(eager.gemm(x, w), "tanh")
    same(jax.jit(pj.convert(layer))(x, w), want)
    assert pj.coverage(layer, x, w) == ({"dot_general": 1, "tanh": 1}, {})
    total = pj.coverage(
        jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "rows"), **cut | {"out_specs": PartitionSpec()}), x, w
    )
    assert set(total.left) & {"psum", "psum_invariant"}  # in XLA's own order


def test_shardings_of_a_call_stay(device):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    x, w = normal(6, 8), normal(8, 8)
    here = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("rows",)), PartitionSpec("rows"))
    inner = jax.jit(jnp.matmul, in_shardings=(here, None))
    same(jax.jit(pj.convert(lambda x, w: inner(x, w)))(x, w), pj.gemm(x, w))
