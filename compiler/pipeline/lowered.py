"""Stages 7 to 9 for a request that names levels: the graph's texts at these levels, as an unsigned artifact.

Nothing that was compiled is run, and nothing of it is in the artifact. A client reads the texts.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import torch

from ..api import compiles, lowered
from ..artifact import container
from ..artifact import manifest as artifact_manifest
from ..errors import RelayError
from ..graph.ambient import apply_ambient
from ..graph.configuration import options_of
from ..graph.encode import encode_graph
from ..request import schema
from ..search.in_compile import StageClock
from ..torch_internals import compatibility, cpp, patching
from ..torch_internals.dynamo import symbolic_shapes, tracing
from ..torch_internals.dynamo.types import OpOverload
from ..torch_internals.inductor import config, levels
from ..torch_internals.triton import compile_workers, extensions
from . import inductor, rebuilt_graph

_TRACED = {"joint", "forward", "backward"}
_GENERATED = {*levels.GENERATED, "assembly", "ptx", "sass"}
_SECONDS = 120.0


def lower_request(
    request: schema.GraphRequest,
    *,
    key: str,
    worker: str,
    workdir: Path,
    progress: Callable[[compiles.Stage, str], None],
    threads: int = 0,
) -> bytes:
    """Lower a checked request to its `levels`, into an unsigned artifact file with one member. Arguments as for
    pipeline.compile_request. Raises CompileFailed, Unsupported."""
    compatibility.check("load", "capture", "compile")
    clock = StageClock(progress)
    clock.enter("aot", "")
    threads = threads or len(os.sched_getaffinity(0))
    with (
        inductor.full_gpu_is_no_failure(),
        patching.cache_folders(workdir),
        compile_workers.compile_workers(request.target.kind, threads),
    ):
        data = msgspec.msgpack.encode(_Lowerer(request, workdir, threads, clock).run())
    clock.enter("publish", "")
    manifest = artifact_manifest.Manifest(
        schema=schema.SCHEMA,
        key=key,
        toolchain=request.toolchain,
        target=request.target,
        members=[container.member(lowered.MEMBER, data)],
        guards=[],
        stages=clock.seconds(),
        verification=artifact_manifest.Verification(
            "skipped", "texts to look at, which nobody runs", 0.0, 0.0
        ),
        tuning=[],
        kernels=0,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        worker=worker,
    )
    return container.pack(manifest, {lowered.MEMBER: data})


class _Lowerer:
    """One request's levels."""

    def __init__(self, request: schema.GraphRequest, workdir: Path, threads: int, clock: StageClock) -> None:
        self._request = request
        self._workdir = workdir
        self._threads = threads
        self._clock = clock
        self._parts: dict[str, list[lowered.LoweredPart]] = {name: [] for name in request.levels}
        self._missing: dict[str, str] = {}
        self._calls = lowered.Calls()

    def run(self) -> lowered.Lowering:
        wanted = set(self._request.levels)
        if wanted & {"captured", "core_aten", "prims"}:
            with self._rebuilt() as rebuilt:
                self._add("captured", "captured", rebuilt)
                if wanted & {"core_aten", "prims"}:
                    self._decompose(rebuilt)
        if wanted & (_TRACED | _GENERATED):
            with self._rebuilt() as rebuilt:
                self._compile(rebuilt)
        return lowered.Lowering(
            [
                lowered.LoweredLevel(name, parts, self._why_missing(name) if not parts else "")
                for name in get_args(schema.Level)
                if (parts := self._parts.get(name)) is not None
            ],
            self._calls,
        )

    @contextlib.contextmanager
    def _rebuilt(self) -> Iterator[rebuilt_graph.RebuiltGraph]:
        """The graph with marked nodes, and what Dynamo has around a back end. Raises as a compile does."""
        rebuilt = rebuilt_graph.rebuild(self._request)
        levels.mark_nodes(rebuilt.gm)
        with contextlib.ExitStack() as stack:
            stack.enter_context(config.aot_config(dict(self._request.aot_options)))
            stack.enter_context(cpp.cpu_target(self._request.target))
            stack.enter_context(tracing.tracing_context(rebuilt.fake_mode))
            stack.enter_context(apply_ambient(self._request.ambient))
            try:
                yield rebuilt
            except Exception as error:
                raise inductor.failure(error) from error

    def _decompose(self, rebuilt: rebuilt_graph.RebuiltGraph) -> None:
        def record(name: str, gm: torch.fx.GraphModule) -> None:
            self._add("core_aten", name, rebuilt, gm, levels.is_not_core)
            if "prims" in self._parts:
                self._add("prims", name, rebuilt, levels.trace_prims(gm), levels.is_no_prim)

        self._calls = lowered.Calls(*levels.trace_core_aten(rebuilt.gm, rebuilt.inputs, record))

    def _compile(self, rebuilt: rebuilt_graph.RebuiltGraph) -> None:
        def record(name: str, gm: torch.fx.GraphModule) -> None:
            self._clock.enter("inductor", name)
            self._add(name, name, rebuilt, gm)

        folder = self._workdir / "trace" if _GENERATED & self._parts.keys() else None
        with contextlib.ExitStack() as stack:
            libraries = stack.enter_context(cpp.recording_cpp_libraries(self._request.target))
            if "assembly" not in self._parts:
                stack.enter_context(cpp.without_cpp_builds())
            options = options_of(self._request, self._threads)
            texts = levels.lower_with_inductor(rebuilt.gm, rebuilt.inputs, options, folder, record)
            built = {source: path for _, source, path in libraries.files()}
        for level, by_part in texts.by_level.items():
            for name, text in by_part.items():
                self._add_text(level, name, text)
        kernels = {name: built[source] for name, source in texts.kernels.items() if source in built}
        self._add_kernels("assembly", _disassembled, kernels, texts)
        for level, read in (("ptx", Path.read_text), ("sass", _sass)):
            files = sorted(self._workdir.rglob("*.ptx" if level == "ptx" else "*.cubin"))
            self._add_kernels(level, read, {path.stem: path for path in files}, texts)

    def _add_kernels(
        self, level: str, read: Callable[[Path], str], kernels: dict[str, Path], texts: levels.InductorTexts
    ) -> None:
        if level not in self._parts:
            return
        comment = "//" if level == "ptx" else "#"
        for name, path in kernels.items():
            try:
                text = read(path)
            except (OSError, subprocess.SubprocessError) as error:
                self._missing[level] = f"{type(error).__name__}: {error}"
                return
            lines = [comment + line.removeprefix("#") for line in texts.lines.get(name, [])]
            self._add_text(level, name, "\n".join([*lines, text]))

    def _add(
        self,
        level: str,
        name: str,
        rebuilt: rebuilt_graph.RebuiltGraph,
        gm: torch.fx.GraphModule | None = None,
        lacks: Callable[[OpOverload], bool] = lambda operator: False,
    ) -> None:
        """Add an FX graph, by default the rebuilt one, if the level is wanted."""
        if level not in self._parts:
            return
        gm = gm or rebuilt.gm
        nodes = list(gm.graph.nodes)
        positions = {node: position for position, node in enumerate(nodes)}
        operators, left = levels.operators_of(gm, lacks)
        symbols = {
            symbol: name
            for name, value in rebuilt.symbols.items()
            if (symbol := symbolic_shapes.sym_symbol(value)) is not None
        }
        try:
            encoded, note = encode_graph(levels.unannotated(gm), symbols=symbols), ""
        except RelayError as error:
            encoded, note = None, error.message
        self._parts[level].append(
            lowered.LoweredPart(
                name=name,
                text=levels.readable(gm),
                graph=None if encoded is None else encoded.graph,
                constants=[] if encoded is None else encoded.constants,
                names=[node.name for node in nodes],
                targets=[levels.target_of(node) for node in nodes],
                inputs=[[positions[each] for each in node.all_input_nodes] for node in nodes],
                sources=[levels.label_of(node) for node in nodes],
                operators=operators,
                left=left,
                note=note,
            )
        )

    def _add_text(self, level: str, name: str, text: str) -> None:
        if level in self._parts:
            text = text.replace(str(self._workdir), "")
            self._parts[level].append(lowered.LoweredPart(name=name, text=text))

    def _why_missing(self, level: str) -> str:
        if level in self._missing:
            return self._missing[level]
        if level in ("joint", "backward"):
            return "no gradients are computed"
        if level in ("ptx", "sass") and self._request.target.kind != "cuda":
            return "the graph runs on a CPU"
        return "the graph has no such kernel"


_FUNCTION = re.compile(r"^[0-9a-f]+ <(\w*kernel\w*|kernel[\w.]*)(\(.*\))?>:\n(?:.+\n)*", re.MULTILINE)


def _disassembled(library: Path) -> str:
    """The machine code of a C++ kernel and its threads' functions; without that of the library's start and of Python's
    call."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", "-M", "intel", "-j", ".text"]
    listing = _output([*command, str(library)])
    return "\n".join(found[0] for found in _FUNCTION.finditer(listing)) or listing


def _sass(binary: Path) -> str:
    """Triton brings nvdisasm along."""
    return _output([extensions.nvdisasm() or "nvdisasm", str(binary)])


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
