"""Fetches, in the background, the artifacts that this script used the last time.

One daemon thread fetches the script's list from the gateway, then each artifact that this machine lacks, verifies it,
stores it on disk with its libraries, and afterwards reports to the gateway what this run used. List and report also say
which sizes of inputs vary (compiler/torch_internals/dynamo/varied_sizes.py). The thread imports nothing of
PyTorch that `import torch` has not: the main thread may be importing it meanwhile, and Python answers two threads that
import a cycle of modules from two ends with a half-made module. Our own modules have no cycle.

A script has two names. The exact one covers the script's name, its code, and the names of the options that it was
started with (their values are paths, numbers and secrets, and change from run to run). The loose one has the name of
the script's folder in place of the code, so that an edited script still finds what it used before. Only digests are
sent.

A failure here is counted in the report and has no other effect: each graph then fetches for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import ClientSettings, load_launcher_info, load_settings

if TYPE_CHECKING:
    from ...compiler.artifact.signing import Trust
    from ...compiler.torch_internals.dynamo.varied_sizes import VariedSizes
    from ..gateway.compile_client import GatewayClient
    from .disk_cache import DiskCache
    from .verification import VerifiedArtifact

_MOST_ARTIFACTS = 128
_MOST_BYTES = 128 << 20
_FETCH_SECONDS = 60.0
"""One artifact."""
_STARTS = ".programs.process_programs"
"""Imports what a start without tracing needs of ours."""
KEEP_SECONDS = 300.0
"""An artifact that no graph has asked for by then is on disk only."""
REPORT_AFTER_SECONDS = 20.0
"""The time from the first use of an artifact to the report of it and of those used meanwhile."""
_REPORT_SECONDS = 5.0
_EXIT_SECONDS = 0.9
_FORK_SECONDS = 5.0
_BATCH = 256


class Prefetch:
    """The prefetch of one process, and its record of what the script used."""

    def __init__(self, settings: ClientSettings, scripts: Sequence[str], *, fetches: bool = True) -> None:
        self._settings = settings
        self._scripts = list(scripts)
        self._fetches = fetches
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._begun: dict[str, Future[VerifiedArtifact | None]] = {}
        """Fetches in progress or finished, by key, until a graph takes them; None after a failure."""
        self._too_late: set[str] = set()
        """Keys of graphs that came before their fetch began, and fetch for themselves."""
        self._used: set[str] = set()
        self._unreported: dict[str, bool] = {}
        """Keys in order of first use; whether they were fetched early."""
        self.varied: frozenset[str] = frozenset()
        """Digests of sizes that varied in earlier runs; empty until the gateway has answered."""
        self.sizes: VariedSizes | None = None
        """Where this run's sizes are counted."""
        self._closing = False
        self._imported, self._ended = threading.Event(), threading.Event()

    def start(self) -> None:
        # These register hooks for forks, which must not change during a fork.
        import concurrent.futures.thread  # noqa: F401
        import logging  # noqa: F401

        threading.Thread(target=self._run, name="torchrelay prefetch", daemon=True).start()
        atexit.register(self.close)
        # A child forked while this thread imports would find the locks of modules held for ever.
        os.register_at_fork(before=lambda: self._is_owner() and self._imported.wait(_FORK_SECONDS))

    def take(self, key: str) -> VerifiedArtifact | None:
        """The artifact, if it was prefetched. It is returned once. Waits for one that is being fetched, but not longer
        than for a gateway that says nothing: the caller's own request may be answered faster."""
        if not self._is_owner():
            return None
        with self._changed:
            begun = self._begun.pop(key, None)
            if begun is None:
                self._too_late.add(key)  # the caller fetches it now, so this thread need not
                return None
        with contextlib.suppress(TimeoutError):
            return begun.result(min(self._settings.idle_timeout, self._settings.deadline))
        return None

    def used(self, key: str, *, early: bool) -> None:
        """Record that the script uses `key`; it is reported to the service."""
        if not self._is_owner():
            return
        with self._changed:
            if key not in self._used:
                self._used.add(key)
                self._unreported[key] = early
                self._changed.notify_all()

    def _is_owner(self) -> bool:
        """Whether this is the process that started the thread, and no forked child of it."""
        return os.getpid() == self._owner

    # --- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            gateway = self._prepared()
        except Exception as error:  # counted; the graphs fetch for themselves
            self._failed(error)
            self._ended.set()
            return
        finally:
            self._imported.set()
        try:
            if self._fetches:
                self._fetch_all(gateway)
        except Exception as error:  # counted; the graphs fetch for themselves
            self._failed(error)
        self._report_used(gateway)
        gateway.close()  # with -W error, Python prints at exit of a socket that nobody closed
        self._ended.set()

    def _prepared(self) -> GatewayClient:
        from ...compiler.artifact import container, signing  # noqa: F401 (what the rest of the thread needs)
        from ..gateway import compile_client

        if self._settings.keeps_programs and "torch" in sys.modules:
            importlib.import_module("torch")  # waits for its end, while no module of ours is half imported
            importlib.import_module(_STARTS, __package__)
        return compile_client.GatewayClient(self._settings)

    def _fetch_all(self, gateway: GatewayClient) -> None:
        from .disk_cache import DiskCache
        from .verification import TrustStore

        store = TrustStore(self._settings)
        disk = DiskCache(self._settings.cache_dir, self._settings.disk_cache_bytes)
        chosen, total = [], 0
        for script in self._scripts:
            known = gateway.used_by(script)
            found, self.varied = known.artifacts, frozenset(known.varied)
            if found or self.varied:
                break
        store.refresh_if_newer(gateway.trust_serial, gateway.trust_document)
        for entry in found[:_MOST_ARTIFACTS]:
            total += entry.size
            if total > _MOST_BYTES:
                break
            chosen.append(entry.key)
        for key in chosen:
            fetch: Future[VerifiedArtifact | None] = Future()
            with self._changed:
                if self._closing or key in self._too_late:
                    continue
                self._begun[key] = fetch
            artifact = None
            try:
                artifact = self._fetch(gateway, key, store.trust(), disk)
            except Exception as error:  # network, disk, forgery: counted; the graph that needs it fetches it
                self._failed(error)
            finally:
                fetch.set_result(artifact)

    def _fetch(self, gateway: GatewayClient, key: str, trust: Trust, disk: DiskCache) -> VerifiedArtifact:
        from ...compiler.artifact import container
        from .shared_libraries import store_libraries
        from .verification import VerifiedArtifact

        data = disk.get(key)
        fetched = data is None
        if data is None:
            data = gateway.artifact(key, deadline=_FETCH_SECONDS)
        opened = container.verify(data, trust, key=key)
        if fetched:
            disk.put(key, data)
        store_libraries(opened, self._settings.cache_dir)
        return VerifiedArtifact(data, opened, "hit" if fetched else "disk_hit", early=fetched)

    def _report_used(self, gateway: GatewayClient) -> None:
        """Report what is used, a while after its first use and at the end, until the process ends."""
        from ...compiler.api.compiles import SIZES_OF_A_REPORT

        drop_at = time.monotonic() + KEEP_SECONDS
        while True:
            with self._changed:
                left = drop_at - time.monotonic() if self._begun else None
                self._changed.wait_for(lambda: self._closing or bool(self._unreported), left)
                if self._unreported:
                    self._changed.wait_for(lambda: self._closing, REPORT_AFTER_SECONDS)
                if time.monotonic() > drop_at:
                    self._begun = {}
                batch = dict(itertools.islice(self._unreported.items(), _BATCH))
                for key in batch:
                    del self._unreported[key]
                closing = self._closing
            try:
                varied, constant = ([], []) if self.sizes is None else self.sizes.news(SIZES_OF_A_REPORT)
                if batch or varied or constant:
                    self._report(gateway, batch, varied, constant)
                elif closing:
                    return
            except Exception as error:  # counted; the next start prefetches less
                self._failed(error)
                if closing and not batch:
                    return

    def _report(
        self, gateway: GatewayClient, batch: dict[str, bool], varied: list[str], constant: list[str]
    ) -> None:
        from ...compiler.api import compiles

        early = [key for key, was_early in batch.items() if was_early]
        used = compiles.ScriptUse(
            scripts=self._scripts, keys=list(batch), prefetched=early, varied=varied, constant=constant
        )
        gateway.report_used(used, deadline=_EXIT_SECONDS if self._closing else _REPORT_SECONDS)

    def _failed(self, error: Exception) -> None:
        from ..reports.run_report import process_report

        process_report().prefetch_failed(error)

    def close(self) -> None:
        """At exit: give the thread a short time to report what is left."""
        if not self._is_owner():
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._ended.wait(_EXIT_SECONDS)


@functools.cache
def prefetch_with(settings: ClientSettings) -> Prefetch | None:
    """This process' prefetch from these settings' gateway, started now if it was not; None where none is wanted, or
    none can start."""
    if sys.platform != "linux" or not settings.prefetch or not settings.url or settings.mode == "off":
        return None
    scripts = script_names()
    if not scripts:
        return None
    launch = load_launcher_info()
    # One rank of each machine fetches for all: they share its disk.
    prefetch = Prefetch(settings, scripts, fetches=launch is None or launch.local_rank == 0)
    try:
        prefetch.start()
    except RuntimeError:  # no thread can start, as at exit
        return None
    return prefetch


def start_early(settings: ClientSettings | None = None) -> Prefetch | None:
    """Start the prefetch of a program that has compiled nothing yet. settings: as they are now, if they were read.
    Never raises."""
    if not _is_helper():
        with contextlib.suppress(Exception):  # the first graph reports settings that cannot be used
            return prefetch_with(settings or load_settings())
    return None


def _is_helper() -> bool:
    """Whether multiprocessing started this process for another one, as DataLoader does."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


# --- the script's names ---------------------------------------------------------------------------------

_CODE_BYTES = 4 << 20
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z_.-]*")
_OURS = __name__.partition(".")[0]
_NOT_SCRIPTS = frozenset({"torchrelay", "ipykernel_launcher.py", "default_worker.py"})
"""Our own command; Jupyter's kernel; Ray's worker process, whose program comes later."""


def script_names() -> tuple[str, ...]:
    """64 hex digits each, the most exact first; none for a program that will not be recognized again."""
    return _names(sys.argv, sys.orig_argv, sys.modules.get("__main__"))


def _names(argv: Sequence[str], original: Sequence[str], main: Any) -> tuple[str, ...]:
    started, shape = (argv[0] if argv else ""), _shape(argv[1:])
    if started == "-c":
        return (_digest("command", original[-len(argv)], *shape),) if len(original) > len(argv) else ()
    if started in ("", "-m"):  # no script, or a module that is not found yet
        return ()
    module = getattr(getattr(main, "__spec__", None), "name", None) or ""
    path = Path(getattr(main, "__file__", None) or started)
    if module.partition(".")[0] == _OURS or path.name in _NOT_SCRIPTS:
        return ()
    name = module or path.name
    try:
        with path.open("rb") as file:
            code = hashlib.sha256(file.read(_CODE_BYTES)).hexdigest()
    except OSError:
        return ()
    return _digest("script", name, code, *shape), _digest("edited", path.absolute().parent.name, name, *shape)


def _shape(arguments: Iterable[str]) -> list[str]:
    """Names of options, sorted; no values, no positional arguments, no digits (they may be a value: -j8)."""
    return sorted({match[0] for text in arguments if (match := _OPTION.match(text))})


def _digest(*parts: str) -> str:
    made = hashlib.sha256(b"torchrelay script v1\0")
    for part in parts:
        data = part.encode(errors="surrogateescape")
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()
