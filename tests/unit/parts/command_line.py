"""`torchrelay` commands as a user runs them, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

COMMAND = (sys.executable, "-m", "torchrelay.clients.cli")


def user(folder: Path, url: str = "", token: str = "", **variables: str) -> dict[str, str]:
    """The environment of a user with the configuration in `folder`, and nothing else of torchrelay's set but this."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHRELAY_", "XDG_"))}
    told = {"TORCHRELAY_URL": url, "TORCHRELAY_TOKEN": token} if url else {}
    return {**kept, "XDG_CONFIG_HOME": str(folder), "COLUMNS": "200", **told, **variables}


def torchrelay(
    *words: object,
    environment: Mapping[str, str],
    folder: Path | None = None,
    answer: str = "",
    status: int | None = None,
    seconds: float = 120,
) -> subprocess.CompletedProcess[str]:
    """answer: what the user types. status: how it must end."""
    done = subprocess.run(
        [*COMMAND, *map(str, words)],
        env=environment,
        cwd=folder,
        input=answer,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done
