"""The worker's engine; as each stage's detail it tells when the stage began, on the machine's monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchrelay.workers.fork_server import compile_engine
from torchrelay.workers.fork_server.compile_engine import (
    describe,
    missing,
    others,
    preload,
    preparation,
    prepare,
    search,
    warm_up,
)

__all__ = [
    "compile_graph",
    "describe",
    "missing",
    "others",
    "preload",
    "preparation",
    "prepare",
    "search",
    "warm_up",
]


def compile_graph(request: bytes, *, progress: Callable[..., None], **rest: Any) -> bytes:
    def stamped(stage: str, detail: str = "") -> None:
        progress(stage, repr(time.monotonic()))

    return compile_engine.compile_graph(request, progress=stamped, **rest)
