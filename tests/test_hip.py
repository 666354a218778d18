"""libpydet_hip.so without an AMD GPU: its host code on a stand-in runtime, its shipped machine code in an interpreter.

fakehip.c is the runtime: it records what the library calls, refuses what a GPU would refuse, and fails where it is told
to. gcn.py executes the code objects of the library itself, rather than the sources compiled for something else, so that
the compiler's registers, lane masks, barriers and waits for memory are what is checked; its bits are then held to the
CPU's kernels. Neither has seen AMD hardware.

The library is PYDET_HIP_LIBRARY, or the one beside the package. With "hip" in PYDET_TEST_EXTRAS its absence is an
error.
"""

import contextlib
import ctypes
import importlib.util
import itertools
import mmap
import os
import pathlib
import random
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import capi
import cases
import fakehip
import interop
import pydet
import test_adamw as adamws
import test_embedding
import test_grouped_gemm
import test_scaled_gemm
import test_scaled_grouped_gemm
from cases import assert_same_bits
from fakehip import ARCHS
from pydet import frameworks, hooks
from reference_fp8 import E4M3, E5M2

ROOT = capi.ROOT
LIBRARY = pathlib.Path(os.environ.get("PYDET_HIP_LIBRARY", ROOT / "pydet" / "libpydet_hip.so"))
DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
ROCM, CPU = 10, 1
NO_DEVICE, DEVICE_ERROR, UNSUPPORTED, INVALID_DEVICE = 12, 13, 11, 5
ffi = capi.ffi


class Hip(fakehip.StandIn):
    """The library on the stand-in runtime."""

    def __init__(self, folder):
        super().__init__(fakehip.build(LIBRARY, folder), LIBRARY, folder)
        self.lib = ffi.dlopen(str(LIBRARY))
        self.forget = ctypes.CDLL(str(LIBRARY)).pydet_exchange_forget_devices  # its devices change with each start

    def start(self, arch, devices=1, fail_at=-1):
        super().start(arch, devices, fail_at)
        self.forget()
        self.host = None  # the address of a tensor that is no device memory

    def call(self, function, options, *arrays, device=0, kind=ROCM, stream=0, held=()):
        """The status of a C call on these arrays (None for NULL), and on those that its options hold."""
        tensors = [None if x is None else capi.Tensor(x, device=(kind, device)) for x in arrays]
        self.fake.fakehip_disown()
        self.tensors = [x.ctypes.data for x in (*arrays, *held) if x is not None]
        for x in (*arrays, *held):
            if x is not None and x.size:
                memory, owner = x, x.base
                while owner is not None:  # as_strided puts objects that are no arrays in between
                    memory = owner if isinstance(owner, np.ndarray) else memory
                    owner = getattr(owner, "base", None)
                flat = memory.ravel("K").view(np.uint8)
                assert np.shares_memory(flat, memory)
                if x.ctypes.data != self.host:
                    self.own(flat)
        if kind == ROCM and getattr(options, "workspace_size", 0):
            view = np.frombuffer(ffi.buffer(options.workspace, options.workspace_size), np.uint8)
            self.own(view)
        status = getattr(self.lib, function)(ffi.cast("void *", stream), *(capi.pointer(t) for t in tensors), options)
        if self.problem:
            raise self.problem
        return status

    def check(self, *arguments, **options):
        status = self.call(*arguments, **options)
        assert status == 0, self.sentence()

    def sentence(self):
        return ffi.string(self.lib.pydet_last_error()).decode()


_library = []


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    wanted = "hip" in os.environ.get("PYDET_TEST_EXTRAS", "")
    missing = fakehip.missing(LIBRARY)
    if missing and not wanted:
        pytest.skip("; ".join(missing))
    assert not missing, missing
    if not _library:  # a process loads it once, for all files of tests
        _library.append(Hip(tmp_path_factory.mktemp("hip")))
    return _library[0]


@pytest.fixture(params=ARCHS)
def hip(library, request):
    library.start(request.param)
    return library


# What is one source without matrix cores: the newer architecture stands for both, whose code is inspected
# (.ci/check_hip.py). PYDET_TEST_ALL_ARCHS: each runs.
one_source = pytest.mark.parametrize(
    "hip", ARCHS if os.environ.get("PYDET_TEST_ALL_ARCHS") else ["gfx942"], indirect=True
)


def normal(*shape, dtype="fp32", seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, np.float32).astype(DTYPES[dtype])


ARITHMETIC = {"ieee": 1, "cdna3": 4, "cdna2": 5}


def workspace_for(hip, m, n, k, **fields):
    """What pydet_gemm_workspace says of these extents."""
    size = ffi.new("uint64_t *", 7)
    assert hip.lib.pydet_gemm_workspace(1, m, n, k, capi.options("pydet_gemm_options", **fields), size) == 0
    skinny = ffi.new("uint64_t *", 7)
    given = capi.options("pydet_skinny_gemm_options", **fields)
    assert hip.lib.pydet_skinny_gemm_workspace(m, n, k, given, skinny) == 0 and skinny[0] == size[0]
    return size[0]


def gemm(hip, a, b, *, bias=None, out_dtype="fp32", out=None, kernel=None, function="pydet_gemm", where=ROCM, **fields):
    """`workspace`: so many bytes of a workspace, which holds 0xA5."""
    if out is None:
        m, n = (a.shape[-2], b.shape[-1]) if function == "pydet_gemm" else (a.shape[-2], b.shape[0])
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if function == "pydet_gemm" else ()
        out = np.full((*batch, m, n), 7, DTYPES[out_dtype])
    else:
        out = out.copy()
    struct = "pydet_gemm_options" if function == "pydet_gemm" else "pydet_skinny_gemm_options"
    extra = {"kernel": kernel} if kernel and where == ROCM else {}
    if (size := fields.pop("workspace", 0)) and where == ROCM:
        memory = np.full(size + 16, 0xA5, np.uint8)
        extra["workspace"] = ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 16)
        extra["workspace_size"] = size
    hip.check(function, capi.options(struct, **extra, **fields), a, b, bias, out, kind=where)
    return out


def last_kernel(hip):
    return ffi.string(hip.lib.pydet_last_kernel()).decode()


@contextlib.contextmanager
def unless_refused():
    """A kernel forced by name may not take a problem; each test says which kernels must have taken some."""
    try:
        yield
    except AssertionError as problem:
        if "does not take this problem" not in str(problem):
            raise


def both(hip, *arguments, **options):
    """The device's result, held to the CPU's."""
    got = gemm(hip, *arguments, **options)
    took = last_kernel(hip)
    assert_same_bits(got, gemm(hip, *arguments, where=CPU, **options), f"{took} on {hip.arch}")
    return took


def table(hip, operation):
    names = []
    for i in itertools.count():
        if (name := hip.lib.pydet_kernel_name(i)) == ffi.NULL:
            return names
        info = ffi.new("pydet_kernel_info *", {"struct_size": ffi.sizeof("pydet_kernel_info")})
        assert hip.lib.pydet_query_kernel(i, info) == 0
        if info.device_type == ROCM and ffi.string(info.operation).decode() == operation:
            dtypes, arithmetic = ffi.string(info.dtypes).decode(), info.arithmetic
            names.append((ffi.string(name).decode(), dtypes.split(), arithmetic, bool(info.available)))


def gemm_kernels(hip):
    return [
        (name, dtype, arithmetic)
        for name, dtypes, arithmetic, available in table(hip, "gemm")
        for dtype in dtypes
        if available
    ]


def instances(hip, *families):
    """Every instance of these kernels that the library holds."""
    found = {name for name in hip.kernels[hip.arch] if any(f"{len(of)}{of}" in name for of in families)}
    assert len(found) >= len(families)
    return found


def in_reverse(n):
    """Waves in the order that no hardware would choose."""
    return range(n)[::-1]


def transposed(x):
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


# ---- Execution -------------------------------------------------------------------------------------------------------


def test_gemm_equals_cpu(hip):
    """Every kernel by name, every type; layouts, ragged extents, bias, accumulate, k_chunk, types of output, batch."""
    taken = set()
    for name, dtype, arithmetic in gemm_kernels(hip):
        extents = (5, 70, 19) if dtype == "fp32" else (17, 33, 40)
        options = {"kernel": name, "arithmetic": arithmetic}
        large = name == "hip_gemm_ieee_128x128"  # which takes longest here: all problems in fp32 alone
        for m, n, k in (extents,) if large else (extents, (1, 16, 35), (70, 3, 16)):
            a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype, seed=1)
            variants = [(a, b, {})]
            if (m, n, k) == extents:
                variants += [(transposed(a), b, {"bias": normal(n), "out_dtype": "bf16"})]
                variants += [(a, transposed(b), {"out": normal(m, n, seed=3), "accumulate": 1})]
                chunks = {} if "128x128" in name else {"k_chunk": 16}  # which has no registers for their sums
                variants += [(transposed(a), transposed(b), {"bias": normal(m, n, dtype=dtype), **chunks})]
                variants += [(np.stack([a, a[::-1]]), b, {"out_dtype": "fp16"})]
            if large and dtype != "fp32":
                variants = variants[:1]
            for left, right, more in variants:
                with unless_refused():
                    both(hip, left, right, **options, **more)
                    taken.add(name)
    every = instances(hip, "gemm_ieee_kernel", "gemm_mfma_kernel")
    assert hip.ran >= {name for name in every if "GroupedGemm" not in name} - whole_stages(hip)
    # A skinny kernel takes what fits it, from either entry point.
    assert taken >= {name for name, _, _ in gemm_kernels(hip) if "skinny" not in name}


def whole_stages(hip):
    """The instances of the mfma tiles for a K of whole stages of aligned rows."""
    return {name for name in instances(hip, "gemm_mfma_kernel") if "ELb1EEEv" in name}


def test_whole_stages(hip):
    """The mfma tiles where K is whole stages of aligned rows: one, too few, to seven, and a rest; in every layout;
    whole tiles and ends of rows inside one; several tiles a workgroup; continued, with bias."""
    tiles = [kernel for kernel in kinds_of(hip) if kernel[0].endswith(("mfma_64x64", "mfma_128x128"))]
    assert len(tiles) == 4
    hip.order, hip.grid = in_reverse, lambda grid: [(grid[0] + 1) // 2, 1, 1]
    layouts = list(itertools.product((np.asarray, transposed), repeat=2))
    for name, dtype, arithmetic in tiles:
        tile = 128 if "128" in name else 64
        stage, options = 4096 // tile, {"kernel": name, "arithmetic": ARITHMETIC[arithmetic]}
        ks = [count * stage for count in (2, 3, 4, 5)]
        if dtype == "bf16" and tile == 64:
            ks += [6 * stage, 7 * stage, stage, 4 * stage + 8]
        for i, k in enumerate(ks):
            left, right = layouts[(i + i // 4) % 4]
            m, n = ((13, 20), (tile + 1, 9), (12, tile + 4), (tile, 7), (12, 20))[min(i, 4)]
            a, b = left(normal(m, k, dtype=dtype)), right(normal(k, n, dtype=dtype, seed=1))
            more = {"bias": normal(n, dtype=dtype)} if i % 2 else {"out": normal(m, n, seed=3), "accumulate": 1}
            both(hip, a, b, **options, **more)
    every = whole_stages(hip)
    assert len(every) == 16 and hip.ran >= every


def placed(rows, columns, dtype, turned, padding=0, offset=0, seed=0):
    """A matrix with so many elements between its rows (its columns, if turned), so many after an aligned address."""
    long, short = (rows, columns) if turned else (columns, rows)
    flat = normal(short * (long + padding) + offset, dtype=dtype, seed=seed)
    memory = np.zeros(flat.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    memory[start : start + flat.nbytes] = flat.view(np.uint8)
    elements = memory[start : start + flat.nbytes].view(flat.dtype)[offset:]
    rows_of = np.lib.stride_tricks.as_strided(
        elements, (short, long), ((long + padding) * flat.itemsize, flat.itemsize), writeable=False
    )
    return rows_of.T if turned else rows_of


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])  # fp16's bytes go the way of bf16's
def test_pieces_of_16_bytes(hip, dtype):
    """The ieee tiles, which read 16 bytes where they are aligned and inside, else elements: K about one stage and
    several, with and without a rest; ends of m and n inside 16 bytes and between; rows and addresses that are aligned,
    and not; in every layout; one chain, chunks, continued."""
    piece = 4 if dtype == "fp32" else 8
    for tile, stage in ((64, 16), (128, 8)):
        ks = [1, stage - 1, stage, stage + 1, 2 * stage, 3 * stage + piece, 2 * stage - piece]
        ends = [piece, piece - 1, piece + 1, 3 * piece, 1, tile + piece, 2]
        places = [(0, 0), (piece, piece), (1, 0), (0, 1), (piece, 0), (0, piece), (3, 2)]
        for i, (k, end, place) in enumerate(zip(ks, ends, places, strict=True)):
            m, n = (end, ends[i - 2]) if tile == 64 or end < tile else (end, 3)
            a = placed(m, k, dtype, i & 1, *place)
            b = placed(k, n, dtype, i & 2, *places[i - 1], seed=1)
            more = {"k_chunk": 16} if i % 3 == 0 and tile == 64 else {}
            if i % 2:
                more |= {"out": np.full((m, n), -0.0, np.float32), "accumulate": 1}
            both(hip, a, b, kernel=f"hip_gemm_ieee_{tile}x{tile}", arithmetic=ARITHMETIC["ieee"], **more)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(hip, dtype):
    """NaN, infinities, zeros of both signs and subnormals, through the kernels that the library chooses."""
    specials = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -3e-42, 1.0, -2.5, 6e-8], np.float32)
    rng = np.random.default_rng(5)
    a, b = (rng.choice(specials, shape).astype(DTYPES[dtype]) for shape in ((6, 8), (8, 9)))
    both(hip, a, b, arithmetic=ARITHMETIC["ieee"])
    if dtype != "fp32" and any(arithmetic != 1 for _, _, arithmetic in gemm_kernels(hip)):
        both(hip, a, b, arithmetic=ARITHMETIC[ARCHS[hip.arch]])


def test_skinny_gemm_equals_cpu(hip):
    for m, dtype in itertools.product((1, 5, 9), DTYPES):
        x, w = normal(m, 72, dtype=dtype), normal(20, 72, dtype=dtype, seed=1)
        kinds = ["ieee"] + ([ARCHS[hip.arch]] if dtype != "fp32" and len({k[2] for k in gemm_kernels(hip)}) > 1 else [])
        for arithmetic in kinds:
            options = {"function": "pydet_skinny_gemm", "arithmetic": ARITHMETIC[arithmetic]}
            both(hip, x, w, **options)
            both(hip, x, w, bias=normal(20), out_dtype="fp16", **options)
    # Rows of many stages, and so short a chunk that one stage holds several.
    x, w = normal(3, 600), normal(20, 600, seed=1)
    both(hip, x, w, function="pydet_skinny_gemm", arithmetic=1, kernel="hip_skinny_gemm_ieee", k_chunk=16)
    assert hip.ran >= instances(hip, "skinny_ieee_kernel")


def test_skinny_gemm_on_matrix_cores(hip):
    """Every number of tiles of x, rows apart, ends of N; for each, chunks side by side, more than there are waves."""
    for dtype in ("bf16", "fp16"):
        skinny_gemm_on_matrix_cores(hip, dtype)
        chunks_apart(hip, dtype)
    assert hip.ran >= instances(hip, "skinny_mfma_kernel", "skinny_mfma_chain_kernel", "join_chunks_kernel")


@pytest.mark.parametrize("m", (1, 17, 33, 65))
def test_one_chain_across_its_rounds(hip, m):
    """The kernel without chunks, every tile: K a step, a stage of 128, those on the way, one behind them, twice and
    three times those; a piece of 8 less, as much, a piece more; and several rounds with a rest. One block that makes
    all rows of w in turn."""
    kind, stage, several = ARCHS[hip.arch], 128, {"gfx90a": 4, "gfx942": 6}[hip.arch] * 128
    options = {"arithmetic": ARITHMETIC[kind], "kernel": f"hip_skinny_gemm_{kind}_mfma"}
    bounds = (16, stage, 2 * stage, several, several + stage, 2 * several + stage, 3 * several + stage)
    for i, k in enumerate(sorted({bound + more for bound in bounds for more in (-8, 0, 8)} | {4 * several + 344})):
        # The fewest rows of these tiles and the most; ends of a quad of y, of a wave.
        rows, n, dtype = (m, max(m + 15, 16) // 16 * 16)[i % 2], (17, 5, 16, 33)[i % 4], ("bf16", "fp16")[i % 5 == 4]
        hip.order, hip.grid = (in_reverse, lambda grid: [1, 1, 1]) if i % 3 == 2 else (None, list)
        x, w = normal(rows, k + 8, dtype=dtype)[:, :k], normal(n, k, dtype=dtype, seed=1)
        more = {"bias": normal(n, seed=2), "out": normal(rows, n, seed=3), "accumulate": 1}
        both(hip, x, w, function="pydet_skinny_gemm", **more, **options)
    hip.order, hip.grid = None, list


def test_what_lies_past_the_end_of_a_chain(hip):
    """NaN behind the rows' ends and in the rows below, Inf and zeros in the last k, which loads past K read again."""
    kind = ARCHS[hip.arch]
    options = {"arithmetic": ARITHMETIC[kind], "kernel": f"hip_skinny_gemm_{kind}_mfma"}
    for m, k in itertools.product((1, 17, 33, 65), (8, 136, 904)):
        x, w = normal(m + 1, k + 8, dtype="bf16"), normal(20, k + 8, dtype="bf16", seed=1)
        x[:, k:], w[:, k:], x[m], w[19] = np.nan, np.nan, np.nan, np.nan
        x[0, k - 8 : k - 4], w[:, k - 4 : k] = np.inf, 0
        both(hip, x[:m, :k], w[:19, :k], function="pydet_skinny_gemm", **options)


def skinny_gemm_on_matrix_cores(hip, dtype):
    kernel = f"hip_skinny_gemm_{ARCHS[hip.arch]}_mfma"
    options = {"function": "pydet_skinny_gemm", "arithmetic": ARITHMETIC[ARCHS[hip.arch]], "kernel": kernel}
    # Blocks of 4, 8 and 16 rows of w.
    short = ((1, 13, 8), (5, 31, 448), (12, 40, 912), (17, 5, 640)) if dtype == "bf16" else ()
    for m, n, k in ((3, 20, 1352), (20, 17, 968), (40, 16, 584), (70, 18, 296), *short, (2, 600, 32), (70, 256, 24)):
        x, w = normal(m, k + 8, dtype=dtype)[:, :k], normal(n, k, dtype=dtype, seed=1)
        both(hip, x, w, bias=normal(m, n, seed=2), out=normal(m, n, seed=3), accumulate=1, **options)
    for m, n, k in ((3, 20, 424), (20, 17, 264), (40, 16, 264), (70, 18, 264)):
        x, w = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1)
        both(hip, x, w, bias=normal(n, seed=2), out=normal(m, n, seed=3), accumulate=1, k_chunk=48, **options)
    for k, chunk in ((96, 48), (40, 1 << 62)):
        x, w = normal(3, k, dtype=dtype), normal(20, k, dtype=dtype, seed=1)
        both(hip, x, w, k_chunk=chunk, out_dtype="bf16", **options)


def chunks_apart(hip, dtype):
    """A block a chunk: every number of tiles, chunks of less than a round of loads, of one and of more; as many as the
    second kernel adds at once and one more, twice that and one more; ends of N beside a quad, a wave, a block of it."""
    kind = ARCHS[hip.arch]
    options = {"kernel": f"hip_skinny_gemm_{kind}_mfma_chunks", "arithmetic": ARITHMETIC[kind]}
    problems = [(3, 19, 17 * 16, 16), (17, 17, 15 * 16 + 8, 16), (33, 16, 9 * 144, 144), (65, 18, 4 * 112 + 8, 112)]
    if dtype == "bf16":
        problems += [
            (1, 260, 32 * 16, 16),
            (5, 3, 33 * 16 - 8, 16),
            (16, 12, 16 * 272 + 8, 272),
            (18, 40, 8 * 272 + 8, 272),
        ]
    for m, n, k, chunk in problems:
        x, w = normal(m, k, dtype=dtype), transposed(normal(k, n, dtype=dtype, seed=1))
        size = workspace_for(hip, m, n, k, k_chunk=chunk)
        assert size == -(-k // chunk) * m * (-(-n // 16) * 16) * 4
        more = {"k_chunk": chunk, "workspace": size, **options}
        both(hip, x, w, bias=normal(m, n, seed=2), out=normal(m, n, seed=3), accumulate=1, **more)
        both(hip, x, w, bias=normal(n, seed=2) if n % 2 else None, out_dtype=("bf16", "fp16", "fp32")[m % 3], **more)


def test_workspace_of_gemm(hip):
    """Bytes where chunks are many and N is small, whatever the device; with one less another kernel has the bits."""
    kind = ARCHS[hip.arch]
    for m, least in ((1, 17), (16, 17), (17, 9), (64, 9), (65, 5), (128, 5)):
        for chunk in (16, 512):
            assert workspace_for(hip, m, 40, (least - 1) * chunk, k_chunk=chunk) == 0
            assert workspace_for(hip, m, 40, (least - 1) * chunk + 8, k_chunk=chunk) == least * m * 48 * 4
    most, k = 64 << 20, 40 * 16
    given = {"k_chunk": 16, "arithmetic": 0}
    assert workspace_for(hip, 16, 2560, k, **given) == 40 * 16 * 2560 * 4
    nothing = [(16, 2561, k, given), (129, 64, k, given), (16, 64, k + 4, given), (16, 64, k, {"k_chunk": 0})]
    nothing += [(16, 64, k, {"k_chunk": 16, "arithmetic": which}) for which in (1, 2, 3)]
    nothing += [(128, 2560, most // 16 // 2560, given), (1, 16, 1 << 40, {"k_chunk": 1 << 20}), (0, 64, k, given)]
    nothing += [(16, 0, k, given), (16, 64, 0, given), (16, 64, 1 << 40, {"k_chunk": (1 << 62)})]
    assert [workspace_for(hip, m, n, depth, **options) for m, n, depth, options in nothing] == [0] * len(nothing)
    assert workspace_for(hip, 128, 2560, 51 * 16, **given) == 51 * 128 * 2560 * 4 <= most
    assert workspace_for(hip, 128, 2560, 52 * 16, **given) == 0 and most < 52 * 128 * 2560 * 4
    batch = ffi.new("uint64_t *", 7)
    options = capi.options("pydet_gemm_options", k_chunk=16)
    assert hip.lib.pydet_gemm_workspace(2, 16, 64, k, options, batch) == 0 and batch[0] == 0

    x, w = normal(3, 272, dtype="bf16"), transposed(normal(272, 20, dtype="bf16"))
    size = workspace_for(hip, 3, 20, 272, k_chunk=16)
    few = {"k_chunk": 16, "arithmetic": ARITHMETIC[kind], "workspace": size - 1}
    with pytest.raises(AssertionError, match=f"hip_skinny_gemm_{kind}_mfma_chunks does not take this problem"):
        gemm(hip, x, w, kernel=f"hip_skinny_gemm_{kind}_mfma_chunks", **few)
    assert both(hip, x, w, **few) == f"hip_skinny_gemm_{kind}_mfma"


def test_when_chunks_are_apart(large):
    """By itself the library puts chunks apart where a workspace is given and N leaves most units of an MI300X idle."""
    large.executes, kind = False, ARCHS[large.arch]
    for m, n, chunks in ((16, 1216, True), (16, 1232, False), (17, 2432, True), (17, 2448, False)):
        x, w = normal(m, 544, dtype="bf16"), transposed(normal(544, n, dtype="bf16"))
        for size in (workspace_for(large, m, n, 544, k_chunk=32), 0):
            gemm(large, x, w, arithmetic=ARITHMETIC[kind], k_chunk=32, workspace=size)
            apart = "_chunks" if chunks and size else ""
            assert last_kernel(large) == f"hip_skinny_gemm_{kind}_mfma{apart}"


def test_the_estimate_takes_short_chunks(library):
    """Of a K without a second turn of the loop, what the wave does; of two launches, both."""
    found = {}
    for given in ((), ("--workspace",)):
        command = [sys.executable, ROOT / "tools/amd/estimate.py", LIBRARY, "--k-chunk", "16", *given, "1x16x272"]
        found[given] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    beside, apart = found.values()
    assert "1x16x272 by hip_skinny_gemm_cdna3_mfma\n" in beside and "  a stage of 2: " in beside  # of eight chunks
    assert "1x16x272 by hip_skinny_gemm_cdna3_mfma_chunks\n" in apart
    assert "  all that the wave does, whose loop has no second turn: 1 MFMA" in apart
    times = [float(re.search(r"estimated ([\d.]+) us", text)[1]) for text in (beside, apart)]
    assert times[0] > 2 and times[1] > 4  # of each launch 2


@pytest.fixture
def large(hip):
    """The same GPU with as many units as an MI300X."""
    hip.fake.fakehip_units(304)
    hip.forget()
    yield hip
    hip.fake.fakehip_units(4)
    hip.forget()


def test_where_few_rows_end(large):
    """Up to 64 rows the kernel for few; above, tiles, on gfx942 where they fill the device."""
    large.executes = False
    kind = ARCHS[large.arch]
    for m, n, k, chunk in itertools.product((64, 65), (9664, 9728), (128, 136), (0, 64)):  # of 64 columns 151 and 152
        x, w = normal(m, k, dtype="bf16"), normal(n, k, dtype="bf16")
        gemm(large, x, w, function="pydet_skinny_gemm", arithmetic=ARITHMETIC[kind], k_chunk=chunk)
        few = m == 64 or (large.arch == "gfx942" and n == 9664)
        assert last_kernel(large) == (f"hip_skinny_gemm_{kind}_mfma" if few else f"hip_gemm_{kind}_mfma_64x64")


# By a kernel's name, numbers of rows for its tiles and the k of their stages, for the chunks that cross a stage's ends.
STAGES = {
    "skinny_gemm_ieee": {(1,): 128, (7,): 128},
    "skinny_gemm_cdna": {(1,): 256, (17,): 256, (33,): 128, (65,): 96},
    "64x64": {(3, 65): 64},
}


def gemm_by(hip, kernel, taken):
    """An implementation of gemm that is this kernel where it takes the problem, else none."""

    def run(
        a, b, *, bias=None, out=None, out_dtype=None, accumulate=False, initial=None, arithmetic="ieee", k_chunk=None
    ):
        fields = {"arithmetic": ARITHMETIC[arithmetic], "k_chunk": k_chunk or 0, "accumulate": int(accumulate)}
        forced = {"kernel": kernel} if kernel else {}
        size, tensor = 0, None
        if initial is not None:
            size, tensor = -(-4 * initial.size // 16) * 16, capi.Tensor(initial, device=(ROCM, 0))
            fields["initial"] = tensor.c
        if k_chunk and (kernel or "").endswith("_chunks") and a.ndim == b.ndim == 2:
            size += workspace_for(hip, a.shape[0], b.shape[1], a.shape[1], k_chunk=k_chunk)
        if size:
            workspace = np.full(size + 16, 0xA5, np.uint8)
            forced["workspace"] = ffi.cast("void *", workspace.ctypes.data + -workspace.ctypes.data % 16)
            forced["workspace_size"] = size
        made = np.full((*a.shape[:-1], b.shape[-1]), 7, out_dtype) if out is None else out
        held = () if initial is None else (initial,)
        hip.check("pydet_gemm", capi.options("pydet_gemm_options", **forced, **fields), a, b, bias, made, held=held)
        taken.append(kernel)
        return made

    return run


def kinds_of(hip):
    """(kernel, type, arithmetic's name) of each kernel that multiplies here."""
    names = {number: name for name, number in ARITHMETIC.items()}
    return [(kernel, dtype, names[arithmetic]) for kernel, dtype, arithmetic in gemm_kernels(hip)]


def test_chunks_across_stages(hip):
    """Every kernel that takes k_chunk: chunks of all lengths beside its stages', for one row and for its every tile."""
    for kernel, dtype, arithmetic in kinds_of(hip):
        if "128x128" in kernel or dtype != ("bf16" if "mfma" in kernel else "fp32"):  # types share the code of chunks
            continue
        if kernel.endswith("_chunks"):  # which chunks_apart crosses its ends of
            continue
        tiles = next(tiles for part, tiles in STAGES.items() if part in kernel)
        for rows, stage in tiles.items():
            problems = [(k // 8 * 8, chunk) for k, chunk in cases.chunk_cases((stage,)) if stage != chunk < 2 * stage]
            taken = []
            cases.check_chunks(gemm_by(hip, kernel, taken), arithmetic, dtype, problems, rows, 16)
            assert len(problems) >= 3 and len(taken) == len(problems) * len(rows)


def test_random_problems(hip):
    """Problems of any shape, layout, type and k_chunk, a few a kernel here. FUZZ_SEED and FUZZ_CASES ask for others and
    more; a failure names its seed and case."""
    seed, count = int(os.environ.get("FUZZ_SEED", "1")), int(os.environ.get("FUZZ_CASES", "4"))
    names = sorted({kernel for kernel, _, _ in kinds_of(hip)})
    for name, number in [(x, i) for x in names for i in range(count * (3 if "skinny" in x else 1))]:
        rng = random.Random(f"{seed}/{number}")
        kernel, dtype, arithmetic = rng.choice([kind for kind in kinds_of(hip) if kind[0] == name])
        most = 130, 260, 1300, 1 << (14 if "128x128" in kernel else 16)
        problem = cases.random_problem(rng, dtype, arithmetic, *most, few_rows="skinny" in kernel)
        hip.order, taken = rng.choice([None, in_reverse]), []
        on_cpu = cases.run(pydet.gemm, problem)
        with unless_refused():
            got = cases.run(gemm_by(hip, kernel, taken), problem)
        if not taken:
            got = cases.run(gemm_by(hip, None, taken), problem)
        assert_same_bits(got, on_cpu, f"FUZZ_SEED={seed}, case {number}: {kernel} on {hip.arch}, {problem}")


def rmsnorm(hip, x, weight, residual, where, kernel=None, **fields):
    y, rstd = np.full(x.shape, 7, x.dtype), np.full(x.shape[:-1], 7, np.float32)
    total = None if residual is None else np.full(x.shape, 7, x.dtype)
    extra = {"kernel": kernel} if kernel and where == ROCM else {}
    options = capi.options("pydet_rmsnorm_options", eps=1e-5, **extra, **fields)
    hip.check("pydet_rmsnorm", options, x, residual, weight, y, rstd, total, kind=where)
    return [y, rstd] + ([] if residual is None else [total])


def rmsnorm_backward(hip, dy, x, weight, rstd, dresidual, where, kernel=None, joined=True, **fields):
    blocks = [-(-len(x) // 256)] if "block_sums" in fields else []
    dx, dweight = np.full(x.shape, 7, x.dtype), np.full([*blocks, x.shape[1]], 7, np.float32) if joined else None
    size = ffi.new("uint64_t *")
    assert hip.lib.pydet_rmsnorm_backward_workspace(x.shape[0], x.shape[1], size) == 0
    memory = np.full(size[0] + 16, 0xA5, np.uint8)
    start = ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 16)
    extra = {"kernel": kernel} if kernel and where == ROCM else {}
    options = capi.options("pydet_rmsnorm_backward_options", workspace=start, workspace_size=size[0], **extra, **fields)
    hip.check("pydet_rmsnorm_backward", options, dy, x, weight, rstd, dresidual, dx, dweight, kind=where)
    return [dx, dweight] if joined else [dx]


@one_source
@pytest.mark.parametrize("dtype", DTYPES)
def test_rmsnorm_equals_cpu(hip, dtype):
    taken = set()
    for name, _, _, available in table(hip, "rmsnorm"):
        assert available
        for rows, n in ((3, 40), (2, 512), (2, 300), (1, 1)):
            x, residual, weight = normal(rows, n, dtype=dtype), normal(rows, n, dtype=dtype, seed=1), normal(n)
            for arguments in ((x, weight, None), (x, None, residual)):
                got = []
                with unless_refused():
                    got = rmsnorm(hip, *arguments, ROCM, name, weight_offset=1.0)
                    taken.add(last_kernel(hip))
                for ours, theirs in zip(got, rmsnorm(hip, *arguments, CPU, weight_offset=1.0), strict=bool(got)):
                    assert_same_bits(ours, theirs, f"{name} {rows}x{n} on {hip.arch}")
    assert taken == {name for name, *_ in table(hip, "rmsnorm")}


WIDTHS = (64, 128, 256, 512, 1000, 2048, 4096, 8192, 16384)  # the longest row of each team that holds one


@one_source
@pytest.mark.parametrize("dtype", DTYPES)
def test_rmsnorm_quantize_equals_cpu(hip, dtype):
    """Every team and a row that none holds, by rows, groups and a scale that is given; each instance runs."""
    hip.order = in_reverse
    widths = [("held", n) for n in WIDTHS] + [("general", n) for n in (1, 130, 2056)]
    wanted = itertools.cycle([[0], [1], [3]] if dtype == "fp32" else [[0, 3], [1, 3]])  # of halves 3 has its instances
    calls = [(name, n, granularity) for name, n in widths for granularity in next(wanted)]
    for i, (name, n, granularity) in enumerate(calls):
        x, weight = normal(3, n, dtype=dtype), normal(n)
        residual, found = normal(3, n, dtype=dtype, seed=1) if i % 2 else None, {}
        for where in (ROCM, CPU):
            kernel = {"kernel": f"hip_rmsnorm_quantize_{name}"} if where == ROCM else {}
            q = np.zeros((3, n), E5M2 if i % 4 == 1 else E4M3)
            scale = np.full(((3, 1), (3, -(-n // 128)), None, ())[granularity], 0.02, np.float32)
            y, total = np.zeros_like(x), np.zeros_like(x) if i % 2 else None
            given = {"eps": 1e-5, "granularity": granularity, "power_of_two": int(granularity != 3 and i % 3 == 0)}
            options = capi.options("pydet_rmsnorm_quantize_options", **given, **kernel)
            operands = (x, residual, weight, q, scale, y if i % 3 else None, None, total)
            hip.check("pydet_rmsnorm_quantize", options, *operands, kind=where)
            found[where] = q, scale, y, *([total] if i % 2 else [])
        for ours, theirs in zip(found[ROCM], found[CPU], strict=True):
            assert_same_bits(ours, theirs, f"{name}, {n} columns, granularity {granularity} on {hip.arch}")
    of_type = f"4TypeE{list(DTYPES).index(dtype)}"
    every = {name for name in instances(hip, "norm_kernel") if "NormToFp8" in name and of_type in name}
    assert every and hip.ran >= every


@one_source
@pytest.mark.parametrize("dtype", DTYPES)
def test_rmsnorm_backward_equals_cpu(hip, dtype):
    taken = set()
    for name, _, _, available in table(hip, "rmsnorm_backward"):
        assert available
        for rows, n in ((19, 40), (3, 256)):
            dy, x, weight = normal(rows, n, dtype=dtype, seed=1), normal(rows, n, dtype=dtype), normal(n)
            rstd = rmsnorm(hip, x, weight, None, CPU)[1]
            for dresidual in (None, normal(rows, n, dtype=dtype, seed=2)):
                got = []
                with unless_refused():
                    got = rmsnorm_backward(hip, dy, x, weight, rstd, dresidual, ROCM, name)
                    taken.add(last_kernel(hip))
                want = rmsnorm_backward(hip, dy, x, weight, rstd, dresidual, CPU)
                for ours, theirs in zip(got, want, strict=bool(got)):
                    assert_same_bits(ours, theirs, f"{name} {rows}x{n} on {hip.arch}")
    assert taken == {name for name, *_ in table(hip, "rmsnorm_backward")}


@one_source
def test_sums_of_blocks_equal_cpu(hip):
    dy, x, weight = normal(520, 8, dtype="bf16", seed=1), normal(520, 8, dtype="bf16"), normal(8)
    rstd = rmsnorm(hip, x, weight, None, CPU)[1]
    want = rmsnorm_backward(hip, dy, x, weight, rstd, None, CPU, block_sums=1)
    for name, *_ in table(hip, "rmsnorm_backward"):
        got = rmsnorm_backward(hip, dy, x, weight, rstd, None, ROCM, name, block_sums=1)
        for ours, theirs in zip(got, want, strict=True):
            assert_same_bits(ours, theirs, f"{name}, sums of blocks on {hip.arch}")


@one_source
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_rmsnorm_of_heads_equals_cpu(hip, dtype):
    """Weights and biases of heads, a residual in fp32, rows that lie apart; dbias, and dy beside a sum in fp32."""
    for tokens, heads, n in ((2, 3, 40), (18, 2, 33), (1, 2, 520)):
        apart = np.zeros((heads, tokens + 1, n + 8), DTYPES[dtype])[:, :tokens, :n].transpose(1, 0, 2)
        apart[...] = normal(tokens, heads, n, dtype=dtype)
        residual, dy = normal(tokens, heads, n, seed=1), normal(tokens, heads, n, dtype=dtype, seed=2)
        weight, bias = normal(heads, n, dtype=dtype, seed=3), normal(heads, n, seed=4)
        found = {}
        for where in (ROCM, CPU):
            y, rstd = np.full(apart.shape, 7, apart.dtype), np.full(apart.shape[:-1], 7, np.float32)
            total, added = np.full(apart.shape, 7, np.float32), capi.Tensor(bias, device=(where, 0))
            options = capi.options("pydet_rmsnorm_options", eps=1e-5, bias=added.c)
            hip.check("pydet_rmsnorm", options, apart, residual, weight, y, rstd, total, kind=where, held=(bias,))
            dx, dweight, dbias = (np.full(x.shape, 7, np.float32) for x in (total, weight, weight))
            memory, summed = np.zeros(1 << 16, np.uint8), capi.Tensor(dbias, device=(where, 0))
            start = ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 16)
            options = capi.options(
                "pydet_rmsnorm_backward_options", workspace=start, workspace_size=(1 << 16) - 16, dbias=summed.c
            )
            operands = (dy, total, weight, rstd, None, dx, dweight)
            hip.check("pydet_rmsnorm_backward", options, *operands, kind=where, held=(dbias,))
            found[where] = y, rstd, total, dx, dweight, dbias
        for number, (ours, theirs) in enumerate(zip(found[ROCM], found[CPU], strict=True)):
            assert_same_bits(ours, theirs, f"{tokens}x{heads}x{n}, result {number} on {hip.arch}")


@one_source
def test_rmsnorm_of_every_width_equals_cpu(hip):
    hip.order = in_reverse
    for dtype, n, residual in itertools.product(DTYPES, WIDTHS, (False, True)):
        x, weight = normal(3, n, dtype=dtype), normal(n)
        arguments = x, weight, normal(3, n, dtype=dtype, seed=1) if residual else None
        got = rmsnorm(hip, *arguments, ROCM, "hip_rmsnorm_held")
        for ours, theirs in zip(got, rmsnorm(hip, *arguments, CPU), strict=True):
            assert_same_bits(ours, theirs, f"{dtype}, {n} columns on {hip.arch}")
    assert hip.ran >= {name for name in instances(hip, "norm_kernel") if "7RmsNorm" in name}


@one_source
def test_rmsnorm_backward_of_every_width_equals_cpu(hip):
    """The sums of dweight take longest here: each team has them once, in one of its types."""
    hip.order = in_reverse
    for dtype, n, residual in itertools.product(DTYPES, WIDTHS, (False, True)):
        dy, x, weight = normal(3, n, dtype=dtype, seed=1), normal(3, n, dtype=dtype), normal(n)
        rstd = rmsnorm(hip, x, weight, None, CPU)[1]
        arguments = dy, x, weight, rstd, normal(3, n, dtype=dtype, seed=2) if residual else None
        for kernel in ("chain", "group")[: 2 if n <= 4096 else 1]:  # the sums of a wider group do not fit
            its_turn = kernel == ("chain" if n in (512, 4096, 8192) else "group")
            joined = n == 256 or (its_turn and dtype == "bf16" and not residual)
            got = []
            with unless_refused():
                got = rmsnorm_backward(hip, *arguments, ROCM, f"hip_rmsnorm_backward_{kernel}", joined=joined)
            want = rmsnorm_backward(hip, *arguments, CPU, joined=joined)
            for ours, theirs in zip(got, want, strict=bool(got)):
                assert_same_bits(ours, theirs, f"{kernel}, {dtype}, {n} columns on {hip.arch}")
    assert hip.ran >= instances(hip, "rmsnorm_dweight_kernel", "norm_backward_kernel")


def grouped_gemm(hip, kernel, problem, where):
    """What the library makes of a problem of tests/test_grouped_gemm.py, by a kernel where it is on the device."""
    (a, b, given), (_, end, start) = problem.operands(), problem.boundaries()
    out = problem.start()
    bias = given.pop("bias", None)
    fields = {"accumulate": problem.accumulate, "arithmetic": ARITHMETIC[given["arithmetic"]]}
    fields |= {"k_chunk": given["k_chunk"] or 0, **({"kernel": kernel} if where == ROCM else {})}
    options = capi.options("pydet_grouped_gemm_options", **fields)
    hip.check("pydet_grouped_gemm", options, a, b, bias, start, end, out, kind=where)
    return out


GROUPED = [  # every layout; groups of several tiles, of none and out of bounds; few, as an interpreter takes its time
    ("gaps", "row", "row", {"depth": True, "bias": "bf16"}),
    ("overlapping", "row", "col", {"n": 66}),
    ("past the end", "col", "row", {"depth": True, "accumulate": True}),
    ("gaps", "col", "col", {"k_chunk": 16, "out_layout": "col"}),
]


def test_grouped_gemm_equals_cpu(hip):
    """Every kernel by name, rows and depth; of fp32, and on matrix cores, all of the problems, else of a type one."""
    taken = set()
    for kernel, dtypes, arithmetic, available in table(hip, "grouped_gemm"):
        name = next(name for name, number in ARITHMETIC.items() if number == arithmetic)
        for i, dtype in enumerate(dtypes if available else ()):
            for routing, a_layout, b_layout, more in (
                GROUPED if dtype == "fp32" or "mfma" in kernel else GROUPED[3 * (i - 1) : 3 * i - 2]
            ):
                given = {"rows": 17, "n": 9, "dtype": dtype, "arithmetic": name, **more}
                problem = test_grouped_gemm.Grouped(routing, a_layout=a_layout, b_layout=b_layout, **given)
                got, want = (grouped_gemm(hip, kernel, problem, where) for where in (ROCM, CPU))
                assert_same_bits(got, want, f"{kernel}, {problem} on {hip.arch}")
                taken.add(kernel)
    every = instances(hip, "gemm_ieee_kernel", "gemm_mfma_kernel")
    assert len(taken) == 2 and hip.ran >= {name for name in every if "GroupedGemm" in name}


def scaled_gemm(hip, kernel, problem, where):
    """What the library makes of a problem of tests/test_scaled_gemm.py, by a kernel where it is on the device."""
    a, b, given = problem.operands()
    shape = (*problem.batch, problem.m, problem.n)
    out = problem.start() if problem.accumulate else np.full(shape, 7, DTYPES[problem.out_dtype])
    out = transposed(out) if problem.out_layout == "col" else out
    fields = {"accumulate": problem.accumulate, "arithmetic": ARITHMETIC[problem.arithmetic]}
    fields |= {"k_chunk": 128 if problem.k_chunk is None else problem.k_chunk}
    options = capi.options("pydet_scaled_gemm_options", **fields, **({"kernel": kernel} if where == ROCM else {}))
    operands = a, given["a_scale"], b, given["b_scale"], given.get("bias"), out
    arrays = [None if x is None else np.asarray(x) for x in operands]  # a single scale is no array
    hip.check("pydet_scaled_gemm", options, *arrays, kind=where)
    return out


SCALED = [  # either type of each operand, every layout and kind of scale; a tile's edges, more than a stage and a chunk
    ((3, 9, 130), {"bias": "n bf16", "out_dtype": "bf16"}),
    ((66, 5, 33), {"a_type": "e5m2", "a_layout": "col", "a_scale": "row", "b_scale": "tensor", "out_dtype": "fp16"}),
    ((2, 70, 140), {"b_type": "e5m2", "b_layout": "row", "k_chunk": 32, "a_scale": "row", "b_scale": "row"}),
    ((5, 6, 160), {"a_scale": "none", "b_scale": "none", "k_chunk": 0, "accumulate": True, "out_layout": "col"}),
    ((4, 3, 140), {"b_scale": "group", "scale_type": test_scaled_gemm.E8M0, "batch": (2,), "kind": "specials"}),
]


@one_source
def test_scaled_gemm_equals_cpu(hip):
    for kernel, _, arithmetic, available in table(hip, "scaled_gemm"):
        assert available and arithmetic == ARITHMETIC["ieee"]
        if "skinny" in kernel:
            continue
        for seed, (extents, more) in enumerate(SCALED):
            problem = test_scaled_gemm.Scaled(*extents, arithmetic="ieee", seed=seed, **more)
            got, want = (scaled_gemm(hip, kernel, problem, where) for where in (ROCM, CPU))
            assert_same_bits(got, want, f"{kernel}, {problem} on {hip.arch}")
    assert hip.ran >= {name for name in instances(hip, "scaled_gemm_ieee_kernel") if "Grouped" not in name}


@one_source
def test_scaled_gemm_of_few_rows_equals_cpu(hip):
    """Chunks beyond a round, a broken last one, columns past the end; NaN, and scales of every kind."""
    for dtype in ("e4m3", "e5m2"):
        for problem in [*test_scaled_gemm.few_rows(dtype)][:: 5 if dtype == "e4m3" else 11]:
            got, want = (scaled_gemm(hip, "hip_scaled_skinny_ieee", problem, where) for where in (ROCM, CPU))
            assert_same_bits(got, want, f"{problem} on {hip.arch}")
    assert hip.ran >= instances(hip, "scaled_skinny_ieee_kernel")


def scaled_grouped_gemm(hip, kernel, problem, where):
    """What the library makes of a problem of test_scaled_grouped_gemm.py, by a kernel where it is on the device."""
    (a, b, given), (_, end, start), out = problem.operands(), problem.boundaries(), problem.start()
    out = transposed(out) if problem.out_layout == "col" else out
    fields = {"accumulate": problem.accumulate, "arithmetic": ARITHMETIC[problem.arithmetic]}
    fields |= {"k_chunk": 128 if problem.k_chunk is None else problem.k_chunk}
    fields |= {"kernel": kernel} if where == ROCM else {}
    options = capi.options("pydet_scaled_grouped_gemm_options", **fields)
    operands = a, given["a_scale"], b, given["b_scale"], given.get("bias"), start, end, out
    arrays = [None if x is None else np.asarray(x) for x in operands]
    hip.check("pydet_scaled_grouped_gemm", options, *arrays, kind=where)
    return out


SCALED_GROUPED = [  # as SCALED; groups of several tiles, of none and out of bounds, beginning where they please
    ("gaps", 130, 9, {"bias": "bf16", "out_dtype": "bf16"}),
    (
        "overlapping",
        33,
        66,
        {"a_type": "e5m2", "a_layout": "col", "a_scale": "row", "b_scale": "tensor", "shared": True},
    ),
    ("past the end", 140, 9, {"b_type": "e5m2", "b_layout": "row", "k_chunk": 32, "a_scale": "row", "b_scale": "row"}),
    ("gaps", 160, 6, {"a_scale": "none", "b_scale": "none", "k_chunk": 0, "accumulate": True, "out_layout": "col"}),
    ("backwards", 140, 3, {"b_scale": "group", "scale_type": test_scaled_gemm.E8M0, "kind": "specials"}),
]


@one_source
def test_scaled_grouped_gemm_equals_cpu(hip):
    for kernel, _, arithmetic, available in table(hip, "scaled_grouped_gemm"):
        assert available and arithmetic == ARITHMETIC["ieee"]
        for seed, (routing, k, n, more) in enumerate(SCALED_GROUPED):
            problem = test_scaled_grouped_gemm.ScaledGrouped(routing, k, n, arithmetic="ieee", seed=seed, **more)
            got, want = (scaled_grouped_gemm(hip, kernel, problem, where) for where in (ROCM, CPU))
            assert_same_bits(got, want, f"{kernel}, {problem} on {hip.arch}")
    assert hip.ran >= {name for name in instances(hip, "scaled_gemm_ieee_kernel") if "Grouped" in name}


def quantize(hip, kernel, x, granularity, want, power_of_two=False, given=None):
    """What a kernel makes of x, like `want`, the CPU's arrays."""
    results = [np.full(of.shape, 7, of.dtype) for of in want]
    if given is not None:
        results[1] = given
    fields = {"granularity": {"row": 0, "group": 1, "block": 2, "tensor": 3}[granularity], "given": given is not None}
    options = capi.options("pydet_quantize_options", power_of_two=power_of_two, kernel=kernel, **fields)
    hip.check("pydet_quantize", options, x, *results, *[None] * (4 - len(results)))
    return results


QUANTIZED = [  # of these types: every granularity and layout; one element, whole groups, more than a row's threads hold
    ("fp32 fp16", (3, 129), "row", {"kind": "specials"}),
    ("bf16", (2, 2, 8200), "row", {"dtype": E5M2, "power_of_two": True}),
    ("fp32 fp16", (128, 128), "group", {"transposed": True}),
    ("bf16", (2, 5, 130), "group", {"scale_dtype": test_scaled_gemm.E8M0, "layout": "col", "kind": "wide"}),
    ("bf16", (130, 9), "block", {"transposed": True, "dtype": E5M2, "kind": "extremes"}),
    ("fp32", (1, 1), "block", {"power_of_two": True}),
    ("fp32", (17, 140), "group", {"given": True, "layout": "col", "kind": "specials"}),
    ("fp16", (9, 33), "tensor", {"given": True}),
    ("fp32 bf16 fp16", (140, 131), "tensor", {"kind": "wide", "power_of_two": True}),
    ("bf16", (2, 1, 3), "tensor", {"scale_dtype": test_scaled_gemm.E8M0}),
]


@one_source
def test_quantize_equals_cpu(hip):
    """Every kernel by name, and each takes what its name says."""
    took = {}
    for kernel, dtypes, arithmetic, available in table(hip, "quantize"):
        assert available and arithmetic == ARITHMETIC["ieee"]
        for (index, (types, shape, granularity, more)), of_x in itertools.product(enumerate(QUANTIZED), dtypes):
            given, kind, layout = more.get("given"), more.get("kind", "normal"), more.get("layout", "row")
            options = {
                name: more[name] for name in ("dtype", "scale_dtype", "power_of_two", "transposed") if name in more
            }
            if of_x not in types.split() or ("rows" in kernel) != (granularity == "row" and not given):
                continue
            x = cases.lay(cases.data(kind, shape, DTYPES[of_x], index), layout)
            if granularity == "tensor" and given:
                options["scale"] = np.array(0.02, np.float32)
            elif given:
                options["scale"] = pydet.quantize(x, granularity=granularity)[1]
            want = pydet.quantize(x, granularity=granularity, **options)
            given = np.asarray(options["scale"]) if given else None
            got = quantize(hip, kernel, x, granularity, want, options.get("power_of_two", False), given)
            for name, ours, theirs in zip(("q", "scale", "q of x^T", "its scale"), got, want, strict=False):
                assert_same_bits(ours, np.asarray(theirs), f"{kernel}, {name} of {of_x} {shape} {more} on {hip.arch}")
            took[kernel] = took.get(kernel, 0) + 1
    assert min(took.values()) >= 3 and len(took) == 2
    finds = ("quantize_pieces_kernel", "quantize_tensor_scale_kernel")
    assert hip.ran >= instances(hip, "quantize_rows_kernel", "quantize_tiles_kernel", *finds)


def layernorm(hip, x, weight, bias, residual, where, kernel=None, **fields):
    y, mean, rstd = np.full(x.shape, 7, x.dtype), *(np.full(x.shape[:-1], 7, np.float32) for _ in range(2))
    total = None if residual is None else np.full(x.shape, 7, x.dtype)
    extra = {"kernel": kernel} if kernel and where == ROCM else {}
    options = capi.options("pydet_layernorm_options", eps=1e-5, **extra, **fields)
    hip.check("pydet_layernorm", options, x, residual, weight, bias, y, mean, rstd, total, kind=where)
    return [y, mean, rstd] + ([] if residual is None else [total])


def layernorm_backward(hip, dy, x, weight, of_rows, dresidual, where, kernel=None, joined=True, **fields):
    dx = np.full(x.shape, 7, x.dtype)
    dweight, dbias = (np.full(x.shape[-1:], 7, np.float32) if joined else None for _ in range(2))
    size = ffi.new("uint64_t *")
    assert hip.lib.pydet_layernorm_backward_workspace(x.shape[0], x.shape[1], size) == 0
    memory = np.full(size[0] + 16, 0xA5, np.uint8)
    start = ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 16)
    extra = {"kernel": kernel} if kernel and where == ROCM else {}
    struct = "pydet_layernorm_backward_options"
    options = capi.options(struct, workspace=start, workspace_size=size[0], **extra, **fields)
    tensors = dy, x, weight, *of_rows, dresidual, dx, dweight, dbias
    hip.check("pydet_layernorm_backward", options, *tensors, kind=where)
    return [dx, dweight, dbias] if joined else [dx]


LAYER_WIDTHS = (256, 2048, 8192, 1101)  # the longest row of each team that holds one; and one that none holds


@one_source
@pytest.mark.parametrize("dtype", DTYPES)
def test_layernorm_equals_cpu(hip, dtype):
    """Each team and each function, in every type; what is absent takes turns."""
    hip.order = in_reverse
    for i, n in enumerate((40, *LAYER_WIDTHS)):
        held = "general" if n == 1101 else "held"
        x, dy, residual = (normal(3, n, dtype=dtype, seed=seed) for seed in range(3))
        weight, bias = (normal(n, seed=4 + j) if (i + j) % 3 else None for j in range(2))
        arguments = x, weight, bias, residual if i % 2 else None
        got = layernorm(hip, *arguments, ROCM, f"hip_layernorm_{held}", weight_offset=1.0)
        want = layernorm(hip, *arguments, CPU, weight_offset=1.0)
        for ours, theirs in zip(got, want, strict=True):
            assert_same_bits(ours, theirs, f"layernorm {held}, {n} columns on {hip.arch}")
        arguments = dy, x, weight, want[1:3], residual if i % 2 else None
        joined = n in (40, 1101)
        got = layernorm_backward(hip, *arguments, ROCM, f"hip_layernorm_backward_{held}", joined=joined)
        for ours, theirs in zip(got, layernorm_backward(hip, *arguments, CPU, joined=joined), strict=True):
            assert_same_bits(ours, theirs, f"layernorm_backward {held}, {n} columns on {hip.arch}")
    of_type = f"TypeE{('fp32', 'bf16', 'fp16').index(dtype)}E"
    every = instances(hip, "norm_kernel", "layernorm_dx_kernel", "norm_chains_kernel")
    every = {name for name in every if of_type in name and "RmsNorm" not in name and "NormToFp8" not in name}
    assert every and hip.ran >= every


@one_source
def test_layernorm_of_several_blocks_of_rows_equals_cpu(hip):
    """The sums over rows that pass a chain, a group and a block, continued."""
    dy, x, weight, bias = normal(274, 8, seed=1), normal(274, 8), normal(8), normal(8, seed=2)
    _, mean, rstd = layernorm(hip, x, weight, bias, None, CPU)
    arguments = hip, dy, x, weight, (mean, rstd), None
    for kernel in ("hip_layernorm_backward_held", "hip_layernorm_backward_general"):
        got = layernorm_backward(*arguments, ROCM, kernel, accumulate=1)
        for ours, theirs in zip(got, layernorm_backward(*arguments, CPU, accumulate=1), strict=True):
            assert_same_bits(ours, theirs, f"{kernel} on {hip.arch}")


SOFTMAX = ("softmax", "log_softmax", "log_prob", "log_prob_backward", "softmax_backward", "log_softmax_backward")


def softmax(hip, function, x, where, kernel=None):
    """What one of these functions gives for rows x, and for a dy, a column and a gradient that go with them."""
    rows, n = x.shape
    out = np.full((rows,) if function == "log_prob" else x.shape, 7, np.float32 if function == "log_prob" else x.dtype)
    struct = "pydet_log_prob_options" if "prob" in function else "pydet_softmax_options"
    fields = {"kernel": kernel} if kernel and where == ROCM else {}
    if "prob" not in function:
        fields["log"] = int("log" in function)
    index = np.random.default_rng(rows + n).integers(-1, n + 1, rows).astype((np.int32, np.int64)[n % 2])
    y = (pydet.log_softmax if "log" in function else pydet.softmax)(x)
    arguments = {
        "log_prob": (x, index),
        "log_prob_backward": (normal(rows), x, index),
        "softmax_backward": (x[::-1].copy(), y * (np.arange(n) % 3 > 0)),  # with zeros, whose products have signs
        "log_softmax_backward": (x[::-1].copy(), y),
    }.get(function, (x,))
    name = function if "prob" in function else function.replace("log_", "")
    hip.check(f"pydet_{name}", capi.options(struct, **fields), *arguments, out, kind=where)
    return out


def same_softmax(hip, function, x, kernel):
    got = softmax(hip, function, x, ROCM, kernel)
    assert_same_bits(got, softmax(hip, function, x, CPU), f"{function} by {kernel}, {x.dtype} {x.shape} on {hip.arch}")


def head(hip, x, w, index, by, where, **read):
    """What rows of the head are asked, and dx of the gradient by that."""
    rows, made = len(x), [np.full(len(x), 7, np.float32) for _ in range(4)]
    greedy, dx = np.full(rows, 7), np.full(x.shape, 7, x.dtype)
    memory = np.zeros(1 << 16, np.uint8)
    room = {
        "workspace": ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 256),
        "workspace_size": (1 << 16) - 256,
        "arithmetic": ARITHMETIC["ieee"],
        **({"kernel": "hip_head_rows"} if where == ROCM else {}),
        **read,
    }
    for function, others, arrays in (
        ("", [*made[1:], greedy], (x, w, None, index, made[0])),
        ("_backward", by[1:], (by[0], x, w, None, index, None, dx, None, None)),
    ):
        tensors = [capi.Tensor(other, device=(where, 0)) for other in others]
        held = dict(zip(("entropy", "lse", "mean", "greedy"), map(capi.pointer, tensors), strict=False))
        options = capi.options("pydet_linear_log_prob_options", **room, **held)
        hip.check(f"pydet_linear_log_prob{function}", options, *arrays, kind=where, held=others)
    return *made, greedy, dx


@one_source
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_rows_equal_cpu(hip, dtype):
    """Rows that end within a vector and behind a block's lanes, scaled and not, with what is no number."""
    for n, read in ((131, {}), (2051, {"softcap": 2.0, "temperature": 0.7})):
        x, w, index = normal(3, 8, dtype=dtype), normal(n, 8, dtype=dtype), np.array([n - 1, -1, 5])
        x[2, 1], by = np.nan, [normal(3, seed=i) for i in range(4)]
        by[1][0] = 0
        names = "log_prob", "entropy", "lse", "mean", "greedy", "dx"
        want, got = (head(hip, x, w, index, by, where, **read) for where in (CPU, ROCM))
        for name, ours, theirs in zip(names, got, want, strict=True):
            assert_same_bits(ours, theirs, f"{name} of {n} columns of {dtype}, {read}, on {hip.arch}")


@one_source
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_of_rows_equal_cpu(hip, reduction):
    """Of one row, of a chain and a rest, some of which are ignored; smoothed, with a z-loss, and plain; and dx."""
    for rows, rule in ((1, {}), (300, {"label_smoothing": 0.1, "z_loss": 1e-2})):
        x, w, target = normal(rows, 8), normal(9, 8, seed=1), np.arange(rows) * 7 % 9
        target[2::5] = -100
        dloss = normal(rows, seed=2) if reduction == 2 else np.float32([1.5]).reshape(())
        made = []
        for where in (CPU, ROCM):
            loss, again = (np.full(dloss.shape, 7, np.float32) for _ in range(2))
            dx, memory = np.full(x.shape, 7, np.float32), np.zeros(1 << 18, np.uint8)
            at = ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 256)
            room = {"workspace": at, "workspace_size": (1 << 18) - 256, "arithmetic": ARITHMETIC["ieee"]}
            options = capi.options("pydet_linear_cross_entropy_options", reduction=reduction, **room, **rule)
            hip.check("pydet_linear_cross_entropy", options, x, w, None, target, loss, kind=where)
            arrays = dloss, x, w, None, target, again, dx, None, None
            hip.check("pydet_linear_cross_entropy_backward", options, *arrays, kind=where)
            made.append((loss, again, dx))
        for name, ours, theirs in zip(("loss", "loss beside dx", "dx"), *reversed(made), strict=True):
            assert_same_bits(ours, theirs, f"{name} of {rows} rows, {rule}, on {hip.arch}")


@one_source
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_equals_cpu(hip, dtype):
    """Each kernel and function, with rows that share a block, a rest of rows, special values, rows of any alignment."""
    hip.order = in_reverse
    for number, function in enumerate(SOFTMAX):
        kernel = "hip_softmax_backward" if "softmax_backward" in function else "hip_softmax"
        for kind in ("normal", "specials") if function in ("softmax", "softmax_backward") else ("wide",):
            same_softmax(hip, function, cases.data(kind, (5, 264), DTYPES[dtype], number), f"{kernel}_held")
        for n in (2056, 77)[: 1 + number % 2]:
            same_softmax(hip, function, cases.data("normal", (2, n), DTYPES[dtype], number), f"{kernel}_long")
    x = cases.data("specials", (4, 2049), DTYPES[dtype], 1)
    words = (0x7C00, 0xFC00, 0x7E00, 0x7C01) if dtype == "fp16" else (0x7F80, 0xFF80, 0x7FC0, 0x7F81)
    for row, word in enumerate(words):  # infinities, a quiet NaN, a signalling one
        x.view(np.uint16 if x.itemsize == 2 else np.uint32)[row, 5] = word << 16 if dtype == "fp32" else word
    same_softmax(hip, "softmax", x, "hip_softmax_long")
    same_softmax(hip, "log_softmax", x[:, :256].copy(), "hip_softmax_held")
    same_softmax(hip, "softmax_backward", cases.data("wide", (1, 2049), DTYPES[dtype], 1), "hip_softmax_backward_long")


@one_source
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_equals_cpu(hip, dtype):
    """Each kind, alone and gated, with its gradients: whole vectors and a rest, rows that lie apart, special values."""
    hip.order = in_reverse
    kinds = ("SILU", "GELU", "GELU_TANH", "QUICK_GELU", "SIGMOID", "TANH", "SOFTPLUS", "EXP")
    for number, kind in enumerate(kinds):
        shape = (3, 264) if number % 2 else (5, 77)
        x, up, dy = (cases.data("specials" if i == 0 else "normal", shape, DTYPES[dtype], number + i) for i in range(3))
        up = up if number % 3 else None
        if number % 4 == 0:
            x = np.concatenate([x, x], 1)[:, : shape[1]]
        found = {}
        for where in (ROCM, CPU):
            y, dx, dup = (np.full(shape, 7, x.dtype) for _ in range(3))
            dup = None if up is None else dup
            given = lambda kind=kind: capi.options("pydet_activation_options", kind=getattr(hip.lib, f"PYDET_{kind}"))
            hip.check("pydet_activation", given(), x, up, y, kind=where)
            assert where == CPU or last_kernel(hip) == "hip_activation"
            hip.check("pydet_activation_backward", given(), dy, x, up, dx, dup, kind=where)
            assert where == CPU or last_kernel(hip) == "hip_activation_backward"
            found[where] = [y, dx] + ([] if dup is None else [dup])
        for result, (ours, theirs) in enumerate(zip(found[ROCM], found[CPU], strict=True)):
            assert_same_bits(ours, theirs, f"{kind}, {dtype} {shape}, result {result} on {hip.arch}")


# Widths of rows around a vector and around all threads' vectors, and filters, in turn.
SAMPLED = [(1, {}), (7, {"top_k": 3}), (130, {"top_p": 0.6}), (1029, {"temperature": 0.7, "min_p": 0.05})]
SAMPLED += [(2056, {"top_k": 200, "top_p": 0.9, "temperature": 2.0}), (300, {"temperature": 0.0})]


@one_source
def test_sample_equals_cpu(hip):
    """Each filter; equal elements, where a cut falls among them; a row that has no token; both log-probabilities."""
    hip.order = in_reverse
    for number, (n, given) in enumerate(SAMPLED):
        x = normal(3, n, dtype=list(DTYPES)[number % 3], seed=number)
        x = np.round(x.astype(np.float32) * 2).astype(x.dtype) if number % 2 else x
        x[2, n // 2] = np.nan
        seed, position = np.int64([5, -(2**62), 1]), np.int32([0, 1, -7])
        found = {}
        for where in (ROCM, CPU):
            token, *log_probs = np.full(3, 7), np.full(3, 7, np.float32), np.full(3, 7, np.float32)
            options = capi.options("pydet_sample_options", **{"temperature": 1, "top_p": 1, **given})
            hip.check("pydet_sample", options, x, seed, position, token, *log_probs, kind=where)
            assert where == CPU or last_kernel(hip) == "hip_sample"
            found[where] = token, *log_probs
        assert found[CPU][0][2] == -1 and (found[CPU][0][:2] >= 0).all()
        for result, (ours, theirs) in enumerate(zip(found[ROCM], found[CPU], strict=True)):
            assert_same_bits(ours, theirs, f"{given} of {n}, result {result} on {hip.arch}")


@one_source
def test_topk_equals_cpu(hip):
    hip.order = in_reverse
    for number, (n, k) in enumerate(((1, 1), (9, 9), (257, 5), (1030, 33))):
        x = np.round(normal(2, n, seed=number) * 2).astype(list(DTYPES.values())[number % 3])
        x[1, n // 2] = np.nan
        found = {}
        for where in (ROCM, CPU):
            values, index = np.full((2, k), 7, x.dtype), np.full((2, k), 7)
            hip.check("pydet_topk", capi.options("pydet_topk_options"), x, values, index, kind=where)
            assert where == CPU or last_kernel(hip) == "hip_topk"
            found[where] = values, index
        for ours, theirs in zip(found[ROCM], found[CPU], strict=True):
            assert_same_bits(ours, theirs, f"{k} of {n} on {hip.arch}")


# Tokens, rows of a table and columns: teams of threads of several sizes, pieces of 16 bytes, two blocks of ids.
EMBEDDED = [(3, 2, 5), (33, 40, 8), (130, 5, 40), (70, 513, 24), (65, 3, 1040)]


@one_source
def test_embedding_equals_cpu(hip):
    hip.order = in_reverse
    for number, (tokens, rows, n) in enumerate(EMBEDDED):
        w, ids = normal(rows, n, dtype=list(DTYPES)[number % 3]), test_embedding.ids_of(tokens, rows, number)
        out = np.full((tokens, n), 7, w.dtype)
        hip.check("pydet_embedding", capi.options("pydet_embedding_options"), w, ids, out)
        assert last_kernel(hip) == "hip_embedding"
        assert_same_bits(out, w[ids], f"{tokens} of {rows} rows of {n} on {hip.arch}")
        hip.check("pydet_embedding", capi.options("pydet_embedding_options"), w, np.where(ids == ids[0], -1, ids), out)
        assert np.isnan(out[0].astype(np.float32)).all() and not np.isnan(out[ids != ids[0]].astype(np.float32)).any()


@one_source
def test_rotary_equals_cpu(hip):
    """Pairs of neighbours and half apart, eight of a thread and one; the gradient; with elements that are copied."""
    hip.order = in_reverse
    for number, (tokens, heads, pairs, rest) in enumerate([(3, 2, 16, 0), (5, 1, 5, 3), (2, 4, 8, 8), (1, 3, 64, 0)]):
        kind, n = list(DTYPES)[number % 3], 2 * pairs + rest
        q, k = normal(tokens, heads, n, dtype=kind), normal(tokens, 1, n, dtype=kind, seed=1)
        cos, sin = (normal(tokens, pairs, seed=i) for i in (2, 3))
        for flags in ({}, {"neighbours": 1}, {"neighbours": 1, "out_neighbours": 1, "in_fp32": 1}, {"transposed": 1}):
            found = {}
            for where in (ROCM, CPU):
                outs = np.full_like(q, 7), np.full_like(k, 7)
                options = capi.options("pydet_rotary_options", **flags)
                hip.check("pydet_rotary", options, q, k, cos, sin, *outs, kind=where)
                assert where == CPU or last_kernel(hip) == "hip_rotary"
                found[where] = outs
            for got, want in zip(found[ROCM], found[CPU], strict=True):
                assert_same_bits(got, want, f"{q.shape} {flags} on {hip.arch}")


@one_source
def test_embedding_backward_equals_cpu(hip):
    """The sums made anew, an id left out; and continued."""
    hip.order = in_reverse
    for number, (tokens, rows, n) in enumerate(EMBEDDED):
        dout = normal(tokens, n, dtype=list(DTYPES)[number % 3])
        ids = test_embedding.ids_of(tokens, rows, number, (np.int64, np.int32)[number % 2])
        found = {}
        for where in (ROCM, CPU):
            made, sums = np.full((rows, n), 7, dout.dtype), normal(rows, n, seed=1)
            room = np.full(8 * tokens + 4 * (rows // 32 + 2), 0xA5, np.uint8)
            given = {"workspace": ffi.cast("void *", room.ctypes.data), "workspace_size": room.nbytes}
            apart = {"has_padding": 1, "padding": int(ids[0])}
            function, struct = "pydet_embedding_backward", "pydet_embedding_backward_options"
            hip.check(function, capi.options(struct, **given, **apart), dout, ids, made, kind=where)
            assert where == CPU or last_kernel(hip) == "hip_embedding_backward"
            hip.check(function, capi.options(struct, **given, accumulate=1), dout, ids, sums, kind=where)
            found[where] = made, sums
        for ours, theirs in zip(found[ROCM], found[CPU], strict=True):
            assert_same_bits(ours, theirs, f"{tokens} of {rows} rows of {n} on {hip.arch}")


# Rows of single elements and of whole vectors for teams of one, two and four threads, which share a block of 128.
SHORT_WIDTHS = (1, 7, 8, 9, 15, 16, 17, 31, 32)


@one_source
def test_softmax_of_every_width_equals_cpu(hip):
    """Each team that holds a row, in every type, by the functions in turn."""
    hip.order = in_reverse
    for i, (dtype, n) in enumerate(itertools.product(DTYPES, (*SHORT_WIDTHS, *WIDTHS))):
        x = normal(131 if n in SHORT_WIDTHS else 1, n, dtype=dtype)
        same_softmax(hip, SOFTMAX[i % 4], x, "hip_softmax_held")
        same_softmax(hip, SOFTMAX[4 + i % 2], x, "hip_softmax_backward_held")
    assert hip.ran >= instances(hip, "softmax_kernel", "softmax_backward_kernel")


@one_source
def test_long_rows_in_turns(hip):
    """More rows than blocks: the sums of one row meet where those of the row before were read."""
    hip.order, hip.grid = in_reverse, lambda grid: [2, 1, 1]
    for function in ("softmax", "softmax_backward"):
        same_softmax(hip, function, normal(7, 1101), f"hip_{function}_long")


@one_source
def test_fold_equals_cpu(hip):
    """By vectors and by elements, around the workgroup of 256 threads, in both orders."""
    for number, (size, count) in enumerate(itertools.product((1, 4, 255, 257, 1024, 1028, 1030), (1, 2, 5, 8))):
        parts = [normal(2, size, seed=number + i) for i in range(count)]
        bias = normal(size, dtype="bf16") if number % 2 else None
        results = []
        for kind in (ROCM, CPU):
            out = np.full((2, size), 7, list(DTYPES.values())[number % 3])
            tensors = [capi.Tensor(x, device=(kind, 0)) for x in (*parts, bias, out) if x is not None]
            hip.fake.fakehip_disown()
            for x in (*parts, bias, out):
                if x is not None:
                    hip.own(x.ravel("K").view(np.uint8))
            array = ffi.new("pydet_tensor *[]", [t.c for t in tensors[:count]])
            given = capi.options("pydet_fold_options", order=number % 2)
            addend = tensors[count].c if bias is not None else ffi.NULL
            pointers = ffi.cast("const pydet_tensor *const *", array)
            assert hip.lib.pydet_fold(ffi.NULL, pointers, count, addend, tensors[-1].c, given) == 0, hip.sentence()
            assert kind == CPU or last_kernel(hip) == "hip_fold"
            results.append(out)
        assert_same_bits(*results, f"{count} of {size}")
    assert hip.ran >= instances(hip, "fold_kernel")


@pytest.mark.parametrize("hip", ARCHS, indirect=True)
def test_adamw_equals_cpu(hip):
    """Lists of all types: by vectors and by elements, around the pieces of 2048 that a workgroup of 256 takes."""
    hip.order = in_reverse
    kinds = list(DTYPES.values())
    for number, (count, sizes) in enumerate(((1, (2049,)), (9, (1, 2052, 4, 5, 0, 1023)), (64, (3, 8, 1, 33)))):
        results = []
        for kind in (ROCM, CPU):
            tensors = adamws.many(count, kinds[number % 3 :] + kinds[: number % 3], sizes, first=100 * number)
            hip.fake.fakehip_disown()
            lists = []
            for arrays in zip(*tensors, strict=True):
                held = [x if x is None else capi.Tensor(x, device=(kind, 0)) for x in arrays]
                for x in arrays:
                    if x is not None and x.size:
                        hip.own(x.view(np.uint8))
                lists.append((held, ffi.new("const pydet_tensor *[]", [capi.pointer(x) for x in held])))
            how = adamws.HOW
            given = {name: how[name] for name in ("lr", "eps", "weight_decay")}
            for i in (0, 1):
                given |= {f"beta{i + 1}": how["betas"][i], f"beta{i + 1}_power": how["beta_powers"][i]}
            step = capi.options("pydet_adamw_step", **given)
            arrays = [array for _, array in lists]
            assert hip.lib.pydet_adamw(ffi.NULL, *arrays, count, step, ffi.NULL) == 0, hip.sentence()
            assert kind == CPU or last_kernel(hip) == "hip_adamw"
            results.append(tensors)
        for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
            for name, x, y in zip(adamws.NAMES, ours, theirs, strict=True):
                if x is not None:
                    assert_same_bits(x, y, f"{name}[{i}] of {count} on {hip.arch}")
    assert hip.ran >= instances(hip, "adamw_kernel")


def test_initial_equals_cpu(hip):
    """Sums that begin at a tensor, in out or in the workspace; rows by fours and by elements, both sides of out."""
    extents = ((5, 8, "fp32", "row"), (5, 7, "bf16", "row"), (17, 36, "fp16", "row"), (3, 20, "bf16", "col"))
    for number, (m, n, out_dtype, layout) in enumerate((*extents, (33, 4, "fp32", "col"))):
        a, b, initial = normal(m, 40), normal(40, n, seed=1), normal(m, n, seed=2)
        bias, results = normal(n, dtype="bf16") if number % 2 else None, []
        for kind in (ROCM, CPU):
            out = np.full((m, n) if layout == "row" else (n, m), 7, DTYPES[out_dtype])
            out, memory = out if layout == "row" else out.T, np.full(4 * m * n + 32, 0xA5, np.uint8)
            given = capi.options("pydet_gemm_options", arithmetic=1, k_chunk=16 * (number % 3))
            tensor = capi.Tensor(initial, device=(kind, 0))
            given.initial = tensor.c
            given.workspace = ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 16)
            given.workspace_size = (4 * m * n + 15) // 16 * 16
            hip.check("pydet_gemm", given, a, b, bias, out, kind=kind, held=(initial,))
            results.append(np.ascontiguousarray(out))
        assert_same_bits(*results, f"{m}x{n} {out_dtype} {layout}")
    assert hip.ran >= instances(hip, "rounding_kernel")


def test_order_of_waves_does_not_matter(hip):
    """The waves of a workgroup in three orders between barriers, and the memory of LDS dirty as ever."""
    rng = np.random.default_rng(0)
    for order in (lambda n: range(n)[::-1], lambda n: rng.permutation(n), lambda n: [*range(1, n), 0]):
        hip.order = order
        both(hip, normal(66, 40), normal(40, 70), kernel="hip_gemm_ieee_64x64", arithmetic=1)
        x, weight = normal(4, 3000), normal(3000)
        for ours, theirs in zip(rmsnorm(hip, x, weight, None, ROCM), rmsnorm(hip, x, weight, None, CPU), strict=True):
            assert_same_bits(ours, theirs)


# ---- Mutations: the tests above can fail -----------------------------------------------------------------------------


def problem_for(hip, kernel):
    """A call that runs this kernel with several waves and stages, and holds what it gives to the CPU."""
    kind, columns = ARCHS[hip.arch], {"norm_kernel": 2048}.get(kernel, 2904)
    ieee, matrix = {"arithmetic": 1}, {"arithmetic": ARITHMETIC[kind]}
    bf16, skinny = {"dtype": "bf16"}, {"function": "pydet_skinny_gemm"}

    def norm():
        for weight in (normal(columns), normal(columns, **bf16)):
            arguments = hip, normal(4, columns), weight, normal(4, columns, seed=1)
            name = "hip_rmsnorm_held" if kernel == "norm_kernel" else "hip_rmsnorm_general"
            for ours, theirs in zip(rmsnorm(*arguments, ROCM, name), rmsnorm(*arguments, CPU), strict=True):
                assert_same_bits(ours, theirs)

    def backward():
        # For the join, rows enough for three blocks of them.
        rows, n = (3, 1000) if kernel == "norm_backward_kernel" else (520, 8)
        dy, x, weight, rstd = normal(rows, n, seed=1), normal(rows, n), normal(n), np.ones(rows, np.float32)
        arguments, name = (hip, dy, x, weight, rstd, None), "hip_rmsnorm_backward_group"
        for ours, theirs in zip(
            rmsnorm_backward(*arguments, ROCM, name), rmsnorm_backward(*arguments, CPU), strict=True
        ):
            assert_same_bits(ours, theirs)

    def rows_of_softmax():
        held = kernel == "softmax_kernel"
        hip.grid = list if held else lambda grid: [2, 1, 1]
        same_softmax(hip, "softmax", normal(3, 1040 if held else 1101), f"hip_softmax_{'held' if held else 'long'}")

    def chunks():
        """One of several rounds of loads and one of less than a round; more of them than there are waves."""
        x, w = normal(20, 600, **bf16), normal(30, 600, **bf16)
        for k_chunk in (560, 48):
            both(hip, x, w, kernel=f"hip_skinny_gemm_{kind}_mfma", k_chunk=k_chunk, **matrix, **skinny)

    def product(a, b, name, **options):
        return lambda: both(hip, a, b, kernel=name, **options)

    call = {
        "gemm_ieee_kernel": product(normal(66, 80), normal(80, 70), "hip_gemm_ieee_64x64", **ieee),
        "gemm_mfma_kernel": product(
            normal(66, 80, **bf16), normal(80, 70, **bf16), f"hip_gemm_{kind}_mfma_64x64", **matrix
        ),
        "gemm_mfma_kernel, whole": product(
            *(normal(33, 192, **bf16), transposed(normal(192, 49, **bf16)), f"hip_gemm_{kind}_mfma_64x64"),
            **{"out": normal(33, 49, seed=3), "accumulate": 1, **matrix},
        ),
        "skinny_ieee_kernel": product(normal(3, 600), normal(20, 600), "hip_skinny_gemm_ieee", **ieee, **skinny),
        "skinny_mfma_kernel": chunks,
        "skinny_mfma_chain_kernel": product(
            normal(20, 1720, **bf16), normal(30, 1720, **bf16), f"hip_skinny_gemm_{kind}_mfma", **matrix, **skinny
        ),
        "norm_kernel": norm,
        "norm_general_kernel": norm,
        "norm_backward_kernel": backward,
        "softmax_kernel": rows_of_softmax,
        "softmax_long_kernel": rows_of_softmax,
        "rmsnorm_dweight_kernel": backward,
    }[kernel]

    def run():
        hip.problem = None
        call()

    hip.ran, family = set(), kernel.split(",")[0]
    for each in instances(hip, family):
        hip.kernels[hip.arch][each].decoded = {}
    run()  # as it is
    (name,) = hip.ran & instances(hip, family)
    assert (name in whole_stages(hip)) == kernel.endswith("whole")
    return run, name


MUTATED = (
    *("gemm_ieee_kernel", "gemm_mfma_kernel", "skinny_ieee_kernel", "skinny_mfma_kernel", "norm_kernel"),
    *("norm_general_kernel", "norm_backward_kernel", "softmax_kernel", "softmax_long_kernel"),
    *("gemm_mfma_kernel, whole", "skinny_mfma_chain_kernel", "rmsnorm_dweight_kernel"),
)


def mutations(*kernels):
    """Those of matrix cores on every architecture; the others, of one source without a line for either, on one."""
    cases = [(arch, kernel) for arch in ARCHS for kernel in kernels if arch == "gfx90a" or "mfma" in kernel]
    return pytest.mark.parametrize(("hip", "kernel"), cases, indirect=["hip"])


@contextlib.contextmanager
def mutated(hip, name, change):
    """While active, the kernel of this name runs other code: change(text, address) -> text."""
    kernel = hip.kernels[hip.arch][name]
    saved = kernel.code, kernel.decoded
    kernel.code, kernel.decoded = {at: change(text, at) for at, text in kernel.code.items()}, {}
    try:
        assert kernel.code != saved[0], "nothing to change"
        yield
    finally:
        kernel.code, kernel.decoded = saved


def fails(call):
    """Whether it raises, from other bits or from an access outside."""
    try:
        call()
    except (AssertionError, IndexError, NotImplementedError):
        return True
    return False


@mutations(*MUTATED[:-1])  # the last one's waves meet from 2048 rows on, which take long here
def test_a_removed_barrier_is_seen(hip, kernel):
    run, name = problem_for(hip, kernel)
    for hip.order in (None, in_reverse):
        if hip.order:
            run()
        with mutated(hip, name, lambda text, _: "s_nop 0" if text == "s_barrier" else text):
            if fails(run):
                return
    raise AssertionError("without its barriers it gives the same")


@mutations(*MUTATED)
def test_a_removed_wait_is_seen(hip, kernel):
    """Without its waits for memory, or for LDS and scalars; with each of them for one access fewer than it should; and
    without those alone that let a barrier order what waves write to LDS."""
    run, name = problem_for(hip, kernel)
    code, weaker = hip.kernels[hip.arch][name].code, {}
    for counter in ("vmcnt", "lgkmcnt"):
        weaker[f"no {counter}"] = {at: re.sub(rf"{counter}\(\d+\)", f"{counter}(99)", code[at]) for at in code}
        weaker[f"one {counter} fewer"] = {
            at: re.sub(rf"{counter}\((\d+)\)", lambda found: f"{counter}({int(found[1]) + 1})", code[at])  # noqa: B023
            for at in code
        }
    order = sorted(code)
    before = {order[i - 1] for i in range(1, len(order)) if code[order[i]] == "s_barrier"}
    # In two kernels what one wave writes there another reads a stage later, when it has waited for other reasons.
    if kernel not in ("skinny_ieee_kernel", "rmsnorm_dweight_kernel"):
        assert any("lgkmcnt" in code[at] for at in before)
        weaker["no lgkmcnt before a barrier"] = {
            at: re.sub(r"lgkmcnt\(\d+\)", "lgkmcnt(99)", code[at]) if at in before else code[at] for at in code
        }
    for what, changed in weaker.items():
        with mutated(hip, name, lambda text, at: changed[at]):  # noqa: B023
            seen = fails(run)
            if not seen:
                hip.order = in_reverse
                seen = fails(run)
                hip.order = None
        assert seen, f"{kernel} with {what} gives the same"


@mutations(*MUTATED)
def test_a_wrong_lane_is_seen(hip, kernel):
    """One instruction that turns a thread's number into a place, off by one bit."""
    run, name = problem_for(hip, kernel)
    reached = {hip.kernels[hip.arch][name].code[at] for at in hip.kernels[hip.arch][name].decoded}
    targets = [text for text in sorted(reached) if re.fullmatch(r"v_(lshlrev|lshrrev|and)_b32_e32 v\d+, \d+, v0", text)]
    assert len(targets) >= 2, "instructions on the thread's number were sought"
    unseen = []
    for target in targets:
        operation, destination, count, source = target.replace(",", "").split()
        changed = int(count) ^ (1 << int(count).bit_length() - 1 if "and" in operation else 1)
        wrong = f"{operation} {destination}, {changed}, {source}"
        with mutated(hip, name, lambda text, _: wrong if text == target else text):  # noqa: B023
            if not fails(run):
                unseen.append(f"{wrong} for {target}")
    # Its test of an address, by then in the register of the thread's number, could let 8 bytes pass for 16.
    unimportant = 1 if kernel == "gemm_mfma_kernel, whole" else 0
    assert len(unseen) <= unimportant and len(unseen) < len(targets), unseen
    run()


# ---- The host's side -------------------------------------------------------------------------------------------------


def operations(hip, device=0, stream=0):
    """{name: a call of each entry point, and what it writes}."""
    a, b, x, weight = normal(5, 16), normal(16, 7), normal(4, 40), normal(40)
    out, y, rstd, dx, dweight = (np.full(s, 7, np.float32) for s in ((5, 7), (4, 40), (4,), (4, 40), (40,)))
    da, db, skinny, half = (np.full(shape, 7, np.float32) for shape in ((5, 16), (16, 7), (5, 7), (5, 7)))
    dc, given_rstd = normal(5, 7, seed=1), np.ones(4, np.float32)
    in_bf16 = [x.astype(DTYPES["bf16"]) for x in (a, b)]
    soft, log_prob, index = np.full((4, 40), 7, np.float32), np.full(4, 7, np.float32), np.array([0, 39, 5, 7])
    y_row, bytes_of_x = normal(4, 40, seed=1), np.full((1, 40), 7, np.uint8).view(E4M3)
    end, (in_group, in_scaled_group) = np.int32([5]), (np.full((5, 7), 7, np.float32) for _ in range(2))
    size = ffi.new("uint64_t *")
    assert hip.lib.pydet_rmsnorm_backward_workspace(4, 40, size) == 0
    workspace = np.zeros(size[0] // 4 + 8, np.float32)
    start = ffi.cast("void *", workspace.ctypes.data + -workspace.ctypes.data % 16)
    backward = capi.options("pydet_rmsnorm_backward_options", workspace=start, workspace_size=size[0])
    dout8, q8, k8, v8, y8 = (normal(4, 8, seed=i) for i in range(5))
    lse, seed, up, dy = np.zeros(4, np.float32), np.arange(4), normal(4, 40, seed=2), normal(4, 40, seed=3)
    position, token, values, number = seed + 1, np.full(4, 7), np.full((4, 3), 7, np.float32), np.full((4, 3), 7)
    out8, dq8, dk8, dv8 = (np.full((4, 8), 7, np.float32) for _ in range(4))
    where = {"device": device, "stream": stream}
    gemm_options = lambda: capi.options("pydet_gemm_options")
    return {
        "gemm": (lambda: hip.call("pydet_gemm", gemm_options(), a, b, None, out, **where), [out]),
        "gemm in bf16": (  # whose arithmetic, AUTO, is the device's
            lambda: hip.call("pydet_gemm", gemm_options(), *in_bf16, None, half, **where),
            [half],
        ),
        "gemm_da": (lambda: hip.call("pydet_gemm_da", gemm_options(), dc, b, da, **where), [da]),
        "gemm_db": (lambda: hip.call("pydet_gemm_db", gemm_options(), a, dc, db, **where), [db]),
        "skinny_gemm": (
            lambda: hip.call(
                "pydet_skinny_gemm",
                capi.options("pydet_skinny_gemm_options"),
                a,
                np.ascontiguousarray(b.T),
                None,
                skinny,
                **where,
            ),
            [skinny],
        ),
        "rmsnorm": (
            lambda: hip.call(
                "pydet_rmsnorm", capi.options("pydet_rmsnorm_options"), x, None, weight, y, rstd, None, **where
            ),
            [y, rstd],
        ),
        "rmsnorm_backward": (
            lambda: (
                workspace,
                hip.call("pydet_rmsnorm_backward", backward, x, x, weight, given_rstd, None, dx, dweight, **where),
            )[1],
            [dx, dweight],
        ),
        "layernorm": (
            lambda: hip.call(
                "pydet_layernorm",
                capi.options("pydet_layernorm_options"),
                *(x, None, weight, None, y, None, rstd, None),
                **where,
            ),
            [y, rstd],
        ),
        "layernorm_backward": (
            lambda: hip.call(
                "pydet_layernorm_backward",
                capi.options("pydet_layernorm_backward_options"),
                *(x, x, weight, given_rstd, given_rstd, None, dx, None, None),
                **where,
            ),
            [dx],
        ),
        "softmax": (
            lambda: hip.call("pydet_softmax", capi.options("pydet_softmax_options"), x, soft, **where),
            [soft],
        ),
        "softmax_backward": (
            lambda: hip.call("pydet_softmax_backward", capi.options("pydet_softmax_options"), x, y_row, dx, **where),
            [dx],
        ),
        "scaled_gemm": (
            lambda: hip.call(
                "pydet_scaled_gemm",
                capi.options("pydet_scaled_gemm_options", k_chunk=128, arithmetic=ARITHMETIC["ieee"]),
                *(a.astype(E4M3), None, transposed(b).astype(E4M3), None, None, out),
                **where,
            ),
            [out],
        ),
        "grouped_gemm": (
            lambda: hip.call(
                "pydet_grouped_gemm",
                capi.options("pydet_grouped_gemm_options"),
                *(a, b[None], None, None, end, in_group),
                **where,
            ),
            [in_group],
        ),
        "scaled_grouped_gemm": (
            lambda: hip.call(
                "pydet_scaled_grouped_gemm",
                capi.options("pydet_scaled_grouped_gemm_options", k_chunk=128, arithmetic=ARITHMETIC["ieee"]),
                *(a.astype(E4M3), None, transposed(b).astype(E4M3)[None], None, None, None, end, in_scaled_group),
                **where,
            ),
            [in_scaled_group],
        ),
        "quantize": (
            lambda: hip.call(
                "pydet_quantize",
                capi.options("pydet_quantize_options"),
                *(x[:1], bytes_of_x, rstd[:1, None], None, None),
                **where,
            ),
            [bytes_of_x.view(np.uint8), rstd[:1]],
        ),
        "attention": (
            lambda: hip.call(
                "pydet_attention",
                capi.options("pydet_attention_options"),
                *(x[None, None] for x in (q8, k8, v8, out8)),
                None,
                **where,
            ),
            [out8],
        ),
        "attention_backward": (
            lambda: hip.call(
                "pydet_attention_backward",
                capi.options("pydet_attention_backward_options"),
                *(x[None, None] for x in (dout8, q8, k8, v8, y8)),
                lse[None, None],
                *(x[None, None] for x in (dq8, dk8, dv8)),
                **where,
            ),
            [dq8, dk8, dv8],
        ),
        "activation": (
            lambda: hip.call("pydet_activation", capi.options("pydet_activation_options"), x, up, y, **where),
            [y],
        ),
        "activation_backward": (
            lambda: hip.call(
                "pydet_activation_backward", capi.options("pydet_activation_options"), dy, x, up, dx, None, **where
            ),
            [dx],
        ),
        "sample": (
            lambda: hip.call(
                "pydet_sample",
                capi.options("pydet_sample_options", temperature=1, top_p=1),
                *(x, seed, position, token, None, None),
                **where,
            ),
            [token],
        ),
        "topk": (
            lambda: hip.call("pydet_topk", capi.options("pydet_topk_options"), x, values, number, **where),
            [values, number],
        ),
        "embedding": (
            lambda: hip.call("pydet_embedding", capi.options("pydet_embedding_options"), x, seed, y, **where),
            [y],
        ),
        "embedding_backward": (
            lambda: hip.call(
                "pydet_embedding_backward",
                capi.options("pydet_embedding_backward_options", workspace=start, workspace_size=size[0]),
                *(x, seed, dx),
                **where,
            ),
            [dx],
        ),
        "log_prob": (
            lambda: hip.call("pydet_log_prob", capi.options("pydet_log_prob_options"), x, index, log_prob, **where),
            [log_prob],
        ),
    }


def test_no_device(hip):
    hip.start(hip.arch, devices=0)
    count = ffi.new("int32_t *", 9)
    assert hip.lib.pydet_device_count(ROCM, count) == 0 and count[0] == 0
    for name, (call, outputs) in operations(hip).items():
        assert call() == NO_DEVICE, name
        assert all((x == 7).all() for x in outputs) and not hip.launches
        assert "ROCm device 0" in hip.sentence(), hip.sentence()


def built_for():
    """The architectures whose code the library holds."""
    return re.search(rb'HIP_ARCHS="([^"]*)"', LIBRARY.read_bytes())[1].decode()


@pytest.mark.parametrize("arch", ["gfx803", "gfx94", "gfx1201"])
def test_an_architecture_without_kernels(library, arch):
    """The sentence says what the GPU is, and by which setting a library for it is built."""
    library.start(arch)
    for name, (call, outputs) in operations(library).items():
        if arch in built_for().split():
            continue
        assert call() == UNSUPPORTED and all((x == 7).all() for x in outputs) and not library.launches
        op, said = name.split(" ")[0], f'this library was built with HIP_ARCHS="{built_for()}", which does not name it'
        assert library.sentence() == f"{op}: ROCm device 0 is a {arch}, and {said}"


def test_an_arithmetic_of_other_matrix_cores(hip):
    a, out = normal(16, 16, dtype="bf16"), np.full((16, 16), 7, np.float32)
    kind, other = ARCHS[hip.arch], {"cdna2": "cdna3", "cdna3": "cdna2"}[ARCHS[hip.arch]]
    options = capi.options("pydet_gemm_options", arithmetic=ARITHMETIC[other])
    assert hip.call("pydet_gemm", options, a, a, None, out) == UNSUPPORTED and (out == 7).all()
    said = f"no kernel for arithmetic {other} on bfloat16 inputs on ROCm device 0; it has {kind}, ieee"
    assert hip.sentence() == f"gemm: {said}"


def test_a_device_is_asked_once(hip):
    """hipGetDeviceProperties, which takes microseconds, in whatever calls follow."""
    hip.start(hip.arch, devices=2)
    hip.executes = False
    for device in (1, 0, 1):
        for name, (call, _) in operations(hip, device=device).items():
            assert call() == 0, name
    assert hip.fake.fakehip_log().decode().split().count("hipGetDeviceProperties") == 2


def test_more_blocks_than_one_side_of_a_grid_holds(hip):
    """HIP counts a side's threads in 32 bits: a thousand million rows of rmsnorm, four threads a row, need more."""
    hip.executes = False
    rows, half = (1 << 30) + 5, DTYPES["fp16"]
    unreserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: addresses that nobody touches
    x, y = (np.frombuffer(mmap.mmap(-1, rows * 16, unreserved), half).reshape(rows, 8) for _ in range(2))
    rstd = np.empty(rows, np.float32)
    options = capi.options("pydet_rmsnorm_options", eps=1e-5)
    hip.check("pydet_rmsnorm", options, x, None, None, y, rstd, None)
    ((_, shape, *_),) = hip.launches
    in_block = shape[3] // 4
    assert shape[0] * shape[1] * in_block >= rows and shape[0] * shape[3] < 1 << 32
    assert (shape[0] - 1) * shape[1] * in_block < rows and shape[1] > 1


def test_a_grid_in_rows_is_the_same(hip):
    """The number of a block, where the grid that the library asked for is given to the kernel in another shape."""
    x, weight = normal(150, 40), normal(40)
    want = rmsnorm(hip, x, weight, None, CPU)
    for columns in (1, 2, 4):
        hip.grid = lambda grid: [columns, -(-grid[0] // columns), 1]  # noqa: B023
        for ours, theirs in zip(rmsnorm(hip, x, weight, None, ROCM, "hip_rmsnorm_held"), want, strict=True):
            assert_same_bits(ours, theirs, f"{columns} columns of blocks on {hip.arch}")
        assert hip.launches[-1][1][0] > 4


def test_host_memory_is_refused(hip):
    """Said to be on the device: by the sentence, for every tensor of every operation."""
    for name, (call, outputs) in operations(hip).items():
        hip.executes = False
        assert call() == 0
        tensors = set(hip.tensors)
        assert len(tensors) >= (2 if name == "softmax" else 3)
        for hip.host in tensors:
            hip.launches.clear()
            assert call() == INVALID_DEVICE, name
            assert f"{name.split(' ')[0]}: the data at {hip.host:#x} lie on the host" in hip.sentence()
            assert all((x == 7).all() for x in outputs) and not hip.launches, name
        hip.start(hip.arch)


def test_launches_go_to_the_stream_and_device_they_were_given(hip):
    hip.start(hip.arch, devices=3)
    for name, (call, outputs) in operations(hip, device=2, stream=0x1230).items():
        hip.fake.fakehip_set_device(1)
        hip.launches.clear()
        assert call() == 0, (name, hip.sentence())
        assert hip.launches and all(not (x == 7).all() for x in outputs), name
        for _, _, _, stream, device in hip.launches:
            assert (stream, device) == (0x1230, 2), name
        assert hip.fake.fakehip_device() == 1, f"{name} leaves another device current"


# Of which the second may fail when the first has run.
TWO_LAUNCHES = ("rmsnorm_backward", "attention_backward", "embedding_backward")


@pytest.mark.parametrize("hip", ["gfx90a"], indirect=True)  # the host's code is one
def test_every_call_of_the_runtime_may_fail(hip):
    for name in operations(hip):
        hip.start(hip.arch, devices=2)
        call, outputs = operations(hip, device=1)[name]
        assert call() == 0
        calls = hip.fake.fakehip_calls()
        log = hip.fake.fakehip_log().decode().split()
        assert "hipLaunchKernel" in log and len(log) == calls
        launches = log.count("hipLaunchKernel")
        asked = log[: log.index("hipLaunchKernel")].count("hipFuncGetAttributes")
        assert asked >= launches - 1, f"{name}: {launches} launches, of which {asked} were asked for before the first"
        wanted = [x.copy() for x in outputs]
        for i in range(calls):
            hip.start(hip.arch, devices=2, fail_at=i)
            call, outputs = operations(hip, device=1)[name]
            status = call()
            launched = bool(hip.launches)
            what = f"{name}, call {i} ({log[i]}): status {status}, {hip.sentence()!r}"
            if status == 0:  # what only tunes or checks, or the way back to the caller's device after the launch
                tunes = "hipDeviceGetAttribute", "hipGetDeviceProperties", "hipPointerGetAttributes"
                assert log[i] in (*tunes, "hipSetDevice"), what
                assert launched, what
                for ours, want in zip(outputs, wanted, strict=True):
                    assert_same_bits(ours, want, what)
            else:
                assert status in (NO_DEVICE, DEVICE_ERROR, UNSUPPORTED), what
                if launched:  # what else may fail is asked for before the first launch
                    assert log[i] == "hipLaunchKernel" and name in TWO_LAUNCHES, what
                else:
                    assert all((x == 7).all() for x in outputs), what
                said = "made to fail" in hip.sentence() or "does not say what it is" in hip.sentence()
                assert said or status == UNSUPPORTED, what
            hip.fake.fakehip_reset(2, f"{hip.arch}:sramecc+".encode(), -1)
            call, outputs = operations(hip, device=1)[name]
            assert call() == 0, f"after {what}: {hip.sentence()}"
            for ours, want in zip(outputs, wanted, strict=True):
                assert_same_bits(ours, want, what)


def test_every_registered_kernel_has_code(hip):
    registered = {hip.fake.fakehip_kernel(i).decode() for i in range(hip.fake.fakehip_kernels())}
    assert registered and registered <= set(hip.kernels[hip.arch])


# ---- From Python -----------------------------------------------------------------------------------------------------


class OnRocm(interop.Producer):
    """An array that says by DLPack that it is on ROCm device 1."""

    def __init__(self, hip, array):
        super().__init__(capi.Tensor(array, device=(ROCM, 1)))
        self.hip, self.array = hip, array
        hip.own(array)


class Rocm(frameworks.Framework):
    """The framework of these arrays, as the package knows those of others."""

    name, number = "arrays on ROCm", 9

    def stream(self, like, device_type, device_id):
        return 0x1230

    def allocate(self, like, shape, index, op):
        return OnRocm(like.hip, np.full(shape, 7, frameworks.numpy_dtype(index)))


@pytest.fixture
def rocm(hip, monkeypatch):
    """Makes an array on ROCm; the package finds this library and this framework."""
    hip.start(hip.arch, devices=2)
    monkeypatch.setenv("PYDET_LIBRARY", str(LIBRARY))
    monkeypatch.setitem(frameworks.FRAMEWORKS, (__name__, "OnRocm"), Rocm)
    yield lambda array: OnRocm(hip, array)
    hooks.exchange.libraries[hooks.constants.PYDET_EXCHANGE_ROCM] = hooks.ffi.NULL


def test_from_python(hip, rocm):
    """Each operation by its Python function, on the framework's stream, with memory that the framework allocates."""
    half, kind = {"dtype": "bf16"}, ARCHS[hip.arch]
    a, b, dc = normal(5, 16, **half), normal(16, 24, **half), normal(5, 24, **half)
    x, residual, weight = normal(4, 40, **half), normal(4, 40, seed=1, **half), normal(40)
    rstd = pydet.rmsnorm(x, weight, eps=1e-5)[1]
    scaled = {"a_scale": np.ones((5, 1), np.float32), "b_scale": np.ones((1, 24), np.float32), "arithmetic": "ieee"}
    calls = {
        "gemm": (pydet.gemm, (a, b), {"out_dtype": "float32"}),
        "gemm_da": (pydet.gemm_da, (dc, b), {}),
        "gemm_db": (pydet.gemm_db, (a, dc), {"out_dtype": "float32", "k_chunk": 16}),
        "skinny_gemm": (pydet.skinny_gemm, (a, np.ascontiguousarray(b.T)), {}),
        "skinny_gemm, fast": (pydet.skinny_gemm, (a, np.ascontiguousarray(b.T)), {"mode": "fast"}),
        "rmsnorm": (pydet.rmsnorm, (x, weight), {"eps": 1e-5, "residual": residual}),
        "rmsnorm_backward": (pydet.rmsnorm_backward, (x, residual, weight, rstd), {}),
        "layernorm": (pydet.layernorm, (x, weight), {"eps": 1e-5, "residual": residual}),
        "layernorm_backward": (pydet.layernorm_backward, (x, residual, weight, rstd, rstd), {}),
        "softmax": (pydet.softmax, (x,), {}),
        "log_softmax_backward": (pydet.log_softmax_backward, (x, residual), {}),
        "scaled_gemm": (pydet.scaled_gemm, (a.astype(E4M3), b.astype(E5M2)), scaled),
        "quantize": (pydet.quantize, (x,), {"granularity": "block", "transposed": True}),
    }
    for name, (function, arguments, options) in calls.items():
        has_arithmetic = "gemm" in name and "scaled" not in name
        on_cpu = {**options, "arithmetic": kind} if has_arithmetic else options
        want = function(*arguments, **on_cpu)
        hip.launches.clear()
        hip.fake.fakehip_set_device(0)
        there = {key: rocm(value) if isinstance(value, np.ndarray) else value for key, value in options.items()}
        got = function(*map(rocm, arguments), **there)
        assert not hip.problem, (name, hip.problem)
        results = [x if isinstance(x, tuple) else (x,) for x in (got, want)]
        for ours, theirs in zip(*results, strict=True):
            assert isinstance(ours, OnRocm)
            assert_same_bits(ours.array, theirs, f"{name} on {hip.arch}")
        assert hip.launches and {(stream, device) for *_, stream, device in hip.launches} == {(0x1230, 1)}, name
        assert hip.fake.fakehip_device() == 0
    with pytest.raises(pydet.Error, match="does not take this problem"):
        pydet.gemm(rocm(a), rocm(b), kernel=f"hip_gemm_{kind}_mfma_64x64", arithmetic="ieee")


@pytest.mark.parametrize("arch", ["gfx90a"])
def test_the_tests_for_a_device_work(library, need, tmp_path, arch):
    """test_hip_device.py on the stand-in runtime, by hip-python as on a GPU, in a process that has no other runtime."""
    need(importlib.util.find_spec("hip"), "hip", "hip-python is not installed")
    runtime = fakehip.build(LIBRARY, tmp_path)
    (tmp_path / "libamdhip64.so").symlink_to(runtime.name)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYDET_HIP_STAND_IN": arch, "PYDET_LIBRARY": str(LIBRARY)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/test_hip_device.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    skipped = {line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith("SKIPPED")}
    assert passed >= 25 and skipped <= {"the interpreter would take minutes"}, done.stdout
