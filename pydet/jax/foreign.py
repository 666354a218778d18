"""A call of a handler as JAX sees it: under vmap, and shared out among devices (``pydet/jax/sharded.py``)."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

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


def plain(call: Foreign, *operands: Array) -> tuple[Array, ...]:
    """The call itself, on one device's arrays, which vmap does not see."""
    typed = {
        key: x if isinstance(x, str) else np.float64(x) if isinstance(x, float) else np.int64(x)
        for key, x in call.attributes
    }
    found = jax.ffi.ffi_call(
        f"pydet_{call.target}",
        tuple(_like(result, operands[0]) for result in call.results),
        input_output_aliases=dict(call.aliases),
    )(*operands, **typed)
    return tuple(found)


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
