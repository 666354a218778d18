"""The CUDA kernels of scaled_grouped_gemm, forced by name, against the CPU's bit for bit, whatever the boundaries hold.

For tensor cores k is adjacent in both factors and rows begin at multiples of 16 bytes; ieee reads any layout.
"""

import dataclasses
import functools
import random

import numpy as np
import pytest

import pydet
import test_golden
import test_scaled_grouped_gemm
from cases import assert_same_bits
from reference_fp8 import E8M0
from test_cuda import cuda_kernels, torch, words  # noqa: F401
from test_cuda_fp8 import to_device, to_host
from test_grouped_gemm import ROUTINGS
from test_scaled_gemm import A_SCALES, B_SCALES, OUT_TYPES, TYPES, fp8, scales
from test_scaled_grouped_gemm import ScaledGrouped

UNSUPPORTED = 11  # pydet.h
KERNELS = cuda_kernels("scaled_grouped_gemm")
AHEAD = "cuda_scaled_grouped_gemm_sm90_128x128_ahead"
TALL = "cuda_scaled_grouped_gemm_sm90_256x128"


def factor(torch, array, turned=False):
    """fp8 on the device with its last dimension (or, turned, the one before it) adjacent and padded to 16 bytes."""
    source = np.ascontiguousarray(array.view(np.uint8).swapaxes(-1, -2) if turned else array.view(np.uint8))
    memory = torch.full((*source.shape[:-1], -(-source.shape[-1] // 16) * 16), 0x7F, dtype=torch.uint8, device="cuda")
    memory[..., : source.shape[-1]] = torch.from_numpy(source).cuda()
    view = memory[..., : source.shape[-1]].view(getattr(torch, array.dtype.name))
    return view.mT if turned else view


class OnDevice:
    """pydet.scaled_grouped_gemm on NumPy arrays, computed on the device; what no kernel there takes, on the CPU."""

    def __init__(self, torch, kernel, arithmetic):
        self.torch, self.kernel, self.arithmetic, self.taken, self.refused = torch, kernel, arithmetic, 0, 0

    def factors(self, a, b):
        if self.arithmetic == "ieee":
            return to_device(self.torch, a), to_device(self.torch, b)
        return factor(self.torch, a), factor(self.torch, b, True)

    def scaled_grouped_gemm(self, a, b, end, start=None, *, out=None, out_dtype=None, **given):
        torch = self.torch
        arrays = {name: given[name] for name in ("a_scale", "b_scale", "bias", "initial") if name in given}
        tensors = {name: to_device(torch, array) for name, array in arrays.items()}
        bounds = [None if x is None else torch.from_numpy(x.copy()).cuda() for x in (end, start)]
        dtype = out.dtype if out is not None else np.dtype(out_dtype or OUT_TYPES["bf16"])
        if out is None:
            out = np.zeros((len(a), b.shape[-1]), dtype)
        on_gpu = to_device(torch, out if self.arithmetic == "ieee" else np.ascontiguousarray(out))
        options = {**given, **tensors, "out": on_gpu}
        try:
            pydet.scaled_grouped_gemm(*self.factors(a, b), *bounds, kernel=self.kernel, **options)
            self.taken += 1
            out[...] = to_host(torch, on_gpu, dtype)
        except pydet.Error as error:
            if error.status != UNSUPPORTED:
                raise
            self.refused += 1
            pydet.scaled_grouped_gemm(a, b, np.minimum(end, len(a)), start, out=out, **given)
        return out


@pytest.fixture(params=KERNELS or [None], ids=lambda kernel: kernel.name if kernel else "none")
def device(request, torch):
    kernel = request.param
    if not kernel:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    if not kernel.available:
        pytest.skip(f"{kernel.name} needs {kernel.requires}")
    return OnDevice(torch, kernel.name, kernel.arithmetic)


@functools.lru_cache(maxsize=2000)
def on_cpu(problem):
    """The CPU's result, which tests/test_scaled_grouped_gemm.py holds to scaled_gemm of each group."""
    return test_scaled_grouped_gemm.run(pydet.scaled_grouped_gemm, problem)


def check(device, problems):
    for problem in problems:
        got = test_scaled_grouped_gemm.run(device.scaled_grouped_gemm, problem)
        assert_same_bits(got, on_cpu(problem), str(problem))


def test_every_kernel_is_listed():
    if not KERNELS:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    names = [kernel.name for kernel in KERNELS]
    assert len(names) == len(set(names)) == 4 and {AHEAD, TALL} <= set(names)


def problems(a_type, arithmetic):
    """Those of the CPU's tests, and around what the kernels cut."""
    for problem in test_scaled_grouped_gemm.problems_of(a_type, arithmetic):
        yield problem if arithmetic == "ieee" else dataclasses.replace(problem, out_layout="row")
    for problem in tiles_and_stages(a_type):
        yield dataclasses.replace(problem, arithmetic=arithmetic)


def tiles_and_stages(a_type):
    """K around stages of 128, rings of 5 and turns of 8; N around tiles of 64 and 128 and two of them; every kind of
    scales."""
    outs, types = list(OUT_TYPES), list(TYPES)
    for i, k in enumerate((0, 16, 32, 112, 128, 144, 256, 512, 640, 768, 1024, 1040, 1920, 2176)):
        yield ScaledGrouped("odd", k, (72, 136)[i % 2], a_type, types[i % 2], out_dtype=outs[i % 3], seed=i)
    for i, n in enumerate((1, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385)):
        yield ScaledGrouped(("tiles", "masked", "gaps")[i % 3], 272, n, a_type, types[i % 2], out_dtype=outs[i % 3])
    for i, (a_scale, b_scale) in enumerate((a, b) for a in A_SCALES for b in B_SCALES):
        yield ScaledGrouped("empty between", 400, 140, a_type, "e4m3", a_scale, b_scale, out_dtype=outs[i % 3],
                            bias=("", "fp32", "bf16")[i % 3], shared=i % 4 == 0)  # fmt: skip
        yield ScaledGrouped("one token each", 272, 200, a_type, "e5m2", a_scale, b_scale, E8M0)
    for k_chunk in (0, 128, 256, 384, 2048):
        one = functools.partial(ScaledGrouped, "tiles", 912, 200, a_type, "e4m3", k_chunk=k_chunk)
        yield one(a_scale="row", b_scale="row")
        yield one(a_scale="none", b_scale="none", accumulate=True)
    for kind in ("near", "specials"):
        for a_scale, b_scale in (("group", "block"), ("row", "row"), ("group", "group"), ("none", "none")):
            yield ScaledGrouped("tiles", 272, 140, a_type, "e4m3", a_scale, b_scale, kind=kind)
    yield ScaledGrouped("tiles", 512, 260, a_type, "e4m3", accumulate=True, bias="fp32")


@pytest.mark.parametrize("a_type", TYPES)
def test_equals_cpu(device, a_type):
    check(device, problems(a_type, device.arithmetic))
    assert device.taken > (70 if device.kernel in (AHEAD, TALL) else 100), (device.taken, device.refused)
    assert not (device.refused and device.arithmetic == "ieee")


@pytest.mark.parametrize("a_type", TYPES)
def test_golden_hashes(device, a_type):
    test_golden.check_golden("scaled_grouped_gemm", device.scaled_grouped_gemm, device.arithmetic, a_type)
    assert device.taken > 0


@pytest.mark.parametrize("a_type", TYPES)
def test_nan_next_door(device, a_type):
    test_scaled_grouped_gemm.check_neighbours(device.scaled_grouped_gemm, a_type, device.arithmetic)
    assert device.taken and not device.refused


def test_random_boundaries(device):
    """Any int32, ascending or not, with starts or without."""
    for number in range(30):
        rng = random.Random(number)
        tokens, groups = rng.randint(0, 300), rng.randint(1, 40)
        values = [rng.choice([rng.randint(-50, 400), rng.randint(-(2**31), 2**31 - 1)]) for _ in range(2 * groups)]
        end = sorted(rng.randint(0, tokens) for _ in range(groups)) if number % 2 else values[:groups]
        start = values[groups:] if number % 3 == 0 else None
        ROUTINGS["random"] = (tokens, end, start)
        problem = ScaledGrouped("random", rng.choice([48, 144, 272]), rng.choice([24, 64, 130]), seed=number,
                                arithmetic=device.arithmetic)  # fmt: skip
        got = test_scaled_grouped_gemm.run(device.scaled_grouped_gemm, problem)
        want = test_scaled_grouped_gemm.run(pydet.scaled_grouped_gemm, problem)
        assert_same_bits(got, want, f"{number}: {problem}, ends {end}, starts {start}")
    del ROUTINGS["random"]
    assert not device.refused


# Groups around one, two and many tiles of 128 or 256 rows under each other, and boxes of 32 of them; more groups than a
# block has threads, more tiles than blocks; one that is walked in bands of 2048 rows.
LARGE = {
    "pairs of 256": ([512, 513, 511, 255, 769, 768, 448, 449, 64, 65, 320, 0, 1, 1025], [(272, 264), (16, 520)]),
    "pairs": ([256, 257, 128, 129, 0, 384, 385, 31, 32, 33, 64, 65, 192, 193, 127, 1], [(272, 264), (16, 776)]),
    "many": ([1, 0, 7, 2] * 100 + [70, 0, 130], [(144, 136), (16, 1160)]),
    "bands": ([5, 2048 + 256 + 17, 9], [(16, 1160)]),
}


def test_groups_of_many_tiles(device):
    for name, (sizes, shapes) in LARGE.items():
        end = np.cumsum(sizes, dtype=np.int32)
        ROUTINGS[name] = (int(end[-1]) + 3, end, None)
        for k, n in shapes:
            one = functools.partial(ScaledGrouped, name, k, n, arithmetic=device.arithmetic)
            kind = "row" if k > 128 else "tensor"  # of one group along k, rows' scales would be those of groups
            check(device, [one(out_dtype="bf16"), one(a_scale=kind, b_scale=kind, bias="fp32")])
        del ROUTINGS[name]
    assert device.taken == 14 and not device.refused


def test_more_groups_than_a_launch_has(device):
    """Those of a later launch begin where one of an earlier launch ended; boundaries that run backwards included."""
    rng = np.random.default_rng(8)
    for name, count in (("around", 1025), ("three launches", 2100)):
        end = np.cumsum(rng.integers(0, 3, count), dtype=np.int64).astype(np.int32)
        end[1020:1023], end[-1] = end[1019] + 140, end[-2] + 200
        start = None if count == 1025 else np.where(np.arange(count) % 5 == 0, end - 1, 0).astype(np.int32)
        ROUTINGS[name] = (int(end[-1]) + 3, end, start)
        check(device, [ScaledGrouped(name, 144, 40, arithmetic=device.arithmetic)])
        del ROUTINGS[name]
    assert device.taken == 2


def test_what_lies_around_is_kept(device, torch):
    """Columns behind each row, rows in no group, and rows past the last."""
    end = np.int32([3, 40, 41, 170])
    a, b = fp8("any", (175, 272), TYPES["e4m3"]), fp8("any", (4, 272, 130), TYPES["e4m3"], 1)
    sa, sb = scales((175, 3), np.float32, 2), scales((4, 3, 2), np.float32, 3)
    for dtype in OUT_TYPES.values():
        memory = to_device(torch, np.full((180, 136), 7, dtype))
        pydet.scaled_grouped_gemm(
            *device.factors(a, b), torch.from_numpy(end).cuda(), a_scale=to_device(torch, sa),
            b_scale=to_device(torch, sb), out=memory[:175, :130], kernel=device.kernel, arithmetic=device.arithmetic,
        )  # fmt: skip
        host = to_host(torch, memory, dtype)
        want = pydet.scaled_grouped_gemm(
            a, b, end, a_scale=sa, b_scale=sb, out_dtype=dtype, arithmetic=device.arithmetic
        )
        assert_same_bits(np.ascontiguousarray(host[:170, :130]), want[:170], str(dtype))
        assert np.all(host[170:] == 7) and np.all(host[:, 130:] == 7), f"{dtype}: memory around the groups changed"


def test_replays_with_new_boundaries(device, torch):
    """One captured call, 100 routings: the device alone knows them. Rows in no group keep what they held."""
    tokens, groups, k, n = 400, 9, 272, 136
    a, b = fp8("any", (tokens, k), TYPES["e4m3"]), fp8("any", (groups, k, n), TYPES["e4m3"], 1)
    sa, sb = scales((tokens, 3), np.float32, 2), scales((groups, 3, 2), np.float32, 3)
    on_gpu, arithmetic = device.factors(a, b), device.arithmetic
    given = {"a_scale": to_device(torch, sa), "b_scale": to_device(torch, sb), "kernel": device.kernel}
    given["arithmetic"] = arithmetic
    out, end = torch.zeros(tokens, n, device="cuda"), torch.zeros(groups, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pydet.scaled_grouped_gemm(*on_gpu, end, out=out, **given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            pydet.scaled_grouped_gemm(*on_gpu, end, out=out, **given)
    torch.cuda.synchronize()
    rng = np.random.default_rng(6)
    for turn in range(100):
        boundaries = rng.integers(-20, tokens + 20, groups).astype(np.int32)
        if turn % 3:
            boundaries.sort()
        out.fill_(7), end.copy_(torch.from_numpy(boundaries))
        graph.replay()
        torch.cuda.synchronize()
        want = np.full((tokens, n), 7, np.float32)
        ends = np.minimum(boundaries, tokens)  # as a device does
        pydet.scaled_grouped_gemm(a, b, ends, a_scale=sa, b_scale=sb, out=want, arithmetic=arithmetic)
        assert_same_bits(out.cpu().numpy(), want, f"turn {turn}: {boundaries}")


@pytest.mark.parametrize("groups, tokens", [(8, 4096), (256, 2048)])
def test_large_problems_by_the_library_s_choice(torch, groups, tokens):
    """A group's rows are scaled_gemm of it alone; two runs, and other streams, give the same bits."""
    if not KERNELS or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fp8 tensor cores: needs sm_90")
    generator = torch.Generator("cuda").manual_seed(groups)
    x = torch.randn(tokens, 1024, device="cuda", generator=generator).bfloat16()
    w = torch.randn(groups, 1536, 1024, device="cuda", generator=generator).bfloat16()
    weights = 1 / np.arange(1, groups + 1)
    share = np.random.default_rng(groups).multinomial(tokens, weights / weights.sum())
    end = torch.from_numpy(np.cumsum(share).astype(np.int32)).cuda()
    for of_x, of_w in (("group", "block"), ("row", "row"), ("group", "group")):
        (a, sa), (b, sb) = pydet.quantize(x, granularity=of_x), pydet.quantize(w, granularity=of_w)
        call = functools.partial(pydet.scaled_grouped_gemm, a, b.mT, end, a_scale=sa, b_scale=sb.mT)
        out = call()
        if of_w != "group":
            assert pydet.last_kernel() == (TALL if tokens >= 512 * groups else AHEAD)
        first = 0
        for g, last in enumerate(end.tolist()):
            if last > first:
                part = pydet.scaled_gemm(a[first:last], b[g].t(), a_scale=sa[first:last], b_scale=sb[g].t())
                assert torch.equal(words(out[first:last]), words(part)), f"{of_x}, group {g}"
            first = last
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            again = call()
        torch.cuda.synchronize()
        assert torch.equal(words(out), words(again))


def test_refusals_on_the_device(torch):
    if not KERNELS or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fp8 tensor cores: needs sm_90")
    kind, none = torch.float8_e4m3fn, {"a_scale": None, "b_scale": None}
    a, b = (torch.zeros(shape, dtype=torch.uint8, device="cuda").view(kind) for shape in ((8, 40), (2, 24, 40)))
    end = torch.tensor([3, 8], dtype=torch.int32, device="cuda")

    def refused(*operands):
        with pytest.raises(pydet.Error) as error:
            pydet.scaled_grouped_gemm(*operands, **none)
        return str(error.value)

    what = "scaled_grouped_gemm: the tensor cores do not read {}, want its data and strides in multiples of 16 bytes"
    assert refused(a, b.mT, end) == what.format("a")
    assert refused(a[:, :32].contiguous(), b.mT[:, :32], end) == what.format("b")
    many = torch.zeros(16385, 16, 32, dtype=torch.uint8, device="cuda").view(kind)
    ends = torch.zeros(16385, dtype=torch.int32, device="cuda")
    assert "more than 16384 groups" in refused(a[:, :32].contiguous(), many.mT, ends)
    turned = torch.zeros(2, 32, 24, dtype=torch.uint8, device="cuda").view(kind)
    assert refused(a[:, :32].contiguous(), turned, end).endswith("takes a right operand along N")
