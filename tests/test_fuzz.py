"""A short run of the fuzzer, in a process of its own; .ci/run has the long one."""

import pathlib
import subprocess
import sys

FUZZ = pathlib.Path(__file__).parent / "fuzz.py"


def fuzz(*arguments):
    return subprocess.run([sys.executable, FUZZ, *arguments], capture_output=True, text=True)


def test_fuzz():
    done = fuzz("--seconds", "5", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "none wrong" in done.stdout


def test_a_case_that_ends_the_process_is_named():
    """A sanitizer ends it with status 1, as a failure that was reported does."""
    done = fuzz("--seconds", "5", "--seed", "1", "--die-at", "3")
    assert done.returncode == 1 and "fuzz: seed 1, case 3: the process died with status 1" in done.stderr, done.stderr
