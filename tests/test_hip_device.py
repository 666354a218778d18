"""Every HIP kernel on an AMD GPU, forced by name, against the CPU's kernels, and against itself in other surroundings.

Device memory, streams and graphs come from hip-python. The library is PYDET_LIBRARY, or libpydet_hip.so beside the
package. Without a GPU, test_hip.py runs this file in a process of its own, on the stand-in runtime (fakehip.py) as the
architecture that PYDET_HIP_STAND_IN names: the same tests on the smallest of the problems, so that they are known to
work when a GPU is there.
"""

import functools
import importlib.util
import itertools
import os
import pathlib
import random
import tempfile

import numpy as np
import pytest

import capi
import cases
import fakehip
import interop
import pydet
import test_cuda
import test_fold
import test_gemm
import test_golden
import test_grouped_gemm
import test_layernorm
import test_rmsnorm
import test_scaled_gemm
import test_scaled_grouped_gemm
import test_softmax
from cases import DTYPES, Problem, assert_same_bits, data
from pydet import frameworks

ROCM = 10  # DLPack's kDLROCM
UNSUPPORTED, INVALID_DEVICE = 11, 5
ARCH = os.environ.get("PYDET_HIP_STAND_IN", "")
if ARCH:  # before the library is loaded, whose devices are those of the runtime
    LIBRARY, FOLDER = pathlib.Path(os.environ["PYDET_LIBRARY"]), tempfile.TemporaryDirectory()
    RUNTIME = fakehip.StandIn("libamdhip64.so", LIBRARY, pathlib.Path(FOLDER.name))
    RUNTIME.start(ARCH, devices=2)
DEVICES = [device for device in pydet.devices() if device.kind == "rocm"]
GUARD = 256  # bytes before and after all memory, which nobody may write


def scaled(on_device, on_stand_in):
    """A size for a GPU, or one for the interpreter."""
    return on_stand_in if ARCH else on_device


class Runtime:
    """hip-python's functions, whose statuses are checked."""

    def __init__(self, hip):
        self.hip = hip

    def __getattr__(self, name):
        def call(*arguments):
            result = getattr(self.hip, name)(*arguments)
            status, *values = result if isinstance(result, tuple) else (result,)
            if status != self.hip.hipError_t.hipSuccess and ARCH and RUNTIME.problem:
                raise RUNTIME.problem
            assert status == self.hip.hipError_t.hipSuccess, f"{name}: {status.name}"
            return values[0] if values else None

        return call


class Buffer:
    """Memory of the current device between guards, full of one byte."""

    def __init__(self, runtime, size, byte=0xFF):
        self.runtime, self.size, self.whole = runtime, size, runtime.hipMalloc(size + 2 * GUARD)
        self.address = int(self.whole) + GUARD
        self.write(np.full(size + 2 * GUARD, byte, np.uint8), -GUARD)
        self.guard = bytes([byte]) * GUARD

    def write(self, array, offset=0):
        kind = self.runtime.hip.hipMemcpyKind.hipMemcpyHostToDevice
        self.runtime.hipMemcpy(self.address + offset, array, array.nbytes, kind)

    def read(self):
        """The bytes, once the device is idle."""
        self.runtime.hipDeviceSynchronize()
        found = np.empty(self.size + 2 * GUARD, np.uint8)
        kind = self.runtime.hip.hipMemcpyKind.hipMemcpyDeviceToHost
        self.runtime.hipMemcpy(found, self.address - GUARD, found.nbytes, kind)
        assert found[:GUARD].tobytes() == found[-GUARD:].tobytes() == self.guard, "bytes around the memory changed"
        return found[GUARD:-GUARD]

    def __del__(self):
        self.runtime.hipFree(self.whole)


class OnRocm(interop.Producer):
    """A tensor in a buffer, by DLPack. Strides and the start are in elements."""

    def __init__(self, memory, dtype, shape, strides=None, start=0, device=0):
        self.memory, self.dtype, self.shape = memory, np.dtype(dtype), tuple(shape)
        strides = list(np.cumprod([1, *reversed(shape[1:])])[::-1]) if strides is None and shape else strides
        self.strides, self.start = [int(stride) for stride in strides or []], start
        kind = capi.dtype_of(np.empty(0, dtype))
        address = memory.address + start * self.dtype.itemsize
        where = {"data": address, "device": (ROCM, device)}
        super().__init__(capi.Tensor(shape=shape, strides=self.strides, dtype=kind, **where))

    def numpy(self):
        words = self.memory.read()[: self.memory.size // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        strides = [stride * self.dtype.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(words[self.start :], self.shape, strides).copy()


class Rocm(frameworks.Framework):
    """The framework of these tensors, as the package knows those of others: full of `byte`, on the device's stream."""

    name, number, device = "tensors on ROCm", 9, None

    def stream(self, like, device_type, device_id):
        return self.device.stream

    def allocate(self, like, shape, index, op):
        dtype = frameworks.numpy_dtype(index)
        size, on = int(np.prod(shape)) * dtype.itemsize, self.device
        memory = on.reserve.pop() if on.reserve else Buffer(on.runtime, size, on.byte)
        assert memory.size >= size
        on.allocated.append(memory)
        return OnRocm(memory, dtype, shape, device=like.tensor.c.device.device_id)


class OnDevice:
    """pydet's operations on NumPy arrays, computed on the device by one kernel, or by the library's choice; and, on
    tensors that are on the device, the operations themselves."""

    def __init__(self, runtime):
        self.runtime, self.stream, self.byte, self.reserve, self.allocated = runtime, 0, 0xFF, [], []
        self.forced(None)

    def forced(self, kernel):
        self.kernel, self.taken = kernel, 0
        return self

    def to_device(self, array):
        """A tensor on a copy of the array's whole memory."""
        memory, owner = array, array.base
        while owner is not None:  # as_strided puts objects that are no arrays in between
            memory = owner if isinstance(owner, np.ndarray) else memory
            owner = getattr(owner, "base", None)
        whole, offset = memory.ravel(order="K").view(np.uint8), array.ctypes.data - memory.ctypes.data
        assert whole.nbytes == memory.nbytes and offset % array.itemsize == 0
        copy = Buffer(self.runtime, max(whole.nbytes, 1))
        if whole.nbytes:
            copy.write(whole)
        strides = [stride // array.itemsize for stride in array.strides]
        return OnRocm(copy, array.dtype, array.shape, strides, offset // array.itemsize)

    def empty(self, shape, dtype):
        return OnRocm(Buffer(self.runtime, int(np.prod(shape)) * dtype.itemsize, self.byte), dtype, shape)

    def call(self, operation, *operands, **options):
        outputs = []

        def move(value):
            if not isinstance(value, np.ndarray):
                return value
            tensor = self.to_device(value)
            outputs.append((value, tensor))
            return tensor

        options = {name: value if name.endswith("dtype") else move(value) for name, value in options.items()}
        function, operands = getattr(pydet, operation), [move(operand) for operand in operands]
        try:
            results = function(*operands, kernel=self.kernel, **options)
            self.taken += 1
        except pydet.Error as error:
            if self.kernel is None or error.status != UNSUPPORTED:
                raise
            results = function(*operands, **options)
        for array, tensor in outputs:
            if array.flags.writeable and array.size:
                memory = array
                while memory.base is not None:
                    memory = memory.base if isinstance(memory.base, np.ndarray) else memory.base.base
                memory.reshape(-1, order="A").view(np.uint8)[...] = tensor.memory.read()[: memory.nbytes]
        numpy = lambda result: None if result is None else result.numpy()
        return tuple(map(numpy, results)) if isinstance(results, tuple) else numpy(results)

    def __getattr__(self, operation):
        if operation.startswith("_"):
            raise AttributeError(operation)
        return functools.partial(self.call, operation)


@pytest.fixture(scope="module")
def device():
    if importlib.util.find_spec("hip") is None:
        pytest.skip("hip-python is not installed, from which device memory comes (pip install hip-python)")
    if not hip_kernels("gemm"):
        pytest.skip("libpydet_hip.so is not built (make hip)")
    if not DEVICES:
        pytest.skip("no AMD GPU is here")
    runtime = capi.ffi.dlopen(None)
    if not ARCH and hasattr(runtime, "fakehip_reset"):
        pytest.skip("test_hip.py's stand-in runtime is in this process: run tests/test_hip_device.py by itself")
    from hip import hip

    key = __name__, "OnRocm"
    frameworks.FRAMEWORKS[key], Rocm.device = Rocm, OnDevice(Runtime(hip))
    yield Rocm.device
    del frameworks.FRAMEWORKS[key]


@pytest.fixture(autouse=True)
def fresh(request):
    """Each test starts with the defaults; what went wrong in the stand-in is raised as it was."""
    if Rocm.device:
        Rocm.device.forced(None)
        Rocm.device.stream, Rocm.device.byte, Rocm.device.reserve, Rocm.device.allocated = 0, 0xFF, [], []
    yield
    if ARCH and RUNTIME.problem:
        problem, RUNTIME.problem = RUNTIME.problem, None
        raise problem


def hip_kernels(operation):
    """The library's rows of this operation that run here; all of them where there is no device, for the reports."""
    rows = [kernel for kernel in pydet.kernels() if kernel.device == "rocm" and kernel.operation == operation]
    return [kernel for kernel in rows if kernel.available or not DEVICES]


def each(operation):
    """Parametrizes by kernel and by the element types it takes; on the stand-in by the last of them."""
    pairs = [(kernel, dtype) for kernel in hip_kernels(operation) for dtype in kernel.dtypes.split()[scaled(0, -1) :]]
    if not pairs:
        missing = pytest.mark.skip("libpydet_hip.so is not built (make hip)")
        return pytest.mark.parametrize("kernel,dtype", [pytest.param(None, None, marks=missing)])
    return pytest.mark.parametrize("kernel,dtype", pairs, ids=[f"{kernel.name}-{dtype}" for kernel, dtype in pairs])


def arithmetic_of(dtype):
    return pydet.resolve_arithmetic(DTYPES[dtype], ("rocm", 0))


def normal(*shape, dtype="bf16", seed=0):
    return data("normal", shape, DTYPES[dtype], seed)


# ---- GEMM ------------------------------------------------------------------------------------------------------------


# m, n, k, k_chunk: enough chunks for so many rows that they lie side by side, where k is adjacent in both operands.
MANY_CHUNKS = [
    *((3, 40, 280, 16), (16, 72, 600, 32), (17, 40, 200, 16)),
    *((33, 136, 1000, 64), (65, 72, 520, 80), (128, 40, 336, 48)),
]


def problems_for(arithmetic, dtype):
    base = functools.partial(Problem, dtype=dtype, arithmetic=arithmetic)
    for m, n, k, k_chunk in MANY_CHUNKS[: scaled(None, 1)]:
        yield base(m, n, k, b_layout="col", k_chunk=k_chunk, out_dtype="bf16")
    if not ARCH:
        yield from test_cuda.problems_for(arithmetic, dtype)
        return
    yield base(5, 19, 20, out_dtype="bf16", out_layout="row_padded", bias="n fp32")
    yield base(17, 33, 24, a_layout="col_padded", b_layout="col", accumulate=True)
    yield base(3, 40, 40, b_layout="col", k_chunk=16, bias="mn bf16", out_dtype="fp16")
    yield base(2, 9, 17, batch=(2,), kind="specials", a_layout="row_padded")
    yield base(3, 5, 0, bias="n fp32")


@each("gemm")
def test_gemm_equals_cpu(device, kernel, dtype):
    device.forced(kernel.name)
    test_cuda.check_equals_cpu(device, problems_for(kernel.arithmetic, dtype))
    assert device.taken >= scaled(5, 1), f"{kernel.name} took {device.taken} problems"


@each("gemm")
def test_chunks_across_stages(device, kernel, dtype):
    """On the stand-in by one chunk alone: test_hip.py has the others."""
    problems, rows = scaled((None, cases.ROWS), ([(40, 32)], (1, 17)))
    cases.check_chunks(device.forced(kernel.name).gemm, kernel.arithmetic, dtype, problems, rows)


@each("gemm")
def test_random_problems(device, kernel, dtype):
    """As in test_cuda.py; on the stand-in small ones."""
    seed, count = int(os.environ.get("FUZZ_SEED", "1")), int(os.environ.get("FUZZ_CASES", scaled("40", "1")))
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        problem = cases.random_problem(rng, dtype, kernel.arithmetic, *scaled((), (20, 40, 100)))
        got = cases.run(device.forced(kernel.name).gemm, problem)
        assert_same_bits(got, test_cuda.on_cpu(problem), f"FUZZ_SEED={seed}, case {number}: {problem}")


@each("gemm")
def test_small_integers(device, kernel, dtype):
    if ARCH:
        pytest.skip("the interpreter would take minutes")
    test_gemm.check_small_integers(device.forced(kernel.name).gemm, kernel.arithmetic, dtype)


@each("gemm")
def test_golden_of_gemm(device, kernel, dtype):
    if ARCH:
        pytest.skip("the interpreter would take minutes")
    test_golden.check_golden("gemm", device.forced(kernel.name).gemm, kernel.arithmetic, dtype)
    test_golden.check_golden("skinny_gemm", device.forced(kernel.name).skinny_gemm, kernel.arithmetic, dtype)


@pytest.mark.parametrize("dtype", scaled([*DTYPES], ["bf16"]))
@pytest.mark.parametrize("k_chunk", [None, 32])
def test_skinny_rows_equal_cpu(device, dtype, k_chunk):
    """Numbers of rows up to 130, by the kernel that the library chooses and by each other; ragged N and K."""
    arithmetic = arithmetic_of(dtype)
    rows = [kernel for kernel in hip_kernels("gemm") if dtype in kernel.dtypes]
    names = [kernel.name for kernel in rows if kernel.arithmetic == arithmetic]
    for n, k in scaled([(331, 8), (72, 1000), (200, 2880), (40, 14336)], [(19, 40)]):
        x, w, bias = normal(130, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1), normal(130, n, seed=2)
        options = {"arithmetic": arithmetic, "k_chunk": k_chunk, "out_dtype": DTYPES["fp32"]}
        on_device = device.to_device(w)
        for m in scaled(range(1, 131), [1, 17]):
            want = pydet.skinny_gemm(x[:m], w, bias=bias[:m], **options)
            for name in [None, *names]:
                given = {"bias": bias[:m], **options}
                got = device.forced(name).call("skinny_gemm", x[:m], on_device, **given)
                assert_same_bits(got, want, f"{name}, {m} x {n} x {k}")


@pytest.mark.parametrize("dtype", scaled([*DTYPES], ["bf16"]))
def test_row_bits_against_batch(device, dtype):
    """A row of a large product is that row alone, and in every batch size, whatever kernel each of them got."""
    rows, n, k = scaled((4096, 776, 1032), (70, 20, 24))
    a, w, kernels = normal(rows, k, dtype=dtype), device.to_device(normal(n, k, dtype=dtype, seed=1)), set()
    whole = device.skinny_gemm(a, w)
    for m in scaled([1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 300, 1000, 2048, 4095], [1, 20]):
        first = (rows - m) // 2
        part = device.skinny_gemm(a[first : first + m], w)
        kernels.add(pydet.last_kernel())
        assert_same_bits(part, whole[first : first + m], f"M = {m}")
    assert len(kernels) >= scaled(2, 1), kernels
    among = np.full_like(a, np.nan)
    among[::3] = a[::3]
    assert_same_bits(device.skinny_gemm(among, w)[::3], whole[::3], "among NaN rows")


@pytest.mark.parametrize("dtype", scaled(["bf16", "fp16"], ["fp16"]))
def test_gradient_accumulation(device, dtype):
    """db of one batch, and of micro-batches added into it, cut at multiples of the step."""
    rows, k, n = scaled((4096, 768, 1280), (64, 5, 20))
    a, dc = normal(rows, k, dtype=dtype), normal(rows, n, dtype=dtype, seed=1)
    whole = device.gemm_db(a, dc, out_dtype=DTYPES["fp32"])
    for cuts in ([rows // 4, rows // 2], [16, rows - 16]):
        out = np.zeros_like(whole)
        for first, last in zip([0, *cuts], [*cuts, rows], strict=True):
            device.gemm_db(a[first:last], dc[first:last], out=out, accumulate=True)
        assert_same_bits(out, whole, str(cuts))
    b = normal(k, n, dtype=dtype, seed=2)
    assert_same_bits(device.gemm_da(dc, b), pydet.gemm_da(dc, b, arithmetic=arithmetic_of(dtype)), "gemm_da")


def test_empty(device):
    for m, n, k in [(0, 5, 6), (5, 0, 6), (5, 6, 0), (0, 0, 0)]:
        out = device.gemm(normal(m, k), normal(k, n))
        assert out.shape == (m, n) and not out.any()


# ---- fp8 -------------------------------------------------------------------------------------------------------------


@each("scaled_gemm")
def test_scaled_gemm_equals_cpu(device, kernel, dtype):
    device.forced(kernel.name)
    sizes = scaled([(1, 1, 1), (5, 130, 0), (65, 63, 129), (200, 300, 1000), (128, 64, 4096)], [(3, 9, 130)])
    if "skinny" in kernel.name:  # up to 16 rows, k in pieces of 16
        sizes = scaled([(1, 1, 16), (2, 130, 32), (16, 63, 144), (3, 300, 1008), (9, 64, 4096)], [(3, 9, 144)])
    scales = itertools.cycle([("group", "block"), ("row", "row"), ("group", "group"), ("tensor", "tensor")])
    for (m, n, k), (a_scale, b_scale) in zip(sizes * scaled(4, 1), scales, strict=False):
        given = {"a_type": dtype, "a_scale": a_scale, "b_scale": b_scale, "arithmetic": "ieee"}
        problem = test_scaled_gemm.Scaled(m, n, k, **given)
        got, want = (test_scaled_gemm.run(library.scaled_gemm, problem) for library in (device, pydet))
        assert_same_bits(got, want, f"{kernel.name}: {problem}")
    assert device.taken >= scaled(20, 1)


# ---- Groups ----------------------------------------------------------------------------------------------------------


@each("grouped_gemm")
def test_grouped_gemm_equals_cpu(device, kernel, dtype):
    """Every routing, rows and depth; of several tiles, of none, backwards and past the last token."""
    device.forced(kernel.name)
    small = {"rows": 9, "n": 9, "dtype": dtype, "arithmetic": kernel.arithmetic}
    few = [test_grouped_gemm.Grouped("gaps", kernel.arithmetic != "ieee", **small)]
    for problem in scaled(test_grouped_gemm.problems_of(dtype, kernel.arithmetic), few):
        got, want = (test_grouped_gemm.run(library.grouped_gemm, problem) for library in (device, pydet))
        assert_same_bits(got, want, f"{kernel.name}: {problem}")
    assert device.taken >= scaled(10, 1)


@each("scaled_grouped_gemm")
def test_scaled_grouped_gemm_equals_cpu(device, kernel, dtype):
    device.forced(kernel.name)
    few = [test_scaled_grouped_gemm.ScaledGrouped("gaps", 40, 9, dtype, arithmetic="ieee")]
    for problem in scaled(test_scaled_grouped_gemm.problems_of(dtype, kernel.arithmetic), few):
        got, want = (test_scaled_grouped_gemm.run(library.scaled_grouped_gemm, problem) for library in (device, pydet))
        assert_same_bits(got, want, f"{kernel.name}: {problem}")
    assert device.taken >= scaled(20, 1)


@pytest.mark.parametrize("operation", ["grouped_gemm", "scaled_grouped_gemm"])
def test_groups_of_new_boundaries(device, operation):
    """Captured once and replayed as the device's own boundaries change: rows in no group keep what they held."""
    tokens, k, n = 40, 24, 9
    a, b, more = normal(tokens, k, dtype="fp32"), normal(3, k, n, dtype="fp32", seed=1), {"arithmetic": "ieee"}
    if operation == "scaled_grouped_gemm":
        a, b = (test_scaled_gemm.fp8("any", x.shape, test_scaled_gemm.TYPES["e4m3"]) for x in (a, b))
        more |= {"a_scale": None, "b_scale": None}
    function, runtime = getattr(pydet, operation), device.runtime
    there, end = [device.to_device(x) for x in (a, b)], device.to_device(np.zeros(3, np.int32))
    out, stream = device.empty((tokens, n), DTYPES["fp32"]), runtime.hipStreamCreate()
    runtime.hipStreamBeginCapture(stream, runtime.hip.hipStreamCaptureMode.hipStreamCaptureModeGlobal)
    function(*there, end, out=out, stream=int(stream), **more)
    graph = runtime.hipStreamEndCapture(stream)
    ready, rng = runtime.hipGraphInstantiateWithFlags(graph, 0), np.random.default_rng(6)
    for turn in range(scaled(100, 2)):
        boundaries = rng.integers(-5, tokens + 5, 3).astype(np.int32)
        end.memory.write(boundaries)
        out.memory.write(np.full((tokens, n), 7, np.float32))
        runtime.hipGraphLaunch(ready, stream)
        want = np.full((tokens, n), 7, np.float32)
        function(a, b, np.minimum(boundaries, tokens), out=want, **more)  # which a device makes of them itself
        assert_same_bits(out.numpy(), want, f"turn {turn}: {boundaries}")
    runtime.hipGraphExecDestroy(ready)
    runtime.hipGraphDestroy(graph)
    runtime.hipStreamDestroy(stream)


@each("quantize")
def test_quantize_equals_cpu(device, kernel, dtype):
    device.forced(kernel.name)
    sizes = scaled([(1, 1), (3, 127), (128, 128), (129, 1000), (300, 264), (5, 20000)], [(3, 130)])
    ways = [("row", False), ("group", True), ("block", True), ("group", False)]
    for (m, k), (granularity, transposed) in itertools.product(sizes, ways[: scaled(None, 2)]):
        x, options = data("wide", (m, k), DTYPES[dtype], m + k), {"granularity": granularity, "transposed": transposed}
        for got, want in zip(device.quantize(x, **options), pydet.quantize(x, **options), strict=True):
            assert_same_bits(got, np.ascontiguousarray(want), f"{kernel.name}: {m}x{k}, {options}")
    assert device.taken >= scaled(6, 1)


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------

NORM_SHAPES = scaled(test_cuda.NORM_SHAPES, [(1, 7), (0, 8), (2, 40)])


@each("rmsnorm")
def test_rmsnorm_equals_cpu(device, kernel, dtype):
    device.forced(kernel.name)
    for index, (m, n) in enumerate(NORM_SHAPES):
        x, weight, options = test_rmsnorm.forward_case(m, n, dtype, index, ["normal", "wide", "specials"][index % 3])
        test_rmsnorm.assert_all_same_bits(
            device.rmsnorm(x, weight, **options), pydet.rmsnorm(x, weight, **options), f"{m}x{n} case {index}"
        )
    assert device.taken >= scaled(5, 2), f"{kernel.name} took {device.taken} problems"


@each("rmsnorm_backward")
def test_rmsnorm_backward_equals_cpu(device, kernel, dtype):
    device.forced(kernel.name)
    for index, (m, n) in enumerate(NORM_SHAPES):
        operands, given = test_cuda.backward_case(m, n, dtype, index)
        test_rmsnorm.assert_all_same_bits(
            device.rmsnorm_backward(*operands, **given),
            pydet.rmsnorm_backward(*operands, **given),
            f"{m}x{n} case {index}",
        )
    assert device.taken >= scaled(5, 2), f"{kernel.name} took {device.taken} problems"


@each("rmsnorm")
def test_golden_of_rmsnorm(device, kernel, dtype):
    if ARCH:
        pytest.skip("the interpreter would take minutes")
    test_golden.check_golden("rmsnorm", device.forced(kernel.name).rmsnorm, "ieee", dtype)


@each("rmsnorm_backward")
def test_golden_of_rmsnorm_backward(device, kernel, dtype):
    if ARCH:
        pytest.skip("the interpreter would take minutes")
    test_golden.check_golden("rmsnorm_backward", device.forced(kernel.name).rmsnorm_backward, "ieee", dtype)


@pytest.mark.parametrize("dtype", scaled([*DTYPES], ["bf16"]))
def test_norms_of_every_team(device, dtype):
    """Widths at both ends of each team's range, with and without the residual."""
    widths = scaled((8, 248, 256, 264, 512, 520, 1024, 1032, 2048, 2056, 4096, 4104, 8192, 8200, 16384), (264,))
    for kernel, n in itertools.product(hip_kernels("rmsnorm_backward")[: scaled(None, 1)], widths):
        for m, residual in scaled(((600, False), (530, True)), ((2, True),)):
            x, dy, weight = normal(m, n, dtype=dtype), normal(m, n, dtype=dtype, seed=1), normal(n, dtype="fp32")
            more = {"dresidual": normal(m, n, dtype=dtype, seed=2)} if residual else {}
            rstd = pydet.rmsnorm(x, weight, eps=1e-6)[1]
            actual = device.forced(kernel.name).rmsnorm_backward(dy, x, weight, rstd, **more)
            want = pydet.rmsnorm_backward(dy, x, weight, rstd, **more)
            test_rmsnorm.assert_all_same_bits(actual, want, f"{kernel.name}, {m} x {n}")


@pytest.mark.parametrize("n", scaled([256, 1024, 8192, 16384], [8]))
def test_dweight_of_micro_batches(device, n):
    rows = scaled(2048, 272)
    x, dy, weight = normal(rows, n), normal(rows, n, seed=1), normal(n, dtype="fp32")
    rstd = pydet.rmsnorm(x, weight, eps=1e-6)[1]
    whole = pydet.rmsnorm_backward(dy, x, weight, rstd)
    total = np.zeros(n, np.float32)
    for part in (slice(0, 256), slice(256, rows)):
        dx, _ = device.rmsnorm_backward(dy[part], x[part], weight, rstd[part], dweight=total, accumulate=True)
        assert_same_bits(dx, whole[0][part], "dx")
    assert_same_bits(total, whole[1], "dweight")


# ---- LayerNorm, softmax, fold ----------------------------------------------------------------------------------------


@each("layernorm")
def test_layernorm_equals_cpu(device, kernel, dtype):
    shapes = scaled(test_layernorm.SHAPES + test_layernorm.LONG_SHAPES, [(2, 40)])
    device.forced(kernel.name)
    test_layernorm.check_forward(device.layernorm, dtype, shapes, expect=pydet.layernorm)
    assert device.taken >= scaled(5, 1), f"{kernel.name} took {device.taken} problems"


@each("layernorm_backward")
def test_layernorm_backward_equals_cpu(device, kernel, dtype):
    shapes = scaled(test_layernorm.SHAPES + test_layernorm.LONG_SHAPES, [(2, 40)])
    device.forced(kernel.name)
    test_layernorm.check_backward(device.layernorm_backward, dtype, shapes, expect=pydet.layernorm_backward)
    assert device.taken >= scaled(5, 1), f"{kernel.name} took {device.taken} problems"


@each("softmax")
def test_softmax_equals_the_reference(device, kernel, dtype):
    shapes = scaled(test_softmax.SHAPES + test_softmax.LONG_SHAPES, [(2, 40)])
    test_softmax.check_forward(device.forced(kernel.name), dtype, shapes)
    assert device.taken >= scaled(5, 1), f"{kernel.name} took {device.taken} problems"


@each("softmax_backward")
def test_softmax_backward_equals_the_reference(device, kernel, dtype):
    shapes = scaled(test_softmax.SHAPES + test_softmax.LONG_SHAPES, [(2, 40)])
    test_softmax.check_backward(device.forced(kernel.name), dtype, shapes)
    assert device.taken >= scaled(5, 1), f"{kernel.name} took {device.taken} problems"


@each("fold")
def test_fold_equals_the_reference(device, kernel, dtype):
    device.forced(kernel.name)
    test_fold.check(device.fold, *scaled((), ([1, 31, 33, 40], [1, 3, 5, 8, 9])))
    assert device.taken >= 36


# ---- Surroundings ----------------------------------------------------------------------------------------------------


def calls(device):
    """[(a call of an operation on operands that stay on the device, the results' tensors, what they must hold)]."""
    m, n, k = scaled((300, 1024, 2048), (3, 19, 24))
    a, b, w = normal(m, k), normal(k, n, seed=1), normal(n, k, seed=2)
    x, dy, weight, residual = normal(m, k, seed=3), normal(m, k, seed=4), normal(k, dtype="fp32"), normal(m, k, seed=5)
    rstd = pydet.rmsnorm(x, weight, eps=1e-6)[1]
    single = DTYPES["fp32"]
    gemms = {"arithmetic": arithmetic_of("bf16")}
    made = []
    for operation, operands, options, outputs in (
        ("gemm", (a, b), gemms, {"out": (m, n)}),
        ("gemm", (a.astype(single), b.astype(single)), {"arithmetic": "ieee"}, {"out": (m, n)}),
        ("skinny_gemm", (a[:3], w), gemms, {"out": (3, n)}),
        ("rmsnorm", (x, weight), {"eps": 1e-6}, {"out": ((m, k), (m,))}),
        ("rmsnorm_backward", (dy, x, weight, rstd), {"dresidual": residual}, {"out": (m, k), "dweight": (k,)}),
    ):
        function = getattr(pydet, operation)
        expected = function(*operands, **options)
        expected = expected if isinstance(expected, tuple) else (expected,)
        tensors = [device.empty(result.shape, result.dtype) for result in expected]
        given = dict(zip(outputs, tensors, strict=False)) if operation != "rmsnorm" else {"out": tuple(tensors)}
        there = {name: device.to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        call = functools.partial(function, *map(device.to_device, operands), **there, **given)
        made.append((call, tensors, expected))
    return made


def spoil(device, tensors, stream):
    for tensor in tensors:
        device.runtime.hipMemsetAsync(tensor.memory.address, 0xFF, tensor.memory.size, stream)


def assert_results(tensors, expected, what):
    for tensor, want in zip(tensors, expected, strict=True):
        assert_same_bits(tensor.numpy(), want, what)


def test_graph_replay(device):
    """Every operation in one graph, on a stream of its own; each replay starts from results that hold NaN."""
    runtime, everything = device.runtime, calls(device)
    stream = runtime.hipStreamCreate()
    device.reserve = [Buffer(runtime, 1 << 22)]  # no memory is made while a stream captures
    runtime.hipStreamBeginCapture(stream, runtime.hip.hipStreamCaptureMode.hipStreamCaptureModeGlobal)
    for call, _, _ in everything:
        call(stream=int(stream))
    graph = runtime.hipStreamEndCapture(stream)
    ready = runtime.hipGraphInstantiateWithFlags(graph, 0)
    for _, tensors, _ in everything:
        assert all(np.isnan(tensor.numpy().astype(np.float32)).all() for tensor in tensors), "captured, not run"
    for i in range(scaled(200, 2)):
        for _, tensors, _ in everything:
            spoil(device, tensors, stream)
        runtime.hipGraphLaunch(ready, stream)
        for call, tensors, expected in everything:
            assert_results(tensors, expected, f"{call.func.__name__}, replay {i}")
    runtime.hipGraphExecDestroy(ready)
    runtime.hipGraphDestroy(graph)
    runtime.hipStreamDestroy(stream)


def test_two_streams(device):
    """The same operations on two streams at once, each with operands, results and workspace of its own."""
    runtime, pairs = device.runtime, [calls(device), calls(device)]
    streams = [runtime.hipStreamCreate() for _ in pairs]
    for i in range(scaled(100, 1)):
        device.allocated = []
        for both in zip(*pairs, strict=True):
            for stream, (call, tensors, _) in zip(streams, both, strict=True):
                spoil(device, tensors, stream)
                call(stream=int(stream))
        for call, tensors, expected in itertools.chain(*pairs):
            assert_results(tensors, expected, f"{call.func.__name__}, round {i}")
    for stream in streams:
        runtime.hipStreamDestroy(stream)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xA5, 0xFF])
def test_dirty_workspace(device, byte):
    """Whatever it holds, the bits are the same, and nothing around it is written."""
    m, n = scaled((1000, 1024), (5, 40))
    device.byte = byte
    x, dy, weight = normal(m, n), normal(m, n, seed=1), normal(n, dtype="fp32")
    rstd = pydet.rmsnorm(x, weight, eps=1e-6)[1]
    want = pydet.rmsnorm_backward(dy, x, weight, rstd)
    test_rmsnorm.assert_all_same_bits(device.rmsnorm_backward(dy, x, weight, rstd), want, f"workspace of {byte:#x}")
    assert len(device.allocated) == 3, "dx, dweight and the workspace"
    for memory in device.allocated:
        memory.read()


def test_host_memory_is_refused(device):
    """Said to be on the device: a sentence where the device cannot read it, the right bits where it can."""
    a, b = capi.random((5, 16)), capi.random((16, 7))
    out = np.full((5, 7), 7, np.float32)
    tensors = [capi.Tensor(x, device=(ROCM, 0)) for x in (a, b, out)]
    lib = capi.ffi.dlopen(str(pydet._native.load(2).path))
    status = lib.pydet_gemm(capi.ffi.NULL, *(x.c for x in tensors[:2]), capi.ffi.NULL, tensors[2].c, capi.ffi.NULL)
    device.runtime.hipDeviceSynchronize()
    if status:
        assert status == INVALID_DEVICE and "on the host" in capi.ffi.string(lib.pydet_last_error()).decode()
        assert (out == 7).all()
    else:
        assert_same_bits(out, pydet.gemm(a, b), "host memory that the device shares")
    assert_same_bits(device.gemm(a, b), pydet.gemm(a, b), "the device works on")


def test_refusals(device):
    a, b = normal(8, 8), normal(8, 8, seed=1)
    out, there = device.empty((8, 8), DTYPES["bf16"]), device.to_device(a)
    before = out.numpy()
    with pytest.raises(ValueError, match="b is on the CPU, want ROCm device 0 as a is"):
        pydet.gemm(there, interop.Producer(capi.Tensor(b)), out=out)
    with pytest.raises(pydet.Error, match="no kernel for arithmetic sm90"):
        pydet.gemm(there, device.to_device(b), out=out, arithmetic="sm90")
    with pytest.raises(pydet.Error, match="cpu_gemm_ieee_scalar"):
        pydet.gemm(there, device.to_device(b), out=out, kernel="cpu_gemm_ieee_scalar")
    with pytest.raises(ValueError, match="shares memory"):
        pydet.gemm(there, device.to_device(b), out=there)
    assert_same_bits(out.numpy(), before, "out")


def test_second_device(device):
    """Tensors there are computed there, and the caller's device stays current."""
    if len(DEVICES) < 2:
        pytest.skip("one AMD GPU is here")
    runtime, a, b = device.runtime, normal(5, 16), normal(16, 7, seed=1)
    runtime.hipSetDevice(1)
    moved = [device.to_device(x) for x in (a, b)]
    out = Buffer(runtime, 70)
    runtime.hipSetDevice(0)
    tensors = [OnRocm(x.memory, x.dtype, x.shape, x.strides, device=1) for x in moved]
    result = OnRocm(out, DTYPES["bf16"], (5, 7), device=1)
    pydet.gemm(*tensors, out=result)
    assert runtime.hipGetDevice() == 0
    runtime.hipSetDevice(1)
    assert_same_bits(result.numpy(), pydet.gemm(a, b, arithmetic=arithmetic_of("bf16")), "device 1")
    runtime.hipSetDevice(0)
