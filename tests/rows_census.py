"""Which kernel the CUDA library chooses for each of many drawn problems of norms and softmax, on the stand-in runtime.

    python tests/rows_census.py LIBRARY [--record]

Problems are drawn as `python -m bench.cuda rmsnorm --random` draws them: M log-uniform to 200,000, N to 16,384
(softmax: 131,072) in steps of 8, or any N for one in four. Memory is as PyTorch allocates it. Nothing is read or run.
"""

import collections
import ctypes
import itertools
import json
import sys

import capi
from capi import ffi

sys.path.insert(0, str(capi.ROOT / "tools"))
import rows_fit

RECORDED = capi.ROOT / "tests" / "data" / "rows_census.json"
CUDA, DEVICE, STREAM = 2, 1, 0x1230
TYPES = {"bf16": capi.BFLOAT16, "fp16": capi.FLOAT16, "fp32": capi.FLOAT32}
INT64 = (0, 64, 1)
NORMS = ("rmsnorm", "rmsnorm_backward", "layernorm", "layernorm_backward")


class Library:
    """The stand-in library, of a device of 132 multiprocessors; `capability` once for a loaded copy."""

    def __init__(self, path, capability=90):
        self.lib, fake = ffi.dlopen(str(path)), ctypes.CDLL(str(path))
        fake.fakecuda_reset.argtypes = [ctypes.c_int] * 6 + [ctypes.c_void_p]
        fake.pydet_exchange_forget_devices()
        fake.fakecuda_reset(2, capability, 13000, -1, 999, False, STREAM)

    def kernels(self):
        """The names of the kernels of these operations."""
        info, i = ffi.new("pydet_kernel_info *", {"struct_size": ffi.sizeof("pydet_kernel_info")}), 0
        while self.lib.pydet_kernel_name(i) != ffi.NULL:
            assert self.lib.pydet_query_kernel(i, info) == 0
            if info.device_type == CUDA and ffi.string(info.operation).decode() in rows_fit.OPERATIONS:
                yield ffi.string(info.name).decode()
            i += 1

    def chosen(self, operation, m, n, dtype="bf16", residual=False, kernel=None, sums=True):
        """The kernel that ran; None where `kernel` was asked for, and refuses."""
        places = iter(range(1, 30))

        def tensor(shape, kind=None):
            data = next(places) << 36
            return capi.Tensor(shape=shape, dtype=kind or TYPES[dtype], data=data, device=(CUDA, DEVICE))

        x, of_row, vector = (m, n), lambda: tensor((m,), capi.FLOAT32), lambda: tensor((n,))
        more = lambda: tensor(x) if residual else None
        given = {} if kernel is None else {"kernel": kernel}
        function, struct = operation, operation
        if operation == "rmsnorm":
            operands, given["eps"] = [tensor(x), more(), vector(), tensor(x), of_row(), more()], 1e-6
        elif operation == "layernorm":
            operands = [tensor(x), more(), vector(), vector(), tensor(x), of_row(), of_row(), more()]
            given["eps"] = 1e-6
        elif operation in NORMS:
            rows = [of_row() for _ in range(1 + operation.startswith("layer"))]
            of_sums = [vector() if sums else None for _ in rows]
            operands = [tensor(x), tensor(x), vector(), *rows, more(), tensor(x), *of_sums]
            size = ffi.new("uint64_t *")
            assert getattr(self.lib, f"pydet_{operation}_workspace")(m, n, size) == 0
            given |= {"workspace": ffi.cast("void *", 31 << 36), "workspace_size": size[0]}
        elif operation == "log_prob":
            operands = [tensor(x), tensor((m,), INT64), of_row()]
        elif operation == "log_prob_backward":
            operands, struct = [of_row(), tensor(x), tensor((m,), INT64), tensor(x)], "log_prob"
        else:
            function, struct = operation.removeprefix("log_"), "softmax"
            given["log"] = operation.startswith("log_")
            operands = [tensor(x) for _ in range(3 if "backward" in operation else 2)]
        made = capi.options(f"pydet_{struct}_options", **given)
        status = getattr(self.lib, f"pydet_{function}")(ffi.cast("void *", STREAM), *map(capi.pointer, operands), made)
        if kernel is not None and status == capi.lib.PYDET_UNSUPPORTED:
            return None
        assert status == 0, ffi.string(self.lib.pydet_last_error()).decode()
        return ffi.string(self.lib.pydet_last_kernel()).decode()


def census(library, operation, count=1000, seed=0, **how):
    """How many of the drawn problems each kernel is chosen for."""
    found = collections.Counter(
        library.chosen(operation, m, n, **how) for m, n in rows_fit.drawn(operation, count, seed)
    )
    return dict(sorted(found.items()))


def all_censuses(library, count=1000):
    """Of every operation in bf16 and fp32, and of norms with a residual."""
    found = {}
    for operation, dtype in itertools.product(rows_fit.OPERATIONS, ("bf16", "fp32")):
        for residual in (False, True) if operation in NORMS and dtype == "bf16" else (False,):
            name = f"{operation}, {dtype}" + ", residual" * residual
            found[name] = census(library, operation, count, dtype=dtype, residual=residual)
    return found


def main(path, record=None):
    found = all_censuses(Library(path))
    for what, counts in found.items():
        print(what)
        for name, count in sorted(counts.items(), key=lambda one: -one[1]):
            print(f"  {100 * count / sum(counts.values()):5.1f} %  {name}")
    if record == "--record":
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
