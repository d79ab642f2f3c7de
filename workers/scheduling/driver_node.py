"""A node of Ray on which nothing runs, as a program: a process that is not a worker needs one to talk to Ray.

Whoever has Ray's token may place tasks and actors on it, with a runtime environment that installs packages. Where the
raylet would start a worker it starts a program that ends at once, so they wait until their caller gives up. In place of
Ray's two agents it has programs that do nothing: nobody asks for the dashboard's, and whoever asks for a runtime
environment is refused by this process.
"""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .. import ray_internals

_PYTHON = (sys.executable, "-I", "-S")
NO_AGENT = (*_PYTHON, str(Path(__file__).with_name("idle_process.py")))
"""The command that runs in place of an agent of Ray, whose end would end its node."""
_COMMANDS = {"worker": (*_PYTHON, "-c", "0"), "agent": NO_AGENT}
_REFUSAL = b"nothing runs on the node of a dispatcher"
_MOST_BYTES = 1 << 20
_WAIT_SECONDS = 5.0


def command(cluster: str, folder: Path) -> list[str]:
    """The command line that joins `cluster` (host:port); `folder` is for Ray's files."""
    return [sys.executable, "-m", __name__, cluster, str(folder)]


class _Refusal(BaseHTTPRequestHandler):
    """Answers the raylet where it asks for a runtime environment."""

    protocol_version = "HTTP/1.1"
    timeout = _WAIT_SECONDS

    def do_POST(self) -> None:
        self.rfile.read(min(int(self.headers.get("Content-Length", 0)), _MOST_BYTES))
        self.send_response(403)
        self.send_header("Content-Length", str(len(_REFUSAL)))
        self.end_headers()
        self.wfile.write(_REFUSAL)


def main(cluster: str, folder: str) -> None:
    """Join, and return once the node has ended."""
    own = ray_internals.own_address(cluster)
    refusals = ThreadingHTTPServer((own, 0), _Refusal)
    threading.Thread(target=refusals.serve_forever, daemon=True).start()
    runs = ray_internals.start_node_without_code(cluster, own, folder, _COMMANDS, refusals.server_port)
    while runs():
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
