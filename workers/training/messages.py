"""What a job's driver, Ray Train's controller and the ranks' workers tell each other, and how they find each other."""

from __future__ import annotations

from msgspec import Struct


class RankDevice(Struct, frozen=True):
    """A device that a rank holds: a node, and on it GPUs by Ray's ids; '' for its CPU."""

    node: str
    gpus: str


class JobReference(Struct, frozen=True):
    """How a worker finds its job's driver and files."""

    driver: str
    folder: str


class Rendezvous(Struct, frozen=True):
    """Where the ranks of one attempt meet."""

    attempt: int
    address: str
    port: int


class StopOrder(Struct, frozen=True):
    """The driver's answer to what it is told. stop: seconds in which the rank is to end; below 0: it may go on."""

    stop: float = -1.0


def driver_name(job: str) -> str:
    """Of the driver's actor; `job`: as nodes call it (node_messages.node_job_id)."""
    return f"train-{job}"
