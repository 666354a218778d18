"""Products of groups of tokens."""

from __future__ import annotations

from typing import Any

from pydet._native import INVALID_VALUE, fail
from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Arithmetic, Stream, Tensor

_grouped_gemm, _scaled_grouped_gemm = methods(("grouped_gemm", "scaled_grouped_gemm"))


def check_ends(op: str, a: Any, b: Any, group_end: Any) -> None:
    """Ends of groups in host memory are no more than the tokens there are: one beyond is a caller's mistake. Those on a
    GPU no host reads, and a kernel clamps them, as the C functions promise for all."""
    package = type(group_end).__module__.partition(".")[0]
    if package == "torch" and (group_end.device.type != "cpu" or str(group_end.dtype) != "torch.int32"):
        return
    if package == "numpy" and group_end.dtype != "int32":
        return
    if package not in ("numpy", "torch") or len(group_end.shape) != 1 or group_end.shape[0] == 0:
        return
    rows: Any = getattr(a, "shape", ())
    matrices: Any = getattr(b, "shape", ())
    summed = op == "grouped_gemm" and len(matrices) == 2
    if len(rows) == 2 and (len(matrices) == 3 or (summed and rows[1] == matrices[0])):
        tokens, most = (rows if len(matrices) == 3 else matrices)[0], int(group_end.max())
        if most > tokens:
            fail(INVALID_VALUE, f"{op}: group_end has {most}, want {tokens} or less, the number of tokens")


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_end: Any,
    group_start: Any = None,
    *,
    bias: Any = None,
    out: Tensor | None = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    initial: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """Products of groups of tokens: a mixture of experts, or the gradient of its weights.

    With ``b`` of three dimensions, the rows of group g meet their own matrix:
    ``out[t, :] = round(chain_k(a[t, k], b[g, k, :]) + bias[g, :])``. With ``b`` of two, each group is summed over:
    ``out[g] = round(chain_t(a[:, t], b[t, :]) + bias[g, :])``. Here ``group_start[g] <= t < group_end[g]``.

    A row has the bits of :func:`gemm` of that row and ``b[g]``, and ``out[g]`` those of :func:`gemm` of the group's
    columns of ``a`` and rows of ``b``, counted from its first token: no other token, and nothing of how tokens were
    shared out, reaches them. The boundaries are read by the device when the work runs, never by the host, so a captured
    graph may be replayed with others.

    Args:
        a: ``[T, K]`` (or ``[M, T]``), float32, bfloat16 or float16. One of its strides is 1.
        b: ``[G, K, N]`` (or ``[T, N]``), of the type of ``a``. One of its last two strides is 1.
        group_end: ``[G]``, int32, contiguous, on the device of ``a``: where each group's tokens end. Any boundary will
            do; none need be aligned.
        group_start: where they begin, likewise; None: where the latest group with tokens ended. Whatever the two hold
            is safe: a start is clamped to the end of the latest group with tokens and T, an end to its start and T. On
            the CPU an end beyond T is refused, in an array or tensor of NumPy and PyTorch; a GPU's no host reads.
        bias: ``[G, N]``, float32, bfloat16 or float16, added in fp32 before the one rounding.
        out: ``[T, N]`` (or ``[G, M, N]``), of any of the three types; made if None. Rows that are in no group are not
            written: in a tensor that is made here they hold whatever its memory held. A group without tokens gives
            zeros in ``[G, M, N]``, or what ``out`` held under ``accumulate``, plus its bias.
        out_dtype, accumulate, arithmetic, k_chunk, kernel, stream: as in :func:`gemm`.
        initial: what the sums start from instead of +0, as in :func:`gemm`, shaped like the result. A group without
            tokens gives its ``initial``, plus its bias, in ``[G, M, N]``.

    Returns:
        ``out``, or the new tensor ``[T, N]`` (or ``[G, M, N]``).

    Raises:
        Error: as :func:`gemm`; boundaries that are not int32, contiguous and of the shape ``[G]``; on the CPU an end
            beyond the tokens.
    """
    check_ends("grouped_gemm", a, b, group_end)
    method = _grouped_gemm if stream is None else on_stream(_grouped_gemm, a, stream)
    return method(  # type: ignore[no-any-return]
        a,
        b,
        group_end,
        group_start=group_start,
        bias=bias,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "grouped_gemm"),
        accumulate=accumulate,
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        initial=initial,
        kernel=kernel,
    )


def scaled_grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_end: Any,
    group_start: Any = None,
    *,
    a_scale: Any,
    b_scale: Any,
    bias: Any = None,
    out: Tensor | None = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    initial: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """Products of groups of tokens in fp8: :func:`grouped_gemm` over rows of the factors of :func:`scaled_gemm`.

    ``out[t, n] = round(sum_k a[t, k] sa[t, k div 128] b[g, k, n] sb[g, k div 128, n] + bias[g, n])`` for
    ``group_start[g] <= t < group_end[g]``. A row has the bits of :func:`scaled_gemm` of that row, its scales, ``b[g]``
    and the scales of ``b[g]``: nothing of how the tokens were shared out reaches it.

    Args:
        a: ``[T, K]``, float8_e4m3fn or float8_e5m2.
        b: ``[G, K, N]``, float8_e4m3fn or float8_e5m2.
        group_end, group_start: as in :func:`grouped_gemm`.
        a_scale: float32 or float8_e8m0fnu, ``[]``, ``[T, 1]`` or ``[T, ceil(K/128)]``; None for 1.
        b_scale: float32 or float8_e8m0fnu, ``[]``, ``[G, 1, N]``, ``[G, ceil(K/128), N]`` or
            ``[G, ceil(K/128), ceil(N/128)]``; without the first dimension the same for every group; None for 1. Under
            ``k_chunk=32`` both with 32 in place of 128 along k.
        bias: ``[G, N]``, float32, bfloat16 or float16, added in fp32 before the one rounding.
        out: ``[T, N]``, float32, bfloat16 or float16; made if None. Rows that are in no group are not written.
        out_dtype: the type of a new ``out``; bfloat16 if None.
        accumulate, arithmetic, k_chunk, initial, kernel, stream: as in :func:`scaled_gemm`.

    Returns:
        ``out``, or the new tensor ``[T, N]``.

    Raises:
        Error: as :func:`scaled_gemm` and :func:`grouped_gemm`; a ``b`` of two dimensions, whose groups would lie along
            what is summed.
    """
    check_ends("scaled_grouped_gemm", a, b, group_end)
    method = _scaled_grouped_gemm if stream is None else on_stream(_scaled_grouped_gemm, a, stream)
    return method(  # type: ignore[no-any-return]
        a,
        b,
        group_end,
        group_start=group_start,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "scaled_grouped_gemm"),
        accumulate=accumulate,
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        initial=initial,
        kernel=kernel,
    )
