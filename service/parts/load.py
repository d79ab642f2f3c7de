"""How much an installation has to do: which clients' compiles wait, and what workers do, for each kind of workers."""

from __future__ import annotations

from collections import Counter

from ...compiler.request import schema
from ..base.metrics import Load, TargetLoad
from ..compile.pending import PendingCompiles
from ..compile.registry import DispatcherRegistry
from ..compile.single_flight import Priority

_STATES = ("idle", "busy", "starting", "dead")
_OTHER = "other"
"""The toolchain of whatever no worker is for. Clients name toolchains and GPUs, and Prometheus keeps each name."""

Kind = tuple[str, str]


async def read_load(pending: PendingCompiles, registry: DispatcherRegistry) -> Load:
    """The load of the whole installation. Raises RedisError."""
    dispatchers = await registry.dispatchers()
    slots: dict[Kind, Counter[str]] = {}
    for worker in (worker for each in dispatchers for worker in each.workers):
        slots.setdefault(_kind(worker.toolchain, worker.target), Counter())[worker.state] += 1
    waits: dict[Kind, list[float]] = {kind: [] for kind in slots}
    for compile in await pending.due():
        if compile.priority is not Priority.PERSON:  # jobs may wait for hours
            continue
        kind = _kind(compile.needs.toolchain, compile.needs.target)
        waits.setdefault(kind if kind in slots else (compile.needs.target.kind, _OTHER), []).append(
            compile.waited
        )
    ready = sum(each.ready for each in dispatchers)
    return Load(
        {"ready": ready, "not ready": len(dispatchers) - ready},
        [
            TargetLoad(
                *kind,
                waiting=len(waited),
                oldest_wait=max(waited, default=0.0),
                slots={state: slots.get(kind, Counter())[state] for state in _STATES},
            )
            for kind, waited in sorted(waits.items())
        ],
    )


def _kind(toolchain: schema.Toolchain, target: schema.Target) -> Kind:
    """The kind as an operator names it. A worker that starts has no toolchain yet."""
    software = f"{toolchain.python} torch {toolchain.torch}" if toolchain.torch else ""
    return target.name or target.kind, software
