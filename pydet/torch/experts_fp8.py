"""Layers of experts in fp8: the products of groups of tokens by :func:`pydet.scaled_grouped_gemm`.

A token's row is quantised by groups of 128 along its features, an expert's matrix by blocks of 128x128. So nothing
about the routing or the other tokens reaches a token's result.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

import pydet
from pydet._native import INVALID_VALUE, constants, fail
from pydet.ops import Arithmetic
from pydet.torch.accumulate import adding, check_own
from pydet.torch.ops import DTYPES
from pydet.torch.ops.scaled import FP8, GROUP, SCALES, empty_rows, groups

Tensor: TypeAlias = torch.Tensor


def _turned(w: Tensor) -> Tensor:
    """A copy of fp8 bytes [G, N, K] as [G, K, N], whose rows a GPU's tensor cores read."""
    w_t = empty_rows(w, (w.shape[0], w.shape[2], w.shape[1]), w.dtype)
    w_t.view(torch.uint8).copy_(w.view(torch.uint8).mT)
    return w_t


class _Products(torch.autograd.Function):
    """y = x w[g]^T + bias[g] of the rows of each group g, and dx = dy w[g], in fp8. dw[g] = dy^T x over the rows of g
    is a product in the rows' own type: what is summed there are tokens, and the scales are those of a token."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        w_scale: Tensor | None,
        bias: Tensor | None,
        ends: Tensor,
        transposed: bool,
        arithmetic: str,
        power_of_two: bool,
        accumulates: bool,
    ) -> Tensor:
        if accumulates:
            check_own("Fp8Experts", matrices=w, bias=bias)
        made = (None, None, power_of_two)
        q, scale = torch.ops.pydet.quantize(x, "group", *made)
        w_t, matrices = None, w.mT if transposed else w
        if w_scale is not None:
            w_q, w_scale = matrices, w_scale.mT if transposed else w_scale
            if ctx.needs_input_grad[0]:
                w_t = _turned(w_q)
        elif ctx.needs_input_grad[0]:
            w_q, w_scale, w_t, _ = torch.ops.pydet.quantize_transposed(matrices, "block", *made)
        else:
            w_q, w_scale = torch.ops.pydet.quantize(matrices, "block", *made)
        operands = (q, w_q.mT, ends, scale, w_scale.mT)
        y: Tensor = torch.ops.pydet.scaled_grouped_gemm(*operands, bias, x.dtype, arithmetic)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w_t, w_scale, ends)
        ctx.how, ctx.of_w, ctx.into = (arithmetic, power_of_two), (transposed, w.dtype), accumulates
        ctx.w, ctx.bias = w, bias
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, w_t, w_scale, ends), (arithmetic, power_of_two) = ctx.saved_tensors, ctx.how
        (transposed, w_dtype), bias = ctx.of_w, ctx.bias
        dx = dw = dbias = None
        dy = dy.contiguous()
        if w_t is not None:
            q, scale = torch.ops.pydet.quantize(dy, "group", None, None, power_of_two)
            dx = torch.ops.pydet.scaled_grouped_gemm(q, w_t.mT, ends, scale, w_scale, None, dy.dtype, arithmetic)
        plain: Any = "ieee" if dy.dtype == torch.float32 else arithmetic
        into = {"accumulate": True, "arithmetic": plain}
        if x is not None:
            left, right = (x, dy) if transposed else (dy, x)
            if ctx.into:
                pydet.grouped_gemm(left.t(), right, ends, out=adding(ctx.w), **into)
            else:
                dw = torch.ops.pydet.grouped_gemm(left.t(), right, ends, None, w_dtype, plain)
        if ctx.needs_input_grad[3]:
            ones = dy.new_ones((1, dy.shape[0]))
            if ctx.into:
                pydet.grouped_gemm(ones, dy, ends, out=adding(bias)[:, None], **into)
            else:
                dbias = torch.ops.pydet.grouped_gemm(ones, dy, ends, None, bias.dtype, plain)[:, 0]
        return dx, dw, None, dbias, None, None, None, None, None


class Fp8Experts(torch.nn.Module):
    """What a layer of experts is beside its own class: its matrices are quantised in each call, or kept so.

    :meth:`freeze` keeps them, for rollouts: ``down_proj`` and ``gate_up_proj`` (or ``up_proj``) in float8_e4m3fn, and
    beside each a ``..._scale_inv`` in float32 with a number for each block of 128x128, as block-scaled checkpoints have
    them. The bits of the result are the same. ``load_state_dict`` of such a checkpoint freezes the layer by itself.
    """

    arithmetic: Arithmetic
    power_of_two: bool
    accumulates = False  # see accumulate_gradients()

    def product(self, rows: Tensor, name: str, ends: Tensor) -> Tensor:
        """The rows of each group by its expert's matrix of that name."""
        module: Any = self
        w, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        elif scale is None:
            rows = rows.to(w.dtype)
        how = (module.is_transposed, self.arithmetic, self.power_of_two)
        accumulates = bool(self.accumulates) and torch.is_grad_enabled()
        y: Tensor = _Products.apply(rows.contiguous(), w, scale, bias, ends, *how, accumulates)
        return y

    @torch.no_grad()
    def freeze(self, **weights: Tensor) -> Fp8Experts:
        """Keeps the quantised matrices (its own by default; in RL, the trainer's, by name) instead of what it has.

        Further calls write into the same memory, so that captured graphs see them. Returns itself.
        """
        module: Any = self
        names = matrices_of(module)
        if unknown := sorted(set(weights) - set(names)):
            fail(INVALID_VALUE, f"freeze: {unknown[0]} is no matrix of these experts, want {' or '.join(names)}")
        for name in names:
            w, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
            if name not in weights and scale is not None:
                continue
            master = weights.get(name, w)
            if tuple(master.shape) != tuple(w.shape):
                want = f"want {tuple(w.shape)}"
                fail(constants.PYDET_INVALID_SHAPE, f"freeze: {name} is {tuple(master.shape)}, {want}")
            matrices = master.mT if module.is_transposed else master
            q, new = torch.ops.pydet.quantize(matrices, "block", None, None, self.power_of_two)
            q, new = (q.mT, new.mT) if module.is_transposed else (q, new)
            if scale is None:
                self._hold(name, q, new)
            else:
                w.view(torch.uint8).copy_(q.view(torch.uint8))
                scale.copy_(new)
        return self

    def _hold(self, name: str, q: Tensor, scale: Tensor) -> None:
        setattr(self, name, torch.nn.Parameter(q, requires_grad=False))
        setattr(self, f"{name}_scale_inv", torch.nn.Parameter(scale, requires_grad=False))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        module: Any = self
        for name in matrices_of(module):
            loaded, w = state_dict.get(prefix + name), getattr(module, name)
            frozen = getattr(module, f"{name}_scale_inv") is not None
            if loaded is None or (loaded.dtype in FP8) == frozen:
                continue
            if frozen:
                want = f"want float8 and a {name}_scale_inv, or freeze({name}=...)"
                fail(INVALID_VALUE, f"Fp8Experts: {prefix}{name} is {loaded.dtype}, and the layer is frozen; {want}")
            g, n, k = w.mT.shape if module.is_transposed else w.shape
            q, scale = empty_rows(w, (g, n, k), loaded.dtype), torch.ones(g, groups(n), groups(k), device=w.device)
            self._hold(name, *((q.mT, scale.mT) if module.is_transposed else (q, scale)))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __reduce__(self) -> Any:
        return _new_experts, (type(self).__mro__[2],), self.__dict__


def matrices_of(module: Any) -> tuple[str, str]:
    """The names of a layer's matrices."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


_classes: dict[type, Any] = {}


def experts_class(kind: type) -> Any:
    """Experts in fp8 of the class `kind`, and still an instance of it."""
    if kind not in _classes:
        _classes[kind] = type(f"{kind.__name__}InFp8", (Fp8Experts, kind), {"__module__": __name__})
    return _classes[kind]


def _new_experts(kind: type) -> Any:
    made = experts_class(kind)
    return made.__new__(made)


def becomes(module: Any, arithmetic: Arithmetic) -> tuple[type, dict[str, Any]] | str:
    """The class and the attributes of what a layer of experts becomes; or why it stays."""
    own = dict(module.named_parameters(recurse=False))
    scales = {f"{name}_scale_inv": own.get(f"{name}_scale_inv") for name in matrices_of(module)}
    for name in matrices_of(module):
        w, scale = own.get(name), scales[f"{name}_scale_inv"]
        if w is None:
            return f"it has no parameter {name}"
        if (scale is None) != (w.dtype in DTYPES) or w.dtype not in (*DTYPES, *FP8):
            return f"its {name} is {w.dtype} {'without' if scale is None else 'with'} a {name}_scale_inv"
        want = (w.shape[0], groups(w.shape[1]), groups(w.shape[2]))
        if scale is not None and (tuple(scale.shape) != want or scale.dtype not in SCALES):
            return f"its {name}_scale_inv is {scale.dtype} {tuple(scale.shape)}, want {want}: blocks of {GROUP}"
        if scale is not None and f"{name}_activation_scale" in own:
            return f"its {name} comes with a scale of all activations, and tokens have scales of their own here"
    power_of_two = any(scale is not None and scale.dtype != torch.float32 for scale in scales.values())
    how = {"arithmetic": arithmetic, "k_chunk": None, "power_of_two": power_of_two}
    return experts_class(type(module)), {**how, **scales}
