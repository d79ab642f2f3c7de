"""A job's report: what its ranks told becomes curves, marks and advice; what users wrote stays text. No torch."""

from __future__ import annotations

import html.parser
import math
from pathlib import Path

import msgspec
import pytest
from kineto import ADD, ALL_REDUCE, GEMM, Trace
from torchrelay.clients.reports.profiling import kineto_trace as traces
from torchrelay.clients.reports.profiling.memory_timeline import TensorSnapshot
from torchrelay.clients.reports.profiling.summary import ProfileContext, ProfileSummary, summarize
from torchrelay.clients.reports.training import page as training_page
from torchrelay.clients.reports.training import summary as training_summary
from torchrelay.compiler.api.html import series
from torchrelay.compiler.api.html.svg import Picture, Shape
from torchrelay.compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    JobNote,
    RankCompiles,
    RankEnded,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
)
from torchrelay.compiler.api.training.jobs import CompileCounts, TrainJob, TrainSpec
from torchrelay.compiler.api.training.series import Line, MetricSeries

EVIL = "<script>alert('x')</script>\"&\u202e"
JOB = TrainJob(
    id="0123456789abcdef",
    spec=TrainSpec(name="gpt", script="train.py", workers=2),
    state="done",
    by="ann",
    created=1000.0,
    ended=1100.0,
    step=9,
    compiles=CompileCounts(captured=3, compiled=2, hits=6),
    first_step_seconds=2.5,
)


def metrics(rank: int, step: int, at: float = 1010.0, **values: float) -> StepMetrics:
    return StepMetrics(rank=rank, step=step, at=at, values=values)


class Read(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def read(report: training_summary.TrainingReport) -> Read:
    return Read(training_page.page(report))


@pytest.fixture
def summary(tmp_path: Path) -> ProfileSummary:
    built = Trace()
    for number in range(2):
        built.step(number + 1, 1000.0 * number, 990)
        for place in range(20):
            built.kernel(f"{GEMM}_{place}", 1000.0 * number + 20 * place, 18, op="aten::mm")
        built.kernel(ADD, 1000.0 * number + 500, 30)
        built.kernel(ALL_REDUCE, 1000.0 * number + 540, 300, stream=20)
        built.memory(1000.0 * number + 30, 5000, 0x99, 8000)
        built.memory(1000.0 * number + 300, -5000, 0x99, 3000)
        built.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1000.0 * number + 250, 100)
    facts = ProfileContext(
        rank=1,
        world_size=2,
        first=4,
        device="cuda",
        device_name="NVIDIA H200",
        capability=[9, 0],
        snapshots={"cuda:0": [TensorSnapshot(parameters=[(0x10, 1000)])] * 3},
        memory={"cuda:0": 1 << 30},
    )
    return summarize(traces.read_trace(built.write(tmp_path / "t.json")), facts)


# --- what was told -----------------------------------------------------------------------------------------


def test_values_become_lines_by_rank_known_names_first() -> None:
    events = [
        metrics(rank, step, accuracy=0.5, learning_rate=0.1, loss=3.0 - step)
        for step in (1, 0)
        for rank in (1, 0)
    ]
    found = training_summary.report(JOB, events)
    assert [series.name for series in found.series] == ["loss", "learning_rate", "accuracy"]
    loss = found.named("loss")
    assert loss is not None
    assert loss.lines == {0: [(0, 3.0), (1, 2.0)], 1: [(0, 3.0), (1, 2.0)]}
    assert loss.last == 2.0


def test_what_is_no_number_is_not_drawn() -> None:
    found = training_summary.report(JOB, [metrics(0, 0, loss=1.0), metrics(0, 1, loss=math.nan)])
    assert found.series[0].lines == {0: [(0, 1.0)]}


def test_throughput_is_of_all_ranks_by_the_slowest_ones_time_though_they_tell_of_other_steps() -> None:
    events: list[TrainEvent] = [metrics(rank, step, tokens=100.0) for rank in (0, 1) for step in range(10)]
    events += [metrics(0, step, step_seconds=0.1) for step in (0, 4, 8)]
    events += [metrics(1, step, step_seconds=0.2) for step in (1, 5, 9)]
    throughput = training_summary.report(JOB, events).named("throughput")
    assert throughput is not None
    assert throughput.unit == "tokens/s"
    assert [step for step, _ in throughput.lines[-1]] == [0, 1, 4, 5, 8, 9]
    assert {round(value) for _, value in throughput.lines[-1]} == {1000}


def test_a_rank_that_was_lost_no_longer_counts_in_the_throughput() -> None:
    events: list[TrainEvent] = [metrics(0, step, samples=8.0, step_seconds=0.5) for step in range(100)]
    events += [metrics(1, step, samples=8.0, step_seconds=0.5) for step in range(10)]
    throughput = training_summary.report(JOB, events).named("throughput")
    assert throughput is not None
    line = dict(throughput.lines[-1])
    assert (line[5], line[50]) == (32, 16)


def test_a_restart_is_marked_where_the_job_was_and_steps_taken_again_count_once() -> None:
    events: list[TrainEvent] = [metrics(0, step, at=1010.0 + step, loss=float(step)) for step in range(5)]
    events.append(RankEnded(rank=1, code=-9, at=1015.0, attempt=0, detail="Killed"))
    events.append(StateChanged(state="recovering", at=1015.5, ranks=1, restarts=1))
    events += [metrics(0, step, at=1020.0 + step, loss=10.0 + step) for step in (3, 4)]
    found = training_summary.report(JOB, events)
    assert found.restarts == [(4, 1, "rank 1 was killed by signal 9 (SIGKILL): Killed")]
    assert dict(found.series[0].lines[0])[3] == 13.0
    text = read(found).text
    assert "after step 4, of 1 ranks" in text
    assert "dashed: ranks started again" in text


def test_the_jobs_states_fill_its_time() -> None:
    events: list[TrainEvent] = [
        StateChanged(state="capturing", at=1005.0),
        StateChanged(state="compiling", at=1010.0),
        StateChanged(state="running", at=1040.0),
        StateChanged(state="done", at=1100.0),
    ]
    found = training_summary.report(JOB, events).stages
    assert [(stage.state, stage.end - stage.start) for stage in found] == [
        ("waiting", 5.0), ("capturing", 5.0), ("compiling", 30.0), ("running", 60.0)
    ]  # fmt: skip


def test_first_steps_are_told_from_each_ranks_own_start() -> None:
    events: list[TrainEvent] = []
    for attempt, took in ((0, 8.0), (1, 3.0)):
        for rank in (0, 1):
            at = 1000.0 + 20 * attempt
            events.append(RankStarted(rank=rank, world_size=2, pid=1, host="h", attempt=attempt, at=at))
            events.append(FirstStep(rank=rank, at=at + took + rank, attempt=attempt))
    found = training_summary.report(JOB, events)
    assert found.first_steps == {0: {0: 8.0, 1: 9.0}, 1: {0: 3.0, 1: 4.0}}
    assert "restart 1" in read(found).text


def test_without_a_profile_the_steps_give_advice_and_with_one_it_is_not_said_twice(tmp_path: Path) -> None:
    events = [metrics(0, step, step_seconds=1.0, wait_seconds=0.4) for step in range(10)]
    (said,) = training_summary.report(JOB, events).advice
    assert (said.rule, said.number) == ("loader", pytest.approx(0.4))
    built = Trace()
    built.step(1, 0, 1000)
    built.kernel(GEMM, 300, 700)
    built.add("user_annotation", "enumerate(DataLoader)#x", 0, 300)
    profile = summarize(
        traces.read_trace(built.write(tmp_path / "t.json")),
        ProfileContext(rank=0, world_size=1, first=0, device="cuda"),
    )
    (said,) = training_summary.report(JOB, events, [profile]).advice
    assert (said.rule, said.number) == ("loader", pytest.approx(0.3))


def test_compiles_that_ranks_waited_for_are_advice_and_hits_are_not() -> None:
    assert training_summary.report(JOB, []).advice == []
    late = msgspec.structs.replace(JOB, compiles=CompileCounts(captured=3, hits=4, misses=1, fallbacks=2))
    told = [RankCompiles(rank=1, hits=0, misses=0, fallbacks=2, reasons=["unsupported_operator"])]
    (said,) = training_summary.report(late, told).advice
    assert (said.rule, said.number, said.ranks) == ("compiles", 3, [1])
    assert "3 compiles" in said.text and "unsupported_operator" in said.text


# --- the page ----------------------------------------------------------------------------------------------


def whole(summary: ProfileSummary, text: str = "") -> training_summary.TrainingReport:
    events: list[TrainEvent] = [
        metrics(rank, step, loss=3.0 / (step + 1), step_seconds=0.1, tokens=64.0, memory_bytes=5e8, own=1.0)
        for step in range(10)
        for rank in (0, 1)
    ]
    events += [
        CheckpointEvent(step=5, name="step-5", kept=True, seconds=0.4, bytes=1 << 20),
        CheckpointEvent(step=8, name="step-8", kept=False, detail=f"No space left on device {text}"),
        JobNote(level="warning", text=f"something {text}", rank=1),
        RankCompiles(rank=0, hits=3, misses=0, fallbacks=1, reasons=[f"unsupported{text}"]),
    ]
    job = msgspec.structs.replace(
        JOB,
        spec=TrainSpec(name=f"gpt {text}", script=f"train{text}.py", arguments=[text], workers=2),
        skipped=[f"a graph {text}"],
        by=f"ann{text}",
    )
    return training_summary.report(job, events, [summary], ["profile/rank-1.trace.json.gz"])


def test_the_page_tells_it_all_advice_first(summary: ProfileSummary) -> None:
    page = training_page.page(whole(summary))
    found = Read(page)
    order = ["Advice", "Over steps", "Where a step's time goes", "Rank 1", "The job"]
    places = [found.text.index(f"{head}\n") if head != "Rank 1" else found.text.index(head) for head in order]
    assert places == sorted(places)
    for text in (
        "Communication that nothing hides takes 30% of the time",
        "1,280", "tokens/s",  # 128 tokens in 0.1 s
        "3 graphs captured before, 2 compiled; 6 hits, 0 misses, 0 fallbacks",
        "NVIDIA H200", "256", "208 KiB", "132\u00d71\u00d71",
        "yes", "name: xmma_gemm",
        "Tensor Cores", "100% of matrix products",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "activations", "peak 7.81 KiB",
        "step-5", "No space left on device", "torchrelay train get 0123456789abcdef profile/rank-1.trace.json.gz",
    ):  # fmt: skip
        assert text in found.text, text
    assert "10 more" in found.text, "of 22 kernels twelve are shown"


def test_the_page_loads_nothing_and_runs_nothing_whatever_users_wrote(summary: ProfileSummary) -> None:
    page = training_page.page(whole(summary, EVIL))
    found = Read(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert found.addresses == []
    assert "default-src 'none'" in page
    assert "alert('x')" in found.text, "it is shown, as text"
    assert "\u202e" not in page


def test_a_profile_without_a_step_is_left_out(summary: ProfileSummary) -> None:
    empty = msgspec.structs.replace(summary, steps=[])
    text = read(training_summary.report(JOB, [], [empty])).text
    assert "Where a step's time goes" not in text


def test_a_job_that_has_told_nothing_has_a_page() -> None:
    waiting = msgspec.structs.replace(JOB, state="waiting", ended=0.0, first_step_seconds=0.0)
    text = read(training_summary.report(waiting, [])).text
    assert "No rank has reported a step yet" in text
    assert "Nothing stands out" in text


def test_a_failed_job_says_why_at_the_top() -> None:
    failed = msgspec.structs.replace(JOB, state="failed", detail="rank 0 ended with 1: ValueError")
    assert "rank 0 ended with 1: ValueError" in read(training_summary.report(failed, [])).text


# --- pictures ----------------------------------------------------------------------------------------------


def shapes(picture: Picture, kind: str) -> list[Shape]:
    return [shape for shape in picture.shapes if str(shape.attributes["class"]).split()[0] == kind]


def test_many_ranks_are_a_band_and_their_mean() -> None:
    few = series.lines(MetricSeries("loss", "", {rank: [(0, 1.0), (1, 2.0)] for rank in range(6)}))
    many = series.lines(MetricSeries("loss", "", {rank: [(0, 1.0), (1, 2.0)] for rank in range(64)}))
    assert (len(shapes(few, "line")), len(shapes(few, "band"))) == (6, 0)
    assert (len(shapes(many, "line")), len(shapes(many, "band"))) == (1, 1)


def test_a_long_line_keeps_its_least_and_greatest() -> None:
    values = [(step, 1.0) for step in range(100_000)]
    values[77_777] = (77_777, 9.0)
    values[33_333] = (33_333, -5.0)
    (line,) = shapes(series.lines(MetricSeries("loss", "", {0: values})), "line")
    path = str(line.attributes["d"])
    assert len(path) < 20_000
    heights = {float(pair.split(" ")[1]) for pair in path.removeprefix("M").split(" L")}
    assert len(heights) == 3


@pytest.mark.parametrize(
    "line", [[(5, 2.0)], [(0, 0.0), (1, 0.0)], [(0, -1e-9), (9, 1e12)], [(3, 7.0), (4, 7.0)]]
)
def test_any_line_can_be_drawn(line: Line) -> None:
    picture = series.lines(MetricSeries("x", "B", {0: line}), restarts=[4], checkpoints=[0, 3])
    assert len(shapes(picture, "mark")) >= 1
    assert "nan" not in str(picture) and "inf" not in str(picture)


@pytest.mark.parametrize(
    ("low", "high", "binary", "expected"),
    [
        (0, 10, False, [0, 2.5, 5, 7.5, 10]),
        (0.93, 1.31, False, [1.0, 1.1, 1.2, 1.3]),
        (0, 3 * 2**20, True, [0, 2**20, 2 * 2**20, 3 * 2**20]),
        (400 * 2**20, 460 * 2**20, True, [400 * 2**20, 420 * 2**20, 440 * 2**20, 460 * 2**20]),
    ],
)
def test_marks_are_round(low: float, high: float, binary: bool, expected: list[float]) -> None:
    assert series.marks(low, high, 4, binary=binary) == pytest.approx(expected)


def test_steps_are_marked_by_whole_numbers() -> None:
    assert series.marks(0, 14, 6, whole=True) == [0, 5, 10]
    assert series.marks(7, 8, 6, whole=True) == [7, 8]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (ADD, "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"),
        (ALL_REDUCE, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("FSDP::all_gather (blocks.1)", "FSDP::all_gather (blocks.1)"),
        ("x" * 200, "x" * 95 + "\u2026"),
    ],
)
def test_names_are_as_short_as_they_can_be(name: str, shown: str) -> None:
    assert training_page.short_name(name) == shown
