"""`torchrelay capture train.py`: a script's compiled graphs into a file, for a batch job; nothing is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...compiler.api.html.page import plural
from ..jobfiles.captured_graphs import write_graphs


def capture(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="What `python SCRIPT` would run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after `--`.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; an existing one is replaced.")
    ] = Path("captured.graphs"),
    mode: Annotated[
        str, typer.Option(help="torch.compile's mode for all graphs; default: the script's own.")
    ] = "",
) -> None:
    """Run a script up to its first optimizer step, and write the graphs that torch.compile was given into a file.

    Name the file in a job (`graphs: [{file: captured.graphs}]`). Run it where the script trains: the graphs are for
    this machine's device and versions.
    """
    from ..training.graph_capture.script_graphs import capture_script

    found = capture_script(script, arguments or [], mode=mode)
    for skipped in found.skipped:
        print(f"left out: {skipped}", file=sys.stderr)
    write_graphs(output, found.bodies)
    print(f"captured {plural(len(found.bodies), 'graph')} into {output} ({found.ended})")
