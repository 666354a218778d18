"""What the benches of CPUs and GPUs draw problems with, and the line that says how many of them went."""

import math
import random
import statistics
from functools import partial


def between(generator, least, most):
    """A whole number, log-uniform."""
    return round(math.exp(generator.uniform(math.log(least), math.log(most))))


def rows(make, count, seed):
    """make(a random generator, a function that draws a whole number log-uniformly) gives a row's maker."""
    generator = random.Random(seed)
    for _ in range(count):
        yield make(generator, partial(between, generator))


def norm_shape(generator, longest, most):
    """Up to 200,000 rows of 64 to `longest` columns: steps of 8, or any number for one in four. What has more than
    `most` elements is drawn anew."""
    while True:
        m, n = between(generator, 1, 200_000), between(generator, 64, longest)
        n = n if generator.random() < 0.25 else n // 8 * 8
        if m * n <= most:
            return m, n


def said(ratios):
    """Of pairs of a ratio and its problem."""
    ratios = sorted(ratios)
    mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
    worst, shape = ratios[0]
    return (
        f"geometric mean {mean:.3f}, 5th percentile {ratios[len(ratios) // 20][0]:.3f}, worst {worst:.3f} ({shape}), "
        f"{len(ratios)} problems"
    )


def problems(entries):
    """[(a problem's op, shape, type and threads, the time of each of its variants)]"""
    found = []
    for entry in entries:
        what = tuple(entry[key] for key in ("op", "shape", "dtype", "threads"))
        if not found or found[-1][0] != what or entry["variant"] in found[-1][1]:  # the last: drawn twice in a row
            found.append((what, {}))
        found[-1][1][entry["variant"]] = entry["us"]
    return found


def summary(entries):
    """Of each operation, type and number of threads: the time of each other variant over that of pydet's first."""
    groups = {}
    for (op, shape, dtype, threads), us in problems(entries):
        ours = next(name for name in us if name.startswith("pydet"))
        for other in us.keys() - {ours}:
            groups.setdefault((op, dtype, threads, other, ours), []).append((us[other] / us[ours], shape))
    lines = []
    for (op, dtype, threads, other, ours), ratios in sorted(groups.items()):
        what = f"{op}, {dtype}" + f", {threads} thr." * (threads > 0)
        lines.append(f"{what:30} {f'{other} / {ours}':28}: {said(ratios)}")
    return lines
