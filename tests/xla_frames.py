"""Calls of XLA's handlers as XLA makes them, by hand: wild attributes, shapes and counts, into poisoned memory.

`python xla_frames.py TARGET` attacks one; a handler must refuse with a sentence, or write every byte of its results
whatever lay there, and under a wild attribute the very bits of the plain call. test_xla_frames.py runs all of them.
"""

import ctypes
import dataclasses
import itertools
import random
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_size_t, c_void_p

import numpy as np

from pydet import _native

PRED, S32, S64, U8, F16, F32, F64, BF16, E5M2, E4M3, E8M0 = 1, 4, 5, 6, 10, 11, 12, 16, 19, 20, 33
SIZES = {PRED: 1, S32: 4, S64: 8, U8: 1, F16: 2, F32: 4, F64: 8, BF16: 2, E5M2: 1, E4M3: 1, E8M0: 1}
SCALAR, STRING, EXECUTE = 3, 4, 3
WILD = [0, -1, 2**31, 2**32, 2**61, 2**62, -(2**63), 2**63 - 1, 7]
WILD_REALS = [float("nan"), float("inf"), -float("inf"), 1e300]
WILD_FACTORS = [-1.0, 1e-60, -1e-60, 5e-324, 1e-40, 2.0**-101]  # of which 0 says that there is none


class Buffer(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("dtype", c_int32), ("data", c_void_p),
                ("rank", c_int64), ("dims", POINTER(c_int64))]  # fmt: skip


class List(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("size", c_int64), ("types", POINTER(c_int32)),
                ("items", POINTER(POINTER(Buffer)))]  # fmt: skip


class Name(ctypes.Structure):
    _fields_ = [("text", c_char_p), ("length", c_size_t)]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", c_int32), ("value", c_void_p)]


class Attributes(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("size", c_int64), ("types", POINTER(c_int32)),
                ("names", POINTER(POINTER(Name))), ("items", POINTER(c_void_p))]  # fmt: skip


class ErrorArguments(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("message", c_char_p), ("code", c_int32)]


class Version(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("major", c_int32), ("minor", c_int32)]


class StreamArguments(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("context", c_void_p), ("stream", c_void_p)]


class OrdinalArguments(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("context", c_void_p), ("ordinal", c_int32)]


MakeError = ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorArguments))
GetStream = ctypes.CFUNCTYPE(c_void_p, POINTER(StreamArguments))
GetOrdinal = ctypes.CFUNCTYPE(c_void_p, POINTER(OrdinalArguments))


class Api(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("version", Version), ("internal", c_void_p),
                ("make_error", MakeError), ("unused_1", c_void_p * 3), ("get_stream", GetStream),
                ("unused_2", c_void_p * 12), ("get_ordinal", GetOrdinal)]  # fmt: skip


class Frame(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extensions", c_void_p), ("api", POINTER(Api)), ("context", c_void_p),
                ("stage", c_int32), ("arguments", List), ("results", List), ("attributes", Attributes)]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """What a handler is told: operands and results as (type, shape), attributes by name."""

    arguments: tuple
    results: tuple
    attributes: dict
    in_place: tuple = ()  # (operand, result) of the same memory
    values: tuple = ()  # (operand, its values) where any numbers will not do
    workspace: bool = False  # the last result, which holds nothing for the caller


HAS = ("has_weight", "has_bias")


def norm(more, results, *, heads=None, weight=1, bias=1, residual=1):
    rows, tail = ((F32, (2, 3, 4)), (F32, (3, 4))) if heads else ((F32, (2, 3, 4)), (F32, (4,)))
    arguments = [rows] + [rows] * residual + [tail] * weight + [tail] * bias
    attributes = {"has_residual": residual, "has_weight": weight, "has_bias": bias, "eps": 1e-5, "weight_offset": 0.0}
    made = [rows] + [(F32, (2, 3))] * results + [rows] * residual
    return Call(tuple(arguments), tuple(made), {**attributes, **more, "kernel": ""})


def norm_backward(more, values, *, tail=(4,), bias=1, residual=1, start=0, blocks=()):
    rows, sums, made = (F32, (2, 3, 4)), (F32, tail), (F32, (*blocks, *tail))
    arguments = [rows, rows] + [(F32, (2, 3))] * values + [sums] + [rows] * residual + [sums] * start
    attributes = {"has_weight": 1, "has_bias": bias, "has_dresidual": residual, "weight_offset": 0.0}
    results = [rows, made] + [made] * bias + [(U8, (1 << 16,))]
    in_place = ((len(arguments) - 1, 1),) if start else ()
    return Call(tuple(arguments), tuple(results), {**attributes, **more, "kernel": ""}, in_place, (), True)


def gemm(a, b, out, more=(), **changed):
    names = ("has_bias", "accumulate", "has_initial", "transpose_a", "transpose_b", "arithmetic", "k_chunk", "skinny")
    attributes = dict.fromkeys((*names, "has_workspace", "mode", "weights_constant"), 0) | changed
    extra = [(F32, shape) for shape in more]
    in_place = ((1 + len(more), 0),) if attributes["accumulate"] else ()
    if in_place:
        extra.append((F32, out))
        in_place = ((len(extra) + 1, 0),)
    room = [(U8, (1 << 16,))] * max(attributes["has_initial"], attributes["has_workspace"])
    attributes["kernel"] = ""
    return Call(((F32, a), (F32, b), *extra), ((F32, out), *room), attributes, in_place, (), bool(room))


def grouped(a, b, out, depth):
    attributes = {"depth": depth, "transpose_b": 0, "arithmetic": 0, "k_chunk": 0, "kernel": ""}
    ends = np.array([1, 4], np.int32)
    return Call(((F32, a), (F32, b), (S32, (2,)), (F32, out)), ((F32, out),), attributes, ((3, 0),), ((2, ends),))


def scaled(scales, more=(), *, bias=0, accumulate=0, k_chunk=128):
    attributes = {"has_a_scale": int(len(scales) > 0), "has_b_scale": int(len(scales) > 1), "has_bias": bias}
    attributes |= {"accumulate": accumulate, "arithmetic": 0, "k_chunk": k_chunk, "kernel": ""}
    arguments = [(E4M3, (3, 200)), (E4M3, (5, 200)), *((F32, shape) for shape in (*scales, *more))]
    if accumulate:
        arguments.append((F32, (3, 5)))
    in_place = ((len(arguments) - 1, 0),) if accumulate else ()
    return Call(tuple(arguments), ((F32, (3, 5)),), attributes, in_place)


def quantize(granularity, scale, *, given=0, transposed=(), of=F32):
    results = [(E4M3, (3, 200))] + ([] if given else [(of, scale)])
    results += [(E4M3, (200, 3)), (of, transposed)] if transposed else []
    attributes = {"granularity": granularity, "given": given, "transposed": int(bool(transposed)), "power_of_two": 0}
    return Call(((F32, (3, 200)), *([(of, scale)] if given else [])), tuple(results), {**attributes, "kernel": ""})


def attention(*, fronts=(), kinds=(), lse=1, tokens_first=0, **changed):
    """kinds: what is there beside q, k and v, as (name, type, shape)."""
    names = ("sinks", "allowed", "bias", "first_key", "seqlens_k")
    attributes = {f"has_{name}": int(name in [kind for kind, *_ in kinds]) for name in names}
    attributes |= {"has_lse": lse, "tokens_first": tokens_first, "arithmetic": 0, "scale": 0.5, "softcap": 0.0}
    attributes |= {"causal": 0, "window_left": -1, "window_right": -1, "kv_chunk": 0} | changed
    turned = lambda *shape: (*fronts, shape[0], *(shape[2:0:-1] if tokens_first else shape[1:3]), *shape[3:])
    arguments = [(F32, turned(2, h, n, d)) for h, n, d in ((4, 3, 8), (2, 9, 8), (2, 9, 16))]
    arguments += [(dtype, (*fronts, *shape)) for _, dtype, shape in kinds]
    results = [(F32, turned(2, 4, 3, 16))] + [(F32, turned(2, 4, 3))] * lse + [(U8, (*fronts, 256))]
    lengths = [i + 3 for i, (name, *_) in enumerate(kinds) if name == "seqlens_k"]
    values = tuple((i, np.full(64, 7, np.int32)) for i in lengths)
    return Call(tuple(arguments), tuple(results), {**attributes, "kernel": ""}, (), values, True)


def attention_backward(**options):
    forward = attention(**options)
    q, k, v, *more = forward.arguments
    out, lse = forward.results[:2]
    sinks = more[: forward.attributes["has_sinks"]]
    attributes = {name: x for name, x in forward.attributes.items() if name not in ("has_lse", "kv_chunk")}
    values = tuple((place + 3, numbers) for place, numbers in forward.values)
    return Call((out, q, k, v, out, lse, *more), (q, k, v, *sinks, forward.results[-1]), attributes, (), values, True)


def stored(*, kinds=(), paged=False, packed=True, **changed):
    """kinds: what is there beside q, k, v and the lengths, as (name, type, shape)."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k", "first_key", "sinks", "allowed", "bias")
    ends = np.array([0, 2, 6, 6], np.int32), np.array([0, 4, 9, 9], np.int32)
    given = [("cu_seqlens_q", S32, (3,))] * packed
    given += [("block_table", S32, (2, 3)), ("seqlens_k", S32, (2,))] if paged else [("cu_seqlens_k", S32, (3,))]
    given += kinds
    attributes = {f"has_{name}": int(name in [kind for kind, *_ in given]) for name in names}
    attributes |= {"arithmetic": 0, "scale": 0.5, "softcap": 0.0, "causal": 0, "window_left": -1, "window_right": -1}
    attributes |= {"kv_chunk": 0} | changed
    rows, keys = (6, 4) if packed else (2, 4, 3), (5, 4, 2) if paged else (9, 2)
    arguments = [
        (F32, (*rows, 8)),
        (F32, (*keys, 8)),
        (F32, (*keys, 16)),
        *((dtype, shape) for _, dtype, shape in given),
    ]
    results = (F32, (*rows, 16)), (F32, rows), (U8, (256,))
    count = len(arguments)
    values = tuple((3 + i, ends[0 if x[0] == "cu_seqlens_q" else 1]) for i, x in enumerate(given) if "cu_" in x[0])
    in_place = ((count, 0), (count + 1, 1))
    return Call((*arguments, *results[:2]), results, {**attributes, "kernel": ""}, in_place, values, True)


def varlen_backward(sinks):
    forward = stored(kinds=[("sinks", F32, (4,))] * sinks)
    q, k, v, *more, out, lse = forward.arguments
    names = ("arithmetic", "scale", "softcap", "causal", "window_left", "window_right", "kernel")
    attributes = {"has_sinks": sinks} | {name: forward.attributes[name] for name in names}
    arguments = out, q, k, v, out, lse, *more, q, k, v
    results = q, k, v, *[(F32, (4,))] * sinks, (U8, (1 << 16,))
    in_place = tuple((len(arguments) - 3 + i, i) for i in range(3))
    return Call(arguments, results, attributes, in_place, tuple((place + 3, x) for place, x in forward.values), True)


ROWS, INDEX, VALUES = (F32, (2, 3, 4)), (S32, (2, 3)), (F32, (2, 3))
TABLE, IDS = (F32, (5, 4)), np.array([0, 4, 2, 2, 1, 0], np.int32)


def embedding_backward(padding, start=0):
    attributes = {"accumulate": start, "padding": padding, "kernel": ""}
    arguments = (ROWS, INDEX, *[TABLE] * start)
    return Call(arguments, (TABLE, (U8, (1 << 16,))), attributes, ((2, 0),) * start, ((1, IDS),), True)


def head(bias, wide=0, asked=(), **read):
    attributes = {"arithmetic": 0, "k_chunk": 0, "wide_logits": wide, "has_bias": bias}
    attributes |= {"softcap": 0.0, "temperature": 0.0, **read}
    attributes |= {f"has_{name}": int(name in asked) for name in ("entropy", "lse", "mean")}
    arguments = ROWS, TABLE, INDEX, *[(F32, (5,))] * bias
    results = VALUES, *[VALUES] * len(asked), (U8, (1 << 16,))
    return Call(arguments, results, attributes, values=((2, IDS),), workspace=True)


def head_backward(bias, asked=(), **read):
    forward = head(bias, asked=asked, **read)
    results = ROWS, TABLE, *[(F32, (5,))] * bias, (U8, (1 << 16,))
    arguments = VALUES, *forward.arguments, *[VALUES] * len(asked)
    return Call(arguments, results, forward.attributes, values=((3, IDS),), workspace=True)


def sample(**own):
    """own: types of what each row has of its own, by name."""
    attributes = {"temperature": 0.5, "top_k": 3, "top_p": 0.875, "min_p": 0.0625, "kernel": ""}
    attributes |= {f"has_{name}": int(name in own) for name in ("temperatures", "top_ks", "top_ps", "min_ps")}
    arguments = ROWS, INDEX, INDEX, *((dtype, (2, 3)) for dtype in own.values())
    return Call(arguments, ((S32, (2, 3, 2)), VALUES, VALUES), attributes)


BESIDE = [("allowed", PRED, (2, 1, 3, 9)), ("bias", F32, (1, 4, 3, 1)), ("first_key", S32, (2,)),
          ("seqlens_k", S32, (2,))]  # fmt: skip
CALLS = {
    "activation": [
        Call((ROWS,), (ROWS,), {"kind": 1, "has_up": 0, "kernel": ""}),
        Call(((F32, ()), (F32, ())), ((F32, ()),), {"kind": 0, "has_up": 1, "kernel": ""}),
    ],
    "activation_backward": [
        Call((ROWS, ROWS), (ROWS,), {"kind": 6, "has_up": 0, "kernel": ""}),
        Call((ROWS, ROWS, ROWS), (ROWS, ROWS), {"kind": 2, "has_up": 1, "kernel": ""}),
    ],
    "attention": [
        attention(),
        attention(kinds=BESIDE, tokens_first=1),
        attention(kinds=[("sinks", F32, (4,)), *BESIDE], fronts=(2, 1), lse=0),
    ],
    "attention_backward": [
        attention_backward(),
        attention_backward(kinds=BESIDE, tokens_first=1),
        attention_backward(kinds=[("sinks", F32, (4,)), *BESIDE], fronts=(2, 1)),
    ],
    "attention_stored": [
        stored(),
        stored(kinds=[("sinks", F32, (4,))], paged=True),
        stored(
            kinds=[("first_key", S32, (2,)), ("allowed", PRED, (2, 1, 3, 12)), ("bias", F32, (1, 4, 3, 1))],
            paged=True,
            packed=False,
        ),
    ],
    "attention_varlen_backward": [varlen_backward(0), varlen_backward(1)],
    "embedding": [Call((TABLE, INDEX), (ROWS,), {"kernel": ""}, values=((1, IDS),))],
    "embedding_backward": [embedding_backward(-1), embedding_backward(2), embedding_backward(-1, 1)],
    "sample": [sample(), sample(temperatures=F32, top_ks=S32, top_ps=F32, min_ps=F32)],
    "topk": [Call((ROWS,), ((F32, (2, 3, 2)), (S32, (2, 3, 2, 2))), {"kernel": ""})],
    "fold": [
        Call(((F32, (3, 2, 4)),), ((F32, (2, 4)),), {"has_bias": 0, "kernel": ""}),
        Call(((F32, (1, 2, 4)), (BF16, (4,))), ((BF16, (2, 4)),), {"has_bias": 1, "kernel": ""}),
    ],
    "gemm": [
        gemm((3, 7), (7, 5), (3, 5)),
        gemm((2, 7, 3), (2, 5, 7), (2, 3, 5), [(1, 1, 5)], transpose_a=1, transpose_b=1, has_bias=1),
        gemm((5, 7), (7, 5), (5, 5), [(5, 5)], has_bias=1, accumulate=1),
        gemm((3, 7), (7, 5), (3, 5), [(5,), (3, 5)], has_bias=1, has_initial=1),
        gemm((2, 3, 0), (2, 0, 5), (2, 3, 5), [(2, 3, 5)], has_initial=1),
        gemm((3, 7), (7, 5), (3, 5), has_workspace=1),
        gemm((5, 7), (7, 5), (5, 5), [(5, 5)], has_bias=1, accumulate=1, has_workspace=1),
        gemm((3, 7), (5, 7), (3, 5), transpose_b=1, skinny=1),
        gemm((3, 7), (5, 7), (3, 5), transpose_b=1, skinny=1, has_workspace=1),
        gemm((2, 3, 7), (2, 5, 7), (2, 3, 5), transpose_b=1, skinny=1),
    ],
    "grouped_gemm": [grouped((6, 7), (2, 7, 5), (6, 5), 0), grouped((6, 3), (6, 5), (2, 3, 5), 1)],
    "scaled_gemm": [
        scaled([(3, 2), (2, 5)]),
        scaled([(3, 1), (1, 5)], [(5,)], bias=1, k_chunk=0),
        scaled([(3, 2), (2, 5)], accumulate=1),
        scaled([], k_chunk=0),
    ],
    "quantize": [
        quantize(0, (3, 1)),
        quantize(1, (3, 2), transposed=(200, 1)),
        quantize(2, (1, 2), of=E8M0),
        quantize(3, ()),
        quantize(3, (), of=E8M0),
        quantize(3, (), given=1),
    ],
    "rmsnorm": [
        norm({"heads": 0}, 1),
        norm({"heads": 3}, 1, heads=3),
        norm({"heads": 3}, 1, heads=3, weight=0, bias=0, residual=0),
    ],
    "rmsnorm_backward": [
        norm_backward({"heads": 0, "accumulate": 0, "block_sums": 0}, 1),
        norm_backward({"heads": 3, "accumulate": 0, "block_sums": 0}, 1, tail=(3, 4)),
        norm_backward({"heads": 0, "accumulate": 1, "block_sums": 0}, 1, bias=0, residual=0, start=1),
        norm_backward({"heads": 0, "accumulate": 0, "block_sums": 1}, 1, blocks=(1,)),
        norm_backward({"heads": 3, "accumulate": 0, "block_sums": 1}, 1, tail=(3, 4), blocks=(1,)),
    ],
    "layernorm": [norm({}, 2), norm({}, 2, weight=0, bias=0, residual=0)],
    "layernorm_backward": [norm_backward({}, 2)],
    "softmax": [Call((ROWS,), (ROWS,), {"log": 0, "kernel": ""})],
    "softmax_backward": [Call((ROWS, ROWS), (ROWS,), {"log": 0, "kernel": ""})],
    "log_prob": [Call((ROWS, INDEX), (VALUES,), {"kernel": ""}, values=((1, np.arange(6, dtype=np.int32)),))],
    "linear_log_prob": [
        *(head(0), head(1), head(0, 1)),
        *(head(0, asked=["lse"]), head(1, asked=["entropy", "lse", "mean"], softcap=2.0, temperature=0.5)),
    ],
    "linear_log_prob_backward": [
        *(head_backward(0), head_backward(1), head_backward(0, ["mean"])),
        head_backward(1, ["entropy", "lse", "mean"], softcap=2.0, temperature=0.5),
    ],
    "log_prob_backward": [
        Call((VALUES, ROWS, INDEX), (ROWS,), {"kernel": ""}, values=((2, np.arange(6, dtype=np.int32)),))
    ],
}


def attribute(value, keep):
    """(type, address) of an attribute: a number, or a string."""
    if isinstance(value, (str, bytes)):
        text = value.encode() if isinstance(value, str) else value
        made, kind = Name(text, len(text)), STRING
    else:
        dtype = {int: S64, float: F64, np.int32: S32}[type(value)]
        number = {S64: c_int64, F64: ctypes.c_double, S32: c_int32}[dtype](value)
        keep.append(number)
        made, kind = Scalar(dtype, ctypes.addressof(number)), SCALAR
    keep.append(made)
    return kind, ctypes.addressof(made)


def memory(spec, poison=None):
    """The bytes of a buffer, with room around them; numbers of about 1 unless it is poisoned."""
    dtype, shape = spec
    size = int(np.prod(shape, dtype=object)) * SIZES[dtype]
    count = size + 256
    if poison is not None:
        return np.full(count, poison, np.uint8)
    if dtype == F32:
        return np.random.default_rng(0).uniform(0.5, 1.5, count // 4 + 1).astype(np.float32).view(np.uint8)
    one = {F64: 1.0, S32: 1, S64: 1}.get(dtype)
    if one is not None:
        return np.full(count // SIZES[dtype] + 1, one, {F64: "f8", S32: "i4", S64: "i8"}[dtype]).view(np.uint8)
    pattern = {
        PRED: [1, 1, 0],
        U8: [1],
        F16: [0, 0x3C],
        BF16: [0x80, 0x3F],
        E4M3: [0x38, 0x3C, 0xB1],
        E5M2: [0x3C],
        E8M0: [127],
    }[dtype]
    return np.resize(np.array(pattern, np.uint8), count)


def run(handler, call, poison, apart=0, stream=0, ordinal=0):
    """(the sentence of a refusal or None, the bytes of each result). apart: how many bytes behind what is continued
    from its result begins, 0 as XLA is told; None: it has memory of its own."""
    keep, message = [], []

    @MakeError
    def make_error(arguments):
        message.append((arguments.contents.message or b"").decode())
        return 1

    @GetStream
    def get_stream(arguments):
        arguments.contents.stream = stream

    @GetOrdinal
    def get_ordinal(arguments):
        arguments.contents.ordinal = ordinal

    inputs = [memory(spec) for spec in call.arguments]
    for place, values in call.values:
        if place < len(inputs):
            given = values.view(np.uint8)[: len(inputs[place])]
            inputs[place][: len(given)] = given
    outputs = [memory(spec, poison) for spec in call.results]
    for operand, result in call.in_place if apart is not None else ():
        if operand < len(inputs) and result < len(outputs):
            longer = max((inputs[operand], outputs[result]), key=len)
            shared = np.resize(inputs[operand], len(longer) + apart)
            inputs[operand], outputs[result] = shared[: len(longer)], shared[apart:]
    written_over = {operand for operand, _ in call.in_place if apart is not None}
    before = [x.copy() for x in inputs]

    def listed(specs, arrays):
        buffers = []
        for (dtype, shape), array in zip(specs, arrays, strict=True):
            dims = (c_int64 * max(1, len(shape)))(*shape)
            buffers.append(Buffer(ctypes.sizeof(Buffer), None, dtype, array.ctypes.data, len(shape), dims))
            keep.append(dims)
        items = (POINTER(Buffer) * max(1, len(buffers)))(*(ctypes.pointer(buffer) for buffer in buffers))
        types = (c_int32 * max(1, len(buffers)))(*([1] * len(buffers)))
        keep.extend((buffers, items, types))
        return List(ctypes.sizeof(List), None, len(buffers), types, items)

    made = [attribute(value, keep) for value in call.attributes.values()]
    names = [Name(name.encode(), len(name)) for name in call.attributes]
    attributes = Attributes(
        ctypes.sizeof(Attributes),
        None,
        len(made),
        (c_int32 * len(made))(*(kind for kind, _ in made)),
        (POINTER(Name) * len(made))(*(ctypes.pointer(name) for name in names)),
        (c_void_p * len(made))(*(address for _, address in made)),
    )
    api = Api(ctypes.sizeof(Api), None, Version(ctypes.sizeof(Version), None, 0, 1), None, make_error)
    api.get_stream, api.get_ordinal = get_stream, get_ordinal
    frame = Frame(ctypes.sizeof(Frame), None, ctypes.pointer(api), None, EXECUTE)
    frame.arguments, frame.results = listed(call.arguments, inputs), listed(call.results, outputs)
    frame.attributes = attributes
    failed = handler(ctypes.byref(frame))
    assert bool(failed) == bool(message)
    for i, (x, y) in enumerate(zip(inputs, before, strict=True)):
        assert i in written_over or (x == y).all(), f"wrote to operand {i}: {call}"
    written = []
    for (dtype, shape), array in zip(call.results, outputs, strict=True):
        size = int(np.prod(shape, dtype=object)) * SIZES[dtype]
        if not call.in_place or apart is None:
            assert (array[size:] == poison).all(), f"wrote past a result of {shape}: {call}"
        written.append(array[:size].tobytes())
    return (message[0] if message else None), (written[:-1] if call.workspace else written)


class Handler(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("on_cpu", c_void_p), ("on_gpu", c_void_p))


def handlers(functions=None, of="on_cpu"):
    """The handlers of a library, by name: by default the CPU's."""
    functions = functions or ctypes.CDLL(str(_native.load_file(library()).path))
    functions.pydet_xla_handlers.restype = ctypes.POINTER(Handler)
    call = ctypes.CFUNCTYPE(c_void_p, c_void_p)
    rows = itertools.takewhile(lambda row: row.name, functions.pydet_xla_handlers())
    return {row.name.decode(): call(getattr(row, of)) for row in rows}


class Attack:
    """One handler: how many calls it refused and how many it took."""

    def __init__(self, target):
        self.target, self.handler, self.refused, self.taken = target, handlers()[target], 0, 0

    def attempt(self, call, bits=None):
        """Whether the call is taken; then all is written, and `bits` where they are given."""
        sentence, first = run(self.handler, call, 0xA5)
        again, second = run(self.handler, call, 0x3C)
        assert again == sentence, call
        if sentence is not None:
            assert ": " in sentence and len(sentence) > 16, f"{sentence!r} is no sentence about {call}"
            self.refused += 1
            return False
        assert first == second, f"{self.target} returned OK and left results unwritten: {call}"
        assert bits is None or first == bits, f"{self.target} has other bits: {call}"
        self.taken += 1
        return True

    def base(self, call):
        sentence, bits = run(self.handler, call, 0xA5)
        assert sentence is None, f"{sentence} of {call}"
        self.attempt(call, bits)
        if call.in_place:
            for poison in (0xA5, 0x3C):
                assert run(self.handler, call, poison, apart=None) == (None, bits), f"{call} continues from elsewhere"
        return bits

    def attributes(self, call, bits):
        for name, value in call.attributes.items():
            changed = lambda x, name=name: dataclasses.replace(call, attributes=call.attributes | {name: x})
            if name == "kernel":
                for wrong in ("x" * 100, "nonsense", b"cpu\0gemm"):
                    assert not self.attempt(changed(wrong)), wrong
            elif isinstance(value, float):
                for wild in WILD_REALS + (WILD_FACTORS if name in ("scale", "softcap") else []):
                    assert not self.attempt(changed(wild)), (name, wild)
            else:
                began = call.attributes.get("accumulate") or call.attributes.get("has_initial")
                chained = name == "k_chunk" and began  # one chain then starts elsewhere
                other = chained or name in (
                    "window_left",
                    "window_right",
                    "kind",
                    "padding",
                    "top_k",
                )  # which decide what is made
                for wild in WILD:
                    self.attempt(changed(wild), None if other and (wild >= 0 or name == "padding") else bits)
            assert not self.attempt(changed(np.int32(0))), f"{name} of 32 bits"
            left = {key: x for key, x in call.attributes.items() if key != name}
            assert not self.attempt(dataclasses.replace(call, attributes=left)), f"without {name}"
        surplus = call.attributes | {"unheard_of": 0}
        assert not self.attempt(dataclasses.replace(call, attributes=surplus)), "a surplus attribute"

    def counts(self, call):
        for field in ("arguments", "results"):
            specs = getattr(call, field)
            for i in range(len(specs)):
                less = dataclasses.replace(call, **{field: specs[:i] + specs[i + 1 :]}, in_place=())
                assert not self.attempt(less), f"without {field} {i}"
            for extra in (specs[0], (F32, ()), (F32, (0,))):
                more = dataclasses.replace(call, **{field: (*specs, extra)}, in_place=(), workspace=False)
                assert not self.attempt(more), f"surplus in {field}"

    def shapes(self, call):
        for field in ("arguments", "results"):
            specs = getattr(call, field)
            for i, (dtype, shape) in enumerate(specs):
                others = [(), (1,), (*shape, 1), (1, *shape), shape[::-1], (0,) * len(shape), (1,) * 12]
                others += [shape[:j] + (n,) + shape[j + 1 :] for j in range(len(shape)) for n in (0, 1, shape[j] + 1)]
                for other in others:
                    self.attempt(changed_spec(call, field, i, (dtype, other)))
                for kind in SIZES:
                    self.attempt(changed_spec(call, field, i, (kind, shape)))

    def resized(self, call, choice):
        """Extents of all operands at once, so that many fit each other."""
        specs = [*call.arguments, *call.results]
        sizes = sorted({n for _, shape in specs for n in shape})
        new = {n: choice.choice([n, 0, 0, 1, 2, 130]) for n in sizes}
        if any(np.prod([new[n] for n in shape], dtype=object) > 1 << 20 for _, shape in specs):
            return
        if call.workspace:
            new[1 << 16] = 1 << 16
        resize = lambda group: tuple((dtype, tuple(new[n] for n in shape)) for dtype, shape in group)
        self.attempt(dataclasses.replace(call, arguments=resize(call.arguments), results=resize(call.results)))


def changed_spec(call, field, i, spec):
    specs = getattr(call, field)
    return dataclasses.replace(call, **{field: specs[:i] + (spec,) + specs[i + 1 :]})


def library():
    return next(path for path in _native.candidates(0) if path.is_file())


def main(target):
    attack, choice = Attack(target), random.Random(0)
    for call in CALLS[target]:
        bits = attack.base(call)
        attack.attributes(call, bits)
        attack.counts(call)
        attack.shapes(call)
        for _ in itertools.repeat(None, 300):
            attack.resized(call, choice)
    assert attack.taken and attack.refused
    print(f"{target}: {attack.refused} refused, {attack.taken} taken")


if __name__ == "__main__":
    main(sys.argv[1])
