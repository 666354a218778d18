"""Who waits for whom among the folds of a device (pydet.torch.distributed.turns), by streams that are lists.

A fold of a group waits on its device for those of the other ranks. Here ranks run what their streams hold in any order
that streams and events allow: no two folds of a group run at a time, never more blocks than a fold may have, and all
end.
"""

import itertools
import random

import pytest

pytest.importorskip("torch")

from pydet.torch.distributed.turns import MOST_BLOCKS, Turns, blocks_of


class Event:
    position = None  # (stream, how much of it is before)


class Stream:
    def __init__(self):
        self.work, self.done = [], 0

    def wait_event(self, event):
        self.work.append(("wait", event.position))

    def record_event(self, event):
        event.position = self, len(self.work)


class Silent(Turns):
    """The negative control: nobody waits."""

    def _wait(self, group, stream, blocks):
        pass

    _wait_in_capture = _wait


class Rank:
    def __init__(self, kind=Turns):
        self.turns, self.streams = kind(Event), [Stream() for _ in range(4)]
        self.running, self.count = {}, 0  # stream -> (group, blocks, number)

    def fold(self, group, stream, blocks, capture=0):
        with self.turns.turn(group, self.streams[stream], blocks, capture):
            self.streams[stream].work.append(("fold", (group, blocks, self.count)))
        self.count += 1

    def ready(self):
        """The streams that can go on: to a fold that is to start, or past a wait."""
        for stream in self.streams:
            if stream not in self.running and stream.done < len(stream.work):
                what, value = stream.work[stream.done]
                if what == "fold" or value[0].done >= value[1]:
                    yield stream

    def step(self, stream):
        what, value = stream.work[stream.done]
        if what == "wait":
            stream.done += 1
        else:
            self.running[stream] = value

    def check(self):
        groups = [group for group, _, _ in self.running.values()]
        assert len(groups) == len(set(groups)), f"two folds of a group at a time: {groups}"
        held = sum(blocks for _, blocks, _ in self.running.values())
        assert held <= MOST_BLOCKS, f"{held} blocks at a time"


def run(ranks, rng):
    """All ranks in a random order; a fold ends when it runs on all of them. All of it must end."""
    while any(stream.done < len(stream.work) for rank in ranks for stream in rank.streams):
        choices = [(rank, stream) for rank in ranks for stream in rank.ready()]
        for rank, stream in rng.sample(choices, min(len(choices), rng.randint(0, 2))):
            rank.step(stream)
            rank.check()
        everywhere = set.intersection(*[{number for _, _, number in rank.running.values()} for rank in ranks])
        for rank in ranks:
            for stream in [s for s, fold in rank.running.items() if fold[2] in everywhere]:
                del rank.running[stream]
                stream.done += 1
        assert choices or everywhere, "they wait for each other"


def filled(rng, kind, count, capture=0, groups=4, ranks=2):
    made = [Rank(kind) for _ in range(ranks)]
    for _ in range(count):
        group, blocks = rng.randrange(groups), rng.choice((1, 3, 40, 64, 100, MOST_BLOCKS))
        stream = rng.randrange(4)
        for rank in made:
            rank.fold(group, stream, blocks, capture)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_folds_of_several_groups_on_several_streams(seed):
    rng = random.Random(seed)
    run(filled(rng, Turns, rng.randint(2, 60), groups=rng.randint(1, 4), ranks=rng.randint(1, 3)), rng)


def test_without_turns_it_would_be_seen():
    seen = 0
    for seed in range(20):
        with pytest.raises(AssertionError, match=r"at a time|wait for each other"):
            run(filled(random.Random(seed), Silent, 60), random.Random(seed))
        seen += 1
    assert seen == 20


@pytest.mark.parametrize("seed", range(10))
def test_branches_of_a_capture_are_one_sequence(seed):
    rng = random.Random(seed)
    ranks = filled(rng, Turns, 30, capture=7)
    for rank in ranks:
        rank.check = lambda rank=rank: len(rank.running) <= 1 or pytest.fail("two folds of a capture at a time")
    run(ranks, rng)


def test_an_event_of_another_capture_or_of_eager_calls_is_not_waited_for():
    """CUDA refuses both under capture."""
    rank = Rank()
    rank.fold(0, 0, 100)
    rank.fold(0, 1, 100, capture=1)
    rank.fold(0, 2, 100, capture=2)
    assert [what for what, _ in rank.streams[1].work + rank.streams[2].work] == ["fold", "fold"]
    rank.fold(0, 3, 100, capture=2)
    assert rank.streams[3].work[0][0] == "wait" and rank.streams[3].work[0][1][0] is rank.streams[2]
    rank.fold(0, 1, 100)  # and eager calls wait for eager ones
    assert rank.streams[1].work[1] == ("wait", (rank.streams[0], 1))


def test_small_folds_of_groups_wait_for_none():
    """So they may be called in another order on another rank."""
    first, other = Rank(), Rank()
    for group in range(3):
        first.fold(group, group, 40)
    for group in (2, 0, 1):
        other.fold(group, group, 40)
    for rank in (first, other):
        assert all(what == "fold" for stream in rank.streams for what, _ in stream.work)


def test_a_stream_orders_its_own():
    rank = Rank()
    for group, blocks in itertools.product(range(3), (MOST_BLOCKS, 1)):
        rank.fold(group, 0, blocks)
    assert all(what == "fold" for what, _ in rank.streams[0].work)


def test_blocks():
    """No fewer than the launcher of native/gpu/nvidia/fold_peers.cu takes."""
    for n in (1, 1023, 1024, 1025, 131072, 131073, 1 << 30):
        assert blocks_of(n) == max(1, min(MOST_BLOCKS, (n + 1023) // 1024))


def test_a_launch_that_is_refused_leaves_no_turn():
    rank = Rank()
    with pytest.raises(ValueError), rank.turns.turn(0, rank.streams[0], 5, 0):
        raise ValueError
    assert not rank.turns.latest
    rank.fold(1, 1, MOST_BLOCKS)
    assert [what for what, _ in rank.streams[1].work] == ["fold"]
