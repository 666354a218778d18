"""python tools/sm90_sweep.py --out TIMES.jsonl: what sm90_fit.py fits, on a machine with a Hopper GPU; with --few-rows
what skinny_rules.py reads.

Times every tile of native/gpu/nvidia/sm90/tiles.h, forced by its name, on problems drawn at random from the layers of
published models (bench/model_shapes.py), beside cuBLAS (torch.mm) and the library's choice. One line of JSON a problem:
kind, m, n, k, k_chunk, the operands' layout, the kernel that the library chose, and microseconds by kernel. The
variants take turns, each as a CUDA graph over buffers that pass the L2. A tile that is far behind in its first sample
gets no other. With --few-rows the problems have 1 to 128 rows, and the kernels of skinny.cu are timed too.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pydet
from bench import model_shapes
from bench.cuda import normal, sets_of

SAMPLES = 5
HOPELESS = 1.25  # times the best first sample
MOST_WORK = 1 << 39  # products of a problem: longer ones take too much of the time
SAMPLE_US = 400
CALLS = (3, 24)  # of a graph


class Timer:
    def __init__(self):
        self.stream = torch.cuda.Stream()

    def graph(self, calls, count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(count):
                calls[i % len(calls)]()
        return graph

    def sample(self, graph, count):
        """Microseconds a call."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / count


def operands(problem):
    """a, b and out of one buffer set, in bf16: fp16 takes as long."""
    m, n, k, dtype = problem.m, problem.n, problem.k, torch.bfloat16
    if problem.kind == "forward":
        a, b = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype).T
    elif problem.kind == "dA":
        a, b = normal(m, n, dtype=dtype), normal(n, k, dtype=dtype)
    else:
        a, b = normal(m, n, dtype=dtype).T, normal(m, k, dtype=dtype)
    return a, b, torch.empty(a.shape[0], b.shape[1], dtype=dtype, device="cuda")


def measure(timer, problem, kernels):
    sets = [operands(problem)]
    sets += [operands(problem) for _ in range(sets_of(sum(t.numel() * 2 for t in sets[0]), 16) - 1)]
    calls = {"cublas": [partial(torch.mm, a, b, out=out) for a, b, out in sets]}
    options = {"k_chunk": problem.k_chunk} if problem.k_chunk else {}
    for name in ("chosen", *kernels):
        forced = {} if name == "chosen" else {"kernel": name}
        calls[name] = [partial(pydet.gemm, a, b, out=out, **options, **forced) for a, b, out in sets]
    calls["cublas"][0]()
    graph = timer.graph(calls["cublas"], 2)
    timer.sample(graph, 2)
    count = int(max(CALLS[0], min(CALLS[1], SAMPLE_US / timer.sample(graph, 2))))
    graphs, times = {}, {}
    for name, its_calls in calls.items():
        try:
            its_calls[0]()
        except pydet.Error:
            continue  # a tile without this layout
        if name == "chosen":
            chosen = pydet.last_kernel()
        graphs[name] = timer.graph(its_calls, count)
        graphs[name].replay()
        times[name] = [timer.sample(graphs[name], count)]
    best = min(its[0] for its in times.values())
    for _ in range(SAMPLES - 1):
        for name, graph in graphs.items():
            if times[name][0] < HOPELESS * best or name in ("cublas", "chosen"):
                times[name].append(timer.sample(graph, count))
    a, b, _ = sets[0]
    return {
        "kind": problem.kind,
        "m": a.shape[0],
        "n": b.shape[1],
        "k": a.shape[1],
        "k_chunk": problem.k_chunk,
        "a_k_adjacent": a.stride(1) == 1,
        "b_k_adjacent": b.stride(0) == 1,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "chosen": chosen,
        "us": {name: round(statistics.median(its), 3) for name, its in times.items()},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--least-m", type=int, default=96, help="of forward products: fewer rows are the skinny kernels'"
    )
    parser.add_argument(
        "--kernels", default="", help="part of the names of the tiles to time; none: the library's choice alone"
    )
    parser.add_argument("--few-rows", action="store_true", help="products of 1 to 128 rows, on skinny.cu too")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    families = ("cuda_gemm_sm90_", *(["cuda_skinny_gemm_sm90_"] if options.few_rows else []))
    kernels = [
        k.name
        for k in pydet.kernels()
        if k.name.startswith(families) and "mma" not in k.name and options.kernels in k.name
    ]
    drawn = model_shapes.draw(20 * options.problems, options.seed)
    if options.few_rows:
        rng = random.Random(options.seed)
        drawn = [dataclasses.replace(p, m=rng.randint(1, 128)) for p in drawn if p.kind != "dB" and not p.k_chunk]
    else:
        drawn = [p for p in drawn if p.m >= options.least_m or p.kind != "forward"]
    drawn = [p for p in drawn if p.m * p.n * p.k <= MOST_WORK]
    timer, start = Timer(), time.monotonic()
    with options.out.open("w") as out:
        for done, problem in enumerate(drawn[: options.problems]):
            if time.monotonic() - start > options.seconds:
                print(f"stopped after {done} problems")
                break
            print(json.dumps(measure(timer, problem, kernels)), file=out, flush=True)


if __name__ == "__main__":
    main()
