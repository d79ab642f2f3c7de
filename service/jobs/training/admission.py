"""Checks a request for a training job and makes the job's record. A refusal names the line of the job's file."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from ....compiler.api.training.jobs import TrainJob, TrainRequest, TrainSpec
from ....compiler.errors import BadTrainJob, Unavailable
from ....workers.pool import why_no_room
from ...access.tokens import Grant
from ...compile.registry import DispatcherRegistry
from .files import TrainingFiles
from .progress import TrainingJobProgress
from .records import TrainingJobRecord

STORES = ("s3", "gs", "az", "file")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_OURS = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"}
    | {"ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
    | {
        "TORCHRELAY_URL",
        "TORCHRELAY_TOKEN",
        "TORCHRELAY_TOKEN_FILE",
        "TORCHRELAY_PUBLIC_KEYS",
        "TORCHRELAY_NAMESPACE",
    }
)
_OURS_BEGIN = ("TORCHELASTIC_", "TORCHRELAY_TRAIN_")


class TrainingJobAdmission:
    """Admits the training jobs of one namespace."""

    def __init__(self, store: TrainingFiles, registry: DispatcherRegistry) -> None:
        self._store = store
        self._registry = registry

    async def admit(self, request: TrainRequest, grant: Grant) -> TrainingJobRecord:
        """Raises BadTrainJob with the line of the job's file; Unavailable while no node is known; RedisError."""
        check(request)
        spec = request.spec
        if spec.package and not await self._store.has_package(spec.package):
            raise BadTrainJob(
                f"{_at(request, 'package')}package {spec.package[:12]} is not here",
                hint="Send the packed working directory first: POST /v1/trains/packages",
            )
        if why := await self._why_no_room(spec):
            wanted = "workers" if "worker" in why or "rank" in why else "device"
            raise BadTrainJob(
                f"{_at(request, wanted)}{why}",
                hint="Ask for less, or add nodes: `torchrelay worker`",
            )
        job = TrainJob(
            id=request.id or secrets.token_hex(8),
            spec=spec,
            state="waiting",
            by=grant.name,
            created=time.time(),
            file=request.file,
        )
        return TrainingJobRecord(job=job, progress=TrainingJobProgress(), source=grant.source)

    async def _why_no_room(self, spec: TrainSpec) -> str:
        """Why no dispatcher's nodes could ever hold the job's ranks, even if all were idle; '' if they could."""
        dispatchers = [each for each in await self._registry.dispatchers() if not each.problem]
        if not dispatchers:
            raise Unavailable("the workers are not there yet")
        reasons = [why_no_room(spec, each.nodes) for each in dispatchers]
        return "" if "" in reasons else reasons[0]


def check(request: TrainRequest) -> None:
    """Check what needs no service. Raises BadTrainJob."""
    spec = request.spec
    if bool(spec.script) + bool(spec.function) != 1 and (spec.kind == "train" or spec.function):
        field = "function" if spec.function else "script"
        raise BadTrainJob(f"{_at(request, field)}a job runs either `script` or `function`")
    if spec.script and not _is_inside(spec.script):
        raise BadTrainJob(
            f"{_at(request, 'script')}script {spec.script!r} is no path below the working directory",
            hint="Name it relative to the working directory",
        )
    if spec.function and not _FUNCTION.fullmatch(spec.function):
        raise BadTrainJob(f"{_at(request, 'function')}function {spec.function!r} is not `module:function`")
    if spec.script and not spec.package:
        raise BadTrainJob(f"{_at(request, 'script')}a script comes with its packed working directory")
    if not spec.name.isprintable():
        raise BadTrainJob(f"{_at(request, 'name')}a job's name is one line")
    if spec.min_workers > spec.workers:
        raise BadTrainJob(
            f"{_at(request, 'min_workers')}min_workers is {spec.min_workers}, more than {spec.workers} workers"
        )
    if spec.profile is not None and spec.profile.first >= spec.profile.last:
        raise BadTrainJob(f"{_at(request, 'profile')}the profile's steps end before they begin")
    if spec.profile is not None and max(spec.profile.ranks) >= spec.workers:
        raise BadTrainJob(f"{_at(request, 'profile')}there is no rank {max(spec.profile.ranks)}")
    for name in spec.environment:
        if name in _OURS or name.startswith(_OURS_BEGIN):
            raise BadTrainJob(f"{_at(request, 'environment')}{name} is set by the service for each rank")
    for text in (*spec.arguments, *spec.environment.values(), *spec.requirements, spec.checkpoints):
        if "\0" in text:
            raise BadTrainJob(f"{_at(request, '')}a text holds a zero byte")
    _check_checkpoints(request, spec)


def _check_checkpoints(request: TrainRequest, spec: TrainSpec) -> None:
    place = spec.checkpoints
    if not place:
        return
    scheme, separator, _ = place.partition("://")
    if separator:
        try:
            parts = urlsplit(place)
        except ValueError:
            parts = None
        if scheme in STORES and parts is not None and (parts.netloc or scheme == "file"):
            return
    elif place.startswith("/"):
        return
    raise BadTrainJob(
        f"{_at(request, 'checkpoints')}checkpoints {place!r} is no place for them",
        hint=f"Name a folder that all nodes see, from /, or the URL of a store: {', '.join(STORES)}",
    )


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and path.isprintable() and bool(parts.parts)


def _at(request: TrainRequest, field: str) -> str:
    named, line = request.file or "the job", request.lines.get(field, 0)
    return f"{named}, line {line}: " if line else f"{named}: "
