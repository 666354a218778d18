"""Every CUDA kernel, forced by name, against the CPU's kernels, and against itself in other surroundings.

Operands go to the device as whole allocations, so that strides, alignment and guard bytes are those of tests/cases.py;
the checks of the CPU's tests then run on the device's kernels. A forced kernel may refuse a problem
(PYDET_UNSUPPORTED); then the kernel that the library chooses is checked on it, and the test counts what the forced one
took.
"""

import ctypes
import functools
import itertools
import os
import pathlib
import random
import sys
import time

import numpy as np
import pytest

import capi
import cases
import pydet
import reference
import test_gemm
import test_golden
import test_rmsnorm
from cases import DTYPES, LAYOUTS, Problem, assert_same_bits, data

UNSUPPORTED = 11  # pydet.h


def cuda_kernels(operation, ending=""):
    """The CUDA library's rows of this operation. Names are listed without a GPU too, so that the tests that need one
    are collected and say why they do not run. Those that take some problems alone are asked for by the ends of their
    names: tiles that are handed over (test_cuda_handover.py), scans of a few tokens."""
    found = [kernel for kernel in pydet.kernels() if kernel.device == "cuda" and kernel.operation == operation]
    apart = ("_handover", "_step")
    return [kernel for kernel in found if kernel.name.endswith(ending or apart) == bool(ending)]


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="device memory comes from PyTorch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if not any(device.kind == "cuda" for device in pydet.devices()):
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    return torch


class OnDevice:
    """pydet's operations on NumPy arrays, computed on the device by one kernel, or by the library's choice."""

    def __init__(self, torch, kernel=None, arithmetic=None):
        self.torch, self.kernel, self.arithmetic = torch, kernel, arithmetic
        self.taken = self.refused = 0

    def to_device(self, array):
        """A tensor on a copy of the array's whole memory, and what writes that memory back."""
        if array.size == 0:
            return self.torch.empty(array.shape, dtype=self.torch_dtype(array.dtype), device="cuda"), lambda: None
        if array.dtype.kind == "i":  # boundaries, columns
            return self.torch.from_numpy(array.copy()).cuda(), lambda: None
        torch, memory, owner = self.torch, array, array.base
        while owner is not None:  # as_strided puts objects that are no arrays in between
            memory = owner if isinstance(owner, np.ndarray) else memory
            owner = getattr(owner, "base", None)
        assert memory.flags.c_contiguous or memory.flags.f_contiguous
        whole = memory.ravel(order="K").view(np.uint8)
        copy = torch.from_numpy(whole.copy()).cuda()
        offset = array.ctypes.data - memory.ctypes.data
        dtype = {4: torch.float32, 2: torch.bfloat16 if array.dtype.name == "bfloat16" else torch.float16}[
            array.itemsize
        ]
        start = offset // array.itemsize
        if offset % array.itemsize:  # a byte view cannot be retyped there
            raise ValueError("an array at an odd offset")
        usable = copy[: copy.numel() // array.itemsize * array.itemsize].view(dtype)
        tensor = torch.as_strided(usable, array.shape, [s // array.itemsize for s in array.strides], start)

        def write_back():
            if array.flags.writeable:
                memory.reshape(-1, order="A").view(np.uint8)[...] = copy.cpu().numpy()

        return tensor, write_back

    def to_host(self, tensor):
        torch = self.torch
        if not tensor.is_floating_point():  # tokens, columns
            return tensor.cpu().numpy()
        words = tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16).cpu().numpy()
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[tensor.dtype]
        return words.view(DTYPES[dtype])

    def torch_dtype(self, dtype):
        return getattr(self.torch, np.dtype(dtype).name)

    def call(self, operation, *operands, **options):
        moved = {}

        def move(value):
            if not isinstance(value, np.ndarray):
                return value
            tensor, moved[id(value)] = self.to_device(value)
            return tensor

        options = {
            name: self.torch_dtype(value) if name.endswith("dtype") else move(value) for name, value in options.items()
        }
        arguments = [move(operand) for operand in operands]
        function = getattr(pydet, operation)
        try:
            results = function(*arguments, kernel=self.kernel, **options)
            self.taken += 1
        except pydet.Error as error:
            if self.kernel is None or error.status != UNSUPPORTED:
                raise
            self.refused += 1
            results = function(*arguments, **options)
        self.torch.cuda.synchronize()
        for write_back in moved.values():
            write_back()
        if isinstance(results, tuple):
            return tuple(None if result is None else self.to_host(result) for result in results)
        return self.to_host(results)

    def __getattr__(self, operation):
        if operation.startswith("_"):
            raise AttributeError(operation)
        return functools.partial(self.call, operation)


def each(operation, ending=""):
    """Parametrizes by kernel and by the element types it takes."""
    pairs = [(kernel, dtype) for kernel in cuda_kernels(operation, ending) for dtype in kernel.dtypes.split()]
    if not pairs:
        return pytest.mark.parametrize(
            "kernel,dtype", [pytest.param(None, None, marks=pytest.mark.skip("libpydet_cuda.so is not built"))]
        )
    return pytest.mark.parametrize("kernel,dtype", pairs, ids=[f"{kernel.name}-{dtype}" for kernel, dtype in pairs])


@pytest.fixture
def device(torch, kernel):
    if not kernel.available:
        pytest.skip(f"{kernel.name} needs {kernel.requires}")
    return OnDevice(torch, kernel.name, kernel.arithmetic)


def test_without_a_gpu():
    """The CUDA library loads without a driver, serves the CPU, and says what is missing to tensors on a device."""
    library = os.environ.get("PYDET_LIBRARY", str(pathlib.Path(pydet.__file__).parent / "libpydet_cuda.so"))
    if not library.endswith("libpydet_cuda.so") or not pathlib.Path(library).is_file():
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    lib, count = capi.ffi.dlopen(library), capi.ffi.new("int32_t *")
    assert lib.pydet_device_count(lib.PYDET_CUDA, count) == lib.PYDET_OK
    if count[0]:
        pytest.skip("there is a GPU here")
    tensors = [capi.Tensor(shape=(16, 16), dtype=capi.BFLOAT16, data=4096 * (1 + i), device=(2, 0)).c for i in range(3)]
    a, b, out = tensors
    assert lib.pydet_gemm(capi.ffi.NULL, a, b, capi.ffi.NULL, out, capi.ffi.NULL) == lib.PYDET_NO_DEVICE
    sentence = capi.ffi.string(lib.pydet_last_error()).decode()
    assert sentence == "gemm: the tensors are on CUDA device 0, and there are 0 of them"
    x, w, y = capi.random((4, 8)), capi.random((8, 5)), np.zeros((4, 5), np.float32)
    x_tensor, w_tensor, y_tensor = map(capi.Tensor, (x, w, y))
    null = capi.ffi.NULL
    assert lib.pydet_gemm(null, x_tensor.c, w_tensor.c, null, y_tensor.c, null) == lib.PYDET_OK
    assert_same_bits(y, pydet.gemm(x, w))


# ---- GEMM ----------------------------------------------------------------------------------------------------------


@functools.cache
def on_cpu(problem):
    """The CPU library's result: it has been held to the reference, and is fast enough for larger shapes."""
    return cases.run(pydet.gemm, problem)


def check_equals_cpu(device, problems):
    for problem in problems:
        assert_same_bits(cases.run(device.gemm, problem), on_cpu(problem), str(problem))


SHAPES = [
    (1, 1, 1),
    (5, 19, 40),
    (64, 64, 64),
    (130, 70, 96),
    (129, 257, 130),
    (200, 520, 1000),
    (300, 640, 72),
    (257, 1000, 520),
]


def problems_for(arithmetic, dtype):
    base = functools.partial(Problem, dtype=dtype, arithmetic=arithmetic)
    outs = itertools.cycle(DTYPES)
    for (m, n, k), a, b in itertools.product(SHAPES, LAYOUTS[:2], LAYOUTS[:2]):
        yield base(m, n, k, out_dtype=next(outs), a_layout=a, b_layout=b)
    for kind in cases.KINDS:
        yield base(136, 264, 200, kind=kind)
        yield base(136, 264, 200, kind=kind, out_dtype=dtype, bias="n bf16")
    for a, b, out in itertools.product(LAYOUTS, LAYOUTS, ["row"]):
        yield base(37, 45, 50, a_layout=a, b_layout=b, out_layout=out)
    for out in ("col", "row_padded", "col_padded"):
        yield base(136, 264, 72, out_dtype=dtype, out_layout=out)
    for bias in ("n fp32", "n fp16", "mn fp32", "mn bf16"):
        yield base(136, 264, 72, bias=bias, out_dtype=next(outs))
    for k_chunk in (None, 16, 64, 512, 1024, 1792):
        yield base(136, 264, 2000, k_chunk=k_chunk, out_dtype=dtype)
        yield base(136, 264, 2000, k_chunk=k_chunk, accumulate=True)
        yield base(3, 264, 2000, k_chunk=k_chunk, accumulate=True, kind="wide")
    for batch in ((3,), (2, 3)):
        yield base(70, 136, 72, batch=batch, bias="n fp32", out_dtype=dtype)
        yield base(70, 136, 72, batch=batch, bias="mn fp32", a_layout="col", b_layout="col")
    for k in (0, 1, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 129):
        yield base(66, 72, k, accumulate=k % 2 == 0)
    yield base(8, 40, 0, bias="n fp32")
    # Few rows with n adjacent in b: m, n and k about the ends of tiles, boxes and stages, then several tiles a block
    for m, n, k in FEW_ROWS:
        yield base(m, n, k, out_dtype=next(outs), bias="n bf16" if m % 2 else "", accumulate=False)
    yield base(65, 136, 264, accumulate=True)
    chunks = itertools.cycle([16, 64, 80, 256])
    for m, n, k in FEW_ROWS[5::2]:
        yield base(m, n, k, out_dtype=next(outs), k_chunk=next(chunks), accumulate=False)
    yield base(33, 136, 264, k_chunk=48, accumulate=True)
    yield from small_products(base, outs)


def small_products(base, outs):
    """What kernels of a few rows take: about the ends of eight columns, of 64 bytes along k, of extents; in batches."""
    kinds = itertools.cycle(("normal", "specials", "wide"))
    for m, n, k in ((1, 2048, 8), (8, 264, 1), (1, 7, 3), (7, 9, 64), (8, 1, 9), (2, 40, 0), (9, 16, 8), (8, 24, 65)):
        for batch in ((), (3,), (2, 3)):
            yield base(m, n, k, batch=batch, kind=next(kinds), b_layout="row", out_dtype=next(outs))
    for m, n, k in (
        (1, 8, 2048),
        (8, 32, 264),
        (3, 5, 31),
        (1, 1, 32),
        (2, 33, 64),
        (9, 8, 64),
        (7, 16, 40),
        (4, 4, 0),
    ):
        for batch in ((), (3,), (2, 3)):
            yield base(m, n, k, batch=batch, kind=next(kinds), b_layout="col", out_dtype=next(outs))
    yield base(5, 24, 16, batch=(4,), accumulate=True, a_layout="col", out_layout="row_padded")
    yield base(5, 24, 128, batch=(4,), accumulate=True, b_layout="col", out_layout="row_padded")


FEW_ROWS = [
    *((1, 8, 8), (8, 16, 16), (15, 24, 56), (16, 32, 64), (17, 40, 72), (31, 48, 120), (32, 56, 128), (33, 64, 136)),
    *((63, 88, 248), (64, 96, 256), (65, 104, 264), (96, 184, 504), (97, 192, 512), (127, 200, 520), (128, 384, 1024)),
    *((2, 2120, 328), (64, 4232, 72), (128, 6352, 136), (5, 12768, 200)),
]


@each("gemm")
def test_gemm_equals_cpu(device, kernel, dtype):
    check_equals_cpu(device, problems_for(kernel.arithmetic, dtype))
    assert device.taken >= 5, f"{kernel.name} took {device.taken} problems and refused {device.refused}"


def problems_from_initial(arithmetic, dtype):
    """Rows by fours and by single elements, both sides of a result, batches, biases, an empty K, NaN and -0."""
    base = functools.partial(Problem, dtype=dtype, arithmetic=arithmetic, initial=True)
    outs = itertools.cycle(DTYPES)
    shapes = ((136, 264, "n bf16", "row"), (33, 131, "", "col"), (7, 72, "mn fp32", "row_padded"), (1, 1, "", "row"))
    for (m, n, bias, layout), again in itertools.product(shapes, range(3)):
        more = {"bias": bias, "out_layout": layout, "out_dtype": next(outs)}
        yield base(m, n, 264, k_chunk=48 if again else None, **more)
        yield base(m, n, 48, kind="specials", batch=(2, 3)[:again], **more)
    for m, b_layout in itertools.product((1, 17, 33, 65, 128), ("row", "col")):  # what kernels for few rows take
        yield base(m, 264, 512, b_layout=b_layout, out_dtype=next(outs), bias="n fp32" if m % 3 else "")
    for m, n, k, layout in ((1, 264, 8, "row"), (8, 40, 3, "row"), (1, 8, 520, "col"), (8, 32, 64, "col")):
        for batch in ((), (3,)):
            yield base(m, n, k, b_layout=layout, batch=batch, out_dtype=next(outs))
    for m, n, layout in ((5, 1024, "row"), (1024, 8, "col"), (3, 257, "col_padded")):
        yield base(m, n, 0, kind="specials", out_dtype=next(outs), out_layout=layout)


@each("gemm")
def test_initial(device, kernel, dtype):
    check_equals_cpu(device, problems_from_initial(kernel.arithmetic, dtype))
    test_gemm.check_initial(device.gemm, kernel.arithmetic, dtype)
    assert device.taken >= 4, f"{kernel.name} took {device.taken} problems and refused {device.refused}"


def test_initial_in_a_graph(torch):
    """The three launches of one product are captured, and begin anew at each replay."""
    a, w = operands(torch, 64, 1024, 2048, torch.bfloat16)
    begun, bias = pydet.gemm(a[:, :1024], w[:, :1024].T, out_dtype="float32"), w[0, :1024].float()
    out = torch.empty(64, 1024, dtype=torch.bfloat16, device="cuda")
    call = lambda: pydet.gemm(a[:, 1024:], w[:, 1024:].T, bias=bias, initial=begun, out=out)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    want = words(pydet.gemm(a, w.T, bias=bias))
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(words(out), want)


@each("gemm")
def test_chunks_across_stages(device, kernel, dtype):
    """Chunks of all lengths beside those of a kernel's stages, for the same rows in its every tile."""
    cases.check_chunks(device.gemm, kernel.arithmetic, dtype)


@each("gemm")
def test_random_problems(device, kernel, dtype):
    """Problems of any shape, layout, type and k_chunk. FUZZ_SEED and FUZZ_CASES ask for others and more; a failure
    names its seed and case."""
    seed, count = int(os.environ.get("FUZZ_SEED", "1")), int(os.environ.get("FUZZ_CASES", "40"))
    for number in range(count):
        # Of kernels with one arithmetic the same problems, so that the CPU computes each once
        rng = random.Random(f"{seed}/{number}")
        problem = cases.random_problem(rng, dtype, kernel.arithmetic)
        what = f"FUZZ_SEED={seed}, case {number}: {problem}"
        assert_same_bits(cases.run(device.gemm, problem), on_cpu(problem), what)


@each("gemm")
def test_small_integers(device, kernel, dtype):
    test_gemm.check_small_integers(device.gemm, kernel.arithmetic, dtype)


@each("gemm")
def test_recorded_vectors(device, kernel, dtype):
    if kernel.arithmetic != "sm90":
        pytest.skip("recorded for sm90")
    test_gemm.check_recorded_vectors(device.gemm, dtype)


@each("gemm")
def test_gemm_golden(device, kernel, dtype):
    test_golden.check_golden("gemm", device.gemm, kernel.arithmetic, dtype)


@each("gemm")
def test_skinny_gemm_golden(device, kernel, dtype):
    test_golden.check_golden("skinny_gemm", device.skinny_gemm, kernel.arithmetic, dtype)


def operands(torch, m, n, k, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(m, k, device="cuda", generator=generator).to(dtype)
    return a, torch.randn(n, k, device="cuda", generator=generator).to(dtype)


def words(tensor):
    """The tensor's bits."""
    return tensor.view(getattr(sys.modules["torch"], {4: "int32", 2: "int16"}[tensor.element_size()]))


@pytest.mark.parametrize("n,k", [(1024, 4096), (4096, 1024), (776, 2056)])
@pytest.mark.parametrize("k_chunk", [None, 512])
def test_row_bits_against_batch(torch, n, k, k_chunk):
    """A row of a large product is that row alone, and that row in every batch size, whatever kernel each got."""
    a, w = operands(torch, 8192, n, k, torch.bfloat16)
    whole, kernels = words(pydet.gemm(a, w.T, k_chunk=k_chunk)), set()
    for m in (
        1,
        2,
        3,
        7,
        8,
        15,
        16,
        17,
        31,
        32,
        33,
        63,
        64,
        65,
        100,
        127,
        128,
        129,
        200,
        255,
        256,
        300,
        512,
        1000,
        1024,
        2048,
        4096,
        8191,
    ):
        first = (8192 - m) // 2
        part = pydet.gemm(a[first : first + m], w.T, k_chunk=k_chunk)
        kernels.add(pydet.last_kernel())
        assert torch.equal(words(part), whole[first : first + m]), f"M = {m}"
        if m <= 256:
            skinny = pydet.skinny_gemm(a[first : first + m], w, k_chunk=k_chunk)
            kernels.add(pydet.last_kernel())
            assert torch.equal(words(skinny), whole[first : first + m]), f"skinny, M = {m}"
    assert len(kernels) > 2, kernels
    shuffled = torch.randperm(8192, device="cuda")[:1000]
    assert torch.equal(words(pydet.gemm(a[shuffled], w.T, k_chunk=k_chunk)), whole[shuffled])
    assert torch.equal(words(pydet.gemm(a[::3], w.T, k_chunk=k_chunk)), whole[::3])


def test_row_bits_among_nan_rows(torch):
    a, w = operands(torch, 512, 1024, 2048, torch.bfloat16)
    whole = pydet.gemm(a, w.T)
    a[1::2] = float("nan")
    assert torch.equal(words(pydet.gemm(a, w.T)[::2]), words(whole[::2]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_accumulation(torch, dtype):
    """db of one batch of 4096 rows, and of micro-batches added into it, cut at multiples of the step."""
    a, dc = (torch.randn(4096, n, device="cuda").to(getattr(torch, dtype)) for n in (768, 1280))
    whole = pydet.gemm_db(a, dc, out_dtype=torch.float32)
    for cuts in ([1024, 2048, 3072], [16, 4080], [160, 176, 2000]):
        out = torch.zeros_like(whole)
        for first, last in zip([0, *cuts], [*cuts, 4096]):
            pydet.gemm_db(a[first:last], dc[first:last], out=out, accumulate=True)
        assert torch.equal(words(out), words(whole)), cuts


def test_gradients_are_gemm_on_views(torch):
    a, w = operands(torch, 300, 520, 776, torch.bfloat16)
    dc = operands(torch, 300, 520, 520, torch.bfloat16, 1)[0]
    assert torch.equal(words(pydet.gemm_da(dc, w.T)), words(pydet.gemm(dc, w)))
    assert torch.equal(words(pydet.gemm_db(a, dc)), words(pydet.gemm(a.T, dc)))


def test_graph_replay_beside_other_work(torch):
    """1000 replays, and 1000 calls on another stream, while a third stream keeps the device busy."""
    a, w = operands(torch, 300, 1024, 2048, torch.bfloat16)
    expected = words(pydet.gemm(a, w.T)).clone()
    out, graph = torch.empty_like(expected.view(torch.bfloat16)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pydet.gemm(a, w.T, out=out)
        allocated = pydet.gemm(a, w.T)
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    wrong, wrong_beside = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    for _ in range(1000):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp_(-1, 1)
        with torch.cuda.stream(other):
            wrong_beside += (words(pydet.gemm(a, w.T)) != expected).sum()
        out.fill_(float("nan"))
        graph.replay()
        wrong += (words(out) != expected).sum() + (words(allocated) != expected).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0 and int(wrong_beside) == 0


def test_stream_argument(torch):
    a, w = operands(torch, 64, 64, 64, torch.bfloat16)
    expected, stream = words(pydet.gemm(a, w.T)), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    out = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
    pydet.gemm(a, w.T, out=out, stream=stream)
    stream.synchronize()
    assert torch.equal(words(out), expected)


def test_past_two_to_the_31_elements(torch):
    a, w = operands(torch, 70000, 32768, 64, torch.bfloat16)  # 2.3 billion outputs
    out = pydet.gemm(a, w.T)
    for row in (0, 65535, 69999):
        assert torch.equal(words(out[row]), words(pydet.gemm(a[row : row + 1], w.T)[0]))


def test_host_memory_is_refused(torch):
    """Said to be on the device: a sentence where the device cannot read it, the right bits where it can."""
    a, b, out = (capi.random(shape) for shape in ((5, 16), (16, 7), (5, 7)))
    want = pydet.gemm(a, b)
    tensors = [capi.Tensor(x, device=(2, 0)) for x in (a, b, out)]
    lib = capi.ffi.dlopen(str(pydet._native.load(1).path))
    options = capi.options("pydet_gemm_options")
    status = lib.pydet_gemm(capi.ffi.NULL, tensors[0].c, tensors[1].c, capi.ffi.NULL, tensors[2].c, options)
    torch.cuda.synchronize()
    if status:
        assert status == 5 and "on the host" in capi.ffi.string(lib.pydet_last_error()).decode()
    else:
        assert_same_bits(out, want, "host memory that the device shares")
    x = torch.ones(4, 4, device="cuda")
    assert torch.equal(pydet.gemm(x, x), x * 4), "the device works on"


def test_misaligned_and_odd_strides(torch):
    """Correct, not refused, with the bits of aligned operands."""
    a, w = operands(torch, 100, 200, 512, torch.bfloat16)
    expected = words(pydet.gemm(a, w.T))
    wide = torch.zeros(100, 517, dtype=torch.bfloat16, device="cuda")
    wide[:, 3:515] = a
    shifted = torch.zeros(200 * 512 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(200, 512)
    shifted.copy_(w)
    assert torch.equal(words(pydet.gemm(wide[:, 3:515], w.T)), expected)
    assert torch.equal(words(pydet.gemm(a, shifted.T)), expected)
    out = torch.zeros(100, 201, dtype=torch.bfloat16, device="cuda")
    pydet.gemm(a, w.T, out=out[:, 1:])
    assert torch.equal(words(out[:, 1:].contiguous()), expected)
    assert int(words(out)[:, 0].abs().sum()) == 0


def test_empty(torch):
    for m, n, k in [(0, 5, 6), (5, 0, 6), (5, 6, 0), (0, 0, 0)]:
        a, w = operands(torch, m, n, k, torch.bfloat16)
        out = pydet.gemm(a, w.T)
        assert out.shape == (m, n) and not out.any()


def test_refusals(torch):
    a, w = operands(torch, 32, 32, 32, torch.bfloat16)
    with pytest.raises(ValueError, match="gemm: b is on the CPU, want CUDA device 0 as a is"):
        pydet.gemm(a, w.T.cpu(), out=torch.empty(32, 32, dtype=torch.bfloat16, device="cuda"))
    with pytest.raises(pydet.Error, match="no kernel for arithmetic cdna3"):
        pydet.gemm(a, w.T, arithmetic="cdna3")
    out = torch.full((32, 32), 7.0, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="shares memory"):
        pydet.gemm(out, w.T, out=out)
    with pytest.raises(pydet.Error, match="cpu_gemm_sm90_scalar"):
        pydet.gemm(a, w.T, out=out, kernel="cpu_gemm_sm90_scalar")
    assert bool((out == 7).all())


# ---- Skinny GEMM ---------------------------------------------------------------------------------------------------

SKINNY_KERNELS = [None, *(kernel.name for kernel in cuda_kernels("gemm") if "skinny" in kernel.name)]


def skinny_or_none(x, w, kernel, **options):
    """None where a forced kernel refuses the problem."""
    try:
        return pydet.skinny_gemm(x, w, kernel=kernel, **options)
    except pydet.Error as error:
        if kernel is None or error.status != UNSUPPORTED:
            raise
        return None


def along_n(w):
    """The same weights with n adjacent in memory."""
    n, k = w.shape
    whole = w.new_zeros(k, (n + 7) // 8 * 8)
    whole[:, :n] = w.T
    return whole[:, :n].T


def check_skinny(torch, x, w, ms, what, **options):
    """The first m rows against the CPU's bits, by the kernels that the library chooses and by every other; of many ms,
    these get a part. With k adjacent in the weights and with n. Returns the kernels that took part."""
    arithmetic = "ieee" if x.dtype == torch.float32 else "sm90"
    expected = words(pydet.skinny_gemm(x, w, arithmetic=arithmetic, **options)).cuda()
    x, w = x.cuda(), w.cuda()
    if (bias := options.pop("bias", None)) is not None:
        bias = bias.cuda()
    took, ms = set(), list(ms)
    for kernel, weights in itertools.product(SKINNY_KERNELS, (w, along_n(w))):
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for m in ms if kernel is None or len(ms) < 20 else {*ms[::9], 64, 65, 128}:
            given = {} if bias is None else {"bias": bias[:m] if bias.dim() == 2 else bias}
            y = skinny_or_none(
                x[:m], weights, kernel, arithmetic=arithmetic, weights_constant=m % 2 == 0, **given, **options
            )
            if y is not None:
                took.add(pydet.last_kernel())
                wrong += (words(y) != expected[:m]).sum()
        assert int(wrong) == 0, f"{what}, {options}, kernel {kernel}: {int(wrong)} words differ from the CPU's"
    return took


@pytest.mark.parametrize("k_chunk", [None, 256, 512, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_skinny_rows_equal_cpu(torch, dtype, k_chunk):
    """Every number of rows up to 130; ragged N and K; the last chunks short, or missing."""
    dtype, took = getattr(torch, dtype), set()
    for n, k in [(331, 8), (72, 1000), (200, 2880), (136, 4104), (40, 14336)]:
        x, w = (torch.randn(rows, k).to(dtype) for rows in (130, n))
        took |= check_skinny(torch, x, w, range(1, 131), f"{n} x {k}", k_chunk=k_chunk, out_dtype=torch.float32)
    # of 5 for wgmma, and 5 where n is adjacent, beside mma.sync and the GEMM tiles
    along = 5 if dtype == torch.bfloat16 and k_chunk is None else 0
    assert len(took) >= (2 if dtype == torch.float32 else 5 + along), took


@pytest.mark.parametrize("k_chunk", [None, 16, 48, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_skinny_many_tiles_equal_cpu(torch, dtype, k_chunk):
    """Several tiles a block, so that the rings go round more than once."""
    dtype = getattr(torch, dtype)
    for n, k in [(8650, 264), (4300, 1032), (1100, 2056)]:
        x, w = (torch.randn(rows, k).to(dtype) for rows in (128, n))
        check_skinny(torch, x, w, [1, 8, 9, 16, 33, 64, 65, 128], f"{n} x {k}", k_chunk=k_chunk)


@pytest.mark.parametrize("k_chunk", [None, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_skinny_bias_and_strides_equal_cpu(torch, dtype, k_chunk):
    """A bias for each column and a full one, of every type; results of every type; padded rows; adding to y."""
    dtype, n, k, ms = getattr(torch, dtype), 333, 1416, [1, 5, 16, 40, 64, 100, 128]
    types = [torch.float32, torch.bfloat16, torch.float16]
    x, w = torch.randn(128, k + 24).to(dtype)[:, 8 : k + 8], torch.randn(n, k + 16).to(dtype)[:, :k]
    for i, bias_type in enumerate(types):
        for shape in [(n,), (128, n)]:
            bias = torch.randn(shape).to(bias_type)
            for out_dtype in (types[i], types[i - 1]):
                check_skinny(torch, x, w, ms, f"bias {shape}", bias=bias, out_dtype=out_dtype, k_chunk=k_chunk)
    arithmetic = "ieee" if dtype == torch.float32 else "sm90"
    before = torch.randn(128, n + 3)
    expected = before.clone()
    pydet.skinny_gemm(x, w, out=expected[:, :n], accumulate=True, arithmetic=arithmetic, k_chunk=k_chunk)
    # whole allocations travel, so that rows stay padded
    x, w = x._base.cuda()[:, 8 : k + 8], w._base.cuda()[:, :k]
    for kernel, m, weights in itertools.product(SKINNY_KERNELS, ms, (w, along_n(w))):
        out, rest = before.cuda(), before.clone()
        options = {"accumulate": True, "arithmetic": arithmetic, "k_chunk": k_chunk}
        if skinny_or_none(x[:m], weights, kernel, out=out[:m, :n], **options) is not None:
            rest[:m, :n] = expected[:m, :n]
            assert torch.equal(words(out.cpu()), words(rest)), f"{kernel}, M = {m}"


@pytest.mark.parametrize("k_chunk", [None, 256, 1024])
@pytest.mark.parametrize("n,k", [(1024, 4096), (6144, 4096), (8192, 1024)])
def test_skinny_row_in_other_company(torch, n, k, k_chunk):
    """Alone, permuted, repeated, and among NaN rows."""
    x, w = operands(torch, 128, n, k, torch.bfloat16)
    call = functools.partial(pydet.skinny_gemm, k_chunk=k_chunk)
    whole = words(call(x, w))
    assert torch.equal(whole, words(pydet.gemm(x, w.T, k_chunk=k_chunk)))
    for row in range(128):
        assert torch.equal(words(call(x[row], w)), whole[row]), f"row {row} alone"
    order = torch.randperm(128, device="cuda")
    for m in (128, 127, 65, 64, 33, 16, 3):
        assert torch.equal(words(call(x[order[:m]], w)), whole[order[:m]]), f"{m} rows, permuted"
        assert torch.equal(words(call(x[5:6].expand(m, k), w)), whole[5].expand(m, n)), f"one row, {m} times"
    among = torch.full_like(x, float("nan"))
    among[::7] = x[::7]
    assert torch.equal(words(call(among, w))[::7], whole[::7])


@pytest.mark.parametrize("weights_constant", [False, True])
def test_skinny_products_in_sequence(torch, weights_constant):
    """A decode layer, each product of the result before it, called, on two streams at once, and as a graph's replays:
    a kernel that starts beside the one before it must not read what that has yet to write."""
    shapes = [(1536, 1024), (1024, 1024), (7168, 1024), (1024, 3584)] * 2
    weights = [(torch.randn(n, k, device="cuda") * k**-0.5).to(torch.bfloat16) for n, k in shapes]

    def layers(x, outs):
        for w, out in zip(weights, outs, strict=True):
            pydet.skinny_gemm(x[:, : w.shape[1]], w, out=out, weights_constant=weights_constant)
            x = out
        return x

    def outs(m):
        return [torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for n, _ in shapes]

    for m in (1, 16, 64, 128):
        x = expected = torch.randn(m, 1024, device="cuda").to(torch.bfloat16)
        for w in weights:
            expected = pydet.gemm(expected[:, : w.shape[1]], w.T, kernel="cuda_gemm_sm90_mma_64x64")
            torch.cuda.synchronize()
        expected = words(expected)
        streams, results = [torch.cuda.Stream() for _ in range(2)], [outs(m) for _ in range(2)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(3)]
        torch.cuda.synchronize()
        for _ in range(50):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    for out in results[i]:
                        out.fill_(float("nan"))
                    wrong[i] += (words(layers(x, results[i])) != expected).sum()
        torch.cuda.synchronize()
        graph, captured = torch.cuda.CUDAGraph(), outs(m)
        with torch.cuda.graph(graph):
            y = layers(x, captured)
        for _ in range(50):
            for out in captured:
                out.fill_(float("nan"))
            graph.replay()
            wrong[2] += (words(y) != expected).sum()
        assert [int(count) for count in wrong] == [0, 0, 0], f"M = {m}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_skinny_fast(torch, dtype):
    """Fast mode cuts K as it likes, here in chunks with the bits of a k_chunk, and nowhere else than there; it stays
    within the bound of the deterministic sum and, though nothing promises it, gives the same bits in every call."""
    cut = 0
    for n, k in [(1024, 4096), (768, 4096), (2048, 7168), (40, 14336), (333, 520), (8192, 1024)]:
        x, w = operands(torch, 64, n, k, getattr(torch, dtype))
        bound = 2.0**-15 * (x.double().abs() @ w.double().abs().T)
        for m in (1, 16, 17, 64):
            exact, chain = x[:m].double() @ w.double().T, pydet.skinny_gemm(x[:m], w, out_dtype=torch.float32)
            for kernel in SKINNY_KERNELS:
                what = f"{m}x{n}x{k}, {kernel}"
                call = functools.partial(skinny_or_none, x[:m], w, kernel, out_dtype=torch.float32, arithmetic="sm90")
                if (y := call(mode="fast")) is None:
                    continue
                assert bool(((y.double() - exact).abs() <= bound[:m]).all()), what
                assert all(torch.equal(words(call(mode="fast")), words(y)) for _ in range(20)), what
                if not torch.equal(words(y), words(chain)):
                    cut += 1
                    chunks = (call(k_chunk=size) for size in range(256, k, 256))
                    assert any(torch.equal(words(y), words(c)) for c in chunks), f"{what}: bits of no k_chunk"
                    given = call(mode="fast", k_chunk=512)
                    assert torch.equal(words(given), words(call(k_chunk=512))), f"{what}: another k_chunk"
    assert cut >= 8, f"only {cut} problems were cut"


def test_skinny_entry_takes_many_rows(torch):
    x, w = operands(torch, 1000, 776, 520, torch.bfloat16)
    for m in (129, 300, 1000):
        assert torch.equal(words(pydet.skinny_gemm(x[:m], w)), words(pydet.gemm(x[:m], w.T)))
    for kernel in SKINNY_KERNELS[1:]:
        if "sm90" in kernel:
            with pytest.raises(pydet.Error, match=f"kernel {kernel} does not take this problem"):
                pydet.skinny_gemm(x[:129], w, kernel=kernel)


def test_skinny_workspace(torch):
    """None is needed, whatever the extents, and one that is given changes nothing and is not outgrown."""
    lib, null = capi.ffi.dlopen(str(pathlib.Path(pydet.__file__).parent / "libpydet_cuda.so")), capi.ffi.NULL
    size = capi.ffi.new("uint64_t *", 7)
    for m, n, k in [(1, 1, 1), (128, 128256, 16384), (130, 2**31, 2**20), (2**20, 2**20, 2**20)]:
        for mode in (lib.PYDET_DETERMINISTIC, lib.PYDET_FAST):
            options = capi.options("pydet_skinny_gemm_options", mode=mode, k_chunk=256)
            assert lib.pydet_skinny_gemm_workspace(m, n, k, options, size) == lib.PYDET_OK and size[0] == 0
    x, w = operands(torch, 16, 520, 1024, torch.bfloat16)
    expected, y = words(pydet.skinny_gemm(x, w)), torch.empty(16, 520, dtype=torch.bfloat16, device="cuda")
    scratch = torch.full((48,), 77, dtype=torch.uint8, device="cuda")
    tensors = [capi.Tensor(shape=t.shape, dtype=capi.BFLOAT16, data=t.data_ptr(), device=(2, 0)).c for t in (x, w, y)]
    given = capi.options(
        "pydet_skinny_gemm_options", workspace=capi.ffi.cast("void *", scratch.data_ptr() + 16), workspace_size=16
    )
    stream = capi.ffi.cast("void *", torch.cuda.current_stream().cuda_stream)
    assert lib.pydet_skinny_gemm(stream, tensors[0], tensors[1], null, tensors[2], given) == lib.PYDET_OK
    assert torch.equal(words(y), expected)
    assert bool((scratch[:16] == 77).all()) and bool((scratch[32:] == 77).all())


# ---- Skinny GEMM on mma.sync: by name where the library prefers wgmma ------------------------------------------------


@pytest.fixture(scope="module")
def skinny_mma(torch):
    """The kernel of this device's tensor cores as a function; its attribute `reference` is the same product by the
    tiles of gemm_mma.cu, which take anything."""
    arithmetic = pydet.resolve_arithmetic("bfloat16", ("cuda", 0))

    def product(x, w, **options):
        return pydet.skinny_gemm(x, w, kernel=f"cuda_skinny_gemm_{arithmetic}_mma", **options)

    def reference(x, w, **options):
        return pydet.skinny_gemm(x, w, kernel=f"cuda_gemm_{arithmetic}_mma_64x64", **options)

    product.reference, product.arithmetic = reference, arithmetic
    return product


SKINNY_M = [1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 96, 100, 128]


@pytest.mark.parametrize("k_chunk", [None, 256, 512, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_skinny_mma_equals_cpu(torch, skinny_mma, dtype, k_chunk):
    """Ragged N and K, and the last chunks short or missing, against the CPU and the GEMM tiles."""
    options = {"k_chunk": k_chunk, "out_dtype": torch.float32}
    for n, k in [(331, 8), (72, 1000), (200, 2880), (136, 4104), (40, 14336)]:
        x, w = (torch.randn(rows, k).to(getattr(torch, dtype)) for rows in (128, n))
        expected = words(pydet.skinny_gemm(x, w, arithmetic=skinny_mma.arithmetic, **options)).cuda()
        x, w = x.cuda(), w.cuda()
        assert torch.equal(words(skinny_mma.reference(x, w, **options)), expected), f"{n} x {k}, the reference"
        for m in SKINNY_M:
            y = words(skinny_mma(x[:m], w, weights_constant=m % 2 == 0, **options))
            assert torch.equal(y, expected[:m]), f"{m} x {n} x {k}: {int((y != expected[:m]).sum())} words differ"


@pytest.mark.parametrize("k_chunk", [None, 16, 48, 256, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_skinny_mma_in_every_cut(torch, skinny_mma, dtype, k_chunk):
    """From a few tiles, which share rows of w, to several a block, so that the rings go round over tiles' ends."""
    few, many = [(520, 4096), (1024, 2000), (2048, 2056)], [(4096, 1024), (6144, 520), (12288, 520), (43001, 72)]
    between = [(520, 4100), (1024, 2002), (6144, 516), (43001, 74)]  # rows that begin at multiples of 8 bytes, of 4
    for n, k in [*few, *many, *between]:
        x, w = operands(torch, 128, n, k, getattr(torch, dtype))
        expected = words(skinny_mma.reference(x, w, k_chunk=k_chunk))
        for m in SKINNY_M:
            y = words(skinny_mma(x[:m], w, k_chunk=k_chunk))
            assert torch.equal(y, expected[:m]), f"{m} x {n} x {k}: {int((y != expected[:m]).sum())} words differ"


@pytest.mark.parametrize("k_chunk", [None, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_skinny_mma_bias_and_strides(torch, skinny_mma, dtype, k_chunk):
    """A bias for each column and a full one, of every type; results of every type; padded and shared rows, at
    multiples of 16, 8 and 4 bytes; K that is no multiple of a piece; adding to y; and nothing written beside it."""
    dtype, n, k = getattr(torch, dtype), 333, 1411
    types = [torch.float32, torch.bfloat16, torch.float16]
    x, w = operands(torch, 128, n + 3, 1440, dtype)
    places = itertools.cycle([(8, 16), (4, 16), (8, 2), (6, 12), (10, 4)])
    wide = x, w
    for m in SKINNY_M:
        of_x, of_w = next(places)
        x, w = wide[0][:, of_x : k + of_x], wide[1][:n, of_w : k + of_w]
        for i, shape in itertools.product(range(3), [(n,), (m, n)]):
            options = {"bias": torch.randn(shape, device="cuda").to(types[i]), "k_chunk": k_chunk}
            for out_dtype in (types[i], types[i - 1]):
                y, expected = (f(x[:m], w, out_dtype=out_dtype, **options) for f in (skinny_mma, skinny_mma.reference))
                assert torch.equal(words(y), words(expected)), f"M = {m}, bias {shape} {types[i]}, {out_dtype}"
        before = torch.randn(m + 2, n + 3, device="cuda")
        outs = [before.clone(), before.clone()]
        for f, out in zip((skinny_mma, skinny_mma.reference), outs, strict=True):
            f(x[:m], w, out=out[1 : m + 1, 2 : n + 2], accumulate=True, k_chunk=k_chunk)
        assert torch.equal(*map(words, outs)), f"M = {m}, accumulate"
        outside = torch.ones_like(before, dtype=torch.bool)
        outside[1 : m + 1, 2 : n + 2] = False
        assert torch.equal(words(outs[0])[outside], words(before)[outside]), f"M = {m}: wrote outside of y"
        same = x[:1].expand(m, k)
        y, expected = (f(same, w, k_chunk=k_chunk) for f in (skinny_mma, skinny_mma.reference))
        assert torch.equal(words(y), words(expected)), f"one row, {m} times"


def test_skinny_mma_special_numbers(torch, skinny_mma):
    """Infinities, NaNs, zeros of both signs and subnormals; rows among NaN rows."""
    for kind, dtype in itertools.product(cases.KINDS, ("bf16", "fp16")):
        x, w = (data(kind, (rows, 1000), DTYPES[dtype], rows) for rows in (100, 264))
        x, w = (torch.from_numpy(a.view(np.int16)).cuda().view(getattr(torch, a.dtype.name)) for a in (x, w))
        for m, k_chunk in itertools.product((1, 16, 40, 100), (None, 256)):
            y, expected = (f(x[:m], w, k_chunk=k_chunk) for f in (skinny_mma, skinny_mma.reference))
            assert torch.equal(words(y), words(expected)), f"{kind}, {dtype}, M = {m}, k_chunk {k_chunk}"
    x, w = operands(torch, 100, 1000, 2048, torch.bfloat16)
    whole, among = words(skinny_mma(x, w)), torch.full_like(x, float("nan"))
    among[::7] = x[::7]
    assert torch.equal(words(skinny_mma(among, w))[::7], whole[::7])


@pytest.mark.parametrize("weights_constant", [False, True])
def test_skinny_mma_in_sequence(torch, skinny_mma, weights_constant):
    """Products of the results before them, called and as a graph's replays, beside a busy stream."""
    shapes = [(1536, 1024), (1024, 1024), (7168, 1024), (1024, 3584)] * 2
    weights = [(torch.randn(n, k, device="cuda") * k**-0.5).to(torch.bfloat16) for n, k in shapes]
    busy, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")

    def layers(x, outs):
        for w, out in zip(weights, outs, strict=True):
            skinny_mma(x[:, : w.shape[1]], w, out=out, weights_constant=weights_constant)
            x = out
        return x

    for m in (1, 16, 64, 128):
        x = expected = torch.randn(m, 1024, device="cuda").to(torch.bfloat16)
        for w in weights:
            expected = skinny_mma.reference(expected[:, : w.shape[1]], w)
            torch.cuda.synchronize()
        expected = words(expected)
        outs = [torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for n, _ in shapes]
        layers(x, outs)
        torch.cuda.synchronize()
        graph, wrong = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device="cuda")
        with torch.cuda.graph(graph):
            y = layers(x, outs)
        for replays in (False, True):
            for _ in range(100):
                with torch.cuda.stream(busy):
                    noise = (noise @ noise).clamp_(-1, 1)
                for out in outs:
                    out.fill_(float("nan"))
                graph.replay() if replays else layers(x, outs)
                wrong += (words(y) != expected).sum()
        assert int(wrong) == 0, f"M = {m}"


def test_skinny_mma_refuses(torch, skinny_mma):
    """What it does not take, by name; the library's choice has the bits."""
    x, w = operands(torch, 130, 200, 520, torch.bfloat16)
    shifted = torch.zeros(200 * 520 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(200, 520).copy_(w)
    odd = torch.zeros(130, 521, dtype=torch.bfloat16, device="cuda")
    odd[:, :520] = x
    columns = w.T.contiguous().T
    for a, b in [(x[:129], w), (x[:5], shifted), (odd[:5, :520], w), (x[:5, :0], w[:, :0]), (x[:5], columns)]:
        with pytest.raises(pydet.Error, match=r"skinny_gemm_sm.0_mma does not take this problem"):
            skinny_mma(a, b)
        assert torch.equal(words(pydet.skinny_gemm(a, b)), words(skinny_mma.reference(a, b)))


# ---- RMSNorm -------------------------------------------------------------------------------------------------------

NORM_ROWS = [0, 1, 2, 63, 64, 65, 199, 600]
NORM_WIDTHS = [1, 7, 64, 192, 255, 256, 264, 520, 1024, 2048, 2056, 4096, 8192, 8193, 16384, 16392, 131072]
LARGEST = 270_000  # elements; the larger ones are made on the device, below
NORM_SHAPES = [(m, n) for m in NORM_ROWS for n in NORM_WIDTHS if m * n <= LARGEST] + [(4096, 256), (199, 4096)]
# Around the chains, groups and blocks of rows that blocks of threads take at once, and around teams.
NORM_SHAPES += [(m, n) for n in (8, 72, 120, 136) for m in (15, 17, 63, 65, 127, 129, 241, 257, 513, 1023, 1040, 2049)]
NORM_SHAPES += [(m, n) for n in (9, 127, 129, 511, 513, 2047, 2049, 4097, 8191, 16383) for m in (1, 17)]


@each("rmsnorm")
def test_rmsnorm_equals_cpu(device, kernel, dtype):
    for index, (m, n) in enumerate(NORM_SHAPES):
        x, weight, options = test_rmsnorm.forward_case(m, n, dtype, index, ["normal", "wide", "specials"][index % 3])
        test_rmsnorm.assert_all_same_bits(
            device.rmsnorm(x, weight, **options), pydet.rmsnorm(x, weight, **options), f"{m}x{n} case {index}"
        )
    assert device.taken >= 5, f"{kernel.name} took {device.taken} problems and refused {device.refused}"


def backward_case(m, n, dtype, index):
    """dy, x, weight and rstd of case `index`, and its options; rstd is any number: no model has to compute it."""
    kind = ["normal", "wide", "specials"][index % 3]
    x, weight, options = test_rmsnorm.forward_case(m, n, dtype, index, kind)
    rstd = np.abs(data("normal", (m,), reference.FLOAT32, index + 7))
    dy = data(kind, (m, n), DTYPES[dtype], index + 3)
    given = {name: value for name, value in options.items() if name == "weight_offset"}
    if "residual" in options:
        given["dresidual"] = options["residual"]
    if weight is not None:
        given["dweight_dtype"] = DTYPES[["fp32", "bf16", "fp16"][index % 3]]
    return (dy, x, weight, rstd), given


@each("rmsnorm_backward")
def test_rmsnorm_backward_equals_cpu(device, kernel, dtype):
    for index, (m, n) in enumerate(NORM_SHAPES):
        operands, given = backward_case(m, n, dtype, index)
        test_rmsnorm.assert_all_same_bits(
            device.rmsnorm_backward(*operands, **given),
            pydet.rmsnorm_backward(*operands, **given),
            f"{m}x{n} case {index}",
        )
    assert device.taken >= 5, f"{kernel.name} took {device.taken} problems and refused {device.refused}"


@each("rmsnorm_backward")
def test_block_sums_equal_cpu(device, kernel, dtype):
    """Around the 256 blocks that are joined at a time too. The kernel that leaves no partial sums refuses them."""
    shapes = [*test_rmsnorm.BLOCK_SHAPES, (2048, 512), (1025, 1000), (300, 4096), (1300, 8200)]
    shapes += [(257, 5121), (513, 6147), (300, 8192)]
    shapes += [(256 * 256 + rest, 8) for rest in (-1, 0, 1, 257)]
    taken = 0

    def gradients(*operands, block_sums=False, **options):
        nonlocal taken
        before = device.taken
        results = device.rmsnorm_backward(*operands, block_sums=block_sums, **options)
        taken += block_sums and device.taken > before
        return results

    test_rmsnorm.check_block_sums(gradients, dtype, shapes, expect=pydet.rmsnorm_backward)
    assert taken == 0 if kernel.name.endswith("_apart") else taken >= 3


@each("rmsnorm")
def test_rmsnorm_golden(device, kernel, dtype):
    test_golden.check_golden("rmsnorm", device.rmsnorm, "ieee", dtype)


@each("rmsnorm_backward")
def test_rmsnorm_backward_golden(device, kernel, dtype):
    test_golden.check_golden("rmsnorm_backward", device.rmsnorm_backward, "ieee", dtype)


@pytest.mark.parametrize("n", [128, 256, 512, 1024, 8192, 16384])
@pytest.mark.parametrize("kernel", [kernel.name for kernel in cuda_kernels("rmsnorm_backward")] or [None])
def test_dweight_of_micro_batches(torch, n, kernel):
    x, dy = (torch.randn(2048, n, device="cuda").to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda")
    rstd = pydet.rmsnorm(x, weight, eps=1e-6)[1]
    dx, dweight = pydet.rmsnorm_backward(dy, x, weight, rstd)
    try:
        pydet.rmsnorm_backward(dy, x, weight, rstd, kernel=kernel)
    except pydet.Error as error:
        assert "does not take this problem" in str(error)
        assert "staged" in kernel or n > (128 if "narrow" in kernel else 512)
        pytest.skip(str(error))
    for cuts in ([256, 1024], [512], [1792]):
        total = torch.zeros_like(dweight)
        for first, last in zip([0, *cuts], [*cuts, 2048]):
            part = slice(first, last)
            dx_part, _ = pydet.rmsnorm_backward(
                dy[part], x[part], weight, rstd[part], dweight=total, accumulate=True, kernel=kernel
            )
            assert torch.equal(words(dx_part), words(dx[part]))
        assert torch.equal(words(total), words(dweight)), cuts


# M x N of the two kernels' whole range; those that are large take turns with the types.
NORM_SIZES = [1, 7, 64, 192, 255, 256, 1024, 2048, 4096, 8192, 8193, 16384]
LARGE_NORMS = [(m, n) for m in (4096, 16384) for n in NORM_SIZES if m * n <= 1 << 26] + [(199, 131072), (65, 131072)]


def norm_on_both(torch, m, n, dtype, weight_dtype, residual, kernel=None, seed=0):
    """y, rstd (and sum), dx, dweight of one random problem, from the device and from the CPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, dy, extra = (torch.randn(m, n, device="cuda", generator=generator).to(dtype) for _ in range(3))
    weight = torch.randn(n, device="cuda", generator=generator).to(weight_dtype)
    results = []
    for move in (lambda tensor: tensor, lambda tensor: tensor.cpu()):
        x_, dy_, extra_, weight_ = map(move, (x, dy, extra, weight))
        forward = {"residual": extra_} if residual else {}
        backward = {"dresidual": extra_} if residual else {}
        if kernel and x_.is_cuda:
            backward["kernel"] = kernel
        outputs = pydet.rmsnorm(x_, weight_, eps=1e-6, weight_offset=1.0, **forward)
        rstd = move(outputs[1]) if x_.is_cuda else results[0][1].cpu()
        try:
            gradients = pydet.rmsnorm_backward(dy_, x_, weight_, rstd, weight_offset=1.0, **backward)
        except pydet.Error as error:
            if error.status != UNSUPPORTED:
                raise
            backward["kernel"] = None
            gradients = pydet.rmsnorm_backward(dy_, x_, weight_, rstd, weight_offset=1.0, **backward)
        results.append([*outputs, *gradients])
    return results


def assert_both_same(results, what):
    for i, (one, other) in enumerate(zip(*results, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert bool((words(one.cpu()) == words(other)).all()), f"{what}, result {i}"


def test_norms_of_large_shapes(torch):
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    for index, (m, n) in enumerate(LARGE_NORMS):
        dtype, weight_dtype = dtypes[index % 3], dtypes[(index + index // 3) % 3]
        results = norm_on_both(torch, m, n, dtype, weight_dtype, index % 2 == 1, seed=index)
        assert_both_same(results, f"{m} x {n}, {dtype}, weight {weight_dtype}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_norms_of_every_team(torch, dtype):
    """Widths at both ends of each team's range, with and without the residual; both ways of taking the rows."""
    for kernel in [kernel.name for kernel in cuda_kernels("rmsnorm_backward")]:
        for n in (8, 248, 256, 264, 512, 520, 1024, 1032, 2048, 2056, 4096, 4104, 8192, 8200, 16384):
            for m, residual in ((600, False), (530, True)):  # groups, and chains after them
                results = norm_on_both(torch, m, n, getattr(torch, dtype), torch.float32, residual, kernel, seed=n)
                assert_both_same(results, f"{kernel}, {m} x {n}")


@pytest.mark.parametrize("n", [128, 1024, 5120])
def test_norms_of_strided_rows(torch, n):
    """Heads cut out of a wider tensor: rows of two strides, whose inner extent the chains of 16 rows do not know."""
    for heads in (1, 3, 8, 40):
        tokens, wide = 61, torch.randn(61, heads + 2, n, device="cuda").to(torch.bfloat16)
        x, dy = wide[:, 1 : heads + 1], torch.randn(tokens, heads, n, device="cuda").to(torch.bfloat16)
        weight = torch.randn(n, device="cuda")
        y, rstd = pydet.rmsnorm(x, weight, eps=1e-6)
        dx, dweight = pydet.rmsnorm_backward(dy, x, weight, rstd)
        flat = x.reshape(-1, n)
        y_flat, rstd_flat = pydet.rmsnorm(flat, weight, eps=1e-6)
        dx_flat, dweight_flat = pydet.rmsnorm_backward(dy.reshape(-1, n), flat, weight, rstd_flat)
        for one, other in ((y, y_flat), (rstd, rstd_flat), (dx, dx_flat), (dweight, dweight_flat)):
            assert torch.equal(words(one.contiguous()).view(-1), words(other).view(-1)), f"{heads} heads"


@pytest.mark.parametrize("n", [256, 1024, 4096, 16384])
def test_norm_rows_among_nan_rows(torch, n):
    """A NaN in a row of x reaches its y, rstd and dx, and through rstd all of dweight; one in dy, its row's dx and one
    column of dweight."""
    x, dy = (torch.randn(300, n, device="cuda").to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda")
    y, rstd = pydet.rmsnorm(x, weight, eps=1e-6)
    dx, dweight = pydet.rmsnorm_backward(dy, x, weight, rstd)
    bad_x, bad_dy, row, column = x.clone(), dy.clone(), 131, n - 3
    bad_x[row, column] = bad_dy[row, column] = float("nan")
    others = [i for i in range(300) if i != row]
    bad_y, bad_rstd = pydet.rmsnorm(bad_x, weight, eps=1e-6)
    assert bool(bad_y[row].isnan().all()) and bool(bad_rstd[row].isnan())
    assert torch.equal(words(bad_y[others]), words(y[others])) and torch.equal(bad_rstd[others], rstd[others])
    bad_dx, bad_dweight = pydet.rmsnorm_backward(dy, bad_x, weight, bad_rstd)
    assert bool(bad_dx[row].isnan().all()) and bool(bad_dweight.isnan().all())
    assert torch.equal(words(bad_dx[others]), words(dx[others]))
    bad_dx, bad_dweight = pydet.rmsnorm_backward(bad_dy, x, weight, rstd)
    assert bool(bad_dx[row].isnan().all()) and bool(bad_dweight[column].isnan())
    assert torch.equal(words(bad_dx[others]), words(dx[others]))
    assert torch.equal(bad_dweight[:column], dweight[:column]) and torch.equal(
        bad_dweight[column + 1 :], dweight[column + 1 :]
    )


@pytest.mark.parametrize("m,n", [(4096, 1024), (16384, 512), (300, 8192)])
def test_norm_rows_alone(torch, m, n):
    """y, rstd and dx of a row are the same in every batch."""
    x, dy = (torch.randn(m, n, device="cuda").to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda")
    y, rstd = pydet.rmsnorm(x, weight, eps=1e-6)
    dx, _ = pydet.rmsnorm_backward(dy, x, weight, rstd)
    for first, last in ((0, 1), (m - 1, m), (17, 50), (100, 299), (5, m)):
        part = slice(first, last)
        y_part, rstd_part = pydet.rmsnorm(x[part], weight, eps=1e-6)
        dx_part, _ = pydet.rmsnorm_backward(dy[part], x[part], weight, rstd[part])
        for one, other in ((y_part, y), (rstd_part, rstd), (dx_part, dx)):
            assert torch.equal(words(one), words(other[part])), (first, last)


def test_norm_graph_replay_beside_other_work(torch):
    """Forward and backward as a graph, 300 times, each call right behind the one before, while another stream works."""
    m, n = 4096, 1024
    x, dy = (torch.randn(m, n, device="cuda").to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda")
    expected = [*pydet.rmsnorm(x, weight, eps=1e-6)]
    expected += pydet.rmsnorm_backward(dy, x, weight, expected[1])
    actual, graph = [torch.empty_like(tensor) for tensor in expected], torch.cuda.CUDAGraph()
    y, rstd, dx, dweight = actual
    with torch.cuda.graph(graph):
        pydet.rmsnorm(x, weight, eps=1e-6, out=(y, rstd))
        pydet.rmsnorm_backward(dy, x, weight, rstd, out=dx, dweight=dweight)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(300):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp_(-1, 1)
        for tensor in actual:
            tensor.fill_(float("nan"))
        graph.replay()
        for one, other in zip(actual, expected, strict=True):
            wrong += (words(one) != words(other)).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0


OCCUPY = b""".version 7.0
.target sm_80
.address_size 64
.visible .entry occupy(.param .u64 arrived, .param .u64 release)
{
  .reg .pred %p;
  .reg .b32 %r<3>;
  .reg .b64 %d<7>;
  ld.param.u64 %d0, [arrived];
  ld.param.u64 %d1, [release];
  mov.u32 %r0, %ctaid.x;
  mul.wide.u32 %d2, %r0, 4;
  add.u64 %d3, %d0, %d2;
  mov.u32 %r1, 1;
  st.volatile.global.u32 [%d3], %r1;
  mov.u64 %d4, %globaltimer;
wait:
  ld.volatile.global.u32 %r2, [%d1];
  setp.ne.u32 %p, %r2, 0;
  @%p bra done;
  mov.u64 %d5, %globaltimer;
  sub.u64 %d6, %d5, %d4;
  setp.lt.u64 %p, %d6, 10000000000;
  @%p bra wait;
done:
  ret;
}
"""


class Occupied:
    """While in scope, blocks that take all the shared memory of a multiprocessor hold all but `free` of them."""

    def __init__(self, torch, free):
        self.torch, properties = torch, torch.cuda.get_device_properties(0)
        self.count = properties.multi_processor_count - free
        self.shared_bytes = properties.shared_memory_per_block_optin
        self.driver = ctypes.CDLL("libcuda.so.1")

    def check(self, error):
        assert error == 0, f"CUDA driver error {error}"

    def __enter__(self):
        torch, driver = self.torch, self.driver
        self.stream = torch.cuda.Stream()
        self.arrived = torch.zeros(max(self.count, 1), dtype=torch.int32).pin_memory()
        self.release = torch.zeros(1, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize()
        self.module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(driver.cuModuleLoadData(ctypes.byref(self.module), OCCUPY))
        self.check(driver.cuModuleGetFunction(ctypes.byref(function), self.module, b"occupy"))
        self.check(driver.cuFuncSetAttribute(function, 8, self.shared_bytes))  # the most dynamic shared memory
        pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (self.arrived, self.release)]
        arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(pointer) for pointer in pointers))
        if self.count:
            stream = ctypes.c_void_p(self.stream.cuda_stream)
            self.check(
                driver.cuLaunchKernel(function, self.count, 1, 1, 32, 1, 1, self.shared_bytes, stream, arguments, None)
            )
        deadline = time.monotonic() + 5
        while int(self.arrived.sum()) < self.count:
            assert time.monotonic() < deadline, f"{int(self.arrived.sum())} of {self.count} blocks run"
        return self

    def holds(self):
        return self.count == 0 or not self.stream.query()

    def __exit__(self, *_):
        self.release[0] = 1
        self.torch.cuda.synchronize()
        self.check(self.driver.cuModuleUnload(self.module))


@pytest.mark.parametrize("free", [1, 66, None])
def test_norms_on_few_multiprocessors(torch, free):
    """The bits of a call that has 1, 66 or all of the device's multiprocessors to run on."""
    free = free or torch.cuda.get_device_properties(0).multi_processor_count
    sizes = [(4096, 256), (4096, 1024), (8192, 512), (1100, 4096), (600, 8192), (300, 16384), (64, 16392)]
    sizes += [(33000, 256), (9000, 2048)]
    for m, n in sizes:
        x, dy = (torch.randn(m, n, device="cuda").to(torch.bfloat16) for _ in range(2))
        weight = torch.randn(n, device="cuda")
        expected = [*pydet.rmsnorm(x, weight, eps=1e-6)]
        expected += pydet.rmsnorm_backward(dy, x, weight, expected[1])
        actual = [torch.full_like(tensor, float("nan")) for tensor in expected]
        y, rstd, dx, dweight = actual
        stream, done = torch.cuda.Stream(), torch.cuda.Event()
        torch.cuda.synchronize()
        with Occupied(torch, free) as others:
            with torch.cuda.stream(stream):
                pydet.rmsnorm(x, weight, eps=1e-6, out=(y, rstd))
                pydet.rmsnorm_backward(dy, x, weight, rstd, out=dx, dweight=dweight)
                done.record()
            done.synchronize()
            assert others.holds()
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(words(one), words(other)), f"{m} x {n}"
