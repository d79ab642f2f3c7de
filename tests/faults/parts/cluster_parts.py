"""A real Redis Cluster: three primaries, and a replica for the one that has an installation's keys."""

from __future__ import annotations

import random
import socket

import redis
from redis.crc import key_slot
from service_parts import RedisServer
from waiting import wait_until

PREFIX = "{torchrelay}:"
PASSWORD = "of-the-cluster"
_SLOTS = 16384
_BUS = 10_000
"""A node's second port is this much higher."""


class RedisCluster:
    def __init__(self) -> None:
        self.nodes = [
            RedisServer(
                user=("default", PASSWORD),
                port=str(port),
                bind="127.0.0.1",
                cluster_enabled="yes",
                cluster_node_timeout="1000",
                requirepass=PASSWORD,
                masterauth=PASSWORD,
            )
            for port in _free_ports(4)
        ]
        self.ports = [int(node.options["port"]) for node in self.nodes]
        self.owner = self.nodes[key_slot(PREFIX.encode()) * 3 // _SLOTS]
        seeds = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.url = f"redis+cluster://:{PASSWORD}@{seeds}"

    def start(self) -> None:
        for number, node in enumerate(self.nodes):
            node.start()
            with node.client() as client:
                if number < 3:
                    first, end = -(-number * _SLOTS // 3), -(-(number + 1) * _SLOTS // 3)
                    client.execute_command("CLUSTER ADDSLOTS", *range(first, end))
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.ports[0])
        with self.owner.client() as client, self.nodes[3].client() as replica:
            owner = client.execute_command("CLUSTER MYID")
            wait_until(lambda: _knows(replica, owner), seconds=30)
            replica.execute_command("CLUSTER REPLICATE", owner)
        for node in self.nodes:
            with node.client() as client:
                wait_until(lambda client=client: _is_whole(client), seconds=30)  # type: ignore[misc]

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def _knows(client: redis.Redis, node: bytes) -> bool:
    return node.decode() in str(client.execute_command("CLUSTER NODES"))


def _is_whole(client: redis.Redis) -> bool:
    ranges = client.execute_command("CLUSTER SLOTS")
    info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and sum(len(nodes) for _, _, *nodes in ranges) == 4


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + _BUS))
            except OSError:
                continue
        found.append(port)
    return found
