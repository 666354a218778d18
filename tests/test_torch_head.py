"""pydet.torch.linear_log_prob and linear_cross_entropy: the bits of the uncut composition whatever the chunks,
gradients that are PyTorch's, sums of micro-batches, what rows are asked beside, refusals."""

import itertools
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import numpy as np  # noqa: E402

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from pydet.torch.head import head_of, sum_of_rows  # noqa: E402
from test_torch import OPS, device, dtype, normal, refuses, same  # noqa: E402, F401
from torch_bits import differ  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def head(rows=37, hidden=24, columns=50, dtype=F32, device="cpu", index=torch.int64):
    x, w, bias = (
        normal(*shape, dtype=dtype, device=device) for shape in ((rows, hidden), (columns, hidden), (columns,))
    )
    chosen = torch.arange(rows, device=device, dtype=index) * 7 % columns
    chosen[1::9] = -100
    return [t.requires_grad_() for t in (x, w, bias)], chosen, normal(rows, device=device, seed=5)


def gradients(y, leaves, dy):
    return torch.autograd.grad(y, leaves, dy, retain_graph=True)


FIXED = 1024  # bytes of the library's workspace that are no row's


def room(columns, rows, dtype):
    """A workspace in which backward takes so many rows, at multiples of 16 bytes, and a 1 a row for the bias."""
    return FIXED + rows * (-(-columns * dtype.itemsize // 16) * 16 + dtype.itemsize)


@pytest.mark.parametrize("k_chunk", [None, 16])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 47, 48, 50])
def test_chunks_of_rows_have_the_bits_of_the_whole(device, dtype, rows, k_chunk):
    """One less, equal, one more, several and a rest of a chunk of 16; the step of every arithmetic is at most that."""
    (x, w, bias), index, dy = head(rows, dtype=dtype, device=device)
    for b in (bias, None):
        leaves = [t for t in (x, w, b) if t is not None]
        whole = pt.log_prob(pt.linear(x, w, b, k_chunk=k_chunk), index)
        want = gradients(whole, leaves, dy)
        for at_once in (16, 32, 1 << 20):
            workspace = room(50, at_once, dtype)
            y = pt.linear_log_prob(x, w, index, b, k_chunk=k_chunk, workspace=workspace)
            same(y, whole)
            for got, wanted in zip(gradients(y, leaves, dy), want, strict=True):
                same(got, wanted)


def test_the_workspace_is_what_is_taken():
    """Forward takes one row at least, backward 16 of them; a byte less is refused, and the chunks are those meant."""
    (x, w, bias), index, dy = head(dtype=BF16)
    fixed, row, of_rows = w.detach(), FIXED + 112, room(50, 16, BF16)  # then no sum over rows is cut
    for how in ({}, {"temperature": 0.5}):

        def ask(w, bias=None, room=1 << 28, how=how):
            return pt.linear_log_prob(x, w, index, bias, workspace=room, **how)

        def refused(size, rows, w, bias=None, leaves=(), ask=ask):
            with pytest.raises(ValueError, match=rf"workspace is {size - 1} bytes, want at least {size} for {rows}"):
                torch.autograd.grad(ask(w, bias, size - 1), leaves, dy)

        with torch.no_grad():
            same(ask(w, room=row), ask(w))
        refused(row, "1 row$", w, None, [w])
        same(gradients(ask(w, bias, of_rows), [w], dy)[0], gradients(ask(w, bias), [w], dy)[0])
        with pytest.raises(ValueError, match=rf"want at least {of_rows} for 16 rows, where a sum over rows"):
            gradients(ask(w, bias, of_rows - 1), [w, bias], dy)
        same(gradients(ask(fixed, room=row), [x], dy)[0], gradients(ask(fixed), [x], dy)[0])
        with pytest.raises(ValueError, match=rf"want at least {row} for 1 row$"):
            gradients(ask(fixed, room=row - 1), [x], dy)
    assert pt.linear_log_prob.__kwdefaults__["workspace"] == 256 << 20


def test_a_sum_that_is_cut_elsewhere_has_other_bits():
    """A negative control: rows 0 to 7 and the rest, by the arithmetic whose step is 16."""
    (x, w, _), index, dy = head(40, 24, 50, dtype=BF16)
    layer = pt.Linear(24, 50, False, dtype=BF16, arithmetic="sm90")
    layer.weight.data.copy_(w.detach())
    pt.accumulate_gradients(layer)
    pt.linear_log_prob(x, layer.weight, index, arithmetic="sm90", workspace=room(50, 16, BF16)).backward(dy)
    for cut in (8, 16, 32):
        sums = torch.zeros(w.shape)
        for part in (slice(0, cut), slice(cut, 40)):
            logits = pt.linear(x.detach()[part], w.detach(), arithmetic="sm90")
            d = pydet.log_prob_backward(dy[part], logits, index[part])
            pydet.gemm_db(d, x.detach()[part], out=sums, accumulate=True, arithmetic="sm90")
        (differ if cut == 8 else same)(sums, layer.weight.main_grad)


@pytest.mark.parametrize("logits_dtype", [F32, BF16, F16])
def test_types_of_logits(device, dtype, logits_dtype):
    """The logits' type is where they are rounded, and their gradient is on its way to the type of x."""
    (x, w, bias), index, dy = head(dtype=dtype, device=device)
    y = pt.linear_log_prob(x, w, index, bias, logits_dtype=logits_dtype)
    logits = OPS.skinny_gemm(x.detach(), w.detach(), bias.detach(), logits_dtype)
    same(y, pydet.log_prob(logits, index))
    dx, dw, dbias = gradients(y, (x, w, bias), dy)
    d = pydet.log_prob_backward(dy, logits, index).to(dtype)
    same(dx, pydet.gemm(d, w.detach()))
    same(dw, pydet.gemm_db(d, x.detach()))
    same(dbias, pydet.gemm_db(torch.ones_like(d[:, :1]), d)[0])


def by_steps(logits, index, temperature, softcap):
    """The formulas of NUMERICS.md in NumPy, element by element in fp32; and exp and log of the library."""
    v = logits.float()
    if softcap is not None:
        v = torch.from_numpy(v.numpy() / np.float32(softcap))
        v = pydet.activation(v, kind="tanh").numpy() * np.float32(softcap)
        v = torch.from_numpy(v)
    return v if temperature == 1 else torch.from_numpy(v.numpy() / np.float32(temperature))


def rowsum(u, v):
    """As NUMERICS.md writes it, one row: for rows of up to 2048 a lane has one element."""
    lanes = np.zeros((256, 8), np.float32)
    lanes.reshape(-1)[: len(u)] += (u * v).astype(np.float32)
    for h in (4, 2, 1):
        lanes[:, :h] += lanes[:, h : 2 * h]
    for h in (128, 64, 32, 16, 8, 4, 2, 1):
        lanes[:h, 0] += lanes[h : 2 * h, 0]
    return lanes[0, 0]


@pytest.mark.parametrize("temperature, softcap", [(1.0, None), (0.7, None), (1.0, 3.0), (1.3, 2.5)])
def test_what_rows_are_asked_has_the_bits_of_its_formula(dtype, temperature, softcap):
    (x, w, bias), index, _ = head(5, 16, 300, dtype=dtype)
    how = {"temperature": temperature, "softcap": softcap, "entropy": True, "lse": True, "mean": True, "greedy": True}
    with torch.no_grad():
        made = head_of(x, w, index, bias, **how)
        v = by_steps(pt.linear(x, w, bias), index, temperature, softcap)
    same(made.log_prob, pydet.log_prob(v, index))
    logs, probs = pydet.log_softmax(v).numpy(), pydet.softmax(v).numpy()
    most = v.amax(-1)
    for r in range(5):
        assert made.entropy[r].item() == -rowsum(probs[r], logs[r])
        assert made.mean[r].item() == np.float32(rowsum(v[r].numpy(), np.float32(1)) / np.float32(300))
        log_s = -pydet.log_softmax(v[r : r + 1])[0][v[r] == most[r]][0].item()
        assert made.lse[r].item() == np.float32(most[r].item()) + np.float32(log_s)
        assert made.greedy[r].item() == int((v[r] == most[r]).nonzero()[0])
    torch.testing.assert_close(made.lse, torch.logsumexp(v, -1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.entropy, torch.distributions.Categorical(logits=v).entropy(), rtol=1e-5, atol=1e-5)


def in_fp64(x, w, bias, index, temperature, softcap):
    v = x.double() @ w.double().T + bias.double()
    v = v if softcap is None else softcap * torch.tanh(v / softcap)
    logs = torch.log_softmax(v / temperature, -1)
    picked = logs.gather(-1, index.clamp(min=0)[:, None])[:, 0].masked_fill(index < 0, 0.0)
    return picked, -(logs.exp() * logs).sum(-1), torch.logsumexp(v / temperature, -1), (v / temperature).mean(-1)


@pytest.mark.parametrize("temperature, softcap", [(1.0, None), (0.6, None), (1.0, 2.0), (1.7, 1.5)])
def test_gradients_are_those_of_fp64(temperature, softcap):
    leaves, index, dy = head(36, 24, 50)
    weights = [dy, *(normal(36, seed=s) for s in (7, 8, 9))]
    weights[1][::3] = 0
    exact = [t.detach().clone().double().requires_grad_() for t in leaves]
    theirs = in_fp64(*exact, index, temperature, softcap)
    want = torch.autograd.grad(theirs, exact, [g.double() for g in weights])
    how = {"temperature": temperature, "softcap": softcap, "entropy": True, "lse": True, "mean": True}
    before = None
    for workspace in (1 << 28, 36_000):
        made = head_of(leaves[0], leaves[1], index, leaves[2], workspace=workspace, **how)[:4]
        got = torch.autograd.grad(made, leaves, weights)
        for mine, other in zip((*made, *got), (*theirs, *want), strict=True):
            torch.testing.assert_close(mine.double().nan_to_num(), other, rtol=2e-5, atol=2e-5)
        if before is not None:
            for mine, whole in zip(got, before, strict=True):
                same(mine, whole)
        before = got


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
def test_cross_entropy_is_pytorchs(reduction, smoothing, z):
    leaves, target, dy = head(36, 24, 50)
    exact = [t.detach().clone().double().requires_grad_() for t in leaves]
    logits = torch.nn.functional.linear(*exact)
    each = torch.nn.functional.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    each = each + z * torch.logsumexp(logits, -1).square().masked_fill(target < 0, 0)
    theirs = {"none": each, "sum": each.sum(), "mean": each.sum() / (target >= 0).sum()}[reduction]
    if z == 0:
        alone = torch.nn.functional.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(alone, theirs)
    how = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z}
    ours = pt.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2], **how)
    grad = torch.ones(()) if ours.dim() == 0 else dy
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6)
    want = torch.autograd.grad(theirs, exact, grad.double())
    for mine, other in zip(torch.autograd.grad(ours, leaves, grad), want, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3), (1.0, 0.3)])
def test_cross_entropy_has_the_bits_of_the_librarys(dtype, reduction, smoothing, z):
    """Of pydet.linear_cross_entropy, which is one call of the C function, and of its gradients."""
    some = [
        {},
        {"temperature": 0.7, "ignore_index": 14},
        {"softcap": 3.0, "k_chunk": 16, "logits_dtype": F32},
        {"temperature": 1.3, "softcap": 2.5, "ignore_index": 1 << 40, "logits_dtype": BF16 if dtype == BF16 else F32},
    ]
    for number, (rows, options) in enumerate(zip((50, 1, 33, 300), some, strict=True)):
        (x, w, bias), target, dy = head(rows, dtype=dtype, index=(torch.int64, torch.int32)[number % 2 * (number < 3)])
        target[-1], x.data[0, 0] = 50 if rows == 33 else 7, float("nan") if rows == 300 else 0.5  # no column; no number
        how = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z, "arithmetic": "ieee", **options}
        loss = pt.linear_cross_entropy(x, w, target, bias, **how)
        dloss = dy if reduction == "none" else torch.tensor(0.37)
        want = torch.autograd.grad(loss, (x, w, bias), dloss)
        how["logits_dtype"] = None if how.get("logits_dtype") is None else str(how["logits_dtype"])[6:]
        given = [t.detach() for t in (x, w)], target, {"bias": bias.detach(), **how}
        numbers = torch.isfinite(loss)  # a NaN of the library's is 0x7FFFFFFF, one of PyTorch's steps has any sign
        mine = pydet.linear_cross_entropy(*given[0], given[1], **given[2])
        same(mine.isnan(), loss.isnan()), same(mine[numbers], loss[numbers])
        made = pydet.linear_cross_entropy_backward(
            dloss, *given[0], given[1], of_loss=True, dw_dtype=str(dtype)[6:], **given[2]
        )
        same(made.loss, mine)
        for got, one in zip(made[:3], want, strict=True):
            same(got, one)
        if rows == 50:
            how = {"of_loss": True, **given[2]}
            whole, cut = (
                pydet.linear_cross_entropy_backward(dloss, *given[0], given[1], workspace=size, **how)
                for size in (1 << 28, 6 << 10)
            )
            for got, one in zip(cut, whole, strict=True):
                same(got, one)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
def test_gradients_made_with_the_loss_have_the_bits_of_backward(device, dtype, reduction, smoothing, z):
    how = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z}
    for rows, softcap, scale in ((1, None, 1.0), (33, 2.5, 0.3), (50, None, 1 / 3)):
        (x, w, bias), target, _ = head(rows, dtype=dtype, device=device)
        for b in (bias, None):
            leaves = [t for t in (x, w, b) if t is not None]
            loss = pt.linear_cross_entropy(x, w, target, b, softcap=softcap, temperature=0.7, **how)
            want = torch.autograd.grad(loss, leaves, torch.tensor(scale, device=device))
            for gradient in (scale, torch.tensor(scale, device=device)):
                for workspace in (16 * 50 * 80, 1 << 28):
                    more = {"softcap": softcap, "temperature": 0.7, "workspace": workspace, "gradient": gradient}
                    made = pt.linear_cross_entropy_and_gradients(x, w, target, b, **more, **how)
                    same(made.loss, loss.detach())
                    for got, wanted in zip([g for g in made[1:] if g is not None], want, strict=True):
                        same(got, wanted)


def test_gradients_made_with_the_loss_continue_main_grad(dtype):
    (x, _, _), target, _ = head(64, dtype=dtype)
    models = [torch.nn.Sequential(pt.Linear(24, 50, dtype=dtype)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        pt.accumulate_gradients(model)
    for part in (slice(0, 16), slice(16, 64)):
        (w, bias), (same_w, same_bias) = ([m[0].weight, m[0].bias] for m in models)
        loss = pt.linear_cross_entropy(x[part], w, target[part], bias)
        (dx,) = torch.autograd.grad(loss / 3, x)
        made = pt.linear_cross_entropy_and_gradients(
            x[part], same_w, target[part], same_bias, gradient=torch.ones(()) / 3
        )
        assert made.dw is None is made.dbias
        same(made.loss, loss.detach()), same(made.dx, dx[part])
    same(models[0][0].weight.main_grad, models[1][0].weight.main_grad)
    same(models[0][0].bias.main_grad, models[1][0].bias.main_grad)


def test_a_loss_is_the_log_probability_and_its_sum_is_in_order(device, dtype):
    for rows in (1, 255, 256, 257, 600):
        (x, w, _), target, _ = head(rows, 8, 20, dtype=dtype, device=device)
        target[0] = 3
        each = pt.linear_cross_entropy(x, w, target, reduction="none")
        kept = target != -100
        same(each[kept], -pt.linear_log_prob(x, w, target)[kept])
        assert not each[~kept].any()
        total, values = np.float32(0), each.detach().cpu().numpy()
        for start in range(0, rows, 256):
            part = np.float32(0)
            for value in values[start : start + 256]:
                part += value  # fmaf(1, value, part)
            total += part
        loss = pt.linear_cross_entropy(x, w, target, reduction="sum")
        assert loss.item() == total
        mean = pt.linear_cross_entropy(x, w, target)
        assert mean.item() == total / np.float32(int(kept.sum()))
        count = torch.tensor(1.0, device=device) / int(kept.sum())
        (dx,) = torch.autograd.grad(mean, x)
        dy = (-count).expand(rows) * kept
        same(dx, gradients(pt.linear_log_prob(x, w, target), [x], dy)[0])
    with torch.autocast("cpu", dtype=BF16):
        assert sum_of_rows(torch.full((3,), 1 + 2**-20)).item() == 3 + 3 * 2**-20  # no type of autocast


def test_targets_that_are_ignored_or_none_of_the_columns(device):
    (x, w, bias), target, _ = head(20, device=device)
    for ignored in (-100, 3, 1 << 30):
        some = torch.where(target == -100, ignored, target)
        loss = pt.linear_cross_entropy(x, w, some, bias, ignore_index=ignored)
        left = some != ignored
        want = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w, bias)[left], some[left])
        torch.testing.assert_close(loss, want, rtol=2e-6, atol=2e-6)
        (dx,) = torch.autograd.grad(loss, x)
        assert not dx[~left].any() and dx[left].any(-1).all()
    nothing = torch.full_like(target, -100)
    mean, total = (pt.linear_cross_entropy(x, w, nothing, reduction=kind) for kind in ("mean", "sum"))
    assert mean.isnan() and total.item() == 0  # as PyTorch's
    assert not any(g.any() for g in gradients(total, (x, w), None))
    for beyond in (-1, 50, 1 << 40):
        target[4] = beyond
        each = pt.linear_cross_entropy(x, w, target, bias, reduction="none")
        assert each.isnan().nonzero().tolist() == [[4]]
        assert pt.linear_cross_entropy(x, w, target, bias).isnan()
        assert not torch.autograd.grad(each, x, torch.ones_like(each))[0][4].any()
    poisoned = x.detach().clone()
    poisoned[1] = float("nan")  # ignored
    poisoned.requires_grad_()
    how = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "sum"}
    target[4] = 0
    dx, dw = gradients(pt.linear_cross_entropy(poisoned, w, target, **how), (poisoned, w), None)
    assert dx.isfinite().all() and dw.isnan().all(), "0 times NaN, as it is in the sum over rows"


def test_logits_that_are_no_numbers(dtype):
    (x, w, _), index, dy = head(6, 4, 40, dtype=dtype)
    for value in (float("nan"), float("inf"), -float("inf")):
        bias = torch.zeros(40, dtype=dtype)
        bias[5] = value
        made = head_of(x, w, index, bias, entropy=True, lse=True, greedy=True)
        same(made.log_prob, pydet.log_prob(pt.linear(x, w, bias).detach(), index))
        if value == -float("inf"):  # as if the column were not there, but for its place
            assert made.entropy.isfinite().all() and made.lse.isfinite().all() and not (made.greedy == 5).any()
            weights = [t.masked_fill(index < 0, 0.0) for t in (dy, dy, dy)]
            for got in torch.autograd.grad(made[:3], (x, w), weights):
                assert got.isfinite().all()
        else:
            assert made.entropy.isnan().all() and made.lse.isnan().all() and bool((made.greedy == 5).all())
    nothing = torch.full((40,), -float("inf"), dtype=dtype)
    assert pt.linear_log_prob(x, w, index, nothing).isnan().all()


def test_empty_and_shapes(device, dtype):
    (x, w, bias), index, dy = head(36, dtype=dtype, device=device)
    whole = pt.linear_log_prob(x, w, index, bias)
    same(pt.linear_log_prob(x.view(4, 9, 24), w, index.view(4, 9), bias), whole.view(4, 9))
    same(pt.linear_log_prob(x[0], w, index[0], bias), whole[0])
    same(pt.linear_log_prob(x, w, index.int(), bias), whole)
    strided = x.detach().t().contiguous().t().requires_grad_()
    wide = torch.cat([w.detach()] * 2, -1)[:, :24].requires_grad_()
    y = pt.linear_log_prob(strided, wide, index, bias)
    same(y, whole)
    for got, want in zip(gradients(y, (strided, wide), dy), gradients(whole, (x, w), dy), strict=True):
        same(got, want)
    across = w.detach().t().contiguous().t().requires_grad_()  # and so is its gradient's sum
    got = gradients(pt.linear_log_prob(x, across, index, bias), (x, across), dy)
    for one, want in zip(got, gradients(whole, (x, w), dy), strict=True):
        same(one, want)
    made = pt.linear_cross_entropy_and_gradients(x, across, index.clamp(0), bias)
    same(made.dw, pt.linear_cross_entropy_and_gradients(x, w, index.clamp(0), bias).dw)
    (x0, *_), none, _ = head(0, dtype=dtype, device=device)
    made = pt.linear_log_prob(x0, w, none)
    assert made.shape == (0,)
    dx, dw = gradients(made, (x0, w), torch.zeros(0, device=device))
    assert dx.shape == (0, 24) and not dw.any()
    assert pt.linear_cross_entropy(x0, w, none, reduction="sum").item() == 0
    assert pt.linear_cross_entropy(x0, w, none).isnan()
    no_depth = pt.linear_log_prob(x[:, :0], w[:, :0], index)
    same(no_depth, pydet.log_prob(torch.zeros(36, 50, dtype=dtype, device=device), index))


def test_threads_change_nothing():
    (x, w, bias), index, dy = head(70, 64, 3000, dtype=BF16)
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            y, h = pt.linear_log_prob(x, w, index, bias, temperature=0.9, softcap=5.0, return_entropy=True)
            made.append((y, h, *torch.autograd.grad((y, h), (x, w, bias), (dy, dy))))
    finally:
        torch.set_num_threads(before)
    for other in made[1:]:
        for got, want in zip(other, made[0], strict=True):
            same(got, want)


def test_a_row_alone_has_its_bits_in_the_batch():
    (x, w, _), index, dy = head(33, 64, 2500, dtype=BF16)
    how = {"temperature": 0.8, "softcap": 4.0, "return_entropy": True}
    y, h = pt.linear_log_prob(x, w, index, **how)
    (dx,) = torch.autograd.grad((y, h), x, (dy, dy))
    for r in (0, 16, 32):
        alone = x.detach()[r : r + 1].requires_grad_()
        y1, h1 = pt.linear_log_prob(alone, w, index[r : r + 1], **how)
        same(y1[0], y[r]), same(h1[0], h[r])
        same(torch.autograd.grad((y1, h1), alone, (dy[r : r + 1],) * 2)[0][0], dx[r])


def test_micro_batches_have_the_sums_of_one_batch(dtype):
    """In main_grad of accumulate_gradients(), whatever the chunks; cut at multiples of 16 rows."""
    (x, _, _), index, dy = head(64, dtype=dtype)
    layer = pt.Linear(24, 50, dtype=dtype)
    sums = []
    for cuts in ([0, 64], [0, 16, 64], [0, 16, 32, 48, 64]):
        model = torch.nn.Sequential(pt.Linear(24, 50, dtype=dtype))
        model.load_state_dict({f"0.{name}": value for name, value in layer.state_dict().items()})
        pt.accumulate_gradients(model)
        for start, end in itertools.pairwise(cuts):
            part = slice(start, end)
            w, bias = model[0].weight, model[0].bias
            y = pt.linear_log_prob(x[part], w, index[part], bias, workspace=room(50, 16, dtype))
            y.backward(dy[part])
        assert model[0].weight.grad is None
        sums.append((model[0].weight.main_grad, model[0].bias.main_grad))
    y = pt.linear_log_prob(x, layer.weight, index, layer.bias)
    for weight, bias in sums:
        same(weight, sums[0][0]), same(bias, sums[0][1])
        for got, want in zip((weight, bias), gradients(y, (layer.weight, layer.bias), dy), strict=True):
            same(got.to(dtype), want)


def test_autocast_and_compile():
    (x, w, bias), index, dy = head(20)
    with torch.autocast("cpu", dtype=BF16):
        y = pt.linear_log_prob(x, w, index, bias)
    same(y, pt.linear_log_prob(x.to(BF16), w.to(BF16), index, bias))

    def loss(x, w):
        return pt.linear_cross_entropy(x, w, index, bias, z_loss=0.1) + pt.linear_log_prob(x, w, index.clamp(0)).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(x, w)
    same(compiled, loss(x, w))
    for got, want in zip(gradients(compiled, (x, w), None), gradients(loss(x, w), (x, w), None), strict=True):
        same(got, want)


def test_opcheck():
    (x, w, bias), index, dy = head(6, 8, 20)
    how = (None, 0.9, 3.0, True, True, False, True, "auto", None, 1 << 20)
    torch.library.opcheck(OPS.linear_log_prob.default, (x, w, index.clamp(0), bias, *how))
    plain = [t.detach() for t in (x, w)]
    back = (None, 1.0, None, "ieee", None, 1 << 20, True, True, True)
    torch.library.opcheck(
        OPS.linear_log_prob_backward.default, (dy, dy, None, None, *plain, index, bias.detach(), *back)
    )


def test_refusals():
    (x, w, bias), index, _ = head(6, 8, 20)
    ask = lambda **how: lambda: pt.linear_log_prob(x, w, index, **how)
    loss = lambda **how: lambda: pt.linear_cross_entropy(x, w, index, **how)
    refuses(r"linear_log_prob: w is 8x20, want Nx8", lambda: pt.linear_log_prob(x, w.t(), index))
    refuses(r"linear_log_prob: index is 5, want 6", lambda: pt.linear_log_prob(x, w, index[:5]))
    refuses(r"linear_log_prob: index is float32, want int32 or int64", lambda: pt.linear_log_prob(x, w, index.float()))
    refuses(r"linear_log_prob: .*w is bfloat16", lambda: pt.linear_log_prob(x, w.to(BF16), index))
    refuses(r"linear_log_prob: bias is 6x20, want 20", lambda: pt.linear_log_prob(x, w, index, torch.zeros(6, 20)))
    refuses(r"linear_log_prob: logits_dtype is float64, want float32, bfloat16 or", ask(logits_dtype=torch.float64))
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e60):
        refuses(r"linear_log_prob: temperature is .*, want a positive number that float32", ask(temperature=wrong))
        refuses(r"linear_log_prob: softcap is .*, want a positive number that float32 holds", ask(softcap=wrong))
    refuses(r"linear_log_prob: workspace is 0, want a positive number of bytes", ask(workspace=0))
    refuses(r"linear_log_prob: arithmetic is 'sm9'", ask(arithmetic="sm9"))
    refuses(
        r"linear_log_prob: vmap is not defined", lambda: torch.vmap(lambda x: pt.linear_log_prob(x, w, index))(x[None])
    )
    refuses(r"linear_cross_entropy: reduction is 'max', want 'mean', 'sum' or 'none'", loss(reduction="max"))
    for wrong in (-0.1, 1.1, float("nan")):
        refuses(r"linear_cross_entropy: label_smoothing is .*, want a number from 0 to 1", loss(label_smoothing=wrong))
    for wrong in (-0.1, float("inf"), float("nan")):
        refuses(r"linear_cross_entropy: z_loss is .*, want a number from 0 up", loss(z_loss=wrong))
