"""The command line: arguments in, an exit status out (0 done, 1 failed, 2 wrong use or settings).

Only the entry point: the commands live in commands/ and need typer and rich, which the thin client lacks.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from ..compiler import install_hint
from ..compiler.errors import BadTrainJob, BadTuneJob, RelayError, SettingsError


def main() -> None:
    """Console script `torchrelay`. A typed error is one line on stderr, never a traceback."""
    if sys.argv[1:2] == ["up"] and all(
        importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "ray", "redis")
    ):
        # as commands/start_service.py does; importing all commands would take a tenth of its start
        os.execv(sys.executable, [sys.executable, "-P", "-m", "torchrelay.service", *sys.argv[1:]])
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        sys.exit(f"torchrelay: the command line needs typer and rich. {install_hint('cli')}")

    from .commands import application

    try:
        application()(prog_name="torchrelay")
    except RelayError as error:
        print(f"torchrelay: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, SettingsError | BadTuneJob | BadTrainJob) else 1)


if __name__ == "__main__":
    main()
