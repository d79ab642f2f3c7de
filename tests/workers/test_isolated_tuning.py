"""A search has what it needs in each form of isolation: processes for its candidates, and a way to ask and tell."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest
import torch
from forms import FORMS_OF_A_JOB, OFFERED, parameter, settings, warm_slot
from torchrelay.clients.capture import capture
from torchrelay.compiler import artifact, decoding, tuning, wire
from torchrelay.compiler.search_order import SearchOrder
from torchrelay.workers.messages import Done, Failed, Query, decode_answer
from torchrelay.workers.settings import ENGINE

SIZES = ((4, 48, 32), (4, 32, 64), (4, 48, 64))


def product() -> wire.GraphRequest:
    requests = []

    def backend(gm, examples):
        requests.append(capture(gm, examples, mode="max-autotune", options={}).request)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(torch.bmm, backend=backend)(torch.randn(SIZES[0]), torch.randn(SIZES[1]))
    return requests[0]


async def compiled(slot, request):
    """(manifest, what the search found)"""
    found = []
    async for body in slot.compile("j", wire.encode_request(request), "ab" * 32, 300, "one"):
        message = decode_answer(body)
        if isinstance(message, Failed):
            raise message.error()
        if isinstance(message, Query):
            question = decoding.from_msgpack(message.question, type=tuning.Question)
            entries = [question.entry] if isinstance(question, tuning.Found) else []
            found += entries
            await slot.reply("j", message.id, msgspec.msgpack.encode(tuning.Known(entries)))
        if isinstance(message, Done):
            return artifact.read_manifest(message.artifact), found
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    "form", [parameter(name, *([pytest.mark.slow] if name != "landlock" else [])) for name in FORMS_OF_A_JOB]
)
def test_candidates_are_measured_in_every_form(form, tmp_path):
    async def scenario():
        told = settings(tmp_path, (*FORMS_OF_A_JOB[form], "none"), engine=ENGINE, shared_dir=None)
        async with warm_slot(told) as (slot, ready):
            assert (set(FORMS_OF_A_JOB[form]) <= set(ready.isolation)) == OFFERED[form]
            manifest, (entry,) = await compiled(slot, product())
        assert (manifest.searched, manifest.recalled) == (1, 0)
        assert (entry.candidates, entry.failed) == (2, 0)
        assert manifest.verification.status == "passed"
        models = re.findall(r"^model name\s*:\s*(.+?)\s*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        assert entry.place.device in models or not models

    asyncio.run(scenario())


def order() -> tuple[SearchOrder, tuning.Task]:
    """A searcher for what `product` is compiled for, and its one problem."""
    request = product()
    x, w, out = (tuning.Operand("float32", size, tuning.contiguous(size)) for size in SIZES)
    problem = tuning.Problem("bmm", (x, w), out, (("precision", "highest"),))
    task = tuning.Task(id="t", problem=problem, exact=False)
    return SearchOrder(request.toolchain, request.target, request.ambient.threads), task


@pytest.mark.parametrize(
    "form", [parameter(name, *([pytest.mark.slow] if name != "landlock" else [])) for name in FORMS_OF_A_JOB]
)
def test_a_searcher_searches_in_every_form(form, tmp_path):
    told, task = order()
    heard = []

    def answered(question):
        heard.append(question)
        if isinstance(question, tuning.Next):
            first = sum(isinstance(each, tuning.Next) for each in heard) == 1
            return tuning.Work([task] if first else [], over=not first and not question.holding)
        return tuning.Known([])

    async def scenario():
        places = settings(tmp_path, (*FORMS_OF_A_JOB[form], "none"), engine=ENGINE, shared_dir=None)
        async with warm_slot(places) as (slot, _):
            async for body in slot.search("j", msgspec.msgpack.encode(told), 300, "one"):
                message = decode_answer(body)
                if isinstance(message, Failed):
                    raise message.error()
                if isinstance(message, Query):
                    question = decoding.from_msgpack(message.question, type=tuning.Question)
                    await slot.reply("j", message.id, msgspec.msgpack.encode(answered(question)))

    asyncio.run(scenario())
    (found,) = [each for each in heard if isinstance(each, tuning.Found)]
    assert (found.task, found.entry.candidates, found.entry.failed) == ("t", 2, 0)
    assert {each.candidate for each in heard if isinstance(each, tuning.Trying)} <= {
        timing.candidate for timing in found.timings
    }
    assert found.entry.error is not None
