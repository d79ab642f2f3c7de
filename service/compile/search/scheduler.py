"""Which lanes search for whom: the farms' tasks and the pool's lanes in; searchers out, as many as there is work for.

One crew a gateway. Compiles' tasks come first, from whatever namespace; batch jobs get lanes whose workers compile
nothing, while nobody waits for one. Among equals the farm with fewer searchers comes first, and who has had a lane for
a while yields it to who has none.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import structlog
from msgspec import Struct

from ....compiler.errors import NoWorker
from ....compiler.tuning.records import DeviceEnvironment
from ....workers.pool import SearchDevice
from ...base.async_tasks import end
from ...base.metrics import GatewayMetrics
from ...base.worker_pools import SearchPool
from .queue import SearchQueue
from .session import SearchSession
from .task import SearchTarget, SearchTask

log = structlog.get_logger(__name__)


_LOOK_SECONDS = 0.5
"""Between two looks at lanes and tasks, while there is anything to do."""


_BACKOFF_SECONDS = (1.0, 60.0)
"""First and longest rest of a lane whose searchers do not start."""


_FAILED_STARTS = 3
"""In a row, with no searcher alive: then compiles are told not to wait for one."""


_TURN_SECONDS = 30.0
"""A searcher keeps its lane at least so long, where those who want it have no better right."""


_MOST_PRESTARTED = 8
"""Searchers that are started before there is work for them."""


_MOST_LOOKED_AT = 64
"""Tasks of one kind, in one look: more lanes than that are not free at once."""


class _Backoff(Struct):
    """A lane whose searchers do not start."""

    until: float
    seconds: float


class _Demand(Struct):
    """What a farm has queued for one aim."""

    farm: SearchQueue
    aim: SearchTarget
    urgent: bool
    tickets: list[SearchTask]


class SearchScheduler:
    """The searchers of all namespaces."""

    def __init__(self, pool: SearchPool, metrics: GatewayMetrics) -> None:
        self.pool = pool
        self._metrics = metrics
        self._farms: list[SearchQueue] = []
        self._searchers: list[SearchSession] = []
        self._places: dict[tuple[str, bytes], DeviceEnvironment] = {}
        """Where a worker measures for an aim."""
        self._resting: dict[str, _Backoff] = {}
        self._failed: dict[bytes, int] = {}
        """Failed starts in a row, by aim."""
        self._served: dict[str, int] = {}
        """When each namespace was last given a lane, in lanes given."""
        self._given = 0
        self._news = asyncio.Event()
        self._foreman: asyncio.Task[None] | None = None

    def join(self, farm: SearchQueue) -> None:
        self._farms.append(farm)

    async def leave(self, farm: SearchQueue) -> None:
        """End the farm's searchers."""
        if farm in self._farms:
            self._farms.remove(farm)
        await end(*(searcher.task for searcher in self._searchers if searcher.farm is farm))

    async def close(self) -> None:
        if self._foreman is not None:
            await end(self._foreman)
        await end(*(searcher.task for searcher in self._searchers))

    def lanes(self, aim: SearchTarget) -> list[SearchDevice]:
        """Raises NoWorker where there is none for `aim`, nor one to come."""
        return self.pool.lanes(aim.toolchain, aim.target)

    def stir(self) -> None:
        """Something has changed: look at once."""
        self._news.set()
        self._news = asyncio.Event()
        if self._foreman is None or self._foreman.done():
            self._foreman = asyncio.create_task(self._lead(), name="lead the searchers")

    async def news(self, seconds: float) -> None:
        """Return when something changes, after `seconds` at the latest."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    # --- for searchers ---------------------------------------------------------------------------------

    def started(self, searcher: SearchSession) -> None:
        """It has said where it measures."""
        seconds = round(time.monotonic() - searcher.since, 1)
        log.info("searcher_ready", worker=searcher.worker, seconds=seconds)
        self._failed.pop(searcher.aim_name, None)
        self._resting.pop(searcher.worker, None)
        if searcher.place is not None:
            self._places[searcher.worker, searcher.aim_name] = searcher.place

    def ended(self, searcher: SearchSession, why: str) -> None:
        """why: it failed; ''."""
        self._searchers.remove(searcher)
        if why and searcher.place is None:
            self._rest(searcher.worker)
            self._failed[searcher.aim_name] = self._failed.get(searcher.aim_name, 0) + 1
            alive = any(s.aim_name == searcher.aim_name and s.place is not None for s in self._searchers)
            if self._failed[searcher.aim_name] >= _FAILED_STARTS and not alive:
                for farm in self._farms:
                    farm.no_searcher(searcher.aim_name, f"no searcher starts: {why}")
        if self._farms:
            self.stir()

    def _rest(self, worker: str) -> None:
        seconds, longest = _BACKOFF_SECONDS
        if worker in self._resting:
            seconds = min(2 * self._resting[worker].seconds, longest)
        self._resting[worker] = _Backoff(time.monotonic() + seconds, seconds)

    def next_for(self, searcher: SearchSession) -> SearchTask | None:
        """What it may take now: a compile's task, or a batch job's where compiles leave room."""
        if searcher.yields or any(ticket.alone for ticket in searcher.held.values()):
            return None
        spare = 0
        if searcher.held:
            # who has something in hand leaves the rest to those who have nothing, and takes no more than its share
            alike = [each for each in self._searchers if self._alike(each, searcher)]
            if len(searcher.held) >= self._share(searcher, alike):
                return None
            spare = sum(other.hungry() for other in alike)
        for urgent in (True, False):
            if not urgent and not self._room_for_batch(searcher):
                return None
            for ticket in searcher.farm.queued(urgent=urgent):
                if not self._suits(ticket, searcher) or (ticket.alone and searcher.held):
                    continue
                if spare:
                    spare -= 1
                    continue
                return ticket
        return None

    def taken_over_by(self, searcher: SearchSession) -> SearchTask | None:
        """What a searcher that has nothing, and finds nothing queued, takes from the one to which most is left that it
        has not begun; who has just one left keeps it, for he will have begun it sooner."""
        if searcher.held or searcher.yields:
            return None
        others = [each for each in self._searchers if each is not searcher and self._alike(each, searcher)]
        other = max(others, key=lambda each: len(each.waiting()), default=searcher)
        suits = [ticket for ticket in other.waiting() if self._suits(ticket, searcher)]
        if len(suits) < 2 or not (suits[-1].urgent or self._room_for_batch(searcher)):
            return None
        return other.held.pop(suits[-1].task.id)

    def may_have(self, searcher: SearchSession) -> bool:
        """Whether anything is queued that it could take, now or once compiles leave room, or is about to be."""
        return self._expected(searcher) or self._queued_for(searcher)

    def _queued_for(self, searcher: SearchSession) -> bool:
        return any(
            self._suits(ticket, searcher)
            for urgent in (True, False)
            for ticket in searcher.farm.queued(urgent=urgent)
        )

    @staticmethod
    def _expected(searcher: SearchSession) -> bool:
        return any(aim.name() == searcher.aim_name for aim in searcher.farm.expects())

    @staticmethod
    def _suits(ticket: SearchTask, searcher: SearchSession) -> bool:
        return ticket.aim_name == searcher.aim_name and ticket.place in (None, searcher.place)

    @staticmethod
    def _alike(one: SearchSession, other: SearchSession) -> bool:
        return one.farm is other.farm and one.aim_name == other.aim_name and one.place in (None, other.place)

    def _share(self, searcher: SearchSession, alike: list[SearchSession]) -> int:
        """Tasks for each, of those that are held and those that wait; of many it does not matter how many."""
        waiting = (
            ticket
            for urgent in (True, False)
            for ticket in searcher.farm.queued(urgent=urgent)
            if self._suits(ticket, searcher)
        )
        count = sum(1 for _ in itertools.islice(waiting, _MOST_LOOKED_AT))
        return -(-(count + sum(len(each.held) for each in alike)) // len(alike))

    def _room_for_batch(self, searcher: SearchSession) -> bool:
        if self.pool.waiting():
            return False
        try:
            lanes = self.lanes(searcher.aim)
        except NoWorker:
            return False
        return any(lane.worker == searcher.worker and not lane.compiling for lane in lanes)

    # --- the look at lanes and tasks -------------------------------------------------------------------

    async def _lead(self) -> None:
        """Until there is nothing to do."""
        while True:
            news = self._news
            try:
                await self._look()
            except Exception:
                log.exception("searchers_not_led")
            self._count()
            if not self._searchers and not any(farm.busy() for farm in self._farms):
                if news is self._news:
                    return
                continue
            await self.news(_LOOK_SECONDS)

    def _count(self) -> None:
        self._metrics.searchers.set(len(self._searchers))
        for wanted_by, urgent in (("compiles", True), ("jobs", False)):
            queued = sum(farm.count(urgent=urgent) for farm in self._farms)
            self._metrics.searches_queued.labels(wanted_by).set(queued)

    async def _look(self) -> None:
        for searcher in self._searchers:
            if searcher.silent():
                searcher.task.cancel()
        for farm in self._farms:
            farm.tidy()
        for need in sorted(self._needs(), key=self._turn):
            await self._meet(need)
        for farm in self._farms:
            for aim in farm.expects():
                await self._warm(farm, aim)

    async def _warm(self, farm: SearchQueue, aim: SearchTarget) -> None:
        """Start searchers on idle lanes, though nothing is queued yet; nobody has to yield for that."""
        name = aim.name()
        try:
            lanes = self.lanes(aim)
        except NoWorker:
            return
        alike = sum(searcher.farm is farm and searcher.aim_name == name for searcher in self._searchers)
        for lane in lanes:
            if alike < _MOST_PRESTARTED and self._free(lane, urgent=True):
                self._start(farm, aim, lane.worker)
                alike += 1
        await asyncio.sleep(0)

    def _start(self, farm: SearchQueue, aim: SearchTarget, worker: str) -> None:
        self._given += 1
        self._served[farm.namespace] = self._given
        self._searchers.append(SearchSession(self, farm, aim, worker))

    def _turn(self, need: _Demand) -> tuple[bool, int, int]:
        farm = need.farm
        return (not need.urgent, self._has(farm), self._served.get(farm.namespace, 0))

    def _needs(self) -> list[_Demand]:
        needs: dict[tuple[int, bytes, bool], _Demand] = {}
        for number, farm in enumerate(self._farms):
            for urgent in (True, False):
                for ticket in farm.queued(urgent=urgent):
                    key = (number, ticket.aim_name, urgent)
                    need = needs.setdefault(key, _Demand(farm, ticket.aim, urgent, []))
                    if len(need.tickets) < _MOST_LOOKED_AT:
                        need.tickets.append(ticket)
        return list(needs.values())

    def _has(self, farm: SearchQueue) -> int:
        return sum(searcher.farm is farm for searcher in self._searchers)

    async def _meet(self, need: _Demand) -> None:
        """Start searchers for what is queued, one for each task that nobody is about to take, while there are lanes."""
        aim_name = need.aim.name()
        try:
            lanes = self.lanes(need.aim)
        except NoWorker as error:
            need.farm.no_searcher(aim_name, error.message)
            return
        busy = set() if need.urgent else {lane.worker for lane in lanes if lane.compiling}
        hungry = [
            searcher
            for searcher in self._searchers
            if searcher.farm is need.farm and searcher.aim_name == aim_name
            if searcher.hungry() and searcher.worker not in busy
        ]
        for ticket in need.tickets:
            taker = next((s for s in hungry if ticket.place is None or s.place in (None, ticket.place)), None)
            if taker is not None:
                hungry.remove(taker)
                continue
            able = [lane for lane in lanes if self._can(lane, ticket)]
            if lanes and not able and ticket.urgent:
                need.farm.fail(ticket, "no worker measures where this compile's kernels run", "no_searcher")
                continue
            lane = next((lane for lane in able if self._free(lane, urgent=need.urgent)), None)
            if lane is None:
                self._ask_to_yield(need, able)
                return
            self._start(need.farm, need.aim, lane.worker)
            await asyncio.sleep(0)  # its lane is taken from here on
            lanes = self.lanes(need.aim)

    def _can(self, lane: SearchDevice, ticket: SearchTask) -> bool:
        place = self._places.get((lane.worker, ticket.aim_name))
        return ticket.place is None or place is None or place == ticket.place

    def _free(self, lane: SearchDevice, *, urgent: bool) -> bool:
        rest = self._resting.get(lane.worker)
        if lane.searching or (rest is not None and time.monotonic() < rest.until):
            return False
        if any(searcher.worker == lane.worker for searcher in self._searchers):
            return False
        return urgent or not (lane.compiling or self.pool.waiting())

    def _ask_to_yield(self, need: _Demand, able: list[SearchDevice]) -> None:
        """Have one lane of those become free for a need that has none: from who has no compile's task, if one waits
        here; else from who has more lanes, and has had this one for a while."""
        workers = {lane.worker for lane in able}
        rivals = [s for s in self._searchers if s.worker in workers and s.place is not None]
        aim_name = need.aim.name()
        if any(s.yields for s in rivals):
            return
        own = self._has(need.farm)
        for rival in rivals:
            if rival.farm is need.farm and rival.aim_name == aim_name:
                continue
            queued = any(self._suits(ticket, rival) for ticket in rival.farm.queued(urgent=True))
            serves_compiles = queued or any(ticket.urgent for ticket in rival.held.values())
            wanted_soon = self._expected(rival) and not need.urgent
            idle = not rival.held and not self._queued_for(rival) and not wanted_soon
            fair = time.monotonic() - rival.since > _TURN_SECONDS and (
                self._has(rival.farm) > own + 1 or own == 0 or rival.farm is need.farm
            )
            better = need.urgent and not serves_compiles
            if idle or better or (fair and need.urgent == serves_compiles):
                rival.yields = True
                return
