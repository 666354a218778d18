"""python tools/rows_fit.py TIMES... : what the kernels of norms and softmax cost beside each other, by rows_sweep.py.

Prints for each operation how far the library's choice is behind the fastest kernel of each problem; how far the fit of
thresholds is that --write puts into native/gpu/nvidia/rows_choice.h, on the problems that it was fitted to and, where
--unseen TIMES names a sweep of another seed, on those that it did not see; and which kernels the fastest ones are.
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


def say_choices(problems):
    by_operation = collections.defaultdict(list)
    for problem in problems:
        by_operation[problem[0]].append(problem)
    for operation, those in by_operation.items():
        behind = [(times[chosen] / min(times.values()), m, n, chosen) for _, m, n, chosen, times, _ in those]
        worst = max(behind)
        print(
            f"{operation}, {len(those)} problems: the choice takes {mean([one[0] for one in behind]):.3f} times the "
            f"fastest, at worst {worst[0]:.2f} ({worst[1]}x{worst[2]}, {worst[3]})"
        )
        fastest = collections.Counter(min(times, key=times.get) for *_, times, _ in those)
        for name, count in fastest.most_common():
            print(f"  {100 * count / len(those):5.1f} %  {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("times", nargs="+")
    options = parser.parse_args()
    say_choices(read(options.times))


if __name__ == "__main__":
    main()
