"""`torchrelay export module:function`: a trained model as files that run without Python, each checked beside eager."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ...compiler.errors import SettingsError
from ..training.export_records import FORMATS, TARGETS, Exported, ExportOptions, read_dynamic
from . import output
from .output import Namespace


def export(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns (model, example inputs) or (model, example inputs, dynamic shapes).",
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
    folder: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for the files; made if it is not there.")
    ] = Path("exported"),
    local: Annotated[
        bool, typer.Option("--local", help="Compile here, without the service; needs a C++ compiler.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print export.json, for programs.")] = False,
    namespace: Namespace = "",
) -> None:
    """Export a trained model as AOTInductor packages (.pt2), TorchScript, or both, compiled on the service's workers.

    The working directory goes along, as for `torchrelay train`. Every file was run beside eager on several inputs, at
    the least and the largest sizes, before it is written; export.json tells the differences.
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
        from ..training.export import export as made_here

        folder.mkdir(parents=True, exist_ok=True)
        exported = made_here(options, folder, say=say)
    else:
        exported = _job(options, folder, namespace, say)
    if json:
        output.print_json(exported)
    else:
        print(f"{len(exported.files)} file{'s' * (len(exported.files) != 1)} in {folder}")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _options(**fields: Any) -> ExportOptions:
    """Raises SettingsError, which names the option."""
    try:
        return msgspec.convert({k: msgspec.to_builtins(v) for k, v in fields.items()}, ExportOptions)
    except msgspec.ValidationError as error:
        hint = (
            f"Targets are {', '.join(TARGETS)}; formats {', '.join(FORMATS)}; a function is `module:function`"
        )
        raise SettingsError(f"this cannot be exported: {error}", hint=hint) from None


def _job(options: ExportOptions, folder: Path, namespace: str, say: Any) -> Exported:
    raise SettingsError("export as a job is not there yet", hint="Add --local")
