"""The capture run on a GPU: what one process finds with one GPU is what two nccl ranks ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from torchrelay.compiler import key, wire
from torchrelay.compiler.train_records import SPEC_ENVIRONMENT, Captured, TrainSpec

torch = pytest.importorskip("torch")
HERE = Path(__file__).parents[1] / "train"
KINDS = ("ddp", "ddp-split", "ddp-autocast-checkpoint", "fsdp", "fsdp-blocks-autocast-checkpoint")

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.slow,
]


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    spec = msgspec.json.encode(TrainSpec(name="a", script="a.py", workers=2, device="cuda")).decode()
    mine = {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    return kept | mine | {SPEC_ENVIRONMENT: spec, "KEYS_ON": "cuda", "PYTHONWARNINGS": "ignore"} | more


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Keys that two nccl ranks ask for in three steps, by kind."""
    folder = tmp_path_factory.mktemp("ranks")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(HERE / "real_ranks.py"), str(folder)],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_captured_with_one_gpu_is_what_real_ranks_ask_for(
    kind: str, asked: dict[str, list[str]], tmp_path: Path
) -> None:
    output = tmp_path / "captured"
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    module = ["-m", "torchrelay.clients.training.capture_rank", str(output), "--", "keys_script.py", kind]
    done = subprocess.run(
        [sys.executable, *module],
        env=environment(tmp_path, CUDA_VISIBLE_DEVICES="0", **world),
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = msgspec.msgpack.decode(output.read_bytes(), type=Captured)
    assert (found.ended, found.skipped) == ("at the first optimizer step", [])
    keys = [key.key_of_bytes(wire.encode_request(wire.unpack_request(body))) for body in found.bodies]
    assert keys == list(dict.fromkeys(asked[kind])) != []
