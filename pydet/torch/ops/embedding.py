"""``embedding`` and the gradient of its table."""

from __future__ import annotations

from typing import Any

import torch

from pydet._native import INVALID_DTYPE, INVALID_VALUE, constants, fail
from pydet.ops.embedding import _embedding, _embedding_backward
from pydet.shapes import text
from pydet.torch.ops.register import DTYPES, Dtype, Tensor, define, index_of, vmap_rows
from pydet.torch.ops.tracing import TRACED, operands

# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _check_ids(op: str, ids: Tensor, padding_idx: int | None, rows: Any) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        fail(INVALID_DTYPE, f"{op}: ids is {str(ids.dtype).removeprefix('torch.')}, want int32 or int64")
    if padding_idx is not None and (padding_idx < 0 or padding_idx >= rows):
        fail(INVALID_VALUE, f"{op}: padding_idx is {padding_idx}, want None or one of {rows} rows, from 0")


def _fake_embedding(w: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
    operands("embedding", w=w, ids=ids)
    if w.dtype not in DTYPES:
        got = str(w.dtype).removeprefix("torch.")
        fail(INVALID_DTYPE, f"embedding: w is {got}, want float32, bfloat16 or float16")
    if w.dim() != 2:
        fail(constants.PYDET_INVALID_SHAPE, f"embedding: w is {text(tuple(w.shape))}, want 2 dimensions")
    _check_ids("embedding", ids, padding_idx, w.shape[0])
    return w.new_empty((*ids.shape, w.shape[1]))


def _fake_backward(dout: Tensor, ids: Tensor, rows: int, padding_idx: int | None, out_dtype: Dtype) -> Tensor:
    op = "embedding_backward"
    TRACED.norm(op, *operands(op, dout=dout, ids=ids)[:1])
    _check_ids(op, ids, padding_idx, rows)
    got, want = tuple(ids.shape), tuple(dout.shape[:-1])
    TRACED.require(got == want, lambda: f"{op}: ids is {text(got)}, want {text(want)}")
    return dout.new_empty((rows, dout.shape[-1]), dtype=out_dtype or dout.dtype)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _run_embedding(w: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
    if padding_idx is not None:
        _check_ids("embedding", ids, padding_idx, w.shape[0])
    made: Tensor = _embedding(w, ids.contiguous())
    return made


def _run_backward(dout: Tensor, ids: Tensor, rows: int, padding_idx: int | None, out_dtype: Dtype) -> Tensor:
    own = {"rows": rows, "padding_idx": padding_idx, "out_dtype": index_of(out_dtype)}
    dw: Tensor = _embedding_backward(dout, ids.contiguous(), **own)
    return dw


# ---- Autograd --------------------------------------------------------------------------------------------------------


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx = w.shape[0], padding_idx
        made: Tensor = _below(w, ids, padding_idx)
        return made

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.pydet.embedding_backward(dout, *ctx.saved_tensors, ctx.rows, ctx.padding_idx), None, None


# ---- The operators ---------------------------------------------------------------------------------------------------

_below = define(
    "embedding(Tensor w, Tensor ids, int? padding_idx=None) -> Tensor",
    _run_embedding,
    _fake_embedding,
    gradient=_Embedding.apply,
    vmap=vmap_rows(0),
)
define(
    "embedding_backward(Tensor dout, Tensor ids, SymInt rows, int? padding_idx=None, ScalarType? out_dtype=None)"
    " -> Tensor",
    _run_backward,
    _fake_backward,
)
