"""`torchrelay export module:function`: a trained model as files that run without Python, each compared with eager."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ...compiler import decoding
from ...compiler.api.html.page import plural
from ...compiler.api.training.events import LogLines, NumberedEvent
from ...compiler.api.training.jobs import TrainJob, TrainRequest, TrainSpec
from ...compiler.errors import ExportFailed, NotFound, SettingsError
from ..atomic_file import write_atomically
from ..exporting.options import (
    FORMATS,
    JOB_SCHEME,
    META_FILE,
    TARGETS,
    ExportManifest,
    ExportOptions,
    read_dynamic,
)
from ..gateway.jobs import TrainingJobsClient
from ..jobfiles.working_directory import pack_directory
from . import output
from .jobs.run import read_requirements
from .jobs.watch import watch_job
from .output import Namespace, OutputFolder


def export(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="module:function that returns (model, example inputs) or (model, example inputs, dynamic shapes).",
        ),
    ],
    checkpoint: Annotated[
        str,
        typer.Option(
            help="Weights: a file of torch.save, a folder of checkpoints, or the name or id of a training job."
        ),
    ] = "",
    target: Annotated[
        list[str] | None,
        typer.Option("--target", help=f"{', '.join(TARGETS)}; may be repeated. Default: cpu."),
    ] = None,
    format: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}.")] = "aoti",
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            help="A size that may vary: batch=1:64 (the first of every input) or length@tokens.1=1:128."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="What the files are called.")] = "model",
    folder: OutputFolder = Path("exported"),
    local: Annotated[
        bool,
        typer.Option("--local", help="Compile on this machine, without the service; needs a C++ compiler."),
    ] = False,
    directory: Annotated[
        Path, typer.Option(help="The working directory: it is sent, and the function runs in a copy.")
    ] = Path(),
    requirements: Annotated[
        Path | None, typer.Option(help="A requirements.txt that the node installs for the job.")
    ] = None,
    cpus: Annotated[float, typer.Option(min=0.01, help="The job's cores.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print export.json, for programs.")] = False,
    namespace: Namespace = "",
) -> None:
    """Export a trained model as AOTInductor packages (.pt2), TorchScript, both, or an ExecuTorch program (.pte).

    The service's workers compile it. The working directory goes along, as for `torchrelay train`. Every file is
    compared with eager on several inputs, at the least and the largest sizes, before it is written; export.json has the
    differences.
    """
    options = _options(
        function=function,
        name=name,
        checkpoint=checkpoint,
        targets=target or ["cpu"],
        format=format,
        dynamic=read_dynamic(dynamic or []),
    )
    say = print if not json else _to_stderr
    if local:
        from ..exporting.export import export as export_here

        folder.mkdir(parents=True, exist_ok=True)
        exported = export_here(options, folder, say=say)
    else:
        listed = read_requirements(requirements) if requirements is not None else []
        with output.connect(TrainingJobsClient, namespace) as trains:
            job = _begin(trains, options, directory, cpus=cpus, requirements=listed)
            print(f"job {job.id}", file=sys.stderr)
            watch_job(trains, job.id, _RankOutput(), json=json, plain=True)
            ended = trains.job(job.id)
            if ended.state != "done":
                raise ExportFailed(
                    f"{job.id} {ended.state}: {ended.detail}",
                    hint=f"`torchrelay train logs {job.id}` prints all its output",
                )
            exported = _fetch(trains, job.id, folder)
    output.print_answer(exported, f"{plural(len(exported.files), 'file')} in {folder}", json=json)


def _begin(
    trains: TrainingJobsClient,
    options: ExportOptions,
    directory: Path,
    *,
    cpus: float,
    requirements: Sequence[str],
) -> TrainJob:
    """A job of one rank, on a node with the target's device. `options.checkpoint` may be the name or id of a training
    job. Raises as TrainingJobsClient.begin."""
    options = msgspec.structs.replace(options, checkpoint=_checkpoint(trains, options.checkpoint, directory))
    spec = TrainSpec(
        name=f"export {options.function}"[:200],
        kind="export",
        arguments=[msgspec.json.encode(options).decode()],
        package=trains.store_package(pack_directory(directory).data),
        requirements=list(requirements),
        device="cuda" if "cuda" in options.targets else "cpu",
        cpus=cpus,
        retries=0,  # what is refused once is refused again; a lost node's job can be resumed
        compile="off",
        capture=False,
    )
    return trains.begin(TrainRequest(spec=spec))


def _checkpoint(trains: TrainingJobsClient, text: str, directory: Path) -> str:
    """The location for the node: a path in the working directory or on all nodes, a URL, or a job's checkpoints."""
    if not text or "://" in text or Path(text).is_absolute():
        return text
    if (directory / text).exists():
        return text
    try:
        job = trains.find(text)
    except NotFound:
        raise ExportFailed(
            f"{text} is neither in {directory} nor a training job",
            hint="Name a file of the working directory, a folder from / that all nodes see, or a job",
        ) from None
    return job.spec.checkpoints or f"{JOB_SCHEME}{job.id}"


def _fetch(trains: TrainingJobsClient, job: str, folder: Path) -> ExportManifest:
    """Write the files of a finished job into `folder`, export.json last. Raises ExportFailed if one is damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = decoding.from_json(trains.file(job, META_FILE), type=ExportManifest)
    known = {file.name: file.digest for file in manifest.files}
    for file in sorted(trains.files(job), key=lambda file: file.name == META_FILE):
        data = trains.file(job, file.name)
        digest = hashlib.sha256(data).hexdigest()
        if digest != file.digest or digest != known.get(file.name, digest):
            raise ExportFailed(f"{file.name} has another digest than when it was made", hint="Try again")
        write_atomically(folder / file.name, data, mode=0o644)
    return manifest


class _RankOutput:
    """What the job's one rank writes."""

    def take(self, numbered: NumberedEvent) -> list[str]:
        return numbered.event.lines if isinstance(numbered.event, LogLines) else []

    def line(self) -> str:
        return ""


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _options(**fields: Any) -> ExportOptions:
    """Raises SettingsError, which names the option."""
    try:
        return decoding.convert({k: msgspec.to_builtins(v) for k, v in fields.items()}, type=ExportOptions)
    except msgspec.ValidationError as error:
        hint = (
            f"Targets are {', '.join(TARGETS)}; formats {', '.join(FORMATS)}; a function is `module:function`"
        )
        raise SettingsError(f"this cannot be exported: {_words(error)}", hint=hint) from None


def _words(error: msgspec.ValidationError) -> str:
    """The option and its value, without the library's words."""
    value, place = re.search("value '(.*?)'", str(error)), re.search(r"`\$\.?([a-z_]*)", str(error))
    return f"{place[1]} is {value[1][:40]!r}" if value and place else str(error)
