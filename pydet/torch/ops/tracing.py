"""The library's rules about shapes and types (:mod:`pydet.shapes`), of tensors that have no memory yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pydet._native import INVALID_DEVICE, fail
from pydet.shapes import Operand, Rules, Shape
from pydet.torch.compiled import warn_of_fusion


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


def one_device(op: str, given: Iterable[tuple[str, Any]]) -> None:
    """Refuses tensors of several devices. The dispatcher traces where one of them is on meta: results would be on the
    device of the others, and never written."""
    tensors = [(name, x) for name, x in given if isinstance(x, torch.Tensor)]
    for name, x in tensors[1:]:
        first_name, first = tensors[0]
        if x.device != first.device:
            fail(INVALID_DEVICE, f"{op}: {name} is on {x.device}, {first_name} is on {first.device}")


def operands(op: str, **given: torch.Tensor | None) -> list[Any]:
    """What the rules read, of tensors that are on one device."""
    warn_of_fusion()
    one_device(op, given.items())
    return [
        None if x is None else Operand(name, tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for name, x in given.items()
    ]
