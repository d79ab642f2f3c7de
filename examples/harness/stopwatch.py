"""Measures a training loop: process start, first step, later steps; writes a JSON record."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchrelay.clients.reports.start_trace import seconds_since_process_start


class Stopwatch:
    """Counts from its creation, which belongs just before `torch.compile`.

    A step is what lies inside `with watch.step():`. It must end with something that waits for the
    device, such as `loss.item()`.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._first_in_process: float | None = None
        self._later: list[float] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        after = time.perf_counter()
        if self._first is None:
            self._first = after - self._started
            self._first_in_process = seconds_since_process_start()
        else:
            self._later.append(after - before)

    def summary(self) -> str:
        later = f", then {self.step_milliseconds:.1f} ms a step" if self._later else ""
        return f"first step after {self._first or 0.0:.2f} s{later}"

    @property
    def step_milliseconds(self) -> float | None:
        """Median over all steps but the first."""
        return statistics.median(self._later) * 1e3 if self._later else None

    def record(self, backend: str, losses: list[float], **more: Any) -> dict[str, Any]:
        """Everything measured; with torchrelay's own report when it was the back end."""
        report = None
        if backend == "torchrelay":
            import msgspec
            import torchrelay

            report = msgspec.to_builtins(torchrelay.report())
        return {
            "backend": backend,
            "seconds_to_first_step": self._first,
            "seconds_from_process_start": self._first_in_process,
            "step_milliseconds": self.step_milliseconds,
            "steps": len(losses),
            "losses": losses,
            "report": report,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            **more,
        }


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
