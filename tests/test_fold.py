"""Fold: every kernel, forced by name, against the reference; what it is for, and what it refuses."""

import itertools

import numpy as np
import pytest

import pydet
import reference
from capi import Tensor, ffi, last_error, lib, options, random, status_name
from cases import DTYPES, assert_same_bits, data
from conftest import threads

ORDERS = ("ordered", "tree")
COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64]
# Around vectors of 4, 8 and 16, the GPU's blocks of 256 and 1024 elements, and the CPU's pieces of 8192.
SIZES = [1, 3, 4, 5, 8, 15, 16, 17, 33, 255, 256, 257, 260, 1020, 1023, 1024, 1025, 1028, 2052]
LONG_SIZES = [8191, 8192, 8193, 8196, 16384, 20003]
KINDS = ("normal", "wide", "extremes", "specials")


def bias_of(shape, number):
    """None, or one of the two shapes in one of the three types."""
    dtype = list(DTYPES.values())[number % 3]
    kind = number % 4
    return None if kind == 0 else data("normal", shape if kind == 1 else shape[-1:], dtype, number)


def check(fold, sizes=SIZES, counts=COUNTS):
    """fold: pydet.fold, by one kernel. Every size with some counts, orders, biases and types."""
    number = 0
    for size, (count, order) in itertools.product(sizes, itertools.product(counts, ORDERS)):
        number += 1
        if size > 300 and number % 7:
            continue
        shape = (size,) if number % 3 else (2, size) if number % 2 else (size, 1)
        out_dtype, kind, accumulate = list(DTYPES.values())[number % 3], KINDS[number % 4], number % 5 == 0
        parts = data(kind, (count, *shape), reference.FLOAT32, number)
        bias = bias_of(shape, number)
        given = {"order": order} | ({} if bias is None else {"bias": bias})
        what = f"{count} of {shape} {kind} {order}, accumulate {accumulate}"
        if accumulate:
            start = data(kind, shape, reference.FLOAT32, number + 1)
            got, want = start.copy(), start.copy()
            fold(parts, out=got, accumulate=True, **given)
            assert_same_bits(got, reference.fold(parts, out=want, accumulate=True, **given), what)
        else:
            got = fold(parts, out_dtype=out_dtype, **given)
            assert_same_bits(got, reference.fold(parts, out_dtype=out_dtype, **given), what)
    assert number >= 36


def test_fold_equals_the_reference(fold_kernel):
    check(fold_kernel.fold)
    check(fold_kernel.fold, LONG_SIZES, [1, 3, 8])


def test_parts_at_any_address(fold_kernel):
    """Separate tensors, each four bytes further than aligned or more."""
    for offset, size in itertools.product(range(5), (1, 4, 31, 1024)):
        memory = [random(size + 8, seed=i) for i in range(6)]
        parts = [m[(offset + i) % 5 :][:size] for i, m in enumerate(memory)]
        want = reference.fold(np.stack(parts))
        assert_same_bits(fold_kernel.fold(parts), want)
        guarded = np.full(size + 9, 7, np.float32)
        fold_kernel.fold(parts, out=guarded[offset : offset + size])
        assert_same_bits(guarded[offset : offset + size], want)
        assert (guarded[:offset] == 7).all() and (guarded[offset + size :] == 7).all()


def test_threads_do_not_show():
    parts = random((8, 100_003))
    want = reference.fold(parts)
    for count in (1, 2, 5):
        with threads(count):
            assert_same_bits(pydet.fold(parts), want)


# ---- Promises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["ieee", "sm90"])
def test_folded_segments_are_a_product_with_k_chunk(arithmetic):
    """The sums of K's segments, each of a call, fold to the bits of one call, bias and rounding included."""
    dtype = np.float32 if arithmetic == "ieee" else DTYPES["bf16"]
    for k, chunk in ((512, 64), (2880, 368), (96, 16)):
        a, b, bias = (x.astype(dtype) for x in (random((9, k)), random((k, 21), seed=1), random(21, seed=2)))
        parts = [
            pydet.gemm(a[:, i : i + chunk], b[i : i + chunk], arithmetic=arithmetic, out_dtype="float32")
            for i in range(0, k, chunk)
        ]
        one = pydet.gemm(a, b, bias=bias, arithmetic=arithmetic, k_chunk=chunk, out_dtype=dtype)
        assert_same_bits(pydet.fold(parts, bias=bias, out_dtype=dtype), one, f"{k} by {chunk}")


def test_an_ordered_fold_may_be_cut_anywhere():
    parts = data("wide", (40, 333), reference.FLOAT32)
    whole = pydet.fold(parts, out_dtype="bfloat16")
    for cut in (1, 7, 39):
        first = pydet.fold(parts[:cut])
        pydet.fold(parts[cut:], out=first, accumulate=True)
        assert_same_bits(pydet.fold([first], out_dtype="bfloat16"), whole, f"cut at {cut}")


def test_a_tree_may_be_cut_at_powers_of_two():
    parts = data("specials", (22, 333), reference.FLOAT32)
    whole = pydet.fold(parts, order="tree")
    for group in (1, 2, 4, 8, 16, 32):
        subtrees = [pydet.fold(parts[i : i + group], order="tree") for i in range(0, 22, group)]
        assert_same_bits(pydet.fold(subtrees, order="tree"), whole, f"groups of {group}")


def test_the_tree_has_the_same_bits_on_up_to_1024_ranks():
    """A simulation: ranks add what is ready, in an order that follows where each of them happens to be."""
    parts, order = data("wide", (1024, 40), reference.FLOAT32), np.random.default_rng(7)
    whole = reference.fold(parts, order="tree")
    for ranks in 2 ** np.arange(11):
        have = {r: reference.fold(own, order="tree") for r, own in enumerate(np.split(parts, ranks))}
        span = dict.fromkeys(have, 1)  # how many ranks a sum is of, by the first of them
        node = order.permutation(ranks)  # where each rank runs: who meets whom first follows from it
        while len(have) > 1:
            ready = [r for r in have if r // span[r] % 2 == 0 and span.get(r + span[r]) == span[r]]
            r = min(ready, key=lambda r: (node[r] + node[r + span[r]], order.random()))
            partner = r + span[r]
            have[r] = have[partner] + have[r] if node[r] > node[partner] else have[r] + have.pop(partner)
            have.pop(partner, None), span.pop(partner)
            span[r] *= 2
        assert_same_bits(have[0] + np.float32(0), whole, f"{ranks} ranks")
    groups = [pydet.fold(group, order="tree") for group in np.split(parts, 16)]
    assert_same_bits(pydet.fold(groups, order="tree"), whole)


def test_other_orders_would_be_seen():
    """The control: the parts in another order, the other order, and a rounding in between have other bits."""
    parts = random((8, 4096))
    ordered, tree = pydet.fold(parts), pydet.fold(parts, order="tree")
    halves = pydet.fold([pydet.fold(parts[:4]), pydet.fold(parts[4:])])
    rounded = pydet.fold(parts.astype(np.float16).astype(np.float32))
    for other in (tree, pydet.fold(parts[::-1].copy()), halves, rounded):
        assert np.count_nonzero(other != ordered) > 1000
    assert np.count_nonzero(pydet.fold([pydet.fold(parts[i::2], order="tree") for i in (0, 1)]) != tree) > 1000


def test_zeros_and_nan():
    zero, inf, nan = np.float32(-0.0), np.inf, np.nan
    for order in ORDERS:
        minus = np.full((3, 1), zero)
        assert pydet.fold(minus, order=order).view(np.uint32)[0] == 0  # D begins at +0
        out = np.full(1, zero)
        assert pydet.fold(minus, out=out, accumulate=True, order=order).view(np.uint32)[0] == 0x80000000
        assert pydet.fold(np.float32([[inf], [-inf]]), order=order).view(np.uint32)[0] == 0x7FFFFFFF
        assert pydet.fold(np.float32([[nan], [1]]), order=order, out_dtype="float16").view(np.uint16)[0] == 0x7FFF


def test_empty_and_scalar():
    assert pydet.fold(np.zeros((3, 0, 5), np.float32)).shape == (0, 5) and pydet.last_kernel() == ""
    assert pydet.fold(np.float32([1, 2, 4])).tolist() == 7
    assert pydet.fold([np.float32([1, 2]), np.float32([3, 4])], bias=np.float16([1, 2])).tolist() == [5, 8]


# ---- Refusals ------------------------------------------------------------------------------------------------------


def test_python_sentences():
    x = random((4, 8))
    calls = [
        (lambda: pydet.fold([]), "fold: parts is a sequence of 0, want 1 to 64 parts"),
        (lambda: pydet.fold(random((65, 2))), "fold: parts is no float tensor of 1 to 64 parts along its first"),
        (lambda: pydet.fold([x[0]] * 65), "fold: parts is a sequence of 65, want 1 to 64 parts"),
        (lambda: pydet.fold([1, 2]), "fold: parts[0] is int, want a tensor"),
        (lambda: pydet.fold(x.astype(np.float16)), "fold: parts[0] is float16, want float32"),
        (lambda: pydet.fold([x[0], x[1, :7]]), "fold: parts[1] is 7, want 8"),
        (lambda: pydet.fold([x[0], x[:, 0]]), "fold: parts[1] is 4, want 8"),
        (lambda: pydet.fold(x[:, ::2]), "fold: parts[0] has stride 2 in dimension 0, want it contiguous"),
        (lambda: pydet.fold(x[::-1]), "fold: parts is a tensor whose first stride is negative"),
        (lambda: pydet.fold(x, out=x[2]), "fold: out shares memory with parts[2], want it apart"),
        (lambda: pydet.fold(x, out=np.zeros(7, np.float32)), "fold: parts[0] is 8, want 7"),
        (lambda: pydet.fold(x, bias=np.zeros(7, np.float32)), "fold: bias is 7, want 8"),
        (lambda: pydet.fold(x, bias=np.zeros((2, 8), np.float32)), "fold: bias is 2x8, want 8"),
        (lambda: pydet.fold(x, accumulate=True), "fold: accumulate needs out"),
        (lambda: pydet.fold(x, out=np.zeros(8, np.float16), accumulate=True), "fold: out is float16, want float32"),
        (lambda: pydet.fold(x, order="any"), "fold: order is 'any', want one of ordered, tree"),
        (lambda: pydet.fold(x, kernel="cpu_softmax_scalar"), "kernel cpu_softmax_scalar is not a fold kernel"),
    ]
    for call, sentence in calls:
        with pytest.raises(pydet.Error) as caught:
            call()
        assert sentence in str(caught.value), str(caught.value)


def test_c_refuses_and_touches_nothing():
    part, y = Tensor(random(8)), Tensor(np.full(8, 7, np.float32))
    parts = ffi.new("pydet_tensor *[]", [part.c, part.c])
    pointers = ffi.cast("const pydet_tensor *const *", parts)
    for given, wanted, sentence in (
        ((ffi.NULL, 2, ffi.NULL, y.c, ffi.NULL), "PYDET_NULL_POINTER", "fold: parts is NULL, want an array of 2"),
        ((pointers, 0, ffi.NULL, y.c, ffi.NULL), "PYDET_INVALID_VALUE", "fold: count is 0, want 1 to 64 parts"),
        ((pointers, 65, ffi.NULL, y.c, ffi.NULL), "PYDET_INVALID_VALUE", "fold: count is 65, want 1 to 64 parts"),
        ((pointers, 2, ffi.NULL, ffi.NULL, ffi.NULL), "PYDET_NULL_POINTER", "fold: out is NULL, want a tensor"),
        ((pointers, 2, ffi.NULL, y.c, options("pydet_fold_options", order=2)), "PYDET_INVALID_VALUE", "order is 2"),
        ((pointers, 2, ffi.NULL, y.c, options("pydet_fold_options", reserved=1)), "PYDET_INVALID_VALUE", "reserved"),
    ):
        assert status_name(lib.pydet_fold(ffi.NULL, *given)) == wanted
        assert sentence in last_error(), last_error()
    parts[1] = ffi.NULL
    assert status_name(lib.pydet_fold(ffi.NULL, pointers, 2, ffi.NULL, y.c, ffi.NULL)) == "PYDET_NULL_POINTER"
    assert "fold: parts[1] is NULL, want a tensor" in last_error()
    assert (y.array == 7).all()
    assert lib.pydet_fold(ffi.NULL, pointers, 1, ffi.NULL, y.c, ffi.NULL) == lib.PYDET_OK
    assert_same_bits(y.array, part.array)


PEERS_MEMORY = lib.PYDET_FOLD_SIGNALS + 4 * lib.PYDET_FOLD_ROOM  # of 2 parts on 2 ranks


@pytest.mark.parametrize(
    "changed, wanted, sentence",
    [
        ({"struct_size": 8}, "PYDET_INVALID_VALUE", "peers.struct_size is 8, want"),
        ({"ranks": 0}, "PYDET_INVALID_VALUE", "peers.ranks is 0, want 1 to 16"),
        ({"ranks": 17}, "PYDET_INVALID_VALUE", "peers.ranks is 17, want 1 to 16"),
        ({"rank": 2}, "PYDET_INVALID_VALUE", "peers.rank is 2, want 0 to 1"),
        ({"rank": -1}, "PYDET_INVALID_VALUE", "peers.rank is -1, want 0 to 1"),
        ({"gathered": 2}, "PYDET_INVALID_VALUE", "peers.gathered is 2, want 0 or 1"),
        ({"scatter": -1}, "PYDET_INVALID_VALUE", "peers.scatter is -1, want 0 or 1"),
        ({"memory": ffi.NULL}, "PYDET_NULL_POINTER", "peers.memory is NULL, want an array of addresses"),
        ({"memory": [16, 0]}, "PYDET_NULL_POINTER", "peers.memory[1] is NULL"),
        ({"memory": [8, 16]}, "PYDET_MISALIGNED", "peers.memory[0] is at 0x8, want a multiple of 16 bytes"),
        (
            {"fault": ffi.cast("uint64_t *", 20)},
            "PYDET_MISALIGNED",
            "peers.fault is at 0x14, want a multiple of 8 bytes",
        ),
        ({"memory_size": PEERS_MEMORY - 1}, "PYDET_WORKSPACE_TOO_SMALL", f"want {PEERS_MEMORY}"),
        ({"first_sums": 65}, "PYDET_INVALID_VALUE", "peers.first_sums is 65, want 0 to 64"),
        ({"first_sums": 2}, "PYDET_INVALID_VALUE", "first_sums is 2 with 1 parts of rank 1, gathered 0, want 2, not"),
        ({"first_sums": 1, "gathered": 1}, "PYDET_INVALID_VALUE", "of rank 1, gathered 1, want 1, not"),
        ({"from": 2}, "PYDET_INVALID_VALUE", "peers.from is 2, want 0 to 1"),
        ({"flag": ffi.cast("uint64_t *", 20)}, "PYDET_MISALIGNED", "peers.flag is at 0x14, want a multiple of 8 bytes"),
        ({"flag": ffi.cast("uint64_t *", 24)}, "PYDET_INVALID_VALUE", "peers.flag is given with word 0"),
        ({"scatter": 1}, "PYDET_INVALID_SHAPE", "parts[0] is 8, want 16"),
        ({"gathered": 1}, "PYDET_INVALID_SHAPE", "parts[0] is 8, want 4"),
        ({}, "PYDET_UNSUPPORTED", "peers"),  # which no kernel of the CPU has
    ],
)
def test_peers_are_refused(changed, wanted, sentence):
    part, y = Tensor(random(8)), Tensor(np.full(8, 7, np.float32))
    pointers = ffi.new("const pydet_tensor *[]", [part.c])
    given = {"ranks": 2, "rank": 1, "memory": [16, 32], "memory_size": PEERS_MEMORY, **changed}
    if isinstance(given["memory"], list):
        given["memory"] = memory = ffi.new("void *[]", [ffi.cast("void *", at) for at in given["memory"]])
        assert memory
    peers = options("pydet_fold_peers", **given)
    status = lib.pydet_fold(ffi.NULL, pointers, 1, ffi.NULL, y.c, options("pydet_fold_options", peers=peers))
    assert status_name(status) == wanted
    assert sentence in last_error() and last_error().startswith("fold: "), last_error()
    assert (y.array == 7).all()


def test_a_sum_goes_on_from_another_and_is_rounded_once():
    """accumulate and a fold of one part are a product that starts from a tensor, adds a bias and rounds at its end."""
    bias = random((33,))
    for arithmetic, k_chunk, dtype in (("ieee", None, "float32"), ("sm90", None, "bfloat16"), ("sm90", 16, "float16")):
        x, y = random((5, 96), dtype, 1), random((96, 33), dtype, 2)
        options = {"arithmetic": arithmetic, "k_chunk": k_chunk}
        want = pydet.gemm(x, y, bias=bias, out_dtype="bfloat16", **options)
        total = pydet.gemm(x[:, :48], y[:48], out_dtype="float32", **options)
        pydet.gemm(x[:, 48:], y[48:], out=total, accumulate=True, **options)
        assert_same_bits(pydet.fold([total], bias=bias, out_dtype="bfloat16"), want, arithmetic)


def test_the_audit_of_a_fold():
    parts, bias = random((8, 3, 40)), random((40,))
    for order in ORDERS:
        out = pydet.fold(parts, bias=bias, out_dtype="bfloat16", order=order)
        found = pydet.audit_fold(parts, out, bias=bias, order=order)
        assert (found.elements, found.checked, found.differing, found.first) == (120, 120, 0, ())
        assert found.all_equal and found.complete and (found.dtype, found.arithmetic) == ("bfloat16", "ieee")
    wrong = pydet.fold(parts)
    assert not pydet.audit_fold(parts, wrong, order="tree").all_equal
    wrong = pydet.fold(parts)
    wrong[2, 5] = np.nextafter(wrong[2, 5], np.float32(9))
    found = pydet.audit_fold(parts, wrong)
    assert found.differing == 1 and found.first[0].index == (2, 5) and found.first[0].got != found.first[0].want
    with pytest.raises(pydet.Error, match=r"fold: parts\[0\] is 3x40, want 3x39"):
        pydet.audit_fold(parts, wrong[:, :39].copy())
