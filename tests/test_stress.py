"""Stress as a command (stress.py), for a moment and on the CPU: it counts every call, and sees one changed bit."""

import json
import pathlib
import subprocess
import sys

from interop import torch  # noqa: F401 (fixture)

STRESS = pathlib.Path(__file__).parent / "stress.py"


def stress(tmp_path, *arguments):
    found = tmp_path / "counts.json"
    command = [sys.executable, STRESS, "--device", "cpu", "--kernels", "rmsnorm", "--seconds", "0.2", "--json", found]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    return done, json.loads(found.read_text()) if found.exists() else None


def test_stress(torch, tmp_path):
    done, found = stress(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 results differ" in done.stdout and not found["missing"]
    assert {"cpu_rmsnorm_scalar", "cpu_rmsnorm_backward_scalar"} <= set(found["counts"])
    assert all(calls > 0 and differing == 0 for calls, differing in found["counts"].values())


def test_attention_in_every_layout(torch, tmp_path):
    done, found = stress(tmp_path, "--kernels", "attention")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not found["missing"] and {name.split("_")[1] for name in found["counts"]} == {"attention"}
    assert all(calls > 0 and differing == 0 for calls, differing in found["counts"].values())
    done, found = stress(tmp_path, "--kernels", "attention_sm90", "--spoil", "7")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [differing > 0 for _, differing in found["counts"].values()].count(True) == 1


def test_a_changed_bit_is_counted(torch, tmp_path):
    done, found = stress(tmp_path, "--spoil", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [differing > 0 for _, differing in found["counts"].values()].count(True) == 1
