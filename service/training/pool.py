"""What the gateway needs of workers/pool.py for training jobs. `job`: train_records.at_nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from ...compiler.train_records import Captured, News, TrainOrder, TrainSpec


class TrainPool(Protocol):
    """As WorkerPool has it."""

    async def train_begin(self, order: TrainOrder) -> None: ...
    async def train_news(self, job: str, after: int, *, seconds: float) -> list[News]: ...
    async def train_cancel(self, job: str) -> None: ...
    async def train_forget(self, job: str) -> None: ...
    async def train_capture(
        self, order: TrainOrder, *, world: int, seconds: float, placed: Callable[[], Awaitable[None]]
    ) -> Captured: ...
    async def train_room(self, spec: TrainSpec) -> str: ...
