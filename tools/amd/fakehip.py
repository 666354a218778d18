"""The stand-in HIP runtime (fakehip.c) with the interpreter (gcn.py) behind it: launches execute the library's code.

`build` compiles it. A process loads it in place of the machine's runtime by build's path before the library is loaded,
or by LD_LIBRARY_PATH. Device memory is what the stand-in says that it is; a kernel's access outside of it is an error.
"""

import ctypes
import os
import pathlib
import subprocess

import numpy as np

import gcn

HERE = pathlib.Path(__file__).resolve().parent
ARCHS = {"gfx90a": "cdna2", "gfx942": "cdna3"}

CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
    ctypes.c_void_p,
)


def missing(library):
    """Why there can be no stand-in for this library here: a list of sentences."""
    problems = [] if library.exists() else [f"{library.name} is not built (make hip)"]
    return problems + [f"no {name}" for name in ("llvm-objdump", "llvm-readelf") if not gcn.tool(name)]


def build(library, folder):
    """Its path, under the name by which the library asks for the runtime."""
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    soname = next(line.split("[")[1].rstrip("]") for line in needed.splitlines() if "[libamdhip64" in line)
    rocm = pathlib.Path(os.environ.get("ROCM", "/opt/rocm" if pathlib.Path("/opt/rocm").exists() else "/usr"))
    runtime = folder / soname
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-D__HIP_PLATFORM_AMD__", "-isystem"]
    command += [rocm / "include", HERE / "fakehip.c", "-o", runtime, f"-Wl,-soname,{soname}"]
    subprocess.run(command, check=True)
    return runtime


class StandIn:
    """The runtime of this process. `launches` are the kernels launched since `start`, `ran` the names of those that
    were executed, `problem` what went wrong in one; `order`, `grid` and `executes` say how to go on."""

    def __init__(self, runtime, library, folder):
        self.fake, self.library, self.folder = ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL), library, folder
        self.fake.fakehip_log.restype = self.fake.fakehip_kernel.restype = ctypes.c_char_p
        self.fake.fakehip_memory.restype = ctypes.c_size_t
        self.fake.fakehip_own.argtypes = ctypes.c_void_p, ctypes.c_size_t
        self.kernels = {}
        self.callback = CALLBACK(self.on_launch)
        self.fake.fakehip_on_launch(self.callback)

    def load(self, arch):
        """The kernels of an architecture, taken apart at its first use."""
        self.kernels[arch] = {}
        for elf in gcn.code_objects(self.library, arch):
            self.kernels[arch] |= gcn.kernels(elf, self.folder / "kernels.co")
        for kernel in self.kernels[arch].values():
            kernel.arithmetic = ARCHS[arch]

    def start(self, arch, devices=1, fail_at=-1):
        if arch in ARCHS and arch not in self.kernels:
            self.load(arch)
        self.arch, self.launches, self.graphs, self.problem = arch, [], {}, None
        self.executes, self.order, self.ran, self.grid = True, None, set(), list
        self.fake.fakehip_disown()
        self.fake.fakehip_reset(devices, f"{arch}:sramecc+:xnack-".encode(), fail_at)

    def own(self, array):
        """Makes all bytes of a contiguous array device memory."""
        if array.nbytes:
            self.fake.fakehip_own(array.ctypes.data, array.nbytes)

    def memory(self):
        """{address: bytes} of the device."""
        found, base, i = {}, ctypes.c_void_p(), 0
        while size := self.fake.fakehip_memory(i, ctypes.byref(base)):
            found[base.value] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base.value))
            i += 1
        return found

    def on_launch(self, name, shape, shared, arguments, stream, graph):
        """A launch: checked against the kernel's own metadata, then executed, or kept for its graph's launches."""
        try:
            if name is None:
                for work in self.graphs[graph]:
                    self.execute(*work)
                return 0
            kernel, shape = self.kernels[self.arch][name.decode()], list(shape[:6])
            threads = shape[3] * shape[4] * shape[5]
            assert threads <= int(kernel.metadata["max_flat_workgroup_size"])
            assert kernel.lds + shared <= 65536
            explicit = [(offset, size) for offset, size, kind in kernel.arguments if not kind.startswith("hidden_")]
            segment = bytearray(max(offset + size for offset, size in explicit))
            for i, (offset, size) in enumerate(explicit):
                segment[offset : offset + size] = ctypes.string_at(arguments[i], size)
            self.launches.append((name.decode(), shape, shared, stream or 0, self.fake.fakehip_device()))
            work = kernel, shape, shared, bytes(segment)
            if graph:
                self.graphs.setdefault(graph, []).append(work)
            elif self.executes:
                self.execute(*work)
            return 0
        except Exception as problem:
            self.problem = self.problem or problem
            return 1

    def execute(self, kernel, shape, shared, segment):
        gcn.launch(kernel, self.grid(shape[:3]), shape[3:], shared, segment, self.memory(), self.order)
        self.ran.add(kernel.name)
