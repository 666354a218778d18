"""``gemm``, ``gemm_da``, ``gemm_db`` and ``skinny_gemm``; ``gemm_from``, a gemm whose sums begin at ``initial``."""

from __future__ import annotations

from typing import Any

import torch

from pydet._native import INVALID_DTYPE, UNSUPPORTED, Error, constants, fail
from pydet.hooks import unknown
from pydet.ops.products import _gemm as gemm
from pydet.ops.products import _gemm_da as gemm_da
from pydet.ops.products import _gemm_db as gemm_db
from pydet.ops.products import _skinny_gemm as skinny_gemm
from pydet.torch.ops.register import GEMM_OPTIONS, Call, Dtype, Tensor, define, index_of, vmap_rows
from pydet.torch.ops.tracing import TRACED, operands

# ---- Kernels ---------------------------------------------------------------------------------------------------------


def run_gemm(a: Tensor, b: Tensor, bias: Any, out_dtype: Dtype, arithmetic: str, k_chunk: int | None) -> Tensor:
    return gemm(a, b, bias=bias, out_dtype=index_of(out_dtype), arithmetic=arithmetic, k_chunk=k_chunk)


def _run_gemm_from(
    a: Tensor, b: Tensor, initial: Tensor, bias: Any, out_dtype: Dtype, arithmetic: str, k_chunk: int | None
) -> Tensor:
    options = {"out_dtype": index_of(out_dtype), "arithmetic": arithmetic, "k_chunk": k_chunk}
    return gemm(a, b, bias=bias, initial=initial, **options)


def _run_gemm_da(dc: Tensor, b: Tensor, out_dtype: Dtype, arithmetic: str, k_chunk: int | None) -> Tensor:
    return gemm_da(dc, b, out_dtype=index_of(out_dtype), arithmetic=arithmetic, k_chunk=k_chunk)


def _run_gemm_db(a: Tensor, dc: Tensor, out_dtype: Dtype, arithmetic: str, k_chunk: int | None) -> Tensor:
    return gemm_db(a, dc, out_dtype=index_of(out_dtype), arithmetic=arithmetic, k_chunk=k_chunk)


def _run_skinny_gemm(
    x: Tensor, w: Tensor, bias: Any, out_dtype: Dtype, arithmetic: str, k_chunk: int | None, weights_constant: bool
) -> Tensor:
    try:
        return skinny_gemm(
            x,
            w,
            bias=bias,
            out_dtype=index_of(out_dtype),
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


# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _fake_product(kind: str, out_dtype: Dtype, arithmetic: str, **given: Any) -> Tensor:
    first = next(iter(given.values()))
    rows = operands(kind, **given)
    unknown(arithmetic, kind, "arithmetic")
    return first.new_empty(TRACED.product(kind, *rows), dtype=first.dtype if out_dtype is None else out_dtype)


def _fake_gemm(a: Tensor, b: Tensor, bias: Any, out_dtype: Dtype, arithmetic: str, _: Any) -> Tensor:
    return _fake_product("gemm", out_dtype, arithmetic, a=a, b=b, bias=bias)


def _fake_gemm_from(
    a: Tensor, b: Tensor, initial: Tensor, bias: Any, out_dtype: Dtype, arithmetic: str, _: Any
) -> Tensor:
    result = _fake_product("gemm", out_dtype, arithmetic, a=a, b=b, bias=bias)
    if initial.dtype != torch.float32:
        fail(INVALID_DTYPE, f"gemm: initial is {str(initial.dtype).removeprefix('torch.')}, want float32")
    got, want = ("x".join(map(str, x.shape)) or "()" for x in (initial, result))
    TRACED.require(initial.shape == result.shape, lambda: f"gemm: initial is {got}, want {want}")
    return result


def _fake_gemm_da(dc: Tensor, b: Tensor, out_dtype: Dtype, arithmetic: str, _: Any) -> Tensor:
    return _fake_product("gemm_da", out_dtype, arithmetic, dc=dc, b=b)


def _fake_gemm_db(a: Tensor, dc: Tensor, out_dtype: Dtype, arithmetic: str, _: Any) -> Tensor:
    return _fake_product("gemm_db", out_dtype, arithmetic, a=a, dc=dc)


def _fake_skinny_gemm(x: Tensor, w: Tensor, bias: Any, out_dtype: Dtype, arithmetic: str, *_: Any) -> Tensor:
    given = operands("skinny_gemm", x=x, w=w, bias=bias)
    unknown(arithmetic, "skinny_gemm", "arithmetic")
    if x.dim() > 0 and w.dim() == 2 and isinstance(x.shape[-1], int):  # not a symbol, which the rules compare
        _refuse_width(x, w)
    shape = TRACED.skinny_product("skinny_gemm", *given)
    return x.new_empty(shape, dtype=x.dtype if out_dtype is None else out_dtype)


# ---- vmap ------------------------------------------------------------------------------------------------------------


def _front(x: Tensor, dim: int | None, dims: int) -> Tensor:
    """The batched dimension first, and then as many as `dims` in all; not batched, x as it is."""
    if dim is None:
        return x
    x = x.movedim(dim, 0)
    return x.reshape(x.shape[0], *(1,) * (dims - x.dim()), *x.shape[1:])


def _vmap_product(operator: Any) -> Call:
    def rule(info: Any, dims: tuple[Any, ...], a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, int]:
        batched = [(a, dims[0]), (b, dims[1])]
        if dims[0] is None and dims[1] is None:  # only the bias is batched
            batched[0] = (a.expand(info.batch_size, *a.shape), 0)
        most = max(x.dim() + (dim is None) for x, dim in batched)
        a, b = (_front(x, dim, most) for x, dim in batched)
        if rest and isinstance(rest[0], Tensor):  # a bias
            rest = (_front(rest[0], dims[2], most), *rest[1:])
        return operator(a, b, *rest), 0

    return rule


# ---- Autograd --------------------------------------------------------------------------------------------------------
# Each forward takes ctx itself: before a setup_context PyTorch inspects forward's signature in every call, which takes
# ten times as long as a small product.


def matrix(x: Tensor) -> Tensor:
    """The rows of all leading dimensions under each other."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


def sum_rows(dc: Tensor, dtype: torch.dtype, arithmetic: str, k_chunk: int | None) -> Tensor:
    """The gradient of a bias [N]: dc [rows, N] summed as one chain of products with 1."""
    ones = dc.new_ones(dc.shape[0], 1)  # of its kind, should it be a DTensor
    return torch.ops.pydet.gemm_db(ones, dc, dtype, arithmetic, k_chunk)[0]


def _gradient_of_bias(dc: Tensor, bias: Tensor, arithmetic: str, k_chunk: int | None) -> Tensor:
    if bias.dim() == 1:
        return sum_rows(matrix(dc), bias.dtype, arithmetic, k_chunk)
    if bias.shape != dc.shape:
        fail(UNSUPPORTED, f"gemm: no gradient for a bias of shape {tuple(bias.shape)}; want [N], or the result's shape")
    return dc.to(bias.dtype)


def _gradients_of_gemm(ctx: Any, dc: Tensor, of_a: bool, of_b: bool, of_bias: bool) -> tuple[Any, Any, Any]:
    (a, b, bias), arithmetic, k_chunk = ctx.saved_tensors, ctx.arithmetic, ctx.k_chunk
    da = db = dbias = None
    dy = dc.to(a.dtype)  # the gradient of the result, in the operands' type
    if of_a:
        da = torch.ops.pydet.gemm_da(dy, b, None, arithmetic, k_chunk)
    if of_b:
        rows = (a, dy) if b.dim() == a.dim() else (matrix(a), matrix(dy))
        db = torch.ops.pydet.gemm_db(*rows, None, arithmetic, k_chunk)
    if bias is not None and of_bias:
        dbias = _gradient_of_bias(dy, bias, arithmetic, k_chunk)
    return da, db, dbias


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
        return _gemm(a, b, bias, out_dtype, arithmetic, k_chunk)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
        return *_gradients_of_gemm(ctx, dc, *ctx.needs_input_grad[:3]), None, None, None


class _GemmFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, initial: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        if a.shape[:-2] != b.shape[:-2] and b.dim() > 2:
            fail(UNSUPPORTED, "gemm_from: no gradient where batch dimensions broadcast unless b is a matrix")
        ctx.save_for_backward(a, b, bias)
        _, ctx.arithmetic, ctx.k_chunk = options
        return _gemm_from(a, b, initial, bias, *options)

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        da, db, dbias = _gradients_of_gemm(ctx, dc, wanted[0], wanted[1], wanted[3])
        return da, db, dc.to(torch.float32) if wanted[2] else None, dbias, None, None, None


class _SkinnyGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(x, w, bias)
        _, ctx.arithmetic, ctx.k_chunk, _ = options
        return _skinny_gemm(x, w, bias, *options)

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


# ---- The operators ---------------------------------------------------------------------------------------------------

_gemm = define(
    f"gemm(Tensor a, Tensor b, Tensor? bias=None, {GEMM_OPTIONS}) -> Tensor",
    run_gemm,
    _fake_gemm,
    gradient=_Gemm.apply,
    vmap=_vmap_product,
    autocast=2,
)
_gemm_from = define(
    f"gemm_from(Tensor a, Tensor b, Tensor initial, Tensor? bias=None, {GEMM_OPTIONS}) -> Tensor",
    _run_gemm_from,
    _fake_gemm_from,
    gradient=_GemmFrom.apply,
    autocast=2,
)
define(
    f"gemm_da(Tensor dc, Tensor b, {GEMM_OPTIONS}) -> Tensor",
    _run_gemm_da,
    _fake_gemm_da,
    vmap=_vmap_product,
    autocast=2,
)
define(
    f"gemm_db(Tensor a, Tensor dc, {GEMM_OPTIONS}) -> Tensor",
    _run_gemm_db,
    _fake_gemm_db,
    vmap=_vmap_product,
    autocast=2,
)
_skinny_gemm = define(
    f"skinny_gemm(Tensor x, Tensor w, Tensor? bias=None, {GEMM_OPTIONS}, bool weights_constant=False) -> Tensor",
    _run_skinny_gemm,
    _fake_skinny_gemm,
    gradient=_SkinnyGemm.apply,
    vmap=vmap_rows(1, 2),
    autocast=2,
)
