"""No room on the disk of a gateway, a client or a worker: nothing partial is ever visible, and it heals by itself.

RLIMIT_FSIZE stands in for a full disk: a file grows to the limit and then writes fail, as on a device that
runs out, without the right to mount one; and it can be lifted again from outside.
"""

from __future__ import annotations

import asyncio
import io
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from service_parts import TARGET, GatewayProcess, compiled, follow, graph, post
from torchrelay.clients.artifacts.disk_cache import DiskCache
from torchrelay.compiler.errors import CompileKilled
from torchrelay.service.base.budgets import Rate
from torchrelay.service.base.logs import LossyStream
from torchrelay.workers.messages import ForkServerReady, JobDone, JobFailed, WorkerJob, decode_answer
from torchrelay.workers.settings import JobLimits, SlotSettings
from torchrelay.workers.slot.actor import CompileSlot

FULL = 800
"""Bytes; below an artifact's."""


def fill_disk_of(pid: int, limit: int = FULL) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def free_disk_of(pid: int) -> None:
    fill_disk_of(pid, resource.RLIM_INFINITY)


@pytest.fixture
def start(settings: dict[str, Any]) -> Iterator[Callable[[], GatewayProcess]]:
    started: list[GatewayProcess] = []

    def start_one() -> GatewayProcess:
        changes = {"blob_inline_bytes": 0, "publish_retry_seconds": 0.1, "log_level": "info"}
        started.append(GatewayProcess({**settings, **changes}, 0.0))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()


def test_a_gateway_whose_disk_is_full_serves_what_it_has_and_compiles_again_when_there_is_room(
    start: Callable[[], GatewayProcess], settings: dict[str, Any]
) -> None:
    gateway = start()
    blobs = Path(settings["state_dir"]) / "blobs"

    def files() -> list[Path]:
        return [path for path in blobs.rglob("*") if path.is_file() and path.name != "installation"]

    with gateway.http() as http:
        good = compiled(http, graph(1))
        assert len(good) > FULL
        before = files()
        fill_disk_of(gateway.process.pid)
        for size in range(2, 6):
            key = post(http, graph(size)).json()["key"]
            *_, (_, stage, data) = follow(http, key)
            assert (stage, data["error"]["code"]) == ("failed", "unavailable")
            assert http.get(f"/v1/artifacts/{key}").status_code == 404
            assert files() == before
        assert post(http, graph(1)).content == good
        free_disk_of(gateway.process.pid)
        fresh = compiled(http, graph(2))
        assert sorted(path.read_bytes() for path in files()) == sorted([good, fresh])
        assert http.get("/v1/stats").json()["entries"] == 2


CLIENT = """
import resource, sys, pathlib
from torchrelay.clients.artifacts.disk_cache import DiskCache
root, key, data = pathlib.Path(sys.argv[1]), "ab" * 32, bytes(range(256)) * 100
cache = DiskCache(root, 1 << 20)
assert cache.put("cd" * 32, b"small before")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
assert not cache.put(key, data)
assert cache.get(key) is None
assert cache.get("cd" * 32) == b"small before"
print([str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.name != ".lock"], flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert cache.put(key, data)
assert cache.get(key) == data
"""


def test_a_client_whose_disk_is_full_keeps_nothing_partial_and_keeps_again_when_there_is_room(
    tmp_path: Path,
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CLIENT, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str([f"artifacts/cd/{'cd' * 32}"])
    assert DiskCache(tmp_path, 1 << 20).get("ab" * 32) == bytes(range(256)) * 100


def test_an_entry_that_was_there_survives_a_put_that_found_no_room(tmp_path: Path) -> None:
    program = (
        CLIENT.replace('"cd" * 32, b"small before"', 'key, b"old"')
        .replace("assert cache.get(key) is None\n", 'assert cache.get(key) == b"old"\n')
        .replace('assert cache.get("cd" * 32) == b"small before"\n', "")
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def jobs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "parts"))
    return tmp_path


async def _artifact(slot: CompileSlot, size: int) -> bytes:
    async for body in slot.compile("j", WorkerJob("key", msgspec.json.encode(size), 20, TARGET)):
        message = decode_answer(body)
        if isinstance(message, JobFailed):
            raise message.error()
        assert isinstance(message, JobDone)
        return message.artifact
    raise AssertionError("no answer")


def _slot(jobs_root: Path) -> CompileSlot:
    settings = SlotSettings(
        worker="w",
        kind="cpu",
        engine="faulty_engine",
        jobs_root=str(jobs_root),
        limits=JobLimits(file_bytes=100_000),
    )
    return CompileSlot(settings)


def test_a_job_that_finds_no_room_is_no_fault_of_its_graph_and_leaves_nothing(jobs_root: Path) -> None:
    async def scenario() -> None:
        slot = _slot(jobs_root)
        ready = decode_answer(await slot.start())
        assert isinstance(ready, ForkServerReady)
        try:
            with pytest.raises(CompileKilled, match="File too large"):  # not CompileFailed: not remembered
                await _artifact(slot, 1_000_000)
            assert list(Path(ready.jobs_dir).iterdir()) == []
            assert await _artifact(slot, 10_000) == bytes(10_000)
        finally:
            await slot.close()
        assert list(jobs_root.glob("torchrelay-jobs-*")) == []

    asyncio.run(scenario())


def test_a_worker_that_cannot_make_a_jobs_folder_says_so_and_works_again_when_it_can(jobs_root: Path) -> None:
    async def scenario() -> None:
        slot = _slot(jobs_root)
        ready = decode_answer(await slot.start())
        assert isinstance(ready, ForkServerReady)
        folder = Path(ready.jobs_dir)
        try:
            folder.rmdir()
            folder.write_text("no folder, so that nothing can be made in it")
            with pytest.raises(CompileKilled, match="folder"):
                await _artifact(slot, 10)
            folder.unlink()
            folder.mkdir()
            assert await _artifact(slot, 10) == bytes(10)
            assert decode_answer(await slot.start()).pid == ready.pid
        finally:
            await slot.close()

    asyncio.run(scenario())


def test_a_log_whose_stream_was_closed_costs_its_lines_and_no_more() -> None:
    stream = io.StringIO()
    log = LossyStream(stream, Rate(100), "json")
    log.write("kept")
    stream.close()
    assert log.write("lost") == 4
    log.flush()
