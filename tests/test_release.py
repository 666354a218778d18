"""packaging/release.py: what it writes, and that it refuses what is not to be released."""

import hashlib
import importlib.util
import zipfile

import pytest

import setup
from capi import ROOT

spec = importlib.util.spec_from_file_location("release", ROOT / "packaging" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)

CHANGES = (
    "# Changelog\n\n| 1.2.0 |\n\n## 1.2.0 (today)\n\n- New.\n\n### More\n\n- Else.\n\n## 1.1.0\n\n- Old.\n\n## 1.0.0\n"
)


def test_the_notes_are_the_section():
    assert release.notes(CHANGES, "1.2.0") == "- New.\n\n### More\n\n- Else.\n"
    assert release.notes(CHANGES, "1.1.0") == "- Old.\n"
    for missing in ("1.0.0", "2.0.0", "1.2"):  # empty, not there, a part of a number
        with pytest.raises(SystemExit, match=f"no section '## {missing}'"):
            release.notes(CHANGES, missing)
    assert release.version() == setup.version() and release.notes((ROOT / "CHANGELOG.md").read_text(), setup.version())


MAKE = """#!/bin/sh
printf 'wheel%s' "$BYTES" >dist/pydet-9.9.9-py3-none-any.whl
printf 'sources %s' "$SOURCE_DATE_EPOCH" >dist/pydet-9.9.9.tar.gz
"""


def test_built_twice_the_same_bytes(tmp_path, monkeypatch):
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "clock").write_text(MAKE.replace("$BYTES", "$(date +%s%N)"))
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "pydet-1.0.0.tar.gz").write_text("of an earlier release")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "17")
    files = release.built(["sh", str(tmp_path / "make")], dist)
    assert [path.name for path in files] == ["pydet-9.9.9-py3-none-any.whl", "pydet-9.9.9.tar.gz"]
    assert files[1].read_text() == "sources 17" and len(list(dist.iterdir())) == 2
    with pytest.raises(SystemExit, match="built twice, not the same bytes"):
        release.built(["sh", str(tmp_path / "clock")], dist)
    with pytest.raises(SystemExit, match="failed with status 1"):
        release.built(["false"], dist)
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="name the date of the files"):
        release.date_of_the_commit()


def test_sums_and_what_a_wheel_has(tmp_path):
    wheel = tmp_path / "pydet-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("pydet/libpydet_cuda.so", "pydet/libpydet_cpu.so", "pydet/py.typed", "pydet.libs/libx.so"):
            file.writestr(name, "")
    assert release.builds_of(wheel) == ["cpu", "cuda"]
    assert release.builds_of(tmp_path / "pydet-9.9.9.tar.gz") == ["cpu"]
    want = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert release.sums([wheel]) == f"{want}  pydet-9.9.9-py3-none-any.whl\n"


def test_the_sbom_has_what_is_linked_in(tmp_path, monkeypatch):
    wheel = tmp_path / "pydet-9.9.9-py3-none-any.whl"
    wheel.write_text("x")
    found = [{"name": name, "bom-ref": f"{name}==1"} for name in ("cffi", "pip", "pycparser", "pydet", "setuptools")]
    asks = [{"ref": "cffi==1", "dependsOn": ["pycparser==1"]}, {"ref": "pip==1"}, {"ref": "pydet==1"}]
    bom = lambda: {"metadata": {}, "components": [*found], "dependencies": [*asks]}
    monkeypatch.setattr(release, "cuda_runtime", lambda: "13.0.88")
    made = release.completed(bom(), "9.9.9", ["cpu", "cuda"], [wheel])
    assert [its["bom-ref"] for its in made["components"]] == ["cffi==1", "pycparser==1", "cudart_static@13.0.88"]
    assert made["dependencies"] == [asks[0], {"ref": "pydet@9.9.9", "dependsOn": ["cffi==1", "cudart_static@13.0.88"]}]
    about = made["metadata"]["component"]
    assert about["version"] == "9.9.9" and about["hashes"][0]["content"] == hashlib.sha256(b"x").hexdigest()
    without = release.completed(bom(), "9.9.9", ["cpu"], [wheel])
    assert not [its for its in without["components"] if "cudart" in its["bom-ref"]]


def test_make_release_uploads_nothing():
    text = (ROOT / "packaging" / "release.py").read_text() + (ROOT / "Makefile").read_text()
    assert "twine" in text and 'upload "' not in text and '"upload"' not in text and "twine upload" not in text
