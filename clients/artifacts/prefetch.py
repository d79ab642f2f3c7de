"""What this script used the last time, before it asks: its names in; verified artifacts, unpacked and on disk, out.

One daemon thread fetches the script's list from the gateway, then each artifact that this machine lacks, verifies it,
keeps it on disk and places its libraries; afterwards it tells the gateway what this run used. It imports neither torch
nor anything that imports torch: the main thread may be importing those meanwhile, and Python answers two threads that
import a cycle of modules from two ends with a half-made module (docs/decisions/0008).

Whatever fails here costs time that would have been spent anyway; it is counted in the report, and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from .. import settings
from ..settings import ClientSettings, load_launcher_info, load_settings
from .script_id import script_names

if TYPE_CHECKING:
    from ...compiler.artifact.container import Artifact
    from ...compiler.artifact.signing import Trust
    from ..gateway.compile_client import GatewayClient
    from .disk_cache import DiskCache

_MOST_ARTIFACTS = 128
_MOST_BYTES = 128 << 20
_FETCH_SECONDS = 60.0
"""One artifact."""
_KEEP_SECONDS = 300.0
"""An artifact that no graph has asked for by then is on disk only."""
_TELL_AFTER_SECONDS = 20.0
_TELL_AFTER_KEYS = 32
_TELL_SECONDS = 5.0
_EXIT_SECONDS = 0.9
_FORK_SECONDS = 5.0
_BATCH = 256


class PrefetchedArtifact(Struct, frozen=True):
    """An artifact that came before its graph. `fetched`: now, from the gateway; else it was on this machine's disk."""

    data: bytes
    opened: Artifact
    fetched: bool


class _Slot:
    """One artifact of the list. `early` is None before it is there, when it cannot be had, and once it was taken."""

    def __init__(self) -> None:
        self.begun = False
        self.over = threading.Event()
        self.early: PrefetchedArtifact | None = None


class Prefetch:
    """One process' prefetch, and its account of what the script used."""

    def __init__(self, settings: ClientSettings, scripts: Sequence[str], *, fetches: bool = True) -> None:
        self._settings = settings
        self._scripts = list(scripts)
        self._fetches = fetches
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._slots: dict[str, _Slot] = {}
        self._asked: set[str] = set()
        self._used: dict[str, bool] = {}
        """Keys to be told, in order; whether they were fetched early."""
        self._told: set[str] = set()
        self._first_used = 0.0
        self._closing = False
        self._imported, self._ended = threading.Event(), threading.Event()

    def start(self) -> None:
        # These register what is to happen around a fork, which must not change in the middle of one.
        import concurrent.futures.thread  # noqa: F401
        import logging  # noqa: F401

        threading.Thread(target=self._run, name="torchrelay prefetch", daemon=True).start()
        atexit.register(self._close)
        # A child forked while this thread imports would find modules locked by nobody.
        os.register_at_fork(before=lambda: self._mine() and self._imported.wait(_FORK_SECONDS))

    def take(self, key: str) -> PrefetchedArtifact | None:
        """The artifact, if it was prefetched; waits for one that is on its way. It is handed out once."""
        if not self._mine():
            return None
        with self._changed:
            slot = self._slots.get(key)
            if slot is None or not slot.begun:
                self._asked.add(key)  # whoever asks fetches it now, and it need not be fetched twice
                return None
        slot.over.wait(_FETCH_SECONDS + self._settings.idle_timeout)
        with self._changed:
            early, slot.early = slot.early, None
        return early

    def used(self, key: str, *, early: bool) -> None:
        """Note that the script uses `key`, to be told to the service."""
        if not self._mine():
            return
        with self._changed:
            if key in self._told:
                return
            self._told.add(key)
            self._first_used = self._first_used or time.monotonic()
            self._used[key] = early
            self._changed.notify_all()

    def _mine(self) -> bool:
        """Whether this is the process that started the thread, and no forked child of it."""
        return os.getpid() == self._owner

    # --- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            gateway = self._prepared()
        except Exception:  # whatever it was, the graphs fetch for themselves
            self._failed()
            self._ended.set()
            return
        finally:
            self._imported.set()
        try:
            if self._fetches:
                self._fetch_all(gateway)
        except Exception:  # counted; the graphs fetch for themselves
            self._failed()
        finally:
            with self._changed:
                for slot in self._slots.values():
                    slot.over.set()
        self._tell_all(gateway)
        self._ended.set()

    def _prepared(self) -> GatewayClient:
        from ...compiler.artifact import container, signing  # noqa: F401 (what the rest of the thread needs)
        from ..gateway import compile_client

        return compile_client.GatewayClient(self._settings)

    def _fetch_all(self, gateway: GatewayClient) -> None:
        from .disk_cache import DiskCache
        from .trust_store import TrustStore

        store = TrustStore(self._settings)
        disk = DiskCache(self._settings.cache_dir / "artifacts", self._settings.disk_cache_bytes)
        chosen, total = [], 0
        for script in self._scripts:
            if found := gateway.used_by(script).artifacts:
                break
        store.heard(gateway.trust_serial, gateway.trust_document)
        for entry in found[:_MOST_ARTIFACTS]:
            total += entry.size
            if total > _MOST_BYTES:
                break
            chosen.append(entry.key)
        with self._changed:
            self._slots = {key: _Slot() for key in chosen if key not in self._asked}
        for key in chosen:
            with self._changed:
                slot = self._slots.get(key)
                if self._closing or slot is None or key in self._asked:
                    continue
                slot.begun = True
            try:
                slot.early = self._fetch(gateway, key, store.trust(), disk)
            except (
                Exception
            ):  # a network, a disk, a forgery: counted, and the graph that wants this one fetches it
                self._failed()
            finally:
                slot.over.set()

    def _fetch(self, gateway: GatewayClient, key: str, trust: Trust, disk: DiskCache) -> PrefetchedArtifact:
        from ...compiler.artifact import container
        from .shared_libraries import cpp_libraries, triton_modules

        data = disk.get(key)
        fetched = data is None
        if data is None:
            data = gateway.artifact(key, deadline=_FETCH_SECONDS)
        opened = container.verify(data, trust, key=key)
        if fetched:
            disk.put(key, data)
        folder = self._settings.cache_dir / "lib"
        cpp_libraries(opened, folder)
        triton_modules(opened, folder)
        return PrefetchedArtifact(data, opened, fetched)

    def _tell_all(self, gateway: GatewayClient) -> None:
        """Tell what was used, in batches, until the process ends."""
        began = time.monotonic()
        while True:
            with self._changed:
                while not self._closing and not self._due():
                    now = time.monotonic()
                    moments = [self._first_used + _TELL_AFTER_SECONDS] if self._used else []
                    if now < began + _KEEP_SECONDS:
                        moments.append(began + _KEEP_SECONDS)
                    else:
                        self._slots = {}
                    self._changed.wait(min(moments) - now if moments else None)
                batch = dict(list(self._used.items())[:_BATCH])
                for key in batch:
                    del self._used[key]
                self._first_used = time.monotonic() if self._used else 0.0
                if self._closing and not batch:
                    return
            try:
                self._tell(gateway, batch)
            except Exception:  # counted; the next start prefetches less
                self._failed()

    def _due(self) -> bool:
        waited = time.monotonic() - self._first_used if self._used else 0.0
        return len(self._used) >= _TELL_AFTER_KEYS or waited >= _TELL_AFTER_SECONDS

    def _tell(self, gateway: GatewayClient, batch: dict[str, bool]) -> None:
        from ...compiler.api import compiles

        early = [key for key, was in batch.items() if was]
        used = compiles.ScriptUse(scripts=self._scripts, keys=list(batch), prefetched=early)
        gateway.tell_used(used, deadline=_EXIT_SECONDS if self._closing else _TELL_SECONDS)

    def _failed(self) -> None:
        from ..reports.run_report import process_report

        process_report().prefetch_failed()

    def _close(self) -> None:
        """At exit: let the thread tell what is left, but not for long."""
        if not self._mine():
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._ended.wait(_EXIT_SECONDS)


@functools.cache
def prefetch_with(settings: ClientSettings) -> Prefetch | None:
    """This process' prefetch from these settings' gateway, started now if it was not; None where none is wanted."""
    if not settings.prefetch or not settings.url or settings.mode == "off":
        return None
    scripts = script_names()
    if not scripts:
        return None
    launch = load_launcher_info()
    # One rank of each machine fetches for all: they share its disk.
    prefetch = Prefetch(settings, scripts, fetches=launch is None or launch.local_rank == 0)
    prefetch.start()
    return prefetch


def start_early() -> None:
    """Start the prefetch of a program that has not asked for anything yet. Never raises."""
    if not settings.wants_prefetch() or not script_names() or _is_helper():
        return
    with contextlib.suppress(Exception):  # settings that cannot be used are told at the first graph
        prefetch_with(load_settings())


def _is_helper() -> bool:
    """Whether multiprocessing started this process for another one, as DataLoader does."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None
