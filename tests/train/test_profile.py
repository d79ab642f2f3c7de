"""Two real ranks of an unchanged script on CPU, profiled by the optimizer's steps: trace, links, memory, advice."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torchrelay.clients.reports.profiling import kineto_trace
from torchrelay.clients.reports.profiling.advice import advice
from torchrelay.clients.reports.profiling.summary import ProfileSummary
from torchrelay.clients.training import profiler
from torchrelay.clients.training.metrics.optimizer_steps import OptimizerSteps
from torchrelay.clients.training.profiler import ProfilerSession
from torchrelay.clients.training.rank import main
from torchrelay.clients.training.rank_environment import RankEnvironment
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training import events as training_events
from torchrelay.compiler.api.training import jobs as records
from torchrelay.compiler.api.training import rank_environment
from torchrelay.compiler.errors import LimitExceeded

SCRIPT = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 64
    def __getitem__(self, number):
        time.sleep(0.02)
        return torch.randn(128), number % 10

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 10))
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters())
busy = torch.randn(512, 512)
for x, y in DataLoader(Slow(), batch_size=8):
    for _ in range(20 * rank):
        busy = (busy @ busy).tanh()
    loss = nn.functional.cross_entropy(parallel(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PARAMETERS = 4 * (128 * 256 + 256 + 256 * 10 + 10)


class Ran:
    """What two ranks left: their summaries, traces and messages."""

    def __init__(self, folder: Path, messages: list[list[training_events.RankMessage]]) -> None:
        self.folder = folder
        self.messages = messages
        files = sorted((folder / "profile").glob("*.summary.json"))
        self.summaries = [decoding.from_json(file.read_bytes(), type=ProfileSummary) for file in files]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "train.py").write_text(SCRIPT)
    spec = records.TrainSpec(
        name="p", script="train.py", compile="off", profile=records.ProfileSpec(first=2, last=5, ranks=[0, 1])
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks, told, threads = [], [], []
    for rank in range(2):
        reading, writing = os.pipe()
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            rank_environment.SPEC_ENVIRONMENT: msgspec.json.encode(spec).decode(),
            rank_environment.ANSWER_ENVIRONMENT: str(writing),
        }
        command = [sys.executable, "-m", "torchrelay.clients.training.rank.main", "--", "train.py"]
        ranks.append(subprocess.Popen(command, cwd=folder, env=environment, pass_fds=[writing]))
        os.close(writing)
        lines: list[bytes] = []
        told.append(lines)
        thread = threading.Thread(
            target=lambda end, into: into.extend(os.fdopen(end, "rb")), args=(reading, lines)
        )
        thread.start()
        threads.append(thread)
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    for thread in threads:
        thread.join(30)
    yield Ran(
        folder,
        [[decoding.from_json(line, type=training_events.RankMessage) for line in lines] for lines in told],
    )


def test_the_asked_steps_are_profiled_on_the_asked_ranks(ran: Ran) -> None:
    assert [(each.rank, each.world_size, each.device) for each in ran.summaries] == [
        (0, 2, "cpu"),
        (1, 2, "cpu"),
    ]
    for each in ran.summaries:
        assert [step.number for step in each.steps] == [2, 3, 4]
        assert each.torch == torch.__version__
    notes = [m.text for m in ran.messages[0] if isinstance(m, training_events.JobNote)]
    assert any(text.startswith("profiled steps 2 to 4:") for text in notes)


def test_the_trace_links_forward_and_backward_operators(ran: Ran) -> None:
    events = kineto_trace.read_trace(ran.folder / "profile" / "rank-0.trace.json.gz").events
    links = [event for event in events if event.cat == "fwdbwd"]
    starts = {event.id: event for event in links if event.ph == "s"}
    ends = {event.id: event for event in links if event.ph == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) >= 3 * 4, "of each step, at least its four differentiable operators"
    operators = {(event.tid, event.ts): event.name for event in events if event.cat == "cpu_op"}
    pairs = {
        (operators[starts[link].tid, starts[link].ts], operators[ends[link].tid, ends[link].ts])
        for link in starts
    }
    assert ("aten::gelu", "GeluBackward0") in pairs
    assert ("aten::addmm", "AddmmBackward0") in pairs


def test_memory_is_told_by_what_it_is_for(ran: Ran) -> None:
    (found,) = ran.summaries[0].memory
    assert found.device == "cpu"
    last = dict(zip(("parameters", "optimizer", "gradients"), found.points[-1].bytes[:3], strict=True))
    assert last["parameters"] == PARAMETERS
    assert PARAMETERS * 2 <= last["optimizer"] <= PARAMETERS * 2 + 64
    assert last["gradients"] == PARAMETERS
    activations = max(point.bytes[3] for point in found.points)
    assert activations >= 4 * 8 * (128 + 256 + 256), (
        "of eight samples: inputs, the first layer's outputs, GELU's"
    )
    assert found.peak >= 4 * PARAMETERS


def test_waiting_communication_and_work_are_told_apart(ran: Ran) -> None:
    for each in ran.summaries:
        assert each.total("loader") >= 3 * 8 * 20_000, "three batches of eight samples, 20 ms each"
        assert each.total("communication") > 0
        assert {"gloo:all_reduce"} <= {collective.name for collective in each.collectives}
        for step in each.steps:
            assert step.exposed <= step.communication
            assert step.loader + step.computation + step.exposed <= step.duration * 1.001
    names = {operator.name: operator for operator in ran.summaries[1].operators}
    assert names["aten::mm"].dims == "512\N{MULTIPLICATION SIGN}512, 512\N{MULTIPLICATION SIGN}512"


def test_the_advice_names_what_was_made_wrong_here(ran: Ran) -> None:
    found = {each.rule: each for each in advice(ran.summaries)}
    assert {"loader", "uneven"} <= found.keys()
    assert found["uneven"].ranks == [1]
    assert "tensor_cores" not in found, "there is no GPU"


# --- in this process -----------------------------------------------------------------------------------------


def train(steps: int, parameters: int = 4) -> None:
    weight = torch.nn.Parameter(torch.ones(parameters))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (weight * 2).sum().backward()
        optimizer.step()


def begun(
    tmp_path: Path, first: int, last: int, steps: OptimizerSteps
) -> tuple[Any, list[training_events.JobNote]]:
    notes: list[training_events.JobNote] = []
    session = ProfilerSession(
        records.ProfileSpec(first=first, last=last),
        rank=0,
        world_size=1,
        folder=tmp_path,
        note=notes.append,
        steps=steps,
    )
    return session, notes


def numbers(folder: Path) -> list[int]:
    data = (folder / "rank-0.summary.json").read_bytes()
    return [step.number for step in decoding.from_json(data, type=ProfileSummary).steps]


def test_another_rank_is_not_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "ProfilerSession", lambda *_, **__: pytest.fail("a session was begun"))
    profile = records.ProfileSpec(first=0, last=1, ranks=[3])
    spec = records.TrainSpec(name="p", script="train.py", compile="off", profile=profile)
    assert main._prepare(RankEnvironment(spec=spec)) == []


def test_the_first_step_of_all_is_profiled_without_a_warm_up(tmp_path: Path) -> None:
    session, _ = begun(tmp_path, 0, 2, OptimizerSteps())
    train(4)
    session.close()
    assert numbers(tmp_path) == [0, 1]


def test_a_script_that_ends_early_keeps_the_steps_that_it_took(tmp_path: Path) -> None:
    session, _ = begun(tmp_path, 1, 50, OptimizerSteps())
    train(4)
    session.close()
    assert numbers(tmp_path) == [1, 2, 3]


def test_a_script_that_ends_before_says_so(tmp_path: Path) -> None:
    session, notes = begun(tmp_path, 10, 12, OptimizerSteps())
    train(3)
    session.close()
    assert [note.level for note in notes] == ["warning"]
    assert "before the steps" in notes[0].text
    assert list(tmp_path.iterdir()) == []


def test_training_taken_up_from_a_checkpoint_keeps_its_step_numbers(tmp_path: Path) -> None:
    steps = OptimizerSteps()
    session, _ = begun(tmp_path, 0, 103, steps)
    steps.resume(100)
    train(5)
    session.close()
    assert numbers(tmp_path) == [102]


def test_a_script_with_a_profiler_of_its_own_goes_on(tmp_path: Path) -> None:
    session, notes = begun(tmp_path, 3, 5, OptimizerSteps())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        train(8)
    session.close()
    assert "SumBackward0" in {event.name for event in own.events() or []}
    assert [note.level for note in notes] == ["warning"]
    assert notes[0].text.startswith("no profile: ")


def test_files_that_cannot_be_kept_are_told_of(tmp_path: Path) -> None:
    def refuse(name: str, path: Path) -> None:
        raise OSError("No space left on device")

    notes: list[training_events.JobNote] = []
    profile = records.ProfileSpec(first=0, last=1)
    session = ProfilerSession(
        profile, rank=0, world_size=1, note=notes.append, upload=refuse, steps=OptimizerSteps()
    )
    train(2)
    session.close()
    assert [note.level for note in notes] == ["warning"]
    assert "was not stored: No space left" in notes[0].text


def test_a_report_needs_no_trace_that_was_too_large_to_keep(tmp_path: Path) -> None:
    kept: list[str] = []

    def only_small(name: str, path: Path) -> None:
        if "trace" in name:
            raise LimitExceeded("it is too large")
        kept.append(name)

    notes: list[training_events.JobNote] = []
    profile = records.ProfileSpec(first=1, last=2, memory=False)
    session = ProfilerSession(
        profile,
        rank=0,
        world_size=1,
        folder=tmp_path,
        note=notes.append,
        upload=only_small,
        steps=OptimizerSteps(),
    )
    train(3)
    session.close()
    assert kept == ["profile/rank-0.summary.json"]
    assert "too large" in notes[0].text
    data = (tmp_path / "rank-0.summary.json").read_bytes()
    assert decoding.from_json(data, type=ProfileSummary).memory == [], "memory was not asked for"


def test_a_session_leaves_nothing_in_the_jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept: dict[str, int] = {}
    profile = records.ProfileSpec(first=1, last=2)
    keep = lambda name, path: kept.__setitem__(name, path.stat().st_size)  # noqa: E731
    session = ProfilerSession(profile, rank=0, world_size=1, upload=keep, steps=OptimizerSteps())
    train(3)
    session.close()
    assert sorted(kept) == ["profile/rank-0.summary.json", "profile/rank-0.trace.json.gz"]
    assert list(tmp_path.iterdir()) == []
