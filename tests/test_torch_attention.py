"""pydet.torch.attention: a query's bits alone, in batches, under padding, with any cache; gradients."""

import contextlib
import importlib
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from torch_bits import normal, same  # noqa: E402

attention_module = importlib.import_module("pydet.torch.ops.attention")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def qkv(batch, queries, keys, dtype, device="cpu", heads=6, groups=2, width=16, out_width=20):
    shapes = (batch, heads, queries, width), (batch, groups, keys, width), (batch, groups, keys, out_width)
    return [normal(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes)]


def causal(queries, keys, device="cpu"):
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]


def test_the_operator_is_the_librarys(dtype, device):
    """Its bits, in every option, and of strided operands; padded widths are those that are not padded."""
    q, k, v = qkv(2, 37, 150, dtype, device, out_width=24)
    sinks = normal(6, dtype=dtype, device=device)
    mask = torch.rand(2, 1, 37, 150, generator=torch.Generator().manual_seed(0)).to(device) < 0.7
    for arithmetic in ("auto", "ieee") if dtype == torch.float32 else ("auto", "ieee", "sm90"):
        for allowed, causally in ((None, False), (None, True), (mask, False), (mask, True)):
            for sink, softcap in ((None, None), (sinks, 3.0)):
                how = {"scale": 0.3, "arithmetic": arithmetic, "kv_chunk": 128, "softcap": softcap, "sinks": sink}
                want = pydet.attention(q, k, v, allowed=allowed, causal=causally, return_lse=True, **how)
                x = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in (q, k, v)]
                got = torch.ops.pydet.attention(*x, allowed, 0.3, arithmetic, 128, sink, softcap, causally)
                for ours, theirs in zip(got, want, strict=True):
                    same(ours, theirs)
    odd = [torch.nn.functional.pad(x[..., :13], (0, 3)) for x in (q, k)]
    want = pydet.attention(*odd, v, scale=0.3)[..., :20]
    same(pt.attention(q[..., :13], k[..., :13], v[..., :20], scale=0.3), want)


def test_the_gradient_is_the_librarys(dtype, device):
    """Its bits, in every option; of strided operands, of a gradient that was expanded, and of padded widths."""
    q, k, v = qkv(2, 37, 150, dtype, device, out_width=24)
    sinks, dout = normal(6, dtype=dtype, device=device), normal(2, 6, 37, 24, dtype=dtype, device=device, seed=9)
    mask = torch.rand(2, 1, 37, 150, generator=torch.Generator().manual_seed(0)).to(device) < 0.7
    backward = torch.ops.pydet.attention_backward
    for arithmetic in ("auto", "ieee") if dtype == torch.float32 else ("auto", "ieee", "sm90"):
        for allowed, causally in ((None, False), (None, True), (mask, True)):
            for sink, softcap in ((None, None), (sinks, 3.0)):
                how = {"scale": 0.3, "arithmetic": arithmetic, "softcap": softcap, "sinks": sink}
                how |= {"allowed": allowed, "causal": causally}
                out, lse = pydet.attention(q, k, v, return_lse=True, **how)
                want = pydet.attention_backward(dout, q, k, v, out, lse, **how)
                x = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in (dout, q, k, v)]
                got = backward(*x, allowed, out, lse, 0.3, arithmetic, sink, softcap, causally)
                for ours, theirs in zip(got, want, strict=sink is not None):
                    same(ours, theirs)
                assert sink is not None or got[3].numel() == 0
    tracked = [x.clone().requires_grad_() for x in (q, k, v)]
    pt.attention(*tracked, scale=0.3).sum().backward()
    for ours, theirs in zip(tracked, gradients(q, k, v, None, torch.ones_like(dout)), strict=True):
        same(ours.grad, theirs)
    odd = [torch.nn.functional.pad(x[..., :13], (0, 3)) for x in (q, k)]
    wide = gradients(*odd, v, None, torch.nn.functional.pad(dout[..., :20], (0, 4)))
    narrow = gradients(q[..., :13], k[..., :13], v[..., :20], None, dout[..., :20])
    for ours, theirs, width in zip(narrow, wide, (13, 13, 20), strict=True):
        same(ours, theirs[..., :width].contiguous())


def test_a_query_under_a_mask_counts_from_its_first_key(dtype, device):
    """Past a block and a segment; and the library's own mask, which counts from key 0, would show."""
    q, k, v = qkv(2, 3, 300, dtype, device)
    sinks = normal(6, dtype=dtype, device=device)
    allowed = torch.zeros(2, 6, 3, 300, dtype=torch.bool, device=device)
    differ = 0
    for b in range(2):
        for i in range(3):
            allowed[b, :, i, 7 + 40 * i + b : 250 + i] = True
    allowed[:, :, :, 100] = False
    for mask in (allowed, allowed[:, :1]):
        got = pt.attention(q, k, v, mask, scale=0.3, kv_chunk=128, sinks=sinks)
        decoded = pt.attention(q[:, :, 1:2], k, v, mask[:, :, 1:2], scale=0.3, kv_chunk=128, sinks=sinks)
        same(decoded, got[:, :, 1:2])
        for b in range(2):
            for i in range(3):
                own = slice(7 + 40 * i + b, 250 + i)
                alone = [q[b : b + 1, :, i : i + 1], k[b : b + 1, :, own], v[b : b + 1, :, own]]
                alone[2] = torch.nn.functional.pad(alone[2], (0, 4))
                how = {"scale": 0.3, "kv_chunk": 128, "sinks": sinks}
                want = pydet.attention(*alone, allowed=allowed[b : b + 1, :1, i : i + 1, own], **how)
                same(got[b : b + 1, :, i : i + 1], want[..., :20])
        from_zero = torch.ops.pydet.attention(q, k, v, mask, 0.3, "auto", 128, sinks)[0]
        differ += int((from_zero != got).sum())
    assert dtype != torch.float32 or differ > 0


def test_causal_is_its_mask(dtype, device):
    """Gradients as well, with fewer, as many and more queries than keys."""
    for queries, keys in ((21, 21), (5, 150), (9, 4)):
        q, k, v = qkv(2, queries, keys, dtype, device)
        mask, dy = causal(queries, keys, device), normal(2, 6, queries, 20, dtype=dtype, device=device, seed=9)
        same(pt.attention(q, k, v, scale=0.3, causal=True), pt.attention(q, k, v, mask, scale=0.3))
        window = mask.triu(keys - queries - 8)
        same(
            pt.attention(q, k, v, torch.ones_like(mask).triu(keys - queries - 8), scale=0.3, causal=True),
            pt.attention(q, k, v, window, scale=0.3),
        )
        pairs = zip(gradients(q, k, v, None, dy, causal=True), gradients(q, k, v, mask, dy), strict=True)
        for ours, theirs in pairs:
            same(ours, theirs)


def test_vmap(device):
    q, k, v = (x.to(device) for x in qkv(6, 5, 7, torch.float32))
    split = [x.unflatten(0, (3, 2)) for x in (q, k, v)]
    over = torch.vmap(lambda a, b, c: pt.attention(a, b, c, scale=0.3, causal=True))
    same(over(*split).flatten(0, 1), pt.attention(q, k, v, scale=0.3, causal=True))
    mask = causal(5, 7, device)
    shared = torch.vmap(lambda a, m: pt.attention(a, k[:2], v[:2], m, scale=0.3), in_dims=(1, 0))
    got = shared(split[0].transpose(0, 1), mask.expand(3, 1, 1, 5, 7))
    for i in range(3):
        same(got[i], pt.attention(split[0][i], k[:2], v[:2], mask, scale=0.3))
    with pytest.raises(pydet.Error, match=r"^attention: vmap over the sinks is not defined"):
        torch.vmap(lambda s: pt.attention(q, k, v, scale=0.3, sinks=s))(normal(2, 6, device=device))


def test_against_float64(dtype):
    q, k, v = (t.requires_grad_() for t in qkv(2, 9, 33, dtype))
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    allowed = causal(9, 33)
    y = pt.attention(q, k, v, allowed, scale=0.25)
    repeated = (doubles[0], *(t.repeat_interleave(3, 1) for t in doubles[1:]))
    want = torch.nn.functional.scaled_dot_product_attention(*repeated, allowed, scale=0.25)
    dy = normal(*y.shape, dtype=dtype)
    y.backward(dy), want.backward(dy.double())
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    pairs = [(y, want), *((a.grad, b.grad) for a, b in zip((q, k, v), doubles, strict=True))]
    for ours, theirs in pairs:
        assert ours.dtype == dtype and float((ours.detach().double() - theirs.detach()).abs().max()) < tolerance


def test_bits_are_the_querys_own(dtype, device):
    """Alone, in batches, decoded one by one from a cache with a masked tail, with padding on either side."""
    q, k, v = qkv(5, 37, 37, dtype, device)
    allowed = causal(37, 37, device)
    want = pt.attention(q, k, v, allowed, scale=0.3)
    for i in range(5):
        one = slice(i, i + 1)
        same(pt.attention(q[one], k[one], v[one], allowed, scale=0.3), want[one])
    for t in (0, 1, 15, 16, 17, 36):
        last = q[:, :, t : t + 1]
        same(pt.attention(last, k[:, :, : t + 1], v[:, :, : t + 1], scale=0.3), want[:, :, t : t + 1])
        same(pt.attention(last, k, v, allowed[:, :, t : t + 1], scale=0.3), want[:, :, t : t + 1])
    for left, right in ((1, 0), (5, 0), (0, 7), (16, 3)):
        wide_k, wide_v = (torch.nn.functional.pad(x, (0, 0, left, right), value=3.0) for x in (k, v))
        mask = torch.nn.functional.pad(allowed, (left, right), value=False)
        same(pt.attention(q, wide_k, wide_v, mask, scale=0.3), want)
    window = allowed.triu(-8)
    windowed = pt.attention(q, k, v, window, scale=0.3)
    same(pt.attention(q[:, :, 30:31], k[:, :, 22:31], v[:, :, 22:31], scale=0.3), windowed[:, :, 30:31])
    for head in range(6):  # one head, with its own keys
        own = slice(head // 3, head // 3 + 1)
        same(pt.attention(q[:, head : head + 1], k[:, own], v[:, own], allowed, scale=0.3), want[:, head : head + 1])
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    same(pt.attention(*strided, allowed.expand(5, 6, 37, 37), scale=0.3), want)


def gradients(q, k, v, allowed, dy, sinks=None, **options):
    tracked = [t.detach().clone().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
    options |= {} if sinks is None else {"sinks": tracked[3]}
    pt.attention(*tracked[:3], allowed, scale=0.3, **options).backward(dy)
    return [t.grad for t in tracked]


def test_gradients_are_the_sequences_own(dtype, device, monkeypatch):
    q, k, v = qkv(3, 21, 21, dtype, device)
    allowed, dy = causal(21, 21, device), normal(3, 6, 21, 20, dtype=dtype, device=device, seed=9)
    want = gradients(q, k, v, allowed, dy)
    for i in range(3):
        one = slice(i, i + 1)
        for ours, theirs in zip(gradients(q[one], k[one], v[one], allowed, dy[one]), want, strict=True):
            same(ours, theirs[one])
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 4, 2))
    mask = torch.nn.functional.pad(allowed, (4, 2, 4, 2), value=False)
    for ours, theirs in zip(gradients(*map(pad, (q, k, v)), mask, pad(dy)), want, strict=True):
        same(ours[:, :, 4:-2], theirs)
        assert not bool(ours[:, :, :4].any()) and not bool(ours[:, :, -2:].any())
    forward = pt.attention(q, k, v, allowed, scale=0.3)
    monkeypatch.setitem(attention_module._SCORES, device, 500)  # blocks of one or two queries
    same(pt.attention(q, k, v, allowed, scale=0.3), forward)
    for ours, theirs in zip(gradients(q, k, v, allowed.expand(3, 6, 21, 21), dy), want, strict=True):
        same(ours, theirs)


def test_sinks(dtype, device, monkeypatch):
    """One more key of value zero: its weight and gradient, and a query's bits its own as before."""
    q, k, v = qkv(3, 21, 21, dtype, device)
    sinks, allowed = normal(6, dtype=dtype, device=device), causal(21, 21, device)
    dy = normal(3, 6, 21, 20, dtype=dtype, device=device, seed=9)
    tracked = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    y = pt.attention(*tracked[:3], allowed, scale=0.3, sinks=tracked[3])
    y.backward(dy)
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    scores = (doubles[0] @ doubles[1].repeat_interleave(3, 1).mT * 0.3).masked_fill(~allowed, float("-inf"))
    scores = torch.cat([scores, doubles[3].view(1, 6, 1, 1).expand(3, 6, 21, 1)], -1)
    want = scores.softmax(-1)[..., :-1] @ doubles[2].repeat_interleave(3, 1)
    want.backward(dy.double())
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 8e-2, torch.float16: 1e-2}[dtype]
    for ours, theirs in ((y, want), *((a.grad, b.grad) for a, b in zip(tracked, doubles, strict=True))):
        assert ours.dtype == dtype and float((ours.double() - theirs).abs().max().detach()) < tolerance
    alone = pt.attention(q[1:2], k[1:2], v[1:2], allowed, scale=0.3, sinks=sinks)
    same(alone, y[1:2])
    for t in (0, 15, 20):
        last = pt.attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], scale=0.3, sinks=sinks)
        same(last, y[:, :, t : t + 1])
    monkeypatch.setitem(attention_module._SCORES, device, 500)
    again = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    pt.attention(*again[:3], allowed.expand(3, 6, 21, 21), scale=0.3, sinks=again[3]).backward(dy)
    for ours, theirs in zip(again, tracked, strict=True):
        same(ours.grad, theirs.grad)
    nothing = torch.full_like(sinks, float("-inf"))
    same(pt.attention(q, k, v, allowed, scale=0.3, sinks=nothing), pt.attention(q, k, v, allowed, scale=0.3))
    hidden = pt.attention(q, k, v, torch.zeros_like(allowed), scale=0.3, sinks=sinks)
    assert not bool(hidden.any())


def test_softcap_and_sinks_against_float64(dtype):
    q, k, v = (t.requires_grad_() for t in qkv(2, 9, 33, dtype))
    sinks = normal(6, dtype=dtype, seed=5).mul_(2).requires_grad_()
    allowed, dy = causal(9, 33), normal(2, 6, 9, 20, dtype=dtype, seed=3)
    y = pt.attention(q, k, v, allowed, scale=0.9, softcap=2.5, sinks=sinks)
    y.backward(dy)
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    keys, values = (t.repeat_interleave(3, 1) for t in doubles[1:3])
    scores = 2.5 * torch.tanh(0.9 * (doubles[0] @ keys.mT) / 2.5)
    scores = scores.masked_fill(~allowed, float("-inf"))
    scores = torch.cat([scores, doubles[3].view(1, 6, 1, 1).expand(2, 6, 9, 1)], -1)
    want = torch.softmax(scores, -1)[..., :-1] @ values
    want.backward(dy.double())
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 2e-2}[dtype]
    pairs = [(y, want), *((a.grad, b.grad) for a, b in zip((q, k, v, sinks), doubles, strict=True))]
    for ours, theirs in pairs:
        assert ours.dtype == dtype and float((ours.detach().double() - theirs.detach()).abs().max()) < tolerance
    plain = pt.attention(q, k, v, allowed, scale=0.9)
    assert bool((y != plain).any())


def test_softcap_and_sinks_keep_a_querys_bits(dtype, device, monkeypatch):
    q, k, v = qkv(3, 21, 21, dtype, device)
    sinks = normal(6, dtype=dtype, device=device, seed=5)
    allowed, dy = causal(21, 21, device), normal(3, 6, 21, 20, dtype=dtype, device=device, seed=9)
    more = {"softcap": 3.0, "sinks": sinks}
    want = pt.attention(q, k, v, allowed, scale=0.3, **more)
    trained = gradients(q, k, v, allowed, dy, **more)
    for i in range(3):
        one = slice(i, i + 1)
        same(pt.attention(q[one], k[one], v[one], allowed, scale=0.3, **more), want[one])
        for ours, theirs in zip(gradients(q[one], k[one], v[one], allowed, dy[one], **more)[:3], trained, strict=False):
            same(ours, theirs[one])
    for t in (0, 1, 15, 16, 20):
        last = q[:, :, t : t + 1]
        same(pt.attention(last, k[:, :, : t + 1], v[:, :, : t + 1], scale=0.3, **more), want[:, :, t : t + 1])
    wide_k, wide_v = (torch.nn.functional.pad(x, (0, 0, 5, 3), value=3.0) for x in (k, v))
    same(pt.attention(q, wide_k, wide_v, torch.nn.functional.pad(allowed, (5, 3)), scale=0.3, **more), want)
    monkeypatch.setitem(attention_module._SCORES, device, 500)
    same(pt.attention(q, k, v, allowed, scale=0.3, **more), want)
    for ours, theirs in zip(gradients(q, k, v, allowed, dy, **more), trained, strict=True):
        same(ours, theirs)
    assert not bool(pt.attention(q, k[:, :, :0], v[:, :, :0], scale=1.0, **more).any())
    assert not bool(gradients(q, k[:, :, :0], v[:, :, :0], None, dy, **more)[3].any())


def test_the_cpu_is_the_gpu(dtype):
    if "cuda" not in DEVICES:
        pytest.skip("no NVIDIA GPU here")
    results = []
    for device in DEVICES:
        q, k, v = qkv(2, 37, 70, dtype, device)
        dy = normal(2, 6, 37, 20, dtype=dtype, device=device)
        options = {"arithmetic": "ieee" if dtype == torch.float32 else "sm90"}
        y = pt.attention(q, k, v, causal(37, 70, device), scale=0.3, **options)
        results.append([x.cpu() for x in (y, *gradients(q, k, v, causal(37, 70, device), dy, **options))])
        options |= {"softcap": 2.0, "sinks": normal(6, dtype=dtype, device=device)}
        results[-1] += [x.cpu() for x in gradients(q, k, v, causal(37, 70, device), dy, **options)]
    for ours, theirs in zip(*results, strict=True):
        same(ours, theirs)


def test_rows_of_no_keys_and_empty_extents():
    q, k, v = qkv(2, 5, 7, torch.float32)
    allowed = causal(5, 7).repeat(2, 1, 1, 1)
    allowed[1, :, 2] = False
    want = gradients(q, k, v, causal(5, 7), torch.ones(2, 6, 5, 20))
    y = pt.attention(q, k, v, allowed, scale=0.3)
    assert not bool(y[1, :, 2].any()) and bool(y[1, :, 1].any())
    for ours, theirs in zip(gradients(q, k, v, allowed, torch.ones(2, 6, 5, 20)), want, strict=True):
        assert bool(ours.isfinite().all())
        same(ours[0], theirs[0])
    assert pt.attention(q[:, :, :0], k, v, scale=1.0).shape == (2, 6, 0, 20)
    assert pt.attention(q[:0], k[:0], v[:0], scale=1.0).shape == (0, 6, 5, 20)
    for empty in ((q, k[:, :, :0], v[:, :, :0]), (q[:, :, :0], k, v)):
        assert not any(bool(x.any()) for x in gradients(*empty, None, torch.ones(2, 6, empty[0].shape[2], 20)))
    assert not bool(pt.attention(q, k[:, :, :0], v[:, :, :0], scale=1.0).any())


def test_a_sum_in_blocks_would_show():
    """The negative control: with sums that walk keys in steps of 16, padding on the left moves the steps."""
    weights = torch.rand(64, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    v = normal(48, 16, dtype=torch.bfloat16)
    padded = [torch.nn.functional.pad(x, p) for x, p in ((weights, (5, 0)), (v, (0, 0, 5, 0)))]
    same(pydet.gemm(*padded, arithmetic="ieee"), pydet.gemm(weights, v, arithmetic="ieee"))
    with pytest.raises(AssertionError, match="elements differ"):
        same(
            pydet.gemm(*padded, arithmetic="sm90", out_dtype="float32"),
            pydet.gemm(weights, v, arithmetic="sm90", out_dtype="float32"),
        )


def test_operators_and_graphs():
    q, k, v = (t.requires_grad_() for t in qkv(2, 5, 7, torch.float32))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")  # and compiled, below
    torch.library.opcheck(
        torch.ops.pydet.attention.default, (q, k, v, causal(5, 7), 0.3, "auto", None), test_utils=checks
    )
    torch.library.opcheck(
        torch.ops.pydet.attention.default,
        (q, k, v, causal(5, 7), 0.3, "auto", None, normal(6).requires_grad_(), 3.0),
        test_utils=checks,
    )
    arguments = (q, k, v, None, 0.3, "auto", None, normal(6).requires_grad_())
    torch.library.opcheck(torch.ops.pydet.attention.default, arguments, test_utils=checks)
    for more in ((None, 0.3, "auto", 128, None, None, True), (causal(5, 7), 0.3, "auto", 128, None, None, False, True)):
        torch.library.opcheck(torch.ops.pydet.attention.default, (q, k, v, *more), test_utils=checks)
    torch._dynamo.reset()
    plain = torch.compile(lambda *x: pt.attention(*x, scale=0.3, causal=True), backend="aot_eager", fullgraph=True)
    same(plain(q, k, v), pt.attention(q, k, v, scale=0.3, causal=True))
    compiled = torch.compile(lambda *x: pt.attention(*x, scale=0.3), backend="aot_eager", fullgraph=True)
    y = compiled(q, k, v, causal(5, 7))
    same(y, pt.attention(q, k, v, causal(5, 7), scale=0.3))
    y.sum().backward()
    for ours, theirs in zip((q, k, v), gradients(q, k, v, causal(5, 7), torch.ones_like(y)), strict=True):
        same(ours.grad, theirs)


def test_gradients_through_checkpoints(device, dtype):
    """A forward that is run again in backward, all of it or all but attention itself, changes no bit of a gradient."""
    from torch.utils import checkpoint as checkpoints

    tokens, weight = normal(23, 96, dtype=dtype, device=device), normal(160, 96, dtype=dtype, device=device, seed=1)
    starts, kept = torch.tensor([0, 9, 23], dtype=torch.int32, device=device), torch.ops.pydet.attention_varlen.default
    sinks, dy = normal(6, dtype=dtype, device=device, seed=2), normal(23, 96, dtype=dtype, device=device, seed=3)

    def attend(tokens, weight, sinks):
        q, k, v = pt.linear(tokens, weight).split((96, 32, 32), -1)
        heads = [x.unflatten(-1, (-1, 16)) for x in (q, k, v)]
        packed = torch.ops.pydet.attention_varlen(*heads, starts, starts, causal=True, sinks=sinks)[0]
        dense = [x[None].transpose(1, 2) for x in heads]
        return packed.flatten(1) + pt.attention(*dense, scale=0.25, causal=True).transpose(1, 2).flatten(2)[0]

    def of(call):
        inputs = [x.clone().requires_grad_() for x in (tokens, weight, sinks)]
        with torch.autograd.graph.save_on_cpu() if call is offloaded else contextlib.nullcontext():
            y = call(*inputs)
        y.backward(dy)
        return [y, *(x.grad for x in inputs)]

    def again(reentrant, **more):
        return lambda *x: checkpoints.checkpoint(attend, *x, use_reentrant=reentrant, **more)

    def offloaded(*x):
        return attend(*x)

    def but_attention():
        policy = checkpoints.CheckpointPolicy

        def of_an_operator(context, operator, *args, **kwargs):
            return policy.MUST_SAVE if operator is kept else policy.PREFER_RECOMPUTE

        return checkpoints.create_selective_checkpoint_contexts(of_an_operator)

    want = of(attend)
    calls = [again(True), again(False), again(False, context_fn=but_attention), offloaded]
    if dtype == torch.bfloat16:
        torch._dynamo.reset()
        calls.append(torch.compile(again(False), backend="aot_eager", fullgraph=True))
    for call in calls:
        for ours, theirs in zip(of(call), want, strict=True):
            same(ours, theirs)


def test_autocast_takes_its_type(device):
    """Also where q, k and v come in different types: rotary embedding leaves some in fp32."""
    q, k, v = (t.to(device) for t in qkv(2, 5, 7, torch.float32))
    tracked = [q.clone().requires_grad_(), k.bfloat16().requires_grad_(), v.clone().requires_grad_()]
    with torch.autocast(device, torch.bfloat16):
        y = pt.attention(*tracked, scale=0.3)
    same(y, pt.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale=0.3))
    y.float().sum().backward()
    assert [t.grad.dtype for t in tracked] == [torch.float32, torch.bfloat16, torch.float32]


def test_refusals():
    q, k, v = qkv(2, 5, 7, torch.float32)

    def refuses(pattern, *arguments, **options):
        with pytest.raises(pydet.Error, match=pattern):
            pt.attention(*arguments, **{"scale": 1.0, **options})

    refuses(r"^attention: q 2x6x5x16, k 2x2x7x16, v 2x2x6x20, want q BxHxQxD, k BxGxKxD", q, k, v[:, :, 1:])
    refuses(r"H a multiple of G", q[:, :5], k, v)
    refuses(r"k is torch.bfloat16, want float32, bfloat16 or float16, the same of all", q, k.bfloat16(), v)
    refuses(r"the mask is torch.float32, want bool", q, k, v, torch.zeros(1, 1, 5, 7))
    refuses(r"the mask is \(3, 1, 5, 7\), want \(2, 6, 5, 7\)", q, k, v, causal(5, 7).expand(3, 1, 5, 7))
    for sinks in (torch.zeros(5), torch.zeros(6, 1), torch.zeros(6, dtype=torch.int32)):
        refuses(r"attention: sinks is torch\..*, want one number a head, \(6,\)", q, k, v, sinks=sinks)
    refuses(r"^attention: k_chunk is 64, want None; kv_chunk says how many keys", q, k, v, k_chunk=64)
    for chunk in (0, -128, 64):
        refuses(rf"^attention: kv_chunk is {chunk}, want a positive multiple of 128$", q, k, v, kv_chunk=chunk)
    refuses(r"^attention: scale is -1, want a number from 2\^-100 to 2\^100", q, k, v, scale=-1.0)
    refuses(r"arithmetic is 'sm91'", q, k, v, arithmetic="sm91")
    for softcap in (0.0, -1.0, float("inf"), float("nan")):
        refuses(r"^attention: softcap is .*, want a positive number, or None$", q, k, v, softcap=softcap)
    with pytest.raises(RuntimeError, match=r"the mask is \(1, 1, 5, 6\), want \(2, 6, 5, 7\)"):
        pt.attention(q, k, v, causal(5, 6), scale=1.0)
    tracked = q.clone().requires_grad_()
    y = pt.attention(tracked, k, v, scale=1.0).sum()
    with pytest.raises(pydet.Error, match=r"create_graph=True"):
        torch.autograd.grad(y, tracked, create_graph=True)
