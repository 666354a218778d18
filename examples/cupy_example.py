"""CuPy: pydet's operations on CuPy arrays and CuPy's current stream, and inside a CUDA graph. Needs an NVIDIA GPU.

python examples/cupy_example.py
"""

import sys

try:
    import cupy
except ImportError:
    sys.exit("cupy_example: CuPy is not installed (pip install cupy-cuda13x)")

import pydet

TOKENS, HIDDEN, OUTPUTS = 64, 1024, 768


def main():
    if not any(device.kind == "cuda" for device in pydet.devices()):
        sys.exit("cupy_example: pydet sees no NVIDIA GPU here")
    random = cupy.random.default_rng(0)
    x, w = (random.standard_normal((n, HIDDEN), cupy.float32).astype(cupy.float16) for n in (TOKENS, OUTPUTS))

    # On the stream of the `with`: the operations are queued behind each other, and results belong to it.
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.wait_event(cupy.cuda.Stream.null.record())
        batch = pydet.skinny_gemm(x, w)
        kernels = [pydet.last_kernel()]
        alone = pydet.skinny_gemm(x[7:8], w)
        kernels.append(pydet.last_kernel())
        assert (batch[7].view(cupy.uint16) == alone[0].view(cupy.uint16)).all()
    print(f"token 7 alone ({kernels[1]}) has the bits it has among {TOKENS} ({kernels[0]})")

    # Captured once, replayed for every batch that x holds.
    out = cupy.empty_like(batch)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        pydet.skinny_gemm(x, w, out=out)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert (out.view(cupy.uint16) == batch.view(cupy.uint16)).all()
    print("a replayed CUDA graph gives the bits of the plain call")

    # The CPU computes the same arithmetic.
    arithmetic = pydet.resolve_arithmetic("float16", ("cuda", x.device.id))
    on_cpu = pydet.skinny_gemm(x.get(), w.get(), arithmetic=arithmetic)
    assert on_cpu.tobytes() == batch.get().tobytes()
    print(f"the CPU computes the same bits ({arithmetic})")


if __name__ == "__main__":
    main()
