"""A Redis that fails over: a primary, its replica, and three sentinels, on loopback, all with passwords."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import redis
from support.local_redis import ListeningServer, free_port, redis_binary

PASSWORD, SENTINEL_PASSWORD = "of-redis", "of-its-sentinels"
SERVICE = "local"
_READY_SECONDS = 60.0


class Failover(NamedTuple):
    """A primary that was killed. Seconds of time.monotonic(): until `killed` all was well; from `ready` on it is again:
    the sentinels agree, and the other server is the primary, with this one as its replica."""

    killed: float
    ready: float


class FailoverRedis:
    """`url` leads to whichever server is the primary."""

    def __init__(self, folder: Path, down_after_ms: int = 500) -> None:
        """down_after_ms: the sentinels give a server so long."""
        self._folder = folder
        self._down_after_ms = down_after_ms
        self.servers = [ListeningServer(folder / name, password=PASSWORD) for name in ("first", "second")]
        self._ports = [free_port() for _ in range(3)]
        self._sentinels: list[subprocess.Popen[bytes]] = []
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self.url = f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}/0?sentinel_password={SENTINEL_PASSWORD}"

    def start(self) -> None:
        """Raises RedisDidNotStart."""
        primary, replica = self.servers
        for server in self.servers:
            server.folder.mkdir()
        primary.start()
        replica.start(replica_of=primary.port)
        binary = redis_binary()
        assert binary is not None
        for port in self._ports:
            file = self._folder / f"sentinel-{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {self._folder}\nrequirepass {SENTINEL_PASSWORD}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 2\n"
                f"sentinel auth-pass {SERVICE} {PASSWORD}\n"
                f"sentinel down-after-milliseconds {SERVICE} {self._down_after_ms}\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
            line = [binary, str(file), "--sentinel"]
            self._sentinels.append(subprocess.Popen(line, stdout=subprocess.DEVNULL))
        self.wait_until_ready()

    def client(self) -> redis.Redis:
        """Of the primary as it is now."""
        primary = self.primary()
        assert primary is not None, "the sentinels do not agree which server is the primary"
        return redis_of(primary)

    def wait_until_ready(self) -> None:
        """Until a failover would work: the replica is in step, and the sentinels know all."""
        _wait_until(lambda: self._is_followed() and all(map(self._is_ready, self._ports)))

    def primary(self) -> ListeningServer | None:
        """None: the sentinels do not agree (yet)."""
        named = {self._primary(sentinel)[1] for sentinel in self._ports}
        return next((each for each in self.servers if named == {each.port}), None)

    def failovers(self) -> int:
        """How many there have been, also those that nobody wanted: a primary that was too slow for `down_after_ms`."""
        found = 0
        for port in self._ports:
            with contextlib.suppress(redis.RedisError), self._asked(port) as sentinel:
                found = max(found, int(sentinel.sentinel_master(SERVICE)["config-epoch"]))
        return found

    def kill_primary(self) -> ListeningServer:
        """The server that it was."""
        server = self.primary()
        assert server is not None
        server.kill()
        return server

    def fail_over(self) -> Failover:
        """Kills the primary as soon as its replica can take over. It starts again as the replica of that."""
        self.wait_until_ready()
        killed = time.monotonic()
        victim = self.kill_primary()
        (other,) = (server for server in self.servers if server is not victim)
        _wait_until(lambda: self.primary() is other)
        victim.start(replica_of=other.port)
        self.wait_until_ready()
        return Failover(killed, time.monotonic())

    def close(self) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.kill()

    def _asked(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, password=SENTINEL_PASSWORD)

    def _primary(self, port: int) -> tuple[str, int]:
        with self._asked(port) as sentinel:
            host, primary = sentinel.sentinel_get_master_addr_by_name(SERVICE)
            return str(host), int(primary)

    def _is_followed(self) -> bool:
        """By the servers' own word: sentinels ask a replica every 10 s, and one that was started again is empty."""
        primary = self.primary()
        for server in self.servers:
            with redis_of(server) as client:
                state = client.info("replication")
            if server is not primary and (state.get("master_port"), state.get("master_link_status")) != (
                primary and primary.port,
                "up",
            ):
                return False
        return primary is not None

    def _is_ready(self, port: int) -> bool:
        with contextlib.suppress(redis.RedisError), self._asked(port) as sentinel:
            state = sentinel.sentinel_master(SERVICE)
            replicas = sentinel.sentinel_slaves(SERVICE)
            return (
                state["num-other-sentinels"] == 2
                and not state["is_sdown"]
                and [each["master-link-status"] for each in replicas if not each["is_sdown"]] == ["ok"]
            )
        return False


def redis_of(server: ListeningServer) -> redis.Redis:
    return redis.Redis(port=server.port, password=PASSWORD)


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _READY_SECONDS
    while not condition():
        assert time.monotonic() < until, "waited in vain for the sentinels"
        time.sleep(0.05)
