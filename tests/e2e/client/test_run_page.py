"""A script prints one line when it ends, and its address shows the run; silent by a setting, once for all ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from torchrelay.clients.settings import ClientSettings, load_settings
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import sys, torch, torchrelay
scale = float(sys.argv[1])
run = torch.compile(lambda x: (x * scale).sin(), backend="torchrelay")
run(torch.ones(int(sys.argv[2]), 5))
"""
LINE = re.compile("torchrelay: (.+), (http://[^ ]+/runs/[0-9a-f]{16})")


@pytest.fixture
def client_settings(service: PrivateService, monkeypatch: pytest.MonkeyPatch) -> ClientSettings:
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    return load_settings()


def start(service: PrivateService, folder: Path, *words: str, **variables: str) -> str:
    """What the process wrote to stderr."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        **service.environment,
        "TORCHRELAY_CACHE_DIR": str(folder / "cache"),
        "TORCHRELAY_MODE": "require",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, str(script), *words], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def lines(stderr: str) -> list[tuple[str, str]]:
    return LINE.findall(stderr)


def shown(address: str, settings: ClientSettings) -> Any:
    answer = httpx2.get(address, headers={"Authorization": f"Bearer {settings.token}"}, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_script_says_what_was_saved_and_where_its_run_is_shown(
    service: PrivateService, tmp_path: Path, client_settings: ClientSettings
) -> None:
    ((said, address),) = lines(start(service, tmp_path / "a", "1.5", "7"))
    assert said == "1 graph, 0 hits"
    process = shown(address, client_settings)["process"]
    (graph,) = process["record"]["graphs"]
    assert (graph["outcome"], process["record"]["program"]) == ("miss", "train.py")
    assert 0 < sum(graph["stages"].values()) <= graph["seconds"] + 0.01 and graph["stages"]["wait"] > 0

    ((said, address),) = lines(start(service, tmp_path / "b", "1.5", "7"))
    assert re.fullmatch("1 graph, 1 hit(, saved [0-9]+ s)?", said)
    process = shown(address, client_settings)["process"]
    assert process["saved_seconds"] > 0

    ((said, address),) = lines(start(service, tmp_path / "b", "1.5", "7"))
    assert "1 started without tracing" in said


def test_the_run_page_leads_to_what_a_miss_differs_in(
    service: PrivateService, tmp_path: Path, client_settings: ClientSettings
) -> None:
    start(service, tmp_path / "a", "2.5", "7")
    ((_, address),) = lines(start(service, tmp_path / "b", "2.5", "9"))
    (graph,) = shown(address, client_settings)["process"]["record"]["graphs"]
    miss = shown(f"{client_settings.url}/misses/{graph['key']}", client_settings)
    assert "in dimension 0 of input 0: " in miss["nearest"]["advice"]


def test_ranks_print_one_line_of_one_run(
    service: PrivateService, tmp_path: Path, client_settings: ClientSettings
) -> None:
    ranks = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        for rank in (1, 0)
    ]
    last, first = (lines(start(service, tmp_path / "a", "3.5", "7", **rank)) for rank in ranks)
    assert last == []
    ((_, address),) = first
    assert [each["rank"] for each in shown(address, client_settings)["ranks"]] == [0, 1]


def test_by_a_setting_it_says_nothing_and_tells_nothing(
    service: PrivateService, tmp_path: Path, client_settings: ClientSettings
) -> None:
    before = shown(f"{client_settings.url}/runs", client_settings)["runs"]
    assert lines(start(service, tmp_path / "a", "4.5", "7", TORCHRELAY_SUMMARY="0")) == []
    assert shown(f"{client_settings.url}/runs", client_settings)["runs"] == before


def test_without_a_gateway_a_script_ends_as_it_did(service: PrivateService, tmp_path: Path) -> None:
    away = {"TORCHRELAY_URL": "http://127.0.0.1:9", "TORCHRELAY_MODE": "remote"}
    written = start(service, tmp_path / "a", "5.5", "7", **away)
    assert lines(written) == [] and "compiled locally" in written


def test_open_signs_a_browser_in_by_a_link(
    service: PrivateService, tmp_path: Path, client_settings: ClientSettings
) -> None:
    ((_, address),) = lines(start(service, tmp_path / "a", "6.5", "7"))
    command = [sys.executable, "-m", "torchrelay.clients.cli", "open", "--link", address]
    environment = {**os.environ, **service.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with httpx2.Client(follow_redirects=True, trust_env=False, headers={"Accept": "text/html"}) as browser:
        page = browser.get(done.stdout.strip())
    assert page.status_code == 200 and str(page.url) == address and "<h1>train.py</h1>" in page.text
    wrong = subprocess.run(
        [*command[:-1], "xyz"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert wrong.returncode == 2 and "16 hexadecimal digits" in wrong.stderr
