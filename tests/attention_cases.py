"""Problems of attention that every kernel is run on: what they are called with, by name."""

import dataclasses
import itertools

import numpy as np

import pydet
import reference_attention
from cases import DTYPES, data, random_words
from reference import FLOAT32, round_to

MASKED = -np.inf


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int = 1
    heads: int = 2
    groups: int = 1
    queries: int = 5
    keys: int = 150
    d: int = 64
    e: int = 64


def integers(*numbers):
    return np.array(numbers, np.int32)


def operands(shape, dtype, kind="normal", seed=0):
    """q, k, v; of a bell of deviation 1 unless it is said otherwise."""
    s = shape
    sizes = (s.batch, s.heads, s.queries, s.d), (s.batch, s.groups, s.keys, s.d), (s.batch, s.groups, s.keys, s.e)
    q, k, v = (data(kind, size, DTYPES[dtype], seed + i) for i, size in enumerate(sizes))
    if kind in ("wide", "extremes", "specials"):  # else every score is infinite
        with np.errstate(all="ignore"):
            q = round_to(q.astype(np.float32) * np.float32(2.0**-9), q.dtype)
    return q, k, v


def coin(shape, one_in=2, seed=0):
    return random_words(shape, seed) % np.uint64(one_in) == 0


def dense_problems(dtype):
    """Name -> (arguments, options) of pydet.attention."""

    def of(shape=Shape(), kind="normal", seed=0, **options):
        return operands(shape, dtype, kind, seed), options

    two, long = Shape(batch=2, heads=4, groups=2), Shape(keys=700, queries=3)
    bias = data("normal", (2, 1, 5, 150), FLOAT32, 7)
    found = {
        "plain": of(),
        "one key": of(Shape(keys=1)),
        "one query, one key, 8 wide": of(Shape(queries=1, keys=1, d=8, e=8)),
        "causal": of(two, causal=True),
        "causal, more queries than keys": of(Shape(queries=20, keys=9), causal=True),
        "causal, 130 queries": of(Shape(queries=130, keys=131), causal=True),
        "D 128": of(Shape(d=128, e=128, keys=257), causal=True),
        "D 192, E 128": of(Shape(d=192, e=128, keys=200), causal=True),
        "D 256": of(Shape(d=256, e=256, keys=130, queries=3)),
        "D 40, E 136": of(Shape(d=40, e=136)),
        "D 576, E 512": of(Shape(d=576, e=512, keys=131, queries=2, heads=3)),
        "segments of 128": of(long, kv_chunk=128),
        "segments of 256, causal": of(long, kv_chunk=256, causal=True),
        "window": of(Shape(queries=40, keys=400), window=(70, 3)),
        "window to the left, causal, segments": of(
            Shape(queries=40, keys=600), window=(150, None), causal=True, kv_chunk=128
        ),
        "window to the right": of(Shape(queries=9, keys=300), window=(None, 2)),
        "window of one": of(Shape(queries=140, keys=140), window=(0, 0)),
        "softcap": of(two, softcap=1.5, causal=True),
        "scale": of(two, scale=0.7, causal=True),
        "sinks": of(two, sinks=data("normal", (4,), DTYPES[dtype], 5)),
        "sinks, nothing allowed": of(two, sinks=data("normal", (4,), FLOAT32, 5), allowed=np.zeros((1, 1), bool)),
        "nothing allowed": of(two, allowed=np.zeros((1, 1), bool)),
        "mask": of(two, allowed=coin((2, 4, 5, 150))),
        "mask of few": of(two, allowed=coin((2, 1, 5, 150), 40)),
        "mask of keys": of(two, allowed=coin((150,), 3), causal=True),
        "bias": of(two, bias=bias),
        "bias of heads, -inf": of(
            two, bias=np.where(coin((4, 5, 150), 3), MASKED, data("normal", (4, 5, 150), FLOAT32)).astype(DTYPES[dtype])
        ),
        "bias, softcap, sinks, mask": of(
            two, bias=bias, softcap=2.0, sinks=data("normal", (4,), FLOAT32, 5), allowed=coin((5, 150)), causal=True
        ),
        "left padding": of(two, first_key=integers(37, 140), causal=True),
        "left padding, all of it": of(two, first_key=integers(150, 3), causal=True),
        "lengths": of(two, seqlens_k=integers(0, 131)),
        "lengths, padding, mask": of(
            two, seqlens_k=integers(140, 131), first_key=integers(3, 17), allowed=coin((2, 1, 5, 150))
        ),
        "numbers beyond what is there": of(two, seqlens_k=integers(-5, 1000), first_key=integers(7, -1)),
        "peaked": of(two, scale=30.0),
        "peaked, segments": of(long, scale=30.0, kv_chunk=128),
    }
    for kind in ("wide", "extremes", "specials", "tiny"):
        found[kind] = of(two, kind, 3, causal=True)
    found["specials, segments"] = of(long, "specials", 5, kv_chunk=128)
    found["specials, mask"] = of(two, "specials", 9, allowed=coin((5, 150), 3))
    return found


def varlen_problems(dtype):
    q, k, v = (data("normal", (n, h, 64), DTYPES[dtype], n) for n, h in ((60, 4), (400, 2), (400, 2)))
    ends = integers(0, 1, 1, 18, 60), integers(0, 130, 130, 137, 400)
    gaps = integers(5, 9, 40, 40, 50), integers(3, 200, 260, 300, 300)
    beyond = integers(-4, 20, 90), integers(-9, 200, 900)
    return {
        "packed": ((q, k, v, *ends), {"causal": True}),
        "packed, segments": ((q, k, v, *ends), {"kv_chunk": 128}),
        "packed with gaps, window": ((q, k, v, *gaps), {"window": (9, 9)}),
        "packed, numbers beyond": ((q, k, v, *beyond), {}),
    }


def paged_problems(dtype):
    found = {}
    for size in (1, 3, 64, 256):
        pages = -(-330 // size)
        k, v = (data("normal", (2 * pages, size, 2, 64), DTYPES[dtype], size + i) for i in range(2))
        order = np.argsort(random_words((2 * pages,), 1)).astype(np.int32).reshape(2, pages)
        q = data("normal", (2, 4, 3, 64), DTYPES[dtype], 5)
        found[f"pages of {size}"] = (q, k, v, order, integers(330, 129)), {}
    packed = data("normal", (7, 4, 64), DTYPES[dtype], 6)
    found["pages, packed queries"] = (packed, k, v, order, integers(300, 7), integers(0, 6, 7)), {"kv_chunk": 128}
    found["pages that are none"] = (q, k, v, order * 1000 - 500, integers(300, 7)), {"causal": False}
    return found


def problems(dtype):
    """(name, operation, arguments, options)."""
    for operation, found in (
        ("attention", dense_problems(dtype)),
        ("attention_varlen", varlen_problems(dtype)),
        ("attention_paged", paged_problems(dtype)),
    ):
        for name, (arguments, options) in found.items():
            yield name, operation, arguments, {**options, "return_lse": True}


def run(functions, operation, arguments, options, arithmetic):
    """[out, lse]; tokens that nothing wrote are NaN."""
    if operation == "attention_varlen" and functions is not reference_attention:
        q, _, v = arguments[:3]
        out = np.full((*q.shape[:2], v.shape[2]), np.nan, q.dtype)
        got, lse = functions.attention_varlen(*arguments, **options, arithmetic=arithmetic, out=out)
        written = written_of(arguments[3], len(q))
        lse = lse.copy()
        lse[~written] = np.nan
        return round_to(got.astype(np.float32), got.dtype), round_to(lse, FLOAT32)
    got, lse = getattr(functions, operation)(*arguments, **options, arithmetic=arithmetic)
    return round_to(got.astype(np.float32), got.dtype), round_to(lse, FLOAT32)


def written_of(ends, tokens):
    """Which tokens are in some sequence."""
    written = np.zeros(tokens, bool)
    clipped = [min(max(int(end), 0), tokens) for end in ends]
    for begin, end in itertools.pairwise(clipped):
        written[begin : max(begin, end)] = True
    return written


# ---- Backward ------------------------------------------------------------------------------------------------------


def backward_dense_problems(dtype):
    """Name -> (arguments, options) of the forward whose gradients are asked for."""

    def of(shape=Shape(), kind="normal", seed=0, **options):
        return operands(shape, dtype, kind, seed), options

    two = Shape(batch=2, heads=4, groups=2)
    sinks = data("normal", (4,), DTYPES[dtype], 5)
    bias = data("normal", (2, 1, 5, 150), FLOAT32, 7)
    found = {
        "plain": of(),
        "one query, one key, 8 wide": of(Shape(queries=1, keys=1, d=8, e=8)),
        "causal": of(two, causal=True),
        "causal, more queries than keys": of(Shape(queries=20, keys=9), causal=True),
        "causal, 130 queries": of(Shape(queries=130, keys=131, d=40, e=32), causal=True),
        "300 queries of groups": of(Shape(heads=4, groups=2, queries=300, keys=40, d=16, e=24)),
        "D 192, E 128": of(Shape(d=192, e=128, keys=200), causal=True),
        "D 40, E 136": of(Shape(d=40, e=136)),
        "D 576, E 512": of(Shape(d=576, e=512, keys=67, queries=2, heads=3)),
        "window": of(Shape(queries=40, keys=300), window=(70, 3)),
        "window of one": of(Shape(heads=1, queries=131, keys=131, d=16, e=16), window=(0, 0)),
        "window to the left, causal": of(Shape(heads=1, queries=140, keys=160, d=24), window=(20, None), causal=True),
        "softcap, scale": of(two, softcap=1.5, scale=0.7, causal=True),
        "sinks": of(two, sinks=sinks),
        "sinks, nothing allowed": of(two, sinks=sinks, allowed=np.zeros((1, 1), bool)),
        "nothing allowed": of(two, allowed=np.zeros((1, 1), bool)),
        "mask": of(two, allowed=coin((2, 4, 5, 150))),
        "mask of keys": of(two, allowed=coin((150,), 3), causal=True),
        "bias of heads, -inf": of(
            two, bias=np.where(coin((4, 5, 150), 3), MASKED, data("normal", (4, 5, 150), FLOAT32)).astype(DTYPES[dtype])
        ),
        "bias, softcap, sinks, mask": of(
            two, bias=bias, softcap=2.0, sinks=data("normal", (4,), FLOAT32, 5), allowed=coin((5, 150)), causal=True
        ),
        "left padding": of(two, first_key=integers(37, 150), causal=True),
        "lengths, padding, mask": of(
            two, seqlens_k=integers(140, 131), first_key=integers(3, 17), allowed=coin((2, 1, 5, 150))
        ),
        "numbers beyond what is there": of(two, seqlens_k=integers(-5, 1000), first_key=integers(7, -1)),
        "peaked": of(two, scale=30.0),
    }
    for kind in ("extremes", "specials", "tiny"):
        found[kind] = of(two, kind, 3, causal=True)
    found["specials, mask"] = of(two, "specials", 9, allowed=coin((5, 150), 3))
    return found


# What of a problem's gradients is asked for, and how, in turn.
ASKED = ("all", "float32", "continued", "q", "kv")


def backward_problems(dtype):
    """(name, operation, arguments and options of the forward, what is asked for)."""
    for operation, found in (
        ("attention", backward_dense_problems(dtype)),
        ("attention_varlen", varlen_problems(dtype)),
    ):
        for i, (name, (arguments, options)) in enumerate(found.items()):
            if "kv_chunk" in options:
                continue
            yield name, operation, arguments, options, ASKED[i % len(ASKED)]


def run_backward(functions, operation, arguments, options, asked, arithmetic):
    """[dq, dk, dv] and dsinks, those that are asked for. out and lse are those of the CPU, tested by themselves."""
    q, k, v = arguments[:3]
    seed, packed = len(q) + k.shape[-2], operation == "attention_varlen"
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    forward = getattr(pydet, operation)
    _, lse = forward(*arguments, **options, arithmetic=arithmetic, out=out, return_lse=True)
    dout = data("normal", out.shape, q.dtype, seed)
    given = dict(options)
    types = [FLOAT32 if asked in ("float32", "continued") else x.dtype for x in (q, k, v)]
    if asked == "continued":
        starts = [data("normal", x.shape, FLOAT32, seed + i) for i, x in enumerate((k, v))]
        starts[0].flat[::7] = np.float32(-0.0)
        given |= {"accumulate": True, "dk": starts[0], "dv": starts[1], "dq": np.full(q.shape, np.nan, FLOAT32)}
        if "sinks" in options:
            given["dsinks"] = np.float32([1, -2, 0, 3])
    elif asked in ("q", "kv"):
        given["only"] = asked
    elif packed or asked == "float32":
        given |= {
            name: np.full(x.shape, np.nan, t) for name, x, t in zip(("dq", "dk", "dv"), (q, k, v), types, strict=True)
        }
    if packed and asked in ("q", "kv"):
        given |= {
            name: np.full(x.shape, np.nan, x.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v)) if name[1] in asked
        }
    found = getattr(functions, f"{operation}_backward")(
        dout, q, k, v, out, lse, *arguments[3:], **given, arithmetic=arithmetic
    )
    return [x if x is None else round_to(x.astype(np.float32), x.dtype) for x in found]
