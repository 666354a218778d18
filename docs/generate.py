"""What the site has that is no page of this folder: pages made of the sources, and docstrings as Markdown.

A hook of MkDocs (on_config to on_post_template), and an extension of griffe, which reads the docstrings for
mkdocstrings. SITE_URL is where the site will stand, REPO_URL where the sources do, both of the environment: without
them no link leads there.
"""

import os
import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = os.environ.get("REPO_URL", "").rstrip("/")
# What pages name by number: papers and issues.
NAMED = {
    r"(?<!\[)PyTorch issues (\d+), (\d+)": r"PyTorch issues [\1](https://github.com/pytorch/pytorch/issues/\1), "
    r"[\2](https://github.com/pytorch/pytorch/issues/\2)",
    r"arXiv[: ](\d{4}\.\d{5})": r"[\g<0>](https://arxiv.org/abs/\1)",
    r"(?<!\[)\bvllm#(\d+)": r"[\g<0>](https://github.com/vllm-project/vllm/issues/\1)",
    r"(?<!\[)\bflashinfer#(\d+)": r"[\g<0>](https://github.com/flashinfer-ai/flashinfer/issues/\1)",
}


def header():
    """native/include/pydet.h, a heading before each of its sections."""
    text = (ROOT / "native/include/pydet.h").read_text()
    _, first, rest = re.split(r"^(/\* )", text, maxsplit=1, flags=re.M)
    parts = re.split(r"^/\* ---- (.+?) -+(?:\*/)?\n", first + rest, flags=re.M)
    said = "The whole interface of the C libraries. [The rules of each call](rules.md) say the rest."
    page = ["# pydet.h", said, fence(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        opened = "" if body.lstrip().startswith(("typedef", "/*", "PYDET_API", "enum")) else "/*\n"
        page += [f"## {title}", fence(opened + body)]
    return "\n\n".join(page)


def fence(code):
    return f"```c\n{code.strip()}\n```"


def with_links_to_pages(text, folder, page):
    """Links of a file of the tree: to pages where there is one, else to the sources, or to nothing."""

    def change(link):
        target, _, anchor = link[2].partition("#")
        path = (ROOT / folder / target).resolve()
        if target.startswith("https://") or (not target and anchor):
            return link[0]
        to = next((to for to, (_, source) in GENERATED.items() if source and ROOT / source == path), None)
        if path.is_relative_to(ROOT / "docs") and path.suffix in (".md", ".svg"):
            to = str(path.relative_to(ROOT / "docs"))
        if to:
            to = posixpath.relpath(to, posixpath.dirname(page))
            return f"[{link[1]}]({to}{'#' * bool(anchor)}{anchor})"
        named = path.relative_to(ROOT)
        return f"[{link[1]}]({in_sources(named)})" if REPOSITORY else f"{link[1]} (`{named}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", change, text)


def in_sources(path):
    return f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"


def copied(path, page):
    folder = path.rpartition("/")[0]
    return lambda: with_links_to_pages((ROOT / path).read_text(), folder, page)


# page: what makes it, and the file of the tree that it stands for
GENERATED = {
    "reference/c.md": (header, "native/include/pydet.h"),
}
COPIED = {
    "reference/numerics.md": "native/NUMERICS.md",
    "reference/bench.md": "bench/README.md",
    "reference/amd.md": "tools/amd/limits.md",
    "reference/changes.md": "CHANGELOG.md",
    **{f"reference/results/{path.name}": f"bench/results/{path.name}" for path in ROOT.glob("bench/results/*.md")},
}
GENERATED |= {page: (copied(path, page), path) for page, path in COPIED.items()}


def on_files(files, config):
    for page, (make, _) in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Marks for tests/test_docs.py are no part of a page. Files of the tree that it names are links to the sources."""
    text = re.sub(r"^<!-- (needs|not run|output).*?-->\n", "", markdown, flags=re.M)
    for name, link in NAMED.items():
        text = re.sub(name, link, text)
    if REPOSITORY:
        text = re.sub(r"(?<!\[)`((?:examples|bench|native|tests|tools)/[\w./]+\w)`", in_tree, text)
    return text


def in_tree(name):
    return f"[{name[0]}]({in_sources(name[1])})" if (ROOT / name[1]).exists() else name[0]


def on_post_template(output_content, template_name, config):
    """A page for what is not there stands at any depth, so its links are those of the site's own address, or it would
    name files that are not there either."""
    return "" if template_name == "404.html" and not config.site_url else output_content


class Plain(griffe.Extension):
    """Docstrings name functions as Sphinx does (:func:`pydet.gemm`) and open literal blocks with "::"."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            text = re.sub(r":(?:func|class|mod|meth|attr):`~?([^`]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r"``([^`]+)``", r"`\1`", text)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)
