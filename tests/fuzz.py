"""Random descriptors, options and DLPack capsules: every call is refused with a sentence, or correct.

    python tests/fuzz.py [--seconds 60] [--seed 0] [--case N]

A case is made from its seed and number alone: a call that is right, then none to three mutations of it. It goes to the
C function, or to the Python function with the tensors offered as DLPack capsules. Each tensor lies against a page that
cannot be read or written. After the call:
- refused: status and sentence fit, and no byte anywhere has changed;
- accepted: descriptors and options did make sense (judged here, in Python's integers), inputs, paddings and all else
  around the outputs are unchanged, and every output element has the bits of the plain NumPy model (reference.py).
A call without a mutation must be accepted. The cases run in a process of their own, so that a crash names its case.
"""

import argparse
import collections
import ctypes
import faulthandler
import math
import mmap
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import interop
import reference
import reference_activation
import reference_adamw
import reference_attention
import reference_embedding
import reference_fp8
import reference_head
import reference_rotary
import reference_sample
import reference_scan
from capi import BFLOAT16, FLOAT16, FLOAT32, Tensor, ffi, last_error, lib, library_path, options, pointer, status_name

os.environ["PYDET_LIBRARY"] = str(library_path())  # one library for all devices that a descriptor may name
import pydet

PAGE = mmap.PAGESIZE
REGION = 16 * PAGE
INT64_MAX = 2**63 - 1
DTYPES = {FLOAT32: np.dtype(np.float32), FLOAT16: np.dtype(np.float16), BFLOAT16: np.dtype(ml_dtypes.bfloat16)}
FP8 = {(10, 8, 1): reference_fp8.E4M3, (12, 8, 1): reference_fp8.E5M2}
SCALES = {FLOAT32: DTYPES[FLOAT32], (14, 8, 1): reference_fp8.E8M0}
BOUNDARY = np.dtype(np.int32)
BOOL = np.dtype(np.bool_)
TYPES = {**DTYPES, **FP8, **SCALES, (0, 32, 1): BOUNDARY, (0, 64, 1): np.dtype(np.int64), (6, 8, 1): BOOL}
TYPES_IN_C = {dtype: code for code, dtype in DTYPES.items()}
GRANULARITIES = ["row", "group", "block", "tensor"]
ARITHMETICS = ["auto", "ieee", "sm90", "sm80", "cdna3", "cdna2"]


class Failure(Exception):
    pass


def expect(condition, *what):
    if not condition:
        raise Failure(" ".join(str(w) for w in what))


# ---- Memory --------------------------------------------------------------------------------------------------------


class Region:
    """REGION bytes with a forbidden page on either side."""

    def __init__(self):
        self.map = mmap.mmap(-1, REGION + 2 * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.begin, self.end = base + PAGE, base + PAGE + REGION
        self.bytes = np.frombuffer(self.map, np.uint8, REGION, PAGE)
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for page in (base, self.end):
            if mprotect(page, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def view(self, address, shape, strides, dtype):
        """The elements that a descriptor names, strides in elements."""
        if 0 in shape:
            return np.empty(shape, dtype)
        size = dtype.itemsize
        first = self.bytes[address - self.begin :]
        words = first[: len(first) // size * size].view(f"u{size}")  # NumPy cannot stride over float8_e5m2
        return np.lib.stride_tricks.as_strided(words, shape, [s * size for s in strides]).view(dtype)


REGIONS = [Region() for _ in range(18)]


def values(rng, count, dtype):
    """Elements of one kind: any bits, normal numbers, small integers, or the special ones."""
    kind = rng.choice(["bits", "normal", "normal", "integers", "special"]) if dtype.kind != "i" else "integers"
    numbers = np.random.default_rng(rng.getrandbits(64))
    if dtype == BOOL:
        return numbers.integers(0, 2, count).astype(dtype)
    if kind == "bits":
        return numbers.integers(0, 1 << (8 * dtype.itemsize), count, f"u{dtype.itemsize}").view(dtype)
    if kind == "normal":
        return numbers.standard_normal(count, np.float32).astype(dtype)
    if kind == "integers":
        return numbers.integers(-8, 9, count).astype(np.float32).astype(dtype)
    special = np.array(
        [0, -0.0, 1, -1, 1.5, 1e-40, -1e-40, 6e-8, 3e38, -3e38, 65504, np.inf, -np.inf, np.nan], np.float32
    )
    with np.errstate(over="ignore"):
        return numbers.choice(special, count).astype(dtype)


def place(rng, region, shape, dtype, *, order=None, broadcast=False):
    """A tensor in `region`, against one of its ends, with a random layout. `order`: what may be innermost."""
    region.bytes[:] = 0xFF
    rank = len(shape)
    inner = rng.choice(order if order is not None else [rank - 1]) if rank else None
    rest = [d for d in range(rank) if d != inner]
    if rank > 2 and rng.random() < 0.3:
        rng.shuffle(rest)
        rest.sort(key=lambda d: d >= rank - 2)  # the matrix dimensions stay inside the batch
    strides, reach = [0] * rank, 1
    for d in ([inner] if rank else []) + rest[::-1]:
        strides[d] = reach if d == inner else reach + rng.choice([0, 0, 0, 1, 3])
        reach = strides[d] * max(shape[d], 1)
    if broadcast:
        for d in range(rank - 2):
            if rng.random() < 0.3:
                strides[d] = 0
    span = 1 + sum((e - 1) * s for e, s in zip(shape, strides) if e > 1)
    slack = REGION // dtype.itemsize - span
    expect(slack >= 0, "case too large:", shape, strides)
    address = region.begin + rng.choice([0, slack, slack, rng.randrange(slack + 1)]) * dtype.itemsize
    view = region.view(address, shape, strides, dtype)
    if view.size:
        assign(view, values(rng, view.size, dtype).reshape(shape))
    code = {v: k for k, v in TYPES.items()}[dtype]
    byte_offset = 0
    if rng.random() < 0.1:
        byte_offset = dtype.itemsize * rng.randrange(5)
    tensor = Tensor(shape=shape, strides=strides, dtype=code, data=address - byte_offset, byte_offset=byte_offset)
    if strides == c_strides(shape) and rng.random() < 0.3:
        tensor.c.strides = ffi.NULL
    tensor.region = region
    return tensor


def assign(view, elements):
    """By their bits, since NumPy moves elements of float8_e5m2 only where they are adjacent."""
    view.view(f"u{view.itemsize}")[...] = elements.view(f"u{view.itemsize}")


def copy_of(view):
    return view.view(f"u{view.itemsize}").copy().view(view.dtype)


def c_strides(shape):
    strides = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        strides[d] = strides[d + 1] * shape[d + 1]
    return strides


# ---- Judging a descriptor ------------------------------------------------------------------------------------------


class Described:
    """What a descriptor says, read back from the struct; `sense` is
    inside    it names elements of its region
    nonsense  must be refused
    outside   a call would believe it: it names memory that is not there, or one element a million times
    vast      empty, with extents that NumPy cannot have"""

    def __init__(self, tensor):
        c = tensor.c
        self.region = tensor.region
        self.dtype = TYPES.get((c.dtype.code, c.dtype.bits, c.dtype.lanes))
        self.sense = "nonsense"
        if not 0 <= c.ndim <= 8 or (c.ndim > 0 and c.shape == ffi.NULL) or self.dtype is None:
            return
        self.shape = [c.shape[d] for d in range(c.ndim)]
        strides = c_strides(self.shape) if c.strides == ffi.NULL else [c.strides[d] for d in range(c.ndim)]
        self.strides = [s if e > 1 else 0 for e, s in zip(self.shape, strides)]
        if c.device.device_type not in (1, 3, 11) or min(self.shape, default=0) < 0:
            return
        if min(self.strides, default=0) < 0:
            return
        data = int(ffi.cast("uintptr_t", c.data))
        self.address = data + c.byte_offset
        if 0 in self.shape:
            vast = int(np.prod([e for e in self.shape if e], dtype=object)) > 2**40
            self.sense = "vast" if vast else "inside"
            return
        last = sum((e - 1) * s for e, s in zip(self.shape, self.strides))
        end = self.address + (last + 1) * self.dtype.itemsize
        elements = int(np.prod([int(e) for e in self.shape], dtype=object)) if self.shape else 1
        if not data or self.address % self.dtype.itemsize or end > INT64_MAX or elements > INT64_MAX:
            return
        inside = self.region.begin <= self.address and end <= self.region.end and elements <= REGION
        self.sense = "inside" if inside else "outside"

    def view(self):
        return self.region.view(self.address, self.shape, self.strides, self.dtype)

    def offsets(self):
        """The address of every byte, with repetitions."""
        at = np.full([1] * len(self.shape), self.address, np.int64)
        for d, (extent, stride) in enumerate(zip(self.shape, self.strides)):
            along = np.arange(extent, dtype=np.int64) * (stride * self.dtype.itemsize)
            at = at + along.reshape([-1 if i == d else 1 for i in range(len(self.shape))])
        return (at.reshape(-1, 1) + np.arange(self.dtype.itemsize)).ravel()


# ---- Calls ---------------------------------------------------------------------------------------------------------

Call = collections.namedtuple("Call", "op inputs outputs options")  # inputs and outputs: name -> Tensor or None

ORDER = {  # how each operation takes its tensors
    "gemm": ["a", "b", "bias", "out"],
    "gemm_da": ["dc", "b", "da"],
    "gemm_db": ["a", "dc", "db"],
    "skinny_gemm": ["x", "w", "bias", "y"],
    "scaled_gemm": ["a", "a_scale", "b", "b_scale", "bias", "out"],
    "quantize": ["x", "out", "scale", "transposed", "transposed_scale"],
    "rmsnorm": ["x", "residual", "weight", "y", "rstd", "sum"],
    "rmsnorm_quantize": ["x", "residual", "weight", "out", "scale", "y", "rstd", "sum"],
    "rmsnorm_backward": ["dy", "x", "weight", "rstd", "dresidual", "dx", "dweight"],
    "fold": ["bias", "out"],  # after the parts
    "adamw": [],  # by lists
    "grouped_gemm": ["a", "b", "bias", "group_start", "group_end", "out"],
    "scaled_grouped_gemm": ["a", "a_scale", "b", "b_scale", "bias", "group_start", "group_end", "out"],
    "layernorm": ["x", "residual", "weight", "bias", "y", "mean", "rstd", "sum"],
    "layernorm_backward": ["dy", "x", "weight", "mean", "rstd", "dresidual", "dx", "dweight", "dbias"],
    "softmax": ["x", "y"],
    "softmax_backward": ["dy", "y", "dx"],
    "log_prob": ["x", "index", "log_prob"],
    "log_prob_backward": ["dlog_prob", "x", "index", "dx"],
    "linear_log_prob": ["x", "w", "bias", "index", "log_prob"],
    "linear_log_prob_backward": ["dlog_prob", "x", "w", "bias", "index", "log_prob", "dx", "dw", "dbias"],
    "linear_cross_entropy": ["x", "w", "bias", "target", "loss"],
    "linear_cross_entropy_backward": ["dloss", "x", "w", "bias", "target", "loss", "dx", "dw", "dbias"],
    "activation": ["x", "up", "y"],
    "activation_backward": ["dy", "x", "up", "dx", "dup"],
    "sample": ["x", "seed", "position", "token", "log_prob", "filtered_log_prob"],
    "topk": ["x", "values", "index"],
    "embedding": ["w", "ids", "out"],
    "embedding_backward": ["dout", "ids", "dw"],
    "rotary_table": ["positions", "frequencies", "cos", "sin"],
    "rotary": ["q", "k", "cos", "sin", "q_out", "k_out"],
    "selective_scan": ["x", "dt", "a", "b", "c", "d", "initial", "cu_seqlens", "y", "final"],
    "gated_delta": ["q", "k", "v", "g", "beta", "initial", "cu_seqlens", "o", "final"],
    "causal_conv1d": ["x", "w", "bias", "initial", "cu_seqlens", "y"],
    "attention": ["q", "k", "v", "out", "lse"],
    "attention_backward": ["dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv"],
}
OF_SCANS = {op: ORDER[op] for op in ("selective_scan", "gated_delta", "causal_conv1d")}
OF_SCANS["selective_scan_backward"] = [
    "dy",
    "dfinal",
    "x",
    "dt",
    "a",
    "b",
    "c",
    "d",
    "initial",
    "cu_seqlens",
    "dx",
    "ddt",
    "da",
    "db",
    "dc",
    "dd",
    "dinitial",
]
OF_SCANS["gated_delta_backward"] = [
    "dout",
    "dfinal",
    "q",
    "k",
    "v",
    "g",
    "beta",
    "initial",
    "cu_seqlens",
    "dq",
    "dk",
    "dv",
    "dg",
    "dbeta",
    "dinitial",
]
OF_SCANS["causal_conv1d_backward"] = ["dy", "x", "w", "initial", "cu_seqlens", "dx", "dw", "dbias", "dinitial"]
ORDER |= OF_SCANS
OF_ATTENTION = ("sinks", "allowed", "bias", "first_key", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table")
ROTARY_FLAGS = ("whole", "neighbours", "out_neighbours", "in_fp32", "transposed")
OF_ADAMW = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")
OF_LOSS = ("label_smoothing", "z_loss")
OF_SAMPLE = {"temperatures": "temperature", "top_ks": "top_k", "top_ps": "top_p", "min_ps": "min_p"}
NAMED = {"attention": OF_ATTENTION, "attention_backward": (*OF_ATTENTION[:-1], "dsinks")}  # by the options
NAMED |= {"sample": tuple(OF_SAMPLE)}
NAMED |= dict.fromkeys(("linear_cross_entropy", "linear_cross_entropy_backward"), ("lse",))
C_ALONE = (
    "activation",
    "activation_backward",
    "sample",
    "topk",
    "embedding",
    "embedding_backward",
    "linear_log_prob",
    "linear_log_prob_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "rotary_table",
    "rotary",
    "adamw",
    *OF_SCANS,
)  # their Python has tests of its own


def python_name(call):
    """Of the Python function, and in sentences: C says log by an option."""
    return "log_" * ("softmax" in call.op and chosen(call, "log") == 1) + call.op


def parts_of(call):
    return [name for name in call.inputs if name.startswith("parts[")]


def invoke(call):
    tensors = {**call.inputs, **call.outputs}
    function = getattr(lib, f"pydet_{call.op}")
    given = ffi.NULL if call.options is None else call.options
    if call.op == "fold":
        parts = ffi.new("pydet_tensor *[]", [pointer(tensors[name]) for name in parts_of(call)])
        array = ffi.cast("const pydet_tensor *const *", parts)
        return function(ffi.NULL, array, len(parts), pointer(tensors["bias"]), pointer(tensors["out"]), given)
    if call.op == "adamw":
        lists = [
            ffi.new("const pydet_tensor *[]", [pointer(tensors[f"{name}[{i}]"]) for i in range(len(call.inputs))])
            for name in OF_ADAMW
        ]
        return function(ffi.NULL, *lists, len(call.inputs), given, ffi.NULL)
    if "initial" in tensors and "initial" not in ORDER[call.op]:
        given.initial = pointer(tensors["initial"])
    if call.op == "rmsnorm":
        given.bias = pointer(tensors["bias"])
    if call.op == "rmsnorm_backward":
        given.dbias = pointer(tensors["dbias"])
    for name in NAMED.get(call.op, ()):
        setattr(given, name, pointer(tensors[name]))
    return function(ffi.NULL, *[pointer(tensors[name]) for name in ORDER[call.op]], given)


class Interface:
    """Offers a tensor by __array_interface__. With `wrong`, one entry of that makes no sense."""

    def __init__(self, rng, described, wrong):
        self.dtype, address, ndim = described.dtype, described.address, len(described.shape)
        strides = tuple(stride * self.dtype.itemsize for stride in described.strides)
        entries = {"shape": tuple(described.shape), "typestr": self.dtype.str, "data": (address, False), "version": 3}
        self.__array_interface__ = entries | {"strides": strides}
        if wrong:
            data = [bytearray(64), b"ab", np.zeros(2), None, (address,), [address, False], (float(address), False)]
            data += [(address + 2**64, False), (-1, False), ("0", False), (address, False, 0)]
            shape = [None, "44", [1.5], (2**64,), (-1,) * (ndim + 1)]
            strides = [(4,) * (ndim + 1), ("x",) * (ndim + 1), 4]
            typestr = ["", "<f", "f4", 4, None, ">f4", "<f8", "<c8", "<V3"]
            every = {"data": data, "shape": shape, "strides": strides, "typestr": typestr, "mask": [self]}
            key = rng.choice(["data", *every])
            self.__array_interface__[key] = rng.choice(every[key])


def invoke_python(rng, call):
    """The same by the Python function, from DLPack producers or array interfaces: (status, sentence, whether what they
    say forbids it)."""
    producers, forbidden = {}, False
    for name, tensor in {**call.inputs, **call.outputs}.items():
        described = None if tensor is None else Described(tensor)
        on_cpu = described and (tensor.c.device.device_type, tensor.c.device.device_id) == (1, 0)
        if on_cpu and described.sense == "inside" and 0 not in described.shape and rng.random() < 0.2:
            wrong = rng.random() < 0.1
            producers[name] = Interface(rng, described, wrong)
            forbidden |= wrong
            continue
        kind = {"versioned": rng.random() < 0.5, "old": rng.random() < 0.2}
        if kind["versioned"] and rng.random() < 0.05:
            kind["flags"] = rng.choice([1, 2])
            forbidden |= name in call.outputs and tensor is not None
        producers[name] = None if tensor is None else interop.Producer(tensor, **kind)
    given = call.options
    names = {
        "arithmetic": lambda v: ARITHMETICS[v],
        "k_chunk": lambda v: v if call.op.startswith("scaled") else v or None,
        "accumulate": bool,
        "block_sums": bool,
        "granularity": lambda v: GRANULARITIES[v],
        "power_of_two": bool,
        "eps": float,
        "weight_offset": float,
        "weights_constant": bool,
        "order": lambda v: ["ordered", "tree"][v],
        "causal": bool,
        "scale": lambda v: v or None,
        "softcap": lambda v: v or None,
        "kv_chunk": lambda v: v or 1024,
    }
    keywords = (
        {}
        if given is None
        else {name: names[name](getattr(given, name)) for name, _ in ffi.typeof(given).item.fields if name in names}
    )
    if call.op == "quantize":
        tensors = {**call.inputs, **call.outputs}
        for name, keyword in (("out", "dtype"), ("scale", "scale_dtype")):
            dtype = Described(tensors[name]).dtype
            keywords |= {} if dtype in (None, BOUNDARY) else {keyword: dtype.name}
        outs = ["out", "scale", "transposed", "transposed_scale"]
        if "scale" in call.inputs:
            keywords["scale"] = producers["scale"]
            producers["scale"] = None
        keywords["transposed"] = producers["transposed"] is not None
        keywords["out"] = tuple(producers.pop(name) for name in outs)
    elif call.op == "attention":
        keywords["out"] = producers.pop("out")
        del producers["lse"]
        if given.window:
            keywords["window"] = tuple(None if x < 0 else x for x in (given.window_left, given.window_right))
        keywords |= {name: producers.pop(name) for name in ("sinks", "allowed", "bias", "first_key")}
    elif call.op == "attention_backward":
        if given.window:
            keywords["window"] = tuple(None if x < 0 else x for x in (given.window_left, given.window_right))
        keywords |= {name: producers.pop(name) for name in ("sinks", "allowed", "bias", "first_key")}
        keywords |= {name: producers.pop(name) for name in call.outputs}
    elif call.op == "rmsnorm_quantize":
        tensors = {**call.inputs, **call.outputs}
        for name, keyword in (("out", "dtype"), ("scale", "scale_dtype")):
            dtype = Described(tensors[name]).dtype
            keywords |= {} if dtype in (None, BOUNDARY) else {keyword: dtype.name}
        if "scale" in call.inputs:
            keywords["scale"] = producers["scale"]
            producers["scale"] = None
            del keywords["granularity"]
        keywords["out"] = tuple(producers.pop(name) for name in ("out", "scale", "sum"))
        keywords |= {name: producers.pop(name) for name in ("y", "rstd")}
    elif call.op == "rmsnorm":
        keywords["out"] = tuple(producers.pop(name) for name in ("y", "rstd", "sum"))
    elif call.op == "layernorm":
        keywords["out"] = tuple(producers.pop(name) for name in ("y", "mean", "rstd", "sum"))
    elif call.op.endswith("norm_backward"):
        keywords["out"], keywords["dweight"] = producers.pop("dx"), producers.pop("dweight")
        keywords["dbias"], keywords["has_bias"] = producers.pop("dbias"), False
    else:
        keywords["out"] = producers.pop(ORDER[call.op][-1])
    for name in ("bias", "initial", "residual", "dresidual", "a_scale", "b_scale", "group_start", "group_end"):
        if name in producers:
            keywords[name] = producers.pop(name)
    positional = [producers.pop(name) for name in ORDER[call.op] if name in producers]
    function = python_name(call)
    if call.op == "attention":
        more = {"block_table": ("block_table", "seqlens_k", "cu_seqlens_q"), "cu_seqlens_k": OF_ATTENTION[4:6]}
        kind = next((name for name in more if call.inputs[name] is not None), None)
        function += {None: "", "block_table": "_paged", "cu_seqlens_k": "_varlen"}[kind]
        positional += [producers.pop(name) for name in more.get(kind, ())]
        if kind is None:
            keywords["seqlens_k"] = producers.pop("seqlens_k")
        elif kind == "cu_seqlens_k":
            for name in ("allowed", "bias", "first_key"):
                expect(keywords.pop(name) is None, "made a pack with", name)
    if call.op == "attention_backward" and call.inputs["cu_seqlens_k"] is None:
        keywords["seqlens_k"] = producers.pop("seqlens_k")
    elif call.op == "attention_backward":
        function = "attention_varlen_backward"
        positional += [producers.pop(name) for name in OF_ATTENTION[4:6]]
        for name in ("allowed", "bias", "first_key"):
            expect(keywords.pop(name) is None, "made a pack with", name)
    if call.op == "fold":
        together = "parts" in call.inputs
        positional = [producers["parts"] if together else [producers.pop(name) for name in parts_of(call)]]
    try:
        getattr(pydet, function)(*positional, **keywords)
        return 0, "", forbidden
    except pydet.Error as error:
        return error.status, str(error), forbidden
    except MemoryError:  # an extent of 2^62, whose workspace is made before the operation sees its strides
        return lib.PYDET_OVERFLOW, f"{call.op}: there is no memory for the workspace of these rows", forbidden
    finally:
        expect(all(producer.all_given_back() for producer in interop.made), "kept a capsule, or freed what it holds")
        interop.made.clear()


def python_can(call):
    """The Python function has nothing to make here, for which it would need the caller's framework."""
    fixed = {"rmsnorm": ["y", "rstd"], "layernorm": ["y", "mean", "rstd"], "quantize": ["x", "out", "scale"]}
    fixed |= {"rmsnorm_quantize": ["x", "out", "scale", *["sum"] * (call.inputs.get("residual") is not None)]}
    fixed |= {"rmsnorm_backward": ["dx"], "layernorm_backward": ["dx"], "attention": ["out"]}
    fixed |= {"attention_backward": ["lse", "dq", "dk", "dv"]}
    if call.op in C_ALONE or (call.op == "attention" and call.outputs["lse"] is not None):
        return False  # Python makes it
    if call.op == "attention_backward":
        packs = [call.inputs[name] is None for name in ("cu_seqlens_q", "cu_seqlens_k")]
        if packs[0] != packs[1] or (not packs[0] and any(call.inputs[x] is not None for x in NO_PACK)):
            return False  # it has no such function
        if (call.inputs["sinks"] is None) != (call.outputs["dsinks"] is None):
            return False
    required = fixed.get(call.op, ORDER[call.op][-1:])
    tensors = {**call.inputs, **call.outputs}
    whole = all(tensors[name] is not None for name in required + parts_of(call))
    pairs = [("residual", "sum"), ("weight", "dweight"), ("transposed", "transposed_scale")]
    return whole and all(tensors.get(i) is None or tensors.get(o) is not None for i, o in pairs if i in tensors)


def make_gemm(rng):
    op = rng.choice(["gemm", "gemm", "gemm_da", "gemm_db", "skinny_gemm"])
    batch = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    size = lambda: rng.choice([0, 1, 1, 2, 3, 5, 8, 17])
    m, n = size(), size()
    k = rng.choice([0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 70])
    if not batch and rng.random() < 0.2:
        k = rng.randrange(71, 600)  # what fills a region
    kind = rng.choice(list(DTYPES.values()))
    out_kind = rng.choice(list(DTYPES.values()))
    accumulate = rng.random() < 0.25
    if accumulate:
        out_kind = np.dtype(np.float32)
    half = kind.itemsize == 2
    arithmetic = rng.choice(ARITHMETICS if half else ARITHMETICS[:2])
    regions = iter(rng.sample(REGIONS, 5))

    def batched(full):  # leading dimensions that broadcast to `batch`
        if not full and rng.random() < 0.2:
            return []
        return [e if full or rng.random() < 0.8 else 1 for e in batch]

    def matrix(shape, kind, full=False):
        shape = batched(full) + shape
        return place(rng, next(regions), shape, kind, order=[len(shape) - 1, len(shape) - 2], broadcast=not full)

    bias = None
    if op == "skinny_gemm":
        lead = batch + ([m] if rng.random() < 0.8 else [])
        shapes = {"x": lead + [k], "w": [n, k], "y": lead + [n]}
        made = {name: place(rng, next(regions), s, out_kind if name == "y" else kind) for name, s in shapes.items()}
        if rng.random() < 0.4:
            bias = place(rng, next(regions), rng.choice([[n], lead + [n]]), rng.choice(list(DTYPES.values())))
        inputs, outputs = {"x": made["x"], "w": made["w"], "bias": bias}, {"y": made["y"]}
    else:
        names = ORDER[op]
        first, second, out = {
            "gemm": ([m, k], [k, n], [m, n]),
            "gemm_da": ([m, k], [n, k], [m, n]),
            "gemm_db": ([k, m], [k, n], [m, n]),
        }[op]
        a, b = matrix(first, kind, full=True), matrix(second, kind)
        inputs, outputs = {names[0]: a, names[1]: b}, {names[-1]: matrix(out, out_kind, full=True)}
        if op == "gemm":
            if rng.random() < 0.4:
                shape = rng.choice([[n], batch + [m, n]])
                bias = place(rng, next(regions), shape, rng.choice(list(DTYPES.values())))
            inputs["bias"] = bias
    struct = "pydet_skinny_gemm_options" if op == "skinny_gemm" else "pydet_gemm_options"
    given = options(
        struct,
        arithmetic=ARITHMETICS.index(arithmetic),
        accumulate=int(accumulate),
        k_chunk=rng.choice([0, 0, 16, 32, 64, 16 * rng.randint(1, k // 16 + 1)]),
    )
    if op == "skinny_gemm":
        given.weights_constant = rng.randrange(2)
    if not accumulate and rng.random() < 0.3:
        shape = lead + [n] if op == "skinny_gemm" else batch + out
        inputs["initial"] = packed(rng, next(regions), shape, np.dtype(np.float32))
        workspace = Workspace((4 * int(np.prod(shape, dtype=np.int64)) + 15) // 16 * 16)
        given.workspace, given.workspace_size = workspace.pointer, workspace.size
        WORKSPACES[id(given)] = workspace
    elif given.arithmetic == 0 and not accumulate and not given.k_chunk and rng.random() < 0.3:
        given = None
    return Call(op, inputs, outputs, given)


def make_norm(rng):
    kinds = list(DTYPES.values())
    kind = rng.choice(kinds)
    n = rng.choice([1, 2, 3, 7, 8, 9, 16, 31, 64, 130, 2047, 2049])
    rows = (
        rng.choice([[0], [1], [2], [5], [2, 3], [17], []])
        if n > 8
        else rng.choice([[0], [1], [5], [3, 4], [255], [300]])
    )
    if n > 1000:
        rows = rng.choice([[1], [2], []])
    regions = iter(rng.sample(REGIONS, 10))
    like = lambda of=kind: place(rng, next(regions), rows + [n], of)
    op, of_layer = rng.choice([("rmsnorm", False), ("layernorm", True)])
    heads = not of_layer and len(rows) > 0 and 0 < rows[-1] < 20 and rng.random() < 0.4
    by_block = []
    vector = lambda kind: (packed if heads or by_block else place)(
        rng, next(regions), by_block + rows[-1:] * heads + [n], kind
    )
    maybe = lambda make, chance: make() if rng.random() < chance else None
    wide = np.dtype(np.float32) if not of_layer and rng.random() < 0.3 else kind  # of residual and sum
    weight = maybe(lambda: vector(rng.choice(kinds)), 0.7)
    value = lambda: contiguous(rng, next(regions), rows, np.dtype(np.float32))
    if rng.random() < 0.5:
        residual = maybe(lambda: like(wide), 0.3)
        inputs = {"x": like(), "residual": residual, "weight": weight}
        outputs = {"y": like(), "rstd": maybe(value, 0.7), "sum": like(wide) if residual else None}
        inputs["bias"] = maybe(lambda: vector(rng.choice(kinds)), 0.7 if of_layer else 0.3)
        if of_layer:
            outputs["mean"] = maybe(value, 0.7)
        given = options(f"pydet_{op}_options", eps=rng.choice([0.0, 1e-6, 1e-5]), weight_offset=rng.choice([0.0, 1.0]))
        return Call(op, inputs, outputs, given)
    accumulate = rng.random() < 0.3 and not heads
    if not of_layer and not accumulate and rng.random() < 0.3:
        by_block = [-(-int(np.prod(rows[: len(rows) - heads], dtype=np.int64)) // 256)]
    of_sum = lambda: like(wide)
    inputs = {"dy": like(), "x": of_sum(), "weight": weight, "rstd": value(), "dresidual": maybe(of_sum, 0.3)}
    outputs = {"dx": maybe(of_sum, 0.8), "dweight": None, "dbias": None}
    sum_kind = lambda: np.dtype(np.float32) if accumulate or by_block else rng.choice(kinds)
    if of_layer:
        inputs["mean"] = value()
    if of_layer or not accumulate:
        outputs["dbias"] = maybe(lambda: vector(sum_kind()), 0.6 if of_layer else 0.3)
    if (outputs["dx"] is None and outputs["dbias"] is None) or rng.random() < 0.8:
        outputs["dweight"] = vector(sum_kind())
    if outputs["dx"] is None:
        inputs["dresidual"] = None
    accumulate = accumulate and (outputs["dweight"] is not None or outputs["dbias"] is not None)
    given = options(f"pydet_{op}_backward_options", weight_offset=rng.choice([0.0, 1.0]), accumulate=int(accumulate))
    if by_block:
        given.block_sums = 1
    need = ffi.new("uint64_t *")
    count = int(np.prod(rows, dtype=np.int64))
    of_heads = rows[-1] if heads and rows[-1] else 1
    expect(getattr(lib, f"pydet_{op}_backward_workspace")(count // of_heads, n * of_heads, need) == 0, last_error())
    need[0] *= 2 if outputs["dbias"] is not None and not of_layer else 1
    workspace = Workspace(need[0])
    given.workspace, given.workspace_size = workspace.pointer, need[0]
    call = Call(f"{op}_backward", inputs, outputs, given)
    WORKSPACES[id(given)] = workspace
    return call


def make_scaled(rng):
    batch = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    m, n = rng.choice([0, 1, 1, 2, 3, 5, 17]), rng.choice([0, 1, 2, 5, 16, 33, 129])
    k = rng.choice([0, 1, 31, 32, 33, 127, 128, 129, 160] + ([257, 300] if not batch else []))
    n = min(n, 33) if batch else n
    regions = iter(rng.sample(REGIONS, 7))
    blocks, along = reference_fp8.groups, rng.choice([128, 128, 32])  # scales' elements along k

    def matrix(shape, kind, lead):
        return place(rng, next(regions), lead + shape, kind, order=[len(lead) + 1, len(lead)])

    def scale(shapes):
        choice = rng.choice([None, [], *shapes])
        if choice is None:
            return None
        lead = rng.choice([[], batch]) if choice else []
        return place(rng, next(regions), lead + choice, rng.choice(list(SCALES.values())))

    made = {
        "a": matrix([m, k], rng.choice(list(FP8.values())), batch),
        "a_scale": scale([[m, 1], [m, blocks(k, along)]]),
        "b": matrix([k, n], rng.choice(list(FP8.values())), rng.choice([[], batch])),
        "b_scale": scale([[1, n], [blocks(k, along), n], [blocks(k, along), blocks(n)]]),
        "bias": None,
    }
    if rng.random() < 0.4:
        made["bias"] = place(rng, next(regions), rng.choice([[n], batch + [m, n]]), rng.choice(list(DTYPES.values())))
    varies = along_k(made["a_scale"], -1, k, along) or along_k(made["b_scale"], -2, k, along)
    accumulate = rng.random() < 0.3 and (varies or (made["a_scale"] is None and made["b_scale"] is None))
    out_kind = np.dtype(np.float32) if accumulate else rng.choice(list(DTYPES.values()))
    given = options("pydet_scaled_gemm_options", arithmetic=rng.choice([0, 1, 2]), accumulate=int(accumulate))
    given.k_chunk = along if varies or along == 32 else rng.choice([0, 64, 128, 160])
    outputs = {"out": matrix([m, n], out_kind, batch)}
    of_chunks = varies or (made["a_scale"] is None and made["b_scale"] is None)
    if of_chunks and not accumulate and rng.random() < 0.4:
        shape = batch + [m, n]
        made["initial"] = packed(rng, next(regions), shape, np.dtype(np.float32))
        workspace = Workspace((4 * int(np.prod(shape, dtype=np.int64)) + 15) // 16 * 16)
        given.workspace, given.workspace_size = workspace.pointer, workspace.size
        WORKSPACES[id(given)] = workspace
    elif given.arithmetic == 0 and not accumulate and given.k_chunk == 128 and rng.random() < 0.5:
        given = None
    return Call("scaled_gemm", made, outputs, given)


def along_k(scale, dim, k, group):
    """Whether a scale, or its descriptor, has an extent for each so many elements of k."""
    shape = [] if scale is None else list(scale.shape)
    return len(shape) > 0 and shape[dim] == reference_fp8.groups(k, group)


def make_quantize(rng):
    lead = [rng.choice([1, 2]) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    m, k = rng.choice([0, 1, 2, 3, 9, 129]), rng.choice([0, 1, 7, 8, 16, 17, 127, 128, 129, 260])
    m = min(m, 9) if lead or k > 17 else m
    granularity, regions = rng.choice(GRANULARITIES), iter(rng.sample(REGIONS, 5))
    kind, scale_kind = rng.choice(list(FP8.values())), rng.choice(list(SCALES.values()))
    matrix = lambda shape, kind: place(rng, next(regions), lead + shape, kind, order=[len(lead) + 1, len(lead)])
    blocks = reference_fp8.groups

    def scale(m, k):
        shape = {"row": [m, 1], "group": [m, blocks(k)], "block": [blocks(m), blocks(k)], "tensor": []}[granularity]
        return place(rng, next(regions), lead + shape if shape else [], scale_kind)

    given = options("pydet_quantize_options", granularity=GRANULARITIES.index(granularity))
    given.power_of_two, given.given = int(rng.random() < 0.3), int(rng.random() < 0.25)
    outputs = {"out": matrix([m, k], kind), "scale": scale(m, k), "transposed": None, "transposed_scale": None}
    if granularity in ("group", "block") and not given.given and rng.random() < 0.5:
        outputs["transposed"], outputs["transposed_scale"] = matrix([k, m], kind), scale(k, m)
    inputs = {"x": matrix([m, k], rng.choice(list(DTYPES.values())))}
    return Call("quantize", inputs, outputs, given)


def make_norm_quantize(rng):
    lead, n = rng.choice([[0], [1], [2], [5], [2, 3], [17], []]), rng.choice([1, 2, 7, 8, 9, 64, 127, 128, 129, 2049])
    lead = rng.choice([[1], [2], []]) if n > 1000 else lead
    kind, regions = rng.choice(list(DTYPES.values())), iter(rng.sample(REGIONS, 8))
    wide = np.dtype(np.float32) if rng.random() < 0.3 else kind
    maybe = lambda make, chance: make() if rng.random() < chance else None
    like = lambda of=kind: place(rng, next(regions), lead + [n], of)
    granularity = rng.choice([0, 1, 3])
    given = options("pydet_rmsnorm_quantize_options", eps=rng.choice([0.0, 1e-6]), granularity=granularity)
    given.weight_offset, given.power_of_two = rng.choice([0.0, 1.0]), int(granularity != 3 and rng.random() < 0.3)
    of_scale = [] if granularity == 3 else lead + [1 if granularity == 0 else reference_fp8.groups(n)]
    residual = maybe(lambda: like(wide), 0.5)
    weight = maybe(lambda: place(rng, next(regions), [n], rng.choice(list(DTYPES.values()))), 0.7)
    outputs = {"out": like(rng.choice(list(FP8.values()))), "y": maybe(like, 0.3)}
    outputs["scale"] = place(rng, next(regions), of_scale, rng.choice(list(SCALES.values())))
    outputs["rstd"] = maybe(lambda: contiguous(rng, next(regions), lead, np.dtype(np.float32)), 0.3)
    outputs["sum"] = like(wide) if residual else None
    return Call("rmsnorm_quantize", {"x": like(), "residual": residual, "weight": weight}, outputs, given)


def settle(call):
    """The scale of quantize, and of a norm quantised, among what its options make it."""
    if call.op in ("quantize", "rmsnorm_quantize"):
        read = chosen(call, "given") if call.op == "quantize" else chosen(call, "granularity") == 3
        was, is_ = (call.outputs, call.inputs) if read else (call.inputs, call.outputs)
        if "scale" in was:
            is_["scale"] = was.pop("scale")


def contiguous(rng, region, shape, dtype):
    """Like place, in C order without padding, and with values of a plausible size: rstd is positive."""
    region.bytes[:] = 0xFF
    strides = c_strides(shape)
    count = int(np.prod(shape, dtype=np.int64))
    address = region.end - max(count, 1) * dtype.itemsize
    view = region.view(address, shape, strides, dtype)
    view[...] = np.random.default_rng(rng.getrandbits(64)).uniform(0.25, 4, shape)
    tensor = Tensor(shape=shape, strides=strides, dtype=FLOAT32, data=address)
    tensor.region = region
    return tensor


def packed(rng, region, shape, dtype, gap=0):
    """In C order without padding but for `gap` elements between the first dimension's, somewhere in the region."""
    region.bytes[:] = 0xFF
    strides, count = c_strides(shape), int(np.prod(shape, dtype=np.int64))
    if gap:
        strides[0] += gap
    slack = REGION // dtype.itemsize - max(count, 1) - gap * (shape[0] if shape else 0)
    address = region.begin + rng.choice([0, slack, rng.randrange(slack + 1)]) * dtype.itemsize
    view = region.view(address, shape, strides, dtype)
    if view.size:
        view[...] = values(rng, view.size, dtype).reshape(shape)
    code = {v: k for k, v in TYPES.items()}[dtype]
    tensor = Tensor(shape=shape, strides=strides, dtype=code, data=address)
    tensor.region = region
    return tensor


def make_softmax(rng):
    op = rng.choice(["softmax", "softmax", "softmax_backward", "log_prob", "log_prob_backward"])
    n = rng.choice([1, 2, 3, 7, 8, 9, 31, 64, 130, 2047, 2049])
    rows = rng.choice([[1], [2], []]) if n > 1000 else rng.choice([[0], [1], [2], [5], [2, 3], [17], []])
    regions, kind = iter(rng.sample(REGIONS, 4)), rng.choice(list(DTYPES.values()))
    like = lambda: place(rng, next(regions), [*rows, n], kind)
    if "prob" not in op:
        inputs = {"x": like()} if op == "softmax" else {"dy": like(), "y": like()}
        given = options("pydet_softmax_options", log=rng.randrange(2))
        return Call(op, inputs, {"y" if op == "softmax" else "dx": like()}, given)
    x, of_row = like(), packed(rng, next(regions), rows, np.dtype(np.float32))
    index = packed(rng, next(regions), rows, rng.choice([BOUNDARY, np.dtype(np.int64)]))
    view = Described(index).view()
    view[...] = np.random.default_rng(rng.getrandbits(64)).integers(-2, n + 2, rows)
    given = options("pydet_log_prob_options")
    if op == "log_prob":
        return Call(op, {"x": x, "index": index}, {"log_prob": of_row}, given)
    return Call(op, {"dlog_prob": of_row, "x": x, "index": index}, {"dx": like()}, given)


def make_head(rng):
    """Backward with any of its results, in chunks of 16 rows or more; sums of another type than fp32 want all rows."""
    n, k = rng.choice([1, 2, 3, 7, 8, 9, 17, 40]), rng.choice([0, 1, 7, 16, 17, 33])
    rows = rng.choice([[0], [1], [2, 3], [], [15], [16], [17], [2, 16], [33], [50]])
    kinds, fp32, back = list(DTYPES.values()), np.dtype(np.float32), rng.random() < 0.6
    kind, regions = rng.choice(kinds), iter(rng.sample(REGIONS, 9))
    arithmetic = rng.choice(ARITHMETICS if kind.itemsize == 2 else ARITHMETICS[:2])
    x = (
        place(rng, next(regions), [math.prod(rows), k], kind)
        if len(rows) == 1
        else packed(rng, next(regions), [*rows, k], kind)
    )
    w = place(rng, next(regions), [n, k], kind, order=[0, 1])
    bias = place(rng, next(regions), [n], rng.choice(kinds)) if rng.random() < 0.6 else None
    index = packed(rng, next(regions), rows, rng.choice([BOUNDARY, np.dtype(np.int64)]))
    Described(index).view()[...] = np.random.default_rng(rng.getrandbits(64)).integers(-2, n + 2, rows)
    of_row = lambda: packed(rng, next(regions), rows, fp32)
    accumulate, wide = back and rng.random() < 0.3, rng.random() < 0.4
    given = {
        "arithmetic": ARITHMETICS.index(arithmetic),
        "k_chunk": rng.choice([0, 0, 16, 32]),
        "accumulate": accumulate,
    }
    given = options("pydet_linear_log_prob_options", **given)
    if wide:
        given.logits = (lib.PYDET_FLOAT, 32, 1)
    given.softcap, given.temperature = rng.choice([0, 0, 0.5, 30]), rng.choice([0, 0, 1, 0.6, 3])
    inputs = {"x": x, "w": w, "bias": bias, "index": index}
    kind_of_sums = fp32 if accumulate else rng.choice([fp32, kind])
    if back:
        outputs = {"log_prob": of_row() if rng.random() < 0.4 else None}
        outputs["dx"] = packed(rng, next(regions), [*rows, k], rng.choice([fp32, kind])) if rng.random() < 0.7 else None
        outputs["dw"] = place(rng, next(regions), [n, k], kind_of_sums) if rng.random() < 0.7 else None
        outputs["dbias"] = packed(rng, next(regions), [n], kind_of_sums) if rng.random() < 0.6 else None
        inputs["dlog_prob"] = of_row()
    else:
        outputs = {"log_prob": of_row()}
    need, dtype = ffi.new("uint64_t *"), ffi.new("pydet_dtype *", TYPES_IN_C[kind])[0]
    most = rng.choice([0, 1]) if kind_of_sums == fp32 else 0
    status = lib.pydet_linear_log_prob_workspace(math.prod(rows), n, k, dtype, int(back), most, given, need)
    expect(status == 0, last_error())
    workspace = WORKSPACES[id(given)] = Workspace(need[0])
    given.workspace, given.workspace_size = workspace.pointer, need[0]
    return Call("linear_log_prob" + "_backward" * back, inputs, outputs, given)


def make_loss(rng):
    """Of any rule; backward with any of its results, and an lse of any numbers."""
    n, k = rng.choice([1, 2, 3, 7, 9, 17, 40]), rng.choice([0, 1, 7, 16, 33])
    rows = rng.choice([[0], [1], [2, 3], [], [15], [16], [17], [2, 16], [33], [50], [258]])
    kinds, fp32, back = list(DTYPES.values()), np.dtype(np.float32), rng.random() < 0.6
    kind, regions = rng.choice(kinds), iter(rng.sample(REGIONS, 10))
    of_rows = lambda shape, dtype: packed(rng, next(regions), shape, dtype)
    x, w = of_rows([*rows, k], kind), place(rng, next(regions), [n, k], kind, order=[0, 1])
    bias = place(rng, next(regions), [n], rng.choice(kinds)) if rng.random() < 0.6 else None
    target = of_rows(rows, rng.choice([BOUNDARY, np.dtype(np.int64)]))
    ignored = rng.choice([-100, -1, 0, n - 1, 2**40])
    numbers = np.random.default_rng(rng.getrandbits(64)).integers(-2, n + 2, rows)
    Described(target).view()[...] = np.where(numbers == n, -100 if ignored == 2**40 else ignored, numbers)
    accumulate = back and rng.random() < 0.3
    arithmetic = ARITHMETICS.index(rng.choice(ARITHMETICS if kind.itemsize == 2 else ARITHMETICS[:2]))
    given = {"arithmetic": arithmetic, "k_chunk": rng.choice([0, 0, 16, 32]), "accumulate": accumulate}
    given |= {"softcap": rng.choice([0, 0, 0.5, 30]), "temperature": rng.choice([0, 0, 1, 0.6])}
    given |= {"label_smoothing": rng.choice([0, 0, 0.1, 1]), "z_loss": rng.choice([0, 0, 1e-3, 2.5])}
    given |= {"reduction": rng.randrange(3), "has_ignore_index": ignored != -100 or rng.randrange(2)}
    given |= {"ignore_index": ignored if given["has_ignore_index"] else 0}
    given = options("pydet_linear_cross_entropy_options", **given)
    if rng.random() < 0.4:
        given.logits = (lib.PYDET_FLOAT, 32, 1)
    like_loss = rows if given.reduction == lib.PYDET_REDUCTION_NONE else []
    inputs = {"x": x, "w": w, "bias": bias, "target": target}
    lse = of_rows(rows, fp32) if rng.random() < 0.4 else None
    kind_of_sums = fp32 if accumulate else rng.choice([fp32, kind])
    if back:
        inputs |= {"lse": lse, "dloss": of_rows(like_loss, fp32) if rng.random() < 0.7 else None}
        outputs = {"loss": of_rows(like_loss, fp32) if rng.random() < 0.4 else None}
        outputs["dx"] = of_rows([*rows, k], rng.choice([fp32, kind])) if rng.random() < 0.7 else None
        outputs["dw"] = place(rng, next(regions), [n, k], kind_of_sums) if rng.random() < 0.7 else None
        outputs["dbias"] = of_rows([n], kind_of_sums) if rng.random() < 0.6 else None
    else:
        outputs = {"loss": of_rows(like_loss, fp32), "lse": lse}
    need, dtype = ffi.new("uint64_t *"), ffi.new("pydet_dtype *", TYPES_IN_C[kind])[0]
    most = rng.choice([0, 1]) if kind_of_sums == fp32 else 0
    status = lib.pydet_linear_cross_entropy_workspace(math.prod(rows), n, k, dtype, int(back), most, given, need)
    expect(status == 0, last_error())
    workspace = WORKSPACES[id(given)] = Workspace(need[0])
    given.workspace, given.workspace_size = workspace.pointer, need[0]
    return Call("linear_cross_entropy" + "_backward" * back, inputs, outputs, given)


def make_activation(rng):
    """Gated or not; now and then a result in the place of an operand."""
    op, n = rng.choice(["activation", "activation_backward"]), rng.choice([1, 2, 3, 7, 8, 9, 31, 64, 130, 257])
    rows, kind = rng.choice([[0], [1], [2], [5], [2, 3], [17], []]), rng.choice(list(DTYPES.values()))
    regions, gated = iter(rng.sample(REGIONS, 5)), rng.random() < 0.5
    like = lambda: place(rng, next(regions), [*rows, n], kind)
    inputs = {"x": like(), "up": like() if gated else None}
    given = options("pydet_activation_options", kind=rng.randrange(len(reference_activation.KINDS)))
    if op == "activation":
        return Call(op, inputs, {"y": inputs["x"] if rng.random() < 0.1 else like()}, given)
    inputs["dy"] = like()
    dx = inputs["dy"] if rng.random() < 0.1 else like()
    dup = inputs["x"] if gated and rng.random() < 0.1 else like() if gated and rng.random() < 0.8 else None
    return Call(op, inputs, {"dx": None if dup is not None and rng.random() < 0.2 else dx, "dup": dup}, given)


def make_sample(rng):
    n, rows = rng.choice([1, 2, 3, 7, 8, 9, 31, 64, 130, 257, 1025]), rng.choice([[0], [1], [2], [5], [2, 3], []])
    regions, kind = iter(rng.sample(REGIONS, 10)), rng.choice(list(DTYPES.values()))
    x, whole = place(rng, next(regions), [*rows, n], kind), np.dtype(np.int64)
    if rng.random() < 0.4:
        k = rng.choice([1, min(2, n), n, rng.randint(1, n)])
        outputs = {"values": packed(rng, next(regions), [*rows, k], kind)}
        outputs["index"] = packed(rng, next(regions), [*rows, k], whole)
        return Call("topk", {"x": x}, outputs, options("pydet_topk_options"))

    def of_rows(dtype, draw):
        tensor = packed(rng, next(regions), rows, dtype)
        Described(tensor).view()[...] = draw(np.random.default_rng(rng.getrandbits(64)))
        return tensor

    inputs = {"x": x}
    for name in ("seed", "position"):
        dtype = rng.choice([BOUNDARY, whole])
        inputs[name] = of_rows(dtype, lambda g, t=dtype: g.integers(np.iinfo(t).min, np.iinfo(t).max, rows, t))
    fractions = lambda g: g.choice(np.float32([0, 0.2, 0.9, 1, 1, 2, np.nan]), rows)
    draws = dict.fromkeys(OF_SAMPLE, fractions) | {"top_ks": lambda g: g.integers(-1, n + 2, rows)}
    for name, draw in draws.items():
        dtype = rng.choice([BOUNDARY, whole]) if name == "top_ks" else np.dtype(np.float32)
        inputs[name] = of_rows(dtype, draw) if rng.random() < 0.3 else None
    outputs = {"token": packed(rng, next(regions), rows, whole)}
    for name in ("log_prob", "filtered_log_prob"):
        there = rng.random() < 0.7
        outputs[name] = packed(rng, next(regions), rows, np.dtype(np.float32)) if there else None
    given = {"temperature": rng.choice([0, 0.7, 1, 3]), "top_k": rng.choice([0, 1, 5, n, 2**40])}
    given |= {"top_p": rng.choice([0, 0.4, 1, 1]), "min_p": rng.choice([0, 0, 0.1, 1])}
    return Call("sample", inputs, outputs, options("pydet_sample_options", **given))


def make_rotary(rng):
    lead = rng.choice([[0], [1], [2], [5], [2, 3], [], [70]])
    kinds, regions = list(DTYPES.values()), iter(rng.sample(REGIONS, 6))
    pairs, of_table = rng.choice([1, 2, 3, 7, 8, 9, 16, 33, 130] if lead != [70] else [1, 3, 8]), rng.choice(kinds)
    if rng.random() < 0.4:
        if rng.random() < 0.5:
            places = packed(rng, next(regions), lead, rng.choice([BOUNDARY, np.dtype(np.int64)]))
            Described(places).view()[...] = np.random.default_rng(rng.getrandbits(64)).integers(-9, 100_000, lead)
        else:
            places = packed(rng, next(regions), lead, rng.choice(kinds))
        columns = pairs * rng.choice([1, 2])
        inputs = {"positions": places, "frequencies": packed(rng, next(regions), [pairs], np.dtype(np.float32))}
        outputs = {name: place(rng, next(regions), [*lead, columns], of_table) for name in ("cos", "sin")}
        return Call(
            "rotary_table", inputs, outputs, options("pydet_rotary_table_options", scale=rng.choice([1, 0.5, -2]))
        )
    given = {name: rng.randrange(2) for name in ROTARY_FLAGS}
    kind, out, n = rng.choice(kinds), rng.choice(kinds), 2 * pairs + rng.choice([0, 0, 1, 8, 20])
    columns, heads = pairs * (2 if given["whole"] else 1), rng.choice([1, 2, 5] if pairs < 130 else [1, 2])
    names = ("q", "k") if rng.random() < 0.7 and len(lead) < 2 else ("q",)
    inputs = {name: place(rng, next(regions), [*lead, heads, n], kind) for name in names}
    inputs.setdefault("k")
    inputs |= {name: place(rng, next(regions), [*lead, columns], of_table) for name in ("cos", "sin")}
    outputs = {f"{name}_out": place(rng, next(regions), [*lead, heads, n], out) for name in names}
    outputs.setdefault("k_out")
    return Call("rotary", inputs, outputs, options("pydet_rotary_options", **given))


def make_scan(rng):
    """Any of the scans and of their gradients, of a batch or of a pack."""
    op, regions, kinds = rng.choice(list(OF_SCANS)), iter(rng.sample(REGIONS, 17)), list(DTYPES.values())
    fp32, tokens = np.dtype(np.float32), rng.choice([0, 1, 2, 3, 7, 10])
    batch, lengths = rng.choice([1, 1, 2, 3]), None
    if rng.random() < 0.4:
        cuts = sorted(rng.randrange(tokens + 1) for _ in range(rng.choice([0, 1, 2])))
        batch, lengths = 1, [0, *cuts, tokens]
    count = batch if lengths is None else len(lengths) - 1
    maybe = lambda name, shape, kind, chance=0.5: like(name, shape, kind) if rng.random() < chance else None
    made = {}

    def like(name, shape, kind):
        if name in OF_SCANS[op]:
            made[name] = place(rng, next(regions), shape, kind)
        return kind

    kind = rng.choice(kinds)
    if op.startswith("causal"):
        channels, taps = rng.choice([1, 2, 7, 16, 33]), rng.choice([1, 2, 4, 5, 9])
        rows, states = [batch, tokens, channels], [count, taps - 1, channels]
        like("x", rows, kind), like("w", [channels, taps], rng.choice(kinds)), maybe("initial", states, kind)
        maybe("bias", [channels], rng.choice(kinds)), like("y", rows, kind), like("dy", rows, kind)
        for name, shape, of in (
            ("dx", rows, kind),
            ("dw", [count, channels, taps], fp32),
            ("dbias", [count, channels], fp32),
        ):
            maybe(name, shape, of, 0.8)
        maybe("dinitial", states, kind)
    else:
        groups, width, states = rng.choice([1, 1, 2]), rng.choice([1, 2, 5, 33]), rng.choice([1, 3, 8, 33, 40])
        heads = groups * (rng.choice([1, 2, 3]) if width * states < 400 else 1)
        rows, numbers, of_group = [batch, tokens, heads, width], [batch, tokens, heads], [batch, tokens, groups, states]
        if op.startswith("selective"):
            each, of_states = rng.random() < 0.4, [count, heads, width, states]
            like("x", rows, kind), like("y", rows, kind), like("dy", rows, kind), like("dx", rows, kind)
            for name, shape in (("dt", numbers), ("b", of_group), ("c", of_group)):
                like(f"d{name}", shape, like(name, shape, rng.choice(kinds)))
            like("a", [heads, states] if each else [heads], fp32)
            like("da", [count, heads, states] if each else [count, heads], fp32)
            if rng.random() < 0.5:
                like("d", [heads], fp32), like("dd", [count, heads], fp32)
        else:
            of_states = [count, heads, states, width]
            like("v", rows, kind), like("o", rows, kind), like("dout", rows, kind), like("dv", rows, kind)
            for name, shape in (("q", of_group), ("k", of_group), ("g", numbers), ("beta", numbers)):
                like(f"d{name}", shape, like(name, shape, rng.choice(kinds)))
        for name in ("initial", "final", "dfinal", "dinitial"):
            maybe(name, of_states, fp32)
    if lengths is not None:
        made["cu_seqlens"] = packed(rng, next(regions), [count + 1], rng.choice([BOUNDARY, np.dtype(np.int64)]))
        Described(made["cu_seqlens"]).view()[...] = lengths
    backward = op.endswith("backward")
    results = {f"d{name}" for name in (*OF_SCANS[op], "bias")} if backward else {"y", "o", "final"}
    inputs, outputs = ({n: made.get(n) for n in OF_SCANS[op] if (n in results) == is_} for is_ in (False, True))
    given = options("pydet_scan_backward_options" if backward else "pydet_scan_options")
    if op in ("selective_scan_backward", "gated_delta_backward"):
        need, workspace = ffi.new("uint64_t *"), getattr(lib, f"pydet_{op}_workspace")
        status = workspace(count, batch * tokens, heads, width, groups, states, need)
        expect(status == 0, last_error())
        workspace = WORKSPACES[id(given)] = Workspace(need[0])
        given.workspace, given.workspace_size = workspace.pointer, need[0]
    return Call(op, inputs, outputs, given)


def make_embedding(rng):
    n, lead = rng.choice([1, 2, 3, 7, 8, 9, 31, 130, 257]), rng.choice([[0], [1], [2], [5], [2, 3], []])
    n, lead = rng.choice([(n, lead), (n, lead), (9, [70])])
    regions, kind = iter(rng.sample(REGIONS, 3)), rng.choice(list(DTYPES.values()))
    table = rng.choice([1, 2, 5] if n > 31 else [1, 2, 5, 31, 32, 33])
    ids = packed(rng, next(regions), lead, rng.choice([BOUNDARY, np.dtype(np.int64)]))
    Described(ids).view()[...] = np.random.default_rng(rng.getrandbits(64)).integers(0, table, lead)
    rows = place(rng, next(regions), [*lead, n], kind)
    if rng.random() < 0.4:
        w = place(rng, next(regions), [table, n], kind)
        return Call("embedding", {"w": w, "ids": ids}, {"out": rows}, options("pydet_embedding_options"))
    accumulate = rng.random() < 0.4
    wide = accumulate or rng.random() < 0.4
    dw = place(rng, next(regions), [table, n], np.dtype(np.float32) if wide else kind)
    given = {"accumulate": int(accumulate), "has_padding": rng.randrange(2), "padding": rng.randrange(table)}
    given = options("pydet_embedding_backward_options", **given)
    need = ffi.new("uint64_t *")
    expect(lib.pydet_embedding_backward_workspace(math.prod(lead), table, need) == 0, last_error())
    workspace = WORKSPACES[id(given)] = Workspace(need[0])
    given.workspace, given.workspace_size = workspace.pointer, need[0]
    return Call("embedding_backward", {"dout": rows, "ids": ids}, {"dw": dw}, given)


def make_fold(rng):
    shape = rng.choice([[], [1], [5], [16], [3, 7], [2, 33], [4, 0], [130], [2, 3, 11]])
    regions, kinds, fp32 = iter(rng.sample(REGIONS, 7)), list(DTYPES.values()), np.dtype(np.float32)
    accumulate = rng.random() < 0.3
    count = rng.randint(1, 5)
    if rng.random() < 0.4:  # of one tensor, which Python alone takes
        inputs = {"parts": packed(rng, next(regions), [count, *shape], fp32, gap=rng.choice([0, 0, 1, 7]))}
    else:
        inputs = {f"parts[{i}]": packed(rng, next(regions), shape, fp32) for i in range(count)}
    like = rng.choice([shape, shape[-1:]])
    inputs["bias"] = packed(rng, next(regions), like, rng.choice(kinds)) if rng.random() < 0.4 else None
    outputs = {"out": packed(rng, next(regions), shape, fp32 if accumulate else rng.choice(kinds))}
    return Call("fold", inputs, outputs, options("pydet_fold_options", order=rng.randrange(2), accumulate=accumulate))


def make_adamw(rng):
    """Its options are the step."""
    regions, kinds, fp32 = iter(rng.sample(REGIONS, 15)), list(DTYPES.values()), np.dtype(np.float32)
    inputs, outputs = {}, {}
    for i in range(rng.choice([1, 1, 2, 3])):
        shape, kind = rng.choice([[], [1], [5], [16], [3, 7], [2, 33], [4, 0], [130], [2, 3, 11]]), rng.choice(kinds)
        inputs[f"grads[{i}]"] = packed(rng, next(regions), shape, rng.choice(kinds))
        for name in ("params", "exp_avgs", "exp_avg_sqs", "masters"):
            there = name != "masters" or (kind != fp32 and rng.random() < 0.7)
            own = packed(rng, next(regions), shape, kind if name == "params" else fp32) if there else None
            outputs[f"{name}[{i}]"] = own
    given = {name: rng.choice([0, 0.5, 0.9, 0.999]) for name in ("beta1", "beta2", "beta1_power", "beta2_power")}
    given |= {name: rng.choice([0, 1e-42, 1e-8, 0.01, 3, 1e30]) for name in ("lr", "eps", "weight_decay")}
    return Call("adamw", inputs, outputs, options("pydet_adamw_step", **given))


def boundary(rng, region, groups, tokens):
    """Ends of groups that share the tokens out, or any numbers."""
    tensor = packed(rng, region, [groups], BOUNDARY)
    sorted_ = sorted(rng.randint(0, tokens) for _ in range(groups))
    odd = [rng.choice([-(2**31), -1, 0, 5, tokens, tokens + 1, 2**31 - 1]) for _ in range(groups)]
    Described(tensor).view()[...] = rng.choice([sorted_, sorted_, odd])
    return tensor


def begins_elsewhere(rng, region, inputs, shape, given):
    """A product whose sums begin at a tensor of their own, and the room that they may need."""
    inputs["initial"] = packed(rng, region, shape, np.dtype(np.float32))
    workspace = Workspace((4 * int(np.prod(shape, dtype=np.int64)) + 15) // 16 * 16)
    given.workspace, given.workspace_size = workspace.pointer, workspace.size
    WORKSPACES[id(given)] = workspace


def make_grouped(rng):
    depth, groups, tokens = rng.random() < 0.4, rng.choice([1, 1, 2, 3, 7]), rng.choice([0, 1, 3, 8, 17, 33, 40])
    rows, n = rng.choice([0, 1, 2, 7, 16, 17, 33]), rng.choice([0, 1, 2, 5, 17])
    regions, kinds, fp32 = iter(rng.sample(REGIONS, 7)), list(DTYPES.values()), np.dtype(np.float32)
    kind, accumulate = rng.choice(kinds), rng.random() < 0.3
    arithmetic = rng.choice(ARITHMETICS if kind.itemsize == 2 else ARITHMETICS[:2])

    def matrix(shape, kind):
        return place(rng, next(regions), shape, kind, order=[len(shape) - 1, len(shape) - 2])

    inputs = {
        "a": matrix([rows, tokens] if depth else [tokens, rows], kind),
        "b": matrix([tokens, n] if depth else [groups, rows, n], kind),
        "bias": matrix([groups, n], rng.choice(kinds)) if rng.random() < 0.4 else None,
        "group_start": boundary(rng, next(regions), groups, tokens) if rng.random() < 0.4 else None,
        "group_end": boundary(rng, next(regions), groups, tokens),
    }
    shape = [groups, rows, n] if depth else [tokens, n]
    outputs = {"out": matrix(shape, fp32 if accumulate else rng.choice(kinds))}
    given = options(
        "pydet_grouped_gemm_options",
        arithmetic=ARITHMETICS.index(arithmetic),
        accumulate=int(accumulate),
        k_chunk=rng.choice([0, 0, 16, 32]),
    )
    if not accumulate and rng.random() < 0.3:
        begins_elsewhere(rng, next(regions), inputs, shape, given)
    return Call("grouped_gemm", inputs, outputs, given)


def make_scaled_grouped(rng):
    groups, tokens, n = rng.choice([1, 1, 2, 3, 7]), rng.choice([0, 1, 3, 8, 17]), rng.choice([0, 1, 2, 5, 33, 129])
    k, regions = rng.choice([0, 1, 31, 32, 33, 127, 128, 129, 160]), iter(rng.sample(REGIONS, 9))
    n, blocks = min(n, 33) if groups > 3 else n, reference_fp8.groups
    along = rng.choice([128, 128, 32])  # scales' elements along k
    chunks = blocks(k, along)

    def matrix(shape, kind):
        return place(rng, next(regions), shape, kind, order=[len(shape) - 1, len(shape) - 2])

    def scale(lead, shapes):
        choice = rng.choice([None, [], *shapes])
        if choice is None:
            return None
        return place(rng, next(regions), (lead + choice) if choice else [], rng.choice(list(SCALES.values())))

    inputs = {
        "a": matrix([tokens, k], rng.choice(list(FP8.values()))),
        "a_scale": scale([], [[tokens, 1], [tokens, chunks]]),
        "b": matrix([groups, k, n], rng.choice(list(FP8.values()))),
        "b_scale": scale(rng.choice([[], [1], [groups]]), [[1, n], [chunks, n], [chunks, blocks(n)]]),
        "bias": matrix([groups, n], rng.choice(list(DTYPES.values()))) if rng.random() < 0.4 else None,
        "group_start": boundary(rng, next(regions), groups, tokens) if rng.random() < 0.4 else None,
        "group_end": boundary(rng, next(regions), groups, tokens),
    }
    varies = along_k(inputs["a_scale"], -1, k, along) or along_k(inputs["b_scale"], -2, k, along)
    accumulate = rng.random() < 0.3 and (varies or (inputs["a_scale"] is None and inputs["b_scale"] is None))
    out_kind = np.dtype(np.float32) if accumulate else rng.choice(list(DTYPES.values()))
    given = options("pydet_scaled_grouped_gemm_options", arithmetic=rng.choice([0, 1, 2]), accumulate=int(accumulate))
    given.k_chunk = along if varies or along == 32 else rng.choice([0, 64, 128, 160])
    outputs = {"out": matrix([tokens, n], out_kind)}
    of_chunks = varies or (inputs["a_scale"] is None and inputs["b_scale"] is None)
    if of_chunks and not accumulate and rng.random() < 0.4:
        begins_elsewhere(rng, next(regions), inputs, [tokens, n], given)
    elif given.arithmetic == 0 and not accumulate and given.k_chunk == 128 and rng.random() < 0.5:
        given = None
    return Call("scaled_grouped_gemm", inputs, outputs, given)


def numbers(rng, region, shape, numbers):
    """These, int32 and contiguous."""
    tensor = packed(rng, region, shape, BOUNDARY)
    if 0 not in shape:
        Described(tensor).view()[...] = np.reshape(numbers, shape)
    return tensor


def make_attention(rng):
    kind = rng.choice(["dense", "dense", "varlen", "paged", "paged"])
    sequences, groups, members = rng.choice([0, 1, 1, 2, 3]), rng.choice([1, 1, 2]), rng.choice([1, 1, 2, 3])
    heads, d, e = groups * members, rng.choice([8, 16, 24, 64]), rng.choice([8, 16, 40])
    queries, keys = rng.choice([0, 1, 2, 5, 9]), rng.choice([0, 1, 2, 7, 15, 16, 17, 33])
    if sequences == 1 and heads == 1 and rng.random() < 0.3:
        d, keys = 8, rng.choice([127, 128, 129, 260])  # what fills a region
    dtype, single = rng.choice(list(DTYPES.values())), np.dtype(np.float32)
    arithmetic = rng.choice(ARITHMETICS if dtype.itemsize == 2 else ARITHMETICS[:2])
    regions = iter(rng.sample(REGIONS, 10))
    heads_of = lambda shape, kind: place(rng, next(regions), shape, kind)
    few = lambda: [rng.choice([-(2**31), -1, 0, 1, keys // 2, keys, keys + 1, 2**31 - 1]) for _ in range(sequences)]
    inputs, optional = dict.fromkeys(("q", "k", "v", *OF_ATTENTION)), []
    packed_q, page = kind == "varlen" or (kind == "paged" and rng.random() < 0.4), rng.choice([1, 3, 8])
    if packed_q:
        rows = [sequences * queries, heads]
        ends = sorted(rng.randint(0, sequences * queries) for _ in range(sequences + 1))
        inputs["cu_seqlens_q"] = numbers(rng, next(regions), [sequences + 1], ends)
    else:
        rows = [sequences, heads, queries]
    if kind == "varlen":
        tokens = sequences * keys
        ends = [rng.choice([-5, 0, 0]), *sorted(rng.randint(0, tokens) for _ in range(sequences))]
        inputs["cu_seqlens_k"] = numbers(rng, next(regions), [sequences + 1], ends)
        of_keys = [tokens, groups]
    elif kind == "paged":
        pages = rng.choice([1, 2, 3])
        count = max(1, sequences * pages)
        table = [rng.choice([-1, count, *range(count)]) for _ in range(sequences * pages)]
        inputs["block_table"] = numbers(rng, next(regions), [sequences, pages], table)
        keys = page * pages
        inputs["seqlens_k"] = numbers(rng, next(regions), [sequences], few())
        of_keys = [count, page, groups]
    else:
        of_keys, optional = [sequences, groups, keys], ["seqlens_k"]
    inputs["q"], inputs["k"], inputs["v"] = (
        heads_of([*shape, width], dtype) for shape, width in ((rows, d), (of_keys, d), (of_keys, e))
    )
    outputs = {"out": heads_of([*rows, e], dtype), "lse": None}
    optional += ["sinks", "lse"] + ["first_key"] * (kind != "varlen")
    if kind != "varlen" and not packed_q:
        optional += ["allowed", "bias"]
    rng.shuffle(optional)
    pairs = [rng.choice([1, extent]) for extent in (sequences, heads, queries, keys)][rng.choice([0, 0, 2, 3]) :]
    for name in optional[: rng.choice([0, 0, 1, 2, 3])]:
        region = next(regions, None)
        if region is None:
            break
        if name == "lse":
            outputs["lse"] = place(rng, region, rows, single)
        elif name in ("first_key", "seqlens_k"):
            inputs[name] = numbers(rng, region, [sequences], few())
        elif name == "sinks":
            inputs[name] = packed(rng, region, [heads], rng.choice(list(DTYPES.values())))
        else:
            inputs[name] = place(rng, region, pairs, BOOL if name == "allowed" else rng.choice(list(DTYPES.values())))
    given = options(
        "pydet_attention_options",
        arithmetic=ARITHMETICS.index(arithmetic),
        causal=rng.randrange(2),
        kv_chunk=rng.choice([0, 128, 256]),
        softcap=rng.choice([0, 0, 0, 2.5]),
        scale=rng.choice([0, 0, 0.3, 4.0]),
    )
    if rng.random() < 0.3:
        given.window, given.window_left, given.window_right = 1, rng.choice([-1, 0, 1, 9]), rng.choice([-1, 0, 3])
    need = ffi.new("uint64_t *")
    extents = (
        1 if packed_q else sequences,
        heads,
        groups,
        rows[0] if packed_q else queries,
        max(keys, of_keys[0]),
        d,
        e,
    )
    expect(lib.pydet_attention_workspace(*extents, given, need) == 0, last_error())
    if need[0] and rng.random() < 0.7:
        workspace = WORKSPACES[id(given)] = Workspace(need[0])
        given.workspace, given.workspace_size = workspace.pointer, need[0]
    return Call("attention", inputs, outputs, given)


NO_PACK = ("seqlens_k", "first_key", "allowed", "bias")  # of the backward function of packs


def make_attention_backward(rng):
    packs = rng.random() < 0.3
    sequences, groups, members = rng.choice([0, 1, 1, 2, 3]), rng.choice([1, 1, 2]), rng.choice([1, 1, 2, 3])
    heads, d, e = groups * members, rng.choice([8, 16, 24]), rng.choice([8, 16])
    queries, keys = rng.choice([0, 1, 2, 5, 9]), rng.choice([0, 1, 2, 7, 15, 16, 17, 33])
    if sequences == 1 and heads == 1 and rng.random() < 0.3:
        d, queries, keys = 8, *rng.choice([(127, 3), (130, 5), (2, 129)])
    dtype, single = rng.choice(list(DTYPES.values())), np.dtype(np.float32)
    arithmetic = rng.choice(ARITHMETICS if dtype.itemsize == 2 else ARITHMETICS[:2])
    regions, accumulate = iter(rng.sample(REGIONS, 14)), rng.random() < 0.3
    inputs = dict.fromkeys(("dout", "q", "k", "v", "out", "lse", *OF_ATTENTION[:-1]))
    rows, of_keys = [sequences, heads, queries], [sequences, groups, keys]
    if packs:
        rows, of_keys = [sequences * queries, heads], [sequences * keys, groups]
        for name, tokens in (("cu_seqlens_q", rows[0]), ("cu_seqlens_k", of_keys[0])):
            ends = [rng.choice([-5, 0, 0]), *sorted(rng.randint(0, tokens) for _ in range(sequences))]
            inputs[name] = numbers(rng, next(regions), [sequences + 1], ends)
    for name, shape, width in (
        *(("dout", rows, e), ("q", rows, d), ("k", of_keys, d)),
        *(("v", of_keys, e), ("out", rows, e)),
    ):
        inputs[name] = place(rng, next(regions), [*shape, width], dtype)
    inputs["lse"] = place(rng, next(regions), rows, single)
    kinds = [dtype, single]
    outputs = {"dq": place(rng, next(regions), [*rows, d], rng.choice(kinds)), "dsinks": None}
    for name, width in (("dk", d), ("dv", e)):
        outputs[name] = place(rng, next(regions), [*of_keys, width], single if accumulate else rng.choice(kinds))
    if rng.random() < 0.3:
        inputs["sinks"] = packed(rng, next(regions), [heads], rng.choice(list(DTYPES.values())))
        outputs["dsinks"] = packed(rng, next(regions), [heads], single if accumulate else rng.choice(kinds))
    elif not packs:
        few = [rng.choice([-(2**31), -1, 0, 1, keys // 2, keys, keys + 1, 2**31 - 1]) for _ in range(sequences)]
        pairs = [rng.choice([1, extent]) for extent in (sequences, heads, queries, keys)][rng.choice([0, 0, 2, 3]) :]
        for name in rng.sample(NO_PACK, rng.choice([0, 1, 2])):
            if name in ("allowed", "bias"):
                kind = BOOL if name == "allowed" else rng.choice(list(DTYPES.values()))
                inputs[name] = place(rng, next(regions), pairs, kind)
            else:
                inputs[name] = numbers(rng, next(regions), [sequences], few)
    given = options(
        "pydet_attention_backward_options",
        arithmetic=ARITHMETICS.index(arithmetic),
        causal=rng.randrange(2),
        accumulate=int(accumulate),
        softcap=rng.choice([0, 0, 0, 2.5]),
        scale=rng.choice([0, 0, 0.3, 4.0]),
    )
    if rng.random() < 0.3:
        given.window, given.window_left, given.window_right = 1, rng.choice([-1, 0, 1, 9]), rng.choice([-1, 0, 3])
    return Call("attention_backward", inputs, outputs, given)


class Workspace:
    """A workspace with guard bytes on both sides and rubbish inside."""

    def __init__(self, size):
        self.size = size
        self.bytes = np.full(size + 1024, 0xA5, np.uint8)
        self.at = -self.bytes.ctypes.data % 256 + 256
        self.pointer = ffi.cast("void *", self.bytes.ctypes.data + self.at)

    def intact(self):
        outside = np.r_[self.bytes[: self.at], self.bytes[self.at + self.size :]]
        return bool((outside == 0xA5).all())


WORKSPACES: dict[int, Workspace] = {}

# ---- Mutations -----------------------------------------------------------------------------------------------------

MOST = 2**63 - 1
ODD = [-(2**63), -(2**62), -1, 0, 1, 2, 3, 15, 16, 17, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1]


def mutate_tensor(rng, call):
    """Changes one field of one descriptor. Returns what undoes it."""
    tensors = [t for t in (*call.inputs.values(), *call.outputs.values()) if t is not None]
    if not tensors:
        return None
    tensor = rng.choice(tensors)
    c = tensor.c
    kind = rng.choice(
        [
            "shape",
            "shape",
            "stride",
            "stride",
            "wrap",
            "ndim",
            "code",
            "bits",
            "lanes",
            "type",
            "data",
            "null",
            "offset",
            "noshape",
            "alias",
            "alias",
            "device",
        ]
    )
    before = ffi.new("pydet_tensor *", c[0])
    shape, strides, region = list(tensor.shape), list(tensor.strides), tensor.region

    def undo():
        c[0] = before[0]
        tensor.region = region
        for d, (e, s) in enumerate(zip(shape, strides)):
            tensor.shape[d], tensor.strides[d] = e, s

    if kind == "shape" and shape:
        d = rng.randrange(len(shape))
        tensor.shape[d] = rng.choice([min(shape[d], MOST - 1) + 1, max(shape[d] - 1, 0), rng.choice(ODD)])
    elif kind == "stride" and shape:
        d = rng.randrange(len(shape))
        c.strides = tensor.strides
        tensor.strides[d] = rng.choice([min(strides[d], MOST - 1) + 1, max(strides[d], -MOST) - 1, 0, rng.choice(ODD)])
    elif kind == "wrap" and shape:  # times the bytes of an element and an index: 0 modulo 2^64, or nearly
        c.strides = tensor.strides
        tensor.strides[0 if rng.random() < 0.7 else len(shape) - 1] = 2 ** rng.randint(59, 62) + rng.choice(
            [0, 0, 0, 1]
        )
    elif kind == "ndim":
        c.ndim = rng.choice([-1, 0, len(shape) - 1, 9, 2**31 - 1, -(2**31)])
    elif kind == "code":
        c.dtype.code = rng.choice([0, 1, 2, 3, 4, 5, 6, 10, 12, 14, 255])
    elif kind == "bits":
        c.dtype.bits = rng.choice([0, 8, 16, 32, 64, 128])
    elif kind == "lanes":
        c.dtype.lanes = rng.choice([0, 2, 4, 65535])
    elif kind == "type":
        c.dtype.code, c.dtype.bits, c.dtype.lanes = rng.choice(list(TYPES))
    elif kind == "data":
        c.data = ffi.cast("void *", int(ffi.cast("uintptr_t", c.data)) + rng.choice([-4, -2, -1, 1, 2, 3, 4]))
    elif kind == "null":
        c.data = ffi.NULL
    elif kind == "offset":
        c.byte_offset = rng.choice([1, 2, 4, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 4, 2**64 - 1])
    elif kind == "noshape":
        c.shape = ffi.NULL
    elif kind == "device":
        c.device.device_type, c.device.device_id = rng.choice(
            [(2, 0), (10, 0), (13, 1), (3, 0), (11, 5), (0, 0), (99, 0), (1, 7)]
        )
    elif kind == "alias":
        out = rng.choice([t for t in call.outputs.values() if t is not None] or tensors)
        other = rng.choice([t for t in tensors if t is not out] or [out])
        before = ffi.new("pydet_tensor *", out.c[0])
        c, tensor, region = out.c, out, out.region
        shape, strides = list(out.shape), list(out.strides)
        at = (
            int(ffi.cast("uintptr_t", other.c.data))
            + other.c.byte_offset
            + 4 * rng.choice([0, 0, 1, 2, 5, 16, -1, -8, 64])
        )
        out.c.data, out.c.byte_offset = ffi.cast("void *", at), 0
        out.region = other.region
    return undo


def mutate_options(rng, call):
    given = call.options
    if given is None:
        return
    fields = dict(ffi.typeof(given).item.fields)
    held = (
        "peers",
        "bias",
        "dbias",
        "initial",
        *OF_ATTENTION,
        *OF_SAMPLE,
        "dsinks",
    )  # the first would be believed, the others are set by invoke
    name = rng.choice([name for name in fields if name not in held])
    if name == "kernel":
        listed = [
            ffi.string(lib.pydet_kernel_name(i)).decode() for i in range(64) if lib.pydet_kernel_name(i) != ffi.NULL
        ]
        text = ffi.new(
            "char[]", rng.choice([*listed, "", "scalar", "cpu_gemm_ieee_", "%s%n%d" * 20, "k" * 5000]).encode()
        )
        KERNEL_NAMES[id(given)] = text
        given.kernel = text
    elif name == "workspace":
        shift = rng.choice([1, 2, 4, 8, 16])
        if rng.random() < 0.5:
            given.workspace = ffi.NULL
        elif given.workspace_size >= shift:
            given.workspace, given.workspace_size = given.workspace + shift, given.workspace_size - shift
    elif name == "logits":
        given.logits = rng.choice([*TYPES_IN_C.values(), (0, 8, 1), (2, 64, 1), (2, 32, 4), (0, 0, 1)])
    elif name in ("entropy", "lse", "mean", "greedy"):  # of no shape that rows have
        setattr(given, name, pointer(call.inputs["x"]))
    elif name == "workspace_size":
        given.workspace_size = rng.choice([0, 1, given.workspace_size // 2])
    elif name in (
        "eps",
        "weight_offset",
        "scale",
        "softcap",
        "temperature",
        "top_p",
        "min_p",
        "lr",
        "beta1_power",
        *OF_LOSS,
    ):
        setattr(given, name, rng.choice([-1.0, -0.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e30, 2.5]))
    elif name in ("kv_chunk", "window_left", "window_right"):
        setattr(given, name, rng.choice([*ODD, 64, 128, 200, 384]))
    elif name == "top_k":
        given.top_k = rng.choice([*ODD, 2**62])
    elif name == "k_chunk":
        given.k_chunk = rng.choice([*ODD, 8, 24, 33, 1024])
    elif name == "struct_size":
        own = ffi.sizeof(ffi.typeof(given).item)  # no later release's: that memory is not there
        grown = ("rmsnorm", "rmsnorm_backward", "gemm", "gemm_da", "gemm_db", "skinny_gemm")
        earlier = 0 if call.op in grown else own - 8  # of these own - 8 is an earlier release's
        given.struct_size = rng.choice([0, 1, 4, 8, earlier, own - 1, own + 1, own + 4, 2**32 - 1])
    else:
        setattr(given, name, rng.choice([-1, 0, 1, 2, 3, 5, 6, 99, 2**31 - 1, -(2**31)]))


KERNEL_NAMES: dict = {}


def mutate_pointer(rng, call):
    side = rng.choice([call.inputs, call.outputs])
    side[rng.choice(list(side))] = None


# ---- Judging a result ----------------------------------------------------------------------------------------------


def chosen(call, name, default=0):
    return getattr(call.options, name, default) if call.options is not None else default


def meaningless_options(call):
    """The name of an option that must have been refused, or None."""
    given = call.options
    if given is None:
        return None
    fields = dict(ffi.typeof(given).item.fields)
    rules = {
        "struct_size": lambda v: v == ffi.sizeof(ffi.typeof(given).item),
        "reserved": lambda v: v == 0,
        "arithmetic": lambda v: 0 <= v < len(ARITHMETICS),
        "k_chunk": lambda v: v >= 0 and v % (32 if call.op.startswith("scaled") else 16) == 0,
        "granularity": lambda v: 0 <= v < len(GRANULARITIES),
        "power_of_two": lambda v: v in (0, 1),
        "given": lambda v: v in (0, 1),
        "order": lambda v: v in (0, 1),
        "causal": lambda v: v in (0, 1),
        "window": lambda v: v in (0, 1),
        "window_left": lambda v: -1 <= v <= 2**40,
        "window_right": lambda v: -1 <= v <= 2**40,
        "kv_chunk": lambda v: v >= 0 and v % 128 == 0,
        "scale": lambda v: (
            0 < abs(v) < float("inf") if call.op == "rotary_table" else v == 0 or 2.0**-100 <= v <= 2.0**100
        ),
        **dict.fromkeys(ROTARY_FLAGS, lambda v: v in (0, 1)),
        "softcap": lambda v: v == 0 or 2.0**-100 <= v <= 2.0**100,
        "log": lambda v: v in (0, 1),
        "logits": lambda v: (v.code, v.bits, v.lanes) in ((0, 0, 0), *DTYPES),
        "kind": lambda v: 0 <= v < len(reference_activation.KINDS),
        "temperature": lambda v: 0 <= v < float("inf") or call.inputs["temperatures"] is not None,
        "top_p": lambda v: 0 <= v <= 1 or call.inputs["top_ps"] is not None,
        "min_p": lambda v: 0 <= v <= 1 or call.inputs["min_ps"] is not None,
        "top_k": lambda v: v >= 0 or call.inputs["top_ks"] is not None,
        "accumulate": lambda v: v in (0, 1),
        "label_smoothing": lambda v: 0 <= v <= 1,
        "z_loss": lambda v: 0 <= v <= float(np.finfo(np.float32).max),
        "reduction": lambda v: v in (0, 1, 2),
        "has_ignore_index": lambda v: v in (0, 1),
        "ignore_index": lambda v: given.has_ignore_index or v in (0, -100),
        "has_padding": lambda v: v in (0, 1),
        "mode": lambda v: v in (0, 1),
        "weights_constant": lambda v: v in (0, 1),
        "eps": lambda v: 0 <= v < float("inf"),
        "weight_offset": lambda v: abs(v) < float("inf"),
        **dict.fromkeys(("lr", "weight_decay"), lambda v: 0 <= v < 2.0**128),
        **dict.fromkeys(("beta1", "beta2", "beta1_power", "beta2_power"), lambda v: 0 <= v < 1),
    }
    return next((name for name, fine in rules.items() if name in fields and not fine(getattr(given, name))), None)


def expected_gemm(call, before):
    """The outputs by the model, from what the descriptors said before the call."""
    out_name = ORDER[call.op][-1]
    first, second = before[ORDER[call.op][0]], before[ORDER[call.op][1]]
    bias, old = before.get("bias"), before[out_name]
    arithmetic = ARITHMETICS[chosen(call, "arithmetic") or 1]
    accumulate = bool(chosen(call, "accumulate"))
    expect(first.dtype == second.dtype, "accepted mixed inputs")
    expect(not accumulate or old.dtype.itemsize == 4, "accumulated into", old.dtype)
    initial = before.get("initial")
    if initial is not None:
        expect(not accumulate, "accumulated, and began elsewhere")
        expect(initial.shape == old.shape and initial.dtype == np.float32, "began at", initial.dtype, initial.shape)
    expect(arithmetic == "ieee" or first.dtype.itemsize == 2, "took fp32 in", arithmetic)
    if call.op == "gemm_da":
        second = second.swapaxes(-1, -2)
    elif call.op == "gemm_db":
        first = first.swapaxes(-1, -2)
    elif call.op == "skinny_gemm":
        second = second.T
    expect(first.shape[-1] == second.shape[-2], "accepted inner dimensions that differ")
    shape = (*np.broadcast_shapes(first.shape[:-2], second.shape[:-2]), *first.shape[-2:-1], second.shape[-1])
    if call.op == "skinny_gemm":
        shape = (*first.shape[:-1], second.shape[-1])
    expect(old.shape == shape, "accepted an output of", old.shape, "for", shape)
    if 0 in shape:
        return {out_name: old}
    if call.op == "skinny_gemm":  # as one matrix
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        first, old = first.reshape(rows, first.shape[-1]), old.reshape(rows, shape[-1])
        bias = bias if bias is None or bias.ndim == 1 else bias.reshape(rows, shape[-1])
        initial = None if initial is None else initial.reshape(rows, shape[-1])
    result = reference.gemm(
        first,
        second,
        bias=bias,
        out=old.copy(),
        accumulate=accumulate,
        initial=initial,
        arithmetic=arithmetic,
        k_chunk=chosen(call, "k_chunk") or None,
    )
    return {out_name: result.reshape(shape)}


def expected_rmsnorm(call, before):
    x, y = before["x"], before["y"]
    expect(y.shape == x.shape and y.dtype == x.dtype, "accepted y unlike x")
    if not y.size:
        return {}
    results = reference.rmsnorm(
        x,
        before.get("weight"),
        eps=call.options.eps,
        bias=before.get("bias"),
        residual=before.get("residual"),
        weight_offset=call.options.weight_offset,
    )
    return {name: result for name, result in zip(("y", "rstd", "sum"), results) if name in before}


def expected_rmsnorm_backward(call, before):
    # A gradient of a weight may be asked for where there is none: it does not depend on the weight.
    blocks = bool(call.options.block_sums)
    like = next((before[name] for name in ("weight", "dweight", "dbias") if name in before), before["x"][..., :0])
    if blocks and "weight" not in before and like.size:  # of the sums of blocks, one
        like = like[0]
    if like.ndim == 2 and not len(like):
        return {}  # of no heads: all results are empty
    weight = before.get("weight", np.ones(like.shape if like.size else before["x"].shape[-1:], np.float32))

    def gradients(of, **options):
        kind = {} if of not in before else {"dweight_dtype": before[of].dtype}
        if blocks:
            expect(not before.keys() & {of} or before[of].dtype.itemsize == 4, "sums of blocks of another type")
            kind["block_sums"] = True
        return reference.rmsnorm_backward(
            before["dy"],
            before["x"],
            weight,
            before["rstd"],
            weight_offset=call.options.weight_offset,
            dresidual=before.get("dresidual"),
            **kind,
            **options,
        )

    accumulated = {"accumulate": True, "dweight": before["dweight"].copy()} if call.options.accumulate else {}
    dx, dweight = gradients("dweight", **accumulated)
    results = {"dx": dx, "dweight": dweight}
    if "dbias" in before:
        results["dbias"] = gradients("dbias", has_bias=True)[2]
    return {name: result for name, result in results.items() if name in before}


def expected_scaled_gemm(call, before):
    a, b, old = before["a"], before["b"], before["out"]
    a_scale, b_scale, bias = before.get("a_scale"), before.get("b_scale"), before.get("bias")
    arithmetic, accumulate = ARITHMETICS[chosen(call, "arithmetic") or 1], bool(chosen(call, "accumulate"))
    expect(a.dtype in FP8.values() and b.dtype in FP8.values(), "accepted factors of", a.dtype, b.dtype)
    expect(old.dtype in DTYPES.values() and (bias is None or bias.dtype in DTYPES.values()), "accepted a type of out")
    expect(not accumulate or old.dtype.itemsize == 4, "accumulated into", old.dtype)
    expect(arithmetic in ("ieee", "sm90"), "took fp8 in", arithmetic)
    (m, k), n, groups = a.shape[-2:], b.shape[-1], reference_fp8.groups
    expect(b.shape[-2] == k, "accepted inner dimensions that differ")
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n)
    expect(old.shape == shape, "accepted an output of", old.shape, "for", shape)
    k_chunk = chosen(call, "k_chunk", 128)
    along = 32 if k_chunk == 32 else 128
    chunks = groups(k, along)
    allowed = [(m, 1), (m, chunks)], [(1, n), (chunks, n), (chunks, groups(n))]
    for scale, shapes in zip((a_scale, b_scale), allowed):
        fits = scale is None or scale.shape == () or scale.shape[-2:] in shapes
        expect(fits and (scale is None or scale.dtype in SCALES.values()), "accepted a scale that does not fit")
    varies = along_k(a_scale, -1, k, along) or along_k(b_scale, -2, k, along)
    one_chunk = k <= 128 and (k_chunk == 0 or k_chunk > 128)
    expect(not varies or k_chunk == along or one_chunk, "accepted k_chunk", k_chunk, "with scales along k")
    expect(varies or not accumulate or (a_scale is None and b_scale is None), "accumulated under a scale of all of k")
    initial = before.get("initial")
    if initial is not None:
        expect(not accumulate, "accumulated, and began elsewhere")
        expect(initial.shape == old.shape and initial.dtype == np.float32, "began at", initial.dtype, initial.shape)
        expect(varies or (a_scale is None and b_scale is None), "began elsewhere under a scale of all of k")
    if 0 in shape:
        return {"out": old}
    start = old.copy() if accumulate else None
    result = reference_fp8.scaled_gemm(
        a, b, a_scale=a_scale, b_scale=b_scale, bias=bias, out=start, out_dtype=old.dtype, accumulate=accumulate,
        arithmetic=arithmetic, k_chunk=k_chunk, initial=initial,
    )  # fmt: skip
    return {"out": result}


def expected_norm_quantize(call, before):
    x, q, scale, granularity = before["x"], before["out"], before["scale"], chosen(call, "granularity")
    residual, weight, n = before.get("residual"), before.get("weight"), before["x"].shape[-1]
    expect(x.dtype in DTYPES.values() and q.dtype in FP8.values() and scale.dtype in SCALES.values(), "accepted types")
    expect(q.shape == x.shape and n > 0 and (weight is None or weight.shape == (n,)), "accepted shapes of", x.shape)
    expect(granularity in (0, 1, 3), "accepted granularity", granularity)
    for name in ("y", "sum", "residual"):
        expect(name not in before or before[name].shape == x.shape, "accepted", name, "of another shape")
    if 0 in x.shape:
        return {"out": q}
    of_norm = {"eps": chosen(call, "eps", np.float32(1e-6)), "weight_offset": chosen(call, "weight_offset")}
    y, rstd, *total = reference.rmsnorm(x, weight, residual=residual, **of_norm)
    options = {"granularity": GRANULARITIES[granularity], "dtype": q.dtype}
    as_rows = lambda t: t.reshape(-1, t.shape[-1])
    if granularity == 3:
        results = {"out": reference_fp8.quantize(as_rows(y), scale=scale, **options)[0].reshape(x.shape)}
    else:
        options |= {"scale_dtype": scale.dtype, "power_of_two": bool(chosen(call, "power_of_two"))}
        found = reference_fp8.quantize(as_rows(y), **options)
        results = {"out": found[0].reshape(x.shape), "scale": found[1].reshape(scale.shape)}
    results |= {"y": y, "rstd": rstd, **({"sum": total[0]} if total else {})}
    return {name: result for name, result in results.items() if name in before}


def expected_quantize(call, before):
    x, q, scale = before["x"], before["out"], before["scale"]
    granularity, given = GRANULARITIES[chosen(call, "granularity")], bool(chosen(call, "given"))
    expect(x.dtype in DTYPES.values() and q.dtype in FP8.values() and scale.dtype in SCALES.values(), "accepted types")
    expect(q.shape == x.shape, "accepted an output of", q.shape, "for", x.shape)
    turned = "transposed" in before
    expect(not turned or (granularity in ("group", "block") and not given), "transposed by", granularity)
    if 0 in x.shape:
        return {"out": q}
    options = {"granularity": granularity, "dtype": q.dtype}
    if given:
        return {"out": reference_fp8.quantize(x, scale=scale, **options)[0]}
    options |= {"scale_dtype": scale.dtype, "power_of_two": bool(chosen(call, "power_of_two"))}
    results = list(reference_fp8.quantize(x, transposed=turned, **options))
    results[1] = results[1].reshape(()) if granularity == "tensor" else results[1]
    return dict(zip(("out", "scale", "transposed", "transposed_scale"), results))


def expected_fold(call, before):
    out, order = before["out"], ["ordered", "tree"][call.options.order]
    parts = list(before["parts"]) if "parts" in before else [before[name] for name in parts_of(call)]
    bias, accumulate = before.get("bias"), call.options.accumulate
    expect(all(part.shape == out.shape and part.dtype.itemsize == 4 for part in parts), "accepted parts unlike out")
    return {"out": reference.fold(parts, bias=bias, out=out, out_dtype=out.dtype, order=order, accumulate=accumulate)}


def expected_adamw(call, before):
    step, count = call.options, len(call.inputs)
    lists = [[before.get(f"{name}[{i}]") for i in range(count)] for name in OF_ADAMW]
    for i, (param, grad, m, v, master) in enumerate(zip(*lists, strict=True)):
        given = [x for x in (grad, m, v, master) if x is not None]
        expect(all(x.shape == param.shape for x in given) and len(given) > 2, "accepted tensors of other shapes", i)
        expect(all(x.dtype == np.float32 for x in (m, v, *given[3:])), "accepted moments or masters of other types")
        expect(master is None or param.dtype != np.float32, "accepted a master beside float32")
    made = [[None if x is None else x.copy() for x in one] for one in lists]
    how = {name: getattr(step, name) for name in ("lr", "eps", "weight_decay")}
    pairs = {"betas": (step.beta1, step.beta2), "beta_powers": (step.beta1_power, step.beta2_power)}
    reference_adamw.adamw(*made, **how, **pairs)
    found = {f"{name}[{i}]": x for name, one in zip(OF_ADAMW, made, strict=True) for i, x in enumerate(one)}
    return {name: found[name] for name in call.outputs if found[name] is not None}


def expected_layernorm(call, before):
    x, y, chosen = before["x"], before["y"], call.options
    expect(y.shape == x.shape and y.dtype == x.dtype, "accepted y unlike x")
    results = reference.layernorm(
        x,
        before.get("weight"),
        before.get("bias"),
        eps=chosen.eps,
        residual=before.get("residual"),
        weight_offset=chosen.weight_offset,
    )
    return {name: result for name, result in zip(("y", "mean", "rstd", "sum"), results) if name in before}


def expected_layernorm_backward(call, before):
    options = {
        "weight_offset": call.options.weight_offset,
        "dresidual": before.get("dresidual"),
        "accumulate": bool(call.options.accumulate),
        "has_bias": False,
    }
    for name in ("dweight", "dbias"):
        options[name] = before[name].copy() if name in before else None
    results = reference.layernorm_backward(
        before["dy"], before["x"], before.get("weight"), before["mean"], before["rstd"], **options
    )
    return {name: result for name, result in zip(("dx", "dweight", "dbias"), results) if name in before}


def expected_softmax(call, before):
    rows, *others = before.values()
    expect(all(other.shape == rows.shape and other.dtype == rows.dtype for other in others), "accepted unlike rows")
    log = chosen(call, "log")
    if call.op == "softmax_backward":
        dy, y = (before[name].reshape(-1, rows.shape[-1]) for name in ("dy", "y"))
        return {"dx": reference.softmax_backward(dy, y, log=bool(log)).reshape(rows.shape)}
    x = rows.reshape(-1, rows.shape[-1])
    return {"y": (reference.log_softmax if log else reference.softmax)(x).reshape(rows.shape)}


def expected_activation(call, before):
    x, up = before["x"], before.get("up")
    expect(all(y.shape == x.shape and y.dtype == x.dtype for y in before.values()), "accepted unlike rows")
    kind = reference_activation.KINDS[chosen(call, "kind")]
    if call.op == "activation":
        return {"y": reference_activation.activation(x, kind, up=up)}
    found = reference_activation.activation_backward(before["dy"], x, kind, up=up)
    found = {"dx": found} if up is None else dict(zip(("dx", "dup"), found, strict=True))
    return {name: y for name, y in found.items() if name in before}


def expected_sample(call, before):
    x = before["x"]
    others = {name: y for name, y in before.items() if name != "x"}
    if call.op == "topk":
        values, index = before["values"], before["index"]
        fits = values.shape == index.shape and values.shape[:-1] == x.shape[:-1] and values.dtype == x.dtype
        expect(fits and index.dtype == np.int64 and 1 <= values.shape[-1] <= x.shape[-1], "accepted an unlike result")
        return dict(zip(("values", "index"), reference_sample.topk(x, values.shape[-1]), strict=True))
    expect(all(y.shape == x.shape[:-1] for y in others.values()), "accepted unlike rows")
    whole = {name for name in others if name in ("seed", "position", "token", "top_ks")}
    expect(all((y.dtype.kind == "i") == (name in whole) for name, y in others.items()), "accepted unlike types")
    given = {name: before.get(many, chosen(call, name)) for many, name in OF_SAMPLE.items()}
    found = reference_sample.sample(x, before["seed"], before["position"], **given)
    named = zip(("token", "log_prob", "filtered_log_prob"), found, strict=True)
    return {name: y for name, y in named if name in before}


def expected_embedding(call, before):
    ids, backward = before["ids"], call.op == "embedding_backward"
    rows, table = (before["dout"], before["dw"]) if backward else (before["out"], before["w"])
    expect(ids.dtype.kind == "i" and ids.shape == rows.shape[:-1], "accepted ids that do not fit")
    expect(table.ndim == 2 and table.shape[1] == rows.shape[-1], "accepted a table that does not fit")
    expect(((ids >= 0) & (ids < len(table))).all(), "accepted an id that is no row's")
    if not backward:
        expect(rows.dtype == table.dtype, "accepted another type")
        return {"out": reference_embedding.embedding(table, ids)}
    accumulate = bool(chosen(call, "accumulate"))
    expect(
        table.dtype == np.float32 or (table.dtype == rows.dtype and not accumulate), "accepted a sum of", table.dtype
    )
    padding = chosen(call, "padding") if chosen(call, "has_padding") else None
    expect(padding is None or 0 <= padding < len(table), "accepted the padding id", padding)
    given = {"padding_idx": padding, "out": table, "accumulate": accumulate}
    return {"dw": reference_embedding.embedding_backward(rows, ids, **given)}


def expected_rotary_table(call, before):
    places, frequencies, cos, sin = (before[name] for name in ("positions", "frequencies", "cos", "sin"))
    expect(places.shape == cos.shape[:-1] and sin.shape == cos.shape, "accepted shapes that do not fit")
    expect(frequencies.dtype == np.float32 and sin.dtype == cos.dtype, "accepted other types")
    expect(cos.shape[-1] in (frequencies.size, 2 * frequencies.size), "accepted a table that does not fit")
    scale = 1.0 if call.options is None else chosen(call, "scale")
    expect(math.isfinite(scale) and scale != 0, "accepted the scale", scale)
    given = {"scale": scale, "twice": cos.shape[-1] != frequencies.size, "out_dtype": cos.dtype}
    return dict(zip(("cos", "sin"), reference_rotary.rotary_table(places, frequencies, **given), strict=True))


def expected_rotary(call, before):
    q, k, cos, sin = (before.get(name) for name in ("q", "k", "cos", "sin"))
    how = {name: chosen(call, name) for name in ROTARY_FLAGS}
    expect(all(x in (0, 1) for x in how.values()), "accepted a flag that is none")
    expect(q.shape == before["q_out"].shape and cos.shape == sin.shape, "accepted shapes that do not fit")
    expect(cos.dtype == sin.dtype and (k is None or k.dtype == q.dtype), "accepted other types")
    expect((k is None) == (before.get("k_out") is None), "accepted one of k and k_out")
    most = q.shape[-1] // (1 if how["whole"] else 2)
    expect(0 < cos.shape[-1] <= most and not (how["whole"] and cos.shape[-1] % 2), "accepted a table that does not fit")
    spread = [np.broadcast_to(x, (*q.shape[:-2], x.shape[-1])) for x in (cos, sin)]
    found = reference_rotary.rotary(q, k, *spread, **how, out_dtype=before["q_out"].dtype)
    return {name: x for name, x in zip(("q_out", "k_out"), found, strict=True) if x is not None}


def expected_scan(call, before):
    op, got = call.op, {name: before.get(name) for name in ORDER[call.op]}
    conv, back, cu = op.startswith("causal"), op.endswith("backward"), got["cu_seqlens"]
    x = got["v" if op.startswith("gated") else "x"]
    count = len(x) if cu is None else len(cu) - 1
    if cu is not None:
        expect(len(x) == 1 and cu.ndim == 1 and cu[0] == 0 and cu[-1] == x.shape[1], "accepted a pack that is none")
        expect((np.diff(cu) >= 0).all(), "accepted boundaries that descend")
    fp32, rows, numbers = np.dtype(np.float32), x.shape, x.shape[:3]
    if conv:
        channels, taps = got["w"].shape
        expect(x.ndim == 3 and channels == x.shape[2] and 1 <= taps <= 64, "accepted weights that do not fit")
        want = dict.fromkeys(("x", "y", "dy", "dx"), (rows, x.dtype))
        want |= dict.fromkeys(("initial", "dinitial"), ((count, taps - 1, channels), x.dtype))
        want |= {"dw": ((count, channels, taps), fp32), "dbias": ((count, channels), fp32), "bias": ((channels,), None)}
    else:
        heads, width = x.shape[2:]
        of_group = got["k" if op.startswith("gated") else "b"].shape
        groups, states = of_group[2:]
        expect(of_group[:2] == rows[:2] and groups and heads % groups == 0, "accepted groups that do not fit")
        expect(1 <= states <= 512, "accepted states of", states)
        of_states = (count, heads, states, width) if op.startswith("gated") else (count, heads, width, states)
        want = dict.fromkeys(("initial", "final", "dfinal", "dinitial"), (of_states, fp32))
        want |= dict.fromkeys(("x", "y", "dy", "dx", "v", "o", "dout", "dv"), (rows, x.dtype))
        of_type = {
            "dt": numbers,
            "b": of_group,
            "c": of_group,
            "q": of_group,
            "k": of_group,
            "g": numbers,
            "beta": numbers,
        }
        for name, shape in of_type.items():
            if got.get(name) is not None:
                want |= {name: (shape, None), f"d{name}": (shape, got[name].dtype)}
        if "a" in got:
            of_a = (heads, states) if got["a"].ndim == 2 else (heads,)
            want |= {
                "a": (of_a, fp32),
                "da": ((count, *of_a), fp32),
                "d": ((heads,), fp32),
                "dd": ((count, heads), fp32),
            }
            expect(not back or (got["d"] is None) == (got["dd"] is None), "accepted one of d and dd")
    for name, array in got.items():
        if array is not None and name in want:
            shape, kind = want[name]
            expect(array.shape == shape, "accepted", name, array.shape, "for", shape)
            expect(kind is None or array.dtype == kind, "accepted", name, "of", array.dtype)
    given = {name: got[name] for name in ("initial", "cu_seqlens", "dfinal") if got.get(name) is not None}
    function = getattr(reference_scan, op)
    if conv and not back:
        return {"y": function(x, got["w"], got["bias"], **given)}
    if conv:
        results = function(got["dy"], x, got["w"], bias=True, return_initial=True, **given)
        names = ("dx", "dw", "dbias", "dinitial")
    elif op.startswith("selective"):
        operands = [got[name] for name in ("x", "dt", "a", "b", "c", "d")]
        names = ("dx", "ddt", "da", "db", "dc", "dd", "dinitial") if back else ("y", "final")
        results = function(got["dy"], *operands, return_initial=True, **given) if back else None
    else:
        operands = [got[name] for name in ("q", "k", "v", "g", "beta")]
        names = ("dq", "dk", "dv", "dg", "dbeta", "dinitial") if back else ("o", "final")
        results = function(got["dout"], *operands, return_initial=True, **given) if back else None
    if results is None:
        results = function(*operands, return_final=True, **given)
    return {name: result for name, result in zip(names, results, strict=True) if got[name] is not None}


def expected_log_prob(call, before):
    x, index = before["x"], before["index"]
    of_row = before["log_prob" if call.op == "log_prob" else "dlog_prob"]
    expect(
        index.dtype.kind == "i" and index.shape == of_row.shape == x.shape[:-1], "accepted an index that does not fit"
    )
    expect(of_row.dtype == np.float32, "accepted log-probabilities of", of_row.dtype)
    rows, columns = x.reshape(-1, x.shape[-1]), index.reshape(-1)
    if call.op == "log_prob":
        return {"log_prob": reference.log_prob(rows, columns).reshape(index.shape)}
    return {"dx": reference.log_prob_backward(of_row.reshape(-1), rows, columns).reshape(x.shape)}


def expected_head(call, before):
    x, w, bias, index = before["x"], before["w"], before.get("bias"), before["index"]
    back, lead, rows = call.op.endswith("backward"), x.shape[:-1], x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    expect(x.dtype == w.dtype and w.shape[1:] == x.shape[-1:] and w.shape[0], "accepted a weight that does not fit")
    expect(bias is None or bias.shape == w.shape[:1], "accepted a bias of", None if bias is None else bias.shape)
    expect(index.dtype.kind == "i" and index.shape == lead, "accepted an index that does not fit")
    for name in ("log_prob", "dlog_prob"):
        one = before.get(name)
        expect(one is None or (one.shape == lead and one.dtype == np.float32), "accepted a", name, "that does not fit")
    for name, like in (("dx", x), ("dw", w), ("dbias", w[:, 0] if w.shape[1] else np.empty(len(w)))):
        expect(before.get(name) is None or before[name].shape == like.shape, "accepted a", name, "of another shape")
    asked = (
        (0, 0, 0) if call.options is None else tuple(getattr(call.options.logits, f) for f in ("code", "bits", "lanes"))
    )
    kinds = {TYPES_IN_C[dtype]: dtype for dtype in map(np.dtype, DTYPES.values())} | {(0, 0, 0): x.dtype}
    expect(asked in kinds, "took logits of", asked)
    arithmetic = ARITHMETICS[chosen(call, "arithmetic") or 1]
    expect(arithmetic == "ieee" or x.dtype.itemsize == 2, "took fp32 in", arithmetic)
    how, columns = {"arithmetic": arithmetic, "k_chunk": chosen(call, "k_chunk") or None}, index.reshape(-1)
    if not len(rows) and not back:
        return {}
    z = reference.gemm(rows, w.T, bias=bias, out_dtype=kinds[asked], **how)
    read = chosen(call, "softcap") or None, chosen(call, "temperature") or 1.0
    expect(all(x is None or 0 < x < math.inf for x in read), "read logits by", read)
    v = reference_head.read(z, *read, reference_head.STEPS)[0]
    made = {"log_prob": reference.log_prob(v, columns).reshape(lead)} if before.get("log_prob") is not None else {}
    if not back:
        return made
    accumulate = bool(chosen(call, "accumulate"))
    by = before["dlog_prob"].reshape(-1), None, None, None
    d = reference_head.gradient(z, columns, by, x.dtype, *read, reference_head.STEPS)
    ones = np.ones((1, len(rows)), x.dtype)
    for name, left, right in (("dx", d, w), ("dw", d.T, rows), ("dbias", ones, d)):
        old = before.get(name)
        if old is None:
            continue
        continues = accumulate and name != "dx"
        expect(not continues or old.dtype == np.float32, "accumulated into", old.dtype)
        shape = (left.shape[0], right.shape[1])
        if continues and not len(rows):
            continue  # it stays as it is
        out = np.zeros(shape, old.dtype) if not continues else old.reshape(shape).copy()
        if 0 not in shape:
            made[name] = reference.gemm(left, right, out=out, accumulate=continues, **how).reshape(old.shape)
    return made


def expected_loss(call, before):
    x, w, bias, target = before["x"], before["w"], before.get("bias"), before["target"]
    lead, rows = x.shape[:-1], x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    expect(x.dtype == w.dtype and w.shape[1:] == x.shape[-1:] and w.shape[0], "accepted a weight that does not fit")
    expect(bias is None or bias.shape == w.shape[:1], "accepted a bias of", None if bias is None else bias.shape)
    expect(target.dtype.kind == "i" and target.shape == lead, "accepted a target that does not fit")
    reduction = ("mean", "sum", "none")[chosen(call, "reduction") or 0]
    like_loss = lead if reduction == "none" else ()
    for name, shape in (("loss", like_loss), ("dloss", like_loss), ("lse", lead)):
        one = before.get(name)
        expect(one is None or (one.shape == shape and one.dtype == np.float32), "accepted a", name, "that does not fit")
    for name, like in (("dx", x), ("dw", w), ("dbias", w[:, 0] if w.shape[1] else np.empty(len(w)))):
        expect(before.get(name) is None or before[name].shape == like.shape, "accepted a", name, "of another shape")
    asked = (0, 0, 0)
    if call.options is not None:
        asked = tuple(getattr(call.options.logits, field) for field in ("code", "bits", "lanes"))
    kinds = {TYPES_IN_C[dtype]: dtype for dtype in map(np.dtype, DTYPES.values())} | {(0, 0, 0): x.dtype}
    expect(asked in kinds, "took logits of", asked)
    arithmetic, accumulate = ARITHMETICS[chosen(call, "arithmetic") or 1], bool(chosen(call, "accumulate"))
    expect(arithmetic == "ieee" or x.dtype.itemsize == 2, "took fp32 in", arithmetic)
    how = {"arithmetic": arithmetic, "k_chunk": chosen(call, "k_chunk") or None, "reduction": reduction}
    how |= {"softcap": chosen(call, "softcap") or None, "temperature": chosen(call, "temperature") or 1.0}
    how |= {name: chosen(call, name) or 0 for name in OF_LOSS} | {"logits_dtype": kinds[asked], "bias": bias}
    how["ignore_index"] = chosen(call, "ignore_index") if chosen(call, "has_ignore_index") else -100
    if call.op.endswith("backward") and before.get("lse") is not None:
        how["lse"] = before["lse"].reshape(-1)
    dloss = before.get("dloss")
    dloss = dloss if dloss is None or reduction != "none" else dloss.reshape(-1)
    sums = {name: before.get(name) for name in ("dw", "dbias")}
    for name, old in sums.items():
        expect(old is None or not accumulate or old.dtype == np.float32, "accumulated into", name)
    names = [name for name in ORDER[call.op] if name in call.outputs and before.get(name) is not None]
    if not len(rows):
        nothing = {"loss": reference_head.NAN if reduction == "mean" else np.float32(0)}
        kept = {name for name in ("dw", "dbias") if accumulate}
        return {name: np.full_like(before[name], nothing.get(name, 0)) for name in names if name not in kept}
    if accumulate:
        how |= sums
    dtypes = [np.float32 if before.get(name) is None else before[name].dtype for name in ("dx", "dw", "dbias")]
    found = reference_head.cross_entropy(
        dloss, rows, w, target.reshape(-1), functions=reference_head.STEPS, dtypes=dtypes, **how
    )
    names += ["lse"] if "lse" in call.outputs and before.get("lse") is not None else []
    return {name: getattr(found, name).reshape(before[name].shape) for name in names}


def expected_grouped_gemm(call, before):
    a, b, bias, old = before["a"], before["b"], before.get("bias"), before["out"]
    end, start = before["group_end"], before.get("group_start")
    arithmetic, accumulate = ARITHMETICS[chosen(call, "arithmetic") or 1], bool(chosen(call, "accumulate"))
    expect(a.dtype == b.dtype, "accepted mixed inputs")
    expect(not accumulate or old.dtype.itemsize == 4, "accumulated into", old.dtype)
    expect(arithmetic == "ieee" or a.dtype.itemsize == 2, "took fp32 in", arithmetic)
    expect(a.ndim == 2 and b.ndim in (2, 3) and b.shape[-2] == a.shape[1], "accepted shapes", a.shape, b.shape)
    groups = old.shape[0] if b.ndim == 2 else b.shape[0]
    shape = (groups, len(a), b.shape[1]) if b.ndim == 2 else (len(a), b.shape[2])
    expect(old.shape == shape, "accepted an output of", old.shape, "for", shape)
    expect(bias is None or bias.shape == (groups, shape[-1]), "accepted a bias that does not fit")
    for boundary in (end, start):
        fits = boundary is None or (boundary.dtype == BOUNDARY and boundary.shape == (groups,))
        expect(fits, "accepted boundaries that do not fit")
    k_chunk, initial = chosen(call, "k_chunk") or None, before.get("initial")
    if initial is not None:
        expect(not accumulate, "accumulated, and began elsewhere")
        expect(initial.shape == old.shape and initial.dtype == np.float32, "began at", initial.dtype, initial.shape)
    result = reference.grouped_gemm(
        a, b, end, start, bias=bias, out=old.copy(), accumulate=accumulate, arithmetic=arithmetic, k_chunk=k_chunk,
        initial=initial,
    )  # fmt: skip
    return {"out": result}


def expected_scaled_grouped_gemm(call, before):
    a, b, old = before["a"], before["b"], before["out"]
    a_scale, b_scale, bias = before.get("a_scale"), before.get("b_scale"), before.get("bias")
    end, start = before["group_end"], before.get("group_start")
    arithmetic, accumulate = ARITHMETICS[chosen(call, "arithmetic") or 1], bool(chosen(call, "accumulate"))
    expect(a.dtype in FP8.values() and b.dtype in FP8.values(), "accepted factors of", a.dtype, b.dtype)
    expect(old.dtype in DTYPES.values() and (bias is None or bias.dtype in DTYPES.values()), "accepted a type of out")
    expect(not accumulate or old.dtype.itemsize == 4, "accumulated into", old.dtype)
    expect(arithmetic in ("ieee", "sm90"), "took fp8 in", arithmetic)
    expect(a.ndim == 2 and b.ndim == 3 and b.shape[1] == a.shape[1], "accepted shapes", a.shape, b.shape)
    (tokens, k), (groups, _, n), blocks = a.shape, b.shape, reference_fp8.groups
    expect(old.shape == (tokens, n), "accepted an output of", old.shape)
    expect(bias is None or bias.shape == (groups, n), "accepted a bias that does not fit")
    for boundary in (end, start):
        fits = boundary is None or (boundary.dtype == BOUNDARY and boundary.shape == (groups,))
        expect(fits, "accepted boundaries that do not fit")
    k_chunk = chosen(call, "k_chunk", 128)
    along = 32 if k_chunk == 32 else 128
    chunks = blocks(k, along)
    fits = a_scale is None or a_scale.shape in ((), (tokens, 1), (tokens, chunks))
    if b_scale is not None and b_scale.shape:
        fits &= b_scale.shape[-2:] in ((1, n), (chunks, n), (chunks, blocks(n)))
        fits &= b_scale.shape[:-2] in ((), (1,), (groups,))
    expect(fits, "accepted a scale that does not fit")
    expect(all(s is None or s.dtype in SCALES.values() for s in (a_scale, b_scale)), "accepted a type of scale")
    varies = along_k(a_scale, -1, k, along) or along_k(b_scale, -2, k, along)
    one_chunk = k <= 128 and (k_chunk == 0 or k_chunk > 128)
    expect(not varies or k_chunk == along or one_chunk, "accepted k_chunk", k_chunk, "with scales along k")
    expect(varies or not accumulate or (a_scale is None and b_scale is None), "accumulated under a scale of all of k")
    initial = before.get("initial")
    if initial is not None:
        expect(not accumulate, "accumulated, and began elsewhere")
        expect(initial.shape == old.shape and initial.dtype == np.float32, "began at", initial.dtype, initial.shape)
        expect(varies or (a_scale is None and b_scale is None), "began elsewhere under a scale of all of k")
    if 0 in old.shape:
        return {"out": old}
    result = reference_fp8.scaled_grouped_gemm(
        a, b, end, start, a_scale=a_scale, b_scale=b_scale, bias=bias, out=old.copy(), accumulate=accumulate,
        arithmetic=arithmetic, k_chunk=k_chunk, initial=initial,
    )  # fmt: skip
    return {"out": result}


def expected_attention(call, before):
    """Each sequence by itself, wherever its tokens lie."""
    q, k, v, out = (before[name] for name in ("q", "k", "v", "out"))
    of_q, of_k, table, lengths, first = (
        before.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k", "first_key")
    )
    given = call.options
    expect(q.dtype == k.dtype == v.dtype == out.dtype and q.dtype in DTYPES.values(), "accepted types")
    expect(q.ndim == (4 if of_q is None else 3) and k.ndim == v.ndim == (4 if of_k is None else 3), "accepted ranks")
    sequences = len(q) if of_q is None else len(of_q) - 1
    wanted = {"cu_seqlens_q": (sequences + 1,), "cu_seqlens_k": (sequences + 1,), "seqlens_k": (sequences,)}
    wanted |= {"first_key": (sequences,), "block_table": (sequences, 0 if table is None else table.shape[1])}
    for name, shape in wanted.items():
        fits = name not in before or (before[name].dtype == BOUNDARY and before[name].shape == shape)
        expect(fits, "accepted", name, "that does not fit")
    expect(of_k is None or (table is None and lengths is None), "accepted a pack with pages or lengths")
    expect(table is None or lengths is not None, "accepted pages without lengths")
    groups = k.shape[1 if table is None else 2]
    heads, token = q.shape[1], 0 if of_q is not None else 2
    expect(k.shape[:-1] == v.shape[:-1] and k.shape[-1] == q.shape[-1], "accepted k and v unlike q")
    expect(groups > 0 and heads % groups == 0, "accepted heads")
    expect(out.shape == (*q.shape[:-1], v.shape[-1]), "accepted out")
    lse = before.get("lse")
    expect(lse is None or (lse.shape == q.shape[:-1] and lse.dtype == np.float32), "accepted lse")
    arithmetic = ARITHMETICS[given.arithmetic or 1]
    expect(arithmetic == "ieee" or q.dtype.itemsize == 2, "took fp32 in", arithmetic)
    sinks, pairs = before.get("sinks"), {name: before[name] for name in ("allowed", "bias") if name in before}
    expect(sinks is None or (sinks.shape == (heads,) and sinks.dtype in DTYPES.values()), "accepted sinks")
    expect("allowed" not in pairs or pairs["allowed"].dtype == BOOL, "accepted a mask of another type")
    expect("bias" not in pairs or pairs["bias"].dtype in DTYPES.values(), "accepted a bias of another type")
    expect(not pairs or (of_q is None and of_k is None), "accepted a mask or bias of a pack")
    keys = k.shape[1] * table.shape[1] if table is not None else k.shape[0 if of_k is not None else 2]
    if table is not None and 0 in k.shape:
        keys = 0
    for name, x in pairs.items():
        full = (sequences, heads, q.shape[token], keys)
        expect(x.ndim <= 4 and np.broadcast_shapes(x.shape, full) == full, "accepted", name, x.shape)
        pairs[name] = np.broadcast_to(x.view(np.uint8) != 0 if name == "allowed" else x, full)
    window = tuple(None if x < 0 else x for x in (given.window_left, given.window_right)) if given.window else None
    how = {"scale": given.scale or None, "causal": bool(given.causal), "window": window, "sinks": sinks}
    how |= {"softcap": given.softcap or None, "arithmetic": arithmetic, "kv_chunk": given.kv_chunk or 1024}
    own = lambda ends, s, tokens: slice(*(min(max(int(x), 0), tokens) for x in (ends[s], max(ends[s], ends[s + 1]))))
    results = {"out": copy_of(out), "lse": None if lse is None else lse.copy()}
    for s in range(sequences):
        mine = slice(s, s + 1) if of_q is None else own(of_q, s, len(q))
        rows = q[mine][0] if of_q is None else q[mine].swapaxes(0, 1)
        if not rows.size:
            continue
        if of_k is not None:
            alone = [x[own(of_k, s, len(k))].swapaxes(0, 1) for x in (k, v)]
        elif table is not None:
            pages = [min(max(int(page), 0), len(k) - 1) for page in table[s]] if keys else []
            alone = [
                np.concatenate([x[:0].reshape(0, *x.shape[2:]), *(x[page] for page in pages)]).swapaxes(0, 1)
                for x in (k, v)
            ]
        else:
            alone = [k[s], v[s]]
        one = {name: x[s : s + 1] for name, x in pairs.items()}
        for name, x in (("first_key", first), ("seqlens_k", lengths)):
            one[name] = None if x is None else x[s : s + 1]
        found = reference_attention.attention(rows[None], *(x[None] for x in alone), return_lse=True, **one, **how)
        for name, x in zip(("out", "lse"), found):
            if results[name] is not None:
                results[name][mine] = x if of_q is None else x[0].swapaxes(0, 1)
    return {name: x for name, x in results.items() if x is not None}


def expected_attention_backward(call, before):
    names = ("dout", "q", "k", "v", "out", "lse")
    dout, q, k, v, out, lse = operands = [before[name] for name in names]
    of_q, of_k, lengths, first = (
        before.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "first_key")
    )
    given = call.options
    expect(len({x.dtype for x in operands[:5]}) == 1 and q.dtype in DTYPES.values(), "accepted types")
    expect(q.ndim == (4 if of_q is None else 3) and k.ndim == v.ndim == (4 if of_k is None else 3), "accepted ranks")
    sequences = len(q) if of_q is None else len(of_q) - 1
    wanted = {"cu_seqlens_q": (sequences + 1,), "cu_seqlens_k": (sequences + 1,)}
    for name, shape in (wanted | {"seqlens_k": (sequences,), "first_key": (sequences,)}).items():
        fits = name not in before or (before[name].dtype == BOUNDARY and before[name].shape == shape)
        expect(fits, "accepted", name, "that does not fit")
    expect(of_k is None or lengths is None, "accepted a pack with lengths")
    heads, groups = q.shape[1], k.shape[1]
    expect(k.shape[:-1] == v.shape[:-1] and k.shape[-1] == q.shape[-1], "accepted k and v unlike q")
    expect(groups > 0 and heads % groups == 0, "accepted heads")
    expect(out.shape == dout.shape == (*q.shape[:-1], v.shape[-1]), "accepted out and dout")
    expect(lse.shape == q.shape[:-1] and lse.dtype == np.float32, "accepted lse")
    results = {name: before[name] for name in ("dq", "dk", "dv", "dsinks") if name in before}
    expect(results and ("dk" in results) == ("dv" in results), "accepted results")
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        if name in results:
            kinds = [np.float32] if given.accumulate and name != "dq" else [np.float32, q.dtype]
            expect(results[name].shape == like.shape and results[name].dtype in kinds, "accepted", name)
    arithmetic = ARITHMETICS[given.arithmetic or 1]
    expect(arithmetic == "ieee" or q.dtype.itemsize == 2, "took fp32 in", arithmetic)
    sinks, pairs = before.get("sinks"), {name: before[name] for name in ("allowed", "bias") if name in before}
    expect(sinks is None or (sinks.shape == (heads,) and sinks.dtype in DTYPES.values()), "accepted sinks")
    dsinks = results.get("dsinks")
    expect(dsinks is None or (sinks is not None and dsinks.shape == (heads,)), "accepted dsinks")
    expect(dsinks is None or not given.accumulate or dsinks.dtype == np.float32, "accepted dsinks of", dsinks)
    expect("allowed" not in pairs or pairs["allowed"].dtype == BOOL, "accepted a mask of another type")
    expect("bias" not in pairs or pairs["bias"].dtype in DTYPES.values(), "accepted a bias of another type")
    expect(not pairs or (of_q is None and of_k is None), "accepted a mask or bias of a pack")
    for name, x in pairs.items():
        full = (sequences, heads, q.shape[2], k.shape[2])
        expect(x.ndim <= 4 and np.broadcast_shapes(x.shape, full) == full, "accepted", name, x.shape)
        pairs[name] = np.broadcast_to(x.view(np.uint8) != 0 if name == "allowed" else x, full)
    window = tuple(None if x < 0 else x for x in (given.window_left, given.window_right)) if given.window else None
    how = {"scale": given.scale or None, "causal": bool(given.causal), "window": window}
    how |= {"softcap": given.softcap or None, "arithmetic": arithmetic}
    own = lambda ends, s, tokens: slice(*(min(max(int(x), 0), tokens) for x in (ends[s], max(ends[s], ends[s + 1]))))
    found = {name: copy_of(x) for name, x in results.items()}
    # Each sequence by itself, and sums of sinks from one to the next.
    sums = np.zeros(heads, np.float32)
    if dsinks is not None and given.accumulate:
        sums = dsinks.copy()
    for s in range(sequences):
        rows = slice(s, s + 1) if of_q is None else own(of_q, s, len(q))
        keys = slice(s, s + 1) if of_k is None else own(of_k, s, len(k))
        of_rows, of_keys = (
            (lambda x: x) if ends is None else (lambda x: x.swapaxes(0, 1)[None]) for ends in (of_q, of_k)
        )
        alone = [(of_keys(x[keys]) if x is k or x is v else of_rows(x[rows])) for x in operands]
        one = {name: x[s : s + 1] for name, x in pairs.items()}
        for name, x in (("first_key", first), ("seqlens_k", lengths)):
            one[name] = None if x is None else x[s : s + 1]
        starts = {name: np.zeros(x.shape, np.float32) for name, x in (("dk", alone[2]), ("dv", alone[3]))}
        if given.accumulate and "dk" in results:
            starts = {name: of_keys(found[name][keys]).copy() for name in ("dk", "dv")}
        got = reference_attention.attention_backward(
            *alone, **one, **how, sinks=sinks, accumulate=True, dq=np.zeros(0, np.float32), dsinks=sums, **starts
        )
        sums = got[3] if sinks is not None else sums
        for name, x in zip(("dq", "dk", "dv"), got):
            if name in found:
                at, ends = (rows, of_q) if name == "dq" else (keys, of_k)
                x = x if ends is None else x[0].swapaxes(0, 1)
                kept = given.accumulate and name != "dq"
                found[name][at] = x if kept else reference.round_to(x, found[name].dtype)
    if dsinks is not None:
        found["dsinks"] = reference.round_to(sums + np.float32(0), dsinks.dtype)
    return found


EXPECTED = {
    "attention": expected_attention,
    "attention_backward": expected_attention_backward,
    "scaled_grouped_gemm": expected_scaled_grouped_gemm,
    "grouped_gemm": expected_grouped_gemm,
    "rmsnorm": expected_rmsnorm,
    "rmsnorm_quantize": expected_norm_quantize,
    "rmsnorm_backward": expected_rmsnorm_backward,
    "scaled_gemm": expected_scaled_gemm,
    "quantize": expected_quantize,
    "fold": expected_fold,
    "adamw": expected_adamw,
    "layernorm": expected_layernorm,
    "layernorm_backward": expected_layernorm_backward,
    "softmax": expected_softmax,
    "softmax_backward": expected_softmax,
    "activation": expected_activation,
    "activation_backward": expected_activation,
    "sample": expected_sample,
    "topk": expected_sample,
    "embedding": expected_embedding,
    "embedding_backward": expected_embedding,
    "rotary_table": expected_rotary_table,
    "rotary": expected_rotary,
    **dict.fromkeys(OF_SCANS, expected_scan),
    "log_prob": expected_log_prob,
    "log_prob_backward": expected_log_prob,
    "linear_log_prob": expected_head,
    "linear_log_prob_backward": expected_head,
    "linear_cross_entropy": expected_loss,
    "linear_cross_entropy_backward": expected_loss,
}

# ---- A case --------------------------------------------------------------------------------------------------------


def given_tensors(call):
    return {name: t for name, t in {**call.inputs, **call.outputs}.items() if t is not None}


def judge_overlap(call):
    """True where an output shares a byte with another tensor or with itself: such a call must be refused. An operand's
    place may be that of an activation's result."""
    described = {name: Described(t) for name, t in given_tensors(call).items()}
    reach = {name: d.offsets() for name, d in described.items() if d.sense == "inside" and 0 not in d.shape}
    for name in call.outputs:
        if name not in reach:
            continue
        if len(np.unique(reach[name])) != len(reach[name]):
            return True
        for other in reach:
            itself = call.op.startswith("activation") and other in call.inputs
            itself |= name == "final" and other == "initial"  # which may be each other
            itself = itself and np.array_equal(reach[name], reach[other])
            if other != name and not itself and np.intersect1d(reach[name], reach[other]).size:
                return True
    return False


WITHOUT_NUMBERS = ("cu_seqlens", "index", "target", "ids", "positions", *OF_ATTENTION[1:], "seed", "position", "token")
WITHOUT_NUMBERS += ("top_ks",)


def run_case(seed, number):
    """Runs one case and returns what came of it: "accepted" or the name of the status, and the way it went."""
    rng = random.Random(f"{seed}/{number}")
    WORKSPACES.clear()
    KERNEL_NAMES.clear()
    makers = {
        make_gemm: 4,
        make_norm: 3,
        make_scaled: 2,
        make_quantize: 1,
        make_fold: 2,
        make_grouped: 2,
        make_adamw: 1,
    }
    makers |= {make_scaled_grouped: 1, make_softmax: 1, make_attention: 2, make_attention_backward: 2}
    makers |= {
        make_norm_quantize: 1,
        make_activation: 1,
        make_sample: 1,
        make_embedding: 1,
        make_head: 1,
        make_loss: 1,
        make_rotary: 1,
        make_scan: 2,
    }
    make = rng.choices(list(makers), list(makers.values()))[0]
    call = make(rng)
    mutations = rng.choice([0, 1, 1, 1, 2, 3])
    by_python = rng.random() < 0.4 or "parts" in call.inputs
    for _ in range(mutations):
        change = mutate_tensor
        if not by_python:
            change = rng.choice(
                [mutate_tensor, mutate_tensor, mutate_tensor, mutate_options, mutate_options, mutate_pointer]
            )
        undo = change(rng, call)
        if undo is not None and any(Described(t).sense == "outside" for t in given_tensors(call).values()):
            undo()  # it would rightly be believed, and there is nothing there
    settle(call)
    by_python = by_python and python_can(call)
    tensors = given_tensors(call)
    used = {id(t.region): t.region for t in tensors.values()}.values()
    saved = [region.bytes.copy() for region in used]
    sense = {name: Described(t) for name, t in tensors.items()}
    nonsense = [name for name, d in sense.items() if d.sense == "nonsense"]
    before = {name: copy_of(sense[name].view()) for name in tensors if sense[name].sense == "inside"}

    forbidden = False
    if by_python:
        status, sentence, forbidden = invoke_python(rng, call)
    else:
        status = invoke(call)
        sentence = last_error() if status else ""
    workspace = WORKSPACES.get(id(call.options))
    expect(workspace is None or workspace.intact(), "wrote outside its workspace")
    if status != lib.PYDET_OK:
        expect(mutations > 0 or forbidden, "refused a call that is right:", sentence)
        expect(status_name(status).startswith("PYDET_") and status != lib.PYDET_DEVICE_ERROR, "status", status)
        named = sentence.startswith((call.op + ":", python_name(call) + ":"))
        expect(named and "\n" not in sentence and len(sentence) > 15, "sentence:", sentence)
        for region, old in zip(used, saved):
            expect((region.bytes == old).all(), "refused, yet memory changed:", sentence)
        return status_name(status) + (" (Python)" if by_python else "")
    expect(not forbidden, "wrote what is read-only or a copy, or took an array interface that makes no sense")
    expect(not nonsense, "accepted nonsense in", nonsense)
    expect(not judge_overlap(call), "accepted an output that overlaps")
    expect(meaningless_options(call) is None, "accepted", meaningless_options(call))
    forced, ran = chosen(call, "kernel", ffi.NULL), ffi.string(lib.pydet_last_kernel())
    several = call.op.startswith("linear_")  # steps, one of which is forced
    fine = by_python or several or forced == ffi.NULL or ran in (b"", ffi.string(forced))
    expect(fine, "forced", forced, "but ran", ran)
    fp8 = call.op in ("scaled_gemm", "scaled_grouped_gemm", "quantize", "rmsnorm_quantize")
    numbers = [x for name, x in before.items() if not name.startswith("group_") and name not in WITHOUT_NUMBERS]
    expect(fp8 or all(x.dtype in DTYPES.values() for x in numbers), "accepted a type that is no float of 16 or 32 bits")
    vast = any(d.sense == "vast" for d in sense.values())
    expected = {} if vast else EXPECTED.get(call.op, expected_gemm)(call, before)
    for name, want in expected.items():
        got = sense[name].view()
        expect(
            got.shape == want.shape and got.dtype == want.dtype,
            name,
            "accepted as",
            got.dtype,
            got.shape,
            "for",
            want.dtype,
            want.shape,
        )
        wrong = np.argwhere(reference.bits(got) != reference.bits(want))
        expect(not len(wrong), call.op, name, "has", len(wrong), "wrong elements, the first at", wrong[:1].tolist())
    for name in call.outputs:
        if name in before and before[name].size:
            assign(sense[name].view(), before[name])
    for region, old in zip(used, saved):
        expect((region.bytes == old).all(), "changed something beside its outputs")
    return "accepted" + (" (Python)" if by_python else "")


# ---- Running -------------------------------------------------------------------------------------------------------


ENDED = 0xFF  # the last byte of the progress file, after the number of the case: this process has said what came of it


def work(seconds, seed, only, progress, die_at):
    faulthandler.enable()
    started = time.monotonic()
    outcomes = collections.Counter()
    with open(progress, "r+b") as file, mmap.mmap(file.fileno(), 9) as current:
        number = 0 if only is None else only
        while True:
            current[:8] = number.to_bytes(8, "little")
            if number == die_at:
                os._exit(1)
            try:
                outcomes[run_case(seed, number)] += 1
            except Exception as error:
                print(f"fuzz: seed {seed}, case {number}: {type(error).__name__}: {error}", file=sys.stderr)
                current[8] = ENDED
                if not isinstance(error, Failure):
                    raise
                return 1
            number += 1
            if only is not None or time.monotonic() - started > seconds:
                current[8] = ENDED
                break
    total = sum(outcomes.values())
    print(
        f"fuzz: seed {seed}, {total} cases in {time.monotonic() - started:.1f} s, none wrong: "
        + ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    )
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one case only")
    parser.add_argument("--progress", help=argparse.SUPPRESS)
    parser.add_argument("--die-at", type=int, help=argparse.SUPPRESS)  # ends that case as a sanitizer does, for a test
    arguments = parser.parse_args()
    if arguments.progress:
        return work(arguments.seconds, arguments.seed, arguments.case, arguments.progress, arguments.die_at)
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(bytes(9))
        progress.flush()
        code = subprocess.call([sys.executable, __file__, *sys.argv[1:], "--progress", progress.name])
        *number, ended = pathlib.Path(progress.name).read_bytes()
        if ended != ENDED:  # whatever its status: a sanitizer ends a process with 1
            number = int.from_bytes(number, "little")
            print(f"fuzz: seed {arguments.seed}, case {number}: the process died with status {code}", file=sys.stderr)
    return 0 if code == 0 and ended == ENDED else 1


if __name__ == "__main__":
    sys.exit(main())
