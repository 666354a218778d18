"""What begins and ends a language model on an NVIDIA GPU: embeddings, activations, the head and its loss, sampling.

Beside PyTorch's own functions and what is composed of them; a copy of as many bytes is the ceiling of what only moves
memory, and of the head the three products that must be made, by cuBLAS. PyTorch's embedding backward and index_add_ add
by atomics or in an order of their own, torch.multinomial draws by the state of a generator.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

import pydet
import pydet.torch
from bench import draws
from bench.cuda_norms import sets_of
from bench.harness import Row, Variant

try:
    from flashinfer import sampling as flashinfer
except ImportError:
    flashinfer = None

DEVICE = "cuda"
VOCABULARIES = [32000, 50257, 128256, 129280, 151936, 152064, 262144]


def normal(*shape):
    return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def integers(most, *shape):
    return torch.randint(most, shape, device=DEVICE)


def copying(tensors):
    """What moves as many bytes as these tensors have, reads and writes together."""
    count = sum(t.numel() * t.element_size() for t in tensors) // 8
    return partial(empty(count, dtype=torch.float32).copy_, empty(count, dtype=torch.float32))


# ---- Sampling --------------------------------------------------------------------------------------------------------

FILTERS = {
    "": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9, min_p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
TEMPERATURE = 0.8


def probabilities(x, top_k=0, top_p=1.0, min_p=0.0):
    """As engines filter in PyTorch: logits sorted, probabilities added in that order."""
    x = x.float() / TEMPERATURE
    if top_k:
        x = x.masked_fill(x < torch.topk(x, top_k).values[..., -1:], -math.inf)
    if top_p < 1:
        ordered, index = x.sort(-1)
        cut = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        cut[..., -1] = False
        x = torch.empty_like(x).scatter_(-1, index, ordered.masked_fill(cut, -math.inf))
    p = x.softmax(-1)
    return p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0.0) if min_p else p


def race(p):
    """A token without multinomial's check: probabilities over exponential noise, as vLLM draws."""
    return p.div_(torch.empty_like(p).exponential_()).argmax(-1)


def of_flashinfer(x, top_k=0, top_p=1.0, min_p=0.0):
    """A token by FlashInfer, whose logits are fp32, by the function that it has for these filters."""
    told = {"seed": 1, "offset": 0}  # else the host asks a generator, which a graph cannot repeat
    if min_p:
        p = flashinfer.top_k_renorm_probs(flashinfer.softmax(x, TEMPERATURE), top_k)
        return flashinfer.min_p_sampling_from_probs(flashinfer.top_p_renorm_probs(p, top_p), min_p, **told)
    if top_p < 1:
        return flashinfer.top_p_sampling_from_probs(flashinfer.softmax(x, TEMPERATURE), top_p, **told)
    x = x.float().div_(TEMPERATURE)
    if top_k:
        return flashinfer.top_k_top_p_sampling_from_logits(x, top_k, top_p, **told)
    return flashinfer.sampling_from_logits(x, **told)


def sampling(m, n, filters=""):
    xs, options = [4 * normal(m, n) for _ in range(sets_of(2 * m * n))], FILTERS[filters]
    tokens = [empty(m, dtype=torch.int64) for _ in xs]
    seed, position = integers(1 << 60, m), integers(4096, m)
    call = partial(pydet.sample, temperature=TEMPERATURE, return_log_prob=False, **options)
    variants = [
        Variant(
            "pydet", [partial(call, x, seed, position, out=y) for x, y in zip(xs, tokens, strict=True)], tokens[:1]
        ),
        Variant("multinomial", [partial(lambda x: torch.multinomial(probabilities(x, **options), 1), x) for x in xs]),
        Variant("exponential race", [partial(lambda x: race(probabilities(x, **options)), x) for x in xs]),
        Variant("argmax", [partial(torch.argmax, x, -1) for x in xs]),
    ]
    if flashinfer:
        variants.append(Variant("flashinfer", [partial(of_flashinfer, x, **options) for x in xs]))
    return Row(
        f"sample, {filters}" if filters else "sample", f"{m} x {n}", "bf16", variants, "multinomial", 2 * m * n, "GB/s"
    )


def sample_rows(quick):
    for filters in FILTERS:
        for m in (1, 64) if quick else (1, 16, 64, 512):
            for n in (152064,) if quick else (32000, 152064):
                yield partial(sampling, m, n, filters)


def largest(m, n, k):
    xs = [normal(m, n) for _ in range(sets_of(2 * m * n))]
    outs = [(empty(m, k), integers(2, m, k)) for _ in xs]
    ours = [partial(pydet.topk, x, k, values=v, index=i) for x, (v, i) in zip(xs, outs, strict=True)]
    variants = [
        Variant("pydet", ours, [*outs[0]]),
        Variant("torch", [partial(torch.topk, x, k) for x in xs]),
    ]
    return Row(f"topk, k = {k}", f"{m} x {n}", "bf16", variants, "torch", 2 * m * n, "GB/s")


def topk_rows(quick):
    for m, n, k in [(1, 152064, 50), (64, 152064, 50)] if quick else TOPK:
        yield partial(largest, m, n, k)


TOPK = [(m, n, k) for n, k in ((152064, 50), (152064, 1000), (32000, 1)) for m in (1, 16, 64, 512)]
TOPK += [(m, 256, 8) for m in (64, 4096, 65536)]  # a router's


# ---- Activations -----------------------------------------------------------------------------------------------------

STOCK = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "sigmoid": torch.sigmoid}
ATEN = torch.ops.aten
SLOPES = {
    "silu": lambda dy, x: ATEN.silu_backward(dy, x),
    "gelu": lambda dy, x: ATEN.gelu_backward(dy, x),
    "gelu_tanh": lambda dy, x: ATEN.gelu_backward(dy, x, approximate="tanh"),
}


def activating(kind, gated, m, n):
    sets = [(normal(m, n), normal(m, n), empty(m, n)) for _ in range(sets_of(6 * m * n))]
    f = STOCK[kind]
    if gated:
        ours = [partial(pydet.activation, x, kind, up=up, out=y) for x, up, y in sets]
        theirs = [partial(lambda x, up: f(x) * up, x, up) for x, up, _ in sets]
    else:
        ours = [partial(pydet.activation, x, kind, out=y) for x, _, y in sets]
        theirs = [partial(f, x) for x, *_ in sets]
    moved = [copying((x, x, x) if gated else (x, x)) for x, *_ in sets]
    variants = [Variant("pydet", ours, [sets[0][2]]), Variant("torch", theirs), Variant("copy", moved)]
    name = f"{kind} of a gate" if gated else kind
    return Row(name, f"{m} x {n}", "bf16", variants, "torch", (6 if gated else 4) * m * n, "GB/s")


def activation_gradient(kind, gated, m, n):
    sets = [tuple(normal(m, n) for _ in range(5)) for _ in range(sets_of(10 * m * n))]
    f, slope = STOCK[kind], SLOPES[kind]
    if gated:
        ours = [partial(pydet.activation_backward, dy, x, kind, up=up, out=dx, dup=dup) for dy, x, up, dx, dup in sets]
        theirs = [partial(lambda dy, x, up: (slope(dy * up, x), dy * f(x)), dy, x, up) for dy, x, up, *_ in sets]
        outputs = [sets[0][3], sets[0][4]]
    else:
        ours = [partial(pydet.activation_backward, dy, x, kind, out=dx) for dy, x, _, dx, _ in sets]
        theirs = [partial(slope, dy, x) for dy, x, *_ in sets]
        outputs = [sets[0][3]]
    count = 5 if gated else 3
    moved = [copying([x] * count) for _, x, *_ in sets]
    variants = [Variant("pydet", ours, outputs), Variant("torch", theirs), Variant("copy", moved)]
    name = f"{kind} of a gate, backward" if gated else f"{kind}, backward"
    return Row(name, f"{m} x {n}", "bf16", variants, "torch", 2 * count * m * n, "GB/s")


def activation_rows(quick):
    for m, n in [(4096, 14336)] if quick else [(16, 14336), (4096, 1024), (4096, 14336), (16384, 8192)]:
        for kind in ("silu", "gelu", "gelu_tanh"):
            for gated in (False, True):
                yield partial(activating, kind, gated, m, n)
                yield partial(activation_gradient, kind, gated, m, n)


# ---- Embeddings ------------------------------------------------------------------------------------------------------


def words(tokens, rows):
    """Ids as text has them: the k-th most frequent has a share of about 1 / k."""
    return (rows ** torch.rand(tokens, device=DEVICE)).long().clamp_(0, rows - 1)


def captured(call):
    """Whether a CUDA graph takes it: some of PyTorch's sums wait for the device."""
    if DEVICE != "cuda":
        return True
    try:
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    except RuntimeError as problem:
        print(f"left out, since no CUDA graph takes it: {str(problem).splitlines()[0]}")
        torch.cuda.synchronize()
        return False
    return True


def looking_up(tokens, rows, n):
    w, outs = (
        normal(rows, n),
        [empty(tokens, n) for _ in range(sets_of(4 * tokens * n))],
    )
    ids = [words(tokens, rows) for _ in outs]
    variants = [
        Variant(
            "pydet", [partial(pydet.embedding, w, i, out=out) for i, out in zip(ids, outs, strict=True)], [outs[0]]
        ),
        Variant("torch", [partial(F.embedding, i, w) for i in ids]),
        Variant("copy", [copying((out, out)) for out in outs]),
    ]
    return Row("embedding", f"{tokens} x {n} of {rows}", "bf16", variants, "torch", 4 * tokens * n, "GB/s")


def table_gradient(tokens, rows, n):
    """A gradient of the whole table, in bf16. PyTorch makes a new one in each call."""
    sets = [(normal(tokens, n), words(tokens, rows), empty(rows, n)) for _ in range(2)]
    theirs = [partial(ATEN.embedding_dense_backward, dout, ids, rows, -1, False) for dout, ids, _ in sets]
    ours = [partial(pydet.embedding_backward, dout, ids, out=dw) for dout, ids, dw in sets]
    made = [partial(pydet.embedding_backward, dout, ids, rows) for dout, ids, _ in sets]
    variants = [Variant("pydet", ours, [sets[0][2]]), Variant("pydet, no out", made)]
    if captured(theirs[0]):
        variants.append(Variant("torch", theirs))
    variants.append(Variant("zeros alone", [partial(torch.zeros, rows, n, dtype=torch.bfloat16, device=DEVICE)]))
    shape, work = f"{tokens} x {n} of {rows}", 2 * (tokens + rows) * n
    return Row("embedding backward", shape, "bf16", variants, variants[2].name, work, "GB/s")


def continued_gradient(tokens, rows, n):
    """Sums in fp32 that a micro-batch continues: rows without tokens are not touched."""
    sets = [(normal(tokens, n), words(tokens, rows)) for _ in range(2)]
    sums, others = (torch.zeros(rows, n, device=DEVICE) for _ in range(2))
    ours = [partial(pydet.embedding_backward, dout, ids, out=sums, accumulate=True) for dout, ids in sets]
    theirs = [partial(lambda dout, ids: others.index_add_(0, ids, dout.float()), dout, ids) for dout, ids in sets]
    variants = [Variant("pydet", ours), Variant("index_add_", theirs)]
    return Row(
        "embedding backward, continued",
        f"{tokens} x {n} of {rows}",
        "bf16",
        variants,
        "index_add_",
        2 * tokens * n,
        "GB/s",
    )


EMBEDDINGS = [
    (t, v, n) for t in (512, 8192, 65536) for v, n in ((128256, 4096), (151936, 896), (50257, 768), (32000, 4096))
]


def embedding_rows(quick):
    for tokens, rows, n in [(8192, 128256, 4096), (512, 32000, 4096)] if quick else EMBEDDINGS:
        for make in (looking_up, table_gradient, continued_gradient):
            yield partial(make, tokens, rows, n)


# ---- The head and its loss -------------------------------------------------------------------------------------------


def stock_loss(x, w, target, as_fp32):
    logits = F.linear(x, w)
    return F.cross_entropy(logits.float() if as_fp32 else logits, target)


def head_step(tokens, hidden, vocabulary):
    """The mean loss with its gradients by x and w; of the library's own function in C, with dw in fp32, in 256 MB."""
    x, w, target = normal(tokens, hidden), (0.02 * normal(vocabulary, hidden)), integers(vocabulary, tokens)
    dw = torch.empty(vocabulary, hidden, device=DEVICE)
    of_rows = torch.full((tokens,), -1.0 / tokens, device=DEVICE)
    in_fp32 = partial(pydet.linear_log_prob_backward, of_rows, x, w, target, dw=dw, of_log_prob=True)
    x, w = (t.detach().requires_grad_() for t in (x, w))
    d = normal(tokens, vocabulary)

    def step(loss, *more):
        return torch.autograd.grad(loss(x, w, target, *more), (x, w))

    def products(times=1):
        given, weight = x.detach(), w.detach()
        for _ in range(times):
            torch.mm(given, weight.T, out=d)
        return torch.mm(d, weight), torch.mm(d.T, given)

    variants = [
        Variant("pydet", [partial(step, pydet.torch.linear_cross_entropy)]),
        Variant("pydet, at once", [partial(pydet.torch.linear_cross_entropy_and_gradients, x, w, target)]),
        Variant("pydet, at once, dw in fp32", [in_fp32]),
        Variant("pydet, at once, dw continued", [partial(in_fp32, accumulate=True)]),
        Variant("stock, loss in fp32", [partial(step, stock_loss, True)]),
        Variant("stock, loss in bf16", [partial(step, stock_loss, False)]),
        Variant("three torch.mm", [products]),
        Variant("four torch.mm", [partial(products, 2)]),
    ]
    work = 6 * tokens * hidden * vocabulary
    return Row(
        "head and loss", f"{tokens} x {hidden} x {vocabulary}", "bf16", variants, "stock, loss in fp32", work, "GFLOP/s"
    )


def head_forward(tokens, hidden, vocabulary):
    """The log-probability of a column of each row, without gradients."""
    x, w, index = normal(tokens, hidden), 0.02 * normal(vocabulary, hidden), integers(vocabulary, tokens)

    def stock():
        return torch.log_softmax(F.linear(x, w).float(), -1).gather(-1, index[:, None])

    ask = partial(pydet.torch.linear_log_prob, x, w, index)
    variants = [
        Variant("pydet", [ask]),
        Variant("pydet, with the entropy", [partial(ask, return_entropy=True)]),
        Variant("pydet, with a temperature", [partial(ask, temperature=0.7)]),
        Variant("stock", [stock]),
        Variant("stock, with the entropy", [partial(stock_policy, x, w, index, 1.0)]),
        Variant("one torch.mm", [partial(torch.mm, x, w.T)]),
    ]
    work = 2 * tokens * hidden * vocabulary
    return Row("head, log_prob", f"{tokens} x {hidden} x {vocabulary}", "bf16", variants, "stock", work, "GFLOP/s")


def stock_policy(x, w, index, temperature):
    """(log-probability, entropy)"""
    logs = torch.log_softmax(F.linear(x, w).float() / temperature, -1)
    return logs.gather(-1, index[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def head_policy(tokens, hidden, vocabulary):
    """A policy's loss, of log-probabilities and an entropy at a temperature, with its gradients; and a loss whose
    gradients want more than the log-probability."""
    x, w, index = normal(tokens, hidden), 0.02 * normal(vocabulary, hidden), integers(vocabulary, tokens)
    x, w = (t.requires_grad_() for t in (x, w))

    def step(ask):
        log_prob, entropy = ask()
        return torch.autograd.grad(log_prob.mean() + 0.01 * entropy.mean(), (x, w))

    ours = partial(pydet.torch.linear_log_prob, x, w, index, temperature=0.7, return_entropy=True)
    smooth = {"label_smoothing": 0.1, "z_loss": 1e-4}
    variants = [
        Variant("pydet", [partial(step, ours)]),
        Variant(
            "pydet, smoothed and z-loss, at once",
            [partial(pydet.torch.linear_cross_entropy_and_gradients, x, w, index, **smooth)],
        ),
        Variant("stock", [partial(step, partial(stock_policy, x, w, index, 0.7))]),
    ]
    work = 6 * tokens * hidden * vocabulary
    return Row("head, policy", f"{tokens} x {hidden} x {vocabulary}", "bf16", variants, "stock", work, "GFLOP/s")


def head_dx(tokens, hidden, vocabulary):
    """The gradient by the head's input alone: few outputs, and a sum over the vocabulary."""
    d, sets = normal(tokens, vocabulary), [(normal(vocabulary, hidden), normal(tokens, hidden)) for _ in range(2)]
    other = normal(tokens, hidden)
    variants = [
        Variant("pydet", [partial(pydet.gemm, d, w, out=out) for w, out in sets], [sets[0][1]]),
        Variant("cublas", [partial(torch.mm, d, w, out=other) for w, _ in sets]),
    ]
    work = 2 * tokens * hidden * vocabulary
    return Row("head, dx", f"{tokens} x {hidden} x {vocabulary}", "bf16", variants, "cublas", work, "GFLOP/s")


def head_memory():
    """MB at most beside the operands, of the steps of head_step and head_policy."""
    found = []
    for shape in HEADS:
        for make in (head_step, head_policy):
            row = make(*shape)
            for variant in row.variants:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                kept = variant.calls[0]()
                torch.cuda.synchronize()
                most = torch.cuda.max_memory_allocated() - before
                found.append({"op": row.op, "shape": row.shape, "variant": variant.name, "MB": round(most / 2**20)})
                del kept
            del row, variant
    return found


HEADS = [(8192, 4096, 128256), (2048, 7168, 129280), (4096, 3584, 152064), (512, 4096, 128256)]


DX_ROWS = [1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192]


def head_rows(quick):
    for shape in HEADS[-1:] if quick else HEADS:
        for make in (head_step, head_forward, head_policy):
            yield partial(make, *shape)


def dx_rows(quick):
    for _, hidden, vocabulary in HEADS[:1] if quick else HEADS[:3:2]:
        for tokens in DX_ROWS[:3] if quick else DX_ROWS:
            yield partial(head_dx, tokens, hidden, vocabulary)


# ---- Drawn problems --------------------------------------------------------------------------------------------------


def draw_sample(g, between):
    return partial(sampling, between(1, 1024), g.choice(VOCABULARIES), g.choice(list(FILTERS)))


def draw_topk(g, between):
    n = g.choice([*VOCABULARIES, between(64, 8192)])
    return partial(largest, between(1, min(65536, (1 << 28) // n)), n, min(n, between(1, 1024)))


def draw_activation(g, between):
    n = between(256, 28672) // 8 * 8
    make = g.choice([activating, activation_gradient])
    return partial(make, g.choice(list(SLOPES)), g.random() < 0.5, between(1, (1 << 28) // n), n)


def draw_embedding(g, between):
    n = between(256, 8192) // 8 * 8
    rows = min(g.choice(VOCABULARIES), (3 << 30) // n // 2)
    make = g.choice([looking_up, table_gradient, continued_gradient])
    return partial(make, between(16, min(131072, (1 << 30) // n)), rows, n)


def draw_head(g, between):
    hidden, vocabulary = between(1024, 8192) // 64 * 64, g.choice(VOCABULARIES)
    most = min(8192, (1 << 30) // vocabulary)
    return partial(g.choice([head_step, head_forward]), between(16, most), hidden, vocabulary)


ROWS = {
    "sample": sample_rows,
    "topk": topk_rows,
    "activation": activation_rows,
    "embedding": embedding_rows,
    "head": head_rows,
    "head_dx": dx_rows,
}
RANDOM = {
    "sample": partial(draws.rows, draw_sample),
    "topk": partial(draws.rows, draw_topk),
    "activation": partial(draws.rows, draw_activation),
    "embedding": partial(draws.rows, draw_embedding),
    "head": partial(draws.rows, draw_head),
}
