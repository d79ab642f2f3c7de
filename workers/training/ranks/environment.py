"""What a rank's process is started as: the order and a rank's place in; its command and whole environment out.

The same variables as torchrun sets, so that a script for torchrun runs unchanged. Of the node's own environment only
these names go through: Ray's token and the service's settings are no business of a job.
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
        *(
            "PYTHONPATH",
            "LD_LIBRARY_PATH",
            "LIBRARY_PATH",
            "CPATH",
            "CC",
            "CXX",
            "VIRTUAL_ENV",
            "XDG_CACHE_HOME",
        ),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
        *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TRITON_PTXAS_PATH"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_WAIT_POLICY"),
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME", "HF_HOME"),
    }
)
_PASSED_GROUPS = ("NCCL_", "GLOO_", "UCX_", "FI_", "NVSHMEM_", "TORCH_NCCL_", "TORCH_SYMM_MEM_")
"""How a node's network is to be used is for its owner to say."""


RANK_PROGRAM = "torchrelay.clients.training.rank.main"


class RankAssignment(Struct, frozen=True, kw_only=True):
    """A rank's place in its world. address, port: of the store through which ranks find each other."""

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
    """What of a node's environment its ranks get. They find this package as the node's own Python does."""
    passed = {
        name: value for name, value in current.items() if name in _PASSED or name.startswith(_PASSED_GROUPS)
    }
    return {**passed, "PYTHONUNBUFFERED": "1"}


def job_environment(order: TrainOrder, folder: Path, current: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of a job see alike on a node; `folder`: the job's own."""
    spec = order.spec
    # one variable holds 128 KiB at most, and these are elsewhere
    short = msgspec.structs.replace(spec, arguments=[], requirements=[], environment={})
    return {
        **node_environment(current),
        # of the job's world whatever the node: threads are part of a graph's key
        "OMP_NUM_THREADS": str(max(1, int(spec.cpus))),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": current.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        CHECKPOINTS_ENVIRONMENT: spec.checkpoints or str(folder / "checkpoints"),
        SPEC_ENVIRONMENT: msgspec.json.encode(short).decode(),
        **order.environment,
        **spec.environment,
        JOB_ENVIRONMENT: order.job,
        "ROLE_NAME": "default",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.retries),
        "TORCHELASTIC_RUN_ID": order.job,
    }


def rank_environment(
    order: TrainOrder, place: RankAssignment, folder: Path, current: Mapping[str, str]
) -> dict[str, str]:
    """Everything that the rank at `place` sees; `folder`: the job's own."""
    environment = {
        **job_environment(order, folder, current),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
    }
    if place.port:
        environment |= {
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.port),
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
"""What a rank sees of its own place. Nothing of it is read while PyTorch is imported (CUDA's as it is first used)."""


def rank_command(spec: TrainSpec) -> list[str]:
    """The program of a rank."""
    if spec.kind == "export":
        return [sys.executable, "-m", "torchrelay.clients.exporting.rank_main", *spec.arguments]
    return [sys.executable, "-m", RANK_PROGRAM, *_entry(spec)]


def capture_command(spec: TrainSpec, output: Path) -> list[str]:
    """The program of a capture run, which writes `output`."""
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
