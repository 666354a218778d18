"""What is asked of rows of logits, and its gradient, by pydet's functions that are one step each, and single operations
of NumPy between them (NUMERICS.md, "Head")."""

import types
from typing import NamedTuple

import numpy as np

import pydet
import reference
import reference_activation

F32 = np.float32
NAN = np.array(0x7FFFFFFF, np.uint32).view(F32)  # as results have it


STEPS = types.SimpleNamespace(  # the same functions as NUMERICS.md has them, as loops
    activation=reference_activation.activation,
    activation_backward=reference_activation.activation_backward,
    softmax=reference.softmax,
    softmax_backward=reference.softmax_backward,
    log_softmax=reference.log_softmax,
    log_softmax_backward=lambda dy, y: reference.softmax_backward(dy, y, log=True),
    log_prob=reference.log_prob,
    log_prob_backward=reference.log_prob_backward,
    skinny_gemm=reference.skinny_gemm,
    gemm=reference.gemm,
    gemm_db=reference.gemm_db,
)


class Rows(NamedTuple):
    log_prob: np.ndarray
    entropy: np.ndarray
    lse: np.ndarray
    mean: np.ndarray
    greedy: np.ndarray


@np.errstate(all="ignore")
def read(z, softcap, temperature, functions=pydet):
    """(v, z / C): in fp32."""
    v, over_cap = z.astype(F32), None
    if softcap:
        over_cap = v / F32(softcap)
        v = functions.activation(over_cap, kind="tanh") * F32(softcap)
    return (v / F32(temperature) if temperature != 1 else v), over_cap


def canonical(x):
    return np.where(np.isnan(x), NAN, x)


def with_column(x, last):
    return np.concatenate((x, np.full((len(x), 1), last, F32)), 1)


def spread(v, functions=pydet):
    """(p, l): l is 0 where it is -Inf."""
    probabilities, logs = functions.softmax(v), functions.log_softmax(v)
    return probabilities, np.where(logs == -np.inf, F32(0), logs)


def entropy_of(v, functions=pydet):
    """The gradient of softmax at a column more, whose p is 1 and whose gradient is 0."""
    probabilities, logs = spread(v, functions)
    return functions.softmax_backward(with_column(logs, 0), with_column(probabilities, 1))[:, -1]


def asked(z, index, softcap=None, temperature=1.0, functions=pydet):
    v, _ = read(z, softcap, temperature, functions)
    greedy = np.where(np.isnan(v).any(1), np.isnan(v).argmax(1), np.nan_to_num(v, nan=-np.inf).argmax(1))
    most = np.take_along_axis(v, greedy[:, None], 1)[:, 0] + F32(0)
    lse = most - functions.log_prob(v, greedy)
    less = functions.log_softmax_backward(with_column(v, 0), np.zeros((len(v), v.shape[1] + 1), F32))[:, -1]
    mean = (F32(0) - less) / F32(v.shape[1])
    return Rows(functions.log_prob(v, index), *map(canonical, (entropy_of(v, functions), lse, mean)), greedy)


@np.errstate(all="ignore")
def gradient(z, index, by, dtype, softcap=None, temperature=1.0, functions=pydet):
    """d in dtype; by: the gradients by log_prob, entropy, lse and mean, None for none."""
    of_log_prob, of_entropy, of_lse, of_mean = by
    v, over_cap = read(z, softcap, temperature, functions)
    d = functions.log_prob_backward(of_log_prob, v, index)
    probabilities, logs = spread(v, functions)

    def part(more, times):
        return np.where((times == 0)[:, None], F32(0), more * times[:, None])

    if of_entropy is not None:
        d = d + part((logs + entropy_of(v, functions)[:, None]) * probabilities, -of_entropy)
    if of_lse is not None:
        d = d + part(probabilities, of_lse)
    if of_mean is not None:
        d = d + (of_mean / F32(v.shape[1]))[:, None]
    if temperature != 1:
        d = d / F32(temperature)
    if over_cap is not None:
        d = functions.activation_backward(d, over_cap, kind="tanh")
    return d.astype(z.dtype).astype(F32).astype(dtype)


# ---- Losses ---------------------------------------------------------------------------------------------------------


def _given(loss):
    """(1 - E), E and Z in fp32, each None where it is not asked for."""
    smoothing, z = loss.get("label_smoothing", 0.0), loss.get("z_loss", 0.0)
    kept, smoothing = (F32(1.0 - smoothing), F32(smoothing)) if smoothing else (None, None)
    return kept, smoothing, F32(z) if z else None


@np.errstate(all="ignore")
def losses(said, ignored, **loss):
    """Of each row, of what `asked` says."""
    kept, smoothing, z = _given(loss)
    found = -said.log_prob
    if kept is not None:
        found = found * kept + (said.lse - said.mean) * smoothing
    if z is not None:
        found = found + (said.lse * said.lse) * z
    return canonical(np.where(ignored, F32(0), found))


@np.errstate(all="ignore")
def reduced(found, ignored, reduction):
    """One row after the other, in chains of 256."""
    if reduction == "none":
        return found
    total = F32(0)
    for first in range(0, len(found), 256):
        chain = F32(0)
        for one in found[first : first + 256]:
            chain = chain + one
        total = total + chain
    return canonical(total if reduction == "sum" else total / F32((~ignored).sum()))


@np.errstate(all="ignore")
def loss_gradients(given, said, ignored, reduction, **loss):
    """By log_prob, entropy, lse and mean, where `given` is that by the loss."""
    kept, smoothing, z = _given(loss)
    each = np.broadcast_to(F32(given) if reduction != "mean" else F32(given) / F32((~ignored).sum()), ignored.shape)
    each = np.where(ignored, F32(0), each)
    of_lse = of_mean = None
    if z is not None:
        once = each * z * said.lse
        of_lse = np.where(ignored, F32(0), once + once)
    if kept is not None:
        of_lse = each * smoothing if of_lse is None else of_lse + each * smoothing
        of_mean = -(each * smoothing)
        each = each * kept
    return -each, None, of_lse, of_mean


class Losses(NamedTuple):
    loss: np.ndarray
    dx: np.ndarray
    dw: np.ndarray
    dbias: np.ndarray
    lse: np.ndarray


def cross_entropy(
    dloss, x, w, target, bias=None, ignore_index=-100, reduction="mean", lse=None, dtypes=(None, F32, F32),
    dw=None, dbias=None, functions=pydet, **how,
):  # fmt: skip
    """dloss None is 1. lse, dw, dbias: what is known, and what sums over rows continue. dtypes: of dx, dw and dbias."""
    rule = {name: how.pop(name) for name in ("label_smoothing", "z_loss") if name in how}
    logits, read = how.pop("logits_dtype", None), [how.pop("softcap", None), how.pop("temperature", 1.0)]
    ignored = target == ignore_index
    index = np.where(ignored, -1, target)
    z = functions.skinny_gemm(x, w, bias=bias, out_dtype=x.dtype if logits is None else logits, **how)
    found = asked(z, index, *read, functions)
    said = found if lse is None else found._replace(lse=lse)
    loss = reduced(losses(said, ignored, **rule), ignored, reduction)
    by = loss_gradients(F32(1) if dloss is None else dloss, said, ignored, reduction, **rule)
    d = gradient(z, index, by, x.dtype, *read, functions)
    made = [functions.gemm(d, w, out_dtype=np.dtype(dtypes[0] or x.dtype), **how)]
    for left, right, sums, dtype in ((d, x, dw, dtypes[1]), (np.ones((len(x), 1), x.dtype), d, dbias, dtypes[2])):
        out = {} if sums is None else {"out": sums.copy().reshape(left.shape[1], -1), "accumulate": True}
        made.append(functions.gemm_db(left, right, out_dtype=np.dtype(dtype), **how, **out))
    return Losses(np.asarray(loss, F32), *made[:2], made[2].reshape(-1), found.lse)
