"""The operations as ``torch.ops.pydet.*``: schema, kernel, shapes for tracing, autograd, vmap.

Each kernel is the function of its name in :mod:`pydet`, so an operator's result has that function's bits: in eager
mode, in a compiled graph, in a CUDA graph. Backward runs :func:`pydet.gemm_da`, :func:`pydet.gemm_db` and
:func:`pydet.rmsnorm_backward`. The operators take any device that has a library; tracing takes meta and fake tensors.

``gemm(a, b, bias, out_dtype, arithmetic, k_chunk)``, ``skinny_gemm(x, w, bias, out_dtype, arithmetic, k_chunk,
weights_constant)``, ``rmsnorm(x, weight, eps, weight_offset) -> (y, rstd)``, ``rmsnorm_residual(x, residual, weight,
eps, weight_offset) -> (y, rstd, sum)`` are differentiable. ``gemm_da``, ``gemm_db`` and ``rmsnorm_backward`` are what
their backward calls, and are not: a second derivative (``create_graph=True``), forward mode (jvp) and torch.func.grad
are refused with a sentence. ``torch.vmap`` is defined over batches of products and over rows, and not over the weights
of ``skinny_gemm`` and ``rmsnorm``. Under ``torch.autocast`` the operands of products take its type. Operands may have
any strides; those that the library does not walk are copied. ``rmsnorm_backward`` returns a ``dweight`` of no elements
where weight is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

from pydet._native import INVALID_DEVICE, INVALID_VALUE, UNSUPPORTED, Error, constants, fail
from pydet.frameworks import type_index
from pydet.hooks import unknown
from pydet.ops.products import _gemm, _gemm_da, _gemm_db, _skinny_gemm
from pydet.ops.rmsnorm import _rmsnorm, _rmsnorm_backward
from pydet.protocols import UNSCALED
from pydet.shapes import Operand, Rules, Shape
from pydet.torch.compiled import warn_of_fusion

Tensor: TypeAlias = torch.Tensor
Dtype: TypeAlias = torch.dtype | None

DTYPES = tuple(getattr(torch, name) for name in UNSCALED)

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


def _of_any_strides(run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that copies operands whose rows the library cannot walk (a norm over transposed heads, for one)."""

    def kernel(*arguments: Any) -> Any:
        try:
            return run(*arguments)
        except Error as problem:
            if problem.status != constants.PYDET_INVALID_STRIDE:
                raise
        return run(*(x.contiguous() if isinstance(x, Tensor) else x for x in arguments))

    return kernel


def _index(dtype: Dtype) -> int | None:
    return None if dtype is None else type_index(dtype, "pydet.torch")


def _run_gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    return _gemm(a, b, bias=bias, out_dtype=_index(out_dtype), arithmetic=arithmetic, k_chunk=k_chunk)


def _run_gemm_da(
    dc: Tensor, b: Tensor, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: int | None = None
) -> Tensor:
    return _gemm_da(dc, b, out_dtype=_index(out_dtype), arithmetic=arithmetic, k_chunk=k_chunk)


def _run_gemm_db(
    a: Tensor, dc: Tensor, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: int | None = None
) -> Tensor:
    return _gemm_db(a, dc, out_dtype=_index(out_dtype), arithmetic=arithmetic, k_chunk=k_chunk)


def _run_skinny_gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
    weights_constant: bool = False,
) -> Tensor:
    try:
        return _skinny_gemm(
            x,
            w,
            bias=bias,
            out_dtype=_index(out_dtype),
            arithmetic=arithmetic,
            k_chunk=k_chunk,
            weights_constant=weights_constant,
        )
    except Error as problem:
        if problem.status == constants.PYDET_INVALID_SHAPE and w.dim() == 2 and x.dim() > 0:
            _refuse_width(x, w)
        raise


def _refuse_width(x: Tensor, w: Tensor) -> None:
    """In the words of who called a linear layer, and may not know of skinny_gemm."""
    if x.shape[-1] != w.shape[1]:
        got, weight = ("x".join(map(str, t.shape)) for t in (x, w))
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"linear: the input is {got} and the weight {weight}, want an input whose last dimension is {w.shape[1]}",
        )


def _run_rmsnorm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    return _rmsnorm(x, weight, eps, weight_offset=weight_offset)


def _run_rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    return _rmsnorm(x, weight, eps, weight_offset=weight_offset, residual=residual)


def _run_rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float = 0.0,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dx, dweight = _rmsnorm_backward(dy, x, weight, rstd, weight_offset=weight_offset, dresidual=dresidual)
    return dx, x.new_empty(0) if dweight is None else dweight


# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


class _Traced(Rules):
    """The rules, of extents that may be symbols."""

    def require(self, holds: Any, sentence: Callable[[], str]) -> None:
        if isinstance(holds, bool):
            super().require(holds, sentence)
        else:
            torch._check(holds, sentence)

    def broadcast(self, x: Shape, y: Shape) -> Shape | None:
        try:
            return tuple(torch.broadcast_shapes(x, y))
        except RuntimeError:
            return None


TRACED = _Traced()


def _operands(op: str, **given: Tensor | None) -> list[Any]:
    """What the rules read, of tensors that are on one device."""
    warn_of_fusion()
    first_name, first = next((name, x) for name, x in given.items() if x is not None)
    for name, x in given.items():
        if x is not None and x.device != first.device:
            fail(INVALID_DEVICE, f"{op}: {name} is on {x.device}, {first_name} is on {first.device}")
    return [
        None if x is None else Operand(name, tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for name, x in given.items()
    ]


def _product(kind: str, first: Tensor, operands: list[Any], out_dtype: Dtype, arithmetic: str) -> Tensor:
    """The empty result of a product."""
    unknown(arithmetic, kind, "arithmetic")
    return first.new_empty(TRACED.product(kind, *operands), dtype=first.dtype if out_dtype is None else out_dtype)


def _fake_gemm(
    a: Tensor, b: Tensor, bias: Any = None, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: Any = None
) -> Tensor:
    return _product("gemm", a, _operands("gemm", a=a, b=b, bias=bias), out_dtype, arithmetic)


def _fake_gemm_da(
    dc: Tensor, b: Tensor, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: Any = None
) -> Tensor:
    return _product("gemm_da", dc, _operands("gemm_da", dc=dc, b=b), out_dtype, arithmetic)


def _fake_gemm_db(
    a: Tensor, dc: Tensor, out_dtype: Dtype = None, arithmetic: str = "auto", k_chunk: Any = None
) -> Tensor:
    return _product("gemm_db", a, _operands("gemm_db", a=a, dc=dc), out_dtype, arithmetic)


def _fake_skinny_gemm(
    x: Tensor,
    w: Tensor,
    bias: Any = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: Any = None,
    weights_constant: bool = False,
) -> Tensor:
    operands = _operands("skinny_gemm", x=x, w=w, bias=bias)
    unknown(arithmetic, "skinny_gemm", "arithmetic")
    if x.dim() > 0 and w.dim() == 2 and isinstance(x.shape[-1], int):  # not a symbol, which the rules compare
        _refuse_width(x, w)
    shape = TRACED.skinny_product("skinny_gemm", *operands)
    return x.new_empty(shape, dtype=x.dtype if out_dtype is None else out_dtype)


def _fake_rmsnorm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    rows, weights = _operands("rmsnorm", x=x, weight=weight)
    TRACED.norm("rmsnorm", rows, (), weights, heads=True)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    rows, added, weights = _operands("rmsnorm", x=x, residual=residual, weight=weight)
    TRACED.norm("rmsnorm", rows, (added,), weights, heads=True)
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32), residual.new_empty(x.shape)


def _fake_rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float = 0.0,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    op = "rmsnorm_backward"
    rows, gradient, weights, of_rows, added = _operands(op, x=x, dy=dy, weight=weight, rstd=rstd, dresidual=dresidual)
    TRACED.norm(op, rows, (gradient, added), weights, of_rows, heads=True)
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


# ---- Autograd --------------------------------------------------------------------------------------------------------
# Each forward takes ctx itself: before a setup_context PyTorch inspects forward's signature in every call, which takes
# ten times as long as a small product.


def matrix(x: Tensor) -> Tensor:
    """The rows of all leading dimensions under each other."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


def _sum_rows(dc: Tensor, dtype: torch.dtype, arithmetic: str, k_chunk: int | None) -> Tensor:
    """The gradient of a bias [N]: dc [rows, N] summed as one chain of products with 1."""
    ones = dc.new_ones(dc.shape[0], 1)  # of its kind, should it be a DTensor
    return torch.ops.pydet.gemm_db(ones, dc, dtype, arithmetic, k_chunk)[0]


def _gradient_of_bias(dc: Tensor, bias: Tensor, arithmetic: str, k_chunk: int | None) -> Tensor:
    if bias.dim() == 1:
        return _sum_rows(matrix(dc), bias.dtype, arithmetic, k_chunk)
    if bias.shape != dc.shape:
        fail(UNSUPPORTED, f"gemm: no gradient for a bias of shape {tuple(bias.shape)}; want [N], or the result's shape")
    return dc.to(bias.dtype)


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: Dtype, arithmetic: str, k_chunk: int | None
    ) -> Tensor:
        batches = [x.shape[:-2] for x in (a, b)]
        if batches[0] != batches[1] and b.dim() > 2:
            fail(
                UNSUPPORTED,
                f"gemm: no gradient where batch dimensions broadcast ({tuple(a.shape)}, {tuple(b.shape)}) unless b is "
                "a matrix; expand them",
            )
        ctx.save_for_backward(a, b, bias)
        ctx.arithmetic, ctx.k_chunk = arithmetic, k_chunk
        return _call(_run_gemm, _gemm_op, a, b, bias, out_dtype, arithmetic, k_chunk)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
        (a, b, bias), arithmetic, k_chunk = ctx.saved_tensors, ctx.arithmetic, ctx.k_chunk
        da = db = dbias = None
        dy = dc.to(a.dtype)  # the gradient of the result, in the operands' type
        if ctx.needs_input_grad[0]:
            da = torch.ops.pydet.gemm_da(dy, b, None, arithmetic, k_chunk)
        if ctx.needs_input_grad[1]:
            rows = (a, dy) if b.dim() == a.dim() else (matrix(a), matrix(dy))
            db = torch.ops.pydet.gemm_db(*rows, None, arithmetic, k_chunk)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = _gradient_of_bias(dy, bias, arithmetic, k_chunk)
        return da, db, dbias, None, None, None


class _SkinnyGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(x, w, bias)
        _, ctx.arithmetic, ctx.k_chunk, _ = options
        return _call(_run_skinny_gemm, _skinny_gemm_op, x, w, bias, *options)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
        (x, w, bias), arithmetic, k_chunk = ctx.saved_tensors, ctx.arithmetic, ctx.k_chunk
        dx = dw = dbias = None
        dy = matrix(dc).to(x.dtype)
        if ctx.needs_input_grad[0]:
            dx = torch.ops.pydet.gemm(dy, w, None, None, arithmetic, k_chunk).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = torch.ops.pydet.gemm_db(dy, matrix(x), None, arithmetic, k_chunk)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = _gradient_of_bias(dy if bias.dim() == 1 else dy.view(dc.shape), bias, arithmetic, k_chunk)
        return dx, dw, dbias, None, None, None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
        y, rstd = _call(_run_rmsnorm, _rmsnorm_op, x, weight, eps, weight_offset)
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(x, weight, rstd)
        ctx.weight_offset = weight_offset
        return y, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.ops.pydet.rmsnorm_backward(dy, x, weight, rstd, ctx.weight_offset)
        return dx, None if weight is None else dweight, None, None


class _RmsNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, rstd, total = _call(_run_rmsnorm_residual, _rmsnorm_residual_op, x, residual, weight, eps, weight_offset)
        ctx.mark_non_differentiable(rstd)
        ctx.save_for_backward(total, weight, rstd)
        ctx.weight_offset = weight_offset
        return y, rstd, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor, dsum: Tensor) -> tuple[Any, ...]:
        total, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.ops.pydet.rmsnorm_backward(dy, total, weight, rstd, ctx.weight_offset, dsum)
        return dx.to(dy.dtype), dx, None if weight is None else dweight, None, None


# ---- Above the backends ----------------------------------------------------------------------------------------------


def _wants_gradient(first: Tensor, second: Tensor | None, third: Tensor | None = None) -> bool:
    return (
        first.requires_grad
        or (second is not None and second.requires_grad)
        or (third is not None and third.requires_grad)
    ) and torch.is_grad_enabled()


_listeners = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active


def _call(run: Callable[..., Any], overload: Any, *arguments: Any) -> Any:
    """The kernel at once (through the dispatcher a small call takes half as long again), unless a mode listens.

    What the kernel refuses for what it is (lazily negated, meta, fake, a wrapper of torch.func, a subclass, strides
    that want a copy) goes by the dispatcher, which resolves it or words the refusal.
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(overload, arguments)
    if not _listeners():
        try:
            return run(*arguments)
        except Error as problem:
            if problem.status not in (INVALID_VALUE, constants.PYDET_INVALID_STRIDE):
                raise
    with torch._C._AutoDispatchBelowAutograd():
        return overload(*arguments)


def _refuse_tangents(overload: Any, arguments: tuple[Any, ...]) -> None:
    tensors = (x for x in arguments if isinstance(x, Tensor))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        fail(UNSUPPORTED, f"{overload.__name__.partition('.')[0]}: no forward-mode gradient (jvp) is defined")


def _differentiate(function: type[torch.autograd.Function], op: str, *arguments: Any) -> Any:
    if forward_ad._current_level >= 0 or _transforms():
        fail(
            UNSUPPORTED,
            f"{op}: the gradients of torch.func (grad, vjp, jvp, jacrev) are not defined; backward() and "
            "torch.autograd.grad() are",
        )
    return function.apply(*arguments)


def _differentiable_gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: Dtype = None,
    arithmetic: str = "auto",
    k_chunk: int | None = None,
) -> Tensor:
    if _wants_gradient(a, b, bias):
        return _differentiate(_Gemm, "gemm", a, b, bias, out_dtype, arithmetic, k_chunk)
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
        return _differentiate(_SkinnyGemm, "skinny_gemm", x, w, bias, *options)
    return _call(_run_skinny_gemm, _skinny_gemm_op, x, w, bias, *options)


def _differentiable_rmsnorm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    if _wants_gradient(x, weight):
        return _differentiate(_RmsNorm, "rmsnorm", x, weight, eps, weight_offset)
    return _call(_run_rmsnorm, _rmsnorm_op, x, weight, eps, weight_offset)


def _differentiable_rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    if _wants_gradient(x, residual, weight):
        return _differentiate(_RmsNormResidual, "rmsnorm", x, residual, weight, eps, weight_offset)
    return _call(_run_rmsnorm_residual, _rmsnorm_residual_op, x, residual, weight, eps, weight_offset)


def _refusing(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """What has no gradient of its own refuses tensors that ask for one."""
    overload = getattr(torch.ops.pydet, name).default

    def kernel(*arguments: Any) -> Any:
        if any(_wants_gradient(x, None) for x in arguments if isinstance(x, Tensor)):
            fail(
                INVALID_VALUE,
                f"{name}: an operand requires grad, and this has no gradient; use torch.no_grad() or .detach(). If "
                "backward called it: a second derivative (create_graph=True) is not defined",
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
        batched = [(a, dims[0]), (b, dims[1])]
        if dims[0] is None and dims[1] is None:  # only the bias is batched
            batched[0] = (a.expand(info.batch_size, *a.shape), 0)
        most = max(x.dim() + (dim is None) for x, dim in batched)
        a, b = (_front(x, dim, most) for x, dim in batched)
        if name == "gemm" and rest and rest[0] is not None:
            rest = (_front(rest[0], dims[2], most), *rest[1:])
        return getattr(torch.ops.pydet, name)(a, b, *rest), 0

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


# ---- Autocast --------------------------------------------------------------------------------------------------------


def _under_autocast(name: str, device: str, operands: int = 2) -> Callable[..., Any]:
    """Operands in the type that torch.autocast names, as for torch.mm; a bias keeps its own, and is added in fp32."""
    overload = getattr(torch.ops.pydet, name).default
    off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def kernel(*arguments: Any, **options: Any) -> Any:
        dtype, (first, rest) = torch.get_autocast_dtype(device), (arguments[:operands], arguments[operands:])
        first = tuple(x.to(dtype) if x.dtype in DTYPES and not x.is_meta else x for x in first)
        with torch._C._ExcludeDispatchKeyGuard(off):
            return overload(*first, *rest, **options)

    return kernel


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
    _library.impl(_name, _of_any_strides(_run), "CompositeExplicitAutograd")
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
for _name in ("gemm", "gemm_da", "gemm_db", "skinny_gemm"):
    for _device in ("cpu", "cuda"):
        _library.impl(_name, _under_autocast(_name, _device), f"Autocast{_device.upper()}")
