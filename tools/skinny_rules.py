"""python tools/skinny_rules.py TIMES.jsonl...: the rules of native/gpu/nvidia/sm90/skinny_choose.cpp beside what
sm90_sweep.py --few-rows measured.

One line for each layout of the weights, range of M and range of `width` (rows of the weights for every SM), as the
rules have them: which kernel the library chose most often, which one is the fastest over all problems of the line, by
the geometric mean of its time over that of each problem's best, and what that mean is of both. Where they differ by
more than a few percent, the rule wants another number.
"""

import argparse
import collections
import json
import math
from pathlib import Path

MOST_M = (8, 16, 32, 64, 96, 128)
MOST_WIDTH = (8, 16, 24, 32, 48, 64, 96, 128, 512, 10**9)


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def least(limits, x):
    return next(limit for limit in limits if x <= limit)


def lines_of(problems):
    """{(layout, most m, most width): the problems}."""
    found = collections.defaultdict(list)
    for p in problems:
        width = -(-p["n"] // p["multiprocessors"])
        layout = "along k" if p["b_k_adjacent"] else "along n"
        found[layout, least(MOST_M, p["m"]), least(MOST_WIDTH, width)].append(p)
    return dict(sorted(found.items()))


def summary(problems):
    """(the kernel chosen most often, the fastest, the mean of the choice, that of the fastest)."""
    best = [min(us for name, us in p["us"].items() if name not in ("cublas", "chosen")) for p in problems]
    everywhere = set.intersection(*({*p["us"]} - {"cublas", "chosen"} for p in problems))
    ratio = {name: mean([p["us"][name] / b for p, b in zip(problems, best, strict=True)]) for name in everywhere}
    fastest = min(ratio, key=ratio.get)
    chosen = mean([p["us"]["chosen"] / b for p, b in zip(problems, best, strict=True)])
    return collections.Counter(p["chosen"] for p in problems).most_common(1)[0][0], fastest, chosen, ratio[fastest]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("times", nargs="+", type=Path)
    options = parser.parse_args()
    problems = [json.loads(line) for path in options.times for line in path.read_text().splitlines()]
    print("weights  M to  width to  problems  chosen  fastest  the choice: kernel, the fastest: kernel")
    for (layout, m, width), group in lines_of(problems).items():
        chosen, fastest, its, least_mean = summary(group)
        print(
            f"{layout}  {m:4}  {width:8}  {len(group):8}  {its:6.3f}  {least_mean:7.3f}  "
            f"{chosen.removeprefix('cuda_')}, {fastest.removeprefix('cuda_')}"
        )


if __name__ == "__main__":
    main()
