"""The client's prefetch against the real gateway: fetched once, verified, on disk and unpacked ahead of time."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from request_parts import manifest_of
from service_parts import TOKEN, ArtifactPool, Running, compiled, graph
from starlette.types import ASGIApp, Receive, Scope, Send
from torchrelay.clients.artifacts import prefetch as module
from torchrelay.clients.artifacts.prefetch import Prefetch
from torchrelay.clients.artifacts.shared_libraries import loading_folder
from torchrelay.clients.reports.run_report import process_report
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import key_text
from waiting import wait_until

SCRIPT = "1" * 64
LIBRARY = b"\x7fELF no library"


class LibraryPool(ArtifactPool):
    """Its artifacts hold one C++ library, as the real ones do."""

    async def compile(self, request_bytes: bytes, **asked: Any) -> bytes:
        self.calls.append(asked["key"])
        files = {
            container.BUNDLE: os.urandom(100),
            container.LIBRARIES: msgspec.msgpack.encode([(["void"], "source", "cpp/0.so")]),
            "cpp/0.so": LIBRARY,
        }
        told = {name: asked[name] for name in ("toolchain", "target")}
        return container.pack(manifest_of(asked["key"], files, **told), files)


class Gate:
    """Holds back artifacts on their way to the client until it is opened. If it trickles, a byte comes now and then."""

    trickles = threading.Event()

    def __init__(self, app: ASGIApp, asked: threading.Event, opened: threading.Event) -> None:
        self._app = app
        self._asked = asked
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        import asyncio

        if scope["type"] == "http" and scope["path"].startswith("/v1/artifacts/"):
            self._asked.set()
            if self.trickles.is_set():
                await send({"type": "http.response.start", "status": 200, "headers": []})
            while not self._opened.is_set():
                await asyncio.sleep(0.01)
                if self.trickles.is_set():
                    await send({"type": "http.response.body", "body": b"T", "more_body": True})
            if self.trickles.is_set():
                await send({"type": "http.response.body", "body": b""})
                return
        await self._app(scope, receive, send)


class Answer:
    """Answers with its body where the client asks for a script's list, once it has one."""

    body = b""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.body or scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class Service:
    """A gateway that remembers two artifacts for SCRIPT, and whose artifacts wait at the gate."""

    def __init__(self, running: Running, asked: threading.Event, opened: threading.Event) -> None:
        self.running, self.asked, self.opened = running, asked, opened
        opened.set()
        with running.http() as http:
            for size in (1, 2):
                compiled(http, graph(size))
            self.keys = list(running.pool.calls)
            http.post("/v1/prefetch", json={"scripts": [SCRIPT], "keys": self.keys})
            self.public = http.get("/v1/info").json()["public_keys"]
        opened.clear()
        asked.clear()
        self.before = self.fetches()

    def fetches(self) -> int:
        with self.running.http() as http:
            return int(http.get("/v1/stats").json()["fetches"])

    def settings(self, folder: Path, **changes: Any) -> ClientSettings:
        own = {
            "url": self.running.url,
            "token": TOKEN,
            "public_keys": tuple(self.public),
            "cache_dir": folder,
        }
        return ClientSettings(**{**own, "state_dir": folder / "state", **changes})


@pytest.fixture
def service(start_gateway: Callable[..., Running], settings: dict[str, Any]) -> Iterator[Service]:
    from torchrelay.service.base.settings import ServiceSettings

    asked, opened = threading.Event(), threading.Event()
    running = Running(ServiceSettings(**settings), LibraryPool())
    running.app.add_middleware(Answer)
    running.app.add_middleware(Gate, asked=asked, opened=opened)
    running.start()
    yield Service(running, asked, opened)
    opened.set()
    running.stop()


def test_artifacts_are_there_verified_on_disk_and_unpacked_before_their_graphs(
    service: Service, tmp_path: Path
) -> None:
    service.opened.set()
    prefetch = Prefetch(service.settings(tmp_path), [SCRIPT])
    prefetch.start()
    wait_until(lambda: len(on_disk(tmp_path)) == 2, seconds=20)
    one, two = service.keys
    wait_until(lambda: two in prefetch._begun and prefetch._begun[two].done(), seconds=20)
    found = prefetch.take(one)
    assert found is not None and found.early and found.opened.manifest.key == one
    assert found.data == (tmp_path / "artifacts" / one[:2] / one).read_bytes()
    library = loading_folder(tmp_path) / f"{hashlib.sha256(LIBRARY).hexdigest()}.so"
    assert library.read_bytes() == LIBRARY
    assert prefetch.take(one) is None
    assert prefetch.take("ee" * 32) is None
    assert service.fetches() - service.before == 2
    again = Prefetch(service.settings(tmp_path), [SCRIPT])
    again.start()
    wait_until(lambda: two in again._begun and again._begun[two].done(), seconds=20)
    kept = again.take(two)
    assert kept is not None and not kept.early
    assert service.fetches() - service.before == 2


def test_what_is_on_its_way_is_awaited_and_what_was_asked_for_is_not_fetched_again(
    service: Service, tmp_path: Path
) -> None:
    one, two = service.keys
    prefetch = Prefetch(service.settings(tmp_path), [SCRIPT])
    assert prefetch.take(two) is None  # its graph came before the list: whoever asked fetches it
    prefetch.start()
    assert service.asked.wait(20)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(prefetch.take(one)))
    waiting.start()
    service.opened.set()
    waiting.join(20)
    assert found[0].opened.manifest.key == one
    prefetch.close()
    assert service.fetches() - service.before == 1


def test_a_graph_waits_for_a_prefetch_no_longer_than_its_deadline(service: Service, tmp_path: Path) -> None:
    prefetch = Prefetch(service.settings(tmp_path, deadline=0.5), [SCRIPT])
    prefetch.start()
    assert service.asked.wait(20)
    begun = time.monotonic()
    assert [prefetch.take(key) for key in service.keys] == [None, None]
    assert 0.4 < time.monotonic() - begun < 10
    service.opened.set()


def test_a_graph_asks_for_itself_when_its_prefetch_is_slow(service: Service, tmp_path: Path) -> None:
    prefetch = Prefetch(service.settings(tmp_path, idle_timeout=1.0), [SCRIPT])
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(prefetch.take(service.keys[0])))
    Gate.trickles.set()
    try:
        prefetch.start()
        assert service.asked.wait(20)
        waiting.start()
        waiting.join(30)  # half of what the prefetch itself may take
        assert found == [None]
    finally:
        service.opened.set()
        waiting.join()
        Gate.trickles.clear()


def test_what_no_trusted_key_signed_is_dropped_and_counted(service: Service, tmp_path: Path) -> None:
    service.opened.set()
    stranger = key_text(Ed25519PrivateKey.generate().public_key())
    failures = process_report().snapshot().prefetch_failures
    prefetch = Prefetch(service.settings(tmp_path, public_keys=(stranger,)), [SCRIPT])
    prefetch.start()
    wait_until(lambda: process_report().snapshot().prefetch_failures == failures + 2, seconds=20)
    assert [prefetch.take(key) for key in service.keys] == [None, None]
    assert on_disk(tmp_path) == []


def test_what_a_run_uses_is_told_long_before_it_ends(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPORT_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(module, "KEEP_SECONDS", 0.1)
    script = "2" * 64
    prefetch = Prefetch(service.settings(tmp_path), [script])
    prefetch.start()
    for key in service.keys:
        prefetch.used(key, early=False)
    with service.running.http() as http:
        recalled = f"/v1/prefetch/{script}"
        wait_until(lambda: len(http.get(recalled).json()["artifacts"]) == 2, seconds=20)


class Seen:
    """What a process has seen of its sizes, and has yet to report."""

    def __init__(self, *news: tuple[list[str], list[str]]) -> None:
        self._news = [*news]

    def news(self, most: int) -> tuple[list[str], list[str]]:
        return self._news.pop(0) if self._news else ([], [])


def test_sizes_that_vary_are_told_at_the_end_and_known_at_the_next_start(
    service: Service, tmp_path: Path
) -> None:
    script, one, two = "3" * 64, "ab" * 32, "cd" * 32
    for seen, known in (([one, two], []), []), (([], [one]), [one, two]), (([], []), [two]):
        prefetch = Prefetch(service.settings(tmp_path), [script])
        prefetch.start()
        wait_until(lambda found=prefetch, want=known: found.varied == frozenset(want), seconds=20)
        prefetch.sizes = Seen(seen)  # type: ignore[assignment]
        prefetch.close()
        assert prefetch._ended.is_set()


@pytest.mark.parametrize(
    "varied",
    [["L['x']"], [["ab" * 32]], "ab" * 32, {"ab" * 32: [0]}, [7], None, [f"{n:064x}" for n in range(257)]],
    ids=["text", "list", "no list", "dict", "number", "null", "many"],
)
def test_a_list_of_sizes_that_no_service_answers_is_not_used_and_counted(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, varied: object
) -> None:
    monkeypatch.setattr(Answer, "body", json.dumps({"artifacts": [], "varied": varied}).encode())
    failures = process_report().snapshot().prefetch_failures
    prefetch = Prefetch(service.settings(tmp_path), [SCRIPT])
    prefetch.start()
    wait_until(lambda: process_report().snapshot().prefetch_failures == failures + 1, seconds=20)
    assert prefetch.varied == frozenset()
    assert prefetch.take(service.keys[0]) is None
    prefetch.close()


def on_disk(folder: Path) -> list[Path]:
    return [path for path in (folder / "artifacts").rglob("*") if len(path.name) == 64]


PROGRAM = """
import json, os, pathlib, sys, threading, time
start = time.perf_counter()
from torchrelay.clients.artifacts.prefetch import start_early
start_early()  # as `enable` does
threads = [thread.name for thread in threading.enumerate() if thread.daemon]
cache = pathlib.Path(os.environ["TORCHRELAY_CACHE_DIR"])
while len(threads) and {wanted} > len([path for path in cache.rglob("*") if len(path.name) == 64]):
    time.sleep(0.02)
heavy = sorted({{"torch", "fastapi", "redis", "ray"}} & set(sys.modules))
from torchrelay.clients.artifacts.prefetch import prefetch_with
from torchrelay.clients.settings import load_settings
if (prefetch := prefetch_with(load_settings())) is not None:
    if (child := os.fork()) == 0:
        prefetch.used("ab" * 32, early=False)
        os._exit(prefetch.take("ab" * 32) is not None)
    assert os.waitpid(child, 0)[1] == 0
    for key in {used}:
        prefetch.used(key, early=True)
print(json.dumps({{"threads": threads, "heavy": heavy}}))
"""


def start(
    service: Service, script: Path, cache: Path, wanted: int, used: list[str], **more: str
) -> dict[str, Any]:
    script.write_text(PROGRAM.format(wanted="int(sys.argv[2])", used="sys.argv[4:]"))
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("TORCHRELAY_")},
        "TORCHRELAY_URL": service.running.url,
        "TORCHRELAY_TOKEN": TOKEN,
        "TORCHRELAY_PUBLIC_KEYS": ",".join(service.public),
        "TORCHRELAY_CACHE_DIR": str(cache),
        "XDG_STATE_HOME": str(cache / "state"),
        "XDG_CONFIG_HOME": str(cache / "config"),
        **more,
    }
    command = [sys.executable, str(script), "--wanted", str(wanted), "--used", *used]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def test_the_next_start_of_a_script_fetches_what_it_used_and_its_thread_imports_no_torch(
    service: Service, tmp_path: Path
) -> None:
    service.opened.set()
    script = tmp_path / "train.py"
    first = start(service, script, tmp_path / "a", 0, service.keys)
    assert first == {"threads": ["torchrelay prefetch"], "heavy": []}
    second = start(service, script, tmp_path / "b", 2, service.keys)
    assert second == first
    assert sorted(path.name for path in on_disk(tmp_path / "b")) == sorted(service.keys)
    with service.running.http() as http:
        assert http.get("/v1/stats").json()["hits"] == 4  # both starts said that theirs came early
    assert start(service, script, tmp_path / "c", 2, [], TORCHRELAY_PREFETCH="0")["threads"] == []
    assert start(service, script, tmp_path / "c", 2, [], TORCHRELAY_MODE="off")["threads"] == []


def test_a_gateway_that_is_gone_or_hangs_is_nobodys_trouble(service: Service, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    start(service, script, tmp_path / "a", 0, ["ab" * 32], TORCHRELAY_URL="http://127.0.0.1:1")
    nonsense = {**os.environ, "TORCHRELAY_URL": "nonsense"}
    done = subprocess.run(
        [sys.executable, "-c", "import torchrelay; torchrelay.enable()"],
        env=nonsense,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
    service.opened.set()
    start(service, script, tmp_path / "a", 0, service.keys)
    service.opened.clear()  # the fetch under way hangs when the process ends
    start(service, script, tmp_path / "b", 0, [])
