"""Scans as operators of PyTorch, and Transformers' mixers that scan, converted."""

import importlib.util
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
            name = "cache" if "cache" in step else "past_key_values"
            cache = {name: step[name]}
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
    known = kind.forward.__wrapped__.__wrapped__.__globals__
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
