"""The one rank of an export job: `python -m torchrelay.clients.exporting.rank_main OPTIONS`, ExportOptions as JSON.

Its working directory is the job's, with the submitter's code. Files that agree with eager become the job's files; an
export that fails stores none.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...compiler import decoding
from ...compiler.errors import RelayError, SettingsError
from ..gateway.jobs import TrainingJobsClient
from ..settings import load_settings
from ..training.rank_environment import load_rank
from .export import export
from .options import JOB_SCHEME, ExportOptions


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        (text,) = arguments
        options = decoding.from_json(text, type=ExportOptions)
    except (ValueError, msgspec.MsgspecError) as error:
        print(f"exporting.rank_main takes ExportOptions as JSON: {error}", file=sys.stderr)
        return 2
    rank = load_rank()
    try:
        with tempfile.TemporaryDirectory(prefix="torchrelay-export-") as made:
            place = _place(options.checkpoint, rank.checkpoints)
            export(msgspec.structs.replace(options, checkpoint=place), Path(made), say=_say)
            with TrainingJobsClient(load_settings()) as trains:
                for file in sorted(Path(made).iterdir()):
                    trains.put_file(rank.job, file.name, file.read_bytes())
    except RelayError as error:
        print(f"torchrelay export: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _place(checkpoint: str, own: str) -> str:
    """The path of another job's checkpoints: next to the folder of this job."""
    if not checkpoint.startswith(JOB_SCHEME):
        return checkpoint
    if not own:
        raise SettingsError(f"{checkpoint} is known only to the service", hint="Name the folder")
    return str(Path(own).parent.parent / checkpoint.removeprefix(JOB_SCHEME) / Path(own).name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
