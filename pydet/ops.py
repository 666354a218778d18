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

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, overload

from pydet import _native
from pydet._native import DEVICE_NAMES, DEVICE_TYPES, INVALID_DEVICE, INVALID_VALUE, constants, fail, ffi
from pydet.frameworks import type_index
from pydet.hooks import methods, on_stream, unknown
from pydet.protocols import DTYPES

Tensor = TypeVar("Tensor")  # of the caller's framework; so are the results
Arithmetic: TypeAlias = Literal["auto", "ieee", "sm90", "sm80", "cdna3", "cdna2"]
Mode: TypeAlias = Literal["deterministic", "fast"]
Order: TypeAlias = Literal["ordered", "tree"]
Granularity: TypeAlias = Literal["row", "group", "block", "tensor"]
Stream: TypeAlias = Any

ABI: int = constants.PYDET_ABI
NUMERICS: int = constants.PYDET_NUMERICS
DWEIGHT_ROWS: int = constants.PYDET_DWEIGHT_ROWS
FOLD_PARTS: int = constants.PYDET_FOLD_PARTS
__version__ = ".".join(str(getattr(constants, f"PYDET_VERSION_{part}")) for part in ("MAJOR", "MINOR", "PATCH"))

_gemm, _gemm_da, _gemm_db, _skinny_gemm, _scaled_gemm, _quantize, _rmsnorm, _rmsnorm_backward = methods(
    ("gemm", "gemm_da", "gemm_db", "skinny_gemm", "scaled_gemm", "quantize", "rmsnorm", "rmsnorm_backward")
)
_softmax, _log_softmax, _softmax_backward, _log_softmax_backward, _log_prob, _log_prob_backward = methods(
    ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward", "log_prob", "log_prob_backward")
)
_grouped_gemm, _scaled_grouped_gemm = methods(("grouped_gemm", "scaled_grouped_gemm"))
_layernorm, _layernorm_backward = methods(("layernorm", "layernorm_backward"))

(_fold,) = methods(("fold",))


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
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The gradient of :func:`gemm` by its left operand: ``da[m, k] = sum_n dc[m, n] b[k, n]``.

    :func:`gemm` on ``b`` transposed, under the same rules and with the same bits. ``k_chunk`` counts along n.

    Args:
        dc: ``[..., M, N]``, float32, bfloat16 or float16.
        b: ``[..., K, N]``, as it went into :func:`gemm`; of the type of ``dc``.
        out: ``[..., M, K]``; made if None.
        out_dtype, accumulate, arithmetic, k_chunk, kernel, stream: as in :func:`gemm`.

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
        out_dtype, accumulate, arithmetic, k_chunk, kernel, stream: as in :func:`gemm`.

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
        out_dtype, accumulate, arithmetic, k_chunk, kernel, stream: as in :func:`gemm`.

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
        mode=mode,
        weights_constant=weights_constant,
        kernel=kernel,
    )


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
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The product of fp8 matrices that have scales: ``out[m, n] = round(sum_k sa a[m, k] sb b[k, n] + bias[n])``.

    Chains over chunks of k, each from +0, are combined in ascending order (NUMERICS.md, "Scaled GEMM"). The shape of a
    scale says what shares one. A scale whose extent along k is ``ceil(K/128)`` varies along k, and multiplies the sums
    of chunks; the others multiply the whole sum. So for ``K <= 128`` every scale but ``[]`` varies along k.

    Args:
        a: ``[..., M, K]``, float8_e4m3fn or float8_e5m2.
        b: ``[..., K, N]``, either type. Leading dimensions broadcast. On a GPU k is adjacent in both (``w.T``).
        a_scale: float32 or float8_e8m0fnu, or None for 1: ``[]``, ``[..., M, 1]`` or ``[..., M, ceil(K/128)]``.
        b_scale: likewise: ``[]``, ``[..., 1, N]``, ``[..., ceil(K/128), N]`` or ``[..., ceil(K/128), ceil(N/128)]``.
        bias: ``[N]`` or ``[..., M, N]``, float32, bfloat16 or float16, added in fp32 before the one rounding.
        out: ``[..., M, N]``, float32, bfloat16 or float16; made if None.
        out_dtype: the type of the result if it is made; bfloat16 by default.
        accumulate: start from ``out``, then given and float32, instead of +0. Scales are then along k, or None.
        arithmetic: ``"ieee"``, ``"sm90"`` (Hopper's tensor cores), or ``"auto"``: ``"sm90"`` on a Hopper, else
            ``"ieee"``. It decides bits.
        k_chunk: None for 128, 0 for one chain, or a multiple of 32. Scales along k want 128. It decides bits.
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
        kernel=kernel,
    )


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
            is safe: a start is clamped to the end of the latest group with tokens and T, an end to its start and T.
        bias: ``[G, N]``, float32, bfloat16 or float16, added in fp32 before the one rounding.
        out: ``[T, N]`` (or ``[G, M, N]``), of any of the three types; made if None. Rows that are in no group are not
            written: in a tensor that is made here they hold whatever its memory held. A group without tokens gives
            zeros in ``[G, M, N]``, or what ``out`` held under ``accumulate``, plus its bias.
        out_dtype, accumulate, arithmetic, k_chunk, kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor ``[T, N]`` (or ``[G, M, N]``).

    Raises:
        Error: as :func:`gemm`; boundaries that are not int32, contiguous and of the shape ``[G]``.
    """
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
            ``[G, ceil(K/128), ceil(N/128)]``; without the first dimension the same for every group; None for 1.
        bias: ``[G, N]``, float32, bfloat16 or float16, added in fp32 before the one rounding.
        out: ``[T, N]``, float32, bfloat16 or float16; made if None. Rows that are in no group are not written.
        out_dtype: the type of a new ``out``; bfloat16 if None.
        accumulate, arithmetic, k_chunk, kernel, stream: as in :func:`scaled_gemm`.

    Returns:
        ``out``, or the new tensor ``[T, N]``.

    Raises:
        Error: as :func:`scaled_gemm` and :func:`grouped_gemm`; a ``b`` of two dimensions, whose groups would lie along
            what is summed.
    """
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
            ``[..., M, ceil(K/128)]``, ``"block"`` ``[..., ceil(M/128), ceil(K/128)]`` or ``"tensor"`` ``[]``.
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


@overload
def rmsnorm(
    x: Tensor,
    weight: Any = None,
    *,
    eps: float,
    bias: Any = None,
    weight_offset: float = 0.0,
    residual: None = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def rmsnorm(
    x: Tensor,
    weight: Any = None,
    *,
    eps: float,
    bias: Any = None,
    weight_offset: float = 0.0,
    residual: Tensor,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...


def rmsnorm(
    x: Tensor,
    weight: Any = None,
    *,
    eps: float,
    bias: Any = None,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Any, ...]:
    """Root-mean-square norm over the last dimension: ``y = x rstd (weight + weight_offset) + bias``.

    ``rstd = 1 / sqrt(mean(x^2) + eps)``. All in fp32, with the same bits on every backend; the sum over a row is a tree
    whose shape depends on N alone (NUMERICS.md, "RMSNorm").

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent, rows anywhere: a slice of a fused
            projection, or heads that were transposed.
        weight: ``[N]`` of any of the three types; None for ones. ``[H, N]`` beside an ``x`` of ``[..., H, N]``: one for
            each head, which has the bits of a call on ``x[..., h, :]`` alone.
        eps: added to the mean of squares; not negative.
        bias: shaped like ``weight``, of any of the three types; added before the one rounding. None for zeros.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``, or float32 beside any ``x``; then ``sum = x + residual``, rounded to the type of
            ``residual``, is what is normalised.
        out: the tensor for ``y``, like ``x``; or a tuple ``(y, rstd)`` or ``(y, rstd, sum)`` whose members may be None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(y, rstd)``, or ``(y, rstd, sum)`` with a residual. ``rstd`` is ``[...]`` in float32, and what
        :func:`rmsnorm_backward` takes.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit, or a negative ``eps``.
    """
    y, rstd, total, *more = (*out, None, None, None) if isinstance(out, tuple) else (out, None, None)
    if len(more) > 3:
        fail(INVALID_VALUE, f"rmsnorm: out has {len(out)} members, want at most 3: y, rstd and sum")
    method = _rmsnorm if stream is None else on_stream(_rmsnorm, x, stream)
    return method(  # type: ignore[no-any-return]
        x,
        weight,
        eps,
        bias=bias,
        weight_offset=weight_offset,
        residual=residual,
        out=y,
        rstd=rstd,
        sum=total,
        kernel=kernel,
    )


@overload
def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: None,
    rstd: Any,
    *,
    weight_offset: float = 0.0,
    has_bias: Literal[False] = False,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
    dweight: None = None,
    dbias: None = None,
    dweight_dtype: Any = None,
    accumulate: bool = False,
    block_sums: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, None]: ...


@overload
def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Any,
    rstd: Any,
    *,
    weight_offset: float = 0.0,
    has_bias: Literal[False] = False,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
    dweight: Any = None,
    dbias: None = None,
    dweight_dtype: Any = None,
    accumulate: bool = False,
    block_sums: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Any,
    rstd: Any,
    *,
    weight_offset: float = 0.0,
    has_bias: bool = False,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
    dweight: Any = None,
    dbias: Any = None,
    dweight_dtype: Any = None,
    accumulate: bool = False,
    block_sums: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Any, ...]: ...


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Any,
    rstd: Any,
    *,
    weight_offset: float = 0.0,
    has_bias: bool = False,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
    dweight: Any = None,
    dbias: Any = None,
    dweight_dtype: Any = None,
    accumulate: bool = False,
    block_sums: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Any, ...]:
    """Gradients of :func:`rmsnorm`.

    With ``xhat = x rstd`` and ``g = dy (weight + weight_offset)``::

        dx         = rstd (g - xhat mean(g xhat)) + dresidual
        dweight[n] = sum over rows of dy xhat
        dbias[n]   = sum over rows of dy

    The sum over rows walks fixed blocks of ``DWEIGHT_ROWS`` rows, whatever the device (NUMERICS.md, "RMSNorm"); for
    weights of heads the rows of each head.

    Args:
        dy: ``[..., N]``, like ``x``; or of any of the three types beside a float32 ``x``.
        x: what was normalised: ``x``, or ``sum`` where there was a residual.
        weight: ``[N]`` or ``[H, N]``, or None for ones; then ``dweight`` is None unless given.
        rstd: ``[...]``, float32, of the forward call.
        weight_offset: as in the forward call.
        has_bias: whether ``dbias`` is made.
        dresidual: like ``x``; a gradient that is added to ``dx`` in fp32 before it is rounded.
        out: the tensor for ``dx``, like ``x``; made if None.
        dweight, dbias: shaped like ``weight``, of any of the three types; made if None, but not under ``accumulate``.
            Without a weight they are given, or ``dbias`` is made as ``[N]``.
        dweight_dtype: the type of those that are made. That of ``weight`` by default, without one that of ``x``.
        accumulate: continue from ``dweight`` and ``dbias``, of which one or both are then given and float32. Rows (of
            each head) cut at a multiple of ``DWEIGHT_ROWS`` give the bits of one call.
        block_sums: ``dweight`` and ``dbias`` are ``[B, *weight.shape]``, float32: the sums of each block of
            ``DWEIGHT_ROWS`` rows (of a head) alone, ``B = ceil(rows / DWEIGHT_ROWS)``. Of rows that are shared out over
            devices :func:`fold` of all blocks, in the order of the rows, is ``dweight``. Not under ``accumulate``.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(dx, dweight)``, or ``(dx, dweight, dbias)`` where there is a ``dbias``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _rmsnorm_backward if stream is None else on_stream(_rmsnorm_backward, dy, stream)
    return method(  # type: ignore[no-any-return]
        dy,
        x,
        weight,
        rstd,
        weight_offset=weight_offset,
        has_bias=has_bias,
        dresidual=dresidual,
        out=out,
        dweight=dweight,
        dbias=dbias,
        dweight_dtype=None if dweight_dtype is None else type_index(dweight_dtype, "rmsnorm_backward", "dweight_dtype"),
        accumulate=accumulate,
        block_sums=block_sums,
        kernel=kernel,
    )


@overload
def layernorm(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: None = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def layernorm(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Tensor,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def layernorm(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Any, ...]:
    """Layer norm over the last dimension: ``y = (x - mean) rstd (weight + weight_offset) + bias``.

    ``rstd = 1 / sqrt(mean((x - mean)^2) + eps)``. All in fp32, with the same bits on every backend; the sums over a row
    are a tree whose shape depends on N alone (NUMERICS.md, "LayerNorm").

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent.
        weight: ``[N]`` of any of the three types; None for ones.
        bias: ``[N]`` of any of the three types; None for zeros.
        eps: added to the variance; not negative.
        weight_offset: 1.0 for models that store the weight less 1.
        residual: like ``x``; then ``sum = x + residual``, rounded to the type of ``x``, is what is normalised.
        out: the tensor for ``y``, like ``x``; or a tuple ``(y, mean, rstd)`` or ``(y, mean, rstd, sum)`` whose members
            may be None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(y, mean, rstd)``, or ``(y, mean, rstd, sum)`` with a residual. ``mean`` and ``rstd`` are ``[...]`` in
        float32, and what :func:`layernorm_backward` takes.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit, or a negative ``eps``.
    """
    given = out if isinstance(out, tuple) else (out,)
    if len(given) > 4:
        fail(INVALID_VALUE, f"layernorm: out has {len(given)} members, want at most 4: y, mean, rstd and sum")
    y, mean, rstd, total, *_ = (*given, None, None, None, None)
    method = _layernorm if stream is None else on_stream(_layernorm, x, stream)
    return method(  # type: ignore[no-any-return]
        x,
        weight,
        bias,
        eps,
        weight_offset=weight_offset,
        residual=residual,
        out=y,
        mean=mean,
        rstd=rstd,
        sum=total,
        kernel=kernel,
    )


def layernorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    weight_offset: float = 0.0,
    has_bias: bool = True,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
    dweight: Any = None,
    dbias: Any = None,
    dweight_dtype: Any = None,
    accumulate: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Any, Any]:
    """Gradients of :func:`layernorm`.

    With ``xhat = (x - mean) rstd`` and ``g = dy (weight + weight_offset)``::

        dx         = rstd (g - mean(g) - xhat mean(g xhat)) + dresidual
        dweight[n] = sum over rows of dy xhat
        dbias[n]   = sum over rows of dy

    The sums over rows walk fixed blocks of ``DWEIGHT_ROWS`` rows, whatever the device (NUMERICS.md, "RMSNorm").

    Args:
        dy: ``[..., N]``, like ``x``.
        x: what was normalised: ``x``, or ``sum`` where there was a residual.
        weight: ``[N]``, or None for ones; then ``dweight`` and ``dbias`` are None unless given.
        mean, rstd: ``[...]``, float32, of the forward call.
        weight_offset: as in the forward call.
        has_bias: whether ``dbias`` is made where ``dweight`` is.
        dresidual: like ``x``; a gradient that is added to ``dx`` in fp32 before it is rounded.
        out: the tensor for ``dx``, like ``x``; made if None.
        dweight, dbias: ``[N]`` of any of the three types; made if None, but not under ``accumulate``.
        dweight_dtype: the type of those that are made. That of ``weight`` by default.
        accumulate: continue from ``dweight`` and ``dbias``, of which one or both are then given and float32. Rows cut
            at a multiple of ``DWEIGHT_ROWS`` give the bits of one call.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``(dx, dweight, dbias)``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _layernorm_backward if stream is None else on_stream(_layernorm_backward, dy, stream)
    return method(  # type: ignore[no-any-return]
        dy,
        x,
        weight,
        mean,
        rstd,
        weight_offset=weight_offset,
        dresidual=dresidual,
        has_bias=has_bias,
        out=out,
        dweight=dweight,
        dbias=dbias,
        dweight_dtype=None
        if dweight_dtype is None
        else type_index(dweight_dtype, "layernorm_backward", "dweight_dtype"),
        accumulate=accumulate,
        kernel=kernel,
    )


def softmax(x: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None) -> Tensor:
    """Softmax over the last dimension: ``y = e / sum(e)``, ``e = exp(x - max(x))``.

    In fp32, with the same bits on every backend. The sum over a row is a tree whose shape depends on N alone, and exp a
    formula (NUMERICS.md, "Softmax"); so a tail that is masked by -inf, or not there, changes no bit of the rest.

    Args:
        x: ``[..., N]``, float32, bfloat16 or float16; elements of a row adjacent.
        out: like ``x``; made if None.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor. A row of nothing but -inf, or with a NaN or inf, is NaN.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _softmax if stream is None else on_stream(_softmax, x, stream)
    return method(x, out=out, kernel=kernel)  # type: ignore[no-any-return]


def log_softmax(
    x: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None
) -> Tensor:
    """The logarithm of :func:`softmax`: ``y = (x - max(x)) - log(sum(e))``, with its arguments and promises."""
    method = _log_softmax if stream is None else on_stream(_log_softmax, x, stream)
    return method(x, out=out, kernel=kernel)  # type: ignore[no-any-return]


def softmax_backward(
    dy: Tensor, y: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None
) -> Tensor:
    """The gradient of :func:`softmax` from its result: ``dx = y (dy - sum(dy y))``.

    Args:
        dy, y: ``[..., N]``, of one type.
        out, kernel, stream: as in :func:`softmax`.
    """
    method = _softmax_backward if stream is None else on_stream(_softmax_backward, dy, stream)
    return method(dy, y, out=out, kernel=kernel)  # type: ignore[no-any-return]


def log_softmax_backward(
    dy: Tensor, y: Tensor, *, out: Tensor | None = None, kernel: str | None = None, stream: Stream | None = None
) -> Tensor:
    """The gradient of :func:`log_softmax`: ``dx = dy - exp(y) sum(dy)``. Arguments as of :func:`softmax_backward`."""
    method = _log_softmax_backward if stream is None else on_stream(_log_softmax_backward, dy, stream)
    return method(dy, y, out=out, kernel=kernel)  # type: ignore[no-any-return]


def log_prob(
    x: Tensor,
    index: Tensor,
    *,
    out: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """One column of :func:`log_softmax` of each row, in float32: the log-probability of a token under its logits.

    Args:
        x: ``[..., N]``, as in :func:`softmax`.
        index: ``[...]``, int32 or int64, contiguous: the column of each row. Below 0 or from N on: NaN.
        out: ``[...]``, float32, contiguous; made if None.
        kernel, stream: as in :func:`gemm`.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    method = _log_prob if stream is None else on_stream(_log_prob, x, stream)
    return method(x, index, out=out, kernel=kernel)  # type: ignore[no-any-return]


def log_prob_backward(
    dlog_prob: Tensor,
    x: Tensor,
    index: Tensor,
    *,
    out: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """The gradient of :func:`log_prob`: ``dx = dlog_prob (onehot(index) - softmax(x))``, rounded once.

    Args:
        dlog_prob: ``[...]``, float32, contiguous.
        x, index: as in :func:`log_prob`. Rows whose index is no column get zeros.
        out: like ``x``; made if None.
        kernel, stream: as in :func:`gemm`.
    """
    method = _log_prob_backward if stream is None else on_stream(_log_prob_backward, x, stream)
    return method(dlog_prob, x, index, out=out, kernel=kernel)  # type: ignore[no-any-return]


def fold(
    parts: Any,
    *,
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    order: Order = "ordered",
    accumulate: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Any:
    """Adds partial sums in a fixed order: ``out = round(D + bias)``, ``D = D0 + parts[0] + parts[1] + ...``.

    The sums of fixed segments of a longer sum may be made anywhere, on one GPU or on several; folded in ascending order
    they have the bits of one call with ``k_chunk`` (NUMERICS.md, "Fold").

    Args:
        parts: ``[S, ...]``, or a sequence of S tensors ``[...]``, S from 1 to ``FOLD_PARTS``; float32, each contiguous.
        bias: ``[N]`` or ``[...]``, of any of the three types, added in fp32 before the one rounding.
        out: ``[...]``, of any of the three types, contiguous; made if None.
        out_dtype: the type of the result if it is made. float32 by default.
        order: ``"ordered"``, one after the other, or ``"tree"``, the binary tree over their numbers. It decides bits.
        accumulate: D0 is ``out``, then given and float32, instead of +0. An ordered fold may be cut anywhere; a tree at
            multiples of a power of two, each such group folded by a call of its own.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``out``, or the new tensor ``[...]``.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit.
    """
    listed = isinstance(parts, (list, tuple))
    given = tuple(parts) if listed else parts
    method = _fold if stream is None else on_stream(_fold, given[0] if listed and given else given, stream)
    return method(
        given,
        is_tuple=listed,
        bias=bias,
        out=out,
        out_dtype=None if out_dtype is None else type_index(out_dtype, "fold"),
        order=order,
        accumulate=accumulate,
        kernel=kernel,
    )


# ---- What is here ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """A device that a library here can use."""

    kind: str  #: "cpu", "cuda" or "rocm"
    index: int
    name: str
    arch: str  #: "x86-64 avx512", "sm_90"
    multiprocessors: int  #: SMs, CUs, or logical CPUs


@dataclass(frozen=True)
class Kernel:
    """A row of a library's kernel table."""

    name: str  #: for ``kernel=``
    operation: str
    dtypes: str  #: of the inputs
    arithmetic: str
    device: str  #: "cpu", "cuda" or "rocm"
    requires: str
    available: bool  #: some device of this machine can run it


def _libraries() -> list[tuple[int, _native.Library]]:
    """The libraries that load, each with the device index that it is asked about."""
    tried = ((index, _native.try_load(index)[0]) for index in range(len(DEVICE_NAMES)))
    return [(index, library) for index, library in tried if library]


def devices() -> list[Device]:
    """The devices that the libraries here can use, the CPU first."""
    found = []
    for index, library in _libraries():
        lib, count = library.lib, ffi.new("int32_t *")
        if lib.pydet_device_count(DEVICE_TYPES[index], count) != constants.PYDET_OK:
            continue  # a library named by PYDET_LIBRARY that does not serve this kind
        for number in range(count[0]):
            info = ffi.new("pydet_device_info *", {"struct_size": ffi.sizeof("pydet_device_info")})
            library.check(lib.pydet_query_device((DEVICE_TYPES[index], number), info))
            kind = DEVICE_NAMES[index].lower()
            found.append(Device(kind, number, _native.text(info.name), _native.text(info.arch), info.multiprocessors))
    return found


def kernels() -> list[Kernel]:
    """Every kernel of the libraries here, in the order in which they are tried."""
    found: dict[str, Kernel] = {}
    for _, library in _libraries():
        lib, number = library.lib, 0
        while lib.pydet_kernel_name(number) != ffi.NULL:
            info = ffi.new("pydet_kernel_info *", {"struct_size": ffi.sizeof("pydet_kernel_info")})
            library.check(lib.pydet_query_kernel(number, info))
            name, operation, dtypes, requires = map(
                _native.text, (info.name, info.operation, info.dtypes, info.requires_)
            )
            arithmetic = _native.text(lib.pydet_arithmetic_name(info.arithmetic))
            device = DEVICE_NAMES[DEVICE_TYPES.index(info.device_type)].lower()
            found.setdefault(name, Kernel(name, operation, dtypes, arithmetic, device, requires, bool(info.available)))
            number += 1
    return list(found.values())


def last_kernel() -> str:
    """The kernel that this thread's last operation launched; "" if it had nothing to write, or there was none yet."""
    index = _native.load(constants.PYDET_EXCHANGE_CPU).lib.pydet_exchange_last_library()
    return "" if index < 0 else _native.text(_native.load(index).lib.pydet_last_kernel())


def resolve_arithmetic(dtype: Any, device: tuple[str, int] = ("cpu", 0), arithmetic: Arithmetic = "auto") -> str:
    """The arithmetic that ``arithmetic`` means for inputs of this type on this device.

    Args:
        dtype: a name, or a framework's dtype: float32, bfloat16 or float16.
        device: a kind (``"cpu"``, ``"cuda"``, ``"rocm"``) and an index.
        arithmetic: a name as in :func:`gemm`.

    Raises:
        Error: an unknown name, an arithmetic that does not take the type, or no such device.
    """
    kinds = [name.lower() for name in DEVICE_NAMES]
    if device[0] not in kinds:
        fail(INVALID_DEVICE, f"device is {device[0]!r}, want one of {', '.join(kinds)}")
    number = unknown(arithmetic, "resolve_arithmetic", "arithmetic")
    return resolved_name(
        (DEVICE_TYPES[kinds.index(device[0])], device[1]), type_index(dtype, "resolve_arithmetic", "dtype"), number
    )


def resolved_name(device: tuple[int, int], index: int, arithmetic: int) -> str:
    """`resolve_arithmetic` by numbers: DLPack's device, the type index and the arithmetic."""
    library, resolved = _native.load(DEVICE_TYPES.index(device[0])), ffi.new("int32_t *")
    library.check(library.lib.pydet_resolve_arithmetic(device, (*DTYPES[index], 1), arithmetic, resolved))
    return _native.text(library.lib.pydet_arithmetic_name(resolved[0]))
