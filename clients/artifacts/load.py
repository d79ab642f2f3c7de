"""Stage 10: a signed artifact in; a callable, forward and backward, out.

Only once it is verified (verification.py) is anything in the artifact unpickled, imported or mapped. What is loaded
lies in a new folder that no other user can write to (shared_libraries.py); no compiler is called.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...compiler.artifact import container
from ...compiler.errors import ArtifactError, CannotLoad, RelayError, SizesDiffer
from ...compiler.graph.captured_graph import CapturedGraph
from ...compiler.process.fork_safe_lock import ForkSafeLock
from ...compiler.request import size_expr
from ...compiler.torch_internals.loading import bundle
from ...compiler.torch_internals.loading import preload as loading_preload
from .shared_libraries import cpp_libraries, loading_folder, triton_modules


class _Collector:
    """Python's cyclic garbage collector, off while any thread is inside `paused()`, then as it was."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock(after_fork=self._forget_other_threads)
        self._inside: list[int] = []
        """The threads, each as often as it is inside."""
        self._enabled = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._enabled = gc.isenabled()
                gc.disable()
            self._inside.append(threading.get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(threading.get_ident())
                self._resume()

    def _resume(self) -> None:
        if not self._inside and self._enabled:
            gc.enable()

    def _forget_other_threads(self) -> None:
        if self._inside:
            self._inside = [thread for thread in self._inside if thread == threading.get_ident()]
            self._resume()


collector = _Collector()
"""Imports and unpickling make many objects that live on: each full collection on the way costs 0.1 s beside torch's
own million objects, and frees nothing."""


def preload() -> None:
    """Import what loading needs, whether or not there will be something to load."""
    with collector.paused():
        loading_preload.preload_loader()


def load(opened: container.Artifact, captured: CapturedGraph, cache_dir: Path) -> Callable[..., Any]:
    """Make a verified artifact callable on this process' device.

    Guards that the compile added on symbolic sizes become guards of Dynamo's own shape environment, so that a
    size which breaks one recompiles. Raises ArtifactError if a part is missing, SizesDiffer if a guard does not hold
    for the example sizes.
    """
    missing = {container.BUNDLE, container.LIBRARIES} - opened.members.keys()
    if missing:
        raise ArtifactError(f"the artifact lacks {', '.join(sorted(missing))}")
    for guard in opened.manifest.guards:
        if not bool(size_expr.evaluate(guard, captured.symints)):
            raise SizesDiffer(f"the artifact assumes {guard}, which does not hold here")
    libraries = cpp_libraries(opened, cache_dir)
    modules = triton_modules(opened, cache_dir)
    try:
        with collector.paused():
            return bundle.deserialize(
                opened.members[container.BUNDLE],
                libraries,
                modules,
                captured.inputs,
                loading_folder(cache_dir),
                cudagraphs=captured.cudagraphs,
                device_index=captured.device_index or 0,
                groups=captured.groups,
            )
    except RelayError:
        raise
    except Exception as error:  # a library that the loader of this system refuses, say
        raise CannotLoad(f"the artifact cannot be loaded here: {type(error).__name__}: {error}") from error
