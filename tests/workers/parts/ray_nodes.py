"""A Ray cluster of processes of its own: a head and nodes, which a test can kill."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys

import psutil
from pool_parts import RAY_TOKEN
from torchrelay.workers.pool import node_resources, ray_environment, short_directory
from waiting import wait_until

_HANG_SECONDS = 600.0


class Nodes:
    """`ray start --block` for a head, and for nodes of one core each."""

    def __init__(self, *, python: str = sys.executable, token: str = RAY_TOKEN, **environment: str) -> None:
        """python: what runs Ray. token: the cluster's. environment: of all nodes, besides this process's and Ray's
        own."""
        self.python = python
        self.token = token
        self.environment = environment
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.folder = short_directory("tr-n-")
        self.processes: list[psutil.Popen] = []

    def start(self, *arguments: str) -> psutil.Popen:
        name = self.folder / str(len(self.processes))
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            process = psutil.Popen(
                [
                    *(self.python, "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus=0"),
                    *("--node-ip-address=127.0.0.1", "--disable-usage-stats", f"--temp-dir={name}"),
                    *arguments,
                ],
                env={**os.environ, **ray_environment(self.token, self.address), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def head(self) -> None:
        self.start("--head", f"--port={self.port}", "--num-cpus=0", "--include-dashboard=false")
        self.wait_for_head()

    def wait_for_head(self) -> None:
        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return True
            return False

        wait_until(listens, _HANG_SECONDS, pause=0.2)

    def add(self, cpu_slots: int = 0) -> psutil.Popen:
        resources = json.dumps(node_resources(cpu_slots))
        return self.start(f"--address={self.address}", "--num-cpus=1", f"--resources={resources}")

    def close(self) -> None:
        kill_families(*self.processes)
        shutil.rmtree(self.folder, ignore_errors=True)


def kill_families(*processes: psutil.Process) -> None:
    """SIGKILL to these processes and to all below them, at once."""
    family = [p for process in processes for p in [process, *_below(process)]]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=30)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
