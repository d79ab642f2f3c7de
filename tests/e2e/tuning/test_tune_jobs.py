"""A batch job through a whole service: what it finds is what a later compile takes, and its graphs are hits."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path

import pytest
import test_tuning
from command_line import torchrelay
from test_tuning import compiled, winners
from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = test_tuning.SCRIPT.replace("(4, 48, 32)", "(4, 40, 32)")
JOB = """\
name: from a test
operators:
  - {op: bmm, batch: 4, m: 40, k: 32, n: 64, dtype: f32}
  - {op: bmm, batch: 4, m: 40, k: 64, n: 32, dtype: f32}
  - {op: mm, m: 64, k: 64, n: 64, dtype: f32, constant: true}
"""


def tune(service: PrivateService, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **service.environment}
    return torchrelay(*arguments, environment=environment, folder=folder, seconds=500)


@pytest.mark.slow
def test_what_a_job_found_a_compile_takes_and_a_captured_graph_is_a_hit(
    service: PrivateService, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = tune(service, tmp_path, "tune", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    reply = json.loads(done.stdout)
    assert reply["job"]["items"] == {"done": 5}, reply
    manifest = compiled(service, script, "relu")
    assert (manifest.searched, manifest.recalled) == (0, 2)

    captured = tune(service, tmp_path, "capture", "-o", "one.graphs", "train.py", "tanh")
    assert captured.returncode == 0, captured.stderr
    (tmp_path / "graphs.yaml").write_text("graphs:\n- file: one.graphs\n")
    done = tune(service, tmp_path, "tune", "graphs.yaml", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    reply = json.loads(done.stdout)
    assert [item["state"] for item in reply["progress"]] == ["known"] * 3, reply
    again = compiled(service, script, "tanh")
    assert (again.searched, again.recalled) == (0, 2)
    assert winners(again) == winners(manifest)
    stats = json.loads(tune(service, tmp_path, "stats", "--json").stdout)
    assert stats["hits"] >= 1


@pytest.mark.slow
def test_a_captured_graphs_problems_are_searched_and_told_with_their_uses(
    service: PrivateService, tmp_path: Path
) -> None:
    """Two layers of one shape: one problem, used twice."""
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace("(4, 40, 32), (4, 32, 64), (4, 64, 32)", "(4, 56, 48), (4, 48, 48), (4, 48, 48)")
    )
    captured = tune(service, tmp_path, "capture", "train.py", "--", "relu")
    assert captured.returncode == 0, captured.stderr
    (tmp_path / "job.yaml").write_text("graphs:\n- file: captured.graphs\n")
    done = tune(service, tmp_path, "tune", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    reply = json.loads(done.stdout)
    assert reply["progress"][0]["state"] == "done", reply
    with urllib.request.urlopen(
        urllib.request.Request(
            f"{service.url}/v1/tunes/{reply['job']['id']}/results",
            headers={"Authorization": f"Bearer {token(service)}"},
        )
    ) as answer:
        found = [each for each in json.load(answer)["results"] if each["graphs"]]
    assert [each["graphs"][0][1] for each in found] == [2]
    assert len(found[0]["timings"]) > 1
    manifest = compiled(service, script, "relu")
    assert manifest.tuning[0].winner == found[0]["entry"]["winner"]["candidate"]


def token(service: PrivateService) -> str:
    path = Path(service.environment["XDG_CONFIG_HOME"]) / "torchrelay" / "credentials.json"
    return str(json.loads(path.read_text())["token"])
