"""JetMoe's mixtures of experts, of feed-forward layers and of projections of attention, on pydet's: stably sorted,
multiplied by :func:`pydet.grouped_gemm`, and added in the order of a token's slots (:mod:`pydet.torch.experts`).

Their modules take and return what those of Transformers do, so that each works beside one that stayed as it was.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from pydet.ops import Arithmetic
from pydet.torch import functions
from pydet.torch.experts import FromExperts, ToExperts, inverse_of, product, route, sum_of_slots
from pydet.torch.shared import SharesParameters
from pydet.torch.stock import Derived

Tensor = torch.Tensor
Topology = tuple[Tensor, Tensor, Tensor, list[int]]  # order, tokens and gates of sorted rows; how many an expert has


class ParallelExperts(Derived, torch.nn.Module):
    """A matrix an expert, ``[E, N, K]``, for rows that lie by experts."""

    if TYPE_CHECKING:
        arithmetic: Arithmetic
        k_chunk: int | None
        weight: torch.nn.Parameter
    accumulates: Any = False  # see accumulate_gradients()

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        ends = torch.tensor(list(accumulate(expert_size)), dtype=torch.int32, device=inputs.device)
        return product(self, inputs, self.weight, None, ends, False, self.arithmetic, self.k_chunk)


class TopKGating(Derived, torch.nn.Module):
    """The experts of each token, and their weights."""

    if TYPE_CHECKING:
        num_experts: int
        top_k: int
        layer: torch.nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
        logits = self.layer(hidden_states).float()
        best, index = logits.topk(self.top_k, dim=1)
        order, inverse, ends = route(index, self.num_experts)
        gates = functions.softmax(best).type_as(hidden_states).reshape(-1, 1)
        gates = FromExperts.apply(gates, inverse, order)[:, 0]
        sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return order, order // self.top_k, gates, sizes, logits


class Mixture(SharesParameters):
    """What both mixtures have in common: a weighted sum of a token's results, and a bias behind it."""

    if TYPE_CHECKING:
        bias: torch.nn.Parameter
        router: TopKGating
        input_linear: ParallelExperts
        output_linear: ParallelExperts

    def combined(self, rows: Tensor, topology: Topology, shape: torch.Size) -> Tensor:
        """Of rows that lie by experts."""
        order, _, gates, sizes = topology
        inverse, y = inverse_of(order), self.output_linear(rows, sizes)
        weights = FromExperts.apply(gates[:, None], order, inverse).view(shape.numel(), self.router.top_k)
        dtype = torch.promote_types(y.dtype, weights.dtype)
        y = sum_of_slots(FromExperts.apply(y, order, inverse), weights, dtype)
        return y.view(*shape, y.shape[1]) + self.bias


class MixtureOfLayers(Mixture):
    """``JetMoeMoE``."""

    if TYPE_CHECKING:
        activation: torch.nn.Module

    def forward(self, layer_input: Tensor) -> Tensor:
        x = layer_input.flatten(0, 1)
        order, tokens, gates, sizes, _ = self.router(x)
        left, right = self.input_linear(ToExperts.apply(x, order, inverse_of(order)), sizes).chunk(2, dim=-1)
        return self.combined(self.activation(left) * right, (order, tokens, gates, sizes), layer_input.shape[:2])


class MixtureOfAttention(Mixture):
    """``JetMoeMoA``: JetMoe's attention calls `map` ahead and `reduce` behind."""

    def map(self, layer_input: Tensor) -> tuple[Tensor, Tensor, Topology]:
        x = layer_input.flatten(0, 1)
        order, tokens, gates, sizes, logits = self.router(x)
        inverse = inverse_of(order)
        q = FromExperts.apply(self.input_linear(ToExperts.apply(x, order, inverse), sizes), order, inverse)
        q = q.view(*layer_input.shape[:2], self.router.top_k, q.shape[1])
        return q, logits, (order, tokens, gates, sizes)

    def reduce(self, layer_input: Tensor, topo_info: Topology) -> Tensor:
        order = topo_info[0]
        rows = FromExperts.apply(layer_input.flatten(0, 2), inverse_of(order), order)  # by experts again
        return self.combined(rows, topo_info, layer_input.shape[:2])
