"""pydet.torch.scaled_grouped_mm and its operator: the bits of scaled_gemm on each group; tracing and the override."""

import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from test_torch_fp8 import DEVICES, E4M3, E5M2, normal, same  # noqa: E402

KINDS = getattr(torch.nn.functional, "ScalingType", None)
NUMBERS = {"TensorWise": 0, "RowWise": 1, "BlockWise1x128": 4, "BlockWise128x128": 5}
ENDS = [5, 5, 40, 61]
TOKENS, N, K = 64, 144, 272


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def recipe(name):
    return getattr(KINDS, name) if KINDS else NUMBERS[name]


def operands(device, k=K):
    """a, b with k adjacent, and for each pair of recipes its scales as torch has them and as pydet has."""
    a = normal(TOKENS, k, device=device).to(E4M3)
    b = normal(len(ENDS), N, k, device=device, seed=1).to(E5M2 if k == 96 else E4M3).mT
    scale = lambda *shape: torch.rand(*shape, device=device) + 0.5
    chunks, blocks, groups = -(-k // 128), -(-N // 128), len(ENDS)
    one, row, group = scale(1), scale(TOKENS), scale(TOKENS, chunks)
    left = {"TensorWise": (one, one.reshape(())), "RowWise": (row, row[:, None]), "BlockWise1x128": (group, group)}
    row, group, block = scale(groups, N), scale(groups, N, chunks), scale(groups, chunks, blocks)
    right = {
        "TensorWise": (one, one.reshape(())),
        "RowWise": (row, row[:, None]),
        "BlockWise1x128": (group, group.mT),
        "BlockWise128x128": (block, block),
    }
    pairs = [("TensorWise", "TensorWise"), ("RowWise", "RowWise"), ("BlockWise1x128", "BlockWise1x128")]
    scales = [(x, y, left[x], right[y]) for x, y in [*pairs, ("BlockWise1x128", "BlockWise128x128")]]
    return a, b, scales


def ends(device):
    return torch.tensor(ENDS, dtype=torch.int32, device=device)


def each(a, b, a_scale, b_scale, bias=None, dtype=torch.bfloat16, **options):
    """scaled_gemm of each group; zeros in none."""
    out, first = torch.zeros(len(a), N, dtype=dtype, device=a.device), 0
    of = lambda scale, part: scale if scale.dim() == 0 else scale[part]
    for g, last in enumerate(ENDS):
        if last > first:
            given = {"a_scale": of(a_scale, slice(first, last)), "b_scale": of(b_scale, g), **options}
            added = None if bias is None else bias[g]
            out[first:last] = pydet.scaled_gemm(a[first:last], b[g], bias=added, out_dtype=dtype, **given)
        first = last
    return out


@pytest.mark.parametrize("k", [96, K])
def test_scaled_grouped_mm(device, k):
    a, b, recipes = operands(device, k)
    bias, offs = normal(len(ENDS), N, device=device), ends(device)
    for left, right, (of_a, mine_a), (of_b, mine_b) in recipes:
        given = (of_a, recipe(left), of_b, recipe(right))
        same(pt.scaled_grouped_mm(a, b, *given, bias=bias, offs=offs), each(a, b, mine_a, mine_b, bias))
        listed = [[x] for x in given]
        got = pt.scaled_grouped_mm(a, b, *listed, [], None, None, offs, torch.float32, (-1, -2), arithmetic="sm90")
        same(got, each(a, b, mine_a, mine_b, dtype=torch.float32, arithmetic="sm90"))
        fast = pt.scaled_grouped_mm(a, b, *given, offs=offs, use_fast_accum=True, arithmetic="sm90")
        k_chunk = 128 if left.startswith("Block") or (k <= 128 and left != "TensorWise") else 0
        same(fast, each(a, b, mine_a, mine_b, arithmetic="sm90", k_chunk=k_chunk))


def test_a_batch(device):
    a, b, recipes = operands(device)
    batch = a.reshape(len(ENDS), -1, K)
    for left, right, (of_a, _), (of_b, mine_b) in recipes:
        of_a = of_a if left == "TensorWise" else of_a.reshape(len(ENDS), TOKENS // len(ENDS), *of_a.shape[1:])
        got = pt.scaled_grouped_mm(
            batch, b, of_a, recipe(left), of_b, recipe(right), bias=normal(len(ENDS), N).to(device)
        )
        for g in range(len(ENDS)):
            scale = of_a.reshape(()) if left == "TensorWise" else of_a[g]
            scale = scale[:, None] if left == "RowWise" else scale
            b_scale = mine_b if right == "TensorWise" else mine_b[g]
            bias = normal(len(ENDS), N).to(device)[g]
            same(got[g], pydet.scaled_gemm(batch[g], b[g], a_scale=scale, b_scale=b_scale, bias=bias))


def test_refusals():
    a, b, recipes = operands("cpu")
    row, offs = recipes[1], ends("cpu")
    given = [a, b, row[2][0], recipe("RowWise"), row[3][0], recipe("RowWise")]

    def refused(sentence, **keywords):
        with pytest.raises(pydet.Error, match=sentence):
            pt.scaled_grouped_mm(*given, **keywords)

    refused(r"scaled_grouped_mm: offs is None, want the ends of the groups")
    refused(r"contraction_dim is \(0, 1\), want \(\) or \(1, 1\)", offs=offs, contraction_dim=(0, 1))
    refused("scaled_grouped_gemm: out is float8_e4m3fn, want float32", offs=offs, output_dtype=E4M3)
    given[2] = given[2][:5]
    refused(r"scaled_grouped_mm: scale_a is \(5,\) by recipe 1, want TensorWise, RowWise or BlockWise1x128", offs=offs)
    given[2], given[4] = row[2][0], torch.ones(3)
    refused(r"scaled_grouped_mm: scale_b is \(3,\) by recipe 1, want TensorWise, RowWise, BlockWise1x128 or", offs=offs)
    given[1] = b[0]
    refused(r"the operands are \(64, 272\) and \(272, 144\), want \[T, K\] and \[G, K, N\], or a batch", offs=offs)


def test_operator():
    """Traced and checked by PyTorch's own checks; compiled without a graph break; no gradient."""
    a, b, recipes = operands("cpu")
    _, _, (_, of_a), (_, of_b) = recipes[3]
    bias, offs = normal(len(ENDS), N), ends("cpu")
    checks = ("test_autograd_registration", "test_faketensor")
    given = (a, b, offs, of_a, of_b, bias, torch.float32)
    torch.library.opcheck(torch.ops.pydet.scaled_grouped_gemm.default, given, test_utils=checks)
    want = torch.ops.pydet.scaled_grouped_gemm(a, b, offs, of_a, of_b, bias)
    same(want, each(a, b, of_a, of_b, bias))
    call = torch.compile(torch.ops.pydet.scaled_grouped_gemm, fullgraph=True, backend="aot_eager")
    same(call(a, b, offs, of_a, of_b, bias), want)
    wrong = {"group_end": offs.long(), "bias": bias[:3], "a": a.float()}
    for name, value in wrong.items():
        given = {"a": a, "b": b, "group_end": offs, "a_scale": of_a, "b_scale": of_b, "bias": bias, name: value}
        for place in (lambda x: x, lambda x: x.to("meta")):
            with pytest.raises((pydet.Error, RuntimeError), match=f"scaled_grouped_gemm: {name}"):
                torch.ops.pydet.scaled_grouped_gemm(**{key: place(x) for key, x in given.items()})


def test_override_takes_over(device):
    a, b, recipes = operands(device)
    offs = ends(device)
    _, _, (of_a, mine_a), (of_b, mine_b) = recipes[1]
    with pt.override_aten(arithmetic="sm90") as caught:
        got = torch._scaled_grouped_mm(a, b, of_a, of_b, offs=offs, out_dtype=torch.bfloat16)
        fast = torch._scaled_grouped_mm(a, b, of_a, of_b, offs=offs, use_fast_accum=True)
        if hasattr(torch.nn.functional, "scaled_grouped_mm"):
            kinds = recipe("RowWise"), recipe("RowWise")
            same(torch.nn.functional.scaled_grouped_mm(a, b, of_a, kinds[0], of_b, kinds[1], offs=offs), got)
    assert caught.pop("aten::_scaled_grouped_mm_v2", 1) == 1 and caught == {"aten::_scaled_grouped_mm": 2}
    same(got, each(a, b, mine_a, mine_b, arithmetic="sm90"))
    same(fast, each(a, b, mine_a, mine_b, arithmetic="sm90", k_chunk=0))
    if device == "cpu":  # groups along what is summed are left to PyTorch, which has none on the CPU
        with pt.override_aten() as caught, pytest.raises(NotImplementedError, match="pydet none for this form"):
            torch._scaled_grouped_mm(a.t(), a, torch.ones(K * len(ENDS)), torch.ones(K * len(ENDS)), offs=offs)
        assert caught == {"aten::_scaled_grouped_mm (left to PyTorch)": 1}
    with pytest.raises((NotImplementedError, RuntimeError)):  # as it was
        torch._scaled_grouped_mm(a.cpu(), b.cpu(), of_a.cpu(), of_b.cpu(), offs=offs.cpu())
