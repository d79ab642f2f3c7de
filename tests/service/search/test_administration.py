"""Tuning winners over HTTP and from the command line: who may read and bring them, what stands, what is logged."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from command_line import torchrelay, user
from service_parts import TOKEN, RedisServer, Running
from torchrelay.clients.jobfiles import tuning_lock
from torchrelay.compiler import decoding
from torchrelay.compiler.api.tuning.database import TuningsReply
from torchrelay.compiler.tuning import records
from torchrelay.compiler.tuning.records import DeviceEnvironment, Operand, Problem, Timing, TuningEntry

PLACE = DeviceEnvironment(
    device="NVIDIA H200", capability="9.0", driver="580", torch="2.13.0", triton="3.7.0", cuda="13.0"
)
CPU = DeviceEnvironment(
    device="Xeon", capability="avx2", driver="", torch="2.13.0", triton="", cuda="", threads=2
)


def entry(size: int, winner: str = "aten mm", place: DeviceEnvironment = PLACE) -> TuningEntry:
    side = Operand("bfloat16", (size, size), (size, 1))
    timing = Timing(winner, 0.25, 0.24, 0.26, 40)
    return TuningEntry(problem=Problem("mm", (side, side), side), place=place, winner=timing, candidates=3)


def send(http: httpx2.Client, *entries: TuningEntry, **more: Any) -> httpx2.Response:
    return http.post("/v1/tunings", content=msgspec.json.encode({"entries": entries, **more}))


def held(http: httpx2.Client, limit: int = 100) -> list[TuningEntry]:
    """All pages, sorted."""
    found: dict[Any, TuningEntry] = {}
    cursor = ""
    while True:
        answer = http.get("/v1/tunings", params={"cursor": cursor, "limit": limit})
        page = decoding.from_json(answer.content, type=TuningsReply)
        found |= {records.entry_sort_key(entry): entry for entry in page.entries}
        cursor = page.next
        if not cursor:
            return [found[key] for key in sorted(found)]


def test_what_was_brought_stands_until_it_is_replaced_on_purpose(http: httpx2.Client) -> None:
    assert held(http) == []
    assert send(http, entry(8), entry(16)).json() == {"new": 2, "exists": 0, "replaced": 0}
    other = entry(16, "triton_mm")
    assert send(http, other, entry(32)).json() == {"new": 1, "exists": 1, "replaced": 0}
    assert held(http) == sorted([entry(8), entry(16), entry(32)], key=records.entry_sort_key)
    assert send(http, other, replace=True).json() == {"new": 0, "exists": 0, "replaced": 1}
    assert held(http) == sorted([entry(8), other, entry(32)], key=records.entry_sort_key)


def test_every_page_together_is_everything(http: httpx2.Client) -> None:
    every = [entry(size) for size in range(1, 701)]
    send(http, *every)
    assert held(http, limit=50) == sorted(every, key=records.entry_sort_key)


def test_readers_look_tuners_bring_and_all_of_it_stays_within_a_namespace(
    gateway: Running, http: httpx2.Client
) -> None:
    def token(role: str, **more: str) -> str:
        made = http.post("/v1/tokens", json={"name": role, "roles": [role], **more})
        return str(made.json()["token"])

    send(http, entry(8))
    for role, looks, brings in (("read", 200, 403), ("compile", 200, 403), ("tune", 200, 200)):
        with gateway.http(token(role)) as mine:
            assert (mine.get("/v1/tunings").status_code, send(mine, entry(8)).status_code) == (looks, brings)
    with gateway.http(token("tune", namespace="vision")) as theirs:
        assert held(theirs) == []
        assert send(theirs, entry(8, "triton_mm"), entry(16)).json()["new"] == 2
        assert theirs.get("/v1/tunings", params={"namespace": "default"}).status_code == 403
    assert held(http) == [entry(8)]


def test_each_import_is_in_the_audit_log_before_it_changes_anything(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    send(http, entry(8), entry(16))
    send(http, entry(8), replace=True)
    # Not a hash: the winners cannot be kept.
    redis_server.client().delete("torchrelay:tunings")
    redis_server.client().set("torchrelay:tunings", "x")
    assert send(http, entry(32)).status_code >= 500
    logged = http.get("/v1/audit", params={"limit": 3}).json()["entries"]
    assert [(each["action"], each["name"], each["detail"]) for each in logged] == [
        ("tunings_imported", "owner", "1 entries"),
        ("tunings_imported", "owner", "1 entries, replacing others"),
        ("tunings_imported", "owner", "2 entries"),
    ]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"entries": []}, 422, "length >= 1"),
        ({"entries": [entry(8)] * 1001}, 422, "length <= 1000"),
        ({"entries": [entry(8)], "all": True}, 422, "unknown field `all`"),
        ({"entries": [msgspec.structs.replace(entry(8), candidates=0)]}, 422, "$.entries[0].candidates"),
        ({"entries": [entry(8, "w" * 4097)]}, 422, "$.entries[0].winner.candidate"),
        ({"entries": [entry(size, "w" * 4000) for size in range(1, 1000)]}, 413, "4194304"),
    ],
)
def test_what_is_no_entry_is_refused_and_nothing_of_it_taken(
    change: dict[str, Any], status: int, words: str, http: httpx2.Client
) -> None:
    many = msgspec.json.encode({"entries": [entry(1)], **change})
    answer = http.post("/v1/tunings", content=many * (2 if status == 413 else 1))
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
    assert held(http) == []


# --- the command line ------------------------------------------------------------------------------------

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(gateway: Running, tmp_path: Path) -> Command:
    return partial(torchrelay, "tune", environment=user(tmp_path, gateway.url, TOKEN))


def test_a_lock_file_goes_out_is_edited_and_comes_back(
    command: Command, http: httpx2.Client, tmp_path: Path
) -> None:
    file = tmp_path / "team.lock"
    every = [entry(size) for size in range(1, 401)] + [entry(8, place=CPU)]
    assert send(http, *every).status_code == 200
    assert command("export", file).stdout == f"exported 401 winners to {file}\n"
    assert file.read_text() == command("export").stdout == tuning_lock.write(every)
    assert file.stat().st_mode & 0o777 == 0o644
    assert "imported 0 winners, replaced 0; 401 exist already (--replace" in command("import", file).stdout
    file.write_text(file.read_text().replace("aten mm", "cpp_gemm", 1))
    assert "replaced 1; 400 exist already\n" in command("import", file, "--replace").stdout
    assert entry(1, "cpp_gemm") in held(http)
    command("export", file)
    assert file.read_text().count("cpp_gemm") == 1


def test_an_export_is_narrowed_to_a_device_and_a_torch(command: Command, http: httpx2.Client) -> None:
    newer = entry(8, place=msgspec.structs.replace(CPU, torch="2.14.0"))
    send(http, entry(8), entry(8, place=CPU), newer)
    assert command("export", "--device", "Xeon", "--torch", "2.14.0").stdout == tuning_lock.write([newer])
    assert command("export", "--device", "NVIDIA H200").stdout == tuning_lock.write([entry(8)])
    none = command("export", "--device", "NVIDIA H100")
    assert (none.returncode, none.stdout) == (2, "")
    assert "'NVIDIA H200' with torch '2.13.0'; 'Xeon' with torch '2.13.0'; 'Xeon' with" in none.stderr


def test_an_empty_database_is_an_empty_lock(command: Command, http: httpx2.Client, tmp_path: Path) -> None:
    file = tmp_path / "team.lock"
    assert command("export", file).returncode == 0
    assert tuning_lock.load(file) == []
    assert "imported 0 winners" in command("import", file).stdout


def test_a_file_that_is_none_says_where_in_one_line(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "team.lock"
    file.write_text("version = 1\n[[place]]\ndevice = 3\n")
    for arguments, words in (
        (("import", file), "team.lock, line 3: device: Expected `str`"),
        (("import", tmp_path / "none"), "cannot be read: No such file"),
        (("export", tmp_path / "no folder" / "x"), "cannot be written"),
    ):
        done = command(*arguments)
        assert done.returncode in (1, 2)
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
