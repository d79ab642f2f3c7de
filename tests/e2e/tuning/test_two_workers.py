"""A compile with max-autotune on a service with two workers: both search its problems, and the next one knows them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from test_tuning import compiled
from torchrelay.examples.harness.private_service import PrivateService
from waiting import wait_until

SCRIPT = """
import sys
import torch
import torchrelay

torch.manual_seed(1)
between = {"relu": torch.relu, "tanh": torch.tanh}[sys.argv[1]]
x = torch.randn(4, 48, 32)
weights = [torch.randn(4, 32, 32 + 16 * n) for n in range(1, 5)]

def products(x, weights):
    return [torch.bmm(between(x), w) for w in weights]

compiled = torch.compile(products, backend="torchrelay", mode="max-autotune")
for one, other in zip(compiled(x, weights), products(x, weights), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
"""


class Seen(threading.Thread):
    """Which workers searched meanwhile, by the service's own word."""

    def __init__(self, http: httpx2.Client) -> None:
        super().__init__()
        self._http = http
        self._over = threading.Event()
        self.searching: set[str] = set()

    def run(self) -> None:
        while not self._over.wait(0.1):
            workers: list[dict[str, Any]] = self._http.get("/v1/workers").json()
            self.searching |= {worker["id"] for worker in workers if worker["searching"]}

    def __enter__(self) -> Seen:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(30)


def count(http: httpx2.Client, line: str) -> float:
    """A sample of /metrics; 0 if there is none."""
    found = [each for each in http.get("/metrics").text.splitlines() if each.startswith(line + " ")]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


@pytest.mark.slow
def test_both_workers_search_a_compiles_problems_and_the_next_compile_knows_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with PrivateService(tmp_path / "service", arguments=("--cpu-slots", "2")) as service:
        credentials = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay" / "credentials.json"
        token = json.loads(credentials.read_text())["token"]
        with httpx2.Client(
            base_url=service.url, headers={"authorization": f"Bearer {token}"}, timeout=30
        ) as http:
            wait_until(
                lambda: [each["state"] for each in http.get("/v1/workers").json()] == ["idle"] * 2, 120
            )
            with Seen(http) as seen:
                first = compiled(service, script, "relu", OMP_NUM_THREADS="1")
            assert len(seen.searching) == 2
            assert count(http, 'torchrelay_searches_total{outcome="found"}') == 4
            assert len(first.tuning) == 4
            second = compiled(service, script, "tanh", OMP_NUM_THREADS="1")
            assert (second.searched, second.recalled) == (0, 4)
            assert count(http, 'torchrelay_searches_total{outcome="found"}') == 4
            assert {m.problem: m.winner for m in first.tuning} == {m.problem: m.winner for m in second.tuning}
