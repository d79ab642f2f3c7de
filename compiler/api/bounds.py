"""Bounds of numbers in several endpoints' bodies."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_WHOLE = (1 << 53) - 1
"""The service's scripts count in doubles."""

TEN_YEARS_SECONDS = 10 * 366 * 86400

Count = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]

Amount = Annotated[float, Meta(ge=0, le=MAX_WHOLE)]
