"""The command and the environment of a rank's process, from the job's order and the rank's assignment.

The variables are those of torchrun, so that a script for torchrun runs unchanged. Of the node's own environment only
listed names pass: a job has no use for Ray's token and the service's settings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from ....compiler.api.training.jobs import TrainSpec
from ....compiler.api.training.node_messages import TrainOrder
from ....compiler.api.training.rank_environment import (
    ANSWER_ENVIRONMENT,
    CHECKPOINTS_ENVIRONMENT,
    JOB_ENVIRONMENT,
    SPEC_ENVIRONMENT,
)

_PASSED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),
        *("PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "VIRTUAL_ENV"),
        "XDG_CACHE_HOME",
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
        *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TRITON_PTXAS_PATH"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_WAIT_POLICY"),
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME", "HF_HOME"),
    }
)
_PASSED_GROUPS = ("NCCL_", "GLOO_", "UCX_", "FI_", "NVSHMEM_", "TORCH_NCCL_", "TORCH_SYMM_MEM_")
"""The node's owner decides how its network is used."""
RANK_PROGRAM = "torchrelay.clients.training.rank.main"


class RankAssignment(Struct, frozen=True, kw_only=True):
    """A rank's assignment in its world. address, port: of the store through which ranks find each other."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int = 1
    attempt: int = 0
    address: str = ""
    port: int = 0


def node_environment(current: Mapping[str, str]) -> dict[str, str]:
    """The part of a node's environment that its ranks get. They find this package as the node's own Python does."""
    passed = {
        name: value for name, value in current.items() if name in _PASSED or name.startswith(_PASSED_GROUPS)
    }
    return {**passed, "PYTHONUNBUFFERED": "1"}


def job_environment(train_order: TrainOrder, folder: Path, current: Mapping[str, str]) -> dict[str, str]:
    """The environment that all ranks of a job on a node share; `folder`: the job's own."""
    spec = train_order.spec
    # a variable holds 128 KiB at most, and these fields are passed otherwise
    short = msgspec.structs.replace(spec, arguments=[], requirements=[], environment={})
    return {
        **node_environment(current),
        # the same on all nodes: the number of threads is part of a graph's key
        "OMP_NUM_THREADS": str(max(1, int(spec.cpus))),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": current.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        CHECKPOINTS_ENVIRONMENT: spec.checkpoints or str(folder / "checkpoints"),
        SPEC_ENVIRONMENT: msgspec.json.encode(short).decode(),
        **train_order.environment,
        **spec.environment,
        JOB_ENVIRONMENT: train_order.job,
        "ROLE_NAME": "default",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.retries),
        "TORCHELASTIC_RUN_ID": train_order.job,
    }


def rank_environment(
    train_order: TrainOrder, assignment: RankAssignment, folder: Path, current: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of the rank at `assignment`; `folder`: the job's own."""
    environment = {
        **job_environment(train_order, folder, current),
        "RANK": str(assignment.rank),
        "WORLD_SIZE": str(assignment.world_size),
        "LOCAL_RANK": str(assignment.local_rank),
        "LOCAL_WORLD_SIZE": str(assignment.local_world_size),
        "GROUP_RANK": str(assignment.node_rank),
        "GROUP_WORLD_SIZE": str(assignment.nodes),
        "ROLE_RANK": str(assignment.rank),
        "ROLE_WORLD_SIZE": str(assignment.world_size),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.attempt),
    }
    if assignment.port:
        environment |= {
            "MASTER_ADDR": assignment.address,
            "MASTER_PORT": str(assignment.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    return environment


PLACE_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
        *("CUDA_VISIBLE_DEVICES", ANSWER_ENVIRONMENT),
    }
)
"""The variables that differ between ranks. PyTorch reads none of them at import (CUDA's at its first use)."""


def rank_command(spec: TrainSpec) -> list[str]:
    if spec.kind == "export":
        return [sys.executable, "-m", "torchrelay.clients.exporting.rank_main", *spec.arguments]
    return [sys.executable, "-m", RANK_PROGRAM, *_entry(spec)]


def capture_command(spec: TrainSpec, output: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torchrelay.clients.training.graph_capture.main",
        str(output),
        *_entry(spec),
    ]


def _entry(spec: TrainSpec) -> list[str]:
    if spec.function:
        return ["--function", spec.function, "--", *spec.arguments]
    return ["--", spec.script, *spec.arguments]
