"""docs/start.md: its script, run as the page says, prints what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torchrelay
from torchrelay.examples.harness.machines import FreshMachine
from torchrelay.examples.harness.private_service import PrivateService

PAGE = (Path(torchrelay.__file__).parent / "docs" / "start.md").read_text(encoding="utf-8")


def summary(text: str) -> list[str]:
    """The lines that runs end with, without what differs from run to run."""
    lines = re.findall(r"^torchrelay: \d+ graph.*$", text, re.MULTILINE)
    return [re.sub(r"(, saved \d+ s)?, http://\S+/runs/[0-9a-f]{16}$", "", line) for line in lines]


def test_the_first_runs_print_what_the_page_shows(service: PrivateService, tmp_path: Path) -> None:
    (script,) = re.findall("```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "first.py").write_text(script)
    printed = []
    for machine in ("own", "own", "colleague"):
        environment = FreshMachine(tmp_path / machine, compiler=machine == "own").environment(
            **service.environment
        )
        command = [sys.executable, "first.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        printed += summary(done.stderr)
    assert printed == summary(PAGE)
    assert len(printed) == 3
