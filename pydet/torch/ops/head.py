"""``linear_log_prob``: a linear layer and what is asked of each row of its logits, in chunks of rows; and its gradient.

Both are the library's. No chunk changes a bit, since rows are independent and sums over rows are continued at multiples
of 16 of them (NUMERICS.md, "Head").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pydet import _native
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail, ffi
from pydet.frameworks import type_index
from pydet.hooks import unknown
from pydet.ops.head import _linear_log_prob, _linear_log_prob_backward
from pydet.ops.products import _gemm_db
from pydet.shapes import text
from pydet.torch.ops.products import matrix
from pydet.torch.ops.register import DTYPES, Call, Dtype, Tensor, define
from pydet.torch.ops.tracing import TRACED, operands

OP = "linear_log_prob"
WORKSPACE = 256 << 20  # bytes
_C_DTYPES = {
    torch.float32: (constants.PYDET_FLOAT, 32, 1),
    torch.bfloat16: (constants.PYDET_BFLOAT, 16, 1),
    torch.float16: (constants.PYDET_FLOAT, 16, 1),
}


class Head(NamedTuple):
    """How logits are made and read, as the operators take it."""

    logits_dtype: Dtype
    temperature: float
    softcap: float | None
    arithmetic: str
    k_chunk: int | None
    workspace: int

    @property
    def products(self) -> dict[str, Any]:
        return {"arithmetic": self.arithmetic, "k_chunk": self.k_chunk}

    def library_options(self, w: Tensor, dw: Tensor | None) -> dict[str, Any]:
        logits = None if self.logits_dtype is None else type_index(self.logits_dtype, OP)
        read = {"softcap": self.softcap or 0.0, "temperature": self.temperature}
        return {**self.products, **read, "logits_dtype": logits, "workspace": self.workspace + _instead_of_sums(w, dw)}

    def check(self) -> None:
        """Refuses what is no setting."""
        if self.logits_dtype is not None and self.logits_dtype not in DTYPES:
            got = str(self.logits_dtype).removeprefix("torch.")
            fail(INVALID_DTYPE, f"{OP}: logits_dtype is {got}, want float32, bfloat16 or float16")
        for name, value in (("temperature", self.temperature), ("softcap", self.softcap)):
            if value is not None and not _is_positive(value):
                fail(INVALID_VALUE, f"{OP}: {name} is {value}, want a positive number that float32 holds")
        if self.workspace <= 0:
            fail(INVALID_VALUE, f"{OP}: workspace is {self.workspace}, want a positive number of bytes")


def _is_positive(value: float) -> bool:
    as_fp32 = torch.tensor(float(value), dtype=torch.float32, device="cpu").item() if math.isfinite(value) else 0.0
    return math.isfinite(as_fp32) and as_fp32 > 0


class Asked(NamedTuple):
    """What is asked of rows beside the log-probability; as gradients, which of them have one."""

    entropy: Any
    lse: Any
    mean: Any


# ---- Sums over rows --------------------------------------------------------------------------------------------------


def rounded(sums: Tensor, dtype: torch.dtype, head: Head) -> Tensor:
    """Sums over rows that are done, in the type of their parameter: products over no more rows, some at a time."""
    if dtype == sums.dtype:
        return sums
    out = sums.new_empty(sums.shape, dtype=dtype)
    none, most = sums.new_empty((0, 1), dtype=dtype), max(head.workspace // (4 * sums.shape[1]), 1)
    for start in range(0, sums.shape[0], most):
        part = sums[start : start + most]
        left, right = none.expand(0, part.shape[0]), none.expand(0, part.shape[1])
        _gemm_db(left, right, initial=part, out=out[start : start + most], **head.products)
    return out


def _instead_of_sums(w: Tensor, dw: Tensor | None) -> int:
    """The bytes of float32 sums of w, where its gradient is made in another type without them: logits have them."""
    return 0 if dw is None or dw.dtype == torch.float32 else 4 * w.numel()


def room_for_sums(x: Tensor, w: Tensor, head: Head, of_w: bool = True) -> Callable[[Tensor], Tensor]:
    """What makes room for the sums over rows of a parameter, which the library writes: of the parameter's type where
    all rows go at once, else in float32."""
    room = head.workspace
    if of_w and _library_bytes(x, w, head, 1) <= room:  # or it is refused
        room += _instead_of_sums(w, w)
    whole = 0 < _library_bytes(x, w, head) <= room
    return lambda parameter: parameter.new_empty(parameter.shape, dtype=parameter.dtype if whole else torch.float32)


# ---- Forward and backward --------------------------------------------------------------------------------------------


def _run_forward(
    x: Tensor,
    w: Tensor,
    index: Tensor,
    bias: Tensor | None,
    logits_dtype: Dtype,
    temperature: float,
    softcap: float | None,
    entropy: bool,
    lse: bool,
    mean: bool,
    greedy: bool,
    arithmetic: str,
    k_chunk: int | None,
    workspace: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> log_prob, entropy, lse, mean, greedy; what is not asked for has no elements."""
    head = Head(logits_dtype, temperature, softcap, arithmetic, k_chunk, workspace)
    _check(x, w, index, bias, head)
    rows, wanted = _matrix(x), index.reshape(-1).contiguous()
    asked = {"out": True, "entropy": entropy, "lse": lse, "mean": mean, "greedy": greedy}
    kinds = dict.fromkeys(asked, torch.float32) | {"greedy": torch.int64}
    made = {name: x.new_empty(index.numel() if asked[name] else 0, dtype=kind) for name, kind in kinds.items()}
    given = {name: y for name, y in made.items() if asked[name]}
    _linear_log_prob(rows, w, wanted, bias=bias, **given, **head.library_options(w, None))
    log_prob, *others = (y.view(index.shape) if asked[name] else y for name, y in made.items())
    return log_prob, others[0], others[1], others[2], others[3]


def _of_rows(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.reshape(-1).to(torch.float32).contiguous()


def gradients(
    dlog_prob: Tensor,
    others: Asked,
    x: Tensor,
    w: Tensor,
    index: Tensor,
    bias: Tensor | None,
    head: Head,
    of_x: bool,
    dw: Tensor | None,
    dbias: Tensor | None,
    dx_dtype: Dtype = None,
    continues: bool = True,
    log_prob: Tensor | None = None,
) -> Tensor | None:
    """-> dx, of the type of x or another. Continues the sums in dw ``[N, K]`` and dbias ``[N]``, float32, if given; or
    writes them, in any type, where all rows are one chunk. log_prob, if given, is written too."""
    rows, wanted = _matrix(x), index.reshape(-1).contiguous()
    dx = rows.new_empty(rows.shape, dtype=dx_dtype or x.dtype) if of_x else None
    sums = dw if dw is None or dw.shape[1] < 2 or dw.stride(1) == 1 else dw.contiguous()
    _linear_log_prob_backward(
        _of_rows(dlog_prob),
        rows,
        w,
        wanted,
        bias=bias,
        dentropy=_of_rows(others.entropy),
        dlse=_of_rows(others.lse),
        dmean=_of_rows(others.mean),
        dx=dx,
        dw=sums,
        dbias=dbias,
        log_prob=log_prob,
        accumulate=continues and (dw is not None or dbias is not None),
        **head.library_options(w, dw),
    )
    if dw is not None and sums is not None and sums is not dw:
        dw.copy_(sums)
    return None if dx is None else dx.view(x.shape)


def loss_and_gradients(
    x: Tensor,
    w: Tensor,
    index: Tensor,
    bias: Tensor | None,
    head: Head,
    loss_of: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    asks: tuple[bool, bool],
    gradient: Tensor,
    dw: Tensor,
    dbias: Tensor | None,
    continues: bool = True,
) -> tuple[Tensor, Tensor]:
    """-> the loss of each row and dx, where `gradient` is that of each row's loss. The logits are made once, or twice
    where the loss asks for more than the log-probability.

    loss_of(log_prob, lse, mean), of which it `asks` for lse and mean, is differentiated by PyTorch, as it is where
    gradients are made in backward. The sums in dw and dbias, float32, are continued; or they are made, in what
    :func:`room_for_sums` gave.
    """
    _check(x, w, index, bias, head)
    lse, mean = asks
    known = torch.zeros(index.numel(), dtype=torch.float32, device=x.device)
    of_lse, of_mean = (known.clone() if asked else None for asked in asks)
    if lse or mean:
        given = {name: y for name, y in (("lse", of_lse), ("mean", of_mean)) if y is not None}
        wanted, options = index.reshape(-1).contiguous(), head.library_options(w, None)
        _linear_log_prob(_matrix(x), w, wanted, bias=bias, out=known, **given, **options)
    with torch.enable_grad():  # of the log-probability alone it is the same whatever that is
        inputs = [y.requires_grad_() for y in (known, of_lse, of_mean) if y is not None]
        loss = loss_of(known, of_lse, of_mean)
        dlog_prob, *others = torch.autograd.grad(loss, inputs, gradient.expand_as(loss))
    by = Asked(None, others[0] if lse else None, others[-1] if mean else None)
    log_prob = None if lse or mean else torch.empty_like(dlog_prob)
    dx = gradients(dlog_prob, by, x, w, index, bias, head, True, dw, dbias, continues=continues, log_prob=log_prob)
    losses = loss.detach() if log_prob is None else loss_of(log_prob, None, None)
    return losses, dx  # type: ignore[return-value]


# ---- The operators ---------------------------------------------------------------------------------------------------


def _matrix(x: Tensor) -> Tensor:
    rows = matrix(x)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _library_bytes(x: Tensor, w: Tensor, head: Head, most: int = 1 << 62) -> int:
    """Of a workspace for the gradients of all rows at once, or of as many as `most` bytes hold, or must."""
    options, found = ffi.new("pydet_linear_log_prob_options *"), ffi.new("uint64_t *")
    options.struct_size = ffi.sizeof(options[0])
    options.arithmetic, options.k_chunk = unknown(head.arithmetic, OP, "arithmetic"), head.k_chunk or 0
    if head.logits_dtype is not None:
        options.logits = _C_DTYPES[head.logits_dtype]
    index = {"cuda": constants.PYDET_EXCHANGE_CUDA}.get(x.device.type, constants.PYDET_EXCHANGE_CPU)
    library = _native.load(constants.PYDET_EXCHANGE_ROCM if index and torch.version.hip else index)
    dtype, shape = ffi.new("pydet_dtype *", _C_DTYPES[x.dtype])[0], (math.prod(x.shape[:-1]), *w.shape)
    library.check(library.lib.pydet_linear_log_prob_workspace(*shape, dtype, 1, most, options, found))
    return int(found[0])


def _check(x: Tensor, w: Tensor, index: Tensor, bias: Tensor | None, head: Head) -> None:
    head.check()
    unknown(head.arithmetic, OP, "arithmetic")
    shape = TRACED.skinny_product(OP, *operands(OP, x=x, w=w, bias=bias, index=index)[:3])
    if bias is not None and bias.dim() != 1:
        fail(constants.PYDET_INVALID_SHAPE, f"{OP}: bias is {text(tuple(bias.shape))}, want {text((w.shape[0],))}")
    if index.dtype not in (torch.int32, torch.int64):
        fail(INVALID_DTYPE, f"{OP}: index is {str(index.dtype).removeprefix('torch.')}, want int32 or int64")
    got, want = tuple(index.shape), tuple(shape[:-1])
    TRACED.require(got == want, lambda: f"{OP}: index is {text(got)}, want {text(want)}")


def _fake_forward(
    x: Tensor, w: Tensor, index: Tensor, bias: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logits_dtype, temperature, softcap, entropy, lse, mean, greedy, arithmetic, k_chunk, workspace = how
    _check(x, w, index, bias, Head(logits_dtype, temperature, softcap, arithmetic, k_chunk, workspace))
    made = [x.new_empty(index.shape if asked else (0,), dtype=torch.float32) for asked in (True, entropy, lse, mean)]
    chosen = x.new_empty(index.shape if greedy else (0,), dtype=torch.int64)
    return made[0], made[1], made[2], made[3], chosen


def _run_backward(
    dlog_prob: Tensor,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    dmean: Tensor | None,
    x: Tensor,
    w: Tensor,
    index: Tensor,
    bias: Tensor | None,
    logits_dtype: Dtype,
    temperature: float,
    softcap: float | None,
    arithmetic: str,
    k_chunk: int | None,
    workspace: int,
    of_x: bool,
    of_w: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    head = Head(logits_dtype, temperature, softcap, arithmetic, k_chunk, workspace)
    _check(x, w, index, bias, head)
    start = room_for_sums(x, w, head, of_w)
    dw = start(w) if of_w else None
    dbias = start(bias) if bias is not None and of_bias else None
    others = Asked(dentropy, dlse, dmean)
    dx = gradients(dlog_prob, others, x, w, index, bias, head, of_x, dw, dbias, continues=False)
    if dw is not None:
        dw = rounded(dw, w.dtype, head)
    if dbias is not None and bias is not None:
        dbias = rounded(dbias[None], bias.dtype, head)[0]
    made = [(dx, x), (dw, w), (dbias, x)]
    first, second, third = (like.new_empty(0) if g is None else g for g, like in made)
    return first, second, third


def _fake_backward(
    dlog_prob: Tensor,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    dmean: Tensor | None,
    x: Tensor,
    w: Tensor,
    index: Tensor,
    bias: Tensor | None,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x, of_w, of_bias = how[-3:]
    _check(x, w, index, bias, Head(*how[:-3]))
    dbias = x.new_empty(0) if bias is None or not of_bias else bias.new_empty(bias.shape)
    return x.new_empty(x.shape if of_x else (0,)), w.new_empty(w.shape if of_w else (0,)), dbias


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, index: Tensor, bias: Tensor | None, *how: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, w, index, bias)
        ctx.how, ctx.asked = (*how[:3], *how[7:]), how[3:6]
        ctx.set_materialize_grads(False)
        results = _below(x, w, index, bias, *how)
        ctx.mark_non_differentiable(results[4])
        return results

    @staticmethod
    def backward(ctx: Any, dlog_prob: Tensor | None, *given: Any) -> tuple[Any, ...]:
        x, w, index, bias = ctx.saved_tensors
        others = [g if asked else None for g, asked in zip(given, ctx.asked, strict=False)]
        if dlog_prob is None:
            dlog_prob = torch.zeros(index.shape, dtype=torch.float32, device=x.device)
        wants = ctx.needs_input_grad
        wants = wants[0], wants[1], wants[3]
        made = torch.ops.pydet.linear_log_prob_backward(dlog_prob, *others, x, w, index, bias, *ctx.how, *wants)
        dx, dw, dbias = (g if wanted else None for g, wanted in zip(made, wants, strict=True))
        return dx, dw, None, dbias, *[None] * 10


def _no_vmap(operator: Any) -> Call:
    def rule(*_: Any) -> Any:
        name = operator.__name__
        fail(UNSUPPORTED, f"{name}: vmap is not defined; put the rows of all into one call")

    return rule


_HOW = "ScalarType? logits_dtype{0}, float temperature{1}, float? softcap{0}"
_MORE = 'str arithmetic="auto", int? k_chunk=None'
_below = define(
    "linear_log_prob(Tensor x, Tensor w, Tensor index, Tensor? bias=None, "
    f"{_HOW.format('=None', '=1.0')}, bool entropy=False, bool lse=False, bool mean=False, bool greedy=False, "
    f"{_MORE}, int workspace={WORKSPACE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_forward,
    _fake_forward,
    gradient=_LinearLogProb.apply,
    vmap=_no_vmap,
    autocast=2,
    composite=True,
)
define(
    "linear_log_prob_backward(Tensor dlog_prob, Tensor? dentropy, Tensor? dlse, Tensor? dmean, Tensor x, Tensor w, "
    f"Tensor index, Tensor? bias, {_HOW.format('', '')}, str arithmetic, int? k_chunk, int workspace, bool of_x, "
    "bool of_w, bool of_bias) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    vmap=_no_vmap,
    composite=True,
)
