"""pydet.torch.distributed over NCCL and over peers' memory, on the GPUs of this machine: 2 or more, a process each. Of
one GPU two processes share its memory: the stress alone.

The checks are those of test_torch_distributed.py, on CUDA tensors, by every method that GPUs have; the sizes are the
powers of two up to the number of GPUs. A group of one has the bits of one GPU.
"""

import os
import pathlib
import subprocess
import sys

import pytest

import test_torch_distributed as checks
from test_torch_distributed import answers_of, check_survivor


def gpus():
    torch = pytest.importorskip("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        pytest.skip(f"needs 2 GPUs or more, this machine has {count}")
    return count


@pytest.fixture(scope="module")
def sizes():
    return [1 << i for i in range(gpus().bit_length())]


@pytest.fixture(scope="module")
def shapes(sizes):
    return {name: shape for name, shape in checks.MESHES.items() if shape[0] * shape[1] <= sizes[-1]}


@pytest.fixture(scope="module")
def found(sizes, shapes):
    return answers_of("cuda", sizes, shapes)


def test_every_size_has_the_bits_of_one_gpu(found, sizes):
    checks.check_sizes(found, sizes)


def test_peers_memory_was_there(found, sizes):
    """Else the methods of peers would have been left out in silence. The group of all ranks can push, too."""
    methods = found[0]["methods"]
    for size in sizes[1:]:
        everyone = size == sizes[-1]
        want = ["push"] * everyone + ["relay"] * (everyone and size == 2)
        assert methods[size] == checks.COLLECTIVES + checks.BY_PEERS + want
    assert methods["another group"] == checks.COLLECTIVES + checks.BY_PEERS


def test_another_group_of_all_ranks_has_their_bits(found):
    names = [name for name, where in checks.bits(found).items() if "another group" in where]
    assert any(name.startswith("large") for name in names) and any(name.startswith("row") for name in names)
    for name in names:
        assert all(ranks[name]["another group"] == found[0][name][1] for ranks in found), name


def test_tensor_and_data_parallel_together_have_them_too(found, shapes):
    if not shapes:
        pytest.skip(f"needs 4 GPUs or more, this machine has {gpus()}")
    checks.check_meshes(found, shapes)


def test_ddp_and_fsdp_give_one_sum(found):
    checks.check_wrappers(found)


def test_an_all_reduce_would_be_seen(found, sizes):
    checks.check_controls(found, sizes)


def test_a_rank_that_refuses_tells_the_others(found, sizes):
    checks.check_refusals(found, sizes)


@pytest.mark.parametrize("method", ["one_shot", "peer_one_shot", "peer_two_shot"])
def test_a_killed_rank_leaves_nobody_hanging(method):
    gpus()
    check_survivor("cuda", method)


def test_the_stress_of_exchanges():
    """Four streams, graphs, sleeping ranks, NCCL beside, ranks that disagree: tests/stress_exchange.py, for 10 s."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    program = pathlib.Path(__file__).with_name("stress_exchange.py")
    path = os.pathsep.join([str(program.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    asked = [sys.executable, str(program), "--seconds", "10"]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=400, env={**os.environ, "PYTHONPATH": path})
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
