"""The client's modes, and what it does when something goes wrong, against a whole service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_commands import torchrelay, train
from torchrelay.examples.harness.private_service import PrivateService


def test_mode_cache_uses_what_exists_and_never_asks_for_a_compile(
    service: PrivateService, tmp_path: Path
) -> None:
    first = train(service, tmp_path / "a", 1.375, TORCHRELAY_MODE="cache")
    assert first["fallbacks"] == {"not_cached": 1}
    assert (len(first["told"]), first["error"]) == (1, "")
    assert train(service, tmp_path / "b", 1.375)["misses"] == 1
    assert train(service, tmp_path / "c", 1.375, TORCHRELAY_MODE="cache")["hits"] == 1


def test_mode_off_sends_nothing_and_says_nothing(service: PrivateService, tmp_path: Path) -> None:
    before = json.loads(torchrelay(service, "stats", "--json").stdout)
    found = train(service, tmp_path, 1.5, TORCHRELAY_MODE="off")
    assert (found["told"], found["error"], found["fallbacks"]) == ([], "", {})
    assert json.loads(torchrelay(service, "stats", "--json").stdout) == before


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"TORCHRELAY_URL": "http://127.0.0.1:1"}, "gateway_unreachable"),
        ({"TORCHRELAY_TOKEN": "wrong"}, "unauthenticated"),
        ({"TORCHRELAY_PUBLIC_KEYS": "A" * 43 + "="}, "bad_signature"),
        ({"TORCHRELAY_DEADLINE": "0.001"}, "deadline_exceeded"),
        ({"TORCHRELAY_DEADLINE": "soon"}, "bad_setting"),
    ],
)
def test_what_goes_wrong_warns_once_and_compiles_locally(
    service: PrivateService, tmp_path: Path, variables: dict[str, str], code: str
) -> None:
    found = train(service, tmp_path, 1.625, **variables)
    assert found["error"] == ""
    assert found["fallbacks"] == {code: 1}
    (told,) = found["told"]
    assert told.startswith("torchrelay: compiled locally: ")


def test_mode_require_raises_the_typed_error(service: PrivateService, tmp_path: Path) -> None:
    found = train(service, tmp_path, 1.75, TORCHRELAY_URL="http://127.0.0.1:1", TORCHRELAY_MODE="require")
    assert "GatewayUnreachable" in found["error"]
    assert (found["told"], found["misses"]) == ([], 0)


def test_ctrl_c_ends_a_wait_for_the_service_at_once(service: PrivateService, tmp_path: Path) -> None:
    """The service goes on compiling (others may want it); the script does not wait for that."""
    script = (
        "import sys, torch; from torchrelay.clients.gateway import compile_client\n"
        "follow = compile_client.CompileWait._follow\n"
        "def told(self):\n"
        "    print('waiting', flush=True)\n"
        "    return follow(self)\n"
        "compile_client.CompileWait._follow = told\n"
        "def deep(x):\n"
        "    for _ in range(30): x = torch.tanh(x @ x.T @ x) * 0.875\n"
        "    return x\n"
        "try: torch.compile(deep, backend='torchrelay')(torch.ones(5, 6, requires_grad=True))\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(tmp_path)}
    before = json.loads(torchrelay(service, "stats", "--json").stdout)
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=120)[0] == "interrupted\n"
    after = json.loads(torchrelay(service, "stats", "--json").stdout)
    assert (after["misses"] - before["misses"], after["fetches"] - before["fetches"]) == (1, 0)
