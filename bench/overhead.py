"""What a call costs before any work is done: 4 x 4 x 4 in fp32, always the same arrays."""

from functools import partial

import numpy as np

import pydet
from bench.gemm import normal
from bench.harness import Row, Variant

try:
    import torch

    import pydet.torch
except ImportError:
    torch = None
try:
    import jax
    import jax.numpy as jnp

    import pydet.jax
except ImportError:
    jax = None


def numpy_arrays(with_out):
    a, b, ours, theirs = (normal(seed, (4, 4)) for seed in range(4))
    if with_out:
        variants = [
            Variant("pydet", [lambda: pydet.gemm(a, b, out=ours)], [ours]),
            Variant("numpy", [lambda: np.matmul(a, b, out=theirs)]),
        ]
    else:
        variants = [Variant("pydet", [lambda: pydet.gemm(a, b)]), Variant("numpy", [lambda: np.matmul(a, b)])]
    return Row("call", f"NumPy arrays{', out=' * with_out}", "fp32", variants, peer="numpy")


def torch_tensors(with_out):
    a, b, ours, theirs = (torch.from_numpy(normal(seed, (4, 4))) for seed in range(4))
    if with_out:
        variants = [
            Variant("pydet", [lambda: pydet.gemm(a, b, out=ours)], [ours.numpy()]),
            Variant("torch.mm", [lambda: torch.mm(a, b, out=theirs)]),
        ]
    else:
        variants = [
            Variant("pydet", [lambda: pydet.gemm(a, b)]),
            Variant("torch.ops.pydet", [lambda: torch.ops.pydet.gemm(a, b)]),
            Variant("torch.mm", [lambda: torch.mm(a, b)]),
        ]
    return Row("call", f"torch tensors{', out=' * with_out}", "fp32", variants, peer="torch.mm")


def jax_arrays():
    """Each of pydet.jax's functions beside what JAX has of that name, or one program of its own."""
    x, w, weight = (jax.device_put(normal(seed, shape)) for seed, shape in enumerate(((4, 8), (8, 4), (8,))))
    heads, table = (jax.device_put(normal(3, shape)) for shape in ((1, 4, 2, 8), (4, 8)))
    index, sizes = jax.device_put((np.arange(4, dtype=np.int32), np.array([1, 3], np.int32)))
    groups, sums = jnp.stack((w, w)), (((1,), (0,)), ((), ()))

    @jax.jit
    def rms_norm(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight

    @jax.jit
    def rmsnorm(x, weight):
        rstd = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        return x * rstd * weight, rstd

    @jax.jit
    def layer_norm(x, weight):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * weight

    ours, nn = pydet.jax, jax.nn
    calls = {
        "gemm": (lambda: ours.gemm(x, w), lambda: jnp.matmul(x, w)),
        "linear": (lambda: ours.linear(x, x), lambda: jnp.matmul(x, w)),
        "gemm_db": (lambda: ours.gemm_db(x, x), lambda: jnp.matmul(w, x)),
        "dot_general": (lambda: ours.dot_general(x, w, sums), lambda: jax.lax.dot_general(x, w, sums)),
        "ragged_dot": (lambda: ours.ragged_dot(x, groups, sizes), lambda: jax.lax.ragged_dot(x, groups, sizes)),
        "rms_norm": (lambda: ours.rms_norm(x, weight, eps=1e-5), lambda: rms_norm(x, weight)),
        "rmsnorm": (lambda: ours.rmsnorm(x, weight, eps=1e-5), lambda: rmsnorm(x, weight)),
        "layer_norm": (lambda: ours.layer_norm(x, weight, eps=1e-5), lambda: layer_norm(x, weight)),
        "softmax": (lambda: ours.softmax(x), lambda: nn.softmax(x)),
        "log_softmax": (lambda: ours.log_softmax(x), lambda: nn.log_softmax(x)),
        "silu": (lambda: ours.silu(x), lambda: nn.silu(x)),
        "gelu": (lambda: ours.gelu(x), lambda: nn.gelu(x)),
        "sigmoid": (lambda: ours.sigmoid(x), lambda: nn.sigmoid(x)),
        "log_sigmoid": (lambda: ours.log_sigmoid(x), lambda: nn.log_sigmoid(x)),
        "tanh": (lambda: ours.tanh(x), lambda: jnp.tanh(x)),
        "exp": (lambda: ours.exp(x), lambda: jnp.exp(x)),
        "softplus": (lambda: ours.softplus(x), lambda: nn.softplus(x)),
        "embedding": (lambda: ours.embedding(table, index), lambda: jnp.take(table, index, 0)),
        "topk": (lambda: ours.topk(x, 3), lambda: jax.lax.top_k(x, 3)),
        "dot_product_attention": (
            lambda: ours.dot_product_attention(heads, heads, heads),
            lambda: nn.dot_product_attention(heads, heads, heads),
        ),
    }
    for name, (mine, theirs) in calls.items():
        waits = [partial(lambda call: jax.block_until_ready(call()), call) for call in (mine, theirs)]
        variants = [Variant("pydet", waits[:1]), Variant("jax", waits[1:])]
        yield Row("call", f"JAX arrays, {name}", "fp32", variants, peer="jax")


def rows(threads):
    if threads > 1:
        return
    if jax:
        yield from (partial(lambda row: row, row) for row in jax_arrays())
    for with_out in (True, False):
        yield partial(numpy_arrays, with_out)
        if torch:
            yield partial(torch_tensors, with_out)
