"""`torchrelay export module:function`: a trained model as files that run without Python, each compared with eager."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ...compiler import decoding
from ...compiler.api.training.events import LogLines, NumberedEvent
from ...compiler.errors import ExportFailed, SettingsError
from ..exporting import service_job
from ..exporting.options import FORMATS, TARGETS, ExportOptions, read_dynamic
from ..gateway.jobs import TrainingJobsClient
from ..reports.html_page import plural
from . import output
from .job_screen import watch_job
from .output import Namespace, OutputFolder
from .training.run import read_requirements


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
        bool, typer.Option("--local", help="Compile here, without the service; needs a C++ compiler.")
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
    """Export a trained model as AOTInductor packages (.pt2), TorchScript, or both, compiled on the service's workers.

    The working directory goes along, as for `torchrelay train`. Every file is compared with eager on several inputs, at
    the least and the largest sizes, before it is written; export.json has the differences.
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
            job = service_job.begin(trains, options, directory, cpus=cpus, requirements=listed)
            print(f"job {job.id}", file=sys.stderr)
            watch_job(trains, job.id, _RankOutput(), json=json, plain=True)
            ended = trains.job(job.id)
            if ended.state != "done":
                raise ExportFailed(
                    f"{job.id} {ended.state}: {ended.detail}",
                    hint=f"`torchrelay train logs {job.id}` prints all its output",
                )
            exported = service_job.fetch(trains, job.id, folder)
    output.print_answer(exported, f"{plural(len(exported.files), 'file')} in {folder}", json=json)


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
        raise SettingsError(f"this cannot be exported: {error}", hint=hint) from None
