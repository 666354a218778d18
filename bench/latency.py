"""python -m bench.latency: how long single small calls take, alone, in turn with NumPy, and beside a busy process.

In turn: NumPy's idle threads spin for a while after each product, on the cores that the next call wakes its threads
on. Beside: one process computes all the time. A call that waits for a thread without a core takes milliseconds there.
"""

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

import pydet

SHAPES = ((3, 512, 512), (16, 256, 256), (128, 128, 128), (256, 256, 256))  # M, N, K
SITUATIONS = ("alone", "in turn with NumPy", "beside a busy process")
SECONDS_AT_REST = 0.04  # until OpenBLAS's threads have stopped spinning


def latencies(call, between, count):
    """Seconds of each of so many calls, sorted."""
    found = []
    for _ in range(count):
        between()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return sorted(found)


def rows(calls):
    """(shape, situation, median, 99th percentile) in microseconds."""
    for m, n, k in SHAPES:
        random = np.random.default_rng(0)
        a, b = random.standard_normal((m, k), np.float32), random.standard_normal((k, n), np.float32)
        ours, theirs = np.empty((m, n), np.float32), np.empty((m, n), np.float32)

        def call(a=a, b=b, out=ours):
            pydet.gemm(a, b, out=out)

        def product(a=a, b=b, out=theirs):
            np.matmul(a, b, out=out)

        for situation in SITUATIONS:
            time.sleep(SECONDS_AT_REST)
            neighbour = None
            if situation == "beside a busy process":
                neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                latencies(call, lambda: None, calls // 10)
                between = product if situation == "in turn with NumPy" else lambda: None
                found = latencies(call, between, calls)
            finally:
                if neighbour:
                    neighbour.kill()
                    neighbour.wait()
            yield f"{m} x {n} x {k}", situation, 1e6 * statistics.median(found), 1e6 * found[len(found) * 99 // 100]


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__.splitlines()[0].split(": ")[1])
    parser.add_argument("--calls", type=int, default=1000, help="in each situation (default: 1000)")
    print("| shape, fp32        | situation              | median, us |    p99, us | p99 / median alone |")
    print("|--------------------|------------------------|-----------:|-----------:|-------------------:|")
    for shape, situation, median, late in rows(parser.parse_args().calls):
        if situation == "alone":
            alone = median
        print(f"| {shape:18} | {situation:22} | {median:10.1f} | {late:10.1f} | {late / alone:18.1f} |", flush=True)


if __name__ == "__main__":
    main()
