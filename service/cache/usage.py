"""What was counted of a namespace in each hour and day of a year. Lua's `count_hour` adds, this module reads.

A figure's name in Redis is `<hour or day>:` and a counter, `fallback:<code>`, `runs`, or a class of runs: `ready:<n>`,
whose graphs took between _READY_BASE times 2 ** ((n - 1) / 2) and 2 ** (n / 2) seconds, `rate:<n>`, with n tenths of
hits.
"""

from __future__ import annotations

import asyncio
import csv
import io
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ...compiler.api.runs import RunSummary
from ...compiler.api.usage import Period, Usage
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys

HOUR_SECONDS, DAY_SECONDS = 3600, 86400
_LENGTHS: dict[Period, tuple[int, int]] = {
    "day": (HOUR_SECONDS, 24),
    "week": (HOUR_SECONDS, 7 * 24),
    "month": (DAY_SECONDS, 30),
    "year": (DAY_SECONDS, 365),
}
"""Seconds of an interval, and how many there are."""
_DAYS_OF_A_KEY = 32
_READY_BASE, _READY_CLASSES = 0.1, 32
_COUNTED = {
    name: type(default)
    for name, default in zip(Usage.__struct_fields__[1:], Usage.__struct_defaults__, strict=True)
    if type(default) in (int, float)
}
_Stored = list[tuple[int, dict[bytes, bytes]]]


class UsageHistory:
    """Every method raises RedisError."""

    def __init__(self, redis: RedisClient, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def read(self, period: Period) -> tuple[int, Usage, list[Usage]]:
        """Seconds of an interval; the whole period; its intervals in which something was counted, the oldest first."""
        seconds, number = _LENGTHS[period]
        last = int(time.time()) // seconds
        first = last - number + 1
        stored = await self._stored(seconds, first, last)
        return await asyncio.to_thread(_summed, seconds, first, stored)

    async def hours_as_csv(self) -> AsyncIterator[str]:
        """A line of names, and one for each hour of a year in which something was counted, the oldest first."""
        names = [
            name
            for name in Usage.__struct_fields__
            if name not in ("ready_seconds", "hit_rates", "fallbacks")
        ]
        columns = [
            *names,
            "ready_seconds_50",
            "ready_seconds_90",
            "ready_seconds_99",
            "hit_rate_50",
            "hit_rate_90",
        ]
        yield _line([*columns, "fallbacks"])
        today = int(time.time()) // DAY_SECONDS
        for first in range(today - 365, today + 1, _DAYS_OF_A_KEY):
            last = min(first + _DAYS_OF_A_KEY - 1, today)
            stored = await self._stored(HOUR_SECONDS, first * 24, last * 24 + 23)
            yield await asyncio.to_thread(_lines, names, first * 24, stored)

    async def _stored(self, seconds: int, first: int, last: int) -> _Stored:
        """The hashes with the intervals `first` to `last`, each after the number since 1970 of its own first one."""
        a_key = 24 if seconds == HOUR_SECONDS else _DAYS_OF_A_KEY
        name = self._keys.hours if seconds == HOUR_SECONDS else self._keys.days
        groups = range(first // a_key, last // a_key + 1)
        async with self._redis.pipeline(transaction=False) as pipe:
            for group in groups:
                pipe.hgetall(name(group))
            return [
                (group * a_key, fields)
                for group, fields in zip(groups, await pipe.execute(raise_on_error=False), strict=True)
                if isinstance(fields, dict)  # others are damaged
            ]


def _summed(seconds: int, first: int, stored: _Stored) -> tuple[int, Usage, list[Usage]]:
    """What UsageHistory.read returns, of the interval `first` and later ones."""
    each: dict[int, dict[str, float]] = {}
    total: Counter[str] = Counter()
    for beginning, fields in stored:
        for field, text in fields.items():
            with suppress(ValueError):  # damaged: the others can be shown
                at, _, figure = field.decode().partition(":")
                interval, number = beginning + int(at), float(text)
                if interval >= first and math.isfinite(number):
                    each.setdefault(interval, {})[figure] = number
                    total[figure] += number  # type: ignore[assignment]
    return seconds, _usage(first * seconds, total), [_usage(at * seconds, each[at]) for at in sorted(each)]


def _lines(names: list[str], first: int, stored: _Stored) -> str:
    """CSV of the hour `first` and later ones."""
    text = ""
    for usage in _summed(HOUR_SECONDS, first, stored)[2]:
        moment = time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(usage.began))
        values: list[object] = [moment, *(getattr(usage, name) for name in names[1:])]
        for percentiles, number in ((usage.ready_seconds, 3), (usage.hit_rates, 2)):
            values += percentiles or [""] * number
        text += _line([*values, sum(usage.fallbacks.values())])
    return text


def figures_of(summary: RunSummary) -> list[str]:
    """The figures to which a run adds one each, whatever numbers its record has."""
    figures = ["runs"]
    if summary.graphs:
        figures.append(f"rate:{math.floor(min(max(10 * summary.hits / summary.graphs, 0), 10))}")
        spent = min(max(summary.seconds / _READY_BASE, 1.0), 2.0 ** (_READY_CLASSES / 2))
        figures.append(f"ready:{math.ceil(2 * math.log2(spent))}")
    return figures


def _usage(began: float, counts: Mapping[str, float]) -> Usage:
    classes: dict[str, dict[int, float]] = {"ready": {}, "rate": {}}
    fallbacks: dict[str, int] = {}
    counted: dict[str, Any] = {}
    for name, number in counts.items():
        kind, _, which = name.partition(":")
        if kind in classes:
            if which.isdecimal():
                classes[kind][int(which)] = number
        elif which:
            fallbacks[which] = int(number)
        elif kind in _COUNTED:
            counted[kind] = _COUNTED[kind](round(number, 3))
    ready = [
        _READY_BASE * 2 ** (each / 2 - 0.25) for each in _percentiles(classes["ready"], (0.5, 0.9, 0.99))
    ]
    rates = [min(each / 10 + 0.05, 1.0) for each in _percentiles(classes["rate"], (0.5, 0.1))]
    return Usage(began=began, **counted, ready_seconds=ready, hit_rates=rates, fallbacks=fallbacks)


def _percentiles(classes: Mapping[int, float], shares: Iterable[float]) -> list[int]:
    """For each share the class in which it is reached. Empty if nothing was counted."""
    whole = sum(classes.values())
    found = []
    for share in shares if whole else ():
        sum_so_far = 0.0
        for number in sorted(classes):
            sum_so_far += classes[number]
            if sum_so_far >= share * whole:
                break
        found.append(number)
    return found


def _line(values: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()
