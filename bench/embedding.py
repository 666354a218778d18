"""The gradient of a table on the CPU: the rows of a gradient are added to those of their ids, beside PyTorch's
embedding backward and index_add_, and NumPy's add.at in fp32.

The rate counts the gradient and the table once. The others make a new table in each call, pydet writes into `out`.
"""

from functools import partial

import numpy as np

import pydet
from bench.gemm import copies, kernels_of, normal
from bench.harness import Row, Variant
from bench.peers import NO_TORCH, as_torch, torch


def evenly(tokens, rows):
    return np.random.default_rng(3).integers(rows, size=tokens)


def words(tokens, rows):
    """Ids as text has them: the k-th most frequent has a share of about 1 / k."""
    return ((rows + 1) ** np.random.default_rng(3).random(tokens)).astype(np.int64) - 1


def by_numpy(dout, ids, rows):
    dw = np.zeros((rows, dout.shape[1]), dout.dtype)
    np.add.at(dw, ids, dout)
    return dw


def by_index_add(dout, ids, rows):
    return torch.zeros(rows, dout.shape[1], dtype=dout.dtype).index_add_(0, ids, dout)


def table_gradient(tokens, n, rows, dtype, ids_of=evenly):
    dout, ids = normal(1, (tokens, n), dtype), ids_of(tokens, rows)
    sets = copies((dout, ids, np.empty((rows, n), dout.dtype)))
    calls = [partial(pydet.embedding_backward, dout, ids, out=dw) for dout, ids, dw in sets]
    variants = [Variant("pydet", calls, [sets[0][2]])]
    if dtype == "fp32":
        variants.append(Variant("numpy", [partial(by_numpy, dout, ids, rows) for dout, ids, _ in sets]))
    if torch:
        dense, theirs = (
            torch.ops.aten.embedding_dense_backward,
            [(as_torch(x), torch.from_numpy(i)) for x, i, _ in sets],
        )
        variants.append(Variant("torch", [partial(dense, *given, rows, -1, False) for given in theirs]))
        variants.append(Variant("torch, index_add_", [partial(by_index_add, *given, rows) for given in theirs]))

    def agrees():
        names, want = kernels_of("embedding_backward", "ieee", dtype), sets[0][2].tobytes()
        made = [pydet.embedding_backward(dout, ids, rows, kernel=name) for name in names]
        return len(names) > 0 and all(dw.tobytes() == want for dw in made)

    return Row(
        "embedding backward",
        f"{tokens} x {n} of {rows}" + ", as text" * (ids_of is words),
        dtype,
        variants,
        "torch" if torch else "numpy",
        dout.nbytes + sets[0][2].nbytes,
        "GB/s",
        agrees,
        "" if torch else NO_TORCH,
    )


# Tokens, columns, and the rows of the table.
SHAPES = ((65536, 64, 4), (16384, 1024, 4), (65536, 64, 1000), (16384, 1024, 30000))


def rows(threads):
    for dtype in ("fp32", "bf16"):
        for shape in SHAPES:
            yield partial(table_gradient, *shape, dtype)
        yield partial(table_gradient, 4096, 1024, 32000, dtype, words)


MOST_ELEMENTS = 1 << 24  # of what is drawn


def draw(generator, between):
    while True:
        tokens, n, rows = between(256, 65536), between(16, 4096), between(2, 262144)
        if max(tokens, rows) * n <= MOST_ELEMENTS:
            return partial(
                table_gradient, tokens, n, rows, generator.choice(("fp32", "bf16")), generator.choice((evenly, words))
            )
