"""Makes the request for a training job, after its working directory has been sent."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ....compiler.api.training.jobs import TrainRequest
from ....compiler.errors import BadTrainJob
from ...gateway.training_jobs import TrainingJobsClient
from ...jobfiles.train_file import TrainFileJob
from ...jobfiles.working_directory import IGNORE_FILE, pack_directory


def train_request(job: TrainFileJob, folder: Path, trains: TrainingJobsClient) -> TrainRequest:
    """Sends the working directory and returns the job's request. folder: `directory` is relative to it. Raises
    BadTrainJob, with the line; LimitExceeded for a directory that is too large."""
    where = folder / Path(job.directory).expanduser()
    if not where.is_dir():
        raise _wrong(job, "package", f"directory is {job.directory[:200]!r}, and {where} is no folder")
    script = job.spec.script
    if script and not (where / script).is_file():
        raise _wrong(job, "script", f"script is {script[:200]!r}, and {where} has no such file")
    package = pack_directory(where)
    if script and script not in package.names:
        raise _wrong(job, "script", f"script is {script[:200]!r}, which {IGNORE_FILE} excludes")
    spec = msgspec.structs.replace(job.spec, package=trains.store_package(package.data))
    return TrainRequest(spec=spec, file=job.file[-300:], lines=job.lines)


def _wrong(job: TrainFileJob, field: str, message: str) -> BadTrainJob:
    line = job.lines.get(field, 0)
    at = f"{job.file}, line {line}" if line else job.file or "the command line"
    return BadTrainJob(f"{at}: {message}")
