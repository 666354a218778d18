"""linear_log_prob and its gradients: the bits of the composition in any chunks, sums of micro-batches, refusals."""

import itertools

import numpy as np
import pytest

import capi
import pydet
import reference_head
from capi import Tensor, ffi, lib
from cases import DTYPES, data
from pydet import frameworks, ops

ARITHMETICS = {"fp32": ["ieee"], "bf16": ["ieee", "sm90", "sm80", "cdna3", "cdna2"], "fp16": ["ieee", "sm90"]}
FIXED = 1024  # bytes of a workspace that are no row's


def row_bytes(n, dtype, wide, backward):
    """Of a row's logits, and of their gradient and a 1 in the type of x: rows begin at multiples of 16 bytes."""
    size, padded = np.dtype(dtype).itemsize, lambda size: -(-n * size // 16) * 16
    if not backward:
        return padded(4 if wide else size)
    return padded(4 if wide else size) + (padded(size) if wide and size == 2 else 0) + size


def problem(rows, n, k, dtype, seed=0, index=np.int64):
    x, w, bias = (data("normal", shape, dtype, seed + i) for i, shape in enumerate(((rows, k), (n, k), (n,))))
    rng = np.random.default_rng(seed)
    return x, w, bias, rng.integers(-1, n, rows).astype(index), data("normal", (rows,), np.float32, seed + 3)


def composed(x, w, index, bias, dlog_prob, wide=False, functions=pydet, **how):
    """-> (log_prob, dx, dw, dbias), by the functions that are one step each."""
    z = functions.skinny_gemm(x, w, bias=bias, out_dtype="float32" if wide else None, **how)
    d = functions.log_prob_backward(dlog_prob, z, index)
    if d.dtype != x.dtype:
        none = np.zeros((d.shape[0], 0), x.dtype), np.zeros((0, d.shape[1]), x.dtype)
        d = functions.gemm(*none, initial=d, out_dtype=x.dtype, arithmetic=how.get("arithmetic", "auto"))
    sums = {"out_dtype": "float32", **how}
    dbias = functions.gemm_db(np.ones((x.shape[0], 1), x.dtype), d, **sums)[0]
    return functions.log_prob(z, index), functions.gemm(d, w, **how), functions.gemm_db(d, x, **sums), dbias


def check(functions, cases, dtype, arithmetics, at_once=(16, 48, 128, None)):
    """Forward and backward in chunks of so many rows, one less, equal, one more, several and a rest of them."""
    for number, (rows, n, k) in enumerate(cases):
        for arithmetic, k_chunk, wide in zip(
            arithmetics, itertools.cycle((None, 16, 48)), itertools.cycle((0, 1, 0, 1))
        ):
            x, w, bias, index, dlog_prob = problem(rows, n, k, DTYPES[dtype], number, (np.int64, np.int32)[number % 2])
            how = {"arithmetic": arithmetic, "k_chunk": k_chunk}
            with_bias = {"bias": bias if number % 3 else None}
            want = composed(x, w, index, with_bias["bias"], dlog_prob, wide, **how)
            how |= with_bias | ({"logits_dtype": "float32"} if wide else {})
            for count in at_once:
                most = max(count or 0, k_chunk or 16)
                forward, backward = (
                    {"workspace": FIXED + most * row_bytes(n, x.dtype, wide, b)} for b in (False, True)
                )
                if count is None:
                    forward, backward = {}, {}
                what = f"{rows} x {n} x {k}, {arithmetic}, k_chunk {k_chunk}, wide {wide}, {count} at once"
                assert functions.linear_log_prob(x, w, index, **forward, **how).tobytes() == want[0].tobytes(), what
                asked = {"of_log_prob": True, "of_bias": True}
                found = functions.linear_log_prob_backward(dlog_prob, x, w, index, **asked, **backward, **how)
                for name, got, one in zip(("dx", "dw", "dbias", "log_prob"), found, (*want[1:], want[0]), strict=True):
                    assert got.dtype == one.dtype and got.tobytes() == one.tobytes(), f"{name}: {what}"


CASES = [
    (rows, n, 24) for rows, n in zip((1, 15, 16, 17, 47, 48, 49, 127, 128, 129, 300), (50, 7, 1, 33), strict=False)
]
CASES += [(37, n, 40) for n in (8, 9, 127, 129, 257, 2049)] + [(130, 50, 1), (20, 3, 0), (257, 16, 17)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_rows_have_the_bits_of_the_composition(dtype):
    check(pydet, CASES, dtype, ARITHMETICS[dtype])


def test_nan_inf_and_no_column():
    x, w, bias, index, dlog_prob = problem(40, 30, 24, np.float32)
    x[3], bias[4], x[5, 0], index[7], index[8] = np.nan, -np.inf, np.inf, 30, -(2**40)
    want = composed(x, w, index, bias, dlog_prob)
    assert np.isnan(want[0][[3, 7, 8]]).all() and np.isfinite(want[0][index >= 0][-1])
    found = pydet.linear_log_prob_backward(
        dlog_prob, x, w, index, bias=bias, workspace=FIXED + 16 * 132, of_log_prob=True
    )
    for got, one in zip((found.log_prob, *found[:3]), want, strict=True):
        assert got.tobytes() == one.tobytes()


def test_layouts_and_shapes():
    x, w, bias, index, dlog_prob = problem(36, 50, 24, np.float32)
    want = pydet.linear_log_prob(x, w, index, bias=bias)
    gradients = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias)
    apart = np.zeros((36, 40), np.float32)[:, 8:32]
    apart[...] = x
    across, table = np.asfortranarray(x), np.asfortranarray(w)
    for rows, weight in ((apart, w), (across, table), (x, table)):
        assert pydet.linear_log_prob(rows, weight, index, bias=bias).tobytes() == want.tobytes()
        dx = np.zeros((36, 30), np.float32)[:, 3:27]
        dw = np.zeros((50, 26), np.float32)[:, 1:25]
        made = pydet.linear_log_prob_backward(dlog_prob, rows, weight, index, bias=bias, dx=dx, dw=dw)
        assert made.dx is dx and made.dw is dw
        for got, one in zip(made[:3], gradients, strict=False):
            assert got.tobytes() == one.tobytes()
    deep = pydet.linear_log_prob(x.reshape(3, 12, 24), w, index.reshape(3, 12), bias=bias)
    assert deep.shape == (3, 12) and deep.tobytes() == want.tobytes()
    made = pydet.linear_log_prob_backward(
        dlog_prob.reshape(3, 12), x.reshape(3, 12, 24), w, index.reshape(3, 12), bias=bias
    )
    assert made.dx.shape == (3, 12, 24) and made.dx.tobytes() == gradients.dx.tobytes()
    one = pydet.linear_log_prob(x[5], w, index[5:6].reshape(()), bias=bias)
    assert one.shape == () and one.tobytes() == want[5].tobytes()
    for dtype in DTYPES.values():  # of a bias beside x, and of dx beside it
        other = bias.astype(dtype)
        same = pydet.linear_log_prob(x, w, index, bias=other)
        assert same.tobytes() == pydet.linear_log_prob(x, w, index, bias=other.astype(np.float32)).tobytes()
        dx = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias, dx=np.empty((36, 24), dtype)).dx
        assert dx.tobytes() == gradients.dx.astype(dtype).tobytes()


def test_what_is_not_asked_for_is_not_made():
    x, w, bias, index, dlog_prob = problem(20, 10, 8, np.float32)
    whole = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias, of_log_prob=True)
    for of_x, of_w, of_bias in itertools.product((True, False), repeat=3):
        made = pydet.linear_log_prob_backward(
            dlog_prob, x, w, index, bias=bias, of_x=of_x, of_w=of_w, of_bias=of_bias, of_log_prob=not of_x
        )
        for got, one, asked in zip(made, whole, (of_x, of_w, of_bias, not of_x), strict=True):
            assert (got is None) != asked and (got is None or got.tobytes() == one.tobytes())


def test_no_rows_and_no_depth():
    x, w, bias, index, dlog_prob = problem(0, 10, 8, np.float32)
    assert pydet.linear_log_prob(x, w, index).shape == (0,)
    made = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias)
    assert made.dx.shape == (0, 8) and not made.dw.any() and not made.dbias.any()
    start = data("normal", (10, 8), np.float32, 9)
    kept = start.copy()
    pydet.linear_log_prob_backward(dlog_prob, x, w, index, dw=kept, accumulate=True)
    assert kept.tobytes() == start.tobytes()
    x, w, bias, index, dlog_prob = problem(9, 10, 0, np.float32)
    made = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias)
    assert made.dx.shape == (9, 0) and made.dw.shape == (10, 0) and made.dbias.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_micro_batches_have_the_sums_of_one_batch(dtype):
    """Cut at multiples of 16 rows, in chunks of 16, 32 and all; a cut elsewhere is seen (a negative control)."""
    x, w, bias, index, dlog_prob = problem(96, 50, 24, DTYPES[dtype])
    arithmetic = ARITHMETICS[dtype][1 if dtype != "fp32" else 0]
    whole = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias, arithmetic=arithmetic)
    for cuts in ([0, 16, 96], [0, 48, 64, 96], [0, 8, 96]):
        dw, dbias = np.zeros((50, 24), np.float32), np.zeros(50, np.float32)
        for start, end in itertools.pairwise(cuts):
            part = slice(start, end)
            pydet.linear_log_prob_backward(
                dlog_prob[part], x[part], w, index[part], bias=bias, dw=dw, dbias=dbias, accumulate=True,
                arithmetic=arithmetic, workspace=FIXED + 32 * row_bytes(50, x.dtype, False, True),
            )  # fmt: skip
        same = dw.tobytes() == whole.dw.tobytes() and dbias.tobytes() == whole.dbias.tobytes()
        assert same == (cuts[1] % 16 == 0 or dtype == "fp32"), cuts


def test_sums_of_another_type_are_rounded_once_and_want_all_rows():
    x, w, bias, index, dlog_prob = problem(64, 50, 24, DTYPES["bf16"])
    wide = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias)
    half = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias, dw_dtype="bfloat16")
    for got, one in zip((half.dw, half.dbias), (wide.dw, wide.dbias), strict=True):
        assert got.tobytes() == one.astype(got.dtype).tobytes()
    room = FIXED + 64 * row_bytes(50, x.dtype, False, True)
    call = lambda room: pydet.linear_log_prob_backward(
        dlog_prob, x, w, index, bias=bias, dw_dtype="bfloat16", workspace=room
    )
    assert call(room).dw.tobytes() == half.dw.tobytes()
    with pytest.raises(
        ValueError, match=rf"workspace is {room - 16} bytes, want {room} for all rows at once, or dw in"
    ):
        call(room - 16)


def test_the_least_workspace():
    x, w, bias, index, dlog_prob = problem(40, 50, 24, np.float32)
    want = pydet.linear_log_prob(x, w, index)
    least = FIXED + row_bytes(50, x.dtype, False, False)
    assert pydet.linear_log_prob(x, w, index, workspace=least).tobytes() == want.tobytes()
    with pytest.raises(
        ValueError, match=rf"linear_log_prob: workspace is {least - 1} bytes, want at least {least} for 1 row"
    ):
        pydet.linear_log_prob(x, w, index, workspace=least - 1)
    for k_chunk, rows in ((None, 16), (32, 32)):
        least = FIXED + rows * row_bytes(50, x.dtype, False, True)
        how = {"bias": bias, "k_chunk": k_chunk}
        pydet.linear_log_prob_backward(dlog_prob, x, w, index, workspace=least, **how)
        with pytest.raises(
            ValueError, match=rf"want at least {least} for {rows} rows, where a sum over rows may be cut"
        ):
            pydet.linear_log_prob_backward(dlog_prob, x, w, index, workspace=least - 1, **how)


# ---- What else rows are asked ---------------------------------------------------------------------------------------

READ = [(1.0, None), (0.7, None), (1.0, 3.0), (1.3, 2.5)]  # temperature, softcap
OTHER_TYPES = {"fp32": (None, "bfloat16"), "bf16": (None, "float32", "float16"), "fp16": (None, "float32", "bfloat16")}
ASKED = reference_head.Rows._fields


def ask(move, x, w, index, bias, by, room, **how):
    """-> what rows are asked; dx, dw, dbias and log_prob of the gradient by it."""
    names = zip(("dentropy", "dlse", "dmean"), by[1:], strict=True)
    names = {name: move(gradient) for name, gradient in names if gradient is not None}
    asked = {f"of_{name}": True for name in ASKED[1:]}
    operands = [move(t) for t in (x, w, index)]
    forward = ops.head._linear_log_prob(*operands, bias=move(bias), workspace=room[0], **asked, **how)
    asked = {"of_x": True, "of_w": True, "of_bias": True, "of_log_prob": True, "workspace": room[1]}
    return *forward, *ops.head._linear_log_prob_backward(
        move(by[0]), *operands, bias=move(bias), **asked, **names, **how
    )


def asked_problem(rows, n, dtype, seed):
    """With logits that are -Inf, equal, NaN and Inf in some rows, and gradients that are 0."""
    x, w, bias, index, _ = problem(rows, n, 24, dtype, seed)
    index[:2] = (n - 1, n)[: len(index)]
    bias[n // 3] = -np.inf if n > 2 else bias[n // 3]
    w[n // 2], bias[n // 2] = w[-1], bias[-1]
    if rows > 12:
        x[8, 3], x[9, 2], x[10] = np.nan, np.inf, 0
    by = [data("normal", (rows,), np.float32, seed + 9 + i) for i in range(4)]
    for i, gradient in enumerate(by):
        gradient[i::5] = 0
    return x, w, bias, index, by


def check_asked(move, out, dtype, shapes, counts=(16, 1 << 20), read=READ, kernel=None, types=None):
    """Of all types of logits, or of `types`, in chunks of so many rows: the bits of one step after the other."""
    for number, (rows, n) in enumerate(shapes):
        temperature, softcap = read[number % len(read)]
        x, w, bias, index, by = asked_problem(rows, n, DTYPES[dtype], number)
        for logits, count in itertools.product(types or OTHER_TYPES[dtype], counts):
            z = pydet.skinny_gemm(x, w, bias=bias, out_dtype=logits, arithmetic="ieee")
            want = dict(zip(ASKED, reference_head.asked(z, index, softcap, temperature), strict=True))
            some = [g if number % 3 or i == 0 else None for i, g in enumerate(by)]
            d = reference_head.gradient(z, index, some, x.dtype, softcap, temperature)
            sums = {"out_dtype": "float32", "arithmetic": "ieee"}
            want |= {"dx": pydet.gemm(d, w, arithmetic="ieee"), "dw": pydet.gemm_db(d, x, **sums)}
            want |= {"dbias": pydet.gemm_db(np.ones((rows, 1), x.dtype), d, **sums)[0]}
            how = {"temperature": temperature, "softcap": softcap or 0.0, "arithmetic": "ieee", "kernel": kernel}
            how |= {} if logits is None else {"logits_dtype": frameworks.type_index(logits, "test", "dtype")}
            size = FIXED + count * (row_bytes(n, x.dtype, True, True) + 16 * n)
            found = ask(move, x, w, index, bias, some, (size, size), **how)
            for name, got in zip((*ASKED, "dx", "dw", "dbias", "log_prob"), found, strict=True):
                got, one, what = out(got), want[name], f"{name}: {rows} x {n}, logits {logits}, {count} at once, {how}"
                assert got.dtype == one.dtype and got.tobytes() == one.tobytes(), what


ASKED_SHAPES = [(1, 1), (17, 7), (16, 8), (15, 9), (33, 127), (20, 129), (17, 2047), (3, 2048), (5, 2049), (18, 4100)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rows_are_asked_has_the_bits_of_its_steps(dtype):
    check_asked(np.asarray, lambda x: x, dtype, ASKED_SHAPES)
    check_asked(np.asarray, lambda x: x, dtype, ASKED_SHAPES[1:5], (16,), READ[1:])


def test_each_kernel_of_rows(head_rows_kernel):
    """By name, which makes the log-probability and its gradient alone too."""
    kernel, dtype = head_rows_kernel.name, head_rows_kernel.dtype
    if dtype in DTYPES:
        check_asked(np.asarray, lambda x: x, dtype, ASKED_SHAPES, (16,), kernel=kernel)
        x, w, bias, index, by = asked_problem(20, 130, DTYPES[dtype], 2)
        want = composed(x, w, index, bias, by[0], arithmetic="ieee")
        operands, how = (
            {"bias": bias, "kernel": kernel, "arithmetic": "ieee"},
            {"of_x": True, "of_w": True, "of_bias": True},
        )
        assert ops.head._linear_log_prob(x, w, index, **operands).tobytes() == want[0].tobytes()
        made = ops.head._linear_log_prob_backward(by[0], x, w, index, **operands, **how)
        assert [t.tobytes() for t in made[:3]] == [t.tobytes() for t in want[1:]]
        with pytest.raises(pydet.Error, match="cpu_nothing"):
            ops.head._linear_log_prob(x, w, index, kernel="cpu_nothing")


def test_the_entropy_and_a_temperature_by_the_public_functions():
    x, w, bias, index, by = asked_problem(7, 50, np.float32, 1)
    how = {"bias": bias, "temperature": 0.5, "softcap": 4.0}
    log_prob, entropy = pydet.linear_log_prob(x, w, index, return_entropy=True, **how)
    z = pydet.skinny_gemm(x, w, bias=bias)
    want = reference_head.asked(z, index, 4.0, 0.5)
    assert entropy.tobytes() == want.entropy.tobytes() and log_prob.tobytes() == want.log_prob.tobytes()
    assert pydet.linear_log_prob(x, w, index, **how).tobytes() == log_prob.tobytes()
    made = pydet.linear_log_prob_backward(by[0], x, w, index, dentropy=by[1], **how)
    d = reference_head.gradient(z, index, (*by[:2], None, None), np.float32, 4.0, 0.5)
    assert made.dw.tobytes() == pydet.gemm_db(d, x, out_dtype="float32").tobytes()


def check_asked_in_slabs(move, out, dtype, kernel=None, n=5 * 2048 + 100, softcap=3.0):
    rows = 24 if dtype == "fp32" else 48
    x, w, bias, index, by = asked_problem(rows, n, DTYPES[dtype], 3)
    z = pydet.skinny_gemm(x, w, bias=bias, arithmetic="ieee")
    d = reference_head.gradient(z, index, by, x.dtype, softcap, 0.8)
    how = {"softcap": softcap or 0.0, "temperature": 0.8, "arithmetic": "ieee", "kernel": kernel}
    room = slab_bytes(rows, max(1, n // SLAB // 7), x.dtype)
    assert room < FIXED + 16 * row_bytes(n, x.dtype, False, True)
    found = ask(move, x, w, index, bias, by, (1 << 28, room), **how)[5:]
    want = pydet.gemm(d, w, arithmetic="ieee"), pydet.gemm_db(d, x, out_dtype="float32", arithmetic="ieee")
    for name, got, one in zip(("dx", "dw"), found, want, strict=False):
        assert out(got).tobytes() == one.tobytes(), name
    assert out(found[3]).tobytes() == reference_head.asked(z, index, softcap, 0.8).log_prob.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rows_are_asked_in_slabs(dtype):
    """dw begun in float32, whose memory has the logits."""
    check_asked_in_slabs(np.asarray, lambda x: x, dtype)


# ---- Slabs of columns ------------------------------------------------------------------------------------------------

SLAB = 2048  # columns, of which a slab has a multiple


def slab_bytes(rows, slabs, dtype):
    """Of a workspace that holds so many times 2048 columns of all rows, and a 1 in the type of x for each."""
    size = np.dtype(dtype).itemsize
    return int(rows * slabs * SLAB) * size + -(-rows * size // 16) * 16


def by_slabs(rows, n, k, dtype, arithmetic, slabs=1, k_chunk=None, functions=pydet, **given):
    """-> (what was made, what the composition makes), in a workspace that has no room for 16 rows of logits."""
    x, w, bias, index, dlog_prob = problem(rows, n, k, dtype)
    index[:3] = -1, n, n - 1
    how, room = {"arithmetic": arithmetic, "k_chunk": k_chunk}, slab_bytes(rows, slabs, dtype)
    assert room < FIXED + max(16, k_chunk or 0) * row_bytes(n, dtype, False, True)
    asked = {"bias": bias, "of_log_prob": True, "workspace": room, **how, **given}
    found = functions.linear_log_prob_backward(dlog_prob, x, w, index, **asked)
    log_prob, *want = composed(x, w, index, bias, dlog_prob, **how)
    return found, (*want, log_prob)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slabs_in_the_memory_of_dw_have_the_bits_of_the_composition(dtype):
    """Whole slabs, a column less and more, several in one, and as few rows as the last columns have room for."""
    size = np.dtype(DTYPES[dtype]).itemsize
    cases = [(48, 5 * SLAB + 100, 1, None), (48, 6 * SLAB, 1, 16), (33, 4 * SLAB - 1, 1, None)]
    cases += [(48, 9 * SLAB + 1100, 2, 128), (65, 16 * SLAB, 3, 2048), (48, 5 * SLAB + 48, 1, None)]
    cases += [(40, 5 * SLAB + 1, 1, None)] if dtype == "fp32" else []
    for number, (rows, n, slabs, k_chunk) in enumerate(cases):
        arithmetic = ARITHMETICS[dtype][number % len(ARITHMETICS[dtype])]
        least = -(-rows * size // 4)  # as long as a row of logits' elements reach in dw
        found, want = by_slabs(rows, n, least + number % 2, DTYPES[dtype], arithmetic, slabs, k_chunk)
        for name, got, one in zip(("dx", "dw", "dbias", "log_prob"), found, want, strict=True):
            assert got.dtype == one.dtype and got.tobytes() == one.tobytes(), f"{name}: {rows} x {n}, {arithmetic}"


def test_slabs_and_what_is_asked_for():
    """dx in fp32 needs no room of its own; what is not asked for is not made; strides of dx."""
    rows, n, k, half = 48, 5 * SLAB + 8, 24, DTYPES["bf16"]
    dx = np.full((rows, k + 5), 7, np.float32)
    found, want = by_slabs(rows, n, k, half, "sm90", dx=dx[:, 3:-2])
    assert found.dx.astype(half).tobytes() == want[0].tobytes() and (dx[:, [0, 1, 2, -2, -1]] == 7).all()
    for of_x, of_bias in ((False, True), (False, False)):
        made, _ = by_slabs(rows, n, k, half, "sm90", of_x=of_x, of_bias=of_bias)
        assert (made.dx is None, made.dbias is None) == (True, not of_bias)
        assert made.dw.tobytes() == want[1].tobytes() and made.log_prob.tobytes() == want[3].tobytes()


def test_where_there_are_no_slabs():
    """Then rows go in chunks, and a workspace that has no room for 16 of them is refused."""
    fits = {"rows": 48, "n": 5 * SLAB + 48, "k": 24, "dtype": DTYPES["bf16"], "arithmetic": "sm90"}
    by_slabs(**fits)
    wide = np.empty((fits["n"], 25), np.float32)
    refused = [{"n": 5 * SLAB + 47}, {"k": 23}, {"slabs": 1 - 1 / SLAB}, {"k_chunk": 48}, {"logits_dtype": "float32"}]
    refused += [{"dw": wide[:, :24]}, {"dw_dtype": "bfloat16"}, {"n": 16 * SLAB + 48}]
    sums = {"dw": np.zeros((fits["n"], 24), np.float32), "dbias": np.zeros(fits["n"], np.float32)}
    for other in (*refused, {**sums, "accumulate": True}):
        with pytest.raises(ValueError, match=r"linear_log_prob_backward: workspace is \d+ bytes, want"):
            by_slabs(**{**fits, **other})


def test_slabs_write_their_workspace_and_their_results_alone():
    rows, n, k = 48, 5 * SLAB + 48, 24
    x, w, bias, index, dlog_prob = problem(rows, n, k, DTYPES["bf16"])
    want = composed(x, w, index, bias, dlog_prob)
    size = slab_bytes(rows, 1, x.dtype)
    memory = np.full(size + 4096, 0xA5, np.uint8)
    begin = -memory.ctypes.data % 256 + 272
    around = np.full(n * k + 64, np.nan, np.float32)
    dw = around[32:-32].reshape(n, k)
    outs = [np.full(rows, 7, np.float32), np.full((rows, k), 7, x.dtype), dw, np.full(n, np.nan, np.float32)]
    options = capi.options(
        "pydet_linear_log_prob_options",
        workspace=ffi.cast("void *", memory.ctypes.data + begin),
        workspace_size=size,
    )
    given = [Tensor(t) for t in (dlog_prob, x, w, bias, index, *outs)]
    assert lib.pydet_linear_log_prob_backward(ffi.NULL, *map(capi.pointer, given), options) == lib.PYDET_OK
    for got, one in zip(outs, want, strict=True):
        assert got.tobytes() == one.tobytes()
    assert np.isnan(around[:32]).all() and np.isnan(around[-32:]).all()
    assert (memory[:begin] == 0xA5).all() and (memory[begin + size :] == 0xA5).all()


# ---- In C --------------------------------------------------------------------------------------------------------


def bytes_of(rows, n, k, dtype=capi.BFLOAT16, backward=1, most=0, status=lib.PYDET_OK, **given):
    options, found = capi.options("pydet_linear_log_prob_options", **given), ffi.new("uint64_t *")
    dtype = ffi.new("pydet_dtype *", dtype)[0]
    assert lib.pydet_linear_log_prob_workspace(rows, n, k, dtype, backward, most, options, found) == status
    return found[0]


def test_the_workspace_that_is_asked_for():
    """At most 256 MiB by default, or what the caller says, in whole tiles of 128 rows; at least what has to be."""
    assert 240 << 20 < bytes_of(8192, 128256, 4096) <= 256 << 20
    assert bytes_of(8192, 128256, 4096, most=1 << 30) <= 1 << 30 < 2 * bytes_of(8192, 128256, 4096, most=1 << 30)
    assert bytes_of(3, 100, 8) == FIXED + 3 * row_bytes(100, DTYPES["bf16"], False, True)
    assert bytes_of(300, 100, 8, most=1) == FIXED + 16 * row_bytes(100, DTYPES["bf16"], False, True)
    assert bytes_of(300, 100, 8, most=1, k_chunk=64) == FIXED + 64 * row_bytes(100, DTYPES["bf16"], False, True)
    assert bytes_of(300, 100, 8, most=1, backward=0) == FIXED + row_bytes(100, DTYPES["bf16"], False, False)
    assert bytes_of(0, 100, 8) == bytes_of(100, 0, 8) == 0
    wrong = {"rows": -1, "n": 5, "k": 5, "status": lib.PYDET_INVALID_SHAPE}
    bytes_of(**wrong)
    bytes_of(4, 5, 6, capi.FLOAT32, 2, status=lib.PYDET_INVALID_VALUE)
    bytes_of(4, 5, 6, (10, 8, 1), status=lib.PYDET_INVALID_DTYPE)
    bytes_of(4, 5, 6, k_chunk=8, status=lib.PYDET_INVALID_VALUE)
    bytes_of(2**62, 2**62, 6, status=lib.PYDET_OVERFLOW)


@pytest.mark.parametrize("rows", [1, 16, 33, 130])
def test_the_workspace_is_all_that_is_written(rows):
    """Of any contents, at any multiple of 16 bytes, with guards around it and what it is refused for."""
    x, w, bias, index, dlog_prob = problem(rows, 30, 8, DTYPES["bf16"])
    want = composed(x, w, index, bias, dlog_prob)
    size = FIXED + 16 * row_bytes(30, x.dtype, False, True)
    memory = np.full(size + 4096, 0xA5, np.uint8)
    begin = -memory.ctypes.data % 256 + 272
    outs = [np.full(shape, 7, dtype) for shape, dtype in (((rows,), np.float32), ((rows, 8), x.dtype))]
    outs += [np.full((30, 8), np.nan, np.float32), np.full(30, np.nan, np.float32)]
    given = [Tensor(t) for t in (dlog_prob, x, w, bias, index, *outs)]
    options = capi.options(
        "pydet_linear_log_prob_options",
        workspace=ffi.cast("void *", memory.ctypes.data + begin),
        workspace_size=size,
    )
    call = lambda: lib.pydet_linear_log_prob_backward(ffi.NULL, *map(capi.pointer, given), options)
    assert call() == lib.PYDET_OK, capi.last_error()
    for got, one in zip(outs, want, strict=True):
        assert got.tobytes() == one.tobytes()
    assert (memory[:begin] == 0xA5).all() and (memory[begin + size :] == 0xA5).all()
    for out in outs:
        out[...] = 7
    options.workspace = ffi.cast("void *", memory.ctypes.data + begin + 8)
    assert call() == lib.PYDET_MISALIGNED
    options.workspace, options.workspace_size = ffi.NULL, 0
    assert call() == lib.PYDET_WORKSPACE_TOO_SMALL
    assert all((out.astype(np.float32) == 7).all() for out in outs)


def test_refusals():
    x, w, bias, index, dlog_prob = problem(6, 20, 8, np.float32)

    def refuses(pattern, *given, backward=False, **options):
        function = pydet.linear_log_prob_backward if backward else pydet.linear_log_prob
        with pytest.raises(pydet.Error, match=pattern):
            function(*given, **options)

    refuses(r"linear_log_prob: w is 8x20, want Nx8", x, w.T, index)
    refuses(r"linear_log_prob: w is 0x8, want a row or more", x, w[:0], index)
    refuses(r"linear_log_prob: w is bfloat16, want float32 as x is", x, w.astype(DTYPES["bf16"]), index)
    refuses(r"linear_log_prob: index is 5, want 6", x, w, index[:5])
    refuses(r"linear_log_prob: index is float32, want int32 or int64", x, w, dlog_prob)
    refuses(r"linear_log_prob: bias is 19, want 20", x, w, index, bias=bias[:19])
    refuses(r"linear_log_prob: bias is 6x20, want 20", x, w, index, bias=np.zeros((6, 20), np.float32))
    refuses(r"linear_log_prob: log_prob is 5, want 6", x, w, index, out=np.empty(5, np.float32))
    refuses(r"linear_log_prob: log_prob is float16, want float32", x, w, index, out=np.empty(6, np.float16))
    for name, given, want in (
        ("temperature", 0.0, "a positive number"), ("temperature", -1.0, "a positive number"),
        ("temperature", float("nan"), "a positive number"), ("softcap", 0.0, "a positive number"),
        ("softcap", float("inf"), "a number from 2"),
        ("temperature", float("inf"), "a number from 2"),
    ):  # fmt: skip
        refuses(rf"linear_log_prob: {name} is {given}, want {want}", x, w, index, **{name: given})
    refuses(r"linear_log_prob_backward: temperature is -2", dlog_prob, x, w, index, temperature=-2, backward=True)
    refuses(r"linear_log_prob_backward: entropy is 5, want 6", dlog_prob, x, w, index, dentropy=dlog_prob[:5],
            backward=True)  # fmt: skip
    refuses(r"linear_log_prob: logits_dtype is 'int8', want one of", x, w, index, logits_dtype="int8")
    refuses(r"linear_log_prob_backward: dw_dtype is 'int8'", dlog_prob, x, w, index, dw_dtype="int8", backward=True)
    refuses(r"linear_log_prob: k_chunk is 8, want a positive multiple of 16", x, w, index, k_chunk=8)
    refuses(r"linear_log_prob: arithmetic is 'sm9'", x, w, index, arithmetic="sm9")
    refuses(
        r"linear_log_prob: arithmetic sm90 takes bfloat16 and float16|takes bfloat16", x, w, index, arithmetic="sm90"
    )
    refuses(r"linear_log_prob: workspace is no positive number of bytes", x, w, index, workspace=0)
    refuses(r"linear_log_prob: the rows of x, 3x2x8, are not one stride apart", x.reshape(2, 3, 8).swapaxes(0, 1), w,
            index.reshape(3, 2))  # fmt: skip
    refuses(r"linear_log_prob: log_prob shares memory with x", x, w, index, out=x.reshape(-1)[:6])
    back = {"backward": True}
    refuses(r"linear_log_prob_backward: dlog_prob is 5, want 6", dlog_prob[:5], x, w, index, **back)
    thin = np.empty((20, 7), np.float32)
    refuses(r"linear_log_prob_backward: dw is 20x7, want 20x8", dlog_prob, x, w, index, dw=thin, **back)
    refuses(r"linear_log_prob_backward: dbias is 19, want 20", dlog_prob, x, w, index, dbias=bias[:19].copy(), **back)
    refuses(r"linear_log_prob_backward: dx is 5x8, want 6x8", dlog_prob, x, w, index, dx=x[:5].copy(), **back)
    refuses(r"linear_log_prob_backward: dw is float16, want float32 under accumulate", dlog_prob, x, w, index,
            dw=np.empty((20, 8), np.float16), accumulate=True, **back)  # fmt: skip
    refuses(r"linear_log_prob_backward: accumulate needs dw and dbias", dlog_prob, x, w, index, accumulate=True, **back)
    refuses(r"linear_log_prob_backward: dx shares memory with x", dlog_prob, x, w, index, dx=x, **back)
    whole = np.empty((26, 8), np.float32)
    refuses(r"linear_log_prob_backward: d[xw] shares memory with d[xw]", dlog_prob, x, w, index, dx=whole[:6],
            dw=whole[5:25], **back)  # fmt: skip
    tensors = [Tensor(t) for t in (x, w, index, np.empty(6, np.float32))]
    given = [capi.pointer(t) for t in (*tensors[:2], None, *tensors[2:])]
    twice, chosen = Tensor(np.empty(6, np.float32)), Tensor(np.empty(6, np.int32))
    for options, sentence in (
        ({"accumulate": 1}, "options.accumulate is 1, want 0"),
        ({"softcap": -1.0}, "softcap is -1, want a number from 2^-100 to 2^100"),
        ({"softcap": 1e-40}, "softcap is 9.99995e-41, want a number from"),
        ({"logits": (2, 64, 1)}, "options.logits is float64, want float32, bfloat16 or float16"),
        ({"lse": capi.pointer(twice), "mean": capi.pointer(twice)}, "mean shares memory with lse"),
        ({"entropy": given[4]}, "entropy shares memory with log_prob"),
        ({"greedy": capi.pointer(chosen)}, "greedy is int32, want int64"),
    ):
        options = capi.options("pydet_linear_log_prob_options", **options)
        assert lib.pydet_linear_log_prob(ffi.NULL, *given, options) != lib.PYDET_OK
        assert sentence in capi.last_error()
    back = [Tensor(t) for t in (dlog_prob, x, w, index, x.copy())]
    back = [capi.pointer(t) for t in back]
    options = capi.options("pydet_linear_log_prob_options", greedy=capi.pointer(Tensor(index)))
    none = capi.pointer(None)
    tensors = (*back[:3], none, back[3], none, back[4], none, none)
    assert lib.pydet_linear_log_prob_backward(ffi.NULL, *tensors, options) == lib.PYDET_INVALID_VALUE
    assert "greedy is given, want NULL" in capi.last_error()
