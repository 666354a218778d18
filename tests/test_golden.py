"""Golden hashes: the bits of this PYDET_NUMERICS, pinned for good.

tests/golden/<operation>.json holds the SHA-256 of each case's output bytes. They were computed by the reference, and
every kernel must reproduce them; a faster kernel changes none. `python -m tests.record_golden` writes them anew.
"""

import hashlib
import itertools
import json
import pathlib

import numpy as np
import pytest

import attention_cases
import cases
import pydet
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
import test_adamw as adamw_cases
import test_embedding as embeddings
import test_grouped_gemm as grouped_cases
import test_rotary as rotary_cases
import test_sample as sample_cases
import test_scaled_gemm as scaled_cases
import test_scaled_grouped_gemm as scaled_grouped_cases
import test_scan as scans
from cases import ARITHMETICS, DTYPES, Problem, data
from reference_fp8 import E8M0
from test_scaled_gemm import FLOAT32, TYPES, Scaled

GOLDEN = pathlib.Path(__file__).parent / "golden"


def digest(*arrays):
    return hashlib.sha256(
        b"".join(reference.bits(array).tobytes() for array in arrays if array is not None)
    ).hexdigest()


def gemm_digests(gemm, arithmetic, dtype):
    """Case name -> hash."""
    digests = {}
    for kind, out_dtype, k_chunk, bias in itertools.product(
        ["normal", "tiny", "specials"], DTYPES, [None, 64], ["", "n fp32"]
    ):
        problem = Problem(29, 50, 300, dtype, arithmetic, out_dtype, kind, bias=bias, k_chunk=k_chunk)
        name = f"{arithmetic} {dtype} {kind} k_chunk={k_chunk} bias={bias or None} -> {out_dtype}"
        digests[name] = digest(cases.run(gemm, problem))
    accumulated = Problem(29, 50, 300, dtype, arithmetic, accumulate=True)
    digests[f"{arithmetic} {dtype} accumulate -> fp32"] = digest(cases.run(gemm, accumulated))
    for out_dtype, bias in (("fp32", ""), ("bf16", "n fp32"), ("fp16", "mn bf16")):
        begun = Problem(29, 50, 300, dtype, arithmetic, out_dtype, bias=bias, k_chunk=64, initial=True)
        digests[f"{arithmetic} {dtype} initial bias={bias or None} -> {out_dtype}"] = digest(cases.run(gemm, begun))
    return digests


def skinny_gemm_digests(skinny_gemm, arithmetic, dtype):
    digests = {}
    for tokens, k_chunk, out_dtype in itertools.product([1, 8, 33], [None, 128], ["fp32", dtype]):
        x, w = data("normal", (tokens, 500), DTYPES[dtype]), data("normal", (90, 500), DTYPES[dtype], 1)
        y = skinny_gemm(x, w, arithmetic=arithmetic, k_chunk=k_chunk, out_dtype=DTYPES[out_dtype])
        digests[f"{arithmetic} {dtype} tokens={tokens} k_chunk={k_chunk} -> {out_dtype}"] = digest(y)
    return digests


NORMS = [(kind, m, n) for kind in ("normal", "wide", "specials") for m, n in [(3, 5000), (20, 257), (600, 33)]]


def rmsnorm_digests(rmsnorm, arithmetic, dtype):
    digests = {}
    for (kind, m, n), options in itertools.product(NORMS, [{}, {"weight_offset": 1.0}, {"residual": True}]):
        x, weight = data(kind, (m, n), DTYPES[dtype]), data("normal", (n,), DTYPES[dtype], 1)
        given = {**options, **({"residual": data(kind, (m, n), DTYPES[dtype], 2)} if "residual" in options else {})}
        digests[f"{arithmetic} {dtype} {kind} {m}x{n} {', '.join(options) or 'plain'}"] = digest(
            *rmsnorm(x, weight, eps=1e-6, **given)
        )
    for (kind, m, n), heads in itertools.product(NORMS, (2, 3)):
        x, residual = data(kind, (m, heads, n), DTYPES[dtype]), data(kind, (m, heads, n), reference.FLOAT32, 2)
        weight, bias = (data("normal", (heads, n), DTYPES[dtype], seed) for seed in (1, 3))
        given = {"bias": bias, "residual": residual} if heads == 3 else {}
        what = "of heads, bias, residual in float32" if heads == 3 else "of heads"
        digests[f"{arithmetic} {dtype} {kind} {m}x{heads}x{n} {what}"] = digest(*rmsnorm(x, weight, eps=1e-6, **given))
    return digests


def rmsnorm_backward_digests(rmsnorm_backward, arithmetic, dtype):
    digests = {}
    for (kind, m, n), residual, dweight_dtype in itertools.product(NORMS, [False, True], ["fp32", dtype]):
        x, dy = data(kind, (m, n), DTYPES[dtype]), data("normal", (m, n), DTYPES[dtype], 1)
        weight, rstd = data("normal", (n,), DTYPES[dtype], 2), np.abs(data("normal", (m,), reference.FLOAT32, 3))
        options = {"dresidual": data(kind, (m, n), DTYPES[dtype], 4)} if residual else {}
        results = rmsnorm_backward(dy, x, weight, rstd, dweight_dtype=DTYPES[dweight_dtype], **options)
        digests[f"{arithmetic} {dtype} {kind} {m}x{n} dresidual={residual} -> {dweight_dtype}"] = digest(*results)
    for (kind, m, n), heads in itertools.product(NORMS, (2, 3)):
        dy = data("normal", (m, heads, n), DTYPES[dtype], 1)
        x = data(kind, (m, heads, n), reference.FLOAT32 if heads == 3 else DTYPES[dtype])
        weight, rstd = (
            data("normal", (heads, n), DTYPES[dtype], 2),
            np.abs(data("normal", (m, heads), reference.FLOAT32, 3)),
        )
        results = rmsnorm_backward(dy, x, weight, rstd, has_bias=heads == 3)
        what = "of heads, dbias, a sum in float32" if heads == 3 else "of heads"
        digests[f"{arithmetic} {dtype} {kind} {m}x{heads}x{n} {what}"] = digest(*results)
    for m, n in [(5, 136), (300, 40), (513, 72)]:
        x, dy, weight = (data("normal", (m, n)[-ndim:], DTYPES[dtype], 3 - ndim) for ndim in (2, 2, 1))
        rstd = np.abs(data("normal", (m,), reference.FLOAT32, 3))
        results = rmsnorm_backward(dy, x, weight, rstd, block_sums=True)
        digests[f"{arithmetic} {dtype} {m}x{n} sums of blocks"] = digest(*results)
    return digests


def layernorm_digests(layernorm, arithmetic, dtype):
    digests = {}
    for (kind, m, n), options in itertools.product(NORMS, [{}, {"weight_offset": 1.0}, {"residual": True}]):
        x = data(kind, (m, n), DTYPES[dtype])
        weight, bias = (data("normal", (n,), DTYPES[dtype], seed) for seed in (1, 3))
        given = {**options, **({"residual": data(kind, (m, n), DTYPES[dtype], 2)} if "residual" in options else {})}
        digests[f"{arithmetic} {dtype} {kind} {m}x{n} {', '.join(options) or 'plain'}"] = digest(
            *layernorm(x, weight, None if options else bias, eps=1e-5, **given)
        )
    return digests


def layernorm_backward_digests(layernorm_backward, arithmetic, dtype):
    digests = {}
    for (kind, m, n), residual, dweight_dtype in itertools.product(NORMS, [False, True], ["fp32", dtype]):
        x, dy = data(kind, (m, n), DTYPES[dtype]), data("normal", (m, n), DTYPES[dtype], 1)
        weight, mean = data("normal", (n,), DTYPES[dtype], 2), data("normal", (m,), reference.FLOAT32, 5)
        rstd = np.abs(data("normal", (m,), reference.FLOAT32, 3))
        options = {"dresidual": data(kind, (m, n), DTYPES[dtype], 4)} if residual else {}
        results = layernorm_backward(dy, x, weight, mean, rstd, dweight_dtype=DTYPES[dweight_dtype], **options)
        digests[f"{arithmetic} {dtype} {kind} {m}x{n} dresidual={residual} -> {dweight_dtype}"] = digest(*results)
    return digests


def softmax_digests(softmax, arithmetic, dtype):
    return {
        f"{arithmetic} {dtype} {kind} {m}x{n}": digest(softmax(data(kind, (m, n), DTYPES[dtype])))
        for kind, m, n in NORMS
    }


def softmax_backward_digests(softmax_backward, arithmetic, dtype):
    digests = {}
    for kind, m, n in NORMS:
        dy, y = data(kind, (m, n), DTYPES[dtype]), reference.softmax(data("normal", (m, n), DTYPES[dtype], 1))
        digests[f"{arithmetic} {dtype} {kind} {m}x{n}"] = digest(softmax_backward(dy, y))
    return digests


def activation_digests(activation, arithmetic, dtype):
    digests = {}
    for kind, m, n in NORMS:
        x, up = data(kind, (m, n), DTYPES[dtype]), data("normal", (m, n), DTYPES[dtype], 1)
        for function in reference_activation.KINDS:
            name = f"{dtype} {function} {kind} {m}x{n}"
            digests[name] = digest(activation(x, function), activation(x, function, up=up))
    return digests


def activation_backward_digests(activation_backward, arithmetic, dtype):
    digests = {}
    for kind, m, n in NORMS:
        x, (up, dy) = data(kind, (m, n), DTYPES[dtype]), (data("normal", (m, n), DTYPES[dtype], i) for i in (1, 2))
        for function in reference_activation.KINDS:
            results = activation_backward(dy, x, function), *activation_backward(dy, x, function, up=up)
            digests[f"{dtype} {function} {kind} {m}x{n}"] = digest(*results)
    return digests


SAMPLED = [(kind, m, n) for kind in ("normal", "integers", "specials") for m, n in [(3, 5000), (9, 257), (20, 33)]]


def sample_digests(sample, arithmetic, dtype):
    digests = {}
    for kind, m, n in SAMPLED:
        x, (seed, position) = data(kind, (m, n), DTYPES[dtype]), sample_cases.keys(m)
        for number, options in enumerate(sample_cases.FILTERS):
            digests[f"{dtype} {number} {kind} {m}x{n}"] = digest(*sample(x, seed, position, **options))
    return digests


def topk_digests(topk, arithmetic, dtype):
    rows = lambda kind, m, n: data(kind, (m, n), DTYPES[dtype])
    return {f"{dtype} {kind} {m}x{n}": digest(*topk(rows(kind, m, n), min(n, 40))) for kind, m, n in SAMPLED}


EMBEDDED = [("normal", 300, 70, 129), ("specials", 65, 600, 33), ("wide", 1000, 3, 8), ("normal", 1, 1, 1)]


def embedding_digests(embedding, arithmetic, dtype):
    return {
        f"{dtype} {kind} {t} of {v}x{n}": digest(embedding(data(kind, (v, n), DTYPES[dtype]), embeddings.ids_of(t, v)))
        for kind, t, v, n in EMBEDDED
    }


def embedding_backward_digests(embedding_backward, arithmetic, dtype):
    digests = {}
    for kind, t, v, n in EMBEDDED:
        dout, ids, start = (
            data(kind, (t, n), DTYPES[dtype]),
            embeddings.ids_of(t, v),
            data("normal", (v, n), np.float32),
        )
        for name, given in (
            ("made", {"rows": v}),
            ("fp32, without an id", {"rows": v, "out_dtype": np.float32, "padding_idx": int(ids[0])}),
            ("continued", {"out": start, "accumulate": True}),
        ):
            digests[f"{dtype} {kind} {t} of {v}x{n}, {name}"] = digest(embedding_backward(dout, ids, **given))
    return digests


SCANNED = [(2, 5, 4, 8, 2, 16), (1, 3, 40, 1, 1, 8), (1, 4, 3, 33, 1, 65)]


def selective_scan_digests(selective_scan, arithmetic, dtype):
    digests = {}
    for number, sizes in enumerate(SCANNED):
        batch, _, heads, width, _, states = sizes
        for kind, each_state in itertools.product(["normal", "specials"], [False, True]):
            given = scans.scan_of(*sizes, dtype, number, each_state, kind)
            own = {"initial": scans.states_of(batch, heads, width, states)} if each_state else {}
            name = f"{dtype} {kind} {'x'.join(map(str, sizes))} each_state={each_state}"
            digests[name] = digest(*selective_scan(*given, return_final=True, **own))
    return digests


def gated_delta_digests(gated_delta, arithmetic, dtype):
    digests = {}
    for number, sizes in enumerate(SCANNED):
        batch, _, heads, width, _, keys = sizes
        for kind, begun in itertools.product(["normal", "specials"], [False, True]):
            given = scans.delta_of(*sizes, dtype, number, kind)
            own = {"initial": scans.states_of(batch, heads, keys, width)} if begun else {}
            name = f"{dtype} {kind} {'x'.join(map(str, sizes))} initial={begun}"
            digests[name] = digest(*gated_delta(*given, return_final=True, **own))
    return digests


def causal_conv1d_digests(causal_conv1d, arithmetic, dtype):
    digests = {}
    for kind, (batch, tokens, channels, taps), begun in itertools.product(
        ["normal", "specials"], [(2, 9, 40, 4), (1, 70, 3, 3)], [False, True]
    ):
        shapes = (batch, tokens, channels), (channels, taps), (channels,), (batch, taps - 1, channels)
        x, w, bias, initial = (data(kind, shape, DTYPES[dtype], i) for i, shape in enumerate(shapes))
        name = f"{dtype} {kind} {batch}x{tokens}x{channels}, {taps} taps, begun={begun}"
        digests[name] = digest(causal_conv1d(x, w, bias if begun else None, initial=initial if begun else None))
    return digests


def selective_scan_backward_digests(selective_scan_backward, arithmetic, dtype):
    digests = {}
    for number, sizes in enumerate(SCANNED):
        batch, tokens, heads, width, _, states = sizes
        for kind, each_state in itertools.product(["normal", "specials"], [False, True]):
            given = scans.scan_of(*sizes, dtype, number, each_state, kind)
            dy = data(kind, (batch, tokens, heads, width), DTYPES[dtype], 90 + number)
            own = {"dfinal": scans.states_of(batch, heads, width, states)} if each_state else {}
            name = f"{dtype} {kind} {'x'.join(map(str, sizes))} each_state={each_state}"
            digests[name] = digest(*selective_scan_backward(dy, *given, return_initial=True, **own))
    return digests


def gated_delta_backward_digests(gated_delta_backward, arithmetic, dtype):
    digests = {}
    for number, sizes in enumerate(SCANNED):
        batch, tokens, heads, width, _, keys = sizes
        for kind, begun in itertools.product(["normal", "specials"], [False, True]):
            given = scans.delta_of(*sizes, dtype, number, kind)
            dout = data(kind, (batch, tokens, heads, width), DTYPES[dtype], 90 + number)
            own = {"initial": scans.states_of(batch, heads, keys, width)} if begun else {}
            name = f"{dtype} {kind} {'x'.join(map(str, sizes))} initial={begun}"
            digests[name] = digest(*gated_delta_backward(dout, *given, return_initial=True, **own))
    return digests


def causal_conv1d_backward_digests(causal_conv1d_backward, arithmetic, dtype):
    digests = {}
    for kind, (batch, tokens, channels, taps), begun in itertools.product(
        ["normal", "specials"], [(2, 9, 40, 4), (1, 70, 3, 3)], [False, True]
    ):
        shapes = (batch, tokens, channels), (batch, tokens, channels), (channels, taps), (batch, taps - 1, channels)
        dy, x, w, initial = (data(kind, shape, DTYPES[dtype], i) for i, shape in enumerate(shapes))
        name = f"{dtype} {kind} {batch}x{tokens}x{channels}, {taps} taps, begun={begun}"
        own = {"initial": initial, "bias": True, "return_initial": True} if begun else {"bias": True}
        digests[name] = digest(*(y for y in causal_conv1d_backward(dy, x, w, **own) if y is not None))
    return digests


TURNED = [
    ("normal", 70, 3, 2, 64, 64),
    ("specials", 9, 2, 1, 33, 70),
    ("wide", 1, 8, 8, 5, 10),
    ("normal", 33, 1, 1, 8, 16),
]


def rotary_table_digests(rotary_table, arithmetic, dtype):
    return {
        f"{dtype} {t} x {f}, {np.dtype(kind)}": digest(
            *rotary_table(
                rotary_cases.places_of(t, kind), rotary_cases.frequencies_of(f), scale=scale, out_dtype=DTYPES[dtype]
            )
        )
        for t, f, kind, scale in ((300, 64, np.int64, 1), (70, 33, np.int32, 0.83), (129, 5, np.float32, -1.3))
    }


def rotary_digests(rotary, arithmetic, dtype):
    digests = {}
    for kind, t, h, g, pairs, n in TURNED:
        q, k = (data(kind, (t, heads, n), DTYPES[dtype], heads) for heads in (h, g))
        n = min(pairs, n // 2)
        for name, given in (
            ("halves", {}),
            ("neighbours", {"neighbours": True, "out_neighbours": True, "whole": True}),
            ("neighbours to halves, in fp32", {"neighbours": True, "in_fp32": True}),
            ("transposed", {"transposed": True}),
        ):
            cos, sin = rotary_cases.table_of(np.dtype(np.float32), (t,), n * (2 if "whole" in given else 1), 5)
            digests[f"{dtype} {kind} {t} x {h} + {g} x {q.shape[-1]}, {name}"] = digest(
                *rotary(q, k, cos, sin, **given)
            )
    return digests


def scaled_gemm_digests(scaled_gemm, arithmetic, dtype):
    digests = {}
    for (a_scale, b_scale), kind, out_dtype in itertools.product(
        [("group", "block"), ("row", "row"), ("group", "group"), ("none", "none")], ["any", "near", "specials"], DTYPES
    ):
        problem = Scaled(19, 140, 300, dtype, "e4m3", a_scale, b_scale, arithmetic=arithmetic, kind=kind,
                         out_dtype=out_dtype, bias="n fp32" if kind == "near" else "")  # fmt: skip
        name = f"{arithmetic} {dtype} x e4m3, scales by {a_scale} and {b_scale}, {kind} -> {out_dtype}"
        digests[name] = digest(scaled_cases.run(scaled_gemm, problem))
    one_chain = Scaled(19, 140, 300, dtype, "e5m2", "row", "tensor", arithmetic=arithmetic, k_chunk=0)
    digests[f"{arithmetic} {dtype} x e5m2, one chain -> fp32"] = digest(scaled_cases.run(scaled_gemm, one_chain))
    return digests


def grouped_gemm_digests(grouped_gemm, arithmetic, dtype):
    digests = {}
    for problem in grouped_cases.problems_of(dtype, arithmetic)[:: 3 if arithmetic == "ieee" else 5]:
        way, bias = "depth" if problem.depth else "rows", problem.bias or None
        name = f"{arithmetic} {dtype} {problem.routing}, {way}, {problem.kind}, k_chunk={problem.k_chunk} bias={bias} "
        name += "initial" if problem.initial else f"accumulate={problem.accumulate}"
        name += f" -> {problem.out_dtype}"
        digests[name] = digest(grouped_cases.run(grouped_gemm, problem))
    return digests


def scaled_grouped_gemm_digests(scaled_grouped_gemm, arithmetic, dtype):
    digests = {}
    for problem in list(scaled_grouped_cases.problems_of(dtype, arithmetic))[::2]:
        name = f"{arithmetic} {dtype} x {problem.b_type} {problem.routing}, scales by {problem.a_scale} and "
        name += f"{problem.b_scale}, {problem.kind}, k_chunk={problem.k_chunk} bias={problem.bias or None} "
        name += "initial" if problem.initial else f"accumulate={problem.accumulate}"
        name += f" -> {problem.out_dtype}"
        digests[name] = digest(scaled_grouped_cases.run(scaled_grouped_gemm, problem))
    return digests


def quantize_digests(quantize, arithmetic, dtype):
    digests = {}
    for granularity, kind, to, scale_dtype in itertools.product(
        ["row", "group", "block", "tensor"], ["normal", "wide", "specials"], TYPES, [FLOAT32, E8M0]
    ):
        x, squares = data(kind, (140, 300), DTYPES[dtype]), granularity in ("group", "block")
        options = {"transposed": True} if squares else {}
        results = quantize(x, granularity=granularity, dtype=TYPES[to], scale_dtype=scale_dtype, **options)
        name = f"{dtype} {kind} by {granularity} -> {to}, {scale_dtype.name}"
        digests[name] = digest(*(np.array(result, order="C") for result in results))
    return digests


def rmsnorm_quantize_digests(rmsnorm_quantize, arithmetic, dtype):
    digests = {}
    for granularity, kind, to, scale_dtype in itertools.product(
        ["row", "group"], ["normal", "wide", "specials"], TYPES, [FLOAT32, E8M0]
    ):
        x, residual = (data(kind, (40, 300), DTYPES[dtype], seed) for seed in range(2))
        options = {"granularity": granularity, "dtype": TYPES[to], "scale_dtype": scale_dtype, "residual": residual}
        results = rmsnorm_quantize(x, data("normal", (300,), FLOAT32), eps=1e-6, **options)
        digests[f"{dtype} {kind} by {granularity} -> {to}, {scale_dtype.name}"] = digest(*map(np.asarray, results))
    return digests


def fold_digests(fold, arithmetic, dtype):
    """dtype: of the result; the parts are fp32."""
    digests = {}
    for kind, count, order, biased in itertools.product(
        ["normal", "wide", "specials"], [1, 8, 21, 64], ["ordered", "tree"], [False, True]
    ):
        bias = data("normal", (77,), DTYPES[dtype], 1) if biased else None
        parts = data(kind, (count, 9, 77), DTYPES["fp32"])
        digests[f"{count} {kind} {order} bias={biased} -> {dtype}"] = digest(
            fold(parts, bias=bias, out_dtype=DTYPES[dtype], order=order)
        )
    return digests


def attention_digests(functions, arithmetic, dtype):
    """functions: an object with attention, attention_varlen and attention_paged."""
    return {
        f"{arithmetic} {dtype} {name}": digest(*attention_cases.run(functions, *problem, arithmetic))
        for name, *problem in attention_cases.problems(dtype)
    }


def attention_backward_digests(functions, arithmetic, dtype):
    return {
        f"{arithmetic} {dtype} {name}, {problem[-1]}": digest(
            *attention_cases.run_backward(functions, *problem, arithmetic)
        )
        for name, *problem in attention_cases.backward_problems(dtype)
    }


def adamw_digests(adamw, arithmetic, dtype):
    """dtype: of the parameters; a list of them, whose gradients are of all types, step after step."""
    digests = {}
    for kind, number in itertools.product(["normal", "wide", "specials"], range(len(adamw_cases.STEPS))):
        tensors = [
            adamw_cases.tensors_of(first + number, (size,), DTYPES[dtype], kind)
            for first, size in ((0, 300), (10, 17), (21, 4100))
        ]
        adamw(*adamw_cases.lists_of(tensors), **adamw_cases.STEPS[number])
        digests[f"{dtype} {kind} {number}"] = digest(*itertools.chain(*tensors))
    return digests


def linear_cross_entropy_digests(linear_cross_entropy, arithmetic, dtype):
    """Of the loss and its gradients at once."""
    rules = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2, "temperature": 0.7}]
    rules += [{"label_smoothing": 0.3, "z_loss": 1e-3, "softcap": 3.0, "ignore_index": 7}]
    digests = {}
    for reduction, rule in itertools.product(("mean", "sum", "none"), rules):
        x, w, bias = (data("normal", shape, DTYPES[dtype], i) for i, shape in enumerate(((300, 24), (130, 24), (130,))))
        target = (np.arange(300) * 37 % 130).astype(np.int64)
        target[1::5], target[2] = rule.get("ignore_index", -100), 130
        dloss = data("normal", (300,), reference.FLOAT32, 3)
        dloss = dloss if reduction == "none" else dloss[0].reshape(())
        how = {"bias": bias, "arithmetic": arithmetic, "reduction": reduction, **rule}
        what = ", ".join(f"{key}={value}" for key, value in rule.items()) or "plain"
        digests[f"{arithmetic} {dtype} {reduction} {what}"] = digest(*linear_cross_entropy(dloss, x, w, target, **how))
    return digests


DIGESTS = {
    "gemm": gemm_digests,
    "scaled_gemm": scaled_gemm_digests,
    "grouped_gemm": grouped_gemm_digests,
    "scaled_grouped_gemm": scaled_grouped_gemm_digests,
    "quantize": quantize_digests,
    "skinny_gemm": skinny_gemm_digests,
    "rmsnorm": rmsnorm_digests,
    "rmsnorm_quantize": rmsnorm_quantize_digests,
    "rmsnorm_backward": rmsnorm_backward_digests,
    "softmax": softmax_digests,
    "log_softmax": softmax_digests,
    "softmax_backward": softmax_backward_digests,
    "fold": fold_digests,
    "layernorm": layernorm_digests,
    "layernorm_backward": layernorm_backward_digests,
    "attention": attention_digests,
    "attention_backward": attention_backward_digests,
    "activation": activation_digests,
    "activation_backward": activation_backward_digests,
    "sample": sample_digests,
    "topk": topk_digests,
    "embedding": embedding_digests,
    "embedding_backward": embedding_backward_digests,
    "selective_scan": selective_scan_digests,
    "gated_delta": gated_delta_digests,
    "causal_conv1d": causal_conv1d_digests,
    "selective_scan_backward": selective_scan_backward_digests,
    "gated_delta_backward": gated_delta_backward_digests,
    "causal_conv1d_backward": causal_conv1d_backward_digests,
    "rotary_table": rotary_table_digests,
    "rotary": rotary_digests,
    "adamw": adamw_digests,
    "linear_cross_entropy": linear_cross_entropy_digests,
}


def all_digests(operation, function):
    """Every case of an operation, by one implementation of all its arithmetics."""
    every = "gemm" in operation or "attention" in operation
    arithmetics = ARITHMETICS if every else {dtype: ["ieee"] for dtype in DTYPES}
    if operation in ("scaled_gemm", "scaled_grouped_gemm"):
        arithmetics = {dtype: ["ieee", "sm90"] for dtype in TYPES}
    return {
        name: value
        for dtype in arithmetics
        for arithmetic in arithmetics[dtype]
        for name, value in DIGESTS[operation](function, arithmetic, dtype).items()
    }


def reference_of(operation):
    if "attention" in operation:
        return reference_attention
    if operation.startswith("activation"):
        return getattr(reference_activation, operation)
    if operation in ("sample", "topk"):
        return getattr(reference_sample, operation)
    if operation.startswith(("selective_scan", "gated_delta", "causal_conv1d")):
        return getattr(reference_scan, operation)
    if operation.startswith("embedding"):
        return getattr(reference_embedding, operation)
    if operation == "rmsnorm_quantize":
        return reference_fp8.rmsnorm_quantize
    if operation.startswith("rotary"):
        return getattr(reference_rotary, operation)
    if operation == "adamw":
        return reference_adamw.adamw
    if operation == "linear_cross_entropy":
        return lambda *given, **how: reference_head.cross_entropy(*given, functions=reference_head.STEPS, **how)[:4]
    return getattr(
        reference_fp8 if operation in ("scaled_gemm", "scaled_grouped_gemm", "quantize") else reference, operation
    )


def recorded(operation):
    return json.loads((GOLDEN / f"{operation}.json").read_text())


def check_golden(operation, function, arithmetic, dtype):
    golden = recorded(operation)["sha256"]
    digests = DIGESTS[operation](function, arithmetic, dtype)
    assert digests.keys() <= golden.keys(), f"not recorded: {digests.keys() - golden.keys()}"
    wrong = [name for name, value in digests.items() if value != golden[name]]
    assert not wrong, f"{operation}: {len(wrong)} of {len(digests)} cases have other bits: {wrong[:5]}"


def test_gemm(gemm_kernel):
    check_golden("gemm", gemm_kernel.gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_skinny_gemm(gemm_kernel):
    check_golden("skinny_gemm", gemm_kernel.skinny_gemm, gemm_kernel.arithmetic, gemm_kernel.dtype)


def test_scaled_gemm(scaled_gemm_kernel):
    kernel = scaled_gemm_kernel
    check_golden("scaled_gemm", kernel.scaled_gemm, kernel.arithmetic, kernel.dtype)


def test_grouped_gemm(grouped_gemm_kernel):
    kernel = grouped_gemm_kernel
    check_golden("grouped_gemm", kernel.grouped_gemm, kernel.arithmetic, kernel.dtype)


def test_scaled_grouped_gemm(scaled_grouped_gemm_kernel):
    kernel = scaled_grouped_gemm_kernel
    check_golden("scaled_grouped_gemm", kernel.scaled_grouped_gemm, kernel.arithmetic, kernel.dtype)


def test_quantize(quantize_kernel):
    check_golden("quantize", quantize_kernel.quantize, "ieee", quantize_kernel.dtype)


def test_rmsnorm_quantize(rmsnorm_quantize_kernel):
    kernel = rmsnorm_quantize_kernel
    check_golden("rmsnorm_quantize", kernel.rmsnorm_quantize, "ieee", kernel.dtype)


def test_rmsnorm(rmsnorm_kernel):
    check_golden("rmsnorm", rmsnorm_kernel.rmsnorm, "ieee", rmsnorm_kernel.dtype)


def test_rmsnorm_backward(rmsnorm_backward_kernel):
    check_golden("rmsnorm_backward", rmsnorm_backward_kernel.rmsnorm_backward, "ieee", rmsnorm_backward_kernel.dtype)


def test_softmax(softmax_kernel):
    for operation in ("softmax", "log_softmax"):
        check_golden(operation, getattr(softmax_kernel, operation), "ieee", softmax_kernel.dtype)


def test_softmax_backward(softmax_backward_kernel):
    check_golden("softmax_backward", softmax_backward_kernel.softmax_backward, "ieee", softmax_backward_kernel.dtype)


def test_fold(fold_kernel):
    for dtype in DTYPES:
        check_golden("fold", fold_kernel.fold, "ieee", dtype)


def test_layernorm(layernorm_kernel):
    check_golden("layernorm", layernorm_kernel.layernorm, "ieee", layernorm_kernel.dtype)


def test_layernorm_backward(layernorm_backward_kernel):
    kernel = layernorm_backward_kernel
    check_golden("layernorm_backward", kernel.layernorm_backward, "ieee", kernel.dtype)


def test_activation(activation_kernel):
    check_golden("activation", activation_kernel.activation, "ieee", activation_kernel.dtype)


def test_sample(sample_kernel):
    check_golden("sample", sample_kernel.sample, "ieee", sample_kernel.dtype)


def test_topk(topk_kernel):
    check_golden("topk", topk_kernel.topk, "ieee", topk_kernel.dtype)


def test_embedding(embedding_kernel):
    check_golden("embedding", embedding_kernel.embedding, "ieee", embedding_kernel.dtype)


def test_embedding_backward(embedding_backward_kernel):
    kernel = embedding_backward_kernel
    check_golden("embedding_backward", kernel.embedding_backward, "ieee", kernel.dtype)


def test_selective_scan(selective_scan_kernel):
    check_golden("selective_scan", selective_scan_kernel.selective_scan, "ieee", selective_scan_kernel.dtype)


def test_gated_delta(gated_delta_kernel):
    check_golden("gated_delta", gated_delta_kernel.gated_delta, "ieee", gated_delta_kernel.dtype)


def test_causal_conv1d(causal_conv1d_kernel):
    check_golden("causal_conv1d", causal_conv1d_kernel.causal_conv1d, "ieee", causal_conv1d_kernel.dtype)


def test_selective_scan_backward(selective_scan_backward_kernel):
    kernel = selective_scan_backward_kernel
    check_golden("selective_scan_backward", kernel.selective_scan_backward, "ieee", kernel.dtype)


def test_gated_delta_backward(gated_delta_backward_kernel):
    kernel = gated_delta_backward_kernel
    check_golden("gated_delta_backward", kernel.gated_delta_backward, "ieee", kernel.dtype)


def test_causal_conv1d_backward(causal_conv1d_backward_kernel):
    kernel = causal_conv1d_backward_kernel
    check_golden("causal_conv1d_backward", kernel.causal_conv1d_backward, "ieee", kernel.dtype)


def test_adamw(adamw_kernel):
    check_golden("adamw", adamw_kernel.adamw, "ieee", adamw_kernel.dtype)


def test_rotary_table(rotary_table_kernel):
    check_golden("rotary_table", rotary_table_kernel.rotary_table, "ieee", rotary_table_kernel.dtype)


def test_rotary(rotary_kernel):
    check_golden("rotary", rotary_kernel.rotary, "ieee", rotary_kernel.dtype)


def test_linear_cross_entropy(head_rows_kernel):
    """By each kernel of rows, and by those that the library chooses."""
    for kernel in (head_rows_kernel.name, None):

        def made(dloss, x, w, target, reduction="mean", kernel=kernel, **how):
            number = {"mean": 0, "sum": 1, "none": 2}[reduction]
            asked = {"of_x": True, "of_w": True, "of_bias": True, "of_loss": True, "reduction": number, **how}
            dx, dw, dbias, loss = pydet.ops.head._linear_cross_entropy_backward(
                dloss, x, w, target, kernel=kernel, **asked
            )
            return loss, dx, dw, dbias

        check_golden("linear_cross_entropy", made, "ieee", head_rows_kernel.dtype)


def test_activation_backward(activation_backward_kernel):
    kernel = activation_backward_kernel
    check_golden("activation_backward", kernel.activation_backward, "ieee", kernel.dtype)


def test_attention(attention_kernel):
    check_golden("attention", attention_kernel, attention_kernel.arithmetic, attention_kernel.dtype)


def test_attention_backward(attention_backward_kernel):
    kernel = attention_backward_kernel
    check_golden("attention_backward", kernel, kernel.arithmetic, kernel.dtype)


@pytest.mark.parametrize("operation", DIGESTS)
def test_reference(operation):
    """The reference is pinned too, and every recorded case is one that is still computed."""
    assert all_digests(operation, reference_of(operation)) == recorded(operation)["sha256"]


@pytest.mark.parametrize("operation", DIGESTS)
def test_recorded_for_these_numerics(operation):
    assert recorded(operation)["numerics"] == pydet.NUMERICS


def test_recording_refuses_changed_bits(tmp_path):
    """New cases may be added; a changed or a lost hash needs a higher PYDET_NUMERICS."""
    from record_golden import Refused, record

    record(tmp_path, "gemm", {"a": "1"}, numerics=1)
    record(tmp_path, "gemm", {"a": "1", "b": "2"}, numerics=1)
    for changed in ({"a": "1", "b": "3"}, {"a": "1"}):
        with pytest.raises(Refused, match="'b'"):
            record(tmp_path, "gemm", changed, numerics=1)
    with pytest.raises(Refused):
        record(tmp_path, "gemm", {"a": "1", "b": "3"}, numerics=0)
    assert json.loads((tmp_path / "gemm.json").read_text()) == {"numerics": 1, "sha256": {"a": "1", "b": "2"}}
    record(tmp_path, "gemm", {"a": "1", "b": "3"}, numerics=2)
    assert json.loads((tmp_path / "gemm.json").read_text()) == {"numerics": 2, "sha256": {"a": "1", "b": "3"}}
