"""Llama 4's mixtures of experts on pydet's (:mod:`pydet.torch.experts`): a token goes to its own experts alone, where
Transformers' code multiplies each token by the matrices of all, with a score of zero for most.

The modules take and return what those of Transformers do, so that each works beside one that stayed as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pydet.ops import Arithmetic
from pydet.torch.experts import FromExperts, ToExperts, product, route, sum_of_slots
from pydet.torch.stock import Derived

Tensor = torch.Tensor


class Experts(Derived, torch.nn.Module):
    """``Llama4TextExperts``: two matrices an expert, ``[E, K, 2 N]`` and ``[E, N, K]``."""

    if TYPE_CHECKING:
        arithmetic: Arithmetic
        k_chunk: int | None
        gate_up_proj: torch.nn.Parameter
        down_proj: torch.nn.Parameter
        act_fn: torch.nn.Module
    accumulates: Any = False  # see accumulate_gradients()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Of as many rows for each expert."""
        experts, size, _ = self.gate_up_proj.shape
        rows = hidden_states.reshape(-1, size)
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=rows.device) * (rows.shape[0] // experts)
        return self.of_rows(rows, ends)

    def of_rows(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Of rows that lie by experts, which end there."""
        how = None, ends, True, self.arithmetic, self.k_chunk
        gate, up = product(self, rows, self.gate_up_proj, *how).chunk(2, dim=-1)
        return product(self, up * self.act_fn(gate), self.down_proj, *how)


class Mixture(Derived, torch.nn.Module):
    """``Llama4TextMoe``: the shared expert's result, and the sum of a token's experts, in the order of their scores."""

    if TYPE_CHECKING:
        top_k: int
        hidden_dim: int
        num_experts: int
        experts: torch.nn.Module
        router: torch.nn.Module
        shared_expert: torch.nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(self.experts, Experts):
            kept: tuple[Tensor, Tensor] = super().forward(hidden_states)
            return kept
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        index = logits.detach().topk(self.top_k, dim=1).indices  # as the router chose them
        order, inverse, ends = route(index, self.num_experts)
        scores = FromExperts.apply(scores.gather(1, index).reshape(-1, 1), inverse, order)
        rows = self.experts.of_rows(ToExperts.apply(x, order, inverse) * scores, ends)
        rows = FromExperts.apply(rows, order, inverse)
        routed = rows if self.top_k == 1 else sum_of_slots(rows, rows.new_ones(index.shape), rows.dtype)
        return self.shared_expert(x) + routed, logits
