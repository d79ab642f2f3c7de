"""Ranks as a job starts them: a script and a number in; what each told its job, wrote and ended with out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training import rank_environment
from torchrelay.compiler.api.training.events import RankMessage
from torchrelay.compiler.api.training.jobs import TrainSpec

HERE = Path(__file__).parent
SECONDS = 180.0


@dataclass
class RankProcess:
    rank: int
    process: subprocess.Popen[str]
    messages: list[RankMessage] = field(default_factory=list)
    out: str = ""
    error: str = ""
    threads: list[threading.Thread] = field(default_factory=list)

    def read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                self.messages.append(decoding.from_json(line, type=RankMessage))

    def wait(self) -> int:
        self.out, self.error = self.process.communicate(timeout=SECONDS)
        for thread in self.threads:
            thread.join(30)
        return self.process.returncode

    def told(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 1,
    spec: TrainSpec | None = None,
    environment: Mapping[str, str] = {},
    attempt: int = 0,
) -> list[RankProcess]:
    """Every rank as a child process of ours, with torchrun's variables and a channel."""
    port, started = free_port(), []
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    for rank in range(ranks):
        reading, writing = os.pipe()
        variables = kept | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "OMP_NUM_THREADS": "1",
            "XDG_CONFIG_HOME": os.devnull,
            rank_environment.ANSWER_ENVIRONMENT: str(writing),
            **environment,
        }
        if spec is not None:
            variables[rank_environment.SPEC_ENVIRONMENT] = msgspec.json.encode(spec).decode()
        process = subprocess.Popen(
            [sys.executable, "-m", "torchrelay.clients.training.rank.main", "--", str(script), *arguments],
            env=variables,
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writing)
        child = RankProcess(rank, process)
        child.threads.append(threading.Thread(target=child.read, args=(reading,), daemon=True))
        child.threads[0].start()
        started.append(child)
    return started


def finish(ranks: Sequence[RankProcess], *codes: int) -> None:
    """Wait for all; each must end with its code, 0 if none is given, or its standard error is shown. When one has
    been killed, the others are ended as a job's worker ends them."""
    wanted = codes or (0,) * len(ranks)
    try:
        for rank, code in sorted(zip(ranks, wanted, strict=True), key=lambda pair: pair[1] == 0):
            if code == OTHER and rank.process.poll() is None:
                rank.process.kill()
            found = rank.wait()
            assert code in (OTHER, found), f"rank {rank.rank} ended with {found}:\n{rank.error[-4000:]}"
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()


OTHER = 1 << 20
"""Any code: it loses its peers, and is ended."""


def results(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(ranks)]


__all__ = ["HERE", "OTHER", "SECONDS", "RankProcess", "finish", "free_port", "results", "signal", "start"]
