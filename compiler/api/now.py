"""What a service does at the moment: `GET /now` answers Now, as JSON or as a page that renews itself."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .compiles import WorkerInfo


class CurrentCompile(Struct, frozen=True):
    """A compile of the namespace that runs or waits. target: of its code, '' if that is not known. stage, detail: its
    latest event. seconds: since it was queued. position: about where it stands in the queue of all namespaces, 0 once a
    worker has it."""

    key: str
    target: str
    stage: str
    detail: str
    seconds: float
    position: int


class CurrentJob(Struct, frozen=True):
    """A job of the namespace that has not ended. seconds: since it was created. progress: steps, or items by state."""

    kind: Literal["train", "tune"]
    id: str
    name: str
    state: str
    by: str
    seconds: float
    progress: str
    detail: str


class Now(Struct, frozen=True):
    """compiles: those that run, the oldest first, then those that wait; `more` of them are not listed. workers: of all
    namespaces, without their hosts for a token of one. warnings: parts of the service that keep it from compiling."""

    compiles: list[CurrentCompile]
    more: int
    jobs: list[CurrentJob]
    workers: list[WorkerInfo]
    warnings: list[str]
