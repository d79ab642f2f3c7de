"""What tests of pages share: records of runs, and a browser's headers."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec
from service_parts import Running
from torchrelay.compiler.api.runs import GraphRecord, RunRecord

EVIL = "<script>alert('x')</script>\"&\u202e"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def record(**more: Any) -> RunRecord:
    fields: dict[str, Any] = {"program": "train.py", "pid": 1, "ended": 1.8e9, "torch": "2.13.0"}
    return RunRecord(**fields | more)


def a_graph(key: str, outcome: Any = "hit", **more: Any) -> GraphRecord:
    return GraphRecord(key=key, outcome=outcome, seconds=0.5, nodes=7, ended=2.0, **more)


def tell(http: httpx2.Client, told: RunRecord) -> dict[str, Any]:
    answer = http.post("/v1/runs", content=msgspec.json.encode(told))
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def stranger(gateway: Running, **headers: str) -> httpx2.Client:
    client = gateway.http(None)
    client.headers.update(BROWSER | headers)
    return client
