"""The CUDA kernels of attention's gradients, forced by name, against the CPU's bit for bit, at their boundaries."""

import itertools

import pytest

import pydet
from test_cuda import cuda_kernels, device, each, torch, words  # noqa: F401
from test_cuda_attention import EXTENTS, Runs, dense

CUTS = [f"cuda_attention_backward_sm90_{cut}" for cut in ("wide", "narrow", "halved")]  # tiles of keys


def test_the_hopper_kernel_is_listed_first():
    names = [kernel.name for kernel in cuda_kernels("attention_backward")]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    assert names[:2] == ["cuda_attention_backward_sm90_fused", "cuda_attention_backward_sm90"]
    assert set(names[2:5]) == set(CUTS)


class Gradients(Runs):
    """Problems of one kernel and type: their gradients on the GPU and on the CPU, of what the CPU's forward gave."""

    @property
    def fused(self):
        return self.kernel.name.endswith("_fused")

    @property
    def widths(self):
        return (64, 128) if self.fused or self.kernel.name in CUTS else (64, 128, 256)

    def refuses(self, *tensors, **options):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=self.kernel.name):
            self.check("attention", *tensors, what="refused", **options)

    def check(self, operation, *tensors, what, gradient=None, accumulate=False, only=None, **options):
        torch, arithmetic = self.torch, self.kernel.arithmetic
        q, k, v = tensors[:3]
        packed = operation == "attention_varlen"
        out, lse = getattr(pydet, operation)(*tensors, **options, arithmetic=arithmetic, return_lse=True)
        dout = self.normal(*q.shape[:-1], v.shape[-1])
        kind = torch.float32 if accumulate else gradient or self.dtype
        start = [torch.full(x.shape, 0.0 if packed else float("nan")).to(kind) for x in (q, k, v)]
        if accumulate:
            start[1:] = [torch.randn(x.shape, generator=self.random) for x in (k, v)]

        def run(kernel, place):
            operands = [place(x) for x in (dout, q, k, v, out, lse, *tensors[3:])]
            named = {name: place(x) if torch.is_tensor(x) else x for name, x in options.items()}
            names = {None: ("dq", "dk", "dv"), "q": ("dq",), "kv": ("dk", "dv")}[only]
            results = {name: place(x.clone()) for name, x in zip(("dq", "dk", "dv"), start) if name in names}
            call = getattr(pydet, f"{operation}_backward")
            call(*operands, **named, **results, only=only, accumulate=accumulate, arithmetic=arithmetic, kernel=kernel)
            return {name: x.cpu() for name, x in results.items()}

        got, want = run(self.kernel.name, lambda x: x.cuda()), run(None, lambda x: x)
        for name, other in want.items():
            differ = int((words(got[name]) != words(other)).sum())
            assert not differ, f"{what}: {differ} of {other.numel()} elements of {name} differ"


@pytest.fixture
def runs(device, torch, kernel, dtype):
    return Gradients(torch, kernel, dtype)


@each("attention_backward")
def test_extents(runs):
    extents = [(queries, min(keys, 1100)) for queries, keys in EXTENTS]
    for d, (queries, keys), causal in itertools.product(runs.widths, extents, (False, True)):
        tensors = dense(runs, 1, 4, 2, queries, keys, d, tokens_first=queries % 2 == 0)
        runs.check("attention", *tensors, causal=causal, what=f"d {d}, {queries} x {keys}, causal {causal}")


@each("attention_backward")
def test_widths_heads_and_types(runs):
    for d, e in ((8, 8), (40, 40), (72, 72), (96, 128), (112, 16), (128, 64), (136, 136), (192, 128), (248, 256)):
        tensors = dense(runs, 1, 4, 2, 150, 260, d, e)
        if max(d, e) > max(runs.widths):
            runs.refuses(*tensors, causal=True)
            continue
        runs.check("attention", *tensors, causal=True, what=f"d {d}, e {e}")
    for heads, groups in ((7, 1), (3, 3), (16, 2)):
        runs.check("attention", *dense(runs, 2, heads, groups, 140, 200, 64), what=f"{heads} heads of {groups}")
    for d, only in itertools.product(runs.widths, (None, "q", "kv")):
        tensors = dense(runs, 2, 4, 2, 200, 333, d)
        if runs.fused and only:
            runs.refuses(*tensors, only=only)
            continue
        runs.check("attention", *tensors, causal=True, only=only, gradient=runs.torch.float32, what=f"d {d}, {only}")


@each("attention_backward")
def test_windows(runs):
    windows = [(100, 0), (127, None), (128, 128), (0, 0), (5, 300), (None, 17)]
    for d, window, causal in itertools.product(runs.widths, windows, (False, True)):
        tensors = dense(runs, 1, 4, 2, 300, 500, d)
        runs.check("attention", *tensors, window=window, causal=causal, what=f"d {d}, window {window}, causal {causal}")


@each("attention_backward")
def test_lengths_and_packs(runs):
    for d in runs.widths:
        ends = runs.integers(0, 1, 131, 131, 208, 508, 573), runs.integers(0, 1, 131, 181, 400, 690, 700)
        gaps = runs.integers(3, 200, 290), runs.integers(1, 198, 260)
        tokens = [runs.normal(573, 4, d), runs.normal(700, 2, d), runs.normal(700, 2, d)]
        for (starts_q, starts_k), causal in itertools.product((ends, gaps), (False, True)):
            runs.check(
                "attention_varlen", *tensors_of(tokens), starts_q, starts_k, causal=causal, what=f"d {d}, a pack"
            )
        lengths, padding = runs.integers(300, 0, 1, 129), runs.integers(0, 299, 100, 300)
        for options in ({"seqlens_k": lengths}, {"first_key": padding}, {"seqlens_k": lengths, "first_key": padding}):
            for causal, accumulate in itertools.product((False, True), (False, True)):
                tensors = dense(runs, 4, 4, 2, 200, 300, d)
                if runs.fused and "first_key" in options:
                    runs.refuses(*tensors, causal=causal, **options)
                    continue
                what = f"d {d}, {', '.join(options)}, causal {causal}, accumulate {accumulate}"
                runs.check("attention", *tensors, causal=causal, accumulate=accumulate, what=what, **options)


@each("attention_backward")
def test_what_comes_behind_sees_all(runs, torch):
    """Tiles of keys that take long beside tiles of queries that are soon done: whoever reads dk next finds it whole."""
    for d in runs.widths:
        q, k, v = (x.cuda() for x in dense(runs, 1, 64, 1, 2000, 200, d))
        dout, how = runs.normal(1, 64, 2000, d).cuda(), {"arithmetic": runs.kernel.arithmetic}
        out, lse = pydet.attention(q, k, v, **how, return_lse=True)
        want = [x.clone() for x in pydet.attention_backward(dout, q, k, v, out, lse, **how, kernel=runs.kernel.name)]
        torch.cuda.synchronize()
        got = [torch.full_like(x, float("nan")) for x in want]
        named = dict(zip(("dq", "dk", "dv"), got))
        for _ in range(5):
            for x in got:
                x.fill_(float("nan"))
            pydet.attention_backward(dout, q, k, v, out, lse, **how, kernel=runs.kernel.name, **named)
            read = [pydet.gemm(x.flatten(0, -2), torch.eye(d, device="cuda", dtype=x.dtype)) for x in got[1:]]
            plain = [x.clone() for x in got]
            for name, one, other in zip(("dq", "dk", "dv"), plain, want):
                assert torch.equal(words(one), words(other)), f"d {d}: {name} was read too early"
            for name, one, other in zip(("dk", "dv"), read, want[1:]):
                assert torch.equal(one, other.flatten(0, -2)), f"d {d}: {name} was read too early"


def tensors_of(tokens):
    return [x.clone() for x in tokens]


@each("attention_backward")
def test_values_that_nobody_sees(runs):
    """What a pair that is not allowed holds reaches no gradient, an Inf or NaN of an allowed one does."""
    inf, nan = float("inf"), float("nan")
    for d, causal, accumulate in itertools.product(runs.widths, (False, True), (False, True)):
        q, k, v = dense(runs, 1, 4, 2, 200, 300, d)
        v[:, :, 250], v[:, :, 240, 3], k[:, 1, 260], q[:, 1, 7] = inf, nan, nan, inf
        runs.check("attention", q, k, v, causal=causal, accumulate=accumulate, what=f"d {d}, causal {causal}")


@each("attention_backward")
def test_sums_of_any_size(runs):
    """Parts of dq that are small, subnormal ones among them: what a GPU's memory adds by itself it flushes."""
    for d, spread, causal in itertools.product(runs.widths, (8, 15, 25), (False, True)):
        q, k, v = dense(runs, 1, 2, 1, 200, 400, d)
        what = f"d {d}, scores {spread} times as large, causal {causal}"
        runs.check("attention", q * spread, k, v, causal=causal, gradient=runs.torch.float32, what=what)


@each("attention_backward")
def test_long_sequences(runs, torch):
    """Tiles of keys in chunks of queries, in sections and past them: the bits of the two kernels."""
    if not runs.fused:
        pytest.skip("it is the other")
    shapes = [(1, 16, 1, 4200, 4200), (2, 8, 8, 3000, 2900), (1, 3, 1, 300, 17100), (3, 4, 2, 1025, 1153)]
    for d, (batch, heads, groups, queries, keys), causal in itertools.product(runs.widths, shapes, (True, False)):
        q, k, v = (x.cuda() for x in dense(runs, batch, heads, groups, queries, keys, d))
        dout, how = runs.normal(batch, heads, queries, d).cuda(), {"causal": causal, "arithmetic": "sm90"}
        out, lse = pydet.attention(q, k, v, **how, return_lse=True)
        names = runs.kernel.name, runs.kernel.name.removesuffix("_fused")
        got, want = (pydet.attention_backward(dout, q, k, v, out, lse, **how, kernel=name) for name in names)
        for name, one, other in zip(("dq", "dk", "dv"), got, want):
            assert torch.equal(words(one), words(other)), f"d {d}, {queries} x {keys}, causal {causal}: {name}"


@each("attention_backward")
def test_cut_at_blocks_of_queries(runs, torch):
    """Calls of some of a sequence's queries each, in order, have the bits of one call."""
    for d in runs.widths:
        q, k, v = (x.cuda() for x in dense(runs, 1, 4, 2, 512, 400, d))
        dout = runs.normal(1, 4, 512, d).cuda()
        how = {"arithmetic": runs.kernel.arithmetic}
        out, lse = pydet.attention(q, k, v, **how, return_lse=True)
        how["kernel"] = runs.kernel.name
        want = pydet.attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            **how,
            dk=torch.empty(k.shape, device="cuda"),
            dv=torch.empty(v.shape, device="cuda"),
        )
        dk, dv = torch.zeros(k.shape, device="cuda"), torch.zeros(v.shape, device="cuda")
        parts = []
        for first, last in ((0, 128), (128, 384), (384, 512)):
            cut = [x[:, :, first:last] for x in (dout, q, out, lse)]
            made = pydet.attention_backward(cut[0], cut[1], k, v, cut[2], cut[3], **how, accumulate=True, dk=dk, dv=dv)
            parts.append(made[0])
        for name, one, other in zip(("dq", "dk", "dv"), (torch.cat(parts, 2), dk, dv), want):
            assert torch.equal(words(one), words(other)), f"d {d}, {name}"


@each("attention_backward")
def test_two_calls_have_the_same_bits(runs, torch):
    """Beside other work on another stream, and whatever the memory held before."""
    q, k, v = (x.cuda() for x in dense(runs, 2, 8, 2, 700, 900, 128))
    dout = runs.normal(2, 8, 700, 128).cuda()
    how = {"causal": True, "arithmetic": runs.kernel.arithmetic}
    out, lse = pydet.attention(q, k, v, **how, return_lse=True)
    first = pydet.attention_backward(dout, q, k, v, out, lse, **how, kernel=runs.kernel.name)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(20):
            q.float() @ k[:, :1].float().transpose(-1, -2)
    again = [torch.full_like(x, float("nan")) for x in first]
    pydet.attention_backward(
        dout, q, k, v, out, lse, **how, kernel=runs.kernel.name, dq=again[0], dk=again[1], dv=again[2]
    )
    for one, two in zip(first, again):
        assert torch.equal(words(one), words(two))
