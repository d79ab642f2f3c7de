"""One rank of a training job: `python -m torchrelay.clients.training.rank.main [--function] TARGET [ARGUMENTS]`.

Runs a script as torchrun would, unchanged, and reports its steps to the job. What the job's spec asks for is set first:
precision, torchrelay as the back end of torch.compile, the profiler. Exit codes and tracebacks are Python's own; the
code is STOPPED_CODE if the script ended because `train.should_stop()` returned true.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ....compiler.api.training.rank_environment import STOPPED_CODE
from ....compiler.errors import RelayError
from .. import precision
from ..distributed.shutdown import destroy_process_groups
from ..metrics.channel import process_channel
from ..metrics.reporter import process_reporter
from ..output_files import upload_output_files, uploader
from ..preemption import process_preemption
from ..rank_environment import RankEnvironment, load_rank
from . import run_script

_USAGE = "usage: python -m torchrelay.clients.training.rank.main [--] SCRIPT [ARGUMENTS] | --function MODULE:FUNCTION"
_SAVE_SECONDS = 600.0
"""The longest wait for a checkpoint in progress after the script has succeeded."""
_SAVE_SECONDS_FAILED = 10.0
"""The same after the script has failed."""
_CLOCK_SECONDS = 0.1
"""A file's time may lie so long before the clock's; those of the working directory are older: packing
sets them so (compiler/api/training/working_directory.py)."""


def preload() -> None:
    """Import what nearly every script imports, in the process that ranks are forked from: it starts no thread, uses no
    GPU and reads nothing that belongs to one rank."""
    from ....compiler.torch_internals.loading import preload as loading_preload

    loading_preload.preload_training()
    from ... import patch_compile  # noqa: F401


def fit() -> bool:
    """Whether ranks may be forked after `preload`. Called in a fork of its own."""
    from ....compiler.torch_internals import devices

    return devices.cuda_can_start()


def main(arguments: Sequence[str]) -> int:
    """The exit code; SystemExit is the script's own."""
    rank = load_rank()
    run = runner(list(arguments))
    atexit.register(destroy_process_groups)  # registered first, so that it runs last
    closers = _prepare(rank)
    code, well = 0, False
    try:
        run()
        well = True
    except SystemExit as error:
        well = error.code in (None, 0)
        if not well:
            raise
    except BaseException as error:
        code = 1
        sys.excepthook(
            type(error), error.with_traceback(run_script.user_traceback(error)), error.__traceback__
        )
        if isinstance(error, KeyboardInterrupt):  # Python ends itself by SIGINT then, as it does without us
            sys.excepthook = lambda *error: None
            raise
    finally:
        _end(closers, well=well)
    return STOPPED_CODE if well and process_preemption().stopping else code


def runner(arguments: list[str]) -> Callable[[], None]:
    """What runs the script or function that the arguments name. Raises SystemExit for wrong use."""
    if arguments[:1] == ["--function"] and len(arguments) > 1:
        rest = arguments[2:][arguments[2:3] == ["--"] :]
        return lambda: run_script.run_function(arguments[1], rest)
    if arguments[:1] == ["--"]:
        del arguments[0]
    if not arguments:
        raise SystemExit(_USAGE)
    return lambda: run_script.run_script(arguments[0], arguments[1:])


def _prepare(rank: RankEnvironment) -> list[Callable[[], None]]:
    """Set up what the spec asks for; returns functions to call when the script has ended."""
    closers: list[Callable[[], None]] = []
    process_reporter().watch()
    if rank.spec is None:
        return closers
    if rank.job and rank.rank == 0:
        closers.append(functools.partial(_upload_outputs, rank.job, Path.cwd(), time.time() - _CLOCK_SECONDS))
    precision.set_precision(rank.spec.precision)
    if rank.spec.compile == "torchrelay":
        try:
            run_script.compile_through_service(tune=rank.spec.tune)
        except RelayError as error:  # training goes on, compiled here
            process_reporter().note("warning", f"torchrelay is not the back end: {error}")
    if rank.spec.profile is not None and rank.rank in rank.spec.profile.ranks and not rank.capture:
        from .. import profiler

        session = profiler.ProfilerSession(
            rank.spec.profile,
            rank=rank.rank,
            world_size=rank.world_size,
            folder=None if rank.job else Path(profiler.FOLDER),
            note=process_channel().send,
            upload=uploader(rank.job) if rank.job else None,
        )
        closers.insert(0, session.close)
    return closers


def _upload_outputs(job: str, folder: Path, since: float) -> None:
    uploaded, skipped = upload_output_files(folder, since, uploader(job))
    if uploaded:
        process_reporter().note("info", uploaded)
    if skipped:
        process_reporter().note("warning", skipped)


def _end(closers: Sequence[Callable[[], None]], *, well: bool) -> None:
    if "torchrelay.clients.training.checkpointing.checkpoints" in sys.modules:  # else there are none
        from ..checkpointing.checkpoints import wait_for_all

        wait_for_all(_SAVE_SECONDS if well else _SAVE_SECONDS_FAILED)
    for close in closers:
        close()
    process_reporter().end()
    process_channel().close()


if __name__ == "__main__":
    # The script replaces __main__, so the module is imported under its own name, as the script would import it.
    from torchrelay.clients.training.rank import main as _rank

    sys.exit(_rank.main(sys.argv[1:]))
