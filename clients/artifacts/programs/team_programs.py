"""Programs of the team, by the service: fetched where this machine has none that fits, and sent after a trace.

A program is bytecode, so none is decoded before its signature holds (docs/programs.md). This machine keeps the signed
file, among its artifacts, and verifies it at each use: what is revoked meanwhile is removed. Nothing here raises. Only
the end of the process waits for an upload, for a moment. After a failure nothing is requested for a while.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from ....compiler.artifact.container import Artifact
from ....compiler.artifact.programs import shared
from ....compiler.artifact.programs.records import FrameProgram, in_order
from ....compiler.artifact.programs.shared import SLOTS, ProgramUpload
from ....compiler.errors import ArtifactError, Forbidden, LimitExceeded, NotFound, SignatureError
from ....compiler.graph.toolchain import local_target, local_toolchain
from ...gateway.compile_client import GatewayClient
from ...reports.run_report import process_report
from ..disk_cache import DiskCache

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 30.0
_EXIT_SECONDS = 5.0
"""The end of the process waits so long for uploads."""
_MEMORY_BYTES = 64 << 20
"""The most of programs that the disk does not keep; others are fetched again when they are needed again."""
Device = Literal["cpu", "cuda"]
_Waiting = tuple[str, FrameProgram, Device, FrameProgram | None]
Verify = Callable[[bytes, str], Artifact]


class TeamPrograms:
    """verify(file, key): an artifact under what this process trusts now. Safe for threads."""

    def __init__(self, gateway: GatewayClient, disk: DiskCache, verify: Verify) -> None:
        self._gateway = gateway
        self._disk = disk
        self._verify = verify
        self._absent: set[str] = set()
        """Keys of places where the service has no program that can be used."""
        self._files: dict[str, bytes] = {}
        """Programs that the disk does not keep, by such a key."""
        self._paused_until = 0.0
        self._may_send = True
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._unsent = 0
        self._lock = threading.Condition()
        self._sender: threading.Thread | None = None

    def find(self, function: str) -> Iterator[FrameProgram]:
        """The team's programs of a function: those that are here, the likeliest first; then the others, each fetched
        when it is asked for, once in this process."""
        keys = [shared.slot_key(function, slot) for slot in range(SLOTS)]
        here = {key: program for key in keys if (program := self._kept(key)) is not None}
        yield from in_order(list(here.values()))
        for slot, key in enumerate(keys):
            if key not in here:
                program = self._fetched(function, slot, key)
                if program is None:
                    return
                yield program

    def _kept(self, key: str) -> FrameProgram | None:
        file = self._files.get(key) or self._disk.get(key)
        if not file:
            return None
        try:
            return shared.unpack(self._verify(file, key))
        except (ArtifactError, SignatureError) as error:
            process_report().not_used("a program on this machine", error)
            if self._files.pop(key, None) is not None:
                self._absent.add(key)
            self._disk.remove(key)
            return None

    def _fetched(self, function: str, slot: int, key: str) -> FrameProgram | None:
        if key in self._absent or time.monotonic() < self._paused_until:
            return None
        try:
            file = self._gateway.program(function, slot)
            program = shared.unpack(self._verify(file, key))
        except NotFound:
            self._absent.add(key)
            return None
        except (ArtifactError, SignatureError) as error:
            self._absent.add(key)
            self._failed("used", error)
            return None
        except Exception as error:
            self._failed("fetched", error)
            return None
        self._disk.put(key, file)
        if self._disk.get(key) is None and sum(map(len, self._files.values())) + len(file) <= _MEMORY_BYTES:
            self._files[key] = file
        return program

    def send(
        self, function: str, program: FrameProgram, device: Device, instead: FrameProgram | None = None
    ) -> None:
        """Send a program in the background. device: the target of its graphs. instead: one that was found to be stale,
        whose place it takes."""
        if not self._may_send:
            return
        with self._lock:
            self._waiting.put((function, program, device, instead))
            self._unsent += 1
            if self._sender is None or not self._sender.is_alive():
                if self._sender is None:
                    atexit.register(self.drain)
                self._sender = threading.Thread(
                    target=self._send_all, name="torchrelay-programs", daemon=True
                )
                self._sender.start()

    def _send_all(self) -> None:
        while True:
            waiting = self._waiting.get()
            try:
                if self._may_send and time.monotonic() >= self._paused_until:
                    self._send(*waiting)
            except Forbidden as error:  # a token without the permission may take programs all the same
                self._may_send = False
                _log.info("torchrelay: programs stay on this machine: %s", error)
            except LimitExceeded as error:
                _log.info("torchrelay: a program stays on this machine: %s", error)
            except Exception as error:
                self._failed("sent", error)
            with self._lock:
                self._unsent -= 1
                self._lock.notify_all()

    def _send(
        self, function: str, program: FrameProgram, device: Device, instead: FrameProgram | None
    ) -> None:
        """Send a program to the slot of the other, or to the first free one. If all are taken, another program goes,
        which this one chooses."""
        body = shared.encode_upload(ProgramUpload(local_toolchain(), local_target(device), program))
        for slot in range(SLOTS if instead is not None else 0):
            key = shared.slot_key(function, slot)
            if self._kept(key) == instead:
                self._gateway.store_program(function, slot, body, replace=True)
                self._files.pop(key, None)
                self._disk.remove(key)
                return
        for slot in range(SLOTS):
            if self._gateway.store_program(function, slot, body, replace=False).outcome != "taken":
                return
        chosen = hashlib.sha256(body).digest()[0] % SLOTS
        self._gateway.store_program(function, chosen, body, replace=True)

    def drain(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._unsent, _EXIT_SECONDS)

    def _failed(self, what: str, error: Exception) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        if isinstance(error, ArtifactError | SignatureError):
            process_report().not_used("a program of the team", error)
        else:
            _log.info("torchrelay: a program cannot be %s: %s", what, error)
