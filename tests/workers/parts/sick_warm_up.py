"""The engine of engine.py, whose compiler is sick while the worker warms up, if a file says so."""

from __future__ import annotations

import subprocess
import sys

from engine import compile_graph, describe, missing, others, preparation
from torchrelay.workers.fork_server import warm_up as limits

__all__ = ["compile_graph", "describe", "missing", "others", "preload", "preparation", "warm_up"]

EATS = "import time; held = []\nwhile True: held.append(bytearray(b'x' * (32 << 20))); time.sleep(0.02)"


def preload():
    limits.SECONDS = 3.0


def warm_up(folder):
    note = folder.parent / "sick"
    how = note.read_text() if note.exists() else ""
    if how == "hangs":
        subprocess.run(["sleep", "1000"])
    elif how == "eats":
        limits.SECONDS = 600.0
        subprocess.run([sys.executable, "-c", EATS])
