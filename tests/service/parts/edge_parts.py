"""deploy/edge/nginx.conf as a process, on a port of its own, before gateways of a test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from service_parts import client_of, free_port, lives
from waiting import wait_until

CONFIG = Path(__file__).parents[3] / "deploy" / "edge" / "nginx.conf"
_PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin:{sys.prefix}/nginx/usr/sbin"
NGINX = shutil.which("nginx", path=_PATH)
"""`make test-all` fetches it into the environment."""


class Edge:
    """Debian's package or any other nginx. ports: the gateways'."""

    def __init__(self, folder: Path, *ports: int, lock_timeout: str = "200ms") -> None:
        assert NGINX is not None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        folder.mkdir()
        text = CONFIG.read_text().replace("/var/cache/torchrelay", str(folder))
        text = text.replace("lock_timeout 200ms", f"lock_timeout {lock_timeout}")
        text = text.replace("listen 8640", f"listen 127.0.0.1:{self.port}")
        server = re.search("server gateway:8642(.*;)", text)
        assert server is not None
        each = " ".join(f"server 127.0.0.1:{port}{server[1]}" for port in ports)
        (folder / "nginx.conf").write_text(text.replace(server[0], each))
        started_by = " user root;" if os.geteuid() == 0 else ""  # who may enter the test's folder
        command = [NGINX, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]
        self.process = subprocess.Popen([*command, "-g", f"daemon off;{started_by}"])
        with client_of(self.url, None) as http:
            wait_until(lambda: lives(http), seconds=20)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
