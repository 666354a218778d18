"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``: linear layers become pydet's parallel ones.

    plan = {"*.q_proj": ColwiseParallel(), "*.o_proj": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cuda", (W,)), plan)

The parameters become DTensors, sharded as PyTorch's own styles of these names shard them; activations are plain
tensors. The extent that is shared out is cut into equal segments (``even=True``), 2880 into eight of 360: what they
divide runs on any number of ranks that divides them, with the same bits, and the rest on none, one rank among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from pydet._native import INVALID_VALUE, constants, fail
from pydet.ops import Arithmetic
from pydet.torch.distributed.exchange import Method, Tensor, shared
from pydet.torch.distributed.experts_model import Shares, Tokens, check_layers, share_layer
from pydet.torch.distributed.heads import segment_order, split_segments
from pydet.torch.distributed.linear import Rows, column_parallel_linear, row_parallel_linear


def _local(x: Any) -> Tensor | None:
    return x.to_local() if isinstance(x, DTensor) else x


class ColumnParallelLinear(torch.nn.Linear):
    """What :class:`ColwiseParallel` makes of an ``nn.Linear``."""

    style: ColwiseParallel
    mesh: Any

    def forward(self, x: Tensor) -> Tensor:
        group, style = self.mesh.get_group(), self.style
        weight, bias = _local(self.weight), _local(self.bias)
        assert weight is not None
        y = column_parallel_linear(
            x, weight, bias, group=group, segments=style.segments, out_features=self.out_features, even=True,
            rows=style.rows, method=style.method, arithmetic=style.arithmetic,
        )  # fmt: skip
        return torch.cat(split_segments(y, style.parts, style.segments), -1) if style.parts else y


class RowParallelLinear(torch.nn.Linear):
    """What :class:`RowwiseParallel` makes of an ``nn.Linear``."""

    style: RowwiseParallel
    mesh: Any

    def forward(self, x: Tensor) -> Tensor:
        group, style = self.mesh.get_group(), self.style
        weight, bias = _local(self.weight), _local(self.bias)
        assert weight is not None
        return row_parallel_linear(
            x, weight, bias, group=group, segments=style.segments, in_features=self.in_features, even=True,
            out=style.out, method=style.method, arithmetic=style.arithmetic,
        )  # fmt: skip


def _check(module: torch.nn.Module, mesh: Any, style: Any, extent: str) -> None:
    """Refuses what any number of ranks would, before anything is changed."""
    if not isinstance(module, torch.nn.Linear):
        fail(INVALID_VALUE, f"{type(style).__name__}: the module is {type(module).__qualname__}, want nn.Linear")
    if mesh.ndim != 1:
        fail(INVALID_VALUE, f"{type(style).__name__}: the mesh has {mesh.ndim} dimensions, want 1 (mesh['tp'])")
    shared(style.segments, mesh.size(), type(style).__name__, "segments")
    shared(getattr(module, extent), style.segments, type(style).__name__, extent, "segments")


def _parallelize(module: torch.nn.Module, mesh: Any, kind: type, style: Any, weight: Any, bias: Any) -> torch.nn.Module:
    for name, placement in (("weight", weight), ("bias", bias)):
        parameter = getattr(module, name)
        if parameter is not None:
            sharded = distribute_tensor(parameter.data, mesh, [placement])
            setattr(module, name, torch.nn.Parameter(sharded, parameter.requires_grad))
    module.__class__ = kind
    module.style, module.mesh = style, mesh
    return module


class ColwiseParallel(ParallelStyle):
    """:func:`column_parallel_linear`: the weight is sharded by rows, and so are y's columns.

    Args:
        parts: of a fused layer, the rows of each of its parts, [gate; up] or [q; k; v]. The weight is then laid out
            anew by :func:`segment_order`, and y is this rank's columns of the first part, then of the second, and so
            on: what ``y.chunk(2, -1)``, or a split by sizes that are divided by the ranks, expects.
        segments, rows, method, arithmetic: as there. Use the same segments on a mesh of one for the same bits.
    """

    def __init__(
        self,
        segments: int = 8,
        *,
        rows: Rows = "replicate",
        method: Method = "auto",
        arithmetic: Arithmetic = "auto",
        parts: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.segments, self.rows, self.method, self.arithmetic = segments, rows, method, arithmetic
        self.parts = tuple(parts)

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        _check(module, device_mesh, self, "out_features")
        if self.parts:
            assert isinstance(module, torch.nn.Linear)
            if sum(self.parts) != module.out_features:
                got, want = f"{list(self.parts)}", f"{module.out_features} rows"
                fail(
                    constants.PYDET_INVALID_SHAPE, f"ColwiseParallel: parts are {got}, want {want} in all, as the layer"
                )
            order = segment_order(self.parts, self.segments).to(module.weight.device)
            for parameter in (module.weight, module.bias):
                if parameter is not None:
                    parameter.data = parameter.data[order]
        return _parallelize(module, device_mesh, ColumnParallelLinear, self, Shard(0), Shard(0))


class RowwiseParallel(ParallelStyle):
    """:func:`row_parallel_linear`: the weight is sharded by columns, as x is.

    Args:
        segments, out, method, arithmetic: as there. Use the same segments on a mesh of one for the same bits.
    """

    def __init__(
        self, segments: int = 8, *, out: Rows = "replicate", method: Method = "auto", arithmetic: Arithmetic = "auto"
    ) -> None:
        super().__init__()
        self.segments, self.out, self.method, self.arithmetic = segments, out, method, arithmetic

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        _check(module, device_mesh, self, "in_features")
        return _parallelize(module, device_mesh, RowParallelLinear, self, Shard(1), Replicate())


class ExpertParallel(ParallelStyle):
    """:func:`shard_experts` of a layer of experts that :func:`pydet.torch.convert` was called with.

    Args:
        tokens: as there. ``replicate`` is the one beside parallel linear layers on the same mesh.
    """

    def __init__(self, *, tokens: Tokens = "replicate") -> None:
        super().__init__()
        self.tokens = tokens

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        if device_mesh.ndim != 1:
            fail(INVALID_VALUE, f"ExpertParallel: the mesh has {device_mesh.ndim} dimensions, want 1 (mesh['ep'])")
        check_layers("ExpertParallel", {"": module}, device_mesh, self.tokens)
        share_layer(module, Shares(device_mesh, self.tokens), {})
        return module
