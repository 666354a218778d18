"""python tools/rows_sweep.py [--problems N] [--seed S] [--seconds S]: what rows_fit.py fits, on a machine with a GPU.

Times every kernel of norms and softmax that takes a problem, forced by its name, and a copy of as many bytes, on
problems drawn as rows_fit.drawn draws them, in bf16. One line a problem: operation, M, N, the kernel that the library
chose, and kernel=microseconds. Each is a CUDA graph over buffers that pass the L2. --problem OP:MxN adds some by name.
"""

import argparse
import itertools
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rows_fit

import pydet

POOL = 1 << 28  # elements of a buffer: of each operand and result one
L2_BYTES = 50 << 20
SAMPLE_US, SAMPLES, MOST_CALLS = 400, 3, 24
HOPELESS = 3  # times the best first sample


def kernels_of(operation):
    table = operation.replace("log_prob_backward", "softmax").replace("log_prob", "softmax").replace("log_", "")
    return [kernel.name for kernel in pydet.kernels() if kernel.device == "cuda" and kernel.operation == table]


class Sweep:
    def __init__(self):
        self.pools = [torch.randn(POOL, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        self.pools[2].uniform_(-1, 0)  # y of a gradient
        self.stream = torch.cuda.Stream()

    def calls(self, operation, m, n, kernel):
        """A call for each set of buffers."""
        sets = max(1, min(24, 2 * L2_BYTES // (4 * m * n) + 1, POOL // (m * n + 128)))
        weight, bias = (torch.randn(n, device="cuda").to(torch.bfloat16) for _ in range(2))  # each on a line of its own
        rows, sums = torch.rand(2, m, device="cuda"), torch.empty(n, device="cuda", dtype=torch.bfloat16)
        index, how = torch.randint(n, (m,), device="cuda"), {"kernel": kernel} if kernel else {}

        def call(x, dy, y, out):
            if operation == "copy":
                return partial(out.copy_, x)
            function = partial(getattr(pydet, operation), **how)
            return {
                "rmsnorm": partial(function, x, weight, eps=1e-6, out=(out, rows[0])),
                "layernorm": partial(function, x, weight, bias, eps=1e-6, out=(out, *rows)),
                "rmsnorm_backward": partial(function, dy, x, weight, rows[0], out=out, dweight=sums),
                "layernorm_backward": partial(function, dy, x, weight, *rows, out=out),
                "log_prob": partial(function, x, index),
                "log_prob_backward": partial(function, rows[0], x, index, out=out),
                "softmax_backward": partial(function, dy, y, out=out),
                "log_softmax_backward": partial(function, dy, y, out=out),
            }.get(operation, partial(function, x, out=out))

        for i in range(sets):
            at = i * ((m * n + 127) // 128 * 128)
            yield call(*(pool[at : at + m * n].view(m, n) for pool in self.pools))

    def graph(self, calls, count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for call in itertools.islice(itertools.cycle(calls), count):
                call()
        return graph

    def sample(self, graph, count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / count

    def times(self, operation, m, n):
        """The kernel that the library chose, and microseconds by kernel."""
        operands = 3 if operation.endswith("backward") and "prob" not in operation else 2
        pair = list(self.calls(operation, m, n, None))
        pair[0]()
        chosen, graphs, found, kept = pydet.last_kernel(), {}, {}, []  # kept: what graphs read
        expected = 2 + operands * 2 * m * n / 2e6
        count = max(2, min(MOST_CALLS, round(SAMPLE_US / expected)))
        for name in kernels_of(operation):
            try:
                calls = list(self.calls(operation, m, n, name))
                calls[0]()
            except pydet.Error:
                continue
            kept.append(calls)
            graphs[name] = self.graph(calls, count)
            self.sample(graphs[name], count)
            found[name] = [self.sample(graphs[name], count)]
        if not found:
            return chosen, {}
        copies = list(self.calls("copy", max(1, m * operands // 2), n, None)) if m * operands // 2 * n <= POOL else []
        if copies:
            graphs["copy"] = self.graph(copies, count)
            found["copy"] = [self.sample(graphs["copy"], count)]
        best = min(times[0] for times in found.values())
        for _ in range(SAMPLES - 1):
            for name, times in found.items():
                if times[0] < HOPELESS * best:
                    times.append(self.sample(graphs[name], count))
        return chosen, {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=100, help="of each operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="stops after so many")
    parser.add_argument("--operations", nargs="+", default=list(rows_fit.OPERATIONS))
    parser.add_argument("--problem", nargs="*", default=[])
    options = parser.parse_args()
    named = [(op, *map(int, shape.split("x"))) for op, shape in (one.split(":") for one in options.problem)]
    drawn = [[(op, m, n) for m, n in rows_fit.drawn(op, options.problems, options.seed)] for op in options.operations]
    sweep, start = Sweep(), time.time()
    for operation, m, n in [*named, *itertools.chain(*zip(*drawn, strict=True))]:
        if time.time() > start + options.seconds:
            break
        if m * n > POOL // 2:
            continue
        chosen, times = sweep.times(operation, m, n)
        print(operation, m, n, chosen, *(f"{name}={us:.2f}" for name, us in times.items()), flush=True)


if __name__ == "__main__":
    main()
