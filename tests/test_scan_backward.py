"""Gradients of scans: every kernel, forced by name, against the reference; cuts and packs; refusals."""

import itertools
import random

import numpy as np
import pytest

import pydet
import reference_scan as reference
from capi import ffi, lib
from cases import DTYPES, assert_same_bits, data
from conftest import threads
from test_scan import CONVOLUTIONS, SCANS, delta_of, same, scan_of, states_of

# As of test_scan, and tokens around the pieces in which they are taken back: 8, and 32 from one kept state to the next.
GRADIENTS = [
    *SCANS,
    (1, 33, 2, 3, 1, 4),
    (1, 9, 1, 16, 1, 33),
    (1, 65, 1, 2, 1, 3),
    (0, 4, 2, 3, 1, 4),
    (2, 0, 2, 3, 1, 4),
]
# States of whole rounds and whole blocks of 32 columns, of which a GPU's threads have four columns: around its tiles of
# 16 and 32 tokens and their pieces of 8, heads that begin and end within a block. A decay for each head. Of 256
# states two threads have a column's, in turn; columns that are no whole block have one thread, as 192 states have.
WIDE = [
    (1, 1, 2, 64, 1, 128),
    (2, 15, 4, 16, 2, 128),
    (1, 17, 3, 32, 3, 128),
    (2, 40, 2, 48, 1, 128),
    (1, 33, 32, 1, 1, 64),
    (1, 65, 1, 96, 1, 32),
    (1, 4, 4, 8, 1, 64),
    (1, 27, 2, 16, 1, 256),
    (2, 41, 4, 16, 2, 256),
    (1, 35, 1, 33, 1, 256),
    (1, 18, 1, 32, 1, 192),
]
CONV_GRADIENTS = [*CONVOLUTIONS, (2, 1, 3, 5), (1, 3, 34, 64), (0, 4, 3, 2), (1, 0, 4, 3)]


def conv_of(batch, tokens, channels, taps, dtype, number=0):
    """dy, x, w, initial."""
    kind = "specials" if number % 4 == 2 else "normal"
    shapes = (batch, tokens, channels), (batch, tokens, channels), (channels, taps), (batch, taps - 1, channels)
    types = dtype, dtype, "fp32" if number % 2 else dtype, dtype
    return [data(kind, s, DTYPES[t], 10 * number + i) for i, (s, t) in enumerate(zip(shapes, types, strict=True))]


def check_selective_scan_backward(functions, dtype, cases=GRADIENTS):
    for number, sizes in enumerate(cases):
        batch, tokens, heads, width, _, states = sizes
        kind = "specials" if number % 4 == 2 else "normal"
        given = list(scan_of(*sizes, dtype, number, each_state=bool(number % 2), kind=kind))
        if number % 3 == 1:
            given[1] = given[1].astype(DTYPES[dtype])
        if number % 3 == 2:
            given[5] = None
        own = {"return_initial": number % 5 != 3}
        for i, name in enumerate(("initial", "dfinal")):
            if (number + i) % 3:
                own[name] = states_of(batch, heads, width, states, seed=9 + i)
        dy = data(kind, (batch, tokens, heads, width), DTYPES[dtype], 90 + number)
        want = reference.selective_scan_backward(dy, *given, **own)
        same(functions.selective_scan_backward(dy, *given, **own), want, sizes)


def check_gated_delta_backward(functions, dtype, cases=GRADIENTS):
    for number, sizes in enumerate(cases):
        batch, tokens, heads, width, _, keys = sizes
        kind = "specials" if number % 4 == 2 else "normal"
        given = list(delta_of(*sizes, dtype, number, kind))
        if number % 2:
            given[4] = given[4].astype(DTYPES[dtype])
        own = {"return_initial": number % 5 != 3}
        for i, name in enumerate(("initial", "dfinal")):
            if (number + i) % 3:
                own[name] = states_of(batch, heads, keys, width, seed=9 + i)
        dout = data(kind, (batch, tokens, heads, width), DTYPES[dtype], 90 + number)
        want = reference.gated_delta_backward(dout, *given, **own)
        same(functions.gated_delta_backward(dout, *given, **own), want, sizes)


def check_wide(functions, name, dtype):
    """Against the CPU's kernels; how many calls."""
    selective = name == "selective_scan_backward"
    maker = scan_of if selective else delta_of
    for number, sizes in enumerate(WIDE):
        batch, _, heads, width, _, states = sizes
        kind = "specials" if number == 3 else "normal"
        given = maker(*sizes, dtype, number, kind=kind)
        shape = (batch, heads, *((width, states) if selective else (states, width)))
        own = {"return_initial": True}
        if number % 2:
            own |= {"initial": states_of(*shape), "dfinal": states_of(*shape, seed=11)}
        value = given[0 if selective else 2]
        dy = data(kind, value.shape, value.dtype, 70)
        same(getattr(functions, name)(dy, *given, **own), getattr(pydet, name)(dy, *given, **own), sizes)
    # Last pieces of one to nine tokens, behind none, one, two and three others.
    lengths = [3, 0, 1, 36, 29, 7, 8, 9, 10, 11, 24, 25, 26]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    packs = [(2, 128), (1, 64), *([(1, 256)] if selective else [])]
    for heads, states in packs:
        given = maker(1, int(starts[-1]), heads, 32, 1, states, dtype, 7)
        value = given[0 if selective else 2]
        own = {"cu_seqlens": starts, "return_initial": True}
        dy = data("normal", value.shape, value.dtype, 71)
        same(getattr(functions, name)(dy, *given, **own), getattr(pydet, name)(dy, *given, **own), ("a pack", states))
    return len(WIDE) + len(packs)


def check_drawn(functions, name, dtype, count, seed=0, tokens=70):
    """Sizes, packs and layouts drawn at random, forwards or backwards, against the CPU's kernels; how many calls."""
    rng = random.Random(f"{name} {dtype} {seed}")
    selective, backwards = name.startswith("selective_scan"), name.endswith("backward")
    for number in range(count):
        states, width = (
            rng.choice([16, 32, 64, 96, 128, 128, 192, 256, 256]),
            rng.choice([1, 8, 16, 32, 33, 48, 64, 96]),
        )
        groups, most = rng.choice([1, 1, 2, 3]), rng.randint(1, tokens)
        starts = (
            sorted([0, most, *(rng.randint(0, most) for _ in range(rng.randint(0, 5)))]) if rng.random() < 0.4 else None
        )
        batch = 1 if starts else rng.randint(1, 3)
        sizes = batch, most, groups * rng.choice([1, 2, 3]), width, groups, states
        each = {"each_state": states <= 128 and rng.random() < 0.2} if selective else {}
        given = list((scan_of if selective else delta_of)(*sizes, dtype, number, **each))
        value, rows = (0, [3, 4]) if selective else (2, [0, 1])
        for i in [value, *rows]:
            if rng.random() < 0.2:  # columns, or rows, that lie apart
                given[i] = np.concatenate([given[i]] * 2, -1)[..., : given[i].shape[-1]]
        if selective and rng.random() < 0.3:
            given[5] = None
        shape = (len(starts) - 1 if starts else batch, sizes[2], *((width, states) if selective else (states, width)))
        own = {"cu_seqlens": np.array(starts, rng.choice([np.int32, np.int64]))} if starts else {}
        own |= {"return_initial" if backwards else "return_final": True}
        own |= {x: states_of(*shape, seed=i) for i, x in enumerate(("initial", "dfinal")) if rng.random() < 0.5}
        dy = [data("normal", given[value].shape, given[value].dtype, 70)] if backwards else []
        if not backwards:
            own.pop("dfinal", None)
        want = getattr(pydet, name)(*dy, *given, **own)
        same(getattr(functions, name)(*dy, *given, **own), want, (sizes, each, starts, number))
    return count


def check_pack(functions, name, given, dtype):
    """Sequences of a pack, of which one has no tokens."""
    x = given[0] if name == "selective_scan_backward" else given[2]
    dy, starts = data("normal", x.shape, DTYPES[dtype], 70), np.int32([0, 3, 3, 20])
    own = {"cu_seqlens": starts, "return_initial": True}
    same(getattr(functions, name)(dy, *given, **own), getattr(reference, name)(dy, *given, **own))


def test_selective_scan_backward(selective_scan_backward_kernel):
    check_selective_scan_backward(selective_scan_backward_kernel, selective_scan_backward_kernel.dtype)


def test_gated_delta_backward(gated_delta_backward_kernel):
    check_gated_delta_backward(gated_delta_backward_kernel, gated_delta_backward_kernel.dtype)


def check_causal_conv1d_backward(functions, dtype, cases=CONV_GRADIENTS):
    for number, sizes in enumerate(cases):
        *given, initial = conv_of(*sizes, dtype, number)
        own = {"initial": initial} if number % 3 else {}
        own |= {"bias": number % 3 != 2, "return_initial": number % 2 == 1}
        same(functions.causal_conv1d_backward(*given, **own), reference.causal_conv1d_backward(*given, **own), sizes)


def test_causal_conv1d_backward(causal_conv1d_backward_kernel):
    check_causal_conv1d_backward(causal_conv1d_backward_kernel, causal_conv1d_backward_kernel.dtype)


# ---- What they promise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_packed_convolutions(kind):
    """Each sequence has the bits that it has alone, one without tokens among them; fold makes a batch of any cut."""
    dy, x, w = (data("normal", s, np.float32, i) for i, s in enumerate([(1, 9, 40), (1, 9, 40), (40, 4)]))
    starts, initial = np.array([0, 3, 3, 4, 9], kind), data("normal", (4, 3, 40), np.float32, 5)
    own = {"bias": True, "return_initial": True}
    for more in ({}, {"initial": initial}):
        together = pydet.causal_conv1d_backward(dy, x, w, cu_seqlens=starts, **own, **more)
        same(together, reference.causal_conv1d_backward(dy, x, w, cu_seqlens=starts, **own, **more))
        sums = np.zeros((40, 4), np.float32)
        for s, (begin, end) in enumerate(itertools.pairwise(starts)):
            alone = {key: value[s : s + 1] for key, value in more.items()}
            got = pydet.causal_conv1d_backward(dy[:, begin:end], x[:, begin:end], w, **own, **alone)
            same(got, (together[0][:, begin:end], *(y[s : s + 1] for y in together[1:])))
            pydet.fold(got[1], out=sums, accumulate=True)
        assert_same_bits(pydet.fold(together[1]), sums)


def test_batch_threads_and_strides_change_nothing_in_convolutions():
    dy, x, w, initial = conv_of(3, 70, 33, 4, "bf16")
    own = {"initial": initial, "bias": True, "return_initial": True}
    with threads(1):
        want = pydet.causal_conv1d_backward(dy, x, w, **own)
    with threads(3):
        same(pydet.causal_conv1d_backward(dy, x, w, **own), want)
    apart = [np.asfortranarray(y) for y in (dy, x, w)]
    same(pydet.causal_conv1d_backward(*apart, **own), want)
    for i in range(3):
        row = pydet.causal_conv1d_backward(
            *(y[i : i + 1] for y in (dy, x)), w, **{**own, "initial": initial[i : i + 1]}
        )
        same(row, [y[i : i + 1] for y in want])


def test_the_order_of_the_tokens_shows():
    """A negative control: a chain from the first token has other bits."""
    dy, x, w, _ = conv_of(1, 40, 8, 1, "fp32")
    got = pydet.causal_conv1d_backward(dy, x, w)[1]
    turned = pydet.causal_conv1d_backward(dy[:, ::-1].copy(), x[:, ::-1].copy(), w)[1]
    assert got.tobytes() != turned.tobytes() and np.allclose(got, turned, 1e-4, 1e-4)


# ---- Refusals --------------------------------------------------------------------------------------------------------

CONV = conv_of(2, 3, 8, 4, "fp32")


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: pydet.causal_conv1d_backward(CONV[0][:, :2], *CONV[1:3]), "dy is 2x2x8, want 2x3x8"),
        (lambda: pydet.causal_conv1d_backward(CONV[0].astype("e"), *CONV[1:3]), "dy is float16, want float32"),
        (lambda: pydet.causal_conv1d_backward(*CONV[:2], CONV[2][:7]), "w is 7x4, want 8x4"),
        (lambda: pydet.causal_conv1d_backward(*CONV[:2], np.ones((8, 65), "f")), "w has 65 taps, want 1 to 64"),
        (
            lambda: pydet.causal_conv1d_backward(*CONV[:3], initial=np.ones((2, 4, 8), "f")),
            "initial is 2x4x8, want 2x3x8",
        ),
        (
            lambda: pydet.causal_conv1d_backward(*CONV[:3], cu_seqlens=np.int32([0, 3])),
            "want a pack: a batch of 1",
        ),
        (lambda: pydet.causal_conv1d_backward(*CONV[:3], return_initial="no"), "return_initial is"),
    ],
)
def test_refusals(call, sentence):
    with pytest.raises(pydet.Error) as caught:
        call()
    assert sentence in str(caught.value)


def test_null_pointers():
    assert lib.pydet_causal_conv1d_backward(ffi.NULL, *[ffi.NULL] * 9, ffi.NULL) == lib.PYDET_NULL_POINTER
