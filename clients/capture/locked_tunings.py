"""The team's tuning lock in this process: a request in; with what TORCHRELAY_TUNING_LOCK's file pins for it, out."""

from __future__ import annotations

import functools
from pathlib import Path

from ...compiler.request import schema, tuning_pins
from ...compiler.tuning import records
from ..jobfiles import tuning_lock
from ..settings import ClientSettings


class LockedTunings:
    """Read when the first graph that tunes needs it, once; a file that cannot be used fails each of them anew."""

    def __init__(self, path: Path, *, strict: bool) -> None:
        self._path = path
        self._strict = strict

    @classmethod
    def of(cls, settings: ClientSettings) -> LockedTunings | None:
        if settings.tuning_lock is None:
            return None
        return cls(settings.tuning_lock, strict=settings.tuning_lock_mode == "strict")

    def pin(self, request: schema.GraphRequest) -> schema.GraphRequest:
        """Raises TuningLockError; never for a request that does not tune, which comes back as it is."""
        return (
            tuning_pins.pin(request, self._entries, strict=self._strict)
            if tuning_pins.tunes(request)
            else request
        )

    @functools.cached_property
    def _entries(self) -> list[records.TuningEntry]:
        return tuning_lock.load(self._path)
