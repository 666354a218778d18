"""Bad input to the C interface: each kind has its status and its sentence, and leaves every byte as it was."""

import ctypes
import mmap
import re

import ml_dtypes
import numpy as np
import pytest

from capi import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Tensor,
    ffi,
    last_error,
    lib,
    library_path,
    options,
    owner,
    pointer,
    random,
    status_name,
)

VALID = {  # the arguments in the order of the C function, and shapes that fit
    "gemm": {"a": (3, 4), "b": (4, 5), "bias": None, "out": (3, 5)},
    "gemm_da": {"dc": (3, 5), "b": (4, 5), "da": (3, 4)},
    "gemm_db": {"a": (3, 4), "dc": (3, 5), "db": (4, 5)},
    "skinny_gemm": {"x": (3, 4), "w": (5, 4), "bias": None, "y": (3, 5)},
    "rmsnorm": {"x": (3, 8), "residual": None, "weight": (8,), "y": (3, 8), "rstd": (3,), "sum": None},
    "rmsnorm_backward": {
        "dy": (3, 8),
        "x": (3, 8),
        "weight": (8,),
        "rstd": (3,),
        "dresidual": None,
        "dx": (3, 8),
        "dweight": (8,),
    },
}
STRUCTS = {
    "gemm": "pydet_gemm_options",
    "gemm_da": "pydet_gemm_options",
    "gemm_db": "pydet_gemm_options",
    "skinny_gemm": "pydet_skinny_gemm_options",
    "rmsnorm": "pydet_rmsnorm_options",
    "rmsnorm_backward": "pydet_rmsnorm_backward_options",
}
WORKSPACE = np.zeros(1 << 12, np.uint8)
WORKSPACE_AT = ffi.cast("void *", -WORKSPACE.ctypes.data % 256 + WORKSPACE.ctypes.data)


def call(op, changes, given):
    """Calls `op` with valid arguments but for `changes`: name -> an array, a shape, None, a Tensor, or a dict of
    Tensor's keywords about the valid array. Returns the status and whether any byte of any array changed."""
    arrays, tensors = [], {}
    for number, (name, shape) in enumerate(VALID[op].items()):
        change = changes.get(name, shape)
        if isinstance(change, tuple):
            change = random(change, seed=number)
        if isinstance(change, dict):
            change = Tensor(random(shape, seed=number) if shape else None, **change)
        if isinstance(change, np.ndarray):
            change = Tensor(change)
        tensors[name] = change
        if change is not None and change.array is not None:
            arrays.append(change.array)
    assert set(changes) <= set(tensors)
    if op == "rmsnorm_backward" and (given is None or "workspace" not in given):
        given = {"workspace": WORKSPACE_AT, "workspace_size": 512, **(given or {})}
    if op == "rmsnorm" and given is not None:
        given = {"eps": 1e-6, **given}
    made = ffi.NULL if given is None else options(STRUCTS[op], **given)
    owners = [owner(array) for array in arrays]
    before = [memory.tobytes() for memory in owners]
    status = getattr(lib, f"pydet_{op}")(ffi.NULL, *[pointer(t) for t in tensors.values()], made)
    return status, before != [memory.tobytes() for memory in owners]


@pytest.mark.parametrize("op", VALID)
def test_the_valid_arguments_are_taken(op):
    """The other tests change one thing of these; what they see refused is that thing."""
    status, changed = call(op, {}, {})
    assert status_name(status) == "PYDET_OK" and changed
    status, changed = call(op, {}, None)
    assert status_name(status) == "PYDET_OK" and changed


def refused(op, status, sentence, changes=None, given=None):
    got, changed = call(op, changes or {}, given)
    assert (status_name(got), last_error()) == (f"PYDET_{status}", last_error())
    assert last_error().startswith(f"{op}: ") and re.search(sentence, last_error()), last_error()
    assert not changed, "an output was touched"


def half(shape, kind="bfloat16"):
    return random(shape, kind)


def overlapping(first, second, offset):
    """Two arrays of those shapes in one buffer, the second starting at element `offset`."""
    memory = random((int(np.prod(first)) + int(np.prod(second)) + offset,))
    a = memory[: int(np.prod(first))].reshape(first)
    return a, memory[offset : offset + int(np.prod(second))].reshape(second)


SHAPES = [
    ("gemm", {"a": (4,)}, r"^gemm: a has 1 dimensions, want 2 to 8"),
    ("gemm", {"a": (1,) * 9, "b": (1, 1)}, r"a has 9 dimensions, want 2 to 8"),
    ("gemm", {"b": {"ndim": -1}}, r"b has -1 dimensions"),
    ("gemm", {"b": {"ndim": 2**31 - 1}}, r"b has 2147483647 dimensions"),
    ("gemm", {"b": (3, 5)}, r"^gemm: b is 3x5, want 4xN$"),
    ("gemm", {"out": (3, 6)}, r"^gemm: out is 3x6, want 3x5$"),
    ("gemm", {"out": (5, 3)}, r"out is 5x3, want 3x5"),
    ("gemm", {"out": (1, 3, 5)}, r"out is 1x3x5"),
    ("gemm", {"bias": (6,)}, r"bias is 6, want 5"),
    ("gemm", {"bias": (2, 5)}, r"bias is 2x5, want 5 or 3x5"),
    ("gemm", {"bias": {"shape": (), "dtype": FLOAT32, "data": 64}}, r"bias has 0 dimensions"),
    ("gemm", {"a": {"shape": (-3, 4), "dtype": FLOAT32, "data": 64}}, r"a is -3x4, want no negative extent"),
    ("gemm", {"a": (2, 3, 4), "b": (3, 4, 5), "out": (2, 3, 5)}, r"leading dimensions"),
    ("gemm", {"a": (2, 3, 4), "out": (3, 3, 5)}, r"out is 3x3x5, want leading dimensions 2"),
    ("gemm", {"a": (2, 3, 4), "out": (2, 3, 5), "bias": (3, 3, 5)}, r"bias is 3x3x5"),
    ("gemm_da", {"b": (4, 6)}, r"^gemm_da: b is 4x6, want Kx5$"),
    ("gemm_da", {"da": (4, 3)}, r"da is 4x3, want 3x4"),
    ("gemm_db", {"dc": (2, 5)}, r"^gemm_db: dc is 2x5, want 3xN$"),
    ("gemm_db", {"db": (5, 4)}, r"db is 5x4, want 4x5"),
    ("skinny_gemm", {"w": (5, 3)}, r"^skinny_gemm: w is 5x3, want Nx4$"),
    ("skinny_gemm", {"w": (1, 5, 4)}, r"w is 1x5x4, want NxK"),
    ("skinny_gemm", {"y": (3, 4)}, r"y is 3x4, want 3x5"),
    ("skinny_gemm", {"y": (15,)}, r"y is 15, want 3x5"),
    ("skinny_gemm", {"bias": (4,)}, r"bias is 4, want 5"),
    ("skinny_gemm", {"bias": (1, 5)}, r"bias is 1x5, want 3x5"),
    ("rmsnorm", {"x": {"shape": (), "dtype": FLOAT32, "data": 64}}, r"x has 0 dimensions"),
    ("rmsnorm", {"x": (3, 0), "y": (3, 0), "weight": (0,)}, r"x is 3x0, want a last dimension of 1 or more"),
    ("rmsnorm", {"y": (3, 7)}, r"^rmsnorm: y is 3x7, want 3x8$"),
    ("rmsnorm", {"weight": (7,)}, r"weight is 7, want 8"),
    ("rmsnorm", {"weight": (1, 8)}, r"weight is 1x8, want 3x8"),
    ("rmsnorm", {"weight": (3, 7)}, r"weight is 3x7, want 3x8"),
    ("rmsnorm", {"weight": (1, 3, 8)}, r"weight is 1x3x8, want 8"),
    ("rmsnorm", {"rstd": (4,)}, r"rstd is 4, want 3"),
    ("rmsnorm", {"rstd": (3, 1)}, r"rstd is 3x1, want 3"),
    ("rmsnorm", {"residual": (8,), "sum": (3, 8)}, r"residual is 8, want 3x8"),
    ("rmsnorm_backward", {"dy": (2, 8)}, r"dy is 2x8, want 3x8"),
    ("rmsnorm_backward", {"rstd": (2,)}, r"^rmsnorm_backward: rstd is 2, want 3$"),
    ("rmsnorm_backward", {"dweight": (9,)}, r"dweight is 9, want 8"),
    ("rmsnorm_backward", {"dweight": (3, 8)}, r"dweight is 3x8, want 8"),
    ("rmsnorm_backward", {"dx": (8, 3)}, r"dx is 8x3, want 3x8"),
    ("rmsnorm_backward", {"dresidual": (3,)}, r"dresidual"),
]


@pytest.mark.parametrize("op, changes, sentence", SHAPES)
def test_shape(op, changes, sentence):
    refused(op, "INVALID_SHAPE", sentence, changes)


DTYPES = [
    (
        "gemm",
        {"a": {"dtype": (2, 64, 1)}},
        {},
        r"^gemm: a is float64, want float32, bfloat16 or float16$",
    ),
    ("gemm", {"b": {"dtype": (0, 32, 1)}}, {}, r"b is int32, want"),
    ("gemm", {"b": {"dtype": (5, 64, 1)}}, {}, r"b is complex64, want"),
    ("gemm", {"out": {"dtype": (2, 32, 2)}}, {}, r"out is of DLPack dtype \(code 2, bits 32, lanes 2\)"),
    ("gemm", {"out": {"dtype": (2, 32, 0)}}, {}, r"lanes 0"),
    ("gemm", {"out": {"dtype": (4, 32, 1)}}, {}, r"out is bfloat32, want"),
    ("gemm", {"bias": {"shape": (5,), "dtype": (6, 8, 1), "data": 64}}, {}, r"bias is bool, want"),
    ("gemm", {"a": {"dtype": (11, 8, 1)}}, {}, r"a is of DLPack dtype \(code 11, bits 8, lanes 1\), want"),
    ("gemm", {"a": half((3, 4))}, {}, r"^gemm: b is float32, want bfloat16 as a is$"),
    ("gemm", {"a": half((3, 4)), "b": half((4, 5), "float16")}, {}, r"b is float16, want bfloat16 as a is"),
    ("skinny_gemm", {"w": half((5, 4))}, {}, r"w is bfloat16, want float32 as x is"),
    (
        "gemm",
        {"a": half((3, 4)), "b": half((4, 5)), "out": half((3, 5))},
        {"accumulate": 1},
        r"out is bfloat16, want float32 under accumulate",
    ),
    ("gemm_db", {"db": half((4, 5), "float16")}, {"accumulate": 1}, r"db is float16, want float32 under accumulate"),
    *[
        (op, {}, {"arithmetic": number}, rf"arithmetic {name} takes bfloat16 or float16 inputs, got float32")
        for op in ("gemm", "gemm_da", "gemm_db", "skinny_gemm")
        for number, name in [(2, "sm90"), (3, "sm80"), (4, "cdna3"), (5, "cdna2")]
    ],
    ("rmsnorm", {"y": half((3, 8))}, {}, r"^rmsnorm: y is bfloat16, want float32 as x is$"),
    ("rmsnorm", {"residual": half((3, 8)), "sum": (3, 8)}, {}, r"residual is bfloat16, want float32 as x is$"),
    (
        "rmsnorm",
        {"x": half((3, 8)), "y": half((3, 8)), "residual": half((3, 8), "float16"), "sum": (3, 8)},
        {},
        r"residual is float16, want bfloat16 as x is, or float32$",
    ),
    (
        "rmsnorm",
        {"x": half((3, 8)), "y": half((3, 8)), "residual": (3, 8), "sum": half((3, 8))},
        {},
        r"sum is bfloat16, want float32 as residual is$",
    ),
    ("rmsnorm", {"rstd": half((3,))}, {}, r"rstd is bfloat16, want float32"),
    ("rmsnorm_backward", {"rstd": half((3,), "float16")}, {}, r"rstd is float16, want float32"),
    ("rmsnorm_backward", {"x": half((3, 8))}, {}, r"dy is float32, want bfloat16 as x is"),
    (
        "rmsnorm_backward",
        {"dweight": half((8,))},
        {"accumulate": 1},
        r"dweight is bfloat16, want float32 under accumulate",
    ),
]


@pytest.mark.parametrize("op, changes, given, sentence", DTYPES)
def test_dtype(op, changes, given, sentence):
    refused(op, "INVALID_DTYPE", sentence, changes, given)


STRIDES = [
    (
        "gemm",
        {"a": random((6, 8))[::2, ::2]},
        r"^gemm: a has strides 16 and 2 in its last two dimensions, want one of them 1, as a contiguous copy has$",
    ),
    ("gemm", {"b": random((8, 10))[::2, ::2]}, r"b has strides 20 and 2"),
    ("gemm", {"out": random((6, 10))[::2, ::2]}, r"out has strides 20 and 2"),
    ("gemm", {"a": random((3, 4))[::-1]}, r"a has stride -4 in dimension 0, want none negative"),
    ("gemm", {"a": random((3, 4))[:, ::-1]}, r"a has stride -1 in dimension 1, want none negative"),
    ("gemm", {"out": random((3, 5))[::-1]}, r"out has stride -5"),
    ("gemm", {"bias": random((5,))[::-1]}, r"bias has stride -1"),
    ("gemm", {"out": {"strides": (0, 1)}}, r"out has stride 0 in dimension 0, so its elements overlap"),
    ("gemm", {"out": {"strides": (3, 1)}}, r"out has stride 3 in dimension 0, so its elements overlap"),
    ("gemm", {"out": {"strides": (1, 0)}}, r"out has stride 0 in dimension 1, so its elements overlap"),
    (
        "gemm",
        {"a": (2, 3, 4), "out": Tensor(random((2, 3, 5)), strides=(0, 5, 1))},
        r"stride 0 in dimension 0, so its elements",
    ),
    ("skinny_gemm", {"x": random((6, 8))[::2, ::2]}, r"x has strides 16 and 2"),
    ("skinny_gemm", {"w": random((5, 8))[:, ::-2]}, r"w has stride -2"),
    (
        "rmsnorm",
        {"x": random((8, 3)).T},
        r"^rmsnorm: x has stride 3 in its last dimension, want 1, as a contiguous copy has$",
    ),
    ("rmsnorm", {"y": random((3, 16))[:, ::2]}, r"y has stride 2 in its last dimension, want 1"),
    ("rmsnorm", {"weight": random((16,))[::2]}, r"weight has stride 2 in its last dimension, want 1"),
    ("rmsnorm", {"rstd": random((6,))[::2]}, r"rstd has stride 2 in dimension 0, want it contiguous"),
    ("rmsnorm", {"x": random((3, 8))[::-1]}, r"x has stride -8"),
    ("rmsnorm_backward", {"dx": {"strides": (0, 1)}}, r"dx has stride 0 in dimension 0, so its elements overlap"),
    ("rmsnorm_backward", {"dweight": random((16,))[::2]}, r"dweight has stride 2"),
    (
        "rmsnorm",
        {"x": random((4, 5, 6, 7, 8))[:2, :3, :4, :5], "y": (2, 3, 4, 5, 8), "rstd": (2, 3, 4, 5)},
        r"the rows of x need 4 strides to walk, want at most 3",
    ),
]


@pytest.mark.parametrize("op, changes, sentence", STRIDES)
def test_stride(op, changes, sentence):
    refused(op, "INVALID_STRIDE", sentence, changes)


OVERLAPS = [
    *[
        (
            "gemm",
            dict(zip(("out", name), overlapping((3, 5), shape, offset))),
            rf"^gemm: out shares memory with {name}, want it apart$",
        )
        for name, shape in [("a", (3, 4)), ("b", (4, 5)), ("bias", (5,))]
        for offset in (0, 1, 14)
    ],
    *[
        (
            op,
            dict(zip((out, name), overlapping(VALID[op][out], VALID[op][name], 3))),
            rf"{out} shares memory with {name}",
        )
        for op, out, name in [
            ("gemm_da", "da", "dc"),
            ("gemm_da", "da", "b"),
            ("gemm_db", "db", "a"),
            ("gemm_db", "db", "dc"),
            ("skinny_gemm", "y", "x"),
            ("skinny_gemm", "y", "w"),
            ("rmsnorm", "y", "x"),
            ("rmsnorm", "y", "weight"),
            ("rmsnorm_backward", "dx", "dy"),
            ("rmsnorm_backward", "dx", "x"),
            ("rmsnorm_backward", "dweight", "rstd"),
            ("rmsnorm_backward", "dweight", "weight"),
        ]
    ],
    ("rmsnorm", dict(zip(("y", "rstd"), overlapping((3, 8), (3,), 23))), r"rstd shares memory with y"),
    ("rmsnorm_backward", dict(zip(("dx", "dweight"), overlapping((3, 8), (8,), 16))), r"dweight shares memory with dx"),
]


@pytest.mark.parametrize("op, changes, sentence", OVERLAPS)
def test_overlap(op, changes, sentence):
    refused(op, "OVERLAP", sentence, changes)


def test_overlap_of_a_sliding_window():
    """Rows of `a` one element apart reach further than a row: out in their tail must be seen."""
    memory = random((40,))
    a = np.lib.stride_tricks.as_strided(memory, (3, 4), (4, 4))
    out = np.lib.stride_tricks.as_strided(memory[4:], (2, 1), (20, 4))
    b = random((4, 1))
    got, changed = call("gemm", {"a": a[:2], "b": b, "out": out}, None)
    assert status_name(got) == "PYDET_OVERLAP" and not changed
    got, changed = call(
        "gemm", {"a": a[:2], "b": b, "out": np.lib.stride_tricks.as_strided(memory[8:], (2, 1), (20, 4))}, None
    )
    assert status_name(got) == "PYDET_OK", last_error()


def test_columns_of_one_buffer_are_apart():
    memory = random((4, 20))
    a, b, out = memory[:3, :4], memory[:, 4:9], memory[:3, 9:14]
    want = np.zeros((3, 5), np.float32)
    assert call("gemm", {"a": a.copy(), "b": b.copy(), "out": want}, None)[0] == lib.PYDET_OK
    assert call("gemm", {"a": a, "b": b, "out": out}, None)[0] == lib.PYDET_OK, last_error()
    assert out.tobytes() == want.tobytes()


NULLS = [
    *[
        (op, {name: None}, rf"^{op}: {name} is NULL, want a tensor$")
        for op, names in [
            ("gemm", ["a", "b", "out"]),
            ("gemm_da", ["dc", "b", "da"]),
            ("gemm_db", ["a", "dc", "db"]),
            ("skinny_gemm", ["x", "w", "y"]),
            ("rmsnorm", ["x", "y"]),
            ("rmsnorm_backward", ["dy", "x", "rstd"]),
        ]
        for name in names
    ],
    *[
        (op, {name: {"shape": shape, "dtype": FLOAT32, "data": None}}, rf"{op}: {name} has NULL data")
        for op, names in VALID.items()
        for name, shape in names.items()
        if shape
    ],
    ("gemm", {"a": {"ndim": 2, "dtype": FLOAT32, "data": 64}}, r"a has no shape"),
    ("rmsnorm", {"residual": (3, 8)}, r"residual is given without sum, want both or neither"),
    ("rmsnorm", {"sum": (3, 8)}, r"sum is given without residual, want both or neither"),
    ("rmsnorm_backward", {"dx": None, "dweight": None}, r"dx, dweight and dbias are all NULL, want one of them"),
]


def without_array(changes):
    """A dict that states its own data must not be laid over a valid array."""
    return {
        name: Tensor(**{"shape": None, **change}) if isinstance(change, dict) and "data" in change else change
        for name, change in changes.items()
    }


@pytest.mark.parametrize("op, changes, sentence", NULLS)
def test_null(op, changes, sentence):
    refused(op, "NULL_POINTER", sentence, without_array(changes))


def test_null_data_without_elements_is_fine():
    nothing = Tensor(shape=(0, 4), dtype=FLOAT32, data=None)
    out = Tensor(shape=(0, 5), dtype=FLOAT32, data=None)
    status, changed = call("gemm", {"a": nothing, "out": out}, None)
    assert status == lib.PYDET_OK and not changed
    assert ffi.string(lib.pydet_last_kernel()) == b""


OVERFLOWS = [
    (
        "gemm",
        {"a": {"shape": (2**61, 4), "dtype": FLOAT32, "data": 64}},
        r"a is 2305843009213693952x4, which reaches past 2\^63 - 1 bytes",
    ),
    ("gemm", {"a": {"shape": (3, 2**62), "dtype": FLOAT32, "data": 64}}, r"a is 3x4611686018427387904"),
    (
        "gemm",
        {"a": {"shape": (3, 4), "strides": (2**62, 1), "dtype": FLOAT32, "data": 64}},
        r"a is 3x4, which reaches past",
    ),
    ("gemm", {"a": {"shape": (2**40, 2**40), "strides": (0, 0), "dtype": FLOAT32, "data": 64}}, r"reaches past"),
    ("gemm", {"a": {"shape": (3, 4), "dtype": FLOAT32, "data": 64, "byte_offset": 2**63}}, r"reaches past"),
    ("gemm", {"a": {"shape": (3, 4), "dtype": FLOAT32, "data": 64, "byte_offset": 2**63 - 64}}, r"reaches past"),
    ("gemm", {"a": {"shape": (3, 4), "dtype": FLOAT32, "data": 64, "byte_offset": 2**64 - 64}}, r"reaches past"),
    ("gemm", {"a": {"shape": (3, 4), "dtype": FLOAT32, "data": 2**63 - 32}}, r"reaches past"),
    ("gemm", {"b": {"shape": (2**62, 2**62), "dtype": BFLOAT16, "data": 64}}, r"b is"),
    ("gemm", {"out": {"shape": (3, 2**63 - 1), "dtype": FLOAT16, "data": 64}}, r"out is"),
    ("rmsnorm", {"x": {"shape": (2**62, 8), "dtype": FLOAT32, "data": 64}}, r"x is"),
    ("rmsnorm_backward", {"rstd": {"shape": (2**62,), "dtype": FLOAT32, "data": 64}}, r"rstd is"),
]


@pytest.mark.parametrize("op, changes, sentence", OVERFLOWS)
def test_overflow(op, changes, sentence):
    refused(op, "OVERFLOW", sentence, without_array(changes))


@pytest.mark.parametrize("batch", [(2**40, 2**40, 0), (0, 2**40, 2**40), (2**62, 2**62, 2**62, 0)])
def test_vast_but_empty(batch):
    """No element, so nothing overflows: it is a call with nothing to write."""
    empty = lambda *shape: Tensor(shape=batch + shape, strides=[0] * len(batch + shape), dtype=FLOAT32)
    status, _ = call("gemm", {"a": empty(3, 4), "out": empty(3, 5)}, None)
    assert status == lib.PYDET_OK, last_error()
    rows = {"x": empty(8), "y": empty(8), "rstd": None}
    status, _ = call("rmsnorm", rows, None)
    assert status == lib.PYDET_OK, last_error()


def test_workspace_extents():
    size = ffi.new("uint64_t *", 7)
    assert lib.pydet_rmsnorm_backward_workspace(2**62, 2**62, size) == lib.PYDET_OVERFLOW
    assert re.search(r"^rmsnorm_backward_workspace: .* passes 2\^63 - 1 bytes", last_error()) and size[0] == 7
    assert lib.pydet_rmsnorm_backward_workspace(-1, 4, size) == lib.PYDET_INVALID_SHAPE and size[0] == 7
    assert lib.pydet_rmsnorm_backward_workspace(4, -1, size) == lib.PYDET_INVALID_SHAPE and size[0] == 7
    assert lib.pydet_rmsnorm_backward_workspace(4, 4, ffi.NULL) == lib.PYDET_NULL_POINTER
    assert lib.pydet_gemm_workspace(1, -1, 4, 4, ffi.NULL, size) == lib.PYDET_INVALID_SHAPE and size[0] == 7
    assert re.search(r"^gemm_workspace: .*M -1", last_error())
    assert lib.pydet_gemm_workspace(1, 4, 4, 4, ffi.NULL, ffi.NULL) == lib.PYDET_NULL_POINTER
    wrong = options("pydet_gemm_options", k_chunk=24)
    assert lib.pydet_gemm_workspace(1, 4, 4, 4, wrong, size) == lib.PYDET_INVALID_VALUE and size[0] == 7
    assert lib.pydet_skinny_gemm_workspace(4, 4, -9, ffi.NULL, size) == lib.PYDET_INVALID_SHAPE and size[0] == 7
    odd = Tensor(np.zeros((4, 5), np.float32)).c
    assert lib.pydet_gemm_copy_workspace(odd, ffi.NULL) == lib.PYDET_NULL_POINTER
    assert lib.pydet_gemm_copy_workspace(ffi.NULL, size) == lib.PYDET_NULL_POINTER and size[0] == 7
    assert re.search(r"^gemm_copy_workspace: operand is NULL", last_error())
    whole = Tensor(np.zeros((4, 5), np.int32)).c
    assert lib.pydet_gemm_copy_workspace(whole, size) == lib.PYDET_INVALID_DTYPE and size[0] == 7
    assert lib.pydet_gemm_copy_workspace(odd, size) == lib.PYDET_OK and size[0] == 0  # the CPU reads any


@pytest.mark.parametrize(
    "query, given, sentence",
    [
        *[
            (query, {name: value}, words)
            for query in ("gemm_workspace", "skinny_gemm_workspace")
            for name, value, words in [
                ("arithmetic", 99, r"arithmetic is 99, want 0 \(auto\) to"),
                ("arithmetic", -1, r"arithmetic is -1"),
                ("accumulate", 2, r"options.accumulate is 2, want 0 or 1"),
                ("k_chunk", 24, r"k_chunk is 24"),
            ]
        ],
        ("skinny_gemm_workspace", {"mode": 9}, r"options.mode is 9, want 0 \(deterministic\) or 1 \(fast\)"),
        ("skinny_gemm_workspace", {"weights_constant": -1}, r"options.weights_constant is -1, want 0 or 1"),
    ],
)
def test_workspace_queries_refuse_what_their_operation_refuses(query, given, sentence):
    size = ffi.new("uint64_t *", 7)
    extents = (1, 4, 4, 4) if query == "gemm_workspace" else (4, 4, 4)
    made = options(f"pydet_{query.removesuffix('_workspace')}_options", **given)
    assert getattr(lib, f"pydet_{query}")(*extents, made, size) == lib.PYDET_INVALID_VALUE and size[0] == 7
    assert re.search(rf"^{query}: {sentence}", last_error()), last_error()


OF_INITIAL = [
    ({"shape": (3, 6)}, {}, "INVALID_SHAPE", r"initial is 3x6, want 3x5$"),
    ({"shape": (5,)}, {}, "INVALID_SHAPE", r"initial is 5, want 3x5$"),
    ({"shape": ()}, {}, "INVALID_SHAPE", r"initial is \(\), want 3x5$"),
    ({"shape": (1, 3, 5)}, {}, "INVALID_SHAPE", r"initial is 1x3x5, want 3x5$"),
    ({"strides": (1, 3)}, {}, "INVALID_STRIDE", r"initial has stride 3 in dimension 1, want it contiguous$"),
    ({"strides": (0, 1)}, {}, "INVALID_STRIDE", r"initial has stride 0 in dimension 0, want it contiguous$"),
    ({"dtype": (4, 16, 1)}, {}, "INVALID_DTYPE", r"initial is bfloat16, want float32$"),
    ({"device": (2, 0)}, {}, "INVALID_DEVICE", r"initial is on CUDA device 0"),
    ({"data": 0}, {}, "NULL_POINTER", r"initial has NULL data$"),
    ({"byte_offset": 2}, {}, "MISALIGNED", r"initial has data at 0x[0-9a-f]+, want a multiple of 4 bytes$"),
    ({}, {"accumulate": 1}, "INVALID_VALUE", r"initial is given and options.accumulate is 1, want one of them$"),
    ({"data": "out"}, {}, "OVERLAP", r"out shares memory with initial, want it apart$"),
    ({"data": "workspace"}, {}, "OVERLAP", r"workspace shares memory with initial, want it apart$"),
    (
        {},
        {"workspace_size": 48},
        "WORKSPACE_TOO_SMALL",
        r"workspace_size is 48, want 64 for the sums of a bfloat16 out$",
    ),
]


@pytest.mark.parametrize("of, given, status, sentence", OF_INITIAL)
def test_initial(of, given, status, sentence):
    a, b, out = half((3, 4)), half((4, 5)), half((3, 5)) if "workspace_size" in given else random((3, 5))
    places = {"out": out.ctypes.data, "workspace": int(ffi.cast("uintptr_t", WORKSPACE_AT)) + 32}
    fields = {"shape": (3, 5), "dtype": FLOAT32, "data": random((3, 5), seed=3), **of}
    array = fields["data"]
    fields["data"] = places.get(array, array) if not isinstance(array, np.ndarray) else array.ctypes.data
    initial = Tensor(**fields)
    given = {"workspace": WORKSPACE_AT, "workspace_size": 256, "initial": initial.c, **given}
    before = out.tobytes(), WORKSPACE.tobytes()
    made = options("pydet_gemm_options", **given)
    got = lib.pydet_gemm(ffi.NULL, Tensor(a).c, Tensor(b).c, ffi.NULL, Tensor(out).c, made)
    assert (status_name(got), last_error()) == (f"PYDET_{status}", last_error())
    assert re.search(f"^gemm: {sentence}", last_error()), last_error()
    assert before == (out.tobytes(), WORKSPACE.tobytes())


def test_initial_asks_for_the_room_of_its_sums():
    size, some = ffi.new("uint64_t *", 7), Tensor(random((3, 5)))
    for query, extents in (("gemm_workspace", (2, 3, 5, 4)), ("skinny_gemm_workspace", (6, 5, 4))):
        struct, function = f"pydet_{query.removesuffix('_workspace')}_options", getattr(lib, f"pydet_{query}")
        made = options(struct, initial=some.c)
        assert function(*extents, made, size) == lib.PYDET_OK and size[0] == 128  # 2 x 3 x 5 sums, to a multiple of 16
        assert function(*extents, options(struct), size) == lib.PYDET_OK and size[0] == 0
        vast = (*extents[:-3], 2**40, 2**40, 4)
        assert function(*vast, made, size) == lib.PYDET_OVERFLOW and size[0] == 0
        assert last_error() == f"{query}: the sums that begin at initial reach past 2^63 - 1 bytes"


def test_initial_that_a_kernel_cannot_have_touches_nothing():
    """A product that no kernel takes is refused before its sums are begun."""
    a, b, out, initial = half((3, 4)), half((4, 5)), random((3, 5)), Tensor(random((3, 5)))
    before = out.tobytes()
    made = options("pydet_gemm_options", initial=initial.c, kernel="cpu_fold_scalar")
    status = lib.pydet_gemm(ffi.NULL, Tensor(a).c, Tensor(b).c, ffi.NULL, Tensor(out).c, made)
    assert status_name(status) == "PYDET_UNSUPPORTED" and out.tobytes() == before


@pytest.mark.parametrize(
    "op, name", [(op, name) for op, names in VALID.items() for name, shape in names.items() if shape]
)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_misaligned(op, name, offset):
    array = random(VALID[op][name])
    refused(
        op,
        "MISALIGNED",
        rf"^{op}: {name} has data at 0x[0-9a-f]+, want a multiple of 4 bytes$",
        {name: Tensor(array, data=array.ctypes.data + offset)},
    )
    refused(op, "MISALIGNED", rf"^{op}: {name} has data at", {name: Tensor(array, byte_offset=offset)})


VALUES = [
    ("gemm", {"struct_size": 0}, r"^gemm: options.struct_size is 0, want 56$"),
    ("gemm", {"struct_size": 47}, r"options.struct_size is 47, want 56"),
    ("skinny_gemm", {"struct_size": 48}, r"options.struct_size is 48, want 64"),
    ("rmsnorm", {"struct_size": 2**32 - 1}, r"options.struct_size is 4294967295, want 32"),
    ("rmsnorm_backward", {"struct_size": 24}, r"options.struct_size is 24, want 56"),
    *[(op, {"reserved": 1}, r"options.reserved is 1, want 0") for op in VALID],
    *[("gemm", {"arithmetic": n}, rf"arithmetic is {n}, want 0 \(auto\) to 5 \(cdna2\)") for n in (-1, 6, 2**31 - 1)],
    *[
        (op, {"k_chunk": c}, rf"k_chunk is {c}, want a positive multiple of 16, or none \(0 in C, None in Python\)$")
        for op in ("gemm", "gemm_da", "gemm_db", "skinny_gemm")
        for c in (-16, -1, 1, 8, 24, 2**63 - 1)
    ],
    *[(op, {"accumulate": 2}, r"options.accumulate is 2, want 0 or 1") for op in VALID if op != "rmsnorm"],
    ("skinny_gemm", {"mode": 2}, r"options.mode is 2, want 0 \(deterministic\) or 1 \(fast\)"),
    ("skinny_gemm", {"mode": -1}, r"options.mode is -1"),
    ("skinny_gemm", {"weights_constant": 3}, r"options.weights_constant is 3, want 0 or 1"),
    ("gemm", {"kernel": "no_such_kernel"}, r"no kernel is named no_such_kernel"),
    ("gemm", {"kernel": ""}, r"no kernel is named"),
    ("gemm", {"kernel": "%s%s%s%n"}, r"no kernel is named %s%s%s%n"),
    (
        "rmsnorm",
        {"kernel": "cpu_rmsnorm"},
        r"^rmsnorm: no kernel is named cpu_rmsnorm "
        r"\(pydet.kernels\(\) in Python and pydet_kernel_name in C list them\)$",
    ),
    ("rmsnorm", {"eps": -1e-6}, r"eps is -1e-06, want a finite number, 0 or more"),
    ("rmsnorm", {"eps": float("nan")}, r"eps is -?nan"),
    ("rmsnorm", {"eps": float("inf")}, r"eps is inf"),
    ("rmsnorm", {"weight_offset": float("nan")}, r"weight_offset is -?nan, want a finite number"),
    ("rmsnorm_backward", {"weight_offset": float("-inf")}, r"weight_offset is -inf, want a finite number"),
]


@pytest.mark.parametrize("op, given, sentence", VALUES)
def test_option_value(op, given, sentence):
    refused(op, "INVALID_VALUE", sentence, {}, given)


def test_a_very_long_kernel_name_is_cut():
    refused("gemm", "INVALID_VALUE", r"no kernel is named kkkk", {}, {"kernel": "k" * 5000})
    assert len(last_error()) < 512


UNSUPPORTED = [
    ("gemm", {}, {"kernel": "cpu_rmsnorm_scalar"}, r"kernel cpu_rmsnorm_scalar is not a gemm kernel"),
    ("rmsnorm", {}, {"kernel": "cpu_gemm_ieee_scalar"}, r"kernel cpu_gemm_ieee_scalar is not a rmsnorm kernel"),
    (
        "gemm",
        {},
        {"kernel": "cpu_gemm_sm90_scalar"},
        r"kernel cpu_gemm_sm90_scalar does not take this problem: "
        r"it takes bfloat16 or float16 inputs, got float32$",
    ),
    (
        "gemm",
        {"a": half((3, 4)), "b": half((4, 5))},
        {"kernel": "cpu_gemm_sm90_scalar", "arithmetic": 3},
        r"does not take this problem: it computes arithmetic sm90, and the call asks for sm80$",
    ),
]


@pytest.mark.parametrize("op, changes, given, sentence", UNSUPPORTED)
def test_kernel_that_does_not_fit(op, changes, given, sentence):
    refused(op, "UNSUPPORTED", sentence, changes, given)


@pytest.mark.parametrize(
    "op, name", [(op, name) for op, names in VALID.items() for name, shape in names.items() if shape]
)
@pytest.mark.parametrize(
    "device, words",
    [
        ((2, 0), "CUDA device 0"),
        ((10, 3), "ROCm device 3"),
        ((99, 0), "a device of DLPack type 99"),
        ((0, 0), "a device of DLPack type 0"),
        ((-1, 0), "a device of DLPack type -1"),
        ((7, 0), "a device of DLPack type 7"),
    ],
)
def test_device_that_this_build_does_not_serve(op, name, device, words):
    if device[0] in (2, 10) and library_path().name != "libpydet_cpu.so":
        pytest.skip("this build serves GPUs")
    refused(
        op, "INVALID_DEVICE", rf"^{op}: {name} is on {words}, this build serves the CPU", {name: {"device": device}}
    )


@pytest.mark.parametrize("device", [(3, 0), (11, 0), (1, 5)])
def test_memory_that_the_cpu_reads_is_the_cpus(device):
    """Pinned host memory, of whatever device, and a CPU of any number."""
    status, changed = call("gemm", {"a": {"device": device}, "out": {"device": (1, 0)}}, None)
    assert status == lib.PYDET_OK and changed


def test_workspace():
    at = int(ffi.cast("uintptr_t", WORKSPACE_AT))
    for given in ({"workspace": ffi.NULL, "workspace_size": 0}, {"workspace": WORKSPACE_AT, "workspace_size": 31}):
        refused(
            "rmsnorm_backward",
            "WORKSPACE_TOO_SMALL",
            rf"workspace is {given['workspace_size']} bytes, want 32 \(pydet_rmsnorm_backward_workspace\)",
            {},
            given,
        )
    refused(
        "rmsnorm_backward",
        "NULL_POINTER",
        r"workspace is NULL, workspace_size 64",
        {},
        {"workspace": ffi.NULL, "workspace_size": 64},
    )
    for op in ("gemm", "skinny_gemm", "rmsnorm_backward"):
        refused(
            op,
            "MISALIGNED",
            r"workspace is at 0x",
            {},
            {"workspace": ffi.cast("void *", at + 4), "workspace_size": 512},
        )
        name = {"gemm": "a", "skinny_gemm": "w", "rmsnorm_backward": "dx"}[op]
        inside = WORKSPACE[at - WORKSPACE.ctypes.data :][256 : 256 + 4 * int(np.prod(VALID[op][name]))]
        refused(
            op,
            "OVERLAP",
            rf"workspace shares memory with {name}, want it apart",
            {name: inside.view(np.float32).reshape(VALID[op][name])},
            {"workspace": WORKSPACE_AT, "workspace_size": 512},
        )
    vast = {"workspace": WORKSPACE_AT, "workspace_size": 2**64 - 16}
    inside = WORKSPACE[at - WORKSPACE.ctypes.data :][256 : 256 + 96].view(np.float32).reshape(3, 8)
    got, changed = call("rmsnorm_backward", {"dx": inside}, vast)
    assert status_name(got) in ("PYDET_OVERLAP", "PYDET_OVERFLOW") and not changed
    got, _ = call("rmsnorm_backward", {"dweight": None}, {"workspace": ffi.NULL, "workspace_size": 0})
    assert got == lib.PYDET_OK, "dx alone needs no workspace"


def test_no_rows():
    """rows = 0: rmsnorm writes nothing; dweight is +0, or kept under accumulate."""
    none = {"x": (0, 8), "y": (0, 8), "rstd": (0,)}
    status, changed = call("rmsnorm", none, None)
    assert status == lib.PYDET_OK and not changed
    none = {"dy": (0, 8), "x": (0, 8), "rstd": (0,), "dx": (0, 8)}
    dweight = random((8,))
    kept = dweight.copy()
    assert call("rmsnorm_backward", {**none, "dweight": dweight}, {"accumulate": 1})[0] == lib.PYDET_OK
    assert dweight.tobytes() == kept.tobytes()
    assert call("rmsnorm_backward", {**none, "dweight": dweight}, {})[0] == lib.PYDET_OK
    assert dweight.tobytes() == bytes(32)


def test_queries():
    device = lambda kind, number=0: ffi.new("pydet_device *", {"device_type": kind, "device_id": number})[0]
    dtype = lambda *fields: ffi.new("pydet_dtype *", fields)[0]
    resolved, count = ffi.new("int32_t *", 77), ffi.new("int32_t *", 77)
    assert lib.pydet_resolve_arithmetic(device(1), dtype(2, 64, 1), 0, resolved) == lib.PYDET_INVALID_DTYPE
    assert lib.pydet_resolve_arithmetic(device(1), dtype(2, 32, 1), 2, resolved) == lib.PYDET_INVALID_DTYPE
    assert lib.pydet_resolve_arithmetic(device(1), dtype(4, 16, 1), 9, resolved) == lib.PYDET_INVALID_VALUE
    assert lib.pydet_resolve_arithmetic(device(1), dtype(4, 16, 1), 0, ffi.NULL) == lib.PYDET_NULL_POINTER
    assert lib.pydet_resolve_arithmetic(device(1, -1), dtype(4, 16, 1), 0, ffi.NULL) == lib.PYDET_NULL_POINTER
    assert lib.pydet_resolve_arithmetic(device(2), dtype(4, 16, 1), 0, resolved) != lib.PYDET_OK
    assert re.search(r"^resolve_arithmetic: device is CUDA device 0", last_error())
    assert lib.pydet_resolve_arithmetic(device(1, 5), dtype(4, 16, 1), 0, resolved) == lib.PYDET_NO_DEVICE
    assert last_error() == "resolve_arithmetic: device is CPU 5, want CPU 0"
    assert resolved[0] == 77
    assert lib.pydet_device_count(lib.PYDET_CPU, ffi.NULL) == lib.PYDET_NULL_POINTER
    assert lib.pydet_device_count(12345, count) == lib.PYDET_INVALID_VALUE and count[0] == 77
    info = ffi.new("pydet_device_info *", {"struct_size": 104})
    assert lib.pydet_query_device(device(1, 5), info) != lib.PYDET_OK
    assert lib.pydet_query_device(device(1), ffi.NULL) == lib.PYDET_NULL_POINTER
    info.struct_size = 0
    assert lib.pydet_query_device(device(1), info) == lib.PYDET_INVALID_VALUE
    assert lib.pydet_query_kernel(0, ffi.NULL) == lib.PYDET_NULL_POINTER


def test_last_error_is_the_threads_own():
    import threading

    refused("gemm", "INVALID_SHAPE", "b is 3x5", {"b": (3, 5)})
    mine, theirs = last_error(), []
    thread = threading.Thread(target=lambda: theirs.append(last_error()))
    thread.start()
    thread.join()
    assert theirs == [""] and last_error() == mine


# ---- Far apart -----------------------------------------------------------------------------------------------------


class Sparse:
    """Address space without memory behind it until it is written."""

    def __init__(self, size):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.map = mmap.mmap(-1, size, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def matrix(self, like, row_stride):
        """A copy of `like` with rows that many elements apart."""
        memory = np.frombuffer(self.map, like.dtype)
        view = np.lib.stride_tricks.as_strided(memory, like.shape, (row_stride * like.itemsize, like.itemsize))
        view[...] = like
        return view


@pytest.mark.parametrize("dtype, arithmetic", [("float32", 1), ("bfloat16", 2), ("bfloat16", 1)])
@pytest.mark.parametrize("far", ["a", "b", "out", "b transposed"])
def test_rows_past_2_31_elements_apart(dtype, arithmetic, far):
    apart = 2**31 + 24
    arrays = {"a": random((3, 20), dtype), "b": random((20, 3), dtype, seed=1), "out": np.zeros((3, 3), np.float32)}
    given = options("pydet_gemm_options", arithmetic=arithmetic)
    run = lambda ts: lib.pydet_gemm(ffi.NULL, ts["a"].c, ts["b"].c, ffi.NULL, ts["out"].c, given)
    assert run({name: Tensor(array) for name, array in arrays.items()}) == lib.PYDET_OK, last_error()
    near = arrays["out"].copy()
    rows = {"a": 3, "b": 20, "out": 3, "b transposed": 3}[far]
    name = far.split()[0]
    sparse = Sparse(rows * apart * arrays[name].itemsize)
    placed = sparse.matrix(arrays[name].T if far == "b transposed" else arrays[name], apart)
    if far == "b transposed":
        placed = placed.T
    moved = {**arrays, "out": np.zeros((3, 3), np.float32), name: placed}
    assert run({n: Tensor(array) for n, array in moved.items()}) == lib.PYDET_OK, last_error()
    assert moved["out"].tobytes() == near.tobytes()


def test_rmsnorm_rows_past_2_31_elements_apart():
    x, weight = random((3, 8), "bfloat16"), random((8,), seed=1)
    near, y = np.zeros((3, 8), ml_dtypes.bfloat16), np.zeros((3, 8), ml_dtypes.bfloat16)
    run = lambda x, y: lib.pydet_rmsnorm(
        ffi.NULL, Tensor(x).c, ffi.NULL, Tensor(weight).c, Tensor(y).c, ffi.NULL, ffi.NULL, ffi.NULL
    )
    assert run(x, near) == lib.PYDET_OK, last_error()
    sparse = Sparse(3 * (2**31 + 24) * 2)
    assert run(sparse.matrix(x, 2**31 + 24), y) == lib.PYDET_OK, last_error()
    assert y.tobytes() == near.tobytes()
