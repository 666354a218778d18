"""python tools/sm90_fit.py TIMES.jsonl... : fits what the tiles of the Hopper GEMM cost, and writes sm90/rates.h.

The times are those of sm90_sweep.py. A tile's time is a sum of the terms of native/gpu/nvidia/sm90/choose.cpp, each
with a rate of its own that is not negative; the fit takes the least squares of the relative error, where a time counts
less the further it is behind the problem's best. The problems are divided at random: what it prints of the choice (the
chosen tile's time over the best one's) is of rates that were fitted to three quarters of them, for these and for the
others; what it writes was fitted to all. --check fits nothing: it compares the choices by the rates that stand in
rates.h with those that the library made in the sweep. --only EXPRESSION fits the tiles in whose
names it is found, from a sweep of these beside others, brought to the level of the tiles' rates; the others' stay.
--hold 1 holds the fit to the rates that stand, which a sweep of few problems only moves where it says something: each
then counts as one problem would. --margin 1.03 makes the tiles 3 % slower than their times, as what few problems show
is less certain.
"""

import argparse
import json
import math
import re
from pathlib import Path

import numpy as np

SM90 = Path(__file__).resolve().parent.parent / "native/gpu/nvidia/sm90"
CLUSTERS = {2: 66, 4: 30, 8: 15}  # that an H100 of 132 SMs runs at once; --clusters gives others
BLOCK_K = 64
NEAR = 0.4  # how far behind the best tile a time counts 1/e
FEW = 96  # of rows or columns of out
HEAT, COOL = 6.0, 256  # of choose.cpp: what a full wave of n columns takes at the power limit, beside one of 256
TERMS = (
    *("full", "stage", "filled", "wave", "once", "chunk", "turned_b", "turned_a", "both_turned", "memory"),
    *("idle", "unfilled", "few_stage", "few_once", "few_memory"),
)


def tiles():
    """name: (m, n, cluster_m, cluster_n, swapped, hands_over), from tiles.h."""
    row = r'\{"(\w+)", (\d+), (\d+), (\d), (\d), (true|false),([^}]*)\}'
    return {
        name: (*map(int, extents), swapped == "true", rest.endswith("true"))
        for name, *extents, swapped, rest in re.findall(row, (SM90 / "tiles.h").read_text())
    }


def terms(problem, tile, clusters):
    """By what each rate of the tile is multiplied (choose.cpp: time_of), where rows begin at whole lines of the L2."""
    tile_m, tile_n, cluster_m, cluster_n, swapped, hands_over = tile
    m, n, k = problem["m"], problem["n"], problem["k"]
    a, b = problem["a_k_adjacent"], problem["b_k_adjacent"]
    if swapped:
        m, n, a, b = n, m, b, a
    chunk = problem["k_chunk"] if problem["k_chunk"] and problem["k_chunk"] < k else 0
    count = math.ceil(m / (tile_m * cluster_m)) * math.ceil(n / (tile_n * cluster_n))
    at_once = clusters[cluster_m * cluster_n]
    full = (count - 1) // at_once
    waves = full + 1
    filled = (count - full * at_once) / at_once
    if hands_over:  # the last waves are as long for all
        full, filled = count / at_once - 1, 1
    stages = math.ceil(chunk / BLOCK_K) * k / chunk if chunk else math.ceil(k / BLOCK_K)
    turned = [waves * stages * (not b and a), waves * stages * (b and not a), waves * stages * (not a and not b)]
    chunks = math.ceil(k / chunk) if chunk else 0
    memory = (m * k + n * k + m * n) / 1024
    blocks = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    idle = memory * (1 - blocks / (count * cluster_m * cluster_n))
    unfilled = memory * max(0, 1 - blocks / (2 * clusters[2]))
    few = min(m, n) <= FEW
    hot = 1 + HEAT * (1 / tile_n - 1 / COOL)
    common = full * stages * hot, stages, stages * filled, waves, 1, waves * chunks, *turned, memory
    return *common, idle, unfilled, few * stages, few, few * memory


def not_negative(a, b, turns=300):
    """The least squares of a x = b for x >= 0, coordinate by coordinate."""
    squares, right = a.T @ a, a.T @ b
    x = np.maximum(np.linalg.lstsq(a, b, rcond=None)[0], 0)
    for _ in range(turns):
        for i in np.flatnonzero(squares.diagonal()):
            x[i] = max(0, x[i] + (right[i] - squares[i] @ x) / squares[i, i])
    return x


def fit(data, use, hold=0.0):
    """Rates by tile, from the problems of the mask `use`; the others' as they stand. A term that none of a tile's
    problems has gets the highest rate of these. `hold`: how much those that stand count."""
    stand = {name: rate for name, rate in written().items() if name in tiles()}
    rates = {name: rate for name, rate in stand.items() if name not in data}
    highest = np.max(list(rates.values()) or [np.zeros(len(TERMS))], axis=0)
    usual = np.maximum(np.median(list(stand.values()), axis=0), 0.02 * np.mean(list(stand.values()), axis=0))
    for name, (rows, its_terms, times, behind) in data.items():
        mine = use[rows]
        if not mine.any() and not hold:
            raise SystemExit(f"{name} was timed on no problem")
        weight = np.sqrt(np.exp(-behind[mine] / NEAR))
        a, b = its_terms[mine] * (weight / times[mine])[:, None], weight
        if hold:
            its = stand.get(name, usual)  # those of a tile that has none yet: what tiles usually have
            scale = np.maximum(its, usual)
            held = math.sqrt(hold) * np.eye(len(TERMS))
            rates[name] = scale * not_negative(
                np.vstack([a * scale, held]), np.concatenate([b, math.sqrt(hold) * its / scale])
            )
        else:
            rates[name] = np.where(its_terms[mine].any(axis=0), not_negative(a, b), highest)
    return rates


def arrange(problems, table, clusters):
    """By tile: the indices of the problems it was timed on, their terms, its times in ns, how far these are behind."""
    found = {}
    for name, tile in table.items():
        rows = [i for i, p in enumerate(problems) if name in p["us"]]
        times = np.array([problems[i]["us"][name] for i in rows]) * 1e3
        best = np.array([min(us for kernel, us in problems[i]["us"].items() if kernel != "cublas") for i in rows]) * 1e3
        its_terms = np.array([terms(problems[i], tile, clusters) for i in rows], float).reshape(len(rows), len(TERMS))
        found[name] = np.array(rows, int), its_terms, times, times / best - 1
    return found


def at_level(problems, table, clusters):
    """The problems, their times as on the card that the rates were fitted to, by those of the fastest tiles."""
    rates, of = written(), []
    for p in problems:
        times = {name: us for name, us in p["us"].items() if name in table and name in rates}
        near = [name for name, us in times.items() if us < 1.1 * min(times.values())]
        of += [terms(p, table[name], clusters) @ rates[name] / 1e3 / times[name] for name in near]
    level = float(np.median(of))
    print(f"the sweep's times are brought to the rates' level by {level:.3f}")
    return [{**p, "us": {name: us * level for name, us in p["us"].items()}} for p in problems]


def choices(count, data, rates):
    """By problem: the tile that is predicted to be the fastest, and its time over the best one's."""
    least, chosen = np.full(count, np.inf), [""] * count
    best, its_time = np.full(count, np.inf), np.full(count, np.nan)
    for name, (rows, its_terms, times, _) in data.items():
        best[rows] = np.minimum(best[rows], times)
        for row, ns, time in zip(rows, its_terms @ rates[name], times, strict=True):
            if ns < least[row]:
                least[row], chosen[row], its_time[row] = ns, name, time
    return chosen, its_time / best


def describe(what, regret):
    regret = regret[np.isfinite(regret)]  # of problems that were timed with a tile of the fit
    mean, worst = math.exp(np.log(regret).mean()), np.sort(regret)[-3:].round(2)
    print(f"{what}: chosen over best, geometric mean {mean:.4f}, worst {worst}, {len(regret)} problems")


HEAD = """// What the tiles cost: tools/sm90_fit.py fitted it to times of an H100, of large tiles to those of an H200 at
// its power limit, and wrote this file.
#pragma once

namespace pydet {

// Nanoseconds, by what choose.cpp multiplies them with: a stage of 64 k in a full wave, in the last wave, and there by
// how much of it is filled; a wave; a call; a chunk's end; what a stage takes more where k is not adjacent in b, in a,
// in either; 1024 elements of a, b and out. More of these where blocks of a cluster have nothing to do, or
// multiprocessors no block; and more of a stage, a call and 1024 elements where out has few rows or columns.
struct Sm90Rate {
  const char *tile;
  double full, stage, filled, wave, once, chunk, turned_b, turned_a, both_turned, memory;
  double idle, unfilled, few_stage, few_once, few_memory;
};
// clang-format off
constexpr Sm90Rate kSm90Rates[] = {
"""


def write(rates):
    def row(its):
        return ", ".join(f"{x:.4g}" if x > 1e-3 else "0" for x in its)

    lines = [f'    {{"{name}",\n     {row(rates[name])}}},\n' for name in tiles()]
    (SM90 / "rates.h").write_text("".join([HEAD, *lines, "};\n// clang-format on\n\n}  // namespace pydet\n"]))


def written():
    rows = re.findall(r'\{"(\w+)",\s+([^}]+)\}', (SM90 / "rates.h").read_text())
    return {name: np.array([float(x) for x in numbers.split(",")]) for name, numbers in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("times", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="the tiles to fit: an expression found in their names")
    parser.add_argument("--hold", type=float, default=0, help="how much the rates that stand count")
    parser.add_argument("--margin", type=float, default=1, help="by which the tiles to fit must seem to be ahead")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--clusters", type=json.loads, default=CLUSTERS, help='such as {"2": 66, "4": 30, "8": 15}')
    options = parser.parse_args()
    clusters = {int(size): count for size, count in options.clusters.items()}
    problems = [json.loads(line) for path in options.times for line in path.read_text().splitlines()]
    fitted = {name: tile for name, tile in tiles().items() if re.search(options.only, name)}
    if options.only or options.hold:
        problems = at_level(problems, tiles(), clusters)
    data = arrange(problems, fitted, clusters)
    if options.check:
        chosen, regret = choices(len(problems), data, written())
        same = sum(name == p["chosen"] for name, p in zip(chosen, problems, strict=True))
        print(f"the library chose as the rates say in {same} of {len(problems)} problems")
        describe("by the rates", regret)
        return
    train = np.random.default_rng(0).permutation(len(problems)) % 4 > 0
    _, regret = choices(len(problems), data, fit(data, train, options.hold))
    describe("problems of the fit", regret[train])
    describe("other problems", regret[~train])
    rates = fit(data, np.full(len(problems), True), options.hold)
    rates = {name: rate * (options.margin if name in fitted else 1) for name, rate in rates.items()}
    describe("fitted to all", choices(len(problems), data, rates)[1])
    write(rates)


if __name__ == "__main__":
    main()
