"""Stages 7 to 9 in one killable process: a request's canonical bytes in, an unsigned artifact out.

This is the engine that a fork server loads: `preload` and `warm_up` run once in the server; `describe`, `others`,
`missing`, `prepare` and `compile_graph` run in children of it. The request was checked by the gateway and is checked
again here, on the machine that will run the compiler on it.
"""

from __future__ import annotations

import gc
import multiprocessing
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ...compiler import decoding
from ...compiler.api import compiles
from ...compiler.api.tuning.jobs import SearchJobSpec
from ...compiler.errors import MalformedRequest
from ...compiler.kernel_store.libraries import KernelExchange
from ...compiler.request import codec, schema
from ...compiler.tuning import queries
from ..settings import EqualLayers

T = TypeVar("T")

_TRIAL = '#include <cmath>\n#include <Python.h>\nextern "C" double tried(double x) { return std::sqrt(x); }\n'
_COLLECTIONS = (2_000_000, 50, 1_000)
"""gc.set_threshold for one compile. A graph of a dozen layers leaves 1.4 million objects, two thirds of them garbage
(100 MB); collecting them early took a tenth of the compile. The garbage of larger graphs is still collected."""

_FRAME_WORDS = (4 << 20) // 8
"""A frame of 4 MiB gets a chunk of 8, the next power of two; the rest is for the frames of its calls. Only pages that
are used take memory."""


def preload() -> None:
    """Import torch and Inductor, without initialising CUDA or NVML. With a torch that is not supported it does nothing:
    `missing` says so before any job comes."""
    from ...compiler.torch_internals.loading.preload import counting_gpus_in_a_fork

    with counting_gpus_in_a_fork():
        if _unsupported_torch():
            return
        from ...compiler.pipeline import pipeline

        pipeline.preload()


def warm_up(folder: Path) -> None:
    """Do once what a compile would do again in each child, with temporary files in `folder`."""
    from ...compiler.torch_internals.loading.preload import counting_gpus_in_a_fork

    with counting_gpus_in_a_fork():
        if not _unsupported_torch():
            from ...compiler.pipeline import pipeline

            pipeline.compile_once(folder)


def _unsupported_torch() -> str:
    """The first private symbol of PyTorch's that a compile needs and this torch lacks; '' if there is none."""
    from ...compiler.torch_internals import compatibility

    return compatibility.refusal("load", "capture", "compile")


def describe(kind: Literal["cpu", "cuda"]) -> tuple[schema.Toolchain, schema.Target]:
    """The toolchain and the target of this process. Initialises CUDA for `cuda`."""
    from ...compiler.graph.toolchain import local_target, local_toolchain

    return local_toolchain(), local_target(kind)


def others(kind: Literal["cpu", "cuda"]) -> list[schema.OtherTarget]:
    """The CPU targets that this process builds for beside the machine's own."""
    from ...compiler.graph.toolchain import other_targets

    return other_targets() if kind == "cpu" else []


def missing(kind: Literal["cpu", "cuda"]) -> str:
    """What a compile needs and does not find in this process's sandbox; '' if nothing is missing."""
    if unsupported := _unsupported_torch():
        return unsupported
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if compiler is None:
        return "there is no C++ compiler"
    include = sysconfig.get_path("include")
    command = [compiler, "-shared", "-fPIC", f"-I{include}", "-o", "tried.so", "-x", "c++", "-"]
    built = subprocess.run(command, input=_TRIAL, capture_output=True, text=True, timeout=60)
    if built.returncode != 0:
        return f"{compiler} does not work: {built.stderr.strip()[-300:]}"
    return _gpu_missing() if kind == "cuda" else ""


def _gpu_missing() -> str:
    import torch

    multiprocessing.get_context("fork").Lock()  # for Inductor's pool of Triton compilers
    held = torch.ones(1 << 20, device="cuda")
    total = int(held.mul_(2).sum().item())
    return "" if total == 2 << 20 else f"the GPU adds 2 a million times and gets {total}"


def preparation(target: schema.Target) -> str:
    """A name for what jobs for `target` share and `prepare` makes; '' if there is nothing."""
    from ...compiler.pipeline import precompiled_header

    return precompiled_header.name_for(target)


def prepare(target: schema.Target, shared: Path) -> None:
    """Make it, in a process that runs only the worker's own code."""
    from ...compiler.graph.toolchain import local_toolchain
    from ...compiler.pipeline import precompiled_header

    precompiled_header.build(target, local_toolchain().torch, shared)


def compile_graph(
    request: bytes,
    *,
    key: str,
    worker: str,
    workdir: Path,
    limits: codec.Limits,
    progress: Callable[[compiles.Stage, str], None],
    kernels: KernelExchange | None = None,
    shared: Path | None = None,
    ask: queries.SendQuery | None = None,
    equal_layers: EqualLayers = "cpu",
    memory: int = 0,
) -> bytes:
    """Decode, check against `limits` and compile, or lower to the levels that it names. `shared`: what `prepare` made.
    equal_layers: for which targets these are lowered once. memory: bytes that the job may hold.
    Raises RelayError subclasses."""
    from ...compiler.pipeline import precompiled_header
    from ...compiler.pipeline.pipeline import compile_request

    graph_request = _checked(request, limits)
    gc.set_threshold(*_COLLECTIONS)
    with precompiled_header.borrowed(shared, workdir / "headers"):
        if graph_request.levels:
            from ...compiler.pipeline.lowered import lower_request

            return lower_request(graph_request, key=key, worker=worker, workdir=workdir, progress=progress)
        return with_frame_stack(
            lambda: compile_request(
                graph_request,
                key=key,
                worker=worker,
                workdir=workdir,
                progress=progress,
                kernels=kernels,
                ask=ask,
                lower_layers_once=equal_layers in ("all", graph_request.target.kind),
                memory=memory,
            )
        )


def search(
    request: bytes,
    *,
    worker: str,
    workdir: Path,
    limits: codec.Limits,
    progress: Callable[[compiles.Stage, str], None],
    kernels: KernelExchange | None = None,
    shared: Path | None = None,
    ask: queries.SendQuery | None = None,
) -> bytes:
    """Search the tasks that `ask` returns, as the SearchJobSpec says; returns b''. Raises RelayError subclasses."""
    from ...compiler.pipeline import precompiled_header
    from ...compiler.search import search_worker

    order = _order(request)
    if order is None:
        raise MalformedRequest("the order of a search does not match its schema")
    if ask is None:
        raise MalformedRequest("a searcher needs a way to ask the service")
    asking = ask
    with precompiled_header.borrowed(shared, workdir / "headers"):
        with_frame_stack(
            lambda: search_worker.serve(order, asking, workdir=workdir, progress=progress, kernels=kernels)
        )
    return b""


def with_frame_stack(body: Callable[[], T]) -> T:
    """`body()`, with room for all of Python's frames (thousands) in one chunk of memory.

    Python stores frames in chunks of 16 KiB and frees a chunk when the call that began it returns (`push_chunk` and
    `_PyThreadState_PopFrame` in CPython's Python/pystate.c). A loop that calls across a chunk's end maps and unmaps
    16 KiB in every iteration: in a large compile that was a quarter of a million pages, depending on how deep the loop
    began.
    """

    def large() -> T:
        return body()

    large.__code__ = large.__code__.replace(co_stacksize=_FRAME_WORDS)
    return large()


def _order(request: bytes) -> SearchJobSpec | None:
    """The SearchJobSpec in a search's request; None for a compile's."""
    try:
        return decoding.from_msgpack(request, type=SearchJobSpec)
    except msgspec.MsgspecError:
        return None


def _checked(request: bytes, limits: codec.Limits) -> schema.GraphRequest:
    from ...compiler.request import validate

    try:
        graph_request = decoding.from_msgpack(request, type=schema.GraphRequest)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"request does not match schema {schema.SCHEMA}: {error}") from None
    validate.check_request(graph_request, limits)
    return graph_request
