"""The CUDA library's host code where the runtime or the driver fails, on a stand-in runtime (fakecuda.c).

Every call that the library makes of it fails once, with every kernel forced: a status and a sentence each time, the
caller's device current again, and the next call works.

PYDET_CUDA_STAND_IN names the library that `make cuda-stand-in` links.
"""

import ctypes
import itertools
import os
import pathlib
import re
import shutil
import types

import numpy as np
import pytest

import capi
from capi import ffi

LIBRARY = pathlib.Path(os.environ.get("PYDET_CUDA_STAND_IN", capi.ROOT / "build" / "libpydet_cuda_stand_in.so"))
CUDA, DEVICE, STREAM = 2, 1, 0x1230
NO_DEVICE, UNSUPPORTED, DEVICE_ERROR = (
    getattr(capi.lib, f"PYDET_{n}") for n in ["NO_DEVICE", "UNSUPPORTED", "DEVICE_ERROR"]
)
UNKNOWN, OUT_OF_MEMORY, OLD_DRIVER, NO_BINARY, ILLEGAL_ADDRESS, CAPTURE_INVALIDATED = 999, 2, 35, 209, 700, 901
CAPABILITIES = (80, 90, 100)
# What only tunes or checks, so that a call may go on without it, and what puts the caller's device back at the end.
DISPENSABLE = {
    *("cudaDeviceGetAttribute", "cudaPointerGetAttributes", "cuPointerGetAttributes", "cudaSetDevice"),
    *("cudaOccupancyMaxActiveClusters", "cudaFuncSetAttribute"),
}


class StandIn:
    """A copy of the library, since it asks a device once what it is."""

    def __init__(self, folder):
        self.path = copy = shutil.copy(LIBRARY, folder)
        self.lib = ffi.dlopen(str(copy))
        self.fake = ctypes.CDLL(str(copy))
        self.fake.fakecuda_log.restype = ctypes.c_char_p
        self.fake.fakecuda_reset.argtypes = [ctypes.c_int] * 6 + [ctypes.c_void_p]

    def start(self, capability, devices=2, driver=13000, fail_at=-1, error=UNKNOWN, lasting=False):
        self.fake.pydet_exchange_forget_devices()  # what they are changes with each start
        self.fake.fakecuda_reset(devices, capability, driver, fail_at, error, lasting, STREAM)

    def log(self):
        return self.fake.fakecuda_log().decode().split()

    def sentence(self):
        return ffi.string(self.lib.pydet_last_error()).decode()

    def kernels(self, capability):
        """(name, operation, element type) of the kernels that such a device can run."""
        self.start(capability)
        info, found, i = ffi.new("pydet_kernel_info *", {"struct_size": ffi.sizeof("pydet_kernel_info")}), [], 0
        while self.lib.pydet_kernel_name(i) != ffi.NULL:
            assert self.lib.pydet_query_kernel(i, info) == 0, self.sentence()
            if info.device_type == CUDA and info.available:
                dtype = ffi.string(info.dtypes).decode().split()[0]
                found.append((ffi.string(info.name).decode(), ffi.string(info.operation).decode(), dtype))
                found[-1] += (info.arithmetic,)
            i += 1
        return found


@pytest.fixture
def cuda(tmp_path):
    if not LIBRARY.exists():
        (pytest.fail if "PYDET_CUDA_STAND_IN" in os.environ else pytest.skip)(
            f"{LIBRARY.name} is not built (make cuda-stand-in)"
        )
    return StandIn(tmp_path)


def placed(array):
    """A copy where a GPU would allocate it: at a whole number of 256 bytes."""
    room = np.zeros(array.nbytes + 256, np.uint8)
    copy = room[-room.ctypes.data % 256 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def tensors(shapes, dtype):
    kind = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}[dtype]
    return [
        None if shape is None else capi.Tensor(placed(capi.random(shape, shape_dtype or kind)), device=(CUDA, DEVICE))
        for shape, shape_dtype in (s if isinstance(s, tuple) and isinstance(s[-1], str) else (s, None) for s in shapes)
    ]


def handed_over(name, dtype):
    """More tiles than fill a wave, and the workspace. Rows of a overlap: they are never read."""
    m, n, k = 8704, 1024, 2304
    operands = tensors([(m // 128, k), (k, n), None], dtype)
    operands[0].shape[0], operands[0].strides[0] = m, 8
    out = placed(np.zeros((m, n), operands[1].array.dtype))
    size = ffi.new("uint64_t *")
    library = ffi.dlopen(str(LIBRARY))
    asks = capi.options("pydet_gemm_options", kernel=name)
    assert library.pydet_gemm_workspace(1, m, n, k, asks, size) == 0 and size[0]
    room = np.zeros(size[0] + 256, np.uint8)
    at = ffi.cast("void *", -room.ctypes.data % 256 + room.ctypes.data)
    given = capi.options("pydet_gemm_options", workspace=at, workspace_size=size[0], kernel=name)
    capi._alive[given] = capi._alive[given], room
    return "pydet_gemm", [*operands, capi.Tensor(out, device=(CUDA, DEVICE))], given


def copied(name, dtype):
    """Rows that begin between units of 16 bytes, and the workspace for copies of them."""
    m, n, k = 256, 512, 252
    room = np.zeros((1 << 20) + 256, np.uint8)
    at = ffi.cast("void *", -room.ctypes.data % 256 + room.ctypes.data)
    given = capi.options("pydet_skinny_gemm_options", workspace=at, workspace_size=1 << 20, kernel=name)
    capi._alive[given] = capi._alive[given], room
    return "pydet_skinny_gemm", tensors([(m, k), (n, k), None, (m, n)], dtype), given


def problems(operation, name, dtype):
    """Calls of an operation that differ in size: some kernel takes each. Each is (function, tensors, options)."""
    if operation == "gemm":
        arithmetic = name[1]
        if name[0].endswith("_handover"):
            yield handed_over(name[0], dtype)
            return
        if name[0].endswith("_copied"):
            yield copied(name[0], dtype)
            return
        few = (8, 512, 256)
        small = (True, (8, 32, 256)), (False, (8, 512, 64))
        for skinny, (m, n, k) in (
            (True, few),
            (False, few),
            (False, (256, 1024, 256)),
            (False, (2048, 4096, 64)),
            *small,
        ):
            struct = "pydet_skinny_gemm" if skinny else "pydet_gemm"
            shapes = [(m, k), (n, k) if skinny else (k, n), None, (m, n)]
            yield (
                struct,
                tensors(shapes, dtype),
                capi.options(f"{struct}_options", arithmetic=arithmetic, kernel=name[0]),
            )
        return
    if operation == "scaled_gemm":
        none, by_blocks = (None, None), (((256, 2), "float32"), ((2, 8), "float32"))
        fine = ((100, 8), "float32"), ((8, 1024), "float32")
        sizes = ((256, none, 128), (64, none, 128), (256, by_blocks, 128), (100, fine, 32), (8, none, 128))
        for m, (a_scale, b_scale), chunk in sizes:
            operands = tensors([(m, 256), a_scale, (256, 1024), b_scale, None, ((m, 1024), "float32")], dtype)
            operands[2].strides[0], operands[2].strides[1] = 1, 256  # k is adjacent
            given = capi.options("pydet_scaled_gemm_options", arithmetic=name[1], k_chunk=chunk, kernel=name[0])
            yield "pydet_scaled_gemm", operands, given
        return
    if operation == "grouped_gemm":
        operands = tensors([(512, 64), (2, 64, 256), None, None, ((2,), "float32"), (512, 256)], dtype)
        operands[4].c.dtype.code = 0  # int32
        yield (
            "pydet_grouped_gemm",
            operands,
            capi.options("pydet_grouped_gemm_options", arithmetic=name[1], kernel=name[0]),
        )
        return
    if operation == "scaled_grouped_gemm":
        operands = [(512, 256), None, (2, 256, 1024), None, None, None, ((2,), "float32"), ((512, 1024), "float32")]
        operands = tensors(operands, dtype)
        operands[2].strides[1], operands[2].strides[2] = 1, 256  # k is adjacent
        operands[6].c.dtype.code = 0  # int32
        given = capi.options("pydet_scaled_grouped_gemm_options", arithmetic=name[1], k_chunk=128, kernel=name[0])
        yield "pydet_scaled_grouped_gemm", operands, given
        return
    if operation == "quantize":
        for granularity, of_scale in ((3, ()), (0, (64, 1)), (1, (64, 2))):  # the first that a kernel takes counts
            shapes = [(64, 256), ((64, 256), "float8_e4m3fn"), (of_scale, "float32"), None, None]
            given = capi.options("pydet_quantize_options", granularity=granularity, kernel=name[0])
            yield "pydet_quantize", tensors(shapes, dtype), given
        return
    if operation == "rmsnorm_quantize":
        shapes = [(64, 256), (64, 256), ((256,), "float32"), ((64, 256), "float8_e4m3fn"), ((64, 2), "float32")]
        given = capi.options("pydet_rmsnorm_quantize_options", eps=1e-6, granularity=1, kernel=name[0])
        yield "pydet_rmsnorm_quantize", tensors([*shapes, None, None, (64, 256)], dtype), given
        return
    if operation == "attention":
        for queries in (0,) if name[0].endswith("sm90_wide") else (3, 300):  # 0: a pack, whose tiles are counted
            shapes = [(1, 4, queries, 64), (1, 2, 2100, 64), (1, 2, 2100, 64), (1, 4, queries, 64), None]
            shapes = shapes if queries else [(2100, heads, 64) for heads in (64, 2, 2, 64)] + [None]
            size = 1 << (24 if queries else 27)  # more than any kernel wants for these
            room = np.zeros(size + 256, np.uint8)
            at = ffi.cast("void *", -room.ctypes.data % 256 + room.ctypes.data)
            starts = tensors([((6,), "float32")] * (0 if queries else 2), dtype)
            for tensor in starts:
                tensor.c.dtype.code = 0  # int32
            given = capi.options(
                "pydet_attention_options",
                arithmetic=name[1],
                kernel=name[0],
                workspace=at,
                workspace_size=size,
                **{key: x.c for key, x in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=False)},
            )
            capi._alive[given] = capi._alive[given], room, starts
            yield "pydet_attention", tensors(shapes, dtype), given
        return
    if operation == "attention_backward":
        for queries, has_sinks in itertools.product((3, 300), (True, False)):
            of_q, of_k = (1, 4, queries, 64), (1, 2, 2100, 64)
            shapes = [of_q, of_q, of_k, of_k, of_q, (of_q[:3], "float32"), of_q, of_k, of_k]
            room = np.zeros((1 << 24) + 256, np.uint8)  # more than any kernel wants for these
            at = ffi.cast("void *", -room.ctypes.data % 256 + room.ctypes.data)
            sinks = dict(zip(("sinks", "dsinks"), tensors([((4,), "float32")] * 2, dtype))) if has_sinks else {}
            given = capi.options(
                "pydet_attention_backward_options",
                arithmetic=name[1],
                kernel=name[0],
                workspace=at,
                workspace_size=1 << 24,
                **{key: tensor.c for key, tensor in sinks.items()},
            )
            capi._alive[given] = capi._alive[given], room, sinks
            yield "pydet_attention_backward", tensors(shapes, dtype), given
        return
    if operation == "fold":
        for order in (0, 1):
            yield (
                "pydet_fold",
                tensors([(64, 256)] * 4, dtype),
                capi.options("pydet_fold_options", kernel=name[0], order=order),
            )
        room = np.zeros(4, np.uint64)  # no kernel runs here
        memory = ffi.new("void *[]", 2 * [ffi.cast("void *", -room.ctypes.data % 16 + room.ctypes.data)])
        peers = capi.options("pydet_fold_peers", ranks=2, memory=memory, memory_size=1 << 26)
        given = capi.options("pydet_fold_options", kernel=name[0], peers=peers)
        capi._alive[given] = capi._alive[given], room, memory, peers
        yield "pydet_fold", tensors([(64, 256)] * 4, dtype), given
        return
    if operation.startswith("activation"):
        shapes = [(64, 256)] * (5 if operation == "activation_backward" else 3)
        yield f"pydet_{operation}", tensors(shapes, dtype), capi.options("pydet_activation_options", kernel=name[0])
        return
    if operation == "sample":
        x, whole, one = (64, 256), ((64,), "int64"), ((64,), "float32")
        given = capi.options("pydet_sample_options", kernel=name[0], temperature=0.8, top_k=9, top_p=0.9)
        yield "pydet_sample", tensors([x, whole, whole, whole, one, one], dtype), given
        return
    if operation == "head_rows":
        room = np.zeros((1 << 18) + 256, np.uint8)
        at = ffi.cast("void *", -room.ctypes.data % 256 + room.ctypes.data)
        given = capi.options(
            "pydet_linear_log_prob_options", kernel=name[0], arithmetic=1, workspace=at, workspace_size=1 << 18
        )
        capi._alive[given] = capi._alive[given], room
        shapes = [(64, 32), (256, 32), None, ((64,), "int64"), ((64,), "float32")]
        yield "pydet_linear_log_prob", tensors(shapes, dtype), given
        return
    if operation == "topk":
        shapes = [(64, 256), (64, 9), ((64, 9), "int64")]
        yield "pydet_topk", tensors(shapes, dtype), capi.options("pydet_topk_options", kernel=name[0])
        return
    if operation == "embedding":
        shapes = [(100, 256), ((64,), "int64"), (64, 256)]
        yield "pydet_embedding", tensors(shapes, dtype), capi.options("pydet_embedding_options", kernel=name[0])
        return
    if operation == "adamw":
        of_floats = [((64, 256), "float32")] * 3
        given = capi.options("pydet_adamw_options", kernel=name[0])
        yield "pydet_adamw", tensors([(64, 256)] * 2 + of_floats[dtype == "fp32" :], dtype), given
        return
    if operation == "rotary_table":
        given = capi.options("pydet_rotary_table_options", kernel=name[0], scale=1)
        cos, sin = tensors([(64, 256), (64, 256)], dtype)
        yield "pydet_rotary_table", [*tensors([((64,), "int64"), ((128,), "float32")], dtype), cos, sin], given
        return
    if operation == "rotary":
        shapes = [(64, 4, 128), (64, 2, 128), (64, 64), (64, 64), (64, 4, 128), (64, 2, 128)]
        yield "pydet_rotary", tensors(shapes, dtype), capi.options("pydet_rotary_options", kernel=name[0])
        return
    if operation == "embedding_backward":
        given = capi.options("pydet_embedding_backward_options", kernel=name[0])
        room = np.zeros(1 << 12, np.uint8)
        given.workspace, given.workspace_size = ffi.cast("void *", -room.ctypes.data % 256 + room.ctypes.data), 1 << 10
        capi._alive[given] = capi._alive[given], room
        yield "pydet_embedding_backward", tensors([(64, 256), ((64,), "int64"), (100, 256)], dtype), given
        return
    if operation == "causal_conv1d":
        shapes = [(2, 40, 256), (256, 4), (256,), None, None, (2, 40, 256)]
        yield "pydet_causal_conv1d", tensors(shapes, dtype), capi.options("pydet_scan_options", kernel=name[0])
        return
    if operation == "causal_conv1d_backward":
        x, sums = (2, 40, 256), [((2, 256, 4), "float32"), ((2, 256), "float32")]
        given = tensors([x, x, (256, 4), None, None, x, *sums, None], dtype)
        yield "pydet_causal_conv1d_backward", given, capi.options("pydet_scan_backward_options", kernel=name[0])
        return
    if operation in ("selective_scan_backward", "gated_delta_backward"):
        x, row, one, sums = (2, 40, 4, 64), (2, 40, 2, 128), (2, 40, 4), ((2, 4), "float32")
        given = capi.options("pydet_scan_backward_options", kernel=name[0])
        need = ffi.new("uint64_t *")
        assert getattr(capi.lib, f"pydet_{operation}_workspace")(2, 80, 4, 64, 2, 128, need) == 0
        room = np.zeros(need[0] + 256, np.uint8)
        given.workspace = ffi.cast("void *", -room.ctypes.data % 256 + room.ctypes.data)
        given.workspace_size = need[0]
        capi._alive[given] = capi._alive[given], room
        if operation == "selective_scan_backward":
            shapes = [
                x,
                None,
                x,
                one,
                ((4,), "float32"),
                row,
                row,
                None,
                None,
                None,
                x,
                one,
                sums,
                row,
                row,
                None,
                None,
            ]
        else:
            shapes = [x, None, row, row, x, one, one, None, None, row, row, x, one, one, None]
        yield f"pydet_{operation}", tensors(shapes, dtype), given
        return
    if operation in ("selective_scan", "gated_delta"):
        x, row, one = (2, 40, 4, 64), (2, 40, 2, 128), (2, 40, 4)
        if operation == "selective_scan":
            shapes = [x, one, ((4,), "float32"), row, row, None, None, None, x, ((2, 4, 64, 128), "float32")]
        else:
            shapes = [row, row, x, one, one, None, None, x, ((2, 4, 128, 64), "float32")]
        yield f"pydet_{operation}", tensors(shapes, dtype), capi.options("pydet_scan_options", kernel=name[0])
        return
    if name[0] == "cuda_softmax_head":
        shapes = [((3,), "float32"), (3, 20480), ((3,), "int64"), (3, 20480)]
        yield "pydet_log_prob_backward", tensors(shapes, dtype), capi.options("pydet_log_prob_options", kernel=name[0])
        return
    if operation.startswith("softmax"):
        shapes = [(64, 256)] * (3 if operation == "softmax_backward" else 2)
        yield f"pydet_{operation}", tensors(shapes, dtype), capi.options("pydet_softmax_options", kernel=name[0])
        return
    for rows, n in ((64, 256), (64, 128), (64, 2048), (64, 8192), (4, 20000)):
        x = (rows, n)
        if operation == "layernorm":
            shapes = [x, None, ((n,), "float32"), ((n,), "float32"), x, ((rows,), "float32"), None, None]
            given = capi.options("pydet_layernorm_options", eps=1e-5, kernel=name[0])
        elif operation == "rmsnorm":
            shapes = [x, None, ((n,), "float32"), x, ((rows,), "float32"), None]
            given = capi.options("pydet_rmsnorm_options", eps=1e-6, kernel=name[0])
        else:
            shapes = [x, x, ((n,), "float32"), ((rows,), "float32"), None, x, ((n,), "float32")]
            if operation == "layernorm_backward":
                shapes[3:4] = [((rows,), "float32")] * 2
                shapes += [((n,), "float32")]
            size = ffi.new("uint64_t *")
            assert getattr(capi.lib, f"pydet_{operation}_workspace")(rows, n, size) == 0
            room = np.zeros(size[0] + 256, np.uint8)
            at = ffi.cast("void *", -room.ctypes.data % 256 + room.ctypes.data)
            given = capi.options(f"pydet_{operation}_options", workspace=at, workspace_size=size[0], kernel=name[0])
            capi._alive[given] = capi._alive[given], room
        yield f"pydet_{operation}", tensors(shapes, dtype), given


def call(cuda, problem):
    function, operands, given = problem
    pointers = [capi.pointer(t) for t in operands]
    if function == "pydet_fold":  # the parts, then out
        parts = ffi.new("pydet_tensor *[]", pointers[:-1])
        pointers = [ffi.cast("const pydet_tensor *const *", parts), len(parts), ffi.NULL, pointers[-1]]
    if function == "pydet_adamw":  # a list of each, of one tensor
        lists = [ffi.new("const pydet_tensor *[]", [one]) for one in pointers] + [ffi.NULL]
        pointers = [*lists[:5], 1, capi.options("pydet_adamw_step", lr=0.1, beta1=0.9, beta2=0.99)]
    return getattr(cuda.lib, function)(ffi.cast("void *", STREAM), *pointers, given)


def taken(cuda, capability):
    """A problem for each kernel that such a device runs, forced."""
    for name, operation, dtype, arithmetic in cuda.kernels(capability):
        for problem in problems(operation, (name, arithmetic), dtype):
            cuda.start(capability)
            if call(cuda, problem) == 0:
                yield name, problem
                break
        else:
            pytest.fail(f"{name} takes none of these problems: {cuda.sentence()}")


def works(cuda, capability, problem, what):
    cuda.start(capability)
    assert call(cuda, problem) == 0, f"after {what}: {cuda.sentence()}"
    assert cuda.fake.fakecuda_launches() and not cuda.fake.fakecuda_elsewhere(), what


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("error", [UNKNOWN, OUT_OF_MEMORY, OLD_DRIVER, NO_BINARY, ILLEGAL_ADDRESS, CAPTURE_INVALIDATED])
def test_every_call_of_the_runtime_may_fail(cuda, capability, error):
    """Once, or as under capture or in a broken context that and every later call."""
    walked = 0
    for name, problem in taken(cuda, capability):
        cuda.start(capability)
        assert call(cuda, problem) == 0 and not cuda.fake.fakecuda_elsewhere()
        log = cuda.log()
        launches = log.count("cudaLaunchKernelExC")
        assert launches == cuda.fake.fakecuda_launches() > 0
        for i, failing in enumerate(log):
            for lasting in (False, True):
                cuda.start(capability, fail_at=i, error=error, lasting=lasting)
                status, sentence = call(cuda, problem), cuda.sentence()
                what = f"{name}, call {i} ({failing}{' and later' * lasting}): status {status}, {sentence!r}"
                launched = cuda.fake.fakecuda_launches()
                if status == 0:
                    assert failing in DISPENSABLE and launched, what
                else:
                    assert status in (NO_DEVICE, DEVICE_ERROR, UNSUPPORTED), what
                    # Products that no kernel is named for, as the head's, ask first what devices there are.
                    of_devices = sentence.startswith("the CUDA runtime cannot use") or "there are 0 of them" in sentence
                    of_head = name.startswith("cuda_head_rows")
                    unnamed = of_head and of_devices
                    assert (unnamed or re.match(r"[a-z0-9_]+: .{20}", sentence)) and "\n" not in sentence, what
                    told = "made to fail" in sentence or f"({error})" in sentence or "does not say" in sentence
                    told |= unnamed
                    assert told or status == UNSUPPORTED or failing == "cuTensorMapEncodeTiled", what
                    assert launched < launches, what
                    if launched:  # what else may fail is asked for before the first launch that writes a result
                        # Steps that are launched by themselves, or the first of which writes the workspace alone.
                        several = of_head or name.endswith("_copied")
                        assert failing == "cudaLaunchKernelExC" or several, what
                if not lasting and not (failing == "cudaSetDevice" and status == 0):
                    assert cuda.fake.fakecuda_device() == 0, f"{what}: another device stays current"
                works(cuda, capability, problem, what)
                walked += 1
    assert walked > 100


def test_a_thread_without_a_context(cuda):
    """Its first work on a GPU may be a call of this library, as in PyTorch's backward pass."""
    described = 0
    for name, problem in taken(cuda, 90):
        cuda.start(90)
        cuda.fake.fakecuda_new_thread()
        assert call(cuda, problem) == 0, f"{name}: {cuda.sentence()}"
        assert cuda.fake.fakecuda_launches() and not cuda.fake.fakecuda_elsewhere(), name
        described += "cuTensorMapEncodeTiled" in cuda.log()
    assert described > 20


def count(cuda):
    found = ffi.new("int32_t *", 7)
    return cuda.lib.pydet_device_count(CUDA, found), found[0]


def test_a_driver_that_is_too_old(cuda):
    cuda.start(90, driver=11040, fail_at=0, error=OLD_DRIVER)
    status, _ = count(cuda)
    assert status == NO_DEVICE
    assert re.match(
        r"the NVIDIA driver supports CUDA 11\.4, this build of pydet needs 1\d\.\d or later", cuda.sentence()
    )
    cuda.start(90, driver=0, fail_at=0, error=OLD_DRIVER)  # what a machine without a driver answers
    assert count(cuda) == (0, 0)
    cuda.start(90)
    assert count(cuda) == (0, 2)


def test_no_device(cuda):
    name, problem = next(taken(cuda, 90))
    cuda.start(90, devices=0)
    assert count(cuda) == (0, 0)
    for devices in (0, 1):  # the call is for device 1
        cuda.start(90, devices=devices)
        assert call(cuda, problem) in (NO_DEVICE, UNSUPPORTED, DEVICE_ERROR) and cuda.sentence(), name
        assert not cuda.fake.fakecuda_launches()
    works(cuda, 90, problem, "no device")


def test_an_architecture_without_kernels(cuda):
    cuda.start(75)
    function, operands, given = next(problems("gemm", ("", capi.lib.PYDET_IEEE), "fp32"))
    given.kernel = ffi.NULL
    assert call(cuda, (function, operands, given)) == UNSUPPORTED and not cuda.fake.fakecuda_launches()
    assert "no kernel for arithmetic ieee on float32" in cuda.sentence(), cuda.sentence()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_a_call_asks_of_the_runtime_may_be_asked_under_capture(cuda, capability):
    """Nothing waits, allocates or copies: what would is not even linked (fakecuda.c has no such function)."""
    asked = set()
    for _, problem in taken(cuda, capability):
        cuda.start(capability)
        assert call(cuda, problem) == 0
        asked |= set(cuda.log())
    assert asked <= {
        *("cudaGetDevice", "cudaSetDevice", "cudaDeviceGetAttribute", "cudaPointerGetAttributes"),
        *("cudaFuncSetAttribute", "cudaFuncGetAttributes", "cudaLaunchKernelExC", "cudaOccupancyMaxActiveClusters"),
        *("cudaGetDriverEntryPointByVersion", "cuTensorMapEncodeTiled", "cuPointerGetAttributes"),
    }


def many_tensors(room, strange=None):
    """As many as a call of AdamW takes, with masters, one behind the other in `room`; `strange`: (list, number) of one
    that lies at its end."""
    lists, at, most = [], 0, capi.lib.PYDET_ADAMW_TENSORS
    kinds = [capi.random(1, kind).dtype for kind in ("bfloat16", "bfloat16", "float32", "float32", "float32")]
    for number, kind in enumerate(kinds):
        tensors = []
        for i in range(most):
            array = room[-256:] if (number, i) == strange else room[at : at + 256]
            at += 256
            tensors.append(capi.Tensor(array.view(kind)[:64], device=(CUDA, DEVICE)))
        lists.append(tensors)
    return lists


def step(cuda, lists):
    pointers = [ffi.new("const pydet_tensor *[]", [capi.pointer(x) for x in one]) for one in lists]
    how = capi.options("pydet_adamw_step", lr=0.1, beta1=0.9, beta2=0.99)
    return cuda.lib.pydet_adamw(ffi.cast("void *", STREAM), *pointers, len(lists[0]), how, ffi.NULL)


def test_a_step_of_many_tensors_asks_once_for_each_allocation(cuda):
    """Of 320 tensors in one allocation; of a driver that does not answer, each; and one that is the host's is found."""
    room = np.zeros(2 << 20, np.uint8)
    room = room[-room.ctypes.data % (1 << 20) :][: 1 << 20]
    lists = many_tensors(room)
    cuda.start(90)
    assert step(cuda, lists) == 0, cuda.sentence()
    assert cuda.log().count("cuPointerGetAttributes") == 1 and "cudaPointerGetAttributes" not in cuda.log()
    assert cuda.fake.fakecuda_launches() == 1
    first = cuda.log().index("cuPointerGetAttributes")
    cuda.start(90)
    assert step(cuda, lists) == 0  # the driver's function is known by now
    cuda.start(90, fail_at=cuda.log().index("cuPointerGetAttributes"))
    assert first and step(cuda, lists) == 0
    assert cuda.log().count("cuPointerGetAttributes") == 2 and cuda.log().count("cudaPointerGetAttributes") == 1
    for strange in ((0, 0), (1, 63), (4, 31)):
        lists = many_tensors(room, strange)
        cuda.start(90)
        cuda.fake.fakecuda_strange(ctypes.c_void_p(room.ctypes.data + room.nbytes - 256), ctypes.c_size_t(256))
        assert step(cuda, lists) == capi.lib.PYDET_INVALID_DEVICE and not cuda.fake.fakecuda_launches()
        at = f"{room.ctypes.data + room.nbytes - 256:#x}"
        assert cuda.sentence().startswith(f"adamw: the data at {at} lie on the host"), cuda.sentence()


def test_a_step_of_tensors_in_many_allocations(cuda):
    """More than are remembered of a call: each is found all the same, and one of the host's among them."""
    room = np.zeros(67 << 20, np.uint8)
    room = room[-room.ctypes.data % (1 << 20) :][: 66 << 20].reshape(66, -1)
    lists = [
        [capi.Tensor(x[at : at + 32].view(np.float32), device=(CUDA, DEVICE)) for x in room[:64]]
        for at in range(0, 1024, 256)
    ] + [[None] * 64]
    cuda.start(90)
    assert step(cuda, lists) == 0, cuda.sentence()
    assert cuda.log().count("cuPointerGetAttributes") == 64
    cuda.start(90)
    cuda.fake.fakecuda_strange(ctypes.c_void_p(room[50].ctypes.data), ctypes.c_size_t(1 << 20))
    assert step(cuda, lists) == capi.lib.PYDET_INVALID_DEVICE and "lie on the host" in cuda.sentence()


# ---- XLA's handlers --------------------------------------------------------------------------------------------------


def test_a_product_of_xla_copies_its_operands_where_it_is_given_room(cuda):
    """Rows that begin between units of 16 bytes: copies in the workspace and a tile, as from C; else other kernels."""
    import xla_frames as frames

    handler = frames.handlers(cuda.fake, "on_gpu")["gemm"]
    bf16, m, n, k = frames.BF16, 256, 512, 252
    size, need = ffi.new("uint64_t *"), 0
    for rows in (m, n):
        tensor = capi.Tensor(shape=(rows, k), dtype=capi.BFLOAT16, data=256, device=(CUDA, DEVICE))
        cuda.start(90)
        assert cuda.lib.pydet_gemm_copy_workspace(tensor.c, size) == 0 and size[0]
        need += size[0]
    for skinny, more, copied in itertools.product((0, 1), (-1, 0, 1000), (True, False)):
        shapes = (m, k), (n, k), (m, n)
        call = frames.gemm(*shapes, transpose_b=1, skinny=skinny, has_workspace=int(copied))
        specs = [(bf16, shape) for shape in shapes]
        room = ((frames.U8, (need + more,)),) if copied else ()
        call = frames.dataclasses.replace(call, arguments=tuple(specs[:2]), results=(specs[2], *room))
        cuda.start(90)
        sentence, _ = frames.run(handler, call, 0, stream=STREAM, ordinal=DEVICE)
        assert sentence is None and not cuda.fake.fakecuda_elsewhere()
        kernel = ffi.string(cuda.lib.pydet_last_kernel()).decode()
        assert (kernel == "cuda_gemm_sm90_copied") == (copied and more >= 0), (kernel, skinny, more)
        assert cuda.fake.fakecuda_launches() == (2 if copied and more >= 0 else 1)


def test_the_room_that_jax_asks_for(cuda, monkeypatch):
    """Of a Hopper, for what it reads badly, exactly; of other GPUs and types none."""
    jax = pytest.importorskip("jax")
    from pydet.jax import foreign

    library = types.SimpleNamespace(lib=foreign.ffi.dlopen(str(cuda.path)))
    monkeypatch.setattr(foreign._native, "try_load", lambda index: (library, ""))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    asked = foreign._bytes_of_copy.__wrapped__
    cuda.start(90)
    for dtype in ("bfloat16", "float16"):
        assert asked((300, 3420), dtype, False) == 300 * 3456 * 2
        assert asked((3420, 300), dtype, True) == asked((3420, 300), dtype, False) == 3420 * 320 * 2
        assert asked((2, 150, 3420), dtype, False) == 300 * 3456 * 2  # rows of one matrix
        assert asked((2, 150, 3420), dtype, True) == 0
        assert asked((300, 3424), dtype, False) == asked((0, 3420), dtype, False) == asked((300, 0), dtype, False) == 0
    assert asked((300, 3420), "float32", False) == 0
    cuda.start(80)
    assert asked((300, 3420), "bfloat16", False) == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    cuda.start(90)
    assert asked((300, 3420), "bfloat16", False) == 0
