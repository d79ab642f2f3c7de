"""Reports the metrics of a rank's steps to the job and to callbacks.

The script calls `report` with values of its own. Everything else is measured without the script: duration of optimizer
steps, learning rate, memory, and how long the rank waited for data. These are reported twice a second at most, as the
mean of the steps since the last report.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import Optimizer

from ....compiler.api.training.events import CheckpointEvent, FirstStep, JobNote, RankCompiles, StepMetrics
from ...reports.run_report import process_report
from ..rank_environment import RankEnvironment, load_rank
from .channel import RankChannel, process_channel
from .loader_waits import LoaderWaits, process_loader_waits
from .optimizer_steps import OptimizerSteps, process_steps

_EVERY_SECONDS = 0.5
"""Between two reports of what is measured without the script."""


class Callback:
    """Called with what is reported to the job, in the rank that it was added to. Override what you want; an error in
    it is the script's error."""

    def on_metrics(self, metrics: StepMetrics) -> None:
        """After each `train.report`, and the step's own values now and then."""

    def on_checkpoint(self, checkpoint: CheckpointEvent) -> None:
        """A checkpoint is complete, or has failed. In rank 0, from another thread than the script's."""

    def on_end(self) -> None:
        """The script has ended."""


class MetricsFile(Callback):
    """One JSON object a line, appended to `path`."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (closed at the end)

    def on_metrics(self, metrics: StepMetrics) -> None:
        self._file.write(msgspec.json.encode(metrics) + b"\n")

    def on_end(self) -> None:
        self._file.close()


class TensorBoard(Callback):
    """Event files in `folder`, for `tensorboard --logdir`. Needs the package `tensorboard`."""

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open: Any = None
        self._make = functools.partial(SummaryWriter, str(folder))
        self._lock = threading.Lock()

    def on_metrics(self, metrics: StepMetrics) -> None:
        for name, value in metrics.values.items():
            self._writer().add_scalar(name, value, metrics.step, walltime=metrics.at)

    def on_checkpoint(self, checkpoint: CheckpointEvent) -> None:
        if checkpoint.kept:
            self._writer().add_scalar("checkpoint_seconds", checkpoint.seconds, checkpoint.step)

    def on_end(self) -> None:
        if self._open is not None:
            self._open.close()

    def _writer(self) -> Any:
        """Made when there is something to write, so that no empty file is left."""
        with self._lock:
            self._open = self._open or self._make()
        return self._open


class MetricsReporter:
    """The metrics of one process. Without a reader it costs nothing: no tensor is read."""

    def __init__(
        self, rank: RankEnvironment, channel: RankChannel, steps: OptimizerSteps, waits: LoaderWaits
    ) -> None:
        self._rank = rank
        self._channel = channel
        self._steps = steps
        self._waits = waits
        self._callbacks: list[Callback] = []
        self._not_finite: set[str] = set()
        self._compiles = (0, 0, 0)
        self._first = True
        self._watching = False
        self._since = time.perf_counter()
        self._reported_steps = 0
        self._unreported: tuple[float, Any] | None = None
        self._waited: tuple[float, int] | None = None
        """Seconds and samples of the steps that are not reported yet."""

    # --- called by the script ----------------------------------------------------------------------------------

    def report(self, step: int | None = None, **values: Any) -> None:
        if not self._has_reader():
            return
        self._send(self._steps.latest if step is None else step, _numbers(values))

    def add_callback(self, callback: Callback) -> None:
        self._callbacks.append(callback)
        self.watch()

    def checkpoint(self, checkpoint: CheckpointEvent) -> None:
        self._channel.send(checkpoint)
        for callback in self._callbacks:
            callback.on_checkpoint(checkpoint)

    def note(self, level: Any, text: str) -> None:
        self._channel.send(JobNote(level=level, text=text[:4000], rank=self._rank.rank))

    # --- measured at each step ------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Report steps, if there is a reader. A second call has no effect."""
        if self._has_reader() and not self._watching:
            self._watching = True
            self._waits.watch_loaders()
            self._steps.listen(self._stepped)

    def end(self) -> None:
        """The script has ended: report what is not reported yet."""
        if self._unreported is not None and self._has_reader():
            self._report_steps(*self._unreported)
        self._report_compiles()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback.on_end()

    def _has_reader(self) -> bool:
        return not self._rank.capture and (self._channel.open or bool(self._callbacks))

    def _stepped(self, optimizer: Optimizer) -> None:
        if not self._has_reader():
            return
        self._take_waits()
        first, self._first = self._first, False
        if first:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            self._channel.send(FirstStep(rank=self._rank.rank, at=time.time(), attempt=self._rank.attempt))
            self._report_compiles()
        now = time.perf_counter()
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if first:
            self._since = now  # the time before is start-up and compiles
        if first or now - self._since >= _EVERY_SECONDS:
            self._report_steps(now, rate)
            self._report_compiles()
        else:
            self._unreported = now, rate

    def _take_waits(self) -> None:
        """Called at each step: the wait for a batch after the last step belongs to no step."""
        taken, before = self._waits.taken(), self._waited or (0.0, 0)
        if taken is not None:
            self._waited = before[0] + taken[0], before[1] + taken[1]

    def _report_steps(self, now: float, rate: Any) -> None:
        """The mean of the steps since the last call. now: the end of the last of them."""
        steps = max(self._steps.done - self._reported_steps, 1)
        values = {"memory_bytes": float(_memory())}
        if now > self._since:
            values["step_seconds"] = (now - self._since) / steps
        if isinstance(rate, float | int) or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu"):
            values["learning_rate"] = float(rate)
        if self._waited is not None:
            values["wait_seconds"] = self._waited[0] / steps
            if self._waited[1]:
                values["samples"] = self._waited[1] / steps
            self._waited = 0.0, 0
        self._send(self._steps.latest, values)
        self._since, self._reported_steps, self._unreported = now, self._steps.done, None

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        real = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in values.keys() - real.keys() - self._not_finite:
            self._not_finite.add(name)
            self.note("warning", f"{name} is {values[name]} at step {step}")
        metrics = StepMetrics(rank=self._rank.rank, step=step, at=time.time(), values=real)
        self._channel.send(metrics)
        for callback in self._callbacks:
            callback.on_metrics(metrics)

    def _report_compiles(self) -> None:
        found = process_report().snapshot()
        hits = found.hits + found.disk_hits + found.shared
        counts = hits, found.misses + found.coalesced, sum(found.fallbacks.values())
        if counts == self._compiles:
            return
        self._compiles = counts
        self._channel.send(
            RankCompiles(
                rank=self._rank.rank,
                hits=counts[0],
                misses=counts[1],
                fallbacks=counts[2],
                reasons=sorted(found.fallbacks),
                attempt=self._rank.attempt,
            )
        )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Plain numbers; tensors of one device are read together. Raises ValueError for a tensor of more than one
    element, TypeError for a value that is not a number."""
    numbers: dict[str, float] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            gather: Callable[[], torch.Tensor] | None = getattr(value, "full_tensor", None)
            tensor = gather() if gather is not None else value  # a DTensor
            if tensor.numel() != 1:
                raise ValueError(f"{name} has {tensor.numel()} elements; report one number, such as its mean")
            tensors[name] = tensor.detach().reshape(())
        else:
            numbers[name] = float(value)
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    for names in by_device.values():
        read = torch.stack([tensors[name].to(torch.float64) for name in names]).tolist()
        numbers |= dict(zip(names, read, strict=True))
    return {name: numbers[name] for name in values}


def _memory() -> int:
    """Bytes: the peak of the GPU's allocator, or the resident memory of this process now."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.max_memory_allocated())
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@functools.cache
def process_reporter() -> MetricsReporter:
    return MetricsReporter(load_rank(), process_channel(), process_steps(), process_loader_waits())


def report(step: int | None = None, **values: Any) -> None:
    """Report numbers of a step to the job: `train.report(step=step, loss=loss, tokens=batch.numel())`.

    Values are numbers or tensors of one element; those on a device are read together, and not at all without a
    reader. Names with a meaning: loss, samples, tokens (of this step and this rank), gradient_norm. step: from 0; the
    optimizer's last one if not given. Raises ValueError, TypeError for anything else.
    """
    process_reporter().report(step, **values)


def add_callback(callback: Callback) -> None:
    """Call `callback` in this process. Any rank may add one; most scripts do so `if rank == 0`."""
    process_reporter().add_callback(callback)
