"""The binary interface: layouts, sizes, numbers and symbols that a compiled caller relies on."""

import ctypes
import importlib.util
import pathlib
import platform
import subprocess

import numpy as np
import pytest

import pydet
from capi import FLOAT32, HEADER, ROOT, Tensor, ffi, lib, library_path, status_name
from pydet import _native, hooks, protocols


def c_string(pointer) -> str:
    return ffi.string(pointer).decode()


# ---- Layout --------------------------------------------------------------------------------------------------------

# DLTensor of the DLPack specification where pointers have 64 bits: name, offset, size.
DLTENSOR = [
    ("data", 0, 8),
    ("device", 8, 8),
    ("ndim", 16, 4),
    ("dtype", 20, 4),
    ("shape", 24, 8),
    ("strides", 32, 8),
    ("byte_offset", 40, 8),
]


def test_tensor_layout_is_that_of_the_specification():
    fields = [(name, field.offset, ffi.sizeof(field.type)) for name, field in ffi.typeof("pydet_tensor").fields]
    assert fields == DLTENSOR
    assert ffi.sizeof("pydet_tensor") == 48
    assert [(n, f.offset) for n, f in ffi.typeof("pydet_device").fields] == [("device_type", 0), ("device_id", 4)]
    assert [(n, f.offset) for n, f in ffi.typeof("pydet_dtype").fields] == [("code", 0), ("bits", 1), ("lanes", 2)]


def dlpack_header() -> pathlib.Path | None:
    candidates = [pathlib.Path("/usr/include/dlpack/dlpack.h")]
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        candidates.insert(0, pathlib.Path(torch.origin).parent / "include" / "ATen" / "dlpack.h")
    return next((path for path in candidates if path.exists()), None)


def test_tensor_layout_is_that_of_the_real_header(tmp_path, need):
    path = dlpack_header()
    need(path is not None, "torch", "no dlpack.h here (torch or libdlpack-dev brings one)")
    source = tmp_path / "layout.c"
    pairs = [(f"pydet_tensor, {name}", f"DLTensor, {name}") for name, _, _ in DLTENSOR]
    pairs += [
        ("pydet_device, device_type", "DLDevice, device_type"),
        ("pydet_device, device_id", "DLDevice, device_id"),
    ]
    pairs += [(f"pydet_dtype, {name}", f"DLDataType, {name}") for name in ("code", "bits", "lanes")]
    checks = [f"offsetof({ours}) == offsetof({theirs})" for ours, theirs in pairs]
    checks += [f"sizeof(((pydet_tensor *)0)->{name}) == sizeof(((DLTensor *)0)->{name})" for name, _, _ in DLTENSOR]
    checks += ["sizeof(pydet_tensor) == sizeof(DLTensor)", "_Alignof(pydet_tensor) == _Alignof(DLTensor)"]
    for ours, theirs in [
        ("PYDET_CPU", "kDLCPU"),
        ("PYDET_CUDA", "kDLCUDA"),
        ("PYDET_CUDA_HOST", "kDLCUDAHost"),
        ("PYDET_ROCM", "kDLROCM"),
        ("PYDET_ROCM_HOST", "kDLROCMHost"),
        ("PYDET_CUDA_MANAGED", "kDLCUDAManaged"),
        ("PYDET_FLOAT", "kDLFloat"),
        ("PYDET_BFLOAT", "kDLBfloat"),
    ]:
        checks.append(f"(int){ours} == (int){theirs}")
    if "kDLBool" in path.read_text():  # DLPack has it since 0.8; Debian 12 brings 0.6.
        checks.append("(int)PYDET_BOOL == (int)kDLBool")
    source.write_text(
        f'#include <stddef.h>\n#include "{path}"\n#include "{HEADER}"\n'
        + "".join(f'_Static_assert({check}, "{check}");\n' for check in checks)
    )
    compiled = subprocess.run(["cc", "-std=c11", "-fsyntax-only", str(source)], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr


def test_a_live_dltensor_reads_as_pydet_tensor():
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)[:, 1:, ::2]
    capsule = array.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = ffi.cast("pydet_tensor *", get(capsule, b"dltensor"))
    assert int(ffi.cast("uintptr_t", tensor.data)) + tensor.byte_offset == array.ctypes.data
    assert (tensor.device.device_type, tensor.device.device_id) == (lib.PYDET_CPU, 0)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (lib.PYDET_FLOAT, 32, 1)
    assert [tensor.shape[i] for i in range(tensor.ndim)] == [3, 3, 3]
    assert [tensor.strides[i] for i in range(tensor.ndim)] == [20, 5, 2]


SIZES = {
    "pydet_gemm_options": 56,
    "pydet_skinny_gemm_options": 64,
    "pydet_scaled_gemm_options": 56,
    "pydet_grouped_gemm_options": 56,
    "pydet_scaled_grouped_gemm_options": 56,
    "pydet_rmsnorm_options": 32,
    "pydet_rmsnorm_backward_options": 56,
    "pydet_rmsnorm_quantize_options": 32,
    "pydet_layernorm_options": 24,
    "pydet_layernorm_backward_options": 40,
    "pydet_attention_options": 144,
    "pydet_attention_backward_options": 136,
    "pydet_activation_options": 24,
    "pydet_sample_options": 72,
    "pydet_topk_options": 16,
    "pydet_embedding_options": 16,
    "pydet_embedding_backward_options": 48,
    "pydet_linear_log_prob_options": 96,
    "pydet_linear_cross_entropy_options": 104,
    "pydet_scan_options": 16,
    "pydet_scan_backward_options": 32,
    "pydet_rotary_table_options": 24,
    "pydet_rotary_options": 40,
    "pydet_adamw_step": 64,
    "pydet_adamw_options": 16,
    "pydet_device_info": 104,
    "pydet_kernel_info": 48,
}


@pytest.mark.parametrize("struct, size", SIZES.items())
def test_struct_sizes_are_pinned(struct, size):
    assert ffi.sizeof(struct) == size
    assert ffi.typeof(struct).fields[0][0] == "struct_size" and ffi.typeof(struct).fields[0][1].offset == 0


# ---- Numbers -------------------------------------------------------------------------------------------------------

STATUSES = [
    "OK",
    "INVALID_VALUE",
    "INVALID_SHAPE",
    "INVALID_DTYPE",
    "INVALID_STRIDE",
    "INVALID_DEVICE",
    "NULL_POINTER",
    "OVERLAP",
    "OVERFLOW",
    "MISALIGNED",
    "WORKSPACE_TOO_SMALL",
    "UNSUPPORTED",
    "NO_DEVICE",
    "DEVICE_ERROR",
]


def test_statuses_are_pinned():
    for number, name in enumerate(STATUSES):
        assert getattr(lib, f"PYDET_{name}") == number
        assert status_name(number) == f"PYDET_{name}"
    for number in (-1, len(STATUSES), 1 << 30, -(1 << 31)):
        assert status_name(number) == "unknown status"


def test_enumerators_are_pinned():
    pinned = {
        "AUTO": 0,
        "IEEE": 1,
        "SM90": 2,
        "SM80": 3,
        "CDNA3": 4,
        "CDNA2": 5,
        "DETERMINISTIC": 0,
        "FAST": 1,
        "CPU": 1,
        "CUDA": 2,
        "CUDA_HOST": 3,
        "ROCM": 10,
        "ROCM_HOST": 11,
        "CUDA_MANAGED": 13,
        "FLOAT": 2,
        "BFLOAT": 4,
        "BOOL": 6,
        "DWEIGHT_ROWS": 256,
        "REDUCTION_MEAN": 0,
        "REDUCTION_SUM": 1,
        "REDUCTION_NONE": 2,
    }
    assert {name: getattr(lib, f"PYDET_{name}") for name in pinned} == pinned
    assert pydet.DWEIGHT_ROWS == lib.PYDET_DWEIGHT_ROWS


def test_arithmetic_names():
    names = ["auto", "ieee", "sm90", "sm80", "cdna3", "cdna2"]
    for number, name in enumerate(names):
        assert c_string(lib.pydet_arithmetic_name(number)) == name
        assert getattr(lib, f"PYDET_{name.upper()}") == number
    for number in (-1, len(names), -(1 << 31), (1 << 31) - 1):
        assert lib.pydet_arithmetic_name(number) == ffi.NULL


def test_versions_of_header_library_and_package_are_one():
    version = f"{lib.PYDET_VERSION_MAJOR}.{lib.PYDET_VERSION_MINOR}.{lib.PYDET_VERSION_PATCH}"
    assert c_string(lib.pydet_version()) == version == pydet.__version__
    assert lib.pydet_abi() == lib.PYDET_ABI == pydet.ABI
    assert lib.pydet_numerics() == lib.PYDET_NUMERICS == pydet.NUMERICS


# ---- Symbols -------------------------------------------------------------------------------------------------------

CHECK = ROOT / ".ci" / "check_library.sh"


@pytest.fixture
def plain_library():
    path = library_path()
    if "asan" in str(path):
        pytest.skip("the sanitizer build exports and needs the sanitizer's own symbols; the plain one is checked")
    return path


def test_exports_and_needed_libraries(plain_library):
    done = subprocess.run([CHECK, plain_library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_wide_code_can_reach_a_narrow_cpu(plain_library):
    build = ROOT / "build"
    if not (build / "core/launch.o").exists():
        pytest.skip("no build folder with objects here")
    done = subprocess.run([CHECK, plain_library, build], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_check_itself_can_fail(tmp_path):
    source = tmp_path / "stray.cpp"
    source.write_text('#include <vector>\nextern "C" int stray(int n) { return int(std::vector<int>(n).size()); }\n')
    library = tmp_path / "libstray.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-O0", source, "-o", library], check=True)
    done = subprocess.run([CHECK, library], capture_output=True, text=True)
    assert done.returncode == 1
    assert "exports" in done.stderr and "stray" in done.stderr
    objects = tmp_path / "build"
    objects.mkdir()
    subprocess.run(["c++", "-c", "-O0", "-mavx2", source, "-o", objects / "stray.avx2.o"], check=True)
    done = subprocess.run([CHECK, library, objects], capture_output=True, text=True)
    assert "stray.avx2.o defines weak symbols" in done.stderr


def test_the_check_sees_what_is_not_hardened(tmp_path):
    source, library = tmp_path / "soft.c", tmp_path / "libsoft.so"
    source.write_text("int pydet_soft(int n) { return n; }\n")
    flags = ["-O1", "-fno-stack-protector", "-U_FORTIFY_SOURCE", "-Wl,-z,lazy,-z,norelro"]
    sentences = ["relocated addresses writable", "binds functions late", "no guards of stacks", "no checked copies"]
    if platform.machine() == "x86_64":
        flags, sentences = (
            [*flags, "-fcf-protection=none"],
            [*sentences, "no endbr64 (-fcf-protection)"],
        )
    subprocess.run(["cc", "-shared", "-fPIC", *flags, source, "-o", library], check=True)
    done = subprocess.run([CHECK, library], capture_output=True, text=True)
    assert done.returncode == 1 and all(sentence in done.stderr for sentence in sentences), done.stderr


# ---- Tables --------------------------------------------------------------------------------------------------------


def test_kernel_table_ends_and_describes_itself():
    names = []
    while (name := lib.pydet_kernel_name(len(names))) != ffi.NULL:
        info = ffi.new("pydet_kernel_info *", {"struct_size": ffi.sizeof("pydet_kernel_info")})
        assert lib.pydet_query_kernel(len(names), info) == lib.PYDET_OK
        assert c_string(info.name) == c_string(name)
        operations = {"gemm", "scaled_gemm", "quantize", "rmsnorm", "rmsnorm_backward", "softmax", "softmax_backward"}
        operations |= {"grouped_gemm", "scaled_grouped_gemm", "fold", "layernorm", "layernorm_backward", "attention"}
        operations |= {"attention_backward", "activation", "activation_backward", "sample", "topk"}
        operations |= {"embedding", "embedding_backward", "selective_scan", "gated_delta", "causal_conv1d"}
        operations |= {"rotary_table", "rotary", "selective_scan_backward", "gated_delta_backward"}
        operations |= {"causal_conv1d_backward", "rmsnorm_quantize", "head_rows", "adamw"}
        assert c_string(info.operation) in operations
        assert set(c_string(info.dtypes).split()) <= {"fp32", "bf16", "fp16", "e4m3", "e5m2"} and c_string(info.dtypes)
        assert info.available in (0, 1) and c_string(lib.pydet_arithmetic_name(info.arithmetic)) != "auto"
        names.append(c_string(name))
    assert len(names) == len(set(names)) >= 7
    assert lib.pydet_kernel_name(-1) == ffi.NULL
    assert lib.pydet_query_kernel(len(names), info) == lib.PYDET_INVALID_VALUE
    assert lib.pydet_query_kernel(-1, info) == lib.PYDET_INVALID_VALUE


def test_device_info_of_another_size_is_refused():
    device = ffi.new("pydet_device *", {"device_type": lib.PYDET_CPU, "device_id": 0})[0]
    size = ffi.sizeof("pydet_device_info")
    info = ffi.new("pydet_device_info *", {"struct_size": size})
    assert lib.pydet_query_device(device, info) == lib.PYDET_OK
    assert info.multiprocessors >= 1 and c_string(info.name) and c_string(info.arch) and info.struct_size == size
    for wrong in (0, 8, size - 1, size + 1):
        memory = ffi.new("char[]", b"\xaa" * size)
        other = ffi.cast("pydet_device_info *", memory)
        other.struct_size = wrong
        assert lib.pydet_query_device(device, other) == lib.PYDET_INVALID_VALUE
        assert set(ffi.buffer(memory)[4:size]) == {0xAA} and other.struct_size == wrong


# ---- Element types -------------------------------------------------------------------------------------------------


def test_python_lists_the_element_types_of_the_library():
    entry = _native.load(_native.constants.PYDET_EXCHANGE_CPU).lib
    dtype, found = _native.ffi.new("pydet_dtype *"), []
    while (name := entry.pydet_exchange_type(len(found), dtype)) != _native.ffi.NULL:
        assert dtype.lanes == 1
        found.append((_native.text(name), (dtype.code, dtype.bits)))
    assert found == list(zip(protocols.TYPES, protocols.DTYPES, strict=True))
    assert len(found) == len(hooks.exchange.numpy_dtypes) == len(protocols.BRIEF)
    assert entry.pydet_exchange_type(-1, dtype) == _native.ffi.NULL


# ---- Empty operands ------------------------------------------------------------------------------------------------


def test_strides_of_empty_operands_mean_nothing():
    """No arithmetic is done with them, which UndefinedBehaviorSanitizer would report."""
    wild = 2**62
    x = Tensor(shape=[2, 40, 0], strides=[wild, wild, 1], dtype=FLOAT32)
    w = Tensor(shape=[2, 0, 30], strides=[wild, 1, wild], dtype=FLOAT32)
    out = np.ones((2, 40, 30), np.float32)
    assert lib.pydet_gemm(ffi.NULL, x.c, w.c, ffi.NULL, Tensor(out).c, ffi.NULL) == lib.PYDET_OK
    assert not out.any()
