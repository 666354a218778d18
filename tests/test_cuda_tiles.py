"""Each tile of the Hopper GEMM, forced by name, at its own edges: one less, equal and one more than a tile, a cluster
and a wave of clusters, a stage and the ring of stages, in every layout, beside another kernel of the same arithmetic.

That kernel, of mma.sync, shares no code with the tiles; test_cuda.py holds both to the CPU's bits.
"""

import itertools
import re

import pytest

import pydet

NAME = re.compile(r"cuda_gemm_sm90_(\d+)x(\d+)(?:_(\d)x(\d)|(_wide))?(_swapped)?$")
OTHER = "cuda_gemm_sm90_mma_64x64"
UNSUPPORTED = 11


def tiles():
    return [kernel for kernel in pydet.kernels() if kernel.device == "cuda" and NAME.match(kernel.name)]


def shape_of(name):
    """Rows and columns of out that a tile makes, and how many of them lie under and beside each other in a cluster."""
    m, n, cluster_m, cluster_n, wide, swapped = NAME.match(name).groups()
    shape = int(m), int(n), int(cluster_m or (1 if wide else 2)), int(cluster_n or (2 if wide else 1))
    return (shape[1], shape[0], shape[3], shape[2]) if swapped else shape


def test_names_tell_the_tiles():
    found = tiles()
    if not found:
        pytest.skip("libpydet_cuda.so is not built")
    assert len({kernel.name for kernel in found}) == len(found)
    assert shape_of("cuda_gemm_sm90_128x80_2x4_swapped") == (80, 128, 4, 2)
    for kernel in found:
        assert all(extent >= 32 for extent in shape_of(kernel.name)[:2]), kernel.name


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not tiles() or not tiles()[0].available:
        pytest.skip("no Hopper GPU")
    torch.manual_seed(0)
    return torch


def operand(torch, rows, columns, dtype, adjacent_rows):
    """rows x columns whose columns, or rows, are adjacent, in a buffer of whole 16-byte units a row."""
    outer, inner = (columns, rows) if adjacent_rows else (rows, columns)
    whole = torch.randn(outer, (inner + 7) // 8 * 8, device="cuda").to(dtype)[:, :inner]
    return whole.T if adjacent_rows else whole


def compare(torch, name, m, n, k, a_turned, b_turned, dtype, out_dtype, bias, accumulate, k_chunk):
    """Whether the tile took it. accumulate: also "initial", a tensor of its own in the place of out."""
    a, b = operand(torch, m, k, dtype, a_turned), operand(torch, k, n, dtype, not b_turned)
    start = torch.randn(m, n, device="cuda") if accumulate else torch.full((m, n), float("nan"), device="cuda")
    bias = {None: None, "n": torch.randn(n, device="cuda"), "mn": torch.randn(m, n, device="cuda").to(dtype)}[bias]
    results = []
    for kernel in (OTHER, name):
        out, options = start.to(out_dtype, copy=True), {"bias": bias, "k_chunk": k_chunk, "kernel": kernel}
        if accumulate == "initial":
            out, options["initial"] = torch.full_like(out, float("nan")), start
        else:
            options["accumulate"] = accumulate
        try:
            pydet.gemm(a, b, out=out, **options)
        except pydet.Error as error:
            if error.status != UNSUPPORTED or kernel == OTHER:
                raise
            return False
        results.append(out.view(torch.int32 if out_dtype == torch.float32 else torch.int16))
    wrong = int((results[0] != results[1]).sum())
    where = f"{m}x{n}x{k}, turned {a_turned} {b_turned}, {out_dtype}"
    assert wrong == 0, f"{name}: {wrong} of {m * n} words differ at {where}"
    return True


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [kernel.name for kernel in tiles()] or [None])
def test_edges(torch, name, dtype):
    dtype = getattr(torch, dtype)
    m, n, cluster_m, cluster_n = shape_of(name)
    rows, columns = m * cluster_m, n * cluster_n
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    wave = sms // (cluster_m * cluster_n)
    extents = [
        *[
            (1, 1),
            (m - 1, n + 1),
            (m, n),
            (m + 1, n - 1),
            (m + 3, n + 4),
            (m, n - 4),
            (rows - 1, columns + 1),
            (rows + 1, columns - 1),
        ],
        *[(rows, columns), (2 * rows + 8, 3 * columns - 8), (rows * (wave // 3) + 1, 3 * columns + 16)],
        *[(rows * 2 - 1, columns * wave), (rows * 3 + 16, columns * (wave // 2 + 1))],
        # More tiles a block than its producer may be ahead.
        *[(rows, columns * wave * 9 + 8), (rows * wave * 8 + 1, columns)],
    ]
    depths = itertools.cycle([1, 15, 16, 64, 72, 63 * 8, 65, 64 * 13, 129, 200, 64 * 4 - 8, 1000])
    outs = itertools.cycle([dtype, torch.float32, dtype])
    ways = itertools.cycle(
        [
            *[(None, False, None), ("n", False, None), (None, True, None), (None, False, 64), ("mn", False, None)],
            *[("mn", True, 80), ("n", True, None), (None, False, 1024), (None, True, 16)],
            *[("n", "initial", None), (None, "initial", 64), ("mn", "initial", 48)],
        ]
    )
    layouts = list(itertools.product([False, True], repeat=2))
    taken = dict.fromkeys(layouts, 0)
    for layout in layouts:
        for m_, n_ in extents:
            bias, accumulate, k_chunk = next(ways)
            out = torch.float32 if accumulate is True else next(outs)
            took = compare(torch, name, m_, n_, next(depths), *layout, dtype, out, bias, accumulate, k_chunk)
            taken[layout] += took
    assert taken[False, False] >= 6, taken  # x w^T, which every tile takes


@pytest.mark.parametrize("name", [None, *(kernel.name for kernel in tiles())])
def test_columns_of_out_adjacent(torch, name):
    """Sums that begin at a tensor of their own, which has its rows adjacent, where out has its columns."""
    for m, n, k in ((129, 129, 136), (128, 136, 64), (256, 384, 80), (300, 136, 1000), (1037, 523, 264)):
        a, b = operand(torch, m, k, torch.bfloat16, False), operand(torch, k, n, torch.bfloat16, True)
        start, bias = torch.randn(m, n, device="cuda"), torch.randn(n, device="cuda")
        for out_dtype, more in itertools.product((torch.bfloat16, torch.float32), ({}, {"bias": bias})):
            want = pydet.gemm(a, b, out_dtype=out_dtype, initial=start, kernel=OTHER, **more)
            out = torch.full((n, m), float("nan"), dtype=out_dtype, device="cuda").T
            pydet.gemm(a, b, out=out, initial=start, kernel=name, **more)
            word = torch.int32 if out_dtype == torch.float32 else torch.int16
            wrong = int((out.contiguous().view(word) != want.view(word)).sum())
            assert wrong == 0, f"{name or 'chosen'}: {wrong} of {m * n} words differ at {m}x{n}x{k}, {out_dtype}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_segments_side_by_side_along_k(torch, dtype):
    """A batch whose matrices are segments of x and of w: one pass over w, by each tile of few rows, the sums apart."""
    dtype = getattr(torch, dtype)
    names = [None] + [f"cuda_skinny_gemm_sm90_{rows}" for rows in (16, 32, 48, 64, 96)]
    sizes = itertools.cycle([(8, 2, 16), (136, 4, 512), (1000, 3, 48), (4104, 4, 1040), (520, 8, 64), (33, 5, 272)])
    for m in (1, 2, 8, 9, 16, 17, 31, 32, 33, 63, 64):
        for name in names:
            n, count, chunk = next(sizes)
            x, w = operand(torch, m, count * chunk, dtype, False), operand(torch, count * chunk, n, dtype, True)
            a, b = x.unflatten(1, (count, chunk)).transpose(0, 1), w.unflatten(0, (count, chunk))
            sums = torch.full((count, m, n), float("nan"), device="cuda")
            pydet.gemm(a, b, out=sums, kernel=name)
            for i in range(count):
                one = pydet.gemm(a[i], b[i], out_dtype="float32", kernel=OTHER)
                assert torch.equal(sums[i].view(torch.int32), one.view(torch.int32)), f"{name} {m}x{n}: {i} of {count}"
