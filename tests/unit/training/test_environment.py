"""What a rank sees: torchrun's variables, the job's own, and of its node's environment a fixed list of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.node_messages import TrainOrder
from torchrelay.compiler.api.training.rank_environment import SPEC_ENVIRONMENT
from torchrelay.workers.fork_server.environment import own_gpu
from torchrelay.workers.training.ranks.environment import RankAssignment, rank_command, rank_environment
from torchrelay.workers.training.room import after_placing, why_no_room

PLACE = RankAssignment(
    rank=3,
    world_size=4,
    local_rank=1,
    local_world_size=2,
    node_rank=1,
    nodes=2,
    attempt=2,
    address="a",
    port=5,
)
NODE = {
    "PATH": "/bin",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "RAY_AUTH_TOKEN": "secret",
    "TORCHRELAY_SERVICE_REDIS_URL": "redis://secret",
    "OMP_NUM_THREADS": "64",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
}


def order(**spec: Any) -> TrainOrder:
    given = {"name": "n", "script": "s.py", **spec}
    return TrainOrder(
        job="0" * 16,
        namespace="default",
        spec=TrainSpec(**given),
        package=b"",
        environment={"TORCHRELAY_URL": "http://gateway"},
        folder="/jobs",
    )


def test_a_rank_finds_what_torchrun_would_set() -> None:
    seen = rank_environment(order(retries=5), PLACE, Path("/jobs/0"), NODE)
    assert {name: seen[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert (seen["GROUP_RANK"], seen["GROUP_WORLD_SIZE"], seen["ROLE_RANK"]) == ("1", "2", "3")
    assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("a", "5")
    assert (seen["TORCHELASTIC_RESTART_COUNT"], seen["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "5")
    assert seen["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert seen["TORCHELASTIC_RUN_ID"] == "0" * 16
    assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    own = order(environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    assert rank_environment(own, PLACE, Path("/j"), NODE)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_secrets_and_settings_of_the_node_are_not_handed_on() -> None:
    seen = rank_environment(order(), PLACE, Path("/jobs/0"), NODE)
    assert "secret" not in " ".join(seen.values())
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" not in seen
    assert (seen["PATH"], seen["NCCL_SOCKET_IFNAME"]) == ("/bin", "eth0")
    assert (seen["NVSHMEM_DISABLE_NVLS"], seen["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("1", "1")


def test_ranks_import_what_the_nodes_own_python_imports_and_nothing_beside_it() -> None:
    assert "PYTHONPATH" not in rank_environment(order(), PLACE, Path("/jobs/0"), NODE)
    given = NODE | {"PYTHONPATH": "/a:/b"}
    assert rank_environment(order(), PLACE, Path("/jobs/0"), given)["PYTHONPATH"] == "/a:/b"


@pytest.mark.parametrize(("cpus", "threads"), [(0.5, "1"), (1.0, "1"), (6.9, "6")])
def test_threads_are_the_jobs_on_every_node_and_in_the_capture(cpus: float, threads: str) -> None:
    capture = RankAssignment(rank=0, world_size=4, local_rank=0, local_world_size=4, node_rank=0)
    for place in (PLACE, capture):
        assert rank_environment(order(cpus=cpus), place, Path("/j"), NODE)["OMP_NUM_THREADS"] == threads
    own = order(cpus=cpus, environment={"OMP_NUM_THREADS": "3"})
    assert rank_environment(own, PLACE, Path("/j"), NODE)["OMP_NUM_THREADS"] == "3"


def test_a_spec_of_any_size_fits_in_one_variable() -> None:
    large = order(arguments=["x" * 4000] * 1000, environment={f"V{i}": "y" * 4000 for i in range(200)})
    told = rank_environment(large, PLACE, Path("/j"), NODE)[SPEC_ENVIRONMENT]
    assert len(told) < 1 << 17
    assert decoding.from_json(told, type=TrainSpec).script == "s.py"


def test_checkpoints_go_where_the_job_says_or_into_its_folder() -> None:
    place = "TORCHRELAY_TRAIN_CHECKPOINTS"
    assert rank_environment(order(), PLACE, Path("/j/1"), NODE)[place] == "/j/1/checkpoints"
    assert rank_environment(order(checkpoints="s3://b/x"), PLACE, Path("/j/1"), NODE)[place] == "s3://b/x"


def test_the_program_is_a_script_a_function_or_an_export() -> None:
    assert rank_command(order(arguments=["-x"]).spec)[1:] == [
        *("-m", "torchrelay.clients.training.rank.main", "--", "s.py", "-x")
    ]
    function = order(script="", function="m:f", arguments=["-x"]).spec
    assert rank_command(function)[3:] == ["--function", "m:f", "--", "-x"]
    export = order(kind="export", script="", arguments=["-x"]).spec
    assert rank_command(export)[2:] == ["torchrelay.clients.exporting.rank_main", "-x"]


@pytest.mark.parametrize(
    ("visible", "index", "own"),
    [(None, 1, "1"), ("4,6", 1, "6"), ("GPU-a,GPU-b", 0, "GPU-a"), ("4", 3, "3")],
)
def test_a_slots_gpu_is_one_of_those_that_its_node_sees(visible: str | None, index: int, own: str) -> None:
    current = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert own_gpu(current, index) == {"CUDA_VISIBLE_DEVICES": own}


NODE_A = {"torchrelay_worker": 1.0, "CPU": 8.0, "memory": float(32 << 30), "GPU": 2.0}
NODE_B = {"torchrelay_worker": 1.0, "CPU": 4.0, "memory": float(64 << 30)}
GATEWAY = {"CPU": 64.0, "memory": float(512 << 30)}


def of(**spec: object) -> TrainSpec:
    return order(**spec).spec


def test_what_no_nodes_can_ever_hold_is_told_with_what_is_missing() -> None:
    nodes = [NODE_A, NODE_B, GATEWAY]
    assert why_no_room(of(workers=12), nodes) == ""
    assert why_no_room(of(workers=13), nodes).startswith("the nodes together hold 12 ranks of 1 CPU each")
    assert why_no_room(of(workers=13, min_workers=12), nodes) == ""
    assert why_no_room(of(workers=5, cpus=3.0), nodes) != ""
    assert why_no_room(of(workers=3, cpus=3.0), nodes) == ""
    assert why_no_room(of(workers=2, device="cuda"), nodes) == ""
    assert "1 GPU" in why_no_room(of(workers=3, device="cuda"), nodes)
    assert why_no_room(of(device="cuda"), [NODE_B]) == "no node has a GPU"
    assert why_no_room(of(workers=4, memory_bytes=32 << 30), nodes).startswith(
        "the nodes together hold 3 ranks"
    )
    assert why_no_room(of(), [GATEWAY]) == "no node runs jobs"
    assert why_no_room(of(workers=20, cpus=0.1), [{**NODE_B, "CPU": 2.0}]) == ""


def test_what_is_promised_to_jobs_is_not_free_for_the_next() -> None:
    nodes = [NODE_A, NODE_B, GATEWAY]
    promised = [of(workers=9), of(workers=64, min_workers=1, cpus=2.0)]
    left = after_placing(promised, nodes)
    assert sum(node["CPU"] for node in left) == 1.0
    assert why_no_room(of(workers=1), left) == ""
    assert why_no_room(of(workers=2), left) != ""
    assert sum(node.get("GPU", 0.0) for node in after_placing([of(workers=2, device="cuda")], nodes)) == 0.0
    assert NODE_A["CPU"] == 8.0
