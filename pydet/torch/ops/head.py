"""``linear_log_prob``: a linear layer and what is asked of each row of its logits, in chunks of rows; and its gradient.

Log-probabilities alone, of logits that are neither scaled nor capped, are the library's `linear_log_prob`. All else is
a composition of its functions over a workspace: no chunk changes a bit, since rows are independent and sums over rows
are continued at multiples of 16 of them (NUMERICS.md, "Head"). What is done to single elements between them are
PyTorch's additions, products and divisions, each rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from pydet import _native
from pydet._native import INVALID_DTYPE, INVALID_VALUE, UNSUPPORTED, constants, fail, ffi
from pydet.frameworks import type_index
from pydet.hooks import unknown
from pydet.ops.activation import _activation, _activation_backward
from pydet.ops.head import _linear_log_prob, _linear_log_prob_backward
from pydet.ops.products import _gemm, _gemm_db, _skinny_gemm
from pydet.ops.softmax import (
    _log_prob,
    _log_prob_backward,
    _log_softmax,
    _log_softmax_backward,
    _softmax,
    _softmax_backward,
)
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
ROWS = 16  # a multiple of every arithmetic's step, where a sum over rows may be cut


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

    @property
    def scales(self) -> bool:
        return self.softcap is not None or self.temperature != 1

    def is_plain(self, x: Tensor) -> bool:
        """Whether its log-probabilities and their gradients are the library's own operation."""
        return not self.scales and self.logits_dtype in (None, x.dtype, torch.float32)

    def library_options(self, w: Tensor, dw: Tensor | None) -> dict[str, Any]:
        logits = None if self.logits_dtype is None else type_index(self.logits_dtype, OP)
        return {**self.products, "logits_dtype": logits, "workspace": self.workspace + _instead_of_sums(w, dw)}

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

    @property
    def spreads(self) -> bool:
        """Whether probabilities of all columns are written."""
        return any(x is not None and x is not False for x in (self.entropy, self.mean))


# ---- Chunks ----------------------------------------------------------------------------------------------------------


def _chunks(rows: int, row_bytes: int, unit: int, head: Head) -> Iterator[slice]:
    """Of as many rows as the workspace holds, a multiple of `unit` but for the last."""
    most = head.workspace // max(row_bytes, 1)
    if most < rows:
        if most < unit:
            some = "a row" if unit == 1 else f"{unit} rows, where a sum over rows may be cut"
            need = min(unit, rows) * row_bytes
            fail(
                constants.PYDET_WORKSPACE_TOO_SMALL,
                f"{OP}: workspace is {head.workspace} bytes, want at least {need} for {some}",
            )
        most -= most % unit
    for start in range(0, rows, max(most, 1)):
        yield slice(start, min(start + most, rows))


class _Room:
    """The workspace: one tensor for each purpose, as large as the first chunk, of which the others take their part."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._made = like, dict[str, Tensor]()

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if name not in self._made:
            self._made[name] = self._like.new_empty((rows, columns), dtype=dtype)
        return self._made[name][:rows]


def _number(x: Tensor, value: float) -> Tensor:
    """In memory of x's device: by a number of Python a GPU divides as a product with its inverse."""
    return torch.full((), value, dtype=torch.float32, device=x.device)


class _Rows(NamedTuple):
    """The logits of a chunk, and what they are read as: in fp32 divided and capped, or as they are."""

    logits: Tensor
    read: Tensor
    over_cap: Tensor | None


def _logits(x: Tensor, w: Tensor, bias: Tensor | None, head: Head, room: _Room) -> _Rows:
    rows, n = x.shape[0], w.shape[0]
    dtype = head.logits_dtype or x.dtype
    logits = _skinny_gemm(x, w, bias=bias, out=room.take("logits", rows, n, dtype), **head.products)
    if not head.scales:
        return _Rows(logits, logits, None)
    read, over_cap = room.take("read", rows, n, torch.float32).copy_(logits), None
    if head.softcap is not None:
        cap = _number(x, head.softcap)
        over_cap = room.take("over_cap", rows, n, torch.float32)
        torch.div(read, cap, out=over_cap)
        _activation(over_cap, out=read, kind="tanh")
        read.mul_(cap)
    if head.temperature != 1:
        read.div_(_number(x, head.temperature))
    return _Rows(logits, read, over_cap)


def _row_bytes(n: int, x: Tensor, head: Head) -> int:
    """Of the logits and of what they are read as."""
    dtype = head.logits_dtype or x.dtype
    return n * (dtype.itemsize + (4 if head.scales else 0) + (4 if head.softcap is not None else 0))


# ---- What rows are asked ---------------------------------------------------------------------------------------------


class _Spread(NamedTuple):
    """The probabilities of a chunk and their logarithms, which are 0 where they are -Inf."""

    probs: Tensor
    logs: Tensor
    wide: tuple[Tensor, Tensor]  # the same with a column more, of 1 and of 0


def _spread(read: Tensor, room: _Room) -> _Spread:
    rows, n = read.shape
    probs, logs = (room.take(name, rows, n + 1, torch.float32) for name in ("probs", "logs"))
    if read.dtype != torch.float32:
        read = room.take("fp32", rows, n, torch.float32).copy_(read)
    _softmax(read, out=probs[:, :n])
    _log_softmax(read, out=logs[:, :n])
    logs[:, :n].masked_fill_(logs[:, :n] == -math.inf, 0.0)
    probs[:, n], logs[:, n] = 1.0, 0.0
    return _Spread(probs[:, :n], logs[:, :n], (probs, logs))


def _entropy(spread: _Spread, room: _Room) -> Tensor:
    """-rowsum(p, log p): the gradient of softmax at the column more, whose p is 1 and whose gradient is 0."""
    probs, logs = spread.wide
    sums = room.take("sums", probs.shape[0], probs.shape[1], torch.float32)
    return _softmax_backward(logs, probs, out=sums)[:, -1]


def _mean(read: Tensor, room: _Room) -> Tensor:
    """rowsum(v, 1) / N: the gradient of log_softmax at a column more, whose logarithm and gradient are 0."""
    rows, n = read.shape
    wide, zeros, sums = (room.take(name, rows, n + 1, torch.float32) for name in ("logs", "probs", "sums"))
    wide[:, :n].copy_(read)
    wide[:, n] = 0.0
    zeros.zero_()
    less = _log_softmax_backward(wide, zeros, out=sums)[:, -1]
    return torch.div(0.0 - less, _number(read, float(n)))


def _greedy(read: Tensor) -> tuple[Tensor, Tensor]:
    """(the largest number of each row, the first column that has it; where one is NaN, the first NaN)."""
    most = read.amax(-1)
    is_most = (read == most[:, None]) | read.isnan()
    return most, is_most.to(torch.int8).argmax(-1)


def _lse(read: Tensor) -> Tensor:
    """m + log s: the log-probability of the largest logit is -log s."""
    most, where = _greedy(read)
    return (most.float() + 0.0) - _log_prob(read, where)


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
    asked = Asked(entropy, lse, mean)
    _check(x, w, index, bias, head)
    lead, rows, n = index.shape, _matrix(x), w.shape[0]
    wanted = index.reshape(-1).contiguous()
    count = rows.shape[0]
    log_prob = x.new_empty(count, dtype=torch.float32)
    if head.is_plain(x) and n and not greedy and not any(asked):
        _linear_log_prob(rows, w, wanted, bias=bias, out=log_prob, **head.library_options(w, None))
        none = x.new_empty(0, dtype=torch.float32)
        return log_prob.view(lead), none, none.clone(), none.clone(), x.new_empty(0, dtype=torch.int64)
    others = [x.new_empty(count if wants else 0, dtype=torch.float32) for wants in asked]
    chosen = x.new_empty(count if greedy else 0, dtype=torch.int64)
    row_bytes = _row_bytes(n, x, head) + (17 * (n + 1) if asked.spreads else 0) + (n * 10 if lse or greedy else 0)
    room = _Room(x)
    for part in _chunks(count, row_bytes, 1, head):
        read = _logits(rows[part], w, bias, head, room).read
        _log_prob(read, wanted[part], out=log_prob[part])
        if entropy:
            others[0][part] = _entropy(_spread(read, room), room)
        if lse:
            others[1][part] = _lse(read)
        if mean:
            others[2][part] = _mean(read, room)
        if greedy:
            chosen[part] = _greedy(read)[1]
    shaped = [y.view(lead) if wants else y for y, wants in zip((*others, chosen), (*asked, greedy), strict=True)]
    return log_prob.view(lead), shaped[0], shaped[1], shaped[2], shaped[3]


def _add(d: Tensor, more: Tensor, weight: Tensor) -> None:
    """Adds to each row of d as many times a row of `more`; where that is 0, nothing, whatever the row holds."""
    d += more.mul_(weight[:, None]).masked_fill_((weight == 0)[:, None], 0.0)


def _gradient_of_rows(
    dlog_prob: Tensor, others: Asked, index: Tensor, rows: _Rows, x: Tensor, head: Head, room: _Room
) -> Tensor:
    """The gradient of a chunk's logits, in the type of x."""
    count, n = rows.read.shape
    asks_more = any(g is not None for g in others)
    read = rows.read
    if asks_more and read.dtype != torch.float32:
        read = room.take("fp32", count, n, torch.float32).copy_(read)
    d = _log_prob_backward(dlog_prob, read, index, out=room.take("d", count, n, read.dtype))
    if asks_more:
        spread = _spread(read, room)
        more = room.take("more", count, n, torch.float32)
        if others.entropy is not None:
            torch.add(spread.logs, _entropy(spread, room)[:, None], out=more)
            _add(d, more.mul_(spread.probs), -others.entropy)
        if others.lse is not None:
            _add(d, more.copy_(spread.probs), others.lse)
        if others.mean is not None:
            d += torch.div(others.mean, _number(x, float(n)))[:, None]
    if head.temperature != 1:
        d.div_(_number(x, head.temperature))
    if rows.over_cap is not None:
        d = _activation_backward(d, rows.over_cap, dx=room.take("capped", count, n, torch.float32), kind="tanh")[0]
    for dtype in (rows.logits.dtype, x.dtype):
        if d.dtype != dtype:
            d = room.take(f"d in {dtype}", count, n, dtype).copy_(d)
    return d


def _gradient_bytes(n: int, x: Tensor, head: Head, asks_more: bool) -> int:
    logits = (head.logits_dtype or x.dtype).itemsize
    first = 4 if head.scales or asks_more else logits  # the type in which a row's gradient is made
    size = _row_bytes(n, x, head) + n * first
    size += 4 * n if head.softcap is not None else 0
    size += n * logits if first != logits else 0
    size += n * x.dtype.itemsize if logits != x.dtype.itemsize or (head.logits_dtype or x.dtype) != x.dtype else 0
    return size + (21 * (n + 1) if asks_more else 0)


# ---- Sums over rows --------------------------------------------------------------------------------------------------


def _sum(rows: Tensor, columns: Tensor, into: Tensor, continues: bool, head: Head) -> None:
    """The sums of rows^T columns, from those that are there or from zero."""
    _gemm_db(rows, columns, out=into, accumulate=continues, **head.products)


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


def room_for_sums(x: Tensor, w: Tensor, head: Head, asks_more: bool, of_w: bool = True) -> Callable[[Tensor], Tensor]:
    """What makes room for the sums over rows of a parameter: zeros in float32 to continue from; or, where the library
    writes them, what it does not read, of the parameter's type where all rows go at once."""
    if asks_more or not head.is_plain(x) or not w.shape[0]:
        return lambda parameter: torch.zeros_like(parameter, dtype=torch.float32)
    room = head.workspace
    if of_w and _library_bytes(x, w, head, 1) <= room:  # or it is refused
        room += _instead_of_sums(w, w)
    whole = 0 < _library_bytes(x, w, head) <= room
    return lambda parameter: parameter.new_empty(parameter.shape, dtype=parameter.dtype if whole else torch.float32)


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
) -> Tensor | None:
    """-> dx, of the type of x or another. Continues the sums in dw ``[N, K]`` and dbias ``[N]``, float32, if given; or
    writes them, in any type, where all rows are one chunk."""
    rows, n = _matrix(x), w.shape[0]
    wanted, given = index.reshape(-1).contiguous(), dlog_prob.reshape(-1).to(torch.float32).contiguous()
    more = Asked(*(None if g is None else g.reshape(-1).to(torch.float32) for g in others))
    sums_rows = dw is not None or dbias is not None
    unit = (head.k_chunk or ROWS) if sums_rows else 1
    dx = rows.new_empty(rows.shape, dtype=dx_dtype or x.dtype) if of_x else None
    lies_in_rows = dw is None or dw.shape[1] < 2 or dw.stride(1) == 1
    if head.is_plain(x) and n and lies_in_rows and not any(g is not None for g in more):
        sums = {"dw": dw, "dbias": dbias, "accumulate": continues and sums_rows}
        options = head.library_options(w, dw)
        _linear_log_prob_backward(given, rows, w, wanted, bias=bias, dx=dx, **sums, **options)
        return None if dx is None else dx.view(x.shape)
    size = _gradient_bytes(n, x, head, any(g is not None for g in more))
    room = _Room(x)
    for part in _chunks(rows.shape[0], size, unit, head):
        some = Asked(*(None if g is None else g[part] for g in more))
        logits = _logits(rows[part], w, bias, head, room)
        d = _gradient_of_rows(given[part], some, wanted[part], logits, x, head, room)
        if dx is not None:
            _gemm(d, w, out=dx[part], **head.products)
        if dw is not None:
            _sum(d, rows[part], dw, continues, head)
        if dbias is not None:
            _sum(d.new_ones((d.shape[0], 1)), d, dbias[None], continues, head)
    return None if dx is None else dx.view(x.shape)


def loss_and_gradients(
    x: Tensor,
    w: Tensor,
    index: Tensor,
    bias: Tensor | None,
    head: Head,
    loss_of: Callable[[Tensor, Tensor | None, Tensor | None, slice], Tensor],
    asks: tuple[bool, bool],
    gradient: Tensor,
    dw: Tensor,
    dbias: Tensor | None,
    continues: bool = True,
) -> tuple[Tensor, Tensor]:
    """-> the loss of each row and dx, where `gradient` is that of each row's loss: a chunk's logits are made once.

    loss_of(log_prob, lse, mean, rows), of which it `asks` for lse and mean, is differentiated by PyTorch, as it is
    where gradients are made in backward. The sums in dw and dbias, float32, are continued; or they are made, in what
    :func:`room_for_sums` gave.
    """
    _check(x, w, index, bias, head)
    rows, n, (lse, mean) = _matrix(x), w.shape[0], asks
    wanted = index.reshape(-1).contiguous()
    losses = rows.new_empty(rows.shape[0], dtype=torch.float32)
    dx = rows.new_empty(rows.shape)
    lies_in_rows = dw.shape[1] < 2 or dw.stride(1) == 1
    # A plain head, whose gradient is the same whatever the log-probability.
    if head.is_plain(x) and n and lies_in_rows and not lse and not mean:
        every, log_prob = slice(0, rows.shape[0]), torch.zeros_like(losses)
        with torch.enable_grad():
            any_loss = loss_of(log_prob.requires_grad_(), None, None, every)
            (dlog_prob,) = torch.autograd.grad(any_loss, [log_prob], gradient.expand_as(any_loss))
        log_prob = log_prob.detach()
        made = {"dx": dx, "dw": dw, "dbias": dbias, "log_prob": log_prob, "accumulate": continues}
        _linear_log_prob_backward(dlog_prob, rows, w, wanted, bias=bias, **made, **head.library_options(w, dw))
        return loss_of(log_prob, None, None, every), dx.view(x.shape)
    size = _gradient_bytes(n, x, head, lse or mean) + (n * 10 if lse else 0) + (n + 1) * 13 * mean
    room = _Room(x)
    for part in _chunks(rows.shape[0], size, head.k_chunk or ROWS, head):
        logits = _logits(rows[part], w, bias, head, room)
        log_prob = _log_prob(logits.read, wanted[part]).requires_grad_()
        of_lse = _lse(logits.read).requires_grad_() if lse else None
        of_mean = _mean(logits.read, room).requires_grad_() if mean else None
        with torch.enable_grad():
            loss = loss_of(log_prob, of_lse, of_mean, part)
            beside = [y for y in (of_lse, of_mean) if y is not None]
            dlog_prob, *others = torch.autograd.grad(loss, [log_prob, *beside], gradient.expand_as(loss))
        losses[part] = loss.detach()
        more = Asked(None, others[0] if lse else None, others[-1] if mean else None)
        d = _gradient_of_rows(dlog_prob, more, wanted[part], logits, x, head, room)
        _gemm(d, w, out=dx[part], **head.products)
        _sum(d, rows[part], dw, True, head)
        if dbias is not None:
            _sum(d.new_ones((d.shape[0], 1)), d, dbias[None], True, head)
    return losses, dx.view(x.shape)


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
    others, count = Asked(dentropy, dlse, dmean), index.numel()
    asks_more = any(g is not None for g in others)
    plain = head.is_plain(x) and w.shape[0] > 0 and not asks_more
    cut = not 0 < count * _gradient_bytes(w.shape[0], x, head, asks_more) <= workspace  # or there is nothing to write
    start = room_for_sums(x, w, head, asks_more, of_w) if plain or cut else torch.empty_like
    dw = start(w) if of_w else None
    dbias = start(bias) if bias is not None and of_bias else None
    dx = gradients(dlog_prob, others, x, w, index, bias, head, of_x, dw, dbias, continues=cut and not plain)
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
