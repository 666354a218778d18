"""The CUDA kernels of attention, forced by name, against the CPU's bit for bit, in every layout that they take."""

import itertools

import numpy as np
import pytest

import attention_cases
import pydet
from conftest import unusual_float_environment
from test_cuda import cuda_kernels, device, each, torch, words  # noqa: F401


def test_every_attention_kernel_is_listed():
    names = [kernel.name for kernel in cuda_kernels("attention")]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    of_hopper = [f"sm90_{name}" for name in ("wide", "few", "wide_split", "few_split")]
    assert names == [f"cuda_attention_{name}" for name in (*of_hopper, "sm90_mma", "sm80_mma", "ieee")]


class Runs:
    """Problems of one kernel and type: each is computed on the GPU and on the CPU."""

    def __init__(self, torch, kernel, dtype):
        self.torch, self.kernel = torch, kernel
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        self.random = torch.Generator().manual_seed(0)

    def normal(self, *shape, spread=1.0):
        return (self.torch.randn(shape, generator=self.random) * spread).to(self.dtype)

    def integers(self, *values):
        return self.torch.tensor(values, dtype=self.torch.int32)

    def check(self, operation, *tensors, what, **options):
        options = {**options, "arithmetic": self.kernel.arithmetic, "return_lse": True}
        moved = [tensor.cuda() for tensor in tensors]
        there = {name: x.cuda() if self.torch.is_tensor(x) else x for name, x in options.items()}
        got = getattr(pydet, operation)(*moved, **there, kernel=self.kernel.name)
        want = getattr(pydet, operation)(*tensors, **options)
        for part, one, other in zip(("out", "lse"), got, want, strict=True):
            differ = int((words(one.cpu()) != words(other)).sum())
            assert not differ, f"{what}: {differ} of {other.numel()} elements of {part} differ"


@pytest.fixture
def runs(device, torch, kernel, dtype):
    return Runs(torch, kernel, dtype)


def dense(runs, batch, heads, groups, queries, keys, d, e=None, tokens_first=False):
    if tokens_first:
        shapes = (batch, queries, heads, d), (batch, keys, groups, d), (batch, keys, groups, e or d)
        return [runs.normal(*shape, spread=1.5 if i == 0 else 1).transpose(1, 2) for i, shape in enumerate(shapes)]
    shapes = (batch, heads, queries, d), (batch, groups, keys, d), (batch, groups, keys, e or d)
    return [runs.normal(*shape, spread=1.5 if i == 0 else 1) for i, shape in enumerate(shapes)]


def moved(torch, array):
    if not isinstance(array, np.ndarray):
        return array
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


@each("attention")
def test_every_option(device, torch, kernel, dtype):
    """The problems that the CPU's kernels are held to: a kernel takes each or says what it lacks, a general one takes
    all."""
    taken = 0
    for name, operation, arguments, options in attention_cases.problems(dtype):
        want = attention_cases.run(pydet, operation, arguments, options, kernel.arithmetic)
        there = [moved(torch, x) for x in arguments], {key: moved(torch, x) for key, x in options.items()}
        try:
            if operation == "attention_varlen":
                out = torch.full((*there[0][0].shape[:2], there[0][2].shape[2]), float("nan"), device="cuda")
                there[1]["out"] = out.to(there[0][0].dtype)
            got = getattr(pydet, operation)(*there[0], **there[1], arithmetic=kernel.arithmetic, kernel=kernel.name)
        except pydet.Error as refusal:
            assert refusal.status_name == "PYDET_UNSUPPORTED" and kernel.name.split("_")[-1] not in ("mma", "ieee"), (
                name, refusal)  # fmt: skip
            continue
        taken += 1
        for part, one, other in zip(("out", "lse"), got, want, strict=True):
            one, other = one.float().cpu().numpy(), np.asarray(other, np.float32)
            if operation == "attention_varlen":
                written = attention_cases.written_of(arguments[3], len(one))
                one, other = one[written], other[written]
            differ = int(((one != other) & ~(np.isnan(one) & np.isnan(other))).sum())
            assert not differ, f"{name}: {differ} of {other.size} elements of {part} differ"
            assert (np.signbit(one) == np.signbit(other))[one == 0].all(), (
                f"{name}: a zero of {part} has the other sign"
            )
    assert taken > 10


# One less, equal, one more: rows of a warpgroup and of a tile, blocks, segments.
EXTENTS = [(1, 1), (1, 127), (1, 128), (1, 129), (2, 1024), (3, 1025), (5, 2049), (63, 63), (64, 65), (65, 2100)]
EXTENTS += [(128, 127), (129, 129), (191, 192), (193, 300), (300, 100)]


@each("attention")
def test_extents(runs):
    for d, (queries, keys), causal in itertools.product((64, 128, 256), EXTENTS, (False, True)):
        tensors = dense(runs, 1, 8, 2, queries, keys, d, tokens_first=queries % 2 == 0)
        runs.check("attention", *tensors, causal=causal, what=f"d {d}, {queries} x {keys}, causal {causal}")


@each("attention")
def test_widths_heads_and_segments(runs):
    for d in (8, 40, 72, 96, 112, 160, 192, 248):
        runs.check("attention", *dense(runs, 1, 4, 2, 200, 1100, d), causal=True, what=f"d {d}")
    runs.check("attention", *dense(runs, 1, 4, 2, 200, 1100, 192, 128), causal=True, what="d 192, e 128")
    for heads, groups, queries in ((7, 1, 9), (28, 4, 33), (4, 4, 70), (64, 1, 3)):
        runs.check("attention", *dense(runs, 2, heads, groups, queries, 700, 128), what=f"{heads} heads of {groups}")
    for d, kv_chunk in itertools.product((64, 128, 256), (128, 256, 4096)):
        tensors = dense(runs, 1, 4, 2, 200, 1300, d)
        runs.check("attention", *tensors, causal=True, kv_chunk=kv_chunk, what=f"d {d}, kv_chunk {kv_chunk}")


@each("attention")
def test_few_rows(runs):
    """One less, equal, one more of what a tile for decoding holds, of queries and of the heads of a group."""
    for heads, groups, queries in ((7, 1, 1), (8, 1, 1), (9, 1, 1), (3, 1, 5), (4, 2, 4), (12, 4, 3), (16, 1, 1)):
        for d, keys, causal in ((64, 1025, True), (128, 2200, False), (256, 1100, True)):
            tensors = dense(runs, 2, heads, groups, queries, keys, d, tokens_first=True)
            what = f"{heads} heads of {groups}, {queries} queries, d {d}"
            runs.check("attention", *tensors, causal=causal, what=what)
            for kv_chunk in (256, 1024):
                given = {"causal": causal, "window": (300, None), "kv_chunk": kv_chunk}
                runs.check("attention", *tensors, **given, what=f"{what}, a window, kv_chunk {kv_chunk}")
            padding = runs.integers(0, keys - 300)
            runs.check("attention", *tensors, causal=causal, first_key=padding, what=f"{what}, padding")
    for d, keys in itertools.product((64, 128, 256), (129, 1100)):  # more tiles than multiprocessors
        tensors = dense(runs, 75, 8, 4, 1, keys, d)
        runs.check("attention", *tensors, what=f"75 sequences of {keys} keys, d {d}")


@each("attention")
def test_many_tiles(runs, torch):
    """More than multiprocessors, so blocks go from one to the next; also of heads that stand alone in their group."""
    if runs.kernel.arithmetic != "sm90" or runs.kernel.name.endswith("mma"):
        pytest.skip("one kernel of an arithmetic is compared with another")
    for d, (heads, groups), tokens in itertools.product((64, 128, 256), ((16, 4), (9, 3)), (300, 1200)):
        q, k, v = (x.cuda() for x in dense(runs, 6, heads, groups, tokens, tokens, d))
        one, other = (
            pydet.attention(q, k, v, causal=True, kernel=name, arithmetic="sm90")
            for name in (runs.kernel.name, "cuda_attention_sm90_mma")
        )
        differ = int((words(one) != words(other)).sum())
        assert not differ, f"d {d}, {heads} heads of {groups}, {tokens} tokens: {differ} elements differ"
    for d, causal in itertools.product((64, 128), (True, False)):  # more keys and values than the L2 holds: in sections
        q, k, v = (torch.randn(90, x, 330, d, device="cuda").to(runs.dtype) for x in (14, 7, 7))
        one, other = (
            pydet.attention(q, k, v, causal=causal, kernel=name, arithmetic="sm90")
            for name in (runs.kernel.name, "cuda_attention_sm90_mma")
        )
        differ = int((words(one) != words(other)).sum())
        assert not differ, f"d {d}, causal {causal}, 90 sequences: {differ} elements differ"


@each("attention")
def test_pages_of_many_tiles(runs, torch):
    """A prefill behind a cache in pages: a block of keys is one page or several, whose boxes two blocks share."""
    if runs.kernel.arithmetic != "sm90" or runs.kernel.name.endswith("mma"):
        pytest.skip("one kernel of an arithmetic is compared with another")
    for d, page in itertools.product((64, 128, 256), (8, 16, 32, 64, 128, 256)):
        count = -(-1900 // page)
        order = runs.torch.randperm(3 * count + 2, generator=runs.random)[: 3 * count].reshape(3, count).int().cuda()
        k, v = (torch.full((3 * count + 2, page, 4, d), float("nan")).to(runs.dtype).cuda() for _ in "kv")
        k[order.flatten().long()], v[order.flatten().long()] = (
            torch.randn(3 * count, page, 4, d, device="cuda").to(runs.dtype) for _ in "kv"
        )
        q, lengths = torch.randn(3, 16, 900, d, device="cuda").to(runs.dtype), runs.integers(1900, 901, 1024).cuda()
        one, other = (
            pydet.attention_paged(q, k, v, order, lengths, causal=True, kernel=name, arithmetic="sm90")
            for name in (runs.kernel.name, "cuda_attention_sm90_mma")
        )
        differ = int((words(one) != words(other)).sum())
        assert not differ, f"d {d}, pages of {page}: {differ} elements differ"


@each("attention")
def test_packs_of_many_tiles(runs, torch):
    """Blocks take them from one count, and find those that they had again where results are not finite."""
    if runs.kernel.arithmetic != "sm90" or runs.kernel.name.endswith("mma"):
        pytest.skip("one kernel of an arithmetic is compared with another")
    chance = torch.Generator().manual_seed(5)
    for d, (heads, groups), sequences in itertools.product((64, 128, 256), ((16, 4), (9, 3)), (1, 9, 70)):
        lengths = torch.randint(0, 8000 // sequences, (sequences,), generator=chance)
        lengths[sequences // 2] = 3001
        ends = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
        q, k, v = (runs.normal(int(ends[-1]), x, d) for x in (heads, groups, groups))
        for end in ends[1:].tolist():
            v[max(end - 2, 0) : max(end - 1, 0)] = float("inf")  # of a key that most rows of its tile do not see
        q, k, v, ends = (x.cuda() for x in (q, k, v, ends))
        for given in ({"causal": True}, {"causal": True, "window": (200, 0)}, {}):
            one, other = (
                pydet.attention_varlen(q, k, v, ends, ends, kernel=name, arithmetic="sm90", **given)
                for name in (runs.kernel.name, "cuda_attention_sm90_mma")
            )
            differ = int((words(one) != words(other)).sum())
            assert not differ, f"d {d}, {heads} heads of {groups}, {sequences} sequences, {given}: {differ} differ"


@each("attention")
def test_windows(runs):
    windows = [(100, 0), (127, None), (128, 128), (0, 0), (1023, None), (5, 3000), (None, 17)]
    for d, window, causal in itertools.product((64, 128, 256), windows, (False, True)):
        tensors = dense(runs, 1, 4, 2, 500, 1700, d)
        runs.check("attention", *tensors, window=window, causal=causal, what=f"d {d}, window {window}, causal {causal}")


@each("attention")
def test_lengths_packs_and_pages(runs):
    for d in (64, 128, 256):
        ends_q, ends_k = (
            runs.integers(0, 1, 131, 131, 208, 508, 572, 573),
            runs.integers(0, 1, 131, 181, 1381, 1681, 1681, 3981),
        )
        tokens = [runs.normal(573, 4, d), runs.normal(3981, 2, d), runs.normal(3981, 2, d)]
        runs.check("attention_varlen", *tokens, ends_q, ends_k, causal=True, what=f"d {d}, a pack")
        lengths = runs.integers(1100, 0, 1, 1024, 777)
        runs.check(
            "attention", *dense(runs, 5, 8, 2, 3, 1100, d), seqlens_k=lengths, causal=True, what=f"d {d}, lengths"
        )
        padding = runs.integers(0, 299, 100, 128, 300)
        runs.check(
            "attention", *dense(runs, 5, 8, 2, 200, 300, d), first_key=padding, causal=True, what=f"d {d}, padding"
        )
        for page in (8, 16, 64, 128, 256):
            count = -(-1300 // page)
            order = runs.torch.randperm(4 * count + 3, generator=runs.random)[: 4 * count].reshape(4, count).int()
            caches = [runs.normal(4 * count + 3, page, 2, d) for _ in range(2)]
            lengths = runs.integers(1300, 1, 1024, 777)
            runs.check(
                "attention_paged", runs.normal(4, 2, 8, d), *caches, order, lengths, what=f"d {d}, pages of {page}"
            )


@each("attention")
def test_values_that_nobody_sees(runs):
    """A future token's or another sequence's Inf and NaN reach no row; those of an allowed key do."""
    for d, causal in itertools.product((64, 128, 256), (False, True)):
        q, k, v = dense(runs, 1, 4, 2, 300, 1500, d)
        v[:, :, 1400], v[:, :, 1300, 3], k[:, 1, 1450], q[:, 1, 7] = (
            float("inf"),
            float("nan"),
            float("nan"),
            float("inf"),
        )
        runs.check("attention", q, k, v, causal=causal, what=f"d {d}, causal {causal}")
    for d, keys in itertools.product((64, 128, 256), (700, 1500)):  # few rows, each with more keys than the last
        q, k, v = dense(runs, 2, 4, 2, 4, keys, d)
        v[0, :, -2], v[1, 1, -1, d - 3], k[0, 1, -1], v[0, 0, 5, 9] = (float(x) for x in ("inf", "nan", "nan", "inf"))
        runs.check("attention", q, k, v, causal=True, what=f"d {d}, {keys} keys, few rows")


@each("attention")
def test_the_callers_rounding_is_ignored(runs):
    """The factors of the scores are made on the host, on the calling thread."""
    tensors, taken = dense(runs, 1, 4, 2, 37, 300, 64), 0
    there, how = [x.cuda() for x in tensors], {"arithmetic": runs.kernel.arithmetic}
    for given in ({}, {"scale": 0.11}, {"scale": 0.13}, {"scale": 0.17}, {"scale": 0.19, "softcap": 7.0}):
        with unusual_float_environment() as still_set:
            try:
                got = pydet.attention(*there, **given, **how, kernel=runs.kernel.name)
            except pydet.Error as refusal:
                assert refusal.status_name == "PYDET_UNSUPPORTED" and "softcap" in given, given
                continue
            assert still_set()
        taken += 1
        differ = int((words(got.cpu()) != words(pydet.attention(*tensors, **given, **how))).sum())
        assert not differ, f"{given}: {differ} of {got.numel()} elements differ"
    assert taken >= 4


@each("attention")
def test_two_calls_have_the_same_bits(runs, torch):
    """Beside other work on another stream, and whatever the memory held before."""
    q, k, v = (x.cuda() for x in dense(runs, 2, 8, 2, 700, 2500, 128))
    first = pydet.attention(q, k, v, causal=True, arithmetic=runs.kernel.arithmetic, kernel=runs.kernel.name)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(20):
            q.float() @ k[:, :1].float().transpose(-1, -2)
    out = torch.full_like(first, float("nan"))
    pydet.attention(q, k, v, causal=True, arithmetic=runs.kernel.arithmetic, kernel=runs.kernel.name, out=out)
    assert torch.equal(words(first), words(out))
