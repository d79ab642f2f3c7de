"""What a script wrote into its working directory: kept as the job's files, small ones first, up to a limit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from torchrelay.clients.training import output_files
from torchrelay.clients.training.output_files import UploadFile, upload_output_files
from torchrelay.compiler.errors import GatewayUnreachable, LimitExceeded

BEGUN = 1_700_000_000.0


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The job's directory, as a script has left it that began at BEGUN."""
    folder = tmp_path / "work"
    before = ("train.py", "data/old.bin")
    written = (
        "out/model.pt",
        "out/log.txt",
        "runs/events.out",
        ".cache/x",
        "__pycache__/a.pyc",
        "tmp/scratch",
    )
    for size, name in enumerate((*before, *written), 1):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (100 * size))
        at = BEGUN - 5 if name in before else BEGUN + 5
        os.utime(path, (at, at))
    (folder / ".torchrelayignore").write_text("tmp/\n")
    (folder / "link").symlink_to("out/model.pt")
    return folder


def into(folder: Path) -> UploadFile:
    def keep(name: str, path: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)

    return keep


def kept(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_newer_than_the_script_s_begin_is_kept(work: Path, tmp_path: Path) -> None:
    told, left = upload_output_files(work, BEGUN, into(tmp_path / "job"))
    assert kept(tmp_path / "job") == ["output/out/log.txt", "output/out/model.pt", "output/runs/events.out"]
    assert told == "kept of the working directory, as output/: out/model.pt, out/log.txt, runs/events.out"
    assert left == ""
    assert upload_output_files(work, BEGUN + 60, into(tmp_path / "none")) == ("", "")


def test_past_the_limit_the_large_ones_are_named_and_left(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files, "MOST_BYTES", 750)
    told, left = upload_output_files(work, BEGUN, into(tmp_path / "job"))
    assert told.endswith(": out/model.pt, out/log.txt")
    assert "runs/events.out" in left and "outlives the job" in left
    monkeypatch.setattr(output_files, "MOST_FILES", 1)
    assert upload_output_files(work, BEGUN, into(tmp_path / "one"))[0].endswith(": out/model.pt")


def test_one_that_the_service_refuses_is_left_and_without_a_service_the_rest_too(
    work: Path, tmp_path: Path
) -> None:
    def refuses(name: str, path: Path) -> None:
        if "log" in name:
            raise LimitExceeded("it is too large")
        into(tmp_path / "job")(name, path)

    def away(name: str, path: Path) -> None:
        raise GatewayUnreachable("there is no gateway")

    told, left = upload_output_files(work, BEGUN, refuses)
    assert told.endswith(": out/model.pt, runs/events.out") and "out/log.txt" in left
    told, left = upload_output_files(work, BEGUN, away)
    assert told == "" and "there is no gateway" in left


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    told, left = upload_output_files(tmp_path / "gone", BEGUN, into(tmp_path))
    assert told == ""
    assert left == "nothing of the working directory was kept: the script has removed it"
