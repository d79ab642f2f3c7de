"""What the service's settings say of the workers reaches the pool, in the one place where pools are made."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.parts.worker_pool import worker_pool
from torchrelay.workers.pool import PoolSettings, WorkerPool

NO_SETTING = {"object_store_bytes", "engine", "early_server"}


def test_every_field_that_has_a_setting_reaches_the_pool(monkeypatch) -> None:
    made: list[PoolSettings] = []
    monkeypatch.setattr(WorkerPool, "__init__", lambda self, settings, claims: made.append(settings))
    settings = ServiceSettings(
        ray_address="head:6379",
        ray_token=SecretStr("t" * 32),
        ray_temp_dir="/r",
        cpu_slots=3,
        gpu_slots=5,
        gpu_slots_per_gpu=2,
        toolchains="/a/bin/python,/b/bin/python",
        worker_memory_limit_bytes=1 << 20,
        body_bytes=1 << 10,
        kernels_dir=Path("/k"),
        kernels_limit_bytes=5,
        equal_layers="off",
        isolation="required",
        autoscale_idle_seconds=60.0,
        autoscale_cpu_slots=8,
        autoscale_gpus=2,
    )
    worker_pool(settings)
    given, default = made[0], PoolSettings()
    assert {
        name for name in PoolSettings.__struct_fields__ if getattr(given, name) == getattr(default, name)
    } == NO_SETTING
    assert (given.isolation, given.temp_dir) == ("required", "/r")
    assert given.toolchains == ("/a/bin/python", "/b/bin/python")
    assert given.ray_token == "t" * 32
    assert given.request_limits == settings.limits
