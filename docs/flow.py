"""`make flow`: prints the stages of a compile in order, as the first lines of modules' docstrings tell them.

Reads the sources with `ast` and imports none of them, so it needs no virtual environment.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("clients", "compiler", "service", "workers")
_STAGE = re.compile(r"Stages? (\d+)(?: to (\d+))?\b([^:]*): ")


class Stage(NamedTuple):
    """A module's place in the flow. `last` is `first` unless the module spans several stages."""

    first: int
    last: int
    module: str
    text: str

    @property
    def number(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def stages(root: Path) -> list[Stage]:
    """Every module under `root` whose docstring begins with its stage, in stage order; a module that spans
    stages stands before those that do one of them."""
    found: list[Stage] = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"), str(path))) or ""
            line = docstring.partition("\n")[0]
            if match := _STAGE.match(line):
                first, last, aspect = match.groups()
                text = line[match.end() :] + (f" ({aspect.strip(', ')})" if aspect else "")
                found.append(Stage(int(first), int(last or first), path.relative_to(root).as_posix(), text))
    return sorted(found, key=lambda s: (s.first, -s.last, s.module))


def main() -> None:
    found = stages(Path(__file__).resolve().parent.parent)
    width = max(len(stage.module) for stage in found)
    for stage in found:
        print(f"{stage.number:>4}  {stage.module:<{width}}  {stage.text}")


if __name__ == "__main__":
    main()
