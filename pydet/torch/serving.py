"""What the plugins of engines share: attention of a step over keys that lie in pages, and how a model is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

import pydet
from pydet._native import UNSUPPORTED, fail
from pydet.ops.activation import Kind
from pydet.plugins import Settings
from pydet.torch import conversion, functions
from pydet.torch.conversion import Conversion

Tensor = torch.Tensor
Module = torch.nn.Module
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")  # in configurations of Transformers


# ---- Attention -------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A step's sequences. starts: cumulative query lengths. lengths: keys of each sequence, the step's own among them.
    longest: of them, at least."""

    tokens: int
    starts: Tensor
    lengths: Tensor
    pages: Tensor
    longest: int
    causal: bool
    windows: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def within(self, window: int) -> tuple[Tensor, ...]:
        """Pages, lengths, starts and first keys of each token as a sequence of its own. Layers of one window share
        them."""
        if window not in self.windows:
            counts = self.starts[1:] - self.starts[:-1]
            sequences = torch.arange(len(counts), device=counts.device)
            of = torch.repeat_interleave(sequences, counts, output_size=self.tokens)
            places = torch.arange(self.tokens + 1, dtype=torch.int32, device=counts.device)
            lengths = (self.lengths[of] - self.starts[1:][of] + places[:-1] + 1).int()
            self.windows[window] = self.pages[of], lengths, places, (lengths - window).clamp_(min=0)
        return self.windows[window]


def attend(
    plugin: str,
    step: Step,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    settings: Settings,
    out: Tensor,
) -> None:
    """A step's attention into the rows of its tokens of `out`; keys and values: [pages, tokens of a page, heads,
    elements]. Under a window each token has a first key of its own, and is a sequence of one query."""
    pages, lengths, starts, first = step.pages, step.lengths, step.starts, None
    if window is not None and not step.causal:
        fail(UNSUPPORTED, f"{plugin}: attention has a window of {window} and is not causal, want one of them")
    if window is not None and step.longest > window:
        pages, lengths, starts, first = step.within(window)
    pydet.attention_paged(
        query[: step.tokens],
        keys,
        values,
        pages,
        lengths,
        starts,
        scale=scale,
        causal=step.causal,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach(),
        first_key=first,
        arithmetic=settings.arithmetic,
        kv_chunk=settings.kv_chunk,
        out=out[: step.tokens],
    )


# ---- Models ----------------------------------------------------------------------------------------------------------


def gate(kind: Kind, gate_first: bool, x: Tensor) -> Tensor:
    """An activation of one half of each row, times the other."""
    one, other = x.chunk(2, -1)
    return functions.activation(one, kind, up=other) if gate_first else functions.activation(other, kind, up=one)


def refuse(plugin: str, checks: Iterable[tuple[bool, str, str]]) -> None:
    """Refuses an engine's settings under which something other than pydet would decide bits.

    Args:
        checks: whether one is wrong, what it is, and what is wanted.
    """
    for wrong, got, want in checks:
        if wrong:
            fail(UNSUPPORTED, f"{plugin}: {got}, want {want}")


def _below(name: str, names: set[str]) -> bool:
    """A module of these, or one within such."""
    return any(name == x or name.startswith(f"{x}.") for x in names)


def complete(
    plugin: str,
    model: Module,
    report: Conversion,
    skipped: set[str],
    settings: Settings,
    calls_attention: Callable[[Module], bool],
    log: logging.Logger,
) -> Conversion:
    """Takes what an engine's plugin left of a model: the modules of PyTorch and Transformers, by
    :func:`pydet.torch.convert`.

    Args:
        plugin: its name.
        model: that an engine made.
        report: which modules of the engine were taken, or left and why.
        skipped: names of modules that are parts of such.
        settings: of the plugin.
        calls_attention: whether attention of a module is of the engine, and was taken.
        log: what was taken and left is written there.

    Returns:
        The report, of all that was taken and left.

    Raises:
        Error: something would be left, and the settings are strict.
    """
    named = dict(model.named_modules())
    known = {*report.swapped, *report.left, *skipped}
    others = conversion.convert(model, arithmetic=settings.arithmetic, k_chunk=settings.k_chunk)
    report.swapped.update((name, kind) for name, kind in others.swapped.items() if not _below(name, known))
    report.left.update((name, why) for name, why in others.left.items() if not _below(name, known))
    report.attention.update(
        (name, what)
        for name, what in others.attention.items()
        if not _below(name, known) and not calls_attention(named[name])
    )
    if report.left or report.attention:
        lines = "\n".join([f"{plugin}: this of the model would be left:", *report.remaining()])
        if settings.strict:
            fail(UNSUPPORTED, f"{lines}\nwant nothing, or strict=0")
        log.warning("%s", lines)
    log.info("%s: %d modules are pydet's:\n%s", plugin, len(report.swapped), "\n".join(_taken(report)))
    return report


def _taken(report: Conversion) -> Iterator[str]:
    for count, kind, names in conversion._grouped(report.swapped):
        yield f"  {count} x {kind}: {names}"
