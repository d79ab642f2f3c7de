"""The Ray workers that the gateway's settings describe."""

from __future__ import annotations

from ...workers.pool import Claims, EarlyServer, PoolSettings, WorkerPool
from ..base.settings import ServiceSettings


def worker_pool(
    settings: ServiceSettings, claims: Claims | None = None, early_server: EarlyServer | None = None
) -> WorkerPool:
    """claims: what shares the slots of a Ray cluster with other dispatchers. early_server: see PoolSettings."""
    return WorkerPool(
        PoolSettings(
            ray_address=settings.ray_address,
            ray_token=settings.ray_token.get_secret_value() if settings.ray_token else None,
            temp_dir=settings.ray_temp_dir,
            cpu_slots=settings.cpu_slots,
            early_server=early_server,
            gpu_slots=settings.gpu_slots,
            gpu_slots_per_gpu=settings.gpu_slots_per_gpu,
            toolchains=settings.toolchain_pythons,
            memory_limit_bytes=settings.worker_memory_limit_bytes,
            request_limits=settings.limits,
            kernels_dir=settings.kernels_location,
            kernels_bytes=settings.kernels_limit_bytes,
            equal_layers=settings.equal_layers,
            isolation=settings.isolation,
            autoscale_idle_seconds=settings.autoscale_idle_seconds,
            autoscale_cpu_slots=settings.autoscale_cpu_slots,
            autoscale_gpus=settings.autoscale_gpus,
        ),
        claims,
    )
