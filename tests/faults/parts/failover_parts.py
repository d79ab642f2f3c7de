"""A Redis that fails over: a primary, its replica, and three sentinels; all are processes with passwords."""

from __future__ import annotations

import contextlib
import subprocess

import httpx2
import redis
from service_parts import RedisServer, compiled, free_port, post, redis_binary, wait_until

PASSWORD, SENTINEL_PASSWORD = "of-the-test", "of-its-sentinels"
SERVICE = "the-test"


def answered(http: httpx2.Client, body: bytes, statuses: set[int]) -> bytes:
    """The artifact, asked for as a client does: again after each 503. Adds what was answered to `statuses`."""
    found: list[httpx2.Response] = []

    def asked() -> bool:
        found[:] = [post(http, body)]
        statuses.add(found[0].status_code)
        return found[0].status_code != 503

    wait_until(asked, seconds=60)
    return found[0].content if found[0].status_code == 200 else compiled(http, body)


class ListeningServer(RedisServer):
    """A redis-server on a loopback port."""

    def __init__(self, port: int, **options: str) -> None:
        super().__init__(
            user=("default", PASSWORD),
            port=str(port),
            bind="127.0.0.1",
            requirepass=PASSWORD,
            masterauth=PASSWORD,
            **options,
        )
        self.port = port


class FailoverRedis:
    """`url` leads to whichever server is the primary."""

    def __init__(self, down_after_ms: int = 500) -> None:
        """down_after_ms: the sentinels give a server so long."""
        self._down_after_ms = down_after_ms
        self.servers = [ListeningServer(free_port()) for _ in range(2)]
        self._ports = [free_port() for _ in range(3)]
        self._sentinels: list[subprocess.Popen[bytes]] = []
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self.url = f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}/0?sentinel_password={SENTINEL_PASSWORD}"

    def start(self) -> None:
        primary, replica = self.servers
        primary.start()
        replica.start()
        with replica.client() as client:
            client.replicaof("127.0.0.1", str(primary.port))
        for port in self._ports:
            file = primary.folder / f"sentinel-{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {primary.folder}\nrequirepass {SENTINEL_PASSWORD}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 2\n"
                f"sentinel auth-pass {SERVICE} {PASSWORD}\n"
                f"sentinel down-after-milliseconds {SERVICE} {self._down_after_ms}\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
            line = [redis_binary(), str(file), "--sentinel"]
            self._sentinels.append(subprocess.Popen(line, stdout=subprocess.DEVNULL))
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Until a failover would work: the replica is in step, and the sentinels know all."""
        wait_until(lambda: self._is_followed() and all(map(self._is_ready, self._ports)), seconds=60)

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
        server.stop()
        return server

    def close(self) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.close()

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
            with server.client() as client:
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
