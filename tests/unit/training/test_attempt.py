"""How ranks failed: with an error of the script's own, which would come again, or with what another start may mend."""

from __future__ import annotations

import pytest
from torchrelay.compiler.api.training.events import RankEnded, RankStarted
from torchrelay.workers.training import attempt as train_attempt
from torchrelay.workers.training.attempt import RankAttempt
from torchrelay.workers.training.ranks.process import error_line

ERROR = "ModuleNotFoundError: No module named 'x'"


def begun(ranks: int = 2) -> RankAttempt:
    attempt = RankAttempt(0, ranks)
    for rank in range(ranks):
        attempt.record(
            RankStarted(rank=rank, world_size=ranks, pid=1, host="h", attempt=0, at=1.0), stopped=-1.0
        )
    return attempt


def ended(
    attempt: RankAttempt, rank: int, code: int, at: float, detail: str = "", stopped: float = -1.0
) -> None:
    attempt.record(RankEnded(rank=rank, code=code, at=at, attempt=0, detail=detail), stopped)


def test_an_error_is_the_scripts_own_if_all_ranks_have_told_of_their_end() -> None:
    attempt = begun()
    ended(attempt, 0, 1, 5.0, ERROR)
    ended(attempt, 1, -15, 6.0, stopped=5.5)  # it was told to
    attempt.give_up()
    assert attempt.own_error() == f"1 {ERROR}"


def test_the_first_error_counts_whichever_is_heard_first_and_whichever_rank_had_it() -> None:
    for first, second in ((0, 1), (1, 0)):
        attempt = begun()
        ended(attempt, second, 1, 6.0, "RuntimeError: connection closed by peer")
        ended(attempt, first, 1, 5.0, ERROR)
        assert attempt.failed is not None
        assert (attempt.failed.rank, attempt.own_error()) == (first, f"1 {ERROR}")


def test_the_same_error_of_another_rank_is_the_same_error() -> None:
    errors = set()
    for rank in (0, 11):
        attempt = begun(12)
        ended(attempt, rank, 1, 5.0, error_line([f"[rank{rank}]: {line}" for line in ("    x", ERROR)]))
        errors.add(attempt.own_error())
    assert errors == {f"1 {ERROR}"}


def test_an_error_beside_a_rank_that_was_killed_or_never_told_its_end_may_come_from_that() -> None:
    killed = begun()
    ended(killed, 0, 1, 5.0, "RuntimeError: connection closed by peer")
    ended(killed, 1, -9, 4.9, stopped=5.5)  # before anybody told it to end
    silent = begun()
    ended(silent, 0, 1, 5.0, "RuntimeError: connection closed by peer")
    for attempt in (killed, silent):
        attempt.give_up()
        assert attempt.failed is not None
        assert attempt.own_error() == ""


def test_a_rank_that_starts_when_its_attempt_was_given_up_is_not_waited_for() -> None:
    attempt = begun(1)
    attempt.give_up()
    attempt.record(RankStarted(rank=1, world_size=2, pid=2, host="h", attempt=0, at=2.0), stopped=-1.0)
    assert not attempt.running


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (-9, ""),
        (-11, ""),
        (137, ""),
        (143, ""),
        (1, "MemoryError"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (1, "OSError: [Errno 12] Cannot allocate memory"),
    ],
)
def test_signals_and_lack_of_memory_are_no_errors_of_the_script(code: int, detail: str) -> None:
    attempt = begun(1)
    ended(attempt, 0, code, 5.0, detail)
    attempt.give_up()
    assert attempt.failed is not None
    assert attempt.own_error() == ""


def test_a_script_that_ran_for_long_may_have_got_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begun(1)
    ended(attempt, 0, 2, 5.0)
    attempt.give_up()
    assert attempt.own_error() == "2 "
    monkeypatch.setattr(train_attempt, "LONG_SECONDS", 0.0)
    assert attempt.own_error() == ""
