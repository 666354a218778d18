"""The cases of wide scans and their gradients take every kernel that walks, on the stand-in runtime: which of them a
call has follows from its tokens and columns, and from a multiprocessor's shared memory.

PYDET_CUDA_STAND_IN names the library that `make cuda-stand-in` links.
"""

import ctypes
import itertools
import os
import shutil
from pathlib import Path

import pytest

import capi
import rows_census
import test_scan as scans
import test_scan_backward as gradients

LIBRARY = Path(os.environ.get("PYDET_CUDA_STAND_IN", capi.ROOT / "build" / "libpydet_cuda_stand_in.so"))
pytestmark = pytest.mark.skipif(
    not LIBRARY.exists() and "PYDET_CUDA_STAND_IN" not in os.environ,
    reason=f"{LIBRARY.name} is not built (make cuda-stand-in)",
)


def operands(name, batch, tokens, heads, width, groups, states, dtype):
    places = itertools.count(1)

    def tensor(*shape, kind=rows_census.TYPES[dtype]):
        place = (rows_census.CUDA, rows_census.DEVICE)
        return capi.Tensor(shape=shape, dtype=kind, data=next(places) << 36, device=place)

    x, row, one = (batch, tokens, heads, width), (batch, tokens, groups, states), (batch, tokens, heads)
    if name == "selective_scan_backward":
        given = [
            tensor(*x),
            None,
            tensor(*x),
            tensor(*one),
            tensor(heads, kind=capi.FLOAT32),
            tensor(*row),
            tensor(*row),
        ]
        results = [tensor(*x), tensor(*one), tensor(batch, heads, kind=capi.FLOAT32), tensor(*row), tensor(*row)]
        return [*given, None, None, None, *results, None, None]
    if name == "selective_scan":
        given = [tensor(*x), tensor(*one), tensor(heads, kind=capi.FLOAT32), tensor(*row), tensor(*row)]
        return [*given, None, None, None, tensor(*x), None]
    return [tensor(*row), tensor(*row), tensor(*x), tensor(*one), tensor(*one), None, None, tensor(*x), None]


def options_of(library, name, batch, tokens, heads, width, groups, states):
    if not name.endswith("backward"):
        return capi.options("pydet_scan_options", kernel=f"cuda_{name}")
    size = capi.ffi.new("uint64_t *")
    assert (
        library.lib.pydet_selective_scan_backward_workspace(batch, batch * tokens, heads, width, groups, states, size)
        == 0
    )
    workspace = {"workspace": capi.ffi.cast("void *", 31 << 36), "workspace_size": size[0]}
    return capi.options("pydet_scan_backward_options", kernel=f"cuda_{name}", **workspace)


@pytest.mark.parametrize(
    ("name", "cases", "kernels", "least"),
    [
        ("selective_scan", scans.WIDE, "selective_walk_kernel", 11),
        ("gated_delta", scans.WIDE, "delta_walk_kernel", 11),
        ("selective_scan_backward", gradients.WIDE, "selective_walks_kernel", 4),
        ("selective_scan_backward", gradients.WIDE, "selective_tiles_kernel", 4),
    ],
)
def test_every_kernel_that_walks_is_taken(tmp_path, name, cases, kernels, least):
    copy = shutil.copy(LIBRARY, tmp_path)
    fake = ctypes.CDLL(str(copy))
    fake.fakecuda_kernels.argtypes = fake.fakecuda_never_launched.argtypes = [ctypes.c_char_p]
    fake.fakecuda_never_launched.restype = ctypes.c_char_p
    for capability in (90, 86):  # 227 KB and 99 KB of shared memory
        library = rows_census.Library(copy, capability)
        for sizes, dtype in itertools.product(cases, ("bf16", "fp32")):
            given = options_of(library, name, *sizes)
            tensors = operands(name, *sizes, dtype)
            call = getattr(library.lib, f"pydet_{name}")
            assert call(capi.ffi.cast("void *", rows_census.STREAM), *map(capi.pointer, tensors), given) == 0, sizes
    assert fake.fakecuda_kernels(kernels.encode()) >= least
    assert fake.fakecuda_never_launched(kernels.encode()) is None
