"""Attention of libpydet_hip.so, forward and backward, its shipped machine code in the interpreter of test_hip.py.

The problems are those that every kernel is run on (attention_cases.py); their bits are held to the CPU's.
"""

import numpy as np

import attention_cases
import capi
import pydet
from attention_cases import Shape, coin, integers
from cases import DTYPES, assert_same_bits, data
from fakehip import ARCHS
from reference import FLOAT32
from test_hip import ROCM, UNSUPPORTED, ffi, hip, last_kernel, library  # noqa: F401 -- fixtures

TYPES = ("fp32", "bf16", "fp16")
# Options of pydet.attention that are tensors.
TENSORS = (
    "sinks",
    "allowed",
    "bias",
    "first_key",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqlens_k",
    "block_table",
    "dsinks",
)


class OnHip:
    """pydet's functions of attention on arrays, by the HIP library. With a workspace where it can use one."""

    def __init__(self, hip, apart):
        self.hip, self.apart = hip, apart

    def _options(self, struct, kernel, extents, given, pair):
        """The C options of `given`, and the arrays that they hold."""
        held = {name: given.pop(name, None) for name in TENSORS}
        held = {name: x for name, x in held.items() if x is not None}
        for name in ("allowed", "bias"):
            if name in held:
                held[name] = np.broadcast_to(held[name], pair)
        window = given.pop("window", None)
        fields = {"arithmetic": {"ieee": 1}[given.pop("arithmetic")], "kernel": kernel}
        fields["causal"] = int(given.pop("causal", False))
        if window is not None:
            left, right = (-1 if x is None else x for x in window)
            fields |= {"window": 1, "window_left": left, "window_right": right}
        fields |= {name: given.pop(name) for name in ("scale", "softcap", "kv_chunk", "accumulate") if name in given}
        assert not given, given
        tensors = {name: capi.Tensor(x, device=(ROCM, 0)) for name, x in held.items()}
        options = capi.options(struct, **fields, **{name: t.c for name, t in tensors.items()})
        keep, size = [tensors], ffi.new("uint64_t *")
        workspace = struct.replace("_options", "_workspace")
        assert getattr(self.hip.lib, workspace)(*extents, options, size) == 0, self.hip.sentence()
        if self.apart and size[0]:
            memory = np.full(size[0] + 16, 0xA5, np.uint8)
            options.workspace = ffi.cast("void *", memory.ctypes.data + -memory.ctypes.data % 16)
            options.workspace_size = size[0]
            keep.append(memory)
        return options, list(held.values()), keep

    def _forward(self, q, k, v, *, out=None, return_lse, **given):
        packed, paged = q.ndim == 3, "block_table" in given
        heads, groups = q.shape[1], k.shape[2 if paged else 1]
        if packed and not paged:
            groups = k.shape[1]
        sequences = len(given["cu_seqlens_q"]) - 1 if packed else len(q)
        queries = q.shape[0] if packed else q.shape[2]
        keys = given["block_table"].shape[1] * k.shape[1] if paged else k.shape[0 if packed else 2]
        extents = sequences, heads, groups, queries, keys, q.shape[-1], v.shape[-1]
        pair = sequences, heads, queries, keys
        options, held, keep = self._options("pydet_attention_options", "hip_attention_ieee", extents, given, pair)
        shape = (*q.shape[:-1], v.shape[-1])
        out = np.full(shape, np.nan, q.dtype) if out is None else out
        lse = np.full(shape[:-1], np.nan, np.float32)
        self.hip.check("pydet_attention", options, q, k, v, out, lse, held=held)
        assert last_kernel(self.hip) == "hip_attention_ieee" and keep
        return out, lse

    def attention(self, q, k, v, **given):
        return self._forward(q, k, v, **given)

    def attention_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, **given):
        return self._forward(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **given)

    def attention_paged(self, q, k, v, table, seqlens_k, cu_seqlens_q=None, *, causal=True, **given):
        given |= {"block_table": table, "seqlens_k": seqlens_k, "causal": causal}
        return self._forward(q, k, v, **given, **({} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q}))

    def _backward(self, dout, q, k, v, out, lse, *, only=None, dq=None, dk=None, dv=None, **given):
        packed = q.ndim == 3
        sequences = len(given["cu_seqlens_q"]) - 1 if packed else len(q)
        queries, keys = (q.shape[0], k.shape[0]) if packed else (q.shape[2], k.shape[2])
        extents = sequences, q.shape[1], k.shape[1], queries, keys, q.shape[-1], v.shape[-1]
        if "sinks" in given and only is None and given.get("dsinks") is None:
            given["dsinks"] = np.zeros(len(given["sinks"]), np.float32)
        dsinks = given.get("dsinks")
        struct, kernel = "pydet_attention_backward_options", "hip_attention_backward_ieee"
        options, held, keep = self._options(struct, kernel, extents, given, (sequences, q.shape[1], queries, keys))
        made = {"dq": (dq, q), "dk": (dk, k), "dv": (dv, v)}
        made = {
            name: None
            if only and name[1] not in only
            else np.full(x.shape, np.nan, x.dtype)
            if given is None
            else given
            for name, (given, x) in made.items()
        }
        self.hip.check("pydet_attention_backward", options, dout, q, k, v, out, lse, *made.values(), held=held)
        assert last_kernel(self.hip) == "hip_attention_backward_ieee" and keep
        return [*made.values()] + ([] if dsinks is None else [dsinks])

    def attention_backward(self, *arguments, **given):
        return self._backward(*arguments, **given)

    def attention_varlen_backward(self, dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, **given):
        return self._backward(dout, q, k, v, out, lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **given)


# Around blocks of 64 and 128 keys and of 128 queries, the kernels' tiles of 16 rows and slices of 128 columns,
# segments that are folded, and each option. Small in D: the interpreter takes seconds for a problem.
def forward_problems(dtype):
    def of(*shape, kind="normal", **options):
        return attention_cases.operands(Shape(*shape), dtype, kind), options

    bias, sinks = data("normal", (2, 4, 3, 40), DTYPES[dtype], 7), data("normal", (4,), FLOAT32, 5)
    two = 2, 4, 2, 3, 40, 16, 8
    yield "one", of(1, 1, 1, 1, 1, 8, 8)
    yield "16 rows, 127 keys", of(1, 2, 1, 8, 127, 8, 8)
    yield "17 rows, 129 keys, causal", of(1, 1, 1, 17, 129, 16, 24, causal=True)
    yield "segments, two slices of columns", of(1, 2, 1, 2, 260, 8, 136, kv_chunk=128)
    yield "segments under a window", of(1, 1, 1, 3, 390, 40, 8, kv_chunk=128, window=(131, 1))
    yield "all options", of(*two, bias=bias, softcap=2.0, sinks=sinks, allowed=coin((3, 40)), causal=True)
    yield (
        "padding, lengths, specials",
        of(*two, kind="specials", first_key=integers(3, 9), seqlens_k=integers(40, 31), allowed=coin((40,), 3)),
    )
    yield "wide heads", of(1, 1, 1, 1, 65, 576, 512)


def packed_problems(dtype):
    q, k, v = (data("normal", (n, h, 8), DTYPES[dtype], n) for n, h in ((22, 2), (150, 1), (150, 1)))
    yield "packed", ((q, k, v, integers(0, 1, 1, 18, 22), integers(0, 20, 20, 149, 150)), {"causal": True})


def paged_problems(dtype):
    k, v = (data("normal", (8, 16, 2, 8), DTYPES[dtype], i) for i in range(2))
    q, order = data("normal", (2, 4, 3, 8), DTYPES[dtype], 5), integers(5, 0, 7, 2, 1, 6, 3, 4).reshape(2, 4)
    yield "pages", ((q, k, v, order, integers(50, 9)), {})


def problems(dtype):
    for operation, made in (
        ("attention", forward_problems),
        ("attention_varlen", packed_problems),
        ("attention_paged", paged_problems),
    ):
        for name, (arguments, options) in made(dtype):
            yield name, operation, arguments, {**options, "return_lse": True}


def backward_problems(dtype):
    """With what is asked for."""

    def of(*shape, kind="normal", **options):
        return attention_cases.operands(Shape(*shape), dtype, kind), options

    bias, sinks = data("normal", (2, 4, 3, 40), DTYPES[dtype], 7), data("normal", (4,), FLOAT32, 5)
    two = 2, 4, 2, 3, 40, 16, 8
    yield "one", "attention", *of(1, 1, 1, 1, 1, 8, 8), "all"
    yield "129 queries, causal", "attention", *of(1, 1, 1, 129, 17, 8, 16, causal=True), "kv"
    yield "17 queries, 129 keys, window", "attention", *of(1, 1, 1, 17, 129, 8, 8, window=(40, 3)), "q"
    yield "two slices of columns", "attention", *of(1, 2, 1, 2, 65, 8, 136), "float32"
    options = {"bias": bias, "softcap": 2.0, "sinks": sinks, "allowed": coin((3, 40)), "causal": True}
    yield "all options", "attention", *of(*two, **options), "continued"
    padded = {"first_key": integers(3, 9), "seqlens_k": integers(40, 31), "allowed": coin((40,), 3)}
    yield "padding, lengths, specials", "attention", *of(*two, kind="specials", **padded), "all"
    yield from ((name, "attention_varlen", *problem, "all") for name, problem in packed_problems(dtype))


def held_to_cpu(hip, run, made):
    """Each problem in one type and on one architecture, in turn, those with all options on both; with a workspace, and
    where segments are folded without one too."""
    turn = [*ARCHS].index(hip.arch)
    for number in range(len(list(made("fp32")))):
        dtype = TYPES[(number + turn) % 3]
        name, *problem = list(made(dtype))[number]
        if number % 2 != turn and name != "all options":
            continue
        wanted = run(pydet, *problem, "ieee")
        for apart in (False, True) if "segments" in name else (True,):
            for ours, want in zip(run(OnHip(hip, apart), *problem, "ieee"), wanted, strict=True):
                if want is not None:
                    assert_same_bits(ours, want, f"{name}, {dtype}, apart: {apart}, on {hip.arch}")


def test_attention_equals_cpu(hip):
    held_to_cpu(hip, attention_cases.run, problems)
    assert any("combine_kernel" in name for name in hip.ran)


def test_attention_backward_equals_cpu(hip):
    held_to_cpu(hip, attention_cases.run_backward, backward_problems)
    for kernel in ("keys_kernel", "queries_kernel", "deltas_kernel", "sinks_kernel"):
        assert any(kernel in name for name in hip.ran), kernel


def test_matrix_cores_have_no_attention_yet(hip):
    """bf16 under AUTO is their arithmetic, which the CPU has and no HIP kernel: refused, not computed otherwise."""
    q = np.zeros((1, 1, 1, 8), DTYPES["bf16"])
    status = hip.call("pydet_attention", capi.options("pydet_attention_options"), q, q, q, q.copy(), None)
    assert status == UNSUPPORTED and "cdna" in hip.sentence(), hip.sentence()
