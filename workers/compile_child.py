"""Steps 7 to 9 in one killable process: a request's canonical bytes in, an unsigned artifact out.

This is the engine that a fork server loads: `preload` runs once in the server, before it forks; `describe`, `missing`,
`prepare` and `compile_graph` run in children of it. The request was checked by the gateway and is checked again here,
on the machine that will run the compiler on it.
"""

from __future__ import annotations

import gc
import multiprocessing
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from ..compiler import decoding, tuning, wire
from ..compiler.errors import MalformedRequest
from ..compiler.kernel_store import Exchange
from ..compiler.search_order import SearchOrder
from .frames import with_room

_TRIAL = '#include <cmath>\n#include <Python.h>\nextern "C" double tried(double x) { return std::sqrt(x); }\n'
_COLLECTIONS = (2_000_000, 50, 1_000)
"""gc.set_threshold for one compile. A graph of a dozen layers leaves 1.4 million objects, two thirds of them garbage of
100 MB; to look through them as they come took a tenth of its time. A larger graph's are still collected."""


def preload() -> None:
    """Import torch and Inductor, without initialising CUDA."""
    from ..compiler import check, pipeline  # noqa: F401 (check: so that children need not import it)

    pipeline.preload()


def describe(kind: Literal["cpu", "cuda"]) -> tuple[wire.Toolchain, wire.Target]:
    """What this process builds with, and for. Initialises CUDA for `cuda`."""
    from ..compiler.toolchain import local_target, local_toolchain

    return local_toolchain(), local_target(kind)


def missing(kind: Literal["cpu", "cuda"]) -> str:
    """What a compile needs and does not find, shut in as this process is; '' if all is there."""
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if compiler is None:
        return "there is no C++ compiler"
    order = [
        compiler,
        "-shared",
        "-fPIC",
        f"-I{sysconfig.get_path('include')}",
        "-o",
        "tried.so",
        "-x",
        "c++",
        "-",
    ]
    built = subprocess.run(order, input=_TRIAL, capture_output=True, text=True, timeout=60)
    if built.returncode != 0:
        return f"{compiler} does not work: {built.stderr.strip()[-300:]}"
    return _gpu_missing() if kind == "cuda" else ""


def _gpu_missing() -> str:
    import torch

    multiprocessing.get_context("fork").Lock()  # for Inductor's pool of Triton compilers
    held = torch.ones(1 << 20, device="cuda")
    total = int(held.mul_(2).sum().item())
    return "" if total == 2 << 20 else f"the GPU adds 2 a million times and gets {total}"


class _Aim(Struct):
    """All of a request that says what must be prepared."""

    target: wire.Target


def preparation(request: bytes) -> str:
    """A name for what jobs like this one share and `prepare` makes; '' if there is nothing."""
    from ..compiler import headers

    try:
        return headers.name_for(decoding.from_msgpack(request, type=_Aim).target)
    except msgspec.MsgspecError:
        return ""  # the job will say what is wrong with it


def prepare(request: bytes, limits: wire.Limits, shared: Path) -> None:
    """Make it, in a process that only the worker's own code runs in."""
    from ..compiler import headers

    order = _order(request)
    if order is not None:
        headers.build_for_searches(order, shared)
    else:
        headers.build(_checked(request, limits), shared)


def compile_graph(
    request: bytes,
    *,
    key: str,
    worker: str,
    workdir: Path,
    limits: wire.Limits,
    progress: Callable[[wire.Stage, str], None],
    kernels: Exchange | None = None,
    shared: Path | None = None,
    ask: tuning.Ask | None = None,
) -> bytes:
    """Decode, check against `limits` and compile. `shared`: what `prepare` made. Raises RelayError subclasses."""
    from ..compiler import headers
    from ..compiler.pipeline import compile_request

    graph_request = _checked(request, limits)
    gc.set_threshold(*_COLLECTIONS)
    with headers.borrowed(shared, workdir / "headers"):
        return with_room(
            lambda: compile_request(
                graph_request,
                key=key,
                worker=worker,
                workdir=workdir,
                progress=progress,
                kernels=kernels,
                ask=ask,
            )
        )


def search(
    request: bytes,
    *,
    worker: str,
    workdir: Path,
    limits: wire.Limits,
    progress: Callable[[wire.Stage, str], None],
    kernels: Exchange | None = None,
    shared: Path | None = None,
    ask: tuning.Ask | None = None,
) -> bytes:
    """Search what `ask` hands out, as a SearchOrder says; b'' once it is over. Raises RelayError subclasses."""
    from ..compiler import headers, searcher

    order = _order(request)
    if order is None:
        raise MalformedRequest("the order of a search does not match its schema")
    if ask is None:
        raise MalformedRequest("a searcher needs somebody to ask")
    asking = ask
    with headers.borrowed(shared, workdir / "headers"):
        with_room(lambda: searcher.serve(order, asking, workdir=workdir, progress=progress, kernels=kernels))
    return b""


def _order(request: bytes) -> SearchOrder | None:
    """What a search's request says; None for a compile's."""
    try:
        return decoding.from_msgpack(request, type=SearchOrder)
    except msgspec.MsgspecError:
        return None


def _checked(request: bytes, limits: wire.Limits) -> wire.GraphRequest:
    from ..compiler import check

    try:
        graph_request = decoding.from_msgpack(request, type=wire.GraphRequest)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"request does not match schema {wire.SCHEMA}: {error}") from None
    check.check(graph_request, limits)
    return graph_request
