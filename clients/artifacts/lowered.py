"""A graph at the levels that the service lowers it through, with the program's own lines: to read, or for a back end of
one's own, which gets core ATen operators or prims and compiles these itself.

A lowering is an artifact like any other: by key in the cache and on the disk, signed, and read as data only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch

from ...compiler import decoding
from ...compiler.api.lowered import MEMBER, LoweredLevel, LoweredPart, Lowering, NodeSources
from ...compiler.errors import ArtifactError, SettingsError, Unsupported
from ...compiler.graph.capture import capture
from ...compiler.graph.captured_graph import CapturedGraph
from ...compiler.graph.configuration import Mode
from ...compiler.graph.decode import decode_graph
from ...compiler.request import codec, schema
from ...compiler.request.key import key_of
from ...compiler.torch_internals.inductor import config
from ...compiler.torch_internals.inductor import levels as marks
from ..reports.run_report import process_report
from ..settings import load_settings
from .source import ArtifactRequest, LocalSource
from .verification import VerifiedArtifact

LEVELS: tuple[schema.Level, ...] = get_args(schema.Level)
_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)(?:\n {4}(.*))?')
_HOLDER = re.compile(r"^[LG]\['\w+'\]")
_SECONDS = 60.0
_log = logging.getLogger(__name__)
_PYTORCH = f"{torch.__path__[0]}/"


class LoweredGraph:
    """One graph's lowering. `levels`: those that were wanted, in order."""

    def __init__(self, lowering: Lowering, captured: CapturedGraph, key: str) -> None:
        self.key = key
        self.lowering = lowering
        self._captured = captured

    @property
    def levels(self) -> list[LoweredLevel]:
        return self.lowering.levels

    @property
    def inputs(self) -> list[str]:
        """The kind of each input: tensor, symint (a size) or scalar."""
        return [str(type(spec).__struct_config__.tag) for spec in self._captured.request.inputs]

    @property
    def mutated(self) -> list[int]:
        """Positions of the inputs of which the forward at core_aten and prims returns new values, before its
        results."""
        return self.lowering.calls.mutated

    @property
    def outputs(self) -> int:
        """The number of these results; what the backward needs comes after them."""
        return self.lowering.calls.outputs

    def part(self, level: str, name: str = "forward") -> LoweredPart:
        """Raises Unsupported if the graph has none."""
        for found in self.levels:
            for part in found.parts if found.name == level else ():
                if part.name == name:
                    return part
        reason = next((found.missing for found in self.levels if found.name == level), "it was not asked for")
        raise Unsupported(f"there is no {name} at level {level}: {reason}")

    def graph_module(self, level: str, name: str = "forward") -> torch.fx.GraphModule:
        """A level that is an FX graph, as one that can be interpreted or compiled. Raises Unsupported."""
        part = self.part(level, name)
        if part.graph is None:
            raise Unsupported(f"{level} has no graph: {part.note or 'it is a text'}")
        index = self._captured.device_index
        gm = decode_graph(
            part.graph,
            part.constants,
            device_index={} if index is None else {"cuda": index},
            symbols=self._captured.symints,
        )
        for node, name_of_node, label in zip(gm.graph.nodes, part.names, part.sources, strict=True):
            node._rename(name_of_node)
            if line := self.lowering.lines.get(label):
                node.meta["source_line"] = line
        gm.recompile()
        return gm

    def text(self, level: str) -> str:
        """All parts of a level, one after the other."""
        found = next(found for found in self.levels if found.name == level)
        if not found.parts:
            return f"# {found.missing}\n"
        return "\n".join(f"# {part.name}\n{_headed(part)}" for part in found.parts)

    def text_of(self, level: str, name: str) -> str:
        """One part; '' if the graph has none."""
        with contextlib.suppress(Unsupported):
            return self.part(level, name).text
        return ""


def _headed(part: LoweredPart) -> str:
    left = ", ".join(f"{name} ({count})" for name, count in part.left.items())
    return (f"# not decomposed: {left}\n" if left else "") + part.text


def lower(
    model: Callable[..., Any],
    *inputs: Any,
    level: str | Collection[str] = "prims",
    mode: Mode = "default",
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **keywords: Any,
) -> list[LoweredGraph]:
    """Call `model` with `inputs` and `keywords`, once and eagerly, and lower each of its graphs to `level`, or to
    several. mode, options, dynamic: torch.compile's own.

    Raises SettingsError for an unknown level, and RelayError for what the service cannot lower.
    """
    found: list[LoweredGraph] = []
    wanted = checked_levels(level)

    def record(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        found.append(lower_graph(gm, examples, level=wanted, mode=mode, options=options))
        return gm.forward

    torch.compile(model, backend=record, dynamic=dynamic)(*inputs, **keywords)
    return found


def lower_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    level: str | Collection[str] = "prims",
    mode: Mode = "default",
    options: Mapping[str, Any] | None = None,
) -> LoweredGraph:
    """Lower a graph that Dynamo hands to a back end. Raises as `lower`."""
    wanted = checked_levels(level)
    captured = capture(gm, example_inputs, mode=mode, options=dict(options or {}))
    return obtain(level_source(), captured, wanted, source_lines(captured))


def checked_levels(level: str | Collection[str]) -> list[schema.Level]:
    """Sorted. Raises SettingsError."""
    names = {level} if isinstance(level, str) else set(level)
    if not names or names - set(LEVELS):
        unknown = ", ".join(sorted(names - set(LEVELS))) or "none"
        raise SettingsError(f"level {unknown}"[:80], hint=f"Levels are {', '.join(LEVELS)}")
    return sorted(name for name in LEVELS if name in names)


def level_source() -> LocalSource:
    """Where this process obtains lowerings: its disk, then the gateway. Raises SettingsError."""
    return LocalSource(load_settings(), process_report(), None)


def obtain(
    source: LocalSource, captured: CapturedGraph, levels: Sequence[schema.Level], lines: Mapping[str, str]
) -> LoweredGraph:
    """Raises RelayError."""
    request = msgspec.structs.replace(captured.request, levels=list(levels))
    captured = msgspec.structs.replace(captured.without_inputs(), request=request)
    canonical = codec.encode_request(request)
    wanted = ArtifactRequest(captured, canonical, key_of(request, canonical))

    def as_it_is(artifact: VerifiedArtifact) -> VerifiedArtifact:
        return artifact

    artifact = source.at_hand(wanted, as_it_is) or source.answered(source.submit(wanted), wanted)
    return LoweredGraph(_with_lines(_read(artifact), lines), captured, wanted.key)


def obtain_request(
    source: LocalSource,
    request: schema.GraphRequest,
    levels: Sequence[schema.Level],
    lines: Mapping[str, str],
) -> LoweredGraph:
    """`obtain` for a graph that was captured before. Its symbolic sizes have no values. Raises RelayError."""
    return obtain(source, CapturedGraph(request, {}, None, False), levels, lines)


def _read(artifact: VerifiedArtifact) -> Lowering:
    try:
        return decoding.from_msgpack(artifact.opened.members[MEMBER], type=Lowering)
    except (KeyError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"the artifact has no lowering: {error}") from None


# --- what Inductor writes for `trace.enabled` ---------------------------------------------------------------------

_TRACED: dict[str, schema.Level] = {
    "fx_graph_transformed": "post_grad",
    "ir_pre_fusion": "ir_before_fusion",
    "ir_post_fusion": "ir_after_fusion",
    "graph_diagram": "diagram",
    "output_code": "code",
}
_written = itertools.count()


def write_trace(source: LocalSource, captured: CapturedGraph, trace: config.TraceOptions) -> None:
    """Write the files of a graph that was served, where Inductor writes them for one that it compiles. Never raises:
    what cannot be written is logged."""
    wanted = {_TRACED[entry] for entry in trace.files if entry in _TRACED}
    wanted |= {"forward", "backward"} if "fx_graph" in trace.files else set()
    number = next(_written)
    try:
        graph = obtain(source, captured, checked_levels(wanted), source_lines(captured))
        for part in ("forward", "backward"):
            texts = {
                file: text
                for entry, file in trace.files.items()
                if (text := graph.text_of(_TRACED.get(entry, part), part))
            }
            folder = (
                config.trace_folder(f"model__{number}_{part}_{number}", trace.debug_dir) if texts else None
            )
            for file, text in texts.items() if folder else ():
                _write_drawn(Path(folder or "") / file, text)
            if folder:
                _log.warning("torchrelay: debug trace of graph %s: %s", graph.key[:12], folder)
    except Exception as error:  # the graph itself is served
        _log.warning("torchrelay: no debug trace: %s", error)


def _write_drawn(path: Path, text: str) -> None:
    """A diagram is drawn by Graphviz; where that is not installed, its text is written."""
    ending = path.suffix.removeprefix(".")
    if path.stem != "graph_diagram" or ending == "dot":
        path.write_text(text)
    elif dot := shutil.which("dot"):
        subprocess.run(
            [dot, f"-T{ending}", "-o", str(path)], input=text, text=True, check=True, timeout=_SECONDS
        )
    else:
        path.with_suffix(".dot").write_text(text)


# --- the program's lines -------------------------------------------------------------------------------------------


def source_lines(captured: CapturedGraph) -> dict[str, str]:
    """`FILE:LINE in FUNCTION, code: CODE` for each node of a graph that was just captured, by its label."""
    assert captured.gm is not None
    found = ((label, _line(node)) for label, node in marks.labels(captured.gm))
    return {label: line for label, line in found if line}


def module_paths(captured: CapturedGraph) -> dict[str, str]:
    """The path of the module that called each node, by its label."""
    assert captured.gm is not None
    found = ((label, _module(node)) for label, node in marks.labels(captured.gm))
    return {label: path for label, path in found if path}


def _module(node: torch.fx.Node) -> str:
    """Without the variable that holds the outermost one."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _HOLDER.sub("", str(stack[-1][0])).strip(".") if stack else ""


def sources_of(lines: Mapping[str, str], modules: Mapping[str, str]) -> NodeSources:
    """lines, modules: by label."""
    line_at, module_at = (
        {text: at for at, text in enumerate(dict.fromkeys(each.values()))} for each in (lines, modules)
    )
    nodes = {
        label: (line_at.get(lines.get(label, ""), -1), module_at.get(modules.get(label, ""), -1))
        for label in {**lines, **modules}
    }
    return NodeSources(list(line_at), list(module_at), nodes)


def _line(node: torch.fx.Node) -> str:
    """The innermost call that is not PyTorch's own. A program without a file has no code to quote."""
    calls = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [call for call in calls if not call[0].startswith(_PYTORCH)]
    if not calls:
        return ""
    file, line, function, code = (outside or calls)[-1]
    return f"{file}:{line} in {function}, code: {code}"


def _with_lines(lowering: Lowering, lines: Mapping[str, str]) -> Lowering:
    """The lowering with the program's lines in place of the worker's marks."""

    def line(mark: re.Match[str]) -> str:
        label = f"{mark[1].strip('.')}.{mark[2]}" if mark[1] else mark[2]
        return lines.get(label, mark[0])

    replaced = [
        msgspec.structs.replace(
            level,
            parts=[
                msgspec.structs.replace(part, text=marks.MARKED_LINE.sub(line, part.text))
                for part in level.parts
            ],
        )
        for level in lowering.levels
    ]
    return msgspec.structs.replace(lowering, levels=replaced, lines=dict(lines))
