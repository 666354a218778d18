"""The bench's own checks: it tells a changed bit, two kernels that disagree, and a peer's speed."""

import importlib.util
import json
import time
from pathlib import Path

import numpy as np
import pytest

import pydet
from bench import harness, latency, plot, quotes, summary

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


def test_what_a_device_reads_is_in_each_entry(monkeypatch):
    clocks = iter((1000, 1002))
    monkeypatch.setattr(harness.Cpu, "take", lambda self, calls, count: (1e-3, {"mhz": next(clocks), "watts": 5}))
    (one,) = harness.measure(harness.Row("op", "1", "fp32", [harness.Variant("a", [int])], peer="a"), harness.Cpu(), 1)
    assert (one["mhz"], one["watts"]) == (1001, 5) and "1001, 5" in harness.table_line(one)


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


def test_a_row_names_the_kernel_that_ran():
    """Of two products the same one; of what is none of pydet's, none, whatever ran before."""
    x, w = np.ones((2, 8), np.float32), np.ones((8, 8), np.float32)
    calls = {"softmax": lambda: pydet.softmax(x), "gemm": lambda: pydet.gemm(x, w), "numpy": lambda: x @ w}
    row = harness.Row("op", "1", "fp32", [harness.Variant(name, [call]) for name, call in calls.items()], peer="numpy")
    found = {entry["variant"]: entry["kernel"] for entry in harness.measure(row, harness.Cpu(), 1)}
    assert found["softmax"].startswith("cpu_softmax") and found["gemm"].startswith("cpu_gemm")
    assert found["numpy"] is None


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


def problem(shape, **us):
    return summary.Problem("gemm forward", shape, "bf16", 0, "cublas", {"cublas": 3, **us})


def png_size(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_what_a_plot_shows_of_a_shape():
    assert plot.along("gemm forward", "512 x 6144 x 4096") == ("M", 512)
    assert plot.along("gemm dB", "6144 x 4096 x 512") == ("M (summed)", 512)
    assert plot.along("rmsnorm_backward", "4096 x 256") == ("N", 256)
    problems = [problem("2 x 8 x 8", pydet=2), problem("1 x 8 x 8", pydet=6, x=1), problem("1 x 9 x 9", x=1)]
    assert plot.ratios_by_m(problems, "pydet") == {1: [0.5], 2: [1.5]}
    assert plot.ratios_by_m(problems, "x") == {1: [3, 3]}


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


def test_latency_reports_every_situation():
    found = list(latency.rows(calls=20))
    assert [row[1] for row in found] == list(latency.SITUATIONS) * len(latency.SHAPES)
    assert all(0 < median <= late for *_, median, late in found)


# ---- What the tree keeps of results ----------------------------------------------------------------------------------


def raw(*rows):
    about = {"command": "python -m bench.cuda gemm", "date": "2026-01-01", "versions": {"pydet": "0.2.0"}}
    machine = {"cpu": "x", "card_before": {"copy_gb_per_s": 1, "clocks.sm": 2}}
    return about | {"machine": machine, "rows": [{"rate": None, "unit": "", "bits_ok": True} | row for row in rows]}


def written(entries):
    return [entry | {"us": us} for entry, us in entries]


def test_a_summary_keeps_each_problem_once(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "FOLDER", tmp_path / "results")
    shape, peer = "2 x 8 x 8", {"peer": None}
    first = written([(entry(shape, 2), 2.0), (entry(shape, None, "cublas") | peer, 4.0)])
    again = written([(entry(shape, 4), 1.0), (entry(shape, None, "cublas") | peer, 4.0), (entry("1 x 8 x 8", 2), 7.5)])
    again[0] |= {"rate": 3.0, "unit": "GFLOP/s"}
    (tmp_path / "h100_gemm_random.json").write_text(json.dumps(raw(*first, *again)))
    (tmp_path / "h100_overhead.json").write_text(json.dumps(raw() | {"rows": [{"call": "gemm", "us": 5}]}))
    summary.main([str(tmp_path)])
    found = summary.problems("h100_gemm_random")
    assert [p.shape for p in found] == [shape, shape, "1 x 8 x 8"]
    assert [p.us for p in found] == [{"pydet": 2.0, "cublas": 4.0}, {"pydet": 1.0, "cublas": 4.0}, {"pydet": 7.5}]
    assert found[0].peer == "cublas" and found[1].rate("pydet") == pytest.approx(3.0)
    assert summary.rows("h100_overhead") == [{"call": "gemm", "us": 5}]
    assert "| 2 | 2.828 | 2.00 | 2.00 (2x8x8) | 4.00 (2x8x8) |" in (tmp_path / "results/gemm.md").read_text()

    # Another run stands beside it, the same run in its place.
    for name, us in (("h100_gemm", 1.5), ("h100_gemm_random", 2.5)):
        (tmp_path / f"{name}.json").write_text(json.dumps(raw(*written([(entry(shape, 2), us)]))))
        summary.main([str(tmp_path / f"{name}.json")])
    assert [run["name"] for run in summary.load("gemm").values()] == ["h100_gemm_random", "h100_gemm"]
    assert [p.us for p in summary.problems("h100_gemm_random")] == [{"pydet": 2.5}]
    assert summary.load("gemm")["h100_gemm"]["machine"] == {"cpu": "x", "card_before": {"copy_gb_per_s": 1}}


def test_a_summary_keeps_kernels_and_what_the_card_did(tmp_path, monkeypatch):
    """Of a sustained run the clock and the power of each variant; the worst problem names its kernel."""
    monkeypatch.setattr(summary, "FOLDER", tmp_path / "results")
    rows = written([(entry("2 x 8 x 8", 0.5), 4.0), (entry("2 x 8 x 8", None, "cublas") | {"peer": None}, 2.0)])
    for row, kernel, mhz in zip(rows, ("cuda_gemm_a", None), (1300, 1400), strict=True):
        row |= {"kernel": kernel, "mhz": mhz, "watts": 700}
    (tmp_path / "h100_gemm_unseen_sustained_random.json").write_text(json.dumps(raw(*rows)))
    summary.main([str(tmp_path)])
    (found,) = summary.problems("h100_gemm_unseen_sustained_random")
    assert found.kernels == {"pydet": "cuda_gemm_a"} and found.card == {"pydet": [1300, 700], "cublas": [1400, 700]}
    page = (tmp_path / "results/gemm.md").read_text()
    assert "| 0.50 (2x8x8, cuda_gemm_a) |" in page and "| 2 x 8 x 8 | 4.00; 1300, 700 | 2.00; 1400, 700 |" in page


def test_a_run_with_changed_bits_is_no_result():
    changed = entry("2 x 8 x 8", 2) | {"us": 1.0, "bits_ok": False}
    with pytest.raises(SystemExit, match="1 variants changed bits"):
        summary.condensed("h100_gemm", raw(changed))


@pytest.mark.parametrize(
    "name, whose",
    [
        ("h100_gemm_random", "gemm"),
        ("h200_fp8_decode", "scaled_gemm"),
        ("cpu_fp8", "cpu"),
        ("cpu", "cpu"),
        ("h100x2_distributed", "distributed"),
        ("h200_attention_paged_random", "attention"),
    ],
)
def test_whose_summary_a_run_is_in(name, whose):
    assert summary.operation(name) == whose


def test_the_page_of_what_was_tried_is_short():
    words = (summary.FOLDER.parent / "README.md").read_text().split()
    assert len(words) < 3000, f"bench/README.md has {len(words)} words"


def test_the_tree_has_summaries_alone():
    files = sorted(summary.FOLDER.iterdir())
    assert sum(path.stat().st_size for path in files) < 1_000_000
    operations = {path.stem for path in files if path.suffix == ".json"} - {"by_hand"}
    assert {path.name for path in files} == {f"{x}.{end}" for x in operations for end in ("json", "md")} | {
        "by_hand.json"
    }
    for name in operations:
        assert all(summary.operation(run) == name for run in summary.load(name))


@pytest.mark.parametrize("path", sorted(summary.FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_a_summarys_tables_are_those_of_its_numbers(path):
    runs = list(summary.load(path.stem).values())
    again = "python -m bench.summary --tables"
    assert path.read_text() == "\n".join(summary.page(path.stem, runs)) + "\n", again
    assert path.with_suffix(".json").read_text() == summary.lines(runs), again


# ---- What the pages say of results -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known():
    return quotes.figures()


@pytest.mark.parametrize("page", quotes.QUOTES)
def test_pages_say_what_the_results_do(page, known):
    text = (ROOT / page).read_text()
    assert quotes.examine(page, text, known) == (text, [])


def test_a_page_that_parts_from_the_results_is_found(known):
    page = "docs/speed.md"
    text = (ROOT / page).read_text()
    wrong = text.replace(known["forward 129 to 512"], "1.99 (0.87)")
    mended, problems = quotes.examine(page, wrong, known)
    assert problems == [f"docs/speed.md: 1.99 (0.87), results: {known['forward 129 to 512']} (forward 129 to 512)"]
    assert wrong != text and mended == text
    for replaced, says in (
        ("gradient elements that differ", "want once, found 0 times"),
        ("\n## On a CPU", "docs/speed.md: 1.37 is no quote of a result"),
    ):
        other = "Now 1.37 times as fast.\n" + replaced if "CPU" in replaced else "gone"
        (problem,) = quotes.examine(page, text.replace(replaced, other), known)[1]
        assert says in problem


def test_every_figure_is_quoted(known):
    quoted = {name for of_page in quotes.QUOTES.values() for quote in of_page for name in quotes.pattern(quote)[1]}
    by_hand = json.loads((summary.FOLDER / "by_hand.json").read_text())
    assert quoted <= set(known) and set(by_hand) <= quoted
    assert all(set(figure) == {"says", "of"} for figure in by_hand.values())


def test_the_figure_says_what_its_results_do():
    changed = [round(1e4 * row["differ"] / row["elements"]) for row in summary.rows("h100_equality") if row["differ"]]
    figure = plot.OVERVIEW.read_text()
    assert f">pydet {plot.release()}<" in figure and all(f"> {count}<" in figure for count in changed)
    assert all(f">pydet beside {peer}<" in figure for peer in ("cuDNN", "PyTorch's flash"))


def test_attention_by_length():
    found = plot.attention_by_length("flash")
    assert list(found) == sorted(found) and all(tokens & (tokens - 1) == 0 for tokens in found)
    assert sum(map(len, found.values())) == len(summary.problems("h100_attention_random"))
    assert plot.own({"pydet, sm90_wide": 2.0, "cudnn": 1.0, "pydet, sm90_few": 1.5}) == 1.5


def test_results_are_of_this_release():
    for name in (
        "gemm_random",
        "skinny_gemm",
        "equality",
        "rmsnorm",
        "rmsnorm_random",
        "layernorm_random",
        "softmax_random",
        "fold",
        "attention_random",
        "attention_backward_random",
        "attention_decode_random",
    ):
        assert summary.release(f"h100_{name}") == pydet.__version__, name
