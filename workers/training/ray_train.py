"""Makes the Ray Train trainer whose workers run a job's ranks.

Ray Train places the workers, monitors them, and starts them again after a failure, or in another number if the job is
elastic. The backend here sets up no process group: the script does that, as under torchrun.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from ...compiler.api.training.jobs import TrainSpec
from .. import ray_internals
from ..scheduling.ray_resources import NAMESPACE
from .messages import JobReference, Rendezvous
from .ranks import worker as ranks_worker
from .ranks.relay import host_relay
from .ranks.reports import report_seconds
from .room import rank_resources

SETTINGS = {
    # how soon a lost rank is noticed, in seconds; Ray's own is 2
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # seconds; a job that does not get its nodes reports it then, and goes on waiting
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    # one process less for each job: nodes here are not drained by anybody
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
"""Ray Train's own, set in the driver before it is imported."""
_RESIZE_SECONDS = 10.0
"""Between two checks for new nodes, if a job is elastic."""


@dataclass
class RankBackendConfig(BackendConfig):
    """Passes the driver's name to the backend."""

    driver: str = ""

    @property
    def backend_cls(self) -> type[RankBackend]:
        return RankBackend


class RankBackend(Backend):
    """Before each attempt: gets its number from the driver, starts a store in rank 0's worker and a relay on each node
    with several ranks, and sends all of that to the workers."""

    share_cuda_visible_devices = True  # as torchrun's ranks see all of a node, and take LOCAL_RANK

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, RankBackendConfig)
        workers = worker_group.get_workers()
        nodes = Counter(worker.metadata.node_id for worker in workers)
        address = "127.0.0.1" if len(nodes) == 1 else workers[0].metadata.node_ip
        driver: Any = ray.get_actor(backend_config.driver, namespace=NAMESPACE)
        held = [(worker.metadata.node_id, ",".join(map(str, worker.metadata.gpu_ids))) for worker in workers]
        attempt = ray.get(driver.attempt.remote(len(workers), held))
        port = worker_group.execute_single(0, ranks_worker.host_store, address, len(workers))
        seconds = report_seconds(len(nodes))
        first = {worker.metadata.node_id: worker for worker in reversed(workers)}
        hosts = {node: first[node] for node, ranks in nodes.items() if ranks > 1}
        paths = ray.get(
            [
                host.execute_async(host_relay, backend_config.driver, attempt, seconds)
                for host in hosts.values()
            ]
        )
        worker_group.execute(
            ranks_worker.set_rendezvous,
            Rendezvous(attempt, address, port, seconds=seconds),
            dict(zip(hosts, paths, strict=True)),
        )


class DriverCallback(ray_internals.controller_callback()):  # type: ignore[misc]  # a class of Ray's
    """Reports to the driver what Ray Train's controller does."""

    def __init__(self, driver: str) -> None:
        self._driver = driver

    def after_controller_start(self, train_run_context: Any) -> None:
        self._call_driver("controller", ray.get_runtime_context().current_actor, train_run_context.run_id)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        name = type(current_state).__name__
        error = getattr(current_state, "training_failed_error", None)
        cause = getattr(error, "controller_failure", None)
        message = "" if error is None else f"{error}\n{cause.__cause__}" if cause is not None else str(error)
        causes = [cause] if cause is not None else getattr(error, "worker_failures", {}).values()
        names = [type(each).__name__ for each in causes if not isinstance(each, ranks_worker.RankFailed)]
        self._call_driver("turned", name, next(iter(names), ""), message)

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Also called before the first start, when no ranks run."""
        self._call_driver("resize")

    def _call_driver(self, method: str, *arguments: Any) -> None:
        driver = ray.get_actor(self._driver, namespace=NAMESPACE)
        ray.get(getattr(driver, method).remote(*arguments))


def trainer(spec: TrainSpec, job: JobReference, storage: Path, retries: int) -> Any:
    """A trainer, ready to `fit`. retries: how many are left. storage: a folder for Ray Train's own files."""
    elastic = 0 < spec.min_workers < spec.workers
    api: Any = ray.train  # its annotations are of its first version
    return ray_internals.trainer_without_cleaner()(
        lambda: ranks_worker.run_rank(job),
        backend_config=RankBackendConfig(driver=job.driver),
        scaling_config=api.ScalingConfig(
            num_workers=(spec.min_workers, spec.workers) if elastic else spec.workers,
            use_gpu=spec.device == "cuda",
            resources_per_worker=rank_resources(spec),
            **({"elastic_resize_monitor_interval_s": _RESIZE_SECONDS} if elastic else {}),
        ),
        run_config=api.RunConfig(
            name=job.driver,
            storage_path=str(storage),
            failure_config=api.FailureConfig(max_failures=retries),
            callbacks=[DriverCallback(job.driver)],
            logging_config=api.LoggingConfig(log_level="ERROR"),
            worker_runtime_env=runtime_environment(spec),
        ),
    )


def runtime_environment(spec: TrainSpec) -> dict[str, Any]:
    """Ray's runtime environment of a job's workers: its requirements, if it has any."""
    return {"pip": list(spec.requirements)} if spec.requirements else {}


def prepare() -> None:
    """Set what Ray Train reads from this process's environment."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
