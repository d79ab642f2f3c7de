"""The forms of isolation, and which of them this machine offers: found out by starting a slot that may use no other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from torchrelay.workers.messages import ForkServerReady, JobFailed, decode_answer
from torchrelay.workers.settings import FORMS, SlotSettings
from torchrelay.workers.slot.actor import CompileSlot

FORMS_OF_A_JOB = {
    "bubblewrap and namespaces": ("bubblewrap", "namespaces"),
    "bubblewrap and landlock": ("bubblewrap", "landlock"),
    "namespaces": ("namespaces",),
    "landlock": ("landlock",),
}


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


def _offered(forms):
    async def ask(folder):
        async with warm_slot(settings(folder, (*forms, "none"))) as (_, ready):
            return set(forms) <= set(ready.isolation)

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(ask(Path(folder)))


OFFERED = {name: _offered(forms) for name, forms in FORMS_OF_A_JOB.items()}


def parameter(name, *marks):
    """One form as a test's parameter; its id says if this machine does not offer it."""
    return pytest.param(
        name, id=f"{name.replace(' ', '-')}{'' if OFFERED[name] else '-not-offered-here'}", marks=marks
    )
