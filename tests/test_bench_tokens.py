"""The bench of embeddings, activations, the head, sampling and topk, all but its times: on a CPU, small."""

import contextlib
import functools
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

from bench import cuda_tokens, draws, harness  # noqa: E402
from test_bench_attention import Device  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(cuda_tokens, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_tokens, "sets_of", lambda size: 2)


SMALL = [functools.partial(cuda_tokens.sampling, 2, 130, filters) for filters in cuda_tokens.FILTERS]
SMALL += [functools.partial(cuda_tokens.largest, 3, 70, 5)]
SMALL += [
    functools.partial(make, kind, gated, 3, 40)
    for kind in cuda_tokens.SLOPES
    for gated in (False, True)
    for make in (cuda_tokens.activating, cuda_tokens.activation_gradient)
]
SMALL += [
    functools.partial(make, 30, 20, 16)
    for make in (cuda_tokens.looking_up, cuda_tokens.table_gradient, cuda_tokens.continued_gradient)
]
SMALL += [
    functools.partial(make, 16, 32, 50)
    for make in (cuda_tokens.head_step, cuda_tokens.head_forward, cuda_tokens.head_policy, cuda_tokens.head_dx)
]


@pytest.mark.parametrize("make", SMALL, ids=lambda make: f"{make.func.__name__} {make.args}")
def test_rows_run_and_have_their_bits(make):
    entries = harness.run([make], Device(), 0)
    assert entries[0]["variant"] == "pydet" and len(entries) > 1
    assert all(entry["bits_ok"] is not False and entry["times_peer"] in (1, None) for entry in entries)
    assert draws.summary(entries)


@pytest.mark.parametrize("operation", cuda_tokens.RANDOM)
def test_draws(operation):
    shapes = [row.args for row in cuda_tokens.RANDOM[operation](20, 1)]
    assert shapes == [row.args for row in cuda_tokens.RANDOM[operation](20, 1)] and len(set(shapes)) > 10
    assert shapes != [row.args for row in cuda_tokens.RANDOM[operation](20, 2)]
    assert len([*cuda_tokens.ROWS[operation](True)]) < len([*cuda_tokens.ROWS[operation](False)])


def test_the_command_knows_them():
    from bench import cuda

    assert set(cuda_tokens.ROWS) - {"head_dx"} == set(cuda_tokens.RANDOM)
    assert set(cuda_tokens.ROWS) <= set(cuda.ROWS) and set(cuda_tokens.RANDOM) <= set(cuda.RANDOM)


def test_a_graphs_stream_waits_for_what_made_the_operands(monkeypatch):
    """Without that, the product of `card()` was written over the probabilities that multinomial still read: the last
    row's calls were under way, and its memory was free."""
    from bench import cuda

    seen = []

    class Stream:
        def wait_stream(self, other):
            seen.append(("waits for", other))

    @contextlib.contextmanager
    def noted(kind, *arguments, **options):
        seen.append(kind)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current stream")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "stream", functools.partial(noted, "stream"))
    monkeypatch.setattr(torch.cuda, "graph", functools.partial(noted, "graph"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronize"))
    cuda.Cuda().graph([lambda: seen.append("call")], 2)
    assert seen == [("waits for", "the current stream"), "stream", "call", "synchronize", "graph", "call", "call"]
