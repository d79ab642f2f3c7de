"""A job of two ranks that is started again and again, of program_ranks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchrelay.examples.harness.private_service import PrivateService

SCRIPT = Path(__file__).with_name("program_ranks.py")

Told = dict[str, dict[str, Any]]
"""Case to what one rank told of it."""


class Job:
    """Where a user starts two ranks again and again."""

    def __init__(self, service: PrivateService, folder: Path) -> None:
        self.folder = folder
        self._environment = {
            **os.environ,
            **service.environment,
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(folder / "state"),
            "TORCHRELAY_CACHE_DIR": str(folder / "cache"),
            "TORCHRELAY_PROGRAMS": "1",
        }

    def start(self, *cases: str, rows: str = "16,16", text: str = "", **variables: str) -> list[Told]:
        """What each rank told. text: of the script, if not its own."""
        self.folder.mkdir(exist_ok=True)
        script = self.folder / "train.py"
        script.write_text(text or SCRIPT.read_text())
        for old in self.folder.glob("?.json"):
            old.unlink()
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, "-m", *launcher, str(script), ",".join(cases), str(self.folder), rows],
            env={**self._environment, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        found = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(2)]
        assert all(told[case]["alone"] == {} for told in found for case in cases)
        return found
