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
from pydet._native import UNSUPPORTED, Error, fail
from pydet.ops import Arithmetic
from pydet.torch import fp8, grouped, scaled_grouped
from pydet.torch.ops import DTYPES, matrix
from pydet.torch.ops.scaled import FP8, groups

_active = threading.Lock()
_KEYS = ("CPU", "CUDA")
_DIMS = {  # of the two that are multiplied
    **dict.fromkeys(("mm", "addmm", "addmm_"), (2, 2)),
    **dict.fromkeys(("bmm", "baddbmm", "baddbmm_"), (3, 3)),
    **dict.fromkeys(("mv", "addmv", "addmv_"), (2, 1)),
    "dot": (1, 1),
}
_FORMS = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), ("default", "out", "dtype", "dtype_out")),
    **dict.fromkeys(("mv", "addmv"), ("default", "out")),
    **dict.fromkeys(("addmm_", "baddbmm_", "addmv_", "dot"), ("default",)),
}
_LEFT = (  # multiply matrices inside a kernel of PyTorch's own
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *(f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn")),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    *("convolution", "convolution_backward", "_addmm_activation"),
    *("_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
)


# Whose kernels on a CPU give an element other bits by its place: their forms, and how many operands are like x.
_ACTIVATIONS = {
    "silu": (("default", "out"), 1),
    "silu_": (("default",), 1),
    "gelu": (("default", "out"), 1),
    "gelu_": (("default",), 1),
    "sigmoid": (("default", "out"), 1),
    "sigmoid_": (("default",), 1),
    "softplus": (("default", "out"), 1),
    "silu_backward": (("default", "grad_input"), 2),
    "gelu_backward": (("default", "grad_input"), 2),
    "softplus_backward": (("default", "grad_input"), 2),
}


def is_active() -> bool:
    """Whether :func:`override_aten` is, in this thread or another."""
    return _active.locked()


def takes_over(name: str) -> bool:
    """Whether :func:`override_aten` computes an operator of that name, of types that it has."""
    return name in _DIMS or name in _ACTIVATIONS or name in ("linear", "_grouped_mm")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix as the kernels read it: one of its last two strides is 1."""
    return x if x.stride(-1) == 1 or x.stride(-2) == 1 else x.contiguous()


@contextlib.contextmanager
def override_aten(*, arithmetic: Arithmetic = "auto", k_chunk: int | None = None) -> Iterator[Counter[str]]:
    """While active, PyTorch's matrix products run on pydet, its activations and the gradients of its embeddings.

    ``aten::mm``, ``addmm``, ``bmm``, ``baddbmm``, ``mv``, ``addmv``, ``dot`` and ``_grouped_mm``. Their ``out``,
    ``out_dtype`` and in-place forms do too. These are what ``torch.mm``, ``matmul``, ``@``, ``einsum``, ``linear`` and
    ``nn.Linear`` come down to, on the CPU and on CUDA, in forward and in backward, in eager mode and in graphs that
    ``torch.compile`` made (it calls them by their out forms), on every thread of the process. A product with beta or
    alpha not 1 is scaled after it was rounded, as PyTorch words it: ``beta input + alpha (a b)``, in separate
    operations.

    A ``linear`` with a bias is one ``addmm`` on the rows of its input, whatever the input's shape and strides: the bias
    is added in fp32, before the one rounding. (PyTorch alone makes it that, or a product and an addition that rounds
    again, as the input's strides are, and with them its extents.) A graph of ``torch.compile`` is as it was traced:
    one traced before keeps PyTorch's choice until ``torch._dynamo.reset()``. ``vmap`` of a gradient of ``torch.func``
    makes it a product and an addition.

    ``aten::_scaled_mm`` and ``_scaled_mm_v2``, which ``torch._scaled_mm`` and ``torch.nn.functional.scaled_mm`` come
    down to, run on :func:`pydet.torch.scaled_mm` where the factors are float8, the result is none, and the device has a
    kernel for them: by scales of tensors, rows, groups of 128 and blocks of 128x128, with ``use_fast_accum`` for one
    chain over K, and without it for chains of 128, whatever ``k_chunk`` is. ``_scaled_grouped_mm`` and
    ``_scaled_grouped_mm_v2`` do likewise on :func:`pydet.torch.scaled_grouped_mm`, where groups are rows or a batch.

    ``aten::silu``, ``gelu`` (both), ``sigmoid`` and ``softplus`` (of beta 1 and threshold 20) run on
    :func:`pydet.activation`, as do their in-place and ``out`` forms, and the gradients of silu, gelu and softplus:
    PyTorch's on a CPU give an element other bits by its place. (Its tanh, exp and gradient of sigmoid do not.) A graph
    of Inductor has kernels of its own for them, which come to no operator.

    ``aten::embedding_dense_backward``, the gradient of ``nn.Embedding``, runs on :func:`pydet.embedding_backward`:
    the tokens of an id are added in their order. With ``scale_grad_by_freq`` it is left.

    Left to PyTorch, and counted as that: types other than float32, bfloat16 and float16; fused attention
    (``scaled_dot_product_attention`` but in its math backend, whose products are caught), convolutions, recurrent
    layers in one kernel and ``_addmm_activation`` (fast path of PyTorch's encoder layers).
    Neither caught nor counted: sparse and quantized
    products, and what never comes to these operators: kernels that a compiler makes itself (``max_autotune``'s
    templates, ``flex_attention``), and those of other packages.

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
                for name, forms in _FORMS.items():
                    for form in forms:
                        _take_over(library, key, name, form, options, caught)
                for name in _LEFT:
                    _count(library, key, name, caught)
                for name, (forms, operands) in _ACTIVATIONS.items():
                    for form in forms:
                        _take_over_activation(library, key, name, form, operands, caught)
                _take_over_embedding(library, key, caught)
                _take_over_linear_out(library, key)
                _take_over_scaled(library, key, arithmetic, caught)
                _take_over_grouped(library, key, options, caught)
                _take_over_scaled_grouped(library, key, arithmetic, caught)
            for key in _LINEAR_KEYS:
                _take_over_linear(library, key, options, caught)
        yield caught
    finally:
        library._destroy()
        _active.release()


def _original(name: str, form: str, key: str) -> Any:
    """PyTorch's kernel of an operator on a backend; None in a release or a build that has none."""
    get_kernel = torch.library.get_kernel
    try:
        return get_kernel(getattr(getattr(torch.ops.aten, name), form), key)
    except (AttributeError, RuntimeError):
        return None


def _count(library: torch.library.Library, key: str, name: str, caught: Counter[str]) -> None:
    original = _original(name, "default", key)
    if original is None:
        return

    def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        caught[f"aten::{name} (left to PyTorch)"] += 1
        return original.call_boxed(keyset, *arguments, **keywords)

    library.impl(name, kernel, key, with_keyset=True, allow_override=True)


def _take_over(
    library: torch.library.Library, key: str, name: str, form: str, options: dict[str, Any], caught: Counter[str]
) -> None:
    full = f"aten::{name}" if form == "default" else f"aten::{name}.{form}"
    original = _original(name, form, key)
    if original is None:
        return
    adds, in_place, dims = "add" in name, name.endswith("_"), _DIMS[name]
    compute: Callable[..., Any] = _add_product if adds else _product
    if dims[1] == 1:
        compute = _by_vector(compute)

    def kernel(keyset: Any, *arguments: Any, beta: Any = 1, alpha: Any = 1, out: Any = None) -> torch.Tensor:
        scaled = {"beta": beta, "alpha": alpha} if adds else {}
        operands, out_dtype = (arguments[:-1], arguments[-1]) if form.startswith("dtype") else (arguments, None)
        written = operands[0] if in_place else out
        if not _takes(operands, written, in_place, out_dtype, dims):
            caught[f"{full} (left to PyTorch)"] += 1
            return original.call_boxed(keyset, *arguments, **scaled, **({} if out is None else {"out": out}))
        caught[full] += 1
        with torch.no_grad():
            return compute(operands, written, {**options, "out_dtype": out_dtype}, **scaled)

    library.impl(full, kernel, key, with_keyset=True, allow_override=True)  # also over another Python override


# ---- Activations -----------------------------------------------------------------------------------------------------


def _kind_of(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
    """The kind of a call; None of a softplus that pydet has not. `arguments` follow the operands."""
    if name == "gelu":
        return "gelu_tanh" if keywords.get("approximate", "none") == "tanh" else "gelu"
    if name == "softplus":
        given = dict(zip(("beta", "threshold"), arguments, strict=False)) | keywords
        return "softplus" if (given.get("beta", 1), given.get("threshold", 20)) == (1, 20) else None
    return name


def _take_over_activation(
    library: torch.library.Library, key: str, name: str, form: str, operands: int, caught: Counter[str]
) -> None:
    original = _original(name, form, key)
    if original is None:
        return
    full = f"aten::{name}" if form == "default" else f"aten::{name}.{form}"
    in_place, function = name.endswith("_"), name.rstrip("_").removesuffix("_backward")

    def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        given, x = arguments[:operands], arguments[operands - 1]
        out = keywords.get(form) if form != "default" else x if in_place else None
        kind = _kind_of(function, arguments[operands:], keywords)
        like = all(t.dtype == x.dtype and t.shape == x.shape and t.device == x.device for t in given)
        if kind is None or not like or x.dtype not in DTYPES or (out is not None and out.dtype != x.dtype):
            caught[f"{full} (left to PyTorch)"] += 1
            return original.call_boxed(keyset, *arguments, **keywords)
        caught[full] += 1
        with torch.no_grad():
            dense = [t.contiguous().view(-1) for t in given]
            call: Callable[..., Any] = pydet.activation if operands == 1 else pydet.activation_backward
            result = call(*dense, kind).view(x.shape)
            if out is None and not x.is_contiguous():
                out = torch.empty_like(x)  # with the strides that PyTorch's result has
            return _into(result, out)

    library.impl(full, kernel, key, with_keyset=True, allow_override=True)


# ---- The gradient of an embedding ------------------------------------------------------------------------------------


def _take_over_embedding(library: torch.library.Library, key: str, caught: Counter[str]) -> None:
    original = _original("embedding_dense_backward", "default", key)
    if original is None:
        return
    full = "aten::embedding_dense_backward"

    def kernel(keyset: Any, dout: torch.Tensor, ids: torch.Tensor, rows: int, padding: int, scales: bool) -> Any:
        if scales or dout.dtype not in DTYPES or ids.dtype not in (torch.int32, torch.int64) or not dout.shape[-1]:
            caught[f"{full} (left to PyTorch)"] += 1
            return original.call_boxed(keyset, dout, ids, rows, padding, scales)
        caught[full] += 1
        with torch.no_grad():
            given = dout.reshape(-1, dout.shape[-1]).contiguous(), ids.reshape(-1).contiguous()
            return pydet.embedding_backward(*given, rows, padding_idx=padding if padding >= 0 else None)

    library.impl(full, kernel, key, with_keyset=True, allow_override=True)


# ---- linear ----------------------------------------------------------------------------------------------------------

_LINEAR_KEYS = ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode")  # above autograd; inside torch.func


def _has_bias(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether it is a linear whose bias is to be added before the rounding: of our types, and of shapes that fit."""
    return (
        bias is not None
        and x.dtype == w.dtype == bias.dtype
        and x.dtype in DTYPES
        and x.layout == w.layout == torch.strided
        and not x.is_nested
        and x.dim() > 0
        and w.dim() == 2
        and x.shape[-1] == w.shape[-1]
    )


def _added_by_row(x: torch.Tensor, bias: torch.Tensor, width: int) -> torch.Tensor:
    """The bias as addmm takes it beside the rows of x."""
    return bias if bias.dim() < 2 else matrix(bias.expand(*x.shape[:-1], width))


def _take_over_linear(library: torch.library.Library, key: str, options: dict[str, Any], caught: Counter[str]) -> None:
    """A linear with a bias becomes one addmm: above autograd, whose backward is addmm's."""
    original = _original("linear", "default", "CPU" if key == _LINEAR_KEYS[0] else key)
    if original is None:
        return

    def kernel(keyset: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is None or not _has_bias(x, w, bias):
            return original.call_boxed(keyset, x, w, bias)
        added, rows = _added_by_row(x, bias, w.shape[0]), matrix(x)
        if key == _LINEAR_KEYS[1] and _only_vmap():  # which would make addmm two operations
            caught["aten::linear"] += 1
            y = torch.ops.pydet.gemm(rows, w.t(), added, None, options["arithmetic"], options["k_chunk"])
        else:
            y = torch.addmm(added, rows, w.t())
        return y.view(*x.shape[:-1], w.shape[0])

    library.impl("linear", kernel, key, with_keyset=True, allow_override=True)


def _only_vmap() -> bool:
    """Whether the transforms of torch.func that are at work are vmap's alone."""
    stack = torch._C._functorch.get_interpreter_stack()
    return all(interpreter.key() == torch._C._functorch.TransformType.Vmap for interpreter in stack or ())


def _take_over_linear_out(library: torch.library.Library, key: str) -> None:
    original = _original("linear", "out", key)
    if original is None:
        return

    def kernel(
        keyset: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor
    ) -> torch.Tensor:
        if bias is None or not _has_bias(x, w, bias) or out.dtype != x.dtype:
            return original.call_boxed(keyset, x, w, bias, out=out)
        rows = torch.addmm(_added_by_row(x, bias, w.shape[0]), matrix(x), w.t())
        return _into(rows.view(*x.shape[:-1], w.shape[0]), out)

    library.impl("linear.out", kernel, key, with_keyset=True, allow_override=True)


# ---- scaled_mm -------------------------------------------------------------------------------------------------------


def _recipe(scale: torch.Tensor, left: bool, operand: torch.Tensor) -> int | None:
    """What torch._scaled_mm takes a scale for, by its shape; None for what pydet has not."""
    rows, k = operand.shape if left else operand.t().shape
    shapes = {
        fp8.ROW: (rows, 1),
        fp8.GROUPS: (rows, groups(k)),
        fp8.BLOCKS: (groups(rows), groups(k)),
    }
    if scale.dtype != torch.float32:
        return None  # e8m0: groups of 32, swizzled
    if scale.numel() == 1:
        return fp8.TENSOR
    shape = tuple(scale.shape if left else scale.t().shape) if scale.dim() == 2 else None
    return next((recipe for recipe, want in shapes.items() if shape == want), None)


def _scaled(
    operands: tuple[torch.Tensor, ...],
    recipes: tuple[Any, Any] | None,
    out: torch.Tensor | None,
    options: dict[str, Any],
    public: bool,
) -> Any:
    """The product of (a, b, scale_a, scale_b); None where it is left to PyTorch."""
    a, b, scale_a, scale_b = operands
    fits = a.dim() == b.dim() == 2 and a.dtype in FP8 and b.dtype in FP8 and a.shape[1] == b.shape[0]
    if not fits or options["out_dtype"] not in DTYPES or (out is not None and out.dtype != options["out_dtype"]):
        return None
    known: tuple[Any, Any] = recipes or (_recipe(scale_a, True, a), _recipe(scale_b, False, b))
    left, right = known
    if not {left, right} <= {fp8.TENSOR, fp8.ROW, fp8.GROUPS, fp8.BLOCKS}:
        return None
    try:
        scales = (
            fp8.scale_of("scale_a", scale_a, left, True, a, public),
            fp8.scale_of("scale_b", scale_b, right, False, b, public),
        )
        result = fp8.multiply(a, b, scales, **options)
    except Error as problem:
        if problem.status != UNSUPPORTED:
            raise
        return None
    return _into(result, out)


def _take_over_scaled(library: torch.library.Library, key: str, arithmetic: Arithmetic, caught: Counter[str]) -> None:
    for name, call in (("_scaled_mm", _scaled_mm), ("_scaled_mm_v2", _scaled_mm_v2)):
        for form in ("default", "out"):
            original = _original(name, form, key)
            if original is not None:
                full = f"aten::{name}" if form == "default" else f"aten::{name}.{form}"
                kernel = _scaled_kernel(call, full, original, arithmetic, caught)
                library.impl(full, kernel, key, with_keyset=True, allow_override=True)


def _scaled_kernel(
    call: Callable[..., Any], full: str, original: Any, arithmetic: Arithmetic, caught: Counter[str]
) -> Callable[..., Any]:
    def kernel(keyset: Any, *arguments: Any, out: Any = None, **keywords: Any) -> Any:
        with torch.no_grad():
            result = call(arithmetic, out, *arguments, **keywords)
        caught[full if result is not None else f"{full} (left to PyTorch)"] += 1
        if result is not None:
            return result
        return original.call_boxed(keyset, *arguments, **keywords, **({} if out is None else {"out": out}))

    return kernel


def _scaled_mm(
    arithmetic: Arithmetic,
    out: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    options = {"bias": bias, "out_dtype": out_dtype, "fast": use_fast_accum, "arithmetic": arithmetic}
    return None if scale_result is not None else _scaled((a, b, scale_a, scale_b), None, out, options, False)


def _of_one_level(*operands: tuple[list[torch.Tensor], list[int], list[int]]) -> bool:
    """Whether each operand's (scales, recipes, swizzles) is one scale by one recipe, not swizzled."""
    return all(len(scales) == len(recipes) == 1 and not any(swizzles) for scales, recipes, swizzles in operands)


def _scaled_mm_v2(
    arithmetic: Arithmetic,
    out: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[torch.Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Any:
    if contraction_dim or not _of_one_level((scale_a, recipe_a, swizzle_a), (scale_b, recipe_b, swizzle_b)):
        return None
    options = {"bias": bias, "out_dtype": out_dtype, "fast": use_fast_accum, "arithmetic": arithmetic}
    return _scaled((a, b, scale_a[0], scale_b[0]), (recipe_a[0], recipe_b[0]), out, options, True)


# ---- Groups ----------------------------------------------------------------------------------------------------------


def _take_over_grouped(library: torch.library.Library, key: str, options: dict[str, Any], caught: Counter[str]) -> None:
    """``torch._grouped_mm``, which ``torch.nn.functional.grouped_mm`` and both of its gradients come down to."""
    original = _original("_grouped_mm", "default", key)
    if original is None:
        return

    def kernel(
        keyset: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if not _takes_groups(a, b, offs, bias, out_dtype):
            caught["aten::_grouped_mm (left to PyTorch)"] += 1
            return original.call_boxed(keyset, a, b, offs, bias, out_dtype)
        caught["aten::_grouped_mm"] += 1
        with torch.no_grad():
            result = grouped.grouped_mm(a, b, offs=offs, out_dtype=out_dtype, **options)
        return _as_pytorch_lays_it_out(result)

    library.impl("_grouped_mm", kernel, key, with_keyset=True, allow_override=True)


def _take_over_scaled_grouped(
    library: torch.library.Library, key: str, arithmetic: Arithmetic, caught: Counter[str]
) -> None:
    """The grouped products of fp8, also on a backend on which PyTorch has none."""

    def take_over(name: str, call: Callable[..., Any]) -> None:
        original = _original(name, "default", key)

        def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
            with torch.no_grad():
                result = call(arithmetic, *arguments, **keywords)
            caught[f"aten::{name}" if result is not None else f"aten::{name} (left to PyTorch)"] += 1
            if result is not None:
                return _as_pytorch_lays_it_out(result)
            if original is None:
                raise NotImplementedError(f"aten::{name}: PyTorch has no kernel on {key}, and pydet none for this form")
            return original.call_boxed(keyset, *arguments, **keywords)

        library.impl(name, kernel, key, with_keyset=True, allow_override=True)

    for name, call in (("_scaled_grouped_mm", _scaled_groups), ("_scaled_grouped_mm_v2", _scaled_groups_v2)):
        if hasattr(torch.ops.aten, name):
            take_over(name, call)


def _scaled_groups(
    arithmetic: Arithmetic,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    if scale_result is not None or scale_a.dtype != torch.float32:  # e8m0: groups of 32, swizzled
        return None
    operands = a, b, (scale_a, scale_b), (fp8.ROW, fp8.ROW), offs, bias, out_dtype
    return _multiplied_groups(*operands, use_fast_accum, arithmetic)


def _scaled_groups_v2(
    arithmetic: Arithmetic,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[torch.Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Any:
    if contraction_dim or not _of_one_level((scale_a, recipe_a, swizzle_a), (scale_b, recipe_b, swizzle_b)):
        return None
    operands = a, b, (scale_a[0], scale_b[0]), (recipe_a[0], recipe_b[0]), offs, bias, out_dtype
    return _multiplied_groups(*operands, use_fast_accum, arithmetic)


def _multiplied_groups(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Any:
    """None where it is left to PyTorch: other types and forms, and where the device has no kernel of pydet's."""
    if a.dtype not in FP8 or b.dtype not in FP8:
        return None
    try:
        return scaled_grouped.multiply(a, b, *rest)
    except Error as problem:
        if problem.status != UNSUPPORTED:
            raise
        return None


def _takes_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> bool:
    """Whether it is one of the four forms, of our types. The rest PyTorch refuses."""
    dims = a.dim(), b.dim()
    groups = {(2, 3): b, (3, 2): a}.get(dims)
    return (
        dims in ((2, 2), (2, 3), (3, 2), (3, 3))
        and a.shape[-1] == b.shape[-2]
        and a.dtype == b.dtype
        and a.dtype in DTYPES
        and (out_dtype or a.dtype) in (a.dtype, torch.float32)
        and bias is None
        and (offs is None) == (dims == (3, 3))
        and (dims != (3, 3) or a.shape[0] == b.shape[0])
        and (offs is None or (offs.dim() == 1 and offs.dtype == torch.int32 and offs.device == a.device))
        and (offs is None or groups is None or groups.shape[0] == offs.shape[0])
    )


def _as_pytorch_lays_it_out(x: torch.Tensor) -> torch.Tensor:
    """Graphs that were traced rely on it: on CUDA, and on the CPU of such a build, rows of a multiple of 16 bytes."""
    each = 16 // x.element_size() if torch.version.cuda else 1
    stride = (x.shape[-1] + each - 1) // each * each
    if x.is_contiguous() and stride == x.shape[-1]:
        return x
    wide = x.new_empty((*x.shape[:-1], stride))[..., : x.shape[-1]]
    return wide.copy_(x)


# ---- Products --------------------------------------------------------------------------------------------------------


def _takes(
    operands: tuple[torch.Tensor, ...],
    out: torch.Tensor | None,
    in_place: bool,
    out_dtype: torch.dtype | None,
    dims: tuple[int, int],
) -> bool:
    """Whether pydet computes this: its types, and the shapes that PyTorch allows. What it does not, PyTorch refuses."""
    *added, a, b = operands
    result = out_dtype or b.dtype
    return (
        (a.dim(), b.dim()) == dims
        and a.shape[:-2] == b.shape[:-2]
        and a.shape[-1] == b.shape[-2 if dims[1] > 1 else 0]
        and a.dtype == b.dtype
        and b.dtype in DTYPES
        and result in (b.dtype, torch.float32)
        and all(x.dtype in (b.dtype, result) for x in added)
        and (out is None or out.dtype == result)
        and (out is None or not in_place or out.shape == (*a.shape[:-1], *b.shape[a.dim() - 1 :]))
    )


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
    if _fits(out, (*a.shape[:-1], b.shape[-1]), operands):
        return pydet.gemm(a, b, out=out, **options)
    return _into(pydet.gemm(a, b, **options), out)


def _add_product(
    operands: tuple[torch.Tensor, ...], out: torch.Tensor | None, options: dict[str, Any], beta: Any, alpha: Any
) -> torch.Tensor:
    added, a, b = operands
    shape = (*a.shape[:-1], b.shape[-1])
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


def _by_vector(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` where the last operand is a vector: it goes in as a column, and the result comes out as a vector."""

    def call(
        operands: tuple[torch.Tensor, ...], out: torch.Tensor | None, options: dict[str, Any], **scaled: Any
    ) -> torch.Tensor:
        *added, a, x = operands
        rows = a if a.dim() == 2 else a[None]
        column = tuple(y.expand(rows.shape[0])[:, None] for y in added)
        result = compute((*column, rows, x[:, None]), None, options, **scaled)
        return _into(result.view(a.shape[:-1]), out)

    return call
