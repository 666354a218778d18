"""The CPU kernels in a process: stacks, memory, threads. What runs here may break a process, so each has its own."""

import pathlib
import resource
import subprocess
import threading

import numpy as np
import pytest

import pydet
from capi import BFLOAT16, FLOAT16, FLOAT32, HEADER, Tensor, ffi, last_error, lib, library_path, options, pointer
from conftest import run_python

STACK = 16 * 1024  # what pydet.h says a call needs


def succeeds(process):
    assert process.returncode == 0, f"exit status {process.returncode}\n{process.stdout}{process.stderr}"
    return process.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(name): the program tests/<name>.c, linked to the library under test."""
    folder = tmp_path_factory.mktemp("programs")

    def program(name):
        source, target, library = pathlib.Path(__file__).with_name(f"{name}.c"), folder / name, library_path().resolve()
        if not target.exists():
            command = ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}", source, "-pthread"]
            subprocess.run([*command, library, f"-Wl,-rpath,{library.parent}", "-o", target], check=True)
        return target

    return program


def run(*command, **environment):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)


def in_own_process(function, **environment):
    """Calls a function of this file in a Python of its own."""
    settings = "".join(f"os.environ[{name!r}] = {value!r}; " for name, value in environment.items())
    code = f"import os, sys; {settings}sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); "
    succeeds(run_python("-c", f"{code}import test_process; test_process.{function.__name__}(); print('done')"))


# ---- Stacks --------------------------------------------------------------------------------------------------------


def test_stack_of_a_call(compiled):
    """Every kernel runs on the stack that the header promises to be enough, and writes nothing beyond it."""
    assert f"at most {STACK // 1024} KiB of its thread's stack" in HEADER.read_text()
    succeeds(run(compiled("stack"), STACK))


def test_stack_of_a_call_without_memory(compiled):
    """The same where the library can map no memory to work in."""
    succeeds(run(compiled("stack"), STACK, "without-memory", OMP_NUM_THREADS="1"))


def test_a_stack_that_is_too_small_is_noticed(compiled):
    """The control of the two tests above: with little stack the guard page is hit, by the probes if by nothing else."""
    assert run(compiled("stack"), 4096, OMP_NUM_THREADS="1").returncode < 0


def calls_of_every_operation():
    for n in (4, 300):
        x = np.ones((n, n), np.float32)
        for arithmetic in ("ieee", "sm90", "sm80", "cdna3", "cdna2"):
            a = x if arithmetic == "ieee" else x.astype(np.float16)
            assert (pydet.gemm(a, a, arithmetic=arithmetic) == n).all()
        y, rstd = pydet.rmsnorm(x, x[0], eps=0)
        assert (y == 1).all()
        dx, dweight = pydet.rmsnorm_backward(x, x, x[0], rstd)
        assert (dx == 0).all() and (dweight == n).all()


def calls_on_small_stacks():
    done = []
    threading.stack_size(256 * 1024)
    for _ in range(3):
        thread = threading.Thread(target=lambda: done.append(calls_of_every_operation()))
        thread.start()
        thread.join()
    assert len(done) == 3


def test_small_stacks_of_python_threads():
    in_own_process(calls_on_small_stacks)


# ---- Memory --------------------------------------------------------------------------------------------------------


def every_kernel():
    """(function, tensors, options, outputs) for every CPU kernel that runs here, on shapes around its tiles."""
    random = np.random.default_rng(1)

    def values(*shape, dtype="fp32"):
        x = random.standard_normal(shape, np.float32)
        return {"fp32": x, "fp16": x.astype(np.float16), "bf16": (x.view(np.uint32) >> 16).astype(np.uint16)}[dtype]

    def tensor(array):
        return Tensor(array, dtype={"float32": FLOAT32, "float16": FLOAT16, "uint16": BFLOAT16}[array.dtype.name])

    for kernel in pydet.kernels():
        if kernel.device != "cpu" or not kernel.available:
            continue
        for dtype in kernel.dtypes.split():
            for m, n, k in [(1, 1, 1), (2, 33, 17), (15, 70, 129), (40, 5, 300), (3, 600, 50)]:
                if kernel.operation == "gemm":
                    for transposed, continued, k_chunk in np.ndindex(2, 2, 2):
                        a, b = values(m, k, dtype=dtype), values(k, n, dtype=dtype)
                        out = values(m, n, dtype="fp32" if continued else dtype)
                        chosen = options("pydet_gemm_options", kernel=kernel.name, k_chunk=48 * k_chunk)
                        chosen.arithmetic = getattr(lib, f"PYDET_{kernel.arithmetic.upper()}")
                        chosen.accumulate = continued
                        b = np.ascontiguousarray(b.T).T if transposed else b
                        tensors = [tensor(a), tensor(b), tensor(values(n)), tensor(out)]
                        yield lib.pydet_gemm, tensors, chosen, [out]
                    continue
                x, dy, y = (values(m, n, dtype=dtype) for _ in range(3))
                weight, rstd, dweight = values(n), values(m), values(n)
                if kernel.operation == "rmsnorm":
                    chosen = options("pydet_rmsnorm_options", eps=1e-6, kernel=kernel.name)
                    tensors = [tensor(x), None, tensor(weight), tensor(y), tensor(rstd), None]
                    yield lib.pydet_rmsnorm, tensors, chosen, [y, rstd]
                else:
                    workspace = np.zeros(1 << 14, np.float32)
                    chosen = options("pydet_rmsnorm_backward_options", kernel=kernel.name)
                    chosen.workspace = ffi.cast("void *", workspace.ctypes.data)
                    chosen.workspace_size = workspace.nbytes
                    tensors = [*map(tensor, (dy, x, weight, rstd)), None, tensor(y), tensor(dweight)]
                    yield lib.pydet_rmsnorm_backward, tensors, chosen, [y, dweight, workspace]


def compare_with_and_without_memory():
    calls = list(every_kernel())
    assert len({call[2].kernel for call in calls}) >= 7
    starts = [[out.copy() for out in outs] for *_, outs in calls]
    most = resource.getrlimit(resource.RLIMIT_AS)[1]

    def results(limit):
        found = []
        for (function, tensors, chosen, outs), start in zip(calls, starts, strict=True):
            for out, values in zip(outs, start, strict=True):
                out[...] = values
            pointers = list(map(pointer, tensors))
            resource.setrlimit(resource.RLIMIT_AS, (limit, most))  # of 1: nothing more can be mapped
            status = function(ffi.NULL, *pointers, chosen)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            assert status == 0, last_error()
            found.append([out.tobytes() for out in outs])
        return found

    assert results(1) == results(most)


def test_bits_without_memory():
    """Where nothing can be mapped, every kernel computes in smaller pieces, with the same bits."""
    in_own_process(compare_with_and_without_memory, OMP_NUM_THREADS="1")
