"""The files about the project say what its code says: licence, changelog, package description."""

import fnmatch
import os
import re
import subprocess
import sys

import pytest

import setup
from capi import HEADER, ROOT


def number(name):
    return int(re.search(rf"PYDET_{name} = (\d+)", HEADER.read_text())[1])


def test_the_changelog_begins_with_this_release():
    text = (ROOT / "CHANGELOG.md").read_text()
    release, abi, numerics = re.search(r"^\| (\d+\.\d+\.\d+)[^|]* \| (\d+) \| (\d+) \|$", text, flags=re.M).groups()
    assert (release, int(abi), int(numerics)) == (setup.version(), number("ABI"), number("NUMERICS"))
    table = re.findall(r"^\| (\d+\.\d+\.\d+)", text, flags=re.M)
    assert table == re.findall(r"^## (\d+\.\d+\.\d+)", text, flags=re.M)


def test_the_licence_is_the_standard_text():
    text = (ROOT / "LICENSE").read_text()
    words = [
        "Apache License",
        "Version 2.0, January 2004",
        "END OF TERMS AND CONDITIONS",
        "Copyright the pydet authors",
    ]
    assert all(part in text for part in words) and len(text.splitlines()) > 200
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def test_the_description_has_no_link_that_an_index_cannot_follow(tmp_path, monkeypatch):
    targets = re.findall(r"\]\(([^)]*)\)", setup.description())
    assert all(target.startswith(("https://", "#")) for target in targets), targets
    (tmp_path / "README.md").write_text(
        "[pydet.h](native/include/pydet.h), [results](bench/results/x.json), [there](https://x.org/a.md), [b](#here)\n"
        "![Speed by M](docs/a.svg) ![p](https://x.org/p.png)\n"
    )
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    assert setup.description() == (
        "pydet.h, results (`bench/results/x.json` in the sources), [there](https://x.org/a.md), [b](#here)\n"
        "*Speed by M* ![p](https://x.org/p.png)\n"
    )


@pytest.mark.parametrize("extra", ["numpy", "torch", "jax", "test", "bench", "cuda", "hip"])
def test_extras(extra):
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'^{extra} = \["', text, flags=re.M), extra


def test_metadata():
    """What setuptools makes of pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "--author", "--classifiers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "the pydet authors" in done.stdout and "Typing :: Typed" in done.stdout


@pytest.mark.parametrize(
    "given, urls",
    [
        ({}, []),
        ({"REPO_URL": "https://x.org/a/b/"}, ["Source, https://x.org/a/b", "Issues, https://x.org/a/b/issues"]),
        ({"SITE_URL": "https://x.org/docs", "REPO_URL": ""}, ["Documentation, https://x.org/docs"]),
    ],
)
def test_addresses(given, urls, tmp_path):
    """Those that a release is told, as a package index shows them."""
    environment = {name: x for name, x in os.environ.items() if name not in ("SITE_URL", "REPO_URL")}
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    subprocess.run(command, cwd=ROOT, env=environment | given, check=True, capture_output=True)
    told = next(tmp_path.glob("*.egg-info/PKG-INFO")).read_text()
    assert re.findall(r"^Project-URL: (.*)$", told, flags=re.M) == urls


@pytest.mark.parametrize("address", ["x.org", "ftp://x.org", "https://", "https://x.org/a b"])
def test_an_address_that_is_none(address, monkeypatch):
    monkeypatch.setenv("REPO_URL", address)
    with pytest.raises(SystemExit, match=f"REPO_URL is '{address}', want an address"):
        setup.addresses()


def test_what_is_for_any_gpu_is_in_both_tables():
    """native/gpu/any has no kernel of one maker's, but for these, which are other instances of a kernel of both."""
    of_one = {
        "gemm_ieee_128x128",  # AMD's: for NVIDIA gemm_ieee_fp32.cu is faster
        "layernorm_backward_chain",  # NVIDIA's, as the next one: on AMD's the interpreter has not run them
        "layernorm_backward_group",
    }
    tables = {maker: (ROOT / f"native/gpu/{maker}/backend.cpp").read_text() for maker in ("nvidia", "amd")}
    found = set()
    for path in sorted((ROOT / "native/gpu/any").iterdir()):
        text = path.read_text()
        assert not re.search(r'#include "gpu/(nvidia|amd)/', text), path
        for name in re.findall(r"^pydet_status (\w+)\(const \w+ &\w*\) \{", text, flags=re.M):
            makers = {maker for maker, table in tables.items() if re.search(rf"\b{name}\b", table)}
            found |= {name} if len(makers) == 1 else set()
            helpers = {"ready_to_join", "join_partials"}  # what other kernels launch
            assert makers or name in helpers, f"{path.name}: {name} is in no table"
    assert found == of_one


def test_each_word_of_a_row_kernels_name_is_in_the_glossary():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    glossary = {word for row in re.findall(r"^\| ([a-z, ]+) \|", text, flags=re.M) for word in row.split(", ")}
    table = (ROOT / "native/gpu/nvidia/backend.cpp").read_text()
    names = re.findall(r'"cuda_(?:rmsnorm_quantize|rmsnorm|layernorm|softmax)_(\w+)"', table)
    words = {word for name in names for word in name.split("_")} - {"backward"}
    assert len(words) > 10 and words <= glossary, words - glossary


def sections(text, heading):
    """name: text of each, by its heading."""
    parts = re.split(heading, text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_header_is_short_and_its_rules_are_on_their_page():
    """A few words a function in pydet.h; each section, and each field of its structures, in docs/reference/rules.md."""
    header = HEADER.read_text()
    comments = " ".join(re.findall(r"/\*.*?\*/", header, flags=re.S))
    words = len(re.sub(r"[/*=-]+", " ", comments).split())
    assert 2500 < words <= 3400, words
    rules = sections((ROOT / "docs/reference/rules.md").read_text(), r"^## (.+)$")
    of_every_call, gemm, seen = rules.pop("Every call"), rules["GEMM"], 0
    for name, code in sections(header, r"^/\* ---- (.+?) -+(?:\*/)?$").items():
        structures = re.findall(r"^typedef struct \w+ \{\n(.*?)^\} pydet_\w+(?:options|peers);", code, re.M | re.S)
        if not structures:
            continue
        said = of_every_call + rules.pop(name) + gemm
        lines = re.sub(r"/\*.*?\*/", "", "".join(structures), flags=re.S)
        fields = set(re.findall(r"(\w+)[,;]", lines)) - {"workspace_size"}
        assert not {field for field in fields if not re.search(rf"\b{field}\b", said)}, name
        seen += len(fields)
    assert not rules and seen > 90, (list(rules), seen)


def test_each_operation_is_among_those_whose_bits_are_said_to_depend_on_something():
    table = sections((ROOT / "native/NUMERICS.md").read_text(), r"^## (.+)$")["What the bits may depend on"]
    first = " ".join(re.findall(r"^\| ([^|]*) \|", table, flags=re.M))
    for name in re.findall(r"^PYDET_API pydet_status pydet_(\w+)\(\s*void \*stream", HEADER.read_text(), flags=re.M):
        assert re.search(rf"\b{name.removesuffix('_backward')}\b", first), name


def test_the_map_of_tests_finds_every_file():
    named = set(re.findall(r"`(test_[\w*]+\.py)`", (ROOT / "tests/README.md").read_text()))
    operations = {path.name for path in (ROOT / "native/ops").iterdir()}
    operations |= set(re.findall(r"^PYDET_API pydet_status pydet_(\w+)\(", HEADER.read_text(), flags=re.M))
    patterns = named - {"test_X.py", "test_cuda_X.py"} | {f"test_{x}*.py" for x in operations} | {"test_cuda_*.py"}
    files = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    assert not {name for name in files if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    assert all(fnmatch.filter(files, name.replace("X", "*")) for name in named), named
