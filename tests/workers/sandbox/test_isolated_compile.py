"""A real compile works in each form of isolation that this machine offers, and shares kernels and headers in it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from forms import CONFINING, require, settings, warm_slot
from service_parts import graph
from torchrelay.compiler.artifact import container
from torchrelay.compiler.request import codec
from torchrelay.workers.fork_server.prestart import PrestartedServer
from torchrelay.workers.messages import JobDone, JobFailed, StageEvent, WorkerJob, decode_answer
from torchrelay.workers.settings import ENGINE

KEY = "ab" * 32


async def compiled(slot, ready, namespace, told=None):
    """The artifact's manifest; `told` takes the details of the job's events."""
    request = codec.unpack_request(graph(4096))
    request = msgspec.structs.replace(request, toolchain=ready.toolchain, target=ready.target)
    job = WorkerJob(KEY, codec.encode_request(request), 300, ready.target, namespace, holds_source=False)
    async for body in slot.compile("j", job):
        message = decode_answer(body)
        if isinstance(message, JobFailed):
            raise message.error()
        if isinstance(message, StageEvent) and told is not None:
            told.append(message.detail)
        if isinstance(message, JobDone):
            return container.read_manifest(message.artifact)
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if form != "landlock" else []) for form in CONFINING]
)
def test_a_compile_is_verified_and_its_kernels_are_its_namespaces(form, tmp_path):
    require(form)

    async def scenario():
        # headers stay where every other service of this user keeps them: one costs g++ ten seconds
        told = settings(tmp_path, (form, "none"), engine=ENGINE, shared_dir=None)
        async with warm_slot(told) as (slot, ready):
            assert form in ready.isolation
            assert ready.missing == ""
            first = await compiled(slot, ready, "one")
            assert first.verification.status == "passed"
            assert first.kernels_built == first.kernels > 0
            again = await compiled(slot, ready, "one")
            assert (again.kernels_built, again.kernels_reused) == (0, first.kernels)
            assert (await compiled(slot, ready, "other")).kernels_reused == 0

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("server", ["started", "adopted"])
def test_the_worker_makes_a_header_once_and_every_namespaces_jobs_read_it(server, tmp_path):
    def headers():
        return [(path.name, path.stat().st_ino) for path in (tmp_path / "shared").glob("*.gch")]

    async def scenario(early_server=None):
        events = []
        async with warm_slot(settings(tmp_path, engine=ENGINE, early_server=early_server)) as (slot, ready):
            await compiled(slot, ready, "one", events)
            made = headers()
            await compiled(slot, ready, "other", events)
        assert len(made) == 1
        assert headers() == made
        assert events.count("preparing C++ headers") == 1
        assert list(tmp_path.glob("kernels/*/*.gch")) == []

    if server == "started":
        asyncio.run(scenario())
    else:
        with PrestartedServer() as early:
            asyncio.run(scenario(early.early_server))
