"""What the service needs of workers/pool.py's WorkerPool, as Protocols: compiles, kernel searches, training jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from ...compiler.api import compiles
from ...compiler.api.training.events import NumberedEvent
from ...compiler.api.training.jobs import TrainSpec
from ...compiler.api.training.node_messages import CapturedGraphs, TrainOrder
from ...compiler.request import schema
from ...workers.pool import SearchDevice


class SearchPool(Protocol):
    """What the search scheduler needs of workers/pool.py's WorkerPool."""

    def search_devices(self, toolchain: schema.Toolchain, target: schema.Target) -> list[SearchDevice]: ...
    def waiting(self) -> int: ...
    async def search(
        self,
        order: bytes,
        *,
        worker: str,
        namespace: str,
        toolchain: schema.Toolchain,
        target: schema.Target,
        on_query: Callable[[bytes], Awaitable[bytes]],
        deadline_seconds: float,
    ) -> None: ...


class TrainPool(Protocol):
    """What training jobs need of it. `job`: node_messages.node_job_id."""

    async def train_begin(self, order: TrainOrder) -> None: ...
    async def train_warm(self, order: TrainOrder) -> None: ...
    async def train_news(self, job: str, after: int, *, seconds: float) -> list[NumberedEvent]: ...
    async def train_cancel(self, job: str) -> None: ...
    async def train_forget(self, job: str) -> None: ...
    async def train_capture(
        self, order: TrainOrder, *, world: int, seconds: float, placed: Callable[[], Awaitable[None]]
    ) -> CapturedGraphs: ...
    async def train_room(self, spec: TrainSpec) -> str: ...


class CompilePool(SearchPool, TrainPool, Protocol):
    """What the gateway needs of workers/pool.py's WorkerPool."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def ready(self) -> bool: ...
    def workers(self) -> list[compiles.WorkerInfo]: ...
    async def compile(
        self,
        request_bytes: bytes,
        *,
        key: str,
        namespace: str,
        toolchain: schema.Toolchain,
        target: schema.Target,
        deadline_seconds: float,
        on_progress: Callable[[compiles.Stage, str], None],
        on_query: Callable[[bytes], Awaitable[bytes]] | None,
    ) -> bytes: ...
