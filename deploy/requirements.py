"""Print what the package needs, an extra included, without torch: for the gateway's image."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extra: str) -> list[str]:
    """The requirement lines of `[project]` and of `extra`, those for torch left out."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"][extra]]
    return [line for line in lines if re.match(r"torch(?![\w-])", line) is None]


if __name__ == "__main__":
    print("\n".join(requirements(Path(__file__).parent.parent / "pyproject.toml", sys.argv[1])))
