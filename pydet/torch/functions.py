"""Functions with gradients, which are :func:`pydet.gemm_da`, :func:`pydet.gemm_db` and :func:`pydet.rmsnorm_backward`.

Operands are float32, bfloat16 or float16 tensors of one type on one device; errors are :class:`pydet.Error`, a sentence
each. ``arithmetic`` and ``k_chunk`` decide bits, and hold for backward too: there ``k_chunk`` counts along the
dimension that is summed (the rows of a batch, for a weight's gradient). Batched matrices keep their batch in backward;
where a batch multiplies one matrix, that matrix's gradient is one sum over all rows in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from pydet.ops import Arithmetic
from pydet.ops.activation import Approximate, Kind, gelu_kind
from pydet.torch import ops  # noqa: F401 -- registers torch.ops.pydet
from pydet.torch.ops.register import straight

skinny_gemm, rmsnorm, layernorm = straight("skinny_gemm"), straight("rmsnorm"), straight("layernorm")
_activation, _gated_activation, _embedding = (
    straight(name) for name in ("activation", "gated_activation", "embedding")
)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
) -> torch.Tensor:
    """``out[..., m, n] = round(sum_k a[..., m, k] b[..., k, n] + bias)``: :func:`pydet.gemm` with a gradient.

    Args:
        a: ``[..., M, K]``.
        b: ``[..., K, N]`` with the same leading dimensions, or a matrix ``[K, N]``; other broadcasting has no gradient.
        bias: ``[N]`` or like the result. Its gradient sums rows as a chain of products with 1.
        out_dtype: that of the result; ``a``'s by default.
    """
    return torch.ops.pydet.gemm(a, b, bias, out_dtype, arithmetic, k_chunk)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
) -> torch.Tensor:
    """``y[..., n] = round(sum_k x[..., k] w[n, k] + bias[n])``, as ``torch.nn.functional.linear``.

    Args:
        x: ``[..., K]`` of any rank from 1.
        w: ``[N, K]``.
        bias: ``[N]``.
    """
    made: torch.Tensor = skinny_gemm(x, w, bias, None, arithmetic, k_chunk)
    return made


def skinny_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    weights_constant: bool = False,
) -> torch.Tensor:
    """:func:`linear`, with the decode step's promise to give.

    Args:
        x, w, bias, arithmetic, k_chunk: as in :func:`linear`; bias may also be like the result (a residual).
        weights_constant: no work still running in the stream writes ``w``; its loads may start early.
    """
    made: torch.Tensor = skinny_gemm(x, w, bias, None, arithmetic, k_chunk, weights_constant)
    return made


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``y = x rstd (weight + weight_offset) + bias`` over the last dimension: :func:`pydet.rmsnorm` with a gradient.

    Args:
        x: ``[..., N]``.
        weight: ``[N]``, or ``[H, N]`` beside an ``x`` of ``[..., H, N]``, or None for ones.
        eps: added to the mean of squares.
        bias: shaped like ``weight``, or None for zeros.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``, or float32; then their sum, of its type, is normalised.

    Returns:
        ``y``; with a residual ``(y, x + residual)``.
    """
    if bias is not None:
        if residual is None:
            return torch.ops.pydet.rmsnorm_bias(x, weight, bias, eps, weight_offset)[0]
        y, _, total = torch.ops.pydet.rmsnorm_bias_residual(x, residual, weight, bias, eps, weight_offset)
        return y, total
    if residual is None:
        made: torch.Tensor = rmsnorm(x, weight, eps, weight_offset)[0]
        return made
    y, _, total = torch.ops.pydet.rmsnorm_residual(x, residual, weight, eps, weight_offset)
    return y, total


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
    granularity: str = "group",
    dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, ...]:
    """:func:`rms_norm`, and its result in fp8, in one pass: :func:`pydet.rmsnorm_quantize`, without a gradient.

    Args:
        x, weight, eps, weight_offset, residual: as in :func:`rms_norm`; ``weight`` is ``[N]`` or None.
        granularity: what shares a scale: ``"group"``, 128 elements along a row, or ``"row"``.
        dtype, scale_dtype: those of q and of the scale; float8_e4m3fn and float32 if None.
        power_of_two: round the scale up to a power of two.

    Returns:
        ``(q, scale)``, or ``(q, scale, x + residual)`` with a residual: what ``torch.ops.pydet.scaled_gemm`` takes.
    """
    made = weight_offset, granularity, dtype, scale_dtype, power_of_two
    if residual is None:
        return torch.ops.pydet.rmsnorm_quantize(x, weight, eps, *made)
    return torch.ops.pydet.rmsnorm_quantize_residual(x, residual, weight, eps, *made)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``y = (x - mean) rstd (weight + weight_offset) + bias`` over the last dimension: :func:`pydet.layernorm` with a
    gradient.

    Args:
        x: ``[..., N]``.
        weight, bias: ``[N]`` of any of the three types, or None for ones and zeros.
        eps: added to the variance.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``; then their sum is normalised.

    Returns:
        ``y``, of the type of ``x``; with a residual ``(y, x + residual)``.
    """
    if residual is None:
        made: torch.Tensor = layernorm(x, weight, bias, eps, weight_offset)[0]
        return made
    y, _, _, total = torch.ops.pydet.layernorm_residual(x, residual, weight, bias, eps, weight_offset)
    return y, total


def softmax(x: torch.Tensor) -> torch.Tensor:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` over the last dimension: :func:`pydet.softmax` with a gradient.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16.

    Returns:
        Like ``x``. A row's bits depend on that row alone; columns of -inf at its end, or their absence, change no bit
        of the others.
    """
    return torch.ops.pydet.softmax(x)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of :func:`softmax`: :func:`pydet.log_softmax` with a gradient. Argument and result as there."""
    return torch.ops.pydet.log_softmax(x)


def log_prob(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Column ``index`` of each row of :func:`log_softmax`: :func:`pydet.log_prob` with a gradient by ``x``.

    Args:
        x: ``[..., N]``, logits in float32, bfloat16 or float16.
        index: ``[...]``, int32 or int64; a number that is no column gives NaN, and zeros in the gradient.

    Returns:
        ``[...]``, float32. No other column is written to memory.
    """
    return torch.ops.pydet.log_prob(x, index)


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """``torch.nn.functional.embedding``, with a gradient that sums the tokens of an id in their order.

    Rows are copied: :func:`pydet.embedding`. The gradient is :func:`pydet.embedding_backward`.

    Args:
        ids: ``[...]``, int32 or int64. On the CPU one that is no row's is refused; on a GPU its row is NaN.
        weight: ``[V, N]``, float32, bfloat16 or float16.
        padding_idx: tokens of this id have no part in the gradient; below 0 from the end, as in PyTorch.

    Returns:
        ``[..., N]``, of ``weight``'s type.
    """
    if padding_idx is not None and -weight.shape[0] <= padding_idx < 0:
        padding_idx += weight.shape[0]
    made: torch.Tensor = _embedding(weight, ids, padding_idx)
    return made


def sample(
    logits: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token of each row of logits, of the row, its seed, its position and its options alone: :func:`pydet.sample`.

    Args:
        logits: ``[..., N]``, float32, bfloat16 or float16. No gradient is made.
        seed, position: ``[...]``, int32 or int64.
        temperature, top_k, top_p, min_p: a number, or ``[...]`` for each row's own.

    Returns:
        ``(token, log_prob, filtered_log_prob)``, ``[...]``: int64, and float32 twice. ``log_prob`` has the bits of
        :func:`log_prob` of ``logits / temperature`` in float32.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options = {f"{name}s" if torch.is_tensor(value) else name: value for name, value in options.items()}
    return torch.ops.pydet.sample(logits.detach(), seed, position, **options)


def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest of each row, descending, equal ones by ascending column: :func:`pydet.topk`.

    With a gradient by ``x``: values are taken from ``x`` by their columns.

    Returns:
        ``(values, index)``, ``[..., k]``, of ``x``'s type and int64.
    """
    values, index = torch.ops.pydet.topk(x.detach(), k)
    if (torch.is_grad_enabled() and x.requires_grad) or forward_ad._current_level >= 0:
        values = x.gather(-1, index)
    return values, index


def activation(x: torch.Tensor, kind: Kind = "silu", *, up: torch.Tensor | None = None) -> torch.Tensor:
    """``f(x)`` of each element, or as a gate ``f(x) up``: :func:`pydet.activation` with a gradient.

    Args:
        x: of any shape, float32, bfloat16 or float16.
        kind: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"quick_gelu"``, ``"sigmoid"``, ``"tanh"``, ``"softplus"`` or
            ``"exp"``.
        up: like ``x``. The bits are those of the two steps, forward and backward, in one pass.

    Returns:
        Like ``x``. An element's bits depend on it alone: not on its place, on the device, on threads or on compilation.
    """
    made: torch.Tensor = _activation(x, kind) if up is None else _gated_activation(x, up, kind)
    return made


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x / (1 + e^-x)``: :func:`activation` of kind ``"silu"``."""
    return activation(x, "silu")


def gelu(x: torch.Tensor, approximate: Approximate = "none") -> torch.Tensor:
    """:func:`activation` of kind ``"gelu"`` or, with ``approximate="tanh"``, ``"gelu_tanh"``."""
    return activation(x, gelu_kind("gelu", approximate))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + e^-x)``: :func:`activation` of kind ``"sigmoid"``."""
    return activation(x, "sigmoid")


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + e^x)``: :func:`activation` of kind ``"softplus"``."""
    return activation(x, "softplus")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) up``, in one pass forward and one backward. Both may be halves of one tensor's rows."""
    return activation(gate, "silu", up=up)


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: Approximate = "none") -> torch.Tensor:
    """``gelu(gate) up``, likewise."""
    return activation(gate, gelu_kind("geglu", approximate), up=up)
