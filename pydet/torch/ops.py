"""The operations as ``torch.ops.pydet.*``: schema, kernel, shapes for tracing, autograd, vmap.

Each kernel is the function of its name in :mod:`pydet`, so an operator's result has that function's bits: in eager
mode, in a compiled graph, in a CUDA graph. Backward runs :func:`pydet.gemm_da`, :func:`pydet.gemm_db` and
:func:`pydet.rmsnorm_backward`. The operators take any device that has a library; tracing takes meta and fake tensors.

``gemm(a, b, bias, out_dtype, arithmetic, k_chunk)``, ``skinny_gemm(x, w, bias, out_dtype, arithmetic, k_chunk,
weights_constant)``, ``rmsnorm(x, weight, eps, weight_offset) -> (y, rstd)``, ``rmsnorm_residual(x, residual, weight,
eps, weight_offset) -> (y, rstd, sum)`` are differentiable. ``gemm_da``, ``gemm_db`` and ``rmsnorm_backward`` are what
their backward calls, and are not. ``rmsnorm_backward`` returns a ``dweight`` of no elements where weight is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from pydet._native import INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.buffer import type_index
from pydet.ops import _gemm, _gemm_da, _gemm_db, _rmsnorm, _rmsnorm_backward, _skinny_gemm

Tensor: TypeAlias = torch.Tensor
Dtype: TypeAlias = torch.dtype | None

_library = torch.library.Library("pydet", "DEF")
_GEMM_OPTIONS = 'ScalarType? out_dtype=None, str arithmetic="auto", int? k_chunk=None'
_SCHEMAS = {
    "gemm": f"(Tensor a, Tensor b, Tensor? bias=None, {_GEMM_OPTIONS}) -> Tensor",
    "gemm_da": f"(Tensor dc, Tensor b, {_GEMM_OPTIONS}) -> Tensor",
    "gemm_db": f"(Tensor a, Tensor dc, {_GEMM_OPTIONS}) -> Tensor",
    "skinny_gemm": f"(Tensor x, Tensor w, Tensor? bias=None, {_GEMM_OPTIONS}, bool weights_constant=False) -> Tensor",
    "rmsnorm": "(Tensor x, Tensor? weight, float eps, float weight_offset=0.0) -> (Tensor, Tensor)",
    "rmsnorm_residual": "(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0)"
    " -> (Tensor, Tensor, Tensor)",
    "rmsnorm_backward": "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float weight_offset=0.0,"
    " Tensor? dresidual=None) -> (Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _index(dtype: Dtype) -> int | None:
    return None if dtype is None else type_index(dtype)


def _run_gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    return _gemm(a, b, bias, None, _index(out_dtype), False, arithmetic, k_chunk, None, False, None, None)


def _run_gemm_da(
    dc: Tensor, b: Tensor, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: int | None = None
) -> Tensor:
    return _gemm_da(dc, b, None, None, _index(out_dtype), False, arithmetic, k_chunk, None, False, None, None)


def _run_gemm_db(
    a: Tensor, dc: Tensor, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: int | None = None
) -> Tensor:
    return _gemm_db(a, dc, None, None, _index(out_dtype), False, arithmetic, k_chunk, None, False, None, None)


def _run_skinny_gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
    weights_constant: bool = False,
) -> Tensor:
    return _skinny_gemm(
        x, w, bias, None, _index(out_dtype), False, arithmetic, k_chunk, "deterministic", weights_constant, None, None
    )


def _run_rmsnorm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    return _rmsnorm(x, None, weight, None, None, None, eps, weight_offset, None, None)


def _run_rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    return _rmsnorm(x, residual, weight, None, None, None, eps, weight_offset, None, None)


def _run_rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float = 0.0,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dx, dweight = _rmsnorm_backward(dy, x, weight, rstd, dresidual, None, None, None, weight_offset, False, None, None)
    return dx, x.new_empty(0) if dweight is None else dweight


# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _product(
    op: str, a: Tensor, b: Tensor, rows: int, columns: int, inner: tuple[int, int], out_dtype: Dtype
) -> Tensor:
    """The empty result of a product whose rows and columns are these dimensions of a and b."""
    if a.dim() < 2 or b.dim() < 2:
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: want matrices, got {tuple(a.shape)} and {tuple(b.shape)}")
    torch._check(
        a.shape[inner[0]] == b.shape[inner[1]], lambda: f"{op}: {tuple(a.shape)} and {tuple(b.shape)} do not fit"
    )
    torch._check(a.dtype == b.dtype, lambda: f"{op}: a is {a.dtype}, b is {b.dtype}, want one type")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[rows], b.shape[columns]), dtype=out_dtype or a.dtype)


def _fake_gemm(
    a: Tensor, b: Tensor, bias: Any = None, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: Any = None
) -> Tensor:
    return _product("gemm", a, b, -2, -1, (-1, -2), out_dtype)


def _fake_gemm_da(
    dc: Tensor, b: Tensor, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: Any = None
) -> Tensor:
    return _product("gemm_da", dc, b, -2, -2, (-1, -1), out_dtype)


def _fake_gemm_db(
    a: Tensor, dc: Tensor, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: Any = None
) -> Tensor:
    return _product("gemm_db", a, dc, -1, -1, (-2, -2), out_dtype)


def _fake_skinny_gemm(
    x: Tensor,
    w: Tensor,
    bias: Any = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: Any = None,
    weights_constant: bool = False,
) -> Tensor:
    torch._check(
        w.dim() == 2 and x.shape[-1] == w.shape[1], lambda: f"skinny_gemm: x is {tuple(x.shape)}, w {tuple(w.shape)}"
    )
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype or x.dtype)


def _fake_rmsnorm(x: Tensor, weight: Any, eps: float, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Any, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_rmsnorm(x, weight, eps, weight_offset), x.new_empty(x.shape)


def _fake_rmsnorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float = 0.0, dresidual: Any = None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


# ---- Autograd --------------------------------------------------------------------------------------------------------


def _sum_rows(dc: Tensor, dtype: torch.dtype, arithmetic: str, k_chunk: int | None) -> Tensor:
    """The gradient of a bias [N]: dc [rows, N] summed as one chain of products with 1."""
    ones = torch.ones(dc.shape[0], 1, dtype=dc.dtype, device=dc.device)
    return torch.ops.pydet.gemm_db(ones, dc, dtype, arithmetic, k_chunk)[0]


def _gradient_of_bias(dc: Tensor, bias: Tensor, arithmetic: str, k_chunk: int | None) -> Tensor:
    if bias.dim() == 1:
        return _sum_rows(dc.reshape(-1, dc.shape[-1]), bias.dtype, arithmetic, k_chunk)
    if bias.shape != dc.shape:
        fail(UNSUPPORTED, f"gemm: no gradient for a bias of shape {tuple(bias.shape)}; want [N], or the result's shape")
    return dc.to(bias.dtype)


def _for_gradient(dc: Tensor, like: Tensor) -> Tensor:
    """The gradient of the result, in the operands' type and with rows that the kernels read."""
    dc = dc.to(like.dtype)
    return dc if dc.stride(-1) == 1 or dc.stride(-2) == 1 else dc.contiguous()


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.pydet.gemm(a, b, bias, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, _, ctx.arithmetic, ctx.k_chunk = inputs
        batches = [x.shape[:-2] for x in (a, b)]
        if batches[0] != batches[1] and b.dim() > 2:
            fail(
                UNSUPPORTED,
                f"gemm: no gradient where batch dimensions broadcast ({tuple(a.shape)}, {tuple(b.shape)}) unless b is "
                "a matrix; expand them",
            )
        ctx.save_for_backward(a, b, bias)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
        (a, b, bias), arithmetic, k_chunk = ctx.saved_tensors, ctx.arithmetic, ctx.k_chunk
        da = db = dbias = None
        dy = _for_gradient(dc, a)
        if ctx.needs_input_grad[0]:
            da = torch.ops.pydet.gemm_da(dy, b, None, arithmetic, k_chunk)
        if ctx.needs_input_grad[1]:
            rows = (a, dy) if b.dim() == a.dim() else (a.reshape(-1, a.shape[-1]), dy.reshape(-1, dy.shape[-1]))
            db = torch.ops.pydet.gemm_db(*rows, None, arithmetic, k_chunk)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = _gradient_of_bias(dy, bias, arithmetic, k_chunk)
        return da, db, dbias, None, None, None


class _SkinnyGemm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.pydet.skinny_gemm(x, w, bias, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, bias, _, ctx.arithmetic, ctx.k_chunk, _ = inputs
        ctx.save_for_backward(x, w, bias)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
        (x, w, bias), arithmetic, k_chunk = ctx.saved_tensors, ctx.arithmetic, ctx.k_chunk
        dx = dw = dbias = None
        dy = _for_gradient(dc.reshape(-1, dc.shape[-1]), x)
        if ctx.needs_input_grad[0]:
            dx = torch.ops.pydet.gemm(dy, w, None, None, arithmetic, k_chunk).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = torch.ops.pydet.gemm_db(dy, x.reshape(-1, x.shape[-1]), None, arithmetic, k_chunk)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = _gradient_of_bias(dy if bias.dim() == 1 else dy.view(dc.shape), bias, arithmetic, k_chunk)
        return dx, dw, dbias, None, None, None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.pydet.rmsnorm(x, weight, eps, weight_offset)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.weight_offset = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.ops.pydet.rmsnorm_backward(_rows_of(dy), x, weight, rstd, ctx.weight_offset)
        return dx, None if weight is None else dweight, None, None


class _RmsNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.pydet.rmsnorm_residual(x, residual, weight, eps, weight_offset)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.weight_offset = inputs[4]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[2], inputs[2], output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor, dsum: Tensor) -> tuple[Any, ...]:
        total, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.ops.pydet.rmsnorm_backward(
            _rows_of(dy), total, weight, rstd, ctx.weight_offset, _rows_of(dsum)
        )
        return dx, dx, None if weight is None else dweight, None, None


def _rows_of(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# ---- Above the backends ----------------------------------------------------------------------------------------------


def _wants_gradient(first: Tensor, second: Tensor | None, third: Tensor | None = None) -> bool:
    return (
        first.requires_grad
        or (second is not None and second.requires_grad)
        or (third is not None and third.requires_grad)
    ) and torch.is_grad_enabled()


_PLAIN = (Tensor, torch.nn.Parameter)
_listeners = torch._C._len_torch_dispatch_stack


def _call(run: Callable[..., Any], overload: Any, first: Tensor, *arguments: Any) -> Any:
    """The kernel at once where nothing is in between (half of a small call's time), else by the dispatcher."""
    if type(first) in _PLAIN and not (
        first.is_meta or _listeners() or first.is_neg() or (arguments[0] is not None and arguments[0].is_neg())
    ):
        return run(first, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return overload(first, *arguments)


def _differentiable_gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    if _wants_gradient(a, b, bias):
        return _Gemm.apply(a, b, bias, out_dtype, arithmetic, k_chunk)
    return _call(_run_gemm, _gemm_op, a, b, bias, out_dtype, arithmetic, k_chunk)


def _differentiable_skinny_gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
    weights_constant: bool = False,
) -> Tensor:
    options = (out_dtype, arithmetic, k_chunk, weights_constant)
    if _wants_gradient(x, w, bias):
        return _SkinnyGemm.apply(x, w, bias, *options)
    return _call(_run_skinny_gemm, _skinny_gemm_op, x, w, bias, *options)


def _differentiable_rmsnorm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    if _wants_gradient(x, weight):
        return _RmsNorm.apply(x, weight, eps, weight_offset)
    return _call(_run_rmsnorm, _rmsnorm_op, x, weight, eps, weight_offset)


def _differentiable_rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    if _wants_gradient(x, residual, weight):
        return _RmsNormResidual.apply(x, residual, weight, eps, weight_offset)
    return _call(_run_rmsnorm_residual, _rmsnorm_residual_op, x, residual, weight, eps, weight_offset)


def _refusing(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """What has no gradient of its own refuses tensors that ask for one."""
    overload = getattr(torch.ops.pydet, name).default

    def kernel(*arguments: Any) -> Any:
        if any(_wants_gradient(x, None) for x in arguments if isinstance(x, Tensor)):
            fail(
                INVALID_VALUE,
                f"{name}: an operand requires grad, and this has no gradient; use torch.no_grad() or .detach()",
            )
        return _call(run, overload, *arguments)

    return kernel


_gemm_op, _skinny_gemm_op, _rmsnorm_op, _rmsnorm_residual_op = (
    getattr(torch.ops.pydet, name).default for name in ("gemm", "skinny_gemm", "rmsnorm", "rmsnorm_residual")
)


# ---- vmap ------------------------------------------------------------------------------------------------------------


def _front(x: Tensor, dim: int | None, dims: int) -> Tensor:
    """The batched dimension first, and then as many as `dims` in all; not batched, x as it is."""
    if dim is None:
        return x
    x = x.movedim(dim, 0)
    return x.reshape(x.shape[0], *(1,) * (dims - x.dim()), *x.shape[1:])


def _vmap_product(name: str) -> Callable[..., Any]:
    def rule(info: Any, dims: tuple[Any, ...], a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, int]:
        bias = rest[0] if name == "gemm" and rest else None
        batched = [(a, dims[0]), (b, dims[1])]
        if bias is not None:
            if dims[2] is not None and bias.dim() == 2:  # [batch, N] of a matrix each
                bias = bias.movedim(dims[2], 0)[:, None, :]
            elif dims[2] is not None:
                bias = bias.movedim(dims[2], 0)
            rest = (bias, *rest[1:])
        most = max(x.dim() + (dim is None) for x, dim in batched)
        a, b = (_front(x, dim, most) for x, dim in batched)
        result = getattr(torch.ops.pydet, name)(a, b, *rest)
        if result.dim() < most:  # only the bias is batched
            result = result.expand(info.batch_size, *result.shape)
        return result, 0

    return rule


def _vmap_rows(name: str, shared: tuple[int, ...], results: int) -> Callable[..., Any]:
    """The rule of what works row by row: `shared` operands must not be batched, since each row takes the same."""

    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        if any(i < len(dims) and dims[i] is not None for i in shared):
            fail(UNSUPPORTED, f"{name}: vmap over the weights is not defined; it is over the rows")
        if any(isinstance(x, Tensor) and dims[i] is None for i, x in enumerate(arguments) if i not in shared):
            fail(UNSUPPORTED, f"{name}: vmap wants all operands of rows batched")
        moved = [x if dims[i] is None else x.movedim(dims[i], 0) for i, x in enumerate(arguments)]
        result = getattr(torch.ops.pydet, name)(*moved)
        return result, 0 if results == 1 else (0,) * results

    return rule


# ---- Registration ----------------------------------------------------------------------------------------------------

_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "gemm": (_run_gemm, _fake_gemm, _differentiable_gemm),
    "gemm_da": (_run_gemm_da, _fake_gemm_da, _refusing("gemm_da", _run_gemm_da)),
    "gemm_db": (_run_gemm_db, _fake_gemm_db, _refusing("gemm_db", _run_gemm_db)),
    "skinny_gemm": (_run_skinny_gemm, _fake_skinny_gemm, _differentiable_skinny_gemm),
    "rmsnorm": (_run_rmsnorm, _fake_rmsnorm, _differentiable_rmsnorm),
    "rmsnorm_residual": (_run_rmsnorm_residual, _fake_rmsnorm_residual, _differentiable_rmsnorm_residual),
    "rmsnorm_backward": (
        _run_rmsnorm_backward,
        _fake_rmsnorm_backward,
        _refusing("rmsnorm_backward", _run_rmsnorm_backward),
    ),
}
for _name, (_run, _fake, _above) in _KERNELS.items():
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _above, "Autograd")
    torch.library.register_fake(f"pydet::{_name}", _fake, lib=_library)
for _name in ("gemm", "gemm_da", "gemm_db"):
    torch.library.register_vmap(f"pydet::{_name}", _vmap_product(_name), lib=_library)
for _name, _shared, _results in (
    ("skinny_gemm", (1, 2), 1),
    ("rmsnorm", (1,), 2),
    ("rmsnorm_residual", (2,), 3),
):
    torch.library.register_vmap(f"pydet::{_name}", _vmap_rows(_name, _shared, _results), lib=_library)
