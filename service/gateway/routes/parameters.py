"""Path parameters that several routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

CacheKey = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="A request's cache key, 64 hex digits")]
