"""`torchrelay capture`: which graphs of a script are written down, and that the script trains nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torchrelay.clients.jobfiles import captured_graphs
from torchrelay.clients.training.graph_capture.script_graphs import capture_script
from torchrelay.compiler.errors import ClientError, SettingsError
from torchrelay.compiler.request import codec, schema

TRAINING = """
import sys, torch
from helper import width
torch.manual_seed(0)
assert sys.argv[2:] == ["--mode", "own"]
model = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
before = [p.detach().clone() for p in model.parameters()]
compiled = torch.compile(model, mode="max-autotune-no-cudagraphs")

@torch.compile
def loss_of(out):
    return (out ** 2).mean()

optimizer = torch.optim.Adam(model.parameters())
try:
    for step in range(5):
        loss = loss_of(compiled(torch.ones(int(sys.argv[1]), width)))
        loss.backward()
        try:
            optimizer.step()
        except Exception:
            print("swallowed")
        print("stepped")
finally:
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    print("untouched" if same else "trained")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("width = 4\n")
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def test_the_first_steps_graphs_are_written_down_and_nothing_is_trained(script: Path, tmp_path: Path) -> None:
    output = tmp_path / "train.graphs"
    command = [sys.executable, "-m", "torchrelay.clients.cli", "capture", str(script), "-o", str(output)]
    command += ["--", "16", "--mode", "own"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "untouched",
        f"captured 2 graphs into {output} (at the first optimizer step)",
    ]
    requests = [codec.unpack_request(body) for body in captured_graphs.read_graphs(output)]
    assert [request.mode for request in requests] == ["max-autotune-no-cudagraphs", "default"]
    shapes = [each.shape for each in requests[0].inputs if isinstance(each, schema.TensorInput)]
    assert [16, 4] in shapes
    assert requests[0].ambient.grad


def test_a_script_without_an_optimizer_ends_by_itself_and_its_mode_may_be_another(tmp_path: Path) -> None:
    script = tmp_path / "infer.py"
    script.write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x @ x.T\n"
        "model = Model()\nmodel.compile()\n"
        "with torch.no_grad():\n    for _ in range(3): model(torch.ones(2, 4))\n"
    )
    found = capture_script(script, [], mode="max-autotune")
    (request,) = [codec.unpack_request(body) for body in found.bodies]
    assert (request.mode, request.ambient.grad, found.ended) == ("max-autotune", False, "at its end")


def test_a_loop_without_an_end_is_left(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        "import torch\nf = torch.compile(lambda x: x + 1)\nx = torch.ones(3)\nwhile True: x = f(x)\n"
    )
    found = capture_script(script, [])
    assert len(found.bodies) == 1
    assert found.ended == "after 1000 calls without a new graph"


def test_other_back_ends_are_left_alone_and_then_there_is_nothing(tmp_path: Path) -> None:
    script = tmp_path / "eager.py"
    script.write_text("import torch\nprint(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(3)))\n")
    with pytest.raises(ClientError, match="nothing to compile"):
        capture_script(script, [])


def test_a_script_that_fails_is_its_own_error_and_leaves_torch_as_it_was(tmp_path: Path) -> None:
    import torch

    before = torch.compile, sys.argv[:], sys.path[:]
    script = tmp_path / "broken.py"
    script.write_text("raise ZeroDivisionError\n")
    with pytest.raises(ZeroDivisionError):
        capture_script(script, ["--flag"])
    assert (torch.compile, sys.argv, sys.path) == before


def test_wrong_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no file"):
        capture_script(tmp_path / "nowhere.py", [])
    script = tmp_path / "x.py"
    script.write_text("")
    with pytest.raises(SettingsError, match="--mode"):
        capture_script(script, [], mode="fast")
    with pytest.raises(SettingsError, match="not a file of captured graphs"):
        captured_graphs.read_graphs(script)


def test_the_scripts_options_are_not_taken_for_ours(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchrelay.clients.cli", "capture", str(script), "--batch", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "--batch" in done.stderr
    assert not list(tmp_path.glob("*.graphs"))


def test_the_option_that_is_ours_is_not_written_down(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    program = (
        "import torch\ntorch.compile(torch.sin, backend='torchrelay', options={options})(torch.ones(2))\n"
    )
    found = []
    for options in ({"max_fusion_size": 60}, {"max_fusion_size": 60, "torchrelay.background": True}):
        path.write_text(program.format(options=options))
        captured = capture_script(path, [])
        assert captured.skipped == []
        found.append(captured.bodies)
    assert found[0] == found[1] and len(found[0]) == 1
