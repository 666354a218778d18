"""Embeddings: every kernel, forced by name, against the reference; refusals; and what they promise."""

import numpy as np
import pytest

import capi
import pydet
import reference_embedding as reference
from capi import ffi, lib
from cases import DTYPES, assert_same_bits, data
from conftest import threads

# Around the CPU's vectors and pieces of 128 elements, a GPU's vectors of 8, and its teams of threads.
WIDTHS = [*range(1, 19), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 1032, 2049]
# Around the tokens of a step of the kernels, and the rows of a table that a block has.
TOKENS = [0, 1, 2, 31, 32, 33, 63, 64, 65, 129, 511, 513, 700]
ROWS = [1, 2, 31, 32, 33, 511, 512, 513, 1030]


def ids_of(tokens, rows, seed=0, kind=np.int64):
    """Some ids with many tokens, most with few or none; the first and the last row."""
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random(tokens) < 0.3, rng.integers(0, min(rows, 3), tokens), rng.integers(0, rows, tokens))
    ids[: tokens // 3 : 5] = rows - 1
    return ids.astype(kind)


def check_forward(functions, dtype, widths=WIDTHS):
    """NaNs too are copied as they are."""
    for number, n in enumerate(widths):
        rows, tokens = ROWS[number % len(ROWS)], TOKENS[number % len(TOKENS)]
        w = data("specials" if number % 3 == 1 else "normal", (rows, n), DTYPES[dtype], number)
        ids = ids_of(tokens, rows, number, (np.int64, np.int32)[number % 2])
        got = functions.embedding(w, ids)
        assert got.shape == (tokens, n) and got.tobytes() == reference.embedding(w, ids).tobytes(), n


def check_backward(functions, dtype, cases):
    """Every way to have dw: made, of fp32 beside another type, given, continued, with an id that does not count."""
    for number, (tokens, rows, n) in enumerate(cases):
        kind = ("normal", "normal", "specials", "wide")[number % 4]
        dout = data(kind, (tokens, n), DTYPES[dtype], number)
        ids = ids_of(tokens, rows, number, (np.int64, np.int32)[number % 2])
        padding = None if number % 3 else int(ids[0]) if tokens else 0
        own = {"padding_idx": padding}
        what = f"{tokens} tokens of {rows} rows of {n}, padding {padding}"
        if number % 2:
            got = functions.embedding_backward(dout, ids, rows, **own)
            assert_same_bits(got, reference.embedding_backward(dout, ids, rows, **own), what)
        else:
            own["out_dtype"] = np.float32
            got = functions.embedding_backward(dout, ids, rows, **own)
            assert_same_bits(got, reference.embedding_backward(dout, ids, rows, **own), what + ", fp32")
            del own["out_dtype"]
        start = data("normal", (rows, n), np.float32, number + 1)
        want = reference.embedding_backward(dout, ids, out=start, accumulate=True, **own)
        got = functions.embedding_backward(dout, ids, out=start.copy(), accumulate=True, **own)
        assert_same_bits(got, want, what + ", continued")


CASES = [(TOKENS[i % len(TOKENS)], ROWS[i % len(ROWS)], n) for i, n in enumerate(WIDTHS)]
CASES += [(tokens, rows, 5) for tokens in TOKENS for rows in (1, 33, 513)]


def check_many_tokens(on, dtype, wide):
    """Ids of very many tokens beside others, whose places begin and end around every multiple of 128."""
    lengths = [1, 129, 127, 256, 255, 3, 257, 128, 384, 40, 385, 130, 126, 1000 if wide else 140, 2, 513]
    ids = np.random.default_rng(5).permutation(np.repeat(np.arange(len(lengths)), lengths))
    for n in (8, 64, 72, 264) if wide else (8, 72):
        dout = data("normal", (len(ids), n), DTYPES[dtype], seed=n)
        for first in (0, 1, 77):
            given = dout[first:], ids[first:]
            assert_same_bits(on.embedding_backward(*given, 20), pydet.embedding_backward(*given, 20), f"{n}, {first}")
        begun = data("normal", (20, n), DTYPES["fp32"], seed=n + 1)
        want = pydet.embedding_backward(dout, ids, out=begun.copy(), accumulate=True)
        assert_same_bits(on.embedding_backward(dout, ids, out=begun, accumulate=True), want, f"{n}, continued")


def test_many_tokens(embedding_backward_kernel):
    check_many_tokens(embedding_backward_kernel, embedding_backward_kernel.dtype, False)


def test_rows_are_copied(embedding_kernel):
    check_forward(embedding_kernel, embedding_kernel.dtype)


def test_the_sum_of_an_id_has_its_tokens_in_order(embedding_backward_kernel):
    check_backward(embedding_backward_kernel, embedding_backward_kernel.dtype, CASES)


def test_the_order_shows():
    """A negative control: of three tokens in another order the sum has other bits."""
    dout = np.float32([[1e8], [1], [-1e8]])
    assert pydet.embedding_backward(dout, np.int64([0, 0, 0]), 1)[0, 0] == 0
    assert pydet.embedding_backward(dout[[0, 2, 1]], np.int64([0, 0, 0]), 1)[0, 0] == 1


@pytest.mark.parametrize("cut", [0, 1, 7, 299, 300])
def test_tokens_may_be_cut_anywhere(embedding_backward_kernel, cut):
    kernel = embedding_backward_kernel
    dout, ids = data("normal", (300, 70), DTYPES[kernel.dtype]), ids_of(300, 40)
    whole = kernel.embedding_backward(dout, ids, 40, out_dtype=np.float32)
    sums = kernel.embedding_backward(dout[:cut], ids[:cut], 40, out_dtype=np.float32)
    assert kernel.embedding_backward(dout[cut:], ids[cut:], out=sums, accumulate=True) is sums
    assert_same_bits(sums, whole)


def test_rows_without_tokens(embedding_backward_kernel):
    """They become +0, or under accumulate are left alone, even a NaN of another kind."""
    kernel = embedding_backward_kernel
    dout, ids = data("normal", (5, 9), DTYPES[kernel.dtype]), np.int32([2, 2, 0, 2, 4])
    out = np.full((6, 9), np.nan, DTYPES[kernel.dtype])
    kernel.embedding_backward(dout, ids, out=out)
    assert not out[[1, 3, 5]].tobytes().strip(b"\0") and np.isfinite(out.astype(np.float32)).all()
    sums = np.full((6, 9), np.uint32(0xFFABCDEF)).view(np.float32)
    kernel.embedding_backward(dout, ids, out=sums, accumulate=True)
    bits = sums.view(np.uint32)
    assert (bits[[1, 3, 5]] == 0xFFABCDEF).all() and (bits[[0, 2, 4]] == 0x7FFFFFFF).all()
    kernel.embedding_backward(dout, ids, out=out, padding_idx=2)
    assert not out[1:4].tobytes().strip(b"\0") and out[0].tobytes() == dout[2].tobytes()


def test_a_row_alone_has_the_bits_that_it_has_among_others(embedding_backward_kernel):
    kernel = embedding_backward_kernel
    dout, ids = data("normal", (400, 33), DTYPES[kernel.dtype]), ids_of(400, 50)
    whole = kernel.embedding_backward(dout, ids, 50)
    for number in (0, 1, 2, 17, 49):
        mine = ids == number
        alone = kernel.embedding_backward(dout[mine], ids[mine], 50)
        assert_same_bits(alone[number], whole[number])


def test_threads_change_nothing():
    dout, ids = data("normal", (3000, 1100), np.float32), ids_of(3000, 900)
    with threads(1):
        one = pydet.embedding_backward(dout, ids, 900)
    with threads(3):
        assert_same_bits(pydet.embedding_backward(dout, ids, 900), one)
    assert_same_bits(one, reference.embedding_backward(dout, ids, 900))


def test_strides_and_shapes(embedding_kernel):
    kernel = embedding_kernel
    w = data("normal", (20, 12), DTYPES[kernel.dtype])[::2, :7]
    ids = ids_of(12, 10).reshape(3, 4)
    out = np.zeros((4, 3, 9), w.dtype).swapaxes(0, 1)[..., :7]
    assert kernel.embedding(w, ids, out=out) is out and out.tobytes() == w[ids].tobytes()
    assert kernel.embedding(w, np.array(3)).tobytes() == w[3].tobytes()
    dout = data("normal", (4, 3, 9), DTYPES[kernel.dtype]).swapaxes(0, 1)[..., :7]
    want = reference.embedding_backward(np.ascontiguousarray(dout), ids, 10)
    assert_same_bits(pydet.embedding_backward(dout, ids, 10), want)
    dw = np.zeros((20, 9), w.dtype)[::2, :7]
    assert_same_bits(pydet.embedding_backward(dout, ids, out=dw), want)
    assert pydet.embedding(w, np.zeros((0, 3), np.int64)).shape == (0, 3, 7)
    assert not pydet.embedding_backward(np.zeros((0, 7), np.float32), np.zeros(0, np.int64), 3).any()


W, IDS, DOUT = np.ones((4, 3), np.float32), np.int64([0, 3]), np.ones((2, 3), np.float32)
REFUSED = [
    (
        lambda: pydet.embedding(W, np.int64([1, 4])),
        "embedding: ids has 4 at 1, want numbers of the table's 4 rows, from 0",
    ),
    (lambda: pydet.embedding(W, np.int32([-1])), "embedding: ids has -1 at 0, want numbers of the table's 4 rows"),
    (lambda: pydet.embedding(W[:0], np.int32([0])), "embedding: ids has 0 at 0, want numbers of the table's 0 rows"),
    (lambda: pydet.embedding(W, IDS.astype(np.int16)), "embedding: ids is int16, want int32 or int64"),
    (lambda: pydet.embedding(W[0], IDS), "embedding: w is no matrix"),
    (lambda: pydet.embedding(W.astype(float), IDS), "embedding: w is float64, want float32, bfloat16 or float16"),
    (lambda: pydet.embedding(W[0], IDS, out=DOUT.copy()), "embedding: w is 3, want 2 dimensions, the last of them 3"),
    (
        lambda: pydet.embedding(W, IDS, out=np.ones((2, 4), np.float32)),
        "embedding: w is 4x3, want 2 dimensions, the last of them 4",
    ),
    (lambda: pydet.embedding(W, IDS, out=np.ones((3, 3), np.float32)), "embedding: ids is 2, want 3"),
    (lambda: pydet.embedding(W, IDS, out=DOUT.astype(np.float16)), "embedding: out is float16, want float32 as w is"),
    (lambda: pydet.embedding(W, IDS, out=W[:2]), "embedding: out shares memory with w, want it apart"),
    (
        lambda: pydet.embedding_backward(DOUT, IDS),
        "embedding_backward: rows is not given, want those of the table, or out",
    ),
    (lambda: pydet.embedding_backward(DOUT, IDS, -1), "embedding_backward: rows is no number from 0 to 2147483647"),
    (lambda: pydet.embedding_backward(DOUT, IDS, 2**31), "embedding_backward: rows is no number from 0 to 2147483647"),
    (
        lambda: pydet.embedding_backward(DOUT, IDS, 3, out=W.copy()),
        "embedding_backward: rows is not that of out, whose first extent it is",
    ),
    (
        lambda: pydet.embedding_backward(DOUT, IDS, 3),
        "embedding_backward: ids has 3 at 1, want numbers of the table's 3 rows",
    ),
    (
        lambda: pydet.embedding_backward(DOUT, IDS, 4, padding_idx=4),
        "the padding id is 4, want one of dw's 4 rows, from 0",
    ),
    (lambda: pydet.embedding_backward(DOUT, IDS, 4, padding_idx=-1), "the padding id is -1, want one of dw's 4 rows"),
    (lambda: pydet.embedding_backward(DOUT, IDS, 4, accumulate=True), "embedding_backward: accumulate needs out"),
    (
        lambda: pydet.embedding_backward(DOUT.astype(np.float16), IDS, out=W.astype(np.float16), accumulate=True),
        "embedding_backward: dw is float16, want float32 under accumulate",
    ),
    (
        lambda: pydet.embedding_backward(DOUT, IDS, 4, out_dtype=np.float16),
        "embedding_backward: dw is float16, want float32, or float32 as dout is",
    ),
    (lambda: pydet.embedding_backward(DOUT, IDS[:1], 4), "embedding_backward: ids is 1, want 2"),
    (lambda: pydet.embedding_backward(DOUT, IDS[None], 4), "ids has 2 dimensions, want 1, one less than dout"),
]


@pytest.mark.parametrize("call, sentence", REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refusals(call, sentence):
    with pytest.raises(pydet.Error) as problem:
        call()
    assert sentence in str(problem.value)


def test_nothing_is_written_where_an_id_is_refused():
    out = np.full((2, 3), 7, np.float32)
    with pytest.raises(pydet.Error):
        pydet.embedding(W, np.int64([0, 9]), out=out)
    sums = np.full((4, 3), 7, np.float32)
    with pytest.raises(pydet.Error):
        pydet.embedding_backward(DOUT, np.int64([0, 9]), out=sums, accumulate=True)
    assert (out == 7).all() and (sums == 7).all()


def test_the_workspace():
    bytes_ = ffi.new("uint64_t *")
    for tokens, rows in ((0, 0), (1, 32), (5, 33), (2**31 - 1, 2**31 - 1)):
        assert lib.pydet_embedding_backward_workspace(tokens, rows, bytes_) == lib.PYDET_OK
        assert bytes_[0] == 8 * tokens + 4 * (-(-rows // 32) + 1)
    for tokens, rows in ((-1, 1), (1, -1), (2**31, 1), (1, 2**31)):
        assert lib.pydet_embedding_backward_workspace(tokens, rows, bytes_) == lib.PYDET_INVALID_SHAPE
    tensors = [capi.Tensor(x) for x in (DOUT, IDS, np.zeros((4, 3), np.float32))]
    status = lib.pydet_embedding_backward(ffi.NULL, *(t.c for t in tensors), ffi.NULL)
    assert status == lib.PYDET_WORKSPACE_TOO_SMALL
    assert "want 24 (pydet_embedding_backward_workspace)" in ffi.string(lib.pydet_last_error()).decode()
