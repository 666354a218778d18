"""pydet.torch.override_aten: a row has the same bits alone and in a batch, whatever PyTorch makes of a call."""

import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from torch_bits import normal, same  # noqa: E402

F = torch.nn.functional
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def op_db(need):
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as problem:  # it wants expecttest
        need(False, "models", f"no OpInfo: {problem}")
    return op_db


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def layouts(x):
    """x with the elements where other strides have them: two dimensions stored the other way, every second element of
    a wider row, rows with a gap."""
    for i in range(x.dim()):
        for j in range(i):
            yield x.transpose(i, j).contiguous().transpose(i, j)
    if x.dim():
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
        wide[..., ::2] = x
        yield wide[..., ::2]
        gap = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
        gap[..., : x.shape[-1]] = x
        yield gap[..., : x.shape[-1]]


def test_linear_of_every_sample_alone_and_in_the_batch(op_db, dtype):
    """All samples and all layouts of the input; and out=, vmap, torch.func and a bias of any shape."""
    (info,) = (op for op in op_db if op.name == "nn.functional.linear")
    compared = 0
    for sample in info.sample_inputs("cpu", dtype):
        x, (w, *rest) = sample.input, sample.args
        bias = sample.kwargs.get("bias", rest[0] if rest else None)
        want = pt.linear(x, w, bias) if x.numel() and w.numel() else F.linear(x, w, bias)
        with pt.override_aten():
            for view in (x, *layouts(x)):
                same(F.linear(view, w, bias), want)
                same(torch._C._nn.linear(view, w, bias, out=torch.empty_like(want)), want)
                for dim in range(view.dim() - 1):
                    for i in range(view.shape[dim]):
                        same(F.linear(view.narrow(dim, i, 1), w, bias), want.narrow(dim, i, 1))
                        compared += 1
    assert compared > 40


def test_linear_of_larger_inputs(dtype):
    w, biases = normal(29, 83, dtype=dtype), [normal(*shape, dtype=dtype) for shape in ((29,), (5, 29), (1,), ())]
    x = normal(4, 5, 83, dtype=dtype)
    for bias in biases:
        want = pt.linear(x, w, bias.expand(4, 5, 29))
        two = (pydet.gemm(x, w.T).float() + bias.float()).to(dtype)
        assert dtype == torch.float32 or not torch.equal(two, want), "two roundings would show"
        with pt.override_aten() as caught:
            for view in (x, *layouts(x)):
                same(F.linear(view, w, bias), want)
                same(F.linear(view[2:3], w, bias), want[2:3])
                same(F.linear(view[1], w, bias), want[1])
                if bias.dim() < 2:
                    same(F.linear(view[1, 2], w, bias), want[1, 2])
                    same(F.linear(view[:, 1:2], w, bias), want[:, 1:2])
        assert set(caught) == {"aten::addmm"}


def test_linear_in_transforms_and_graphs(dtype):
    w, bias, x = normal(29, 83, dtype=dtype), normal(29, dtype=dtype), normal(4, 5, 83, dtype=dtype)
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    want = pt.linear(x, w, bias)
    with pt.override_aten() as caught:
        same(torch.vmap(F.linear, in_dims=(0, None, None))(x, w, bias), want)
        same(torch.vmap(torch.vmap(F.linear, in_dims=(0, None, None)), in_dims=(0, None, None))(x, w, bias), want)
        several = torch.vmap(F.linear, in_dims=(None, 0, 0))(x, torch.stack([w, -w]), torch.stack([bias, -bias]))
        same(several[0], want), same(several[1], -want)
        assert caught["aten::linear"] == 3
        same(torch.func.vjp(lambda x: F.linear(x, w, bias), x)[0], want)
        torch._dynamo.reset()
        same(torch.compile(F.linear, backend="aot_eager", fullgraph=True)(x, w, bias), want)
        with torch.autocast("cpu", torch.bfloat16):
            half = pt.linear(x.bfloat16(), w.bfloat16(), bias.bfloat16())
            same(F.linear(x, w, bias), half)
        assert F.linear(x.double(), w.double(), bias.double()).dtype == torch.float64
        tracked = [t.clone().requires_grad_() for t in (x, w, bias)]
        F.linear(*tracked).backward(want)
        alone = x[2:3].clone().requires_grad_()
        F.linear(alone, w, bias).backward(want[2:3])
    same(alone.grad, tracked[0].grad[2:3])
    same(tracked[1].grad, pydet.gemm_db(want.flatten(0, 1), x.flatten(0, 1)))


def rows(op, sample):
    """(the call on the whole, and for each row or matrix of the batch: the call on it alone, and where it lies)."""
    a, arguments, options = sample.input, sample.args, sample.kwargs
    if op in ("addmm", "baddbmm", "addmv"):
        (b, c), shape = arguments, op != "addmv" and (*arguments[0].shape[:-1], arguments[1].shape[-1])
        added = a.expand(shape or b.shape[:1])
        for i in range(b.shape[0]):
            second = c[i : i + 1] if op == "baddbmm" else c
            yield i, lambda f, i=i, c=second: f(added[i : i + 1], b[i : i + 1], c, **options)
    elif op in ("mm", "mv", "matmul", "bmm"):
        (b,) = arguments
        if a.dim() < 2 or (op == "matmul" and b.dim() > 2):
            return
        for i in range(a.shape[0]):
            second = b[i : i + 1] if op == "bmm" else b
            yield i, lambda f, i=i, b=second: f(a[i : i + 1], b, **options)


def test_products_of_every_sample_alone_and_in_the_batch(op_db, dtype):
    compared = dict.fromkeys(("addmm", "baddbmm", "addmv", "mm", "mv", "matmul", "bmm"), 0)
    with pt.override_aten():
        for info in op_db:
            if info.name not in compared or info.variant_test_name or dtype not in info.dtypes:
                continue
            for sample in info.sample_inputs("cpu", dtype):
                whole = info.op(sample.input, *sample.args, **sample.kwargs)
                for i, alone in rows(info.name, sample):
                    if whole.dim():
                        same(alone(info.op), whole[i : i + 1])
                        compared[info.name] += 1
    assert all(compared.values()), compared


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_and_encoder_in_training(dtype, need_weights):
    torch.manual_seed(0)
    x = normal(8, 7, 64, dtype=dtype)

    def check(call):
        whole = x.clone().requires_grad_()
        y = call(whole)
        y.backward(x)
        for i in range(8):
            alone = x[i : i + 1].clone().requires_grad_()
            z = call(alone)
            z.backward(x[i : i + 1])
            same(z, y[i : i + 1])
            same(alone.grad, whole.grad[i : i + 1])

    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True, dtype=dtype)
    torch.nn.init.normal_(attention.in_proj_bias), torch.nn.init.normal_(attention.out_proj.bias)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True, dtype=dtype)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    channels = torch.nn.Linear(7, 64, dtype=dtype)
    with pt.override_aten() as caught:
        check(lambda x: attention(x, x, x, need_weights=need_weights)[0])
        check(encoder)
        check(lambda x: channels(x.transpose(1, 2)).transpose(1, 2)[:, :7])
    assert caught["aten::addmm"] >= 99
