"""Messages between the gateway and the nodes that run a training job."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .jobs import TrainSpec


class TrainOrder(Struct, frozen=True, kw_only=True):
    """What a node needs to run a job. package: the packed working directory. environment: ranks' variables besides the
    spec's: URL, token and public keys of the service. folder: a folder for the job's files that all nodes see (logs,
    metrics, and checkpoints if the spec names no place for them). resumes: how often the job was resumed; a job that
    ended with this number is not run again."""

    job: str
    namespace: str
    spec: TrainSpec
    package: bytes
    environment: dict[str, str]
    folder: str
    resumes: int = 0


def node_job_id(namespace: str, job: str) -> str:
    """A job's name on nodes, which run jobs of all namespaces; clients may choose ids, so ids may repeat."""
    return job if namespace == "default" else f"{namespace}.{job}"


class CapturedGraphs(Struct, frozen=True, kw_only=True):
    """bodies: codec.pack_request of each graph of rank 0's first step. ended: how the script ended."""

    bodies: Annotated[list[bytes], Meta(max_length=10_000)]
    skipped: Annotated[list[str], Meta(max_length=10_000)] = []
    ended: str = ""
    log: str = ""
    """The script's last lines of output."""
