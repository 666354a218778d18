"""pydet.jax in fp8: scaled products and quantisation under jit have the bits of the eager calls; bad input."""

import re

import ml_dtypes
import numpy as np
import pytest

import pydet
from test_jax import all_same, device, eager, jax, jnp, normal, pj, same  # noqa: F401

E4M3, E5M2, E8M0 = (np.dtype(x) for x in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu))
FLOAT32, BF16, FLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


@pytest.fixture
def fp8(device):
    kernels = [k for k in pydet.kernels() if k.operation == "scaled_gemm" and k.device == device and k.available]
    if "sm90" not in {kernel.arithmetic for kernel in kernels}:
        pytest.skip(f"no kernel of scaled_gemm on {device} here")


def operands(m, n, k, granularity=("group", "block"), types=(E4M3, E4M3), scale_dtype=FLOAT32):
    """a, a_scale, w, w_scale of NumPy; w is b transposed."""
    return tuple(
        part
        for seed, rows, of, dtype in ((0, m, granularity[0], types[0]), (1, n, granularity[1], types[1]))
        for part in pydet.quantize(normal(rows, k, seed=seed), granularity=of, dtype=dtype, scale_dtype=scale_dtype)
    )


@pytest.mark.parametrize("granularity", [("group", "block"), ("row", "row"), ("group", "group")], ids=str)
def test_scaled_gemm(fp8, eager, granularity):
    for types, scale_dtype, out, bias in (
        ((E4M3, E4M3), FLOAT32, BF16, None),
        ((E5M2, E4M3), FLOAT32, FLOAT32, normal(144)),
        ((E4M3, E5M2), E8M0, FLOAT16, normal(20, 144, dtype=BF16, seed=2)),
        ((E5M2, E5M2), E8M0, BF16, normal(1, 144, dtype=FLOAT16)),
    ):
        a, sa, w, sw = operands(20, 144, 272, granularity, types, scale_dtype)
        options = {"bias": bias, "out_dtype": out, "arithmetic": "sm90"}
        want = eager.scaled_gemm(a, w.T, a_scale=sa, b_scale=sw.T, **options)
        run = jax.jit(lambda a, sa, w, sw, o=options: pj.scaled_gemm(a, w.T, a_scale=sa, b_scale=sw.T, **o))
        same(run(a, sa, w, sw), want)
    b = np.ascontiguousarray(w.T)  # of which XLA makes the transpose
    same(pj.scaled_gemm(a, b, a_scale=sa, b_scale=sw.T, **options), want)


def test_chains_and_what_they_continue(fp8, eager):
    """k_chunk, no scales, one scale a matrix; and a sum continued over parts of K in a scan."""
    a, _, w, _ = operands(20, 144, 512)
    for k_chunk in (None, 0, 256):
        for scale in (None, np.array(0.5, FLOAT32), np.array(0.25, E8M0)):
            options = {"a_scale": scale, "b_scale": scale, "k_chunk": k_chunk, "arithmetic": "sm90"}
            run = jax.jit(lambda a, w, o=options: pj.scaled_gemm(a, w.T, **o))
            same(run(a, w), eager.scaled_gemm(a, w.T, **options))
    fine = np.full((20, 16), 0.5, E8M0), np.full((144, 16), 4, E8M0)  # scales of 32 along k
    options = {"k_chunk": 32, "arithmetic": "sm90"}
    run = jax.jit(lambda a, w, sa, sw: pj.scaled_gemm(a, w.T, a_scale=sa, b_scale=sw.T, **options))
    same(run(a, w, *fine), eager.scaled_gemm(a, w.T, a_scale=fine[0], b_scale=fine[1].T, **options))
    a, sa, w, sw = operands(20, 144, 512)
    parts = [x.reshape(len(x), 4, -1).swapaxes(0, 1) for x in (a, sa, w, sw)]

    def step(sum_, part):
        a, sa, w, sw = part
        return pj.scaled_gemm(a, w.T, a_scale=sa, b_scale=sw.T, accumulate=sum_, arithmetic="sm90"), None

    got, _ = jax.jit(lambda *parts: jax.lax.scan(step, jnp.zeros((20, 144), jnp.float32), parts))(*parts)
    same(got, eager.scaled_gemm(a, w.T, a_scale=sa, b_scale=sw.T, out_dtype=FLOAT32, arithmetic="sm90"))


def test_batches(fp8, eager):
    a, sa = pydet.quantize(normal(3, 20, 272), granularity="group", dtype=E4M3)
    w, sw = pydet.quantize(normal(3, 144, 272, seed=1), granularity="block", dtype=E4M3)
    call = lambda a, sa, w, sw: pj.scaled_gemm(a, w.mT, a_scale=sa, b_scale=sw.mT, arithmetic="sm90")
    turn = lambda x: x.swapaxes(-1, -2)
    want = eager.scaled_gemm(a, turn(w), a_scale=sa, b_scale=turn(sw), arithmetic="sm90", out_dtype=BF16)
    same(jax.jit(call)(a, sa, w, sw), want)
    same(jax.jit(jax.vmap(call))(a, sa, w, sw), want)
    want = eager.scaled_gemm(a, w[0].T, a_scale=sa, b_scale=sw[0].T, arithmetic="sm90", out_dtype=BF16)
    same(jax.jit(call)(a, sa, w[0], sw[0]), want)
    same(jax.jit(jax.vmap(call, in_axes=(0, 0, None, None)))(a, sa, w[0], sw[0]), want)


@pytest.mark.parametrize("granularity", ["row", "group", "block"])
def test_quantize(fp8, eager, granularity):
    for dtype, kind, scale_dtype in ((FLOAT32, E4M3, FLOAT32), (BF16, E5M2, E8M0)):
        x = normal(150, 272, dtype=dtype)
        options = {"granularity": granularity, "dtype": kind, "scale_dtype": scale_dtype}
        want = eager.quantize(x, **options)
        all_same(jax.jit(lambda x, o=options: pj.quantize(x, **o))(x), want)
        twice = jax.jit(jax.vmap(lambda x, o=options: pj.quantize(x, **o)))(np.stack([x, x]))
        all_same(twice, [np.stack([part, part]) for part in want])
        given = jax.jit(lambda x, s, o=options: pj.quantize(x, scale=s, **o))(x, want[1])
        all_same(given, eager.quantize(x, granularity=granularity, dtype=kind, scale=want[1]))
        if granularity != "row":
            want = eager.quantize(x, transposed=True, **options)
            all_same(jax.jit(lambda x, o=options: pj.quantize(x, transposed=True, **o))(x), want)
    powers = pj.quantize(x, granularity=granularity, power_of_two=True)
    all_same(powers, eager.quantize(x, granularity=granularity, dtype=E4M3, power_of_two=True))


def test_one_scale_is_given(fp8, eager):
    x, scale = normal(20, 272), np.float32(0.01)
    q, _ = pj.quantize(x, granularity="tensor", scale=scale)
    same(q, eager.quantize(x, granularity="tensor", dtype=E4M3, scale=np.array(scale))[0])


def test_weights_are_read_where_they_lie():
    """XLA copies and transposes nothing for b = w.T; for a b that lies otherwise it does."""
    a, sa, w, sw = operands(16, 128, 256)
    call = lambda a, sa, b, sw: pj.scaled_gemm(a, b, a_scale=sa, b_scale=sw.T)

    def moves(turn, b):
        program = jax.jit(lambda a, sa, b, sw: call(a, sa, turn(b), sw)).lower(a, sa, b, sw).compile().as_text()
        return re.findall(r"f8e4m3fn\[\d+,\d+\]\S* (?:copy|transpose|fusion)\(", program)

    assert not moves(lambda w: w.T, w)
    assert moves(lambda b: b, np.ascontiguousarray(w.T))


def test_refusals_are_the_librarys():
    """In the words that the eager calls have, while a function is traced."""
    a, sa, w, sw = operands(20, 144, 272)
    b, sb = w.T, sw.T
    for changed in (
        {"a": a.astype(np.float32)}, {"b": b[0]}, {"b": b[:-1]}, {"a_scale": sa[:, :1][:-1]}, {"a_scale": sa.T},
        {"b_scale": sb[:, :1]}, {"b_scale": sb.astype(np.float16)}, {"bias": normal(143)}, {"bias": b[0]},
        {"a": np.stack([a] * 2), "b": np.stack([b] * 3)}, {"a_scale": np.stack([sa] * 2)},
        {"bias": normal(2, 20, 144)}, {"a": a.view(np.uint8)},
    ):  # fmt: skip
        given = {"a": a, "a_scale": sa, "b": b, "b_scale": sb, "bias": None, **changed}
        with pytest.raises(pydet.Error) as theirs:
            pydet.scaled_gemm(**given)
        with pytest.raises(pydet.Error) as ours:
            jax.jit(lambda given=given: pj.scaled_gemm(**given))()
        assert (str(ours.value), ours.value.status) == (str(theirs.value), theirs.value.status)
    given = {"a_scale": sa, "b_scale": sb}
    for call, words in (
        (lambda: pj.scaled_gemm(a, b, k_chunk=16, **given), "k_chunk is 16, want 0 or a positive multiple of 32"),
        (lambda: pj.scaled_gemm(a, b, arithmetic="sm91", **given), "arithmetic is 'sm91'"),
        (lambda: pj.scaled_gemm(a, b, accumulate=True, **given), "accumulate is True, want None or the float32 array"),
        (lambda: pj.quantize(normal(3)), "x has 1 dimensions, want 2 to 8"),
        (lambda: pj.quantize(a), "x is float8_e4m3fn, want float32, bfloat16 or float16"),
        (lambda: pj.quantize(normal(3, 4), granularity="column"), "granularity is 'column', want row, group, block or"),
        (lambda: pj.quantize(normal(3, 4), dtype="bfloat16"), "dtype is bfloat16, want float8_e4m3fn or float8_e5m2"),
        (lambda: pj.quantize(normal(3, 4), scale_dtype="bfloat16"), "scale_dtype is bfloat16, want float32 or float8_"),
        (lambda: pj.quantize(normal(3, 4), transposed=True), "transposed wants groups or blocks"),
        (lambda: pj.quantize(normal(3, 4), scale=normal(3)), "scale is 3, want 3x1"),
        (lambda: pj.quantize(normal(3, 4), scale=normal(3, 1, dtype=np.float16)), "scale is float16, want float32 or"),
        (lambda: jax.jvp(lambda x: pj.quantize(x)[1], (normal(3, 4),), (normal(3, 4),)), "can't apply forward-mode"),
        (lambda: jax.grad(lambda x: pj.quantize(x)[1].sum())(normal(3, 4)), "quantize: no derivative"),
    ):  # fmt: skip
        with pytest.raises((pydet.Error, TypeError), match=words):
            call()
    with pytest.raises(Exception, match="k_chunk is 256, want 128 or 32 with scales along k"):
        jax.block_until_ready(pj.scaled_gemm(a, b, k_chunk=256, **given))
