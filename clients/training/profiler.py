"""Profiles steps of a rank with PyTorch's profiler, and stores the trace and its summary as files of the job.

Counts the optimizer's steps, so that an unchanged script can be profiled. The profiler runs for one warm-up step and
then for the requested steps. A separate process makes the summary. NVTX ranges, if requested, are emitted by
`torch.autograd.profiler.emit_nvtx` for the same number of steps afterwards: PyTorch cannot do both at once. Another
tool, such as Nsight Systems, records them.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import Optimizer
from torch.profiler import ProfilerAction, ProfilerActivity
from torch.profiler import profile as torch_profile
from torch.profiler import schedule as torch_schedule

from ...compiler import decoding
from ...compiler.api.training.events import JobNote
from ...compiler.api.training.jobs import ProfileSpec
from ...compiler.errors import RelayError
from ...compiler.torch_internals import counters
from ...compiler.torch_internals.triton import caches, extensions
from ..reports.profiling.advice import advice
from ..reports.profiling.memory_timeline import TensorSnapshot
from ..reports.profiling.summary import ProfileContext, ProfileSummary
from ..settings import child_environment
from .metrics.optimizer_steps import OptimizerSteps, process_steps
from .output_files import UploadFile

FOLDER = "profile"
"""The folder among a job's files of rank-N.trace.json.gz and rank-N.summary.json."""
_SUMMARY_SECONDS = 600.0
_CLOSE_SECONDS = 120.0
_ADVICE = 8

SendNote = Callable[[JobNote], None]


class ProfilerSession:
    """The profile of this process. An error of the profiler ends the profile with a note; training goes on.

    folder: for the files (default: one that is deleted when the session is closed). upload: is called with each file
    and its name in the job."""

    def __init__(
        self,
        profile: ProfileSpec,
        *,
        rank: int,
        world_size: int,
        folder: Path | None = None,
        note: SendNote = lambda _: None,
        upload: UploadFile | None = None,
        steps: OptimizerSteps | None = None,
    ) -> None:
        self._profile = profile
        self._rank = rank
        self._world_size = world_size
        self._own_folder = folder is None
        self._folder = folder or _own_folder()
        self._note = note
        self._upload_file = upload
        self._profiler: Any = None
        self._first = 0
        self._finished = -1
        self._over = profile.last <= profile.first
        self._snapshots: dict[str, list[TensorSnapshot]] = {}
        self._boundaries = 0
        self._optimizers: dict[int, Optimizer] = {}
        self._thread: threading.Thread | None = None
        self._nvtx: contextlib.ExitStack | None = None
        self._steps = steps or process_steps()
        self._steps.listen(self._stepped)
        self._begin_at(0)

    # --- steps ---------------------------------------------------------------------------------------------

    def _begin_at(self, finished: int) -> None:
        """Start the profiler if the step after `finished` steps is the warm-up step or one of the requested steps."""
        first, last = self._profile.first, self._profile.last
        if self._over or self._profiler is not None or not first - 1 <= finished < last:
            return
        if counters.profiler_enabled():  # starting ours would end the script's
            self._give_up("the script has a profiler on")
            return
        warm_up = 1 if finished < first else 0
        self._first = finished + warm_up
        self._finished = finished
        try:
            self._profiler = torch_profile(
                activities=_activities(),
                schedule=_schedule(warm_up, last - self._first),
                record_shapes=True,
                profile_memory=self._profile.memory,
                with_flops=True,
                on_trace_ready=self._ready,
            )
            self._profiler.start()
        except RuntimeError as error:
            self._give_up(f"the profiler did not start: {error}")
            return
        if not warm_up:
            self._snap()

    def _stepped(self, optimizer: Optimizer) -> None:
        """Called after each step."""
        finished = self._steps.base + self._steps.done
        self._optimizers[id(optimizer)] = optimizer
        self._turn_nvtx(finished)
        if self._over:
            return
        if self._profiler is None:
            self._begin_at(finished)
            return
        if finished != self._finished + 1:  # a checkpoint was restored
            # Start the next profiler at a later step: the optimizer's span is still open, and when it closes it writes
            # to the active profiler, which must be the one that saw it open.
            self._discard()
            return
        self._finished = finished
        if finished >= self._first:
            self._snap()
        try:
            self._profiler.step()
        except RuntimeError as error:
            self._give_up(f"the profiler failed: {error}")

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Stop the profiler, and wait at most `seconds` for the files."""
        self._end_nvtx()
        if not self._over:
            if self._profiler is not None and self._finished > self._first:  # some of the steps were profiled
                self._stop()
            else:
                self._discard()
                self._send_note("warning", "the script ended before the steps that were to be profiled")
        if self._thread is not None:
            self._thread.join(seconds)
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- the end of the steps ------------------------------------------------------------------------------

    def _ready(self, profiler: Any) -> None:
        """Called by PyTorch after the last requested step."""
        self._over = True
        trace = self._folder / f"rank-{self._rank}.trace.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            profiler.export_chrome_trace(str(trace))
        except (RuntimeError, OSError) as error:
            self._give_up(f"the trace could not be written: {error}")
            return
        self._thread = threading.Thread(
            target=self._finish, args=(trace, self._facts()), name="torchrelay-profile", daemon=True
        )
        self._thread.start()

    def _finish(self, trace: Path, facts: ProfileContext) -> None:
        try:
            self._summarize(trace, facts)
        except (OSError, RelayError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            self._send_note("warning", f"the profile was not stored: {error}")

    def _summarize(self, trace: Path, facts: ProfileContext) -> None:
        summary = trace.with_name(f"rank-{self._rank}.summary.json")
        known = trace.with_name(f"rank-{self._rank}.facts.json")
        known.write_bytes(msgspec.json.encode(facts))
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "torchrelay.clients.reports.profiling.summary",
                trace,
                known,
                summary,
            ],
            env=child_environment(TORCHRELAY_PREFETCH="0"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SUMMARY_SECONDS,
        )
        known.unlink()
        packed = trace.with_name(f"{trace.name}.gz")
        with trace.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        trace.unlink()
        if done.returncode != 0:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            self._send_note("warning", f"the profile has no summary: {''.join(last)}")
            self._upload(packed)
            return
        read = decoding.from_json(summary.read_bytes(), type=ProfileSummary)
        self._upload(summary)  # the small one first: a report can be made without the trace
        self._upload(packed)
        steps = f"steps {read.steps[0].number} to {read.steps[-1].number}"
        self._send_note("info", f"profiled {steps}: {packed.stat().st_size:,} bytes of trace")
        for finding in advice([read])[:_ADVICE]:
            self._send_note("info", f"profile: {finding.text}")

    def _upload(self, path: Path) -> None:
        if self._upload_file is not None:
            self._upload_file(f"{FOLDER}/{path.name}", path)

    def _stop(self) -> None:
        try:
            self._profiler.stop()
        except RuntimeError as error:
            self._give_up(f"the profiler failed: {error}")

    def _discard(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._snapshots, self._boundaries = {}, 0
        if profiler is not None:
            profiler.on_trace_ready = lambda _: None
            with contextlib.suppress(RuntimeError):
                profiler.stop()

    def _give_up(self, why: str) -> None:
        self._over = True
        self._send_note("warning", f"no profile: {why}")

    def _send_note(self, level: Any, text: str) -> None:
        self._note(JobNote(level=level, text=text[:4000], rank=self._rank))

    # --- NVTX ----------------------------------------------------------------------------------------------

    def _turn_nvtx(self, finished: int) -> None:
        """Emit NVTX ranges from one step after the profiler's last on, for as many steps as were profiled."""
        last = self._profile.last
        if not self._profile.nvtx or finished <= last:
            return
        if self._nvtx is None and finished == last + 1 and self._over:
            self._nvtx = contextlib.ExitStack()
            try:
                self._nvtx.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                self._nvtx = None
                self._send_note("warning", f"no NVTX ranges: {error}")
        elif finished > last + (last - self._profile.first):
            self._end_nvtx()

    def _end_nvtx(self) -> None:
        if self._nvtx is not None:
            self._nvtx.close()
            self._nvtx = None

    # --- what a trace lacks --------------------------------------------------------------------------------

    def _facts(self) -> ProfileContext:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)  # type: ignore[no-untyped-call]
        properties = {number: torch.cuda.get_device_properties(number) for number in devices}
        current = properties.get(torch.cuda.current_device()) if properties else None
        return ProfileContext(
            rank=self._rank,
            world_size=self._world_size,
            first=self._first,
            steps=self._finished - self._first,
            device="cuda" if properties else "cpu",
            device_name=current.name if current is not None else "",
            torch=str(torch.__version__),
            host=socket.gethostname(),
            snapshots=self._snapshots,
            triton=[str(folder) for folder in caches.triton_cache_folders()] if properties else [],
            nvdisasm=extensions.nvdisasm() if properties else "",
            memory={f"cuda:{number}": found.total_memory for number, found in properties.items()},
            capability=[current.major, current.minor] if current is not None else [],
        )

    def _snap(self) -> None:
        """Record the address and size of parameters, gradients and optimizer states at the end of a step."""
        if not self._profile.memory:
            return
        groups: dict[str, Iterator[torch.Tensor]] = {
            "parameters": _parameters(self._optimizers.values()),
            "gradients": (p.grad for p in _parameters(self._optimizers.values()) if p.grad is not None),
            "optimizer": _state(self._optimizers.values()),
        }
        found: dict[str, dict[str, dict[int, int]]] = {}
        with torch.no_grad():
            for category, tensors in groups.items():
                for tensor in tensors:
                    placed = _storage(tensor)
                    if placed is not None:
                        device, address, size = placed
                        found.setdefault(device, {}).setdefault(category, {})[address] = size
        for device in {*found, *self._snapshots}:
            taken = self._snapshots.setdefault(device, [])
            taken += [TensorSnapshot()] * (self._boundaries - len(taken))
            groups_of = found.get(device, {})
            taken.append(TensorSnapshot(**{name: list(each.items()) for name, each in groups_of.items()}))
        self._boundaries += 1


def _own_folder() -> Path:
    """A folder in the job's folder on this node, which is deleted even if this process is killed; else a temporary
    one."""
    prefix = ".torchrelay-profile-"
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=Path.cwd()))
    except OSError:
        return Path(tempfile.mkdtemp(prefix=prefix))


def _schedule(warm_up: int, active: int) -> Callable[[int], ProfilerAction]:
    with warnings.catch_warnings(action="ignore"):  # before the very first step there is no warm-up
        return torch_schedule(wait=0, warmup=warm_up, active=active, repeat=1)


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


def _parameters(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _state(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> tuple[str, int, int] | None:
    """(device, address, bytes) of the storage; None for a tensor without memory. Of a DTensor, this rank's shard."""
    to_local = getattr(tensor, "to_local", None)
    try:
        local = to_local() if to_local is not None else tensor
        storage = local.untyped_storage()
        device = "cpu" if local.device.type == "cpu" else f"{local.device.type}:{local.device.index}"
        return (device, storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        return None
