"""pydet.torch.grouped_mm: torch's four forms have the bits of gemm on each group; gradients, graphs, the override."""

import os
import pathlib
import runpy

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from torch_bits import normal, same  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KERNELS = [k for k in pydet.kernels() if k.operation == "grouped_gemm" and k.device == "cuda" and k.available]
CUDA = torch.cuda.is_available() and {"ieee", "sm90"} <= {kernel.arithmetic for kernel in KERNELS}
DEVICES = ["cpu", *(["cuda"] if CUDA else [])]
GROUPED = torch.ops.pydet.grouped_gemm
ENDS = ([3, 3, 20, 33], [0, 0, 0, 0], [33, 33, 33, 33], [1, 2, 17, 30], [7, 2, 33, -1])
FORMS = {
    "rows": ((33, 24), (4, 24, 20)),
    "depth": ((19, 33), (33, 20)),
    "batch": ((4, 5, 24), (4, 24, 20)),
    "columns": ((4, 19, 24), (24, 33)),
}


def ends_of(ends, device="cpu"):
    return torch.tensor(ends, dtype=torch.int32, device=device)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def spans(ends, total):
    """From, to of each group: ends are clamped to what there is and to the end before."""
    last, found = 0, []
    for end in ends:
        end = max(min(end, total), last)
        found.append((last, end))
        last = end
    return found


def by_gemm(form, a, b, ends, bias=None, out_dtype=None, **how):
    """Each group by a call of its own; bias [G, N]."""
    dtype = out_dtype or a.dtype
    name = str(dtype).removeprefix("torch.")
    added = lambda g: None if bias is None else bias[g]
    each = lambda x, y, g: pydet.gemm(x, y, bias=added(g), out_dtype=name, **how)
    if form == "batch":
        return torch.stack([each(a[g], b[g], g) for g in range(a.shape[0])])
    if form == "depth":
        return torch.stack([each(a[:, s:e], b[s:e], g) for g, (s, e) in enumerate(spans(ends, b.shape[0]))])
    if form == "rows":
        out = torch.zeros(a.shape[0], b.shape[2], dtype=dtype, device=a.device)
        for g, (s, e) in enumerate(spans(ends, a.shape[0])):
            out[s:e] = each(a[s:e], b[g], g)
        return out
    out = torch.zeros(a.shape[1], b.shape[1], dtype=dtype, device=a.device)
    for g, (s, e) in enumerate(spans(ends, b.shape[1])):
        out[:, s:e] = each(a[g], b[:, s:e], g)
    return out


def gradients(form, a, b, ends, bias, dc, **how):
    """What each gradient is: products of the same kind, by group."""
    ones = torch.ones_like(dc[..., :1])
    if form == "rows":
        dbias = by_gemm("depth", ones.T, dc, ends, **how)[:, 0]
        return by_gemm("rows", dc, b.mT, ends, **how), by_gemm("depth", a.T, dc, ends, **how), dbias
    if form == "depth":
        dbias = torch.stack([pydet.gemm_db(x, y, **how)[0] for x, y in zip(ones, dc, strict=True)])
        return by_gemm("columns", dc, b.T, ends, **how), by_gemm("rows", a.T, dc, ends, **how), dbias
    if form == "batch":
        dbias = torch.stack([pydet.gemm_db(x, y, **how)[0] for x, y in zip(ones, dc, strict=True)])
        return pydet.gemm_da(dc, b, **how), pydet.gemm_db(a, dc, **how), dbias
    return by_gemm("depth", dc, b.T, ends, **how), by_gemm("columns", a.mT, dc, ends, **how), None


@pytest.mark.parametrize("form", FORMS)
def test_forms_and_gradients_have_the_bits_of_gemm(form, dtype, device):
    a, b = (normal(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(FORMS[form]))
    bias = normal(4, b.shape[-1], dtype=dtype, device=device)
    with_bias = (None,) if form == "columns" else (None, bias)
    arithmetic = "ieee" if dtype == torch.float32 else "sm90"
    for ends in ENDS[:1] if form == "batch" else ENDS:
        offs = None if form == "batch" else ends_of(ends, device)
        for added, how in ((x, y) for x in with_bias for y in ({}, {"arithmetic": arithmetic, "k_chunk": 16})):
            tracked = [None if t is None else t.clone().requires_grad_() for t in (a, b, added)]
            y = pt.grouped_mm(*tracked[:2], offs=offs, bias=tracked[2], **how)
            same(y, by_gemm(form, a, b, ends, added, **how))
            dc = normal(*y.shape, dtype=dtype, device=device, seed=7)
            y.backward(dc)
            for t, want in zip(tracked, gradients(form, a, b, ends, added, dc, **how), strict=True):
                if t is not None:
                    same(t.grad, want)


def test_out_dtype_and_strides(dtype, device):
    ends = [3, 9, 9, 30]
    for form, shapes in FORMS.items():
        a, b = (normal(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes))
        offs = None if form == "batch" else ends_of(ends, device)
        want = by_gemm(form, a, b, ends, out_dtype=torch.float32)
        wide_ends = torch.stack([ends_of(ends, device), ends_of([0] * 4, device)], 1)[:, 0]
        for view in (lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: torch.stack([x, x], -1)[..., 0]):
            x, y = view(a).detach().requires_grad_(), view(b).detach().requires_grad_()
            got = pt.grouped_mm(x, y, offs=offs if offs is None else wide_ends, out_dtype=torch.float32)
            same(got, want)
            got.sum().backward()
            assert x.grad.dtype == y.grad.dtype == dtype and x.grad.shape == a.shape


def test_a_row_does_not_feel_the_routing(dtype, device):
    """Alone, first or last of many, beside rows of NaN, among empty groups; and its gradient."""
    b, row, dc = (normal(*s, dtype=dtype, device=device) for s in ((4, 24, 20), (1, 24), (1, 20)))
    alone = row.clone().requires_grad_()
    want = pt.grouped_mm(alone, b, offs=ends_of([0, 0, 1, 1], device))
    want.backward(dc)
    for before, after in ((0, 5), (1, 0), (16, 1), (63, 2), (130, 40)):
        rows = torch.full((before + 1 + after, 24), float("nan"), dtype=dtype, device=device)
        rows[before : before + 1] = row
        rows.requires_grad_()
        for ends in ([before, before, before + 1, before + 1 + after], [0, 0, before + 1 + after, before + 1 + after]):
            y = pt.grouped_mm(rows, b, offs=ends_of(ends, device))
            same(y[before : before + 1], want)
            (gradient,) = torch.autograd.grad(y, rows, dc.expand(y.shape).contiguous())
            same(gradient[before : before + 1], alone.grad)


def test_a_sum_that_feels_the_routing_would_show():
    """The negative control: with one chain over all tokens a group's gradient would change with those before it."""
    a, b = normal(19, 48, dtype=torch.bfloat16), normal(48, 20, dtype=torch.bfloat16)
    how = {"arithmetic": "sm90", "out_dtype": torch.float32}
    got = pt.grouped_mm(a, b, offs=ends_of([5, 48]), **how)[1]
    same(got, pt.gemm(a[:, 5:], b[5:], **how))
    masked = b.clone()
    masked[:5] = 0
    with pytest.raises(AssertionError, match="elements differ"):
        same(got, pt.gemm(a, masked, **how))


def test_second_gradients():
    """Backward is made of the operator itself, so it has a gradient."""
    a, b = normal(9, 6).requires_grad_(), normal(3, 6, 5).requires_grad_()
    offs = ends_of([2, 2, 8])

    def penalty(call, a, b):
        (da,) = torch.autograd.grad(call(a, b).square().sum(), a, create_graph=True)
        return torch.autograd.grad(da.square().sum(), (a, b))

    loop = lambda a, b: torch.cat([a[s:e] @ b[g] for g, (s, e) in enumerate(spans([2, 2, 8], 9))])
    got = penalty(lambda a, b: pt.grouped_mm(a, b, offs=offs), a, b)
    for ours, theirs in zip(got, penalty(loop, a, b), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_empty_extents():
    for t, k, n in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        a, b, offs = torch.zeros(t, k).requires_grad_(), torch.zeros(2, k, n).requires_grad_(), ends_of([t, t])
        pt.grouped_mm(a, b, offs=offs).sum().backward()
        pt.grouped_mm(a.mT, torch.zeros(t, n).requires_grad_(), offs=offs).sum().backward()
        assert a.grad.shape == a.shape and b.grad.shape == b.shape and not bool(b.grad.any())


# ---- Graphs, autocast ------------------------------------------------------------------------------------------------


def test_opcheck():
    offs = ends_of([3, 3, 10])
    rows, matrices, bias = (normal(*s).requires_grad_() for s in ((12, 16), (3, 16, 20), (3, 20)))
    depth = normal(7, 12).requires_grad_(), normal(12, 5).requires_grad_(), offs, normal(3, 5).requires_grad_()
    halves = rows.detach().bfloat16(), matrices.detach().bfloat16(), offs
    for arguments in ((rows, matrices, offs, bias), depth, halves):
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")  # and compiled, below
        torch.library.opcheck(GROUPED.default, arguments, test_utils=checks)


def test_compiled_with_any_number_of_rows_and_any_routing():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    w = normal(3, 24, 32, dtype=torch.bfloat16).requires_grad_()

    def layer(x, offs):
        return torch.relu(pt.grouped_mm(x, w.mT, offs=offs))

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
    for t, ends in ((9, [2, 2, 9]), (30, [0, 11, 28]), (17, [17, 17, 17])):
        x = normal(t, 32, dtype=torch.bfloat16)
        found = []
        for call in (layer, compiled):
            own = x.clone().requires_grad_()
            y = call(own, ends_of(ends))
            found.append((y, *torch.autograd.grad(y.float().square().sum(), (own, w))))
        for ours, theirs in zip(*found, strict=True):
            same(ours, theirs)
    assert graphs.frame_count == 1


def test_vmap_has_the_eager_bits():
    a, b = normal(2, 9, 16, dtype=torch.bfloat16), normal(3, 16, 5, dtype=torch.bfloat16)
    offs, bias = torch.stack([ends_of([3, 4, 9]), ends_of([0, 9, 9])]), normal(3, 2, 5)
    call = lambda a, offs, bias: pt.grouped_mm(a, b, offs=offs, bias=bias)
    got = torch.vmap(call, in_dims=(0, 0, 1))(a, offs, bias)
    for i in range(2):
        same(got[i], call(a[i], offs[i], bias[:, i]))
    got = torch.vmap(lambda b: pt.grouped_mm(a[0].T, b, offs=offs[0]), in_dims=1, out_dims=3)(a.transpose(0, 1))
    same(got[..., 1], pt.grouped_mm(a[0].T, a[1], offs=offs[0]))


def test_autocast_takes_its_type(device):
    x, w, bias = (normal(*s, device=device).requires_grad_() for s in ((9, 16), (2, 16, 8), (2, 8)))
    offs = ends_of([4, 9], device)
    with torch.autocast(device, torch.bfloat16):
        y = pt.grouped_mm(x, w, offs=offs, bias=bias)
    same(y, pt.grouped_mm(x.detach().bfloat16(), w.detach().bfloat16(), offs=offs, bias=bias.detach()))
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_cuda_graph_is_replayed_with_other_boundaries():
    if not CUDA:
        pytest.skip("no grouped kernel on an NVIDIA GPU here")
    x, w = normal(64, 64, dtype=torch.bfloat16, device="cuda"), normal(4, 64, 32, dtype=torch.bfloat16, device="cuda")
    offs = ends_of([16, 32, 48, 64], "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pt.grouped_mm(x, w, offs=offs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = pt.grouped_mm(x, w, offs=offs)
    for ends in ([0, 1, 1, 64], [64, 64, 64, 64], [5, 9, 40, 41], [0, 0, 0, 0]):
        offs.copy_(ends_of(ends))
        graph.replay()
        same(y, pt.grouped_mm(x, w, offs=ends_of(ends, "cuda")))


# ---- What PyTorch's own operator comes to ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_override_catches_grouped_mm_and_its_gradients(form, dtype, device):
    """Strides of 16 bytes, as PyTorch wants them, and a result that lies as PyTorch's does."""
    shapes = {"rows": ((40, 24), (4, 24, 16)), "depth": ((24, 40), (40, 16))}
    shapes |= {"batch": ((4, 8, 24), (4, 24, 16)), "columns": ((4, 8, 24), (24, 40))}
    a, b = (normal(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes[form]))
    if device == "cuda" and dtype != torch.bfloat16:
        pytest.skip("PyTorch's gradient on CUDA wants bfloat16")
    ends, calls = [8, 8, 24, 40], [torch._grouped_mm]
    calls += [torch.nn.functional.grouped_mm] if hasattr(torch.nn.functional, "grouped_mm") else []
    for call in calls:
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        offs = None if form == "batch" else ends_of(ends, device)
        theirs = call(a, b, offs=offs)
        with pt.override_aten() as caught:
            ours = call(x, y, offs=offs)
            same(ours, by_gemm(form, a, b, ends))
            ours.backward(torch.ones_like(ours))
        assert ours.stride() == theirs.stride()
        assert dict(caught) == {"aten::_grouped_mm": 3}
        da, db, _ = gradients(form, a, b, ends, None, torch.ones_like(ours))
        same(x.grad, da), same(y.grad, db)
    with pytest.raises(RuntimeError), pt.override_aten() as caught:
        calls[0](a, b.double(), offs=offs)
    assert dict(caught) == {"aten::_grouped_mm (left to PyTorch)": 1}


def test_override_catches_compiled_grouped_mm():
    torch._dynamo.reset()
    a, b, offs = normal(40, 24, dtype=torch.bfloat16), normal(4, 24, 16, dtype=torch.bfloat16), ends_of([8, 8, 24, 40])
    compiled = torch.compile(lambda a, b, offs: torch._grouped_mm(a, b, offs=offs) * 2, backend="aot_eager")
    with pt.override_aten() as caught:
        same(compiled(a, b, offs), by_gemm("rows", a, b, [8, 8, 24, 40]) * 2)
    assert dict(caught) == {"aten::_grouped_mm": 1}


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_the_example_runs(capsys):
    example = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "examples/experts.py"))
    example["main"]()
    assert "0 elements of y differ, 0 of dx" in capsys.readouterr().out


def test_refusals():
    a, b, offs = normal(9, 16), normal(3, 16, 5), ends_of([1, 5, 9])

    def refuses(pattern, *arguments, **options):
        with pytest.raises(pydet.Error, match=pattern):
            pt.grouped_mm(*arguments, **options)

    refuses(r"grouped_mm: the operands are \(16,\) and \(3, 16, 5\), want 2 or 3 dimensions each", a[0], b, offs=offs)
    refuses(r"grouped_mm: offs is None, want the ends of the groups", a, b)
    refuses(r"grouped_mm: offs is given, want None: the operands are batches", b, b.mT, offs=offs)
    refuses(r"bias is given, want None where groups are columns", b.mT, a.T, offs=offs, bias=a)
    refuses(r"arithmetic is 'sm91'", a, b, offs=offs, arithmetic="sm91")
    refuses(r"grouped_gemm: group_end .*, want int32", a, b, offs=offs.long())
    refuses(r"grouped_gemm: .*b", a, b.bfloat16(), offs=offs)
    refuses(r"grouped_gemm: .*group_end", a, b, offs=offs[:2])
    refuses(r"grouped_gemm: .*bias", a, b, offs=offs, bias=normal(3, 4))
    refuses(r"grouped_gemm: ", a[:, 1:], b, offs=offs)
    meta = [x.to("meta") for x in (a, b, offs)]
    for shapes, pattern in (
        ((meta[0], meta[1].bfloat16(), meta[2]), r"b is bfloat16, want float32 as a is"),
        ((meta[0], meta[1], meta[2].long()), r"group_end is torch.int64, want int32"),
        ((meta[0], meta[1], offs), r"group_end is on cpu, a is on meta"),
        ((meta[0][0], meta[1], meta[2]), r"a \(16,\), b \(3, 16, 5\), group_end \(3,\), want a matrix"),
    ):
        with pytest.raises(pydet.Error, match=pattern):
            GROUPED(*shapes)
    with pytest.raises(RuntimeError, match=r"a \(9, 15\), b \(3, 16, 5\) and group_end \(3,\) do not fit"):
        GROUPED(meta[0][:, 1:], *meta[1:])
    with pytest.raises(RuntimeError, match=r"bias is \(3, 4\), want \(3, 5\)"):
        GROUPED(*meta, torch.zeros(3, 4, device="meta"))
