"""Plots of results, drawn from their JSON:

python -m bench.plot bench/raw/h100_gemm.json   # NAME.png beside each raw result named
python -m bench.plot --overview                   # docs/speed.svg, the README's figure, from the summaries
"""

import argparse
import collections
import json
import math
import re
import statistics
import sys
from pathlib import Path

from bench import summary

OVERVIEW = Path(__file__).resolve().parent.parent / "docs" / "speed.svg"
MAX_BARS = 60  # with more ratios than these, a panel for each operation instead of a bar for each ratio
GREEN, RED, GREY = "#2a7f62", "#b5533c", "#8a8a8a"
COLORS = (GREEN, "#3565a8", "#c98a1b", RED, "#7a4fa0", "#4f9fa8")


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "pydet", "svg.fonttype": "none"}  # the same file for the same results
    import matplotlib.pyplot as plt

    return plt


def extents(shape):
    return [int(word) for word in re.findall(r"\d+", shape)]


def along(op, shape):
    """What a panel's axis shows of a shape: its name and value. M, or for sums over M that; the width of a norm."""
    found = extents(shape)
    if "norm" in op:
        return "N", found[1]
    return ("M (summed)", found[2]) if op == "gemm dB" else ("M", found[0])


def write(path, entries):
    """How many times as fast as its peer each variant is."""
    entries = [entry for entry in entries if entry["times_peer"]]
    figure = bars(entries) if len(entries) <= MAX_BARS else panels(entries)
    figure.savefig(path, dpi=100)
    pyplot().close(figure)


def bars(entries):
    """A bar for each ratio."""
    labels = [
        f"{e['op']} {e['shape']} {e['dtype']}, {e['threads']} thr.: {e['variant']} / {e['peer']}" for e in entries
    ]
    ratios = [entry["times_peer"] for entry in entries]
    figure, axes = pyplot().subplots(figsize=(10, 1.5 + 0.24 * len(entries)), layout="constrained")
    axes.barh(range(len(ratios)), [r - 1 for r in ratios], left=1, color=[GREEN if r >= 1 else RED for r in ratios])
    axes.margins(x=0.1, y=0.01)
    axes.set_yticks(range(len(ratios)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    for i, ratio in enumerate(ratios):
        axes.annotate(f" {ratio:.2f}", (max(ratio, 1), i), va="center", fontsize=7)
    axes.set_xlabel("times as fast as the peer")
    return figure


def panels(entries):
    """A panel for each operation and type: a dot for each shape, a line through the geometric means, the worst of the
    first variant named."""
    groups = collections.defaultdict(lambda: collections.defaultdict(list))
    for entry in entries:
        groups[entry["op"], entry["dtype"], entry["peer"]][entry["variant"]].append(entry)
    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure, grid = pyplot().subplots(
        rows, columns, figsize=(7.5 * columns, 5 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(groups) :]:
        axes.remove()
    for axes, ((op, dtype, peer), variants) in zip(grid.flat, groups.items(), strict=False):
        panel(axes, op, variants)
        axes.set_title(f"{op}, {dtype}", fontsize=11)
        axes.set_ylabel(f"times as fast as {peer}")
    return figure


def panel(axes, op, variants):
    values = set()
    for place, (variant, entries) in enumerate(variants.items()):
        by_value = collections.defaultdict(list)
        for entry in entries:
            name, value = along(op, entry["shape"])
            by_value[value].append(entry["times_peer"])
        values |= set(by_value)
        color = COLORS[place % len(COLORS)]
        axes.scatter(
            [value for value, ratios in by_value.items() for _ in ratios],
            [ratio for ratios in by_value.values() for ratio in ratios],
            s=9, color=color, alpha=0.45, linewidths=0,
        )  # fmt: skip
        line = sorted((value, statistics.geometric_mean(ratios)) for value, ratios in by_value.items())
        mean = statistics.geometric_mean(entry["times_peer"] for entry in entries)
        axes.plot(*zip(*line, strict=True), color=color, linewidth=1.6, label=f"{variant}: {mean:.3f}")
        if place == 0:
            worst = min(entries, key=lambda entry: entry["times_peer"])
            spot = (along(op, worst["shape"])[1], worst["times_peer"])
            text = f"{'x'.join(map(str, extents(worst['shape'])))} {spot[1]:.2f}"
            axes.annotate(text, spot, (4, -9), textcoords="offset points", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted(values)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7, rotation=60)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    marks = [
        mark for mark in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5) if low <= mark <= high
    ]
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks], fontsize=8)
    axes.set_xlabel(name)
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(fontsize=8, title="geometric mean", title_fontsize=8)


# ---- The README's figure ---------------------------------------------------------------------------------------------


SHOWN = ("h100_skinny_gemm", "h100_gemm_random", "h100_equality", "h100_attention_random")


def release():
    """The one whose results the figure shows."""
    (version,) = {summary.release(name) for name in SHOWN}
    return version


def ratios_by_m(problems, variant):
    found = collections.defaultdict(list)
    for problem in problems:
        if variant in problem.us:
            found[problem.extents[0]].append(problem.us[problem.peer] / problem.us[variant])
    return dict(sorted(found.items()))


def few_and_many():
    """How many times as fast as cuBLAS forward products are: {M: ratios} of few rows, of models' layers; and of more
    rows, drawn at random."""
    few = ratios_by_m(summary.problems("h100_skinny_gemm"), "pydet, weights_constant")
    drawn = [problem for problem in summary.problems("h100_gemm_random") if problem.op == "gemm forward"]
    return few, {m: ratios for m, ratios in ratios_by_m(drawn, "pydet").items() if m > max(few)}


def own(us):
    """The time of pydet's own choice among the variants of a problem of attention, whose name has the kernel."""
    return min(time for name, time in us.items() if name.startswith("pydet"))


def attention_by_length(peer, run="h100_attention_random"):
    """How many times as fast as this peer attention is over sequences drawn at random: {tokens, up to: ratios}."""
    found = collections.defaultdict(list)
    for problem in summary.problems(run):
        if peer in problem.us:
            found[1 << (problem.extents[1] - 1).bit_length()].append(problem.us[peer] / own(problem.us))
    return dict(sorted(found.items()))


def curve(axes, ratios, color, label):
    """A line through the geometric means, and the band from the worst to the best."""
    places, found = list(ratios), list(ratios.values())
    means = [statistics.geometric_mean(its) for its in found]
    axes.plot(places, means, color=color, linewidth=2, marker="o", markersize=4, label=label)
    axes.fill_between(places, [min(x) for x in found], [max(x) for x in found], color=color, alpha=0.15, linewidth=0)


def overview(path=OVERVIEW):
    """Left, speed beside cuBLAS by M; then attention's beside cuDNN by length; right, how many elements of a product
    have other bits than the same rows have in a large one. Above the M of few rows, products drawn at random: those of
    an M from each power of two to the next."""
    few, drawn = few_and_many()
    many = collections.defaultdict(list)
    for m, ratios in drawn.items():
        many[1 << (m - 1).bit_length()] += ratios
    pydet = few | dict(sorted(many.items()))

    plt = pyplot()
    figure, (speed, attention, bits) = plt.subplots(
        1, 3, figsize=(13, 4.2), width_ratios=(5, 4, 4), layout="constrained", facecolor="white"
    )
    curve(speed, pydet, GREEN, f"pydet {release()}")
    speed.axhline(1, color="black", linewidth=1)
    speed.annotate("cuBLAS", (1, 1), (0, -11), textcoords="offset points", fontsize=9)
    speed.set_xscale("log", base=2)
    ticks = [m for m in pydet if m & (m - 1) == 0]
    speed.set_xticks(ticks, [str(m) for m in ticks], fontsize=8)
    speed.set_ylim(0, None)
    speed.set_xlabel(f"rows, M (above {max(few)}: up to M)")
    speed.set_ylabel("times as fast as cuBLAS")
    speed.set_title("Products x @ w.T, bf16, H100: mean, worst, best", fontsize=10)
    speed.legend(fontsize=9, loc="upper right")

    for peer, color, name in (("cudnn", GREEN, "cuDNN"), ("flash", COLORS[1], "PyTorch's flash")):
        curve(attention, attention_by_length(peer), color, f"pydet beside {name}")
    attention.axhline(1, color="black", linewidth=1)
    attention.set_xscale("log", base=2)
    ticks = list(attention_by_length("flash"))
    attention.set_xticks(ticks, [str(tokens) for tokens in ticks], fontsize=8)
    attention.set_ylim(0, None)
    attention.set_xlabel("tokens of a sequence, up to")
    attention.set_ylabel("times as fast")
    attention.set_title("Attention, drawn at random, 16 bits, H100", fontsize=10)
    attention.legend(fontsize=9, loc="lower right")

    # In the order of the results: the largest M first. pydet's own count is 0 by test, on every shape.
    split = [row for row in summary.rows("h100_equality") if row["differ"]]
    split.sort(key=lambda row: (extents(row["shape"])[0], row["shape"]))
    names = ["x".join(map(str, extents(row["shape"]))) for row in split]
    places = range(len(split))
    counts = [1e4 * row["differ"] / row["elements"] for row in split]
    bits.barh([place - 0.18 for place in places], counts, 0.34, color=GREY, label="cuBLAS")
    bits.barh([place + 0.18 for place in places], [0] * len(split), 0.34, color=GREEN, label="pydet: 0 everywhere")
    for place, count in zip(places, counts, strict=True):
        bits.annotate(f" {count:.0f}", (count, place - 0.18), va="center", fontsize=8, color=GREY)
        bits.annotate(" 0", (0, place + 0.18), va="center", fontsize=8, color=GREEN)
    bits.set_yticks(list(places), names, fontsize=8)
    bits.invert_yaxis()
    bits.set_xlabel("of 10,000 bf16 elements")
    bits.set_title("Bits that differ from those in a large batch", fontsize=10)
    bits.legend(fontsize=9, loc="lower right")
    for axes in (speed, attention, bits):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="results as JSON")
    parser.add_argument("--overview", action="store_true", help="draw docs/speed.svg")
    given = parser.parse_args(arguments)
    for path in given.files:
        write(path.with_suffix(".png"), json.loads(path.read_text())["rows"])
    if given.overview:
        overview()


if __name__ == "__main__":
    main(sys.argv[1:])
