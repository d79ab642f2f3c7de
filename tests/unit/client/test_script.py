"""A script's names: the same at its next start, whatever values it is given; digests only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TELL = (
    "import json; from torchrelay.clients.artifacts.prefetch import script_names; "
    "print(json.dumps(script_names()))\n"
)


def names(*command: str, stdin: str | None = None, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=True,
        input=stdin,
        env=environment or None,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(len(name) == 64 and set(name) <= set("0123456789abcdef") for name in found)
    return list(found)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text(TELL)
    return path


def test_values_paths_and_order_of_options_change_nothing(script: Path) -> None:
    first = names(str(script), "--lr", "0.1", "--data=/home/ada/secret", "-j8", "a.bin")
    assert len(first) == 2
    assert names(str(script), "-j16", "--data", "/else/where", "--lr=3e-4", "b.bin", "c.bin") == first
    assert names(str(script), "--lr", "-1", "--data=x", "-j2") == first
    assert names(str(script), "--lr", "0.1") != first


def test_another_copy_is_the_same_script_and_an_edited_one_keeps_its_loose_name(
    script: Path, tmp_path: Path
) -> None:
    exact, loose = names(str(script))
    copy = tmp_path / "elsewhere" / "project" / "train.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(TELL)
    assert names(str(copy)) == [exact, loose]
    copy.write_text(TELL + "# an edit\n")
    edited = names(str(copy))
    assert edited[0] != exact and edited[1] == loose
    other = script.with_name("evaluate.py")
    other.write_text(TELL)
    assert not {exact, loose} & set(names(str(other)))


def test_code_on_the_command_line_is_known_by_its_text() -> None:
    (first,) = names("-c", TELL, "--lr", "1")
    assert names("-c", TELL, "--lr", "2") == [first]
    assert names("-c", TELL + "pass", "--lr", "1") != [first]


def test_a_module_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TELL)
    done = subprocess.run(
        [sys.executable, "-m", "job"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout)) == 2


def test_nobody_is_nobody() -> None:
    assert names("-", stdin=TELL) == []
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['']\n" + TELL],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == []
