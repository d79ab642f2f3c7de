"""`torchrelay lower train.py`: a script's graphs at any level between FX and machine code, with the script's lines."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...compiler.api.html.page import plural
from ...compiler.api.lowered import NodeSources
from ...compiler.api.runs import RunRecord
from ...compiler.errors import SettingsError
from ...compiler.request import codec
from ..atomic_file import file_errors, write_atomically
from ..gateway.compile_client import GatewayClient
from ..settings import load_settings

if TYPE_CHECKING:
    from ..artifacts.lowered import LoweredGraph

_FORMATS = ("text", "json", "folder")
_AT_ONCE = 4
"""Graphs that are asked for at once."""


def lower(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="What `python SCRIPT` would run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after `--`.")
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            "--level", help="May be repeated; `all` for all of them. Default: prims. See docs/levels.md."
        ),
    ] = None,
    format: Annotated[str, typer.Option(help=f"{', '.join(_FORMATS)}: as tlparse writes one.")] = "text",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file or folder to write; default: print it.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="torch.compile's mode for all graphs; default: the script's own.")
    ] = "",
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Tell the gateway the script's lines and modules, for its pages with the graphs."
        ),
    ] = False,
) -> None:
    """Run a script up to its first optimizer step, and list the graphs that torch.compile was given.

    The service's workers lower them; nothing is trained. Levels, from the program to the machine: captured, joint,
    forward, backward, core_aten, prims, post_grad, ir_before_fusion, ir_after_fusion, diagram, code, assembly, ptx,
    sass.
    """
    from ..artifacts import lowered
    from ..training.graph_capture.script_graphs import record_script

    if format not in _FORMATS or (format == "folder" and output is None):
        raise SettingsError(
            f"--format is {format[:40]!r}", hint=f"Allowed: {', '.join(_FORMATS)}; a folder needs --output"
        )
    wanted = lowered.checked_levels(lowered.LEVELS if level == ["all"] else level or ["prims"])
    recorder, ended = record_script(script, arguments or [], mode=mode)
    for skipped in recorder.skipped:
        print(f"left out: {skipped}", file=sys.stderr)
    source = lowered.level_source()

    def obtain(key: str) -> LoweredGraph:
        request = codec.unpack_request(recorder.found[key])
        return lowered.obtain_request(source, request, wanted, recorder.lines[key])

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        graphs = list(pool.map(obtain, recorder.found))
    if format == "folder":
        assert output is not None
        _write_folder(output, graphs)
    else:
        text = _json(graphs) if format == "json" else _text(graphs)
        if output is None:
            print(text, end="")
        else:
            _write(output, text)
    if output is not None:
        print(f"lowered {plural(len(graphs), 'graph')} into {output} ({ended})")
    if share:
        found = zip(recorder.lines.values(), recorder.modules.values(), strict=True)
        _share(script, graphs, [lowered.sources_of(*each) for each in found])


def _share(script: Path, graphs: list[LoweredGraph], sources: list[NodeSources]) -> None:
    """Tell of a run for each graph, so that a large script has room; print where each is shown."""
    settings = load_settings()
    with GatewayClient(settings) as gateway:
        for graph, each in zip(graphs, sources, strict=True):
            told, now = {graph.key: each}, time.time()
            gateway.record_run(RunRecord(program=script.name, pid=os.getpid(), ended=now, sources=told))
            print(f"{settings.url}/artifacts/{graph.key}/graph", file=sys.stderr)


def _text(graphs: list[LoweredGraph]) -> str:
    return "\n".join(
        f"# ==== graph {position}, {level.name} ====\n{graph.text(level.name)}"
        for position, graph in enumerate(graphs)
        for level in graph.levels
    )


def _json(graphs: list[LoweredGraph]) -> str:
    """With Infinity and NaN, which Python reads, and msgspec would write as null."""
    return json.dumps(msgspec.to_builtins([graph.lowering for graph in graphs]), indent=2) + "\n"


# --- a folder as tlparse writes it ---------------------------------------------------------------------------------

_NAMES = {
    "captured": "dynamo_output_graph",
    "joint": "aot_joint_graph",
    "forward": "aot_forward_graph",
    "backward": "aot_backward_graph",
    "post_grad": "inductor_post_grad_graph",
    "ir_before_fusion": "inductor_pre_fusion_ir",
    "ir_after_fusion": "inductor_post_fusion_ir",
    "code": "inductor_output_code",
}
_ENDINGS = {"diagram": "dot", "code": "py", "assembly": "s", "ptx": "ptx", "sass": "sass"}


def _write_folder(folder: Path, graphs: list[LoweredGraph]) -> None:
    """A folder for each compile, one file for each part, numbered as they come, and compile_directory.json, which lists
    them."""
    directory: dict[str, dict[str, object]] = {}
    for position, graph in enumerate(graphs):
        name = f"-_{position}_0_0"
        artifacts = []
        parts = [(level.name, part) for level in graph.levels for part in level.parts]
        for number, (level, part) in enumerate(parts):
            kind = _NAMES.get(level, level)
            suffix = "" if part.name == level or level in ("joint",) else f"_{part.name}"
            file = f"{kind}{suffix}_{number}.{_ENDINGS.get(level, 'txt')}"
            _write(folder / name / file, part.text)
            artifacts.append({"name": file, "url": f"{name}/{file}", "number": number, "suffix": ""})
        directory[f"[{position}/0]"] = {"artifacts": artifacts, "links": []}
    _write(folder / "compile_directory.json", msgspec.json.encode(directory).decode())


def _write(path: Path, text: str) -> None:
    with file_errors(path, "written", hint="Check the folder and its permissions"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode(), mode=0o644)
