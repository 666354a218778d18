"""python -m bench.norm_tables [JSON]: the tables of bench/README.md on RMSNorm, from results/h100_rmsnorm.json."""

import json
import math
import sys
from pathlib import Path

from bench import harness


def table(title, columns, rows):
    yield f"| {title} | " + " | ".join(str(n) for n in columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for name, cells in rows:
        yield f"| {name} | " + " | ".join(cells) + " |"


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def summary(times, op, peer):
    """Of the peer's time over pydet's: geometric mean, and the shapes at both ends."""
    ratios = {(m, n): us[peer] / us["pydet"] for (of, m, n), us in times.items() if of == op}
    ends = [f"{ratios[shape]:.2f} at {shape[0]} x {shape[1]}" for shape in sorted(ratios, key=ratios.get)]
    faster = ", ".join(f"{m} x {n}" for (m, n), ratio in ratios.items() if ratio < 0.995) or "none"
    return f"{op}, {peer}: {mean(ratios.values()):.2f} ({ends[0]}; {ends[-1]}); peer faster at: {faster}"


def main(path):
    times = {}
    for row in json.loads(path.read_text())["rows"]:
        m, n = map(int, row["shape"].split(" x "))
        times.setdefault((row["op"], m, n), {})[row["variant"]] = row["us"]
    ms, ns = (sorted({key[i] for key in times}) for i in (1, 2))
    parts = [
        ("rmsnorm", "forward, of a copy", lambda us: us["copy"] / us["pydet"]),
        ("rmsnorm", "forward, x quack", lambda us: us["quack"] / us["pydet"]),
        ("rmsnorm_backward", "backward with dweight, of a copy", lambda us: us["copy"] / us["pydet"]),
        ("rmsnorm_backward", "dx alone, of a copy", lambda us: us["copy"] / us["pydet, dx alone"]),
        ("rmsnorm_backward", "with dweight over dx alone", lambda us: us["pydet"] / us["pydet, dx alone"]),
        ("rmsnorm_backward", "backward with dweight, x quack", lambda us: us["quack"] / us["pydet"]),
    ]
    for op, title, of in parts:
        rows = [(f"M = {m}", [f"{of(times[op, m, n]):.2f}" for n in ns]) for m in ms]
        print("\n".join(table(f"{title}; N =", ns, rows)) + "\n")
    for op in ("rmsnorm", "rmsnorm_backward"):
        for peer in ("torch", "quack", "liger"):
            if all(peer in us for key, us in times.items() if key[0] == op):
                print(summary(times, op, peer))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else harness.RESULTS / "h100_rmsnorm.json")
