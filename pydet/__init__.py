"""Deterministic, batch-invariant GEMM, norms and softmax for CPU, CUDA and HIP.

An output element is a pure function of its own row of A, its own column of B, the arithmetic and ``k_chunk``. So a row
has the same bits alone, in any batch and at any place in it, on any kernel, with any number of threads, and in the next
release (one that must change bits raises ``NUMERICS``).

    >>> import numpy, pydet
    >>> a = numpy.random.default_rng(0).standard_normal((64, 512), numpy.float32)
    >>> b = numpy.random.default_rng(1).standard_normal((512, 256), numpy.float32)
    >>> numpy.array_equal(pydet.gemm(a, b)[7:8], pydet.gemm(a[7:8], b))
    True
"""

from pydet._native import Error, InvalidType, InvalidValue
from pydet.audit import Audit, Difference, audit, audit_fold, audit_layernorm, audit_rmsnorm
from pydet.ops import (
    ABI,
    DWEIGHT_ROWS,
    FOLD_PARTS,
    NUMERICS,
    Device,
    Kernel,
    __version__,
    attention,
    attention_backward,
    attention_paged,
    attention_varlen,
    attention_varlen_backward,
    devices,
    fold,
    gemm,
    gemm_da,
    gemm_db,
    grouped_gemm,
    kernels,
    last_kernel,
    layernorm,
    layernorm_backward,
    log_prob,
    log_prob_backward,
    log_softmax,
    log_softmax_backward,
    quantize,
    resolve_arithmetic,
    rmsnorm,
    rmsnorm_backward,
    scaled_gemm,
    scaled_grouped_gemm,
    skinny_gemm,
    softmax,
    softmax_backward,
)

__all__ = [
    "ABI",
    "DWEIGHT_ROWS",
    "FOLD_PARTS",
    "NUMERICS",
    "Audit",
    "Device",
    "Difference",
    "Error",
    "InvalidType",
    "InvalidValue",
    "Kernel",
    "__version__",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "audit",
    "audit_fold",
    "audit_layernorm",
    "audit_rmsnorm",
    "devices",
    "fold",
    "gemm",
    "gemm_da",
    "gemm_db",
    "grouped_gemm",
    "kernels",
    "last_kernel",
    "layernorm",
    "layernorm_backward",
    "log_prob",
    "log_prob_backward",
    "log_softmax",
    "log_softmax_backward",
    "quantize",
    "resolve_arithmetic",
    "rmsnorm",
    "rmsnorm_backward",
    "scaled_gemm",
    "scaled_grouped_gemm",
    "skinny_gemm",
    "softmax",
    "softmax_backward",
]
