"""pydet in JAX: functions that can be jitted, differentiated and vmapped, with the bits of the eager calls.

    import jax, pydet.jax

    loss = lambda x, w: pydet.jax.linear(pydet.jax.rms_norm(x, eps=1e-6), w).sum()
    jax.jit(jax.grad(loss))(x, w)

They go through XLA's foreign function interface to handlers in pydet's own libraries (``native/ops/*/xla.cpp``); on
the CPU, and on CUDA where ``libpydet_cuda.so`` is. Backward runs pydet's own gradients; vmap is one batched call, or
for a norm with weights, and attention with sinks, one call for each; packed and paged attention, products of groups and
of fp8, heads, and rows of tables are made one by one. Operands are float32, bfloat16 or float16
arrays of one type, of :func:`scaled_gemm` fp8.

Common to the products: ``arithmetic`` and ``k_chunk`` are as in :func:`pydet.gemm`, decide bits, and hold for backward
too. ``accumulate`` is an array to continue from, like the result and float32; the result takes its memory where nothing
else needs it, as in the carry of a scan or for a donated argument. ``kernel`` forces a kernel by name, for tests and
benchmarks, and not in backward.

Under jit XLA shares calls out among devices by the shardings of their operands, with the bits of one device
(docs/distributed.md, "In JAX"). ``jax.shard_map`` runs them on each device's part. Under its ``check_vma=True`` the
gradient of what all devices share is summed by XLA, in an order of its own; ``pydet.jax_distributed`` has one that no
number of devices changes.

Every option is static: a Python value, not a traced one. Errors are :class:`pydet.Error` while a function is traced,
and XLA's own error with pydet's sentence in it afterwards.
"""

from pydet.jax import calls  # noqa: F401 -- the first to want JAX, it says so
from pydet.jax.accumulated import accumulate_gradients
from pydet.jax.activation import (
    activation,
    exp,
    geglu,
    gelu,
    log_sigmoid,
    sigmoid,
    silu,
    softplus,
    swiglu,
    swish,
    tanh,
)
from pydet.jax.attention import attention, dot_product_attention
from pydet.jax.calls import Array
from pydet.jax.converted import Check, Coverage, check, convert, coverage
from pydet.jax.embedding import embedding, embedding_backward
from pydet.jax.fp8 import quantize, scaled_gemm
from pydet.jax.general import dot_general
from pydet.jax.groups import ragged_dot
from pydet.jax.head import linear_cross_entropy, linear_log_prob
from pydet.jax.layernorm import layer_norm, layernorm, layernorm_backward
from pydet.jax.products import gemm, gemm_da, gemm_db, linear, skinny_gemm
from pydet.jax.rmsnorm import rms_norm, rmsnorm, rmsnorm_backward
from pydet.jax.sample import sample, topk
from pydet.jax.sequences import attention_paged, attention_varlen
from pydet.jax.softmax import log_prob, log_softmax, softmax
from pydet.ops import DWEIGHT_ROWS

__all__ = [
    "DWEIGHT_ROWS",
    "Array",
    "Check",
    "Coverage",
    "accumulate_gradients",
    "activation",
    "attention",
    "attention_paged",
    "attention_varlen",
    "check",
    "convert",
    "coverage",
    "dot_general",
    "dot_product_attention",
    "embedding",
    "embedding_backward",
    "exp",
    "geglu",
    "gelu",
    "gemm",
    "gemm_da",
    "gemm_db",
    "layer_norm",
    "layernorm",
    "layernorm_backward",
    "linear",
    "linear_cross_entropy",
    "linear_log_prob",
    "log_prob",
    "log_sigmoid",
    "log_softmax",
    "quantize",
    "ragged_dot",
    "rms_norm",
    "rmsnorm",
    "rmsnorm_backward",
    "sample",
    "scaled_gemm",
    "sigmoid",
    "silu",
    "skinny_gemm",
    "softmax",
    "softplus",
    "swiglu",
    "swish",
    "tanh",
    "topk",
]
