"""The forms of isolation, and slots that may use some of them.

`require(form)` skips a test where this machine does not offer the form, or fails it with RELAY_TEST_FORMS=all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from torchrelay.workers.messages import ForkServerReady, JobFailed, decode_answer
from torchrelay.workers.settings import FORMS, SlotSettings
from torchrelay.workers.slot.actor import CompileSlot

CONFINING = ("namespaces", "landlock")
"""The forms that hide files and network."""


def settings(folder, forms=FORMS, **others):
    (folder / "jobs").mkdir(exist_ok=True)
    given = {
        "worker": f"w-{os.getpid()}",
        "kind": "cpu",
        "engine": "intruder",
        "jobs_root": str(folder / "jobs"),
        "kernels_dir": str(folder / "kernels"),
        "shared_dir": str(folder / "shared"),
    }
    return SlotSettings(forms=forms, **given | others)


@contextlib.asynccontextmanager
async def warm_slot(told: SlotSettings) -> AsyncIterator[tuple[CompileSlot, ForkServerReady]]:
    slot = CompileSlot(told)
    ready = decode_answer(await slot.start())
    try:
        if isinstance(ready, JobFailed):
            raise ready.error()
        assert isinstance(ready, ForkServerReady)
        yield slot, ready
    finally:
        await slot.close()


def require(form):
    """Skip the test, or fail it, unless a slot on this machine isolates its jobs by `form`."""
    if reason := _why_not(form):
        message = f"isolation by {form!r} is not offered here: {reason}"
        if os.environ.get("RELAY_TEST_FORMS") == "all":
            pytest.fail(f"{message} (RELAY_TEST_FORMS=all)")
        pytest.skip(message)


@functools.cache
def _why_not(form):
    """'' if it is offered, else what a slot that may use it says. Starts the slot once per process."""

    async def isolation(folder):
        async with warm_slot(settings(folder, (form, "none"))) as (_, ready):
            return ready.isolation

    with tempfile.TemporaryDirectory() as folder, _standard_error() as written:
        found = asyncio.run(isolation(Path(folder)))
    return "" if form in found else "".join(written).strip() or f"a slot has {', '.join(found)}"


@contextlib.contextmanager
def _standard_error():
    """A list that holds, afterwards, what this process and its children have written."""
    written = []
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            written.append(file.read())
