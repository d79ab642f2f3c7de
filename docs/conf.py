"""`make docs`: the site of these pages. Sphinx reads this file; what is generated of them is in code_reference.py."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.util.osutil import relative_uri

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
ROOT = DOCS.parent
LANGUAGES = {".py": "python", ".md": "markdown", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
SHOWN_BYTES = 200_000

project = html_title = "torchrelay"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
default_role = "code"  # of docstrings, whose code has one backtick
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
smartquotes = False
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # as GitHub makes them: pages link to each other's headings
html_theme = "furo"
html_copy_source = False
html_show_copyright = False


def fill(app: Sphinx, name: str, source: list[str]) -> None:
    """Put what is made from the code into a page."""
    from code_reference import filled

    source[0] = filled(source[0])


def link_files(app: Sphinx, document: nodes.document) -> None:
    """A link to a file or folder of the repository that is no page leads to one that shows it: show_files."""
    page = app.env.docname
    for link in list(document.findall(nodes.Element)):
        if not isinstance(link, addnodes.download_reference | addnodes.pending_xref):
            continue
        target = (DOCS / page).parent / link["reftarget"]
        target = target.with_suffix(".md").resolve() if link["refdomain"] == "doc" else target.resolve()
        if target.exists() and (not target.is_relative_to(DOCS) or target.suffix != ".md"):
            file = target.relative_to(ROOT).as_posix()
            address = relative_uri(app.builder.get_target_uri(page), f"files/{file}.html")
            app.env.repository_files.add(file)
            link.replace_self(nodes.reference("", "", *link.children, refuri=address, internal=True))


def show_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages of files, and of folders with their files: name, content and template of each."""
    for linked in sorted(app.env.repository_files):
        inside = sorted(each for each in (ROOT / linked).rglob("*.*") if "__pycache__" not in each.parts)
        shown = [each.relative_to(ROOT / linked).as_posix() for each in inside if readable(each)]
        folder = Path(linked).name
        items = [
            f'<li><a href="{folder}/{html.escape(each)}.html">{html.escape(each)}</a></li>' for each in shown
        ]
        if inside:
            yield file_page(linked, f"<ul>{''.join(items)}</ul>")
        for file in [f"{linked}/{each}" for each in shown] if inside else [linked]:
            text = (ROOT / file).read_text(encoding="utf-8")
            language = LANGUAGES.get(Path(file).suffix, "none")
            yield file_page(file, PygmentsBridge("html").highlight_block(text, language, force=True))


def readable(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= SHOWN_BYTES and b"\0" not in path.read_bytes()


def file_page(name: str, body: str) -> tuple[str, dict[str, Any], str]:
    return f"files/{name}", {"title": name, "body": f"<h1>{name}</h1>{body}"}, "page.html"


def setup(app: Sphinx) -> None:
    app.connect("env-before-read-docs", lambda app, env, names: setattr(env, "repository_files", set()))
    app.connect("source-read", fill)
    app.connect("doctree-read", link_files, priority=100)  # before what is linked is copied
    app.connect("html-collect-pages", show_files)
