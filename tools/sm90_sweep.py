"""python tools/sm90_sweep.py --out TIMES.jsonl: what sm90_fit.py fits, on a machine with a Hopper GPU; with --few-rows
what skinny_rules.py reads.

Times every tile of native/gpu/nvidia/sm90/tiles.h, forced by its name, on problems drawn at random from the layers of
published models (bench/model_shapes.py), beside cuBLAS (torch.mm) and the library's choice. One line of JSON a problem:
kind, m, n, k, k_chunk, the operands' layout, the kernel that the library chose, and microseconds by kernel. The
variants take turns, each as a CUDA graph over buffers that pass the L2. A tile that is far behind in its first sample
gets no other; with --within 1.5 none that the rates predict to take over 1.5 times as long as the fastest is timed.
With --few-rows the problems have 1 to 128 rows, or so many as it says (33-96), and the kernels of skinny.cu are timed
too; with --k-chunk all have one and more than one chunk; with --handed-over the library's choice hands tiles over in
all. With --sustained 0.15 the kernels that are near the best are then run for so many seconds twice, in turn in random
orders, and their times are of the last two thirds of that, as the card's power limit has them; the line has the SM
clock of each beside them. --also EXPRESSION names tiles that --within does not leave out; --shapes 4096x4096x4096,...
replaces what is drawn.
"""

import argparse
import dataclasses
import itertools
import json
import math
import random
import re
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sm90_fit

import pydet
from bench import model_shapes
from bench.card import Meter, sustained
from bench.cuda import normal, sets_of

SAMPLES = 5
HOPELESS = 1.25  # times the best first sample
MOST_WORK = 1 << 39  # products of a problem: longer ones take too much of the time
SAMPLE_US = 400
CALLS = (3, 24)  # of a graph
NEAR, MOST_NEAR = 1.06, 9  # times the best one's time, and how many: what --sustained runs


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


def operands(problem, make=normal):
    """a, b and out of one buffer set, in bf16: fp16 takes as long."""
    m, n, k = problem.m, problem.n, problem.k
    make = partial(make, dtype=torch.bfloat16)
    if problem.kind == "forward":
        a, b = make(m, k), make(n, k).T
    elif problem.kind == "dA":
        a, b = make(m, n), make(n, k)
    else:
        a, b = make(m, n).T, make(m, k)
    out = torch.float32 if problem.out == "fp32" else torch.bfloat16
    return a, b, torch.empty(a.shape[0], b.shape[1], dtype=out, device="cuda")


def choice(problem):
    """The kernel that the library chooses."""
    a, b, out = operands(problem, partial(torch.empty, device="cuda"))
    pydet.gemm(a, b, out=out, k_chunk=problem.k_chunk)
    return pydet.last_kernel()


def depth(problem):
    return {"forward": problem.k, "dA": problem.n, "dB": problem.m}[problem.kind]


def near(problem, kernels, within, also):
    """Those that are predicted to take up to `within` times as long as the fastest, or that `also` is found in."""
    a, b, _ = operands(problem, partial(torch.empty, device="meta"))
    extents = {"m": a.shape[0], "n": b.shape[1], "k": a.shape[1], "k_chunk": problem.k_chunk}
    extents |= {"a_k_adjacent": a.stride(1) == 1, "b_k_adjacent": b.stride(0) == 1}
    tiles, rates = sm90_fit.tiles(), sm90_fit.written()
    times = {
        name: sm90_fit.terms(extents, tiles[name], sm90_fit.CLUSTERS) @ rates[name] for name in kernels if name in tiles
    }
    least = min(time for name, time in times.items() if not tiles[name][-1])  # a tile that hands over may not take it
    named = {name for name in times if also and re.search(also, name)}
    return [name for name in kernels if name not in times or name in named or times[name] <= within * least]


def measure(timer, problem, kernels, seconds=0, meter=None):
    sets = [operands(problem)]
    sets += [operands(problem) for _ in range(sets_of(sum(t.numel() * 2 for t in sets[0]), 16) - 1)]
    told = {"out_dtype": torch.float32} if problem.out == "fp32" else {}
    calls = {"cublas": [partial(torch.mm, a, b, out=out, **told) for a, b, out in sets]}
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
    found = {name: statistics.median(its) for name, its in times.items()}
    more = {}
    if seconds:
        tiles = sorted((name for name in found if name not in ("cublas", "chosen")), key=found.get)[:MOST_NEAR]
        names = ["cublas", "chosen", *(name for name in tiles if found[name] < NEAR * found[tiles[0]])]
        turns, more["short_us"] = {name: [] for name in names}, {name: round(us, 3) for name, us in found.items()}
        for _ in range(2):
            for name in random.sample(names, len(names)):
                replays = max(3, round(seconds * 1e6 / (found[name] * count)))
                took, mhz, _ = sustained(graphs[name], replays, meter)
                turns[name].append((took * 1e6 / count, mhz))
        found = {name: statistics.fmean(us for us, _ in its) for name, its in turns.items()}
        more["mhz"] = {name: round(statistics.fmean(mhz for _, mhz in its)) for name, its in turns.items()}
    a, b, _ = sets[0]
    return {
        "kind": problem.kind,
        "out": problem.out if problem.out == "fp32" else "bf16",
        "m": a.shape[0],
        "n": b.shape[1],
        "k": a.shape[1],
        "k_chunk": problem.k_chunk,
        "a_k_adjacent": a.stride(1) == 1,
        "b_k_adjacent": b.stride(0) == 1,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "chosen": chosen,
        "us": {name: round(us, 3) for name, us in found.items()},
        **more,
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
    parser.add_argument("--few-rows", nargs="?", const="1-128", metavar="FROM-TO", help="of so many, on skinny.cu too")
    parser.add_argument("--within", type=float, default=math.inf)
    parser.add_argument("--also", default="", help="tiles that --within does not leave out: found in their names")
    parser.add_argument("--sustained", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--kinds", default="forward,dA,dB", help="those of these alone are drawn")
    parser.add_argument("--shapes", default="", help="M x N x K of forward products, with commas between them")
    parser.add_argument("--k-chunk", type=int, help="of all problems")
    parser.add_argument("--handed-over", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    families = ("cuda_gemm_sm90_", *(["cuda_skinny_gemm_sm90_"] if options.few_rows else []))
    kernels = [
        k.name
        for k in pydet.kernels()
        if k.name.startswith(families) and "mma" not in k.name and options.kernels in k.name
    ]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",") if shape]
    drawn = [model_shapes.Drawn("forward", *shape) for shape in shapes]
    drawn = drawn or model_shapes.draw((80 if options.handed_over else 20) * options.problems, options.seed)
    if options.few_rows:
        rng = random.Random(options.seed)
        rows = tuple(map(int, options.few_rows.split("-")))
        drawn = [dataclasses.replace(p, m=rng.randint(*rows)) for p in drawn if p.kind != "dB" and not p.k_chunk]
    else:
        drawn = [p for p in drawn if p.m >= options.least_m or p.kind == "dB"]
    if options.k_chunk:
        drawn = [dataclasses.replace(p, k_chunk=options.k_chunk) for p in drawn if depth(p) > options.k_chunk]
    drawn = [p for p in drawn if p.m * p.n * p.k <= MOST_WORK and p.kind in options.kinds.split(",")]
    if options.handed_over:
        drawn = (p for p in drawn if choice(p).endswith("_handover"))
    timer, start, meter = Timer(), time.monotonic(), Meter() if options.sustained else None
    with options.out.open("w") as out:
        for done, problem in enumerate(itertools.islice(drawn, options.problems)):
            if time.monotonic() - start > options.seconds:
                print(f"stopped after {done} problems")
                break
            timed = near(problem, kernels, options.within, options.also) if options.within < math.inf else kernels
            print(json.dumps(measure(timer, problem, timed, options.sustained, meter)), file=out, flush=True)


if __name__ == "__main__":
    main()
