"""Scans over tokens: every kernel, forced by name, against the reference; cuts, packs and layouts; refusals."""

import itertools

import numpy as np
import pytest

import pydet
import reference_scan as reference
from capi import ffi, lib
from cases import DTYPES, assert_same_bits, data
from conftest import threads

# batch, tokens, heads, width, groups, states: around the CPU's 32 columns, a round of 32 states and its pieces of 4;
# heads whose columns lie within one task and across it.
SCANS = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 4, 8, 2, 16),
    (1, 2, 33, 1, 1, 3),
    (2, 2, 70, 1, 1, 5),
    (1, 3, 3, 31, 1, 33),
    (1, 2, 2, 32, 2, 31),
    (1, 2, 2, 33, 1, 32),
    (1, 2, 6, 12, 3, 65),
    (2, 1, 1, 64, 1, 128),
]
# States of whole rounds, of which a GPU's threads have several columns: around its turns of 4 tokens and its tiles of
# 4, 8 and 16, several of them; heads that end within a thread's columns. A decay for each head. By tokens and columns
# 132 multiprocessors take each of their ways: two blocks side by side where they are few, else blocks of 16 to 64.
WIDE = [
    (1, 1, 2, 64, 1, 128),
    (2, 7, 2, 13, 2, 32),
    (1, 8, 4, 20, 2, 256),
    (1, 9, 3, 41, 3, 64),
    (5, 5, 6, 128, 3, 128),
    (1, 36, 35, 66, 1, 64),
    (9, 3, 2, 128, 1, 256),
    (1, 45, 46, 50, 1, 32),
    (1, 83, 2, 70, 1, 128),
    (2, 70, 2, 24, 1, 256),
    (1, 31, 31, 69, 1, 128),
    (1, 71, 31, 69, 1, 256),
    (1, 49, 62, 69, 1, 128),
    (1, 70, 62, 69, 1, 64),
    (1, 73, 62, 69, 1, 32),
    (1, 66, 77, 69, 1, 128),
]
# What a GPU's kernels of a few tokens take: states of whole vectors, around a round of 32; blocks of 16 and 32 columns,
# and so many blocks that threads have vectors of columns.
STEPS = [
    (1, 1, 1, 1, 1, 4),
    (3, 1, 4, 8, 2, 16),
    (2, 2, 17, 1, 1, 8),
    (2, 3, 3, 31, 1, 32),
    (1, 4, 2, 33, 1, 36),
    (1, 1, 6, 12, 3, 64),
    (2, 1, 5, 64, 5, 128),
    (1, 6, 2, 40, 1, 256),
    (2, 1, 3, 70, 1, 100),
    (2, 2, 132, 4, 2, 32),
    (1, 1, 264, 36, 1, 64),
    (1, 2, 70, 132, 1, 32),
    (2, 1, 70, 4, 2, 128),
    (1, 1, 133, 66, 1, 252),
]
CONVOLUTIONS = [(1, 1, 1, 1), (2, 5, 31, 4), (1, 4, 32, 2), (2, 3, 33, 4), (1, 65, 3, 3), (1, 130, 65, 4), (1, 2, 5, 7)]
# Channels that are whole vectors; more tokens than a GPU's block or its steps ahead have.
CONVOLUTIONS += [(1, 300, 72, 4), (2, 33, 8, 3), (1, 32, 64, 2), (2, 130, 16, 4)]


def scan_of(batch, tokens, heads, width, groups, states, dtype, seed=0, each_state=False, kind="normal"):
    """x, dt, a, b, c, d."""
    kind_of = lambda i, *shape: data(kind, shape, DTYPES[dtype], 8 * seed + i)
    plain = lambda i, *shape: np.abs(data("normal", shape, np.float32, 8 * seed + i))
    x, b, c = (
        kind_of(i, batch, tokens, *more) for i, more in enumerate([(heads, width), (groups, states), (groups, states)])
    )
    a = -plain(4, *([heads, states] if each_state else [heads]))
    return x, plain(3, batch, tokens, heads), a, b, c, plain(5, heads)


def delta_of(batch, tokens, heads, width, groups, keys, dtype, seed=0, kind="normal"):
    """q, k, v, g, beta."""
    kind_of = lambda i, *shape: data(kind, (batch, tokens, *shape), DTYPES[dtype], 8 * seed + i)
    plain = lambda i: np.abs(data("normal", (batch, tokens, heads), np.float32, 8 * seed + i))
    q, k = (kind_of(i, groups, keys) for i in range(2))
    if kind == "normal":
        q, k = (x * DTYPES[dtype].type(keys**-0.5) for x in (q, k))
    return q, k, kind_of(2, heads, width), -plain(3), plain(4)


def states_of(*shape, seed=9):
    return data("normal", shape, np.float32, seed)


def same(got, want, what=""):
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None), what
        if y is not None:
            assert_same_bits(x, y, what)


def check_selective_scan(functions, dtype, cases=SCANS):
    for number, sizes in enumerate(cases):
        batch, tokens, heads, width, groups, states = sizes
        kind = "specials" if number % 4 == 2 else "normal"
        given = list(scan_of(*sizes, dtype, number, each_state=bool(number % 2), kind=kind))
        if number % 3 == 1:
            given[1] = given[1].astype(DTYPES[dtype])
        if number % 3 == 2:
            given[5] = None
        own = {"return_final": number % 5 != 3}
        if number % 3:
            own["initial"] = states_of(batch, heads, width, states)
        same(functions.selective_scan(*given, **own), reference.selective_scan(*given, **own), sizes)


def check_wide(functions, name, dtype, numbers=None):
    """Against the CPU's kernels: those of these numbers, or all."""
    for number in range(len(WIDE)) if numbers is None else numbers:
        sizes = WIDE[number]
        batch, _, heads, width, _, states = sizes
        kind = "specials" if number in (2, 4) else "normal"
        selective = name == "selective_scan"
        given = (scan_of if selective else delta_of)(*sizes, dtype, number, kind=kind)
        own = {"return_final": True}
        if number % 2:
            own["initial"] = states_of(batch, heads, *((width, states) if selective else (states, width)))
        if number % 3 == 0:  # columns of heads that lie apart
            place = 0 if selective else 2
            given = [*given[:place], np.concatenate([given[place]] * 2, -1)[..., :width], *given[place + 1 :]]
        same(getattr(functions, name)(*given, **own), getattr(pydet, name)(*given, **own), sizes)
    starts = np.int32([0, 3, 3, 4, 20, 29])
    given = (scan_of if selective else delta_of)(1, 29, 2, 12, 1, 128, dtype, 7)
    initial = states_of(5, 2, *((12, 128) if selective else (128, 12)))
    own = {"cu_seqlens": starts, "initial": initial, "return_final": True}
    same(getattr(functions, name)(*given, **own), getattr(pydet, name)(*given, **own), "a pack")


def check_steps(functions, name, dtype):
    """Against the CPU's kernels: each way to have states, a pack."""
    selective = name == "selective_scan"
    for number, sizes in enumerate(STEPS):
        batch, _, heads, width, _, states = sizes
        own = {"each_state": bool(number % 2)} if selective else {}
        given = list((scan_of if selective else delta_of)(*sizes, dtype, number, **own))
        if number % 3 == 1:
            place = 1 if selective else 3
            given[place] = given[place].astype(DTYPES[dtype])
        if number % 3 == 2 and selective:
            given[5] = None
        shape = (batch, heads, *((width, states) if selective else (states, width)))
        more = {"return_final": number % 5 != 3} | ({"initial": states_of(*shape)} if number % 4 else {})
        want = getattr(pydet, name)(*given, **more)
        same(getattr(functions, name)(*given, **more), want, sizes)
        if number % 4 and want[1] is not None:
            wider = np.full((*shape[:-1], shape[-1] + 4), 7, np.float32)  # whose rows lie apart
            wider[..., :-4] = more["initial"]
            same(getattr(functions, name)(*given, initial=wider[..., :-4], return_final=True), want, sizes)
    given = (scan_of if selective else delta_of)(1, 8, 2, 12, 1, 128, dtype, 7)
    initial = states_of(5, 2, *((12, 128) if selective else (128, 12)))
    own = {"cu_seqlens": np.int32([0, 1, 1, 2, 7, 8]), "initial": initial, "return_final": True}
    same(getattr(functions, name)(*given, **own), getattr(pydet, name)(*given, **own), "a pack")


def check_gated_delta(functions, dtype, cases=SCANS):
    for number, sizes in enumerate(cases):
        batch, _, heads, width, _, keys = sizes
        given = list(delta_of(*sizes, dtype, number, "specials" if number % 4 == 2 else "normal"))
        if number % 2:
            given[4] = given[4].astype(DTYPES[dtype])
        own = {"return_final": number % 5 != 3}
        if number % 3:
            own["initial"] = states_of(batch, heads, keys, width)
        same(functions.gated_delta(*given, **own), reference.gated_delta(*given, **own), sizes)


def check_causal_conv1d(functions, dtype, cases=CONVOLUTIONS):
    for number, (batch, tokens, channels, taps) in enumerate(cases):
        x, w, bias, initial = (
            data("specials" if number % 4 == 2 else "normal", shape, DTYPES[kind], number)
            for shape, kind in (
                ((batch, tokens, channels), dtype),
                ((channels, taps), "fp32" if number % 2 else dtype),
                ((channels,), dtype),
                ((batch, taps - 1, channels), dtype),
            )
        )
        bias = None if number % 3 == 2 else bias
        own = {"initial": initial} if number % 3 else {}
        want = reference.causal_conv1d(x, w, bias, **own)
        assert_same_bits(functions.causal_conv1d(x, w, bias, **own), want, (batch, tokens, channels, taps))


def test_selective_scan(selective_scan_kernel):
    check_selective_scan(selective_scan_kernel, selective_scan_kernel.dtype)


def test_gated_delta(gated_delta_kernel):
    check_gated_delta(gated_delta_kernel, gated_delta_kernel.dtype)


def test_causal_conv1d(causal_conv1d_kernel):
    check_causal_conv1d(causal_conv1d_kernel, causal_conv1d_kernel.dtype)


# ---- What they promise -----------------------------------------------------------------------------------------------


def operands(name, tokens, dtype="bf16", batch=1):
    """What an operation takes of so many tokens, which of it has tokens, and the shape of a state."""
    if name == "selective_scan":
        return scan_of(batch, tokens, 4, 8, 2, 20, dtype), (0, 1, 3, 4), (4, 8, 20)
    return delta_of(batch, tokens, 4, 8, 2, 20, dtype), (0, 1, 2, 3, 4), (4, 20, 8)


def cut(given, of_tokens, part):
    return [x[:, part] if i in of_tokens else x for i, x in enumerate(given)]


@pytest.mark.parametrize("name", ["selective_scan", "gated_delta"])
@pytest.mark.parametrize("at", [0, 1, 6, 7])
def test_tokens_may_be_cut_anywhere(name, at):
    """Prefill in pieces, and decoding token by token, have the bits of one call; the state may stay in its place."""
    function, (given, of_tokens, shape) = getattr(pydet, name), operands(name, 7)
    whole, final = function(*given, return_final=True)
    state, rows = np.zeros((1, *shape), np.float32), []
    for part in (slice(0, at), slice(at, 7)):
        y, last = function(*cut(given, of_tokens, part), initial=state, final=state)
        assert last is state
        rows.append(y)
    assert_same_bits(np.concatenate(rows, 1), whole)
    assert_same_bits(state, final)
    steps, state = [], None
    for t in range(7):
        y, state = function(*cut(given, of_tokens, slice(t, t + 1)), initial=state, return_final=True)
        steps.append(y)
    assert_same_bits(np.concatenate(steps, 1), whole)
    assert_same_bits(state, final)


@pytest.mark.parametrize("name", ["selective_scan", "gated_delta", "causal_conv1d"])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_packed_sequences(name, kind):
    """Each has the bits that it has alone, one without tokens among them."""
    starts = np.array([0, 3, 3, 4, 9], kind)
    if name == "causal_conv1d":
        given, of_tokens, own = [*(data("normal", s, np.float32) for s in ((1, 9, 40), (40, 4), (40,)))], (0,), {}
        initial = states_of(4, 3, 40)
    else:
        given, of_tokens, shape = operands(name, 9)
        own, initial = {"return_final": True}, states_of(4, *shape)
    for more in ({}, {"initial": initial}):
        together = getattr(pydet, name)(*given, cu_seqlens=starts, **own, **more)
        same_as = getattr(reference, name)(*given, cu_seqlens=starts, **own, **more)
        same(together if own else [together], same_as if own else [same_as])
        for s, (begin, end) in enumerate(itertools.pairwise(starts)):
            alone = {key: x[s : s + 1] for key, x in more.items()}
            got = getattr(pydet, name)(*cut(given, of_tokens, slice(begin, end)), **own, **alone)
            y, last = got if own else (got, None)
            assert_same_bits(y, (together[0] if own else together)[:, begin:end])
            if own:
                assert_same_bits(last[0], together[1][s])


@pytest.mark.parametrize("name", ["selective_scan", "gated_delta"])
def test_batch_threads_and_strides_change_nothing(name):
    function, (given, of_tokens, _) = getattr(pydet, name), operands(name, 40, batch=3)
    with threads(1):
        want = function(*given, return_final=True)
    with threads(3):
        same(function(*given, return_final=True), want)
    for i in range(3):
        row = [x[i : i + 1] if place in of_tokens else x for place, x in enumerate(given)]
        same([x[0] for x in function(*row, return_final=True)], [x[i] for x in want])
    apart = [
        np.asfortranarray(x) if place in of_tokens else np.repeat(x, 2, 0)[::2] if x is not None else x
        for place, x in enumerate(given)
    ]
    same(function(*apart, return_final=True), want)


def test_a_convolution_may_be_cut_anywhere():
    x, w, bias = (data("normal", shape, np.float32) for shape in ((2, 9, 33), (33, 4), (33,)))
    whole = pydet.causal_conv1d(x, w, bias)
    for at in (3, 4, 8):
        rest = pydet.causal_conv1d(x[:, at:], w, bias, initial=x[:, at - 3 : at])
        assert_same_bits(np.concatenate([pydet.causal_conv1d(x[:, :at], w, bias), rest], 1), whole)
    across = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
    assert_same_bits(pydet.causal_conv1d(across, w, bias), whole)


@pytest.mark.parametrize("name", ["selective_scan", "gated_delta"])
def test_zeros_in_front_change_nothing(name):
    """Padding on the left, as models have it: inputs of zeros, of which no state comes."""
    function, (given, of_tokens, _) = getattr(pydet, name), operands(name, 5)
    zeros = (0, 3, 4) if name == "selective_scan" else (0, 1, 2)
    padded = [
        np.concatenate([np.zeros_like(x[:, :2]) if i in zeros else x[:, :2], x], 1) if i in of_tokens else x
        for i, x in enumerate(given)
    ]
    y, state = function(*padded, return_final=True)
    whole, final = function(*given, return_final=True)
    assert_same_bits(y[:, 2:], whole)
    assert_same_bits(state, final)


@pytest.mark.parametrize("name", ["selective_scan", "gated_delta"])
def test_the_order_of_the_states_shows(name):
    """A negative control: states in another order give other bits, as other lanes would."""
    given, of_tokens, _ = operands(name, 4, "fp32")
    last = (3, 4) if name == "selective_scan" else (0, 1)
    turned = [x[..., ::-1].copy() if i in last else x for i, x in enumerate(given)]
    a, b = (getattr(pydet, name)(*x)[0] for x in (given, turned))
    assert a.tobytes() != b.tobytes() and np.allclose(a, b, 1e-4, 1e-4)


def test_what_they_compute():
    """Against the recurrences in double."""
    x, dt, a, b, c, d = scan_of(1, 6, 2, 3, 1, 4, "fp32")
    state, want = np.zeros((2, 3, 4)), []
    for t in range(6):
        state = np.exp(dt[0, t] * a, dtype=float)[:, None, None] * state
        state += (dt[0, t][:, None] * x[0, t])[..., None] * b[0, t, 0]
        want.append(state @ c[0, t, 0] + d[:, None] * x[0, t])
    assert np.allclose(pydet.selective_scan(x, dt, a, b, c, d)[0][0], want, 1e-5, 1e-6)
    q, k, v, g, beta = delta_of(1, 6, 2, 3, 1, 4, "fp32")
    state, want = np.zeros((2, 4, 3)), []
    for t in range(6):
        state = np.exp(g[0, t], dtype=float)[:, None, None] * state
        w = beta[0, t][:, None] * (v[0, t] - k[0, t, 0] @ state)
        state = state + k[0, t, 0][:, None] * w[:, None]
        want.append(q[0, t, 0] @ state)
    assert np.allclose(pydet.gated_delta(q, k, v, g, beta)[0][0], want, 1e-4, 1e-5)


# ---- Refusals --------------------------------------------------------------------------------------------------------


def changed(given, place, x):
    return [x if i == place else y for i, y in enumerate(given)]


SCAN, DELTA = scan_of(2, 3, 4, 8, 2, 16, "fp32"), delta_of(2, 3, 4, 8, 2, 16, "fp32")
CONV = [data("normal", shape, np.float32) for shape in ((2, 3, 8), (8, 4), (8,))]
PACK = [x[:1] if i in (0, 1, 3, 4) else x for i, x in enumerate(SCAN)]


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: pydet.selective_scan(*changed(SCAN, 0, SCAN[0][0])), "x is 3x4x8, want [batch, tokens, heads, width]"),
        (lambda: pydet.selective_scan(*changed(SCAN, 1, SCAN[1][:, :2])), "dt is 2x2x4, want 2x3x4"),
        (lambda: pydet.selective_scan(*changed(SCAN, 2, SCAN[2][:3])), "a is 3, want 4"),
        (lambda: pydet.selective_scan(*changed(SCAN, 2, np.ones((4, 15), "f"))), "a is 4x15, want 4x16"),
        (lambda: pydet.selective_scan(*changed(SCAN, 2, SCAN[2].astype(np.float16))), "a is float16, want float32"),
        (lambda: pydet.selective_scan(*changed(SCAN, 4, SCAN[4][..., :8])), "c is 2x3x2x8, want 2x3x2x16"),
        (lambda: pydet.selective_scan(*changed(SCAN, 5, SCAN[5][:1])), "d is 1, want 4"),
        (
            lambda: pydet.selective_scan(*changed(changed(SCAN, 3, SCAN[3].repeat(32, 3)), 4, SCAN[4].repeat(33, 3))),
            "c is 2x3x2x528, want 2x3x2x512",
        ),
        (
            lambda: pydet.selective_scan(*(x.repeat(33, 3) if i in (3, 4) else x for i, x in enumerate(SCAN))),
            "b has 528 states, want 1 to 512",
        ),
        (
            lambda: pydet.selective_scan(
                *changed(changed(SCAN, 3, np.ones((2, 3, 3, 16), "f")), 4, np.ones((2, 3, 3, 16), "f"))
            ),
            "x has 4 heads, want a multiple of the 3 of b",
        ),
        (
            lambda: pydet.selective_scan(*SCAN, initial=np.ones((2, 4, 8, 15), "f")),
            "initial is 2x4x8x15, want 2x4x8x16",
        ),
        (lambda: pydet.selective_scan(*SCAN, out=np.ones((2, 3, 4, 8), np.float16)), "y is float16, want float32"),
        (lambda: pydet.selective_scan(*SCAN, out=SCAN[0]), "y shares memory with x, want it apart"),
        (lambda: pydet.selective_scan(*SCAN, cu_seqlens=np.int32([0, 3])), "want a pack: a batch of 1"),
        (lambda: pydet.selective_scan(*PACK, cu_seqlens=np.int32([0])), "cu_seqlens has 0 at 0, want boundaries"),
        (lambda: pydet.selective_scan(*PACK, cu_seqlens=np.int32([0, 2])), "cu_seqlens has 2 at 1, want boundaries"),
        (lambda: pydet.selective_scan(*PACK, cu_seqlens=np.int32([1, 3])), "cu_seqlens has 1 at 0, want boundaries"),
        (lambda: pydet.selective_scan(*PACK, cu_seqlens=np.int32([0, 2, 1, 3])), "cu_seqlens has 1 at 2, want bound"),
        (lambda: pydet.selective_scan(*PACK, cu_seqlens=np.float32([0, 3])), "cu_seqlens is float32, want int32"),
        (lambda: pydet.gated_delta(*changed(DELTA, 0, DELTA[0][..., :8])), "q is 2x3x2x8, want 2x3x2x16"),
        (lambda: pydet.gated_delta(*changed(DELTA, 3, DELTA[3][0])), "g is 3x4, want 2x3x4"),
        (lambda: pydet.gated_delta(*changed(DELTA, 4, DELTA[4][:1])), "beta is 1x3x4, want 2x3x4"),
        (lambda: pydet.gated_delta(*DELTA, initial=np.ones((2, 4, 8, 16), "f")), "initial is 2x4x8x16, want 2x4x16x8"),
        (lambda: pydet.causal_conv1d(CONV[0][0], *CONV[1:]), "x is 3x8, want [batch, tokens, channels]"),
        (lambda: pydet.causal_conv1d(CONV[0], CONV[1][:7], CONV[2]), "w is 7x4, want 8x4"),
        (lambda: pydet.causal_conv1d(CONV[0], np.ones((8, 65), "f")), "w has 65 taps, want 1 to 64"),
        (lambda: pydet.causal_conv1d(*CONV, initial=np.ones((2, 4, 8), "f")), "initial is 2x4x8, want 2x3x8"),
        (
            lambda: pydet.causal_conv1d(*CONV, initial=np.ones((2, 3, 8), np.float16)),
            "initial is float16, want float32",
        ),
    ],
)
def test_refusals(call, sentence):
    with pytest.raises(pydet.Error) as caught:
        call()
    assert sentence in str(caught.value)


def test_a_state_that_shares_part_of_the_other():
    memory = np.zeros((3, 4, 8, 16), np.float32)
    with pytest.raises(pydet.Error, match="final shares memory with initial, want it apart"):
        pydet.selective_scan(*SCAN, initial=memory[:2], final=memory[1:])
    pydet.selective_scan(*SCAN, initial=memory[:2], final=memory[:2])


def test_null_pointers():
    assert lib.pydet_selective_scan(ffi.NULL, *[ffi.NULL] * 10, ffi.NULL) == lib.PYDET_NULL_POINTER
    assert lib.pydet_gated_delta(ffi.NULL, *[ffi.NULL] * 9, ffi.NULL) == lib.PYDET_NULL_POINTER
    assert lib.pydet_causal_conv1d(ffi.NULL, *[ffi.NULL] * 6, ffi.NULL) == lib.PYDET_NULL_POINTER


@pytest.mark.parametrize("name", ["selective_scan", "gated_delta", "causal_conv1d"])
def test_nothing_to_do(name):
    if name == "causal_conv1d":
        assert pydet.causal_conv1d(CONV[0][:, :0], *CONV[1:]).shape == (2, 0, 8)
        return
    given, of_tokens, shape = operands(name, 0, batch=2)
    start = states_of(2, *shape)
    y, state = getattr(pydet, name)(*given, initial=start, return_final=True)
    assert y.shape[1] == 0
    assert_same_bits(state, start)
