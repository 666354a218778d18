"""Attention's bad input: each kind has its status and its sentence, and leaves every byte as it was."""

import contextlib

import numpy as np
import pytest

import pydet
from attention_cases import Shape, integers, operands
from capi import Tensor, ffi, last_error, lib, options, pointer, status_name
from cases import DTYPES, data
from conftest import unusual_float_environment


def arrays(**changes):
    q, k, v = operands(Shape(batch=2, heads=4, groups=2, queries=3, keys=10, d=16, e=16), "bf16")
    return {"q": q, "k": k, "v": v, "out": np.zeros_like(q), "lse": np.zeros(q.shape[:3], np.float32), **changes}


def refusal(given=None, *, within=contextlib.nullcontext, **changes):
    """(status, sentence) of a call in C with these arrays or Tensors, made `within` that; nothing was written."""
    held = arrays(**changes)
    tensors = {name: Tensor(x) if isinstance(x, np.ndarray) else x for name, x in held.items()}
    chosen, keep = options("pydet_attention_options"), []
    for name, value in (given or {}).items():
        if isinstance(value, np.ndarray):
            value = Tensor(value, dtype=(6, 8, 1) if value.dtype == bool else None)
        if isinstance(value, Tensor):
            keep.append(value)
            value = value.c
        if isinstance(value, str):
            value = ffi.new("char[]", value.encode())
            keep.append(value)
        setattr(chosen, name, value)
    outputs = [
        tensors[name].array for name in ("out", "lse") if tensors[name] is not None and tensors[name].array is not None
    ]
    before = [x.tobytes() for x in outputs]
    order = [pointer(tensors[name]) for name in ("q", "k", "v", "out", "lse")]
    with within():
        status = lib.pydet_attention(ffi.NULL, *order, chosen)
    assert status != 0 and [x.tobytes() for x in outputs] == before
    return status_name(status).removeprefix("PYDET_"), last_error()


def bf16(*shape):
    return data("normal", shape, DTYPES["bf16"])


REFUSED = {
    "no q": ({"q": None}, {}, "NULL_POINTER", "q is NULL, want a tensor"),
    "types": ({"k": np.zeros((2, 2, 10, 16), np.float32)}, {}, "INVALID_DTYPE", "k is float32, want bfloat16 as q is"),
    "rank": ({"q": bf16(3, 4, 16)}, {}, "INVALID_SHAPE", "q is 3x4x16, want BxHxQxD"),
    "rank of k": ({"k": bf16(2, 10, 16)}, {}, "INVALID_SHAPE", "k is 2x10x16, want BxGxKxD"),
    "heads": (
        {"k": bf16(2, 3, 10, 16), "v": bf16(2, 3, 10, 16)},
        {},
        "INVALID_SHAPE",
        "q has 4 heads, want a multiple of the 3 of k and v",
    ),
    "no heads": (
        {"k": bf16(2, 0, 10, 16), "v": bf16(2, 0, 10, 16)},
        {},
        "INVALID_SHAPE",
        "q has 4 heads, want a multiple of the 0 of k and v",
    ),
    "batch": (
        {"k": bf16(3, 2, 10, 16), "v": bf16(3, 2, 10, 16)},
        {},
        "INVALID_SHAPE",
        "k is 3x2x10x16, want one of 2 sequences",
    ),
    "v": ({"v": bf16(2, 2, 9, 16)}, {}, "INVALID_SHAPE", "v is 2x2x9x16, want 2x2x10x16"),
    "width of k": ({"k": bf16(2, 2, 10, 24)}, {}, "INVALID_SHAPE", "k is 2x2x10x24, want heads of 16 elements as q's"),
    "width": (
        {"q": bf16(2, 4, 3, 20), "k": bf16(2, 2, 10, 20)},
        {},
        "INVALID_SHAPE",
        "heads of q and k have 20 elements and those of v 16, want multiples of 8 from 8 to 256, or 576 and 512",
    ),
    "width of v": (
        {"v": bf16(2, 2, 10, 264), "out": bf16(2, 4, 3, 264)},
        {},
        "INVALID_SHAPE",
        "heads of q and k have 16 elements and those of v 264, want multiples of 8 from 8 to 256, or 576 and 512",
    ),
    "out": ({"out": bf16(2, 4, 3, 24)}, {}, "INVALID_SHAPE", "out is 2x4x3x24, want 2x4x3x16"),
    "lse": ({"lse": np.zeros((2, 3, 4), np.float32)}, {}, "INVALID_SHAPE", "lse is 2x3x4, want 2x4x3"),
    "type of lse": ({"lse": bf16(2, 4, 3)}, {}, "INVALID_DTYPE", "lse is bfloat16, want float32"),
    "strides": (
        {"k": bf16(2, 2, 16, 10).swapaxes(2, 3)},
        {},
        "INVALID_STRIDE",
        "k has stride 10 in its last dimension, want 1, as a contiguous copy has",
    ),
    "scale": ({}, {"scale": -1.0}, "INVALID_VALUE", "scale is -1, want a number from 2^-100 to 2^100"),
    "scale NaN": ({}, {"scale": float("nan")}, "INVALID_VALUE", "scale is nan, want a number from 2^-100 to 2^100"),
    "softcap": ({}, {"softcap": -2.0}, "INVALID_VALUE", "softcap is -2, want a number from 2^-100 to 2^100"),
    "causal": ({}, {"causal": 2}, "INVALID_VALUE", "options.causal is 2, want 0 or 1"),
    "window": (
        {},
        {"window": 1, "window_left": -2},
        "INVALID_VALUE",
        "options.window_left is -2, want 0 to 2^40 keys, or -1 for any",
    ),
    "kv_chunk": ({}, {"kv_chunk": 64}, "INVALID_VALUE", "kv_chunk is 64, want a positive multiple of 128"),
    "negative kv_chunk": ({}, {"kv_chunk": -128}, "INVALID_VALUE", "kv_chunk is -128, want a positive multiple of 128"),
    "arithmetic": ({}, {"arithmetic": 9}, "INVALID_VALUE", "arithmetic is 9, want 0 (auto) to 5 (cdna2)"),
    "reserved": ({}, {"reserved": 1}, "INVALID_VALUE", "options.reserved is 1, want 0"),
    "kernel": (
        {},
        {"kernel": "cpu_gemm_ieee_scalar"},
        "UNSUPPORTED",
        "kernel cpu_gemm_ieee_scalar is not a attention kernel for the CPU",
    ),
    "sinks": ({}, {"sinks": np.zeros(3, np.float32)}, "INVALID_SHAPE", "sinks is 3, want 4"),
    "allowed": (
        {},
        {"allowed": np.ones((2, 2, 3, 10), bool)},
        "INVALID_SHAPE",
        "allowed is 2x2x3x10, want one that broadcasts to 2x4x3x10",
    ),
    "type of allowed": (
        {},
        {"allowed": np.ones((3, 10), np.float32)},
        "INVALID_DTYPE",
        "allowed is float32, want bool",
    ),
    "bias": (
        {},
        {"bias": np.ones((1, 2, 4, 3, 10), np.float32)},
        "INVALID_SHAPE",
        "bias is 1x2x4x3x10, want one that broadcasts to 2x4x3x10",
    ),
    "first_key": ({}, {"first_key": np.zeros(3, np.int32)}, "INVALID_SHAPE", "first_key is 3, want 2"),
    "type of first_key": ({}, {"first_key": np.zeros(2, np.int64)}, "INVALID_DTYPE", "first_key is int64, want int32"),
    "strides of seqlens_k": (
        {},
        {"seqlens_k": np.zeros(4, np.int32)[::2]},
        "INVALID_STRIDE",
        "seqlens_k has stride 2 in dimension 0, want it contiguous",
    ),
    "packed q": (
        {},
        {"cu_seqlens_q": np.zeros(3, np.int32)},
        "INVALID_SHAPE",
        "q is 2x4x3x16, want TxHxD, since cu_seqlens_q is given",
    ),
    "packed k": (
        {},
        {"cu_seqlens_k": np.zeros(3, np.int32)},
        "INVALID_SHAPE",
        "k is 2x2x10x16, want TxGxD, since cu_seqlens_k is given",
    ),
    "two of k": (
        {},
        {"cu_seqlens_k": np.zeros(3, np.int32), "seqlens_k": np.zeros(2, np.int32)},
        "INVALID_VALUE",
        "seqlens_k is given with cu_seqlens_k, want one of them",
    ),
    "pages and packed": (
        {},
        {"cu_seqlens_k": np.zeros(3, np.int32), "block_table": np.zeros((2, 1), np.int32)},
        "INVALID_VALUE",
        "cu_seqlens_k is given with block_table, want one of them",
    ),
    "pages without lengths": (
        {},
        {"block_table": np.zeros((2, 1), np.int32)},
        "NULL_POINTER",
        "seqlens_k is NULL, want the keys of each sequence beside block_table",
    ),
    "pages of others": (
        {"k": bf16(5, 4, 2, 16), "v": bf16(5, 4, 2, 16)},
        {"block_table": np.zeros((3, 1), np.int32), "seqlens_k": np.zeros(2, np.int32)},
        "INVALID_SHAPE",
        "block_table is 3x1, want 2 rows, one a sequence",
    ),
    "cu_seqlens_k of others": (
        {"k": bf16(20, 2, 16), "v": bf16(20, 2, 16)},
        {"cu_seqlens_k": np.zeros(4, np.int32)},
        "INVALID_SHAPE",
        "cu_seqlens_k is 4, want 3",
    ),
    "no sequences": (
        {"q": bf16(6, 4, 16), "out": bf16(6, 4, 16), "lse": None},
        {"cu_seqlens_q": np.zeros(0, np.int32)},
        "INVALID_SHAPE",
        "cu_seqlens_q is empty, want one number more than there are sequences",
    ),
    "mask of packed": (
        {"k": bf16(20, 2, 16), "v": bf16(20, 2, 16)},
        {"cu_seqlens_k": np.zeros(3, np.int32), "allowed": np.ones((3, 20), bool)},
        "UNSUPPORTED",
        "allowed is given with packed sequences, want none with cu_seqlens_q or cu_seqlens_k",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    changes, given, status, sentence = REFUSED[name]
    assert refusal(given, **changes) == (status, f"attention: {sentence}")


@pytest.mark.parametrize("argument", ["scale", "softcap"])
@pytest.mark.parametrize("value", [1e-40, -1e-40, 1e-45, 2.0**-101, 2.0**101])
def test_a_subnormal_factor_is_not_none(argument, value):
    """On a thread that reads subnormals as zeros it would be taken for 0, and 1 / sqrt(D) or no cap for it."""
    status, sentence = refusal({argument: value})
    assert status == "INVALID_VALUE" and sentence.endswith("want a number from 2^-100 to 2^100")
    status, sentence = refusal({argument: value}, within=unusual_float_environment)
    assert status == "INVALID_VALUE" and sentence.startswith(f"attention: {argument} is ")
    with unusual_float_environment(), pytest.raises(pydet.Error, match=f"^attention: {argument} is "):
        pydet.attention(*operands(Shape(), "fp32"), **{argument: value})


def test_outputs_apart():
    same = arrays()
    assert refusal(q=same["q"], out=same["q"]) == ("OVERLAP", "attention: out shares memory with q, want it apart")
    lengths = np.zeros(2, np.int32)
    memory = lengths.view(np.float32)
    lse = Tensor(np.lib.stride_tricks.as_strided(memory, (2, 4, 3), (4, 0, 0)))
    status, sentence = refusal({"seqlens_k": lengths}, lse=lse)
    assert status in ("OVERLAP", "INVALID_STRIDE") and sentence.startswith("attention: lse")
    work = np.zeros(64, np.uint8)
    at = ffi.cast("void *", work.ctypes.data + -work.ctypes.data % 16 + 1)
    status, sentence = refusal({"workspace": at, "workspace_size": 8})
    assert status == "MISALIGNED" and sentence.startswith("attention: workspace is at 0x")
    assert sentence.endswith(", want a multiple of 16 bytes")
    assert refusal({"workspace_size": 8}) == ("NULL_POINTER", "attention: workspace is NULL, workspace_size 8")


PYTHON_REFUSED = [
    ({"window": 3}, "window is 3, want a pair (left, right), None on a side for any"),
    ({"window": (1, 2, 3)}, "window is (1, 2, 3), want a pair (left, right), None on a side for any"),
    ({"window": (1.5, None)}, "window_left is no 64-bit integer"),
    ({"window": (-3, None)}, "options.window_left is -3, want 0 to 2^40 keys, or -1 for any"),
    ({"scale": 0}, "scale is 0, want a number from 2^-100 to 2^100, or None for 1 / sqrt(D)"),
    ({"scale": "a"}, "scale is no number"),
    ({"softcap": 0}, "softcap is 0, want a number from 2^-100 to 2^100, or None for none"),
    ({"kv_chunk": 0}, "kv_chunk is 0, want a positive multiple of 128"),
    ({"causal": "yes"}, "causal is str, want True or False"),
    ({"arithmetic": "sm91"}, "arithmetic is 'sm91', want one of auto, ieee, sm90, sm80, cdna3, cdna2"),
    ({"kernel": "none"}, "no kernel is named none (pydet.kernels() in Python and pydet_kernel_name in C list them)"),
    ({"allowed": np.ones((5, 150))}, "allowed is float64, want bool"),
    ({"sinks": [1, 2]}, "sinks is list, want a tensor (DLPack, __cuda_array_interface__ or __array_interface__)"),
    ({"out": np.zeros((1, 2, 5, 64), np.float64)}, "out is float64, want float32, bfloat16 or float16"),
]


@pytest.mark.parametrize("given, sentence", PYTHON_REFUSED)
def test_refusals_in_python(given, sentence):
    with pytest.raises(pydet.Error) as raised:
        pydet.attention(*operands(Shape(), "fp32"), **given)
    assert str(raised.value) == f"attention: {sentence}"


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


OPERANDS = {
    "attention": {
        **{"q": ones(2, 4, 3, 16), "k": ones(2, 2, 10, 16), "v": ones(2, 2, 10, 16), "sinks": ones(4)},
        **{"allowed": ones(3, 10, dtype=bool), "bias": ones(3, 10), "out": ones(2, 4, 3, 16)},
        **{"first_key": integers(0, 1), "seqlens_k": integers(10, 10)},
    },
    "attention_varlen": {
        **{"q": ones(6, 4, 16), "k": ones(20, 2, 16), "v": ones(20, 2, 16), "out": ones(6, 4, 16)},
        **{"cu_seqlens_q": integers(0, 3, 6), "cu_seqlens_k": integers(0, 10, 20)},
    },
    "attention_paged": {
        **{"q": ones(2, 4, 3, 16), "k_cache": ones(5, 4, 2, 16), "v_cache": ones(5, 4, 2, 16)},
        **{"block_table": np.zeros((2, 3), np.int32), "seqlens_k": integers(10, 12), "out": ones(2, 4, 3, 16)},
    },
}


@pytest.mark.parametrize("function", OPERANDS)
def test_array_interfaces_that_are_not_what_they_say(function):
    """Of every operand: data that is no address, extents and strides that wrap, types that it is not."""

    def call(operand, **change):
        given = dict(OPERANDS[function])
        interface = {**given[operand].__array_interface__, "strides": given[operand].strides, **change}
        given[operand] = type("Carrier", (), {"__array_interface__": interface})()
        return getattr(pydet, function)(*[given.pop(name) for name in list(given)[:3]], **given)

    for name, array in OPERANDS[function].items():
        call(name)
        address, many = array.ctypes.data, array.ndim
        wrong = [{"data": data} for data in (bytearray(64), None, (float(address), False), (address + 2**64, False))]
        wrong += [{"data": (place, False)} for place in (-1, 0)] + [{"mask": array}]
        wrong += [{"typestr": typestr} for typestr in ("<f8", "|i1", "|V4", ">f4", "")]
        wrong += [{"shape": (extent,) * many} for extent in (2**62, 2**64, -1, 1.5)] + [{"shape": (1,) * 9}]
        wrong += [{"strides": (stride,) * many} for stride in (2**62, -(2**63))] + [{"strides": (*array.strides, 4)}]
        for change in wrong:
            before = OPERANDS[function]["out"].tobytes()
            with pytest.raises(pydet.Error, match=r"^attention: "):
                call(name, **change)
            assert OPERANDS[function]["out"].tobytes() == before


def test_what_the_other_two_cannot_do_without():
    q, k, v = (x[0].swapaxes(0, 1) for x in operands(Shape(), "fp32"))
    for call in (
        lambda: pydet.attention_varlen(q, k, v, None, integers(0, 150)),
        lambda: pydet.attention_paged(q, k, v, None, integers(150)),
    ):
        with pytest.raises(pydet.Error, match="is None, want"):
            call()
