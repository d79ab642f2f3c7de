"""`torchrelay train job.yaml` and `torchrelay train script.py -- ARGUMENTS`: start a job and watch it to its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ....compiler.api.html.page import plural
from ....compiler.api.training.jobs import TRAIN_ENDED, TrainJob, TrainRequest
from ....compiler.errors import BadTrainJob, SettingsError
from ...atomic_file import file_errors
from ...gateway.jobs import TrainingJobsClient
from ...jobfiles import train_file
from ...jobfiles.working_directory import IGNORE_FILE, pack_directory
from .. import output
from ..output import Detach, Json, Namespace
from .progress import ProgressDisplay, compiles_text
from .watch import YAML, watch_job


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A job's file (YAML, docs/training.md), a script, or module:function."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after `--`.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Ranks; default 1.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of ranks, each with a GPU.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Cores of each rank; default 1.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each rank, like 16GiB.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default) or cuda.")] = None,
    min_workers: Annotated[
        int | None, typer.Option(help="After a loss, continue with as few as this many ranks.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, tf32, bf16 or fp16; default: the script's.")
    ] = None,
    retries: Annotated[int | None, typer.Option(help="Restarts after failures; default 3.")] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="A folder that all nodes see, or an object store's URL.")
    ] = None,
    requirements: Annotated[
        Path | None, typer.Option(help="A requirements.txt that nodes install for the job.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the ranks; may be repeated.")] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            help="The working directory, which is sent; default: the current one, or the file's folder."
        ),
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Steps for PyTorch's profiler: steps=10:15.")] = None,
    profile_ranks: Annotated[str | None, typer.Option(help="Ranks to profile, like 0,1; default 0.")] = None,
    profile_nvtx: Annotated[bool, typer.Option("--profile-nvtx", help="Also emit NVTX ranges.")] = False,
    timeout: Annotated[
        str | None, typer.Option(help="Limit of the running time, like 90s, 10m or 2h; default: none.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The job's name; default: the file's.")] = None,
    no_capture: Annotated[
        bool, typer.Option("--no-capture", help="Do not compile before ranks are placed.")
    ] = False,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Do not change torch.compile's back end.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search kernels too, before ranks are placed.")
    ] = False,
    detach: Detach = False,
    json: Json = False,
    namespace: Namespace = "",
) -> None:
    """Start a training job and watch it (`torchrelay train TARGET`); Ctrl-C leaves it running.

    This runs your code on the cluster's nodes, as their user.
    """
    given: dict[str, Any] = {
        "workers": gpus if gpus is not None else workers,
        "device": "cuda" if gpus is not None and device is None else device,
        "cpus": cpus,
        "memory": memory,
        "min_workers": min_workers,
        "precision": precision,
        "retries": retries,
        "checkpoints": checkpoints,
        "requirements": None if requirements is None else read_requirements(requirements),
        "environment": None if not env else _environment(env),
        "profile": _profile(profile, profile_ranks, nvtx=profile_nvtx),
        "timeout": timeout,
        "name": name,
        "arguments": arguments or None,
        "capture": False if no_capture else None,
        "compile": "off" if no_compile else None,
        "tune": True if tune else None,
    }
    if gpus is not None and workers not in (None, gpus):
        raise SettingsError(
            f"--gpus is {gpus} and --workers {workers}", hint="A rank has one GPU: give one of them"
        )
    job, folder = _job(target, directory, {each: value for each, value in given.items() if value is not None})
    with output.connect(TrainingJobsClient, namespace) as trains:
        begun = trains.begin(_request(job, folder, trains))
        if detach:
            output.print_answer(begun, begun.id, json=json)
        else:
            watch(trains, begun, json=json)


def _job(
    target: str, directory: Path | None, options: dict[str, Any]
) -> tuple[train_file.TrainFileJob, Path]:
    """The job, and the folder that its directory is relative to."""
    path = Path(target)
    if path.suffix in YAML:
        if directory is not None:
            options["directory"] = str(directory.absolute())
        return train_file.load(path, options), path.parent
    if ":" in target and not path.exists():
        options["function"], name = target, target.partition(":")[0]
        where = directory or Path()
    else:
        name, script = path.stem, path.parent.resolve() / path.name
        where = directory or (Path() if script.is_relative_to(Path.cwd().resolve()) else path.parent)
        if not script.is_relative_to(where.resolve()):
            raise SettingsError(f"{path} is not in {where}", hint="Name a --directory with the script in it")
        options["script"] = script.relative_to(where.resolve()).as_posix()
    return train_file.of_options({**options, "directory": str(where)}, name=options.get("name", name)), Path()


def read_requirements(file: Path) -> list[str]:
    with file_errors(file, "read", hint="Name a requirements.txt"):
        lines = file.read_text().splitlines()
    return [line for text in lines if (line := text.partition(" #")[0].strip()) and not line.startswith("#")]


def _environment(texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"--env is {text[:80]!r}", hint="Allowed: NAME=VALUE")
        found[name] = value
    return found


def _profile(steps: str | None, ranks: str | None, *, nvtx: bool) -> dict[str, Any] | None:
    if steps is None:
        if ranks is not None or nvtx:
            raise SettingsError("a profile has no steps", hint="Add --profile steps=10:15")
        return None
    found: dict[str, Any] = {"steps": steps, "nvtx": nvtx}
    if ranks is not None:
        found["ranks"] = ranks.split(",")
    return found


def _request(job: train_file.TrainFileJob, folder: Path, trains: TrainingJobsClient) -> TrainRequest:
    """Sends the working directory and returns the job's request. folder: `directory` is relative to it. Raises
    BadTrainJob, with the line; LimitExceeded for a directory that is too large."""
    where = folder / Path(job.directory).expanduser()
    if not where.is_dir():
        raise _wrong(job, "package", f"directory is {job.directory[:200]!r}, and {where} is not a folder")
    script = job.spec.script
    if script and not (where / script).is_file():
        raise _wrong(job, "script", f"script is {script[:200]!r}, and {where} has no such file")
    package = pack_directory(where)
    if script and script not in package.names:
        raise _wrong(job, "script", f"script is {script[:200]!r}, which {IGNORE_FILE} excludes")
    spec = msgspec.structs.replace(job.spec, package=trains.store_package(package.data))
    return TrainRequest(spec=spec, file=job.file[-300:], lines=job.lines)


def _wrong(job: train_file.TrainFileJob, field: str, message: str) -> BadTrainJob:
    line = job.lines.get(field, 0)
    at = f"{job.file}, line {line}" if line else job.file or "the command line"
    return BadTrainJob(f"{at}: {message}")


# --- watching ----------------------------------------------------------------------------------------------


def watch(trains: TrainingJobsClient, job: TrainJob, *, after: int = 0, json: bool = False) -> None:
    """Show a job until its end. Exits with 1 if it failed or was cancelled, 130 after Ctrl-C."""
    if not json:
        ranks = plural(job.spec.workers, "rank")
        print(f"job {job.id}: {output.shown(job.spec.name)}, {ranks}", file=sys.stderr)
    display = ProgressDisplay(state=job.state)
    watch_job(trains, job.id, display, after=after, json=json)
    ended = trains.job(job.id)
    output.print_answer(ended, output.shown(_summary(ended)), json=json)
    if ended.state != "done":
        raise typer.Exit(1)


def _summary(job: TrainJob) -> str:
    detail = f": {job.detail}" if job.detail else ""
    seconds = f", {job.ended - job.started:.0f} s" if job.ended and job.started else ""
    first = f", first step after {job.first_step_seconds:.1f} s" if job.first_step_seconds else ""
    restarts = f", {plural(job.restarts, 'restart')}" if job.restarts else ""
    said = f"{job.id} is {job.state}{detail}; step {job.step}{seconds}{first}{restarts}; {compiles_text(job.compiles)}"
    resumable = job.state in TRAIN_ENDED and job.state != "done"
    return f"{said}; `torchrelay train resume {job.id}`" if resumable else said
