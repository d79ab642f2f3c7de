"""All of Ray's private parts that we touch, for Ray 2.60: a head node, its exit handler, a node that runs no code,
answers that are not unpickled, a cluster's id, free resources, placement groups, Ray Train.

Functions take and return plain values, or classes of Ray Train to inherit from. Ray is imported when a function is
called, because it reads its environment at import. Imports nothing of this project.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import subprocess
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

log = logging.getLogger(__name__)

_COORDINATOR = "AutoscalingCoordinator"
_CANCEL_SECONDS = 3.0
_ERROR_LENGTH = 2000
"""Characters of an error's text that another process sent."""
_PORT_SECONDS = 0.02


def start_head_node(
    may_go_on: Callable[[], bool],
    *,
    temp_dir: str,
    resources: Mapping[str, float],
    gpus: int | None,
    object_store_bytes: int,
    agent: Sequence[str],
) -> Any:
    """Start the servers of a cluster of this machine alone. Returns the node; `address` is what ray.init is to join.

    It is what ray.init starts, without the dashboard's server and agent and the autoscaler's monitor: nothing here asks
    them, and they are three of its five Python programs, two of which it waits for. may_go_on: False raises
    RuntimeError before the next server starts, or while it waits for the first one. gpus: None: as many as there are.
    agent: the command that runs in place of the dashboard's agent.
    """
    from ray._private import node as module
    from ray._private.parameter import RayParams
    from ray._private.resource_isolation_config import ResourceIsolationConfig

    wait_for_port = module.wait_for_persisted_port

    def wait_for_port_in_turns(*arguments: Any, timeout_ms: int) -> int:
        """Ray's function keeps all other threads of the process waiting too."""
        until = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return int(wait_for_port(*arguments, timeout_ms=0))
            except RuntimeError:  # there is none yet
                if not may_go_on() or time.monotonic() > until:
                    raise
            time.sleep(_PORT_SECONDS)

    class HeadNode(module.Node):  # type: ignore[misc]
        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

        def start_gcs_server(self) -> None:
            self._check()
            module.wait_for_persisted_port = wait_for_port_in_turns
            try:
                super().start_gcs_server()
            finally:
                module.wait_for_persisted_port = wait_for_port

        def start_log_monitor(self) -> None:
            self._check()
            super().start_log_monitor()

        def start_raylet(self, *arguments: Any, **options: Any) -> None:
            self._check()
            with _raylet_runs({"--dashboard_agent_command": agent}):
                super().start_raylet(*arguments, **options)

        @staticmethod
        def _check() -> None:
            if not may_go_on():
                raise RuntimeError("it was stopped during its start")

    params = RayParams(
        num_gpus=gpus,
        resources=dict(resources),
        object_store_memory=object_store_bytes,
        temp_dir=temp_dir,
        include_dashboard=False,
        no_monitor=True,
        resource_isolation_config=ResourceIsolationConfig(),
    )
    return HeadNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True)


def server_pids(node: Any) -> list[int]:
    """The pids of the servers that it has started: its GCS, its raylet, its log monitor."""
    return [info.process.pid for infos in node.all_processes.values() for info in infos]


def dead_servers(node: Any) -> list[str]:
    """Names of the servers that have ended, without which it is no cluster: its GCS, its raylet."""
    names = [str(name) for name, _ in node.dead_processes()]
    return [name for name in names if name in ("gcs_server", "raylet")]


def shut_down() -> None:
    """Leave the cluster, if this process has joined one."""
    import ray

    ray.shutdown()


def leave_alone() -> None:
    """Do not leave the cluster when this process exits either: `shut_down` waits, and so do destructors of Ray's C++
    objects at exit, or its threads crash on them."""
    import atexit
    import ctypes

    from ray._private import worker

    atexit.unregister(worker.shutdown)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # called with the exit status, first of all that C calls at exit


def stop_head_node(node: Any) -> None:
    """End its servers, after ray.shutdown."""
    node.kill_all_processes(check_alive=False, allow_graceful=True)


def actor_id(handle: Any) -> str:
    return str(handle._actor_id.hex())


def cluster_id() -> str:
    """The id of the cluster that this process has joined, in hexadecimal: the same for all its processes."""
    from ray._private.worker import global_worker

    node: Any = global_worker.node
    return str(node.cluster_id.hex())


def free_resources() -> dict[str, dict[str, float]]:
    """The free resources of each node; Ray has no public function for it."""
    from ray._private import state

    ray_state: Any = state
    return dict(ray_state.available_resources_per_node())


# --- a driver's node that runs no code --------------------------------------------------------------------
# A driver needs a raylet on its machine, and whoever is in the cluster can place actors there, even without resources.
# A raylet runs what these flags name, and nothing else.
_COMMANDS = {
    "--python_worker_command": "worker",
    "--java_worker_command": "worker",
    "--cpp_worker_command": "worker",
    "--dashboard_agent_command": "agent",
    "--runtime_env_agent_command": "agent",
}


def own_address(cluster: str) -> str:
    """The address of this machine that the cluster at `cluster` (host:port) can reach."""
    from ray._private.services import get_node_ip_address

    return str(get_node_ip_address(cluster))


def start_node_without_code(
    cluster: str, own: str, folder: str, commands: Mapping[str, Sequence[str]], port: int
) -> Callable[[], bool]:
    """Start a node that runs `commands` ("worker" and "agent") in place of Ray's; returns whether it still runs. It
    ends with this process.

    cluster: host:port; own: this machine's address; port: what answers requests for runtime environments there.
    Raises RuntimeError where Ray would start another program.
    """
    from ray._private import node, parameter

    with _raylet_runs({flag: commands[kind] for flag, kind in _COMMANDS.items()}):
        started = node.Node(
            parameter.RayParams(
                gcs_address=cluster,
                node_ip_address=own,
                num_cpus=0,
                num_gpus=0,
                memory=0,
                min_worker_port=10002,  # as `ray start` has it: the driver listens on one of these
                max_worker_port=19999,
                include_log_monitor=False,
                runtime_env_agent_port=port,
                temp_dir=folder,
            ),
            head=False,
            shutdown_at_exit=True,
            spawn_reaper=True,
            connect_only=False,
        )
    return lambda: bool(started.remaining_processes_alive())


@contextlib.contextmanager
def _raylet_runs(programs: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Inside, a raylet and nothing else is started, with these commands in place of Ray's, by flag: the dashboard's
    agent is one of them. Raises RuntimeError where Ray would start another program."""
    from ray._private import services
    from ray._raylet import persist_port  # type: ignore[attr-defined]

    start_process = services.start_ray_process

    def start_raylet(command: list[str], process_type: str, **options: Any) -> Any:
        flags = dict(part.partition("=")[::2] for part in command)
        if process_type != "raylet" or {flag for flag in flags if flag.endswith("_command")} != {*_COMMANDS}:
            raise RuntimeError(f"this Ray starts programs that are not known here: {process_type}")
        # what the agent would write; -1: there is none
        for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            persist_port(flags["--session_dir"], flags["--node_id"], name, -1)
        kept = [part for part in command if part.partition("=")[0] not in programs]
        ours = [f"{flag}={subprocess.list2cmdline(program)}" for flag, program in programs.items()]
        return start_process([*kept, *ours], process_type, **options)

    services.start_ray_process = start_raylet
    try:
        yield
    finally:
        services.start_ray_process = start_process


# --- what a driver is sent ---------------------------------------------------------------------------------
# Other processes of the cluster answer with pickles if they like, export classes as pickles, and name a function for
# drivers to call at their start.


@contextlib.contextmanager
def nothing_unpickled(actors: Collection[type]) -> Iterator[None]:
    """Inside, this process, a driver, gets bytes, text, numbers, and lists and dicts of these from Ray; whatever else
    is sent raises RayError. An error's text arrives, its class does not. `actors`: the classes whose named actors it
    calls."""
    import ray
    from ray._private import function_manager, serialization, worker
    from ray.exceptions import RayActorError, RayError

    classes: dict[tuple[str, str], type] = {
        (cls.__module__, cls.__qualname__): ray.actor._modify_class(cls) for cls in actors
    }
    actor_died = serialization.SerializationContext._deserialize_actor_died_error

    def load_actor_class(_: Any, __: Any, descriptor: Any) -> type:
        name = (descriptor.module_name, descriptor.class_name)
        if name not in classes:
            raise ValueError(f"the actor is a {'.'.join(name)}, which this process does not call")
        return classes[name]

    def error_of_task(sent: Any) -> RayError:
        lines = sent.formatted_exception_string.strip().splitlines()
        return RayError(lines[-1][:_ERROR_LENGTH] if lines else "an error without a text")

    def error_of_actor(*arguments: Any) -> RayActorError:
        found = actor_died(*arguments)
        return found if isinstance(found, RayActorError) else RayActorError(error_msg=str(found))

    loads: dict[str, Any] = {"load": _load, "loads": _loads}
    changed: list[tuple[Any, dict[str, Any]]] = [
        *((module, loads) for module in (ray.cloudpickle, ray.cloudpickle.cloudpickle)),
        (ray._raylet, {"pickle": types.SimpleNamespace(dumps=pickle.dumps, **loads)}),
        (RayError, {"from_ray_exception": staticmethod(error_of_task)}),
        (serialization.SerializationContext, {"_deserialize_actor_died_error": error_of_actor}),
        (function_manager.FunctionActorManager, {"load_actor_class": load_actor_class}),
        (worker, {"_import_from_string": lambda _: lambda: None}),
    ]
    with contextlib.ExitStack() as before:
        for owner, values in changed:
            for name, value in values.items():
                before.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, value)
        yield


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text, bytes, and containers of these: a pickle names everything else."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a {module_name}.{global_name} was sent, which is not unpickled here")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("a reference was sent, which is not followed here")


def _load(file: Any, **options: Any) -> Any:
    return _PlainUnpickler(file, **options).load()


def _loads(data: bytes, **options: Any) -> Any:
    return _load(io.BytesIO(data), **options)


# --- placement groups that a dead Ray Train controller left ---------------------------------------------
# Ray removes a group when both its creator and the creator's Ray job have gone, and the job here is the gateway's. Ray
# Train's own cleaner asks Ray's dashboard, of which there is none. Ray's table names a group's creator, its public
# functions do not.


def remove_placement_groups_of(actor_id: str) -> int:
    """Remove the groups that the actor made; how many there were. `actor_id`: in hexadecimal."""
    return _remove_placement_groups(lambda group: group.creator_actor_id.hex() == actor_id)


def remove_placement_groups_of_the_dead(namespace: str) -> int:
    """Remove the groups whose creators, actors of this Ray namespace, have died; how many there were."""
    return _remove_placement_groups(
        lambda group: group.creator_actor_dead and not group.is_detached and group.ray_namespace == namespace
    )


def _remove_placement_groups(which: Callable[[Any], bool]) -> int:
    from ray import PlacementGroupID
    from ray._private.state import state
    from ray.core.generated import gcs_pb2
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    messages: Any = gcs_pb2  # protobuf makes its classes when it is imported
    table_data, removed = messages.PlacementGroupTableData, 0
    for data in state._connect_and_get_accessor().get_placement_group_table():
        group = table_data.FromString(data)
        if group.state != table_data.REMOVED and which(group):
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))
            removed += 1
    return removed


# --- Ray Train ------------------------------------------------------------------------------------------


def controller_callback() -> type[Any]:
    """The base class of callbacks of Ray Train's controller."""
    from ray.train.v2._internal.execution.callback import ControllerCallback

    return ControllerCallback


def trainer_without_cleaner() -> type[Any]:
    """DataParallelTrainer without its detached cleaner, which asks a dashboard that does not run here: Ray removes a
    placement group when its controller dies."""
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class RankTrainer(DataParallelTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [each for each in callbacks if type(each).__name__ != "PlacementGroupCleanerCallback"]

    return RankTrainer


def start_autoscaling_coordinator(resources: Mapping[str, float]) -> None:
    """Make the actor that reports free resources to elastic jobs, on any node with `resources`, if there is none yet.

    Otherwise the first job's controller makes it, bound to its own node: once that node is lost, no elastic job starts
    again. The first to make it decides where it may run.
    """
    import ray
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator

    make = ray.remote(coordinator._AutoscalingCoordinatorActor).options(
        name=_COORDINATOR,
        namespace=_COORDINATOR,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        resources=dict(resources),
    )
    try:
        make.remote()
    except ray.exceptions.RayError as error:
        log.warning("Ray Train's coordinator was not made: %s", error)


def cancel_resource_request(run: str) -> None:
    """Cancel the resource request of a controller that was killed; else elastic jobs count it for three minutes more.
    run: the id of its run."""
    import ray

    try:
        coordinator = ray.get_actor(_COORDINATOR, namespace=_COORDINATOR)
        ray.get(coordinator.cancel_request.remote(f"train-{run}"), timeout=_CANCEL_SECONDS)
    except (ray.exceptions.RayError, ValueError) as error:
        log.warning("the resources that a lost controller requested stay reserved for a while: %s", error)
