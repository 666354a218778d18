"""``pydet COMMAND``, or ``python -m pydet COMMAND``: info (which needs no word), demo, audit, bench."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import shlex
import sys
from typing import Any

import pydet
from pydet import _native
from pydet.protocols import TYPES


def report() -> dict[str, Any]:
    """Everything that `pydet` prints. It raises nothing: a problem is a sentence in it."""
    found: dict[str, Any] = {
        "version": pydet.__version__,
        "abi": pydet.ABI,
        "numerics": pydet.NUMERICS,
        "libraries": {},
        "devices": [],
        "arithmetic": {},
        "kernels": [],
        "problems": [],
    }
    for name, path in _files().items():
        try:
            library = _native.load_file(path)
            found["libraries"][name] = {"path": str(path), "version": _native.text(library.lib.pydet_version())}
        except _native.Error as problem:
            found["libraries"][name] = {"problem": str(problem)}
    try:
        found["devices"] = [dataclasses.asdict(device) for device in pydet.devices()]
        found["kernels"] = [dataclasses.asdict(kernel) for kernel in pydet.kernels()]
    except _native.Error as problem:
        found["problems"].append(str(problem))
    for device in found["devices"]:
        key = f"{device['kind']}:{device['index']}"
        found["arithmetic"][key] = {}
        for dtype in TYPES[:-1]:  # the last is for scales
            try:
                resolved = pydet.resolve_arithmetic(dtype, (device["kind"], device["index"]))
            except _native.Error as problem:
                resolved = str(problem)
            found["arithmetic"][key][dtype] = resolved
    if not any("path" in library for library in found["libraries"].values()):
        found["problems"].append("No library loads, so nothing can be computed. Build one with: make cpu")
    return found


def _files() -> dict[str, Any]:
    """The library files that are looked for, by name."""
    return {path.name: path for index in range(len(_native.BUILDS)) for path in _native.candidates(index)}


def print_report(found: dict[str, Any]) -> None:
    """The report as text."""
    print(f"pydet {found['version']} (ABI {found['abi']}, numerics {found['numerics']})")
    print("\nLibraries")
    for name, library in found["libraries"].items():
        print(f"  {name:18}  {library.get('path') or library['problem']}")
    print("\nDevices")
    for device in found["devices"]:
        key = f"{device['kind']}:{device['index']}"
        print(f"  {key:8}  {device['name']}, {device['arch']}, {device['multiprocessors']} multiprocessors")
        resolved = (f"{name} for {dtype}" for dtype, name in found["arithmetic"][key].items())
        print(f"  {'':8}  auto is {', '.join(resolved)}")
    if not found["devices"]:
        print("  none")
    print("\nKernels (in the order in which they are tried)")
    for kernel in found["kernels"]:
        mark = "" if kernel["available"] else "  (not on this machine)"
        arithmetic = kernel["arithmetic"] if kernel["operation"].endswith("gemm") else ""
        print(f"  {kernel['name']:32}  {arithmetic:6}  {kernel['dtypes']:14}  {kernel['requires']}{mark}")
    if not found["kernels"]:
        print("  none")
    for problem in found["problems"]:
        print(f"\n{problem}")


def compiler_flags(given: argparse.Namespace) -> str:
    """What --cflags, --libs and --cmakedir ask for, on one line; ValueError says what is not here."""
    folder = _native.FOLDER
    include, cmake = folder / "include", folder / "cmake"
    if not include.is_dir():  # this is pydet's source tree
        include = folder.parent / "native" / "include"
    flags = [f"-I{include}"] if given.cflags else []
    if given.libs:
        name, here = f"libpydet_{given.libs}.so", sorted(path.name for path in folder.glob("libpydet_*.so"))
        if name not in here:
            raise ValueError(f"there is no {name} in {folder}, which has: {', '.join(here) or 'none'}")
        flags += [f"-L{folder}", f"-lpydet_{given.libs}", f"-Wl,-rpath,{folder}"]
    if given.cmakedir:
        if not cmake.is_dir():
            raise ValueError(f"{folder} is in pydet's source tree, which is no CMake package; 'make install' makes one")
        flags += [str(cmake)]
    return " ".join(shlex.quote(flag) for flag in flags)


def info(arguments: list[str]) -> int:
    """`pydet info`: shows what is here, as text or JSON."""
    parser = argparse.ArgumentParser(
        prog="pydet info",
        description="Show the libraries, devices, arithmetics and kernels that pydet finds here.",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    given = parser.parse_args(arguments)
    found = report()
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print_report(found)
    return 0


COMMANDS = {
    "info": "show the libraries, devices, arithmetics and kernels here (also without a command)",
    "demo": "train a small language model and count the bits that batching changes",
    "audit": "recompute a saved product on the CPU and say which elements differ",
    "bench": "time pydet on this CPU beside NumPy, and check the bits of what was timed",
}


def run(command: str, arguments: list[str]) -> int:
    """A command, imported only now: some need NumPy. What keeps it from its work is a sentence and status 2."""
    try:
        main = info if command == "info" else importlib.import_module(f"pydet.{command}").main
        status = int(main(arguments) or 0)
        if sys.stdout is not None:  # as where it was closed
            sys.stdout.flush()
        return status
    except OSError as error:  # of the output, as a rule: audit sees to its own files
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
        if command == "info" and isinstance(error, BrokenPipeError):
            return 0  # the reader has seen enough
        problem = f"pydet {command}: {error}"
    except (MemoryError, _native.Error) as error:
        problem = f"pydet {command}: {str(error) or type(error).__name__}"
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        problem = end.code  # a sentence: what is not installed
    print(problem, file=sys.stderr)
    return 2


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    if arguments and arguments[0] in COMMANDS:
        return run(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(
        prog="pydet",
        usage="pydet [COMMAND] [--help] [--version] [--json] [--cflags] [--libs [BUILD]] [--cmakedir]",
        epilog="Commands; each has its own --help:\n"
        + "\n".join(f"  {name:8}{words}" for name, words in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), metavar="COMMAND", help="see below")
    parser.add_argument("--version", action="version", version=f"pydet {pydet.__version__}")
    parser.add_argument("--json", action="store_true", help="without a command: what is here, as JSON")
    building = parser.add_argument_group("for C and C++ programs: c++ x.cpp $(pydet --cflags --libs)")
    building.add_argument("--cflags", action="store_true", help="print the compiler's flags")
    builds = [name.removeprefix("libpydet_").removesuffix(".so") for name in _native.BUILDS[0]]
    building.add_argument(
        "--libs", nargs="?", const="cpu", choices=builds, help="print the linker's flags for a library (default: cpu)"
    )
    building.add_argument("--cmakedir", action="store_true", help="print the folder to give CMake as pydet_DIR")
    given = parser.parse_args(arguments)
    if given.command:  # after an option
        parser.error(f"{given.command} comes first: pydet {given.command} ...")
    if given.cflags or given.libs or given.cmakedir:
        try:
            print(compiler_flags(given))
        except ValueError as problem:
            print(f"pydet: {problem}", file=sys.stderr)
            return 1
        return 0
    return run("info", ["--json"] if given.json else [])


def command() -> int:
    """The command `pydet` that an installation has: the same as `python -m pydet`."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(command())
