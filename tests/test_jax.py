"""pydet.jax: jit, grad, vmap and loops have the bits of the eager calls; bad input; and the interface's layout.

The eager calls are pydet's own functions on NumPy arrays. Where JAX has a CUDA device everything runs there too, and is
also compared with those functions on CUDA tensors of PyTorch.
"""

import functools
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves a GPU's memory to the other tests
jax = pytest.importorskip("jax") if "jax" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental import sparse  # noqa: E402

import pydet  # noqa: E402
import pydet.jax as pj  # noqa: E402
from capi import ROOT  # noqa: E402
from pydet import _native  # noqa: E402

DTYPES = [np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def arithmetic(dtype):
    return arithmetic_of(dtype)


def arithmetic_of(dtype):
    """One that the CPU and a Hopper GPU both compute."""
    return "ieee" if dtype == np.float32 else "sm90"


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    try:
        found = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {request.param} device here")
    with jax.default_device(found):
        yield request.param


class Eager:
    """pydet's functions on NumPy arrays; on CUDA also on tensors there, which must have the same bits."""

    def __init__(self, device):
        self.torch = pytest.importorskip("torch") if device == "cuda" else None

    def __getattr__(self, name):
        def call(*operands, **options):
            there = [self.there(x) for x in operands], {key: self.there(x) for key, x in options.items()}
            found = getattr(pydet, name)(*operands, **options)
            if self.torch:
                twin = getattr(pydet, name)(*there[0], **there[1])
                for ours, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (twin, found)), strict=True):
                    assert (ours is None) == (theirs is None)
                    if ours is not None:
                        bits = f"int{8 * ours.itemsize}"
                        same(ours.view(getattr(self.torch, bits)).cpu(), theirs.view(bits))
            return found

        return call

    def there(self, x):
        if not isinstance(x, np.ndarray) or not self.torch:
            return x
        bits = self.torch.from_numpy(x.view(f"i{x.itemsize}"))
        return bits.cuda().view(getattr(self.torch, x.dtype.name))


@pytest.fixture
def eager(device):
    return Eager(device)


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, np.float32).astype(dtype)


def same(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, want.dtype, got.shape, want.shape)
    differing = (got.view(f"u{got.itemsize}") != want.view(f"u{got.itemsize}")).sum()
    assert differing == 0, f"{differing} of {got.size} elements differ"


def all_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        same(ours, theirs)


def forced(call, kernel, device):
    """What a call gives by the kernel of a name; None where that does not take it, as every one of a CPU does."""
    try:
        return jax.block_until_ready(call(kernel))
    except Exception as problem:
        assert device != "cpu" and f"kernel {kernel} does not take this problem" in str(problem), problem
        return None


def in_fp32(function):
    """JAX's own function with the whole products of float32, which on a GPU are TF32 otherwise."""

    @functools.wraps(function)
    def call(*given):
        with jax.default_matmul_precision("highest"):
            return function(*given)

    return call


def vjp(function, operands, *cotangents):
    result, pull = jax.vjp(function, *operands)
    return result, pull(cotangents[0] if len(cotangents) == 1 else cotangents)


# ---- Bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_chunk", [None, 16])
def test_gemm(eager, dtype, arithmetic, k_chunk):
    a, b, dc = normal(3, 5, 40, dtype=dtype), normal(3, 40, 9, dtype=dtype), normal(3, 5, 9, dtype=dtype, seed=1)
    options = {"arithmetic": arithmetic, "k_chunk": k_chunk}
    for bias in (None, normal(9), normal(3, 5, 9, dtype=dtype, seed=2)):
        want = eager.gemm(a, b, bias=bias, **options)
        same(pj.gemm(a, b, bias, **options), want)
        same(jax.jit(lambda a, b, bias=bias: pj.gemm(a, b, bias, **options))(a, b), want)
    want = eager.gemm(a, b, out_dtype="float32", **options)
    same(pj.gemm(a, b, out_dtype=jnp.float32, **options), want)
    _, (da, db) = vjp(lambda a, b: pj.gemm(a, b, **options), (a, b), jnp.asarray(dc))
    same(da, eager.gemm_da(dc, b, **options))
    same(db, eager.gemm_db(a, dc, **options))
    same(pj.gemm_da(dc, b, **options), da)
    same(pj.gemm_db(a, dc, **options), db)
    y, (da, db) = vjp(jax.jit(lambda a, b: pj.gemm(a, b, **options)), (a, b[0]), jnp.asarray(dc))
    same(y, eager.gemm(a, b[0], **options))
    same(da, eager.gemm_da(dc, b[0], **options))
    same(db, eager.gemm_db(a.reshape(15, 40), dc.reshape(15, 9), **options))


def test_linear(eager, dtype, arithmetic):
    x, w, bias, dy = (normal(*s, dtype=dtype) for s in ((2, 7, 48), (24, 48), (24,), (2, 7, 24)))
    function = jax.jit(lambda x, w, bias: pj.linear(x, w, bias, arithmetic=arithmetic))
    y, (dx, dw, dbias) = vjp(function, (x, w, bias), jnp.asarray(dy))
    rows, drows = x.reshape(14, 48), dy.reshape(14, 24)
    same(y, eager.skinny_gemm(x, w, bias=bias, arithmetic=arithmetic))
    same(dx.reshape(14, 48), eager.gemm_da(drows, w.T, arithmetic=arithmetic))
    same(dw, np.ascontiguousarray(eager.gemm_db(rows, drows, arithmetic=arithmetic).T))
    same(dbias, eager.gemm_db(np.ones((14, 1), dtype), drows, arithmetic=arithmetic)[0])
    same(pj.linear(x[0, 0], w, arithmetic=arithmetic), eager.skinny_gemm(x[0, 0], w, arithmetic=arithmetic))


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(eager, dtype, weighted):
    x, residual, dy, dsum = (normal(4, 3, 40, dtype=dtype, seed=s) for s in range(4))
    weight = normal(40) if weighted else None
    operands = (x, weight) if weighted else (x,)
    keywords = {"eps": 1e-5, "weight_offset": 1.0}
    y, gradients = vjp(jax.jit(lambda *o: pj.rms_norm(*o, **keywords)), operands, jnp.asarray(dy))
    want, rstd = eager.rmsnorm(x, weight, **keywords)
    dx, dweight = eager.rmsnorm_backward(dy, x, weight, rstd, weight_offset=1.0)
    same(y, want)
    for ours, theirs in zip(gradients, (dx, dweight), strict=False):
        same(ours, theirs)
    function = jax.jit(lambda x, r, *w: pj.rms_norm(x, *w, residual=r, **keywords))
    (y, total), gradients = vjp(function, (x, residual, *operands[1:]), jnp.asarray(dy), jnp.asarray(dsum))
    want, rstd, want_total = eager.rmsnorm(x, weight, residual=residual, **keywords)
    dx, dweight = eager.rmsnorm_backward(dy, want_total, weight, rstd, weight_offset=1.0, dresidual=dsum)
    same(y, want), same(total, want_total)
    for ours, theirs in zip(gradients, (dx, dx, dweight), strict=False):
        same(ours, theirs)


def test_vmap(eager, dtype, arithmetic):
    a, b, bias = normal(4, 3, 5, 16, dtype=dtype), normal(4, 16, 6, dtype=dtype), normal(4, 6)
    chosen = {"arithmetic": arithmetic}
    gemm, linear = functools.partial(pj.gemm, **chosen), functools.partial(pj.linear, **chosen)
    same(jax.vmap(gemm)(a[:, 0], b), eager.gemm(a[:, 0], b, **chosen))
    same(jax.vmap(gemm, in_axes=(None, 0))(a[0, 0], b), eager.gemm(a[0, 0], b, **chosen))
    same(jax.vmap(gemm, in_axes=(0, None))(a, b[0]), eager.gemm(a, b[0], **chosen))
    each = [eager.gemm(a[i, 0], b[i], bias=bias[i], **chosen) for i in range(4)]
    same(jax.vmap(gemm)(a[:, 0], b, bias), np.stack(each))
    same(jax.vmap(gemm, in_axes=(0, 0, None))(a[:, 0], b, bias[0]), eager.gemm(a[:, 0], b, bias=bias[0], **chosen))
    each = [eager.gemm(a[i], b[i], **chosen) for i in range(4)]
    same(jax.vmap(jax.vmap(gemm, in_axes=(0, None)))(a, b), np.stack(each))
    w = normal(4, 6, 16, dtype=dtype, seed=4)
    same(jax.vmap(linear, in_axes=(1, None), out_axes=1)(a[0], w[0]), eager.skinny_gemm(a[0], w[0], **chosen))
    each = [eager.skinny_gemm(a[i, 0], w[i], bias=bias[i], **chosen) for i in range(4)]
    same(jax.vmap(linear)(a[:, 0], w, bias), np.stack(each))
    same(
        jax.vmap(linear, in_axes=(0, None, None))(a[:, 0], w[0], bias[0]),
        eager.skinny_gemm(a[:, 0], w[0], bias=bias[0], **chosen),
    )
    each = [eager.skinny_gemm(a[i, 0], w[0], bias=bias[i], **chosen) for i in range(4)]
    same(jax.vmap(linear, in_axes=(0, None, 0))(a[:, 0], w[0], bias), np.stack(each))
    same(jax.vmap(linear)(a[:, 0], np.repeat(w[:1], 4, 0)), eager.skinny_gemm(a[:, 0], w[0], **chosen))
    x, weights = a[:, 0], normal(4, 16)
    norm = lambda x, w: pj.rms_norm(x, w, eps=1e-5)
    each = [eager.rmsnorm(x[i], weights[i], eps=1e-5)[0] for i in range(4)]
    same(jax.vmap(norm)(x, weights), np.stack(each))
    same(
        jax.vmap(norm, in_axes=(None, 0))(x[0], weights),
        np.stack([eager.rmsnorm(x[0], w, eps=1e-5)[0] for w in weights]),
    )
    same(jax.vmap(norm, in_axes=(0, None))(x, weights[0]), eager.rmsnorm(x, weights[0], eps=1e-5)[0])
    # The weight's batch inside that of the rows.
    each = np.stack([np.stack([eager.rmsnorm(r, w, eps=1e-5)[0] for w in weights]) for r in x])
    same(jax.vmap(jax.vmap(norm, in_axes=(None, 0)), in_axes=(0, None))(x, weights), each)
    rows = np.stack([x, x[::-1]])
    each = np.stack([[eager.rmsnorm(y[i], weights[i], eps=1e-5)[0] for i in range(4)] for y in rows])
    same(jax.vmap(jax.vmap(norm), in_axes=(0, None))(rows, weights), each)


def test_vmap_of_gradients(eager):
    """Per-example gradients under jit."""
    x, w, weight = normal(4, 5, 16), normal(6, 16), normal(16)

    def loss(w, weight, x):
        return pj.linear(pj.rms_norm(x, weight, eps=1e-5), w).sum()

    dws, dweights = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(None, None, 0)))(w, weight, x)
    for i in range(4):
        h, rstd = eager.rmsnorm(x[i], weight, eps=1e-5)
        dy = np.ones((5, 6), np.float32)
        same(dws[i], np.ascontiguousarray(eager.gemm_db(dy, h)))
        _, dweight = eager.rmsnorm_backward(eager.gemm(dy, w), x[i], weight, rstd)
        same(dweights[i], dweight)


def batches_of(operands):
    """Three of each operand, the same but for their order along the first dimension."""
    return [np.stack([np.roll(x, i, 0) for i in range(3)]) for x in operands]


OPS = {  # of pydet.jax on arrays alone, the same of pydet, shapes, the types that are float32 whatever the others are
    "gemm": ((5, 48), (48, 24), (24,)),
    "gemm_da": ((5, 24), (48, 24)),
    "gemm_db": ((5, 48), (5, 24)),
    "skinny_gemm": ((5, 48), (24, 48), (24,)),
    "rmsnorm": ((5, 48), (48,), (5, 48)),
    "rmsnorm_backward": ((5, 48), (5, 48), (48,), (5,), (5, 48)),
}


def operation(name, module, options):
    """The operation on arrays alone."""
    function = getattr(module, name)
    if name == "rmsnorm":
        return lambda x, weight, residual: function(x, weight, residual=residual, eps=1e-5)
    if name == "rmsnorm_backward":
        return lambda dy, x, weight, rstd, dr: function(dy, x, weight, rstd, dresidual=dr)
    return lambda a, b, bias=None: function(a, b, **({} if bias is None else {"bias": bias}), **options)


@pytest.mark.parametrize("name", OPS)
def test_jit_vmap_scan_and_loops(eager, dtype, arithmetic, name):
    """Every operation under every transformation has the bits of pydet's own calls, one after the other."""
    options = {"arithmetic": arithmetic, "k_chunk": 16}
    ours, theirs = operation(name, pj, options), operation(name, eager, options)
    shapes = OPS[name]
    operands = [normal(*s, dtype=np.float32 if s == (5,) else dtype, seed=i) for i, s in enumerate(shapes)]
    if name == "rmsnorm_backward":
        operands[3] = np.abs(operands[3])
    batches = batches_of(operands)
    each = [theirs(*(x[i] for x in batches)) for i in range(3)]
    results = [np.stack(x) for x in zip(*(y if isinstance(y, tuple) else (y,) for y in each), strict=True)]

    def as_tuple(*given):
        found = ours(*given)
        return found if isinstance(found, tuple) else (found,)

    all_same(as_tuple(*operands), [x[0] for x in results])
    all_same(jax.jit(as_tuple)(*operands), [x[0] for x in results])
    all_same(jax.vmap(as_tuple)(*batches), results)
    all_same(jax.jit(jax.vmap(as_tuple))(*batches), results)
    _, scanned = jax.jit(lambda *given: jax.lax.scan(lambda carry, x: (carry, as_tuple(*x)), 0, given))(*batches)
    all_same(scanned, results)

    def step(i, found):
        new = as_tuple(*(jnp.asarray(x)[i] for x in batches))
        return [x.at[i].set(y) for x, y in zip(found, new, strict=True)]

    filled = jax.jit(lambda: jax.lax.fori_loop(0, 3, step, [jnp.zeros(x.shape, x.dtype) for x in results]))()
    all_same(filled, results)


def test_rows_in_any_batch(device, dtype, arithmetic):
    """A program compiled for few rows, with whatever kernel that is, has the bits of one for many."""
    x, w, weight = normal(200, 256, dtype=dtype), normal(136, 256, dtype=dtype), normal(256)
    layer = jax.jit(lambda x: pj.linear(pj.rms_norm(x, weight, eps=1e-5), w, arithmetic=arithmetic))
    product = jax.jit(lambda x: pj.gemm(x, w.T, arithmetic=arithmetic))
    whole, plain = np.asarray(layer(x)), np.asarray(product(x))
    same(whole, pydet.skinny_gemm(pydet.rmsnorm(x, weight, eps=1e-5)[0], w, arithmetic=arithmetic))
    same(plain, pydet.gemm(x, w.T, arithmetic=arithmetic))
    for rows in (1, 3, 64):
        same(layer(x[7 : 7 + rows]), whole[7 : 7 + rows])
        same(product(x[7 : 7 + rows]), plain[7 : 7 + rows])


def test_gradients_under_transformations(eager, dtype, arithmetic):
    """A layer's gradients: plain, jitted, rematerialised, in a scan, and vmapped."""
    x, w, weight, dy = (normal(*s, dtype=dtype, seed=1) for s in ((3, 20, 32), (24, 32), (32,), (3, 20, 24)))

    def layer(x, w, weight):
        return pj.linear(pj.rms_norm(x, weight, eps=1e-5), w, arithmetic=arithmetic, k_chunk=16)

    def gradients(x, dy, apply=layer):
        return jax.vjp(apply, x, w, weight)[1](dy)

    def by_hand(x, dy):
        h, rstd = eager.rmsnorm(x, weight, eps=1e-5)
        chosen = {"arithmetic": arithmetic, "k_chunk": 16}
        dh = eager.gemm(dy, w, **chosen)
        dx, dweight = eager.rmsnorm_backward(dh, x, weight, rstd)
        return dx, np.ascontiguousarray(eager.gemm_db(h, dy, **chosen).T), dweight

    each = [by_hand(x[i], dy[i]) for i in range(3)]
    results = [np.stack(y) for y in zip(*each, strict=True)]
    for function in (gradients, jax.jit(gradients), jax.jit(functools.partial(gradients, apply=jax.checkpoint(layer)))):
        all_same(function(x[0], jnp.asarray(dy[0])), each[0])
    all_same(jax.jit(jax.vmap(gradients))(x, dy), results)
    all_same(jax.jit(lambda: jax.lax.scan(lambda carry, y: (carry, gradients(*y)), 0, (x, dy)))()[1], results)


def test_gradients_of_gradients(eager, dtype, arithmetic):
    """gemm_da, gemm_db and gradients are products themselves, and have gradients that are products."""
    chosen = {"arithmetic": arithmetic}
    a, b, dc, g = (normal(*s, dtype=dtype, seed=2) for s in ((5, 32), (32, 24), (5, 24), (5, 32)))
    _, (ddc, db) = vjp(lambda dc, b: pj.gemm_da(dc, b, **chosen), (dc, b), jnp.asarray(g))
    same(ddc, eager.gemm(g, b, **chosen)), same(db, eager.gemm_db(g, dc, **chosen))
    _, (da, ddc) = vjp(lambda a, dc: pj.gemm_db(a, dc, **chosen), (a, dc), jnp.asarray(b))
    same(da, eager.gemm(dc, b.T, **chosen)), same(ddc, eager.gemm(a, b, **chosen))

    def penalty(a, b):
        return vjp(lambda a: pj.gemm(a, b, **chosen), (a,), jnp.asarray(dc))[1][0]

    da, (_, db) = vjp(penalty, (a, b), jnp.asarray(g))
    same(da, eager.gemm_da(dc, b, **chosen)), same(db, eager.gemm_db(g, dc, **chosen))


def test_bias_like_the_result(eager, dtype, arithmetic):
    x, w, bias = normal(2, 3, 32, dtype=dtype), normal(16, 32, dtype=dtype), normal(2, 3, 16, seed=3)
    y, pull = jax.vjp(lambda bias: pj.skinny_gemm(x, w, bias, out_dtype="float32", arithmetic=arithmetic), bias)
    same(y, eager.skinny_gemm(x, w, bias=bias, out_dtype="float32", arithmetic=arithmetic))
    same(pull(jnp.asarray(bias))[0], bias)
    same(
        jax.jit(functools.partial(pj.linear, arithmetic=arithmetic))(x, w, bias),
        eager.skinny_gemm(x, w, bias=bias, arithmetic=arithmetic),
    )


# ---- accumulate ------------------------------------------------------------------------------------------------------


def test_accumulate(eager, dtype, arithmetic):
    """Each product continues from an array, which is not written where it is still needed."""
    chosen = {"arithmetic": arithmetic, "k_chunk": 16}
    operands = {name: [normal(*s, dtype=dtype, seed=5) for s in OPS[name][:2]] for name in list(OPS)[:4]}
    for name, (a, b) in operands.items():
        start = normal(*getattr(pydet, name)(a, b, **chosen).shape, seed=6)
        function = functools.partial(getattr(pj, name), **chosen)
        want = getattr(eager, name)(a, b, out=start.copy(), accumulate=True, **chosen)
        kept = jnp.asarray(start)
        same(function(a, b, accumulate=kept), want)
        same(jax.jit(lambda s, a=a, b=b, f=function: f(a, b, accumulate=s))(kept), want)
        same(kept, start)
        donated = jnp.array(start)
        same(jax.jit(lambda s, a=a, b=b, f=function: f(a, b, accumulate=s), donate_argnums=0)(donated), want)
        assert donated.is_deleted()
        # Under vmap, with an unbatched operand, and with an unbatched start.
        starts, many = np.stack([start, 2 * start]), np.stack([a, np.roll(a, 1, 0)])
        theirs = getattr(eager, name)
        one = lambda a, s, f=theirs, b=b: f(a, b, out=s.copy(), accumulate=True, **chosen)
        mapped = lambda a, s, f=function, b=b: f(a, b, accumulate=s)
        same(jax.vmap(mapped)(many, starts), np.stack([one(many[0], starts[0]), one(many[1], starts[1])]))
        same(jax.vmap(mapped, (0, None))(many, start), np.stack([one(many[0], start), one(many[1], start)]))
        same(jax.vmap(mapped, (None, 0))(a, starts), np.stack([one(a, starts[0]), one(a, starts[1])]))


def test_accumulate_in_a_batch_and_with_a_bias(eager, dtype, arithmetic):
    a, b, bias = normal(2, 3, 32, dtype=dtype), normal(2, 32, 8, dtype=dtype), normal(8, dtype=dtype)
    start = normal(2, 3, 8)
    want = eager.gemm(a, b, bias=bias, out=start.copy(), accumulate=True, arithmetic=arithmetic)
    y, pull = jax.vjp(lambda s: pj.gemm(a, b, bias, accumulate=s, arithmetic=arithmetic), jnp.asarray(start))
    same(y, want)
    same(pull(y)[0], want)  # the gradient of what is continued from is that of the result
    x, w, start = normal(2, 3, 32, dtype=dtype), normal(8, 32, dtype=dtype), normal(2, 3, 8)
    want = eager.skinny_gemm(x, w, out=start.copy(), accumulate=True, arithmetic=arithmetic)
    same(pj.skinny_gemm(x, w, accumulate=start, arithmetic=arithmetic), want)


def test_micro_batches_in_a_scan(eager, dtype, arithmetic):
    """Gradients of weights summed in a scan's carry, in place, have the bits of one batch."""
    parts, rows = 4, pj.DWEIGHT_ROWS
    x, dy = normal(parts * rows, 32, dtype=dtype), normal(parts * rows, 24, dtype=dtype)
    dh, weight = normal(parts * rows, 32, dtype=dtype, seed=1), normal(32)
    _, rstd = eager.rmsnorm(x, weight, eps=1e-5)
    whole = eager.gemm_db(x, dy, out_dtype="float32", arithmetic=arithmetic)
    _, dweight = eager.rmsnorm_backward(dh, x, weight, rstd)

    def step(carry, part):
        x, dy, dh, rstd = part
        dw = pj.gemm_db(x, dy, accumulate=carry[0], arithmetic=arithmetic)
        dx, dweight = pj.rmsnorm_backward(dh, x, weight, rstd, accumulate=carry[1])
        return (dw, dweight), dx

    micro = [array.reshape(parts, rows, *array.shape[1:]) for array in (x, dy, dh, rstd)]
    start = jnp.zeros((32, 24), jnp.float32), jnp.zeros(32, jnp.float32)
    scan = jax.jit(lambda start, *micro: jax.lax.scan(step, start, micro))
    (found, found_dweight), _ = scan(start, *micro)
    same(found, whole), same(found_dweight, dweight)
    alone = (pydet.gemm_db(*xy, out_dtype="float32", arithmetic=arithmetic) for xy in zip(*micro[:2], strict=True))
    naive = sum(alone)
    assert (naive != whole).any()  # what continuing is for


def test_norm_continues_under_vmap(eager, dtype):
    dy, x = normal(2, 6, 32, dtype=dtype), normal(2, 6, 32, dtype=dtype, seed=1)
    weight, start = normal(32, dtype=dtype), normal(32, seed=2)
    rstd = np.stack([eager.rmsnorm(y, weight, eps=1e-5)[1] for y in x])
    function = lambda dy, x, rstd: pj.rmsnorm_backward(dy, x, weight, rstd, accumulate=start)
    each = [
        eager.rmsnorm_backward(dy[i], x[i], weight, rstd[i], dweight=start.copy(), accumulate=True) for i in range(2)
    ]
    all_same(jax.vmap(function)(dy, x, rstd), [np.stack(y) for y in zip(*each, strict=True)])


def test_empty(device):
    same(pj.gemm(np.zeros((0, 4), np.float32), np.zeros((4, 3), np.float32)), np.zeros((0, 3), np.float32))
    same(pj.gemm(np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)), np.zeros((2, 3), np.float32))
    same(pj.linear(np.zeros((2, 0), np.float32), np.zeros((3, 0), np.float32)), np.zeros((2, 3), np.float32))
    same(
        pj.gemm(np.zeros((0, 4), np.float32), np.zeros((4, 3), np.float32), accumulate=np.zeros((0, 3), np.float32)),
        np.zeros((0, 3), np.float32),
    )
    start = normal(2, 3)
    same(pj.gemm(np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32), accumulate=start), start)
    same(pj.rms_norm(np.zeros((0, 4), np.float32), eps=1e-5), np.zeros((0, 4), np.float32))


# ---- Options ---------------------------------------------------------------------------------------------------------


def test_kernels_by_name(device, dtype, arithmetic):
    """Every kernel that the device can run, forced: the same bits, or the library says what it does not take."""
    a, b, x = normal(8, 64, dtype=dtype), normal(64, 32, dtype=dtype), normal(8, 64, dtype=dtype)
    w, weight = np.ascontiguousarray(b.T), normal(64)
    want = pydet.gemm(a, b, arithmetic=arithmetic)
    y, rstd = pydet.rmsnorm(x, weight, eps=1e-5)
    dx, dweight = pydet.rmsnorm_backward(a, x, weight, rstd)
    calls = {
        "gemm": [
            (lambda k: (pj.gemm(a, b, arithmetic=arithmetic, kernel=k),), (want,)),
            (lambda k: (pj.skinny_gemm(a, w, arithmetic=arithmetic, kernel=k),), (want,)),
        ],
        "rmsnorm": [(lambda k: pj.rmsnorm(x, weight, eps=1e-5, kernel=k), (y, rstd))],
        "rmsnorm_backward": [(lambda k: pj.rmsnorm_backward(a, x, weight, rstd, kernel=k), (dx, dweight))],
    }
    short, ran = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype.name], set()
    for kernel in pydet.kernels():
        fits = kernel.device == device and kernel.available and short in kernel.dtypes.split()
        if not fits or (kernel.operation == "gemm" and kernel.arithmetic != arithmetic):
            continue
        for call, expected in calls.get(kernel.operation, ()):  # those that pydet.jax has
            try:
                found = call(kernel.name)
                jax.block_until_ready(found)
            except Exception as problem:
                assert kernel.name in str(problem), problem
                continue
            all_same(found, expected)
            ran.add(kernel.operation)
    assert ran == set(calls)


def test_options_reach_the_library(dtype, arithmetic):
    """What decides no bits is seen in what XLA hands over, and in what the library refuses."""
    x, w = normal(3, 32, dtype=dtype), normal(16, 32, dtype=dtype)
    options = {"arithmetic": arithmetic, "mode": "fast", "weights_constant": True, "k_chunk": np.int64(16)}
    text = jax.jit(lambda x, w: pj.skinny_gemm(x, w, **options)).lower(x, w).as_text()
    for attribute in ("mode = 1 : i64", "weights_constant = 1 : i64", "skinny = 1 : i64", "k_chunk = 16 : i64"):
        assert attribute in text, text
    same(pj.skinny_gemm(x, w, **options), pydet.skinny_gemm(x, w, **options))
    calls = {
        "gemm": lambda kernel: pj.gemm(x, w.T, kernel=kernel),
        "skinny_gemm": lambda kernel: pj.skinny_gemm(x, w, kernel=kernel),
        "rmsnorm": lambda kernel: pj.rms_norm(x, eps=1e-5, kernel=kernel),
        "rmsnorm_backward": lambda kernel: pj.rmsnorm_backward(x, x, None, normal(3), kernel=kernel),
    }
    for op, call in calls.items():
        for name in ("no_such_kernel", 70 * "x"):
            with pytest.raises(Exception, match=f"(?s){op}: .*no_such_kernel|kernel is longer than any name"):
                jax.block_until_ready(call(name))


def test_integers_and_numbers_of_any_kind():
    a, b = normal(3, 64), normal(64, 5)
    for chunk in (32, np.int64(32), np.uint8(32), np.array(32), jnp.int32(32)):
        same(pj.gemm(a, b, k_chunk=chunk), pydet.gemm(a, b, k_chunk=32))
    for chunk in (np.int64(32), np.uint8(32), np.array(32)):
        same(pydet.gemm(a, b, k_chunk=chunk), pydet.gemm(a, b, k_chunk=32))
    for eps in (np.float32(0.5), np.float64(0.5), jnp.float32(0.5), np.array(0.5)):
        same(pj.rms_norm(a, eps=eps, weight_offset=np.float32(1)), pydet.rmsnorm(a, eps=0.5, weight_offset=1.0)[0])
    same(pj.rms_norm(a, eps=1), pydet.rmsnorm(a, eps=1)[0])


def test_no_kernel_wants_a_workspace():
    """pydet.jax passes none to a product. Were one to want it without k_chunk, it would have to be a result of the
    call. On an H100 large products have tiles that do; those without take as long to a percent."""
    for index in (0, 2):
        library, _ = _native.try_load(index)
        if library is not None:
            size = _native.ffi.new("uint64_t *")
            for shape in ((1, 1, 4096, 65536), (4, 64, 64, 1 << 20), (1, 8192, 8192, 8192)):
                library.check(library.lib.pydet_gemm_workspace(*shape, _native.ffi.NULL, size))
                assert size[0] == 0
                library.check(library.lib.pydet_skinny_gemm_workspace(*shape[1:], _native.ffi.NULL, size))
                assert size[0] == 0


# ---- Bad input -------------------------------------------------------------------------------------------------------


def refuses(pattern, call, *arguments, **options):
    with pytest.raises(pydet.Error, match=pattern):
        call(*arguments, **options)


def test_bad_input():
    a, b = normal(3, 4), normal(4, 5)
    refuses(r"^gemm: b is 3x5, want 4xN$", pj.gemm, a, normal(3, 5))
    refuses(r"a has 1 dimensions, want 2 to 8", pj.gemm, a[0], b)
    refuses(
        r"b has leading dimensions 3, want some that broadcast with those of a, 2",
        pj.gemm,
        normal(2, 3, 4),
        normal(3, 4, 5),
    )
    refuses(r"b is bfloat16, want float32", pj.gemm, a, b.astype(jnp.bfloat16))
    refuses(r"a is int32", pj.gemm, a.astype(np.int32), b.astype(np.int32))
    refuses(r"a is float64, want float32", pj.gemm, a.astype(np.float64), b)
    refuses(r"a is list, want an array of JAX or NumPy", pj.gemm, [[1.0]], b)
    refuses(r"b is None", pj.gemm, a, None)
    refuses(r"a is complex64, want float32", pj.gemm, a.astype(np.complex64), b)
    refuses(r"a is key<fry>, want float32", pj.gemm, jax.random.key(0), b)
    refuses(r"a is jax.ShapeDtypeStruct, want an array", pj.gemm, jax.ShapeDtypeStruct((3, 4), "float32"), b)
    refuses(r"a is jax.BCOO, want an array", pj.gemm, sparse.BCOO.fromdense(a), b)
    refuses(r"a is a masked array", pj.gemm, np.ma.masked_less(a, 0), b)
    refuses(r"gemm: a has 0 dimensions", pj.gemm, np.float32(1), b)
    refuses(r"bias is 4, want 5 or 3x5", pj.gemm, a, b, normal(4))
    refuses(r"arithmetic is 'sm91'", pj.gemm, a, b, arithmetic="sm91")
    refuses(r"k_chunk is -16", pj.gemm, a, b, k_chunk=-16)
    refuses(r"k_chunk is 8", pj.gemm, a, b, k_chunk=8)
    refuses(r"k_chunk is True", pj.gemm, a, b, k_chunk=True)
    refuses(r"k_chunk is 16.0, want None or an integer", pj.gemm, a, b, k_chunk=16.0)
    refuses(r"k_chunk is 18446744073709551616", pj.gemm, a, b, k_chunk=1 << 64)
    refuses(r"kernel is 3, want None or the name", pj.gemm, a, b, kernel=3)
    refuses(r"mode is 'quick'", pj.skinny_gemm, a, normal(5, 4), mode="quick")
    refuses(r"weights_constant is 1, want True or False", pj.skinny_gemm, a, normal(5, 4), weights_constant=1)
    refuses(r"accumulate is True, want None or the float32 array", pj.gemm, a, b, accumulate=True)
    refuses(r"accumulate is 5x3, want 3x5", pj.gemm, a, b, accumulate=normal(5, 3))
    refuses(r"accumulate is float16, .* want float32", pj.gemm, a, b, accumulate=normal(3, 5, dtype=np.float16))
    refuses(r"the result float16, want float32", pj.gemm, a, b, accumulate=normal(3, 5), out_dtype="float16")
    refuses(r"gemm: out_dtype is 'int8'", pj.gemm, a, b, out_dtype="int8")
    refuses(r"k_chunk is traced", jax.jit(lambda k: pj.gemm(a, b, k_chunk=k)), 16)
    refuses(r"eps is traced", jax.jit(lambda e: pj.rms_norm(a, eps=e)), 1e-5)
    refuses(r"eps is -1", pj.rms_norm, a, eps=-1.0)
    refuses(r"eps is '1', want a number", pj.rms_norm, a, eps="1")
    refuses(r"eps is nan", pj.rms_norm, a, eps=float("nan"))
    refuses(r"rstd is 4, want 3", pj.rmsnorm_backward, a, a, None, normal(4))
    refuses(r"dy is 4x5, want 3x4", pj.rmsnorm_backward, b, a, None, normal(3))
    refuses(r"weight is None, so there is no dweight", pj.rmsnorm_backward, a, a, None, normal(3), accumulate=normal(4))
    refuses(r"weight is 3, want 4", pj.rms_norm, a, normal(3), eps=1e-5)
    refuses(r"residual is 4x5, want 3x4", pj.rms_norm, a, eps=1e-5, residual=b)
    refuses(r"linear: w is 4x5, want Nx4", pj.linear, a, b)
    refuses(r"bias is 5, want 4", pj.linear, a, normal(4, 4), normal(5))
    batched = lambda a, b: pj.gemm(a, b).sum()
    same(pj.gemm(a, b, normal(1, 5)), pydet.gemm(a, b, bias=normal(1, 5)))
    spread = lambda bias: pj.gemm(a, b, bias).sum()
    refuses(r"no gradient where a bias of shape 1x5 broadcasts to 3x5", jax.grad(spread), normal(1, 5))
    refuses(r"no gradient where batch dimensions broadcast", jax.grad(batched), normal(2, 3, 4), normal(1, 4, 5))
    same(pj.gemm(normal(2, 3, 4), normal(1, 4, 5)), pydet.gemm(normal(2, 3, 4), normal(1, 4, 5)))


def test_what_has_no_gradient_says_so():
    x, weight, rstd = normal(3, 4), normal(4), normal(3)
    refuses(r"rmsnorm: no derivative; rms_norm has", jax.grad(lambda x: pj.rmsnorm(x, eps=1e-5)[0].sum()), x)
    backward = lambda x: pj.rmsnorm_backward(x, x, weight, rstd)[0].sum()
    refuses(r"rmsnorm_backward: no derivative of this gradient", jax.grad(backward), x)
    gradient = jax.grad(lambda x: pj.rms_norm(x, weight, eps=1e-5).sum())
    second = r"rmsnorm_backward: no derivative of this gradient; rms_norm has first gradients"
    refuses(second, jax.grad(lambda x: gradient(x).sum()), x)
    for function in (pj.gemm_db, lambda x, y: pj.rms_norm(x, eps=1e-5), lambda x, y: pj.linear(x, y)):
        with pytest.raises((pydet.Error, TypeError), match=r"(no|can't apply) forward-mode|rmsnorm: no derivative"):
            jax.jvp(function, (x, x), (x, x))


def test_more_batches_than_there_are():
    """Nested vmap makes more leading dimensions than the library takes."""
    function = lambda a: pj.gemm(a, normal(4, 5))
    for _ in range(6):
        function = jax.vmap(function)
    a = normal(1, 1, 2, 1, 1, 2, 3, 4)
    same(function(a), pydet.gemm(a, normal(4, 5)))
    with pytest.raises(Exception, match="gemm: want matrices, with at most 6 leading dimensions"):
        jax.block_until_ready(jax.vmap(function)(a[None]))


def in_another_process(source, **environment):
    if "XLA_FLAGS" in environment:  # beside those that this process has
        environment["XLA_FLAGS"] += " " + os.environ.get("XLA_FLAGS", "")
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_devices_that_differ():
    """Arrays on two devices are refused in JAX's words; sharded rows have the bits of the whole, in shard_map too."""
    source = """
        import jax, numpy as np, pydet, pydet.jax as pj
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        random = np.random.default_rng(0)
        a, b = (random.standard_normal(s, np.float32) for s in ((6, 32), (32, 8)))
        first, second = jax.devices("cpu")
        try:
            pj.gemm(jax.device_put(a, first), jax.device_put(b, second))
        except ValueError as problem:
            assert "incompatible devices" in str(problem), problem
        else:
            raise AssertionError("not refused")
        here = pj.gemm(jax.device_put(a, second), jax.device_put(b, second))
        assert here.devices() == {second} and np.asarray(here).tobytes() == pydet.gemm(a, b).tobytes()
        rows = NamedSharding(Mesh(np.array([first, second]), "rows"), P("rows"))
        c = jax.jit(pj.gemm)(jax.device_put(a, rows), b)
        assert np.asarray(c).tobytes() == pydet.gemm(a, b).tobytes()
        mesh, specs = rows.mesh, {"in_specs": (P("rows"), P()), "out_specs": P("rows")}
        each = jax.shard_map(pj.gemm, mesh=mesh, check_vma=False, **specs)
        c, pull = jax.vjp(jax.jit(each), a, b)
        assert np.asarray(c).tobytes() == pydet.gemm(a, b).tobytes()
        da, db = pull(c)
        assert np.asarray(da).tobytes() == pydet.gemm_da(np.asarray(c), b).tobytes()
        halves = [pydet.gemm_db(a[i : i + 3], np.asarray(c)[i : i + 3]) for i in (0, 3)]
        assert np.asarray(db).tobytes() == (halves[0] + halves[1]).tobytes()
    """
    in_another_process(source, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")


def test_sums_over_devices():
    """On 1, 2, 4 and 8 devices the bits of one, of results and gradients; those of psum differ on 4."""
    source = """
        import jax, jax.numpy as jnp, numpy as np, pydet
        from jax.sharding import Mesh, PartitionSpec as P
        from pydet.jax_distributed import ordered_sum, row_parallel_linear
        random = np.random.default_rng(0)
        for dtype, arithmetic in ((jnp.float32, "ieee"), (jnp.bfloat16, "sm90")):
            shapes = ((5, 2048), (37, 2048), (5, 37))
            x, w, dy = (jnp.asarray(random.standard_normal(s, np.float32)).astype(dtype) for s in shapes)
            parts = jnp.asarray(random.standard_normal((8, 1001), np.float32)).at[3, 5].set(jnp.nan).at[:, 7].set(1e-40)
            one = pydet.gemm(*map(np.asarray, (x, w.T)), k_chunk=256, arithmetic=arithmetic)
            sums = pydet.fold(np.asarray(parts), out_dtype=np.asarray(x).dtype)
            first, bits = None, lambda *arrays: [np.asarray(a).tobytes() for a in arrays]
            for world in (1, 2, 4, 8) if arithmetic == "sm90" else (1, 4):
                mesh, cut = Mesh(np.array(jax.devices()[:world]), ("t",)), P(None, "t")

                def step(x, w, dy, parts):
                    linear = lambda x, w: row_parallel_linear(x, w, "t", segments=8, arithmetic=arithmetic)
                    y, pull = jax.vjp(linear, x, w)
                    total, pull_parts = jax.vjp(lambda p: ordered_sum(p, "t", out_dtype=dtype), parts)
                    plain = jax.lax.psum(parts.sum(0), "t")
                    return y, *pull(dy), total, *pull_parts(total), plain

                specs = {"in_specs": (cut, cut, P(), P("t")), "out_specs": (P(), cut, cut, P(), P("t"), P())}
                run = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))
                y, dx, dw, total, dparts, plain = run(x, w, dy, parts)
                assert bits(y, total) == bits(one, sums), (world, dtype)
                first = first or bits(dx, dw, dparts)
                assert bits(dx, dw, dparts) == first, (world, dtype)
                if world == 4:  # of 8 devices with a part each, XLA on the CPU happens to add in their order
                    assert np.count_nonzero(np.asarray(plain) != pydet.fold(np.asarray(parts))) > 100
        mesh = Mesh(np.array(jax.devices()[:4]), ("t",))
        for call, words in (
            (lambda x: row_parallel_linear(x, x, "t", segments=6), "segments is 6, want a multiple of the 4 devices"),
            (lambda x: ordered_sum(x.astype(jnp.float16), "t"), "ordered_sum: float16 to float32, want float32"),
        ):
            try:
                jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(jnp.ones((4, 64)))
            except pydet.Error as problem:
                assert words in str(problem), problem
            else:
                raise AssertionError("not refused")
    """
    in_another_process(source, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu")


def test_arrays_on_a_gpu():
    """pydet's own functions cannot order their work behind JAX's there, and say who can."""
    found = [device for device in jax.devices() if device.platform == "gpu"]
    if not found:
        pytest.skip("JAX has no GPU here")
    here = jax.devices("cpu")[0]
    a, b = jax.device_put(normal(3, 4), found[0]), jax.device_put(normal(4, 5), found[0])
    refuses(r"gemm: a is a jax array on a GPU, whose stream jax does not tell; use pydet.jax", pydet.gemm, a, b)
    with pytest.raises(ValueError, match="incompatible devices"):
        pj.gemm(jax.device_put(a, here), b)
    same(pj.gemm(a, b), pj.gemm(*(jax.device_put(x, here) for x in (a, b))))


def test_a_platform_without_handlers(monkeypatch):
    monkeypatch.setattr("pydet.jax.calls._programs", {})  # a program that was checked once is not checked anew
    monkeypatch.setattr("pydet.jax.calls._served", set())
    refuses(r"gemm: a is on .*, which pydet.jax does not serve here", pj.gemm, jnp.ones((3, 4)), jnp.ones((4, 5)))


def test_what_the_library_refuses_has_its_sentence():
    """The tensor cores' arithmetics take no float32, which only the library knows."""
    with pytest.raises(Exception, match=r"gemm: .*sm90"):
        jax.block_until_ready(pj.gemm(normal(3, 4), normal(4, 5), arithmetic="sm90"))


# ---- Groups ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def grouped(device):
    kernels = [k for k in pydet.kernels() if k.operation == "grouped_gemm" and k.device == device and k.available]
    if not {"ieee", "sm90"} <= {kernel.arithmetic for kernel in kernels}:
        pytest.skip(f"no kernel of grouped_gemm on {device} here")


def by_group(eager, a, b, sizes, **options):
    """ragged_dot by a gemm for each group."""
    out, first = np.zeros((a.shape[0], b.shape[2]), options.pop("dtype", a.dtype)), 0
    for matrix, size in zip(b, sizes, strict=True):
        last = min(first + size, a.shape[0])
        out[first:last] = eager.gemm(a[first:last], matrix, out_dtype=out.dtype.name, **options)
        first = last
    return out


def test_ragged_dot_and_its_gradients(grouped, eager, dtype, arithmetic):
    a, b, dc = normal(33, 24, dtype=dtype), normal(4, 24, 20, dtype=dtype), normal(33, 20, dtype=dtype, seed=1)
    options = {"arithmetic": arithmetic, "k_chunk": 16}
    both = jax.jit(lambda a, b, sizes, dc: vjp(lambda a, b: pj.ragged_dot(a, b, sizes, **options), (a, b), dc))
    for sizes in ([3, 0, 17, 13], [0, 0, 0, 0], [0, 33, 0, 0], [1, 1, 15, 9], [20, 20, 20, 20]):
        there = np.array(sizes, np.int32)
        want = by_group(eager, a, b, sizes, **options)
        got, (da, db) = both(a, b, there, dc)
        same(got, want)
        same(da, by_group(eager, dc, np.ascontiguousarray(b.swapaxes(1, 2)), sizes, **options))
        ends = np.minimum(np.cumsum([0, *sizes]), 33)
        for g in range(4):
            rows = slice(ends[g], ends[g + 1])
            same(db[g], eager.gemm_db(a[rows], dc[rows], **options))
    wide = pj.ragged_dot(a, b, there, out_dtype="float32", arithmetic=arithmetic)
    same(wide, by_group(eager, a, b, sizes, dtype=np.dtype(np.float32), arithmetic=arithmetic))


def test_ragged_dot_in_transforms(grouped, eager):
    """Sizes that are traced; batches; second gradients, since backward is made of the same products."""
    a, b = normal(3, 33, 24), normal(4, 24, 20)
    sizes = np.array([[3, 0, 17, 13], [33, 0, 0, 0], [1, 2, 3, 4]], np.int32)
    want = [by_group(eager, x, b, s, arithmetic="ieee") for x, s in zip(a, sizes, strict=True)]
    all_same(jax.jit(jax.vmap(pj.ragged_dot, in_axes=(0, None, 0)))(a, b, sizes), want)
    all_same(jax.lax.map(lambda x: pj.ragged_dot(x[0], b, x[1]), (a, sizes)), want)
    ours, theirs = (
        in_fp32(jax.jit(jax.grad(lambda a, f=f: jax.grad(lambda x: (f(x, b, sizes[0]) ** 2).sum())(a).sum())))(a[0])
        for f in (pj.ragged_dot, jax.lax.ragged_dot)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_ragged_dot_refuses():
    a, b, sizes = normal(9, 16), normal(3, 16, 5), np.array([1, 5, 3], np.int32)
    for arguments, pattern in (
        ((a[0], b, sizes), r"lhs is 16, want TxK"),
        ((a, b[0], sizes), r"rhs is 16x5, want GxKxN"),
        ((a[:, 1:], b, sizes), r"rhs is 3x16x5, want Gx15xN"),
        ((a, b.astype(np.float16), sizes), r"rhs is float16, want float32 as lhs"),
        ((a, b, sizes.astype(np.int16)), r"group_sizes is int16, want an int32 array"),
        ((a, b, [1, 5, 3]), r"group_sizes is list, want an int32 array"),
        ((a, b, sizes[:2]), r"group_sizes is 2, want 3"),
    ):
        with pytest.raises(pydet.Error, match=f"^ragged_dot: {pattern}"):
            pj.ragged_dot(*arguments)
    with pytest.raises(pydet.Error, match="ragged_dot: arithmetic is 'sm91'"):
        pj.ragged_dot(a, b, sizes, arithmetic="sm91")
    with pytest.raises((pydet.Error, TypeError), match="forward-mode"):
        jax.jvp(lambda a: pj.ragged_dot(a, b, sizes), (a,), (a,))


# ---- Graphs of commands ----------------------------------------------------------------------------------------------

COUNTED = """
    import ctypes, os, jax, jax.numpy as jnp, numpy as np, pydet, pydet.jax as pj
    from pydet import _native
    platform = os.environ["PLATFORM"]
    if not any(device.platform == platform for device in jax.devices()):
        raise SystemExit(f"no {platform}")
    index = {"cpu": _native.constants.PYDET_EXCHANGE_CPU, "gpu": _native.constants.PYDET_EXCHANGE_CUDA}[platform]
    library = ctypes.CDLL(str(_native.load(index).path))
    executed, captured, kept = {}, {}, []

    class StreamArguments(ctypes.Structure):
        names = ("struct_size", "extensions", "context", "stream")
        _fields_ = [(name, ctypes.c_void_p) for name in names]

    def is_capturing(call):  # whether the stream of a call is being captured, as the driver says
        if platform == "cpu":
            return False
        api, context = (ctypes.c_void_p.from_address(call + offset).value for offset in (16, 24))
        arguments = StreamArguments(ctypes.sizeof(StreamArguments), None, context, None)
        get_stream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(ctypes.c_void_p.from_address(api + 80).value)
        assert not get_stream(ctypes.addressof(arguments))
        status = ctypes.c_int(-1)
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuStreamIsCapturing(ctypes.c_void_p(arguments.stream), ctypes.byref(status)) == 0
        return status.value == 1

    class Handler(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("cpu", ctypes.c_void_p), ("gpu", ctypes.c_void_p)]

    library.pydet_xla_handlers.restype = ctypes.POINTER(Handler)
    handlers = {}
    for row in library.pydet_xla_handlers():
        if not row.name:
            break
        address = getattr(row, platform)
        handlers[row.name.decode()] = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)

    def count(target):
        handler = handlers[target]

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def counted(call):
            extensions, stage = ctypes.c_void_p.from_address(call + 8), ctypes.c_int32.from_address(call + 32)
            if not extensions.value and stage.value == 3:  # to execute, not to be asked what it is
                executed[target] = executed.get(target, 0) + 1
                captured[target] = captured.get(target, 0) + is_capturing(call)
            return handler(call)

        kept.append(counted)
        name = {"cpu": "cpu", "gpu": "CUDA"}[platform]
        jax.ffi.register_ffi_target(f"counted_{target}", jax.ffi.pycapsule(counted), platform=name)

    targets = ("gemm", "rmsnorm", "rmsnorm_backward")
    for target in targets:
        count(target)
    real = jax.ffi.ffi_call
    jax.ffi.ffi_call = lambda name, *rest, **more: real(name.replace("pydet_", "counted_"), *rest, **more)

    half = np.dtype(jnp.bfloat16)
    random = np.random.default_rng(0)
    w, weight = random.standard_normal((32, 64), np.float32).astype(half), random.standard_normal(64, np.float32)

    @jax.jit
    def step(x, w, weight, start):
        def loss(w, weight):
            h = pj.rms_norm(x, weight, eps=1e-5)
            return pj.gemm(pj.linear(h, w, arithmetic="sm90"), w, arithmetic="sm90")
        y, pull = jax.vjp(loss, w, weight)
        return (y, *pull(y), pj.gemm_db(x, y, accumulate=start, arithmetic="sm90"))

    def by_hand(x, start):
        chosen = {"arithmetic": "sm90"}
        h, rstd = pydet.rmsnorm(x, weight, eps=1e-5)
        z = pydet.skinny_gemm(h, w, **chosen)
        y = pydet.gemm(z, w, **chosen)
        dz = pydet.gemm_da(y, w, **chosen)
        dw = np.ascontiguousarray(pydet.gemm_db(h, dz, **chosen).T)
        _, dweight = pydet.rmsnorm_backward(pydet.gemm(dz, w, **chosen), x, weight, rstd)
        total = pydet.gemm_db(x, y, out=start.copy(), accumulate=True, **chosen)
        return y, pydet.gemm_db(z, y, **chosen), dw, dweight, total

    RUNS = 8
    for i in range(RUNS):
        if i % 4 == 0:  # the same memory holds other numbers
            x = random.standard_normal((16, 64), np.float32).astype(half)
            start = random.standard_normal((64, 64), np.float32)
            there = jax.device_put((x, w, weight, start))
        y, dw, dweight, total = step(*there)
        want = by_hand(x, start)
        both = (want[1].astype(np.float32) + want[2].astype(np.float32)).astype(half)  # two uses of w, added by JAX
        for got, expected in zip((y, dw, dweight, total), (want[0], both, *want[3:]), strict=True):
            assert np.asarray(got).tobytes() == expected.tobytes(), i
        del got, y, dw, dweight, total
    print(RUNS, *([calls[target] for target in targets] for calls in (executed, captured)))
"""


def executions(platform, **environment):
    """(runs of a program, how often each of its handlers was called, how often while a stream was being captured)."""
    words = in_another_process(COUNTED, PLATFORM=platform, **environment).split(maxsplit=1)
    executed, captured = (map(int, calls.split(", ")) for calls in re.findall(r"\[(.*?)\]", words[1]))
    targets = ("gemm", "rmsnorm", "rmsnorm_backward")
    return int(words[0]), dict(zip(targets, executed, strict=True)), dict(zip(targets, captured, strict=True))


def test_handlers_are_called_once_a_run():
    runs, executed, captured = executions("cpu", JAX_PLATFORMS="cpu")
    assert executed == {"gemm": 7 * runs, "rmsnorm": runs, "rmsnorm_backward": runs}
    assert not any(captured.values())


def test_cuda_graphs():
    """XLA captures the calls into CUDA graphs, and replays have the bits of the plain calls."""
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX has no GPU here")
    runs, executed, captured = executions("gpu", XLA_FLAGS="--xla_gpu_enable_command_buffer=")
    assert executed == {"gemm": 7 * runs, "rmsnorm": runs, "rmsnorm_backward": runs}
    assert not any(captured.values())
    graphs = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    _, fewer, captured = executions("gpu", XLA_FLAGS=graphs)
    assert all(captured.values()), "captured"
    assert all(fewer[target] < executed[target] for target in executed), "and replayed"


@pytest.mark.parametrize("graphs", (False, True))
def test_operands_that_are_copied_on_a_gpu(graphs):
    """Rows that begin between units of 16 bytes: the copies have room in the program, and the bits are the CPU's, again
    and again, in graphs of commands too."""
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX has no GPU here")
    source = """
        import jax, ml_dtypes, numpy as np, pydet, pydet.jax as pj
        random = np.random.default_rng(0)
        draw = lambda *shape: (random.standard_normal(shape, np.float32) / 8).astype(ml_dtypes.bfloat16)
        layers = [draw(1156, 1156) for _ in range(4)]

        def forward(x, *layers):
            for w in layers:
                x = pj.linear(x, w, arithmetic="sm90")
            return x

        x = draw(503, 1156)
        made = jax.jit(forward).lower(x, *layers).compile()
        hopper = getattr(jax.devices()[0], "compute_capability", "") == "9.0"
        assert not hopper or made.as_text().count("u8[") >= 4, made.as_text()
        for _ in range(2):
            x = want = draw(503, 1156)
            for w in layers:
                want = pydet.skinny_gemm(want, w, arithmetic="sm90")
            for _ in range(3):
                assert np.asarray(made(x, *layers)).tobytes() == want.tobytes()
    """
    flags = "FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1" if graphs else ""
    in_another_process(source, XLA_FLAGS=f"--xla_gpu_enable_command_buffer={flags}")


# ---- The interface ---------------------------------------------------------------------------------------------------

STRUCTURES = {
    "extension": ("Extension_Base", {"struct_size": "struct_size", "type": "type", "next": "next"}),
    "version": ("Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "metadata": ("Metadata", {"version": "api_version", "traits": "traits"}),
    "metadata_extension": ("Metadata_Extension", {"base": "extension_base", "metadata": "metadata"}),
    "buffer": ("Buffer", {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
    "list": ("Args", {"size": "size", "types": "types", "items": "args"}),
    "name": ("ByteSpan", {"text": "ptr", "length": "len"}),
    "scalar": ("Scalar", {"dtype": "dtype", "value": "value"}),
    "attributes": ("Attrs", {"size": "size", "types": "types", "names": "names", "items": "attrs"}),
    "error_arguments": ("Error_Create_Args", {"message": "message", "code": "errc"}),
    "stream_arguments": ("Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
    "ordinal_arguments": ("DeviceOrdinal_Get_Args", {"context": "ctx", "ordinal": "device_ordinal"}),
    "api": (
        "Api",
        {
            "version": "api_version",
            "internal": "internal_api",
            "make_error": "XLA_FFI_Error_Create",
            "get_stream": "XLA_FFI_Stream_Get",
            "get_ordinal": "XLA_FFI_DeviceOrdinal_Get",
        },
    ),
    "call": (
        "CallFrame",
        {
            **{"api": "api", "context": "ctx", "stage": "stage"},
            **{"arguments": "args", "results": "rets", "attributes": "attrs"},
        },
    ),
}
NUMBERS = {
    "METADATA": "Extension_Metadata",
    **{name: f"DataType_{name}" for name in ("PRED", "F16", "F32", "BF16", "S32", "S64", "F64", "U8")},
    "SCALAR": "AttrType_SCALAR",
    "STRING": "AttrType_STRING",
    "INVALID_ARGUMENT": "Error_Code_INVALID_ARGUMENT",
    "INTERNAL": "Error_Code_INTERNAL",
    "EXECUTE": "ExecutionStage_EXECUTE",
}


def interface_checks():
    """C++ that compiles only if our structures lie as those of JAX's header."""
    lines = ["#include <cstddef>", '#include "xla/ffi/api/c_api.h"', '#include "entry/xla_ffi.h"']
    lines += ["#if XLA_FFI_API_MINOR >= 4", "using XLA_FFI_Extension_Base = XLA_FFI_InternalExtension;", "#endif"]
    for ours, (theirs, members) in STRUCTURES.items():
        for mine, other in members.items():
            where = f"offsetof(pydet_xla_{ours}, {mine}) == offsetof(XLA_FFI_{theirs}, {other})"
            size = f"sizeof(pydet_xla_{ours}::{mine}) == sizeof(XLA_FFI_{theirs}::{other})"
            lines += [f'static_assert({where} && {size}, "{ours}.{mine}");']
    lines += [f'static_assert(int(PYDET_XLA_{a}) == int(XLA_FFI_{b}), "{a}");' for a, b in NUMBERS.items()]
    return "\n".join(lines) + "\nstatic_assert(XLA_FFI_API_MAJOR == 0);\n"


def compiles(source, tmp_path):
    file = tmp_path / "layout.cpp"
    file.write_text(source)
    include = ["-I", jax.ffi.include_dir(), "-I", ROOT / "native"]
    return subprocess.run(["c++", "-std=c++17", "-fsyntax-only", *include, file], capture_output=True, text=True)


def test_layout_of_the_interface(tmp_path):
    done = compiles(interface_checks(), tmp_path)
    assert done.returncode == 0, done.stderr
    text = (ROOT / "native/entry/xla_ffi.h").read_text()
    declared = set(re.findall(r"^typedef struct pydet_xla_(\w+) {", text, re.M))
    assert declared == {*STRUCTURES, "handler"}  # that one is ours


def test_layout_check_can_fail(tmp_path):
    wrong = interface_checks().replace("offsetof(pydet_xla_buffer, rank)", "offsetof(pydet_xla_buffer, dims)")
    assert compiles(wrong, tmp_path).returncode != 0


def test_importing_pydet_does_not_import_jax():
    subprocess.run([sys.executable, "-c", "import sys, pydet; assert 'jax' not in sys.modules"], check=True)


def test_without_jax():
    source = "import sys; sys.modules['jax'] = None; import pydet.jax"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode != 0 and "pydet.jax wants JAX, which is not installed: pip install jax" in done.stderr
