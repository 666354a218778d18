"""pydet.jax.linear_log_prob: jit, grad and vmap have the bits of pydet's own calls, in any workspace."""

import numpy as np
import pytest

import pydet
from test_jax import arithmetic, device, dtype, jax, jnp, normal, pj, same, vjp  # noqa: F401


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
    with pytest.raises(Exception, match=r"linear_log_prob: workspace is 100 bytes, want at least \d+ for 1 row"):
        jax.block_until_ready(pj.linear_log_prob(x, w, index, workspace=100))
