"""`trace.enabled` and `trace.graph_diagram` for a graph that the service compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = """
import json, sys
import torch, torchrelay

def loss(rows, weight):
    return torch.nn.functional.softplus(rows @ weight).mean()

options = {"trace.enabled": True, "trace.debug_dir": sys.argv[1]}
if sys.argv[2] != "local":  # PyTorch itself needs pydot to draw
    options |= {"trace.graph_diagram": True, "trace.graph_diagram_format": "dot"}
rows, weight = torch.ones(4, 6), torch.ones(6, 6, requires_grad=True)
backend = "inductor" if sys.argv[2] == "local" else "torchrelay"
torch.compile(loss, backend=backend, options=options)(rows, weight).backward()
run = torchrelay.report()
print(json.dumps({"served": run.hits + run.misses + run.disk_hits, "fallbacks": run.fallbacks}))
"""


def traced(
    service: PrivateService, folder: Path, how: str
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The report, and the files by folder."""
    debug, script = folder / how, folder / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **service.environment, "TORCHRELAY_CACHE_DIR": str(folder / "cache")}
    environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1" if how == "local" else "0"
    done = subprocess.run(
        [sys.executable, str(script), str(debug), how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files: dict[str, dict[str, str]] = {}
    for path in debug.rglob("*"):
        if path.is_file():
            files.setdefault(path.parent.name.rpartition("_")[0], {})[path.name] = path.read_text()
    return json.loads(done.stdout.splitlines()[-1]), files


@pytest.mark.slow
def test_a_served_graph_leaves_the_files_that_a_local_compile_leaves(
    service: PrivateService, tmp_path: Path
) -> None:
    report, files = traced(service, tmp_path, "remote")
    assert report == {"served": 1, "fallbacks": {}}
    _, local = traced(service, tmp_path, "local")
    kinds = {kind.rpartition("_")[2]: set(names) for kind, names in local.items()}
    assert set(kinds) == {"forward", "backward"}
    for kind, names in files.items():
        expected = {name for name in kinds[kind.rpartition("_")[2]] if "runnable" not in name}
        assert expected | {"graph_diagram.dot"} == set(names), kind
        assert names["graph_diagram.dot"].startswith("digraph")
        assert "softplus" in names["fx_graph_readable.py"] and "in loss, code:" in names["output_code.py"]
    assert len(files) == 2

    again, _ = traced(service, tmp_path, "again")
    assert again == {"served": 1, "fallbacks": {}}
