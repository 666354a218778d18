"""make release: everything that a release uploads, in dist/, built twice and checked; nothing is uploaded.

python packaging/release.py [--make "make -j2"]

1. The wheel and the source archive, twice under one SOURCE_DATE_EPOCH (that of the environment, else of the commit):
   the same bytes, or it stops.
2. Each in a clean environment without compiler or make in PATH: .ci/check_package.py. The description of each:
   twine check. The wheel's platform: auditwheel, by make wheel.
3. An SBOM in CycloneDX's format: what an installation brings, and what is linked into the libraries.
4. The section of CHANGELOG.md as the notes, and SHA256SUMS of all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 100 * 10**6  # of one file, which is what a package index takes without asking


def run(*command: object, **options) -> str:
    """A command's output; what it says when it fails."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)
    if done.returncode:
        sys.exit(f"release: {shlex.join(map(str, command))} failed with status {done.returncode}\n{done.stdout}")
    return done.stdout


def version() -> str:
    text = (ROOT / "native/include/pydet.h").read_text()
    return ".".join(re.search(rf"PYDET_VERSION_{part} = (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def notes(changelog: str, release: str) -> str:
    """The section of a release."""
    found = re.search(rf"^## {re.escape(release)}(?![\w.])[^\n]*\n(.*?)(?=^## |\Z)", changelog, flags=re.M | re.S)
    if not found or not found[1].strip():
        sys.exit(f"release: CHANGELOG.md has no section '## {release}', or nothing in it")
    return found[1].strip() + "\n"


def date_of_the_commit() -> str:
    if "SOURCE_DATE_EPOCH" in os.environ:
        return os.environ["SOURCE_DATE_EPOCH"]
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        sys.exit("release: this is no git checkout; name the date of the files: SOURCE_DATE_EPOCH=...")
    return done.stdout.strip()


def sums(files: list[Path]) -> str:
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def built(make: list[str], dist: Path) -> list[Path]:
    """The wheel and the source archive, built twice. Stops if they are not the same bytes."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": date_of_the_commit()}
    seen = []
    for _ in range(2):
        for old in dist.glob("pydet-*"):
            old.unlink()
        for goal in ("wheel", "sdist"):
            run(*make, goal, env=environment, stderr=None)
        files = sorted([*dist.glob("pydet-*.whl"), *dist.glob("pydet-*.tar.gz")])
        seen.append(sums(files))
    if seen[0] != seen[1]:
        sys.exit(f"release: built twice, not the same bytes:\n{seen[0]}{seen[1]}")
    return files


def builds_of(path: Path) -> list[str]:
    """The libraries that an installation of a file has; pip builds that of the CPU out of the sources."""
    if path.suffix != ".whl":
        return ["cpu"]
    with zipfile.ZipFile(path) as wheel:
        return sorted(name[15:-3] for name in wheel.namelist() if re.fullmatch(r"pydet/libpydet_\w+\.so", name))


def check(path: Path) -> None:
    """Installs a file into a clean environment and runs .ci/check_package.py there."""
    venv = ROOT / "build" / "clean-venv"
    shutil.rmtree(venv, ignore_errors=True)
    run(os.environ.get("PYTHON", sys.executable), "-m", "venv", venv)
    python = venv / "bin" / "python"
    outside = {name: value for name, value in os.environ.items() if name != "LIBRARY"}
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", path, "numpy", env=outside)
    print(run(python, ".ci/check_package.py", *builds_of(path), env={"PATH": str(venv / "bin")}), end="", flush=True)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "numpy", env=outside)  # which pydet does not ask for


def cuda_runtime() -> str | None:
    """The release of the toolkit whose runtime is linked in."""
    try:
        done = subprocess.run(
            [*shlex.split(os.environ.get("NVCC", "nvcc")), "--version"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    return found[1] if found else None


def completed(bom: dict, release: str, builds: list[str], files: list[Path]) -> dict:
    """The SBOM of an environment with what no package manager sees: what is linked into the libraries of the wheel."""
    bom["metadata"]["component"] = {
        "type": "library",
        "bom-ref": f"pydet@{release}",
        "name": "pydet",
        "version": release,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "purl": f"pkg:pypi/pydet@{release}",
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()} for path in files],
    }
    kept = [its for its in bom.get("components", []) if its["name"] not in ("pydet", "pip", "setuptools")]
    if "cuda" in builds and (runtime := cuda_runtime()):
        kept.append(
            {
                "type": "library",
                "bom-ref": f"cudart_static@{runtime}",
                "name": "NVIDIA CUDA runtime (cudart_static)",
                "version": runtime,
                "supplier": {"name": "NVIDIA Corporation"},
                "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit End User License Agreement"}}],
                "description": "linked statically into libpydet_cuda.so",
            }
        )
    bom["components"] = kept
    refs = [its["bom-ref"] for its in kept]
    whole = [its for its in bom.get("dependencies", []) if its["ref"] in refs]
    direct = [ref for ref in refs if ref.startswith(("cffi", "cudart_static"))]
    bom["dependencies"] = [*whole, {"ref": f"pydet@{release}", "dependsOn": direct}]
    return bom


def sbom(tools: Path, release: str, files: list[Path], dist: Path) -> Path:
    made = run(
        *(tools / "cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON", "--sv", "1.6"),
        ROOT / "build" / "clean-venv" / "bin" / "python",
    )
    builds = [build for path in files for build in builds_of(path)]
    path = dist / f"pydet-{release}.cdx.json"
    path.write_text(json.dumps(completed(json.loads(made), release, builds, files), indent=2) + "\n")
    return path


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", default="make", help="how make is called, with its settings")
    parser.add_argument(
        "--tools", type=Path, default=ROOT / "build/packager/bin", help="where twine and cyclonedx-py are"
    )
    given = parser.parse_args(arguments)
    release, dist = version(), ROOT / "dist"
    said = notes((ROOT / "CHANGELOG.md").read_text(), release)
    files = built(shlex.split(given.make), dist)
    for path in files:
        if path.stat().st_size > MOST_BYTES:
            sys.exit(f"release: {path.name} has {path.stat().st_size / 1e6:.0f} MB, want {MOST_BYTES // 10**6} or less")
    run(given.tools / "twine", "check", "--strict", *files)
    for path in files:
        check(path)
    found = [*files, sbom(given.tools, release, files, dist)]
    (dist / f"pydet-{release}-notes.md").write_text(said)
    found.append(dist / f"pydet-{release}-notes.md")
    (dist / "SHA256SUMS").write_text(sums(found))
    for path in [*found, dist / "SHA256SUMS"]:
        print(f"{path.stat().st_size / 1e6:8.2f} MB  dist/{path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
