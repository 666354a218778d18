"""Cosines and sines of rotary embeddings, with the bits of a written formula on every device and in every graph.

PyTorch's ``cos`` and ``sin`` are one function on a CPU, others in a graph of Inductor's and on a GPU. Here they are
:func:`pydet.rotary_table`'s, made of additions, products and roundings in float64, which IEEE 754 says exactly.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pydet.ops.rotary import _rotary_table
from pydet.torch import code
from pydet.torch.ops import DTYPES
from pydet.torch.ops.register import Tensor, define, index_of, straight
from pydet.torch.stock import Derived, derived


def _run_cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """As the table of one position, 1, by the elements."""
    if not x.numel():
        return x.new_empty(x.shape), x.new_empty(x.shape)
    one, elements = torch.ones(1, dtype=torch.float32, device=x.device), x.detach().float().reshape(-1)
    cos, sin = _rotary_table(one, elements, out_dtype=index_of(x.dtype))
    return cos.view(x.shape), sin.view(x.shape)


define(
    "cos_sin(Tensor x) -> (Tensor, Tensor)",
    _run_cos_sin,
    lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)),
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


_table_of = straight("rotary_table")
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
        """cos or sin. The other, which was made with it, is kept until it is asked for."""
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
    """A rotary embedding of Transformers', whose cosines and sines are :func:`cos_sin`'s.

    Attributes:
        makes_table: None, or the steps of its forward are those of ``rotary_table``, twice as wide as its frequencies
            or not; they were tried.
    """

    makes_table: bool | None = None

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.makes_table is not None and len(arguments) + len(options) == 2:
            x = arguments[0] if arguments else options.get("x")
            places = arguments[1] if len(arguments) > 1 else options.get("position_ids")
            table = self._table(x, places)
            if table is not None:
                return table
        with Written():
            return super().forward(*arguments, **options)

    def _table(self, x: Any, places: Any) -> Any:
        frequencies, scale = self.inv_freq, getattr(self, "attention_scaling", 1.0)
        if not (isinstance(x, Tensor) and isinstance(places, Tensor) and isinstance(frequencies, Tensor)):
            return None
        if places.dim() != 2 or places.dtype not in (torch.int32, torch.int64) or x.dtype not in DTYPES:
            return None
        if frequencies.dim() != 1 or not frequencies.device == places.device == x.device:
            return None
        if not isinstance(scale, float | int) or scale == 0 or not math.isfinite(scale):
            return None
        return _table_of(places, frequencies.float(), scale, self.makes_table, x.dtype)


_STEADY = ("default", "linear", "llama3", "yarn")  # kinds whose frequencies are not those of a batch's longest


def _makes_table(module: Any) -> bool | None:
    """Whether a rotary embedding's table is twice as wide as its frequencies; None of one that computes otherwise."""
    frequencies = module._buffers.get("inv_freq")
    if not isinstance(frequencies, Tensor) or frequencies.is_meta or frequencies.dim() != 1:
        return None
    if getattr(module, "rope_type", None) not in _STEADY or type(frequencies) is not Tensor:
        return None
    stand_in = copy.copy(module)
    stand_in.__dict__["_buffers"] = {**module._buffers, "inv_freq": frequencies.detach().cpu()}
    stand_in.makes_table = None
    some = [[0, 1, 2, 3, 1000, 4095, 65_537, 131_071, 999_983], [5, 7, 12, 31, 0, 77, 8191, 50_000, 9]]
    places = torch.tensor(some, device="cpu")
    twice: bool | None = None
    for dtype in DTYPES:
        x = torch.empty(1, dtype=dtype, device="cpu")
        try:
            with torch.device("cpu"), torch.no_grad(), Written():
                found = type(module).forward(stand_in, x, places)
            twice = found[0].shape[-1] == 2 * len(frequencies)
            stand_in.makes_table = twice
            made = Rotary._table(stand_in, x, places)
        except Exception:  # whatever it is, it is not a function of a type and of places
            return None
        finally:
            stand_in.makes_table = None
        if len(found) != 2 or not all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, made, strict=True)
        ):
            return None
    return twice


def rotary_class(module: torch.nn.Module) -> Any:
    """What a rotary embedding becomes, and its attributes; None of a module that is none, and of one without cosines of
    its own."""
    kind: Any = type(module)
    if kind.__module__.partition(".")[0] in ("torch", "pydet") or any(True for _ in module.parameters()):
        return None
    if not any(word in kind.__name__.lower() for word in ("rotary", "rope")):
        return None
    if not code.names_in(kind) & {"cos", "sin", "polar"}:
        return None
    return derived(Rotary, kind), {"makes_table": _makes_table(module)}
