"""Which part of a large set of cases a run takes: by the commit, so that all of them have their turn."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def turn() -> int:
    """RELAY_TEST_TURN, if it is set: a failed run can be repeated. Else by the commit; 0 without git."""
    if given := os.environ.get("RELAY_TEST_TURN"):
        return int(given)
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found.stdout, 16)
