"""cuda.core: pydet on its buffers and streams, with no framework. Needs an NVIDIA GPU.

python examples/cuda_core.py
"""

import ctypes
import sys

import numpy as np

try:
    from cuda.core import Device, LegacyPinnedMemoryResource
except ImportError:
    sys.exit("cuda_core: cuda.core 1.0 or later is not installed (pip install cuda-python cuda-core)")

import pydet

TOKENS, HIDDEN, OUTPUTS = 64, 1024, 768


class Matrix:
    """fp16 elements of a cuda.core buffer from the `first` on, with a shape: what pydet asks of bare memory."""

    def __init__(self, buffer, shape, first=0):
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "<f2",
            "data": (int(buffer.handle) + 2 * first, False),
        }


def main():
    if not any(device.kind == "cuda" for device in pydet.devices()):
        sys.exit("cuda_core: pydet sees no NVIDIA GPU here")
    device = Device(0)
    device.set_current()
    stream, pinned = device.create_stream(), LegacyPinnedMemoryResource()

    def host(shape):
        """A pinned buffer and an fp16 array over it."""
        buffer = pinned.allocate(2 * int(np.prod(shape)))
        memory = (ctypes.c_char * buffer.size).from_address(int(buffer.handle))
        return buffer, np.frombuffer(memory, np.float16).reshape(shape)

    def on_device(shape):
        return Matrix(device.allocate(2 * int(np.prod(shape)), stream=stream), shape)

    random = np.random.default_rng(0)
    pinned_x, x_host = host((TOKENS, HIDDEN))
    pinned_w, w_host = host((OUTPUTS, HIDDEN))
    x, w = on_device(x_host.shape), on_device(w_host.shape)
    for source, array, matrix in ((pinned_x, x_host, x), (pinned_w, w_host, w)):
        array[:] = random.standard_normal(array.shape, np.float32)
        matrix.buffer.copy_from(source, stream=stream)

    # All of it on one stream, so it is synchronised once, at the end.
    token = Matrix(x.buffer, (1, HIDDEN), first=7 * HIDDEN)
    batch, alone = on_device((TOKENS, OUTPUTS)), on_device((1, OUTPUTS))
    pydet.skinny_gemm(x, w, out=batch, stream=stream)
    pydet.skinny_gemm(token, w, out=alone, stream=stream)
    pinned_batch, batch_host = host((TOKENS, OUTPUTS))
    pinned_alone, alone_host = host((1, OUTPUTS))
    batch.buffer.copy_to(pinned_batch, stream=stream)
    alone.buffer.copy_to(pinned_alone, stream=stream)
    stream.sync()
    assert alone_host[0].tobytes() == batch_host[7].tobytes()
    print(f"token 7 alone has the bits it has among {TOKENS} ({pydet.last_kernel()})")

    arithmetic = pydet.resolve_arithmetic("float16", ("cuda", 0))
    assert pydet.skinny_gemm(x_host, w_host, arithmetic=arithmetic).tobytes() == batch_host.tobytes()
    print(f"the CPU computes the same bits ({arithmetic})")


if __name__ == "__main__":
    main()
