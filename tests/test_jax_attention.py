"""pydet.jax.attention and dot_product_attention: jit and vmap have the bits of pydet.attention, and bad input."""

import itertools

import numpy as np
import pytest

import attention_cases
import pydet
from test_jax import device, eager, forced, in_fp32, jax, jnp, normal, pj, refuses, same  # noqa: F401

TYPES = {"fp32": "ieee", "bf16": "sm90", "fp16": "ieee"}


def problem(*, batch=2, heads=4, groups=2, queries=5, keys=150, d=64, e=64, dtype="fp32", seed=0):
    shape = attention_cases.Shape(batch, heads, groups, queries, keys, d, e)
    return attention_cases.operands(shape, dtype, seed=seed)


@pytest.mark.parametrize("kind", TYPES)
def test_every_problem(eager, kind):
    """Operands and options one by one, eagerly, and in one program each."""
    for name, (operands, options) in attention_cases.dense_problems(kind).items():
        want, lse = eager.attention(*operands, arithmetic=TYPES[kind], return_lse=True, **options)
        arrays = {key: x for key, x in options.items() if isinstance(x, np.ndarray)}
        plain = {key: x for key, x in options.items() if key not in arrays} | {"arithmetic": TYPES[kind]}
        run = jax.jit(lambda q, k, v, arrays, plain=plain: pj.attention(q, k, v, return_lse=True, **arrays, **plain))
        for result in (run(*operands, arrays), pj.attention(*operands, return_lse=True, **options | plain)):
            for ours, theirs in zip(result, (want, lse), strict=True):
                assert np.asarray(ours).tobytes() == theirs.tobytes(), name
        same(pj.attention(*operands, **options | plain), want)


def test_integers_that_are_traced(eager):
    """One program for lengths that differ, each as the query alone with its own keys."""
    q, k, v = problem(queries=1)
    run = jax.jit(lambda first_key, seqlens_k: pj.attention(q, k, v, first_key=first_key, seqlens_k=seqlens_k))
    for first, last in ((0, 150), (149, 150), (3, 4), (60, 149), (0, 0)):
        lengths = np.array([first, 0], np.int32), np.array([last, 77], np.int32)
        found = run(*lengths)
        same(found, eager.attention(q, k, v, first_key=lengths[0], seqlens_k=lengths[1]))
        same(found[:1], eager.attention(q[:1], *(np.ascontiguousarray(x[:1, :, first:last]) for x in (k, v))))


def test_vmap(eager):
    """Batches become sequences where they can; else one call follows another."""
    q, k, v = (np.stack([x, x[::-1], 2 * x]) for x in problem())
    mask, bias = np.arange(3 * 150).reshape(3, 1, 1, 150) % 7 != 0, normal(3, 4, 5, 150)
    sinks, lengths = normal(3, 4), np.array([[150, 3], [0, 1], [149, 128]], np.int32)
    cases = [
        ({}, {}),
        ({"allowed": mask}, {}),  # of one sequence's keys: not those of all
        ({"allowed": np.broadcast_to(mask[:, None], (3, 2, 1, 1, 150)).copy()}, {}),
        ({"bias": bias, "seqlens_k": lengths}, {"causal": True}),
        ({"sinks": sinks}, {"causal": True, "window": (40, None)}),
    ]
    for arrays, options in cases:
        one = lambda q, k, v, arrays, options=options: pj.attention(q, k, v, return_lse=True, **arrays, **options)
        want = [
            eager.attention(q[i], k[i], v[i], return_lse=True, **{name: x[i] for name, x in arrays.items()}, **options)
            for i in range(3)
        ]
        for run in (jax.vmap(one), jax.jit(jax.vmap(one))):
            for ours, theirs in zip(run(q, k, v, arrays), zip(*want, strict=True), strict=True):
                same(ours, np.stack(theirs))
    alone = jax.vmap(lambda bias: pj.attention(q[0], k[0], v[0], bias=bias))(bias)
    same(alone, np.stack([eager.attention(q[0], k[0], v[0], bias=x) for x in bias]))
    nested = jax.vmap(jax.vmap(pj.attention, (0, None, None)), (None, 0, 0))(q, k, v)
    each = [[eager.attention(x, *kv) for x in q] for kv in zip(k, v, strict=True)]
    same(nested, np.stack([np.stack(row) for row in each]))


def test_a_query_has_its_bits_in_any_batch(device):
    """Decoded, in a prefill, in chunks, and in batches: under one jit each."""
    q, k, v = problem(queries=150, keys=150, dtype="bf16")
    run = jax.jit(lambda q, k, v: pj.attention(q, k, v, causal=True, arithmetic="sm90"))
    whole = np.asarray(run(q, k, v))
    same(run(q[:1], k[:1], v[:1]), whole[:1])
    same(run(q[:, :, -1:], k, v), whole[:, :, -1:])
    same(run(q[:, :, 60:101], k[:, :, :101], v[:, :, :101]), whole[:, :, 60:101])
    _, scanned = jax.lax.scan(
        lambda carry, q: (carry, pj.attention(q, k, v, arithmetic="sm90")), 0, q[None, ..., -1:, :]
    )
    same(scanned[0], whole[:, :, -1:])


def test_kernels_by_name(device):
    q, k, v = problem(dtype="bf16", d=128, e=128)
    want, ran = pydet.attention(q, k, v, causal=True, arithmetic="sm90"), 0
    for kernel in pydet.kernels():
        if (kernel.operation, kernel.device, kernel.arithmetic) == ("attention", device, "sm90") and kernel.available:
            call = lambda name: pj.attention(q, k, v, causal=True, arithmetic="sm90", kernel=name)
            found = forced(call, kernel.name, device)
            if found is not None:
                same(found, want)
                ran += 1
    assert ran
    with pytest.raises(Exception, match=r"attention: .*no_such_kernel"):
        jax.block_until_ready(pj.attention(q, k, v, kernel="no_such_kernel"))


def test_shapes_that_are_symbols(device):
    from jax import export

    q, k, v = problem()
    b, s = export.symbolic_shape("b, s")
    shapes = [jax.ShapeDtypeStruct((b, *x.shape[1:2], n, 64), x.dtype) for x, n in ((q, 5), (k, s), (v, s))]
    known = [export.DisabledSafetyCheck.custom_call("pydet_attention")]
    function = jax.jit(lambda q, k, v: pj.attention(q, k, v, causal=True))
    program = export.export(function, platforms=[device], disabled_checks=known)(*shapes)
    for batch, keys in ((2, 150), (1, 7)):
        cut = q[:batch], k[:batch, :, :keys].copy(), v[:batch, :, :keys].copy()
        same(program.call(*cut), pydet.attention(*cut, causal=True))


# ---- Gradients -------------------------------------------------------------------------------------------------------


def gradients(eager, operands, dout, **options):
    """(dq, dk, dv), and dsinks where there are sinks, of pydet's own calls."""
    out, lse = eager.attention(*operands, return_lse=True, **options)
    options.pop("kv_chunk", None)
    return eager.attention_backward(dout, *operands, out, lse, **options)


@pytest.mark.parametrize("part,kind", list(enumerate(TYPES)))
def test_gradients_of_every_problem(eager, part, kind):
    for name, (operands, options) in list(attention_cases.dense_problems(kind).items())[part :: len(TYPES)]:
        q, k, v = operands
        options = options | {"arithmetic": TYPES[kind]}
        dout = normal(*q.shape[:3], v.shape[3], seed=9).astype(q.dtype)
        sinks = options.pop("sinks", None)
        call = lambda *given, options=options: pj.attention(*given[:3], sinks=(*given, None)[3], **options)
        given = operands if sinks is None else (*operands, sinks)
        found = jax.jit(lambda dout, *x, call=call: jax.vjp(call, *x)[1](dout))(dout, *given)
        want = gradients(eager, operands, dout, sinks=sinks, **options)
        for ours, theirs in zip(found, want, strict=True):
            assert np.asarray(ours).tobytes() == theirs.tobytes(), name


def test_gradients_in_transforms(eager):
    operands = [np.stack([x, x[::-1], 2 * x]) for x in problem(keys=140)]
    sinks, dout, lengths = normal(3, 4), normal(3, 2, 4, 5, 64, seed=4), np.array([140, 77], np.int32)
    each = [
        gradients(eager, [x[i] for x in operands], dout[i], sinks=sinks[i], causal=True, seqlens_k=lengths)
        for i in range(3)
    ]
    want = [np.stack(x) for x in zip(*each, strict=True)]

    def pull(q, k, v, sinks, dout):
        call = lambda q, k, v, sinks: pj.attention(q, k, v, sinks=sinks, causal=True, seqlens_k=lengths)
        return jax.vjp(call, q, k, v, sinks)[1](dout)

    for function in (pull, jax.checkpoint(pull)):
        for ours, theirs in zip(jax.jit(jax.vmap(function))(*operands, sinks, dout), want, strict=True):
            same(ours, theirs)
    scanned = jax.lax.scan(lambda carry, x: (carry, pull(*x)), 0, (*operands, sinks, dout))[1]
    for ours, theirs in zip(scanned, want, strict=True):
        same(ours, theirs)
    # Without sinks, batches are more sequences.
    plain = lambda q, k, v, dout: jax.vjp(lambda *x: pj.attention(*x, causal=True), q, k, v)[1](dout)
    each = [gradients(eager, [x[i] for x in operands], dout[i], causal=True) for i in range(3)]
    for ours, theirs in zip(jax.vmap(plain)(*operands, dout), zip(*each, strict=True), strict=True):
        same(ours, np.stack(theirs))


def test_gradients_of_dot_product_attention(eager):
    q, k, v = problem(queries=9, keys=9)
    mask, lengths, dout = normal(2, 1, 9, 9) > -1, np.array([9, 4], np.int32), normal(2, 4, 9, 64, seed=8)
    call = lambda q, k, v: pj.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, query_seq_lengths=lengths, local_window_size=(5, 0)
    )
    found = jax.vjp(call, *(tokens_first(x) for x in (q, k, v)))[1](jnp.asarray(tokens_first(dout)))
    seen = by_mask(9, 9, True, (5, 0), lengths, None, mask)
    for ours, theirs in zip(found, gradients(eager, (q, k, v), dout, allowed=seen), strict=True):
        same(ours, tokens_first(theirs))
    operands = [tokens_first(x) for x in (q, k, v)]
    given = jnp.asarray(tokens_first(dout))
    theirs, ours = (
        in_fp32(lambda f=f: jax.vjp(lambda q, k, v: f(q, k, v, is_causal=True), *operands)[1](given))()
        for f in (jax.nn.dot_product_attention, pj.dot_product_attention)
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_gradients_that_are_not_there():
    q, k, v = problem()
    bias = normal(5, 150)
    loss = lambda q, bias: pj.attention(q, k, v, bias=bias).sum()
    for refused in (jax.grad(loss, 1), jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, 1))):
        refuses("^attention: no gradient by bias; want a bias that is constant, or jax.lax.stop_grad", refused, q, bias)
    kept = jax.grad(lambda q, bias: loss(q, jax.lax.stop_gradient(bias)), (0, 1))(q, bias)
    same(kept[0], jax.grad(loss)(q, bias)), same(kept[1], np.zeros_like(bias))
    of_lse = lambda q: pj.attention(q, k, v, return_lse=True)[1].sum()
    refuses("^attention: no gradient of lse", jax.grad(of_lse), q)
    both = lambda q: (lambda out, lse: out.sum() + jax.lax.stop_gradient(lse).sum())(
        *pj.attention(q, k, v, return_lse=True)
    )
    same(jax.grad(both)(q), jax.grad(lambda q: pj.attention(q, k, v).sum())(q))
    second = jax.grad(lambda q: jax.grad(lambda q: (pj.attention(q, k, v) ** 2).sum())(q).sum())
    refuses("^attention_backward: no derivative of this gradient; attention has first gradients", second, q)


# ---- jax.nn ----------------------------------------------------------------------------------------------------------


def tokens_first(x):
    return np.ascontiguousarray(x.swapaxes(1, 2))


def by_mask(queries, keys, causal, window, lengths, key_lengths, mask):
    """The keys that jax.nn lets a query see."""
    i, j = np.arange(queries)[:, None], np.arange(keys)
    seen = np.ones((2, 1, queries, keys), bool) if mask is None else np.broadcast_to(mask, (2, 4, queries, keys)).copy()
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= (i <= j + window[0]) & (i >= j - window[1])
    if lengths is not None:
        seen &= (i < lengths[:, None, None])[:, None]
    if key_lengths is not None:
        seen &= (j < key_lengths[:, None, None])[:, None]
    return seen


@pytest.mark.parametrize("queries,keys", [(9, 9), (1, 9), (5, 20), (20, 9)])
def test_dot_product_attention(eager, queries, keys):
    """Against pydet's own under the mask that says the same, bit for bit, and beside jax.nn's."""
    q, k, v = problem(queries=queries, keys=keys, d=32, e=32)
    turned = [tokens_first(x) for x in (q, k, v)]
    some, bias = normal(2, 1, queries, keys) > -1, normal(1, 4, queries, keys, seed=3)
    lengths, ends = np.array([queries, queries // 2], np.int32), np.array([keys - 1, 3], np.int32)
    drawn = itertools.product((False, True), (None, (3, 2), (40, 0)), (None, lengths), (None, ends), (None, some))
    for number, (causal, window, given, key_given, mask) in enumerate(drawn):
        if window == (3, 2) and queries == 20:
            continue
        if (queries, keys) != (9, 9) and number % 3:
            continue
        options = {"is_causal": causal, "local_window_size": window, "bias": bias if number % 2 else None}
        options |= {"query_seq_lengths": given, "key_value_seq_lengths": key_given, "mask": mask}
        out, lse = pj.dot_product_attention(*turned, return_residual=True, **options)
        seen = by_mask(queries, keys, causal, window, given, key_given, mask)
        want, logs = eager.attention(q, k, v, allowed=seen, bias=options["bias"], return_lse=True)
        same(out, tokens_first(want)), same(lse, tokens_first(logs))
        theirs = np.asarray(in_fp32(lambda options=options: jax.nn.dot_product_attention(*turned, **options))())
        there = np.broadcast_to(seen, (2, 4, queries, keys)).any(-1).swapaxes(1, 2)[..., None]
        np.testing.assert_allclose(out, np.where(there, theirs, 0), rtol=1e-4, atol=1e-5)
    one = jax.jit(pj.dot_product_attention)(*(x[0] for x in turned))
    same(one, tokens_first(pydet.attention(q, k, v))[0])


def test_dot_product_attention_in_transforms(eager):
    q, k, v = problem(queries=9, keys=9)
    turned = [tokens_first(x) for x in (q, k, v)]
    want = tokens_first(eager.attention(q, k, v, causal=True))
    same(jax.vmap(lambda *x: pj.dot_product_attention(*x, is_causal=True))(*turned), want)
    same(jax.jit(lambda *x: pj.dot_product_attention(*x, is_causal=True, scale=0.125))(*turned), want)


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_refuses():
    q, k, v = problem()
    for arguments, options, sentence in (
        ((q[0], k, v), {}, "q is 4x5x64, want BxHxQxD"),
        ((q, k.astype(np.float16), v), {}, "k is float16, want float32 as q is"),
        ((q, k, v[:, :, 1:]), {}, "v is 2x2x149x64, want 2x2x150x64"),
        ((q[:, :3], k, v), {}, "q has 3 heads, want a multiple of the 2 of k and v"),
        ((q, k[..., :32], v), {}, "k is 2x2x150x32, want heads of 64 elements as q's"),
        ((q[:1], k, v), {}, "k is 2x2x150x64, want one of 1 sequences"),
        ((q, k, v), {"allowed": normal(5, 150)}, "allowed is float32, want bool"),
        ((q, k, v), {"allowed": normal(5, 149) > 0}, "allowed is 5x149, want one that broadcasts to 2x4x5x150"),
        ((q, k, v), {"allowed": [True]}, "allowed is list, want bool"),
        ((q, k, v), {"seqlens_k": np.zeros(2, np.int64)}, "seqlens_k is int64, want int32"),
        ((q, k, v), {"first_key": np.zeros(3, np.int32)}, "first_key is 3, want 2"),
        ((q, k, v), {"sinks": normal(2)}, "sinks is 2, want 4"),
        ((q, k, v), {"scale": 0}, r"scale is 0, want a number from 2\^-100 to 2\^100, or None for 1 / sqrt\(D\)"),
        ((q, k, v), {"scale": float("nan")}, "scale is nan, want a number"),
        ((q, k, v), {"softcap": -1.0}, "softcap is -1, want a number from"),
        ((q, k, v), {"causal": 1}, "causal is 1, want True or False"),
        ((q, k, v), {"window": 3}, "window is 3, want a pair"),
        ((q, k, v), {"window": (-1, 0)}, r"window_left is -1, want 0 to 2\^40 keys, or None for any"),
        ((q, k, v), {"kv_chunk": 64}, "kv_chunk is 64, want a positive multiple of 128"),
        ((q, k, v), {"kv_chunk": 2**63}, "kv_chunk is 9223372036854775808, want a positive multiple of 128"),
        ((q, k, v), {"arithmetic": "sm91"}, "arithmetic is 'sm91'"),
    ):
        refuses(f"^attention: {sentence}", pj.attention, *arguments, **options)
    refuses("attention: scale is traced", jax.jit(lambda x: pj.attention(q, k, v, scale=x)), 0.5)


def test_dot_product_attention_refuses():
    q, k, v = (tokens_first(x) for x in problem(queries=20, keys=9))
    for arguments, options, sentence in (
        ((q[0, 0], k, v), {}, "query is 4x64, want BTNH or TNH"),
        ((q, k[0], v), {}, "key is 9x2x64, want BSKH"),
        ((q[0], k[0], v), {}, "value is 2x9x2x64, want SKH"),
        ((q[..., :32], k, v), {}, "key is 2x9x2x64, want 2xSxKx32"),
        ((q, k, v[:, 1:]), {}, "value is 2x8x2x64, want 2x9x2xH"),
        ((q[:, :, :3], k, v), {}, "query has 3 heads, want a multiple of the 2"),
        ((q, k.astype(np.float16), v), {}, "key is float16, want float32"),
        ((q, k, v), {"mask": normal(20, 8) > 0}, "mask is 20x8, want one that broadcasts to 2x4x20x9"),
        ((q, k, v), {"mask": normal(20, 9)}, "mask is float32, want bool"),
        ((q, k, v), {"query_seq_lengths": np.zeros(3, np.int32)}, "query_seq_lengths is 3, want 2"),
        ((q, k, v), {"key_value_seq_lengths": np.zeros(2)}, "key_value_seq_lengths is float64, want int32"),
        ((q, k, v), {"local_window_size": (1, 2, 3)}, r"local_window_size is \(1, 2, 3\), want None, a number of keys"),
        ((q, k, v), {"local_window_size": -1}, r"local_window_size is -1, want 0 to 2\^40"),
        (
            (q, k, v),
            {"local_window_size": 10},
            "local_window_size has 10 keys on the left, want 11 or more where there",
        ),
        ((q, k, v), {"implementation": "cudnn"}, "implementation is 'cudnn', want None: pydet's own"),
    ):
        refuses(f"^dot_product_attention: {sentence}", pj.dot_product_attention, *arguments, **options)
    assert pj.dot_product_attention(q, k, v, local_window_size=11).shape == q.shape
