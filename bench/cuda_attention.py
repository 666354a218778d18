"""Attention on one NVIDIA GPU: prefill, packed sequences, gradients, decoding from a dense cache and from pages, beside
its peers.

The peers are PyTorch's cuDNN and FlashAttention-2, and FlashAttention-3 and FlashInfer where they are installed; a peer
that refuses a problem is left out of its row, and said so once. A shape is sequences x queries x keys x heads x heads
of k and v x width of a head; of a pack, queries and keys are those of all. Decoding has a copy of its cache as ceiling.
"""

import functools
import math
import random
import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import pydet
from bench import draws
from bench.cuda_norms import sets_of
from bench.harness import Row, Variant
from bench.model_shapes import MODELS

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MOST_TOKENS = 16384  # of a prefill
MOST_CACHE = 1 << 32  # bytes of keys and values of a decoding step
ON_CPU = 1 << 24  # multiply-adds of a row that is compared with the CPU's as well


@dataclass(frozen=True)
class Drawn:
    """kind: "prefill", "varlen", "backward", "backward_varlen", "decode" or "paged". lengths: of a pack. window: keys
    before a query that it sees. mma: by the kernel for Ampere, Ada and consumers' Blackwell, which any GPU has."""

    kind: str
    heads: int
    groups: int
    d: int
    sequences: int
    queries: int
    keys: int
    causal: bool = True
    window: int | None = None
    dtype: str = "bf16"
    lengths: tuple[int, ...] = ()
    page: int = 0
    mma: bool = False

    @property
    def op(self):
        seen = "window" if self.window is not None else "causal" if self.causal else "full"
        kind = {"prefill": "attention", "backward_varlen": "backward, varlen"}.get(self.kind, self.kind)
        of = f", pages of {self.page}" if self.page else "" if self.kind == "decode" else f", {seen}"
        return f"{kind} {self.d}{of}{', mma' if self.mma else ''}"

    @property
    def shape(self):
        total = sum(self.lengths)
        extents = (self.sequences, total or self.queries, total or self.keys, self.heads, self.groups, self.d)
        return " x ".join(map(str, extents))

    def pairs(self):
        """Of a query and a key that it sees, in all sequences of one head."""

        def of(queries, keys):
            found = 0
            for place in range(keys - queries, keys):
                last = place if self.causal else keys - 1
                first = 0 if self.window is None else max(0, place - self.window)
                found += max(0, last + 1 - first)
            return found

        return sum(of(n, n) for n in self.lengths) or self.sequences * of(self.queries, self.keys)

    @property
    def backward(self):
        return self.kind.startswith("backward")

    def cache_bytes(self):
        return 4 * self.sequences * self.keys * self.groups * self.d


BY_MMA = {"prefill_mma": "prefill", "backward_mma": "backward"}


# ---- Draws -----------------------------------------------------------------------------------------------------------


def log_uniform(chance, least, most):
    return max(least, min(most, round(math.exp(chance.uniform(math.log(least), math.log(most))))))


def draw(kind, count, seed):
    """`count` problems of a kind, of the heads of published models."""
    if kind in BY_MMA:
        return [replace(one, mma=True) for one in draw(BY_MMA[kind], count, seed)]
    chance, models, found = random.Random(f"{kind} {seed}"), sorted(MODELS), []
    while len(found) < count:
        *_, heads, groups, d = MODELS[chance.choice(models)]
        dtype = chance.choices(("bf16", "fp16"), (85, 15))[0]
        one = Drawn(kind, heads, groups, d, 1, 1, 1, dtype=dtype)
        if kind not in ("decode", "paged"):
            tokens = log_uniform(chance, 128, MOST_TOKENS)
            seen = chance.choices(("causal", "full", "window"), (60, 20, 20))[0]
            window = log_uniform(chance, 64, 4096) if seen == "window" else None
            one = replace(one, causal=seen != "full", window=window)
        if kind in ("prefill", "backward"):
            sequences = log_uniform(chance, 1, MOST_TOKENS // tokens)
            one = replace(one, sequences=sequences, queries=tokens, keys=tokens)
        elif kind in ("varlen", "backward_varlen"):
            lengths = []
            while len(lengths) < 64 and sum(lengths) < tokens:
                lengths.append(min(log_uniform(chance, 16, tokens), tokens - sum(lengths)))
            chance.shuffle(lengths)
            one = replace(one, sequences=len(lengths), queries=max(lengths), keys=max(lengths), lengths=tuple(lengths))
        else:
            queries = 1 if chance.random() < 0.5 else chance.randint(2, 16)
            sequences, keys = log_uniform(chance, 1, 256), log_uniform(chance, 512, 131072)
            page = chance.choice((16, 64, 128, 256)) if kind == "paged" else 0
            keys = -(-keys // page) * page if page else keys
            one = replace(one, sequences=sequences, queries=queries, keys=keys, page=page)
            if one.cache_bytes() > MOST_CACHE:
                continue
        found.append(one)
    return found


def listed(kind, quick):
    """The shapes of a run without --random."""
    if kind in BY_MMA:
        yield from (replace(one, mma=True) for one in listed(BY_MMA[kind], quick))
        return
    widths = ((64, 32, 8), (128, 32, 8), (256, 16, 4))
    if kind in ("prefill", "backward"):
        for d, heads, groups in widths[1:2] if quick else widths:
            for sequences, tokens in ((8, 512), (16, 1536), (8, 3072), (4, 6144), (2, 12288))[:: 2 if quick else 1]:
                for causal in (True, False):
                    yield Drawn(kind, heads, groups, d, sequences, tokens, tokens, causal)
    elif kind in ("varlen", "backward_varlen"):
        lengths = (131, 1517, 40, 4096, 777, 2048, 300, 5000, 16, 2459)
        for d, heads, groups in widths[1:2] if quick else widths:
            yield Drawn(kind, heads, groups, d, len(lengths), max(lengths), max(lengths), lengths=lengths)
    else:
        shapes = [(1, 2048), (4, 2048), (1, 16384), (1, 131072), (16, 2048), (64, 1024), (64, 4096), (256, 2048)]
        for sequences, keys in shapes[::3] if quick else shapes:
            for queries in (1,) if quick else (1, 4):
                for page in ((16, 64, 256) if kind == "paged" else (0,))[:: 2 if quick else 1]:
                    yield Drawn(kind, 32, 8, 128, sequences, queries, keys, page=page)


# ---- Operands --------------------------------------------------------------------------------------------------------


@dataclass
class Operands:
    """q, k, v and out with tokens before heads; of pages k and v are the caches. starts: cumulative lengths. Of
    gradients dout, what the forward gave, and dq, dk, dv."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    starts: torch.Tensor | None = None
    table: torch.Tensor | None = None
    held: torch.Tensor | None = None  # keys of each sequence
    dout: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    gradients: tuple[torch.Tensor, ...] = ()

    def results(self):
        return list(self.gradients or (self.out,))


def operands(p):
    x = of_forward(p)
    if p.backward:
        x.dout, x.gradients = torch.randn_like(x.q), tuple(torch.empty_like(t) for t in (x.q, x.k, x.v))
        x.lse = forward(p, x, return_lse=True)()[1]
    return x


def of_forward(p):
    def make(*shape):
        return torch.randn(*shape, device=DEVICE).to(DTYPES[p.dtype])

    def integers(x):
        return torch.tensor(x, dtype=torch.int32, device=DEVICE)

    if p.lengths:
        q = make(sum(p.lengths), p.heads, p.d)
        k, v = (make(sum(p.lengths), p.groups, p.d) for _ in "kv")
        starts = integers([sum(p.lengths[:i]) for i in range(len(p.lengths) + 1)])
        return Operands(q, k, v, torch.empty_like(q), starts)
    q = make(p.sequences, p.queries, p.heads, p.d)
    if p.page:
        pages = p.keys // p.page
        k, v = (make(p.sequences * pages, p.page, p.groups, p.d) for _ in "kv")
        table = torch.randperm(p.sequences * pages, device=DEVICE).view(p.sequences, pages).to(torch.int32)
        return Operands(q, k, v, torch.empty_like(q), None, table, integers([p.keys] * p.sequences))
    k, v = (make(p.sequences, p.keys, p.groups, p.d) for _ in "kv")
    return Operands(q, k, v, torch.empty_like(q))


def sequence_of(p, x, s):
    """(q, k, v, out) of one sequence, [1, heads, tokens, d]."""
    if p.lengths:
        own = slice(int(x.starts[s]), int(x.starts[s + 1]))
        return [t[own].transpose(0, 1)[None] for t in (x.q, x.k, x.v, x.out)]
    if p.page:
        k, v = (t[x.table[s].long()].flatten(0, 1)[None] for t in (x.k, x.v))
        return [t.transpose(1, 2) for t in (x.q[s : s + 1], k, v, x.out[s : s + 1])]
    return [t[s : s + 1].transpose(1, 2) for t in (x.q, x.k, x.v, x.out)]


# ---- pydet and its peers: each makes the call of a set of operands ---------------------------------------------------


def kernel_of(p):
    """The name of the kernel that is asked for; None: whichever is chosen."""
    if not p.mma:
        return None
    arithmetic = "sm90" if torch.cuda.get_device_capability() >= (9, 0) else "sm80"
    return f"cuda_attention{'_backward' if p.backward else ''}_{arithmetic}_mma"


def ours(p, x):
    return backward(p, x) if p.backward else forward(p, x)


def backward(p, x):
    how = {"causal": p.causal, "window": None if p.window is None else (p.window, None), "kernel": kernel_of(p)}
    operands = x.dout, x.q, x.k, x.v, x.out
    if p.lengths:
        call = partial(pydet.attention_varlen_backward, *operands, x.lse, x.starts, x.starts)
        return partial(call, **how, **dict(zip(("dq", "dk", "dv"), x.gradients, strict=True)))
    turned = [t.transpose(1, 2) for t in operands]
    results = {name: t.transpose(1, 2) for name, t in zip(("dq", "dk", "dv"), x.gradients, strict=True)}
    return partial(pydet.attention_backward, *turned, x.lse, **how, **results)


def forward(p, x, **more):
    turned = [t.transpose(1, 2) for t in (x.q, x.k, x.v, x.out)]
    how = {"causal": p.causal, "window": None if p.window is None else (p.window, None), **more}
    if p.mma and not p.backward:
        how["kernel"] = kernel_of(p)
    if p.lengths:
        return partial(pydet.attention_varlen, x.q, x.k, x.v, x.starts, x.starts, out=x.out, **how)
    if p.page:
        return partial(pydet.attention_paged, turned[0], x.k, x.v, x.table, x.held, out=turned[3], **how)
    return partial(pydet.attention, *turned[:3], out=turned[3], **how)


def cudnn(p, x):
    if p.lengths or p.page or p.window is not None:
        raise NotImplementedError("torch gives cuDNN no packs, pages or windows")
    if p.causal and 1 < p.queries < p.keys:
        raise NotImplementedError("torch aligns cuDNN's causal mask to the first key")
    turned = [t.transpose(1, 2) for t in (x.q, x.k, x.v)]
    if p.backward:
        out, *behind = torch.ops.aten._scaled_dot_product_cudnn_attention(*turned, None, True, 0.0, p.causal, False)
        lse, starts_q, starts_k, most_q, most_k, seed, offset = behind[:7]
        places = (out, lse, seed, offset, None, starts_q, starts_k, most_q, most_k, 0.0, p.causal)
        call = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        return partial(call, x.dout.transpose(1, 2), *turned, *places)

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *turned, is_causal=p.causal and p.queries > 1, enable_gqa=p.heads != p.groups
            )

    return call


def flash(p, x):
    """FlashAttention-2 as torch has it; it aligns causal masks to the last key."""
    if p.page:
        raise NotImplementedError("pages are not compared with torch's flash")
    sides = {} if p.window is None else {"window_size_left": p.window, "window_size_right": 0}
    causal = p.causal and p.window is None
    call = torch.ops.aten._flash_attention_forward
    call = partial(call, x.q, x.k, x.v, x.starts, x.starts, p.queries, p.keys, 0.0, causal, False, **sides)
    if not p.backward:
        return call
    out, lse, *state, _ = call()
    places = (out, lse, x.starts, x.starts, p.queries, p.keys, 0.0, causal, *state)
    return partial(torch.ops.aten._flash_attention_backward, x.dout, x.q, x.k, x.v, *places, **sides)


def fa3(p, x):
    if p.backward:
        raise NotImplementedError("its gradients are not compared")
    import flash_attn_interface as module

    how = {"causal": p.causal, "window_size": (-1, -1) if p.window is None else (p.window, 0)}
    if p.lengths:
        starts = (x.starts, x.starts, p.queries, p.keys)
        return partial(module.flash_attn_varlen_func, x.q, x.k, x.v, *starts, **how)
    if p.page:
        call = module.flash_attn_with_kvcache
        return partial(call, x.q, x.k, x.v, cache_seqlens=x.held, page_table=x.table, **how)
    if p.kind == "decode":
        return partial(module.flash_attn_with_kvcache, x.q, x.k, x.v, **how)
    return partial(module.flash_attn_func, x.q, x.k, x.v, **how)


@functools.cache
def room_of_flashinfer():
    return torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)


def flashinfer(p, x):
    if p.backward:
        raise NotImplementedError("it makes no gradients")
    import flashinfer as module

    room = room_of_flashinfer()
    kind = DTYPES[p.dtype]
    how = {"causal": p.causal, "window_left": -1 if p.window is None else p.window, "q_data_type": kind}

    def steps(size):
        return torch.arange(p.sequences + 1, dtype=torch.int32, device=DEVICE) * size

    rows = x.q.view(-1, p.heads, p.d)
    if p.page:
        wrapper, pages = module.BatchPrefillWithPagedKVCacheWrapper(room, "NHD"), p.keys // p.page
        full = torch.full((p.sequences,), p.page, dtype=torch.int32, device=DEVICE)
        places = steps(p.queries), steps(pages), x.table.view(-1), full
        wrapper.plan(*places, p.heads, p.groups, p.d, p.page, **how)
        return partial(wrapper.run, rows, (x.k, x.v))
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(room, "NHD")
    starts = (x.starts, x.starts) if p.lengths else (steps(p.queries), steps(p.keys))
    wrapper.plan(*starts, p.heads, p.groups, p.d, **how)
    return partial(wrapper.run, rows, *(t.view(-1, p.groups, p.d) for t in (x.k, x.v)))


PEERS = {"cudnn": cudnn, "flash": flash, "fa3": fa3, "flashinfer": flashinfer}
_said = set()


def of_peers(p, sets):
    """The variants of the peers that take the problem, each called once."""
    found = []
    for name, make in PEERS.items():
        try:
            calls = [make(p, x) for x in sets]
            calls[0]()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception as problem:  # of libraries that are here or not, in releases that nobody chose
            reason = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
            if (name, reason) not in _said:
                _said.add((name, reason))
                print(f"{name} is left out where it says {reason}")
            continue
        found.append(Variant(name, calls))
    return found


# ---- A row -----------------------------------------------------------------------------------------------------------


def places_of(p):
    """(sequence, query) of the rows whose bits are looked at: the ends and the middle."""
    lengths = p.lengths or (p.queries,) * p.sequences
    last = len(lengths) - 1
    return sorted({(0, 0), (last, lengths[last] - 1), (last // 2, lengths[last // 2] // 2)})


def rows_agree(p, x, arithmetic):
    """Whether those rows have the bits that each has alone, and on the CPU, if that is soon computed."""
    window = None if p.window is None else (p.window, None)
    for s, i in places_of(p):
        q, k, v, out = sequence_of(p, x, s)
        keys = k.shape[2] - q.shape[2] + i + 1 if p.causal else k.shape[2]
        row = [q[:, :, i : i + 1], k[:, :, :keys], v[:, :, :keys]]
        how = {"window": window, "causal": p.causal, "arithmetic": arithmetic}
        found = [pydet.attention(*row, **how)]
        if keys * p.heads * p.d <= ON_CPU:
            found.append(pydet.attention(*(t.cpu() for t in row), **how))
        want = out[:, :, i : i + 1].contiguous().view(torch.int16).cpu()
        if not all(torch.equal(one.view(torch.int16).cpu(), want) for one in found):
            return False
    return True


def gradients_agree(p, x, arithmetic):
    """Whether the last sequence's gradients have the bits that it has alone, and on the CPU, if soon computed."""
    own = slice(int(x.starts[-2]), int(x.starts[-1])) if p.lengths else slice(p.sequences - 1, p.sequences)

    def alone(t):
        return (t[own][None] if p.lengths else t[own]).transpose(1, 2)

    operands = [alone(t) for t in (x.dout, x.q, x.k, x.v, x.out)]
    lse = x.lse[own].transpose(0, 1)[None] if p.lengths else x.lse[own]
    window = None if p.window is None else (p.window, None)
    call = partial(pydet.attention_backward, window=window, causal=p.causal, arithmetic=arithmetic)
    found = [call(*operands, lse)]
    if operands[1].shape[2] ** 2 * p.heads * p.d <= ON_CPU:
        found.append(call(*(t.cpu() for t in operands), lse.cpu()))
    words = [[t.contiguous().view(torch.int16).cpu() for t in map(alone, x.gradients)]]
    words += [[t.contiguous().view(torch.int16).cpu() for t in one] for one in found]
    return all(torch.equal(one, other) for some in words[1:] for one, other in zip(words[0], some, strict=True))


def row(p):
    caches = p.kind in ("decode", "paged")
    moved = p.cache_bytes() + 4 * p.sequences * p.queries * p.heads * p.d
    size = (
        moved
        if caches
        else (2 if p.backward else 1) * 4 * (sum(p.lengths) or p.sequences * p.queries) * (p.heads + p.groups) * p.d
    )
    sets = [operands(p) for _ in range(sets_of(size))]
    calls = [ours(p, x) for x in sets]
    calls[0]()
    kernel = pydet.last_kernel()
    arithmetic = next(one.arithmetic for one in pydet.kernels() if one.name == kernel)
    name = kernel.removeprefix("cuda_attention_").removeprefix("cpu_attention_").removeprefix("backward_")
    variants = [Variant(f"pydet, {name}", calls, sets[0].results()), *of_peers(p, sets)]
    if caches:
        variants.append(Variant("copy", [copying_of(x) for x in sets]))
    peers = [v.name for v in variants if v.name in PEERS]
    products = 5 if p.backward else 2
    work, unit = (moved, "GB/s") if caches else (2 * products * p.d * p.heads * p.pairs(), "GFLOP/s")
    agrees = partial(gradients_agree if p.backward else rows_agree, p, sets[0], arithmetic)
    return Row(p.op, p.shape, p.dtype, variants, peers[0] if peers else "none", work, unit, agrees, f"kernel {kernel}")


def copying_of(x):
    """What moves as many bytes as the cache has, reads and writes together."""
    count = sum(t.numel() * t.element_size() for t in (x.k, x.v)) // 8
    source, target = (torch.empty(count, dtype=torch.float32, device=DEVICE) for _ in range(2))
    return partial(target.copy_, source)


def rows(kind, quick):
    for p in listed(kind, quick):
        yield partial(row, p)


def random_rows(kind, count, seed):
    for p in draw(kind, count, seed):
        yield partial(row, p)


# ---- The summary -----------------------------------------------------------------------------------------------------


def times_of(entries):
    """[(entry of pydet, name -> us of the others of its row)]: pydet's entry is the first of a row."""
    found = []
    for entry in entries:
        if entry["variant"].startswith("pydet"):
            found.append((entry, {}))
        else:
            found[-1][1][entry["variant"]] = entry["us"]
    return found


def random_summary(entries):
    """The fastest peer's time over pydet's, each peer's, and a copy's."""
    groups, speeds = {}, {}
    for entry, others in times_of(entries):
        peers = {name: us for name, us in others.items() if name in PEERS}
        shown = {"the fastest peer": min(peers.values()), **peers} if peers else {}
        shown |= {"copy": others["copy"]} if "copy" in others else {}
        at = f"{entry['shape']}, {entry['dtype']}, {entry['op']}, {entry['variant']}"
        for name, us in shown.items():
            for group in ("all", entry["op"].partition(",")[0]):
                groups.setdefault((group, name), []).append((us / entry["us"], at))
        if entry["unit"] == "GB/s":
            speeds.setdefault(entry["op"].partition(",")[0], []).append((entry["rate"] / 1e3, at))
    lines = [f"{group:14} {name:16} / pydet: {draws.said(its)}" for (group, name), its in sorted(groups.items())]
    for group, found in sorted(speeds.items()):
        speed = [x for x, _ in found]
        middle, (most, at) = statistics.median(speed), max(found)
        lines.append(f"{group:14} TB/s of cache, q and out: median {middle:.2f}, most {most:.2f} ({at})")
    return lines


_KINDS = {
    "attention": "prefill",
    "attention_varlen": "varlen",
    "attention_mma": "prefill_mma",
    "attention_backward": "backward",
    "attention_backward_mma": "backward_mma",
    "attention_backward_varlen": "backward_varlen",
    "attention_decode": "decode",
    "attention_paged": "paged",
}
ROWS = {name: partial(rows, kind) for name, kind in _KINDS.items()}
RANDOM = {name: partial(random_rows, kind) for name, kind in _KINDS.items()}
