"""Winners of a library's own autotuner, by the service: looked up before it measures, and sent after it has measured.

Nothing here raises. A winner only saves a measurement: whatever goes wrong, the library measures by itself. So it is in
mode `require` too, which is about compiles. After a failure nothing is requested for a while.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from ....compiler.api.tuning.database import AutotunedLibrary, AutotuneEntry
from ....compiler.errors import ClientError, Forbidden, NotFound, RelayError, SchemaMismatch
from ....compiler.graph.toolchain import device_environment, local_target, local_toolchain
from ....compiler.tuning.queries import ENTRY_LIMIT
from ....compiler.tuning.records import DeviceEnvironment
from ...gateway.compile_client import GatewayClient
from ...reports.run_report import process_report
from ...settings import load_settings

_log = logging.getLogger(__name__)

_VERSION = 1
"""The version of the keys: it changes with what they are made of, and with the form of the winners."""
_FRAMES = 8
"""How far above a plug-in point its caller may be."""
_PAUSE_SECONDS = 30.0
"""After a failure: a program with a hundred kernels does not wait for a dead service a hundred times."""


class TeamWinners:
    """The service's winners for this machine's current GPU. gateway: None if there is none to contact. Safe for
    threads."""

    def __init__(self, gateway: GatewayClient | None) -> None:
        self._gateway = gateway
        self.paused_until = 0.0
        self._may_store = True

    def find(self, library: AutotunedLibrary, version: str, key: str) -> str | None:
        """The winner that the team has for `key` of this version of the library, as JSON text that is not checked yet;
        None if there is none, or none can be had now."""
        try:
            if (gateway := self._active()) is None or (name := self.name_of(library, version, key)) is None:
                return None
            entry = gateway.autotune(library, name)
            if entry.key != key:
                raise SchemaMismatch(f"the gateway answered with the winner of another key than {key[:64]}")
            return entry.data
        except NotFound:
            return None
        except Exception as error:
            self._failed(error)
            return None

    def store(self, library: AutotunedLibrary, version: str, key: str, data: str) -> None:
        """Send the winner that was measured here, unless it has more than ENTRY_LIMIT characters."""
        try:
            if len(data) > ENTRY_LIMIT or not self._may_store or (gateway := self._active()) is None:
                return
            if (name := self.name_of(library, version, key)) is not None:
                gateway.store_autotune(library, name, AutotuneEntry(key, data))
        except Forbidden as error:  # a token that may only read: on purpose, and no reason not to read
            self._may_store = False
            _log.info("torchrelay: measured winners stay here: %s", error)
        except Exception as error:
            self._failed(error)

    def _active(self) -> GatewayClient | None:
        return self._gateway if time.monotonic() >= self.paused_until else None

    def name_of(self, library: AutotunedLibrary, version: str, key: str) -> str | None:
        """The key at the service, 64 hex digits; None where there is no GPU."""
        environment = current_gpu()
        if environment is None:
            return None
        # The libraries' keys name an architecture: an H100 PCIe and an H200 are both sm_90.
        return hashlib.sha256(
            msgspec.msgpack.encode(("torchrelay autotune", _VERSION, library, version, key, environment))
        ).hexdigest()

    def _failed(self, error: Exception) -> None:
        self.paused_until = time.monotonic() + _PAUSE_SECONDS
        _report(error)


def current_gpu() -> DeviceEnvironment | None:
    """Where timings of this process' current GPU hold; None without a GPU."""
    return _environment(torch.cuda.current_device()) if torch.cuda.is_available() else None


@functools.cache
def _environment(index: int) -> DeviceEnvironment:
    return device_environment(local_toolchain(), local_target("cuda", index), "cuda", threads=0)


@functools.cache
def process_winners() -> TeamWinners:
    """This process's one, with the settings as they are at the first kernel."""
    try:
        settings = load_settings()
        return TeamWinners(GatewayClient(settings) if settings.url and settings.mode != "off" else None)
    except Exception as error:  # settings that cannot be read
        _report(error)
        return TeamWinners(None)


def _report(error: Exception) -> None:
    known = error if isinstance(error, RelayError) else ClientError(f"{type(error).__name__}: {error}")
    process_report().autotune_failed(known)


def caller_locals(module: str, function: str) -> Mapping[str, Any]:
    """The local variables of the nearest caller that is `function` of `module`; empty if there is none nearby.

    Plug-in points pass a key alone. A winner is used only if it is one of the program's own candidates, and only the
    caller knows these (docs/decisions/0033-autotune-winners-are-choices.md).
    """
    frame = sys._getframe(1).f_back
    for _ in range(_FRAMES):
        if frame is None:
            break
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (module, function):
            return frame.f_locals
        frame = frame.f_back
    return {}
