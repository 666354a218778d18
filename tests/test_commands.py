"""python -m pydet: its commands, their help, and what it says to a word that is none."""

import json

import numpy as np
import pytest

import pydet
from pydet import __main__ as command_line
from pydet import bench


def run(capsys, *arguments):
    """(status, what it printed, what it complained of)."""
    try:
        status = command_line.main(list(arguments))
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_help_lists_the_commands(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0 and all(f"  {name} " in out for name in ("info", "demo", "audit", "bench"))


@pytest.mark.parametrize("command", ["info", "demo", "audit", "bench"])
def test_each_command_has_help(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0 and f"python -m pydet {command}" in out and "--json" in out


def test_info_needs_no_word(capsys):
    status, out, _ = run(capsys)
    assert status == 0 and out == run(capsys, "info")[1]
    assert out.startswith(f"pydet {pydet.__version__} (ABI {pydet.ABI}, numerics {pydet.NUMERICS})")
    assert json.loads(run(capsys, "info", "--json")[1]) == json.loads(run(capsys, "--json")[1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tune"], "invalid choice: 'tune' (choose from"),
        (["--json", "demo"], "demo comes first: python -m pydet demo ..."),
        (["info", "demo"], "unrecognized arguments: demo"),
        (["bench", "--seconds", "0"], "--seconds must be positive"),
        (["--libs", "metal"], "invalid choice: 'metal'"),
    ],
)
def test_what_is_refused(capsys, arguments, sentence):
    status, out, error = run(capsys, *arguments)
    assert status == 2 and out == "" and sentence in error


def test_bench(capsys):
    status, out, _ = run(capsys, "bench", "--seconds", "0.01", "--json")
    found = json.loads(out)
    assert status == 0 and found["numerics"] == pydet.NUMERICS
    assert [row["operation"] for row in found["rows"]] == [
        "gemm",
        "skinny_gemm",
        "skinny_gemm",
        "gemm",
        "gemm",
        "rmsnorm",
    ]
    for row in found["rows"]:
        assert row["bits_ok"] and row["us"] > 0 and row["kernel"].startswith("cpu_")
        assert (row["times_numpy"] is None) == (row["dtype"] == "bfloat16")


def test_bench_finds_wrong_bits(capsys, monkeypatch):
    """A product that sums a single row in another order."""
    gemm = pydet.gemm

    def broken(a, b, **options):
        return gemm(a, b, **options, k_chunk=64 if len(a) == 1 else None)

    monkeypatch.setattr(pydet, "gemm", broken)
    monkeypatch.setattr(bench, "measure", lambda seconds: [bench.product(8, 64, 512, "float32", "ieee", seconds)])
    status, out, _ = run(capsys, "bench", "--seconds", "0.01")
    assert status == 1 and " NO " in out and np.isfinite(float(out.split()[-5]))
