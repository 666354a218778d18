"""What a C or C++ program gets: make install, pkg-config, CMake, pydet.hpp, python -m pydet --cflags --libs; and the
packages of Python."""

import importlib.util
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile

import pytest

import pydet
import setup
from capi import HEADER, ROOT, library_path

STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def run(*command, fails=False, **more):
    """Its output; the program must succeed, or must not."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PKG_CONFIG"))}
    clean.update(more.pop("env", {}))
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=clean, **more)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def install(*settings, **more):
    return run("make", "-s", "-C", ROOT, "install", "SANITIZE=", *settings, **more)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Where pydet is: installed through a DESTDIR, then moved, to a folder with a space in its name."""
    staged = tmp_path_factory.mktemp("staged")
    said = install("PREFIX=/opt/pydet", f"DESTDIR={staged}")
    assert f"installed pydet {pydet.__version__}" in said
    moved = tmp_path_factory.mktemp("moved") / "to here"
    shutil.move(staged / "opt" / "pydet", moved)
    return moved


@pytest.fixture
def tool(need):
    """tool("cmake"): a program that not every machine has."""

    def check(name):
        need(shutil.which(name), "packages", f"{name} is not installed")
        return name

    return check


# ---- make install --------------------------------------------------------------------------------------------------


def test_installed_files(prefix):
    for name in ("pydet.h", "pydet.hpp"):
        assert (prefix / "include" / name).read_bytes() == (HEADER.parent / name).read_bytes()
    library = prefix / "lib" / "libpydet_cpu.so"
    versioned = f"{library.name}.{pydet.__version__}"
    assert os.readlink(library) == f"{library.name}.{pydet.ABI}"
    assert os.readlink(f"{library}.{pydet.ABI}") == versioned
    assert f"soname: [{library.name}.{pydet.ABI}]" in run("readelf", "-dW", library, env={"LC_ALL": "C"})
    builds = {path.name.split(".")[0] for path in library.parent.glob("libpydet_*")}
    described = {path.stem.replace("pydet-", "libpydet_") for path in (library.parent / "pkgconfig").iterdir()}
    assert builds == described and "libpydet_cpu" in builds
    texts = [*library.parent.glob("pkgconfig/*"), *library.parent.glob("cmake/pydet/*")]
    assert len(texts) == len(builds) + 2
    for path in texts:
        assert "/opt/pydet" not in path.read_text() and not re.search(r"@\w+@", path.read_text()), path


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("PREFIX=here", "PREFIX is 'here', want an absolute path"),
        ("PREFIX=", "PREFIX is '', want an absolute path"),
        ("LIBDIR=/usr/lib", "LIBDIR is '/usr/lib', want a folder under PREFIX, such as lib64"),
        ("LIBDIR=../lib", "LIBDIR is '../lib', want a folder under PREFIX, such as lib64"),
        ("LIBDIR=", "LIBDIR is '', want a folder under PREFIX, such as lib64"),
    ],
)
def test_wrong_places_are_refused(tmp_path, setting, sentence):
    said = install(f"PREFIX={tmp_path}/p", f"DESTDIR={tmp_path}/", setting, fails=True)
    assert f"make: {sentence}" in said
    assert not any(tmp_path.iterdir())


# ---- Building a program ---------------------------------------------------------------------------------------------

EXAMPLE = ROOT / "examples"
SAID = ["pydet", "token 7 alone has the bits it has in the batch", "PYDET_INVALID_SHAPE: skinny_gemm: w is 768x1024"]


def check_example(program, **environment):
    said = run(program, env=environment)
    assert all(words in said for words in SAID), said


def pkg_config(prefix, libdir, *arguments):
    path = {"PKG_CONFIG_PATH": str(prefix / libdir / "pkgconfig")}
    return shlex.split(run("pkg-config", *arguments, env=path))


def test_pkg_config(prefix, tool, tmp_path):
    tool("pkg-config")
    assert pkg_config(prefix, "lib", "--modversion", "pydet-cpu") == [pydet.__version__]
    flags = pkg_config(prefix, "lib", "--cflags", "--libs", "pydet-cpu")
    program = tmp_path / "stream"
    run("c++", *STRICT, EXAMPLE / "stream.cpp", *flags, "-o", program)
    check_example(program, LD_LIBRARY_PATH=str(prefix / "lib"))
    said = run(program, fails=True)
    assert f"libpydet_cpu.so.{pydet.ABI}: cannot open shared object file" in said


def test_pkg_config_as_the_page_writes_it(prefix, tool, tmp_path):
    """Its two lines, with the place that pydet has here; the program needs no LD_LIBRARY_PATH."""
    tool("pkg-config")
    for page in ("docs/build.md", "docs/cpp.md"):
        text = (ROOT / page).read_text()
        (export,) = re.findall(r"^ {4}(export PKG_CONFIG_PATH=.*)$", text, flags=re.M)
        (build,) = re.findall(r"^ {4}(c\+\+ .*pkg-config.*)$", text, flags=re.M)
        (tmp_path / "x.cpp").write_bytes((EXAMPLE / "stream.cpp").read_bytes())
        here = prefix.parent / "no-space"
        if not here.exists():
            here.symlink_to(prefix)
        run("sh", "-ec", f"{export.replace('/opt/pydet', str(here))}\n{build}", cwd=tmp_path)
        check_example(tmp_path / "a.out")
        (tmp_path / "a.out").unlink()


def cmake_example(prefix, folder, *settings):
    """The example as its users build it, out of the tree; no run path has to be set. Returns what it is linked to."""
    run("cmake", "-S", EXAMPLE, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", *settings)
    run("cmake", "--build", folder)
    check_example(folder / "stream")
    return run("readelf", "-dW", folder / "stream")


def test_cmake(prefix, tool, tmp_path):
    tool("cmake")
    linked = cmake_example(prefix, tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
    assert f"[libpydet_cpu.so.{pydet.ABI}]" in linked


def test_cmake_on_the_cuda_library(prefix, tool, need, tmp_path):
    """Its CUDA stream; where there is no GPU it says that it runs on the CPU."""
    tool("cmake")
    need((prefix / "lib" / "libpydet_cuda.so").exists(), "cuda", "libpydet_cuda.so is not built")
    linked = cmake_example(prefix, tmp_path)
    if "cuda" not in os.environ.get("PYDET_TEST_EXTRAS", "").split() and "libpydet_cpu" in linked:
        pytest.skip("CMake finds no CUDA toolkit")
    assert f"[libpydet_cuda.so.{pydet.ABI}]" in linked


def test_another_libdir(tool, tmp_path):
    install(f"PREFIX={tmp_path}/p", "LIBDIR=lib/x86_64-linux-gnu")
    tool("pkg-config")
    flags = pkg_config(tmp_path / "p", "lib/x86_64-linux-gnu", "--cflags", "--libs", "pydet-cpu")
    include, libdir = (pathlib.Path(flag[2:]) for flag in flags[:2])
    assert (include / "pydet.h").exists() and (libdir / "libpydet_cpu.so").exists()
    assert cmake_says(tool, tmp_path, tmp_path / "p", "REQUIRED COMPONENTS cpu") == ""


def cmake_says(tool, folder, prefix, request, fails=False):
    """What find_package(pydet `request`) says, its lines joined."""
    source = folder / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(x LANGUAGES CXX)\n"
        f"find_package(pydet {request})\n"
        "if(pydet_FOUND AND NOT TARGET pydet::cpu)\n  message(FATAL_ERROR no_target)\nendif()\n"
    )
    said = run(tool("cmake"), "-S", source, "-B", folder / "b", f"-DCMAKE_PREFIX_PATH={prefix}", fails=fails)
    return " ".join(" ".join(line for line in said.splitlines() if not line.startswith("--")).split())


@pytest.mark.parametrize("request_", ["REQUIRED", "0.2 REQUIRED", "0 REQUIRED OPTIONAL_COMPONENTS hip cuda"])
def test_cmake_finds(prefix, tool, tmp_path, request_):
    assert cmake_says(tool, tmp_path, prefix, request_) == ""


@pytest.mark.parametrize("version", ["0.1", "0.3", "0.0", "1", "0.2.99", "10"])
def test_cmake_refuses_other_versions(prefix, tool, tmp_path, version):
    said = cmake_says(tool, tmp_path, prefix, f"{version} REQUIRED", fails=True)
    assert f'compatible with requested version "{version}"' in said and f"version: {pydet.__version__}" in said


def test_cmake_names_what_is_missing(prefix, tool, tmp_path):
    only_cpu = tmp_path / "only cpu"
    shutil.copytree(prefix, only_cpu, symlinks=True)
    for path in [*only_cpu.glob("lib/libpydet_cuda*"), *only_cpu.glob("lib/libpydet_hip*")]:
        path.unlink()
    for number, (request, sentence) in enumerate(
        [
            (
                "REQUIRED COMPONENTS cpu cuda",
                f"pydet has no component cuda in {only_cpu}/lib, which has: cpu. "
                "Build it with 'make cuda' in pydet's sources and install again.",
            ),
            ("REQUIRED COMPONENTS metal", "pydet has no component 'metal'; its components are cpu, cuda and hip."),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert sentence in cmake_says(tool, folder, only_cpu, request, fails=True)
    for path in only_cpu.glob("lib/libpydet_*"):
        path.unlink()
    said = cmake_says(tool, tmp_path, only_cpu, "REQUIRED", fails=True)
    assert f"There is no library of pydet in {only_cpu}/lib." in said


# ---- pydet.hpp ------------------------------------------------------------------------------------------------------

REFUSALS = r"""
#include <pydet.hpp>
#include <cstdio>
template <class Action> void expect(pydet_status status, Action action) {
  try {
    action();
    std::puts("nothing was refused");
  } catch (const pydet::error &problem) {
    if (problem.status() != status) std::printf("another status: ");
    std::printf("%s: %s\n", problem.status_name(), problem.what());
  }
}
int main() {
  static float a[6] = {1, 2, 3, 4, 5, 6}, b[6] = {1, 0, 0, 1, 1, 1}, c[4];
  const float *constant = a;
  int64_t extents[] = {2, 3};
  pydet::tensor A(constant, 2, extents, std::begin({int64_t(3), int64_t(1)})), B(b, {3, 2}), C(c, {2, 2});
  pydet::gemm(nullptr, A, B, {}, C);
  std::printf("%g %g %g %g\n", c[0], c[1], c[2], c[3]);
  pydet::tensor Bt(b, {2, 3}, {1, 2}); // b transposed, as strides
  auto options = pydet::options<pydet_gemm_options>();
  options.accumulate = 1;
  pydet::gemm(nullptr, A, Bt.transposed(), {}, C, &options);
  std::printf("%g %g %g %g\n", c[0], c[1], c[2], c[3]);
  expect(PYDET_INVALID_SHAPE, [&] { pydet::gemm(nullptr, A, A, {}, C); });
  expect(PYDET_NULL_POINTER, [&] { pydet::gemm(nullptr, A, B, {}, {}); });
  expect(PYDET_INVALID_DEVICE, [&] { pydet::gemm(nullptr, A, pydet::tensor(b, {3, 2}, pydet::rocm(1)), {}, C); });
  expect(PYDET_INVALID_SHAPE, [&] { pydet::tensor(b, {3}).transposed(); });
  expect(PYDET_INVALID_SHAPE, [&] { pydet::tensor(b, {1, 1, 1, 1, 1, 1, 1, 1, 1}); });
  expect(PYDET_INVALID_STRIDE, [&] { pydet::tensor(b, {3, 2}, {2}); });
  std::printf("%d\n", int(pydet::rmsnorm_backward_workspace(512, 64)));
  std::printf("%d\n", pydet::device_count(PYDET_CPU));
  static float v[16] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8], lse[1];
  static const bool first[2] = {true, false};
  pydet::tensor Q(v, {1, 1, 1, 8}), K(v, {1, 1, 2, 8}), O(out, {1, 1, 1, 8}), allowed(first, {1, 2});
  auto masked = pydet::options<pydet_attention_options>();
  auto description = allowed.describe();
  masked.allowed = description;
  pydet::attention(nullptr, Q, K, K, O, pydet::tensor(lse, {1, 1, 1}), &masked);
  std::printf("%g %g %d\n", out[0], out[7], int(pydet::attention_workspace(1, 1, 1, 1, 2048, 8, 8)));
  static float dq[8], dk[16], dv[16];
  auto of = pydet::options<pydet_attention_backward_options>();
  of.allowed = description;
  pydet::tensor dK(dk, {1, 1, 2, 8}), dV(dv, {1, 1, 2, 8});
  pydet::tensor dQ(dq, {1, 1, 1, 8}), L(lse, {1, 1, 1});
  pydet::attention_backward(nullptr, O, Q, K, K, O, L, dQ, dK, dV, &of);
  std::printf("%.3f %g %d\n", dv[7], dv[8], int(pydet::attention_backward_workspace(1, 1, 1, 1, 2, 8, 8)));
  alignas(16) static char room[4096];
  static const int64_t targets[] = {0, -100};
  float loss = 0, dhidden[6] = {}, dweight[6] = {};
  const pydet_dtype fp32 = {PYDET_FLOAT, 32, 1};
  auto rule = pydet::options<pydet_linear_cross_entropy_options>();
  rule.z_loss = 0.5, rule.workspace = room;
  rule.workspace_size = pydet::linear_cross_entropy_workspace(2, 2, 3, fp32, true, 0, &rule);
  pydet::tensor T(targets, {2}), W(b, {2, 3}), scalar(&loss, {}), dX(dhidden, {2, 3}), dW(dweight, {2, 3});
  pydet::linear_cross_entropy(nullptr, A, W, {}, T, scalar, &rule);
  std::printf("%.6f\n", loss), loss = 0;
  pydet::linear_cross_entropy_backward(nullptr, {}, A, W, {}, T, scalar, dX, dW, {}, &rule);
  std::printf("%.6f %.4f %.4f %g\n", loss, dhidden[0], dweight[5], dhidden[3]);
  rule.reduction = 7;
  expect(PYDET_INVALID_VALUE, [&] { pydet::linear_cross_entropy(nullptr, A, W, {}, T, scalar, &rule); });
}
"""


@pytest.fixture(scope="module")
def refusals(prefix):
    source, program = prefix.parent / "refusals.cpp", prefix.parent / "refusals"
    source.write_text(REFUSALS)
    run("c++", *STRICT, "-I", prefix / "include", source, prefix / "lib" / "libpydet_cpu.so", "-o", program)
    return program


def test_the_wrapper_computes_and_refuses(prefix, refusals):
    lines = run(refusals, env={"LD_LIBRARY_PATH": str(prefix / "lib")}).splitlines()
    assert lines[:2] == ["4 5 10 11", "8 10 20 22"]
    assert lines[2] == "PYDET_INVALID_SHAPE: gemm: b is 2x3, want 3xN"
    assert lines[3].startswith("PYDET_NULL_POINTER: gemm: out is ")
    assert lines[4].startswith("PYDET_INVALID_DEVICE: gemm: b is on ")
    assert lines[5] == "PYDET_INVALID_SHAPE: pydet::tensor::transposed: rank 1, want 2 to 8"
    assert lines[6] == "PYDET_INVALID_SHAPE: pydet::tensor: rank 9, want 0 to 8"
    assert lines[7] == "PYDET_INVALID_STRIDE: pydet::tensor: 1 strides, want 2"
    assert int(lines[8]) > 0 and lines[9:12] == ["1", "1 8 80", "8.000 0 0"]
    loss = lines[12]
    assert lines[13].split()[0] == loss and lines[13].endswith(" 0"), "the second row is ignored"
    assert lines[14].startswith("PYDET_INVALID_VALUE: linear_cross_entropy: options.reduction is 7, want 0")


def test_the_wrapper_refuses_another_library(prefix, refusals, tmp_path):
    """Every call asks first, so no structure goes to a library that lays it out otherwise."""
    source, other = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(
        "#include <pydet.h>\nint32_t pydet_abi(void) { return 77; }\n"
        'const char *pydet_version(void) { return "9.8.7"; }\n'
    )
    run("c++", "-shared", "-fPIC", "-I", prefix / "include", source, "-o", other)
    program = tmp_path / "program.cpp"
    program.write_text(
        "#include <pydet.hpp>\n#include <cstdio>\nint main() {\n"
        "  try { pydet::gemm(nullptr, {}, {}, {}, {}); } catch (const pydet::error &e) { std::puts(e.what()); }\n}\n"
    )
    library = prefix / "lib" / "libpydet_cpu.so"
    run("c++", *STRICT, "-I", prefix / "include", program, library, "-o", tmp_path / "program")
    said = run(tmp_path / "program", env={"LD_LIBRARY_PATH": str(prefix / "lib"), "LD_PRELOAD": str(other)})
    assert said.strip() == (
        f"the pydet library, release 9.8.7, has ABI 77 and NUMERICS {pydet.NUMERICS}; this program was compiled for "
        f"{pydet.ABI} and {pydet.NUMERICS}: load that library, or compile anew"
    )


# ---- python -m pydet -------------------------------------------------------------------------------------------------


def flags(*arguments, fails=False):
    return run(sys.executable, "-m", "pydet", *arguments, fails=fails, cwd=ROOT).strip()


def test_flags_of_the_source_tree(tmp_path):
    """Those of a wheel are tested where one is installed, by .ci/check_package.py."""
    assert flags("--cflags") == f"-I{HEADER.parent}"
    said = flags("--cmakedir", fails=True)
    assert said.endswith("is in pydet's source tree, which is no CMake package; 'make install' makes one")
    folder = ROOT / "pydet"
    for build in ("cpu", "cuda", "hip"):
        if (folder / f"libpydet_{build}.so").exists():
            assert flags("--libs", build) == f"-L{folder} -lpydet_{build} -Wl,-rpath,{folder}"
        else:
            said = flags("--libs", build, fails=True)
            assert said.startswith(f"pydet: there is no libpydet_{build}.so in {folder}, which has: ")
    assert "invalid choice: 'metal'" in flags("--libs", "metal", fails=True)


def test_flags_build_a_program(tmp_path, need):
    need((ROOT / "pydet" / "libpydet_cpu.so").exists(), "packages", "pydet/libpydet_cpu.so is not built")
    program = tmp_path / "stream"
    run("c++", *STRICT, EXAMPLE / "stream.cpp", *shlex.split(flags("--cflags", "--libs")), "-o", program)
    check_example(program)


# ---- What a wheel holds ----------------------------------------------------------------------------------------------


@pytest.fixture
def build(need):
    """build(folder, libraries): what setup.py packs."""
    need(importlib.util.find_spec("setuptools"), "packages", "setuptools is not installed")

    def build_py(folder, libraries, fails=False):
        command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", folder]
        return run(*command, env={"PYDET_LIBRARIES": libraries}, cwd=ROOT, fails=fails)

    return build_py


def test_a_wheel_holds_what_was_named(build, tool, tmp_path):
    named = tmp_path / "a folder" / "libpydet_cpu.so"
    named.parent.mkdir()
    shutil.copy(library_path(), named)
    package = tmp_path / "lib" / "pydet"
    package.mkdir(parents=True)
    (package / "libpydet_hip.so").write_text("from an earlier build")
    build(package.parent, shlex.quote(str(named)))
    assert [path.name for path in package.glob("*.so")] == ["libpydet_cpu.so"]
    assert {path.name for path in (package / "include").iterdir()} == {"pydet.h", "pydet.hpp"}

    said = run(sys.executable, "-m", "pydet", "--cflags", "--cmakedir", cwd=package.parent)
    assert said.split() == [f"-I{package}/include", f"{package}/cmake"]
    tool("cmake")
    settings = [f"-Dpydet_DIR={package}/cmake", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"]
    assert f"[{package}]" in cmake_example("", tmp_path / "example", *settings)  # where the program looks for it


@pytest.mark.parametrize("package", ["sdist", "bdist_wheel"])
def test_packages_of_a_date(package, need, tmp_path):
    """Under SOURCE_DATE_EPOCH two builds are the same bytes, whenever they are and whatever the umask is."""
    need(importlib.util.find_spec("setuptools"), "packages", "setuptools is not installed")
    shutil.copy(library_path(), library := tmp_path / "libpydet_cpu.so")
    built = []
    for umask in (0o022, 0o077):
        folder = tmp_path / f"{umask:03o}"
        os.utime(library, (umask, umask + 2**30))
        folders = ["build", "--build-base", folder / "build", "egg_info", "--egg-base", tmp_path]
        more = ["--bdist-dir", folder / "wheel"] * (package == "bdist_wheel")
        command = [sys.executable, "setup.py", "-q", *folders, package, "-d", folder, *more]
        tmp_path.joinpath("pydet.egg-info").mkdir(exist_ok=True)
        settings = {"PYDET_LIBRARIES": str(library), "SOURCE_DATE_EPOCH": "1700000000"}
        run(*command, env=settings, cwd=ROOT, umask=umask)
        built += [path.read_bytes() for path in folder.glob("pydet-*")]
    assert len(built) == 2 and len(built[0]) > 10**5
    assert built[0] == built[1], "the packages differ"


def test_source_archives_of_a_date(tmp_path):
    """Owners, dates, modes and the order of an archive are not of its files."""
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar.gz", "w:gz") as archive:
            for name in ["pydet/b", "pydet/a"][:: 1 - 2 * number]:
                member = tarfile.TarInfo(name)
                member.mtime, member.uid, member.uname = 1e9 + number + 0.5, number, f"user{number}"
                member.mode, member.size = (0o700, 0o755)[number] if name == "pydet/b" else (0o600, 0o644)[number], 1
                archive.addfile(member, io.BytesIO(name[-1:].encode()))
        setup.dated(tmp_path / f"{number}.tar.gz", 1700000000)
    first, second = (tmp_path / f"{number}.tar.gz" for number in range(2))
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        members = {member.name: (member.mode, member.mtime) for member in archive}
        assert members == {"pydet/a": (0o644, 1700000000), "pydet/b": (0o755, 1700000000)}
        assert archive.extractfile("pydet/a").read() == b"a"


def test_a_wheel_of_a_library_that_is_not_there(build, tmp_path):
    said = build(tmp_path / "package", f"{tmp_path}/libpydet_cuda.so", fails=True)
    assert said.strip() == f"pydet: PYDET_LIBRARIES names {tmp_path}/libpydet_cuda.so, which is not there"
    assert not (tmp_path / "package").exists()


# ---- The Python examples ---------------------------------------------------------------------------------------------


def test_numpy_example():
    said = run(sys.executable, EXAMPLE / "numpy_example.py", env={"PYTHONPATH": str(ROOT)})
    assert len(said.splitlines()) == 4 and "(in NumPy alone 0 of" not in said, said


@pytest.mark.parametrize("name", ["cupy_example", "cuda_core", "hip_python"])
def test_gpu_examples(name):
    """They run, or say in one line what is not here."""
    command, env = [sys.executable, EXAMPLE / f"{name}.py"], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode == 0:
        assert "token 7 alone" in done.stdout and "the CPU computes the same bits" in done.stdout
    else:
        sentences = rf"{name}: .* is not installed \(pip install .*\)\n", rf"{name}: pydet sees no .* GPU here\n"
        assert any(re.fullmatch(sentence, done.stderr) for sentence in sentences), done.stderr
