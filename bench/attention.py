"""Attention, forward and backward, on the CPU: in ieee beside PyTorch's scaled_dot_product_attention; in Hopper's
arithmetic beside its own two products as GEMMs, on one core.

Work counts the products alone: 4 Q K D operations a head forward (half of them where it is causal), 2.5 times as many
backward. Drawn problems have the heads of published models.
"""

from functools import partial

import numpy as np

import pydet
from bench.gemm import copies, kernels_of, normal
from bench.harness import Row, Variant
from bench.model_shapes import MODELS
from bench.peers import NO_TORCH, as_torch, torch


def operands(sequences, heads, groups, queries, keys, d, dtype):
    q = normal(1, (sequences, heads, queries, d), dtype)
    k, v = (normal(seed, (sequences, groups, keys, d), dtype) for seed in (2, 3))
    return q, k, v


def text(sequences, heads, groups, queries, keys, d, causal):
    what = f"{sequences} x {queries}" if queries == keys else f"{sequences} x {queries} of {keys}"
    return f"{what}, D {d}, heads {heads}/{groups}{', causal' if causal else ''}"


def operations(sequences, heads, queries, keys, d, causal):
    return 4 * sequences * heads * queries * keys * d // (2 if causal and queries == keys else 1)


def agree(name, dtype, results, call):
    """Each kernel's results have these bits."""
    names = kernels_of(name, "ieee", dtype)
    want = [x.tobytes() for x in results]
    return len(names) > 0 and all([x.tobytes() for x in call(kernel=kernel)] == want for kernel in names)


def forward(dtype, sequences, heads, groups, queries, keys, d, causal):
    q, k, v = operands(sequences, heads, groups, queries, keys, d, dtype)
    sets = copies((q, k, v, np.empty_like(q)))
    call = partial(pydet.attention, causal=causal, arithmetic="ieee")
    variants = [Variant("pydet", [partial(call, q, k, v, out=out) for q, k, v, out in sets], [sets[0][3]])]
    if torch:
        peer = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
        variants.append(Variant("torch", [partial(peer, *map(as_torch, (q, k, v))) for q, k, v, _ in sets]))
    return Row(
        "attention",
        text(sequences, heads, groups, queries, keys, d, causal),
        dtype,
        variants,
        "torch",
        operations(sequences, heads, queries, keys, d, causal),
        "GFLOP/s",
        lambda: agree("attention", dtype, [sets[0][3]], lambda **how: [call(q, k, v, **how)]),
        "" if torch else NO_TORCH,
    )


def backward(dtype, sequences, heads, groups, queries, keys, d, causal):
    q, k, v = operands(sequences, heads, groups, queries, keys, d, dtype)
    dout = normal(4, q.shape, dtype)
    how = {"causal": causal, "arithmetic": "ieee"}
    out, lse = pydet.attention(q, k, v, return_lse=True, **how)
    sets = copies((dout, q, k, v, out, lse, *(np.empty_like(x) for x in (q, k, v))))
    call = partial(pydet.attention_backward, **how)
    calls = [partial(call, *given[:6], dq=given[6], dk=given[7], dv=given[8]) for given in sets]
    variants = [Variant("pydet", calls, list(sets[0][6:]))]
    if torch:

        def gradient(dout, *rows):
            rows = [as_torch(x).requires_grad_() for x in rows]
            y = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True)
            return partial(torch.autograd.grad, y, rows, as_torch(dout), retain_graph=True)

        variants.append(Variant("torch", [gradient(*given[:4]) for given in sets]))
    return Row(
        "attention_backward",
        text(sequences, heads, groups, queries, keys, d, causal),
        dtype,
        variants,
        "torch",
        operations(sequences, heads, queries, keys, d, causal) * 5 // 2,
        "GFLOP/s",
        lambda: agree("attention_backward", dtype, sets[0][6:], lambda **how: call(dout, q, k, v, out, lse, **how)),
        "" if torch else NO_TORCH,
    )


def model(dtype, tokens, d):
    """Of one head, all its keys seen; the products are as many operations with nothing between them."""
    q, k, v = operands(1, 1, 1, tokens, tokens, d, dtype)
    out, scores, weights = np.empty_like(q), np.empty((tokens, tokens), np.float32), normal(5, (tokens, tokens), dtype)
    wide, how = np.empty((tokens, d), np.float32), {"arithmetic": "sm90"}

    def products():
        pydet.gemm(q[0, 0], k[0, 0].T, out=scores, **how)
        pydet.gemm(weights, v[0, 0], out=wide, **how)

    return Row(
        "attention sm90",
        text(1, 1, 1, tokens, tokens, d, False),
        dtype,
        [Variant("pydet", [partial(pydet.attention, q, k, v, out=out, **how)], [out]), Variant("products", [products])],
        "products",
        operations(1, 1, tokens, tokens, d, False),
        "GFLOP/s",
    )


# sequences, heads, heads of keys, queries, keys, D, causal: not of a decoding step, where PyTorch's query would see
# one key alone.
SHAPES = (
    (1, 8, 2, 1024, 1024, 128, True),
    (4, 8, 8, 512, 512, 64, False),
    (8, 8, 2, 1, 4096, 128, False),
)


def rows(threads):
    for dtype in ("fp32", "bf16"):
        for shape in SHAPES:
            yield partial(forward, dtype, *shape)
        for shape in SHAPES[:2]:
            yield partial(backward, dtype, *shape)
    if threads == 1:
        for d in (64, 128):
            yield partial(model, "bf16", 256, d)


MOST_OPERATIONS = 2e9  # of a drawn problem's forward


def draw(generator, between):
    """A prefill, its gradients, or a decoding step."""
    *_, heads, groups, d = MODELS[generator.choice(sorted(MODELS))]
    dtype, kind = generator.choice(("fp32", "bf16")), generator.choice(("prefill", "backward", "decode"))
    while True:
        sequences, keys = between(1, 16), between(16, 8192)
        queries, causal = (1, False) if kind == "decode" else (keys, generator.random() < 0.75)
        if operations(sequences, heads, queries, keys, d, causal) <= MOST_OPERATIONS:
            make = backward if kind == "backward" else forward
            return partial(make, dtype, sequences, heads, groups, queries, keys, d, causal)
