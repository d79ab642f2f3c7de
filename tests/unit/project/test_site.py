"""The site of docs/ is built without warnings, has all that the code has, and needs no other host."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torchrelay

ROOT = Path(torchrelay.__file__).parent
LOADS = ("src", "srcset", "data", "poster")


class Page(HTMLParser):
    """What a page of the site links to, loads and offers as anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given.get("id", "")}
        self.loaded += [given[name] for name in LOADS if name in given]
        (self.links if tag == "a" else self.loaded).append(given.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed)
    built = tmp_path_factory.mktemp("site")
    program = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-E",
        "-d",
        str(built / ".doctrees"),
    ]
    done = subprocess.run(
        [*program, str(ROOT / "docs"), str(built)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").glob("**/[!_]*.md"):
        if "_build" not in page.parts:
            assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").exists(), page


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in filter(None, page.links + page.loaded):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file() and target.is_relative_to(site), f"{path.relative_to(site)}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(site)}: {link}"


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        foreign = [each for each in page.loaded if re.match(r"(\w+:)?//", each)]
        assert not foreign, f"{path.relative_to(site)} loads {foreign}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.findall(r"""(?:url\(|@import\s*)["']?(?:\w+:)?//[^)"']*""", text), sheet


def test_the_search_works_without_a_server(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert "share-a-service" in index and "revok" in index
    page = (site / "search.html").read_text(encoding="utf-8")
    assert "searchindex.js" in page and "searchtools.js" in page
