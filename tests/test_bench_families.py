"""bench.families: the table in docs/families.md, of which a few families are run; and it sees what differs."""

import importlib.util
import os
import pathlib

import pytest

torch = pytest.importorskip("torch") if "torch" not in os.environ.get("PYDET_TEST_EXTRAS", "") else __import__("torch")
if not importlib.util.find_spec("transformers"):
    if "models" in os.environ.get("PYDET_TEST_EXTRAS", ""):
        raise RuntimeError("PYDET_TEST_EXTRAS has models, and Transformers is not here")
    pytest.skip("no Transformers here", allow_module_level=True)

import pydet.torch as pt  # noqa: E402
from bench import families  # noqa: E402

PAGE = pathlib.Path(families.__file__).parents[1] / "docs" / "families.md"


def cells_of_the_page():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in ([x.strip() for x in line.strip("|").split("|")] for line in lines[2:])}


def test_the_page_has_every_family():
    found = cells_of_the_page()
    assert list(found) == families.FAMILIES and len(found) >= 40
    assert all(len(cells) == len(families.COLUMNS) - 1 for cells in found.values())
    assert sum(cells[:4] == ["0, 0"] * 4 for cells in found.values()) >= 30
    assert {x for cells in found.values() for cell in cells[:4] for x in cell.split(", ")} == {"0", "refused", "-"}


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "diffllama", "jetmoe"])
def test_a_row(family):
    assert families.row(family)[1:5] == cells_of_the_page()[family][:4] == ["0, 0"] * 4


def test_it_sees_what_differs():
    model = families.build("llama", torch.float32)
    assert families.seen(model).elements[0] == families.decoded(model) == 0

    def by_place(module, arguments, y):
        return y + 1e-3 * (torch.arange(y.shape[0])[:, None, None] + y.shape[1])

    hook = model.model.norm.register_forward_hook(by_place)
    assert families.seen(model).elements[0] > 0 and families.decoded(model) > 0
    hook.remove()
    assert families.trained(model) == 0
    model.model.norm.register_forward_hook(by_place)
    assert families.trained(model) > 0


def test_what_does_not_run_is_no_zero(capsys):
    def fails():
        raise KeyError("no")

    assert families.cell(fails) == "-" and "KeyError" in capsys.readouterr().err
    assert families.cell(lambda: 1234) == "1,234"
    assert families.cell(lambda: pt.linear(torch.ones(2, 3), torch.ones(2, 4))) == "-", "shapes that do not fit"
    assert families.cell(lambda: pt.attention(*[torch.ones(1, 1, 2, 8)] * 3, scale=1.0, k_chunk=16)) == "refused"
    rows = [["a", "0, 0", "0, 7", "refused, 0", "-, -", "-", "nothing"]]
    text = families.page(rows)
    assert "of 6 cells 4 are 0" in " ".join(text.split()) and "1 refused, and 1 have elements that differ" in text
    assert families.table(rows) in text
