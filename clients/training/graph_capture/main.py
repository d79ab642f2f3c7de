"""The capture run: `python -m torchrelay.clients.training.graph_capture.main OUTPUT [--function] TARGET [ARGUMENTS]`.

Runs a job's script as rank 0 with fake process groups, up to its first optimizer step, and writes the graphs that all
ranks will request to OUTPUT, as CapturedGraphs. The environment is that of rank 0. Nothing is trained.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ....compiler.api.training.node_messages import CapturedGraphs
from ....compiler.errors import RelayError
from ...atomic_file import write_atomically
from ..rank_environment import begin_capture, load_rank

_USAGE = (
    "usage: python -m torchrelay.clients.training.graph_capture.main OUTPUT [--] SCRIPT [ARGUMENTS] | "
    "OUTPUT --function MODULE:FUNCTION [--] [ARGUMENTS]"
)
_LOG_CHARACTERS = 8192


def main(arguments: Sequence[str]) -> None:
    """Write OUTPUT, even if the script fails. Raises SystemExit for wrong use, OSError if OUTPUT cannot be written."""
    if len(arguments) < 2:
        raise SystemExit(_USAGE)
    begin_capture()
    output = Path(arguments[0]).absolute()
    write_atomically(output, msgspec.msgpack.encode(_captured(arguments[1:])), mode=0o600)


def _captured(target: Sequence[str]) -> CapturedGraphs:
    from .. import precision
    from ..rank import run_script
    from ..rank.main import runner
    from .fake_process_groups import fake_process_groups
    from .script_graphs import GraphRecorder, run_recorded

    rank = load_rank()
    spec = rank.spec
    recorder = GraphRecorder(
        "", unnamed=run_script.TUNED_MODE if spec is not None and spec.tune else "default"
    )
    ended, log = "", ""
    run = runner(list(target))
    if spec is not None:
        precision.set_precision(spec.precision)
    try:
        with fake_process_groups(rank.rank, rank.world_size):
            ended = run_recorded(run, recorder, unnamed=spec is None or spec.compile == "torchrelay")
    except SystemExit as error:
        ended = f"failed: it exited with {error.code}"
    except BaseException as error:
        ended = f"failed: {_line(error)}"
        log = "".join(traceback.format_exception(type(error), error, run_script.user_traceback(error)))
        print(log, file=sys.stderr)
    return CapturedGraphs(
        bodies=list(recorder.found.values()),
        skipped=list(recorder.skipped),
        ended=ended,
        log=log[-_LOG_CHARACTERS:],
    )


def _line(error: BaseException) -> str:
    text = str(error) if isinstance(error, RelayError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:1000] if text.strip() else type(error).__name__


if __name__ == "__main__":
    # The script replaces __main__, so the module is imported under its own name. os._exit: threads of the script may
    # still run.
    import os

    from torchrelay.clients.training.graph_capture import main as _capture

    _capture.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
