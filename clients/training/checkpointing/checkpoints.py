"""Saves and restores the state of a training: model, optimizer, loader and random states, as `step-N`.

torch.distributed.checkpoint writes each rank's part while training goes on. Any number of ranks can read what DDP,
FSDP2 or tensor parallel ranks have saved. A checkpoint is complete or does not count. One that cannot be written is an
event of the job, and training goes on. Anyone who can write to the folder can run code in the processes that read it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import socket
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from ....compiler.api.training.events import CheckpointEvent
from ....compiler.errors import CheckpointError, SettingsError
from ...atomic_file import write_atomically
from ..metrics.optimizer_steps import process_steps
from ..metrics.reporter import process_reporter
from ..rank_environment import load_rank
from .random_states import random_states, set_random_states
from .rank_group import RankGroup, attempt, error_line
from .state_dicts import Optimizers, gather_state, load_rank_state, load_state, optimizer_list
from .storage import (
    CheckpointFile,
    CheckpointManifest,
    CheckpointStorage,
    damage,
    file_of,
    step_of,
    storage_of,
)


class Stateful(Protocol):
    """An object with a state: a scheduler, a loader, a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class _Pending(Struct, frozen=True):
    """This rank's part of a checkpoint in progress. `own`: bytes of what is neither the model's nor the optimizer's."""

    step: int
    folder: Path
    begun: float
    own: bytes
    model: Any
    """The Future of torch.distributed.checkpoint."""


class Checkpoints:
    """`step` is always the number of finished optimizer steps: of `step-100`, 100 are done.

    folder: a folder that all nodes see, or an object store's URL; None: the job's. keep: number of newest checkpoints.
    All ranks call each method alike. The first save or restore makes a process group (gloo).
    """

    def __init__(self, folder: str | Path | None = None, *, keep: int = 3) -> None:
        rank = load_rank()
        location = str(folder) if folder is not None else rank.checkpoints
        self._off = rank.capture
        if not location and not self._off:
            raise SettingsError(
                "no place for checkpoints is known",
                hint="Pass a folder, train.Checkpoints(folder), or run the script as a job",
            )
        if keep < 1:
            raise SettingsError(f"keep is {keep}", hint="Keep at least one checkpoint")
        self._location = location
        self._keep = keep
        self._ready: tuple[CheckpointStorage, RankGroup] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchrelay-checkpoint")
        self._pending: Future[None] | None = None
        self._cleared = False
        self.latest = ""
        """Name of the last one that was completed or restored."""
        _all().add(self)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait until the one in progress is complete or has failed. Call it before `destroy_process_group`."""
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
        """Copy the state now and write it while training goes on; waits for the one before. extra: other objects with
        a state, by name. wait: until it is complete or has failed.

        A failure to write raises no error: it is an event."""
        if self._off:
            return
        self.wait()
        begun = time.perf_counter()
        storage, group = self._begin()
        if not self._cleared:  # not earlier: a process that only restores may read while another writes
            self._cleared = True
            group.of_first(attempt(storage.clear)[1] if group.rank == 0 else "")
        name = f"step-{step}"
        state, zero = gather_state(model, optimizer_list(optimizer))
        own = {
            "random": random_states(),
            "ranks": group.size,
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "loader": loader.state_dict() if loader is not None else None,
            "extra": {key: value.state_dict() for key, value in (extra or {}).items()},
            "zero": zero,
        }
        buffer = io.BytesIO()
        torch.save(own, buffer)
        folder, problem = attempt(lambda: storage.begin(name))
        problems = [text for text in group.gathered(problem) if text]
        if problems or folder is None:
            attempt(lambda: storage.abandon(name))
            self._report(step, begun, f"no folder for it: {problems[0]}")
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
        """Runs in the thread, once this rank's files are written. Raises nothing."""
        assert self._ready is not None
        storage, group = self._ready
        files, problem = attempt(lambda: self._store_own(pending, name, storage, group))
        try:
            stored = group.gathered((files or [], problem))
            problems = [text for _, text in stored if text]
            every = [file for rank_files, _ in stored for file in rank_files]
            manifest = CheckpointManifest(pending.step, group.size, every)
            if group.rank == 0 and not problems:
                problems = [text for text in [attempt(lambda: storage.publish(name, manifest))[1]] if text]
            problem = group.of_first(problems[0] if problems else "")
        except RuntimeError as error:  # a rank is gone: the job's worker handles that
            problem = f"a rank was lost: {error_line(error)}"
        if problem:
            attempt(lambda: storage.abandon(name))
        else:
            storage.done(name)
            self.latest = name
            if group.rank == 0:
                self._prune(storage, pending.step)
        self._report(
            pending.step,
            pending.begun,
            problem,
            sum(file.bytes for file in manifest.files) if not problem else 0,
        )

    def _store_own(
        self, pending: _Pending, name: str, storage: CheckpointStorage, group: RankGroup
    ) -> list[CheckpointFile]:
        pending.model.result()
        own = pending.folder / f"rank-{group.rank}.pt"
        write_atomically(own, pending.own, mode=0o644, synced=True)
        names = [path.name for path in pending.folder.glob(f"__{group.rank}_*")] + [own.name]
        if group.rank == 0:
            names.append(".metadata")
        files = [file_of(pending.folder, each) for each in names]
        storage.store(name, files)
        return files

    def _prune(self, storage: CheckpointStorage, step: int) -> None:
        """Delete old checkpoints up to `step`. Later ones are damaged, and do not count among those to keep."""

        def old() -> None:
            names = [name for name in storage.names() if step_of(name) <= step]
            for name in names[self._keep :]:
                storage.drop(name)

        _, problem = attempt(old)
        if problem:
            process_reporter().note("warning", f"an old checkpoint could not be deleted: {problem}")

    def _report(self, step: int, begun: float, problem: str, size: int = 0) -> None:
        if self._ready is None or self._ready[1].rank != 0:
            return
        process_reporter().checkpoint(
            CheckpointEvent(
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
        """Restore the newest complete checkpoint and return its step; None if there is none.

        A damaged one is reported and skipped. Raises CheckpointError if the place cannot be read, or holds only
        damaged ones, or if the checkpoint is another model's.
        """
        if self._off:
            return None
        self.wait()
        storage, group = self._begin()
        names = group.of_first_or_raise(storage.names)
        for name in names:
            with contextlib.ExitStack() as stack:
                problem, folder = self._opened(storage, group, name, stack)
                if not problem:
                    step = step_of(name)
                    optimizers = optimizer_list(optimizer)
                    own = load_rank_state(folder, group)
                    load_state(folder, group, model, optimizers, own)
                    self._restore_own(own, group, scheduler, loader, extra or {})
                    group.gathered(None)  # no rank may delete it while another reads
                    self.latest = name
                    process_steps().resume(step)
                    return step
            if group.rank == 0:
                process_reporter().note("warning", f"checkpoint {name} is damaged and was skipped: {problem}")
        if names:
            raise CheckpointError(
                f"all {len(names)} checkpoints in {self._location} are damaged",
                hint="Move them away to start again",
            )
        return None

    def _opened(
        self, storage: CheckpointStorage, group: RankGroup, name: str, stack: contextlib.ExitStack
    ) -> tuple[str, Path]:
        """(problem or '', local folder). One rank of each machine opens the checkpoint; each rank checks a share."""
        manifest, problem = attempt(lambda: storage.manifest(name))
        hosts = group.gathered(socket.gethostname())
        folder: Path | None = None
        if manifest is not None and hosts.index(hosts[group.rank]) == group.rank:
            context = storage.opened(name, manifest)
            folder, problem = attempt(lambda: stack.enter_context(context))
        folders = group.gathered(folder)
        local = folders[hosts.index(hosts[group.rank])]
        if manifest is not None and local is not None:
            problem = damage(local, manifest.files[group.rank :: group.size])
        problems = [text for text in group.gathered(problem) if text]
        return (problems[0] if problems else ""), local or Path()

    def _restore_own(
        self,
        own: dict[str, Any],
        group: RankGroup,
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
            set_random_states(own["random"])
        elif group.rank == 0:
            process_reporter().note(
                "info",
                f"saved by {own['ranks']} ranks, restored by {group.size}: each goes on with random states of its own, "
                "and with the loader's state of rank 0",
            )

    def _begin(self) -> tuple[CheckpointStorage, RankGroup]:
        if self._ready is None:
            self._ready = storage_of(self._location), RankGroup()
        return self._ready


@functools.cache
def _all() -> weakref.WeakSet[Checkpoints]:
    return weakref.WeakSet()


def wait_for_all(seconds: float) -> None:
    """Wait until checkpoints in progress in this process are complete, at most for so long."""
    until = time.monotonic() + seconds
    for checkpoints in list(_all()):
        pending = checkpoints._pending
        if pending is not None:
            with contextlib.suppress(TimeoutError):
                pending.result(max(until - time.monotonic(), 0.0))
