"""Checks a request for a training job and makes the job's record. A refusal names the line of the job's file."""

from __future__ import annotations

import secrets
import time

from ....compiler.api.training.jobs import TrainJob, TrainRequest, TrainSpec
from ....compiler.api.training.rules import broken_rules
from ....compiler.errors import BadTrainJob, Unavailable
from ....workers.pool import why_no_room
from ...access.tokens import Grant
from ...compile.registry import DispatcherRegistry
from .files import TrainingFiles
from .progress import TrainingJobProgress
from .records import TrainingJobRecord

_OURS = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"}
    | {"ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
    | {f"TORCHRELAY_{name}" for name in ("URL", "TOKEN", "TOKEN_FILE", "PUBLIC_KEYS", "NAMESPACE")}
)
_OURS_BEGIN = ("TORCHELASTIC_", "TORCHRELAY_TRAIN_")


class TrainingJobAdmission:
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
    for path, problem in broken_rules(spec):
        raise BadTrainJob(f"{_at(request, str(path[0]))}{problem}")
    if spec.script and not spec.package:
        raise BadTrainJob(f"{_at(request, 'script')}a script comes with its packed working directory")
    for name in spec.environment:
        if name in _OURS or name.startswith(_OURS_BEGIN):
            raise BadTrainJob(f"{_at(request, 'environment')}{name} is set by the service for each rank")


def _at(request: TrainRequest, field: str) -> str:
    named, line = request.file or "the job", request.lines.get(field, 0)
    return f"{named}, line {line}: " if line else f"{named}: "
