"""Ray's own autoscaler, with its provider of simulated nodes: compiles that wait add nodes, and idle nodes go."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import engine
import msgspec
import pytest
from pool_parts import RAY_TOKEN, compile_when_idle
from ray_nodes import Nodes
from torchrelay.workers.pool import PoolSettings, WorkerPool, node_resources
from waiting import until

HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
MOST = 2


class ScaledNodes(Nodes):
    """A head whose autoscaler (version 2, as in the Helm chart) adds nodes of one slot each: one, and MOST at most."""

    def head(self) -> None:
        config = {
            "cluster_name": "scaled",
            "max_workers": MOST,
            "provider": {
                "type": "external",  # not by its own name: Ray's wheels lack a file for that
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "launch_multiple": True,
                "disable_node_updaters": True,
                "head_node_id": HEAD,
                "gcs_address": self.address,
            },
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "compiles": {
                    "resources": {"CPU": 0, **node_resources(1)},
                    "node_config": {},
                    "min_workers": 1,
                    "max_workers": MOST,
                },
            },
            "head_node_type": "ray.head.default",
            "idle_timeout_minutes": 0.05,
            "upscaling_speed": 1.0,
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            **{f"{name}_commands": [] for name in ("initialization", "setup", "head_setup", "worker_setup")},
            **{f"{name}_start_ray_commands": [] for name in ("head", "worker")},
        }
        file = self.folder / "autoscaling.json"
        file.write_text(json.dumps(config))
        self.start(
            *("--head", f"--port={self.port}", "--num-cpus=0", "--include-dashboard=false"),
            f"--autoscaling-config={file}",
        )
        self.wait_for_head()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch):
    path = [str(Path(engine.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    nodes = ScaledNodes(
        RAY_FAKE_CLUSTER="1",
        RAY_enable_autoscaler_v2="1",
        RAY_CLOUD_INSTANCE_ID=HEAD,
        RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD,
        RAY_NODE_TYPE_NAME="ray.head.default",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
    )
    try:
        nodes.head()
        yield nodes.address
    finally:
        nodes.close()


@pytest.mark.slow
def test_compiles_that_wait_add_nodes_up_to_the_most_and_idle_nodes_go(address: str) -> None:
    pool = WorkerPool(
        PoolSettings(
            ray_address=address,
            ray_token=RAY_TOKEN,
            gpu_slots_per_gpu=0,
            engine="engine",
            autoscale_idle_seconds=2.0,
            autoscale_cpu_slots=MOST,
        )
    )

    def compile(**order) -> asyncio.Task[bytes]:
        request = msgspec.json.encode({"do": "answer", **order})
        return asyncio.create_task(
            compile_when_idle(
                pool,
                request,
                key="key",
                toolchain=engine.TOOLCHAIN,
                target=engine.TARGET,
                deadline_seconds=900,
                on_progress=lambda *_: None,
            )
        )

    def states() -> list[str]:
        return sorted(worker.state for worker in pool.workers())

    async def scenario() -> None:
        await pool.start()
        try:
            await until(lambda: states() == ["idle"], 150)
            jobs = [compile(sleep=800.0) for _ in range(MOST + 1)]
            pool.overdue = {"cpu": MOST}
            await until(lambda: states() == ["busy"] * MOST, 150)
            assert not any(job.done() for job in jobs), "the last one waits: there are no more nodes"
            pool.overdue = {}
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await until(lambda: len(pool.node_resources()) == 1, 150)
            await until(lambda: states() == ["idle"], 150)
            assert await compile(text="again") == b"again"
        finally:
            await pool.close()

    asyncio.run(scenario())
