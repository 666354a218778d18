"""AdamW: every kernel, forced by name, against the reference; what it promises of lists, and what it refuses."""

import ctypes
import itertools
import math

import numpy as np
import pytest

import pydet
import reference_adamw as reference
from capi import Tensor, ffi, last_error, lib, options, random, status_name
from cases import DTYPES, assert_same_bits, data
from conftest import threads

# Around vectors of 8 and 16, the GPU's pieces of 2048 elements, and the CPU's of 4096.
SIZES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 255, 257, 1024, 2040, 2047, 2048, 2049, 2056, 4095, 4096, 4097, 4104, 9001]
KINDS = ("normal", "wide", "extremes", "specials", "tiny")
NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")
HOW = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05, "beta_powers": (0.9**3, 0.98**3)}
# The first step, a late one, no correction at all, and numbers that leave parts of the formula out.
STEPS = [
    HOW,
    HOW | {"beta_powers": (0.9, 0.98)},
    HOW | {"beta_powers": (0.9**400, 0.98**4000), "weight_decay": 0.0},
    HOW | {"beta_powers": (0.0, 0.0), "betas": (0.0, 0.0)},
    HOW | {"lr": 0.0, "eps": 0.0},
    HOW | {"lr": 1e-42, "eps": 1e-41},
]


def placed(array, offset):
    """The array, `offset` elements behind a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 128 + offset * array.itemsize, np.uint8)
    begin = -memory.ctypes.data % 64 + offset * array.itemsize
    made = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def tensors_of(number, shape, dtype, kind="normal", offset=0, grad_dtype=None, with_master=None):
    """(param, grad, exp_avg, exp_avg_sq, master) of one parameter; to some elements its master does not round."""
    fp32 = np.dtype(np.float32)
    grad_dtype = list(DTYPES.values())[number % 3] if grad_dtype is None else grad_dtype
    with_master = number % 4 != 3 if with_master is None else with_master
    seed = 10 * number
    w = data(kind, shape, fp32, seed) if dtype != np.float16 else data("normal", shape, fp32, seed)
    with np.errstate(all="ignore"):
        param = w.astype(dtype)
    param.reshape(-1)[5::11] = data("normal", shape, dtype, seed + 1).reshape(-1)[5::11]
    grad, m = data(kind, shape, grad_dtype, seed + 2), data(kind, shape, fp32, seed + 3)
    v = np.abs(data(kind, shape, fp32, seed + 4))
    master = w if dtype != fp32 and with_master else None
    return [x if x is None else placed(x, offset * (1 + i % 2)) for i, x in enumerate((param, grad, m, v, master))]


def lists_of(tensors):
    """Those of many parameters, as pydet.adamw takes them."""
    lists = [list(x) for x in zip(*tensors, strict=True)]
    return lists[:4] + [None if all(x is None for x in lists[4]) else lists[4]]


def copied(tensors):
    return [[x if x is None else x.copy() for x in one] for one in tensors]


def check_lists(adamw, tensors, how, what, back=None):
    """One call for tensors where they lie; back: brings an array of the device to NumPy."""
    want = copied(tensors)
    reference.adamw(*lists_of(want), **how)
    adamw(*lists_of(tensors), **how)
    for i, (ours, theirs) in enumerate(zip(tensors, want, strict=True)):
        for name, x, y in zip(NAMES, ours, theirs, strict=True):
            if x is not None:
                assert_same_bits(x if back is None else back(x), y, f"{name}[{i}] of {what}")


def check(adamw, dtype, sizes=SIZES, kinds=KINDS, offsets=(0, 1, 4), steps=STEPS, bring=None, back=None):
    """adamw: pydet.adamw, by one kernel; dtype: of the parameters. bring, back: to a device and from it."""
    number = 0
    for size in sizes:
        for kind, offset in itertools.product(kinds, offsets):
            number += 1
            if size > 300 and number % 4:
                continue
            tensors = tensors_of(number, (size,), DTYPES[dtype], kind, offset)
            (want,), how = copied([tensors]), steps[number % len(steps)]
            reference.adamw(*lists_of([want]), **how)
            ours = tensors if bring is None else [x if x is None else bring(x) for x in tensors]
            adamw(*lists_of([ours]), **how)
            for name, x, y in zip(NAMES, ours, want, strict=True):
                if x is not None:
                    what = f"{name} of {size} {kind} {dtype}, {offset} elements in, {how}"
                    assert_same_bits(x if back is None else back(x), y, what)
    assert number


def test_adamw_equals_the_reference(adamw_kernel):
    check(adamw_kernel.adamw, adamw_kernel.dtype)


def many(count, dtypes, sizes=(1, 300, 5, 2048, 64, 4097, 0, 33, 2049), first=0):
    """Parameters of different sizes and types beside each other."""
    return [
        tensors_of(first + i, (sizes[i % len(sizes)],), dtypes[i % len(dtypes)], KINDS[i % 5], i % 3)
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 9, 63, 64])
def test_a_list_is_each_of_its_tensors(adamw_kernel, count):
    """Of all types beside each other, some without elements, some without a master."""
    dtypes = [DTYPES[adamw_kernel.dtype], *DTYPES.values()]
    check_lists(adamw_kernel.adamw, many(count, dtypes), HOW, f"{count} tensors")


def test_a_step_may_be_shared_out(adamw_kernel):
    """Rows of a parameter by themselves, as ranks have them, and a transposed parameter: bits of the whole."""
    dtype = DTYPES[adamw_kernel.dtype]
    whole, parts, turned = (tensors_of(1, (24, 100), dtype, "wide", with_master=True) for _ in range(3))
    adamw_kernel.adamw(*lists_of([whole]), **HOW)
    for rows in (slice(0, 1), slice(1, 17), slice(17, 24)):
        adamw_kernel.adamw(*lists_of([[x if x is None else x[rows] for x in parts]]), **HOW)
    in_columns = [x if x is None else np.asfortranarray(x) for x in turned]
    adamw_kernel.adamw(*lists_of([in_columns]), **HOW)
    for x, y, z in zip(whole, parts, in_columns, strict=True):
        if x is not None:
            assert_same_bits(y, x), assert_same_bits(np.ascontiguousarray(z), x)


def test_steps_follow_each_other(adamw_kernel):
    """A trajectory of 20 steps from zeros; and what is loaded on the way takes over."""
    dtype = DTYPES[adamw_kernel.dtype]
    ours, want = ([random((777,)).astype(dtype), None, *np.zeros((2, 777), np.float32), None] for _ in range(2))
    for x in (ours, want):
        x[4] = x[0].astype(np.float32) if dtype != np.float32 else None
    powers = (1.0, 1.0)
    for step in range(20):
        powers = (powers[0] * 0.9, powers[1] * 0.98)
        ours[1] = want[1] = random((777,), seed=step)
        if step == 10:
            ours[0][::3] = want[0][::3] = 0.5
        adamw_kernel.adamw(*lists_of([ours]), **HOW | {"beta_powers": powers})
        reference.adamw(*lists_of([want]), **HOW | {"beta_powers": powers})
        for name, x, y in zip(NAMES, ours, want, strict=True):
            if x is not None:
                assert_same_bits(x, y, f"{name} after step {step}")
    assert np.isfinite(want[2]).all() and want[3].any()


def test_threads_do_not_show():
    tensors = many(20, list(DTYPES.values()), sizes=(50_001, 3, 4096))
    want = copied(tensors)
    reference.adamw(*lists_of(want), **HOW)
    for count in (1, 2, 5):
        own = copied(tensors)
        with threads(count):
            pydet.adamw(*lists_of(own), **HOW)
        for x, y in zip(itertools.chain(*own), itertools.chain(*want), strict=True):
            if x is not None:
                assert_same_bits(x, y)


def test_other_formulas_would_be_seen():
    """The control: a fused multiply-add, a correction that is divided by, and a root that is off have other bits."""
    w, g, m = (random(4096, seed=i) for i in range(3))
    v = random(4096, seed=3) ** 2
    tensors = [w, g, m, v, None]
    got = copied([tensors])[0]
    pydet.adamw(*lists_of([got]), **HOW)
    beta1, rest1, beta2, rest2, factor, eps, decay, rate = reference.numbers_of(**HOW)
    wide = np.float64
    fused_m = (wide(beta1) * m + wide(rest1 * g)).astype(np.float32)
    fused_v = (wide(beta2) * v + wide(rest2 * g) * g).astype(np.float32)
    assert np.count_nonzero(fused_m != got[2]) > 400 and np.count_nonzero(fused_v != got[3]) > 400
    new_m, new_v = got[2], got[3]
    assert_same_bits(w * decay - (rate * new_m) / (np.sqrt(new_v) * factor + eps), got[0])
    divided = np.sqrt(new_v) / np.float32(math.sqrt(1 - HOW["beta_powers"][1])) + eps
    near = np.nextafter(np.sqrt(new_v), np.float32(9)) * factor + eps
    by_inverse = (rate * new_m) * (np.float32(1) / (np.sqrt(new_v) * factor + eps))
    for other in (rate * new_m / divided, rate * new_m / near, by_inverse):
        assert np.count_nonzero(w * decay - other != got[0]) > 20


def test_nan_and_zeros():
    """Every NaN that is written is the one of NUMERICS.md; a root of less than 0 is one; 0 / 0 where eps is 0."""
    nan = np.uint32(0xFFC12345).view(np.float32)
    for dtype, word in (("fp32", 0x7FFFFFFF), ("bf16", 0x7FFF), ("fp16", 0x7FFF)):
        w = np.ones(4, DTYPES[dtype])
        g, m, v = np.float32([nan, 1, 0, 1]), np.float32([1, nan, 0, 1]), np.float32([1, 1, 0, -9])
        master = None if dtype == "fp32" else [w.astype(np.float32)]
        pydet.adamw([w], [g], [m], [v], master, **HOW | {"eps": 0.0})
        assert reference.reference.bits(w).tolist() == [word] * 4
        assert reference.reference.bits(m)[:2].tolist() == [0x7FFFFFFF] * 2 and m[2] == 0
        assert reference.reference.bits(v)[0] == 0x7FFFFFFF and v[3] < 0
    w, kept = np.full(1, 2, DTYPES["bf16"]), np.float32([nan])  # of a master that is NaN the parameter is what there is
    pydet.adamw([w], [np.zeros(1, np.float32)], *np.zeros((2, 1, 1), np.float32), [kept], **HOW | {"weight_decay": 0})
    assert kept.tolist() == [2.0]


def test_subnormals_are_kept_whatever_the_thread_says():
    """The numbers of a step are made by the caller's thread, whose modes are another library's to set."""
    # 1 - lr weight_decay is halfway between two numbers of fp32; of a rounding downward it is below.
    how = HOW | {"lr": 1.0, "weight_decay": 2.0**-25 * (1 + 2.0**-40), "eps": 1e-44}
    one, other = tensors_of(0, (300,), np.dtype(np.float32), "tiny"), None
    other = copied([one])[0]
    pydet.adamw(*lists_of([one]), **how)
    libm = ctypes.CDLL("libm.so.6")
    before = libm.fegetround()
    torch = pytest.importorskip("torch")
    try:
        torch.set_flush_denormal(True)
        libm.fesetround(0x400)  # downward
        pydet.adamw(*lists_of([other]), **how)
    finally:
        libm.fesetround(before)
        torch.set_flush_denormal(False)
    for x, y in zip(one[:4], other[:4], strict=True):
        assert_same_bits(x, y)


def test_empty_and_scalar():
    empty = [np.zeros((3, 0), np.float32)]
    pydet.adamw(empty, empty, empty, empty, **HOW)
    assert pydet.last_kernel() == ""
    tensors = [np.array(x, np.float32) for x in (1.0, 2.0, 3.0, 4.0)] + [None]
    check_lists(pydet.adamw, [tensors], HOW, "a scalar")


def test_gradients_may_share_memory_with_each_other():
    g = random(40)
    tensors = [tensors_of(i, (40,), np.dtype(np.float32)) for i in range(3)]
    for one in tensors:
        one[1] = g
    check_lists(pydet.adamw, tensors, HOW, "one gradient of three parameters")


# ---- Refusals ------------------------------------------------------------------------------------------------------


def four(shape=(8,)):
    return [[np.full(shape, 1 + i, np.float32)] for i in range(4)]


def halves(shape=(8,)):
    return [[np.ones(shape, np.float16)], *four(shape)[1:], [np.ones(shape, np.float32)]]


MEMORY = np.ones(64, np.float32)
SENTENCES = [
    (lambda: pydet.adamw([], [], [], [], **HOW), "params is a sequence of 0, want 1 to 64 tensors"),
    (lambda: pydet.adamw(*([x[0]] * 65 for x in four()), **HOW), "params is a sequence of 65, want 1 to 64 tensors"),
    (lambda: pydet.adamw(*four()[:3], four()[3] * 2, **HOW), "exp_avg_sqs is a sequence of 2, want 1 as params is"),
    (lambda: pydet.adamw(*four(), [None] * 2, **HOW), "masters is a sequence of 2, want 1 as params is"),
    (lambda: pydet.adamw([1], *four()[1:], **HOW), "params[0] is int, want a tensor"),
    (
        lambda: pydet.adamw(*four()[:2], [np.ones(8, np.float16)], four()[3], **HOW),
        "exp_avgs[0] is float16, want float32",
    ),
    (lambda: pydet.adamw([np.ones(8)], *four()[1:], **HOW), "params[0] is float64"),
    (lambda: pydet.adamw(four()[0], four((7,))[1], *four()[2:], **HOW), "grads[0] is 7, want 8"),
    (
        lambda: pydet.adamw(*four(), four()[0], **HOW),
        "masters[0] is given, want none beside a parameter that is float32",
    ),
    (lambda: pydet.adamw(*halves()[:4], [np.ones(8, np.float16)], **HOW), "masters[0] is float16, want float32"),
    (
        lambda: pydet.adamw([MEMORY[::2]], *four((32,))[1:], **HOW),
        "params[0] has gaps between its elements, want it dense",
    ),
    (
        lambda: pydet.adamw(four((4, 2))[0], [np.ones((2, 4), np.float32).T], *four((4, 2))[2:], **HOW),
        "grads[0] has stride 1 in dimension 0, want 2 as params[0] has",
    ),
    (lambda: pydet.adamw([MEMORY[:8]], [MEMORY[7:15]], *four()[2:], **HOW), "params[0] shares memory with grads[0]"),
    (
        lambda: pydet.adamw(*four()[:2], [MEMORY[:8]], [MEMORY[4:12]], **HOW),
        "exp_avg_sqs[0] shares memory with exp_avgs[0]",
    ),
    (
        lambda: pydet.adamw([MEMORY[:8], MEMORY[:8]], *(x + y for x, y in zip(four()[1:], four()[1:])), **HOW),
        "params[1] shares memory with params[0]",
    ),
    (lambda: pydet.adamw(*four(), **HOW | {"lr": -1}), "lr is -1, want a finite number of 0 or more in float32"),
    (lambda: pydet.adamw(*four(), **HOW | {"eps": 1e39}), "eps is 1e+39, want a finite number of 0 or more in float32"),
    (lambda: pydet.adamw(*four(), **HOW | {"weight_decay": math.nan}), "weight_decay is nan, want a finite number"),
    (lambda: pydet.adamw(*four(), **HOW | {"betas": (0.9, 1)}), "beta2 is 1, want a number from 0 to below 1"),
    (
        lambda: pydet.adamw(*four(), **HOW | {"beta_powers": (1, 0)}),
        "beta1_power is 1, want a number from 0 to below 1",
    ),
    (lambda: pydet.adamw(*four(), **HOW | {"lr": "1"}), "lr is no number"),
    (lambda: pydet.adamw(*four(), **HOW, kernel="cpu_fold_scalar"), "kernel cpu_fold_scalar is not a adamw kernel"),
]


@pytest.mark.parametrize("number", range(len(SENTENCES)))
def test_python_sentences(number):
    call, sentence = SENTENCES[number]
    with pytest.raises(pydet.Error) as caught:
        call()
    assert str(caught.value).startswith("adamw: ") and sentence in str(caught.value), str(caught.value)
    assert (MEMORY == 1).all()


def test_what_is_read_only_is_not_written():
    for place in (0, 2, 3):
        lists = four()
        lists[place][0].flags.writeable = False
        with pytest.raises(pydet.Error, match=rf"^adamw: {NAMES[place]}\[0\] is read-only"):
            pydet.adamw(*lists, **HOW)
    lists = four()
    lists[1][0].flags.writeable = False
    pydet.adamw(*lists, **HOW)


def test_c_refuses_and_touches_nothing():
    tensors = [Tensor(np.full(8, 1 + i, np.float32)) for i in range(4)]
    lists = [ffi.new("const pydet_tensor *[]", [x.c] * 2) for x in tensors]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "beta1_power": 0.9, "beta2_power": 0.99}
    step, null = options("pydet_adamw_step", **numbers), ffi.NULL
    for given, wanted, sentence in (
        ((null, *lists[1:], null, 1, step, null), "NULL_POINTER", "params is NULL, want an array of 1 tensors"),
        ((*lists[:3], null, null, 1, step, null), "NULL_POINTER", "exp_avg_sqs is NULL, want an array of 1 tensors"),
        ((*lists, null, 0, step, null), "INVALID_VALUE", "count is 0, want 1 to 64 tensors"),
        ((*lists, null, 65, step, null), "INVALID_VALUE", "count is 65, want 1 to 64 tensors"),
        ((*lists, null, 1, null, null), "NULL_POINTER", "step is NULL, want the numbers of the step"),
        ((*lists, null, 1, options("pydet_adamw_step", struct_size=9), null), "INVALID_VALUE", "step.struct_size is 9"),
        (
            (*lists, null, 1, options("pydet_adamw_step", reserved=1), null),
            "INVALID_VALUE",
            "step.reserved is 1, want 0",
        ),
        ((*lists, null, 1, step, options("pydet_adamw_options", reserved=1)), "INVALID_VALUE", "options.reserved is 1"),
        ((*lists, null, 2, step, null), "OVERLAP", "[1] shares memory with "),
    ):
        assert status_name(lib.pydet_adamw(null, *given)) == f"PYDET_{wanted}"
        assert sentence in last_error(), last_error()
    assert all((x.array == 1 + i).all() for i, x in enumerate(tensors))
    assert lib.pydet_adamw(null, *lists, null, 1, step, null) == lib.PYDET_OK
    want = [[np.full(8, 1 + i, np.float32)] for i in range(4)]
    how = {"lr": 0.1, "betas": (0.9, 0.99), "beta_powers": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.0}
    reference.adamw(*want, **how)
    for x, (y,) in zip(tensors, want, strict=True):
        assert_same_bits(x.array, y)
