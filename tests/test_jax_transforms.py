"""pydet.jax under what JAX does to functions: vmap over one operand, gradients that are cut off or summed over devices,
symbolic shapes, objects that stand for arrays, and what a call outside of any program costs."""

import sys

import numpy as np
import pytest

from test_jax import (  # noqa: F401
    device,
    dtype,
    eager,
    in_another_process,
    jax,
    jnp,
    normal,
    pj,
    refuses,
    same,
    vjp,
)


def exported(function, target, device, *arrays):
    """The function for any number of rows, on a device of a name."""
    from jax import export

    (rows,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((rows, *x.shape[1:]) if x.ndim > 1 else x.shape, x.dtype) for x in arrays]
    known = [export.DisabledSafetyCheck.custom_call(f"pydet_{name}") for name in target]
    return export.export(jax.jit(function), platforms=[device], disabled_checks=known)(*shapes).call


# ---- vmap ------------------------------------------------------------------------------------------------------------


def test_vmap_over_a_bias_alone(eager, dtype):
    x, w, many = normal(6, 16, dtype=dtype), normal(4, 16, dtype=dtype), normal(5, 4)
    options = {"arithmetic": "ieee"}
    each = np.stack([eager.skinny_gemm(x, w, bias=bias, **options) for bias in many])
    layer = lambda bias: pj.linear(x, w, bias, **options)
    same(jax.vmap(layer)(many), each)
    same(jax.jit(jax.vmap(layer))(many), each)
    same(jax.vmap(lambda bias: pj.gemm(x, w.T, bias, **options))(many), each)
    same(jax.vmap(lambda bias: pj.linear(x[0], w, bias, **options))(many), each[:, 0])
    like = normal(5, 6, 4, seed=2)
    want = np.stack([eager.gemm(x, np.ascontiguousarray(w.T), bias=bias, **options) for bias in like])
    same(jax.vmap(lambda bias: pj.gemm(x, w.T, bias, **options))(like), want)
    # The gradient by the bias: a chain of ones for each, whatever the others are.
    pull = lambda bias, dy: jax.vjp(layer, bias)[1](dy)[0]
    dy = normal(5, 6, 4, dtype=dtype, seed=3)
    ones = np.ones((6, 1), dtype)
    want = [eager.gemm_db(ones, y, out_dtype="float32", **options)[0] for y in dy]
    same(jax.vmap(pull)(many, dy), np.stack(want))
    same(jax.jit(jax.vmap(pull, (0, None)))(many, dy[0]), np.stack(want[:1] * 5))
    assert jax.vmap(jax.grad(lambda bias: layer(bias).astype(jnp.float32).sum()))(many).shape == (5, 4)


def test_nested_vmap_over_a_bias(eager):
    x, w, many = normal(3, 6, 16), normal(4, 16), normal(5, 4)
    each = np.stack([np.stack([eager.skinny_gemm(y, w, bias=bias) for y in x]) for bias in many])
    layer = lambda x, bias: pj.linear(x, w, bias)
    same(jax.vmap(jax.vmap(layer, (0, None)), (None, 0))(x, many), each)
    same(jax.vmap(jax.vmap(layer, (None, 0)), (0, None))(x, many), each.swapaxes(0, 1))
    grid = np.stack([many, many + 1])
    inner = lambda bias: pj.linear(x[0], w, bias)
    each = np.stack([np.stack([eager.skinny_gemm(x[0], w, bias=bias) for bias in row]) for row in grid])
    same(jax.vmap(jax.vmap(inner))(grid), each)
    ws = normal(2, 4, 16, seed=5)
    each = np.stack([np.stack([eager.skinny_gemm(x[0], m, bias=bias) for m in ws]) for bias in many])
    by_w = jax.vmap(lambda m, bias: pj.linear(x[0], m, bias), (0, None))
    same(jax.vmap(by_w, (None, 0))(ws, many), each)


def test_vmap_over_numpy_that_is_closed_over(eager):
    """Of a custom_vjp alone, JAX 0.10 makes an AssertionError of this."""
    x, w = normal(3, 6, 16), normal(4, 16)
    want = np.stack([eager.skinny_gemm(y, w) for y in x])
    same(jax.jit(lambda: jax.vmap(lambda y: pj.linear(y, w))(x))(), want)
    same(jax.jit(lambda w: jax.vmap(lambda y: pj.linear(y, w))(x))(w), want)
    norm = jax.jit(lambda: jax.vmap(lambda y: pj.rms_norm(y, eps=1e-5))(x))
    same(norm(), eager.rmsnorm(x, eps=1e-5)[0])
    same(jax.jit(lambda: jax.vmap(lambda y: pj.softmax(y))(x))(), eager.softmax(x))


# ---- Gradients -------------------------------------------------------------------------------------------------------


def test_gradients_that_are_cut_off(eager):
    """Straight-through estimators; what is not cut off is refused as before."""
    x = normal(6, 128)

    def rounded(x):
        q, scale = pj.quantize(x)
        return x + jax.lax.stop_gradient(q.astype(jnp.float32) * scale - x)

    y, (dx,) = vjp(rounded, (x,), jnp.asarray(x))
    q, scale = eager.quantize(x, granularity="row", dtype="float8_e4m3fn")
    np.testing.assert_allclose(y, q.astype(np.float32) * scale, rtol=1e-5, atol=1e-5)
    same(dx, x)
    same(jax.jit(jax.grad(lambda x: rounded(x).sum()))(x), np.ones_like(x))
    same(jax.vmap(jax.grad(lambda x: rounded(x).sum()))(x[:, None]), np.ones_like(x)[:, None])
    free = lambda x: (x * jax.lax.stop_gradient(pj.rmsnorm(x, eps=1e-5)[1])[..., None]).sum()
    same(jax.grad(free)(x), np.broadcast_to(eager.rmsnorm(x, eps=1e-5)[1][:, None], x.shape))
    refuses("^quantize: no derivative", jax.grad(lambda x: pj.quantize(x)[1].sum()), x)
    refuses("^rmsnorm: no derivative", jax.jit(jax.grad(lambda x: pj.rmsnorm(x, eps=1e-5)[1].sum())), x)


def test_gradients_in_shard_map():
    """JAX's check of what varies, on: the gradient of what does not vary is the sum over the devices."""
    source = """
        import functools, jax, jax.numpy as jnp, numpy as np, pydet, pydet.jax as pj
        from jax.sharding import Mesh, PartitionSpec as P
        random = np.random.default_rng(0)
        normal = lambda *shape: random.standard_normal(shape, np.float32)
        x, w, bias, weight, dy = normal(6, 32), normal(8, 32), normal(8), normal(32), normal(6, 8)
        index = np.arange(6, dtype=np.int32)
        mesh = Mesh(np.array(jax.devices()), ("rows",))
        cut = functools.partial(jax.shard_map, mesh=mesh, check_vma=True)

        def layer(x, w, bias, weight, index):
            h = pj.rms_norm(pj.layer_norm(x, eps=1e-5), weight, eps=1e-5)
            y = pj.linear(h, w, bias)
            return y + pj.softmax(y) + pj.log_prob(y, index)[:, None]

        def gradients(x, w, bias, weight, index, dy):
            return jax.vjp(lambda *given: layer(*given, index), x, w, bias, weight)[1](dy)

        operands = (x, w, bias, weight, index)
        specs = (P("rows"), P(), P(), P(), P("rows"))
        y = jax.jit(cut(layer, in_specs=specs, out_specs=P("rows")))(*operands)
        assert np.asarray(y).tobytes() == np.asarray(layer(*operands)).tobytes()
        inside = cut(gradients, in_specs=(*specs, P("rows")), out_specs=(P("rows"), P(), P(), P()))
        found = jax.jit(inside)(*operands, dy)
        halves = [gradients(x[i], w, bias, weight, index[i], dy[i]) for i in (slice(0, 3), slice(3, 6))]
        wanted = [np.concatenate([half[0] for half in halves]), *(a + b for a, b in zip(*(h[1:] for h in halves)))]
        outside = jax.vjp(lambda *given: cut(layer, in_specs=specs, out_specs=P("rows"))(*given, index), *operands[:4])
        for ours, again, want in zip(found, outside[1](jnp.asarray(dy)), wanted, strict=True):
            assert np.asarray(ours).tobytes() == np.asarray(want).tobytes()
            np.testing.assert_allclose(again, want, rtol=1e-5, atol=1e-5)  # JAX adds y's three gradients in its order

        # A result of what varies does, and JAX refuses to take it for one that does not.
        try:
            cut(lambda x, w: pj.linear(x, w), in_specs=(P("rows"), P()), out_specs=P())(x, w)
        except ValueError as problem:
            assert "rows" in str(problem), problem
        else:
            raise AssertionError("not refused")

        q, k, v = normal(2, 4, 3, 16), normal(2, 2, 9, 16), normal(2, 2, 9, 16)
        sinks = normal(4)
        attend = lambda q, k, v, sinks: pj.attention(q, k, v, sinks=sinks)
        each = (P("rows"), P("rows"), P("rows"), P())
        out = cut(attend, in_specs=each, out_specs=P("rows"))(q, k, v, sinks)
        assert np.asarray(out).tobytes() == pydet.attention(q, k, v, sinks=sinks).tobytes()
        sizes, experts = np.array([2, 1], np.int32), normal(2, 32, 5)
        ragged = lambda x, b: pj.ragged_dot(x, b, sizes)
        pull = lambda x, b, dy: jax.vjp(ragged, x, b)[1](dy)
        da, db = cut(pull, in_specs=(P("rows"), P(), P("rows")), out_specs=(P("rows"), P()))(x, experts, dy[:, :5])
        halves = [pull(x[i], experts, jnp.asarray(dy[i, :5])) for i in (slice(0, 3), slice(3, 6))]
        assert np.asarray(db).tobytes() == np.asarray(halves[0][1] + halves[1][1]).tobytes()
        assert np.asarray(da).tobytes() == np.concatenate([half[0] for half in halves]).tobytes()
    """
    in_another_process(source, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")


@pytest.mark.parametrize("rows", [1, 255, 256, 257])
def test_gradients_of_norms_for_any_number_of_rows(device, rows):
    x, weight, bias, dy = normal(rows, 40), normal(40), normal(40, seed=1), normal(rows, 40, seed=2)

    def rms(x, weight, bias, dy):
        return jax.vjp(lambda *o: pj.rms_norm(*o[:2], eps=1e-5, bias=o[2]), x, weight, bias)[1](dy)

    def layer(x, weight, bias, dy):
        return jax.vjp(lambda *o: pj.layer_norm(*o, eps=1e-5), x, weight, bias)[1](dy)

    for function, name in ((rms, "rmsnorm"), (layer, "layernorm")):
        program = exported(function, (name, f"{name}_backward"), device, x, weight, bias, dy)
        for ours, want in zip(program(x, weight, bias, dy), function(x, weight, bias, dy), strict=True):
            same(ours, want)


# ---- Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="JAX keeps int64 here")
def test_log_prob_narrows_no_index(eager):
    """Without int64 in JAX a NumPy index that int32 does not hold is no column, as in pydet.log_prob."""
    x = normal(6, 8)
    index = np.array([3, 2**32 + 3, -(2**32) + 3, 2**31, -1, 7], np.int64)
    want = eager.log_prob(x, index)
    assert np.isnan(want).tolist() == [False, True, True, True, True, False]
    same(pj.log_prob(x, index), want)
    same(jax.jit(lambda x: pj.log_prob(x, index))(x), want)
    same(jax.grad(lambda x: pj.log_prob(x, index)[jnp.array([0, 5])].sum())(x)[1:5], np.zeros((4, 8), np.float32))


class Param:
    """As Flax's nnx.Param: not an array, and one to JAX."""

    def __init__(self, value):
        self.value = jnp.asarray(value)

    def __jax_array__(self):
        return self.value


def test_objects_that_stand_for_arrays(eager):
    x, w, bias, weight, index = normal(6, 16), normal(4, 16), normal(4), normal(16), np.arange(6, dtype=np.int32) % 4
    same(pj.linear(Param(x), Param(w), Param(bias)), eager.skinny_gemm(x, w, bias=bias))
    same(pj.gemm(Param(x), Param(w.T)), eager.gemm(x, np.ascontiguousarray(w.T)))
    same(pj.rms_norm(x, Param(weight), eps=1e-5), eager.rmsnorm(x, weight, eps=1e-5)[0])
    same(pj.log_prob(Param(x), Param(index)), eager.log_prob(x, index))
    q, k, v = normal(1, 2, 3, 8), normal(1, 1, 5, 8), normal(1, 1, 5, 8, seed=1)
    lengths = np.array([4], np.int32)
    same(
        pj.attention(Param(q), Param(k), Param(v), seqlens_k=Param(lengths)),
        eager.attention(q, k, v, seqlens_k=lengths),
    )
    start = normal(6, 4)
    want = eager.gemm(x, np.ascontiguousarray(w.T), out=start.copy(), accumulate=True)
    same(pj.gemm(x, Param(w.T), accumulate=Param(start)), want)
    sizes = np.array([2, 4], np.int32)
    experts = normal(2, 16, 5)
    same(pj.ragged_dot(Param(x), Param(experts), Param(sizes)), pj.ragged_dot(x, experts, sizes))
    refuses("w is type, want an array of JAX or NumPy", pj.linear, x, Param)


def test_numbers_that_differ_in_their_sign_alone(eager):
    """-0.0 == 0.0, and they are different programs."""
    x, weight = normal(3, 16), np.full(16, -0.0, np.float32)
    for offset in (0.0, -0.0, 0.0):
        want = eager.rmsnorm(x, weight, eps=1e-5, weight_offset=offset)[0]
        same(pj.rms_norm(x, weight, eps=1e-5, weight_offset=offset), want)
        same(pj.rmsnorm(x, weight, eps=1e-5, weight_offset=offset)[0], want)
    assert (np.signbit(eager.rmsnorm(x, weight, eps=1e-5, weight_offset=-0.0)[0]) != np.signbit(want)).any()


# ---- Calls outside of any program ------------------------------------------------------------------------------------


def test_a_call_is_traced_once(monkeypatch, device):
    """Its cost is that of one jitted function: what is the same again is not traced anew."""
    x, w, weight = (jax.device_put(x) for x in (normal(6, 16), normal(4, 16), normal(16)))
    q, k = jax.device_put((normal(1, 2, 3, 8), normal(1, 1, 5, 8)))
    index, sizes = jax.device_put((np.arange(6, dtype=np.int32), np.array([2, 4], np.int32)))
    calls = [
        lambda: pj.linear(x, w),
        lambda: pj.gemm(x, w.T),
        lambda: pj.gemm_db(x, x),
        lambda: pj.rms_norm(x, weight, eps=1e-5),
        lambda: pj.rmsnorm(x, weight, eps=1e-5),
        lambda: pj.rmsnorm_backward(x, x, weight, x[:, 0]),
        lambda: pj.layer_norm(x, weight, eps=1e-5),
        lambda: pj.softmax(x),
        lambda: pj.log_prob(x, index),
        lambda: pj.quantize(x),
        lambda: pj.ragged_dot(x, jnp.stack([w.T, w.T]), sizes),
        lambda: pj.attention(q, k, k),
        lambda: pj.dot_product_attention(q.swapaxes(1, 2), k.swapaxes(1, 2), k.swapaxes(1, 2), is_causal=True),
        lambda: jax.grad(lambda w: pj.linear(x, w).sum())(w),
    ]
    first, real, made = [call() for call in calls], jax.ffi.ffi_call, []
    monkeypatch.setattr(jax.ffi, "ffi_call", lambda name, *rest, **more: made.append(name) or real(name, *rest, **more))
    for call, before in zip(calls, first, strict=True):
        for ours, want in zip(jax.tree.leaves(call()), jax.tree.leaves(before), strict=True):
            same(ours, want)
    assert made == []
    pj.linear(x[:5], w)
    assert made == ["pydet_gemm"]


def test_what_python_does_in_a_call(device):
    """One function of pydet's, which finds the program: the rest is JAX's, as in a call of its own."""
    x, w, weight = (jax.device_put(x) for x in (normal(6, 16), normal(16, 16), normal(16)))
    q, index = jax.device_put(normal(1, 2, 8, 16)), jax.device_put(np.arange(6, dtype=np.int32))
    ends = jax.device_put(np.array([0, 2, 6], np.int32))
    rows = jax.device_put(normal(6, 2, 16))
    calls = [
        *(lambda call=call: call(x, w) for call in (pj.linear, pj.gemm, pj.gemm_da, pj.skinny_gemm)),
        lambda: pj.linear(x, w, weight, k_chunk=16),
        lambda: pj.gemm_db(x, x),
        *(lambda call=call: call(x) for call in (pj.silu, pj.gelu, pj.sigmoid, pj.log_sigmoid, pj.tanh, pj.softplus)),
        *(lambda call=call: call(x) for call in (pj.exp, pj.softmax, pj.log_softmax, pj.quantize)),
        lambda: pj.swiglu(x, x),
        lambda: pj.rms_norm(x, weight, eps=1e-5),
        lambda: pj.rmsnorm(x, weight, eps=1e-5),
        lambda: pj.layer_norm(x, weight, weight, eps=1e-5),
        lambda: pj.log_prob(x, index),
        lambda: pj.embedding(w, index),
        lambda: pj.topk(x, 3),
        lambda: pj.sample(x, index, index),
        lambda: pj.attention(q, q, q, causal=True),
        lambda: pj.attention_varlen(rows, rows, rows, ends, ends),
    ]  # fmt: skip
    for call in calls:
        first, called = call(), []
        call()
        profile = lambda frame, event, _, called=called: event == "call" and called.append(frame.f_code)
        sys.setprofile(profile)
        try:
            again = call()
        finally:
            sys.setprofile(None)
        own = [code.co_name for code in called if "/pydet/" in code.co_filename]
        assert own == ["call"], own
        for ours, want in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True):
            same(ours, want)


def test_what_was_checked_once_is_not_taken_for_another(device):
    """A call like an earlier one is not checked anew; 16.0 == 16 and True == 1, which are refused all the same."""
    x, w = jax.device_put(normal(6, 16)), jax.device_put(normal(4, 16))
    for call, more in ((pj.gemm, (x, w.T)), (pj.skinny_gemm, (x, w)), (pj.gemm_db, (x, x))):
        for _ in range(2):
            same(call(*more, k_chunk=16), call(*more, k_chunk=16, kernel=None))
            refuses("k_chunk is 16.0, want None or an integer", call, *more, k_chunk=16.0)
            refuses("arithmetic is b'auto', want", call, *more, arithmetic=b"auto")
            refuses(r"kernel is \[\], want None or the name", call, *more, kernel=[])
            assert call(*more, out_dtype="bfloat16").dtype == jnp.bfloat16 and call(*more).dtype == jnp.float32
    same(pj.skinny_gemm(x, w, weights_constant=True), pj.skinny_gemm(x, w, weights_constant=False))
    refuses("weights_constant is 1, want True or False", pj.skinny_gemm, x, w, weights_constant=1)
    refuses("gemm: b is 4x16, want 16xN", pj.gemm, x, w)
    refuses("x is int32, want float32", pj.linear, x.astype(jnp.int32), w)
