"""``sample`` and ``topk``. Neither has a gradient."""

from __future__ import annotations

from typing import Any

import torch

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.ops.sample import _sample, _topk
from pydet.shapes import text
from pydet.torch.ops.register import Call, Tensor, define, vmap_rows
from pydet.torch.ops.tracing import TRACED, operands

# ---- Shapes, for tracing ---------------------------------------------------------------------------------------------

_WHOLE, _REAL = (torch.int32, torch.int64), (torch.float32,)


def _check_rows(x: Tensor, given: dict[str, Tensor | None]) -> None:
    """One number a row, of the types that it may have."""
    TRACED.norm("sample", *operands("sample", x=x))
    for name, values in given.items():
        if values is None:
            continue
        types = _WHOLE if name in ("seed", "position", "top_ks") else _REAL
        if values.dtype not in types:
            want = " or ".join(str(kind).removeprefix("torch.") for kind in types)
            fail(INVALID_DTYPE, f"sample: {name} is {str(values.dtype).removeprefix('torch.')}, want {want}")
        if tuple(values.shape) != tuple(x.shape[:-1]):
            shapes = text(tuple(values.shape)), text(tuple(x.shape[:-1]))
            fail(constants.PYDET_INVALID_SHAPE, f"sample: {name} is {shapes[0]}, want {shapes[1]}")


def _fake_sample(
    x: Tensor,
    seed: Tensor,
    position: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    temperatures: Tensor | None,
    top_ks: Tensor | None,
    top_ps: Tensor | None,
    min_ps: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = {"seed": seed, "position": position, "temperatures": temperatures, "top_ks": top_ks, "top_ps": top_ps}
    _check_rows(x, {**rows, "min_ps": min_ps})
    token, *log_probs = (x.new_empty(x.shape[:-1], dtype=kind) for kind in (torch.int64, torch.float32, torch.float32))
    return token, log_probs[0], log_probs[1]


def _fake_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    TRACED.norm("topk", *operands("topk", x=x))
    n = x.shape[-1]
    TRACED.require((k >= 1) & (k <= n), lambda: f"topk: k is {k}, want 1 to the {n} elements of a row")
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def _run_sample(
    x: Tensor,
    seed: Tensor,
    position: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    temperatures: Tensor | None,
    top_ks: Tensor | None,
    top_ps: Tensor | None,
    min_ps: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_rows = {"temperatures": temperatures, "top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps}
    return _sample(
        x,
        seed.contiguous(),
        position.contiguous(),
        return_log_prob=True,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        **{name: values.contiguous() for name, values in of_rows.items() if values is not None},
    )


def _run_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _topk(x, k)


# ---- The operators ---------------------------------------------------------------------------------------------------


def _vmap_sample(operator: Any) -> Call:
    """The rule of torch.vmap: what every row shares, such as logits of several seeds, each has for its own."""

    def rule(info: Any, dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        size = info.batch_size
        each = (
            x if not isinstance(x, Tensor) else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(given, dims, strict=True)
        )
        return operator(*each), (0, 0, 0)

    return rule


define(
    "sample(Tensor x, Tensor seed, Tensor position, float temperature=1., int top_k=0, float top_p=1., float min_p=0., "
    "Tensor? temperatures=None, Tensor? top_ks=None, Tensor? top_ps=None, Tensor? min_ps=None)"
    " -> (Tensor, Tensor, Tensor)",
    _run_sample,
    _fake_sample,
    vmap=_vmap_sample,
)
define("topk(Tensor x, int k) -> (Tensor, Tensor)", _run_topk, _fake_topk, vmap=vmap_rows())
