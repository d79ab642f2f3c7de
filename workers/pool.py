"""Stage 6, worker side: sends a request's canonical bytes to a warm slot that fits; returns an unsigned artifact.

The pool runs a Ray actor on every slot that the cluster's nodes offer, and replaces those that die. It imports neither
torch nor, before `start`, Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import msgspec

from ..compiler.api import compiles
from ..compiler.errors import CompileKilled, CompileTimeout, RelayError, Unavailable
from ..compiler.request import schema
from .fork_server.prestart import PrestartedServer
from .messages import WorkerJob, WorkerLost
from .process.private_folders import node_directory, short_directory
from .process.process_tree import become_subreaper, descendants, die_with_parent, kill_below, reap
from .scheduling.autoscaling import Autoscaling
from .scheduling.job_messages import OnQuery, follow_job
from .scheduling.own_slots import Claims, OwnSlots
from .scheduling.ray_cluster import RayCluster, RayNode, ray_environment
from .scheduling.ray_resources import node_resources
from .scheduling.slots import (
    DevicesHeld,
    SearchDevice,
    Slot,
    SlotPlace,
    Slots,
    WorkersBusy,
    offered_slots,
    slot_settings,
)
from .settings import EarlyServer, PoolSettings
from .training.drivers import NAMED_ACTORS, JobDrivers, first_line
from .training.messages import RankDevice
from .training.room import after_placing, why_no_room

__all__ = [  # all that service/ may use of workers/
    "Claims",
    "DevicesHeld",
    "EarlyServer",
    "PoolSettings",
    "PrestartedServer",
    "SearchDevice",
    "WorkerLost",
    "WorkerPool",
    "WorkersBusy",
    "after_placing",
    "become_subreaper",
    "descendants",
    "die_with_parent",
    "kill_below",
    "node_directory",
    "node_resources",
    "ray_environment",
    "reap",
    "short_directory",
    "why_no_room",
]

log = logging.getLogger(__name__)

_NODES_SECONDS = 2.0
"""Between two checks of the cluster's nodes."""
_FREE_EVERY = 3
"""Every so many of these checks, the resources of dead training jobs are freed too."""
_WATCH_SECONDS = 1.0
_SILENT_SECONDS = 30.0
"""Ray answers within this time how many nodes there are, or something is wrong."""
_AGAIN_SECONDS = 5.0
_BACKOFF_SECONDS = (1.0, 30.0)
"""First and longest wait before a slot that failed is tried again."""
_GRACE_SECONDS = 20.0
"""How long past its deadline, or after a cancel, a job may take to end before its actor is killed."""
_IDLE_SECONDS = 0.2
"""Between two checks whether a slot that is given up has ended its job."""


class WorkerPool:
    """Warm slots on a Ray cluster. One in a process; call `start` before use, `close` after.

    Several pools share a cluster if all have `claims`: each then uses its share of the slots. Without `claims` a pool
    uses all of them.
    """

    def __init__(self, settings: PoolSettings, claims: Claims | None = None) -> None:
        if settings.ray_address is None and settings.ray_token is None:
            settings = msgspec.structs.replace(settings, ray_token=secrets.token_hex(32))
        self._settings = settings
        self._cluster: RayCluster | None = None
        self._claims = claims
        self._own_slots: OwnSlots | None = None
        self.slots = Slots()
        self.queued = 0
        """Compiles that the caller holds back until there is room, without those of tuning jobs."""
        self.overdue: Mapping[str, int] = {}
        """How many compiles have waited for a while, by the kind of device: an autoscaler is to add nodes."""
        self._autoscaling: Autoscaling | None = None
        self._leaving: dict[SlotPlace, Slot] = {}
        """Slots that another pool is to get, once their job has ended."""
        self._trains: JobDrivers | None = None
        self._nodes: list[RayNode] = []
        self._nodes_task: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._running: dict[asyncio.Task[bytes], Slot] = {}
        """Jobs on slots."""
        self._watching: asyncio.Task[None] | None = None
        self._nodes_seen = 0.0
        """When Ray last said which nodes there are, on the monotonic clock."""
        self._note: Callable[[str, Exception | None], None] = lambda task, error: None

    async def start(self) -> None:
        """Start or join Ray and start slots; `ready` is True once the first is warm. Raises Unavailable; `start` can be
        called again then."""
        self._cluster = RayCluster(self._settings, NAMED_ACTORS)
        try:
            await self._cluster.start()
            nodes = await self._cluster.nodes()
        except Unavailable:
            await self._cluster.stop()
            self._cluster = None
            raise
        self._trains = JobDrivers(self._cluster)
        if self._claims is not None:
            self._own_slots = OwnSlots(self._claims, self._cluster.id)
        self._autoscaling = Autoscaling(self._settings, self._cluster, self.slots, self._begin, self._retire)
        await self._settle(self._cluster, nodes)
        self.slots.coming = False
        self._nodes_seen = time.monotonic()
        self._nodes_task = asyncio.create_task(self._follow_nodes(self._cluster), name="follow Ray nodes")
        self._watching = asyncio.create_task(self._watch(self._cluster), name="watch Ray")

    async def close(self) -> None:
        """Stop every slot and leave Ray, even if `start` failed."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._cluster is None:
            return
        if self._nodes_task is not None:
            self._nodes_task.cancel()
            await asyncio.gather(self._nodes_task, return_exceptions=True)
        slots = [*self.slots.all.values(), *self._leaving.values()]
        await asyncio.gather(*(self._retire(slot) for slot in slots))
        self.slots.all.clear()
        self._leaving.clear()
        self.slots.elsewhere = 0
        self.slots.on_change()
        for ending in list(self._endings):
            ending.cancel()
        if self._own_slots is not None:
            await self._own_slots.release()
        if self._autoscaling is not None:
            await self._autoscaling.end()
        await self._cluster.stop()
        self._cluster = self._trains = None

    def ready(self) -> bool:
        """Whether at least one slot is warm."""
        return any(slot.up() for slot in self.slots.all.values())

    def on_change(self, call: Callable[[], None]) -> None:
        """Calls `call` whenever a slot may have become idle, or has gone."""
        self.slots.on_change = call

    def on_failure(self, call: Callable[[str, Exception | None], None]) -> None:
        """Calls `call` with a task of the background and its error, or None once it goes well again."""
        self._note = call

    @property
    def elsewhere(self) -> int:
        """How many slots of the cluster other pools have."""
        return self.slots.elsewhere

    def room(self, toolchain: schema.Toolchain, target: schema.Target) -> int | None:
        """How many compiles could begin at once; None: there is no such worker, and none to come."""
        return 0 if self._trains is None else self.slots.room(toolchain, target)

    def workers(self) -> list[compiles.WorkerInfo]:
        """Every slot as it is now; those of other pools are not among them."""
        return [slot.info() for slot in [*self.slots.all.values(), *self._leaving.values()]]

    async def compile(
        self,
        request_bytes: bytes,
        *,
        key: str,
        namespace: str = "default",
        toolchain: schema.Toolchain,
        target: schema.Target,
        deadline_seconds: float,
        on_progress: Callable[[compiles.Stage, str], None],
        on_query: OnQuery | None = None,
        holds_source: bool = True,
        trace_id: str = "",
    ) -> bytes:
        """Compile canonical request bytes on an idle slot that fits.

        holds_source: the compile runs its caller's source, so others do not get the libraries that it builds. trace_id:
        for its log lines.

        on_query: answers the compile's queries (a queries.TuningQuery, encoded) with a queries.KnownEntries, encoded,
        or b'' for no answer. At most queries.OPEN_QUERY_LIMIT calls run at once; its end cancels them.
        Cancelling the caller kills the job's processes. Raises NoWorker, WorkersBusy, CompileTimeout,
        CompileKilled, and what the compile itself raised.
        """
        until = asyncio.get_running_loop().time() + deadline_seconds
        slot = self.slots.take(toolchain, target)
        job_id = uuid.uuid4().hex
        job = WorkerJob(
            key,
            request_bytes,
            deadline_seconds,
            target,
            namespace,
            holds_source=holds_source,
            trace_id=trace_id,
        )
        running = self._begin_job(slot, self._run(slot, job_id, job, on_progress, on_query))
        late = f"worker {slot.worker} did not answer within the deadline of {deadline_seconds:g} s"
        return await self._result(slot, job_id, running, until, late)

    def search_devices(self, toolchain: schema.Toolchain, target: schema.Target) -> list[SearchDevice]:
        """Where searches for `toolchain` and `target` can run, one for each device. Raises NoWorker where there is no
        such worker, nor one to come."""
        return self.slots.search_devices(toolchain, target)

    async def search(
        self,
        spec: bytes,
        *,
        worker: str,
        namespace: str,
        toolchain: schema.Toolchain,
        target: schema.Target,
        on_query: OnQuery,
        deadline_seconds: float,
    ) -> None:
        """Run a search worker (`spec`: a SearchJobSpec, encoded) on `worker`'s device until it ends by itself.

        on_query: as in compile. Cancelling the caller kills the search worker's processes. Raises NoWorker, Overloaded
        if the device is searched already, WorkerLost if the worker is lost, CompileTimeout, CompileKilled, and the
        search worker's own error.
        """
        slot = self.slots.take_search_device(worker, toolchain, target)
        job_id = slot.search = uuid.uuid4().hex
        job = WorkerJob(
            "search", spec, deadline_seconds, target, namespace, work="search", holds_source=False
        )
        running = self._begin_job(slot, self._search(slot, job_id, job, on_query))
        until = asyncio.get_running_loop().time() + deadline_seconds
        late = f"the search on worker {worker} did not end by its deadline"
        await self._result(slot, job_id, running, until, late)

    @property
    def training(self) -> JobDrivers:
        """The training jobs on its cluster. Raises Unavailable while Ray is not there."""
        if self._trains is None:
            raise Unavailable("the workers are not there yet")
        return self._trains

    def node_resources(self) -> list[Mapping[str, float]]:
        """The resources of each node that offers slots, in Ray's names, as they were a moment ago."""
        return [node.resources for node in self._nodes]

    @property
    def cluster(self) -> str:
        """The id of the Ray cluster that it has joined; '': none, or one of its own that ends with it."""
        return "" if self._cluster is None or self._settings.ray_address is None else self._cluster.id

    def _begin_job(self, slot: Slot, job: Coroutine[Any, Any, bytes]) -> asyncio.Task[bytes]:
        running = asyncio.create_task(job)
        self._running[running] = slot
        running.add_done_callback(self._running.pop)
        return running

    async def _result(
        self, slot: Slot, job_id: str, running: asyncio.Task[bytes], until: float, late: str
    ) -> bytes:
        """The result of `running`. The job is killed if the caller is cancelled, or at the deadline `until`: then
        raises CompileTimeout with the text `late`."""
        try:
            async with asyncio.timeout_at(until + _GRACE_SECONDS):
                return await asyncio.shield(running)
        except TimeoutError:
            self._end(slot, job_id, running)
            raise CompileTimeout(late) from None
        except asyncio.CancelledError:
            self._end(slot, job_id, running)
            raise

    async def _search(self, slot: Slot, job_id: str, job: WorkerJob, on_query: OnQuery) -> bytes:
        try:
            stream = slot.actor.search.options(num_returns="streaming").remote(job_id, job)
            return await follow_job(slot, job_id, stream, lambda *_: None, on_query)
        except CompileKilled as error:
            if slot.yielded:
                raise WorkerLost(slot.yielded) from None
            raise error
        finally:
            slot.searching, slot.search, slot.yielded = False, "", ""

    async def _run(
        self,
        slot: Slot,
        job_id: str,
        job: WorkerJob,
        on_progress: Callable[[compiles.Stage, str], None],
        on_query: OnQuery | None,
    ) -> bytes:
        try:
            stream = slot.actor.compile.options(num_returns="streaming").remote(job_id, job)
            return await follow_job(slot, job_id, stream, on_progress, on_query)
        finally:
            slot.jobs_done += 1
            self.slots.give_back(slot)

    def _end(self, slot: Slot, job_id: str, running: asyncio.Task[bytes]) -> None:
        """Kill a job whose caller has gone, in the background."""
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # else it is logged
        ending = asyncio.create_task(self._kill_job(slot, job_id, running), name=f"end job on {slot.worker}")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _kill_job(self, slot: Slot, job_id: str, running: asyncio.Task[bytes]) -> None:
        actor = slot.actor
        actor.cancel.remote(job_id)
        await asyncio.wait({running}, timeout=_GRACE_SECONDS)
        if not running.done():
            log.error("worker %s does not end a cancelled job and is killed", slot.worker)
            RayCluster.remove(actor)
            await asyncio.wait({running})
        if not running.cancelled() and (error := running.exception()) is not None:
            log.info("the cancelled job on worker %s ended: %s", slot.worker, error)

    async def _follow_nodes(self, cluster: RayCluster) -> None:
        for count in itertools.count(1):
            await asyncio.sleep(_NODES_SECONDS)
            try:
                nodes = await cluster.nodes()
                if cluster.lost():  # _watch starts it again; until then its workers are not missed
                    continue
                self._nodes_seen = time.monotonic()
                await self._settle(cluster, nodes)
                if self._autoscaling is not None:
                    await self._autoscaling.adjust(self._nodes, self.overdue)
                self._hold(await self.training.rank_devices())
                if count % _FREE_EVERY == 0:
                    await self.training.free()
                self._note("nodes", None)
            except Unavailable as error:
                log.error("%s", error)  # slots stay as they are; their own calls fail if it lasts
                self._note("nodes", error)
            except Exception as error:  # a driver of another version, say; the next look may go well
                log.exception("the cluster's nodes could not be followed")
                self._note("nodes", error)

    async def _watch(self, cluster: RayCluster) -> None:
        """Start Ray again once servers of it that this process has started are gone, and say so meanwhile. What ran is
        lost."""
        silent = False
        while not (why := cluster.lost()):
            await asyncio.sleep(_WATCH_SECONDS)
            if silent != (time.monotonic() - self._nodes_seen > _SILENT_SECONDS):
                silent = not silent
                self._note("ray", Unavailable("Ray does not answer") if silent else None)
        problem = f"Ray was lost ({why} has ended) and is started again"
        log.error("%s", problem)
        self._note("ray", Unavailable(problem))
        await self._leave_lost(cluster, problem)
        while self._cluster is None:
            try:
                await self.start()
            except Exception as error:  # whatever Ray raises: it is logged, and tried again
                log.error("Ray was not started again: %s", error)
                self._cluster = None
                await asyncio.sleep(_AGAIN_SECONDS)
        self._note("ray", None)

    async def _leave_lost(self, cluster: RayCluster, why: str) -> None:
        self._trains = None
        self._settings = msgspec.structs.replace(self._settings, early_server=None)  # it has ended too
        self.slots.coming = True
        slots = [*self.slots.all.values(), *self._leaving.values()]
        self.slots.all.clear()
        self._leaving.clear()
        self._nodes = []
        ending = [slot.supervisor for slot in slots if slot.supervisor is not None]
        if self._nodes_task is not None:
            ending.append(self._nodes_task)
        for slot in slots:
            slot.actor, slot.lost = None, why  # nobody is to be asked to end it
        for task in [*ending, *(task for task, slot in self._running.items() if slot.lost)]:
            task.cancel()
        self.slots.on_change()
        await asyncio.wait([*ending, asyncio.create_task(cluster.leave_lost())])
        self._cluster = None

    def _hold(self, devices: list[RankDevice]) -> None:
        """End and prevent searches on devices of training jobs: figures would be wrong, and ranks slower."""
        self.slots.rank_devices = {(each.node, gpu) for each in devices for gpu in each.gpus.split(",")}
        for slot in self.slots.all.values():
            if slot.is_on(self.slots.rank_devices):
                self._end_search(slot, f"a training job holds the device of worker {slot.worker}")

    @staticmethod
    def _end_search(slot: Slot, why: str) -> None:
        if slot.searching and slot.search and not slot.yielded:
            log.warning("a search ends: %s", why)
            slot.yielded = why
            slot.actor.cancel.remote(slot.search)

    async def _settle(self, cluster: RayCluster, nodes: list[RayNode]) -> None:
        """Add the slots that `nodes` offer, that are this pool's and are missing; give up those that are another's;
        remove those of nodes that have gone."""
        self._nodes = nodes
        offered = offered_slots(nodes, self._settings)
        own: Collection[SlotPlace] | None = offered.keys()
        if self._own_slots is not None:
            own = await self._own_slots.choose(offered, self.slots.all, self._leaving)
        for slots in (self.slots.all, self._leaving):
            for position in slots.keys() - offered.keys():
                slot = slots.pop(position)
                log.warning("worker %s has gone with its node", slot.worker)
                if slot.supervisor is not None:
                    slot.supervisor.cancel()
        if own is not None:
            self.slots.elsewhere = len(offered) - len(own)
            for position in self.slots.all.keys() - own:
                self._give_up(position)
            for position, node in offered.items():
                if position in own and position not in self.slots.all and position not in self._leaving:
                    self.slots.all[position] = Slot(node, position)
                    self._begin(self.slots.all[position])
        self.slots.on_change()

    def _begin(self, slot: Slot) -> None:
        assert self._cluster is not None
        slot.state = "starting"
        running = self._supervise(self._cluster, slot)
        slot.supervisor = asyncio.create_task(running, name=f"supervise {slot.worker}")

    def _give_up(self, position: SlotPlace) -> None:
        """Leave a slot to another pool. Its job, if there is one, runs on to its end; its search ends."""
        slot = self._leaving[position] = self.slots.all.pop(position)
        log.info("worker %s is left to another dispatcher", slot.worker)
        self._end_search(slot, f"worker {slot.worker} is left to another dispatcher")
        ending = asyncio.create_task(self._retire_when_idle(slot), name=f"give up {slot.worker}")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _retire_when_idle(self, slot: Slot) -> None:
        while slot.state == "busy" or slot.searching:
            await asyncio.sleep(_IDLE_SECONDS)
        await self._retire(slot)
        if self._leaving.get(slot.position) is slot:
            del self._leaving[slot.position]

    async def _supervise(self, cluster: RayCluster, slot: Slot) -> None:
        """Run a warm actor on `slot`, and replace it when it dies, until cancelled."""
        from ray.exceptions import RayError

        backoff, longest = _BACKOFF_SECONDS
        while True:
            try:
                slot.actor = await cluster.place(slot.node, slot_settings(slot, self._settings))
                while True:
                    slot.ready = await slot.warm()
                    slot.failure, slot.state = None, "idle"
                    backoff = _BACKOFF_SECONDS[0]
                    self._note("workers", None)
                    log.info("worker %s is warm", slot.worker)
                    self.slots.on_change()
                    await slot.actor.lost.remote()
                    slot.state = "starting"
                    log.warning("worker %s has lost its fork server; another one starts", slot.worker)
            except RayError as error:
                log.warning("worker %s has died and is replaced: %s", slot.worker, first_line(error))
            except RelayError as error:
                log.error("worker %s cannot start: %s", slot.worker, error)
                slot.failure = error
                RayCluster.remove(slot.actor)
            except asyncio.CancelledError:
                slot.state = "dead"
                if slot.actor is not None:
                    RayCluster.remove(slot.actor)
                raise
            except Exception as error:  # an actor of another version, say
                log.exception("worker %s cannot be used", slot.worker)
                self._note("workers", error)
                slot.failure = CompileKilled(f"worker {slot.worker} cannot be used ({type(error).__name__})")
                if slot.actor is not None:
                    RayCluster.remove(slot.actor)
            slot.state = "starting"
            self.slots.on_change()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, longest)

    async def _retire(self, slot: Slot) -> None:
        """Stop a slot's fork server and then its actor, so that no process outlives the pool."""
        from ray.exceptions import RayError

        if slot.actor is not None and slot.ready is not None:
            try:
                async with asyncio.timeout(5):
                    await slot.actor.close.remote()
            except (TimeoutError, RayError) as error:
                log.warning("worker %s did not stop by itself: %s", slot.worker, error)
        if slot.supervisor is not None:
            slot.supervisor.cancel()
            await asyncio.gather(slot.supervisor, return_exceptions=True)
