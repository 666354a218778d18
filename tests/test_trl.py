"""TRL's trainers with a converted model: their log-probabilities are the sampler's, or check_trainer says that they
are not."""

import functools
import importlib.util
import os
import types

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet  # noqa: E402
import pydet.torch as pt  # noqa: E402

BYPASSED = r"^check_trainer: the {} of {} has a forward of {}, which multiplies the weight of the converted head itself"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 16)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x):
        return self.lm_head(self.body(x))


class Casting(Model):
    def forward(self, x):  # as Mamba's
        return self.lm_head(self.body(x).to(self.lm_head.weight.dtype))


def fused(model):
    """The model as TRL's add_fused_lm_head leaves it."""

    @functools.wraps(type(model).forward)
    def forward(self, x):
        head = self.get_output_embeddings()
        return torch.nn.functional.linear(self.body(x), head.weight, head.bias)

    model.forward = types.MethodType(forward, model)
    return model


def test_a_head_that_is_never_called_is_seen():
    plain, patched = Model(), fused(Model())
    pt.convert(plain), pt.convert(patched)
    pt.check_trainer(types.SimpleNamespace(model=plain, ref_model=None))
    casting = Casting()
    pt.convert(casting)
    casting.forward = functools.wraps(casting.forward)(lambda x, inner=casting.forward: inner(x))  # as accelerate's
    pt.check_trainer(types.SimpleNamespace(model=casting))
    pt.check_trainer(types.SimpleNamespace(model=fused(Model())))  # not converted: nothing was promised
    trainers = {"model": {"model": patched}, "ref_model": {"model": plain, "ref_model": torch.nn.Sequential(patched)}}
    for name, models in trainers.items():
        trainer = types.SimpleNamespace(**models)
        with pytest.raises(pydet.Error, match=BYPASSED.format(name, "SimpleNamespace", __name__)) as caught:
            pt.check_trainer(trainer)
        assert "\n" not in str(caught.value) and "override_aten" in str(caught.value)
        with pt.override_aten():
            pt.check_trainer(trainer)
    by_class = type("Patched", (Model,), {"__module__": "elsewhere", "forward": types.FunctionType(
        fused(Model()).forward.__func__.__code__, {**globals(), "__name__": "liger"})})()  # fmt: skip
    pt.convert(by_class)
    with pytest.raises(pydet.Error, match=BYPASSED.format("model", "SimpleNamespace", "liger")):
        pt.check_trainer(types.SimpleNamespace(model=by_class))
    for wrong in (3, types.SimpleNamespace(model=None)):
        with pytest.raises(pydet.Error, match=r"^check_trainer: trainer is .*, want one that has a model$"):
            pt.check_trainer(wrong)


HIDDEN, LENGTH, KEPT = 512, 12, 8


@pytest.fixture
def trainer(need, tmp_path):
    """GRPO's, of a converted Llama."""
    for package in ("trl", "datasets", "transformers", "tokenizers"):
        need(importlib.util.find_spec(package), "trl", f"no {package} here")
    import datasets
    import tokenizers
    import transformers
    import trl

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>"
    )
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **sizes, num_key_value_heads=2, vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=1
        )
    )
    pt.register_attention()
    model.set_attn_implementation("pydet")
    pt.convert(model, strict=True)
    options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": KEPT, "max_steps": 1}
    options |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    made = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **more: [float(len(set(text.split()))) for text in completions],
        args=trl.GRPOConfig(str(tmp_path), **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w3 w4 w5", "w6 w7 w8"] * 4}),
        processing_class=tokenizer,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # PyTorch's own exp has other bits at the end of a thread's share
    yield made
    torch.set_num_threads(threads)


@torch.no_grad()
def sampled(trainer, ids):
    """The log-probabilities of a rollout, one token at a time, by the formula of TRL's fused head."""
    cache, logits = None, []
    for i in range(ids.shape[1] - 1):
        step = trainer.model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        logits.append(step.logits[:, -1])
    z = torch.stack(logits, 1).float() * (1 / trainer.temperature)
    largest = z.amax(-1)
    sums = (z - largest[..., None]).exp().sum(-1)
    return (z.gather(-1, ids[:, 1:, None])[..., 0] - (largest + sums.log()))[:, -KEPT:]


@torch.no_grad()
def learned(trainer, ids):
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), KEPT)[0]


def test_the_log_probabilities_of_trainer_and_sampler(trainer):
    """The same bits at hidden 512 under override_aten. Without it they differ, and the check speaks."""
    ids = torch.randint(2, 64, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    trainer.model.eval()
    calls = []
    trainer.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert not torch.equal(learned(trainer, ids), sampled(trainer, ids)), "then the check is needless"
    assert len(calls) == LENGTH - 1, "the sampler's alone"
    with pytest.raises(pydet.Error, match=BYPASSED.format("model", "GRPOTrainer", r"trl\.trainer\.utils")):
        pt.check_trainer(trainer)
    with pt.override_aten() as caught:
        pt.check_trainer(trainer)
        mine, theirs = learned(trainer, ids), sampled(trainer, ids)
        for n in (1, 3):  # of fewer sequences too
            assert torch.equal(learned(trainer, ids[:n]), mine[:n])
    assert caught["aten::mm.out"] > 0
    assert mine.shape == (4, KEPT) and bool(mine.isfinite().all()) and torch.equal(mine, theirs)


def test_main_grad_of_a_head_that_is_never_called(trainer):
    """A loss of TRL's fused head under accumulate_gradients is refused: main_grad would stay zero."""
    ids = torch.randint(2, 64, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    parameters = pt.accumulate_gradients(trainer.model)
    assert any(p is trainer.model.lm_head.weight for p in parameters)
    loss = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), KEPT)[0].sum()
    with pytest.raises(pydet.Error, match=r"lm_head\.weight got a gradient from outside its module's forward"):
        loss.backward()
