"""Redis with users and TLS: the gateway does all it does as deploy/redis-users.acl allows, and nothing else may."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import redis
import training_parts
from certificates import Authority, Certificate
from service_parts import ArtifactPool, RedisServer, StartGateway, compiled, free_port, graph, post
from torchrelay.service.local.redis_server import find_server
from training_parts import TrainingPool
from waiting import wait_until
from whole_gateway import everything

DEPLOYED = Path(__file__).parents[3] / "deploy" / "redis-users.acl"
PASSWORD = "a-password-of-the-test"
ADMIN = ("tester", "a-password-of-the-tester")


def users(folder: Path) -> Path:
    """The deployed users, with a password, and one more who may look at everything."""
    file = folder / "users.acl"
    content = DEPLOYED.read_text().replace("CHANGE-ME-FOR-BACKUPS", PASSWORD).replace("CHANGE-ME", PASSWORD)
    file.write_text(f"{content}user {ADMIN[0]} on >{ADMIN[1]} ~* &* +@all\n")
    return file


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    """Listens on its socket alone; nobody gets in without a name."""
    server = RedisServer(user=ADMIN, aclfile=str(users(tmp_path)))
    server.start()
    server.url = f"unix://torchrelay:{PASSWORD}@{server.socket}"
    yield server
    server.close()


def refusals(server: RedisServer) -> list[tuple[Any, Any]]:
    """What users tried and may not; but redis-py's telling its name, which Redis before 7.2 cannot allow by itself,
    and without which it goes on."""
    with server.client() as client:
        log = [(entry["reason"], entry["object"]) for entry in client.acl_log()]
    return [(reason, name) for reason, name in log if name not in ("client", "client|setinfo")]


def test_the_deployed_user_may_do_all_that_a_gateway_does(
    guarded: RedisServer, start_gateway: StartGateway
) -> None:
    large = start_gateway(ArtifactPool(seconds=0.5), redis_url=guarded.url, body_timeout_seconds=1)
    everything(large)
    large.stop()  # or it would take compiles, and evict nothing
    small = start_gateway(redis_url=guarded.url, cache_limit_bytes=3000)
    with small.http() as http:
        for size in range(20, 24):  # some are evicted
            compiled(http, graph(size))
        wait_until(lambda: http.get("/v1/stats").json()["entries"] < 4, seconds=20)
    assert refusals(guarded) == []


def test_the_deployed_user_may_drive_training_jobs(
    guarded: RedisServer, start_gateway: StartGateway, tmp_path: Path
) -> None:
    with start_gateway(TrainingPool(tmp_path), redis_url=guarded.url).http() as http:
        name = training_parts.begun(http)
        assert training_parts.ended(http, name)["state"] == "done"
        assert training_parts.entries(http, name, "metrics")
        assert http.put(f"/v1/trains/{name}/files/x", content=b"x").status_code == 200
        assert len(http.get("/v1/trains").json()["jobs"]) == 1
        folder = tmp_path / "state" / "trains" / name
        folder.mkdir(parents=True)
        os.utime(folder, (1, 1))
        with guarded.client() as redis:
            redis.hset("torchrelay:installation", "since", 0)
        # it tidies as it starts
        start_gateway(TrainingPool(tmp_path), redis_url=guarded.url, train_keep_seconds=3600.0)
        wait_until(lambda: not folder.exists() or refusals(guarded) != [], seconds=20)
    assert refusals(guarded) == []


def snapshot(server: RedisServer, user: str) -> bytes:
    """What `redis-cli --rdb` writes to a file, asked for as that does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(server.socket))
        answers = connection.makefile("rb")
        connection.sendall(f"AUTH {user} {PASSWORD}\r\n".encode())
        assert answers.readline() == b"+OK\r\n"
        connection.sendall(b"SYNC\r\n")
        while (size := answers.readline()) == b"\n":  # it is still being written
            pass
        assert size.startswith(b"$"), size
        return answers.read(int(size[1:]))


def test_what_the_user_for_backups_copies_is_an_installation_again(
    guarded: RedisServer, start_gateway: StartGateway
) -> None:
    """As docs/operate.md has it: `redis-cli --rdb`, and the file becomes the new server's appendonly.aof."""
    gateway = start_gateway(redis_url=guarded.url)
    with gateway.http() as http:
        made = compiled(http, graph())
        assert http.patch("/v1/namespaces/red", json={"compiles": 7}).status_code == 200
    copy = snapshot(guarded, "backup")
    gateway.stop()
    assert refusals(guarded) == []
    other = RedisServer(persistent=True)
    try:
        (other.folder / "appendonly.aof").write_bytes(copy)
        other.start()
        again = start_gateway(redis_url=other.url, state_dir=gateway.settings.state_dir)
        with again.http() as http:
            assert post(http, graph()).content == made
            assert http.get("/v1/namespaces/red").json()["quota"]["compiles"] == 7
        assert again.pool.calls == []
    finally:
        other.close()


def test_every_command_of_every_script_is_allowed_to_the_deployed_user() -> None:
    allowed = set(DEPLOYED.read_text().split())
    called = {
        command.lower()
        for group in (resources.files("torchrelay.service.storage.redis") / "lua").iterdir()
        for script in group.iterdir()
        for command in re.findall(r"redis\.p?call\(\s*'(\w+)'", script.read_text())
    }
    assert len(called) > 20
    assert {f"+{command}" for command in called} <= allowed


@pytest.mark.parametrize(
    "command",
    [
        ("CONFIG", "GET", "*"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("EVAL", "return 1", "0"),
        ("SCRIPT", "FLUSH"),
        ("MODULE", "LIST"),
        ("ACL", "LIST"),
        ("SHUTDOWN", "NOSAVE"),
        ("REPLICAOF", "NO", "ONE"),
        ("GET", "another:key"),
        ("SET", "another:key", "1"),
        ("PUBLISH", "another", "1"),
        ("MIGRATE", "127.0.0.1", "1", "torchrelay:x", "0", "1"),
        ("CLIENT", "LIST"),
        ("MONITOR",),
    ],
    ids=" ".join,
)
def test_the_deployed_user_may_do_nothing_else(command: tuple[str, ...], guarded: RedisServer) -> None:
    with redis.Redis.from_url(guarded.url) as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command)


def test_without_a_name_there_is_nothing(guarded: RedisServer, start_gateway: StartGateway) -> None:
    with (
        redis.Redis(unix_socket_path=str(guarded.socket)) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
    running = start_gateway(redis_url=f"unix://{guarded.socket}")
    with running.http() as http:
        answer = http.get("/readyz")
        assert (answer.status_code, "cannot be reached" in answer.json()["parts"]["redis"]) == (503, True)
        assert post(http, graph()).status_code == 503


# --- TLS -------------------------------------------------------------------------------------------------


class Terminator:
    """Takes TLS off before a Redis on a socket, as a managed Redis or stunnel does."""

    def __init__(self, target: Path, certificate: Certificate) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.cert, certificate.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # accept() returns
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        try:
            outer = self._context.wrap_socket(raw, server_side=True)
        except OSError:  # the client refuses the certificate: what the tests are about
            raw.close()
            return
        inner = socket.socket(socket.AF_UNIX)
        inner.connect(str(self._target))
        pump = threading.Thread(target=_pump, args=(inner, outer), daemon=True)
        pump.start()
        _pump(outer, inner)
        pump.join()
        inner.close()
        outer.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def built_with_tls() -> bool:
    """Whether this redis-server speaks TLS itself, and then asks for a certificate; that of a wheel does not."""
    line = [find_server(), "--port", "0", "--tls-port", "1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    return "tls-cert-file" in done.stdout + done.stderr


Encrypted = Callable[[Certificate], int]


@pytest.fixture(params=["terminated", *(["native"] if built_with_tls() else [])])
def encrypted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Encrypted]:
    """Start a Redis with the deployed users that speaks TLS with a certificate; the port that it is on."""
    with contextlib.ExitStack() as started:

        def start(certificate: Certificate) -> int:
            options: dict[str, Any] = {}
            if request.param == "native":
                options = {
                    "tls_port": str(port := free_port()),
                    "bind": "127.0.0.1",
                    "tls_cert_file": str(certificate.cert),
                    "tls_key_file": str(certificate.key),
                    "tls_auth_clients": "no",
                }
            server = RedisServer(user=ADMIN, aclfile=str(users(tmp_path)), **options)
            started.callback(server.close)
            server.start()
            if request.param == "native":
                return port
            front = Terminator(server.socket, certificate)
            started.callback(front.close)
            return int(front.port)

        yield start


def test_a_gateway_works_over_tls_and_as_the_deployed_user(
    encrypted: Encrypted, start_gateway: StartGateway, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "certificates")
    port = encrypted(authority.issue("127.0.0.1", "localhost"))
    url = f"rediss://torchrelay:{PASSWORD}@127.0.0.1:{port}/0?ssl_ca_certs={authority.file}"
    everything(start_gateway(ArtifactPool(seconds=0.5), redis_url=url, body_timeout_seconds=1))


def test_a_redis_that_nobody_vouches_for_gets_no_password(
    encrypted: Encrypted, start_gateway: StartGateway, tmp_path: Path
) -> None:
    authority, stranger = Authority(tmp_path / "certificates"), Authority(tmp_path / "elsewhere", "stranger")
    port = encrypted(authority.issue("redis.example.org"))
    for file in (stranger.file, authority.file):  # another authority; the right one, for another name
        url = f"rediss://torchrelay:{PASSWORD}@127.0.0.1:{port}/0?ssl_ca_certs={file}"
        running = start_gateway(redis_url=url)
        with running.http() as http:
            answer = http.get("/readyz")
            assert (answer.status_code, "certificate" in answer.json()["parts"]["redis"].lower()) == (
                503,
                True,
            )
            assert PASSWORD not in answer.text
        running.stop()
