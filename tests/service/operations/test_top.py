"""`torchrelay top` shows what the service does now; `torchrelay open` finds the page of what an id names."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx2
from command_line import COMMAND, torchrelay, user
from page_parts import record, tell
from service_parts import TOKEN, ArtifactPool, StartGateway, compiled, graph, post
from training_parts import TrainingPool, begun
from waiting import wait_until


class Terminal:
    """A command on a terminal of 100 columns, and what it has written there."""

    def __init__(self, *words: str, environment: dict[str, str]) -> None:
        own, other = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**environment, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
            start_new_session=True,
        )
        os.close(other)
        self._file = own
        self.written = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._file, 65536)
            except OSError:
                return
            if not data:
                return
            self.written += re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", data.decode("utf-8", "replace"))

    def shows(self, text: str) -> None:
        """Waits for `text`, of what is written from now on."""
        begun = len(self.written)
        wait_until(lambda: text in self.written[begun:], seconds=30)


def test_what_runs_and_waits_is_printed_once(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = start_gateway(ArtifactPool(seconds=30))
    environment = user(tmp_path, gateway.url, TOKEN)
    assert "0 compiling · 0 waiting" in torchrelay("top", environment=environment, status=0).stdout
    with gateway.http() as http:
        key = post(http, graph(1)).json()["key"]

        def shown() -> str:
            return torchrelay("top", "--once", environment=environment, status=0).stdout

        wait_until(lambda: "1 compiling" in shown(), seconds=30)
        assert key[:12] in shown()
        answer: dict[str, Any] = json.loads(torchrelay("top", "--json", environment=environment).stdout)
        assert [each["key"] for each in answer["compiles"]] == [key]


def test_on_a_terminal_it_is_renewed_and_outlives_the_gateway(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = start_gateway(ArtifactPool(seconds=60))
    terminal = Terminal("top", environment=user(tmp_path, gateway.url, TOKEN))
    try:
        terminal.shows("0 compiling")
        with gateway.http() as http:
            key = post(http, graph(1)).json()["key"]
        terminal.shows(key[:12])
        gateway.stop()
        terminal.shows("it is asked again")
        assert terminal.process.poll() is None
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.process.wait(20) == 0
        assert "Traceback" not in terminal.written
    finally:
        terminal.process.kill()


def test_without_a_service_it_says_what_to_do(tmp_path: Path) -> None:
    done = torchrelay("top", environment=user(tmp_path, "http://127.0.0.1:9", TOKEN), status=1)
    assert len(done.stderr.splitlines()) == 1 and "127.0.0.1:9" in done.stderr


def test_an_id_leads_to_its_page(start_gateway: StartGateway, tmp_path: Path) -> None:
    (tmp_path / "driver").mkdir()
    gateway = start_gateway(TrainingPool(tmp_path / "driver"))
    environment = user(tmp_path, gateway.url, TOKEN)

    def page(what: str) -> str:
        link = torchrelay("open", "--link", what, environment=environment, status=0).stdout.strip()
        assert httpx2.get(link).status_code == 303
        return link.partition("&then=")[2]

    with gateway.http() as http:
        job = begun(http, capture=False)
        run = tell(http, record())["run"]
        compiled(http, graph(1))
        key = gateway.pool.calls[-1]
    assert page(job) == f"jobs/{job}"
    assert page(run) == page(f"{gateway.url}/runs/{run}?namespace=default") == f"runs/{run}"
    assert page(key) == f"artifacts/{key}"
    assert page("ab" * 32) == f"misses/{'ab' * 32}"
    assert torchrelay("open", "--link", "x", environment=environment).returncode == 2
