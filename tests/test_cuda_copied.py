"""Products of operands whose rows begin between units of 16 bytes, which Hopper's kernels multiply from copies: by
name, beside a kernel of mma.sync that reads them where they lie, and which test_cuda.py holds to the CPU's bits."""

import itertools
from functools import partial

import pytest

import capi
import pydet
from test_cuda_tiles import OTHER, torch  # noqa: F401

NAME = "cuda_gemm_sm90_copied"
UNSUPPORTED = 11


def words(tensor):
    import torch

    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def operand(torch, rows, columns, dtype, turned, behind):
    """rows x columns, the second (or first) adjacent, whose rows begin `behind` elements behind whole units, or 0."""
    outer, inner = (columns, rows) if turned else (rows, columns)
    stride = (inner + 7) // 8 * 8 + behind
    whole = torch.randn(outer * stride + 8, device="cuda").to(dtype)
    view = whole[behind : behind + outer * stride].view(outer, stride)[:, :inner]
    return view.T if turned else view


def added(product, a, b, start, **how):
    return product(a, b, out=start.clone(), accumulate=True, **how)


def both(a, b, **options):
    found = [words(pydet.gemm(a, b, kernel=kernel, **options)) for kernel in (OTHER, NAME)]
    assert pydet.last_kernel() == NAME
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_place_of_both_operands(torch, dtype):
    """Each operand along k or turned, well or 1 to 7 elements behind; rows and vectors one less, equal, one more."""
    dtype = getattr(torch, dtype)
    extents = [(1, 9, 65), (7, 8, 64), (65, 63, 127), (129, 257, 200), (300, 130, 1156), (8, 1000, 15), (257, 65, 8)]
    places = [(1, 0), (0, 1), (2, 4), (3, 7), (4, 4), (5, 0), (0, 6), (7, 2)]
    for number, (m, n, k) in enumerate(extents):
        for a_turned, b_turned in itertools.product((False, True), repeat=2):
            for a_behind, b_behind in places:
                a = operand(torch, m, k, dtype, a_turned, a_behind)
                b = operand(torch, k, n, dtype, not b_turned, b_behind)
                options = {
                    "out_dtype": (torch.float32, dtype)[number % 2],
                    "k_chunk": (None, 64)[number // 2 % 2],
                    "bias": (None, torch.randn(n, device="cuda"))[number % 3 == 0],
                }
                want, got = both(a, b, **options)
                where = f"{m}x{n}x{k}, turned {a_turned} {b_turned}, behind {a_behind} {b_behind}"
                assert torch.equal(want, got), where


def test_chosen_for_what_lies_badly_and_has_its_bits(torch):
    """The layer of K = 3420 and its gradients, few rows and many; of single rows, and sums that go on."""
    for m in (1, 13, 100, 129, 503, 2178):
        x, w = (torch.randn(rows, 3420, device="cuda").bfloat16() for rows in (m, 1280))
        dy = torch.randn(m, 1280, device="cuda").bfloat16()
        ones = torch.ones(3420, 1280, device="cuda")
        calls = [
            partial(pydet.gemm, x, w.T),
            partial(pydet.skinny_gemm, x, w),
            partial(pydet.gemm, dy, w),
            partial(pydet.gemm_db, x, dy, out_dtype="float32"),
            partial(added, pydet.gemm_db, x, dy, ones),
        ]
        for i, call in enumerate(calls):
            want, chosen = call(kernel=OTHER), call(kernel=None)
            well = m == 1 and i > 2  # a single row
            in_place = well or (m <= 32 and i < 2)  # few rows, by a kernel that copies 8 bytes at once
            assert (pydet.last_kernel() == NAME) != in_place, (m, i, pydet.last_kernel())
            assert torch.equal(words(want), words(chosen)), (m, i)
            assert well or torch.equal(words(want), words(call(kernel=NAME))), (m, i)


def test_rows_that_overlap_and_repeat(torch):
    """A row for all (stride 0), windows one element apart, and single rows that begin anywhere."""
    w = torch.randn(200, 520, device="cuda").bfloat16()
    line = torch.randn(4000, device="cuda").bfloat16()
    for stride in (0, 1, 3, 7, 9, 521):
        for first in (0, 1, 5):
            x = line[first:].as_strided((6, 500), (stride, 1))
            want, got = both(x, w[:, :500].T)
            assert torch.equal(want, got), (stride, first)


def test_what_it_refuses(torch):
    a, b = torch.randn(20, 64, device="cuda").bfloat16(), torch.randn(64, 40, device="cuda").bfloat16()
    odd = torch.randn(20, 65, device="cuda").bfloat16()[:, :64]
    batch = torch.randn(3, 20, 65, device="cuda").bfloat16()[:, :, :64]
    for x, y in [(a, b), (batch, b), (odd.float(), b.float())]:
        with pytest.raises(pydet.Error) as error:
            pydet.gemm(x, y, kernel=NAME)
        assert error.value.status == UNSUPPORTED
    assert torch.equal(words(pydet.gemm(batch[1], b)), words(pydet.gemm(batch, b)[1]))


def test_workspace(torch):
    """What C asks for, exactly; one byte less is another kernel; nothing beside it is written."""
    ffi = capi.ffi
    lib = ffi.dlopen(str(pydet._native.load(1).path))
    x, w = torch.randn(300, 3420, device="cuda").bfloat16(), torch.randn(1280, 3420, device="cuda").bfloat16()
    want = words(pydet.gemm(x, w.T, kernel=OTHER))

    def tensor(t):
        return capi.Tensor(shape=t.shape, dtype=capi.BFLOAT16, data=t.data_ptr(), device=(2, 0)).c

    size, total = ffi.new("uint64_t *"), 0
    for t in (x, w):
        assert lib.pydet_gemm_copy_workspace(tensor(t), size) == lib.PYDET_OK
        assert size[0] == t.shape[0] * 3456 * 2
        total += size[0]
    well = torch.randn(300, 3424, device="cuda").bfloat16()
    assert lib.pydet_gemm_copy_workspace(tensor(well), size) == lib.PYDET_OK and size[0] == 0
    scratch = torch.full((total + 32,), 77, dtype=torch.uint8, device="cuda")
    stream = ffi.cast("void *", torch.cuda.current_stream().cuda_stream)
    for given, taken in ((total, True), (total - 1, False)):
        y = torch.empty(300, 1280, dtype=torch.bfloat16, device="cuda")
        options = capi.options(
            "pydet_skinny_gemm_options", workspace=ffi.cast("void *", scratch.data_ptr() + 16), workspace_size=given
        )
        operands = [tensor(t) for t in (x, w, y)]
        assert lib.pydet_skinny_gemm(stream, operands[0], operands[1], ffi.NULL, operands[2], options) == lib.PYDET_OK
        assert (ffi.string(lib.pydet_last_kernel()).decode() == NAME) == taken
        assert torch.equal(words(y), want)
        assert bool((scratch[:16] == 77).all()) and bool((scratch[16 + total :] == 77).all())


def test_in_a_graph_behind_its_own_operands(torch):
    """Products of the results before them, replayed beside a busy stream: nobody reads a copy before it is whole."""
    layers = [torch.randn(1156, 1156, device="cuda").bfloat16() / 34 for _ in range(6)]
    x = torch.randn(700, 1156, device="cuda").bfloat16()

    def run(kernel=None):
        y = x
        for w in layers:
            y = pydet.gemm(y, w.T, kernel=kernel)
        return y

    want = words(run(OTHER))
    run()
    busy, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    graph, wrong = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(100):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp_(-1, 1)
        graph.replay()
        wrong += (words(y) != want).sum()
        wrong += (words(run()) != want).sum()
    assert int(wrong) == 0
