"""pydet, or python -m pydet: its commands, their help, and what it says to a word that is none."""

import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pydet
from capi import ROOT
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
    assert status == 0 and f"usage: pydet {command}" in out and "--json" in out


def test_the_command_is_the_module():
    """What an installation calls `pydet`: with no word, what is here; --version; and the exit status."""
    (named,) = re.findall(r'^pydet = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    assert named == ("pydet.__main__", "command")
    source = "import sys; from pydet.__main__ import command; sys.exit(command())"
    for arguments, status in ([["--version"], 0], [["info", "--json"], 0], [["tune"], 2]):
        done = subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True)
        same = python(*arguments, stdout=subprocess.PIPE)
        assert done.returncode == same.returncode == status
        assert (done.stdout, done.stderr) == (same.stdout, same.stderr)
    assert python("--version", stdout=subprocess.PIPE).stdout == f"pydet {pydet.__version__}\n"


def test_info_needs_no_word(capsys):
    status, out, _ = run(capsys)
    assert status == 0 and out == run(capsys, "info")[1]
    assert out.startswith(f"pydet {pydet.__version__} (ABI {pydet.ABI}, numerics {pydet.NUMERICS})")
    assert json.loads(run(capsys, "info", "--json")[1]) == json.loads(run(capsys, "--json")[1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tune"], "invalid choice: 'tune' (choose from"),
        (["--json", "demo"], "demo comes first: pydet demo ..."),
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


# ---- What cannot be computed: status 2 and a sentence, since 1 says that bits differ ---------------------------------


@pytest.fixture
def saved(tmp_path):
    """A.npy, B.npy, C.npy with C = A B in fp32."""
    a, b = (np.random.default_rng(s).standard_normal((16, 16), np.float32) for s in range(2))
    paths = [tmp_path / name for name in ("A.npy", "B.npy", "C.npy")]
    for path, array in zip(paths, (a, b, pydet.gemm(a, b)), strict=True):
        np.save(path, array)
    return [str(path) for path in paths]


def damaged(path):
    """Every damage by name: what it makes of the file."""
    whole, array = Path(path).read_bytes(), np.load(path)
    header = whole.index(b"{")
    changed = lambda old, new: whole.replace(old, new + b" " * (len(old) - len(new)))
    yield from {
        "empty": b"",
        "no array": b"a letter to a friend\n",
        "cut in the magic": whole[:4],
        "cut in the header": whole[: header + 20],
        "cut in the numbers": whole[:-40],
        "header of noise": whole[:header] + bytes(range(128, 208)) + whole[header + 80 :],
        "header is a list": changed(b"{'descr': '<f4'", b"['descr', '<f4'"),
        "header without a shape": changed(b"'shape'", b"'shade'"),
        "shape of words": changed(b"(16, 16)", b"('a', 1)"),
        "shape below 0": changed(b"(16, 16)", b"(-1, -1)"),
        "shape beyond memory": changed(b"(16, 16), }             ", b"(99999999999, 9999999), }"[:24]),
        "type of nothing": changed(b"'<f4'", b"'<x4'"),
        "unclosed header": changed(b"}", b" "),
        "version 9": whole[:6] + b"\x09" + whole[7:],
        "zip of nothing": b"PK\x03\x04" + bytes(60),
        "pickle": pickle.dumps({"a": 1}),
    }.items()
    for name, value in {
        "objects": np.array([[1, None]], object),
        "structure": np.zeros((16, 16), [("x", "f4"), ("y", "f4")]),
        "words": np.array([["a", "b"]]),
        "float64": array.astype(np.float64),
        "complex64": array.astype(np.complex64),
        "int32": array.astype(np.int32),
        "big endian": array.astype(">f4"),
        "scalar": np.float32(1),
        "vector": array[0],
        "no rows": array[:0],
    }.items():
        file = io.BytesIO()
        np.save(file, value, allow_pickle=True)
        yield name, file.getvalue()
    file = io.BytesIO()
    np.savez(file, x=array, y=array)
    yield "npz", file.getvalue()
    yield "cut npz", file.getvalue()[:-100]


def refused(capsys, *arguments):
    status, out, error = run(capsys, *arguments)
    assert status == 2 and out == "", (arguments, status, out, error)
    assert error.count("\n") == 1 and error.startswith("pydet ") and len(error) > 30, (arguments, error)
    return error


@pytest.mark.parametrize("place", [0, 1, 2])
def test_audit_of_damaged_files(capsys, saved, place):
    for name, content in damaged(saved[place]):
        paths = [*saved]
        paths[place] = saved[place].replace(".npy", f"-{name}.npy")
        Path(paths[place]).write_bytes(content)
        error = refused(capsys, "audit", *paths, "--arithmetic", "ieee")
        assert Path(paths[place]).name in error or "audit: a is" in error or "gemm: " in error, (name, error)


def test_audit_refuses(capsys, saved, tmp_path):
    folder, a, b, c = str(tmp_path), *saved
    assert "cannot be read: Is a directory" in refused(capsys, "audit", a, b, folder, "--arithmetic", "ieee")
    assert "cannot be read: No such file" in refused(capsys, "audit", a, b, folder + "/x", "--arithmetic", "ieee")
    words = "--arithmetic is auto, want the arithmetic that computed C: on this CPU auto is ieee"
    assert words in refused(capsys, "audit", a, b, c, "--arithmetic", "auto")
    for options in (
        ("--bias", folder),
        ("--a-scale", c),
        ("--sample", "0"),
        ("--sample", "2", "--seed", "-1"),
        ("--k-chunk", "-16"),
        ("--k-chunk", str(2**70)),
        ("--dtype", "int4"),
        ("--arithmetic", "sm89"),
        ("--arithmetic", "sm90"),
    ):
        refused(capsys, "audit", a, b, c, "--arithmetic", "ieee", *options)
    assert run(capsys, "audit", a, b, c, "--arithmetic", "ieee")[0] == 0


def test_audit_of_what_is_no_npy_says_so(capsys, saved, tmp_path):
    a, b, c = saved
    for content, words in (
        (b"a letter", "begins with b'a lett'"),
        (b"", "is empty"),
        (pickle.dumps([1]), "begins with"),
    ):
        (tmp_path / "x.npy").write_bytes(content)
        error = refused(capsys, "audit", a, str(tmp_path / "x.npy"), c)
        assert f"x.npy is no .npy file: it {words}" in error and "want an array as numpy.save writes it" in error
        assert "pickle" not in error.partition(" is no ")[2]


def test_audit_of_fp32_names_no_arithmetic_that_was_not_asked_for(capsys, saved, tmp_path):
    status, out, error = run(capsys, "audit", *saved)
    assert status == 0 and error == "" and "sm90" not in out and "recomputed in ieee" in out
    wrong = np.load(saved[2])
    wrong[3, 5] = 0
    np.save(tmp_path / "wrong.npy", wrong)
    status, out, error = run(capsys, "audit", *saved[:2], str(tmp_path / "wrong.npy"))
    assert status == 1 and error == "" and "sm90" not in out
    assert "sm90" not in refused(capsys, "audit", *saved, "--k-chunk", "-16")
    half = str(tmp_path / "half.npy")
    np.save(half, np.load(saved[0]).astype(np.float16))
    assert "is float16, of which --arithmetic must say how C was computed" in refused(capsys, "audit", half, half, half)


def test_audit_of_fp32_needs_no_arithmetic(saved):
    a, b, c = (np.load(path) for path in saved)
    assert pydet.audit(a, b, c).arithmetic == "ieee" and pydet.audit(a, b, c).all_equal
    half = a.astype(np.float16)
    assert pydet.audit(half, half, pydet.gemm(half, half, arithmetic="sm90")).arithmetic == "sm90"


@pytest.mark.parametrize("command", ["bench", "demo"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "many"])
def test_seconds(capsys, command, seconds):
    status, out, error = run(capsys, command, f"--seconds={seconds}")
    assert status == 2 and out == "" and "--seconds" in error and "Traceback" not in error


def test_demo_refuses_a_seed(capsys):
    status, _, error = run(capsys, "demo", "--seed", "-1")
    assert status == 2 and "--seed must not be negative" in error


def python(*arguments, **options):
    command = [sys.executable, "-m", "pydet", *arguments]
    return subprocess.run(command, text=True, stderr=subprocess.PIPE, timeout=100, **options)


@pytest.mark.parametrize("command", ["audit", "bench", "demo", "info"])
def test_output_that_cannot_be_written(command, saved):
    """A full disk is no difference of bits."""
    arguments = {"audit": [*saved, "--arithmetic", "ieee"], "info": []}.get(command, ["--seconds", "0.01"])
    with open("/dev/full", "w") as full:
        done = python(command, *arguments, stdout=full)
    *progress, last = done.stderr.splitlines()
    assert done.returncode == 2 and last == f"pydet {command}: [Errno 28] No space left on device"
    assert not progress or (command == "demo" and all(line.endswith(" ...") for line in progress))


def test_output_that_is_closed():
    source = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'pydet'])"
    done = subprocess.run([sys.executable, "-c", source], text=True, stderr=subprocess.PIPE, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_commands_without_what_they_need(command, tmp_path):
    missing = {**os.environ, "PYDET_LIBRARY": str(tmp_path / "none.so")}
    done = python(command, "--seconds", "0.01", stdout=subprocess.PIPE, env=missing)
    assert done.returncode == 2 and done.stderr.startswith(f"pydet {command}: ") and done.stderr.count("\n") == 1
    source = (
        "import sys; sys.modules['ml_dtypes'] = None; from pydet import __main__ as m; sys.exit(m.main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", source, command], capture_output=True, text=True)
    assert done.returncode == 2 and f"pydet {command}: needs numpy and ml_dtypes" in done.stderr
    assert "pip install numpy ml_dtypes" in done.stderr and "pydet[" not in done.stderr  # which is on no index


@pytest.mark.parametrize("command", ["audit", "bench", "demo"])
def test_help_says_what_the_status_means(capsys, command):
    out = " ".join(run(capsys, command, "--help")[1].split())
    assert re.search(r"Exit status: 0.*, 1 if .*, 2 (if|for) ", out)
