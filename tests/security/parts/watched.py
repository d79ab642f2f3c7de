"""A gateway in a process of its own whose every Python process writes down what it does: events in, a set out.

The hook is a `sitecustomize` on the path, so that it is there before the gateway's first import, and in the
processes that the gateway starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
from service_parts import TOKEN, client_of, free_port
from waiting import wait_until

_SERVICE_PARTS = Path(__file__).parents[2] / "service" / "parts" / "service_parts.py"

_HOOK = """
import os, sys

sys.modules["uvloop"] = None  # it starts processes without telling of them

_file = os.open(os.environ["AUDIT_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_EVENTS = {
    "exec", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn",
    "subprocess.Popen", "pickle.find_class", "ctypes.dlopen", "marshal.loads", "os.putenv", "shutil.rmtree",
}

def _hook(event, arguments):
    if event not in _EVENTS:
        return
    detail = ""
    if event == "exec":
        detail = arguments[0].co_filename
    elif event == "subprocess.Popen":
        detail = " ".join(map(str, arguments[1]))
    elif event == "os.posix_spawn":
        detail = " ".join(map(str, arguments[1]))
    elif event == "marshal.loads":
        return
    os.write(_file, ascii((event, str(detail)[:300])).encode() + b"\\n")

sys.addaudithook(_hook)
"""


class WatchedGateway:
    """`log`: the file that its standard output and error go to."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_HOOK)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        self._audit = folder / "audit"
        argument = msgspec.json.encode({**settings, "port": self.port}).decode()
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "AUDIT_FILE": str(self._audit),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(_SERVICE_PARTS), argument, "0"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._lives, seconds=60)

    def http(self, token: str | None = TOKEN, **options: Any) -> httpx2.Client:
        return client_of(self.url, token, **options)

    def done(self) -> set[str]:
        """What its processes did since the last call: one line for each kind of event."""
        lines = set(self._audit.read_text().splitlines())
        os.truncate(self._audit, 0)
        return lines

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def peak_growth(self, call: Callable[[], object]) -> int:
        """The most that the gateway's resident memory grew by, at any moment of `call`; bytes."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the peak starts anew, see proc(5)
        before = self.resident_bytes()
        call()
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024 - before

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _lives(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with self.http(None) as http:
            try:
                return http.get("/livez").status_code == 200
            except httpx2.TransportError:
                return False
