"""How ``torch.ops.pydet.*`` takes DTensors: shared out along what its sums do not run along, and never to be summed.

A placement that an operator takes as it is needs no exchange: rows of products, norms and softmaxes, columns of
products, batches and heads. What is shared out along a sum (K of a product, the rows under a weight's gradient) is
gathered first, so that every element is one rank's whole sum: the bits of one device. (That moves operands, where
:func:`pydet.torch.distributed.row_parallel_linear` moves partial sums.) A DTensor that is Partial is a sum by an
all-reduce that someone else began; it is finished before it comes here, and its bits are that all-reduce's.

The rules are registered when :mod:`pydet.torch.distributed` is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
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


def _along(bias: Any, dim: int, dims: int, argument: int = 2) -> dict[str, Any]:
    """Where dimension `dim` of a result of so many dimensions lies in a bias of it."""
    if bias is None or dim - dims + len(bias.shape) < 0:
        return {}
    return {str(argument): dim - dims + len(bias.shape)}


def _divide(x: Any, extent: int) -> bool:
    """All ranks of x's mesh divide it, whichever of the mesh's dimensions it is shared out over."""
    return bool(extent % x.mesh.size() == 0)


def _product(name: str) -> None:

    def rule(a: Any, b: Any, *rest: Any) -> list[Rule]:
        arguments, place = (a, b, *rest), {"gemm": 2, "gemm_from": 3}.get(name, 0)  # of the bias
        bias = arguments[place] if place and len(arguments) > place else None
        dims = max(len(a.shape), len(b.shape))
        beside: Callable[[int], dict[str, Any]] = lambda d: {  # noqa: E731
            **({"2": d} if name == "gemm_from" else {}),
            **_along(bias, d, dims, place),
        }
        # Which dimension of the operand, from the end, is M or N of the result (its last two).
        m_of, n_of = {"gemm_da": (2, 2), "gemm_db": (1, 1)}.get(name, (2, 1))
        shared: list[dict[str, Any]] = [
            {"out": [dims - 2], "0": _last(a, m_of), **beside(dims - 2)},
            {"out": [dims - 1], "1": _last(b, n_of), **beside(dims - 1)},
        ]
        if a.shape[:-2] == b.shape[:-2]:
            shared += [{"out": [d], "0": d, "1": d, **beside(d)} for d in range(dims - 2)]
        elif len(b.shape) == 2:
            shared += [{"out": [d], "0": d, **beside(d)} for d in range(dims - 2)]
        return _rules(1, arguments, *shared)

    register_sharding(getattr(torch.ops.pydet, name).default)(rule)


def _skinny_gemm(x: Any, w: Any, bias: Any = None, *rest: Any) -> list[Rule]:
    dims = len(x.shape)
    shared = [{"out": [d], "0": d, **_along(bias, d, dims)} for d in range(dims - 1)]
    return _rules(1, (x, w, bias, *rest), *shared, {"out": [dims - 1], "1": 0, **_along(bias, dims - 1, dims)})


def _rows(
    name: str, results: int, rows: tuple[int, ...], replicated: tuple[int, ...] = (), weights: tuple[int, ...] = (2,)
) -> None:
    """An operator that works row by row on the arguments `rows`, any leading dimension of which may be shared out.

    replicated: results that sum over the rows: where there are such, and `weights` for them, nothing is shared out.
    """

    def rule(*arguments: Any) -> list[Rule]:
        x, shared = arguments[rows[0]], []
        summed = bool(replicated) and any(arguments[i] is not None for i in weights)
        for d in range(len(x.shape) - 1 if not summed else 0):
            given = {str(i): d for i in rows if i < len(arguments) and arguments[i] is not None}
            shared.append({"out": [None if r in replicated else d for r in range(results)], **given})
        return _rules(results, arguments, *shared)

    register_sharding(getattr(torch.ops.pydet, name).default)(rule)


def _elements(name: str, results: int, tensors: int) -> None:
    """An operator that works element by element on its first arguments."""

    def rule(*arguments: Any) -> list[Rule]:
        shared = [{"out": [d] * results, **{str(i): d for i in range(tensors)}} for d in range(len(arguments[0].shape))]
        return _rules(results, arguments, *shared)

    register_sharding(getattr(torch.ops.pydet, name).default)(rule)


# ---- Attention: batches, heads where the ranks divide those of k, and queries where no gradient sums over them -------


def _mask(allowed: Any, q: Any, dim: int, argument: int) -> dict[str, Any]:
    return {} if allowed is None or allowed.shape[dim] != q.shape[dim] else {str(argument): dim}


def _attention(q: Any, k: Any, v: Any, allowed: Any, *rest: Any) -> list[Rule]:
    has_sinks = len(rest) > 3 and rest[3] is not None  # after scale, arithmetic and kv_chunk
    causal = len(rest) > 5 and rest[5]  # counts places from the last query
    shared: list[dict[str, Any]] = []
    for dim in (0, 1, 2):
        if dim == 0 or (dim == 1 and _divide(k, k.shape[1])) or (dim == 2 and not causal):
            keys = {"1": dim, "2": dim} if dim < 2 else {}
            sinks = {"7": 0} if has_sinks and dim == 1 else {}
            shared.append({"out": [dim, dim], "0": dim, **keys, **_mask(allowed, q, dim, 3), **sinks})
    return _rules(2, (q, k, v, allowed, *rest), *shared)


def _attention_backward(dout: Any, q: Any, k: Any, v: Any, allowed: Any, *rest: Any) -> list[Rule]:
    has_sinks = len(rest) > 4 and rest[4] is not None  # after out, lse, scale and arithmetic
    shared: list[dict[str, Any]] = []
    for dim in (0, 1):
        if _divide(k, k.shape[1]) if dim == 1 else not has_sinks:
            sinks = {"9": 0} if has_sinks else {}
            given = {str(i): dim for i in (0, 1, 2, 3, 5, 6)}
            shared.append({"out": [dim, dim, dim, sinks.get("9")], **given, **_mask(allowed, q, dim, 4), **sinks})
    return _rules(4, (dout, q, k, v, allowed, *rest), *shared)


# ---- fp8: scales go with what they scale, and groups of 128 are not cut ----------------------------------------------

_GROUP = 128


def _scaled_gemm(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any = None, *rest: Any) -> list[Rule]:
    dims, shared = max(len(a.shape), len(b.shape)), []
    rows = a.shape[-2]
    if a_scale is None or not a_scale.shape or a_scale.shape[-2] == rows:
        scale = {"2": _last(a_scale, 2)} if a_scale is not None and a_scale.shape else {}
        shared.append({"out": [dims - 2], "0": _last(a, 2), **scale, **_along(bias, dims - 2, dims, 4)})
    if _columns_share(b, b_scale):
        scale = {"3": _last(b_scale)} if b_scale is not None and b_scale.shape else {}
        shared.append({"out": [dims - 1], "1": _last(b), **scale, **_along(bias, dims - 1, dims, 4)})
    return _rules(1, (a, b, a_scale, b_scale, bias, *rest), *shared)


def _columns_share(b: Any, b_scale: Any) -> bool:
    """The columns of b can be shared out with their scales: blocks of 128 of them are not to be cut."""
    columns = b.shape[-1]
    if b_scale is None or not b_scale.shape or b_scale.shape[-1] == columns:
        return True
    return columns % _GROUP == 0 and _divide(b, columns // _GROUP)


def _by_word(name: str, rule: Any, argument: int, results: int) -> None:
    """A rule that asks for a word among the arguments. DTensor remembers what rules said by tensors and integers alone.

    Where it can't be told to look at the word, nothing is shared out.
    """
    overload = getattr(torch.ops.pydet, name).default
    register_sharding(overload)(rule)
    try:
        known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[overload]
        known.static_argnum = min(known.static_argnum, argument)
    except (AttributeError, KeyError):
        register_sharding(overload)(lambda *arguments: _rules(results, arguments))


def _quantized(x: Any, granularity: str) -> list[int]:
    """The dimensions along which x may be cut and its scales with it."""
    if granularity == "tensor":
        return []
    dims = len(x.shape)
    in_groups = [dim for dim in range(dims) if x.shape[dim] % _GROUP == 0 and _divide(x, x.shape[dim] // _GROUP)]
    rows = dims - 2 in in_groups if granularity == "block" else True
    columns = dims - 1 in in_groups and granularity != "row"
    return [*range(dims - 2), *[dims - 2] * rows, *[dims - 1] * columns]


def _quantize(x: Any, granularity: str = "row", *rest: Any) -> list[Rule]:
    shared = [{"out": [d, d], "0": d} for d in _quantized(x, granularity)]
    return _rules(2, (x, granularity, *rest), *shared)


def _quantize_transposed(x: Any, granularity: str = "row", *rest: Any) -> list[Rule]:
    dims, shared = len(x.shape), []
    for d in _quantized(x, "block"):  # groups of rows and of columns
        other = d if d < dims - 2 else 2 * dims - 3 - d
        shared.append({"out": [d, d, other, other], "0": d})
    return _rules(4, (x, granularity, *rest), *shared)


def _quantize_given(x: Any, scale: Any, granularity: str = "row", *rest: Any) -> list[Rule]:
    if scale.shape:
        shared = [{"out": [d], "0": d, "1": d} for d in _quantized(x, granularity)]
    else:
        shared = [{"out": [d], "0": d} for d in range(len(x.shape))]
    return _rules(1, (x, scale, granularity, *rest), *shared)


def _grouped_gemm(a: Any, b: Any, group_end: Any, bias: Any = None, *rest: Any) -> list[Rule]:
    columns = {"out": [1], "1": 2, **({} if bias is None else {"3": _last(bias)})}
    return _rules(1, (a, b, group_end, bias, *rest), columns)


def _scaled_grouped_gemm(
    a: Any, b: Any, group_end: Any, a_scale: Any, b_scale: Any, bias: Any = None, *rest: Any
) -> list[Rule]:
    arguments = (a, b, group_end, a_scale, b_scale, bias, *rest)
    if not _columns_share(b, b_scale):
        return _rules(1, arguments)
    scale = {"4": _last(b_scale)} if b_scale is not None and b_scale.shape else {}
    return _rules(1, arguments, {"out": [1], "1": 2, **scale, **({} if bias is None else {"5": _last(bias)})})


def register() -> None:
    """Tells DTensor the rules."""
    for name in ("gemm", "gemm_from", "gemm_da", "gemm_db"):
        _product(name)
    for name, rule in {
        "skinny_gemm": _skinny_gemm,
        "attention_backward": _attention_backward,
        "scaled_gemm": _scaled_gemm,
        "grouped_gemm": _grouped_gemm,
        "scaled_grouped_gemm": _scaled_grouped_gemm,
    }.items():
        register_sharding(getattr(torch.ops.pydet, name).default)(rule)
    _by_word("attention", _attention, 9, 2)  # causal
    _by_word("quantize", _quantize, 1, 2)
    _by_word("quantize_transposed", _quantize_transposed, 1, 4)
    _by_word("quantize_given", _quantize_given, 2, 1)
    _rows("rmsnorm", 2, (0,))
    _rows("rmsnorm_residual", 3, (0, 1))
    _rows("rmsnorm_quantize", 2, (0,))
    _rows("rmsnorm_quantize_residual", 3, (0, 1))
    _rows("rmsnorm_backward", 2, (0, 1, 3, 5), replicated=(1,))
    _rows("layernorm", 3, (0,))
    _rows("layernorm_residual", 4, (0, 1))
    _rows("layernorm_backward", 3, (0, 1, 4, 5, 7), replicated=(1, 2), weights=(2, 3))
    for name in ("softmax", "log_softmax"):
        _rows(name, 1, (0,))
        _rows(f"{name}_backward", 1, (0, 1))
    for name, tensors in {"": 1, "gated_": 2}.items():
        _elements(f"{name}activation", 1, tensors)
        _elements(f"{name}activation_backward", tensors, 1 + tensors)
    _rows("log_prob", 1, (0, 1))
    _rows("log_prob_backward", 1, (1, 0, 2))
