"""How ``torch.ops.pydet.*`` takes DTensors: shared out along what its sums do not run along, and never to be summed.

A placement that an operator takes as it is needs no exchange: rows of products, norms and softmaxes, columns of
products, batches and heads. What is shared out along a sum (K of a product, the rows under a weight's gradient) is
gathered first, so that every element is one rank's whole sum: the bits of one device. (That moves operands, where
:func:`pydet.torch.distributed.row_parallel_linear` moves partial sums.) A DTensor that is Partial is a sum by an
all-reduce that someone else began; it is finished before it comes here, and its bits are that all-reduce's.

The rules are registered when :mod:`pydet.torch.distributed` is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

Rule = tuple[list[Any], list[Any]]  # placements of the results, of the arguments; None for what is no tensor


def _last(x: Any, back: int = 1) -> int:
    return len(x.shape) - back


def _rules(results: int, arguments: tuple[Any, ...], *shared: dict[str, Any]) -> list[Rule]:
    """All replicated, and each of `shared`, {"out": dims, "0": dim of argument 0, ...}: what it does not name is so."""

    def place(dim: int | None) -> Any:
        return Replicate() if dim is None else Shard(dim)

    found: list[Rule] = []
    for dims in ({}, *shared):
        out = dims.get("out", [None] * results)
        given = [place(dims.get(str(i))) if hasattr(x, "shape") else None for i, x in enumerate(arguments)]
        found.append(([place(dim) for dim in out], given))
    return found


def _along(bias: Any, dim: int, dims: int) -> dict[str, Any]:
    """Where dimension `dim` of a result of so many dimensions lies in a bias of it, argument 2."""
    if bias is None or dim - dims + len(bias.shape) < 0:
        return {}
    return {"2": dim - dims + len(bias.shape)}


def _product(name: str) -> None:

    def rule(a: Any, b: Any, *rest: Any) -> list[Rule]:
        arguments, bias = (a, b, *rest), rest[0] if name == "gemm" and rest else None
        dims = max(len(a.shape), len(b.shape))
        # Which dimension of the operand, from the end, is M or N of the result (its last two).
        m_of, n_of = {"gemm": (2, 1), "gemm_da": (2, 2), "gemm_db": (1, 1)}[name]
        shared: list[dict[str, Any]] = [
            {"out": [dims - 2], "0": _last(a, m_of), **_along(bias, dims - 2, dims)},
            {"out": [dims - 1], "1": _last(b, n_of), **_along(bias, dims - 1, dims)},
        ]
        if a.shape[:-2] == b.shape[:-2]:
            shared += [{"out": [d], "0": d, "1": d, **_along(bias, d, dims)} for d in range(dims - 2)]
        elif len(b.shape) == 2:
            shared += [{"out": [d], "0": d, **_along(bias, d, dims)} for d in range(dims - 2)]
        return _rules(1, arguments, *shared)

    register_sharding(getattr(torch.ops.pydet, name).default)(rule)


def _skinny_gemm(x: Any, w: Any, bias: Any = None, *rest: Any) -> list[Rule]:
    dims = len(x.shape)
    shared = [{"out": [d], "0": d, **_along(bias, d, dims)} for d in range(dims - 1)]
    return _rules(1, (x, w, bias, *rest), *shared, {"out": [dims - 1], "1": 0, **_along(bias, dims - 1, dims)})


def _rows(name: str, results: int, rows: tuple[int, ...], replicated: tuple[int, ...] = ()) -> None:
    """An operator that works row by row on the arguments `rows`, any leading dimension of which may be shared out.

    replicated: results that sum over the rows: where there are such, and arguments for them, nothing is shared out.
    """

    def rule(*arguments: Any) -> list[Rule]:
        x, shared = arguments[rows[0]], []
        summed = bool(replicated) and arguments[2] is not None  # the weight
        for d in range(len(x.shape) - 1 if not summed else 0):
            given = {str(i): d for i in rows if i < len(arguments) and arguments[i] is not None}
            shared.append({"out": [None if r in replicated else d for r in range(results)], **given})
        return _rules(results, arguments, *shared)

    register_sharding(getattr(torch.ops.pydet, name).default)(rule)


def register() -> None:
    """Tells DTensor the rules."""
    for name in ("gemm", "gemm_da", "gemm_db"):
        _product(name)
    register_sharding(torch.ops.pydet.skinny_gemm.default)(_skinny_gemm)
    _rows("rmsnorm", 2, (0,))
    _rows("rmsnorm_residual", 3, (0, 1))
    _rows("rmsnorm_backward", 2, (0, 1, 3, 5), replicated=(1,))
    for name in ("softmax", "log_softmax"):
        _rows(name, 1, (0,))
        _rows(f"{name}_backward", 1, (0, 1))
    _rows("log_prob", 1, (0, 1))
    _rows("log_prob_backward", 1, (1, 0, 2))
