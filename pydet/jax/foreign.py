"""A call of a handler as JAX sees it: under vmap, and shared out among devices (``pydet/jax/sharded.py``)."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pydet import _native
from pydet._native import constants, ffi

Array: TypeAlias = Any
_core: Any = jax.core
type_of: Any = getattr(jax, "typeof", None) or _core.get_aval


class Foreign(NamedTuple):
    """What is static of a call."""

    target: str
    results: tuple[jax.ShapeDtypeStruct, ...]
    aliases: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[str, Any], ...]

    def told(self, **attributes: Any) -> Foreign:
        """The same call with other attributes."""
        return self._replace(attributes=tuple({**dict(self.attributes), **attributes}.items()))

    def giving(self, *results: Any) -> Foreign:
        return self._replace(results=results)

    def shapes(self) -> list[tuple[int, ...]]:
        return [y.shape for y in self.results]

    def asks(self, name: str) -> Any:
        """An attribute; 0 where the target has no such."""
        return dict(self.attributes).get(name, 0)


def varies_over(x: Array) -> frozenset[str]:
    """The axes of ``shard_map`` that an array varies over, where JAX checks that."""
    aval = type_of(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def _like(result: Any, x: Array) -> Any:
    """What a result is, over the axes that an operand varies over."""
    if not varies_over(x):
        return result
    aval = type_of(x)
    name = "manual_axis_type" if hasattr(aval, "manual_axis_type") else "vma"
    where = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=where, **{name: getattr(aval, name)})


@functools.lru_cache(maxsize=1024)
def _bytes_of_copy(shape: tuple[int, ...], dtype: str, transposed: bool) -> int:
    """Bytes that a GPU of this machine uses for a copy of a product's operand; 0 where it reads that well."""
    library, _ = _native.try_load(constants.PYDET_EXCHANGE_CUDA)
    if library is None or dtype not in ("bfloat16", "float16") or jax.default_backend() == "cpu":
        return 0
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    places = [*range(len(shape) - 2), *((-1, -2) if transposed else (-2, -1))]
    extents, steps = (ffi.new("int64_t[]", [x[i] for i in places]) for x in (shape, strides))
    tensor, size = ffi.new("pydet_tensor *"), ffi.new("uint64_t *")
    tensor.data = ffi.cast("void *", 256)  # XLA's arrays begin at whole vectors; nothing is read
    tensor.device.device_type, tensor.ndim = constants.PYDET_CUDA, len(shape)
    tensor.dtype.code = constants.PYDET_BFLOAT if dtype == "bfloat16" else constants.PYDET_FLOAT
    tensor.dtype.bits, tensor.dtype.lanes = 16, 1
    tensor.shape, tensor.strides = extents, steps
    done = library.lib.pydet_gemm_copy_workspace(tensor, size) == constants.PYDET_OK
    return int(size[0]) if done else 0


_COPYING = (constants.PYDET_AUTO, constants.PYDET_SM90)  # the arithmetics of kernels that want copies


def _with_workspace(call: Foreign, a: Array, b: Array) -> Foreign:
    """A product with room for copies of its operands, where there is a kernel that wants them: a result more, which no
    caller sees. Of batches such a kernel takes those that are rows of one matrix. It decides no bit."""
    size = 0
    one = math.prod(b.shape[:-2]) == 1 and (math.prod(a.shape[:-2]) == 1 or not call.asks("transpose_a"))
    known = all(isinstance(extent, int) for x in (a, b) for extent in x.shape)
    if known and one and not call.asks("has_initial") and call.asks("arithmetic") in _COPYING:
        for x, name in ((a, "transpose_a"), (b, "transpose_b")):
            size += _bytes_of_copy(x.shape, x.dtype.name, bool(call.asks(name)))
    room = [jax.ShapeDtypeStruct((size,), jnp.uint8)] if size else []
    return call.told(has_workspace=bool(room)).giving(*call.results, *room)


def plain(call: Foreign, *operands: Array) -> tuple[Array, ...]:
    """The call itself, on one device's arrays, which vmap does not see."""
    count = len(call.results)
    if call.target == "gemm":
        call = _with_workspace(call, *operands[:2])
    typed = {
        key: x if isinstance(x, str) else np.float64(x) if isinstance(x, float) else np.int64(x)
        for key, x in call.attributes
    }
    found = jax.ffi.ffi_call(
        f"pydet_{call.target}",
        tuple(_like(result, operands[0]) for result in call.results),
        input_output_aliases=dict(call.aliases),
    )(*operands, **typed)
    return tuple(found[:count])


# ---- vmap ------------------------------------------------------------------------------------------------------------


_ONE_BY_ONE = (
    "attention_stored", "attention_varlen_backward", "embedding", "embedding_backward", "fold", "grouped_gemm",
    "linear_log_prob", "linear_log_prob_backward", "quantize", "scaled_gemm",
)  # fmt: skip


def batchable(run: Any, call: Foreign, *operands: Array) -> tuple[Array, ...]:
    """``run(call, *operands)``, under vmap as one call of batches: gemm broadcasts what is unbatched. A norm takes a
    weight a group of rows, which nested batches keep in order only where all operands have every batch dimension; and
    what lies in a result's memory must have its shape. Some calls are made one by one."""
    made = jax.custom_batching.custom_vmap(lambda *given: run(call, *given))

    @made.def_vmap
    def of_batches(size: Any, batched: list[bool], *given: Array) -> tuple[Any, Any]:
        flags = [True] * len(call.results)
        if call.target in _ONE_BY_ONE:
            own = [x for x, there in zip(given, batched, strict=True) if there]

            def one(parts: list[Array]) -> tuple[Array, ...]:
                part = iter(parts)
                one_each = [next(part) if there else x for x, there in zip(given, batched, strict=True)]
                return batchable(run, call, *one_each)

            return jax.lax.map(one, own), tuple(flags)
        expands = call.target == "gemm" and not call.aliases
        each = [
            x if there else x[None] if expands else jnp.broadcast_to(x, (size, *x.shape))
            for x, there in zip(given, batched, strict=True)
        ]
        results = [jax.ShapeDtypeStruct((size, *y.shape), y.dtype) for y in call.results]
        return batchable(run, call.giving(*results), *each), tuple(flags)

    found: tuple[Array, ...] = made(*operands)
    return found
