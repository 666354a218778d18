"""pydet.jax.dot_general: jax.lax.dot_general's results, by the chains of gemm, whatever the dimensions are."""

import math

import numpy as np
import pytest

import pydet
from test_jax import arithmetic, device, dtype, eager, jax, jnp, normal, pj, refuses, same, vjp  # noqa: F401

NUMBERS = {  # name -> (shape of lhs, shape of rhs, dimension_numbers)
    "matrices": ((5, 48), (48, 7), (((1,), (0,)), ((), ()))),
    "rhs turned": ((5, 48), (7, 48), (((1,), (1,)), ((), ()))),
    "lhs turned": ((48, 5), (48, 7), (((0,), (0,)), ((), ()))),
    "both turned": ((48, 5), (7, 48), (((0,), (1,)), ((), ()))),
    "a layer": ((2, 3, 5, 48), (48, 7), (((3,), (0,)), ((), ()))),
    "two dimensions are summed": ((5, 4, 12), (4, 12, 7), (((1, 2), (0, 1)), ((), ()))),
    "heads out": ((2, 5, 4, 12), (4, 12, 7), (((2, 3), (0, 1)), ((), ()))),
    "a batch": ((3, 5, 48), (3, 48, 7), (((2,), (1,)), ((0,), (0,)))),
    "a batch inside": ((5, 3, 48), (48, 7, 3), (((2,), (0,)), ((1,), (2,)))),
    "scores": ((2, 5, 4, 16), (2, 9, 4, 16), (((3,), (3,)), ((0, 2), (0, 2)))),
    "in another order": ((4, 5, 12), (12, 7, 4), (((2, 0), (0, 2)), ((), ()))),
    "vectors": ((48,), (48,), (((0,), (0,)), ((), ()))),
    "a row": ((48,), (48, 7), (((0,), (0,)), ((), ()))),
    "an outer product": ((5,), (7,), (((), ()), ((), ()))),
    "nothing to sum": ((5, 0), (0, 7), (((1,), (0,)), ((), ()))),
    "nothing at all": ((0, 48), (48, 7), (((1,), (0,)), ((), ()))),
}


def by_hand(eager, lhs, rhs, numbers, **options):
    """By gemm of what the dimensions say, copied."""
    (summed, batch), size = numbers, lambda x, places: math.prod(x.shape[i] for i in places)
    free = [[i for i in range(x.ndim) if i not in (*summed[j], *batch[j])] for j, x in enumerate((lhs, rhs))]
    a = lhs.transpose(*batch[0], *free[0], *summed[0])
    a = a.reshape(size(lhs, batch[0]), size(lhs, free[0]), size(lhs, summed[0]))
    b = rhs.transpose(*batch[1], *summed[1], *free[1])
    b = b.reshape(size(rhs, batch[1]), size(rhs, summed[1]), size(rhs, free[1]))
    lead = [lhs.shape[i] for i in batch[0]]
    shape = (*lead, *(lhs.shape[i] for i in free[0]), *(rhs.shape[i] for i in free[1]))
    return eager.gemm(np.ascontiguousarray(a), np.ascontiguousarray(b), **options).reshape(shape)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_dimension(eager, name):
    left, right, numbers = NUMBERS[name]
    for kind, chosen in ((np.dtype(np.float32), "ieee"), (np.dtype(jnp.bfloat16), "sm90")):
        lhs, rhs = normal(*left, dtype=kind), normal(*right, dtype=kind, seed=1)
        call = lambda lhs, rhs, **more: pj.dot_general(lhs, rhs, numbers, **more)
        want = by_hand(eager, lhs, rhs, numbers, arithmetic=chosen, k_chunk=16)
        same(call(lhs, rhs, arithmetic=chosen, k_chunk=16), want)
        wide = call(lhs, rhs, preferred_element_type=jnp.float32, arithmetic=chosen)
        same(wide, by_hand(eager, lhs, rhs, numbers, out_dtype="float32", arithmetic=chosen))
        theirs = jax.lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32, precision="highest")
        np.testing.assert_allclose(wide, theirs, rtol=1e-3, atol=1e-4)
        if kind == np.float32 and lhs.size and rhs.size:
            dy = normal(*wide.shape, seed=2)
            highest = lambda lhs, rhs: jax.lax.dot_general(lhs, rhs, numbers, precision="highest")
            for ours, other in zip(vjp(call, (lhs, rhs), dy)[1], vjp(highest, (lhs, rhs), dy)[1], strict=True):
                assert ours.shape == other.shape and ours.dtype == other.dtype
                np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-4)


def test_gradients_are_gemms(eager, dtype, arithmetic):
    x, w, dy = normal(2, 3, 48, dtype=dtype), normal(48, 7, dtype=dtype), normal(2, 3, 7, dtype=dtype)
    layer = lambda x, w: pj.dot_general(x, w, (((2,), (0,)), ((), ())), arithmetic=arithmetic)
    y, (dx, dw) = vjp(jax.jit(layer), (x, w), jnp.asarray(dy))
    rows, drows = x.reshape(6, 48), dy.reshape(6, 7)
    same(y, eager.gemm(rows, w, arithmetic=arithmetic).reshape(2, 3, 7))
    same(dx, eager.gemm_da(drows, w, arithmetic=arithmetic).reshape(2, 3, 48))
    same(dw, eager.gemm_db(rows, drows, arithmetic=arithmetic))


def test_a_row_in_any_batch(device):
    x, w = normal(40, 64), normal(64, 24)
    numbers = (((1,), (0,)), ((), ()))
    run = jax.jit(lambda x: pj.dot_general(x, w, numbers))
    whole = np.asarray(run(x))
    for rows in (1, 2, 17):
        same(run(x[3 : 3 + rows]), whole[3 : 3 + rows])
    same(jax.vmap(run)(x[:, None])[:, 0], whole)
    many = jax.vmap(lambda x, w: pj.dot_general(x, w, (((), ()), ((), ()))))(x[:, 0], x[:, 1])
    same(many, (x[:, 0] * x[:, 1]))


def test_what_lies_well_is_not_copied():
    """A matrix and its transpose are read in place; of other orders XLA makes a copy."""

    def moves(name):
        left, right, numbers = NUMBERS[name]
        program = jax.jit(lambda a, b: pj.dot_general(a, b, numbers)).lower(normal(*left), normal(*right)).compile()
        return [word for word in ("transpose(", "copy(", "fusion(") if f" {word}" in program.as_text()]

    for name in ("matrices", "rhs turned", "lhs turned", "both turned", "a layer", "a batch", "heads out"):
        assert not moves(name), name
    assert moves("a batch inside")


@pytest.mark.parametrize(
    "precision", ["highest", "default", "float32", jax.lax.Precision.HIGH, ("high", "default"), None]
)
def test_any_precision(precision):
    a, b, numbers = normal(3, 8), normal(8, 5), (((1,), (0,)), ((), ()))
    same(pj.dot_general(a, b, numbers, precision), pydet.gemm(a, b))
    sizes = np.array([1, 2], np.int32)
    stack = np.stack([b, 2 * b])
    wide = pj.ragged_dot(a, stack, sizes, precision=precision, preferred_element_type=jnp.float32)
    same(wide, pj.ragged_dot(a, stack, sizes))


def test_refuses():
    a, b, numbers = normal(3, 8), normal(8, 5), (((1,), (0,)), ((), ()))
    for arguments, options, sentence in (
        ((a, b.astype(np.float16), numbers), {}, "rhs is float16, want float32 as lhs is"),
        ((a, b, (((0,), (0,)), ((), ()))), {}, "contracting dimensions are 3 of lhs, 3x8, and 8 of rhs, 8x5, want the"),
        (
            (a, b, (((1,), (0,)), ((0,), (1,)))),
            {},
            "batch dimensions are 3 of lhs, 3x8, and 5 of rhs, 8x5, want the same",
        ),
        ((a, b, (((1,), (0, 1)), ((), ()))), {}, "contracting dimensions are 8 of lhs, 3x8, and 8x5 of rhs, 8x5"),
        ((a, b, (((2,), (0,)), ((), ()))), {}, r"dimension_numbers has \(2,\) for lhs_contracting, 3x8, want its dim"),
        ((a, b, (((-1,), (0,)), ((), ()))), {}, r"dimension_numbers has \(-1,\) for lhs_contracting, 3x8"),
        ((a, a, (((1, 1), (1, 1)), ((), ()))), {}, r"dimension_numbers has \(1, 1\) for lhs_contracting"),
        ((a, a, (((1,), (1,)), ((1,), (1,)))), {}, r"dimension_numbers has dimensions of lhs twice, \(1,\) and \(1,\)"),
        ((a, b, ((1,), (0,))), {}, r"dimension_numbers is \(\(1,\), \(0,\)\), want \(\(lhs_contracting, rhs_con"),
        ((a, b, (("x", (0,)), ((), ()))), {}, "dimension_numbers has 'x' for lhs_contracting, want dimensions"),
        ((a, b, numbers), {"precision": "fp8"}, "precision is 'fp8', want None, a jax.lax.Precision"),
        ((a, b, numbers), {"preferred_element_type": "int32"}, "preferred_element_type is 'int32', want one of"),
        ((a, b, numbers), {"out_sharding": 1}, "out_sharding is 1, want None"),
        ((a.astype(np.int8), b.astype(np.int8), numbers), {}, "lhs is int8, want float32"),
    ):
        refuses(f"^dot_general: {sentence}", pj.dot_general, *arguments, **options)
    both = {"out_dtype": "float32", "preferred_element_type": "float32"}
    sizes = np.array([3], np.int32)
    refuses("ragged_dot: preferred_element_type is given with out_dtype", pj.ragged_dot, a, b[None], sizes, **both)
