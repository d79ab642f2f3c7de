"""Stage 8: Inductor compiles a rebuilt graph into a serialized callable, C++ libraries and guards."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec
import sympy
import torch
from msgspec import Struct

from ..api import compiles
from ..errors import CompileFailed, CompileKilled, DataDependent, RelayError, SpecializeInputs, Unsupported
from ..graph.ambient import apply_ambient
from ..graph.configuration import options_of
from ..request import schema, size_expr
from ..search.in_compile import CompileSearch
from ..torch_internals import cpp, devices
from ..torch_internals.algorithm_selection import padding_candidates, selector_cache
from ..torch_internals.dynamo import backend_interface, symbolic_shapes, tracing
from ..torch_internals.inductor import compile_fx, config, lowering_speed, naming, subgraphs
from ..tuning.candidates import Candidates
from .rebuilt_graph import RebuiltGraph


class CompiledGraph(Struct, frozen=True):
    """The result of one compile. `run` is the live callable, for verification."""

    run: Callable[..., Any]
    bundle: bytes
    building: cpp.CppLibraries
    """The C++ kernels. The C++ compiler may still be working on some: `encode_libraries` waits for them."""
    guards: list[str]
    halves: dict[int, torch.fx.GraphModule]
    """The graphs that AOTAutograd gave to Inductor, by the id of their compiled form; empty without `keep_halves`."""
    layers: int = 0
    """How many equal layers are calls of one subgraph."""


def compile_rebuilt(
    rebuilt: RebuiltGraph,
    request: schema.GraphRequest,
    *,
    threads: int,
    progress: Callable[[compiles.Stage, str], None],
    search: CompileSearch | None = None,
    keep_halves: bool = False,
) -> CompiledGraph:
    """Compile forward and backward.

    threads: parallel g++ and Triton compilers. search: chooses among an operator's candidates; without it Inductor
    does. Raises CompileFailed with the compiler's own message, CompileKilled if the C++ compiler could not work,
    what `search` raises, and compile_fx.DryRunFinished if `search` asks for a dry run.
    """
    halves: dict[int, torch.fx.GraphModule] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.aot_config(config.AOT_SERIALIZABLE))
        stack.enter_context(config.aot_config(dict(request.aot_options)))
        stack.enter_context(cpp.cpu_target(request.target))
        stack.enter_context(naming.content_addressed_kernel_names())
        stack.enter_context(lowering_speed.faster_lowering())
        stack.enter_context(subgraphs.keeping_memory_of_subgraphs())
        stack.enter_context(subgraphs.numbering_seeds(rebuilt.gm))
        building = stack.enter_context(cpp.recording_cpp_libraries(request.target))
        if search is not None:

            def chosen(candidates: Candidates) -> int:
                return search.choose(candidates, building.settle)

            stack.enter_context(
                selector_cache.choosing_algorithms(chosen, expected_candidate=search.expected_candidate)
            )
            stack.enter_context(padding_candidates.choosing_padding(chosen))
        stack.enter_context(tracing.tracing_context(rebuilt.fake_mode))
        stack.enter_context(apply_ambient(request.ambient))
        options = options_of(request, threads)
        try:
            run = compile_fx.compile_graph(
                rebuilt.gm,
                rebuilt.inputs,
                options,
                on_lowering=lambda backward: progress("inductor", "backward" if backward else "forward"),
                kept=halves if keep_halves else None,
                control=search,
            )
            bundle = compile_fx.serialize(run)
        except TypeError as error:
            raise Unsupported(f"the compiled graph cannot be saved: {error}") from error
        except Exception as error:
            specialized = backend_interface.symbols_to_specialize(error) or ()
            positions = [
                position
                for position, number in rebuilt.numbers.items()
                if symbolic_shapes.symfloat_name(number) in specialized
            ]
            if positions:
                raise SpecializeInputs.at(positions) from None
            raise failure(error) from error
    return CompiledGraph(run, bundle, building, guards_of(rebuilt, request.relations), halves)


def failure(error: Exception) -> RelayError:
    """The error to report for one that Inductor raised: a RelayError among its causes, or else a new one.

    Follows __context__ as well, because Inductor raises some errors `from None`.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RelayError):
            return cause
        if backend_interface.asks_for_data(cause):
            return DataDependent(f"{type(error).__name__}: {error}")
        if devices.is_out_of_memory(cause):
            return gpu_is_full(cause)
        if (output := cpp.cpp_compiler_output(cause)) is not None:
            if refuses_source(output):
                return CompileFailed(f"{type(cause).__name__}: {complaint(output)}")
            return CompileKilled(
                f"the worker's C++ compiler could not do its work: {complaint(output)}",
                hint="It was tried twice. Compile any file with g++ on the worker: is it whole, and is there room?",
            )
        cause = cause.__cause__ or cause.__context__
    return CompileFailed(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def full_gpu_is_no_failure() -> Iterator[None]:
    """Raises CompileKilled where a GPU has no room inside the block, whatever wanted some: a CUDA context, inputs."""
    try:
        yield
    except RuntimeError as error:
        if not devices.is_out_of_memory(error):
            raise
        raise gpu_is_full(error) from error


def gpu_is_full(error: BaseException) -> CompileKilled:
    return CompileKilled(
        f"the worker's GPU has no room: {complaint(str(error))}",
        hint="Other programs use it too. Try again, or give the worker a GPU of its own",
    )


def guards_of(rebuilt: RebuiltGraph, known: Collection[str]) -> list[str]:
    """The compile's assumptions on symbolic sizes that are not in `known`, as expressions over the request's symbols.

    Guards over data-dependent symbols, which the compile itself made, are left out: they concern no input.
    """
    env = symbolic_shapes.shape_env_of(rebuilt.fake_mode)
    if env is None or not (rebuilt.symbols or rebuilt.numbers):
        return []
    symbols: dict[sympy.Symbol, str] = {
        symbol: name
        for name, value in rebuilt.symbols.items()
        if (symbol := symbolic_shapes.sym_symbol(value)) is not None
    }
    found: list[str] = []
    numbers = {symbolic_shapes.symfloat_name(number) for number in rebuilt.numbers.values()}
    for guard in symbolic_shapes.guard_expressions(env):
        if numbers & {symbol.name for symbol in guard.free_symbols}:
            raise Unsupported(f"the compile assumes {guard} of a symbolic Python number")
        if guard.free_symbols <= symbols.keys():
            text = size_expr.render(guard, symbols)
            if text not in found and text not in known:
                found.append(text)
    return found


def encode_libraries(compiled: CompiledGraph) -> tuple[bytes, dict[str, bytes]]:
    """The libraries' index member, and one member for each library. Waits until all are built.

    Raises CompileFailed with the C++ compiler's message, or CompileKilled if the compiler could not work.
    """
    members: dict[str, bytes] = {}
    index: list[tuple[list[str], str, str]] = []
    try:
        for argtypes, source, path in compiled.building.files():
            name = f"cpp/{len(members)}.so"
            members[name] = path.read_bytes()
            index.append((argtypes, source, name))
    except Exception as error:
        raise failure(error) from error
    return msgspec.msgpack.encode(index), members


_CANNOT_WORK = re.compile(
    r"No space left on device|Cannot allocate memory|memory exhausted|Killed signal"
    r"|fatal error: [^:\n]*: No such file or directory|fatal error: '[^'\n]*' file not found"
)
_IN_THE_SOURCE = re.compile(
    r"^[^\s:][^:\n]*:\d+(:\d+)?: (fatal error|error|internal compiler error):|undefined reference to",
    re.MULTILINE,
)
_COMPLAINT = re.compile(r"error:|exhausted|can't write", re.IGNORECASE)
_MAX_CHARACTERS = 300


def refuses_source(output: str) -> bool:
    """Whether the same source would fail again: a diagnostic names a line of it, or an undefined reference.

    Otherwise the compiler itself could not work, and may succeed later or on another machine: there was no room, it was
    killed, or one of its programs or headers was missing. Knows the messages of GCC and Clang.
    """
    return _CANNOT_WORK.search(output) is None and _IN_THE_SOURCE.search(output) is not None


def complaint(output: str) -> str:
    """The first line that says what was wrong; if there is none, the first line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if _CANNOT_WORK.search(line) or _COMPLAINT.search(line)]
    return next(iter([*telling, *lines]), "it said nothing")[:_MAX_CHARACTERS]
