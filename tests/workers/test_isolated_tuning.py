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
from torchrelay.compiler import artifact, tuning, wire
from torchrelay.workers.messages import Done, Failed, Query, decode_answer
from torchrelay.workers.settings import ENGINE


def product() -> wire.GraphRequest:
    requests = []

    def backend(gm, examples):
        requests.append(capture(gm, examples, mode="max-autotune", options={}).request)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(torch.bmm, backend=backend)(torch.randn(4, 48, 32), torch.randn(4, 32, 64))
    return requests[0]


async def compiled(slot, request):
    """(manifest, what the search found)"""
    found = []
    async for body in slot.compile("j", wire.encode_request(request), "ab" * 32, 300, "one"):
        message = decode_answer(body)
        if isinstance(message, Failed):
            raise message.error()
        if isinstance(message, Query):
            question = msgspec.msgpack.decode(message.question, type=tuning.Question)
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
