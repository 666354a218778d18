"""SGLang's sampler: log-probabilities by :func:`pydet.log_softmax`, tokens by :func:`pydet.sample`.

A request with ``sampling_seed`` has the tokens that :func:`pydet.torch.sample` draws of its logits by that seed and the
token's place in the sequence (the number of tokens before it). A request without one draws a seed as it comes, of
PyTorch's generator. Log-probabilities are of ``logits / temperature``, as SGLang's are, or of the logits, where the
environment variable ``SGLANG_RETURN_ORIGINAL_LOGPROB`` asks for that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch.overrides import TorchFunctionMode

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch import functions

Tensor = torch.Tensor
_SEED = "pydet_seed"  # an attribute of a request without a seed
_LOG_SOFTMAX = (torch.nn.functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax)
_TOPK = (torch.topk, torch.Tensor.topk)


class Probabilities(TorchFunctionMode):
    """log_softmax along the last dimension, and topk, are pydet's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _LOG_SOFTMAX and (args[1] if args[1:] else kwargs.get("dim")) in (-1, args[0].dim() - 1):
            return functions.log_softmax(args[0].float())
        if function in _TOPK and len(args) == 2 and kwargs in ({}, {"dim": -1}, {"dim": args[0].dim() - 1}):
            return torch.return_types.topk(functions.topk(*args))
        return function(*args, **kwargs)


def seed_of(request: Any) -> int:
    given = request.sampling_params.sampling_seed
    if given is not None:
        return int(given)
    if not hasattr(request, _SEED):
        setattr(request, _SEED, int(torch.randint(2**62, (), device="cpu")))
    return int(getattr(request, _SEED))


def forward(
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int]],
    positions: Tensor,
    *,
    logprob_logits: Tensor | None = None,
) -> Tensor:
    given = sampling_info
    if logprob_logits is not None or given.sampling_mask_batch_indices is not None:
        what = "a watermark" if logprob_logits is not None else "return_sampling_mask"
        fail(UNSUPPORTED, f"pydet.sglang: a request asks for {what}, want none")
    logits = self._preprocess_logits(logits_output.next_token_logits, given)
    greedy = given.top_ks <= 1
    how: dict[str, Any] = {"temperature": given.temperatures.view(-1).masked_fill(greedy, 0.0)}
    if given.need_top_k_sampling:
        how["top_k"] = given.top_ks.clamp(max=logits.shape[-1])
    if given.need_top_p_sampling:
        how["top_p"] = given.top_ps
    if given.need_min_p_sampling:
        how["min_p"] = given.min_ps
    tokens = functions.sample(logits, given.sampling_seed, positions.long() + 1, **how)[0]
    if not logits.is_cuda and (tokens < 0).any():
        fail(INVALID_VALUE, "pydet.sglang: a row of logits holds a NaN or +inf, or nothing but -inf; want numbers")
    if return_logprob:
        wide = logits.float()
        if not sampler.SGLANG_RETURN_ORIGINAL_LOGPROB:
            wide = wide / given.temperatures
        with Probabilities():
            found = self.output_logprob_processor.compute_logprobs(
                functions.log_softmax(wide), top_logprobs_nums, token_ids_logprobs, tokens
            )
        found.write_output_to(logits_output)
    self._sync_token_ids_across_tp(tokens, given)
    return tokens


def install() -> None:
    """Once in a process. Each batch then has the seeds of its requests."""
    if sampler.Sampler.forward is forward:
        return
    before = SamplingBatchInfo.from_schedule_batch.__func__
    of_scores = sampler.Sampler.compute_logprobs_only

    @functools.wraps(before)
    def of_requests(kind: Any, batch: Any, vocab_size: int) -> Any:
        made = before(kind, batch, vocab_size)
        seeds = torch.tensor([seed_of(x) for x in batch.reqs], dtype=torch.int64)
        made.sampling_seed = seeds.to(made.temperatures.device)
        return made

    @functools.wraps(of_scores)
    def compute_logprobs_only(*arguments: Any, **options: Any) -> Any:
        with Probabilities():
            return of_scores(*arguments, **options)

    SamplingBatchInfo.from_schedule_batch = classmethod(of_requests)
    sampler.Sampler.compute_logprobs_only = compute_logprobs_only
    sampler.Sampler.forward = forward
