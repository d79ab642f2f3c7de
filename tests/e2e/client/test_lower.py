"""Graphs at their levels, from a whole service."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from torchrelay.compiler.request import codec
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import torch

def loss(rows, weight):
    hidden = torch.nn.functional.silu(rows @ weight)
    hidden = torch.nn.functional.layer_norm(hidden, (6,)).masked_fill(rows > 2, -torch.inf)
    return hidden.square().mean()

rows, weight = torch.ones(4, 6), torch.ones(6, 6, requires_grad=True)
torch.compile(loss, backend="torchrelay")(rows, weight).backward()
"""
SILU = "hidden = torch.nn.functional.silu(rows @ weight)"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "secret_name.py"
    path.write_text(SCRIPT)
    return path


def lower(service: PrivateService, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchrelay.clients.cli", "lower", str(script), *arguments]
    environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(script.parent / "cache")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_script_is_shown_at_each_level_with_its_own_lines(service: PrivateService, script: Path) -> None:
    levels = ("captured", "joint", "forward", "backward", "core_aten", "prims")
    done = lower(service, script, *(f"--level={level}" for level in levels), "--format", "json")
    assert done.returncode == 0, done.stderr
    (graph,) = json.loads(done.stdout)
    texts = {level["name"]: "\n".join(part["text"] for part in level["parts"]) for level in graph["levels"]}
    assert list(texts) == list(levels)
    for level, text in texts.items():
        assert f"{script}:5 in loss, code: {SILU}" in text, level
    assert "torch.nn.functional.silu" in texts["captured"]
    assert "-Infinity" in done.stdout
    assert "tangents_1" in texts["joint"]
    assert "aten.sigmoid" in texts["core_aten"] and "prims." not in texts["core_aten"]
    prims = next(level for level in graph["levels"] if level["name"] == "prims")
    assert {part["name"] for part in prims["parts"]} == {"forward", "backward"}
    for part in prims["parts"]:
        left = {name for name in part["operators"] if not name.startswith("prims.")}
        assert set(part["left"]) == left
        assert "aten.mm.default" in left and len(part["graph"]["nodes"]) == len(part["names"])


def test_the_same_graph_is_lowered_once(service: PrivateService, script: Path) -> None:
    first = lower(service, script, "--level", "core_aten")
    before = service.stats()["compiles"]
    shutil.rmtree(script.parent / "cache")
    again = lower(service, script, "--level", "core_aten")
    assert first.returncode == again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    assert service.stats()["compiles"] == before


def test_generated_code_and_machine_code_name_the_lines_that_they_compute(
    service: PrivateService, script: Path, tmp_path: Path
) -> None:
    done = lower(service, script, "--level", "all", "--format", "folder", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    (files,) = [entry["artifacts"] for entry in directory(tmp_path / "out").values()]
    texts = {file["name"]: (tmp_path / "out" / file["url"]).read_text() for file in files}
    line = f"{script}:5 in loss, code: {SILU}"
    for kind in (
        "inductor_pre_fusion_ir",
        "inductor_post_fusion_ir",
        "inductor_output_code",
        "diagram",
        "assembly",
    ):
        found = [text for name, text in texts.items() if name.startswith(kind)]
        assert any(line in text for text in found), kind
    assembly = "\n".join(text for name, text in texts.items() if name.startswith("assembly"))
    assert re.search(r"\bret\b", assembly) and "PyModule_Create2@plt>:" not in assembly


def test_shared_lines_and_modules_are_on_the_gateways_page(service: PrivateService, tmp_path: Path) -> None:
    script = tmp_path / "shared.py"
    script.write_text(MODEL)
    done = lower(service, script, "--level", "joint", "--share", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    (address,) = re.findall(r"http://\S+/graph", done.stderr)
    with service._get(address.removeprefix(service.url)) as answer:
        nodes = json.load(answer)["nodes"]
    products = [node for node in nodes if node["target"] == "aten.addmm.default"]
    assert [node["module"] for node in products] == ["blocks.0.inner", "blocks.1.inner"]
    assert all(f"{script}:9 in forward" in node["line"] for node in products)
    assert any(node["module"].startswith("backward.blocks.0") for node in nodes if "module" in node)


MODEL = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x).relu() + x

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()

torch.compile(Model(), backend="torchrelay")(torch.ones(3, 4)).backward()
"""


def directory(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "compile_directory.json").read_text()))


API = """
import torch, torchrelay

def scaled(x, y):
    y.add_(1)
    return torch.relu(x) * y.sum()

x = torch.randn(3, 4)
(graph,) = torchrelay.lower(scaled, x, torch.ones(2), level=["core_aten", "prims"], dynamic=True)
assert (graph.mutated, graph.outputs) == ([1], 1), (graph.mutated, graph.outputs)
for level in ("core_aten", "prims"):
    gm = graph.graph_module(level)
    lines = [node.meta.get("source_line", "") for node in gm.graph.nodes]
    assert any("return torch.relu(x) * y.sum()" in line for line in lines), lines
    y, taken = torch.ones(2), []
    tensors, sizes = iter((y, x)), iter((2, 3, 4))  # as Dynamo meets them
    for kind in graph.inputs:
        taken.append(next(tensors) if kind == "tensor" else next(sizes))
    changed, result = gm(*taken)[:2]
    assert torch.equal(changed, y + 1) and torch.equal(result, torch.relu(x) * 4), level
print("equal")
"""


def test_a_program_gets_graphs_that_it_can_run(service: PrivateService, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(API)
    environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.returncode) == ("equal\n", 0), done.stderr


def test_neither_a_file_nor_a_line_of_the_program_is_sent(script: Path) -> None:
    code = """
import sys
from pathlib import Path
from torchrelay.clients.training.graph_capture.script_graphs import record_script
from torchrelay.compiler.request import codec
recorder, _ = record_script(Path(sys.argv[1]), [])
(body,), (lines,) = recorder.found.values(), recorder.lines.values()
assert any("secret_name" in line for line in lines.values())
sys.stdout.buffer.write(codec.decompress(body, 1 << 20))
"""
    sent = subprocess.run([sys.executable, "-c", code, str(script)], capture_output=True, check=True).stdout
    assert b"torch" in sent and b"secret_name" not in sent and b"hidden" not in sent


def test_the_route_refuses_a_graph_without_levels(
    service: PrivateService, script: Path, tmp_path: Path
) -> None:
    file = tmp_path / "captured.graphs"
    command = [sys.executable, "-m", "torchrelay.clients.cli", "capture", str(script), "-o", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    from torchrelay.clients.jobfiles.captured_graphs import read_graphs

    (body,) = read_graphs(file)
    (credentials,) = Path(service.environment["XDG_CONFIG_HOME"]).rglob("credentials.json")
    token = json.loads(credentials.read_text())["token"]
    request = urllib.request.Request(
        f"{service.url}/v1/lower",
        body,
        {"Content-Type": codec.GRAPH_MEDIA_TYPE, "Authorization": f"Bearer {token}"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 422
    assert "names no levels" in refused.value.read().decode()


def test_an_unknown_level_is_named(service: PrivateService, script: Path) -> None:
    done = lower(service, script, "--level", "primes")
    assert done.returncode == 2 and "level primes" in done.stderr and "core_aten" in done.stderr
