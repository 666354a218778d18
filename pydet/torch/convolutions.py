"""Convolutions as one product of their windows: those of patches, and of sequences where windows overlap little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._jit_internal import is_scripting

from pydet.ops import Arithmetic
from pydet.torch import functions
from pydet.torch.accumulate import AccumulatingLinear, part_of

_MOST = 3  # how often an element may stand in the windows of a sequence, which are copied


def _windows(x: torch.Tensor, kernel: list[int], stride: list[int]) -> torch.Tensor:
    """``[B, C, X, Y ...]`` as ``[B, windows along X, along Y ..., C kernel[0] kernel[1] ...]``; what is over at the end
    of a dimension has no window."""
    order = [0]
    for i in range(len(kernel)):
        dim = 2 + 2 * i
        if kernel[i] == stride[i]:
            count = x.shape[dim] // kernel[i]
            x = x.narrow(dim, 0, count * kernel[i]).unflatten(dim, [count, kernel[i]])
        else:
            x = x.unfold(dim, kernel[i], stride[i]).movedim(-1, dim + 1)
        order.append(dim)
    order.append(1)
    for i in range(len(kernel)):
        order.append(3 + 2 * i)
    return x.permute(order).flatten(1 + len(kernel))


class Convolution(torch.nn.modules.conv._ConvNd):
    """What these have in common, ahead of ``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d``: same parameters, same
    ``state_dict``. :func:`pydet.torch.convert` makes them."""

    if TYPE_CHECKING:  # torch.jit.script reads annotations, and does not know these
        accumulates: Any
        pad: int
        arithmetic: Arithmetic
        k_chunk: int | None
    accumulates = False  # see accumulate_gradients()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batched = x.dim() == len(self.kernel_size) + 2
        x = x if batched else x[None]
        if self.pad > 0:
            x = torch.nn.functional.pad(x, [self.pad, self.pad])
        rows = _windows(x, list(self.kernel_size), list(self.stride))
        if is_scripting():
            w = self.weight.flatten(1)
            y = torch.ops.pydet.skinny_gemm(rows, w, self.bias, None, self.arithmetic, self.k_chunk)
        elif self.accumulates and torch.is_grad_enabled():
            how = self.arithmetic, self.k_chunk, None, part_of(self)
            y = AccumulatingLinear.apply(rows, self.weight, self.bias, *how)
        else:
            y = functions.skinny_gemm(rows, self.weight.flatten(1), self.bias, None, self.arithmetic, self.k_chunk)
        y = y.movedim(-1, 1).contiguous()
        return y if batched else y[0]

    def extra_repr(self) -> str:
        chunk = "" if self.k_chunk is None else f", k_chunk={self.k_chunk}"
        return f"{super().extra_repr()}, arithmetic={self.arithmetic}{chunk}"


class Conv1d(Convolution, torch.nn.Conv1d):
    """That of a sequence, as of Whisper's encoder."""


class Conv2d(Convolution, torch.nn.Conv2d):
    """That of patches of an image, as of ViT, CLIP and Swin: its stride is its window."""


class Conv3d(Convolution, torch.nn.Conv3d):
    """That of patches over time, as of Qwen2-VL."""


_KINDS = {torch.nn.Conv1d: Conv1d, torch.nn.Conv2d: Conv2d, torch.nn.Conv3d: Conv3d}


def convolution_class(module: Any) -> tuple[type, dict[str, Any]] | None:
    """The class and attributes of a convolution that is one product; None of others."""
    kind = _KINDS.get(type(module))
    if kind is None or module.groups != 1 or set(module.dilation) != {1} or module.padding_mode != "zeros":
        return None
    none = module.padding == "valid" or set(module.padding) == {0}
    if none and module.kernel_size == module.stride:
        return kind, {"pad": 0}
    if kind is not Conv1d or isinstance(module.padding, str) or module.kernel_size[0] > _MOST * module.stride[0]:
        return None
    return kind, {"pad": module.padding[0]}
