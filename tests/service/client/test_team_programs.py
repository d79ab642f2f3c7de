"""Programs of a team: given by tokens with the permission, taken by clients that trust the service's signature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx2
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from frame_programs import program
from service_parts import TOKEN, Running, StartGateway, graph, post
from torchrelay.clients.artifacts.disk_cache import DiskCache
from torchrelay.clients.artifacts.programs.team_programs import TeamPrograms
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.artifact import container
from torchrelay.compiler.artifact.programs import shared
from torchrelay.compiler.artifact.programs.records import FrameProgram
from torchrelay.compiler.artifact.signing import Trust, read_key
from torchrelay.compiler.graph.toolchain import local_target, local_toolchain
from torchrelay.compiler.request import codec, key

FUNCTION = "ab" * 32
NOBODY = "http://127.0.0.1:1"

Connect = Callable[..., TeamPrograms]


@pytest.fixture
def sharing(start_gateway: StartGateway) -> Running:
    return start_gateway(token_allow_programs=True)


@pytest.fixture
def trusted(sharing: Running) -> Trust:
    with sharing.http() as http:
        return Trust.of([read_key(text) for text in http.get("/v1/info").json()["public_keys"]])


@pytest.fixture
def connect(sharing: Running, trusted: Trust, tmp_path: Path) -> Connect:
    """A new process, on a machine that keeps nothing unless it has a `disk`."""

    def made(
        token: str = TOKEN, trust: Trust = trusted, disk: DiskCache | None = None, url: str = sharing.url
    ) -> TeamPrograms:
        client = GatewayClient(ClientSettings(url=url, token=token, cache_dir=tmp_path))
        disk = disk or DiskCache(tmp_path, 0)
        return TeamPrograms(client, disk, lambda file, name: container.verify(file, trust, key=name))

    return made


def sent(team: TeamPrograms, *programs: FrameProgram) -> None:
    for each in programs:
        team.send(FUNCTION, each, "cpu")
    team.drain()


def token(sharing: Running, **more: object) -> str:
    with sharing.http() as owner:
        answer = owner.post("/v1/tokens", json={"name": "ada", "roles": ["compile"], **more})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


def upload(
    http: httpx2.Client, function: str = FUNCTION, *, slot: int = 0, body: bytes = b""
) -> httpx2.Response:
    said = shared.ProgramUpload(local_toolchain(), local_target("cpu"), program())
    return http.put(f"/v1/programs/{function}/{slot}", content=body or shared.encode_upload(said))


def test_one_client_gives_programs_and_another_takes_them(connect: Connect) -> None:
    assert list(connect().find(FUNCTION)) == []
    sent(connect(), program(0), program(1), program(0))
    assert list(connect().find(FUNCTION)) == [program(0), program(1)]
    assert list(connect().find("cd" * 32)) == []


def test_a_token_without_the_permission_takes_but_does_not_give(sharing: Running, connect: Connect) -> None:
    readers = token(sharing)
    sent(connect(readers), program(0))
    assert list(connect(readers).find(FUNCTION)) == []
    sent(connect(token(sharing, allow_programs=True)), program(1))
    assert list(connect(readers).find(FUNCTION)) == [program(1)]
    with sharing.http(token(sharing)) as http:
        error = upload(http).json()["error"]
        assert (error["code"], "--allow-programs" in error["hint"]) == ("forbidden", True)


def test_only_who_has_the_permission_gives_it(sharing: Running) -> None:
    asked = {"name": "bob", "roles": ["compile"], "allow_programs": True}
    for allowed in (False, True):
        admin = token(sharing, roles=["admin"], namespace="red", allow_programs=allowed)
        with sharing.http(admin) as http:
            assert http.post("/v1/tokens", json=asked).status_code == (201 if allowed else 403)
            permissions = sorted(record["allow_programs"] for record in http.get("/v1/tokens").json())
    assert permissions == [False, True, True]


@pytest.mark.parametrize("allowed", [False, True])
def test_only_who_has_the_permission_imports_a_program(
    sharing: Running, connect: Connect, allowed: bool
) -> None:
    """An administrator's import is another way to the clients of a namespace."""
    sent(connect(), program(0))
    with sharing.http() as owner:
        data = owner.get(f"/v1/programs/{FUNCTION}/0").content
    admin = token(sharing, roles=["admin"], namespace="red", allow_programs=allowed)
    with sharing.http(admin) as http:
        answer = http.post("/v1/cache", content=data)
    assert answer.status_code == (200 if allowed else 403), answer.text
    assert allowed or "--allow-programs" in answer.json()["error"]["hint"]
    found = list(connect(token(sharing, namespace="red")).find(FUNCTION))
    assert found == ([program(0)] if allowed else [])


def test_a_namespace_does_not_see_anothers_programs(sharing: Running, connect: Connect) -> None:
    sent(connect(), program(0))
    assert list(connect(token(sharing, namespace="red")).find(FUNCTION)) == []


def test_nothing_is_taken_that_no_trusted_key_has_signed(connect: Connect) -> None:
    sent(connect(), program(0))
    stranger = Trust.of([Ed25519PrivateKey.generate().public_key()])
    assert list(connect(trust=stranger).find(FUNCTION)) == []


def test_a_program_that_was_taken_needs_no_service_the_next_time(connect: Connect, tmp_path: Path) -> None:
    sent(connect(), program(0), program(1))
    disk = DiskCache(tmp_path / "disk", 1 << 20)
    assert next(connect(disk=disk).find(FUNCTION)) == program(0)
    assert list(connect(disk=disk, url=NOBODY).find(FUNCTION)) == [program(0)]
    assert list(connect(disk=disk).find(FUNCTION)) == [program(0), program(1)]
    assert list(connect(disk=disk, url=NOBODY).find(FUNCTION)) == [program(1), program(0)]


def test_a_program_of_a_key_that_was_revoked_is_removed_from_the_disk(
    connect: Connect, trusted: Trust, tmp_path: Path
) -> None:
    sent(connect(), program(0))
    disk = DiskCache(tmp_path / "disk", 1 << 20)
    assert list(connect(disk=disk).find(FUNCTION)) == [program(0)]
    revoked = msgspec.structs.replace(trusted, revoked=frozenset(trusted.keys))
    assert list(connect(disk=disk, url=NOBODY, trust=revoked).find(FUNCTION)) == []
    assert list(connect(disk=disk, url=NOBODY).find(FUNCTION)) == []


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["kept in memory", "kept on the disk"])
def test_a_process_asks_for_each_program_once(
    limit: int, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(connect(), program(0), program(1))
    asked = []
    fetch = GatewayClient.program

    def counted(client: GatewayClient, function: str, slot: int) -> bytes:
        asked.append(slot)
        return fetch(client, function, slot)

    monkeypatch.setattr(GatewayClient, "program", counted)
    team = connect(disk=DiskCache(tmp_path / "disk", limit))
    assert next(team.find(FUNCTION)) == program(0)
    assert asked == [0]
    for _ in range(2):
        assert sorted(each.bytecode for each in team.find(FUNCTION)) == [b"bytecode 0", b"bytecode 1"]
        assert asked == [0, 1, 2]


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["kept in memory", "kept on the disk"])
def test_what_a_new_trace_made_takes_the_place_of_a_stale_program(
    limit: int, connect: Connect, tmp_path: Path
) -> None:
    sent(connect(), program(0), program(1), program(2))
    team = connect(disk=DiskCache(tmp_path / "disk", limit))
    assert len(list(team.find(FUNCTION))) == 3
    team.send(FUNCTION, program(9), "cpu", program(1))
    team.drain()
    assert list(connect().find(FUNCTION)) == [program(0), program(9), program(2)]
    assert sorted(each.bytecode[-1:] for each in team.find(FUNCTION)) == [b"0", b"2", b"9"]


def test_files_that_the_disk_keeps_are_not_kept_in_memory_too(connect: Connect, tmp_path: Path) -> None:
    sent(connect(), program(0), program(1))
    team = connect(disk=DiskCache(tmp_path / "disk", 1 << 20))
    assert len(list(team.find(FUNCTION))) == 2
    assert team._files == {}


def test_where_all_places_are_taken_a_new_program_replaces_another(connect: Connect) -> None:
    sent(connect(), *map(program, range(shared.SLOTS)))
    sent(connect(), program(99))
    found = list(connect().find(FUNCTION))
    assert len(found) == shared.SLOTS
    assert program(99) in found


def test_a_program_is_never_the_answer_to_a_graph(sharing: Running, connect: Connect) -> None:
    with sharing.http() as http:
        graphs_key = key.key_of(codec.unpack_request(graph()))
        assert upload(http, graphs_key).status_code == 200
        assert http.get(f"/v1/artifacts/{graphs_key}").status_code == 404
        assert post(http, graph(), wait="cache").status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no zstd frame", 422),
        (codec.compress(b"no struct"), 422),
        (codec.compress(msgspec.msgpack.encode({"program": 1})), 422),
        (codec.compress(bytes(shared.UNPACKED_LIMIT + 1)), 413),
        (bytes(shared.BODY_LIMIT + 1), 413),
    ],
    ids=["not compressed", "not a struct", "another struct", "a bomb", "too large"],
)
def test_what_is_no_program_is_refused(sharing: Running, body: bytes, status: int) -> None:
    with sharing.http() as http:
        assert upload(http, body=body).status_code == status
        assert upload(http, slot=shared.SLOTS).status_code == 422
        assert http.get(f"/v1/programs/{FUNCTION}/0").status_code == 404


def test_administrators_see_who_gave_a_program(sharing: Running) -> None:
    giver = token(sharing, allow_programs=True)
    with sharing.http(giver) as http:
        assert upload(http).json() == {"outcome": "stored"}
        assert upload(http).json() == {"outcome": "same"}
    with sharing.http() as owner:
        (entry,) = owner.get("/v1/cache").json()["entries"]
        assert entry["key"] == shared.slot_key(FUNCTION, 0)
        stored = [
            each for each in owner.get("/v1/audit").json()["entries"] if each["action"] == "program_stored"
        ]
        assert [(each["name"], each["key"]) for each in stored] == [("ada", entry["key"])]
