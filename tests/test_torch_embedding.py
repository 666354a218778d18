"""embedding in PyTorch: the bits of pydet's functions, with a gradient, compiled, under vmap and without memory."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import pydet  # noqa: E402
import pydet.torch  # noqa: E402


def operands(dtype=torch.float32, shape=(4, 50), rows=30, n=24):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn((rows, n), generator=generator).to(dtype)
    ids = torch.randint(0, rows // 2, shape, generator=generator)
    return w, ids, torch.randn((*shape, n), generator=generator).to(dtype)


def in_order(dout, ids, rows, padding_idx=None):
    """Token after token."""
    sums = torch.zeros((rows, dout.shape[-1]))
    for token, row in zip(ids.reshape(-1), dout.reshape(-1, dout.shape[-1]).float(), strict=True):
        if token != padding_idx:
            sums[token] = sums[token] + row
    return sums.to(dout.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_has_the_order_of_tokens(dtype):
    w, ids, dout = operands(dtype)
    w.requires_grad_()
    for padding_idx in (None, 3, -27):
        y = pydet.torch.embedding(ids, w, padding_idx)
        assert torch.equal(y, torch.nn.functional.embedding(ids, w))
        (dw,) = torch.autograd.grad(y, w, dout)
        assert torch.equal(dw, in_order(dout, ids, 30, None if padding_idx is None else 3)) and dw.dtype == dtype
    turned, some = ids.T, dout.transpose(0, 1)  # strides that the library does not walk
    assert torch.equal(torch.autograd.grad(pydet.torch.embedding(turned, w), w, some)[0], in_order(some, turned, 30))
    wide = torch.ops.pydet.embedding_backward(dout, ids.int(), 30, None, torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), in_order(dout, ids, 30))
    assert torch.equal(pydet.torch.embedding(ids, w.detach().T.contiguous().T), w[ids])


def test_compiled_it_has_the_same_bits():
    w, ids, dout = operands()
    w.requires_grad_()
    compiled = torch.compile(pydet.torch.embedding, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(ids, w), w[ids])
    assert torch.equal(torch.autograd.grad(compiled(ids, w, 2), w, dout)[0], in_order(dout, ids, 30, 2))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.pydet.embedding.default, (w, ids), test_utils=checks)
    torch.library.opcheck(torch.ops.pydet.embedding_backward.default, (dout, ids, 30, 1), test_utils=checks[:2])


def test_vmap_over_tokens():
    w, ids, _ = operands()
    rows = torch.vmap(lambda ids: pydet.torch.embedding(ids, w), in_dims=1, out_dims=1)(ids)
    assert torch.equal(rows, w[ids])
    with pytest.raises(pydet.Error, match="embedding: vmap over the weights is not defined; it is over the rows"):
        torch.vmap(lambda w, ids: pydet.torch.embedding(ids, w))(torch.stack([w, w]), ids[:2])


def test_shapes_without_memory():
    w, ids = torch.empty(9, 5, device="meta"), torch.empty(2, 3, dtype=torch.int64, device="meta")
    assert torch.ops.pydet.embedding(w.bfloat16(), ids).shape == (2, 3, 5)
    dw = torch.ops.pydet.embedding_backward(torch.empty(2, 3, 5, device="meta").half(), ids, 9)
    assert dw.shape == (9, 5) and dw.dtype == torch.float16
    with pytest.raises(pydet.Error, match="embedding: ids is float32, want int32 or int64"):
        torch.ops.pydet.embedding(w, ids.float())
    with pytest.raises(pydet.Error, match="embedding: w is 9x5x1, want 2 dimensions"):
        torch.ops.pydet.embedding(w[..., None], ids)
    with pytest.raises(pydet.Error, match="embedding: padding_idx is 9, want None or one of 9 rows, from 0"):
        torch.ops.pydet.embedding(w, ids, 9)
    with pytest.raises(pydet.Error, match="embedding_backward: ids is 2x3, want 3x2"):
        torch.ops.pydet.embedding_backward(torch.empty(3, 2, 5, device="meta"), ids, 9)


def test_refusals():
    w, ids, dout = operands()
    with pytest.raises(pydet.Error, match="embedding: ids has 30 at 7, want numbers of the table's 30 rows, from 0"):
        ids.view(-1)[7] = 30
        pydet.torch.embedding(ids, w)
    with pytest.raises(pydet.Error, match="padding_idx is -31, want None or one of 30 rows"):
        pydet.torch.embedding(ids, w, -31)
    with pytest.raises(pydet.Error, match="embedding_backward: an operand requires grad"):
        torch.ops.pydet.embedding_backward(dout.requires_grad_(), ids, 30)


def test_numpy_has_the_same_bits():
    w, ids, dout = operands()
    assert np.array_equal(pydet.embedding(w.numpy(), ids.numpy()), pydet.torch.embedding(ids, w).numpy())
    assert np.array_equal(
        pydet.embedding_backward(dout.numpy(), ids.numpy(), 30), torch.ops.pydet.embedding_backward(dout, ids, 30)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_override_aten_has_the_gradient(dtype):
    w, ids, dout = operands(dtype)
    w.requires_grad_()
    with pydet.torch.override_aten() as caught:
        for padding_idx in (None, 3):
            y = torch.nn.functional.embedding(ids, w, padding_idx)
            assert torch.equal(torch.autograd.grad(y, w, dout)[0], in_order(dout, ids, 30, padding_idx))
        turned = torch.nn.functional.embedding(ids.T, w)
        assert torch.equal(
            torch.autograd.grad(turned, w, dout.swapaxes(0, 1))[0], in_order(dout.swapaxes(0, 1), ids.T, 30)
        )
        name = "aten::embedding_dense_backward"
        assert caught == {name: 3}
        scaled = torch.nn.functional.embedding(ids, w, scale_grad_by_freq=True)
        torch.autograd.grad(scaled, w, dout)
        double = torch.randn(30, 24, dtype=torch.float64, requires_grad=True)
        torch.nn.functional.embedding(ids, double).sum().backward()
    assert caught == {name: 3, f"{name} (left to PyTorch)": 2}
