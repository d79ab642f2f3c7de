"""Runs a training script up to its first optimizer step, and records a request for each graph it compiles.

The script runs as `python SCRIPT` would, in this process. torch.compile gives each graph to GraphRecorder, which
captures it as for a compile and runs it uncompiled. The script is stopped at the first step of an optimizer, or after
IDLE_CALLS calls of graphs without a new graph.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ....compiler.api.training.node_messages import CapturedGraphs
from ....compiler.errors import ClientError, RelayError, SettingsError
from ....compiler.graph.capture import capture
from ....compiler.graph.configuration import Mode, split_options
from ....compiler.request import codec, key, meshes
from ...artifacts.lowered import module_paths, source_lines
from ...jobfiles.captured_graphs import MAX_GRAPHS
from ...patch_compile import DEFAULT, compile_with_backend

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
IDLE_CALLS = 1000
"""Calls of graphs in a row without a new one, after which there will be none."""
BACKENDS = ("torchrelay", DEFAULT)


class StopCapture(BaseException):
    """Stops the script; no `except Exception` of its own holds it up."""


class GraphRecorder:
    """A back end that records graphs and runs them uncompiled."""

    def __init__(self, mode: str, *, unnamed: Mode = "default") -> None:
        """mode: of all graphs; '': the script's own, and `unnamed` where it names neither mode nor options."""
        self.found: dict[str, bytes] = {}
        self.lines: dict[str, dict[str, str]] = {}
        """The program's lines of each graph's nodes, by label."""
        self.modules: dict[str, dict[str, str]] = {}
        """The same of the modules that called them."""
        self.skipped: dict[str, None] = {}
        self._mode = mode
        self._unnamed = unnamed
        self._idle = 0

    def captured(self, ended: str, log: str = "") -> CapturedGraphs:
        """What was recorded, in order of first use. ended: how the script ended."""
        return CapturedGraphs(
            bodies=list(self.found.values()), skipped=list(self.skipped), ended=ended, log=log
        )

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        self._idle = 0
        try:
            chosen = cast(Mode, self._mode or mode or ("default" if options else self._unnamed))
            _, theirs = split_options(options)
            captured = capture(gm, example_inputs, mode=chosen, options=theirs)
            request, even = captured.request, captured.edges is not None and captured.edges.even
            for variant in meshes.at_all_coordinates(request) if even else [request]:
                name = key.key_of(variant)
                if name not in self.found:
                    self.found[name] = codec.pack_request(variant)
                    self.lines[name] = source_lines(captured)
                    self.modules[name] = module_paths(captured)
        except RelayError as error:
            self.skipped.setdefault(f"a graph of {len(gm.graph.nodes)} nodes: {error.message}")
        if len(self.found) >= MAX_GRAPHS:
            raise StopCapture(f"after {MAX_GRAPHS} graphs")

        def run(*args: Any) -> Any:
            self._idle += 1
            if self._idle > IDLE_CALLS:
                raise StopCapture(f"after {IDLE_CALLS} calls without a new graph")
            return gm.forward(*args)

        return run


def capture_script(script: Path, arguments: Sequence[str], *, mode: str = "") -> CapturedGraphs:
    """Raises as `record_script`."""
    recorder, ended = record_script(script, arguments, mode=mode)
    return recorder.captured(ended)


def record_script(script: Path, arguments: Sequence[str], *, mode: str = "") -> tuple[GraphRecorder, str]:
    """What was recorded, and how the script ended. Raises SettingsError; ClientError if the script ends before it has
    compiled anything; what the script raises."""
    if mode not in ("", *MODES):
        raise SettingsError(f"--mode is {mode[:40]!r}", hint=f"Allowed: {', '.join(MODES)}")
    if not script.is_file():
        raise SettingsError(f"{script} is no file", hint="Name the script that `python` would run")
    recorder = GraphRecorder(mode)
    ended = _run(script, arguments, recorder)
    if not recorder.found:
        why = next(iter(recorder.skipped), "it gave torch.compile nothing to compile")
        raise ClientError(f"{script} has no graph that can be sent: {why}", hint=f"It ended {ended}")
    return recorder, ended


def _run(script: Path, arguments: Sequence[str], recorder: GraphRecorder) -> str:
    """How it ended."""
    before = sys.argv[:], sys.path[:]
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.absolute().parent))
    try:
        return run_recorded(lambda: runpy.run_path(str(script), run_name="__main__"), recorder)
    finally:
        sys.argv[:], sys.path[:] = before


def run_recorded(program: Callable[[], object], recorder: GraphRecorder, *, unnamed: bool = True) -> str:
    """Run `program` up to its first optimizer step; how it ended. unnamed: also the graphs of a torch.compile that
    names no back end, or Inductor. Raises what it raises, but for an exit without an error."""
    before = torch.compile, GradScaler.step

    def stop(*_: Any, **__: Any) -> None:
        raise StopCapture("at the first optimizer step")

    def before_step(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:  # the forward and backward passes are in it: Lightning's are, LBFGS'
            with torch.enable_grad():
                closure()
        stop()

    hook = register_optimizer_step_pre_hook(before_step)
    torch.compile = compile_with_backend(recorder, BACKENDS if unnamed else BACKENDS[:1])
    GradScaler.step = stop  # type: ignore[method-assign]  # its optimizer may be left out, for an overflow
    try:
        program()
        return "at its end"
    except StopCapture as enough:
        return str(enough)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return "at its end"
    finally:
        hook.remove()
        torch.compile, GradScaler.step = before  # type: ignore[method-assign]
