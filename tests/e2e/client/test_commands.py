"""The commands against a whole service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from request_parts import kernel, kernels_request
from torchrelay.clients.gateway.admin_client import AdminClient
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import load_settings
from torchrelay.compiler import errors
from torchrelay.compiler.api.admin import TokenRequest
from torchrelay.compiler.request import codec, key
from torchrelay.examples.harness.private_service import PrivateService

STATS = ("requests", "hits", "misses", "compiles", "coalesced", "failures", "seconds_saved")
SCRIPT = """
    import json, sys, warnings
    import torch, torchrelay

    def loss(rows, weight):
        return torch.nn.functional.silu(rows @ weight).square().mean() * {salt}

    rows, weight = torch.linspace(-1, 1, 24).reshape(4, 6), torch.linspace(-1, 1, 36).reshape(6, 6)
    weight.requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torchrelay.FallbackWarning)
        try:
            found = torch.compile(loss, backend="torchrelay")(rows, weight)
            found.backward()
            error = ""
        except Exception as raised:
            error = f"{{type(raised).__name__}}: {{raised}}"
    told = [str(w.message) for w in caught if issubclass(w.category, torchrelay.FallbackWarning)]
    run = torchrelay.report()
    print(json.dumps({{"error": error, "told": told, "hits": run.hits, "misses": run.misses,
                      "disk_hits": run.disk_hits, "fallbacks": run.fallbacks}}))
"""


def train(
    service: PrivateService, cache: Path, salt: float, *, within: Sequence[str] = (), **variables: str
) -> dict[str, Any]:
    """Run SCRIPT in a fresh process; `salt` makes a graph of its own. within: a command that runs its arguments."""
    environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(cache), **variables}
    script = textwrap.dedent(SCRIPT).format(salt=salt)
    done = subprocess.run(
        [*within, sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def torchrelay(service: PrivateService, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchrelay.clients.cli", *arguments]
    environment = {**os.environ, **service.environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_the_doctor_finds_nothing_wrong_with_a_healthy_service(service: PrivateService) -> None:
    done = torchrelay(service, "doctor", "--json")
    found = json.loads(done.stdout)
    wrong = [check for check in found["checks"] if check["status"] != "pass"]
    if [check["name"] for check in wrong] == ["isolation"]:  # a machine may have nothing to isolate with
        assert "docs/isolation.md" in wrong[0]["advice"]
    else:
        assert wrong == []
        assert (found["ok"], done.returncode) == (True, 0)
    assert found["checks"][-1]["name"] == "round trip"


def test_stats_count_what_was_asked(service: PrivateService, tmp_path: Path) -> None:
    before = json.loads(torchrelay(service, "stats", "--json").stdout)
    assert set(STATS) <= set(before)
    assert train(service, tmp_path / "a", 1.125)["misses"] == 1
    assert train(service, tmp_path / "b", 1.125)["hits"] == 1
    after = json.loads(torchrelay(service, "stats", "--json").stdout)
    gained = {name: after[name] - before[name] for name in STATS}
    assert gained.pop("seconds_saved") > 0
    assert gained == {"requests": 2, "hits": 1, "misses": 1, "compiles": 1, "coalesced": 0, "failures": 0}


def test_a_token_says_what_it_allows(service: PrivateService) -> None:
    owner = json.loads(torchrelay(service, "whoami", "--json").stdout)
    assert owner["everywhere"] and "admin" in owner["permissions"]
    made = torchrelay(
        service, "token", "create", "ada", "--role", "tune", "--expires", "1h", "--allow-programs"
    )
    environment = {**os.environ, **service.environment, "TORCHRELAY_TOKEN": made.stdout.strip()}
    command = [sys.executable, "-m", "torchrelay.clients.cli", "whoami"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = {
        line.split()[0]: line.split(None, 1)[1].strip() for line in done.stdout.splitlines() if line.strip()
    }
    assert rows["token"].startswith("ada, ") and rows["token"].endswith("(TORCHRELAY_TOKEN)")
    assert rows["may"] == "tune, programs"
    assert rows["namespace"] == "default"
    assert rows["expires"].endswith("UTC")


def test_the_disk_cache_serves_without_a_gateway(service: PrivateService, tmp_path: Path) -> None:
    assert train(service, tmp_path, 1.25)["misses"] == 1
    again = train(service, tmp_path, 1.25, TORCHRELAY_URL="http://127.0.0.1:1", TORCHRELAY_MODE="require")
    assert (again["disk_hits"], again["error"]) == (1, "")


def test_the_user_who_started_the_service_may_send_source_and_others_only_when_told_so(
    service: PrivateService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker has this torch, so what passes the gate ends there."""
    asked = kernels_request(kernel())
    nowhere = msgspec.structs.replace(asked.toolchain, torch="2.11.0+nowhere")
    asked = msgspec.structs.replace(asked, toolchain=nowhere)
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    with AdminClient(load_settings()) as administration:
        plain, allowed = (
            administration.create_token(
                TokenRequest("ada", frozenset({"compile"}), 60, allow_source=source)
            ).token
            for source in (False, True)
        )
    for token, refusal in (
        ("", errors.NoWorker),
        (plain, errors.SourceForbidden),
        (allowed, errors.NoWorker),
    ):
        if token:
            monkeypatch.setenv("TORCHRELAY_TOKEN", token)
        with GatewayClient(load_settings()) as gateway, pytest.raises(refusal):
            gateway.submit(
                codec.pack_request(asked), key.key_of(asked), cache_only=False, deadline=60.0
            ).result()
