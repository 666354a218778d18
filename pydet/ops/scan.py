"""Recurrences over tokens: the selective scan, the gated delta rule, and the causal convolution before them."""

from __future__ import annotations

from pydet.hooks import methods, on_stream
from pydet.ops.types import Stream, Tensor

_selective_scan, _gated_delta, _causal_conv1d = methods(("selective_scan", "gated_delta", "causal_conv1d"))
_selective_scan_backward, _gated_delta_backward, _causal_conv1d_backward = methods(
    ("selective_scan_backward", "gated_delta_backward", "causal_conv1d_backward")
)


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


def selective_scan_backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    *,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dfinal: Tensor | None = None,
    return_initial: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of :func:`selective_scan`, the tokens of each sequence from the last to the first.

    Those of ``a`` and ``d`` are sums of each sequence by itself, which ``fold`` adds in order; see
    :func:`causal_conv1d_backward`. States are computed again, from some that are kept in a workspace.

    Args:
        dy: of ``y``, like ``x`` and of its type.
        x, dt, a, b, c, d, initial, cu_seqlens: as :func:`selective_scan` took them.
        dfinal: of the last states, like ``initial``; None for zeros.
        return_initial: make ``dinitial``.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``dx``, ``ddt`` like ``x`` and ``dt``; ``da``, ``[sequences, heads]`` or ``[sequences, heads, states]`` in
        float32; ``db``, ``dc`` like ``b`` and ``c``; ``dd``, ``[sequences, heads]`` in float32, or None without ``d``;
        ``dinitial`` like ``initial``, or None.

    Raises:
        Error: shapes, types, devices, boundaries or memory that do not fit.
    """
    method = _selective_scan_backward if stream is None else on_stream(_selective_scan_backward, dy, stream)
    return method(  # type: ignore[no-any-return]
        *(dy, x, dt, a, b, c, d),
        initial=initial,
        cu_seqlens=cu_seqlens,
        dfinal=dfinal,
        into_initial=return_initial,
        kernel=kernel,
    )


def gated_delta_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dfinal: Tensor | None = None,
    return_initial: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of :func:`gated_delta`, as of :func:`selective_scan_backward`.

    Args:
        dout: of ``o``, like ``v`` and of its type.
        q, k, v, g, beta, initial, cu_seqlens: as :func:`gated_delta` took them.
        dfinal: of the last states, like ``initial``; None for zeros.
        return_initial: make ``dinitial``.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``dq``, ``dk``, ``dv``, ``dg`` and ``dbeta``, each like its operand; ``dinitial`` like ``initial``, or None.

    Raises:
        Error: shapes, types, devices, boundaries or memory that do not fit.
    """
    method = _gated_delta_backward if stream is None else on_stream(_gated_delta_backward, dout, stream)
    return method(  # type: ignore[no-any-return]
        *(dout, q, k, v, g, beta),
        initial=initial,
        cu_seqlens=cu_seqlens,
        dfinal=dfinal,
        into_initial=return_initial,
        kernel=kernel,
    )


def causal_conv1d_backward(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    *,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    bias: bool = False,
    return_initial: bool = False,
    kernel: str | None = None,
    stream: Stream | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of :func:`causal_conv1d`, the tokens of each sequence from the last to the first.

    Those of ``w`` and of its bias are sums of each sequence by itself. ``fold(dw)`` adds them in order, and
    ``fold(dw, out=sum, accumulate=True)`` continues a sum: micro-batches that are cut between sequences then have the
    bits of one batch (NUMERICS.md, "Scans").

    Args:
        dy: of ``y``: ``[batch, tokens, channels]``, of ``x``'s type.
        x, w, initial, cu_seqlens: as :func:`causal_conv1d` took them.
        bias: whether there was one, so that ``dbias`` is made.
        return_initial: make ``dinitial``.
        kernel, stream: as in :func:`gemm`.

    Returns:
        ``dx`` like ``x``; ``dw``, ``[sequences, channels, taps]`` in float32; ``dbias``, ``[sequences, channels]`` in
        float32, or None; ``dinitial`` like ``initial``, or None.

    Raises:
        Error: shapes, types, devices, boundaries or memory that do not fit.
    """
    method = _causal_conv1d_backward if stream is None else on_stream(_causal_conv1d_backward, dy, stream)
    return method(  # type: ignore[no-any-return]
        *(dy, x, w),
        initial=initial,
        cu_seqlens=cu_seqlens,
        bias=bias,
        into_initial=return_initial,
        kernel=kernel,
    )
