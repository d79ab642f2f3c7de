"""Exports a trained model to files that run without Python (AOTInductor, TorchScript, ExecuTorch), each checked
against eager.

It runs on a worker (rank_main.py) or in the user's process (`torchrelay export --local`). The files `export.json`
(options.ExportManifest) and `example.pt` are written too: {"inputs": [...], "outputs": [...]} of eager, as
C++ reads it with torch::pickle_load.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import platform
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from ...compiler.errors import ExportFailed
from ...compiler.graph.toolchain import local_target
from ...compiler.request import schema
from ...compiler.torch_internals import cpp
from ...compiler.torch_internals.inductor import aot_inductor
from . import executorch_program
from .checks import ProgramShapes, checked, leaves, shapes_of, tensors_of
from .options import (
    EXAMPLE_FILE,
    META_FILE,
    TARGETS,
    DynamicSize,
    EagerComparison,
    ExportedFile,
    ExportManifest,
    ExportOptions,
)
from .weights import load_weights

Say = Callable[[str], None]


class _Model(Struct, frozen=True):
    """The submitter's model on a device, with its weights."""

    module: torch.nn.Module
    example: tuple[torch.Tensor, ...]
    dynamic: Any
    device: torch.device


def export(options: ExportOptions, folder: Path, *, say: Say) -> ExportManifest:
    """Write all files into the existing `folder`, or none. Raises ExportFailed or errors of the submitter."""
    if options.format == "pte":
        executorch_program.require_executorch()
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as draft:
        manifest = _export(options, Path(draft), say)
        for path in sorted(Path(draft).iterdir(), key=lambda path: path.name == META_FILE):  # last
            path.replace(folder / path.name)
    return manifest


def _export(options: ExportOptions, folder: Path, say: Say) -> ExportManifest:
    model, weights = _made(options, say)
    made: list[ExportedFile] = []
    left_out: list[str] = []
    manifest: ExportManifest | None = None
    for kind in ("cpu", "cuda"):
        targets = [name for name in dict.fromkeys(options.targets) if (name == "cuda") == (kind == "cuda")]
        if not targets:
            continue
        here = _on(model, kind)
        program, names = _program(here, options.dynamic)
        shapes = shapes_of(program)
        if manifest is None:
            inputs, outputs = tensors_of(program, shapes, names)
            sizes = {names.get(symbol, str(symbol)): bounds for symbol, bounds in shapes.ranges.items()}
            manifest = ExportManifest(
                name=options.name,
                function=options.function,
                weights=weights,
                torch=str(torch.__version__),
                created=time.time(),
                parameters=sum(p.numel() for p in here.module.parameters()),
                inputs=inputs,
                outputs=outputs,
                sizes=sizes,
                files=[],
            )
            _write_example(here, folder / EXAMPLE_FILE)
        if options.format in ("aoti", "both"):
            for name in targets:
                file = folder / f"{options.name}-{name}.pt2"
                made.append(_package(program, here, shapes, name, file))
                say(_line(made[-1]))
        if options.format == "pte":
            made.append(_executorch(program, here, shapes, folder / f"{options.name}.pte"))
            say(_line(made[-1]))
        if options.format in ("torchscript", "both"):
            file = folder / f"{options.name}-{kind}.torchscript.pt"
            try:
                made.append(_torchscript(here, shapes, kind, file))
                say(_line(made[-1]))
            except ExportFailed as error:
                file.unlink(missing_ok=True)
                if options.format != "both":
                    raise
                left_out.append(f"TorchScript for {kind}: {error.message}")
                say(f"left out: {left_out[-1]}")
    if manifest is None:
        raise ExportFailed("there is no target", hint=f"Targets are {', '.join(TARGETS)}")
    manifest = msgspec.structs.replace(manifest, files=made, left_out=left_out)
    (folder / META_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return manifest


def _line(file: ExportedFile) -> str:
    worst = max(check.difference for check in file.checks)
    how = f" ({file.how})" if file.how else ""
    return (
        f"{file.name}{how}: {file.bytes / 1e6:.1f} MB in {file.seconds:.1f} s; {len(file.checks)} runs compared with "
        f"eager, differences up to {worst:.2g} (allowed {file.checks[0].tolerance:g})"
    )


# --- the submitter's model ---------------------------------------------------------------------------------


def _made(options: ExportOptions, say: Say) -> tuple[_Model, str]:
    module_name, _, path = options.function.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Any = importlib.import_module(module_name)
        for part in path.split("."):
            function = getattr(function, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ExportFailed(f"there is no {options.function}: {error}") from None
    found = function()
    hint = "Return (model, example inputs) or (model, example inputs, dynamic shapes)"
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[0], torch.nn.Module):
        raise ExportFailed(f"{options.function} returned no model with example inputs", hint=hint)
    model, example, *rest = found
    example = (example,) if isinstance(example, torch.Tensor) else example
    if (
        not isinstance(example, tuple | list)
        or not example
        or not all(isinstance(one, torch.Tensor) for one in example)
    ):
        raise ExportFailed(f"{options.function}'s example inputs are not a tuple of tensors", hint=hint)
    if rest and rest[0] is not None and options.dynamic:
        raise ExportFailed(
            f"{options.function} names dynamic shapes, and so does --dynamic", hint="Leave out one"
        )
    weights = load_weights(model, options.checkpoint, say) if options.checkpoint else options.function
    tensors = tuple(tensor.detach().cpu() for tensor in example)
    return _Model(model.eval(), tensors, rest[0] if rest else None, torch.device("cpu")), weights


def _on(model: _Model, kind: str) -> _Model:
    if kind == "cpu":
        return msgspec.structs.replace(model, module=model.module.cpu())
    if not torch.cuda.is_available():
        raise ExportFailed("a target is cuda, and there is no GPU here", hint="Run it as a job with a GPU")
    return msgspec.structs.replace(
        model,
        module=copy.deepcopy(model.module).cuda(),
        example=tuple(tensor.cuda() for tensor in model.example),
        device=torch.device("cuda", torch.cuda.current_device()),
    )


def _write_example(model: _Model, file: Path) -> None:
    with torch.no_grad():
        outputs = model.module(*[tensor.clone() for tensor in model.example])
    tensors = [one.cpu() for one in leaves(outputs) if isinstance(one, torch.Tensor)]
    torch.save({"inputs": [tensor.cpu() for tensor in model.example], "outputs": tensors}, file)


# --- torch.export ------------------------------------------------------------------------------------------


def _program(
    model: _Model, dynamic: Sequence[DynamicSize]
) -> tuple[torch.export.ExportedProgram, dict[Any, str]]:
    """The program, and the names that its symbols were given."""
    names = _input_names(model)
    if dynamic:
        wanted, places = _dynamic_shapes(model, names, dynamic)
    else:
        wanted, places = model.dynamic, _named_places(names, model.dynamic)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model.module, model.example, dynamic_shapes=wanted)
    except Exception as error:  # torch.export has dozens of kinds, and their messages are clear
        raise ExportFailed(
            f"torch.export refuses the model: {' '.join(str(error).split())[:1500]}",
            hint="docs/export.md says what can be exported",
        ) from error
    shapes = shapes_of(program)
    if len(shapes.names) != len(model.example):
        raise ExportFailed(
            f"the exported program takes {len(shapes.names)} tensors, not {len(model.example)}"
        )
    known = {
        symbol: name
        for (position, dimension), name in places.items()
        for symbol in shapes.ranges
        if shapes.dimensions[position][dimension] == symbol
    }
    return program, known


def _input_names(model: _Model) -> list[str]:
    """forward's own names of the example's inputs; of `*rows`: rows_0, rows_1 ..."""
    names = []
    for name, value in _arguments(model).items():
        names += [f"{name}_{n}" for n in range(len(value))] if isinstance(value, tuple) else [name]
    return names


def _arguments(model: _Model) -> dict[str, Any]:
    try:
        return inspect.signature(model.module.forward).bind(*model.example).arguments
    except TypeError as error:
        raise ExportFailed(
            f"the model's forward does not take the {len(model.example)} example inputs: {error}"
        ) from None


def _named_places(names: Sequence[str], shapes: Any) -> dict[tuple[int, int], str]:
    """Names of the torch.export.Dim in a function's own dynamic shapes, by (input, dimension)."""
    listed = [shapes.get(name) for name in names] if isinstance(shapes, Mapping) else list(shapes or [])
    return {
        (position, dimension): size.__name__
        for position, of in enumerate(listed)
        for dimension, size in (of.items() if isinstance(of, Mapping) else enumerate(of or ()))
        if isinstance(size, torch.export.Dim)
    }


def _dynamic_shapes(
    model: _Model, names: Sequence[str], dynamic: Sequence[DynamicSize]
) -> tuple[dict[str, Any], dict[tuple[int, int], str]]:
    """Dynamic shapes for torch.export, and the name of each varying size, by (input, dimension)."""
    wanted: list[dict[int, Any]] = [{} for _ in names]
    places: dict[tuple[int, int], str] = {}
    for one in dynamic:
        size = torch.export.Dim(one.name, min=one.low, max=one.high)
        at = one.at or [(name, 0) for name, tensor in zip(names, model.example, strict=True) if tensor.dim()]
        for name, dimension in at:
            if name not in names:
                raise ExportFailed(f"--dynamic {one.name}: there is no input {name}", hint=f"Inputs: {names}")
            position = names.index(name)
            shape = list(model.example[position].shape)
            if dimension >= len(shape) or not max(one.low, 2) <= shape[dimension] <= one.high:
                raise ExportFailed(
                    f"--dynamic {one.name} is at {name}.{dimension}, and the example's {name} has shape {shape}",
                    hint=f"Give an example whose size there lies between {max(one.low, 2)} and {one.high}",
                )
            wanted[position][dimension] = size
            places[position, dimension] = one.name
    left = iter(wanted)
    arguments = {
        name: tuple(next(left) for _ in value) if isinstance(value, tuple) else next(left)
        for name, value in _arguments(model).items()
    }
    return arguments, places


# --- formats -----------------------------------------------------------------------------------------------


def _package(
    program: torch.export.ExportedProgram, model: _Model, shapes: ProgramShapes, name: str, file: Path
) -> ExportedFile:
    begin = time.perf_counter()
    own = local_target("cuda" if name == "cuda" else "cpu")
    if name == "cuda":
        _check_toolkit()
    with _compiled_for(name, own) as instructions:
        try:
            aot_inductor.build_package(program, file, {})
        except Exception as error:  # Inductor's, g++'s and ptxas'
            raise ExportFailed(
                f"AOTInductor cannot compile it for {name}: {' '.join(str(error).split())[:1500]}"
            ) from error
        seconds = time.perf_counter() - begin
        if killed := aot_inductor.signal_on_load(file):
            raise ExportFailed(
                f"PyTorch cannot load what AOTInductor made for {name}: a process that only does that ends with "
                f"{signal.Signals(killed).name}",
                hint="Use another g++ (CXX): this one's code or C++ library is not compatible with torch's",
            )
        run = aot_inductor.load_package(file)  # inside: else Inductor tests the processor for 4 s
    checks = checked(file.name, run, model.module, model.example, shapes, model.device)
    device = f"{own.name}, {own.capability}" if name == "cuda" else ""
    return _file(file, "aoti", name, seconds, checks, instructions=instructions, device=device)


def _check_toolkit() -> None:
    """A package's C++ calls CUDA's driver; what torch.compile builds does not, and needs no toolkit."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        raise ExportFailed(
            "AOTInductor needs CUDA's headers, and there is no CUDA toolkit here",
            hint="Install one on the node, or set CUDA_HOME there",
        )


@contextlib.contextmanager
def _compiled_for(name: str, own: schema.Target) -> Iterator[list[str]]:
    """Inductor's C++ for a target of the table; the instruction sets that it may use."""
    asked = TARGETS[name]
    if platform.machine() != "x86_64":
        if asked is not None:
            raise ExportFailed(f"{name} is for x86-64, and this is {platform.machine()}")
        yield []
        return
    if missing := sorted(set(asked or ()) - set(own.cpu)):
        raise ExportFailed(
            f"{name} needs {' '.join(missing)}, which this processor lacks: it could not be checked",
            hint="Run it as a job on a node that has them",
        )
    chosen = sorted(own.cpu if asked is None else asked)
    with cpp.cpu_target(msgspec.structs.replace(own, cpu=chosen)):
        yield chosen


def _torchscript(model: _Model, shapes: ProgramShapes, kind: str, file: Path) -> ExportedFile:
    """By torch.jit.script, else by torch.jit.trace. Raises ExportFailed with both reasons."""
    reasons = []
    jit: Any = torch.jit
    ways: dict[str, Callable[[], Any]] = {
        "scripted": lambda: jit.script(model.module),
        "traced": lambda: jit.trace(model.module, model.example, check_trace=False),
    }
    for how, make in ways.items():
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                jit.save(make(), str(file))
                seconds = time.perf_counter() - begin
                run = jit.load(str(file))
            checks = checked(f"{file.name}, {how},", run, model.module, model.example, shapes, model.device)
        except ExportFailed as error:
            reasons.append(error.message)
        except Exception as error:  # the compiler's own, of many kinds
            reasons.append(f"it cannot be {how}: {' '.join(str(error).split())[:300]}")
        else:
            return _file(file, "torchscript", kind, seconds, checks, how=how)
    raise ExportFailed("; ".join(reasons))


def _executorch(
    program: torch.export.ExportedProgram, model: _Model, shapes: ProgramShapes, file: Path
) -> ExportedFile:
    begin = time.perf_counter()
    try:
        how = executorch_program.build_program(program, file)
        seconds = time.perf_counter() - begin
        run = executorch_program.load_program(file)
    except Exception as error:  # ExecuTorch's, of many kinds
        raise ExportFailed(f"ExecuTorch refuses the model: {' '.join(str(error).split())[:1500]}") from error
    checks = checked(file.name, run, model.module, model.example, shapes, model.device)
    return _file(file, "pte", "cpu", seconds, checks, how=how)


def _file(
    file: Path,
    format: Any,
    target: str,
    seconds: float,
    checks: list[EagerComparison],
    *,
    instructions: Sequence[str] = (),
    device: str = "",
    how: str = "",
) -> ExportedFile:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return ExportedFile(
        name=file.name,
        format=format,
        target=target,
        bytes=file.stat().st_size,
        digest=digest,
        seconds=round(seconds, 3),
        checks=checks,
        instructions=list(instructions),
        device=device,
        how=how,
    )
