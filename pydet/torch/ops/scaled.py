"""The fp8 operations, below :mod:`pydet.torch.fp8`.

``scaled_gemm(a, b, a_scale, b_scale, bias, out_dtype, arithmetic, k_chunk)``, ``scaled_grouped_gemm(a, b, group_end,
a_scale, b_scale, bias, ...)``, whose rows in no group are zeros, and of :func:`pydet.quantize`
``quantize(x, granularity, dtype, scale_dtype, power_of_two) -> (q, scale)``, ``quantize_transposed(...) -> (q, scale,
q_t, scale_t)`` and ``quantize_given(x, scale, granularity, dtype) -> q``. Behind a norm they are
``rmsnorm_quantize(x, weight, eps, weight_offset, granularity, ...) -> (q, scale)`` and
``rmsnorm_quantize_residual(x, residual, weight, ...) -> (q, scale, sum)``. None stands for bfloat16 as ``out_dtype``,
and for float8_e4m3fn and float32 as the types of q and scale. They have no gradient and refuse operands that ask for
one.

The rows of a quantised matrix begin at multiples of 16 bytes, as a GPU's tensor cores read them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.hooks import unknown
from pydet.ops import quantize
from pydet.ops import rmsnorm_quantize as _rmsnorm_quantize
from pydet.ops.grouped import _scaled_grouped_gemm
from pydet.ops.scaled import _scaled_gemm
from pydet.shapes import Operand
from pydet.torch.ops.register import DTYPES, GEMM_OPTIONS, Dtype, Tensor, define, index_of
from pydet.torch.ops.tracing import TRACED, operands

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.float8_e8m0fnu)
GROUP = 128  # elements along k, or columns, that share a scale
_ROW_BYTES = 16


def groups(extent: Any) -> Any:
    """How many groups of 128 there are along a dimension."""
    return (extent + GROUP - 1) // GROUP


def empty_rows(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty matrix of fp8, or a batch of them, whose rows begin at multiples of 16 bytes."""
    strides = [1]
    extents = [(shape[-1] + _ROW_BYTES - 1) // _ROW_BYTES * _ROW_BYTES, *reversed(shape[1:-1])]
    for extent in extents[: len(shape) - 1]:
        strides.insert(0, strides[0] * extent)
    return like.new_empty_strided(shape, strides, dtype=dtype)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _run_scaled_gemm(
    a: Tensor, b: Tensor, a_scale: Any, b_scale: Any, bias: Any, out_dtype: Dtype, arithmetic: str, k_chunk: int | None
) -> Tensor:
    return _scaled_gemm(
        a,
        b,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out_dtype=index_of(out_dtype),
        arithmetic=arithmetic,
        k_chunk=k_chunk,
    )


def _run_scaled_grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_end: Tensor,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    out_dtype: Dtype,
    arithmetic: str,
    k_chunk: int | None,
) -> Tensor:
    _shapes_of_groups(a, b, group_end)
    out = a.new_zeros((a.shape[0], b.shape[2]), dtype=torch.bfloat16 if out_dtype is None else out_dtype)
    scales = {"a_scale": a_scale, "b_scale": b_scale}
    return _scaled_grouped_gemm(
        a, b, group_end.contiguous(), bias=bias, out=out, arithmetic=arithmetic, k_chunk=k_chunk, **scales
    )


def _shapes_of_groups(a: Tensor, b: Tensor, group_end: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 3 or group_end.dim() != 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("a", a), ("b", b), ("group_end", group_end)))
        fail(constants.PYDET_INVALID_SHAPE, f"scaled_grouped_gemm: {shapes}, want [T, K], [G, K, N] and [G]")


def _matrix_of(op: str, **given: Tensor) -> None:
    for name, x in given.items():
        if x.dim() < 2:
            fail(constants.PYDET_INVALID_SHAPE, f"{op}: {name} has {x.dim()} dimensions, want 2 to 8")


def _empty_copies(x: Tensor, dtype: Dtype, transposed: bool) -> tuple[Tensor, Tensor | None]:
    """q and q_t, empty."""
    _matrix_of("quantize", x=x)
    kind = FP8[0] if dtype is None else dtype
    q_t = empty_rows(x, (*x.shape[:-2], x.shape[-1], x.shape[-2]), kind) if transposed else None
    return empty_rows(x, tuple(x.shape), kind), q_t


def _quantize(
    x: Tensor, granularity: str, dtype: Dtype, scale_dtype: Dtype, power_of_two: bool, transposed: bool
) -> tuple[Tensor, ...]:
    q, q_t = _empty_copies(x, dtype, transposed)
    return quantize(
        x,
        granularity=granularity,  # type: ignore[arg-type]
        dtype=q.dtype,
        scale_dtype=scale_dtype or SCALES[0],
        power_of_two=power_of_two,
        transposed=transposed,
        out=(q, None, q_t, None),
    )


def _run_quantize(
    x: Tensor, granularity: str, dtype: Dtype, scale_dtype: Dtype, power_of_two: bool
) -> tuple[Tensor, ...]:
    return _quantize(x, granularity, dtype, scale_dtype, power_of_two, False)


def _run_quantize_transposed(
    x: Tensor, granularity: str, dtype: Dtype, scale_dtype: Dtype, power_of_two: bool
) -> tuple[Tensor, ...]:
    return _quantize(x, granularity, dtype, scale_dtype, power_of_two, True)


def _run_quantize_given(x: Tensor, scale: Tensor, granularity: str, dtype: Dtype) -> Tensor:
    q, _ = _empty_copies(x, dtype, False)
    quantize(x, granularity=granularity, dtype=q.dtype, scale=scale, out=q)  # type: ignore[arg-type]
    return q


def _run_norm(
    x: Tensor,
    residual: Any,
    weight: Any,
    eps: float,
    weight_offset: float,
    granularity: str,
    dtype: Dtype,
    scale_dtype: Dtype,
    power_of_two: bool,
) -> tuple[Tensor, ...]:
    q = empty_rows(x, tuple(x.shape), FP8[0] if dtype is None else dtype)
    return _rmsnorm_quantize(  # type: ignore[call-overload]
        x,
        weight,
        eps=eps,
        weight_offset=weight_offset,
        residual=residual,
        granularity=granularity,
        dtype=q.dtype,
        scale_dtype=scale_dtype or SCALES[0],
        power_of_two=power_of_two,
        out=q,
    )


def _run_rmsnorm_quantize(
    x: Tensor,
    weight: Any,
    eps: float,
    offset: float,
    granularity: str,
    dtype: Dtype,
    scale_dtype: Dtype,
    power_of_two: bool,
) -> tuple[Tensor, ...]:
    return _run_norm(x, None, weight, eps, offset, granularity, dtype, scale_dtype, power_of_two)


# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _check_traced(op: str, types: dict[str, tuple[torch.dtype, ...]], **given: Tensor | None) -> None:
    """Refuses while tracing the element types and devices that the kernel would refuse when the graph runs."""
    for name, x in given.items():
        if x is not None and x.dtype not in types[name]:
            want = " or ".join(str(dtype).removeprefix("torch.") for dtype in types[name])
            fail(INVALID_DTYPE, f"{op}: {name} is {x.dtype}, want {want}")
    operands(op, **given)


def _fake_scaled_gemm(
    a: Tensor, b: Tensor, a_scale: Any, b_scale: Any, bias: Any, out_dtype: Dtype, arithmetic: str, _: Any
) -> Tensor:
    types = {"a": FP8, "b": FP8, "a_scale": SCALES, "b_scale": SCALES, "bias": DTYPES}
    _check_traced("scaled_gemm", types, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)
    unknown(arithmetic, "scaled_gemm", "arithmetic")
    _matrix_of("scaled_gemm", a=a, b=b)
    torch._check(
        a.shape[-1] == b.shape[-2], lambda: f"scaled_gemm: a {tuple(a.shape)} and b {tuple(b.shape)} do not fit"
    )
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if bias is not None:
        TRACED.bias("scaled_gemm", Operand("bias", tuple(bias.shape), str(bias.dtype)), shape)
    return a.new_empty(shape, dtype=torch.bfloat16 if out_dtype is None else out_dtype)


def _fake_scaled_grouped_gemm(
    a: Tensor,
    b: Tensor,
    group_end: Tensor,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    out_dtype: Dtype,
    arithmetic: str,
    _: Any,
) -> Tensor:
    op = "scaled_grouped_gemm"
    types = {"a": FP8, "b": FP8, "a_scale": SCALES, "b_scale": SCALES, "bias": DTYPES}
    _check_traced(op, types, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)
    unknown(arithmetic, op, "arithmetic")
    if group_end.dtype != torch.int32:
        fail(INVALID_DTYPE, f"{op}: group_end is {group_end.dtype}, want int32")
    _shapes_of_groups(a, b, group_end)
    groups, _, n = b.shape
    torch._check(
        a.shape[1] == b.shape[1] and groups == group_end.shape[0],
        lambda: f"{op}: a {tuple(a.shape)}, b {tuple(b.shape)} and group_end {tuple(group_end.shape)} do not fit",
    )
    torch._check(
        bias is None or tuple(bias.shape) == (groups, n),
        lambda: f"{op}: bias is {bias is not None and tuple(bias.shape)}, want {(groups, n)}",
    )
    return a.new_empty((a.shape[0], n), dtype=torch.bfloat16 if out_dtype is None else out_dtype)


def _scale_shape(granularity: str, rows: Any, k: Any) -> tuple[Any, ...]:
    """Of the scale of a matrix [rows, k]."""
    shapes = {"row": (rows, 1), "group": (rows, groups(k)), "block": (groups(rows), groups(k)), "tensor": ()}
    if granularity not in shapes:
        want = ", ".join(shapes)
        fail(constants.PYDET_INVALID_VALUE, f"quantize: granularity is {granularity!r}, want one of {want}")
    return shapes[granularity]


def _fake_quantize(
    x: Tensor, granularity: str, dtype: Dtype, scale_dtype: Dtype, power_of_two: bool, transposed: bool = False
) -> tuple[Tensor, ...]:
    _check_traced("quantize", {"x": DTYPES}, x=x)
    q, q_t = _empty_copies(x, dtype, transposed)
    made = [(q, x.shape)] if q_t is None else [(q, x.shape), (q_t, q_t.shape)]
    results: list[Tensor] = []
    for copy, (*lead, rows, k) in made:
        shape = _scale_shape(granularity, rows, k)
        results += copy, x.new_empty((*lead, *shape) if shape else shape, dtype=scale_dtype or SCALES[0])
    return tuple(results)


def _fake_quantize_given(x: Tensor, scale: Tensor, _: str, dtype: Dtype) -> Tensor:
    _check_traced("quantize", {"x": DTYPES, "scale": SCALES}, x=x, scale=scale)
    return _empty_copies(x, dtype, False)[0]


def _fake_norm(
    x: Tensor,
    residual: Any,
    weight: Any,
    _: float,
    __: float,
    granularity: str,
    dtype: Dtype,
    scale_dtype: Dtype,
    *___: Any,
) -> tuple[Tensor, ...]:
    op = "rmsnorm_quantize"
    rows, added, weights = operands(op, x=x, residual=residual, weight=weight)
    TRACED.norm(op, rows, (added,), heads=True)  # a residual may be float32
    TRACED.norm(op, rows, (), weights)
    if granularity not in ("row", "group"):
        fail(constants.PYDET_INVALID_VALUE, f"{op}: granularity is {granularity!r}, want row or group")
    last = 1 if granularity == "row" else groups(x.shape[-1])
    q = empty_rows(x, tuple(x.shape), FP8[0] if dtype is None else dtype)
    scale = x.new_empty((*x.shape[:-1], last), dtype=scale_dtype or SCALES[0])
    return (q, scale) if residual is None else (q, scale, residual.new_empty(residual.shape))


# ---- The operators ---------------------------------------------------------------------------------------------------

_SCALES = "Tensor? a_scale, Tensor? b_scale, Tensor? bias=None"
_MADE = 'str granularity="row", ScalarType? dtype=None, ScalarType? scale_dtype=None, bool power_of_two=False'
define(
    f"scaled_gemm(Tensor a, Tensor b, {_SCALES}, {GEMM_OPTIONS}) -> Tensor",
    _run_scaled_gemm,
    _fake_scaled_gemm,
)
define(
    f"scaled_grouped_gemm(Tensor a, Tensor b, Tensor group_end, {_SCALES}, {GEMM_OPTIONS}) -> Tensor",
    _run_scaled_grouped_gemm,
    _fake_scaled_grouped_gemm,
)
define(f"quantize(Tensor x, {_MADE}) -> (Tensor, Tensor)", _run_quantize, _fake_quantize)
define(
    f"quantize_transposed(Tensor x, {_MADE}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_quantize_transposed,
    partial(_fake_quantize, transposed=True),
)
define(
    'quantize_given(Tensor x, Tensor scale, str granularity="row", ScalarType? dtype=None) -> Tensor',
    _run_quantize_given,
    _fake_quantize_given,
)
_NORM = "Tensor? weight, float eps, float weight_offset=0"
define(
    f"rmsnorm_quantize(Tensor x, {_NORM}, {_MADE}) -> (Tensor, Tensor)",
    _run_rmsnorm_quantize,
    lambda x, *rest: _fake_norm(x, None, *rest),
)
define(
    f"rmsnorm_quantize_residual(Tensor x, Tensor residual, {_NORM}, {_MADE}) -> (Tensor, Tensor, Tensor)",
    _run_norm,
    _fake_norm,
)
