"""Builds the package: the CPU library by the Makefile, and the declarations of its functions out of its header."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
HEADERS = [ROOT / "native/exchange.h", ROOT / "native/include/pydet.h"]


def version() -> str:
    """The release, which the C header alone states."""
    text = HEADERS[1].read_text()
    return ".".join(re.search(rf"PYDET_VERSION_{part} = (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def write_declarations() -> Path:
    """Writes pydet/_cdef.py, which cffi reads, from the headers."""
    import cffi

    target = ROOT / "pydet/_cdef.py"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-E", "-P", "-DPYDET_CDEF", str(HEADERS[0])]
    try:
        declarations = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        sys.exit(f"pydet: no C compiler {compiler[0]!r}; install one, or name it in CC")
    except subprocess.CalledProcessError as error:
        sys.exit(f"pydet: {shlex.join(command)} failed:\n{error.stderr}")
    builder = cffi.FFI()
    builder.set_source("pydet._cdef", None)
    builder.cdef(declarations)
    fresh = target.with_suffix(f".{os.getpid()}.new")
    builder.emit_python_code(str(fresh))
    fresh.replace(target)
    return target


def build_library() -> None:
    """Builds pydet/libpydet_cpu.so."""
    try:
        subprocess.run(["make", "cpu", f"-j{os.cpu_count() or 1}"], cwd=ROOT, check=True)
    except FileNotFoundError:
        sys.exit("pydet: no make; install make and g++")
    except subprocess.CalledProcessError as error:
        sys.exit(f"pydet: 'make cpu' failed with status {error.returncode}")


class build_native_then_py(build_py):
    """Makes the two files that are not sources, then packs the package as ever."""

    def run(self) -> None:
        build_library()
        write_declarations()
        super().run()


class BinaryDistribution(Distribution):
    """A package that holds machine code, though no extension module."""

    def has_ext_modules(self) -> bool:
        return True


class wheel_for_any_python(bdist_wheel):
    """One wheel for every Python 3 on this platform: nothing in it is compiled against Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        version=version(),
        distclass=BinaryDistribution,
        cmdclass={"build_py": build_native_then_py, "bdist_wheel": wheel_for_any_python},
    )
