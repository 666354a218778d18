"""The C interface as a C caller has it: cffi on native/include/pydet.h itself, hand-made descriptors, no Python layer.

Which library: PYDET_LIBRARY if set (as the package has it), else the one beside the package.
"""

import os
import pathlib
import re
import weakref

import cffi
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = ROOT / "native" / "include" / "pydet.h"


def declarations() -> str:
    """The header without its preprocessor: comments, directives and the C++ brackets removed."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif", "", text, flags=re.S)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    return text.replace("PYDET_API ", "")


def library_path() -> pathlib.Path:
    named = os.environ.get("PYDET_LIBRARY")
    return pathlib.Path(named) if named else ROOT / "pydet" / "libpydet_cpu.so"


ffi = cffi.FFI()
ffi.cdef(declarations())
lib = ffi.dlopen(str(library_path()))

FLOAT32, FLOAT16, BFLOAT16 = (2, 32, 1), (2, 16, 1), (4, 16, 1)
CPU = (1, 0)


def dtype_of(array) -> tuple[int, int, int]:
    fp8 = {"float8_e4m3fn": (10, 8, 1), "float8_e5m2": (12, 8, 1), "float8_e8m0fnu": (14, 8, 1)}
    others = {"int32": (0, 32, 1), "int64": (0, 64, 1), "bool": (6, 8, 1)}
    return {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, **fp8, **others}[array.dtype.name]


class Tensor:
    """A pydet_tensor and what it points to. From an array, or field by field; any field may be overridden."""

    def __init__(
        self, array=None, *, shape=None, strides="c", dtype=None, data=None, device=CPU, byte_offset=0, ndim=None
    ):
        self.array = array
        if array is not None:
            shape = array.shape if shape is None else shape
            dtype = dtype_of(array) if dtype is None else dtype
            data = array.ctypes.data if data is None else data
            if strides == "c":
                assert all(s % array.itemsize == 0 for s in array.strides)
                strides = [s // array.itemsize for s in array.strides]
        elif strides == "c":
            strides = None
        self.shape = ffi.new("int64_t[]", list(shape)) if shape is not None else ffi.NULL
        self.strides = ffi.new("int64_t[]", list(strides)) if strides is not None else ffi.NULL
        self.c = ffi.new("pydet_tensor *")
        self.c.data = ffi.cast("void *", data or 0)
        self.c.device.device_type, self.c.device.device_id = device
        self.c.ndim = ndim if ndim is not None else len(shape)
        self.c.dtype.code, self.c.dtype.bits, self.c.dtype.lanes = dtype
        self.c.shape = self.shape
        self.c.strides = self.strides
        self.c.byte_offset = byte_offset
        _alive[self.c] = self.array, self.shape, self.strides


def options(struct: str, **fields):
    """Zeroed options with struct_size set; a `kernel` given as str is kept alive with them."""
    made = ffi.new(f"{struct} *", {"struct_size": ffi.sizeof(struct)})
    for name, value in fields.items():
        if name == "kernel" and isinstance(value, str):
            _alive[made] = value = ffi.new("char[]", value.encode())
        setattr(made, name, value)
    return made


_alive: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # struct -> what it points to


def pointer(tensor):
    return ffi.NULL if tensor is None else tensor.c


def last_error() -> str:
    return ffi.string(lib.pydet_last_error()).decode()


def status_name(status: int) -> str:
    return ffi.string(lib.pydet_status_name(status)).decode()


def random(shape, dtype="float32", seed=0):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(kind)


def in_c(operation):
    """A Python function of groups of tokens, or one with its kernel forced, as a call of the C function itself: Python
    refuses ends beyond the tokens on the CPU, where C clamps them."""
    from pydet.hooks import arithmetics

    name = getattr(operation, "func", operation).__name__
    kernel = getattr(operation, "keywords", {}).get("kernel")
    scaled = name.startswith("scaled")

    def call(a, b, end, start=None, *, out, arithmetic, k_chunk=None, accumulate=False, **others):
        given = {key: None if x is None else Tensor(x) for key, x in others.items()}
        a, b, end, out = (Tensor(x) for x in (a, b, end, out))
        scales = [given.pop("a_scale", None), given.pop("b_scale", None)] if scaled else []
        factors = [a, scales[0], b, scales[1]] if scaled else [a, b]
        tensors = [*factors, given.pop("bias", None), None if start is None else Tensor(start), end, out]
        assert not given, given
        k_chunk = (128 if scaled else 0) if k_chunk is None else k_chunk
        how = {"arithmetic": arithmetics()[arithmetic], "k_chunk": k_chunk, "accumulate": accumulate}
        how |= {} if kernel is None else {"kernel": kernel}
        made = options(f"pydet_{name}_options", **how)
        status = getattr(lib, f"pydet_{name}")(ffi.NULL, *map(pointer, tensors), made)
        assert status == 0, last_error()

    return call


def owner(array):
    """The array whose memory this is a view of."""
    while array.base is not None:
        array = array.base
    return array
