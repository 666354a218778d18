"""python -m bench: pydet beside its peers on this machine, at its thread count and at one thread.

`OPERATION --random N --seed S` times N drawn problems instead of the list, and says how they went beside each peer.

A thread count must be set before OpenMP and BLAS are loaded, so each has its own process; within it everything runs
side by side.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from bench import draws, harness, plot

RANDOM = ("gemm", "skinny_gemm", "attention", "rmsnorm", "softmax", "embedding")  # what --random draws
OPERATIONS = (*RANDOM, "scaled_gemm", "tokens", "adamw", "overhead")


def rows_of(operations, threads, count, seed):
    for name in operations:
        module = import_module(f"bench.{name}")
        yield from draws.rows(module.draw, count, seed) if count else module.rows(threads)


def measure(options, operations):
    threads = options.threads[0]
    rows = [*rows_of(operations, threads, options.random, options.seed)]
    options.entries.write_text(json.dumps(harness.run(rows, harness.Cpu(), threads)))


def measure_in_own_process(options, operations, threads, path):
    names = ("PYDET_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    settings = dict.fromkeys(names, str(threads))
    settings |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # glibc: freed memory stays mapped
    command = [sys.executable, "-m", "bench", *operations, "--threads", str(threads), "--entries", str(path)]
    if options.random:
        command += ["--random", str(options.random), "--seed", str(options.seed)]
    print(f"\n{threads} thread{'s' * (threads > 1)}\n", flush=True)
    if subprocess.run(command, env=os.environ | settings, check=False).returncode:
        sys.exit(f"bench: the run with {threads} threads failed")
    return json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0].split(": ")[1])
    parser.add_argument("operations", nargs="*", metavar="operation", help=f"of {', '.join(OPERATIONS)}; default all")
    parser.add_argument("--threads", type=int, action="append", help="default: as many as cores, and 1")
    parser.add_argument("--random", type=int, metavar="N", help=f"{', '.join(RANDOM)}: N problems drawn, not the list")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument(
        "--name",
        help="of the files in bench/raw/: NAME.json, NAME.md and, of a list, with matplotlib, NAME.png; "
        "default cpu, or cpu_OPERATION_random",
    )
    parser.add_argument("--entries", type=Path, help=argparse.SUPPRESS)  # of the process that measures
    options = parser.parse_args()
    if unknown := set(options.operations) - set(OPERATIONS):
        parser.error(f"no such operation: {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    operations = options.operations or list(OPERATIONS)
    drawn = options.random is not None
    if drawn and (len(operations) > 1 or operations[0] not in RANDOM or options.random < 1):
        parser.error(f"--random is for one of {', '.join(RANDOM)}, and draws at least one problem")
    if options.entries:
        return measure(options, operations)

    load_average = [round(load, 2) for load in os.getloadavg()]
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in options.threads or dict.fromkeys((len(os.sched_getaffinity(0)), 1)):
            entries += measure_in_own_process(options, operations, threads, Path(folder) / "entries.json")
    command = " ".join(["python -m bench", *sys.argv[1:]])
    name = options.name or "cpu" + f"_{operations[0]}_random" * drawn
    harness.RESULTS.mkdir(exist_ok=True, parents=True)
    harness.write_json(harness.RESULTS / f"{name}.json", command, entries, {"load_average_at_start": load_average})
    harness.write_table(harness.RESULTS / f"{name}.md", entries)
    if drawn:
        lines = draws.summary(entries)
        print("", *lines, sep="\n")
        with (harness.RESULTS / f"{name}.md").open("a") as table:
            table.write("\n" + "".join(f"- {line}\n" for line in lines))
    plotted = not drawn and importlib.util.find_spec("matplotlib") is not None
    if plotted:
        plot.write(harness.RESULTS / f"{name}.png", entries)
    disturbed = sum(entry["disturbed"] > entry["samples"] // 2 for entry in entries)
    print(f"\nLoad average at the start: {load_average[0]}. Disturbed (~): {disturbed} of {len(entries)} figures.")
    print(f"Written: bench/raw/{name}.json and .md{', and .png' * plotted}.")
    wrong = [e for e in entries if e["bits_ok"] is False]
    for e in wrong:
        print(f"wrong bits: {e['op']} {e['shape']} {e['dtype']} {e['variant']}, {e['threads']} thr.")
    return f"bench: {len(wrong)} variants changed bits" if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
