"""What the README and the pages that it opens show runs, and what they name is there."""

import re

import numpy as np
import pytest

import pydet
from capi import ROOT, declarations

TEXT = (ROOT / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "docs/functions.md")}
PAGES["CONTRIBUTING.md"] = PAGES["CONTRIBUTING.md"].split("\n## How a change looks\n")[0]  # up to the map of the tree
ROOMS = ("what it is", "Sixty seconds", "What is there", "In PyTorch", "Speed", "Where to go", "Licence")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.S | re.M)


def test_python_example():
    (code,) = blocks("python")
    assert len(code.strip().splitlines()) == 6
    names = {}
    exec(code, names)
    assert names["batch"].shape == (64, 1024)
    broken = code.replace("pydet.gemm(x[7:8], w)", "pydet.gemm(x[8:9], w)")
    assert broken != code
    with pytest.raises(AssertionError):
        exec(broken, {})


def test_c_example_is_the_smoke_test():
    (code,) = re.findall(r"^```c\n(.*?)^```$", (ROOT / "docs/cpp.md").read_text(), flags=re.S | re.M)
    assert code == (ROOT / "tests" / "smoke.c").read_text()


def test_a_first_page_is_short():
    assert len(TEXT) <= 9000 and re.findall(r"^## (.*)$", TEXT, flags=re.M) == list(ROOMS[1:])
    assert TEXT.split("\n\n")[1].count(". ") + 1 == 3  # what it is and for whom, in three sentences
    assert re.search(r"^    make  +#", TEXT, flags=re.M) and re.search(r"^    make test  +#", TEXT, flags=re.M)


@pytest.mark.parametrize("page", PAGES)
def test_everything_named_is_there(page):
    text, makefile = PAGES[page], (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^\s*make ([\w-]+)|`make ([\w-]+)`", text, flags=re.M)):
        name = "".join(target)
        assert re.search(rf"^{name}[ :]", makefile, flags=re.M), f"make {name}"
    linked = {path.partition("#")[0] for path in re.findall(r"\]\(([^)]+)\)", text)} - {""}
    for path in linked:  # pages that make docs makes of the sources are tests/test_docs.py's
        assert "reference/" in path or ((ROOT / page).parent / path).exists(), path
    named = set(re.findall(r"`([\w./]+/[\w./]*)`", text)) | {"bench/README.md", ".ci/run"}
    generated = {"pydet/libpydet_cuda.so", "pydet/libpydet_hip.so", "bench/raw/", ".venv/bin/python"}  # by make
    for path in named - generated:
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "native", ROOT / "native/gpu/nvidia")), path


def test_every_function_named_is_there():
    text = PAGES["docs/functions.md"]
    for name in re.findall(r"^\| `(\w+)\(", text, flags=re.M):
        assert callable(getattr(pydet, name)), name
    for name in (
        "gemm",
        "gemm_da",
        "gemm_db",
        "skinny_gemm",
        "rmsnorm",
        "rmsnorm_backward",
        "audit",
        "kernels",
        "devices",
    ):
        assert f"`{name}(" in text, name
    for name in set(re.findall(r"`(pydet_\w+)[`(]", text)):
        assert name in declarations(), name
    (table,) = re.findall(r"^## What is there\n(.*?)^## ", TEXT, flags=re.S | re.M)
    for cell in re.findall(r"^\| \w+ \| ([^|]+) \|", table, flags=re.M):
        names = re.findall(r"`(\w+)`", cell)
        assert all(callable(getattr(pydet, name)) for name in names), cell
        assert not names or all(re.search(rf"`{name}\b", text) for name in names), cell


def test_the_sentence_that_is_quoted():
    (sentence,) = re.findall(r"with one sentence: `([^`]+)`", PAGES["docs/functions.md"])
    with pytest.raises(pydet.Error) as caught:
        pydet.gemm(np.zeros((1, 1024), "f"), np.zeros((512, 4096), "f"))
    assert str(caught.value) == sentence
