"""Which kernels of norms and softmax the CUDA library chooses, on the stand-in runtime: the census is what is recorded,
and every kernel is worth its lines.

PYDET_CUDA_STAND_IN names the library that `make cuda-stand-in` links. `python tests/rows_census.py LIBRARY --record`
writes tests/data/rows_census.json anew, where a choice is meant to change.
"""

import json
import os
import pathlib
import shutil

import pytest

import capi
import rows_census
import test_cuda_layernorm
from rows_census import rows_fit

LIBRARY = pathlib.Path(os.environ.get("PYDET_CUDA_STAND_IN", capi.ROOT / "build" / "libpydet_cuda_stand_in.so"))

# Chosen for under 1 % of every census, and why they stay.
RARE = {
    "cuda_rmsnorm_backward_heads": "weights of heads",
    "cuda_rmsnorm_backward_general": "weights of heads, biases, rows that no other takes",
    "cuda_layernorm_backward_general": "rows that no other takes",
    "cuda_softmax_long": "rows that no other takes",
    "cuda_softmax_backward_long": "rows that no other takes",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not LIBRARY.exists():
        (pytest.fail if "PYDET_CUDA_STAND_IN" in os.environ else pytest.skip)(
            f"{LIBRARY.name} is not built (make cuda-stand-in)"
        )
    return rows_census.Library(shutil.copy(LIBRARY, tmp_path_factory.mktemp("census")))  # it asks once what a device is


@pytest.fixture(scope="module")
def found(library):
    return rows_census.all_censuses(library)


def test_the_census_is_the_one_recorded(found):
    assert found == json.loads(rows_census.RECORDED.read_text())


def test_every_kernel_is_chosen_for_one_in_a_hundred(library, found):
    """Of the problems of one of the operations, types and residuals at least."""
    chosen = {
        name for census in found.values() for name, count in census.items() if count >= 0.01 * sum(census.values())
    }
    names = set(library.kernels())
    assert chosen <= names and len(names) > 30
    assert names - chosen == set(RARE)


def test_a_problem_goes_to_the_kernel_that_is_forced(library):
    assert library.chosen("rmsnorm", 5, 72, kernel="cuda_rmsnorm_general") == "cuda_rmsnorm_general"
    assert library.chosen("rmsnorm", 5, 72, kernel="cuda_rmsnorm_adjacent", residual=True) is None  # it refuses


def test_each_layernorm_kernel_takes_what_its_test_on_a_gpu_asks_for(library):
    """A range that is made narrower is seen without a GPU."""
    kernels = [name for name in library.kernels() if "_layernorm_" in name]
    assert len(kernels) == 14
    for name in kernels:
        operation = "layernorm_backward" if "_backward_" in name else "layernorm"
        taken = [shape for shape in test_cuda_layernorm.SHAPES if library.chosen(operation, *shape, kernel=name)]
        assert len(taken) >= test_cuda_layernorm.enough(name), name
        assert taken == test_cuda_layernorm.RING or not name.endswith(("_chain", "_group"))


def test_the_fit_finds_the_faster_kernel(tmp_path):
    """Of two made-up kernels, one of which is slow to begin and fast at length, on problems that it did not see."""

    def times(seed):
        lines = []
        for m, n in rows_fit.drawn("rmsnorm", 120, seed):
            soon, late = 2 + m * n / 3e5, 5 + m * n / 6e5
            lines.append(f"rmsnorm {m} {n} soon soon={soon} late={late} copy={soon}")
        (tmp_path / str(seed)).write_text("\n".join(lines))
        return rows_fit.read([tmp_path / str(seed)])

    seen, unseen = times(0), times(1)
    fit = rows_fit.Fit(seen)
    fitted = [of[fit.chosen(operation, m, n, of.keys())] / min(of.values()) for operation, m, n, _, of, _ in unseen]
    always = [of[chosen] / min(of.values()) for *_, chosen, of, _ in unseen]
    assert rows_fit.mean(fitted) < 1.01 < 1.1 < rows_fit.mean(always), (rows_fit.mean(fitted), rows_fit.mean(always))
