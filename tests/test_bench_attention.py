"""The bench of attention, all but its times: what it draws, the peers that it leaves out, the bits, what it says."""

import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")

from bench import cuda_attention, harness  # noqa: E402
from bench.cuda_attention import Drawn  # noqa: E402
from bench.model_shapes import MODELS  # noqa: E402

SMALL = [
    Drawn("prefill", 4, 2, 64, 2, 70, 70),
    Drawn("prefill", 4, 1, 128, 1, 140, 140, causal=False, dtype="fp16"),
    Drawn("prefill", 4, 2, 64, 1, 150, 150, window=20),
    Drawn("varlen", 4, 2, 64, 3, 130, 130, lengths=(5, 130, 40)),
    Drawn("backward", 4, 2, 64, 2, 70, 70),
    Drawn("backward", 4, 1, 128, 1, 140, 140, causal=False, dtype="fp16"),
    Drawn("backward_varlen", 4, 2, 64, 3, 130, 130, lengths=(5, 130, 40)),
    Drawn("decode", 8, 2, 64, 3, 1, 1100),
    Drawn("decode", 8, 2, 64, 2, 5, 600),
    Drawn("paged", 8, 2, 64, 2, 3, 320, page=16),
]


class Device:
    """Calls once and says it took a while; what bench/cuda.py's does on a GPU."""

    SAMPLES, FEWEST_SAMPLES, ROW_SECONDS, SAMPLE_SECONDS, disturbed = 2, 2, 5, 1e-9, 0

    def start_row(self):
        pass

    def sample(self, calls, count):
        for i in range(count):
            calls[i % len(calls)]()
        return 1e-3

    def take(self, calls, count):
        return self.sample(calls, count), {}

    def clear(self, tensor):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def read(self, tensor):
        return tensor.view(torch.int16).numpy().tobytes()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(cuda_attention, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_attention, "sets_of", lambda size: 2)
    monkeypatch.setattr(cuda_attention, "_said", set())


def copied(p, x):
    """A peer of any kind."""
    return lambda: x.q.clone()


@pytest.mark.parametrize(
    "kind", ["prefill", "varlen", "backward", "backward_varlen", "decode", "paged", "backward_mma"]
)
def test_draws(kind):
    drawn = cuda_attention.draw(kind, 300, 5)
    assert drawn == cuda_attention.draw(kind, 300, 5) != cuda_attention.draw(kind, 300, 6)
    heads = {tuple(sizes[2:]) for sizes in MODELS.values()}
    assert all((p.heads, p.groups, p.d) in heads for p in drawn) and len({p.d for p in drawn}) == 4
    assert {p.dtype for p in drawn} == {"bf16", "fp16"}
    if kind not in ("decode", "paged"):
        assert {(p.causal, p.window is None) for p in drawn} == {(True, True), (False, True), (True, False)}
        tokens = [sum(p.lengths) or p.sequences * p.keys for p in drawn]
        assert max(tokens) <= 16384 and min(p.keys for p in drawn) < 300 and max(p.keys for p in drawn) > 10000
    else:
        assert all(1 <= p.queries <= 16 and 512 <= p.keys <= 131072 + 256 for p in drawn)
        assert max(p.sequences for p in drawn) > 128 and max(p.cache_bytes() for p in drawn) <= 1 << 32
        assert all((p.page > 0) == (kind == "paged") and (not p.page or p.keys % p.page == 0) for p in drawn)
    assert all(len(p.shape.split(" x ")) == 6 for p in [*drawn, *cuda_attention.listed(kind, False)])
    assert 0 < len(list(cuda_attention.rows(kind, True))) < len(list(cuda_attention.rows(kind, False)))
    assert len(list(cuda_attention.random_rows(kind, 7, 1))) == 7


@pytest.mark.parametrize("kind", ["prefill", "backward"])
def test_a_kernel_that_is_asked_for(kind, monkeypatch):
    """The problems of `kind`, and the name of the kernel that a GPU has."""
    drawn = cuda_attention.draw(f"{kind}_mma", 20, 5)
    assert [replace(p, mma=False) for p in drawn] == cuda_attention.draw(kind, 20, 5) and all(p.mma for p in drawn)
    p, name = drawn[0], "attention" if kind == "prefill" else "attention_backward"
    assert p.op.endswith(", mma") and cuda_attention.kernel_of(replace(p, mma=False)) is None
    for capability, arithmetic in (((8, 0), "sm80"), ((9, 0), "sm90"), ((12, 0), "sm90")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert cuda_attention.kernel_of(p) == f"cuda_{name}_{arithmetic}_mma"
    small = Drawn(kind, 2, 1, 64, 1, 20, 20, mma=True)
    x = cuda_attention.operands(replace(small, mma=False))
    with pytest.raises((ValueError, NotImplementedError), match=f"cuda_{name}_sm90_mma"):  # and it is asked for
        cuda_attention.ours(small, x)()


def test_pairs():
    for p in SMALL:
        seen = 0
        for n in p.lengths or (None,) * p.sequences:
            queries, keys = (n, n) if n else (p.queries, p.keys)
            place, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
            mask = (key <= place) | (not p.causal)
            mask &= key >= place - (keys if p.window is None else p.window)
            seen += int(mask.sum())
        assert p.pairs() == seen


@pytest.mark.parametrize("p", SMALL, ids=lambda p: p.op)
def test_a_row(p, monkeypatch, capsys):
    """Each peer that is not here or does not take it is left out with its reason; the bits and the kernel are told."""
    monkeypatch.setitem(cuda_attention.PEERS, "copied", copied)
    entries = harness.measure(cuda_attention.row(p), Device(), 0)
    said = capsys.readouterr().out
    assert all(f"{name} is left out where it says" in said for name in ("fa3", "flash"))
    first, *others = entries
    kernel = first["note"].removeprefix("kernel cpu_attention_").removeprefix("backward_")
    assert first["variant"] == f"pydet, {kernel}" and kernel and first["bits_ok"] is True and first["op"] == p.op
    cached = p.kind in ("decode", "paged")
    assert first["unit"] == ("GB/s" if cached else "GFLOP/s") and first["rate"] > 0
    assert {"copied", *(["copy"] if cached else [])} <= {entry["variant"] for entry in others}


@pytest.mark.parametrize("p", SMALL, ids=lambda p: p.op)
def test_rows_of_other_bits_are_found(p):
    """The negative control: one bit of a row that is looked at."""
    x = cuda_attention.operands(p)
    cuda_attention.ours(p, x)()
    if p.backward:
        assert cuda_attention.gradients_agree(p, x, "ieee")
        for part in x.gradients:
            last = part.view(torch.int16)[-1].reshape(-1)
            last[-3] ^= 1
            assert not cuda_attention.gradients_agree(p, x, "ieee")
            last[-3] ^= 1
        assert cuda_attention.gradients_agree(p, x, "ieee")
        return
    assert cuda_attention.rows_agree(p, x, "ieee")
    for s, i in cuda_attention.places_of(p):
        part = cuda_attention.sequence_of(p, x, s)[3][0, -1, i].view(torch.int16)
        part[3] ^= 1
        assert not cuda_attention.rows_agree(p, x, "ieee")
        part[3] ^= 1
    assert cuda_attention.rows_agree(p, x, "ieee")


def test_peers_get_what_they_take(monkeypatch):
    """Their calls are made without a GPU; what a kernel says of them, only one can tell."""
    for p in SMALL:
        x = cuda_attention.operands(p)
        if p.backward:  # their calls are made of what their forward gave
            continue
        makes = {"cudnn": not (p.lengths or p.page or p.window or 1 < p.queries < p.keys), "flash": not p.page}
        for name, fits in makes.items():
            if fits:
                call = cuda_attention.PEERS[name](p, x)
                assert callable(call)
            else:
                with pytest.raises(NotImplementedError):
                    cuda_attention.PEERS[name](p, x)
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:10] == [*("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"), *names[7:10]]
    assert names[7:10] == ["dropout_p", "is_causal", "return_debug_mask"]
    assert {"window_size_left", "window_size_right"} <= set(names)


def test_the_summary():
    def entries(op, ours, **others):
        shared = {"op": op, "shape": "1 x 1 x 1 x 1 x 1 x 64", "dtype": "bf16", "unit": "GB/s", "rate": 2500.0}
        yield {**shared, "variant": "pydet, sm90_few", "us": ours}
        for name, us in others.items():
            yield {**shared, "variant": name, "us": us}

    found = [*entries("decode 64", 10.0, cudnn=8.0, flash=20.0, copy=9.0), *entries("decode 64", 10.0, flash=20.0)]
    lines = cuda_attention.random_summary(found)
    fastest = next(line for line in lines if line.startswith("all") and "the fastest peer" in line)
    assert "geometric mean 1.265, 5th percentile 0.800, worst 0.800 (1 x 1" in fastest and "2 problems" in fastest
    assert any("copy" in line and "0.900" in line and "1 problems" in line for line in lines)
    assert any("TB/s of cache, q and out: median 2.50, most 2.50" in line for line in lines)
    assert cuda_attention.random_summary(list(entries("attention 64, causal", 5.0))) != []


def test_the_command_knows_it():
    from bench import cuda

    names = {"attention", "attention_varlen", "attention_decode", "attention_paged"}
    names |= {"attention_backward", "attention_backward_varlen"}
    assert names <= set(cuda.ROWS) and names <= set(cuda.RANDOM)
