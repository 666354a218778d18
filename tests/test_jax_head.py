"""pydet.jax.linear_log_prob and linear_cross_entropy: jit, grad and vmap have the bits of pydet's own calls, and of
pydet.torch, in any workspace."""

import os

import numpy as np
import pytest

import pydet
from test_jax import arithmetic, device, dtype, jax, jnp, normal, pj, same, vjp  # noqa: F401

exact = pj.exact


def problem(rows, n, k, dtype):
    x, w, bias = normal(*rows, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1), normal(n, dtype=dtype, seed=2)
    index = (np.arange(int(np.prod(rows)), dtype=np.int32) * 7 % (n + 1) - 1).reshape(rows)
    return x, w, bias, index, normal(*rows, seed=3)


@pytest.mark.parametrize("rows, logits, biased", [((3, 11), None, True), ((48,), "float32", False)])
def test_linear_log_prob(device, dtype, arithmetic, rows, logits, biased):
    x, w, bias, index, dlog_prob = problem(rows, 40, 24, dtype)
    bias = bias if biased else None
    how = {"logits_dtype": logits, "arithmetic": arithmetic}
    want = pydet.linear_log_prob(x, w, index, bias=bias, **how)
    made = pydet.linear_log_prob_backward(dlog_prob, x, w, index, bias=bias, dw_dtype=dtype.name, **how)
    for workspace in (1 << 28, 1024 + 17 * 260):  # all rows, and chunks of 16
        head = lambda x, w, b, room=workspace: pj.linear_log_prob(x, w, index, b, workspace=room, **how)
        y, (dx, dw, dbias) = vjp(jax.jit(head), (x, w, bias), jnp.asarray(dlog_prob))
        same(y, want), same(dx, made.dx), same(dw, made.dw)
        assert (dbias is None) == (bias is None) and (bias is None or same(dbias, made.dbias) is None)


# ---- Beside pydet.torch ----------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return (
        pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")
    )


class Beside:
    """A function of pydet.torch on NumPy arrays, where the test runs, and its gradients."""

    def __init__(self, torch, device):
        import pydet.torch

        self.torch, self.device, self.functions = torch, device, pydet.torch

    def tensor(self, x):
        if x is None:
            return None
        x = np.array(x, order="C")
        bits = self.torch.from_numpy(x.view(f"i{x.itemsize}"))
        return bits.view(getattr(self.torch, x.dtype.name)).to(self.device)

    def array(self, x):
        bits = x.detach().contiguous().view(getattr(self.torch, f"int{8 * x.itemsize}")).cpu().numpy()
        return bits.view(jnp.dtype(str(x.dtype).removeprefix("torch.")))

    def __call__(self, name, leaves, index, cotangents, logits_dtype=None, **options):
        x, w, bias = (self.tensor(leaf) for leaf in leaves)
        wanted = [leaf.requires_grad_() for leaf in (x, w, bias) if leaf is not None]
        wide = None if logits_dtype is None else getattr(self.torch, logits_dtype)
        made = getattr(self.functions, name)(x, w, self.tensor(index), bias, logits_dtype=wide, **options)
        made = made if isinstance(made, tuple) else (made,)
        found = self.torch.autograd.grad(made, wanted, [self.tensor(g) for g in cotangents])
        return [self.array(y) for y in (*made, *found)]


def beside(torch, device, name, leaves, index, cotangents, rooms, **options):
    """Both frameworks have the same bits, in workspaces of all rows and of these."""
    want = Beside(torch, device)(name, leaves, index, cotangents, **options)
    for room in (1 << 28, *rooms):
        call = lambda *leaves, room=room: getattr(pj, name)(*leaves[:2], index, *leaves[2:], workspace=room, **options)
        given = [leaf for leaf in leaves if leaf is not None]
        made, pull = jax.vjp(jax.jit(call), *given)
        made = made if isinstance(made, tuple) else (made,)
        got = [*made, *pull(tuple(cotangents) if len(made) > 1 else cotangents[0])]
        for ours, theirs in zip(got, want, strict=True):
            ours = np.asarray(ours)
            nan = np.isnan(ours.astype(np.float32)) & np.isnan(theirs.astype(np.float32))  # of any sign and payload
            same(np.where(nan, 0, ours).astype(ours.dtype), np.where(nan, 0, theirs).astype(theirs.dtype))
    return want


def cut(rows, dtype, options):
    """A workspace in which backward takes so many of 50 or 70 rows of 70 columns, or twice as many of 16 bits."""
    both = dtype.itemsize == 2 and "logits_dtype" in options  # logits in float32, their gradient beside them
    return 1024 + (rows + 1) * (438 if both else 292)


def sharp(rows, n, k, dtype, scale, temperature=1.0):
    """A problem of which a column has probabilities that are subnormal, for a larger scale others too; or 0."""
    x, w, bias, index, dy = problem((rows,), n, k, dtype)
    index = np.maximum(index, 0).astype(np.int64)
    index[1::9] = -100
    index[index == 5] = 6
    bias[5] = -92 * temperature
    return [(x * scale).astype(dtype), w, bias], index, dy


ASKED = [
    (49, 0.5, {"temperature": 0.7}),
    (50, 4.0, {"softcap": 3.0}),
    (50, 4.0, {"temperature": 0.1, "logits_dtype": "float32", "return_entropy": True}),
    (70, 1.0, {"temperature": 1.7, "softcap": 30.0, "k_chunk": 32, "return_entropy": True}),
]


@pytest.mark.parametrize("rows, scale, options", ASKED, ids=str)
def test_log_probabilities_and_entropies_beside_torch(torch, device, dtype, options, rows, scale):
    leaves, index, dy = sharp(rows, 70, 24, dtype, scale, options.get("temperature", 1.0))
    if rows == 49:
        leaves[2] = None
    dh = normal(rows, seed=9)
    dh[::3] = 0
    given = [dy, dh] if options.get("return_entropy") else [dy]
    beside(
        torch,
        device,
        "linear_log_prob",
        leaves,
        index,
        given,
        [cut(options.get("k_chunk", 16), dtype, options)],
        **options,
    )


LOSSES = [
    {"reduction": "sum"},
    {"reduction": "none", "temperature": 0.6},
    {"z_loss": 1e-2, "logits_dtype": "float32"},
    {"label_smoothing": 0.1, "reduction": "none"},
    {"label_smoothing": 1.0, "z_loss": 0.3, "reduction": "sum", "softcap": 3.0},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "temperature": 0.7, "softcap": 30.0},
]


@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_losses_beside_torch(torch, device, options):
    """By turns of either type: those of the test below, to the bit, are of both."""
    dtype = np.dtype((np.float32, jnp.bfloat16)[LOSSES.index(options) % 2])
    leaves, index, dy = sharp(50, 70, 24, dtype, 2.0)
    given = [dy if options.get("reduction") == "none" else np.float32(0.3)]
    made = beside(torch, device, "linear_cross_entropy", leaves, index, given, [cut(16, dtype, options)], **options)
    if "label_smoothing" in options:
        exact_loss = in_fp64(leaves, index, options)
        np.testing.assert_allclose(made[0], exact_loss, rtol=2e-5 if dtype == np.float32 else 2e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(jnp.bfloat16)], ids=str)
@pytest.mark.parametrize("options", [{}, *LOSSES], ids=str)
def test_losses_have_the_bits_of_the_librarys(dtype, options):
    """Of pydet.linear_cross_entropy, which is one call of the C function, and of its gradients."""
    (x, w, bias), index, dy = sharp(50, 70, 24, dtype, 2.0)
    given = dy if options.get("reduction") == "none" else np.float32(0.3).reshape(())
    options = {"ignore_index": 14, "arithmetic": "ieee", **options}
    index[[3, 4]] = 14, -100  # a column that is ignored, and what is none
    loss, pull = jax.vjp(lambda *leaves: pj.linear_cross_entropy(*leaves[:2], index, leaves[2], **options), x, w, bias)
    mine = pydet.linear_cross_entropy(x, w, index, bias=bias, **options)
    same(np.where(np.isnan(loss), np.float32(np.nan), loss), np.where(np.isnan(mine), np.float32(np.nan), mine))
    how = {"bias": bias, "dw_dtype": str(dtype), **options}
    made = pydet.linear_cross_entropy_backward(given, x, w, index, **how)
    for got, one in zip(pull(jnp.asarray(given)), made[:3], strict=True):
        same(got, one)


def in_fp64(leaves, index, options):
    x, w, bias = (leaf.astype(np.float64) for leaf in leaves)
    cap, epsilon = options.get("softcap"), options["label_smoothing"]
    v = x @ w.T + bias
    v = (v if cap is None else cap * np.tanh(v / cap)) / options.get("temperature", 1.0)
    lse = np.log(np.exp(v - v.max(-1, keepdims=True)).sum(-1)) + v.max(-1)
    each = (1 - epsilon) * (lse - v[np.arange(len(v)), np.maximum(index, 0)]) + epsilon * (lse - v.mean(-1))
    each = np.where(index == -100, 0, each + options.get("z_loss", 0.0) * lse**2)
    reduction = options.get("reduction", "mean")
    return each if reduction == "none" else each.sum() / (1 if reduction == "sum" else (index != -100).sum())


def test_rows_that_are_no_numbers_beside_torch(torch, device):
    (x, w, bias), index, dy = sharp(20, 70, 24, np.dtype(np.float32), 1.0)
    x[4] = np.nan
    x[1] = np.nan  # which is ignored
    options = {"label_smoothing": 0.1, "z_loss": 0.1}
    beside(torch, device, "linear_cross_entropy", (x, w, bias), index, [dy], [], reduction="none", **options)
    assert np.isfinite(np.asarray(pj.linear_cross_entropy(x, w, index, bias, reduction="none", **options))[1])
    x[[1, 4]] = 1
    bias[5] = -np.inf  # as if the column were not there
    options = {"temperature": 0.5, "return_entropy": True}
    made = beside(torch, device, "linear_log_prob", (x, w, bias), np.maximum(index, 6), [dy, dy], [], **options)
    assert all(np.isfinite(y).all() for y in made[:3])
    bias[5] = np.inf
    beside(torch, device, "linear_log_prob", (x, w, bias), index, [dy, dy], [], **options)


def test_with_xlas_own_elements_there_are_other_bits(torch, device, monkeypatch):
    """A negative control: gradients of losses that are subnormal numbers, which XLA's CPU takes for 0."""
    if device != "cpu":
        pytest.skip("of XLA's CPU")
    leaves, index, _ = sharp(50, 70, 24, np.dtype(np.float32), 1.0)
    given, options = [np.float32(1e-38)], {"label_smoothing": 0.1, "z_loss": 1e-3}
    beside(torch, device, "linear_cross_entropy", leaves, index, given, [], **options)
    for name, plain in (("multiply", lambda x, y: x * y), ("divide", lambda x, y: x / y)):
        with monkeypatch.context() as patch:
            patch.setattr(exact, name, plain)
            jax.clear_caches()  # which hold programs with the other elements
            with pytest.raises(AssertionError, match="elements differ"):
                beside(torch, device, "linear_cross_entropy", leaves, index, given, [], **options)
    jax.clear_caches()


# ---- Alone -----------------------------------------------------------------------------------------------------------


def test_targets_that_are_ignored_or_none_of_the_columns(device):
    x, w, bias, index, _ = problem((20,), 50, 24, np.dtype(np.float32))
    index = np.maximum(index, 0).astype(np.int64)
    for ignored in (-100, 3, 1 << 30, 1 << 40):
        some = index.copy()
        some[::4] = ignored
        left = some != ignored
        loss = lambda x, some=some, ignored=ignored: pj.linear_cross_entropy(x, w, some, bias, ignore_index=ignored)
        value, dx = jax.value_and_grad(loss)(x)
        alone = pj.linear_cross_entropy(x, w, some, bias, ignore_index=ignored, reduction="none")
        same(np.asarray(alone)[left], -np.asarray(pj.linear_log_prob(x, w, some, bias))[left])
        assert not np.asarray(alone)[~left].any() and not np.asarray(dx)[~left].any()
        assert np.asarray(dx)[left].any(-1).all()
        np.testing.assert_allclose(value, np.asarray(alone)[left].mean(), rtol=1e-6)
        if ignored < 2**31:
            as_int32 = jnp.asarray(some.astype(np.int32))
            same(jax.jit(lambda t, k=ignored: pj.linear_cross_entropy(x, w, t, bias, ignore_index=k))(as_int32), value)
    same(pj.linear_cross_entropy(x, w, jnp.asarray(index, jnp.int32), bias, ignore_index=1 << 40),
         pj.linear_cross_entropy(x, w, index, bias))  # fmt: skip
    nothing = np.full_like(index, -100)
    assert np.isnan(pj.linear_cross_entropy(x, w, nothing))
    assert pj.linear_cross_entropy(x, w, nothing, reduction="sum") == 0
    index[4] = 50
    each = pj.linear_cross_entropy(x, w, index, bias, reduction="none")
    assert np.isnan(each).nonzero()[0].tolist() == [4] and np.isnan(pj.linear_cross_entropy(x, w, index, bias))


def test_vmap_of_what_is_asked(device):
    x, w, bias, index, _ = problem((3, 18), 30, 8, np.dtype(np.float32))
    loss = lambda x, i: pj.linear_cross_entropy(x, w, i, bias, z_loss=0.1, label_smoothing=0.1, ignore_index=-1)
    made = jax.vmap(jax.value_and_grad(loss))(x, index)
    each = [jax.value_and_grad(loss)(x[i], index[i]) for i in range(3)]
    for got, *want in zip(made, *each, strict=True):
        same(got, np.stack(want))
    entropy = lambda w: pj.linear_log_prob(x, w, index, bias, temperature=0.5, return_entropy=True)[1].sum(-1)
    many = np.stack([w, w[::-1]])
    same(jax.vmap(entropy)(many), np.stack([entropy(one) for one in many]))


def test_a_row_alone_and_leading_dimensions(device):
    x, w, bias, index, dy = problem((4, 9), 300, 24, np.dtype(jnp.bfloat16))
    how = {"temperature": 0.8, "softcap": 4.0, "return_entropy": True}
    made, pull = jax.vjp(lambda x: pj.linear_log_prob(x, w, index, bias, **how), x)
    (dx,) = pull((dy, dy))
    alone, pull = jax.vjp(lambda x: pj.linear_log_prob(x, w, np.array(index[1, 3]), bias, **how), x[1, 3])
    for got, want in zip((*alone, *pull((dy[1, 3], dy[1, 3]))), (*made, dx), strict=True):
        same(got, np.asarray(want)[1, 3])
    empty = jax.grad(lambda w: pj.linear_cross_entropy(x[0, :0], w, index[0, :0], z_loss=0.1, reduction="sum"))(w)
    assert empty.shape == w.shape and not np.asarray(empty).any()
    assert pj.linear_log_prob(x[0, :0], w, index[0, :0], **how)[1].shape == (0,)


def test_within_other_programs(device):
    """Under jit, remat and a scan a step has the bits that it has by itself."""
    x, w, bias, index, _ = problem((3, 20), 50, 24, np.dtype(np.float32))
    loss = lambda w, x, i: pj.linear_cross_entropy(x, w, i, bias, ignore_index=-1, label_smoothing=0.1)
    step = jax.value_and_grad(loss)
    each = [step(w, x[i], index[i]) for i in range(3)]
    scanned = jax.lax.scan(lambda _, part: (None, step(w, *part)), None, (x, index))[1]
    saved = jax.jit(jax.vmap(jax.value_and_grad(jax.checkpoint(loss)), in_axes=(None, 0, 0)))(w, x, index)
    for made in (scanned, saved, [np.stack([e[i] for e in each]) for i in range(2)]):
        for got, *want in zip(made, *each, strict=True):
            same(got, np.stack(want))
    with pytest.raises(pydet.Error, match="no derivative"):
        jax.grad(lambda w: step(w, x[0], index[0])[1].sum())(w)


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"softcap": 3.0}, {"return_entropy": True},
                                     {"z_loss": 0.1}, {"label_smoothing": 0.1, "softcap": 3.0}], ids=str)  # fmt: skip
def test_no_more_than_the_workspace_is_taken(device, dtype, options):
    """What XLA allots beside arguments and results, forward and backward, and sums in float32."""
    rows, n, k, room = 200, 3000, 8, 2_000_000  # all logits: 2.4 MB in float32
    x, w, index = jnp.zeros((rows, k), dtype), jnp.zeros((n, k), dtype), jnp.zeros(rows, jnp.int32)
    name = "linear_cross_entropy" if options.keys() & {"z_loss", "label_smoothing"} else "linear_log_prob"

    def call(x, w):
        return sum(jnp.sum(y) for y in jax.tree.leaves(getattr(pj, name)(x, w, index, workspace=room, **options)))

    for function, more in ((call, 0), (jax.grad(call, (0, 1)), 4 * n * k)):
        taken = jax.jit(function).lower(x, w).compile().memory_analysis().temp_size_in_bytes
        assert 0.2 * room < taken - more <= room + 64 * rows  # a few numbers of each row


def test_vmap_and_no_rows(device):
    x, w, bias, index, dlog_prob = problem((3, 17), 30, 8, np.dtype(np.float32))
    each = [pydet.linear_log_prob(x[i], w, index[i], bias=bias) for i in range(3)]
    same(jax.vmap(lambda x, i: pj.linear_log_prob(x, w, i, bias))(x, index), np.stack(each))
    loss = lambda x, i, d: jnp.sum(pj.linear_log_prob(x, w, i, bias) * d)
    dx = jax.vmap(jax.grad(loss))(x, np.maximum(index, 0), dlog_prob)
    want = [
        pydet.linear_log_prob_backward(dlog_prob[i], x[i], w, np.maximum(index[i], 0), bias=bias).dx for i in range(3)
    ]
    same(dx, np.stack(want))
    assert pj.linear_log_prob(x[0, :0], w, index[0, :0]).shape == (0,)


def test_refusals():
    x, w, bias, index, _ = problem((5,), 20, 8, np.dtype(np.float32))

    def refuses(pattern, *given, **options):
        with pytest.raises(pydet.Error, match=pattern):
            pj.linear_log_prob(*given, **options)

    refuses(r"linear_log_prob: w is 8x20, want Nx8", x, w.T, index)
    refuses(r"linear_log_prob: w is 0x8, want a row or more", x, w[:0], index)
    refuses(r"linear_log_prob: index is 4, want 5", x, w, index[:4])
    refuses(r"linear_log_prob: bias is .*want 20", x, w, index, np.zeros((5, 20), np.float32))
    refuses(r"linear_log_prob: logits_dtype is float16, want float32", x, w, index, logits_dtype="float16")
    refuses(r"linear_log_prob: workspace is 0, want a positive number of bytes", x, w, index, workspace=0)
    refuses(r"linear_log_prob: k_chunk is 8", x, w, index, k_chunk=8)
    refuses(r"linear_log_prob: return_entropy is 1, want True or False", x, w, index, return_entropy=1)
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e40, "x"):
        for name in ("temperature", "softcap"):
            refuses(rf"{name} is .*, want a number from 2\^-100 to 2\^100", x, w, index, **{name: wrong})
    with pytest.raises(Exception, match=r"linear_log_prob: workspace is 100 bytes, want at least \d+ for 1 row"):
        jax.block_until_ready(pj.linear_log_prob(x, w, index, workspace=100))


def test_refusals_of_losses():
    x, w, bias, target, _ = problem((5,), 20, 8, np.dtype(np.float32))

    def refuses(pattern, *given, **options):
        with pytest.raises(pydet.Error, match=f"linear_cross_entropy: {pattern}"):
            pj.linear_cross_entropy(*given, **options)

    refuses(r"w is 8x20, want Nx8", x, w.T, target)
    refuses(r"target is 4, want 5", x, w, target[:4])
    refuses(r"target is float32, want an array of int32 or int64", x, w, target.astype(np.float32))
    refuses(r"bias is .*want 20", x, w, target, np.zeros((5, 20), np.float32))
    refuses(r"reduction is 'max', want 'mean', 'sum' or 'none'", x, w, target, reduction="max")
    refuses(r"ignore_index is 0.5, want an integer", x, w, target, ignore_index=0.5)
    for wrong in (-0.1, 1.1, float("nan")):
        refuses(r"label_smoothing is .*, want a number from 0 to 1", x, w, target, label_smoothing=wrong)
    for wrong in (-0.1, float("inf"), float("nan")):
        refuses(r"z_loss is .*, want a number from 0 up", x, w, target, z_loss=wrong)
