"""Files that a user names, which several processes may be given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torchrelay.clients.atomic_file import write_whole

_WRITER = """
import sys
from pathlib import Path
from torchrelay.clients.atomic_file import write_whole
for _ in range(200):
    write_whole(Path(sys.argv[1]), sys.argv[2].encode() * 200_000)
"""


def test_ranks_that_are_given_one_report_leave_a_whole_one(tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.json"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(report), letter]) for letter in "abc"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if report.exists():
            data = report.read_bytes()
            seen.add((len(data), len(set(data))))
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert seen == {(200_000, 1)}
    assert [path.name for path in report.parent.iterdir()] == ["report.json"]


def test_a_link_and_what_is_no_file_stay_what_they_are(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "report")
    write_whole(link, b"x")
    assert (link.is_symlink(), (tmp_path / "report").read_bytes()) == (True, b"x")
    reader, writer = os.pipe()
    write_whole(Path(f"/dev/fd/{writer}"), b"y")
    assert os.read(reader, 2) == b"y"
