"""Products of fp8 matrices that have scales, and the quantisation that makes them."""

from __future__ import annotations

from typing import Any, Literal

from pydet._native import INVALID_VALUE, fail
from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Granularity, Stream, Tensor

_scaled_gemm, _quantize = methods(("scaled_gemm", "quantize"))


def scaled_gemm(
    a: Tensor,
    b: Tensor,
    *,
    a_scale: Any,
    b_scale: Any,
    bias: Any = None,
    out: Tensor | None = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    arithmetic: Literal["auto", "ieee", "sm90"] = "auto",
    k_chunk: int | None = None,
    initial: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The product of fp8 matrices that have scales: ``out[m, n] = round(sum_k sa a[m, k] sb b[k, n] + bias[n])``.

    Chains over chunks of k, each from +0, are combined in ascending order (NUMERICS.md, "Scaled GEMM"). The shape of a
    scale says what shares one. A scale whose extent along k is ``ceil(K/128)`` varies along k, and multiplies the sums
    of chunks; the others multiply the whole sum. So for ``1 <= K <= 128`` every scale but ``[]`` varies along k.

    On a Hopper ``"sm90"`` takes less than on a CPU, and ``"ieee"`` takes all of it. The rest is refused in these words:
    "the tensor cores do not read a, want its data and strides in multiples of 16 bytes" (or b), and no kernel takes "a
    left operand along M", "a right operand along N" (k is adjacent in both: ``w.T``), "an out along M" (an ``out`` with
    adjacent columns) or "a k_chunk that is no multiple of 128".

    Args:
        a: ``[..., M, K]``, float8_e4m3fn or float8_e5m2.
        b: ``[..., K, N]``, either type. Leading dimensions broadcast.
        a_scale: float32 or float8_e8m0fnu, or None for 1: ``[]``, ``[..., M, 1]`` or ``[..., M, ceil(K/128)]``.
        b_scale: likewise: ``[]``, ``[..., 1, N]``, ``[..., ceil(K/128), N]`` or ``[..., ceil(K/128), ceil(N/128)]``.
        bias: ``[N]`` or ``[..., M, N]``, float32, bfloat16 or float16, added in fp32 before the one rounding.
        out: ``[..., M, N]``, float32, bfloat16 or float16; made if None.
        out_dtype: the type of the result if it is made; bfloat16 by default.
        accumulate: start from ``out``, then given and float32, instead of +0. Scales are then along k, or None.
        arithmetic: ``"ieee"``, ``"sm90"`` (Hopper's tensor cores), or ``"auto"``: ``"sm90"`` on a Hopper, else
            ``"ieee"``. It decides bits.
        k_chunk: None for 128, 0 for one chain, or a multiple of 32, on a Hopper's tensor cores of 128. Scales along k
            want 128, or 32: then each is of 32 elements along k, ``ceil(K/32)`` of them, as MXFP8 has it. It decides
            bits.
        initial: what the sum starts from instead of +0, as in :func:`gemm`. Scales are then along k, or None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor ``[..., M, N]``.

    Raises:
        Error: as :func:`gemm`; float8 that is viewed as uint8.
    """
    method = _scaled_gemm if stream is None else on_stream(_scaled_gemm, a, stream)
    return method(  # type: ignore[no-any-return]
        a,
        b,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "scaled_gemm"),
        accumulate=accumulate,
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        initial=initial,
        kernel=kernel,
    )


def quantize(
    x: Tensor,
    *,
    granularity: Granularity = "row",
    dtype: Any = "float8_e4m3fn",
    scale_dtype: Any = "float32",
    power_of_two: bool = False,
    transposed: bool = False,
    scale: Any = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, ...]:
    """Quantisation to fp8: ``scale = max(amax, 1e-10) / L`` and ``q = x / scale``, clamped to ``[-L, L]`` and rounded.

    ``amax`` is the largest ``|x|`` of what shares the scale and L the largest number of the type (448 or 57344). The
    division is a true one, and the bits are the same on every backend (NUMERICS.md, "Quantisation").

    Args:
        x: ``[..., M, K]``, float32, bfloat16 or float16; one of its last two strides is 1.
        granularity: what shares a scale, and so its shape: ``"row"`` ``[..., M, 1]``, ``"group"``
            ``[..., M, ceil(K/128)]``, ``"block"`` ``[..., ceil(M/128), ceil(K/128)]`` or ``"tensor"`` ``[]``. The
            ``amax`` of no elements is 0.
        dtype: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        scale_dtype: ``"float32"``, or ``"float8_e8m0fnu"``: powers of two.
        power_of_two: round the scale up to a power of two.
        transposed: make what the call would give of ``x`` transposed as well; groups and blocks. The gradients of a
            product need k adjacent on the other side.
        scale: read this scale instead of making one.
        out: the tensor for ``q``, or a tuple ``(q, scale)`` or ``(q, scale, q_t, scale_t)`` whose members may be None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(q, scale)``, or ``(q, scale, q_t, scale_t)``: what :func:`scaled_gemm` takes for a, or transposed for b.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    q, own, q_t, scale_t, *more = (*out, None, None, None, None) if isinstance(out, tuple) else (out, None, None, None)
    if len(more) > 4:
        fail(INVALID_VALUE, f"quantize: out has {len(out)} members, want at most 4: q, scale, q_t and scale_t")
    if scale is not None and own is not None:
        fail(INVALID_VALUE, "quantize: scale is given and out has one too, want one of them")
    method = _quantize if stream is None else on_stream(_quantize, x, stream)
    return method(  # type: ignore[no-any-return]
        x,
        granularity=granularity,
        given=scale,
        out=q,
        scale=own,
        transposed=q_t,
        transposed_scale=scale_t,
        dtype=type_index(dtype, "quantize", "dtype"),
        scale_dtype=type_index(scale_dtype, "quantize", "scale_dtype"),
        power_of_two=power_of_two,
        turns=transposed,
        kernel=kernel,
    )
