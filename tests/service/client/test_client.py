"""The client's transport against the real gateway: what each side says is what the other understands."""

from __future__ import annotations

import base64
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from service_parts import TOKEN, ArtifactPool, GatewayProcess, Running, graph
from torchrelay.clients.artifacts.disk_cache import DiskCache
from torchrelay.clients.artifacts.verification import TrustStore
from torchrelay.clients.gateway import compile_client
from torchrelay.clients.gateway.compile_client import FetchResult, GatewayClient
from torchrelay.clients.gateway.event_stream import EventStream
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler import errors
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.signing import Trust
from torchrelay.compiler.request import codec, key


def client(url: str, **changes: Any) -> GatewayClient:
    return GatewayClient(
        ClientSettings(**{"url": url, "token": TOKEN, "cache_dir": Path("/nonexistent"), **changes})
    )


def compile_graph(gateway: GatewayClient, body: bytes, **more: Any) -> FetchResult:
    name = key.key_of(codec.unpack_request(body))
    return gateway.submit(body, name, **{"cache_only": False, "deadline": 30.0, **more}).result()


def call_at_each_event(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    read = EventStream.read

    def observed(stream: EventStream) -> Generator[httpx2.ServerSentEvent, None, None]:
        for event in read(stream):
            call()
            yield event

    monkeypatch.setattr(EventStream, "read", observed)


def test_a_miss_then_a_hit_of_the_same_signed_bytes(gateway: Running) -> None:
    body = graph()
    with client(gateway.url) as mine:
        first = compile_graph(mine, body)
        second = compile_graph(mine, body)
        info = mine.info()
    assert (first.hit, first.coalesced, second.hit) == (False, False, True)
    assert first.data == second.data
    trusted = [Ed25519PublicKey.from_public_bytes(base64.b64decode(text)) for text in info["public_keys"]]
    name = key.key_of(codec.unpack_request(body))
    assert container.verify(first.data, Trust.of(trusted), key=name).manifest.key == name


def test_who_asks_meanwhile_is_coalesced(start_gateway: Callable[..., Running]) -> None:
    running = start_gateway(ArtifactPool(seconds=0.5))
    found: list[FetchResult] = []
    with client(running.url) as mine:
        threads = [
            threading.Thread(target=lambda: found.append(compile_graph(mine, graph()))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = mine.stats()
    assert len({result.data for result in found}) == 1
    assert sorted(result.coalesced for result in found) == [False, True, True, True]
    assert (stats["compiles"], stats["coalesced"], stats["requests"]) == (1, 3, 4)


def test_a_clock_that_jumps_by_an_hour_changes_nothing(
    start_gateway: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_gateway(ArtifactPool(seconds=0.5))
    true, jumps = time.time, itertools.cycle((0.0, 3600.0, -3600.0))
    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))
    disk = DiskCache(tmp_path, 1 << 20, trim_every=1)
    with client(running.url) as mine:
        found = [compile_graph(mine, graph(size)) for size in (1, 2, 1)]
        trust = TrustStore(
            ClientSettings(cache_dir=tmp_path, public_keys=tuple(mine.info()["public_keys"])),
        )
        trust.learn(mine.trust_document())
    assert [result.hit for result in found] == [False, False, True]
    for result in found:
        name = container.read_manifest(result.data).key
        assert disk.put(name, result.data)
        assert container.verify(disk.get(name) or b"", trust.trust(), key=name).manifest.key == name


def test_the_small_calls_answer_in_the_types_they_promise(gateway: Running) -> None:
    with client(gateway.url) as mine:
        assert mine.parts() == {"redis": "ok", "workers": "ok"}
        assert [worker.id for worker in mine.workers()] == ["w0"]
        mine.report("no_worker")
        assert mine.stats()["fallbacks"] == {"no_worker": 1}


def test_a_wait_goes_on_through_another_gateway_after_the_first_was_killed(
    start_process: Callable[[float], GatewayProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same port, as behind a load balancer: the second gateway takes the compile over."""
    process = start_process(2.0)
    seen = threading.Event()
    call_at_each_event(monkeypatch, seen.set)
    found: list[FetchResult] = []

    def ask() -> None:
        with client(process.url) as mine:
            found.append(compile_graph(mine, graph()))

    asking = threading.Thread(target=ask)
    asking.start()
    assert seen.wait(20)
    process.kill()
    again = subprocess.Popen(process.process.args)
    asking.join()
    again.kill()
    again.wait()
    assert found[0].data.startswith(container.MAGIC)


def test_a_gateway_that_was_killed_is_noticed_while_waiting(
    start_process: Callable[[float], GatewayProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_client, "RECONNECT_SECONDS", 0.5)
    process = start_process(600.0)
    killer = threading.Timer(0.5, process.kill)
    killer.start()
    with client(process.url) as mine, pytest.raises(errors.GatewayUnreachable):
        compile_graph(mine, graph(), deadline=600.0)
    killer.join()


def test_a_gateway_that_stands_still_is_noticed_while_waiting(
    start_process: Callable[[float], GatewayProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_client, "RECONNECT_SECONDS", 0.5)
    monkeypatch.setattr(compile_client, "POLL_SECONDS", 0.5)
    process = start_process(600.0)
    call_at_each_event(monkeypatch, lambda: process.process.send_signal(signal.SIGSTOP))
    with client(process.url, idle_timeout=1.5) as mine, pytest.raises(errors.GatewayUnreachable):
        compile_graph(mine, graph(), deadline=600.0)
