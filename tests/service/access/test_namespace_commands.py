"""`torchrelay namespace`, and `--namespace` of the other commands, against a real gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from service_parts import TOKEN, Running, client_of, compiled, graph


class Shell:
    """Runs `torchrelay` with one token."""

    def __init__(self, gateway: Running, folder: Path, token: str = TOKEN) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
        told = {"TORCHRELAY_URL": gateway.url, "TORCHRELAY_TOKEN": token, "TORCHRELAY_CACHE_DIR": str(folder)}
        self._environment = {**kept, **told, "XDG_CONFIG_HOME": str(folder), "COLUMNS": "200"}

    def __call__(self, *words: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "torchrelay.clients.cli", *words]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout


def test_a_team_is_set_up_and_looked_at(gateway: Running, tmp_path: Path) -> None:
    owner = Shell(gateway, tmp_path)
    table = owner("namespace", "set", "red", "--bytes", "2G", "--compiles", "3", "--compile-seconds", "7.5")
    assert "0 of 3" in table and "0.0 of 7.5" in table and "0 B of 2.0 GiB" in table
    made = owner("token", "create", "ada", "--namespace", "red", "--rate", "20", "--role", "admin", "--json")
    issued = json.loads(made)
    assert (issued["record"]["namespace"], issued["record"]["rate"]) == ("red", 20)
    ada = Shell(gateway, tmp_path, issued["token"])
    with client_of(gateway.url, issued["token"]) as http:
        compiled(http, graph())

    # the team's own administrator sees and changes its namespace, and no other
    assert json.loads(ada("stats", "--json"))["compiles"] == 1
    assert json.loads(ada("cache", "ls", "--json"))[0]["seconds"] == 3.0
    assert "Forbidden" not in ada("namespace", "ls") and "default" not in ada("namespace", "ls")
    assert "namespace" in ada("namespace", "set", "red", "--bytes", "0", status=1)
    assert "another namespace" in ada("cache", "ls", "--namespace", "default", status=1)

    # the owner sees all, and names one
    shown = owner("stats")
    assert shown.splitlines()[0].split() == ["all", "default", "red"]
    assert "compiles" in shown
    every = json.loads(owner("stats", "--json"))
    assert (every["compiles"], every["namespaces"]["red"]["compiles"]) == (1, 1)
    assert json.loads(owner("stats", "--namespace", "default", "--json"))["compiles"] == 0
    assert json.loads(owner("cache", "ls", "--json")) == []
    (entry,) = json.loads(owner("cache", "ls", "--namespace", "red", "--json"))
    assert owner("cache", "pin", entry["key"][:12], "--namespace", "red").startswith("pinned")
    assert "is no artifact" in owner("cache", "rm", entry["key"], status=1)
    assert owner("cache", "rm", entry["key"][:12], "--namespace", "red").startswith("removed")
    actions = [entry["action"] for entry in json.loads(owner("audit", "--namespace", "red", "--json"))]
    assert actions == ["deleted", "pinned", "published", "compile", "token_created", "quota_changed"]


@pytest.mark.parametrize(
    "words",
    [
        ("namespace", "show", "Red"),
        ("namespace", "show", ""),
        ("namespace", "set", "red", "--bytes", "-1"),
        ("namespace", "set", "red", "--compiles", "1.5"),
        ("stats", "--namespace", "a&b=c"),
        ("cache", "ls", "--namespace", "*"),
        ("token", "create", "x", "--namespace", "../x"),
    ],
)
def test_what_cannot_be_a_name_or_a_quota_never_leaves(
    words: tuple[str, ...], gateway: Running, tmp_path: Path
) -> None:
    assert "torchrelay: " in Shell(gateway, tmp_path)(*words, status=2)
