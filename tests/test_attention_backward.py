"""Attention's gradients: every kernel, forced by name, against the reference; and what only this contract can pass.

The problems of attention_cases.py are in tests/test_golden.py.
"""

import functools
import itertools

import numpy as np
import pytest

import pydet
import reference
import reference_attention
from attention_cases import Shape, coin, integers, operands
from capi import Tensor, ffi, last_error, lib, options, pointer, status_name
from cases import ARITHMETICS, DTYPES, assert_same_bits, data
from conftest import threads, unusual_float_environment
from reference import FLOAT32, round_to

PAIRS = [(arithmetic, dtype) for dtype in DTYPES for arithmetic in ARITHMETICS[dtype]]
FEW_PAIRS = [("ieee", "fp32"), ("ieee", "bf16"), ("sm90", "bf16"), ("cdna2", "fp16")]
NAMES = ("dq", "dk", "dv", "dsinks")


def same(got, want, what):
    assert len(got) == len(want), what
    for name, one, other in zip(NAMES, got, want):
        assert (one is None) == (other is None), f"{what}: {name}"
        if one is not None:
            assert one.dtype == other.dtype, f"{what}: {name}"
            assert_same_bits(np.ascontiguousarray(one), np.ascontiguousarray(other), f"{what}: {name}")


def gradients(dout, q, k, v, *, function=pydet.attention_backward, forward=pydet.attention, more=None, **given):
    """Of out and lse as the library gives them; `more` goes to the gradients alone."""
    out, lse = forward(q, k, v, return_lse=True, **given)
    return function(dout, q, k, v, out, lse, **given, **(more or {}))


def dout_of(q, v, seed=11):
    return data("normal", (*q.shape[:-1], v.shape[-1]), q.dtype, seed)


# ---- Against the reference -----------------------------------------------------------------------------------------


# One less, equal, one more: of steps of 16, blocks of 64 and 128, strips of 8 and 14 rows, panels of 32.
EDGES = [1, 7, 8, 9, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]


@functools.cache
def edges(arithmetic, dtype):
    found = []
    for seed, extent in enumerate(EDGES):
        other, d = 1 + seed * 5 % 21, (8, 64, 72, 128, 136, 192)[seed % 6]
        queries, keys = (extent, other) if seed % 2 else (other, extent)
        shape = Shape(heads=1 + seed % 3, queries=queries, keys=keys, d=d, e=(d, 40, 24)[seed % 3])
        given = {"causal": seed % 4 < 2, "arithmetic": arithmetic}
        q, k, v = operands(shape, dtype, seed=seed)
        out, lse = pydet.attention(q, k, v, return_lse=True, **given)
        arguments = dout_of(q, v), q, k, v, out, lse
        found.append((shape, arguments, given, reference_attention.attention_backward(*arguments, **given)))
    return found


def check_edges(functions, arithmetic, dtype):
    for shape, arguments, given, want in edges(arithmetic, dtype):
        same(functions.attention_backward(*arguments, **given), want, f"{shape} {given}")


def test_edges(attention_backward_kernel):
    check_edges(attention_backward_kernel, attention_backward_kernel.arithmetic, attention_backward_kernel.dtype)


@pytest.mark.parametrize("arithmetic, dtype", PAIRS)
def test_error_against_float64(arithmetic, dtype):
    """Roundings of the weights and of the gradients of scores, of out and of the results, and no more."""
    most = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 9e-4}[dtype]
    if (arithmetic, dtype) == ("cdna2", "fp16"):
        most = 2e-3  # gradients of scores below 2^-14 are flushed
    for shape, given in (
        (Shape(queries=60, keys=300, d=64), {"causal": True}),
        (Shape(queries=150, keys=150, d=128, e=128), {"window": (70, None)}),
        (Shape(queries=20, keys=200, d=192, e=128), {"softcap": 3.0, "sinks": np.ones(2, np.float32)}),
    ):
        q, k, v = operands(shape, dtype)
        dout = dout_of(q, v)
        got = gradients(dout, q, k, v, arithmetic=arithmetic, **given)
        for name, one, exact in zip(NAMES, got, exact_gradients(dout, q, k, v, **given)):
            error = np.sqrt(((one.astype(np.float64) - exact) ** 2).mean() / (exact**2).mean())
            assert error <= most, (shape, name, error)


def exact_gradients(dout, q, k, v, *, causal=False, window=None, softcap=None, sinks=None):
    """In fp64, of one group of heads."""
    dout, q, k, v = (x.astype(np.float64) for x in (dout, q, k, v))
    scale, shape = q.shape[3] ** -0.5, (q.shape[2], k.shape[2])
    s = np.einsum("bhqd,bkd->bhqk", q, k[:, 0]) * scale
    slope = 1.0
    if softcap:
        t = np.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    s = np.where(reference_attention.visible_of(*shape, causal, window), s, -np.inf)
    sink = np.zeros((*s.shape[:3], 0)) if sinks is None else np.ones((*s.shape[:3], 1)) * sinks[:, None, None]
    every = np.concatenate([s, sink], -1)
    w = np.exp(every - every.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    p, at_sink = w[..., : k.shape[2]], w[..., k.shape[2] :]
    dp = np.einsum("bhqe,bke->bhqk", dout, v[:, 0])
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta) * slope * scale
    dq, dk = np.einsum("bhqk,bkd->bhqd", ds, k[:, 0]), np.einsum("bhqk,bhqd->bkd", ds, q)[:, None]
    return dq, dk, np.einsum("bhqk,bhqe->bke", p, dout)[:, None], -(at_sink * delta).sum((0, 2, 3))


def test_error_is_at_most_that_of_pytorch():
    """Of its fused attention in bf16, on the same numbers."""
    torch = pytest.importorskip("torch")
    for seed, scale in ((0, 1.0), (1, 3.0)):
        q, k, v = operands(Shape(heads=4, groups=4, queries=256, keys=256), "bf16", seed=seed)
        q = round_to(q.astype(np.float32) * np.float32(scale), q.dtype)
        dout = dout_of(q, v, seed)
        got = gradients(dout, q, k, v, causal=True)
        given = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (q, k, v, dout)]
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True).backward(given[3])
        exact = [exact_gradients(*(x[:, h : h + 1] for x in (dout, q, k, v)), causal=True)[:3] for h in range(4)]
        for name, one, leaf, *heads in zip(NAMES, got, leaves, *exact):
            want = np.concatenate(heads, 1)
            theirs = leaf.grad.double().numpy()
            errors = [np.sqrt(((x - want) ** 2).mean()) for x in (one.astype(np.float64), theirs)]
            assert errors[0] <= 1.02 * errors[1], (seed, name, errors)


# ---- What only this contract can pass ------------------------------------------------------------------------------


@functools.cache
def sequence(dtype, tokens=300, heads=4, groups=2, d=16):
    return operands(Shape(heads=heads, groups=groups, queries=tokens, keys=tokens, d=d, e=d), dtype)


def ways(dense, varlen, dtype, **given):
    """(what it is, its dq, dk, dv) of one sequence, however they are computed. NaN is where nothing may look."""
    q, k, v = sequence(dtype)
    dout, nan, (_, heads, tokens, _), groups = dout_of(q, v), np.nan, q.shape, k.shape[1]
    given = {"causal": True, **given}
    yield "alone", dense(dout, q, k, v, **given)
    for pad in (1, 37, 128):
        left = [np.concatenate([np.full_like(x[:, :, :pad], nan), x], 2) for x in (dout, q, k, v)]
        found = dense(*left, first_key=integers(pad), **given)
        assert not any(reference.bits(x[:, :, :pad]).any() for x in found)
        yield f"padded on the left by {pad}", [x[:, :, pad:] for x in found]
    if given["causal"]:  # the rows of padding have gradients of 0, and see others
        right = [np.concatenate([x, np.zeros_like(x[:, :, :37])], 2) for x in (dout, q, k, v)]
        yield "padded on the right", [x[:, :, :tokens] for x in dense(*right, **given)]
    longer_k, longer_v = (np.concatenate([x, np.full_like(x[:, :, :37], nan)], 2) for x in (k, v))
    cached = dense(dout, q, longer_k, longer_v, seqlens_k=integers(tokens), **given)
    assert not any(reference.bits(x[:, :, tokens:]).any() for x in cached[1:])
    yield "in a cache with room", [x[:, :, :tokens] for x in cached]
    batch = [np.concatenate([np.full_like(x, nan), x, x[:, :, ::-1]]) for x in (dout, q, k, v)]
    yield "in a batch", [x[1:2] for x in dense(*batch, **given)]
    flat = [x[0].swapaxes(0, 1) for x in (dout, q, k, v)]
    others = [np.concatenate([np.full_like(x[:50], nan), x, x[:70]]) for x in flat]
    ends = integers(0, 50, 50 + tokens, 120 + tokens)
    yield "packed", [x[50 : 50 + tokens].swapaxes(0, 1)[None] for x in varlen(*others, ends, ends, **given)]
    of_group = heads // groups
    alone = []
    for g in range(groups):
        mine = slice(g * of_group, (g + 1) * of_group)
        alone.append(dense(dout[:, mine], q[:, mine], k[:, g : g + 1], v[:, g : g + 1], **given))
    yield "a group alone", [np.concatenate(x, 1) for x in zip(*alone, strict=True)]
    yield (
        "other strides",
        dense(*(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (dout, q, k, v)), **given),
    )


def varlen_gradients(dout, q, k, v, ends_q, ends_k, *, function=pydet.attention_varlen_backward, **given):
    out, lse = pydet.attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, **given)
    return function(dout, q, k, v, out, lse, ends_q, ends_k, **given)


def check_one_function(dense, varlen, dtype, **given):
    (_, want), *others = ways(dense, varlen, dtype, **given)
    for what, got in others:
        same(got, want, what)


@pytest.mark.parametrize("arithmetic, dtype", PAIRS)
def test_a_sequence_has_the_same_bits_however_it_is_computed(arithmetic, dtype):
    check_one_function(gradients, varlen_gradients, dtype, arithmetic=arithmetic)


def test_a_window_and_a_softcap_keep_it_so():
    check_one_function(gradients, varlen_gradients, "bf16", window=(131, None), softcap=2.0)


def in_chunks(dout, q, k, v, cuts, **given):
    """Queries cut at those places; each call ends at the key where its last query stands."""
    tokens, of_all = q.shape[2], []
    out, lse = pydet.attention(q, k, v, return_lse=True, **given)
    dk, dv = np.zeros(k.shape, np.float32), np.zeros(v.shape, np.float32)
    for begin, end in itertools.pairwise((0, *cuts, tokens)):
        rows = [x[:, :, begin:end] for x in (dout, q)]
        behind = [x[:, :, begin:end] for x in (out, lse)]
        lengths = integers(k.shape[2] - tokens + end)
        of_all.append(
            pydet.attention_backward(
                *rows, k, v, *behind, seqlens_k=lengths, accumulate=True, dk=dk, dv=dv, **given
            )[0]
        )  # fmt: skip
    return np.concatenate(of_all, 2), dk, dv


@pytest.mark.parametrize("arithmetic, dtype", PAIRS)
def test_queries_may_be_cut_at_multiples_of_128(arithmetic, dtype):
    q, k, v = sequence(dtype)
    dout, given = dout_of(q, v), {"causal": True, "arithmetic": arithmetic}
    fp32 = {"dk": np.zeros(k.shape, np.float32), "dv": np.zeros(v.shape, np.float32)}
    want = gradients(dout, q, k, v, more=fp32, **given)
    for cuts in ((128,), (256,), (128, 256)):
        same(in_chunks(dout, q, k, v, cuts, **given), want, f"cut at {cuts}")
    moved = in_chunks(dout, q, k, v, (100,), **given)  # elsewhere the heads of a group come in another order
    assert moved[1].tobytes() != want[1].tobytes()
    same(moved[:1], want[:1], "dq of any cut")


@pytest.mark.parametrize("arithmetic, dtype", FEW_PAIRS)
def test_micro_batches_are_one_call(arithmetic, dtype):
    """Sums over sequences are those of the sinks alone; what each sequence has is its own. Calls continue both."""
    shape = Shape(batch=3, heads=4, groups=2, queries=40, keys=60, d=16, e=16)
    q, k, v = operands(shape, dtype)
    dout, sinks = dout_of(q, v), data("normal", (4,), FLOAT32, 3)
    fp32 = lambda: {
        "dk": np.zeros(k.shape, np.float32),
        "dv": np.zeros(v.shape, np.float32),
        "dsinks": np.zeros(4, "f"),
    }
    given = {"sinks": sinks, "arithmetic": arithmetic, "causal": True}
    want = gradients(dout, q, k, v, more=fp32(), **given)
    got, all_dq = fp32(), []
    for s in range(3):
        one = slice(s, s + 1)
        more = {"accumulate": True, "dk": got["dk"][one], "dv": got["dv"][one], "dsinks": got["dsinks"]}
        all_dq.append(gradients(*(x[one] for x in (dout, q, k, v)), more=more, **given)[0])
    same([np.concatenate(all_dq), *got.values()], want, "one by one")


# ---- Negative controls ---------------------------------------------------------------------------------------------


def from_the_last_query(dout, q, k, v, **given):
    """Blocks of queries are counted from the end: where they end decides their places."""
    pad = -q.shape[2] % 128
    more = [np.concatenate([np.zeros_like(x[:, :, :pad]), x], 2) for x in (dout, q)]
    wide = [np.concatenate([np.zeros_like(x[:, :, :pad]), x], 2) for x in (k, v)]
    first = given.pop("first_key", integers(*[0] * len(q))) + pad
    seen = np.arange(wide[0].shape[2]) >= first[:, None, None, None]
    lengths = given.pop("seqlens_k", None)
    given |= {} if lengths is None else {"seqlens_k": lengths + pad}
    return [x[:, :, pad:] for x in gradients(*more, *wide, allowed=seen, **given)]


def padding_has_places(dout, q, k, v, **given):
    """Left padding is masked, but counted."""
    first = given.pop("first_key", None)
    if first is not None:
        given["allowed"] = np.arange(k.shape[2]) >= first[:, None, None, None]
    return gradients(dout, q, k, v, **given)


def heads_apart(dout, q, k, v, **given):
    """Sums of each head, added: as where keys are repeated for every head. A group alone has one head less."""
    of_group = q.shape[1] // k.shape[1]
    if k.shape[1] > 1:
        return gradients(dout, q, k, v, **given)
    dq, dk, dv = gradients(dout, q, *(np.repeat(x, of_group, 1) for x in (k, v)), **given)
    total = [round_to(x.astype(np.float32).sum(1, keepdims=True), x.dtype) for x in (dk, dv)]
    return dq, *total


@pytest.mark.parametrize("change, way", [
    (from_the_last_query, "padded on the right"), (padding_has_places, "padded on the left by 1"),
    (heads_apart, "a group alone"),
])  # fmt: skip
def test_the_promise_refuses(change, way, monkeypatch):
    monkeypatch.setattr("test_attention_backward.sequence", small_sequence)
    check_one_function(gradients, varlen_gradients, "bf16")
    with pytest.raises(AssertionError, match=way):
        check_one_function(change, varlen_gradients, "bf16")


@functools.cache
def small_sequence(dtype):
    return operands(Shape(heads=4, groups=2, queries=150, keys=150, d=8, e=8), dtype)


WAYS = {
    "padded on the left by 37": lambda q, given: "first_key" in given and given["first_key"][0] == 37,
    "padded on the right": lambda q, given: q.shape[2] == 187 and "first_key" not in given,
    "in a cache with room": lambda q, given: "seqlens_k" in given,
    "in a batch": lambda q, given: len(q) > 1,
    "a group alone": lambda q, given: q.shape[1] == 2,
    "other strides": lambda q, given: not q.flags.c_contiguous and q.shape[1] == 4,
}


@pytest.mark.parametrize("way", [*WAYS, "packed"])
def test_each_way_is_looked_at(way, monkeypatch):
    """A bit that differs in one way alone is found in that way."""
    monkeypatch.setattr("test_attention_backward.sequence", small_sequence)

    def spoiled(found):
        found = [x.copy() for x in found]
        for x in found:
            (reference.bits(x) if x.ndim == 3 else reference.bits(x).swapaxes(0, 2))[60:70, ..., 1] ^= 1
        return found

    def dense(dout, q, k, v, **given):
        found = gradients(dout, q, k, v, **given)
        return spoiled(found) if way in WAYS and WAYS[way](q, given) else found

    def varlen(*arguments, **given):
        found = varlen_gradients(*arguments, **given)
        return spoiled(found) if way == "packed" else found

    with pytest.raises(AssertionError, match=way):
        check_one_function(dense, varlen, "bf16")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reference_is_told_from_other_orders(dtype, monkeypatch):
    """Another order of blocks, of lanes, another exp2, log2 e or tanh: each differs from the library, where results
    are not rounded to 16 bits."""
    q, k, v = operands(Shape(heads=2, groups=1, queries=200, keys=400, d=16, e=16), dtype)
    dout = dout_of(q, v)
    given = {"causal": True, "softcap": 3.0, "arithmetic": "ieee"}
    out, lse = pydet.attention(q, k, v, return_lse=True, **given)
    given |= {f"d{name}": np.zeros(x.shape, np.float32) for name, x in (("q", q), ("k", k), ("v", v))}
    want = pydet.attention_backward(dout, q, k, v, out, lse, **given)

    def differs():
        got = reference_attention.attention_backward(dout, q, k, v, out, lse, **given)
        pairs = [(name, reference.bits(one), reference.bits(other)) for name, one, other in zip(NAMES, got, want)]
        return {name for name, one, other in pairs if one.tobytes() != other.tobytes()}

    assert not differs()
    every, changed = {"dq", "dk", "dv"}, [reference_attention.FINE[0], *reference_attention.COARSE]
    for name, value, wanted in (
        ("reversed", iter, {"dq"}),
        ("range", last_block_first, {"dk", "dv"}),
        ("row_deltas", one_after_the_other, {"dq", "dk"} if dtype == "fp32" else set()),
        ("LOG2E", np.float32(1.4426949), every),
        ("FINE" if dtype == "fp32" else "COARSE", changed, every),
        ("tanh", lambda x: np.tanh(x.astype(np.float64)).astype(np.float32), every - {"dv"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(reference_attention, name, value, raising=False)
            assert wanted <= differs(), name


def one_after_the_other(x, y):
    return np.cumsum(reference.widen(x) * reference.widen(y), 1, dtype=np.float32)[:, -1]


def last_block_first(*given):
    """Of queries; blocks of keys are as they were."""
    return range(*given)[::-1] if given == (0, 200, 128) else range(*given)


def test_a_zero_times_nan_is_noticed(monkeypatch):
    """The hole that others have: what a pair that is not allowed holds reaches a sum where it is not finite."""
    monkeypatch.setattr("test_attention_backward.sequence", small_sequence)
    leaky = lambda p, v, allowed, o, arithmetic: reference.chain(
        np.where(allowed, p, p.dtype.type(0)), v, o, arithmetic
    )
    check = lambda: check_nan(
        functools.partial(gradients, function=reference_attention.attention_backward), "ieee", "bf16"
    )
    check()
    monkeypatch.setattr(reference_attention, "weighed_values", leaky)
    with pytest.raises(AssertionError):
        check()


# ---- Special values ------------------------------------------------------------------------------------------------


def check_nan(call, arithmetic, dtype):
    """One number of the second head, or of the second group's keys, under causal."""
    operand = dict(zip("dqkv", (dout_of(*sequence(dtype)[::2]), *sequence(dtype)), strict=True))
    given = {"causal": True, "arithmetic": arithmetic}
    clean = call(*operand.values(), **given)
    for bad, (name, place) in itertools.product((np.nan, np.inf), (("d", 40), ("q", 140), ("k", 100), ("v", 3))):
        changed = {**operand, name: operand[name].copy()}
        changed[name][0, 1, place, 5] = bad
        found = call(*changed.values(), **given)
        if name in "dq":  # other queries, other heads; keys that the query does not see, and those of other groups
            untouched = [
                ("dq", 0, (slice(None), 1, slice(0, place))),
                ("dq", 0, (slice(None), 1, slice(place + 1, None))),
            ]
            untouched += [("dq", 0, (slice(None), [0, 2, 3]))]
            untouched += [
                (NAMES[i], i, at) for i in (1, 2) for at in ((slice(None), 0, slice(place + 1, None)), (slice(None), 1))
            ]
        else:  # queries that do not see the key, and what other groups have
            untouched = [("dq", 0, (slice(None), slice(2, 4), slice(0, place))), ("dq", 0, (slice(None), slice(0, 2)))]
            untouched += [("dk", 1, (slice(None), 0)), ("dv", 2, (slice(None), 0))]
        for result, i, at in untouched:
            same([found[i][at]], [clean[i][at]], f"{bad} in {name}: {result} {at}")
        assert any(not np.isfinite(x.astype(np.float32)).all() for x in found), (name, bad)


@pytest.mark.parametrize("arithmetic, dtype", FEW_PAIRS)
def test_nan_and_inf_stay_with_what_sees_them(arithmetic, dtype):
    check_nan(gradients, arithmetic, dtype)


def test_a_query_without_keys_and_a_key_without_queries_have_zero():
    q, k, v = operands(Shape(queries=9, keys=5), "fp16")
    dq, dk, dv = gradients(dout_of(q, v), q, k, v, causal=True)
    assert not reference.bits(dq[:, :, :4]).any() and np.isfinite(dq.astype("f")).all() and dk.any() and dv.any()
    no_keys = gradients(dout_of(q, v), q, k[:, :, :0], v[:, :, :0])
    assert not reference.bits(no_keys[0]).any() and no_keys[1].size == no_keys[2].size == 0
    _, dk, dv = gradients(dout_of(q, v)[:, :, :0], q[:, :, :0], k, v)
    assert not reference.bits(dk).any() and not reference.bits(dv).any()
    none = Shape(batch=0, queries=3, keys=4)
    q, k, v = operands(none, "fp32")
    assert [x.shape for x in gradients(dout_of(q, v), q, k, v)] == [q.shape, k.shape, v.shape]
    assert pydet.last_kernel() == ""


def test_kernels_ignore_the_callers_rounding():
    q, k, v = operands(Shape(queries=40, keys=300), "fp32")
    given = {"softcap": 2.0, "sinks": np.float32([0, 1])}
    want = gradients(dout_of(q, v), q, k, v, **given)
    with unusual_float_environment() as still_set:
        got = gradients(dout_of(q, v), q, k, v, **given)
        assert still_set()
    same(got, want, "another rounding")


# ---- Surroundings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic, dtype", [("ieee", "fp32"), ("sm90", "bf16")])
def test_threads(arithmetic, dtype):
    for shape in (
        Shape(queries=1, keys=900),
        Shape(queries=700, keys=3, heads=1),
        Shape(queries=150, keys=500, batch=2),
    ):
        q, k, v = operands(shape, dtype)
        found = []
        for count in (1, 2, 3, 7):
            with threads(count):
                found.append(gradients(dout_of(q, v), q, k, v, causal=True, arithmetic=arithmetic))
        for other in found[1:]:
            same(other, found[0], str(shape))


def test_results_are_filled_in_place_and_their_surroundings_are_not():
    q, k, v = operands(Shape(queries=6, heads=4, groups=2), "bf16")
    want = gradients(dout_of(q, v), q, k, v)
    rooms = [np.full((1, x.shape[2] + 2, x.shape[1] + 3, 80), 7, x.dtype) for x in (q, k, v)]
    inside = [(0, slice(1, 1 + x.shape[2]), slice(2, 2 + x.shape[1]), slice(8, 72)) for x in (q, k, v)]
    results = [room[at].swapaxes(0, 1)[None] for room, at in zip(rooms, inside, strict=True)]
    got = gradients(dout_of(q, v), q, k, v, more=dict(zip(NAMES[:3], results, strict=True)))
    assert all(x is y for x, y in zip(got, results, strict=True))
    same(got, want, "in place")
    for room, at in zip(rooms, inside, strict=True):
        room[at] = 7
        assert (room == 7).all()


def test_what_is_not_asked_for_is_not_made():
    q, k, v = operands(Shape(), "fp32")
    dout, sinks = dout_of(q, v), np.zeros(2, np.float32)
    want = gradients(dout, q, k, v, sinks=sinks)
    same(gradients(dout, q, k, v, more={"only": "q"}, sinks=sinks), (want[0], None, None, want[3]), "q")
    same(gradients(dout, q, k, v, more={"only": "kv"}, sinks=sinks), (None, *want[1:]), "kv")
    same(gradients(dout, q, k, v, more={"only": "sinks"}, sinks=sinks), (None, None, None, want[3]), "sinks")


def test_workspace_is_a_function_of_the_shapes():
    bytes_ = ffi.new("uint64_t *")

    def ask(*extents, **given):
        chosen = options("pydet_attention_backward_options", **given)
        return lib.pydet_attention_backward_workspace(*extents, chosen, bytes_), int(bytes_[0])

    if all(info.device == "cpu" for info in pydet.kernels()):
        assert ask(2, 8, 2, 100, 1024, 64, 64) == (0, 0)
    for extents, sentence in (
        ((-1, 8, 2, 1, 5, 64, 64), "attention_backward_workspace: an extent is negative (B -1, H 8, Q 1, K 5)"),
        ((1, 8, 3, 1, 5, 64, 64), "attention_backward_workspace: H is 8, want a multiple of G, 3"),
    ):
        assert status_name(ask(*extents)[0]) == "PYDET_INVALID_SHAPE" and last_error() == sentence


# ---- Refusals ------------------------------------------------------------------------------------------------------


def arrays(**changes):
    q, k, v = operands(Shape(batch=2, heads=4, groups=2, queries=3, keys=10, d=16, e=24), "bf16")
    out = np.zeros((2, 4, 3, 24), q.dtype)
    rest = {"out": out, "lse": np.zeros((2, 4, 3), "f"), "dq": q * 0, "dk": k * 0, "dv": v * 0}
    return {"dout": out + 1, "q": q, "k": k, "v": v, **rest, **changes}


def refusal(given, **changes):
    """(status, sentence) of a call in C with these arrays; nothing was written."""
    held = arrays(**changes)
    tensors = {name: None if x is None else Tensor(x) for name, x in held.items()}
    chosen, keep = options("pydet_attention_backward_options"), []
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            keep.append(Tensor(value))
            value = keep[-1].c
        setattr(chosen, name, value)
    before = [held[name].tobytes() for name in ("dq", "dk", "dv") if held[name] is not None]
    status = lib.pydet_attention_backward(ffi.NULL, *(pointer(x) for x in tensors.values()), chosen)
    assert status != 0
    assert before == [held[name].tobytes() for name in ("dq", "dk", "dv") if held[name] is not None]
    return status_name(status).removeprefix("PYDET_"), last_error()


def bf16(*shape):
    return data("normal", shape, DTYPES["bf16"])


REFUSED = {
    "no dout": ({"dout": None}, {}, "NULL_POINTER", "dout is NULL, want a tensor"),
    "no lse": ({"lse": None}, {}, "NULL_POINTER", "lse is NULL, want a tensor"),
    "dout": ({"dout": bf16(2, 4, 3, 16)}, {}, "INVALID_SHAPE", "dout is 2x4x3x16, want 2x4x3x24"),
    "out": ({"out": bf16(2, 4, 3, 16)}, {}, "INVALID_SHAPE", "out is 2x4x3x16, want 2x4x3x24"),
    "type of dout": (
        {"dout": np.zeros((2, 4, 3, 24), "f")}, {}, "INVALID_DTYPE", "dout is float32, want bfloat16 as q is"
    ),
    "lse": ({"lse": np.zeros((2, 3, 4), "f")}, {}, "INVALID_SHAPE", "lse is 2x3x4, want 2x4x3"),
    "type of lse": ({"lse": bf16(2, 4, 3)}, {}, "INVALID_DTYPE", "lse is bfloat16, want float32"),
    "dq": ({"dq": bf16(2, 4, 3, 24)}, {}, "INVALID_SHAPE", "dq is 2x4x3x24, want 2x4x3x16"),
    "dk": ({"dk": bf16(2, 4, 10, 16)}, {}, "INVALID_SHAPE", "dk is 2x4x10x16, want 2x2x10x16"),
    "type of dv": (
        {"dv": np.zeros((2, 2, 10, 24), np.float16)}, {}, "INVALID_DTYPE",
        "dv is float16, want bfloat16 as v is, or float32",
    ),
    "dk alone": ({"dv": None}, {}, "NULL_POINTER", "dk is given without dv, want both or neither"),
    "dv alone": ({"dk": None}, {}, "NULL_POINTER", "dv is given without dk, want both or neither"),
    "nothing": (
        {"dq": None, "dk": None, "dv": None}, {}, "NULL_POINTER", "dq, dk, dv and dsinks are NULL, want one of them"
    ),
    "accumulate": ({}, {"accumulate": 1}, "INVALID_DTYPE", "dk is bfloat16, want float32 under accumulate"),
    "accumulate dq alone": (
        {"dk": None, "dv": None}, {"accumulate": 1}, "NULL_POINTER",
        "dk, dv and dsinks are NULL, want some of them under accumulate",
    ),
    "accumulate 2": ({}, {"accumulate": 2}, "INVALID_VALUE", "options.accumulate is 2, want 0 or 1"),
    "dsinks without sinks": (
        {}, {"dsinks": np.zeros(4, "f")}, "NULL_POINTER", "dsinks is given without sinks, want both"
    ),
    "dsinks": (
        {}, {"sinks": np.zeros(4, "f"), "dsinks": np.zeros(3, "f")}, "INVALID_SHAPE", "dsinks is 3, want 4"
    ),
    "type of dsinks": (
        {"dk": np.zeros((2, 2, 10, 16), "f"), "dv": np.zeros((2, 2, 10, 24), "f")},
        {"sinks": np.zeros(4, "f"), "dsinks": np.zeros(4, np.float16), "accumulate": 1},
        "INVALID_DTYPE", "dsinks is float16, want float32 under accumulate",
    ),
    "strides of dk": (
        {"dk": bf16(2, 2, 16, 10).swapaxes(2, 3)}, {}, "INVALID_STRIDE",
        "dk has stride 10 in its last dimension, want 1, as a contiguous copy has",
    ),
    "scale": ({}, {"scale": -1.0}, "INVALID_VALUE", "scale is -1, want a number from 2^-100 to 2^100"),
    "causal": ({}, {"causal": 3}, "INVALID_VALUE", "options.causal is 3, want 0 or 1"),
    "reserved": ({}, {"reserved": 1}, "INVALID_VALUE", "options.reserved is 1, want 0"),
    "packed k": (
        {}, {"cu_seqlens_k": np.zeros(3, np.int32)}, "INVALID_SHAPE",
        "k is 2x2x10x16, want TxGxD, since cu_seqlens_k is given",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    changes, given, status, sentence = REFUSED[name]
    assert refusal(given, **changes) == (status, f"attention_backward: {sentence}")


def test_outputs_apart():
    same_k = arrays()["k"]
    assert refusal({}, k=same_k, dk=same_k) == ("OVERLAP", "attention_backward: dk shares memory with k, want it apart")
    memory = np.zeros((2, 2, 10, 24), DTYPES["bf16"])
    at = refusal({}, dk=memory[..., :16], dv=memory)
    assert at == ("OVERLAP", "attention_backward: dv shares memory with dk, want it apart")
    work = ffi.cast("void *", -memory.ctypes.data % 16 + memory.ctypes.data)
    assert refusal({"workspace": work, "workspace_size": 8}, dv=memory) == (
        "OVERLAP", "attention_backward: workspace shares memory with dv, want it apart",
    )  # fmt: skip


PYTHON_REFUSED = [
    ({"window": 3}, "window is 3, want a pair (left, right), None on a side for any"),
    ({"only": "v"}, "only is 'v', want 'q', 'kv', 'sinks' or None"),
    ({"only": 1}, "only is int, want 'q', 'kv', 'sinks' or None"),
    ({"only": "q", "dk": np.zeros((1, 1, 150, 64), "f")}, "dk is given with only='q', want none"),
    ({"only": "kv", "dq": np.zeros((1, 2, 5, 64), "f")}, "dq is given with only='kv', want none"),
    ({"accumulate": True}, "accumulate needs dk and dv, the float32 tensors to continue from"),
    ({"accumulate": True, "only": "q", "sinks": np.zeros(2, "f")},
     "accumulate needs dsinks, the float32 tensor to continue from"),
    ({"scale": 0}, "scale is 0, want a number from 2^-100 to 2^100, or None for 1 / sqrt(D)"),
    ({"accumulate": "yes"}, "accumulate is str, want True or False"),
    ({"kernel": "none"}, "no kernel is named none (pydet.kernels() in Python and pydet_kernel_name in C list them)"),
]  # fmt: skip


@pytest.mark.parametrize("given, sentence", PYTHON_REFUSED)
def test_refusals_in_python(given, sentence):
    q, k, v = operands(Shape(), "fp32")
    out, lse = pydet.attention(q, k, v, return_lse=True)
    with pytest.raises(pydet.Error) as raised:
        pydet.attention_backward(out, q, k, v, out, lse, **given)
    assert str(raised.value) == f"attention_backward: {sentence}"
    x = q[0].swapaxes(0, 1)
    with pytest.raises(pydet.Error, match="attention_backward: cu_seqlens_k is None, want cumulative lengths"):
        pydet.attention_varlen_backward(x, x, x, x, x, lse, integers(0, 5), None)


# ---- Random problems -----------------------------------------------------------------------------------------------


def random_problem(seed):
    random = np.random.default_rng(seed)
    dtype = str(random.choice(list(DTYPES)))
    arithmetic = str(random.choice(ARITHMETICS[dtype]))
    groups = int(random.integers(1, 4))
    d, e = (int(8 * random.integers(1, 25)) for _ in range(2))
    shape = Shape(
        int(random.integers(1, 4)), groups * int(random.integers(1, 4)), groups, int(random.integers(1, 20)),
        int(random.integers(1, 200)), d, e,
    )  # fmt: skip
    kind = str(random.choice(["normal", "normal", "wide", "specials", "extremes"]))
    given = {"causal": bool(random.integers(2)), "arithmetic": arithmetic}
    full = (shape.batch, shape.heads, shape.queries, shape.keys)
    some = lambda: tuple(1 if random.integers(3) == 0 else n for n in full)
    if random.integers(3) == 0:
        given["window"] = tuple(None if random.integers(3) == 0 else int(random.integers(0, shape.keys)) for _ in "lr")
    if random.integers(4) == 0:
        given["softcap"] = float(random.uniform(0.5, 9))
    if random.integers(4) == 0:
        given["sinks"] = data("normal", (shape.heads,), FLOAT32, seed)
    if random.integers(4) == 0:
        given["allowed"] = coin(some(), 3, seed)
    if random.integers(4) == 0:
        given["bias"] = data("normal", some(), DTYPES[dtype], seed)
    for name in ("seqlens_k", "first_key"):
        if random.integers(3) == 0:
            given[name] = random.integers(-2, shape.keys + 3, shape.batch).astype(np.int32)
    return operands(shape, dtype, kind, seed), given


@pytest.mark.parametrize("seed", range(25))
def test_random_problems(seed):
    (q, k, v), given = random_problem(seed)
    out, lse = pydet.attention(q, k, v, return_lse=True, **given)
    arguments = dout_of(q, v), q, k, v, out, lse
    want = reference_attention.attention_backward(*arguments, **given)
    same(pydet.attention_backward(*arguments, **given), want, str(given))
