"""A training's state, kept and found again: model, optimizer, loader, random states in; `step-N` in a folder or store.

By torch.distributed.checkpoint, each rank its own part, while training goes on: what was saved by DDP, FSDP2 or tensor
parallel ranks, few or many, is read by any others. A checkpoint is whole or is not there; one that cannot be written
is an event of the job, and training goes on. Who can write to the place can run code in whoever reads it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import random
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim.optimizer import Optimizer

from ...compiler.errors import CheckpointError, SettingsError
from ...compiler.train_records import Checkpoint
from ..settings import load_rank
from ..whole_file import write_whole
from .ending import until_gloo_is_idle
from .metrics import process_telling
from .places import File, Place, Whole, damage, file_of, place_of, step_of
from .steps import process_steps

T = TypeVar("T")
Optimizers = Optimizer | Iterable[Optimizer] | None


class Stateful(Protocol):
    """What can say its state and take it back: a scheduler, a loader, a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class _Pending(Struct, frozen=True):
    """This rank's part of a checkpoint under way. `own`: bytes of what is not the model's or the optimizer's."""

    step: int
    folder: Path
    begun: float
    own: bytes
    model: Any
    """The Future of torch.distributed.checkpoint."""


class Checkpoints:
    """`step` is always the number of finished optimizer steps: of `step-100`, 100 are done.

    folder: that all nodes see, or an object store's URL; None: where the job says. keep: how many, the newest.
    All ranks call each method alike. The first save or restore makes a process group (gloo).
    """

    def __init__(self, folder: str | Path | None = None, *, keep: int = 3) -> None:
        rank = load_rank()
        location = str(folder) if folder is not None else rank.checkpoints
        self._off = rank.capture
        if not location and not self._off:
            raise SettingsError(
                "no place for checkpoints is known",
                hint="Say train.Checkpoints(folder), or start it as a job",
            )
        if keep < 1:
            raise SettingsError(f"keep is {keep}", hint="Keep at least one checkpoint")
        self._location = location
        self._keep = keep
        self._ready: tuple[Place, _Group] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchrelay-checkpoint")
        self._pending: Future[None] | None = None
        self._cleared = False
        self.latest = ""
        """Name of the last one that was made whole or restored."""
        _all().add(self)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    def wait(self) -> None:
        """Until the one under way is whole, or has failed. Before `destroy_process_group`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    # --- saving --------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        wait: bool = False,
    ) -> None:
        """Copy the state now and write it beside the training; waits for the one before. extra: whatever else has a
        state, by name. wait: until it is whole, or has failed. A failure to write raises nothing: it is an event."""
        if self._off:
            return
        self.wait()
        begun = time.perf_counter()
        place, group = self._begin()
        if not self._cleared:  # now: who only restores may read beside who writes
            self._cleared = True
            group.of_first(_tried(place.clear)[1] if group.rank == 0 else "")
        name = f"step-{step}"
        state, zero = _state_of(model, _list(optimizer))
        own = {
            "random": _random_states(),
            "ranks": group.size,
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "loader": loader.state_dict() if loader is not None else None,
            "extra": {key: value.state_dict() for key, value in (extra or {}).items()},
            "zero": zero,
        }
        buffer = io.BytesIO()
        torch.save(own, buffer)
        folder, problem = _tried(lambda: place.begin(name))
        problems = [text for text in group.gathered(problem) if text]
        if problems or folder is None:
            _tried(lambda: place.abandon(name))
            self._told(step, begun, f"no folder for it: {problems[0]}")
            return
        writer = FileSystemWriter(folder)
        made: Any = async_save(
            state, storage_writer=writer, process_group=group.group, no_dist=group.group is None
        )
        future = getattr(made, "upload_completion", made)
        pending = _Pending(step=step, folder=folder, begun=begun, own=buffer.getvalue(), model=future)
        self._pending = self._thread.submit(self._finish, pending, name)
        if wait:
            self.wait()

    def _finish(self, pending: _Pending, name: str) -> None:
        """In the thread: what happens once this rank's files are written. Raises nothing."""
        assert self._ready is not None
        place, group = self._ready
        files, problem = _tried(lambda: self._keep_own(pending, name, place, group))
        try:
            told = group.gathered((files or [], problem))
            problems = [text for _, text in told if text]
            whole = Whole(pending.step, group.size, [file for kept, _ in told for file in kept])
            if group.rank == 0 and not problems:
                problems = [text for text in [_tried(lambda: place.publish(name, whole))[1]] if text]
            problem = group.of_first(problems[0] if problems else "")
        except RuntimeError as error:  # a rank is gone: the job's worker sees to that
            problem = f"a rank was lost: {_line(error)}"
        if problem:
            _tried(lambda: place.abandon(name))
        else:
            place.done(name)
            self.latest = name
            if group.rank == 0:
                self._prune(place, pending.step)
        self._told(
            pending.step,
            pending.begun,
            problem,
            sum(file.bytes for file in whole.files) if not problem else 0,
        )

    def _keep_own(self, pending: _Pending, name: str, place: Place, group: _Group) -> list[File]:
        pending.model.result()
        own = pending.folder / f"rank-{group.rank}.pt"
        write_whole(own, pending.own, mode=0o644, synced=True)
        names = [path.name for path in pending.folder.glob(f"__{group.rank}_*")] + [own.name]
        if group.rank == 0:
            names.append(".metadata")
        files = [file_of(pending.folder, each) for each in names]
        place.keep(name, files)
        return files

    def _prune(self, place: Place, step: int) -> None:
        """Of those up to `step`: beyond it are damaged ones, which would take the place of whole ones."""

        def old() -> None:
            names = [name for name in place.names() if step_of(name) <= step]
            for name in names[self._keep :]:
                place.drop(name)

        _, problem = _tried(old)
        if problem:
            process_telling().note("warning", f"an old checkpoint could not be deleted: {problem}")

    def _told(self, step: int, begun: float, problem: str, size: int = 0) -> None:
        if self._ready is None or self._ready[1].rank != 0:
            return
        process_telling().checkpoint(
            Checkpoint(
                step=step,
                name=f"step-{step}",
                kept=not problem,
                seconds=time.perf_counter() - begun,
                bytes=size,
                detail=problem,
            )
        )

    # --- restoring -----------------------------------------------------------------------------------------

    def restore(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> int | None:
        """Take up the newest whole checkpoint and give its step; None if there is none.

        A damaged one is told of and skipped. Raises CheckpointError if the place cannot be read, or holds only
        damaged ones, or if the checkpoint is another model's.
        """
        if self._off:
            return None
        self.wait()
        place, group = self._begin()
        names = group.of_first_or_raise(place.names)
        for name in names:
            with contextlib.ExitStack() as stack:
                problem, folder = self._opened(place, group, name, stack)
                if not problem:
                    step = step_of(name)
                    optimizers = _list(optimizer)
                    own = _load_own(folder, group)
                    _load(folder, group, model, optimizers, own)
                    self._take_up(own, group, scheduler, loader, extra or {})
                    group.gathered(None)  # nobody deletes it while another reads
                    self.latest = name
                    process_steps().resume(step)
                    return step
            if group.rank == 0:
                process_telling().note("warning", f"checkpoint {name} is damaged and was skipped: {problem}")
        if names:
            raise CheckpointError(
                f"all {len(names)} checkpoints in {self._location} are damaged",
                hint="Move them away to start anew",
            )
        return None

    def _opened(
        self, place: Place, group: _Group, name: str, stack: contextlib.ExitStack
    ) -> tuple[str, Path]:
        """(what is wrong, a folder on this machine). One rank of each machine opens; all look at their share."""
        whole, problem = _tried(lambda: place.whole(name))
        hosts = group.gathered(socket.gethostname())
        folder: Path | None = None
        if whole is not None and hosts.index(hosts[group.rank]) == group.rank:
            context = place.opened(name, whole)
            folder, problem = _tried(lambda: stack.enter_context(context))
        folders = group.gathered(folder)
        mine = folders[hosts.index(hosts[group.rank])]
        if whole is not None and mine is not None:
            problem = damage(mine, whole.files[group.rank :: group.size])
        problems = [text for text in group.gathered(problem) if text]
        return (problems[0] if problems else ""), mine or Path()

    def _take_up(
        self,
        own: dict[str, Any],
        group: _Group,
        scheduler: Stateful | None,
        loader: Stateful | None,
        extra: Mapping[str, Stateful],
    ) -> None:
        if scheduler is not None and own["scheduler"] is not None:
            scheduler.load_state_dict(own["scheduler"])
        if loader is not None and own["loader"] is not None:
            loader.load_state_dict(own["loader"])
        for key, value in extra.items():
            if key in own["extra"]:
                value.load_state_dict(own["extra"][key])
        if own["ranks"] == group.size:
            _set_random_states(own["random"])
        elif group.rank == 0:
            process_telling().note(
                "info",
                f"saved by {own['ranks']} ranks, taken up by {group.size}: each goes on with random states of its own, "
                "and with the loader's state of rank 0",
            )

    def _begin(self) -> tuple[Place, _Group]:
        if self._ready is None:
            self._ready = place_of(self._location), _Group()
        return self._ready


class _Group:
    """The ranks that share checkpoints, over a gloo group of their own; a process on its own is one rank."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.group: Any = dist.new_group(backend="gloo") if several else None
        if several:
            atexit.register(until_gloo_is_idle)  # under torchrun too
        self.rank = dist.get_rank() if several else 0
        self.size = dist.get_world_size() if several else 1

    def gathered(self, mine: T) -> list[T]:
        """Every rank's, in their order. Raises RuntimeError if one is gone."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def of_first(self, mine: T) -> T:
        if self.group is None:
            return mine
        found = [mine]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def of_first_or_raise(self, make: Callable[[], T]) -> T:
        """What `make` gives in rank 0; its CheckpointError in all."""
        value, problem = _tried(make) if self.rank == 0 else (None, "")
        found = self.of_first((value, problem))
        if found[1]:
            raise CheckpointError(found[1])
        return found[0]  # type: ignore[return-value]


def _tried(make: Callable[[], T]) -> tuple[T | None, str]:
    """(what it gives, '') or (None, why not): one rank's failure must reach all of them."""
    try:
        return make(), ""
    except CheckpointException as error:  # torch.distributed.checkpoint's; it is no Exception
        first = next(iter(error.failures.items()), None)
        return None, f"rank {first[0]}: {_line(first[1][0])}" if first else _line(error)
    except CheckpointError as error:
        return None, error.message
    except Exception as error:
        return None, _line(error)


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:500]


def _list(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _whole_state(optimizer: Optimizer) -> bool:
    """Whether each rank has a part that only the optimizer itself can put together: ZeroRedundancyOptimizer."""
    return hasattr(optimizer, "consolidate_state_dict")


def _state_of(model: nn.Module, optimizers: list[Optimizer]) -> tuple[dict[str, Any], list[Any]]:
    """(by names of parameters, which do not depend on how the model is spread; whole states, of rank 0 alone)."""
    zero = []
    for optimizer in optimizers:
        if _whole_state(optimizer):
            optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
            zero.append(optimizer.state_dict() if dist.get_rank() == 0 else None)
    spread = [optimizer for optimizer in optimizers if not _whole_state(optimizer)]
    with process_steps().not_counted():
        of_model, of_optimizers = get_state_dict(model, spread)
    state: dict[str, Any] = {"model": of_model}
    if spread:
        state["optimizer"] = of_optimizers
    return state, zero


def _load(
    folder: Path, group: _Group, model: nn.Module, optimizers: list[Optimizer], own: dict[str, Any]
) -> None:
    """Raises CheckpointError for another model's."""
    spread = [optimizer for optimizer in optimizers if not _whole_state(optimizer)]
    with process_steps().not_counted():
        of_model, of_optimizers = get_state_dict(model, spread)
    reader = FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    lacking = [name for name in of_model if f"model.{name}" not in known]
    if lacking:
        raise CheckpointError(
            f"the checkpoint has no {lacking[0]!r}, and lacks {len(lacking)} of this model's {len(of_model)} tensors",
            hint="It is another model's: name another folder",
        )
    state: dict[str, Any] = {"model": of_model}
    if spread:
        state["optimizer"] = of_optimizers
    # Partial: parameters that never had a gradient have no optimizer state there.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    try:
        load(
            state,
            storage_reader=reader,
            planner=planner,
            process_group=group.group,
            no_dist=group.group is None,
        )
    except CheckpointException as error:
        raise CheckpointError(f"{folder.name} cannot be taken up: {_tried(_raising(error))[1]}") from None
    set_state_dict(
        model, spread, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {})
    )
    for optimizer, whole in zip(filter(_whole_state, optimizers), own["zero"], strict=True):
        optimizer.load_state_dict(whole)


def _raising(error: BaseException) -> Callable[[], None]:
    def again() -> None:
        raise error

    return again


def _load_own(folder: Path, group: _Group) -> dict[str, Any]:
    """What this rank wrote, or rank 0 where there were fewer; whole optimizer states are rank 0's."""
    first: dict[str, Any] = _read(folder / "rank-0.pt")
    mine = folder / f"rank-{group.rank}.pt"
    if group.rank == 0 or first["ranks"] != group.size or not mine.exists():
        return first
    return {**_read(mine), "zero": first["zero"]}


def _read(file: Path) -> dict[str, Any]:
    """On the CPU: tensors of a GPU would all go to the one whose number they were saved with."""
    read: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    return read


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@functools.cache
def _all() -> weakref.WeakSet[Checkpoints]:
    return weakref.WeakSet()


def wait_for_all(seconds: float) -> None:
    """Until what is under way in this process is whole, or for so long."""
    until = time.monotonic() + seconds
    for checkpoints in list(_all()):
        pending = checkpoints._pending
        if pending is not None:
            with contextlib.suppress(TimeoutError):
                pending.result(max(until - time.monotonic(), 0.0))
