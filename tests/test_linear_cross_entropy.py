"""linear_cross_entropy and its gradients: the bits of their steps, whatever the chunks, threads and results that are
asked for; sums of micro-batches; what the workspace is and is not; refusals. Beside PyTorch's and JAX's: in
test_torch_head.py and test_jax_head.py."""

import concurrent.futures
import itertools

import numpy as np
import pytest

import capi
import pydet
import reference_head
from capi import Tensor, ffi, lib
from cases import DTYPES, data
from conftest import threads, unusual_float_environment
from test_head import FIXED, OTHER_TYPES, row_bytes

REDUCTIONS = ("mean", "sum", "none")
RULES = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 1e-3},
    {"label_smoothing": 1.0},
]


def problem(rows, n, k, dtype, seed=0, index=np.int64, ignored=-100):
    x, w, bias = (data("normal", shape, dtype, seed + i) for i, shape in enumerate(((rows, k), (n, k), (n,))))
    target = np.random.default_rng(seed).integers(0, n, rows).astype(index)
    target[1::5] = ignored
    return x, w, bias, target


def gradient_like(target, reduction, seed=7):
    return data("normal", target.shape, np.float32, seed) if reduction == "none" else np.float32(0.37).reshape(())


def steps(*given, **how):
    """-> loss, dx, dw, dbias."""
    return reference_head.cross_entropy(*given, **how)[:4]


def check(dloss, x, w, target, what="", **how):
    """Forward, backward, and both in one call."""
    want = steps(dloss, x, w, target, **how)
    room = how.pop("room", {})
    loss = pydet.linear_cross_entropy(x, w, target, **how, **room)
    made = pydet.linear_cross_entropy_backward(dloss, x, w, target, of_bias=True, of_loss=True, **how, **room)
    alone = pydet.linear_cross_entropy_backward(dloss, x, w, target, of_bias=True, **how, **room)
    assert alone.loss is None
    found = {"loss": loss, "dx": alone.dx, "dw": alone.dw, "dbias": alone.dbias}
    for name, one in zip(found, want, strict=True):
        for got in (found[name], getattr(made, name)):
            assert got.shape == one.shape and got.dtype == one.dtype and got.tobytes() == one.tobytes(), (name, what)
    return loss


# ---- Bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_the_steps(dtype, reduction):
    """Of every rule, type of logits and reading of them; odd columns and depths; one row."""
    shapes = itertools.cycle([(37, 50, 24), (1, 7, 13), (20, 129, 33), (16, 1, 8), (300, 33, 9)])
    read = itertools.cycle([{}, {"temperature": 0.7}, {"softcap": 3.0}, {"temperature": 1.3, "softcap": 2.5}])
    for number, (rule, logits) in enumerate(itertools.product(RULES, OTHER_TYPES[dtype])):
        x, w, bias, target = problem(*next(shapes), DTYPES[dtype], number, (np.int64, np.int32)[number % 2])
        how = {**rule, **next(read), "reduction": reduction, "arithmetic": "ieee", "logits_dtype": logits}
        how |= {"bias": bias} if number % 3 else {}
        how |= {"k_chunk": 16} if number % 4 == 1 else {}
        check(gradient_like(target, reduction), x, w, target, f"{number}: {x.shape}, {w.shape}, {how}", **how)


@pytest.mark.parametrize("arithmetic", ["sm90", "sm80", "cdna3", "cdna2"])
def test_arithmetics(arithmetic):
    x, w, bias, target = problem(40, 50, 48, DTYPES["bf16"])
    for reduction, rule in zip(REDUCTIONS, RULES[1:], strict=False):
        how = {"reduction": reduction, "arithmetic": arithmetic, "bias": bias, **rule}
        check(gradient_like(target, reduction), x, w, target, **how)


def test_a_vocabulary_that_is_odd():
    x, w, bias, target = problem(17, 50257, 33, DTYPES["bf16"])
    check(np.float32(1).reshape(()), x, w, target, bias=bias, label_smoothing=0.1, z_loss=1e-4, arithmetic="ieee")


def test_the_order_of_the_sum():
    """Chains of 256 rows: one less, one, one more, several and a rest. In any other order there are other bits."""
    for rows in (1, 255, 256, 257, 512, 600):
        x, w, bias, target = problem(rows, 20, 8, np.float32, rows)
        each = pydet.linear_cross_entropy(x, w, target, bias=bias, reduction="none")
        total = pydet.linear_cross_entropy(x, w, target, bias=bias, reduction="sum")
        product = pydet.gemm(each[None], np.ones((rows, 1), np.float32), arithmetic="ieee", k_chunk=256)
        assert total.shape == () and total.tobytes() == product.tobytes()
        mean = pydet.linear_cross_entropy(x, w, target, bias=bias)
        assert mean.tobytes() == (total / np.float32((target != -100).sum())).tobytes()
    one_chain = pydet.gemm(each[None], np.ones((rows, 1), np.float32), arithmetic="ieee")
    assert one_chain.tobytes() != total.tobytes(), "the control: 600 rows in one chain"


@pytest.mark.parametrize("count", [16, 48, None])
def test_chunks_of_rows(count):
    x, w, bias, target = problem(131, 50, 24, DTYPES["bf16"])
    for rule, reduction in zip(RULES, itertools.cycle(REDUCTIONS)):
        dloss, how = gradient_like(target, reduction), {"reduction": reduction, "bias": bias, **rule}
        want = steps(dloss, x, w, target, arithmetic="ieee", **how)
        size = FIXED + (count or 131) * row_bytes(50, x.dtype, False, True) + 6 * 131 * 4 + 16 * 6
        made = pydet.linear_cross_entropy_backward(
            dloss, x, w, target, workspace=size, of_loss=True, arithmetic="ieee", **how
        )
        for got, one in zip((made.loss, *made[:3]), want, strict=True):
            assert got.tobytes() == one.tobytes()
        size = FIXED + (count or 131) * row_bytes(50, x.dtype, False, False) + 3 * 131 * 4 + 16 * 3
        assert (
            pydet.linear_cross_entropy(x, w, target, workspace=size, arithmetic="ieee", **how).tobytes()
            == want[0].tobytes()
        )


def test_micro_batches_have_the_gradients_of_one_batch():
    """Of a sum, and of a mean whose gradient each is told; a cut at no multiple of 16 is seen (a negative control)."""
    x, w, bias, target = problem(96, 50, 24, DTYPES["bf16"])
    count = np.float32((target != -100).sum())
    how = {"bias": bias, "arithmetic": "sm90", "label_smoothing": 0.1, "z_loss": 1e-3}
    whole = pydet.linear_cross_entropy_backward(np.float32(1).reshape(()), x, w, target, **how)
    for cuts in ([0, 16, 96], [0, 48, 64, 96], [0, 8, 96]):
        dw, dbias, dx = np.zeros((50, 24), np.float32), np.zeros(50, np.float32), []
        for start, end in itertools.pairwise(cuts):
            part = slice(start, end)
            made = pydet.linear_cross_entropy_backward(
                (np.float32(1) / count).reshape(()), x[part], w, target[part], reduction="sum", dw=dw, dbias=dbias,
                accumulate=True, **how,
            )  # fmt: skip
            dx.append(made.dx)
        assert np.concatenate(dx).tobytes() == whole.dx.tobytes()
        same = dw.tobytes() == whole.dw.tobytes() and dbias.tobytes() == whole.dbias.tobytes()
        assert same == (cuts[1] % 16 == 0), cuts


def test_accumulate_continues():
    x, w, bias, target = problem(30, 20, 8, np.float32)
    dw, dbias = data("normal", (20, 8), np.float32, 5), data("normal", (20,), np.float32, 6)
    want = steps(np.float32(0.5), x, w, target, bias=bias, dw=dw, dbias=dbias)
    made = pydet.linear_cross_entropy_backward(
        np.float32(0.5).reshape(()), x, w, target, bias=bias, dw=dw, dbias=dbias, accumulate=True
    )
    assert made.dw is dw and dw.tobytes() == want[2].tobytes() and dbias.tobytes() == want[3].tobytes()


# ---- What is ignored, and what is no number --------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [-100, -1, 0, 7, 49, 50, 1 << 40])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_what_is_ignored(ignored, index):
    """A column too. Rows of it have no say, be they NaN; of targets that are none the loss is NaN, and no gradient but
    those by lse and mean."""
    x, w, bias, target = problem(40, 50, 24, np.float32, 3, index, ignored if abs(ignored) < 2**31 else -1)
    gone = np.flatnonzero(target == ignored)
    x[gone[:1]] = np.nan
    x[gone[1:2], 3] = np.inf
    for rule, reduction in itertools.product(RULES, REDUCTIONS):
        how = {"bias": bias, "reduction": reduction, "ignore_index": ignored, **rule}
        dloss = gradient_like(target, reduction)
        loss = check(dloss, x, w, target, f"{how}", **how)
        if len(gone):
            assert np.isfinite(loss).all()
            made = pydet.linear_cross_entropy_backward(dloss, x, w, target, **how)
            assert not made.dx[gone[2:]].any()
    target[[2, 3]] = 50 if ignored != 50 else 51, -7
    for rule in RULES[:4]:
        how = {"bias": bias, "ignore_index": ignored, **rule}
        assert np.isnan(check(np.float32(1).reshape(()), x, w, target, f"{how}", **how))
        made = pydet.linear_cross_entropy_backward(None, x, w, target, **how)
        assert made.dx[[2, 3]].any() == bool(rule), rule


def test_rows_that_are_no_numbers():
    x, w, bias, target = problem(40, 50, 24, np.float32, 4)
    target[[3, 5, 8]] = 1
    x[3], x[5, 0], bias[4], x[8] = np.nan, np.inf, -np.inf, 0
    for rule, reduction in itertools.product(RULES, REDUCTIONS):
        check(gradient_like(target, reduction), x, w, target, bias=bias, reduction=reduction, **rule)
    each = pydet.linear_cross_entropy(x, w, target, bias=bias, reduction="none")
    assert np.isnan(each[[3, 5]]).all() and (each.view(np.uint32)[[3, 5]] == 0x7FFFFFFF).all()


def test_all_rows_ignored_and_no_rows():
    x, w, bias, target = problem(20, 10, 8, np.float32)
    target[:] = -100
    for rows in (slice(0, 20), slice(0, 0)):
        given = x[rows], w, target[rows]
        mean, total = (pydet.linear_cross_entropy(*given, reduction=r) for r in ("mean", "sum"))
        assert mean.view(np.uint32) == 0x7FFFFFFF and total.tobytes() == b"\0\0\0\0"
        for reduction, rule in itertools.product(REDUCTIONS, RULES):
            how = {"bias": bias, "reduction": reduction, "of_loss": True, **rule}
            made = pydet.linear_cross_entropy_backward(None, *given, **how)
            assert made.dx.shape == x[rows].shape and not any(g.any() for g in made[:3])
            assert made.loss.tobytes() == pydet.linear_cross_entropy(*given, reduction=reduction, **rule).tobytes()
    kept = data("normal", (10, 8), np.float32, 9)
    dw = kept.copy()
    pydet.linear_cross_entropy_backward(None, x[:0], w, target[:0], dw=dw, accumulate=True)
    assert dw.tobytes() == kept.tobytes()
    x, w, bias, target = problem(9, 10, 0, np.float32)  # no depth: logits are the bias
    check(np.float32(1).reshape(()), x, w, target, bias=bias, label_smoothing=0.1)


# ---- Layouts, lse, what is asked for ---------------------------------------------------------------------------------


def test_layouts_and_shapes():
    x, w, bias, target = problem(36, 51, 23, np.float32)
    how = {"bias": bias, "label_smoothing": 0.1, "z_loss": 0.01}
    want = pydet.linear_cross_entropy_backward(None, x, w, target, of_loss=True, **how)
    apart = np.zeros((36, 40), np.float32)[:, 8:31]
    apart[...] = x
    rows_apart = np.zeros((51, 30), np.float32)[:, :23]
    rows_apart[...] = w
    across, table = np.asfortranarray(x), np.asfortranarray(w)
    some = np.zeros(102, np.float32)[::2]
    some[...] = bias
    for rows, weight, b in ((apart, w, bias), (across, table, some), (x, rows_apart, bias)):
        dx, dw = np.zeros((36, 30), np.float32)[:, 3:26], np.zeros((51, 26), np.float32)[:, 1:24]
        made = pydet.linear_cross_entropy_backward(
            None, rows, weight, target, dx=dx, dw=dw, of_loss=True, **{**how, "bias": b}
        )
        assert made.dx is dx and made.dw is dw
        for got, one in zip(made, want, strict=True):
            assert got.tobytes() == one.tobytes()
        assert pydet.linear_cross_entropy(rows, weight, target, **{**how, "bias": b}).tobytes() == want.loss.tobytes()
    deep = x.reshape(3, 12, 23), w, target.reshape(3, 12)
    made = pydet.linear_cross_entropy_backward(None, *deep, of_loss=True, **how)
    assert made.dx.shape == (3, 12, 23) and made.loss.shape == ()
    for got, one in zip(made, want, strict=True):
        assert got.tobytes() == one.tobytes()
    each = pydet.linear_cross_entropy(x, w, target, reduction="none", **how)
    assert pydet.linear_cross_entropy(*deep, reduction="none", **how).shape == (3, 12)
    one = x[4], w, target[4:5].reshape(())  # one row, as a vector: its target and loss have no dimension
    for reduction in REDUCTIONS:
        loss = pydet.linear_cross_entropy(*one, reduction=reduction, **how)
        assert loss.shape == () and loss.tobytes() == each[4].tobytes()
        made = pydet.linear_cross_entropy_backward(None, *one, reduction=reduction, of_loss=True, **how)
        assert made.dx.shape == (23,) and made.loss.tobytes() == each[4].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_of_bias_dx_and_sums(dtype):
    x, w, bias, target = problem(36, 50, 24, np.float32)
    want = pydet.linear_cross_entropy_backward(None, x, w, target, bias=bias)
    dx = np.empty((36, 24), DTYPES[dtype])
    half = pydet.linear_cross_entropy_backward(None, x, w, target, bias=bias, dx=dx, dw_dtype=dx.dtype.name)
    for got, one in zip(half[:3], want, strict=False):
        assert got.dtype == dx.dtype and got.tobytes() == one.astype(got.dtype).tobytes()
    other = bias.astype(dx.dtype)
    loss = pydet.linear_cross_entropy(x, w, target, bias=other)
    assert loss.tobytes() == pydet.linear_cross_entropy(x, w, target, bias=other.astype(np.float32)).tobytes()


def test_lse_is_written_and_spares_what_it_is_made_of():
    """An lse of other numbers shows in the gradients of z_loss, and in nothing else."""
    x, w, bias, target = problem(40, 50, 24, np.float32)
    lse = np.full(40, np.nan, np.float32)
    for rule in RULES:
        plain = pydet.linear_cross_entropy(x, w, target, bias=bias, **rule)
        assert pydet.linear_cross_entropy(x, w, target, bias=bias, lse=lse, **rule).tobytes() == plain.tobytes()
        assert lse.tobytes() == reference_head.asked(pydet.skinny_gemm(x, w, bias=bias), target).lse.tobytes()
        want = pydet.linear_cross_entropy_backward(None, x, w, target, bias=bias, of_loss=True, **rule)
        for of_loss in (False, True):
            asked = {"bias": bias, "of_loss": of_loss, **rule}
            made = pydet.linear_cross_entropy_backward(None, x, w, target, lse=lse, **asked)
            for got, one in zip(made, want, strict=True):
                assert got is None or got.tobytes() == one.tobytes()
            other = pydet.linear_cross_entropy_backward(None, x, w, target, lse=lse + 1, **asked)
            assert (other.dw.tobytes() != want.dw.tobytes()) == ("z_loss" in rule)


def test_every_combination_of_results():
    x, w, bias, target = problem(20, 10, 8, np.float32)
    for rule, reduction in itertools.product(RULES[:4], REDUCTIONS):
        how = {"bias": bias, "reduction": reduction, **rule}
        whole = pydet.linear_cross_entropy_backward(None, x, w, target, of_loss=True, **how)
        lse = np.empty(20, np.float32)
        pydet.linear_cross_entropy(x, w, target, lse=lse, **how)
        for asked in itertools.product((True, False), repeat=5):
            named = dict(zip(("of_x", "of_w", "of_bias", "of_loss"), asked, strict=False))
            known = lse.copy() if asked[4] else None
            made = pydet.linear_cross_entropy_backward(None, x, w, target, lse=known, **named, **how)
            for got, one, wanted in zip(made, whole, asked, strict=False):
                assert (got is None) != wanted and (got is None or got.tobytes() == one.tobytes())
            assert known is None or known.tobytes() == lse.tobytes()


def test_dloss_of_none_is_one():
    x, w, bias, target = problem(20, 10, 8, np.float32)
    for reduction in REDUCTIONS:
        ones = np.ones((20,) if reduction == "none" else (), np.float32)
        got, want = (pydet.linear_cross_entropy_backward(d, x, w, target, reduction=reduction) for d in (None, ones))
        assert got.dx.tobytes() == want.dx.tobytes() and got.dw.tobytes() == want.dw.tobytes()
        half = pydet.linear_cross_entropy_backward(ones / 2, x, w, target, reduction=reduction)
        assert half.dx.tobytes() != want.dx.tobytes()


def test_each_kernel_of_rows(head_rows_kernel):
    """By name: of what the head says of rows, and of its gradients."""
    from pydet import ops

    dtype = head_rows_kernel.dtype
    if dtype not in DTYPES:
        return
    x, w, bias, target = problem(20, 130, 24, DTYPES[dtype], 2)
    how = {"bias": bias, "label_smoothing": 0.1, "z_loss": 1e-3, "arithmetic": "ieee"}
    want = steps(np.float32(1), x, w, target, **how)
    how["kernel"] = head_rows_kernel.name
    loss = ops.head._linear_cross_entropy(x, w, target, **how)
    made = ops.head._linear_cross_entropy_backward(None, x, w, target, of_x=True, of_w=True, of_bias=True, **how)
    for got, one in zip((loss, *made[:3]), want, strict=True):
        assert got.tobytes() == one.tobytes()
    with pytest.raises(pydet.Error, match="cpu_nothing"):
        ops.head._linear_cross_entropy(x, w, target, kernel="cpu_nothing")


def check_on_a_device(move, out, dtype, most_rows=4400):
    """The CPU's bits: of one row, of a chain and a rest, of more chains than a block has at a time (4400 rows)."""
    for rows, rule, reduction in zip((1, 40, 300, 4400, 40, 300), itertools.cycle(RULES), itertools.cycle(REDUCTIONS)):
        if rows > most_rows:
            continue
        for ignored in (-100, 7):
            x, w, bias, target = problem(rows, 33, 24, DTYPES[dtype], rows, (np.int32, np.int64)[rows % 3 % 2], ignored)
            target[-1], x[0, 0] = 33 if rows == 300 else 5, np.nan if rows == 40 else 1
            how = {"reduction": reduction, "ignore_index": ignored, "arithmetic": "ieee", **rule}
            asked = {"of_loss": True, "of_bias": True, **how}
            lse = [np.zeros(rows, np.float32), np.zeros(rows, np.float32)]
            dloss = np.asarray(gradient_like(target, reduction))
            want = pydet.linear_cross_entropy(x, w, target, bias=bias, lse=lse[0], **how)
            moved, held = [move(t) for t in (x, w, target)], move(lse[1])
            loss = pydet.linear_cross_entropy(*moved, bias=move(bias), lse=held, **how)
            assert out(loss).tobytes() == want.tobytes() and out(held).tobytes() == lse[0].tobytes(), (rows, how)
            want = pydet.linear_cross_entropy_backward(dloss, x, w, target, bias=bias, **asked)
            made = pydet.linear_cross_entropy_backward(move(dloss), *moved, bias=move(bias), **asked)
            for got, one in zip(made, want, strict=True):
                assert out(got).tobytes() == one.tobytes(), (rows, how)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_devices_are_held_to(dtype):
    check_on_a_device(np.asarray, np.asarray, dtype)


# ---- Threads and the calling thread ----------------------------------------------------------------------------------


def test_threads():
    x, w, bias, target = problem(300, 513, 65, DTYPES["bf16"])
    how = {"bias": bias, "label_smoothing": 0.1, "z_loss": 1e-3, "of_loss": True}
    found = []
    for count in (1, 2, 7):
        with threads(count):
            found.append(pydet.linear_cross_entropy_backward(None, x, w, target, **how))
    for made in found[1:]:
        assert [g.tobytes() for g in made] == [g.tobytes() for g in found[0]]
    problems = [problem(100 + i, 257, 33, np.float32, i) for i in range(8)]

    def run(number):
        x, w, bias, target = problems[number % 8]
        return pydet.linear_cross_entropy_backward(None, x, w, target, bias=bias, z_loss=1e-3, of_loss=True)

    alone = [[g.tobytes() for g in run(i)] for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for i, made in enumerate(pool.map(run, range(32))):
            assert [g.tobytes() for g in made] == alone[i % 8]


def test_the_float_environment_of_the_caller_has_no_say():
    """Losses and gradients that are subnormal, made where these are flushed and sums are rounded up."""
    x, w, bias, target = problem(40, 50, 24, np.float32)
    dloss = np.float32(1e-38).reshape(())
    how = {"bias": bias, "label_smoothing": 0.1, "z_loss": 1e-3, "of_loss": True}
    want = pydet.linear_cross_entropy_backward(dloss, x, w, target, **how)
    assert (np.abs(want.dx[want.dx != 0]) < 2.0**-126).any()
    with unusual_float_environment() as still_set:
        made = pydet.linear_cross_entropy_backward(dloss, x, w, target, **how)
        assert still_set()
    for got, one in zip(made, want, strict=True):
        assert got.tobytes() == one.tobytes()


def test_label_smoothing_is_a_double():
    """1 less it is rounded once: of some it is another number than 1 less what it is rounded to."""
    x, w, bias, target = problem(40, 50, 24, np.float32)
    numbers = np.random.default_rng(1).uniform(0, 0.5, 4000)
    twice = np.float32(1.0 - numbers) != np.float32(1.0 - np.float64(np.float32(numbers)))
    for smoothing in map(float, numbers[twice][:5]):
        once = steps(None, x, w, target, label_smoothing=smoothing, bias=bias, reduction="none")[0]
        how = {"bias": bias, "reduction": "none"}
        assert pydet.linear_cross_entropy(x, w, target, label_smoothing=smoothing, **how).tobytes() == once.tobytes()
        single = pydet.linear_cross_entropy(x, w, target, label_smoothing=float(np.float32(smoothing)), **how)
        assert single.tobytes() != once.tobytes()
        with unusual_float_environment():
            made = pydet.linear_cross_entropy(x, w, target, label_smoothing=smoothing, **how)
        assert made.tobytes() == once.tobytes()


# ---- In C --------------------------------------------------------------------------------------------------------

OPTIONS = "pydet_linear_cross_entropy_options"
SETTINGS = {"label_smoothing": 0.1, "z_loss": 1e-3}


def bytes_of(rows, n, k, dtype=capi.BFLOAT16, backward=1, most=0, status=lib.PYDET_OK, **given):
    options, found = capi.options(OPTIONS, **given), ffi.new("uint64_t *")
    dtype = ffi.new("pydet_dtype *", dtype)[0]
    assert lib.pydet_linear_cross_entropy_workspace(rows, n, k, dtype, backward, most, options, found) == status
    return found[0]


def test_the_workspace_that_is_asked_for():
    """The head's, and the numbers of rows before it: at most 256 MiB together, or what the caller says."""
    rows, n, of_row = 40, 100, row_bytes(100, DTYPES["bf16"], False, True)
    assert bytes_of(rows, n, 8, backward=0) == FIXED + rows * row_bytes(100, DTYPES["bf16"], False, False) + 4 * rows
    assert bytes_of(rows, n, 8, backward=0) - bytes_of(rows, n, 8, backward=0, reduction=2) == 4 * rows
    assert bytes_of(rows, n, 8) == FIXED + rows * of_row + 2 * 4 * rows
    assert bytes_of(rows, n, 8, **SETTINGS) == FIXED + rows * of_row + 6 * 4 * rows
    assert bytes_of(rows, n, 8, has_ignore_index=1, ignore_index=3, **SETTINGS) == FIXED + rows * (of_row + 6 * 4 + 8)
    assert bytes_of(300, n, 8, most=1) == FIXED + 16 * of_row + 2 * 4 * 300
    assert 240 << 20 < bytes_of(8192, 128256, 4096, **SETTINGS) <= 256 << 20
    assert bytes_of(8192, 128256, 4096, most=1 << 30) <= 1 << 30
    assert bytes_of(0, n, 8) == bytes_of(rows, 0, 8) == 0
    bytes_of(-1, 5, 5, status=lib.PYDET_INVALID_SHAPE)
    bytes_of(4, 5, 6, backward=2, status=lib.PYDET_INVALID_VALUE)
    bytes_of(4, 5, 6, label_smoothing=2, status=lib.PYDET_INVALID_VALUE)
    bytes_of(4, 5, 6, k_chunk=8, status=lib.PYDET_INVALID_VALUE)
    bytes_of(2**62, 2, 6, status=lib.PYDET_OVERFLOW)
    assert "linear_cross_entropy_workspace: the numbers of 4611686018427387904 rows reach past" in capi.last_error()
    bytes_of(2**40, 2**62, 6, status=lib.PYDET_OVERFLOW)


class Around:
    """Memory with guards, at a multiple of 16 bytes that is none of 256, of whatever contents."""

    def __init__(self, size):
        self.size, self.memory = size, np.full(size + 4096, 0xA5, np.uint8)
        self.begin = -self.memory.ctypes.data % 256 + 272
        self.address = self.memory.ctypes.data + self.begin

    def intact(self):
        return (self.memory[: self.begin] == 0xA5).all() and (self.memory[self.begin + self.size :] == 0xA5).all()


@pytest.mark.parametrize("rows", [1, 16, 33, 130])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_the_workspace_is_all_that_is_written(rows, ignored):
    """By calls of both directions one after the other in one workspace, with what the last one left there."""
    x, w, bias, target = problem(rows, 30, 8, DTYPES["bf16"], 0, np.int64, ignored)
    settings = {"has_ignore_index": 1, "ignore_index": ignored, **SETTINGS}
    how = {"bias": bias, "ignore_index": ignored, "label_smoothing": 0.1, "z_loss": 1e-3}
    want = steps(np.float32(1), x, w, target, arithmetic="ieee", **how)
    outs = [np.full(shape, 7, kind) for shape, kind in (((), np.float32), ((rows, 8), x.dtype))]
    outs += [np.full((30, 8), np.nan, np.float32), np.full(30, np.nan, np.float32)]
    given = [capi.pointer(Tensor(t)) for t in (x, w, bias, target, *outs)]
    for most in (1, 0):
        room = Around(bytes_of(rows, 30, 8, most=most, **settings))
        options = capi.options(
            OPTIONS, workspace=ffi.cast("void *", room.address), workspace_size=room.size, **settings
        )
        forward = lambda options=options: lib.pydet_linear_cross_entropy(ffi.NULL, *given[:5], options)
        backward = lambda options=options: lib.pydet_linear_cross_entropy_backward(ffi.NULL, ffi.NULL, *given, options)
        for call in (backward, forward, backward, backward):
            for out in outs:
                out[...] = 7
            assert call() == lib.PYDET_OK, capi.last_error()
            for got, one in list(zip(outs, want, strict=True))[: 1 if call is forward else 4]:
                assert got.tobytes() == one.tobytes()
            assert room.intact()
        for out in outs:
            out[...] = 7
        options.workspace_size = bytes_of(rows, 30, 8, most=1, **settings) - 16
        assert backward() == lib.PYDET_WORKSPACE_TOO_SMALL
        least = bytes_of(rows, 30, 8, most=1, **settings)
        assert f"workspace is {least - 16} bytes, want at least {least} for {min(rows, 16)} row" in capi.last_error()
        options.workspace_size = 16
        assert backward() == lib.PYDET_WORKSPACE_TOO_SMALL
        assert f"linear_cross_entropy_backward: workspace is 16 bytes, want at least {least}" in capi.last_error()
        options.workspace = ffi.cast("void *", room.address + 8)
        assert backward() == lib.PYDET_MISALIGNED
        options.workspace, options.workspace_size = ffi.NULL, 0
        assert backward() == lib.PYDET_WORKSPACE_TOO_SMALL and forward() == lib.PYDET_WORKSPACE_TOO_SMALL
        assert all((out.astype(np.float32) == 7).all() for out in outs)


def test_results_that_are_null():
    """All of them: nothing is to be written, and no workspace is wanted."""
    x, w, bias, target = problem(20, 30, 8, np.float32)
    given = [capi.pointer(Tensor(t)) for t in (x, w, bias, target)]
    nothing = [ffi.NULL] * 4
    options = capi.options(OPTIONS, **SETTINGS)
    assert lib.pydet_linear_cross_entropy_backward(ffi.NULL, ffi.NULL, *given, *nothing, options) == lib.PYDET_OK
    assert ffi.string(lib.pydet_last_kernel()) == b""
    assert lib.pydet_linear_cross_entropy(ffi.NULL, *given, ffi.NULL, options) == lib.PYDET_NULL_POINTER
    assert "linear_cross_entropy: loss is NULL, want a tensor" in capi.last_error()


def test_null_options_are_the_defaults():
    x, w, bias, target = problem(0, 30, 8, np.float32)  # of no rows: without a workspace
    loss = np.zeros((), np.float32)
    given = [capi.pointer(Tensor(t)) for t in (x, w, bias, target, loss)]
    assert lib.pydet_linear_cross_entropy(ffi.NULL, *given, ffi.NULL) == lib.PYDET_OK and np.isnan(loss)


def test_refusals():
    x, w, bias, target = problem(6, 20, 8, np.float32)
    row = np.zeros(6, np.float32)

    def refuses(pattern, *given, backward=False, **options):
        function = pydet.linear_cross_entropy_backward if backward else pydet.linear_cross_entropy
        with pytest.raises(pydet.Error, match=pattern):
            function(*((None,) if backward and len(given) == 3 else ()), *given, **options)

    for backward, op in ((False, "linear_cross_entropy"), (True, "linear_cross_entropy_backward")):
        both = {"backward": backward}
        refuses(rf"^{op}: w is 8x20, want Nx8", x, w.T, target, **both)
        refuses(rf"^{op}: w is 0x8, want a row or more", x, w[:0], target, **both)
        refuses(rf"^{op}: w is float16, want float32 as x is", x, w.astype(np.float16), target, **both)
        refuses(rf"^{op}: target is 5, want 6", x, w, target[:5], **both)
        refuses(rf"^{op}: target is float32, want int32 or int64", x, w, row, **both)
        refuses(rf"^{op}: bias is 19, want 20", x, w, target, bias=bias[:19], **both)
        refuses(rf"^{op}: reduction is 'all', want 'mean', 'sum' or 'none'", x, w, target, reduction="all", **both)
        refuses(rf"^{op}: reduction is \['sum'\], want", x, w, target, reduction=["sum"], **both)
        for smoothing in (-0.1, 1.5, float("nan"), float("inf"), -5e-324):
            refuses(rf"^{op}: label_smoothing is {smoothing:g}, want a number from 0 to 1", x, w, target,
                    label_smoothing=smoothing, **both)  # fmt: skip
        for z in (-1.0, float("nan"), float("inf"), 1e39):
            said = f"{z:g}".replace("+", r"\+")
            refuses(rf"^{op}: z_loss is {said}, want a number from 0 up that float32", x, w, target, z_loss=z, **both)
        refuses(rf"^{op}: temperature is 0.0, want a positive number", x, w, target, temperature=0.0, **both)
        refuses(rf"^{op}: softcap is inf, want a number from 2", x, w, target, softcap=float("inf"), **both)
        refuses(rf"^{op}: k_chunk is 8, want a positive multiple", x, w, target, k_chunk=8, **both)
        refuses(rf"^{op}: ignore_index is no 64-bit integer", x, w, target, ignore_index=1 << 70, **both)
        refuses(rf"^{op}: workspace is no positive number of bytes", x, w, target, workspace=0, **both)
        refuses(rf"^{op}: logits_dtype is 'int8'", x, w, target, logits_dtype="int8", **both)
        refuses(rf"^{op}: lse is 5, want 6", x, w, target, lse=row[:5], **both)
        refuses(rf"^{op}: lse is float16, want float32", x, w, target, lse=row.astype(np.float16), **both)
        out = {"loss" if backward else "out": np.empty(1, np.float32)}
        refuses(rf"^{op}: loss is 1, want \(\)", x, w, target, **out, **both)
        refuses(rf"^{op}: loss is 1, want 6", x, w, target, reduction="none", **out, **both)
        out = {"loss" if backward else "out": np.empty((), np.float16)}
        refuses(rf"^{op}: loss is float16, want float32", x, w, target, **out, **both)
        out = {"loss" if backward else "out": x[0, :1].reshape(())}
        refuses(rf"^{op}: loss shares memory with x", x, w, target, **out, **both)
    refuses("^linear_cross_entropy: lse shares memory with loss", x, w, target, reduction="none", out=row, lse=row)
    back = {"backward": True}
    op = "^linear_cross_entropy_backward"
    refuses(f"{op}: loss shares memory with lse", x, w, target, reduction="none", loss=row, lse=row, **back)
    refuses(rf"{op}: dloss is 1, want \(\)", np.ones(1, np.float32), x, w, target, **back)
    refuses(f"{op}: dloss is 1, want 6", np.ones(1, np.float32), x, w, target, reduction="none", **back)
    refuses(f"{op}: dloss is float16, want float32", np.ones((), np.float16), x, w, target, **back)
    refuses(f"{op}: dx is 5x8, want 6x8", x, w, target, dx=x[:5].copy(), **back)
    refuses(f"{op}: dx shares memory with x", x, w, target, dx=x, **back)
    refuses(f"{op}: dw is 19x8, want 20x8", x, w, target, dw=w[:19].copy(), **back)
    refuses(f"{op}: dw shares memory with w", x, w, target, dw=w, **back)
    refuses(f"{op}: dbias shares memory with bias", x, w, target, bias=bias, dbias=bias, **back)
    refuses(f"{op}: accumulate needs dw and dbias", x, w, target, accumulate=True, **back)
    refuses(f"{op}: dw is float16, want float32 under accumulate", x, w, target, dw=np.empty((20, 8), np.float16),
            accumulate=True, **back)  # fmt: skip
    x, w, bias, target = problem(64, 20, 8, np.float32)
    refuses(rf"{op}: workspace is 4096 bytes, want \d+ for all rows at once, or dw in float32", x, w, target,
            dw_dtype="float16", workspace=4096, **back)  # fmt: skip


def test_refusals_in_c():
    x, w, bias, target = problem(6, 20, 8, np.float32)
    loss, dx = np.full((), 7, np.float32), np.full((6, 8), 7, np.float32)
    room = Around(1 << 16)
    for fields, sentence in (
        ({"accumulate": 1}, "options.accumulate is 1, want 0: it is of the gradients"),
        ({"reduction": 3}, "options.reduction is 3, want 0 (mean), 1 (sum) or 2 (none)"),
        ({"reduction": -1}, "options.reduction is -1, want 0"),
        ({"has_ignore_index": 2}, "options.has_ignore_index is 2, want 0 or 1"),
        ({"ignore_index": 5}, "options.ignore_index is 5 and has_ignore_index 0, want 1"),
        ({"label_smoothing": -1.0}, "label_smoothing is -1, want a number from 0 to 1"),
        ({"softcap": -1.0}, "softcap is -1, want a number from 2^-100 to 2^100"),
        ({"logits": (2, 64, 1)}, "options.logits is float64, want float32, bfloat16 or float16"),
        ({"arithmetic": 9}, "arithmetic is 9"),
        ({"reserved": 1}, "options.reserved is 1, want 0"),
        ({"struct_size": 8}, "options.struct_size is 8, want 104"),
        ({"kernel": "cpu_nothing"}, "no kernel is named cpu_nothing"),
        ({"workspace": ffi.cast("void *", dx.ctypes.data)}, "workspace shares memory with"),
        ({"workspace": ffi.cast("void *", x.ctypes.data)}, "workspace shares memory with x"),
    ):
        fields = {"workspace": ffi.cast("void *", room.address), "workspace_size": room.size, **fields}
        options = capi.options(OPTIONS, **fields)
        given = [capi.pointer(Tensor(t)) for t in (x, w, bias, target, loss, dx)]
        none = [ffi.NULL] * 2
        if "it is of" in sentence:
            assert lib.pydet_linear_cross_entropy(ffi.NULL, *given[:5], options) == lib.PYDET_INVALID_VALUE
        else:
            assert lib.pydet_linear_cross_entropy_backward(ffi.NULL, ffi.NULL, *given, *none, options) != lib.PYDET_OK
        assert sentence in capi.last_error() and "\n" not in capi.last_error()
        assert loss == 7 and (dx == 7).all()
    fine = capi.options(OPTIONS, ignore_index=-100)
    given = [capi.pointer(Tensor(t)) for t in (x[:0], w, bias, target[:0], loss)]
    assert lib.pydet_linear_cross_entropy(ffi.NULL, *given, fine) == lib.PYDET_OK, "-100 is what it is by itself"
    on_gpu = [capi.pointer(Tensor(t, device=(2, 0))) for t in (x, w, bias, target, loss)]
    assert lib.pydet_linear_cross_entropy(ffi.NULL, *on_gpu, fine) == lib.PYDET_INVALID_DEVICE
