"""A profiled training job through a whole service: its trace can be fetched, and its report tells what it did."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from command_line import torchrelay
from torchrelay.examples.harness.private_service import PrivateService

EXAMPLES = Path(__file__).parents[3] / "examples" / "train"


def command(service: PrivateService, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, **service.environment, "COLUMNS": "250"}
    done = torchrelay("train", *arguments, environment=environment, folder=folder, status=0, seconds=500)
    return done.stdout


@pytest.mark.slow
def test_an_example_is_profiled_and_reported(service: PrivateService, tmp_path: Path) -> None:
    options = ["--workers", "2", "--name", "gpt", "--profile", "steps=4:7", "--profile-ranks", "0,1"]
    script = ["--way", "ddp", "--steps", "10", "--batch", "4", "--layers", "1", "--checkpoint-every", "5"]
    told = command(service, EXAMPLES, "char_gpt.py", *options, "--", *script)
    assert "rank 0: profiled steps 4 to 6:" in told
    files = {each["name"] for each in json.loads(command(service, tmp_path, "files", "gpt", "--json"))}
    assert files == {
        f"profile/rank-{rank}.{kind}" for rank in (0, 1) for kind in ("summary.json", "trace.json.gz")
    }
    command(service, tmp_path, "report", "gpt", "-o", "out")
    page = (tmp_path / "out" / "index.html").read_text()
    for text in ("Loss", "Rank 0", "Rank 1", "gloo:all_reduce"):
        assert text in page, text
    assert "2 checkpoints" in page.replace("</strong><span>", " ")
    assert "aten::mm" in page and "optimizer state" in page
    trace = json.loads(gzip.decompress((tmp_path / "out" / "rank-1.trace.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"fwdbwd", "[memory]", "gloo:all_reduce", "ProfilerStep#3"} <= names
