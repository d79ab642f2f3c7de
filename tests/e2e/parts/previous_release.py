"""The release before this one, as a folder for PYTHONPATH: taken from the repository's history."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
COMMIT = "19f5eb70"
"""Before the first release: a state of the code whose protocols are those of today."""


def in_history() -> bool:
    """False for a shallow clone, or an archive."""
    asked = ["git", "-C", str(ROOT), "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    try:
        return subprocess.run(asked, capture_output=True).returncode == 0
    except FileNotFoundError:  # no git
        return False


def unpack(folder: Path) -> Path:
    """Puts the package into `folder`, and its tests with it; returns what goes to PYTHONPATH."""
    package = folder / "torchrelay"
    package.mkdir(parents=True)
    with subprocess.Popen(["git", "-C", str(ROOT), "archive", COMMIT], stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(package)], stdin=archive.stdout, check=True)
    assert archive.returncode == 0
    return folder
