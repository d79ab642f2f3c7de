"""A report as files: the page from the templates beside this module, and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...compiler.api.html import page
from ..atomic_file import file_errors, write_atomically

PAGE = "index.html"


def render(template: str, /, **values: object) -> str:
    """The whole page. values: what the template names; functions may be among them."""
    return page.render(Path(__file__).with_name("templates"), template, **values)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes a report's files; the directory is made if it is not there. Raises SettingsError."""
    with file_errors(directory, "written", hint="Name another one: --output DIR"):
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomically(directory / name, data, mode=0o644)
