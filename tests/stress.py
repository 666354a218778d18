"""Mixed calls of all kernels for a while, each result compared on the device with the first one's bits.

    python tests/stress.py [--seconds 60] [--device cuda] [--streams 4] [--seed 0] [--kernels NAME] [--json FILE]

Every kernel that the device can run is forced on problems of several sizes. What a call must give is computed once, by
the kernel that is tried first, so that all kernels of one arithmetic are held to the same bits. Then each stream
replays a CUDA graph of all calls in an order of its own, into outputs that are full of ones before, and the host makes
calls between the replays, while a hog keeps the device full. Differing results are counted on the device. Prints the
calls and the differing results of each kernel; the status is 1 if any differs. On the CPU: one call after another.
"""

import argparse
import collections
import functools
import json
import random
import sys
import time

import torch

import pydet

SLOT = 1 << 18  # bytes of an output; every one lies in a slot of its own
OPERATIONS = (  # of the kernel table
    *("gemm", "scaled_gemm", "quantize", "grouped_gemm", "rmsnorm", "rmsnorm_backward", "rmsnorm_quantize"),
    *("scaled_grouped_gemm", "layernorm", "layernorm_backward", "softmax", "softmax_backward", "attention"),
    *("attention_backward", "activation", "activation_backward", "sample", "topk"),
    *("embedding", "embedding_backward", "selective_scan", "gated_delta", "causal_conv1d"),
    *("selective_scan_backward", "gated_delta_backward", "causal_conv1d_backward"),
    *("rotary_table", "rotary"),
)
ONES = -1  # what outputs hold before a call, as int32: NaN in every type

Case = collections.namedtuple("Case", "kernel operation call wanted")  # call(outputs); what they must be then


def tensor(generator, shape, dtype, device):
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(device)


def product_cases(skinny, dtype, generator, device):
    """(operation, out shapes and types, call): each call takes its outputs and keywords."""
    make = lambda *shape: tensor(generator, shape, dtype, device)
    for m, n, k in ((1, 512, 1024), (7, 96, 272), (16, 1024, 512), (64, 256, 384), (129, 320, 96), (256, 256, 640)):
        a, b, w, bias = make(m, k), make(k, n), make(n, k), tensor(generator, (n,), torch.float32, device)
        start = tensor(generator, (m, n), torch.float32, device)
        if skinny:
            yield "skinny_gemm", [((m, n), dtype)], lambda o, a=a, w=w, **k: pydet.skinny_gemm(a, w, out=o[0], **k)
            continue
        yield "gemm", [((m, n), dtype)], lambda o, a=a, b=b, bias=bias, **k: pydet.gemm(a, b, bias=bias, out=o[0], **k)
        yield (
            "gemm, k_chunk",
            [((m, n), torch.float32)],
            lambda o, a=a, b=b, **k: pydet.gemm(a, b, out=o[0], k_chunk=128, **k),
        )
        yield (
            "gemm_da, accumulate",
            [((m, n), torch.float32)],
            lambda o, a=a, w=w, start=start, **k: (
                o[0].copy_(start),
                pydet.gemm_da(a, w, out=o[0], accumulate=True, **k),
            ),
        )
        left = a.T.contiguous()
        yield "gemm_db", [((m, n), dtype)], lambda o, left=left, b=b, **k: pydet.gemm_db(left, b, out=o[0], **k)


def norm_cases(operation, dtype, generator, device):
    for rows, n in ((1, 4096), (3, 8000), (33, 256), (65, 1024), (200, 96), (130, 384), (2, 20000)):
        x, dy = (tensor(generator, (rows, n), dtype, device) for _ in range(2))
        weight = tensor(generator, (n,), torch.float32, device)
        rstd = pydet.rmsnorm(x.cpu(), eps=1e-6)[1].to(device)
        if operation == "rmsnorm":
            yield (
                operation,
                [((rows, n), dtype), ((rows,), torch.float32)],
                lambda o, x=x, w=weight, **k: pydet.rmsnorm(x, w, eps=1e-6, out=tuple(o), **k),
            )
        else:
            yield (
                operation,
                [((rows, n), dtype), ((n,), torch.float32)],
                lambda o, dy=dy, x=x, w=weight, r=rstd, **k: pydet.rmsnorm_backward(
                    dy, x, w, r, out=o[0], dweight=o[1], **k
                ),
            )


def layer_cases(operation, dtype, generator, device):
    for rows, n in ((1, 4096), (33, 256), (65, 1024), (200, 96), (290, 40), (2, 20000), (3, 1001)):
        x, dy = (tensor(generator, (rows, n), dtype, device) for _ in range(2))
        weight, bias = (tensor(generator, (n,), torch.float32, device) for _ in range(2))
        of_rows = [part.to(device) for part in pydet.layernorm(x.cpu(), eps=1e-6)[1:]]
        if operation == "layernorm":
            yield (
                operation,
                [((rows, n), dtype), ((rows,), torch.float32), ((rows,), torch.float32)],
                lambda o, x=x, w=weight, b=bias, **k: pydet.layernorm(x, w, b, eps=1e-6, out=tuple(o), **k),
            )
        else:
            yield (
                operation,
                [((rows, n), dtype), ((n,), torch.float32), ((n,), torch.float32)],
                lambda o, dy=dy, x=x, w=weight, r=of_rows, **k: pydet.layernorm_backward(
                    dy, x, w, *r, out=o[0], dweight=o[1], dbias=o[2], **k
                ),
            )


def softmax_cases(operation, dtype, generator, device):
    """The functions of the family that these kernels serve."""
    for rows, n in ((1, 4096), (33, 256), (65, 1024), (200, 96), (290, 40), (2, 20000), (3, 1001)):
        x, dy = (tensor(generator, (rows, n), dtype, device) for _ in range(2))
        index = (torch.arange(rows) * 7 % n).to(device)
        like, of_rows = [((rows, n), dtype)], [((rows,), torch.float32)]
        if operation == "softmax":
            for name in ("softmax", "log_softmax"):
                f = getattr(pydet, name)
                yield name, like, lambda o, x=x, f=f, **k: f(x, out=o[0], **k)
            yield "log_prob", of_rows, lambda o, x=x, i=index, **k: pydet.log_prob(x, i, out=o[0], **k)
        else:
            for name in ("softmax", "log_softmax"):
                y, f = getattr(pydet, name)(x.cpu()).to(device), getattr(pydet, f"{name}_backward")
                yield f"{name}_backward", like, lambda o, dy=dy, y=y, f=f, **k: f(dy, y, out=o[0], **k)


def activation_cases(operation, dtype, generator, device):
    for number, (rows, n) in enumerate(((1, 4096), (33, 256), (65, 1024), (200, 96), (290, 40), (2, 20000), (3, 1001))):
        x, up, dy = (tensor(generator, (rows, n), dtype, device) for _ in range(3))
        like, kind = (
            ((rows, n), dtype),
            ("silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh", "softplus")[number],
        )
        if operation == "activation":
            yield operation, [like], lambda o, x=x, f=kind, **k: pydet.activation(x, f, out=o[0], **k)
            yield (
                f"{operation}, gated",
                [like],
                lambda o, x=x, up=up, f=kind, **k: pydet.activation(x, f, up=up, out=o[0], **k),
            )
        else:
            yield (
                f"{operation}, gated",
                [like, like],
                lambda o, dy=dy, x=x, up=up, f=kind, **k: pydet.activation_backward(
                    dy, x, f, up=up, out=o[0], dup=o[1], **k
                ),
            )


def sampling_cases(operation, dtype, generator, device):
    for rows, n in ((1, 4096), (33, 256), (65, 1024), (200, 96), (290, 40), (2, 20000), (3, 1001)):
        x = tensor(generator, (rows, n), dtype, device)
        if operation == "topk":
            k = min(n, 50)
            yield (
                operation,
                [((rows, k), dtype), ((rows, k), torch.int64)],
                lambda o, x=x, k=k, **given: pydet.topk(x, k, values=o[0], index=o[1], **given),
            )
            continue
        number = torch.arange(rows).to(device)
        for options in ({}, {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01}):
            yield (
                operation,
                [((rows,), torch.int64)],
                lambda o, x=x, i=number, options=options, **k: pydet.sample(
                    x, i, i, out=o[0], return_log_prob=False, **options, **k
                ),
            )


def embedding_cases(operation, dtype, generator, device):
    for tokens, rows, n in (
        (1, 3, 4096),
        (33, 100, 256),
        (700, 65, 1024),
        (2000, 2000, 40),
        (900, 5, 96),
        (50, 300, 1001),
    ):
        n = min(n, SLOT // 4 // (tokens if operation == "embedding" else rows))
        ids = torch.randint(0, rows, (tokens,), generator=generator).to(device)
        if operation == "embedding":
            w = tensor(generator, (rows, n), dtype, device)
            yield (
                operation,
                [((tokens, n), dtype)],
                lambda o, w=w, ids=ids, **given: pydet.embedding(w, ids, out=o[0], **given),
            )
            continue
        dout = tensor(generator, (tokens, n), dtype, device)
        yield (
            operation,
            [((rows, n), dtype)],
            lambda o, dout=dout, ids=ids, **given: pydet.embedding_backward(dout, ids, out=o[0], **given),
        )


def into(outputs, results):
    """The first of the results where the stress looks for them."""
    for to, result in zip(outputs, results, strict=False):
        to.copy_(result)


def scan_cases(operation, dtype, generator, device):
    for batch, tokens, heads, width, groups, states in (
        (1, 70, 4, 64, 1, 128),
        (3, 9, 6, 33, 3, 20),
        (2, 40, 65, 1, 1, 16),
    ):
        of = lambda *shape, batch=batch, tokens=tokens: tensor(generator, (batch, tokens, *shape), dtype, device)
        x, b, c, one = of(heads, width), of(groups, states), of(groups, states), of(heads).abs()
        if operation == "causal_conv1d":
            w = tensor(generator, (heads, 4), dtype, device)
            shapes, x = [(one.shape, dtype)], one
            yield operation, shapes, lambda o, x=x, w=w, **given: pydet.causal_conv1d(x, w, out=o[0], **given)
            continue
        if operation == "causal_conv1d_backward":
            w, sums = tensor(generator, (heads, 4), dtype, device), (batch, heads, 4)
            shapes = [(tuple(one.shape), dtype), (sums, torch.float32)]
            call = lambda o, x=one, w=w, **given: into(o, pydet.causal_conv1d_backward(x, x, w, **given))
            yield operation, shapes, call
            continue
        a = -tensor(generator, (heads,), torch.float32, device).abs()
        if operation.endswith("_backward"):
            call = {
                "selective_scan_backward": lambda o, x=x, d=one, a=a, b=b, c=c, **given: into(
                    o, pydet.selective_scan_backward(x, x, d, a, b, c, **given)
                ),
                "gated_delta_backward": lambda o, x=x, d=one, b=b / 20, c=c / 20, **given: into(
                    o, pydet.gated_delta_backward(x, c, b, x, -d, d, **given)
                ),
            }[operation]
            first = x if operation == "selective_scan_backward" else c
            second = one if operation == "selective_scan_backward" else b
            yield operation, [(tuple(y.shape), dtype) for y in (first, second)], call
            continue
        state = (batch, heads, width, states) if operation == "selective_scan" else (batch, heads, states, width)
        call = {
            "selective_scan": lambda o, x=x, d=one, a=a, b=b, c=c, **given: pydet.selective_scan(
                x, d, a, b, c, out=o[0], final=o[1], **given
            ),
            "gated_delta": lambda o, x=x, d=one, b=b / 20, c=c / 20, **given: pydet.gated_delta(
                c, b, x, -d, d, out=o[0], final=o[1], **given
            ),
        }[operation]
        yield operation, [(tuple(x.shape), dtype), (state, torch.float32)], call


def rotary_cases(operation, dtype, generator, device):
    for tokens, heads, n in ((1, 32, 128), (65, 3, 64), (300, 2, 80), (33, 4, 22), (7, 1, 256)):
        places = torch.randint(0, 100_000, (tokens,), generator=generator).to(device)
        frequencies = torch.rand(n // 2, generator=generator).to(device)
        if operation == "rotary_table":
            yield (
                operation,
                [((tokens, n // 2), dtype)] * 2,
                lambda o, places=places, frequencies=frequencies, **given: pydet.rotary_table(
                    places, frequencies, cos=o[0], sin=o[1], **given
                ),
            )
            continue
        q, table = (tensor(generator, shape, dtype, device) for shape in ((tokens, heads, n), (tokens, n // 2)))
        yield (
            operation,
            [((tokens, heads, n), dtype)],
            lambda o, q=q, table=table, n=n, **given: pydet.rotary(
                q, None, table, table, neighbours=n % 3 == 0, q_out=o[0], **given
            ),
        )


def scaled_cases(dtype, generator, device):
    for m, n, k in ((1, 512, 1024), (7, 96, 272), (64, 256, 384), (129, 320, 96), (256, 256, 640)):
        x, w = tensor(generator, (m, k), torch.float32, "cpu"), tensor(generator, (n, k), torch.float32, "cpu")
        for of_x, of_w, out in (("group", "block", torch.bfloat16), ("row", "row", torch.float32)):
            (a, sa), (b, sb) = pydet.quantize(x, granularity=of_x, dtype=dtype), pydet.quantize(w, granularity=of_w)
            a, b, sa, sb = (t.to(device) for t in (a, b, sa, sb))
            yield (
                f"scaled_gemm, {of_x} and {of_w}",
                [((m, n), out)],
                lambda o, a=a, b=b.T, sa=sa, sb=sb.T, **k: pydet.scaled_gemm(
                    a, b, a_scale=sa, b_scale=sb, out=o[0], **k
                ),
            )


def grouped_cases(dtype, generator, device):
    """Rows and sums, of groups of every size, the last of which leaves tokens out."""
    for ends, k, n in (([1, 1, 18, 150, 199], 272, 96), ([300, 301, 428, 428], 96, 136), ([7, 8, 9], 1024, 520)):
        tokens, groups = ends[-1] + 3, len(ends)
        rows, matrices, depth = (
            tensor(generator, shape, dtype, device) for shape in ((tokens, k), (groups, k, n), (k, tokens))
        )
        dc, end = tensor(generator, (tokens, n), dtype, device), torch.tensor(ends, dtype=torch.int32, device=device)
        yield (
            "grouped_gemm",
            [((tokens, n), dtype)],
            lambda o, a=rows, b=matrices, e=end, **k: pydet.grouped_gemm(a, b, e, out=o[0], **k),
        )
        yield (
            "grouped_gemm, depth",
            [((groups, k, n), dtype)],
            lambda o, a=depth, b=dc, e=end, **k: pydet.grouped_gemm(a, b, e, out=o[0], **k),
        )


def scaled_grouped_cases(dtype, generator, device):
    for ends, k, n in (([1, 1, 18, 150, 199], 272, 96), ([300, 301, 428, 428], 640, 136), ([7, 8, 9], 1024, 520)):
        tokens, groups = ends[-1] + 3, len(ends)
        x, w = (tensor(generator, shape, torch.float32, "cpu") for shape in ((tokens, k), (groups, n, k)))
        end = torch.tensor(ends, dtype=torch.int32, device=device)
        for of_x, of_w, out in (("group", "block", torch.bfloat16), ("row", "row", torch.float32)):
            (a, sa), (b, sb) = pydet.quantize(x, granularity=of_x, dtype=dtype), pydet.quantize(w, granularity=of_w)
            a, b, sa, sb = (t.to(device) for t in (a, b, sa, sb))
            yield (
                f"scaled_grouped_gemm, {of_x} and {of_w}",
                [((tokens, n), out)],
                lambda o, a=a, b=b.mT, sa=sa, sb=sb.mT, e=end, **k: pydet.scaled_grouped_gemm(
                    a, b, e, a_scale=sa, b_scale=sb, out=o[0], **k
                ),
            )


def quantize_cases(dtype, generator, device):
    kind, groups = torch.float8_e4m3fn, lambda extent: -(-extent // 128)
    for rows, k in ((1, 4096), (130, 384), (33, 264), (3, 20000), (257, 128)):
        x = tensor(generator, (rows, k), dtype, device)
        row = [((rows, k), kind), ((rows, 1), torch.float32)]
        yield "quantize by rows", row, lambda o, x=x, **k: pydet.quantize(x, out=tuple(o), **k)
        for granularity, scale in (("group", (rows, groups(k))), ("block", (groups(rows), groups(k)))):
            turned = (k, groups(rows)) if granularity == "group" else scale[::-1]
            both = [((rows, k), kind), (scale, torch.float32), ((k, rows), kind), (turned, torch.float32)]
            yield (
                f"quantize by {granularity}s, both ways",
                both,
                lambda o, x=x, g=granularity, **k: pydet.quantize(x, granularity=g, transposed=True, out=tuple(o), **k),
            )


def quantized_norm_cases(dtype, generator, device):
    for rows, n in ((1, 4096), (3, 8000), (33, 256), (130, 384), (200, 96), (2, 20000)):
        x, added = (tensor(generator, (rows, n), dtype, device) for _ in range(2))
        for granularity, extent in (("row", 1), ("group", -(-n // 128))):
            outs = [((rows, n), torch.float8_e4m3fn), ((rows, extent), torch.float32), ((rows, n), dtype)]
            how = {"eps": 1e-6, "residual": added, "granularity": granularity}
            yield (
                f"rmsnorm_quantize by {granularity}s",
                outs,
                lambda o, x=x, how=how, **k: pydet.rmsnorm_quantize(x, out=tuple(o), **how, **k),
            )


def attention_cases(dtype, generator, device):
    """Prefill, decoding over segments, a pack, and pages."""
    make = lambda *shape: tensor(generator, shape, dtype, device)
    integers = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=device)
    for batch, heads, groups, queries, keys, d, options in (
        (1, 4, 2, 130, 130, 64, {"causal": True}),
        (2, 4, 1, 65, 300, 128, {"causal": True, "window": (100, None)}),
        (1, 2, 1, 33, 200, 256, {}),
        (1, 8, 2, 1, 3000, 128, {"kv_chunk": 256}),
        (3, 8, 2, 4, 700, 64, {"causal": True, "kv_chunk": 128}),
        (2, 4, 4, 40, 90, 96, {"softcap": 3.0, "causal": True}),
    ):
        q, k, v = make(batch, queries, heads, d), make(batch, keys, groups, d), make(batch, keys, groups, d)
        yield (
            "attention",
            [((batch, queries, heads, d), dtype)],
            lambda o, given=(q, k, v), options=options, **k: pydet.attention(
                *(x.transpose(1, 2) for x in given), out=o[0].transpose(1, 2), **options, **k
            ),
        )
    ends_q, ends_k = integers(0, 1, 66, 66, 200), integers(0, 300, 428, 500, 634)
    q, k, v = make(200, 4, 64), make(634, 2, 64), make(634, 2, 64)
    yield (
        "attention_varlen",
        [((200, 4, 64), dtype)],
        lambda o, given=(q, k, v, ends_q, ends_k), **k: pydet.attention_varlen(*given, causal=True, out=o[0], **k),
    )
    for page in (16, 128):
        pages = -(-700 // page)
        q, k, v = make(2, 4, 3, 128), make(2 * pages, page, 2, 128), make(2 * pages, page, 2, 128)
        table = torch.randperm(2 * pages, generator=generator).view(2, pages).int().to(device), integers(700, 129)
        yield (
            f"attention_paged, {page}",
            [((2, 4, 3, 128), dtype)],
            lambda o, given=(q, k, v, *table), **k: pydet.attention_paged(*given, out=o[0], **k),
        )


def attention_backward_cases(dtype, generator, device):
    """A batch, few queries, many, a window, sums that are continued, and a pack."""
    make = lambda *shape: tensor(generator, shape, dtype, device)
    integers = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=device)
    cpu = lambda *given: [x.cpu() for x in given]
    for batch, heads, groups, queries, keys, d, options in (
        (1, 4, 2, 130, 130, 64, {"causal": True}),
        (2, 4, 1, 65, 200, 128, {"causal": True, "window": (100, None)}),
        (1, 2, 1, 33, 100, 256, {}),
        (3, 8, 2, 4, 150, 64, {"causal": True}),
        (2, 4, 4, 200, 90, 96, {"softcap": 3.0, "causal": True}),
    ):
        q, k, v, dout = (
            make(batch, n, t, d) for n, t in ((heads, queries), (groups, keys), (groups, keys), (heads, queries))
        )
        out, lse = (x.to(device) for x in pydet.attention(*cpu(q, k, v), return_lse=True, **options))
        given = dout, q, k, v, out, lse
        yield (
            "attention_backward",
            [(tuple(x.shape), dtype) for x in (q, k, v)],
            lambda o, given=given, options=options, **k: pydet.attention_backward(
                *given, dq=o[0], dk=o[1], dv=o[2], **options, **k
            ),
        )
    starts = [tensor(generator, tuple(x.shape), torch.float32, device) for x in (k, v)]
    yield (
        "attention_backward, accumulate",
        [(tuple(q.shape), dtype), *((tuple(x.shape), torch.float32) for x in (k, v))],
        lambda o, given=given, options=options, starts=starts, **k: (
            o[1].copy_(starts[0]),
            o[2].copy_(starts[1]),
            pydet.attention_backward(*given, dq=o[0], dk=o[1], dv=o[2], accumulate=True, **options, **k),
        ),
    )
    ends = integers(0, 1, 66, 66, 200), integers(0, 100, 228, 300, 334)
    q, k, v, dout = make(200, 4, 64), make(334, 2, 64), make(334, 2, 64), make(200, 4, 64)
    out, lse = (x.to(device) for x in pydet.attention_varlen(*cpu(q, k, v, *ends), causal=True, return_lse=True))
    given = dout, q, k, v, out, lse, *ends
    yield (
        "attention_varlen_backward",
        [(tuple(x.shape), dtype) for x in (q, k, v)],
        lambda o, given=given, **k: pydet.attention_varlen_backward(
            *given, causal=True, dq=o[0], dk=o[1], dv=o[2], **k
        ),
    )


def outputs_in(slots, first, wanted):
    """Views of the slots from `first` on, of these shapes and types."""
    views = []
    for number, (shape, dtype) in enumerate(wanted):
        count = 1
        for extent in shape:
            count *= extent
        slot = slots[first + number].view(torch.uint8)[: count * dtype.itemsize]
        views.append(slot.view(dtype).view(shape))
    return views


def make_cases(device, seed, only):
    """Every (kernel, problem) that the kernel takes, with the bits that the first kernel of its arithmetic gave."""
    generator, cases, wanted, refused = torch.Generator().manual_seed(seed), [], {}, collections.Counter()
    made = {}  # (operation, element type) -> its problems, whose operands all kernels share
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    kinds |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    kind = torch.device(device).type
    for kernel in pydet.kernels():
        if (
            kernel.device != kind
            or not kernel.available
            or kernel.operation not in OPERATIONS
            or only not in kernel.name
            or kernel.name.endswith("_handover")  # results beyond a slot: test_cuda_handover.py repeats them
        ):
            continue
        for brief in kernel.dtypes.split():
            if brief not in kinds:
                continue
            keywords, key = {"kernel": kernel.name}, (kernel.operation, "skinny" in kernel.name, brief)
            if (
                kernel.operation in ("gemm", "scaled_gemm", "grouped_gemm", "scaled_grouped_gemm")
                or "attention" in key[0]
            ):
                keywords["arithmetic"] = kernel.arithmetic
            if key not in made:
                makes = {
                    "gemm": functools.partial(product_cases, key[1]),
                    "scaled_gemm": scaled_cases,
                    "quantize": quantize_cases,
                    "rmsnorm_quantize": quantized_norm_cases,
                    "grouped_gemm": grouped_cases,
                    "scaled_grouped_gemm": scaled_grouped_cases,
                    "attention": attention_cases,
                    "attention_backward": attention_backward_cases,
                }
                by_name = {
                    "rmsnorm": norm_cases,
                    "layer": layer_cases,
                    "softmax": softmax_cases,
                    "act": activation_cases,
                    "sample": sampling_cases,
                    "topk": sampling_cases,
                    "embedding": embedding_cases,
                    "scan": scan_cases,
                    "delta": scan_cases,
                    "conv": scan_cases,
                    "rotary": rotary_cases,
                }
                rows = next((cases_of for name, cases_of in by_name.items() if name in key[0]), None)
                make = makes.get(key[0]) or functools.partial(rows, key[0])
                made[key] = list(make(kinds[brief], generator, device))
            for number, (operation, shapes, call) in enumerate(made[key]):
                if any(outside(shape, dtype) for shape, dtype in shapes):
                    continue
                slots = torch.full((len(shapes), SLOT // 4), ONES, dtype=torch.int32, device=device)
                try:
                    call(outputs_in(slots, 0, shapes), **keywords)
                except pydet.Error as problem:
                    if problem.status_name != "PYDET_UNSUPPORTED":
                        raise
                    refused[kernel.name] += 1
                    continue
                problem = operation, kernel.arithmetic, brief, number
                first = wanted.setdefault(problem, slots)
                if not torch.equal(first, slots):
                    sys.exit(f"stress: {kernel.name} gives {problem} other bits than the kernel before it")
                bound = lambda outputs, call=call, keywords=keywords: call(outputs, **keywords)
                cases.append((Case(kernel.name, operation, bound, first), shapes))
    missing = [name for name in refused if not any(case.kernel == name for case, _ in cases)]
    return cases, missing


def outside(shape, dtype):
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    return count > SLOT


class Lane:
    """All cases in an order of its own, with outputs of its own, compared after each round."""

    def __init__(self, cases, device, rng, spoiled):
        self.order = list(range(len(cases)))
        rng.shuffle(self.order)
        self.cases, self.device, self.spoiled, self.rounds = cases, device, spoiled, 0
        starts, total = [], 0
        for _, shapes in cases:
            starts.append(total)
            total += len(shapes)
        self.slots = torch.full((total, SLOT // 4), ONES, dtype=torch.int32, device=device)
        self.wanted = torch.cat([case.wanted for case, _ in cases])
        self.differing = torch.zeros(total, dtype=torch.int64, device=device)
        self.owner = [i for i, (_, shapes) in enumerate(cases) for _ in shapes]
        self.outputs = [outputs_in(self.slots, start, shapes) for start, (_, shapes) in zip(starts, cases)]
        self.graph = self.stream = None

    def round(self):
        self.slots.fill_(ONES)
        for i in self.order:
            self.cases[i][0].call(self.outputs[i])
        if self.spoiled is not None:
            self.slots[self.spoiled, 0] ^= 1
        self.differing += (self.slots != self.wanted).any(1)

    def capture(self):
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self.round()
        self.stream.synchronize()
        self.differing.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.round()

    def run(self):
        if self.graph is None:
            self.round()
        else:
            with torch.cuda.stream(self.stream):
                self.graph.replay()
        self.rounds += 1


class Hog:
    """Keeps the multiprocessors and the memory busy, with no more than a few milliseconds of work ahead."""

    def __init__(self):
        self.stream, self.events = torch.cuda.Stream(), collections.deque()
        self.a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self.memory = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")

    def feed(self):
        while self.events and self.events[0].query():
            self.events.popleft()
        if len(self.events) < 8:
            with torch.cuda.stream(self.stream):
                torch.mm(self.a, self.a)
                self.memory.add_(1)
                self.events.append(self.stream.record_event())


def stress(seconds, device, streams, seed, only="", spoiled=None):
    """Returns {kernel: [calls, differing]} and the kernels that took no problem."""
    rng, gpu = random.Random(seed), torch.device(device).type != "cpu"
    cases, missing = make_cases(device, seed, only)
    lanes = [Lane(cases, device, rng, spoiled) for _ in range(streams if gpu else 1)]
    eager, hog = Lane(cases, device, rng, None), Hog() if gpu else None
    if gpu:
        torch.cuda.synchronize()
        for lane in lanes:
            lane.capture()
        eager_stream = torch.cuda.Stream()
    pending, end = [collections.deque() for _ in lanes], time.monotonic() + seconds
    while time.monotonic() < end:
        for lane, events in zip(lanes, pending):
            while events and events[0].query():
                events.popleft()
            if len(events) < 4:
                lane.run()
                if gpu:
                    events.append(lane.stream.record_event())
        if hog:
            hog.feed()
            if all(len(events) >= 4 for events in pending):  # time for calls from the host
                with torch.cuda.stream(eager_stream):
                    eager.run()
    counts = {case.kernel: [0, 0] for case, _ in cases}
    if gpu:
        torch.cuda.synchronize()
    for lane in [*lanes, eager]:
        for case, _ in cases:
            counts[case.kernel][0] += lane.rounds
        for slot, differing in enumerate(lane.differing.tolist()):
            counts[cases[lane.owner[slot]][0].kernel][1] += differing
    return counts, missing


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", default="", help="only those whose names have this in them")
    parser.add_argument("--json", help="write the counts there")
    parser.add_argument("--spoil", type=int, help="change a bit of this output: the negative control")
    given = parser.parse_args()
    counts, missing = stress(given.seconds, given.device, given.streams, given.seed, given.kernels, given.spoil)
    width = max(map(len, counts))
    for kernel, (calls, differing) in counts.items():
        print(f"{kernel:{width}} {calls:12,} calls {differing:8,} differ")
    for kernel in missing:
        print(f"{kernel:{width}} takes none of the problems")
    calls, differing = (sum(column) for column in zip(*counts.values()))
    print(f"stress: seed {given.seed}, {given.seconds:g} s: {calls:,} calls, {differing:,} results differ")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"counts": counts, "missing": missing, "seconds": given.seconds, "seed": given.seed}, file)
    return 1 if differing or missing else 0


if __name__ == "__main__":
    sys.exit(main())
