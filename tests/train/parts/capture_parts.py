"""Capture runs, and real ranks to hold them against, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.node_messages import CapturedGraphs
from torchrelay.compiler.api.training.rank_environment import SPEC_ENVIRONMENT
from torchrelay.compiler.request import codec, key

HERE = Path(__file__).parent
SPEC = TrainSpec(name="a", script="a.py", workers=2)


def environment(tmp_path: Path, spec: TrainSpec = SPEC, **more: str) -> dict[str, str]:
    """What rank 0 of two has; no gateway is known."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    mine = {
        "OMP_NUM_THREADS": "1",
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    return kept | world | mine | {SPEC_ENVIRONMENT: msgspec.json.encode(spec).decode()} | more


def captured(
    tmp_path: Path, *target: str, spec: TrainSpec = SPEC, folder: Path = HERE, **more: str
) -> tuple[CapturedGraphs, str]:
    """What a capture run found, and what the script printed."""
    output = tmp_path / "captured"
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.clients.training.graph_capture.main", str(output), *target],
        env=environment(tmp_path, spec, **more),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return decoding.from_msgpack(output.read_bytes(), type=CapturedGraphs), done.stdout


def keys(found: CapturedGraphs) -> list[str]:
    return [key.key_of(codec.unpack_request(body)) for body in found.bodies]


def asked_by_ranks(folder: Path, **more: str) -> dict[str, list[str]]:
    """Keys that two real ranks ask for in three steps, by kind: the same, but where they have different parts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(HERE / "real_ranks.py"), str(folder)],
        env=environment(folder) | {"PYTHONWARNINGS": "ignore"} | more,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    first["tensor"], mine = [*first["tensor"], *second["tensor"]], first["tensor"]
    assert mine != second["tensor"]
    assert {**first, "tensor": []} == {**second, "tensor": []}
    return {kind: list(dict.fromkeys(found)) for kind, found in first.items()}
