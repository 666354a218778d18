"""python tools/rows_fit.py TIMES... [--unseen TIMES...]: which kernels of norms and softmax should be chosen, by the
times of rows_sweep.py.

A kernel's cost is how far it is behind the fastest one of a problem, a mean over the problems nearby: near is what an
octave or so of rows and columns apart, and whose rows are whole pieces of 16 bytes too, or are not either. The fit
chooses the kernel that costs least. Printed of each operation: how far the library's choice is behind the fastest, and
the fit's, of problems that it saw (each of which is then left out) and, with --unseen, of those of a sweep with another
seed, which it did not; where the library's choice is behind by more than --behind; and which kernels are the fastest.
"""

import argparse
import collections
import math
import random

OPERATIONS = (
    *("rmsnorm", "rmsnorm_backward", "layernorm", "layernorm_backward"),
    *("softmax", "log_softmax", "log_prob", "log_prob_backward", "softmax_backward", "log_softmax_backward"),
)


def drawn(operation, count, seed):
    """(M, N) of so many problems, as `python -m bench.cuda rmsnorm --random` draws them."""
    longest, most = (16384, 1 << 29) if "norm" in operation else (131072, 1 << 28)
    chance = random.Random(f"{operation} {seed}")
    while count:
        m = round(math.exp(chance.uniform(0, math.log(200_000))))
        n = round(math.exp(chance.uniform(math.log(64), math.log(longest))))
        n = n if chance.random() < 0.25 else n // 8 * 8
        if m * n <= most:
            count -= 1
            yield m, n


def read(paths):
    """[(operation, M, N, the kernel chosen, {kernel: microseconds}, those of a copy or None)]"""
    found = []
    for path in paths:
        with open(path) as file:
            for line in file:
                operation, m, n, chosen, *times = line.split()
                if operation not in OPERATIONS or not times:
                    continue
                times = {name: float(us) for name, us in (one.split("=") for one in times)}
                copy = times.pop("copy", None)
                if times:
                    found.append((operation, int(m), int(n), chosen, times, copy))
    return found


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


class Fit:
    """Problems, each with the logarithm of every kernel's time over the fastest one's."""

    def __init__(self, problems, octaves=0.7):
        self.octaves, self.seen = octaves, collections.defaultdict(list)
        for operation, m, n, _, times, _ in problems:
            least = min(times.values())
            behind = {name: math.log(us / least) for name, us in times.items()}
            self.seen[operation, n % 8 == 0].append((math.log2(m), math.log2(n), behind))

    def chosen(self, operation, m, n, kernels):
        """Of these kernels the one that costs least of what is near, but not at, (m, n); None if none was timed."""
        for octaves in (self.octaves, 2 * self.octaves, 4 * self.octaves, 64):
            cost, weight = collections.Counter(), collections.Counter()
            for log_m, log_n, behind in self.seen[operation, n % 8 == 0]:
                far = math.hypot(log_m - math.log2(m), log_n - math.log2(n)) / octaves
                near = math.exp(-far * far / 2)
                for name in behind.keys() & kernels if 0 < far < 3 else ():
                    weight[name] += near
                    cost[name] += near * behind[name]
            if weight:
                return min(weight, key=lambda name: (cost[name] / weight[name], name))
        return None


def say_choices(title, problems, fit, behind):
    by_operation = collections.defaultdict(list)
    for problem in problems:
        by_operation[problem[0]].append(problem)
    for operation, those in by_operation.items():
        ours, fitted, worse = [], [], []
        for _, m, n, chosen, times, copy in those:
            least, name = min(times.values()), fit.chosen(operation, m, n, times.keys())
            ours.append(times.get(chosen, math.inf) / least)
            fitted.append(times[name] / least if name else ours[-1])
            if ours[-1] > behind:
                fastest = min(times, key=times.get)
                of_copy = f", {copy / least:.2f} of a copy" if copy else ""
                worse.append((ours[-1], f"  {ours[-1]:.2f} {m}x{n}: {chosen}, by {fastest} {least:.1f} us{of_copy}"))
        print(f"{operation}, {title}, {len(those)} problems, time over the fastest kernel's:")
        for whose, ratios in (("the library's choice", ours), ("the fit's", fitted)):
            print(f"  {whose}: {mean(ratios):.3f}, at worst {max(ratios):.2f}")
        print(*(line for _, line in sorted(worse, reverse=True)[:12]), sep="\n", end="\n" if worse else "")
        fastest = collections.Counter(min(times, key=times.get) for *_, times, _ in those)
        print("  fastest:", ", ".join(f"{name} {count}" for name, count in fastest.most_common()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("times", nargs="+")
    parser.add_argument("--unseen", nargs="+", default=[])
    parser.add_argument("--behind", type=float, default=1.1)
    options = parser.parse_args()
    seen = read(options.times)
    fit = Fit(seen)
    say_choices("seen", seen, fit, options.behind)
    say_choices("not seen", read(options.unseen), fit, options.behind)


if __name__ == "__main__":
    main()
