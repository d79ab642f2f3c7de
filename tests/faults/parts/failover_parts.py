"""A Redis that fails over, as the benchmarks start it, and a client that asks again meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx2
import torchrelay
from service_parts import compiled, post
from waiting import wait_until

sys.path.append(str(Path(torchrelay.__file__).parent / "benchmarks"))

from support.failover_redis import FailoverRedis, redis_of
from support.local_redis import ListeningServer

__all__ = ["FailoverRedis", "ListeningServer", "answered", "redis_of"]


def answered(http: httpx2.Client, body: bytes, statuses: set[int]) -> bytes:
    """The artifact, asked for as a client does: again after each 503. Adds what was answered to `statuses`."""
    found: list[httpx2.Response] = []

    def asked() -> bool:
        found[:] = [post(http, body)]
        statuses.add(found[0].status_code)
        return found[0].status_code != 503

    wait_until(asked, seconds=60)
    return found[0].content if found[0].status_code == 200 else compiled(http, body)
