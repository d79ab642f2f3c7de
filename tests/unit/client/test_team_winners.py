"""Winners of Triton's and Helion's autotuners: what is asked for and sent, and that no failure reaches a kernel."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_parts import Server, answer, as_json, failure, hang, reset
from torchrelay.clients.artifacts.autotune_cache import team_winners
from torchrelay.clients.artifacts.autotune_cache.team_winners import TeamWinners, caller_locals
from torchrelay.clients.gateway import compile_client
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.reports.run_report import process_report
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler import errors
from torchrelay.compiler.tuning.queries import ENTRY_LIMIT
from torchrelay.compiler.tuning.records import DeviceEnvironment

GPU = DeviceEnvironment("NVIDIA H200", "9.0", "580.65", "2.13.0", "3.7.0", "13.0")
ENTRY = {"key": "KEY", "data": "{}"}


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    if not started.stopping.is_set():
        started.die()


@pytest.fixture
def winners(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TeamWinners]:
    monkeypatch.setattr(team_winners, "current_gpu", lambda: GPU)
    monkeypatch.setattr(compile_client, "AUTOTUNE_SECONDS", 0.5)
    with GatewayClient(ClientSettings(url=server.url, token="secret", cache_dir=Path("/none"))) as gateway:
        yield TeamWinners(gateway)


def route(server: Server, winners: TeamWinners, reply: Callable[[Any], None], method: str = "GET") -> None:
    server.routes[f"{method} /v1/autotunes/triton/{winners.name_of('triton', '3.7.0', 'KEY')}"] = reply


def find(winners: TeamWinners) -> str | None:
    return winners.find("triton", "3.7.0", "KEY")


def store(winners: TeamWinners, data: str = "{}") -> None:
    winners.store("triton", "3.7.0", "KEY", data)


def failures() -> dict[str, int]:
    return dict(process_report().snapshot().autotune_failures)


def test_what_the_service_has_is_found_and_what_was_measured_is_sent(
    server: Server, winners: TeamWinners
) -> None:
    before = failures()
    assert find(winners) is None
    route(server, winners, as_json(200, ENTRY))
    route(server, winners, as_json(200, ENTRY), "PUT")
    assert find(winners) == "{}"
    store(winners)
    line, headers, body = server.seen[-1]
    assert (line[:25], headers["authorization"], json.loads(body)) == (
        "PUT /v1/autotunes/triton/",
        "Bearer secret",
        ENTRY,
    )
    assert failures() == before


def test_a_key_names_library_version_and_the_whole_environment(
    winners: TeamWinners, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [winners.name_of("triton", "3.7.0", "KEY"), winners.name_of("helion", "3.7.0", "KEY")]
    names += [winners.name_of("triton", "3.8.0", "KEY"), winners.name_of("triton", "3.7.0", "OTHER")]
    for field in GPU.__struct_fields__:
        value = 8 if field == "threads" else "another"
        other = msgspec.structs.replace(GPU, **{field: value})
        monkeypatch.setattr(team_winners, "current_gpu", lambda other=other: other)
        names.append(winners.name_of("triton", "3.7.0", "KEY"))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (failure(errors.Unavailable("no Redis")), "unavailable"),
        (failure(errors.LimitExceeded("too large")), "limit_exceeded"),
        (failure(errors.Unauthenticated("who")), "unauthenticated"),
        (answer(413), "limit_exceeded"),
        (answer(500), "service"),
        (answer(200, b'{"key": "KEY"'), "schema_mismatch"),
        (as_json(200, {**ENTRY, "data": {"num_warps": 4}}), "schema_mismatch"),
        (as_json(200, {**ENTRY, "key": "OTHER"}), "schema_mismatch"),
        (as_json(200, {**ENTRY, "data": "x" * (ENTRY_LIMIT + 1)}), "schema_mismatch"),
        (as_json(200, {**ENTRY, "data": "x" * (5 * ENTRY_LIMIT)}), "bad_artifact"),
        (reset, "gateway_unreachable"),
        (hang, "deadline_exceeded"),
    ],
)
def test_a_wrong_big_or_late_answer_is_a_miss_and_the_service_is_left_alone_for_a_while(
    reply: Callable[[Any], None], code: str, server: Server, winners: TeamWinners
) -> None:
    before = failures().get(code, 0)
    route(server, winners, reply)
    started = time.monotonic()
    assert find(winners) is None
    assert time.monotonic() - started < 5
    assert failures().get(code, 0) == before + 1, failures()
    requests = len(server.seen)
    assert find(winners) is None
    store(winners)
    assert len(server.seen) == requests
    winners.paused_until = 0.0
    route(server, winners, as_json(200, ENTRY))
    assert find(winners) == "{}"


def test_who_may_not_send_still_reads(server: Server, winners: TeamWinners) -> None:
    before = failures()
    route(server, winners, failure(errors.Forbidden("lacks the role")), "PUT")
    route(server, winners, as_json(200, ENTRY))
    store(winners)
    store(winners)
    assert find(winners) == "{}"
    assert [line[:4] for line, _, _ in server.seen] == ["PUT ", "GET "]
    assert failures() == before


def test_what_is_too_large_is_not_sent(server: Server, winners: TeamWinners) -> None:
    store(winners, "x" * (ENTRY_LIMIT + 1))
    assert server.seen == []


def test_the_first_failure_of_a_process_is_a_warning_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    report = type(process_report())()
    with caplog.at_level(logging.INFO, "torchrelay"):
        report.autotune_failed(errors.Unavailable("no Redis"))
        report.autotune_failed(errors.GatewayUnreachable("gone"))
        report.autotune_failed(errors.Unavailable("no Redis"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO, logging.INFO]
    assert report.snapshot().autotune_failures == {"unavailable": 2, "gateway_unreachable": 1}


def test_the_variables_of_a_caller_are_found_by_module_and_function() -> None:
    def asked(depth: int) -> Any:
        return asked(depth - 1) if depth else caller_locals(__name__, "caller")

    def caller(depth: int) -> Any:
        configs = ["a", "b"]
        return asked(depth).get("configs"), configs

    assert caller(3) == (["a", "b"], ["a", "b"])
    assert asked(0) == {}
    assert caller(100)[0] is None


@pytest.mark.parametrize("mode", ["off", "require"])
def test_mode_off_contacts_nobody_and_require_raises_nothing(
    mode: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(team_winners, "current_gpu", lambda: GPU)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHRELAY_URL", server.url)
    monkeypatch.setenv("TORCHRELAY_MODE", mode)
    team_winners.process_winners.cache_clear()
    try:
        found = team_winners.process_winners()
        route(server, found, answer(500))
        assert find(found) is None
        assert len(server.seen) == (mode == "require")
    finally:
        team_winners.process_winners.cache_clear()


def test_the_integrations_import_no_library_before_one_is_used() -> None:
    program = (
        "import sys, torchrelay.integrations as found; dir(found); "
        "print({'torch', 'triton', 'helion', 'transformers', 'lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
