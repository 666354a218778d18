"""check_package.py BUILD...: that the installed package works by itself and has these libraries. Run by the Python of
an environment that holds it and NumPy alone, with nothing else in PATH: no compiler, no make.
"""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys

import numpy as np

import pydet


def said(*arguments, status=0):
    """What `python -m pydet` prints."""
    command = [sys.executable, "-m", "pydet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")  # not in the source tree
    assert done.returncode == status, done.stdout + done.stderr
    return (done.stderr if status else done.stdout).strip()


def main(builds):
    tools = [name for name in ("cc", "gcc", "g++", "clang", "make", "nvcc", "ld") if shutil.which(name)]
    assert not tools, f"PATH has {tools}"
    folder = pathlib.Path(pydet.__file__).resolve().parent
    assert folder.parent.name == "site-packages", folder
    assert {path.name for path in folder.glob("*.so")} == {f"libpydet_{build}.so" for build in builds}

    command = pathlib.Path(sys.executable).parent / "pydet"
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert version == said("--version") + "\n" == f"pydet {pydet.__version__}\n", version

    a = np.random.default_rng(0).standard_normal((64, 512), np.float32)
    b = np.random.default_rng(1).standard_normal((512, 256), np.float32)
    batch = pydet.gemm(a, b)
    assert np.allclose(batch, a.astype(np.float64) @ b, atol=1e-3)
    assert pydet.gemm(a[7:8], b).tobytes() == batch[7:8].tobytes()
    y, rstd = pydet.rmsnorm(a, eps=1e-6)
    assert np.isfinite(y).all() and rstd.shape == (64,)

    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if "libgomp" in line], "the library has threads of its own"

    # Every library of it loads here, without a GPU or its driver.
    report = said()
    for build in builds:
        assert f"{folder}/libpydet_{build}.so" in report and "does not load" not in report, report
    kernels = [kernel.name for kernel in pydet.kernels()]
    for build in builds:
        assert any(name.startswith(f"{build}_gemm") for name in kernels), kernels

    assert said("--cflags") == f"-I{folder}/include" and (folder / "include" / "pydet.hpp").is_file()
    assert said("--libs") == f"-L{folder} -lpydet_cpu -Wl,-rpath,{folder}"
    assert said("--cmakedir") == f"{folder}/cmake" and (folder / "cmake" / "pydetConfig.cmake").is_file()
    if missing := {"cpu", "cuda", "hip"} - set(builds):
        name = sorted(missing)[0]
        assert f"there is no libpydet_{name}.so in {folder}, which has: " in said("--libs", name, status=1)
    about = importlib.metadata.metadata("pydet")
    assert about["License-Expression"] == "Apache-2.0" and about["Version"] == pydet.__version__, about
    assert "](bench/" not in about["Description"] and "batch" in about["Description"]
    licence = [path for path in importlib.metadata.files("pydet") if path.name == "LICENSE"]
    assert len(licence) == 1 and "Apache License" in licence[0].read_text()
    for page in ("NUMERICS.md", "rules.md"):
        assert "## RMSNorm" in (folder / page).read_text()
    print(f"works without compilers: {', '.join(builds)}; {len(kernels)} kernels")


if __name__ == "__main__":
    main(sys.argv[1:])
