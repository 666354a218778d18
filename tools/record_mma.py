"""python tools/record_mma.py OUT.npz: records what this GPU's tensor cores make of hard inputs, as test data.

The arrays are those of tests/data/h100_mma_vectors.npz: step_TYPE_{a,b,c,d}, single steps d = c + sum of 16 products,
and chain_TYPE_kK_I_{a,b,d}, d = a b^T from +0; all as bit patterns. The inputs are drawn with --seed: any words at all,
few exponents (so that sums cancel), subnormals, the ends of the range, zeros, infinities and NaN. nvcc compiles
record_mma.cu unless --library names it compiled. With --arithmetic the recorded values are compared with the CPU's
model of it, and the exit status is 1 if one differs.
"""

import argparse
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

HERE = Path(__file__).resolve().parent
TYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
STEPS = 4096
CHAINS = [(64, 4), (512, 4)]  # K, how many
ROWS, COLUMNS = 64, 8


def words(random, shape, dtype, kind):
    """16-bit patterns."""
    any_word = random.integers(0, 1 << 16, shape, dtype=np.uint16)
    if kind == "any":
        return any_word
    scale = {"normal": 0, "close": 2, "wide": 30, "small": -120 if dtype == "bf16" else -13}[kind]
    exponents = random.integers(-abs(scale), 1, shape) if kind != "close" else random.integers(0, scale, shape)
    values = random.standard_normal(shape) * 2.0**exponents
    found = values.astype(np.float32).astype(TYPES[dtype]).view(np.uint16)
    special = random.random(shape)
    found = np.where(special < 0.02, np.uint16(0), found)
    return np.where(special > 0.998, any_word, found).astype(np.uint16)


def compiled(library):
    if library is None:
        library = Path(tempfile.mkdtemp()) / "record_mma.so"
        source = HERE / "record_mma.cu"
        command = ["nvcc", "-arch=native", "-O2", "-shared", "-Xcompiler", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def record(library, dtype, a, b, c):
    """d [count, 16, 8] of a [count, 16, k], b [count, 8, k] and c [count, 16, 8]."""
    d = np.empty_like(c)
    arrays = [np.ascontiguousarray(array) for array in (a, b, c)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, d)]
    if status := library.record_chains(dtype == "bf16", len(a), a.shape[2], *pointers):
        raise SystemExit(f"CUDA error {status}")
    return d


def steps(library, dtype, random):
    """Each step in a matrix of its own, whose other rows and columns are zero."""
    kinds = ["any", "normal", "close", "wide", "small"]
    parts = [words(random, (2, STEPS // len(kinds) + 1, 16), dtype, kind) for kind in kinds]
    a, b = np.concatenate(parts, axis=1)[:, :STEPS]
    sums = np.concatenate([(p.view(TYPES[dtype]).astype(np.float32)) for p in (a, b)], axis=1)
    with np.errstate(all="ignore"):
        c = (sums[:, 0] * sums[:, 16] * random.choice([-1, 1, 0.5, 2.0**-9, 2.0**12, 0], STEPS)).astype(np.float32)
    c[::16] = random.integers(0, 1 << 32, STEPS // 16, dtype=np.uint32).view(np.float32)
    left, right = np.zeros((STEPS, 16, 16), np.uint16), np.zeros((STEPS, 8, 16), np.uint16)
    start = np.zeros((STEPS, 16, 8), np.float32)
    left[:, 0], right[:, 0], start[:, 0, 0] = a, b, c
    d = record(library, dtype, left, right, start)[:, 0, 0]
    return {"a": a, "b": b, "c": c.view(np.uint32), "d": d.view(np.uint32)}


def chain(library, dtype, random, k, kind):
    a, b = words(random, (ROWS, k), dtype, kind), words(random, (COLUMNS, k), dtype, kind)
    left, right = a.reshape(ROWS // 16, 16, k), np.broadcast_to(b, (ROWS // 16, COLUMNS, k))
    d = record(library, dtype, left, right, np.zeros((ROWS // 16, 16, COLUMNS), np.float32))
    return {"a": a, "b": b, "d": d.reshape(ROWS, COLUMNS).view(np.uint32)}


def differing(recorded, dtype, arithmetic):
    """Elements in which the CPU's model has other bits; all NaN are one."""
    import pydet

    a, b = (recorded[name].view(TYPES[dtype]) for name in "ab")
    d = recorded["d"].view(np.float32)
    if "c" in recorded:
        out = recorded["c"].view(np.float32).reshape(-1, 1, 1).copy()
        pydet.gemm(a[:, None, :], b[:, :, None], out=out, accumulate=True, arithmetic=arithmetic)
        out = out.reshape(-1)
    else:
        out = pydet.gemm(a, b.T, out_dtype=np.float32, arithmetic=arithmetic)
    same = (out.view(np.uint32) == d.view(np.uint32)) | (np.isnan(out) & np.isnan(d))
    return int(np.sum(~same))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--arithmetic")
    options = parser.parse_args()
    library, random, found, wrong = compiled(options.library), np.random.default_rng(options.seed), {}, 0
    for dtype in TYPES:
        made = {f"step_{dtype}": steps(library, dtype, random)}
        for k, count in CHAINS:
            kinds = ["normal", "close", "wide", "small"]
            made |= {f"chain_{dtype}_k{k}_{i}": chain(library, dtype, random, k, kinds[i]) for i in range(count)}
        for name, recorded in made.items():
            found |= {f"{name}_{letter}": array for letter, array in recorded.items()}
            if options.arithmetic:
                wrong += differing(recorded, dtype, options.arithmetic)
    np.savez_compressed(options.out, **found)
    print(
        f"{options.out}: {len(found)} arrays" + f", {wrong} elements differ from the model" * bool(options.arithmetic)
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
