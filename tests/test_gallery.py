"""The figures of the site are those of docs/gallery.py, and each is shown with words for those who do not see it."""

import importlib.util
import re
import xml.etree.ElementTree as ET

import pytest

from capi import ROOT

spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)

FIGURES = gallery.figures()
PAGES = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_its_script_draws(name):
    assert (ROOT / "docs" / "figures" / name).read_text() == FIGURES[name], "python docs/gallery.py"
    root = ET.fromstring(FIGURES[name])
    width, height = (float(x) for x in root.get("viewBox").split()[2:])
    for part in root.iter():  # nothing is cut off
        x, y = float(part.get("x", 0)), float(part.get("y", 0))
        assert 0 <= x <= width and 0 <= y <= height, (name, part.attrib)
        if part.tag.endswith("}text"):
            size, anchor = float(part.get("font-size")), part.get("text-anchor")
            room = {"start": width - x, "end": x, "middle": 2 * min(x, width - x)}[anchor]
            assert len(part.text) * size * 0.5 <= room, (name, part.text)


def test_no_other_figures():
    assert {path.name for path in (ROOT / "docs" / "figures").iterdir()} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_shown_with_words(name):
    shown = [words for text in PAGES.values() for words in re.findall(rf"!\[([^\]]*)\]\(figures/{name}\)", text)]
    assert shown and all(len(words) > 30 for words in shown)


def test_the_order_decides_bits():
    """Of the terms that the first figure adds: else it would show nothing."""
    values = gallery.terms()
    halves = gallery.chained(values[:4]) + gallery.chained(values[4:])
    assert gallery.bits(gallery.chained(values)) != gallery.bits(halves)
    assert all(gallery.bits(x) in FIGURES["batch.svg"] for x in (gallery.chained(values), halves))


def test_every_sum_of_the_standard_has_a_figure():
    """A section of NUMERICS.md that defines a sum, and the section of the page that says it in words."""
    headings = set(re.findall(r"^## (.*)$", (ROOT / "native" / "NUMERICS.md").read_text(), flags=re.M))
    said = {
        "GEMM": "gemm", "Grouped GEMM": "grouped", "Scaled GEMM": "scaled", "Scaled grouped GEMM": "scaled",
        "Quantisation": "quantize", "RMSNorm": "row", "LayerNorm": "row", "Softmax": "softmax", "Head": "head",
        "Activations": "activation", "Attention": "attention", "Fold": "fold", "exp and log": "activation",
        "Sampling": "sample", "AdamW": "activation", "Embedding": "embedding", "Scans": "scan",
        "Rotary embeddings": "rotary",
    }  # fmt: skip
    others = {"What the bits may depend on", "Special values", "Evidence", "Why not"}
    assert headings == set(said) | others
    assert all(f"figures/sum-{figure}.svg" in PAGES["sums.md"] for figure in {*said.values(), "column"})


def test_plain_words_are_two_pages():
    text = PAGES["sums.md"]
    words = re.sub(r"\[!\[.*?\]\(.*?\)\]\(.*?\)", "", text).split()
    assert len(words) <= 1000
    prose = re.sub(r"\[!\[.*?\)\]\(.*?\)|^#.*$|\]\(.*?\)", "", text, flags=re.M)
    longest = max((sentence.split() for sentence in re.split(r"[.:?]\s", prose)), key=len)
    assert len(longest) <= 25, " ".join(longest)
