"""hip-python: pydet on its buffers and streams, with no framework. Needs an AMD GPU.

python examples/hip_python.py
"""

import ctypes
import sys

import numpy as np

try:
    from hip import hip
except ImportError:
    sys.exit("hip_python: hip-python is not installed (pip install hip-python)")

import pydet

TOKENS, HIDDEN, OUTPUTS = 64, 1024, 768
ROCM = 10  # kDLROCM


class Managed(ctypes.Structure):
    """DLManagedTensor of DLPack."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("code_and_bits", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Matrix:
    """fp16 elements at an address of an AMD GPU, by DLPack, which tells its kind of device from another."""

    def __init__(self, address, rows, columns, device=0):
        self.address, self.shape, self.device = address, (rows, columns), device
        extents = (ctypes.c_int64 * 2)(rows, columns)
        self.managed = Managed(address, (ROCM, device), 2, (2, 16), 1, extents)

    def __dlpack_device__(self):
        return ROCM, self.device

    def __dlpack__(self, **_):
        return capsule(ctypes.addressof(self.managed), b"dltensor", None)


def check(result):
    """What a call of HIP gives, without its status."""
    status, *values = result if isinstance(result, tuple) else (result,)
    if status != hip.hipError_t.hipSuccess:
        sys.exit(f"hip_python: {status.name}")
    return values[0] if values else None


def main():
    if not any(device.kind == "rocm" for device in pydet.devices()):
        sys.exit("hip_python: pydet sees no AMD GPU here")
    stream, kept = check(hip.hipStreamCreate()), []

    def allocate(rows, columns):
        kept.append(check(hip.hipMalloc(2 * rows * columns)))
        return Matrix(int(kept[-1]), rows, columns)

    def copy(target, source, size, kind):
        check(hip.hipMemcpyAsync(target, source, size, kind, stream))

    random = np.random.default_rng(0)
    arrays = [random.standard_normal((rows, HIDDEN), np.float32).astype(np.float16) for rows in (TOKENS, OUTPUTS)]
    x, w = (allocate(*array.shape) for array in arrays)
    for matrix, array in ((x, arrays[0]), (w, arrays[1])):
        copy(matrix.address, array, array.nbytes, hip.hipMemcpyKind.hipMemcpyHostToDevice)

    token = Matrix(x.address + 7 * HIDDEN * 2, 1, HIDDEN)
    batch, alone = allocate(TOKENS, OUTPUTS), allocate(1, OUTPUTS)
    pydet.skinny_gemm(x, w, out=batch, stream=int(stream))
    pydet.skinny_gemm(token, w, out=alone, stream=int(stream))
    results = [np.empty(matrix.shape, np.float16) for matrix in (batch, alone)]
    for array, matrix in zip(results, (batch, alone), strict=True):
        copy(array, matrix.address, array.nbytes, hip.hipMemcpyKind.hipMemcpyDeviceToHost)
    check(hip.hipStreamSynchronize(stream))
    assert results[1][0].tobytes() == results[0][7].tobytes()
    print(f"token 7 alone has the bits it has among {TOKENS} ({pydet.last_kernel()})")

    arithmetic = pydet.resolve_arithmetic("float16", ("rocm", 0))
    assert pydet.skinny_gemm(*arrays, arithmetic=arithmetic).tobytes() == results[0].tobytes()
    print(f"the CPU computes the same bits ({arithmetic})")
    for memory in kept:
        check(hip.hipFree(memory))


if __name__ == "__main__":
    main()
