"""Starts or joins a Ray cluster, lists the nodes that offer slots, and places actors on them.

Ray's calls block, and its servers die with the thread that started them (PR_SET_PDEATHSIG follows threads,
not processes), so one thread makes all of them and runs until `stop`. An embedded cluster listens on
loopback alone and requires a token even there: a process that can talk to Ray can run code.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ...compiler.errors import Unavailable
from .. import ray_internals
from ..process.private_folders import short_directory
from ..process.process_tree import UnkillableProcesses, die_with_parent, kill_below, none_outlives
from ..settings import PoolSettings, SlotSettings
from . import driver_node
from .ray_resources import ACTOR_SHARE, CPU_SLOTS, GPU_SLOTS, NAMESPACE, OFFER, live_nodes, node_resources

T = TypeVar("T")

log = logging.getLogger(__name__)

_FOR_RAY = re.compile(
    r"(PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV)|(PYTHON|RAY_|CUDA_|NVIDIA_)\w*"
)
_END_START_SECONDS = 2.0
"""How long the end of a start may take. Ray waits half a minute for servers that were killed."""
_KILL_AGAIN_SECONDS = 0.05
_JOIN_SECONDS = 10.0
_LEAVE_SECONDS = 30.0
"""How long Ray may take to leave a cluster whose servers have ended. Some of its threads ask them, for a day."""
_SERVICE_SETTINGS = "TORCHRELAY_SERVICE_"
_SENT_DIRECTLY = {
    "RAY_max_direct_call_object_size": str(1 << 28),
    "RAY_task_rpc_inlined_bytes_limit": str(1 << 28),
}
"""Arguments of calls up to 256 MiB go straight to the actor, and not through the object store of this process's node:
where that fills, Ray has a worker write objects to disk, and this node has no workers."""


class RayThread:
    """The thread that calls Ray. Nothing waits for its end, not even the process's: Ray waits a day for a GCS that has
    gone."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Its result, once all that was submitted before has ended."""
        result: Future[T] = Future()

        def call() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except BaseException as error:  # it is raised where the result is awaited
                    result.set_exception(error)

        self._calls.put(call)
        return result

    def end(self) -> None:
        """It ends after all that was submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class RayNode(NamedTuple):
    id: str
    host: str
    cpu_slots: int
    gpus: int
    gpu_slots: int = 0
    """For all its GPUs together; each has at least one."""
    resources: Mapping[str, float] = MappingProxyType({})
    """All of them, in Ray's names."""


def ray_environment(token: str | None, address: str | None) -> dict[str, str]:
    """Environment for Ray, which it reads in this process at import and hands to its servers and workers."""
    return {
        **({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}),
        "RAY_USAGE_STATS_ENABLED": "0",
        # a node that starts on a busy machine needs longer than Ray's 30 s
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # a node has as many of Ray's CPUs as cores, for training jobs; no process is to wait on each of them
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        # past this time without a GCS, Ray ends the process that asks it: a dispatcher is then started again
        "RAY_gcs_rpc_server_reconnect_timeout_s": "60" if address is not None else "86400",
        # a slot's actor takes none of Ray's GPUs, and picks its device from those that its node sees
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # kills whole actors when the machine is short of memory; jobs have limits of their own
        "RAY_memory_monitor_refresh_ms": "0",
        # a cluster of one machine binds its ports to 127.0.0.1 alone; despite its name the setting does no more
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0" if address is None else "1",
    }


def joined_node_environment(current: Mapping[str, str]) -> dict[str, str]:
    """What of this process's environment the node gets that it joins a cluster with: of the service's secrets it needs
    Ray's token alone."""
    return {name: value for name, value in current.items() if _FOR_RAY.fullmatch(name)}


class RayCluster:
    """This process's connection to Ray; one in a process, because Ray's driver is global to it. `id`, once it has
    started: the same for all processes that joined the cluster."""

    id: str

    def __init__(self, settings: PoolSettings, named_actors: Collection[type] = ()) -> None:
        """named_actors: the classes of those that this process calls by their names."""
        self._settings = settings
        self._named_actors = named_actors
        self._mark = f"RAY_AUTH_TOKEN={settings.ray_token}"
        """What the environment of an embedded cluster's processes has."""
        self._nothing_unpickled = contextlib.ExitStack()
        self._thread = RayThread()
        self._own_dir: Path | None = None
        self._gateway_node: subprocess.Popen[bytes] | None = None
        self._head: Any = None
        self._starting: Future[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Start or join. Raises Unavailable."""
        self._starting = self._thread.submit(self._start)
        await asyncio.wrap_future(self._starting)
        _restore_sigterm_handler()

    async def stop(self) -> None:
        """Leave the cluster; an embedded one ends with its processes, at once if it still starts."""
        self._stopping = True
        if self._starting is not None and self._settings.ray_address is None:
            await asyncio.to_thread(self._end_start, self._starting)
            if not self._starting.done():  # it waits for a server that has been killed, and starts no other
                self._thread.end()
                return
        if self.lost():
            await self.leave_lost()
            return
        await self.call(self._stop)
        self._thread.end()

    def _end_start(self, starting: Future[None]) -> None:
        """Kill the servers that `starting` starts and waits for, until it ends. When it only has to join them, it may:
        Ray ends a whole process that loses them then."""
        until = time.monotonic() + _END_START_SECONDS
        while not starting.done() and self._head is None and time.monotonic() < until:
            kill_below(os.getpid(), mark=self._mark)
            wait([starting], _KILL_AGAIN_SECONDS)
        if self._head is not None:
            wait([starting], _JOIN_SECONDS)
        if not starting.done():
            kill_below(os.getpid(), mark=self._mark)

    def lost(self) -> str:
        """Which of the servers that this process has started has ended by itself, or ''."""
        if self._head is not None:
            return " and ".join(ray_internals.dead_servers(self._head))
        if self._gateway_node is not None and self._gateway_node.poll() is not None:
            return "its node on this machine"
        return ""

    async def leave_lost(self) -> None:
        """Stop, once servers have ended. The thread that calls Ray may wait for one of them without end, so
        another one does it."""
        self._thread.end()
        self._thread = RayThread()
        if self._head is not None:
            await self.call(self._kill_embedded)
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self.call(ray_internals.shut_down)
        except TimeoutError:
            log.error(
                "Ray still waits after %g s for a server that has ended; it is left alone", _LEAVE_SECONDS
            )
            ray_internals.leave_alone()
            self._thread.end()
            self._thread = RayThread()
        await self.call(self._end_servers)
        self._thread.end()

    def _kill_embedded(self) -> None:
        with contextlib.suppress(UnkillableProcesses):
            kill_below(os.getpid(), mark=self._mark)

    async def nodes(self) -> list[RayNode]:
        """Live nodes that offer slots. Raises Unavailable."""
        return await self.call(self._nodes)

    async def request(self, bundles: list[dict[str, float]]) -> None:
        """Ask the autoscaler for a cluster in which all these find room together, whatever is used of it. Replaces the
        last request, whoever made it. Raises Unavailable."""
        await self.call(lambda: _request(bundles))

    async def place(self, node: RayNode, settings: SlotSettings) -> Any:
        """Create a slot's actor on `node`; returns its handle while the actor starts. It waits for Ray's GCS."""
        return await self.call(lambda: self._place(node, settings))

    @staticmethod
    def _place(node: RayNode, settings: SlotSettings) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from ..slot.actor import CompileSlot

        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            "max_concurrency": 16,  # so that a cancel reaches an actor whose job runs
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
            "resources": {OFFER: ACTOR_SHARE},
        }
        return ray.remote(CompileSlot).options(**options).remote(settings)

    @staticmethod
    def remove(actor: Any) -> None:
        """Kill an actor; its fork server notices and ends."""
        import ray

        if ray.is_initialized():
            ray.kill(actor, no_restart=True)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function`, which calls Ray, on the one thread for that."""
        return await asyncio.wrap_future(self._thread.submit(function))

    def _start(self) -> None:
        address = self._settings.ray_address
        os.environ.update(ray_environment(self._settings.ray_token, address))
        if address is not None:
            os.environ.update(_SENT_DIRECTLY)
        import ray  # after the environment, which it reads once

        try:
            self._nothing_unpickled.enter_context(ray_internals.nothing_unpickled(self._named_actors))
            if address is None:
                self._start_embedded(ray)
            else:
                self._join(ray, address)
            self.id = ray_internals.cluster_id()
        except (ConnectionError, ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            self._stop()
            if address is None:  # a start that fails leaves the servers that it has started
                self._kill_embedded()
            raise Unavailable(f"Ray did not start: {error}") from error

    def _start_embedded(self, ray: Any) -> None:
        temp_dir = self._settings.temp_dir
        if temp_dir is None:
            self._own_dir = short_directory("torchrelay-")
            temp_dir = str(self._own_dir)
        with _service_settings_hidden():
            self._head = ray_internals.start_head_node(
                lambda: not self._stopping,
                temp_dir=temp_dir,
                resources=node_resources(self._settings.cpu_slots, self._settings.gpu_slots),
                gpus=None if self._settings.gpu_slots_per_gpu else 0,
                object_store_bytes=self._settings.object_store_bytes,
                agent=driver_node.NO_AGENT,
            )
            if self._stopping:
                raise RuntimeError("it was stopped during its start")
            ray.init(
                address=self._head.address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=True
            )

    def _join(self, ray: Any, address: str) -> None:
        """Start a node on this machine, because a Ray driver needs a local one, and join through it."""
        self._own_dir = short_directory("torchrelay-")
        with (self._own_dir / "ray-node.log").open("wb") as log:
            self._gateway_node = subprocess.Popen(
                driver_node.command(address, self._own_dir),
                env=joined_node_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        ray.init(
            address=address,
            namespace=NAMESPACE,
            logging_level="ERROR",
            log_to_driver=True,
            _temp_dir=str(self._own_dir),  # of the node: there may be others here
        )

    def _stop(self) -> None:
        ray_internals.shut_down()
        self._end_servers()

    def _end_servers(self) -> None:
        """Those that this process has started, after it has left the cluster."""
        if self._head is not None:
            # Ray kills a raylet that does not end within a second, and its agents notice that a minute later
            with none_outlives(ray_internals.server_pids(self._head)):
                ray_internals.stop_head_node(self._head)
            self._head = None
        self._nothing_unpickled.close()
        if self._gateway_node is not None:
            self._gateway_node.terminate()
            try:
                self._gateway_node.wait(10)
            except subprocess.TimeoutExpired:
                self._gateway_node.kill()
                self._gateway_node.wait()
            self._gateway_node = None
        if self._own_dir is not None:
            shutil.rmtree(self._own_dir, ignore_errors=True)
            self._own_dir = None

    def _nodes(self) -> list[RayNode]:
        import ray

        try:
            listed = live_nodes()
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise Unavailable(f"Ray does not answer: {error}") from error
        return [_node(entry) for entry in listed if OFFER in entry["Resources"]]


def _request(bundles: list[dict[str, float]]) -> None:
    import ray
    from ray.autoscaler.sdk import request_resources

    try:
        request_resources(bundles=bundles)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        raise Unavailable(f"Ray does not answer: {error}") from error


@contextlib.contextmanager
def _service_settings_hidden() -> Iterator[None]:
    """Ray's servers start with this process's whole environment, and ray.init takes no other. Inside, the service's
    settings are not in it; who reads them has done so before Ray starts."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_SERVICE_SETTINGS)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _restore_sigterm_handler() -> None:
    """Handle SIGTERM as this process did before Ray put its own handler in front: that one aborts a process 3 s after
    the signal, even while it still closes. Only the main thread may set one."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
        if callable(handler):
            signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it


def _node(entry: dict[str, Any]) -> RayNode:
    resources = entry["Resources"]
    return RayNode(
        id=entry["NodeID"],
        host=entry["NodeManagerHostname"],
        cpu_slots=int(resources.get(CPU_SLOTS, 0)),
        gpus=int(resources.get("GPU", 0)),
        gpu_slots=int(resources.get(GPU_SLOTS, 0)),
        resources=resources,
    )
