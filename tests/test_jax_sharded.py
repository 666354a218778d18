"""pydet.jax under jit with arrays that are shared out among 1, 2 and 4 devices by their NamedShardings: the bits of one
device, and what XLA moves for it. In a process of its own, since the number of devices is asked for at its start."""

from test_jax import in_another_process

COMMON = """
    import re
    import jax, jax.numpy as jnp, numpy as np, pydet, pydet.jax as pj
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    random = np.random.default_rng(0)
    normal = lambda *shape, dtype="float32": jnp.asarray(random.standard_normal(shape, np.float32)).astype(dtype)
    MOVES = r"(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"

    EVERY = {"shapes": ((1,), (2,), (4,))}

    def check(function, operands, specs, moves=(), axes=("dp",), shapes=((4,),), results=None):
        '''The bits of one device on meshes of these shapes; nothing is moved but by `moves`. The last one's program.'''
        want = jax.jit(function)(*operands)
        for shape in shapes:
            mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), axes)
            own = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
            made = jax.jit(function).lower(*own).compile()
            found, text = made(*own), made.as_text()
            for y, z in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
                y, z = np.asarray(y), np.asarray(z)
                assert y.shape == z.shape and y.tobytes() == z.tobytes(), (shape, (y != z).sum(), y.size)
            used = set(re.findall(rf" {MOVES}(?:-start)?[(]", text))
            assert used <= set(moves), (shape, used)
            if results is not None and np.prod(shape) == 4:
                specs_found = [tuple(y.sharding.spec) for y in jax.tree.leaves(found)]
                assert specs_found == [tuple(spec) for spec in results], specs_found
        assert used == set(moves), (used, moves)
        return text
"""


def run(source):
    flags = "--xla_force_host_platform_device_count=4"
    in_another_process(COMMON + source, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


def test_products():
    run("""
    x, w, b, bf = normal(64, 32), normal(16, 32), normal(16), "bfloat16"
    # Rows and columns, and both: nothing is moved.
    check(pj.linear, (x, w, b), (P("dp"), P(), P()), results=[("dp",)], **EVERY)
    check(pj.linear, (normal(4, 6, 32), w, b), (P("dp"), P(), P()), results=[("dp",)])
    check(pj.linear, (x, w, b), (P(), P("dp"), P("dp")), results=[(None, "dp")], **EVERY)
    both = {"axes": ("dp", "tp"), "shapes": ((2, 2),)}
    check(pj.linear, (x, w, b), (P("dp"), P("tp"), P("tp")), **both, results=[("dp", "tp")])
    check(pj.gemm, (normal(4, 6, 32), normal(4, 32, 8)), (P("dp"), P("dp")), results=[("dp",)])
    numbers = (((2,), (0,)), ((0,), (1,)))
    dot = lambda a, b: pj.dot_general(a, b, numbers)
    check(dot, (normal(4, 6, 32), normal(32, 4, 8)), (P("dp"), P(None, "dp")), results=[("dp",)])
    # A sum that runs across devices: one chain, in blocks of columns, of rows, or one.
    cut, hands_on = (P(None, "dp"), P(None, "dp"), P()), ("all-reduce", "collective-permute")
    check(pj.linear, (normal(6, 32), normal(16, 32), b), cut, hands_on, results=[()], **EVERY)
    for m, n in ((8, 5), (5, 7)):
        halves = normal(m, 64, dtype=bf), normal(n, 64, dtype=bf), normal(n)
        check(lambda *given: pj.linear(*given, arithmetic="sm90"), halves, cut, hands_on)
    more = lambda a, b, c: pj.gemm(a, b, accumulate=c)
    check(more, (x, w.T, normal(64, 16)), (P(None, "dp"), P("dp"), P()), hands_on)
    check(pj.gemm_db, (x, normal(64, 16)), (P("dp"), P("dp")), hands_on)
    more = [P("dp", "tp"), P(None, "tp"), P()]
    check(pj.linear, (x, w, b), more, hands_on, **both, results=[("dp",)])
    together = [P(None, ("dp", "tp")), P(None, ("dp", "tp")), P()]
    check(pj.linear, (x, w, b), together, hands_on, **both)
    # By chunks: a fold, small and large; and a chain where there are many.
    for of, n, chunk, moves in (
        (128, 16, 16, ("all-gather",)), (256, 2999, 64, ("all-gather", "all-to-all")), (1024, 16, 16, hands_on)
    ):
        given = normal(65, of, dtype=bf), normal(n, of, dtype=bf), normal(n)
        chunks = lambda *given: pj.linear(*given, k_chunk=chunk, arithmetic="sm90")
        check(chunks, given, cut, moves, **(EVERY if of == 128 else {}))
    # What no device can begin: 8 of 16 k, a chunk across devices. Gathered.
    few = normal(6, 32, dtype=bf), normal(5, 32, dtype=bf), normal(5)
    check(lambda *given: pj.linear(*given, arithmetic="sm90"), few, cut, ("all-gather",))
    check(lambda *given: pj.linear(*given, k_chunk=16), (x, w, b), cut, ("all-gather",))
    # Subnormal sums, which XLA's own additions on a CPU flush; NaN.
    tiny = x * 1e-20, w * 1e-20, b * 1e-40
    assert (0 < np.abs(np.asarray(pj.linear(*tiny))) * 2.0**126).all()
    check(pj.linear, tiny, cut, hands_on)
    check(lambda *given: pj.linear(*given, k_chunk=16), tiny, cut, ("all-gather",))
    check(pj.linear, (x.at[3, 5].set(jnp.nan), w, b), cut, hands_on)
    """)


def test_products_with_room_for_copies():
    """What a Hopper is given for operands that it reads badly: a result more of each product, which decides no bit,
    alone, under vmap and grad, shared out, in shard_map; none of it where extents are symbols or there are initials."""
    run("""
    from pydet.jax import foreign

    x, w, b, start = normal(8, 36, dtype="bfloat16"), normal(16, 36, dtype="bfloat16"), normal(16), normal(8, 16)
    many = normal(3, 8, 36, dtype="bfloat16")
    mesh = Mesh(np.array(jax.devices()), "dp")
    each = lambda x, w: jax.shard_map(pj.linear, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))(x, w)
    loss = lambda x, w: (pj.linear(x, w).astype("float32") ** 2).sum()
    into = lambda x, w, start: pj.gemm(x, w.T, out_dtype="float32", accumulate=start)
    cases = {  # how many products have room
        "linear": (lambda *given: pj.linear(*given), (x, w, b), 1),
        "gemm": (lambda *given: pj.gemm(*given), (x, w.T), 1),
        "accumulate": (lambda *given: into(*given), (x, w, start), 1),
        "rows of one matrix": (lambda *given: pj.linear(*given), (many, w), 1),
        "vmap": (lambda *given: jax.vmap(pj.linear, (0, None))(*given), (many, w), 1),
        "batches": (lambda *given: pj.gemm(*given), (many, normal(3, 36, 8, dtype="bfloat16")), 0),
        "ieee": (lambda *given: pj.linear(*given, arithmetic="ieee"), (x, w), 0),
        "grad": (lambda *given: jax.grad(loss, (0, 1))(*given), (x, w), 3),
        "shard_map": (lambda *given: each(*given), (x, w), 1),
    }
    sharded = {"rows": (P("dp"), P()), "columns": (P(), P("dp"))}

    def results(room):
        jax.clear_caches()
        foreign._bytes_of_copy = lambda shape, dtype, transposed: 512 * (dtype == "bfloat16" and room)
        found = []
        for name, (function, operands, count) in cases.items():
            fresh = jax.jit(lambda *given: function(*given))
            made = fresh.lower(*operands).compile()
            rooms = len(re.findall(r"u8\\[1024\\][^)]*\\) custom-call", made.as_text()))
            assert rooms == (count if room else 0), (name, rooms)
            found += [np.asarray(y).tobytes() for y in jax.tree.leaves(made(*operands))]
        for name, specs in sharded.items():
            own = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip((x, w), specs, strict=True)]
            made = jax.jit(lambda x, w: pj.linear(x, w)).lower(*own).compile()
            assert ("u8[1024]" in made.as_text()) == room, name
            found.append(np.asarray(made(*own)).tobytes())
        return found

    assert results(True) == results(False)
    foreign._bytes_of_copy = lambda *given: 512
    rows, = jax.export.symbolic_shape("rows")
    spec = jax.ShapeDtypeStruct((rows, 36), "bfloat16")
    checks = [jax.export.DisabledSafetyCheck.custom_call("pydet_gemm")]
    exported = jax.export.export(jax.jit(lambda x, w: pj.linear(x, w)), disabled_checks=checks)(spec, w)
    assert np.asarray(exported.call(x, w)).tobytes() == np.asarray(pj.linear(x, w)).tobytes()
    """)


def test_gradients_of_products():
    run("""
    x, w, b = normal(64, 32), normal(16, 32), normal(16)
    gradients = jax.grad(lambda x, w, b: (pj.linear(x, w, b) ** 2).sum(), (0, 1, 2))
    rows = P("dp"), P(), P()
    check(gradients, (x, w, b), rows, ("all-reduce", "collective-permute"), results=[("dp",), (), ()], **EVERY)
    chunked = jax.grad(lambda x, w, b: (pj.linear(x, w, b, k_chunk=16) ** 2).sum(), (0, 1, 2))
    check(chunked, (x, w, b), rows, ("all-gather",), results=[("dp",), (), ()], **EVERY)  # of sums
    # Tensor parallel: dx is the sum over devices.
    columns = P(), P("dp"), P("dp")
    moves = "all-reduce", "collective-permute"
    check(gradients, (x, w, b), columns, moves, results=[(), ("dp",), ("dp",)])
    # Weights that are cut by the axis of rows (FSDP) are gathered; their gradients have their places again.
    check(gradients, (x, w, b), (P("dp"), P("dp"), P("dp")), ("all-gather", *moves))
    sizes = jnp.array([10, 0, 40], jnp.int32)
    ragged = lambda x, w: pj.ragged_dot(x, w, sizes)
    check(ragged, (x, normal(3, 32, 8)), (P("dp"), P()), results=[("dp",)])
    check(ragged, (x, normal(3, 32, 8)), (P(), P(None, None, "dp")), results=[(None, "dp")])
    of_both = jax.grad(lambda x, w: (ragged(x, w) ** 2).sum(), (0, 1))
    check(of_both, (x, normal(3, 32, 8)), (P("dp"), P()), ("all-gather",))
    """)


def test_rows():
    """Norms, softmax, activations, embeddings and what is random: rows of each device's own."""
    run("""
    x, weight, bias = normal(64, 32), normal(32), normal(32)
    rows = P("dp"), P(), P()
    rms, layer = (lambda x, w, b: pj.rms_norm(x, w, bias=b, eps=1e-5)), (lambda *given: pj.layer_norm(*given, eps=1e-5))
    for norm in (rms, layer):
        check(norm, (x, weight, bias), rows, results=[("dp",)])
        gradients = jax.grad(lambda *given: (norm(*given) ** 2).sum(), (0, 1, 2))
        check(gradients, (x, weight, bias), rows, ("all-to-all", "all-gather"), results=[("dp",), (), ()])
        odd = normal(4, 3, 31), normal(31), normal(31)  # columns that devices do not share
        check(gradients, odd, rows, ("all-gather",))
        check(gradients, (normal(3, 4, 32), weight, bias), (P(None, "dp"), P(), P()), ("all-to-all", "all-gather"))
        check(gradients, (normal(4, 4, 64), normal(64), normal(64)), (P("dp", "tp"), P(), P()),
              ("all-to-all", "all-gather"), axes=("dp", "tp"), shapes=((2, 2),))
    # Whole blocks of DWEIGHT_ROWS: their sums alone.
    blocks = jax.grad(lambda *given: (rms(*given) ** 2).sum(), (0, 1, 2))
    text = check(blocks, (normal(2048, 32), weight, bias), rows, ("all-gather",), results=[("dp",), (), ()], **EVERY)
    assert not re.search(r"= u32..?2048", text)
    check(blocks, (normal(65 * 1024, 8), normal(8), normal(8)), rows, ("all-gather",))  # more than one fold takes
    # Heads with weights of their own, rows and heads cut.
    heads = normal(8, 4, 32), normal(4, 32), normal(4, 32)
    check(rms, heads, (P(None, "dp"), P("dp"), P("dp")), results=[(None, "dp")])
    check(blocks, heads, (P(None, "dp"), P("dp"), P("dp")), results=[(None, "dp"), ("dp",), ("dp",)])
    check(blocks, heads, rows, ("all-to-all", "all-gather"))
    more = lambda x, r, w: pj.rms_norm(x, w, residual=r, eps=1e-5)
    check(more, (x, x, weight), (P("dp"), P("dp"), P()), results=[("dp",), ("dp",)])
    def pull(x, r, w, dy, ds):
        return jax.vjp(more, x, r, w)[1]((dy, ds))
    check(pull, (x, x, weight, x, x), (P("dp"), P("dp"), P(), P("dp"), P("dp")), ("all-to-all", "all-gather"))
    by_hand = lambda dy, x, w, r, a: pj.rmsnorm_backward(dy, x, w, r, accumulate=a)
    check(by_hand, (x, x, weight, normal(64), normal(32)), (P("dp"), P("dp"), P(), P("dp"), P()),
          ("all-to-all", "all-gather"))
    many = jax.vmap(lambda x, w: pj.rms_norm(x, w, eps=1e-5))
    check(many, (normal(4, 6, 32), normal(4, 32)), (P("dp"), P("dp")), results=[("dp",)])
    check(jax.grad(lambda x, w: (many(x, w) ** 2).sum(), (0, 1)), (normal(4, 6, 32), normal(4, 32)), (P("dp"), P("dp")))

    index = jnp.arange(64, dtype=jnp.int32) % 32
    for function in (pj.softmax, pj.log_softmax, pj.silu, pj.gelu, lambda x: pj.swiglu(x, x)):
        check(function, (x,), (P("dp"),), results=[("dp",)])
        check(jax.grad(lambda x: (function(x) ** 2).sum()), (x,), (P("dp"),), results=[("dp",)])
    check(pj.silu, (x,), (P(None, "dp"),), results=[(None, "dp")])
    check(pj.softmax, (x,), (P(None, "dp"),), ("all-gather",))
    check(pj.log_prob, (x, index), (P("dp"), P("dp")), results=[("dp",)])
    check(jax.grad(lambda x, i: pj.log_prob(x, i).sum()), (x, index), (P("dp"), P("dp")), results=[("dp",)])
    check(pj.sample, (x, index, index), (P("dp"),) * 3)
    check(lambda x: pj.topk(x, 3), (x,), (P("dp"),))
    check(pj.quantize, (normal(16, 256),), (P("dp"),), results=[("dp",), ("dp",)])
    group = lambda x: pj.quantize(x, granularity="group")
    check(group, (normal(16, 256),), (P("dp"),))
    check(lambda x: pj.quantize(x, granularity="block"), (normal(512, 256),), (P("dp"),), ("all-gather",))

    def scaled(x, w):
        (a, sa), (b, sb) = pj.quantize(x), pj.quantize(w)
        return pj.scaled_gemm(a, b.T, a_scale=sa, b_scale=sb.T, k_chunk=0)
    check(scaled, (normal(16, 256), normal(8, 256)), (P("dp"), P()), results=[("dp",)])
    check(scaled, (normal(16, 256), normal(8, 256)), (P(), P("dp")), results=[(None, "dp")])

    table, ids = normal(50, 32), jnp.asarray(random.integers(0, 50, (8, 6)).astype(np.int32))
    check(pj.embedding, (table, ids), (P(), P("dp")), results=[("dp",)])
    check(pj.embedding, (table, ids), (P(None, "dp"), P()), results=[(None, None, "dp")])
    check(pj.embedding, (normal(52, 32), ids), (P("dp"), P()), ("all-gather",))
    of_table = jax.grad(lambda t, i: (pj.embedding(t, i) ** 2).sum())
    check(of_table, (table, ids), (P(), P("dp")), ("all-to-all", "all-gather"), **EVERY)
    check(of_table, (normal(50, 31), ids), (P(), P("dp")), ("all-gather",))
    check(of_table, (table, ids), (P(None, "dp"), P()), results=[(None, "dp")])
    converted = pj.convert(jax.grad(lambda t, i: (jnp.take(t, i, 0) ** 2).sum()))
    check(converted, (table, ids), (P(), P("dp")), ("all-to-all", "all-gather"), **EVERY)
    add = lambda d, i, a: pj.embedding_backward(d, i, 50, accumulate=a)
    check(add, (normal(8, 6, 32), ids, table), (P("dp"), P("dp"), P()), ("all-to-all", "all-gather"))
    """)


def test_attention():
    run("""
    q, k, v = normal(4, 8, 17, 16), normal(4, 4, 17, 16), normal(4, 4, 17, 24)
    by_batch, by_head = P("dp"), P(None, "dp")
    attend = lambda q, k, v, **more: pj.attention(q, k, v, causal=True, **more)
    gradients = jax.grad(lambda *given: (attend(*given) ** 2).sum(), (0, 1, 2))
    for cut in (by_batch, by_head):
        check(attend, (q, k, v), (cut,) * 3, results=[tuple(cut)])
        check(gradients, (q, k, v), (cut,) * 3, results=[tuple(cut)] * 3, **EVERY)
    check(attend, (normal(4, 8, 16, 16), k, v), (P(None, None, "dp"), P(), P()), ("all-gather",))  # places of queries
    one, rest = normal(4, 8, 17, 16), (normal(4, 1, 17, 16), normal(4, 1, 17, 24))
    check(attend, (one, *rest), (by_head, P(), P()), results=[(None, "dp")])  # heads of one group
    check(gradients, (one, *rest), (by_head, P(), P()), ("all-gather",))
    first, last = jnp.array([0, 3, 1, 16], jnp.int32), jnp.array([17, 9, 1, 17], jnp.int32)
    allowed, bias, sinks = jnp.asarray(random.random((4, 1, 17, 17)) < 0.8), normal(1, 8, 1, 17), normal(8)

    def all_of_it(q, k, v, first, last, allowed, bias, sinks):
        beside = {"first_key": first, "seqlens_k": last, "allowed": allowed, "bias": bias, "sinks": sinks}
        return pj.attention(q, k, v, return_lse=True, **beside)
    given = (q, k, v, first, last, allowed, bias, sinks)
    of_batch = (by_batch,) * 6 + (P(), P())
    of_heads = (by_head,) * 3 + (P(), P(), P(), by_head, P("dp"))
    check(all_of_it, given, of_batch, results=[("dp",)] * 2)
    check(all_of_it, given, of_heads, results=[(None, "dp")] * 2)
    loss = lambda *given: (all_of_it(*given)[0] ** 2).sum()
    of_all = jax.grad(lambda q, k, v, sinks, *more: loss(q, k, v, *more, sinks), (0, 1, 2, 3))
    turned = (q, k, v, sinks, first, last, allowed, bias)
    check(of_all, turned, (by_head,) * 3 + (P("dp"), P(), P(), P(), by_head))
    check(of_all, turned, (by_batch,) * 3 + (P(),) + (by_batch,) * 3 + (P(),), ("all-gather",))  # the sinks' sum
    named = [x.swapaxes(1, 2) for x in (q, k, v)]
    for cut in (P("dp"), P(None, None, "dp")):
        check(lambda *x: pj.dot_product_attention(*x, is_causal=True), named, (cut,) * 3, results=[tuple(cut)])
    check(jax.vmap(attend), (q[:, None], k[:, None], v[:, None]), (P("dp"),) * 3, results=[("dp",)])

    ends = jnp.array([0, 20, 33, 60], jnp.int32)
    tokens = normal(60, 8, 16), normal(60, 4, 16), normal(60, 4, 16)
    varlen = lambda q, k, v: pj.attention_varlen(q, k, v, ends, ends, causal=True)
    check(varlen, tokens, (by_head,) * 3, results=[(None, "dp")])
    check(jax.grad(lambda *x: (varlen(*x) ** 2).sum(), (0, 1, 2)), tokens, (by_head,) * 3, results=[(None, "dp")] * 3)
    check(varlen, tokens, (P("dp"),) * 3, ("all-gather",))
    caches = normal(12, 8, 4, 16), normal(12, 8, 4, 16)
    table, lengths = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)[::-1], jnp.array([24, 3, 9, 17], jnp.int32)
    paged = lambda q, kc, vc, t, n: pj.attention_paged(q, kc, vc, t, n)
    given = (normal(4, 8, 1, 16), *caches, table, lengths)
    by_group = P(None, None, "dp")
    check(paged, given, (by_head, by_group, by_group, P(), P()), results=[(None, "dp")])
    check(paged, given, (P("dp"), P(), P(), P("dp"), P("dp")), results=[("dp",)])
    """)


def test_what_else_a_program_may_be():
    """Axes that are explicit, arrays of no mesh, a map over some axes, vmap, a loop, a converted function, export."""
    run("""
    from jax import export
    x, w = normal(8, 16), normal(4, 16)
    kind = jax.sharding.AxisType
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(kind.Explicit,))
    own = jax.device_put(x, NamedSharding(mesh, P("dp"))), jax.device_put(w, NamedSharding(mesh, P()))
    loss = lambda x, w: (pj.silu(pj.rms_norm(pj.linear(x, w), eps=1e-5)) ** 2).sum()
    for function in (pj.linear, lambda x, w: pj.silu(pj.linear(x[None], w))[0], jax.grad(loss, (0, 1))):
        for y, z in zip(*(jax.tree.leaves(jax.jit(function)(*given)) for given in (own, (x, w))), strict=True):
            assert np.asarray(y).tobytes() == np.asarray(z).tobytes()
            assert y.shape != (8, 4) or tuple(y.sharding.spec)[0] == "dp", y.sharding
    check(jax.vmap(lambda x: pj.linear(x, w)), (normal(4, 6, 16),), (P("dp"),), results=[("dp",)])
    loop = lambda x, w: jax.lax.scan(lambda h, w: (pj.softmax(pj.linear(h, w)), None), x, w)[0]
    check(loop, (x, normal(3, 16, 16)), (P("dp"), P()), results=[("dp",)])
    check(pj.convert(lambda x, w: jax.nn.softmax(x @ w.T)), (x, w), (P("dp"), P()), results=[("dp",)])
    assert pj.coverage(lambda x: pj.silu(x), x).left == {}
    # Within a map over all of a mesh's axes, and over some, which without Shardy would end the process in XLA.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "tp"))
    parts = lambda axes: jax.shard_map(lambda x: pj.silu(pj.linear(x, w)), mesh=mesh, in_specs=P("dp"),
                                       out_specs=P("dp"), axis_names=axes)  # fmt: skip
    for axes, shardy in (({"dp", "tp"}, False), ({"dp", "tp"}, True), ({"dp"}, True)):
        jax.config.update("jax_use_shardy_partitioner", shardy)
        assert np.asarray(jax.jit(parts(axes))(x)).tobytes() == np.asarray(pj.silu(pj.linear(x, w))).tobytes()
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        jax.jit(parts({"dp"}))(x)
        raise AssertionError("not refused")
    except pydet.Error as refused:
        assert str(refused).startswith("gemm: within shard_map over dp alone, of a mesh of dp, tp, want Shardy: ")
    # A function that closes over a weight, by the partitioner before Shardy too.
    check(jax.vmap(lambda x: pj.linear(x, w)), (normal(4, 6, 16),), (P("dp"),), results=[("dp",)])
    jax.config.update("jax_use_shardy_partitioner", True)
    known = [export.DisabledSafetyCheck.custom_call("pydet_gemm")]
    made = export.export(jax.jit(pj.linear), disabled_checks=known)(x, w)
    assert np.asarray(made.call(x, w)).tobytes() == np.asarray(pj.linear(x, w)).tobytes()
    y = jax.device_put(x, jax.devices()[2])  # not the first one
    assert np.asarray(pj.silu(y)).tobytes() == np.asarray(pj.silu(x)).tobytes() and y.devices() == {jax.devices()[2]}
    """)


def test_a_training_step_gathers_no_activations():
    """Data parallel: every parameter's gradient has the bits of one device, and of activations nothing is gathered."""
    run("""
    tokens, width, wide, words = 2048, 32, 64, 40
    ids, labels = (jnp.asarray(random.integers(0, words, (tokens,)).astype(np.int32)) for _ in range(2))
    params = {"table": normal(words, width), "norm": normal(width), "up": normal(wide, width), "bias": normal(wide),
              "down": normal(width, wide), "head": normal(words, width)}  # fmt: skip

    def loss(params, ids, labels):
        x = pj.embedding(params["table"], ids)
        h = pj.linear(pj.rms_norm(x, params["norm"], eps=1e-5), params["up"], params["bias"])
        x = x + pj.linear(pj.silu(h), params["down"])
        return -pj.log_prob(pj.linear(x, params["head"]), labels).sum() / tokens

    names = sorted(params)
    step = lambda ids, labels, *values: jax.grad(lambda p: loss(p, ids, labels))(dict(zip(names, values)))
    given, specs = (ids, labels, *(params[n] for n in names)), (P("dp"), P("dp"), *[P()] * len(names))
    moves = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    text = check(step, given, specs, moves, **EVERY)
    gathered = [re.search(r"= .*?(\\w+)\\[([0-9,]*)\\]", line) for line in text.splitlines() if " all-gather" in line]
    sizes = {found.group(0): np.prod([int(n) for n in found.group(2).split(",")]) for found in gathered}
    assert sizes and max(sizes.values()) <= tokens < tokens * width, sizes  # ids, sums of blocks, the table's gradient
    """)
