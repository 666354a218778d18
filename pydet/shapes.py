"""The library's rules about shapes and types, for where there is no memory yet: while a framework traces.

Operands are names, shapes and types. Each function gives the shape of the result, and refuses what the library would
refuse, in its words (``native/ops``); ``tests/test_shapes.py`` shows both the same operands. Strides, devices and
memory are no matter of these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from pydet._native import INVALID_DTYPE, constants, fail
from pydet.protocols import TYPES, UNSCALED

Shape: TypeAlias = tuple[Any, ...]  # of ints, or of what stands for them while tracing

MAX_DIMS = 8
SCALED = TYPES[3:5]  # factors of scaled_gemm
SCALES = (TYPES[0], TYPES[5])
GROUP = 128  # elements along k, or columns, that share a scale
FINE = 32  # and along k, where chunks are of so many
_INVALID_SHAPE: int = constants.PYDET_INVALID_SHAPE
_PRODUCTS = {  # which operands are read transposed, and what is said to be wanted of the second
    "gemm": (False, False, "{}xN"),
    "gemm_da": (False, True, "Kx{}"),
    "gemm_db": (True, False, "{}xN"),
}


class Operand(NamedTuple):
    """What the rules read of an operand."""

    name: str
    shape: Shape
    dtype: str  #: "float32"


def text(shape: Iterable[Any]) -> str:
    """A shape as the library's sentences have it: 4096x512."""
    return "x".join(map(str, shape)) or "()"


class Rules:
    """The rules. A framework whose extents are symbols says how to compare them, by methods of its own."""

    def require(self, holds: Any, sentence: Callable[[], str]) -> None:
        """Refuses a shape unless something holds."""
        if not holds:
            fail(_INVALID_SHAPE, sentence())

    def broadcast(self, x: Shape, y: Shape) -> Shape | None:
        """What two shapes broadcast to, or None."""
        dims = max(len(x), len(y))
        result = []
        for one, other in zip((1,) * (dims - len(x)) + x, (1,) * (dims - len(y)) + y, strict=True):
            if one != other and one != 1 and other != 1:
                return None
            result.append(other if one == 1 else one)
        return tuple(result)

    # ---- Of one operand, and of two ----------------------------------------------------------------------------------

    def read(self, op: str, x: Operand, min_ndim: int, types: tuple[str, ...] = UNSCALED) -> None:
        """Refuses what is wrong with an operand by itself."""
        if not min_ndim <= len(x.shape) <= MAX_DIMS:
            fail(
                _INVALID_SHAPE,
                f"{op}: {x.name} has {len(x.shape)} dimensions, want {min_ndim} to {MAX_DIMS}",
            )
        if x.dtype not in types:
            wanted = " or ".join(", ".join(names) for names in (types[:-1], types[-1:]) if names)
            fail(INVALID_DTYPE, f"{op}: {x.name} is {x.dtype}, want {wanted}")

    def same_type(self, op: str, first: Operand, other: Operand, besides: str = "") -> None:
        """Refuses another type than the first operand's."""
        if other.dtype != first.dtype:
            fail(INVALID_DTYPE, f"{op}: {other.name} is {other.dtype}, want {first.dtype} as {first.name} is{besides}")

    def want(self, op: str, x: Operand, shape: Shape) -> None:
        """Refuses another shape."""

        def sentence() -> str:
            return f"{op}: {x.name} is {text(x.shape)}, want {text(shape)}"

        self.require(len(x.shape) == len(shape), sentence)
        for got, wanted in zip(x.shape, shape, strict=True):
            self.require(got == wanted, sentence)

    # ---- Operations --------------------------------------------------------------------------------------------------

    def product(self, kind: str, a: Operand, b: Operand, bias: Operand | None = None) -> Shape:
        """Of gemm, gemm_da and gemm_db."""
        a_turned, b_turned, wanted = _PRODUCTS[kind]
        self.read(kind, a, 2)
        self.read(kind, b, 2)
        if bias is not None:
            self.read(kind, bias, 1)
        self.same_type(kind, a, b)
        m, depth = reversed(a.shape[-2:]) if a_turned else a.shape[-2:]
        inner, n = reversed(b.shape[-2:]) if b_turned else b.shape[-2:]
        self.require(inner == depth, lambda: f"{kind}: {b.name} is {text(b.shape)}, want {wanted.format(depth)}")
        if bias is not None:
            self._bias_of_matrix(kind, bias, m, n)
        a_leads, b_leads = a.shape[:-2], b.shape[:-2]
        leading = self.broadcast(a_leads, b_leads)
        if leading is None:
            fail(
                _INVALID_SHAPE,
                f"{kind}: {b.name} has leading dimensions {text(b_leads)}, want some that broadcast with those of "
                f"{a.name}, {text(a_leads)}",
            )
        shape = (*leading, m, n)
        if bias is not None:
            self._bias_of_batch(kind, bias, shape)
        return shape

    def bias(self, op: str, bias: Operand, shape: Shape) -> None:
        """Of a bias beside a product of a shape."""
        self._bias_of_matrix(op, bias, shape[-2], shape[-1])
        self._bias_of_batch(op, bias, shape)

    def _bias_of_matrix(self, op: str, bias: Operand, m: Any, n: Any) -> None:
        def sentence() -> str:
            return f"{op}: bias is {text(bias.shape)}, want {n} or {text((m, n))}"

        self.require(bias.shape[-1] == n, sentence)
        if len(bias.shape) > 1 and bias.shape[-2] != 1:
            self.require(bias.shape[-2] == m, sentence)

    def _bias_of_batch(self, op: str, bias: Operand, shape: Shape) -> None:
        leads = bias.shape[:-2]
        fits = len(bias.shape) <= len(shape)
        for got, wanted in zip(reversed(leads), reversed(shape[:-2]), strict=False):
            fits = fits and (got == 1 or got == wanted)
        if not fits:
            fail(_INVALID_SHAPE, f"{op}: bias is {text(bias.shape)}, want one that broadcasts to {text(shape)}")

    def scaled_product(
        self,
        a: Operand,
        a_scale: Operand | None,
        b: Operand,
        b_scale: Operand | None,
        bias: Operand | None = None,
        *,
        k_chunk: int | None = None,
    ) -> Shape:
        """Of scaled_gemm."""
        op = "scaled_gemm"
        for x, min_ndim, types in ((a, 2, SCALED), (a_scale, 0, SCALES), (b, 2, SCALED), (b_scale, 0, SCALES),
                                   (bias, 1, UNSCALED)):  # fmt: skip
            if x is not None:
                self.read(op, x, min_ndim, types)
        (m, k), (inner, n) = a.shape[-2:], b.shape[-2:]
        self.require(inner == k, lambda: f"{op}: b is {text(b.shape)}, want {k}xN")
        if bias is not None:
            self._bias_of_matrix(op, bias, m, n)
        chunks, blocks = -(-k // (FINE if k_chunk == FINE else GROUP)), -(-n // GROUP)
        for x, fitting in ((a_scale, ((m, 1), (m, chunks))), (b_scale, ((1, n), (chunks, n), (chunks, blocks)))):
            if x is not None and x.shape and x.shape[-2:] not in fitting:
                forms = ["()", *map(text, fitting)]
                want = f"{', '.join(forms[:-1])} or {forms[-1]} in its last two dimensions"
                fail(_INVALID_SHAPE, f"{op}: {x.name} is {text(x.shape)}, want {want}")
        leading = self.broadcast(a.shape[:-2], b.shape[:-2])
        if leading is None:
            sentence = f"b is {text(b.shape)}, want leading dimensions that broadcast with those of a, {text(a.shape)}"
            fail(_INVALID_SHAPE, f"{op}: {sentence}")
        shape = (*leading, m, n)
        for x in (a_scale, b_scale, bias):
            if x is not None and self.broadcast(x.shape[:-2], leading) != leading:
                out = f"out, {text(shape)}"
                sentence = f"{x.name} is {text(x.shape)}, want leading dimensions that broadcast to those of {out}"
                fail(_INVALID_SHAPE, f"{op}: {sentence}")
        return shape

    def skinny_product(self, op: str, x: Operand, w: Operand, bias: Operand | None = None) -> Shape:
        """Of skinny_gemm, and of a layer that is one by another name."""
        self.read(op, x, 1)
        self.read(op, w, 2)
        if bias is not None:
            self.read(op, bias, 1)
        self.require(len(w.shape) == 2, lambda: f"{op}: {w.name} is {text(w.shape)}, want NxK")
        shape = (*x.shape[:-1], w.shape[0])
        if bias is not None:
            self.want(op, bias, shape if len(bias.shape) > 1 else shape[-1:])
        self.same_type(op, x, w)
        depth = x.shape[-1]
        self.require(w.shape[1] == depth, lambda: f"{op}: {w.name} is {text(w.shape)}, want Nx{depth}")
        return shape

    def norm(
        self,
        op: str,
        x: Operand,
        like: Iterable[Operand | None] = (),
        weight: Operand | None = None,
        rstd: Operand | None = None,
        *,
        bias: Operand | None = None,
        heads: bool = False,
    ) -> Shape:
        """Of a norm by rows, forward or backward; `like` are the operands that are to be like x.

        heads: weight and bias may be those of heads, a residual float32, and beside a float32 x a dy of any type.
        """
        first, *others = [*like, None]
        more = ((other, 1) for other in (*others, bias))
        for other, min_ndim in ((x, 1), (first, 1), (weight, 1), (rstd, 0), *more):
            if other is not None:
                self.read(op, other, min_ndim)
        likes = [other for other in (first, *others) if other is not None]
        self.require(x.shape[-1] != 0, lambda: f"{op}: x is {text(x.shape)}, want a last dimension of 1 or more")
        for other in likes:
            residual, wide = other.name == "residual", (other if other.name == "residual" else x).dtype == "float32"
            if not (heads and wide and other.name in ("residual", "dy")):
                self.same_type(op, x, other, ", or float32" if heads and residual and x.dtype != "float32" else "")
            self.want(op, other, x.shape)
        shape: Shape | None = None
        for vector in (weight, bias):
            if vector is None:
                continue
            self.want(op, vector, x.shape[-2:] if heads and len(vector.shape) == 2 else x.shape[-1:])
            self.want(op, vector, vector.shape if shape is None else shape)
            shape = shape or vector.shape
        if rstd is not None:
            self.want(op, rstd, x.shape[:-1])
            if rstd.dtype != "float32":
                fail(INVALID_DTYPE, f"{op}: {rstd.name} is {rstd.dtype}, want float32")
        return x.shape

    def attention(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        sinks: Operand | None = None,
        allowed: Operand | None = None,
        bias: Operand | None = None,
        first_key: Operand | None = None,
        seqlens_k: Operand | None = None,
    ) -> Shape:
        """Of attention over sequences that are not packed."""
        op = "attention"
        for x in (q, k, v):
            self.read(op, x, 3)
        for other, least, types in ((sinks, 1, UNSCALED), (allowed, 0, ("bool",)), (bias, 0, UNSCALED)):
            if other is not None:
                self._read_kind(op, other, least, types)
        lengths = [x for x in (seqlens_k, first_key) if x is not None]
        for x in reversed(lengths):
            self._read_kind(op, x, 1, ("int32",))
            if len(x.shape) != 1:
                fail(_INVALID_SHAPE, f"{op}: {x.name} has {len(x.shape)} dimensions, want 1")
        for x in (k, v):
            self.same_type(op, q, x)
        for x, want in ((q, "BxHxQxD"), (k, "BxGxKxD")):
            if len(x.shape) != 4:
                fail(_INVALID_SHAPE, f"{op}: {x.name} is {text(x.shape)}, want {want}")
        self.want(op, v, (*k.shape[:3], v.shape[-1] if len(v.shape) == 4 else k.shape[3]))
        (batch, heads, queries, d), (groups, keys) = q.shape, k.shape[1:3]
        self.require(k.shape[0] == batch, lambda: f"{op}: k is {text(k.shape)}, want one of {batch} sequences")
        for x in lengths:
            self.want(op, x, (batch,))
        shared = f"{op}: q has {heads} heads, want a multiple of the {groups} of k and v"
        self.require(groups != 0 and heads % groups == 0, lambda: shared)
        self.require(k.shape[3] == d, lambda: f"{op}: k is {text(k.shape)}, want heads of {d} elements as q's")
        e = v.shape[3]
        if not all(8 <= x <= 256 and x % 8 == 0 for x in (d, e)) and (d, e) != (576, 512):
            got = f"heads of q and k have {d} elements and those of v {e}"
            fail(_INVALID_SHAPE, f"{op}: {got}, want multiples of 8 from 8 to 256, or 576 and 512")
        if sinks is not None:
            self.want(op, sinks, (heads,))
        full = (batch, heads, queries, keys)
        for x in [pair for pair in (allowed, bias) if pair is not None]:
            if len(x.shape) > 4 or self.broadcast(x.shape, full) != full:
                fail(_INVALID_SHAPE, f"{op}: {x.name} is {text(x.shape)}, want one that broadcasts to {text(full)}")
        return (batch, heads, queries, e)

    def _read_kind(self, op: str, x: Operand, min_ndim: int, types: tuple[str, ...]) -> None:
        """As `read` of an operand whose type is looked at first where it is one of a kind."""
        if len(types) == 1 and x.dtype != types[0]:
            fail(INVALID_DTYPE, f"{op}: {x.name} is {x.dtype}, want {types[0]}")
        self.read(op, x._replace(dtype="float32") if len(types) == 1 else x, min_ndim)


RULES = Rules()
