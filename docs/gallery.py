"""The figures of docs/gallery.md and docs/sums.md, as SVG in docs/figures/: python docs/gallery.py

Numbers in them are computed here, in fp32, or read from bench/results. tests/test_gallery.py compares the files.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "figures"
INK, GREY, GREEN, RED, BLUE, PALE = "#1d2b36", "#8a8a8a", "#2a7f62", "#b5533c", "#3565a8", "#e6efe9"


class Figure:
    """Shapes and words on a white page."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title, self.parts = width, height, title, []

    def text(self, x, y, words, size=14, color=INK, anchor="start", weight="normal", family="sans-serif") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
            f'font-weight="{weight}" font-family="{family}" xml:space="preserve">{escape(str(words))}</text>'
        )

    def code(self, x, y, words, size=13, color=INK, anchor="start") -> None:
        self.text(x, y, words, size, color, anchor, family="monospace")

    def box(self, x, y, width, height, fill="white", edge=INK, words="", color=INK, size=13) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{edge}"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + size * 0.36, words, size, color, "middle")

    def line(self, x, y, to_x, to_y, color=INK, arrow=True, width=1.5) -> None:
        end = f' marker-end="url(#arrow-{color[1:]})"' if arrow else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{color}" stroke-width="{width}"{end}/>'
        )

    def path(self, points, color, width=2.0) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"/>')

    def area(self, points, color) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{places}" fill="{color}" fill-opacity="0.15"/>')

    def svg(self) -> str:
        arrows = "".join(
            f'<marker id="arrow-{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{color}"/></marker>'
            for color in (INK, GREY, GREEN, RED, BLUE)
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'role="img"><title>{escape(self.title)}</title><defs>{arrows}</defs>'
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def bits(x: np.float32) -> str:
    return f"0x{int(np.float32(x).view(np.uint32)):08X}"


# ---- Why a batch changes bits, and what a chain does -----------------------------------------------------------------


def terms() -> list[np.float32]:
    """Eight products whose sum depends on its order."""
    return [np.float32(x) for x in (0.1, 0.7, 1000.0, 0.33, -999.5, 0.05, 2.6, 0.9)]


def chained(values) -> np.float32:
    total = np.float32(0)
    for value in values:
        total = np.float32(total + value)
    return total


def batch() -> Figure:
    """The same eight terms, in one chain and in two halves."""
    values = terms()
    one, left, right = chained(values), chained(values[:4]), chained(values[4:])
    two = np.float32(left + right)
    assert one != two
    figure = Figure(760, 430, "The same eight numbers, added in one chain and in two halves, have different last bits")
    figure.text(20, 28, "1. One output element is a sum of products. Here are its eight terms.", weight="bold")
    for place, value in enumerate(values):
        figure.box(20 + 90 * place, 42, 80, 30, PALE, GREY, f"{value:g}")
    figure.text(20, 110, "2. In a large batch the library adds them in one chain, left to right.", weight="bold")
    for place in range(8):
        partial = chained(values[: place + 1])
        figure.box(20 + 90 * place, 124, 80, 30, "white", GREEN, f"{partial:.7g}", GREEN, 12)
        if place:
            figure.line(10 + 90 * place, 139, 19 + 90 * place, 139, GREEN)
    figure.text(
        20, 192, "3. For a single row it splits the sum, to keep the chip busy, and adds two halves.", weight="bold"
    )
    for place in range(8):
        half = values[4 * (place // 4) : place + 1]
        figure.box(20 + 90 * place, 206, 80, 30, "white", RED, f"{chained(half):.7g}", RED, 12)
        if place % 4:
            figure.line(10 + 90 * place, 221, 19 + 90 * place, 221, RED)
    figure.line(330, 236, 370, 266, RED)
    figure.line(690, 236, 410, 266, RED)
    figure.box(340, 268, 90, 30, "white", RED, f"{two:.7g}", RED, 12)
    figure.text(20, 336, "4. Each addition rounds. So the two results differ in their last bits:", weight="bold")
    figure.code(40, 364, f"one chain    {one:.9g}  {bits(one)}", color=GREEN)
    figure.code(40, 386, f"two halves   {two:.9g}  {bits(two)}", color=RED)
    figure.text(20, 414, "The row is the same, the weights are the same. Only the batch was another.")
    return figure


def chain() -> Figure:
    """k_chunk: one chain, or one of each piece, joined in order."""
    figure = Figure(
        760, 330, "A chain adds the terms in ascending order into one accumulator; k_chunk cuts it at fixed places"
    )
    figure.text(20, 28, "A chain: k ascends, one fp32 accumulator, one rounding a step.", weight="bold")
    for place in range(12):
        figure.box(20 + 60 * place, 42, 50, 28, PALE, GREY, f"k = {place}", size=11)
    figure.box(
        20, 84, 710, 26, "white", GREEN, "0 → + a[0] b[0] → + a[1] b[1] → ... → + a[11] b[11] → round once → out", GREEN
    )
    figure.text(20, 152, "k_chunk = 4: a chain of each piece, and the pieces' sums in ascending order.", weight="bold")
    for piece in range(3):
        x = 20 + 240 * piece
        for place in range(4):
            figure.box(x + 58 * place, 166, 50, 28, PALE, GREY, f"k = {4 * piece + place}", size=11)
        figure.box(x, 204, 224, 26, "white", BLUE, f"chain {piece}", BLUE)
        figure.line(x + 112, 230, 120 + 240 * piece, 258, BLUE)
    figure.box(20, 260, 710, 26, "white", GREEN, "0 + chain 0 → + chain 1 → + chain 2 → round once → out", GREEN)
    figure.text(
        20, 314, "The cuts follow from k_chunk alone: not from the batch, the kernel, or the number of processors."
    )
    return figure


def row() -> Figure:
    """A row of a training step, and the same row decoded."""
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((6, 32), np.float32), rng.standard_normal(32, np.float32)
    step = [chained(np.float32(a * b) for a, b in zip(line, w, strict=True)) for line in x]
    alone = chained(np.float32(a * b) for a, b in zip(x[2], w, strict=True))
    assert step[2].tobytes() == alone.tobytes()
    figure = Figure(760, 330, "A row that is decoded alone has the bits of the same row in a training step")
    figure.text(20, 28, "A training step: many rows at once", weight="bold")
    for place, value in enumerate(step):
        own = place == 2
        figure.box(20, 42 + 34 * place, 150, 28, PALE if own else "white", GREEN if own else GREY, f"row {place}")
        figure.line(170, 56 + 34 * place, 208, 56 + 34 * place, GREEN if own else GREY)
        figure.code(214, 61 + 34 * place, bits(value), color=GREEN if own else GREY)
    figure.text(430, 28, "Decoding: row 2 alone", weight="bold")
    figure.box(430, 110, 150, 28, PALE, GREEN, "row 2")
    figure.line(580, 124, 618, 124, GREEN)
    figure.code(624, 129, bits(alone), color=GREEN)
    figure.line(330, 124, 424, 124, GREEN, arrow=False)
    figure.text(377, 116, "the same bits", 12, GREEN, "middle")
    figure.text(
        20, 276, "Other kernels run, on other numbers of processors. Both walk k = 0, 1, 2, ... in one accumulator,"
    )
    figure.text(20, 298, "and no other row takes part. So the log-probabilities of a rollout are those of its trainer.")
    return figure


# ---- The sums of NUMERICS.md -----------------------------------------------------------------------------------------


def stages(title: str, steps: list[tuple[str, str]], note: str = "") -> Figure:
    """A sum as boxes from left to right, with what each does under it."""
    width = 760
    figure = Figure(width, 150 if note else 124, title)
    figure.text(20, 26, title, weight="bold")
    each = (width - 40) / len(steps)
    for place, (name, does) in enumerate(steps):
        x = 20 + each * place
        last = place == len(steps) - 1
        figure.box(x, 42, each - 26, 34, PALE, GREEN, name)
        for number, words in enumerate(does.split("\n")):
            figure.text(x + (each - 26) / 2, 94 + 16 * number, words, 11, INK, "middle")
        if not last:
            figure.line(x + each - 26, 59, x + each - 2, 59, GREEN)
    if note:
        figure.text(20, 140, note, 12)
    return figure


def sums() -> dict[str, Figure]:
    return {
        "sum-gemm": stages(
            "A matrix product: one output element",
            [
                ("row of A, column of B", "K pairs"),
                ("chain", "k ascending,\none accumulator"),
                ("+ bias", "in fp32"),
                ("round", "once, to out's type"),
            ],
        ),
        "sum-grouped": stages(
            "Groups of tokens: the product of its own matrix",
            [
                ("token t", "of group g"),
                ("row of A, matrix g", "no other token"),
                ("chain", "as any product"),
                ("round", "once"),
            ],
        ),
        "sum-scaled": stages(
            "An fp8 product by scales",
            [
                ("128 along k", "fp8 pairs"),
                ("chain of the 128", "from 0"),
                ("x scale of A x of B", "one fmaf into D"),
                ("next 128", "ascending"),
                ("+ bias, round", "once"),
            ],
        ),
        "sum-quantize": stages(
            "Quantisation: a scale of what shares it",
            [
                ("128, a row, a block", "or all of x"),
                ("largest |x|", "any order"),
                ("/ 448 or 57344", "a true division"),
                ("x / scale", "a true division"),
                ("round", "to fp8"),
            ],
        ),
        "sum-row": stages(
            "A sum along a row (norms, softmax)",
            [
                ("row of N", "column j"),
                ("2048 lanes", "lane of j follows\nfrom j alone"),
                ("each lane", "ascending"),
                ("join by halves", "4, 2, 1, then\n128, 64 ... 1"),
                ("one sum", "a function of N"),
            ],
        ),
        "sum-column": stages(
            "A sum down the rows (weight gradients of norms)",
            [
                ("16 rows", "a chain"),
                ("4 chains", "a group, in order"),
                ("4 groups", "a block of 256 rows"),
                ("blocks", "ascending"),
                ("round", "once"),
            ],
            "Micro-batches that end at multiples of 256 rows have the bits of one batch.",
        ),
        "sum-softmax": stages(
            "Softmax of a row",
            [
                ("row", "masked: -Inf"),
                ("largest", "any order"),
                ("exp(x - m)", "the contract's exp"),
                ("sum along the row", "masked adds +0"),
                ("divide, round", "once"),
            ],
        ),
        "sum-head": stages(
            "The head: log-probability of a token, without keeping the logits",
            [
                ("row of x", "hidden state"),
                ("logits", "a chain each,\nrounded"),
                ("softmax of the row", "the sum above"),
                ("one column", "the token's"),
            ],
            "Rows are independent: taken all at once, or in chunks of any size, they have the same bits.",
        ),
        "sum-sample": stages(
            "Sampling: the token of a row",
            [
                ("row of logits", "/ temperature"),
                ("filters", "by whole numbers,\nwithout an order"),
                ("+ noise", "of seed, position\nand column"),
                ("largest", "the first of equals"),
            ],
            "Nothing else decides: the same token alone, in a batch, on a CPU and on a GPU.",
        ),
        "sum-attention": stages(
            "Attention of one query",
            [
                ("keys, from 0", "of its own sequence"),
                ("blocks of 128", "score chains, exp2,\nmaximum so far"),
                ("segment", "of kv_chunk keys"),
                ("join segments", "ascending"),
                ("1 / sum, round", "once"),
            ],
            "A decoded token walks the same blocks as the prefill; padding and other sequences are never counted.",
        ),
        "sum-scan": stages(
            "A scan: one token of one head",
            [
                ("state", "fp32, as the last\ntoken left it"),
                ("x decay", "exp, fixed steps"),
                ("+ this token", "one fmaf a number"),
                ("sum over states", "8 lanes, joined\nby halves"),
                ("round", "once: y"),
            ],
            "Decoding takes these steps one call at a time, a prefill all in one call. There are no chunks.",
        ),
        "sum-embedding": stages(
            "The gradient of a row of a table",
            [
                ("tokens", "of this id alone"),
                ("in their order", "not as they finish"),
                ("chain", "an fp32 addition\neach"),
                ("round", "once"),
            ],
            "Micro-batches in their order have the sum of one batch.",
        ),
        "sum-rotary": stages(
            "A rotary embedding: one pair of a head",
            [
                ("position", "x frequency,\nrounded"),
                ("cos, sin", "a written formula"),
                ("two products", "each rounded"),
                ("their sum", "rounded"),
            ],
        ),
        "sum-activation": stages(
            "An activation",
            [
                ("x", "one element"),
                ("formula", "of exp, fixed steps"),
                ("round", "once"),
                ("x up, round", "for a gate"),
            ],
        ),
        "sum-fold": tree(),
    }


def tree() -> Figure:
    figure = Figure(760, 250, "A fold of partial sums: in order, or by a tree")
    figure.text(20, 26, "A fold of partial sums, made by 4 GPUs: ordered", weight="bold")
    for place in range(4):
        figure.box(20 + 130 * place, 40, 100, 30, PALE, GREY, f"part {place}")
        if place:
            figure.line(120 + 130 * (place - 1), 55, 148 + 130 * (place - 1), 55, GREEN)
    figure.text(560, 60, "((0 + 1) + 2) + 3", 13, GREEN, family="monospace")
    figure.text(20, 112, "by a tree", weight="bold")
    for place in range(4):
        figure.box(20 + 130 * place, 126, 100, 30, PALE, GREY, f"part {place}")
        figure.line(70 + 130 * place, 156, 135 + 260 * (place // 2), 178, GREEN)
    for pair in range(2):
        figure.box(85 + 260 * pair, 180, 100, 26, "white", GREEN, f"{2 * pair} + {2 * pair + 1}", GREEN)
        figure.line(135 + 260 * pair, 206, 265, 226, GREEN)
    figure.text(265, 244, "the sum", 13, GREEN, "middle")
    figure.text(560, 146, "(0 + 1) + (2 + 3)", 13, GREEN, family="monospace")
    return figure


def audit() -> Figure:
    return stages(
        "An audit: what a GPU computed, checked on a CPU",
        [
            ("a, b, c", "as they were saved"),
            ("a sample", "of rows and columns,\nor all"),
            ("the GPU's sum", "its arithmetic,\non the CPU"),
            ("compare bits", "element by element"),
            ("which differ", "index, got, want"),
        ],
        "An element depends on its own row and column, so a sample needs no more than these.",
    )


# ---- Across GPUs -----------------------------------------------------------------------------------------------------

RANKS = (GREEN, BLUE, RED, GREY)


def ranks() -> Figure:
    """Eight segments on one, two and four ranks, and the one order in which their sums are folded."""
    figure = Figure(760, 290, "Eight segments of a sum, shared out over ranks, are folded in one order")
    figure.text(20, 28, "Eight segments of one sum. Who makes which follows from the number of ranks:", weight="bold")
    for line, world in enumerate((1, 2, 4)):
        y = 44 + 40 * line
        figure.text(20, y + 20, f"{world} rank{'s' if world > 1 else ''}", 13)
        for segment in range(8):
            color = RANKS[segment * world // 8]
            figure.box(
                90 + 80 * segment, y, 74, 30, "white", color, f"s{segment}: rank {segment * world // 8}", color, 12
            )
    figure.text(20, 192, "In which order they are added does not:", weight="bold")
    for segment in range(8):
        figure.line(127 + 80 * segment, 154 if segment > 2 else 196, 127 + 80 * segment, 206, GREY)
    figure.box(
        90, 208, 634, 28, PALE, GREEN, "0 + s0 → + s1 → + s2 → + s3 → + s4 → + s5 → + s6 → + s7 → + bias → round once"
    )
    figure.text(
        20, 266, "Each arrow is one addition in fp32. How the sums travel, and when they arrive, changes nothing."
    )
    return figure


def context() -> Figure:
    """Who has which chunk of a sequence, and how many chunks of keys its queries see."""
    world = 4
    layouts = {"contiguous": [0, 1, 2, 3], "zigzag": [0, 1, 2, 3, 3, 2, 1, 0]}
    figure = Figure(760, 372, "Chunks of one sequence on four ranks: contiguous and zigzag")
    figure.text(
        20, 28, "Causal attention: a token sees the keys up to its own. So later chunks have more to do.", weight="bold"
    )
    for half, (name, owners) in enumerate(layouts.items()):
        left, wide = 20 + 375 * half, 340 / len(owners)
        work = [0.0] * world
        for chunk, owner in enumerate(owners):
            height = 150 * (chunk + 0.5) / len(owners)
            work[owner] += (chunk + 0.5) * (8 / len(owners)) ** 2
            color = RANKS[owner]
            figure.box(left + wide * chunk, 214 - height, wide - 6, height, PALE, color)
            figure.text(
                left + wide * chunk + wide / 2 - 3, 232, f"rank {owner}", 11 if wide > 60 else 10, color, "middle"
            )
        figure.text(left, 258, f"{name}: " + ", ".join(f"{x:g}" for x in work) + " units of work on ranks 0 to 3", 12)
    figure.text(20, 292, "Each rank gets all keys, and makes its own queries' rows: a row's bits are its own.")
    figure.text(
        20, 316, "Backward, it gets all queries too, and makes its own keys' gradients: a chain over the queries,"
    )
    figure.text(20, 340, "from the first on. Tokens travel between ranks, and no sum does. So 1, 2, 4 and 8 ranks have")
    figure.text(20, 364, "the same bits, in either layout.")
    return figure


# ---- Speed, of bench/results -----------------------------------------------------------------------------------------


def plot(title: str, x_label: str, y_label: str, curves, note: str) -> Figure:
    """Curves of {x: ratios} on a logarithmic axis: the mean as a line, from the worst to the best as a band."""
    import math
    import statistics

    figure = Figure(760, 400, title)
    figure.text(20, 28, title, weight="bold")
    left, right, top, bottom = 70, 740, 50, 330
    places = sorted({x for _, _, found in curves for x in found})
    most = max(max(ratios) for _, _, found in curves for ratios in found.values())
    high = math.ceil(most * 4) / 4

    def across(x: float) -> float:
        return left + (right - left) * math.log2(x / places[0]) / math.log2(places[-1] / places[0])

    def up(y: float) -> float:
        return bottom - (bottom - top) * y / high

    for step in range(0, int(high * 4) + 1, 2):
        y = step / 4
        figure.line(left, up(y), right, up(y), INK if y == 1 else "#dddddd", arrow=False, width=1)
        figure.text(left - 8, up(y) + 4, f"{y:g}", 11, anchor="end")
    for x in places:
        if x & (x - 1) == 0:
            figure.text(across(x), bottom + 18, x, 11, anchor="middle")
    for number, (name, color, found) in enumerate(curves):
        its = sorted(found.items())
        figure.area([(across(x), up(max(r))) for x, r in its] + [(across(x), up(min(r))) for x, r in its[::-1]], color)
        figure.path([(across(x), up(statistics.geometric_mean(r))) for x, r in its], color)
        figure.text(left + 12 + 260 * number, top + 12, name, 13, color, weight="bold")
    figure.text((left + right) / 2, bottom + 38, x_label, 12, anchor="middle")
    figure.text(right, top - 8, y_label, 12, anchor="end")
    figure.text(20, 390, note, 12)
    return figure


def speeds() -> dict[str, Figure]:
    sys.path.insert(0, str(ROOT))
    from bench import plot as plots

    few, drawn = plots.few_and_many()
    many = {}
    for m, ratios in drawn.items():
        many.setdefault(1 << (m - 1).bit_length(), []).extend(ratios)
    note = f"H100, release {plots.release()}, recorded. The line is the mean, the band from the worst to the best."
    length = plots.attention_by_length
    return {
        "speed-by-m": plot(
            "Products of models' layers beside cuBLAS, by the number of rows",
            f"rows M (above {max(few)}: up to M)", "times as fast", [("pydet", GREEN, few | many)], note,
        ),
        "attention-by-length": plot(
            "Attention beside cuDNN and PyTorch's flash, by the length of the sequences",
            "tokens of a sequence, up to", "times as fast",
            [("beside cuDNN", GREEN, length("cudnn")), ("beside PyTorch's flash", BLUE, length("flash"))], note,
        ),
        "decode-by-length": plot(
            "Decoding beside cuDNN and PyTorch's flash, by the length of the cache",
            "keys of a sequence, up to", "times as fast",
            [(f"beside {name}", color, by_keys(peer)) for peer, name, color in
             (("cudnn", "cuDNN", GREEN), ("flash", "PyTorch's flash", BLUE))], note,
        ),
    }  # fmt: skip


def by_keys(peer: str) -> dict[int, list[float]]:
    from bench import plot as plots
    from bench import summary

    found: dict[int, list[float]] = {}
    for problem in summary.problems("h100_attention_decode_random"):
        if peer in problem.us:
            found.setdefault(1 << (problem.extents[2] - 1).bit_length(), []).append(
                problem.us[peer] / plots.own(problem.us)
            )
    return found


def figures() -> dict[str, str]:
    made = {
        "batch": batch(),
        "chain": chain(),
        "row": row(),
        "audit": audit(),
        **sums(),
        **speeds(),
        "ranks": ranks(),
        "context": context(),
    }
    return {f"{name}.svg": figure.svg() for name, figure in made.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in figures().items():
        (FOLDER / name).write_text(text)
        print(f"docs/figures/{name}")
