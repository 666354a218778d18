"""Tensor and data parallel with the same bits on any number of ranks, over ``torch.distributed``.

    from pydet.torch.distributed import row_parallel_linear, column_parallel_linear

A sum that ranks share is cut into a fixed number of segments, whatever the number of ranks. Each rank makes the fp32
sums of its own segments, these are exchanged whole, and folded in ascending order (:func:`pydet.fold`): never
all-reduced, since the order of an all-reduce follows the ranks, the size of the message and the algorithm. So W = 1, 2,
4, 8 have the same bits, and the method of exchange decides none. ``segments``, like ``k_chunk``, decides bits.

It runs over what the process group is: gloo on CPUs, NCCL on GPUs. A call that one rank refuses is refused on every
rank, with a sentence; a rank that died is the group's to notice, by its connection or its time limit.
"""

from pydet.torch.distributed import sharding
from pydet.torch.distributed.context import context_parallel_attention, gather_context, shard_context
from pydet.torch.distributed.context_model import context_parallel
from pydet.torch.distributed.exchange import all_reduce, check_exchanges, reduce_scatter
from pydet.torch.distributed.experts import expert_parallel
from pydet.torch.distributed.experts_model import shard_experts
from pydet.torch.distributed.head import vocab_parallel_linear_log_prob
from pydet.torch.distributed.heads import segment_order, share_heads, split_segments
from pydet.torch.distributed.linear import column_parallel_linear, row_parallel_linear, segment_length, shard_bounds
from pydet.torch.distributed.main_grad import OrderedMainGrads
from pydet.torch.distributed.reduce import OrderedReduceScatter, OrderedState, clip_grad_norm_, ordered_hook
from pydet.torch.distributed.rows import rms_norm, vocab_parallel_log_prob
from pydet.torch.distributed.styles import ColwiseParallel, ExpertParallel, RowwiseParallel
from pydet.torch.distributed.tokens import context_parallel_embedding, context_parallel_linear, layer_norm

sharding.register()

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "OrderedMainGrads",
    "OrderedReduceScatter",
    "OrderedState",
    "RowwiseParallel",
    "all_reduce",
    "check_exchanges",
    "clip_grad_norm_",
    "column_parallel_linear",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_embedding",
    "context_parallel_linear",
    "expert_parallel",
    "gather_context",
    "layer_norm",
    "ordered_hook",
    "reduce_scatter",
    "rms_norm",
    "row_parallel_linear",
    "segment_length",
    "segment_order",
    "shard_bounds",
    "shard_context",
    "shard_experts",
    "share_heads",
    "split_segments",
    "vocab_parallel_linear_log_prob",
    "vocab_parallel_log_prob",
]
