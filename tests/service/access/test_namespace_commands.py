"""`torchrelay namespace`, and `--namespace` of the other commands, against a real gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import torchrelay, user
from service_parts import TOKEN, Running, StartGateway, client_of, compiled, graph


class Shell:
    """Runs `torchrelay` with one token."""

    def __init__(self, gateway: Running, folder: Path, token: str = TOKEN) -> None:
        self._environment = user(folder, gateway.url, token, TORCHRELAY_CACHE_DIR=str(folder))

    def __call__(self, *words: str, status: int = 0) -> str:
        done = torchrelay(*words, environment=self._environment, status=status)
        return done.stderr if status else done.stdout


def test_a_team_is_set_up_and_looked_at(gateway: Running, tmp_path: Path) -> None:
    owner = Shell(gateway, tmp_path)
    table = owner("namespace", "set", "red", "--bytes", "2G", "--compiles", "3", "--compile-seconds", "7.5")
    assert "0 of 3" in table and "0.0 of 7.5" in table and "0 B of 2.00 GiB" in table
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


def test_a_team_is_deleted(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = start_gateway(blob_inline_bytes=0, body_timeout_seconds=1)
    owner = Shell(gateway, tmp_path)
    made = json.loads(owner("token", "create", "ada", "--namespace", "red", "--json"))
    with client_of(gateway.url, made["token"]) as http:
        compiled(http, graph())
    told = owner("namespace", "rm", "red", "--yes")
    waited, *deleted = told.splitlines()
    assert waited.startswith("waits ")
    assert deleted == ["deleted 1 objects of the blob store", "deleted the namespace red"]
    assert "there is no namespace red" in owner("namespace", "rm", "red", "--yes", status=1)
    assert "always there" in owner("namespace", "rm", "default", "--yes", status=1)
