"""What tests of a pool share: its Ray token, a GPU that no slot has, and waiting for a state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchrelay.compiler.request import schema

RAY_TOKEN = "0123456789abcdef" * 4
"""Ray reads its token once in a process, and several clusters are started in one."""
GPU = schema.Target(kind="cuda", name="NVIDIA H200", capability="9.0", units=132, cpu=[])


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
