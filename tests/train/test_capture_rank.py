"""The capture run: what one process finds in a pretended world is what two real ranks ask for; it trains nothing."""

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

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from keys_script import KINDS  # noqa: E402


def environment(tmp_path: Path, spec: TrainSpec | None = None, **more: str) -> dict[str, str]:
    """As rank 0 of two has it; no gateway is known."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")}
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    mine = {
        "OMP_NUM_THREADS": "1",
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    told = {
        SPEC_ENVIRONMENT: msgspec.json.encode(spec or TrainSpec(name="a", script="a.py", workers=2)).decode()
    }
    return kept | world | mine | told | more


def captured(
    tmp_path: Path, *target: str, spec: TrainSpec | None = None, folder: Path = HERE
) -> tuple[Captured, str]:
    """What a capture run found, and what the script printed."""
    output = tmp_path / "captured"
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.clients.training.capture_rank", str(output), *target],
        env=environment(tmp_path, spec),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return msgspec.msgpack.decode(output.read_bytes(), type=Captured), done.stdout


def keys(found: Captured) -> list[str]:
    return [key.key_of_bytes(wire.encode_request(wire.unpack_request(body))) for body in found.bodies]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Keys that two gloo ranks ask for in three steps, by kind: the same, but where they have different parts."""
    folder = tmp_path_factory.mktemp("ranks")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(HERE / "real_ranks.py"), str(folder)],
        env=environment(folder, PYTHONWARNINGS="ignore"),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    first["tensor"], mine = [*first["tensor"], *second["tensor"]], first["tensor"]
    assert mine != second["tensor"]
    assert {**first, "tensor": []} == {**second, "tensor": []}
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_captured_is_what_real_ranks_ask_for(
    kind: str, asked: dict[str, list[str]], tmp_path: Path
) -> None:
    found, printed = captured(tmp_path, "--", "keys_script.py", kind)
    assert keys(found) == list(dict.fromkeys(asked[kind])) != []
    assert found.skipped == []
    assert found.ended == "at the first optimizer step"
    assert "step" not in printed
    if kind == "ddp-split":
        assert len(found.bodies) > 1


SCRIPT = """
import sys, torch
from torch import nn
from torchrelay import train

def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    ours = torch.compile(model, backend="torchrelay", dynamic=False)
    unnamed = torch.compile(lambda out: (out ** 2).mean())
    kept = train.Checkpoints("kept")
    assert kept.restore(model=model) is None
    optimizer = torch.optim.SGD(model.parameters())
    with train.autocast():
        loss = unnamed(ours(torch.ones(2, 4)).float())
    loss.backward()
    train.report(step=0, loss=loss)
    kept.save(0, model=model, optimizer=optimizer)
    print("argv", sys.argv[1:], torch.get_float32_matmul_precision(), flush=True)
    if "fail" in sys.argv:
        raise ValueError("boom")
    if "leave" in sys.argv:
        sys.exit(3)
    if "rpc" in sys.argv:
        import torch.distributed.rpc as rpc
        rpc.init_rpc("worker", rank=0, world_size=2)
    if "scaler" in sys.argv:
        torch.amp.GradScaler("cpu").step(optimizer)
    optimizer.step()
    print("stepped")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "own.py").write_text(SCRIPT)
    return folder


def requests(found: Captured) -> list[wire.GraphRequest]:
    return [wire.unpack_request(body) for body in found.bodies]


def test_a_function_runs_as_the_ranks_run_it_and_no_checkpoint_is_kept(folder: Path, tmp_path: Path) -> None:
    spec = TrainSpec(name="a", function="own:main", workers=2, precision="tf32", tune=True)
    found, printed = captured(tmp_path, "--function", "own:main", "--", "-x", "1", spec=spec, folder=folder)
    assert (found.ended, found.skipped, found.log) == ("at the first optimizer step", [], "")
    assert printed.splitlines() == ["argv ['-x', '1'] high"]
    assert [request.mode for request in requests(found)] == ["max-autotune-no-cudagraphs"] * 2
    assert {request.ambient.matmul_precision for request in requests(found)} == {"high"}
    assert not (folder / "kept").exists()


def test_where_torchrelay_is_not_the_back_end_only_what_names_it_is_captured(
    folder: Path, tmp_path: Path
) -> None:
    spec = TrainSpec(name="a", script="own.py", workers=2, compile="off", precision="bf16")
    found, _ = captured(tmp_path, "--", "own.py", spec=spec, folder=folder)
    (request,) = requests(found)
    assert request.mode == "default"
    assert [(each.device, each.dtype) for each in request.ambient.autocast] == [("cpu", "bfloat16")]


@pytest.mark.parametrize(
    ("how", "ended"),
    [
        ("fail", "failed: ValueError: boom"),
        ("leave", "failed: it exited with 3"),
        ("rpc", "failed: RPC cannot be pretended. Set `capture: false`"),
        ("scaler", "at the first optimizer step"),
    ],
)
def test_a_script_that_fails_is_told_and_what_was_found_before_is_kept(
    how: str, ended: str, folder: Path, tmp_path: Path
) -> None:
    found, printed = captured(tmp_path, "--", "own.py", how, folder=folder)
    assert found.ended == ended
    assert len(found.bodies) == 2
    assert "stepped" not in printed
    if how == "fail":
        assert found.log.startswith('Traceback (most recent call last):\n  File "own.py"')
        assert found.log.rstrip().endswith("ValueError: boom")
