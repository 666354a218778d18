"""Recurrences over tokens: the selective scan, the gated delta rule, and the causal convolution before them."""

from __future__ import annotations

from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream, Tensor

_selective_scan, _gated_delta, _causal_conv1d = methods(("selective_scan", "gated_delta", "causal_conv1d"))


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    *,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    final: Tensor | None = None,
    return_final: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence of Mamba and Mamba-2, token by token: ``S = exp(dt a) S + (dt x) b``, ``y = sum of c S, + d x``.

    However tokens are cut into calls that hand on the state, and whatever is beside a sequence in its batch or pack, it
    has the same bits (NUMERICS.md, "Scans").

    Args:
        x: ``[batch, tokens, heads, width]``.
        dt: ``[batch, tokens, heads]``: after its bias and softplus.
        a: ``[heads]``, as of Mamba-2, or ``[heads, states]``, as of Mamba (channels are heads of width 1); float32.
        b, c: ``[batch, tokens, groups, states]``; neighbouring heads share those of a group. Up to 512 states.
        d: ``[heads]``, float32.
        initial: ``[sequences, heads, width, states]``, float32; None for zeros.
        cu_seqlens: ``[sequences + 1]``, int32 or int64, for a batch of 1: where its sequences begin and end.
        out: like ``x``, and of its type; made if None.
        final: like ``initial``: where the last states go, which may be ``initial`` itself.
        return_final: make ``final`` where it is None.
        kernel, stream: as in :func:`gemm`.

    ``x``, ``dt``, ``b`` and ``c`` are float32, bfloat16 or float16, each its own, of any strides.

    Returns:
        ``y``, and the last states, or None.

    Raises:
        Error: shapes, types, devices, boundaries or memory that do not fit.
    """
    method = _selective_scan if stream is None else on_stream(_selective_scan, x, stream)
    return method(  # type: ignore[no-any-return]
        *(x, dt, a, b, c, d),
        initial=initial,
        cu_seqlens=cu_seqlens,
        out=out,
        final=final,
        state=return_final,
        kernel=kernel,
    )


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    final: Tensor | None = None,
    return_final: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, token by token: ``S = exp(g) S``, ``S += k beta (v - sum of k S)``, ``o = sum of q S``.

    The same bits however tokens are cut into calls, as of :func:`selective_scan`.

    Args:
        q, k: ``[batch, tokens, groups, keys]``, normalised and scaled as they are to be; neighbouring heads share those
            of a group. Up to 512 keys.
        v: ``[batch, tokens, heads, width]``.
        g: ``[batch, tokens, heads]``, the logarithm of the decay.
        beta: ``[batch, tokens, heads]``.
        initial: ``[sequences, heads, keys, width]``, float32; None for zeros.
        cu_seqlens, final, return_final, kernel, stream: as in :func:`selective_scan`.
        out: like ``v``, and of its type; made if None.

    Operands are float32, bfloat16 or float16, each its own, of any strides.

    Returns:
        ``o``, and the last states, or None.

    Raises:
        Error: shapes, types, devices, boundaries or memory that do not fit.
    """
    method = _gated_delta if stream is None else on_stream(_gated_delta, q, stream)
    return method(  # type: ignore[no-any-return]
        *(q, k, v, g, beta),
        initial=initial,
        cu_seqlens=cu_seqlens,
        out=out,
        final=final,
        state=return_final,
        kernel=kernel,
    )


def causal_conv1d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> Tensor:
    """Each channel's own causal convolution: ``y[t] = sum over the taps of w[j] x[t - taps + 1 + j]``, and bias.

    Args:
        x: ``[batch, tokens, channels]``.
        w: ``[channels, taps]``, up to 64 taps.
        bias: ``[channels]``.
        initial: ``[sequences, taps - 1, channels]``, of ``x``'s type: what lies before a sequence; None for zeros.
        cu_seqlens, kernel, stream: as in :func:`selective_scan`.
        out: like ``x``, and of its type; made if None.

    Operands are float32, bfloat16 or float16, of any strides.

    Returns:
        ``out``, or the new tensor.

    Raises:
        Error: shapes, types, devices, boundaries or memory that do not fit.
    """
    method = _causal_conv1d if stream is None else on_stream(_causal_conv1d, x, stream)
    return method(  # type: ignore[no-any-return]
        x, w, bias, initial=initial, cu_seqlens=cu_seqlens, out=out, kernel=kernel
    )
