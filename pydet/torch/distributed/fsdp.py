"""Over which ranks FSDP2 sums the gradients around a module, whose own it may have been told to ignore."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

_found: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, list[list[int]]]] = weakref.WeakKeyDictionary()


def ranks_around(module: torch.nn.Module) -> list[list[int]]:
    """Those of each mesh that ``fully_shard`` was given for parameters of the modules that this one is in."""
    if "torch.distributed.fsdp" not in sys.modules:  # which takes long to import
        return []
    from torch.distributed._composable_state import _get_module_state
    from torch.distributed._composable_state import _module_state_mapping as known  # what fully_shard was called with
    from torch.distributed.fsdp import FSDPModule

    count, ranks = _found.get(module, (0, []))
    if count != len(known):
        around = [x for x in list(known) if isinstance(x, FSDPModule) and any(one is module for one in x.modules())]
        meshes = [group.mesh_info.mesh.mesh for x in around for group in _groups(_get_module_state(x))]
        ranks = [list(x) for x in dict.fromkeys(tuple(sorted(mesh.flatten().tolist())) for mesh in meshes)]
        _found[module] = len(known), ranks
    return ranks


def _groups(state: Any) -> list[Any]:
    """The groups of parameters that are reduced together, each over one mesh; PyTorch 2.11 has one in all."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [x for x in (state._fsdp_param_group,) if x is not None]
