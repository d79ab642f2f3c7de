"""Starts the drivers of training jobs on the cluster's nodes, finds them, and calls them for the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...compiler import decoding
from ...compiler.api.training.events import NumberedEvent, read_events
from ...compiler.api.training.jobs import TrainSpec
from ...compiler.api.training.node_messages import CapturedGraphs, TrainOrder, node_job_id
from ...compiler.errors import CompileTimeout, Unavailable
from ..messages import WorkerLost
from ..ray_internals import free_resources, remove_placement_groups_of_the_dead
from ..scheduling.ray_cluster import RayCluster
from ..scheduling.ray_resources import ACTOR_SHARE, NAMESPACE, OFFER
from .capture import CaptureActor
from .job_driver import JobDriverActor
from .messages import RankDevice, driver_name

log = logging.getLogger(__name__)

T = TypeVar("T")

NAMED_ACTORS = (JobDriverActor,)
"""The classes of the actors that are called by name."""
_ANSWER_SECONDS = 30.0
"""A driver that is being started again does not answer in time; the caller tries again."""
ANSWER_BYTES = 32 << 20
"""The most that a driver sends at once; an honest one sends 8 MiB and an event."""
_CAPTURE_BYTES = 256 << 20
_CLOSE_SECONDS = 3.0
"""A driver that does not close in time is killed; its resources are freed all the same."""


class JobDrivers:
    """The training jobs on one cluster. job: see node_messages.node_job_id."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    async def begin(self, train_order: TrainOrder) -> None:
        """Start a driver for the job, unless it has one; the driver does not need this process any more.

        A lost driver is started again on another node. Its job goes on from the last checkpoint, and its events from
        the last number in the order's folder. A job that has ended runs again only with another number of resumes.
        Raises Unavailable; WorkerLost if the driver is lost meanwhile.
        """
        driver = await self._call(lambda: _make(train_order))
        await self._answer(driver.begin.remote(msgspec.msgpack.encode(train_order)))

    async def warm(self, train_order: TrainOrder) -> None:
        """Import PyTorch on the nodes that are likely to get the job's ranks, before they do. Raises Unavailable;
        WorkerLost if the driver is lost meanwhile."""
        driver = await self._call(lambda: _make(train_order))
        await self._answer(driver.warm.remote(msgspec.msgpack.encode(train_order)))

    async def events(self, job: str, after: int, seconds: float) -> list[NumberedEvent]:
        """The job's events past number `after`, at most 1000; waits up to `seconds` for the first. The driver may drop
        all up to `after`. The last event of a job is a StateChanged to done, failed or cancelled. Raises WorkerLost if
        the job has no driver: `begin` makes one; Unavailable if it does not answer, as while it is started again."""
        driver = await self._find(job)
        if driver is None:
            raise WorkerLost(f"job {job} has no driver", hint="Begin it again")
        events = await self._answer(driver.events.remote(after, seconds), seconds + _ANSWER_SECONDS)
        if events is None:
            raise WorkerLost(f"the driver of job {job} has lost its order", hint="Begin it again")
        return read_answer(
            events, f"the driver of job {job}", lambda data: read_events(data, decoding.from_msgpack)
        )

    async def cancel(self, job: str) -> None:
        """Order the job's ranks to save and end, and kill them 5 s later; an event reports the end. Raises
        Unavailable."""
        driver = await self._find(job)
        if driver is not None:
            await self._answer(driver.cancel.remote())

    async def forget(self, job: str) -> None:
        """End the job's driver and its ranks, if there are any. Raises Unavailable."""
        driver = await self._find(job)
        if driver is None:
            return
        try:
            await self._answer(driver.close.remote(), _CLOSE_SECONDS)
        except (Unavailable, WorkerLost) as error:
            log.warning("the driver of job %s did not close: %s", job, error.message)
        await self._call(lambda: RayCluster.remove(driver))
        until = time.monotonic() + _CLOSE_SECONDS
        while await self._find(job) is not None and time.monotonic() < until:
            await asyncio.sleep(0.05)  # a later `begin` must not find the old one

    async def capture(
        self,
        train_order: TrainOrder,
        *,
        world: int,
        seconds: float,
        placed: Callable[[], Awaitable[None]],
    ) -> CapturedGraphs:
        """Run the job's script on one worker as rank 0 of `world` simulated ranks, up to its first optimizer step.

        placed: called once a worker has room; there is no limit on that wait. The result's `ended` has an error of the
        script. Cancelling the caller kills the script. Raises CompileTimeout if the script takes longer than `seconds`;
        WorkerLost, Unavailable, and what `placed` raises."""
        from ray.exceptions import RayError

        actor = await self._call(lambda: _make_capture(train_order.spec))
        try:
            await actor.placed.remote()
            await placed()
            async with asyncio.timeout(seconds):
                data = await actor.run.remote(msgspec.msgpack.encode(train_order), world, seconds)
        except TimeoutError:
            raise CompileTimeout(f"the script's first step did not end within {seconds:g} s") from None
        except RayError as error:
            raise WorkerLost(f"the worker that ran the script was lost: {first_line(error)}") from None
        finally:
            await asyncio.shield(self._call(lambda: RayCluster.remove(actor)))
        return read_answer(
            data,
            "the worker that ran the script",
            lambda data: decoding.from_msgpack(data, type=CapturedGraphs),
            most=_CAPTURE_BYTES,
        )

    async def rank_devices(self) -> list[RankDevice]:
        """The devices that the ranks of all jobs hold. Raises Unavailable."""

        async def of(driver: Any) -> list[RankDevice]:
            try:
                return read_answer(
                    await self._answer(driver.held.remote(), 5.0),
                    "a driver",
                    lambda data: decoding.from_msgpack(data, type=list[RankDevice]),
                )
            except (Unavailable, WorkerLost):
                return []

        drivers = await self._call(_drivers)
        return [each for held in await asyncio.gather(*map(of, drivers)) for each in held]

    async def free_resources(self) -> list[Mapping[str, float]]:
        """What ranks could have of each node now. Raises Unavailable."""
        return list((await self._call(free_resources)).values())

    async def free(self) -> None:
        """Free the resources of dead jobs. Raises Unavailable."""
        if freed := await self._call(lambda: remove_placement_groups_of_the_dead(NAMESPACE)):
            log.warning("%d placement groups of dead controllers were removed", freed)

    async def _find(self, job: str) -> Any:
        return await self._call(lambda: _get(driver_name(job)))

    async def _call(self, function: Callable[[], T]) -> T:
        """`function`, which calls Ray. Raises Unavailable where Ray does not answer."""
        from ray.exceptions import RayError

        try:
            return await self._cluster.call(function)
        except (RayError, ConnectionError, RuntimeError) as error:
            raise Unavailable(f"Ray does not answer: {first_line(error)}") from None

    @staticmethod
    async def _answer(reference: Any, seconds: float = _ANSWER_SECONDS) -> Any:
        from ray.exceptions import ActorUnavailableError, RayActorError, RayError

        try:
            async with asyncio.timeout(seconds):
                return await reference
        except TimeoutError:
            raise Unavailable("the job's driver does not answer") from None
        except ActorUnavailableError as error:
            raise Unavailable(f"the job's driver cannot be reached: {first_line(error)}") from None
        except RayActorError as error:
            raise WorkerLost(f"the job's driver was lost: {first_line(error)}") from None
        except RayError as error:
            raise Unavailable(f"the job's driver failed: {first_line(error)}") from None


def _make(train_order: TrainOrder) -> Any:
    import ray

    name = driver_name(node_job_id(train_order.namespace, train_order.job))
    existing = _get(name)
    if existing is not None:
        return existing
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_concurrency": 64,
        "num_cpus": 0,
        "resources": {OFFER: ACTOR_SHARE},
    }
    folder = str(Path(train_order.folder) / train_order.job)
    return ray.remote(JobDriverActor).options(**options).remote(name, folder)


def _make_capture(spec: TrainSpec) -> Any:
    import ray

    options: dict[str, Any] = {
        "num_cpus": spec.cpus,
        "num_gpus": 1 if spec.device == "cuda" else 0,
        "resources": {OFFER: ACTOR_SHARE},
        "max_restarts": 0,
        **({"memory": spec.memory_bytes} if spec.memory_bytes else {}),
        **({"runtime_env": {"pip": list(spec.requirements)}} if spec.requirements else {}),
    }
    return ray.remote(CaptureActor).options(**options).remote()


def _get(name: str) -> Any:
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _drivers() -> list[Any]:
    from ray.util import list_named_actors

    names = [name for name in list_named_actors() if name.startswith(driver_name(""))]
    return [driver for name in names if (driver := _get(name)) is not None]


def read_answer(data: Any, who: str, read: Callable[[bytes], T], most: int = ANSWER_BYTES) -> T:
    """What `read` makes of an answer of at most so many bytes. Training code can speak for a driver, so it may be
    anything. Raises WorkerLost."""
    if not isinstance(data, bytes):
        raise WorkerLost(f"{who} sent a {type(data).__name__}, not bytes")
    if len(data) > most:
        raise WorkerLost(f"{who} sent {len(data)} bytes at once, more than {most}")
    try:
        return read(data)
    except msgspec.MsgspecError as error:
        raise WorkerLost(f"{who} sent what cannot be read: {error}") from None


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
