"""Bad input to the Python functions: each kind has its exception and its sentence, and no output was touched."""

import ctypes
import functools
import os
import re

import numpy as np
import pytest

import pydet
from capi import FLOAT32, Tensor, library_path, owner, random, status_name
from conftest import run_python, unusual_float_environment
from interop import Producer, jax, torch  # noqa: F401 (fixtures)
from pydet import frameworks, hooks


def raises(sentence, kind, call, *args, status=None, untouched=(), **keywords):
    """The call raises pydet.Error, which is also `kind`, with that sentence; the NumPy arrays are as they were."""
    before = [owner(array).tobytes() for array in untouched]
    with pytest.raises(pydet.Error, match=sentence) as caught:
        call(*args, **keywords)
    assert isinstance(caught.value, kind), type(caught.value).__mro__
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.status_name == status_name(caught.value.status)
    assert status is None or caught.value.status_name == f"PYDET_{status}"
    assert [owner(array).tobytes() for array in untouched] == before


A, B, X, W = random((3, 4)), random((4, 5), seed=1), random((3, 8)), random((8,))

PYTHON = [  # what is wrong, as a call that returns nothing; the exception's other class; status; sentence
    (lambda out: pydet.gemm(A[0], B, out=out), ValueError, "INVALID_SHAPE", r"^gemm: a has 1 dimensions, want 2 to 8$"),
    (lambda out: pydet.gemm(A, B[:3], out=out), ValueError, "INVALID_SHAPE", r"^gemm: b is 3x5, want 4xN$"),
    (lambda out: pydet.gemm(A, B[:, :4], out=out), ValueError, "INVALID_SHAPE", r"^gemm: out is 3x5, want 3x4$"),
    (lambda out: pydet.gemm(A, B, bias=W, out=out), ValueError, "INVALID_SHAPE", r"bias is 8, want 5"),
    (
        lambda out: pydet.gemm(A.reshape((1,) * 7 + (3, 4)), B, out=out),
        ValueError,
        "INVALID_SHAPE",
        r"a has 9 dimensions",
    ),
    (
        lambda out: pydet.gemm(np.zeros((2, 3, 4), "f"), np.zeros((3, 4, 5), "f")),
        ValueError,
        "INVALID_SHAPE",
        r"leading dimensions",
    ),
    (
        lambda out: pydet.gemm(A.astype("f8"), B, out=out),
        TypeError,
        "INVALID_DTYPE",
        r"^gemm: a is float64, want float32, bfloat16 or float16$",
    ),
    (
        lambda out: pydet.gemm(A.astype("i4"), B, out=out),
        TypeError,
        "INVALID_DTYPE",
        r"a is int32, want",
    ),
    (lambda out: pydet.gemm(A.astype("c8"), B, out=out), TypeError, "INVALID_DTYPE", r"a is complex64, want"),
    (
        lambda out: pydet.gemm(A.astype(">f4"), B, out=out),
        TypeError,
        "INVALID_DTYPE",
        r"a is float32 in the byte order of another",
    ),
    (lambda out: pydet.gemm(A.astype(object), B, out=out), TypeError, "INVALID_DTYPE", r"a is object, want float32"),
    (
        lambda out: pydet.gemm(A.astype("f2"), B, out=out),
        TypeError,
        "INVALID_DTYPE",
        r"b is float32, want float16 as a is",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, arithmetic="sm90"),
        TypeError,
        "INVALID_DTYPE",
        r"sm90 takes bfloat16 or float16",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out.astype("f2"), accumulate=True),
        TypeError,
        "INVALID_DTYPE",
        r"want float32 under",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, initial=out.astype("f2")),
        TypeError,
        "INVALID_DTYPE",
        r"^gemm: initial is float16, want float32$",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, initial=out.copy(), accumulate=True),
        ValueError,
        "INVALID_VALUE",
        r"^gemm: initial is given and options.accumulate is 1, want one of them$",
    ),
    (
        lambda out: pydet.skinny_gemm(A, B.T.copy(), out=out, initial=out[:1].copy()),
        ValueError,
        "INVALID_SHAPE",
        r"^skinny_gemm: initial is 1x",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, out_dtype="bfloat16"),
        TypeError,
        "INVALID_DTYPE",
        r"out is float32, and out_dtype asks",
    ),
    (
        lambda out: pydet.gemm(A, B, out_dtype="int8"),
        TypeError,
        "INVALID_DTYPE",
        r"^gemm: out_dtype is 'int8', want one of float32, bfloat16",
    ),
    (lambda out: pydet.gemm(A, B, out_dtype=np.float64), TypeError, "INVALID_DTYPE", r"gemm: out_dtype is .*float64"),
    (lambda out: pydet.quantize(A, dtype="int8"), TypeError, "INVALID_DTYPE", r"^quantize: dtype is 'int8'"),
    (
        lambda out: pydet.quantize(A, scale_dtype="int8"),
        TypeError,
        "INVALID_DTYPE",
        r"^quantize: scale_dtype is 'int8'",
    ),
    (lambda out: pydet.gemm(A[::1, ::-1], B, out=out), ValueError, "INVALID_STRIDE", r"a has stride -1 in dimension 1"),
    (
        lambda out: pydet.gemm(np.zeros((6, 8), "f")[::2, ::2], B, out=out),
        ValueError,
        "INVALID_STRIDE",
        r"a has strides 16 and 2",
    ),
    (lambda out: pydet.gemm(A, B, out=out[::-1]), ValueError, "INVALID_STRIDE", r"out has stride -5"),
    (
        lambda out: pydet.gemm(np.zeros(13, "f").view("u1")[1:49].view("f4").reshape(3, 4), B, out=out),
        ValueError,
        "MISALIGNED",
        r"a has data at 0x[0-9a-f]+, want a multiple of 4 bytes",
    ),
    (
        lambda out: pydet.gemm(np.zeros((3, 9), "u1")[:, :8].view("f4"), B[:2], out=out),
        ValueError,
        "INVALID_STRIDE",
        r"a has strides \(9, 4\) in bytes, want multiples of 4",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, accumulate=True, k_chunk=8),
        ValueError,
        "INVALID_VALUE",
        r"k_chunk is 8, want a positive multiple of 16, or none",
    ),
    (lambda out: pydet.gemm(A, B, out=out, k_chunk=-16), ValueError, "INVALID_VALUE", r"k_chunk is -16"),
    (
        lambda out: pydet.gemm(A, B, out=out, k_chunk=2**70),
        ValueError,
        "INVALID_VALUE",
        r"gemm: k_chunk is no 64-bit integer",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, k_chunk="16"),
        ValueError,
        "INVALID_VALUE",
        r"gemm: k_chunk is no 64-bit integer",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, arithmetic="sm100"),
        ValueError,
        "INVALID_VALUE",
        r"arithmetic is 'sm100', want one of auto, ieee, sm90, sm80, cdna3, cdna2$",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, arithmetic=2),
        ValueError,
        "INVALID_VALUE",
        r"arithmetic is 2, want one of auto",
    ),
    (lambda out: pydet.gemm(A, B, out=out, kernel="best"), ValueError, "INVALID_VALUE", r"no kernel is named best"),
    (lambda out: pydet.gemm(A, B, out=out, kernel=b"best"), ValueError, "INVALID_VALUE", r"kernel is no text"),
    (
        lambda out: pydet.gemm(A, B, out=out, kernel="cpu_gemm_sm90_scalar"),
        RuntimeError,
        "UNSUPPORTED",
        r"does not take this problem",
    ),
    (
        lambda out: pydet.gemm(A, B, accumulate=True),
        ValueError,
        "INVALID_VALUE",
        r"accumulate needs out, the float32 tensor",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, accumulate=W),
        ValueError,
        "INVALID_VALUE",
        r"accumulate is numpy.ndarray, want True or False",
    ),
    *[
        (
            lambda out, given=given: pydet.gemm(A, B, out=out, accumulate=given),
            ValueError,
            "INVALID_VALUE",
            rf"^gemm: accumulate is {name}, want True or False$",
        )
        for given, name in [("no", "str"), ("", "str"), (2, "int"), (1.0, "float"), (None, "NoneType"), ([], "list")]
    ],
    (
        lambda out: pydet.skinny_gemm(A, B.T, out=out, weights_constant="yes"),
        ValueError,
        "INVALID_VALUE",
        r"^skinny_gemm: weights_constant is str, want True or False$",
    ),
    *[
        (
            lambda out, given=given: pydet.gemm(A, B, out=out, arithmetic=given),
            ValueError,
            "INVALID_VALUE",
            r"^gemm: arithmetic is .*, want one of auto, ieee, sm90, sm80, cdna3, cdna2$",
        )
        for given in ([], {}, None, b"ieee", A)
    ],
    (
        lambda out: pydet.gemm(A, B, out=out, kernel="cpu_gemm_ieee_scalar\0"),
        ValueError,
        "INVALID_VALUE",
        r"^gemm: kernel is text with a NUL character in it$",
    ),
    (lambda out: pydet.gemm(A, B, out=out, kernel="\udc80"), ValueError, "INVALID_VALUE", r"kernel is no text"),
    (
        lambda out: pydet.rmsnorm(X, W, eps=0, out=(None, None, None, out)),
        ValueError,
        "INVALID_VALUE",
        r"^rmsnorm: out has 4 members, want at most 3: y, rstd and sum$",
    ),
    *[
        (
            lambda out, given=given: pydet.gemm(A, B, out=out, stream=given),
            TypeError,
            "INVALID_VALUE",
            r"^stream is .*, want an address or an object with __cuda_stream__$",
        )
        for given in (-1, 1 << 64, True, type("S", (), {"ptr": None})(), type("S", (), {"__cuda_stream__": (0, "1")})())
    ],
    (
        lambda out: pydet.resolve_arithmetic("float32", ("cpu", 5)),
        RuntimeError,
        "NO_DEVICE",
        r"^resolve_arithmetic: device is CPU 5, want CPU 0$",
    ),
    (
        lambda out: pydet.gemm(A, B, out=out, stream="default"),
        TypeError,
        "INVALID_VALUE",
        r"stream is str, want an address or",
    ),
    (
        lambda out: pydet.gemm([[1.0]], B, out=out),
        TypeError,
        "INVALID_VALUE",
        r"^gemm: a is list, want a tensor \(DLPack",
    ),
    (lambda out: pydet.gemm(A, 2.0, out=out), TypeError, "INVALID_VALUE", r"b is float, want a tensor"),
    (lambda out: pydet.gemm(A, None, out=out), TypeError, "INVALID_VALUE", r"b is NoneType, want a tensor"),
    (lambda out: pydet.gemm(A, B, out=[out]), TypeError, "INVALID_VALUE", r"out is list, want a tensor"),
    (lambda out: pydet.gemm(A, B, bias=0.5, out=out), TypeError, "INVALID_VALUE", r"bias is float, want a tensor"),
    (lambda out: pydet.gemm(np.ma.masked_array(A), B, out=out), ValueError, "INVALID_VALUE", r"a is a masked array"),
    (lambda out: pydet.gemm_da(A, B, out=out), ValueError, "INVALID_SHAPE", r"^gemm_da: b is 4x5, want Kx4$"),
    (lambda out: pydet.gemm_db(A, B, out=out), ValueError, "INVALID_SHAPE", r"^gemm_db: dc is 4x5, want 3xN$"),
    (lambda out: pydet.skinny_gemm(A, B), ValueError, "INVALID_SHAPE", r"^skinny_gemm: w is 4x5, want Nx4$"),
    (
        lambda out: pydet.skinny_gemm(A, B.T, out=out, mode="quick"),
        ValueError,
        "INVALID_VALUE",
        r"mode is 'quick', want one of deterministic, fast",
    ),
    (lambda out: pydet.rmsnorm(X, W[:7], eps=1e-6), ValueError, "INVALID_SHAPE", r"^rmsnorm: weight is 7, want 8$"),
    (
        lambda out: pydet.rmsnorm(X, W, eps=-1.0),
        ValueError,
        "INVALID_VALUE",
        r"eps is -1, want a finite number, 0 or more",
    ),
    (lambda out: pydet.rmsnorm(X, W, eps="small"), ValueError, "INVALID_VALUE", r"rmsnorm: eps is no number"),
    (
        lambda out: pydet.rmsnorm(X, W, eps=0, weight_offset=float("nan")),
        ValueError,
        "INVALID_VALUE",
        r"weight_offset is",
    ),
    (lambda out: pydet.rmsnorm(X, W, eps=0, out=out), ValueError, "INVALID_SHAPE", r"y is 3x5, want 3x8"),
    (lambda out: pydet.rmsnorm_backward(X, X, W, np.zeros(2, "f")), ValueError, "INVALID_SHAPE", r"rstd is 2, want 3"),
    (
        lambda out: pydet.rmsnorm_backward(X, X, W, np.zeros(3, "f2")),
        TypeError,
        "INVALID_DTYPE",
        r"rstd is float16, want float32",
    ),
    (
        lambda out: pydet.rmsnorm_backward(X, X, W, W[:3], accumulate=True),
        ValueError,
        "INVALID_VALUE",
        r"accumulate needs dweight",
    ),
    (
        lambda out: pydet.rmsnorm_backward(X, X, W, W[:3], dweight=np.zeros(8, "f"), dweight_dtype="float16"),
        TypeError,
        "INVALID_DTYPE",
        r"dweight is float32, and dweight_dtype asks for float16",
    ),
    (
        lambda out: pydet.resolve_arithmetic("float32", arithmetic="sm90"),
        TypeError,
        "INVALID_DTYPE",
        r"sm90 takes bfloat16",
    ),
    (lambda out: pydet.resolve_arithmetic("float32", ("tpu", 0)), ValueError, "INVALID_DEVICE", r"device is 'tpu'"),
    (lambda out: pydet.audit(A, B, np.zeros((3, 5))), TypeError, "INVALID_DTYPE", r"audit: c is float64"),
    (
        lambda out: pydet.audit(A, B, np.zeros((3, 4), "f"), arithmetic="ieee"),
        ValueError,
        "INVALID_SHAPE",
        r"is 3x4, want 3x5",
    ),
    (lambda out: pydet.audit(A[0], B, out), ValueError, "INVALID_SHAPE", r"a has 1 dimensions, want 2"),
]


@pytest.mark.parametrize("wrong, kind, status, sentence", PYTHON, ids=[sentence for *_, sentence in PYTHON])
def test_python(wrong, kind, status, sentence):
    out = random((3, 5), seed=9)
    raises(sentence, kind, wrong, out, status=status, untouched=[out, A, B, X, W])


def test_read_only_out():
    out = random((3, 5))
    out.flags.writeable = False
    raises(r"^gemm: out is read-only$", ValueError, pydet.gemm, A, B, out=out, untouched=[out])
    half_out = random((3, 5), "bfloat16")
    half_out.flags.writeable = False
    raises(r"^gemm: out is read-only$", ValueError, pydet.gemm, A, B, out=half_out, untouched=[half_out])
    frozen = A.copy()
    frozen.flags.writeable = False
    assert pydet.gemm(frozen, B).tobytes() == pydet.gemm(A, B).tobytes(), "an input may be read-only"
    y = random((3, 8))
    y.flags.writeable = False
    raises(r"read-only", ValueError, pydet.rmsnorm, X, W, eps=0, out=y, untouched=[y])
    raises(r"read-only", ValueError, pydet.rmsnorm_backward, X, X, W, W[:3].copy(), out=y, untouched=[y])


def test_out_that_overlaps_in_python():
    memory = random((8, 8))
    raises(
        r"^gemm: out shares memory with a, want it apart$",
        ValueError,
        pydet.gemm,
        memory[:3, :4],
        B,
        out=memory[2:5, :5],
        status="OVERLAP",
        untouched=[memory],
    )
    raises(
        r"^rmsnorm: y shares memory with x, want it apart$",
        ValueError,
        pydet.rmsnorm,
        memory,
        eps=0,
        out=memory,
        status="OVERLAP",
        untouched=[memory],
    )


def test_keywords():
    for wrong in ({"transpose": True}, {"alpha": 2}, {"Bias": None}):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(wrong))}'"):
            pydet.gemm(A, B, **wrong)
    with pytest.raises(TypeError, match="missing"):
        pydet.gemm(A)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'eps'"):
        pydet.rmsnorm(X, W)
    with pytest.raises(TypeError, match="positional"):
        pydet.gemm(A, B, None, None)


class OnGpu:
    """Says that it is on a GPU, by either protocol."""

    def __init__(self, device, array):
        self.device, self.array = device, array

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        return Producer(Tensor(self.array, device=self.device)).capsule()


class OnCuda:
    def __init__(self, array):
        where = {"data": (array.ctypes.data, False), "version": 3}
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": "<f4", **where}


@pytest.mark.parametrize(
    "on_gpu, library",
    [
        (functools.partial(OnGpu, (2, 0)), "libpydet_cuda.so"),
        (OnCuda, "libpydet_cuda.so"),
        (functools.partial(OnGpu, (10, 0)), "libpydet_hip.so"),
    ],
)
def test_gpu_tensor_where_no_gpu_is_served(on_gpu, library, monkeypatch):
    """Without that library: which file was sought, and that it is not there. With it, here no device or no driver. All
    operands say that they are there: of two devices, that would be what is refused."""
    monkeypatch.delenv("PYDET_LIBRARY", raising=False)
    missing = not (library_path().parent / library).exists()
    with pytest.raises(pydet.Error) as caught:
        pydet.gemm(on_gpu(A), on_gpu(B), out=on_gpu(random((3, 5))))
    if missing and "PYDET_LIBRARY" not in os.environ:
        assert re.search(rf"^gemm: no library serves (CUDA|ROCm) tensors: .*{library} is not there$", str(caught.value))
    assert caught.value.status_name == ("PYDET_UNSUPPORTED" if missing else "PYDET_NO_DEVICE")


def test_frameworks_may_not_be_mixed(torch):
    out = random((3, 5))
    raises(
        r"^gemm: b is numpy.ndarray and a is torch.Tensor, want all of one framework$",
        TypeError,
        pydet.gemm,
        torch.from_numpy(A),
        B,
        untouched=[A, B],
    )
    raises(
        r"^gemm: out is numpy.ndarray and a is torch.Tensor",
        TypeError,
        pydet.gemm,
        torch.from_numpy(A),
        torch.from_numpy(B),
        out=out,
        untouched=[out],
    )
    raises(
        r"^rmsnorm: weight is torch.Tensor and x is numpy.ndarray",
        TypeError,
        pydet.rmsnorm,
        X,
        torch.from_numpy(W),
        eps=0,
    )


def test_torch_tensors_that_are_more_than_memory(torch):
    a, b, out = torch.from_numpy(A.copy()), torch.from_numpy(B.copy()), torch.zeros(3, 5)
    tracked = a.clone().requires_grad_()
    autograd = r"^gemm: a requires grad, and .* records no gradient; use pydet.torch for autograd, or .detach\(\)$"
    raises(autograd, ValueError, pydet.gemm, tracked, b)
    raises(r"out requires grad", ValueError, pydet.gemm, a, b, out=torch.zeros(3, 5).requires_grad_())
    raises(
        r"^rmsnorm: weight requires grad, and",
        ValueError,
        pydet.rmsnorm,
        torch.ones(3, 8),
        torch.nn.Parameter(torch.ones(8)),
        eps=0,
    )
    with torch.no_grad():
        assert torch.equal(pydet.gemm(tracked, b), pydet.gemm(a, b))
    assert torch.equal(pydet.gemm(tracked.detach(), b), pydet.gemm(a, b))
    conj = torch.ones(3, 4, dtype=torch.complex64).conj()
    raises(r"a is a lazy neg view", ValueError, pydet.gemm, conj.imag, b)
    raises(r"a is complex64, want|lazy conj view", Exception, pydet.gemm, conj, b)
    raises(r"a is a tensor of layout sparse_coo, want a strided one", ValueError, pydet.gemm, a.to_sparse(), b)
    raises(r"a is a tensor of layout sparse_csr", ValueError, pydet.gemm, a.to_sparse_csr(), b)
    raises(r"a is a meta tensor, which has no memory", ValueError, pydet.gemm, torch.ones(3, 4, device="meta"), b)
    raises(r"out is a meta tensor", ValueError, pydet.gemm, a, b, out=torch.ones(3, 5, device="meta"))
    raises(r"a is float64, want", TypeError, pydet.gemm, a.double(), b)
    raises(r"b is float32, want bfloat16 as a is", TypeError, pydet.gemm, a.bfloat16(), b)
    raises(
        r"out has stride 0 in dimension 0, so its elements overlap",
        ValueError,
        pydet.gemm,
        a,
        b,
        out=torch.zeros(1, 5).expand(3, 5),
    )
    raises(r"out shares memory with a", ValueError, pydet.gemm, a, torch.ones(4, 4), out=a)
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3, 4)
    raises(r"a is a FakeTensor, which has no memory", ValueError, pydet.gemm, fake, b)
    assert not out.any()


def test_torch_tensors_that_are_the_negative_of_their_memory(torch):
    """However they came about: what torch says of the tensor counts, since nothing about its memory tells."""
    import pydet.torch

    a, b = torch.from_numpy(A.copy()), torch.from_numpy(B.copy())
    negate = torch._neg_view
    lazy = r"^gemm: (a|out) is a lazy neg view of its memory; call .resolve_neg\(\) first$"

    def check():
        for negated in (
            torch._neg_view(a),
            torch._neg_view(a).detach(),
            torch._neg_view(a)[:2],
            torch._neg_view(a.T).T,
        ):
            assert negated.is_neg()
            raises(lazy, ValueError, pydet.gemm, negated, b)
            want = pydet.gemm(-a[: len(negated)], b)
            assert torch.equal(pydet.gemm(negated.resolve_neg(), b), want)
            assert torch.equal(pydet.torch.gemm(negated, b), want)
            assert torch.equal(pydet.torch.linear(negated, b.T), want)
            assert torch.equal(torch.ops.pydet.gemm(b.T, negated.T), want.T)
        target = negate(torch.full((3, 5), 7.0)).detach()
        raises(lazy, ValueError, pydet.gemm, a, b, out=target)
        assert (target == -7).all()

    check()
    with torch.no_grad():
        check()
    with torch.inference_mode():
        check()


def test_torch_tensors_with_a_tangent(torch):
    """Forward-mode AD: a result without a tangent would be a wrong derivative, silently 0."""
    from torch.autograd import forward_ad

    import pydet.torch

    a, b = torch.from_numpy(A.copy()), torch.from_numpy(B.copy())
    want = pydet.gemm(a, b)
    tangent = r"^gemm: a has a tangent of forward-mode AD, and this computes none; pass unpack_dual\(a\).primal$"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, torch.ones_like(a))
        raises(tangent, ValueError, pydet.gemm, dual, b)
        raises(r"gemm: bias has a tangent", ValueError, pydet.gemm, a, b, bias=forward_ad.make_dual(b[0], b[0]))
        raises(r"gemm: no forward-mode gradient", RuntimeError, pydet.torch.gemm, dual, b)
        with torch.no_grad():
            raises(tangent, ValueError, pydet.gemm, dual, b)
            raises(r"gemm: no forward-mode gradient", RuntimeError, pydet.torch.gemm, dual, b)
        with torch.inference_mode():  # where PyTorch itself has no tangents
            assert forward_ad.unpack_dual(torch.mm(dual, b)).tangent is None
            assert torch.equal(pydet.gemm(dual, b), want) and torch.equal(pydet.torch.gemm(dual, b), want)
        assert torch.equal(pydet.gemm(a, b), want)
        assert torch.equal(pydet.gemm(forward_ad.unpack_dual(dual).primal, b), want)
    assert torch.equal(pydet.gemm(dual, b), want), "a tangent ends with its level"
    with pytest.raises(pydet.Error):
        torch.func.jvp(lambda x: pydet.gemm(x, b), (a,), (torch.ones_like(a),))


class Claims(np.ndarray):
    """Says that it is of another type than it is."""

    @property
    def dtype(self):
        return np.dtype(np.float32)

    @property
    def __array_interface__(self):
        return {**np.ndarray.view(self, np.ndarray).__array_interface__, "typestr": "<f4"}


def test_a_subclass_that_lies_about_its_type():
    """It is read as the array that it is: as float32 its bytes would end half way."""
    halves = np.ones((64, 64), np.float16).view(Claims)
    assert halves.dtype == np.float32 and halves.nbytes == 2 * 64 * 64
    out = np.zeros((64, 64), np.float32)
    assert (pydet.gemm(halves, np.ones((64, 64), np.float16), out=out) == 64).all()
    raises(r"b is float16, want float32 as a is", TypeError, pydet.gemm, np.ones((4, 64), np.float32), halves)


def test_classes_that_claim_a_place_in_another_package():
    for name, module in [
        ("ndarray", "numpy"),
        ("Tensor", "torch"),
        ("Parameter", "torch"),
        ("ndarray", 5),
        ("T", None),
    ]:
        pretender = type(name, (), {"__module__": module})
        raises(rf"^gemm: a is .*{name}, want a tensor", TypeError, pydet.gemm, pretender(), B)
        carrier = type(name, (), {"__module__": module, "__array_interface__": A.__array_interface__})
        out = np.zeros((3, 5), np.float32)
        assert pydet.gemm(carrier(), B, out=out).tobytes() == pydet.gemm(A, B).tobytes()
    unhashable = type("M", (type,), {"__eq__": lambda self, other: True})
    raises(r"^gemm: a is .*Odd, want a tensor", TypeError, pydet.gemm, unhashable("Odd", (), {})(), B)


def test_jax_arrays_are_never_written(jax):
    a, b = jax.numpy.asarray(A), jax.numpy.asarray(B)
    out = jax.numpy.zeros((3, 5))
    before = np.asarray(out).tobytes()
    raises(
        r"^gemm: out is a jax array, and those are immutable; take the result instead$",
        TypeError,
        pydet.gemm,
        a,
        b,
        out=out,
    )
    raises(
        r"dweight is a jax array, and those are immutable",
        TypeError,
        pydet.rmsnorm_backward,
        jax.numpy.asarray(X),
        jax.numpy.asarray(X),
        jax.numpy.asarray(W),
        jax.numpy.ones(3),
        dweight=jax.numpy.zeros(8),
        accumulate=True,
    )
    assert np.asarray(out).tobytes() == before
    raises(r"b is numpy.ndarray and a is .*, want all of one framework", TypeError, pydet.gemm, a, B)
    with pytest.raises(pydet.Error, match=r"which has no memory; use pydet.jax under jit and grad"):
        jax.jit(pydet.gemm)(a, b)


def test_dlpack_that_is_not_what_it_says():
    tensor = Tensor(A)
    out = random((3, 5))

    class Broken:
        def __init__(self, answer):
            self.answer = answer

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **keywords):
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    capsule = Producer(tensor).capsule
    raises(
        r"^gemm: a has a __dlpack__ that gives int, want a fresh DLPack capsule$",
        ValueError,
        pydet.gemm,
        Broken(7),
        B,
        out=out,
    )
    raises(
        r"a cannot be read by DLPack: not today", ValueError, pydet.gemm, Broken(BufferError("not today")), B, out=out
    )
    used = capsule()
    ctypes.pythonapi.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    ctypes.pythonapi.PyCapsule_SetName(used, b"used_dltensor")
    raises(r"want a fresh DLPack capsule", ValueError, pydet.gemm, Broken(used), B, out=out)
    ctypes.pythonapi.PyCapsule_SetName(used, b"dltensor")
    raises(
        r"a comes as DLPack 2, want 1", ValueError, pydet.gemm, Producer(tensor, versioned=True, major=2), B, out=out
    )
    for flags, word in ((1, "read-only"), (2, "a copy")):
        target = Producer(Tensor(out), versioned=True, flags=flags)
        raises(rf"out is {word}", ValueError, pydet.gemm, A, B, out=target, untouched=[out])
        assert target.all_given_back()
    no_shape = Producer(Tensor(ndim=2, dtype=FLOAT32, data=64))
    raises(r"^gemm: a has no shape", ValueError, pydet.gemm, no_shape, B, out=out, status="NULL_POINTER")
    nothing = Producer(Tensor(shape=(3, 4), dtype=FLOAT32, data=None))
    raises(r"a has NULL data", ValueError, pydet.gemm, nothing, B, out=out, status="NULL_POINTER", untouched=[out])


def test_array_interface_that_is_not_what_it_says():
    class Interface:
        def __init__(self, **changes):
            self.__array_interface__ = {**A.__array_interface__, **changes}

    out = random((3, 5))
    pydet.gemm(Interface(), B, out=out)
    assert out.tobytes() == pydet.gemm(A, B).tobytes()
    raises(
        r"does not know how to make a result like .*Interface; give every output",
        ValueError,
        pydet.gemm,
        Interface(),
        B,
    )
    raises(r"a has a mask", ValueError, pydet.gemm, Interface(mask=A), B, out=out)
    raises(
        r"out is read-only",
        ValueError,
        pydet.gemm,
        A,
        B,
        out=Interface(shape=(3, 5), data=(out.ctypes.data, True)),
        untouched=[out],
    )
    raises(r"in the byte order of another machine", TypeError, pydet.gemm, Interface(typestr=">f4"), B, out=out)
    raises(
        r"want float32, bfloat16, float16, float8_e4m3fn", TypeError, pydet.gemm, Interface(typestr="<V2"), B, out=out
    )
    raises(r"a has NULL data", ValueError, pydet.gemm, Interface(data=(0, False)), B, out=out, untouched=[out])


ADDRESS = A.ctypes.data
NO_ADDRESS = {  # what an array interface's data is, and what is said of it
    "a buffer": (bytearray(48), r"is bytearray, want \(address, read-only\)$"),
    "two bytes": (b"ab", r"is bytes, want"),
    "an array of two": (np.array([ADDRESS, 0]), r"is numpy.ndarray, want"),
    "nothing": (None, r"is NoneType, want"),
    "a list": ([ADDRESS, False], r"is list, want"),
    "one": ((ADDRESS,), rf"is \({ADDRESS},\), want"),
    "three": ((ADDRESS, False, 0), rf"is \({ADDRESS}, False, 0\), want"),
    "a float": ((float(ADDRESS), False), rf"is at {ADDRESS}\.0, want an address$"),
    "a NumPy float": ((np.float64(ADDRESS), False), r"is at .*, want an address$"),
    "text": (("0", False), r"is at '0', want an address"),
    "True": ((True, False), r"is at True, want an address"),
    "negative": ((-1, False), r"is at -1, want an address"),
    "past 64 bits": ((ADDRESS + 2**64, False), rf"is at {ADDRESS + 2**64}, want an address"),
}


@pytest.mark.parametrize("protocol", ["__array_interface__", "__cuda_array_interface__"])
@pytest.mark.parametrize("data, sentence", NO_ADDRESS.values(), ids=NO_ADDRESS)
def test_array_interface_without_an_address(protocol, data, sentence):
    """NumPy's interface allows an object with the buffer protocol there; its first two bytes are no address."""
    carrier = type("Carrier", (), {protocol: {**A.__array_interface__, "data": data}})()
    out = random((3, 5))
    sentence = "^gemm: a has an array interface whose data " + sentence
    raises(sentence, ValueError, pydet.gemm, carrier, B, out=out, status="INVALID_VALUE", untouched=[out, A])


def test_array_interface_that_is_no_dict():
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        carrier = type("Carrier", (), {protocol: [1, 2]})()
        raises(r"^gemm: a has an array interface that is list, want a dict$", ValueError, pydet.gemm, carrier, B, out=B)


def test_an_address_may_be_any_integer():
    data = (np.uint64(ADDRESS), False)
    carrier = type("Carrier", (), {"__array_interface__": {**A.__array_interface__, "data": data}})()
    out = random((3, 5))
    assert pydet.gemm(carrier, B, out=out).tobytes() == pydet.gemm(A, B).tobytes()


@pytest.mark.parametrize("stream", [-1, 1 << 64, 1.0, "1", True])
def test_a_stream_of_an_array_interface_that_is_no_address(stream):
    carrier = type("Carrier", (), {"__cuda_array_interface__": {"stream": stream}})()
    raises(r"^stream is .*, want an address", TypeError, frameworks.Framework().stream, carrier, 2, 0)
    carrier.__cuda_array_interface__["stream"] = None
    assert frameworks.Framework().stream(carrier, 2, 0) == 0


# ---- Parts of one tensor -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [2**62, 2**61, 2**63 - 1, 2**62 + 4, 2**61 - 1])
@pytest.mark.parametrize("count", [2, 3, 5, 64])
def test_a_first_stride_that_wraps(stride, count):
    """Times the bytes of an element, some are 0 modulo 2^64: each part would be the first one."""
    x, out = random((64, 4)), random((4,))
    parts = Producer(Tensor(x, shape=(count, 4), strides=(stride, 1)))
    sentence = rf"^fold: parts is a tensor of first stride {stride}, which reaches past 2\^63 - 1 bytes$"
    if stride * 4 * (count - 1) < 2**63:  # said of the first part that does
        sentence = r"^fold: parts\[\d+\] is 4, which reaches past 2\^63 - 1 bytes$"
    raises(sentence, ValueError, pydet.fold, parts, out=out, status="OVERFLOW", untouched=[x, out])
    for shape in ((1, 4), (count, 0)):  # nothing lies there
        parts, out = Producer(Tensor(x, shape=shape, strides=(stride, 1))), random((shape[1],))
        assert pydet.fold(parts, out=out).tobytes() == x[0, : shape[1]].tobytes()


# ---- Numbers that only pydet itself gives --------------------------------------------------------------------------

# A library that believed one would read past its own tables.
PRIVATE = """
import sys
import numpy as np
import pydet
from pydet import _native, hooks

x, row, one = np.ones((4, 4), np.float32), np.ones(4, np.float32), np.ones((1, 4), np.float32)
index, q = np.zeros(4, np.int32), pydet.quantize(x)[0]
operands = {
    "product": [x, x], "scaled_gemm": [q, q.T], "quantize": [x], "rmsnorm": [x, row, 0], "softmax": [x],
    "rmsnorm_quantize": [x, row, 0],
    "rmsnorm_backward": [x, x, row, row], "layernorm": [x, row, row, 0], "layernorm_backward": [x, x, row, row, row],
    "softmax_backward": [x, x], "activation": [x], "activation_backward": [x, x],
    "log_prob": [x, index], "log_prob_backward": [row, x, index], "sample": [x, index, index], "topk": [x, 2],
    "embedding": [x, index], "embedding_backward": [x, index],
    "linear_log_prob": [x, x, index], "linear_log_prob_backward": [row, x, x, index],
    "linear_cross_entropy": [x, x, index], "linear_cross_entropy_backward": [None, x, x, index],
    "selective_scan": [x[None, None], one[None], row, x[None, None], x[None, None], row],
    "gated_delta": [x[None, None]] * 3 + [one[None]] * 2, "causal_conv1d": [x[None], x, row],
    "selective_scan_backward": [x[None, None]] * 2 + [one[None], row, x[None, None], x[None, None], row],
    "gated_delta_backward": [x[None, None]] * 4 + [one[None]] * 2, "causal_conv1d_backward": [x[None]] * 2 + [x],
    "rotary_table": [index, row], "rotary": [x[:, None], None, x[:, :2], x[:, :2]],
    "attention": [np.ones((1, 1, 4, 8), np.float32)] * 3,
    "attention_backward": [np.ones((1, 1, 4, 8), np.float32)] * 5 + [np.ones((1, 1, 4), np.float32)],
    "grouped_gemm": [x, x[None], index[:1]], "scaled_grouped_gemm": [q, q.T[None], index[:1]], "fold": [(x, x)],
    "adamw": [(np.ones(4, np.float32),) for _ in range(4)],
}
kinds = {"gemm": "product", "gemm_da": "product", "gemm_db": "product", "skinny_gemm": "product"}
kinds |= {"log_softmax": "softmax", "log_softmax_backward": "softmax_backward"}
always = {"fold": {"is_tuple": True}, "quantize": {"granularity": "row"}, "activation_backward": {"wants_dx": True}}
always |= {"embedding_backward": {"rows": 4}, "rmsnorm_quantize": {"granularity": "row"}}
wrong = [-1, 2, 3, 6, 99, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64]
wrong += [1.5, float("nan"), "x", (), (x,) * 65, object(), x, None]
methods, _ = hooks._methods()
table = _native.try_load(hooks.constants.PYDET_EXCHANGE_CPU)[0].lib.pydet_exchange_methods(hooks.exchange)
names = {}
while len(names) < len(methods):
    names[_native.text(table.name)] = _native.text(table.arguments).split(", ")
    table += 1
refused = 0
for name, method in methods.items():
    kind = kinds.get(name, name)
    given, base = operands[kind], always.get(kind, {})
    method(*given, **base)
    for place, argument in enumerate(names[name]):
        for value in wrong:
            try:
                if place < len(given):
                    method(*given[:place], value, *given[place + 1 :], **base)
                else:
                    method(*given, **{**base, argument: value})
            except (pydet.Error, TypeError, OverflowError) as problem:
                refused += 1
                assert not argument.endswith("dtype") or isinstance(problem, pydet.Error), (name, argument, value)
                continue
            assert not argument.endswith("dtype") or value is None or value in range(6), (name, argument, value)
print(len(methods), refused)
"""


def test_private_numbers():
    """Every argument of every method that the library gives to Python, as numbers and objects that none may be: taken
    or refused, and the process lives."""
    done = run_python("-W", "ignore", "-c", PRIVATE)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    methods, refused = map(int, done.stdout.split())
    assert methods >= 19 and refused > 2000


@pytest.mark.parametrize("index", [-1, 6, 99, 2**32, 2**63 - 1, -(2**63)])
def test_type_indices(index):
    """Without the check a table is read past its end, or 2^32 is float32."""
    wrong = rf"dtype is {index}, want the index of an element type, 0 to 5$"
    gemm, quantize, fold, backward = hooks.methods(("gemm", "quantize", "fold", "rmsnorm_backward"))
    for given in ({}, {"out": np.zeros((3, 5), "f")}):
        raises(rf"^gemm: out_{wrong}", TypeError, gemm, A, B, out_dtype=index, **given)
    raises(rf"^quantize: {wrong}", TypeError, quantize, X, granularity="row", dtype=index)
    raises(rf"^quantize: scale_{wrong}", TypeError, quantize, X, granularity="row", scale_dtype=index)
    raises(rf"^fold: out_{wrong}", TypeError, fold, (A,), is_tuple=True, out_dtype=index)
    raises(rf"^rmsnorm_backward: dweight_{wrong}", TypeError, backward, X, X, W, W[:3], dweight_dtype=index)


# ---- Floats --------------------------------------------------------------------------------------------------------


def test_eps_below_zero_where_subnormals_are_zeros():
    """-1e-40 is no 0, though a thread that reads subnormals as zeros compares it so."""
    with unusual_float_environment():
        for call in (lambda: pydet.rmsnorm(X, eps=-1e-40), lambda: pydet.layernorm(X, eps=-1e-40)):
            with pytest.raises(pydet.Error, match=r"norm: eps is .*, want a finite number, 0 or more"):
                call()
