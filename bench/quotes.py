"""The measured numbers that pages quote: each stands once in bench/results, and here in the sentence that quotes it.

python -m bench.quotes           # where pages and results part; exit status 1 if they do
python -m bench.quotes --write   # writes the numbers of bench/results into the pages
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

from bench import distributed_tables, plot, summary

ROOT = Path(__file__).resolve().parent.parent

# ---- Figures ---------------------------------------------------------------------------------------------------------


def mean(ratios):
    return statistics.geometric_mean(ratios)


def mean_and_worst(ratios):
    ratios = list(ratios)
    return f"{mean(ratios):.2f} ({min(ratios):.2f})"


def faster(problems, variant="pydet", peers=()):
    """How many times as fast the variant is as the fastest of these peers, or as the row's own."""
    return [min(p.us[peer] for peer in peers or [p.peer]) / p.us[variant] for p in problems]


def worst_of(problems, variant="pydet", peers=()):
    worst = min(problems, key=lambda p: faster([p], variant, peers)[0])
    return f"{'x'.join(map(str, worst.extents))}: {faster([worst], variant, peers)[0]:.2f}"


def in_whole_pieces(problem):
    """Whether rows of a product of 16 bits lie at multiples of 16 bytes; of dB, columns are what operands have."""
    m, n, k = problem.extents
    return (m % 8 == 0 and n % 8 == 0) if " dB" in problem.op else (n % 8 == 0 and k % 8 == 0)


def rows_between(problems, least, most):
    return [p for p in problems if least <= p.extents[0] <= most]


def of_products():
    every = summary.problems("h100_gemm_unseen_random")
    drawn = [p for p in every if in_whole_pieces(p)]
    plain = [p for p in drawn if "," not in p.op]  # results of 16 bits, no k_chunk
    yield "drawn, odd rows", mean_and_worst(faster([p for p in every if p not in drawn]))
    forward = [p for p in plain if p.op.startswith(("skinny_gemm", "gemm forward"))]
    tiles = [p for p in drawn if not p.op.startswith("skinny_gemm")]
    yield "drawn", mean_and_worst(faster(drawn))
    yield "drawn, mean", f"{mean(faster(drawn)):.2f}"
    yield "drawn, worst", f"{min(faster(drawn)):.2f}"
    yield "drawn, 5th percentile", f"{sorted(faster(drawn))[len(drawn) // 20]:.2f}"
    odd = [p for p in forward if p.extents[2] % 64]
    yield "sums over no whole 64", mean_and_worst(faster(odd))
    hot = summary.problems("h100_gemm_unseen_sustained_random")
    yield "sustained", mean_and_worst(faster(hot))
    yield "sustained, worst", worst_of(hot)
    for least, most in ((1, 64), (65, 128), (129, 512), (513, 2048), (2049, 8192)):
        yield f"forward {least} to {most}", mean_and_worst(faster(rows_between(forward, least, most)))
    for name, least, most in (("few", 1, 128), ("many", 129, sys.maxsize)):
        yield f"dA {name}", mean_and_worst(faster(rows_between([p for p in plain if " dA" in p.op], least, most)))
    yield "dB", mean_and_worst(faster([p for p in plain if " dB" in p.op]))
    yield "fp32 results", mean_and_worst(faster([p for p in tiles if "fp32 out" in p.op]))
    yield "chunks", mean_and_worst(faster([p for p in tiles if "k_chunk" in p.op]))
    yield "worst odd rows", worst_of([p for p in every if p not in drawn and p.extents[0] > 128])
    constant = "pydet, weights_constant"
    few = summary.problems("h100_skinny_gemm")
    yield "few rows", mean_and_worst(faster(rows_between(few, 1, 64), constant))
    yield "128 rows", mean_and_worst(faster(rows_between(few, 128, 128), constant))
    ratios, many = plot.few_and_many()
    yield "up to 32 rows", f"{mean(x for m, found in ratios.items() if m <= 32 for x in found):.1f}"
    yield "above 128 rows", f"{mean(x for found in many.values() for x in found):.2f}"
    changed = [round(1e4 * row["differ"] / row["elements"]) for row in summary.rows("h100_equality") if row["differ"]]
    yield "cuBLAS changes", f"{min(changed)} to {max(changed)}"
    forward = [p for p in summary.problems("h100_gemm") if p.op == "gemm forward" and "triton" in p.us]
    yield "Triton", f"{mean(p.us['cublas'] / p.us['triton'] for p in forward):.2f}"


def of_groups_and_fp8():
    found = summary.problems("h100_grouped_gemm")
    yield "groups", mean_and_worst(faster([p for p in found if "depth" not in p.op]))
    yield "sums over groups", mean_and_worst(faster([p for p in found if "depth" in p.op]))
    for run, name in (("scaled_grouped_gemm", "fp8 groups"), ("scaled_gemm", "fp8"), ("fp8_decode", "fp8 few rows")):
        found = [p for p in summary.problems(f"h100_{run}") if p.peer.startswith("torch")]
        for scales in ("blocks", "rows", "one scale"):
            if its := [p for p in found if p.op.endswith(scales)]:
                yield f"{name}, {scales}", mean_and_worst(faster(its))
    for scales in ("blocks", "rows", "one scale"):
        peer = f"torch {scales}"
        its = [p for p in summary.problems("h100_scaled_gemm_random") if p.op.endswith(scales) and peer in p.us]
        yield f"fp8 drawn, {scales}", mean_and_worst(faster(its, peers=[peer]))
        if scales == "one scale":
            yield "fp8 drawn, worst", worst_of(its, peers=[peer])
    found = summary.problems("h100_rmsnorm_quantize")
    yield "rmsnorm_quantize", mean_and_worst(faster(rows_between(found, 4096, sys.maxsize), peers=["copy"]))
    yield "rmsnorm_quantize, few", mean_and_worst(faster(rows_between(found, 64, 1024), peers=["copy"]))
    found = [p for p in summary.problems("h100_quantize") if p.extents[0] > 64]
    yield "quantize", mean_and_worst(faster([p for p in found if "both" not in p.shape]))
    yield "quantize both", mean_and_worst(faster([p for p in found if "both" in p.shape]))


def of_rows():
    for name, op in (("rmsnorm", "rmsnorm"), ("rmsnorm gradients", "rmsnorm_backward")):
        found = [p for p in summary.problems("h100_rmsnorm") if p.op == op]
        yield f"{name}, a copy", mean_and_worst(faster(found, peers=["copy"]))
        yield f"{name}, the fastest", mean_and_worst(faster(found, peers=["torch", "quack", "liger"]))
    for run, names in {
        "rmsnorm": {"rmsnorm": ["rmsnorm"], "rmsnorm gradients": ["rmsnorm_backward"]},
        "layernorm": {"layernorm": ["layernorm"], "layernorm gradients": ["layernorm_backward"]},
        "softmax": {
            "log_prob": ["log_prob"],
            "softmax": ["softmax", "log_softmax"],
            "softmax gradients": ["softmax_backward", "log_softmax_backward"],
        },
    }.items():
        for name, ops in names.items():
            found = [p for p in summary.problems(f"h100_{run}_random") if p.op in ops]
            odd = [p for p in found if p.extents[1] % 8]
            beside_quack = [p for p in found if "quack" in p.us]
            if beside_quack:
                yield f"{name}, quack", mean_and_worst(faster(beside_quack, peers=["quack"]))
            yield f"{name}, whole", mean_and_worst(faster([p for p in found if p not in odd], peers=["torch"]))
            yield f"{name}, odd", mean_and_worst(faster(odd, peers=["torch"]))
    found = summary.problems("h100_fold")
    yield "fold", mean_and_worst(faster(found))
    yield "fold, tree", mean_and_worst(faster(found, "pydet, tree"))


def of_adamw():
    """The kernel in a graph, of parameters in fp32 and bf16; and the optimizer's whole step, with its host."""
    found = summary.problems("h100_adamw")
    for name, few in (("adamw", False), ("adamw, few", True)):
        of_size = [p for p in found if p.shape.startswith("300 of") == few]
        yield f"{name}, a copy", mean_and_worst(faster(of_size, peers=["copy"]))
        beside = [p for p in of_size if "torch fused" in p.us]
        yield f"{name}, fused", mean_and_worst(faster(beside, peers=["torch fused"]))
    steps = [row for row in summary.rows("h100_adamw_steps") if row["shape"].startswith("300 of")]
    yield "adamw, few, host", mean_and_worst(row["torch fused us"] / row["pydet us"] for row in steps)


def of_head():
    """The head and its loss in bf16, at four shapes of published models."""
    found = summary.problems("h100_head")
    for name, op, ours, peer in (
        ("at once", "head and loss", "pydet, at once", "three torch.mm"),
        ("at once, stock", "head and loss", "pydet, at once", "stock, loss in fp32"),
        ("in fp32", "head and loss", "pydet, at once, dw in fp32", "three torch.mm"),
        ("made again", "head and loss", "pydet", "four torch.mm"),
        ("forward", "head, log_prob", "pydet", "one torch.mm"),
        ("forward with the entropy", "head, log_prob", "pydet, with the entropy", "stock, with the entropy"),
        ("policy", "head, policy", "pydet", "stock"),
    ):
        yield f"head, {name}", mean_and_worst(faster([p for p in found if p.op == op], ours, [peer]))
    dx = summary.problems("h100_head_dx")
    few, some, many = (rows_between(dx, *ends) for ends in ((1, 64), (128, 256), (512, 8192)))
    yield "head, dx", ", ".join(mean_and_worst(faster(its)) for its in (few, some, many))
    mb = {(row["op"], row["shape"], row["variant"]): row["MB"] for row in summary.rows("h100_head_memory")}
    of_loss = [mb["head and loss", "8192 x 4096 x 128256", name] for name in (
        "pydet, at once", "pydet, at once, dw in fp32", "stock, loss in fp32")]  # fmt: skip
    yield "head, GB", ", ".join(f"{x / 1e3:.1f}" for x in of_loss)
    of_policy = [mb["head, policy", "8192 x 4096 x 128256", name] for name in ("pydet", "stock")]
    yield "head, policy, GB", ", ".join(f"{x / 1e3:.1f}" for x in of_policy)
    found = summary.problems("h100_sample")
    yield "sample", mean_and_worst(faster(found))
    for name, filters in (("none", ""), ("k", ", top_k 50"), ("p", ", top_p 0.9")):
        its = [p for p in found if p.op == f"sample{filters}"]
        yield f"sample, FlashInfer, {name}", mean_and_worst(faster(its, peers=["flashinfer"]))
    its = [p for p in found if "min_p" in p.op]
    yield "sample, FlashInfer, all", mean_and_worst(faster(its, peers=["flashinfer"]))
    tables = summary.problems("h100_embedding_random")
    for op in ("embedding", "embedding backward", "embedding backward, continued"):
        its = [p for p in tables if p.op == op]
        yield op, mean_and_worst(faster(its))
        yield f"{op}, worst", worst_of(its)


def of_attention():
    """Beside each peer, where it takes the problem at all."""
    for name, run in (
        ("attention", "attention"),
        ("attention gradients", "attention_backward"),
        ("decode", "attention_decode"),
        ("packed", "attention_varlen"),
    ):
        found = summary.problems(f"h100_{run}_random")
        for peer in ("cudnn", "flash"):
            if its := [p.us[peer] / plot.own(p.us) for p in found if peer in p.us]:
                yield f"{name}, {peer}", mean_and_worst(its)
                yield f"{name}, {peer}, mean", f"{mean(its):.2f}"


def of_calls_and_cpu():
    us = {row["call"]: row["us"] for row in summary.rows("h100_overhead")}
    yield "a call", f"{us['pydet.gemm, out=']:.1f}"
    yield "a call of torch.mm", f"{us['torch.mm, out=']:.1f}"
    found = summary.problems("cpu")
    for threads in (1, 2):
        here = [p for p in found if p.threads == threads]
        products = [p for p in here if p.op == "gemm" and p.dtype == "fp32" and "," not in p.shape]
        yield f"cpu gemm, {threads}", ", ".join(f"{x:.2f}" for x in faster(products))
        for m in (1, 8):
            few = [next(p for p in here if p.shape == f"{m} x 4096 x 4096, {b}") for b in ("w[N,K]", "b[K,N]")]
            yield f"cpu {m} rows, {threads}", ", ".join(f"{x:.2f}" for x in faster(few))
        norms = [next(p for p in here if (p.op, p.dtype) == ("rmsnorm_backward", t)) for t in ("fp32", "bf16")]
        yield f"cpu norms, {threads}", ", ".join(f"{x:.1f}" for x in faster(norms))
    model = next(p for p in found if (p.op, p.dtype) == ("gemm sm90", "bf16"))
    yield "cpu model", f"{model.rate('cpu_gemm_sm90_avx512'):.0f}"
    yield "cpu model, AVX2", f"{model.rate('cpu_gemm_sm90_avx2'):.0f}"
    model = next(p for p in summary.problems("cpu_fp8") if "sm90" in p.op and "group" in p.shape)
    yield "cpu fp8 model", f"{model.rate('cpu_scaled_gemm_sm90_avx512'):.1f}"
    yield "cpu fp8 model, AVX2", f"{model.rate('cpu_scaled_gemm_sm90_avx2'):.1f}"
    calls = {p.shape: p.us for p in found if p.op == "call"}
    yield "cpu call, NumPy", f"{calls['NumPy arrays, out=']['pydet']:.2f}"
    yield "cpu call, torch", f"{calls['torch tensors, out=']['pydet']:.2f}"
    yield "cpu call, torch.mm", f"{calls['torch tensors, out=']['torch.mm']:.2f}"
    yield "release of cpu", summary.release("cpu")
    yield "release of cpu_fp8", summary.release("cpu_fp8")


def of_training():
    """A rollout and its trainer, on one GPU."""
    (found,) = summary.rows("h100_rl_alignment")
    batches, step = (1, 3, 64), "gradients, one batch and four micro-batches"
    ways = {"PyTorch": "torch", "override": "override_aten", "converted": "pydet", "fp8": "pydet, fp8"}
    for name, way in ways.items():
        its = found[way]
        decode = [its[f"decode in batches of {n}"] for n in batches]
        yield f"{name}: sequences", ", ".join(str(d["not those of the largest batch"]) for d in decode[:2])
        yield f"{name}: log-probabilities", ", ".join(str(d["differ from the trainer's"]) for d in decode)
        yield f"{name}: gradients", millions(its[step]["differ"])
        yield f"{name}: tokens a second", ", ".join(f"{d['tokens a second']:.0f}" for d in decode)
        yield f"{name}: step", f"{its[step]['ms a step']:.0f}"
        yield f"{name}: exact step", f"{its[step]['ms a step']:.1f}"
        yield f"{name}: step in four", f"{its[step]['ms a step in four']:.0f}"
        yield f"{name}: GB", ", ".join(f"{mb / 1e3:.1f}" for mb in its[step]["MB at most"])

    def tokens(way):
        return [found[way][f"decode in batches of {n}"]["tokens a second"] for n in batches]

    def times(one, other):
        return [x / y for x, y in zip(tokens(one), tokens(other), strict=True)]

    yield "decoding", "{:.2f}, {:.2f} and {:.2f}".format(*times("pydet", "torch"))
    yield "fp8: decoding", "{:.2f}, {:.2f} and {:.2f}".format(*times("pydet, fp8", "pydet"))
    (both,) = summary.rows("h100x2_rl_alignment")
    for name, way in (("PyTorch", "torch, all-reduces"), ("pydet", "pydet")):
        decode = [both[way][f"decode in batches of {n}"] for n in batches]
        yield f"2 ranks, {name}: log-probabilities", ", ".join(str(d["differ from the trainer's"]) for d in decode)
        yield f"2 ranks, {name}: sequences", ", ".join(str(d["not those of the largest batch"]) for d in decode[:2])
        yield f"2 ranks, {name}: tokens a second", ", ".join(f"{d['tokens a second']:.0f}" for d in decode)


def millions(count):
    return f"{count / 1e6:.0f} million" if count else "0"


def of_ranks():
    for ranks in (2, 8):
        rows = summary.rows(f"h100x{ranks}_distributed")
        bits = next(row for row in rows if row["part"] == "bits" and row.get("ranks", ranks) == ranks)
        yield f"{ranks} ranks: results", f"{bits['elements']:,}"
        yield f"{ranks} ranks: fp32 sums", f"{bits['controls']['all_reduce of fp32 sums']:,}"
        yield f"{ranks} ranks: rounded sums", f"{bits['controls']['all_reduce, rounded']:,}"
    for ranks, run in ((2, "h200x2-rows"), (4, "h100x4"), (8, "h100x8")):
        rows = [row for row in summary.rows(f"{run}_distributed") if row["part"] == "row"]
        for n, k in {(row["n"], row["k"]): None for row in rows}:
            here = {row["m"]: row for row in rows if (row["n"], row["k"]) == (n, k)}
            counts = distributed_tables.segments_of(here[1])
            us = {m: distributed_tables.columns(row, counts) for m, row in here.items()}
            title, *others = us[1]
            speeds = {other: {m: its[title] / its[other] for m, its in us.items()} for other in others}
            ours = [f"row_parallel_linear, {count} segments" for count in counts]
            name = f"{ranks} ranks, {n} x {k}"
            both = ("; ".join(f"{speeds[one][m]:.2f}" for one in ours) for m in (1, 16, 64, 512, 4096))
            yield name, " | ".join(both)
            shown = (1, 4, 16, 64, 256, 512, 4096)
            yield f"{name}: us", " | ".join(f"{us[m][title]:.{1 if us[m][title] < 100 else 0}f}" for m in shown)
            for other in others:
                yield f"{name}: {other}", " | ".join(f"{speeds[other][m]:.2f}" for m in shown)
    yield from of_two_ranks(summary.rows("h200x2_distributed"))


def of_two_ranks(rows):
    """Eight segments of each product by each method, N, K = 4096, 14336 and 8192, 8192; experts and a head."""
    products = [{row["m"]: row for row in rows if row["part"] == "row" and row["n"] == n} for n in (4096, 8192)]

    def speed(row, method=None):
        return row["us"][distributed_tables.PLAIN] / row["us"][f"{method or row['auto']['8']}, 8 segments"]

    for method in ("peer_one_shot", "peer_two_shot", "peer_stream", "relay"):
        shown = [m for m in products[0] if f"{method}, 8 segments" in products[0][m]["us"] and m != 8]
        yield f"{method} of two", " | ".join(", ".join(f"{speed(of[m], method):.2f}" for of in products) for m in shown)
    few = [[speed(row) for m, row in of.items() if m <= 64] for of in products]
    yield "two ranks, 1 to 64 rows", "; ".join(f"{min(found):.2f} to {max(found):.2f}" for found in few)
    yield "two ranks, 512 rows", "; ".join(f"{speed(of[512]):.2f}" for of in products)
    yield "two ranks, 4096 rows, a graph", "; ".join(f"{speed(of[4096]):.2f}" for of in products)
    yield "two ranks, 4096 rows, eagerly", "; ".join(f"{speed(of[4096], 'peer_stream'):.2f}" for of in products)
    for row in (row for row in rows if row["part"] == "experts"):
        us = row["us"]
        for peer in ("plain", "one GPU"):
            both = (us[f"{peer}, {part}"] / us[f"expert_parallel, {part}"] for part in ("forward", "step"))
            yield f"experts, {row['tokens']} tokens, {peer}", " and ".join(f"{ratio:.2f}" for ratio in both)
    (head,) = (row["us"] for row in rows if row["part"] == "head")
    ms = ("vocab_parallel_linear_log_prob", "one GPU, linear_log_prob", "plain, logits in memory")
    for name in ms:
        yield f"head of two, {name}", f"{head[name] / 1e3:.1f}"
    yield "head of two", f"{head['one GPU, segments'] / head[ms[0]]:.2f}"


def of_hand():
    """What no command of bench/ measures: bench/results/by_hand.json says of each how."""
    for name, figure in json.loads((summary.FOLDER / "by_hand.json").read_text()).items():
        yield name, figure["says"]


def figures():
    found = {"release of the H100": plot.release()}
    for part in (
        of_products,
        of_groups_and_fp8,
        of_rows,
        of_adamw,
        of_head,
        of_attention,
        of_calls_and_cpu,
        of_training,
        of_ranks,
        of_hand,
    ):
        for name, says in part():
            assert name not in found, name
            found[name] = says
    return found


# ---- Pages -----------------------------------------------------------------------------------------------------------

CAPTION = (
    "![On an H100, release {release of the H100}, for shapes of known models, pydet is {up to 32 rows} times as "
    "fast as cuBLAS up to 32 rows and {above 128 rows} times above 128. Its attention has {attention, cudnn, mean} of "
    "cuDNN's speed, and {attention, flash, mean} times that of PyTorch's flash. cuBLAS changes {cuBLAS changes} of "
    "10,000 elements where it splits K; pydet changes none.]"
)
# Page: the sentences and lines of tables that quote results, {name} where a figure stands.
QUOTES = {
    "README.md": [
        CAPTION,
        "On an H100, release {release of the H100}, in 16 bits where a line says nothing else",
        "| products of models that no table of tiles was fitted to, drawn at random | cuBLAS | {drawn} |",
        "| of these, 1 to 64 rows; 2049 to 8192 rows | cuBLAS | {forward 1 to 64}; {forward 2049 to 8192} |",
        "| rows that lie at no multiple of 16 bytes (K = 3420) | cuBLAS | {drawn, odd rows} |",
        "| a policy's loss: log-probabilities, entropy, gradients of the head | PyTorch | {head, policy} |",
        "| experts' groups of tokens | `torch._grouped_mm` | {groups} |",
        "| fp8 by blocks, 512 rows and more; few rows | cuBLASLt | {fp8, blocks}; {fp8 few rows, blocks} |",
        "| attention of whole sequences; its gradients | cuDNN | {attention, cudnn}; {attention gradients, cudnn} |",
        "| the same | PyTorch's flash | {attention, flash}; {attention gradients, flash} |",
        "| decoding | cuDNN; PyTorch's flash | {decode, cudnn}; {decode, flash} |",
        "| RMSNorm, forward; backward | the fastest of PyTorch, quack, Liger | {rmsnorm, the fastest}; "
        "{rmsnorm gradients, the fastest} |",
        "| fp32 products on two cores of an AMD EPYC (Zen 5), release 0.1.0 | NumPy's OpenBLAS | {cpu gemm, 2} |",
        "a training step of four layers of Llama at 8B width takes {models: pydet step} ms, stock {models: stock step}",
    ],
    "docs/neighbours.md": ["A plain Triton product has {Triton} of cuBLAS's speed in our results."],
    "docs/speed.md": [
        CAPTION,
        "| prefill, 1 x 4096 and 2 x 8192 tokens | {models: stock prefill} | {models: pydet prefill} |",
        "| decode of 64 sequences, 1024 and 4096 keys | {models: stock decode} | {models: pydet decode} |",
        "| training step, 2 x 2048 | {models: stock step} | {models: pydet step} |",
        "| attention of sequences beside cuDNN, PyTorch's flash | {attention, cudnn}, {attention, flash} |",
        "| its gradients | {attention gradients, cudnn}, {attention gradients, flash} |",
        "| decoding: 1 to 16 queries of a sequence, long caches | {decode, cudnn}, {decode, flash} |",
        "| packed sequences beside PyTorch's flash | {packed, flash} |",
        "| sequences of batches of 1, 3 that are not those of the batch of 64 | {PyTorch: sequences} | "
        "{override: sequences} | {converted: sequences} | {fp8: sequences} |",
        "| log-probabilities that differ, batches of 1, 3, 64 | {PyTorch: log-probabilities} | "
        "{override: log-probabilities} | {converted: log-probabilities} | {fp8: log-probabilities} |",
        "| gradient elements that differ | {PyTorch: gradients} | {override: gradients} | {converted: gradients} | "
        "{fp8: gradients} |",
        "| tokens a second, batches of 1, 3, 64 | {PyTorch: tokens a second} | {override: tokens a second} | "
        "{converted: tokens a second} | {fp8: tokens a second} |",
        "| ms a training step | {PyTorch: step} | {override: step} | {converted: step} | {fp8: step} |",
        "| the same in four micro-batches | {PyTorch: step in four} | {override: step in four} | "
        "{converted: step in four} | {fp8: step in four} |",
        "| GB at most, in one batch, in four | {PyTorch: GB} | {override: GB} | {converted: GB} | {fp8: GB} |",
        "| 2 and 8 H100s against one, {2 ranks: results} and {8 ranks: results} results of 100 random shapes |",
        "| an all-reduce of the fp32 partial sums | {2 ranks: fp32 sums}, {8 ranks: fp32 sums} |",
        "| an all-reduce of rounded ones | {2 ranks: rounded sums}, {8 ranks: rounded sums} |",
        "| 2 H200s, a segment each; 8 segments | {2 ranks, 4096 x 14336} |",
        "| 4 H100s, a segment each; 8 segments (an older library) | {4 ranks, 4096 x 14336} |",
        "| 8 H100s, a segment each (an older library) | {8 ranks, 4096 x 14336} |",
        "On two cores of an AMD EPYC (Zen 5, AVX-512), release {release of cpu} (fp8: {release of cpu_fp8}), from "
        "[its results](reference/results/cpu.md), `make bench`, NumPy 2.4 with its own OpenBLAS and PyTorch 2.13",
        "| fp32 GEMM, 512x4096x4096, 1024^3, 2048^3, beside NumPy | {cpu gemm, 1} | {cpu gemm, 2} |",
        "| 8 rows by 4096x4096 weights, w [N, K] and b [K, N], beside NumPy | {cpu 8 rows, 1} | {cpu 8 rows, 2} |",
        "| **1 row, the same** (the worst) | {cpu 1 rows, 1} | {cpu 1 rows, 2} |",
        "| RMSNorm backward, 4096x4096, fp32 and bf16, beside PyTorch | {cpu norms, 1} | {cpu norms, 2} |",
        "| fp32 GEMM, 1024^3, 700x3000x1500, beside NumPy on a Zen 4; on a Xeon with AMX | {cpu zen4}; {cpu xeon} | |",
        "| 1 row by 4096x4096, w [N, K] and b [K, N], beside NumPy on that Zen 4 | {cpu zen4 row} | |",
        "| bf16 GEMM, 1024^3, beside PyTorch's AMX on that Xeon; 1 row by 4096x4096 | {cpu amx} | |",
        "| the model of Hopper's tensor cores, bf16 | {cpu model} GMAC/s (AVX2: {cpu model, AVX2}) | |",
        "| the same in fp8, by groups and blocks (one core) | {cpu fp8 model} GMAC/s (AVX2: {cpu fp8 model, AVX2}) | |",
        "| a call on 4x4 arrays with `out=` | NumPy {cpu call, NumPy} us, torch {cpu call, torch} us "
        "(torch.mm {cpu call, torch.mm}) | |",
        "On an H100, release {release of the H100}, `python -m bench.cuda`",
        "beside cuBLAS: rows at multiples of 16 bytes; 5th percentile {drawn, 5th percentile} | {drawn} |",
        "| the same: other rows (K or N of 1156, 3420; worst above 128 rows: {worst odd rows}) | {drawn, odd rows} |",
        "| forward: 1 to 64 rows, 65 to 128, 129 to 512 | {forward 1 to 64}, {forward 65 to 128}, "
        "{forward 129 to 512} |",
        "| **forward: 513 to 2048 rows, 2049 to 8192** | {forward 513 to 2048}, {forward 2049 to 8192} |",
        "| forward, sums over no whole 64 (K = 4304, 1712, 200) | {sums over no whole 64} |",
        "| 513 rows and more at the card's power limit, all directions (worst: {sustained, worst}) | {sustained} |",
        "| of these, dA: 1 to 128 rows, more; dB | {dA few}, {dA many}; {dB} |",
        "| of these, results in fp32; **tiles with `k_chunk` of 1024** | {fp32 results}; {chunks} |",
        "| few rows on constant weights, beside cuBLAS: 1 to 64, 128 | {few rows}, {128 rows} |",
        "4096x4096x4096 and 8192x8192x2048 in three layouts | {ieee} |",
        "| groups of tokens beside `torch._grouped_mm`: products, sums over groups | {groups}, {sums over groups} |",
        "with fast accumulation: by blocks, by rows | {fp8 groups, blocks}, {fp8 groups, rows} |",
        "512 rows and more: by blocks, by rows, one scale | {fp8, blocks}, {fp8, rows}, {fp8, one scale} |",
        "| up to 128 rows: by blocks, by rows | {fp8 few rows, blocks}, {fp8 few rows, rows} |",
        "| drawn at random, 1 to 8192 rows: by blocks, by rows, **one scale** (worst: {fp8 drawn, worst}) | "
        "{fp8 drawn, blocks}, {fp8 drawn, rows}, {fp8 drawn, one scale} |",
        "by blocks beside DeepGEMM**: 512 rows and more, up to 128 | {DeepGEMM}, {DeepGEMM few rows} |",
        "of the speed of a copy: alone, with the transposed copy | {quantize}, {quantize both} |",
        "| RMSNorm and `quantize` in one pass, of the speed of a copy: 4096 rows and more, 64 to 1024 | "
        "{rmsnorm_quantize}, {rmsnorm_quantize, few} |",
        "| the head and its loss beside three products of cuBLAS: at once, with dw in fp32 | {head, at once}, "
        "{head, in fp32} |",
        "| by autograd, logits made again, beside four products | {head, made again} |",
        "| the same at once beside PyTorch's, loss in fp32 | {head, at once, stock} |",
        "| log-probabilities alone beside one product; with the entropy beside PyTorch's | {head, forward}; "
        "{head, forward with the entropy} |",
        "| a policy's loss with a temperature and its entropy, forward and backward, beside PyTorch's | "
        "{head, policy} |",
        "| the head's dx beside cuBLAS: 1 to 64 rows, **128 and 256**, 512 and more | {head, dx} |",
        "| GB of 8192 x 4096 x 128256: at once, with dw in fp32, PyTorch's; a policy's, PyTorch's | {head, GB}; "
        "{head, policy, GB} |",
        "| `sample`, with and without filters, beside `torch.multinomial` after PyTorch's own | {sample} |",
        "| the same beside FlashInfer's sampler: no filter, top_k, **top_p**, all three | {sample, FlashInfer, none}, "
        "{sample, FlashInfer, k}, {sample, FlashInfer, p}, {sample, FlashInfer, all} |",
        "| rows of tables; **their gradients; the same continued** beside `index_add_`, whose atomics have no order | "
        "{embedding}; {embedding backward}; {embedding backward, continued} |",
        "| gradients of tables by many tokens (tokens, columns, rows) | PyTorch's atomics | "
        "{embedding backward, worst} |",
        "forward and backward, of the speed of a copy | {rmsnorm, a copy}, {rmsnorm gradients, a copy} |",
        "PyTorch, quack and Liger | {rmsnorm, the fastest}, {rmsnorm gradients, the fastest} |",
        "| RMSNorm at random sizes beside quack, forward, backward | {rmsnorm, quack}, {rmsnorm gradients, quack} |",
        "| RMSNorm at random sizes beside PyTorch, forward, backward: rows of whole pieces of 16 bytes | "
        "{rmsnorm, whole}, {rmsnorm gradients, whole} |",
        "| RMSNorm, other rows | {rmsnorm, odd}, {rmsnorm gradients, odd} |",
        "| LayerNorm at random sizes beside PyTorch, forward, backward: rows of whole pieces of 16 bytes | "
        "{layernorm, whole}, {layernorm gradients, whole} |",
        "| LayerNorm, other rows | {layernorm, odd}, {layernorm gradients, odd} |",
        "| LayerNorm at random sizes beside quack, forward, backward; softmax likewise | {layernorm, quack}, "
        "{layernorm gradients, quack}; {softmax, quack}, {softmax gradients, quack} |",
        "rows of whole pieces of 16 bytes | {log_prob, whole}; {softmax, whole}; {softmax gradients, whole} |",
        "| softmax, other rows | {log_prob, odd}; {softmax, odd}; {softmax gradients, odd} |",
        "of the speed of a copy; beside PyTorch's fused one | {adamw, a copy}; {adamw, fused} |",
        "| 300 parameters of up to 8191 elements: the same; **with the host's time** | {adamw, few, a copy}; "
        "{adamw, few, fused}; {adamw, few, host} |",
        "beside `torch.sum` over them: in order, as a tree | {fold}, {fold, tree} |",
        "| host time of a call with `out=` | {a call} us (torch.mm {a call of torch.mm}) |",
        "fill less than half of the GPU | cuBLAS | 512x512x2048: {ieee 512x512x2048} |",
        "which pydet does not split (96 to 288 x 1024 x 50304 of dA on an H200) | cuBLAS | {few outputs} |",
        "and on odd ones of more than 33000 | PyTorch | {slow log_softmax} of its speed",
    ],
    "docs/calls.md": [
        "Products drawn at random have {chunks} of cuBLAS's speed with it.",
        "On an H100, bf16, release {release of the H100}, beside cuBLAS",
        "a Llama of 4 layers, 64 x 384 tokens, {compiled Llama} ms (eager {eager Llama})",
        "A training step of a Llama of 672 million parameters: {converted: exact step} ms converted, "
        "{PyTorch: exact step} ms not. Decoding 1, 3 and 64 sequences: {decoding} of PyTorch's tokens a second.",
    ],
    "docs/faq.md": [
        "it is {drawn, mean} times as fast as cuBLAS in the mean",
        "{drawn, worst} at worst",
    ],
    "docs/index.md": [CAPTION],
    "docs/rl.md": [
        "take {head, policy} times as long in PyTorch, forward and backward; the largest takes {head, policy, GB} GB",
        "Sampling was {decoding} times as fast as PyTorch's",
        "A training step takes {converted: step} ms (PyTorch: {PyTorch: step}), one in four micro-batches "
        "{converted: step in four} ({PyTorch: step in four})",
        "sampling is {fp8: decoding} times as fast as with converted layers in bf16",
        "a training step {fp8: step} ms instead of {converted: step}",
    ],
    "docs/distributed.md": [
        "decoded tokens {moe, a graph} times as fast with the same tokens on both ranks (pydet on one: {moe, one GPU})",
        "read {moe, read} with the tokens shared out (stock's all-to-all {moe, stock read}, pydet on one "
        "{moe, read on one})",
        "takes on one GPU {moe, step on one} with gradients as PyTorch keeps them, {moe, main_grad on one} with fp32 "
        "sums",
        "over two it takes {moe, step}** (stock's all-to-all {moe, stock step}): fp32 sums",
        "with the bits of two: {moe, segments on one}.",
        "batches of 1, 3, 64 | {2 ranks, PyTorch: log-probabilities} of 6243 | {2 ranks, pydet: log-probabilities} |",
        "not those of the batch of 64 | {2 ranks, PyTorch: sequences} | {2 ranks, pydet: sequences} |",
        "| tokens a second, batches of 1, 3, 64 | {2 ranks, PyTorch: tokens a second} | "
        "{2 ranks, pydet: tokens a second} |",
        "| torch.mm + NCCL all-reduce in bf16, us | {8 ranks, 4096 x 14336: us} |",
        "| the same in fp32 | {8 ranks, 4096 x 14336: the same in fp32} |",
        "| torch's symmetric-memory all-reduce in bf16 | "
        "{8 ranks, 4096 x 14336: with torch's symmetric-memory all-reduce} |",
        "| `row_parallel_linear` | {8 ranks, 4096 x 14336: row_parallel_linear, 8 segments} |",
        "| `row_parallel_linear`, S = 4 | {4 ranks, 4096 x 14336: row_parallel_linear, 4 segments} | "
        "| S = 8 | {4 ranks, 4096 x 14336: row_parallel_linear, 8 segments} |",
        "| N, K = 4096, 14336, S = 2 | {2 ranks, 4096 x 14336: row_parallel_linear, 2 segments} | "
        "| S = 8 | {2 ranks, 4096 x 14336: row_parallel_linear, 8 segments} |",
        "| N, K = 8192, 8192, S = 2 | {2 ranks, 8192 x 8192: row_parallel_linear, 2 segments} | "
        "| S = 8 | {2 ranks, 8192 x 8192: row_parallel_linear, 8 segments} |",
        "| `peer_one_shot` | {peer_one_shot of two} |",
        "| `peer_two_shot` | {peer_two_shot of two} |",
        "| `peer_stream` | {peer_stream of two} |",
        "| `relay` |  |  |  |  | {relay of two} |",
        "| 1 to 64 | 1.00 | {two ranks, 1 to 64 rows} |",
        "| 512 | 0.95 | {two ranks, 512 rows} |",
        "| 4096 | 0.95 | {two ranks, 4096 rows, a graph} by `relay` | "
        "{two ranks, 4096 rows, eagerly} by `peer_stream` |",
        "of 4,096 tokens {experts, 4096 tokens, one GPU} times as fast as on one of them, and "
        "{experts, 4096 tokens, plain} times as fast as PyTorch's",
        "of 128 tokens {experts, 128 tokens, one GPU} times as fast as on one, and {experts, 128 tokens, plain} times "
        "as fast as PyTorch's",
        "take {head of two, vocab_parallel_linear_log_prob} ms on two GPUs, where `linear_log_prob` takes "
        "{head of two, one GPU, linear_log_prob} on one and PyTorch, with the logits in memory, "
        "{head of two, plain, logits in memory} on two",
        "It is {head of two} times as fast as the same segments on one",
        "all-reduce of the same fp32 sums differs in {8 ranks: fp32 sums}, of rounded ones in {8 ranks: rounded sums}",
        "of all-reduced fp32 sums {2 ranks: fp32 sums}, of rounded ones {2 ranks: rounded sums}",
    ],
}
# Sections in which no measured number may stand outside of a quote.
MEASURED = {
    "README.md": ["## Speed"],
    "docs/speed.md": ["## On an H100", "## On a CPU", "## Across GPUs"],
    "docs/calls.md": ["## Which arithmetic", "## What it costs"],
    "docs/faq.md": ["## Is it slower?"],
}
ONE = r"(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?: \(\d+\.\d+\))?"
FIGURE = rf"({ONE}(?:(?:,|;| and| to| \|)\s+{ONE})*|{ONE} million|\d+x\d+x\d+: {ONE}|\d+\.\d+\.\d+)"
NUMBER = r"\d*\.\d+|\d+(?= (?:us|ms|%|times|GMAC/s|GB/s|TB/s|TFLOP/s|GFLOP/s)\b)"


def pattern(quote):
    """A regular expression of the quote in a page, whatever its figures and its line breaks."""
    parts = re.split(r"\{([^}]+)\}", quote)
    words = [re.sub(r"(?:\\ |\s)+", lambda _: r"\s+", re.escape(part)) for part in parts[::2]]
    return FIGURE.join(words), parts[1::2]


def section(text, title):
    """Where a section lies in a page."""
    start = text.index(f"{title}\n")
    end = re.compile(rf"^#{{1,{title.count('#')}}} ", re.M).search(text, start + len(title))
    return start, end.start() if end else len(text)


def examine(page, text, known):
    """The page's text with today's figures, and what is wrong with it."""
    problems, changes, quoted = [], [], []
    for quote in QUOTES[page]:
        expression, names = pattern(quote)
        found = list(re.finditer(expression, text))
        if len(found) != 1:
            problems.append(f"{page}: want once, found {len(found)} times: {quote}")
            continue
        (match,) = found
        quoted.append(match.span())
        for number, name in enumerate(names, 1):
            if " ".join(match[number].split()) != known[name]:
                problems.append(f"{page}: {match[number]}, results: {known[name]} ({name})")
                changes.append((*match.span(number), known[name]))
    for title in MEASURED.get(page, ()):
        start, end = section(text, title)
        for number in re.compile(NUMBER).finditer(text, start, end):
            if not any(first <= number.start() < last for first, last in quoted):
                line = text[text.rindex("\n", 0, number.start()) + 1 : text.index("\n", number.end())]
                problems.append(f"{page}: {number[0]} is no quote of a result: {line}")
    for first, last, says in sorted(changes, reverse=True):
        text = text[:first] + says + text[last:]
    return text, problems


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench.quotes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the figures into the pages")
    given, known, problems = parser.parse_args(arguments), figures(), []
    for page in QUOTES:
        text, found = examine(page, (ROOT / page).read_text(), known)
        if given.write:
            (ROOT / page).write_text(text)
            found = examine(page, text, known)[1]
        problems += found
    return "\n".join(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
