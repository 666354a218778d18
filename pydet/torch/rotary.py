"""Cosines and sines of rotary embeddings, with the bits of a written formula on every device and in every graph.

PyTorch's ``cos`` and ``sin`` are one function on a CPU, others in a graph of Inductor's and on a GPU. Here they are
made of additions, products and roundings in float64, which IEEE 754 says exactly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pydet.torch import code
from pydet.torch.ops import DTYPES
from pydet.torch.ops.register import Tensor, define
from pydet.torch.stock import Derived, derived

# pi / 2 in three parts: products of the first two with whole numbers below 2^20 are exact.
_PARTS = (float.fromhex("0x1.921fb544p+0"), float.fromhex("0x1.0b4611a6p-34"), float.fromhex("0x1.3198a2e037073p-69"))
_SINE = [(-1) ** n / math.factorial(2 * n + 1) for n in range(9)]
_COSINE = [(-1) ** n / math.factorial(2 * n) for n in range(9)]


def _series(factors: list[float], square: Tensor) -> Tensor:
    """``(((f_8 s) + f_7) s + ...) + f_0``, each product and each sum rounded."""
    y = torch.full_like(square, factors[-1])
    for factor in reversed(factors[:-1]):
        y = y * square + factor
    return y


def _run_cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """``cos(x), sin(x)``, computed in float64 and rounded once to the type of x.

        n = 2 x / pi to the nearest whole number, ties to even;   r = ((x - n p_0) - n p_1) - n p_2
        sine = r S(r r),  cosine = C(r r),  Taylor's to r^17 and r^16
        n mod 4 = 0, 1, 2, 3:   cos = cosine, -sine, -cosine, sine;   sin = sine, cosine, -sine, -cosine

    From 2^20 quarter turns on (1.6 million radians) r loses what n p_0 does not hold, and no more than its type does.
    """
    wide = x.detach().double()
    n = torch.round(wide * (2 / math.pi))
    r = wide
    for part in _PARTS:
        r = r - n * part
    square = r * r
    sine, cosine = r * _series(_SINE, square), _series(_COSINE, square)
    quarter = torch.remainder(n, 4)
    odd, behind = (quarter == 1) | (quarter == 3), quarter >= 2
    of_cos = torch.where(odd, sine, cosine)
    of_cos = torch.where((quarter == 1) | (quarter == 2), -of_cos, of_cos)
    of_sin = torch.where(odd, cosine, sine)
    of_sin = torch.where(behind, -of_sin, of_sin)
    return of_cos.to(x.dtype), of_sin.to(x.dtype)


define(
    "cos_sin(Tensor x) -> (Tensor, Tensor)",
    _run_cos_sin,
    lambda x: (torch.empty_like(x), torch.empty_like(x)),
)


def cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """``cos(x)`` and ``sin(x)`` of each element, by a written formula.

    Args:
        x: float32, bfloat16 or float16, any shape; radians, up to some million.

    Returns:
        Both, of the type of x, within half a unit of its last place and 2^-45; inf and NaN give NaN.
    """
    found: tuple[Tensor, Tensor] = torch.ops.pydet.cos_sin(x)
    return found


_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)


def _writes(function: Any, options: dict[str, Any]) -> bool:
    """Whether a function of PyTorch's writes one of its arguments, by its name."""
    name = getattr(function, "__name__", "")
    own = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    return own or name == "__setitem__" or "out" in options


class Written(TorchFunctionMode):
    """cos, sin and polar by the formula, and products over one number, which are that product."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[Tensor, dict[str, Tensor]] | None = None

    def take(self, x: Tensor, name: str) -> Tensor:
        """cos or sin. The other, which was made with it in some 65 steps, is kept until it is asked for."""
        if torch.compiler.is_compiling():
            return cos_sin(x)[name == "sin"]
        if self.kept is None or self.kept[0] is not x or name not in self.kept[1]:
            self.kept = x, dict(zip(("cos", "sin"), cos_sin(x), strict=True))
        return self.kept[1].pop(name)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.kept is not None and _writes(function, kwargs):
            self.kept = None  # what it was made of may be another by now
        x = args[0] if args else None
        if isinstance(x, Tensor) and not kwargs and not x.requires_grad:
            if len(args) == 1 and x.dtype in DTYPES:
                if function is torch.cos or function is torch.Tensor.cos:
                    return self.take(x, "cos")
                if function is torch.sin or function is torch.Tensor.sin:
                    return self.take(x, "sin")
            if function in _PRODUCTS and x.dim() > 1 and x.shape[-1] == 1 and args[1].dim() > 1:
                return x * args[1]
            if function is torch.polar and x.dtype == torch.float32:
                cos, sin = cos_sin(args[1])
                return torch.complex(x * cos, x * sin)
        return function(*args, **kwargs)


class Rotary(Derived, torch.nn.Module):
    """A rotary embedding of Transformers', whose cosines and sines are :func:`cos_sin`'s."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with Written():
            return super().forward(*arguments, **options)


def rotary_class(module: torch.nn.Module) -> Any:
    """What a rotary embedding becomes; None of a module that is none, and of one without cosines of its own."""
    kind: Any = type(module)
    if kind.__module__.partition(".")[0] in ("torch", "pydet") or any(True for _ in module.parameters()):
        return None
    if not any(word in kind.__name__.lower() for word in ("rotary", "rope")):
        return None
    return derived(Rotary, kind) if code.names_in(kind) & {"cos", "sin", "polar"} else None
