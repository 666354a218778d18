"""Sums over the devices of a mesh, in JAX, with the same bits on any number of them.

    from pydet.jax_distributed import ordered_sum, row_parallel_linear

    jax.shard_map(step, mesh=mesh, in_specs=..., out_specs=..., check_vma=False)   # and within step:
    y = row_parallel_linear(x, w, "tp", segments=8)

Each device makes the fp32 sums of its own segments; XLA's all-to-all carries them, and they are added in ascending
order as :func:`pydet.fold` adds them: never by ``psum``, whose order is XLA's. Both functions and their gradients work
inside ``jax.shard_map`` alone: take ``jax.grad`` inside, since outside XLA divides the gradient of a replicated result
among the devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pydet._native import INVALID_VALUE, constants, fail
from pydet.jax import Array, gemm, gemm_db
from pydet.jax.sharded import fold
from pydet.ops import Arithmetic

_lax: Any = jax.lax
_WORDS = {"float32": jnp.uint32, "bfloat16": jnp.uint16, "float16": jnp.uint16}


def _exchanged(parts: Array, axis_name: str, dtype: Any) -> Array:
    """All-to-all of the sums, the fold of this device's part, all-gather of the results as words, since XLA's
    collectives on the CPU carry bf16 as fp32 and back, which makes another NaN of a NaN."""
    world, shape = int(_lax.psum(1, axis_name)), parts.shape[1:]
    if world == 1:
        return fold(parts, dtype)
    count = parts[0].size
    flat = jnp.pad(parts.reshape(parts.shape[0], -1), ((0, 0), (0, -count % world)))
    each = flat.shape[1] // world
    received = _lax.all_to_all(flat.reshape(-1, world, each), axis_name, 1, 0, tiled=True)  # [W * s, 1, each]
    own = _lax.bitcast_convert_type(fold(received.reshape(-1, each), dtype), _WORDS[jnp.dtype(dtype).name])
    words = _lax.all_gather(own, axis_name, tiled=True)[:count].reshape(shape)
    return _lax.bitcast_convert_type(words, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _ordered_sum(parts: Array, axis_name: str, dtype: str) -> Array:
    return _exchanged(parts, axis_name, dtype)


def _ordered_sum_forward(parts: Array, axis_name: str, dtype: str) -> tuple[Array, tuple[int, ...]]:
    return _exchanged(parts, axis_name, dtype), parts.shape


def _ordered_sum_backward(axis_name: str, dtype: str, shape: tuple[int, ...], dy: Array) -> tuple[Array]:
    return (jnp.broadcast_to(dy.astype(jnp.float32), shape),)


_ordered_sum.defvjp(_ordered_sum_forward, _ordered_sum_backward)


def ordered_sum(parts: Any, axis_name: str, *, out_dtype: Any = jnp.float32) -> Array:
    """The sum of all devices' parts, device 0's first, on every device: inside ``jax.shard_map``.

    The gradients of micro-batches, or the sums of K's segments: with the same parts on more or fewer devices the bits
    are the same, those of :func:`pydet.fold` of all of them.

    Args:
        parts: ``[s, ...]``, float32: this device's s parts, as many on each device.
        axis_name: of the mesh axis.
        out_dtype: float32, bfloat16 or float16; rounded once.

    Raises:
        Error: parts of another type.
    """
    parts, dtype = jnp.asarray(parts), jnp.dtype(out_dtype).name
    if parts.dtype != jnp.float32 or dtype not in _WORDS:
        fail(
            constants.PYDET_INVALID_DTYPE, f"ordered_sum: {parts.dtype} to {dtype}, want float32 to one of {[*_WORDS]}"
        )
    if parts.ndim < 1 or parts.shape[0] < 1:
        fail(constants.PYDET_INVALID_SHAPE, f"ordered_sum: parts is {parts.shape}, want [s, ...], s of 1 or more")
    result: Array = _ordered_sum(parts, axis_name, dtype)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _row_parallel(x: Array, w: Array, axis_name: str, segments: int, arithmetic: Arithmetic) -> Array:
    count = segments // int(_lax.psum(1, axis_name))
    width = x.shape[1] // count
    sums = [
        gemm(x[:, i : i + width], w[:, i : i + width].T, out_dtype=jnp.float32, arithmetic=arithmetic)
        for i in range(0, x.shape[1], width)
    ]
    return _exchanged(jnp.stack(sums), axis_name, x.dtype.name)


def _row_parallel_forward(x: Array, w: Array, axis_name: str, segments: int, arithmetic: Arithmetic) -> Any:
    return _row_parallel(x, w, axis_name, segments, arithmetic), (x, w)


def _row_parallel_backward(axis_name: str, segments: int, arithmetic: Arithmetic, saved: Any, dy: Array) -> Any:
    x, w = saved
    return gemm(dy, w, arithmetic=arithmetic), gemm_db(dy, x, arithmetic=arithmetic)


_row_parallel.defvjp(_row_parallel_forward, _row_parallel_backward)


def row_parallel_linear(x: Any, w: Any, axis_name: str, *, segments: int = 8, arithmetic: Arithmetic = "auto") -> Array:
    """``y = x w^T`` where each device holds some columns of ``x`` and of ``w``: inside ``jax.shard_map``.

    The bits are those of ``pydet.gemm(x, w.T, k_chunk=K / segments)`` on one device, whatever their number.

    Args:
        x: ``[..., K / W]``, w: ``[N, K / W]``, of one type: this device's columns.
        axis_name: of the mesh axis.
        segments: a multiple of the number of devices; K / segments is a multiple of 16. It decides bits.
        arithmetic: as in :func:`pydet.gemm`; it decides bits.

    Raises:
        Error: segments that the devices do not divide, or that do not divide K.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    world = int(_lax.psum(1, axis_name))
    k = x.shape[-1] * world
    if segments < 1 or segments % world or k % (16 * segments):
        fail(
            INVALID_VALUE,
            f"row_parallel_linear: segments is {segments}, want a multiple of the {world} devices that cuts K, {k}, in "
            "multiples of 16",
        )
    y: Array = _row_parallel(x.reshape(-1, x.shape[-1]), w, axis_name, segments, arithmetic)
    return y.reshape(*x.shape[:-1], w.shape[0])
