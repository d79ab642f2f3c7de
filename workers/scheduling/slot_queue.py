"""The pool's book of slots and of jobs that wait for one: who fits where; namespaces in turn, each in its order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Literal

from msgspec import Struct

from ...compiler.api import compiles
from ...compiler.errors import NoWorker, Overloaded, RelayError
from ...compiler.request import schema
from ..messages import ForkServerReady
from .ray_cluster import RayNode

DeviceKind = Literal["cpu", "cuda"]


class DevicesHeld(NoWorker):
    """There are workers that could search, and training jobs have their devices."""


class SearchDevice(Struct, frozen=True):
    """A device on which a searcher can run, by a worker's name. `searching`: one does; `compiling`: a compile runs
    there too, on this worker or on another that shares the device."""

    worker: str
    searching: bool = False
    compiling: bool = False


class Slot:
    """One actor's place. `ready` stays while the actor is replaced: the next one will be the same."""

    def __init__(self, node: RayNode, kind: DeviceKind, index: int) -> None:
        self.node = node
        self.kind: DeviceKind = kind
        self.index = index
        self.worker = f"{node.id[:10]}-{kind}{index}"
        self.state: Literal["starting", "idle", "busy", "dead"] = "starting"
        self.ready: ForkServerReady | None = None
        self.failure: RelayError | None = None
        self.jobs_done = 0
        self.searching = False
        self.search = ""
        """The job that searches here."""
        self.yielded = False
        """Its search was ended because a training job came."""
        self.actor: Any = None
        self.keeper: asyncio.Task[None] | None = None

    def suits(self, toolchain: schema.Toolchain, target: schema.Target) -> bool:
        """Exactly this toolchain; for a GPU its model. Any CPU can build for any other of its platform."""
        if self.ready is None or self.kind != target.kind or self.ready.toolchain != toolchain:
            return False
        own = self.ready.target
        return target.kind == "cpu" or (own.name, own.capability) == (target.name, target.capability)

    def searches(self, toolchain: schema.Toolchain, target: schema.Target) -> bool:
        """Whether kernels for `target` can be measured here: what any CPU can build it need not be able to run."""
        return (
            self.ready is not None
            and self.suits(toolchain, target)
            and set(target.cpu) <= set(self.ready.target.cpu)
        )

    def device(self) -> tuple[str, str]:
        """Names what a searcher measures on: a GPU, however many slots share it; of a CPU each slot is one."""
        gpu = self.ready.device if self.ready else ""
        return (self.node.id, gpu or self.worker)

    def held(self, held: Collection[tuple[str, str]]) -> bool:
        """Whether `held` (nodes, and their GPUs; '' for a node's CPU) has what it measures on."""
        return self.ready is not None and (self.node.id, self.ready.device) in held

    def up(self) -> bool:
        return self.state in ("idle", "busy")

    def may_come(self, kind: DeviceKind) -> bool:
        """Whether it is coming up for the first time, so that what it will be is not known yet."""
        return self.kind == kind and self.ready is None and self.failure is None

    def info(self) -> compiles.WorkerInfo:
        unknown = schema.Toolchain(python="", torch="", triton="", cuda="", platform="")
        target = schema.Target(kind=self.kind, name="", capability="", units=0, cpu=[])
        return compiles.WorkerInfo(
            id=self.worker,
            toolchain=self.ready.toolchain if self.ready else unknown,
            target=self.ready.target if self.ready else target,
            state=self.state,
            jobs_done=self.jobs_done,
            host=self.node.host,
            isolation=self.ready.isolation if self.ready else [],
            searching=self.searching,
            processors=self.ready.processors if self.ready else 0,
        )


class _Waiter:
    def __init__(self, namespace: str, toolchain: schema.Toolchain, target: schema.Target) -> None:
        self.namespace = namespace
        self.toolchain = toolchain
        self.target = target
        self.slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()


class SlotQueue:
    """All slots, and the queue. Changes of a slot's state are followed by `serve`."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, DeviceKind, int], Slot] = {}
        self.held: set[tuple[str, str]] = set()
        """Nodes and their GPUs ('': CPU) that ranks of training jobs hold: nothing is measured there meanwhile."""
        self._waiting: list[_Waiter] = []
        self._served: dict[str, int] = {}
        """When each namespace was last given a slot, in slots given."""
        self._given = 0

    def waiting(self) -> int:
        return len(self._waiting)

    def lanes(self, toolchain: schema.Toolchain, target: schema.Target) -> list[SearchDevice]:
        """One for each device that is up. Raises NoWorker where there is none, nor one to come; and where training jobs
        hold all of them: a rank may wait for a compile that waits for a search."""
        by_device: dict[tuple[str, str], list[Slot]] = {}
        suitable = [slot for slot in self.all.values() if slot.searches(toolchain, target)]
        if not suitable and not any(slot.may_come(target.kind) for slot in self.all.values()):
            raise self._none_for(toolchain, target)
        if suitable and all(slot.held(self.held) for slot in suitable):
            raise DevicesHeld("training jobs hold all devices on which kernels could be measured", hint="")
        for slot in suitable:
            if slot.up() and not slot.held(self.held):
                by_device.setdefault(slot.device(), []).append(slot)
        lanes = []
        for slots in by_device.values():
            best = min(slots, key=lambda slot: (not slot.searching, slot.state == "busy"))
            compiling = any(slot.state == "busy" for slot in slots)
            lanes.append(SearchDevice(best.worker, searching=best.searching, compiling=compiling))
        return lanes

    def take_lane(self, worker: str, toolchain: schema.Toolchain, target: schema.Target) -> Slot:
        """The slot of that name, its device now searched. Raises NoWorker, Overloaded."""
        found = [
            s for s in self.all.values() if s.worker == worker and s.searches(toolchain, target) and s.up()
        ]
        if not found:
            raise NoWorker(f"worker {worker} is not there to search for {_describe(target)}")
        (slot,) = found
        if slot.held(self.held):
            raise Overloaded(f"a training job holds the device of worker {worker}")
        if any(other.searching and other.device() == slot.device() for other in self.all.values()):
            raise Overloaded(f"the device of worker {worker} is being searched")
        slot.searching = True
        return slot

    async def take(
        self,
        namespace: str,
        toolchain: schema.Toolchain,
        target: schema.Target,
        on_wait: Callable[[int], None],
    ) -> Slot:
        """An idle slot that suits, made busy; namespaces take turns, and within one it is first come, first served.

        `on_wait` hears how many are ahead if there is a wait. Raises NoWorker when no such slot is to come.
        """
        waiter = _Waiter(namespace, toolchain, target)
        ahead = self._ahead(namespace)
        self._waiting.append(waiter)
        self.serve()
        if not waiter.slot.done():
            on_wait(ahead)
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            if waiter.slot.done() and not waiter.slot.cancelled() and waiter.slot.exception() is None:
                self.give_back(waiter.slot.result())  # given and cancelled in the same turn of the loop
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def give_back(self, slot: Slot) -> None:
        if slot.state == "busy":
            slot.state = "idle"
        self.serve()

    def serve(self) -> None:
        """Give idle slots to those who wait; turn away whoever waits for what will not come."""
        while self._give_one():
            pass

    def _give_one(self) -> bool:
        """Of those whom an idle slot suits, the namespace that was served longest ago comes first."""
        for waiter in sorted(self._waiting, key=lambda waiter: self._served.get(waiter.namespace, 0)):
            if waiter.slot.done():
                continue
            suitable = [s for s in self.all.values() if s.suits(waiter.toolchain, waiter.target)]
            idle = next((slot for slot in suitable if slot.state == "idle"), None)
            if idle is not None:
                idle.state = "busy"
                self._waiting.remove(waiter)
                self._given += 1
                self._served[waiter.namespace] = self._given
                waiter.slot.set_result(idle)
                return True
            if not suitable and not any(s.may_come(waiter.target.kind) for s in self.all.values()):
                self._waiting.remove(waiter)
                waiter.slot.set_exception(self._none_for(waiter.toolchain, waiter.target))
        return False

    def _ahead(self, namespace: str) -> int:
        """How many get a slot before one more job of `namespace`, if all slots suited all and nobody else came."""
        waiting = Counter(waiter.namespace for waiter in self._waiting)
        own = waiting.pop(namespace, 0)
        return own + sum(min(count, own + 1) for count in waiting.values())

    def _none_for(self, toolchain: schema.Toolchain, target: schema.Target) -> NoWorker:
        asked = f"{_describe(target)}, {_toolchain(toolchain)}"
        warm = [s.ready for s in self.all.values() if s.ready]
        there = {f"{_describe(ready.target)}, {_toolchain(ready.toolchain)}" for ready in warm}
        broken = {f"worker {s.worker}: {s.failure.message}" for s in self.all.values() if s.failure}
        found = "; ".join([*sorted(there), *sorted(broken)]) or "no worker at all"
        return NoWorker(f"no worker for {asked} (there is: {found})")


def _describe(target: schema.Target) -> str:
    return "CPU" if target.kind == "cpu" else f"{target.name or 'GPU'} (capability {target.capability})"


def _toolchain(toolchain: schema.Toolchain) -> str:
    parts = [toolchain.python, f"torch {toolchain.torch}", toolchain.platform]
    if toolchain.triton:
        parts.append(f"triton {toolchain.triton}")
    if toolchain.cuda:
        parts.append(f"cuda {toolchain.cuda}")
    return " ".join(parts)
