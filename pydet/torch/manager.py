"""The parts of Transformers' continuous batching that :func:`pydet.torch.continuous_batching` puts others for: what a
request samples by, the step that samples, the manager that makes both. Imported only where Transformers is."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, group_layers_by_attn_type
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.initialization import resolve_using_hints, resolve_without_hints
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import find_head_dim
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, fail
from pydet.torch.batching import check_attention
from pydet.torch.functions import sample

WHAT = "continuous_batching"
_OPTIONS: dict[
    str, tuple[Any, Any, str, Callable[[Any], bool]]
] = {  # of a request: what it is without one, its type, its range
    "temperature": (1.0, (int, float), "a number above 0", lambda x: 0 < x < math.inf),
    "top_k": (0, int, "a number from 0 up to 2^31 - 1", lambda x: 0 <= x < 1 << 31),
    "top_p": (1.0, (int, float), "a number from 0 to 1", lambda x: 0 <= x <= 1),
    "min_p": (0.0, (int, float), "a number from 0 to 1", lambda x: 0 <= x <= 1),
    "seed": (None, int, "a number of 64 bits", lambda x: -(1 << 63) <= x < 1 << 63),
}
_ROWS = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
# Which Transformers' engine of batches drops without a word, and what asks for nothing.
_DROPPED = {
    **{"min_new_tokens": 0, "num_beams": 1, "stop_strings": None, "max_time": None, "min_length": 0},
    **dict.fromkeys(("penalty_alpha", "prompt_lookup_num_tokens", "dola_layers", "bad_words_ids")),
    "exponential_decay_length_penalty": None,
}
_WARPERS = {  # of Transformers, by the option that each has
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


def _check_option(name: str, value: Any) -> None:
    _, kinds, want, fits = _OPTIONS[name]
    if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value):
        fail(INVALID_VALUE, f"{WHAT}: {name} is {value!r}, want {want}")


def _hashed(*words: Any) -> int:
    """A seed of 64 bits, the same in every process."""
    text = " ".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class Requests(ContinuousBatchingLogitsProcessorList):
    """In the place of the processors: what each request samples by, as rows of int32 beside the batch's other inputs.
    They are the lower and upper half of the seed, the position, temperature, top_k, top_p and min_p."""

    def __init__(self, processors: Any, samples: bool) -> None:
        self.samples, self.seed = samples, 0
        self.defaults = {name: default for name, (default, *_) in _OPTIONS.items()}
        for processor in processors:
            name = _WARPERS.get(type(processor))
            if name is None or getattr(processor, "min_tokens_to_keep", 1) != 1:
                kept = getattr(processor, "min_tokens_to_keep", 1)
                got = type(processor).__name__ if name is None else f"{name} with min_tokens_to_keep {kept}"
                fail(
                    UNSUPPORTED,
                    f"{WHAT}: the generation config asks for {got}, which pydet's sampler has not; want temperature, "
                    "top_k, top_p and min_p alone",
                )
            _check_option(name, getattr(processor, name))
            self.defaults[name] = getattr(processor, name)
        super().__init__(processors)
        self.tensors_required = 3 + len(_ROWS)

    def _validate_processors(self, drop_unsupported: bool) -> None:
        """They were validated."""

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        for name, value in kwargs.items():
            if name not in _OPTIONS:
                fail(INVALID_VALUE, f"{WHAT}: a request has {name}, want of {', '.join(_OPTIONS)}")
            _check_option(name, value)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.copy_(self._rows([])[:, :1])

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        if states:
            arg_storage[: self.tensors_required, : len(states)] = self._rows(states).to(arg_storage.device)
        return arg_storage

    def _rows(self, states: list[Any]) -> torch.Tensor:
        """Of no state: one column, of defaults."""
        given = [{**self.defaults, **state.logit_processor_kwargs} for state in states] or [self.defaults]
        seeds = [self._seed_of(state) for state in states] or [0]
        rows = torch.zeros((self.tensors_required, len(given)), dtype=torch.int32)
        rows[:2] = torch.tensor(seeds, dtype=torch.int64).view(torch.int32).reshape(-1, 2).T
        if states:
            rows[2] = torch.tensor([state.position_offset for state in states])
        for i, (name, kind) in enumerate(_ROWS.items(), 3):
            value = [options[name] if self.samples or name != "temperature" else 0.0 for options in given]
            rows[i] = torch.tensor(value, dtype=kind).view(torch.int32)
        return rows

    def _seed_of(self, state: Any) -> int:
        """A sequence that was forked off has one of its own."""
        given = state.logit_processor_kwargs.get("seed")
        _, forked, child = state.request_id.rpartition("__child#")
        if given is None:
            return _hashed(self.seed, state.request_id)
        return _hashed(given, "child", child) if forked else given


class Runner(ModelRunner):
    """A step whose tokens and log-probabilities are pydet's."""

    def _forward_process_and_sample(
        self, model: Any, batch_data: Any, carry_over_ids: Any, prev_output_ids: Any, output_ids: Any
    ) -> None:
        self.inputs_and_outputs.carry_over_tokens(batch_data["input_ids"], carry_over_ids, prev_output_ids)
        logits = model(**batch_data).logits
        if "logits_to_keep" not in batch_data:
            logits = logits[:, batch_data["logits_indices"]]
        rows = logits[0]
        given = batch_data["logits_processor_args"][:, : rows.shape[0]].contiguous()
        seed = (given[1].long() << 32) | (given[0].long() & 0xFFFFFFFF)
        options = {name: given[i].view(kind) for i, (name, kind) in enumerate(_ROWS.items(), 3)}
        token, log_prob, _ = sample(rows, seed, given[2], **options)
        output_ids[0, : rows.shape[0]] = token
        if self.return_logprobs:
            output_ids[1, : rows.shape[0]] = log_prob.view(torch.int32)


class Manager(ContinuousBatchingManager):
    """Transformers' manager, with attention over pages by pydet, :class:`Requests` and :class:`Runner`."""

    def __init__(self, model: Any, generation_config: Any, batching: Any, hints: Any) -> None:
        check_attention(WHAT, model)
        if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            fail(INVALID_DTYPE, f"{WHAT}: the model is {model.dtype}, want float32, bfloat16 or float16")
        for name, nothing in _DROPPED.items():
            value = getattr(generation_config, name, None)
            if value not in (None, nothing):
                fail(
                    UNSUPPORTED,
                    f"{WHAT}: the generation config asks for {name}={value!r}, which generate_batch of Transformers "
                    "does not know",
                )
        samples = bool(getattr(generation_config, "do_sample", True))
        requests = Requests(model._get_logits_processor(generation_config), samples)
        wanted = copy.deepcopy(batching)
        batching = copy.deepcopy(batching)
        batching.max_blocks_per_request = 0  # or else a warning that there is no flash attention
        super().__init__(model, generation_config, batching, hints)
        self.logit_processor = requests
        made = self.continuous_batching_config
        for name in ("varlen_compile_config", "decode_compile_config"):
            if getattr(made, name) is not None:
                fail(
                    UNSUPPORTED,
                    f"{WHAT}: {name} is set, want None and default_compile_level 0: what a compiled step does between "
                    "the modules has other bits than the trainer's",
                )
        made.max_blocks_per_request = _blocks(model.config.get_text_config(), wanted, hints)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """There is nothing to switch to: whatever ``auto_switch_to_flash`` says, it is the model's own attention."""
        check_attention(WHAT, model)

    def _create_batch_processor(self) -> Any:
        kept = self.batch_processor
        made = super()._create_batch_processor()
        if made is kept:
            made.cache.reset()  # prefixes too: the weights may be others by now
            return made
        self.logit_processor.seed = torch.initial_seed()  # as the processor has just set it, on all ranks of a group
        made.model_runner = Runner(
            logit_processor=made.logit_processor,
            cb_config=made.cb_config,
            cache=made.cache,
            inputs_and_outputs=made.inputs_and_outputs,
            do_sample=made.do_sample,
            return_logprobs=made.return_logprobs,
        )
        outputs, theirs = made.inputs_and_outputs, made.inputs_and_outputs.prepare_batch_update

        def prepare_batch_update() -> Any:
            found = theirs()
            asked = [request.state.request_id for request in found[0] if request.has_new_token]
            for name, token in zip(asked, found[1], strict=False):
                if token < 0:
                    fail(INVALID_VALUE, f"{WHAT}: the logits of {name} hold a NaN or inf, want numbers")
            return found

        outputs.prepare_batch_update = prepare_batch_update
        return made


def _blocks(config: Any, wanted: Any, hints: Any) -> int:
    """How many pages a sequence may have to be decoded in its pages. Windows are a ring, which attention over pages
    does not know, and it takes widths of 8: their keys are gathered."""
    kinds = group_layers_by_attn_type(config)
    if find_head_dim(config) % 8 or not all(ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds):
        return 0
    resolve_using_hints(wanted, hints)
    resolve_without_hints(wanted)
    return int(wanted.max_blocks_per_request)


def make(model: Any, generation_config: Any, batching: Any, hints: Any) -> Any:
    """What ``init_continuous_batching`` makes, or finds."""
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if kept is not None:
        if not isinstance(kept, Manager):
            fail(
                INVALID_VALUE,
                f"{WHAT}: the model has kept a {type(kept).__qualname__} of before; want "
                "model.destroy_cached_continuous_batching_manager() first",
            )
        kept.switch_to_cb_friendly_attn(model)
        return kept
    generation = model.generation_config if generation_config is None else generation_config
    if generation.eos_token_id is None:
        generation.eos_token_id = -1
    if batching is None:
        batching = getattr(generation, "continuous_batching_config", None) or ContinuousBatchingConfig()
    return Manager(model, generation, batching, hints)
