"""What people see of a running job: one line that says how it is, and lines for what happened."""

from __future__ import annotations

from torchrelay.clients.commands.jobs.progress import ProgressDisplay, compiles_text, log_lines, short
from torchrelay.compiler.api.training.events import (
    CheckpointEvent,
    FirstStep,
    JobNote,
    LogLines,
    NumberedEvent,
    RankCompiles,
    RankEnded,
    RankStarted,
    StateChanged,
    StepMetrics,
    TrainEvent,
)
from torchrelay.compiler.api.training.jobs import CompileCounts


def told(view: ProgressDisplay, *events: TrainEvent) -> list[str]:
    return [line for event in events for line in view.take(NumberedEvent(0, event))]


def metrics(rank: int, step: int, **values: float) -> StepMetrics:
    return StepMetrics(rank=rank, step=step, at=0.0, values=values)


STARTED = [RankStarted(rank=n, world_size=2, pid=n, host="a", attempt=0, at=10.0 + n) for n in range(2)]


def test_the_line_says_state_ranks_step_loss_throughput_and_compiles() -> None:
    view = ProgressDisplay()
    assert view.line() == "waiting"
    assert told(view, *STARTED) == []
    assert told(view, StateChanged(state="running", at=11, ranks=2, restarts=1)) == ["running"]
    assert view.line() == "running · 2 ranks · 1 restart"
    told(view, metrics(0, 7, loss=2.34567, tokens=900.0), metrics(1, 7, loss=9.0, tokens=1100.0))
    assert view.line() == "running · 2 ranks · 1 restart · step 7 · loss 2.346"
    told(view, metrics(0, 8, step_seconds=0.1), metrics(1, 8, step_seconds=0.1))
    told(view, *(RankCompiles(rank=n, hits=3, misses=n, fallbacks=0) for n in range(2)))
    assert view.line() == (
        "running · 2 ranks · 1 restart · step 8 · loss 2.346 · 20 k tokens/s · graphs: 6 hits, 1 misses"
    )


def test_what_happened_is_told_once_and_the_first_step_of_the_last_rank_counts() -> None:
    view = ProgressDisplay()
    told(view, *STARTED)
    assert told(view, FirstStep(rank=0, at=12.0)) == []
    assert told(view, FirstStep(rank=1, at=14.5)) == [
        "all ranks took their first step, 3.5 s after the last had started"
    ]
    assert told(
        view,
        CheckpointEvent(step=5, name="step-5", kept=True, seconds=1.25, bytes=3 << 20),
        CheckpointEvent(step=6, name="", kept=False, detail="the disk is full"),
        JobNote(level="warning", text="the loader waits\nfor a disk", rank=1),
        JobNote(level="info", text="hello"),
        RankEnded(rank=0, code=0, at=0, attempt=0),
        RankEnded(rank=1, code=-9, at=0, attempt=0, detail="killed"),
        StateChanged(state="recovering", at=0, detail="rank 1 was killed", restarts=1),
    ) == [
        "checkpoint step-5 saved (1.2 s, 3.00 MiB)",
        "checkpoint at step 6 failed, training continues: the disk is full",
        "warning: rank 1: the loader waits",
        "for a disk",
        "info: hello",
        "rank 1 was killed by signal 9 (SIGKILL): killed",
        "recovering: rank 1 was killed",
    ]


def test_after_a_restart_compiles_and_first_steps_are_counted_anew() -> None:
    view = ProgressDisplay()
    told(view, *STARTED, RankCompiles(rank=0, hits=0, misses=5, fallbacks=1), FirstStep(rank=0, at=12.0))
    told(view, StateChanged(state="recovering", at=0), RankCompiles(rank=0, hits=2, misses=0, fallbacks=0))
    assert view.line() == "recovering · 2 ranks · graphs: 2 hits"
    again = [RankStarted(rank=n, world_size=2, pid=n, host="a", attempt=1, at=20.0) for n in range(2)]
    assert told(view, *again, *(FirstStep(rank=n, at=21.0, attempt=1) for n in range(2))) == [
        "all ranks took their first step, 1.0 s after the last had started"
    ]


def test_only_the_log_of_rank_0_is_shown() -> None:
    logs = [LogLines(rank=n, stream="stdout", lines=["a", "b"]) for n in range(2)]
    assert told(ProgressDisplay(), *logs) == ["a", "b"]


def test_numbers_are_short() -> None:
    assert [short(n) for n in (0.5, 12.34, 18_200, 3.1e7)] == ["0.5", "12.3", "18.2 k", "31 M"]
    assert compiles_text(CompileCounts()) == "graphs: none"


def test_a_rank_s_line_is_what_a_terminal_would_show_of_it() -> None:
    log = LogLines(
        rank=1,
        stream="stderr",
        lines=[
            "\repoch 0:   0%|          | 0/8\repoch 0:  50%|#####     | 4/8\repoch 0: 100%|##########| 8/8",
            "epoch\t0\tloss\t2.5",
            "\x1b[32mgreen\x1b[0m and \x1b]8;;http://x\x07a link\x1b]8;;\x07",
            "",
            "\r                    \r\x1b[A",
            "  a line that is indented",
        ],
    )
    shown = ["epoch 0: 100%|##########| 8/8", "epoch   0       loss    2.5", "green and a link", ""]
    assert list(log_lines(log, named=False)) == [*shown, "  a line that is indented"]
    assert next(log_lines(log, named=True)) == f"rank 1: {shown[0]}"
