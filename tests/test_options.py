"""Structures whose size the caller states may grow: a program compiled against an earlier release goes on working, and
one compiled against a later release is served as long as it asks for nothing that this release does not know."""

import os
import pathlib
import shlex
import subprocess

import cffi
import numpy as np
import pytest

from capi import Tensor, _alive, ffi, last_error, lib, options, random, status_name

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The structures of each release as its callers compiled them: never edited, only added to (docs: the release steps).
FROZEN = {
    "0.1.0": """
        typedef struct pydet_gemm_options {
          uint32_t struct_size; int32_t arithmetic; int64_t k_chunk; int32_t accumulate; int32_t reserved;
          const char *kernel; void *workspace; uint64_t workspace_size;
        } pydet_gemm_options;
        typedef struct pydet_skinny_gemm_options {
          uint32_t struct_size; int32_t arithmetic; int64_t k_chunk; int32_t accumulate; int32_t mode;
          const char *kernel; void *workspace; uint64_t workspace_size; int32_t weights_constant; int32_t reserved;
        } pydet_skinny_gemm_options;
        typedef struct pydet_rmsnorm_options {
          uint32_t struct_size; float eps; float weight_offset; int32_t reserved; const char *kernel;
        } pydet_rmsnorm_options;
        typedef struct pydet_rmsnorm_backward_options {
          uint32_t struct_size; float weight_offset; int32_t accumulate; int32_t reserved;
          const char *kernel; void *workspace; uint64_t workspace_size;
        } pydet_rmsnorm_backward_options;
        typedef struct pydet_device_info {
          uint32_t struct_size; int32_t multiprocessors; char name[64]; char arch[32];
        } pydet_device_info;
        typedef struct pydet_kernel_info {
          uint32_t struct_size; int32_t device_type; int32_t available; int32_t arithmetic;
          const char *name; const char *operation; const char *dtypes; const char *requires_;
        } pydet_kernel_info;
    """
}


def frozen(release):
    own = cffi.FFI()
    own.cdef(FROZEN[release])
    return own


def fields(types, struct):
    return [(name, field.offset, types.sizeof(field.type)) for name, field in types.typeof(struct).fields]


STRUCTS = [(release, name) for release in FROZEN for name in frozen(release).list_types()[0]]


@pytest.mark.parametrize("release, struct", STRUCTS)
def test_a_structure_only_grows(release, struct):
    then, now = fields(frozen(release), struct), fields(ffi, struct)
    assert now[: len(then)] == then
    assert len(now) == len(then) or now[len(then)][1] >= frozen(release).sizeof(struct), (
        "a field in an earlier end's gap"
    )


# ---- Through the C ABI ---------------------------------------------------------------------------------------------


def gemm(given):
    a, b = random((3, 32), seed=1), random((32, 5), seed=2)
    out = np.full((3, 5), 7, np.float32)
    status = lib.pydet_gemm(ffi.NULL, Tensor(a).c, Tensor(b).c, ffi.NULL, Tensor(out).c, given)
    return status, out.tobytes()


def skinny_gemm(given):
    x, w = random((3, 32), seed=1), random((5, 32), seed=2)
    y = np.full((3, 5), 7, np.float32)
    status = lib.pydet_skinny_gemm(ffi.NULL, Tensor(x).c, Tensor(w).c, ffi.NULL, Tensor(y).c, given)
    return status, y.tobytes()


def rmsnorm(given):
    x, y = random((3, 32), seed=1), np.full((3, 32), 7, np.float32)
    status = lib.pydet_rmsnorm(ffi.NULL, Tensor(x).c, ffi.NULL, ffi.NULL, Tensor(y).c, ffi.NULL, ffi.NULL, given)
    return status, y.tobytes()


def rmsnorm_backward(given):
    x, rstd, dx = random((3, 32), seed=1), random((3,), seed=2), np.full((3, 32), 7, np.float32)
    null = ffi.NULL
    tensors = (Tensor(x).c, Tensor(x).c, null, Tensor(rstd).c, null, Tensor(dx).c, null)
    return lib.pydet_rmsnorm_backward(null, *tensors, given), dx.tobytes()


CALLS = {  # of each kind of options: a call, and settings that show in its bits
    "pydet_gemm_options": (gemm, {"k_chunk": 16}),
    "pydet_skinny_gemm_options": (skinny_gemm, {"k_chunk": 16}),
    "pydet_rmsnorm_options": (rmsnorm, {"eps": 0.5}),
    "pydet_rmsnorm_backward_options": (rmsnorm_backward, {"weight_offset": 0.5}),
}


def of_size(struct, size, given, tail=b""):
    """Options in memory of their own, cut or lengthened to `size`, which ends with `tail`."""
    memory = np.frombuffer(bytes(ffi.buffer(given)).ljust(size, b"\0")[:size], np.uint8).copy()
    memory[size - len(tail) :] = np.frombuffer(tail, np.uint8)
    at = ffi.cast(f"{struct} *", memory.ctypes.data)
    at.struct_size = size
    _alive[at] = memory
    return at


@pytest.mark.parametrize("release, struct", [pair for pair in STRUCTS if pair[1].endswith("options")])
def test_options_of_an_earlier_release(release, struct):
    call, settings = CALLS[struct]
    given = options(struct, **settings)
    wanted = call(given)
    assert wanted[0] == lib.PYDET_OK and wanted != call(ffi.NULL)
    assert call(of_size(struct, frozen(release).sizeof(struct), given)) == wanted


@pytest.mark.parametrize("struct", CALLS)
def test_options_of_a_later_release(struct):
    call, settings = CALLS[struct]
    given, size = options(struct, **settings), ffi.sizeof(struct)
    wanted = call(given)
    for longer in (size + 8, size + 64, 4096):
        assert call(of_size(struct, longer, given)) == wanted
        status, untouched = call(of_size(struct, longer, given, tail=b"\1"))
        assert status_name(status) == "PYDET_UNSUPPORTED" and set(np.frombuffer(untouched, np.float32)) == {7}
        sentence = (
            f"options.struct_size is {longer} and byte {longer - 1} is not 0: this release knows the first {size}"
        )
        assert last_error().endswith(sentence)
    status, _ = call(of_size(struct, size + 8, given, tail=b"\1" + bytes(7)))
    assert status_name(status) == "PYDET_UNSUPPORTED"


@pytest.mark.parametrize("struct", CALLS)
def test_options_of_no_release(struct):
    call, settings = CALLS[struct]
    given, size = options(struct, **settings), ffi.sizeof(struct)
    earlier = {frozen(release).sizeof(name) for release, name in STRUCTS if name == struct}
    for wrong in {0, 4, 8, 16, size - 8, size - 1, size + 1, 4104, 2**32 - 1} - earlier:
        at = of_size(struct, max(size, min(wrong, 8192)), given)
        at.struct_size = wrong
        status, untouched = call(at)
        assert status_name(status) == "PYDET_INVALID_VALUE" and set(np.frombuffer(untouched, np.float32)) == {7}
        assert last_error().endswith(f"options.struct_size is {wrong}, want {size}")


def test_infos_of_other_releases():
    """Only so many bytes are written as the caller has; what this release does not know is 0."""
    device = ffi.new("pydet_device *", {"device_type": lib.PYDET_CPU})[0]
    for struct, query in (
        ("pydet_device_info", lambda info: lib.pydet_query_device(device, info)),
        ("pydet_kernel_info", lambda info: lib.pydet_query_kernel(0, info)),
    ):
        size = ffi.sizeof(struct)
        whole = ffi.new(f"{struct} *", {"struct_size": size})
        assert query(whole) == lib.PYDET_OK
        for given in (size, size + 8, *(frozen(release).sizeof(struct) for release in FROZEN)):
            memory = np.full(size + 64, 0xAA, np.uint8)
            info = ffi.cast(f"{struct} *", memory.ctypes.data)
            info.struct_size = given
            assert query(info) == lib.PYDET_OK and info.struct_size == given
            known = bytes(ffi.buffer(whole))[4:given]
            assert bytes(memory[4:given]) == known + bytes(given - 4 - len(known)) and set(memory[given:]) == {0xAA}
        for wrong in (0, 8, size - 1, size + 1, 4104):
            memory = np.full(8192, 0xAA, np.uint8)
            info = ffi.cast(f"{struct} *", memory.ctypes.data)
            info.struct_size = wrong
            assert query(info) == lib.PYDET_INVALID_VALUE and info.struct_size == wrong
            assert set(memory[4:]) == {0xAA}


# ---- A structure that has grown -------------------------------------------------------------------------------------


def test_a_structure_that_grew_twice(tmp_path):
    """Its sizes were 16 and 24, and are 32: what this release's own structures do not show yet."""
    program = tmp_path / "options"
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT}/native", f"-I{ROOT}/native/include", str(ROOT / "tests/options.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    refused = "1 test: options.struct_size is {}, want 32"
    later = "11 test: options.struct_size is 40 and byte {} is not 0: this release knows the first 32"
    assert said == [
        *(f"{size}: {refused.format(size)}" for size in (0, 8, 15)),
        "16: 32 1 0 0",
        f"20: {refused.format(20)}",
        "24: 32 1 2.5 0",
        f"28: {refused.format(28)}",
        "32: 32 1 2.5 3",
        f"33: {refused.format(33)}",
        "40: 32 1 2.5 3",
        "4096: 32 1 2.5 3",
        *(f"{size}: {refused.format(size)}" for size in (4104, 4294967295)),
        f"byte 32: {later.format(32)}",
        f"byte 39: {later.format(39)}",
        "byte 40: 0 ",
        "info 16: 700000010 1" + " 5555555555555555" * 4,
        "info 24: 700000018 1 4004000000000000" + " 5555555555555555" * 3,
        "info 32: 700000020 1 4004000000000000 3" + " 5555555555555555" * 2,
        "info 40: 700000028 1 4004000000000000 3 0 5555555555555555",
    ]
