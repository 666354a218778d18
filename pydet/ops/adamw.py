"""A step of AdamW for a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream

(_adamw,) = methods(("adamw",))


def adamw(
    params: Sequence[Any],
    grads: Sequence[Any],
    exp_avgs: Sequence[Any],
    exp_avg_sqs: Sequence[Any],
    masters: Sequence[Any] | None = None,
    *,
    lr: float,
    beta_powers: tuple[float, float],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> None:
    """One step of AdamW, in place: ``params``, ``exp_avgs``, ``exp_avg_sqs`` and ``masters`` are written.

    Each element is computed by itself, in fp32, each operation rounded (NUMERICS.md, "AdamW"): so its bits do not
    depend on the device, on how tensors are listed, or on how they are shared out among GPUs.

        >>> import numpy, pydet
        >>> w, g = numpy.ones(3, numpy.float32), numpy.float32([1, -1, 0])
        >>> m, v = numpy.zeros_like(w), numpy.zeros_like(w)
        >>> powers = (1.0, 1.0)
        >>> for step in range(3):
        ...     powers = (powers[0] * 0.9, powers[1] * 0.999)
        ...     pydet.adamw([w], [g], [m], [v], lr=0.5, beta_powers=powers, weight_decay=0)
        >>> print(w.round(3))
        [-0.5  2.5  1. ]

    Args:
        params: 1 to ``ADAMW_TENSORS`` tensors, each of any of the three types and of any shape.
        grads: their gradients, each of any of the three types.
        exp_avgs, exp_avg_sqs: float32, zeros before the first step.
        masters: None, or a float32 tensor or None for each parameter that is not float32. The parameter is then the
            rounding of its master; an element of it that is not, as of weights that were loaded, the master takes over.
            Tensors of one place in the lists have one shape and the same strides, with no gap between their elements.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        beta_powers: the betas to the power of the step's number, 1, 2, ...: the product of so many factors.
        kernel, stream: as in :func:`gemm`. A step that a CUDA graph captures has the same numbers at each replay.

    Raises:
        Error: shapes, types, strides, devices or memory that do not fit, numbers out of range.
    """
    listed = [x if x is None else tuple(x) for x in (params, grads, exp_avgs, exp_avg_sqs, masters)]
    method = _adamw if stream is None else on_stream(_adamw, (listed[0] or (None,))[0], stream)
    method(
        *listed[:4],
        masters=listed[4],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        beta1_power=beta_powers[0],
        beta2_power=beta_powers[1],
        kernel=kernel,
    )
