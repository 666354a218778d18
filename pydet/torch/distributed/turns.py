"""Who waits for whom among the folds of a device: those of one group are one sequence, and all of them together fit.

A fold's blocks wait on the device for those of other ranks. Two folds of a group at a time would mix up their memory;
folds of several groups that fill a device leave no place for the one that another rank waits for. So before a fold is
launched its stream waits, by events, for the latest fold of its group, and for those of other groups whose blocks
would not fit beside its own: all that run at a time have ``MOST_BLOCKS`` blocks or fewer, what one fold alone may
have. Why that is few enough is said in native/gpu/nvidia/fold_peers.cu. Groups with small folds run beside each other
in any order; those with large ones go in the order of their calls, which must then be the same on all ranks, as NCCL
asks of its communicators.

Under capture the folds of a device become one sequence of the graph: a branch waits for the folds that were captured
before in other branches. So a replay runs one fold at a time, too, beside those of the eager calls. What orders a
replay behind other calls of its groups is the caller's (the stream, or an event). Without an order the kernel makes
one of them wait; where the ranks differ in which, all of them refuse (:meth:`Peers.check`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydet._native import constants

MOST_BLOCKS: int = constants.PYDET_FOLD_BLOCKS
_BLOCK = 1024  # elements


def blocks_of(elements: int) -> int:
    """No fewer than a fold of so many elements has."""
    return max(1, min(MOST_BLOCKS, -(-elements // _BLOCK)))


@dataclass
class _Latest:
    """The latest fold of a group: where it is, the event behind it, and the most blocks of any that may still run."""

    stream: Any
    event: Any
    blocks: int


class Turn:
    """One of :class:`Turns`; a class of its own, since a generator's context takes a call longer than its launch."""

    __slots__ = ("given", "stream", "turns")

    def __init__(self, turns: Turns, group: Any, stream: Any, blocks: int, capture: int) -> None:
        self.turns, self.stream, self.given = turns, stream, (group, stream, blocks, capture)

    def __enter__(self) -> Any:
        self.turns.begin(*self.given)
        return self.stream

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.turns.end(*self.given)
        else:
            self.turns.lock.release()


class Turns:
    """Of one device. Streams have ``wait_event`` and ``record_event``; `new_event` makes what they record."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self.lock, self.new_event = threading.RLock(), new_event
        self.latest: dict[Any, _Latest] = {}  # by group, the newest last
        self.captured: tuple[int, _Latest] | None = None  # of the latest capture

    def turn(self, group: Any, stream: Any, blocks: int, capture: int) -> Turn:
        """What is launched inside is this group's next fold, of so many blocks. capture: the capture's number, or 0."""
        return Turn(self, group, stream, blocks, capture)

    def begin(self, group: Any, stream: Any, blocks: int, capture: int) -> None:
        self.lock.acquire()
        try:
            if capture:
                self._wait_in_capture(stream, capture)
            else:
                self._wait(group, stream, blocks)
        except BaseException:
            self.lock.release()
            raise

    def end(self, group: Any, stream: Any, blocks: int, capture: int) -> None:
        """After what was launched, of the thread that began."""
        try:
            # A group's event is recorded anew: who waits for it already waits for what it was.
            before = None if capture else self.latest.pop(group, None)
            event = self.new_event() if before is None else before.event
            stream.record_event(event)
            if capture:
                self.captured = capture, _Latest(stream, event, blocks)
            else:
                self.latest[group] = _Latest(stream, event, blocks if before is None else max(blocks, before.blocks))
        finally:
            self.lock.release()

    def _wait(self, group: Any, stream: Any, blocks: int) -> None:
        held = blocks
        for other, fold in reversed(self.latest.items()):
            if fold.stream == stream:
                continue  # it is ahead on the stream
            if other != group and held + fold.blocks <= MOST_BLOCKS:
                held += fold.blocks
            else:
                stream.wait_event(fold.event)

    def _wait_in_capture(self, stream: Any, capture: int) -> None:
        if self.captured is not None and self.captured[0] == capture and self.captured[1].stream != stream:
            stream.wait_event(self.captured[1].event)
