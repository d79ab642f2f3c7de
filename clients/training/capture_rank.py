"""The capture run: `python -m torchrelay.clients.training.capture_rank OUTPUT [--function] TARGET [ARGUMENTS]`.

A job's script in, run as rank 0 of a world whose other ranks are only pretended, up to its first optimizer step; the
graphs that all ranks will ask for, out, as Captured in OUTPUT. The environment is that of rank 0. It trains nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from ...compiler.errors import RelayError
from ...compiler.train_records import Captured
from ..settings import begin_capture, load_rank
from ..whole_file import write_whole

_USAGE = (
    "usage: python -m torchrelay.clients.training.capture_rank OUTPUT [--] SCRIPT [ARGUMENTS] | "
    "OUTPUT --function MODULE:FUNCTION [--] [ARGUMENTS]"
)
_LOG_CHARACTERS = 8192


def main(arguments: Sequence[str]) -> None:
    """Write OUTPUT, also for a script that fails. Raises SystemExit for wrong use, OSError if OUTPUT cannot be
    written."""
    if len(arguments) < 2:
        raise SystemExit(_USAGE)
    begin_capture()
    output = Path(arguments[0]).absolute()
    write_whole(output, msgspec.msgpack.encode(_captured(arguments[1:])), mode=0o600)


def _captured(target: Sequence[str]) -> Captured:
    from ..capture_script import Recorder, recorded
    from . import run_script, setup
    from .pretend import pretended_world
    from .rank import runner

    rank = load_rank()
    spec = rank.spec
    recorder = Recorder("", unnamed=setup.TUNED_MODE if spec is not None and spec.tune else "default")
    ended, log = "", ""
    run = runner(list(target))
    if spec is not None:
        setup.set_precision(spec.precision)
    try:
        with pretended_world(rank.rank, rank.world_size):
            ended = recorded(run, recorder, unnamed=spec is None or spec.compile == "torchrelay")
    except SystemExit as error:
        ended = f"failed: it exited with {error.code}"
    except BaseException as error:
        ended, log = f"failed: {_line(error)}", _told(error, run_script.without_ours(error))
        print(log, file=sys.stderr)
    return Captured(
        bodies=list(recorder.found.values()),
        skipped=list(recorder.skipped),
        ended=ended,
        log=log[-_LOG_CHARACTERS:],
    )


def _line(error: BaseException) -> str:
    text = str(error) if isinstance(error, RelayError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:1000] if text.strip() else type(error).__name__


def _told(error: BaseException, trace: TracebackType | None) -> str:
    return "".join(traceback.format_exception(type(error), error, trace))


if __name__ == "__main__":
    # Not this module, which is __main__ until the script is. What the script left running ends with this process.
    import os

    from torchrelay.clients.training import capture_rank as _capture

    _capture.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
