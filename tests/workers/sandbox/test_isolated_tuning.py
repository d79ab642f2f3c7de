"""A search has what it needs in each form of isolation: processes for its candidates, and a way to ask and tell."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest
import torch
from forms import CONFINING, require, settings, warm_slot
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning.jobs import SearchJobSpec
from torchrelay.compiler.artifact import container
from torchrelay.compiler.graph.capture import capture
from torchrelay.compiler.request import codec, schema
from torchrelay.compiler.tuning import queries, records
from torchrelay.workers.messages import JobDone, JobFailed, JobQuery, WorkerJob, decode_answer
from torchrelay.workers.settings import ENGINE

SIZES = ((4, 48, 32), (4, 32, 64), (4, 48, 64))


def product() -> schema.GraphRequest:
    requests = []

    def backend(gm, examples):
        requests.append(capture(gm, examples, mode="max-autotune", options={}).request)
        return gm.forward

    torch.compiler.reset()
    torch.compile(torch.bmm, backend=backend)(torch.randn(SIZES[0]), torch.randn(SIZES[1]))
    return requests[0]


async def compiled(slot, request):
    """(manifest, what the search found)"""
    found = []
    job = WorkerJob("ab" * 32, codec.encode_request(request), 300, request.target, "one", holds_source=False)
    async for body in slot.compile("j", job):
        message = decode_answer(body)
        if isinstance(message, JobFailed):
            raise message.error()
        if isinstance(message, JobQuery):
            question = decoding.from_msgpack(message.question, type=queries.TuningQuery)
            entries = [question.entry] if isinstance(question, queries.SearchResult) else []
            found += entries
            await slot.reply("j", message.id, msgspec.msgpack.encode(queries.KnownEntries(entries)))
        if isinstance(message, JobDone):
            return container.read_manifest(message.artifact), found
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if form != "landlock" else []) for form in CONFINING]
)
def test_candidates_are_measured_in_every_form(form, tmp_path):
    require(form)

    async def scenario():
        told = settings(tmp_path, (form, "none"), engine=ENGINE, shared_dir=None)
        async with warm_slot(told) as (slot, ready):
            assert form in ready.isolation
            manifest, (entry,) = await compiled(slot, product())
        assert (manifest.searched, manifest.recalled) == (1, 0)
        assert (entry.candidates, entry.failed) == (2, 0)
        assert manifest.verification.status == "passed"
        models = re.findall(r"^model name\s*:\s*(.+?)\s*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        assert entry.place.device in models or not models

    asyncio.run(scenario())


def order() -> tuple[SearchJobSpec, queries.TuningTask]:
    """A searcher for what `product` is compiled for, and its one problem."""
    request = product()
    x, w, out = (records.Operand("float32", size, records.contiguous(size)) for size in SIZES)
    problem = records.Problem("bmm", (x, w), out, (("precision", "highest"),))
    task = queries.TuningTask(id="t", problem=problem, exact=False)
    return SearchJobSpec(request.toolchain, request.target, request.ambient.threads), task


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if form != "landlock" else []) for form in CONFINING]
)
def test_a_searcher_searches_in_every_form(form, tmp_path):
    require(form)

    told, task = order()
    heard = []

    def answered(question):
        heard.append(question)
        if isinstance(question, queries.TaskRequest):
            first = sum(isinstance(each, queries.TaskRequest) for each in heard) == 1
            return queries.TaskBatch([task] if first else [], over=not first and not question.holding)
        return queries.KnownEntries([])

    async def scenario():
        places = settings(tmp_path, (form, "none"), engine=ENGINE, shared_dir=None)
        async with warm_slot(places) as (slot, _):
            job = WorkerJob("search", msgspec.msgpack.encode(told), 300, told.target, "one", work="search")
            async for body in slot.search("j", job):
                message = decode_answer(body)
                if isinstance(message, JobFailed):
                    raise message.error()
                if isinstance(message, JobQuery):
                    question = decoding.from_msgpack(message.question, type=queries.TuningQuery)
                    await slot.reply("j", message.id, msgspec.msgpack.encode(answered(question)))

    asyncio.run(scenario())
    (found,) = [each for each in heard if isinstance(each, queries.SearchResult)]
    assert (found.task, found.entry.candidates, found.entry.failed) == ("t", 2, 0)
    assert {each.candidate for each in heard if isinstance(each, queries.CandidateAttempt)} <= {
        timing.candidate for timing in found.timings
    }
    assert found.entry.error is not None
