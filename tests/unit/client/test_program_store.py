"""Programs on this machine: ranks of a job start at one time, and share a folder."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from frame_programs import program
from torchrelay.clients.artifacts.programs import store
from torchrelay.clients.artifacts.programs.process_programs import ProcessPrograms
from torchrelay.clients.artifacts.programs.store import ProgramStore
from torchrelay.clients.reports.run_report import StaleProgramWarning
from torchrelay.compiler.artifact.programs.records import FrameProgram
from torchrelay.compiler.torch_internals.dynamo.programs.frames import FrameName


def kept(folder: Path, key: str = "key") -> list[FrameProgram]:
    """As the next process finds them."""
    return list(ProgramStore(folder / "cache", folder / "state").variants(key))


def test_variants_are_kept_by_their_last_use(tmp_path: Path) -> None:
    programs = ProgramStore(tmp_path / "cache", tmp_path / "state")
    for number in range(32):
        programs.add("key", program(number))
    symbolic = msgspec.structs.replace(program(32), shapes=["s0 > 1"])
    programs.used("key", program(0))
    programs.used("key", program(33))
    programs.add("key", symbolic)
    assert kept(tmp_path) == [program(0), *map(program, range(31, 1, -1)), symbolic]


def test_processes_that_record_a_function_at_one_time_keep_both_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (ProgramStore(tmp_path / "cache", tmp_path / "state") for _ in range(2))
    write = store.write_atomically

    def while_another_writes(path: Path, data: bytes) -> None:
        if path.parent.name == "key":
            other.start()
            other.join()
        write(path, data)

    def add() -> None:
        monkeypatch.setattr(store, "write_atomically", write)
        second.add("key", program(2))

    other = threading.Thread(target=add)
    monkeypatch.setattr(store, "write_atomically", while_another_writes)
    first.add("key", program(1))
    assert kept(tmp_path) == [program(1), program(2)]


def test_a_stale_program_is_removed_and_known_for_good(tmp_path: Path) -> None:
    first = ProgramStore(tmp_path / "cache", tmp_path / "state")
    for number in range(3):
        first.add("key", program(number))
    first.drop("key", program(1))
    first.drop("another", program(1))
    first.add("key", program(3))
    found = ProgramStore(tmp_path / "cache", tmp_path / "state")
    assert kept(tmp_path) == [program(3), program(2), program(0)]
    assert found.stale("key") == found.stale("another") == [store.digest(program(1))]
    assert kept(tmp_path, "another") == []


class Taken:
    """A team's programs, in the place of TeamPrograms."""

    def find(self, key: str) -> Iterator[FrameProgram]:
        yield from (program(1), program(2))


def test_a_teams_program_that_is_stale_is_not_used_again(tmp_path: Path) -> None:
    folder = ProgramStore(tmp_path / "cache", tmp_path / "state")
    programs = ProcessPrograms(None, folder, lambda: None)  # type: ignore[arg-type]
    vars(programs)["_team"] = Taken()
    assert list(programs.find("key")) == [program(1), program(2)]
    with pytest.warns(StaleProgramWarning, match="module.function was stale.*constants"):
        programs.checked(
            FrameName("module", "function", "0" * 64, False, None), "key", program(1), "constants"
        )
    assert list(programs.find("key")) == [program(2)]


@pytest.mark.parametrize(("one_in", "world", "odds"), [(0, 1, 0), (1, 64, 1), (50, 1, 50), (50, 8, 400)])
def test_one_start_of_a_job_in_so_many_checks_whatever_its_size(
    one_in: int, world: int, odds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    drawn: list[int] = []
    monkeypatch.setattr("secrets.randbelow", lambda bound: drawn.append(bound) or len(drawn) - 1)
    folder = ProgramStore(tmp_path / "cache", tmp_path / "state")
    starts = [ProcessPrograms(None, folder, lambda: None, check_one_in=one_in) for _ in range(3)]  # type: ignore[arg-type]
    found = [[each.checks(), each.checks()] for each in starts]
    if odds < 2:
        assert (found, drawn) == ([[bool(odds)] * 2] * 3, [])
    else:
        assert (found, drawn) == ([[True] * 2, [False] * 2, [False] * 2], [odds] * 3)


def test_ranks_that_start_at_one_time_make_one_key_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[threading.Thread] = []
    token_bytes = secrets.token_bytes

    def while_another_starts(count: int) -> bytes:
        if not others:
            second = ProgramStore(tmp_path / "cache", tmp_path / "state")
            others.append(threading.Thread(target=second.add, args=("second", program())))
            others[0].start()
            others[0].join(0.5)  # it waits for the key, or has failed
        return token_bytes(count)

    monkeypatch.setattr(store.secrets, "token_bytes", while_another_starts)
    first = ProgramStore(tmp_path / "cache", tmp_path / "state")
    first.add("first", program())
    others[0].join()
    for reader in (first, ProgramStore(tmp_path / "cache", tmp_path / "state")):
        assert [list(reader.variants(name)) for name in ("first", "second")] == [[program()], [program()]]
