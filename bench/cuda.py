"""python -m bench.cuda: pydet beside its peers on an NVIDIA GPU, in CUDA graphs.

The peers are PyTorch (cuBLAS for products, its own kernels for RMSNorm), a plain Triton product, quack and Liger where
they are installed, and a device-to-device copy as the ceiling of what only moves memory. Every product is of normal
random numbers; buffers rotate past the L2. `equality` counts the elements in which cuBLAS has other bits than the
natural chain. `--quick` takes a few shapes of each operation. `gemm --random N --seed S` times N products drawn from
the layers of published models (model_shapes.py) instead of the list: M log-uniform, each direction, types, k_chunk;
`rmsnorm --random N --seed S` N norms of any shape (cuda_norms.py); so layernorm and softmax; `attention --random N
--seed S` N prefills of published models' heads (cuda_attention.py), and so attention_varlen, _backward,
_backward_varlen, _decode, _paged, and _mma and _backward_mma by mma.sync. `sample`, `topk`, `activation`,
`embedding` and `head` (cuda_tokens.py) have lists and draws alike, and `scaled_gemm` (cuda_fp8.py). `adamw` and
`adamw_steps` (cuda_optimizer.py) are lists.

`--unseen` draws products of models that no table of tiles was fitted to, K of no whole 64 among them. `--sustained S`
runs each variant for S seconds at a time, so that the card's power limit holds; its clock and power are in each row.
"""

import argparse
import itertools
import math
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

import pydet
import pydet.torch
from bench import (
    cuda_attention,
    cuda_fold,
    cuda_fp8,
    cuda_grouped,
    cuda_norms,
    cuda_optimizer,
    cuda_tokens,
    draws,
    harness,
    model_shapes,
    plot,
)
from bench.card import Meter, sustained
from bench.cuda_norms import copying, normal, sets_of
from bench.harness import Row, Variant

NK = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (5120, 5120),
    (7168, 2048),
    (2048, 7168),
    (12288, 4096),
    (14336, 4096),
    (32000, 4096),
]
M_LARGE = [512, 1024, 2048, 4096, 8192, 16384]
M_MEDIUM = [64, 128, 256, 300]
SKINNY_NK = [
    (4096, 4096),
    (6144, 4096),
    (1024, 4096),
    (28672, 4096),
    (4096, 14336),
    (768, 4096),
    (7168, 2048),
    (8192, 1024),
    (2048, 7168),
    (128256, 4096),
]
SKINNY_M = [1, 2, 4, 8, 16, 32, 64, 128]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Cuda:
    """Device time: the calls of a sample are one graph, replayed between two events."""

    SAMPLES, FEWEST_SAMPLES, ROW_SECONDS, SAMPLE_SECONDS = 9, 5, 5, 0.003
    disturbed = 0  # nobody else runs on it

    def __init__(self):
        self.graphs = {}  # (id of a list of calls, count): (the list, so that no other gets its id, and the graph)

    def start_row(self):
        self.graphs.clear()
        torch.cuda.empty_cache()

    def graph(self, calls, count):
        key = id(calls), count
        if key not in self.graphs:
            stream = torch.cuda.Stream()
            # What made the operands may be under way, and what last had their memory: rows end with calls that nobody
            # waits for, and a row's memory goes to the next one.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for call in calls:  # what allocates or compiles on its first call does so here
                    call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                results = [None] * len(calls)  # kept so long, what a call allocates rotates as its buffers do
                for i in range(count):
                    results[i % len(calls)] = calls[i % len(calls)]()
            self.graphs[key] = calls, graph
        return self.graphs[key][1]

    def sample(self, calls, count):
        """Seconds a call."""
        graph = self.graph(calls, count)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    def take(self, calls, count):
        """Seconds a call of a sample that counts, and what else was read meanwhile."""
        return self.sample(calls, count), {}

    def clear(self, tensor):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def read(self, tensor):
        """A hash of all its words and their places, made on the device."""
        words = (
            tensor.contiguous()
            .view({8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()])
            .reshape(-1)
        )
        total = 0
        for first in range(0, words.numel(), 1 << 26):
            part = words[first : first + (1 << 26)].long()
            place = torch.arange(first, first + part.numel(), device=part.device)
            total += int(((part + 0x9E3779B9) * (2 * place + 1) ^ (part << 17)).sum())
        return (total % 2**64).to_bytes(8, "little")


class Sustained(Cuda):
    """The same, with samples of so many seconds, of which the last two thirds count: before, the clock settles."""

    SAMPLES = FEWEST_SAMPLES = 2

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.meter = seconds, Meter()

    def take(self, calls, count):
        graph = self.graph(calls, count)
        replays = max(3, round(self.seconds / (self.sample(calls, count) * count)))
        seconds, mhz, watts = sustained(graph, replays, self.meter)
        return seconds / count, {"mhz": round(mhz), "watts": round(watts)}


# ---- A plain product in Triton -------------------------------------------------------------------------------------

try:
    import triton
    import triton.language as tl
except ImportError:
    triton_product = None
else:

    @triton.autotune(
        configs=[
            triton.Config({"BM": bm, "BN": bn, "BK": 64}, num_stages=stages, num_warps=warps)
            for bm, bn, stages, warps in [(128, 256, 3, 8), (128, 128, 4, 8), (128, 64, 4, 4), (64, 128, 4, 4)]
        ],
        key=["M", "N", "K"],
    )
    @triton.jit
    def _triton_product(
        a, b, c, M, N, K, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
    ):  # fmt: skip
        """c [M, N] = a b, fp32 sums over k ascending, tiles walked in bands of 8 rows of tiles."""
        tile, rows, columns = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
        band = tile // (8 * columns)
        height = min(rows - band * 8, 8)
        m = (band * 8 + tile % (8 * columns) % height) * BM + tl.arange(0, BM)
        n = tile % (8 * columns) // height * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            left = tl.load(a + (m % M)[:, None] * am + (start + k)[None, :] * ak, (start + k)[None, :] < K, 0.0)
            right = tl.load(b + (start + k)[:, None] * bk + (n % N)[None, :] * bn, (start + k)[:, None] < K, 0.0)
            total = tl.dot(left, right, total)
        tl.store(
            c + m[:, None].to(tl.int64) * N + n[None, :], total.to(tl.bfloat16), (m[:, None] < M) & (n[None, :] < N)
        )

    def triton_product(a, b, out):
        (m, k), n = a.shape, b.shape[1]
        _triton_product[lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)](
            a, b, out, m, n, k, *a.stride(), *b.stride()
        )


# ---- Products ------------------------------------------------------------------------------------------------------


def product(op, m, n, k, operands, like, variants, note="", peers=("triton",), call=pydet.gemm, result=None):
    """operands() makes one set: a, b of type `like` with out = a b; `result` is the type of the peer's, if another."""
    sets = [operands() for _ in range(sets_of(2 * (m * k + n * k)))]
    outs = [torch.empty(m, n, dtype=result or like, device="cuda") for _ in sets]
    told = {"out_dtype": result} if result not in (None, like) else {}
    rows = [
        Variant("cublas", [partial(torch.mm, a, b, out=out, **told) for (a, b), out in zip(sets, outs, strict=True)])
    ]
    for name, options in variants.items():
        kind = options.pop("dtype", like)
        own = [torch.empty(m, n, dtype=kind, device="cuda") for _ in sets]
        calls = [partial(call, a, b, out=out, **options) for (a, b), out in zip(sets, own, strict=True)]
        rows.append(Variant(name, calls, [own[0]]))
    first = rows[1]
    if triton_product and "triton" in peers and like == torch.bfloat16:
        ours = [torch.empty(m, n, dtype=like, device="cuda") for _ in sets]
        calls = [partial(triton_product, a, b, out) for (a, b), out in zip(sets, ours, strict=True)]
        rows.append(Variant("triton", calls))

    def agrees():
        """Rows of their own, as one call of few rows, have the bits they had among all."""
        a, b = sets[0]
        options = first.calls[0].keywords
        extra = {key: options[key] for key in ("k_chunk", "arithmetic") if key in options}
        for row in (0, m // 2, m - 1):
            alone = pydet.gemm(a[row : row + 1], b, out_dtype=first.outputs[0].dtype, **extra)
            if not torch.equal(alone.view(torch.uint8), first.outputs[0][row : row + 1].view(torch.uint8)):
                return False
        return True

    return Row(
        op,
        f"{m} x {n} x {k}",
        next(name for name, dtype in DTYPES.items() if dtype == like),
        rows,
        "cublas",
        2 * m * n * k,
        "GFLOP/s",
        agrees,
        note,
        len(variants) == 1,
    )


# Where cuBLAS has the natural chain's bits, and where it splits K and has others.
EQUALITY = [
    *[(8192, 8192, 8192), (4096, 4096, 4096), (2048, 6144, 4096), (2048, 4096, 14336), (512, 4096, 4096)],
    *[(512, 4096, 14336), (256, 4096, 4096), (256, 4096, 14336), (64, 4096, 4096), (32, 4096, 4096)],
    *[(128, 1024, 4096), (64, 4096, 14336), (16, 4096, 14336), (8, 4096, 4096), (1, 4096, 4096), (16, 1024, 4096)],
]


def equality():
    """In how many elements cuBLAS (torch.mm, bf16) differs from pydet without k_chunk."""
    found = []
    for m, n, k in EQUALITY:
        a, b = normal(m, k), normal(n, k).T
        differing = int((torch.mm(a, b).view(torch.int16) != pydet.gemm(a, b).view(torch.int16)).sum())
        found.append({"shape": f"{m} x {n} x {k}", "elements": m * n, "differ": differing})
    return found


def forward(m, n, k, variants=None):
    variants = {name: dict(options) for name, options in (variants or {"pydet": {}}).items()}
    return product("gemm forward", m, n, k, lambda: (normal(m, k), normal(n, k).T), torch.bfloat16, variants)


def gradient_a(m, n, k):
    return product("gemm dA", m, k, n, lambda: (normal(m, n), normal(n, k)), torch.bfloat16, {"pydet": {}})


def gradient_b(m, n, k):
    return product("gemm dB", n, k, m, lambda: (normal(m, n).T, normal(m, k)), torch.bfloat16, {"pydet": {}})


def random_rows(count, seed, shapes=None, least_m=1):
    """Products drawn from the layers of published models, in each direction; few tokens go to skinny_gemm."""
    for drawn in model_shapes.draw(count, seed, least_m=least_m, shapes=shapes):
        yield partial(random_row, drawn)


def random_row(drawn):
    m, n, k, dtype = drawn.m, drawn.n, drawn.k, DTYPES[drawn.dtype]
    options = {"k_chunk": drawn.k_chunk} if drawn.k_chunk else {}
    if drawn.out != drawn.dtype:
        options["dtype"] = DTYPES[drawn.out]
    make = partial(normal, dtype=dtype)
    few = drawn.kind == "forward" and m <= SKINNY_M[-1]
    op = f"gemm {drawn.kind}" if not few else "skinny_gemm"
    op += f" {drawn.dtype}" * (drawn.dtype != "bf16") + ", fp32 out" * (drawn.out == "fp32")
    op += f", k_chunk {drawn.k_chunk}" if drawn.k_chunk else ""
    shared = {"like": dtype, "variants": {"pydet": options}, "peers": (), "result": DTYPES[drawn.out]}
    if drawn.kind == "dA":
        return product(op, m, k, n, lambda: (make(m, n), make(n, k)), **shared)
    if drawn.kind == "dB":
        return product(op, n, k, m, lambda: (make(m, n).T, make(m, k)), **shared)
    call = partial(few_rows, weights_constant=True) if few else pydet.gemm
    return product(op, m, n, k, lambda: (make(m, k), make(n, k).T), **shared, call=call)


def few_rows(x, w_transposed, **options):
    return pydet.skinny_gemm(x, w_transposed.T, **options)


def ieee(size):
    make = partial(normal, size, size, dtype=torch.float32)
    return product("gemm ieee", size, size, size, lambda: (make(), make().T), torch.float32, {"pydet": {}})


def gemm_rows(quick):
    shapes = [(m, n, k) for n, k in (NK[:3] if quick else NK) for m in ([512, 4096] if quick else M_LARGE)]
    chunked = {"pydet": {}, "pydet, k_chunk 1024": {"k_chunk": 1024}}
    for m, n, k in shapes:
        yield partial(forward, m, n, k, chunked if k > 1024 else None)
    for direction in (gradient_a, gradient_b):
        for m, n, k in shapes:
            yield partial(direction, m, n, k)
    for m in M_MEDIUM:
        for n, k in NK[:2] if quick else NK:
            yield partial(forward, m, n, k)
    for m, n, k in [(4096, 4096, 4096), (8192, 6144, 4096), (2048, 28672, 4096)]:
        bias = normal(n)
        yield partial(
            forward, m, n, k, {"pydet": {}, "pydet, fp32 out": {"dtype": torch.float32}, "pydet, bias": {"bias": bias}}
        )
    for size in (4096,) if quick else (4096, 8192):
        yield partial(ieee, size)


def skinny(m, n, k):
    x = normal(m, k)
    weights = [normal(n, k) for _ in range(sets_of(2 * n * k, 400))]
    ways = {
        "pydet": {},
        "pydet, weights_constant": {"weights_constant": True},
        "pydet, fast": {"weights_constant": True, "mode": "fast"},
        "pydet, k_chunk 1024": {"weights_constant": True, "k_chunk": 1024},
    }
    ys = [torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in range(len(ways) + 1)]
    variants = [Variant("cublas", [partial(torch.mm, x, w.T, out=ys[-1]) for w in weights])]
    for y, (name, options) in zip(ys, ways.items(), strict=False):
        variants.append(Variant(name, [partial(pydet.skinny_gemm, x, w, out=y, **options) for w in weights]))
    check = torch.empty_like(ys[0])
    variants[1].calls.append(partial(pydet.skinny_gemm, x, weights[0], out=check))
    variants[1].outputs.append(check)

    def agrees():
        alone = torch.cat([pydet.gemm(x[i : i + 1], weights[0].T) for i in range(m)])
        return torch.equal(alone.view(torch.int16), check.view(torch.int16))

    return Row("skinny_gemm", f"{m} x {n} x {k}", "bf16", variants, "cublas", 2 * n * k, "GB/s", agrees)


DECODE_LAYER = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # qkv, o, gate_up, down of Llama 3 8B


def decode_layer(m):
    """The four products of a layer, each on the result (its first columns) of the one before; weights of two layers."""
    layers = [[normal(n, k) * k**-0.5 for n, k in DECODE_LAYER] for _ in range(2)]
    x = normal(m, 4096)

    def calls(product):
        outs = [[torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for n, _ in DECODE_LAYER] for _ in layers]

        def layer(weights, its_outs):
            given = x
            for w, out in zip(weights, its_outs, strict=True):
                product(given[:, : w.shape[1]], w, out)
                given = out

        return [partial(layer, *pair) for pair in zip(layers, outs, strict=True)], [outs[0][-1]]

    ways = {
        "cublas": lambda x, w, out: torch.mm(x, w.T, out=out),
        "pydet": lambda x, w, out: pydet.skinny_gemm(x, w, out=out),
        "pydet, weights_constant": lambda x, w, out: pydet.skinny_gemm(x, w, out=out, weights_constant=True),
    }
    variants = []
    for name, product in ways.items():
        made, outputs = calls(product)
        variants.append(Variant(name, made, outputs if name != "cublas" else []))
    work = sum(2 * n * k for n, k in DECODE_LAYER)
    return Row("decode layer", f"{m} rows", "bf16", variants, "cublas", work, "GB/s")


def decode_rows(quick):
    for m in (1, 64) if quick else SKINNY_M:
        yield partial(decode_layer, m)


def skinny_rows(quick):
    for n, k in SKINNY_NK[:3] if quick else SKINNY_NK:
        for m in (1, 16, 64) if quick else SKINNY_M:
            yield partial(skinny, m, n, k)


# ---- Host time -----------------------------------------------------------------------------------------------------


def host_microseconds(call, count=2000):
    """Of one call that only enqueues, the median of batches."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count // 10):
            call()
        times.append((time.perf_counter() - start) / (count // 10) * 1e6)
    return statistics.median(times)


def overhead():
    a, b = normal(1, 64), normal(64, 64)
    out = torch.empty(1, 64, dtype=torch.bfloat16, device="cuda")
    calls = {
        "torch.mm, out=": partial(torch.mm, a, b, out=out),
        "pydet.gemm, out=": partial(pydet.gemm, a, b, out=out),
        "torch.mm": partial(torch.mm, a, b),
        "pydet.gemm": partial(pydet.gemm, a, b),
        "torch.ops.pydet.gemm": partial(torch.ops.pydet.gemm, a, b),
    }
    return [{"call": name, "us": round(host_microseconds(call), 2)} for name, call in calls.items()]


# ---- The card ------------------------------------------------------------------------------------------------------


def card():
    """How fast the card is now: one large cuBLAS product and one copy, and what nvidia-smi says of it right after.

    A card that gets hot or is short of power slows down by much, and its ratios are then not those of a healthy one.
    """
    a, b = normal(8192, 8192), normal(8192, 8192)
    out = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
    device, move = Cuda(), copying((a, b, out))
    seconds = [
        statistics.median(device.sample([call], 4) for _ in range(3))
        for call in (partial(torch.mm, a, b, out=out), move)
    ]
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "cublas_8192_tflops": round(2 * 8192**3 / seconds[0] / 1e12, 1),
        "copy_gb_per_s": round(3 * 2 * 8192**2 / seconds[1] / 1e9),
        fields: smi.stdout.strip(),
    }


# ---- Running -------------------------------------------------------------------------------------------------------

LISTS = {"overhead": overhead, "equality": equality, "rmsnorm_accuracy": cuda_norms.accuracy}
LISTS |= {"head_memory": cuda_tokens.head_memory, **cuda_optimizer.LISTS}
# Rows of out of a product that was drawn at random, up to and including.
RANGES = [64, 128, 512, 2048, 8192]


def random_summary(entries):
    """How the drawn products went, by what they are and by M of a forward one."""
    groups = {}
    for entry in entries:
        if not entry["times_peer"]:
            continue
        rows = int(entry["shape"].split(" x ")[0])
        groups.setdefault("all", []).append(entry)
        groups.setdefault(entry["op"], []).append(entry)
        if entry["op"].split(",")[0].split(" ")[:2] not in (["gemm", "dA"], ["gemm", "dB"]):
            least = 1
            for most in RANGES:
                if least <= rows <= most:
                    groups.setdefault(f"forward, {least} to {most} rows", []).append(entry)
                least = most + 1
        if int(entry["shape"].split(" x ")[2]) % 64:
            groups.setdefault("sums over no whole 64", []).append(entry)
    return [
        f"{name:34} pydet / cublas: {draws.said((entry['times_peer'], entry['shape']) for entry in its)}"
        for name, its in groups.items()
    ]


ROWS = {
    "gemm": gemm_rows,
    "skinny_gemm": skinny_rows,
    "decode": decode_rows,
    **cuda_norms.ROWS,
    **cuda_fp8.ROWS,
    **cuda_grouped.ROWS,
    **cuda_fold.ROWS,
    **cuda_optimizer.ROWS,
    **cuda_attention.ROWS,
    **cuda_tokens.ROWS,
}

# What --random draws, and what is said of it.
RANDOM = {"gemm": (random_rows, random_summary)}
RANDOM |= {name: (draw, cuda_norms.random_summary) for name, draw in cuda_norms.RANDOM.items()}
RANDOM |= {name: (draw, cuda_attention.random_summary) for name, draw in cuda_attention.RANDOM.items()}
RANDOM |= {name: (draw, draws.summary) for name, draw in {**cuda_tokens.RANDOM, **cuda_fp8.RANDOM}.items()}


def summary(entries):
    """How each variant went over each operation's shapes."""
    groups = {}
    for entry in entries:
        if entry["times_peer"]:
            groups.setdefault((entry["op"], entry["variant"], entry["peer"]), []).append(
                (entry["times_peer"], entry["shape"])
            )
    return [f"{op:18} {variant:26} / {peer}: {draws.said(ratios)}" for (op, variant, peer), ratios in groups.items()]


def within(rows, seconds):
    """As many of the rows as are asked for in time."""
    start = time.monotonic()
    return itertools.takewhile(lambda _: time.monotonic() - start < seconds, rows)


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.cuda", description=__doc__.splitlines()[0].split(": ")[1])
    parser.add_argument(
        "operations", nargs="*", metavar="operation", help=f"of {', '.join([*ROWS, *LISTS])}; default all"
    )
    parser.add_argument("--quick", action="store_true", help="a few shapes of each")
    parser.add_argument("--random", type=int, metavar="N", help=f"{', '.join(RANDOM)}: N problems drawn, not the list")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument("--unseen", action="store_true", help="gemm: of models that no table was fitted to")
    parser.add_argument("--least-rows", type=int, default=1, metavar="M", help="of gemm --random")
    parser.add_argument("--sustained", type=float, metavar="S", help="run each variant for so many seconds, twice")
    parser.add_argument("--part", default="1/1", metavar="I/P", help="every P-th of the rows, from the I-th on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row of an operation after so long")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the results")
    options = parser.parse_args()
    operations = options.operations or [*ROWS, *LISTS]
    if options.random and (len(operations) > 1 or operations[0] not in RANDOM):
        parser.error(f"--random is for one of {', '.join(RANDOM)}")
    if (options.unseen or options.least_rows > 1) and not (options.random and operations == ["gemm"]):
        parser.error("--unseen and --least-rows are for gemm --random")
    if unknown := set(operations) - {*ROWS, *LISTS}:
        parser.error(f"no such operation: {', '.join(sorted(unknown))}")
    device, wrong = Sustained(options.sustained) if options.sustained else Cuda(), []
    name = torch.cuda.get_device_name().split()[1].lower()
    options.out.mkdir(exist_ok=True, parents=True)
    command = " ".join(["python -m bench.cuda", *sys.argv[1:]])
    for operation in operations:
        if operation in LISTS:
            found = LISTS[operation]()
            for entry in found:
                print(f"{operation}: " + ", ".join(f"{key} {value}" for key, value in entry.items()))
            harness.write_json(options.out / f"{name}_{operation}.json", command, found, {})
            continue
        before = card()
        drawn, (draw, summarise) = bool(options.random), RANDOM.get(operation, (None, None))
        if operation == "gemm":
            shapes = model_shapes.unseen() if options.unseen else None
            draw = partial(draw, shapes=shapes, least_m=options.least_rows)
        rows = draw(options.random, options.seed) if drawn else ROWS[operation](options.quick)
        part, parts = map(int, options.part.split("/"))
        rows = itertools.islice(rows, part - 1, None, parts)
        entries = harness.run(within(rows, options.seconds), device, 0)
        after = card()
        print(f"card before: {before}\ncard after:  {after}")
        lines = summarise(entries) if drawn else summary(entries)
        print("\n".join(lines), flush=True)
        kinds = "_unseen" * options.unseen + "_sustained" * bool(options.sustained)
        path = options.out / (f"{name}_{operation}{kinds}" + "_random" * drawn)
        harness.write_json(path.with_suffix(".json"), command, entries, {"card_before": before, "card_after": after})
        harness.write_table(path.with_suffix(".md"), entries)
        with path.with_suffix(".md").open("a") as table:
            table.write("\n" + "".join(f"- {line}\n" for line in lines))
        if not drawn:  # hundreds of bars
            plot.write(path.with_suffix(".png"), entries)
        wrong += [entry for entry in entries if entry["bits_ok"] is False]
    for entry in wrong:
        print(f"wrong bits: {entry['op']} {entry['shape']} {entry['variant']}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
