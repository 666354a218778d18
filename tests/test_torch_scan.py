"""Scans as operators of PyTorch, and Transformers' mixers that scan, converted."""

import importlib.util
import inspect
import os
import pickle

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from test_scan import delta_of, scan_of  # noqa: E402
from torch_bits import differ, same  # noqa: E402

ops = torch.ops.pydet


def tensors(given):
    return [None if x is None else torch.from_numpy(x.copy()) for x in given]


def test_operators_are_the_functions():
    given = tensors(scan_of(2, 5, 4, 8, 2, 16, "fp32"))
    for mine, of in (
        (ops.selective_scan(*given), pydet.selective_scan(*given, return_final=True)),
        (
            ops.gated_delta(*(delta := tensors(delta_of(2, 5, 4, 8, 2, 16, "fp32")))),
            pydet.gated_delta(*delta, return_final=True),
        ),
    ):
        for x, y in zip(mine, of, strict=True):
            same(x, y)
    x, w = torch.randn(2, 5, 8), torch.randn(8, 4)
    same(ops.causal_conv1d(x, w), pydet.causal_conv1d(x, w))


def test_tracing():
    given = tensors(scan_of(2, 5, 4, 8, 2, 16, "fp32"))
    delta, conv = tensors(delta_of(2, 5, 4, 8, 2, 16, "fp32")), [torch.randn(2, 5, 8), torch.randn(8, 4)]
    for operator, operands in ((ops.selective_scan, given), (ops.gated_delta, delta), (ops.causal_conv1d, conv)):
        torch.library.opcheck(operator.default, tuple(operands), test_utils=("test_schema", "test_faketensor"))
        with pytest.raises(pydet.Error, match="want"):
            operator(*(x.to("meta")[1:] if i == 1 else x.to("meta") for i, x in enumerate(operands)))


def test_tracing_of_gradients():
    scan, delta = (tensors(f(2, 5, 4, 8, 2, 16, "fp32")) for f in (scan_of, delta_of))
    for operator, operands in (
        (ops.selective_scan_backward, [scan[0], *scan, None, None, None, True]),
        (ops.selective_scan_backward, [scan[0], *scan[:5]]),
        (ops.gated_delta_backward, [delta[2], *delta, None, None, None, True]),
        (ops.causal_conv1d_backward, [*[torch.randn(2, 5, 8)] * 2, torch.randn(8, 4), None, None, True, True]),
    ):
        torch.library.opcheck(operator.default, tuple(operands), test_utils=("test_schema", "test_faketensor"))


# ---- Gradients -------------------------------------------------------------------------------------------------------


def selective_scan_in_double(x, dt, a, b, c, d, initial):
    """The recurrence, of which autograd knows the gradient."""
    heads = torch.arange(x.shape[2]) // (x.shape[2] // b.shape[2])
    state, rows = initial, []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * (a if a.dim() == 2 else a[:, None]))[:, :, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, heads, None]
        rows.append((state * c[:, t, heads, None]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(rows, 1), state


def gated_delta_in_double(q, k, v, g, beta, initial):
    heads = torch.arange(v.shape[2]) // (v.shape[2] // k.shape[2])
    state, rows = initial, []
    for t in range(v.shape[1]):
        state = torch.exp(g[:, t])[..., None, None] * state
        of_k, of_q = k[:, t, heads, :, None], q[:, t, heads, :, None]
        w = beta[:, t, :, None] * (v[:, t] - (of_k * state).sum(-2))
        state = state + of_k * w[..., None, :]
        rows.append((of_q * state).sum(-2))
    return torch.stack(rows, 1), state


def causal_conv1d_in_double(x, w, bias, initial):
    padded = torch.cat([initial, x], 1).transpose(1, 2)
    return (torch.nn.functional.conv1d(padded, w[:, None], bias, groups=w.shape[0]).transpose(1, 2),)


@pytest.mark.parametrize("name", ["selective_scan", "selective_scan of each state", "gated_delta", "causal_conv1d"])
def test_gradients_are_those_of_the_recurrence(name):
    """Beside autograd in double: what is left is fp32's rounding."""
    operation = name.split()[0]
    if operation == "selective_scan":
        given = tensors(scan_of(2, 40, 4, 8, 2, 12, "fp32", each_state="each" in name))
        given.append(torch.randn(2, 4, 8, 12))
    elif operation == "gated_delta":
        given = [*tensors(delta_of(2, 40, 4, 8, 2, 12, "fp32")), torch.randn(2, 4, 12, 8)]
        given[1] = torch.nn.functional.normalize(given[1], dim=-1)
        given[4] = torch.sigmoid(given[4])
    else:
        given = [torch.randn(2, 40, 8), torch.randn(8, 4), torch.randn(8), torch.randn(2, 3, 8)]
    found = []
    in_double = globals()[f"{operation}_in_double"]
    for dtype, function in ((torch.float32, getattr(ops, operation)), (torch.float64, in_double)):
        operands = [x.detach().to(dtype).requires_grad_() for x in given]
        results = function(*operands)
        results = results if isinstance(results, tuple) else (results,)
        torch.manual_seed(1)
        sum((x * torch.randn(x.shape, dtype=torch.float64).to(dtype)).sum() for x in results).backward()
        found.append([x.grad for x in operands])
    for mine, exact in zip(*found, strict=True):
        assert mine.shape == exact.shape
        assert (mine - exact).abs().max() <= 2e-6 * exact.abs().max() * 4, name


def test_gradients_of_one_result():
    """The other's is not there, and a first state that is not asked for."""
    x, dt, a, b, c, d = (y.requires_grad_() for y in tensors(scan_of(1, 9, 2, 4, 1, 5, "fp32")))
    y, final = ops.selective_scan(x, dt, a, b, c, d)
    alone = torch.autograd.grad(y.sum(), [x, b], retain_graph=True)
    of_state = torch.autograd.grad(final.sum(), [x, b], retain_graph=True)
    both = torch.autograd.grad(y.sum() + final.sum(), [x, b])
    for one, other, together in zip(alone, of_state, both, strict=True):
        assert torch.allclose(one + other, together, 1e-4, 1e-5)
    with pytest.raises(pydet.Error, match="second derivative"):
        torch.autograd.grad(ops.causal_conv1d(x[0], torch.randn(4, 3)).sum(), x, create_graph=True)


# ---- Mixers ----------------------------------------------------------------------------------------------------------

if not importlib.util.find_spec("transformers"):
    if "models" in os.environ.get("PYDET_TEST_EXTRAS", ""):
        raise RuntimeError("PYDET_TEST_EXTRAS has models, and Transformers is not here")
    pytest.skip("no Transformers here", allow_module_level=True)

import transformers  # noqa: E402

from bench import families  # noqa: E402
from pydet.torch import scans  # noqa: E402

FAMILIES = ["jamba", "mamba", "mamba2", "falcon_h1", "bamba", "qwen3_next"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return families.build(request.param, torch.float32)


def test_a_batch_and_padding_change_nothing(model):
    assert families.seen(model).elements[0] == 0


def test_decoding_has_the_bits_of_a_prefill(model):
    assert families.decoded(model) == 0
    assert families.decoded(model, gradients=True) == 0


def test_nothing_that_scans_is_left(model):
    report = pt.convert(model)
    assert not any("scan" in why or "delta" in why for why in report.left.values()), report
    assert any(scans.is_scan(module) for module in model.modules())


def test_a_prefill_in_pieces(model):
    """With a cache, which Mamba's own prefill does not begin from."""
    if model.config.model_type in ("jamba", "mamba"):
        pytest.skip("Transformers' scan has no first state there")
    ids, cache, rows = families.ids_of(model, 2, 9), {}, []
    with torch.no_grad(), pt.override_aten():
        whole = model(ids, use_cache=False).logits
        for part in (slice(0, 4), slice(4, 8), slice(8, 9)):
            places = {"position_ids": torch.arange(9)[part].expand(2, -1)} if families.takes_places(model) else {}
            step = model(ids[:, part], use_cache=True, **places, **cache)
            cache = families.cache_of(step)
            rows.append(step.logits)
    same(torch.cat(rows, 1), whole)


def test_what_a_mixer_computes_is_stocks():
    """Beside pydet.torch.check of every family: the logits are within rounding of those before."""
    for family in ("mamba2", "qwen3_next"):
        model = families.build(family, torch.float32)
        found = families.seen(model)
        assert found.difference is not None and found.difference < 1e-4


def test_a_converted_mixer_can_be_pickled_and_copied():
    model = families.build("mamba2", torch.float32)
    ids = families.ids_of(model, 1, 5)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        same(pickle.loads(pickle.dumps(model))(ids, use_cache=False).logits, want)


def test_steps_have_the_limits_of_a_prefill():
    """As of Zamba2 and Nemotron-H, whose decoding in Transformers has none."""
    model = families.build("mamba2", torch.float32)
    without = families.decoded(model)
    for module in model.modules():
        if scans.is_scan(module):
            module.time_step_limit = (0.5, 0.7)
    ids = families.ids_of(model, 1, 5)
    with torch.no_grad():
        limited = model(ids, use_cache=False).logits
        assert families.decoded(model) == without == 0
        for module in model.modules():
            if scans.is_scan(module):
                module.time_step_limit = (0.0, float("inf"))
        differ(model(ids, use_cache=False).logits, limited)


def test_training(model):
    """A batch has the gradients of its sequences one by one, of all parameters, in main_grad."""
    assert families.trained(model) == 0
    found = pt.accumulate_gradients(model)
    outside = [name for name in found.outside if "norm" not in name and "router" not in name]
    assert not outside, outside


def test_training_in_bfloat16():
    for family in ("mamba2", "qwen3_next", "mamba"):
        assert families.trained(families.build(family, torch.bfloat16)) == 0


def test_a_gated_norm_of_another_name():
    model = families.build("olmo_hybrid", torch.float32)
    assert families.gradients_that_differ(model) == {} and not pt.accumulate_gradients(model).outside
    assert not pt.convert(model).attention, "linear attention is the scan"


def test_gradients_without_sums_are_those_of_stock():
    """In grad, as autograd has them, in fp32 within rounding of Transformers' own."""
    for family in ("mamba2", "qwen3_next", "mamba"):
        model = families.build(family, torch.float32)
        stock = transformers.AutoModelForCausalLM.from_config(model.config).eval()
        stock.load_state_dict(model.state_dict())
        ids = families.ids_of(model, 2, 9)
        for each in (model, stock):
            logits = each(ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        for (name, mine), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
            assert mine.grad is not None, name
            far = (mine.grad - theirs.grad).abs().max()
            assert far <= 1e-3 * theirs.grad.abs().max() + 1e-6, (family, name, far)


def test_packed_sequences():
    """Of one row, by seq_idx or their boundaries: each mixer has the bits of the sequences alone."""
    for family, named in (("bamba", "seq_idx"), ("qwen3_next", "cu_seq_lens_q")):
        model = families.build(family, torch.float32)
        mixer = next(module for module in model.modules() if scans.is_scan(module))
        x, starts = torch.randn(1, 9, 32), torch.tensor([0, 4, 9], dtype=torch.int32)
        given = {"seq_idx": torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32), "cu_seq_lens_q": starts}[named]
        with torch.no_grad(), pt.override_aten():
            together = mixer(x, **{named: given})
            apart = torch.cat([mixer(x[:, :4]), mixer(x[:, 4:])], 1)
            same(together, apart)
            differ(mixer(x), apart)


def test_what_is_not_known_is_left():
    model = families.build("mamba2", torch.float32)
    mixer = next(module for module in model.modules() if scans.is_scan(module))
    kind = type(mixer).__bases__[1]
    mixer.__class__ = kind
    assert issubclass(scans.scan_class(mixer), scans.Scan)
    known = inspect.unwrap(kind.forward).__globals__
    was = known["mamba2_chunk_scan"]
    try:
        known["mamba2_chunk_scan"] = lambda hidden_states, dt: None
        assert scans.scan_class(mixer).startswith("its mamba2_chunk_scan takes (hidden_states, dt), and the one known")
    finally:
        known["mamba2_chunk_scan"] = was


def test_a_scan_of_another_kind_is_left():
    """Kimi's delta rule decays each key by itself."""
    kind = transformers.models.kimi_linear.modeling_kimi_linear
    names = [name for name in vars(kind) if name.startswith("KimiLinear") and "Delta" in name]
    module = torch.nn.Module.__new__(getattr(kind, names[0]))
    torch.nn.Module.__init__(module)
    assert "has no counterpart here" in scans.scan_class(module)
