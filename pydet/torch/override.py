"""Products that PyTorch's own operators compute, taken over by pydet for a while."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import pydet
from pydet._native import UNSUPPORTED, constants, fail
from pydet.torch.ops import DTYPES

_active = threading.Lock()
_KEYS = ("CPU", "CUDA")
_TAKEN = (
    *(f"{name}{overload}" for name in ("mm", "bmm", "addmm", "baddbmm") for overload in ("", ".out")),
    *("addmm_", "baddbmm_"),
)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix as the kernels read it: one of its last two strides is 1."""
    return x if x.stride(-1) == 1 or x.stride(-2) == 1 else x.contiguous()


@contextlib.contextmanager
def override_aten(*, arithmetic: str = "auto", k_chunk: int | None = None) -> Iterator[Counter[str]]:
    """While active, ``aten::mm``, ``addmm``, ``bmm``, ``baddbmm``, their ``out`` and in-place forms run on pydet.

    These are what ``torch.mm``, ``matmul``, ``@``, ``einsum``, ``linear`` and ``nn.Linear`` come down to, on the CPU
    and on CUDA, in forward and in backward, in eager mode and in graphs that ``torch.compile`` made (it calls them by
    their out forms), on every thread of the process. A product with beta or alpha not 1 is scaled after it was rounded,
    as PyTorch words it: ``beta input + alpha (a b)``, in separate operations. PyTorch itself decides whether a
    ``linear`` is an ``addmm``, whose bias is added before the one rounding, or a product and an addition: that of a
    contiguous input is one ``addmm``, on as many rows as there are.

    Not caught: products by a vector (``mv``, ``addmv``, ``dot``), the forms with ``out_dtype``, fused attention
    (``scaled_dot_product_attention`` but in its math backend), ``_addmm_activation`` (fast path of PyTorch's encoder
    layers), recurrent layers, convolutions, and what a compiler makes kernels of itself (``max_autotune``'s templates).
    Types other than float32, bfloat16 and float16, and sparse tensors, stay with PyTorch.

    Args:
        arithmetic, k_chunk: as in :func:`pydet.gemm`.

    Yields:
        A counter of the calls taken over, by operator: ``{"aten::mm": 12, "aten::mm.out": 3}``, and by
        ``"aten::mm (left to PyTorch)"`` those that were not.

    Raises:
        Error: one is active already.
    """
    if not _active.acquire(blocking=False):
        fail(UNSUPPORTED, "override_aten: one is active already, in this thread or another")
    caught: Counter[str] = Counter()
    options = {"arithmetic": arithmetic, "k_chunk": k_chunk}
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(?i:overrid)")
            for key in _KEYS:
                for name in _TAKEN:
                    _take_over(library, key, name, options, caught)
        yield caught
    finally:
        library._destroy()
        _active.release()


def _take_over(
    library: torch.library.Library, key: str, name: str, options: dict[str, Any], caught: Counter[str]
) -> None:
    full, (packet, _, overload) = f"aten::{name}", name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    try:
        original = torch.library.get_kernel(operator, key)
    except RuntimeError:  # a build without this backend
        return
    compute: Callable[..., Any] = _add_product if name.startswith(("addmm", "baddbmm")) else _product

    def kernel(keyset: Any, *operands: torch.Tensor, beta: Any = 1, alpha: Any = 1, out: Any = None) -> torch.Tensor:
        scaled = {} if compute is _product else {"beta": beta, "alpha": alpha}
        written = operands[0] if name.endswith("_") else out
        if any(x.dtype not in DTYPES or x.dtype != operands[-1].dtype for x in operands) or (
            written is not None and written.dtype != operands[-1].dtype
        ):
            caught[f"{full} (left to PyTorch)"] += 1
            outs = {} if out is None else {"out": out}
            return original.call_boxed(keyset, *operands, **scaled, **outs)
        caught[full] += 1
        return compute(operands, written, options, **scaled)

    library.impl(name, kernel, key, with_keyset=True)


def _into(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return result
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _fits(out: torch.Tensor | None, shape: tuple[int, ...], operands: tuple[torch.Tensor, ...]) -> bool:
    """Whether the kernel may write into out at once: right shape, adjacent rows, no memory of an operand."""
    return (
        out is not None
        and tuple(out.shape) == shape
        and out.is_contiguous()
        and all(out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in operands)
    )


def _product(operands: tuple[torch.Tensor, ...], out: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
    a, b = (_rows(x) for x in operands)
    with torch.no_grad():
        if _fits(out, (*a.shape[:-1], b.shape[-1]), operands):
            return pydet.gemm(a, b, out=out, **options)
        return _into(pydet.gemm(a, b, **options), out)


def _add_product(
    operands: tuple[torch.Tensor, ...], out: torch.Tensor | None, options: dict[str, Any], beta: Any, alpha: Any
) -> torch.Tensor:
    added, a, b = operands
    shape = (*a.shape[:-1], b.shape[-1])
    if out is added and out.shape != shape:
        words = "x".join(map(str, shape))
        fail(constants.PYDET_INVALID_SHAPE, f"gemm: out is {tuple(out.shape)}, want {words}; it is written in place")
    with torch.no_grad():
        if beta == 1 and alpha == 1:
            bias = added if added.dim() == 1 and added.shape[0] == shape[-1] else added.expand(shape)
            if bias.dim() > 1 and bias.stride(-1) != 1:
                bias = bias.contiguous()
            direct = _fits(out, shape, operands)
            result = pydet.gemm(_rows(a), _rows(b), bias=bias, out=out if direct else None, **options)
            return result if direct else _into(result, out)
        result = pydet.gemm(_rows(a), _rows(b), **options)
        if alpha != 1:
            result = result * alpha
        if beta != 0:
            result = result + (added if beta == 1 else added * beta)
        return _into(result, out)
