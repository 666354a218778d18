"""RMSNorm, LayerNorm and softmax rows on an NVIDIA GPU, beside PyTorch's, and a copy of as many bytes as the ceiling.

quack and Liger stand beside them where they are installed. `RANDOM` draws shapes of each: M log-uniform to 200,000, N
to 16,384 (softmax: 131,072) in steps of 8, or any N for one in four.
"""

import math
from functools import partial

import torch

import pydet
from bench import draws
from bench.harness import Row, Variant

L2_BYTES = 50 << 20
NORM_M = [4096, 16384, 65536]
NORM_N = [256, 512, 1024, 2048, 4096, 8192, 16384]
EPS = 1e-6
LIGER_SOFTMAX_N = 65536  # longer rows it refuses

try:
    from quack.rmsnorm import layernorm_bwd as quack_layer_backward
    from quack.rmsnorm import layernorm_fwd as quack_layer_forward
    from quack.rmsnorm import rmsnorm_bwd as quack_backward
    from quack.rmsnorm import rmsnorm_fwd as quack_forward
    from quack.softmax import softmax_bwd as quack_softmax_backward
    from quack.softmax import softmax_fwd as quack_softmax_forward
except ImportError:
    quack_forward = quack_backward = quack_layer_forward = quack_layer_backward = None
    quack_softmax_forward = quack_softmax_backward = None
try:
    from liger_kernel.ops import layer_norm as liger_layer
    from liger_kernel.ops import rms_norm as liger
    from liger_kernel.ops import softmax as liger_softmax
except ImportError:
    liger = liger_layer = liger_softmax = None


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def sets_of(bytes_each, most=48):
    """How many sets of buffers pass the L2 twice over."""
    return max(2, min(most, math.ceil(2 * L2_BYTES / bytes_each)))


def copying(tensors):
    """What moves as many bytes as these tensors have, reads and writes together."""
    count = sum(t.numel() * t.element_size() for t in tensors) // 8
    source, target = (torch.empty(count, dtype=torch.float32, device="cuda") for _ in range(2))
    return partial(target.copy_, source)


def by_quack(n, function, arguments, multiple=2, **options):
    """quack's variant of a row, if it is there and compiles rows so long: even ones, softmax multiples of 8 (0.6.5)."""
    if not function or n % multiple:
        return []
    return [Variant("quack", [partial(function, *call, **options) for call in arguments])]


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


def norm_forward(m, n):
    sets = [(normal(m, n), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")) for _ in range(sets_of(4 * m * n))]
    weight = normal(n)
    rstds = torch.empty(m, device="cuda")
    variants = [
        Variant("pydet", [partial(pydet.rmsnorm, x, weight, eps=EPS, out=(y, rstds)) for x, y in sets], [sets[0][1]]),
        Variant("torch", [partial(torch.nn.functional.rms_norm, x, (n,), weight, EPS) for x, _ in sets]),
        Variant("copy", [copying(pair) for pair in sets]),
    ]
    variants += by_quack(n, quack_forward, [(x, weight) for x, _ in sets], eps=EPS, store_rstd=True)
    if liger:
        calls = [partial(liger.rms_norm_forward, x, weight, EPS, 0.0, "llama", None) for x, _ in sets]
        variants.append(Variant("liger", calls))
    return Row("rmsnorm", f"{m} x {n}", "bf16", variants, "copy", 4 * m * n, "GB/s")


def norm_backward(m, n):
    weight = normal(n)
    sets = []
    for _ in range(sets_of(6 * m * n)):
        dy, x = normal(m, n), normal(m, n)
        rstd = pydet.rmsnorm(x, weight, eps=EPS)[1]
        sets.append((dy, x, rstd, torch.empty_like(x), torch.empty_like(weight)))
    call = pydet.rmsnorm_backward
    variants = [
        Variant(
            "pydet",
            [partial(call, dy, x, weight, rstd, out=dx, dweight=dw) for dy, x, rstd, dx, dw in sets],
            [sets[0][3], sets[0][4]],
        ),
        Variant(
            "pydet, dx alone", [partial(call, dy, x, None, rstd, out=torch.empty_like(x)) for dy, x, rstd, *_ in sets]
        ),
        Variant("copy", [copying((dy, x, dx)) for dy, x, _, dx, _ in sets]),
        Variant(
            "torch",
            [
                partial(torch.ops.aten._fused_rms_norm_backward, dy, x, [n], rstd.view(m, 1), weight, [True, True])
                for dy, x, rstd, *_ in sets
            ],
        ),
    ]
    variants += by_quack(n, quack_backward, [(x, weight, dy, rstd) for dy, x, rstd, *_ in sets])
    if liger:
        block, warps = liger.calculate_settings(n)
        calls = [
            partial(liger.rms_norm_backward, dy, x, weight, rstd, 0.0, 0, block, warps, False, None)
            for dy, x, rstd, *_ in sets
        ]
        variants.append(Variant("liger", calls))
    return Row("rmsnorm_backward", f"{m} x {n}", "bf16", variants, "copy", 6 * m * n, "GB/s")


def norm_quantized(granularity, m, n):
    """A residual added, the norm, and its y in fp8: in one pass, by two calls, and a copy of the one pass's bytes."""
    moved, weight = 7 * m * n, normal(n)
    sets = [(normal(m, n), normal(m, n)) for _ in range(sets_of(moved))]
    options = {"eps": EPS, "granularity": granularity}
    outs = [pydet.rmsnorm_quantize(x, weight, residual=residual, **options) for x, residual in sets]
    y, rstd = normal(m, n), torch.empty(m, device="cuda")

    def both(x, residual, q, scale, total):
        pydet.rmsnorm(x, weight, eps=EPS, residual=residual, out=(y, rstd, total))
        pydet.quantize(y, granularity=granularity, out=(q, scale))

    calls = [
        partial(pydet.rmsnorm_quantize, x, weight, residual=residual, out=out, **options)
        for (x, residual), out in zip(sets, outs, strict=True)
    ]
    pairs = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in sets]
    variants = [
        Variant("pydet", calls, list(outs[0])),
        Variant("two calls", [partial(both, *pair, *out) for pair, out in zip(sets, outs, strict=True)]),
        Variant("copy", [partial(target.copy_, source) for source, target in pairs]),
    ]
    return Row("rmsnorm_quantize", f"{m} x {n}, {granularity}", "bf16", variants, "copy", moved, "GB/s")


def accuracy():
    """Root mean square of the error over that of the exact y, dx and dweight, taken from float64."""
    say_missing_norms()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for m, n in [(4096, 256), (4096, 4096), (16384, 1024), (65536, 256), (65536, 1024)]:
            x, dy, weight = normal(m, n, dtype=dtype), normal(m, n, dtype=dtype), normal(n, dtype=dtype)
            y, rstd = pydet.rmsnorm(x, weight, eps=EPS)
            results = {"pydet": (y, *pydet.rmsnorm_backward(dy, x, weight, rstd))}
            backward = torch.ops.aten._fused_rms_norm_backward
            results["torch"] = (
                torch.nn.functional.rms_norm(x, (n,), weight, EPS),
                *backward(dy, x, [n], rstd.view(m, 1), weight, [True, True]),
            )
            if quack_forward:
                y, _, rstd = quack_forward(x, weight, eps=EPS, store_rstd=True)
                results["quack"] = (y, *quack_backward(x, weight, dy, rstd)[:2])
            if liger:
                y, _, rstd, block, warps, mode = liger.rms_norm_forward(x, weight, EPS, 0.0, "llama", None)
                results["liger"] = (
                    y,
                    *liger.rms_norm_backward(dy, x, weight, rstd, 0.0, mode, block, warps, False, None),
                )
            x, dy, weight = x.double(), dy.double(), weight.double()
            rstd = (x.square().mean(1, keepdim=True) + EPS).rsqrt()
            xhat, g = x * rstd, dy * weight
            exact = xhat * weight, rstd * (g - xhat * (g * xhat).mean(1, keepdim=True)), (dy * xhat).sum(0)
            for name, tensors in results.items():
                entry = {"shape": f"{m} x {n}", "dtype": str(dtype).split(".")[1], "variant": name}
                for part, one, want in zip(("y", "dx", "dweight"), tensors, exact, strict=True):
                    entry[part] = float(f"{float((one.double() - want).norm() / want.norm()):.3g}")
                found.append(entry)
    return found


def say_missing_norms():
    for name, found in {"quack": quack_forward, "liger": liger}.items():
        if not found:
            print(f"{name} is not installed: its rows are left out")


def norm_rows(quick):
    say_missing_norms()
    for make in (norm_forward, norm_backward):
        for m in NORM_M[:2] if quick else NORM_M:
            for n in NORM_N[::3] if quick else NORM_N:
                yield partial(make, m, n)


QUANTIZED_MN = [(m, n) for n in (4096, 7168) for m in (1, 64, 1024, 4096, 16384)] + [(4096, 2048), (4096, 16384)]


def quantized_rows(quick):
    for m, n in QUANTIZED_MN[::4] if quick else QUANTIZED_MN:
        for granularity in ("group", "row"):
            yield partial(norm_quantized, granularity, m, n)


def random_rows(makes, longest, most, count, seed):
    """Each one of `makes` of a shape that is drawn; what has more than `most` elements is drawn anew."""

    def make(generator, _):
        shape = draws.norm_shape(generator, longest, most)
        return partial(generator.choice(makes), *shape)

    return draws.rows(make, count, seed)


def random_summary(entries):
    """Of each direction and peer: its time over pydet's, by how many rows there are."""
    times, groups = {}, {}
    for entry in entries:
        times.setdefault((entry["op"], entry["shape"]), {})[entry["variant"]] = entry["us"]
    for (op, shape), us in times.items():
        m, n = (int(extent) for extent in shape.split(",")[0].split(" x "))
        sort = "odd" if n % 8 else "to 256 rows" if m <= 256 else "more rows"
        for peer in us.keys() - {"pydet", "pydet, dx alone"}:
            groups.setdefault((op, peer, sort), []).append((us[peer] / us["pydet"], shape))
    return [
        f"{op:16} {peer:6} / pydet, {sort:11}: {draws.said(ratios)}"
        for (op, peer, sort), ratios in sorted(groups.items())
    ]


# ---- LayerNorm -------------------------------------------------------------------------------------------------------

LAYER_M, LAYER_N = [64, 4096, 16384], [768, 1280, 4096]


def layer_forward(m, n):
    xs, weight, bias = [normal(m, n) for _ in range(sets_of(4 * m * n))], normal(n), normal(n)
    ys = [torch.empty_like(x) for x in xs]
    of_rows = torch.empty(2, m, device="cuda")
    ours = partial(pydet.layernorm, eps=EPS)
    variants = [
        Variant(
            "pydet", [partial(ours, x, weight, bias, out=(y, *of_rows)) for x, y in zip(xs, ys, strict=True)], [ys[0]]
        ),
        Variant("torch", [partial(torch.nn.functional.layer_norm, x, (n,), weight, bias, EPS) for x in xs]),
        Variant("copy", [copying(pair) for pair in zip(xs, ys, strict=True)]),
    ]
    wide = [weight.float(), bias.float()]  # quack takes no others
    calls = [(x, *wide) for x in xs]
    variants += by_quack(n, quack_layer_forward, calls, eps=EPS, return_rstd=True, return_mean=True)
    if liger_layer:
        variants.append(Variant("liger", [partial(liger_layer.layer_norm_forward, x, weight, bias, EPS) for x in xs]))
    return Row("layernorm", f"{m} x {n}", "bf16", variants, "copy", 4 * m * n, "GB/s")


def layer_backward(m, n):
    """dx, dweight and dbias."""
    weight, bias, sets = normal(n), normal(n), []
    for _ in range(sets_of(6 * m * n)):
        dy, x = normal(m, n), normal(m, n)
        _, mean, rstd = pydet.layernorm(x, weight, bias, eps=EPS)
        sets.append((dy, x, mean, rstd))
    peer = torch.ops.aten.native_layer_norm_backward
    variants = [
        Variant("pydet", [partial(pydet.layernorm_backward, dy, x, weight, *rows) for dy, x, *rows in sets]),
        Variant(
            "torch",
            [
                partial(peer, dy, x, [n], mean.view(m, 1), rstd.view(m, 1), weight, bias, [True, True, True])
                for dy, x, mean, rstd in sets
            ],
        ),
        Variant("copy", [copying((dy, x, x)) for dy, x, *_ in sets]),
    ]
    wide = weight.float()
    calls = [(x, wide, dy, rstd, mean) for dy, x, mean, rstd in sets]
    variants += by_quack(n, quack_layer_backward, calls)
    if liger_layer:
        calls = [partial(liger_layer.layer_norm_backward, dy, x, weight, bias, *rows) for dy, x, *rows in sets]
        variants.append(Variant("liger", calls))
    return Row("layernorm_backward", f"{m} x {n}", "bf16", variants, "copy", 6 * m * n, "GB/s")


def layer_rows(quick):
    say_missing_norms()
    for make in (layer_forward, layer_backward):
        for m in LAYER_M[:2] if quick else LAYER_M:
            for n in LAYER_N[::2] if quick else LAYER_N:
                yield partial(make, m, n)


# ---- Softmax rows ----------------------------------------------------------------------------------------------------

SOFTMAX_SHAPES = [(65536, 64), (65536, 128), (4096, 512), (16384, 2048), (64, 32000), (4096, 32000), (1024, 128256)]


def softmax_forward(name, m, n):
    """softmax or log_softmax; or log_prob, beside torch.log_softmax and a gather. Of that the copy reads alone."""
    xs, index = [normal(m, n) for _ in range(sets_of(4 * m * n))], torch.randint(n, (m,), device="cuda")
    if name == "log_prob":
        peers = [partial(lambda x: torch.log_softmax(x, -1).gather(-1, index[:, None]), x) for x in xs]
        ours = [partial(pydet.log_prob, x, index) for x in xs]
    else:
        peers = [partial(getattr(torch, name), x, -1) for x in xs]
        ours = [partial(getattr(pydet, name), x) for x in xs]
    ceiling = [copying((x,) if name == "log_prob" else (x, x)) for x in xs]
    variants = [Variant("pydet", ours), Variant("torch", peers), Variant("copy", ceiling)]
    if name == "softmax":
        variants += by_quack(n, quack_softmax_forward, [(x,) for x in xs], multiple=8)
    if liger_softmax and name == "softmax" and n <= LIGER_SOFTMAX_N:
        variants.append(Variant("liger", [partial(liger_softmax._softmax_forward, x) for x in xs]))
    work = (2 if name == "log_prob" else 4) * m * n
    return Row(name, f"{m} x {n}", "bf16", variants, "copy", work, "GB/s")


def softmax_backward(name, m, n):
    sets = [(normal(m, n), getattr(torch, name)(normal(m, n), -1)) for _ in range(sets_of(6 * m * n))]
    peer = getattr(torch.ops.aten, f"_{name}_backward_data")
    variants = [
        Variant("pydet", [partial(getattr(pydet, f"{name}_backward"), dy, y) for dy, y in sets]),
        Variant("torch", [partial(peer, dy, y, -1, torch.bfloat16) for dy, y in sets]),
        Variant("copy", [copying((dy, y, y)) for dy, y in sets]),
    ]
    if name == "softmax":
        variants += by_quack(n, quack_softmax_backward, sets, multiple=8)
    if liger_softmax and name == "softmax" and n <= LIGER_SOFTMAX_N:
        settings = liger_softmax._softmax_forward(sets[0][1])[1:]
        variants.append(
            Variant("liger", [partial(liger_softmax._softmax_backward, dy, y, *settings) for dy, y in sets])
        )
    return Row(f"{name}_backward", f"{m} x {n}", "bf16", variants, "copy", 6 * m * n, "GB/s")


def softmax_rows(quick):
    say_missing_norms()
    shapes = SOFTMAX_SHAPES[1:5:2] if quick else SOFTMAX_SHAPES
    for name in ("softmax", "log_softmax", "log_prob"):
        for m, n in shapes:
            yield partial(softmax_forward, name, m, n)
    for name in ("softmax", "log_softmax"):
        for m, n in shapes:
            yield partial(softmax_backward, name, m, n)


ROWS = {"rmsnorm": norm_rows, "rmsnorm_quantize": quantized_rows, "layernorm": layer_rows, "softmax": softmax_rows}
_SOFTMAX = [partial(softmax_forward, name) for name in ("softmax", "log_softmax", "log_prob")]
_SOFTMAX += [partial(softmax_backward, name) for name in ("softmax", "log_softmax")]
RANDOM = {
    "rmsnorm": partial(random_rows, (norm_forward, norm_backward), 16384, 1 << 29),
    "rmsnorm_quantize": partial(random_rows, [partial(norm_quantized, g) for g in ("group", "row")], 16384, 1 << 28),
    "layernorm": partial(random_rows, (layer_forward, layer_backward), 16384, 1 << 29),
    "softmax": partial(random_rows, _SOFTMAX, 131072, 1 << 28),
}
