"""pydet demo: train a small language model twice and count the bits that batching changed.

The model reads 16 bytes of Python source and predicts the next one:

    e = embedding[context]                 [rows, 16 * 24]
    h = e w_in                             [rows, 256]
    u = rmsnorm(h, g_mlp) w_up             [rows, 512]
    d = max(u, 0)^2 w_down + h             [rows, 256]
    log p = log_softmax(rmsnorm(d, g_out) w_out)   [rows, 256]

It is trained on the source text of Python's standard library, once with NumPy's matmul and once with pydet. Then the
same rows are computed one at a time, in batches of 7 and 64, and as a training step; and the same gradient from one
batch and from micro-batches. Between two ways of computing the same number, every element whose bits differ is counted.
With pydet each count is 0, and the exit status is 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

try:
    import ml_dtypes
    import numpy as np
except ImportError as missing:
    raise SystemExit(f"pydet demo: needs numpy and ml_dtypes ({missing}): pip install numpy ml_dtypes") from None

import pydet

Array = Any  # numpy.ndarray
Parameters = dict[str, Array]

CONTEXT, WIDTH, HIDDEN, MLP, BYTES = 16, 24, 256, 512, 256
BATCH = 1024  # rows of a training step
MICRO_BATCH = pydet.DWEIGHT_ROWS  # where dweight may be cut; the matrix gradients may be cut anywhere
DECODE_ROWS = 16  # up to here a matrix product goes to skinny_gemm, as an inference engine would have it
EPS = 1e-6


class NumPy:
    """The matrix products and norms as one writes them in NumPy."""

    name = "NumPy"

    def gemm(self, a: Array, b: Array, bias: Array = None) -> Array:
        c = a @ b
        return c if bias is None else c + bias

    def skinny_gemm(self, x: Array, w: Array, bias: Array = None) -> Array:
        return self.gemm(x, w.T, bias)

    def gemm_da(self, dc: Array, b: Array) -> Array:
        return dc @ b.T

    def gemm_db(self, a: Array, dc: Array, total: Array) -> None:
        total += a.T @ dc

    def rmsnorm(self, x: Array, weight: Array) -> tuple[Array, Array]:
        rstd = 1 / np.sqrt(np.mean(x * x, axis=1) + np.float32(EPS))
        return x * rstd[:, None] * weight, rstd

    def rmsnorm_backward(
        self, dy: Array, x: Array, weight: Array, rstd: Array, dresidual: Array, dweight_total: Array
    ) -> Array:
        xhat = x * rstd[:, None]
        g = dy * weight
        dweight_total += np.sum(dy * xhat, axis=0)
        dx = rstd[:, None] * (g - xhat * np.mean(g * xhat, axis=1, keepdims=True))
        return dx if dresidual is None else dx + dresidual


class Pydet:
    """The same with pydet: the gradients continue the caller's sum instead of being added to it."""

    name = "pydet"

    def gemm(self, a: Array, b: Array, bias: Array = None) -> Array:
        return pydet.gemm(a, b, bias=bias)

    def skinny_gemm(self, x: Array, w: Array, bias: Array = None) -> Array:
        return pydet.skinny_gemm(x, w, bias=bias)

    def gemm_da(self, dc: Array, b: Array) -> Array:
        return pydet.gemm_da(dc, b)

    def gemm_db(self, a: Array, dc: Array, total: Array) -> None:
        pydet.gemm_db(a, dc, out=total, accumulate=True)

    def rmsnorm(self, x: Array, weight: Array) -> tuple[Array, Array]:
        return pydet.rmsnorm(x, weight, eps=EPS)

    def rmsnorm_backward(
        self, dy: Array, x: Array, weight: Array, rstd: Array, dresidual: Array, dweight_total: Array
    ) -> Array:
        dx, _ = pydet.rmsnorm_backward(dy, x, weight, rstd, dresidual=dresidual, dweight=dweight_total, accumulate=True)
        return dx


Operations = NumPy | Pydet

# ---- The model -------------------------------------------------------------------------------------------------------


def initial_parameters(seed: int) -> Parameters:
    random = np.random.default_rng(seed)

    def normal(rows: int, cols: int, scale: float) -> Array:
        return (random.standard_normal((rows, cols)) * scale).astype(np.float32)

    return {
        "embedding": normal(BYTES, WIDTH, 1.0),
        "w_in": normal(CONTEXT * WIDTH, HIDDEN, (CONTEXT * WIDTH) ** -0.5),
        "g_mlp": np.ones(HIDDEN, np.float32),
        "w_up": normal(HIDDEN, MLP, HIDDEN**-0.5),
        "w_down": normal(MLP, HIDDEN, MLP**-0.5),
        "g_out": np.ones(HIDDEN, np.float32),
        "w_out": normal(HIDDEN, BYTES, 0.2 * HIDDEN**-0.5),
    }


def forward(ops: Operations, p: Parameters, context: Array) -> tuple[Array, dict[str, Array]]:
    """Log-probabilities [rows, 256] of the byte after each context [rows, 16], and what backward needs."""

    def linear(x: Array, w: Array, bias: Array = None) -> Array:
        return ops.skinny_gemm(x, w.T, bias) if len(x) <= DECODE_ROWS else ops.gemm(x, w, bias)

    s = {"context": context, "e": p["embedding"][context].reshape(len(context), -1)}
    s["h"] = linear(s["e"], p["w_in"])
    s["y_mlp"], s["rstd_mlp"] = ops.rmsnorm(s["h"], p["g_mlp"])
    s["relu"] = np.maximum(linear(s["y_mlp"], p["w_up"]), 0)
    s["activation"] = s["relu"] * s["relu"]
    s["d"] = linear(s["activation"], p["w_down"], s["h"])
    s["y_out"], s["rstd_out"] = ops.rmsnorm(s["d"], p["g_out"])
    log_p, s["p"] = log_softmax(linear(s["y_out"], p["w_out"]))
    return log_p, s


def log_softmax(logits: Array) -> tuple[Array, Array]:
    """Log-probabilities and probabilities.

    NumPy's exp and sum choose their vector loop by length, stride and alignment, so the bits of a row could depend on
    where it lies. Every row passes through the same two buffers instead: whatever differs after this differed before.
    """
    row, exponential = np.empty((2, BYTES), np.float32)
    log_p, p = np.empty_like(logits), np.empty_like(logits)
    for i, z in enumerate(logits):
        np.subtract(z, z.max(), out=row)
        np.exp(row, out=exponential)
        total = exponential.sum()
        np.subtract(row, np.log(total), out=log_p[i])
        np.divide(exponential, total, out=p[i])
    return log_p, p


def backward(ops: Operations, p: Parameters, s: dict[str, Array], target: Array, grads: Parameters, batch: int) -> None:
    """Adds to `grads` the gradient of the loss, a mean over `batch` rows of which these are some."""
    rows = np.arange(len(target))
    dlogits = s["p"]
    dlogits[rows, target] -= 1
    dlogits *= np.float32(1 / batch)
    ops.gemm_db(s["y_out"], dlogits, grads["w_out"])
    dy = ops.gemm_da(dlogits, p["w_out"])
    dd = ops.rmsnorm_backward(dy, s["d"], p["g_out"], s["rstd_out"], None, grads["g_out"])
    ops.gemm_db(s["activation"], dd, grads["w_down"])
    du = ops.gemm_da(dd, p["w_down"]) * (2 * s["relu"])
    ops.gemm_db(s["y_mlp"], du, grads["w_up"])
    dy = ops.gemm_da(du, p["w_up"])
    dh = ops.rmsnorm_backward(dy, s["h"], p["g_mlp"], s["rstd_mlp"], dd, grads["g_mlp"])
    ops.gemm_db(s["e"], dh, grads["w_in"])
    de = ops.gemm_da(dh, p["w_in"]).reshape(-1, WIDTH)
    one_hot = np.zeros((len(de), BYTES), np.float32)  # a row of the embedding was chosen by this matrix product
    one_hot[np.arange(len(de)), s["context"].ravel()] = 1
    ops.gemm_db(one_hot, de, grads["embedding"])


def gradients(ops: Operations, p: Parameters, context: Array, target: Array, micro_batch: int) -> Parameters:
    grads = {name: np.zeros_like(value) for name, value in p.items()}
    for i in range(0, len(context), micro_batch):
        _, saved = forward(ops, p, context[i : i + micro_batch])
        backward(ops, p, saved, target[i : i + micro_batch], grads, len(context))
    return grads


def loss_of(log_p: Array, target: Array) -> float:
    return float(-np.mean(log_p[np.arange(len(target)), target], dtype=np.float64))


# ---- Training --------------------------------------------------------------------------------------------------------


def source_text() -> Array:
    """The standard library's own source, file after file, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise SystemExit(f"pydet demo: no Python source in {sysconfig.get_path('stdlib')}")
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)


def rows_at(text: Array, random: np.random.Generator, count: int) -> tuple[Array, Array]:
    start = random.integers(0, len(text) - CONTEXT, count)
    return text[start[:, None] + np.arange(CONTEXT)], text[start + CONTEXT]


class Progress:
    """What goes on, on standard error: a bar where that is a terminal, else a line when it begins."""

    def __init__(self, title: str) -> None:
        self.title, self.shown = title, sys.stderr.isatty()
        if not self.shown:
            print(f"{title} ...", file=sys.stderr, flush=True)

    def show(self, done: float, note: str = "") -> None:
        if self.shown:
            filled = int(30 * min(done, 1.0))
            print(f"\r{self.title:30} [{'#' * filled:30}] {note} ", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def train(
    ops: Operations, text: Array, seed: int, seconds: float = 0.0, steps: int = 0
) -> tuple[Parameters, int, float, float]:
    """Adam for `steps`, or, where that is 0, as many as fit into `seconds`. Returns parameters, steps, seconds and the
    first loss."""
    random = np.random.default_rng(seed + 1)
    p = initial_parameters(seed)
    mean = {name: np.zeros_like(value) for name, value in p.items()}
    square = {name: np.zeros_like(value) for name, value in p.items()}
    progress = Progress(f"training with {ops.name}")
    start, step, done, first_loss = time.perf_counter(), 0, 0.0, 0.0
    while done < 1:
        step += 1
        context, target = rows_at(text, random, BATCH)
        grads = {name: np.zeros_like(value) for name, value in p.items()}
        log_p, saved = forward(ops, p, context)
        backward(ops, p, saved, target, grads, BATCH)
        loss = loss_of(log_p, target)
        first_loss = loss if step == 1 else first_loss
        for name, g in grads.items():
            mean[name] += np.float32(0.1) * (g - mean[name])
            square[name] += np.float32(0.01) * (g * g - square[name])
            rate = np.float32(3e-3 * (1 - 0.99**step) ** 0.5 / (1 - 0.9**step))
            p[name] -= rate * mean[name] / (np.sqrt(square[name]) + np.float32(1e-8))
        done = step / steps if steps else (time.perf_counter() - start) / seconds
        progress.show(done, f"step {step}, loss {loss:.3f}")
    progress.close()
    return p, step, time.perf_counter() - start, first_loss


# ---- Counting --------------------------------------------------------------------------------------------------------


def differing(x: Array, y: Array) -> int:
    """Elements whose bits differ."""
    unsigned = f"u{x.dtype.itemsize}"
    return int(np.count_nonzero(x.view(unsigned) != y.view(unsigned)))


def count_log_probabilities(ops: Operations, p: Parameters, context: Array) -> tuple[dict[str, int], int]:
    """Differing log-probabilities between the training step's forward pass and smaller batches of the same rows."""
    step, _ = forward(ops, p, context)
    counts = {}
    progress = Progress(f"counting bits of {ops.name}")
    for place, (label, size) in enumerate((("one token at a time", 1), ("batches of 7", 7), ("batches of 64", 64))):
        parts = []
        for i in range(0, len(context), size):
            progress.show((place + i / len(context)) / 3, label)
            parts.append(forward(ops, p, context[i : i + size])[0])
        counts[label] = differing(np.concatenate(parts), step)
    progress.close()
    return counts, step.size


def count_gradients(ops: Operations, p: Parameters, context: Array, target: Array) -> tuple[dict[str, int], int]:
    """Differing elements, for each parameter, between the gradient of one batch and that of micro-batches."""
    whole = gradients(ops, p, context, target, len(context))
    parts = gradients(ops, p, context, target, MICRO_BATCH)
    return {name: differing(whole[name], parts[name]) for name in p}, sum(g.size for g in whole.values())


def replay_sm90(p: Parameters, context: Array) -> dict[str, Any]:
    """The layer w_up as an H100's tensor cores compute it from bf16, on this machine's CPU."""
    _, saved = forward(Pydet(), p, context)
    x, w = saved["y_mlp"].astype(ml_dtypes.bfloat16), p["w_up"].astype(ml_dtypes.bfloat16)
    start = time.perf_counter()
    batch = pydet.gemm(x, w, out_dtype=np.float32, arithmetic="sm90")
    seconds = time.perf_counter() - start
    rows = [pydet.skinny_gemm(row[None], w.T, out_dtype=np.float32, arithmetic="sm90") for row in x]
    damaged = batch.copy()
    damaged.view(np.uint32)[3, 5] ^= 1
    counts = {
        "each row alone": differing(np.concatenate(rows), batch),
        "their audit": pydet.audit(x, w, batch, arithmetic="sm90").differing,
        "their audit, one bit flipped": pydet.audit(x, w, damaged, arithmetic="sm90").differing,
        "arithmetic ieee": differing(pydet.gemm(x, w, out_dtype=np.float32, arithmetic="ieee"), batch),
    }
    kept = [*counts.values()][:3] == [0, 0, 1]
    return {"elements": batch.size, "seconds": seconds, "differing": counts, "kept": kept}


# ---- The report ------------------------------------------------------------------------------------------------------


def measure(
    ops: Operations, text: Array, seed: int, seconds: float = 0.0, steps: int = 0
) -> tuple[Parameters, dict[str, Any]]:
    """Trains with `ops` and counts. The last tenth of the text is for counting only."""
    cut = len(text) * 9 // 10
    p, steps, seconds, first_loss = train(ops, text[:cut], seed, seconds, steps)
    context, target = rows_at(text[cut:], np.random.default_rng(seed + 2), BATCH)
    log_probabilities, log_probability_elements = count_log_probabilities(ops, p, context)
    gradient, gradient_elements = count_gradients(ops, p, context, target)
    return p, {
        "name": ops.name,
        "steps": steps,
        "seconds": seconds,
        "first_loss": first_loss,
        "loss": loss_of(forward(ops, p, context)[0], target),
        "log_probabilities": log_probabilities,
        "log_probability_elements": log_probability_elements,
        "gradients": gradient,
        "gradient_elements": gradient_elements,
    }


WIDTH_OF_A_BAR = 40


def drawn(result: dict[str, Any]) -> str:
    """How much of what must not change did, as bars: a line for each way of computing it and each of the two."""
    runs, lines = result["runs"], ["", "What the batch alone changed"]
    kinds = {
        f"log-probabilities, {label}": [r["log_probabilities"][label] / r["log_probability_elements"] for r in runs]
        for label in runs[0]["log_probabilities"]
    }
    parts = f"gradients, micro-batches of {MICRO_BATCH}"
    kinds[parts] = [sum(r["gradients"].values()) / r["gradient_elements"] for r in runs]
    for title, shares in kinds.items():
        for run, share in zip(runs, shares, strict=True):
            bar = "#" * math.ceil(WIDTH_OF_A_BAR * share)  # what is not 0 is seen
            said = f"{100 * share:.1f} %" if share else "0"
            lines.append(f"  {title if run is runs[0] else '':38} {run['name']:6} |{bar:{WIDTH_OF_A_BAR}}| {said:>6}")
    return "\n".join(lines)


def report(result: dict[str, Any]) -> None:
    results, replay = result["runs"], result["sm90"]
    columns = "".join(f"{r['name']:>14}" for r in results)
    print(f"\n{'':44}{columns}")

    def line(title: str, values: list[Any]) -> None:
        print(f"{title:44}" + "".join(f"{v:>14}" for v in values))

    line("training steps", [r["steps"] for r in results])
    line("seconds", [f"{r['seconds']:.1f}" for r in results])
    line("loss at the first step, nats a byte", [f"{r['first_loss']:.3f}" for r in results])
    line("loss on unseen text", [f"{r['loss']:.3f}" for r in results])
    elements = f"{results[0]['log_probability_elements']:,}"
    print(f"\nlog-probabilities, of {elements}, whose bits differ from the training step's")
    for label in results[0]["log_probabilities"]:
        line(f"  {label}", [f"{r['log_probabilities'][label]:,}" for r in results])
    elements = f"{results[0]['gradient_elements']:,}"
    print(f"\ngradient elements, of {elements}, whose bits differ between batches of {BATCH} and {MICRO_BATCH}")
    for label in results[0]["gradients"]:
        line(f"  {label}", [f"{r['gradients'][label]:,}" for r in results])
    print(
        f"\none layer from bf16 as an H100's tensor cores compute it (arithmetic sm90): {replay['elements']:,} outputs "
        f"in\n{replay['seconds']:.2f} s on this CPU, of which differ from"
    )
    for label, count in replay["differing"].items():
        line(f"  {label}", ["", f"{count:,}"])
    print(drawn(result))
    print("\nEvery count that pydet promises is 0." if result["kept"] else "\nA promise of pydet is BROKEN.")


def run(seconds: float, seed: int) -> dict[str, Any]:
    pydet.resolve_arithmetic("float32")  # a library that is missing is said now, not after the training with NumPy
    text = source_text()
    _, numpy_run = measure(NumPy(), text, seed, seconds=seconds)
    p, pydet_run = measure(Pydet(), text, seed, steps=numpy_run["steps"])
    sm90 = replay_sm90(p, rows_at(text, np.random.default_rng(seed + 3), BATCH)[0])
    counts = [*pydet_run["log_probabilities"].values(), *pydet_run["gradients"].values()]
    return {
        "pydet": pydet.__version__,
        "numerics": pydet.NUMERICS,
        "numpy": np.__version__,
        "seed": seed,
        "text_bytes": len(text),
        "runs": [numpy_run, pydet_run],
        "sm90": sm90,
        "kept": not any(counts) and sm90["kept"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pydet demo",
        description=__doc__.splitlines()[0].split(": ")[1],
        epilog="Exit status: 0 if all of pydet's counts are 0, 1 if one is not, 2 if it cannot run.",
    )
    parser.add_argument("--seconds", type=float, default=5, help="of training with NumPy; pydet takes as many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(argv)
    if not 0 < options.seconds < float("inf"):
        parser.error("--seconds must be positive and finite")
    if options.seed < 0:
        parser.error("--seed must not be negative")
    result = run(options.seconds, options.seed)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)
    return 0 if result["kept"] else 1
