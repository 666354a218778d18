"""The shared library that the Python package loads: missing, of another kind or release, wanted by two interpreters,
in use when its interpreter ends."""

import re
import subprocess
import sysconfig

import pytest

import pydet
from conftest import run_python

GEMM = """
import numpy, pydet
a = numpy.ones((2, 2), numpy.float32)
try:
    pydet.gemm(a, a)
except pydet.Error as error:
    print(error.status_name, error)
"""


def library_of(tmp_path, **functions):
    """A shared library of functions that return these numbers."""
    source, library = tmp_path / "stub.c", tmp_path / "libstub.so"
    source.write_text("".join(f"int {name}(void) {{ return {number}; }}\n" for name, number in functions.items()))
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def test_missing_library(tmp_path):
    done = run_python("-c", GEMM, library=tmp_path / "libpydet_cpu.so")
    assert re.search(
        rf"^PYDET_\w+ gemm: .*no library serves CPU tensors: {tmp_path}/libpydet_cpu.so is not there, "
        "which PYDET_LIBRARY names$",
        done.stdout.strip(),
    ), (done.stdout, done.stderr)


def test_library_that_does_not_load(tmp_path):
    text = tmp_path / "libtext.so"
    text.write_text("this is no library\n")
    done = run_python("-c", GEMM, library=text)
    assert re.search(rf"{text} is there but does not load: .*(invalid ELF header|file too short)", done.stdout), (
        done.stderr
    )


def test_library_of_something_else(tmp_path):
    library = library_of(tmp_path, other=1)
    done = run_python("-c", GEMM, library=library)
    assert f"{library} is no pydet library: it has no pydet_abi()" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "abi, numerics, words", [(pydet.ABI + 1, pydet.NUMERICS, "ABI"), (pydet.ABI, pydet.NUMERICS + 1, "NUMERICS")]
)
def test_library_of_another_release(tmp_path, abi, numerics, words):
    library = library_of(tmp_path, pydet_abi=abi, pydet_numerics=numerics)
    done = run_python("-c", GEMM, library=library)
    got, want = (abi, pydet.ABI) if words == "ABI" else (numerics, pydet.NUMERICS)
    assert f"{library} has {words} {got}, this Python package wants {want}" in done.stdout, (done.stdout, done.stderr)


# ---- Interpreters ----------------------------------------------------------------------------------------------------


TWO_INTERPRETERS = """
import numpy, pydet
try:
    import _interpreters as interpreters
    second = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    second = interpreters.create(isolated=False)
a = numpy.ones((2, 2), numpy.float32)
print(pydet.gemm(a, a)[0, 0], flush=True)
interpreters.run_string(second, '''
try:
    import pydet
    try:
        pydet.gemm(object(), object())
    except pydet.Error as error:
        print(error.status_name, error, flush=True)
except ImportError as error:
    print(error, flush=True)
''')
interpreters.destroy(second)
print(pydet.gemm(a, a)[0, 0])
try:
    pydet.gemm(a, [1])
except TypeError as error:
    print(error)
"""


def test_a_second_interpreter_is_refused_and_the_first_goes_on():
    """The library has the hooks of one interpreter, which those of another must not replace."""
    done = run_python("-c", TWO_INTERPRETERS)
    first, second, *rest = done.stdout.splitlines()
    assert first == "2.0" and rest[0] == "2.0", (done.stdout, done.stderr)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # there cffi is only the first interpreter's
        assert second == "module _cffi_backend does not support loading in subinterpreters"
    else:
        assert second.startswith("PYDET_UNSUPPORTED gemm: ") and second.endswith(
            "pydet is in use by another interpreter of this process; import it in one of them only"
        )
    assert rest[1].startswith("gemm: b is list, want a tensor") and done.returncode == 0, done.stderr


def test_the_package_may_be_imported_anew():
    """In the interpreter that has it: both copies then work."""
    code = """
import sys, numpy, pydet
old = pydet
for name in [name for name in sys.modules if name.split(".")[0] == "pydet"]:
    del sys.modules[name]
import pydet
a = numpy.ones((2, 2), numpy.float32)
print(old is not pydet, old.gemm(a, a)[0, 0], pydet.gemm(a, a)[0, 0])
"""
    done = run_python("-c", code)
    assert done.stdout.split() == ["True", "2.0", "2.0"], (done.stdout, done.stderr)


@pytest.mark.parametrize("functions", [{}, {"pydet_exchange_functions": 1}])
def test_a_gpu_library_with_other_operations_is_refused(tmp_path, functions):
    library = library_of(tmp_path, pydet_abi=pydet.ABI, pydet_numerics=pydet.NUMERICS, **functions)
    done = run_python(
        "-c",
        f"""
import pathlib, pydet
from pydet import _native, hooks
candidates = _native.candidates
_native.candidates = lambda index: candidates(index) if index == 0 else [pathlib.Path({str(library)!r})]
hooks.load(hooks.constants.PYDET_CPU, "gemm")
for device_type in (hooks.constants.PYDET_CUDA, hooks.constants.PYDET_ROCM):
    try:
        hooks.load(device_type, "gemm")
    except pydet.Error as error:
        print(error.status_name, error)
""",
    )
    refused = f"PYDET_UNSUPPORTED gemm: {library} has other operations than the library of the CPU; build both anew\n"
    assert done.stdout == 2 * refused, done.stderr


# ---- The end -----------------------------------------------------------------------------------------------------


DAEMONS = """
import os, random, sys, threading, time
import numpy, pydet
from capi import Tensor, ffi, lib, pointer

class Carrier:  # read by a hook: Python runs inside the call, and may give the lock away there
    def __init__(self, array): self.array = array
    def __dlpack__(self, **options): return self.array.__dlpack__(**options)
    def __dlpack_device__(self): return self.array.__dlpack_device__()

class Sub(numpy.ndarray):
    pass

large, small = numpy.ones((400, 400), numpy.float32), numpy.ones((4, 4), numpy.float32)
view, out, results = small.view(Sub), numpy.empty_like(small), [numpy.empty_like(large) for _ in range(4)]

def computes(number):
    pydet.gemm(large, large)

def by_cffi(number):
    operands = [Tensor(array) for array in (large, large, results[number])]
    a, b, product = map(pointer, operands)
    assert lib.pydet_gemm(ffi.NULL, a, b, ffi.NULL, product, ffi.NULL) == 0

def enters_hooks(number):
    pydet.gemm(view, view)
    pydet.gemm(Carrier(small), Carrier(small), out=out)
    pydet.fold([view] * 5)

def attends(number):
    mask = numpy.ones((4, 4), bool)
    pydet.attention(large.reshape(1, 10, 250, 64), *[large.reshape(1, 5, 500, 64)] * 2, causal=True)
    pydet.attention(*[numpy.ones((1, 1, 4, 8), numpy.float32).view(Sub)] * 3, allowed=mask.view(Sub), return_lse=True)

def is_refused(number):
    try:
        pydet.gemm(view, large)
    except pydet.Error:
        pass

every = []
if sys.argv[1] == "every_function":
    from test_process import large_calls
    every = list(large_calls().values())

def every_function(number):
    random.choice(every)()

def loop(number, call):
    while True:
        call(number)

def start():
    for number in range(4):
        threading.Thread(target=loop, args=(number, call), daemon=True).start()
    time.sleep(0.05)

call, forks = globals()[sys.argv[1]], sys.argv[2:] == ["forks"]
start()
if forks:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, "the child did not exit cleanly"
    else:
        start()
print("main returns", flush=True)
"""


@pytest.mark.parametrize("forks", [False, True], ids=["", "forks"])
@pytest.mark.parametrize("call", ["computes", "by_cffi", "enters_hooks", "is_refused", "attends", "every_function"])
def test_exit_while_daemon_threads_are_in_a_call(call, forks):
    """Python ends such a thread where it asks for the lock again, by unwinding its stack: nothing of the library's may
    run then. Where it is, is chance: twice, in CI by two Pythons."""
    for _ in range(2):
        done = run_python("-W", "ignore", "-c", DAEMONS, call, *["forks"] * forks)
        assert done.returncode == 0 and set(done.stdout.splitlines()) == {"main returns"}, (
            done.returncode,
            done.stderr,
        )
        assert not done.stderr, done.stderr
