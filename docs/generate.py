"""What the site has that is no page of this folder: pages made of the sources, and docstrings as Markdown.

A hook of MkDocs (on_files, on_page_markdown), and an extension of griffe, which reads the docstrings for mkdocstrings.
"""

import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent


def header():
    """native/include/pydet.h, a heading before each of its sections."""
    text = (ROOT / "native/include/pydet.h").read_text()
    _, first, rest = re.split(r"^(/\* )", text, maxsplit=1, flags=re.M)
    parts = re.split(r"^/\* ---- (.+?) -+(?:\*/)?\n", first + rest, flags=re.M)
    page = ["# pydet.h", "The whole interface of the C libraries, as the header words it.", fence(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        opened = "" if body.lstrip().startswith(("typedef", "/*", "PYDET_API", "enum")) else "/*\n"
        page += [f"## {title}", fence(opened + body)]
    return "\n\n".join(page)


def fence(code):
    return f"```c\n{code.strip()}\n```"


def with_links_to_pages(text, folder):
    """Links of a file of the tree: to pages where there is one, else to nothing."""

    def change(link):
        target, _, anchor = link[2].partition("#")
        path = (ROOT / folder / target).resolve()
        page = next((page for page, (_, source) in GENERATED.items() if source and ROOT / source == path), None)
        if target.startswith("https://") or (not target and anchor):
            return link[0]
        if page:
            return f"[{link[1]}]({page.rsplit('/')[-1]})"
        if path.is_relative_to(ROOT / "docs") and path.suffix == ".md":
            return f"[{link[1]}](../{path.relative_to(ROOT / 'docs')})"
        return f"{link[1]} (`{path.relative_to(ROOT)}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", change, text)


def copied(path):
    folder = path.rpartition("/")[0]
    return lambda: with_links_to_pages((ROOT / path).read_text(), folder)


# page: what makes it, and the file of the tree that it stands for
GENERATED = {
    "reference/c.md": (header, "native/include/pydet.h"),
    "reference/numerics.md": (copied("native/NUMERICS.md"), "native/NUMERICS.md"),
    "reference/bench.md": (copied("bench/README.md"), "bench/README.md"),
    "reference/changes.md": (copied("CHANGELOG.md"), "CHANGELOG.md"),
}


def on_files(files, config):
    for page, (make, _) in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Marks for tests/test_docs.py are no part of a page."""
    return re.sub(r"^<!-- (needs|not run|output).*?-->\n", "", markdown, flags=re.M)


class Plain(griffe.Extension):
    """Docstrings name functions as Sphinx does (:func:`pydet.gemm`) and open literal blocks with "::"."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            text = re.sub(r":(?:func|class|mod|meth|attr):`~?([^`]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r"``([^`]+)``", r"`\1`", text)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)
