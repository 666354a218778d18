"""Embeddings, sampling and topk on an NVIDIA GPU: the CPU's bits, by every kernel."""

import numpy as np

import pydet
import test_embedding as embeddings
import test_sample as samples
from cases import DTYPES, assert_same_bits, data
from test_cuda import device, each, torch  # noqa: F401


@each("embedding")
def test_embedding(device, kernel, dtype):
    embeddings.check_forward(device, dtype)
    w, ids = data("normal", (300, 4100), DTYPES[dtype]), np.int64([0, -1, 300, 299])
    lost = device.embedding(w, ids)
    assert lost[[0, 3]].tobytes() == w[[0, 299]].tobytes() and np.isnan(lost[1:3].astype(np.float32)).all()
    assert device.refused == 0


@each("embedding_backward")
def test_embedding_backward(device, kernel, dtype):
    """The CPU's cases; tables and tokens of models; ids of no rows; many tokens of one id."""
    embeddings.check_backward(device, dtype, embeddings.CASES)
    embeddings.check_many_tokens(device, dtype, True)
    for tokens, rows, n in ((4096, 128256, 64), (20000, 50257, 40), (9000, 3, 264), (3000, 70000, 1032)):
        dout, ids = data("normal", (tokens, n), DTYPES[dtype]), embeddings.ids_of(tokens, rows)
        want = pydet.embedding_backward(dout, ids, rows)
        assert_same_bits(device.embedding_backward(dout, ids, rows), want, f"{tokens} of {rows} rows of {n}")
        ids[::5] = rows
        some = ids < rows
        want = pydet.embedding_backward(dout[some], ids[some], rows)
        assert_same_bits(device.embedding_backward(dout, ids, rows), want, "ids of no rows")
    assert device.refused == 0


@each("sample")
def test_sample(device, kernel, dtype):
    samples.check(device, dtype)
    device.dtype = dtype
    samples.test_a_vocabulary(device)
    samples.test_options_of_rows(device)
    samples.test_rows_with_nothing_to_draw_from(device)
    samples.test_greedy_is_the_first_of_the_largest(device)


@each("topk")
def test_topk(device, kernel, dtype):
    samples.check_topk(device, dtype, [1, 2, 5, 8, 9, 70, 1024, 2049, 40000])
