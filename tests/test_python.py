"""The Python layer: every framework's tensors in and out, streams, documentation, threads, and the command line.

That the numbers are right is tested elsewhere; here one way of calling must give the bits of another.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import inspect
import json
import os
import pickle
import re
import sys
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import pydet
from capi import Tensor, random
from cases import random_words
from conftest import run_python, unusual_float_environment
from interop import Producer, jax, torch  # noqa: F401 (fixtures)
from pydet import frameworks
from reference import bits

DTYPES = ["float32", "bfloat16", "float16"]


def same(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert (bits(actual) == bits(expected)).all()


def operands(dtype):
    """What the operations take: a, b, bias, x and dy, weight."""
    return (
        random((5, 40), dtype),
        random((40, 7), dtype, 1),
        random((7,), dtype, 2),
        random((5, 12), dtype, 3),
        random((12,), dtype, 4),
    )


def all_operations(a, b, bias, x, weight):
    """Every operation once, as a list of results; `a` ... may be of any framework."""
    y, rstd = pydet.rmsnorm(x, weight, eps=1e-6)
    _, _, total = pydet.rmsnorm(x, weight, eps=1e-6, residual=y)
    c = pydet.gemm(a, b, bias=bias, out_dtype="float32", k_chunk=16)
    low = pydet.gemm(a, b)
    return [
        c,
        low,
        pydet.gemm_da(low, b),
        pydet.gemm_db(a, low),
        pydet.skinny_gemm(a, b.T, bias=bias),
        y,
        rstd,
        total,
        *pydet.rmsnorm_backward(y, x, weight, rstd),
    ]


# ---- NumPy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_results(dtype):
    results = all_operations(*operands(dtype))
    kind = random((), dtype).dtype
    assert [r.dtype for r in results] == [np.float32] + [kind] * 5 + [np.float32] + [kind] * 3
    assert [r.shape for r in results] == [(5, 7)] * 2 + [
        (5, 40),
        (40, 7),
        (5, 7),
        (5, 12),
        (5,),
        (5, 12),
        (5, 12),
        (12,),
    ]
    assert all(type(r) is np.ndarray and r.flags.c_contiguous and r.flags.writeable for r in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "given",
    [
        "float32",
        "fp32",
        np.float32,
        np.dtype("float32"),
        "bfloat16",
        "bf16",
        ml_dtypes.bfloat16,
        np.dtype(ml_dtypes.bfloat16),
        "float16",
        "fp16",
        np.float16,
        np.dtype("f2"),
    ],
)
def test_out_dtype(dtype, given):
    a, b, *_ = operands(dtype)
    kind = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(str(given))
    kind = kind or getattr(given, "name", None) or getattr(given, "__name__", given)
    result = pydet.gemm(a, b, out_dtype=given)
    assert result.dtype.name == kind
    out = random((5, 7), kind)
    assert pydet.gemm(a, b, out=out, out_dtype=given) is out
    same(result, out)


def test_outputs_that_are_given_are_returned():
    a, b, bias, x, weight = operands("float32")
    wanted = all_operations(a, b, bias, x, weight)
    empty = [np.empty_like(r) for r in wanted]
    c, low, da, db, skinny, y, rstd, total, dx, dweight = empty
    assert pydet.gemm(a, b, bias=bias, k_chunk=16, out=c) is c
    assert pydet.gemm(a, b, out=low) is low
    assert pydet.gemm_da(low, b, out=da) is da and pydet.gemm_db(a, low, out=db) is db
    assert pydet.skinny_gemm(a, b.T, bias=bias, out=skinny) is skinny
    got = pydet.rmsnorm(x, weight, eps=1e-6, out=(y, rstd))
    assert got[0] is y and got[1] is rstd
    got = pydet.rmsnorm(x, weight, eps=1e-6, residual=y, out=(None, None, total))
    assert got[2] is total and got[0] is not y
    got = pydet.rmsnorm_backward(y, x, weight, rstd, out=dx, dweight=dweight)
    assert got[0] is dx and got[1] is dweight
    for given, made in zip(empty, wanted):
        same(given, made)
    assert pydet.rmsnorm(x, weight, eps=1e-6, out=y)[0] is y


def test_layouts_are_read_in_place():
    a, b, *_ = operands("float32")
    want = pydet.gemm(a, b)
    padded = np.full((5, 64), np.nan, np.float32)
    padded[:, 8:48] = a
    for left in (a, np.asfortranarray(a), padded[:, 8:48], a[:, None].repeat(2, 1)[:, 1]):
        for right in (b, np.asfortranarray(b), np.ascontiguousarray(b.T).T):
            same(pydet.gemm(left, right), want)
    out = np.full((7, 9), np.nan, np.float32)
    pydet.gemm(a, b, out=out.T[2:7])
    same(np.ascontiguousarray(out[:, 2:7].T), want)
    assert np.isnan(out[:, :2]).all() and np.isnan(out[:, 7:]).all()
    frozen = a.copy()
    frozen.flags.writeable = False
    same(pydet.gemm(frozen, b), want)
    batch = np.broadcast_to(a, (3, 2, 5, 40))
    same(pydet.gemm(batch, b), np.broadcast_to(want, (3, 2, 5, 7)).copy())
    same(pydet.gemm(np.zeros((0, 40), np.float32), b), np.zeros((0, 7), np.float32))
    same(pydet.gemm(a[:, :0], b[:0]), np.zeros((5, 7), np.float32))
    same(pydet.skinny_gemm(a[0], np.ascontiguousarray(b.T)), want[0])
    same(pydet.rmsnorm(a[0], eps=0)[1], pydet.rmsnorm(a, eps=0)[1][0].reshape(()))


class Subclass(np.ndarray):
    pass


def test_numpy_subclasses_and_scalars():
    a, b, *_ = operands("float32")
    same(np.asarray(pydet.gemm(a.view(Subclass), b)), pydet.gemm(a, b))


def test_weight_none():
    x = random((5, 12))
    ones = np.ones(12, np.float32)
    y, rstd = pydet.rmsnorm(x, eps=1e-6)
    same(y, pydet.rmsnorm(x, ones, eps=1e-6)[0])
    dx, dweight = pydet.rmsnorm_backward(y, x, None, rstd)
    assert dweight is None
    wanted = pydet.rmsnorm_backward(y, x, ones, rstd)
    same(dx, wanted[0])
    same(pydet.rmsnorm_backward(y, x, None, rstd, dweight=np.empty(12, np.float32))[1], wanted[1])


# ---- Other frameworks ----------------------------------------------------------------------------------------------


def to_torch(torch, array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def from_torch(torch, tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(torch, dtype):
    arrays = operands(dtype)
    tensors = [to_torch(torch, array) for array in arrays]
    results = all_operations(*tensors)
    for got, want in zip(results, all_operations(*arrays)):
        assert type(got) is torch.Tensor and got.device.type == "cpu" and not got.requires_grad and got.is_contiguous()
        same(from_torch(torch, got), want)
    a, b = tensors[:2]
    assert pydet.gemm(a, b, out_dtype=torch.float16).dtype == torch.float16
    assert pydet.gemm(a, b, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    out = torch.empty(5, 7)
    assert pydet.gemm(a, b, out=out) is out
    same(out.numpy(), pydet.gemm(*arrays[:2], out_dtype="float32"))
    columns = torch.full((7, 9), float("nan"))
    pydet.gemm(a.T.contiguous().T, b.T.contiguous().T, out=columns.T[1:6])
    same(columns.T[1:6].contiguous().numpy(), out.numpy())


class ByDlpack:
    """A tensor that shows nothing but __dlpack__."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(**keywords)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exchange_api_and_dlpack_agree(torch, dtype):
    """The fast path reads and allocates by the C exchange API; a subclass and a bare carrier go the other way."""
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), "this PyTorch has no fast path; install 2.10 or later"
    a, b, bias, x, weight = tensors = [to_torch(torch, array) for array in operands(dtype)]

    class Slow(torch.Tensor):
        pass

    slow = [tensor.as_subclass(Slow) for tensor in tensors]
    for fast, other in zip(all_operations(*tensors), all_operations(*slow)):
        assert torch.equal(fast.view(torch.uint8), other.as_subclass(torch.Tensor).view(torch.uint8))
        assert fast.dtype == other.dtype and fast.shape == other.shape
    out = torch.empty(5, 7, dtype=a.dtype)
    pydet.gemm(ByDlpack(a.T.contiguous().T), ByDlpack(b), bias=ByDlpack(bias), out=ByDlpack(out))
    want = pydet.gemm(a, b, bias=bias)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8))
    parameter = torch.nn.Parameter(b)
    with torch.no_grad():
        assert torch.equal(pydet.gemm(a, parameter).view(torch.uint8), pydet.gemm(a, b).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(jax, dtype):
    arrays = operands(dtype)
    results = all_operations(*[jax.numpy.asarray(array) for array in arrays])
    for got, want in zip(results, all_operations(*arrays)):
        assert isinstance(got, jax.Array) and {d.platform for d in got.devices()} == {"cpu"}
        same(np.asarray(got), want)
    total = sum(jax.numpy.sum(r.astype(jax.numpy.float32)) for r in results)
    assert np.isfinite(float(total)), "JAX can compute on what it was given"
    a, b = (jax.numpy.asarray(array) for array in arrays[:2])
    assert pydet.gemm(a, b, out_dtype=jax.numpy.bfloat16).dtype == jax.numpy.bfloat16
    assert pydet.gemm(a[:0], b).shape == (0, 7)
    with pytest.raises(Exception, match="read-only"):
        np.asarray(pydet.gemm(a, b))[0, 0] = 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [{}, {"versioned": True}, {"old": True}, {"versioned": True, "flags": 1}])
def test_any_dlpack_producer(dtype, kind):
    a, b, bias, *_ = operands(dtype)
    out = np.zeros((5, 7), a.dtype)
    producers = [Producer(Tensor(array), **kind) for array in (np.asfortranarray(a), b, bias)]
    target = Producer(Tensor(out), versioned=bool(kind.get("versioned")))
    assert pydet.gemm(producers[0], producers[1], bias=producers[2], out=target) is target
    same(out, pydet.gemm(a, b, bias=bias))
    for producer in (*producers, target):
        assert producer.all_given_back() and producer.kept
        assert all(keywords.get("stream") is None for keywords in producer.asked), "no stream for memory of the CPU"
        if not kind.get("old"):
            assert producer.asked[0]["max_version"][0] >= 1
    same(pydet.gemm(a, producers[1]), pydet.gemm(a, b))  # a bare carrier goes with any framework


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_array_interface(dtype):
    a, b, *_ = operands(dtype)

    class Interface:
        def __init__(self, array):
            self.array = array
            self.__array_interface__ = array.__array_interface__
            self.dtype = array.dtype

    out = np.zeros((5, 7), a.dtype)
    pydet.gemm(Interface(a.T.copy().T), Interface(b), out=Interface(out))
    same(out, pydet.gemm(a, b))


# ---- Streams -------------------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __cuda_stream__(self):
        return 0, 0


@pytest.mark.parametrize(
    "stream", [None, 0, 1, Stream(), type("Ptr", (), {"ptr": 0})(), type("Torch", (), {"cuda_stream": 0})()]
)
def test_streams_are_taken_and_mean_nothing_on_the_cpu(stream):
    a, b, bias, x, weight = operands("float32")
    same(pydet.gemm(a, b, stream=stream), pydet.gemm(a, b))
    same(pydet.gemm_da(a @ b, b, stream=stream), pydet.gemm_da(a @ b, b))
    same(pydet.gemm_db(a, a @ b, stream=stream), pydet.gemm_db(a, a @ b))
    same(pydet.skinny_gemm(a, b.T, stream=stream), pydet.skinny_gemm(a, b.T))
    y, rstd = pydet.rmsnorm(x, weight, eps=0, stream=stream)
    same(y, pydet.rmsnorm(x, weight, eps=0)[0])
    same(pydet.rmsnorm_backward(y, x, weight, rstd, stream=stream)[1], pydet.rmsnorm_backward(y, x, weight, rstd)[1])


def test_a_type_that_cupy_does_not_have(monkeypatch):
    """CuPy 14 has no fp8. On a GPU with CuPy, tests/test_cuda_fp8.py asks CuPy itself."""

    def empty(shape, dtype):
        raise ValueError(f"Unsupported dtype {dtype}")

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=empty, __version__="14.2.0"))
    like, index = SimpleNamespace(device=contextlib.nullcontext()), pydet.protocols.TYPES.index("float8_e4m3fn")
    said = "quantize: the result is float8_e4m3fn, which CuPy 14.2.0 does not have; pass PyTorch tensors"
    with pytest.raises(pydet.Error, match=re.escape(said)) as caught:
        frameworks.Cupy().allocate(like, (2, 3), index, "quantize")
    assert isinstance(caught.value, TypeError)


def test_producers_make_ready_the_stream_of_their_own_device(monkeypatch):
    """__dlpack__ is asked for the current stream of the tensor's device, or for the one that the caller named."""

    class There(ByDlpack):
        def __dlpack_device__(self):
            return self.tensor

    monkeypatch.setattr(frameworks.Framework, "stream", lambda self, like, kind, number: 1000 * kind + number)
    for kind, default in ((2, 1), (10, 0)):
        there = There((kind, 3))
        framework = frameworks.framework_of(there, "gemm", "a")
        assert framework.producer_stream(there) == 1000 * kind + 3
        for named, wanted in ((7, 7), (0, default)):  # 0 is the default stream, which has another name in CUDA's DLPack
            with frameworks.running_on(named):
                assert framework.producer_stream(there) == wanted
        assert framework.producer_stream(there) == 1000 * kind + 3


# ---- Signatures, documentation, exceptions -------------------------------------------------------------------------

SIGNATURES = {
    "gemm": "a b * bias out out_dtype accumulate arithmetic k_chunk initial kernel stream",
    "gemm_da": "dc b * out out_dtype accumulate arithmetic k_chunk initial kernel stream",
    "gemm_db": "a dc * out out_dtype accumulate arithmetic k_chunk initial kernel stream",
    "skinny_gemm": "x w * bias out out_dtype accumulate mode arithmetic k_chunk initial weights_constant kernel stream",
    "rmsnorm": "x weight * eps bias weight_offset residual out kernel stream",
    "rmsnorm_backward": "dy x weight rstd * weight_offset has_bias dresidual out dweight dbias "
    "dweight_dtype accumulate block_sums kernel stream",
    "rmsnorm_quantize": "x weight * eps weight_offset residual granularity dtype scale_dtype power_of_two scale out y "
    "rstd kernel stream",
    "scaled_gemm": "a b * a_scale b_scale bias out out_dtype accumulate arithmetic k_chunk initial kernel stream",
    "quantize": "x * granularity dtype scale_dtype power_of_two transposed scale out kernel stream",
    "fold": "parts * bias out out_dtype order accumulate kernel stream",
    "adamw": "params grads exp_avgs exp_avg_sqs masters * lr beta_powers betas eps weight_decay kernel stream",
    "audit": "a b c * a_scale b_scale bias arithmetic k_chunk sample seed",
    "kernels": "",
    "devices": "",
    "last_kernel": "",
    "resolve_arithmetic": "dtype device arithmetic",
}


@pytest.mark.parametrize("name, words", SIGNATURES.items())
def test_signature(name, words):
    parameters = inspect.signature(getattr(pydet, name)).parameters
    got = []
    for parameter in parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in got:
            got.append("*")
        got.append(parameter.name)
    assert " ".join(got) == words
    assert all(p.annotation is not p.empty for p in parameters.values())


def test_everything_public_is_documented():
    for name in pydet.__all__:
        thing = getattr(pydet, name)
        if callable(thing):
            assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), name
    for name in SIGNATURES:
        text = getattr(pydet, name).__doc__
        for parameter in inspect.signature(getattr(pydet, name)).parameters:
            assert re.search(rf"\b{parameter}\b", text), f"{name} does not document {parameter}"
    for name in ("gemm", "gemm_da", "gemm_db", "skinny_gemm", "rmsnorm", "rmsnorm_backward", "audit"):
        for section in ("Args:", "Returns:", "Raises:"):
            assert section in getattr(pydet, name).__doc__, f"{name} has no {section}"
    assert os.path.exists(os.path.join(os.path.dirname(pydet.__file__), "py.typed"))


def test_the_example_of_the_package():
    import doctest

    assert doctest.testmod(pydet).attempted >= 3 and doctest.testmod(pydet).failed == 0


def test_exceptions_survive_pickling():
    with pytest.raises(pydet.Error) as caught:
        pydet.gemm(random((2, 3)), random((2, 3)))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is type(caught.value) and str(copy) == str(caught.value)
    assert copy.status == caught.value.status == 2 and copy.status_name == "PYDET_INVALID_SHAPE"


def test_kernels_devices_and_arithmetic():
    names = [kernel.name for kernel in pydet.kernels()]
    assert {
        f"cpu_{op}_scalar"
        for op in ("gemm_ieee", "gemm_sm90", "gemm_sm80", "gemm_cdna3", "gemm_cdna2", "rmsnorm", "rmsnorm_backward")
    } <= set(names)
    cpu = [device for device in pydet.devices() if device.kind == "cpu"]
    assert len(cpu) == 1 and cpu[0].multiprocessors >= 1 and cpu[0].arch and cpu[0].name
    for dtype in (*DTYPES, np.float16, ml_dtypes.bfloat16):
        assert pydet.resolve_arithmetic(dtype) == "ieee"
    assert pydet.resolve_arithmetic("bfloat16", arithmetic="cdna3") == "cdna3"
    a, b, *_ = operands("bfloat16")
    pydet.gemm(a, b, arithmetic="sm90")
    assert pydet.last_kernel().startswith("cpu_gemm_sm90_")
    pydet.gemm(a[:0], b)
    assert pydet.last_kernel() == ""
    for name in names:
        if name.startswith("cpu_gemm_sm90") and next(k for k in pydet.kernels() if k.name == name).available:
            pydet.gemm(a, b, arithmetic="sm90", kernel=name)
            assert pydet.last_kernel() == name


# ---- Life of objects, threads, imports -----------------------------------------------------------------------------


def test_nothing_is_kept():
    """References to operands, results and None are as before, after calls that succeed and calls that fail."""
    a, b, bias, x, weight = operands("float32")
    out = np.empty((5, 7), np.float32)
    producer = Producer(Tensor(a))

    def calls():
        pydet.gemm(a, b, bias=bias, out=out)
        all_operations(a, b, bias, x, weight)
        for wrong in (
            lambda: pydet.gemm(a, a),
            lambda: pydet.gemm(a, b, out=a),
            lambda: pydet.gemm(a, [1]),
            lambda: pydet.gemm(a, b, k_chunk="x"),
            lambda: pydet.gemm(producer, a),
            lambda: pydet.rmsnorm_backward(x, x, weight, x, accumulate=True),
        ):
            with pytest.raises(pydet.Error):
                wrong()

    watched = [a, b, bias, x, weight, out, a.dtype, None, np.ndarray]
    calls()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(100):
        calls()
    gc.collect()
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(abs(x - y) < 50 for x, y in zip(before, after)), list(zip(before, after))


class Held(Producer):
    """Its capsules call a Python function when they are let go of."""

    def __init__(self, array, released):
        super().__init__(Tensor(array))
        self.memory = []

        def destroy(capsule):
            released.append(sum(range(10)))  # Python code, which sees any exception that is pending

        self.destroy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(destroy)

    def capsule(self):
        capsule = super().capsule()
        self.memory.append(self.kept.pop()[1])
        ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), self.destroy)
        return capsule


def test_operands_are_released_with_no_exception_pending(capsys):
    """What refuses a call has set an exception, and what lets go of the operands runs Python code."""
    released, a, b = [], *operands("float32")[:2]
    held = [Held(x, released) for x in (a, b, b[:3])]
    out = np.zeros((5, 7), np.float32)
    for wrong, kind, words in (
        (lambda: pydet.gemm(held[0], held[2], out=out), pydet.Error, "gemm: b is 3x7, want 40xN"),
        (lambda: pydet.gemm(held[0], held[1], out=out, k_chunk=8), pydet.Error, "k_chunk is 8"),
        (lambda: pydet.gemm(held[0], [1], out=out), TypeError, "b is list, want a tensor"),
        (lambda: pydet.rmsnorm(held[0], held[1], eps=1, out=(out, out[0])), pydet.Error, "rmsnorm: "),
    ):
        released.clear()
        with pytest.raises(kind, match=words):
            wrong()
        assert released and set(released) == {45}
    assert pydet.gemm(held[0], held[1], out=out) is out
    assert capsys.readouterr() == ("", "")


def test_classes_are_not_kept():
    """A class whose objects were passed in may go: of classes only NumPy's and PyTorch's own are remembered."""
    a, b, *_ = operands("float32")
    out, gone = np.empty((5, 7), np.float32), []
    want = pydet.gemm(a, b)
    for number in range(200):
        for bases, members in (((), {"__array_interface__": a.__array_interface__}), ((np.ndarray,), {})):
            kind = type(f"Kind{number}", bases, members)
            same(np.asarray(pydet.gemm(a.view(kind) if bases else kind(), b, out=out)), want)
            gone.append(weakref.ref(kind))
    del kind
    gc.collect()
    assert not any(ref() for ref in gone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_true_and_false_of_any_kind(dtype):
    a, b, *_ = operands(dtype)
    start = random((5, 7))
    for no in (False, 0, np.False_):
        same(pydet.gemm(a, b, out=start.copy(), accumulate=no), pydet.gemm(a, b, out_dtype="float32"))
    for yes in (True, 1, np.True_):
        got = pydet.gemm(a, b, out=start.copy(), accumulate=yes)
        same(got, pydet.gemm(a, b, out=start.copy(), accumulate=True))
        assert (got != pydet.gemm(a, b, out_dtype="float32")).any()


def test_torch_tensors_are_freed(torch):
    a, b = torch.ones(64, 64), torch.ones(64, 64)
    result = pydet.gemm(a, b)
    gone = [weakref.ref(t) for t in (a, b, result)]
    del a, b, result
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_a_result_of_jax_outlives_its_maker(jax):
    a = jax.numpy.ones((64, 64))
    result = pydet.gemm(a, a)
    del a
    gc.collect()
    junk = [np.full(64 * 64, 7, np.float32) for _ in range(50)]
    assert (np.asarray(result) == 64).all() and len(junk) == 50


def test_many_threads():
    a, b, bias, x, weight = operands("bfloat16")
    big = random((200, 300)), random((300, 100), seed=1)
    want, wanted = all_operations(a, b, bias, x, weight), pydet.gemm(*big)

    def work(number):
        for _ in range(20):
            for got, expected in zip(all_operations(a, b, bias, x, weight), want):
                same(got, expected)
            same(pydet.gemm(*big), wanted)
            with pytest.raises(pydet.Error, match=f"b is {number}x2, want 40xN"):
                pydet.gemm(a, np.zeros((number, 2), ml_dtypes.bfloat16))
        return True

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(1, 7)))


run = functools.partial(run_python, "-m", "pydet")


# ---- Floats ----------------------------------------------------------------------------------------------------------


def doubles():
    """Numbers in double precision that lie between two in fp32, or on neither: of every size, halfway, subnormal."""
    words = random_words((400,), 7)
    numbers = [*words.view(np.float64), *(words >> np.uint64(9) | np.uint64(0x3EE0 << 48)).view(np.float64)]
    exponents = [*range(-152, -120), -20, 0, 20, 126, 127]
    for fraction in (1, 1 + 2**-24, 1 + 2**-23, 1 + 2**-24 + 2**-50, 1 + 2**-24 - 2**-50, 1 + 3 * 2**-24, 2 - 2**-30):
        numbers += [fraction * 2.0**exponent for exponent in exponents]
    numbers += [1e-6, 1e-5, 1e-12, 0.1, 5e-324, 1e-310, 3.4028235677973366e38, 3.4028235677973362e38, 1e39, 1e308]
    numbers = [sign * float(number) for number in numbers for sign in (1, -1) if np.isfinite(number)]
    return [
        number for number in numbers if number > 0 or number < -(2**-150)
    ]  # none that becomes -0, which a sum loses


def with_floats():
    """(function, argument): a call that gives what it was given as that argument, in fp32."""
    x, line, zeros = np.ones((1, 2), "f"), np.float32([[1, -1]]), np.zeros(2, "f")  # their xhat is what they are
    zero, one = np.zeros(1, "f"), np.ones(1, "f")

    def quantized(made, *operands, **options):  # a result of rmsnorm_quantize that it writes where it is given
        out = {made: np.empty((1, 2) if made == "y" else 1, "f")}
        pydet.rmsnorm_quantize(*operands, **options, **out)
        return out[made].ravel()[0]

    return {
        ("rmsnorm_quantize", "eps"): lambda v: quantized("rstd", x * 0, eps=v),
        ("rmsnorm_quantize", "weight_offset"): lambda v: quantized("y", x, zeros, eps=0, weight_offset=v),
        ("rmsnorm", "eps"): lambda v: pydet.rmsnorm(x * 0, eps=v)[1][0],
        ("rmsnorm", "weight_offset"): lambda v: pydet.rmsnorm(x, zeros, eps=0, weight_offset=v)[0][0, 0],
        ("rmsnorm_backward", "weight_offset"): lambda v: pydet.rmsnorm_backward(
            line, line * 0, zeros, one, weight_offset=v
        )[0][0, 0],
        ("layernorm", "eps"): lambda v: pydet.layernorm(x, eps=v)[2][0],
        ("layernorm", "weight_offset"): lambda v: pydet.layernorm(line, zeros, eps=0, weight_offset=v)[0][0, 0],
        ("layernorm_backward", "weight_offset"): lambda v: pydet.layernorm_backward(
            line, line * 0, zeros, zero, one, weight_offset=v
        )[0][0, 0],
        ("rotary_table", "scale"): lambda v: pydet.rotary_table(np.zeros(1, np.int64), one, scale=v)[0][0, 0],
    }


def head_floats():
    """The same of the head, whose temperature and softcap are from 2^-100 to 2^100."""
    x, w, first = np.float32([[2]]), np.float32([[3], [1]]), np.zeros(1, np.int64)
    forward = lambda name: lambda v: pydet.linear_log_prob(x, w, first, **{name: v}).item()
    backward = lambda name: (
        lambda v: pydet.linear_log_prob_backward(np.ones(1, "f"), x, w, first, **{name: v}).dx.item()
    )
    loss = lambda name: lambda v: pydet.linear_cross_entropy(x, w, first, **{name: v}).item()
    of_loss = lambda name: lambda v: pydet.linear_cross_entropy_backward(None, x, w, first, **{name: v}).dx.item()
    found = {("linear_log_prob", name): forward(name) for name in ("temperature", "softcap")}
    found |= {("linear_log_prob_backward", name): backward(name) for name in ("temperature", "softcap")}
    for name in ("temperature", "softcap", "z_loss"):
        found |= {("linear_cross_entropy", name): loss(name), ("linear_cross_entropy_backward", name): of_loss(name)}
    return found


# Read as they are: 1 less one is rounded, not 1 less what one is rounded to (test_cross_entropy.py).
DOUBLES = {("linear_cross_entropy", "label_smoothing"), ("linear_cross_entropy_backward", "label_smoothing")}


@pytest.mark.parametrize("function, argument", with_floats())
def test_floats_are_rounded_to_nearest_whatever_the_thread_has_set(function, argument):
    """A float in double precision becomes fp32 to nearest even, also under another rounding mode and flush-to-zero."""
    call, numbers = with_floats()[function, argument], doubles()
    if argument == "eps":
        numbers = [number for number in numbers if number > 0]

    def result(number):
        try:
            return np.float32(call(number)).tobytes()
        except pydet.Error as error:
            assert "want a finite number" in str(error)
            return "refused"

    def expected(number):
        with np.errstate(over="ignore"):
            single = np.float32(number)
        if not np.isfinite(single) or (argument == "scale" and single == 0):
            return "refused"
        with np.errstate(divide="ignore"):
            return (1 / np.sqrt(single) if argument == "eps" else single).tobytes()

    want = [expected(number) for number in numbers]
    assert [result(number) for number in numbers] == want
    with unusual_float_environment():
        got = [result(number) for number in numbers]
    wrong = [number for number, a, b in zip(numbers, got, want) if a != b]
    assert not wrong, f"{len(wrong)} of {len(numbers)}, the first: {wrong[:3]}"


def attention_floats():
    """(function, argument) -> what calls it with that number, and returns lse of one query and one key."""
    x, one = np.ones((1, 1, 1, 8), "f"), np.int32([1])
    ends, packed, cache = np.int32([0, 1]), x[0], x.reshape(1, 1, 1, 8)
    found = {}
    for argument in ("scale", "softcap"):
        of = lambda function, *operands, argument=argument: (
            lambda v: function(*operands, return_lse=True, **{argument: v})[1].item()
        )
        found["attention", argument] = of(pydet.attention, x, x, x)
        found["attention_varlen", argument] = of(pydet.attention_varlen, packed, packed, packed, ends, ends)
        found["attention_paged", argument] = of(pydet.attention_paged, x, cache, cache, np.int32([[0]]), one)
        # of two keys: their weights, and with them dq, say what the number was
        pair, lse = np.float32([[[[1] * 8, [0.5] * 8]]]), np.full((1, 1, 1), 3, "f")
        first = lambda function, *given, argument=argument: (
            lambda v: function(*given, only="q", **{argument: v})[0].flat[0].item()
        )
        found["attention_backward", argument] = first(pydet.attention_backward, x, x, pair, pair, x, lse)
        packs, ends_k = pair[0].swapaxes(0, 1), np.int32([0, 2])
        varlen = packed, packed, packs, packs, packed, lse[0], ends, ends_k
        found["attention_varlen_backward", argument] = first(pydet.attention_varlen_backward, *varlen)
    return found


@pytest.mark.parametrize("function, argument", [*attention_floats(), *head_floats()])
def test_floats_of_attention_and_the_head_are_rounded_to_nearest_whatever_the_thread_has_set(function, argument):
    call = (attention_floats() | head_floats())[function, argument]
    with np.errstate(over="ignore"):
        pairs = [(number, float(np.float32(number))) for number in doubles() if 2.0**-99 < abs(number) < 2.0**99]
    pairs = [(abs(number), abs(single)) for number, single in pairs]
    want = [call(single) for _, single in pairs]
    assert len(set(want)) > (5 if "linear" in function else 10) and [call(number) for number, _ in pairs] == want
    with unusual_float_environment():
        assert [call(number) for number, _ in pairs] == want


def test_every_float_is_tested():
    """That test has each argument of a public function that is a float."""
    floats = set()
    for name in pydet.__all__:
        if inspect.isfunction(thing := getattr(pydet, name)):
            parameters = inspect.signature(thing).parameters.values()
            floats |= {(name, p.name) for p in parameters if p.annotation in ("float", float, "float | None")}
    audits = {pair for pair in floats if pair[0].startswith("audit_")}  # which hand them to these functions as they are
    assert floats - audits == set(with_floats()) | set(attention_floats()) | set(head_floats()) | DOUBLES
    assert {(name.removeprefix("audit_"), argument) for name, argument in audits} <= set(with_floats())


def test_a_name_that_cannot_be_one_is_refused_in_silence():
    """A dict does not look up what has no hash, and from Python 3.13 on may say so behind the caller's back."""
    code = """
import numpy, pydet
a = numpy.ones((2, 2), numpy.float32)
for name in ([], {}):
    for call in (lambda: pydet.gemm(a, a, arithmetic=name), lambda: pydet.skinny_gemm(a, a, mode=name)):
        try:
            call()
        except pydet.Error as error:
            print(error)
"""
    done = run_python("-c", code)
    assert len(done.stdout.splitlines()) == 4 and done.stderr == "", (done.stdout, done.stderr)


def test_import_brings_no_framework():
    done = run_python(
        "-c",
        "import sys, pydet; print([m for m in ('numpy', 'torch', 'jax', 'cupy', 'ml_dtypes') if m in sys.modules])",
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_bfloat16_may_come_after_the_first_call():
    code = """
import numpy, pydet
a = numpy.ones((2, 2), numpy.float32)
pydet.gemm(a, a)
import ml_dtypes
b = a.astype(ml_dtypes.bfloat16)
print(pydet.gemm(b, b).dtype, pydet.gemm(a, a, out_dtype="bfloat16").dtype)
"""
    assert run_python("-c", code).stdout.split() == ["bfloat16", "bfloat16"]


# ---- The command line ----------------------------------------------------------------------------------------------


def test_report():
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"pydet {pydet.__version__} ")
    for kernel in pydet.kernels():
        assert kernel.name in done.stdout
    found = json.loads(run("--json").stdout)
    assert found["version"] == pydet.__version__ and found["numerics"] == pydet.NUMERICS and found["abi"] == pydet.ABI
    assert found["arithmetic"]["cpu:0"] == dict.fromkeys((*DTYPES, "float8_e4m3fn", "float8_e5m2"), "ieee")
    assert [kernel["name"] for kernel in found["kernels"]] == [kernel.name for kernel in pydet.kernels()]
    assert pydet.__version__ in run("--version").stdout
    for command in ((), ("demo",), ("audit",)):
        done = run(*command, "--help")
        assert done.returncode == 0 and "usage" in done.stdout


def test_report_without_a_library(tmp_path):
    done = run(library=tmp_path / "nothing.so")
    assert done.returncode == 0 and f"{tmp_path}/nothing.so is not there" in done.stdout, done.stderr
    found = json.loads(run("--json", library=tmp_path / "nothing.so").stdout)
    assert found["kernels"] == [] and found["problems"]


@pytest.fixture
def product(tmp_path):
    """A, B and C = gemm in sm90, saved; bfloat16 too, which numpy.save knows as two bytes of nothing."""

    def make(dtype, **options):
        a, b = random((9, 70), dtype), random((70, 11), dtype, 1)
        c = pydet.gemm(a, b, **options)
        paths = [tmp_path / f"{name}.npy" for name in "ABC"]
        for path, array in zip(paths, (a, b, c)):
            np.save(path, array)
        return paths, a, b, c

    return make


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_audit_command(product, dtype):
    (a_path, b_path, c_path), a, b, c = product(dtype, arithmetic="sm90", out_dtype="float32")
    done = run("audit", a_path, b_path, c_path, "--arithmetic", "sm90")
    assert done.returncode == 0, done.stderr
    assert "99 of 99 elements checked, 0 differ" in done.stdout
    wrong = c.copy()
    wrong.view(np.uint32)[4, 7] ^= 1
    np.save(c_path, wrong)
    done = run("audit", a_path, b_path, c_path, "--arithmetic", "sm90")
    assert done.returncode == 1 and "99 of 99 elements checked, 1 differ" in done.stdout
    assert re.search(
        rf"\[4, 7\]\s+got 0x{wrong.view(np.uint32)[4, 7]:08X} .*want 0x{c.view(np.uint32)[4, 7]:08X} ", done.stdout
    )
    found = json.loads(run("audit", a_path, b_path, c_path, "--arithmetic", "sm90", "--json").stdout)
    assert found["differing"] == 1 and found["first"][0]["index"] == [4, 7] and not found["all_equal"]
    done = run("audit", a_path, b_path, c_path, "--arithmetic", "ieee")
    assert done.returncode == 1, "another arithmetic has other bits"
    np.save(c_path, c)
    done = run("audit", a_path, b_path, c_path, "--arithmetic", "sm90", "--k-chunk", "16")
    assert done.returncode == 1, "chunks have other bits"
    done = run("audit", a_path, b_path, c_path, "--arithmetic", "sm90", "--sample", "3")
    assert done.returncode == 0 and "9 of 99 elements checked, 0 differ" in done.stdout
    done = run("audit", a_path, b_path, a_path.parent / "none.npy", "--arithmetic", "sm90")
    assert done.returncode == 2 and done.stderr.startswith("pydet audit: ") and "none.npy" in done.stderr
    done = run("audit", a_path, a_path, c_path, "--arithmetic", "sm90")
    assert done.returncode == 2 and re.search(r"pydet audit: .*9x70", done.stderr) and "Traceback" not in done.stderr


def test_audit_function(product):
    _, a, b, c = product("bfloat16", arithmetic="sm80", k_chunk=32)
    found = pydet.audit(a, b, c, arithmetic="sm80", k_chunk=32)
    assert (found.elements, found.checked, found.differing, found.first, found.all_equal) == (99, 99, 0, (), True)
    wrong = c.copy()
    wrong.view(np.uint16)[[0, 3, 8], [1, 5, 10]] ^= 0x8000
    found = pydet.audit(a, b, wrong, arithmetic="sm80", k_chunk=32)
    assert found.differing == 3 and not found.all_equal
    assert [d.index for d in found.first] == [(0, 1), (3, 5), (8, 10)]
    assert (
        found.first[0].got == f"0x{wrong.view(np.uint16)[0, 1]:04X}"
        and found.first[0].want == f"0x{c.view(np.uint16)[0, 1]:04X}"
    )
    sampled = [pydet.audit(a, b, wrong, arithmetic="sm80", k_chunk=32, sample=4, seed=seed) for seed in range(30)]
    assert all(s.checked == 16 and s.elements == 99 for s in sampled)
    assert {0} < {s.differing for s in sampled} <= {0, 1, 2, 3}, "some samples meet a wrong element, some do not"
    batch = np.stack([a, a[::-1]])
    result = pydet.gemm(batch, b, arithmetic="sm90")
    assert pydet.audit(batch, b, result, arithmetic="sm90").all_equal
    assert pydet.audit(batch, b, result, arithmetic="sm90", sample=2).all_equal


def test_audit_takes_tensors_of_frameworks(torch):
    a, b = torch.ones(4, 32, dtype=torch.bfloat16), torch.full((32, 3), 0.5, dtype=torch.bfloat16)
    c = pydet.gemm(a, b, arithmetic="sm90")
    assert pydet.audit(a, b, c).all_equal
    c[2, 1] = 7
    assert [d.index for d in pydet.audit(a, b, c).first] == [(2, 1)]
