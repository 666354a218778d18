"""``softmax``, ``log_softmax`` and ``log_prob``, and the three that their gradients call."""

from __future__ import annotations

from typing import Any

import torch

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.ops.softmax import (
    _log_prob,
    _log_prob_backward,
    _log_softmax,
    _log_softmax_backward,
    _softmax,
    _softmax_backward,
)
from pydet.shapes import text
from pydet.torch.ops.register import Call, Tensor, define, vmap_rows
from pydet.torch.ops.tracing import TRACED, operands

# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------


def _fake_rows(op: str) -> Call:
    def fake(x: Tensor) -> Tensor:
        TRACED.norm(op, *operands(op, x=x))
        return x.new_empty(x.shape)

    return fake


def _fake_gradient(op: str) -> Call:
    def fake(dy: Tensor, y: Tensor) -> Tensor:
        rows, gradient = operands(op, y=y, dy=dy)
        TRACED.norm(op, rows, (gradient,))
        return y.new_empty(y.shape)

    return fake


def _check_columns(op: str, x: Tensor, index: Tensor, dlog_prob: Tensor | None = None) -> None:
    rows, _, gradient = operands(op, x=x, index=index, dlog_prob=dlog_prob)
    TRACED.norm(op, rows, (), None, gradient)
    if index.dtype not in (torch.int32, torch.int64):
        fail(INVALID_DTYPE, f"{op}: index is {str(index.dtype).removeprefix('torch.')}, want int32 or int64")
    if tuple(index.shape) != tuple(x.shape[:-1]):
        shapes = text(tuple(index.shape)), text(tuple(x.shape[:-1]))
        fail(constants.PYDET_INVALID_SHAPE, f"{op}: index is {shapes[0]}, want {shapes[1]}")


def _fake_log_prob(x: Tensor, index: Tensor) -> Tensor:
    _check_columns("log_prob", x, index)
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_log_prob_backward(dlog_prob: Tensor, x: Tensor, index: Tensor) -> Tensor:
    _check_columns("log_prob_backward", x, index, dlog_prob)
    return x.new_empty(x.shape)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _run_log_prob(x: Tensor, index: Tensor) -> Tensor:
    return _log_prob(x, index.contiguous())


def _run_log_prob_backward(dlog_prob: Tensor, x: Tensor, index: Tensor) -> Tensor:
    return _log_prob_backward(dlog_prob.contiguous(), x, index.contiguous())


# ---- Autograd --------------------------------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _softmax_op(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return torch.ops.pydet.softmax_backward(dy, *ctx.saved_tensors)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _log_softmax_op(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return torch.ops.pydet.log_softmax_backward(dy, *ctx.saved_tensors)


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(x, index)
        return _log_prob_op(x, index)

    @staticmethod
    def backward(ctx: Any, dlog_prob: Tensor) -> tuple[Tensor, None]:
        return torch.ops.pydet.log_prob_backward(dlog_prob, *ctx.saved_tensors), None


# ---- The operators ---------------------------------------------------------------------------------------------------


def _define(signature: str, run: Call, fake: Call, function: Any = None) -> Call:
    gradient = None if function is None else function.apply
    return define(f"{signature} -> Tensor", run, fake, gradient=gradient, vmap=vmap_rows())


_softmax_op = _define("softmax(Tensor x)", _softmax, _fake_rows("softmax"), _Softmax)
_log_softmax_op = _define("log_softmax(Tensor x)", _log_softmax, _fake_rows("log_softmax"), _LogSoftmax)
_log_prob_op = _define("log_prob(Tensor x, Tensor index)", _run_log_prob, _fake_log_prob, _LogProb)
for _name, _run in (("softmax_backward", _softmax_backward), ("log_softmax_backward", _log_softmax_backward)):
    _define(f"{_name}(Tensor dy, Tensor y)", _run, _fake_gradient(_name))
_define("log_prob_backward(Tensor dlog_prob, Tensor x, Tensor index)", _run_log_prob_backward, _fake_log_prob_backward)
