"""S3 servers on loopback: moto's, in this process, and SeaweedFS."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import httpx2
from moto.server import ThreadedMotoServer
from service_parts import client_of, free_port
from waiting import wait_until

WEED = shutil.which("weed", path=str(Path(sys.executable).parent))
"""SeaweedFS, where `make test-all` puts it."""


class _Server(Protocol):
    def stop(self) -> None: ...


class S3:
    """A server with one bucket. What a bucket holds outlives the server, as a disk would."""

    def __init__(self, bucket: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.bucket = bucket
        self._server: _Server | None = None

    def start(self) -> None:
        self._server = self._started()
        with client_of(self.url, None) as http:
            wait_until(lambda: self._has_bucket(http), seconds=60)

    def _started(self) -> _Server:
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        server.start()
        return server

    def _has_bucket(self, http: httpx2.Client) -> bool:
        try:
            return http.put(f"/{self.bucket}").status_code in (200, 409) and self._takes_objects(http)
        except httpx2.TransportError:
            return False

    def _takes_objects(self, http: httpx2.Client) -> bool:
        return True

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def objects(self) -> list[str]:
        """Keys of what the bucket holds."""
        with client_of(self.url, None) as http:
            listed = http.get(f"/{self.bucket}", params={"list-type": "2"}).text
        keys = [part.partition("</Key>")[0] for part in listed.split("<Key>")[1:]]
        return [key for key in keys if not key.endswith("/installation")]


class SeaweedFS(S3):
    def __init__(self, bucket: str, folder: Path) -> None:
        super().__init__(bucket)
        self._folder = folder
        self._ports = {
            f"{part}.{port}": free_port()
            for part in ("master", "volume", "filer")
            for port in ("port", "port.grpc")
        }

    def _started(self) -> _Server:
        assert WEED is not None
        self._folder.mkdir(exist_ok=True)
        ports = {**self._ports, "s3.port": self.port, "s3.port.grpc": free_port(), "s3.port.iceberg": 0}
        command = [WEED, "-logtostderr=true", "server", f"-dir={self._folder}", "-s3"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=20", "-master.volumeSizeLimitMB=64"]
        command += [f"-{name}={port}" for name, port in ports.items()]
        with (self._folder / "log").open("ab") as log:
            return _Process(subprocess.Popen(command, stderr=log, cwd=self._folder))

    def _takes_objects(self, http: httpx2.Client) -> bool:
        """For the first it makes a volume, which takes longer than a gateway waits."""
        probe = f"/{self.bucket}/probe"
        return http.put(probe, content=b"probe").status_code == 200 and http.delete(probe).is_success


class _Process:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
