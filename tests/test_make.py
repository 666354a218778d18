"""What make says before it compiles anything, where it writes, and which glibc a wheel's library asks for."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from capi import ROOT


def make(*arguments, status=0):
    """All that make says, without its work: -n. The settings of a make around the tests are not handed on."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for setting in ("BUILD", "LIBRARY", "CXX", "NVCC", "CUDA_ARCHS"):
        clean.pop(setting, None)
    done = subprocess.run(["make", "-n", "-C", ROOT, *arguments], capture_output=True, text=True, env=clean)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cpu", "CXX=no-g++"], "no C++ compiler 'no-g++'. On Debian: apt install g++. Another one: make CXX=clang++."),
        (["cpu", "BUILD=/proc/x"], "cannot write to BUILD=/proc/x. Name folders that can be written: make cpu BUILD="),
        (["cpu", "LIBRARY=/proc/x"], "cannot write to LIBRARY=/proc/x. Name folders that can be written: make cpu"),
        (["PYTHON=no-python"], "no Python 3.10 or later at 'no-python'. Name one: make PYTHON=python3.12."),
        (["test", "PYTHON=false"], "no Python 3.10 or later at 'false'."),
        (["wheel", "PYTHON=no-python"], "no Python 3.10 or later at 'no-python'."),
        (["cuda", "NVCC=no-nvcc"], "no CUDA compiler 'no-nvcc'. Install CUDA 13, or name it: make NVCC="),
        (["wheel", "NVCC=ccache no-nvcc"], "no CUDA compiler 'ccache no-nvcc'."),
        (["gpu-check", "NVCC=no-nvcc"], "no CUDA compiler 'no-nvcc'."),
    ],
)
def test_what_is_missing_is_said_first(arguments, sentence):
    said = make(*arguments, status=2)
    assert f"*** {sentence}" in said and "-c native" not in said


def test_a_python_without_venv(tmp_path):
    """Debian's python3 without python3-venv: the module is there, ensurepip is not."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$2" in *ensurepip*) echo No module ensurepip >&2; exit 1; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    sentence = f"*** '{python}' makes no virtual environments. On Debian: apt install python3-venv."
    assert sentence in make(f"PYTHON={python}", status=2)
    assert sentence not in make("cpu", f"PYTHON={python}")


def test_a_line_a_file_and_a_log(tmp_path):
    """Commands and what they say go to the log; to the screen where one fails or complains, and under V=1."""
    log, line = tmp_path / "make.log", ["sh", ROOT / "native" / "line.sh"]

    def said(*command, **environment):
        clean = {name: value for name, value in os.environ.items() if name != "V"}
        done = subprocess.run(
            [*line, log, "compile x", *command], capture_output=True, text=True, env=clean | environment
        )
        return done.returncode, done.stdout, done.stderr

    assert said("true", "-O3") == (0, "compile x\n", "")
    assert said("echo", "a warning") == (0, "compile x\n", "a warning\n")
    assert said("true", "-O3", V="1") == (0, "true -O3\n", "")
    status, out, error = said("sh", "-c", "echo wrong >&2; exit 3")
    assert status == 3 and out == "compile x\n"
    assert error.splitlines()[1:] == ["wrong", f"make: this failed with status 3; {log} has all commands"]
    assert log.read_text().splitlines()[:4] == ["true -O3", "echo a warning", "a warning", "true -O3"]


def test_make_says_a_line_a_file(tmp_path):
    said = make("-B", "cpu", f"BUILD={tmp_path}/b", f"LIBRARY={tmp_path}/l")
    lines = re.findall(r"sh native/line\.sh (\S+) '(compile|link) (\S+)' ", said)
    assert {log for log, _, _ in lines} == {f"{tmp_path}/b/make.log"}
    assert len(lines) == said.count(" -o ") and [what for _, what, _ in lines].count("link") == 1
    assert ("compile", "cpu/gemm_tensorcore.scalar") in {line[1:] for line in lines}


def test_the_environment_has_what_the_package_says():
    """It is read from pyproject.toml without a parser, which Python 3.10 does not have."""
    tomllib = pytest.importorskip("tomllib")  # from 3.11
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = stated["project"]
    (install,) = re.findall(r"-m pip install .* --no-compile (.*)", make("-B", ".venv/needed"))
    want = stated["build-system"]["requires"] + project["dependencies"] + project["optional-dependencies"]["test"]
    assert want and sorted(shlex.split(install)) == sorted(want)


def test_what_takes_longest_is_compiled_first(tmp_path):
    said = make("-B", "cpu", f"BUILD={tmp_path}/b", f"LIBRARY={tmp_path}/l")
    names = re.findall(r"'compile (\S+)'", said)
    assert names[0].startswith("cpu/attention.") and len(names) == len(set(names))
    assert max(i for i, name in enumerate(names) if name.startswith("cpu/layernorm.a")) < names.index("core/launch")


def test_all_cores_unless_asked(tmp_path):
    """Jobs of the goals that compile, and as many as -j says."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}

    show = tmp_path / "show.mk"
    show.write_text('include Makefile\nshow: ; @echo "flags: $(MAKEFLAGS)"\n')

    def flags(goal, *options):
        command = [
            "make",
            "-f",
            show,
            "show",
            f"MAKECMDGOALS={goal}",
            *options,
            f"BUILD={tmp_path}/b",
            f"LIBRARY={tmp_path}/l",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=ROOT)
        return re.search(r"flags: (.*)", done.stdout)[1]

    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=True).stdout.strip()
    assert f"-j{cores} " in flags("cpu") + " "
    assert "-j7" in flags("cpu", "-j7") and "-j" not in flags("docs")


def test_help_and_clean_need_nothing():
    assert "sed -n" in make("help", "CXX=no-g++", "BUILD=/proc/x")
    assert "rm -rf" in make("clean", "CXX=no-g++", "BUILD=/proc/x")


def test_a_tree_that_is_only_read(tmp_path):
    """With BUILD and LIBRARY elsewhere nothing is written here, so the tree may be read-only."""
    said = make("-B", "cpu", f"BUILD={tmp_path}/b", f"LIBRARY={tmp_path}/l")
    written = re.findall(r"(?:-o|mkdir -p) (\S+)", said)
    assert len(written) > 10 and all(path.startswith(f"{tmp_path}/") for path in written)


@pytest.mark.parametrize("goal", ["cpu", "cuda"])
def test_every_object_is_hardened(goal, tmp_path):
    """Of kernels the half of the host, too: .ci/check_library.sh sees what is linked, not of which objects."""
    said = make("-B", goal, f"BUILD={tmp_path}/b", f"LIBRARY={tmp_path}/l", "NVCC=true", "CUDA_ARCHS=90a")
    compiled = [line for line in said.replace("\\\n", " ").splitlines() if " -c native/" in line]
    assert len(compiled) > (100 if goal == "cuda" else 40)
    wanted = ["-fstack-protector-strong", *(["-fcf-protection"] if platform.machine() == "x86_64" else [])]
    assert not [line for line in compiled if not all(flag in line for flag in wanted)]


PROGRAM = """
#include <dlfcn.h>
#include <pthread.h>
static void *run(void *x) { return x; }
__attribute__((visibility("default"))) void *both(void *x) {
  pthread_t thread;
  void *result = 0;
  if (pthread_create(&thread, 0, run, x) == 0) pthread_join(thread, &result);
  return dlsym(RTLD_DEFAULT, "malloc") ? result : 0;
}
"""


def test_old_glibc(tmp_path, need):
    """Linked against the stubs, a library of threads and dlsym asks for glibc 2.17 or before, and runs."""
    (tmp_path / "program.c").write_text(PROGRAM)
    need(shutil.which("objdump"), "packages", "objdump is not installed")

    def versions(*flags):
        library = tmp_path / "program.so"
        command = ["cc", "-fPIC", "-shared", tmp_path / "program.c", "-o", library, *flags]
        subprocess.run(command, check=True)
        listed = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True).stdout
        call = f"import ctypes; f = ctypes.CDLL('{library}').both; f.restype = ctypes.c_size_t; assert f(7) == 7"
        subprocess.run([sys.executable, "-c", call], check=True)
        found = {name: version for version, name in re.findall(r"GLIBC_([0-9.]+)\)? +(\w+)$", listed, flags=re.M)}
        return {name: tuple(map(int, found[name].split("."))) for name in ("pthread_create", "pthread_join", "dlsym")}

    subprocess.run([sys.executable, ROOT / "packaging" / "old_glibc.py", tmp_path / "stubs", "cc"], check=True)
    stubs = sorted(map(str, (tmp_path / "stubs").glob("lib*.so.?")))
    assert [path.rsplit("/")[-1] for path in stubs] == ["libdl.so.2", "libpthread.so.0", "librt.so.1"]
    without = versions()
    old = versions(f"-Wl,--push-state,--no-as-needed,{','.join(stubs)},--pop-state")
    assert max(old.values()) <= (2, 17)
    if tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))) >= (2, 34):
        assert min(without.values()) >= (2, 34)  # or the stubs would show nothing
