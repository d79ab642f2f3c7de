"""The parts apart, by docker-compose.yml's own command lines: redis, Ray, signer, gateway, dispatcher, worker; one
compile.

Container names become loopback addresses and ports become free ones; nothing else of the lines is changed. A
Ray node listens on every interface, so the whole scenario runs, where the kernel allows it, in a network
namespace that has loopback only: this file is the test, and the program in the namespace.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import yaml

sys.path += [str(parts) for parts in Path(__file__).parents[2].glob("*/parts")]  # for programs in namespaces
import waiting

ROOT = Path(__file__).parents[3]
SECRETS = {
    "TORCHRELAY_OWNER_TOKEN": "owner-" + "o" * 40,
    "TORCHRELAY_REDIS_PASSWORD": "password-" + "p" * 40,
    "TORCHRELAY_RAY_TOKEN": "a1" * 32,
    "TORCHRELAY_SIGNER_TOKEN": "signer-" + "s" * 40,
    "TORCHRELAY_SIGNER_ADMIN_TOKEN": "signer-admin-" + "a" * 40,
    "TORCHRELAY_TRAINING": "true",
    "TORCHRELAY_CPU_SLOTS": "1",
}
SCRIPT = """
import torch
model = torch.nn.Linear(8, 4)
compiled = torch.compile(model, backend="torchrelay")
x = torch.randn(2, 8)
assert torch.allclose(compiled(x), model(x), atol=1e-6)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def interpolate(text):
    """As Compose does: ${NAME:-default}, ${NAME:?message}, $$."""
    filled = re.sub(
        r"\$\{(\w+):([-?])([^}]*)\}", lambda m: SECRETS.get(m[1], m[3] if m[2] == "-" else "UNSET"), text
    )
    return filled.replace("$$", "$")


class Apart:
    """The compose file's services as processes on loopback."""

    def __init__(self, home):
        self.home = home
        self.processes = {}
        self.family = {}
        self.redis_port, self.ray_port, self.port = free_port(), free_port(), free_port()
        self.signer_port, self.dispatcher_port = free_port(), free_port()
        self.temp_dir = Path(tempfile.mkdtemp(prefix="trl-", dir="/tmp"))
        self.compose = yaml.safe_load(interpolate((ROOT / "docker-compose.yml").read_text()))["services"]

    def local(self, text):
        return (
            text.replace("ray-head:6379", f"127.0.0.1:{self.ray_port}")
            .replace("redis:6379", f"127.0.0.1:{self.redis_port}")
            .replace("--port=6379", f"--port={self.ray_port}")
            .replace("0.0.0.0", "127.0.0.1")
            .replace("signer:8643", f"127.0.0.1:{self.signer_port}")
            .replace("8642", str(self.port))
            .replace("8643", str(self.signer_port))
            .replace("8644", str(self.dispatcher_port))
            .replace("file:///blobs", (self.home / "blobs").as_uri())
            .replace("--dir /data", f"--dir {self.home}")
            .replace(" /redis-users.acl", f" {ROOT / 'deploy' / 'redis-users.acl'}")
        )

    def start(self, name, entrypoint, *more):
        service = self.compose[name]
        command = [self.local(word) for word in [*service.get("entrypoint", entrypoint), *service["command"]]]
        command = [sys.executable if word == "python" else word for word in command]
        environment = {key: self.local(value or "") for key, value in service["environment"].items()}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHRELAY_", "RAY_"))}
        own = {
            "PATH": os.pathsep.join([str(self.redis_folder()), os.environ["PATH"]]),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
        }
        with (self.home / f"{name}.log").open("wb") as log:
            self.processes[name] = psutil.Popen(
                [*command, *more],
                env=kept | environment | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def serve_redis_on_loopback(self):
        here = f"redis-server - --port {self.redis_port} --bind 127.0.0.1"
        command = self.compose["redis"]["command"]
        command[-1] = command[-1].replace("redis-server -", here, 1)

    def redis_folder(self):
        """A folder where redis-server has its usual name."""
        from torchrelay.service.local.redis_server import find_server

        folder = Path(tempfile.mkdtemp(dir=self.temp_dir))
        (folder / "redis-server").symlink_to(find_server())
        return folder

    def look(self):
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for member in [process, *process.children(recursive=True)]:
                    self.family.setdefault(member.pid, member)

    def raylet_sockets(self):
        """Each Ray node's; two that pick their names in one folder at the same time pick the same name."""
        self.look()
        lines = [word for process in self.family.values() for word in _command_line(process)]
        return [Path(word.partition("=")[2]) for word in lines if word.startswith("--raylet_socket_name=")]

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.home.glob("*.log"))

    def wait(self, condition, what, seconds=90):
        def happened():
            self.look()
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not dead, f"{dead} ended\n{self.logs()}"
            return condition()

        waiting.wait_until(happened, seconds, pause=0.2, told=lambda: f"{what}\n{self.logs()}")

    def get(self, path, port=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self.port}{path}",
            headers={"Authorization": f"Bearer {SECRETS['TORCHRELAY_OWNER_TOKEN']}"},
        )
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=5
            ) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def start_service(self):
        """All but redis, Ray's head and the workers."""
        service = ["python", "-m", "torchrelay.service"]
        self.compose["signer"]["environment"]["TORCHRELAY_SERVICE_KEYS_DIR"] = str(self.home / "keys")
        self.start("signer", service)
        self.wait(lambda: listens(self.signer_port), "a signer")
        self.start("gateway", service)
        self.start("dispatcher", service)
        self.wait(lambda: self.get("/livez")[0] == 200, "a live gateway")
        return service

    def stop(self, name, seconds=40):
        self.look()
        process = self.processes.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        try:
            return process.wait(seconds)
        except psutil.TimeoutExpired:
            process.kill()
            raise

    def close(self):
        self.look()
        for name in reversed(list(self.processes)):
            self.stop(name)
        _, left = psutil.wait_procs(list(self.family.values()), timeout=90)
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE], left


def follow_a_worker(apart):
    """The parts find each other, a graph compiles, and the gateway follows a worker that leaves."""
    apart.serve_redis_on_loopback()
    apart.start("redis", [])
    apart.start("ray-head", [], f"--temp-dir={apart.temp_dir}")
    apart.wait(lambda: listens(apart.ray_port) and listens(apart.redis_port), "redis and Ray listening")

    service = apart.start_service()
    assert apart.get("/readyz")[0] == 503

    apart.start("worker-cpu", service)
    apart.wait(lambda: apart.get("/readyz")[0] == 200, "a warm worker")
    sockets = apart.raylet_sockets()
    assert len(sockets) == 3 == len({path.parent for path in sockets}), sockets
    client = compiled_by_a_client(apart, SCRIPT)
    assert client.returncode == 0, client.stderr + apart.logs()
    assert json.loads(apart.get("/v1/stats")[1])["compiles"] == 1
    lose_a_dispatcher(apart, service)

    apart.stop("worker-cpu")
    apart.wait(lambda: apart.get("/readyz")[0] == 503, "the gateway noticing that its worker left", 60)
    assert (status := apart.stop("gateway")) == 0, f"exit status {status}\n{apart.logs()}"


def compiled_by_a_client(apart, script):
    return subprocess.run(
        [sys.executable, "-c", script],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("TORCHRELAY_")},
            "XDG_CONFIG_HOME": str(apart.home / "config"),
            "XDG_CACHE_HOME": str(apart.home / "cache"),
            "TORCHRELAY_MODE": "require",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


def lose_a_dispatcher(apart, service):
    """A second dispatcher on the Ray cluster stands by, as there is one slot, and gets it when the first is killed."""
    port = free_port()
    second = copy.deepcopy(apart.compose["dispatcher"])
    second["command"] = [word.replace("8644", str(port)) for word in second["command"]]
    apart.compose["dispatcher-2"] = second
    apart.start("dispatcher-2", service)
    apart.wait(lambda: apart.get("/readyz", port)[0] == 200, "a second dispatcher")
    assert [worker["state"] for worker in json.loads(apart.get("/v1/workers")[1])] == ["idle"]
    first = apart.processes.pop("dispatcher")
    for process in [first, *first.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    again = compiled_by_a_client(apart, SCRIPT.replace("Linear(8, 4)", "Linear(8, 3)"))
    assert again.returncode == 0, again.stderr + apart.logs()
    assert json.loads(apart.get("/v1/stats")[1])["compiles"] == 2


def _command_line(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def loopback_up():
    flags = 0x1 | 0x40  # IFF_UP | IFF_RUNNING
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", flags))  # SIOCSIFFLAGS


def namespace():
    """The command that runs another one with loopback only; empty where the kernel does not allow it."""
    command = ["unshare", "--user", "--map-root-user", "--net"]
    allowed = (
        shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    )
    return command if allowed else []


def run_alone(script, home, *more, seconds=580):
    """Runs a module's `main` in a network of its own, where that can be had."""
    inside = namespace()
    ran = subprocess.run(
        [*inside, sys.executable, script, str(home), "alone" if inside else "shared", *more],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_parts_of_the_compose_file_compile_together_and_follow_a_worker_that_leaves(tmp_path):
    run_alone(__file__, tmp_path)


def main(home, network, kind=Apart):
    if network == "alone":
        loopback_up()
    parts = kind(home)
    try:
        follow_a_worker(parts)
    finally:
        parts.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
