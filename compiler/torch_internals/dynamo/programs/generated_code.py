"""Bytecode of the Python code in artifacts, kept with a program, so that a start from it does not compile that code.

Inductor's code for a deep model has thousands of lines for each graph: Python takes 0.1 s for those of GPT-2 with 24
layers.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import marshal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from ...patching import replace

MOST_BYTES = 16 << 20
"""Limit for one program; what is more is compiled at each start."""


class _Thread(threading.local):
    collected: dict[str, CodeType] | None = None
    known: Mapping[str, bytes] = {}
    only_from: str = ""
    """The folder of this thread's files, with a separator at its end."""


_thread = _Thread()


@contextlib.contextmanager
def collecting() -> Iterator[dict[str, CodeType]]:
    """What this thread compiles or reads in the block, by the digest of its text."""
    before, _thread.collected = _thread.collected, {}
    try:
        yield _thread.collected
    finally:
        _thread.collected = before


@contextlib.contextmanager
def known(bytecode: Mapping[str, bytes]) -> Iterator[None]:
    """Inside the block, this thread reads these instead of compiling their texts. Only for what `write` made, by this
    Python: marshal is not safe for anything else."""
    before, _thread.known = _thread.known, bytecode
    try:
        yield
    finally:
        _thread.known = before


@contextlib.contextmanager
def only_from(folder: Path) -> Iterator[None]:
    """This thread runs no generated code from a file elsewhere inside the block."""
    before, _thread.only_from = _thread.only_from, str(folder / "_")[:-1]
    try:
        yield
    finally:
        _thread.only_from = before


def write(collected: Mapping[str, CodeType]) -> dict[str, bytes]:
    """The bytecode for `known`, as much as has room."""
    found: dict[str, bytes] = {}
    room = MOST_BYTES
    for digest, code in collected.items():
        data = marshal.dumps(code)
        if len(data) <= room:
            found[digest] = data
            room -= len(data)
    return found


def install() -> None:
    """Have PyTorch ask here when it compiles generated code, which it reads from a file
    (compile_tasks._reload_python_module)."""
    from torch._inductor.runtime import compile_tasks

    if "compile" not in vars(compile_tasks):
        replace(compile_tasks, "compile", _compile)


def _compile(source: Any, filename: Any, mode: str, **options: Any) -> Any:
    if not str(filename).startswith(_thread.only_from):
        raise PermissionError(f"{filename} is not in the folder of the artifact's code")
    if _thread.collected is None and not _thread.known:
        return builtins.compile(source, filename, mode, **options)
    digest = hashlib.sha256(f"{mode} {options}\n{source}".encode()).hexdigest()
    data = _thread.known.get(digest)
    code = builtins.compile(source, filename, mode, **options) if data is None else marshal.loads(data)
    if _thread.collected is not None and isinstance(code, CodeType):
        _thread.collected[digest] = code
    return code
