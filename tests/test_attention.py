"""Attention: every kernel, forced by name, against the reference; and what only this contract can pass."""

import functools
import itertools
import os
import pathlib
import shlex
import subprocess

import numpy as np
import pytest

import pydet
import reference
import reference_attention
from attention_cases import Shape, coin, integers, operands
from capi import ffi, last_error, lib, options, status_name
from cases import ARITHMETICS, DTYPES, assert_same_bits, data
from conftest import threads, unusual_float_environment
from reference import FLOAT32

PAIRS = [(arithmetic, dtype) for dtype in DTYPES for arithmetic in ARITHMETICS[dtype]]
FEW_PAIRS = [("ieee", "fp32"), ("ieee", "bf16"), ("sm90", "bf16"), ("cdna2", "fp16")]


# ---- Against the reference -----------------------------------------------------------------------------------------
# The problems of attention_cases.py are compared by their hashes, the kernels' and the reference's (test_golden.py).


# One less, equal, one more: steps of 16, blocks of 64 and 128, strips of 14 rows, panels of 32, segments.
EDGES = [
    1,
    2,
    7,
    8,
    9,
    13,
    14,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    191,
    192,
    193,
    255,
    256,
    257,
    383,
    385,
]


@functools.cache
def edges(arithmetic, dtype):
    """[(shape, operands, options, what the reference says)]."""
    found = []
    for seed, keys in enumerate(EDGES):
        d = (8, 64, 72, 128, 136, 192)[seed % 6]
        for queries in (1, 1 + seed % 16):
            shape = Shape(heads=1 + seed % 3, queries=queries, keys=keys, d=d, e=(d, 40, 24)[seed % 3])
            given = {"causal": seed % 2 == 0, "kv_chunk": 128, "return_lse": True, "arithmetic": arithmetic}
            arguments = operands(shape, dtype, seed=seed)
            found.append((shape, arguments, given, reference_attention.attention(*arguments, **given)))
    return found


def check_edges(functions, arithmetic, dtype):
    for shape, arguments, given, want in edges(arithmetic, dtype):
        got = functions.attention(*arguments, **given)
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other, f"{shape} {given}")


def test_edges(attention_kernel):
    check_edges(attention_kernel, attention_kernel.arithmetic, attention_kernel.dtype)


@functools.cache
def many_rows(arithmetic, dtype):
    """q, k, v, and what the reference says of some rows."""
    q, k, v = operands(Shape(heads=2, queries=400, keys=390), dtype)
    want = {}
    for i in (0, 9, 10, 11, 137, 138, 251, 252, 253, 399):
        keys, row = max(0, 390 - 400 + i + 1), slice(i, i + 1)
        want[i] = reference_attention.attention(q[:, :, row], k[:, :, :keys], v[:, :, :keys], arithmetic=arithmetic)
    return q, k, v, want


def test_many_rows(attention_kernel):
    """More rows than a task takes, over several blocks; the reference's of some rows alone."""
    q, k, v, want = many_rows(attention_kernel.arithmetic, attention_kernel.dtype)
    got = attention_kernel.attention(q, k, v, causal=True, arithmetic=attention_kernel.arithmetic)
    for i, row in want.items():
        assert_same_bits(got[:, :, i : i + 1], row, f"row {i}")


def test_small_integers(attention_kernel):
    """Equal scores and powers of two of keys: every sum is exact, whatever its order."""
    for keys in (1, 2, 64, 128, 256, 1024):
        q = np.zeros((1, 3, 9, 64), DTYPES[attention_kernel.dtype])
        k = data("integers", (1, 3, keys, 64), q.dtype)
        v = data("integers", (1, 3, keys, 64), q.dtype, 1)
        got, lse = attention_kernel.attention(q, k, v, arithmetic=attention_kernel.arithmetic, return_lse=True)
        mean = v.astype(np.float64).mean(2, keepdims=True)
        want = np.broadcast_to(mean, got.shape).astype(np.float32).astype(q.dtype)
        assert_same_bits(got + q, want + q, f"{keys} keys")
        assert np.allclose(lse, np.log(keys), rtol=1e-6)


@pytest.mark.parametrize("arithmetic, dtype", PAIRS)
def test_error_against_float64(arithmetic, dtype):
    most = {"fp32": 2e-6, "bf16": 4e-3, "fp16": 6e-4}[dtype]
    for shape, given in (
        (Shape(queries=60, keys=500, d=64), {"causal": True}),
        (Shape(queries=20, keys=1500, d=128, e=128), {"window": (700, None)}),
        (Shape(queries=20, keys=300, d=192, e=128), {"softcap": 3.0, "sinks": np.ones(2, np.float32)}),
    ):
        q, k, v = operands(shape, dtype)
        got, lse = pydet.attention(q, k, v, arithmetic=arithmetic, return_lse=True, **given)
        wide = [x.astype(np.float64) for x in (q, k, v)]
        s = np.einsum("bhqd,bkd->bhqk", wide[0], wide[1][:, 0]) / np.sqrt(shape.d)
        if "softcap" in given:
            s = 3 * np.tanh(s / 3)
        seen = reference_attention.visible_of(shape.queries, shape.keys, given.get("causal"), given.get("window"))
        s = np.where(seen, s, -np.inf)
        if "sinks" in given:
            s = np.concatenate([s, np.ones((*s.shape[:3], 1))], -1)
            wide[2] = np.concatenate([wide[2], np.zeros((*wide[2].shape[:2], 1, shape.e))], 2)
        largest = s.max(-1, keepdims=True)
        w = np.exp(s - largest)
        exact = np.einsum("bhqk,bke->bhqe", w, wide[2][:, 0]) / w.sum(-1, keepdims=True)
        error = np.sqrt(((got.astype(np.float64) - exact) ** 2).mean() / (exact**2).mean())
        assert error <= most, (shape, error)
        exact_lse = np.log(w.sum(-1)) + largest[..., 0]
        assert np.abs(lse - exact_lse).max() <= (2e-5 if dtype == "fp32" else 3e-4)


# ---- What only this contract can pass ------------------------------------------------------------------------------


@functools.cache
def sequence(dtype, keys=420, heads=4, groups=2, d=64):
    return operands(Shape(heads=heads, groups=groups, queries=keys, keys=keys, d=d, e=d), dtype)


def pages_of(x, size, seed=0):
    """x [1, G, K, D] in pages of that size, in any order, among pages of NaN: (cache, block_table)."""
    _, groups, keys, d = x.shape
    needed = -(-keys // size)
    total = needed + 3
    cache = np.full((total, size, groups, d), np.nan, x.dtype)
    table = np.random.default_rng(seed).permutation(total)[:needed].astype(np.int32)
    for i, page in enumerate(table):
        part = x[0, :, i * size : (i + 1) * size].swapaxes(0, 1)
        cache[page, : len(part)] = part
    return cache, table[None]


def check_one_function(attention, attention_varlen, attention_paged, dtype, **given):
    """A row of a causal prefill, however it is computed. Every way has NaN where it must not look."""
    q, k, v = sequence(dtype)
    nan, keys, heads, groups = np.nan, q.shape[2], q.shape[1], k.shape[1]
    given = {"causal": True, "kv_chunk": 128, **given}
    whole = attention(q, k, v, **given)

    def same(part, rows, what):
        assert_same_bits(np.ascontiguousarray(part), np.ascontiguousarray(whole[:, :, rows]), what)

    for i in (0, 1, 127, 128, 129, 300, keys - 1):
        row, seen = slice(i, i + 1), slice(0, i + 1)
        same(attention(q[:, :, row], k[:, :, seen], v[:, :, seen], **given), row, f"decoded {i}")
        later_k, later_v = k.copy(), v.copy()
        later_k[:, :, i + 1 :] = later_v[:, :, i + 1 :] = nan
        same(attention(q, later_k, later_v, **given)[:, :, row], row, f"prefill with NaN after {i}")
        lengths = integers(i + 1)
        cached = attention(q[:, :, row], later_k, later_v, seqlens_k=lengths, **given)
        same(cached, row, f"decoded {i} from a cache")
        for size in (1, 16, 64, 256):
            k_pages, table = pages_of(k[:, :, seen], size)
            v_pages, _ = pages_of(v[:, :, seen], size)
            paged = attention_paged(q[:, :, row], k_pages, v_pages, table, lengths, **given)
            same(paged, row, f"decoded {i} from pages of {size}")
    for begin, end in itertools.pairwise((0, 1, 100, 103, 256, 300, keys)):  # chunks, and drafts of several tokens
        rows, seen = slice(begin, end), slice(0, end)
        same(attention(q[:, :, rows], k[:, :, seen], v[:, :, seen], **given), rows, f"chunk {begin} to {end}")
    pad = 37
    q_left, k_left, v_left = (np.concatenate([np.full_like(x[:, :, :pad], nan), x], 2) for x in (q, k, v))
    left = attention(q_left, k_left, v_left, first_key=integers(pad), **given)
    same(left[:, :, pad:], slice(None), "padded on the left")
    assert not left[:, :, :pad].view(np.uint8).any()
    q_right, k_right, v_right = (np.concatenate([x, np.full_like(x[:, :, :pad], nan)], 2) for x in (q, k, v))
    same(attention(q_right, k_right, v_right, **given)[:, :, :keys], slice(None), "padded on the right")
    batch = [np.concatenate([np.full_like(x, nan), x, x[:, :, ::-1]]) for x in (q, k, v)]
    same(attention(*batch, **given)[1:2], slice(None), "in a batch")
    flat = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    others = [np.concatenate([np.full_like(x[:50], nan), x, x[:70]]) for x in flat]
    ends = integers(0, 50, 50 + keys, 120 + keys)
    packed = attention_varlen(*others, ends, ends, **given)[50 : 50 + keys]
    same(packed.swapaxes(0, 1)[None], slice(None), "packed")
    for h in range(heads):
        g = h // (heads // groups)
        alone = attention(q[:, h : h + 1], k[:, g : g + 1], v[:, g : g + 1], **given)
        assert_same_bits(np.ascontiguousarray(alone[0, 0]), np.ascontiguousarray(whole[0, h]), f"head {h} alone")
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    same(attention(*turned, **given), slice(None), "other strides")


@pytest.mark.parametrize("arithmetic, dtype", PAIRS)
def test_a_query_has_the_same_bits_however_it_is_computed(arithmetic, dtype):
    functions = [
        functools.partial(getattr(pydet, name), arithmetic=arithmetic)
        for name in ("attention", "attention_varlen", "attention_paged")
    ]
    check_one_function(*functions, dtype)


def test_a_window_and_a_softcap_keep_it_so():
    functions = [getattr(pydet, name) for name in ("attention", "attention_varlen", "attention_paged")]
    check_one_function(*functions, "bf16", window=(131, None), softcap=2.0)


def test_every_row_of_a_prefill_is_decoded():
    q, k, v = sequence("bf16", keys=300, heads=2, groups=1)
    for arithmetic in ("ieee", "sm90"):
        whole = pydet.attention(q, k, v, causal=True, kv_chunk=128, arithmetic=arithmetic)
        for i in range(q.shape[2]):
            one = pydet.attention(
                q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], kv_chunk=128, arithmetic=arithmetic
            )
            assert_same_bits(one, np.ascontiguousarray(whole[:, :, i : i + 1]), f"{arithmetic} {i}")


# ---- Negative controls ---------------------------------------------------------------------------------------------


def changed(change, function=pydet.attention):
    """The three functions with one change: change(q, k, v, options) -> q, k, v, options."""

    def attention(q, k, v, **given):
        return function(*(parts := change(q, k, v, given))[:3], **parts[3])

    def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given):
        out = np.empty_like(q)
        for begin, end in itertools.pairwise(cu_seqlens_q):
            alone = [x[begin:end].swapaxes(0, 1)[None] for x in (q, k, v)]
            out[begin:end] = attention(*alone, **given)[0].swapaxes(0, 1)
        return out

    def attention_paged(q, k, v, table, seqlens_k, **given):
        keys = int(seqlens_k[0])
        k, v = (np.concatenate(list(cache[table[0]])).swapaxes(0, 1)[None][:, :, :keys] for cache in (k, v))
        return attention(q, k, v, **given)

    return attention, attention_varlen, attention_paged


def split_by_queries(q, k, v, given):
    """As libraries share out keys where there are few queries."""
    return q, k, v, {**given, "kv_chunk": 256 if q.shape[2] < 16 else given["kv_chunk"]}


def from_the_last_key(q, k, v, given):
    """Blocks are counted from the end: where a row's keys end decides their places."""
    pad = -k.shape[2] % 128
    first = integers(*[pad] * len(q)) if "first_key" not in given else given["first_key"] + pad
    k, v = (np.concatenate([np.zeros_like(x[:, :, :pad]), x], 2) for x in (k, v))
    keep = dict(given)
    keep["allowed"] = np.arange(k.shape[2]) >= first[:, None, None, None]
    keep.pop("first_key", None)
    lengths = keep.pop("seqlens_k", None)
    return q, k, v, keep if lengths is None else {**keep, "seqlens_k": lengths + pad}


def padding_has_places(q, k, v, given):
    """Left padding is masked, but counted."""
    first = given.pop("first_key", None)
    if first is None:
        return q, k, v, given
    return q, k, v, {**given, "allowed": np.arange(k.shape[2]) >= first[:, None, None, None]}


BROKEN = [split_by_queries, from_the_last_key, padding_has_places]


@pytest.mark.parametrize("change", BROKEN)
def test_the_promise_refuses(change, monkeypatch):
    monkeypatch.setattr("test_attention.sequence", small_sequence)
    check_one_function(*changed(lambda q, k, v, given: (q, k, v, given)), "bf16")
    with pytest.raises(AssertionError):
        check_one_function(*changed(change), "bf16")


# Each way to compute a row, and what tells its call from the others.
WAYS = {
    r"decoded \d+:": lambda q, k, given: q.shape[2] == 1 and "seqlens_k" not in given,
    r"decoded \d+ from a cache": lambda q, k, given: q.shape[2] == 1 and k.shape[2] == 310 and "seqlens_k" in given,
    r"chunk \d+ to \d+": lambda q, k, given: 1 < q.shape[2] < 200,
    "prefill with NaN": lambda q, k, given: q.shape[2] == 310 and np.isnan(k[0, 0, -1, 0]),
    "padded on the left": lambda q, k, given: "first_key" in given,
    "padded on the right": lambda q, k, given: q.shape[2] > 310 and "first_key" not in given,
    "in a batch": lambda q, k, given: len(q) > 1,
    "head 0 alone": lambda q, k, given: q.shape[1] == 1,
    "other strides": lambda q, k, given: not q.flags.c_contiguous and q.shape[2] == 310,
}


@pytest.mark.parametrize("way", [*WAYS, "packed", *(rf"decoded \d+ from pages of {size}" for size in (1, 16, 64, 256))])
def test_each_way_is_looked_at(way, monkeypatch):
    """A sum in longer segments in one way alone is found in that way."""
    monkeypatch.setattr("test_attention.sequence", small_sequence)
    longer = lambda function: lambda *x, **given: function(*x, **{**given, "kv_chunk": 256})
    dense, varlen, paged = changed(
        lambda q, k, v, given: (q, k, v, {**given, "kv_chunk": 256} if WAYS.get(way, never)(q, k, given) else given)
    )
    plain, sound, in_pages = changed(lambda q, k, v, given: (q, k, v, given))
    size = int(way.rsplit(" ", 1)[1]) if "pages" in way else 0
    varlen = longer(sound) if way == "packed" else sound
    paged = lambda q, k, *rest, **given: (longer(in_pages) if k.shape[1] == size else in_pages)(q, k, *rest, **given)
    check_one_function(plain, sound, in_pages, "bf16")
    with pytest.raises(AssertionError, match=way):
        check_one_function(dense, varlen, paged, "bf16")


def never(*_):
    return False


def test_a_shared_prefix_changes_nothing():
    """Sequences whose first pages are the same ones, beside copies of their own; a prefix that differs shows."""
    q, k, v = small_sequence("bf16")
    rows = np.concatenate([q[:, :, -3:], q[:, :, 100:103]])
    caches = [x[0].swapaxes(0, 1)[:304].reshape(19, 16, 1, 8) for x in (k, v)]
    shared = np.stack([np.arange(10), np.r_[np.arange(6), 15:19]]).astype(np.int32)
    copies = [np.concatenate([x, x[:6]]) for x in caches]
    own = np.stack([np.arange(10), np.r_[19:25, 15:19]]).astype(np.int32)
    lengths = integers(160, 150)
    want = pydet.attention_paged(rows, *copies, own, lengths, kv_chunk=128)
    assert_same_bits(pydet.attention_paged(rows, *caches, shared, lengths, kv_chunk=128), want)
    copies[1][20] += 1
    changed_prefix = pydet.attention_paged(rows, *copies, own, lengths, kv_chunk=128)
    assert_same_bits(changed_prefix[:1], want[:1])
    assert (changed_prefix[1] != want[1]).any()


@functools.cache
def small_sequence(dtype):
    return operands(Shape(heads=2, groups=1, queries=310, keys=310, d=8, e=8), dtype)


def test_a_zero_times_nan_is_noticed(monkeypatch):
    """The hole that others have: a value that a row may not see reaches it where it is not finite."""
    monkeypatch.setattr("test_attention.sequence", small_sequence)
    monkeypatch.setattr(reference_attention, "weighed_values", leaky_values)
    with pytest.raises(AssertionError):
        check_one_function(*changed(lambda q, k, v, given: (q, k, v, given), reference_attention.attention), "bf16")


def leaky_values(p, v, allowed, o, arithmetic):
    return reference.chain(np.where(allowed, p, p.dtype.type(0)), v, o, arithmetic)


def test_the_reference_is_told_from_other_orders(monkeypatch):
    """A kernel with another exp2, another c or another reference differs."""
    q, k, v = operands(Shape(queries=30, keys=300), "bf16")
    want = pydet.attention(q, k, v, return_lse=True)

    def differs():
        got = reference_attention.attention(q, k, v, return_lse=True)
        return any(
            reference.bits(one).tobytes() != reference.bits(other).tobytes()
            for one, other in zip(got, want, strict=True)
        )

    assert not differs()
    for name, value in (
        ("COARSE", [reference_attention.COARSE[0], *reference_attention.FINE[-3:]]),
        ("LOG2E", np.float32(1.4426949)),
        ("reference_of", lambda m, x: np.ceil(np.where((x > m) | np.isnan(x), x, m))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(reference_attention, name, value)
            assert differs(), name


# ---- Special values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic, dtype", FEW_PAIRS)
def test_nan_and_inf(arithmetic, dtype):
    call = functools.partial(pydet.attention, arithmetic=arithmetic, return_lse=True)
    q, k, v = operands(Shape(queries=9, keys=200), dtype)
    clean, clean_lse = call(q, k, v, causal=True)
    bad_q = q.copy()
    bad_q[0, 1, 3, 5] = np.nan
    out, lse = call(bad_q, k, v, causal=True)
    assert np.isnan(out[0, 1, 3]).all() and np.isnan(lse[0, 1, 3])
    assert reference.bits(out[0, 1, 3]).tolist() == [0x7FFF if q.itemsize == 2 else 0x7FFFFFFF] * 64
    out[0, 1, 3], lse[0, 1, 3] = clean[0, 1, 3], clean_lse[0, 1, 3]
    assert_same_bits(out, clean, "other rows")
    assert_same_bits(lse, clean_lse, "other lse")
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, 100, 195):
            bad_v = v.copy()
            bad_v[0, 0, place, 7] = bad
            out, lse = call(q, k, bad_v, causal=True)
            sees = place <= np.arange(9) + 191
            assert (np.isnan(out[0, :, :, 7]) if np.isnan(bad) else ~np.isfinite(out[0, :, :, 7]))[:, sees].all()
            out[:, :, sees, 7] = clean[:, :, sees, 7]
            assert_same_bits(out, clean, f"a value of {bad} at {place}")
            assert_same_bits(lse, clean_lse, "lse")


def test_a_row_without_keys_is_zero():
    q, k, v = operands(Shape(queries=9, keys=5), "fp16")
    out, lse = pydet.attention(q, k, v, causal=True, return_lse=True)
    assert (
        not reference.bits(out[:, :, :4]).any()
        and (lse[:, :, :4] == -np.inf).all()
        and np.isfinite(lse[:, :, 4:]).all()
    )
    nothing, lse = pydet.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert not reference.bits(nothing).any() and (lse == -np.inf).all()
    with threads(1):
        pydet.attention(q, k, np.full_like(v, np.nan))  # leaves NaN in the memory that kernels work in
        sunk, lse = pydet.attention(q, k[:, :, :0], v[:, :, :0], sinks=np.float32([1, -3]), return_lse=True)
    assert not reference.bits(sunk).any() and np.allclose(lse[0, :, 0], [1, -3], atol=1e-6)


def test_empty_outputs_are_nothing_to_write():
    for shape in (Shape(queries=0), Shape(batch=0), Shape(heads=0, groups=1)):
        q, k, v = operands(shape, "fp32")
        assert pydet.attention(q, k, v).shape == q.shape and pydet.last_kernel() == ""


def test_kernels_ignore_the_callers_rounding():
    problem = operands(Shape(queries=40, keys=300), "fp32")
    want = pydet.attention(*problem)
    with unusual_float_environment() as still_set:
        got = pydet.attention(*problem)
        assert still_set()
    assert_same_bits(got, want)


def test_the_scale_of_every_width_ignores_it_too():
    """1 / sqrt(D) is made on the calling thread."""
    for d in (*range(8, 257, 8), 576):
        problem = operands(Shape(queries=1, keys=2, d=d, e=512 if d == 576 else 8), "fp32")
        want = pydet.attention(*problem, scale=1 / d**0.5, return_lse=True)
        with unusual_float_environment():
            got = pydet.attention(*problem, return_lse=True)
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other, d)


def test_launches_ignore_the_callers_rounding(tmp_path):
    """What GPUs' launches make of scale and softcap on the host: tests/score_scale.cpp, in every rounding mode."""
    root, program = pathlib.Path(__file__).resolve().parent.parent, tmp_path / "score_scale"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-O2", "-frounding-math", "-ffp-contract=off"]
    command += ["-Wall", "-Wextra", "-Werror", f"-I{root}/native", f"-I{root}/native/include"]
    subprocess.run([*command, str(root / "tests/score_scale.cpp"), "-o", str(program)], check=True)
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout == "1600000 0\n"


# ---- Surroundings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic, dtype", [("ieee", "fp32"), ("sm90", "bf16")])
def test_threads_and_segments_shared_out(arithmetic, dtype):
    """Few queries of many keys go through the workspace; many go by blocks of rows."""
    for shape in (
        Shape(queries=1, keys=1200),
        Shape(queries=3, keys=1030, heads=1),
        Shape(queries=150, keys=700, heads=1),
    ):
        problem, found = operands(shape, dtype), []
        for count in (1, 2, 3, 7):
            with threads(count):
                found.append(
                    pydet.attention(*problem, kv_chunk=128, causal=True, arithmetic=arithmetic, return_lse=True)
                )
        for other in found[1:]:
            for one, first in zip(other, found[0], strict=True):
                assert_same_bits(one, first)


def test_out_is_filled_in_place_and_its_surroundings_are_not():
    q, k, v = operands(Shape(queries=6, heads=4, groups=2), "bf16")
    room = np.full((1, 6, 9, 80), 7, q.dtype)  # [B, Q, H, E] in a larger array
    out = room[:, :, 3:7, 8:72].swapaxes(1, 2)
    assert pydet.attention(q, k, v, out=out) is out
    assert_same_bits(np.ascontiguousarray(out), pydet.attention(q, k, v))
    room[:, :, 3:7, 8:72] = 7
    assert (room == 7).all()


def test_torch_and_jax_get_their_own_kind():
    torch = pytest.importorskip("torch")
    q, k, v = operands(Shape(), "fp32")
    given = [torch.from_numpy(x) for x in (q, k, v)]
    out, lse = pydet.attention(
        *given,
        allowed=torch.ones(5, 150, dtype=torch.bool),
        seqlens_k=torch.tensor([150], dtype=torch.int32),
        return_lse=True,
    )
    assert isinstance(out, torch.Tensor) and lse.dtype == torch.float32
    assert_same_bits(out.numpy(), pydet.attention(q, k, v))


def test_workspace_is_a_function_of_the_shapes():
    bytes_ = ffi.new("uint64_t *")

    def ask(*extents, **given):
        chosen = options("pydet_attention_options", **given)
        return lib.pydet_attention_workspace(*extents, chosen, bytes_), int(bytes_[0])

    assert ask(1, 8, 2, 1, 1024, 64, 64) == (0, 0)
    assert ask(1, 8, 2, 1, 1025, 64, 64) == (0, 8 * 2 * 66 * 4)
    assert ask(1, 8, 2, 1, 1024, 64, 64, kv_chunk=128) == (0, 8 * 8 * 66 * 4)
    assert ask(1 << 40, 8, 2, 1 << 40, 5000, 64, 64) == (0, 0)  # enough to share out without
    for extents, sentence in (
        ((-1, 8, 2, 1, 5, 64, 64), "attention_workspace: an extent is negative (B -1, H 8, Q 1, K 5)"),
        ((1, 8, 3, 1, 5, 64, 64), "attention_workspace: H is 8, want a multiple of G, 3"),
    ):
        assert status_name(ask(*extents)[0]) == "PYDET_INVALID_SHAPE" and last_error() == sentence


# ---- Random problems -----------------------------------------------------------------------------------------------


def random_problem(seed):
    random = np.random.default_rng(seed)
    dtype = str(random.choice(list(DTYPES)))
    arithmetic = str(random.choice(ARITHMETICS[dtype]))
    groups = int(random.integers(1, 4))
    d, e = (int(8 * random.integers(1, 25)) for _ in range(2))
    shape = Shape(
        int(random.integers(1, 4)), groups * int(random.integers(1, 4)), groups, int(random.integers(1, 20)),
        int(random.integers(1, 400)), d, e,
    )  # fmt: skip
    kind = str(random.choice(["normal", "normal", "wide", "specials", "extremes"]))
    given = {"kv_chunk": 128 * int(random.integers(1, 5)), "causal": bool(random.integers(2)), "return_lse": True}
    full = (shape.batch, shape.heads, shape.queries, shape.keys)
    if random.integers(3) == 0:
        given["window"] = tuple(None if random.integers(3) == 0 else int(random.integers(0, shape.keys)) for _ in "lr")
    if random.integers(4) == 0:
        given["softcap"] = float(random.uniform(0.5, 9))
    if random.integers(4) == 0:
        given["sinks"] = data("normal", (shape.heads,), FLOAT32, seed)
    if random.integers(4) == 0:
        given["allowed"] = coin(tuple(1 if random.integers(3) == 0 else n for n in full), 3, seed)
    if random.integers(4) == 0:
        given["bias"] = data("normal", tuple(1 if random.integers(3) == 0 else n for n in full), DTYPES[dtype], seed)
    if random.integers(3) == 0:
        given["seqlens_k"] = random.integers(-2, shape.keys + 3, shape.batch).astype(np.int32)
    if random.integers(3) == 0:
        given["first_key"] = random.integers(-2, shape.keys + 3, shape.batch).astype(np.int32)
    return arithmetic, operands(shape, dtype, kind, seed), given


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed):
    arithmetic, arguments, given = random_problem(seed)
    got = pydet.attention(*arguments, arithmetic=arithmetic, **given)
    want = reference_attention.attention(*arguments, arithmetic=arithmetic, **given)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)
