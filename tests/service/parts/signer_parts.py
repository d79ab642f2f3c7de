"""A real signer: settings in; `python -m torchrelay.service signer` in a process of its own out, to be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
from service_parts import client_of, free_port
from signed import KEY, manifest_of
from torchrelay.compiler.artifact import container
from torchrelay.service.signing.remote import RemoteKeyring
from waiting import wait_until

SIGN_TOKEN = "sign-token-" + "1" * 32
ADMIN_TOKEN = "admin-token-" + "2" * 32

_LISTING = """
import atexit, runpy, sys
from pathlib import Path
listing = Path(sys.argv.pop(1))
atexit.register(lambda: listing.write_text("\\n".join(sys.modules)))
runpy.run_module("torchrelay.service", run_name="__main__", alter_sys=True)
"""
"""The same program, which writes down at its end which modules it has imported."""


def artifact(key: str = KEY, size: int = 1000) -> bytes:
    """An unsigned one, whose bytes differ from call to call."""
    files = {"code.py": os.urandom(size)}
    return container.pack(manifest_of(files, key=key), files)


class SignerProcess:
    """`folder`: of the keys, and of the process's own state. `unix`: on a Unix socket. `settings`: by name."""

    def __init__(self, folder: Path, *, unix: bool = False, scheme: str = "http", **settings: Any) -> None:
        self.keys = folder / "keys"
        self.log = folder / "signer.log"
        self.modules = folder / "modules"
        self.port = free_port()
        self.socket = Path(tempfile.mkdtemp(prefix="tr-")) / "s.sock" if unix else None
        self.url = f"unix://{self.socket}" if unix else f"{scheme}://127.0.0.1:{self.port}"
        named = {
            "state_dir": folder,
            "signer_token": SIGN_TOKEN,
            "signer_admin_token": ADMIN_TOKEN,
            "log_format": "json",
            **settings,
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
        given = {f"TORCHRELAY_SERVICE_{name.upper()}": str(value) for name, value in named.items() if value}
        self.environment = kept | given | {"XDG_CONFIG_HOME": str(folder)}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def arguments(self) -> list[str]:
        where = ["--uds", str(self.socket)] if self.socket else ["--port", str(self.port)]
        return ["signer", *where]

    def start(self) -> SignerProcess:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _LISTING, str(self.modules), *self.arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._answers, seconds=60)
        return self

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log.read_text()
        with self.http(None) as http, contextlib.suppress(httpx2.TransportError):
            return http.get("/livez").status_code == 204
        return False

    def http(self, token: str | None = ADMIN_TOKEN, **options: Any) -> httpx2.Client:
        if self.socket is not None:
            options["transport"] = httpx2.HTTPTransport(uds=str(self.socket))
        options.setdefault("verify", False)
        return client_of("http://signer" if self.socket else self.url, token, **options)

    def keyring(self, token: str = ADMIN_TOKEN, **options: Any) -> RemoteKeyring:
        return RemoteKeyring(self.url, token, **options)

    def ended(self) -> int:
        """Its exit status after SIGTERM."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
            self.process.wait()

    def peak_growth(self, call: Callable[[], object]) -> int:
        """The most that its resident memory grew by, at any moment of `call`; bytes."""
        assert self.process is not None
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the peak starts anew, see proc(5)
        before = int(psutil.Process(self.process.pid).memory_info().rss)
        call()
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 - before


def sign(http: httpx2.Client, data: bytes, **query: str) -> httpx2.Response:
    return http.post("/v1/sign", content=data, params={"key": KEY, "namespace": "default", **query})
