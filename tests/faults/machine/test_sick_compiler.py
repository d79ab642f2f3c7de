"""A g++ that hangs, eats memory or cannot start its parts: a typed answer, no process left, the slot usable again.

The real pipeline in a real slot; only the g++ on its path is a script that does as a file says.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from service_parts import graph
from torchrelay.compiler.artifact import container, manifest
from torchrelay.compiler.errors import CompileKilled, CompileTimeout
from torchrelay.compiler.request import codec
from torchrelay.workers.messages import ForkServerReady, JobDone, JobFailed, WorkerJob, decode_answer
from torchrelay.workers.settings import JobLimits, SlotSettings
from torchrelay.workers.slot.actor import CompileSlot
from waiting import until

PAST_DEADLINE_SECONDS = 5.0
SLACK_SECONDS = 5.0
"""On top, for a machine with much else to do."""
KEY = "ab" * 32
SICK = "the sick compiler"
SHIM = """#!/bin/bash
how=$(cat {mood})
[ "$how" = well ] && exec {real} "$@"
[ "$how" = broken ] && exec {real} -wrapper /nowhere/cc1plus "$@"
[ "$how" = hung ] && exec -a "{sick}" sleep 1000
exec {python} -c '# {sick}
import time
held = []
while True:
    held.append(bytearray(b"x" * (32 << 20)))
    time.sleep(0.02)'
"""


class SickCompiler:
    """A `g++` first on the path of whatever starts now, and what it is to do."""

    def __init__(self, folder: Path) -> None:
        real = shutil.which("g++")
        assert real is not None
        self.folder = folder / "bin"
        self.folder.mkdir()
        self._mood = self.folder / "mood"  # an isolated job sees the folders of its path
        path = self.folder / "g++"
        path.write_text(SHIM.format(mood=self._mood, real=real, sick=SICK, python=sys.executable))
        path.chmod(0o755)
        self.become("well")

    def become(self, mood: str) -> None:
        self._mood.write_text(mood)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SickCompiler:
    made = SickCompiler(tmp_path)
    monkeypatch.setenv("PATH", str(made.folder), prepend=":")
    monkeypatch.delenv("CXX", raising=False)
    return made


def _sick(server: int) -> set[int]:
    """The sick compilers below `server`, as this process sees them, not as a job does."""
    found = set()
    for process in psutil.Process(server).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if SICK in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def _alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def _compile(slot: CompileSlot, ready: ForkServerReady, seconds: float) -> manifest.Manifest:
    request = codec.unpack_request(graph(4096))
    request = msgspec.structs.replace(request, toolchain=ready.toolchain, target=ready.target)
    job = WorkerJob(KEY, codec.encode_request(request), seconds, ready.target, holds_source=False)
    async for body in slot.compile("j", job):
        message = decode_answer(body)
        if isinstance(message, JobFailed):
            raise message.error()
        if isinstance(message, JobDone):
            return container.read_manifest(message.artifact)
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("mood", "seconds", "error", "words"),
    [
        ("hung", 8.0, CompileTimeout, "deadline"),
        ("hungry", 60.0, CompileKilled, "limit of 1536 MiB"),
        ("broken", 60.0, CompileKilled, "could not do its work: g\\+\\+: fatal error: cannot execute"),
    ],
)
def test_a_sick_compiler_costs_one_typed_answer_and_the_slot_is_usable_again(
    mood: str, seconds: float, error: type[Exception], words: str, compiler: SickCompiler, tmp_path: Path
) -> None:
    async def scenario() -> None:
        limits = JobLimits(memory_bytes=1536 << 20)
        slot = CompileSlot(SlotSettings(worker="w", kind="cpu", jobs_root=str(tmp_path), limits=limits))
        try:
            ready = decode_answer(await slot.start())
            assert isinstance(ready, ForkServerReady)
            await _compile(slot, ready, 120)  # after the compile that warms the server up
            compiler.become(mood)
            began = time.monotonic()
            compiling = asyncio.create_task(_compile(slot, ready, seconds))
            started = set() if mood == "broken" else await until(lambda: _sick(ready.pid), 60)
            with pytest.raises(error, match=words):
                await compiling
            took = time.monotonic() - began
            print(f"{mood} g++: answered after {took:.1f} s, deadline {seconds:g} s")
            assert took < seconds + PAST_DEADLINE_SECONDS + SLACK_SECONDS
            assert not any(_alive(pid) for pid in started)
            assert list(Path(ready.jobs_dir).iterdir()) == []
            compiler.become("well")
            assert (await _compile(slot, ready, 120)).kernels > 0
        finally:
            await slot.close()

    asyncio.run(scenario())
