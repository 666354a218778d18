"""Recomputing a saved result on the CPU, bit for bit.

    pydet audit A.npy B.npy C.npy --arithmetic sm90

An output element is a function of its own row of A and its own column of B. So a sample of rows and columns is computed
by itself, at the cost of that sample, and gives the very bits of the whole product.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydet import _native, ops
from pydet._native import INVALID_DTYPE, constants, fail
from pydet.frameworks import framework_of, type_index
from pydet.hooks import unknown
from pydet.ops.libraries import resolved_name
from pydet.protocols import DTYPES, TYPES, Memory

MAX_LISTED = 10  # differences that an Audit lists with both bit patterns
_UNSTATED = {1: TYPES.index("float8_e4m3fn"), 2: TYPES.index("bfloat16")}  # what files of bytes of nothing hold
MAX_DIMS = 8  # that gemm takes: six of a batch and two


@dataclasses.dataclass(frozen=True)
class Difference:
    """One element that differs."""

    index: tuple[int, ...]  #: in C
    got: str  #: its bits in C, in hexadecimal
    want: str  #: its bits recomputed
    got_value: float
    want_value: float


@dataclasses.dataclass(frozen=True)
class Audit:
    """What an audit found."""

    elements: int  #: in C
    checked: int  #: of those, recomputed and compared
    differing: int  #: of those that were checked
    first: tuple[Difference, ...]  #: the first that differ
    arithmetic: str  #: resolved
    k_chunk: int | None
    dtype: str  #: of C

    @property
    def all_equal(self) -> bool:
        """No element that was checked differs."""
        return self.differing == 0

    @property
    def complete(self) -> bool:
        """Every element was checked."""
        return self.checked == self.elements


def audit(
    a: Any,
    b: Any,
    c: Any,
    *,
    a_scale: Any = None,
    b_scale: Any = None,
    bias: Any = None,
    arithmetic: ops.Arithmetic | None = None,
    k_chunk: int | None = None,
    sample: int | None = None,
    seed: int = 0,
) -> Audit:
    """Recomputes ``c = gemm(a, b, bias=bias)``, or ``scaled_gemm`` of float8, on the CPU and compares bits.

    Needs NumPy. The operands may be of different frameworks and on any device; they are copied to the host.

    Args:
        a: ``[..., M, K]``, a NumPy array (bfloat16 and float8 by ml_dtypes) or a PyTorch, JAX or CuPy tensor.
        b: ``[..., K, N]``, of the type of ``a``, or float8 as it.
        c: ``[..., M, N]``, the result to check: float32, bfloat16 or float16.
        a_scale, b_scale: as they went into :func:`pydet.scaled_gemm`.
        bias: ``[N]`` or ``[..., M, N]``, as it went into the product.
        arithmetic, k_chunk: those of the product; see :func:`pydet.gemm` and :func:`pydet.scaled_gemm`. By default
            ``"sm90"``, or ``"ieee"`` for float32, which no tensor core takes. ``"auto"`` means what it means on the
            CPU, wherever ``c`` was computed: name the arithmetic of a GPU.
        sample: check so many rows by so many columns, of so many matrices of the batch, picked at random; None for all.
        seed: of the random choice; the same seed picks the same elements.

    Returns:
        The counts, and the first differences.

    Raises:
        Error: as :func:`pydet.gemm`, of which ``c`` is the output.
    """
    import numpy

    host = {"a": _host("a", a), "b": _host("b", b), "c": _host("c", c)}
    if bias is not None:
        host["bias"] = _host("bias", bias)
    scaled = TYPES[host["a"].index].startswith("float8")
    scales = {name: _host(name, x) for name, x in (("a_scale", a_scale), ("b_scale", b_scale)) if x is not None}
    if scales and not scaled:
        fail(INVALID_DTYPE, f"audit: a is {TYPES[host['a'].index]} and has scales, want float8, or none")
    shape, c_type = host["c"].bits.shape, host["c"].index
    if arithmetic is None:
        arithmetic = "ieee" if TYPES[host["a"].index] == "float32" else "sm90"
    number = unknown(arithmetic, "audit", "arithmetic")
    if sample is not None:
        if sample < 1:
            fail(_native.INVALID_VALUE, f"audit: sample is {sample}, want 1 or more")
        if seed < 0:
            fail(_native.INVALID_VALUE, f"audit: seed is {seed}, want 0 or more")
        _check_shapes({name: operand.bits.shape for name, operand in host.items()})
        batch, rows, columns = picks = _picks(shape, sample, seed)
        k = host["a"].bits.shape[-1]
        host = {name: _pick(name, operand, shape, picks) for name, operand in host.items()}
        scales = {name: _pick_scale(name, operand, shape, k, picks) for name, operand in scales.items()}
    got = host["c"].bits
    want = numpy.empty_like(got)
    options: dict[str, Any] = {
        "bias": host.get("bias"),
        "out": Memory(want, c_type),
        "arithmetic": arithmetic,
        "k_chunk": k_chunk,
    }
    if scaled:
        ops.scaled_gemm(host["a"], host["b"], a_scale=scales.get("a_scale"), b_scale=scales.get("b_scale"), **options)
    else:
        ops.gemm(host["a"], host["b"], **options)

    def index_of(spot: tuple[int, ...]) -> tuple[int, ...]:
        if sample is None:
            return spot
        outer = numpy.unravel_index(batch[spot[0]], shape[:-2]) if len(shape) > 2 else ()
        return (*map(int, outer), int(rows[spot[1]]), int(columns[spot[2]]))

    used = resolved_name((constants.PYDET_CPU, 0), host["a"].index, number)
    return _compared(got, want, c_type, shape, index_of, used, k_chunk)


def audit_fold(parts: Any, out: Any, *, bias: Any = None, order: ops.Order = "ordered") -> Audit:
    """Recomputes ``out = fold(parts, bias=bias, order=order)`` on the CPU and compares bits.

    So a sum that ranks share can be checked by their recorded parts, wherever and by whichever method they were added.
    Needs NumPy. The operands may be of different frameworks and on any device; they are copied to the host.

    Args:
        parts: ``[S, ...]``, float32: the sums of all ranks' segments, in the order of the segments.
        out: ``[...]``, the result to check: float32, bfloat16 or float16.
        bias, order: as they went into :func:`pydet.fold` or :func:`pydet.torch.distributed.all_reduce`.

    Returns:
        The counts, and the first differences; its ``arithmetic`` is ``"ieee"``.

    Raises:
        Error: as :func:`pydet.fold`, of which ``out`` is the output.
    """
    import numpy

    given, result = _host("parts", parts), _host("out", out)
    got = result.bits
    want = numpy.empty_like(got)
    addend = None if bias is None else _host("bias", bias)
    ops.fold(given, bias=addend, out=Memory(want, result.index), order=order)
    return _compared(got, want, result.index, got.shape)


def audit_rmsnorm(
    x: Any,
    y: Any,
    weight: Any = None,
    *,
    eps: float,
    bias: Any = None,
    weight_offset: float = 0.0,
    residual: Any = None,
    sample: int | None = None,
    seed: int = 0,
) -> Audit:
    """Recomputes ``y`` of :func:`pydet.rmsnorm` on the CPU and compares bits; :func:`audit_layernorm` says the rest."""
    options = {"eps": eps, "weight_offset": weight_offset}
    return _audit_norm(ops.rmsnorm, x, y, weight, bias, residual, options, sample, seed)


def audit_layernorm(
    x: Any,
    y: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Any = None,
    sample: int | None = None,
    seed: int = 0,
) -> Audit:
    """Recomputes ``y`` of :func:`pydet.layernorm` on the CPU and compares bits.

    Needs NumPy. The operands may be of different frameworks and on any device; they are copied to the host.

    Args:
        x, weight, bias, eps, weight_offset, residual: as they went into the norm.
        y: ``[..., N]``, the result to check.
        sample: check so many rows (with weights of heads so many rows of heads), picked at random; None for all.
        seed: of the random choice; the same seed picks the same rows.

    Returns:
        The counts, and the first differences; its ``arithmetic`` is ``"ieee"``.

    Raises:
        Error: as the norm, of which ``y`` is the output.
    """
    options = {"eps": eps, "weight_offset": weight_offset}
    return _audit_norm(ops.layernorm, x, y, weight, bias, residual, options, sample, seed)


def _audit_norm(
    norm: Callable[..., Any],
    x: Any,
    y: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    options: dict[str, Any],
    sample: int | None,
    seed: int,
) -> Audit:
    import numpy

    rows, given = _host("x", x), _host("y", y)
    weights, biases, added = (
        None if v is None else _host(name, v)
        for name, v in (("weight", weight), ("bias", bias), ("residual", residual))
    )
    shape, kept = given.bits.shape, None
    if sample is not None:
        if sample < 1:
            fail(_native.INVALID_VALUE, f"audit: sample is {sample}, want 1 or more")
        if seed < 0:
            fail(_native.INVALID_VALUE, f"audit: seed is {seed}, want 0 or more")
        of_heads = any(v is not None and v.bits.ndim == 2 for v in (weights, biases))
        leading = shape[: -2 if of_heads else -1]
        like = [v for v in (rows, added) if v is not None]
        if any(v.bits.shape != shape for v in like) or len(shape) < (2 if of_heads else 1):
            words = " and ".join("x".join(map(str, v.bits.shape)) for v in like)
            fail(constants.PYDET_INVALID_SHAPE, f"audit: x and residual are {words}, y {'x'.join(map(str, shape))}")
        count = int(numpy.prod(leading, dtype=object))
        kept = numpy.sort(numpy.random.default_rng(seed).choice(count, min(sample, count), replace=False))

        def picked(operand: Memory) -> Memory:
            return Memory(operand.bits.reshape(count, *shape[len(leading) :])[kept], operand.index)

        rows, given = picked(rows), picked(given)
        added = None if added is None else picked(added)
    got = given.bits
    want, single = numpy.empty_like(got), TYPES.index("float32")
    of_rows = [Memory(numpy.empty(got.shape[:-1], "u4"), single) for _ in range(2 if norm is ops.layernorm else 1)]
    total = [] if added is None else [Memory(numpy.empty_like(added.bits), added.index)]
    result = (Memory(want, given.index), *of_rows, *total)
    norm(rows, weights, bias=biases, residual=added, out=result, **options)

    def index_of(spot: tuple[int, ...]) -> tuple[int, ...]:
        if kept is None:
            return spot
        outer = numpy.unravel_index(kept[spot[0]], leading) if leading else ()
        return (*map(int, outer), *map(int, spot[1:]))

    return _compared(got, want, given.index, shape, index_of)


def _compared(
    got: Any,
    want: Any,
    index: int,
    shape: tuple[int, ...],
    index_of: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda spot: spot,
    arithmetic: str = "ieee",
    k_chunk: int | None = None,
) -> Audit:
    """How many elements, of the type of this index, differ, and the first of them; `shape`: the whole result's."""
    import numpy

    differences, first = numpy.argwhere(got != want), []
    for spot in map(tuple, differences[:MAX_LISTED].tolist()):
        (got_bits, got_value), (want_bits, want_value) = (_shown(x[spot], index) for x in (got, want))
        first.append(Difference(index_of(spot), got_bits, want_bits, got_value, want_value))
    return Audit(
        elements=int(numpy.prod(shape, dtype=object)),
        checked=int(got.size),
        differing=len(differences),
        first=tuple(first),
        arithmetic=arithmetic,
        k_chunk=k_chunk,
        dtype=TYPES[index],
    )


def _host(name: str, x: Any) -> Memory:
    """A tensor of any framework, as its bits in host memory."""
    import numpy

    if isinstance(x, Memory):
        return x
    framework = framework_of(x, "audit", name).name
    if framework == "torch":
        torch = sys.modules["torch"]
        dtypes = [getattr(torch, dtype) for dtype in TYPES]
        if x.dtype in dtypes:
            copied = x.detach().resolve_neg().cpu().contiguous()
            bits = copied.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[copied.element_size()]).numpy()
            return Memory(bits.view(f"u{bits.itemsize}"), dtypes.index(x.dtype))
        dtype = x.dtype
    else:
        array = x.get() if framework == "cupy" else numpy.asarray(x)
        if array.dtype.isnative and array.dtype.name in TYPES:
            array = array if array.flags.c_contiguous else array.copy("C")
            return Memory(array.view(f"u{array.itemsize}"), TYPES.index(array.dtype.name))
        dtype = array.dtype
    fail(INVALID_DTYPE, f"audit: {name} is {dtype}, want one of {', '.join(TYPES)}")


def _check_shapes(shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuses shapes from which no sample can be picked; a sample of these would hide that they do not fit."""
    a, b, c = shapes["a"], shapes["b"], shapes["c"]
    wrong = ""
    if not all(2 <= len(shape) <= MAX_DIMS for shape in (a, b, c)):
        wrong = f"want 2 to {MAX_DIMS} dimensions each"
    elif a[-1] != b[-2]:
        wrong = f"want b {a[-1]}xN"
    elif c[-2:] != (a[-2], b[-1]):
        wrong = f"want c {a[-2]}x{b[-1]} in its last two dimensions"
    elif shapes.get("bias", c)[-1:] != c[-1:]:
        wrong = f"want bias {c[-1]}, or shaped like c"
    else:
        for name, shape in shapes.items():
            batch = shape if name == "bias" else (*shape[:-2], *c[-2:])
            if len(batch) > len(c) or any(x not in (1, y) for x, y in zip(batch[::-1], c[::-1], strict=False)):
                wrong = f"want {name} to broadcast to c"
    if wrong:
        words = ", ".join(f"{name} is {'x'.join(map(str, shape)) or '()'}" for name, shape in shapes.items())
        fail(constants.PYDET_INVALID_SHAPE, f"audit: {words}; {wrong}")


def _picks(shape: tuple[int, ...], sample: int, seed: int) -> list[Any]:
    """Which matrices of the flattened batch, which rows and which columns: `sample` of each, ascending."""
    import numpy

    random = numpy.random.default_rng(seed)
    extents = (int(numpy.prod(shape[:-2], dtype=object)), *shape[-2:])
    return [numpy.sort(random.choice(extent, min(sample, extent), replace=False)) for extent in extents]


def _pick(name: str, operand: Memory, shape: tuple[int, ...], picks: list[Any]) -> Memory:
    """The picked part of an operand, as [matrices, rows, columns]; K is kept whole."""
    import numpy

    batch, rows, columns = picks
    bits = operand.bits
    if name == "bias" and bits.ndim == 1:
        bits = bits[None]
    spread = numpy.broadcast_to(bits, (*shape[:-2], *bits.shape[-2:]))
    outer = numpy.unravel_index(batch, shape[:-2]) if len(shape) > 2 else ()
    part = spread[outer] if outer else spread[None][: len(batch)]
    if name != "b" and bits.shape[-2] == shape[-2]:  # not a bias that is the same in every row
        part = part[:, rows]
    if name != "a":
        part = part[:, :, columns]
    return Memory(numpy.ascontiguousarray(part), operand.index)


def _pick_scale(name: str, scale: Memory, shape: tuple[int, ...], k: int, picks: list[Any]) -> Memory:
    """The picked part of a scale; one of blocks becomes one of columns, which means the same."""
    import numpy

    bits, group = scale.bits, 128
    if bits.ndim < 2:
        return scale
    if name == "b_scale":
        chunks, blocks = -(-k // group), -(-shape[-1] // group)
        if bits.shape[-2:] == (chunks, blocks) and blocks != shape[-1]:
            bits = numpy.repeat(bits, group, axis=-1)[..., : shape[-1]]
    fits = bits.shape[-2] == shape[-2] if name == "a_scale" else bits.shape[-1] == shape[-1]
    if not fits or bits.ndim > len(shape):
        words = "x".join(map(str, scale.bits.shape))
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"audit: {name} is {words}, want one that goes with c {shape[-2]}x{shape[-1]}",
        )
    batch, rows, columns = picks
    spread = numpy.broadcast_to(bits, (*shape[:-2], *bits.shape[-2:]))
    outer = numpy.unravel_index(batch, shape[:-2]) if len(shape) > 2 else ()
    part = spread[outer] if outer else spread[None][: len(batch)]
    part = part[:, rows] if name == "a_scale" else part[:, :, columns]
    return Memory(numpy.ascontiguousarray(part), scale.index)


def _shown(bits: Any, index: int) -> tuple[str, float]:
    """Bits in hexadecimal, and the number that they mean as elements of a type."""
    import numpy

    if TYPES[index] == "bfloat16":
        value = (numpy.uint32(bits) << numpy.uint32(16)).view(numpy.float32)
    else:
        value = bits.view(TYPES[index])
    return f"0x{int(bits):0{2 * bits.itemsize}X}", float(value)


# ---- pydet audit -----------------------------------------------------------------------------------------------------


def _load(path: str, dtype: str | None, notes: list[str]) -> Memory:
    """A .npy file. NumPy saves bfloat16 as two bytes of nothing ("|V2"), e4m3 as one, so those are read as these."""
    import numpy

    try:
        with open(path, "rb") as file:
            first = file.read(6)
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror or problem}") from None
    if first != b"\x93NUMPY" and first[:2] != b"PK":  # numpy would take it for a pickle, and speak of that
        starts = f"begins with {first!r}" if first else "is empty"
        raise ValueError(f"{path} is no .npy file: it {starts}, want an array as numpy.save writes it")
    try:
        array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except Exception as problem:  # a damaged header raises what its text happens to be read as
        words = str(problem).partition("\n")[0] or type(problem).__name__
        raise ValueError(f"{path} is no whole .npy file of numbers: {words}") from None
    if not isinstance(array, numpy.ndarray):
        array.close()
        raise ValueError(f"{path} holds {type(array).__name__}, want one array: a .npy file")
    kind, size = array.dtype.kind, array.dtype.itemsize
    asked = None if dtype is None else type_index(dtype, "audit", "dtype")
    if asked is not None and (DTYPES[asked][1] == 8) != (size == 1):
        asked = None  # it speaks of the float8 files, or of the others
    if kind == "V" and size in _UNSTATED and asked is None:
        index = _UNSTATED[size]
        notes.append(
            f"{path} has {size}-byte elements of no stated type; read as {TYPES[index]} (--dtype says otherwise)"
        )
    elif kind in "uiV" and size in (1, 2, 4) and asked is not None:
        index = asked
    elif array.dtype.name in TYPES and array.dtype.isnative:
        index = TYPES.index(array.dtype.name)
    else:
        raise ValueError(f"{path} holds {array.dtype}, want {', '.join(TYPES)}, or their bits with --dtype")
    if 8 * size != DTYPES[index][1]:
        raise ValueError(f"{path} has elements of {size} bytes, which are no {TYPES[index]}")
    return Memory(array.view(f"u{size}"), index)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pydet audit",
        description="Recompute C = A B on the CPU, in the arithmetic that made it, and compare every bit.",
        epilog="Exit status: 0 if no element differs, 1 if any does, 2 for input that cannot be audited.",
    )
    parser.add_argument("a", metavar="A.npy", help="[..., M, K]; float32, bfloat16 or float16")
    parser.add_argument("b", metavar="B.npy", help="[..., K, N], of the same type ([..., N, K] with --transpose-b)")
    parser.add_argument("c", metavar="C.npy", help="[..., M, N], the result to check")
    parser.add_argument(
        "--arithmetic", help="ieee, sm90, sm80, cdna3 or cdna2: how C was computed; float32 can do without: ieee"
    )
    parser.add_argument("--k-chunk", type=int, metavar="N", help="the k_chunk that C was computed with")
    for operand, extents in (
        ("a", "[], [..., M, 1] or [..., M, K/128]"),
        ("b", "[], [..., 1, N] or [..., K/128, N/128]"),
    ):
        parser.add_argument(
            f"--{operand}-scale", metavar="S.npy", help=f"of float8: {extents}, float32 or float8_e8m0fnu"
        )
    parser.add_argument("--bias", metavar="F.npy", help="[N] or [..., M, N], added before the rounding")
    parser.add_argument("--transpose-b", action="store_true", help="B holds [..., N, K], as a linear layer does")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="check N rows by N columns (of N matrices of a batch) instead of all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of the sample (default: 0)")
    parser.add_argument("--dtype", help="the type of files that do not state it: bf16 (the default), fp16, fp32")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    given = _parser().parse_args(arguments)
    notes: list[str] = []
    try:
        if given.arithmetic == "auto":
            raise ValueError("--arithmetic is auto, want the arithmetic that computed C: on this CPU auto is ieee")
        a, b, c = (_load(path, given.dtype, notes) for path in (given.a, given.b, given.c))
        if given.arithmetic is None and TYPES[a.index] != "float32":
            raise ValueError(
                f"{given.a} is {TYPES[a.index]}, of which --arithmetic must say how C was computed, as sm90"
            )
        bias = _load(given.bias, given.dtype, notes) if given.bias else None
        scales = {
            name: _load(path, "float8_e8m0fnu", notes)
            for name, path in (("a_scale", given.a_scale), ("b_scale", given.b_scale))
            if path
        }
        if given.transpose_b:
            if b.bits.ndim < 2:
                raise ValueError(f"{given.b} has {b.bits.ndim} dimensions, want 2 or more")
            b = Memory(b.bits.swapaxes(-1, -2), b.index)
        result = audit(
            a,
            b,
            c,
            **scales,
            bias=bias,
            arithmetic=given.arithmetic,
            k_chunk=given.k_chunk,
            sample=given.sample,
            seed=given.seed,
        )
    except (OSError, ValueError, MemoryError, _native.Error, ImportError) as problem:
        print(f"pydet audit: {str(problem) or type(problem).__name__}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(dataclasses.asdict(result) | {"all_equal": result.all_equal, "notes": notes}, indent=2))
        return int(not result.all_equal)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    chunk = f", k_chunk {result.k_chunk}" if result.k_chunk else ""
    print(f"{Path(given.c).name}: {result.dtype}, recomputed in {result.arithmetic}{chunk}")
    print(f"{result.checked} of {result.elements} elements checked, {result.differing} differ")
    for difference in result.first:
        where = ", ".join(map(str, difference.index))
        print(
            f"  [{where}]  got {difference.got} ({difference.got_value:.9g})"
            f"  want {difference.want} ({difference.want_value:.9g})"
        )
    if result.differing > len(result.first):
        print(f"  and {result.differing - len(result.first)} more")
    return int(not result.all_equal)
