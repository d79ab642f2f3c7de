"""Stage 6: the pool's slots: which are there, which are idle, and on which devices searches can run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from ...compiler.api import compiles
from ...compiler.api.protocols import WORKERS
from ...compiler.errors import CompileKilled, NoWorker, Overloaded, RelayError
from ...compiler.request import schema
from ..messages import ForkServerReady, JobFailed, decode_answer
from ..settings import JobLimits, PoolSettings, SlotSettings
from .ray_cluster import RayNode

DeviceKind = Literal["cpu", "cuda"]


class SlotPlace(NamedTuple):
    """Where one actor can be. number: counts the node's slots of this kind and Python. python: of another environment;
    None: that of Ray's nodes."""

    node: str
    kind: DeviceKind
    number: int
    python: str | None = None

    def worker(self) -> str:
        """What people and logs call it."""
        toolchain = f"-{sha256(self.python.encode()).hexdigest()[:6]}" if self.python is not None else ""
        return f"{self.node[:10]}-{self.kind}{self.number}{toolchain}"


class DevicesHeld(NoWorker):
    """There are workers that could search, but training jobs hold their devices."""


class WorkersBusy(Overloaded):
    """There are such workers, and none of them is idle now."""


class SearchDevice(Struct, frozen=True):
    """A device on which a searcher can run, named by a worker. `searching`: one runs there; `compiling`: a compile
    runs there, on this worker or on another that shares the device."""

    worker: str
    searching: bool = False
    compiling: bool = False


class Slot:
    """An actor at a place. `ready` remains while the actor is replaced: the next one will have the same."""

    def __init__(self, node: RayNode, position: SlotPlace) -> None:
        self.node = node
        self.position = position
        self.kind = position.kind
        self.worker = position.worker()
        self.state: Literal["starting", "idle", "busy", "dead", "resting"] = "starting"
        self.ready: ForkServerReady | None = None
        self.failure: RelayError | None = None
        self.jobs_done = 0
        self.searching = False
        self.search = ""
        """The job that searches here."""
        self.yielded = ""
        """Why its search was ended before its end."""
        self.actor: Any = None
        self.lost = ""
        """Why it is gone, with what runs on it."""
        self.supervisor: asyncio.Task[None] | None = None

    async def warm(self) -> ForkServerReady:
        """Have its actor start a fork server. Raises the actor's error; CompileKilled, ProtocolMismatch."""
        answer = decode_answer(await self.actor.start.remote())
        if isinstance(answer, JobFailed):
            raise answer.error()
        if not isinstance(answer, ForkServerReady):
            raise CompileKilled(f"worker {self.worker} answered its start with {type(answer).__name__}")
        answer.check(self.worker)
        return answer

    def suits(self, toolchain: schema.Toolchain, target: schema.Target) -> bool:
        """Whether it has this toolchain and, for a GPU, this model. A CPU can build for any CPU of its platform, and
        for the other targets that it names."""
        ready = self.ready
        return ready is not None and schema.builds_for(
            ready.toolchain, ready.target, ready.others, toolchain, target
        )

    def searches(self, toolchain: schema.Toolchain, target: schema.Target) -> bool:
        """Whether kernels for `target` can be measured here: a CPU cannot run everything that it can build."""
        return (
            self.ready is not None
            and self.suits(toolchain, target)
            and target.name == self.ready.target.name
            and set(target.cpu) <= set(self.ready.target.cpu)
        )

    def device(self) -> tuple[str, str]:
        """Identifies the device of a searcher: a GPU, which slots may share; each CPU slot is a device of its own."""
        gpu = self.ready.device if self.ready else ""
        return (self.node.id, gpu or self.worker)

    def first_of_device(self) -> bool:
        """Whether it is a GPU's first slot, the one that is to search there, or a CPU slot."""
        return self.kind == "cpu" or self.position.number < self.node.gpus

    def is_on(self, devices: Collection[tuple[str, str]]) -> bool:
        """Whether `devices` (nodes and their GPUs; '' for a node's CPU) contains its device."""
        return self.ready is not None and (self.node.id, self.ready.device) in devices

    def up(self) -> bool:
        return self.state in ("idle", "busy")

    def may_come(self, kind: DeviceKind) -> bool:
        """Whether it starts for the first time, so that its toolchain and target are not known yet."""
        return self.kind == kind and self.ready is None and self.failure is None

    def info(self) -> compiles.WorkerInfo:
        unknown = schema.Toolchain(python="", torch="", triton="", cuda="", platform="")
        target = schema.Target(kind=self.kind, name="", capability="", units=0, cpu=[])
        return compiles.WorkerInfo(
            id=self.worker,
            toolchain=self.ready.toolchain if self.ready else unknown,
            target=self.ready.target if self.ready else target,
            state="starting" if self.state == "resting" else self.state,
            jobs_done=self.jobs_done,
            host=self.node.host,
            isolation=self.ready.isolation if self.ready else [],
            searching=self.searching,
            processors=self.ready.processors if self.ready else 0,
            others=self.ready.others if self.ready else [],
        )


def offered_slots(nodes: list[RayNode], settings: PoolSettings) -> dict[SlotPlace, RayNode]:
    """All slots of the nodes: each is there once for each Python."""
    offered: dict[SlotPlace, RayNode] = {}
    for node in nodes:
        most = node.gpus * settings.gpu_slots_per_gpu
        gpu_slots = min(most, max(node.gpus, node.gpu_slots))
        for python in (None, *settings.toolchains):
            offered |= {SlotPlace(node.id, "cpu", i, python): node for i in range(node.cpu_slots)}
            offered |= {SlotPlace(node.id, "cuda", i, python): node for i in range(gpu_slots)}
    return offered


def slot_settings(slot: Slot, settings: PoolSettings) -> SlotSettings:
    """What the slot's actor is started with."""
    first = slot.position[1:] == ("cpu", 0, None)
    return SlotSettings(
        worker=slot.worker,
        kind=slot.kind,
        gpu=slot.position.number % slot.node.gpus if slot.kind == "cuda" else 0,
        python=slot.position.python,
        engine=settings.engine,
        limits=JobLimits(memory_bytes=settings.memory_limit_bytes, request=settings.request_limits),
        jobs_root=settings.temp_dir,
        kernels_dir=settings.kernels_dir,
        kernels_bytes=settings.kernels_bytes,
        early_server=settings.early_server if first else None,
        equal_layers=settings.equal_layers,
        isolation=settings.isolation,
        warm_searches=slot.first_of_device(),
        protocol=WORKERS.number,
    )


class Slots:
    """All slots. Call `on_change` after a slot's state has changed."""

    def __init__(self) -> None:
        self.all: dict[SlotPlace, Slot] = {}
        self.elsewhere = 0
        """How many slots of the cluster other dispatchers use."""
        self.rank_devices: set[tuple[str, str]] = set()
        """Nodes and their GPUs ('': CPU) that ranks of training jobs hold: no search runs there."""
        self.searches_wanted = False
        """Somebody has asked for devices to search on, since this was last set to False."""
        self.coming = False
        """There is no slot, and there will be some: Ray is started again."""
        self.on_change: Callable[[], None] = lambda: None
        """Set by who wants to know of changes."""

    def room(self, toolchain: schema.Toolchain, target: schema.Target) -> int | None:
        """How many more jobs could begin at once; None: there is no such slot, and none to come."""
        suitable = [slot for slot in self.all.values() if slot.suits(toolchain, target)]
        if not suitable and not self._may_come(target):
            return None
        return sum(slot.state == "idle" for slot in suitable)

    def search_devices(self, toolchain: schema.Toolchain, target: schema.Target) -> list[SearchDevice]:
        """One for each device that is up. Raises NoWorker where there is none, nor one to come; and where training jobs
        hold all of them: a rank may wait for a compile that waits for a search."""
        self.searches_wanted = True
        suitable = [slot for slot in self.all.values() if slot.searches(toolchain, target)]
        if not suitable and not self._may_come(target):
            raise self._none_for(toolchain, target)
        if suitable and all(slot.is_on(self.rank_devices) for slot in suitable):
            raise DevicesHeld("training jobs hold all devices on which kernels could be measured", hint="")
        best: dict[tuple[str, str], Slot] = {}
        for slot in sorted(suitable, key=_worst_to_search):
            if slot.up() and not slot.is_on(self.rank_devices):
                best.setdefault(slot.device(), slot)
        # slots with other toolchains use the device too
        searched = {slot.device() for slot in self.all.values() if slot.searching}
        compiling = {slot.device() for slot in self.all.values() if slot.state == "busy"}
        return [
            SearchDevice(slot.worker, searching=device in searched, compiling=device in compiling)
            for device, slot in best.items()
        ]

    def take_search_device(self, worker: str, toolchain: schema.Toolchain, target: schema.Target) -> Slot:
        """The slot of that name, its device now searched. Raises NoWorker, Overloaded."""
        found = [
            s for s in self.all.values() if s.worker == worker and s.searches(toolchain, target) and s.up()
        ]
        if not found:
            raise NoWorker(f"worker {worker} is not there to search for {_describe(target)}")
        (slot,) = found
        if slot.is_on(self.rank_devices):
            raise Overloaded(f"a training job holds the device of worker {worker}")
        if any(other.searching and other.device() == slot.device() for other in self.all.values()):
            raise Overloaded(f"the device of worker {worker} is being searched")
        slot.searching = True
        return slot

    def take(self, toolchain: schema.Toolchain, target: schema.Target) -> Slot:
        """An idle slot that suits, on the GPU and the node that compile the least, made busy. Raises WorkersBusy;
        NoWorker if no such slot can come."""
        suitable = [slot for slot in self.all.values() if slot.suits(toolchain, target)]
        if not suitable and not self._may_come(target):
            raise self._none_for(toolchain, target)
        busy = [slot for slot in self.all.values() if slot.state == "busy"]
        devices = Counter(slot.device() for slot in busy)
        nodes = Counter(slot.node.id for slot in busy)
        slot = min(
            (slot for slot in suitable if slot.state == "idle"),
            key=lambda slot: (devices[slot.device()], nodes[slot.node.id]),
            default=None,
        )
        if slot is None:
            raise WorkersBusy(f"no worker for {_describe(target)}, {_toolchain(toolchain)} is idle")
        slot.state = "busy"
        return slot

    def give_back(self, slot: Slot) -> None:
        if slot.state == "busy":
            slot.state = "idle"
        self.on_change()

    def _may_come(self, target: schema.Target) -> bool:
        return self.coming or any(slot.may_come(target.kind) for slot in self.all.values())

    def _none_for(self, toolchain: schema.Toolchain, target: schema.Target) -> NoWorker:
        asked = f"{_describe(target)}, {_toolchain(toolchain)}"
        warm = [s.ready for s in self.all.values() if s.ready]
        there = {f"{_describe(ready.target)}, {_toolchain(ready.toolchain)}" for ready in warm}
        there |= {f"CPU {o.name}, {_toolchain(o.toolchain)}" for ready in warm for o in ready.others}
        broken = {f"worker {s.worker}: {s.failure.message}" for s in self.all.values() if s.failure}
        found = "; ".join([*sorted(there), *sorted(broken)]) or "no worker at all"
        others = f"; other dispatchers use {self.elsewhere} slots" if self.elsewhere else ""
        return NoWorker(f"no worker for {asked} (there is: {found}{others})")


def _worst_to_search(slot: Slot) -> tuple[bool, bool, bool]:
    """Sorts the slots of a device by how well they can search: first the one that does, then the one that is warm."""
    return (not slot.searching, not slot.first_of_device(), slot.state == "busy")


def _describe(target: schema.Target) -> str:
    return (
        f"CPU {target.name}".rstrip()
        if target.kind == "cpu"
        else f"{target.name or 'GPU'} (capability {target.capability})"
    )


def _toolchain(toolchain: schema.Toolchain) -> str:
    parts = [toolchain.python, f"torch {toolchain.torch}", toolchain.platform]
    if toolchain.triton:
        parts.append(f"triton {toolchain.triton}")
    if toolchain.cuda:
        parts.append(f"cuda {toolchain.cuda}")
    return " ".join(parts)
