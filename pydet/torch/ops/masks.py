"""What a mask says of its queries: the ranges of keys that they see, as lengths that kernels take in its place.

A row of a mask is mostly a range: of a sequence behind padding, of one of several that are packed, of a window. Rows
that begin at one key, and whose ends move by one or stay, are a run: a sequence of its own, of causal or full
attention. So a masked prefill takes as few calls as an unmasked one, and each query has the bits that it has alone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pydet.torch.ops.register import Tensor

_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # of a mask that are looked at together
_KEPT = 4  # plans: a model's layers share a mask, or two

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """One call. kind: "dense" (all queries), "packed" or "paged". rows: which of the B Q rows it computes, None for
    all. masked: under the mask as well. lengths: what the function takes, on the device of the mask. sees: some row
    has a key."""

    kind: str
    causal: bool
    lengths: dict[str, Tensor]
    rows: Tensor | None = None
    masked: bool = False
    sees: bool = True


Plan = tuple[Part, ...]


@dataclass
class _Cache:
    """Plans of the last masks, found again while a mask lives and was not written to."""

    entries: tuple[tuple[Any, tuple[Any, ...], Plan | None], ...] = field(default=())

    def key_of(self, mask: Tensor, more: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        base = mask if mask._base is None else mask._base
        if mask.is_inference():  # it does not count its writes
            return None
        return base, (base._version, mask.shape, mask.stride(), mask.storage_offset(), *more)

    def find(self, key: tuple[Any, tuple[Any, ...]]) -> tuple[bool, Plan | None]:
        for mask, what, plan in self.entries:
            if mask() is key[0] and what == key[1]:
                return True, plan
        return False, None

    def keep(self, key: tuple[Any, tuple[Any, ...]], plan: Plan | None) -> None:
        alive = tuple(x for x in self.entries if x[0]() is not None)
        self.entries = ((weakref.ref(key[0]), key[1], plan), *alive)[:_KEPT]


_cache = _Cache()


def plan_of(given: Tensor, batch: int, causal: bool, keys_follow: bool, kv_chunk: int) -> Plan | None:
    """The calls that compute the rows of a mask ``[B, 1, Q, K]``, each row counted from the first key that it may see;
    None where some row is no range of keys, and rows begin at different ones.

    Args:
        given: the mask, or one for all sequences, ``[1, 1, Q, K]``.
        batch: sequences.
        causal: a query sees no key after its own place either.
        keys_follow: the keys of a sequence lie behind those of the one before it, as in a pack.
        kv_chunk: keys of a segment.

    The mask is read by the host, once while it lives.
    """
    key = _cache.key_of(given, (batch, causal, keys_follow, kv_chunk))
    if key is not None:
        known, plan = _cache.find(key)
        if known:
            return plan
    plan = _plan(given[:, 0], batch, causal, keys_follow, kv_chunk)
    if key is not None:
        _cache.keep(key, plan)
    return plan


def gradient_plan_of(given: Tensor, batch: int, causal: bool, may_pack: bool = True) -> Plan:
    """The calls that make the gradients under a mask ``[B or 1, H or 1, Q, K]``, whose results are put together.

    "packed": rows that are sequences which share no key, so that each is counted from its own first query. "dense":
    sequences of the batch (`rows`, None for all), under the mask where it says more than lengths. Which of them it is,
    a sequence of the batch says by itself, whatever the others are. may_pack: False for "dense" alone, beside a bias.
    """
    key = _cache.key_of(given, (batch, causal, may_pack, "gradient"))
    if key is not None:
        known, plan = _cache.find(key)
        if known and plan is not None:
            return plan
    found = _gradient_plan(given, batch, causal, may_pack)
    if key is not None:
        _cache.keep(key, found)
    return found


def _gradient_plan(given: Tensor, batch: int, causal: bool, may_pack: bool) -> Plan:
    shared = given.shape[1] == 1 or given.stride(1) == 0
    mask = given[:, 0] if shared else given.any(1)
    first, last, count = (np.broadcast_to(x, (batch, x.shape[1])) for x in _ranges(mask, causal))
    keys, queries, device, seen = mask.shape[2], mask.shape[1], mask.device, count > 0
    begin = np.where(seen, first, keys).min(1)
    packed = np.zeros(batch, bool)
    if shared:
        whole = (last - first == count).all()
        dense = _dense(first, last, seen, begin) if whole else None
        if dense is not None:
            full, length = dense
            return (Part("dense", not full, _on(device, {"first_key": begin, "seqlens_k": length})),)
        packed = (last - first == count).all(1) & _apart(first, last, seen) & may_pack
    parts = []
    if packed.any():
        of = packed[:, None] & seen
        runs = _runs(np.where(of, first, 0), np.where(of, last, 0), of, keys, True, device)
        parts += [part for part in runs if part.sees]
        assert all(part.kind == "packed" for part in parts)
    ends = np.arange(1, queries + 1) + (keys - queries)
    behind = causal | ((last <= ends) | ~seen).all(1)  # causal says nothing more then, but where a query stands
    for kind in (False, True):
        its = np.flatnonzero(~packed & (behind == kind))
        if len(its):
            rows = None if len(its) == batch else torch.from_numpy(its).to(device)
            parts.append(Part("dense", kind, _on(device, {"first_key": begin[its]}), rows, masked=True))
    return tuple(parts)


def _apart(first: Array, last: Array, seen: Array) -> Array:
    """[B]: whether runs of a sequence's rows share no key, and come in the order of their keys. Rows of a run begin at
    one key, and their ends move by one or stay."""
    behind = np.maximum.accumulate(np.where(seen, last, 0), 1)
    of_before = np.concatenate([np.zeros_like(first[:, :1]), first[:, :-1]], 1)
    end_before = np.concatenate([np.zeros_like(last[:, :1]), last[:, :-1]], 1)
    seen_before = np.concatenate([np.zeros_like(seen[:, :1]), seen[:, :-1]], 1)
    all_before = np.concatenate([np.zeros_like(behind[:, :1]), behind[:, :-1]], 1)
    step = last - end_before
    goes_on = seen_before & (first == of_before) & (step >= 0) & (step <= 1)
    # a run is causal or full: its steps are all 1, or all 0
    step_before = np.concatenate([np.full_like(step[:, :1], -1), step[:, :-1]], 1)
    on_before = np.concatenate([np.zeros_like(goes_on[:, :1]), goes_on[:, :-1]], 1)
    goes_on &= ~on_before | (step == step_before)
    return ((goes_on | (first >= all_before)) | ~seen).all(1)


def _plan(mask: Tensor, batch: int, causal: bool, keys_follow: bool, kv_chunk: int) -> Plan | None:
    first, last, count = (np.broadcast_to(x, (batch, x.shape[1])) for x in _ranges(mask, causal))
    keys, device, seen = mask.shape[2], mask.device, count > 0
    begin = np.where(seen, first, keys).min(1)
    if not (last - first == count).all():
        if ((first - begin[:, None]) * seen % kv_chunk).any():
            return None
        return (Part("dense", causal, _on(device, {"first_key": begin}), masked=True),)
    dense = _dense(first, last, seen, begin)
    if dense is not None:
        full, length = dense
        return (Part("dense", not full, _on(device, {"first_key": begin, "seqlens_k": length})),)
    return tuple(_runs(first, last, seen, keys, keys_follow, device))


def _ranges(mask: Tensor, causal: bool) -> tuple[Array, Array, Array]:
    """Each row's first key, the one after its last, how many it sees: ``[B, Q]``; 0, 0, 0 for none."""
    batch, queries, keys = mask.shape
    places = torch.arange(keys, dtype=torch.int32, device=mask.device)
    found = torch.empty((3, batch, queries), dtype=torch.int32, device=mask.device)
    step = max(_ELEMENTS.get(mask.device.type, 1 << 20) // max(batch * keys, 1), 1)
    for begin in range(0, queries, step):
        rows = mask[:, begin : begin + step]
        if causal:
            own = torch.arange(begin, begin + rows.shape[1], device=mask.device) + (keys - queries)
            rows = rows & (places <= own[:, None])
        part = found[:, :, begin : begin + step]
        part[0] = torch.where(rows, places, keys).amin(-1)
        part[1] = torch.where(rows, places + 1, 0).amax(-1)
        part[2] = rows.sum(-1, dtype=torch.int32)
    first, last, count = found.cpu().numpy()
    first[count == 0] = 0
    return first, last, count


def _on(device: torch.device, lengths: dict[str, Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x.astype(np.int32)).to(device) for name, x in lengths.items()}


def _dense(first: Array, last: Array, seen: Array, begin: Array) -> tuple[bool, Array] | None:
    """(full or causal, keys of each sequence), where each has one sequence of all its queries."""
    queries = first.shape[1]
    if not (first == begin[:, None])[seen].all():
        return None
    length = last.max(1)
    if (last == length[:, None]).all():
        return True, length
    leads = seen.argmax(1)
    length = np.where(seen.any(1), np.take_along_axis(last, leads[:, None], 1)[:, 0] + queries - 1 - leads, 0)
    ends = length[:, None] - queries + np.arange(1, queries + 1)
    return (False, length) if ((last == ends) | (~seen & (ends <= begin[:, None]))).all() else None


def _runs(first: Array, last: Array, seen: Array, keys: int, keys_follow: bool, device: torch.device) -> list[Part]:
    """Runs of rows as sequences, those with causal attention in one call and those with full in another."""
    batch, queries = first.shape
    starts, ends = first.ravel(), last.ravel()
    step = np.full(batch * queries, -1)  # of a row from the one before: 1 or 0, -1 where it is of another run
    moves = ends[1:] - ends[:-1]
    step[1:] = np.where((starts[1:] == starts[:-1]) & (moves >= 0) & (moves <= 1), moves, -1)
    step[1:][~seen.ravel()[:-1] & (moves == 1)] = -1
    step[::queries] = -1
    begins = step < 0
    begins[1:] |= (step[1:] != step[:-1]) & (step[:-1] >= 0)
    heads = np.flatnonzero(begins)
    sizes = np.diff(np.append(heads, batch * queries))
    full = (sizes > 1) & (np.append(step, -1)[heads + 1] == 0)
    parts = []
    for kind in (False, True):
        its = np.flatnonzero(full == kind)
        if not len(its):
            continue
        rows = None
        if len(its) < len(heads):
            rows = torch.from_numpy(np.flatnonzero(np.repeat(full == kind, sizes))).to(device)
        at, size = heads[its], sizes[its]
        begin, end, of = starts[at], ends[at + size - 1], at // queries
        cumulative = np.append(0, np.cumsum(size))
        sees = bool((end > begin).any())
        packed = _packed(begin + of * keys, end + of * keys, end > begin, cumulative) if keys_follow else None
        if packed is not None:
            parts.append(Part("packed", not kind, _on(device, packed), rows, sees=sees))
            continue
        lengths = {"block_table": of[:, None], "seqlens_k": end, "first_key": begin, "cu_seqlens_q": cumulative}
        parts.append(Part("paged", not kind, _on(device, lengths), rows, sees=sees))
    return parts


def _packed(begin: Array, end: Array, seen: Array, cumulative: Array) -> dict[str, Array] | None:
    """Cumulative lengths, where each run's keys lie behind those of the run before it. Keys of no run are sequences
    without queries."""
    behind = np.maximum.accumulate(np.append(0, np.where(seen, end, 0)))
    begin, end = np.where(seen, begin, behind[:-1]), np.where(seen, end, behind[:-1])
    if (begin < behind[:-1]).any():
        return None
    ends_k = np.stack([begin, end], 1).ravel()
    ends_q = np.stack([cumulative[:-1], cumulative[1:]], 1).ravel()
    keep = np.ones(len(ends_k), bool)
    keep[0::2] = begin > behind[:-1]
    return {"cu_seqlens_q": np.append(0, ends_q[keep]), "cu_seqlens_k": np.append(0, ends_k[keep])}
