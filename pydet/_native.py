"""The shared libraries: finding them, loading them, and turning their statuses into exceptions.

There are three builds, libpydet_cpu.so, libpydet_cuda.so and libpydet_hip.so, beside this file; each holds the CPU
kernels too. Importing pydet loads one that serves the CPU; the one for a GPU is loaded when its first tensor appears.
The environment variable PYDET_LIBRARY names a file to use instead of all three.
"""

from __future__ import annotations

import ctypes
import os
import re
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

from pydet import _cdef

FOLDER = Path(__file__).resolve().parent
DEVICE_NAMES = ("CPU", "CUDA", "ROCm")  # in the order of the header's PYDET_EXCHANGE_CPU, _CUDA, _ROCM
BUILDS = (
    ("libpydet_cpu.so", "libpydet_cuda.so", "libpydet_hip.so"),  # which serve the CPU, the first choice first
    ("libpydet_cuda.so",),
    ("libpydet_hip.so",),
)

ffi: Any = _cdef.ffi  # cffi's view of the headers


def _enumerators() -> types.SimpleNamespace:
    """The header's enumerators by name. cffi's own object for them is not for a global: what asks each global of each
    module for ``__dict__`` (vLLM's worker does) would have it look for that symbol in the process, and raise."""
    declared = ffi.dlopen(None)
    return types.SimpleNamespace(**{name: getattr(declared, name) for name in dir(declared) if name[:6] == "PYDET_"})


constants: Any = _enumerators()
DEVICE_TYPES = (constants.PYDET_CPU, constants.PYDET_CUDA, constants.PYDET_ROCM)


class Error(RuntimeError):
    """What pydet refused, in one sentence: operation, argument, got, want.

    Attributes:
        status: the number of the C status (``pydet.h``).
        status_name: its name, such as ``"PYDET_INVALID_SHAPE"``.

    An argument of the wrong type is also a :class:`TypeError`; any other wrong argument is also a :class:`ValueError`.
    """

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status
        self.status_name = STATUS_NAMES.get(status, "unknown status")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status)


class InvalidValue(Error, ValueError):
    """An argument that is wrong in its value, shape, strides, device or memory."""


class InvalidType(Error, TypeError):
    """An argument of the wrong kind or element type."""


for _class in (Error, InvalidValue, InvalidType):
    _class.__module__ = "pydet"

STATUS_NAMES = {
    getattr(constants, name): name
    for name in (
        *("PYDET_OK", "PYDET_INVALID_VALUE", "PYDET_INVALID_SHAPE", "PYDET_INVALID_DTYPE", "PYDET_INVALID_STRIDE"),
        *("PYDET_INVALID_DEVICE", "PYDET_NULL_POINTER", "PYDET_OVERLAP", "PYDET_OVERFLOW", "PYDET_MISALIGNED"),
        *("PYDET_WORKSPACE_TOO_SMALL", "PYDET_UNSUPPORTED", "PYDET_NO_DEVICE", "PYDET_DEVICE_ERROR"),
    )
}
INVALID_VALUE: int = constants.PYDET_INVALID_VALUE
INVALID_DTYPE: int = constants.PYDET_INVALID_DTYPE
INVALID_DEVICE: int = constants.PYDET_INVALID_DEVICE
UNSUPPORTED: int = constants.PYDET_UNSUPPORTED  # also for a library that is not there
_NOT_ARGUMENTS = (UNSUPPORTED, constants.PYDET_NO_DEVICE, constants.PYDET_DEVICE_ERROR)


def fail(status: int, sentence: str) -> NoReturn:
    """Raises the exception of a status."""
    if status == INVALID_DTYPE:
        raise InvalidType(sentence, status)
    if status in _NOT_ARGUMENTS:
        raise Error(sentence, status)
    raise InvalidValue(sentence, status)


def text(pointer: Any) -> str:
    """A C string."""
    return str(ffi.string(pointer).decode(errors="replace"))


def keep_for_ever(x: Any) -> None:
    """Keeps an object alive to the end of the process, past the interpreter's own clearing up."""
    ctypes.pythonapi["Py_IncRef"](ctypes.py_object(x))


class Library:
    """One loaded build."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.lib: Any = ffi.dlopen(str(path))
        except OSError as problem:
            # cffi words it as: cannot load library 'x.so': reason.  Additionally, ctypes.util.find_library() ...
            reason = str(problem).split(".  Additionally,")[0]
            raise Error(f"{path} is there but does not load: {reason}", UNSUPPORTED) from None
        try:
            abi, numerics = self.lib.pydet_abi(), self.lib.pydet_numerics()
        except (AttributeError, ffi.error):  # which of the two depends on cffi's release
            raise Error(f"{path} is no pydet library: it has no pydet_abi()", UNSUPPORTED) from None
        for word, got, want in (
            ("ABI", abi, constants.PYDET_ABI),
            ("NUMERICS", numerics, constants.PYDET_NUMERICS),
        ):
            if got != want:
                raise Error(f"{path} has {word} {got}, this Python package wants {want}; build both anew", UNSUPPORTED)
        keep_for_ever(self.lib)  # Python objects point into it, and may be the last to go when the process ends

    def check(self, status: int) -> None:
        """Raises for any status but PYDET_OK."""
        if status != constants.PYDET_OK:
            fail(status, text(self.lib.pydet_last_error()))


_loaded: dict[Path, Library] = {}


def warn_of_threads() -> None:
    """Says that PYDET_NUM_THREADS is no number, where it is none: the library, which prints nothing, passes it over."""
    said = os.environ.get("PYDET_NUM_THREADS", "")
    number = re.fullmatch(r"[ \t\n\v\f\r]*\+?(\d+) *(,.*)?", said, flags=re.ASCII | re.DOTALL)
    if said and not (number and int(number[1]) >= 1):
        sentence = f"PYDET_NUM_THREADS is {said!r}, want a number from 1; it is passed over, as if it were not set"
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def candidates(index: int) -> list[Path]:
    """The files that may serve a device (an index into DEVICE_NAMES), the first choice first."""
    named = os.environ.get("PYDET_LIBRARY")
    return [Path(named).absolute()] if named else [FOLDER / build for build in BUILDS[index]]


def load_file(path: Path) -> Library:
    """The library of a file, loaded once."""
    if path not in _loaded:
        if not path.is_file():
            named = os.environ.get("PYDET_LIBRARY")
            raise Error(f"{path} is not there" + (", which PYDET_LIBRARY names" if named else ""), UNSUPPORTED)
        if not _loaded:
            warn_of_threads()
        _loaded[path] = Library(path)
    return _loaded[path]


def try_load(index: int) -> tuple[Library | None, str]:
    """The library that serves a device, loaded at its first use; or None, and what was sought and why in vain."""
    problems = []
    for path in candidates(index):
        try:
            return load_file(path), ""
        except Error as problem:
            problems.append(str(problem))
    return None, f"no library serves {DEVICE_NAMES[index]} tensors: {'; '.join(problems)}"


def load(index: int) -> Library:
    """The library that serves a device; :class:`Error` where there is none."""
    library, problem = try_load(index)
    if library is None:
        raise Error(problem, UNSUPPORTED)
    return library


def arithmetic_names() -> list[str]:
    """The arithmetics of the loaded library, each at its number."""
    lib = load(constants.PYDET_EXCHANGE_CPU).lib
    names: list[str] = []
    while (name := lib.pydet_arithmetic_name(len(names))) != ffi.NULL:
        names.append(text(name))
    return names
