"""`up` starts a whole service, several beside each other, and leaves nothing behind, however it ends.

Each service here is real: guard, redis-server, Ray, a warm worker with torch, gateway.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import redis
from certificates import Authority
from torchrelay.service.local.redis_server import find_server
from waiting import wait_until

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Up:
    """A running `python -m torchrelay.service up`, and everything that it has ever started."""

    def __init__(self, home, *arguments, **environment):
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "log"
        own = {
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHRELAY_", "RAY_"))}
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "torchrelay.service", "up", *arguments],
                env=kept | own | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.family = {}

    @property
    def credentials(self):
        return json.loads((self.home / "config" / "torchrelay" / "credentials.json").read_text())

    def look(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self.process, *self.process.children(recursive=True)]:
                self.family.setdefault(process.pid, process)

    def wait_ready(self, seconds=120):
        self.wait_for("torchrelay: ready http", seconds)
        self.look()
        return self

    def wait_for(self, words, seconds=60):
        def written():
            self.look()
            return words in self.log.read_text() or self.process.poll() is not None

        wait_until(written, seconds, pause=0.1, told=self.log.read_text)
        assert words in self.log.read_text(), self.log.read_text()

    def stop(self, number=signal.SIGTERM, seconds=40):
        self.look()
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def left(self, seconds=0.0):
        """Processes of the family that still live after at most `seconds`."""

        def living():
            return [p for p in self.family.values() if p.is_running() and not _is_zombie(p)]

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not living(), seconds)
        return living()

    def get(self, path, token=None):
        credentials = self.credentials
        request = urllib.request.Request(
            credentials["url"] + path, headers={"Authorization": f"Bearer {token or credentials['token']}"}
        )
        try:
            with _DIRECT.open(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def _is_zombie(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _name(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()


@contextlib.contextmanager
def up(home, *arguments, **environment):
    service = Up(home, *arguments, **environment)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.stop()
        assert not service.left(10), service.left()


def wait_until_answered(service, path):
    wait_until(lambda: service.get(path)[0] == 200, pause=0.1, told=service.log.read_text)


def runtime_of(service):
    return Path((service.home / "state" / "torchrelay" / "runtime").read_text().strip())


def test_it_serves_from_a_deep_folder_stops_on_sigterm_and_leaves_nothing(tmp_path):
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    (deep / "tmp").mkdir(parents=True)
    with up(deep, "--port", "0", "--cpu-slots", "1", TMPDIR=str(deep / "tmp")) as service:
        service.wait_ready()
        assert service.get("/readyz")[0] == 200
        workers = json.loads(service.get("/v1/workers")[1])
        assert "idle" in json.dumps(workers)
        assert service.get("/v1/workers", token="x" * 43)[0] == 401
        assert len(service.family) > 6
        runtime = runtime_of(service)
        assert runtime.is_dir()
        path = deep / "config" / "torchrelay" / "credentials.json"
        assert path.stat().st_mode & 0o777 == 0o600
        url = service.credentials["url"]
        assert service.stop() == 0
        assert service.left() == []
        assert not runtime.exists()
        with pytest.raises(urllib.error.URLError):
            _DIRECT.open(url + "/livez", timeout=5)


def redis_of(service):
    return redis.Redis(unix_socket_path=str(runtime_of(service) / "redis.sock"))


def test_a_restart_keeps_token_key_and_cache_and_two_run_side_by_side(tmp_path):
    with up(tmp_path / "a", "--port", "0", "--cpu-slots", "1") as first:
        first.wait_ready()
        before = first.credentials
        redis_of(first).set("probe", "kept")
        assert first.stop(signal.SIGINT) == 0
        assert first.left() == []
    with (
        up(tmp_path / "a", "--port", "0", "--cpu-slots", "1") as again,
        up(tmp_path / "b", "--port", "0", "--cpu-slots", "1") as other,
    ):
        again.wait_ready()
        other.wait_ready()
        assert again.credentials["token"] == before["token"]
        assert redis_of(again).get("probe") == b"kept"
        next(p for p in again.family.values() if p.name() == Path(find_server()).name).kill()
        time.sleep(0.2)
        wait_until_answered(again, "/readyz")
        assert redis_of(again).get("probe") == b"kept"
        assert again.credentials["public_keys"] == before["public_keys"]
        assert other.credentials["token"] != before["token"]
        assert other.get("/v1/stats", token=before["token"])[0] == 401
        assert other.stop() == 0
        assert again.get("/readyz")[0] == 200


def test_a_killed_service_takes_everything_with_it_and_the_next_one_starts(tmp_path):
    with up(tmp_path, "--port", "0", "--cpu-slots", "1") as service:
        service.wait_ready()
        service.process.kill()
        service.process.wait(10)
        assert service.left(30) == []
    with up(tmp_path, "--port", "0", "--cpu-slots", "1") as service:
        service.wait_ready()
        runtime = runtime_of(service)
        inner = service.process.children()[0]
        inner.kill()  # the process under the guard, which then has no chance to stop anything in order
        assert service.process.wait(20) == 128 + signal.SIGKILL
        assert service.left() == []
    with up(tmp_path, "--port", "0", "--cpu-slots", "1") as service:
        service.wait_for("torchrelay: gateway")
        assert not runtime.exists()


def catches(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("delay", [0.0, 0.3, 1.5, 3.0])
def test_a_signal_during_the_start_is_a_clean_end(tmp_path, delay):
    """delay: seconds after Python has begun to run our code; before that it is Python that the signal ends."""
    with up(tmp_path, "--port", "0", "--cpu-slots", "1") as service:
        wait_until(lambda: catches(service.process.pid, signal.SIGTERM))
        begun = time.monotonic()
        wait_until(lambda: service.look() or time.monotonic() >= begun + delay)
        os.killpg(service.process.pid, signal.SIGINT)  # as Ctrl-C does: to the whole foreground group
        assert service.process.wait(40) == 0
        assert service.left() == []
        assert "Traceback" not in service.log.read_text()


def test_signals_that_keep_coming_during_the_imports_are_one_clean_end(tmp_path):
    with up(tmp_path, "--port", "0", "--cpu-slots", "1") as service:
        while not service.process.children():
            assert service.process.poll() is None
        (child,) = service.process.children()
        service.look()
        with contextlib.suppress(psutil.NoSuchProcess):
            while service.process.poll() is None:
                child.send_signal(signal.SIGINT)
                time.sleep(0.001)
        assert service.process.wait(40) == 0
        assert service.left() == []
        assert "Traceback" not in service.log.read_text()


def test_a_signal_while_ray_starts_ends_what_it_has_started(tmp_path):
    """Its first server does not answer: the start would wait for half a minute."""
    folder = Path(tempfile.mkdtemp(prefix="up-", dir="/tmp"))
    with up(tmp_path, "--port", "0", "--cpu-slots", "1", TMPDIR=str(folder)) as service:
        server = None
        while server is None:
            assert service.process.poll() is None, service.log.read_text()
            service.look()
            server = next((p for p in service.family.values() if _name(p) == "gcs_server"), None)
        server.suspend()
        assert service.stop(signal.SIGINT) == 0
        assert service.left() == []
        assert "Traceback" not in service.log.read_text()
    assert list(folder.iterdir()) == []
    folder.rmdir()


def test_a_second_service_on_the_same_state_and_a_taken_port_are_refused_in_one_line(tmp_path):
    with up(tmp_path, "--port", "0", "--cpu-slots", "1") as service:
        service.wait_for("torchrelay: gateway")
        port = service.credentials["url"].rpartition(":")[2]
        taken = Up(tmp_path / "other", "--port", port)
        assert taken.process.wait(30) == 2
        assert "cannot listen on" in taken.log.read_text()
        second = Up(tmp_path / "second", "--port", "0", "--state", str(tmp_path / "state" / "torchrelay"))
        assert second.process.wait(60) == 1
        assert "another torchrelay service runs on" in second.log.read_text()
        assert "Traceback" not in second.log.read_text() + taken.log.read_text()


@pytest.mark.slow
def test_up_serves_https_and_says_so_in_the_credentials(tmp_path):
    own = Authority(tmp_path / "certificates").issue("relay.example.org")
    address, certificate = (
        "https://relay.example.org",
        ("--tls-cert", str(own.cert), "--tls-key", str(own.key)),
    )
    options = ("--port", "0", "--no-gpu", "--cpu-slots", "1", "--public-url", address, *certificate)
    with up(tmp_path / "home", *options) as service:
        service.wait_for("torchrelay: ready https://127.0.0.1:", 240)
        assert service.credentials["url"] == address
        assert service.credentials["namespace"] == "default"
