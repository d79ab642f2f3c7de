"""What a namespace's clients asked for over time: `GET /overview` answers Overview, as JSON or as a page, and
`/overview.csv` every hour of a year."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .runs import RunSummary

Period = Literal["day", "week", "month", "year"]


class Usage(Struct, frozen=True, kw_only=True):
    """What was counted in an interval. began: seconds since 1970; hours and days are those of UTC. The counters are
    those of `GET /v1/stats`; fallbacks: graphs that clients compiled locally, by error code.

    runs: scripts that told of their end. Percentiles over runs: ready_seconds, how long the graphs of a run took until
    they could be called, without tracing (50, 90 and 99 of 100 runs took less; within a fifth); hit_rates, how much of
    a run's graphs was a hit in 50 and 90 of 100 runs at least (within 0.05). Empty without runs.
    """

    began: float
    requests: int = 0
    hits: int = 0
    misses: int = 0
    coalesced: int = 0
    refused: int = 0
    overloaded: int = 0
    over_quota: int = 0
    rate_limited: int = 0
    compiles: int = 0
    failures: int = 0
    evictions: int = 0
    seconds_saved: float = 0.0
    seconds_spent: float = 0.0
    bytes_served: int = 0
    runs: int = 0
    ready_seconds: list[float] = []
    hit_rates: list[float] = []
    fallbacks: dict[str, int] = {}


class SlowMiss(Struct, frozen=True):
    """A graph of a run that was compiled for it. seconds: from the request to the callable."""

    key: str
    seconds: float
    run: str
    program: str


class Overview(Struct, frozen=True):
    """total: of the whole period, which ends now. intervals: hours, or days of a month and a year; those in which
    nothing was counted are left out. entries, bytes_stored: artifacts, now. recent: the latest runs. slowest: of the
    latest 100 runs, each one's slowest miss; the slowest first."""

    period: Period
    interval_seconds: int
    total: Usage
    intervals: list[Usage]
    compiling: int
    entries: int
    bytes_stored: int
    recent: list[RunSummary]
    slowest: list[SlowMiss]
