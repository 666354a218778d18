"""``rotary_table`` and ``rotary``, by themselves and with the gradient of what is turned."""

from __future__ import annotations

from typing import Any

import torch

from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.ops.rotary import _rotary, _rotary_table
from pydet.shapes import text
from pydet.torch.ops.register import DTYPES, Dtype, Tensor, define, index_of, vmap_rows
from pydet.torch.ops.tracing import TRACED, operands

_POSITIONS = (torch.int32, torch.int64, *DTYPES)


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


# ---- The table -------------------------------------------------------------------------------------------------------


def _run_table(
    positions: Tensor, frequencies: Tensor, scale: float, twice: bool, out_dtype: Dtype
) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = _rotary_table(
        positions.contiguous(),
        frequencies.contiguous(),
        scale=scale,
        twice=twice,
        out_dtype=index_of(out_dtype),
    )
    return made


def _fake_table(
    positions: Tensor, frequencies: Tensor, scale: float, twice: bool, out_dtype: Dtype
) -> tuple[Tensor, Tensor]:
    op = "rotary_table"
    operands(op, positions=positions, frequencies=frequencies)
    if positions.dtype not in _POSITIONS:
        fail(INVALID_DTYPE, f"{op}: positions is {_type(positions)}, want a type of numbers up to 64 bits")
    if frequencies.dtype != torch.float32:
        fail(INVALID_DTYPE, f"{op}: frequencies is {_type(frequencies)}, want float32")
    if frequencies.dim() != 1:
        got = text(tuple(frequencies.shape))
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: frequencies is {got}, want 1 dimension")
    shape = (*positions.shape, frequencies.shape[0] * (2 if twice else 1))
    dtype = torch.float32 if out_dtype is None else out_dtype
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


# ---- Heads -----------------------------------------------------------------------------------------------------------

# How a rotation is asked for. The gradient is in float32 by itself, and of the type of q.
_HOW = (
    "bool whole=False, bool neighbours=False, bool out_neighbours=False, bool in_fp32=False, bool transposed=False, "
    "bool heads_first=False, ScalarType? out_dtype=None, bool gradient_in_fp32=False"
)


def _run(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    whole: bool,
    neighbours: bool,
    out_neighbours: bool,
    in_fp32: bool,
    transposed: bool,
    heads_first: bool,
    out_dtype: Dtype,
    gradient_in_fp32: bool,
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _rotary(
        q,
        k,
        cos,
        sin,
        whole=whole,
        neighbours=neighbours,
        out_neighbours=out_neighbours,
        in_fp32=in_fp32,
        transposed=transposed,
        heads_first=heads_first,
        out_dtype=index_of(out_dtype),
    )
    return q_out, q.new_empty(0) if k_out is None else k_out


def _fake(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    op, (*_, heads_first, out_dtype, _) = "rotary", how
    of_q, of_k, of_cos, of_sin = operands(op, q=q, k=k, cos=cos, sin=sin)
    TRACED.read(op, of_q, 3 if heads_first else 2)
    for x in (of_cos, of_sin):
        TRACED.read(op, x, 1)
    TRACED.same_type(op, of_cos, of_sin)
    TRACED.want(op, of_sin, of_cos.shape)
    if k is not None:
        shape, heads = list(of_q.shape), -3 if heads_first else -2
        TRACED.read(op, of_k, len(shape))
        TRACED.same_type(op, of_q, of_k)
        shape[heads] = of_k.shape[heads]
        TRACED.want(op, of_k, tuple(shape))
    dtype = q.dtype if out_dtype is None else out_dtype
    made = q.new_empty(q.shape, dtype=dtype)
    return made, q.new_empty(0) if k is None else q.new_empty(k.shape, dtype=dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        if cos.requires_grad or sin.requires_grad:
            fail(INVALID_VALUE, "rotary: cos or sin requires grad, and there is none by them; want .detach()")
        ctx.save_for_backward(cos, sin)
        whole, neighbours, out_neighbours, in_fp32, transposed, heads_first, _, gradient_in_fp32 = how
        ctx.how = (whole, out_neighbours, neighbours, gradient_in_fp32, not transposed, heads_first, q.dtype, in_fp32)
        ctx.has_k = k is not None
        made: tuple[Tensor, Tensor] = _below(q, k, cos, sin, *how)
        return made

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
        of_q, of_k = torch.ops.pydet.rotary(dq, dk if ctx.has_k else None, *ctx.saved_tensors, *ctx.how)
        return of_q, of_k if ctx.has_k else None, *(None,) * 10


def _vmap(operator: Any) -> Any:
    """Rows of the table may be those of all."""

    def rule(info: Any, dims: tuple[Any, ...], q: Tensor, k: Any, cos: Tensor, sin: Tensor, *how: Any) -> Any:
        if dims[0] is None or (k is not None and dims[1] is None):
            fail(UNSUPPORTED, "rotary: vmap wants q and k batched")
        given = zip((q, k, cos, sin), dims, strict=False)
        rows = [x if x is None else x[None] if dim is None else x.movedim(dim, 0) for x, dim in given]
        return operator(*rows, *how), (0, None if k is None else 0)

    return rule


# ---- The operators ---------------------------------------------------------------------------------------------------

define(
    "rotary_table(Tensor positions, Tensor frequencies, float scale=1.0, bool twice=False, ScalarType? out_dtype=None)"
    " -> (Tensor, Tensor)",
    _run_table,
    _fake_table,
    vmap=vmap_rows(1),
)
_below = define(
    f"rotary(Tensor q, Tensor? k, Tensor cos, Tensor sin, {_HOW}) -> (Tensor, Tensor)",
    _run,
    _fake,
    gradient=_Rotary.apply,
    vmap=_vmap,
)
