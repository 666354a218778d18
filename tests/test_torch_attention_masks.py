"""Masks whose rows are ranges of keys: they become lengths, and every query keeps the bits that it has row by row."""

import importlib
import itertools
import os

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

import pydet.torch as pt  # noqa: E402
from torch_bits import normal, same  # noqa: E402

operators = importlib.import_module("pydet.torch.ops.attention")
masks = importlib.import_module("pydet.torch.ops.masks")
BATCH, QUERIES = 3, 150
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def places(queries=QUERIES, keys=QUERIES):
    """(key, query) places that broadcast to [B, 1, Q, K]."""
    return torch.arange(keys), (torch.arange(queries) + keys - queries)[:, None]


def lengths(*numbers):
    return torch.tensor(numbers)[:, None, None, None]


def causal_(keys, queries):
    return keys <= queries


def documents(seed):
    """[B, 1, K]: which sequence a token is of, three or four in a row."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, QUERIES, (BATCH, 1, 3), generator=random).sort(-1)[0]


def packed(seed, causally=True):
    keys, queries = places()
    ends = documents(seed)
    of_key = (keys[:, None] >= ends).sum(-1)
    own = of_key[:, None, None, :] == of_key[:, None, :, None]
    return own & causal_(keys, queries) if causally else own


def windowed(width):
    keys, queries = places()
    return (causal_(keys, queries) & (queries - keys < width))[None, None]


def made():
    """Name -> (mask, the kinds of calls that it should become, queries)."""
    keys, queries = places()
    causal, some = causal_(keys, queries), lengths(0, 40, 149)
    late_keys, late = places(20)
    tail = causal_(late_keys, late - 30)[None, None]
    holes = torch.rand(1, 1, QUERIES, QUERIES, generator=torch.Generator().manual_seed(0)) < 0.5
    tree = torch.cat(
        [torch.ones(7, 50, dtype=torch.bool), torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) < 0.5], 1
    )[None, None]
    return {
        "no padding": (causal[None, None], ["dense"], QUERIES),
        "padding on the left": (causal & (keys >= some), ["dense"], QUERIES),
        "nothing but padding": (causal & (keys >= lengths(0, 150, 149)), ["dense"], QUERIES),
        "padding on the right": (causal & (keys < 150 - some), ["packed", "packed"], QUERIES),
        "padding on both sides": (causal & (keys >= some // 2) & (keys < 150 - some // 2), None, QUERIES),
        "padding of keys alone, full": ((keys < 150 - some).expand(-1, -1, QUERIES, -1), ["dense"], QUERIES),
        "padding on the left, full": ((keys >= some).expand(-1, -1, QUERIES, -1), ["dense"], QUERIES),
        "packed": (packed(1), None, QUERIES),
        "packed and padded": (packed(2) & (keys >= some), None, QUERIES),
        "packed, full": (packed(3, False), None, QUERIES),
        "a window": (windowed(31), ["paged"], QUERIES),
        "a window and padding": (windowed(31) & (keys >= some), None, QUERIES),
        "a window that holds all": (windowed(150), ["dense"], QUERIES),
        "a chunk of a prefill in a cache with room": (tail, ["dense"], 20),
        "padding in a cache with room": (tail & (late_keys >= some // 2), ["dense"], 20),
        "a prefix that all see": ((causal | (keys < 60))[None, None], None, QUERIES),
        "prefixes": (causal | (keys < some), None, QUERIES),
        "holes": (holes & causal, [], QUERIES),
        "holes, one first key": ((holes | (keys == 0)) & causal, ["dense"], QUERIES),
        "a tree of drafts": (tree, ["dense"], 7),
        "one query, padding": ((keys >= some).expand(-1, -1, 1, -1), ["dense"], 1),
        "one query, a hole": (((keys >= some) & (keys != 60)).expand(-1, -1, 1, -1), ["dense"], 1),
        "nothing": (torch.zeros(1, 1, QUERIES, QUERIES, dtype=torch.bool), ["dense"], QUERIES),
    }


def both(monkeypatch, q, k, v, mask, **options):
    """(as lengths, row by row, the kinds of calls)."""
    seen, run = [], operators._run_planned

    def recorded(*arguments):
        seen.extend(part.kind for part in arguments[4])
        return run(*arguments)

    monkeypatch.setattr(operators, "_run_planned", recorded)
    how = {"scale": 0.3, "arithmetic": "auto", "kv_chunk": 128, **options}
    arguments = (q, k, v, mask, *how.values())
    got = torch.ops.pydet.attention(*arguments, from_first=True)
    with monkeypatch.context() as patch:
        patch.setattr(operators, "_captured", lambda x: True)
        want = torch.ops.pydet.attention(*arguments, from_first=True)
    return got, want, seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", made())
def test_the_same_bits_as_row_by_row(monkeypatch, name, device):
    mask, kinds, queries = made()[name]
    mask = mask.to(device)
    keys, sinks = mask.shape[-1], normal(6, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        make = lambda heads, n, width, seed: normal(BATCH, n, heads, width, dtype=dtype, device=device, seed=seed)  # noqa: B023
        q, k, v = make(6, queries, 16, 0), make(2, keys, 16, 1), make(2, keys, 24, 2)
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        apart = [
            rows[0],
            *(torch.cat([x, x[:, :, :3]], 2)[:, :, :keys] for x in rows[1:]),
        ]  # no sequence behind another
        for operands in (rows, apart):
            for given in (mask, mask.expand(BATCH, 6, -1, -1)):
                for more in ({}, {"sinks": sinks, "softcap": 3.0}, {"sinks": None, "softcap": None, "causal": True}):
                    got, want, seen = both(monkeypatch, *operands, given, **more)
                    for ours, theirs in zip(got, want, strict=True):
                        same(ours, theirs)
                    if more or kinds is None:
                        continue
                    wanted = ["paged" if kind == "packed" and operands is apart else kind for kind in kinds]
                    assert seen == wanted


def test_random_ranges(monkeypatch):
    """Whatever the ranges are, and in whatever order."""
    for seed in range(25):
        random = torch.Generator().manual_seed(seed)
        keys, number = torch.arange(60), lambda most: int(torch.randint(0, most, (1,), generator=random))  # noqa: B023
        first, last = torch.zeros(2, 2, 40, dtype=torch.long)
        for b in range(2):
            i = 0
            while i < 40:
                size, begin, end, step = 1 + number(12), number(60), number(60), number(3)
                some = torch.arange(i, min(i + size, 40))
                first[b, some], last[b, some] = begin, (end + step * (some - i)).clamp(max=60)
                i += size
        mask = (keys >= first[..., None]) & (keys < last[..., None])
        q, k, v = (normal(2, heads, n, 16, seed=seed) for heads, n in ((4, 40), (2, 60), (2, 60)))
        got, want, _ = both(monkeypatch, q, k, v, mask[:, None])
        for ours, theirs in zip(got, want, strict=True):
            same(ours, theirs)


def test_a_range_that_is_misread_shows(monkeypatch):
    """The negative control: an end that is one key off."""
    ranges, mask = masks._ranges, made()["padding on the left"][0]
    q, k, v = (normal(BATCH, heads, QUERIES, 16) for heads in (6, 2, 2))
    for change in (lambda f, n, c: (f + (c > 1), n, c - (c > 1)), lambda f, n, c: (f, n - (c > 1), c - (c > 1))):
        monkeypatch.setattr(masks, "_ranges", lambda *given, change=change: change(*ranges(*given)))
        got, want, _ = both(monkeypatch, q, k, v, mask.clone())
        assert not torch.equal(got[0], want[0])


def test_a_mask_is_read_once_while_it_lives(monkeypatch):
    reads, ranges = [], masks._ranges
    monkeypatch.setattr(masks, "_ranges", lambda *given: reads.append(1) or ranges(*given))
    q, k, v = (normal(BATCH, heads, QUERIES, 16) for heads in (6, 2, 2))
    mask = made()["padding on the left"][0]
    wider = torch.nn.functional.pad(mask, (0, 5))
    attend = lambda given: pt.attention(q, k, v, given, scale=0.3)
    first = attend(mask)
    for _ in range(3):
        same(attend(mask), first)
        same(attend(wider[..., :QUERIES]), first)
    assert len(reads) == 2
    mask[1, :, :, 41] = False  # in place: other bits, so another plan
    assert not torch.equal(attend(mask), first) and len(reads) == 3
    with torch.inference_mode():
        same(attend(made()["padding on the left"][0]), first)
    assert len(reads) == 4
    del mask, wider
    masks._cache.keep((q, ()), None)
    assert len(masks._cache.entries) <= 2


def of_mask(q, k, v, mask, dy, **options):
    tracked = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    pt.attention(*tracked, mask, scale=0.3, **options).backward(dy)
    return [x.grad for x in tracked]


@pytest.mark.parametrize(
    "name", ["padding on the left", "padding on the right", "packed and padded", "prefixes", "holes"]
)
def test_gradients_are_the_sequences_own(name):
    """Of a sequence of the batch alone, whatever is beside it; and cut to its own tokens where it is padded."""
    mask = made()[name][0]
    mask = mask.expand(BATCH, -1, -1, -1)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, dy = (normal(BATCH, n, QUERIES, 16, dtype=dtype, seed=i) for i, n in enumerate((6, 2, 2, 6)))
        dy = dy * mask.any(-1)[..., None]  # rows of padding have none
        if name == "padding on the right":
            dy[1, :, 110:], dy[2, :, 1:] = 0, 0
        got = of_mask(q, k, v, mask, dy)
        mixed = torch.cat([mask, *(made()[other][0][:1].expand(1, -1, -1, -1) for other in ("holes", "a window"))])
        more = [torch.cat([x, x[:2]]) for x in (q, k, v)]
        for ours, theirs in zip(of_mask(*more, mixed, torch.cat([dy, dy[:2]])), got, strict=True):
            same(ours[:BATCH], theirs)
        for b in range(BATCH):
            one = slice(b, b + 1)
            for ours, theirs in zip(of_mask(q[one], k[one], v[one], mask[one], dy[one]), got, strict=True):
                same(ours, theirs[one])
        if not name.startswith("padding"):
            continue
        for b, cut in ((1, 40), (2, 149)):
            own = slice(cut, None) if "left" in name else slice(0, QUERIES - cut)
            alone = [x[b : b + 1, :, own] for x in (q, k, v, dy)]
            for ours, theirs in zip(of_mask(*alone[:3], None, alone[3], causal=True), got, strict=True):
                same(ours, theirs[b : b + 1, :, own])


def test_packed_sequences_have_the_gradients_that_they_have_alone():
    keys, queries = places()
    for causally in (True, False):
        mask, ends = packed(5, causally), documents(5)
        q, k, v, dy = (normal(BATCH, n, QUERIES, 16, dtype=torch.bfloat16, seed=i) for i, n in enumerate((6, 2, 2, 6)))
        got = of_mask(q, k, v, mask, dy)
        for b in range(BATCH):
            borders = [0, *ends[b, 0].tolist(), QUERIES]
            for begin, end in itertools.pairwise(borders):
                if begin == end:
                    continue
                alone = [x[b : b + 1, :, begin:end] for x in (q, k, v, dy)]
                for ours, theirs in zip(of_mask(*alone[:3], None, alone[3], causal=causally), got, strict=True):
                    same(ours, theirs[b : b + 1, :, begin:end])


def test_a_mask_has_no_gradient_in_a_graph(monkeypatch):
    q, k, v = (normal(BATCH, heads, QUERIES, 16) for heads in (6, 2, 2))
    monkeypatch.setattr(operators, "_captured", lambda x: True)
    with pytest.raises(Exception, match="attention_backward: a mask is not read while a CUDA graph is made of it"):
        of_mask(q, k, v, made()["padding on the left"][0], torch.ones_like(q))


def test_gradients_are_those_of_the_mask():
    q, k, v = (normal(BATCH, heads, QUERIES, 16) for heads in (6, 2, 2))
    mask, found = made()["padding on the right"][0], []
    for given in (mask, mask.expand(BATCH, 6, -1, -1).contiguous()):  # the second has a plan of no kind
        tracked = [x.clone().requires_grad_() for x in (q, k, v)]
        pt.attention(*tracked, given, scale=0.3).square().sum().backward()
        found.append([x.grad for x in tracked])
    for ours, theirs in zip(*found, strict=True):
        same(ours, theirs)
