"""What the tree keeps of results: one summary an operation, made of the raw results of a run.

python -m bench.summary                 # of bench/raw, into bench/results/OPERATION.json and OPERATION.md
python -m bench.summary FOLDER|FILE...  # of raw results elsewhere
python -m bench.summary --tables        # the .md anew from each .json

A raw result is NAME.json as bench, bench.cuda, bench.distributed or examples/rl_alignment.py write it. A summary keeps
of each problem the median time of each variant, and of the run its command, date, machine and versions; quartiles,
hashes and the machine's state stay behind. A run that a summary has already is replaced, the others are kept.
"""

import argparse
import collections
import json
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench import distributed_tables, harness

FOLDER = Path(__file__).resolve().parent / "results"
# Whose summary has the runs of what goes by another name.
PART_OF = {
    "decode": "skinny_gemm",
    "fp8_decode": "scaled_gemm",
    "scaled_grouped_gemm": "grouped_gemm",
    "equality": "gemm",
    "rmsnorm_accuracy": "rmsnorm",
    "rmsnorm_quantize": "quantize",
    "head_dx": "head",
    "head_memory": "head",
    "adamw_steps": "adamw",
    "attention_varlen": "attention",
    "attention_decode": "attention",
    "attention_paged": "attention",
    "attention_backward_varlen": "attention_backward",
}
DIGITS = 6  # of a time, which are more than it has
BANDS = {"1 to 64 rows": 64, "65 to 128": 128, "129 to 512": 512, "513 to 2048": 2048, "more": sys.maxsize}
ROW_BANDS = ("to 256 rows", "more rows", "rows of no whole 16 bytes")  # of norms and softmax; the last of any number


@dataclass
class Problem:
    """One problem of a run. us: the median time of each variant. work: of one call, in operations or bytes. kernels: of
    pydet's variants. card: of a sustained run, the clock in MHz and the power in W of each variant."""

    op: str
    shape: str
    dtype: str
    threads: int
    peer: str | None
    us: dict
    work: float | None = None
    unit: str = ""
    kernels: dict = field(default_factory=dict)
    card: dict = field(default_factory=dict)

    @property
    def extents(self):
        return [int(word) for word in re.findall(r"\d+", self.shape)]

    def rate(self, variant):
        return self.work / self.us[variant] / 1e3

    def pairs(self):
        """(variant, the one beside it): each of pydet's with every peer, and the other peers with the row's own."""
        ours = [name for name in self.us if name.startswith("pydet")]
        others = [name for name in self.us if name not in ours]
        found = [(name, other) for other in others for name in ours]
        return found + [(name, self.peer) for name in others if self.peer in others and name != self.peer]

    def band(self):
        """What rows a table keeps apart; nothing where it keeps none."""
        if not re.fullmatch(r"\d+ x \d+( x \d+)?(, \w+)?", self.shape) or self.op == "fold":
            return None
        first, second = self.extents[:2]
        if "norm" in self.op or "softmax" in self.op or "log_prob" in self.op:
            return ROW_BANDS[2 if second % 8 else first > 256]
        return next(name for name, most in BANDS.items() if first <= most)


def rounded(number):
    return float(f"{number:.{DIGITS}g}")


def operation(name):
    """Whose summary a run of this name is in: of "h100_gemm_random", gemm; of "cpu_fp8", cpu."""
    device, _, rest = name.partition("_")
    rest = rest.removesuffix("_random").removesuffix("_sustained").removesuffix("_unseen")
    return "cpu" if device == "cpu" else PART_OF.get(rest, rest)


def condensed(name, raw):
    """A run of a summary, of the raw results of that name."""
    if isinstance(raw, list):  # of bench.distributed
        return {"name": name, "rows": distributed_tables.chosen(raw)}
    run = {"name": name} | {key: raw[key] for key in ("command", "date", "machine", "versions") if key in raw}
    if "rows" not in raw:  # of examples/rl_alignment.py
        left_out = {*run, "card before", "card after"}
        return run | {"rows": [{key: value for key, value in raw.items() if key not in left_out}]}
    run["command"] = re.sub(r" --out \S+", "", run["command"])
    card = {key: run["machine"].pop(key, None) for key in ("card_before", "card_after")}
    run["machine"] |= {key: {k: v for k, v in its.items() if "clocks" not in k} for key, its in card.items() if its}
    if not raw["rows"] or "bits_ok" not in raw["rows"][0]:
        return run | {"rows": raw["rows"]}
    wrong = [row for row in raw["rows"] if row["bits_ok"] is False]
    if wrong:
        raise SystemExit(f"bench.summary: {name}: {len(wrong)} variants changed bits: no result to keep")
    found, open_at = [], {}  # where each problem is that may have more variants
    for row in raw["rows"]:
        key = row["op"], row["shape"], row["dtype"], row["threads"]
        if key not in open_at or row["variant"] in found[open_at[key]][5]:  # the same problem once more
            open_at[key] = len(found)
            found.append([*key, None, {}, None, "", {}])
        problem = found[open_at[key]]
        problem[4] = row["peer"] or problem[4]
        problem[5][row["variant"]] = rounded(row["us"])
        if row["rate"]:
            problem[6:8] = rounded(row["rate"] * row["us"] * 1e3), row["unit"]
        if row.get("kernel"):
            problem[8][row["variant"]] = row["kernel"]
        if "mhz" in row:
            problem[9:] = [{**(problem[9] if problem[9:] else {}), row["variant"]: [row["mhz"], row["watts"]]}]
    return run | {"problems": found}


def load(operation):
    """{name: run} of a summary."""
    return {run["name"]: run for run in json.loads((FOLDER / f"{operation}.json").read_text())}


def problems(name):
    """Of the run of that name."""
    return [Problem(*row) for row in load(operation(name))[name]["problems"]]


def rows(name):
    """Of a run that has no problems: what it counted."""
    return load(operation(name))[name]["rows"]


def release(name):
    """Whose results they are."""
    return load(operation(name))[name]["versions"]["pydet"]


# ---- Writing ---------------------------------------------------------------------------------------------------------


def lines(runs):
    """The file of a summary: a line for each problem."""
    parts = []
    for run in runs:
        head = json.dumps({key: value for key, value in run.items() if key not in ("problems", "rows")})
        key = "problems" if "problems" in run else "rows"
        listed = ",\n".join(f"  {json.dumps(row)}" for row in run[key])
        parts.append(f'{head[:-1]}, "{key}": [\n{listed}\n ]}}')
    return "[\n " + ",\n ".join(parts) + "\n]\n"


def table(head, rules, body):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join(rules) + "|"
    for cells in body:
        yield "| " + " | ".join(map(str, cells)) + " |"


def speeds(found):
    """What a run says: of each operation, variant and peer the geometric mean of its time over the variant's, and the
    ends."""
    groups = collections.defaultdict(lambda: collections.defaultdict(list))
    for problem in found:
        what = f"{problem.op}, {problem.dtype}" + (f", {problem.threads} thr." if problem.threads else "")
        for ours, other in problem.pairs():
            for band in ("all", problem.band()):
                shape = problem.shape.replace(" x ", "x")
                by = f", {problem.kernels[ours]}" if ours in problem.kernels else ""
                groups[what, ours, other][band].append((problem.us[other] / problem.us[ours], shape, by))
    for (what, ours, other), bands in groups.items():
        whole = bands.pop("all")
        bands = {band: bands[band] for band in (*BANDS, *ROW_BANDS) if 0 < len(bands.get(band, [])) < len(whole)}
        for band, ratios in {"all": whole, **bands}.items():
            ratios.sort()
            mean = statistics.geometric_mean(ratio for ratio, *_ in ratios)
            worst, best = (f"{ratio:.2f} ({shape}{by})" for ratio, shape, by in (ratios[0], ratios[-1]))
            cells = len(ratios), f"{mean:.3f}", f"{ratios[len(ratios) // 20][0]:.2f}", worst, best
            yield what if band == "all" else "", band, ours, other, *cells


def shown(us):
    return f"{us:.0f}" if us >= 1000 else f"{us:.3g}" if us >= 100 else f"{us:.{1 if us >= 10 else 2}f}"


def times(found):
    """Of each operation the times of its problems, in us."""
    by_op = collections.defaultdict(list)
    for problem in found:
        by_op[problem.op, problem.dtype, problem.threads, tuple(problem.us)].append(problem)
    for (op, dtype, threads, variants), its in by_op.items():
        title = f"{op}, {dtype}, us" + (f", {threads} thr." if threads else "")
        body = [(p.shape, *(shown(p.us[name]) + on_card(p, name) for name in variants)) for p in its]
        title += "; MHz, W" * any(p.card for p in its)
        yield ""
        yield from table((title, *variants), ("---", *["---:"] * len(variants)), body)


def on_card(problem, variant):
    return "; {}, {}".format(*problem.card[variant]) if problem.card else ""


def described(run):
    """Its command, date, release and machine."""
    about, machine = run.get("versions", {}), run.get("machine", {})
    words = [f"`{run['command']}`"] if "command" in run else []
    words += [run["date"]] if "date" in run else []
    words += [f"release {about['pydet']}"] if "pydet" in about else []
    words += [f"commit {about['commit']}"] if about.get("commit") else []
    words += [about["gpu"]] if "gpu" in about else [machine if isinstance(machine, str) else machine.get("cpu", "")]
    words += [f"{name} {about[name]}" for name in ("torch", "cuda") if about.get(name)]
    return ", ".join(word for word in words if word)


def page(name, runs):
    """The .md of a summary."""
    yield f"# {name}"
    yield ""
    yield "Made by `python -m bench.summary`. Above 1 the variant is faster than the one beside it."
    for run in runs:
        yield from ("", f"## {run['name']}", "")
        if described(run):
            yield from (f"{described(run)}.", "")
        if "problems" in run:
            found = [Problem(*row) for row in run["problems"]]
            head = ("", "rows", "variant", "beside", "problems", "mean", "5th percentile", "worst", "best")
            rules = ("---", "---", "---", "---", "---:", "---:", "---:", "---", "---")
            yield from table(head, rules, speeds(found))
            if not run["name"].endswith("_random") or any(problem.card for problem in found):
                yield from times(found)
        elif name == "distributed":
            yield from distributed_tables.report(run["rows"])
        elif name == "rl_alignment":
            yield "```json"
            yield json.dumps(run["rows"][0], indent=1)
            yield "```"
        else:
            keys = list(run["rows"][0])
            yield from table(keys, ["---"] * len(keys), [[row[key] for key in keys] for row in run["rows"]])


def write(name, runs):
    (FOLDER / f"{name}.json").write_text(lines(runs))
    (FOLDER / f"{name}.md").write_text("\n".join(page(name, runs)) + "\n")
    print(f"bench.summary: bench/results/{name}.json and .md: {', '.join(run['name'] for run in runs)}")


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.summary", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("raw", nargs="*", type=Path, help="raw results; default: bench/raw")
    parser.add_argument("--tables", action="store_true", help="read no raw results")
    given = parser.parse_args(arguments)
    found = collections.defaultdict(dict)
    if given.tables:
        found = {path.stem: {} for path in FOLDER.glob("*.json") if path.stem != "by_hand"}
    else:
        for path in given.raw or [harness.RESULTS]:
            for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
                found[operation(file.stem)][file.stem] = condensed(file.stem, json.loads(file.read_text()))
        if not found:
            parser.error(f"no raw results in {', '.join(map(str, given.raw or [harness.RESULTS]))}")
    FOLDER.mkdir(exist_ok=True)
    for name, runs in found.items():
        there = load(name) if (FOLDER / f"{name}.json").exists() else {}
        write(name, list((there | runs).values()))


if __name__ == "__main__":
    main(sys.argv[1:])
