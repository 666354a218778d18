"""What of pydet.vllm needs no vLLM; `make engines-check` runs the rest (tests/engines)."""

import importlib.metadata
import os
import subprocess
import sys
import types

import pytest
from setuptools.config.pyprojecttoml import read_configuration

import pydet
import pydet.vllm
from capi import ROOT

KNOWN = pydet.vllm.VERSIONS[0]


@pytest.fixture
def engine(monkeypatch):
    """engine(version): a vLLM of which no more is there than that."""
    monkeypatch.setenv("PYDET_VLLM", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")

    def fake(version):
        of_it = types.ModuleType("vllm.version")
        of_it.__version__ = version
        monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.version", of_it)

    return fake


def test_the_package_has_the_entry_point():
    project = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]
    (name, value), *others = project["entry-points"]["vllm.general_plugins"].items()
    point = importlib.metadata.EntryPoint(name, value, "vllm.general_plugins")
    assert not others and point.load() is pydet.vllm.register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_is_inert_unless_asked(value):
    code = "import pydet.vllm, sys; pydet.vllm.register(); print(*sys.modules)"
    environment = {name: x for name, x in os.environ.items() if name != "PYDET_VLLM"}
    environment |= {} if value is None else {"PYDET_VLLM": value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "pydet" in loaded and not loaded & {"torch", "vllm"}


@pytest.mark.parametrize("version", ["0.25.1", "0.26.1", "0.31.9", "0.32.1", "1.0.0", "0.32.0rc1"])
def test_an_unknown_version_is_refused(engine, version):
    engine(version)
    want = rf"^pydet\.vllm: vLLM is {version}, want 0\.26\.0 or 0\.32\.0: of another version"
    with pytest.raises(pydet.Error, match=want):
        pydet.vllm.register()


@pytest.mark.parametrize("version", pydet.vllm.VERSIONS)
def test_a_known_version_goes_on(engine, monkeypatch, version):
    engine(f"{version}+cpu")
    monkeypatch.setenv("PYDET_VLLM", "kv_chunk=256")
    installed = []
    fake = types.ModuleType("pydet.vllm.engine")
    fake.install = installed.append
    monkeypatch.setitem(sys.modules, "pydet.vllm.engine", fake)
    pydet.vllm.register()
    assert installed == [pydet.vllm.Settings(kv_chunk=256)]


def test_without_vllm_it_is_refused(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(pydet.Error, match=r"^pydet\.vllm: PYDET_VLLM is set, and vLLM is not here"):
        pydet.vllm.register()


def test_the_second_runner_is_refused(engine, monkeypatch):
    engine(KNOWN)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(pydet.Error, match=r"^pydet\.vllm: VLLM_USE_V2_MODEL_RUNNER is 1, want 0"):
        pydet.vllm.register()


def test_settings():
    parse, settings = pydet.vllm.parse, pydet.vllm.Settings
    assert parse("") is parse("0") is None
    assert parse("1") == settings()
    given = settings("sm90", 128, 512, False)
    assert parse("arithmetic=sm90, k_chunk=128,kv_chunk=512,strict=0") == given == parse(str(given))
    assert parse(str(settings())) == settings()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("yes", "PYDET_VLLM: 'yes' is no setting, want 0, 1, or arithmetic=NAME"),
        ("1,strict=0", "PYDET_VLLM: '1' is no setting"),
        ("strict=2", "PYDET_VLLM: 'strict=2' is no setting"),
        ("kv_chunk=-128", "PYDET_VLLM: 'kv_chunk=-128' is no setting"),
        ("kv_chunk=0", "PYDET_VLLM: kv_chunk is 0, want a positive multiple of 128"),
        ("kv_chunk=129", "PYDET_VLLM: kv_chunk is 129, want a positive multiple of 128"),
        ("k_chunk=0", "PYDET_VLLM: k_chunk is 0, want a positive number"),
        ("arithmetic=fast", "PYDET_VLLM: arithmetic is 'fast'"),
        ("arithmetic=ieee,,", "PYDET_VLLM: '' is no setting"),
    ],
)
def test_wrong_settings_are_refused(text, sentence):
    with pytest.raises(pydet.Error) as caught:
        pydet.vllm.parse(text)
    assert str(caught.value).startswith(sentence)


def test_enable_sets_the_variable(engine, monkeypatch):
    engine("9.9.9")
    with pytest.raises(pydet.Error, match=r"vLLM is 9\.9\.9"):
        pydet.vllm.enable(arithmetic="ieee", strict=False)
    assert os.environ["PYDET_VLLM"] == "arithmetic=ieee,strict=0"
