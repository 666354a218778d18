"""What the README shows runs, and what it names is there."""

import re
import subprocess

import numpy as np
import pytest

import pydet
from capi import HEADER, ROOT, declarations, library_path

TEXT = (ROOT / "README.md").read_text()


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
    (code,) = blocks("c")
    assert code == (ROOT / "tests" / "smoke.c").read_text()


@pytest.mark.parametrize("compiler", [["cc", "-std=c99"], ["c++", "-x", "c++", "-std=c++11"]], ids=["C99", "C++11"])
def test_c_example_compiles_and_runs(tmp_path, compiler):
    (code,) = blocks("c")
    (tmp_path / "example.c").write_text(code)
    command = [
        *compiler,
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        f"-I{HEADER.parent}",
        tmp_path / "example.c",
        "-x",
        "none",
        library_path(),
        f"-Wl,-rpath,{library_path().resolve().parent}",
        "-o",
        tmp_path / "example",
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "example"], capture_output=True, text=True)
    assert done.returncode == 0 and f"pydet {pydet.__version__}" in done.stdout, done.stdout + done.stderr


def test_everything_named_is_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^\s*make ([\w-]+)|`make ([\w-]+)`", TEXT, flags=re.M)):
        name = "".join(target)
        assert re.search(rf"^{name}:", makefile, flags=re.M), f"make {name}"
    paths = (
        re.findall(r"\]\(([^)]+)\)", TEXT) + re.findall(r"`([\w./]+/[\w./]*)`", TEXT) + ["bench/README.md", ".ci/run"]
    )
    generated = {"pydet/libpydet_cuda.so", "pydet/libpydet_hip.so", "bench/raw/"}  # by make cuda, hip and bench
    for path in set(paths) - generated:
        assert (ROOT / path.partition("#")[0]).exists(), path
    for name in re.findall(r"^\| `(\w+)\(", TEXT, flags=re.M):
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
        assert f"`{name}(" in TEXT, name
    for name in set(re.findall(r"`(pydet_\w+)[`(]", TEXT)):
        assert name in declarations(), name


def test_the_sentence_that_is_quoted():
    (sentence,) = re.findall(r"with one sentence: `([^`]+)`", TEXT)
    with pytest.raises(pydet.Error) as caught:
        pydet.gemm(np.zeros((1, 1024), "f"), np.zeros((512, 4096), "f"))
    assert str(caught.value) == sentence
