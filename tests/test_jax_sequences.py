"""pydet.jax.attention_varlen and attention_paged: the bits of the eager calls, gradients, jit, vmap, and bad input."""

import numpy as np
import pytest

import pydet
from test_jax import all_same, device, dtype, eager, jax, jnp, normal, pj, refuses, same, vjp  # noqa: F401

ENDS_Q = np.array([0, 3, 3, 130, 131], np.int32)  # an empty one, and a block of 128 less one
ENDS_K = np.array([0, 5, 9, 160, 161], np.int32)
CASES = [
    {},
    {"causal": True},
    {"window": (40, 3), "softcap": 20.0},
    {"causal": True, "window": (17, None), "scale": 0.25, "kv_chunk": 128},
]


def packed(dtype=np.float32, tokens=131, keys=161, e=24):
    return normal(tokens, 4, 16, dtype=dtype), normal(keys, 2, 16, dtype=dtype), normal(keys, 2, e, dtype=dtype, seed=1)


def how(dtype):
    return {"arithmetic": "ieee" if dtype == np.float32 else "sm90"}


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("sunk", [False, True])
def test_varlen(eager, dtype, options, sunk):
    q, k, v = packed(dtype)
    options = options | how(dtype)
    sinks, dout = normal(4, seed=3) if sunk else None, normal(131, 4, 24, dtype=dtype, seed=5)
    want, lse = eager.attention_varlen(q, k, v, ENDS_Q, ENDS_K, sinks=sinks, return_lse=True, **options)
    call = lambda q, k, v, ends_q, ends_k, sinks: pj.attention_varlen(
        q, k, v, ends_q, ends_k, sinks=sinks, return_lse=True, **options
    )
    all_same(call(q, k, v, ENDS_Q, ENDS_K, sinks), (want, lse))
    run = jax.jit(call)
    all_same(run(q, k, v, ENDS_Q, ENDS_K, sinks), (want, lse))
    found, gradients = vjp(lambda *own: run(*own[:3], ENDS_Q, ENDS_K, own[3])[0], (q, k, v, sinks), jnp.asarray(dout))
    same(found, want)
    options.pop("kv_chunk", None)  # which has no part in it
    wanted = eager.attention_varlen_backward(dout, q, k, v, want, lse, ENDS_Q, ENDS_K, sinks=sinks, **options)
    all_same(gradients if sunk else gradients[:3], wanted)


def test_a_sequence_has_the_bits_that_it_has_alone(eager):
    """Other ends in one program, tokens in no sequence, and its gradients."""
    q, k, v = packed()
    run = jax.jit(lambda q, k, v, *ends: pj.attention_varlen(q, k, v, *ends, causal=True, return_lse=True))
    for ends_q, ends_k in (
        (ENDS_Q, ENDS_K),
        (np.array([2, 7, 9, 9, 120], np.int32), np.array([0, 4, 50, 60, 161], np.int32)),
    ):
        out, lse = run(q, k, v, ends_q, ends_k)
        pull = jax.vjp(lambda *own, ends=(ends_q, ends_k): run(*own, *ends)[0], q, k, v)[1]
        dq, dk, dv = pull(jnp.ones_like(out))
        inside = np.zeros(131, bool)
        for s in range(4):
            own, keys = slice(ends_q[s], ends_q[s + 1]), slice(ends_k[s], ends_k[s + 1])
            inside[own] = True
            if ends_q[s] == ends_q[s + 1]:
                continue
            alone = [np.ascontiguousarray(x.swapaxes(0, 1)[None]) for x in (q[own], k[keys], v[keys])]
            want, of_it = eager.attention(*alone, causal=True, return_lse=True)
            same(out[own], want[0].swapaxes(0, 1))
            same(lse[own], of_it[0].T)
            parts = pydet.attention_backward(np.ones_like(want), *alone, want, of_it, causal=True)
            for ours, theirs in zip((dq[own], dk[keys], dv[keys]), parts, strict=True):
                same(ours, theirs[0].swapaxes(0, 1))
        assert not np.asarray(out)[~inside].any() and not np.asarray(dq)[~inside].any()
        assert (np.asarray(lse)[~inside] == -np.inf).all()


def test_varlen_vmap(device):
    q, k, v = (np.stack([x, x[::-1], 2 * x]) for x in packed())
    ends = np.stack([ENDS_Q, ENDS_Q // 2, np.sort(ENDS_Q // 3)])
    want = np.stack([pydet.attention_varlen(q[i], k[i], v[i], ends[i], ENDS_K) for i in range(3)])
    call = lambda q, k, v, ends: pj.attention_varlen(q, k, v, ends, ENDS_K)
    found = jax.jit(jax.vmap(call))(q, k, v, ends)
    for i in range(3):  # pydet.attention_varlen leaves what is in no sequence
        same(found[i, ends[i, 0] : ends[i, -1]], want[i, ends[i, 0] : ends[i, -1]])
    loss = lambda q, k, v, ends: call(q, k, v, ends).sum()
    each = [jax.grad(loss, (0, 1, 2))(q[i], k[0], v[i], ends[i]) for i in range(3)]
    found = jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, 0, 0))(q, k[0], v, ends)
    all_same(found, [np.stack(parts) for parts in zip(*each, strict=True)])


def pages(k, v, ends, size, seed=0):
    """The keys of sequences in pages of so many, anywhere."""
    lengths = np.diff(ends).astype(np.int32)
    most = max(1, -(-int(lengths.max()) // size))
    places = np.random.default_rng(seed).permutation(len(lengths) * most + 2).astype(np.int32)
    table = places[: len(lengths) * most].reshape(-1, most)
    caches = [np.full((len(places), size, *x.shape[1:]), 7, x.dtype) for x in (k, v)]
    for s, count in enumerate(lengths):
        for j in range(count):
            for cache, x in zip(caches, (k, v), strict=True):
                cache[table[s, j // size], j % size] = x[ends[s] + j]
    return *caches, table, lengths


@pytest.mark.parametrize("size", [1, 16, 50])
def test_paged(eager, dtype, size):
    q, k, v = packed(dtype)
    k_cache, v_cache, table, lengths = pages(k, v, ENDS_K, size)
    for options in ({}, {"window": (40, None)}, {"causal": False, "softcap": 20.0, "sinks": normal(4)}):
        options = options | how(dtype)
        given = (q, k_cache, v_cache, table, lengths, ENDS_Q)
        want = eager.attention_paged(*given, return_lse=True, **options)
        all_same(pj.attention_paged(*given, return_lse=True, **options), want)
        all_same(jax.jit(lambda *x, more=options: pj.attention_paged(*x, return_lse=True, **more))(*given), want)
        same(pj.attention_varlen(q, k, v, ENDS_Q, ENDS_K, **{"causal": True, **options}), want[0])
    rows = normal(4, 4, 2, 16, dtype=dtype)  # two queries of each sequence, the last one's first is before its one key
    mask = np.arange(2 * table.shape[1] * size).reshape(1, 1, 2, -1) % 3 != 0
    for options in ({}, {"allowed": mask}, {"bias": normal(4, 1, table.shape[1] * size)[:, None], "causal": False},
                    {"first_key": np.array([1, 0, 3, 0], np.int32)}):  # fmt: skip
        given, options = (rows, k_cache, v_cache, table, lengths), options | how(dtype)
        all_same(
            pj.attention_paged(*given, return_lse=True, **options),
            eager.attention_paged(*given, return_lse=True, **options),
        )
    found = jax.vmap(lambda rows, lengths: pj.attention_paged(rows, k_cache, v_cache, table, lengths, **how(dtype)))(
        np.stack([rows, -rows]), np.stack([lengths, lengths // 2])
    )
    same(found[1], eager.attention_paged(-rows, k_cache, v_cache, table, lengths // 2, **how(dtype)))


def test_refusals():
    q, k, v = packed()
    call, ends = pj.attention_varlen, (ENDS_Q, ENDS_K)
    refuses("attention_varlen: q is 131x4, want TxHxD", call, q[:, :, 0], k, v, *ends)
    refuses("attention_varlen: k is bfloat16, want float32", call, q, k.astype(jnp.bfloat16), v, *ends)
    refuses("attention_varlen: v is 160x2x24, want 161x2x24", call, q, k, v[1:], *ends)
    refuses("attention_varlen: q has 3 heads, want a multiple of the 2", call, q[:, :3], k, v, *ends)
    refuses("attention_varlen: k is 161x2x8, want heads of 16", call, q, k[:, :, :8], v, *ends)
    refuses("attention_varlen: heads of q and k have 12", call, q[:, :, :12], k[:, :, :12], v, *ends)
    refuses("attention_varlen: cu_seqlens_q is None, want cumulative", call, q, k, v, None, ENDS_K)
    refuses("attention_varlen: cu_seqlens_k is int64, want int32", call, q, k, v, ENDS_Q, ENDS_K.astype(np.int64))
    refuses("attention_varlen: cu_seqlens_k is 4, want 5", call, q, k, v, ENDS_Q, ENDS_K[1:])
    refuses("attention_varlen: cu_seqlens_q is 0, want 1 or more", call, q, k, v, ENDS_Q[:0], ENDS_K[:0])
    refuses("attention_varlen: cu_seqlens_q has 2 dim", call, q, k, v, ENDS_Q[None], ENDS_K)
    refuses("attention_varlen: sinks is 3, want 4", call, q, k, v, *ends, sinks=normal(3))
    refuses("attention_varlen: scale is traced", jax.jit(lambda s: call(q, k, v, *ends, scale=s)), 1.0)
    refuses("attention_varlen: scale is 0, want a number", call, q, k, v, *ends, scale=0.0)
    refuses("attention_varlen: window is 3, want a pair", call, q, k, v, *ends, window=3)
    refuses("attention_varlen: kv_chunk is 100, want", call, q, k, v, *ends, kv_chunk=100)
    refuses(
        "attention_varlen: no gradient of lse", jax.grad(lambda q: call(q, k, v, *ends, return_lse=True)[1].sum()), q
    )
    k_cache, v_cache, table, lengths = pages(k, v, ENDS_K, 16)
    call, given = pj.attention_paged, (q, k_cache, v_cache, table, lengths, ENDS_Q)
    refuses("attention_paged: q is 131x4x16, want BxHxQxD", call, *given[:5])
    refuses("attention_paged: q is 1x131x4x16, want TxHxD", call, q[None], *given[1:])
    refuses("attention_paged: k_cache is 161x2x16, want PxSxGxD", call, q, k, *given[2:])
    refuses("attention_paged: block_table is None, want the pages", call, q, k_cache, v_cache, None, lengths, ENDS_Q)
    refuses("attention_paged: seqlens_k is None, want the keys", call, q, k_cache, v_cache, table, None, ENDS_Q)
    refuses("attention_paged: block_table is 3x10, want 4 rows", call, q, k_cache, v_cache, table[1:], lengths, ENDS_Q)
    refuses("attention_paged: seqlens_k is 3, want 4", call, q, k_cache, v_cache, table, lengths[1:], ENDS_Q)
    refuses("attention_paged: first_key is 1, want 4", call, *given, first_key=lengths[:1])
    refuses("attention_paged: allowed is given with cu_seqlens_q", call, *given, allowed=np.ones(160, bool))
    refuses("^attention_paged: no derivative", jax.grad(lambda q: call(q, *given[1:]).sum()), q)
    with pytest.raises(Exception, match="no_such_kernel"):
        jax.block_until_ready(call(*given, kernel="no_such_kernel"))
