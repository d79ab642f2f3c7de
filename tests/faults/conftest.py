"""Fixtures of the tests of faults: the service's own parts, from tests/service."""

from __future__ import annotations

import sys
from pathlib import Path

# First on the path: `conftest` and `service_parts` are those of tests/service, whatever folders run beside.
sys.path.insert(0, str(Path(__file__).parent.parent / "service"))
sys.path.append(str(Path(__file__).parent))

from conftest import StartGateway, gateway, http, redis_server, settings, start_gateway, start_process

__all__ = ["StartGateway", "gateway", "http", "redis_server", "settings", "start_gateway", "start_process"]
