"""What people see of a running job: its events in, one line that says how it is, and lines to print, out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ....compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    JobNote,
    LogLines,
    RankCompiles,
    RankEnded,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
    describe_rank_exit,
)
from ....compiler.api.training.jobs import CompileCounts

_UNITS = ("tokens", "samples")
"""What throughput is counted in: the first that a job tells of."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""What a terminal obeys and does not show (ECMA-48): CSI and OSC sequences, and escapes of one character."""


class ProgressDisplay:
    """A job's events, one after the other. rank: whose log is printed; -1: everyone's, each line with its rank."""

    def __init__(self, *, state: str = "waiting", rank: int = 0) -> None:
        self.state = state
        self._rank = rank
        self._ranks = 0
        self._restarts = 0
        self._started = 0.0
        self._first: dict[int, float] = {}
        self._latest: dict[int, StepMetrics] = {}
        self._compiles: dict[int, RankCompiles] = {}

    def take(self, event: TrainEvent) -> Iterator[str]:
        """The lines that it is worth."""
        match event:
            case StepMetrics():
                before = self._latest.get(event.rank)
                values = {**before.values, **event.values} if before is not None else event.values
                self._latest[event.rank] = StepMetrics(
                    rank=event.rank, step=event.step, at=event.at, values=values
                )
            case LogLines():
                if self._rank in (-1, event.rank):
                    yield from log_lines(event, named=self._rank == -1)
            case CheckpointEvent():
                yield _checkpoint(event)
            case JobNote():
                where = f"rank {event.rank}: " if event.rank >= 0 else ""
                yield from f"{event.level}: {where}{event.text}".splitlines()
            case RankStarted():
                self._ranks = event.world_size
                self._started = max(self._started, event.at)
            case FirstStep():
                yield from self._first_step(event)
            case RankCompiles():
                self._compiles[event.rank] = event
            case RankEnded():
                if event.code:
                    yield describe_rank_exit(event)
            case StateChanged():
                yield from self._turned(event)

    def line(self) -> str:
        """How it is now."""
        parts = [self.state]
        if self._ranks:
            parts.append(f"{self._ranks} rank{'' if self._ranks == 1 else 's'}")
        if self._restarts:
            parts.append(f"{self._restarts} restart{'' if self._restarts == 1 else 's'}")
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
        for unit in _UNITS:
            rates = [
                values[unit] / values["step_seconds"]
                for values in (each.values for each in self._latest.values())
                if unit in values and values.get("step_seconds", 0) > 0
            ]
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

    def _first_step(self, event: FirstStep) -> Iterator[str]:
        self._first[event.rank] = event.at
        if len(self._first) == self._ranks and self._started:
            seconds = max(self._first.values()) - self._started
            yield f"all ranks took their first step, {seconds:.1f} s after the last had started"

    def _turned(self, event: StateChanged) -> Iterator[str]:
        if event.state in ("starting", "recovering"):
            self._first.clear()
            self._compiles.clear()
            self._started = 0.0
        self.state = event.state
        self._ranks = event.ranks or self._ranks
        self._restarts = max(self._restarts, event.restarts)
        yield f"{event.state}{event.detail and ': ' + event.detail}"


def log_lines(event: LogLines, *, named: bool) -> Iterator[str]:
    """named: each with its rank."""
    for line in event.lines:
        shown = _on_a_terminal(line)
        if shown or not line.strip():
            yield f"rank {event.rank}: {shown}" if named else shown


def _on_a_terminal(line: str) -> str:
    """What is left to see of it: of a progress bar the last state; tabs as spaces, and no colors."""
    states = _ESCAPES.sub("", line).split("\r")
    return next((state for state in reversed(states) if state.strip()), "").expandtabs()


def metrics_line(event: StepMetrics) -> str:
    return f"step {event.step} rank {event.rank}: {values_text(event.values)}"


def values_text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def compiles_text(compiles: CompileCounts) -> str:
    counts = {
        "captured": compiles.captured,
        "compiled before": compiles.compiled,
        "hits": compiles.hits,
        "misses": compiles.misses,
        "fallbacks": compiles.fallbacks,
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"graphs: {told or 'none'}"


def short(number: float) -> str:
    """Like 18.2 k."""
    for unit in ("", " k", " M", " G"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} T"


def _checkpoint(event: CheckpointEvent) -> str:
    if not event.kept:
        return f"checkpoint at step {event.step} failed, training goes on: {event.detail}"
    size = f", {event.bytes / (1 << 20):.1f} MiB" if event.bytes else ""
    return f"checkpoint {event.name} kept ({event.seconds:.1f} s{size})"
