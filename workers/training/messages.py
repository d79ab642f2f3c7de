"""Messages between a job's driver, Ray Train's controller and the workers of its ranks."""

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
    """Where the ranks of one attempt meet. relay: the socket through which those of this node report; '': none.
    seconds: between two calls of the driver by a node."""

    attempt: int
    address: str
    port: int
    relay: str = ""
    seconds: float = 0.2


class RankReport(Struct, frozen=True):
    """Events of a rank: a list of TrainEvent, encoded. number: of this attempt's reports of the rank, from 1; a report
    that is sent again keeps it."""

    rank: int
    number: int
    events: bytes


class StopOrder(Struct, frozen=True):
    """The driver's answer to a rank. stop: the seconds in which the rank must end; below 0: it may go on."""

    stop: float = -1.0


def driver_name(job: str) -> str:
    """The name of the driver's actor; `job`: its name on nodes (node_messages.node_job_id)."""
    return f"train-{job}"
