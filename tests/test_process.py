"""The CPU kernels in a process: stacks, memory, threads. What runs here may break a process, so each has its own."""

import inspect
import multiprocessing
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import pydet
from capi import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    HEADER,
    Tensor,
    _alive,
    ffi,
    last_error,
    lib,
    library_path,
    options,
    pointer,
)
from conftest import run_python, thread_count, threads

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
    return succeeds(run_python("-c", f"{code}import test_process; test_process.{function.__name__}()"))


# ---- Stacks --------------------------------------------------------------------------------------------------------


def test_stack_of_a_call(compiled):
    """Every kernel runs on the stack that the header promises to be enough, and writes nothing beyond it."""
    assert f"at most {STACK // 1024} KiB of its thread's stack" in HEADER.read_text()
    succeeds(run(compiled("stack"), STACK))


def test_stack_of_a_call_without_memory(compiled):
    """The same where the library can map no memory to work in."""
    succeeds(run(compiled("stack"), STACK, "without-memory"))


def test_a_stack_that_is_too_small_is_noticed(compiled):
    """The control of the two tests above: with little stack the guard page is hit, by the probes if by nothing else."""
    assert run(compiled("stack"), 4096).returncode < 0


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


SCAN_GRADIENTS = ("selective_scan_backward", "gated_delta_backward", "causal_conv1d_backward")


def scan_gradient(kernel, values, tensor, x, dy, dtype):
    """A call of one of them, whose tokens are rows: the function, its tensors, its results and options."""
    (m, n), chosen = x.shape, options("pydet_scan_backward_options", kernel=kernel.name)
    function = getattr(lib, f"pydet_{kernel.operation}")
    if kernel.operation == "causal_conv1d_backward":
        w, outs = values(n, 4, dtype=dtype), [np.empty_like(x), values(1, n, 4), values(1, n)]
        given = [tensor(dy[None]), tensor(x[None]), tensor(w), None, None, tensor(outs[0][None])]
        return function, [*given, tensor(outs[1]), tensor(outs[2]), None], outs, chosen
    heads, few, one = x[None, :, None], x[None, :, None, :512], values(1, m, 1)
    dx, db, dc = np.empty_like(heads), np.empty(few.shape, few.dtype), np.empty(few.shape, few.dtype)
    need, extents = ffi.new("uint64_t *"), (1, m, 1, n, 1, few.shape[3])
    assert getattr(lib, f"pydet_{kernel.operation}_workspace")(*extents, need) == lib.PYDET_OK
    workspace = np.zeros(need[0] + 64, np.uint8)
    at = ffi.cast("char *", workspace.ctypes.data) + -workspace.ctypes.data % 16
    chosen.workspace, chosen.workspace_size = at, need[0]
    _alive[chosen] = _alive[chosen], workspace  # which holds what a kernel has no memory for: no result
    if kernel.operation == "selective_scan_backward":
        outs = [dx, np.empty_like(one), values(1, 1), db, dc]
        given = [dy[None, :, None], None, heads, one, one[0, 0], few, few, None, None, None, *outs, None, None]
    else:
        outs = [db, dc, dx, np.empty_like(one), np.empty_like(one)]
        given = [dy[None, :, None], None, few, few, heads, one, one, None, None, *outs, None]
    return function, [y if y is None else tensor(y) for y in given], outs, chosen


def every_kernel():
    """(function, tensors, options, outputs) for every CPU kernel that runs here, on shapes around its tiles."""
    random = np.random.default_rng(1)

    def values(*shape, dtype="fp32"):
        x = random.standard_normal(shape, np.float32)
        if dtype in ("e4m3", "e5m2"):
            return random.integers(0, 0x78, shape, np.uint8)  # finite in both
        return {"fp32": x, "fp16": x.astype(np.float16), "bf16": (x.view(np.uint32) >> 16).astype(np.uint16)}[dtype]

    def tensor(array):
        types = {"float32": FLOAT32, "float16": FLOAT16, "uint16": BFLOAT16, "uint8": (10, 8, 1)}
        types |= {"int32": (0, 32, 1), "int64": (0, 64, 1)}
        return Tensor(array, dtype=types[array.dtype.name])

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
                        if transposed and not continued:
                            begun, sums = tensor(values(m, n)), np.zeros(m * n + 4, np.float32)
                            at = ffi.cast("void *", sums.ctypes.data + -sums.ctypes.data % 16)
                            chosen.initial, chosen.workspace = begun.c, at
                            chosen.workspace_size = (4 * m * n + 15) // 16 * 16
                            _alive[chosen] = _alive[chosen], begun, sums
                        yield lib.pydet_gemm, tensors, chosen, [out]
                    continue
                if kernel.operation == "grouped_gemm":
                    for depth, k_chunk in np.ndindex(2, 2):
                        tokens = k if depth else m
                        a, b = values(m, k, dtype=dtype), values(*(k, n) if depth else (2, k, n), dtype=dtype)
                        out, end = values(*(2, m, n) if depth else (m, n), dtype=dtype), np.int32([tokens // 3, tokens])
                        chosen = options("pydet_grouped_gemm_options", kernel=kernel.name, k_chunk=48 * k_chunk)
                        chosen.arithmetic = getattr(lib, f"PYDET_{kernel.arithmetic.upper()}")
                        tensors = [tensor(a), tensor(b), None, None, tensor(end), tensor(out)]
                        yield lib.pydet_grouped_gemm, tensors, chosen, [out]
                    continue
                if kernel.operation == "attention":
                    for d, e in ((8 * (k % 30 + 1), 40), (576, 512))[: 1 if m > 3 else 2]:
                        q, keys = values(1, 2, m, d, dtype=dtype), values(1, 1, n, d, dtype=dtype)
                        v, out, lse = values(1, 1, n, e, dtype=dtype), values(1, 2, m, e, dtype=dtype), values(1, 2, m)
                        chosen = options("pydet_attention_options", kernel=kernel.name, kv_chunk=128, causal=n % 2)
                        chosen.arithmetic = getattr(lib, f"PYDET_{kernel.arithmetic.upper()}")
                        yield lib.pydet_attention, list(map(tensor, (q, keys, v, out, lse))), chosen, [out, lse]
                    continue
                if kernel.operation == "attention_backward":
                    for d, e in ((8 * (k % 30 + 1), 40), (576, 512))[: 1 if m > 3 else 2]:
                        count = n if d < 576 else n % 400  # of keys: the widest is slow without memory
                        q, keys = values(1, 2, m, d, dtype=dtype), values(1, 1, count, d, dtype=dtype)
                        v, out = values(1, 1, count, e, dtype=dtype), values(1, 2, m, e, dtype=dtype)
                        lse = values(1, 2, m)
                        results = [np.empty_like(x) for x in (q, keys, v)]
                        chosen = options("pydet_attention_backward_options", kernel=kernel.name, causal=n % 2)
                        chosen.arithmetic = getattr(lib, f"PYDET_{kernel.arithmetic.upper()}")
                        tensors = list(map(tensor, (out, q, keys, v, out, lse, *results)))
                        yield lib.pydet_attention_backward, tensors, chosen, results
                    continue
                if kernel.operation == "scaled_gemm":
                    a, b, out = values(m, k, dtype=dtype), values(n, k, dtype=dtype).T, values(m, n)
                    chosen = options("pydet_scaled_gemm_options", kernel=kernel.name, k_chunk=128)
                    chosen.arithmetic = getattr(lib, f"PYDET_{kernel.arithmetic.upper()}")
                    scale = values(m, -(-k // 128))
                    yield (
                        lib.pydet_scaled_gemm,
                        [tensor(a), tensor(scale), tensor(b), None, None, tensor(out)],
                        chosen,
                        [out],
                    )
                    continue
                if kernel.operation == "scaled_grouped_gemm":
                    a, b = values(m, k, dtype=dtype), values(2, n, k, dtype=dtype).swapaxes(1, 2)
                    out, end, scale = values(m, n), np.int32([m // 3, m]), values(m, -(-k // 128))
                    chosen = options("pydet_scaled_grouped_gemm_options", kernel=kernel.name, k_chunk=128)
                    chosen.arithmetic = getattr(lib, f"PYDET_{kernel.arithmetic.upper()}")
                    tensors = [*map(tensor, (a, scale, b)), None, None, None, tensor(end), tensor(out)]
                    yield lib.pydet_scaled_grouped_gemm, tensors, chosen, [out]
                    continue
                x, dy, y = (values(m, n, dtype=dtype) for _ in range(3))
                if kernel.operation == "quantize":
                    for granularity, extent in enumerate((1, -(-n // 128))):
                        q, scale = values(m, n, dtype="e4m3"), values(m, extent)
                        chosen = options("pydet_quantize_options", kernel=kernel.name, granularity=granularity)
                        yield lib.pydet_quantize, [tensor(x), tensor(q), tensor(scale), None, None], chosen, [q, scale]
                    continue
                if kernel.operation == "rmsnorm_quantize":
                    for granularity, extent in enumerate((1, -(-n // 128))):
                        q, scale = values(m, n, dtype="e4m3"), values(m, extent)
                        chosen = options(
                            "pydet_rmsnorm_quantize_options", eps=1e-6, kernel=kernel.name, granularity=granularity
                        )
                        given = [tensor(x), None, None, tensor(q), tensor(scale), tensor(y), None, None]
                        yield lib.pydet_rmsnorm_quantize, given, chosen, [q, scale, y]
                    continue
                if kernel.operation == "fold":
                    pieces = [tensor(x), tensor(dy), tensor(x)]
                    chosen = options("pydet_fold_options", kernel=kernel.name, order=n % 2)

                    parts = ffi.new("pydet_tensor *[]", [piece.c for piece in pieces])

                    def fold(stream, *given, pieces=pieces, parts=parts):
                        return lib.pydet_fold(stream, ffi.cast("const pydet_tensor *const *", parts), 3, *given)

                    yield fold, [tensor(values(n)), tensor(y)], chosen, [y]
                    continue
                if kernel.operation == "adamw":
                    step = options("pydet_adamw_step", lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1)
                    held = [values(m, n, dtype=dtype), *(values(m, n) for _ in range(4))]
                    chosen, given = options("pydet_adamw_options", kernel=kernel.name), [tensor(x) for x in held]
                    lists = [ffi.new("const pydet_tensor *[]", [one.c]) for one in given]
                    if dtype == "fp32":
                        lists[4] = ffi.NULL

                    def adamw(stream, *given, lists=lists, step=step):
                        return lib.pydet_adamw(stream, *lists, 1, step, given[-1])

                    yield adamw, given, chosen, held[:1] + held[2 : 4 + (dtype != "fp32")]
                    continue
                if kernel.operation.startswith("softmax"):
                    chosen = options("pydet_softmax_options", kernel=kernel.name, log=n % 2)
                    function = getattr(lib, f"pydet_{kernel.operation}")
                    inputs = (dy, x) if kernel.operation.endswith("backward") else (x,)
                    yield function, [*map(tensor, inputs), tensor(y)], chosen, [y]
                    continue
                if kernel.operation == "head_rows":
                    weight, index, outs = values(n, 8, dtype=dtype), np.arange(m), [values(m) for _ in range(4)]
                    workspace = np.zeros(m * n * 4 + 2048, np.uint8)
                    chosen = options(
                        "pydet_linear_log_prob_options", kernel=kernel.name, softcap=2, temperature=0.5, arithmetic=1
                    )
                    more = [tensor(out) for out in outs[1:]]
                    chosen.entropy, chosen.lse, chosen.mean = (t.c for t in more)
                    _alive[chosen] = _alive[chosen], more, workspace
                    chosen.workspace = ffi.cast("void *", workspace.ctypes.data)
                    chosen.workspace_size = workspace.nbytes
                    given = list(map(tensor, (values(m, 8, dtype=dtype), weight)))
                    yield lib.pydet_linear_log_prob, [*given, None, tensor(index), tensor(outs[0])], chosen, outs
                    continue
                if kernel.operation.startswith("activation"):
                    chosen = options("pydet_activation_options", kernel=kernel.name, kind=n % 8)
                    function, more = getattr(lib, f"pydet_{kernel.operation}"), values(m, n, dtype=dtype)
                    inputs, outs = ((dy, x, x), (y, more)) if kernel.operation.endswith("backward") else ((x, dy), (y,))
                    yield function, list(map(tensor, inputs + outs)), chosen, list(outs)
                    continue
                if kernel.operation in ("sample", "topk"):
                    whole = [np.arange(m * 3, dtype=np.int64).reshape(3, m)[i] for i in range(3)]
                    chosen = options(f"pydet_{kernel.operation}_options", kernel=kernel.name)
                    if kernel.operation == "sample":
                        chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p = 0.8, 0.9, 1 + n // 2, 0.01
                        outs = whole[2], values(m), values(m)
                        yield lib.pydet_sample, list(map(tensor, (x, *whole[:2], *outs))), chosen, list(outs)
                    else:
                        outs = values(m, 1, dtype=dtype), whole[2].reshape(m, 1)
                        yield lib.pydet_topk, list(map(tensor, (x, *outs))), chosen, list(outs)
                    continue
                if kernel.operation == "embedding":
                    ids, chosen = np.arange(m) * 7 % m, options("pydet_embedding_options", kernel=kernel.name)
                    yield lib.pydet_embedding, list(map(tensor, (x, ids, y))), chosen, [y]
                    continue
                if kernel.operation == "embedding_backward":
                    ids, chosen = (
                        np.arange(m) * 7 % m // 2,
                        options("pydet_embedding_backward_options", kernel=kernel.name),
                    )
                    workspace = np.zeros(8 * m + 64, np.uint8)
                    chosen.workspace = ffi.cast("void *", workspace.ctypes.data)
                    chosen.workspace_size = workspace.nbytes
                    yield lib.pydet_embedding_backward, list(map(tensor, (x, ids, y))), chosen, [y, workspace]
                    continue
                if kernel.operation in SCAN_GRADIENTS:
                    function, given, outs, chosen = scan_gradient(kernel, values, tensor, x, dy, dtype)
                    yield function, given, chosen, outs
                    continue
                if kernel.operation in ("selective_scan", "gated_delta", "causal_conv1d"):
                    chosen, tokens = options("pydet_scan_options", kernel=kernel.name), x[None]
                    if kernel.operation == "causal_conv1d":
                        w = values(n, 4, dtype=dtype)
                        given = [tensor(tokens), tensor(w), None, None, None, tensor(y[None])]
                        yield lib.pydet_causal_conv1d, given, chosen, [y]
                        continue
                    heads, few, one = x[None, :, None], x[None, :, None, :512], values(1, m, 1)
                    if kernel.operation == "selective_scan":
                        state = values(1, 1, n, few.shape[3])
                        given = [*map(tensor, (heads, one, one[0, 0], few, few)), None, None]
                    else:
                        state = values(1, 1, few.shape[3], n)
                        given = [*map(tensor, (few, few, heads, one, one)), None]
                    given += [None, tensor(y[None, :, None]), tensor(state)]
                    yield getattr(lib, f"pydet_{kernel.operation}"), given, chosen, [y, state]
                    continue
                if kernel.operation == "rotary_table":
                    outs = values(m, n), values(m, n)
                    chosen = options("pydet_rotary_table_options", scale=1, kernel=kernel.name)
                    yield (
                        lib.pydet_rotary_table,
                        list(map(tensor, (np.arange(m), values(n), *outs))),
                        chosen,
                        list(outs),
                    )
                    continue
                if kernel.operation == "rotary":
                    q, out = values(m, 2, 2 * n, dtype=dtype), values(m, 2, 2 * n, dtype=dtype)
                    more = values(m, 1, 2 * n, dtype=dtype), values(m, 1, 2 * n, dtype=dtype)
                    table, chosen = values(m, n), options("pydet_rotary_options", kernel=kernel.name, neighbours=n % 2)
                    inputs = list(map(tensor, (q, more[0], table, table, out, more[1])))
                    yield lib.pydet_rotary, inputs, chosen, [out, more[1]]
                    continue
                weight, rstd, dweight = values(n), values(m), values(n)
                if kernel.operation == "rmsnorm":
                    chosen = options("pydet_rmsnorm_options", eps=1e-6, kernel=kernel.name)
                    tensors = [tensor(x), None, tensor(weight), tensor(y), tensor(rstd), None]
                    yield lib.pydet_rmsnorm, tensors, chosen, [y, rstd]
                    continue
                if kernel.operation == "layernorm":
                    chosen = options("pydet_layernorm_options", eps=1e-5, kernel=kernel.name)
                    tensors = [tensor(x), None, tensor(weight), None, tensor(y), None, tensor(rstd), None]
                    yield lib.pydet_layernorm, tensors, chosen, [y, rstd]
                    continue
                workspace = np.zeros(1 << 14, np.float32)
                chosen = options(f"pydet_{kernel.operation}_options", kernel=kernel.name)
                chosen.workspace = ffi.cast("void *", workspace.ctypes.data)
                chosen.workspace_size = workspace.nbytes
                if kernel.operation == "layernorm_backward":
                    dbias = values(n)
                    tensors = [*map(tensor, (dy, x, weight, rstd, rstd)), None, *map(tensor, (y, dweight, dbias))]
                    yield lib.pydet_layernorm_backward, tensors, chosen, [y, dweight, dbias, workspace]
                else:
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
    in_own_process(compare_with_and_without_memory)


# ---- Threads -------------------------------------------------------------------------------------------------------


LARGE = np.random.default_rng(3).standard_normal((300, 300), np.float32)


def large_product():
    return pydet.gemm(LARGE, LARGE).tobytes()


def tasks():
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def compute_where_no_thread_can_be_made():
    out, want = np.zeros_like(LARGE), (LARGE.astype(np.float64) @ LARGE)
    tensors = [Tensor(LARGE), Tensor(LARGE), None, Tensor(out)]
    pointers = list(map(pointer, tensors))
    pydet.gemm(LARGE[:1], LARGE)  # maps memory to work in
    with threads(2):
        before, most = tasks(), resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (1, most))
        status = lib.pydet_gemm(ffi.NULL, *pointers, ffi.NULL)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        assert status == 0 and np.allclose(out, want, atol=1e-3)
        assert tasks() == before
        time.sleep(1.1)  # then it tries again
        assert large_product() == out.tobytes() and tasks() == before + 1


def test_a_thread_that_cannot_be_made():
    """The caller computes alone."""
    in_own_process(compute_where_no_thread_can_be_made)


@pytest.mark.parametrize("kind", ["gemm", "rmsnorm"])
def test_threads_are_as_many_as_said(kind):
    in_own_process({"gemm": count_threads_of_gemm, "rmsnorm": count_threads_of_rmsnorm}[kind])


def count_threads(call):
    before = tasks()
    for count in (1, 3, 2, 5):
        with threads(count):
            call()
    assert tasks() == before + 4  # the caller is one of five


def count_threads_of_gemm():
    x = np.ones((512, 512), np.float32)
    count_threads(lambda: pydet.gemm(x, x))


def count_threads_of_rmsnorm():
    x = np.ones((1024, 1024), np.float32)
    count_threads(lambda: pydet.rmsnorm(x, eps=0))


def large_calls():
    """A call of every function of pydet, by its name; those that compute have work for several threads."""
    x, row, index = np.ones((512, 512), np.float32), np.ones(512, np.float32), np.zeros(512, np.int32)
    tall = np.ones((2048, 512), np.float32)  # a norm takes a row in no time
    half = (x.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    q, scale = pydet.quantize(x, granularity="group")
    end, stack, experts = np.int32([256, 512]), np.stack([x, x]), np.stack([q, q]).swapaxes(1, 2)
    scales = {"a_scale": scale, "b_scale": scale.T}
    heads, ends, pages = x.reshape(1, 8, 512, 64), np.int32([0, 512]), np.arange(8, dtype=np.int32)[None]
    packed, cache = x.reshape(512, 8, 64), x.reshape(8, 64, 8, 64)
    lse, packed_lse = np.ones((1, 8, 512), np.float32), np.ones((512, 8), np.float32)
    return {
        "activation": lambda: pydet.activation(x),
        "activation_backward": lambda: pydet.activation_backward(x, x),
        "adamw": lambda: pydet.adamw(*[[np.ones_like(x)] for _ in range(4)], lr=1, beta_powers=(0, 0)),
        "attention": lambda: pydet.attention(heads, heads, heads),
        "attention_backward": lambda: pydet.attention_backward(heads, heads, heads, heads, heads, lse),
        "attention_paged": lambda: pydet.attention_paged(heads, cache, cache, pages, ends[1:]),
        "attention_varlen": lambda: pydet.attention_varlen(packed, packed, packed, ends, ends),
        "attention_varlen_backward": lambda: pydet.attention_varlen_backward(*[packed] * 5, packed_lse, ends, ends),
        "audit": lambda: pydet.audit(half, half, half, arithmetic="sm90", sample=512),
        "audit_fold": lambda: pydet.audit_fold(np.stack([x, x, x]), x),
        "audit_layernorm": lambda: pydet.audit_layernorm(tall, tall, eps=0),
        "audit_rmsnorm": lambda: pydet.audit_rmsnorm(tall, tall, eps=0),
        "devices": pydet.devices,
        "fold": lambda: pydet.fold([x, x, x]),
        "geglu": lambda: pydet.geglu(x, x),
        "gelu": lambda: pydet.gelu(x),
        "gemm": lambda: pydet.gemm(x, x),
        "gemm_da": lambda: pydet.gemm_da(x, x),
        "gemm_db": lambda: pydet.gemm_db(x, x),
        "grouped_gemm": lambda: pydet.grouped_gemm(x, stack, end),
        "kernels": pydet.kernels,
        "last_kernel": pydet.last_kernel,
        "layernorm": lambda: pydet.layernorm(tall, row, row, eps=0),
        "layernorm_backward": lambda: pydet.layernorm_backward(x, x, row, row, row),
        "log_prob": lambda: pydet.log_prob(x, index),
        "log_prob_backward": lambda: pydet.log_prob_backward(row, x, index),
        "log_softmax": lambda: pydet.log_softmax(x),
        "log_softmax_backward": lambda: pydet.log_softmax_backward(x, x),
        "quantize": lambda: pydet.quantize(x),
        "resolve_arithmetic": lambda: pydet.resolve_arithmetic("float32", ("cpu", 0)),
        "rmsnorm": lambda: pydet.rmsnorm(tall, row, eps=0),
        "rmsnorm_backward": lambda: pydet.rmsnorm_backward(x, x, row, row),
        "rmsnorm_quantize": lambda: pydet.rmsnorm_quantize(x, row, eps=0, residual=x),
        "sample": lambda: pydet.sample(x, index, index, temperature=0.5, top_k=99, top_p=0.9, min_p=0.01),
        "scaled_gemm": lambda: pydet.scaled_gemm(q, q.T, **scales),
        "scaled_grouped_gemm": lambda: pydet.scaled_grouped_gemm(q, experts, end, **scales),
        "sigmoid": lambda: pydet.sigmoid(x),
        "silu": lambda: pydet.silu(x),
        "skinny_gemm": lambda: pydet.skinny_gemm(x, x),
        "softmax": lambda: pydet.softmax(x),
        "softmax_backward": lambda: pydet.softmax_backward(x, x),
        "softplus": lambda: pydet.softplus(x),
        "swiglu": lambda: pydet.swiglu(x, x),
        "topk": lambda: pydet.topk(x, 99),
        "embedding": lambda: pydet.embedding(x, np.arange(len(x))),
        "embedding_backward": lambda: pydet.embedding_backward(x, np.arange(len(x)), len(x)),
        "selective_scan": lambda: pydet.selective_scan(heads, heads[..., 0], row, heads, heads),
        "gated_delta": lambda: pydet.gated_delta(heads, heads, heads, heads[..., 0], heads[..., 0]),
        "causal_conv1d": lambda: pydet.causal_conv1d(x[None], x[:, :4]),
        "selective_scan_backward": lambda: pydet.selective_scan_backward(
            heads, heads, heads[..., 0], row, heads, heads
        ),
        "gated_delta_backward": lambda: pydet.gated_delta_backward(
            heads, heads, heads, heads, heads[..., 0], heads[..., 0]
        ),
        "causal_conv1d_backward": lambda: pydet.causal_conv1d_backward(x[None], x[None], x[:, :4]),
        "linear_log_prob": lambda: pydet.linear_log_prob(x, x, index),
        "linear_log_prob_backward": lambda: pydet.linear_log_prob_backward(row, x, x, index),
        "rotary_table": lambda: pydet.rotary_table(np.arange(len(x)), x[0]),
        "rotary": lambda: pydet.rotary(x[:, None], None, x[:, : x.shape[1] // 2], x[:, : x.shape[1] // 2]),
    }


COMPUTE_NOTHING = {"devices", "kernels", "last_kernel", "resolve_arithmetic"}


def count_threads_of_every_function():
    """Prints `name threads` for each, in a child that has made none so far."""
    with threads(1):
        calls = large_calls()
    for name, call in calls.items():
        child = os.fork()
        if child == 0:
            try:
                call()
                os._exit(min(tasks(), 100))
            except BaseException as problem:
                print(name, repr(problem), flush=True)
                os._exit(101)
        if (status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) <= 100:
            print(name, status, flush=True)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_operation_makes_more_threads_than_said(limit):
    """Each function of the library, by PYDET_NUM_THREADS: as many threads as that, the caller among them, and none
    that stays beyond it."""
    functions = {name for name in pydet.__all__ if inspect.isfunction(getattr(pydet, name))}
    declared = set(re.findall(r"^PYDET_API pydet_status pydet_(\w+)\(void \*stream", HEADER.read_text(), re.M))
    assert len(declared) >= 17 and declared <= functions, "an operation of the header that Python does not have"
    said = in_own_process(count_threads_of_every_function, PYDET_NUM_THREADS=str(limit), OPENBLAS_NUM_THREADS="1")
    counted = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert counted == {name: "1" if name in COMPUTE_NOTHING else str(limit) for name in functions}


@pytest.mark.parametrize(
    ("pydet_says", "openmp_says", "want"),
    [
        ("3", "7", 3),
        ("", "7", 7),
        ("0", "5,2", 5),
        ("-1", "4 ", 4),
        ("two", "6", 6),
        ("3x", "6", 6),
        ("9999999", "", 1024),
    ],
)
def test_thread_count_of_the_environment(pydet_says, openmp_says, want):
    said = in_own_process(print_thread_count, PYDET_NUM_THREADS=pydet_says, OMP_NUM_THREADS=openmp_says)
    assert said.split() == [str(want)]


@pytest.mark.parametrize(
    ("says", "warned"),
    [("x", True), ("0", True), ("-1", True), ("3x", True), (" ", True), ("3", False), ("4 ", False), ("5,2", False)]
    + [("", False), ("+2", False), (" 2", False), ("9999999", False)],
)
def test_a_number_of_threads_that_is_none_is_said(says, warned):
    """By Python, once, in one sentence; of what the library takes for a number nothing is said."""
    source = "import pydet; pydet.devices(); pydet.devices()"
    environment = {**os.environ, "PYDET_NUM_THREADS": says}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    sentence = f"PYDET_NUM_THREADS is {says!r}, want a number from 1; it is passed over, as if it were not set"
    assert done.stderr.count(sentence) == done.stderr.count("Warning") == int(warned)


def print_thread_count():
    print(thread_count())


def print_thread_count_of_one_cpu():
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    print(thread_count())


def call_beside_a_spinning_process():
    everywhere, before = os.sched_getaffinity(0), {*os.listdir("/proc/self/task")}
    x = np.ones((256, 256), np.float32)
    pydet.gemm(x, x)
    pool = {*os.listdir("/proc/self/task")} - before
    mine, other = sorted(everywhere)[:2]
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(spinning.pid, [other])
        os.sched_setaffinity(0, [mine])  # of this thread alone
        for _ in range(300):
            assert (pydet.gemm(x, x) == 256).all()
    finally:
        spinning.kill()
    allowed = lambda: [os.sched_getaffinity(int(thread)) == everywhere for thread in pool]
    end = time.monotonic() + 10
    while not all(allowed()) and time.monotonic() < end:  # one may be on its way
        time.sleep(0.01)
    print(*allowed())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_affinity_of_the_pool_stays():
    """A thread moves off its caller's CPU where others spin elsewhere; it may run there again."""
    assert in_own_process(call_beside_a_spinning_process, PYDET_NUM_THREADS="2").split() == ["True"]


def test_thread_count_of_the_machine():
    empty = {"PYDET_NUM_THREADS": "none", "OMP_NUM_THREADS": "none"}
    assert int(in_own_process(print_thread_count, **empty).split()[0]) <= len(os.sched_getaffinity(0))
    assert in_own_process(print_thread_count_of_one_cpu, **empty).split() == ["1"]


def test_set_threads():
    before = lib.pydet_threads()
    assert lib.pydet_set_threads(-1) == lib.PYDET_INVALID_VALUE and lib.pydet_threads() == before
    assert last_error() == "set_threads: count is -1, want 0 or more"
    assert lib.pydet_set_threads(7) == 0 and lib.pydet_threads() == 7
    assert lib.pydet_set_threads(0) == 0 and lib.pydet_threads() == before


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """The program tests/pool.cpp, with the pool's own sources."""
    native, target = HEADER.parent.parent, tmp_path_factory.mktemp("pool") / "pool"
    sources = [native / "cpu" / f"{name}.cpp" for name in ("pool", "scratch", "thread_count")]
    sources.append(pathlib.Path(__file__).with_name("pool.cpp"))
    command = ["c++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{native}", *sources]
    subprocess.run([*command, "-o", target], check=True)
    return target


def test_pool(pool):
    """Every task runs once, whatever the numbers of tasks, threads and callers."""
    succeeds(run(pool, "stress", "2000"))


def test_more_tasks_than_fit_32_bits(pool):
    succeeds(run(pool, "many"))


CGROUPS = {  # the process's groups, files below the mount, CPUs granted
    "none": ("0::/\n", {}, 1024),
    "unlimited": ("0::/\n", {"cpu.max": "max 100000\n"}, 1024),
    "rounded up": ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
    "a parent's": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
    "the root's": ("0::/a/b\n", {"cpu.max": "50000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 1),
    "version 1": (
        "3:memory:/m\n2:cpu,cpuacct:/d/e\n",
        {"cpu,cpuacct/d/e/cpu.cfs_quota_us": "450000\n", "cpu,cpuacct/d/e/cpu.cfs_period_us": "100000\n"},
        5,
    ),
    "version 1 without": ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1024),
    "another controller": ("2:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "1\n", "cpuset/cpu.cfs_period_us": "1\n"}, 1024),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_cpus_of_cgroups(pool, tmp_path, case):
    groups, files, want = CGROUPS[case]
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert succeeds(run(pool, "cgroups", tmp_path / "groups", tmp_path / "mount")).split() == [str(want)]


# ---- fork, signals, dlclose ----------------------------------------------------------------------------------------


def child_computes(want):
    """Forks; whether the child has the same product, in a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if large_product() == want else 3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}"


def fork_after_a_call():
    with threads(3):
        want = large_product()
        for _ in range(5):
            child_computes(want)
            assert large_product() == want


def fork_before_any_call():
    child_computes(pydet.gemm(LARGE, LARGE, kernel="cpu_gemm_ieee_scalar").tobytes())


def fork_while_others_compute():
    with threads(3):
        want, stop = large_product(), threading.Event()

        def compute():
            while not stop.is_set():
                assert large_product() == want

        others = [threading.Thread(target=compute) for _ in range(2)]
        for other in others:
            other.start()
        try:
            for _ in range(20):
                child_computes(want)
        finally:
            stop.set()
            for other in others:
                other.join()


def product_in_pool(_):
    signal.alarm(60)
    return large_product()


def fork_by_multiprocessing():
    with threads(3):
        want = large_product()
        with multiprocessing.get_context("fork").Pool(3) as workers:
            assert set(workers.map(product_in_pool, range(30))) == {want}


FORKS = [fork_after_a_call, fork_before_any_call, fork_while_others_compute, fork_by_multiprocessing]


@pytest.mark.parametrize("how", FORKS)
def test_fork(how):
    in_own_process(how)


def test_signal_handler(compiled):
    """A handler that calls the library while its thread, and others, are in a call."""
    succeeds(run(compiled("signals")))


def load_and_unload():
    path = str(library_path().resolve())
    out = np.zeros_like(LARGE)
    tensors = [Tensor(LARGE), Tensor(LARGE), None, Tensor(out)]
    ffi.dlclose(lib)
    for _ in range(300):
        out[...] = 0
        library = ffi.dlopen(path)
        library.pydet_set_threads(3)
        assert library.pydet_gemm(ffi.NULL, *map(pointer, tensors), ffi.NULL) == 0 and out.any()
        ffi.dlclose(library)


def test_unloading():
    in_own_process(load_and_unload)
