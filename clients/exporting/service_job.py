"""Exports a model with a job of the service: starts the job, fetches and checks its files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...compiler import decoding
from ...compiler.api.training.jobs import TrainJob, TrainRequest, TrainSpec
from ...compiler.errors import ExportFailed, NotFound
from ..atomic_file import write_atomically
from ..gateway.jobs import TrainingJobsClient
from ..jobfiles.working_directory import pack_directory
from .options import JOB_SCHEME, META_FILE, ExportManifest, ExportOptions


def begin(
    trains: TrainingJobsClient,
    options: ExportOptions,
    directory: Path,
    *,
    cpus: float,
    requirements: Sequence[str],
) -> TrainJob:
    """A job of one rank, on a node with the target's device. `options.checkpoint` may be the name or id of a training
    job. Raises as TrainingJobsClient.begin."""
    options = msgspec.structs.replace(options, checkpoint=_checkpoint(trains, options.checkpoint, directory))
    spec = TrainSpec(
        name=f"export {options.function}"[:200],
        kind="export",
        arguments=[msgspec.json.encode(options).decode()],
        package=trains.store_package(pack_directory(directory).data),
        requirements=list(requirements),
        device="cuda" if "cuda" in options.targets else "cpu",
        cpus=cpus,
        retries=0,  # what is refused once is refused again; a lost node's job can be resumed
        compile="off",
        capture=False,
    )
    return trains.begin(TrainRequest(spec=spec))


def fetch(trains: TrainingJobsClient, job: str, folder: Path) -> ExportManifest:
    """Write the files of a finished job into `folder`, export.json last. Raises ExportFailed if one is damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = decoding.from_json(trains.file(job, META_FILE), type=ExportManifest)
    known = {file.name: file.digest for file in manifest.files}
    for file in sorted(trains.files(job), key=lambda file: file.name == META_FILE):
        data = trains.file(job, file.name)
        digest = hashlib.sha256(data).hexdigest()
        if digest != file.digest or digest != known.get(file.name, digest):
            raise ExportFailed(f"{file.name} has another digest than when it was made", hint="Try again")
        write_atomically(folder / file.name, data, mode=0o644)
    return manifest


def _checkpoint(trains: TrainingJobsClient, text: str, directory: Path) -> str:
    """The location for the node: a path in the working directory or on all nodes, a URL, or a job's checkpoints."""
    if not text or "://" in text or Path(text).is_absolute():
        return text
    if (directory / text).exists():
        return text
    try:
        job = trains.find(text)
    except NotFound:
        raise ExportFailed(
            f"{text} is neither in {directory} nor a training job",
            hint="Name a file of the working directory, a folder from / that all nodes see, or a job",
        ) from None
    return job.spec.checkpoints or f"{JOB_SCHEME}{job.id}"
