"""What `up` brings along for one machine: the state folder, the port, the guard; without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import CapturingLogger
from torchrelay.compiler.artifact.signing import key_id
from torchrelay.compiler.errors import SettingsError, Unavailable
from torchrelay.service.base.settings import check_environment
from torchrelay.service.local import listening, state_folder
from torchrelay.service.local.redis_server import RedisServer, find_server
from torchrelay.service.signing.key_files import FileKeys


def test_a_taken_port_is_refused_or_replaced_as_asked():
    with listening.listen("127.0.0.1", 0, any_port_will_do=False) as first:
        port = first.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}"):
            listening.listen("127.0.0.1", port, any_port_will_do=False)
        with listening.listen("127.0.0.1", port, any_port_will_do=True) as second:
            assert second.getsockname()[1] not in (port, 0)
            assert listening.url_of(second) == f"http://127.0.0.1:{second.getsockname()[1]}"


def test_the_owners_token_is_made_once_and_must_be_private(tmp_path):
    token = state_folder.owner_token(tmp_path / "s")
    assert len(token.get_secret_value()) >= 32
    assert state_folder.owner_token(tmp_path / "s") == token
    path = tmp_path / "s" / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="readable by others"):
        state_folder.owner_token(tmp_path / "s")


@pytest.mark.parametrize("content", ["", "\n", "short", "x" * 31, "x" * 20 + " " + "x" * 20, "\u00e9" * 40])
def test_a_file_without_a_token_is_refused_and_not_taken_for_one(tmp_path, content):
    (tmp_path / "token").write_text(content)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(SettingsError, match="holds no token of 32 visible characters or more") as error:
        state_folder.owner_token(tmp_path)
    assert "Remove it" in error.value.advice
    assert (tmp_path / "token").read_text() == content


def test_gateways_that_start_at_one_time_make_one_token(tmp_path):
    program = (
        "import sys; from pathlib import Path; from torchrelay.service.local import state_folder\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for n in range(50): print(state_folder.owner_token(Path(sys.argv[1], str(n))).get_secret_value())\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for each in started:
        assert each.stdout.readline() == "ready\n"
    for each in started:
        each.stdin.write("\n")
        each.stdin.flush()
    tokens = [each.communicate(timeout=60)[0].splitlines() for each in started]
    assert len(tokens[0]) == 50
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_state_folder_in_which_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match="is writable by others") as error:
        state_folder.owner_token(tmp_path)
    assert error.value.advice == f"chmod 755 {tmp_path}"

    async def scenario():
        async with state_folder.exclusive(tmp_path):
            pass

    with pytest.raises(SettingsError, match="is writable by others"):
        asyncio.run(scenario())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["token", "folder", "key"])
def test_what_another_user_owns_is_refused_whatever_its_mode(tmp_path, what):
    folder = tmp_path / "s"
    state_folder.owner_token(folder)
    name = FileKeys(folder).make().public_key()
    path = {"token": folder / "token", "folder": folder, "key": folder / f"{key_id(name)}.pem"}[what]
    os.chown(path, 65534, 65534)
    with pytest.raises(SettingsError, match=r"belongs to another user \(uid 65534") as error:
        FileKeys(folder).load(key_id(name)) if what == "key" else state_folder.owner_token(folder)
    assert f"chown 0 {path}" in error.value.advice


def test_credentials_are_private_and_replace_an_open_file_whole(tmp_path):
    path = tmp_path / "deep" / "credentials.json"
    path.parent.mkdir()
    path.write_text("{}")
    path.chmod(0o644)
    state_folder.write_credentials(
        path, url="http://127.0.0.1:1", token="t", public_keys=["k"], namespace="default"
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {
        "url": "http://127.0.0.1:1",
        "token": "t",
        "public_keys": ["k"],
        "namespace": "default",
    }
    assert [p.name for p in path.parent.iterdir()] == ["credentials.json"]


_HERE: dict[str, Any] = {
    "url": "http://127.0.0.1:8642",
    "token": "t",
    "public_keys": ["k"],
    "namespace": "default",
}
_COMPANY: dict[str, Any] = {**_HERE, "url": "https://relay.example.org", "public_keys": ["c"]}


@pytest.mark.parametrize(
    ("there", "name"),
    [
        ({}, "credentials.json"),
        (_HERE, "credentials.json"),
        ({**_HERE, "url": "http://127.0.0.1:40000"}, "credentials.json"),  # this service's, at another port
        ({**_HERE, "public_keys": ["of before"]}, "credentials.json"),  # of what was at this URL before
        (_COMPANY, "credentials/local.json"),
        ({**_HERE, "url": "http://127.0.0.1:40000", "public_keys": ["c"]}, "credentials/local.json"),
        ({**_HERE, "public_keys": ["c"], "sign_in": {}}, "credentials/local.json"),  # through a tunnel
        ("not JSON", "credentials/local.json"),
    ],
)
def test_credentials_for_another_service_stay_where_they_are(tmp_path, there, name):
    default = tmp_path / "credentials.json"
    default.write_text(there if isinstance(there, str) else json.dumps(there))
    assert state_folder.place_for_credentials(default, _HERE["url"], ["k"]) == tmp_path / name


def test_two_services_of_one_machine_have_a_profile_each(tmp_path):
    default = tmp_path / "credentials.json"
    for url, keys in ((_COMPANY["url"], ["c"]), (_HERE["url"], ["k"]), ("http://127.0.0.1:9000", ["o"])):
        place = state_folder.place_for_credentials(default, url, keys)
        state_folder.write_credentials(place, url=url, token="t", public_keys=keys, namespace="default")
    found = {path.name: json.loads(path.read_text())["url"] for path in tmp_path.rglob("*.json")}
    assert found == {
        "credentials.json": "https://relay.example.org",
        "local.json": "http://127.0.0.1:8642",
        "local-9000.json": "http://127.0.0.1:9000",
    }
    assert (tmp_path / "credentials" / "local.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("ISOLTION", "ISOLATION"), ("REDISURL", "REDIS_URL"), ("max_queue", "MAX_QUEUED"), ("QQQQQQ", "")],
)
def test_a_mistyped_setting_is_refused_with_the_nearest_name(name, nearest):
    variable = f"TORCHRELAY_SERVICE_{name}"
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.service", "gateway"],
        env={**os.environ, variable: "required"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"{variable} is no setting of the service" in done.stderr
    assert (f"Did you mean TORCHRELAY_SERVICE_{nearest}?" in done.stderr) == bool(nearest)
    assert "Traceback" not in done.stderr


def test_what_kubernetes_sets_for_a_service_is_no_mistyped_setting():
    links = ("PORT_HTTP", "PORT_8642_TCP", "PORT_8642_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT_HTTP")
    check_environment([f"TORCHRELAY_SERVICE_{name}" for name in links] + ["TORCHRELAY_SERVICE_HOST", "PATH"])


def test_a_state_folder_serves_one_service_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(state_folder, "LOCK_SECONDS", 0.3)
    monkeypatch.setattr(state_folder, "log", logs := CapturingLogger())

    async def scenario():
        async with state_folder.exclusive(tmp_path):
            with pytest.raises(Unavailable, match=str(tmp_path)):
                async with state_folder.exclusive(tmp_path):
                    pass
            assert [call.args for call in logs.calls] == [("waiting_for_another_service_to_end",)]
        async with state_folder.exclusive(tmp_path):
            pass

    asyncio.run(scenario())


def test_the_folder_of_sockets_is_short_and_a_killed_predecessors_is_removed(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    left = tmp_path / "torchrelay-left"
    left.mkdir()
    (tmp_path / "runtime").write_text(f"{left}\n")
    with state_folder.runtime_directory(tmp_path) as directory:
        assert not left.exists()
        assert len(str(directory)) < 48
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
    assert not (tmp_path / "runtime").exists()


def test_a_note_that_names_a_foreign_folder_removes_nothing(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "runtime").write_text(f"{precious}\n")
    with state_folder.runtime_directory(tmp_path):
        assert precious.exists()


def test_redis_holds_the_lock_until_it_has_ended_and_ends_with_its_parent(tmp_path):
    """A parent that is killed right after its redis answered: the lock is free only once redis has gone."""
    socket_dir = Path(tempfile.mkdtemp(prefix="trl-", dir="/tmp"))
    program = f"""
import asyncio, os, signal
from pathlib import Path
from torchrelay.service.local import state_folder
from torchrelay.service.local.redis_server import RedisServer

async def main():
    async with state_folder.exclusive(Path({str(tmp_path)!r})) as lock:
        redis = RedisServer(Path({str(tmp_path)!r}) / "redis", Path({str(socket_dir)!r}) / "s",
                             Path({str(tmp_path)!r}) / "log", lock)
        await redis.start()
        print(redis._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    try:
        ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
        assert ran.returncode == -signal.SIGKILL
        redis = int(ran.stdout)

        async def take_the_lock():
            async with state_folder.exclusive(tmp_path):
                return psutil.pid_exists(redis) and psutil.Process(redis).status() != psutil.STATUS_ZOMBIE

        assert asyncio.run(take_the_lock()) is False
    finally:
        for path in socket_dir.iterdir():
            path.unlink()
        socket_dir.rmdir()


def test_a_redis_that_cannot_start_is_said_with_its_log(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "appendonly.aof").write_bytes(b"no append-only file\r\n" * 10)

    async def scenario():
        redis = RedisServer(tmp_path / "data", tmp_path / "s", tmp_path / "log", lock_of(tmp_path))
        try:
            with pytest.raises(Unavailable, match="redis-server ended"):
                await redis.start()
        finally:
            await redis.stop()

    asyncio.run(scenario())
    assert os.access(find_server(), os.X_OK)


def lock_of(folder):
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)


GUARDED = """
import signal, subprocess, sys
from torchrelay.service.local.supervisor import run_supervised

def service():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    escaped = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    orphan = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"],
                            capture_output=True, text=True, check=True)
    print(escaped.pid, orphan.stdout.strip(), flush=True)
    {then}

sys.exit(run_supervised(service))
"""


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("sys.exit(5)", 5),
        ("import os; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("raise ValueError('no')", 1),
        ("pass", 0),
    ],
)
def test_the_guard_gives_the_services_status_and_ends_what_it_left(then, status):
    ran = subprocess.run(
        [sys.executable, "-c", GUARDED.format(then=then)], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert ran.returncode == status
    assert not [pid for pid in map(int, ran.stdout.split()) if psutil.pid_exists(pid)]


def test_the_guard_passes_signals_on():
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARDED.format(then="signal.pause()")], stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in guard.stdout.readline().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    guard.terminate()
    assert guard.wait(20) == 7
    guard.stdout.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


STUCK = """
import signal, sys
from torchrelay.service.local import supervisor

def service():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("stuck", flush=True)
    signal.pause()

supervisor.STOP_SECONDS = 0.5
sys.exit(supervisor.run_supervised(service))
"""


def test_a_service_that_does_not_end_after_a_signal_is_killed():
    guard = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    assert guard.stdout.readline() == "stuck\n"
    guard.terminate()
    status = guard.wait(60)
    guard.stdout.close()
    assert status == 128 + signal.SIGKILL


def test_a_service_whose_guard_is_killed_is_told_to_end():
    guard = psutil.Popen(
        [sys.executable, "-c", GUARDED.format(then="signal.pause()")], stdout=subprocess.PIPE, text=True
    )
    guard.stdout.readline()
    family = guard.children(recursive=True)
    service = guard.children()[0]
    guard.kill()
    guard.wait()
    guard.stdout.close()
    gone, _ = psutil.wait_procs([service], timeout=10)
    for left in family:  # sleepers of the test, which nothing but the guard would have ended
        if left.is_running():
            left.kill()
    assert gone == [service] or service.status() == psutil.STATUS_ZOMBIE


def test_loopback_is_the_default_and_ipv6_is_understood():
    if socket.has_ipv6:
        with listening.listen("::1", 0, any_port_will_do=False) as listener:
            assert listening.url_of(listener).startswith("http://[::1]:")
