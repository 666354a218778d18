"""The bench's own checks: it tells a changed bit, two kernels that disagree, and a peer's speed."""

import time

import numpy as np
import pytest

from bench import harness


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(harness.Cpu, "SAMPLES", 2)
    monkeypatch.setattr(harness.Cpu, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(harness.Cpu, "SETTLE_SECONDS", 1e-4)


def bits_ok(*variants, agrees=None):
    row = harness.Row("op", "1", "fp32", list(variants), peer="none", agrees=agrees)
    return [entry["bits_ok"] for entry in harness.measure(row, harness.Cpu(), 1)]


def writer(name, values):
    """A variant that writes the next of `values` at each call."""
    out, rest = np.zeros(3, np.float32), iter(values)
    return harness.Variant(name, [lambda: out.fill(next(rest, values[-1]))], [out])


def test_the_same_bits_are_ok():
    assert bits_ok(writer("a", [1.5]), writer("b", [1.5])) == [True, True]


def test_a_result_that_changes_is_found():
    assert bits_ok(writer("a", [1.5, 1.5, np.nextafter(np.float32(1.5), np.float32(2))])) == [False]


def test_kernels_that_disagree_are_found():
    assert bits_ok(writer("a", [1.5]), writer("b", [1.25])) == [False, False]
    assert bits_ok(writer("a", [0.0]), writer("b", [-0.0])) == [False, False]
    assert bits_ok(writer("a", [1.5]), agrees=lambda: False) == [False]


def test_a_timed_call_that_writes_nothing_is_found():
    out, calls = np.zeros(3, np.float32), []

    def only_once():
        if not calls:
            out.fill(1.5)
        calls.append(1)

    assert bits_ok(harness.Variant("a", [only_once], [out])) == [False]


def test_times_peer_and_rate():
    variants = [
        harness.Variant("fast", [lambda: time.sleep(0.002)]),
        harness.Variant("slow", [lambda: time.sleep(0.02)]),
    ]
    row = harness.Row("op", "1", "fp32", variants, peer="slow", work=2e6, unit="GMAC/s")
    fast, slow = harness.measure(row, harness.Cpu(), 1)
    assert fast["times_peer"] == pytest.approx(slow["us"] / fast["us"]) and fast["times_peer"] > 1
    assert slow["times_peer"] is None
    assert fast["rate"] == pytest.approx(2e6 / (fast["us"] * 1e-6) / 1e9)
    assert fast["bits_ok"] is None
    line = harness.table_line(fast)
    assert len(line) == len(harness.table_head().splitlines()[0])


def test_a_disturbed_sample_is_taken_again(monkeypatch):
    def sample(waited):
        cpu, calls, left = harness.Cpu(), [], list(waited)
        monkeypatch.setattr(harness.Cpu, "SETTLE_SECONDS", 0)
        monkeypatch.setattr(cpu, "waited", lambda: left.pop(0) if left else 0)
        assert cpu.sample([lambda: calls.append(time.perf_counter())], 1) > 0
        return len(calls), cpu.disturbed

    assert sample([0, 0]) == (1, 0)
    assert sample([0, 9, 9, 9]) == (2, 0)  # nine seconds without a core, then none
    assert sample(range(100)) == (harness.Cpu.RETRIES, 1)


def test_buffers_pass_the_cache():
    size = harness.cache_bytes()
    for bytes_per_set in (size // 3, size // 2, size, 4 * size):
        assert (harness.buffer_sets(bytes_per_set) - 1) * bytes_per_set >= size
    assert harness.buffer_sets(4 * size) == 2
    assert harness.buffer_sets(16) == 64
