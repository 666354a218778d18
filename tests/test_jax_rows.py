"""pydet.jax.layer_norm, softmax, log_softmax and log_prob: jit, grad and vmap have the bits of the eager calls."""

import itertools

import numpy as np
import pytest

import pydet
from test_jax import all_same, device, dtype, eager, forced, jax, jnp, normal, pj, same, vjp  # noqa: F401


@pytest.mark.parametrize("weighted,biased", list(itertools.product((True, False), repeat=2)))
def test_layer_norm(eager, dtype, weighted, biased):
    x, residual, dy, dsum = (normal(4, 9, 40, dtype=dtype, seed=s) for s in range(4))
    weight, bias = normal(40, seed=5) if weighted else None, normal(40, seed=6, dtype=dtype) if biased else None
    keywords = {"eps": 1e-5, "weight_offset": 1.0}
    y, gradients = vjp(jax.jit(lambda x, w, b: pj.layer_norm(x, w, b, **keywords)), (x, weight, bias), jnp.asarray(dy))
    want, mean, rstd = eager.layernorm(x, weight, bias, **keywords)
    more = {"weight_offset": 1.0, "has_bias": False, "dbias": np.empty_like(bias) if biased else None}
    same(y, want)
    dx, dweight, dbias = pydet.layernorm_backward(dy, x, weight, mean, rstd, **more)
    for ours, theirs in zip(gradients, (dx, dweight, dbias), strict=True):
        assert (ours is None and theirs is None) or same(ours, theirs) is None
    all_same(pj.layernorm(x, weight, bias, **keywords), (want, mean, rstd))
    function = jax.jit(lambda x, r, w, b: pj.layer_norm(x, w, b, residual=r, **keywords))
    (y, total), gradients = vjp(function, (x, residual, weight, bias), jnp.asarray(dy), jnp.asarray(dsum))
    want, mean, rstd, want_total = eager.layernorm(x, weight, bias, residual=residual, **keywords)
    dx, dweight, dbias = pydet.layernorm_backward(dy, want_total, weight, mean, rstd, dresidual=dsum, **more)
    same(y, want), same(total, want_total)
    for ours, theirs in zip(gradients, (dx, dx, dweight, dbias), strict=True):
        assert (ours is None and theirs is None) or same(ours, theirs) is None


def test_layer_norm_gradient_by_hand_vmap_and_no_rows(eager):
    x, dy, weights, biases = normal(3, 17, 24), normal(3, 17, 24, seed=1), normal(3, 24), normal(3, 24, seed=1)
    norm = lambda x, w, b: pj.layer_norm(x, w, b, eps=1e-5)
    each = [eager.layernorm(x[i], weights[i], biases[i], eps=1e-5) for i in range(3)]
    same(jax.vmap(norm)(x, weights, biases), np.stack([y for y, *_ in each]))
    shared = np.stack([eager.layernorm(x[i], weights[0], biases[i], eps=1e-5)[0] for i in range(3)])
    same(jax.vmap(norm, in_axes=(0, None, 0))(x, weights[0], biases), shared)
    means, rstds = (np.stack(part) for part in list(zip(*each, strict=True))[1:])
    found = jax.vmap(lambda *o: pj.layernorm_backward(*o))(dy, x, weights, means, rstds)
    wanted = [eager.layernorm_backward(dy[i], x[i], weights[i], means[i], rstds[i]) for i in range(3)]
    all_same(found, [np.stack(part) for part in zip(*wanted, strict=True)])
    half = pj.layernorm_backward(dy[0], x[0], None, means[0], rstds[0], dweight_dtype="bfloat16")
    assert half[1] is None and half[2].dtype == jnp.bfloat16
    none = np.zeros((0, 24), np.float32), np.zeros(0, np.float32)
    dx, dweight, dbias = pj.layernorm_backward(none[0], none[0], weights[0], none[1], none[1])
    assert dx.shape == (0, 24) and not np.asarray(dweight).any() and not np.asarray(dbias).any()
    dx, dweight = pj.rmsnorm_backward(none[0], none[0], weights[0], none[1])
    assert dx.shape == (0, 24) and not np.asarray(dweight).any()


@pytest.mark.parametrize("number", [1e-40, 1e-45, 1e-5, 0.1, 1 + 2**-24, 1 + 3 * 2**-24, 3.4028235677973362e38])
def test_floats_are_rounded_to_nearest(number):
    """eps and weight_offset go to XLA in double precision, and its threads flush subnormals."""
    line, zero, one, single = np.float32([[1, -1]]), np.zeros(1, np.float32), np.ones(1, np.float32), np.float32(number)
    norm = {"eps": 0.0, "weight_offset": number}
    for y in (
        pj.rmsnorm(line, line[0] * 0, **norm)[0],
        pj.layernorm(line, line[0] * 0, **norm)[0],
        pj.rmsnorm_backward(line, line * 0, line[0] * 0, one, weight_offset=number)[0],
        pj.layernorm_backward(line, line * 0, line[0] * 0, zero, one, weight_offset=number)[0],
    ):
        assert np.asarray(y).tobytes() == np.array([[single, -single]]).tobytes()
    want = (1 / np.sqrt(single)).tobytes()
    assert np.asarray(pj.rmsnorm(line * 0, eps=number)[1]).tobytes() == want
    assert np.asarray(pj.layernorm(line * 0, eps=number)[2]).tobytes() == want


def test_softmax(eager, dtype):
    x, dy = normal(4, 9, 40, dtype=dtype), normal(4, 9, 40, dtype=dtype, seed=1)
    for ours, name in ((pj.softmax, "softmax"), (pj.log_softmax, "log_softmax")):
        y, (dx,) = vjp(jax.jit(ours), (x,), jnp.asarray(dy))
        want = getattr(eager, name)(x)
        same(y, want)
        same(dx, getattr(eager, f"{name}_backward")(dy, want))
        same(jax.vmap(ours)(x), want)
    index, weight = (np.arange(36, dtype=np.int32) * 7 % 40).reshape(4, 9), normal(4, 9, seed=2)
    p, (dx,) = vjp(jax.jit(lambda x: pj.log_prob(x, index)), (x,), jnp.asarray(weight))
    same(p, eager.log_prob(x, index))
    same(dx, eager.log_prob_backward(weight, x, index))
    same(jax.vmap(pj.log_prob)(x, index), eager.log_prob(x, index))
    with jax.enable_x64(True):
        same(pj.log_prob(x, index.astype(np.int64)), eager.log_prob(x, index))


def test_kernels_by_name(device, dtype):
    """Every kernel that the device can run, forced: the same bits, or the library says that it does not take this."""
    x, dy, weight, index = normal(8, 64, dtype=dtype), normal(8, 64, dtype=dtype, seed=1), normal(64), np.arange(8)
    y, mean, rstd = pydet.layernorm(x, weight, eps=1e-5)
    index = index.astype(np.int32)
    calls = {
        "layernorm": [(lambda k: pj.layernorm(x, weight, eps=1e-5, kernel=k), (y, mean, rstd))],
        "layernorm_backward": [
            (
                lambda k: pj.layernorm_backward(dy, x, weight, mean, rstd, kernel=k),
                pydet.layernorm_backward(dy, x, weight, mean, rstd),
            )
        ],
        "softmax": [
            (lambda k: (pj.softmax(x, kernel=k),), (pydet.softmax(x),)),
            (lambda k: (pj.log_softmax(x, kernel=k),), (pydet.log_softmax(x),)),
            (lambda k: (pj.log_prob(x, index, kernel=k),), (pydet.log_prob(x, index),)),
        ],
    }
    short, ran = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype.name], set()
    for kernel in pydet.kernels():
        if kernel.device != device or not kernel.available or short not in kernel.dtypes.split():
            continue
        for place, (call, expected) in enumerate(calls.get(kernel.operation, ())):
            found = forced(call, kernel.name, device)
            if found is not None:
                all_same(found, expected)
                ran.add((kernel.operation, place))
    assert ran == {(operation, place) for operation, of in calls.items() for place in range(len(of))}
    for call, _ in itertools.chain(*calls.values()):
        with pytest.raises(Exception, match="no_such_kernel"):
            jax.block_until_ready(call("no_such_kernel"))


def test_refusals():
    x, rows = normal(3, 4), normal(3)

    def refuses(pattern, function, *arguments, **options):
        with pytest.raises(Exception, match=pattern):
            function(*arguments, **options)

    refuses(r"layer_norm: bias is 7, want 4", pj.layer_norm, x, None, normal(7), eps=1e-5)
    refuses(r"layer_norm: eps is -1.0, want a number that is not negative", pj.layer_norm, x, eps=-1)
    refuses(r"layernorm_backward: mean is 2, want 3", pj.layernorm_backward, x, x, None, normal(2), rows)
    refuses(r"layernorm_backward: has_bias is 1, want True", pj.layernorm_backward, x, x, None, rows, rows, has_bias=1)
    refuses(r"layernorm: no derivative; layer_norm has", jax.grad(lambda x: pj.layernorm(x, eps=1e-5)[0].sum()), x)
    refuses(r"softmax: x is 3x0, want a last dimension of 1", pj.softmax, np.zeros((3, 0), np.float32))
    refuses(r"softmax: x is int32, want float32", pj.softmax, np.zeros((3, 4), np.int32))
    refuses(r"softmax: no forward-mode derivative|custom_vjp", jax.jvp, pj.softmax, (x,), (x,))
    refuses(r"log_prob: index is float32, want an array of int32 or int64", pj.log_prob, x, rows)
    refuses(r"log_prob: index is 2, want 3", pj.log_prob, x, np.zeros(2, np.int32))
