"""torch.ops.pydet.attention_varlen and attention_paged: the functions' bits, tracing, refusals."""

import itertools
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch  # noqa: E402
from torch_bits import normal, same  # noqa: E402

OPS = torch.ops.pydet
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOKENS, KEYS = 60, 400


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def integers(*numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def packed(dtype=torch.float32, device="cpu"):
    q, k, v = (normal(n, h, 64, dtype=dtype, device=device) for n, h in ((TOKENS, 4), (KEYS, 2), (KEYS, 2)))
    return q, k, v, integers(0, 1, 1, 18, 60, device=device), integers(0, 130, 130, 137, 400, device=device)


def paged(dtype=torch.float32, device="cpu", size=16):
    """Of two sequences, 330 and 129 keys of them."""
    pages = -(-330 // size)
    k, v = (normal(2 * pages, size, 2, 64, dtype=dtype, device=device, seed=i) for i in range(2))
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(0)).int().view(2, pages).to(device)
    return normal(2, 4, 3, 64, dtype=dtype, device=device, seed=3), k, v, order, integers(330, 129, device=device)


def test_the_functions_bits(dtype, device):
    sinks, keys = normal(4, device=device), 21 * 16
    for more in ({}, {"causal": True, "softcap": 2.0, "sinks": sinks, "scale": 0.3, "kv_chunk": 128}):
        for left, right in ((None, None), (9, None), (5, 7)):
            given, window = packed(dtype, device), {"window_left": left, "window_right": right}
            want = pydet.attention_varlen(*given, window=(left, right), return_lse=True, **more)
            for ours, theirs in zip(OPS.attention_varlen(*given, **window, **more), want, strict=True):
                same(ours, theirs)
            given = paged(dtype, device)
            want = pydet.attention_paged(*given, window=(left, right), return_lse=True, **more)
            for ours, theirs in zip(OPS.attention_paged(*given, **window, **more), want, strict=True):
                same(ours, theirs)
    q, *cache = paged(dtype, device)
    rows, ends = q.transpose(1, 2).flatten(0, 1), integers(0, 3, 6, device=device)
    found = OPS.attention_paged(rows, *cache, ends, first_key=integers(7, 100, device=device))
    want = pydet.attention_paged(q, *cache, first_key=integers(7, 100, device=device), return_lse=True)
    for ours, theirs in zip(found, want, strict=True):
        same(ours.unflatten(0, (2, 3)).transpose(1, 2), theirs)
    allowed = torch.rand(3, keys, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    more = {"allowed": allowed, "bias": normal(keys, device=device)}
    want = pydet.attention_paged(q, *cache, return_lse=True, **more)
    for ours, theirs in zip(OPS.attention_paged(q, *cache, **more), want, strict=True):
        same(ours, theirs)


def test_a_sequence_has_the_bits_that_it_has_alone(device):
    """And those of the operator for dense sequences."""
    q, k, v, of_q, of_k = packed(torch.bfloat16, device)
    got = OPS.attention_varlen(q, k, v, of_q, of_k, causal=True)[0]
    for s in range(4):
        rows, keys = slice(of_q[s], of_q[s + 1]), slice(of_k[s], of_k[s + 1])
        alone = [x[None].transpose(1, 2) for x in (q[rows], k[keys], v[keys])]
        same(got[rows], pydet.torch.attention(*alone, scale=0.125, causal=True)[0].transpose(0, 1))


def varlen_gradients(q, k, v, *ends, dy, sinks=None, **options):
    tracked = [x.detach().clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    options |= {} if sinks is None else {"sinks": tracked[3]}
    OPS.attention_varlen(*tracked[:3], *ends, **options)[0].backward(dy)
    return [x.grad for x in tracked]


def test_gradients_are_the_functions_and_the_sequences_own(dtype, device):
    """The library's bits; alone in a dense call; under the mask of the same sequences."""
    q, k, v, of_q, of_k = given = packed(dtype, device)
    dy, sinks = normal(TOKENS, 4, 64, dtype=dtype, device=device, seed=4), normal(4, device=device)
    how = {"causal": True, "softcap": 2.0, "sinks": sinks, "scale": 0.3}
    out, lse = OPS.attention_varlen(*given, **how)
    want = pydet.attention_varlen_backward(dy, q, k, v, out, lse, of_q, of_k, **how)
    got = varlen_gradients(*given, dy=dy, **how)
    for ours, theirs in zip(got, want, strict=True):
        same(ours, theirs)
    plain = varlen_gradients(*given, dy=dy, causal=True, scale=0.3, window_left=40)
    windowed = pydet.attention_varlen(*given, causal=True, scale=0.3, window=(40, None), return_lse=True)
    more = {"causal": True, "scale": 0.3, "window": (40, None)}
    for ours, theirs in zip(
        plain, pydet.attention_varlen_backward(dy, q, k, v, *windowed, of_q, of_k, **more), strict=True
    ):
        same(ours, theirs)
    turn = lambda x: x[None].transpose(1, 2)
    for s in range(4):
        rows, keys = slice(of_q[s], of_q[s + 1]), slice(of_k[s], of_k[s + 1])
        alone = [turn(x).detach().clone().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        pydet.torch.attention(*alone, scale=0.3, causal=True, softcap=2.0, sinks=sinks).backward(turn(dy[rows]))
        for x, y, at in zip(alone, got, (rows, keys, keys), strict=False):
            same(turn(y[at]).contiguous(), x.grad.contiguous())


def test_packed_rows_and_their_mask_have_the_same_gradients(dtype, device):
    ends = integers(0, 1, 140, 140, 291, device=device)
    q, k, v = (normal(291, h, 16, dtype=dtype, device=device, seed=i) for i, h in enumerate((4, 2, 2)))
    dy = normal(291, 4, 16, dtype=dtype, device=device, seed=4)
    want = varlen_gradients(q, k, v, ends, ends, dy=dy, causal=True, scale=0.3)
    places = torch.arange(291, device=device)
    of = torch.searchsorted(ends.long(), places, right=True)
    mask = ((of[:, None] == of) & (places[:, None] >= places))[None, None]
    turn = lambda x: x[None].transpose(1, 2)
    tracked = [turn(x).detach().clone().requires_grad_() for x in (q, k, v)]
    pydet.torch.attention(*tracked, mask, scale=0.3).backward(turn(dy))
    for ours, theirs in zip(tracked, want, strict=True):
        same(ours.grad.contiguous(), turn(theirs).contiguous())
    tracked = [turn(x).detach().clone().requires_grad_() for x in (q, k, v)]
    from_zero = torch.ops.pydet.attention_backward  # the negative control: rows counted from the first of all
    out, lse = torch.ops.pydet.attention(*(x.detach() for x in tracked), mask, 0.3, "auto", 1024, from_first=True)
    moved = from_zero(turn(dy), *(x.detach() for x in tracked), mask, out, lse, 0.3, "auto")
    assert dtype != torch.float32 or not torch.equal(moved[1].contiguous(), turn(want[1]).contiguous())


def test_tokens_of_no_sequence_have_no_gradient(device):
    q, k, v, *_ = packed(torch.bfloat16, device)
    gaps = integers(5, 9, 40, 40, 50, device=device), integers(3, 200, 260, 300, 300, device=device)
    found = varlen_gradients(q, k, v, *gaps, dy=torch.ones_like(q))
    for x, first, last in zip(found, (5, 3, 3), (50, 300, 300), strict=True):
        assert not bool(x[:first].any() | x[last:].any()) and bool(x[first:last].any())


def test_tokens_of_no_sequence_are_zeros(device):
    """In any order of the lengths, and beyond what is there. The library leaves such tokens as they were."""
    q, k, v, *_ = packed(torch.bfloat16, device)
    of_k = integers(0, 100, 200, 300, 400, device=device)
    for ends in ((5, 9, 40, 40, 50), (-4, 20, 20, 31, 90), (30, 10, 12, 12, 5), (60, 60, 60, 60, 60), (9, 3, 20, 7, 8)):
        out, lse = OPS.attention_varlen(q, k, v, integers(*ends, device=device), of_k)
        written = torch.zeros(TOKENS, dtype=torch.bool)
        for begin, end in itertools.pairwise(ends):
            written[max(begin, 0) : max(end, 0)] = True
        assert not bool(out[~written].any()) and bool((lse[~written] == float("-inf")).all()), ends
        assert bool(lse[written].isfinite().all()), ends
    caches = paged(torch.bfloat16, device)[1:]
    out, lse = OPS.attention_paged(q, *caches, integers(3, 9, 50, device=device))
    assert not bool(out[:3].any() | out[50:].any()) and bool((lse[50:] == float("-inf")).all())
    assert bool(out[3:50].any(-1).all())


def test_any_strides(device):
    """What the library does not walk is copied."""
    q, k, v, of_q, of_k = packed(device=device)
    want = OPS.attention_varlen(q, k, v, of_q, of_k)
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    apart = [torch.stack([x, x], 1)[:, 0] for x in (of_q, of_k)]
    for ours, theirs in zip(OPS.attention_varlen(*turned, *apart), want, strict=True):
        same(ours, theirs)


def test_any_width(device):
    """Of packed sequences; a cache is not copied."""
    q, k, v, *ends = packed(device=device)
    q, k, v = (torch.nn.functional.pad(x[..., :width], (0, 3)) for x, width in ((q, 13), (k, 13), (v, 21)))
    want, want_lse = pydet.attention_varlen(q, k, v, *ends, scale=13**-0.5, return_lse=True)
    out, lse = OPS.attention_varlen(q[..., :13], k[..., :13], v[..., :21], *ends)
    same(out, want[..., :21].contiguous())
    same(lse, want_lse)
    rows, keys, *rest = paged(device=device)
    with pytest.raises(pydet.Error, match=r"heads of q and k have 60 elements and those of v 64, want multiples of 8"):
        OPS.attention_paged(rows[..., :60], keys[..., :60], *rest)


def test_operators_and_graphs(device):
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    cases = [
        (OPS.attention_varlen, packed(device=device), {"causal": True, "sinks": normal(4, device=device)}),
        (OPS.attention_paged, paged(device=device), {"window_left": 9, "first_key": integers(3, 4, device=device)}),
    ]
    q, k, v, *ends = packed(device=device)
    out, lse = OPS.attention_varlen(q, k, v, *ends, causal=True)
    cases.append((OPS.attention_varlen_backward, (torch.ones_like(out), q, k, v, out, lse, *ends), {"causal": True}))
    tracked = [x.clone().requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(lambda *x: OPS.attention_varlen(*x, causal=True)[0], backend="aot_eager", fullgraph=True)
    compiled(*tracked, *ends).sum().backward()
    for x, theirs in zip(tracked, varlen_gradients(q, k, v, *ends, dy=torch.ones_like(out), causal=True), strict=True):
        same(x.grad, theirs)
    q, *cache = paged(device=device)
    rows = q.transpose(1, 2).flatten(0, 1)
    cases.append((OPS.attention_paged, (rows, *cache, integers(0, 3, 6, device=device)), {}))
    for operator, arguments, options in cases:
        torch.library.opcheck(operator.default, arguments, options, test_utils=checks)
        torch._dynamo.reset()
        for dynamic in (False, True):
            compiled = torch.compile(
                lambda *x, operator=operator, options=options: operator(*x, **options),
                backend="aot_eager",
                fullgraph=True,
                dynamic=dynamic,
            )
            for ours, theirs in zip(compiled(*arguments), operator(*arguments, **options), strict=True):
                same(ours, theirs)


def test_a_cuda_graph_reads_lengths_when_it_runs():
    if "cuda" not in DEVICES:
        pytest.skip("no NVIDIA GPU here")
    given = packed(torch.bfloat16, "cuda")
    OPS.attention_varlen(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = OPS.attention_varlen(*given)
    given[3].copy_(integers(0, 7, 30, 30, 44))
    graph.replay()
    for ours, theirs in zip((out, lse), OPS.attention_varlen(*given), strict=True):
        same(ours, theirs)


def test_autocast_takes_its_type(device):
    """Of queries and packed keys; a cache is as it is."""
    q, k, v, *ends = packed(device=device)
    narrow = OPS.attention_varlen(*(x.bfloat16() for x in (q, k, v)), *ends)
    rows, *cache = paged(torch.bfloat16, device)
    with torch.autocast(device, torch.bfloat16):
        same(OPS.attention_varlen(q, k.bfloat16(), v, *ends)[0], narrow[0])
        same(OPS.attention_paged(rows.float(), *cache)[0], OPS.attention_paged(rows, *cache)[0])
        with pytest.raises(pydet.Error, match=r"^attention: k is float32, want bfloat16 as q is"):
            OPS.attention_paged(rows, *(x.float() for x in cache[:2]), *cache[2:])


def test_what_is_not_defined():
    q, k, v, *ends = packed()
    tracked = q.clone().requires_grad_()
    with pytest.raises(pydet.Error, match=r"create_graph=True"):
        torch.autograd.grad(OPS.attention_varlen(tracked, k, v, *ends)[0].sum(), tracked, create_graph=True)
    rows, *cache = paged()
    with pytest.raises(pydet.Error, match=r"^attention_paged: an operand requires grad, and keys in pages have"):
        OPS.attention_paged(rows, *cache, sinks=torch.zeros(4, requires_grad=True))
    for name, call in (
        ("attention_varlen", lambda x: OPS.attention_varlen(x, k, v, *ends)),
        ("attention_paged", lambda x: OPS.attention_paged(x[:2, :, None].expand(-1, -1, 3, -1), *cache)),
    ):
        with pytest.raises(pydet.Error, match=rf"^{name}: vmap is not defined; put the sequences of all into one call"):
            torch.vmap(call)(q.detach().expand(2, -1, -1, -1))


def test_refusals_of_the_kernel():
    """The library's sentences, which are tested beside it."""
    q, k, v, of_q, of_k = packed()
    for change, sentence in (
        ({"kv_chunk": 64}, "kv_chunk is 64, want a positive multiple of 128"),
        ({"window_left": -3}, "options.window_left is -3, want 0 to 2^40 keys, or -1 for any"),
        ({"arithmetic": "sm91"}, "arithmetic is 'sm91', want one of"),
        ({"softcap": -1.0}, "softcap is -1, want a number from 2^-100 to 2^100"),
        ({"sinks": normal(3)}, "sinks is 3, want 4"),
    ):
        with pytest.raises(pydet.Error) as raised:
            OPS.attention_varlen(q, k, v, of_q, of_k, **change)
        assert str(raised.value).startswith(f"attention: {sentence}")
    with pytest.raises(pydet.Error, match=r"^attention: cu_seqlens_q is int64, want int32"):
        OPS.attention_varlen(q, k, v, of_q.long(), of_k)


def test_refusals_of_tracing():
    """Before a graph is made, with the sentence that says what is wrong."""

    def refuses(pattern, operator, arguments, **options):
        meta = [x.to("meta") if torch.is_tensor(x) else x for x in arguments]
        options = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in options.items()}
        with pytest.raises((pydet.Error, RuntimeError), match=pattern):
            operator(*meta, **options)

    q, k, v, of_q, of_k = packed()
    varlen, rows, cache = OPS.attention_varlen, *(lambda x, *rest: (x, rest))(*paged())
    refuses(r"attention_varlen: q is \(1, 60, 4, 64\).*want q TxHxD, k UxGxD", varlen, (q[None], k, v, of_q, of_k))
    refuses(r"k is torch.bfloat16, want float32, bfloat16 or float16", varlen, (q, k.bfloat16(), v, of_q, of_k))
    refuses(r"want q TxHxD.*H a multiple of G", varlen, (q[:, :3], k, v, of_q, of_k))
    refuses(r"attention_varlen: cu_seqlens_k is torch.int64, want int32", varlen, (q, k, v, of_q, of_k.long()))
    refuses(r"cu_seqlens_q has 2 dimensions, want 1", varlen, (q, k, v, of_q[None], of_k))
    refuses(r"want one number more than there are sequences in both", varlen, (q, k, v, of_q, of_k[1:]))
    refuses(r"attention_varlen: kv_chunk is 100, want a positive", varlen, (q, k, v, of_q, of_k), kv_chunk=100)
    refuses(r"attention_varlen: arithmetic is 'x'", varlen, (q, k, v, of_q, of_k), arithmetic="x")
    refuses(r"q is \(2, 4, 3, 64\).*want q TxHxD, since cu_seqlens_q", OPS.attention_paged, (rows, *cache, of_q))
    refuses(r"want 2 sequences in both", OPS.attention_paged, (rows, *cache[:2], cache[2][:1], cache[3]))
    refuses(r"block_table has 1 dimensions, want 2", OPS.attention_paged, (rows, *cache[:2], cache[2][0], cache[3]))
    refuses(r"first_key is torch.int64, want int32", OPS.attention_paged, (rows, *cache), first_key=of_q.long())
    with pytest.raises(pydet.Error, match=r"^attention_varlen: cu_seqlens_q is on cpu, q is on meta"):
        varlen(*(x.to("meta") for x in (q, k, v)), of_q, of_k.to("meta"))
