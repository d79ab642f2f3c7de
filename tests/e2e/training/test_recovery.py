"""A rank is killed in the middle of a job, through a whole service: the job ends with the undisturbed one's losses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_line import torchrelay
from torchrelay.examples.harness.private_service import PrivateService

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train" / "char_gpt.py"
STEPS = 16
SCRIPT = f"""
import os, runpy, signal, sys
from torchrelay import train


class Killed(train.Callback):
    def on_metrics(self, metrics):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if metrics.step >= 9 and first and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


if "--killed" in sys.argv:
    sys.argv.remove("--killed")
    train.add_callback(Killed())
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
OPTIONS = ["--steps", str(STEPS), "--layers", "1", "--width", "32", "--context", "32", "--dropout", "0.2"]


def command(service: PrivateService, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, **service.environment, "COLUMNS": "250"}
    done = torchrelay("train", *arguments, environment=environment, folder=folder, status=0, seconds=550)
    return done.stdout


def losses(service: PrivateService, folder: Path, name: str) -> dict[tuple[int, int], float]:
    """By rank and step, the last that was told."""
    lines = map(json.loads, command(service, folder, "metrics", name, "--json").splitlines())
    return {
        (line["rank"], line["step"]): line["values"]["loss"] for line in lines if "loss" in line["values"]
    }


@pytest.mark.slow
def test_a_job_of_which_a_rank_is_killed_ends_with_the_undisturbed_losses(
    service: PrivateService, tmp_path: Path
) -> None:
    (tmp_path / "gpt.py").write_text(SCRIPT)
    for name, killed in (("calm", []), ("struck", ["--killed"])):
        script = [*killed, *OPTIONS, "--checkpoint-every", "4", "--device", "cpu"]
        command(service, tmp_path, "gpt.py", "--name", name, "--workers", "2", "--", *script)
    calm = json.loads(command(service, tmp_path, "show", "calm", "--json"))
    struck = json.loads(command(service, tmp_path, "show", "struck", "--json"))
    assert (calm["state"], calm.get("restarts", 0)) == ("done", 0)
    assert (struck["state"], struck["restarts"]) == ("done", 1), struck
    assert calm["checkpoint"] == struck["checkpoint"] == f"step-{STEPS}"
    told = losses(service, tmp_path, "calm")
    assert set(told) == {(rank, step) for rank in (0, 1) for step in range(STEPS)}
    assert losses(service, tmp_path, "struck") == told
