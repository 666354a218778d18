"""pydet.jax.rms_norm with weights of heads, a bias and a residual in float32: jit, grad and vmap, the eager bits."""

import itertools

import numpy as np
import pytest

from test_jax import all_same, device, dtype, eager, jax, jnp, normal, pj, same, vjp  # noqa: F401


@pytest.mark.parametrize("per_head,biased,wide", list(itertools.product((True, False), repeat=3)))
def test_rms_norm(eager, dtype, per_head, biased, wide):
    shape, of = (2, 9, 4, 24), (4, 24) if per_head else (24,)
    x, dy = (normal(*shape, dtype=dtype, seed=seed) for seed in range(2))
    added = {} if wide else {"dtype": dtype}
    residual, dsum = (normal(*shape, seed=seed, **added) for seed in (2, 3))
    weight, bias = normal(*of, seed=4), normal(*of, seed=5, dtype=dtype) if biased else None
    keywords = {"eps": 1e-5, "weight_offset": 1.0}
    more = {"weight_offset": 1.0} | ({"dbias": np.empty_like(bias)} if biased else {})

    y, gradients = vjp(
        jax.jit(lambda x, w, b: pj.rms_norm(x, w, bias=b, **keywords)), (x, weight, bias), jnp.asarray(dy)
    )
    want, rstd = eager.rmsnorm(x, weight, bias=bias, **keywords)
    same(y, want)
    found = [g for g in gradients if g is not None]
    all_same(found, eager.rmsnorm_backward(dy, x, weight, rstd, **more))

    function = jax.jit(lambda x, r, w, b: pj.rms_norm(x, w, bias=b, residual=r, **keywords))
    (y, total), gradients = vjp(function, (x, residual, weight, bias), jnp.asarray(dy), jnp.asarray(dsum))
    want, rstd, want_total = eager.rmsnorm(x, weight, bias=bias, residual=residual, **keywords)
    same(y, want), same(total, want_total)
    dx, *sums = eager.rmsnorm_backward(dy, want_total, weight, rstd, dresidual=dsum, **more)
    all_same([g for g in gradients if g is not None], [dx.astype(dy.dtype), dx, *sums])


def test_by_hand_vmap_and_no_rows(eager):
    x, dy = normal(3, 17, 2, 24), normal(3, 17, 2, 24, seed=1)
    weights, biases = normal(3, 2, 24, seed=2), normal(3, 2, 24, seed=3)
    norm = lambda x, w, b: pj.rms_norm(x, w, bias=b, eps=1e-5)
    each = [eager.rmsnorm(x[i], weights[i], bias=biases[i], eps=1e-5) for i in range(3)]
    same(jax.vmap(norm)(x, weights, biases), np.stack([y for y, _ in each]))
    shared = np.stack([eager.rmsnorm(x[i], weights[0], bias=biases[i], eps=1e-5)[0] for i in range(3)])
    same(jax.vmap(norm, in_axes=(0, None, 0))(x, weights[0], biases), shared)
    rstds = np.stack([rstd for _, rstd in each])
    found = jax.vmap(lambda *o: pj.rmsnorm_backward(*o, has_bias=True))(dy, x, weights, rstds)
    wanted = [eager.rmsnorm_backward(dy[i], x[i], weights[i], rstds[i], has_bias=True) for i in range(3)]
    all_same(found, [np.stack(part) for part in zip(*wanted, strict=True)])
    start = np.ones((2, 24), np.float32)
    _, dweight = pj.rmsnorm_backward(dy[0], x[0], weights[0], rstds[0], accumulate=start)
    _, want = eager.rmsnorm_backward(dy[0], x[0], weights[0], rstds[0], dweight=start.copy(), accumulate=True)
    same(dweight, want)
    none = np.zeros((0, 2, 24), np.float32), np.zeros((0, 2), np.float32)
    dx, dweight, dbias = pj.rmsnorm_backward(none[0], none[0], weights[0], none[1], has_bias=True)
    assert dx.shape == (0, 2, 24) and not np.asarray(dweight).any() and not np.asarray(dbias).any()


def test_refusals():
    x, weight, bias = normal(5, 3, 8), normal(3, 8), normal(8)
    with pytest.raises(ValueError, match=r"^rms_norm: bias is 8, want 3x8$"):
        pj.rms_norm(x, weight, bias=bias, eps=1e-5)
    with pytest.raises(
        ValueError, match=r"^rmsnorm_backward: accumulate continues dweight alone, want has_bias=False$"
    ):
        pj.rmsnorm_backward(x, x, weight, x[..., 0], has_bias=True, accumulate=np.zeros((3, 8), np.float32))
