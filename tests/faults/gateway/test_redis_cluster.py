"""A Redis Cluster: all keys of an installation lie in one shard, and it is followed when it fails over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from cluster_parts import PREFIX, RedisCluster
from failover_parts import answered
from service_parts import ArtifactPool, StartGateway, compiled, graph
from whole_gateway import everything


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with contextlib.closing(RedisCluster()) as made:
        made.start()
        yield made


def test_a_gateway_does_all_it_does_and_follows_the_shard_to_its_replica(
    cluster: RedisCluster, start_gateway: StartGateway
) -> None:
    pool = ArtifactPool(seconds=0.5)
    gateway = start_gateway(
        pool, redis_url=cluster.url, redis_prefix=PREFIX, redis_timeout_seconds=1.0, body_timeout_seconds=1
    )
    everything(gateway)
    for node in cluster.nodes[:3]:
        with node.client() as client:
            assert (client.dbsize() > 0) == (node is cluster.owner)
    with gateway.http() as http:
        data = compiled(http, graph(1))
        cluster.owner.stop()
        statuses: set[int] = set()
        assert answered(http, graph(1), statuses) == data
        assert answered(http, graph(30), statuses)
        assert statuses <= {200, 202, 503}
    with cluster.nodes[3].client() as client:
        assert client.dbsize() > 0 and client.info()["role"] == "master"
