"""Which kernels the tests walk, and the settings of the calling thread that they vary.

A test that takes `gemm_kernel`, `rmsnorm_kernel`, `softmax_kernel` or the like runs once for every CPU kernel of that
operation that this machine can run, and once for each element type that the kernel takes; the kernel is forced by name.
"""

import contextlib
import ctypes
import functools
import glob
import importlib.util
import os
import pathlib
import platform
import subprocess
import sys

import pytest

import pydet
from pydet import _native

if os.environ.get("GPU_WORKERS") and "PYTEST_XDIST_WORKER" in os.environ:  # make gpu-tests: each process has one GPU
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    gpus = gpus or [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))] or ["0"]
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["PYTEST_XDIST_WORKER"][2:]) % len(gpus)]

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(
    0, str(pathlib.Path(__file__).parent.parent / "tools" / "amd")
)  # the interpreter and the runtime of HIP


def processor_seconds():
    """What this process has taken of processors, and those that it started and waited for."""
    return sum(os.times()[:4])


ACCOUNT = os.environ.get("PYDET_ACCOUNT")  # a file that gets what each test took, as seconds of processor time


def account(seconds, what):
    with open(ACCOUNT, "a") as file:
        file.write(f"{seconds:.2f}\t{what}\n")


def pytest_collection_finish(session):
    if ACCOUNT:  # in each process of pytest-xdist
        account(processor_seconds(), "imports, collection")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    before = processor_seconds()
    yield
    if ACCOUNT:
        account(processor_seconds() - before, item.nodeid)


def pytest_sessionfinish(session):
    """Ranks are children of a server of forks, whose time is this process's once that has ended."""
    server = sys.modules.get("multiprocessing.forkserver")
    if ACCOUNT and server:
        before = processor_seconds()
        server._forkserver._stop()
        account(processor_seconds() - before, "ranks, of all tests")


FAILURES = os.environ.get("PYDET_FAILURES")  # a file that gets each failure as it comes, for runs that are cut short


def pytest_runtest_logreport(report):
    if FAILURES and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:  # its main process hears of all
        with open(FAILURES, "a") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


class ForcedKernel:
    """One kernel at one element type. Its operations take NumPy arrays and have pydet's signatures."""

    def __init__(self, info, dtype):
        self.name, self.arithmetic, self.dtype = info.name, info.arithmetic, dtype

    def __getattr__(self, operation):
        return functools.partial(getattr(pydet, operation), kernel=self.name)


def forced_kernels(operation):
    return [
        ForcedKernel(info, dtype)
        for info in pydet.kernels()
        if info.device == "cpu" and info.operation == operation and info.available
        for dtype in info.dtypes.split()
    ]


def pytest_generate_tests(metafunc):
    norms = ["rmsnorm", "rmsnorm_backward", "softmax", "softmax_backward", "layernorm", "layernorm_backward", "fold"]
    norms += ["activation", "activation_backward", "sample", "topk", "embedding", "embedding_backward"]
    norms += ["rmsnorm_quantize", "selective_scan", "gated_delta", "causal_conv1d", "rotary_table", "rotary"]
    norms += ["selective_scan_backward", "gated_delta_backward", "causal_conv1d_backward", "head_rows", "adamw"]
    products = ["gemm", "scaled_gemm", "quantize", "grouped_gemm", "scaled_grouped_gemm"]
    for operation in [*products, "attention", "attention_backward", *norms]:
        if f"{operation}_kernel" in metafunc.fixturenames:
            kernels = forced_kernels(operation)
            assert kernels, f"no kernel of {operation} can run here"
            metafunc.parametrize(f"{operation}_kernel", kernels, ids=[f"{k.name}-{k.dtype}" for k in kernels])


@pytest.fixture
def need():
    """need(condition, extra, reason): the test cannot run without an optional package. It is skipped with the reason,
    or fails if PYDET_TEST_EXTRAS says that the package is meant to be here."""

    def check(condition, extra, reason):
        if not condition:
            (pytest.fail if extra in os.environ.get("PYDET_TEST_EXTRAS", "").split() else pytest.skip)(reason)

    return check


@pytest.fixture
def transformers(need):
    """The package, with pydet's attention registered."""
    need(importlib.util.find_spec("transformers"), "models", "no Transformers here")
    import transformers

    import pydet.torch

    transformers.logging.set_verbosity_error()
    pydet.torch.register_attention()
    return transformers


def run_python(*arguments, library=None):
    """A Python of its own, outside the tree, with the packages of this one; `library`: its PYDET_LIBRARY."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if library is not None:
        environment["PYDET_LIBRARY"] = str(library)
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)


def thread_count():
    """How many threads a call on the CPU may use."""
    return _native.load(_native.constants.PYDET_EXCHANGE_CPU).lib.pydet_threads()


@contextlib.contextmanager
def threads(count):
    """Sets that number for the process."""
    library = _native.load(_native.constants.PYDET_EXCHANGE_CPU)
    library.check(library.lib.pydet_set_threads(count))
    try:
        assert thread_count() == count
        yield
    finally:
        library.check(library.lib.pydet_set_threads(0))


@contextlib.contextmanager
def unusual_float_environment():
    """Flush-to-zero, subnormals read as zero and rounding toward +infinity on this thread; yields a function that says
    whether they are still set."""
    libm = ctypes.CDLL("libm.so.6")
    saved, changed, after = (ctypes.create_string_buffer(64) for _ in range(3))
    libm.fegetenv(saved)
    changed[:] = saved[:]
    if platform.machine() == "x86_64":
        offset, bits = 28, 0x8000 | 0x0040 | 0x4000  # glibc's fenv_t holds MXCSR there: FTZ, DAZ, round up
    elif platform.machine() == "aarch64":
        offset, bits = 0, 1 << 24 | 1 << 22  # FPCR: FZ, round up
    else:
        pytest.skip(f"the layout of fenv_t on {platform.machine()} is not known here")
    word = ctypes.c_uint32.from_buffer(changed, offset)
    word.value |= bits
    libm.fesetenv(changed)

    def still_set():
        libm.fegetenv(after)
        return ctypes.c_uint32.from_buffer(after, offset).value & bits == bits

    try:
        assert still_set()
        yield still_set
    finally:
        libm.fesetenv(saved)
