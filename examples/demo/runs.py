"""One run of an example in a fresh process on a simulated machine, and its measurements."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrelay.examples.harness.machines import FreshMachine

STAGES = {
    "trace": ("lookup", "digests", "guards", "install", "trace"),
    "encode": ("encode", "key"),
    "wait": ("wait",),
    "fetch": ("fetch",),
    "load": ("verify", "load"),
}
"""The client's stages in order: the label, and the entries of torchrelay.report() that it sums."""

LOCAL = "local torch.compile"
FIRST = "through the service, first time"
TEAMMATE = "a teammate, no compiler"


class RunFailed(Exception):
    """An example's process ended with an error or took too long; its output has been shown."""


@dataclass(frozen=True, kw_only=True)
class Example:
    title: str
    module: str
    arguments: tuple[str, ...] = ()


EXAMPLES = (
    Example(title="character GPT", module="torchrelay.examples.char_gpt", arguments=("--steps", "40")),
    Example(title="digits CNN", module="torchrelay.examples.digits_cnn", arguments=("--steps", "100")),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of the table. Times in seconds unless named otherwise."""

    example: str
    who: str
    first_step: float
    from_process_start: float | None
    step_milliseconds: float
    losses: tuple[float, ...]
    stages: dict[str, float] = field(default_factory=dict)
    hits: int = 0
    """Graphs that were hits in the service's cache."""
    misses: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """The part of the first step outside the client's stages: mostly the step itself."""
        return max(0.0, self.first_step - sum(self.stages.values()))


def run_example(
    example: Example,
    who: str,
    machine: FreshMachine,
    client: dict[str, str],
    *,
    on_line: Callable[[str], None],
    timeout: float = 300.0,
) -> Run:
    """`client`: environment that tells torchrelay's client where to go; empty runs local Inductor."""
    result = machine.root / "result.json"
    backend = "torchrelay" if client else "inductor"
    command = [sys.executable, "-m", example.module, *example.arguments]
    command += ["--backend", backend, "--json", str(result)]
    _stream(command, machine.environment(PYTHONUNBUFFERED="1", **client), on_line, timeout)
    return _read(example, who, json.loads(result.read_text()))


def _stream(
    command: list[str], environment: dict[str, str], on_line: Callable[[str], None], timeout: float
) -> None:
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    watchdog = threading.Timer(timeout, child.kill)
    watchdog.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            on_line(line.rstrip())
        status = child.wait()
    finally:
        watchdog.cancel()
        if child.poll() is None:
            child.kill()
            child.wait()
    if status != 0:
        raise RunFailed(f"{command[2]} ended with status {status}")


def _read(example: Example, who: str, record: dict[str, Any]) -> Run:
    report = record["report"] or {}
    return Run(
        example=example.title,
        who=who,
        first_step=record["seconds_to_first_step"],
        from_process_start=record["seconds_from_process_start"],
        step_milliseconds=record["step_milliseconds"],
        losses=tuple(record["losses"]),
        stages={stage: sum(report["seconds"][part] for part in parts) for stage, parts in STAGES.items()}
        if report
        else {},
        hits=report.get("hits", 0),
        misses=report.get("misses", 0),
        fallbacks=report.get("fallbacks", {}),
    )


def check(
    local: Run, first: Run, teammate: Run, tolerance: float, compilers: list[str]
) -> list[tuple[bool, str]]:
    """The demo's promises, and whether each was kept."""
    graphs = first.hits + first.misses
    return [
        (not compilers, "the teammate's PATH holds no compiler" + "".join(f": {name}" for name in compilers)),
        (
            graphs > 0 and first.misses == graphs and not first.fallbacks,
            f"first time: {first.misses} of {graphs} graphs compiled by the service",
        ),
        (
            teammate.hits == graphs and teammate.misses == 0 and not teammate.fallbacks,
            f"teammate: {teammate.hits} of {graphs} graphs from the cache, {teammate.misses} missed",
        ),
        *(
            (
                difference(local, run) <= tolerance,
                f"{run.who}: losses of {len(local.losses)} steps within {difference(local, run):.1e} "
                f"of local (tolerance {tolerance:.0e}, relative)",
            )
            for run in (first, teammate)
        ),
        (local.losses[-1] < local.losses[0], f"it learns: {local.losses[0]:.3f} to {local.losses[-1]:.3f}"),
    ]


def difference(one: Run, other: Run) -> float:
    """Largest relative difference between the losses of the same step."""
    if len(one.losses) != len(other.losses):
        return float("inf")
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(one.losses, other.losses, strict=True))


def child_folder(root: Path, example: Example, who: str) -> Path:
    folder = root / f"{example.module.rpartition('.')[2]}-{(LOCAL, FIRST, TEAMMATE).index(who)}"
    folder.mkdir()
    return folder
