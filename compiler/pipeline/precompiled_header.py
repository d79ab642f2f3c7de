"""Makes Inductor's precompiled C++ headers, one for each target; all jobs on a machine read them.

Making one takes g++ ten seconds and 150 MB. A header's code gets into every kernel that includes it, so only the worker
makes shared headers, from PyTorch's sources and the target alone. A job whose options need another header makes it in
its own folder, for itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..graph import configuration
from ..request import schema
from ..torch_internals import cpp

KEPT = 8
"""How many targets' headers stay on a machine: those used last."""


def name_for(target: schema.Target) -> str:
    """The name of the header that jobs for `target` share; '' if they need none."""
    return " ".join([target.name or "any", *target.cpu]) if target.kind == "cpu" else ""


def build(target: schema.Target, torch_version: str, folder: Path) -> None:
    """Make the header for `target` in `folder`. Raises Inductor's CppCompileError."""
    options = configuration.search_options(torch_version, kernel_threads=1, threads=1)
    with cpp.header_directory(folder), cpp.cpu_target(target):
        os.utime(cpp.precompile_header(options))
    _trim(folder)


@contextlib.contextmanager
def borrowed(shared: Path | None, own: Path) -> Iterator[None]:
    """Inside the block, Inductor looks for headers in `own`, which has links to those in `shared`."""
    own.mkdir()
    for path in [] if shared is None else sorted(shared.glob("c*.h*")):
        (own / path.name).symlink_to(path)
    with cpp.header_directory(own):
        yield


def _trim(folder: Path) -> None:
    def used(path: Path) -> float:
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime
        return 0.0

    for path in sorted(folder.glob("c*.gch"), key=used, reverse=True)[KEPT:]:
        path.unlink(missing_ok=True)
        path.with_suffix("").unlink(missing_ok=True)
