"""The examples of docs/ run: Python blocks of a page in their order, in a folder of its own; C++ blocks as programs;
commands with the output that a mark above them promises.

A mark before a block says more: `<!-- needs torch -->` for a page's blocks from there on, `<!-- not run: vllm -->` for
the next one, `<!-- output: words -->` for what a command must print.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys

import pytest

from capi import HEADER, ROOT, library_path

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```(\w+)\n(.*?)^```$", flags=re.S | re.M)


def cpp(code, folder):
    source, program = folder / "example.cpp", folder / "example"
    source.write_text(code)
    library = library_path().resolve()
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}", source, library]
    built = subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def c(code, folder):
    """As C99 and as C++11."""
    source, library, said = folder / "example.c", library_path().resolve(), set()
    source.write_text(code)
    for compiler in (["cc", "-std=c99"], ["c++", "-x", "c++", "-std=c++11"]):
        command = [*compiler, "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{HEADER.parent}", source, "-x", "none"]
        command += [library, f"-Wl,-rpath,{library.parent}", "-o", folder / "example"]
        built = subprocess.run(command, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        said.add(subprocess.run([folder / "example"], check=True, capture_output=True, text=True).stdout)
    (same,) = said
    return same


def shell(code, folder):
    clean = code.replace("python -m", f"{shlex.quote(sys.executable)} -m")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(["sh", "-ec", clean], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_examples(page, need, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, missing = {"__name__": page.stem}, []
    for marks, language, code in BLOCK.findall(page.read_text()):
        if package := re.search(r"needs (\w+)", marks):
            there = package[1] in ("numpy", "cpp") or importlib.util.find_spec(package[1])
            missing += [] if there else [package[1]]
            if not there:
                continue
        if "<!-- not run: " in marks:
            compile(code, str(page), "exec")
        elif language == "python":
            exec(compile(code, str(page), "exec"), names)
        else:
            said = {"c": c, "cpp": cpp, "sh": shell}[language](code, tmp_path)
            promised = re.search(r"output: ([^\n]*) -->", marks)
            assert promised is None or promised[1] in said, said
    for package in missing:
        need(False, package, f"{page.name} has examples that need {package}; the others passed")


def test_cpp_says_what_the_page_shows(tmp_path):
    (code,) = [code for _, language, code in BLOCK.findall((ROOT / "docs/cpp.md").read_text()) if language == "cpp"]
    lines = cpp(code, tmp_path).splitlines()
    assert lines[0].startswith("8 by cpu_")
    assert lines[1] == "PYDET_INVALID_SHAPE: skinny_gemm: w is 16x32, want Nx64"


def test_every_page_is_in_the_site():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    files = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    files |= {f"reference/results/{path.name}" for path in ROOT.glob("bench/results/*.md")}
    assert files <= set(listed) and len(listed) == len(set(listed))
    for made in set(listed) - files:
        assert f'"{made}"' in (ROOT / "docs" / "generate.py").read_text(), made


def test_tables_are_not_cut_off():
    """The theme keeps every cell on one line, whose end nobody sees."""
    assert "\nextra_css: [style.css]\n" in (ROOT / "mkdocs.yml").read_text()
    everywhere = (ROOT / "docs/style.css").read_text().partition("@media")[0]
    rules = dict(re.findall(r"^([^{}/]+) \{([^}]*)\}", everywhere, flags=re.M))
    (cells,) = [its for selector, its in rules.items() if "table td," in selector and "table th" in selector]
    assert "white-space: normal" in cells and "max-width: 1100px" in rules[".wy-nav-content"]
