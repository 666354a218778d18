"""Activations, gated and with gradients: every kernel, forced by name, against the reference; and what they promise."""

import itertools
import math

import numpy as np
import pytest

import pydet
import reference_activation as reference
from capi import Tensor, ffi, last_error, lib, options, pointer, status_name
from cases import DTYPES, assert_same_bits, data
from conftest import threads
from reference_activation import KINDS

# Around the CPU's vectors and pieces of 128 elements, the GPU's vectors of 16 bytes and its blocks.
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 255, 257, 1000, 2047, 2049]
SORTS = ("normal", "wide", "specials", "extremes", "tiny")


def every_number(dtype):
    """All of a 16-bit type; of float32 those that one in 32,771 words is, and where formulas change."""
    if dtype != "fp32":
        return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    words = np.arange(0, 1 << 32, 32771, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0, 0.625, 11, 14.875, 20, 56, 65, 69, 88.5, 104, 112], np.float32).view(np.uint32)
    near = (edges[:, None] + np.arange(-40, 40, dtype=np.int64)).astype(np.uint32).ravel()
    return np.concatenate([words, near, near ^ np.uint32(1 << 31)]).view(np.float32)


def check(functions, dtype, shapes, kinds=KINDS):
    """functions: an object with pydet's; those of a kernel of one of the two refuse the other."""
    for seed, ((m, n), kind) in enumerate(zip(shapes, itertools.cycle(kinds))):
        sort = SORTS[seed % len(SORTS)]
        x, up, dy = (data(sort if i == 0 else "normal", (m, n), DTYPES[dtype], seed + i) for i in range(3))
        what = f"{kind} {m}x{n} {sort}"
        if "backward" in functions.name:
            assert_same_bits(
                functions.activation_backward(dy, x, kind), reference.activation_backward(dy, x, kind), what
            )
            got = functions.activation_backward(dy, x, kind, up=up)
            for part, want in zip(got, reference.activation_backward(dy, x, kind, up=up), strict=True):
                assert_same_bits(part, want, f"{what}, gated")
        else:
            assert_same_bits(functions.activation(x, kind), reference.activation(x, kind), what)
            assert_same_bits(
                functions.activation(x, kind, up=up), reference.activation(x, kind, up=up), f"{what}, gated"
            )


SHAPES = [(m, n) for n in WIDTHS for m in (1, 3)] + [(0, 5), (17, 0), (130, 40), (2, 8191), (1, 8193), (1, 20001)]


def test_forward(activation_kernel):
    check(activation_kernel, activation_kernel.dtype, SHAPES)


def test_backward(activation_backward_kernel):
    check(activation_backward_kernel, activation_backward_kernel.dtype, SHAPES)


def test_every_number(activation_kernel):
    x = every_number(activation_kernel.dtype)
    for kind in KINDS:
        assert_same_bits(activation_kernel.activation(x, kind), reference.activation(x, kind), kind)


def test_the_gradient_of_every_number(activation_backward_kernel):
    x = every_number(activation_backward_kernel.dtype)
    dy = np.ones_like(x)
    for kind in KINDS:
        got = activation_backward_kernel.activation_backward(dy, x, kind)
        assert_same_bits(got, reference.activation_backward(dy, x, kind), kind)


def test_other_formulas_are_refused_by_the_tests_above(monkeypatch):
    """The control: of each kind a step less exact than it is."""
    x, dy = data("normal", (4, 999), np.dtype(np.float32)), data("normal", (4, 999), np.dtype(np.float32), 1)
    plain = {
        "silu": x / (1 + np.exp(-x)), "sigmoid": 1 / (1 + np.exp(-x)), "tanh": np.tanh(x), "exp": np.exp(x),
        "softplus": np.log1p(np.exp(x)), "quick_gelu": x / (1 + np.exp(np.float32(-1.702) * x)),
        "gelu_tanh": x / 2 * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3))),
        "gelu": reference.activation(x, "gelu_tanh"),
    }  # fmt: skip
    assert plain.keys() == set(KINDS)
    for kind, other in plain.items():
        assert np.count_nonzero(pydet.activation(x, kind) != other) > 100, kind
    monkeypatch.setattr(reference, "fma", lambda a, b, c: a * b + c)
    for kind in ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "softplus"):
        with pytest.raises(AssertionError):
            assert_same_bits(pydet.activation(x, kind), reference.activation(x, kind))
    for kind in ("silu", "gelu", "gelu_tanh", "sigmoid"):
        with pytest.raises(AssertionError):
            assert_same_bits(pydet.activation_backward(dy, x, kind), reference.activation_backward(dy, x, kind))


# ---- Promises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_has_the_bits_that_it_has_alone(dtype):
    """At any place, in any shape, by any number of threads."""
    x, up, dy = (data("normal", (7, 9001), DTYPES[dtype], seed) for seed in range(3))
    for kind in KINDS:
        y, (dx, dup) = pydet.activation(x, kind, up=up), pydet.activation_backward(dy, x, kind, up=up)
        for r, c in ((0, 0), (3, 17), (6, 9000), (5, 4095), (2, 8192)):
            one = np.s_[r : r + 1, c : c + 1]
            alone = [np.ascontiguousarray(t[one]) for t in (x, up, dy)]
            assert_same_bits(pydet.activation(alone[0], kind, up=alone[1]), y[one])
            for got, want in zip(
                pydet.activation_backward(alone[2], alone[0], kind, up=alone[1]), (dx, dup), strict=True
            ):
                assert_same_bits(got, want[one])
        assert_same_bits(pydet.activation(x.ravel(), kind, up=up.ravel()), y.ravel())
        for count in (1, 2, 7):
            with threads(count):
                assert_same_bits(pydet.activation(x, kind, up=up), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_has_the_bits_of_the_two_steps(dtype):
    x, up, dy = (data("normal", (5, 333), DTYPES[dtype], seed) for seed in range(3))
    multiply = lambda a, b: reference.round_to(reference.widen(a) * reference.widen(b), DTYPES[dtype])
    for kind in KINDS:
        value = pydet.activation(x, kind)
        assert_same_bits(pydet.activation(x, kind, up=up), multiply(value, up))
        dx, dup = pydet.activation_backward(dy, x, kind, up=up)
        assert_same_bits(dx, pydet.activation_backward(multiply(dy, up), x, kind))
        assert_same_bits(dup, multiply(dy, value))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 5, 8, 64, 129])
def test_halves_of_one_tensor_and_other_strides(dtype, n):
    both, dy = data("normal", (2, 3, 2 * n), DTYPES[dtype]), data("normal", (2, 3, n), DTYPES[dtype], 1)
    gate, up = both[..., :n], both[..., n:]
    dense = [np.ascontiguousarray(t) for t in (gate, up)]
    assert_same_bits(pydet.swiglu(gate, up), pydet.swiglu(*dense))
    out = np.zeros_like(both)
    pydet.activation_backward(dy, gate, up=up, out=out[..., :n], dup=out[..., n:])
    assert_same_bits(out, np.concatenate(pydet.activation_backward(dy, dense[0], up=dense[1]), -1))
    turned = np.swapaxes(both, 0, 1)  # rows of two strides
    assert_same_bits(pydet.gelu(turned), np.ascontiguousarray(np.swapaxes(pydet.gelu(both), 0, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype):
    for rows, n in ((3, 700), (1, 5000)):
        x, up, dy = (data("normal", (rows, n), DTYPES[dtype], seed) for seed in range(3))
        want, (dx, dup) = pydet.swiglu(x, up), pydet.activation_backward(dy, x, up=up)
        for into in (0, 1):
            held = [x.copy(), up.copy()]
            assert_same_bits(pydet.swiglu(*held, out=held[into]), want)
        for first, second in itertools.permutations(range(3), 2):
            held = [dy.copy(), x.copy(), up.copy()]
            got = pydet.activation_backward(held[0], held[1], up=held[2], out=held[first], dup=held[second])
            assert_same_bits(got[0], dx)
            assert_same_bits(got[1], dup)


def test_named_functions():
    x, up = data("normal", (3, 50), np.dtype(np.float32)), data("normal", (3, 50), np.dtype(np.float32), 1)
    for name in ("silu", "gelu", "sigmoid", "softplus"):
        assert_same_bits(getattr(pydet, name)(x), pydet.activation(x, name))
    assert_same_bits(pydet.gelu(x, "tanh"), pydet.activation(x, "gelu_tanh"))
    assert_same_bits(pydet.geglu(x, up), pydet.activation(x, "gelu", up=up))
    assert_same_bits(pydet.geglu(x, up, "tanh"), pydet.activation(x, "gelu_tanh", up=up))
    assert_same_bits(pydet.swiglu(x, up), pydet.activation(x, up=up))


def test_special_numbers():
    x = np.array([0.0, -0.0, np.inf, -np.inf, 3e38, -3e38, 1e-40, -1e-40], np.float32)
    want = {
        "silu": "0 -0 inf -0 3e38 -0 5e-41 -5e-41", "gelu": "0 -0 inf -0 3e38 -0 5e-41 -5e-41",
        "gelu_tanh": "0 -0 inf -0 3e38 -0 5e-41 -5e-41", "quick_gelu": "0 -0 inf -0 3e38 -0 5e-41 -5e-41",
        "sigmoid": "0.5 0.5 1 0 1 0 0.5 0.5", "tanh": "0 -0 1 -1 1 -1 1e-40 -1e-40",
        "softplus": "0.6931472 0.6931472 inf 0 3e38 0 0.6931472 0.6931472", "exp": "1 1 inf 0 inf 0 1 1",
    }  # fmt: skip
    for kind, numbers in want.items():
        got = pydet.activation(x, kind)
        expected = np.array(numbers.split(), np.float32)
        np.testing.assert_allclose(got, expected, rtol=1e-4, err_msg=kind)
        assert (np.signbit(got) == np.signbit(expected)).all(), kind
        assert np.isfinite(pydet.activation_backward(np.ones_like(x), x, kind)[[0, 1, 3, 5, 6, 7]]).all(), kind
    nan = np.array([np.nan, -np.nan], np.float32)
    for kind in KINDS:
        assert (pydet.activation(nan, kind).view(np.uint32) == 0x7FFFFFFF).all(), kind
        assert (pydet.activation_backward(np.ones_like(nan), nan, kind).view(np.uint32) == 0x7FFFFFFF).all(), kind


# ---- Accuracy ------------------------------------------------------------------------------------------------------


def logistic(t):
    return 1 / (1 + math.exp(-t)) if t > -700 else 0.0


def of_swish(kind, x):
    """t and t' of what is x s(t(x))."""
    c = 2 * math.sqrt(2 / math.pi)
    return {
        "silu": (x, 1.0),
        "quick_gelu": (1.702 * x, 1.702),
        "gelu_tanh": (c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x**2)),
    }[kind]


def exact(kind, x):
    """f(x) and f'(x) in double precision."""
    if kind == "gelu":
        below = math.erfc(-x / math.sqrt(2)) / 2
        return x * below, below + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if kind == "sigmoid":
        return logistic(x), logistic(x) * logistic(-x)
    if kind == "tanh":
        return math.tanh(x), 4 * logistic(2 * x) * logistic(-2 * x)
    if kind == "softplus":
        return max(x, 0) + math.log1p(math.exp(-abs(x))), logistic(x)
    if kind == "exp":
        return math.exp(x), math.exp(x)
    t, slope = of_swish(kind, x)
    return x * logistic(t), logistic(t) * (1 + x * slope * logistic(-t))


# Units in the last place, of results that are no subnormal; those of a formula whose argument is rounded grow with it.
MOST_ULPS = {
    "silu": 3.2,
    "sigmoid": 2.5,
    "tanh": 1.4,
    "softplus": 2,
    "exp": 0.9,
    "gelu": 5.9,
    "gelu_tanh": 6,
    "quick_gelu": 5,
}


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(kind):
    reach = {"gelu_tanh": 2, "quick_gelu": 2, "gelu": 13}.get(kind, 80)
    x = np.unique(np.concatenate([np.linspace(-reach, reach, 20000), np.geomspace(1e-30, 1, 1000)])).astype(np.float32)
    worst = 0.0
    for argument, y in zip(x.tolist(), pydet.activation(x, kind).tolist(), strict=True):
        want = exact(kind, argument)[0]
        if abs(want) > 2.0**-126:
            worst = max(worst, abs(y - want) / 2.0 ** (math.frexp(want)[1] - 24))
    assert 0.3 < worst <= MOST_ULPS[kind], worst


@pytest.mark.parametrize("kind", KINDS)
def test_slopes(kind):
    x = np.linspace(-12, 12, 6001).astype(np.float32)
    slope = pydet.activation_backward(np.ones_like(x), x, kind)
    for argument, got in zip(x.tolist(), slope.tolist(), strict=True):
        want = exact(kind, argument)[1]
        assert abs(got - want) <= 3e-7 * max(1.0, abs(want)), argument


# ---- Refusals ------------------------------------------------------------------------------------------------------


def refusal(function, kind=0, **changes):
    """(status, sentence) of a call in C; nothing was written."""
    names = ("x", "up", "y") if function == "activation" else ("dy", "x", "up", "dx", "dup")
    held = {name: data("normal", (3, 8), np.dtype(np.float32), i) for i, name in enumerate(names)} | changes
    tensors = {name: Tensor(x) if isinstance(x, np.ndarray) else x for name, x in held.items()}
    outputs = [held[name] for name in ("y", "dx", "dup") if isinstance(held.get(name), np.ndarray)]
    before = [x.tobytes() for x in outputs]
    chosen = options("pydet_activation_options", kind=kind)
    status = getattr(lib, f"pydet_{function}")(ffi.NULL, *(pointer(tensors[name]) for name in names), chosen)
    assert status != 0 and [x.tobytes() for x in outputs] == before
    return status_name(status).removeprefix("PYDET_"), last_error()


rows = lambda *shape, dtype=np.float32: np.zeros(shape, dtype)
one = rows(6, 8)
REFUSED = [
    ("activation", {"x": None}, "NULL_POINTER", "x is NULL, want a tensor"),
    ("activation", {"y": None}, "NULL_POINTER", "y is NULL, want a tensor"),
    ("activation", {"x": rows(3, 8, dtype=np.int32)}, "INVALID_DTYPE", "x is int32, want float32, bfloat16 or float16"),
    ("activation", {"up": rows(3, 8, dtype=np.float16)}, "INVALID_DTYPE", "up is float16, want float32 as x is"),
    ("activation", {"y": rows(3, 7)}, "INVALID_SHAPE", "y is 3x7, want 3x8"),
    ("activation", {"up": rows(24)}, "INVALID_SHAPE", "up is 24, want 3x8"),
    ("activation", {"x": rows(3, 16)[:, ::2]}, "INVALID_STRIDE",
     "x has stride 2 in its last dimension, want 1, as a contiguous copy has"),
    ("activation", {"y": np.broadcast_to(rows(8), (3, 8))}, "INVALID_STRIDE",
     "y has stride 0 in dimension 0, so its elements overlap"),
    ("activation", {"x": one[:3], "y": one[1:4]}, "OVERLAP", "y shares memory with x, want it apart"),
    ("activation", {"up": one[:3], "y": one[2:5]}, "OVERLAP", "y shares memory with up, want it apart"),
    ("activation", {"kind": -1}, "INVALID_VALUE", "options.kind is -1, want 0 (silu) to 7 (exp)"),
    ("activation", {"kind": 8}, "INVALID_VALUE", "options.kind is 8, want 0 (silu) to 7 (exp)"),
    ("activation_backward", {"dx": None, "dup": None}, "NULL_POINTER", "dx and dup are NULL, want one of them or both"),
    ("activation_backward", {"up": None}, "NULL_POINTER", "dup is given without up, want both or neither"),
    ("activation_backward", {"dy": rows(3, 9)}, "INVALID_SHAPE", "dy is 3x9, want 3x8"),
    ("activation_backward", {"dx": one[:3], "dup": one[:3]}, "OVERLAP", "dx shares memory with dup, want it apart"),
    ("activation_backward", {"x": one[:3], "dup": one[1:4]}, "OVERLAP", "dup shares memory with x, want it apart"),
    ("activation_backward", {"kind": 8}, "INVALID_VALUE", "options.kind is 8, want 0 (silu) to 7 (exp)"),
]  # fmt: skip


@pytest.mark.parametrize("function, changes, status, sentence", REFUSED)
def test_refusals(function, changes, status, sentence):
    assert refusal(function, **changes) == (status, f"{function}: {sentence}")


def test_refusals_in_python():
    x = np.ones(4, np.float32)
    known = "silu, gelu, gelu_tanh, quick_gelu, sigmoid, tanh, softplus, exp"
    for call, sentence in {
        lambda: pydet.activation(x, "relu"): f"activation: kind is 'relu', want one of {known}",
        lambda: pydet.activation_backward(x, x, 3): f"activation_backward: kind is 3, want one of {known}",
        lambda: pydet.gelu(x, "erf"): "gelu: approximate is 'erf', want 'none' or 'tanh'",
        lambda: pydet.activation_backward(x, x, dup=x.copy()): (
            "activation_backward: dup is given without up, want both or neither"
        ),
        lambda: pydet.silu(np.float32(1)): "activation: x has 0 dimensions, want 1 to 8",
    }.items():  # fmt: skip
        with pytest.raises(pydet.Error) as caught:
            call()
        assert str(caught.value) == sentence
