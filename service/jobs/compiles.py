"""Has graphs of jobs compiled: queued as a client's are, at the priority of the job, and followed to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...compiler.api import compiles
from ...compiler.errors import Overloaded, OverQuota, SourceForbidden
from ..admission.compile_request import CompileRequest
from ..cache.artifact_cache import ArtifactCache
from ..cache.found_artifact import FoundArtifact
from ..compile.compile_queue import CompileQueue
from ..compile.followers import Followers
from ..compile.single_flight import Priority
from ..storage.redis.retry import retry_while_down

MOST_PAUSE_SECONDS = 60.0
"""The longest pause before a compile that was refused for now is requested again."""


@dataclass(frozen=True)
class JobCompiles:
    """The compiles of one namespace's jobs of one kind. dispatcher: see CompileNeeds."""

    queue: CompileQueue
    followers: Followers
    cache: ArtifactCache
    priority: Priority
    dispatcher: str = ""

    async def compiled(
        self,
        request: CompileRequest,
        body: bytes,
        *,
        source: bool,
        on_refused: Callable[[Overloaded | OverQuota], Awaitable[None]],
        on_progress: Callable[[compiles.CompileProgress], Awaitable[None]],
    ) -> tuple[FoundArtifact, bool]:
        """The artifact, and whether it was compiled for this. What the queue has no room for now is requested again.
        source: whether a graph that is not cached may hold source. Raises the compile's error, and what the callbacks
        raise."""
        fresh = False
        while True:
            found = await retry_while_down(lambda: self.cache.lookup(request.key, "fetch"))
            if found is not None:
                return found, fresh
            if request.kernels and not source:
                raise SourceForbidden(
                    f"the token that started the job may not send source: the Triton kernel {request.kernels[0]!r}"
                )
            try:
                answer = await retry_while_down(
                    lambda: self.queue.ask(request, body, priority=self.priority, dispatcher=self.dispatcher)
                )
            except (Overloaded, OverQuota) as error:
                await on_refused(error)
                await asyncio.sleep(max(1.0, min(error.retry_after or 5, MOST_PAUSE_SECONDS)))
                continue
            if answer != "hit":
                fresh = True
                await self.followers.follow(request.key, on_progress)
