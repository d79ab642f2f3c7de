"""The capture run: what one process finds in a simulated world is what two real ranks ask for; it trains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from capture_parts import asked_by_ranks, captured, keys
from keys_script import KINDS
from torchrelay.compiler.api.training.jobs import TrainSpec
from torchrelay.compiler.api.training.node_messages import CapturedGraphs
from torchrelay.compiler.request import codec, schema


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return asked_by_ranks(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_captured_is_what_real_ranks_ask_for(
    kind: str, asked: dict[str, list[str]], tmp_path: Path
) -> None:
    found, printed = captured(tmp_path, "--", "keys_script.py", kind)
    assert keys(found) == asked[kind] != []
    assert found.skipped == []
    assert found.ended == "at the first optimizer step"
    assert "step" not in printed
    if kind == "ddp-split":
        assert len(found.bodies) > 1


SCRIPT = """
import os, sys, torch
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
    print("argv", sys.argv[1:], torch.get_float32_matmul_precision(), os.environ["WANDB_MODE"], flush=True)
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


def requests(found: CapturedGraphs) -> list[schema.GraphRequest]:
    return [codec.unpack_request(body) for body in found.bodies]


def test_a_function_runs_as_the_ranks_run_it_and_no_checkpoint_is_kept(folder: Path, tmp_path: Path) -> None:
    spec = TrainSpec(name="a", function="own:main", workers=2, precision="tf32", tune=True)
    more = {"WANDB_MODE": "online"}
    target = ["--function", "own:main", "--", "-x", "1"]
    found, printed = captured(tmp_path, *target, spec=spec, folder=folder, **more)
    assert (found.ended, found.skipped, found.log) == ("at the first optimizer step", [], "")
    assert printed.splitlines() == ["argv ['-x', '1'] high disabled"]
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
        ("rpc", "failed: RPC cannot be simulated. Set `capture: false`"),
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
        assert found.log.startswith(f'Traceback (most recent call last):\n  File "{folder / "own.py"}"')
        assert found.log.rstrip().endswith("ValueError: boom")


CLOSURE = """
import torch
model = torch.nn.Linear(4, 1)
compiled = torch.compile(model, backend="torchrelay", dynamic=False)
optimizer = torch.optim.{optimizer}(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = compiled(torch.ones(2, 4)).sum()
    loss.backward()
    print("computed")
    return loss
optimizer.step({given})
print("stepped")
"""


@pytest.mark.parametrize(("optimizer", "given"), [("Adam", "closure=closure"), ("LBFGS", "closure")])
def test_a_step_that_computes_in_a_closure_is_run_up_to_there(
    optimizer: str, given: str, folder: Path, tmp_path: Path
) -> None:
    """Lightning's trainer does so, with any optimizer."""
    (folder / "own.py").write_text(CLOSURE.format(optimizer=optimizer, given=given))
    found, printed = captured(tmp_path, "--", "own.py", folder=folder)
    assert len(found.bodies) == 1
    assert (found.ended, printed) == ("at the first optimizer step", "computed\n")
