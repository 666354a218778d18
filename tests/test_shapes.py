"""pydet/shapes.py against the library: the same operands, the same answer, and the same sentence where it is no."""

import random

import ml_dtypes
import numpy as np
import pytest

import pydet
from pydet.shapes import RULES, Operand, text

TYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float64": np.float64,
    "int32": np.int32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}


def operand(name, array):
    return None if array is None else Operand(name, array.shape, array.dtype.name)


def agree(rules, call):
    """Both refuse in the same words, or both give results of the same shapes. Returns the words, or ""."""
    sentence = ""
    try:
        shapes = rules()
    except pydet.Error as problem:
        sentence = str(problem)
        with pytest.raises(type(problem)) as refused:
            call()
        assert (str(refused.value), refused.value.status) == (sentence, problem.status)
    else:
        assert call() == shapes
    return sentence


def draw(rng, shape, dtype="float32"):
    """A tensor near a shape: mostly that shape, else with an extent, a dimension or the type changed."""
    shape = list(shape)
    if rng.random() < 0.2 and shape:
        shape[rng.randrange(len(shape))] = rng.choice([0, 1, 2, 3, 5])
    if rng.random() < 0.08 and shape:
        shape.pop(rng.randrange(len(shape)))
    if rng.random() < 0.08:
        shape.insert(rng.randrange(len(shape) + 1), rng.choice([1, 1, 2, 3]))
    if rng.random() < 0.02:
        shape = [1] * rng.choice([7, 8, 9]) + shape
    if rng.random() < 0.08:
        dtype = rng.choice(list(TYPES))
    return np.zeros(shape, TYPES[dtype])


def extents(rng, count):
    return [rng.choice([1, 2, 3, 4, 5]) for _ in range(count)]


def bias_near(rng, shape):
    return draw(rng, shape[rng.randrange(len(shape)) :]) if shape and rng.random() < 0.5 else None


def product(rng, kind):
    m, n, k = extents(rng, 3)
    lead = extents(rng, rng.choice([0, 0, 1, 2]))
    forms = {"gemm": ((m, k), (k, n)), "gemm_da": ((m, n), (k, n)), "gemm_db": ((m, k), (m, n))}
    first, second = (draw(rng, (*lead[rng.randrange(len(lead) + 1) :], *shape)) for shape in forms[kind])
    names = {"gemm": ("a", "b"), "gemm_da": ("dc", "b"), "gemm_db": ("a", "dc")}[kind]
    bias = bias_near(rng, [*lead, m, n]) if kind == "gemm" else None
    options = {} if kind != "gemm" else {"bias": bias}
    return agree(
        lambda: RULES.product(kind, operand(names[0], first), operand(names[1], second), operand("bias", bias)),
        lambda: getattr(pydet, kind)(first, second, **options).shape,
    )


def skinny(rng):
    shape = extents(rng, rng.choice([0, 1, 1, 2]))
    n, k = extents(rng, 2)
    x, w, bias = draw(rng, (*shape, k)), draw(rng, (n, k)), bias_near(rng, [*shape, n])
    return agree(
        lambda: RULES.skinny_product("skinny_gemm", operand("x", x), operand("w", w), operand("bias", bias)),
        lambda: pydet.skinny_gemm(x, w, bias=bias).shape,
    )


def scaled(rng):
    m, n, k = rng.choice([1, 2, 5]), rng.choice([1, 5, 130]), rng.choice([1, 5, 128, 130])
    lead, chunks, blocks = extents(rng, rng.choice([0, 0, 1, 2])), -(-k // 128), -(-n // 128)
    near = lambda shape, dtype: draw(rng, (*lead[rng.randrange(len(lead) + 1) :], *shape), dtype)
    a, b = near((m, k), "float8_e4m3fn"), near((k, n), "float8_e4m3fn")
    of_a, of_b = rng.choice([(m, 1), (m, chunks)]), rng.choice([(1, n), (chunks, n), (chunks, blocks)])
    scale = rng.choice(["float32", "float8_e8m0fnu"])
    a_scale, b_scale = (
        rng.choice([None, draw(rng, (), scale), near(of, scale), near(of, scale)]) for of in (of_a, of_b)
    )
    bias = bias_near(rng, [*lead, m, n])
    return agree(
        lambda: RULES.scaled_product(
            operand("a", a), operand("a_scale", a_scale), operand("b", b), operand("b_scale", b_scale),
            operand("bias", bias),
        ),
        lambda: pydet.scaled_gemm(a, b, a_scale=a_scale, b_scale=b_scale, bias=bias, out_dtype="float32").shape,
    )  # fmt: skip


def norm(rng):
    shape = extents(rng, rng.choice([1, 2, 3]))
    x = draw(rng, shape)
    residual = draw(rng, x.shape) if rng.random() < 0.5 else None
    per_head = x.shape[-2:] if rng.random() < 0.4 else x.shape[-1:]
    weight, bias = (draw(rng, per_head) if rng.random() < 0.5 else None for _ in range(2))
    return agree(
        lambda: RULES.norm(
            "rmsnorm",
            operand("x", x),
            (operand("residual", residual),),
            operand("weight", weight),
            bias=operand("bias", bias),
            heads=True,
        ),
        lambda: pydet.rmsnorm(x, weight, eps=1e-5, bias=bias, residual=residual)[0].shape,
    )


def norm_backward(rng):
    shape = extents(rng, rng.choice([1, 2, 3]))
    x = draw(rng, shape)
    dy, rstd = draw(rng, x.shape), draw(rng, x.shape[:-1])
    per_head = x.shape[-2:] if rng.random() < 0.4 else x.shape[-1:]
    weight, dresidual = (draw(rng, s) if rng.random() < 0.5 else None for s in (per_head, x.shape))
    return agree(
        lambda: RULES.norm(
            "rmsnorm_backward",
            operand("x", x),
            (operand("dy", dy), operand("dresidual", dresidual)),
            operand("weight", weight),
            operand("rstd", rstd),
            heads=True,
        ),
        lambda: pydet.rmsnorm_backward(dy, x, weight, rstd, dresidual=dresidual)[0].shape,
    )


def attention(rng):
    (batch, queries, keys), groups = extents(rng, 3), rng.choice([1, 2])
    heads, (d, e) = groups * rng.choice([1, 2]), rng.choice([(8, 8), (8, 16), (24, 8)])
    q, k, v = (
        draw(rng, shape) for shape in ((batch, heads, queries, d), (batch, groups, keys, d), (batch, groups, keys, e))
    )
    full, some = (batch, heads, queries, keys), lambda x: x if rng.random() < 0.2 else None
    pairs = [draw(rng, [rng.choice([1, n]) for n in full][rng.randrange(4) :]) for _ in range(2)]
    given = {
        "sinks": some(draw(rng, (heads,))),
        "allowed": some(pairs[0].astype(bool) if rng.random() < 0.9 else pairs[0]),
        "bias": some(pairs[1]),
        "first_key": some(draw(rng, (batch,), "int32")),
        "seqlens_k": some(draw(rng, (batch,), "int32")),
    }
    return agree(
        lambda: RULES.attention(*(operand(*pair) for pair in (("q", q), ("k", k), ("v", v), *given.items()))),
        lambda: pydet.attention(q, k, v, **given).shape,
    )


OPERATIONS = {
    "attention": attention,
    **{kind: lambda rng, kind=kind: product(rng, kind) for kind in ("gemm", "gemm_da", "gemm_db")},
    "skinny_gemm": skinny,
    "scaled_gemm": scaled,
    "rmsnorm": norm,
    "rmsnorm_backward": norm_backward,
}
PHRASES = {  # that the drawn operands bring out of each
    "attention": (
        "dimensions, want 3 to 8",
        "as q is",
        "want BxHxQxD",
        "want BxGxKxD",
        "v is",
        "sequences",
        "a multiple of the",
        "elements as q's",
        "want multiples of 8",
        "sinks is",
        "want bool",
        "want int32",
        "dimensions, want 1",
        "one that broadcasts to",
    ),
    "gemm": ("dimensions, want 2 to 8", "is float64, want", "xN", " or ", "leading dimensions", "broadcasts to"),
    "gemm_da": ("dimensions, want 2 to 8", "as dc is", "want Kx", "leading dimensions"),
    "gemm_db": ("dimensions, want 2 to 8", "as a is", "xN", "leading dimensions"),
    "skinny_gemm": ("dimensions, want 1 to 8", "want NxK", "want Nx", "as x is", "bias is"),
    "scaled_gemm": (
        "dimensions, want 2 to 8",
        "want float8_e4m3fn or float8_e5m2",
        "want float32 or float8_e8m0fnu",
        "xN",
        "a_scale is",
        "b_scale is",
        "bias is",
        "with those of a",
        "to those of out",
    ),
    "rmsnorm": ("a last dimension of 1 or more", "weight is", "bias is", "residual is", "as x is"),
    "rmsnorm_backward": ("rstd is float16, want float32", "dy is", "rstd is", "dresidual is", "weight is"),
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_rules_are_the_librarys(op):
    rng = random.Random(f"{op} 20")
    said = [OPERATIONS[op](rng) for _ in range(3000)]
    assert 0.2 < said.count("") / len(said) < 0.9
    for phrase in PHRASES[op]:
        assert any(phrase in sentence for sentence in said), phrase


def test_a_rule_that_is_not_the_librarys_is_seen(monkeypatch):
    monkeypatch.setattr(type(RULES), "same_type", lambda *_: None)
    with pytest.raises(pydet.Error, match="as a is"):
        for seed in range(1000):
            product(random.Random(seed), "gemm")


def test_text():
    assert (text(()), text((3,)), text((2, 3))) == ("()", "3", "2x3")
