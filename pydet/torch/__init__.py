"""pydet in PyTorch: operators, functions with gradients, modules, and what swaps them into a model.

    import pydet.torch

    pydet.torch.linear(x, w, bias)              # forward and backward with pydet's bits
    report = pydet.torch.convert(model)         # nn.Linear, the norms and their like become pydet's, in place
    with pydet.torch.override_aten() as caught: # torch.mm and its like, wherever they are called from
        loss = model(tokens).sum(); loss.backward()

``torch.ops.pydet.*`` (:mod:`pydet.torch.ops`) are the operators below these. All run on the CPU and on CUDA, in eager
mode, under ``torch.compile`` without a graph break, and in CUDA graphs, with the same bits.
"""

from pydet.torch.attention import attention, register_attention
from pydet.torch.batching import continuous_batching
from pydet.torch.checking import Check, check
from pydet.torch.conversion import Conversion, convert
from pydet.torch.experts import register_experts
from pydet.torch.experts_fp8 import Fp8Experts
from pydet.torch.fp8 import Fp8Linear, fp8_linear, scaled_mm
from pydet.torch.functions import (
    activation,
    embedding,
    geglu,
    gelu,
    gemm,
    layer_norm,
    linear,
    log_prob,
    log_softmax,
    rms_norm,
    rms_norm_quantize,
    sample,
    sigmoid,
    silu,
    skinny_linear,
    softmax,
    softplus,
    swiglu,
    topk,
)
from pydet.torch.fused import fuse_loss
from pydet.torch.grouped import grouped_mm
from pydet.torch.head import linear_cross_entropy, linear_cross_entropy_and_gradients, linear_log_prob
from pydet.torch.modules import (
    Accumulating,
    Activation,
    Conv1D,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    accumulate_gradients,
)
from pydet.torch.optimizer import AdamW
from pydet.torch.override import override_aten
from pydet.torch.scaled_grouped import scaled_grouped_mm
from pydet.torch.trainers import check_trainer

__all__ = [
    "Accumulating",
    "Activation",
    "AdamW",
    "Check",
    "Conv1D",
    "Conversion",
    "Embedding",
    "Fp8Experts",
    "Fp8Linear",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "accumulate_gradients",
    "activation",
    "attention",
    "check",
    "check_trainer",
    "continuous_batching",
    "convert",
    "embedding",
    "fp8_linear",
    "fuse_loss",
    "geglu",
    "gelu",
    "gemm",
    "grouped_mm",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_and_gradients",
    "linear_log_prob",
    "log_prob",
    "log_softmax",
    "override_aten",
    "register_attention",
    "register_experts",
    "rms_norm",
    "rms_norm_quantize",
    "sample",
    "scaled_grouped_mm",
    "scaled_mm",
    "sigmoid",
    "silu",
    "skinny_linear",
    "softmax",
    "softplus",
    "swiglu",
    "topk",
]
