"""pydet.jax's activations: jit, grad and vmap have the bits of the eager calls, under the names of jax.nn."""

import numpy as np
import pytest

import pydet
from pydet.hooks import KINDS
from test_jax import device, dtype, eager, jax, jnp, normal, pj, refuses, same, vjp  # noqa: F401

NAMED = {  # name -> (function, its kind, JAX's own)
    "silu": (pj.silu, "silu", jax.nn.silu),
    "swish": (pj.swish, "silu", jax.nn.swish),
    "gelu": (pj.gelu, "gelu_tanh", jax.nn.gelu),
    "exact gelu": (lambda x: pj.gelu(x, False), "gelu", lambda x: jax.nn.gelu(x, approximate=False)),
    "sigmoid": (pj.sigmoid, "sigmoid", jax.nn.sigmoid),
    "tanh": (pj.tanh, "tanh", jnp.tanh),
    "softplus": (pj.softplus, "softplus", jax.nn.softplus),
    "exp": (pj.exp, "exp", jnp.exp),
}


@pytest.mark.parametrize("gated", [False, True])
def test_every_kind(eager, dtype, gated):
    x, up, dy = (normal(3, 7, 11, dtype=dtype, seed=seed) for seed in range(3))
    more = {"up": up} if gated else {}
    for kind in KINDS:
        operands = (x, up) if gated else (x,)
        call = jax.jit(lambda x, up=None, kind=kind: pj.activation(x, kind, up=up))
        y, gradients = vjp(call, operands, jnp.asarray(dy))
        same(y, eager.activation(x, kind, **more))
        want = eager.activation_backward(dy, x, kind, **more)
        for ours, theirs in zip(gradients, want if gated else (want,), strict=True):
            same(ours, theirs)
        same(jax.vmap(call)(*operands), y)


@pytest.mark.parametrize("name", NAMED)
def test_names_of_jax(eager, name):
    ours, kind, theirs = NAMED[name]
    x = normal(5, 33)
    same(ours(x), eager.activation(x, kind))
    np.testing.assert_allclose(ours(x), theirs(x), rtol=2e-6, atol=1e-6)
    slope, other = (jax.vmap(jax.vmap(jax.grad(f)))(x) for f in (ours, theirs))
    same(slope, eager.activation_backward(np.ones_like(x), x, kind))
    np.testing.assert_allclose(slope, other, rtol=1e-4, atol=1e-5)


def test_other_names(eager):
    x, up = normal(5, 32), normal(5, 32, seed=1)
    same(pj.log_sigmoid(x), -eager.activation(-x, "softplus"))
    same(pj.swiglu(x, up), eager.activation(x, "silu", up=up))
    same(pj.geglu(x, up), eager.activation(x, "gelu_tanh", up=up))
    same(pj.geglu(x, up, False), eager.activation(x, "gelu", up=up))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 1, 3, 1, 2)])
def test_any_shape(shape):
    x = normal(*shape)
    y, (dx, dup) = vjp(pj.swiglu, (x, x), jnp.asarray(x))
    assert y.shape == dx.shape == dup.shape == shape
    flat = x.reshape(1, -1)
    if flat.size:
        same(y.reshape(1, -1), pydet.activation(flat, "silu", up=flat))
        same(dx.reshape(1, -1), pydet.activation_backward(flat, flat, "silu", up=flat)[0])


def test_an_element_in_any_array(device):
    x = normal(37, 33)
    whole = np.asarray(jax.jit(pj.gelu)(x))
    for rows in (1, 2, 17):
        same(jax.jit(pj.gelu)(x[3 : 3 + rows]), whole[3 : 3 + rows])
    same(jax.jit(pj.gelu)(x[:, :1]), whole[:, :1])


def test_in_loops_and_programs(eager, device):
    from jax import export

    x = normal(6, 9)
    want = eager.activation(eager.activation(x, "tanh"), "tanh")
    twice = lambda x: jax.lax.scan(lambda y, _: (pj.tanh(y), None), x, length=2)[0]
    same(jax.jit(twice)(x), want)
    same(jax.checkpoint(twice)(x), want)
    same(jax.grad(lambda x: jax.checkpoint(twice)(x).sum())(x), jax.grad(lambda x: twice(x).sum())(x))
    known = [export.DisabledSafetyCheck.custom_call("pydet_activation")]
    (rows,) = export.symbolic_shape("b")
    program = export.export(jax.jit(twice), platforms=[device], disabled_checks=known)(
        jax.ShapeDtypeStruct((rows, 9), np.float32)
    )
    same(program.call(x), want)


def test_kernels_by_name(device, dtype):
    x = normal(8, 64, dtype=dtype)
    short, ran = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype.name], 0
    for kernel in pydet.kernels():
        here = kernel.device == device and kernel.available and kernel.operation == "activation"
        if here and short in kernel.dtypes.split():
            same(pj.activation(x, "gelu", kernel=kernel.name), pydet.activation(x, "gelu"))
            ran += 1
    assert ran
    with pytest.raises(Exception, match="no_such_kernel"):
        jax.block_until_ready(pj.activation(x, kernel="no_such_kernel"))


# ---- softmax along any dimensions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -2, 2, (1, 2), (2, 0), (-1,), None])
def test_softmax_along(eager, axis):
    x, dy, there = normal(3, 5, 8), normal(3, 5, 8, seed=1), normal(3, 5, 8, seed=2) > -0.5
    there[:, 0] = there[0] = True  # no row is empty
    for ours, theirs in ((pj.softmax, jax.nn.softmax), (pj.log_softmax, jax.nn.log_softmax)):
        for where in (None, there, there[:1, :, :1])[: 3 if axis in (0, None, (1, 2)) else 2]:
            mine, other = (vjp(lambda x, f=f, w=where: f(x, axis, w), (x,), jnp.asarray(dy)) for f in (ours, theirs))
            np.testing.assert_allclose(mine[0], other[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(mine[1][0], other[1][0], rtol=1e-4, atol=1e-5)


def test_softmax_along_has_the_bits_of_rows(eager):
    x = normal(3, 5, 8)
    same(pj.softmax(x, 0), np.moveaxis(np.asarray(eager.softmax(np.ascontiguousarray(np.moveaxis(x, 0, -1)))), -1, 0))
    same(pj.log_softmax(x, (1, 2)), eager.log_softmax(x.reshape(3, 40)).reshape(3, 5, 8))


def test_refuses():
    x = normal(3, 4)
    for sentence, call, arguments, options in (
        ("activation: kind is 'relu', want one of silu, gelu,", pj.activation, (x, "relu"), {}),
        ("activation: up is 3x5, want 3x4", pj.activation, (x,), {"up": normal(3, 5)}),
        ("swiglu: up is float16, want float32 as gate is", pj.swiglu, (x, x.astype(np.float16)), {}),
        ("swiglu: up is NoneType, want an array", pj.swiglu, (x, None), {}),
        ("gelu: approximate is 'tanh', want True or False", pj.gelu, (x, "tanh"), {}),
        ("silu: x is int32, want float32, bfloat16 or float16", pj.silu, (x.astype(np.int32),), {}),
        ("tanh: x is float, want an array", pj.tanh, (1.0,), {}),
        ("softmax: axis is 2, want dimensions of x, 3x4, once", pj.softmax, (x, 2), {}),
        (r"softmax: axis is \(1, -1\), want dimensions of x, 3x4, once", pj.softmax, (x, (1, -1)), {}),
        (r"log_softmax: axis is \(\), want one dimension or more", pj.log_softmax, (x, ()), {}),
        ("softmax: axis is 'rows', want dimensions, or None for all", pj.softmax, (x, "rows"), {}),
        ("softmax: where is 3, want one that broadcasts to 3x4", pj.softmax, (x, -1, np.ones(3, bool)), {}),
        ("softmax: where is int32, want bool", pj.softmax, (x, -1, np.ones(4, np.int32)), {}),
    ):
        refuses(f"^{sentence}", call, *arguments, **options)
    twice = jax.grad(lambda x: jax.grad(lambda x: pj.silu(x).sum())(x).sum())
    refuses("^activation_backward: no derivative of this gradient", twice, x)
