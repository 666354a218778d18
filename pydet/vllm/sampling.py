"""vLLM's sampler: log-probabilities by :func:`pydet.log_softmax`, tokens by :func:`pydet.sample`.

A request with a seed has the tokens that :func:`pydet.torch.sample` draws of its logits by that seed and the token's
place in the sequence (the number of tokens before it). A request without one draws a seed as it comes, of PyTorch's
generator.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch import functions

Tensor = torch.Tensor
_SEED = "pydet_seed"  # an attribute of a runner's state of a request without a seed


class _Rows:
    """Seeds and places of the rows that are being sampled; None where vLLM tries its sampler on rows of no request."""

    now: tuple[Tensor, Tensor] | None = None


def _seed_of(state: Any) -> int:
    given = state.sampling_params.seed
    if given is not None:
        return int(given)
    if not hasattr(state, _SEED):
        setattr(state, _SEED, int(torch.randint(2**62, (), device="cpu")))
    return int(getattr(state, _SEED))


def _rows_of(runner: Any) -> tuple[Tensor, Tensor]:
    requests = runner.input_batch.req_ids
    seeds = [_seed_of(runner.requests[name]) for name in requests]
    places = runner.seq_lens[: len(requests)]
    return torch.tensor(seeds, dtype=torch.int64).to(places.device), places.long()


def compute_logprobs(logits: Tensor) -> Tensor:
    return functions.log_softmax(logits.float())


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """The sampled token, then the likeliest, equal ones by ascending number; and the sampled token's rank."""
    own = logprobs.gather(-1, token_ids.unsqueeze(-1))
    columns, values = [token_ids.unsqueeze(-1)], [own]
    if num_logprobs:
        best, index = functions.topk(logprobs, num_logprobs)
        columns, values = [*columns, index], [*values, best]
    ranks = (logprobs >= own).sum(-1)
    return LogprobsTensors(torch.cat(columns, 1).int(), torch.cat(values, 1), ranks)


def greedy_sample(logits: Tensor) -> Tensor:
    """The first of the largest."""
    return functions.topk(logits, 1)[1].view(-1)


def sample(
    self: Any, logits: Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None
) -> tuple[Tensor, None]:
    given = sampling_metadata
    if given.all_greedy:
        return greedy_sample(logits), None
    zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    seeds, places = _Rows.now or (zeros, zeros)
    how: dict[str, Any] = {"temperature": given.temperature.masked_fill(given.temperature < _SAMPLING_EPS, 0.0)}
    how |= {name: x for name in ("top_k", "top_p") if (x := getattr(given, name)) is not None}
    for processor in given.logitsprocs.argmax_invariant:
        if type(processor) is not MinPLogitsProcessor:
            fail(
                UNSUPPORTED,
                f"pydet.vllm: the logits processor {type(processor).__qualname__} comes after the temperature, want "
                "those alone that come before it",
            )
        if processor.min_p_count:
            how["min_p"] = processor.min_p.view(-1)
    tokens = functions.sample(logits, seeds, places, **how)[0]
    if not logits.is_cuda and (tokens < 0).any():
        fail(INVALID_VALUE, "pydet.vllm: a row of logits holds a NaN or +inf, or nothing but -inf; want numbers")
    return tokens, None


def install() -> None:
    """Once in a process."""
    if Sampler.sample is sample:
        return
    before = GPUModelRunner._sample

    @functools.wraps(before)
    def of_requests(self: Any, *arguments: Any, **options: Any) -> Any:
        _Rows.now = _rows_of(self)
        self.input_batch.generators.clear()  # nobody draws of them, and vLLM cannot wind those of a CPU back
        try:
            return before(self, *arguments, **options)
        finally:
            _Rows.now = None

    GPUModelRunner._sample = of_requests
    Sampler.sample = sample
    Sampler.compute_logprobs = staticmethod(compute_logprobs)
    Sampler.gather_logprobs = staticmethod(gather_logprobs)
    Sampler.greedy_sample = staticmethod(greedy_sample)
