"""What the CPU's bench draws, its rows and their peers, and what it says of many: all but its times."""

import importlib.util
import json
import random
import sys
from functools import partial
from importlib import import_module

import numpy as np
import pytest

from bench import __main__ as bench
from bench import attention, draws, embedding, gemm, harness, model_shapes, peers, rmsnorm, skinny_gemm, softmax


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(harness.Cpu, "SAMPLES", 2)
    monkeypatch.setattr(harness.Cpu, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(harness.Cpu, "SETTLE_SECONDS", 1e-4)
    monkeypatch.setattr(gemm, "buffer_sets", lambda size: 2)


def drawn(operation, count, seed):
    return [(row.func, *row.args) for row in draws.rows(import_module(f"bench.{operation}").draw, count, seed)]


@pytest.mark.parametrize("operation", bench.RANDOM)
def test_a_seed_draws_the_same_again(operation):
    found = drawn(operation, 300, 5)
    assert found == drawn(operation, 300, 5) and found[:100] == drawn(operation, 100, 5)
    assert found != drawn(operation, 300, 6) and len(set(found)) > 250
    assert {word for row in found for word in row if word in gemm.TYPES} == {"fp32", "bf16"}


def test_draws_are_within_their_bounds():
    products = [row[1:] for row in drawn("gemm", 300, 5)]
    assert all(2e6 <= 2 * m * n * k <= 6e9 for m, n, k, *_ in products)
    assert {layout for *_, layout in products} == {"NN", "NT", "TN", "TT"}
    assert min(m for m, *_ in products) < 8 and any(n % 8 for _, n, *_ in products)
    few = [row[1:] for row in drawn("skinny_gemm", 300, 5)]
    assert {(n, k) for _, n, k, *_ in few} <= set(model_shapes.pool()) and {m for m, *_ in few} == {*range(1, 17)}
    assert {layout for *_, layout, _ in few} == {"w[N,K]", "b[K,N]"}
    for make, dtype, sequences, heads, groups, queries, keys, d, causal in drawn("attention", 300, 5):
        assert dtype in gemm.TYPES and heads % groups == 0 and queries in (1, keys) and not (queries == 1 and causal)
        assert attention.operations(sequences, heads, queries, keys, d, causal) <= attention.MOST_OPERATIONS
        assert make is attention.forward or queries == keys
    assert all(m * n <= rmsnorm.MOST_ELEMENTS for _, m, n, _ in drawn("rmsnorm", 300, 5))
    assert {name for _, name, *_ in drawn("softmax", 300, 5)} == set(softmax.NAMES)
    tables = drawn("embedding", 300, 5)
    assert all(max(tokens, rows) * n <= embedding.MOST_ELEMENTS for _, tokens, n, rows, *_ in tables)
    assert {ids for *_, ids in tables} == {embedding.evenly, embedding.words}


def test_norms_of_cpus_and_gpus_are_drawn_alike():
    """As tests/rows_census.py says: up to 200,000 rows, columns in steps of 8, or any number for one in four."""
    generator = random.Random(3)
    shapes = [draws.norm_shape(generator, 16384, 1 << 24) for _ in range(2000)]
    assert all(1 <= m <= 200_000 and 64 <= n <= 16384 and m * n <= 1 << 24 for m, n in shapes)
    odd = sum(n % 8 > 0 for _, n in shapes) / len(shapes)
    assert 0.25 * 7 / 8 - 0.04 < odd < 0.25 * 7 / 8 + 0.04


def test_unseen_products_are_of_no_size_that_tables_were_fitted_to():
    unseen = model_shapes.unseen()
    assert not set(unseen) & set(model_shapes.pool()) and len(set(unseen)) > 100
    found = model_shapes.draw(600, 5, least_m=513, shapes=unseen)
    assert {(problem.n, problem.k) for problem in found} <= set(unseen)
    assert min(problem.m for problem in found) < 600 and max(problem.m for problem in found) > 7000
    odd = sum(problem.k % 64 > 0 for problem in found) / len(found)
    assert 0.2 < odd < 0.5, "sums of no whole 64 are a third"


def test_a_layout_is_what_its_letters_say():
    for dtype in ("fp32", "bf16"):
        plain, transposed = (gemm.operand(1, 3, 5, letter, dtype) for letter in "NT")
        assert plain.shape == transposed.shape == (3, 5)
        assert plain.flags.c_contiguous and transposed.flags.f_contiguous
        for array in (plain, transposed):
            first, second = gemm.copies((array,))
            assert first[0] is array and second[0] is not array and second[0].strides == array.strides


def test_ids():
    for rows in (2, 4, 1000):
        for ids in (embedding.evenly(50000, rows), embedding.words(50000, rows)):
            assert set(ids) <= {*range(rows)} and {*range(min(rows, 4))} <= set(ids)
    often = np.bincount(embedding.words(100000, 1000), minlength=1000)
    assert often[0] > 1.5 * often[1] > 1.5 * often[3] and often[0] < 0.2 * 100000
    assert np.bincount(embedding.evenly(100000, 4)).max() < 1.1 * 25000


SMALL = [partial(gemm.product, 5, 9, 33, dtype, x + y) for dtype in ("fp32", "bf16") for x in "NT" for y in "NT"]
SMALL += [
    partial(skinny_gemm.skinny, m, 24, 40, layout, dtype)
    for m in (1, 3)
    for layout in ("w[N,K]", "b[K,N]")
    for dtype in ("fp32", "bf16")
]
for kind in ("fp32", "bf16"):
    SMALL += [partial(make, m, 70, kind) for make in (rmsnorm.forward, rmsnorm.backward) for m in (1, 20)]
    SMALL += [
        partial(make, name, m, 70, kind)
        for make in (softmax.forward, softmax.backward)
        for name in softmax.NAMES
        for m in (1, 20)
    ]
    SMALL += [partial(make, kind, 2, 4, 2, 9, 9, 16, True) for make in (attention.forward, attention.backward)]
    SMALL += [partial(attention.forward, kind, 2, 4, 2, 1, 30, 16, False)]
    SMALL += [
        partial(embedding.table_gradient, tokens, 12, rows, kind, ids)
        for tokens, rows in ((40, 4), (5, 30))
        for ids in (embedding.evenly, embedding.words)
    ]


def id_of(row):
    """Without addresses, so that all processes of a run call a test the same."""
    words = (getattr(argument, "__name__", str(argument)) for argument in row.args)
    return f"{row.func.__module__[6:]}.{row.func.__name__} {' '.join(words)}"


small = pytest.mark.parametrize("build", SMALL, ids=id_of)


@small
def test_rows_run_and_have_their_bits(build):
    row = build()
    entries = harness.measure(row, harness.Cpu(), 1)
    assert entries[0]["variant"].startswith("pydet") and entries[0]["bits_ok"] is True
    there = {entry["variant"] for entry in entries}
    assert ("torch" in there) == (peers.torch is not None)
    assert row.peer in there or row.note == peers.NO_TORCH
    assert all(
        entry["kernel"].startswith("cpu_") == entry["variant"].startswith("pydet")
        for entry in entries
        if entry["kernel"]
    )


@small
def test_peers_compute_the_same(build):
    def numbers(made):
        made = made[0] if isinstance(made, tuple) else made
        return np.asarray(made.detach().float() if hasattr(made, "detach") else made, np.float64)

    variants = [v for v in build().variants if v.name != "copy"]
    first, *others = (numbers(v.calls[0]()) for v in variants)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0.02, atol=0.06 if "bf16" in build.args else 1e-4)


@small
def test_a_bit_that_other_kernels_lack_is_found(build):
    row = build()
    ours = row.variants[0]
    ours.calls[0]()
    assert row.agrees()
    out = ours.outputs[-1]  # of gradients those of weights, or of keys' values
    words = out.view(np.uint8)
    words[len(words) // 2] ^= 1
    assert not row.agrees()


def test_a_copy_moves_as_many_bytes():
    read, written = [np.zeros(300, np.float32), np.zeros(100, np.float32)], [np.zeros(200, np.float32)]
    move = peers.copying(read, written)
    assert 2 * move.args[0].nbytes == sum(x.nbytes for x in read + written)
    move()
    assert move.args[0].all()


def entry(variant, us, shape="1 x 2", op="gemm", dtype="fp32", **others):
    return {
        "op": op, "shape": shape, "dtype": dtype, "threads": 1, "variant": variant, "us": us, "bits_ok": None,
        "samples": 15, "disturbed": 0,
    } | others  # fmt: skip


def test_what_is_said_of_many():
    ratios = [(1 + i / 100, f"{i} x 1") for i in range(40)] + [(0.5, "9 x 9"), (0.25, "8 x 8")]
    mean = float(np.exp(np.mean(np.log([ratio for ratio, _ in ratios]))))
    assert draws.said(iter(ratios)) == (
        f"geometric mean {mean:.3f}, 5th percentile 1.000, worst 0.250 (8 x 8), 42 problems"
    )
    entries = [entry("pydet, out=", 2), entry("numpy", 8), entry("torch", 1)]
    entries += [entry("pydet, out=", 2, "3 x 4"), entry("numpy", 4, "3 x 4"), entry("torch", 1, "3 x 4")]
    entries += [entry("pydet, out=", 2, "3 x 4"), entry("numpy", 2, "3 x 4"), entry("torch", 1, "3 x 4")]  # once more
    entries += [entry("pydet", 3, dtype="bf16"), entry("torch", 3, dtype="bf16")]
    found = [" ".join(line.split()) for line in draws.summary(entries)]
    assert found == [
        "gemm, bf16, 1 thr. torch / pydet : "
        "geometric mean 1.000, 5th percentile 1.000, worst 1.000 (1 x 2), 1 problems",
        "gemm, fp32, 1 thr. numpy / pydet, out= : "
        "geometric mean 2.000, 5th percentile 1.000, worst 1.000 (3 x 4), 3 problems",
        "gemm, fp32, 1 thr. torch / pydet, out= : "
        "geometric mean 0.500, 5th percentile 0.500, worst 0.500 (1 x 2), 3 problems",
    ]


# ---- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    """command(arguments, entries of the process that measures): what main returns."""

    def call(arguments, entries=None):
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        monkeypatch.setattr(harness, "RESULTS", tmp_path)
        if entries is not None:
            monkeypatch.setattr(bench, "measure_in_own_process", lambda *_: entries)
        return bench.main()

    return call


def test_a_drawn_run_is_summed_up(command, tmp_path, capsys):
    entries = [entry("pydet", 2, bits_ok=True, disturbed=9), entry("numpy", 3)]
    for e in entries:
        e |= {"rate": None, "unit": "", "peer": None, "times_peer": None, "kernel": None}
    ran = ["gemm", "--random", "1", "--seed", "4", "--threads", "1"]
    assert command(ran, entries) == 0
    line = "geometric mean 1.500, 5th percentile 1.500, worst 1.500 (1 x 2), 1 problems"
    said = capsys.readouterr().out
    assert line in said and "Disturbed (~): 1 of 2 figures" in said and ".png" not in said
    assert f"{line}\n" in (tmp_path / "cpu_gemm_random.md").read_text()
    kept = json.loads((tmp_path / "cpu_gemm_random.json").read_text())
    assert kept["command"] == "python -m bench gemm --random 1 --seed 4 --threads 1" and kept["rows"] == entries
    assert {path.name for path in tmp_path.iterdir()} == {"cpu_gemm_random.md", "cpu_gemm_random.json"}

    entries[0]["bits_ok"] = False
    assert command([*ran, "--name", "other.name"], entries) == "bench: 1 variants changed bits"
    assert "wrong bits: gemm 1 x 2 fp32 pydet, 1 thr." in capsys.readouterr().out
    assert (tmp_path / "other.name.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--random", "3"], ["gemm", "rmsnorm", "--random", "3"], ["tokens", "--random", "3"], ["gemm", "--random", "0"]],
)
def test_what_random_does_not_draw(command, capsys, arguments):
    with pytest.raises(SystemExit) as refused:
        command(arguments, [])
    assert refused.value.code == 2 and "--random is for one of gemm, " in capsys.readouterr().err


def test_the_process_that_measures_draws_them(need, command, tmp_path, monkeypatch):
    need(importlib.util.find_spec("tqdm"), "bench", "tqdm is not installed")
    monkeypatch.setattr(
        embedding, "draw", lambda generator, between: partial(embedding.table_gradient, between(2, 9), 8, 4, "fp32")
    )
    path = tmp_path / "entries.json"
    command(["embedding", "--random", "3", "--seed", "2", "--threads", "1", "--entries", str(path)])
    shapes = list(dict.fromkeys(e["shape"] for e in json.loads(path.read_text())))
    want = list(draws.rows(embedding.draw, 3, 2))
    assert shapes == list(dict.fromkeys(f"{row.args[0]} x 8 of 4" for row in want))


@pytest.mark.parametrize("operation", sorted(set(bench.OPERATIONS) - {"overhead"}))
def test_what_has_a_list_and_what_draws(operation):
    assert len([*bench.rows_of([operation], 1, None, 0)]) > 2
    assert (operation in bench.RANDOM) == hasattr(import_module(f"bench.{operation}"), "draw")
