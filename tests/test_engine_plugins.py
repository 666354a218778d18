"""What of pydet.sglang and pydet.verl needs neither; `make engines-check` runs the rest (tests/engines)."""

import importlib
import importlib.metadata
import os
import subprocess
import sys
import types

import pytest
from setuptools.config.pyprojecttoml import read_configuration

import pydet
import pydet.plugins
import pydet.sglang
import pydet.verl
from capi import ROOT

PLUGINS = {"sglang": pydet.sglang, "verl": pydet.verl}
NAMES = {"sglang": "SGLang", "verl": "verl"}
GROUPS = {"sglang": "sglang.srt.plugins", "verl": "verl.plugins"}
INSTALLS = {"sglang": "pydet.sglang.engine", "verl": "pydet.verl.trainer"}


@pytest.fixture(params=PLUGINS)
def name(request, monkeypatch):
    for variable in ("PYDET_SGLANG", "PYDET_VERL", "PYDET_VLLM"):
        monkeypatch.delenv(variable, raising=False)
    return request.param


@pytest.fixture
def engine(name, monkeypatch):
    """engine(version): an engine of which no more is there than that."""
    monkeypatch.setenv(PLUGINS[name].VARIABLE, "1")

    def fake(version):
        own, of_it = types.ModuleType(name), types.ModuleType(f"{name}.version")
        own.__version__ = of_it.__version__ = version
        monkeypatch.setitem(sys.modules, name, own)
        monkeypatch.setitem(sys.modules, f"{name}.version", of_it)

    return fake


@pytest.fixture
def installed(name, monkeypatch):
    """What an install was called with, in the place of the real one."""
    calls, fake = [], types.ModuleType(INSTALLS[name])
    fake.install = calls.append
    monkeypatch.setitem(sys.modules, INSTALLS[name], fake)
    return calls


def test_the_package_has_the_entry_points(name):
    points = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]["entry-points"]
    ((key, value),) = points[GROUPS[name]].items()
    loaded = importlib.metadata.EntryPoint(key, value, GROUPS[name]).load()
    assert loaded is (pydet.sglang.register if name == "sglang" else sys.modules["pydet.verl.plugin"])


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_is_inert_unless_asked(name, value):
    code = {
        "sglang": "import pydet.sglang, sys; pydet.sglang.register(); print(*sys.modules)",
        "verl": "import pydet.verl.plugin, sys; print(*sys.modules)",
    }[name]
    environment = dict(os.environ) if value is None else os.environ | {PLUGINS[name].VARIABLE: value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    loaded = {x.partition(".")[0] for x in done.stdout.split()}
    assert "pydet" in loaded and not loaded & {"torch", "sglang", "verl", "transformers"}


@pytest.mark.parametrize("after", [".dev1", ".1", "rc1"])
def test_an_unknown_version_is_refused(name, engine, installed, after):
    version = PLUGINS[name].VERSIONS[-1] + after
    engine(version)
    with pytest.raises(pydet.Error) as caught:
        PLUGINS[name].prepare()
    want = " or ".join(PLUGINS[name].VERSIONS)
    assert str(caught.value).startswith(f"pydet.{name}: {NAMES[name]} is {version}, want {want}: of another version")
    assert installed == []


def test_an_error_ends_the_process(name, engine, installed):
    """SGLang and verl log what a plugin raises, and go on without it."""
    engine("9.9.9")
    with pytest.raises(SystemExit, match=rf"^pydet\.{name}: {NAMES[name]} is 9\.9\.9, want"):
        PLUGINS[name].register()
    assert installed == []


@pytest.mark.parametrize("build", ["", "+cpu"])
def test_a_known_version_goes_on(name, engine, installed, monkeypatch, build):
    engine(PLUGINS[name].VERSIONS[0] + build)
    monkeypatch.setenv(PLUGINS[name].VARIABLE, "kv_chunk=256,strict=0")
    PLUGINS[name].register()
    assert installed == [pydet.plugins.Settings(kv_chunk=256, strict=False)]


def test_without_it_it_is_refused(name, engine, monkeypatch, installed):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(pydet.Error, match=rf"^pydet\.{name}: .*not here"):
        PLUGINS[name].prepare()


def test_wrong_settings_are_refused(name, engine, installed, monkeypatch):
    engine(PLUGINS[name].VERSIONS[0])
    monkeypatch.setenv(PLUGINS[name].VARIABLE, "strict=2")
    with pytest.raises(SystemExit, match=rf"^{PLUGINS[name].VARIABLE}: 'strict=2' is no setting, want 0, 1, or"):
        PLUGINS[name].register()
    assert installed == []


def test_enable_sets_the_variable(name, engine, installed, monkeypatch):
    engine(PLUGINS[name].VERSIONS[0])
    for variable in pydet.verl.ROLLOUTS:
        monkeypatch.setenv(variable, "0")
    PLUGINS[name].enable(arithmetic="ieee", strict=False)
    assert os.environ[PLUGINS[name].VARIABLE] == "arithmetic=ieee,strict=0"
    assert installed == [pydet.plugins.Settings("ieee", strict=False)]
    if name == "verl":
        assert {os.environ[x] for x in pydet.verl.ROLLOUTS} == {"arithmetic=ieee,strict=0"}


def test_verl_asks_for_rollouts_by_pydet(engine, installed, name, monkeypatch):
    if name != "verl":
        return
    engine(pydet.verl.VERSIONS[0])
    monkeypatch.setenv("PYDET_VERL", "kv_chunk=256")
    monkeypatch.setenv("PYDET_VLLM", "0")
    monkeypatch.setenv("PYDET_SGLANG", "")
    monkeypatch.delenv("PYDET_SGLANG")
    pydet.verl.register()
    assert (os.environ["PYDET_VLLM"], os.environ["PYDET_SGLANG"]) == ("0", "kv_chunk=256")


def test_modules_of_verl_are_taken_as_they_are_imported(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    trainer = importlib.import_module("pydet.verl.trainer")
    package = tmp_path / "a_trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "early.py").write_text("value = 1")
    (package / "late.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    taken = []
    names = ("a_trainer.early", "a_trainer.late")
    monkeypatch.setattr(trainer, "_TAKES", dict.fromkeys(names, lambda module, how: taken.append((module.value, how))))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.import_module("a_trainer.early")
    settings = pydet.plugins.Settings(kv_chunk=256)
    trainer.install(settings)
    assert taken == [(1, settings)]
    late = importlib.import_module("a_trainer.late")
    assert taken == [(1, settings)] * 2 and late.__spec__.origin == str(package / "late.py")
    for module in ("a_trainer", *names):
        monkeypatch.delitem(sys.modules, module)


def test_log_probabilities_and_entropies():
    torch = pytest.importorskip("torch")
    trainer = importlib.import_module("pydet.verl.trainer")
    logits = torch.randn(7, 130, generator=torch.Generator().manual_seed(0), requires_grad=True)
    exact = torch.distributions.Categorical(logits=logits.detach().double())
    labels = torch.arange(7)
    found = trainer.logprobs_from_logits(logits, labels)
    torch.testing.assert_close(found.double(), exact.log_prob(labels), atol=1e-6, rtol=0)
    entropy = trainer.entropy_from_logits(logits)
    torch.testing.assert_close(entropy.double(), exact.entropy(), atol=2e-6, rtol=0)
    alone = torch.cat([trainer.entropy_from_logits(row[None], 1) for row in logits])
    assert torch.equal(alone, entropy)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(trainer.entropy_from_logits(logits), entropy)
    entropy.sum().backward()
    p = exact.probs
    want = -p * (p.log() + exact.entropy()[:, None])
    torch.testing.assert_close(logits.grad.double(), want, atol=1e-6, rtol=0)
    hidden = logits.detach().masked_fill(torch.arange(130) > 100, -torch.inf)
    want = torch.distributions.Categorical(logits=hidden[:, :101].double()).entropy()
    torch.testing.assert_close(trainer.entropy_from_logits(hidden).double(), want, atol=2e-6, rtol=0)


def test_temperatures_divide_in_float32():
    torch = pytest.importorskip("torch")
    scaled = importlib.import_module("pydet.verl.trainer").scaled
    logits, temperature = torch.randn(3, 40).bfloat16(), torch.tensor([0.7, 1.3, 0.0])[:, None]
    want = logits.float() / torch.tensor([0.7, 1.3, 1e-8])[:, None]
    assert torch.equal(scaled(logits, temperature, is_unit_temperature=False), want)
    assert scaled(logits, temperature, is_unit_temperature=True) is logits
