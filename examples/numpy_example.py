"""NumPy: the same bits in any batch, gradients over micro-batches, and what a Hopper GPU would answer.

python examples/numpy_example.py
"""

import ml_dtypes
import numpy as np

import pydet

TOKENS, HIDDEN, OUTPUTS = 64, 1024, 768


def same(a, b):
    """Whether two arrays are equal in every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def main():
    random = np.random.default_rng(0)
    x, dy = (random.standard_normal(shape, np.float32) for shape in ((TOKENS, HIDDEN), (TOKENS, OUTPUTS)))
    w = random.standard_normal((OUTPUTS, HIDDEN), np.float32)
    half = ml_dtypes.bfloat16

    # A token's step: RMSNorm, then a linear layer; in the batch and alone.
    def step(rows):
        normed, _ = pydet.rmsnorm(rows, eps=1e-6)
        return pydet.skinny_gemm(normed, w.astype(half))

    batch = step(x.astype(half))
    assert same(step(x[7:8].astype(half))[0], batch[7])
    print(f"token 7 alone has the bits it has among {TOKENS} ({pydet.last_kernel()})")

    # w.T is read where it is; out= writes where it is told; the bias is added before the one rounding.
    bias, out = np.ones(OUTPUTS, np.float32), np.empty((TOKENS, 2 * OUTPUTS), np.float32)
    pydet.gemm(x, w.T, bias=bias, out=out[:, :OUTPUTS])
    assert same(pydet.gemm(x, np.ascontiguousarray(w.T), bias=bias), np.ascontiguousarray(out[:, :OUTPUTS]))
    print("a transposed view and a copy give the same bits")

    # The gradient of the weights, whole and over four micro-batches.
    whole, parts = pydet.gemm_db(x, dy), np.zeros((HIDDEN, OUTPUTS), np.float32)
    for i in range(0, TOKENS, TOKENS // 4):
        rows = slice(i, i + TOKENS // 4)
        pydet.gemm_db(x[rows], dy[rows], out=parts, accumulate=True)
    in_numpy = sum(x[i : i + TOKENS // 4].T @ dy[i : i + TOKENS // 4] for i in range(0, TOKENS, TOKENS // 4))
    differing = np.count_nonzero(in_numpy != x.T @ dy)
    assert same(parts, whole)
    print(f"four micro-batches have the bits of one (in NumPy alone {differing} of {whole.size} differ)")

    # The bits of Hopper's tensor cores, computed here; `audit` holds a saved product of such a GPU to them.
    hopper = pydet.gemm(x.astype(half), w.T.astype(half), arithmetic="sm90")
    assert not pydet.audit(x.astype(half), w.T.astype(half), hopper, arithmetic="sm90", sample=1000).differing
    print(f"1000 of {hopper.size} elements audited against Hopper's arithmetic")


if __name__ == "__main__":
    main()
