"""The memory of deployed containers is enough for all that the default settings let their processes take."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from torchrelay.service.admission import admit, parse_process
from torchrelay.service.base.settings import ServiceSettings

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
CHART = yaml.safe_load((ROOT / "deploy/helm/torchrelay/values.yaml").read_text())
UNITS = {"Gi": 1 << 30, "Mi": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
IDLE_BYTES = 110_000_000
COPIES = 3
"""Of a large body that was checked, in the process that had it checked."""


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(?:\$\{\w+:-)?(\d+)(\w+)\}?", text).groups()
    return int(number) * UNITS[unit]


def gateway_bytes(settings: ServiceSettings) -> int:
    """One process, by docs/operate.md's rule."""
    check = parse_process.memory_bytes(settings.limits) + COPIES * settings.request_bytes
    in_threads = admit.TOGETHER * 48 * admit.THREAD_BYTES
    held = settings.memory_cache_bytes + settings.bodies_bytes + admit.PARSED_BYTES
    return IDLE_BYTES + held + in_threads + settings.checks_at_once * check


def processes() -> int:
    command = COMPOSE["gateway"]["command"]
    (number,) = re.findall(r":-(\d+)", command[command.index("--workers") + 1])
    return int(number)


def test_a_gateways_container_holds_all_that_its_processes_may_take() -> None:
    needed = gateway_bytes(ServiceSettings())
    assert processes() == CHART["gateway"]["processes"]
    for limit in (CHART["gateway"]["resources"]["limits"]["memory"], COMPOSE["gateway"]["mem_limit"]):
        assert processes() * needed <= size(limit)


def test_the_rule_in_the_docs_is_this_one() -> None:
    text = (ROOT / "docs" / "operate.md").read_text()
    settings = ServiceSettings()
    check = parse_process.memory_bytes(settings.limits) + COPIES * settings.request_bytes
    assert f"{check / (1 << 30):.3g} GiB for each large request" in text
    assert f"about {gateway_bytes(settings) / (1 << 30):.0f} GiB" in text


def test_a_dispatchers_container_holds_its_checks_or_a_large_artifact() -> None:
    settings = ServiceSettings()
    limit = size(CHART["dispatcher"]["resources"]["limits"]["memory"])
    assert gateway_bytes(settings) - settings.bodies_bytes + COPIES * settings.import_bytes <= limit


def test_redis_takes_three_quarters_of_its_container() -> None:
    limit = CHART["redis"]["resources"]["limits"]["memory"]
    (compose,) = re.findall(r"--maxmemory (\S+)", str(COMPOSE["redis"]["command"]))
    assert size(compose) == size(CHART["redis"]["maxmemory"]) <= size(limit) * 3 // 4
