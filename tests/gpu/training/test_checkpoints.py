"""Checkpoints and the training examples on GPUs: bf16, random states of the device, what NCCL ranks saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrelay.compiler.api.training.events import CheckpointEvent, FirstStep
from torchrelay.compiler.api.training.jobs import TrainSpec
from train_parts import finish, start

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = ["--layers", "2", "--width", "64", "--context", "64", "--warmup", "4", "--backend", "inductor"]


def run(folder: Path, *arguments: str, ranks: int = 1, precision: Any = "bf16") -> dict[str, Any]:
    result = folder / "result.json"
    spec = TrainSpec(name="gpu", device="cuda", precision=precision, compile="off")
    options = [
        "--device",
        "cuda",
        "--checkpoints",
        str(folder / "kept"),
        "--json",
        str(result),
        *SMALL,
        *arguments,
    ]
    started = start(ROOT / "examples" / "train" / "char_gpt.py", options, ranks=ranks, spec=spec)
    finish(started)
    assert all(each.kept for each in started[0].told(CheckpointEvent))
    assert all(len(rank.told(FirstStep)) == 1 for rank in started)
    record: dict[str, Any] = json.loads(result.read_text())
    return record


def test_a_bf16_training_with_dropout_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    for folder in (calm, struck):
        folder.mkdir()
    common = ["--dropout", "0.2", "--checkpoint-every", "10"]
    whole = run(calm, "--steps", "30", *common)
    run(struck, "--steps", "20", *common)
    rest = run(struck, "--steps", "30", *common)
    assert rest["start"] == 20
    # Atomic additions on a GPU come in any order.
    assert rest["losses"] == pytest.approx(whole["losses"][20:], rel=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_nccl_ranks_lose_what_one_process_loses_and_one_goes_on(way: str, tmp_path: Path) -> None:
    alone, two = tmp_path / "alone", tmp_path / "two"
    for folder in (alone, two):
        folder.mkdir()
    one = run(alone, "--way", "single", "--steps", "30", "--checkpoint-every", "0", precision="fp32")
    both = run(two, "--way", way, "--steps", "20", "--checkpoint-every", "10", ranks=2, precision="fp32")
    assert both["losses"] == pytest.approx(one["losses"][:20], rel=2e-3)
    rest = run(two, "--way", "single", "--steps", "30", "--checkpoint-every", "10", precision="fp32")
    assert rest["start"] == 20
    assert rest["losses"] == pytest.approx(one["losses"][20:], rel=2e-3)
