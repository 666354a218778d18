"""A step of AdamW as NUMERICS.md ("AdamW") writes it: in place, as pydet.adamw."""

import math

import numpy as np

import reference


def numbers_of(lr, betas, eps, weight_decay, beta_powers):
    """Those in braces: made in double, and rounded once."""
    with np.errstate(all="ignore"):
        beta1, beta2 = betas
        power1, power2 = beta_powers
        return [
            np.float32(x)
            for x in (
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                1 / math.sqrt(1 - power2),
                eps,
                1 - lr * weight_decay,
                lr / (1 - power1),
            )
        ]


def adamw(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    masters=None,
    *,
    lr,
    beta_powers,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=1e-2,
):
    beta1, rest1, beta2, rest2, factor, eps, decay, rate = numbers_of(lr, betas, eps, weight_decay, beta_powers)
    for i, (param, grad, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        master = None if masters is None else masters[i]
        with np.errstate(all="ignore"):
            g, w = reference.widen(grad), reference.widen(param)
            if master is not None:
                w = np.where(reference.widen(reference.round_to(master, param.dtype)) == w, master, w)
            new_m = beta1 * m + rest1 * g
            new_v = beta2 * v + (rest2 * g) * g
            d = np.sqrt(new_v) * factor + eps
            w = w * decay - (rate * new_m) / d
        assert w.dtype == new_m.dtype == new_v.dtype == np.float32
        m[...], v[...] = reference.round_to(new_m, np.float32), reference.round_to(new_v, np.float32)
        if master is not None:
            master[...] = reference.round_to(w, np.float32)
        param[...] = reference.round_to(w, param.dtype)
