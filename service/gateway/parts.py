"""The composition of a gateway: what routes may use. It has no workers: dispatchers have, and read its queue."""

from __future__ import annotations

import re
from typing import get_args

from fastapi import Request

from ...compiler.api.admin import REINDEX_PARTS
from ...compiler.api.now import Now
from ...compiler.api.usage import Overview, Period
from ..access.namespaces import PATTERN
from ..access.page_tickets import PageTickets
from ..access.quotas import Quotas
from ..access.tokens import Grant
from ..base.async_tasks import Recent
from ..base.counters import Counters
from ..base.settings import ServiceSettings
from ..cache.admin import CacheAdmin
from ..cache.misses import Misses
from ..cache.runs import Runs
from ..cache.script_history import ScriptHistory
from ..cache.usage import UsageHistory
from ..compile.compile_queue import CompileQueue, QueuedRequests
from ..compile.current import CurrentCompiles
from ..compile.followers import Followers
from ..compile.search.database import AutotuneEntries
from ..jobs.training.admission import TrainingJobAdmission
from ..jobs.training.files import FOLDER
from ..jobs.tuning.admission import TuningJobAdmission
from ..parts.shared import SharedParts, TenantParts, Tenants
from ..storage.blobs import FOLDERS
from ..storage.redis.counter_store import read_counters
from ..storage.redis.keys import DEFAULT_NAMESPACE
from ..storage.redis.retry import redis_errors_logged
from .http.event_stream import EventStreams, ServerEvent
from .namespace_removal import NamespaceRemover

_COUNTERS_SECONDS = 1.0
"""How old counters may be that whoever has no token gets."""
NOW_SECONDS = 1.0
_OVERVIEW_SECONDS = 2.0
"""How old these pages may be: whole teams keep them open."""


class GatewayTenant(TenantParts):
    def __init__(self, shared: SharedParts, namespace: str, queued: QueuedRequests) -> None:
        super().__init__(shared, namespace)
        redis, scripts, settings = shared.redis, shared.scripts, shared.settings
        self.cache_admin = CacheAdmin(redis, self.keys, scripts, self.blobs, self.audit, self.components)
        self.misses = Misses(redis, self.keys, scripts, self.components, shared.budgets.work)
        self.script_history = ScriptHistory(redis, self.keys, scripts)
        self.runs = Runs(redis, self.keys, scripts)
        self.usage = UsageHistory(redis, self.keys)
        self.current_compiles = CurrentCompiles(redis, self.keys, self.events)
        self.now: Recent[Now] = Recent(NOW_SECONDS)
        self.parts_of_now: dict[tuple[bool, str], Recent[ServerEvent]] = {}
        """The same as HTML, by whether hosts are shown, and which namespace the links of the page name."""
        self.parts_of_jobs: dict[tuple[str, int, str, str], Recent[ServerEvent]] = {}
        """By job, rank, text and namespace."""
        self.overviews: dict[Period, Recent[Overview]] = {
            period: Recent(_OVERVIEW_SECONDS) for period in get_args(Period)
        }
        self.autotunes = AutotuneEntries(self.keys, scripts, limit=settings.tunings_limit)
        self.queue = CompileQueue(namespace, self.leases, queued)
        self.followers = Followers(self.events, shared.notifications, settings, self.queue.ask_again)
        self.tuning_admission = TuningJobAdmission(
            namespace, settings.limits, shared.admission, self.saved_requests, shared.registry
        )
        self.training_admission = TrainingJobAdmission(self.training_files, shared.registry)


class GatewayParts(SharedParts):
    def __init__(self, settings: ServiceSettings) -> None:
        super().__init__(settings)
        self.event_streams = EventStreams(
            self.metrics.streams, settings.keepalive_seconds, self.notifications, lambda: self.stopping
        )
        queued = QueuedRequests()
        self.tenants = Tenants(self.namespaces, lambda namespace: GatewayTenant(self, namespace, queued))
        self.counters_for_anyone: Recent[dict[str, Counters]] = Recent(_COUNTERS_SECONDS)
        self.namespace_remover = NamespaceRemover(self, self.tenants.default.audit)
        self.page_tickets = PageTickets(self.redis, self.keys)
        self.quotas = Quotas(self.redis, self.keys, self.tenants.default.audit, settings)

    def stop(self) -> None:
        """Ends event streams, so that their clients go to another gateway."""
        self.stopping = True
        self.notifications.wake_all()

    async def reindex(self, part: int, *, by: Grant) -> int:
        """Offers again what the blob store holds of one of REINDEX_PARTS. After the last, Redis and the store belong
        together. Returns how many artifacts came back. Raises Unavailable, RedisError."""
        found = {*await self.installation.folders(FOLDERS), *await self.installation.folders(FOLDER)}
        async with self.redis.pipeline(transaction=True) as pipe:
            for name in found:
                if re.fullmatch(PATTERN, name) and name != DEFAULT_NAMESPACE:
                    self.namespaces.add(name, within=pipe)
            await pipe.execute()
        indexed = sum([await tenant.cache.reindex(part, by=by) for tenant in await self.tenants.every()])
        if part == REINDEX_PARTS - 1:
            await self.installation.adopt()
        return indexed

    async def counters(self, namespaces: list[str]) -> dict[str, Counters]:
        """By namespace, with all that this process has counted. Raises RedisError."""
        await self.write_uses()
        return await read_counters(self.redis, self.keys, namespaces)

    async def write_uses(self) -> None:
        """So that an answer shows what this process has counted; if Redis takes no writes, without it."""
        with redis_errors_logged("uses_not_written"):
            await self.uses.write()

    async def administered(self, grant: Grant) -> list[GatewayTenant]:
        """The namespaces that `grant` may see: its own, or all. Raises NotFound, RedisError."""
        return await self.tenants.every() if grant.everywhere else [await self.tenants.of(grant.namespace)]


def gateway_of(request: Request) -> GatewayParts:
    """The FastAPI dependency of every route."""
    gateway: GatewayParts = request.app.state.gateway
    return gateway
