"""pydet.torch in fp8: operators, scaled_mm, the linear layer, checkpoints and the aten override, bit for bit."""

import copy
import os
import warnings

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from torch_bits import differ, normal, same, words  # noqa: E402

OPS = torch.ops.pydet
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def operands(m, n, k, device="cpu", granularity=("group", "block")):
    """a [M, K] and b [K, N], both k-adjacent, and their scales as scaled_gemm takes them."""
    a, a_scale = pydet.quantize(normal(m, k, device=device), granularity=granularity[0])
    w, w_scale = pydet.quantize(normal(n, k, device=device, seed=1), granularity=granularity[1])
    return a, w.t(), a_scale, w_scale.t()


# ---- Operators -------------------------------------------------------------------------------------------------------


def test_operators_have_the_bits_of_the_functions(device):
    a, b, a_scale, b_scale = operands(5, 144, 272, device)
    bias = normal(144, device=device)
    options = {"a_scale": a_scale, "b_scale": b_scale}
    same(OPS.scaled_gemm(a, b, a_scale, b_scale), pydet.scaled_gemm(a, b, **options))
    got = OPS.scaled_gemm(a, b, a_scale, b_scale, bias, torch.float32, "sm90", 128)
    same(got, pydet.scaled_gemm(a, b, bias=bias, out_dtype=torch.float32, arithmetic="sm90", **options))
    same(OPS.scaled_gemm(a, b, None, None, None, None, "sm90", 0),
         pydet.scaled_gemm(a, b, a_scale=None, b_scale=None, k_chunk=0, arithmetic="sm90"))  # fmt: skip
    x = normal(3, 130, 40, dtype=torch.bfloat16, device=device)
    for made in (("row",), ("group", E5M2), ("block", None, E8M0), ("group", None, None, True)):
        names = dict(zip(("granularity", "dtype", "scale_dtype", "power_of_two"), made, strict=False))
        names = {name: value for name, value in names.items() if value is not None}
        for mine, theirs in zip(OPS.quantize(x, *made), pydet.quantize(x, **names), strict=True):
            same(mine, theirs)
        if made[0] != "row":
            got = OPS.quantize_transposed(x, *made)
            for mine, theirs in zip(got, pydet.quantize(x, transposed=True, **names), strict=True):
                same(mine, theirs)
    scale = pydet.quantize(x, granularity="row")[1]
    same(OPS.quantize_given(x, scale, "row"), pydet.quantize(x, granularity="row", scale=scale)[0])


def test_norms_quantised(device):
    """With a residual and without, traced, compiled, and refused where a gradient is asked for."""
    import pydet.torch as pt

    x, residual = (normal(2, 33, 272, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = normal(272, device=device)
    made = (("row",), ("group", E5M2), ("group", None, E8M0), ("row", None, None, True))
    for options in made:
        names = dict(zip(("granularity", "dtype", "scale_dtype", "power_of_two"), options, strict=False))
        names = {name: value for name, value in names.items() if value is not None}
        for w, offset in ((weight, 0.0), (None, 1.0)):
            of_norm = {"eps": 1e-5, "weight_offset": offset}
            for mine, theirs in zip(
                OPS.rmsnorm_quantize(x, w, 1e-5, offset, *options),
                pydet.rmsnorm_quantize(x, w, **of_norm, **names),
                strict=True,
            ):
                same(mine, theirs)
            for mine, theirs in zip(
                pt.rms_norm_quantize(x, w, residual=residual, **of_norm, **names),
                pydet.rmsnorm_quantize(x, w, residual=residual, **of_norm, **names),
                strict=True,
            ):
                same(mine, theirs)
        checks = ("test_autograd_registration", "test_faketensor")
        torch.library.opcheck(OPS.rmsnorm_quantize.default, (x, weight, 1e-5, 0.0, *options), test_utils=checks)
        given = (x, residual.float(), weight, 1e-5, 0.0, *options)
        torch.library.opcheck(OPS.rmsnorm_quantize_residual.default, given, test_utils=checks)
    q = pt.rms_norm_quantize(x[0, :, :17], eps=1e-5)[0]
    assert q.stride() == (32, 1)
    with pytest.raises(pydet.Error, match=r"^rmsnorm_quantize: granularity is 'block', want row or group"):
        OPS.rmsnorm_quantize(x.to("meta"), None, 1e-5, 0.0, "block")
    with pytest.raises(pydet.Error, match=r"^rmsnorm_quantize: an operand requires grad"):
        pt.rms_norm_quantize(x.float().requires_grad_(), eps=1e-5)


@pytest.mark.parametrize("k", [1, 15, 16, 17, 272])
def test_quantised_rows_begin_at_multiples_of_16_bytes(k):
    q, _, q_t, _ = OPS.quantize_transposed(normal(2, 33, k), "group")
    assert q.stride() == (33 * (k + 15 & ~15), k + 15 & ~15, 1) and q_t.stride() == (48 * k, 48, 1)


def test_operators_trace(device):
    x, w = normal(2, 33, 272, dtype=torch.bfloat16, device=device), normal(144, 272, device=device)
    a, b, a_scale, b_scale = operands(5, 144, 272, device)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for made in (("row",), ("group", E5M2), ("block", None, E8M0, True), ("tensor",)):
        if device == "cpu" or made[0] != "tensor":
            torch.library.opcheck(OPS.quantize.default, (x, *made), test_utils=checks[:2])
        if made[0] in ("group", "block"):
            torch.library.opcheck(OPS.quantize_transposed.default, (x, *made), test_utils=checks[:2])
    torch.library.opcheck(OPS.quantize_given.default, (w, pydet.quantize(w)[1]), test_utils=checks[:2])
    given = (a, b, a_scale, b_scale, normal(144, device=device), torch.float32)
    torch.library.opcheck(OPS.scaled_gemm.default, given, test_utils=checks)
    meta = [x.to("meta") for x in (a, b, a_scale, b_scale)]
    assert OPS.scaled_gemm(*meta).shape == (5, 144) and OPS.scaled_gemm(*meta).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda a, b: OPS.scaled_gemm(a.view(torch.uint8), b, None, None), "a is torch.uint8, want float8_e4m3fn or"),
        (lambda a, b: OPS.scaled_gemm(a, b, a, None), "a_scale is torch.float8_e4m3fn, want float32 or float8_e8m0fnu"),
        (lambda a, b: OPS.scaled_gemm(a, b, None, None, None, None, "sm9"), "arithmetic is 'sm9'"),
        (lambda a, b: OPS.scaled_gemm(a[0], b, None, None), "a has 1 dimensions, want 2 to 8"),
        (lambda a, b: OPS.scaled_gemm(a, b, None, None, b[:3, 0].float()), "bias is"),
        (lambda a, b: OPS.quantize(a), "x is torch.float8_e4m3fn, want float32 or bfloat16 or float16"),
        (lambda a, b: OPS.quantize(a[0].float()), "x has 1 dimensions, want 2 to 8"),
        (lambda a, b: OPS.quantize(a.float(), "column"), "granularity is 'column', want one of row, group, block"),
        (lambda a, b: OPS.quantize(a.float().requires_grad_()), "an operand requires grad, and this has no gradient"),
    ],
)
def test_what_is_refused_while_tracing(call, sentence):
    a, b = operands(5, 144, 272)[:2]
    with pytest.raises(pydet.Error, match=sentence):
        call(a.to("meta"), b.to("meta"))
    if "requires grad" not in sentence:  # and by the kernel
        with pytest.raises(pydet.Error):
            call(a, b)


# ---- scaled_mm -------------------------------------------------------------------------------------------------------


def scaling(m, n, k, device="cpu"):
    """Pairs of recipes, each (arguments of torch's public function, scales of torch._scaled_mm, of scaled_gemm)."""
    kinds = torch.nn.functional.ScalingType
    chunks = -(-k // 128)
    sides = []
    for extent in (m, n):
        one, row = torch.rand(1, device=device) + 0.5, torch.rand(extent, 1, device=device) + 0.5
        group = torch.rand(extent, chunks, device=device) + 0.5
        block = torch.rand(-(-extent // 128), chunks, device=device) + 0.5
        padded = torch.nn.functional.pad(block, (0, -chunks % 4))
        sides.append({
            "TensorWise": (one, one, one.reshape(())),
            "RowWise": (row, row, row),
            "BlockWise1x128": (group.t().contiguous().t(), group, group),
            "BlockWise128x128": (padded.t(), block, block),
        })  # fmt: skip
    for left, right in (("TensorWise", "TensorWise"), ("RowWise", "RowWise"), ("BlockWise1x128", "BlockWise128x128"),
                        ("BlockWise1x128", "BlockWise1x128"), ("BlockWise128x128", "BlockWise1x128")):  # fmt: skip
        a, b = sides[0][left], sides[1][right]
        theirs = (a[0], getattr(kinds, left), b[0].t() if right == "RowWise" else b[0], getattr(kinds, right))
        short = (a[1], b[1].t().contiguous() if right == "RowWise" else b[1].t() if b[1].dim() == 2 else b[1])
        spread = a[2].repeat_interleave(128, 0)[:m] if left == "BlockWise128x128" else a[2]
        yield theirs, short, {"a_scale": spread, "b_scale": b[2].t()}


@pytest.mark.parametrize("k", [96, 272])
def test_scaled_mm(device, k):
    a, b = operands(150, 144, k, device)[:2]
    bias = normal(144, device=device, dtype=torch.bfloat16)
    for theirs, short, mine in scaling(150, 144, k, device):
        want = pydet.scaled_gemm(a, b, bias=bias, **mine)
        same(pt.scaled_mm(a, b, *theirs, bias=bias), want)
        same(pt.scaled_mm(a, b, short[0], theirs[1], short[1], theirs[3], bias=bias), want)
        listed = [[x] for x in theirs]
        same(pt.scaled_mm(a, b, *listed, [], None, bias, torch.bfloat16, (1, 0)), want)
        fast = pt.scaled_mm(a, b, *theirs, output_dtype=torch.float32, use_fast_accum=True, arithmetic="sm90")
        along_k = theirs[1].name.startswith("Block") or k <= 128
        want = {"k_chunk": 128 if along_k else 0, "out_dtype": "float32", "arithmetic": "sm90"}
        same(fast, pydet.scaled_gemm(a, b, **mine, **want))


def test_scaled_mm_refusals():
    a, b = operands(5, 144, 272)[:2]
    kinds, one = torch.nn.functional.ScalingType, torch.ones(1)
    given = [a, b, one, kinds.TensorWise, one, kinds.TensorWise]
    for position, value, sentence in (
        (2, torch.ones(2), r"scaled_mm: scale_a is \(2,\) by recipe 0, want TensorWise, RowWise, BlockWise1x128 or"),
        (3, kinds.BlockWise1x32, "by recipe 3, want TensorWise"),
        (2, [one, one], "scaled_mm: scale_a has 2 members, want one"),
        (0, a[None], r"scaled_mm: mat_a is \(1, 5, 272\) and mat_b \(272, 144\), want matrices"),
    ):
        with pytest.raises(pydet.Error, match=sentence):
            pt.scaled_mm(*given[:position], value, *given[position + 1 :])
    swizzle = torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
    with pytest.raises(pydet.Error, match=r"scaled_mm: swizzle_b is .*, want None or NO_SWIZZLE"):
        pt.scaled_mm(*given, None, swizzle)
    with pytest.raises(pydet.Error, match=r"contraction_dim is \(0, 1\), want \(\) or \(1, 0\)"):
        pt.scaled_mm(*given, contraction_dim=(0, 1))
    with pytest.raises(pydet.Error, match="out is float8_e4m3fn, want float32, bfloat16 or float16"):
        pt.scaled_mm(*given, output_dtype=None)


def test_override_takes_over_scaled_products(device):
    """By both of torch's functions, as pydet.torch.scaled_mm; on the CPU torch itself has tensors and rows alone."""
    m, n, k = 150, 144, 272
    a, b = operands(m, n, k, device)[:2]
    public = torch.nn.functional.scaled_mm  # which an older torch has on the GPU alone
    has_public = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", device.upper())
    for fast in (False, True):
        for theirs, scales, _ in scaling(m, n, k, device):
            want = pt.scaled_mm(a, b, *theirs, use_fast_accum=fast, arithmetic="sm90")
            with pt.override_aten(arithmetic="sm90") as caught:
                got = public(a, b, *theirs, use_fast_accum=fast) if has_public else want
                short = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
                out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
                torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast, out=out)
            assert caught.pop("aten::_scaled_mm_v2", 0) == has_public
            assert caught == {"aten::_scaled_mm": 1, "aten::_scaled_mm.out": 1}
            for result in (got, short, out):
                same(result, want)
    if device == "cpu":
        one = torch.ones(())
        with pt.override_aten() as caught:
            y = torch._scaled_mm(a, b, one, one)  # its result is fp8
        assert caught.pop("aten::mm", 0) <= 1  # which PyTorch takes where the processor has no product of fp8
        assert y.dtype == E4M3 and caught == {"aten::_scaled_mm (left to PyTorch)": 1}
        for _, scales, mine in list(scaling(m, n, k))[:2]:
            try:
                plain = torch._scaled_mm(a, b, *scales, out_dtype=torch.float32)
            except RuntimeError as problem:  # before torch 2.13 of rows, never of one scale a matrix
                assert scales[0].numel() > 1 and "only supports per-tensor scaling" in str(problem), problem
                continue
            got = pydet.scaled_gemm(a, b, out_dtype="float32", **mine)
            assert (got - plain).abs().max() < 2e-6 * plain.abs().max()


# ---- Linear layers ---------------------------------------------------------------------------------------------------


def layer(n, k, device="cpu", dtype=torch.bfloat16, **options):
    torch.manual_seed(n + k)
    return pt.Fp8Linear(k, n, device=device, dtype=dtype, **options)


def three_products(x, w, bias, dy, **arithmetic):
    """The layer and its gradients, written out in pydet's functions on plain copies."""
    quantised = lambda matrix, granularity: pydet.quantize(matrix.contiguous(), granularity=granularity)
    (qx, sx), (qw, sw) = quantised(x, "group"), quantised(w, "block")
    y = pydet.scaled_gemm(qx, qw.t(), a_scale=sx, b_scale=sw.t(), bias=bias, out_dtype=x.dtype, **arithmetic)
    (qd, sd), (qt, st) = quantised(dy, "group"), quantised(w.t(), "block")
    dx = pydet.scaled_gemm(qd, qt.t(), a_scale=sd, b_scale=st.t(), out_dtype=x.dtype, **arithmetic)
    (qd, sd), (qx, sx) = quantised(dy.t(), "group"), quantised(x.t(), "group")
    dw = pydet.scaled_gemm(qd, qx.t(), a_scale=sd, b_scale=sx.t(), out_dtype=w.dtype, **arithmetic)
    ones = torch.ones(1, len(dy), dtype=dy.dtype, device=dy.device)
    return y, dx, dw, pydet.gemm(ones, dy, out_dtype=bias.dtype, **arithmetic)[0]


@pytest.mark.parametrize("rows, n, k", [(1, 144, 272), (3, 16, 32), (128, 128, 128), (144, 272, 400), (272, 160, 144)])
def test_layer_is_three_scaled_products(device, rows, n, k):
    """Against the functions, and for what that is worth: near the exact products."""
    for arithmetic in ("ieee", "sm90") if device == "cpu" else ("sm90",):
        linear = layer(n, k, device, arithmetic=arithmetic)
        x = normal(rows, k, dtype=torch.bfloat16, device=device).requires_grad_()
        dy = normal(rows, n, dtype=torch.bfloat16, device=device, seed=3)
        y = linear(x)
        y.backward(dy)
        if device == "cpu" or rows % 16 == 0:
            mine = (y, x.grad, linear.weight.grad, linear.bias.grad)
            detached = (x.detach(), linear.weight.detach(), linear.bias.detach())
            for got, want in zip(mine, three_products(*detached, dy, arithmetic=arithmetic), strict=True):
                same(got, want)
        exact = x.detach().double() @ linear.weight.detach().double().t() + linear.bias.detach().double()
        assert torch.norm(y.double() - exact) < 0.06 * torch.norm(exact)
        exact = dy.double().t() @ x.detach().double()
        assert torch.norm(linear.weight.grad.double() - exact) < 0.06 * torch.norm(exact)
        exact = dy.double() @ linear.weight.detach().double()
        assert torch.norm(x.grad.double() - exact) < 0.06 * torch.norm(exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(device, dtype):
    """Also where rows and columns are no multiples of 16, which the tensor cores read by padded rows."""
    linear = layer(150, 200, device, dtype)
    x = normal(3, 47, 200, dtype=dtype, device=device)
    y = linear(x)
    assert y.dtype == dtype and y.shape == (3, 47, 150)
    same(linear(x[1, 5:6]), y[1, 5:6])
    same(linear(x[1, 5]), y[1, 5])
    same(linear(x[:, ::2]), y[:, ::2])
    same(linear(torch.full_like(x, torch.nan).index_put((torch.tensor([2]),), x[2]))[2], y[2])
    assert linear(x[:, :0]).shape == (3, 0, 150)
    x = x.requires_grad_()
    (dx,) = torch.autograd.grad(linear(x), x, torch.ones_like(y))
    part = x[1:2].detach().requires_grad_()
    same(torch.autograd.grad(linear(part), part, torch.ones_like(y[1:2]))[0], dx[1:2])


def test_frozen_layers_have_the_same_bits(device):
    linear = layer(144, 272, device)
    x, dy = normal(40, 272, dtype=torch.bfloat16, device=device), normal(40, 144, dtype=torch.bfloat16, device=device)
    frozen = copy.deepcopy(linear).freeze()
    assert frozen.weight.dtype == E4M3 and frozen.weight_scale_inv.shape == (2, 3)
    assert "frozen" in repr(frozen) and "frozen" not in repr(linear) and frozen.freeze() is frozen
    same(frozen(x), linear(x))
    grads = []
    for each in (linear, frozen):
        leaf = x.clone().requires_grad_()
        each(leaf).backward(dy)
        grads.append(leaf.grad)
    same(*grads)
    assert frozen.weight.grad is None and frozen.weight_scale_inv.grad is None and frozen.bias.grad is not None
    with torch.no_grad():
        linear.weight.mul_(1.5).add_(0.01)
    differ(frozen(x), linear(x))
    address = frozen.weight.data_ptr()
    frozen.freeze(linear.weight)
    same(frozen(x), linear(x))
    assert frozen.weight.data_ptr() == address
    with pytest.raises(pydet.Error, match=r"freeze: the weight is \(3, 3\), want \(144, 272\)"):
        frozen.freeze(torch.ones(3, 3))


def test_powers_of_two(device):
    linear = layer(144, 272, device, power_of_two=True)
    x = normal(20, 272, dtype=torch.bfloat16, device=device)
    frozen = copy.deepcopy(linear).freeze()
    mantissas = words(frozen.weight_scale_inv) & 0x7FFFFF
    assert not mantissas.any()
    same(frozen(x), linear(x))
    (q, s), (w, ws) = (pydet.quantize(t, granularity=kind, power_of_two=True)
                       for t, kind in ((x, "group"), (linear.weight.detach(), "block")))  # fmt: skip
    same(linear(x), pydet.scaled_gemm(q, w.t(), a_scale=s, b_scale=ws.t(), bias=linear.bias.detach()))


def test_micro_batches_have_the_bits_of_one_batch(device):
    """Cut at multiples of 128 rows; a cut elsewhere changes groups, and is seen to."""
    whole = layer(144, 272, device, torch.float32)
    x, dy = normal(300, 272, device=device), normal(300, 144, device=device, seed=2)
    grads = {}
    for name, cuts in (("whole", [300]), ("cut", [128, 256, 300]), ("elsewhere", [100, 300])):
        linear = copy.deepcopy(whole)
        assert [id(p) for p in pt.accumulate_gradients(linear)] == [id(linear.weight), id(linear.bias)]
        for first, end in zip([0, *cuts], cuts, strict=False):
            linear(x[first:end]).backward(dy[first:end])
        assert linear.weight.grad is None
        grads[name] = linear.weight.main_grad, linear.bias.main_grad
    for mine, want in zip(grads["cut"], grads["whole"], strict=True):
        same(mine, want)
    differ(grads["elsewhere"][0], grads["whole"][0])
    leaf = x.clone().requires_grad_()
    whole(leaf).backward(dy)
    same(grads["whole"][0], whole.weight.grad)
    frozen = copy.deepcopy(whole).freeze()
    assert [id(p) for p in pt.accumulate_gradients(frozen)] == [id(frozen.bias)]


def test_autocast_and_errors():
    linear = layer(16, 32, dtype=torch.float32)
    x = normal(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    same(y, linear(x.bfloat16()))
    with pytest.raises(pydet.Error, match="fp8_linear: the input is 4x31 and the weight 16x32, want an input whose"):
        linear(x[:, :31])
    with pytest.raises(pydet.Error, match=r"fp8_linear: the weight is torch.float8_e4m3fn without a scale, want"):
        pt.fp8_linear(x, linear.weight.detach().to(E4M3))
    with pytest.raises(pydet.Error, match="Fp8Linear: arithmetic is 'sm9'"):
        pt.Fp8Linear(3, 3, arithmetic="sm9")


def test_compiled_layers_have_eager_bits(device):
    backend = "aot_eager" if device == "cpu" else "inductor"  # which on the CPU compiles C++ for long
    linear = layer(150, 200, device)
    compiled = torch.compile(linear, backend=backend, fullgraph=True, dynamic=True)
    for rows in (47, 130):
        results = []
        for call in (linear, compiled):
            x = normal(2, rows, 200, dtype=torch.bfloat16, device=device).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y = call(x)
            linear.weight.grad = linear.bias.grad = None
            y.backward(normal(2, rows, 150, dtype=torch.bfloat16, device=device, seed=1))
            results.append((y, x.grad, linear.weight.grad, linear.bias.grad))
        for eager, mine in zip(*results, strict=True):
            same(mine, eager)


# ---- Models and checkpoints ------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(144, 272, bias=False), torch.nn.Linear(272, 144)
        self.head = torch.nn.Linear(144, 40)

    def forward(self, x):
        return self.head(x + self.down(torch.nn.functional.silu(self.up(x))))


class BlockScaledLinear(torch.nn.Module):
    """As loaders of block-scaled checkpoints have it (a layer of Transformers, for one), by names of parameters."""

    def __init__(self, n, k, scale_shape=None):
        super().__init__()
        weight, scale = pydet.quantize(normal(n, k), granularity="block")
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        scale = scale if scale_shape is None else torch.ones(scale_shape)
        self.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", None)

    def forward(self, x):
        return x @ (self.weight.float() * self.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
                    [: self.weight.shape[0], : self.weight.shape[1]]).t()  # fmt: skip


def model():
    torch.manual_seed(0)
    return Block().bfloat16()


def test_convert():
    converted = model()
    report = pt.convert(converted, fp8=lambda name, _: name != "head", arithmetic="sm90")
    assert report.swapped == dict.fromkeys(["up", "down", "head"], "Linear") and not report.left
    assert [type(converted.get_submodule(name)) for name in ("up", "down", "head")] == [
        pt.Fp8Linear, pt.Fp8Linear, pt.Linear,
    ]  # fmt: skip
    x = normal(5, 144, dtype=torch.bfloat16)
    plain = model()
    h = pt.fp8_linear(x, plain.up.weight, arithmetic="sm90")
    h = x + pt.fp8_linear(torch.nn.functional.silu(h), plain.down.weight, plain.down.bias, arithmetic="sm90")
    same(converted(x), pt.linear(h, plain.head.weight, plain.head.bias, arithmetic="sm90"))
    assert not pt.convert(converted, fp8=lambda name, _: name != "head").swapped
    assert pt.convert(converted, fp8=True).swapped == {"head": "Linear"}
    assert type(converted.head) is pt.Fp8Linear and "frozen" not in repr(converted)


def test_block_scaled_checkpoints():
    """(weight, weight_scale_inv) go into a converted model by load_state_dict, and out of a frozen one."""
    trainer, rollout = model(), model()
    fp8 = lambda name, _: name != "head"
    pt.convert(trainer, fp8=fp8)
    pt.convert(rollout, fp8=fp8)
    checkpoint = dict(trainer.state_dict())
    for name in ("up", "down"):
        weight, scale = pydet.quantize(checkpoint[f"{name}.weight"], granularity="block")
        checkpoint |= {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}
    with torch.no_grad():
        for parameter in rollout.parameters():
            parameter.zero_()
    rollout.load_state_dict(checkpoint)
    x = normal(5, 144, dtype=torch.bfloat16)
    same(rollout(x), trainer(x))
    saved = rollout.state_dict()
    assert saved.keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        same(saved[name], tensor)
    with pytest.raises(pydet.Error, match=r"up\.weight is torch.bfloat16, and the layer is frozen; want float8"):
        rollout.load_state_dict(trainer.state_dict(), strict=False)
    empty = pt.Fp8Linear(144, 272, bias=False, dtype=E4M3)
    empty.load_state_dict({name: checkpoint[f"up.{name}"] for name in ("weight", "weight_scale_inv")})
    same(empty(x), trainer.up(x))


def test_convert_of_block_scaled_layers():
    blocks = torch.nn.Sequential(BlockScaledLinear(144, 272), BlockScaledLinear(40, 144, (1, 1)))
    x = normal(5, 272, dtype=torch.bfloat16)
    want = blocks[0](x.float())
    assert set(pt.convert(blocks).left.values()) == {"its weight is fp8, with scales; convert(model, fp8=True)"}
    report = pt.convert(blocks, fp8=True)
    assert report.swapped == {"0": "BlockScaledLinear"}
    assert report.left["1"] == "its weight_scale_inv is torch.float32 (1, 1), want float32 (1, 2): blocks of 128"
    assert "in_features=272, out_features=144, bias=False, arithmetic=auto, frozen" in repr(blocks[0])
    got = blocks[0](x)
    assert torch.norm(got.float() - want) < 0.06 * torch.norm(want)
    q, s = pydet.quantize(x, granularity="group")
    same(got, pydet.scaled_gemm(q, blocks[0].weight.t(), a_scale=s, b_scale=blocks[0].weight_scale_inv.t()))
