"""The bench's own checks: it tells a changed bit, two kernels that disagree, and a peer's speed."""

import importlib.util
import json
import statistics
import time
from pathlib import Path

import numpy as np
import pytest

import pydet
from bench import harness, latency, plot

ROOT = Path(__file__).parent.parent


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


def entry(shape, ratio, variant="pydet", op="gemm forward"):
    return {
        "op": op, "shape": shape, "dtype": "bf16", "threads": 0, "variant": variant, "peer": "cublas",
        "times_peer": ratio,
    }  # fmt: skip


def png_size(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_what_a_plot_shows_of_a_shape():
    assert plot.along("gemm forward", "512 x 6144 x 4096") == ("M", 512)
    assert plot.along("gemm dB", "6144 x 4096 x 512") == ("M (summed)", 512)
    assert plot.along("rmsnorm_backward", "4096 x 256") == ("N", 256)
    entries = [entry("2 x 8 x 8", 1.5), entry("1 x 8 x 8", 0.5), entry("1 x 9 x 9", 2.0), entry("1 x 8 x 8", 3.0, "x")]
    assert plot.ratios_by_m(entries, "pydet") == {1: [0.5, 2.0], 2: [1.5]}


def test_plots_can_be_read_however_many_rows(need, tmp_path):
    need(importlib.util.find_spec("matplotlib"), "bench", "matplotlib is not installed")
    few = [entry(f"{m} x 64 x 64", 0.5 + m / 64) for m in (1, 2, 4)] + [entry("1 x 64 x 64", None, "cublas")]
    many = [entry(f"{m} x {n} x 64", 1 + n / m, v) for v in "abc" for m in (1, 2, 4, 300) for n in range(1, 9)]
    for number, entries in enumerate((few, many)):
        path = tmp_path / f"{number}.png"
        plot.write(path, entries)
        assert max(png_size(path)) <= 2000 and min(png_size(path)) > 100
    plot.overview(tmp_path / "overview.svg")
    assert f"pydet {plot.release()}" in (tmp_path / "overview.svg").read_text()


def test_committed_plots_can_be_read():
    plots = list(plot.RESULTS.glob("*.png"))
    assert plots and plot.OVERVIEW.is_file()
    for path in plots:
        assert max(png_size(path)) <= 2000, path.name


def test_latency_reports_every_situation():
    found = list(latency.rows(calls=20))
    assert [row[1] for row in found] == list(latency.SITUATIONS) * len(latency.SHAPES)
    assert all(0 < median <= late for *_, median, late in found)


# ---- What the pages say of results -----------------------------------------------------------------------------------


def release_of(name):
    return json.loads((plot.RESULTS / f"{name}.json").read_text())["versions"]["pydet"]


def test_the_figure_says_what_its_results_do():
    """Of this release, in its caption too."""
    few = plot.ratios_by_m(plot.rows("h100_skinny_gemm"), "pydet, weights_constant")
    drawn = [entry for entry in plot.rows("h100_gemm_random") if entry["op"] == "gemm forward"]
    many = [x for m, ratios in plot.ratios_by_m(drawn, "pydet").items() if m > max(few) for x in ratios]
    up_to_32 = statistics.geometric_mean(x for m, ratios in few.items() if m <= 32 for x in ratios)
    changed = [round(1e4 * row["differ"] / row["elements"]) for row in plot.rows("h100_equality") if row["differ"]]
    caption = (
        f"![On an H100, release {plot.release()}, for shapes of known models, pydet is {up_to_32:.1f} times as fast as "
        f"cuBLAS up to 32 rows and {statistics.geometric_mean(many):.2f} times above 128. cuBLAS changes "
        f"{min(changed)} to {max(changed)} of 10,000 elements where it splits K; pydet changes none.]"
    )
    assert plot.release() == pydet.__version__ and caption in (ROOT / "README.md").read_text()
    figure = plot.OVERVIEW.read_text()
    assert f">pydet {plot.release()}<" in figure and all(f"> {count}<" in figure for count in changed)


def test_pages_name_the_release_of_their_numbers():
    readme, calls = (ROOT / "README.md").read_text(), (ROOT / "docs/calls.md").read_text()
    assert f"release {release_of('cpu')} (fp8: {release_of('cpu_fp8')})" in readme
    assert f"On an H100, release {pydet.__version__}," in readme and f"release {pydet.__version__}, beside" in calls
    for name in (
        "gemm_random",
        "skinny_gemm",
        "rmsnorm",
        "rmsnorm_random",
        "layernorm_random",
        "softmax_random",
        "fold",
    ):
        assert release_of(f"h100_{name}") == pydet.__version__, name


def test_the_training_step_is_that_of_the_results():
    found = json.loads((plot.RESULTS / "h100_rl_alignment.json").read_text())
    ours, theirs = found["pydet"], found["torch"]
    step = [x["gradients, one batch and four micro-batches"]["ms a step"] for x in (ours, theirs)]
    text = " ".join((ROOT / "docs/calls.md").read_text().split())
    assert f"{step[0]:.1f} ms converted, {step[1]:.1f} ms not" in text
    ratios = [
        ours[f"decode in batches of {n}"]["tokens a second"] / theirs[f"decode in batches of {n}"]["tokens a second"]
        for n in (1, 3, 64)
    ]
    assert "Decoding 1, 3 and 64 sequences: {:.2f}, {:.2f} and {:.2f} of".format(*ratios) in text
