"""What is counted of a namespace, and its sum over several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from ...compiler import decoding

GAUGES = frozenset({"compiling", "entries", "bytes_stored"})
"""The fields of Counters that go up and down."""


class Counters(Struct, frozen=True, kw_only=True):
    """What happened since the first day; `compiling` (running or waiting), `entries` and `bytes_stored` are now.

    requests = hits + misses + coalesced + refused + overloaded + over_quota. A miss starts a compile (or ends there,
    with `wait=cache`); a coalesced request joined one; a refused one met a failure remembered from a moment ago; a
    rate-limited one does not count. seconds_saved: compile seconds that hits and coalesced requests did not spend;
    seconds_spent: what workers did, failures included. problems_searched, problems_recalled: tuning problems of
    published compiles that were measured there, and those whose winner was known. unverified: published compiles of
    which nothing was compared with eager; each one's manifest says why. fallbacks: graphs that clients compiled
    locally, by error code.
    """

    requests: int
    hits: int
    misses: int
    compiles: int
    coalesced: int
    failures: int
    seconds_saved: float
    seconds_spent: float
    refused: int
    overloaded: int
    over_quota: int
    rate_limited: int
    fetches: int
    damaged: int
    evictions: int
    bytes_served: int
    problems_searched: int
    problems_recalled: int
    unverified: int
    compiling: int
    entries: int
    bytes_stored: int
    fallbacks: dict[str, int]


class StatsReply(Counters, frozen=True, kw_only=True):
    """Answer of `GET /v1/stats`: of all namespaces that were asked for together, and of each."""

    namespaces: dict[str, Counters]


def sum_counters(parts: Iterable[Counters]) -> Counters:
    every = list(parts)
    sums: dict[str, int | float] = {
        name: sum(getattr(part, name) for part in every)
        for name in Counters.__struct_fields__
        if name != "fallbacks"
    }
    fallbacks: Counter[str] = Counter()
    for part in every:
        fallbacks.update(part.fallbacks)
    return decoding.convert({**sums, "fallbacks": dict(fallbacks)}, type=Counters)
