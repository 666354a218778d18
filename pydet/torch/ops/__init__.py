"""The operations as ``torch.ops.pydet.*``: a file each, with schema, kernel, shapes for tracing, autograd, vmap.

Each kernel is the function of its name in :mod:`pydet`, so an operator's result has that function's bits: in eager
mode, in a compiled graph, in a CUDA graph. The operators take any device that has a library; tracing takes meta and
fake tensors. Operands may have any strides; those that the library does not walk are copied.

``gemm``, ``skinny_gemm``, ``grouped_gemm``, ``attention``, ``softmax``, ``log_softmax``, ``log_prob``, ``activation``,
``gated_activation``, ``linear_log_prob``, ``embedding``, ``rotary`` and the forward norms are differentiable;
``attention_varlen`` and ``attention_paged`` are not yet. What their backward calls is not, nor are the operations of
fp8: a second derivative (``create_graph=True``), forward mode (jvp) and torch.func.grad are refused with a sentence.
``torch.vmap`` is defined over batches of products and over rows, and not over the weights of ``skinny_gemm``, norms and
tables. Under ``torch.autocast`` the operands of products take its type.
"""

from pydet.torch.ops import (
    activation,
    attention,
    embedding,
    grouped,
    head,
    layernorm,
    products,
    rmsnorm,
    rotary,
    sample,
    scaled,
    scan,
    sequences,
    softmax,
)
from pydet.torch.ops.products import matrix, sum_rows
from pydet.torch.ops.register import DTYPES

__all__ = [
    "DTYPES",
    "activation",
    "attention",
    "embedding",
    "grouped",
    "head",
    "layernorm",
    "matrix",
    "products",
    "rmsnorm",
    "rotary",
    "sample",
    "scaled",
    "scan",
    "sequences",
    "softmax",
    "sum_rows",
]
