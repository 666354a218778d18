"""Products of matrices, and their gradients."""

from __future__ import annotations

from typing import Any

from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream
from pydet.ops.types import Arithmetic, Mode, Stream, Tensor

_gemm, _gemm_da, _gemm_db, _skinny_gemm = methods(("gemm", "gemm_da", "gemm_db", "skinny_gemm"))


def gemm(
    a: Tensor,
    b: Tensor,
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
    """The matrix product: ``out[m, n] = round(chain_k(a[m, k], b[k, n]) + bias[n])``.

    The chain is one fp32 accumulator that walks k upwards in the steps of the arithmetic (NUMERICS.md, "GEMM").

    Args:
        a: ``[..., M, K]``, float32, bfloat16 or float16. One of its last two strides is 1.
        b: ``[..., K, N]``, of the type of ``a``. Leading dimensions (at most 6) broadcast against those of ``a``.
        bias: ``[N]`` or ``[..., M, N]``, of any of the three types, added in fp32 before the one rounding.
        out: ``[..., M, N]``, of any of the three types; made if None.
        out_dtype: the type of the result if it is made: a name (``"bfloat16"``) or the framework's own dtype. That of
            ``a`` by default.
        accumulate: start the chain from ``out``, then given and float32, instead of +0. A sum cut at a multiple of the
            arithmetic's step (or of ``k_chunk``) has the bits of the uncut one.
        arithmetic: ``"ieee"``, ``"sm90"``, ``"sm80"``, ``"cdna3"``, ``"cdna2"``, or ``"auto"``: the tensor cores of the
            device for bfloat16 and float16 on a GPU, else ``"ieee"``. It decides bits.
        k_chunk: None for one chain, or a multiple of 16: chains of that length, their sums added in ascending order.
            It decides bits.
        initial: what the chain starts from instead of +0: float32, shaped like the result, contiguous. The rest of a
            sum that was begun elsewhere, with a bias and one rounding to any type: the bits of one call that had it
            all, where it was cut as under ``accumulate``, which is the same in place. Not with it.
        kernel: the name of a kernel of :func:`kernels` to run, for tests and benchmarks. It decides no bits.
        stream: the stream to run on.

    Returns:
        ``out``, or the new tensor ``[..., M, N]``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit, ``a`` and ``b`` of different frameworks, an
            arithmetic that does not take the input type, or no kernel for it here.
    """
    method = _gemm if stream is None else on_stream(_gemm, a, stream)
    return method(  # type: ignore[no-any-return]
        a,
        b,
        bias=bias,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "gemm"),
        accumulate=accumulate,
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        initial=initial,
        kernel=kernel,
    )


def gemm_da(
    dc: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    initial: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The gradient of :func:`gemm` by its left operand: ``da[m, k] = sum_n dc[m, n] b[k, n]``.

    :func:`gemm` on ``b`` transposed, under the same rules and with the same bits. ``k_chunk`` counts along n.

    Args:
        dc: ``[..., M, N]``, float32, bfloat16 or float16.
        b: ``[..., K, N]``, as it went into :func:`gemm`; of the type of ``dc``.
        out: ``[..., M, K]``; made if None.
        out_dtype, accumulate, arithmetic, k_chunk, initial, kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor ``[..., M, K]``.

    Raises:
        Error: as :func:`gemm`.
    """
    method = _gemm_da if stream is None else on_stream(_gemm_da, dc, stream)
    return method(  # type: ignore[no-any-return]
        dc,
        b,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "gemm_da"),
        accumulate=accumulate,
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        initial=initial,
        kernel=kernel,
    )


def gemm_db(
    a: Tensor,
    dc: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    initial: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The gradient of :func:`gemm` by its right operand: ``db[k, n] = sum_m a[m, k] dc[m, n]``.

    :func:`gemm` on ``a`` transposed, under the same rules and with the same bits. ``k_chunk`` counts along m. With
    ``accumulate``, micro-batches cut at multiples of the arithmetic's step (or of ``k_chunk``) give the bits of one
    large batch.

    Args:
        a: ``[..., M, K]``, float32, bfloat16 or float16.
        dc: ``[..., M, N]``, of the type of ``a``.
        out: ``[..., K, N]``; made if None.
        out_dtype, accumulate, arithmetic, k_chunk, initial, kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor ``[..., K, N]``.

    Raises:
        Error: as :func:`gemm`.
    """
    method = _gemm_db if stream is None else on_stream(_gemm_db, a, stream)
    return method(  # type: ignore[no-any-return]
        a,
        dc,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "gemm_db"),
        accumulate=accumulate,
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        initial=initial,
        kernel=kernel,
    )


def skinny_gemm(
    x: Tensor,
    w: Tensor,
    *,
    bias: Any = None,
    out: Tensor | None = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    mode: Mode = "deterministic",
    arithmetic: Arithmetic = "auto",
    k_chunk: int | None = None,
    initial: Any = None,
    weights_constant: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """A linear layer on few rows: ``y[..., n] = round(chain_k(x[..., k], w[n, k]) + bias[n])``.

    The same function and the same bits as :func:`gemm` on ``w`` transposed, on kernels shaped for memory bandwidth: the
    decode step of a language model.

    Args:
        x: ``[..., K]`` of any rank from 1, float32, bfloat16 or float16.
        w: ``[N, K]``, of the type of ``x``.
        bias: ``[N]``, or shaped like the result.
        out: ``[..., N]``; made if None.
        mode: ``"deterministic"``, or ``"fast"``: K may be cut and the parts added as suits shape and device, so that
            the bits of ``"fast"`` are NOT promised, not even from run to run. In this release that happens on Hopper
            for N up to about 1000, as if in chunks of the library's choice; elsewhere it is the deterministic sum.
        weights_constant: a promise that no work still running in the stream writes ``w``, so that its loads may start
            before the kernel ahead has ended.
        out_dtype, accumulate, arithmetic, k_chunk, initial, kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor ``[..., N]``.

    Raises:
        Error: as :func:`gemm`.
    """
    method = _skinny_gemm if stream is None else on_stream(_skinny_gemm, x, stream)
    return method(  # type: ignore[no-any-return]
        x,
        w,
        bias=bias,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "skinny_gemm"),
        accumulate=accumulate,
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        initial=initial,
        mode=mode,
        weights_constant=weights_constant,
        kernel=kernel,
    )
