"""A private service: given an empty folder, starts a gateway that accepts compiles.

Starts `python -m torchrelay.service up` (redis-server, Ray and gateway, all real) as a child with its own
configuration and state, waits for /readyz, and stops it with everything it started.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torchrelay.examples.harness.machines import FreshMachine

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child: the kernel sends it SIGTERM should our process be killed before it can stop it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ServiceDidNotStart(Exception):
    """The child ended, or was not ready in time; the message holds the end of its log."""


class PrivateService:
    """Use as a context manager; leaving it stops the service.

    `environment` is what a client process needs to find it: URL and the folder of the credentials file.
    """

    def __init__(
        self,
        root: Path,
        *,
        arguments: tuple[str, ...] = (),
        start_seconds: float = 180.0,
        on_wait: Callable[[float, str], None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.root = root
        self.log = root / "service.log"
        self._arguments = arguments
        self._start_seconds = start_seconds
        self._on_wait = on_wait
        self._extra = environment or {}
        self._child: subprocess.Popen[bytes] | None = None
        self._machine = FreshMachine(root)
        self._credentials: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return str(self._credentials["url"]).rstrip("/")

    @property
    def pid(self) -> int:
        """The process id of the running service."""
        assert self._child is not None, "the service does not run"
        return self._child.pid

    @property
    def environment(self) -> dict[str, str]:
        config_home = self._machine.environment()["XDG_CONFIG_HOME"]
        return {"TORCHRELAY_URL": self.url, "XDG_CONFIG_HOME": config_home}

    def stats(self) -> dict[str, Any]:
        """`GET /v1/stats`."""
        with self._get("/v1/stats") as answer:
            stats: dict[str, Any] = json.load(answer)
            return stats

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "torchrelay.service", "up", "--port", "0", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._machine.environment(PYTHONUNBUFFERED="1", **self._extra),
                start_new_session=True,  # Ctrl-C reaches us alone; we then stop it in order
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM, and after half a minute SIGKILL to the whole session."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def _wait_ready(self) -> None:
        began = time.monotonic()
        said = "starting redis-server, Ray and the gateway"
        while (waited := time.monotonic() - began) < self._start_seconds:
            if self._child is None or self._child.poll() is not None:
                raise ServiceDidNotStart(f"the service ended early; its log ends with:\n{self.log_tail()}")
            if self._on_wait is not None:
                self._on_wait(waited, said)
            if self._read_credentials():
                said = "gateway up, warming the first worker"
                if self._ready():
                    return
            time.sleep(0.25)
        raise ServiceDidNotStart(
            f"no worker was ready within {self._start_seconds:.0f} s; the log ends with:\n{self.log_tail()}"
        )

    def _read_credentials(self) -> bool:
        file = Path(self._machine.environment()["XDG_CONFIG_HOME"]) / "torchrelay" / "credentials.json"
        if not file.exists():
            return False
        self._credentials = json.loads(file.read_text())
        return True

    def _ready(self) -> bool:
        try:
            with self._get("/readyz") as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):  # includes a 503: not ready yet
            return False

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Bearer {self._credentials['token']}"}
        )
        return _DIRECT.open(request, timeout=5)

    def log_tail(self) -> str:
        """The last lines of the service's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
