"""The site of docs/ is built without warnings, has all that the code has, and needs no other host."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torchrelay
from torchrelay import train
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.errors import BY_CODE
from torchrelay.service.base.settings import ServiceSettings

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


def headings(page: Page) -> list[str]:
    found = re.findall(r"<h[23]>(.*?)<a class=\"headerlink\"", page.text)
    return [html.unescape(re.sub("<[^>]*>", "", each)) for each in found]


def test_the_reference_has_every_setting_and_what_it_means(site: Path, pages: dict[Path, Page]) -> None:
    service = {f"TORCHRELAY_SERVICE_{name.upper()}" for name in ServiceSettings.model_fields}
    client = {f"TORCHRELAY_{name.upper()}" for name in ClientSettings.__struct_fields__}
    for name, expected in (("client", client), ("service", service)):
        page = pages[site / "reference" / f"{name}-settings.html"]
        assert expected <= set(headings(page))
        told = re.findall(r"</h[23]>\n<p>(Value: )?", page.text)
        assert len(told) >= len(expected) and not any(told), "a setting has no docstring"


def test_the_reference_has_every_command(site: Path, pages: dict[Path, Page]) -> None:
    import typer.main
    from torchrelay.clients.commands import application

    def names(command: Any, path: str) -> set[str]:
        inside = getattr(command, "commands", {})
        return {path}.union(*(names(each, f"{path} {name}") for name, each in inside.items()))

    expected = names(typer.main.get_command(application()), "torchrelay")
    assert expected <= set(headings(pages[site / "reference" / "commands.html"]))


def test_the_reference_has_every_operation(site: Path, pages: dict[Path, Page]) -> None:
    from torchrelay.service.gateway.app import create_app

    paths = create_app(ServiceSettings()).openapi()["paths"]
    expected = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert expected <= set(headings(pages[site / "reference" / "http.html"]))


def test_the_reference_has_every_error_code(site: Path, pages: dict[Path, Page]) -> None:
    assert BY_CODE.keys() <= set(headings(pages[site / "reference" / "errors.html"]))


def test_the_reference_has_every_public_name(site: Path, pages: dict[Path, Page]) -> None:
    anchors = pages[site / "reference" / "python.html"].anchors
    for module in (torchrelay, train):
        names = set(module.__all__) - {"__version__", "errors"}
        assert {f"{module.__name__}.{name}" for name in names} <= anchors


@pytest.mark.parametrize("name", ["parts", "request"])
def test_the_drawings_are_those_that_their_script_draws(name: str) -> None:
    program = "import drawings, sys; sys.stdout.write(drawings.DRAWINGS[sys.argv[1]]())"
    command = [sys.executable, "-c", program, f"{name}.svg"]
    drawn = subprocess.run(command, cwd=ROOT / "docs", capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8") == drawn


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
