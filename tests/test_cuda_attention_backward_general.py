"""The general CUDA kernels of attention's gradients, forced by name, against the CPU's bit for bit."""

import itertools

import numpy as np
import pytest

import attention_cases
import pydet
from cases import DTYPES, assert_same_bits
from test_cuda import cuda_kernels, device, each, torch, words  # noqa: F401
from test_cuda_attention import moved

GENERAL = [f"cuda_attention_backward_{name}" for name in ("sm90_mma", "sm80_mma", "ieee")]
NAMES = ("dq", "dk", "dv", "dsinks")


def test_the_general_kernels_are_listed():
    names = [kernel.name for kernel in cuda_kernels("attention_backward")]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    assert names[-3:] == GENERAL


class OnGpu:
    """The functions of gradients by one kernel, for arrays."""

    def __init__(self, torch, kernel):
        self.torch, self.kernel = torch, kernel

    def __getattr__(self, name):
        def call(*arguments, **options):
            there = {key: moved(self.torch, x) for key, x in options.items()}
            found = getattr(pydet, name)(*(moved(self.torch, x) for x in arguments), **there, kernel=self.kernel)
            return [x if x is None else self.back(x) for x in found]

        return call

    def back(self, tensor):
        if tensor.dtype == self.torch.bfloat16:
            return tensor.view(self.torch.int16).cpu().numpy().view(DTYPES["bf16"])
        return tensor.cpu().numpy()


@each("attention_backward")
def test_every_option(device, torch, kernel, dtype):
    """The problems that the CPU's kernels are held to, all of which a general kernel takes."""
    if kernel.name not in GENERAL:
        pytest.skip(f"{kernel.name} is not general")
    for name, *problem in attention_cases.backward_problems(dtype):
        want = attention_cases.run_backward(pydet, *problem, kernel.arithmetic)
        got = attention_cases.run_backward(OnGpu(torch, kernel.name), *problem, kernel.arithmetic)
        for part, one, other in zip(NAMES, got, want):
            assert (one is None) == (other is None)
            if other is not None:
                assert_same_bits(np.ascontiguousarray(one), np.ascontiguousarray(other), f"{name}: {part}")


class Runs:
    """Problems of one kernel and type: each is computed on the GPU and on the CPU."""

    def __init__(self, torch, kernel, dtype):
        if kernel.name not in GENERAL:
            pytest.skip(f"{kernel.name} is not general")
        self.torch, self.kernel = torch, kernel
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        self.random = torch.Generator().manual_seed(0)

    def normal(self, *shape, spread=1.0):
        return (self.torch.randn(shape, generator=self.random) * spread).to(self.dtype)

    def dense(self, batch, heads, groups, queries, keys, d, e=None):
        """dout, q, k, v."""
        e = e or d
        return [
            self.normal(batch, heads, queries, e),
            self.normal(batch, heads, queries, d, spread=1.5),
            self.normal(batch, groups, keys, d),
            self.normal(batch, groups, keys, e),
        ]

    def check(self, dout, q, k, v, *ends, what, change=None, **options):
        packed = "_varlen" if ends else ""
        options = {**options, "arithmetic": self.kernel.arithmetic}
        out, lse = getattr(pydet, f"attention{packed}")(q, k, v, *ends, return_lse=True, **options)
        if change:
            change(dout, q, k, v)
        operands = dout, q, k, v, out, lse, *ends
        backward = getattr(pydet, f"attention{packed}_backward")
        want = backward(*operands, **options)
        there = {name: x.cuda() if self.torch.is_tensor(x) else x for name, x in options.items()}
        got = backward(*(x.cuda() for x in operands), **there, kernel=self.kernel.name)
        for part, one, other in zip(NAMES, got, want):
            differ = int((words(one.cpu()) != words(other)).sum())
            assert not differ, f"{what}: {differ} of {other.numel()} elements of {part} differ"


@pytest.fixture
def runs(device, torch, kernel, dtype):
    return Runs(torch, kernel, dtype)


# One less, equal, one more: what is walked at a time, tiles, blocks.
EXTENTS = [(1, 1), (31, 33), (32, 64), (33, 65), (63, 127), (64, 128), (65, 129), (127, 257), (128, 40), (129, 63)]
EXTENTS += [(300, 200), (260, 513)]


@each("attention_backward")
def test_extents(runs):
    for d, (queries, keys), causal in itertools.product((64, 128), EXTENTS, (False, True)):
        tensors = runs.dense(1, 4, 2, queries, keys, d)
        runs.check(*tensors, causal=causal, what=f"d {d}, {queries} x {keys}, causal {causal}")


# One less, equal, one more: what the fast kernels walk at a time, and their tiles of keys and rows, of 64 or 128.
TILES = [(31, 63), (33, 65), (63, 129), (64, 127), (65, 128), (127, 191), (129, 193), (191, 257), (193, 255), (257, 64)]


@each("attention_backward")
def test_tiles(runs):
    for d, (i, (queries, keys)) in itertools.product((64, 96, 128, 256), enumerate(TILES)):
        heads, groups = ((4, 2), (3, 3), (6, 1))[i % 3]
        options = ({"causal": True}, {}, {"window": (40, 3)}, {"causal": True, "window": (70, None)})[i % 4]
        tensors = runs.dense(1 + i % 2, heads, groups, queries, keys, d)
        if i % 5 == 0:
            options["sinks"] = runs.normal(heads).float()
        runs.check(*tensors, **options, what=f"d {d}, {queries} x {keys}, {heads} heads of {groups}, {options}")


@each("attention_backward")
def test_many_tiles(runs, torch):
    """As many tiles of 128 keys as there are multiprocessors, from which on they are not made smaller, and one less."""
    tiles = torch.cuda.get_device_properties(0).multi_processor_count
    for d, batch, causal in itertools.product((64, 128, 256), (tiles - 1, tiles), (False, True)):
        tensors = runs.dense(batch, 2, 1, 70, 127 + causal, d)
        runs.check(*tensors, causal=causal, what=f"d {d}, {batch} tiles, causal {causal}")
    for d, (queries, keys) in itertools.product((64, 128), ((65, 257), (129, 191), (193, 65))):
        runs.check(
            *runs.dense(tiles // 4, 8, 4, queries, keys, d), causal=keys > 190, what=f"d {d}, {queries} x {keys}"
        )


@each("attention_backward")
def test_vectors_that_begin_anywhere(runs, torch):
    """The same bits as of vectors at multiples of 16 bytes, by another kernel."""
    for d, queries, keys in ((64, 70, 130), (128, 130, 129), (256, 65, 100)):
        how = {"causal": True, "arithmetic": runs.kernel.arithmetic}
        dout, q, k, v = (x.cuda() for x in runs.dense(2, 4, 2, queries, keys, d))
        out, lse = pydet.attention(q, k, v, return_lse=True, **how)
        how["kernel"] = runs.kernel.name
        want = pydet.attention_backward(dout, q, k, v, out, lse, **how)
        for moved_one in range(4):
            given = [dout, q, k, v]
            x = given[moved_one]
            given[moved_one] = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
            got = pydet.attention_backward(*given, out, lse, **how)
            for name, one, two in zip(NAMES, got, want):
                assert torch.equal(words(one), words(two)), f"d {d}: {name}, operand {moved_one} moved"


@each("attention_backward")
def test_widths_and_heads(runs):
    for d, e in ((8, 8), (40, 72), (72, 40), (96, 96), (136, 128), (128, 136), (192, 128), (256, 256), (576, 512)):
        runs.check(*runs.dense(1, 4, 2, 140, 200, d, e), causal=True, what=f"d {d}, e {e}")
    for heads, groups, queries in ((7, 1, 9), (28, 4, 33), (4, 4, 70), (16, 1, 3)):
        runs.check(*runs.dense(2, heads, groups, queries, 300, 128), what=f"{heads} heads of {groups}")


@each("attention_backward")
def test_windows_packs_and_padding(runs):
    integers = lambda *values: runs.torch.tensor(values, dtype=runs.torch.int32)
    for window, causal in itertools.product([(100, 0), (0, 0), (5, 300), (None, 17), (63, None)], (False, True)):
        tensors = runs.dense(1, 4, 2, 200, 500, 64)
        runs.check(*tensors, window=window, causal=causal, what=f"window {window}, causal {causal}")
    ends = integers(0, 1, 131, 131, 208, 508), integers(0, 1, 131, 181, 481, 781)
    tokens = [runs.normal(n, h, 128) for n, h in ((508, 4), (508, 4), (781, 2), (781, 2))]
    runs.check(*tokens, *ends, causal=True, what="a pack")
    tensors = runs.dense(5, 8, 2, 150, 150, 64)
    runs.check(*tensors, first_key=integers(0, 149, 100, 64, 150), causal=True, what="padding")
    runs.check(*tensors, seqlens_k=integers(150, 0, 1, 64, 77), what="lengths")


@each("attention_backward")
def test_what_nobody_sees(runs):
    """A future token's or an unseen key's Inf and NaN reach no result; those of allowed pairs do."""
    inf, nan = float("inf"), float("nan")

    def change(dout, q, k, v):
        v[:, :, 340], v[:, :, 300, 3], k[:, 1, 345] = inf, nan, nan
        q[:, 1, 7], dout[:, 2, 11], dout[:, 3, 150, 5] = inf, nan, -inf

    for d, causal in itertools.product((64, 128, 256), (False, True)):
        runs.check(*runs.dense(1, 4, 2, 200, 350, d), causal=causal, change=change, what=f"d {d}, causal {causal}")


@each("attention_backward")
def test_two_calls_have_the_same_bits(runs, torch):
    """Beside other work on another stream, and whatever the memory held before."""
    dout, q, k, v = (x.cuda() for x in runs.dense(2, 8, 2, 700, 900, 128))
    given = {"causal": True, "arithmetic": runs.kernel.arithmetic}
    out, lse = pydet.attention(q, k, v, return_lse=True, **given)
    first = pydet.attention_backward(dout, q, k, v, out, lse, **given, kernel=runs.kernel.name)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(20):
            q.float() @ k[:, :1].float().transpose(-1, -2)
    results = {name: torch.full_like(x, float("nan")) for name, x in zip(NAMES, first)}
    again = pydet.attention_backward(dout, q, k, v, out, lse, **given, **results, kernel=runs.kernel.name)
    for name, one, two in zip(NAMES, first, again):
        assert torch.equal(words(one), words(two)), name
