"""Builds the package: the CPU library by the Makefile, and the declarations of its functions out of its header.

A wheel holds that library and any other that lies in pydet/, or those that PYDET_LIBRARIES names (paths; `make wheel`,
which has built them, does so); and for C and C++ the headers and a CMake package.

Under SOURCE_DATE_EPOCH a wheel and a source archive are the same bytes whenever they are built of the same files.
"""

import gzip
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
HEADERS = [ROOT / "native/entry/python.h", ROOT / "native/include/pydet.h"]


def version() -> str:
    """The release, which the C header alone states."""
    text = HEADERS[1].read_text()
    return ".".join(re.search(rf"PYDET_VERSION_{part} = (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def description() -> str:
    """README.md for a package index, which has none of the files beside it: a link to one of them is its name, and a
    picture its caption."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"!\[([^\]]*)\]\((?!https?://)[^)]*\)", r"*\1*", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?://|#)([^)]*)\)", _name_of_link, text)


def _name_of_link(link: re.Match[str]) -> str:
    """`[text](path)` without the link: the text, and the path where the text does not already end with it."""
    text, path = link.groups()
    return text if text.strip("`").endswith(path.rsplit("/")[-1]) else f"{text} (`{path}` in the sources)"


def addresses() -> dict[str, str]:
    """Where the sources and the documentation are, as `make docs` is told: REPO_URL and SITE_URL; else nothing."""
    found = {name: os.environ.get(name, "") for name in ("REPO_URL", "SITE_URL")}
    for name, address in found.items():
        if address and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", address):
            raise SystemExit(f"{name} is {address!r}, want an address that begins with https://")
    repository, site = (address.rstrip("/") for address in found.values())
    urls = {"Source": repository, "Issues": repository and f"{repository}/issues", "Documentation": site}
    return {name: address for name, address in urls.items() if address}


def write_declarations() -> Path:
    """Writes pydet/_cdef.py, which cffi reads, from the headers."""
    import cffi

    target = ROOT / "pydet/_cdef.py"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-E", "-P", "-DPYDET_CDEF", f"-I{HEADERS[1].parent}", str(HEADERS[0])]
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


def libraries() -> list[Path]:
    """The libraries to pack; builds pydet/libpydet_cpu.so unless others are named."""
    if named := shlex.split(os.environ.get("PYDET_LIBRARIES", "")):
        for name in named:
            if not Path(name).is_file():
                sys.exit(f"pydet: PYDET_LIBRARIES names {name}, which is not there")
        return [Path(name) for name in named]
    build_library()
    return sorted((ROOT / "pydet").glob("libpydet_*.so"))


def build_library() -> None:
    """Builds pydet/libpydet_cpu.so."""
    try:
        subprocess.run(["make", "cpu", f"-j{os.cpu_count() or 1}"], cwd=ROOT, check=True)
    except FileNotFoundError:
        sys.exit("pydet: no make; install make and g++")
    except subprocess.CalledProcessError as error:
        sys.exit(f"pydet: 'make cpu' failed with status {error.returncode}")


class build_native_then_py(build_py):
    """Makes the files that are not sources, then packs the package as ever."""

    def run(self) -> None:
        built = libraries()
        write_declarations()
        if not self.editable_mode:  # a wheel is all that lies in this folder: nothing of an earlier build may
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "pydet"
            for path in built:
                shutil.copy(path, package)
            for path in ("native/NUMERICS.md", "docs/reference/rules.md"):
                shutil.copy(ROOT / path, package)
            self.pack_for_cpp(package)
            for path in package.rglob("*"):  # as every umask makes them
                path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)

    def pack_for_cpp(self, package: Path) -> None:
        """The headers, and the CMake package of packaging/ with the places that it has here."""
        for folder in ("include", "cmake"):
            (package / folder).mkdir()
        for path in (ROOT / "native/include").iterdir():
            shutil.copy(path, package / "include")
        for path in (ROOT / "packaging").glob("*.cmake.in"):
            text = path.read_text()
            for name, value in (("include", "../include"), ("libdir", ".."), ("version", version())):
                text = text.replace(f"@{name}@", value)
            (package / "cmake" / path.stem).write_text(text)


class sdist_of_a_date(sdist):
    """Dates the source archive by SOURCE_DATE_EPOCH, and leaves out whose files they are. A wheel does so itself."""

    def make_archive(self, *arguments, **options) -> str:
        path = super().make_archive(*arguments, **options)
        date = os.environ.get("SOURCE_DATE_EPOCH")
        if date is not None and path.endswith(".tar.gz"):
            dated(Path(path), int(date))
        return path


def dated(archive: Path, date: int) -> None:
    """Writes a .tar.gz anew: the same members by name, of this date, of nobody, readable by all."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = date, 0, 0, "", ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        member.pax_headers = {}
        return member

    fresh = archive.with_suffix(".new")
    with (
        tarfile.open(archive) as old,
        open(fresh, "wb") as file,
        gzip.GzipFile("", "wb", mtime=date, fileobj=file) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            new.addfile(plain(member), old.extractfile(member) if member.isfile() else None)
    fresh.replace(archive)


class BinaryDistribution(Distribution):
    """A package that holds machine code, though no extension module."""

    def has_ext_modules(self) -> bool:
        return True


class wheel_for_any_python(bdist_wheel):
    """One wheel for every Python 3 on this platform: nothing in it is compiled against Python."""

    def run(self) -> None:
        before = os.umask(0o022)  # of what it writes beside the package
        try:
            super().run()
        finally:
            os.umask(before)

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        version=version(),
        project_urls=addresses(),
        long_description=description(),
        long_description_content_type="text/markdown",
        distclass=BinaryDistribution,
        cmdclass={"build_py": build_native_then_py, "bdist_wheel": wheel_for_any_python, "sdist": sdist_of_a_date},
    )
