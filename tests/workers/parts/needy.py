"""An engine for the fork server whose compiler lies where no isolated job sees it."""

from __future__ import annotations

from pathlib import Path

from intruder import describe, others, preload, preparation, warm_up

__all__ = ["compile_graph", "describe", "missing", "others", "preload", "preparation", "warm_up"]


def missing(kind):
    try:
        Path("/etc/hosts").read_text()
    except OSError as error:
        return str(error)
    return ""


def compile_graph(request, **_):
    return Path("/etc/hosts").read_bytes()
