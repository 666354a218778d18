"""Groups of tokens by their own matrices, and their gradient, beside torch._grouped_mm and one torch.mm a group.

A row is one sharing out of tokens. torch's loop of products knows the boundaries on the host; the other two do not.
"""

import itertools
from functools import partial

import numpy as np
import torch

import pydet
from bench.harness import Row, Variant

# (name, tokens of each group, N, K): dense layers, skewed routings, and decoding.
EVEN = [([4096] * 8, 4096, 7168), ([256] * 32, 4096, 7168), ([256] * 32, 7168, 2048), ([8] * 256, 4096, 2048)]
DECODE = [([tokens] * 32, 4096, 7168) for tokens in (1, 4, 16)]


def zipf(tokens, groups):
    weights = 1 / np.arange(1, groups + 1)
    return np.random.default_rng(0).multinomial(tokens, weights / weights.sum()).tolist()


ROUTINGS = {
    "even": EVEN,
    "Zipf": [(zipf(8192, 32), 4096, 7168), (zipf(8192, 128), 4096, 2048)],
    "one hot": [([4096] + [16] * 31, 4096, 7168)],
    "decode": DECODE,
}
WGRAD = {"even": [([4096] * 8, 4096, 7168), ([256] * 32, 4096, 2048)], "Zipf": [(zipf(8192, 32), 4096, 2048)]}


def peers_of(make_torch, make_loop, names=("torch._grouped_mm", "a torch.mm each")):
    """torch's grouped product where this build and device take it; and the loop."""
    calls = make_torch()
    try:
        calls[0]()
    except (RuntimeError, ValueError, AttributeError) as problem:
        print(f"{names[0]} is left out: {str(problem).splitlines()[0]}")
    else:
        yield Variant(names[0], calls)
    yield Variant(names[1], make_loop())


def row(op, routing, sizes, n, k, calls, outs, peers, agrees, dtype="bf16"):
    shape = f"{len(sizes)} groups, {sum(sizes)} tokens ({routing}, most {max(sizes)}), {n} x {k}"
    few = max(sizes) <= 16
    work, unit = (
        (len(sizes) * n * k * (2 if dtype == "bf16" else 1), "GB/s") if few else (2 * sum(sizes) * n * k, "GFLOP/s")
    )
    peers = list(peers)
    variants = [Variant("pydet", calls, [outs[0]]), *peers]
    return Row(op, shape, dtype, variants, peers[0].name, work, unit, agrees)


def ends_of(sizes):
    return torch.from_numpy(np.cumsum(sizes).astype(np.int32)).cuda()


def each_group(sizes, product):
    """A call that makes the groups' products one after the other."""
    bounds = np.cumsum([0, *sizes]).tolist()

    def call():
        for g, (first, last) in enumerate(itertools.pairwise(bounds)):
            if last > first:
                product(g, first, last)

    return call


def forward(routing, sizes, n, k):
    tokens, end = sum(sizes), ends_of(sizes)
    sets = [
        (
            torch.randn(tokens, k, device="cuda").bfloat16(),
            (torch.randn(len(sizes), n, k, device="cuda") / 64).bfloat16(),
        )
        for _ in range(2)
    ]
    outs = [torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda") for _ in sets]
    calls = [partial(pydet.grouped_gemm, a, w.mT, end, out=out) for (a, w), out in zip(sets, outs, strict=True)]

    def loop():
        others = [torch.empty_like(out) for out in outs]
        return [
            each_group(sizes, lambda g, i, j, a=a, w=w, out=out: torch.mm(a[i:j], w[g].t(), out=out[i:j]))
            for (a, w), out in zip(sets, others, strict=True)
        ]

    def agrees():
        """A group's first row alone has the bits that it had among all."""
        bounds = np.cumsum([0, *sizes])
        for g in (0, len(sizes) // 2, len(sizes) - 1):
            if sizes[g]:
                t, (a, w) = int(bounds[g]), sets[0]
                alone = pydet.gemm(a[t : t + 1], w[g].t())
                if not torch.equal(alone.view(torch.int16), outs[0][t : t + 1].view(torch.int16)):
                    return False
        return True

    peers = peers_of(lambda: [partial(torch._grouped_mm, a, w.mT, offs=end) for a, w in sets], loop)
    return row("grouped_gemm", routing, sizes, n, k, calls, outs, peers, agrees)


def gradient(routing, sizes, n, k):
    """Of the weights: out[g] [n, k] from tokens x n and tokens x k."""
    tokens, end = sum(sizes), ends_of(sizes)
    sets = [
        (torch.randn(tokens, n, device="cuda").bfloat16(), torch.randn(tokens, k, device="cuda").bfloat16())
        for _ in range(2)
    ]
    outs = [torch.empty(len(sizes), n, k, dtype=torch.bfloat16, device="cuda") for _ in sets]
    calls = [partial(pydet.grouped_gemm, dy.t(), x, end, out=out) for (dy, x), out in zip(sets, outs, strict=True)]

    def loop():
        others = [torch.empty_like(out) for out in outs]
        return [
            each_group(sizes, lambda g, i, j, dy=dy, x=x, out=out: torch.mm(dy[i:j].t(), x[i:j], out=out[g]))
            for (dy, x), out in zip(sets, others, strict=True)
        ]

    def agrees():
        dy, x = (t[: sizes[0]] for t in sets[0])
        return torch.equal(pydet.gemm(dy.t(), x).view(torch.int16), outs[0][0].view(torch.int16))

    peers = peers_of(lambda: [partial(torch._grouped_mm, dy.t(), x, offs=end) for dy, x in sets], loop)
    return row("grouped_gemm, depth", routing, sizes, n, k, calls, outs, peers, agrees)


def rows(quick):
    for make, table in ((forward, ROUTINGS), (gradient, WGRAD)):
        for routing, shapes in table.items():
            for sizes, n, k in shapes[:1] if quick else shapes:
                yield partial(make, routing, sizes, n, k)


def scaled(recipe, routing, sizes, n, k):
    """fp8 by 128 along k and 128 x 128 blocks, or by rows, beside torch by rows and a scaled_gemm each."""
    tokens, end = sum(sizes), ends_of(sizes)
    of_a, of_w = {"blocks": ("group", "block"), "rows": ("row", "row")}[recipe]
    sets = []
    for _ in range(2):
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        w = (torch.randn(len(sizes), n, k, device="cuda") / 64).bfloat16()
        sets.append((pydet.quantize(x, granularity=of_a), pydet.quantize(w, granularity=of_w)))
    outs = [torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda") for _ in sets]
    calls = [
        partial(pydet.scaled_grouped_gemm, a, w.mT, end, a_scale=sa, b_scale=sw.mT, out=out)
        for ((a, sa), (w, sw)), out in zip(sets, outs, strict=True)
    ]

    def by_rows():
        """torch's kernel has scales of rows alone: the same bytes, with such."""
        ones = torch.ones(tokens, device="cuda"), torch.ones(len(sizes), n, device="cuda")
        return [
            partial(torch._scaled_grouped_mm, a, w.mT, *ones, offs=end, out_dtype=torch.bfloat16, use_fast_accum=True)
            for (a, _), (w, _) in sets
        ]

    def alone(i, g, first, last, out):
        (a, sa), (w, sw) = sets[i]
        pydet.scaled_gemm(a[first:last], w[g].t(), a_scale=sa[first:last], b_scale=sw[g].t(), out=out[first:last])

    def loop():
        others = [torch.empty_like(out) for out in outs]
        return [
            each_group(sizes, lambda g, first, last, i=i, out=out: alone(i, g, first, last, out))
            for i, out in enumerate(others)
        ]

    def agrees():
        """Groups of their own have the bits that they had among all."""
        other = torch.zeros_like(outs[0])
        each_group(sizes, lambda g, first, last: alone(0, g, first, last, other))()
        return torch.equal(other.view(torch.int16), outs[0].view(torch.int16))

    peers = list(peers_of(by_rows, loop, ("torch._scaled_grouped_mm", "a scaled_gemm each")))
    return row(f"scaled_grouped_gemm, {recipe}", routing, sizes, n, k, calls, outs, peers, agrees, "e4m3")


def scaled_rows(quick):
    for recipe in ("blocks", "rows"):
        for routing, shapes in ROUTINGS.items():
            for sizes, n, k in shapes[:1] if quick else shapes:
                yield partial(scaled, recipe, routing, sizes, n, k)


ROWS = {"grouped_gemm": rows, "scaled_grouped_gemm": scaled_rows}
