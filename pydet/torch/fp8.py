"""fp8 in PyTorch: ``scaled_mm`` by torch's own signature, and a linear layer whose three products are in fp8.

Both come down to :func:`pydet.scaled_gemm` and :func:`pydet.quantize`, whose bits they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import pydet
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail
from pydet.hooks import unknown
from pydet.ops import Arithmetic
from pydet.torch.accumulate import adding, check_own, step_of
from pydet.torch.ops import DTYPES, matrix, sum_rows
from pydet.torch.ops.scaled import FP8, GROUP, empty_rows, groups

TENSOR, ROW, GROUPS, BLOCKS = 0, 1, 4, 5  # of torch.nn.functional.ScalingType: 1x128 and 128x128 are the last two


# ---- scaled_mm -------------------------------------------------------------------------------------------------------


def only(op: str, name: str, given: Any) -> Any:
    """The one member of a list, or what is no list; torch takes lists for formats of two levels."""
    if not isinstance(given, list | tuple):
        return given
    if len(given) != 1:
        fail(UNSUPPORTED, f"{op}: {name} has {len(given)} members, want one")
    return given[0]


def number(member: Any) -> int:
    """The number of a member of an enumeration."""
    return int(getattr(member, "value", member))


def check_plain(op: str, swizzle_a: Any, swizzle_b: Any, contraction_dim: Sequence[int], dims: tuple[int, int]) -> None:
    """Refuses swizzled scales, and another dimension to sum over than the K of [.., K] and [.., K, N], of so many."""
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        if swizzle is not None and swizzle != [] and number(only(op, name, swizzle)) != 0:
            fail(UNSUPPORTED, f"{op}: {name} is {swizzle}, want None or NO_SWIZZLE")
    want = (dims[0] - 1, dims[1] - 2)
    if len(contraction_dim) and tuple(d % n for d, n in zip(contraction_dim, dims, strict=False)) != want:
        fail(UNSUPPORTED, f"{op}: contraction_dim is {tuple(contraction_dim)}, want () or {want}")


def _by_rows(scale: torch.Tensor, recipe: int, left: bool, extent: int, k: int, public: bool) -> torch.Tensor | None:
    """A scale by torch's recipe, as that of an operand [extent, k]; None where the shape is another.

    `public`: as torch.nn.functional.scaled_mm has it, of the right operand too, but blocks as [K, extent] and padded to
    multiples of 4 along K. If not, or if there is only one way to read the shape, as torch._scaled_mm has it.
    """
    chunks, blocks = groups(k), groups(extent)
    shape = tuple(scale.shape)
    if recipe == TENSOR:
        return scale.reshape(()) if scale.numel() == 1 else None
    if recipe == ROW:
        return scale.reshape((-1, 1)) if scale.numel() == extent else None
    if recipe == GROUPS and shape == (extent, chunks) and (left or public):
        return scale
    if recipe == GROUPS and shape == (chunks, extent) and not left:
        return scale.t()
    if recipe == BLOCKS and public and shape == ((chunks + 3) // 4 * 4, blocks):
        return scale[:chunks].t()
    if recipe == BLOCKS and shape == ((blocks, chunks) if left else (chunks, blocks)):
        return scale if left else scale.t()
    return None


def scale_of(
    name: str, scale: torch.Tensor, recipe: int, left: bool, operand: torch.Tensor, public: bool = True
) -> torch.Tensor:
    """A scale by torch's recipe, of the shape by which scaled_gemm tells it."""
    extent, k = operand.shape if left else operand.t().shape
    by_rows = _by_rows(scale, recipe, left, extent, k, public)
    if by_rows is None:
        fail(
            UNSUPPORTED,
            f"scaled_mm: {name} is {tuple(scale.shape)} by recipe {recipe}, want TensorWise, RowWise, BlockWise1x128 "
            "or BlockWise128x128 and a scale of its shape",
        )
    if left and recipe == BLOCKS:
        return by_rows.repeat_interleave(GROUP, 0)[:extent]
    return by_rows if left or not by_rows.dim() else by_rows.t()


def chunk_of(a: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], fast: bool) -> int | None:
    """The k_chunk of a [.., K] and scales of pydet's shapes: of `fast` one chain, where no scale varies along K."""
    chunks = groups(a.shape[-1])
    along_k = any(scale.dim() and scale.shape[dim] == chunks for scale, dim in zip(scales, (-1, -2), strict=True))
    return 0 if fast and not along_k else None


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    fast: bool,
    arithmetic: str,
) -> torch.Tensor:
    """Scales of scaled_gemm's shapes; `fast`: one chain over K, where no scale varies along it."""
    k_chunk = chunk_of(a, scales, fast)
    y: torch.Tensor = torch.ops.pydet.scaled_gemm(a, b, *scales, bias, out_dtype or a.dtype, arithmetic, k_chunk)
    return y


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | list[torch.Tensor],
    scale_recipe_a: Any,
    scale_b: torch.Tensor | list[torch.Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    arithmetic: Arithmetic = "auto",
) -> torch.Tensor:
    """``torch.nn.functional.scaled_mm`` on :func:`pydet.scaled_gemm`. It has no gradient, as torch's has none.

    Args:
        mat_a: ``[M, K]``, float8_e4m3fn or float8_e5m2.
        mat_b: ``[K, N]``, either type; on a GPU k is adjacent in both.
        scale_a, scale_b: float32 or float8_e8m0fnu (or a list of one), of any strides and of the shapes that torch
            has for the recipes: one number; ``[M, 1]`` and ``[1, N]``; ``[M, ceil(K/128)]`` and ``[N, ceil(K/128)]``;
            or of blocks ``[L, ceil(M/128)]`` and ``[L, ceil(N/128)]``, L the multiple of 4 from ``ceil(K/128)`` on.
            Where they are not these, ``[ceil(K/128), N]``, ``[ceil(M/128), ceil(K/128)]`` and
            ``[ceil(K/128), ceil(N/128)]`` are taken too, as ``torch._scaled_mm`` has them.
        scale_recipe_a, scale_recipe_b: ``ScalingType.TensorWise``, ``RowWise``, ``BlockWise1x128``,
            ``BlockWise128x128``.
        swizzle_a, swizzle_b: None or ``SwizzleType.NO_SWIZZLE``.
        bias: ``[N]``.
        output_dtype: float32, bfloat16 or float16.
        contraction_dim: ``()``, or the K of ``[M, K]`` and ``[K, N]``.
        use_fast_accum: one chain over K, which is cuBLASLt's sum where it is large; it loses much (NUMERICS.md, "Scaled
            GEMM"). With scales along k it changes nothing. False: chains of 128.
        arithmetic: as in :func:`pydet.scaled_gemm`.

    Raises:
        Error: a recipe, a swizzle or a contraction that pydet does not have; and as :func:`pydet.scaled_gemm`.
    """
    check_plain("scaled_mm", swizzle_a, swizzle_b, contraction_dim, (2, 2))
    if mat_a.dim() != 2 or mat_b.dim() != 2:
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"scaled_mm: mat_a is {tuple(mat_a.shape)} and mat_b {tuple(mat_b.shape)}, want matrices",
        )
    op = "scaled_mm"
    recipes = [number(only(op, "scale_recipe", recipe)) for recipe in (scale_recipe_a, scale_recipe_b)]
    scales = (
        scale_of("scale_a", only(op, "scale_a", scale_a), recipes[0], True, mat_a),
        scale_of("scale_b", only(op, "scale_b", scale_b), recipes[1], False, mat_b),
    )
    return multiply(mat_a, mat_b, scales, bias, output_dtype, use_fast_accum, arithmetic)


# ---- A linear layer --------------------------------------------------------------------------------------------------


def _turned(q: torch.Tensor) -> torch.Tensor:
    """A copy of fp8 bytes [N, K] as [K, N], whose rows a GPU's tensor cores read."""
    q_t = empty_rows(q, (q.shape[1], q.shape[0]), q.dtype)
    q_t.view(torch.uint8).copy_(q.view(torch.uint8).t())
    return q_t


class _Fp8Linear(torch.autograd.Function):
    """y = x w^T + bias; dx = dy w; dw = dy^T x: each a scaled_gemm of what quantize made, groups along what is summed.

    Blocks of w serve the first two. Of x and dy it is the transposed copies that dw takes, by groups of 128 rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        arithmetic: str,
        power_of_two: bool,
        accumulates: bool,
    ) -> torch.Tensor:
        if accumulates:
            check_own("Fp8Linear", weight=w, bias=bias)
        wants_dx, wants_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        rows, made = matrix(x), (None, None, power_of_two)
        x_t = x_t_scale = w_t = None
        if wants_dw:
            q, scale, x_t, x_t_scale = torch.ops.pydet.quantize_transposed(rows, "group", *made)
        else:
            q, scale = torch.ops.pydet.quantize(rows, "group", *made)
        if w_scale is not None:
            w_q = w
            w_t = _turned(w) if wants_dx else None
        elif wants_dx:
            w_q, w_scale, w_t, _ = torch.ops.pydet.quantize_transposed(w, "block", *made)
        else:
            w_q, w_scale = torch.ops.pydet.quantize(w, "block", *made)
        y = torch.ops.pydet.scaled_gemm(q, w_q.t(), scale, w_scale.t(), bias, x.dtype, arithmetic)
        ctx.save_for_backward(x_t, x_t_scale, w_t, w_scale)
        ctx.shape, ctx.dtypes, ctx.options = x.shape, (x.dtype, w.dtype), (arithmetic, power_of_two)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.into = (w, bias) if accumulates else None
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x_t, x_t_scale, w_t, w_scale), (arithmetic, power_of_two) = ctx.saved_tensors, ctx.options
        x_dtype, w_dtype = ctx.dtypes
        rows = matrix(dy.to(x_dtype))
        made = ("group", None, None, power_of_two)
        dx = dw = dbias = q_t = None
        if x_t is not None:
            q, scale, q_t, q_t_scale = torch.ops.pydet.quantize_transposed(rows, *made)
        elif w_t is not None:
            q, scale = torch.ops.pydet.quantize(rows, *made)
        if w_t is not None:
            dx = torch.ops.pydet.scaled_gemm(q, w_t.t(), scale, w_scale, None, x_dtype, arithmetic).view(ctx.shape)
        if q_t is not None:
            operands = (q_t, x_t.t(), q_t_scale, x_t_scale.t())
            if ctx.into is None:
                dw = torch.ops.pydet.scaled_gemm(*operands, None, w_dtype, arithmetic)
            else:
                a, b, a_scale, b_scale = operands
                pydet.scaled_gemm(
                    a,
                    b,
                    a_scale=a_scale,
                    b_scale=b_scale,
                    out=adding(ctx.into[0], None, len(rows), GROUP),
                    accumulate=True,
                    arithmetic=arithmetic,
                )
        if ctx.needs_input_grad[3]:
            products: Any = "ieee" if x_dtype == torch.float32 else arithmetic
            if ctx.into is None:
                dbias = sum_rows(rows, ctx.bias_dtype, products, None)
            else:
                rows = rows if rows.stride(-1) == 1 else rows.contiguous()  # those of a sum's gradient are 0
                total = adding(ctx.into[1], None, len(rows), step_of(rows, products))[None]
                pydet.gemm_db(torch.ones_like(rows[:, :1]), rows, out=total, accumulate=True, arithmetic=products)
        return dx, dw, None, dbias, None, None, None


def fp8_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    w_scale: torch.Tensor | None = None,
    arithmetic: Arithmetic = "auto",
    power_of_two: bool = False,
) -> torch.Tensor:
    """``y[..., n] = round(sum_k x[..., k] w[n, k] + bias[n])`` with both operands quantised to float8_e4m3fn.

    x by groups of 128 along k, w by blocks of 128x128 (:func:`pydet.quantize`). A row of y is a function of its row of
    x, w and bias alone. The gradients are fp8 products too: ``dx`` of dy by groups along n and the same bytes of w,
    ``dw`` of dy and x by groups of 128 rows. So rows in multiples of 128 may be cut into calls.

    Args:
        x: ``[..., K]`` of any rank from 1, float32, bfloat16 or float16; so are y and dx.
        w: ``[N, K]``, of any of the three types; or float8 with ``w_scale``, then without a gradient.
        bias: ``[N]``. Its gradient sums the rows of dy, not quantised, as a chain of products with 1.
        w_scale: ``[ceil(N/128), ceil(K/128)]``: w is what a checkpoint has quantised.
        arithmetic: as in :func:`pydet.scaled_gemm`.
        power_of_two: scales are powers of two.
    """
    return _linear(x, w, w_scale, bias, arithmetic, power_of_two, False)


def _linear(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    arithmetic: str,
    power_of_two: bool,
    accumulates: bool,
) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dim() == 0 or x.shape[-1] != w.shape[1]:
        got, weight = ("x".join(map(str, t.shape)) or "()" for t in (x, w))
        fail(
            constants.PYDET_INVALID_SHAPE,
            f"fp8_linear: the input is {got} and the weight {weight}, want an input whose last dimension is "
            f"{w.shape[1]}",
        )
    if (w_scale is None) != (w.dtype in DTYPES):
        fail(
            INVALID_DTYPE,
            f"fp8_linear: the weight is {w.dtype} {'without' if w_scale is None else 'with'} a scale, want float8 with "
            "one, or float32, bfloat16 or float16 without",
        )
    y: torch.Tensor = _Fp8Linear.apply(x, w, w_scale, bias, arithmetic, power_of_two, accumulates)
    return y


class Fp8Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on :func:`fp8_linear`: the weight stays what an optimizer keeps, and is quantised in a call.

    :meth:`freeze` stores the quantised weight instead, for rollouts: ``weight`` in float8_e4m3fn and
    ``weight_scale_inv`` ``[ceil(N/128), ceil(K/128)]`` in float32, by the names and the meaning of block-scaled
    checkpoints (DeepSeek's, Qwen's). ``load_state_dict`` of such a checkpoint freezes the layer by itself. The bits of
    the result are the same.

    Under ``torch.autocast`` x takes its type.

    Args:
        in_features, out_features, bias, device: as in ``torch.nn.Linear``.
        dtype: of the weight and the bias; ``torch.float8_e4m3fn`` makes a frozen layer to be loaded.
        arithmetic: as in :func:`pydet.scaled_gemm`; it decides bits, forward and backward.
        power_of_two: scales are powers of two.
    """

    accumulates = False  # see accumulate_gradients()
    weight_scale_inv: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        arithmetic: Arithmetic = "auto",
        power_of_two: bool = False,
    ) -> None:
        unknown(arithmetic, "Fp8Linear", "arithmetic")
        frozen = dtype in FP8
        super().__init__(in_features, out_features, bias, "meta" if frozen else device, None if frozen else dtype)
        self.arithmetic, self.power_of_two = arithmetic, power_of_two
        self.register_parameter("weight_scale_inv", None)
        if frozen:
            self._make_room(device, dtype)
            if bias:
                self.bias = torch.nn.Parameter(torch.zeros(out_features, device=device))

    def _make_room(self, device: Any, dtype: torch.dtype) -> None:
        n, k = self.weight.shape
        scale = torch.ones(groups(n), groups(k), device=device)
        q = empty_rows(scale, (n, k), dtype)
        q.view(torch.uint8).zero_()
        self._hold(q, scale)

    def _hold(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.weight = torch.nn.Parameter(q, requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)

    @torch.no_grad()
    def freeze(self, weight: torch.Tensor | None = None) -> Fp8Linear:
        """Keeps the quantised ``weight`` (its own by default; in RL, the trainer's) instead of what it has.

        Further calls write into the same memory, so that captured graphs see them. Returns itself.
        """
        if weight is None and self.weight_scale_inv is not None:
            return self
        master = self.weight if weight is None else weight
        if tuple(master.shape) != tuple(self.weight.shape):
            fail(
                constants.PYDET_INVALID_SHAPE,
                f"freeze: the weight is {tuple(master.shape)}, want {tuple(self.weight.shape)}",
            )
        q, scale = torch.ops.pydet.quantize(master, "block", None, None, self.power_of_two)
        if self.weight_scale_inv is None:
            self._hold(q, scale)
        else:
            self.weight.view(torch.uint8).copy_(q.view(torch.uint8))
            self.weight_scale_inv.copy_(scale)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and (weight.dtype in FP8) != (self.weight_scale_inv is not None):
            if weight.dtype not in FP8:
                fail(
                    INVALID_VALUE,
                    f"Fp8Linear: {prefix}weight is {weight.dtype}, and the layer is frozen; want float8 and a "
                    "weight_scale_inv, or freeze(weight)",
                )
            self._make_room(self.weight.device, weight.dtype)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        accumulates = bool(self.accumulates) and torch.is_grad_enabled()
        return _linear(
            x, self.weight, self.weight_scale_inv, self.bias, self.arithmetic, self.power_of_two, accumulates
        )

    def extra_repr(self) -> str:
        frozen = ", frozen" if self.weight_scale_inv is not None else ""
        return f"{super().extra_repr()}, arithmetic={self.arithmetic}{frozen}"
