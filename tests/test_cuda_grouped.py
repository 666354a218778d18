"""The CUDA kernels of grouped_gemm, forced by name, against the CPU's bit for bit, whatever the boundaries hold."""

import dataclasses
import functools
import random

import numpy as np
import pytest

import pydet
import test_golden
import test_grouped_gemm
from cases import DTYPES, assert_same_bits, data
from test_cuda import cuda_kernels, device, each, torch, words  # noqa: F401
from test_grouped_gemm import ROUTINGS, Grouped


def test_every_grouped_kernel_is_listed():
    names = [kernel.name for kernel in cuda_kernels("grouped_gemm")]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    assert len(names) == len(set(names)) == 7


@functools.lru_cache(maxsize=2000)
def on_cpu(problem):
    """The CPU's result, which tests/test_grouped_gemm.py holds to GEMM of each group."""
    return test_grouped_gemm.run(pydet.grouped_gemm, problem)


def problems(dtype, arithmetic):
    """Beside those of the CPU's tests: extents around tiles of 64 and 128 and stages of 8, 16 and 32, in layouts that
    16-byte copies can and cannot read."""
    yield from test_grouped_gemm.problems_of(dtype, arithmetic)
    make = functools.partial(Grouped, dtype=dtype, arithmetic=arithmetic)
    outs = list(DTYPES)
    for i, routing in enumerate(("tiles", "odd", "empty between", "gaps", "backwards", "masked")):
        for j, k in enumerate((1, 8, 15, 16, 17, 32, 33, 96, 136, 264)):
            yield make(routing, rows=k, n=(64, 8, 72, 128, 136, 129)[(i + j) % 6], seed=i, out_dtype=outs[j % 3])
            yield make(
                routing, rows=k, n=64, b_layout="col", out_dtype=outs[(i + j) % 3], bias=("", "fp32", "fp16")[j % 3]
            )
        for j, m in enumerate((1, 8, 63, 64, 65, 127, 128, 136, 200)):
            wide = (64, 8, 72, 128, 136, 129, 256)[(i + j) % 7]
            yield make(routing, True, m, wide, a_layout="col", out_dtype=outs[j % 3], seed=i)
            yield make(routing, True, m, wide, a_layout=("row", "col")[j % 2], b_layout=("col", "row")[i % 2])
    for routing in ("tiles", "empty between", "masked"):
        for k_chunk in (16, 32, 48, 64, 1024):
            yield make(routing, rows=200, n=72, k_chunk=k_chunk, b_layout="col", bias="bf16")
            yield make(routing, True, 72, 136, k_chunk=k_chunk, a_layout="col", accumulate=True)
        yield make(routing, rows=136, n=136, accumulate=True, out_layout="col")
        yield make(routing, True, 136, 136, a_layout="col", accumulate=True, out_layout="col", bias="fp32")
        for kind in ("wide", "specials", "tiny"):
            yield make(routing, rows=136, n=136, kind=kind)
            yield make(routing, True, 136, 136, kind=kind, a_layout="col")


@each("grouped_gemm")
def test_equals_cpu(device, kernel, dtype):
    for problem in problems(dtype, kernel.arithmetic):
        assert_same_bits(test_grouped_gemm.run(device.grouped_gemm, problem), on_cpu(problem), str(problem))
    assert device.taken > 60, f"{kernel.name} took {device.taken} problems and refused {device.refused}"


@each("grouped_gemm")
def test_golden_hashes(device, kernel, dtype):
    test_golden.check_golden("grouped_gemm", device.grouped_gemm, kernel.arithmetic, dtype)


@each("grouped_gemm")
def test_nan_next_door(device, kernel, dtype):
    test_grouped_gemm.check_neighbours(device.grouped_gemm, dtype, kernel.arithmetic)


@each("grouped_gemm")
def test_random_boundaries(device, kernel, dtype):
    """Any int32, ascending or not, with starts or without."""
    for number in range(30):
        rng = random.Random(f"{dtype}/{number}")
        tokens, groups = rng.randint(0, 300), rng.randint(1, 40)
        values = [rng.choice([rng.randint(-50, 400), rng.randint(-(2**31), 2**31 - 1)]) for _ in range(2 * groups)]
        end = sorted(rng.randint(0, tokens) for _ in range(groups)) if number % 2 else values[:groups]
        start = values[groups:] if number % 3 == 0 else None
        ROUTINGS["random"] = (tokens, end, start)
        problem = Grouped("random", rng.random() < 0.5, rng.choice([40, 64, 100]), rng.choice([24, 64, 130]), dtype,
                          kernel.arithmetic, a_layout=rng.choice(["row", "col"]), seed=number)  # fmt: skip
        want = test_grouped_gemm.run(pydet.grouped_gemm, problem)
        got = test_grouped_gemm.run(device.grouped_gemm, problem)
        assert_same_bits(got, want, f"{number}: {problem}, ends {end}, starts {start}")
    del ROUTINGS["random"]


@each("grouped_gemm")
def test_more_tiles_than_blocks(device, kernel, dtype):
    """A block's later tiles are in later groups, past empty ones; both ways."""
    rng = np.random.default_rng(3)
    sizes = rng.permutation(np.concatenate([rng.integers(0, 40, 150), [0] * 30, [700, 300]])).astype(np.int64)
    end = np.cumsum(sizes).astype(np.int32)
    a = data("normal", (int(end[-1]), 24), DTYPES[dtype])
    b = data("normal", (len(end), 24, 1160), DTYPES[dtype], 1)
    options = {"arithmetic": kernel.arithmetic, "out_dtype": DTYPES["fp32"]}
    assert_same_bits(device.grouped_gemm(a, b, end, **options), pydet.grouped_gemm(a, b, end, **options), "rows")
    x, y = data("normal", (int(end[-1]), 136), DTYPES[dtype]).T, data("normal", (int(end[-1]), 520), DTYPES[dtype], 1)
    for out in DTYPES.values():  # new arrays, which have no gaps: the copy engine may store them
        options["out_dtype"] = out
        assert_same_bits(device.grouped_gemm(x, y, end, **options), pydet.grouped_gemm(x, y, end, **options), "depth")
    # Sums that go on: by pairs, and where their number is odd or rows begin between units of 16 bytes.
    sums = data("normal", (len(end), 136, 520), DTYPES["fp32"], 2)
    for n, room in ((520, 520), (519, 520), (518, 518)):
        got, want = (np.ascontiguousarray(sums[:, :, :room]) for _ in range(2))
        for call, out in ((device.grouped_gemm, got), (pydet.grouped_gemm, want)):
            call(x, y[:, :n], end, out=out[:, :, :n], accumulate=True, arithmetic=kernel.arithmetic)
        assert_same_bits(got, want, f"depth, sums of {n} columns go on")
    assert device.taken == 7


@each("grouped_gemm")
def test_rows_that_end_inside_16_bytes(device, kernel, dtype):
    """Sums whose rows have room behind them keep it, though copy engines store 16 bytes at a time."""
    x, y = data("normal", (80, 136), DTYPES[dtype]).T, data("normal", (80, 136), DTYPES[dtype], 1)[:, :130]
    end = np.int32([30, 47, 80])
    for out in DTYPES.values():
        memory = np.full((3, 136, 136), 7, out)
        device.grouped_gemm(x, y, end, out=memory[:, :, :130], arithmetic=kernel.arithmetic)
        want = pydet.grouped_gemm(x, y, end, out_dtype=out, arithmetic=kernel.arithmetic)
        assert_same_bits(np.ascontiguousarray(memory[:, :, :130]), want, str(out))
        assert np.all(memory[:, :, 130:] == 7), f"{out}: what follows a row changed"
    assert device.taken == 3


# Groups around one, two and many tiles of 64 and 128 rows under each other, and boxes of 32 of them; more groups than a
# block has threads; one that is walked in bands of 2048 rows.
LARGE = {
    "pairs": [256, 257, 128, 129, 0, 384, 385, 31, 32, 33, 64, 65, 192, 193, 127, 1],
    "many": [1, 0, 7, 2] * 100 + [70, 0, 130],
    "bands": [5, 2048 + 256 + 17, 9],
}


@each("grouped_gemm")
def test_groups_of_many_tiles(device, kernel, dtype):
    """Both layouts of the matrices; an odd number of tiles side by side and an even one; stages of 64 along K, a ring
    of them and more."""
    for name, sizes in LARGE.items():
        end = np.cumsum(sizes, dtype=np.int32)
        ROUTINGS[name] = (int(end[-1]) + 3, end, None)
        make = functools.partial(Grouped, name, dtype=dtype, arithmetic=kernel.arithmetic)
        shapes = {"pairs": [(72, 264), (136, 776)], "many": [(56, 136)], "bands": [(8, 1160)]}[name]
        problems = [make(rows=k, n=n, b_layout=layout) for k, n in shapes for layout in ("row", "col")]
        if name == "pairs":
            problems += [make(rows=k, n=136, b_layout="col", accumulate=k == 832) for k in (64, 256, 320, 832)]
            depth = functools.partial(make, depth=True, a_layout="col")
            problems += [depth(rows=m, n=n, out_dtype="bf16") for m, n in ((264, 136), (136, 520))]
            problems += [depth(rows=392, n=72, accumulate=True, bias="bf16")]
        for problem in problems:
            assert_same_bits(test_grouped_gemm.run(device.grouped_gemm, problem), on_cpu(problem), str(problem))
        del ROUTINGS[name]
    assert device.taken == 15, f"{kernel.name} took {device.taken} and refused {device.refused}"


@each("grouped_gemm")
def test_more_groups_than_a_launch_has(device, kernel, dtype):
    """Those of a later launch begin where one of an earlier launch ended, boundaries that run backwards included; both
    layouts of the matrices, and sums over groups, which the copy engine may store."""
    rng = np.random.default_rng(8)
    for name, count in (("around", 1025), ("three launches", 2100)):
        end = np.cumsum(rng.integers(0, 3, count), dtype=np.int64).astype(np.int32)
        end[1020:1023], end[-1] = end[1019] + 140, end[-2] + 200
        start = None if count == 1025 else np.where(np.arange(count) % 5 == 0, end - 1, 0).astype(np.int32)
        ROUTINGS[name] = (int(end[-1]) + 3, end, start)
        make = functools.partial(Grouped, name, dtype=dtype, arithmetic=kernel.arithmetic)
        for problem in (
            make(rows=72, n=40, out_dtype="bf16"),
            make(rows=72, n=40, b_layout="col"),
            make(depth=True, rows=24, n=40, a_layout="col", bias="bf16"),
        ):
            assert_same_bits(test_grouped_gemm.run(device.grouped_gemm, problem), on_cpu(problem), str(problem))
        x, y = data("normal", (int(end[-1]), 24), DTYPES[dtype]).T, data("normal", (int(end[-1]), 40), DTYPES[dtype], 1)
        options = {"arithmetic": kernel.arithmetic, "out_dtype": DTYPES["bf16"]}
        assert_same_bits(device.grouped_gemm(x, y, end, **options), pydet.grouped_gemm(x, y, end, **options), name)
        del ROUTINGS[name]
    assert device.taken == 8, f"{kernel.name} took {device.taken} and refused {device.refused}"


@each("grouped_gemm")
def test_chunks_around_stages_and_tiles(device, kernel, dtype):
    """Chunks of one step to several stages of 64, which begin inside a stage; groups of many tiles, and sums over
    groups that end inside a step. Who refuses k_chunk refuses all of them."""
    asked = 0
    for name, sizes in (("pairs", [257, 128, 0, 31, 129, 5]), ("many", [1, 0, 7, 2] * 30 + [70, 0, 130])):
        end = np.cumsum(sizes, dtype=np.int32)
        ROUTINGS[name] = (int(end[-1]) + 3, end, None)
        make = functools.partial(Grouped, name, dtype=dtype, arithmetic=kernel.arithmetic)
        for i, k_chunk in enumerate((16, 48, 64, 80, 128, 144, 320, 2**40) if name == "pairs" else (32, 64)):
            layout, out = ("row", "col")[i % 2], list(DTYPES)[i % 3]
            rows = make(rows=(200, 328)[i % 2], n=(72, 264)[i // 2 % 2], b_layout=layout, k_chunk=k_chunk)
            sums = make(depth=True, rows=136, n=264, a_layout="col", k_chunk=k_chunk)
            more = {"accumulate": True} if i % 4 == 0 else {"out_dtype": out, "bias": ("", "bf16")[i % 2]}
            for problem in (rows, sums):
                problem = dataclasses.replace(problem, **more)
                assert_same_bits(test_grouped_gemm.run(device.grouped_gemm, problem), on_cpu(problem), str(problem))
                asked += 1
        del ROUTINGS[name]
    assert asked in (device.taken, device.refused), f"{kernel.name} took {device.taken} and refused {device.refused}"


def test_chunks_by_the_library_s_choice(torch):
    """Hopper's own kernel takes them; what it does not read aligned stays with another."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    a = torch.zeros(64, 128, device="cuda", dtype=torch.bfloat16)
    b, end = torch.zeros(2, 128, 256, device="cuda", dtype=torch.bfloat16), torch.tensor([9, 64], device="cuda")
    pydet.grouped_gemm(a, b, end.int(), k_chunk=32)
    assert pydet.last_kernel() == "cuda_grouped_gemm_sm90_128x128"
    pydet.grouped_gemm(a[:, :99].contiguous(), b[:, :99], end.int(), k_chunk=32)
    assert pydet.last_kernel() == "cuda_grouped_gemm_sm90_mma_64x64"


@each("grouped_gemm")
def test_replays_with_new_boundaries(torch, kernel, dtype):
    """One captured call, 100 routings: the device alone knows them. Rows in no group keep what they held."""
    if not kernel.available:
        pytest.skip(f"{kernel.name} needs {kernel.requires}")
    tokens, groups, k, n = 400, 9, 64, 136
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    generator = torch.Generator("cpu").manual_seed(5)
    a, b, x, y = (
        torch.randn(shape, generator=generator).to(kind)
        for shape in ((tokens, k), (groups, k, n), (tokens, k), (tokens, n))
    )
    on_gpu = [t.cuda() for t in (a, b, x, y)]
    out, sums = torch.zeros(tokens, n, device="cuda"), torch.zeros(groups, k, n, device="cuda")
    end = torch.zeros(groups, dtype=torch.int32, device="cuda")
    options = {"arithmetic": kernel.arithmetic, "kernel": kernel.name}

    def call():
        pydet.grouped_gemm(on_gpu[0], on_gpu[1], end, out=out, **options)
        pydet.grouped_gemm(on_gpu[2].T, on_gpu[3], end, out=sums, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.synchronize()
    rng = np.random.default_rng(6)
    for turn in range(100):
        boundaries = rng.integers(-20, tokens + 20, groups).astype(np.int32)
        if turn % 3:
            boundaries.sort()
        out.fill_(7), end.copy_(torch.from_numpy(boundaries))
        graph.replay()
        torch.cuda.synchronize()
        want, ends = torch.full((tokens, n), 7.0), torch.from_numpy(np.minimum(boundaries, tokens))  # as a device does
        pydet.grouped_gemm(a, b, ends, out=want, arithmetic=kernel.arithmetic)
        assert torch.equal(words(out.cpu()), words(want)), f"turn {turn}: {boundaries}"
        want = pydet.grouped_gemm(x.T, y, ends, out_dtype=torch.float32, arithmetic=kernel.arithmetic)
        assert torch.equal(words(sums.cpu()), words(want)), f"turn {turn}: {boundaries}"


@pytest.mark.parametrize("groups, tokens", [(8, 4096), (64, 2048), (256, 2048)])
def test_large_problems_by_the_library_s_choice(torch, groups, tokens):
    """A token's row is gemm of it alone; two runs, and other streams, give the same bits."""
    generator = torch.Generator("cuda").manual_seed(groups)
    a = torch.randn(tokens, 1024, device="cuda", generator=generator).bfloat16()
    b = torch.randn(groups, 1024, 1536, device="cuda", generator=generator).bfloat16()
    share = np.random.default_rng(groups).multinomial(
        tokens, 1 / np.arange(1, groups + 1) / sum(1 / np.arange(1, groups + 1))
    )
    end = torch.from_numpy(np.cumsum(share).astype(np.int32)).cuda()
    out = pydet.grouped_gemm(a, b, end)
    assert "cuda_grouped_gemm" in pydet.last_kernel()
    first = 0
    for g, last in enumerate(end.tolist()):
        if last > first:
            part = pydet.gemm(a[first:last], b[g])
            assert torch.equal(words(out[first:last]), words(part)), f"group {g}"
        first = last
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        again = pydet.grouped_gemm(a, b, end)
    torch.cuda.synchronize()
    assert torch.equal(words(out), words(again))
    sums = pydet.grouped_gemm(a.T, out, end, out_dtype=torch.float32)
    first = 0
    for g, last in enumerate(end.tolist()):
        part = pydet.gemm(a[first:last].T, out[first:last], out_dtype=torch.float32)
        assert torch.equal(words(sums[g]), words(part)), f"group {g}, depth"
        first = last


def test_whose_turn(torch):
    """Which kernels the library itself picks, by size and layout."""
    picked = set()
    for tokens, rows in ((64, 64), (4096, 64), (4096, 100)):
        a = torch.zeros(tokens, rows, device="cuda", dtype=torch.bfloat16)
        b = torch.zeros(4, rows, 4096, device="cuda", dtype=torch.bfloat16)
        end = torch.tensor([tokens // 4 * (g + 1) for g in range(4)], dtype=torch.int32, device="cuda")
        pydet.grouped_gemm(a, b, end)
        picked.add(pydet.last_kernel())
    pydet.grouped_gemm(a.float(), b.float(), end)
    picked.add(pydet.last_kernel())
    assert len(picked) >= 3, picked
