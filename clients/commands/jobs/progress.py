"""Texts for a running job: lines for its events, and one line for its state."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ....compiler.api.html.page import bytes_of, plural
from ....compiler.api.training import events
from ....compiler.api.training.jobs import CompileCounts
from ....compiler.api.training.series import COUNTED

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Control sequences of a terminal (ECMA-48): CSI, OSC, and escapes of one character."""


class ProgressDisplay:
    """Takes a job's events in their order. Of the logs only rank 0's are shown."""

    def __init__(self, *, state: str = "waiting") -> None:
        self.state = state
        self._ranks = 0
        self._restarts = 0
        self._started = 0.0
        self._first: dict[int, float] = {}
        self._latest: dict[int, events.StepMetrics] = {}
        self._compiles: dict[int, events.RankCompiles] = {}

    def take(self, numbered: events.NumberedEvent) -> Iterator[str]:
        event = numbered.event
        match event:
            case events.StepMetrics():
                before = self._latest.get(event.rank, event)
                values = {**before.values, **event.values}
                self._latest[event.rank] = msgspec.structs.replace(event, values=values)
            case events.LogLines():
                if event.rank == 0:
                    yield from log_lines(event, named=False)
            case events.CheckpointEvent():
                yield _checkpoint(event)
            case events.JobNote():
                where = f"rank {event.rank}: " if event.rank >= 0 else ""
                yield from f"{event.level}: {where}{event.text}".splitlines()
            case events.RankStarted():
                self._ranks = event.world_size
                self._started = max(self._started, event.at)
            case events.FirstStep():
                yield from self._first_step(event)
            case events.RankCompiles():
                self._compiles[event.rank] = event
            case events.RankEnded():
                if event.code:
                    yield events.describe_rank_exit(event)
            case events.StateChanged():
                yield from self._state_changed(event)

    def line(self) -> str:
        parts = [self.state]
        if self._ranks:
            parts.append(plural(self._ranks, "rank"))
        if self._restarts:
            parts.append(plural(self._restarts, "restart"))
        lead = self._latest.get(min(self._latest, default=0))
        if lead is not None:
            parts.append(f"step {lead.step}")
            if "loss" in lead.values:
                parts.append(f"loss {lead.values['loss']:.4g}")
            parts += self._throughput()
        if self._compiles:
            parts.append(compiles_text(self._counted()))
        return " · ".join(parts)

    def _throughput(self) -> list[str]:
        latest = [each.values for each in self._latest.values() if each.values.get("step_seconds", 0) > 0]
        for unit in COUNTED:
            rates = [values[unit] / values["step_seconds"] for values in latest if unit in values]
            if rates:
                return [f"{short(sum(rates))} {unit}/s"]
        lead = self._latest[min(self._latest)].values
        return [f"{1 / lead['step_seconds']:.3g} steps/s"] if lead.get("step_seconds", 0) > 0 else []

    def _counted(self) -> CompileCounts:
        each = self._compiles.values()
        return CompileCounts(
            hits=sum(of.hits for of in each),
            misses=sum(of.misses for of in each),
            fallbacks=sum(of.fallbacks for of in each),
        )

    def _first_step(self, event: events.FirstStep) -> Iterator[str]:
        self._first[event.rank] = event.at
        if len(self._first) == self._ranks and self._started:
            seconds = max(self._first.values()) - self._started
            yield f"all ranks took their first step, {seconds:.1f} s after the last had started"

    def _state_changed(self, event: events.StateChanged) -> Iterator[str]:
        if event.state in ("starting", "recovering"):
            self._first.clear()
            self._compiles.clear()
            self._started = 0.0
        self.state = event.state
        self._ranks = event.ranks or self._ranks
        self._restarts = max(self._restarts, event.restarts)
        yield f"{event.state}{event.detail and ': ' + event.detail}"


def log_lines(event: events.LogLines, *, named: bool) -> Iterator[str]:
    """The lines of a log as a terminal shows them. named: each with its rank."""
    for line in event.lines:
        shown = _as_a_terminal_shows(line)
        if shown or not line.strip():
            yield f"rank {event.rank}: {shown}" if named else shown


def _as_a_terminal_shows(line: str) -> str:
    """The last state of a progress bar; tabs become spaces, colors are removed."""
    states = _ESCAPES.sub("", line).split("\r")
    return next((state for state in reversed(states) if state.strip()), "").expandtabs()


def metrics_line(event: events.StepMetrics) -> str:
    values = ", ".join(f"{name} {value:.6g}" for name, value in event.values.items())
    return f"step {event.step} rank {event.rank}: {values}"


def compiles_text(compiles: CompileCounts) -> str:
    counts = {
        "captured": compiles.captured,
        "compiled before": compiles.compiled,
        "hits": compiles.hits,
        "misses": compiles.misses,
        "fallbacks": compiles.fallbacks,
    }
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"graphs: {shown or 'none'}"


def short(number: float) -> str:
    """Like 18.2 k."""
    for unit in ("", " k", " M", " G"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} T"


def _checkpoint(event: events.CheckpointEvent) -> str:
    if not event.kept:
        return f"checkpoint at step {event.step} failed, training continues: {event.detail}"
    size = f", {bytes_of(event.bytes)}" if event.bytes else ""
    return f"checkpoint {event.name} saved ({event.seconds:.1f} s{size})"
