"""Prometheus' view of a service: what real processes report, scrape by scrape, and which alerts that fires.

A scrape stands for a minute, however soon after the last one it was made. promtool evaluates deploy/alerts.yml.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx2
import torchrelay
import yaml
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

DEPLOY = Path(torchrelay.__file__).parent / "deploy"
RULES = DEPLOY / "alerts.yml"
QUIET_MINUTES = 120
"""Between what was scraped before and during a fault; all stays as it was."""

Scrape = dict[str, float]


def promtool() -> str | None:
    """Debian's, or what the Makefile fetched of it."""
    return shutil.which("promtool", path=f"{sys.prefix}/promtool/usr/bin") or shutil.which("promtool")


def scrape(*urls: str) -> Scrape:
    """The series that the rules may use, of each of these processes, and whether it answered."""
    found = {}
    used = set(re.findall(r"\btorchrelay_\w+", RULES.read_text()))
    for url in urls:
        own = {"instance": url, "job": "torchrelay"}
        try:
            answer = httpx2.get(f"{url}/metrics", timeout=20, trust_env=False)
        except httpx2.TransportError:
            found[_series("up", own)] = 0.0
            continue
        found[_series("up", own)] = 1.0
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name in used:
                    found[_series(sample.name, {**sample.labels, **own})] = sample.value
    return found


def _series(name: str, labels: dict[str, str]) -> str:
    return f"{name}{{{', '.join(f'{label}={value!r}' for label, value in sorted(labels.items()))}}}"


def scrapes(
    count: int,
    *urls: str,
    each: Callable[[], object] = lambda: None,
    seconds: float = 1.1,
    redis_up: bool = True,
) -> list[Scrape]:
    """So many, with a call of `each` before each one. What a process says of its installation may be a second old.

    A scrape stands for a minute or more. A process that has no processor misses Redis' answer for a moment, so one
    that contradicts `redis_up` is made again, for at most 20 s.
    """
    found = []
    for _ in range(count):
        each()
        time.sleep(seconds)
        found.append(wait_until(lambda: _scrape_if(redis_up, *urls), seconds=20))
    return found


def _scrape_if(redis_up: bool, *urls: str) -> Scrape | None:
    found = scrape(*urls)
    says = [value for name, value in found.items() if name.startswith("torchrelay_redis_up{")]
    return found if all(value == redis_up for value in says) else None


def assert_fires(
    folder: Path, *alerts: str, before: Sequence[Scrape], during: Sequence[Scrape], hold: int = 0
) -> None:
    """That nothing fires before, and then exactly these alerts. hold: minutes for which the last scrape stays true."""
    tool = promtool()
    assert tool is not None and before and during
    minutes = [*before, *[before[-1]] * QUIET_MINUTES, *during, *[during[-1]] * hold]
    names = sorted({name for each in minutes for name in each})
    series = [
        {
            "series": name,
            "values": " ".join(f"{each[name]:f}" if name in each else "stale" for each in minutes),
        }
        for name in names
    ]
    firing = 'group by (alertname) (ALERTS{alertstate="firing"})'
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": firing, "eval_time": f"{len(before) + QUIET_MINUTES - 1}m", "exp_samples": []},
                    {
                        "expr": firing,
                        "eval_time": f"{len(minutes) - 1}m",
                        "exp_samples": [
                            {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)
                        ],
                    },
                ],
            }
        ],
    }
    file = folder / "alerts-test.yml"
    file.write_text(yaml.safe_dump(test, sort_keys=False, width=10**6))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
