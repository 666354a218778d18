"""The CUDA kernels of scaled_gemm and quantize, forced by name, against the CPU's bit for bit."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import pydet
import test_scaled_gemm
from cases import DTYPES, assert_same_bits, data
from reference import FLOAT32, bits
from reference_fp8 import E4M3, E5M2, E8M0
from test_cuda import cuda_kernels, torch  # noqa: F401
from test_scaled_gemm import OUT_TYPES, TYPES, VECTORS, Scaled

UNSUPPORTED = 11  # pydet.h
FINE_KERNEL = "cuda_scaled_gemm_sm90_fine"  # with scales of 32 elements along k alone
ONE_WARPGROUP = "cuda_scaled_gemm_sm90_skinny_80"  # for up to 64 rows alone
GEMM_KERNELS = [k.name for k in cuda_kernels("scaled_gemm") if k.arithmetic == "sm90" and k.name != FINE_KERNEL]
PLAIN_COLUMNS = (96, 144, 160)  # of tiles of 128 rows that take e4m3 without scales along k alone
PLAIN_KERNELS = {f"cuda_scaled_gemm_sm90_128x{columns}": columns for columns in PLAIN_COLUMNS}
LOW_KERNELS = {f"cuda_scaled_gemm_sm90_64x{columns}": columns for columns in (64, 128)}  # with scales along k alone
BESIDE_KERNELS = {"cuda_scaled_gemm_sm90_128x128_wide": 128}  # e4m3 alone, with scales along k or without
IEEE_KERNELS = [kernel.name for kernel in cuda_kernels("scaled_gemm") if kernel.arithmetic == "ieee"]
QUANTIZE_KERNELS = [kernel.name for kernel in cuda_kernels("quantize")]


def to_device(torch, array):
    """The array's numbers on the device, in its strides' order: a transposed matrix stays one."""
    if array is None:
        return None
    dtype = getattr(torch, array.dtype.name)
    words = bits(array.swapaxes(-1, -2)).copy() if is_turned(array) else bits(array).copy()
    kind = {1: np.uint8, 2: np.int16, 4: np.int32}[array.dtype.itemsize]
    tensor = torch.from_numpy(words.view(kind).reshape(words.shape if array.ndim else ())).cuda().view(dtype)
    return tensor.transpose(-1, -2) if is_turned(array) else tensor


def is_turned(array):
    return array.ndim >= 2 and array.strides[-2] == array.itemsize and array.strides[-1] != array.itemsize


def to_host(torch, tensor, dtype):
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[np.dtype(dtype).itemsize]
    words = tensor.detach().contiguous().reshape(-1).view(size).cpu().numpy()
    return words.view(dtype).reshape(tuple(tensor.shape))


class OnDevice:
    """pydet's operations on NumPy arrays, computed on the device."""

    def __init__(self, torch, kernel=None):
        self.torch, self.kernel, self.taken, self.refused = torch, kernel, 0, 0

    def scaled_gemm(
        self, a, b, *, out=None, out_dtype=None, bias=None, a_scale=None, b_scale=None, initial=None, **options
    ):
        torch = self.torch
        given = {"a_scale": a_scale, "b_scale": b_scale, "bias": bias, "out": out, "initial": initial}
        tensors = {name: to_device(torch, array) for name, array in given.items()}
        operands = to_device(torch, a), to_device(torch, b)
        out_dtype = None if out_dtype is None else np.dtype(out_dtype).name
        try:
            result = pydet.scaled_gemm(*operands, **tensors, out_dtype=out_dtype, kernel=self.kernel, **options)
            self.taken += 1
        except pydet.Error as error:
            if self.kernel is None or error.status != UNSUPPORTED:
                raise
            self.refused += 1
            result = pydet.scaled_gemm(*operands, **tensors, out_dtype=out_dtype, **options)
        host = to_host(torch, result, out.dtype if out is not None else np.dtype(out_dtype))
        if out is None:
            return host
        out[...] = host
        return out

    def quantize(self, x, *, scale=None, dtype=E4M3, scale_dtype=FLOAT32, **options):
        torch = self.torch
        results = pydet.quantize(
            to_device(torch, x), scale=to_device(torch, scale), dtype=np.dtype(dtype).name,
            scale_dtype=np.dtype(scale_dtype).name, kernel=self.kernel, **options,
        )  # fmt: skip
        kinds = itertools.cycle([dtype, scale_dtype if scale is None else scale.dtype])
        return tuple(to_host(torch, tensor, kind) for tensor, kind in zip(results, kinds, strict=False))


@functools.lru_cache(maxsize=1000)
def on_cpu(problem):
    """The CPU's result, which tests/test_scaled_gemm.py compares with the reference and the chip."""
    return test_scaled_gemm.run(pydet.scaled_gemm, problem)


def problems():
    """Every boundary: tiles of 128 and 256 rows and of 64 to 128 columns, two and four of them, stages of 128 k, rings
    of 4, 6 and 8, turns of 8 stages and what is left of one; chunks with weights, which come by fours, and without;
    tiles that begin in each quarter and eighth of a block of scales."""
    cases = itertools.count()
    types, outs = itertools.cycle(itertools.product(TYPES, TYPES)), itertools.cycle(["bf16", "fp32", "fp16"])
    scales = itertools.cycle([("group", "block"), ("row", "row"), ("group", "group"), ("tensor", "tensor"),
                              ("row", "block"), ("none", "none"), ("group", "row"), ("group", "tensor"),
                              ("none", "block")])  # fmt: skip

    def make(m, n, k, **fields):
        a_type, b_type = next(types)
        a_scale, b_scale = next(scales)
        return Scaled(m, n, k, **{
            "a_type": a_type, "b_type": b_type, "a_scale": a_scale, "b_scale": b_scale, "out_dtype": next(outs),
            "seed": next(cases), **fields,
        })  # fmt: skip

    for m in (1, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300):
        yield make(m, 136, 256)
        yield make(m, 264, 384, a_scale="group", b_scale="block")
    for n in (1, 8, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385, 520):
        yield make(70, n, 256)
        yield make(257, n, 144, a_scale="group", b_scale="block")
    for n in (95, 96, 97, 111, 112, 113, 191, 193, 223, 225, 288, 289, 335, 337, 449, 897):
        yield make(513, n, 640, a_scale="group", b_scale="block")
        yield make(257, n, 272, a_scale="row", b_scale="row")
    for k in (0, 16, 32, 48, 112, 128, 144, 160, 256, 384, 512, 640, 768, 896, 1040, 1920, 2048):
        yield make(40, 72, k)
        yield make(300, 140, k, a_scale="group", b_scale="block")
    for k, out_dtype in itertools.product(range(128, 1280, 128), ("bf16", "fp32")):  # and four stages unrolled, by type
        yield make(300, 140, k, a_scale="group", b_scale="block", out_dtype=out_dtype)
    for without in ({"a_scale": "row", "b_scale": "row"}, {"a_scale": "tensor", "b_scale": "tensor"}):
        of_e4m3 = {"a_type": "e4m3", "b_type": "e4m3", **without}
        for m in (1, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 513):
            yield make(m, 200, 1200, **of_e4m3)
        for n in (63, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257, 511, 513):
            yield make(100, n, 400, **of_e4m3)
            yield make(257, n, 400, **of_e4m3)
            yield make(100, n, 1200, a_scale="group", b_scale="block", a_type="e4m3", b_type="e4m3")
        for k in (16, *range(128, 1408, 128)):
            yield make(300, 140, k, **of_e4m3)
        yield make(1500, 1300, 640, **of_e4m3)
        yield make(128, 17000, 272, **of_e4m3)
    yield make(100, 17000, 272, a_scale="group", b_scale="block", a_type="e4m3", b_type="e4m3")
    for k_chunk in (0, 128, 256, 384, 2048):
        yield make(70, 200, 912, a_scale="row", b_scale="row", k_chunk=k_chunk)
        yield make(70, 200, 912, a_scale="none", b_scale="none", k_chunk=k_chunk, accumulate=True, out_dtype="fp32")
    for bias in ("n fp32", "n bf16", "mn fp16", "mn fp32"):
        yield make(130, 200, 256, bias=bias)
    for kind in ("near", "specials"):
        for a_scale, b_scale in (("group", "block"), ("row", "row"), ("group", "group"), ("none", "none")):
            yield make(131, 140, 272, kind=kind, a_scale=a_scale, b_scale=b_scale)
    yield make(300, 260, 512, accumulate=True, out_dtype="fp32", a_scale="group", b_scale="block")
    for out_dtype, bias in itertools.product(("bf16", "fp16", "fp32"), ("", "n fp32")):
        yield make(300, 260, 512, initial=True, out_dtype=out_dtype, bias=bias, a_scale="group", b_scale="block")
    yield make(130, 72, 272, initial=True, batch=(2,), out_dtype="bf16", a_scale="none", b_scale="none")
    yield make(300, 260, 512, scale_type=E8M0, a_scale="group", b_scale="block")
    yield make(65, 100, 256, scale_type=E8M0, a_scale="row", b_scale="row")
    yield make(70, 130, 256, batch=(3,), a_scale="group", b_scale="block")
    yield make(270, 130, 256, batch=(2, 2), a_scale="row", b_scale="row", bias="mn fp32")
    for k in (128, 384, 512, 640, 1152):
        for a_scale, b_scale in (("group", "none"), ("group", "tensor"), ("none", "block")):
            yield make(300, 260, k, a_scale=a_scale, b_scale=b_scale)
        yield make(300, 260, k, scale_type=E8M0, a_scale="group", b_scale="block")
        yield make(300, 140, k, scale_type=E8M0, a_scale="group", b_scale="group")
        yield make(1500, 1300, k, a_scale="group", b_scale="block")  # more tiles than blocks
    yield make(3000, 2200, 384, a_scale="row", b_scale="row")


def plain_problems(columns):
    """What tiles of 128 rows by so many columns take: edges of tiles, of two and of 64 rows, stages, turns of 4
    and 8 of them and what is left, one tile and more than there are blocks, results that are stored whole or not."""
    cases, outs = itertools.count(2000), itertools.cycle(["bf16", "fp32", "fp16"])
    scales = itertools.cycle([("row", "row"), ("tensor", "tensor"), ("none", "none"), ("row", "tensor")])

    def make(m, n, k, **fields):
        a_scale, b_scale = next(scales)
        given = {"a_scale": a_scale, "b_scale": b_scale, "out_dtype": next(outs), "seed": next(cases), **fields}
        return Scaled(m, n, k, a_type="e4m3", b_type="e4m3", **given)

    for m in (1, 16, 63, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257, 513):
        yield make(m, 2 * columns + 8, 400)
    for n in (1, 8, 63, 64, 65, columns - 8, columns - 1, columns, columns + 1, 2 * columns, 2 * columns + 1, 520):
        yield make(100, n, 272)
        yield make(300, n, 1200)
    for k in (0, 16, 48, 112, *range(128, 1408, 128), 2048, 2064):
        yield make(300, 140, k)
    for bias in ("n fp32", "n bf16", "mn fp16", "mn fp32"):
        yield make(130, 200, 256, bias=bias)
    for kind in ("near", "specials"):
        yield make(131, 200, 272, kind=kind, a_scale="row", b_scale="row")
    yield make(300, 260, 512, accumulate=True, out_dtype="fp32", a_scale="none", b_scale="none")
    yield make(270, 200, 256, batch=(2, 2), bias="mn fp32")
    yield make(70, 130, 256, batch=(3,), scale_type=E8M0)
    for out_dtype in ("bf16", "fp32"):
        yield make(3000, 2200, 384, out_dtype=out_dtype)


def low_problems(columns):
    """What tiles of 64 rows by so many columns take: edges of tiles and of boxes that are cut off, stages and rings
    of 8 and 12 of them, turns of 8, 4, 2 and 1, rounds of four chunks whole and not, one tile a block and more."""
    cases, outs = itertools.count(3000), itertools.cycle(["bf16", "fp32", "fp16"])
    scales = itertools.cycle(
        [("group", "block"), ("group", "none"), ("group", "tensor"), ("none", "block"), ("row", "block")]
    )

    def make(m, n, k, **fields):
        a_scale, b_scale = next(scales)
        given = {"a_scale": a_scale, "b_scale": b_scale, "out_dtype": next(outs), "seed": next(cases), **fields}
        return Scaled(m, n, k, a_type="e4m3", b_type="e4m3", **given)

    for m in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 513):
        yield make(m, 2 * columns + 8, 400)
        yield make(m, columns, 640, a_scale="group", b_scale="block")
    for n in (1, 8, 63, 64, 65, columns - 8, columns - 1, columns + 1, 2 * columns, 2 * columns + 1, 520):
        yield make(50, n, 272)
        yield make(200, n, 1200)
    for k in (0, 16, 48, 112, *range(128, 2176, 128), 2064, 4224):
        yield make(130, 140, k, a_scale="group", b_scale="block")
    for bias in ("n fp32", "n bf16", "mn fp16", "mn fp32"):
        yield make(130, 200, 256, bias=bias)
    for kind in ("near", "specials"):
        yield make(131, 200, 272, kind=kind, a_scale="group", b_scale="block")
    yield make(300, 260, 512, accumulate=True, out_dtype="fp32")
    yield make(270, 200, 256, batch=(2, 2), bias="mn fp32", a_scale="group", b_scale="block")
    for k in (128, 640, 1040):
        yield make(70, 130, k, batch=(3,), scale_type=E8M0, a_scale="group", b_scale="block")
        for out_dtype in ("bf16", "fp32"):
            yield make(1500, 1300, k, out_dtype=out_dtype, a_scale="group", b_scale="block")


def few_rows(types=(("e4m3", "e4m3"),)):
    """What the kernels for few rows of a take: their tiles of 16 to 128 columns, which may lie in two blocks of scales,
    stages of 128, 256 and 512 k, rings of 2 stages and more, one warpgroup, two, and two blocks, several tiles a block,
    8, 16, 32 lanes for the scales of a row, and half of each multiprocessor, where most of them have a tile."""
    cases, outs, types = itertools.count(1000), itertools.cycle(["bf16", "fp32", "fp16"]), itertools.cycle(types)
    scales = itertools.cycle([("group", "block"), ("row", "row"), ("group", "group"), ("tensor", "tensor"),
                              ("row", "block"), ("none", "none"), ("group", "row"), ("group", "tensor"),
                              ("none", "block"), ("group", "none")])  # fmt: skip

    def make(m, n, k, **fields):
        a_type, b_type = next(types)
        a_scale, b_scale = next(scales)
        return Scaled(m, n, k, **{
            "a_type": a_type, "b_type": b_type, "a_scale": a_scale, "b_scale": b_scale, "out_dtype": next(outs),
            "seed": next(cases), **fields,
        })  # fmt: skip

    for m in (1, 7, 8, 9, 15, 16, 17, 32, 33, 63, 64, 65, 100, 127, 128):
        yield make(m, 136, 272)
        yield make(m, 330, 640, a_scale="group", b_scale="block")
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 223, 256, 257):
        yield make(5, n, 256)
        yield make(70, n, 400, a_scale="group", b_scale="block")
    for k in (16, 32, 48, 112, 128, 144, 240, 256, 272, 384, 400, 512, 528, 640, 1024, 1152, 2048, 2304):
        yield make(3, 200, k)
        yield make(80, 144, k, a_scale="group", b_scale="block")
    for m in (20, 90):
        for bias in ("n fp32", "n bf16", "mn fp16", "mn fp32"):
            yield make(m, 203, 256, bias=bias)
        for kind in ("near", "specials"):
            for a_scale, b_scale in (("group", "block"), ("row", "row"), ("group", "group"), ("none", "none")):
                yield make(m, 140, 272, kind=kind, a_scale=a_scale, b_scale=b_scale)
        for a_scale, b_scale in (("group", "block"), ("group", "group"), ("none", "none")):
            yield make(m, 261, 528, accumulate=True, out_dtype="fp32", a_scale=a_scale, b_scale=b_scale)
            yield make(m, 261, 528, initial=True, a_scale=a_scale, b_scale=b_scale)
        yield make(m, 260, 512, scale_type=E8M0, a_scale="group", b_scale="block")
        yield make(m, 100, 256, scale_type=E8M0, a_scale="row", b_scale="row")
        yield make(m, 9000, 384, a_scale="group", b_scale="block")  # more tiles than blocks
        yield make(m, 40, 8320, a_scale="group", b_scale="block")
    for m in (65, 127, 128):  # one block for all rows, where there are too few multiprocessors for two
        yield make(m, 8600, 272, a_scale="group", b_scale="block")
    yield make(8, 5000, 128, a_scale="group", b_scale="group")
    for m, (n, k) in itertools.product((1, 16, 17, 64), ((2113, 272), (4224, 640), (4230, 1168), (8448, 400))):
        yield make(m, n, k)
        yield make(m, n, k, a_scale="group", b_scale="block")


def fine_problems():
    """Scales of 32 elements along k: steps and stages of four, tiles of 16 and of 64 columns, one a block and more;
    rows in several launches, of as many as their scales have room for."""
    cases, outs = itertools.count(4000), itertools.cycle(["bf16", "fp32", "fp16"])
    types = itertools.cycle(itertools.product(TYPES, TYPES))
    scales = itertools.cycle([("group", "group"), ("group", "none"), ("row", "group"), ("none", "block")])

    def make(m, n, k, **fields):
        (a_type, b_type), (a_scale, b_scale) = next(types), next(scales)
        given = {"a_scale": a_scale, "b_scale": b_scale, "out_dtype": next(outs), "seed": next(cases), **fields}
        given = {"scale_type": E8M0 if given["seed"] % 3 else FLOAT32, **given}
        return Scaled(m, n, k, a_type=a_type, b_type=b_type, k_chunk=32, **given)

    both = {"a_scale": "group", "b_scale": "group"}
    for m in (1, 7, 16, 17, 63, 64, 65, 100, 128, 129, 200):
        yield make(m, 72, 272)
        yield make(m, 4300, 160, **both)
    for n in (1, 8, 15, 16, 17, 63, 64, 65, 128, 130):
        yield make(5, n, 240, **both)
        yield make(70, n + 4224, 144, **both)
    for k in (16, 32, 48, 96, 112, 128, 144, 160, 256, 272, 384, 640, 1168):
        yield make(20, 40, k, **both)
        yield make(20, 4300, k, **both)
    for k in (4224, 8320):  # whose scales leave no room for 64 rows
        yield make(64, 72, k, **both)
        yield make(33, 4300, k, **both)
    for bias in ("n fp32", "n bf16", "mn fp16", "mn fp32"):
        yield make(90, 203, 256, bias=bias, **both)
    for kind in ("near", "specials"):
        yield make(70, 140, 272, kind=kind, **both)
    yield make(90, 4261, 528, accumulate=True, out_dtype="fp32", **both)
    yield make(90, 261, 528, initial=True, **both)
    yield make(5, 18000, 272, **both)


@pytest.mark.parametrize("kernel", [*GEMM_KERNELS, FINE_KERNEL, None])
def test_scaled_gemm_equals_the_cpu(torch, kernel):
    device = OnDevice(torch, kernel)
    given = few_rows() if "skinny" in (kernel or "") else problems() if kernel else [*problems(), *few_rows()]
    if kernel == ONE_WARPGROUP:
        given = [problem for problem in given if problem.m <= 64]
    if kernel in PLAIN_KERNELS:
        given = plain_problems(PLAIN_KERNELS[kernel])
    if kernel in LOW_KERNELS:
        given = low_problems(LOW_KERNELS[kernel])
    if kernel in BESIDE_KERNELS:
        given = [*plain_problems(BESIDE_KERNELS[kernel]), *low_problems(BESIDE_KERNELS[kernel])]
    if kernel == FINE_KERNEL:
        given = fine_problems()
    if kernel is None:
        given += fine_problems()
    if kernel is None or kernel.endswith(("skinny_32", "skinny_64")):
        given = [*given, *few_rows([pair for pair in itertools.product(TYPES, TYPES) if pair != ("e4m3", "e4m3")])]
    for problem in given:
        assert_same_bits(test_scaled_gemm.run(device.scaled_gemm, problem), on_cpu(problem), f"{kernel}: {problem}")
    assert device.taken > device.refused, f"{kernel} took {device.taken} problems and refused {device.refused}"


def ieee_problems():
    """Every layout, k_chunk and kind of scales, and the boundaries of tiles of 64 and stages of 32 k."""
    for dtype in TYPES:
        yield from test_scaled_gemm.problems_of(SimpleNamespace(dtype=dtype, arithmetic="ieee"))
    layouts = itertools.cycle(itertools.product(["row", "col"], ["col", "row"], ["row", "col"]))
    for m, n in ((1, 64), (63, 65), (64, 64), (65, 63), (129, 192), (200, 330)):
        for k in (31, 32, 33, 64, 200, 513):
            a_layout, b_layout, out_layout = next(layouts)
            yield Scaled(
                m, n, k, arithmetic="ieee", a_layout=a_layout, b_layout=b_layout, out_layout=out_layout, seed=k
            )


@pytest.mark.parametrize("kernel", [*IEEE_KERNELS, None])
def test_ieee_equals_the_cpu(torch, kernel):
    device = OnDevice(torch, kernel)
    for problem in ieee_problems():
        assert_same_bits(test_scaled_gemm.run(device.scaled_gemm, problem), on_cpu(problem), f"{kernel}: {problem}")
    assert (device.taken > 150 and not device.refused) or "skinny" in kernel


@pytest.mark.parametrize("kernel", IEEE_KERNELS)
@pytest.mark.parametrize("dtype", TYPES)
def test_few_rows_in_ieee_equal_the_cpu(torch, kernel, dtype):
    device = OnDevice(torch, kernel)
    for problem in test_scaled_gemm.few_rows(dtype):
        assert_same_bits(test_scaled_gemm.run(device.scaled_gemm, problem), on_cpu(problem), f"{kernel}: {problem}")
    assert not device.refused


@pytest.mark.parametrize("first", range(9))
def test_ieee_reads_where_nothing_is_aligned(torch, first):
    """Rows that begin at any byte, and end anywhere, along k and across."""
    whole = torch.from_numpy(test_scaled_gemm.fp8("any", (150, 150), E4M3).view(np.uint8)).view(torch.float8_e4m3fn)
    options = {"a_scale": None, "b_scale": None, "arithmetic": "ieee", "out_dtype": torch.float32}

    def products(x):
        x = x[first : first + 70, first : first + 131]
        return [pydet.scaled_gemm(a, b, **options).cpu().view(torch.int32) for a, b in ((x, x.T), (x.T, x))]

    for got, want in zip(products(whole.cuda()), products(whole), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kernel", GEMM_KERNELS)
def test_recorded_vectors(torch, kernel):
    """The same instruction on this chip: chains and chunks with scales (single steps lie k-adjacent in 32 bytes)."""
    device, vectors = OnDevice(torch, kernel), np.load(VECTORS)
    for name in (name[:-2] for name in vectors if name.endswith("_d")):
        kind, a_name, b_name = name.split("_")[:3]
        a, b = vectors[f"{name}_a"].view(TYPES[a_name]), vectors[f"{name}_b"].view(TYPES[b_name]).swapaxes(-1, -2)
        options = {"arithmetic": "sm90", "k_chunk": 0}
        d = vectors[f"{name}_d"].view(np.float32)
        if kind == "step":
            result = device.scaled_gemm(
                a, b, out=vectors[f"{name}_c"].view(np.float32).copy(), accumulate=True, **options
            )
        elif kind == "scaled":
            sa, sb = (vectors[f"{name}_{scale}"].view(np.float32) for scale in ("sa", "sb"))
            result = device.scaled_gemm(a, b, a_scale=sa, b_scale=sb.T, out_dtype=np.float32)
        else:
            result = device.scaled_gemm(a, b, out_dtype=np.float32, **options)
        assert_same_bits(result, d, name)


@pytest.mark.parametrize("kernel", [*GEMM_KERNELS, None])
@pytest.mark.parametrize("scales", [("group", "block"), ("row", "row")])
def test_row_bits_do_not_depend_on_the_batch(torch, kernel, scales):
    problem = Scaled(1500, 264, 1024, a_scale=scales[0], b_scale=scales[1], out_dtype="bf16")
    a, b, options = problem.operands()
    a_scale, device = options.pop("a_scale"), OnDevice(torch, kernel)
    whole = device.scaled_gemm(a, b, a_scale=a_scale, out_dtype=OUT_TYPES["bf16"], **options)
    for m in [*range(1, 34), 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 1024]:
        part = device.scaled_gemm(a[:m], b, a_scale=a_scale[:m], out_dtype=OUT_TYPES["bf16"], **options)
        assert_same_bits(part, whole[:m], f"{kernel}: M = {m}")


@pytest.mark.parametrize("kernel", [kernel for kernel in GEMM_KERNELS if kernel not in PLAIN_KERNELS])
@pytest.mark.parametrize("k", [384, 512, 640, 1040, 1152, 1536])
def test_scales_lie_anywhere(torch, kernel, k):
    """Rows of scales at every distance, whose fours are 16 aligned bytes or not, and columns of them."""
    for rows in (63, 64) if "skinny" in kernel else (299, 300):
        check_places(torch, kernel, rows, 200, k)


def check_places(torch, kernel, rows, columns, k):
    generator = torch.Generator(device="cuda").manual_seed(k)
    x, w = (torch.randn(n, k, device="cuda", generator=generator).bfloat16() for n in (rows, columns))
    (a, sa), (b, sb) = pydet.quantize(x, granularity="group"), pydet.quantize(w, granularity="block")

    def placed(scale, first, distance):
        room = torch.full((len(scale), distance), float("nan"), device="cuda")
        room[:, first : first + scale.shape[1]] = scale
        return room[:, first : first + scale.shape[1]]

    def turned(scale, first, distance):
        return placed(scale.t(), first, distance).t()

    whole = -(-sa.shape[1] // 4) * 4
    places = [(0, whole), (4, whole + 4), (1, whole + 4), (3, whole + 3), (0, whole + 2)]
    ways = [functools.partial(placed, first=first, distance=distance) for first, distance in places]
    ways += [
        functools.partial(turned, first=first, distance=320 + more) for first, more in [(0, 0), (4, 0), (1, 0), (4, 2)]
    ]
    want = pydet.scaled_gemm(a, b.t(), a_scale=sa, b_scale=sb.t(), kernel=kernel)
    for way, other in itertools.product(ways, ways):
        got = pydet.scaled_gemm(a, b.t(), a_scale=way(sa), b_scale=other(sb).t(), kernel=kernel)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("kernel", GEMM_KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_out_lies_anywhere(torch, kernel, dtype):
    """Rows of out of any length and distance, whole units of 16 bytes or not: the bits of a contiguous out, and nothing
    written around it."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    x, w = (torch.randn(n, 400, device="cuda", generator=generator).bfloat16() for n in (600, 400))
    kinds = ("group", "block") if kernel in LOW_KERNELS else ("row", "row")
    (a, sa), (b, sb) = (pydet.quantize(matrix, granularity=kind) for matrix, kind in zip((x, w), kinds, strict=True))
    dtype = getattr(torch, dtype)
    for m, n in itertools.product((1, 33, 64) if "skinny" in kernel else (1, 63, 130, 600), (8, 65, 120, 203, 400)):
        its_sb = sb[: -(-n // 128)] if kernel in LOW_KERNELS else sb[:n]
        given = {"a_scale": sa[:m], "b_scale": its_sb.t(), "kernel": kernel}
        want = pydet.scaled_gemm(a[:m], b[:n].t(), out_dtype=dtype, **given)
        units = -(-n // 8) * 8
        for first, distance in ((0, units), (8, units + 16), (0, units + 8), (1, units + 8), (0, n + 3)):
            room = torch.full((m + 2, distance), 7, dtype=dtype, device="cuda")
            out = room[1 : m + 1, first : first + n]
            pydet.scaled_gemm(a[:m], b[:n].t(), out=out, **given)
            assert torch.equal(out, want), (m, n, first, distance)
            out.fill_(7)
            assert (room == 7).all(), f"written around out: {m, n, first, distance}"


@pytest.mark.parametrize("kernel", GEMM_KERNELS)
def test_repeats(torch, kernel):
    """The same call many times, with the device busy: what is read too early shows now and then."""
    scales = {"a_scale": "row", "b_scale": "row"} if kernel in PLAIN_KERNELS else {}
    rows = 60 if kernel.endswith("skinny_80") else 100 if "skinny" in kernel else 700
    a, b, options = Scaled(rows, 520, 2048, **scales).operands()
    del options["k_chunk"]
    given = [to_device(torch, x) for x in (a, b, options["a_scale"], options["b_scale"])]
    call = lambda: pydet.scaled_gemm(given[0], given[1], a_scale=given[2], b_scale=given[3], kernel=kernel)
    first = call()
    results = [call() for _ in range(200)]
    assert all(torch.equal(first.view(torch.int16), result.view(torch.int16)) for result in results)


def test_refusals(torch):
    a, b = (torch.zeros(64, 256, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2))
    scale = {"a_scale": None, "b_scale": None}
    for operands, options, words in (
        ((a, b.view(256, 64)), {}, "takes a right operand along N"),
        (
            (a[:, 3:131], b.T[3:131]),
            {},
            "the tensor cores do not read a, want its data and strides in multiples of 16 bytes",
        ),
        ((a, b.T), {"k_chunk": 32}, "takes a k_chunk that is no multiple of 128"),
        ((a, b.T), {"kernel": IEEE_KERNELS[0]}, "it computes arithmetic ieee, and the call asks for sm90"),
    ):
        with pytest.raises(pydet.Error, match=words):
            pydet.scaled_gemm(*operands, **scale, **options)


@pytest.mark.parametrize("kernel", [*QUANTIZE_KERNELS, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_equals_the_cpu(torch, kernel, dtype):
    kinds = itertools.cycle(["normal", "wide", "extremes", "specials", "tiny"])
    scale_types = itertools.cycle([(FLOAT32, False), (E8M0, False), (FLOAT32, True)])
    types, taken, device = itertools.cycle([E4M3, E5M2]), 0, OnDevice(torch, kernel)
    sizes = [(1, 1), (1, 8), (1, 128), (3, 127), (15, 129), (17, 136), (127, 264), (128, 128), (129, 1000), (300, 8),
             (2, 8192), (2, 8200), (5, 20000), (1000, 512), (16, 128), (112, 2048), (3, 2056), (144, 136), (2, 16384),
             (2, 16392), (256, 1152), (48, 1920), (272, 2176)]  # fmt: skip
    for (m, k), granularity in itertools.product(sizes, ["row", "group", "block", "tensor"]):
        x = data(next(kinds), (m, k), DTYPES[dtype], seed=m + k)
        scale_dtype, power_of_two = next(scale_types)
        options = {"granularity": granularity, "dtype": next(types), "power_of_two": power_of_two}
        _, scale = pydet.quantize(x, scale_dtype=scale_dtype, **options)
        for more in ({"scale_dtype": scale_dtype}, {"scale_dtype": scale_dtype, "transposed": True}, {"scale": scale}):
            try:
                got = device.quantize(x, **options, **more)
            except pydet.Error as error:
                if error.status == UNSUPPORTED or "transposed is given" in str(error):
                    continue
                raise
            taken += 1
            for mine, theirs in zip(got, pydet.quantize(x, **options, **more), strict=True):
                assert_same_bits(mine, np.array(theirs, order="C"), f"{kernel}: {m}x{k} {dtype} {options} {list(more)}")
    if kernel and kernel.endswith("packed"):
        assert taken == 0 if dtype == "fp32" else taken >= len(sizes) / 2
        return
    x = data("normal", (3, 130, 264), DTYPES[dtype])
    if kernel != "cuda_quantize_rows":
        for mine, theirs in zip(device.quantize(x, granularity="group", transposed=True),
                                pydet.quantize(x, granularity="group", transposed=True), strict=True):  # fmt: skip
            assert_same_bits(mine, theirs, "a batch")
    assert taken >= len(sizes)


@pytest.mark.parametrize("scale_dtype", [FLOAT32, E8M0])
def test_scale_of_a_tensor_in_a_graph(torch, scale_dtype):
    """Three launches without a workspace: captured, replayed with other numbers, and beside another stream's."""
    shape = (1000, 1003)
    inputs = [data(kind, shape, DTYPES["bf16"], seed) for seed, kind in enumerate(("normal", "wide", "specials"))]
    want = [pydet.quantize(x, granularity="tensor", scale_dtype=scale_dtype) for x in inputs]
    there = [to_device(torch, x) for x in inputs]
    x, options = torch.empty_like(there[0]), {"granularity": "tensor", "scale_dtype": np.dtype(scale_dtype).name}
    out, graph = pydet.quantize(there[0], **options), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pydet.quantize(x, out=out, **options)
    other = torch.cuda.Stream()
    for given, expected in zip(there, want, strict=True):
        x.copy_(given)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            beside = [pydet.quantize(there[0], **options) for _ in range(20)]
        graph.replay()
        torch.cuda.synchronize()
        for got, of in [(out, expected), *((each, want[0]) for each in beside)]:
            for mine, theirs in zip(got, of, strict=True):
                assert_same_bits(to_host(torch, mine, theirs.dtype), np.asarray(theirs))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_quotients_are_those_of_a_division(torch, dtype):
    """Of very many numbers, and of every one there is: a reciprocal without its correction gives a few other bytes."""
    device = OnDevice(torch)
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).reshape(512, 128)
    for x in (data("normal", (4000, 2048), DTYPES[dtype], seed=5), every):
        for granularity, kind in (("group", E4M3), ("row", E5M2), ("block", E4M3)):
            options = {"granularity": granularity, "dtype": kind, "transposed": granularity != "row"}
            for mine, theirs in zip(device.quantize(x, **options), pydet.quantize(x, **options), strict=True):
                assert_same_bits(mine, np.array(theirs, order="C"), f"{granularity} of {x.shape} {dtype}")


def test_equals_torch(torch):
    """cuBLASLt with fast accumulation off and one scale, or one a row and column: the same sums (NUMERICS.md)."""
    for m, n, k in ((256, 512, 1024), (1024, 768, 2048)):
        a, b, _ = Scaled(m, n, k, kind="any").operands()
        a, b = to_device(torch, a), to_device(torch, b)
        one = torch.ones((), device="cuda")
        sa, sb = torch.rand(m, 1, device="cuda") + 0.5, torch.rand(1, n, device="cuda") + 0.5
        for scales in ((one, one), (sa, sb)):
            mine = pydet.scaled_gemm(a, b, a_scale=scales[0], b_scale=scales[1])
            theirs = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=False)
            assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), (m, n, k, scales[0].shape)


def test_equals_torch_by_groups_and_blocks(torch):
    """cuBLASLt by 1x128 and 128x128, where M is so large that it does not split K (NUMERICS.md)."""
    kinds = torch.nn.functional.ScalingType
    for m, n, k in ((1024, 768, 2048), (512, 1536, 7168)):
        x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
        (a, sa), (b, sb) = pydet.quantize(x, granularity="group"), pydet.quantize(w, granularity="block")
        mine = pydet.scaled_gemm(a, b.t(), a_scale=sa, b_scale=sb.t())
        lying = sa.t().contiguous().t(), kinds.BlockWise1x128, sb.contiguous().t(), kinds.BlockWise128x128
        try:
            theirs = torch.nn.functional.scaled_mm(a, b.t(), *lying)
        except (RuntimeError, ValueError) as problem:
            pytest.skip(f"this torch takes no such scales: {problem}")
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), (m, n, k)


def test_cupy(torch):
    """CuPy's arrays as they are where it has fp8; else one sentence, and the way by PyTorch tensors of their memory."""
    cupy = pytest.importorskip("cupy")
    host = data("normal", (70, 300), DTYPES["fp16"])
    x, want = cupy.asarray(host), pydet.quantize(host, granularity="group")
    try:
        cupy.empty(1, E4M3)
    except (TypeError, ValueError):
        with pytest.raises(pydet.Error, match="the result is float8_e4m3fn, which CuPy "):
            pydet.quantize(x, granularity="group")
        got = pydet.quantize(torch.from_dlpack(x), granularity="group")
        got = tuple(to_host(torch, tensor, of.dtype) for tensor, of in zip(got, want, strict=True))
    else:
        got = pydet.quantize(x, granularity="group")
        assert all(isinstance(array, cupy.ndarray) for array in got)
        product = pydet.scaled_gemm(got[0], got[0].T, a_scale=got[1], b_scale=got[1].T, arithmetic="ieee")
        alone = pydet.scaled_gemm(want[0], want[0].T, a_scale=want[1], b_scale=want[1].T, arithmetic="ieee")
        assert_same_bits(product.get(), alone)
        got = tuple(array.get() for array in got)
    for mine, theirs in zip(got, want, strict=True):
        assert_same_bits(mine, theirs)
    of_bytes, ones = cupy.zeros((16, 128), cupy.uint8), cupy.ones((), cupy.float32)
    with pytest.raises(pydet.Error, match="scaled_gemm: a is uint8"):
        pydet.scaled_gemm(of_bytes, of_bytes.T, a_scale=ones, b_scale=ones)
