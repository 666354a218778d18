"""CUDA's kernels on a machine without a GPU: their sources as C++, threads as fibers (emulated/). Of those on tensor
cores the ones of attention by mma.sync, each of which is there one step of sm90.

Each is forced by name and held to the CPU's bits. What the interpreter of AMD's machine code cannot see is seen here:
kernels that CUDA alone has, warps of 32, copies that nobody has waited for, clusters. nvcc's code for them is not.

PYDET_LIBRARY names the library that `make cuda-emulated` links.
"""

import ctypes
import functools
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest

import attention_cases
import capi
import cases
import interop
import pydet
import test_activation as activations
import test_adamw as adamws
import test_embedding as embeddings
import test_fold as folds
import test_grouped_gemm as groups
import test_head as heads_of_models
import test_linear_cross_entropy as losses
import test_rmsnorm_heads as heads
import test_rmsnorm_quantize as quantized
import test_rotary as rotary
import test_sample as samples
import test_scaled_gemm as scaled
import test_scaled_grouped_gemm as scaled_groups
import test_scan as scans
import test_scan_backward as scan_gradients
import xla_frames as frames
from cases import DTYPES, assert_same_bits, data
from conftest import run_python
from pydet import frameworks
from reference_activation import KINDS
from test_cuda import UNSUPPORTED, each, small_products

pytestmark = pytest.mark.skipif(
    "emulated" not in os.environ.get("PYDET_LIBRARY", ""), reason="PYDET_LIBRARY is not that of make cuda-emulated"
)


# Tokens, rows of a table, columns: many tokens of an id, around the groups of a thread's ring, are of whole vectors.
EMBEDDED = [(0, 3, 8), (1, 1, 5), (33, 40, 40), (2049, 5, 1), (700, 511, 130), (513, 513, 1030), (3000, 1030, 9)]
EMBEDDED += [
    (64, 3000, 8),
    (2049, 5, 40),
    (1000, 2, 1032),
    *((tokens, 1, 16) for tokens in (7, 8, 15, 16, 17, 23, 24, 33)),
]


class Memory(interop.Producer):
    """Memory of the CPU that is said to be a device's."""

    def __init__(self, array):
        super().__init__(capi.Tensor(array, device=(2, 0)))


class Framework(frameworks.Framework):
    name, number = "memory", 9

    def stream(self, like, device_type, device_id):
        return 0

    def allocate(self, like, shape, index, op):
        dtype = frameworks.numpy_dtype(index)
        return Memory(np.full(int(np.prod(shape)) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(shape))


class Emulated:
    """pydet's operations by one kernel; by the CPU's where it refuses."""

    def __init__(self, kernel):
        self.kernel, self.taken = kernel, 0

    def call(self, operation, *operands, **options):
        def moved(value):
            if isinstance(value, (tuple, list)):
                return type(value)(map(moved, value))
            return Memory(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value

        function = getattr(pydet, operation)
        back = lambda value: value.tensor.array if isinstance(value, Memory) else value
        try:
            given = {name: moved(value) for name, value in options.items()}
            results = function(*map(moved, operands), kernel=self.kernel, **given)
        except pydet.Error as error:
            if error.status != UNSUPPORTED:
                raise
            return function(*operands, **options)
        self.taken += 1
        return tuple(map(back, results)) if isinstance(results, tuple) else back(results)

    def __getattr__(self, operation):
        if operation.startswith("_"):
            raise AttributeError(operation)
        return functools.partial(self.call, operation)


@pytest.fixture
def device(kernel):
    key = __name__, "Memory"
    frameworks.FRAMEWORKS[key] = Framework
    yield Emulated(kernel.name)
    del frameworks.FRAMEWORKS[key]
    interop.made.clear()


# ---- Attention -------------------------------------------------------------------------------------------------------


def skip_others(kernel):
    if kernel.arithmetic != "ieee" and not kernel.name.endswith("sm90_mma"):
        pytest.skip(f"{kernel.name} is one of other tensor cores")


def shared_out(problems, kernel, dtype):
    """All; steps of tensor cores take long here, so their two types share them out."""
    return [*problems] if kernel.arithmetic == "ieee" else [*problems][dtype == "fp16" :: 2]


@each("attention")
def test_attention(device, kernel, dtype):
    """The problems that the CPU's kernels are held to."""
    skip_others(kernel)
    problems = shared_out(attention_cases.problems(dtype), kernel, dtype)
    for name, operation, arguments, options in problems:
        want = attention_cases.run(pydet, operation, arguments, options, kernel.arithmetic)
        got = attention_cases.run(device, operation, arguments, options, kernel.arithmetic)
        for part, ours, theirs in zip(("out", "lse"), got, want, strict=True):
            assert_same_bits(ours, theirs, f"{name}: {part}")
    assert device.taken == len(problems) > 20


@each("attention")
def test_attention_tiles(device, kernel, dtype):
    """One less, equal, one more: rows of warps and tiles, halves and blocks of keys, folded segments; values of
    keys that some rows do not see."""
    if not kernel.name.endswith("sm90_mma"):
        pytest.skip("of other tiles")
    extents = [(31, 63), (32, 64), (33, 65), (63, 127), (64, 128), (65, 129), (127, 191), (129, 193), (16, 257)]
    widths = [(64, 64), (128, 128), (128, 128), (192, 128), (256, 256), (72, 96), (40, 8), (128, 128), (136, 136)]
    for seed, ((queries, keys), (d, e)) in enumerate([*zip(extents, widths)][dtype == "fp16" :: 2]):
        shape = attention_cases.Shape(heads=2, groups=1 + seed % 2, queries=queries, keys=keys, d=d, e=e)
        q, k, v = attention_cases.operands(shape, dtype, seed=seed)
        if seed % 2:
            v[:, :, -3], v[:, :, keys // 2, 1] = np.inf, np.nan
        given = {"causal": seed % 3 < 2, "kv_chunk": 128, "window": (None, (70, 5))[seed % 4 == 3]}
        given |= {"arithmetic": kernel.arithmetic, "return_lse": True}
        want, got = (f.attention(q, k, v, **given) for f in (pydet, device))
        for part, ours, theirs in zip(("out", "lse"), got, want, strict=True):
            assert_same_bits(ours, theirs, f"{shape} {given}: {part}")
    assert device.taken == len(extents) // 2 + (dtype == "bf16")


@each("attention_backward")
def test_attention_backward(device, kernel, dtype):
    """Likewise: every option, dense and packed, of a result each in turn."""
    skip_others(kernel)
    problems = shared_out(attention_cases.backward_problems(dtype), kernel, dtype)
    for name, *problem in problems:
        want = attention_cases.run_backward(pydet, *problem, kernel.arithmetic)
        got = attention_cases.run_backward(device, *problem, kernel.arithmetic)
        same_gradients(got, want, name)
    assert device.taken == len(problems) > 12


def same_gradients(got, want, what):
    for name, one, other in zip(("dq", "dk", "dv", "dsinks"), got, want):
        if other is not None:
            assert_same_bits(np.ascontiguousarray(one), np.ascontiguousarray(other), f"{what}: {name}")


def backward_of(shape, dtype, arithmetic, seed, **given):
    """dout, q, k, v, and out and lse as the CPU gives them."""
    q, k, v = attention_cases.operands(shape, dtype, seed=seed)
    out, lse = pydet.attention(q, k, v, arithmetic=arithmetic, return_lse=True, **given)
    return data("normal", out.shape, q.dtype, seed + 1), q, k, v, out, lse


@each("attention_backward")
def test_attention_backward_at_edges(device, kernel, dtype):
    """One less, equal, one more: steps, what is walked at a time, tiles, blocks, columns of a block."""
    skip_others(kernel)
    extents = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 161, 257]
    widths = itertools.cycle([(8, 8), (64, 64), (72, 64), (24, 128), (128, 16), (136, 40), (16, 136), (264 - 8, 8)])
    for seed, (extent, (d, e)) in enumerate(zip(extents, widths)):
        other = 1 + seed * 7 % 30
        queries, keys = (extent, other) if seed % 2 else (other, extent)
        shape = attention_cases.Shape(heads=1 + seed % 3, queries=queries, keys=keys, d=d, e=e)
        given = {"causal": seed % 4 < 2, "window": (None, (40, 7))[seed % 5 == 0]}
        arguments = backward_of(shape, dtype, kernel.arithmetic, seed, **given)
        want, got = (f.attention_backward(*arguments, arithmetic=kernel.arithmetic, **given) for f in (pydet, device))
        same_gradients(got, want, f"{shape} {given}")
    assert device.taken == len(extents)


@each("attention_backward")
def test_attention_backward_without_workspace(device, kernel, dtype, monkeypatch):
    """Which the C interface may be called without: the same bits."""
    skip_others(kernel)
    shape = attention_cases.Shape(heads=4, groups=2, queries=40, keys=70)
    sinks = np.float32([1, -2, 0, 3])
    arguments = backward_of(shape, dtype, kernel.arithmetic, 3, causal=True, sinks=sinks)
    want = pydet.attention_backward(*arguments, arithmetic=kernel.arithmetic, causal=True, sinks=sinks)
    found = [np.zeros_like(x) for x in want]
    tensors = [capi.Tensor(x, device=(2, 0)) for x in (*arguments, *found[:3])]
    ends = [capi.Tensor(x, device=(2, 0)) for x in (sinks, found[3])]
    arithmetic = getattr(capi.lib, f"PYDET_{kernel.arithmetic.upper()}")
    given = capi.options(
        "pydet_attention_backward_options",
        arithmetic=arithmetic,
        kernel=kernel.name,
        causal=1,
        sinks=ends[0].c,
        dsinks=ends[1].c,
    )
    status = capi.lib.pydet_attention_backward(capi.ffi.NULL, *(x.c for x in tensors), given)
    assert status == 0, capi.last_error()
    same_gradients(found, want, "without a workspace")


# ---- Norms and softmax -----------------------------------------------------------------------------------------------

# Around the teams of all kernels: whole vectors, an element less and more.
WIDTHS = [1, 2, 7, 8, 9, 31, 32, 33, 40, 57, 63, 64, 65, 72, 120, 121, 127, 128, 129, 136, 248, 255, 256, 257, 264]
WIDTHS += [319, 321, 383, 385, 504, 511, 512, 513, 520, 767, 769, 1000, 1016, 1023, 1024, 1025, 1032, 1535, 1537, 2040]
WIDTHS += [2047, 2048, 2049, 2056, 3071, 3073, 4088, 4095, 4096, 4097, 4104, 6143, 6145, 8184, 8191, 8192, 8193, 8200]
WIDTHS += [5119, 5121, 10240, 10248, 12287, 12288, 12289, 12296, 16376, 16383, 16384, 16385, 16392, 33001]
SHAPES = [(m if m * n < 40000 else 1, n) for m, n in zip(itertools.cycle([1, 3, 17, 2, 33]), WIDTHS)]
# Around chains, groups and blocks of rows, and what is given to teams of its own.
SHAPES += zip([15, 16, 63, 65, 255, 257, 513, 1025, 530], itertools.cycle([72, 8, 33, 136]))
SHAPES += itertools.product([17, 33, 130, 64], [8, 64, 72, 128])
# Where the rows of each operand begin and how far behind another, in elements: as vectors, all alike, each otherwise.
ALIGNED, PLACES = [(0, 0)], [[(3, 8)], [(0, 8)], [(1, 0)], [(0, 3), (5, 0), (1, 2), (2, 7)], [(3, 3)]]

# Around the teams of kernels for rows behind each other, and the rows that a warp has.
ENDS = [48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 288, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560]
ADJACENT = [33] + [end + more for end in (*ENDS, 3072, 4096) for more in (-1, 0, 1)]
ADJACENT = [(m if m * n < 40000 else 2, n) for m, n in zip(itertools.cycle([1, 3, 17, 2, 33, 8, 9]), ADJACENT)]
# Around what the clusters of `softmax_head` hold; what it does not take.
OF_HEAD = [16384, 16392, 32760, 32768, 32776, 40001, 131072, 131080, 155648, 155656]


def placed(arrays, places):
    """Copies at these places, in memory that is 7 elsewhere."""
    copies = []
    for array, (start, gap) in zip(arrays, itertools.cycle(places)):
        m, n = array.shape
        count = start + m * (n + gap) + 8
        memory = np.zeros(count * array.itemsize + 16, np.uint8)
        memory = memory[-memory.ctypes.data % 16 :][: count * array.itemsize].view(array.dtype)
        memory[...] = 7
        copies.append(memory[start : start + m * (n + gap)].reshape(m, n + gap)[:, :n])
        copies[-1][...] = array
    return copies


def check(device, dtype, call, rows):
    """call(pydet or the device, `rows` operands, out, index): its results, and what is around `out`, are the CPU's."""
    adjacent, of_head = device.kernel.endswith("adjacent"), device.kernel.endswith("softmax_head")
    shapes = [(index % 2 + 1, n) for index, n in enumerate(OF_HEAD * 3)] if of_head else SHAPES
    for index, shape in enumerate(ADJACENT * 3 if adjacent else shapes):
        if shape[0] > 300 and device.kernel.endswith(("long", "staged")):
            continue  # each row is a block
        if index % 3 != [*DTYPES].index(dtype):
            continue  # the types share the shapes out
        index //= 3
        if (
            "softmax" in device.kernel
            and ("cluster" in device.kernel or "spread" in device.kernel)
            and (shape[0] > 3 or index % 5 > 2)
        ):
            continue  # each row is 2048 threads
        kind = ["normal", "wide", "normal", "specials"][index % 4]
        arrays = [data(kind, shape, DTYPES[dtype], index + i) for i in range(rows)] + [np.zeros(shape, DTYPES[dtype])]
        places = ALIGNED if shape[1] % 8 == 0 and index % 4 else PLACES[index % len(PLACES)]
        if adjacent or of_head:
            places = [(index % 2 * (index % 8) * adjacent, 0)]
        found = []
        for where in (pydet, device):
            *operands, out = placed(arrays, places)
            found.append([*call(where, *operands, out, index), capi.owner(out)])
        for number, (want, got) in enumerate(zip(*found, strict=True)):
            if want is not None:
                assert_same_bits(np.asarray(got), np.asarray(want), f"result {number} of {shape} {kind}, case {index}")
    assert device.taken


def vector(n, index, dtype=None):
    return data("normal", (n,), dtype or list(DTYPES.values())[index % 3], index)


@each("softmax")
def test_softmax(device, kernel, dtype):
    def call(on, x, out, index):
        columns = (
            np.random.default_rng(index).integers(-1, x.shape[1] + 1, len(x)).astype([np.int64, np.int32][index % 2])
        )
        gradient = vector(len(x), index, np.float32)
        yield on.softmax(x, out=out)
        yield on.log_softmax(x)
        yield on.log_prob(x, columns)
        yield on.log_prob_backward(gradient, x, columns)

    check(device, dtype, call, 1)
    if kernel.name.endswith("softmax_head") and dtype != "fp32":
        check_slabs(DTYPES[dtype])


def check_slabs(dtype):
    """The head's gradients by that kernel, with log_prob beside them: in slabs, and in chunks of 16 rows of 20."""
    for number, (n, room) in enumerate(((16 * 2048 + 256, 20 * 2 * 2048 * 2 + 48), (16392, 1024 + 17 * 32800))):
        x, w, bias = (data("normal", shape, dtype, i) for i, shape in enumerate(((20, 16), (n, 16), (n,))))
        index = np.random.default_rng(n).integers(0, n, 20).astype([np.int64, np.int32][number])
        index[:4], x[5, 3] = (-1, n - 1, n, 0), np.nan
        given = data("normal", (20,), np.float32, 4), x, w, index
        run = lambda move, *given, room=room, bias=bias: pydet.linear_log_prob_backward(
            *map(move, given), bias=move(bias), of_log_prob=True, arithmetic="ieee", workspace=room
        )
        for name, got, want in zip(
            ("dx", "dw", "dbias", "log_prob"), run(Memory, *given), run(np.asarray, *given, room=1 << 28), strict=True
        ):
            assert_same_bits(got.tensor.array, want, f"{name} of {n} columns")


@each("head_rows")
def test_head_rows(device, kernel, dtype):
    """Rows shorter than a block's lanes, as long, longer; in chunks; and in slabs. The two types of 16 bits, which are
    the same source, share the shapes out."""
    out = lambda result: result.tensor.array
    shapes = [*heads_of_models.ASKED_SHAPES, (20, 6145)]
    shapes = shapes if dtype == "fp32" else shapes[dtype == "fp16" :: 2]
    heads_of_models.check_asked(Memory, out, dtype, shapes, (16,), kernel=kernel.name)
    heads_of_models.check_asked_in_slabs(Memory, out, dtype, kernel=kernel.name)


@each("head_rows")
def test_linear_cross_entropy(device, kernel, dtype):
    """By whichever kernel of the head's rows is chosen: once a type. Rows are losses in fp32 then: thousands once."""
    if kernel.name != "cuda_head_rows":
        pytest.skip("the other's turn")
    rows = 4400 if dtype == "fp32" else 300
    losses.check_on_a_device(Memory, lambda result: getattr(result, "tensor", result).array, dtype, rows)


@each("softmax_backward")
def test_softmax_backward(device, kernel, dtype):
    def call(on, dy, y, out, index):
        yield on.softmax_backward(dy, y, out=out)
        yield on.log_softmax_backward(dy, y)

    check(device, dtype, call, 2)


@each("activation")
def test_activation(device, kernel, dtype):
    def call(on, x, up, out, index):
        kind = KINDS[index % len(KINDS)]
        yield on.activation(x, kind, out=out)
        yield on.activation(x, kind, up=up)

    check(device, dtype, call, 2)


@each("activation_backward")
def test_activation_backward(device, kernel, dtype):
    def call(on, dy, x, up, out, index):
        kind = KINDS[index % len(KINDS)]
        yield on.activation_backward(dy, x, kind, out=out)
        yield from on.activation_backward(dy, x, kind, up=up)

    check(device, dtype, call, 3)


@each("activation")
def test_activation_of_every_number(device, kernel, dtype):
    x = activations.every_number(dtype)
    for kind in KINDS:
        assert_same_bits(device.activation(x, kind), pydet.activation(x, kind), kind)


@each("activation_backward")
def test_activation_walks_rows_of_two_strides(device, kernel, dtype):
    """Halves of one tensor whose rows are turned over, in place."""
    for n in (8, 24, 7):
        results = []
        for on in (pydet, device):
            both = data("normal", (5, 3, 2 * n), DTYPES[dtype]).copy()
            dy, gate, up = data("normal", (3, 5, n), DTYPES[dtype], 1), both[..., :n], both[..., n:]
            gate, up = gate.swapaxes(0, 1), up.swapaxes(0, 1)
            on.activation_backward(dy, gate, "silu", up=up, out=gate, dup=up)
            results.append(both)
        assert_same_bits(*results)
    assert device.taken == 3


@each("sample")
def test_sample(device, kernel, dtype):
    """Aligned and not, on either side of a vector of every thread of a block; every filter; rows of nothing."""
    for number, n in enumerate((1, 2, 7, 8, 9, 64, 70, 1023, 1024, 1025, 2047, 2048, 2056, 4096, 5001)):
        for options in samples.FILTERS[number % 3 :: 3]:
            x, (seed, position) = data("normal", (3, n), DTYPES[dtype], number), samples.keys(3, number)
            x = samples.coarse(x, dtype) if number % 2 else x
            samples.same(device.sample(x, seed, position, **options), pydet.sample(x, seed, position, **options), n)
    device.dtype = dtype
    samples.test_options_of_rows(device)
    samples.test_rows_with_nothing_to_draw_from(device)
    samples.test_greedy_is_the_first_of_the_largest(device)
    x, (seed, position) = data("normal", (2, 3, 40), DTYPES[dtype]).swapaxes(0, 1), samples.keys((3, 2))
    samples.same(device.sample(x, seed, position, top_k=7), pydet.sample(x, seed, position, top_k=7))
    if "spread" in kernel.name:  # over 4 and 8 blocks, whole and not; equal columns that are cut, few and many
        for number, n in enumerate((16384, 20001, 32768, 33001)):
            x = data("normal", (1, n), DTYPES[dtype], number)
            x = samples.coarse(x, dtype) if number % 2 else x
            for options in ({"top_p": 0.9}, {"temperature": 0.5, "top_k": 40, "top_p": 0.5, "min_p": 0.05}):
                got = device.sample(x, seed[:1, 0], position[:1, 0], **options)
                samples.same(got, pydet.sample(x, seed[:1, 0], position[:1, 0], **options), n)
    assert device.taken > 80


@each("topk")
def test_topk(device, kernel, dtype):
    samples.check_topk(device, dtype, [1, 2, 5, 8, 9, 70, 1024, 2049])
    for x, k in (
        (data("normal", (2, 6000), DTYPES[dtype]), 2048),
        (data("normal", (1, 20001), DTYPES[dtype]), 50),
        (data("integers", (1, 33001), DTYPES[dtype]), 1000),
        (data("integers", (2, 6000), DTYPES[dtype]), 2049),
        (data("specials", (1, 5001), DTYPES[dtype]), 5001),
        (np.zeros((2, 3000), DTYPES[dtype]), 7),
    ):
        for got, want in zip(device.topk(x, k), pydet.topk(x, k), strict=True):
            assert got.tobytes() == want.tobytes(), k
    assert device.taken > 30


@each("embedding")
def test_embedding(device, kernel, dtype):
    """Teams of threads from one up to a block's, and more columns than that; whole pieces of 16 bytes, and not."""
    embeddings.check_forward(device, dtype, [1, 3, 8, 16, 24, 130, 513, 2056, 9000])
    w, ids = data("normal", (20, 24), DTYPES[dtype])[::2, :8], embeddings.ids_of(12, 10)
    out = device.embedding(w, ids.reshape(3, 4))
    assert out.tobytes() == w[ids].tobytes()
    lost = device.embedding(w, np.int64([0, -1, 10, 9]))  # numbers of none of the rows
    bits = lost.view(np.uint32 if dtype == "fp32" else np.uint16)
    assert (bits[1:3] == (0x7FFFFFFF if dtype == "fp32" else 0x7FFF)).all() and (lost[[0, 3]] == w[[0, 9]]).all()
    assert device.taken == 11


@each("embedding_backward")
def test_embedding_backward(device, kernel, dtype):
    """Tokens and tables around the steps of a warp and the ids of a block; many tokens of an id; ids of no rows."""
    embeddings.check_backward(device, dtype, EMBEDDED)
    embeddings.check_many_tokens(device, dtype, False)
    dout, ids = data("normal", (70, 16), DTYPES[dtype]), embeddings.ids_of(70, 9)
    ids[::3], ids[1::7] = -5, 9
    want = embeddings.reference.embedding_backward(dout, ids, 9)
    assert_same_bits(device.embedding_backward(dout, ids, 9), want, "ids of no rows")
    far = data("normal", (7, 10, 32), DTYPES[dtype]).swapaxes(0, 1)[..., :16]
    want = embeddings.reference.embedding_backward(np.ascontiguousarray(far), ids.reshape(10, 7), 9)
    assert_same_bits(device.embedding_backward(far, ids.reshape(10, 7), 9), want, "rows of two strides")
    assert device.taken == 2 * len(EMBEDDED) + 10


def check_steps(device, name, dtype):
    """All of them by the kernel of a few tokens, which says what it does not take."""
    wider = sum(number % 4 > 0 and number % 5 != 3 for number in range(len(scans.STEPS)))
    scans.check_steps(device, name, dtype)
    assert device.taken == len(scans.STEPS) + wider + 1
    selective = name == "selective_scan"
    given_of = lambda states: (scans.scan_of if selective else scans.delta_of)(1, 2, 2, 8, 1, states, dtype)
    for states in (30, 260):
        scans.same(getattr(device, name)(*given_of(states)), getattr(pydet, name)(*given_of(states)))
    assert device.taken == len(scans.STEPS) + wider + 1
    state = scans.states_of(1, 2, *((8, 64) if selective else (64, 8)))
    want = getattr(pydet, name)(*given_of(64), initial=state, return_final=True)
    y, _ = getattr(device, name)(*given_of(64), initial=state, final=state)  # which stays in its place
    scans.same((y, state), want)
    assert device.taken == len(scans.STEPS) + wider + 2


@each("selective_scan", "_step")
def test_selective_scan_of_a_few_tokens(device, kernel, dtype):
    check_steps(device, "selective_scan", dtype)


@each("gated_delta", "_step")
def test_gated_delta_of_a_few_tokens(device, kernel, dtype):
    check_steps(device, "gated_delta", dtype)


@each("selective_scan")
def test_selective_scan(device, kernel, dtype):
    """The CPU's cases, and states of one, two and sixteen rounds; more tokens than a tile has."""
    more = [(1, 17, 2, 3, 1, 32), (1, 5, 2, 5, 1, 512), (1, 9, 2, 33, 2, 64)]
    scans.check_selective_scan(device, dtype, scans.SCANS + more)
    own = {"cu_seqlens": np.int32([0, 3, 3, 20]), "return_final": True}
    given = scans.scan_of(1, 20, 2, 8, 1, 20, dtype)
    scans.same(device.selective_scan(*given, **own), pydet.selective_scan(*given, **own))
    assert device.taken == len(scans.SCANS) + 4
    # More blocks than multiprocessors, the last one of two columns; heads narrower than what a thread walks; rows that
    # are no whole pieces.
    for sizes in ((1, 11, 1690, 5, 1, 32), (1, 11, 90, 3, 1, 32), (1, 9, 2, 33, 1, 128)):
        given = scans.scan_of(*sizes, dtype)
        want = pydet.selective_scan(*given, return_final=True)
        scans.same(device.selective_scan(*given, return_final=True), want, sizes)
        given = [*given[:3], *(np.asfortranarray(y) for y in given[3:5]), given[5]]
        scans.same(device.selective_scan(*given, return_final=True), want, sizes)


@each("gated_delta")
def test_gated_delta(device, kernel, dtype):
    more = [(1, 17, 2, 3, 1, 32), (1, 5, 2, 5, 1, 512), (1, 9, 2, 33, 2, 64)]
    scans.check_gated_delta(device, dtype, scans.SCANS + more)
    own = {"cu_seqlens": np.int64([0, 3, 3, 20]), "return_final": True}
    given = scans.delta_of(1, 20, 2, 8, 1, 20, dtype)
    scans.same(device.gated_delta(*given, **own), pydet.gated_delta(*given, **own))
    assert device.taken == len(scans.SCANS) + 4
    for sizes in ((1, 5, 133, 65, 1, 32), (1, 9, 2, 33, 1, 128)):  # as above
        given = scans.delta_of(*sizes, dtype)
        want = pydet.gated_delta(*given, return_final=True)
        scans.same(device.gated_delta(*given, return_final=True), want, sizes)
        given = [*(np.asfortranarray(y) for y in given[:2]), *given[2:]]
        scans.same(device.gated_delta(*given, return_final=True), want, sizes)


@each("causal_conv1d")
def test_causal_conv1d(device, kernel, dtype):
    scans.check_causal_conv1d(device, dtype)
    assert device.taken == len(scans.CONVOLUTIONS)


@each("selective_scan")
def test_wide_selective_scan(device, kernel, dtype):
    scans.check_wide(device, "selective_scan", dtype)
    drawn = scan_gradients.check_drawn(device, "selective_scan", dtype, 12, tokens=40)
    assert device.taken == len(scans.WIDE) + 1 + drawn


@each("selective_scan_backward")
def test_wide_selective_scan_backward(device, kernel, dtype):
    calls = scan_gradients.check_wide(device, "selective_scan_backward", dtype)
    calls += scan_gradients.check_drawn(device, "selective_scan_backward", dtype, 12, tokens=40)
    assert device.taken == calls


@each("selective_scan_backward")
def test_selective_scan_backward(device, kernel, dtype):
    """The CPU's cases, states of two and eight rounds, a group of several blocks of columns, several tiles of whole
    rounds with one decay (even numbers have one)."""
    more = [(1, 9, 2, 5, 1, 256), (1, 10, 2, 3, 1, 64), (1, 3, 4, 20, 2, 8), (1, 9, 1, 2, 1, 40)]
    more += [(1, 37, 1, 34, 1, 128), (1, 33, 2, 2, 2, 32), (2, 66, 1, 3, 1, 32)]
    scan_gradients.check_selective_scan_backward(device, dtype, scan_gradients.GRADIENTS + more)
    for states in (20, 128):
        given = scans.scan_of(1, 20, 2, 8, 1, states, dtype)
        scan_gradients.check_pack(device, "selective_scan_backward", given, dtype)
    assert device.taken == len(scan_gradients.GRADIENTS) + 9


MANY = 10  # in WIDE, from here on: more than thirty heads, at which other crews walk


def wide_deltas(mine, count):
    """Numbers of WIDE for a type, of so many: those of many heads, nine tenths of the work, the types share out. What
    walks is the same code for all types."""
    return [*range(MANY), *range(MANY + mine, len(scans.WIDE), count)]


@each("gated_delta")
def test_wide_gated_delta(device, kernel, dtype):
    numbers = wide_deltas([*DTYPES].index(dtype), len(DTYPES))
    scans.check_wide(device, "gated_delta", dtype, numbers)
    drawn = scan_gradients.check_drawn(device, "gated_delta", dtype, 12, tokens=40)
    assert device.taken == len(numbers) + 1 + drawn


SMALL_SHARED = """
import ctypes, os, sys
ctypes.CDLL(os.environ["PYDET_LIBRARY"]).fakecuda_reset(2, 86, 13000, -1, 999, False, None)
sys.path.insert(0, sys.argv[1])
import test_cuda_emulated as emulated
emulated.frameworks.FRAMEWORKS[emulated.__name__, "Memory"] = emulated.Framework
for name in ("selective_scan", "gated_delta"):
    for mine, dtype in enumerate(("bf16", "fp32")):
        device = emulated.Emulated(f"cuda_{name}")
        numbers = emulated.wide_deltas(mine, 2) if name == "gated_delta" else range(len(emulated.scans.WIDE))
        emulated.scans.check_wide(device, name, dtype, numbers)
        assert device.taken == len(numbers) + 1
device = emulated.Emulated("cuda_selective_scan_backward")
calls = emulated.scan_gradients.check_wide(device, "selective_scan_backward", "bf16")
assert device.taken == calls
"""


def test_scans_where_shared_memory_is_small():
    """What walks, and if 256 states are taken back in tiles, follows from a multiprocessor's memory: here 99 KB."""
    run = run_python("-c", SMALL_SHARED, Path(__file__).parent)
    assert run.returncode == 0, run.stderr


@each("gated_delta_backward")
def test_wide_gated_delta_backward(device, kernel, dtype):
    calls = scan_gradients.check_wide(device, "gated_delta_backward", dtype)
    calls += scan_gradients.check_drawn(device, "gated_delta_backward", dtype, 12, tokens=40)
    assert device.taken == calls


@each("gated_delta_backward")
def test_gated_delta_backward(device, kernel, dtype):
    more = [
        (1, 10, 2, 3, 1, 64),
        (1, 9, 2, 5, 1, 256),
        (1, 3, 4, 40, 2, 8),
        (1, 37, 1, 34, 1, 128),
        (2, 66, 2, 3, 1, 32),
    ]
    scan_gradients.check_gated_delta_backward(device, dtype, scan_gradients.GRADIENTS + more)
    for keys in (20, 128):
        given = scans.delta_of(1, 20, 2, 8, 1, keys, dtype)
        scan_gradients.check_pack(device, "gated_delta_backward", given, dtype)
    assert device.taken == len(scan_gradients.GRADIENTS) + 7


@each("causal_conv1d_backward")
def test_causal_conv1d_backward(device, kernel, dtype):
    scan_gradients.check_causal_conv1d_backward(device, dtype)
    assert device.taken == len(scan_gradients.CONV_GRADIENTS)


@each("rotary_table")
def test_rotary_table(device, kernel, dtype):
    rotary.check_table(device, dtype, [1, 3, 8, 64, 129, 130])


@each("rotary")
def test_rotary(device, kernel, dtype):
    """Pieces of eight pairs and single ones; heads before tokens."""
    rotary.check_heads(device, dtype, [1, 7, 8, 9, 64, 65])
    device.dtype = dtype
    rotary.test_strides_and_tables_that_are_shared(device)
    assert device.taken > 10


@each("rmsnorm")
def test_rmsnorm(device, kernel, dtype):
    def call(on, x, residual, out, index):
        weight = vector(x.shape[1], index) if index % 4 else None
        options = {"eps": 1e-6, **({"weight_offset": 1.0} if index % 4 == 1 else {})}
        yield from on.rmsnorm(x, weight, out=(out, np.zeros(len(x), np.float32)), **options)
        yield from on.rmsnorm(x, weight, residual=residual, **options)

    check(device, dtype, call, 2)


@each("rmsnorm_backward")
def test_rmsnorm_backward(device, kernel, dtype):
    def call(on, dy, x, dresidual, out, index):
        n, rstd = x.shape[1], np.abs(vector(len(x), index, np.float32))
        weight = vector(n, index) if index % 4 else None
        options = {"dresidual": dresidual} if index % 3 else {}
        if weight is not None and index % 5 == 0:
            options |= {"dweight": vector(n, index + 1, np.float32), "accumulate": True}
        yield from on.rmsnorm_backward(dy, x, weight, rstd, out=out, **options)

    check(device, dtype, call, 3)


@each("rmsnorm")
def test_rmsnorm_of_heads(device, kernel, dtype):
    if "general" not in kernel.name:
        pytest.skip("not a kernel of heads")
    heads.check_forward(device.rmsnorm, dtype, heads.SHAPES[::2], ["normal"], expect=pydet.rmsnorm)
    assert device.taken > 5, device.taken


@each("rmsnorm_backward")
def test_rmsnorm_backward_of_heads(device, kernel, dtype):
    if not kernel.name.endswith(("general", "heads")):
        pytest.skip("not a kernel of heads")
    heads.check_backward(device.rmsnorm_backward, dtype, heads.SHAPES[1::2], ["normal"], expect=pydet.rmsnorm_backward)
    assert device.taken > 5, device.taken


@each("layernorm")
def test_layernorm(device, kernel, dtype):
    def call(on, x, residual, out, index):
        n, sums = x.shape[1], (np.zeros(len(x), np.float32) for _ in range(2))
        weight, bias = vector(n, index) if index % 4 else None, vector(n, index + 1) if index % 3 else None
        yield from on.layernorm(x, weight, bias, eps=1e-5, out=(out, *sums))
        yield from on.layernorm(x, weight, bias, eps=1e-5, residual=residual)

    check(device, dtype, call, 2)


@each("layernorm_backward")
def test_layernorm_backward(device, kernel, dtype):
    def call(on, dy, x, dresidual, out, index):
        n, mean, rstd = x.shape[1], *(vector(len(x), index + i, np.float32) for i in range(2))
        weight = vector(n, index) if index % 4 else None
        options = {"dresidual": dresidual} if index % 3 else {}
        if weight is not None:
            options["has_bias"] = index % 2 == 0
        yield from on.layernorm_backward(dy, x, weight, mean, np.abs(rstd), out=out, **options)

    check(device, dtype, call, 3)


@each("layernorm_backward")
def test_layernorm_backward_of_many_short_rows(device, kernel, dtype):
    """Four teams' chains are a group then; the last group is a part of one."""
    if not kernel.name.endswith("rows") or dtype == "fp32":
        pytest.skip("has no groups")
    for m, n, options in ((16385, 8, {"has_bias": False}), (16384 + 81, 72, {})):
        dy, x = data("normal", (m, n), DTYPES[dtype], 1), data("normal", (m, n), DTYPES[dtype])
        weight, mean, rstd = vector(n, 0), vector(m, 0, np.float32), np.abs(vector(m, 1, np.float32))
        found = [on.layernorm_backward(dy, x, weight, mean, rstd, **options) for on in (pydet, device)]
        for want, got in zip(*found, strict=True):
            if want is not None:
                assert_same_bits(got, want, f"{m} x {n}")
    assert device.taken == 2


# ---- The others ------------------------------------------------------------------------------------------------------


@each("gemm")
def test_gemm(device, kernel, dtype):
    if kernel.arithmetic != "ieee":
        pytest.skip("on tensor cores")
    for number in range(30):
        problem = cases.random_problem(random.Random(number), dtype, kernel.arithmetic, 150, 300, 200, 1 << 18)
        assert_same_bits(cases.run(device.gemm, problem), cases.run(pydet.gemm, problem), str(problem))
    base = functools.partial(cases.Problem, dtype=dtype, arithmetic=kernel.arithmetic)
    for problem in small_products(base, itertools.cycle(DTYPES)):
        assert_same_bits(cases.run(device.gemm, problem), cases.run(pydet.gemm, problem), str(problem))
    assert device.taken > 5, device.taken


def same_products(device, module, operation, problems):
    """Of the problems of an operation's own tests every other one."""
    for problem in [*problems][::2]:
        got, want = (module.run(getattr(on, operation), problem) for on in (device, pydet))
        assert_same_bits(got, want, str(problem))
    assert device.taken > 5, device.taken


@each("grouped_gemm")
def test_grouped_gemm(device, kernel, dtype):
    if kernel.arithmetic != "ieee":
        pytest.skip("on tensor cores")
    same_products(device, groups, "grouped_gemm", groups.problems_of(dtype, "ieee"))


@each("scaled_gemm")
def test_scaled_gemm(device, kernel, dtype):
    if kernel.arithmetic != "ieee":
        pytest.skip("on tensor cores")
    if "skinny" in kernel.name:
        pytest.skip("test_scaled_gemm_of_few_rows")
    device.dtype, device.arithmetic = dtype, "ieee"
    same_products(device, scaled, "scaled_gemm", scaled.problems_of(device))


@each("scaled_gemm")
def test_scaled_gemm_of_few_rows(device, kernel, dtype):
    if kernel.arithmetic != "ieee":
        pytest.skip("on tensor cores")
    problems = [*scaled.few_rows(dtype)]
    problems = problems if "skinny" in kernel.name else problems[::7]
    for problem in problems:
        assert_same_bits(scaled.run(device.scaled_gemm, problem), problem.expected(), str(problem))
    assert device.taken == len(problems)


@each("scaled_grouped_gemm")
def test_scaled_grouped_gemm(device, kernel, dtype):
    if kernel.arithmetic != "ieee":
        pytest.skip("on tensor cores")
    same_products(device, scaled_groups, "scaled_grouped_gemm", scaled_groups.problems_of(dtype, "ieee"))


@each("rmsnorm_quantize")
def test_rmsnorm_quantize(device, kernel, dtype):
    """The CPU's cases; the first rows of many, which end inside a block."""
    shapes = quantized.SHAPES if "held" not in kernel.name else [(m, n) for m, n in quantized.SHAPES if n % 8 == 0] * 2
    quantized.check(device, dtype, shapes + quantized.MANY[dtype == "fp16" :: 2])
    taken = device.taken
    assert taken > len(shapes) // 2, taken
    quantized.check_strides(device, dtype)
    assert device.taken == taken + 4


@each("quantize")
def test_quantize(device, kernel, dtype):
    sizes = [(1, 16), (16, 128), (33, 144), (128, 256), (144, 528), (5, 4112), (7, 9), (130, 33)]
    granularities, kinds = (
        ["row", "group", "block", "tensor"],
        itertools.cycle(["normal", "wide", "extremes", "specials"]),
    )
    for (m, k), granularity, transposed in itertools.product(sizes, granularities, (False, True)):
        if not transposed or granularity in ("group", "block"):
            options = {"granularity": granularity, "transposed": transposed, "power_of_two": m % 2 == 0}
            x = data(next(kinds), (m, k), DTYPES[dtype], m)
            for got, want in zip(device.quantize(x, **options), pydet.quantize(x, **options), strict=True):
                assert_same_bits(got, want, f"{m} x {k} {options}")
    assert device.taken > 5, device.taken


@each("quantize")
def test_quantize_finds_the_scale_of_a_tensor(device, kernel, dtype):
    """Pieces and what is left besides, matrices too small to keep their magnitude in q, batches, columns, nothing."""
    if "tiles" not in kernel.name or "packed" in kernel.name:
        pytest.skip("has no scale of a tensor")
    shapes = [
        (1, 1),
        (1, 3),
        (3, 1),
        (1, 4),
        (2, 2),
        (5, 3, 1),
        (7, 1, 2, 1),
        (127, 129),
        (255, 130),
        (257, 7),
        (1, 999),
    ]
    shapes += [(3, 40, 264), (2, 3, 130, 5), (0, 8), (8, 0), (3, 0, 4)]
    kinds = itertools.cycle(["normal", "wide", "extremes", "specials", "tiny"])
    options = [{}, {"power_of_two": True}, {"scale_dtype": scaled.E8M0}, {"dtype": scaled.E5M2}]
    for (shape, layout), more in itertools.product(itertools.product(shapes, ["row", "col"]), options):
        x = cases.lay(data(next(kinds), shape, DTYPES[dtype], len(shape)), layout)
        for got, want in zip(
            device.quantize(x, granularity="tensor", **more),
            pydet.quantize(x, granularity="tensor", **more),
            strict=True,
        ):
            assert_same_bits(got, np.asarray(want), f"{shape} {layout} {more}")
    for place, odd in itertools.product((0, 129 * 200 + 7, -1), (np.nan, -np.inf, 3e4)):  # in any piece
        x = np.ones((260, 200), DTYPES[dtype])
        x.reshape(-1)[place] = odd
        for got, want in zip(
            device.quantize(x, granularity="tensor"), pydet.quantize(x, granularity="tensor"), strict=True
        ):
            assert_same_bits(got, np.asarray(want), f"{odd} at {place}")
    assert device.taken == 2 * len(shapes) * len(options) + 9


@each("quantize")
def test_quantize_rows_of_nothing(device, kernel, dtype):
    if "rows" not in kernel.name:
        pytest.skip("not of rows")
    x = np.ones((5, 0), DTYPES[dtype])
    got, want = device.quantize(x, granularity="row"), pydet.quantize(x, granularity="row")
    assert_same_bits(got[1], want[1], kernel.name)
    assert device.taken == ("packed" not in kernel.name) and (want[1] == np.float32(1e-10) / np.float32(448)).all()


@each("fold")
def test_fold(device, kernel, dtype):
    if kernel.name != "cuda_fold":
        pytest.skip("between GPUs")
    folds.check(device.fold)
    assert device.taken > 300


@each("adamw")
def test_adamw(device, kernel, dtype):
    adamws.check(device.adamw, dtype, sizes=[1, 3, 4, 5, 8, 33, 1023, 1024, 1025, 2047, 2048, 2049, 2052, 4097, 9001])
    for count in (2, 33, 64):
        adamws.check_lists(device.adamw, adamws.many(count, list(DTYPES.values())), adamws.HOW, f"{count} tensors")
    assert device.taken > 70


# ---- Which jobs blocks of Hopper's attention find --------------------------------------------------------------------


class Given(ctypes.Structure):
    """Of attention_jobs.cpp."""

    INTS = ("sequences", "heads", "group_heads", "pack", "warpgroup_queries", "left", "right", "in_turn")
    INTS += "most_size", "held", "most_held", "blocks"
    _fields_ = [
        *((name, ctypes.c_int) for name in INTS),
        *((name, ctypes.c_void_p) for name in ("q_start", "k_start", "taken", "followed")),
        ("numbers", ctypes.c_int),
    ]


class Pack:
    """What blocks are told of a pack, and which jobs there are."""

    def __init__(self, lengths, keys, counted, **given):
        self.lengths, self.keys = lengths, keys
        self.starts = [np.cumsum([0, *x], dtype=np.int32) for x in (lengths, keys)]
        heads, group_heads, pack = given["heads"], given["group_heads"], given["pack"]
        self.rows = 64 // pack * 2
        self.count, self.most = np.zeros(1, np.int32), sum(-(-n // self.rows) for n in lengths) * (heads // pack)
        self.followed = np.full(self.most + 1, -7, np.int32)
        at = [x.ctypes.data for x in (*self.starts, self.count, self.followed)]
        held = given["held"], given["most_held"]
        size = min(30, max(7, (sum(given["window"]) + self.rows).bit_length() - 1))
        self.given = Given(
            len(lengths), heads, group_heads, pack, 64 // pack, *given["window"], given["in_turn"], size,
            *held, given["blocks"], *at[:2], *(at[2:] if counted else (None, None)), self.most,
        )  # fmt: skip
        steps = range(0, heads, pack)
        self.jobs = {(s, h, q) for s, n in enumerate(lengths) for h in steps for q in range(0, n, self.rows)}

    def find(self, again, sharers=1):
        found = np.zeros((self.most + 9, 6), np.int32)
        call = ctypes.CDLL(os.environ["PYDET_LIBRARY"]).emulated_attention_jobs
        call.argtypes = ctypes.POINTER(Given), ctypes.c_bool, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
        count = call(self.given, again, sharers, found.ctypes.data, len(found))
        assert count == self.most, f"{count} jobs, want {self.most}"
        return found[:count].tolist()


def test_each_job_of_attention_is_found_once():
    chance = random.Random(3)
    for trial in range(40):
        group_heads, forever = chance.randint(1, 4), 1 << 30
        windows = (forever, 0), (forever, forever), (50, 7)
        lengths = [
            chance.choice((0, 1, 2 ** chance.randint(0, 11) + chance.randint(-1, 1)))
            for _ in range(chance.choice((1, 3, 31, 32, 33, 70)))
        ]
        keys = [chance.choice((n, chance.randint(0, 3000))) for n in lengths]
        given = {
            "heads": group_heads * chance.randint(1, 4), "group_heads": group_heads,
            "pack": chance.choice((1, group_heads)), "window": chance.choice(windows),
            "in_turn": trial % 4 > 0, "held": chance.randint(1, 3000), "most_held": chance.randint(1, 5000),
            "blocks": chance.choice((1, 2, 7, 132)),
        }  # fmt: skip
        pack = Pack(lengths, keys, trial % 2, **given)
        found = pack.find(False)
        assert {tuple(job[1:4]) for job in found} == pack.jobs
        assert sorted(pack.find(True)) == sorted(found)  # by the same blocks
        if given["pack"] == 1 and group_heads % 2 == 0:
            shared = pack.find(False, 2)
            assert sorted(job[1:] for job in shared) == sorted(job[1:] for job in found)
            first, second = ([job[1:] for job in shared if job[0] == block] for block in (0, 1))
            assert second == [[s, head + 1, *rest] for s, head, *rest in first]  # the same keys, the head beside


def test_jobs_of_more_keys_come_before():
    """By one block: those that see at least half as many keys as any, then a quarter; a sequence at a time, later
    tiles first, and heads whose keys the L2 holds before others."""
    given = {"heads": 8, "group_heads": 2, "pack": 1, "in_turn": 1, "blocks": 1, "held": 2000, "most_held": 4000}
    lengths, groups = [100, 2000, 5, 900, 1100], range(0, 8, 2)
    found = [tuple(job[1:4]) for job in Pack(lengths, lengths, False, window=(1 << 30, 0), **given).find(False)]
    sizes = [max(min(q + 128, lengths[s]).bit_length(), 8) for s, _, q in found]
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {8, 9, 10, 11}
    first = [(1, h, q) for g in groups for q in range(1920, 895, -128) for h in (g, g + 1)]
    first += [(4, h, q) for g in groups for q in (1024, 896) for h in (g, g + 1)]
    assert found[: len(first)] == first  # of 2000 and of 1100 keys one group is held, of 900 all are
    second = [(1, h, q) for g in groups for q in (768, 640, 512, 384) for h in (g, g + 1)]
    second += [(3, h, q) for q in (896, 768, 640, 512, 384) for h in range(8)]
    assert found[len(first) :][: len(second)] == second
    # Without a mask a tile sees all keys of its sequence; in a window those of long sequences see about as many.
    found = Pack(lengths, lengths, False, window=(1 << 30, 1 << 30), **given).find(False)
    assert list(dict.fromkeys(job[1] for job in found)) == [1, 4, 3, 0, 2]
    found = Pack(lengths, lengths, False, window=(50, 0), **given).find(False)
    assert list(dict.fromkeys(job[1] for job in found)) == [1, 3, 4, 0, 2]


# ---- What is left out is seen ----------------------------------------------------------------------------------------

OMISSIONS = ["barrier", "exchange", "wait"]


@each("softmax")
def test_an_omission_is_seen(device, kernel, dtype):
    """The barriers, the warps' exchanges and the waits for copies, each in turn left out by all threads of a block."""
    omit = ctypes.CDLL(os.environ["PYDET_LIBRARY"]).emulated_omit
    of_head = kernel.name.endswith("softmax_head")
    width = 16392 if of_head else 1000
    x, seen = data("normal", (3 - 2 * of_head, width), DTYPES[dtype]), dict.fromkeys(OMISSIONS, 0)
    run = lambda on: on.log_prob_backward(vector(1, 0, np.float32), x, np.array([5])) if of_head else on.softmax(x)
    want = run(pydet)
    try:
        for (i, what), number in itertools.product(enumerate(OMISSIONS), range(6)):
            omit(i, number)
            for _ in range(2):  # in either order of the threads
                try:
                    seen[what] += run(device).tobytes() != want.tobytes()
                except pydet.Error:  # the threads wait for each other
                    seen[what] += 1
    finally:
        omit(-1, 0)
    assert_same_bits(run(device), want)
    assert seen["exchange"] and seen["barrier"] and (seen["wait"] or not kernel.name.endswith("staged")), seen


# ---- XLA -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime():
    """fakecuda.c with two devices, as a function that starts it anew: which call is to fail."""
    library = ctypes.CDLL(os.environ["PYDET_LIBRARY"])
    library.fakecuda_log.restype = ctypes.c_char_p
    library.fakecuda_reset.argtypes = [ctypes.c_int] * 6 + [ctypes.c_void_p]
    library.start = lambda fail_at=-1, devices=2: (
        library.pydet_exchange_forget_devices(),
        library.fakecuda_reset(devices, 90, 13000, fail_at, 999, False, 0x1230),
    )
    yield library
    library.start(devices=1)


CONTINUED = [(name, i) for name, calls in frames.CALLS.items() for i, call in enumerate(calls) if call.in_place]


@pytest.mark.parametrize(
    "target,number", [x for x in CONTINUED if x[0] != "scaled_gemm"]
)  # whose K is a multiple of 16
def test_what_is_continued_from_may_lie_elsewhere(runtime, target, number):
    """XLA for GPUs puts results elsewhere than it was told: copied on its stream, before anything is launched."""
    call, there = frames.CALLS[target][number], {"stream": 0x1230, "ordinal": 1}
    refused, want = frames.run(frames.handlers(runtime)[target], call, 0xA5)
    handler = frames.handlers(runtime, "on_gpu")[target]
    for apart, copies in ((0, 0), (None, len(call.in_place))):
        runtime.start()
        assert refused is None and frames.run(handler, call, 0x3C, apart=apart, **there) == (None, want)
        log = runtime.fakecuda_log().decode().split()
        assert log.count("cudaMemcpyAsync") == copies and not runtime.fakecuda_elsewhere()
    for place in (i for i, name in enumerate(log) if name == "cudaMemcpyAsync"):
        runtime.start(fail_at=place)
        refused, _ = frames.run(handler, call, 0x3C, apart=None, **there)
        words = (
            "the copy of what is continued from failed: made to fail (999); the cause may be older work on this device"
        )
        assert refused == f"{target}: {words}" and runtime.fakecuda_device() == 0
