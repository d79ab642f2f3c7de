"""Steps 7 to 9 in one killable process: a request's canonical bytes in, an unsigned artifact out.

This is the engine that a fork server loads: `preload` runs once in the server, before it forks; `describe`
and `compile_graph` run in children of it. The request was checked by the gateway and is checked again here,
on the machine that will run the compiler on it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from ..compiler import wire
from ..compiler.errors import MalformedRequest
from ..compiler.kernel_store import Exchange

_COLLECTIONS = (100_000, 50, 1_000)
"""gc.set_threshold for one compile: graphs and expressions live on to its end, and looking through all of them again
and again took a seventh of its time. What dies young is still collected."""


def preload() -> None:
    """Import torch and Inductor, without initialising CUDA."""
    from ..compiler import check, pipeline  # noqa: F401 (check: so that children need not import it)

    pipeline.preload()


def describe(kind: Literal["cpu", "cuda"]) -> tuple[wire.Toolchain, wire.Target]:
    """What this process builds with, and for. Initialises CUDA for `cuda`."""
    from ..compiler.toolchain import local_target, local_toolchain

    return local_toolchain(), local_target(kind)


def compile_graph(
    request: bytes,
    *,
    key: str,
    worker: str,
    workdir: Path,
    limits: wire.Limits,
    progress: Callable[[wire.Stage, str], None],
    kernels: Exchange | None = None,
) -> bytes:
    """Decode, check against `limits` and compile. Raises RelayError subclasses."""
    from ..compiler import check
    from ..compiler.pipeline import compile_request

    try:
        graph_request = msgspec.msgpack.decode(request, type=wire.GraphRequest)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"request does not match schema {wire.SCHEMA}: {error}") from None
    check.check(graph_request, limits)
    gc.set_threshold(*_COLLECTIONS)
    return compile_request(
        graph_request, key=key, worker=worker, workdir=workdir, progress=progress, kernels=kernels
    )
