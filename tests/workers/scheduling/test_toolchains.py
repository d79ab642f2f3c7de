"""Slots of one node run the Pythons of several environments: each job runs where its toolchain is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import sysconfig
import venv
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import engine
import msgspec
import pytest
from pool_parts import RAY_TOKEN, compile_when_idle
from torchrelay.compiler import decoding
from torchrelay.compiler.errors import CompileFailed, NoWorker
from torchrelay.compiler.request import schema
from torchrelay.workers.messages import JobFailed, decode_answer
from torchrelay.workers.pool import PoolSettings, WorkerPool
from torchrelay.workers.settings import SlotSettings
from torchrelay.workers.slot.actor import CompileSlot

ENGINE = Path(engine.__file__)
OTHER = msgspec.structs.replace(engine.TOOLCHAIN, torch="9.9.9")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment of its own: what torchrelay needs, and an engine that calls itself torch 9.9.9."""
    place = tmp_path_factory.mktemp("environments") / "other"
    venv.create(place, with_pip=False)
    packages = place / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # at the end of its path, and without this environment's own .pth files: torchrelay itself is not found there
    (packages / "needs.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (packages / "engine.py").write_text(ENGINE.read_text().replace('torch="0.0.0"', 'torch="9.9.9"'))
    return place / "bin" / "python"


@contextlib.asynccontextmanager
async def running(toolchains: tuple[str, ...]) -> AsyncIterator[WorkerPool]:
    settings = PoolSettings(
        cpu_slots=1, gpu_slots_per_gpu=0, engine="engine", ray_token=RAY_TOKEN, toolchains=toolchains
    )
    pool = WorkerPool(settings)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def where(pool: WorkerPool, toolchain: schema.Toolchain) -> dict[str, Any]:
    """What a job for this toolchain sees around it."""
    artifact = await compile_when_idle(
        pool,
        msgspec.json.encode({"do": "surroundings"}),
        key="key",
        toolchain=toolchain,
        target=engine.TARGET,
        deadline_seconds=60,
        on_progress=lambda *_: None,
    )
    return decoding.from_json(artifact, type=dict[str, Any])


def test_a_job_runs_in_the_environment_of_its_toolchain(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ENGINE.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    broken = "/no/such/python"

    async def scenario() -> None:
        async with running((str(other), broken)) as pool:
            own, others = await where(pool, engine.TOOLCHAIN), await where(pool, OTHER)
            assert (own["prefix"], others["prefix"]) == (sys.prefix, str(other.parents[1]))
            path = others["environment"]["PYTHONPATH"]
            assert str(ENGINE.parent) not in path and not set(path.split(os.pathsep)) & set(sys.path)
            assert "VIRTUAL_ENV" not in others["environment"]
            assert own["code"] == others["code"], "both run the service's own code"
            toolchains = {worker.toolchain.torch: worker.state for worker in pool.workers()}
            assert toolchains == {"0.0.0": "idle", "9.9.9": "idle", "": "starting"}
            nobodys = msgspec.structs.replace(OTHER, torch="1.2.3")
            with pytest.raises(NoWorker) as refused:
                await where(pool, nobodys)
            for there in ("torch 0.0.0", "torch 9.9.9", f"cannot start with {broken}"):
                assert there in refused.value.message

    asyncio.run(scenario())


@pytest.mark.parametrize("python", ["/no/such/python", "bare"])
def test_an_environment_that_lacks_something_is_named(python: str, tmp_path: Path) -> None:
    if python == "bare":
        venv.create(tmp_path / "bare", with_pip=False)
        python = str(tmp_path / "bare" / "bin" / "python")

    async def failure() -> CompileFailed:
        (tmp_path / "jobs").mkdir()
        jobs = str(tmp_path / "jobs")
        slot = CompileSlot(SlotSettings(worker="w", kind="cpu", jobs_root=jobs, python=python))
        answer = decode_answer(await slot.start())
        await slot.close()
        assert isinstance(answer, JobFailed)
        assert list((tmp_path / "jobs").iterdir()) == []
        error = answer.error()
        assert isinstance(error, CompileFailed)
        return error

    error = asyncio.run(failure())
    assert f"the worker cannot start with {python}: " in error.message
    assert f"{python} -c 'import torch, msgspec, cryptography'" in str(error)
