"""What a rank tells: over a pipe as its worker reads it, to callbacks, into files; and what it costs unheard."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchrelay import train
from torchrelay.clients.training.metrics import channel as channels
from torchrelay.clients.training.metrics.channel import RankChannel
from torchrelay.clients.training.metrics.loader_waits import LoaderWaits
from torchrelay.clients.training.metrics.optimizer_steps import OptimizerSteps
from torchrelay.clients.training.metrics.reporter import MetricsReporter
from torchrelay.clients.training.rank_environment import RankEnvironment
from torchrelay.compiler import decoding
from torchrelay.compiler.api.training.events import FirstStep, JobNote, RankMessage, StepMetrics


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def read(descriptor: int) -> list[RankMessage]:
    with os.fdopen(os.dup(descriptor), "rb") as lines:
        return [decoding.from_json(line, type=RankMessage) for line in lines]


def telling(channel: RankChannel, steps: OptimizerSteps | None = None) -> MetricsReporter:
    return MetricsReporter(
        RankEnvironment(rank=3, attempt=1), channel, steps or OptimizerSteps(), LoaderWaits()
    )


class Unread(torch.Tensor):
    """Fails when its value is asked for."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a tensor was read: {function}")


def test_numbers_and_tensors_arrive_as_numbers(pipe: tuple[int, int]) -> None:
    channel = RankChannel(pipe[1])
    telling(channel).report(
        step=4, loss=torch.tensor(0.5, requires_grad=True), tokens=7, ratio=torch.tensor([[2]])
    )
    channel.close()
    (told,) = read(pipe[0])
    assert isinstance(told, StepMetrics)
    assert (told.rank, told.step, told.values) == (3, 4, {"loss": 0.5, "tokens": 7.0, "ratio": 2.0})


def test_where_nobody_listens_no_tensor_is_read() -> None:
    telling(RankChannel(-1)).report(loss=torch.tensor(1.0).as_subclass(Unread))
    with pytest.raises(AssertionError, match="was read"):
        heard = telling(RankChannel(-1))
        heard.add_callback(train.Callback())
        heard.report(loss=torch.tensor(1.0).as_subclass(Unread))


def test_a_loss_that_is_no_number_is_told_once_in_words(pipe: tuple[int, int]) -> None:
    channel = RankChannel(pipe[1])
    mine = telling(channel)
    for step in range(3):
        mine.report(step=step, loss=float("nan"), tokens=1)
    channel.close()
    told = read(pipe[0])
    assert [each.text for each in told if isinstance(each, JobNote)] == ["loss is nan at step 0"]
    assert [each.values for each in told if isinstance(each, StepMetrics)] == [{"tokens": 1.0}] * 3


def test_a_value_of_many_elements_is_refused() -> None:
    mine = telling(RankChannel(-1))
    mine.add_callback(train.Callback())
    with pytest.raises(ValueError, match="grads has 2 elements"):
        mine.report(grads=torch.ones(2))


def test_an_unchanged_script_s_steps_are_seen(pipe: tuple[int, int]) -> None:
    channel, steps = RankChannel(pipe[1]), OptimizerSteps()
    mine = telling(channel, steps)
    mine.watch()
    weight = torch.nn.Parameter(torch.ones(2))
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.25)
    second = torch.optim.SGD([other], lr=1.0)
    for _ in range(3):
        for each in (optimizer, second):
            each.zero_grad()
        (weight.sum() + other.sum()).backward()
        optimizer.step()
        second.step()
    mine.end()
    channel.close()
    told = read(pipe[0])
    assert steps.done == 3 and steps.latest == 2  # the second optimizer's are no steps of their own
    assert [(each.rank, each.attempt) for each in told if isinstance(each, FirstStep)] == [(3, 1)]
    first = next(each for each in told if isinstance(each, StepMetrics))
    assert (
        first.step == 0 and first.values["learning_rate"] == 0.25 and first.values["memory_bytes"] > 1 << 20
    )


def test_a_batch_that_no_step_used_counts_for_none(pipe: tuple[int, int]) -> None:
    channel, steps, waits = RankChannel(pipe[1]), OptimizerSteps(), LoaderWaits()
    mine = MetricsReporter(RankEnvironment(), channel, steps, waits)
    mine.watch()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for _ in range(3):
        waits.add(0.25, samples=8)
        optimizer.step()
    waits.add(0.25, samples=8)  # the loop asks for a batch before it looks whether it is over
    mine.end()
    channel.close()
    told = [each.values for each in read(pipe[0]) if isinstance(each, StepMetrics)]
    assert [values["samples"] for values in told] == [8.0, 8.0]
    assert [values["wait_seconds"] for values in told] == [0.25, 0.25]


def test_a_compiled_optimizer_s_step_is_seen_and_has_no_graph_more() -> None:
    def graphs() -> int:
        found = []

        def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            found.append(graph)
            return graph.forward

        torch.compiler.reset()
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.grad = torch.ones(2)
        torch.compile(optimizer.step, backend=count)()
        assert torch.equal(weight.detach(), torch.tensor([0.5, 0.5]))
        return len(found)

    before, steps = graphs(), OptimizerSteps()
    steps.listen(lambda _: None)
    assert graphs() == before
    assert steps.done == 1


def test_a_reader_who_stands_still_holds_nothing_up_and_learns_what_is_lost(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "WAITING", 100)
    channel = RankChannel(pipe[1])
    count = 5000  # more than a pipe holds
    for step in range(count):
        channel.send(StepMetrics(rank=0, step=step, at=1.0, values={"loss": 1.0, "filler": 12345.678}))
    channel.send(FirstStep(rank=0, at=2.0))
    found: list[RankMessage] = []
    reader = threading.Thread(target=lambda: found.extend(read(pipe[0])))
    reader.start()
    channel.close(60)
    reader.join(60)
    metrics = [each for each in found if isinstance(each, StepMetrics)]
    notes = [int(each.text.split()[0]) for each in found if isinstance(each, JobNote)]
    assert len(metrics) < count and len(metrics) + sum(notes) == count
    assert metrics[-1].step == count - 1
    assert any(isinstance(each, FirstStep) for each in found)


def test_a_reader_who_went_away_is_no_error() -> None:
    reading, writing = os.pipe()
    channel = RankChannel(writing)
    os.close(reading)
    channel.send(JobNote(level="info", text="nobody hears this"))
    channel.close()
    channel.send(JobNote(level="info", text="nor this"))


def test_a_forked_child_tells_nothing(pipe: tuple[int, int]) -> None:
    channel = RankChannel(pipe[1])
    if (child := os.fork()) == 0:
        channel.send(JobNote(level="info", text="from the child"))
        os._exit(0 if not channel.open else 1)
    assert os.waitpid(child, 0)[1] == 0
    channel.send(JobNote(level="info", text="from the parent"))
    channel.close()
    assert [each.text for each in read(pipe[0]) if isinstance(each, JobNote)] == ["from the parent"]


def test_a_capture_run_tells_callbacks_nothing_and_begins_no_board(tmp_path: Path) -> None:
    mine = MetricsReporter(RankEnvironment(capture=True), RankChannel(-1), OptimizerSteps(), LoaderWaits())
    mine.add_callback(train.MetricsFile(tmp_path / "metrics.jsonl"))
    mine.add_callback(train.TensorBoard(tmp_path / "board"))
    mine.report(step=0, loss=1.0)
    mine.end()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert not (tmp_path / "board").exists()


def test_metrics_go_into_files_and_tensorboard(tmp_path: Path) -> None:
    mine = telling(RankChannel(-1))
    mine.add_callback(train.MetricsFile(tmp_path / "metrics.jsonl"))
    mine.add_callback(train.TensorBoard(tmp_path / "board"))
    for step in range(3):
        mine.report(step=step, loss=2.0 - step)
    mine.end()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["values"]["loss"]) for line in lines] == [(0, 2.0), (1, 1.0), (2, 0.0)]
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(each.step, each.value) for each in board.Scalars("loss")] == [(0, 2.0), (1, 1.0), (2, 0.0)]
