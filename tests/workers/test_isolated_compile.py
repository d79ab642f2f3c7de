"""A real compile works in each form of isolation that this machine offers, and shares kernels and headers in it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from forms import FORMS_OF_A_JOB, OFFERED, parameter, settings, warm_slot
from service_parts import graph
from torchrelay.compiler import artifact, wire
from torchrelay.workers.messages import Done, Failed, decode_answer
from torchrelay.workers.settings import ENGINE

KEY = "ab" * 32


async def compiled(slot, ready, namespace):
    request = wire.unpack_request(graph(4096))
    request = msgspec.structs.replace(request, toolchain=ready.toolchain, target=ready.target)
    async for body in slot.compile("j", wire.encode_request(request), KEY, 300, namespace):
        message = decode_answer(body)
        if isinstance(message, Failed):
            raise message.error()
        if isinstance(message, Done):
            return artifact.read_manifest(message.artifact)
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    "form", [parameter(name, *([pytest.mark.slow] if name != "landlock" else [])) for name in FORMS_OF_A_JOB]
)
def test_a_compile_is_verified_and_its_kernels_are_its_namespaces(form, tmp_path):
    async def scenario():
        # headers stay where every other service of this user keeps them: one costs g++ ten seconds
        told = settings(tmp_path, (*FORMS_OF_A_JOB[form], "none"), engine=ENGINE, shared_dir=None)
        async with warm_slot(told) as (slot, ready):
            assert (set(FORMS_OF_A_JOB[form]) <= set(ready.isolation)) == OFFERED[form]
            assert ready.missing == ""
            first = await compiled(slot, ready, "one")
            assert first.verification.status == "passed"
            assert first.kernels_built == first.kernels > 0
            again = await compiled(slot, ready, "one")
            assert (again.kernels_built, again.kernels_reused) == (0, first.kernels)
            assert (await compiled(slot, ready, "other")).kernels_reused == 0

    asyncio.run(scenario())
