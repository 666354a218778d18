"""pydet.torch.check: what a forward of a model showed, beside the model as it was; and nothing of it changes."""

import copy
import os
import pickle
import random
import subprocess
import sys
import typing

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402
from pydet.torch.stock import as_stock  # noqa: E402
from torch_bits import normal, same  # noqa: E402


class Scan(torch.nn.Module):
    def forward(self, x):
        return self.carried(x)

    def carried(self, x):
        return torch.exp(-torch.cumsum(x, 1))


class Mixing(torch.nn.Module):
    """Attention by another name: a token is an average of its row's."""

    def __init__(self, size):
        super().__init__()
        self.q, self.out = torch.nn.Linear(size, size), torch.nn.Linear(size, size)

    def forward(self, x, mask=None):
        scores = torch.matmul(self.q(x), x.transpose(1, 2))
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :].bool(), -1e9)
        return self.out(torch.softmax(scores, -1) @ x)


class OfItsPlace(torch.nn.Module):
    """What no module should do: a row's result is by its place in the batch."""

    def forward(self, x):
        return x + 1e-3 * torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1))


class Inside(torch.nn.Module):
    """The same between its modules."""

    def __init__(self, size, step=1e-3):
        super().__init__()
        self.a, self.b, self.step = torch.nn.Linear(size, size), torch.nn.Linear(size, size), step

    def forward(self, x):
        h = self.a(x)
        h = h + self.step * torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1))
        return self.b(h)


class Model(torch.nn.Module):
    """Tokens to logits, by an embedding, a middle, and a head."""

    def __init__(self, middle=None, size=16):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle = torch.nn.Embedding(11, size), middle or torch.nn.Linear(size, size)
        self.norm, self.head = torch.nn.LayerNorm(size), torch.nn.Linear(size, 11)
        self.takes = "mask" in self.middle.forward.__code__.co_varnames

    def forward(self, input_ids, attention_mask=None, labels=None):
        h = self.embed(input_ids)
        h = self.middle(h, attention_mask) if self.takes else self.middle(h)
        logits = self.head(self.norm(h))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def tokens(rows=3, count=7):
    return torch.randint(0, 11, (rows, count), generator=torch.Generator().manual_seed(1))


def test_nothing_varies_and_stock_is_near():
    model = Model()
    pt.convert(model)
    found = pt.check(model, {"input_ids": tokens()})
    assert found.elements == (0, 3 * 7 * 11) and not found.varying and found.first is None and not found.varies
    assert 0 < found.difference < 1e-5 < found.rounding < 1e-2 and not found.differs and found.rows == 3
    assert found.stock_elements[1] == 3 * 7 * 11
    assert found.left == {"embed": "Embedding calls embedding, which copies rows"} and not found.skipped
    assert str(found).endswith(found.verdict())
    assert "In this batch no element of 231 varies" in found.verdict() and "It computes what stock does" in str(found)


@pytest.mark.parametrize(
    "batch", [tokens(), (tokens(),), [tokens(), None], {"input_ids": tokens(), "labels": tokens()}]
)
def test_forms_of_a_batch(batch):
    model = Model()
    pt.convert(model)
    found = pt.check(model, batch)
    assert found.elements == (0, 231), "a loss is of the batch, and is not compared by rows"
    assert not found.varies and not found.differs


def test_a_module_that_varies_is_named():
    for middle, first, said in (
        (OfItsPlace(), "middle", "what it is given does not vary: it is OfItsPlace"),
        (Inside(16), "middle.b", "what it is given varies already, by code of middle (Inside)"),
        (torch.nn.Sequential(torch.nn.Linear(16, 16), OfItsPlace()), "middle.1", "does not vary: it is OfItsPlace"),
    ):
        model = Model(middle)
        pt.convert(model)
        found = pt.check(model, tokens())
        assert found.first == first and said in found.made_by, found
        assert 0 < found.elements[0] <= 231 and found.varies and "embed" not in found.varying
        assert found.varying["middle"][0] == 2 * 7 * 16 and found.varying["middle"][1] == 3 * 7 * 16, "row 0 does not"
        assert next(iter(found.varying)) == first and list(found.varying)[-1] == ""
        assert "The model is NOT batch-invariant" in found.verdict() and found.first in str(found)
        assert found.stock_elements[0] and found.stock_varying, "and stock as well"


def test_what_varies_in_the_model_and_not_in_its_result():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), OfItsPlace(), torch.nn.Threshold(100.0, 0.0))
    found = pt.check(model, normal(4, 8))
    assert found.elements == (0, 32) and list(found.varying) == ["1"] and found.varies
    assert "No element of 32 varies in this batch, but within the model results of 1 modules do" in found.verdict()
    assert "the model is not converted; it was for this" in found.notes


def test_a_result_that_is_not_that_of_stock(monkeypatch):
    """As of sparse attention that was computed as a dense one."""
    model = Model()
    pt.convert(model)
    own = pt.LayerNorm.forward
    for step, differs in ((1e-7, False), (0.5, True), (float("nan"), True)):
        monkeypatch.setattr(pt.LayerNorm, "forward", lambda self, x, step=step: own(self, x) + step)
        found = pt.check(model, tokens())
        assert found.differs is differs, found
        assert ("It does NOT compute what stock does" in found.verdict()) is differs
        with (
            pytest.raises(pydet.Error, match=r"strict, and this was seen") if differs else pytest.MonkeyPatch.context()
        ):
            pt.convert(copy.deepcopy(model), sample=tokens(), strict=True)
    monkeypatch.undo()
    other = Model()
    with torch.no_grad():
        other.head.bias += 1
    assert pt.check(model, tokens(), stock=other).differs and not pt.check(model, tokens(), stock=Model()).differs


def test_the_model_is_as_it_was():
    class Noting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.longest, self.drop, self.fails = 0, torch.nn.Dropout(0.5), False

        def forward(self, x):
            self.calls += 1
            self.longest = max(self.longest, x.shape[0])
            self.register_buffer("late", torch.ones(2))
            if self.fails and len(x) == 1:
                raise KeyError("a row alone")
            return self.drop(x) + random.random() * torch.rand(())

    hooks = []
    for is_converted in (False, True):
        hooks.clear()
        model = Model(Noting())
        model.norm.eval()
        if is_converted:
            pt.convert(model)
        model.head.register_forward_hook(lambda *rest, hooks=hooks: hooks.append(1))

        def state(model=model):
            kept = [(type(m), m.training, sorted(m.__dict__), dict(m._forward_hooks)) for m in model.modules()]
            more = [m._forward_pre_hooks for m in model.modules() if m._forward_pre_hooks]
            numbers = torch.get_rng_state().tolist(), random.getstate()
            buffers = {name: x.tolist() for name, x in model.named_buffers()}
            return kept, more, numbers, buffers, model.middle.longest

        before = state()
        assert pt.check(model, tokens()).elements == (0, 231), "the same numbers are drawn each time"
        assert hooks and state() == before
        model.middle.fails = True
        with pytest.raises(KeyError, match="a row alone"):
            pt.check(model, tokens())
        assert state() == before
        with pytest.raises(KeyError, match="a row alone"):
            pt.convert(model, sample=tokens())
        assert state() == before


def masked(model, mask):
    return pt.check(model, {"input_ids": tokens(), "attention_mask": mask})


def test_padding_and_rows_cut_to_their_own_length():
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, :3], mask[2, 5:] = 0, 0
    model = Model()
    pt.convert(model)
    found = masked(model, mask)
    assert found.elements == (0, 231 + 11 * (4 + 5)), "the padded rows, and they without their padding"
    assert "rows are padded on the left, and the forward was given no position_ids" in found.notes

    class OfItsLength(torch.nn.Module):
        def forward(self, x):
            return x + 1e-3 * x.shape[1]

    model = Model(OfItsLength())
    pt.convert(model)
    assert masked(model, torch.ones(3, 7, dtype=torch.long)).elements[0] == 0
    found = masked(model, mask)
    assert found.first == "middle" and found.varying["middle"] == (16 * 9, 16 * (21 + 9)), "only where it is cut"

    class OfThePadding(torch.nn.Module):
        def forward(self, x, mask):
            return x.masked_fill(mask[..., None] == 0, 7.0)

    wrong = Model(OfThePadding())  # in stock padding is a thing of its own, and no difference to speak of
    twin = copy.deepcopy(wrong)
    pt.convert(wrong)
    with torch.no_grad():
        twin.middle.forward = lambda x, mask: x.masked_fill(mask[..., None] == 0, 70.0)
    found = pt.check(wrong, {"input_ids": tokens(), "attention_mask": mask}, stock=twin)
    assert not found.differs and found.difference < 1e-5
    holes = torch.ones(3, 7, dtype=torch.long)
    holes[1, 3] = 0
    assert masked(model, holes).elements == (0, 231), "a row with a hole keeps its mask"


def test_positions_of_rows_that_are_padded_on_the_left():
    class Placed(Model):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1])[None]
            seen.append(position_ids.tolist())
            return self.head(self.embed(input_ids) + position_ids[..., None])

    seen, model = [], Placed()
    pt.convert(model)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [1] * 7])
    found = masked(model, mask)
    assert not found.varies and [[0, 0, 0, 1, 2, 3, 4]] in seen and [[0, 1, 2, 3, 4]] in seen
    assert "position_ids were counted from each row's first token, as generate() does" in found.notes
    given = {"input_ids": tokens(), "attention_mask": mask, "position_ids": torch.arange(3, 10)[None]}
    seen.clear()
    assert not pt.check(model, given).varies and [[5, 6, 7, 8, 9]] in seen and [list(range(3, 10))] in seen


def test_what_is_left_to_pytorch_is_named_by_what_it_calls():
    model = Model(Mixing(16))
    report = pt.convert(model)
    assert report.attention == {"middle": "Mixing by code of its own (@, matmul, softmax)"}, "whatever its name"
    found = pt.check(model, tokens())
    assert found.left["middle"] == "Mixing calls bmm x 2, _softmax"
    with pt.override_aten():
        assert pt.check(model, tokens()).left["middle"] == "Mixing calls _softmax"

    class Convolved(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv1d(16, 16, 5, padding=2)

        def forward(self, x):
            return self.conv(x.transpose(1, 2)).transpose(1, 2)

    model = Model(Scan())
    report = pt.convert(model)
    assert report.left == {
        "middle": "Scan scans over tokens in code of its own (cumsum); override_aten() catches its mm, addmm and bmm"
    }
    assert pt.check(model, tokens()).left["middle"] == "Scan calls cumsum"
    with pytest.raises(pydet.Error, match="1 left, Scan scans over tokens"):
        pt.convert(Model(Scan()), strict=True)
    model = Model(Convolved())
    pt.convert(model)
    assert pt.check(model, tokens()).left["middle.conv"] == "Conv1d calls convolution"

    class Outer(torch.nn.Module):
        def forward(self, x):
            places = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None].expand(len(x), -1, 1)
            return x + places @ torch.ones(len(x), 1, x.shape[2])

    model = Model(Outer())
    pt.convert(model)
    assert "middle" not in pt.check(model, tokens()).left, "a product of one number is no sum"


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


F = torch.nn.functional
SUMS = {  # by what PyTorch's operator is called
    "_trilinear": lambda x: F.bilinear(x, x, torch.ones(2, 8, 8)),
    "_embedding_bag_forward_only": lambda x: F.embedding_bag(torch.arange(4).expand(len(x), 4), torch.ones(4, 8)),
    "_fft_r2c": torch.fft.rfft,
    "_fft_c2c": lambda x: torch.fft.fft2(x).real,
    "_euclidean_dist": lambda x: torch.cdist(x.expand(-1, 30, -1), x.expand(-1, 30, -1) + 1),
    "linalg_inv_ex": lambda x: torch.linalg.inv(torch.eye(8) + x * x.mT / 99),
    "_linalg_solve_ex": lambda x: torch.linalg.solve(torch.eye(8) + x * x.mT / 99, x.mT),
    "avg_pool3d": lambda x: F.avg_pool3d(x.view(-1, 1, 2, 2, 2), 2),
    "_adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x.view(-1, 1, 2, 2, 2), (1, 1, 2)),
    "upsample_linear1d": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"),
    "segment_reduce": lambda x: torch.segment_reduce(x.mT, "sum", lengths=torch.full((len(x), 1), 8), axis=1),
    "index_put_, which accumulates": lambda x: torch.zeros(len(x)).index_put_(
        (torch.arange(len(x)),), x[:, 0, 0], True
    ),
    "glu, by place on a CPU": F.glu,
    "celu, by place on a CPU": F.celu,
    "pow, by place on a CPU": lambda x: x.abs() ** 1.7,
    "sinh, by place on a CPU": torch.sinh,
    "cosh, by place on a CPU": torch.cosh,
    "atan2, by place on a CPU": lambda x: torch.atan2(x, x + 1),
    "logaddexp, by place on a CPU": lambda x: torch.logaddexp(x, 2 * x),
    "mul, by place on a CPU": lambda x: torch.view_as_real(torch.complex(x, x) * torch.complex(x, x)),
    "": lambda x: x**2 + torch.where(x > 0, x, 2.0).index_put((torch.arange(1),), x[:1]),  # nothing of the kind
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_and_functions_of_a_place_are_named(name):
    found = pt.check(torch.nn.Sequential(torch.nn.Linear(8, 8), Calls(SUMS[name])), normal(3, 1, 8))
    assert found.left == ({"1": f"Calls calls {name}"} if name else {}) and found.may_vary == list(found.left)
    assert ("In others it may: 1 modules call" in found.verdict()) == (bool(name) and not found.elements[0])


def test_results_without_rows_are_named():
    class Statistics(torch.nn.Module):
        def forward(self, x):
            return x.mean(0)

    class Sorted(torch.nn.Module):
        def forward(self, x):
            return x[x[:, 0] > 0]

    model = torch.nn.Module()
    model.linear, model.statistics, model.sorted = torch.nn.Linear(8, 8), Statistics(), Sorted()
    model.forward = lambda x: (model.statistics(x), model.sorted(x), model.linear(x))[2]
    found = pt.check(model, normal(5, 8))
    assert found.skipped["statistics"] == "its result is one for the whole batch" and "sorted" in found.skipped
    assert not found.varying and found.elements == (0, 40)
    found = pt.check(torch.nn.Sequential(torch.nn.Linear(8, 8), Statistics()), normal(5, 8))
    assert "No result could be compared by rows, so this says nothing of the batch." in found.verdict()


def test_sample():
    model, twin = Model(Inside(16)), Model(Inside(16, 0.0))
    report = pt.convert(model, sample=tokens())
    assert report.seen.first == "middle.b" and report.verdict() == report.seen.verdict()
    assert str(report).endswith(str(report.seen)) and type(model.head) is pt.Linear
    kinds = [type(m) for m in Model(Inside(16)).modules()]
    strict = Model(Inside(16))
    with pytest.raises(pydet.Error, match=r"^convert: strict, and this was seen: The model is NOT batch-invariant"):
        pt.convert(strict, sample=tokens(), strict=True)
    assert [type(m) for m in strict.modules()] == kinds and set(vars(strict.head)) == set(vars(Model().head))
    assert pt.convert(twin, sample=tokens(), strict=True).seen.elements == (0, 231)
    unseen = pt.convert(Model())
    assert unseen.seen is None and "This rests on classes, names and the names in their code" in unseen.verdict()


def test_copies_and_pickles_know_no_less_than_they_can():
    model = Model()
    want = model(tokens())["logits"]
    pt.convert(model)
    assert pt.check(copy.deepcopy(model), tokens()).difference is not None
    found = pt.check(pickle.loads(pickle.dumps(model)), tokens())
    assert found.difference is None and any("of no module is known what it was" in note for note in found.notes)
    assert "It was not compared with stock." in found.verdict() and found.elements == (0, 231)
    again = pt.check(pickle.loads(pickle.dumps(model)), tokens(), stock=Model())
    assert again.difference < 1e-5
    pt.convert(model, fp8=lambda name, _: name == "head")  # a second time, over the first
    assert type(model.head) is pt.Fp8Linear
    with as_stock(model):
        assert type(model.head) is torch.nn.Linear and "weight_scale_inv" not in vars(model.head)
        same(model(tokens())["logits"], want)
    assert type(model.head) is pt.Fp8Linear and not pt.check(model, tokens()).differs


class Writes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.inside(x.mul_(2.0))


def test_a_forward_that_writes_its_input():
    x = normal(4, 8)
    before, seen = x.clone(), pt.check(Writes(), x)
    same(x, before)
    assert not seen.varies and not seen.differs and seen.elements == (0, 32)


class Pair(typing.NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor


class TakesPair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(8, 8)

    def forward(self, pair):
        return self.inside(pair.x * pair.scale)


def test_a_named_tuple_is_given_on_as_one():
    seen = pt.check(TakesPair(), {"pair": Pair(normal(4, 8), normal(4, 8))})
    assert not seen.varies and not seen.differs and seen.elements == (0, 32)


def test_a_compiled_model_is_looked_at_as_it_is_written():
    net = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()), backend="eager")
    pt.convert(net)
    seen = pt.check(net, normal(4, 8))
    assert seen.elements == (0, 32) and not seen.left and not seen.differs


def test_refusals():
    with pytest.raises(pydet.Error, match=r"^check: model is int, want a torch\.nn\.Module"):
        pt.check(3, tokens())
    for batch, words in (
        (tokens(1), "batch has 1 rows, want 2 or more: a row alone is compared with it"),
        ({"labels": None}, "batch is dict without a tensor that has rows"),
        ({"input_ids": tokens(), "past_key_values": object()}, r"batch\['past_key_values'\] is object, want tensors"),
        ((tokens(), [object()]), r"attention_mask\[0\] is object, want tensors"),
    ):
        with pytest.raises(pydet.Error, match=f"^check: {words}"):
            pt.check(Model(), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_transformers(need, dtype):
    try:
        import transformers
    except ImportError:
        need(False, "models", "no Transformers here")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**sizes, **moe, num_key_value_heads=2, head_dim=8, initializer_range=0.2)
    model = transformers.Qwen3MoeForCausalLM(config).eval().to(dtype)
    pt.register_attention()
    ids, mask = torch.randint(3, 64, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    before = model.config._attn_implementation, model.config._experts_implementation
    assert pt.check(model, {"input_ids": ids, "attention_mask": mask}).elements[1] == 64 * (27 + 5)
    assert (model.config._attn_implementation, model.config._experts_implementation) == before
    model.set_attn_implementation("pydet")
    is_exact = dtype == torch.float32  # in bf16 rounding may change what a router chooses
    report = pt.convert(model, sample={"input_ids": ids, "attention_mask": mask}, strict=is_exact)
    found = report.seen
    assert found.elements == (0, 64 * (27 + 5)) and not found.varies and not (is_exact and found.differs), report
    assert not found.differs or "rounding changed a router's choice, so look in float32." in found.verdict()
    assert found.difference > 0 and (found.stock_elements[0] > 0) >= is_exact, "stock's attention is its own"
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("pydet", "pydet")
    assert found.left["model.embed_tokens"] == "Embedding calls embedding, which copies rows"
    assert "topk, which chooses" in found.left["model.layers.0.mlp.gate"]
    assert found.skipped["model.layers.0.mlp.experts.act_fn"] == "its tokens are sorted by expert"
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("sdpa")
    assert any("_scaled_dot_product" in what for what in pt.check(eager, ids).left.values())


LOADED = """
import pickle, sys, torch
model, ids, want = torch.load(sys.argv[1], weights_only=False)
got = model(ids).logits
assert torch.equal(got, want), (got - want).abs().max()
import pydet.torch
print(type(model.lm_head).__module__, pydet.torch.stock.registered)
"""


def test_a_pickled_model_in_a_new_process(need, tmp_path):
    """Its configuration names attention and experts that the process has not registered; options decide bits."""
    try:
        import transformers
    except ImportError:
        need(False, "models", "no Transformers here")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64}
    config = transformers.Qwen3MoeConfig(**sizes, **moe, num_key_value_heads=2, head_dim=8)
    model, ids = transformers.Qwen3MoeForCausalLM(config).eval(), torch.randint(3, 64, (2, 9))
    pt.register_attention(kv_chunk=128)
    try:
        model.set_attn_implementation("pydet")
        pt.convert(model)
        with torch.no_grad():
            torch.save((model, ids, model(ids).logits), tmp_path / "model")
    finally:
        pt.register_attention()
    root = os.path.dirname(os.path.dirname(pydet.__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", LOADED, tmp_path / "model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "pydet.torch.modules {'pydet': ('auto', 128)}"
    with pytest.warns(
        UserWarning, match=r"registered with arithmetic and kv_chunk \('auto', 128\), and here it is with"
    ):
        torch.load(tmp_path / "model", weights_only=False)


def test_a_model_dispatched_from_disk(need, tmp_path):
    """accelerate's hooks call the forward that the module had; converted after, they call pydet's."""
    try:
        from accelerate import disk_offload
        from accelerate.hooks import remove_hook_from_submodules
    except ImportError:
        need(False, "models", "no accelerate here")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.RMSNorm(16, eps=1e-6), torch.nn.LayerNorm(16))
    x, twin = normal(4, 16), copy.deepcopy(net)
    stock = twin(x)
    pt.convert(twin)
    disk_offload(net, str(tmp_path), execution_device=torch.device("cpu"))
    assert net[0].weight.is_meta
    report = pt.convert(net, strict=True)
    assert report.swapped == {"0": "Linear", "1": "RMSNorm", "2": "LayerNorm"}
    same(net(x), twin(x))
    with as_stock(net):
        same(net(x), stock)
    same(net(x), twin(x))
    hooked = torch.nn.Sequential(torch.nn.Linear(16, 16))
    disk_offload(hooked, str(tmp_path / "other"), execution_device=torch.device("cpu"))
    remove_hook_from_submodules(hooked)
    assert "forward" in vars(hooked[0]) and not pt.convert(hooked).left, "what the hooks leave is the class's own"
    same(hooked[0](x), pt.linear(x, hooked[0].weight, hooked[0].bias))
