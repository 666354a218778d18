"""The softmax kernels of CUDA, forced by name, against the CPU's, and against themselves in other surroundings."""

import numpy as np
import pytest

import pydet
import test_softmax
from cases import DTYPES, assert_same_bits, data
from test_cuda import OnDevice, cuda_kernels, device, each, torch  # noqa: F401


def test_every_softmax_kernel_is_listed():
    names = [kernel.name for operation in ("softmax", "softmax_backward") for kernel in cuda_kernels(operation)]
    if not names:
        pytest.skip("libpydet_cuda.so is not built (make cuda)")
    assert len(names) == len(set(names)) == 14


@each("softmax")
def test_forward(device, kernel, dtype):
    test_softmax.check_forward(device, dtype, test_softmax.SHAPES + test_softmax.LONG_SHAPES)
    assert device.taken > (1 if "head" in kernel.name else 20)  # whose long rows have a test of their own


@each("softmax_backward")
def test_backward(device, kernel, dtype):
    test_softmax.check_backward(device, dtype, test_softmax.SHAPES + test_softmax.LONG_SHAPES)
    assert device.taken > 20


# Around the turns of `softmax_staged` and of clusters, 2048 elements and 8192, in rows of odd lengths too.
TEAMS = [1, 5, 15, 129, 255, 513, 1023, 1025, 2041, 2048, 2049, 4095, 4097, 6145, 8191, 8193, 16383, 16384]
# Around what the teams of `softmax_held` hold of rows that begin anywhere, and those of `softmax_strided`.
HELD = [1, 3, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32]
STRIDED = [
    1,
    9,
    31,
    63,
    64,
    65,
    127,
    128,
    129,
    200,
    256,
    257,
    319,
    320,
    321,
    384,
    385,
    512,
    513,
    768,
    769,
    1023,
    1024,
    1025,
]
STRIDED += [1535, 1536, 1537, 2047, 2048, 2049, 3072, 3073, 4096, 4097, 6144, 6145, 8192, 8193, 12288, 12289, 16384]
# More than 512 rows have teams of their own.
MANY = [257, 320, 321, 384, 385, 512, 513, 768, 769, 1024]
# Around a walk's four turns and its last vector.
SHIFTED = [1, 7, 8, 9, 2041, 2047, 2048, 2049, 4097, 6145, 8183, 8191, 8193, 10241, 16383, 16385, 50257]
CLUSTERS = [3, 250, 263, 2047, 2057, 16385, 32767, 32769, 65535, 65539, 131071, 131072]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("way", ["held", "strided", "staged", "cluster", "shifted"])
def test_rows_that_begin_anywhere(torch, dtype, way):
    """x, y, dy and dx each from another place on, rows behind each other and with gaps: alike, and each otherwise."""
    forward, backward = f"cuda_softmax_{way}", f"cuda_softmax_backward_{way}"
    if way == "shifted":  # gradients alone
        forward = None
    if way == "cluster" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90 or later")
    dtype = getattr(torch, dtype)
    lengths = {"held": HELD, "strided": STRIDED + MANY, "staged": TEAMS, "cluster": CLUSTERS, "shifted": SHIFTED}
    for i, n in enumerate(lengths[way]):
        m = 1 if n > 70000 else (1, 3, 9, 34)[i % 4]
        m = 513 if way == "strided" and i >= len(STRIDED) else m
        gaps = [(0, 0, 0, 0), (3, 3, 3, 3), (0, 1, 5, 2)][i % 3]
        starts = [(0, 0, 0, 0), (5, 5, 5, 5), (1, 2, 0, 7), (0, 3, 3, 6)][i % 4]
        x, dy = torch.randn(m, n).mul(3).to(dtype), torch.randn(m, n).to(dtype)
        x[0, n // 2 :] -= 80  # far below the maximum
        index = torch.from_numpy(test_softmax.indices(m, n, n))

        def rows(which, values, fill=0.0, m=m, n=n, gaps=gaps, starts=starts):
            step = n + gaps[which]
            memory = torch.full((starts[which] + m * step + 8,), fill, dtype=values.dtype, device="cuda")
            place = memory[starts[which] :][: m * step].view(m, step)[:, :n]
            place.copy_(values)
            return place, memory

        for log in ("", "log_"):
            y = getattr(pydet, f"{log}softmax")(x)
            dx = getattr(pydet, f"{log}softmax_backward")(dy, y)
            out, around = rows(1, torch.zeros_like(y), 7.0)
            expected = rows(1, y, 7.0)[1]
            getattr(pydet, f"{log}softmax")(rows(0, x)[0], out=out, kernel=forward)
            assert around.view(torch.uint8).equal(expected.view(torch.uint8)), f"{log}softmax {m}x{n}"
            out, around = rows(3, torch.zeros_like(y), 7.0)
            expected = rows(3, dx, 7.0)[1]
            inputs = rows(2, dy)[0], rows(1, y)[0]
            forced = backward if way != "strided" or n <= 8192 else None
            getattr(pydet, f"{log}softmax_backward")(*inputs, out=out, kernel=forced)
            assert around.view(torch.uint8).equal(expected.view(torch.uint8)), f"{log}softmax_backward {m}x{n}"
        columns = pydet.log_prob(rows(0, x)[0], index.cuda(), kernel=forward)
        assert columns.cpu().view(torch.int32).equal(pydet.log_prob(x, index).view(torch.int32)), f"log_prob {m}x{n}"
        gradient = torch.randn(m)
        out = pydet.log_prob_backward(gradient.cuda(), rows(0, x)[0], index.cuda(), kernel=forward)
        expected = pydet.log_prob_backward(gradient, x, index)
        assert out.cpu().view(torch.uint8).equal(expected.view(torch.uint8)), f"log_prob_backward {m}x{n}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_many_whole_rows(torch, dtype):
    """So many that `softmax_held` has three vectors a thread."""
    for m, n in ((24001, 72), (24000, 96), (12001, 136), (6001, 384), (3001, 520), (1501, 1280)):
        x = torch.randn(m, n).mul(3).to(getattr(torch, dtype))
        x[0, n // 2 :] -= 80  # far below the maximum
        x[1, n - 1] = float("nan")
        for operation in (pydet.softmax, pydet.log_softmax):
            found = operation(x.cuda(), kernel="cuda_softmax_held").cpu()
            assert found.view(torch.uint8).equal(operation(x).view(torch.uint8)), f"{operation.__name__} {m}x{n}"


@pytest.mark.parametrize("way", ["strided", "staged", "shifted"])
def test_rows_that_overlap(torch, way):
    """One row for all, and rows that begin three elements behind each other: there is nothing to read around them."""
    memory = torch.randn(3000, device="cuda").bfloat16()
    for n, step in ((777, 0), (2041, 3), (5, 2), (8, 1)):
        x = memory[1:].as_strided((40, n), (step, 1))
        y = pydet.softmax(x, kernel=None if way == "shifted" else f"cuda_softmax_{way}")
        assert y.cpu().view(torch.int16).equal(pydet.softmax(x.cpu()).view(torch.int16)), f"{n} {step}"
        dx = pydet.softmax_backward(x, x, kernel=f"cuda_softmax_backward_{way}")
        assert dx.cpu().view(torch.int16).equal(pydet.softmax_backward(x.cpu(), x.cpu()).view(torch.int16)), (
            f"{n} {step}"
        )


# Aligned rows of `softmax_staged`: 2048 elements a turn; and what 48 KB hold, and a third of a multiprocessor.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_whole_rows_that_are_staged(torch, dtype):
    dtype = getattr(torch, dtype)
    for i, n in enumerate([4104, 6136, 6144, 6152, 12288, 16384, 16392, 24576, 24584, 32000, 36864, 36872]):
        m, name = (1, 2, 5)[i % 3], "cuda_softmax_staged"
        x = torch.randn(m, n).mul(3).to(dtype)
        x[0, n // 2 :] -= 80  # far below the maximum
        index = torch.from_numpy(test_softmax.indices(m, n, n))
        for call in (pydet.softmax, pydet.log_softmax):
            found = call(x.cuda(), kernel=name).cpu()
            assert found.view(torch.uint8).equal(call(x).view(torch.uint8)), f"{call.__name__} {m}x{n}"
        columns = pydet.log_prob(x.cuda(), index.cuda(), kernel=name)
        assert columns.cpu().view(torch.int32).equal(pydet.log_prob(x, index).view(torch.int32)), f"{m}x{n}"
        gradient = torch.randn(m)
        out = pydet.log_prob_backward(gradient.cuda(), x.cuda(), index.cuda(), kernel=name)
        expected = pydet.log_prob_backward(gradient, x, index)
        assert out.cpu().view(torch.uint8).equal(expected.view(torch.uint8)), f"log_prob_backward {m}x{n}"


# Around what clusters of `softmax_spread` hold, and the parts of eight elements a thread that they pass over.
SPREAD = [8, 16, 2040, 2048, 2056, 4096, 8184, 8192, 8196, 10236, 12288, 16380, 16384, 16386, 24574, 24578, 32766]
SPREAD += [32768, 32770, 40958, 65534, 65536, 65538, 98306, 131070, 131072, 131074, 147458, 155646, 155648]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_spread_over_a_cluster(torch, dtype):
    """Each with a masked part, one far below the maximum, and one of rows where nothing is a number."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90 or later")
    dtype, name = getattr(torch, dtype), "cuda_softmax_spread"
    for i, n in enumerate(SPREAD):
        m = 8 if n < 10000 else 5
        start, gap = ((0, 0), (2, 2), (0, 6))[i % 3] if n > 16384 else (0, 0)
        x = torch.randn(m, n).mul(3).to(dtype)
        x[0, n // 3 :] -= 80
        x[1, n // 2 :] = -torch.inf
        x[2, :: max(n // 5, 1)] = -torch.inf
        x[3, n // 2] = (torch.nan, torch.inf, -torch.nan)[i % 3]
        x[4] = -torch.inf
        x[4, (i % 2) * (n - 1)] += (0.0, 0.0, torch.inf)[i % 3] if i % 4 else 0.0
        index = torch.from_numpy(test_softmax.indices(m, n, n))
        memory = torch.full((m * (n + gap) + start + 8,), 7.0, dtype=dtype, device="cuda")
        rows = memory[start:][: m * (n + gap)].view(m, n + gap)[:, :n]
        rows.copy_(x)
        for call in (pydet.softmax, pydet.log_softmax):
            out = memory.clone()
            place = out[start:][: m * (n + gap)].view(m, n + gap)[:, :n]
            call(rows, out=place, kernel=name)
            expected = memory.cpu()
            expected[start:][: m * (n + gap)].view(m, n + gap)[:, :n] = call(x)
            assert out.cpu().view(torch.uint8).equal(expected.view(torch.uint8)), f"{call.__name__} {m}x{n}"
        columns = pydet.log_prob(rows, index.cuda(), kernel=name)
        assert columns.cpu().view(torch.int32).equal(pydet.log_prob(x, index).view(torch.int32)), f"log_prob {m}x{n}"
        if n % 8 == 0 and n > 16384:
            gradient = torch.tensor([1.0, -1 / 3, 1e-38, -1e30, 0.5])
            found = pydet.log_prob_backward(gradient.cuda(), x.cuda(), index.cuda(), kernel="cuda_softmax_head")
            expected = pydet.log_prob_backward(gradient, x, index)
            assert found.cpu().view(torch.uint8).equal(expected.view(torch.uint8)), f"log_prob_backward {m}x{n}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_head_in_slabs(torch, dtype):
    """Of 16, 32, 64 and 76 vectors of 2048 columns; and in chunks of rows, with log_prob beside the gradient."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90 or later")
    rows, k = 48, 24
    for i, (n, slabs) in enumerate(((9 * 2048, 1), (32768 + 56, 2), (65544, 4), (70 * 2048, 5), (76 * 2048, 8))):
        x, w = (torch.randn(m, k).to(getattr(torch, dtype)) for m in (rows, n))
        bias, dlog_prob = torch.randn(n), torch.randn(rows)
        index = torch.randint(0, n, (rows,), dtype=(torch.int32, torch.int64)[i % 2])
        index[:3] = torch.tensor([-1, n - 1, n])
        x[5, 3], x[6, 4] = torch.nan, torch.inf
        cpu = x, w, index, bias, dlog_prob
        gpu = [t.cuda() for t in cpu]
        run = lambda x, w, index, bias, dlog_prob, room: pydet.linear_log_prob_backward(
            dlog_prob, x, w, index, bias=bias, of_log_prob=True, workspace=room, arithmetic="sm90"
        )
        want = run(*cpu, 1 << 28)
        in_slabs = rows * (slabs * 2048 + 1) * 2
        for room in (in_slabs if n > 32768 else 1024 + 17 * (2 * n + 2), 1 << 28):
            for name, found, one in zip(want._fields, run(*gpu, room), want, strict=True):
                assert found.cpu().view(torch.uint8).equal(one.view(torch.uint8)), f"{name} {n} {room}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_spread_over_a_cluster(torch, dtype):
    """Some with lanes that underflow to -0, with what is no number, and with a y of log_softmax above 0."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90 or later")
    dtype, name = getattr(torch, dtype), "cuda_softmax_backward_spread"
    for n in [n for n in SPREAD if n % 8 == 0] + [40960, 61440, 61448]:
        if n > (32768 if dtype == torch.float32 else 65536):
            continue
        for log in ("", "log_"):
            y = getattr(pydet, f"{log}softmax")(torch.randn(6, n).mul(3).to(dtype))
            dy = torch.randn(6, n).to(dtype)
            dy[1] = -1e-30
            y[1] = 1e-30
            dy[2, n // 2] = torch.nan
            y[3, n - 1] = torch.inf
            y[4, n // 3 :] = -90.0 if log else 0.0
            y[5, 0] = 3.0
            found = getattr(pydet, f"{log}softmax_backward")(dy.cuda(), y.cuda(), kernel=name).cpu()
            expected = getattr(pydet, f"{log}softmax_backward")(dy, y)
            assert found.view(torch.uint8).equal(expected.view(torch.uint8)), f"{log}softmax_backward {n}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quotients_that_two_bounds_do_not_tell(torch, dtype):
    """Four million of them, some hundreds of which lie beside the middle between two results."""
    dtype = getattr(torch, dtype)
    for scale in (0.1, 1.0, 10.0):
        x = torch.randn(32, 131072).mul(scale).to(dtype)
        found = pydet.softmax(x.cuda(), kernel="cuda_softmax_spread").cpu()
        assert found.view(torch.int16).equal(pydet.softmax(x).view(torch.int16)), scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_strided_rows_equal_the_cpu(torch, dtype):
    """A vocabulary, many rows, rows of two strides, of odd length, and at odd places."""
    device = OnDevice(torch)
    for m, n, step in ((300, 32000, 1), (5000, 264, 2), (4099, 128, 1), (33, 50257, 1), (70, 4097, 3)):
        x = data("normal", (m * step, n), DTYPES[dtype], n)[::step]
        index = test_softmax.indices(m, n, n)
        assert_same_bits(device.softmax(x), pydet.softmax(x), f"{m}x{n}")
        assert_same_bits(device.log_prob(x, index), pydet.log_prob(x, index), f"{m}x{n} log_prob")
        y = pydet.log_softmax(x)
        assert_same_bits(device.log_softmax_backward(x, y), pydet.log_softmax_backward(x, y), f"{m}x{n} backward")


def test_graph_replays_have_the_same_bits(torch):
    x = torch.randn(64, 5000, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    expected = pydet.softmax(x.cpu())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pydet.softmax(x, out=y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            pydet.softmax(x, out=y)
    for _ in range(20):
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert y.cpu().view(torch.int16).equal(expected.view(torch.int16))


def test_numpy_bits_of_a_long_row(torch):
    """A row alone, in a batch, and with a masked tail."""
    x = np.random.default_rng(5).standard_normal((3, 128256)).astype(np.float32)
    masked = np.concatenate([x, np.full((3, 777), -np.inf, np.float32)], axis=1)
    device = OnDevice(torch)
    whole = device.softmax(masked)[:, :128256]
    assert_same_bits(device.softmax(x), np.ascontiguousarray(whole))
    assert_same_bits(device.softmax(x[1:2]), np.ascontiguousarray(whole[1:2]))


def test_exp_of_every_fp32_is_within_an_ulp(torch):
    """All 2^32 of them: dx of log_softmax is fmaf(-exp(y), c, dy), here with c = 1 and dy = +0."""
    rows, n, first = 1 << 16, 1 << 10, 8  # the first columns make c = 1
    y, dy = (torch.zeros(rows, first + n, device="cuda") for _ in range(2))
    dy[:, 0] = 1
    words, worst, count = torch.arange(rows * n, device="cuda").reshape(rows, n), 0.0, 0
    for start in range(-(1 << 31), 1 << 31, rows * n):
        y[:, first:] = (words + start).int().view(torch.float32)
        x, found = y[:, first:], -pydet.log_softmax_backward(dy, y)[:, first:]
        assert found.isnan().equal(x.isnan())
        exact = x.double().exp()
        infinite = exact >= 2.0**128 - 2.0**103  # what rounds to no number
        assert found.isinf().equal(infinite)
        unit = torch.ldexp(torch.ones_like(exact), exact.frexp()[1] - 24).clamp_min(2.0**-149)
        error = ((found.double() - exact).abs() / unit)[~(x.isnan() | infinite)]
        count += x.numel()
        worst = max(worst, float(error.max())) if error.numel() else worst
    assert count == 1 << 32 and 0.6 < worst <= 0.88, worst
