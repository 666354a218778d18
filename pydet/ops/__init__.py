"""The operations. Each is one call of the C function of its name (``native/include/pydet.h``); NUMERICS.md has its sum.

Common to all:

*Tensors* are NumPy arrays (with ml_dtypes' bfloat16), PyTorch, JAX or CuPy tensors, or any object with ``__dlpack__``,
``__cuda_array_interface__`` or ``__array_interface__``; float32, bfloat16 or float16; all operands of one framework and
on one device. They are read in place, views included: a transposed matrix is a layout, not a copy. Results are new
tensors of the first operand's framework on its device, unless an output is given. An output must not share memory with
an input.

*Bits.* An output element is a function of its own row of the left operand, its own column of the right one, the
arithmetic and ``k_chunk``: not of the other rows, the batch, strides, the kernel, threads, stream or earlier calls.

*Streams.* On a GPU the work goes to the framework's current stream, or to ``stream`` (an address, or an object with
``__cuda_stream__``), and nothing waits for it. On the CPU the call returns when the work is done.

*Errors.* :class:`pydet.Error`, also a :class:`TypeError` for element types and things that are no tensors, also a
:class:`ValueError` for any other wrong argument. Then no output was touched.

*Autograd.* These functions record no gradient, and refuse PyTorch tensors that ask for one.
"""

from pydet.ops.activation import activation, activation_backward, geglu, gelu, sigmoid, silu, softplus, swiglu
from pydet.ops.adamw import adamw
from pydet.ops.attention import (
    attention,
    attention_backward,
    attention_paged,
    attention_varlen,
    attention_varlen_backward,
)
from pydet.ops.embedding import embedding, embedding_backward
from pydet.ops.fold import fold
from pydet.ops.grouped import grouped_gemm, scaled_grouped_gemm
from pydet.ops.head import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
    linear_log_prob,
    linear_log_prob_backward,
)
from pydet.ops.layernorm import layernorm, layernorm_backward
from pydet.ops.libraries import Device, Kernel, devices, kernels, last_kernel, resolve_arithmetic
from pydet.ops.products import gemm, gemm_da, gemm_db, skinny_gemm
from pydet.ops.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_quantize
from pydet.ops.rotary import rotary, rotary_table
from pydet.ops.sample import sample, topk
from pydet.ops.scaled import quantize, scaled_gemm
from pydet.ops.scan import (
    causal_conv1d,
    causal_conv1d_backward,
    gated_delta,
    gated_delta_backward,
    selective_scan,
    selective_scan_backward,
)
from pydet.ops.softmax import log_prob, log_prob_backward, log_softmax, log_softmax_backward, softmax, softmax_backward
from pydet.ops.types import (
    ABI,
    ADAMW_TENSORS,
    DWEIGHT_ROWS,
    FOLD_PARTS,
    NUMERICS,
    Arithmetic,
    Granularity,
    Mode,
    Order,
    Stream,
    __version__,
)

__all__ = [
    "ABI",
    "ADAMW_TENSORS",
    "DWEIGHT_ROWS",
    "FOLD_PARTS",
    "NUMERICS",
    "Arithmetic",
    "Device",
    "Granularity",
    "Kernel",
    "Mode",
    "Order",
    "Stream",
    "__version__",
    "activation",
    "activation_backward",
    "adamw",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "causal_conv1d",
    "causal_conv1d_backward",
    "devices",
    "embedding",
    "embedding_backward",
    "fold",
    "gated_delta",
    "gated_delta_backward",
    "geglu",
    "gelu",
    "gemm",
    "gemm_da",
    "gemm_db",
    "grouped_gemm",
    "kernels",
    "last_kernel",
    "layernorm",
    "layernorm_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_log_prob",
    "linear_log_prob_backward",
    "log_prob",
    "log_prob_backward",
    "log_softmax",
    "log_softmax_backward",
    "quantize",
    "resolve_arithmetic",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_quantize",
    "rotary",
    "rotary_table",
    "sample",
    "scaled_gemm",
    "scaled_grouped_gemm",
    "selective_scan",
    "selective_scan_backward",
    "sigmoid",
    "silu",
    "skinny_gemm",
    "softmax",
    "softmax_backward",
    "softplus",
    "swiglu",
    "topk",
]
