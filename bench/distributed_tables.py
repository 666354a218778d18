"""python -m bench.distributed_tables JSON: the table and the plot of results of bench.distributed, beside the JSON."""

import json
import sys
from pathlib import Path

PLAIN = "mm + NCCL all_reduce bf16"


def best(us, names):
    return min((us[name] for name in names if name in us), default=None)


def segments_of(entry):
    return sorted({int(name.split()[1]) for name in entry["us"] if name.startswith("auto")})


def chosen(entries):
    """The entries, each row with the method that "auto" is by today's limits, for each count of segments."""
    from pydet.torch.distributed.exchange import choose
    from pydet.torch.distributed.relay import LEAST_ROWS, RANKS

    ranks = next(e for e in entries if e["part"] == "machine")["ranks"]

    def methods(entry):
        size = entry["m"] * entry["n"]
        relays = ranks == RANKS, entry["m"] >= LEAST_ROWS
        return {
            str(n): choose("row", "auto", "ordered", n, size, ranks, True, False, relays[0], all(relays) and n > ranks)
            for n in segments_of(entry)
        }

    return [entry | {"auto": methods(entry)} if entry["part"] == "row" else entry for entry in entries]


def columns(entry, segments):
    """What is shown of one row: title -> us."""
    us = entry["us"]
    found = {"torch.mm + NCCL all-reduce, bf16": us[PLAIN], "the same in fp32": us["mm + NCCL all_reduce fp32"]}
    found["with torch's symmetric-memory all-reduce"] = best(us, [name for name in us if "symmetric" in name])
    for count in segments:
        time = us.get(f"{entry['auto'][str(count)]}, {count} segments", us[f"auto, {count} segments"])
        found[f"row_parallel_linear, {count} segments"] = time
    return {title: time for title, time in found.items() if time is not None}


def report(entries):
    machine = next(e for e in entries if e["part"] == "machine")
    yield f"{machine['ranks']} x {machine.get('gpu', 'CPU')}, torch {machine['torch']}, NCCL {machine.get('nccl', '-')}"
    if "note" in machine:
        yield f"({machine['note']})"
    for e in (e for e in entries if e["part"] == "bits"):
        ranks = e.get("ranks", machine["ranks"])
        methods = ", ".join(f"{name} {count}" for name, count in e["differ"].items())
        yield f"\n{ranks} ranks, {e['shapes']} random shapes, {e['elements']} results."
        yield f"Elements whose bits are not one rank's: {methods}."
        yield f"Controls: {', '.join(f'{name} {count}' for name, count in e['controls'].items())}."
    for e in (e for e in entries if e["part"] == "mesh"):
        yield f"\nA model on {e['tp']} x {e['dp']} ranks (tensor x data): {e['elements']} outputs and gradients."
        yield f"Those whose bits are not one rank's: {times(e['differ'])}; with all-reduces {times(e['controls'])}."
    rows = [e for e in entries if e["part"] == "row"]
    for n, k in sorted({(e["n"], e["k"]) for e in rows}):
        here = [e for e in rows if (e["n"], e["k"]) == (n, k)]
        segments = segments_of(here[0])
        titles = list(columns(here[0], segments))
        yield f"\nRow-parallel layer, N, K = {n}, {k}: us (in brackets: speed over the first)\n"
        yield f"| M | {' | '.join(titles)} |"
        yield "|---|" + "---|" * len(titles)
        for e in here:
            us = columns(e, segments)
            first = us[titles[0]]
            cells = [f"{us[t]:.1f} ({first / us[t]:.2f})" if t in us else "-" for t in titles]
            yield f"| {e['m']} | {' | '.join(cells)} |"
        worst = max(count for e in here for count in e["differ"].values())
        yield f"\nElements that differ from one GPU's, in any method and row: {worst}."
    for e in (e for e in entries if e["part"] == "dp"):
        yield f"\nReduce-scatter of {e['gradients']} fp32 gradients, us: " + times(e["us"])
    for e in (e for e in entries if e["part"] == "layer"):
        yield f"\nDecoder layer without its attention core, {e['m']} tokens, us: {times(e['us'])}; {e['differ']} differ"
    for e in (e for e in entries if e["part"] == "step"):
        yield f"\nForward and backward of it, {e['tokens']} tokens, tokens a second: {times(e['tokens_per_second'])}"
    for e in (e for e in entries if e["part"] == "context"):
        yield f"\nCausal attention of {e['tokens']} tokens, 32 heads of 8, d = 128, us: {times(e['us'])}"
        yield f"Times as fast as one GPU: {times(e['times_one'])}; differ: {times(e['differ'])}"
    for e in (e for e in entries if e["part"] == "experts"):
        yield f"\nA mixture of 128 experts, {e['tokens']} tokens with 8 slots, us: {times(e['us'])}"
        yield f"Differ: {times(e['differ'])}"
    for e in (e for e in entries if e["part"] == "head"):
        extents = f"{e['tokens']} tokens, {e['vocabulary']} columns"
        yield f"\nLog-probabilities and gradients of {extents}, us: {times(e['us'])}"
        yield f"Differ: {times(e['differ'])}"
    yield from mixtures([e for e in entries if e["part"] == "moe"])
    layers = [e for e in entries if e["part"] == "whole"]
    if layers:
        titles = list(layers[0]["us"])
        yield "\nDecoder layer with attention, us (in brackets: speed over the first)\n"
        yield f"| | tokens | {' | '.join(titles)} | differ |"
        yield "|---|---|" + "---|" * (len(titles) + 1)
        for e in layers:
            first, differ = e["us"][titles[0]], e["differ"]
            cells = [f"{e['us'][t]:.1f} ({first / e['us'][t]:.2f})" for t in titles]
            count = sum(differ.values()) if isinstance(differ, dict) else differ
            yield f"| {e['what']} | {e['m']} | {' | '.join(cells)} | {count} |"


def mixtures(entries):
    """A table of decoder layers with experts: us, in brackets the speed over the first."""
    if not entries:
        return
    titles = list(dict.fromkeys(title for e in entries for title in e["us"]))
    yield "\nDecoder layer of Qwen3-30B-A3B, us (in brackets: speed over stock on one GPU, called in the same way)\n"
    yield f"| | tokens | {' | '.join(titles)} | differ |"
    yield "|---|---|" + "---|" * (len(titles) + 1)
    for e in entries:
        us, first = e["us"], "stock, one GPU"
        same = {title: us.get(first + ", a graph" * title.endswith("a graph")) for title in titles}
        cells = [f"{us[t]:.0f} ({same[t] / us[t]:.2f})" if t in us else "-" for t in titles]
        yield f"| {e['what']} | {e['m']} | {' | '.join(cells)} | {sum(e['differ'].values())} |"


def times(us):
    return ", ".join(f"{name} {value}" for name, value in us.items())


def plot(entries, path):
    from bench.plot import COLORS, GREY, pyplot

    rows = [e for e in entries if e["part"] == "row"]
    layers = sorted({(e["n"], e["k"]) for e in rows})
    ranks = next(e for e in entries if e["part"] == "machine")["ranks"]
    figure, panels = pyplot().subplots(
        1, len(layers), figsize=(6 * len(layers), 4), layout="constrained", squeeze=False
    )
    for axes, layer in zip(panels[0], layers, strict=True):
        here = [e for e in rows if (e["n"], e["k"]) == layer]
        segments = segments_of(here[0])
        for color, title in zip((GREY, *COLORS), list(columns(here[0], segments))[1:], strict=False):
            points = [(e["m"], columns(e, segments)) for e in here]
            shown = [(m, us["torch.mm + NCCL all-reduce, bf16"] / us[title]) for m, us in points if title in us]
            axes.plot(*zip(*shown, strict=True), marker="o", markersize=3, color=color, label=title)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel="M", ylabel="times as fast", title=f"{ranks} GPUs, N, K = {layer[0]}, {layer[1]}")
        axes.set_xscale("log", base=2)
    panels[0][0].legend(fontsize=7)
    figure.suptitle("Row-parallel linear layer beside torch.mm + NCCL's all-reduce in bf16")
    figure.savefig(path, dpi=100)
    pyplot().close(figure)


def main(path):
    entries = chosen(json.loads(path.read_text()))
    path.with_suffix(".md").write_text("\n".join(report(entries)) + "\n")
    if any(e["part"] == "row" for e in entries):
        plot(entries, path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
