"""The engine of engine.py, which prepares something, and notes if a job's request is decoded outside a sandbox."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine import compile_graph, describe, missing, others, warm_up
from torchrelay.compiler import decoding
from torchrelay.workers.settings import SlotOrder

__all__ = ["compile_graph", "describe", "missing", "others", "prepare", "preparation", "preload", "warm_up"]

MARK = b"a tenant's own words"


def preload():
    """The server, and through its forks everything below it, notes what is decoded."""
    notes: list[Path] = []
    for name in ("from_msgpack", "from_json"):
        setattr(decoding, name, _noting(getattr(decoding, name), notes))


def _noting(original, notes):
    def noting(data, *arguments, **options):
        if bytes(data[:1]) == b"{" and MARK in data:  # a request alone, not the message that carries it
            with (
                contextlib.suppress(OSError),
                notes[0].open("a") as file,
            ):  # in a sandbox it cannot be written
                file.write(f"{original.__name__}\n")
        read = original(data, *arguments, **options)
        if isinstance(read, SlotOrder):  # the first that the server decodes
            notes.append(Path(read.jobs_dir).parents[1] / "decoded")
        return read

    return noting


def preparation(target):
    assert MARK not in repr(target).encode()
    return "-".join(target.cpu)


def prepare(target, shared):
    (shared / "prepared").write_text(preparation(target))
