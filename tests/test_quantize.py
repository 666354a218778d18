"""quantize: every kernel, forced by name, against the reference, on every float of sixteen bits and on layouts."""

import itertools
import os
import pathlib
import re
import shlex
import subprocess

import ml_dtypes
import numpy as np
import pytest

import cases
import pydet
import reference_fp8
from cases import DTYPES, assert_same_bits, data, lay
from conftest import threads
from reference import FLOAT32
from reference_fp8 import E4M3, E5M2, E8M0, groups

GRANULARITIES = ["row", "group", "block", "tensor"]


def check(quantize, x, **options):
    got = quantize(x, **options)
    want = reference_fp8.quantize(x, **options)
    assert len(got) == len(want)
    for name, mine, theirs in zip(("q", "scale", "q_t", "scale_t"), got, want, strict=False):
        assert_same_bits(
            np.ascontiguousarray(mine), np.ascontiguousarray(theirs), f"{name} of {x.shape} {x.dtype} {options}"
        )
    return got


def test_equals_reference(quantize_kernel):
    """Every boundary: groups of 128 along both dimensions, vectors of 8 and 16, and one beside each."""
    dtype, kinds = DTYPES[quantize_kernel.dtype], itertools.cycle(["normal", "wide", "extremes", "specials", "tiny"])
    layouts, types = itertools.cycle(["row", "col", "row_padded"]), itertools.cycle([E4M3, E5M2])
    scale_types = itertools.cycle([(FLOAT32, False), (E8M0, False), (FLOAT32, True)])
    sizes = [
        (1, 1),
        (1, 128),
        (2, 127),
        (3, 129),
        (5, 15),
        (4, 17),
        (127, 9),
        (128, 128),
        (129, 260),
        (130, 33),
        (260, 40),
    ]
    for (m, k), granularity in itertools.product(sizes, GRANULARITIES):
        x = lay(data(next(kinds), (m, k), dtype, seed=m * k), next(layouts))
        scale_dtype, power_of_two = next(scale_types)
        options = {
            "granularity": granularity,
            "dtype": next(types),
            "scale_dtype": scale_dtype,
            "power_of_two": power_of_two,
        }
        check(quantize_kernel.quantize, x, **options)
        if granularity in ("group", "block"):
            check(quantize_kernel.quantize, x, transposed=True, **options)
    check(quantize_kernel.quantize, data("normal", (2, 3, 130, 200), dtype), granularity="group", transposed=True)
    check(quantize_kernel.quantize, data("normal", (3, 130, 200), dtype), granularity="row")


def test_every_number(quantize_kernel):
    """All of bfloat16 and float16 (fp32: a sample), by given scales: every rounding, saturation, zero and NaN."""
    dtype = DTYPES[quantize_kernel.dtype]
    if dtype == FLOAT32:
        x = cases.random_words((512, 128), 1).astype(np.uint32).view(np.float32)
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(512, 128)
    for scale, kind in itertools.product([1.0, 0.007, 3e-39, np.inf, np.nan, 0.0, -2.0], (E4M3, E5M2)):
        given = np.array(scale, np.float32)
        q, back = quantize_kernel.quantize(x, granularity="tensor", dtype=kind, scale=given)
        assert back is given
        want, _ = reference_fp8.quantize(x, granularity="tensor", dtype=kind, scale=given)
        assert_same_bits(q, want, f"scale {scale}")


def test_given_scales(quantize_kernel):
    x = data("normal", (200, 300), DTYPES[quantize_kernel.dtype])
    for granularity in GRANULARITIES:
        q, scale = quantize_kernel.quantize(x, granularity=granularity)
        again, _ = quantize_kernel.quantize(x, granularity=granularity, scale=scale)
        assert_same_bits(again, q, granularity)


def test_a_row_does_not_depend_on_the_others(quantize_kernel):
    x = data("wide", (257, 300), DTYPES[quantize_kernel.dtype])
    for granularity in ("row", "group"):
        q, scale = quantize_kernel.quantize(x, granularity=granularity)
        for rows in ([0], [256], list(range(100, 230)), [7, 7, 3]):
            part, part_scale = quantize_kernel.quantize(x[rows], granularity=granularity)
            assert_same_bits(part, q[rows])
            assert_same_bits(part_scale, scale[rows])
        with threads(3):
            assert_same_bits(quantize_kernel.quantize(x, granularity=granularity)[0], q, "threads")


def test_transposed_is_the_call_on_the_transpose(quantize_kernel):
    x = data("normal", (300, 140), DTYPES[quantize_kernel.dtype])
    for granularity in ("group", "block"):
        _, _, q_t, scale_t = quantize_kernel.quantize(x, granularity=granularity, transposed=True)
        q, scale = quantize_kernel.quantize(np.ascontiguousarray(x.T), granularity=granularity)
        assert_same_bits(q_t, q)
        assert_same_bits(scale_t, scale)


def test_division_is_true(quantize_kernel):
    """x (1 / s) is not x / s: near halves between two numbers the byte differs."""
    words = cases.random_words((4000, 1), 7)
    scale = (np.uint32(0x3F800000) | cases.field(words, 0, 23).astype(np.uint32)).view(np.float32)
    half = np.arange(17, 32, 2, dtype=np.float32)[None, :]  # 17 is halfway between 16 and 18
    x = (half * scale).astype(np.float32)
    inverse = (x * (np.float32(1) / scale)).astype(E4M3)
    if quantize_kernel.dtype == "fp32":
        q = check(quantize_kernel.quantize, x, granularity="row", scale=scale)[0]
        assert np.any(inverse.view(np.uint8) != q.view(np.uint8))


@pytest.mark.parametrize("flags", [["-O2"], ["-O3", "-march=native"]])
def test_quotients_by_a_correction_have_the_bits_of_a_division(flags, tmp_path):
    """What the CUDA kernels do in place of a division; by hand, tests/quotients.cpp tried all 2^33 mantissas."""
    root, program = pathlib.Path(__file__).resolve().parent.parent, tmp_path / "quotients"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-ffp-contract=off", *flags]
    command += [f"-I{root}/native", f"-I{root}/native/include", str(root / "tests/quotients.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    counts = re.findall(r"(\d+) pairs, (\d+) differ, (\d+) without the correction", said)
    assert len(counts) == 2, said
    for pairs, differ, uncorrected in counts:
        assert int(pairs) > 5e6 and int(differ) == 0 and int(uncorrected) > 0, said


def test_products_of_what_it_makes():
    """Quantised operands go into scaled_gemm as they are, and the result is near the product."""
    x, w = data("normal", (70, 300), np.dtype(np.float32), 1), data("normal", (150, 300), np.dtype(np.float32), 2)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    for granularity, of_w in (("row", "row"), ("group", "block"), ("group", "group"), ("tensor", "tensor")):
        a, a_scale = pydet.quantize(x, granularity=granularity)
        b, b_scale = pydet.quantize(w, granularity=of_w)
        y = pydet.scaled_gemm(a, b.T, a_scale=a_scale, b_scale=b_scale.T, out_dtype="float32")
        assert np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2)) < 0.05


def test_outputs_that_are_given():
    x = data("normal", (130, 200), np.dtype(ml_dtypes.bfloat16))
    q, scale = np.zeros((130, 200), E5M2), np.zeros((130, 2), E8M0)
    got = pydet.quantize(x, granularity="group", dtype=E5M2, out=(q, scale))
    assert got[0] is q and got[1] is scale
    want = reference_fp8.quantize(x, granularity="group", dtype=E5M2, scale_dtype=E8M0)
    assert_same_bits(q, want[0])
    assert_same_bits(scale, want[1])


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"granularity": "column"}, "quantize: granularity is 'column', want one of row, group, block, tensor"),
        ({"transposed": True}, "quantize: transposed is given with granularity row, want group or block"),
        ({"dtype": "bfloat16"}, "quantize: out is bfloat16, want float8_e4m3fn or float8_e5m2"),
        ({"scale_dtype": "float16"}, "quantize: scale is float16, want float32 or float8_e8m0fnu"),
        ({"scale": np.ones((4, 1), np.float32)}, "quantize: scale is 4x1, want 5x1"),
        ({"out": np.zeros((5, 7), E4M3)}, "quantize: out is 5x7, want 5x8"),
        (
            {"out": (None, None, None, None, None)},
            "quantize: out has 5 members, want at most 4: q, scale, q_t and scale_t",
        ),
    ],
)
def test_refusals(options, sentence):
    with pytest.raises(pydet.Error) as error:
        pydet.quantize(np.ones((5, 8), np.float32), **options)
    assert str(error.value) == sentence


def test_other_inputs_are_refused():
    with pytest.raises(pydet.Error, match="x is float8_e4m3fn, want float32, bfloat16 or float16"):
        pydet.quantize(np.ones((5, 8), E4M3))
    with pytest.raises(pydet.Error, match="x has 1 dimensions, want 2 to 8"):
        pydet.quantize(np.ones(8, np.float32))
    x = np.ones((128, 128), np.float32)
    with pytest.raises(pydet.Error, match="out shares memory with x"):
        pydet.quantize(x, out=x.view(E4M3)[:, :128])
    assert pydet.quantize(np.ones((0, 8), np.float32))[0].shape == (0, 8)
    for shape, granularity in (((0, 8), "tensor"), ((8, 0), "tensor"), ((3, 0), "row"), ((2, 3, 0), "row")):
        for given in (np.nan, 7):  # what lay there
            like = pydet.quantize(np.ones(shape, np.float32), granularity=granularity)
            out = like[0], np.full(like[1].shape, given, np.float32)
            scale = pydet.quantize(np.ones(shape, np.float32), granularity=granularity, out=out)[1]
            assert (scale == np.float32(1e-10) / np.float32(448)).all(), (shape, scale)
    assert groups(0) == 0
