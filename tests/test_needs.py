"""A kernel refuses a problem that needs what its row does not name.

A field that is added to a problem gets a feature and a term in its needs() (native/ops/*/problem.h). Here every problem
is given a need that no release has: each row of each kernel table must then refuse, and takes the same problem without
it.
"""

import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNSUPPORTED = 11


@functools.cache
def cuda_headers():
    places = [pathlib.Path(nvcc).resolve().parents[1] for nvcc in [shutil.which("nvcc")] if nvcc]
    places += [
        *ROOT.glob("build/cuda-venv/lib/python3*/site-packages/nvidia/cu13"),
        *pathlib.Path("/usr/local").glob("cuda*"),
    ]
    return next((place / "include" for place in places if (place / "include/cuda_runtime.h").exists()), None)


def hip_headers():
    places = (pathlib.Path("/opt/rocm/include"), pathlib.Path("/usr/include"))
    return next((place for place in places if (place / "hip/hip_runtime.h").exists()), None)


def rows(native, folder, backend):
    """What tests/needs.cpp says of each row, by name: (status, sentence)."""
    sources, flags = {
        "cpu": (["gpu/none.cpp"], []),
        "cuda": (["gpu/nvidia/backend.cpp"], [f"-I{cuda_headers()}"]),
        "hip": (
            ["gpu/amd/backend.cpp"],
            [f"-I{hip_headers()}", "-D__HIP_PLATFORM_AMD__", '-DPYDET_HIP_ARCHS="gfx942"'],
        ),
    }[backend]
    program = folder / "needs"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-O0", "-w", "-static", f"-I{native}"]
    command += [f"-I{native}/include", *flags, str(ROOT / "tests/needs.cpp"), f"{native}/cpu/backend.cpp"]
    command += [f"{native}/{source}" for source in sources]
    subprocess.run([*command, "-Wl,--unresolved-symbols=ignore-all", "-o", str(program)], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: (int(status), sentence) for name, status, sentence in (line.split(" ", 2) for line in lines)}


@pytest.mark.parametrize("backend", ["cpu", "cuda", "hip"])
def test_every_row_refuses_a_need_that_it_does_not_name(backend, tmp_path, need):
    need(backend != "cuda" or cuda_headers(), "cuda", "no headers of CUDA here")
    need(backend != "hip" or hip_headers(), "hip", "no headers of HIP here")
    native = tmp_path / "native"
    shutil.copytree(ROOT / "native", native)
    without = rows(native, tmp_path, backend)
    assert any(name.startswith(f"{backend}_") for name in without)
    assert {name: answer for name, answer in without.items() if answer[0] != 0} == {}

    term = re.compile(r"(uint64_t needs\(\) const \{(?:(?!return).)*return )", re.S)
    given = 0
    for header in native.rglob("*.h"):
        text, count = term.subn(r"\g<1>1ull << 63 | ", header.read_text())
        assert count == header.read_text().count("needs() const"), header
        header.write_text(text)
        given += count
    assert given >= 3
    refused = rows(native, tmp_path, backend)
    assert refused.keys() == without.keys()
    why = "which needs more than any release has"
    for name, answer in refused.items():
        assert answer == (UNSUPPORTED, f"needs: kernel {name} does not take this problem, {why}"), name


def test_a_refused_kernel_says_what_it_lacks(tmp_path):
    program = tmp_path / "reasons"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT}/native", f"-I{ROOT}/native/include", str(ROOT / "tests/reasons.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    strides = "not with these strides or this alignment"
    assert said == [
        "gemm: kernel typed does not take this problem: it takes float32 inputs, got bfloat16",
        "gemm: kernel other does not take this problem: it computes arithmetic ieee, and the call asks for sm90",
        "gemm: kernel absent does not take this problem: it needs sm_90a, which CUDA device 1 does not have",
        "gemm: kernel small does not take this problem: not of this shape",
        f"gemm: kernel aligned does not take this problem: {strides}",
        f"gemm: kernel along_k does not take this problem: {strides}",
        "gemm: kernel whole does not take this problem: not with this k_chunk",
        f"gemm: kernel tiled does not take this problem: {strides}",
        f"rmsnorm: kernel held does not take this problem: {strides}",
        "rmsnorm: kernel held does not take this problem: not of this shape",
        "fold: no kernel for arithmetic ieee on float32 inputs on ROCm device 0; it has none for these inputs",
    ]


def test_a_backend_has_a_table_for_each_operation_once(tmp_path):
    source = (ROOT / "native/core/operations.h").read_text()
    listed = re.search(r"AllOperations =\s+Operations<(.*?)>;", source, re.S)[1]
    problems = [name.strip() for name in listed.split(",")]
    assert len(problems) > 10 and "Gemm" in problems

    def said_of(names):
        tables = ", ".join(f"no_kernels<{name}>()" for name in names)
        source = tmp_path / "tables.cpp"
        source.write_text(
            f'#include "core/backend.h"\nnamespace pydet {{ constexpr Tables kTables = tables({tables}); }}\n'
        )
        command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-fsyntax-only", f"-I{ROOT}/native"]
        done = subprocess.run([*command, f"-I{ROOT}/native/include", source], capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    assert said_of(problems) == said_of(problems[::-1]) == ""
    for wrong in (problems[1:], [*problems, problems[0]], [*problems[1:], problems[1]]):
        assert "one table an operation" in said_of(wrong)
