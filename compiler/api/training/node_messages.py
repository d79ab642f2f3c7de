"""What passes between the gateway and the nodes that run a training job."""

from __future__ import annotations

from msgspec import Struct

from .jobs import TrainSpec


class TrainOrder(Struct, frozen=True, kw_only=True):
    """What a node needs to run a job. package: the packed working directory's bytes. environment: what ranks get
    besides the spec's own: URL, token and public keys of the service. folder: where the job's files go, which all nodes
    see (logs, metrics, and its checkpoints where the spec names no place). resumes: how often the job was resumed after
    it had ended: a job that ended under this number is not run again."""

    job: str
    namespace: str
    spec: TrainSpec
    package: bytes
    environment: dict[str, str]
    folder: str
    resumes: int = 0


def node_job_id(namespace: str, job: str) -> str:
    """What nodes call a job: they run those of all namespaces, and who begins one may choose its id."""
    return job if namespace == "default" else f"{namespace}.{job}"


class CapturedGraphs(Struct, frozen=True, kw_only=True):
    """bodies: of codec.pack_request, of every graph of rank 0's first step. ended: how the script ended."""

    bodies: list[bytes]
    skipped: list[str] = []
    ended: str = ""
    log: str = ""
    """The last lines that the script wrote."""
