"""Single tensor-core steps of seven GPUs, published by others, are the CPU's steps bit for bit.

The results are those of https://github.com/north-numerical-computing/MATLAB-tensor-core (`model_validation/`, BSD
2-Clause, F. A. Khattak and M. Mikaitis), 5,000 steps for each GPU and type, by wmma. They are not part of this tree:
the test reads them as one .npz beside the checkout, in ../shared/data, or where PYDET_PUBLISHED_STEPS says. Its arrays
are named GPU_TYPE_a, _b ([5000, k], bit patterns), _c and _d ([5000], fp32 patterns): d = step(a, b, c).
"""

import os
import pathlib

import ml_dtypes
import numpy as np
import pytest

import pydet
from capi import ROOT

FILE = pathlib.Path(os.environ.get("PYDET_PUBLISHED_STEPS", ROOT.parent / "shared" / "data" / "published_steps.npz"))
DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
SM90, SM80 = ("H100", "H200", "B200"), ("A100", "A2", "Ada", "L40S")


@pytest.fixture(scope="module")
def published():
    if not FILE.is_file():
        if "PYDET_PUBLISHED_STEPS" in os.environ:
            pytest.fail(f"there is no {FILE}")
        pytest.skip(f"the published steps are not here ({FILE}); they are not part of the tree")
    with np.load(FILE) as arrays:
        return dict(arrays)


def step(published, gpu, dtype, arithmetic):
    """The published d, and that of pydet: a chain of one step that starts from c."""
    a, b, c, d = (published[f"{gpu}_{dtype}_{name}"] for name in "abcd")
    out = c.view(np.float32).reshape(-1, 1, 1).copy()
    a, b = a.view(DTYPES[dtype])[:, None, :], b.view(DTYPES[dtype])[:, :, None]
    pydet.gemm(a, b, out=out, accumulate=True, arithmetic=arithmetic)
    return d, out.reshape(-1).view(np.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gpu", "arithmetic", "other"), [*((gpu, "sm90", "sm80") for gpu in SM90), *((gpu, "sm80", "sm90") for gpu in SM80)]
)
def test_published_steps(published, gpu, arithmetic, other, dtype):
    want, got = step(published, gpu, dtype, arithmetic)
    assert len(want) == 5000 and np.count_nonzero(want != got) == 0
    want, got = step(published, gpu, dtype, other)  # or the steps would not tell one arithmetic from another
    assert np.count_nonzero(want != got) > 300


FP8 = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


def fp8_step(published, gpu, dtype):
    """The same for fp8, whose published d has no c in it: a step from +0."""
    a, b, d = (published[f"{gpu}_{dtype}_{name}"] for name in "abd")
    a, b = a.view(FP8[dtype])[:, None, :], b.view(FP8[dtype])[:, :, None]
    out = pydet.scaled_gemm(a, b, a_scale=None, b_scale=None, out_dtype="float32", arithmetic="sm90", k_chunk=0)
    return d, out.reshape(-1).view(np.uint32)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_published_fp8_steps(published, gpu, dtype):
    want, got = fp8_step(published, gpu, dtype)
    assert len(want) == 5000 and np.count_nonzero(want != got) == 0


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_steps_of_ada_are_another_function(published, dtype):
    """The control: or the steps would not tell one function from another."""
    want, got = fp8_step(published, "Ada", dtype)
    assert np.count_nonzero(want != got) > 300
