"""python -m bench: pydet beside its peers on this machine, at its thread count and at one thread.

A thread count must be set before OpenMP and BLAS are loaded, so each has its own process; within it everything runs
side by side.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from bench import harness, plot

OPERATIONS = ("gemm", "skinny_gemm", "scaled_gemm", "attention", "rmsnorm", "tokens", "overhead")


def measure(operations, threads, path):
    rows = [row for name in operations for row in import_module(f"bench.{name}").rows(threads)]
    path.write_text(json.dumps(harness.run(rows, harness.Cpu(), threads)))


def measure_in_own_process(operations, threads, path):
    names = ("PYDET_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    settings = dict.fromkeys(names, str(threads))
    settings |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # glibc: freed memory stays mapped
    command = [sys.executable, "-m", "bench", *operations, "--threads", str(threads), "--entries", str(path)]
    print(f"\n{threads} thread{'s' * (threads > 1)}\n", flush=True)
    if subprocess.run(command, env=os.environ | settings, check=False).returncode:
        sys.exit(f"bench: the run with {threads} threads failed")
    return json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0].split(": ")[1])
    parser.add_argument("operations", nargs="*", metavar="operation", help=f"of {', '.join(OPERATIONS)}; default all")
    parser.add_argument("--threads", type=int, action="append", help="default: as many as cores, and 1")
    parser.add_argument("--name", default="cpu", help="of the files in bench/raw/: NAME.json, NAME.md and NAME.png")
    parser.add_argument("--entries", type=Path, help=argparse.SUPPRESS)  # of the process that measures
    options = parser.parse_args()
    if unknown := set(options.operations) - set(OPERATIONS):
        parser.error(f"no such operation: {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    operations = options.operations or list(OPERATIONS)
    if options.entries:
        return measure(operations, options.threads[0], options.entries)

    load_average = [round(load, 2) for load in os.getloadavg()]
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in options.threads or dict.fromkeys((len(os.sched_getaffinity(0)), 1)):
            entries += measure_in_own_process(operations, threads, Path(folder) / "entries.json")
    command = " ".join(["python -m bench", *sys.argv[1:]])
    harness.RESULTS.mkdir(exist_ok=True, parents=True)
    state = {"load_average_at_start": load_average}
    harness.write_json(harness.RESULTS / f"{options.name}.json", command, entries, state)
    harness.write_table(harness.RESULTS / f"{options.name}.md", entries)
    plot.write(harness.RESULTS / f"{options.name}.png", entries)
    print(f"\nLoad average at the start: {load_average[0]}. Written: bench/raw/{options.name}.json, .md and .png.")
    wrong = [e for e in entries if e["bits_ok"] is False]
    return f"bench: {len(wrong)} variants changed bits" if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
