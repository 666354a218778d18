"""What a type checker knows of pydet: results are of the caller's framework, names are among those that there are."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import typing

import pytest

from capi import ROOT
from pydet import ops

CALLER = """
import numpy as np
from numpy.typing import NDArray

import pydet

class Mine: ...

def calls(x: NDArray[np.float32], mine: Mine) -> None:
{body}
"""


@pytest.fixture
def mypy(need, tmp_path):
    need(importlib.util.find_spec("mypy"), "mypy", "mypy is not installed")

    def check(body):
        """What mypy --strict says of these lines, each without its file and line."""
        (tmp_path / "caller.py").write_text(CALLER.format(body=textwrap.indent(textwrap.dedent(body).strip(), "    ")))
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", f"--config-file={ROOT}/pyproject.toml", "caller.py"]
            + [f"--cache-dir={ROOT}/.mypy_cache"],
            cwd=tmp_path,
            env={**os.environ, "MYPYPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return re.findall(r"^caller\.py:\d+: (?:error|note): (.*)$", done.stdout, flags=re.M)

    return check


def test_the_names_are_the_library_s():
    from pydet.hooks import MODES, arithmetics

    assert set(typing.get_args(ops.Arithmetic)) == set(arithmetics())
    assert set(typing.get_args(ops.Mode)) == set(MODES)


def test_results_are_of_the_callers_framework(mypy):
    said = mypy("""
        reveal_type(pydet.gemm(x, x))
        reveal_type(pydet.gemm(mine, mine, arithmetic="sm90"))
        reveal_type(pydet.skinny_gemm(x, x, mode="fast"))
        reveal_type(pydet.rmsnorm(mine, eps=1e-6))
        reveal_type(pydet.rmsnorm(mine, eps=1e-6, residual=mine))
        reveal_type(pydet.rmsnorm_backward(mine, mine, None, mine)[1])
        reveal_type(pydet.rmsnorm_backward(mine, mine, mine, mine)[1])
    """)
    want = ["ndarray[", "caller.Mine", "ndarray[", "tuple[caller.Mine, caller.Mine]"]
    want += ["tuple[caller.Mine, caller.Mine, caller.Mine]", "None", "caller.Mine"]
    assert len(said) == len(want)
    for got, word in zip(said, want, strict=True):
        assert got.startswith('Revealed type is "') and word in got, (got, word)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('pydet.gemm(x, x, arithmetic="tf32")', 'expected "Literal'),
        ('pydet.skinny_gemm(x, x, mode="fastest")', 'expected "Literal'),
        ('pydet.audit(x, x, x, arithmetic="sm91")', 'expected "Literal'),
        ("pydet.gemm(x, x, k_chunk=1.5)", 'expected "int | None"'),
        ("y: Mine = pydet.gemm(x, x)", "Mine"),
        ("pydet.rmsnorm(x)", "overload"),
        ("pydet.gemm(x, x, transpose=True)", 'Unexpected keyword argument "transpose"'),
    ],
)
def test_what_mypy_refuses(mypy, line, sentence):
    said = mypy(line)
    assert any(sentence in words for words in said), said
