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
import pydet.torch.fused  # noqa: E402
from torch_bits import same  # noqa: E402

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


TAKES = r"^check_trainer: {} takes the weight of the converted head instead of calling it, so that log-probabilities d"


def product(model, x):
    return x @ model.lm_head.weight.T


def by_helper(model, x):
    return product(model, x)


def decorated(function):
    return lambda *given: function(*given)  # without functools.wraps


class Calling:
    """A trainer that calls the head. What is not part of a loss may read the weight."""

    def __init__(self):
        self.model = Model()
        pt.convert(self.model)
        self.before = self.model.lm_head.weight.norm()

    def compute_loss(self, x):
        return self._loss(x.to(self.model.lm_head.weight.dtype))

    def _loss(self, x):
        return self.model(x).sum()

    def save(self):
        return self.model.lm_head.weight.clone()


class Own(Calling):
    def _loss(self, x):
        return (self.model.body(x) @ self.model.get_output_embeddings().weight.T).sum()


class Inherits(Own):
    def compute_loss(self, x):
        return super().compute_loss(x)


class Asks(Own):
    def compute_loss(self, x):
        return super()._loss(x)

    def _loss(self, x):
        return Calling._loss(self, x)


class Mended(Own):
    def _loss(self, x):
        return self.model(x).sum()


class Within(Calling):
    def compute_loss(self, x):
        def log_probs(hidden, head):
            return hidden @ head.weight.T

        return log_probs(x, self.model.lm_head)


class Helped(Calling):
    def prediction_step(self, x):
        return by_helper(self.model, x)


class Decorated(Calling):
    compute_loss = decorated(Own._loss)


class Partial(Calling):
    compute_loss = functools.partialmethod(Own._loss)


class Unread(Calling):
    compute_loss = len


@pytest.mark.parametrize("kind", [Calling, Mended, Own, Inherits, Asks, Within, Helped, Decorated, Partial, Unread])
def test_a_trainer_that_takes_the_weight_itself(kind):
    """Is refused by the method's name, whatever helps it to the weight, and nothing is changed."""
    trainer = kind()
    if kind in (Calling, Mended):
        pt.check_trainer(trainer)
        trainer.compute_loss = decorated(trainer.compute_loss)
        trainer.kept = product  # which it never calls
        pt.check_trainer(trainer)
        trainer.compute_loss_func = by_helper
        with pytest.raises(pydet.Error, match=TAKES.format(rf"{kind.__name__}\.compute_loss_func")):
            pt.check_trainer(trainer)
        return
    where = {Inherits: r"Own\._loss", Asks: r"Own\._loss", Own: r"Own\._loss", Helped: r"Helped\.prediction_step"}
    sentence = TAKES.format(where.get(kind, rf"{kind.__name__}\.compute_loss"))
    if kind is Unread:
        sentence = (
            r"^check_trainer: Unread\.compute_loss, a builtin_function_or_method, has no Python code to be read, and"
        )
    with pytest.raises(pydet.Error, match=sentence) as caught:
        pt.check_trainer(trainer)
    assert str(caught.value).endswith("want the trainer made and run under pydet.torch.override_aten()")
    with pt.override_aten():
        pt.check_trainer(trainer)
    trainer.model = Model()  # not converted: nothing was promised
    pt.check_trainer(trainer)


def test_a_head_whose_forward_was_replaced():
    trainer = Calling()
    head = trainer.model.lm_head
    head.forward = functools.wraps(head.forward)(lambda x, inner=head.forward: inner(x))  # as accelerate's
    pt.check_trainer(trainer)
    head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight.float())
    with pytest.raises(
        pydet.Error, match=r"^check_trainer: the head of the model has a forward set on the instance, as"
    ):
        pt.check_trainer(trainer)
    with pt.override_aten():
        pt.check_trainer(trainer)


LENGTH, KEPT = 12, 8
TOKENIZER = {"pad_token": "<pad>", "bos_token": "<eos>", "eos_token": "<eos>"}


@pytest.fixture
def packages(need):
    for package in ("trl", "datasets", "transformers", "tokenizers"):
        need(importlib.util.find_spec(package), "trl", f"no {package} here")


def stock_llama(hidden, **more):
    import transformers

    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, **ids, **more)
    )


def converted_llama(hidden, **more):
    model = stock_llama(hidden, **more)
    pt.register_attention()
    model.set_attn_implementation("pydet")
    pt.convert(model, strict=True)
    return model


def trainer_of(kind, model, directory, **more):
    """GRPO's or SFT's; more: of GRPO's options."""
    import datasets
    import tokenizers
    import transformers
    import trl

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENIZER)
    options = {"per_device_train_batch_size": 4, "max_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none"}
    options |= {"save_strategy": "no", "disable_tqdm": True}
    texts = ["w3 w4 w5", "w6 w7 w8 w9 w10"] * 4
    if kind == "SFT":
        return trl.SFTTrainer(
            model,
            args=trl.SFTConfig(str(directory), **options),
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
        )
    options |= {"num_generations": 4, "max_completion_length": KEPT, "temperature": 0.9, **more}
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **more: [float(len(set(text.split()))) for text in completions],
        args=trl.GRPOConfig(str(directory), **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
    )


@torch.no_grad()
def sampled(trainer, ids):
    """The log-probabilities of a rollout, one token at a time, from the logits that the sampler's head gives."""
    cache, logits = None, []
    for i in range(ids.shape[1] - 1):
        step = trainer.model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        logits.append(step.logits[:, -1])
    z = torch.stack(logits, 1).float() / torch.tensor(getattr(trainer, "temperature", 1.0))
    return pydet.log_prob(z, ids[:, 1:].contiguous())[:, -KEPT:]


def learned(trainer, ids, entropy=False):
    given = {"compute_entropy": True} if entropy else {}
    made = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), KEPT, **given)
    return made[:2] if entropy else made[0]


def some_ids(rows=4, length=LENGTH):
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("hidden", [512, 1000])
def test_the_log_probabilities_of_trainer_and_sampler(packages, tmp_path, hidden):
    """The same bits, by the head that check_trainer routes; without it they differ."""
    trainer, ids = trainer_of("GRPO", converted_llama(hidden), tmp_path), some_ids()
    trainer.model.eval()
    calls = []
    trainer.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    theirs = sampled(trainer, ids)
    with torch.no_grad():
        assert not torch.equal(learned(trainer, ids), theirs), "then the route is needless"
        assert len(calls) == LENGTH - 1, "the sampler's alone"
        pt.check_trainer(trainer)
        pt.check_trainer(trainer)  # once more is no more
        mine, entropy = learned(trainer, ids, entropy=True)
        assert mine.shape == (4, KEPT) and bool(mine.isfinite().all())
        same(mine, theirs)
        for n in (1, 3):  # of fewer sequences too
            some, entropies = learned(trainer, ids[:n], entropy=True)
            same(some, theirs[:n]), same(entropies, entropy[:n])
        same(sampled(trainer, ids), theirs)


def test_gradients_by_the_entropy_of_micro_batches(packages, tmp_path):
    """Under accumulate_gradients every main_grad of one batch is that of micro-batches, of a loss that has entropies
    too. A micro-batch has 256 rows, at which norms may be cut; the head's, in ieee, may be cut anywhere."""
    sums = []
    for size in (4, 2):
        trainer, ids = trainer_of("GRPO", converted_llama(512), tmp_path), some_ids(4, 128)
        pt.check_trainer(trainer)
        pt.accumulate_gradients(trainer.model)
        for start in range(0, 4, size):
            logps, entropy = learned(trainer, ids[start : start + size], entropy=True)
            (logps.sum() * 0.25 + entropy.sum() * 0.125).backward()
        head = trainer.model.lm_head.weight
        assert head.grad is None and head.main_grad.any()
        sums.append({n: p.main_grad for n, p in trainer.model.named_parameters() if hasattr(p, "main_grad")})
    assert len(sums[0]) > 8
    for name, value in sums[0].items():
        same(sums[1][name], value)


def given_to_loss(kind, ids):
    """What compute_loss gets of sequences that end in KEPT tokens of a completion."""
    seen = torch.ones_like(ids)
    if kind == "SFT":
        return {"input_ids": ids, "attention_mask": seen, "labels": ids.index_fill(1, torch.arange(8), -100)}
    parts = {"prompt": slice(None, -KEPT), "completion": slice(-KEPT, None)}
    inputs = {f"{name}_ids": ids[:, part] for name, part in parts.items()}
    inputs |= {f"{name}_mask": seen[:, part] for name, part in parts.items()}
    return inputs | {"advantages": ids[:, 0] % 7 - 3.0, "num_items_in_batch": torch.tensor(32 * KEPT)}


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("hidden", [512, 1000])
def test_the_loss_of_a_trainer(packages, tmp_path, hidden, dtype, kind):
    """compute_loss of one batch and of micro-batches: every log-probability is the sampler's, every gradient the same.

    A micro-batch has 256 rows, at which norms may be cut, of which 240 come to the head."""
    ids, sums, found = some_ids(32, 8 + KEPT), [], []
    for size in (32, 16):
        model = converted_llama(hidden).to(dtype)
        trainer = trainer_of(kind, model, tmp_path)
        pt.check_trainer(trainer)
        pt.accumulate_gradients(model.train())
        trainer.current_gradient_accumulation_steps = 1  # as its loop says; the loss is over the tokens of all parts
        model.register_forward_hook(lambda _, given, made: found.append(getattr(made, "log_probs", None)))
        for part in ids.split(size):
            trainer.compute_loss(
                model, given_to_loss(kind, part), num_items_in_batch=torch.tensor(32 * KEPT)
            ).backward()
        sums.append({name: p.main_grad for name, p in model.named_parameters() if hasattr(p, "main_grad")})
        assert len(sums[-1]) > 8 and all(p.grad is None for p in model.parameters())
    theirs = sampled(trainer, ids)
    whole, *parts = [x.detach()[:, -KEPT:].contiguous() for x in found[:3]]
    same(whole, theirs), same(torch.cat(parts), theirs)
    for name, value in sums[0].items():
        assert value.any(), name
        same(sums[1][name], value)


@pytest.mark.parametrize("kind", ["pydet", "adapters", "stock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rollouts_by_continuous_batching(packages, need, tmp_path, dtype, kind):
    """GRPO that samples by Transformers' engine: in both steps the loss has the log-probabilities that the engine gave,
    bit for bit; with Transformers' own attention and sampler it has not."""
    try:
        import pydet.torch.manager  # noqa: F401
    except ImportError as problem:
        need(False, "trl", f"no Transformers 5.24 or later here ({problem})")
    inner = (stock_llama if kind == "stock" else converted_llama)(256).to(dtype)
    model = inner
    if kind == "adapters":
        need(importlib.util.find_spec("peft"), "trl", "no peft here")
        import peft

        model = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        pt.convert(model)
    engine = {"return_logprobs": True, "page_size": 4, "num_blocks": 64, "max_batch_tokens": 16}
    options = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": engine}
    options |= {"max_steps": 2, "learning_rate": 1e-3}
    trainer = trainer_of("GRPO", model, tmp_path, **options)
    pt.check_trainer(trainer)
    sampled, learned = {}, []
    generate, learn = inner.generate_batch, trainer._get_per_token_logps_and_entropies

    def generate_batch(*given, **more):
        found = generate(*given, **more)
        for x in found.values():
            assert x.error is None
            sampled[tuple(x.prompt_ids), tuple(x.generated_tokens)] = x.logprobs
        return found

    def get_per_token_logps_and_entropies(model, ids, mask, kept, **more):
        made = learn(model, ids, mask, kept, **more)
        for row, seen, values in zip(ids, mask.bool(), made[0].detach(), strict=True):
            prompt, tokens = row[:-kept][seen[:-kept]].tolist(), row[-kept:][seen[-kept:]].tolist()
            learned.append((sampled[tuple(prompt), tuple(tokens)], values[seen[-kept:]]))
        return made

    inner.generate_batch = generate_batch
    trainer._get_per_token_logps_and_entropies = get_per_token_logps_and_entropies
    trainer.train()
    assert trainer.state.global_step == 2 and len(learned) == 8
    differing = [(torch.tensor(theirs) != mine).sum().item() for theirs, mine in learned]
    assert sum(len(mine) for _, mine in learned) > 32
    assert sum(differing[:4]) > 4 if kind == "stock" else differing == [0] * 8, differing


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_trainers_run_by_the_routed_head(packages, tmp_path, kind):
    model = converted_llama(32)
    trainer = trainer_of(kind, model, tmp_path)
    pt.check_trainer(trainer)
    before, asked = model.lm_head.weight.detach().clone(), []
    head_of = pt.fused.head_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pt.fused, "head_of", lambda *given, **more: asked.append(more) or head_of(*given, **more))
        trainer.train()
    assert trainer.state.global_step == 1 and asked and asked[0]["entropy"]
    assert kind == "GRPO" or asked[0]["greedy"]
    assert not torch.equal(before, model.lm_head.weight)


def test_which_trainers_of_trls_take_the_weight_themselves(packages):
    """By their methods, whose code alone is read here."""
    import trl
    from trl.trainer.distillation_trainer import DistillationTrainer

    names = ("SFTTrainer", "GRPOTrainer", "RLOOTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")
    for kind in [*(getattr(trl, name) for name in names), DistillationTrainer]:
        trainer = object.__new__(kind)
        trainer.model, trainer.args = Model(), types.SimpleNamespace()
        pt.convert(trainer.model)
        if kind is DistillationTrainer:
            with pytest.raises(pydet.Error, match=TAKES.format(r"DistillationTrainer\._compute_loss")):
                pt.check_trainer(trainer)
        else:
            pt.check_trainer(trainer)


def test_what_a_routed_head_is_asked_and_has_not(packages, tmp_path):
    import trl.trainer.utils as utils

    lacks = (
        r"^check_trainer: TRL's fused head is asked for log_sum_sq_probs, want of log_probs, entropy, mean_logits, is"
    )
    changes = r"^check_trainer: TRL's fused head has a logit_scale of {} and a softcap of {}, want 1 and None"
    for config, outputs, sentence in (
        ({}, ("log_probs", "log_sum_sq_probs"), lacks),
        ({"logit_scale": 0.5}, ("log_probs",), changes.format(r"0\.5", "None")),
        ({"final_logit_softcapping": 30.0}, ("log_probs",), changes.format(r"1\.0", r"30\.0")),
    ):
        model, ids = converted_llama(32, **config), some_ids()
        utils.add_fused_lm_head(model, outputs=outputs)
        trainer = types.SimpleNamespace(model=model)
        if config:  # is not routed
            with pytest.raises(pydet.Error, match=BYPASSED.format("model", "SimpleNamespace", r"trl\.trainer\.utils")):
                pt.check_trainer(trainer)
            with pt.override_aten():
                pt.check_trainer(trainer)
                assert model(ids, labels=ids, fused_lm_head=True).loss.isfinite()
            setattr(model.config, next(iter(config)), None)  # nor can it be told otherwise
        pt.check_trainer(trainer)
        with pytest.raises(pydet.Error, match=sentence):
            model(ids, labels=ids, fused_lm_head=True)
    plain = converted_llama(32)
    utils.add_fused_lm_head(plain, outputs=("log_probs", "mean_logits", "is_top1"))
    theirs = plain(ids, labels=ids, fused_lm_head=True)  # of a model without a route TRL's function answers
    pt.check_trainer(types.SimpleNamespace(model=plain))
    mine = plain(ids, labels=ids, fused_lm_head=True)
    for name in ("log_probs", "mean_logits", "loss"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(mine.is_top1, theirs.is_top1) and not torch.equal(mine.log_probs, theirs.log_probs)
    logits = plain(ids).logits[:, :-1].detach()
    same(mine.log_probs.detach(), pydet.log_prob(logits.contiguous(), ids[:, 1:].contiguous()))


def test_main_grad_of_a_head_that_is_never_called(packages, tmp_path):
    """A loss of TRL's fused head under accumulate_gradients is refused without a route: main_grad would stay zero."""
    trainer, ids = trainer_of("GRPO", converted_llama(32), tmp_path), some_ids()
    parameters = pt.accumulate_gradients(trainer.model)
    assert any(p is trainer.model.lm_head.weight for p in parameters)
    with pytest.raises(pydet.Error, match=r"lm_head\.weight got a gradient from outside its module's forward"):
        learned(trainer, ids).sum().backward()
